"""Bytes, arrays, specs and tables as text."""

from __future__ import annotations

import collections
import html
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec


def list_lines(lines: Sequence[str], most: int = 20) -> str:
  """The first lines of a long list, and how many more there are."""
  more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
  return "\n".join([*lines[:most], *more])


def with_article(noun: str) -> str:
  """`an int`, `a dict`."""
  return f"{'an' if noun[:1] in 'aeiouAEIO' else 'a'} {noun}"


def few(names: Sequence[str]) -> str:
  """The first names of a long list, for a note; names of equal layers are one: `a, b, c and 2 more`."""
  if len(names) > 3:
    same = collections.Counter(re.sub(r"(?<=\.)\d+(?![^.])|^\d+(?=\.)", "*", name) for name in names)
    names = [f"{name} ({count})" if count > 1 else name for name, count in same.items()]
  return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


WIDTH = 118
"""The number of columns for output to a file, a pipe or a notebook."""
_GAP = "  "
_INDENT = "    "
_BESIDE = 20
"""Columns that prose needs; with fewer it is printed below its row."""
_PRE = "overflow-x:auto;white-space:pre;line-height:1.35;font-size:12px;margin:0"


class Shown:
  """Prints as `str(self)` in notebooks and IPython, which would list the fields of a dataclass."""

  def _repr_html_(self) -> str:
    return as_html(str(self))

  def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
    printer.text(str(self))


def page_width() -> int:
  """The columns of the terminal, or of the variable `COLUMNS`; `WIDTH` in a file or a notebook."""
  known = (sys.stdout and sys.stdout.isatty()) or "COLUMNS" in os.environ  # pythonw has no stdout
  return max(60, min(shutil.get_terminal_size((WIDTH, 24)).columns, 200)) if known else WIDTH


def print_text(text: str) -> None:
  """Prints a table or a report; in colour on a terminal."""
  if not (sys.stdout and sys.stdout.isatty()):
    print(text)
    return
  from rich.console import Console
  from rich.text import Text

  styled = Text(text, no_wrap=True, overflow="ignore")
  styled.highlight_regex(r"(?m)^(model|optimizer|object|total|replicated|changed)  .*$", "bold")
  styled.highlight_regex(r"(?m)^mesh .*$", "bold cyan")
  styled.highlight_regex(rf"(?m)^{_INDENT}\S.*$", "dim")
  styled.highlight_regex(r"(?m)^note: |\breplicated\b|\(!\)|DOES NOT FIT", "yellow")
  styled.highlight_regex(r"\d[\d.,]* (?:[KMGT]i)?B\b|\bFITS\b", "green")
  Console(soft_wrap=True).print(styled)


def as_html(text: str) -> str:
  """Text for a notebook: in a box that scrolls instead of wrapping, with the headers of a plan in bold."""
  lines = (html.escape(line) for line in text.splitlines())
  bold = "\n".join(f"<b>{x}</b>" if x.startswith(("model ", "optimizer ", "mesh ")) else x for x in lines)
  return f'<pre style="{_PRE}">{bold}</pre>'


def format_bytes(count: float) -> str:
  """Bytes in binary units with four significant digits: `512 B`, `1.5 MiB`."""
  power = min(max(int(math.log2(abs(count) or 1)) // 10, 0), 4)
  unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
  return f"{count:.0f} B" if power == 0 else f"{count / 1024**power:.4g} {unit}"


def format_array(dtype: object, shape: tuple[int, ...]) -> str:
  """`float32[8,64]`."""
  return f"{dtype}[{','.join(map(str, shape))}]"


def format_spec(spec: PartitionSpec) -> str:
  """A spec with one entry per dim: `(-, fsdp, data+fsdp)`; `replicated` if nothing is sharded."""
  if not any(spec):
    return "replicated"
  parts = ["-" if not e else e if isinstance(e, str) else "+".join(e) for e in spec]
  return f"({', '.join(parts)})"


def number_pattern(name: str) -> str:
  """A dotted name with `*` for the numbers that count layers: `blocks.*.layer_*.up.kernel`."""
  return re.sub(r"(?<![^._/])\d+(?=\.|$)", "*", name)


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
  """Aligns rows under a header, in `width` columns of text, by default those of the page."""
  # Columns in `wrap` are prose: they share the width that is left, and wrap. On a narrow page, the columns in
  # `below`, by default those of `wrap`, are printed below their row, and long names continue after a dot.
  # `measure`: rows that decide the widths, for several tables of equal widths.
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
  """The width that the other columns leave for the `free` columns."""
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


def hang(text: str, width: int) -> str:
  """Wraps a paragraph, with its further lines indented."""
  return textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
