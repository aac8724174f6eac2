"""The fused attention kernel of TPUs (`jax.experimental.pallas.ops.tpu.splash_attention`), in two uses.

- `splash_attention`: the attention of one device.
- `splash_ring`: the attention of a sequence to itself around a ring of devices. Each device keeps its
  queries, and the keys and values of all devices travel. For a shard of keys, the kernel returns the result
  and, for each query, the logarithm of the sum of its exponentials, by which the results of several shards
  are merged. The backward pass calls the kernel's backward pass for each shard, with the merged results and
  logarithms. JAX has no public name for it (see `tests/test_upstream.py`). `layers/tile_attention.py`
  computes the same without a kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.layers.softmaxes import NotFused
from nnx_parallel.layers.tile_attention import around, is_first, sent

_LANES = 128
_BLOCKS = (512, 256, 128)


def splash_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  scale: float,
  causal: bool = False,
  window: int | None = None,
  segments: jax.Array | None = None,
  mask: jax.Array | None = None,
  cap: float | None = None,
  interpret: bool = False,
) -> jax.Array:
  """The kernel of TPUs, a `Kernel`. It does not compute blocks that positions or the mask hide.

  With `interpret`, it runs on any platform, slowly.

  Raises:
    NotFused: the kernel has no block size for these lengths.
  """
  q, k, v = _lane_padded(_scaled(query, scale)), _lane_padded(key), _lane_padded(value)
  options: dict[str, Any] = {"attn_logits_soft_cap": cap, "interpret": interpret}
  if mask is None:
    ids = None if segments is None else (segments, segments)
    found = _by_head(lambda kernel, *given: kernel(*given), q, k, v, ids, causal, window, **options)
  else:  # an array has a dim of heads: the kernel computes one head at a time
    splash, sizes = _splash_and_blocks(*mask.shape)
    kernel = splash.make_splash_mqa_single_device(mask[None], block_sizes=sizes, **options)
    kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)  # `jnp.array` traced this flag
    heads = jax.vmap(lambda q, k, v: kernel(q[None], k, v)[0], (0, None, None))
    found = jax.vmap(jax.vmap(heads))(q, k, v)
  return found[..., : value.shape[-1]]


def splash_ring(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segments: jax.Array | None,
  *,
  axis: str,
  size: int,
  scale: float,
  causal: bool,
  zigzag: bool,
  interpret: bool = False,
) -> jax.Array:
  """The attention of a device's queries to the keys of all devices, in a `shard_map` over all axes.

  The other arguments and the result are as in `Kernel`, for the shard of the device. With `zigzag`, each
  device has an early and a late part of the sequence, of equal lengths.

  Raises:
    NotFused: the kernel has no block size for this length.
  """
  ring = _Ring(axis, size, causal, zigzag, query.shape[3], interpret)
  attention = jax.custom_vjp(lambda *given: ring.forward(*given)[0])
  attention.defvjp(ring.forward, ring.backward)
  found = attention(*map(_lane_padded, (_scaled(query, scale), key, value)), segments)
  return found[..., : value.shape[-1]]


def _by_head(
  run: Callable[..., PyTree],
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segments: tuple[jax.Array, jax.Array] | None,
  causal: bool,
  window: int | None,
  *more: jax.Array,
  **options: Any,
) -> PyTree:
  """`run(kernel, query, key, value, segment ids, *more)` for each example and head of keys.

  The arrays are as in `Kernel`; `segments` are of the queries and of the keys, `more` are other arrays of the
  queries, and `options` are of the kernel.

  Raises:
    NotFused: the kernel has no block size for these lengths.
  """
  lengths = query.shape[3], key.shape[2]
  splash, sizes = _splash_and_blocks(*lengths)
  mask: Any = splash.CausalMask(lengths) if causal else splash.FullMask(lengths)
  if window is not None:
    mask = splash.LocalMask(lengths, (window - 1, 0 if causal else window - 1), 0)
  masks = splash.MultiHeadMask([mask] * query.shape[2])
  kernel = splash.make_splash_mqa_single_device(masks, block_sizes=sizes, **options)
  ids: Any = None if segments is None else splash.SegmentIds(*segments)
  rest = [0] * len(more)
  heads = jax.vmap(functools.partial(run, kernel), (0, 0, 0, None, *rest))
  return jax.vmap(heads, (0, 0, 0, None if ids is None else 0, *rest))(query, key, value, ids, *more)


def _splash_and_blocks(rows: int, columns: int) -> tuple[Any, Any]:
  """The module of the kernel, and the sizes of its blocks for these lengths.

  Raises:
    NotFused: there are no such blocks.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as splash  # Pallas takes 0.3 s to import

  q, kv = (next((block for block in _BLOCKS if n % block == 0), 0) for n in (rows, columns))
  if not q or not kv:
    raise NotFused(f"{rows} queries and {columns} keys are not multiples of {_LANES}")
  queries = dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), q)
  keys = ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq")
  return splash, splash.BlockSizes(**queries, **dict.fromkeys(keys, kv))


def _scaled(query: jax.Array, scale: float) -> jax.Array:
  """Queries with the scale of the scores, in their dtype."""
  return (query.astype(jnp.promote_types(query.dtype, jnp.float32)) * scale).astype(query.dtype)


def _lane_padded(x: jax.Array) -> jax.Array:
  """With features that fill the lanes of the chip."""
  return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % _LANES),))


class _Part(NamedTuple):
  """Queries of a device, and keys of a shard, for which the kernel computes the attention."""

  rows: slice = slice(None)
  columns: slice = slice(None)
  causal: bool = False


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The arguments of `splash_ring`, and the length of a shard."""

  axis: str
  size: int
  causal: bool
  zigzag: bool
  length: int
  interpret: bool

  def forward(
    self, query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None
  ) -> tuple[jax.Array, PyTree]:
    """The result, and what the backward pass needs."""
    none = [
      jnp.zeros((*query.shape[:-1], value.shape[-1]), jnp.float32),
      jnp.full(query.shape[:-1], -jnp.inf),
    ]

    def attended(part: _Part, moving: PyTree) -> PyTree:
      result, (total,) = self._kernel(part, lambda kernel, *given: kernel(*given), moving, query, segments)
      pairs = zip(none, (result, total), strict=True)
      return [x.at[:, :, :, part.rows].set(y.astype(x.dtype)) for x, y in pairs]

    def visit(hop: AnyArray, moving: PyTree, state: PyTree) -> PyTree:
      (result, total), (more, its_total) = state, self._seen(hop, attended, moving, none)
      after = jnp.logaddexp(total, its_total)
      scales = [jnp.exp(x - after)[..., None] for x in (total, its_total)]
      return [result * scales[0] + more * scales[1], after]

    result, total = around(visit, (key, value, segments), none, self.size - 1, self._sent)
    result = result.astype(query.dtype)
    return result, (query, key, value, segments, result, total)

  def backward(self, saved: PyTree, arriving: jax.Array) -> tuple[jax.Array | None, ...]:
    """The gradients; those of keys and values travel around the ring with the keys and values."""
    query, key, value, segments, result, total = saved
    none = [jnp.zeros(x.shape, jnp.float32) for x in (query, key, value)]

    def pulled(part: _Part, moving: PyTree) -> PyTree:
      found = self._kernel(part, _pull, moving, query, segments, result, total, arriving)
      places = (3, part.rows), (2, part.columns), (2, part.columns)
      triples = zip(none, found, places, strict=True)
      return [x.at[(*[slice(None)] * d, at)].set(y.astype(x.dtype)) for x, y, (d, at) in triples]

    def visit(hop: AnyArray, moving: PyTree, state: PyTree) -> PyTree:
      if not is_first(hop):  # the sums of a shard arrive while this device computes its share of them
        state = [state[0], *self._sent(state[1:])]
      return [x + y for x, y in zip(state, self._seen(hop, pulled, moving, none), strict=True)]

    of_query, *sums = around(visit, (key, value, segments), none, self.size - 1, self._sent)
    found = zip((of_query, *self._sent(sums)), (query, key, value), strict=True)
    return (*(g.astype(x.dtype) for g, x in found), None)

  def _seen(
    self, hop: AnyArray, compute: Callable[[_Part, PyTree], PyTree], moving: PyTree, none: PyTree
  ) -> PyTree:
    """`compute` for the part of a shard that this device sees, after `hop` hops of the shard."""
    if is_first(hop) or not self.causal:
      return compute(_Part(causal=self.causal), moving)
    half = self.length // 2
    early_keys, late_rows = _Part(columns=slice(half)), _Part(rows=slice(half, None))
    return jax.lax.cond(
      jax.lax.axis_index(self.axis) >= hop,  # the shard is of an earlier device on the axis
      lambda moving: compute(early_keys if self.zigzag else _Part(), moving),
      lambda moving: compute(late_rows, moving) if self.zigzag else none,
      moving,
    )

  def _sent(self, tree: PyTree) -> PyTree:
    return sent(tree, self.axis, self.size)

  def _kernel(
    self,
    part: _Part,
    run: Callable[..., PyTree],
    moving: PyTree,
    query: jax.Array,
    segments: jax.Array | None,
    *more: jax.Array,
  ) -> PyTree:
    """`_by_head` for a part; `moving` has the keys, the values and the segments of the keys."""
    query, *of_rows = (x[:, :, :, part.rows] for x in (query, *more))
    key, value = (x[:, :, part.columns] for x in moving[:2])
    ids = None if segments is None else (segments[:, part.rows], moving[2][:, part.columns])
    options = {"save_residuals": True, "interpret": self.interpret}
    return _by_head(run, query, key, value, ids, part.causal, None, *of_rows, **options)


def _pull(
  kernel: Any,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  ids: Any,
  result: jax.Array,
  total: jax.Array,
  arriving: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The gradients of queries, keys and values for a shard of keys.

  `result` and `total` are the result and the logarithms of the sums for the keys of all shards.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

  backward: Any = splash_attention_kernel._splash_attention_bwd  # pyright: ignore[reportPrivateUsage]
  saved = query, key, value, ids, None, result, total, kernel.dq_mask_info, kernel.dkv_mask_info
  found = backward(**kernel.kwargs, res=saved, do=arriving)
  return found[3], found[4], found[5]
