"""Gathers parameters where a loss reads them, so that XLA's partitioner has no choice to get wrong.

Where one mesh axis shards both a parameter and the examples, the partitioner decides which of the two to move
to make a product. On a mesh with a further axis, some of its programs compute wrong numbers (see
`known_faults.py`). With the parameter gathered over the axes of the examples, as fully-sharded data
parallelism means it, there is nothing to decide:

    y = x @ w.astype(bfloat16)                   # w: P("fsdp", "tensor"), examples over ("data", "fsdp")
    y = x @ constrain(w.astype(bfloat16), P(None, "tensor"))

The constraint comes after a cast, so that half the bytes are sent, and in the body of a scan or a checkpoint,
so that the backward pass gathers again. Its transpose sums the gradient over the same axes. (A gradient that
is summed straight into the shards needs 4 % less memory on TPUs, and leaves XLA a product that it gets
wrong: tests/searches/test_fuzz.py.)

A table that tokens are looked up in is not gathered, on any mesh. Each device looks up its columns of the
tokens of all devices along the axis, and the devices exchange them; the gradient goes the same way back:

    y = table[tokens]                            # table: P("tensor", "fsdp") or P(("tensor", "fsdp"))
    y = constrain(table, P("tensor", "fsdp"))[constrain(tokens, P("data"))]
    y = constrain(constrain(y, P("data", None, "fsdp")), P(("data", "fsdp")))

If another axis shards the rows of a table, the result of a look-up has the columns of the table. Else XLA may
shard them over that axis, and look up wrong rows:

    y = constrain(table[tokens], P(UNCONSTRAINED, None))    # table: P("data"), tokens: P(("tensor", "fsdp"))

The examples of a product with a parameter stay where they are, on any mesh. Else XLA moves the activations of
some layers, which sends more on one axis, and keeps more in memory on two:

    y = constrain(constrain(x, P("fsdp", ...)) @ w, P("fsdp", ...))    # ...: UNCONSTRAINED

If the axis of a parameter also splits the positions between layers (a rule for `seq`), the result of a
product with it is split as the parameter is, not by positions. Else the partitioner may gather the parameter:

    y = constrain(x @ w, P(UNCONSTRAINED, UNCONSTRAINED, "tensor"))    # x: P("data", "tensor")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnx_parallel.core.axes import axes_by_dim, axes_in, axes_of, count_shards, entry_of, without
from nnx_parallel.core.interpret import DEFAULT, Facts, Interpreter, facts_after, is_walked, wiring
from nnx_parallel.core.jaxprs import HELD, bind, by_trace, has_rule, place_of
from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.nodes import Path
from nnx_parallel.core.types import ClosedJaxpr, JaxprEqn, PyTree, Value
from nnx_parallel.errors import TrainError
from nnx_parallel.infer.dims import MOVES, PRODUCTS, DimMap, dim_map
from nnx_parallel.layout.constrain import manual_too

Dims = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim of a parameter that nothing has read yet."""


class Examples(NamedTuple):
  """A value of the batch, with its examples on one dim."""

  dim: int


Fact = Dims | Examples | None
"""What is known of a value: where a parameter is sharded, where a value has its examples, or nothing."""
FREE: Any = PartitionSpec.UNCONSTRAINED
LOST: Any = "lost"
"""A value that is a parameter in one branch only."""
_MOVES = MOVES | {"concatenate", "stack", "unstack"}
"""Operations after which a parameter is gathered, and not before: casts, and stacks of layers for a scan."""


@dataclasses.dataclass(frozen=True)
class Gather:
  """Which arrays of some modules a loss gathers."""

  axes: tuple[str, ...]  # the axes of the examples that are larger than 1, major to minor
  mesh: AnyMesh  # the mesh of the arrays
  reads: Mapping[Path, Dims]  # path -> the layout of an array that they shard
  # whether each read gathers. Look-ups exchange columns and products keep their examples anyway.
  everywhere: bool
  positions: frozenset[str] = frozenset()  # the axes that split the positions of activations between layers

  @classmethod
  def of(
    cls,
    leaves: Mapping[Path, object],
    batch: Iterable[str],
    mesh: AnyMesh | None,
    positions: Iterable[str] = (),
  ) -> Gather | None:
    """What a loss gathers of arrays with these shardings; None for nothing.

    The axes are those of the examples, and of the positions between layers.
    """
    if mesh is None or AxisType.Explicit in mesh.axis_types:  # there, the types of the operands decide
      return None
    axes = tuple(axis for axis in batch if mesh.shape.get(axis, 1) > 1)
    reads = {path: where.spec for path, where in leaves.items() if isinstance(where, NamedSharding)}
    over = frozenset(axis for axis in positions if mesh.shape.get(axis, 1) > 1)
    others = {axis for axis, size in mesh.shape.items() if size > 1} - {*axes}
    rows = others if len(axes) > 1 else set[str]()  # a look-up is wrong with examples over several axes only
    ours = {*axes, *over, *rows}
    split = {path: tuple(map(axes_of, x)) for path, x in reads.items() if ours & {*axes_in(x)}}
    everywhere = bool(others) and any({*axes} & {*axes_in(dims)} for dims in split.values())
    return cls(axes, mesh, split, everywhere, positions=over) if split else None

  def on(
    self, run: Callable[..., PyTree], paths: Callable[..., Sequence[Path | None]]
  ) -> Callable[..., PyTree]:
    """`run`, a function of pytrees of arrays, with the parameters gathered where it reads them.

    `paths`, called with the same arguments, gives the path of each of their arrays; None for the batch.
    """

    def evaluate(traced: ClosedJaxpr, args: tuple[PyTree, ...]) -> Sequence[jax.Array]:
      leaves = jax.tree.leaves(args)
      known = [self._known(path, x) for path, x in zip(paths(*args), leaves, strict=True)]
      return _Gather(self)(traced, leaves, known)[0]

    return by_trace(run, evaluate)

  def _known(self, path: Path | None, x: jax.Array) -> Fact:
    if path is None:
      return Examples(0) if jax.numpy.ndim(x) else None
    found = self.reads.get(path)
    return None if found is None else axes_by_dim(found, jax.numpy.ndim(x))


def gather_reads(
  gather: Gather | None, run: Callable[..., PyTree], paths: Callable[..., Sequence[Path | None]]
) -> Callable[..., PyTree]:
  """`gather.on(run, paths)`, or `run` itself where nothing is gathered."""
  return run if gather is None else gather.on(run, paths)


class _Gather(Interpreter[Fact]):
  """Evaluates the trace of a loss once more, with a constraint on each parameter where it is read."""

  def __init__(self, what: Gather):
    # Along the axes of an enclosing `jax.vmap`, its own rule places the arrays.
    self._axes = tuple(axis for axis in what.axes if axis not in manual_too(what.mesh))
    self._mesh, self._everywhere, self._positions = what.mesh, what.everywhere, what.positions
    self._several = len(what.axes) > 1  # whether the examples are over several axes, of a `jax.vmap` too
    facts: Facts[Fact] = Facts(
      constant=lambda _: None,
      follow=_follow,
      join=self._either,
      row=lambda _, fact: _shift(fact, -1),
      stack=lambda _, fact: _shift(fact, 1),
    )
    super().__init__(self._run, facts)

  def _run(self, eqn: JaxprEqn, inputs: list[Value], facts: list[Fact]) -> Any:
    if not any(map(_is_parameter, facts)) or eqn.primitive.name == "shard_map":
      return bind(eqn, inputs), facts_after(eqn, facts, self._facts)
    if LOST in facts:
      raise TrainError(
        f"{eqn.primitive.name} ({place_of(eqn)}) reads a parameter that comes from a branch of a condition.",
        details="it is sharded over axes of the examples, and has to be gathered where it is read",
        fix="use the parameter inside of the branch.",
      )
    if (moved := _move(eqn, facts)) is not None:
      return bind(eqn, inputs), moved
    if is_walked(eqn) and not has_rule(eqn):
      carried = {*wiring(eqn).carried.values()}
      read = [n in carried and _is_parameter(fact) for n, fact in enumerate(facts)]
      rows = [*zip(inputs, facts, read, strict=True)]
      inputs = [self._gather(x, fact) if here else x for x, fact, here in rows]
      return self.default(eqn, inputs, [None if here else fact for _, fact, here in rows])
    if eqn.primitive.name == "gather":
      found = self._look_up(eqn, inputs, facts)
      return [self._look_up_rows(eqn, inputs, facts) if found is None else found], _follow(eqn, facts)
    if eqn.primitive.name in PRODUCTS and (where := dim_map(eqn)) is not None:
      return self._multiply(eqn, inputs, facts, where)
    # The derivative of a custom rule stays as it is, so its parameters are gathered before it.
    inputs = [self._gather(x, fact) for x, fact in zip(inputs, facts, strict=True)]
    return bind(eqn, inputs), _follow(eqn, facts)

  def _multiply(
    self, eqn: JaxprEqn, inputs: list[jax.Array], facts: list[Fact], where: DimMap
  ) -> tuple[Sequence[jax.Array], list[Fact]]:
    """A product with parameters, whose other operand and result keep their examples and positions."""
    after = _follow(eqn, facts)
    pinned: dict[int, Any] = {}
    for factors, fact in zip(where.operands, facts, strict=True):
      for factor, axes in zip(factors, fact if _is_parameter(fact) else (), strict=False):
        if factor is not None and self._positions.intersection(axes):
          pinned[factor] = without(axes, frozenset(self._axes))
    moves = any({*self._axes} & {*axes_in(fact)} for fact in facts if _is_parameter(fact))
    # Matrix products only: no convolution was seen to need it.
    if moves and isinstance(after[0], Examples) and eqn.primitive.name == "dot_general":
      dim, shards = after[0].dim, count_shards(self._axes, self._mesh.shape)
      if (factor := where.results[0][dim]) is not None and not eqn.outvars[0].aval.shape[dim] % shards:
        pinned[factor] = self._axes

    def kept(x: jax.Array, own: Sequence[int | None]) -> jax.Array:
      dims = {d: pinned[factor] for d, factor in enumerate(own) if factor in pinned}
      return self._lay_out(x, {**dict.fromkeys(range(x.ndim), FREE), **dims}, x.ndim) if dims else x

    rows = zip(inputs, where.operands, facts, strict=True)
    inputs = [self._gather(x, fact) if _is_parameter(fact) else kept(x, own) for x, own, fact in rows]
    (found,) = bind(eqn, inputs)
    return [kept(found, where.results[0])], after

  def _look_up(self, eqn: JaxprEqn, inputs: list[jax.Array], facts: list[Fact]) -> jax.Array | None:
    """The rows of a table for tokens, by columns; None if it cannot be looked up so.

    For several axes, or an axis that is not the minor one of the examples, XLA would replicate the rows.
    """
    table, tokens, where = facts[0], facts[1], dim_map(eqn)
    if not _is_parameter(table) or not isinstance(tokens, Examples) or where is None:
      return None
    moved = {*axes_in(table)} & {*self._axes}
    examples, rank = where.operands[1][tokens.dim], len(eqn.outvars[0].aval.shape)
    rest = [without(dim, frozenset(moved)) for dim in table]
    shards = count_shards({*moved, *axes_in(rest)}, self._mesh.shape)
    offsets = eqn.params["dimension_numbers"].offset_dims
    columns = [
      (size, d, to)
      for d, (size, to) in enumerate(zip(inputs[0].shape, where.operands[0], strict=True))
      if to is not None and to in offsets and size % shards == 0
    ]
    if not columns or examples is None or not moved or moved != {*self._axes[-1:]}:
      return None
    if eqn.outvars[0].aval.shape[examples] % count_shards(self._axes, self._mesh.shape):
      return None
    _, d, to = max(columns)
    column = (*rest[d], *moved)
    rest[d] = column
    left, own = without(self._axes, frozenset(moved)), inputs[1].ndim
    wanted = self._lay_out(inputs[1], {tokens.dim: left}, own)
    (found,) = bind(eqn, [self._lay_out(inputs[0], dict(enumerate(rest)), inputs[0].ndim), wanted])
    found = self._lay_out(found, {examples: left, to: column}, rank)
    return self._lay_out(found, {examples: self._axes, to: without(column, frozenset(moved))}, rank)

  def _look_up_rows(self, eqn: JaxprEqn, inputs: list[jax.Array], facts: list[Fact]) -> jax.Array:
    """The result of a look-up, with the columns as the table has them if its rows are sharded."""
    (found,) = bind(eqn, [self._gather(x, fact) for x, fact in zip(inputs, facts, strict=True)])
    table, where = facts[0], dim_map(eqn)
    if not _is_parameter(table) or where is None or not self._several:
      return found
    axes = [without(dim, frozenset(self._axes)) for dim in table]
    offsets = eqn.params["dimension_numbers"].offset_dims
    dims: dict[int, Any] = dict.fromkeys(range(found.ndim), FREE)
    pairs = [*zip(axes, where.operands[0], strict=True)]
    dims.update((to, own) for own, to in pairs if to is not None and to in offsets)
    rows = [axis for own, to in pairs if to not in offsets for axis in own if self._mesh.shape[axis] > 1]
    return self._lay_out(found, dims, found.ndim) if rows else found

  def _gather(self, x: jax.Array, fact: Fact) -> jax.Array:
    if not _is_parameter(fact) or not self._everywhere or not {*self._axes} & {*axes_in(fact)}:
      return x
    dims = {d: without(dim, frozenset(self._axes)) for d, dim in enumerate(fact)}
    return self._lay_out(x, dims, x.ndim)

  def _lay_out(self, x: jax.Array, dims: Mapping[int, Any], rank: int) -> jax.Array:
    spec = PartitionSpec(*(own if (own := dims.get(d, ())) is FREE else entry_of(own) for d in range(rank)))
    with jax.named_scope(HELD):
      return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))  # pyright: ignore[reportArgumentType]

  def _either(self, one: Fact, other: Fact) -> Fact:
    if one == other:
      return one
    gathered = [x for x in (one, other) if _is_parameter(x) and {*self._axes} & {*axes_in(x)}]
    return LOST if LOST in (one, other) or (gathered and self._everywhere) else None


def _is_parameter(fact: Fact) -> TypeGuard[Dims]:
  return fact is not None and not isinstance(fact, Examples)


def _shift(fact: Fact, by: int) -> Fact:
  """The fact of a row of a scan (`by` = -1), or of all rows (1)."""
  if isinstance(fact, Examples):
    return Examples(fact.dim + by) if fact.dim + by >= 0 else None
  if fact is None or fact is LOST:
    return fact
  return fact[1:] if by < 0 else ((), *fact)


def _follow(eqn: JaxprEqn, facts: list[Fact]) -> Any:
  if (moved := _move(eqn, facts)) is not None:
    return moved
  inside = is_walked(eqn) and not has_rule(eqn) and eqn.primitive.name != "shard_map"
  if inside and any(fact is not None for fact in facts):
    return DEFAULT
  found = dim_map(eqn) if any(isinstance(fact, Examples) for fact in facts) else None
  if found is None:
    return [None] * len(eqn.outvars)
  pairs = zip(found.operands, facts, strict=True)
  places = {own[fact.dim] for own, fact in pairs if isinstance(fact, Examples)} - {None}
  return [next((Examples(d) for d, f in enumerate(own) if f in places), None) for own in found.results]


def _move(eqn: JaxprEqn, facts: list[Fact]) -> list[Fact] | None:
  """The layouts of parameters that an operation only casts or moves; None if it reads them."""
  if eqn.primitive.name == "optimization_barrier":
    return facts
  found = dim_map(eqn) if eqn.primitive.name in _MOVES and any(map(_is_parameter, facts)) else None
  if found is None or LOST in facts or eqn.outvars[0].aval.size > sum(v.aval.size for v in eqn.invars):
    return None
  axes: dict[int, tuple[str, ...]] = {}
  for var, own, fact in zip(eqn.invars, found.operands, facts, strict=True):
    if not _is_parameter(fact):
      if var.aval.ndim:
        return None
      continue  # where a slice starts
    for factor, dim in zip(own, fact, strict=True):
      if factor is None or factor in found.mixed or factor in found.major:
        if dim:
          return None
      elif axes.setdefault(factor, dim) != dim:
        return None
  split = {factor for factor, dim in axes.items() if dim}
  if any(split - {*own} for own in found.results):
    return None
  return [tuple(() if factor is None else axes.get(factor, ()) for factor in own) for own in found.results]
