"""Exact attention over sequences whose positions are split over a mesh axis.

In a ring (arXiv:2310.01889), each device keeps its queries, and the keys and values go round; a running
maximum and sum of the softmax (arXiv:2205.14135) merge what it sees of each shard. The backward pass sends
them round again, with their gradients. With all-to-all (arXiv:2309.14509), each device gets all positions of
some heads instead. Either way, scores exist for one block of queries and keys at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.nnx.nn.dtypes import promote_dtype
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnx_parallel.core.axes import axes_by_dim, entry_of
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.ring import Ring
from nnx_parallel.core.tiles import finite
from nnx_parallel.errors import SchemeError
from nnx_parallel.layers.fused import SEQUENCES, NotFused, kernel_in_use
from nnx_parallel.layout.batch import batch_axes
from nnx_parallel.layout.constrain import manual_too, scope_in_use
from nnx_parallel.rules.ruleset import RuleSet

How = Literal["ring", "ulysses"]
_FAR = 2**30
"""The position of a key that pads its block."""


def context_attention(
  axis: str = "context",
  *,
  how: How = "ring",
  causal: bool = False,
  window: int | None = None,
  zigzag: bool = False,
  block: int = 512,
  fused: bool = False,
) -> Callable[..., jax.Array]:
  """Attention over sequences whose positions a mesh axis splits; the result is that of the whole sequence.

  The mesh is the active one: that of `train_step`, `plan.scope()` or `jax.set_mesh`; outside of jit, that of
  the queries. Other axes of it stay as they are. Without a mesh, one device computes it by blocks.

  The function that is returned takes `(query, key, value, mask=None, *, segment_ids=None, is_causal=False,
  dtype=None, precision=None)` with global shapes: queries `[batch..., length, heads, head_dim]`; keys and
  values with the same heads, or with fewer, each for a group of them; `segment_ids` `[batch..., length]`,
  integers: a position sees those with the same one; `mask` `[batch or 1, 1, 1, length]`: the keys that are
  seen. It is also an `attention_fn` of `nnx.MultiHeadAttention`. Dropout, biases, a mask of queries x keys
  and sown weights are errors. A query that sees no key has the result 0.

  Args:
    axis: the mesh axis that splits the positions; the length must be a multiple of its size.
    how: `"ring"` sends keys and values round, size - 1 times each, and twice that and their gradients in the
      backward pass; `"ulysses"` sends queries, keys, values and results once; the number of heads must be
      a multiple of the axis' size.
    causal: a query sees no later position.
    window: a query sees the last `window` positions, its own included; unless causal, as many ahead too. A
      ring then ends with the last device that is seen.
    zigzag: the positions are in the order of `zigzag`, so that a causal ring gives all devices equal work.
    block: queries and keys of a tile of scores, in positions.
    fused: with `"ulysses"`, compute the heads of a device by the fused kernel of its chip where JAX has
      one (TPUs; a length that is a multiple of 128, and no `mask`) and the other mesh axes are those of the
      batch; else by blocks.

  Returns:
    The function. Equal arguments make equal functions.

  Raises:
    SchemeError: not such an option; when it is called, shapes or options that it cannot compute.

  Source: ring attention, arXiv:2310.01889; balance, arXiv:2311.09431; all-to-all (Ulysses), arXiv:2309.14509.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> attend = nxp.context_attention(causal=True)
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 8))
    >>> with jax.set_mesh(nxp.make_mesh(data=2, context=4)):
    ...   split = jax.jit(attend)(q, k, v)
    >>> bool(jnp.allclose(split, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5))
    True
  """
  return ContextAttention(axis, how, causal, window, zigzag, block, fused)


def zigzag(tree: Any, shards: int, *, dim: int = 1, inverse: bool = False) -> Any:
  """Reorders positions so that each of some shards has an early and a late part of the sequence.

  The sequence is cut into `2 * shards` parts; shard `i` gets part `i` and, after it, `2 * shards - 1 - i`.
  Reorder all that is read by position alike: tokens, labels, loss weights, segment ids, and the numbers of
  the positions, which rotary or learned position embeddings need. Take labels before: the next token is no
  longer the next element. A sum or mean over positions is the same.

  Args:
    tree: arrays, of NumPy on the host or of jax, with the positions along `dim`; its length must be a
      multiple of `2 * shards`.
    shards: the size of the mesh axis that splits the positions.
    dim: the array dim of the positions.
    inverse: back to the order of the sequence.

  Returns:
    Arrays of the same kinds and shapes.

  Raises:
    SchemeError: a length that cannot be cut so.

  Example:
    >>> import numpy as np, nnx_parallel as nxp
    >>> nxp.zigzag(np.arange(8), 2, dim=0)
    array([0, 1, 6, 7, 2, 3, 4, 5])
  """
  parts = [part for i in range(shards) for part in (i, 2 * shards - 1 - i)]
  order = np.argsort(parts) if inverse else np.asarray(parts)

  def moved(x: Any) -> Any:
    length = x.shape[dim]
    if length % (2 * shards):
      raise SchemeError(
        f"{length} positions cannot be cut into {2 * shards} equal parts.",
        details=f"dim {dim} of an array of shape {tuple(x.shape)}, for {shards} shards",
        fix=f"pad them to {-(-length // (2 * shards)) * 2 * shards}, with a loss weight of 0.",
      )
    ahead = dim % x.ndim
    split = x.reshape(*x.shape[:ahead], 2 * shards, length // (2 * shards), *x.shape[ahead + 1 :])
    if isinstance(x, np.ndarray):
      return split.take(order, ahead).reshape(x.shape)
    layout = jax.typeof(split).sharding  # on Explicit axes, a moved dim keeps its layout only if it is named
    picked = split.at[(*[slice(None)] * ahead, order)]
    named = AxisType.Explicit in layout.mesh.axis_types
    return (picked.get(out_sharding=layout) if named else picked.get()).reshape(x.shape)

  return jax.tree.map(moved, tree)


@dataclasses.dataclass(frozen=True)
class ContextAttention:
  """What `context_attention` returns."""

  axis: str
  how: How
  causal: bool
  window: int | None
  zigzag: bool
  block: int
  fused: bool = False

  def __post_init__(self) -> None:
    if self.how not in ("ring", "ulysses"):
      raise SchemeError(f"how={self.how!r} is no way to attend.", fix='how="ring" or how="ulysses"')
    if self.fused and self.how == "ring":
      raise SchemeError(
        "a ring merges what it sees of each shard, and the fused kernel that JAX has cannot do that in a"
        " gradient.",
        fix='how="ulysses", fused=True',
      )
    for name, value in {"window": self.window, "block": self.block}.items():
      if value is not None and (type(value) is not int or value < 1):
        raise SchemeError(f"{name}={value!r} is not a number of positions.", fix=f"{name}=512, for example")

  def __call__(
    self,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    *,
    segment_ids: Any = None,
    is_causal: bool = False,
    dtype: Any = None,
    precision: Any = None,
    bias: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    module: Any = None,
    dropout_rng: Any = None,
    broadcast_dropout: bool = True,
  ) -> jax.Array:
    """See `context_attention`."""
    del dropout_rng, broadcast_dropout
    _check_options(bias, 0.0 if deterministic else dropout_rate, module)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    shape = query.shape
    if query.ndim != 4:
      query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
      segment_ids = None if segment_ids is None else segment_ids.reshape(-1, segment_ids.shape[-1])
      mask = None if mask is None else mask.reshape(-1, *mask.shape[-3:])
    mesh: Any = _mesh(query)
    sizes = {} if mesh is None else axis_sizes(mesh)
    if sizes and self.axis not in sizes:
      raise SchemeError(
        f"the mesh has no axis {self.axis!r}, over which context_attention splits the positions.",
        details=f"mesh {sizes}",
        fix=f"nxp.make_mesh(..., {self.axis}=2), or context_attention(axis={next(iter(sizes))!r}).",
      )
    pattern = _Pattern(
      self.axis,
      sizes.get(self.axis, 1),
      self.causal or is_causal,
      self.window,
      self.zigzag,
      self.block,
      precision,
      None if mesh is None or not jax.sharding.get_abstract_mesh().empty else mesh,
      manual_too(mesh),
    )
    _check_shapes(pattern, query, key, value)
    keep = None if mask is None else _seen_keys(mask, key)
    kv_heads = key.shape[2]
    groups = query.shape[2] // kv_heads
    if self.how == "ulysses":
      copies = pattern.shards // math.gcd(pattern.shards, kv_heads)
      if groups % copies:
        raise SchemeError(
          f"{pattern.shards} devices cannot share {query.shape[2]} heads evenly.",
          details=f"{query.shape[2]} heads of queries, {kv_heads} of keys; {self.axis}={pattern.shards}",
          fix=f'how="ring", or a number of heads that is a multiple of {pattern.shards}.',
        )
      if copies > 1:
        key, value = (jnp.repeat(x, copies, 2) for x in (key, value))
        kv_heads, groups = kv_heads * copies, groups // copies
    query = query.reshape(*query.shape[:2], kv_heads, groups, query.shape[-1])
    compute = _whole_call if isinstance(query, Tracer) else jax.jit(_whole_call, static_argnums=(0, 1, 2))
    how = "fused" if self.fused else self.how
    result = compute(pattern, how, mesh, query, key, value, segment_ids, keep)
    return result.reshape(*shape[:-1], value.shape[-1])

  def tiles(self, length: int, shards: int) -> np.ndarray:
    """The tiles of scores that each device computes of each shard that it visits, `[devices, visits]`.

    Args:
      length: of the whole sequence, in positions.
      shards: the size of the axis.
    """
    pattern = _Pattern(self.axis, shards, self.causal, self.window, self.zigzag, self.block, None, None)
    own = length // shards
    count, size = pattern.blocks(own)

    def cut(device: int, pad: str) -> Any:
      wide = (0, count * size - own)
      at = pattern.positions(device, own)
      return (np.pad(at, wide, "edge") if pad else np.pad(at, wide, constant_values=_FAR)).reshape(
        count, size
      )

    def seen(device: int, hop: int) -> int:
      first, end = pattern.ranges(cut(device, "edge"), cut((device - hop) % shards, ""))
      return int(np.maximum(end - first, 0).sum())

    return np.array([[seen(d, hop) for hop in range(pattern.hops(own))] for d in range(shards)])


@dataclasses.dataclass(frozen=True)
class _Pattern:
  """Which positions see each other, and where they are.

  Attributes:
    axis: the mesh axis.
    shards: its size.
    causal: as in `context_attention`, and so on.
    window: the same.
    zigzag: the same.
    block: the same.
    precision: of the products.
    mesh: the mesh, if it is not the active one.
    mapped: mesh axes of an enclosing `jax.vmap`.
  """

  axis: str
  shards: int
  causal: bool
  window: int | None
  zigzag: bool
  block: int
  precision: Any
  mesh: Any
  mapped: frozenset[str] = frozenset()

  @property
  def ring(self) -> Ring:
    """The devices of the axis."""
    return Ring(self.axis, self.shards)

  def positions(self, device: Any, length: int) -> Any:
    """The positions of the `length` rows of a device, ascending."""
    numbers = np.arange(length, dtype=np.int32)
    if not self.zigzag:
      return numbers + device * length
    half = length // 2
    late = (numbers >= half).astype(np.int32)
    return numbers + device * half + late * ((2 * self.shards - 2 - 2 * device) * half)

  def blocks(self, length: int) -> tuple[int, int]:
    """The number of blocks of a device's rows, and their length."""
    parts = 2 if self.zigzag else 1
    count = parts * -(-length // (parts * self.block))
    return count, -(-length // count)

  def ranges(self, rows: Any, columns: Any) -> tuple[Any, Any]:
    """For each block of rows, the first block of columns that it sees, and the one after the last.

    Both are positions, `[blocks, length of a block]`. Since they ascend, what is seen is in one piece.
    """
    size, columns = columns.shape[-1], columns.reshape(-1)
    on_host = isinstance(rows, np.ndarray) and isinstance(columns, np.ndarray)
    count: Any = np.searchsorted if on_host else jnp.searchsorted
    low, high = rows.min(1), rows.max(1)
    ahead = high + (0 if self.causal else _FAR if self.window is None else self.window - 1)
    last = count(columns, ahead.clip(max=_FAR - 1), side="right")
    first = 0 * last if self.window is None else count(columns, low - self.window, side="right")
    end = -(-last // size)
    return first // size, end

  def hops(self, length: int) -> int:
    """How many shards a device must visit, its own included."""
    if (not self.causal and self.window is None) or self.shards == 1:
      return self.shards
    own = [self.positions(device, length)[None] for device in range(self.shards)]

    def sees(device: int, hop: int) -> bool:
      first, end = self.ranges(own[device], own[(device - hop) % self.shards])
      return bool((end > first).any())

    return 1 + max(hop for hop in range(self.shards) if any(sees(d, hop) for d in range(self.shards)))

  def is_exact(self, rows: int, columns: int) -> bool:
    """Whether each tile of another device's keys is seen by all its queries, or by none."""
    pieces = 2 if self.zigzag else 1
    sizes = [(length, self.blocks(length)[1]) for length in (rows, columns)]
    return all(length % (size * pieces) == 0 for length, size in sizes) and self.window is None


def _whole_call(
  pattern: _Pattern, how: How | Literal["fused"], mesh: Any, q: Any, k: Any, v: Any, segments: Any, keep: Any
) -> Any:
  """Attention of global arrays, laid out for it; queries `[batch, length, key heads, group, head_dim]`."""
  others = (segments, keep)
  kernel = kernel_in_use(SEQUENCES) if how == "fused" and keep is None else None
  how = "ulysses" if how == "fused" else how
  if pattern.shards == 1:
    return _attention(pattern, "ring", q, k, v, *others)
  given = [_laid(x, pattern, mesh, 1) for x in (q, k, v)]
  if how == "ring":
    return _attention(pattern, how, *given, *[_laid(x, pattern, mesh, 1) for x in others])
  # XLA makes an all-to-all of the change of layout. For `jax.lax.all_to_all` in a region that is manual over
  # one axis, it would gather what the others split.
  n = pattern.shards
  apart = [x.reshape(*x.shape[:2], x.shape[2] // n, n, *x.shape[3:]) for x in given]
  given = [_laid(x, pattern, mesh, 3) for x in apart]
  if kernel is not None and (batch := _batch_axes(pattern, mesh, q)) is not None:
    with contextlib.suppress(NotFused):
      out = _by_fused_kernel(pattern, kernel, mesh, batch, (*given, segments))
      return _laid(_laid(out, pattern, mesh, 1).reshape(*q.shape[:-1], v.shape[-1]), pattern, mesh, 1)
  out = _attention(pattern, how, *given, *[_laid(x, pattern, mesh, None) for x in others])
  return _laid(_laid(out, pattern, mesh, 1).reshape(*q.shape[:-1], v.shape[-1]), pattern, mesh, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(pattern: _Pattern, how: How, q: Any, k: Any, v: Any, segments: Any, keep: Any) -> Any:
  """Attention of arrays that are split by positions; by their dim 3, heads, for `"ulysses"`."""
  return _forward(pattern, how, q, k, v, segments, keep)[0]


def _forward(pattern: _Pattern, how: How, *given: Any) -> tuple[Any, Any]:
  """The result, and what the backward pass needs."""
  out, kept = _over_axis(pattern, how, True)(*given)
  return out, (given, out, kept)


def _backward(pattern: _Pattern, how: How, saved: Any, slope: Any) -> Any:
  given, out, kept = saved
  found = _over_axis(pattern, how, False)(*given, out, slope, kept)
  return (*found, None, None)


_attention.defvjp(_forward, _backward)


def _over_axis(pattern: _Pattern, how: How, forward: bool) -> Callable[..., Any]:
  """A side of the attention as a function of global arrays.

  What devices keep for the backward pass has one more dim ahead, for the devices.
  """
  function = _SIDES[how, "forward" if forward else "backward"]
  if pattern.shards == 1:
    return functools.partial(function, pattern, 0)
  devices = PartitionSpec(pattern.axis)
  split = PartitionSpec(*[None] * (1 if how == "ring" else 3), pattern.axis)
  others = split if how == "ring" else PartitionSpec()

  def local(device: Any, *arrays: Any) -> Any:
    if forward:
      out, kept = function(pattern, device[0], *arrays)
      return out, kept[None]
    *given, kept = arrays
    return function(pattern, device[0], *given, kept[0])

  run = jax.shard_map(
    local,
    mesh=pattern.mesh,
    in_specs=(devices, *[split] * 3, *[others] * 2, *(() if forward else (split, split, devices))),
    out_specs=(split, devices) if forward else split,
    axis_names={pattern.axis, *pattern.mapped},
    check_vma=False,
  )

  # Numbers of the devices as an array: `jax.lax.axis_index` of one axis is an instruction that not every
  # partitioner can place.
  def with_numbers(*arrays: Any) -> Any:
    numbers = jnp.arange(pattern.shards, dtype=jnp.int32)
    return run(_placed(numbers, pattern, pattern.mesh, [(pattern.axis,)]), *arrays)

  return with_numbers


def _ring_forward(pattern: _Pattern, device: Any, q: Any, k: Any, v: Any, segments: Any, keep: Any) -> Any:
  """The results of a device's queries, and the logarithms of their softmax' sums, by blocks."""
  tiles = _Tiles.of(pattern, device, q, k, segments)
  shard = tiles.shard(k, v, segments, keep)
  rows = jnp.zeros_like(tiles.q[..., 0], jnp.float32).transpose(0, 1, 3, 4, 2)
  result = rows[..., None] * jnp.zeros((1,) * 5 + v.shape[-1:], jnp.float32)
  state = jnp.full_like(rows, -jnp.inf), rows, result
  largest, total, result = pattern.ring.around(tiles.attend, shard, state, tiles.hops)
  seen = jnp.where(total == 0, jnp.ones_like(total), total)
  out = (result / seen[..., None]).transpose(1, 0, 4, 2, 3, 5)
  out = out.reshape(out.shape[0], -1, *out.shape[3:])[:, : q.shape[1]].astype(q.dtype)
  return out, finite(largest) + jnp.log(seen)


def _ring_backward(
  pattern: _Pattern,
  device: Any,
  q: Any,
  k: Any,
  v: Any,
  segments: Any,
  keep: Any,
  out: Any,
  slope: Any,
  sums: Any,
) -> Any:
  """The gradients of a device's queries, keys and values."""
  tiles = _Tiles.of(pattern, device, q, k, segments)
  shard = tiles.shard(k, v, segments, keep)
  wide = slope.astype(jnp.float32)
  share = (wide * out.astype(jnp.float32)).sum(-1)
  given = tiles.by_rows(slope.astype(q.dtype)), tiles.by_rows(share).transpose(0, 1, 3, 4, 2), sums

  def visit(hop: Any, shard: Any, state: Any) -> Any:
    dq, moving = state
    # The gradients of a shard arrive while its share of this device is computed.
    arriving = moving if isinstance(hop, int) and hop == 0 else pattern.ring.sent(moving)
    dq, added = tiles.gradients(hop, shard, given, dq)
    return dq, jax.tree.map(jnp.add, arriving, added)

  zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (shard["k"], shard["v"]))
  dq, moved = pattern.ring.around(visit, shard, (jnp.zeros_like(tiles.q, jnp.float32), zeros), tiles.hops)
  moved = tuple(g.astype(x.dtype) for g, x in zip(moved, (k, v), strict=True))
  dk, dv = pattern.ring.sent(moved, by=pattern.shards - (tiles.hops - 1))
  return _whole(dq, q.shape[1]).astype(q.dtype), _whole(dk, k.shape[1]), _whole(dv, v.shape[1])


@dataclasses.dataclass(frozen=True)
class _Tiles:
  """The scores of a device's queries, by tiles.

  Attributes:
    pattern: which positions see each other.
    device: the number of the device on the axis.
    q: queries by blocks, `[blocks, batch, length, key heads, group, head_dim]`.
    rows: their positions `[blocks, length]`.
    segments: their segments `[blocks, batch, length]`, if any.
    keys: the number of keys of a shard.
    hops: how many shards are visited.
    exact: whether the tiles of other shards are seen wholly, or not at all.
  """

  pattern: _Pattern
  device: Any
  q: Any
  rows: Any
  segments: Any
  keys: int
  hops: int
  exact: bool

  @classmethod
  def of(cls, pattern: _Pattern, device: Any, q: Any, k: Any, segments: Any) -> _Tiles:
    """The tiles of queries and keys `[batch, length, ...]`."""
    length, keys = q.shape[1], k.shape[1]
    cut = pattern.blocks(length)
    rows = _by_blocks(jnp.asarray(pattern.positions(device, length))[None], cut, "edge")[:, 0]
    return cls(
      pattern,
      device,
      _by_blocks(q, cut),
      rows,
      None if segments is None else _by_blocks(segments, cut),
      keys,
      pattern.hops(length),
      pattern.is_exact(length, keys),
    )

  def by_rows(self, x: Any) -> Any:
    """An array of the queries' positions, by blocks."""
    return _by_blocks(x, (self.q.shape[0], self.q.shape[2]))

  def shard(self, k: Any, v: Any, segments: Any, keep: Any) -> dict[str, Any]:
    """What goes round, by blocks."""
    given = {"k": k, "v": v, "segments": segments, "keep": keep}
    cut = self.pattern.blocks(self.keys)
    return {name: _by_blocks(x, cut) for name, x in given.items() if x is not None}

  def _columns(self, hop: Any) -> Any:
    """The positions of the keys of a shard."""
    at = self.pattern.positions((self.device - hop) % self.pattern.shards, self.keys)
    return _by_blocks(jnp.asarray(at)[None], self.pattern.blocks(self.keys), _FAR)[:, 0]

  def _scores(self, hop: Any, q: Any, rows: Any, segments: Any, shard: Any, columns: Any, c: Any) -> Any:
    """A tile of scores `[batch, key heads, group, queries, keys]`; `-inf` where a key is not seen."""
    k, columns = shard["k"][c], columns[c]
    scores = self._product("bqkgd,bskd->bkgqs", q, k) / math.sqrt(q.shape[-1])
    seen: list[Any] = []
    if not self.exact or (isinstance(hop, int) and hop == 0):
      ahead = rows[:, None] - columns[None, :]
      seen.append((columns < _FAR)[None, None, :])
      if self.pattern.causal:
        seen.append((ahead >= 0)[None])
      if self.pattern.window is not None:
        seen.append((abs(ahead) < self.pattern.window)[None])
    if segments is not None:
      seen.append(segments[:, :, None] == shard["segments"][c][:, None, :])
    if "keep" in shard:
      seen.append(shard["keep"][c][:, None, :])
    for own in seen:
      scores = jnp.where(own[:, None, None], scores, -jnp.inf)
    return scores

  def _product(self, dims: str, x: Any, y: Any) -> Any:
    return jnp.einsum(dims, x, y, precision=self.pattern.precision, preferred_element_type=jnp.float32)

  def _each_row(self, hop: Any, function: Callable[..., Any], carry: Any, rows: Any) -> Any:
    """A scan over blocks of queries, with the range of the blocks of keys that each of them sees."""
    columns = self._columns(hop)
    first, end = self.pattern.ranges(self.rows, columns)

    def row(carry: Any, given: Any) -> Any:
      q, at, segments, first, end, *own = given
      return function(q, at, segments, columns, (first, end), carry, *own)

    return jax.lax.scan(row, carry, (self.q, self.rows, self.segments, first, end, *rows))

  def attend(self, hop: Any, shard: Any, state: Any) -> Any:
    """The maxima, sums and results of the softmax, with what the queries see of a shard."""

    def row(q: Any, at: Any, segments: Any, columns: Any, seen: Any, _: Any, *state: Any) -> Any:
      def column(c: Any, state: Any) -> Any:
        before, total, result = state
        scores = self._scores(hop, q, at, segments, shard, columns, c)
        after = jnp.maximum(before, scores.max(-1))
        weights = jnp.exp(scores - finite(after)[..., None])
        scale = jnp.exp(before - finite(after))
        part = self._product("bkgqs,bskd->bkgqd", weights.astype(shard["v"].dtype), shard["v"][c])
        return after, total * scale + weights.sum(-1), result * scale[..., None] + part

      return None, jax.lax.fori_loop(seen[0], seen[1], column, state)

    return self._each_row(hop, row, None, state)[1]

  def gradients(self, hop: Any, shard: Any, given: Any, dq: Any) -> tuple[Any, Any]:
    """The gradients of the queries, with what a shard adds to them, and what is added to the shard's."""

    def row(q: Any, at: Any, segments: Any, columns: Any, seen: Any, carry: Any, *own: Any) -> Any:
      slope, share, sums, dq = own

      def column(c: Any, state: Any) -> Any:
        dq, dk, dv = state
        k, v = shard["k"][c], shard["v"][c]
        weights = jnp.exp(self._scores(hop, q, at, segments, shard, columns, c) - sums[..., None])
        dv = dv.at[c].add(self._product("bkgqs,bqkgd->bskd", weights.astype(v.dtype), slope))
        arriving = self._product("bqkgd,bskd->bkgqs", slope, v)
        scores = (weights * (arriving - share[..., None]) / math.sqrt(q.shape[-1])).astype(k.dtype)
        dk = dk.at[c].add(self._product("bkgqs,bqkgd->bskd", scores, q))
        return dq + self._product("bkgqs,bskd->bqkgd", scores, k), dk, dv

      dq, *carry = jax.lax.fori_loop(seen[0], seen[1], column, (dq, *carry))
      return tuple(carry), dq

    zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (shard["k"], shard["v"]))
    added, dq = self._each_row(hop, row, zeros, (*given, dq))
    return dq, added


def _by_blocks(x: Any, cut: tuple[int, int], pad: Any = 0) -> Any:
  """`[batch, length, ...]` as `[blocks, batch, length of a block, ...]`; `pad` `"edge"` repeats the last."""
  count, size = cut
  missing = count * size - x.shape[1]
  if missing:
    wide = [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]
    x = jnp.pad(x, wide, mode="edge") if pad == "edge" else jnp.pad(x, wide, constant_values=pad)
  return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)


def _whole(x: Any, length: int) -> Any:
  """The inverse of `_by_blocks`."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _by_heads_forward(pattern: _Pattern, device: Any, *given: Any) -> Any:
  """The results of all queries of a device's heads `[batch, length, heads, 1, ...]`, and their sums."""
  out, sums = _SIDES["ring", "forward"](_alone(pattern), 0, *_own_heads(pattern, *given))
  return _as_given(out, pattern), sums


def _by_heads_backward(pattern: _Pattern, device: Any, *given: Any) -> Any:
  """The gradients of the queries, keys and values of a device's heads."""
  *arrays, out, slope, sums = given
  own = _own_heads(pattern, *arrays, out, slope)
  return tuple(_as_given(x, pattern) for x in _SIDES["ring", "backward"](_alone(pattern), 0, *own, sums))


def _alone(pattern: _Pattern) -> _Pattern:
  """The pattern for one device with all positions, in the order of the sequence."""
  return dataclasses.replace(pattern, shards=1, zigzag=False)


def _own_heads(pattern: _Pattern, *given: Any) -> list[Any]:
  """Arrays in the order of the sequence, without the dim of the devices' heads."""
  apart = [x if x is None or x.ndim < 4 else x[:, :, :, 0] for x in given]
  return zigzag(apart, pattern.shards, inverse=True) if pattern.zigzag else apart


def _as_given(x: Any, pattern: _Pattern) -> Any:
  """The inverse of `_own_heads`."""
  return (zigzag(x, pattern.shards) if pattern.zigzag else x)[:, :, :, None]


def _batch_axes(pattern: _Pattern, mesh: Any, q: Any) -> tuple[str, ...] | None:
  """The axes that split the batch; None where others are left, over which a kernel would be repeated."""
  sizes, scope = axis_sizes(mesh), scope_in_use()
  rules = None if scope is None else RuleSet(logical=scope.rules, inputs=scope.inputs)
  split = () if rules is None else batch_axes(rules, sizes) or ()
  batch = tuple(axis for axis in split if axis != pattern.axis)
  rest = math.prod(size for axis, size in sizes.items() if axis not in (*batch, pattern.axis))
  fits = q.shape[0] % math.prod(sizes[axis] for axis in batch) == 0
  explicit = AxisType.Explicit in _kinds(mesh).values()
  return batch if rest == 1 and fits and not explicit and not pattern.mapped else None


def _by_fused_kernel(
  pattern: _Pattern, kernel: Any, mesh: Any, batch: tuple[str, ...], given: tuple[Any, ...]
) -> Any:
  """`[batch, length, heads, devices, ...]`, split by the devices: each computes its heads by the kernel."""
  attend = functools.partial(kernel, causal=pattern.causal, window=pattern.window)

  def local(q: Any, k: Any, v: Any, segments: Any) -> Any:
    q, k, v, segments = _own_heads(pattern, q, k, v, segments)
    q = jnp.moveaxis(q * q.shape[-1] ** -0.5, 1, 3)  # [batch, heads, group, length, features]
    k, v = (jnp.moveaxis(x, 1, 2) for x in (k, v))
    each = jax.vmap(jax.vmap(attend, (0, 0, 0, None)), (0, 0, 0, None if segments is None else 0))
    return _as_given(jnp.moveaxis(each(q, k, v, segments), 3, 1), pattern)

  rows = entry_of(batch)
  split = PartitionSpec(rows, None, None, pattern.axis)
  run = jax.shard_map(
    local,
    mesh=pattern.mesh,
    in_specs=(split, split, split, None if given[-1] is None else PartitionSpec(rows)),
    out_specs=split,
    check_vma=False,
  )
  return run(*given)


_SIDES: dict[tuple[str, str], Callable[..., Any]] = {
  ("ring", "forward"): _ring_forward,
  ("ring", "backward"): _ring_backward,
  ("ulysses", "forward"): _by_heads_forward,
  ("ulysses", "backward"): _by_heads_backward,
}


def _mesh(x: Any) -> Any:
  """The active mesh, or that of an array; None without one."""
  active = jax.sharding.get_abstract_mesh()
  if not active.empty:
    return active
  own = jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding
  return own.mesh if isinstance(own, NamedSharding) and not own.mesh.empty else None


def _laid(x: Any, pattern: _Pattern, mesh: Any, dim: int | None) -> Any:
  """The array with one of its dims on the axis, and no other; None stays None."""
  if x is None:
    return None
  if _kinds(mesh)[pattern.axis] != AxisType.Explicit:
    if dim is None:
      return x
    free = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec = PartitionSpec(*free[:dim], pattern.axis, *free[dim + 1 :])
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
  spec = getattr(jax.typeof(x).sharding, "spec", ())
  axes = [tuple(a for a in own if a != pattern.axis) for own in axes_by_dim(spec, x.ndim)]
  if dim is not None:
    axes[dim] = (*axes[dim], pattern.axis)
  return _placed(x, pattern, mesh, axes)


def _kinds(mesh: Any) -> dict[str, AxisType]:
  return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _placed(x: Any, pattern: _Pattern, mesh: Any, axes: Any) -> Any:
  mesh = mesh or jax.sharding.get_abstract_mesh()
  if _kinds(mesh)[pattern.axis] != AxisType.Explicit:
    return x
  return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*map(entry_of, axes))))


def _seen_keys(mask: Any, key: Any) -> Any:
  """A mask of keys `[batch, length]`.

  Raises:
    SchemeError: it is one of queries and keys.
  """
  batch, length = key.shape[:2]
  if mask.ndim != 4 or mask.shape[1:] != (1, 1, length) or mask.shape[0] not in (1, batch):
    raise SchemeError(
      "context_attention takes no mask of queries and keys, whose size is the square of the length.",
      details=f"mask {tuple(mask.shape)}; keys {tuple(key.shape)}",
      fix="context_attention(causal=True, window=...) and segment_ids= say the same; a mask of keys is"
      f" ({batch}, 1, 1, {length}).",
    )
  return jnp.broadcast_to(mask[:, 0, 0].astype(bool), (batch, length))


def _check_options(bias: Any, dropout: float, module: Any) -> None:
  given = {
    "a bias": bias is not None,
    f"dropout_rate={dropout}": dropout > 0,
    "sow_weights": module is not None,
  }
  for name, wanted in given.items():
    if wanted:
      raise SchemeError(
        f"context_attention cannot use {name}: the weights of the whole sequence never exist.",
        fix="attention without it; dropout of the layer's result does not need the weights.",
      )


def _check_shapes(pattern: _Pattern, query: Any, key: Any, value: Any) -> None:
  n, details = pattern.shards, f"query {query.shape}, key {key.shape}, value {value.shape}"
  fits = (
    key.shape[:3] == value.shape[:3] and key.shape[0] == query.shape[0] and key.shape[-1] == query.shape[-1]
  )
  if not fits or query.shape[2] % key.shape[2]:
    raise SchemeError(
      "queries, keys and values do not fit each other.",
      details=details,
      fix="[batch, length, heads, head_dim]; the heads of queries are a multiple of those of keys.",
    )
  needed = 2 * n if pattern.zigzag else n
  for x in (query, key):
    if x.shape[1] % needed:
      raise SchemeError(
        f"{x.shape[1]} positions cannot be split evenly over {pattern.axis}={n}.",
        details=details + (", in zigzag order, two parts for each device" if pattern.zigzag else ""),
        fix=f"pad them to {-(-x.shape[1] // needed) * needed}.",
      )
  if query.shape[1] != key.shape[1] and (pattern.causal or pattern.window is not None):
    raise SchemeError(
      "a causal or windowed query must have its key at the same position.",
      details=details,
      fix="causal=False and window=None for attention to another sequence.",
    )
