"""Creation: compiled constructors that put every Variable straight into its shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from nnx_parallel.core.mesh import AnyMesh, auto_mesh
from nnx_parallel.core.nodes import Path
from nnx_parallel.create.build import stages, trace_plan
from nnx_parallel.create.instantiate import instantiate
from nnx_parallel.create.reference import construct_whole
from nnx_parallel.create.slicing.assemble import assemble
from nnx_parallel.create.slicing.cut import Cut, cut
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.leaf import Root
from nnx_parallel.layout.plan import ShardingPlan, StoredPlan, no_constructor, plan_traced
from nnx_parallel.layout.tracing import Trace, why_one_program
from nnx_parallel.rules.logical import Uneven
from nnx_parallel.rules.ruleset import Rules

Compile = Literal["slices", "whole"]
COMPILE: tuple[str, ...] = get_args(Compile)

logger = logging.getLogger(__name__)


def create_sharded_model(
  init: Callable[[], nnx.Module] | ShardingPlan,
  mesh: AnyMesh | None = None,
  rules: Rules = None,
  *,
  optimizer: optax.GradientTransformation | None = None,
  wrt: Any = nnx.Param,
  uneven: Uneven = "error",
  zero: int = 0,
  zero_axes: Sequence[str] | str | None = None,
  optimizer_memory: str | None = None,
  compile: Compile = "slices",
) -> Any:
  """Builds a module (and its optimizer) with every Variable created directly in its shards.

  What the plan splits is never whole on a device, unless its initializer computes with the whole of it (an
  orthogonal one does); what the plan keeps whole is whole. For flax's initializers the values are those of
  `init()` on one device, bit for bit, up to the three cases that the guide "Creating" lists. Works with or
  without an active `jax.set_mesh`, on Auto and Explicit meshes. Given a constructor, it is traced once.
  Given a plan, its `init` is traced again, so that values which it reads (a seed) are today's.

  Args:
    init: a plan; or the constructor, with `mesh` and `rules` as in `plan`.
    mesh: the mesh, when `init` is a constructor.
    rules: the rules, when `init` is a constructor.
    optimizer: an optax transformation, when `init` is a constructor.
    wrt: which Variables it trains.
    uneven: the policy for uneven dims, when `init` is a constructor.
    zero: the ZeRO stage of the optimizer state, when `init` is a constructor.
    zero_axes: the axes of that stage, when `init` is a constructor.
    optimizer_memory: where optimizer state lies between steps, when `init` is a constructor.
    compile: `"slices"`: one program for each distinct initializer, run for each Variable that has it; the
      compile time does not grow with depth. `"whole"`: the constructor as one `nnx.jit` program, the
      reference. A constructor that cannot be cut is created whole: `print(plan)`, `creation_report(plan)` and
      a logged warning say why.

  Returns:
    The live module; `(module, ShardedOptimizer)` when the plan has an optimizer.

  Raises:
    PlanError: a plan on an abstract mesh (nothing to create on), or arguments given twice.
    ShardingError: as `plan`.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> mesh = nxp.make_mesh(fsdp=8)
    >>> model = nxp.create_sharded_model(lambda: nnx.Linear(512, 1024, rngs=nnx.Rngs(0)), mesh, nxp.fsdp())
    >>> model.kernel.get_value().sharding.spec
    P(None, 'fsdp')
  """
  if isinstance(init, StoredPlan) and not isinstance(init, ShardingPlan):
    raise no_constructor()
  if isinstance(init, ShardingPlan):
    again = (mesh, rules, optimizer, zero_axes, optimizer_memory) != (None,) * 5
    if again or wrt is not nnx.Param or uneven != "error" or zero:
      raise PlanError(
        "create_sharded_model got a plan and also mesh, rules, optimizer, or an option of plan().",
        details="a plan already holds all of them",
        fix="create_sharded_model(plan)",
      )
    the_plan, traces = init, None
  elif mesh is None:
    raise PlanError(
      "create_sharded_model needs a mesh.",
      fix="create_sharded_model(init, nxp.make_mesh(fsdp=-1), nxp.fsdp())",
    )
  else:
    the_plan, traces = plan_traced(
      init,
      mesh,
      rules,
      optimizer=optimizer,
      wrt=wrt,
      uneven=uneven,
      zero=zero,
      zero_axes=zero_axes,
      optimizer_memory=optimizer_memory,
    )
  the_plan.warn_replicated(stacklevel=3)
  return instantiate(the_plan, construct(the_plan, compile, traces))


def construct(
  the_plan: ShardingPlan, compile: Compile = "slices", traces: dict[Root, Trace] | None = None
) -> dict[Root, dict[Path, jax.Array]]:
  """Runs the plan's constructor, compiled, with the shards as its outputs.

  Args:
    the_plan: a plan on real devices.
    compile: as in `create_sharded_model`.
    traces: of this plan, just made; they are cleared. None traces the constructor again.

  Returns:
    Root -> path -> array (global storage shape), in the plan's shardings.

  Raises:
    PlanError: the plan's mesh is abstract, or `init` builds another structure than it did when planned.
  """
  if compile not in COMPILE:
    raise PlanError(f"compile={compile!r} is not a way to create.", fix=f"one of {', '.join(COMPILE)}.")
  # Explicit axes would put the sharding into the types of every intermediate of the initializers, which
  # then materialise whole (measured: 22 times the temporaries). The same devices with Auto axes do not,
  # and re-wrapping the results costs nothing.
  mesh = auto_mesh(real_mesh(the_plan))
  shardings = [NamedSharding(mesh, leaf.spec, memory_kind=leaf.memory_kind) for leaf in the_plan.leaves]
  pieces = cut_plan(the_plan, shardings, traces) if compile == "slices" else "compile='whole'"
  if traces:
    traces.clear()  # large beside a shard, and of no more use
  if not isinstance(pieces, str):
    arrays = assemble(pieces, shardings, mesh)
  else:
    if compile == "slices":
      logger.warning("creating the model as one program: %s", pieces)
    arrays = construct_whole(the_plan, shardings, mesh)
  if mesh is not the_plan.mesh or isinstance(pieces, str):  # nnx.jit words the same shardings in its own way
    arrays = jax.device_put(arrays, [leaf.sharding for leaf in the_plan.leaves])
  result: dict[Root, dict[Path, jax.Array]] = {}
  for leaf, array in zip(the_plan.leaves, arrays, strict=True):
    result.setdefault(leaf.root, {})[leaf.path] = array
  return result


def cut_plan(
  the_plan: ShardingPlan, shardings: Sequence[NamedSharding], traces: Mapping[Root, Trace] | None = None
) -> Cut | str:
  """Cuts the plan's constructor.

  Args:
    the_plan: the plan.
    shardings: one for each leaf.
    traces: as in `construct`.

  Returns:
    The pieces; or the reason, as a clause, why the constructor cannot be sliced.
  """
  traces = traces or trace_plan(the_plan)
  return why_one_program(traces.values()) or cut(*stages(the_plan, traces), shardings)


def real_mesh(the_plan: ShardingPlan) -> Mesh:
  """The plan's mesh, which must have devices.

  Args:
    the_plan: the plan.

  Returns:
    Its mesh.

  Raises:
    PlanError: the mesh is abstract.
  """
  if isinstance(the_plan.mesh, AbstractMesh):
    raise PlanError(
      "this plan is on an abstract mesh, so there is nothing to create on.",
      details=f"mesh {dict(the_plan.mesh.shape)}",
      fix="plan on real devices: nxp.plan(init, nxp.make_mesh(...), rules).",
    )
  return the_plan.mesh
