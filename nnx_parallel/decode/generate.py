"""Generates tokens in one compiled program: the cache, the loop and the draws stay on the devices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_parallel.decode.bound import Args, Bound, Call
from nnx_parallel.decode.loops import Generated
from nnx_parallel.decode.sampling import Beams, Sampling
from nnx_parallel.errors import DecodeError
from nnx_parallel.layers.layers import LayerOptions, LayersUsed
from nnx_parallel.layers.pipeline import Pipeline


class Generator:
  """Compiled generation; made by `generator`.

  Attributes:
    max_new_tokens: the most tokens that a row gets.
    sampling: how a token is chosen.
    stop: tokens that end a row.
    padding: the side on which prompts are padded.
    call: the model's call.
    cache: makes the cache of a model that takes it as an argument; or None.
    prefill: the most tokens of a prompt that are read at once.
    slots: rows that are computed at a time, each with a cache of its own; None for all of the batch.
    layer_options: with the pipeline of the layers, if they are one.
    layers: what the stages of a pipeline do, when it was last compiled or lowered; print it.
  """

  def __init__(
    self,
    max_new_tokens: int,
    sampling: Sampling | Beams,
    stop: tuple[int, ...],
    padding: Literal["right", "left"],
    call: Call,
    cache: Callable[[int, int], Any] | None,
    prefill: int,
    slots: int | None,
    layer_options: LayerOptions,
  ):
    self.max_new_tokens, self.sampling, self.stop = max_new_tokens, sampling, stop
    self.padding, self.call, self.cache = padding, call, cache
    self.prefill, self.slots, self.layer_options = prefill, slots, layer_options
    self.layers = LayersUsed()
    self._bounds: weakref.WeakKeyDictionary[Any, Bound] = weakref.WeakKeyDictionary()

  def __call__(
    self, model: Any, prompts: Any, *, lengths: Any = None, key: Any = None, requests: Any = None
  ) -> Generated:
    """Continues each prompt.

    The model's `nnx.Cache` Variables are emptied (zeros) first, donated, and hold the last state after; with
    slots or beams they stay as they are. Nothing else of the model changes.

    Args:
      model: a live module, on any mesh.
      prompts: integers `(batch, width)`, global; from the host, they are split as the plan's batch.
      lengths: tokens of each prompt `(batch,)`, at least 1; None where none is padded.
      key: `jax.random.key(...)`; needed where tokens are drawn.
      requests: a number for each row `(batch,)`, folded into its key: a row with the same number and prompt
        gets the same tokens in any batch. None: the index of the row.

    Returns:
      The new tokens and how many there are of them.

    Raises:
      DecodeError: prompts, lengths, a cache or a key that do not fit.
    """
    bound, args = self._prepared(model, prompts, lengths, key, requests)
    return bound(args)

  def lower(self, model: Any, prompts: Any) -> Any:
    """Lowers the program for prompts of this shape, without running it.

    Args:
      model: a live module, whose arrays may be abstract: `nxp.compile_report(generate, plan, batch=prompts)`
        makes one from a plan, for a machine that is not here too.
      prompts: as in a call, or a `ShapeDtypeStruct`.

    Returns:
      A `jax.stages.Lowered`; `.compile()` gives its text, memory and cost.

    Raises:
      DecodeError: as in a call.
    """
    _check_prompts(prompts)
    bound = self._bound(model)
    bound.check(prompts.shape)
    return bound.jitted.lower(*bound.arrays(), bound.abstract_args(prompts.shape))

  def argument_names(self, model: Any) -> dict[str, str]:
    """Says what the arrays of the program are.

    Args:
      model: as in `lower`.

    Returns:
      Name of an argument, as JAX gives it, such as `caches[0]` -> path of the Variable in the model.
    """
    return self._bound(model).argument_names()

  def as_function(self, model: Any, prompts: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The program as a function of arrays, for `nnx_parallel.interop.program.export_program`.

    Args:
      model: as in `lower`.
      prompts: as in `lower`.

    Returns:
      A function of the arrays of the model's Variables, prompts, lengths, requests and a key, which returns
      the fields of `Generated` and the caches by the number of their Variable; and its abstract arguments
      after the first.
    """
    _check_prompts(prompts)
    bound = self._bound(model)
    bound.check(prompts.shape)
    return bound.of_arrays, tuple(bound.abstract_args(prompts.shape))

  def _prepared(self, model: Any, prompts: Any, lengths: Any, key: Any, requests: Any) -> tuple[Bound, Args]:
    prompts, lengths, requests = _checked(prompts, lengths, requests)
    if key is None and isinstance(self.sampling, Sampling) and self.sampling.temperature:
      raise DecodeError("tokens are drawn, and no key is given.", fix="key=jax.random.key(0)")
    bound = self._bound(model)
    bound.check(prompts.shape)
    given = Args(*(None if x is None else bound.place(x) for x in (prompts, lengths, requests, key)))
    defaults = bound.defaults(prompts.shape)
    return bound, Args(*(d if x is None else x for x, d in zip(given, defaults, strict=True)))

  def _bound(self, model: Any) -> Bound:
    if not isinstance(model, nnx.Pytree):
      raise DecodeError(
        f"the model is a {type(model).__name__}, not a live module.", fix="generate(model, prompts)"
      )
    found = self._bounds.get(model)
    if found is None or not found.binding.watch.same():
      found = self._bounds[model] = Bound(self, model)
    return found


def generator(
  max_new_tokens: int,
  *,
  sampling: Sampling | Beams = Sampling(),  # noqa: B008
  stop: int | Sequence[int] = (),
  padding: Literal["right", "left"] = "right",
  call: Call | None = None,
  cache: Callable[[int, int], Any] | None = None,
  prefill: int = 1,
  slots: int | None = None,
  pipeline: str | Pipeline | None = None,
  layers: str | None = None,
) -> Generator:
  """Makes a compiled generator of tokens, on the layout that the model has.

  One program reads the prompts and writes up to `max_new_tokens` for each; it ends early when every row has
  met a stop token. The layout of the cache is that of the model's `nnx.Cache` Variables, which a plan lays
  out as any other Variable. Tokens do not depend on the layout: each row draws from its own key.

  Args:
    max_new_tokens: the most tokens that a row gets.
    sampling: greedy, `nxp.Sampling(temperature=..., top_k=..., top_p=...)`, or `nxp.Beams(4)`.
    stop: a token, or several, that end a row; the token itself is returned.
    padding: the side on which shorter prompts are padded.
    call: `call(model, tokens, position)` returns the logits `(batch, n, vocabulary)` of int32 tokens
      `(batch, n)`; `position`, an int32 scalar, is that of the first of the `n`. None: `model(tokens)`.
    cache: `cache(batch, length)` makes the empty cache, a pytree, of a model that takes it as an argument;
      use `nxp.constrain` in it for its layout. `call(model, tokens, position, cache)` then returns
      `(logits, cache)`.
    prefill: the most tokens of a prompt that are read at once; `n` of `call` is this or 1. Prompts of a batch
      are read together as far as the shortest goes, the rest one by one. `nnx.MultiHeadAttention` needs no
      change for it; another attention must see that a token does not attend to those after it.
    slots: compute this many rows at a time, each with a cache and a position of its own; one that ends takes
      the next prompt. So there may be any number of prompts, and no row waits for the longest. The model is
      called for one row, under `jax.vmap`: its caches are for a batch of 1. With beams the model is called
      for one row too; beams and slots together are an error.
    pipeline: the mesh axis of stages, each of which holds some of the layers and their caches. The batch is
      cut into as many groups as there are stages, which go round: each stage always works on one of them. The
      model is called for a group, so its caches are for a batch of that size. Weights that lie elsewhere are
      moved to their stages once in each call.
    layers: dotted paths of the layers of a pipeline, as in `train_step`.

  Returns:
    A callable `(model, prompts, *, lengths, key, requests) -> Generated`.

  Raises:
    DecodeError: options that do not fit.

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
  if max_new_tokens < 1:
    raise DecodeError(f"max_new_tokens={max_new_tokens!r} makes no token.", fix="1 or more.")
  stops: tuple[Any, ...] = tuple(stop) if isinstance(stop, Sequence) else (stop,)
  wrong = [x for x in stops if isinstance(x, bool) or not isinstance(x, (int, np.integer))]
  if wrong:
    raise DecodeError(
      f"the stop token {wrong[0]!r} is a {type(wrong[0]).__name__}, and tokens are integers.",
      fix="stop=tokenizer.eos_token_id, or a sequence of such numbers.",
    )
  if padding not in ("right", "left"):
    raise DecodeError(f"padding={padding!r} is no side.", fix='padding="right" or padding="left".')
  if cache is not None and call is None:
    raise DecodeError(
      "cache= makes a cache, and no call= takes it.",
      fix="call=lambda model, tokens, position, cache: model(tokens, cache)",
    )
  for name, count in (("prefill", prefill), ("slots", slots)):
    if count is not None and count < 1:
      raise DecodeError(f"{name}={count!r} is out of range.", fix=f"{name}=1 or more.")
  if slots is not None and isinstance(sampling, Beams):
    raise DecodeError(
      "beams of a row are computed together, and slots are for rows that end at different times.",
      fix="leave slots= out, and give as many prompts at a time as the memory holds.",
    )
  if pipeline is not None and (slots is not None or isinstance(sampling, Beams)):
    each = "slots" if slots else "beams"
    raise DecodeError(
      f"with pipeline={pipeline!r} a group of rows has one cache, and {each} need one for each row.",
      fix="leave pipeline= out, and let the axis split the batch.",
    )
  if layers is not None and pipeline is None:
    raise DecodeError(f"layers={layers!r} names those of a pipeline.", fix='pipeline="stage"')
  stages = Pipeline(pipeline) if isinstance(pipeline, str) else pipeline
  if stages is not None and stages.virtual_stages > 1:
    raise DecodeError(
      f"virtual_stages={stages.virtual_stages} makes a bubble smaller, and in generation there is none.",
      fix=f"pipeline={stages.axis!r}",
    )
  return Generator(
    max_new_tokens,
    sampling,
    tuple(map(int, stops)),
    padding,
    call or _plain_call,
    cache,
    prefill,
    slots,
    LayerOptions(pattern=layers, pipeline=stages),
  )


def _plain_call(model: Any, tokens: Any, position: Any) -> Any:
  del position
  return model(tokens)


def _check_prompts(prompts: Any) -> None:
  shape, dtype = np.shape(prompts), prompts.dtype if hasattr(prompts, "dtype") else np.asarray(prompts).dtype
  if len(shape) != 2 or not all(shape) or not jnp.issubdtype(dtype, jnp.integer):
    raise DecodeError(
      f"prompts are {dtype} of shape {shape}, not integers (batch, width).",
      fix="pad shorter prompts and give lengths=.",
    )


def _checked(prompts: Any, lengths: Any, requests: Any) -> list[Any]:
  _check_prompts(prompts)
  batch, width = np.shape(prompts)
  prompts = prompts.astype(np.int32) if hasattr(prompts, "astype") else np.asarray(prompts, np.int32)
  numbers = {
    name: np.asarray(x) for name, x in (("lengths", lengths), ("requests", requests)) if x is not None
  }
  for name, x in numbers.items():
    if x.shape != (batch,) or not np.issubdtype(x.dtype, np.integer):
      raise DecodeError(
        f"{name} are {x.dtype} of shape {x.shape}, not one integer for each of {batch} prompts.",
        fix=f"{name}=np.array([...]) of shape ({batch},).",
      )
  outside = [int(x) for x in numbers.get("lengths", ()) if not 1 <= x <= width]
  if outside:
    raise DecodeError(
      f"a prompt has length {outside[0]}, and prompts have 1 to {width} tokens.",
      fix="start an empty prompt with the token that begins a text.",
    )
  found = [numbers.get(name) for name in ("lengths", "requests")]
  return [prompts, *(None if x is None else x.astype(np.int32) for x in found)]
