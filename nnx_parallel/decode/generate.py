"""Generates tokens in one compiled program: the cache, the loop and the sampling stay on the devices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_parallel.core.checked import check_arguments, is_random_key
from nnx_parallel.core.mesh import no_mesh, own_mesh
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.decode.bound import Bound
from nnx_parallel.decode.loops import Generated
from nnx_parallel.decode.options import Args, Call, Options, Used
from nnx_parallel.decode.sampling import Sampling
from nnx_parallel.errors import DecodeError


class Generator:
  """Compiled generation; made by `generator`.

  Attributes:
    options: the options of the generator.
    layers: a text to print, about the program that was compiled or lowered last. It says how the program
      reads prompts with `prefill` and, on a mesh with Explicit axes, on which axes the program computes.
  """

  def __init__(self, options: Options):
    self.options, self.layers = options, Used()
    self._bounds: weakref.WeakKeyDictionary[nnx.Pytree, Bound] = weakref.WeakKeyDictionary()

  @check_arguments(DecodeError)
  def __call__(
    self,
    model: nnx.Module,
    prompts: AnyArray,
    *,
    lengths: AnyArray | None = None,
    key: AnyArray | None = None,
    requests: AnyArray | None = None,
    prefix: AnyArray | None = None,
  ) -> Generated:
    """Continues each prompt.

    The call resets the `nnx.Cache` Variables of the model to zeros, donates them, and leaves the last state
    of the cache in them. With slots, they do not change. Nothing else in the model changes.

    Args:
      model: a live module, on any mesh.
      prompts: integers of global shape `(batch, width)`; host arrays are sharded like the batch of the
        model's plan.
      lengths: the number of tokens of each prompt, `(batch,)`, at least 1; None if no prompt is padded.
      key: `jax.random.key(...)`; required for sampling.
      requests: a number for each row, `(batch,)`, which is folded into the key of the row. A row with the
        same number and prompt gets the same tokens in any batch. None uses the index of the row.
      prefix: integers `(n,)`, the tokens that come before each prompt. One row on each shard reads them once,
        and every row starts with the resulting cache.

    Returns:
      The new tokens of each row, and their number.

    Raises:
      DecodeError: the prompts, the lengths, the cache or the key do not fit the model or each other.
    """
    bound, args = self._prepare(model, prompts, lengths, key, requests, prefix)
    with own_mesh(bound.binding.mesh):
      return bound(args)

  @check_arguments(DecodeError, every=range(1, 2**31))
  def stream(
    self,
    model: nnx.Module,
    prompts: AnyArray,
    *,
    lengths: AnyArray | None = None,
    key: AnyArray | None = None,
    requests: AnyArray | None = None,
    prefix: AnyArray | None = None,
    every: int = 1,
  ) -> Iterator[tuple[int, np.ndarray]]:
    """Continues each prompt, and yields the tokens on the host as they are generated.

    The tokens are the same as the tokens of a call. The caches of the model do not change, because the
    program makes its own caches. While the host reads some tokens, the devices compute the next ones.

    Args:
      model: as in a call.
      prompts: as in a call.
      lengths: as in a call.
      key: as in a call.
      requests: as in a call.
      prefix: as in a call.
      every: the number of tokens of a row that are computed before the host gets them. With a larger number,
        all tokens take less time in total, but the first tokens arrive later.

    Returns:
      An iterator of pairs: the index of a prompt, and its new tokens as an int32 array `(n,)` on the host. In
      a job of several processes, each process gets all pairs.

    Raises:
      DecodeError: as in a call.
    """
    bound, args = self._prepare(model, prompts, lengths, key, requests, prefix)
    return bound.stream(args, every)

  def _prepare(
    self,
    model: nnx.Module,
    prompts: AnyArray,
    lengths: AnyArray | None,
    key: AnyArray | None,
    requests: AnyArray | None,
    prefix: AnyArray | None,
  ) -> tuple[Bound, Args]:
    """The program, and its arguments."""
    prompts = _check_prompts(prompts)
    batch, width = prompts.shape
    one_each, of_rows = f"one integer for each of {batch} prompts", list[AnyArray | None]()
    for name, x in (("lengths", lengths), ("requests", requests)):
      fix = f"{name}=np.array([...]) of shape ({batch},)."
      of_rows.append(None if x is None else _integers(name, np.asarray(x), (batch,), one_each, fix))
    for length in [] if of_rows[0] is None else of_rows[0].tolist():
      if not 1 <= length <= width:
        raise DecodeError(
          f"a prompt has length {length}, and prompts have 1 to {width} tokens.",
          fix="start an empty prompt with the token that begins a text.",
        )
    ahead = None
    if prefix is not None:
      fix = "pass the tokens that come before all prompts, such as prefix=np.array([...])."
      ahead = _integers("the prefix", np.asarray(prefix), (None,), "integers (n,)", fix)
    if key is None and self.options.sampling.temperature:
      raise DecodeError("tokens are drawn, and no key is given.", fix="key=jax.random.key(0)")
    if key is not None and not (isinstance(key, jax.Array) and is_random_key(key)):
      raise DecodeError(f"key={key!r:.60} is not a key of JAX.", fix="key=jax.random.key(0)")
    bound = self._bound(model, prompts, 0 if ahead is None else ahead.size)
    with no_mesh():
      given = [None if x is None else bound.place(x) for x in (prompts, *of_rows)]
      given += [None if x is None else bound.place(x, by_row=False) for x in (key, ahead)]
      defaults = bound.defaults(prompts.shape)
    return bound, Args(*(d if x is None else x for x, d in zip(given, defaults, strict=True)))

  @check_arguments(DecodeError)
  def lower(
    self, model: nnx.Module, prompts: AnyArray, lengths: AnyArray | None = None
  ) -> jax.stages.Lowered:
    """Lowers the program for prompts of this shape, without running it.

    Args:
      model: a module, whose arrays may be abstract. `nxp.compile_report(generate, plan, batch=prompts)` makes
        such a module from a plan, also for a machine that you do not have.
      prompts: as in a call, or a `ShapeDtypeStruct`.
      lengths: as in a call, or a `ShapeDtypeStruct`. With `prefill`, prompts with lengths need another
        program.

    Returns:
      A `jax.stages.Lowered`; `.compile()` gives its text, memory and cost.

    Raises:
      DecodeError: as in a call.
    """
    bound = self._bound(model, prompts)
    args = bound.abstract_args(prompts.shape, padded=lengths is not None)
    with own_mesh(bound.binding.mesh):
      return bound.jitted.lower(*bound.arrays(), args)

  @check_arguments(DecodeError)
  def argument_names(self, model: nnx.Module) -> dict[str, str]:
    """Names the arrays that the program takes.

    Args:
      model: as in `lower`.

    Returns:
      A dict: the name of an argument, as JAX gives it (such as `caches[0]`) -> the path of the Variable in
      the model.
    """
    return self._bound(model).argument_names()

  @check_arguments(DecodeError)
  def as_function(
    self, model: nnx.Module, prompts: AnyArray
  ) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
    """Returns the program as a function of arrays, for `nnx_parallel.interop.export_program`.

    Args:
      model: as in `lower`.
      prompts: as in `lower`.

    Returns:
      A pair. The first element is a function of the raw arrays of the model, the arrays of its Variables, the
      prompts, the lengths, the requests and a key; it returns the fields of `Generated`, and the caches by
      the number of their Variable. The second element is the abstract arguments of this function after the
      first two.
    """
    bound = self._bound(model, prompts)
    args = bound.abstract_args(prompts.shape, padded=True)
    return bound.of_arrays, (args.prompts, args.lengths, args.requests, args.key)

  def _bound(self, model: nnx.Module, prompts: AnyArray | None = None, ahead: int = 0) -> Bound:
    """The program of a model, for prompts that fit it, with so many tokens ahead of each."""
    found = self._bounds.get(model)
    if found is None or not found.binding.watch.same():
      found = self._bounds[model] = Bound(self.options, self.layers, model)
    if prompts is not None:
      _check_prompts(prompts)
      found.check(prompts.shape, ahead)
    return found


@check_arguments(DecodeError, max_new_tokens=1, prefill=1, slots=1)
def generator(
  max_new_tokens: int,
  *,
  sampling: Sampling = Sampling(),  # noqa: B008
  stop: int | Sequence[int] = (),
  padding: Literal["right", "left"] = "right",
  call: Call | None = None,
  cache: Callable[[int, int], PyTree] | None = None,
  prefill: int = 1,
  slots: int | None = None,
) -> Generator:
  """Makes a compiled generator of tokens, for the layout that the model has.

  One program reads the prompts and writes up to `max_new_tokens` tokens for each prompt. It ends early when
  every row has reached a stop token. The cache has the layout of the `nnx.Cache` Variables of the model,
  which the plan shards like other Variables. Tokens do not depend on the layout: each row samples from its
  own key.

  Args:
    max_new_tokens: the maximum number of new tokens of a row.
    sampling: how tokens are chosen: `nxp.Sampling(temperature=..., top_k=..., top_p=...)`, which is greedy by
      default.
    stop: a token, or several tokens, each of which ends a row. The stop token is part of the result.
    padding: `"right"` or `"left"`: the side on which shorter prompts are padded.
    call: a function `call(model, tokens, position)` that returns the logits `(batch, n, vocabulary)` of int32
      tokens `(batch, n)`. `position`, an int32 scalar, is the position of the first of the `n` tokens. None
      calls `model(tokens)`.
    cache: for a model that takes its cache as an argument, a function `cache(batch, length)` that returns the
      empty cache, a pytree. Call `nxp.constrain` in this function to shard the cache.
      `call(model, tokens, position, cache)` then returns `(logits, cache)`.
    prefill: the maximum number of prompt tokens that one call of the model reads (a chunk); the `n` of `call`
      is at most this number. Without `lengths`, prompts are read in chunks of this size, and the remaining
      tokens in one smaller chunk. With `lengths`, each row has its own position, and chunks have this size,
      an eighth of it, and so on: the model is called for one row, under `jax.vmap`, with its part of the
      cache. If the generator cannot find the rows of a cache, it reads chunks up to the length of the
      shortest prompt, and then token by token. The attribute `layers` of the generator says
      how prompts are read. `nnx.MultiHeadAttention` needs no changes; other attention layers must mask later
      tokens.
    slots: the number of rows that are computed at a time, each with a separate cache and position (continuous
      batching). When a row ends, its slot takes the next prompt, so there may be any number of prompts, and
      no row waits for the longest row. With `prefill`, one slot on each shard reads a chunk of its prompt
      between two tokens of the other slots. The model is called for one row, under `jax.vmap`, so its caches
      must be for a batch of 1.

  Returns:
    A callable `(model, prompts, *, lengths, key, requests, prefix) -> Generated`.

  Raises:
    DecodeError: an option has an invalid value.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> class Sum(nnx.Module):
    ...   def __init__(self, batch):
    ...     self.total = nnx.Cache(jnp.zeros((batch,), jnp.int32))
    ...   def __call__(self, tokens):
    ...     self.total[...] += tokens[:, 0]
    ...     return nnx.one_hot(self.total[:, None] % 100, 100)
    >>> generate = nxp.generator(4)
    >>> generate(Sum(2), jnp.array([[1, 1], [5, 0]]), lengths=jnp.array([2, 1])).tokens.tolist()
    [[2, 4, 8, 16], [5, 10, 20, 40]]
  """
  if cache is not None and call is None:
    raise DecodeError(
      "cache= makes a cache, and no call= takes it.",
      fix="call=lambda model, tokens, position, cache: model(tokens, cache)",
    )
  stops: tuple[int, ...] = tuple(stop) if isinstance(stop, Sequence) else (stop,)
  call = call or (lambda model, tokens, _: model(tokens))
  return Generator(Options(max_new_tokens, sampling, stops, padding, call, cache, prefill, slots))


def _check_prompts(prompts: AnyArray) -> AnyArray:
  """Prompts, abstract or not, as int32."""
  fix = "pad shorter prompts and give lengths=."
  return _integers("prompts", prompts, (None, None), "integers (batch, width)", fix)


def _integers(name: str, x: AnyArray, shape: tuple[int | None, ...], wanted: str, fix: str) -> AnyArray:
  """An array of a shape, of which None is any length but 0, as int32; what is abstract stays as it is."""
  x = x if hasattr(x, "dtype") else np.asarray(x)
  fits = len(x.shape) == len(shape) and all(
    n if m is None else n == m for n, m in zip(x.shape, shape, strict=True)
  )
  if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
    verb = "is" if name == "the prefix" else "are"
    raise DecodeError(f"{name} {verb} {x.dtype} of shape {x.shape}, not {wanted}.", fix=fix)
  if isinstance(x, jax.ShapeDtypeStruct):
    return x
  limits = np.iinfo(np.int32)
  if isinstance(x, np.ndarray) and (x.min() < limits.min or x.max() > limits.max):
    raise DecodeError(
      f"{name}: {x.min()} to {x.max()} do not fit in int32.", fix="numbers of at most 2,147,483,647."
    )
  return x.astype(np.int32)
