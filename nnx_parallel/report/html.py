"""One self-contained HTML page per report or plan; nothing is loaded from anywhere."""

from __future__ import annotations

import html
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from nnx_parallel.errors import ReportError
from nnx_parallel.layout.mesh import axis_sizes
from nnx_parallel.layout.plan import ShardingPlan
from nnx_parallel.layout.render import format_array, format_spec, grouped
from nnx_parallel.report import svg
from nnx_parallel.report.roofline import compiled_time
from nnx_parallel.report.tables import FAULT_COLUMNS, fault_rows, not_counted, results_note, verdict
from nnx_parallel.report.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
  from nnx_parallel.report.chips import Chip
  from nnx_parallel.report.compile_report import CompileReport
  from nnx_parallel.report.memory import MemoryPlan
  from nnx_parallel.report.roofline import StepTime
  from nnx_parallel.report.search import SearchResult

Picture = Literal["memory", "treemap", "devices", "collectives", "timeline"]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 940px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin: 2em 0 .4em; }
svg { max-width: 100%; height: auto; }
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
  body = [
    f"<h1>One step on {html.escape(report.target)}, mesh {html.escape(mesh)}</h1>",
    f"<p class='verdict {state}'>{html.escape(verdict(report))}</p><p>{facts}</p>",
    _section("Memory per device", memory_svg(report)),
    *([_section("In memory at the peak, besides the arguments", _peak_table(report))] if report.peak else []),
    _section("Arguments by size, per device", treemap_svg(report)),
    _section("Predicted step", timeline_svg(report)),
    _section("Sent per step, by kind and axis", collectives_svg(report) + _collective_table(report)),
    _section("Devices", devices_svg(report.axes)),
    f"<script type='application/json' id='report'>{_embedded(report.to_json())}</script>",
  ]
  if report.reshards:
    rows = [(r.source or r.op, r.shape, format_bytes(r.bytes), r.before, r.after) for r in report.reshards]
    table = _table(("where", "tensor", "bytes>", "from", "to"), rows)
    body.insert(3, _section("Made whole on each device against the layout", table))
  if report.faults:
    body.insert(2, _section("Wrong numbers", _table(FAULT_COLUMNS, fault_rows(report))))
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
  items = [svg.Item(x.name, x.bytes_per_device, format_bytes(x.bytes_per_device), x.root) for x in leaves]
  mesh = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
  head = f"{title} on {mesh} = {math.prod(sizes.values())} devices"
  held = format_bytes(plan.bytes_per_device())
  body = [f"<h1>{html.escape(head)}</h1>", f"<p>{len(leaves)} arrays, {held} per device.</p>"]
  if memory is not None:
    head, state = _planned_verdict(head, memory)
    body.insert(1, f"<p class='verdict {state[0]}'>{html.escape(state[1])}</p>")
    body.append(_section("Planned memory per device", _memory_bar(memory.categories, memory.chip)))
  if time is not None:
    body.append(_section("Predicted step", step_svg(time)))
    body.append(_section("Predicted sending, by axis", _links_svg(time)))
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
  body += [
    _section("State by size, per device", svg.treemap(items[:400])),
    _section("Devices", devices_svg(sizes)),
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


def report_svg(report: CompileReport, picture: Picture) -> str:
  """One picture of a report as an SVG document.

  Args:
    report: of a compiled step.
    picture: `"memory"`, `"treemap"`, `"devices"`, `"collectives"` or `"timeline"`.

  Returns:
    The text of the document.

  Raises:
    ReportError: there is no such picture, or nothing to draw: no collective, or no figures of the chip.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax.sharding import NamedSharding
    >>> from jax.sharding import PartitionSpec as P
    >>> from nnx_parallel.report.compile_report import compile_report
    >>> x = jax.device_put(jnp.ones(8), NamedSharding(jax.make_mesh((8,), ("data",)), P("data")))
    >>> report_svg(compile_report(jax.jit(lambda x: x * 2).lower(x)), "devices")[:4]
    '<svg'
  """
  makers = {
    "memory": memory_svg,
    "treemap": treemap_svg,
    "devices": lambda r: devices_svg(r.axes),
    "collectives": collectives_svg,
    "timeline": timeline_svg,
  }
  if picture not in makers:
    raise ReportError(f"no picture {picture!r}.", fix=f"one of {', '.join(makers)}.")
  text = makers[picture](report)
  start, end = text.find("<svg"), text.rfind("</svg>")
  if start < 0:
    raise ReportError(
      f"there is nothing to draw in {picture!r}.",
      details=re.sub("<[^>]*>", "", text),
      fix=f"another picture: one of {', '.join(makers)}; a timeline needs compile_report(..., chip=...).",
    )
  return text[start : end + len("</svg>")]


def notebook_frame(page: str) -> str:
  """The page as a frame inside a notebook, so that its style stays its own."""
  return (
    f"<iframe srcdoc='{html.escape(page, quote=True)}' width='100%' height='700' "
    "style='border:0' sandbox></iframe>"
  )


def memory_svg(report: CompileReport) -> str:
  """Memory by category against what the device has."""
  return _memory_bar(report.categories, report.chip)


def _memory_bar(categories: Mapping[str, int], chip: Chip | None) -> str:
  usable = chip.usable_bytes if chip is not None else 0
  limit = svg.Item("usable", usable, format_bytes(usable)) if usable else None
  items = [svg.Item(name, size, format_bytes(size)) for name, size in categories.items()]
  if limit and limit.value > 20 * sum(i.value for i in items):
    limit = None  # a limit far away would squeeze the parts into a line
  return svg.stacked_bar(items, limit)


def treemap_svg(report: CompileReport) -> str:
  """Arguments by bytes per device."""
  items = [
    svg.Item(a.name, a.bytes, format_bytes(a.bytes), a.name.partition("/")[0] if "/" in a.name else "model")
    for a in report.arguments[:400]
  ]
  return svg.treemap(items)


def collectives_svg(report: CompileReport) -> str:
  """Payload per step by kind and axis."""
  items = [
    svg.Item(f"{kind} over {axes}", size, format_bytes(size), kind)
    for (kind, axes), size in report.bytes_by("kind", "axes").items()
  ]
  return svg.bars(items[:20]) if items else "<p>Nothing is sent.</p>"


def devices_svg(axes: Mapping[str, int]) -> str:
  """The mesh as a grid."""
  wide = [(name, size) for name, size in axes.items() if size > 1] or list(axes.items())
  return svg.device_grid(wide)


def timeline_svg(report: CompileReport) -> str:
  """Where the time of a step goes, by the roofline model; an empty note where the chip is unknown."""
  time = compiled_time(report)
  if time is None:
    return "<p>No published figures for this device.</p>"
  return step_svg(time)


def step_svg(time: StepTime) -> str:
  """The terms of a step time on one scale: those that overlap start together, waits follow."""
  rows: list[tuple[str, Sequence[tuple[float, float, str]]]] = [
    (name, [(0.0, seconds, format_seconds(seconds))]) for name, seconds in time.terms().items()
  ]
  at = max(time.terms().values())
  for name, seconds in time.waiting.items():
    rows.append((f"{name} (waiting)", [(at, seconds, format_seconds(seconds))]))
    at += seconds
  if time.exposed:
    rows.append(("sending not hidden", [(at, time.exposed, format_seconds(time.exposed))]))
  note = f"<p>{format_seconds(time.seconds)} by the roofline model, bound by {html.escape(time.binds)}. "
  note += f"{html.escape(not_counted(time.uncounted))}</p>"
  return note + svg.timeline(rows, time.seconds, format_seconds(time.seconds))


def _links_svg(time: StepTime) -> str:
  """Seconds of sending by mesh axis, those that compute waits for apart."""
  rows = [("beside compute", time.overlapped), ("waited for", time.waiting)]
  items = [
    svg.Item(f"{axis} ({how})", seconds, format_seconds(seconds), how)
    for how, axes in rows
    for axis, seconds in axes.items()
  ]
  items.sort(key=lambda item: -item.value)
  return svg.bars(items) if items else "<p>Nothing is sent.</p>"


def search_page(result: SearchResult) -> str:
  """The page of a search: every candidate by memory and time, the front as a table, the winner's code."""
  from nnx_parallel.report.search_text import FRONT_COLUMNS, OTHER_COLUMNS, front_rows, other_rows

  tried = len(result.fitting) + len(result.too_large)
  refused = [(str(count), why) for why, count in result.refused.items()]
  body = [
    f"<h1>{tried} layouts for {html.escape(result.machine.text)}: {len(result.fitting)} fit</h1>",
    *(f"<p>{html.escape(note)}</p>" for note in result.notes),
  ]
  if result.best is None:
    return _page("Search", [*body, "<p class='verdict short'>No layout is proposed.</p>"])
  front = result.pareto()
  known = {id(candidate) for candidate in front}
  usable = result.machine.chip.usable_bytes
  # Much slower ones would squeeze the others into a line.
  shown = [c for c in result.fitting[:1500] if c.time.seconds <= 4 * front[0].time.seconds]
  shown += [c for c in front if c.time.seconds <= 4 * front[0].time.seconds and c not in shown]
  points = [
    (
      svg.Item(
        f"{c.mesh_text}, {c.microbatches} parts, {c.remat}",
        c.memory_bytes,
        f"{format_bytes(c.memory_bytes)}, {format_seconds(c.time.seconds)}",
        "front" if id(c) in known else "",
      ),
      c.time.seconds,
    )
    for c in shown
  ]
  limit = svg.Item("usable", usable, format_bytes(usable))
  body += [
    _section(
      "Memory against time, up to four times the best",
      svg.scatter(points, ("memory per device", "step time"), limit, (format_bytes, format_seconds)),
    ),
    _section("Fastest for their memory", _table(FRONT_COLUMNS, front_rows(result))),
    _section("Other meshes, at their best", _table(OTHER_COLUMNS, other_rows(result))),
    *([_section("Left out", _table(("meshes>", "why"), refused))] if refused else []),
    _section("Predicted step of the winner", step_svg(result.best.time)),
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
  return f"<section><h2>{html.escape(title)}</h2>{content}</section>"


def _embedded(text: str) -> str:
  # A string that holds "</script>" would end the element early.
  return json.dumps(json.loads(text)).replace("</", "<\\/")


def _page(title: str, body: Sequence[str]) -> str:
  return (
    "<!doctype html><html lang=en><head><meta charset=utf-8>"
    "<meta name=viewport content='width=device-width'>"
    f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"
  )
