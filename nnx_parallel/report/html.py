"""One self-contained HTML page per report or plan; nothing is loaded from anywhere."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nnx_parallel.core.figures import INSTALL, can_draw, svg_text
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.text import format_array, format_bytes, format_spec
from nnx_parallel.layout.plan import Plan
from nnx_parallel.layout.show.text import grouped
from nnx_parallel.report.estimate.roofline import compiled_time
from nnx_parallel.report.figures import (
  devices_figure,
  memory_figure,
  report_figure,
  search_figure,
  time_figure,
  treemap,
)
from nnx_parallel.report.tables import (
  faults_table,
  head,
  memory_text,
  not_counted,
  peak_table,
  render,
  reshards_table,
  sent_tables,
  whole_table,
)

if TYPE_CHECKING:
  from matplotlib.figure import Figure

  from nnx_parallel.report.compile_report import CompileReport
  from nnx_parallel.report.estimate.memory import MemoryPlan
  from nnx_parallel.report.estimate.roofline import StepTime
  from nnx_parallel.report.search.search import SearchResult

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
  title, verdict, *facts = map(html.escape, head(report))
  state = {True: "fits", False: "short", None: "unknown"}[report.fits]
  time = compiled_time(report)
  sums, collectives = sent_tables(report, most=40)
  sent = "<p>Nothing is sent.</p>"
  if report.collectives:
    sent = _drawn(lambda: report_figure(report, "collectives"), render(*sums))
  body = [
    f"<h1>{title}</h1>",
    f"<p class='verdict {state}'>{verdict}</p><p>{' '.join(facts)}</p>",
    _table(*faults_table(report)),
    _section("Memory per device", _drawn(lambda: report_figure(report, "memory"), memory_text(report))),
    _table(*whole_table(report, most=12)),
    _table(*reshards_table(report)),
    _table(*peak_table(report, most=12)),
    _section("Arguments by size, per device", _drawn(lambda: report_figure(report, "treemap"))),
    _section("Predicted step", _time(time) if time else "<p>No published figures for this device.</p>"),
    _section("Sent per step, by kind and axis", sent),
    _table(*collectives),
    _section("Devices", _drawn(lambda: report_figure(report, "devices"))),
    f"<script type='application/json' id='report'>{_embedded(report.to_json())}</script>",
  ]
  return _page(f"{report.target}: compile report", body)


def plan_page(
  plan: Plan,
  memory: MemoryPlan | None = None,
  time: StepTime | None = None,
  *,
  title: str = "Plan",
) -> str:
  """The page of a plan: its bytes by path, its devices, its largest leaves.

  Args:
    plan: on any mesh.
    memory: adds the planned memory by category, and with a chip whether it fits.
    time: adds the predicted step, with how long each axis of the mesh sends.
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
  body += [f"<p>note: {html.escape(note)}</p>" for note in plan.notes]
  if memory is not None:
    head, (state, sentence) = _planned_verdict(head, memory)
    body.insert(1, f"<p class='verdict {state}'>{html.escape(sentence)}</p>")
    drawn = _drawn(lambda: memory_figure(memory.categories, memory.chip), str(memory))
    body.append(_section("Planned memory per device", drawn))
  if time is not None:
    body.append(_section("Predicted step", _time(time)))
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
    _table("Largest leaves", columns, rows),
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


def _drawn(draw: Callable[[], Figure], text: str = "") -> str:
  """A picture for a page; a text, if there is one, where matplotlib is not installed."""
  return svg_text(draw()) if can_draw() else text and f"<pre>{html.escape(text)}</pre>"


def _time(time: StepTime) -> str:
  note = f"Shares of the step's time by the roofline model; it is bound by {time.binds}. "
  note = f"<p>{html.escape(note + not_counted(time.uncounted))}</p>"
  return note + _drawn(lambda: time_figure(time), str(time))


def search_page(result: SearchResult) -> str:
  """The page of a search: every candidate by memory and time, the front as a table, the winner's code."""
  from nnx_parallel.report.search.search import (
    FRONT_COLUMNS,
    OTHER_COLUMNS,
    OTHERS,
    PARETO,
    front_rows,
    other_rows,
  )

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
    _table(PARETO, FRONT_COLUMNS, front_rows(result)),
    _table(OTHERS, OTHER_COLUMNS, other_rows(result)),
    _table("Left out", ("meshes>", "why"), refused),
    _section("Predicted step of the winner", _time(best.time)),
    _section("The winner", f"<pre>{html.escape(result.code())}</pre>"),
    f"<script type='application/json' id='search'>{_embedded(result.to_json())}</script>",
  ]
  return _page(f"{result.machine.text}: search", body)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A section with a table; nothing where the table has no row."""
  numeric = [column.endswith(">") for column in columns]

  def line(cells: Sequence[str], tag: str) -> str:
    made = (
      f"<{tag}{' class=n' if right else ''}>{html.escape(cell)}</{tag}>"
      for cell, right in zip(cells, numeric, strict=True)
    )
    return f"<tr>{''.join(made)}</tr>"

  head = line([column.rstrip(">") for column in columns], "th")
  lines = "".join(line(row, "td") for row in rows)
  return _section(title, f"<div class=scroll><table>{head}{lines}</table></div>" if rows else "")


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
