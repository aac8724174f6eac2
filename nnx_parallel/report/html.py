"""One self-contained HTML page per report or plan; nothing is loaded from anywhere."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nnx_parallel.layout.figures import INSTALL, can_draw, svg_text
from nnx_parallel.layout.mesh import axis_sizes
from nnx_parallel.layout.plan import ShardingPlan
from nnx_parallel.layout.render import format_array, format_spec, grouped
from nnx_parallel.report.figures import (
  devices_figure,
  links_figure,
  memory_figure,
  report_figure,
  search_figure,
  time_figure,
  treemap,
)
from nnx_parallel.report.roofline import compiled_time
from nnx_parallel.report.tables import FAULT_COLUMNS, fault_rows, not_counted, results_note, verdict
from nnx_parallel.report.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
  from matplotlib.figure import Figure

  from nnx_parallel.report.chips import Chip
  from nnx_parallel.report.compile_report import CompileReport
  from nnx_parallel.report.memory import MemoryPlan
  from nnx_parallel.report.roofline import StepTime
  from nnx_parallel.report.search import SearchResult

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 940px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin: 2em 0 .4em; }
svg { max-width: 100%; height: auto; background: white; }
.verdict { padding: .6em 1em; border-left: 5px solid; }
.fits { border-color: #009E73; } .short { border-color: #D55E00; } .unknown { border-color: #7A7A7A; }
pre { padding: .8em 1em; background: #8882; overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: 2px 12px 2px 0; text-align: left; }
td:not(:last-child) { white-space: nowrap; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
"""


def report_page(report: CompileReport) -> str:
  """The page of a compile report."""
  mesh = " x ".join(f"{name} {size}" for name, size in report.axes.items())
  sent = sum(c.sent_bytes for c in report.collectives)
  facts = (
    f"{format_count(report.cost.flops)} matrix FLOPs, {format_bytes(report.cost.hbm_bytes)} memory "
    f"traffic, {format_bytes(sent)} sent, per device and step; compiled in {format_seconds(report.seconds)}"
  )
  facts += f". {not_counted(report.cost.uncounted)}{html.escape(results_note(report))}"
  state = {True: "fits", False: "short", None: "unknown"}[report.fits]
  time = compiled_time(report)
  wrong = _table(FAULT_COLUMNS, fault_rows(report)) if report.faults else ""
  reshards = [(r.source or r.op, r.shape, format_bytes(r.bytes), r.before, r.after) for r in report.reshards]
  whole = _table(("where", "tensor", "bytes>", "from", "to"), reshards) if reshards else ""
  sending = _drawn(lambda: report_figure(report, "collectives")) + _collective_table(report)
  body = [
    f"<h1>One step on {html.escape(report.target)}, mesh {html.escape(mesh)}</h1>",
    f"<p class='verdict {state}'>{html.escape(verdict(report))}</p><p>{facts}</p>",
    _section("Wrong numbers", wrong),
    _section("Memory per device", _memory(report.categories, report.chip)),
    _section("Made whole on each device against the layout", whole),
    _section("In memory at the peak, besides the arguments", _peak_table(report) if report.peak else ""),
    _section("Arguments by size, per device", _drawn(lambda: report_figure(report, "treemap"))),
    _section("Predicted step", _time(time) if time else "<p>No published figures for this device.</p>"),
    _section("Sent per step, by kind and axis", sending if report.collectives else "<p>Nothing is sent.</p>"),
    _section("Devices", _drawn(lambda: report_figure(report, "devices"))),
    f"<script type='application/json' id='report'>{_embedded(report.to_json())}</script>",
  ]
  return _page(f"{report.target}: compile report", body)


def _peak_table(report: CompileReport) -> str:
  rows = [
    (format_bytes(t.bytes), f"{t.count} x {t.shape}", ", ".join(t.parameters), t.source or t.op)
    for t in report.peak[:12]
  ]
  return _table(("bytes>", "arrays", "parameter", "where"), rows)


def plan_page(
  plan: ShardingPlan,
  memory: MemoryPlan | None = None,
  time: StepTime | None = None,
  *,
  title: str = "Plan",
) -> str:
  """The page of a plan: its bytes by path, its devices, its largest leaves.

  Args:
    plan: on any mesh.
    memory: adds the planned memory by category, and with a chip whether it fits.
    time: adds the predicted step, and how long each axis of the mesh sends.
    title: what is planned, for the head of the page.

  Returns:
    One self-contained HTML document.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    >>> page = nxp.plan_page(nxp.plan(init, nxp.abstract_mesh(fsdp=8), nxp.fsdp()))
    >>> page[:15], "Plan on fsdp=8 = 8 devices" in page
    ('<!doctype html>', True)
  """
  sizes = axis_sizes(plan.mesh)
  leaves = sorted(plan.leaves, key=lambda leaf: -leaf.bytes_per_device)
  mesh = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
  head = f"{title} on {mesh} = {math.prod(sizes.values())} devices"
  held = format_bytes(plan.bytes_per_device())
  body = [f"<h1>{html.escape(head)}</h1>", f"<p>{len(leaves)} arrays, {held} per device.</p>"]
  if memory is not None:
    head, (state, sentence) = _planned_verdict(head, memory)
    body.insert(1, f"<p class='verdict {state}'>{html.escape(sentence)}</p>")
    body.append(_section("Planned memory per device", _memory(memory.categories, memory.chip)))
  if time is not None:
    body.append(_section("Predicted step", _time(time)))
    if time.overlapped or time.waiting:
      body.append(_section("Predicted sending, by axis", _drawn(lambda: links_figure(time))))
  found = [(name, alike, sum(x.bytes_per_device for x in alike)) for name, alike in grouped(leaves)]
  rows = [
    (
      name,
      str(len(alike)) if len(alike) > 1 else "",
      format_array(alike[0].dtype, alike[0].shape),
      format_spec(alike[0].spec),
      format_bytes(size),
      alike[0].decision.reason,
    )
    for name, alike, size in sorted(found, key=lambda row: -row[2])[:200]
  ]
  columns = ("leaves", "n>", "array", "spec", "per device>", "why")
  sizes_by_root = [(leaf.name, leaf.bytes_per_device, leaf.root) for leaf in leaves]
  body += [
    _section("State by size, per device", _drawn(lambda: treemap(sizes_by_root))),
    _section("Devices", _drawn(lambda: devices_figure(sizes))),
    _section("Largest leaves", _table(columns, rows)),
  ]
  return _page(head, body)


def _planned_verdict(head: str, memory: MemoryPlan) -> tuple[str, tuple[str, str]]:
  """The title with the verdict, and the verdict: its class and its sentence."""
  need = format_bytes(memory.need_bytes)
  if memory.chip is None or memory.headroom_bytes is None:
    return head, ("unknown", f"A step needs about {need} per device; no chip to compare it with.")
  word, state = ("fits", "fits") if memory.headroom_bytes >= 0 else ("does not fit", "short")
  have = f"{format_bytes(memory.chip.usable_bytes)} usable on {memory.chip.name}"
  sentence = f"{word.upper()}, as planned: a step needs about {need} of {have}."
  return f"{head}: {word} {memory.chip.name}", (state, sentence)


def notebook_frame(page: str) -> str:
  """The page as a frame inside a notebook, so that its style stays its own."""
  return (
    f"<iframe srcdoc='{html.escape(page, quote=True)}' width='100%' height='700' "
    "style='border:0' sandbox></iframe>"
  )


def _drawn(draw: Callable[[], Figure], instead: str = "") -> str:
  """A picture for a page; other HTML, or nothing, where matplotlib is not installed."""
  return svg_text(draw()) if can_draw() else instead


def _memory(categories: Mapping[str, int], chip: Chip | None) -> str:
  rows = [(name, format_bytes(size)) for name, size in categories.items()]
  return _drawn(lambda: memory_figure(categories, chip), _table(("what", "bytes>"), rows))


def _time(time: StepTime) -> str:
  note = f"{format_seconds(time.seconds)} by the roofline model, bound by {time.binds}. "
  note = f"<p>{html.escape(note + not_counted(time.uncounted))}</p>"
  return note + _drawn(lambda: time_figure(time), f"<pre>{html.escape(str(time))}</pre>")


def search_page(result: SearchResult) -> str:
  """The page of a search: every candidate by memory and time, the front as a table, the winner's code."""
  from nnx_parallel.report.search_text import FRONT_COLUMNS, OTHER_COLUMNS, front_rows, other_rows

  tried = len(result.fitting) + len(result.too_large)
  refused = [(str(count), why) for why, count in result.refused.items()]
  body = [
    f"<h1>{tried} layouts for {html.escape(result.machine.text)}: {len(result.fitting)} fit</h1>",
    *(f"<p>{html.escape(note)}</p>" for note in result.notes),
  ]
  best = result.best
  if best is None:
    return _page("Search", [*body, "<p class='verdict short'>No layout is proposed.</p>"])
  body += [
    _section("Memory against time, up to four times the best", _drawn(lambda: search_figure(result))),
    _section("Fastest for their memory", _table(FRONT_COLUMNS, front_rows(result))),
    _section("Other meshes, at their best", _table(OTHER_COLUMNS, other_rows(result))),
    _section("Left out", _table(("meshes>", "why"), refused) if refused else ""),
    _section("Predicted step of the winner", _time(best.time)),
    _section("The winner", f"<pre>{html.escape(result.code())}</pre>"),
    f"<script type='application/json' id='search'>{_embedded(result.to_json())}</script>",
  ]
  return _page(f"{result.machine.text}: search", body)


def _collective_table(report: CompileReport) -> str:
  ordered = sorted(report.collectives, key=lambda c: -c.total_bytes)
  rows = [
    (
      c.kind,
      "+".join(c.axes),
      c.dtype,
      format_bytes(c.bytes),
      str(c.times),
      format_bytes(c.total_bytes),
      "yes" if c.overlapped else "no",
      ", ".join(c.parameters),
      os.path.basename(c.source),
    )
    for c in ordered[:40]
  ]
  columns = ("kind", "axes", "dtype", "each>", "times>", "all>", "overlaps", "parameter", "source")
  return _table(columns, rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  numeric = [column.endswith(">") for column in columns]

  def line(cells: Sequence[str], tag: str) -> str:
    made = (
      f"<{tag}{' class=n' if right else ''}>{html.escape(cell)}</{tag}>"
      for cell, right in zip(cells, numeric, strict=True)
    )
    return f"<tr>{''.join(made)}</tr>"

  head = line([column.rstrip(">") for column in columns], "th")
  return f"<div class=scroll><table>{head}{''.join(line(row, 'td') for row in rows)}</table></div>"


def _section(title: str, content: str) -> str:
  return f"<section><h2>{html.escape(title)}</h2>{content}</section>" if content else ""


def _embedded(text: str) -> str:
  # A string that holds "</script>" would end the element early.
  return json.dumps(json.loads(text)).replace("</", "<\\/")


def _page(title: str, body: Sequence[str]) -> str:
  missing = "" if can_draw() else f"<p>This page has no pictures. For them: {html.escape(INSTALL)}</p>"
  return (
    "<!doctype html><html lang=en><head><meta charset=utf-8>"
    "<meta name=viewport content='width=device-width'>"
    f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}{missing}</body></html>"
  )
