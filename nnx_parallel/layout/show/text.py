"""The plan as text and as HTML: the table, and the explanation of one leaf."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence

from nnx_parallel.core.mesh import describe_mesh
from nnx_parallel.core.nodes import path_str
from nnx_parallel.core.text import (
  format_array,
  format_bytes,
  format_spec,
  hang,
  page_width,
  print_text,
  text_table,
)
from nnx_parallel.layout.batch import batch_axes
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.table import PlanTable


def explain(plan: PlanTable, leaf: LeafPlan) -> str:
  """The text of `Plan.explain`."""
  lines = [f"{leaf.name}: {leaf.kind} {format_array(leaf.dtype, leaf.shape)} -> {leaf.spec}"]
  if leaf.aliases:
    lines.append(f"tied: also at {', '.join(map(path_str, leaf.aliases))}; counted once")
  lines += leaf.decision.steps or (leaf.decision.reason,)
  if any(leaf.padding):
    lines.append(f"stored as {format_array(leaf.dtype, leaf.storage_shape)}; the module sees {leaf.shape}")
  if leaf.memory_kind:
    lines.append(f"kept in {leaf.memory_kind} memory")
  local = format_array(leaf.dtype, leaf.local_shape)
  held = f"each device holds {local}, {leaf.bytes_per_device} bytes of {leaf.bytes}"
  copies = f" ({leaf.copies} copies on {plan.mesh.size} devices)" if leaf.copies > 1 else ""
  lines.append(held + copies)
  followers = [other for other in plan.leaves if other.parameter == leaf.path]
  if followers and leaf.root == "model":
    size = format_bytes(sum(other.bytes_per_device for other in followers))
    lines.append(f"{len(followers)} optimizer arrays follow it: {size} per device")
  return "\n  ".join(lines)


def plan_text(plan: PlanTable, *, width: int | None = None) -> str:
  """The text of `print(plan)`: mesh, rules, one row per group of equal leaves, totals, notes."""
  width = width or page_width()
  mesh = [hang(line, width) for line in describe_mesh(plan.mesh).splitlines()]
  lines = [*mesh, *_rules_lines(plan, width)]
  model = [leaf for leaf in plan.leaves if leaf.root == "model"]
  rows = [_row(pattern, leaves) for pattern, leaves in grouped(model)]
  sections = [("model", rows)]
  if len(model) < len(plan.leaves):
    sections.append(("optimizer", [_row(name, leaves) for name, leaves in _optimizer_groups(plan)]))
  lines += ["", *_tables(sections, width), "", *_totals(plan, width)]
  lines += [hang(f"layers: {layers}", width) for layers in plan.layers]
  lines += [hang(f"note: {note}", width) for note in plan.notes]
  return "\n".join(lines)


def show(plan: PlanTable) -> None:
  """See `Plan.show`."""
  if _in_notebook():
    from IPython.display import display  # pyright: ignore[reportMissingImports]

    display(plan)
    return
  print_text(plan_text(plan))


def _in_notebook() -> bool:
  ipython = sys.modules.get("IPython")
  shell = ipython.get_ipython() if ipython is not None else None
  return shell is not None and hasattr(shell, "kernel")


def grouped(leaves: Iterable[LeafPlan]) -> list[tuple[str, list[LeafPlan]]]:
  """Groups equal leaves of repeated layers, as `(name with * for the parts that differ, leaves)`."""
  # Their paths differ in list positions, keys that are numbers, or numbers at the end of a name (`layer_12`).
  groups: dict[object, list[LeafPlan]] = {}
  for leaf in leaves:
    pattern = _pattern(leaf)
    key = (pattern, leaf.shape, leaf.dtype, leaf.spec, leaf.kind, leaf.memory_kind, leaf.decision.reason)
    groups.setdefault(key, []).append(leaf)
  return [(_common_name(found), found) for found in groups.values()]


def _pattern(leaf: LeafPlan) -> tuple[str, ...]:
  return (leaf.root, *(re.sub(r"(?<![^_])\d+$", "*", str(part)) for part in leaf.path))


def _common_name(leaves: Sequence[LeafPlan]) -> str:
  paths = [leaf.path for leaf in leaves]
  differs = [len(set(parts)) > 1 for parts in zip(*paths, strict=True)]
  parts = zip(differs, _pattern(leaves[0])[1:], paths[0], strict=True)
  name = ".".join(pattern if differ else str(part) for differ, pattern, part in parts)
  return name if leaves[0].root == "model" else f"optimizer/{name}"


def _optimizer_groups(plan: PlanTable) -> list[tuple[str, list[LeafPlan]]]:
  # Moments with exactly the layout of their parameters share one row.
  parameters = plan.of("model")
  groups: dict[object, tuple[str, list[LeafPlan]]] = {}
  rest: list[LeafPlan] = []
  for leaf in plan.leaves:
    if leaf.root != "optimizer":
      continue
    path = leaf.parameter
    if path is None or _layout(leaf) != _layout(parameters[path]):
      rest.append(leaf)
      continue
    prefix = path_str(leaf.path[: len(leaf.path) - len(path)])
    groups.setdefault((prefix, leaf.dtype), (f"{prefix}.*", []))[1].append(leaf)
  merged = [(name if len(found) > 1 else path_str(found[0].path), found) for name, found in groups.values()]
  others = [(name.removeprefix("optimizer/"), found) for name, found in grouped(rest)]
  order = {id(leaf): place for place, leaf in enumerate(plan.leaves)}
  return sorted(merged + others, key=lambda group: order[id(group[1][0])])


def _layout(leaf: LeafPlan) -> tuple[object, ...]:
  return leaf.shape, leaf.spec, leaf.padding, leaf.memory_kind


def _row(name: str, leaves: Sequence[LeafPlan]) -> tuple[str, ...]:
  first = leaves[0]
  same_array = len({leaf.shape for leaf in leaves}) == 1
  same_spec = len({leaf.spec for leaf in leaves}) == 1
  reason = first.decision.reason if same_array else "as its parameter"
  if any(first.padding) and same_array:
    reason += f"; stored as {format_array('', first.storage_shape)}"
  if first.memory_kind:
    reason += f"; in {first.memory_kind}"
  if first.aliases:
    reason += f"; tied to {', '.join(map(path_str, first.aliases))}"
  return (
    name,
    str(len(leaves)) if len(leaves) > 1 else "",
    first.kind,
    format_array(first.dtype, first.shape) if same_array else f"{first.dtype}",
    format_spec(first.spec) if same_spec else "same as parameter",
    format_bytes(sum(leaf.bytes_per_device for leaf in leaves)),
    reason,
  )


def _tables(sections: Sequence[tuple[str, Sequence[tuple[str, ...]]]], width: int) -> list[str]:
  # One set of column widths for all sections, so that the columns line up on the page.
  columns = ("n", "type", "array", "spec", "per device", "why")
  every = [(title, *columns) for title, _ in sections] + [row for _, rows in sections for row in rows]
  lines: list[str] = []
  for title, rows in sections:
    table = text_table(
      (title, *columns), rows, right=(1, 5), wrap=(6,), below=(2, 6), width=width, measure=every
    )
    lines += [*([""] if lines else []), *table.splitlines()]
  return lines


def _rules_lines(plan: PlanTable, width: int) -> list[str]:
  shown = [
    f"{name} -> {' | '.join('+'.join(c) or 'replicated' for c in options)}"
    for name, options in plan.rules.logical.items()
  ]
  if "batch" not in plan.rules.logical and (axes := batch_axes(plan.rules, plan.mesh.shape)):
    shown.insert(0, f"batch -> {'+'.join(axes)} (by the names of the axes)")
  return [hang(f"rules {', '.join(shown)}", width)] if shown else []


def _totals(plan: PlanTable, width: int) -> list[str]:
  def row(label: str, leaves: Sequence[LeafPlan], *, elements: bool = True, copies: bool = True) -> list[str]:
    total, held = sum(leaf.bytes for leaf in leaves), sum(leaf.bytes_per_device for leaf in leaves)
    count = f"{sum(math.prod(leaf.shape) for leaf in leaves):,}" if elements else ""
    ratio = f"{held * plan.mesh.size / max(total, 1):.2f}" if copies else ""
    return [label, str(len(leaves)), count, format_bytes(total), format_bytes(held), ratio]

  near = [leaf for leaf in plan.leaves if not leaf.on_host]
  away = [leaf for leaf in plan.leaves if leaf.on_host]
  roots = [(root, [leaf for leaf in near if leaf.root == root]) for root in ("model", "optimizer")]
  rows = [row(root, leaves) for root, leaves in roots if leaves]
  if len(rows) > 1:
    rows.append(row("total", near, elements=False, copies=False))
  if away:
    rows.append(row("in host memory", away, copies=False))
  header = ("object", "arrays", "elements", "total size", "per device", "replication")
  return text_table(header, rows, right=(1, 2, 3, 4, 5), width=width).splitlines()
