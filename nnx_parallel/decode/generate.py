"""Generates tokens in one compiled program: the cache, the loop and the draws stay on the devices.

Each row reads its prompt token by token and then its own tokens, so rows of different length need no mask:
a short prompt just starts to write earlier. The loop ends when every row has ended.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.core.axes import axes_of
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.shards import pinned
from nnx_parallel.core.text import few
from nnx_parallel.decode.sampling import Sampling
from nnx_parallel.errors import DecodeError
from nnx_parallel.layout.batch import input_spec
from nnx_parallel.layout.constrain import default_scope, scope_of
from nnx_parallel.rules.ruleset import RuleSet
from nnx_parallel.train.binding import Binding, deleted, is_deleted, put
from nnx_parallel.train.hold import held

Call = Callable[..., Any]


class Generated(NamedTuple):
  """What `nxp.generator` returns, on the devices and not waited for.

  Attributes:
    tokens: int32 `(batch, max_new_tokens)`, global: the new tokens of each row, then zeros.
    lengths: int32 `(batch,)`: how many tokens are new, the stop token included.
  """

  tokens: jax.Array
  lengths: jax.Array


class _Args(NamedTuple):
  """What differs between calls; all global."""

  prompts: jax.Array
  lengths: jax.Array
  requests: jax.Array
  key: jax.Array


class _Bound:
  """The program of one model as it is now."""

  def __init__(self, generator: Generator, model: Any):
    self.binding = Binding({"model": model})
    self.scope = scope_of(self.binding.variables)
    self.caches = [i for i, leaf in enumerate(self.binding.variables) if isinstance(leaf, nnx.Cache)]
    self.others = [i for i in range(len(self.binding.variables)) if i not in self.caches]
    if not self.caches and generator.cache is None:
      raise DecodeError(
        f"{type(model).__name__} has no nnx.Cache, so no token would see those before it.",
        fix="call init_cache((batch, length, features)) of each attention in the constructor,\n"
        "or give generator(cache=make, call=call) for a model that takes its cache as an argument.",
      )
    self.shardings = [self.binding.variable_shardings[i] for i in self.caches]
    own = [self.binding.variable_shardings[i] for i in self.others]
    self._forward = held(self._one_token(generator.call), self.binding.mesh, self.scope, own)
    self.capacity = _capacity(model)
    self.jitted: Any = jax.jit(
      self._program(generator),
      donate_argnums=0,
      keep_unused=True,  # the old caches are memory for the new ones
      out_shardings=(self.shardings if self.binding.mesh is not None else None, None),
    )

  def place(self, x: Any) -> Any:
    """Numbers of the host, split as the batch of the plan."""
    where = self._rows(np.ndim(x))
    return jnp.asarray(x) if where is None else jax.device_put(x, where)

  def arrays(self) -> tuple[list[Any], list[Any]]:
    """The caches, and all else that the model holds."""
    arrays = self.binding.read()
    return [arrays[i] for i in self.caches], [arrays[i] for i in self.others]

  def joined(self, caches: list[Any], others: list[Any]) -> list[Any]:
    """Both in the order of the binding."""
    found = dict(zip([*self.caches, *self.others], [*caches, *others], strict=True))
    return [found[i] for i in sorted(found)]

  def __call__(self, args: _Args) -> Generated:
    variables = self.binding.variables
    caches, others = self.arrays()
    try:
      after, found = self.jitted(caches, others, args)
    except BaseException as error:
      labels = [self.binding.variable_labels[i] for i in self.caches]
      gone = [label for label, x in zip(labels, caches, strict=True) if is_deleted(x)]
      if gone and isinstance(error, (RuntimeError, ValueError)):
        raise deleted(gone, len(variables)) from error
      raise
    for i, array in zip(self.caches, after, strict=True):
      put(variables[i], array)
    return found

  def _rows(self, ndim: int) -> NamedSharding | None:
    """The layout of an array whose dim 0 is the batch."""
    mesh = self.binding.mesh
    if mesh is None:
      return None
    spec = PartitionSpec()
    if self.scope is not None and ndim:
      rules = RuleSet(logical=self.scope.rules, inputs=self.scope.inputs)
      spec = PartitionSpec(input_spec(rules, 2, axis_sizes(mesh))[0], *[None] * (ndim - 1))
    return NamedSharding(mesh, spec)

  def check_rows(self, count: int) -> None:
    where = self._rows(1)
    parts = 1 if where is None else int(np.prod([where.mesh.shape[axis] for axis in axes_of(where.spec[0])]))
    if count % parts:
      raise DecodeError(
        f"{count} prompts cannot be split over {parts} shards.",
        details=f"mesh {dict(self.binding.mesh.shape)}, batch over {axes_of(where.spec[0]) if where else ()}",
        fix=f"add prompts, of length 1 and to be thrown away, up to {-(-count // parts) * parts}.",
      )

  def _one_token(self, call: Call) -> Callable[..., Any]:
    binding, caches = self.binding, set(self.caches)

    # The caches come last: `held` would gather a parameter that is split like the batch.
    def forward(others: list[Any], tokens: Any, position: Any, held_caches: list[Any], own: Any) -> Any:
      arrays = self.joined(held_caches, others)
      (model,) = binding.template.build(binding.with_raw(arrays))
      given = () if own is None else (own,)
      result = call(model, tokens, position, *given)
      logits, own = (result, None) if not given else result
      after = binding.without_raw(binding.template.arrays((model,)))
      lost = [
        binding.variable_labels[i]
        for i, (old, new) in enumerate(zip(arrays, after, strict=True))
        if i not in caches and old is not new
      ]
      if lost:
        raise DecodeError(
          f"the call changed {few(lost)}, which no nnx.Cache holds: the next token would not see it.",
          fix="make it an nnx.Cache, or call model.eval() where it belongs to training.",
        )
      _check_logits(logits, tokens)
      return logits[:, -1], [after[i] for i in sorted(caches)], own

    return forward

  def _program(self, generator: Generator) -> Callable[..., Any]:
    limit, sampling, stops = generator.max_new_tokens, generator.sampling, generator.stop

    def all_pinned(arrays: list[Any]) -> list[Any]:
      return [pinned(x, where) for x, where in zip(arrays, self.shardings, strict=True)]

    def rows(x: Any) -> Any:
      return pinned(x, self._rows(x.ndim))

    def generate(caches: list[Any], others: list[Any], args: _Args) -> Any:
      batch, width = args.prompts.shape
      prompts, index = rows(args.prompts), jnp.arange(width)
      if generator.padding == "left":
        moved = (index[None] + width - args.lengths[:, None]) % width
        prompts = rows(jnp.take_along_axis(prompts, moved, axis=1))
      keys = jax.vmap(jax.random.fold_in, (None, 0))(args.key, args.requests)

      last = args.lengths.max() + limit - 1

      def more(carry: Any) -> Any:
        # Whether all rows have ended takes an all-reduce for each token.
        return ~jnp.all(carry[4]) if stops else carry[0] < last

      def one(carry: Any) -> Any:
        position, tokens, found, counts, ended, caches, own = carry
        logits, caches, own = self._forward(others, tokens[:, None], position, caches, own)
        drawn = jax.vmap(jax.random.fold_in)(keys, counts)
        chosen = rows(sampling.choose(rows(logits), drawn))
        following = position + 1
        reads = following < args.lengths
        writes = ~reads & ~ended
        here = writes[:, None] & (jnp.arange(limit)[None] == counts[:, None])
        found = rows(jnp.where(here, chosen[:, None], found))
        counts = counts + writes.astype(jnp.int32)
        stopped = jnp.zeros_like(ended)
        for stop in stops:
          stopped |= chosen == stop
        ended = ended | (writes & (stopped | (counts == limit)))
        # Clamped: past the widest prompt no row reads.
        given = jax.lax.dynamic_index_in_dim(prompts, jnp.minimum(following, width - 1), 1, keepdims=False)
        tokens = rows(jnp.where(reads, given, chosen))
        return following, tokens, found, counts, ended, all_pinned(caches), own

      with default_scope(self.scope):
        empty = all_pinned([jnp.zeros_like(x) for x in caches])
        own = None if generator.cache is None else generator.cache(batch, width + limit)
        start = rows(jnp.zeros((batch,), jnp.int32))
        carry = (
          jnp.zeros((), jnp.int32),
          prompts[:, 0],
          rows(jnp.zeros((batch, limit), jnp.int32)),
          start,
          start != 0,
          empty,
          own,
        )
        *_, found, counts, _, caches, _ = jax.lax.while_loop(more, one, carry)
      return caches, Generated(found, counts)

    return generate


class Generator:
  """Compiled generation; made by `generator`.

  Attributes:
    max_new_tokens: the most tokens that a row gets.
    sampling: how a token is chosen.
    stop: tokens that end a row.
    padding: the side on which prompts are padded.
    call: the model's call for one token.
    cache: makes the cache of a model that takes it as an argument; or None.
  """

  def __init__(
    self,
    max_new_tokens: int,
    sampling: Sampling,
    stop: tuple[int, ...],
    padding: Literal["right", "left"],
    call: Call,
    cache: Callable[[int, int], Any] | None,
  ):
    self.max_new_tokens, self.sampling, self.stop = max_new_tokens, sampling, stop
    self.padding, self.call, self.cache = padding, call, cache
    self._bounds: weakref.WeakKeyDictionary[Any, _Bound] = weakref.WeakKeyDictionary()

  def __call__(
    self, model: Any, prompts: Any, *, lengths: Any = None, key: Any = None, requests: Any = None
  ) -> Generated:
    """Continues each prompt.

    The model's `nnx.Cache` Variables are emptied (zeros) first, donated, and hold the last state after.
    Nothing else of the model changes.

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

  def compiled(
    self, model: Any, prompts: Any, *, lengths: Any = None, key: Any = None, requests: Any = None
  ) -> Any:
    """The program that runs for these arguments, without running it.

    Args:
      model: as in a call.
      prompts: as in a call.
      lengths: as in a call.
      key: as in a call.
      requests: as in a call.

    Returns:
      A `jax.stages.Compiled`: its text, memory and cost.
    """
    bound, args = self._prepared(model, prompts, lengths, key, requests)
    return bound.jitted.lower(*bound.arrays(), args).compile()

  def _prepared(
    self, model: Any, prompts: Any, lengths: Any, key: Any, requests: Any
  ) -> tuple[_Bound, _Args]:
    prompts, lengths, requests = _checked(prompts, lengths, requests)
    if key is None:
      if self.sampling.temperature:
        raise DecodeError("tokens are drawn, and no key is given.", fix="key=jax.random.key(0)")
      key = jax.random.key(0)
    bound = self._bound(model)
    _check_capacity(bound.capacity, prompts.shape, self.max_new_tokens)
    bound.check_rows(prompts.shape[0])
    place = bound.place
    return bound, _Args(place(prompts), place(lengths), place(requests), place(key))

  def _bound(self, model: Any) -> _Bound:
    if not isinstance(model, nnx.Pytree):
      raise DecodeError(
        f"the model is a {type(model).__name__}, not a live module.", fix="generate(model, prompts)"
      )
    found = self._bounds.get(model)
    if found is None or not found.binding.watch.same():
      found = self._bounds[model] = _Bound(self, model)
    return found


def generator(
  max_new_tokens: int,
  *,
  sampling: Sampling = Sampling(),  # noqa: B008
  stop: int | Sequence[int] = (),
  padding: Literal["right", "left"] = "right",
  call: Call | None = None,
  cache: Callable[[int, int], Any] | None = None,
) -> Generator:
  """Makes a compiled generator of tokens, on the layout that the model has.

  One program reads the prompts, one token at a time, and writes up to `max_new_tokens` for each; it ends
  early when every row has met a stop token. The layout of the cache is that of the model's `nnx.Cache`
  Variables, which a plan lays out as any other Variable. Tokens do not depend on the layout: each row draws
  from its own key.

  Args:
    max_new_tokens: the most tokens that a row gets.
    sampling: greedy, or `nxp.Sampling(temperature=..., top_k=..., top_p=...)`.
    stop: a token, or several, that end a row; the token itself is returned.
    padding: the side on which shorter prompts are padded.
    call: `call(model, tokens, position)` returns the logits `(batch, 1, vocabulary)` of int32 tokens
      `(batch, 1)`; `position` is an int32 scalar, the same for all rows. None: `model(tokens)`.
    cache: `cache(batch, length)` makes the empty cache, a pytree, of a model that takes it as an argument;
      use `nxp.constrain` in it for its layout. `call(model, tokens, position, cache)` then returns
      `(logits, cache)`.

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
  return Generator(max_new_tokens, sampling, tuple(map(int, stops)), padding, call or _plain_call, cache)


def _plain_call(model: Any, tokens: Any, position: Any) -> Any:
  del position
  return model(tokens)


def _checked(prompts: Any, lengths: Any, requests: Any) -> tuple[Any, Any, Any]:
  shape, dtype = np.shape(prompts), getattr(prompts, "dtype", np.asarray(prompts).dtype)
  if len(shape) != 2 or not all(shape) or not jnp.issubdtype(dtype, jnp.integer):
    raise DecodeError(
      f"prompts are {dtype} of shape {shape}, not integers (batch, width).",
      fix="pad shorter prompts and give lengths=.",
    )
  batch, width = shape
  prompts = prompts.astype(np.int32) if hasattr(prompts, "astype") else np.asarray(prompts, np.int32)
  lengths = np.full((batch,), width, np.int32) if lengths is None else np.asarray(lengths)
  requests = np.arange(batch, dtype=np.int32) if requests is None else np.asarray(requests)
  for name, x in (("lengths", lengths), ("requests", requests)):
    if x.shape != (batch,) or not np.issubdtype(x.dtype, np.integer):
      raise DecodeError(
        f"{name} are {x.dtype} of shape {x.shape}, not one integer for each of {batch} prompts.",
        fix=f"{name}=np.array([...]) of shape ({batch},).",
      )
  outside = [int(x) for x in lengths if not 1 <= x <= width]
  if outside:
    raise DecodeError(
      f"a prompt has length {outside[0]}, and prompts have 1 to {width} tokens.",
      fix="start an empty prompt with the token that begins a text.",
    )
  return prompts, lengths.astype(np.int32), requests.astype(np.int32)


def _check_logits(logits: Any, tokens: Any) -> None:
  if getattr(logits, "ndim", 0) != 3 or logits.shape[:2] != tokens.shape:
    raise DecodeError(
      f"the call returned {getattr(logits, 'shape', type(logits).__name__)} for one token of each row.",
      details=f"tokens {tokens.shape}",
      fix=f"return logits of shape {(*tokens.shape, 'vocabulary')}.",
    )


def _capacity(model: Any) -> tuple[int, int] | None:
  """Batch and length of the caches of flax's attentions: a full one overwrites its last entry unnoticed."""
  attentions = [node for _, node in nnx.iter_modules(model) if isinstance(node, nnx.MultiHeadAttention)]
  shapes = [node.cached_key.shape for node in attentions if node.cached_key is not None]
  return (math.prod(shapes[0][:-3]), min(shape[-3] for shape in shapes)) if shapes else None


def _check_capacity(capacity: tuple[int, int] | None, prompts: tuple[int, ...], limit: int) -> None:
  if capacity is None:
    return
  (batch, length), (rows, width) = capacity, prompts
  if rows != batch:
    raise DecodeError(
      f"there are {rows} prompts, and the model's cache is for {batch}.",
      fix=f"init_cache(({rows}, length, features)) of each attention.",
    )
  # The last new token is not read.
  needed = width + limit - 1
  if needed > length:
    fix = f"init_cache((batch, {needed}, features)) of each attention"
    raise DecodeError(
      f"prompts of {width} tokens and {limit} new ones need a cache of length {needed}, and it has {length}.",
      fix=fix + (f", or max_new_tokens={length - width + 1}." if length >= width else "."),
    )
