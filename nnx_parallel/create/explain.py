"""What creating a plan compiles, without creating it."""

from __future__ import annotations

import dataclasses

from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.core.mesh import auto_mesh
from nnx_parallel.core.text import Shown, format_array
from nnx_parallel.create.constructor import cut_plan, real_mesh
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.plan import ShardingPlan


@dataclasses.dataclass(frozen=True)
class Program:
  """One compiled program of a creation.

  Attributes:
    leaves: the names of the leaves it makes, one run after the other.
    runs: how often it runs.
    shape: global storage shape of the first leaf, in elements.
    dtype: its dtype.
    spec: its spec.
  """

  leaves: tuple[str, ...]
  runs: int
  shape: tuple[int, ...]
  dtype: str
  spec: PartitionSpec


@dataclasses.dataclass(frozen=True)
class CreationReport(Shown):
  """How a plan is created.

  Attributes:
    programs: what is compiled; empty when the constructor runs as one program.
    placed: leaves that are placed without a program: counters, keys, constants.
    whole: why the constructor runs as one program; empty when it does not.
  """

  programs: tuple[Program, ...]
  placed: tuple[str, ...]
  whole: str = ""

  def __str__(self) -> str:
    if self.whole:
      return f"created as one program: {self.whole}"
    made = sum(len(program.leaves) for program in self.programs)
    lines = [f"{len(self.programs)} programs make {made} leaves; {len(self.placed)} are placed as they are"]
    for program in self.programs:
      array = format_array(program.dtype, program.shape)
      first, *others = program.leaves
      more = f" and {len(others)} more" if others else ""
      lines.append(f"  {program.runs:4} x {array} {program.spec}: {first}{more}")
    return "\n".join(lines)


def creation_report(plan: ShardingPlan) -> CreationReport:
  """Says which programs `create_sharded_model(plan)` compiles, and how often each runs. Makes no array.

  Args:
    plan: a plan on real devices.

  Returns:
    The report; print it.

  Raises:
    PlanError: a plan on an abstract mesh.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> def init():
    ...   rngs = nnx.Rngs(0)
    ...   return nnx.List([nnx.Linear(256, 256, use_bias=False, rngs=rngs) for _ in range(12)])
    >>> print(nxp.creation_report(nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0))))
    1 programs make 12 leaves; 0 are placed as they are
        12 x float32[256,256] P(None, 'fsdp'): 0.kernel and 11 more
  """
  mesh = auto_mesh(real_mesh(plan))
  shardings = [NamedSharding(mesh, leaf.spec, memory_kind=leaf.memory_kind) for leaf in plan.leaves]
  pieces = cut_plan(plan, shardings)
  if isinstance(pieces, str):
    return CreationReport((), (), pieces)
  programs = tuple(
    _program([plan.leaves[i] for piece in group for i in piece.outputs], len(group))
    for group in pieces.groups
  )
  return CreationReport(programs, tuple(plan.leaves[i].name for i in pieces.given))


def _program(leaves: list[LeafPlan], runs: int) -> Program:
  first = leaves[0]
  names = tuple(leaf.name for leaf in leaves)
  return Program(names, runs, first.storage_shape, str(first.dtype), first.spec)
