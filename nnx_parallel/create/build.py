"""The function that every way of creating compiles: from nothing to one array for each leaf of the plan."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from nnx_parallel.errors import PlanError
from nnx_parallel.layout.padding import pad
from nnx_parallel.layout.plan import Root, ShardingPlan
from nnx_parallel.layout.render import format_array
from nnx_parallel.layout.tracing import make_optimizer, traced_init
from nnx_parallel.layout.variables import Path, array_leaves, path_str, value_of


def build(the_plan: ShardingPlan) -> list[jax.Array]:
  """Builds the module and its optimizer, and reads their arrays; to be traced.

  Args:
    the_plan: the plan.

  Returns:
    One array (global storage shape) for each leaf, in the plan's order.

  Raises:
    PlanError: `init` builds another structure than it did when planned.
  """
  module = traced_init(the_plan.init, the_plan.mesh)
  with nnx.use_eager_sharding(False):
    built: dict[Root, dict[Path, Any]] = {"model": array_leaves(module)}
    if the_plan.tx is not None:
      built["optimizer"] = array_leaves(make_optimizer(module, the_plan.tx, the_plan.wrt))
  for root, found in built.items():
    _check_same_structure(the_plan, root, found)
  return [pad(_array(built[leaf.root][leaf.path]), leaf.storage_shape) for leaf in the_plan.leaves]


def _array(leaf: Any) -> Any:
  value = value_of(leaf)
  return jax.numpy.asarray(value) if isinstance(value, (bool, int, float, complex)) else value


def _check_same_structure(the_plan: ShardingPlan, root: Root, found: dict[Path, Any]) -> None:
  planned = the_plan.of(root)
  for path in dict.fromkeys([*planned, *found]):
    want = (planned[path].shape, planned[path].dtype) if path in planned else None
    value = _array(found[path]) if path in found else None
    got = (tuple(value.shape), value.dtype) if value is not None else None
    if got != want:
      raise PlanError(
        f"init built another structure than when it was planned: {path_str(path)}.",
        details=f"planned {_show(want)}, built {_show(got)}",
        fix="make init depend on nothing that changes between calls, or plan again.",
      )


def _show(array: tuple[tuple[int, ...], Any] | None) -> str:
  return "nothing" if array is None else format_array(array[1], array[0])
