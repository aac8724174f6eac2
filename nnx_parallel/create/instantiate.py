"""Arrays and a plan -> a live module: the last step of creating, resharding and restoring."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from flax import nnx

from nnx_parallel.core.nodes import SCOPE, Path, merge, own_rules
from nnx_parallel.core.padding import pad_variable
from nnx_parallel.core.types import AnyArray, Leaf
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.constrain import Scope
from nnx_parallel.layout.leaf import LeafPlan, Root
from nnx_parallel.layout.plan import Plan

Arrays = Mapping[Path, Any]
R = TypeVar("R")


def instantiate(plan: Plan[R], arrays: Mapping[Root, Arrays]) -> R:
  """Puts arrays (global storage shape) into a new live module, or `(module, optimizer)`."""
  model = _merge(plan, "model", arrays)
  if plan.tx is None:
    return model
  optimizer = _merge(plan, "optimizer", arrays)
  optimizer.tx = plan.live_tx
  optimizer.placement = plan.placement
  return cast(R, (model, optimizer))


def _merge(plan: Plan, root: Root, arrays: Mapping[Root, Arrays]) -> Any:
  abstract = plan.abstract[root]
  found, rows = arrays.get(root, {}), plan.of(root)
  leaves: list[tuple[Path, Leaf]] = []
  for path, abstract_leaf in nnx.to_flat_state(abstract.state):
    if path not in rows:
      leaves.append((path, abstract_leaf))  # it holds no array: None, or optax's MaskedNode
      continue
    row = rows[path]
    if path not in found:
      raise PlanError(f"no array for {row.name}.", fix="give one array for each leaf of the plan.")
    leaves.append((path, _bind(abstract_leaf, found[path], row, plan.activation_rules)))
  return merge(abstract.graphdef, nnx.from_flat_state(cast(Any, leaves)))


def _bind(abstract_leaf: Leaf, array: AnyArray, row: LeafPlan, scope: Scope) -> Leaf:
  """The leaf around an array, with its names and what flax needs to resolve them without a mesh."""
  if not isinstance(abstract_leaf, nnx.Variable):
    return array
  metadata: dict[str, Any] = {**abstract_leaf.get_metadata(), "eager_sharding": True}
  # Without names flax must read none: `nnx.scan` would look for the name of the dim that it removes.
  if metadata.get("out_sharding") is not None:
    if own := own_rules(metadata):
      scope = dataclasses.replace(scope, own=own)
    for key in ("out_sharding", "sharding_rules", "mesh"):
      metadata.pop(key, None)
    if row.names is not None and len(row.names) == len(row.shape):  # flax copies them to state of other rank
      table: dict[Any, Any] = {}
      for name, axes in zip(row.names, row.spec, strict=True):
        if name is not None:
          table.setdefault(name, axes)
          table.setdefault(str(name), axes)  # flax looks up several names in one dim by their text
      metadata.update(out_sharding=row.names, sharding_rules=tuple(table.items()), mesh=row.mesh)
      # By names that do not say the whole layout, flax would move the state of an `nnx.Optimizer`.
      pairs = zip(row.names, row.spec, strict=True)
      metadata["eager_sharding"] = all(table.get(name) == axes for name, axes in pairs)
  metadata[SCOPE] = scope
  leaf: Any = type(abstract_leaf).from_metadata(abstract_leaf.get_raw_value(), metadata)
  return pad_variable(leaf, array, row.storage_shape) if any(row.padding) else leaf.copy(array)
