"""Creation: compiled constructors that put every Variable straight into its shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

import jax
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.jaxprs import as_function
from nnx_parallel.core.mesh import AnyMesh, auto_mesh, is_explicit, no_mesh, use_mesh
from nnx_parallel.core.nodes import Path, array_leaves, merge, value_of
from nnx_parallel.core.padding import pad
from nnx_parallel.core.text import format_array
from nnx_parallel.core.types import AnyArray
from nnx_parallel.create.instantiate import instantiate
from nnx_parallel.create.slices import Cut, Phase, assemble, cut
from nnx_parallel.errors import PlanError
from nnx_parallel.layout import tracing
from nnx_parallel.layout.leaf import LeafPlan, Root
from nnx_parallel.layout.plan import Plan, check_plan, check_structure
from nnx_parallel.layout.planning import PlanOptions, StateOptions, plan_with_traces
from nnx_parallel.layout.sharded_optimizer import ShardedOptimizer
from nnx_parallel.layout.tracing import Trace
from nnx_parallel.rules.logical import Uneven
from nnx_parallel.rules.ruleset import Rules

Compile = Literal["slices", "jit"]
M = TypeVar("M", bound=nnx.Module)
R = TypeVar("R")

logger = logging.getLogger("nnx_parallel")


@overload
def create_sharded_model(init: Plan[R], *, compile: Compile = "slices") -> R: ...


@overload
def create_sharded_model(
  init: Callable[[], M],
  mesh: AnyMesh,
  rules: Rules = None,
  *,
  compile: Compile = "slices",
  uneven: Uneven = "error",
) -> M: ...


@overload
def create_sharded_model(
  init: Callable[[], M],
  mesh: AnyMesh,
  rules: Rules = None,
  *,
  compile: Compile = "slices",
  optimizer: optax.GradientTransformation,
  **options: Unpack[StateOptions],
) -> tuple[M, ShardedOptimizer[M]]: ...


@overload
def create_sharded_model(
  init: Callable[[], nnx.Module] | Plan,
  mesh: AnyMesh | None = None,
  rules: Rules = None,
  *,
  compile: Compile = "slices",
  **options: Unpack[PlanOptions],
) -> Any: ...


@check_arguments(PlanError)
def create_sharded_model(
  init: Callable[[], nnx.Module] | Plan,
  mesh: AnyMesh | None = None,
  rules: Rules = None,
  *,
  compile: Compile = "slices",
  **options: Unpack[PlanOptions],
) -> Any:
  """Creates a module, and its optimizer, with every Variable directly in its shards.

  No device holds a full array that the plan shards, unless its initializer needs the full array (an
  orthogonal initializer does). With the initializers of Flax, the values equal `init()` on one device bit for
  bit, except in four cases that the guide "Plans and models" lists. The function works with or without an
  active `jax.set_mesh`, on meshes with Auto and Explicit axes. A constructor is traced once. With a plan, its
  `init` is traced again, so that values that `init` reads (a seed, for example) are current.

  The logger `nnx_parallel` lists the compiled programs at level INFO.

  Args:
    init: a plan; or the constructor of the module, together with `mesh` and `rules`.
    mesh: the mesh, if `init` is a constructor; as in `plan`.
    rules: the rules, if `init` is a constructor; as in `plan`.
    compile: `"slices"` compiles one program for each distinct initializer and runs it for each Variable that
      has this initializer, so the compile time does not grow with the depth of the model. `"jit"` compiles
      the constructor as one `nnx.jit` program, which serves as the reference. A constructor that cannot be
      sliced is also compiled as one program; a note of the plan and a logged warning give the reason.
    **options: the other arguments of `plan`, such as `optimizer` and `zero`, if `init` is a constructor.

  Returns:
    The live module; `(module, ShardedOptimizer)` if the plan has an optimizer.

  Raises:
    PlanError: the mesh of the plan is abstract (it has no devices), or `mesh`, `rules` or options are given
      together with a plan.
    ShardingError: as `plan`.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> mesh = nxp.make_mesh(fsdp=8)
    >>> model = nxp.create_sharded_model(lambda: nnx.Linear(512, 1024, rngs=nnx.Rngs(0)), mesh, nxp.fsdp())
    >>> model.kernel.get_value().sharding.spec
    P(None, 'fsdp')
  """
  traces: dict[Root, Trace] | None = None
  if unknown := options.keys() - PlanOptions.__annotations__.keys():
    raise TypeError(f"create_sharded_model() got an unexpected keyword argument {min(unknown)!r}")
  if isinstance(init, Plan):
    check_plan(init, "nxp.create_sharded_model(plan)")
    if mesh is not None or rules is not None or options:
      raise PlanError(
        "create_sharded_model got a plan and also mesh, rules, optimizer, or an option of plan().",
        details="a plan already holds all of them",
        fix="nxp.create_sharded_model(plan)",
      )
    plan = init
  elif mesh is None:
    raise PlanError(
      "create_sharded_model needs a mesh.",
      fix="nxp.create_sharded_model(init, nxp.make_mesh(fsdp=-1), nxp.fsdp())",
    )
  else:
    plan, traces = plan_with_traces(init, mesh, rules, **options)
  plan.warn_replicated()
  return instantiate(plan, construct(plan, compile, traces))


@no_mesh()
def construct(
  plan: Plan, compile: Compile = "slices", traces: dict[Root, Trace] | None = None
) -> dict[Root, dict[Path, jax.Array]]:
  """Runs the plan's constructor, compiled, into the shards: root -> path -> array as stored."""
  # `traces` are of this plan, just made; they are cleared. None traces the constructor again.
  # Explicit axes would put the sharding into the types of every intermediate of the initializers, which
  # are then replicated (measured: 22 times the temporaries). The same devices with Auto axes do not,
  # and re-wrapping the results costs nothing.
  mesh = auto_mesh(real_mesh(plan))
  shardings = [leaf.sharding.update(mesh=mesh) for leaf in plan.leaves]
  sliced = cut_plan(plan, shardings, traces) if compile == "slices" else "compile='jit'"
  if traces:
    traces.clear()  # large compared with a shard, and no longer needed
  if not isinstance(sliced, str):
    logger.info("%s", "\n".join(_programs(plan, sliced)))
    arrays = assemble(sliced, shardings, mesh)
  else:
    if compile == "slices":
      logger.warning("creating the model as one program: %s", sliced)
    arrays = construct_whole(plan, shardings, mesh)
  if mesh is not plan.mesh or isinstance(sliced, str):  # nnx.jit returns equivalent shardings, not these
    arrays = jax.device_put(arrays, [leaf.sharding for leaf in plan.leaves])
  result: dict[Root, dict[Path, jax.Array]] = {}
  for leaf, array in zip(plan.leaves, arrays, strict=True):
    result.setdefault(leaf.root, {})[leaf.path] = array
  return result


def _programs(plan: Plan, sliced: Cut) -> Iterator[str]:
  """Lists the programs that are compiled, and how often each runs."""
  made: list[list[LeafPlan]] = [[plan.leaves[one.output] for one in group] for group in sliced.groups]
  yield f"{len(made)} programs make {sum(map(len, made))} arrays; {len(sliced.given)} are placed as they are"
  for leaves in made:
    first, more = leaves[0], f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
    array = format_array(first.dtype, first.storage_shape)
    yield f"  {len(leaves):4} x {array} {first.spec}: {first.name}{more}"


def cut_plan(
  plan: Plan, shardings: Sequence[NamedSharding], traces: Mapping[Root, Trace] | None = None
) -> Cut | str:
  """Cuts the plan's constructor into slices; or returns the reason, as a clause, why it cannot be sliced."""
  if not traces:
    traces = {"model": tracing.trace_module(plan.init, plan.mesh)}
    if plan.tx is not None:
      traces["optimizer"] = tracing.trace_optimizer(traces["model"].made, plan.tx, plan.wrt)
    _check_built(plan, {root: one.made.leaves for root, one in traces.items()})
  return tracing.why_one_program(traces.values()) or cut(
    *_phases(plan, traces), shardings, real_mesh(plan).local_devices[0]
  )


def _check_built(plan: Plan, arrays: Mapping[Root, Mapping[Path, AnyArray]]) -> None:
  what = "init built another structure than in the plan"
  fix = "make init depend on nothing that changes between calls, or plan again."
  check_structure(plan.leaves, arrays, what, fix)


def _phases(plan: Plan, traces: Mapping[Root, Trace]) -> tuple[list[Phase], list[int]]:
  """Puts the traces in sequence: the module, its optimizer, and the padding of uneven leaves."""
  # Also returns, for each leaf of the plan, its position among their results.
  found: list[Phase] = [(traces["model"].program, ())]
  made: dict[tuple[Root, Path], int] = {
    ("model", path): i for i, path in enumerate(traces["model"].output_paths)
  }
  if "optimizer" in traces:
    one = traces["optimizer"]
    found.append((one.program, [made["model", path] for path in one.input_paths]))
    made |= {("optimizer", path): i for i, path in enumerate(one.output_paths, len(made))}
  results = [made[leaf.root, leaf.path] for leaf in plan.leaves]
  padded = [i for i, leaf in enumerate(plan.leaves) if any(leaf.padding)]
  if padded:
    leaves = [plan.leaves[i] for i in padded]

    def pad_all(arrays: list[jax.Array]) -> list[jax.Array]:
      return [pad(array, leaf.storage_shape) for array, leaf in zip(arrays, leaves, strict=True)]

    program = jax.make_jaxpr(pad_all)([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])
    found.append((program, [results[i] for i in padded]))
    for i, position in enumerate(padded, len(made)):
      results[position] = i
  return found, results


def construct_whole(plan: Plan, shardings: Sequence[NamedSharding], mesh: Mesh) -> list[jax.Array]:
  """Runs the constructor under `nnx.jit`, with its state constrained to the layout: the reference."""

  # Source: the flax guide "Scale up on multiple devices".
  @nnx.jit
  def constructor() -> Any:
    module = _traced_init(plan) if is_explicit(plan.mesh) else tracing.run_init(plan.init, plan.mesh)
    built: dict[Root, dict[Path, Any]] = {"model": array_leaves(module)}
    if plan.tx is not None:
      with nnx.use_eager_sharding(False):
        built["optimizer"] = array_leaves(tracing.make_optimizer(module, plan.tx, plan.wrt))
    _check_built(plan, built)
    arrays = [jax.numpy.asarray(value_of(built[leaf.root][leaf.path])) for leaf in plan.leaves]
    padded = [pad(array, leaf.storage_shape) for array, leaf in zip(arrays, plan.leaves, strict=True)]
    return jax.lax.with_sharding_constraint(padded, list(shardings))

  with use_mesh(mesh):
    return constructor()


def _traced_init(plan: Plan) -> Any:
  """The module of a constructor whose arrays have shardings in their types, without these."""
  found = tracing.trace_module(plan.init, plan.mesh)
  arrays = as_function(found.program)()
  return merge(found.made.graphdef, jax.tree.unflatten(jax.tree.structure(found.made.state), arrays))


def real_mesh(plan: Plan) -> Mesh:
  """The plan's mesh; a `PlanError` if it is abstract."""
  if isinstance(plan.mesh, AbstractMesh):
    raise PlanError(
      "this plan is on an abstract mesh, so there is nothing to create on.",
      details=f"mesh {dict(plan.mesh.shape)}",
      fix="plan on real devices: nxp.plan(init, nxp.make_mesh(...), rules).",
    )
  return plan.mesh


@check_arguments(PlanError)
def unsharded(init: Callable[[], M]) -> M:
  """Builds a module on the default device, without a mesh, and keeps its annotations.

  Flax refuses to build an annotated module without a mesh. This function is for notebooks, exports and tests
  on one device; the annotations stay on the Variables, so the same constructor can be planned on a mesh
  later.

  Args:
    init: a function without arguments that builds the module. Its annotations need no mesh and no rules.

  Returns:
    The live module, not sharded.

  Raises:
    PlanError: the constructor states shardings where it makes arrays, which needs a mesh with Explicit axes.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> names = {"out_sharding": ("embed", "mlp")}
    >>> model = nxp.unsharded(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0), kernel_metadata=names))
    >>> model.kernel.out_sharding
    ('embed', 'mlp')
  """
  try:
    with no_mesh(), nnx.use_eager_sharding(False):
      return init()
  except ValueError as error:
    if not tracing.states_shardings(error):
      raise
    raise PlanError(
      "init states shardings, and there is no mesh without shardings to state them on.",
      details=str(error).split(". ")[0],
      fix="nxp.create_sharded_model(init, nxp.make_mesh(..., devices=jax.devices()[:1], explicit=True)), with"
      " axes of size 1.",
    ) from error
