"""Ring attention by the fused kernel of TPUs, as one device of the ring computes it.

Each device keeps its queries, and the keys and values of all devices travel around the ring. The kernel
returns the result for one shard of keys and, for each query, the logarithm of the sum of its exponentials, by
which the results of several shards are merged. The backward pass calls the kernel's backward pass for each
shard, with the merged results and logarithms. JAX has no public name for it (see `tests/test_upstream.py`).
`layers/tile_attention.py` computes the same without a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.layers.fused import lane_padded, splash_and_blocks
from nnx_parallel.layers.tile_attention import around, is_first, sent


def splash_ring(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segments: jax.Array | None,
  *,
  axis: str,
  size: int,
  causal: bool,
  zigzag: bool,
  interpret: bool = False,
) -> jax.Array:
  """The attention of a device's queries to the keys of all devices, in a `shard_map` over all axes.

  Args:
    query: scaled queries `[batch, key heads, group, length, features]`; all shapes are per device.
    key: `[batch, key heads, length, features]`.
    value: `[batch, key heads, length, out]`.
    segments: integers `[batch, length]`: a position sees positions with the same integer; None: no segments.
    axis: the mesh axis of the ring.
    size: the size of the axis.
    causal: a query sees no later position.
    zigzag: each device has an early and a late part of the sequence, of equal lengths.
    interpret: run the kernel on any platform, slowly.

  Returns:
    `[batch, key heads, group, length, out]`.

  Raises:
    NotFused: the kernel has no block size for this length.
  """
  ring = _Ring(axis, size, causal, zigzag, query.shape[2], query.shape[3], interpret)
  attention = jax.custom_vjp(lambda *given: ring.forward(*given)[0])
  attention.defvjp(ring.forward, ring.backward)
  found = attention(*map(lane_padded, (query, key, value)), segments)
  return found[..., : value.shape[-1]]


RINGS: dict[str, Callable[..., jax.Array]] = {"tpu": splash_ring}
"""The attention in a ring by the kernel of each platform that has one."""


@dataclasses.dataclass(frozen=True)
class _Part:
  """Queries of a device, and keys of a shard, for which the kernel computes the attention.

  Attributes:
    first: the first query.
    keys: the number of keys; None: all keys of the shard.
    causal: whether a query sees only the keys up to its own index.
  """

  first: int = 0
  keys: int | None = None
  causal: bool = False

  @property
  def rows(self) -> slice:
    """The queries."""
    return slice(self.first, None)

  @property
  def columns(self) -> slice:
    """The keys."""
    return slice(self.keys)


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The arguments of `splash_ring`, the heads of the queries for each head of keys, and the length.

  `before` and `after` are for causal attention.
  """

  axis: str
  size: int
  causal: bool
  zigzag: bool
  group: int
  length: int
  interpret: bool

  @property
  def before(self) -> _Part:
    """Which queries see which keys of a device that is before this one on the axis."""
    return _Part(keys=self.length // 2) if self.zigzag else _Part()

  @property
  def after(self) -> _Part | None:
    """Which queries see which keys of a device that is after this one; None: no query sees a key."""
    return _Part(first=self.length // 2) if self.zigzag else None

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
    after = self.after
    return jax.lax.cond(
      jax.lax.axis_index(self.axis) >= hop,
      lambda moving: compute(self.before, moving),
      lambda moving: none if after is None else compute(after, moving),
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
    """`run(kernel, query, key, value, segments, *more)` of a part, for each example and head of keys.

    `moving` has the keys, the values and the segments of the keys; `more` are arrays of the queries.
    """
    query, *of_rows = (x[:, :, :, part.rows] for x in (query, *more))
    key, value = (x[:, :, part.columns] for x in moving[:2])
    shape = query.shape[3], key.shape[2]
    splash, sizes = splash_and_blocks(*shape)
    mask: Any = splash.CausalMask(shape) if part.causal else splash.FullMask(shape)
    masks = splash.MultiHeadMask([mask] * self.group)
    kernel = splash.make_splash_mqa_single_device(
      masks, block_sizes=sizes, save_residuals=True, interpret=self.interpret
    )
    ids: Any = None
    if segments is not None:
      ids = splash.SegmentIds(segments[:, part.rows], moving[2][:, part.columns])

    def each(query: jax.Array, key: jax.Array, value: jax.Array, ids: Any, *more: jax.Array) -> PyTree:
      return run(kernel, query, key, value, ids, *more)

    rest = [0] * len(more)
    heads = jax.vmap(each, (0, 0, 0, None, *rest))
    return jax.vmap(heads, (0, 0, 0, None if ids is None else 0, *rest))(query, key, value, ids, *of_rows)


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
