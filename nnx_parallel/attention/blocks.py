"""Makes the tiles of an attention of a flat program: what a tile of scores needs, and which tiles exist.

Masks are made tile by tile too; tiles that a mask of positions hides wholly are not computed (`masks`). An
example: of softmax(where(rows >= columns, q @ k.T, -1e9)) @ v, in blocks of 2 x 2, the tile of queries 2, 3
and keys 0, 1 needs q[2:4] and k[0:2]; its mask is made of the numbers 2, 3 and 0, 1; and queries 0, 1 need no
tile of keys 2, 3.

Where a mesh axis splits the positions, its devices share the attention (`tiles.Share`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from nnx_parallel.attention.flow import meeting
from nnx_parallel.attention.kernels import Kernel
from nnx_parallel.attention.masks import HIDDEN, PLACES, Hidden, Spans, fills_of
from nnx_parallel.attention.softmaxes import NotByBlocks, Softmax, named_dims, wholes
from nnx_parallel.attention.tiles import Share, TileAttention
from nnx_parallel.attention.tiling import (
  BlockNumbers,
  DimName,
  Grid,
  Labels,
  Node,
  Tiles,
  Untiled,
  call_equation,
  describe,
  fill,
  order,
)
from nnx_parallel.core.axes import count_shards
from nnx_parallel.core.jaxprs import (
  among,
  bind,
  dependents,
  is_inexact,
  makers,
  origin,
  struct,
)
from nnx_parallel.core.types import Jaxpr, JaxprEqn, Var

OVER_AXIS = ("ring", "ulysses")
_JUMPS = ("eq", "ne", "lt", "le", "gt", "ge", "sign", "floor", "ceil", "round")
"""Operations whose result jumps."""
Needed = Callable[[Mapping[int, jax.Array], Grid, DimName, DimName], jax.Array]
"""`TileAttention.needed` of inputs `[examples, length]` by position, blocks, and names of their dims."""


class NotAttention(Exception):
  """Why a softmax is not an attention."""


@dataclasses.dataclass(frozen=True)
class Way:
  """How an attention is computed: the option, by a kernel or in blocks, over an axis of a size, or None."""

  asked: str | int | None
  block: int
  kernel: Kernel | None
  axis: str | None
  size: int
  mapped: frozenset[str] = frozenset()  # mesh axes of an enclosing `jax.vmap`
  row: int | None = None  # the dim of the scores that is queries; None: the longest
  # of queries and of keys, each cut into blocks separately; None: one for each device
  parts: int | None = None
  # as in `Share` and `TileAttention`, for a program whose arrays all have examples first
  examples: tuple[str, ...] = ()
  needed: Needed | None = None
  zeros: bool = False  # whether a row whose scores are all `-inf` has the result 0; as written, it is NaN

  @property
  def is_over_axis(self) -> bool:
    """Whether devices were asked to share it: an error if they cannot."""
    return self.asked in OVER_AXIS

  def __str__(self) -> str:
    if self.is_over_axis:
      return f"attention by {self.asked} over {self.axis}={self.size}"
    return f"attention by blocks of {self.block}"


def blocked(body: Jaxpr, match: Softmax, way: Way) -> JaxprEqn | None:
  """The operation that computes an attention blockwise; None if one block holds the attention."""
  weights, product = match.product.invars[match.side], match.product
  scores = match.exp.outvars[0]
  lengths, _ = named_dims(scores.aval.shape)
  free = meeting(product).free[match.side]  # pyright: ignore[reportOptionalMemberAccess]
  rows = wholes(match.labels[0], free)
  if way.row in rows:
    rows = [way.row]
  columns = [name for name, _, _ in match.labels[0] if name in match.summed]
  if not rows or not columns:
    raise NotAttention(f"{match}: it is not over keys for each query")
  row, column = max(rows, key=lengths.__getitem__), max(columns, key=lengths.__getitem__)
  share = _shared(match, way, lengths, row, column)
  cut = {*match.cuts}
  depends = dependents(body, cut)
  given = dependents(body, [*body.invars, *body.constvars])

  def is_leaf(var: Var, labels: Labels) -> bool:
    if var in cut:
      return True
    is_position = var not in given and not is_inexact(var.aval)
    return not is_position and var not in depends and _is_leaf(tiles, var, labels, share)

  tiles = Tiles(body, share.grid, is_leaf)
  own = tuple((name, name, 1) for name in share.names)
  ends = [
    (match.largest.invars[0], order((name, match.order[name], 1) for name in share.names)),
    (scores, own),
    (match.total.invars[0], own),
    (weights, _only(match.labels[0], *share.names)),
  ]
  for var, labels in ends:
    try:
      tiles.need(var, labels, depends.__contains__)
    except Untiled as problem:
      raise NotByBlocks(f"{match}: its weights go through {problem}") from None
  values = product.invars[1 - match.side]
  tiles.need(values, _of_values(match, share))
  _check_leaves(body, match, tiles, {row, column})
  split = [share.split(labels) for labels in (*(labels for _, labels in tiles.leaves), match.labels[1])]
  if any(label is not None and label[2] > 1 for label in split):  # the minor of several labels in a dim
    if way.is_over_axis:
      raise NotByBlocks(f"{match}: its queries, keys or heads are the minor part of a dim")
    return blocked(body, match, dataclasses.replace(way, axis=None, size=1))
  if all(share.grid.count(name) == 1 for name in share.grid.blocks) and not way.zeros:
    return None
  return _Program(body, match, tiles, ends, (values, _of_values(match, share)), share, way).equation()


def _is_leaf(tiles: Tiles, var: Var, own: Labels, share: Share) -> bool:
  """Whether a value is sliced, rather than computed for each tile."""
  if {share.row, share.column} <= {name for name, _, _ in own}:
    return False
  # Keys and values that a model repeats, for groups of heads, are sent before they are.
  made = tiles.maker_of(var)
  while share.axis is not None and made is not None and made.primitive.name in PLACES:
    if made.invars[0].aval.size < var.aval.size:
      return False
    made = None if isinstance(made.invars[0], core.Literal) else tiles.maker_of(made.invars[0])
  return True


def _shared(match: Softmax, way: Way, lengths: Mapping[DimName, int], row: int, column: int) -> Share:
  """The part of an attention that each device computes; all of it, unless devices share it evenly."""
  is_ring, axis, n, dim = way.asked == "ring", way.axis, way.size, row
  if way.asked == "ulysses":
    dim = _heads(match, way, lengths)
  elif axis is not None and any(lengths[name] % n for name in (row, *([column] if is_ring else []))):
    if is_ring:
      raise NotByBlocks(
        f"{match}: {n} devices cannot split {lengths[row]} queries and {lengths[column]} keys"
      )
    axis, n = None, 1
  moving = column if is_ring else None
  split = {dim, moving} if axis is not None else set[Any]()
  grid = Grid.even(lengths, way.block, {d: way.parts or (n if d in split else 1) for d in (row, column)})
  if dim != row:
    grid = Grid(lengths, {**grid.blocks, dim: lengths[dim] // n}, grid.parts)
  if way.examples:
    shape = jax.sharding.get_abstract_mesh().shape
    shards = count_shards(way.examples, shape)
    grid = Grid(lengths, {**grid.blocks, 0: lengths[0] // shards}, grid.parts)
  return Share(axis, n, row, column, dim, moving, grid, way.mapped, way.examples)


def _heads(match: Softmax, way: Way, lengths: Mapping[DimName, int]) -> int:
  """The heads' dim of the scores: the last dim that weights and values share, after the examples' dim."""
  shape = match.exp.outvars[0].aval.shape
  shared = meeting(match.product).shared[match.side]  # pyright: ignore[reportOptionalMemberAccess]
  names = wholes(match.labels[0], shared)
  kept = [name for name, _, _ in match.labels[1]]
  if len(shared) < 2 or not names or names[-1] not in kept:
    raise NotByBlocks(f"{match}: no dim of it is heads of values")
  if lengths[names[-1]] % way.size:
    raise NotByBlocks(f"{match}: {way.size} devices cannot share {shape[names[-1]]} heads of values")
  return names[-1]


def _check_leaves(body: Jaxpr, match: Softmax, tiles: Tiles, names: set[int]) -> None:
  """Refuses scores that are not a product, and parts of them that need all scores or are computed in full."""
  scores, cut = match.exp.outvars[0], {*match.cuts}
  meets = [
    eqn
    for (_, labels), (eqn, wanted) in tiles.parts.items()
    if eqn.primitive.name == "dot_general"
    and names <= {name for name, _, _ in labels}
    and all(len(names & {name for name, _, _ in own}) == 1 for own in wanted)
  ]
  of_scores = dependents(body, {out for eqn in meets for out in eqn.outvars})
  own = {var for var, _ in tiles.leaves if var in of_scores and var not in cut and is_inexact(var.aval)}
  depends = dependents(body, own)
  for eqn, _ in tiles.parts.values():
    if eqn.primitive.name in _JUMPS and any(among(var, depends) for var in eqn.invars):
      # A tile rounds its scores differently: values equal to the other operand may end up above or below it.
      first = next(var for var in own if eqn.outvars[0] in dependents(body, {var}))
      maker: Any = tiles.maker_of(first)
      raise NotByBlocks(
        f"{match}: {describe(eqn)} compares its scores with {describe(maker)}, which is computed"
        " from all of a row"
      )
  for var, labels in tiles.leaves:
    made = tiles.maker_of(var)
    if made is None or not names <= {name for name, _, _ in labels}:
      continue
    if any(part in made.primitive.name for part in ("random", "rng_", "threefry")):
      raise NotByBlocks(f"{match}: dropout is between it and its product ({describe(made)})")
    if math.prod(var.aval.shape) >= math.prod(scores.aval.shape):
      raise NotByBlocks(f"{match}: {describe(made)} cannot be evaluated by blocks")
  if not meets:
    raise NotAttention(f"{match}: no product of queries and keys makes it")


@dataclasses.dataclass(frozen=True)
class _Program:
  """The computation of one tile of an attention, from tiles of its leaves.

  `ends` are the nodes to evaluate: the input of the maximum, the exponentials, the input of the sum, and the
  weights; `values` is the node of the values.
  """

  body: Jaxpr
  match: Softmax
  tiles: Tiles
  ends: Sequence[Node]
  values: Node
  share: Share
  way: Way

  @functools.cached_property
  def nodes(self) -> list[Node]:
    """The leaves; leaves with gradients come first."""
    leaves = [node for node in self.tiles.leaves if node[0] not in self.match.cuts]
    return sorted(leaves, key=lambda node: not is_inexact(node[0].aval))

  @property
  def wide(self) -> DTypeLike:
    """The dtype of the running result."""
    return jnp.promote_types(self.match.product.outvars[0].aval.dtype, jnp.float32)

  @functools.cached_property
  def row(self) -> Labels:
    """The labels of a number for each row."""
    kept = [d for d in range(len(self.match.order)) if d not in self.match.summed]
    return tuple((name, kept.index(name), 1) for name in self.share.names if name in kept)

  @functools.cached_property
  def _dims(self) -> list[DimName]:
    """The dims of a sum over the keys, or their factors; `NotAttention` if the result has not all of them."""
    match, kept = self.match, {name for name, _, _ in self.match.labels[1]}
    names, labels = named_dims(match.exp.outvars[0].aval.shape)
    found: list[DimName] = []
    for d in (d for d in names if isinstance(d, int) and d not in match.summed):
      own = [d] if d in kept else [name for name, dim, _ in labels if dim == d and name != d]
      if not own or not kept.issuperset(own):
        raise NotAttention(f"{match}: {describe(match.product)} sums over its dim {d}")
      found += own
    return found

  def attention(self, seen: np.ndarray | None, *, fills: bool = False) -> TileAttention:
    """The loops over the tiles that are seen; with `fills`, weights of rows that see nothing may be zeros."""
    return TileAttention(
      share=self.share,
      inputs=[labels for _, labels in self.nodes],
      slopes=sum(is_inexact(var.aval) for var, _ in self.nodes),
      row=self.row,
      result=_only(self.match.labels[1], *{*self.share.names} - {self.share.column}),
      dtype=self.match.product.outvars[0].aval.dtype,
      largest=self.largest,
      weighed=self.weighed,
      spread=self.spread,
      seen=seen,
      needed=None if self.way.needed is None else self._needed(self.way.needed),
      zeros_too=self.match.zeros_too or self.way.zeros or fills,
    )

  def _needed(self, needed: Needed) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """`needed` as a function of the leaves: an array of the program may be a leaf with more dims."""
    made, places = makers(self.body), {var: n for n, var in enumerate(self.body.invars)}
    bases = [origin(var, made, PLACES) for var, _ in self.nodes]

    def run(arrays: Sequence[jax.Array]) -> jax.Array:
      pairs = zip(bases, arrays, strict=True)
      given = {places[var]: x.reshape(len(x), -1) for var, x in pairs if among(var, places)}
      return needed(given, self.share.own, self.share.row, self.share.column)

    return run

  def largest(self, tiles: Sequence[jax.Array], places: BlockNumbers) -> jax.Array:
    """The maxima of a tile's scores over its keys."""
    node, labels = self.ends[0]
    known = dict(zip(self.nodes, tiles, strict=True))
    tile = self.tiles.value(node, labels, known, places).astype(self.wide)
    tile = self.tiles.grid.fresh(tile, labels, places, -math.inf)
    return tile.max(self.match.largest.params["axes"]).transpose(self.match.turned)

  def weighed(
    self, tiles: Sequence[jax.Array], largest: jax.Array, total: jax.Array, places: BlockNumbers
  ) -> tuple[jax.Array, jax.Array]:
    """The product of a tile's weights, and the sums of its exponentials."""
    match, (_, (scores, own), summed, weights) = self.match, self.ends
    known = dict(zip(self.nodes, tiles, strict=True))
    rows = largest.transpose(np.argsort(match.turned)), total
    for var, x in zip(match.cuts, rows, strict=True):
      x = x.astype(var.aval.dtype)
      known.update({node: x for node in self.tiles.leaves if node[0] is var})
    known[scores, own] = self.tiles.grid.fresh(self.tiles.value(scores, own, known, places), own, places)
    part, *pair = [self.tiles.value(*node, known, places) for node in (summed, weights, self.values)]
    made = bind(match.product, pair if match.side == 0 else pair[::-1], preferred_element_type=self.wide)
    return made[0].astype(self.wide), part.astype(self.wide).sum(match.summed)

  def spread(self, x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """A number for each row, with the dims of the product's result."""
    placed = {name: dim for name, dim, _ in self.match.labels[1]}
    factors = {name: factor for name, _, factor in self.match.labels[1]}
    cuts = {name: dim for name, dim, _ in self.row}
    sizes = [x.shape[cuts[name]] if name in cuts else self.tiles.grid.lengths[name] for name in self._dims]
    arranged = sorted(self._dims, key=lambda name: (placed[name], factors[name]))
    x = x.reshape(sizes).transpose([self._dims.index(name) for name in arranged])
    dims = {*placed.values()}
    return jnp.broadcast_to(x.reshape([n if d in dims else 1 for d, n in enumerate(shape)]), shape)

  def _spans(self, *blocks: tuple[Any, int]) -> list[Spans]:
    """Blocks of queries and of keys: their starts and length."""
    names = self.share.row, self.share.column
    return [Spans(name, starts, size) for name, (starts, size) in zip(names, blocks, strict=True)]

  @functools.cached_property
  def hidden(self) -> tuple[np.ndarray, float]:
    """Which tiles the mask hides wholly, and a number below which a row sees nothing (`-inf`: no row does).

    Where a row may see nothing, its weights are those of hidden scores: no tile is skipped behind several
    numbers, of which the larger get weight, or if weights are not plain exponentials over their sum.
    """
    grid = self.tiles.grid
    rows, columns = ((grid.starts(name), grid.blocks[name]) for name in (self.share.row, self.share.column))
    spans = self._spans((rows[0][:, None], rows[1]), columns)
    bounds = Hidden(self.body, grid.lengths, spans[0], spans[1])
    most = np.maximum(bounds.bounds(*self.ends[0])[1], bounds.bounds(*self._shifted)[1])
    hidden = most <= HIDDEN
    fill = float(most[hidden].max(initial=-math.inf))
    if not math.isfinite(fill) or self._sees_some:
      return hidden, -math.inf
    several = len({*most[hidden].astype(np.float32).tolist()}) > 1
    if several or len(self._fills[0]) > 1 or not self._is_plain:
      return most == -math.inf, -math.inf
    return hidden, fill * 0.99

  @property
  def _shifted(self) -> Node:
    """The scores from which the maximum is subtracted."""
    scores, labels = self.ends[1]
    exp: Any = self.tiles.maker_of(scores)
    difference: Any = self.tiles.maker_of(exp.invars[0])
    return difference.invars[0], labels

  @functools.cached_property
  def _fills(self) -> tuple[set[float], bool]:
    return fills_of(self._shifted[0], makers(self.body))

  @property
  def _sees_some(self) -> bool:
    """Whether each query surely sees its own position, the first or the last key."""
    lengths = self.tiles.grid.lengths
    rows, columns = lengths[self.share.row], lengths[self.share.column]
    at, seen = np.arange(rows), np.zeros(rows, bool)
    for key in (at, at + columns - rows, 0 * at, 0 * at + columns - 1):
      spans = self._spans((at, 1), (key.clip(0, columns - 1), 1))
      bounds = Hidden(self.body, lengths, spans[0], spans[1], products=0)
      seen |= bounds.bounds(*self._shifted)[0] > HIDDEN
    return bool(seen.all())

  @property
  def _is_plain(self) -> bool:
    """Whether the weights are exponentials over their sum, and nothing else."""
    todo, ends = [self.ends[3][0]], {self.match.exp.outvars[0], self.match.cuts[1]}
    while todo:
      var = todo.pop()
      if isinstance(var, core.Literal) or var not in ends:
        made = None if isinstance(var, core.Literal) else self.tiles.maker_of(var)
        if made is None or made.primitive.name not in (*PLACES, "div"):
          return False
        todo += made.invars
    return True

  def mean(self, values: jax.Array) -> jax.Array:
    """The mean of the values, as the result of the product for a row of equal weights."""
    product, side = self.match.product, self.match.side
    weights, met = product.invars[side].aval, meeting(product)
    free = met.free[side]  # pyright: ignore[reportOptionalMemberAccess]
    few = {*free, *met.summed[side]}  # pyright: ignore[reportOptionalMemberAccess]
    where = getattr(struct(weights).sharding, "spec", None)
    if where is not None:
      spec = PartitionSpec(*(None if d in few else own for d, own in enumerate(where)))
      weights = weights.update(sharding=weights.sharding.update(spec=spec))
    one = fill(
      weights.update(shape=[1 if d in few else n for d, n in enumerate(weights.shape)]), 1, weights.dtype
    )
    over = tuple(met.summed[1 - side])  # pyright: ignore[reportOptionalMemberAccess]
    mean = values.mean(over, dtype=self.wide, keepdims=True).astype(values.dtype)
    return bind(product, [one, mean] if side == 0 else [mean, one])[0]

  def equation(self) -> JaxprEqn:
    """The operation that computes the attention."""
    _ = self._dims  # raises, if it is none
    hidden, fill = self.hidden
    fills = math.isfinite(fill)
    attention, every = (self.attention(seen, fills=fills) for seen in (~hidden, None))
    product, values = self.match.product, self.match.product.invars[1 - self.match.side]

    def attention_by_blocks(*given: jax.Array) -> list[jax.Array]:
      result, largest = attention(*given[: len(self.nodes)])
      if fills and self._fills[1]:  # the scores of a row that sees nothing still have gradients
        written = functools.partial(every, *given[: len(self.nodes)])
        result = jax.lax.cond((largest <= fill).any(), lambda: written()[0], lambda: result)
      elif fills:
        sees_none = self.spread(largest <= fill, result.shape)
        result = jnp.where(sees_none, self.mean(given[-1]).astype(result.dtype), result)
      return [result]

    inputs = [var for var, _ in self.nodes] + ([values] if fills else [])
    return call_equation(attention_by_blocks, inputs, product.outvars, product)


def _of_values(match: Softmax, share: Share) -> Labels:
  """The labels of the values: keys, and heads if they are split."""
  met: Any = meeting(match.product)
  pairs = [pair for sides in (met.shared, met.summed) for pair in zip(*sides, strict=True)]
  other = {pair[match.side]: pair[1 - match.side] for pair in pairs}
  own = _only(match.labels[0], *{*share.names} - {share.row})
  return order((name, other[dim], factor) for name, dim, factor in own if dim in other)


def _only(labels: Labels, *names: int) -> Labels:
  return tuple(label for label in labels if label[0] in names)
