"""The plan as text and as HTML: a table for people, and the explanation of one leaf."""

from __future__ import annotations

import html
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.mesh import describe_mesh
from nnx_parallel.layout.variables import path_str

if TYPE_CHECKING:
  from nnx_parallel.layout.plan import ShardingPlan

WIDTH = 118
"""Columns of what is printed into a file, a pipe or a notebook."""
_GAP = "  "
_INDENT = "    "
_BESIDE = 20
"""Columns that a column of words needs; with fewer it stands under its row."""
_PRE = "overflow-x:auto;white-space:pre;line-height:1.35;font-size:12px;margin:0"


class Shown:
  """Shows `str(self)` in notebooks and IPython, which would list the fields of a dataclass."""

  def _repr_html_(self) -> str:
    return as_html(str(self))

  def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
    printer.text(str(self))


def page_width() -> int:
  """Columns to use: those of the terminal, or of the variable `COLUMNS`; `WIDTH` in a file or a notebook."""
  known = sys.stdout.isatty() or "COLUMNS" in os.environ
  return max(60, min(shutil.get_terminal_size((WIDTH, 24)).columns, 200)) if known else WIDTH


def print_text(text: str) -> None:
  """Prints a table or a report; in colour where the output is a terminal.

  Args:
    text: lines that fit the terminal.
  """
  if not sys.stdout.isatty():
    print(text)
    return
  from rich.console import Console
  from rich.text import Text

  styled = Text(text, no_wrap=True, overflow="ignore")
  styled.highlight_regex(r"(?m)^(model|optimizer|total|whole on every device|changed)  .*$", "bold")
  styled.highlight_regex(r"(?m)^mesh .*$", "bold cyan")
  styled.highlight_regex(rf"(?m)^{_INDENT}\S.*$", "dim")
  styled.highlight_regex(r"(?m)^note: |\bwhole\b|\(!\)|DOES NOT FIT", "yellow")
  styled.highlight_regex(r"\d[\d.,]* (?:[KMGT]i)?B\b|\bFITS\b", "green")
  Console(soft_wrap=True).print(styled)


def as_html(text: str) -> str:
  """Text for a notebook: in a box that scrolls instead of wrapping, with the headers of a plan in bold."""
  lines = (html.escape(line) for line in text.splitlines())
  bold = "\n".join(f"<b>{x}</b>" if x.startswith(("model ", "optimizer ", "mesh ")) else x for x in lines)
  return f'<pre style="{_PRE}">{bold}</pre>'


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


def plan_text(plan: ShardingPlan, *, width: int | None = None) -> str:
  """The text of `print(plan)`: mesh, rules, one row per group of alike leaves, totals, notes.

  Args:
    plan: the plan.
    width: columns to use; by default `page_width()`.

  Returns:
    Lines joined by newlines, none longer than `width` unless a single word is.
  """
  width = width or page_width()
  mesh = [_hang(line, width) for line in describe_mesh(plan.mesh).splitlines()]
  lines = [*mesh, *_rules_lines(plan, width)]
  model = [leaf for leaf in plan.leaves if leaf.root == "model"]
  rows = [_row(pattern, leaves) for pattern, leaves in grouped(model)]
  sections = [("model", rows)]
  if len(model) < len(plan.leaves):
    sections.append(("optimizer", [_row(name, leaves) for name, leaves in _optimizer_groups(plan)]))
  lines += ["", *_tables(sections, width), "", *_totals(plan, width)]
  lines += [_hang(f"note: {note}", width) for note in plan.notes]
  return "\n".join(lines)


def plan_html(plan: ShardingPlan) -> str:
  """The plan as HTML for a notebook: the same table, wider."""
  return as_html(plan_text(plan, width=160))


def show(plan: ShardingPlan) -> None:
  """See `ShardingPlan.show`."""
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
  """Puts alike leaves of repeated layers together.

  Leaves are alike when they differ only in positions, in keys that are numbers, or in numbers at the end of
  a name (`blocks.0`, `layer_12`) and agree in type, shape, dtype, spec, memory and reason.

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


def number_pattern(name: str) -> str:
  """A dotted name with `*` for the numbers that count layers.

  Example:
    >>> number_pattern("blocks.11.layer_3.up.kernel")
    'blocks.*.layer_*.up.kernel'
  """
  return re.sub(r"(?<![^._/])\d+(?=\.|$)", "*", name)


def _pattern(leaf: LeafPlan) -> tuple[str, ...]:
  return (leaf.root, *(re.sub(r"(?<![^_])\d+$", "*", str(part)) for part in leaf.path))


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
    table = text_table(
      (title, *columns), rows, right=(1, 5), wrap=(6,), below=(2, 6), width=width, measure=every
    )
    lines += [*([""] if lines else []), *table.splitlines()]
  return lines


def text_table(
  header: Sequence[str],
  rows: Sequence[Sequence[str]],
  *,
  right: Sequence[int] = (),
  wrap: Sequence[int] = (),
  below: Sequence[int] = (),
  width: int | None = None,
  measure: Sequence[Sequence[str]] | None = None,
) -> str:
  """Aligns rows under a header.

  Where the page is narrow, the columns of words stand under their row, and names continue after a dot.

  Args:
    header: one word for each column.
    rows: the cells.
    right: columns that are aligned to the right.
    wrap: columns of words: they share what the others leave of `width`, and continue on lines below.
    below: columns that stand under their row where the page is narrow; by default those of `wrap`.
    width: columns of text; by default `page_width()`.
    measure: rows that decide the widths, when they should fit more than this table.

  Returns:
    Lines without trailing blanks.
  """
  width = width or page_width()
  sizes = [max(len(row[c]) for row in measure or [header, *rows]) for c in range(len(header))]
  every = range(len(header))
  room = _room(sizes, width, every, wrap)
  narrow = room < min(sum(sizes[c] for c in wrap), _BESIDE * len(wrap))
  under = (below or wrap) if narrow else ()
  beside = [c for c in every if c not in under]
  if narrow:
    sizes[0] = min(sizes[0], max(16, _room(sizes, width, beside, (0,))))
  else:
    for column in wrap:
      sizes[column] = min(sizes[column], room // len(wrap))
  lines: list[str] = []
  for row in (header, *rows):
    cells = {c: _cell(row[c], sizes[c], words=c in wrap) for c in beside}
    for height in range(max(map(len, cells.values()))):
      parts = {c: cell[height] if height < len(cell) else "" for c, cell in cells.items()}
      aligned = [p.rjust(sizes[c]) if c in right else p.ljust(sizes[c]) for c, p in parts.items()]
      lines.append(_GAP.join(aligned).rstrip())
    words = "; ".join(row[c] for c in under if row[c])
    lines += _wrapped(words, width, indent=_INDENT) if words else []
  return "\n".join(lines)


def _room(sizes: Sequence[int], width: int, columns: Sequence[int], free: Sequence[int]) -> int:
  """What the other columns leave for those that are free."""
  fixed = sum(sizes[c] for c in columns if c not in free)
  return width - fixed - len(_GAP) * (len(columns) - 1)


def _cell(text: str, size: int, *, words: bool) -> list[str]:
  if words:
    return _wrapped(text, size)
  lines = [""]
  for part in re.findall(r".+?(?:[.,] ?|$)", text) if len(text) > size else [text]:
    if len(lines[-1] + part) > size and lines[-1]:
      lines.append(_GAP)
    lines[-1] += part
  return [line.rstrip() for line in lines]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
  return textwrap.wrap(
    text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
  ) or [""]


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


def _totals(plan: ShardingPlan, width: int) -> list[str]:
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
  return text_table(header, rows, right=(1, 2, 3, 4, 5), width=width).splitlines()
