"""Computes the attention of any model by blocks of its queries and keys, without an edit.

Attention is found in the trace of a loss: a product, whatever elementwise follows (a scale, masks, biases, a
soft cap, casts), `exp(x - max)`, its sum over the keys, and a product of the quotient with the values. It is
replaced by the same operations on blocks, with a running maximum and sum (arXiv:2112.05682, 2205.14135), so
that no array of the size queries x keys exists, forward or backward. Masks are made block by block too;
blocks that a mask of positions hides wholly are not computed (`masks`).
Where a mesh axis splits the positions, its devices share the attention (`tile_attention.Share`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from nnx_parallel.core.flow import meeting
from nnx_parallel.core.given import is_count, is_one_of
from nnx_parallel.core.interpret import flattened
from nnx_parallel.core.jaxprs import (
  CALLS,
  among,
  bind,
  call_equation,
  called,
  changed_params,
  dependents,
  equations,
  has_rule,
  is_checkpoint,
  is_inexact,
  is_random,
  makers,
  opened,
  params_of,
  struct,
  without_unused,
)
from nnx_parallel.core.keys import identity
from nnx_parallel.core.tiles import (
  DimName,
  Grid,
  Labels,
  Node,
  Places,
  Tiles,
  Untiled,
  described,
  filled,
  ordered,
)
from nnx_parallel.core.types import ClosedJaxpr, Jaxpr, JaxprEqn, Program, Value, Var
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.forms import as_quotients, with_sinks_apart, without_shifts
from nnx_parallel.layers.fused import by_kernel
from nnx_parallel.layers.kernels import KERNELS, Kernel, kernel_in_use
from nnx_parallel.layers.mark import is_marked
from nnx_parallel.layers.masks import HIDDEN, PLACES, Hidden, Spans, has_one_fill
from nnx_parallel.layers.softmaxes import NotByBlocks, NotFused, Softmax, Softmaxes, named_dims, wholes
from nnx_parallel.layers.tile_attention import Share, TileAttention
from nnx_parallel.layout.constrain import manual_too

AttentionName = Literal["blockwise", "fused", "ring", "ulysses"]
Attention = AttentionName | int | None
"""`"blockwise"`, or the block length; `"fused"`: a fused kernel where JAX has a suitable kernel; `"ring"`,
`"ulysses"`: blockwise too, over the mesh axis that shards positions; None: as written."""
WORDS: tuple[AttentionName, ...] = get_args(AttentionName)
OVER_AXIS = ("ring", "ulysses")
BLOCK = 512
_INNER = (*CALLS, "scan", "while", "cond")
_JUMPS = ("eq", "ne", "lt", "le", "gt", "ge", "sign", "floor", "ceil", "round")
"""Operations whose result jumps."""
_AXIS: contextvars.ContextVar[str | None] = contextvars.ContextVar("axis of the positions", default=None)


class _NotAttention(Exception):
  """Why a softmax is not an attention."""


@dataclasses.dataclass
class _Found:
  """The attentions of a program.

  Attributes:
    taken: for each attention that is rewritten, why it does not use a fused kernel.
    left: for each attention that stays as written, why.
    kept: the rewritten attentions whose weights are also read elsewhere, so that the full weights still
      exist.
    reasons: why some softmaxes are not attentions.
  """

  taken: list[str | None] = dataclasses.field(default_factory=list[str | None])
  left: list[str] = dataclasses.field(default_factory=list[str])
  kept: list[str] = dataclasses.field(default_factory=list[str])
  reasons: list[str] = dataclasses.field(default_factory=list[str])

  def add(self, other: _Found) -> None:
    """Adds the attentions of another program."""
    for field in dataclasses.fields(self):
      getattr(self, field.name).extend(getattr(other, field.name))

  def line(self, way: _Way) -> str:
    """How many attentions were rewritten, out of how many, and why the rest were not."""
    count = len(self.taken) + len(self.left)
    text = f"{way}: {len(self.taken)}{f' of {count}' if self.left else ''} found"
    if way.kernel is not None:
      text = f"attention by the fused kernel: {self.taken.count(None)} of {count} found"
      why = _once(reason for reason in self.taken if reason is not None)
      text += f"; by blocks of {way.block}: {why}" if why else ""
    text += f"; as written: {_once(self.left)}" if self.left else ""
    if self.kept:
      text += f"; its scores or weights are read elsewhere too, so all of them exist: {_once(self.kept)}"
    return f"{text}; no fused kernel for this platform" if way.asked == "fused" and not way.kernel else text


def _once(reasons: Iterable[str]) -> str:
  return "; ".join(dict.fromkeys(reasons))


@contextlib.contextmanager
def queries_over(axis: str | None) -> Generator[None, None, None]:
  """Lets the devices of a mesh axis, which splits the positions, share the attention that is by blocks."""
  token = _AXIS.set(axis)
  try:
    yield
  finally:
    _AXIS.reset(token)


@dataclasses.dataclass(frozen=True)
class _Way:
  """How an attention is computed.

  Attributes:
    asked: the option.
    block: the length of the blocks.
    kernel: the fused kernel, if it is used.
    axis: the mesh axis whose devices share the attention; None: the rewrite assumes one device.
    size: the size of the axis.
    mapped: mesh axes of an enclosing `jax.vmap`.
  """

  asked: Attention
  block: int
  kernel: Kernel | None
  axis: str | None
  size: int
  mapped: frozenset[str] = frozenset()

  @property
  def is_over_axis(self) -> bool:
    """Whether it is an error if devices cannot share it."""
    return self.asked in OVER_AXIS

  def __str__(self) -> str:
    if self.is_over_axis:
      return f"attention by {str(self.asked).replace('_', ' ')} over {self.axis}={self.size}"
    return f"attention by blocks of {self.block}"


def check_attention(attention: Attention) -> None:
  """Raises a `TrainError` for an option that is not valid."""
  if attention is None or is_one_of(attention, [*WORDS]) or is_count(attention):
    return
  raise TrainError(
    f"attention={attention!r} is not a way to compute attention.",
    fix='attention="blockwise", or the length of the blocks: attention=256; "fused"; "ring"; "ulysses";'
    " None: as written.",
  )


def by_blocks(jaxpr: ClosedJaxpr, attention: Attention) -> tuple[ClosedJaxpr, str]:
  """The trace of a loss with blockwise or fused attention, and a line that reports the attentions found.

  Raises:
    TrainError: the loss has no attention; or, with an option of `OVER_AXIS`, the devices cannot share one.
  """
  way, found = _way(attention), _Found()
  changed = _changed(jaxpr, way, found, {})
  if way.is_over_axis and found.left:
    raise TrainError(
      f"attention={attention!r}: {way.axis}={way.size} cannot share an attention that was found.",
      details=_once(found.left),
      fix='dropout off, and lengths (attention="ring") or heads (attention="ulysses") that are'
      f' multiples of {way.size}; or attention="blockwise".',
    )
  if not found.taken:
    raise TrainError(
      f"attention={attention!r} finds no attention in the loss.",
      details=_once([*found.left, *found.reasons]) or "no softmax is followed by a product with values",
      fix="softmax(q k^T) v with dropout off, in jax.numpy, jax.nn.dot_product_attention or"
      " nnx.dot_product_attention; or leave attention out.",
    )
  return changed, found.line(way)


def _way(attention: Attention) -> _Way:
  """How attention is computed on the mesh that is active."""
  block = attention if isinstance(attention, int) else BLOCK
  kernel = kernel_in_use(KERNELS) if attention == "fused" else None
  mesh: Any = jax.sharding.get_abstract_mesh()
  kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  axis, mapped = _AXIS.get(), manual_too(mesh)
  if axis is not None and axis not in mapped and kinds.get(axis) == AxisType.Auto:
    return _Way(attention, block, kernel, axis, mesh.shape[axis], mapped)
  if attention in OVER_AXIS:
    raise TrainError(
      f"attention={attention!r} needs a mesh axis that splits the positions.",
      details=f"mesh {dict(mesh.shape)}"
      + (f", whose axis {axis!r} is {kinds[axis].name}" if axis in kinds else ""),
      fix="nxp.make_mesh(data=2, context=4), and nxp.presets.context(), or a rule for `seq` on an axis that"
      " splits no weight; on Explicit axes, a model that states no shardings.",
    )
  return _Way(attention, block, kernel, None, 1)


def _changed(jaxpr: Program, way: _Way, found: _Found, layers: dict[Hashable, tuple[Program, _Found]]) -> Any:
  """The program with its attention rewritten. Equal layers share one rewritten program."""
  flat = with_sinks_apart(as_quotients(without_shifts(flattened(jaxpr, is_opened))), is_opened)
  body = flat.jaxpr
  softmaxes = Softmaxes(body)
  eqns: dict[int, JaxprEqn] = {}
  matches: list[Softmax] = []
  here = _Found()
  for eqn in body.eqns:
    if eqn.primitive.name == "exp":
      products = softmaxes.products(eqn, *named_dims(eqn.outvars[0].aval.shape))
      if not products and (reason := softmaxes.before_sum(eqn)) is not None:
        here.reasons.append(reason)
      for product in products:
        try:
          match = softmaxes.match(eqn, product)
          new, why = _replaced(body, match, way)
        except NotByBlocks as problem:
          here.left.append(str(problem))
        except _NotAttention as problem:
          here.reasons.append(str(problem))
        else:
          here.taken.append(why)
          if new is not None:
            eqns[id(product)] = new
            matches.append(match)
    elif is_marked(eqn):
      layer = identity(called(eqn))
      if layer not in layers:
        inside = _Found()
        layers[layer] = _changed(called(eqn), way, inside, layers), inside
      here.add(layers[layer][1])
      eqns[id(eqn)] = eqn.replace(params=eqn.params | {"jaxpr": layers[layer][0]})
    elif eqn.primitive.name in _INNER or is_checkpoint(eqn):
      inside = {key: _inner(value, way, here, layers) for key, value in params_of(eqn).items()}
      eqns[id(eqn)] = eqn.replace(params=changed_params(eqn, inside))
  if here.taken:
    body = without_unused(body.replace(eqns=[eqns.get(id(eqn), eqn) for eqn in body.eqns]))
    remaining = {id(eqn) for eqn in body.eqns}
    for match in matches:
      if any(id(eqn) in remaining for eqn in (match.exp, *softmaxes.products_before(match.exp))):
        here.kept.append(str(match))
  found.add(here)
  if not here.taken:
    return jaxpr
  return flat.replace(jaxpr=body) if opened(jaxpr) is not jaxpr or flat.consts else body


def _inner(value: Value, *args: Value) -> Value:
  if isinstance(value, tuple):
    return tuple(_inner(item, *args) for item in value)
  return _changed(value, *args) if hasattr(opened(value), "eqns") else value


def is_opened(eqn: JaxprEqn) -> bool:
  """Whether an operation is a call whose operations may be part of an attention."""
  name = eqn.primitive.name
  if has_rule(eqn) and "bwd" not in params_of(eqn):  # jax.nn.softmax
    inside = {e.primitive.name for e in equations(called(eqn))}
    return {"reduce_max", "exp", "reduce_sum"} <= inside
  return name in CALLS and not is_marked(eqn)


def _replaced(body: Jaxpr, match: Softmax, way: _Way) -> tuple[JaxprEqn | None, str | None]:
  """The blockwise or fused operation of an attention, or None for a single block; and why it has no kernel.

  The reason is None where the fused kernel is used.

  Raises:
    _NotAttention: the match is not an attention, or it cannot be computed blockwise.
  """
  if way.kernel is None:
    return _blocked(body, match, way), ""
  try:
    if match.sink is not None:
      raise NotFused("it has an attention sink")
    return by_kernel(body, match, way.kernel), None
  except NotFused as problem:
    return _blocked(body, match, way), f"{match}: {problem}"


def _blocked(body: Jaxpr, match: Softmax, way: _Way) -> JaxprEqn | None:
  """The operation that computes an attention blockwise; None if one block holds the attention.

  Raises:
    _NotAttention: the match is not an attention, or the devices cannot share it.
  """
  weights, product = match.product.invars[match.side], match.product
  scores = match.exp.outvars[0]
  lengths, _ = named_dims(scores.aval.shape)
  free = meeting(product).free[match.side]  # pyright: ignore[reportOptionalMemberAccess]
  rows = wholes(match.labels[0], free)
  columns = [name for name, _, _ in match.labels[0] if name in match.summed]
  if not rows or not columns:
    raise _NotAttention(f"{match}: it is not over keys for each query")
  row, column = max(rows, key=lengths.__getitem__), max(columns, key=lengths.__getitem__)
  share = _shared(match, way, lengths, row, column)
  cut = {*match.cuts}
  depends = dependents(body, cut)
  tiles = Tiles(body, share.grid, lambda var, own: var in cut or _is_leaf(tiles, var, own, share, depends))
  own = tuple((name, name, 1) for name in share.names)
  ends = [
    (match.largest.invars[0], ordered((name, match.order[name], 1) for name in share.names)),
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
    return _blocked(body, match, dataclasses.replace(way, axis=None, size=1))
  if all(share.grid.count(name) == 1 for name in share.grid.blocks):
    return None
  return _Program(body, match, tiles, ends, (values, _of_values(match, share)), share).equation()


def _is_leaf(tiles: Tiles, var: Var, own: Labels, share: Share, depends: set[Var]) -> bool:
  """Whether a value is sliced, rather than computed for each tile."""
  if var in depends or {share.row, share.column} <= {name for name, _, _ in own}:
    return False
  # Keys and values that a model repeats, for groups of heads, are sent before they are.
  made = tiles.made(var)
  while share.axis is not None and made is not None and made.primitive.name in PLACES:
    if made.invars[0].aval.size < var.aval.size:
      return False
    made = None if isinstance(made.invars[0], core.Literal) else tiles.made(made.invars[0])
  return True


def _shared(match: Softmax, way: _Way, lengths: Mapping[DimName, int], row: int, column: int) -> Share:
  """The part of an attention that each device computes; all of it, unless devices share it evenly.

  Raises:
    NotByBlocks: they cannot, and must.
  """
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
  grid = Grid.even(lengths, way.block, {name: n if name in split else 1 for name in (row, column)})
  if dim != row:
    grid = Grid(lengths, {**grid.blocks, dim: lengths[dim] // n}, grid.parts)
  return Share(axis, n, row, column, dim, moving, grid, way.mapped)


def _heads(match: Softmax, way: _Way, lengths: Mapping[DimName, int]) -> int:
  """The heads' dim of the scores: the last dim that weights and values share, after the examples' dim.

  Raises:
    NotByBlocks: there is no such dim, or devices cannot share it evenly.
  """
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
      maker: Any = tiles.made(first)
      raise NotByBlocks(
        f"{match}: {described(eqn)} compares its scores with {described(maker)}, which is computed"
        " from all of a row"
      )
  for var, labels in tiles.leaves:
    made = tiles.made(var)
    if made is None or not names <= {name for name, _, _ in labels}:
      continue
    if is_random(made):
      raise NotByBlocks(f"{match}: dropout is between it and its product ({described(made)})")
    if math.prod(var.aval.shape) >= math.prod(scores.aval.shape):
      raise NotByBlocks(f"{match}: {described(made)} cannot be evaluated by blocks")
  if not meets:
    raise _NotAttention(f"{match}: no product of queries and keys makes it")


@dataclasses.dataclass(frozen=True)
class _Program:
  """The computation of one tile of an attention, from tiles of its leaves.

  Attributes:
    body: the program that contains the attention.
    match: the attention.
    tiles: its operations.
    ends: the nodes to evaluate: the input of the maximum, the exponentials, the input of the sum, the
      weights.
    values: the node of the values.
    share: the part that each device computes.
  """

  body: Jaxpr
  match: Softmax
  tiles: Tiles
  ends: Sequence[Node]
  values: Node
  share: Share

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
  def _order(self) -> list[DimName]:
    return _order(self.match, {name: None for name, _, _ in self.match.labels[1]})

  def attention(self, seen: np.ndarray | None, *, fills: bool = False) -> TileAttention:
    """The attention as a function of its leaves."""
    return TileAttention(
      share=self.share,
      inputs=[labels for _, labels in self.nodes],
      slopes=sum(is_inexact(var.aval) for var, _ in self.nodes),
      row=self.row,
      result=_only(self.match.labels[1], self.share.row, self.share.dim),
      dtype=self.match.product.outvars[0].aval.dtype,
      largest=self.largest,
      weighed=self.weighed,
      spread=self.spread,
      seen=seen,
      zeros_too=self.match.zeros_too or fills,
    )

  def largest(self, tiles: Sequence[jax.Array], places: Places) -> jax.Array:
    """The maxima of a tile's scores over its keys."""
    node, labels = self.ends[0]
    known = dict(zip(self.nodes, tiles, strict=True))
    tile = self.tiles.value(node, labels, known, places).astype(self.wide)
    tile = self.tiles.grid.fresh(tile, labels, places, -math.inf)
    return tile.max(self.match.largest.params["axes"]).transpose(self.match.turned)

  def weighed(
    self, tiles: Sequence[jax.Array], largest: jax.Array, total: jax.Array, places: Places
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
    sizes = [x.shape[cuts[name]] if name in cuts else self.tiles.grid.lengths[name] for name in self._order]
    arranged = sorted(self._order, key=lambda name: (placed[name], factors[name]))
    x = x.reshape(sizes).transpose([self._order.index(name) for name in arranged])
    dims = {*placed.values()}
    return jnp.broadcast_to(x.reshape([n if d in dims else 1 for d, n in enumerate(shape)]), shape)

  @functools.cached_property
  def hidden(self) -> tuple[np.ndarray, float]:
    """Which tiles the mask hides completely, and a number below which a row sees nothing (`-inf` for NaN).

    A row that sees nothing is the mean of the values if hidden scores are finite and the weights are
    exponentials over their sum. Where masks put different numbers, a row that sees nothing gives weight to
    the scores with the larger number, so no tile is skipped.
    """
    grid = self.tiles.grid
    names = self.share.row, self.share.column
    rows, columns = (Spans(name, grid.starts(name), grid.blocks[name]) for name in names)
    rows = rows._replace(starts=rows.starts[:, None])
    bounds = Hidden(self.body, grid.lengths, rows, columns)
    scores, labels = self.ends[1]
    quotient: Any = self.tiles.made(scores)
    difference: Any = self.tiles.made(quotient.invars[0])
    most = np.maximum(bounds.most(*self.ends[0]), bounds.most(difference.invars[0], labels))
    hidden = most <= HIDDEN
    fill = float(most[hidden].max(initial=-math.inf))
    several = len({*most[hidden].astype(np.float32).tolist()}) > 1
    several |= not has_one_fill(difference.invars[0], makers(self.body))
    if math.isfinite(fill) and (several or not self._is_plain):
      return most == -math.inf, -math.inf
    return hidden, fill * 0.99

  @property
  def _is_plain(self) -> bool:
    """Whether the weights are exponentials over their sum, and nothing else."""
    todo, ends = [self.ends[3][0]], {self.match.exp.outvars[0], self.match.cuts[1]}
    while todo:
      var = todo.pop()
      if isinstance(var, core.Literal) or var not in ends:
        made = None if isinstance(var, core.Literal) else self.tiles.made(var)
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
    one = filled(
      weights.update(shape=[1 if d in few else n for d, n in enumerate(weights.shape)]), 1, weights.dtype
    )
    over = tuple(met.summed[1 - side])  # pyright: ignore[reportOptionalMemberAccess]
    mean = values.mean(over, dtype=self.wide, keepdims=True).astype(values.dtype)
    return bind(product, [one, mean] if side == 0 else [mean, one])[0]

  def equation(self) -> JaxprEqn:
    """The operation that computes the attention."""
    order, (hidden, fill) = self._order, self.hidden
    assert order
    attention = self.attention(~hidden, fills=math.isfinite(fill))
    product, values = self.match.product, self.match.product.invars[1 - self.match.side]

    def attention_by_blocks(*given: jax.Array) -> list[jax.Array]:
      sink = None if self.match.sink is None else given[len(self.nodes)].transpose(self.match.turned)
      result, largest = attention(*given[: len(self.nodes)], sink=sink)
      if math.isfinite(fill):
        sees_none = self.spread(largest <= fill, result.shape)
        result = jnp.where(sees_none, self.mean(given[-1]).astype(result.dtype), result)
      return [result]

    inputs = [var for var, _ in self.nodes] + ([] if self.match.sink is None else [self.match.sink])
    inputs += [values] if math.isfinite(fill) else []
    return call_equation(attention_by_blocks, inputs, product.outvars, product)


def _of_values(match: Softmax, share: Share) -> Labels:
  """The labels of the values: keys, and heads if they are split."""
  met: Any = meeting(match.product)
  own = {"shared": met.shared, "summed": met.summed}
  found = [
    (name, sides[1 - match.side][sides[match.side].index(dim)], factor)
    for name, dim, factor in _only(match.labels[0], share.column, share.dim)
    for sides in own.values()
    if dim in sides[match.side]
  ]
  return ordered(found)


def _order(match: Softmax, placed: Mapping[DimName, object]) -> list[DimName]:
  """The dims of a sum over the keys, or their factors, as far as the result of the product has them.

  Raises:
    _NotAttention: it has not all of them.
  """
  scores = match.exp.outvars[0].aval
  names, labels = named_dims(scores.shape)
  found: list[DimName] = []
  for d in (d for d in names if isinstance(d, int) and d not in match.summed):
    own = [d] if d in placed else [name for name, dim, _ in labels if dim == d and name != d]
    if not own or any(name not in placed for name in own):
      raise _NotAttention(f"{match}: {described(match.product)} sums over its dim {d}")
    found += own
  return found


def _only(labels: Labels, *names: int) -> Labels:
  return tuple(label for label in labels if label[0] in names)
