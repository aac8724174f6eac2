"""Compares a live module with its plan."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.nodes import array_leaves, path_str, value_of
from nnx_parallel.core.shards import describe
from nnx_parallel.core.text import format_array, list_lines, with_article
from nnx_parallel.core.types import AnyArray, Leaf
from nnx_parallel.errors import LayoutMismatchError, PlanError
from nnx_parallel.layout.leaf import LeafPlan, Root
from nnx_parallel.layout.plan import Plan, check_plan


@check_arguments(PlanError, "model")
def check_layout(model: nnx.Module, plan: Plan, *, optimizer: nnx.Optimizer[Any] | None = None) -> None:
  """Raises an error unless a live module and its optimizer have the planned layout.

  It compares the shape, dtype, devices, spec and memory kind of each array, and the bytes on each device.

  Args:
    model: the live module.
    plan: the plan that gives the expected layout.
    optimizer: the optimizer of the model; None leaves it out of the comparison.

  Raises:
    LayoutMismatchError: some leaves differ; the message names them, with the planned and the actual layout.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=64))
    >>> model = nxp.create_sharded_model(plan)
    >>> nxp.check_layout(model, plan)
    >>> model.kernel.set_value(jnp.zeros((8, 64)))
    >>> nxp.check_layout(model, plan)
    Traceback (most recent call last):
    nnx_parallel.errors.LayoutMismatchError: 1 of 2 arrays are not laid out as planned.
      kernel: planned float32[8,64] P(None, 'fsdp'), found float32[8,64] on one device (uncommitted)
      Fix: model = nxp.reshard(model, plan); p[...] = x keeps a Variable's layout, p.set_value(x) does not.
           In a jit of your own: p[...] = jax.lax.with_sharding_constraint(x, plan[path].sharding).
  """
  check_plan(plan, "nxp.check_layout(model, plan, optimizer=optimizer)")
  if not isinstance(model, nnx.Pytree):  # pyright: ignore[reportUnnecessaryIsInstance]
    raise PlanError(
      f"check_layout needs a live module, and got {with_article(type(model).__name__)}.",
      fix="nxp.check_layout(model, plan, optimizer=optimizer)",
    )
  wrong, extra = differences(model, plan, optimizer)
  if not wrong and not extra:
    return
  planned = sum(leaf.root == "model" or optimizer is not None for leaf in plan.leaves)
  call = "model = nxp.reshard(model, plan)"
  if optimizer is not None or plan.tx is not None:
    call = "model, optimizer = nxp.reshard(model, plan, optimizer=optimizer)"
  beside = f", and {len(extra)} {'is' if len(extra) == 1 else 'are'} not in the plan." if extra else "."
  raise LayoutMismatchError(
    f"{len(wrong)} of {planned} arrays are not laid out as planned{beside}",
    details=list_lines([*wrong, *extra]),
    fix=f"{call}; p[...] = x keeps a Variable's layout, p.set_value(x) does not.\n"
    "In a jit of your own: p[...] = jax.lax.with_sharding_constraint(x, plan[path].sharding).",
  )


def differences(
  model: nnx.Module, plan: Plan, optimizer: nnx.Optimizer[Any] | None = None
) -> tuple[list[str], list[str]]:
  """The leaves that are not as planned, and the leaves that are not in the plan."""
  nodes: dict[Root, Any] = {"model": model}
  if optimizer is not None:
    nodes["optimizer"] = optimizer
  wrong: list[str] = []
  extra: list[str] = []
  for root, node in nodes.items():
    rows, live = plan.of(root), array_leaves(node)
    wrong += [text for path, leaf in rows.items() if (text := _difference(leaf, live.get(path)))]
    prefix = "" if root == "model" else "optimizer/"
    extra += [
      f"{prefix}{path_str(path)}: planned nothing, found {describe(value_of(live[path]))}"
      for path in live
      if path not in rows
    ]
  return wrong, extra


def _difference(leaf: LeafPlan, live: Leaf) -> str:
  """How a leaf differs from the plan; empty if it does not differ."""
  planned = f"{leaf.name}: planned {format_array(leaf.dtype, leaf.storage_shape)} {leaf.spec}"
  planned += f" in {leaf.memory_kind}" if leaf.on_host else ""
  if live is None:
    return f"{planned}, found nothing"
  value = value_of(live)
  if not _as_planned(value, leaf):
    return f"{planned}, found {describe(value)}"
  held = {shard.device: shard.data.nbytes for shard in value.addressable_shards}
  if {*held.values()} - {leaf.bytes_per_device}:  # this process may have none of the devices
    return f"{leaf.name}: planned {leaf.bytes_per_device} bytes on each device, found {held}"
  return ""


def _as_planned(value: AnyArray, leaf: LeafPlan) -> bool:
  return (
    isinstance(value, jax.Array)
    and value.shape == leaf.storage_shape
    and value.dtype == leaf.dtype
    and value.sharding.is_equivalent_to(leaf.sharding, value.ndim)
  )
