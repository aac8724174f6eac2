"""Arrays and a plan -> a live module: the last step of creating, resharding and restoring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from flax import nnx

from nnx_parallel.core.axes import Entry, axes_in
from nnx_parallel.core.nodes import DECLARED, SCOPE, Names, Path, declared, merge
from nnx_parallel.core.padding import pad_variable
from nnx_parallel.core.types import AnyArray, Leaf
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.leaf import LeafPlan, Root
from nnx_parallel.layout.plan import Plan

Arrays = Mapping[Path, Any]
R = TypeVar("R")


def instantiate(plan: Plan[R], arrays: Mapping[Root, Arrays]) -> R:
  """Puts arrays (global storage shape) into a new live module, or `(module, optimizer)`.

  Each Variable keeps the user's annotation and gets the metadata that flax needs to apply it without an
  active mesh: `mesh`, and `sharding_rules` with the resolved axes.
  """
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
  labels = stack_labels(rows.values()) if root == "model" else {}
  # Where the model goes, a step finds the rules for its activations.
  scope: dict[str, object] = {SCOPE: plan.activation_rules} if root == "model" else {}
  leaves: list[tuple[Path, Leaf]] = []
  for path, abstract_leaf in nnx.to_flat_state(abstract.state):
    if path not in rows:
      leaves.append((path, abstract_leaf))  # it holds no array: None, or optax's MaskedNode
      continue
    row = rows[path]
    if path not in found:
      raise PlanError(f"no array for {row.name}.", fix="give one array for each leaf of the plan.")
    leaves.append((path, _bind(abstract_leaf, found[path], row, labels.get(path), scope)))
  return merge(abstract.graphdef, nnx.from_flat_state(cast(Any, leaves)))


def _bind(
  abstract_leaf: Leaf, array: AnyArray, row: LeafPlan, first_dim: str | None, scope: dict[str, object]
) -> Leaf:
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
  """The annotation from which flax derives exactly the row's spec, with names where they suffice.

  A name stays if it maps to the same axes in every dim that has it. Elsewhere the mesh axes themselves are
  written: in a dim that the fallback split, or for a name that resolved differently in two dims or is also an
  axis of another dim.
  """
  ndim = len(row.shape)
  names: Names = (first_dim, *([None] * (ndim - 1))) if ndim else ()
  if row.names is not None and len(row.names) == ndim:  # flax copies names onto state of another rank
    names = row.names
  used = {*axes_in(row.spec)}
  written: list[Any] = []
  table: dict[str, Any] = {}
  for name, axes in zip(names, row.spec, strict=True):
    keep = isinstance(name, str) and table.get(name, axes) == axes and (name == axes or name not in used)
    if keep:
      table[str(name)] = axes
    written.append(name if keep else axes)
  return {"out_sharding": tuple(written), "sharding_rules": tuple(table.items())}


def stack_labels(leaves: Iterable[LeafPlan]) -> dict[Path, str]:
  """The name of the first dim of parameters without names, from annotated siblings that agree on it.

  `nnx.scan` removes the name of the stacked dim from every annotation and raises if it finds another. A bias
  that the fallback split therefore needs the name that its kernel has. The layout does not depend on this:
  each Variable has the rule that maps the name to its real axes.
  """
  rows = [leaf for leaf in leaves if leaf.shape]
  first_dims: dict[Path, set[tuple[Entry, int]]] = {}
  for leaf in rows:
    if leaf.names:
      for depth in range(len(leaf.path)):
        first_dims.setdefault(leaf.path[:depth], set()).add((leaf.names[0], leaf.shape[0]))
  labels: dict[Path, str] = {}
  for leaf in rows:
    if leaf.names is None and any(leaf.spec):
      above = (first_dims.get(leaf.path[:depth]) for depth in reversed(range(len(leaf.path))))
      nearest = next((found for found in above if found), set[tuple[Entry, int]]())
      name, size = next(iter(nearest)) if len(nearest) == 1 else (None, 0)
      if isinstance(name, str) and size == leaf.shape[0]:
        labels[leaf.path] = name
  return labels
