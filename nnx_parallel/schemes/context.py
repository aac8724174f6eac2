"""Exact attention over sequences whose positions are sharded over a mesh axis.

In a ring (arXiv:2310.01889), each device keeps its queries, and the keys and values travel around the ring.
With all-to-all (arXiv:2309.14509), each device gets all positions of some heads instead. With two mesh axes,
a ring and all-to-alls can be combined (arXiv:2405.07719). This module has the masks, the scores of a tile,
and the layouts; `layers.tile_attention` has the loops over the tiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.lax import PrecisionLike
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from nnx_parallel.core.axes import axes_by_dim, entry_of, without
from nnx_parallel.core.mesh import AnyMesh, axis_sizes, is_explicit_here
from nnx_parallel.core.shards import on_shards
from nnx_parallel.core.tiles import DimName, Grid, Labels, Places
from nnx_parallel.core.types import AnyArray
from nnx_parallel.errors import SchemeError
from nnx_parallel.layers.kernels import KERNELS, RINGS, kernel_in_use
from nnx_parallel.layers.softmaxes import NotFused
from nnx_parallel.layers.tile_attention import Share, TileAttention
from nnx_parallel.layout.batch import batch_axes
from nnx_parallel.layout.constrain import manual_too, scope_in_use, surroundings
from nnx_parallel.schemes.tokens import check_not_mapped
from nnx_parallel.schemes.zigzag import zigzag

How = Literal["ring", "ulysses"]


def context_attention(
  axis: str = "context",
  *,
  how: How = "ring",
  causal: bool = False,
  window: int | None = None,
  zigzag: bool = False,
  block: int = 512,
  fused: bool = False,
  heads_axis: str | None = None,
) -> Callable[..., jax.Array]:
  """Makes a function for attention over sequences whose positions are sharded over a mesh axis.

  The mesh is the active mesh, which `train_step`, `plan.scope()` or `jax.set_mesh` sets; outside of jit, it
  is the mesh of the queries. The shardings over its other axes do not change. Without a mesh, one device
  computes the attention blockwise.

  The returned function takes
  `(query, key, value, mask=None, *, segment_ids=None, positions=None, is_causal=False, dtype=None,
  precision=None)` with global shapes:

  - queries `[batch..., length, heads, head_dim]`; keys and values with the same number of heads, or with
    fewer heads, each for a group of query heads;
  - `segment_ids` `[batch..., length]`, integers: a position attends only to positions with the same integer;
  - `positions` `[batch..., length]`, integers: the number of each position in its sequence or document, for
    elements in another order, such as the order of `nxp.parallel.zigzag(..., segment_ids=...)`;
  - `mask` `[batch or 1, 1, 1, length]`: the visible keys.

  A device does not compute blocks that these arrays hide in all of its examples. The function is also an
  `attention_fn` of `nnx.MultiHeadAttention`. Dropout, biases, a mask of queries x keys and sown weights are
  errors. A query that sees no key has the result 0.

  Args:
    axis: the mesh axis that shards the positions. The length must be a multiple of the size of this axis.
      With `zigzag`, it must be a multiple of twice this size. With `heads_axis`, it must also be a multiple
      of the product of the sizes of both axes.
    how: `"ring"` sends each shard of the keys and values around the ring of devices, in axis size - 1 steps;
      the backward pass sends them again, together with their gradients. `"ulysses"` sends queries, keys,
      values and results once, in all-to-alls; the number of heads must be a multiple of the axis size.
    causal: whether a query attends to no later position.
    window: a query attends to the last `window` positions, including its own; if attention is not causal,
      also to the same number of positions ahead. A ring then ends after the last shard that is visible.
    zigzag: whether the positions are in the order of `nxp.parallel.zigzag`, so that a causal ring gives all
      devices equal work.
    block: the number of queries, and of keys, for which scores are computed at a time.
    fused: compute with the fused kernel of the chip, if JAX has a suitable kernel and the other mesh axes are
      batch axes; else blockwise. The kernel of TPUs needs a length that is a multiple of 128 (in a ring: the
      length of each shard, and with `zigzag` half of it), no `mask`, no `positions`, and in a ring no
      `window`. The kernel of NVIDIA GPUs (cuDNN) needs `"ulysses"`, bfloat16 or float16, no `mask`, no
      `positions` and no `segment_ids`.
    heads_axis: with `"ring"`, a second mesh axis, whose size must divide the number of heads. Outside the
      attention, `axis` and `heads_axis` shard the positions, with `axis` as the major axis. Inside the
      attention, `heads_axis` shards the heads, and only `axis` shards the positions: all-to-alls over
      `heads_axis` change the layout, and a ring over `axis` computes the attention.

  Returns:
    The attention function. Equal arguments return equal functions.

  Raises:
    SchemeError: an option has an invalid value; at the call, shapes or arguments are not supported.

  Source: ring attention, arXiv:2310.01889; balance, arXiv:2311.09431; all-to-all (Ulysses), arXiv:2309.14509;
  both, arXiv:2405.07719.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> attend = nxp.parallel.context_attention(causal=True)
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 8))
    >>> with jax.set_mesh(nxp.make_mesh(data=2, context=4)):
    ...   split = jax.jit(attend)(q, k, v)
    >>> bool(jnp.allclose(split, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5))
    True
  """
  return ContextAttention(axis, how, causal, window, zigzag, block, fused, heads_axis)


@dataclasses.dataclass(frozen=True)
class ContextAttention:
  """The result of `context_attention`."""

  axis: str
  how: How
  causal: bool
  window: int | None
  zigzag: bool
  block: int
  fused: bool = False
  heads_axis: str | None = None

  def __post_init__(self) -> None:
    if self.how not in ("ring", "ulysses"):
      raise SchemeError(f"how={self.how!r} is not a way to attend.", fix='how="ring" or how="ulysses"')
    if self.heads_axis is not None and (self.how != "ring" or self.heads_axis in (self.axis, "")):
      raise SchemeError(
        f"heads_axis={self.heads_axis!r} is not a second mesh axis beside the axis of a ring.",
        details=f"axis={self.axis!r}, how={self.how!r}",
        fix='context_attention("context", how="ring", heads_axis="heads")',
      )
    for name, value in {"window": self.window, "block": self.block}.items():
      if value is not None and (type(value) is not int or value < 1):
        raise SchemeError(f"{name}={value!r} is not a number of positions.", fix=f"{name}=512, for example")

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    is_causal: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike | None = None,
    bias: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    module: nnx.Module | None = None,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = True,
  ) -> jax.Array:
    """See `context_attention`."""
    del dropout_rng, broadcast_dropout
    _check_options(bias, 0.0 if deterministic else dropout_rate, module)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    shape = query.shape
    by_position = _by_position({"segment_ids": segment_ids, "positions": positions}, shape, key.shape)
    if positions is not None and self.zigzag:
      raise SchemeError(
        "zigzag=True and positions= both say how the positions are ordered.",
        fix="positions= for documents that are ordered separately; zigzag=True for one sequence.",
      )
    if query.ndim != 4:
      query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
      mask = None if mask is None else mask.reshape(-1, *mask.shape[-3:])
    around = surroundings(query)
    mesh = around.mesh
    sizes = {} if mesh is None else axis_sizes(mesh)
    for option, name in self.axes.items():
      if sizes and name not in sizes:
        other = next((axis for axis in sizes if axis not in self.axes.values()), None)
        raise SchemeError(
          f"the mesh has no axis {name!r}, over which context_attention splits the positions.",
          details=f"mesh {sizes}",
          fix=f"nxp.make_mesh(..., {name}=2)"
          + ("." if other is None else f", or context_attention({option}={other!r})."),
        )
    check_not_mapped("the positions", [*self.axes.values()], around.manual | around.mapped)
    sequence = _Sequence(
      dataclasses.replace(self, causal=self.causal or is_causal),
      sizes.get(self.axis, 1),
      sizes.get(self.heads_axis or "", 1),
      (query.shape[1], key.shape[1]),
      precision,
      manual_too(mesh),
      positions is not None,
      _examples_over(query, mesh, {*self.axes.values(), *around.manual, *around.mapped}),
    )
    _check_shapes(sequence, query, key, value)
    keep = None if mask is None else _seen_keys(mask, key)
    if (copies := sequence.copies(query, key)) > 1:
      key, value = (jnp.repeat(x, copies, 2) for x in (key, value))
    with _active(mesh):
      # An Explicit axis of one device, on the dims of queries and of keys, would be twice in the scores.
      single = [axis for axis in self.axes.values() if sizes.get(axis) == 1 and is_explicit_here(axis)]
      given = query, key, value, by_position, keep
      if single:
        given = jax.tree.map(lambda x: _typed(jnp.asarray(x), single, None), given)
      result = _attention(sequence, *given)
      if single:
        result = jax.sharding.reshard(result, jax.typeof(query).sharding.spec)
    return result.reshape(*shape[:-1], value.shape[-1])

  @property
  def axes(self) -> dict[str, str]:
    """The mesh axes that shard the positions outside the attention, major to minor, by their options."""
    return {"axis": self.axis} | ({} if self.heads_axis is None else {"heads_axis": self.heads_axis})

  def tiles(
    self,
    length: int,
    shards: int,
    *,
    segment_ids: AnyArray | None = None,
    positions: AnyArray | None = None,
  ) -> np.ndarray:
    """The tiles of scores that each device computes at each shard that it visits, `[devices, visits]`.

    Args:
      length: the global length of the sequence, in positions.
      shards: the size of the axis.
      segment_ids: as for a call, `[batch, length]`; None for one document.
      positions: as for a call, `[batch, length]`; None for the order that the options say.
    """
    sequence = _Sequence(self, shards, 1, (length, length), has_positions=positions is not None)
    arrays = {"segment_ids": segment_ids, "positions": positions}
    batch = next((len(x) for x in arrays.values() if x is not None), 1)
    given = _by_position(arrays, *[(batch, length, 1, 1)] * 2)
    needed = np.asarray(sequence.needed(given, sequence.share.grid))
    return sequence.share.visits(sequence.seen & needed).sum((-1, -2)).T


@dataclasses.dataclass(frozen=True)
class _Sequence:
  """Attention over sequences of one length: which positions see each other, and the part of each device.

  Attributes:
    options: the user's options.
    shards: the size of the mesh axis.
    rings: the size of `heads_axis`, which is the number of rings; each ring computes some of the heads.
    lengths: the number of queries and of keys.
    precision: of the products.
    mapped: mesh axes of an enclosing `jax.vmap`.
    has_positions: whether the positions of the elements are an argument.
    examples: the mesh axes that split the examples, as far as they are known.
  """

  options: ContextAttention
  shards: int
  rings: int
  lengths: tuple[int, int]
  precision: PrecisionLike = None
  mapped: frozenset[str] = frozenset()
  has_positions: bool = False
  examples: tuple[str, ...] = ()

  @property
  def by_heads(self) -> int:
    """The number of devices along `axis` that share the heads: 1 in a ring."""
    return self.shards if self.options.how == "ulysses" else 1

  @property
  def heads(self) -> int:
    """The number of devices along `axis` and `heads_axis` that share the heads."""
    return self.by_heads * self.rings

  @property
  def parts(self) -> int:
    """The number of parts of the sequence that are cut into blocks separately."""
    zigzag = self.options.zigzag
    return self.shards * (2 if zigzag else 1) if zigzag or self.by_heads == 1 else 1

  @functools.cached_property
  def share(self) -> Share:
    """The blocks, and the part of each device."""
    rows, columns = self.lengths
    lengths = {"column": columns, "heads": self.by_heads, "row": rows}
    grid = Grid.even(lengths, self.options.block, {"row": self.parts, "column": self.parts})
    axis, n = (self.options.axis, self.shards) if self.shards > 1 else (None, 1)
    if self.by_heads == 1:
      return Share(axis, n, "row", "column", "row", None if axis is None else "column", grid, self.mapped)
    grid = dataclasses.replace(grid, blocks={**grid.blocks, "heads": 1})
    return Share(axis, n, "row", "column", "heads", None, grid, self.mapped)

  def position(self, index: AnyArray) -> AnyArray:
    """The position in the sequence of the element at an index, in zigzag order if that is asked."""
    if not self.options.zigzag:
      return index
    half = self.lengths[0] // (2 * self.shards)
    part = index // half
    device, is_late = part // 2, part % 2
    return index + (device + is_late * (2 * self.shards - 1 - 2 * device) - part) * half

  @functools.cached_property
  def seen(self) -> np.ndarray:
    """Which tiles have a query that sees a key, `[blocks of queries, blocks of keys]`."""
    grid = self.share.grid
    row, column = (self.position(grid.starts(name)) for name in ("row", "column"))
    if self.has_positions:
      return np.ones((len(row), len(column)), bool)
    behind = row[:, None] - column[None]
    near = self.near(behind - grid.blocks["column"] + 1, behind + grid.blocks["row"] - 1)
    return np.ones(behind.shape, bool) & near

  def near(self, least: Any, most: Any) -> Any:
    """Whether a query may see a key that is between `least` and `most` positions before it."""
    seen, window = most >= 0 if self.options.causal else True, self.options.window
    return seen if window is None else seen & (least < window) & (most > -window)

  def needed(self, given: Mapping[str, AnyArray], grid: Grid) -> jax.Array:
    """Which tiles have a query that sees a key in any example, by segments, positions and mask.

    Args:
      given: the arrays, for the queries and keys of `grid`.
      grid: the blocks.

    Returns:
      `[blocks of queries, blocks of keys]`.
    """

    def bounds(name: str) -> list[jax.Array]:
      dim, x = "row" if name.startswith("row") else "column", given[name]
      parts, size = grid.parts.get(dim, 1), grid.blocks[dim]
      split = jnp.reshape(x, (len(x), parts, -1))
      last = jnp.repeat(split[..., -1:], -split.shape[-1] % size, -1)
      blocks = jnp.concatenate([split, last], -1).reshape(len(x), grid.count(dim), size)
      found = blocks.min(-1), blocks.max(-1)
      return [x[:, :, None] if dim == "row" else x[:, None] for x in found]

    seen = jnp.ones((1, grid.count("row"), grid.count("column")), bool)
    if "row segment_ids" in given:
      (first, last), (low, high) = bounds("row segment_ids"), bounds("column segment_ids")
      seen &= (first <= high) & (low <= last)
    if "row positions" in given:
      (first, last), (low, high) = bounds("row positions"), bounds("column positions")
      seen &= self.near(first - high, last - low)
    if "keep" in given:
      seen &= bounds("keep")[1]
    return seen.any(0)

  def copies(self, query: jax.Array, key: jax.Array) -> int:
    """How often keys and values are repeated, so that their heads can be split."""
    kv_heads, n, axis = key.shape[2], self.heads, self.options.heads_axis or self.options.axis
    copies = n // math.gcd(n, kv_heads)
    if query.shape[2] // kv_heads % copies:
      raise SchemeError(
        f"{n} devices cannot share {query.shape[2]} heads evenly.",
        details=f"{query.shape[2]} heads of queries, {kv_heads} of keys; {axis}={n}",
        fix=f'how="ring" without heads_axis=, or a number of heads that is a multiple of {n}.',
      )
    return copies

  def scores(self, given: Mapping[str, jax.Array], places: Places) -> jax.Array:
    """A tile of scores `[batch, key heads, devices, group, queries, keys]`; `-inf` for unseen keys."""
    q, k, grid = given["q"], given["k"], self.share.grid
    scores = self.product("bqhngd,bshnd->bhngqs", q, k) / math.sqrt(q.shape[-1])
    seen: list[jax.Array] = []
    if self.options.causal or self.options.window is not None:
      if self.has_positions:
        row, column = given["row positions"], given["column positions"]
      else:
        row, column = (self.position(grid.indices(name, places))[None] for name in ("row", "column"))
      behind = row[:, :, None] - column[:, None]
      seen.append(self.near(behind, behind))
    if "row segment_ids" in given:
      seen.append(given["row segment_ids"][:, :, None] == given["column segment_ids"][:, None])
    if "keep" in given:
      seen.append(given["keep"][:, None])
    for own in seen:
      scores = jnp.where(own[:, None, None, None], scores, -jnp.inf)
    return grid.fresh(scores, (("row", 4, 1), ("column", 5, 1)), places, -math.inf)

  def product(self, dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """A product of tiles, in float32 at least."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(dims, x, y, precision=self.precision, preferred_element_type=wide)

  def labels(self, row: int | None, column: int | None, heads: int | None) -> Labels:
    """The labels of an array whose queries, keys and devices that share the heads are some of its dims."""
    dims = {"row": row, "column": column, "heads": heads if self.by_heads > 1 else None}
    return tuple((name, dim, 1) for name, dim in dims.items() if dim is not None)

  def attend(self, given: Mapping[str, jax.Array]) -> jax.Array:
    """The result `[batch, key heads, devices, group, queries, head_dim]` by tiles."""
    labels = {
      "q": self.labels(1, None, 3),
      **dict.fromkeys(("k", "v"), self.labels(None, 1, 3)),
      **dict.fromkeys(("row segment_ids", "row positions"), self.labels(1, None, None)),
      **dict.fromkeys(("column segment_ids", "column positions", "keep"), self.labels(None, 1, None)),
    }

    def named(tiles: Sequence[jax.Array]) -> dict[str, jax.Array]:
      return dict(zip(given, tiles, strict=True))

    def largest(tiles: Sequence[jax.Array], places: Places) -> jax.Array:
      return self.scores(named(tiles), places).max(-1)

    def weighed(
      tiles: Sequence[jax.Array], largest: jax.Array, total: jax.Array, places: Places
    ) -> tuple[jax.Array, jax.Array]:
      weights = jnp.exp(self.scores(named(tiles), places) - largest[..., None])
      v = named(tiles)["v"]
      part = self.product("bhngqs,bshnd->bhngqd", (weights / total[..., None]).astype(v.dtype), v)
      return part, weights.sum(-1)

    by_example = len(given) > 3 and not self.mapped
    share = dataclasses.replace(self.share, examples=self.examples if by_example else ())
    attention = TileAttention(
      share=share,
      inputs=[labels[name] for name in given],
      slopes=3,
      row=self.labels(4, None, 2),
      result=self.labels(4, None, 2),
      dtype=given["q"].dtype,
      largest=largest,
      weighed=weighed,
      spread=lambda x, shape: jnp.broadcast_to(x[..., None], shape),
      seen=self.seen,
      needed=(lambda arrays: self.needed(named(arrays), self.share.own)) if len(given) > 3 else None,
      zeros_too=True,
    )
    laid = [_laid(x, share, share.split(labels[name])) for name, x in given.items()]
    result, _ = attention(*laid)
    return _laid(result, share, ("row", 4, 1))


@functools.partial(jax.jit, static_argnums=0)
def _attention(
  sequence: _Sequence,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  by_position: Mapping[str, jax.Array],
  keep: jax.Array | None,
) -> jax.Array:
  """Attention of global arrays `[batch, length, heads, head_dim]`."""
  (batch, rows, heads, _), kv_heads, n = q.shape, k.shape[2], sequence.heads
  # XLA turns the change of layout into an all-to-all. For `jax.lax.all_to_all` in a region that is manual
  # over one axis only, it would gather the dims that other axes split.
  given = {
    "q": q.reshape(batch, rows, kv_heads // n, n, heads // kv_heads, q.shape[-1]),
    "k": k.reshape(*k.shape[:2], kv_heads // n, n, k.shape[-1]),
    "v": v.reshape(*v.shape[:2], kv_heads // n, n, v.shape[-1]),
  }
  given |= {**by_position, **({} if keep is None else {"keep": keep})}
  # Without the first of these constraints, XLA may gather arrays whose layout is not constrained.
  for name, x in given.items():
    dims = 1, 3 if x.ndim > 2 else None
    given[name] = _by_rings(_by_rings(x, sequence, *dims, inverse=True), sequence, *dims)
  result = _by_fused_kernel(sequence, given) if sequence.options.fused else None
  if result is None:
    result = sequence.attend(given)
  # Without the first constraint, XLA would reshard each partial result instead of the final result.
  result = _by_rings(_by_rings(result, sequence, 4, 2), sequence, 4, 2, inverse=True)
  return result.transpose(0, 4, 1, 2, 3, 5).reshape(batch, rows, heads, v.shape[-1])


def _by_rings(
  x: jax.Array, sequence: _Sequence, rows: int, heads: int | None, *, inverse: bool = False
) -> jax.Array:
  """Moves `heads_axis` from the dim of the positions to the dim of the heads, or back if `inverse`."""
  axis, second = sequence.options.axis, sequence.options.heads_axis
  if second is None or sequence.rings == 1:
    return x
  if is_explicit_here(second):
    return _typed(x, (second,), rows if inverse else heads)
  own = () if is_explicit_here(axis) else (axis,)  # a constraint can name Auto axes only
  layout: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
  layout[rows] = entry_of((*own, second) if inverse else own)
  if heads is not None:
    layout[heads] = None if inverse else second
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*layout))


def _by_fused_kernel(sequence: _Sequence, given: Mapping[str, jax.Array]) -> jax.Array | None:
  """The same as `_Sequence.attend`, where each device computes its part by the kernel; None: it cannot."""
  options, by_ring = sequence.options, sequence.options.how == "ring"
  kernel: Any = kernel_in_use(RINGS if by_ring else KERNELS)
  mesh = jax.sharding.get_abstract_mesh()
  sizes, own = axis_sizes(mesh), [axis for axis in options.axes.values() if axis in mesh.axis_names]
  # Over other axes, the kernel would be replicated.
  rest = math.prod(n for axis, n in sizes.items() if axis not in (*sequence.examples, *own))
  fits = options.axis in own and rest == 1 and not sequence.mapped
  taken = "keep" in given or sequence.has_positions or (by_ring and options.window is not None)
  if kernel is None or not fits or taken or AxisType.Explicit in mesh.axis_types:
    return None
  attend = functools.partial(kernel, causal=options.causal)
  if by_ring:
    attend = functools.partial(attend, axis=options.axis, size=sequence.shards, zigzag=options.zigzag)
  else:
    attend = _on_all_positions(functools.partial(attend, window=options.window), sequence)

  def local(q: Any, k: Any, v: Any, segments: jax.Array | None) -> jax.Array:
    scale = q.shape[-1] ** -0.5
    q = jnp.moveaxis(q[:, :, :, 0], 1, 3)  # [batch, heads, group, length, features]
    k, v = (jnp.moveaxis(x[:, :, :, 0], 1, 2) for x in (k, v))
    return attend(q, k, v, segments=segments, scale=scale)[:, :, None]

  rows, segments, share = entry_of(sequence.examples), given.get("row segment_ids"), sequence.share
  place, heads = (options.axis, options.heads_axis) if by_ring else (None, options.axis)
  specs = *[PartitionSpec(rows, place, None, heads)] * 3, PartitionSpec(rows, place)
  run = on_shards(local, mesh, specs, PartitionSpec(rows, None, heads, None, place))
  q, k, v = (share.by_heads(given[name], (("row", 1, 1), ("heads", 3, 1))) for name in ("q", "k", "v"))
  with contextlib.suppress(NotFused):
    return share.by_positions(run(q, k, v, segments), (("row", 4, 1), ("heads", 2, 1)))
  return None


def _on_all_positions(attend: Callable[..., jax.Array], sequence: _Sequence) -> Callable[..., jax.Array]:
  """The kernel for positions in their order."""

  def ordered(x: jax.Array, dim: int, *, inverse: bool = False) -> jax.Array:
    return zigzag(x, sequence.shards, dim=dim, inverse=inverse) if sequence.options.zigzag else x

  def whole(
    q: jax.Array, k: jax.Array, v: jax.Array, *, segments: jax.Array | None, scale: float
  ) -> jax.Array:
    q, k, v = (ordered(x, dim, inverse=True) for x, dim in ((q, 3), (k, 2), (v, 2)))
    segments = None if segments is None else ordered(segments, 1, inverse=True)
    return ordered(attend(q, k, v, segments=segments, scale=scale), 3)

  return whole


def _examples_over(query: jax.Array, mesh: AnyMesh | None, others: Collection[str]) -> tuple[str, ...]:
  """The axes that split the examples, by the type of the queries or the plan in scope; `()` if unknown."""
  if mesh is None:
    return ()
  scope, sizes = scope_in_use(), axis_sizes(mesh)
  found = () if scope is None else batch_axes(scope.ruleset, sizes) or ()
  if AxisType.Explicit in mesh.axis_types:
    found = axes_by_dim(jax.typeof(query).sharding.spec, query.ndim)[0]
  axes = tuple(axis for axis in found if axis not in others and sizes[axis] > 1)
  return axes if query.shape[0] % math.prod(sizes[axis] for axis in axes) == 0 else ()


def _active(mesh: AnyMesh | None) -> contextlib.AbstractContextManager[object]:
  """A context in which a mesh is active."""
  if mesh is None or not jax.sharding.get_abstract_mesh().empty:
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _laid(x: jax.Array, share: Share, label: tuple[DimName, int, int] | None) -> jax.Array:
  """An array with dim 0 on the axes of the examples, and the dim of a label on the axis, if Explicit."""
  if share.examples and is_explicit_here(share.examples[0]):
    x = _typed(x, share.examples, 0)
  if share.axis is None or not share.is_explicit:
    return x
  return _typed(x, (share.axis,), None if label is None else label[1])


def _typed(x: jax.Array, names: Sequence[str], dim: int | None) -> jax.Array:
  """`x` with some Explicit axes on one dim of its type, or on none; other axes stay as they are."""
  axes = [without(own, frozenset(names)) for own in axes_by_dim(jax.typeof(x).sharding.spec, x.ndim)]
  if dim is not None:
    axes[dim] = (*axes[dim], *names)
  return jax.sharding.reshard(x, PartitionSpec(*map(entry_of, axes)))


def _seen_keys(mask: jax.Array, key: jax.Array) -> jax.Array:
  """A mask of keys `[batch, length]`."""
  batch, length = key.shape[:2]
  if mask.ndim != 4 or mask.shape[1:] != (1, 1, length) or mask.shape[0] not in (1, batch):
    raise SchemeError(
      "context_attention takes no mask of queries and keys, whose size is the square of the length.",
      details=f"mask {tuple(mask.shape)}; keys {tuple(key.shape)}",
      fix="context_attention(causal=True, window=...) and segment_ids= say the same; a mask of keys is"
      f" ({batch}, 1, 1, {length}).",
    )
  return jnp.broadcast_to(mask[:, 0, 0].astype(bool), (batch, length))


def _by_position(
  given: Mapping[str, AnyArray | None], query: Sequence[int], key: Sequence[int]
) -> dict[str, AnyArray]:
  """Integers `[batch, length]` of the queries and of the keys, by name.

  Args:
    given: integers `[batch..., length]` by name; None for missing arrays.
    query: the shape of the queries.
    key: the shape of the keys.
  """
  found: dict[str, AnyArray] = {}
  for name, x in given.items():
    if x is None:
      continue
    shape = tuple(query[:-2])
    if x.shape != shape or query[-3] != key[-3] or not jnp.issubdtype(x.dtype, jnp.integer):
      raise SchemeError(
        f"{name} are {x.dtype} of shape {tuple(x.shape)}, not one integer for each position.",
        details=f"query {tuple(query)}, key {tuple(key)}",
        fix=f"integers of shape {shape}, for queries and keys of the same length.",
      )
    # A difference of small or unsigned integers would wrap around.
    x = x.astype(jax.dtypes.canonicalize_dtype(jnp.promote_types(x.dtype, jnp.int32))).reshape(-1, shape[-1])
    found |= dict.fromkeys((f"row {name}", f"column {name}"), x)
  return found


def _check_options(bias: jax.Array | None, dropout: float, module: nnx.Module | None) -> None:
  given = {
    "a bias": bias is not None,
    f"dropout_rate={dropout}": dropout > 0,
    "sow_weights": module is not None,
  }
  for name, wanted in given.items():
    if wanted:
      raise SchemeError(
        f"context_attention cannot use {name}: the full attention weights never exist.",
        fix="attention without it; dropout of the layer's result does not need the weights.",
      )


def _check_shapes(sequence: _Sequence, query: jax.Array, key: jax.Array, value: jax.Array) -> None:
  n, options = sequence.shards * sequence.rings, sequence.options
  axes = " and ".join(options.axes.values())
  needed = math.lcm(n, 2 * sequence.shards if options.zigzag else 1)
  details = f"query {query.shape}, key {key.shape}, value {value.shape}"
  fits = (
    key.shape[:3] == value.shape[:3] and key.shape[0] == query.shape[0] and key.shape[-1] == query.shape[-1]
  )
  if not fits or query.shape[2] % key.shape[2]:
    raise SchemeError(
      "queries, keys and values do not fit each other.",
      details=details,
      fix="[batch, length, heads, head_dim]; the heads of queries are a multiple of the heads of keys.",
    )
  for x in (query, key):
    if x.shape[1] % needed:
      raise SchemeError(
        f"{x.shape[1]} positions cannot be split evenly over {n} devices along {axes}.",
        details=details
        + (f", in zigzag order: two parts for each shard of {options.axis}" if options.zigzag else ""),
        fix=f"pad them to {-(-x.shape[1] // needed) * needed}.",
      )
  if query.shape[1] != key.shape[1] and (options.causal or options.window is not None):
    raise SchemeError(
      "a causal or windowed query must have its key at the same position.",
      details=details,
      fix="causal=False and window=None for attention to another sequence.",
    )
