"""The plan as text and as HTML: a table for people, and the explanation of one leaf."""

from __future__ import annotations

import math
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jax.sharding import PartitionSpec

from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.mesh import describe_mesh
from nnx_parallel.layout.variables import path_str

if TYPE_CHECKING:
  from nnx_parallel.layout.plan import ShardingPlan

WIDTH = 118
"""Columns of printed plans where no terminal says otherwise."""
_GAP = "  "


def format_bytes(count: float) -> str:
  """Bytes in binary units with four significant digits.

  Args:
    count: bytes.

  Returns:
    For example `"1.5 MiB"`.

  Example:
    >>> from nnx_parallel.layout.render import format_bytes
    >>> format_bytes(512), format_bytes(1.5 * 2**20)
    ('512 B', '1.5 MiB')
  """
  power = min(max(int(math.log2(abs(count) or 1)) // 10, 0), 4)
  unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
  return f"{count:.0f} B" if power == 0 else f"{count / 1024**power:.4g} {unit}"


def format_array(dtype: object, shape: tuple[int, ...]) -> str:
  """`float32[8,64]`."""
  return f"{dtype}[{','.join(map(str, shape))}]"


def format_spec(spec: PartitionSpec) -> str:
  """A spec in one short word per dim: `(-, fsdp, data+fsdp)`; `whole` when nothing is split."""
  if not any(spec):
    return "whole"
  parts = ["-" if not e else e if isinstance(e, str) else "+".join(e) for e in spec]
  return f"({', '.join(parts)})"


def explain(plan: ShardingPlan, leaf: LeafPlan) -> str:
  """The text of `ShardingPlan.explain`."""
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


def plan_text(plan: ShardingPlan, *, width: int = WIDTH) -> str:
  """The text of `print(plan)`: mesh, rules, one row per group of alike leaves, totals, notes.

  Args:
    plan: the plan.
    width: columns to use; the last column wraps.

  Returns:
    Lines joined by newlines, none longer than `width` unless a single name is.
  """
  lines = [*describe_mesh(plan.mesh).splitlines(), *_rules_lines(plan, width)]
  model = [leaf for leaf in plan.leaves if leaf.root == "model"]
  rows = [_row(pattern, leaves) for pattern, leaves in grouped(model)]
  sections = [("model", rows)]
  if len(model) < len(plan.leaves):
    sections.append(("optimizer", [_row(name, leaves) for name, leaves in _optimizer_groups(plan)]))
  lines += ["", *_tables(sections, width), "", *_totals(plan)]
  lines += [_hang(f"note: {note}", width) for note in plan.notes]
  return "\n".join(lines)


def plan_html(plan: ShardingPlan) -> str:
  """The plan as HTML for a notebook: the same table, in a box that scrolls instead of wrapping."""
  from html import escape

  lines = plan_text(plan, width=160).splitlines()
  shown = "\n".join(
    f"<b>{escape(line)}</b>" if line.startswith(("model ", "optimizer ", "mesh ")) else escape(line)
    for line in lines
  )
  return (
    f'<pre style="overflow-x:auto;white-space:pre;line-height:1.35;font-size:12px;margin:0">{shown}</pre>'
  )


def show(plan: ShardingPlan) -> None:
  """See `ShardingPlan.show`."""
  if _in_notebook():
    from IPython.display import display  # pyright: ignore[reportMissingImports]

    display(plan)
    return
  from rich.console import Console
  from rich.text import Text

  width = max(80, min(shutil.get_terminal_size((WIDTH, 24)).columns, 200))
  text = Text(plan_text(plan, width=width), no_wrap=True, overflow="ignore")
  text.highlight_regex(r"(?m)^(model|optimizer) .*$", "bold")
  text.highlight_regex(r"(?m)^mesh .*$", "bold cyan")
  text.highlight_regex(r"\bwhole\b", "yellow")
  text.highlight_regex(r"\d[\d.,]* (?:[KMGT]i)?B\b", "green")
  Console(width=width, soft_wrap=True).print(text)


def _in_notebook() -> bool:
  import sys

  ipython = sys.modules.get("IPython")
  shell = ipython.get_ipython() if ipython is not None else None
  return shell is not None and hasattr(shell, "kernel")


def grouped(leaves: Iterable[LeafPlan]) -> list[tuple[str, list[LeafPlan]]]:
  """Puts alike leaves of repeated layers together.

  Leaves are alike when they differ only in list positions or in numbers at the end of a name
  (`blocks.0`, `layer_12`) and agree in type, shape, dtype, spec, memory and reason.

  Args:
    leaves: rows of a plan.

  Returns:
    `(name, leaves)` in order of first appearance; the name has `*` for what differs.
  """
  groups: dict[object, list[LeafPlan]] = {}
  for leaf in leaves:
    pattern = _pattern(leaf)
    key = (pattern, leaf.shape, leaf.dtype, leaf.spec, leaf.kind, leaf.memory_kind, leaf.decision.reason)
    groups.setdefault(key, []).append(leaf)
  return [(_common_name(found), found) for found in groups.values()]


def _pattern(leaf: LeafPlan) -> tuple[str, ...]:
  parts = ("*" if isinstance(part, int) else re.sub(r"_\d+$", "_*", str(part)) for part in leaf.path)
  return (leaf.root, *parts)


def _common_name(leaves: Sequence[LeafPlan]) -> str:
  paths = [leaf.path for leaf in leaves]
  differs = [len(set(parts)) > 1 for parts in zip(*paths, strict=True)]
  parts = zip(differs, _pattern(leaves[0])[1:], paths[0], strict=True)
  name = ".".join(pattern if differ else str(part) for differ, pattern, part in parts)
  return name if leaves[0].root == "model" else f"optimizer/{name}"


def _optimizer_groups(plan: ShardingPlan) -> list[tuple[str, list[LeafPlan]]]:
  # Moments that lie exactly as their parameters do need one row for all of them.
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
    format_spec(first.spec) if same_spec else "as each",
    format_bytes(sum(leaf.bytes_per_device for leaf in leaves)),
    reason,
  )


def _tables(sections: Sequence[tuple[str, Sequence[tuple[str, ...]]]], width: int) -> list[str]:
  # One set of column widths for all sections, so that the eye can run down the whole page.
  columns = ("n", "type", "array", "spec", "per device", "why")
  every = [(title, *columns) for title, _ in sections] + [row for _, rows in sections for row in rows]
  lines: list[str] = []
  for title, rows in sections:
    table = text_table((title, *columns), rows, right=(1, 5), wrap=(6,), width=width, measure=every)
    lines += [*([""] if lines else []), *table.splitlines()]
  return lines


def text_table(
  header: Sequence[str],
  rows: Sequence[Sequence[str]],
  *,
  right: Sequence[int] = (),
  wrap: Sequence[int] = (),
  width: int = WIDTH,
  measure: Sequence[Sequence[str]] | None = None,
) -> str:
  """Aligns rows under a header; only the columns that may wrap do.

  Args:
    header: one word for each column.
    rows: the cells.
    right: columns that are aligned to the right.
    wrap: columns that share what the others leave of `width`, and continue on lines below.
    width: columns of text.
    measure: rows that decide the widths, when they should fit more than this table.

  Returns:
    Lines without trailing blanks.
  """
  sample = measure or [header, *rows]
  sizes = [max(len(row[column]) for row in sample) for column in range(len(header))]
  room = width - sum(sizes[c] for c in range(len(sizes)) if c not in wrap) - len(_GAP) * (len(sizes) - 1)
  for column in wrap:
    sizes[column] = min(sizes[column], max(room // len(wrap), 16))
  lines: list[str] = []
  for row in (header, *rows):
    cells = [
      textwrap.wrap(cell, sizes[c], break_on_hyphens=False) or [""] if c in wrap else [cell]
      for c, cell in enumerate(row)
    ]
    for height in range(max(map(len, cells))):
      parts = [cell[height] if height < len(cell) else "" for cell in cells]
      aligned = [p.rjust(sizes[c]) if c in right else p.ljust(sizes[c]) for c, p in enumerate(parts)]
      lines.append(_GAP.join(aligned).rstrip())
  return "\n".join(lines)


def _rules_lines(plan: ShardingPlan, width: int) -> list[str]:
  if not len(plan.rules.logical):
    return []
  shown = ", ".join(
    f"{name} -> {' | '.join('+'.join(c) or 'whole' for c in options)}"
    for name, options in plan.rules.logical.items()
  )
  return [_hang(f"rules {shown}", width)]


def _hang(text: str, width: int) -> str:
  return textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _totals(plan: ShardingPlan) -> list[str]:
  rows: list[tuple[str, ...]] = []
  for root in ("model", "optimizer"):
    leaves = [leaf for leaf in plan.leaves if leaf.root == root and not leaf.on_host]
    if leaves:
      total, held = sum(leaf.bytes for leaf in leaves), sum(leaf.bytes_per_device for leaf in leaves)
      elements = sum(math.prod(leaf.shape) for leaf in leaves)
      copies = f"{held * plan.mesh.size / max(total, 1):.2f}"
      rows.append((root, str(len(leaves)), f"{elements:,}", format_bytes(total), format_bytes(held), copies))
  near = [leaf for leaf in plan.leaves if not leaf.on_host]
  if len(rows) > 1:
    both = (format_bytes(sum(leaf.bytes for leaf in near)), format_bytes(plan.bytes_per_device()))
    rows.append(("together", str(len(near)), "", *both, ""))
  away = [leaf for leaf in plan.leaves if leaf.on_host]
  if away:
    elements = f"{sum(math.prod(leaf.shape) for leaf in away):,}"
    both = (format_bytes(sum(leaf.bytes for leaf in away)), format_bytes(plan.bytes_per_device(host=True)))
    rows.append(("in host memory", str(len(away)), elements, *both, ""))
  header = ("total", "arrays", "elements", "in all", "per device", "copies")
  return text_table(header, rows, right=(1, 2, 3, 4, 5)).splitlines()
