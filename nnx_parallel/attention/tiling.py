"""Evaluates a part of a trace tile by tile: for blocks of one or two of its dims.

A program that makes a large array and reduces it need not hold it: each operation maps dims of its result to
dims of its operands, so a block of the result needs only blocks of the operands. Tiles are followed back to
small values, or to results of operations without such a map (leaves), which are sliced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from nnx_parallel.core.jaxprs import bind, makers, struct
from nnx_parallel.core.types import Aval, Jaxpr, JaxprEqn, Var
from nnx_parallel.infer.dims import IDENTITIES, MATRIX, PRODUCTS, SCATTERS, DimMap, dim_map, moved

DimName: TypeAlias = Any
"""The name of a dim that is cut into blocks: any key of a dict."""
BlockNumbers: TypeAlias = Mapping[DimName, Any]
"""For each named dim, the number of a block: an int, or an array in a loop."""
Labels: TypeAlias = tuple[tuple[DimName, int, int], ...]
"""`(name of a dim, dim of an array, factor)`: the array's dim is factor x the named dim x the rest."""
Node: TypeAlias = tuple[Var, Labels]
"""A variable of a trace, and which of its dims are named."""
_WHOLE = SCATTERS | MATRIX | {"fft"} | (PRODUCTS - {"dot_general"}) | (IDENTITIES - {"sharding_constraint"})
"""Operations that are not computed for each tile: they cost much, or lay out the full array."""


class Untiled(Exception):
  """An operation that cannot be evaluated for a block of a dim; `eqn` is the operation."""

  def __init__(self, eqn: JaxprEqn):
    super().__init__(describe(eqn))
    self.eqn = eqn


def describe(eqn: JaxprEqn) -> str:
  """An operation and the type of its result."""
  return " -> ".join([eqn.primitive.name, *(var.aval.str_short() for var in eqn.outvars[:1])])


@dataclasses.dataclass(frozen=True)
class Grid:
  """Blocks of named dims.

  The last block ends where its dim ends, so it may overlap the previous block: only `fresh` positions count.
  """

  lengths: Mapping[DimName, int]  # the lengths of the named dims
  blocks: Mapping[DimName, int]  # the block lengths of some of them
  # the number of equal parts of some of them; each part is cut into blocks separately
  parts: Mapping[DimName, int] = dataclasses.field(default_factory=dict[DimName, int])

  @classmethod
  def even(cls, lengths: Mapping[DimName, int], block: int, parts: Mapping[DimName, int]) -> Grid:
    """A grid of equal blocks of at most `block` of each of the dims that are in `parts`."""
    each = {name: lengths[name] // n for name, n in parts.items()}
    return cls(lengths, {name: -(-n // -(-n // block)) for name, n in each.items()}, parts)

  def count(self, name: DimName) -> int:
    """The number of blocks of a dim."""
    parts = self.parts.get(name, 1)
    return parts * -(-self.lengths[name] // parts // self.blocks[name])

  def starts(self, name: DimName) -> np.ndarray:
    """Where the blocks of a dim start."""
    parts, size = self.parts.get(name, 1), self.blocks[name]
    part = self.lengths[name] // parts
    within = np.minimum(np.arange(self.count(name) // parts) * size, part - size)
    return (np.arange(parts)[:, None] * part + within).reshape(-1)

  def fresh(self, tile: jax.Array, labels: Labels, places: BlockNumbers, other: float = 0.0) -> jax.Array:
    """A tile with another number at positions that an earlier tile has too."""
    for name, dim, factor in labels:
      if name in self.blocks and self.lengths[name] // self.parts.get(name, 1) % self.blocks[name]:
        size, length = self.blocks[name], tile.shape[dim]
        new = self.indices(name, places) >= self._start(name, places)[1]
        new = jnp.broadcast_to(new[None, :, None], (factor, size, length // factor // size)).reshape(length)
        where = struct(jax.typeof(tile)).sharding
        new = jax.lax.broadcast_in_dim(new, tile.shape, (dim,), out_sharding=where)
        tile = jax.lax.select(new, tile, jnp.full_like(tile, other))
    return tile

  def indices(self, name: DimName, places: BlockNumbers) -> jax.Array:
    """Where the elements of a block are in the dim."""
    return self._start(name, places)[0] + jnp.arange(self.blocks[name])

  def _start(self, name: DimName, places: BlockNumbers) -> tuple[jax.Array, jax.Array]:
    """The start of a block, and the start of the positions that no earlier block has."""
    parts, size, place, ahead = self.parts.get(name, 1), self.blocks[name], places[name], 0
    length, count = self.lengths[name] // parts, self.count(name) // parts
    if parts > 1:
      place, ahead = place % count, place // count * length
    return ahead + jnp.minimum(place * size, length - size), ahead + place * size

  def shape(self, shape: Sequence[int], labels: Labels) -> tuple[int, ...]:
    """The shape of a tile of an array."""
    return self._resize(shape, labels, self.lengths, self.blocks)

  def untile(self, shape: Sequence[int], labels: Labels) -> tuple[int, ...]:
    """The shape of an array, given the shape of a tile."""
    return self._resize(shape, labels, self.blocks, self.lengths)

  def _resize(
    self,
    shape: Sequence[int],
    labels: Labels,
    before: Mapping[DimName, int],
    after: Mapping[DimName, int],
  ) -> tuple[int, ...]:
    found = list(shape)
    for name, dim, _ in labels:
      if name in self.blocks:
        found[dim] = found[dim] // before[name] * after[name]
    return tuple(found)

  def take(self, x: jax.Array, labels: Labels, places: BlockNumbers) -> jax.Array:
    """A tile of an array."""
    for name, dim, factor in labels:
      if name in self.blocks:
        start, size = self._start(name, places)[0], self.blocks[name]
        if x.shape[dim] == self.lengths[name]:
          x = jax.lax.dynamic_slice_in_dim(x, start, size, dim)
        else:
          split = x.reshape(self._split(x.shape, name, dim, factor))
          part = jax.lax.dynamic_slice_in_dim(split, start, size, dim + 1)
          x = part.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return x

  def put(self, x: jax.Array, part: jax.Array, labels: Labels, places: BlockNumbers) -> jax.Array:
    """The array with a tile replaced."""
    sliced = [label for label in labels if label[0] in self.blocks]
    if not sliced:
      return part
    (name, dim, factor), *rest = sliced
    split, (start, _) = self._split(x.shape, name, dim, factor), self._start(name, places)
    if rest:
      part = self.put(self.take(x, (sliced[0],), places), part, tuple(rest), places)
    if x.shape[dim] == self.lengths[name]:
      return jax.lax.dynamic_update_slice_in_dim(x, part, start, dim)
    split_part = (*split[: dim + 1], self.blocks[name], *split[dim + 2 :])
    whole = jax.lax.dynamic_update_slice_in_dim(x.reshape(split), part.reshape(split_part), start, dim + 1)
    return whole.reshape(x.shape)

  def _split(self, shape: Sequence[int], name: DimName, dim: int, factor: int) -> tuple[int, ...]:
    length = self.lengths[name]
    return (*shape[:dim], factor, length, shape[dim] // factor // length, *shape[dim + 1 :])


class Tiles:
  """The part of a program that some of its values need, evaluated for a tile of them.

  Calls in the program are leaves; so are values that `leaf` wants sliced rather than computed for each tile.
  """

  def __init__(self, body: Jaxpr, grid: Grid, leaf: Callable[[Var, Labels], bool]):
    self.grid, self._leaf = grid, leaf
    self._made = makers(body)
    self.leaves: dict[Node, None] = {}  # the values that are sliced, in order
    self.parts: dict[Node, tuple[JaxprEqn, list[Labels]]] = {}  # the others: with the labels of the operands

  def need(self, var: Var, labels: Labels, strict: Callable[[Var], bool] = lambda _: False) -> None:
    """Adds a value to the evaluated values; `Untiled` if a `strict` operation has no blocks."""
    if isinstance(var, core.Literal) or (var, labels) in self.parts or (var, labels) in self.leaves:
      return
    eqn = self._made.get(var)
    if eqn is not None and not self._leaf(var, labels):
      try:
        wanted = pull(eqn, labels, self.grid.lengths)
      except Untiled:
        if strict(var):
          raise
      else:
        self.parts[var, labels] = eqn, wanted
        for operand, own in zip(eqn.invars, wanted, strict=True):
          self.need(operand, own, strict)
        return
    self.leaves[var, labels] = None

  def maker_of(self, var: Var) -> JaxprEqn | None:
    """The operation that makes a value, or None."""
    return self._made.get(var)

  def value(self, var: Var, labels: Labels, known: dict[Node, jax.Array], places: BlockNumbers) -> jax.Array:
    """A tile of a value, from the tiles that are known, to which it is added."""
    if isinstance(var, core.Literal):
      return var.val
    if (var, labels) not in known:
      eqn, wanted = self.parts[var, labels]
      pairs = zip(eqn.invars, wanted, strict=True)
      inputs = [self.value(operand, own, known, places) for operand, own in pairs]
      results = self._tile(eqn, labels, inputs, places)
      known.update({(out, labels): x for out, x in zip(eqn.outvars, results, strict=True)})
    return known[var, labels]

  def _tile(
    self, eqn: JaxprEqn, labels: Labels, inputs: list[jax.Array], places: BlockNumbers
  ) -> Sequence[jax.Array]:
    name = eqn.primitive.name
    shape = self.grid.shape(eqn.outvars[0].aval.shape, labels)
    if name == "iota":
      dim, length = eqn.params["dimension"], eqn.params["shape"][eqn.params["dimension"]]
      own = tuple((key, 0, factor) for key, d, factor in labels if d == dim)
      numbers = self.grid.take(jnp.arange(length, dtype=eqn.params["dtype"]), own, places)
      where = struct(eqn.outvars[0].aval).sharding
      return [jax.lax.broadcast_in_dim(numbers, shape, (dim,), out_sharding=where)]
    if name == "broadcast_in_dim":
      where = eqn.params["sharding"]
      if where is not None:  # on Explicit axes; a block is not split
        cut = {dim for key, dim, _ in labels if key in self.grid.blocks}
        spec = (None if d in cut else entry for d, entry in enumerate(where.spec))
        where = where.update(spec=PartitionSpec(*spec))
      return bind(eqn, inputs, shape=shape, sharding=where)
    if name == "reshape":
      return bind(eqn, inputs, new_sizes=shape)
    if name == "slice":
      limits = zip(eqn.params["limit_indices"], shape, strict=True)
      limits = [length if _whole(eqn, d) else limit for d, (limit, length) in enumerate(limits)]
      return bind(eqn, inputs, limit_indices=tuple(limits))
    if name in ("gather", "dynamic_slice"):
      sizes = zip(eqn.params["slice_sizes"], eqn.invars[0].aval.shape, inputs[0].shape, strict=True)
      return bind(eqn, inputs, slice_sizes=tuple(now if size == all_ else size for size, all_, now in sizes))
    return bind(eqn, inputs)


def pull(eqn: JaxprEqn, labels: Labels, lengths: Mapping[DimName, int]) -> list[Labels]:
  """The labels that the operands of an operation need for those of its result; `Untiled` without blocks."""
  labels = tuple(label for label in labels if lengths[label[0]] > 1)
  dims = {dim for _, dim, _ in labels}
  if len(dims) < len(labels):
    raise Untiled(eqn)
  if eqn.primitive.name == "iota" or not labels:
    return [()] * len(eqn.invars)
  if eqn.primitive.name == "reshape":
    before, after = eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape
    placed = [moved(dim, factor, lengths[name], before, after) for name, dim, factor in labels]
    if None in placed or len({to[0] for to in placed if to is not None}) < len(placed):
      raise Untiled(eqn)  # it splits a named dim, or a block would be a rectangle inside one dim
    return [order((name, *to) for (name, _, _), to in zip(labels, placed, strict=True) if to is not None)]
  found = _blocks(eqn, dims)
  result = found.results[0]
  wanted = {result[dim] for dim in dims}
  made = wanted.difference(*found.operands)
  if None in wanted or (made and eqn.primitive.name != "broadcast_in_dim"):
    raise Untiled(eqn)
  return [
    order((name, d, factor) for name, dim, factor in labels for d, f in enumerate(own) if f == result[dim])
    for own in found.operands
  ]


def push(eqn: JaxprEqn, operand: int, labels: Labels, lengths: Mapping[DimName, int]) -> Labels:
  """The labels of an operation's result, given the labels of an operand; `Untiled` without a map of its dims.

  Dims that it sums over lose their labels, and so do dims that a reshape splits.
  """
  if eqn.primitive.name == "reshape":
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    placed = [(name, moved(dim, factor, lengths[name], before, after)) for name, dim, factor in labels]
    return order((name, *to) for name, to in placed if to is not None)
  found = _blocks(eqn)
  place = {f: d for d, f in enumerate(found.results[0]) if f is not None}
  own = [place.get(f) for f in found.operands[operand]]  # pyright: ignore[reportArgumentType]
  kept = [(name, to, factor) for name, dim, factor in labels if (to := own[dim]) is not None]
  _blocks(eqn, {to for _, to, _ in kept})
  return order(kept)


def order(labels: Iterable[tuple[DimName, int, int]]) -> Labels:
  """Labels in a canonical order."""
  return tuple(sorted(labels, key=lambda label: (str(label[0]), label[1])))


def call_equation(
  function: Callable[..., Sequence[jax.Array]], inputs: Sequence[Var], outputs: Sequence[Var], like: JaxprEqn
) -> JaxprEqn:
  """An operation in the place of `like` that computes variables from others by a function of flat arrays."""
  jitted = jax.jit(function, inline=False)
  eqn: Any
  (eqn,) = jax.make_jaxpr(jitted)(*[struct(var.aval) for var in inputs]).jaxpr.eqns
  return eqn.replace(invars=[*inputs], outvars=[*outputs], source_info=like.source_info)


def tie(xs: Sequence[jax.Array]) -> list[jax.Array]:
  """The same arrays, each of which depends on all of them.

  The derivative of a scan computes values that depend only on its constants ahead of the scan: a mask of
  equal layers would be broadcast, and kept, for all tiles at once.
  """
  token = sum((x[:0].sum().astype(jnp.float32) for x in xs if x.ndim), jnp.zeros(()))
  return [jax.lax.optimization_barrier((x, token))[0] for x in xs]


def fill(aval: Aval, value: float, dtype: DTypeLike) -> jax.Array:
  """A constant array, with the shape of a variable, and its sharding on Explicit axes."""
  return jax.lax.full(aval.shape, value, dtype, sharding=struct(aval).sharding)


def finite(largest: jax.Array) -> jax.Array:
  """Maxima of exponents, with 0 for empty rows: `-inf - -inf` would be NaN."""
  return jnp.where(largest == -jnp.inf, jnp.zeros_like(largest), largest)


def _blocks(eqn: JaxprEqn, dims: Collection[int] = ()) -> DimMap:
  """The map of an operation, of whose result a block along some dims is made from blocks of the operands."""
  found, name = dim_map(eqn), eqn.primitive.name
  if found is None or name in _WHOLE or len({*found.results}) > 1:
    raise Untiled(eqn)
  if found.mixed & {found.results[0][d] for d in dims}:
    raise Untiled(eqn)
  if name == "sharding_constraint":  # a block is too small for the mesh
    spec = getattr(eqn.params["sharding"], "spec", ())
    if any(d < len(spec) and isinstance(spec[d], (str, tuple)) and spec[d] for d in dims):
      raise Untiled(eqn)
  return found


def _whole(eqn: JaxprEqn, dim: int) -> bool:
  """Whether a slice keeps all of a dim."""
  return eqn.invars[0].aval.shape[dim] == eqn.outvars[0].aval.shape[dim]
