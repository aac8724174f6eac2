"""Gathers parameters where a loss reads them, so that XLA's partitioner has no choice to get wrong.

Where one mesh axis shards both a parameter and the examples, the partitioner decides which of the two to move
to make a product. On a mesh with a further axis, some of its programs compute wrong numbers (see
`known_faults.py`). With the parameter gathered over the axes of the examples, as fully-sharded data
parallelism means it, there is nothing to decide:

    y = x @ w.astype(bfloat16)                   # w: P("fsdp", "tensor"), examples over ("data", "fsdp")
    y = x @ constrain(w.astype(bfloat16), P(None, "tensor"))

The constraint comes after a cast, so that half the bytes are sent, and in the body of a scan or a checkpoint,
so that the backward pass gathers again. Its transpose sums the gradient over the same axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnx_parallel.core.axes import axes_by_dim, axes_in, axes_of, entry_of, without
from nnx_parallel.core.dims import MOVES, dim_map
from nnx_parallel.core.interpret import DEFAULT, Facts, Interpreter, is_walked, wiring
from nnx_parallel.core.jaxprs import HELD, bind, has_rule, place_of
from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.nodes import Path
from nnx_parallel.core.types import JaxprEqn, PyTree, Value
from nnx_parallel.errors import TrainError

Read = tuple[tuple[str, ...], ...] | None
"""The mesh axes of each dim of a parameter that nothing has read yet; None for any other value."""
LOST: Any = "lost"
"""A value that is a parameter in one branch only."""
_MOVES = MOVES | {"concatenate", "stack", "unstack"}
"""Operations after which a parameter is gathered, and not before: casts, and stacks of layers for a scan."""


@dataclasses.dataclass(frozen=True)
class Gather:
  """Which arrays of some modules a loss gathers.

  Attributes:
    axes: the axes of the examples.
    mesh: the mesh of the arrays.
    reads: path -> the layout of an array that they shard.
  """

  axes: frozenset[str]
  mesh: AnyMesh
  reads: Mapping[Path, Read]

  @classmethod
  def of(cls, leaves: Mapping[Path, object], batch: Collection[str], mesh: AnyMesh | None) -> Gather | None:
    """What a loss gathers of arrays with these shardings, for examples over these axes; None for nothing."""
    reads = {path: where for path, where in leaves.items() if isinstance(where, NamedSharding)}
    axes = axes_to_gather([where.spec for where in reads.values()], batch, mesh)
    if not axes or mesh is None:
      return None
    return cls(axes, mesh, {path: tuple(map(axes_of, where.spec)) for path, where in reads.items()})

  def on(
    self, run: Callable[..., PyTree], paths: Callable[..., Sequence[Path | None]]
  ) -> Callable[..., PyTree]:
    """`run`, a function of pytrees of arrays, with the parameters gathered where it reads them.

    `paths`, called with the same arguments, gives the path of each of their arrays, or None.
    """

    def gathered(*args: PyTree) -> PyTree:
      closed, shape = jax.make_jaxpr(run, return_shape=True)(*args)
      leaves = jax.tree.leaves(args)
      pairs = zip(paths(*args), leaves, strict=True)
      reads = [None if path is None else self._read(path, x) for path, x in pairs]
      results, _ = _Gather(self.axes, self.mesh)(closed, leaves, reads)
      return jax.tree.unflatten(jax.tree.structure(shape), results)

    return gathered

  def _read(self, path: Path, x: jax.Array) -> Read:
    found = axes_by_dim(self.reads.get(path) or (), jax.numpy.ndim(x))
    return found if self.axes.intersection(axes_in(found)) else None


def axes_to_gather(
  specs: Iterable[PartitionSpec], batch: Collection[str], mesh: AnyMesh | None
) -> frozenset[str]:
  """The axes of the examples over which parameters are gathered; none where XLA has nothing to confuse.

  Args:
    specs: the specs of the parameters.
    batch: the axes that split the examples.
    mesh: the mesh, or None on one device.
  """
  if mesh is None or AxisType.Explicit in mesh.axis_types:  # there, the types of the operands decide
    return frozenset()
  larger = {axis for axis, size in mesh.shape.items() if size > 1}
  used = {axis for spec in specs for axis in axes_in(spec)}
  both = larger & used.intersection(batch)
  return frozenset(larger.intersection(batch)) if both and larger - {*batch} else frozenset()


class _Gather(Interpreter[Read]):
  """Evaluates the trace of a loss once more, with a constraint on each parameter where it is read."""

  def __init__(self, axes: frozenset[str], mesh: AnyMesh):
    self._axes, self._mesh = axes, mesh
    facts: Facts[Read] = Facts(
      constant=lambda _: None,
      follow=_followed,
      join=lambda a, b: a if a == b else LOST,
      row=lambda _, read: read if read in (None, LOST) else read[1:],
      stack=lambda _, read: read if read in (None, LOST) else ((), *read),
    )
    super().__init__(self._run, facts)

  def _run(self, eqn: JaxprEqn, inputs: list[Value], reads: list[Read]) -> Any:
    if all(read is None for read in reads) or eqn.primitive.name == "shard_map":
      return bind(eqn, inputs), [None] * len(eqn.outvars)
    if LOST in reads:
      raise TrainError(
        f"{eqn.primitive.name} ({place_of(eqn)}) reads a parameter that comes from a branch of a condition.",
        details="it is sharded over axes of the examples, and has to be gathered where it is read",
        fix="use the parameter inside of the branch.",
      )
    if (moved := _moved(eqn, reads)) is not None:
      return bind(eqn, inputs), moved
    if is_walked(eqn) and not has_rule(eqn):
      carried = {*wiring(eqn).carried.values()}
      pairs = [*enumerate(zip(inputs, reads, strict=True))]
      inputs = [self._gathered(x, read) if n in carried else x for n, (x, read) in pairs]
      return self.default(eqn, inputs, [None if n in carried else read for n, (_, read) in pairs])
    # The derivative of a custom rule stays as it is, so its parameters are gathered before it.
    inputs = [self._gathered(x, read) for x, read in zip(inputs, reads, strict=True)]
    return bind(eqn, inputs), [None] * len(eqn.outvars)

  def _gathered(self, x: jax.Array, read: Read) -> jax.Array:
    if read is None:
      return x
    spec = PartitionSpec(*(entry_of(without(dim, self._axes)) for dim in read))
    with jax.named_scope(HELD):
      return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))  # pyright: ignore[reportArgumentType]


def _followed(eqn: JaxprEqn, reads: list[Read]) -> Any:
  if all(read is None for read in reads):
    return [None] * len(eqn.outvars)
  if (moved := _moved(eqn, reads)) is not None:
    return moved
  inside = is_walked(eqn) and not has_rule(eqn) and eqn.primitive.name != "shard_map"
  return DEFAULT if inside else [None] * len(eqn.outvars)


def _moved(eqn: JaxprEqn, reads: list[Read]) -> list[Read] | None:
  """The layouts of parameters that an operation only casts or moves; None if it reads them."""
  if eqn.primitive.name == "optimization_barrier":
    return reads
  found = dim_map(eqn) if eqn.primitive.name in _MOVES else None
  if found is None or LOST in reads or eqn.outvars[0].aval.size > sum(v.aval.size for v in eqn.invars):
    return None
  axes: dict[int, tuple[str, ...]] = {}
  for var, own, read in zip(eqn.invars, found.operands, reads, strict=True):
    if read is None and not var.aval.ndim:
      continue  # where a slice starts
    if read is None:
      return None
    for factor, dim in zip(own, read, strict=True):
      if factor is None or factor in found.mixed or factor in found.major:
        if dim:
          return None
      elif axes.setdefault(factor, dim) != dim:
        return None
  split = {factor for factor, dim in axes.items() if dim}
  if any(split - {*own} for own in found.results):
    return None
  return [tuple(() if factor is None else axes.get(factor, ()) for factor in own) for own in found.results]
