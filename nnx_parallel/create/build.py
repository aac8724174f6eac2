"""What creating compiles: the constructor as one function, or as the stages that are cut into slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from nnx_parallel.core.nodes import Path, array_leaves, path_str, value_of
from nnx_parallel.core.padding import pad
from nnx_parallel.core.text import format_array
from nnx_parallel.create.slicing.cut import Stage
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.abstract import trace_module, trace_optimizer
from nnx_parallel.layout.leaf import Root
from nnx_parallel.layout.plan import ShardingPlan
from nnx_parallel.layout.tracing import Trace, make_optimizer, traced_init


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


def trace_plan(the_plan: ShardingPlan) -> dict[Root, Trace]:
  """Traces the plan's constructor, and its optimizer, anew.

  Args:
    the_plan: the plan.

  Returns:
    By root, what was built and by which program.

  Raises:
    PlanError: `init` builds another structure than it did when planned.
  """
  traces: dict[Root, Trace] = {"model": trace_module(the_plan.init, the_plan.mesh)}
  _check_same_structure(the_plan, "model", array_leaves(traces["model"].node))
  if the_plan.tx is not None:
    traces["optimizer"] = trace_optimizer(traces["model"].node, the_plan.tx, the_plan.wrt)
    _check_same_structure(the_plan, "optimizer", array_leaves(traces["optimizer"].node))
  return traces


def stages(the_plan: ShardingPlan, traces: Mapping[Root, Trace]) -> tuple[list[Stage], list[int]]:
  """Puts the traces one after the other: the module, its optimizer, and the padding of uneven leaves.

  Args:
    the_plan: the plan.
    traces: of this plan.

  Returns:
    The stages; and for each leaf of the plan, which of their results it is.
  """
  found = [Stage(traces["model"].program, ())]
  made: dict[tuple[Root, Path], int] = {("model", path): i for i, path in enumerate(traces["model"].makes)}
  if "optimizer" in traces:
    one = traces["optimizer"]
    found.append(Stage(one.program, tuple(made["model", path] for path in one.reads)))
    made |= {("optimizer", path): i for i, path in enumerate(one.makes, len(made))}
  results = [made[leaf.root, leaf.path] for leaf in the_plan.leaves]
  padded = [i for i, leaf in enumerate(the_plan.leaves) if any(leaf.padding)]
  if padded:
    leaves = [the_plan.leaves[i] for i in padded]

    def pad_all(arrays: list[jax.Array]) -> list[jax.Array]:
      return [pad(array, leaf.storage_shape) for array, leaf in zip(arrays, leaves, strict=True)]

    program = jax.make_jaxpr(pad_all)([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])
    found.append(Stage(program, tuple(results[i] for i in padded)))
    for i, position in enumerate(padded, len(made)):
      results[position] = i
  return found, results


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
