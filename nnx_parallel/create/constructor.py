"""Creation: a compiled constructor that puts every Variable straight into its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from nnx_parallel.create.instantiate import Arrays, instantiate
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.mesh import AnyMesh, auto_mesh
from nnx_parallel.layout.plan import Root, ShardingPlan
from nnx_parallel.layout.plan import plan as make_plan
from nnx_parallel.layout.rules import Uneven
from nnx_parallel.layout.variables import Path, value_of, variables


def create_sharded_model(
  init: Callable[[], nnx.Module] | ShardingPlan,
  mesh: AnyMesh | None = None,
  rules: Any = None,
  *,
  optimizer: optax.GradientTransformation | None = None,
  wrt: Any = nnx.Param,
  uneven: Uneven = "error",
) -> Any:
  """Builds a module (and its optimizer) with every Variable created directly in its shards.

  No device ever holds a whole parameter, and the values are bit-identical to those of `init()` on one
  device. Works with or without an active `jax.set_mesh`, on Auto and Explicit meshes.

  Args:
    init: a plan; or the constructor, with `mesh` and `rules` as in `plan`.
    mesh: the mesh, when `init` is a constructor.
    rules: the rules, when `init` is a constructor.
    optimizer: an optax transformation, when `init` is a constructor.
    wrt: which Variables it trains.
    uneven: the policy for uneven dims, when `init` is a constructor.

  Returns:
    The live module; `(module, nnx.Optimizer)` when the plan has an optimizer.

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
  if isinstance(init, ShardingPlan):
    if mesh is not None or rules is not None or optimizer is not None:
      raise PlanError(
        "create_sharded_model got a plan and also mesh, rules or optimizer.",
        details="a plan already holds all of them",
        fix="create_sharded_model(plan)",
      )
    the_plan = init
  elif mesh is None:
    raise PlanError(
      "create_sharded_model needs a mesh.",
      fix="create_sharded_model(init, nxp.make_mesh(fsdp=-1), nxp.fsdp())",
    )
  else:
    the_plan = make_plan(init, mesh, rules, optimizer=optimizer, wrt=wrt, uneven=uneven)
  return instantiate(the_plan, construct(the_plan))


def construct(the_plan: ShardingPlan) -> dict[Root, dict[Path, jax.Array]]:
  """Runs the constructor as one compiled program whose outputs are the shards.

  Args:
    the_plan: a plan on real devices.

  Returns:
    Root -> path -> array (global storage shape), in the plan's shardings.

  Raises:
    PlanError: the plan's mesh is abstract, or `init` builds another structure than it did when planned.
  """
  mesh = _real_mesh(the_plan)
  # Explicit axes would put the sharding into the types of every intermediate of the initializers, which
  # then materialise whole (measured: 22 times the temporaries). The same devices with Auto axes do not,
  # and re-wrapping the results costs nothing.
  build_mesh = auto_mesh(mesh)
  shardings = [NamedSharding(build_mesh, leaf.spec, memory_kind=leaf.memory_kind) for leaf in the_plan.leaves]

  def build() -> list[jax.Array]:
    with nnx.use_eager_sharding(False):
      module = the_plan.init()
      built: dict[Root, Any] = {"model": variables(module)}
      if the_plan.tx is not None:
        built["optimizer"] = variables(nnx.Optimizer(module, the_plan.tx, wrt=the_plan.wrt))
    _check_same_structure(the_plan, built)
    return [pad_to(value_of(built[leaf.root][leaf.path]), leaf.storage_shape) for leaf in the_plan.leaves]

  with jax.set_mesh(build_mesh):
    arrays = jax.jit(build, out_shardings=shardings)()
  if build_mesh is not mesh:
    arrays = [
      jax.device_put(array, leaf.sharding) for array, leaf in zip(arrays, the_plan.leaves, strict=True)
    ]
  result: dict[Root, dict[Path, jax.Array]] = {}
  for leaf, array in zip(the_plan.leaves, arrays, strict=True):
    result.setdefault(leaf.root, {})[leaf.path] = array
  return result


def pad_to(value: Any, shape: tuple[int, ...]) -> Any:
  """Appends zeros to each dim up to `shape` (global storage shape, elements)."""
  if value.shape == shape:
    return value
  return jax.numpy.pad(value, [(0, new - old) for old, new in zip(value.shape, shape, strict=True)])


def _real_mesh(the_plan: ShardingPlan) -> Mesh:
  if isinstance(the_plan.mesh, AbstractMesh):
    raise PlanError(
      "this plan is on an abstract mesh, so there is nothing to create on.",
      details=f"mesh {dict(the_plan.mesh.shape)}",
      fix="plan on real devices: nxp.plan(init, nxp.make_mesh(...), rules).",
    )
  return the_plan.mesh


def _check_same_structure(the_plan: ShardingPlan, built: Mapping[Root, Arrays]) -> None:
  for root, found in built.items():
    planned = the_plan.of(root)
    for path in dict.fromkeys([*planned, *found]):
      want = planned[path].shape if path in planned else None
      got = tuple(value_of(found[path]).shape) if path in found else None
      if got != want:
        raise PlanError(
          f"init built another structure than when it was planned: {'.'.join(map(str, path))}.",
          details=f"planned shape {want}, built shape {got}",
          fix="make init depend on nothing that changes between calls, or plan again.",
        )
