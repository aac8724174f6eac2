"""Arrays + plan -> live module: the last step of creating, resharding and restoring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from flax import nnx

from nnx_parallel.errors import PlanError
from nnx_parallel.layout.leaf import LeafPlan, Root
from nnx_parallel.layout.padding import pad_variable
from nnx_parallel.layout.plan import ShardingPlan
from nnx_parallel.layout.stacked import stack_labels
from nnx_parallel.layout.variables import DECLARED, SCOPE, Names, Path, axes_of, declared

Arrays = Mapping[Path, Any]


def instantiate(the_plan: ShardingPlan, arrays: Mapping[Root, Arrays]) -> Any:
  """Puts arrays into a new live module (and optimizer): the last step of creating and of restoring.

  Each Variable keeps the user's annotation and gets what flax needs to honour it without an active mesh:
  `mesh`, and `sharding_rules` with the axes that were resolved.

  Args:
    the_plan: the plan that the arrays follow.
    arrays: root -> path -> array (global storage shape); every leaf of the plan.

  Returns:
    The module, or `(module, optimizer)` when the plan has an optimizer.

  Raises:
    PlanError: a leaf of the plan has no array, or the plan was read from JSON without its constructor.
  """
  if the_plan.abstract_model is None:
    the_plan.init()  # says that the plan has no constructor, and where to give one
  model = _merge(the_plan, "model", the_plan.abstract_model, arrays)
  if the_plan.abstract_optimizer is None:
    return model
  optimizer = _merge(the_plan, "optimizer", the_plan.abstract_optimizer, arrays)
  optimizer.tx = the_plan.live_tx
  optimizer.placement = the_plan.placement
  return model, optimizer


def _merge(the_plan: ShardingPlan, root: Root, abstract: Any, arrays: Mapping[Root, Arrays]) -> Any:
  graphdef, state = nnx.split(abstract)
  found, rows = arrays.get(root, {}), the_plan.of(root)
  labels = stack_labels(rows.values()) if root == "model" else {}
  # Where the model goes, a step finds the rules for its activations.
  scope: dict[str, Any] = {SCOPE: the_plan.activation_rules} if root == "model" else {}
  leaves: list[tuple[Path, Any]] = []
  for path, abstract_leaf in nnx.to_flat_state(state):
    if path not in rows:
      leaves.append((path, abstract_leaf))  # it holds no array: None, or optax's MaskedNode
      continue
    row = rows[path]
    if path not in found:
      raise PlanError(f"no array for {row.name}.", fix="give one array for each leaf of the plan.")
    leaves.append((path, _bind(abstract_leaf, found[path], row, labels.get(path), scope)))
  return nnx.merge(graphdef, nnx.from_flat_state(cast(Any, leaves)))


def _bind(abstract_leaf: Any, array: Any, row: LeafPlan, first_dim: str | None, scope: dict[str, Any]) -> Any:
  if not isinstance(abstract_leaf, nnx.Variable):
    return array
  updates: dict[str, Any] = {"eager_sharding": True, **scope}
  if any(row.spec) or abstract_leaf.get_metadata().get("out_sharding"):
    updates |= _metadata(row, first_dim)
    updates["mesh"] = row.mesh
    if row.root == "model":
      names, own_rules = declared(abstract_leaf, where=row.name)
      written = (updates["out_sharding"], updates["sharding_rules"])
      updates[DECLARED] = (names, tuple(own_rules.items()), written)
  if any(row.padding):
    return pad_variable(abstract_leaf.copy(**updates), array, row.storage_shape)
  return abstract_leaf.copy(array, **updates)


def _metadata(row: LeafPlan, first_dim: str | None) -> dict[str, Any]:
  """The annotation that makes flax derive exactly the row's spec, with names wherever they suffice.

  A name stays where it maps to the same axes in every dim that has it. Elsewhere the mesh axes themselves are
  written: in a dim taken by the fallback, or for a name that resolved differently in two dims or is spelt
  like an axis of another dim.
  """
  ndim = len(row.shape)
  names: Names = (first_dim, *([None] * (ndim - 1))) if ndim else ()
  if row.names is not None and len(row.names) == ndim:  # flax copies names onto state of another rank
    names = row.names
  used = {axis for entry in row.spec for axis in axes_of(entry)}
  written: list[Any] = []
  table: dict[str, Any] = {}
  for name, axes in zip(names, row.spec, strict=True):
    keep = isinstance(name, str) and table.get(name, axes) == axes and (name == axes or name not in used)
    if keep:
      table[str(name)] = axes
    written.append(name if keep else axes)
  return {"out_sharding": tuple(written), "sharding_rules": tuple(table.items())}
