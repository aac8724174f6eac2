"""The difference of two plans."""

from __future__ import annotations

import dataclasses

from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.nodes import path_str
from nnx_parallel.core.text import Shown, format_array, format_bytes, format_spec, number_pattern, text_table
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.show.text import grouped
from nnx_parallel.layout.table import PlanTable


@dataclasses.dataclass(frozen=True)
class Change:
  """One field of a leaf that differs between two plans."""

  name: str
  field: str
  before: str
  after: str


@dataclasses.dataclass(frozen=True)
class PlanDiff(Shown):
  """The difference of two plans; prints as a table, and is falsy for equal layouts."""

  mesh: tuple[dict[str, int], dict[str, int]] | None  # the two meshes' axes, when they differ
  removed: tuple[LeafPlan, ...]  # leaves that only the first plan has
  added: tuple[LeafPlan, ...]  # leaves that only the second plan has
  changes: tuple[Change, ...]  # the differences of leaves that both plans have
  bytes_per_device: tuple[int, int]  # the bytes of the first plan and of the second plan

  def __bool__(self) -> bool:
    return bool(self.mesh or self.removed or self.added or self.changes)

  def __str__(self) -> str:
    if not self:
      return "the two layouts are equal."
    rows: list[tuple[str, ...]] = []
    equal: dict[tuple[str, ...], list[str]] = {}
    for change in self.changes:
      pattern = number_pattern(change.name)
      equal.setdefault((pattern, change.field, change.before, change.after), []).append(change.name)
    for (pattern, field, before, after), names in equal.items():
      rows.append((pattern if len(names) > 1 else names[0], str(len(names)), field, before, after))
    for label, leaves in (("only before", self.removed), ("only after", self.added)):
      for name, found in grouped(leaves):
        shown = f"{format_array(found[0].dtype, found[0].shape)} {format_spec(found[0].spec)}"
        sides = (shown, "-") if label == "only before" else ("-", shown)
        rows.append((name, str(len(found)), "leaf", *sides))
    lines = [f"mesh {self.mesh[0]} -> {self.mesh[1]}"] if self.mesh else []
    if rows:
      lines += text_table(("changed", "n", "what", "before", "after"), rows, right=(1,)).splitlines()
    before, after = map(format_bytes, self.bytes_per_device)
    return "\n".join([*lines, f"per device {before} -> {after}"])


def diff(before: PlanTable, after: PlanTable) -> PlanDiff:
  """See `Plan.diff`."""
  old, new = ({leaf.name: leaf for leaf in p.leaves} for p in (before, after))
  changes: list[Change] = []
  for name, leaf in old.items():
    if name in new:
      pairs = zip(layout_of(leaf).items(), layout_of(new[name]).values(), strict=True)
      changes += [Change(name, field, a, b) for (field, a), b in pairs if a != b]
  meshes = axis_sizes(before.mesh), axis_sizes(after.mesh)
  return PlanDiff(
    meshes if list(meshes[0].items()) != list(meshes[1].items()) else None,
    tuple(leaf for name, leaf in old.items() if name not in new),
    tuple(leaf for name, leaf in new.items() if name not in old),
    tuple(changes),
    (before.bytes_per_device(), after.bytes_per_device()),
  )


def layout_of(leaf: LeafPlan) -> dict[str, str]:
  """All that two plans compare of a leaf, as text."""
  return {
    "array": format_array(leaf.dtype, leaf.shape),
    "type": leaf.kind,
    "spec": format_spec(leaf.spec),
    "stored as": format_array("", leaf.storage_shape) if any(leaf.padding) else "-",
    "memory": leaf.memory_kind or "default",
    "tied to": ", ".join(map(path_str, leaf.aliases)) or "-",
  }
