"""Reports as text: plain tables that read well in a terminal, a log and a file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from nnx_parallel.core.text import (
  format_bytes,
  text_table,
)
from nnx_parallel.report.compile_report import CompileReport, text_of
from nnx_parallel.report.program.peak import PeakBuffer
from nnx_parallel.report.program.replicated import SHARE, ReplicatedActivation

_ROWS = 12
_BUFFERS = 6


class Table(NamedTuple):
  """A table, for text and for pages; a column whose name ends in `>` is right-aligned."""

  title: str
  columns: tuple[str, ...]
  rows: list[tuple[str, ...]]
  note: str = ""
  """A line below."""


def render(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
  """A `Table` as text; a last column that is not right-aligned may wrap."""
  right = [n for n, column in enumerate(columns) if column.endswith(">")]
  last = len(columns) - 1
  header = [column.rstrip(">") for column in columns]
  table = text_table(header, [*rows], right=right, wrap=() if last in right else (last,))
  return f"{title}\n{table}\n" + (f"{note}\n" if note else "")


def format_count(count: float) -> str:
  """A number with a decimal prefix: `989 T`."""
  for prefix in ("", " k", " M", " G", " T", " P"):
    if abs(count) < 1000:
      return f"{count:.3g}{prefix}"
    count /= 1000
  return f"{count:.3g} E"


def format_seconds(seconds: float) -> str:
  """A duration: `12.3 ms`, `3.00 s`."""
  if seconds >= 1:
    return f"{seconds:.2f} s"
  return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def not_counted(operations: Mapping[str, int]) -> str:
  """A line that names the operations that an estimate left out, or an empty string."""
  if not operations:
    return ""
  return "Not counted: " + ", ".join(f"{count} x {name}" for name, count in operations.items()) + "."


@text_of.register
def report_text(report: CompileReport) -> str:
  """The full report as plain text."""
  donated = sum(item.bytes for item in report.arguments if item.donated)
  kept = arguments_table(report, kept=True)
  parts, need = {**report.categories, "total": report.need_bytes}, max(1, report.need_bytes)
  shares = [(name, format_bytes(size), f"{100 * size / need:.0f} %") for name, size in parts.items()]
  sections = [
    "\n".join(head(report)) + "\n",
    render("Memory per device", ("what", "bytes>", "share>"), shares),
    *map(_text, (peak_table(report), *sent_tables(report))),
    "" if report.collectives else "Nothing is sent between devices.\n",
    replicated_text(report),
    _text(reshards_table(report)),
    f"Donated: {format_bytes(donated)} of {format_bytes(report.memory.arguments)} arguments.\n" + _text(kept),
  ]
  return "\n".join(section for section in sections if section)


def _text(table: Table) -> str:
  return render(*table) if table.rows else ""


def verdict(report: CompileReport) -> str:
  """One sentence: whether the step fits, and if not, which change would make it fit."""
  need = format_bytes(report.need_bytes)
  if report.chip is None or report.available_bytes is None:
    return f"needs {need} per device; the memory of this device is not in the table."
  have = f"{format_bytes(report.available_bytes)} usable on {report.chip.name}{report.chip.usable_note}"
  if report.fits:
    free = format_bytes(report.available_bytes - report.need_bytes)
    return f"FITS: needs {need} of {have}; {free} free."
  return f"DOES NOT FIT: needs {need} of {have}. {advice(report)}"


def advice(report: CompileReport) -> str:
  """Changes that would make a program fit, from how its memory divides; estimates, to be compiled again."""
  have, state = report.available_bytes or 0, report.memory.arguments
  # Gradients are as large as the parameters, however small a microbatch is.
  fixed = state + report.categories.get("parameters", 0)
  falls = max(0, report.need_bytes - fixed)
  lines: list[str] = []
  for parts in (2, 4, 8, 16, 32):
    if parts <= (report.examples or parts) and fixed + falls / parts <= have:
      lines.append(
        f"Try {parts} times as many microbatches, or a batch {parts} times smaller: the memory they divide, "
        f"{format_bytes(falls)}, would fall to about {format_bytes(falls / parts)}."
      )
      break
  else:
    times = next((n for n in (2, 4, 8, 16, 32, 64) if report.need_bytes / n <= have), None)
    devices = f"{times} times as many devices" if times else "many more devices"
    lines.append(
      f"State and gradients are {format_bytes(fixed)} per device: try {devices} along an axis that "
      "splits the parameters."
    )
  if report.peak:
    size, array, origin = peak_table(report, most=1).rows[0]
    lines.append(f"Largest at the peak: {size} of {array} from {origin}.")
  return " ".join(lines)


def head(report: CompileReport) -> list[str]:
  """The compiled target, whether it fits, and the figures of a step: one sentence each."""
  mesh = " x ".join(f"{name} {size}" for name, size in report.axes.items())
  sent = sum(item.sent_bytes for item in report.collectives)
  lines = [
    f"Compiled for {report.target} (mesh {mesh}) in {format_seconds(report.seconds)}",
    verdict(report),
    f"Per device and step: {format_count(report.cost.flops)} matrix FLOPs, "
    f"{format_bytes(report.cost.hbm_bytes)} memory traffic, {format_bytes(sent)} sent.",
    between_slices(report),
  ]
  lines += [not_counted(report.cost.uncounted), *(f"Layers: {x}." for x in report.layers)]
  if not report.compiled:
    lines.append("The compiler stopped for lack of memory; the tables below are of the unfinished program.")
  return [line for line in lines if line]


def between_slices(report: CompileReport) -> str:
  """One sentence: the bytes that are sent between slices or hosts; empty for a single slice."""
  if report.slices == 1:
    return ""
  places = "hosts" if "NVIDIA" in report.target else "slices"
  sums = Counter[str]()
  for item in report.collectives:
    if item.slices > 1:
      sums[f"{item.kind} over {'+'.join(item.axes)}"] += item.sent_bytes
  each = ", ".join(f"{name} {format_bytes(size)}" for name, size in sums.most_common())
  total = f"{format_bytes(sums.total())} of that ({each})" if sums else "nothing"
  return f"Collectives between the {report.slices} {places} send {total}."


def arguments_table(report: CompileReport, most: int = _BUFFERS, *, kept: bool = False) -> Table:
  """The largest arguments, or the largest arguments whose memory is not reused."""
  rows = [
    (item.name, format_bytes(item.bytes))
    for item in (report.kept if kept else report.arguments)[:most]
    if item.bytes
  ]
  title = "Not donated, largest first" if kept else "Arguments per device, largest first"
  return Table(title, ("argument", "bytes>"), rows)


def peak_table(report: CompileReport, most: int = _BUFFERS) -> Table:
  """The largest arrays in memory when the most is."""
  rows = [
    (format_bytes(t.bytes), _array(t), _origin(t.parameters, t.source, t.op)) for t in report.peak[:most]
  ]
  return Table("In memory at the peak, besides the arguments", ("bytes>", "array", "from"), rows)


def _array(buffer: PeakBuffer) -> str:
  return f"{buffer.count} x {buffer.shape}" if buffer.count > 1 else buffer.shape


def sent_tables(report: CompileReport, most: int = _ROWS) -> tuple[Table, Table]:
  """The collectives: the sums by kind and axes, and the largest collectives."""
  largest = sorted(report.collectives, key=lambda item: -item.total_bytes)
  rows = [
    (
      item.kind,
      "+".join(item.axes) + ("" if item.complete else " (part)"),
      item.dtype,
      format_bytes(item.bytes),
      f"{item.times}",
      format_bytes(item.total_bytes),
      "yes" if item.overlapped else "no",
      _origin(item.parameters, item.source, item.op),
    )
    for item in largest[:most]
  ]
  sums = [(*key, format_bytes(total)) for key, total in report.bytes_by("kind", "axes").items()]
  more = len(largest) - most
  return (
    Table("Sent per step, by kind and axis (payload)", ("kind", "axes", "bytes>"), sums),
    Table(
      "Collectives, largest first" + (f" (and {more} smaller)" if more > 0 else ""),
      ("kind", "axes", "dtype", "each>", "times>", "total>", "overlaps", "from"),
      rows,
    ),
  )


def _origin(parameters: Sequence[str], source: str, op: str) -> str:
  place = os.path.basename(source) if source else op.rsplit("/", 1)[-1]
  names = ", ".join(parameters)
  if not names or not place or place == names:
    return names or place
  return f"{names} at {place}"


def replicated_text(report: CompileReport) -> str:
  """Activations that hold all examples on each device, and where they begin."""
  if report.replicated_activations == ():
    least = format_bytes(SHARE * report.need_bytes)
    return f"No activation of {least} or more is replicated over the batch axes.\n"
  return _text(replicated_table(report))


def replicated_table(report: CompileReport, most: int = _BUFFERS) -> Table:
  """The largest activations that are replicated along the batch, and how each would be sharded."""
  found, note = report.replicated_activations or (), ""
  if found:
    first = min(found, key=lambda one: one.place)
    fix = f": {first.fix}" if first.fix else ""
    note = f"Fix: begin with the first of them in the program, {first} at {_place(first)}{fix}."
  rows = [
    (format_bytes(one.bytes), f"{one.count} x {one}" if one.count > 1 else str(one), _place(one), one.fix)
    for one in found[:most]
  ]
  more = f" (and {len(found) - most} smaller)" if len(found) > most else ""
  columns = ("each>", "array", "made at", "fix")
  return Table(f"Activations replicated over the batch axes{more}", columns, rows, note)


def _place(one: ReplicatedActivation) -> str:
  return _origin((), one.source, one.op)


def reshards_table(report: CompileReport) -> Table:
  """Tensors that each device replicates although their layout is sharded."""
  rows = [
    (
      os.path.basename(item.source) or item.op,
      item.shape,
      format_bytes(item.bytes),
      f"{item.before} -> {item.after}",
    )
    for item in report.reshards
  ]
  title = "Involuntary full rematerialization (replicated against the layout)"
  return Table(title, ("where", "tensor", "bytes>", "sharding asked for"), rows)
