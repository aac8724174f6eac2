"""One self-contained HTML page for a report or a plan; nothing is loaded from anywhere."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Mapping, Sequence

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.text import format_array, format_bytes, format_spec
from nnx_parallel.errors import ReportError
from nnx_parallel.layout.plan import Plan, check_plan
from nnx_parallel.layout.show.text import grouped
from nnx_parallel.report.compile_report import CompileReport, page_of
from nnx_parallel.report.memory import MemoryPlan
from nnx_parallel.report.tables import (
  Table,
  arguments_table,
  head,
  peak_table,
  replicated_table,
  reshards_table,
  sent_tables,
)

# Okabe and Ito's palette: distinct with any colour vision.
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 1.5em auto; padding: 0 1em; }
h1 { font-size: 1.35em; overflow-wrap: anywhere; } h2 { font-size: 1.1em; margin: 1.8em 0 .4em; }
.verdict { padding: .6em 1em; border-left: 5px solid #7A7A7A; background: #8881; }
.fits { border-color: #009E73; } .short { border-color: #D55E00; }
pre { padding: .8em 1em; background: #8882; overflow-x: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
td, th { padding: 3px 12px 3px 0; text-align: left; border-bottom: 1px solid var(--line); }
td:not(:last-child) { white-space: nowrap; }
th { white-space: nowrap; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bar { display: flex; height: 1.6em; border-radius: 3px; overflow: hidden; background: #8883; }
.bar i { display: block; }
.key { display: flex; flex-wrap: wrap; gap: .2em 1.2em; font-size: 13px; margin-top: .4em; }
.key b { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
@media (max-width: 30em) { body { font-size: 14px; margin: .5em auto; padding: 0 .6em; } }
"""


@page_of.register
def report_page(report: CompileReport) -> str:
  """The page of a compile report."""
  title, verdict, *facts = head(report)
  sums, collectives = sent_tables(report, most=100)
  usable = report.available_bytes
  return _page(
    title,
    _verdict(verdict, report.fits),
    _notes(facts),
    _memory("Memory per device", report.categories, usable),
    _table(replicated_table(report, most=100)),
    _table(reshards_table(report)),
    _table(peak_table(report, most=40)),
    _table(arguments_table(report, most=100)),
    _table(sums) if report.collectives else "<p>Nothing is sent.</p>",
    _table(collectives),
    data=report.to_json(),
  )


@check_arguments(ReportError)
def plan_page(plan: Plan, memory: MemoryPlan | None = None, *, title: str = "Plan") -> str:
  """Returns an HTML page of a plan: its notes and its leaves, largest first.

  Args:
    plan: a plan on any mesh.
    memory: a `MemoryPlan`. The page then shows its verdict, and the planned memory by category.
    title: the heading of the page, such as the name of the model.

  Returns:
    One self-contained HTML document.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    >>> page = nxp.report.plan_page(nxp.plan(init, nxp.abstract_mesh(fsdp=8), nxp.fsdp()))
    >>> page[:15], "Plan on fsdp=8 = 8 devices" in page
    ('<!doctype html>', True)
  """
  check_plan(plan, "nxp.report.plan_page(plan)", creates=False)
  sizes = axis_sizes(plan.mesh)
  mesh = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
  planned = ""
  if memory is not None:
    short = memory.headroom_bytes is not None and memory.headroom_bytes < 0
    planned = _verdict(memory.verdict, False if short else None)
    usable = memory.chip.usable_bytes if memory.chip else None
    planned += _memory("Planned memory per device, at least", memory.at_peak, usable)
  held = f"{len(plan.leaves)} arrays, {format_bytes(plan.bytes_per_device())} per device."
  return _page(
    f"{title} on {mesh} = {math.prod(sizes.values())} devices",
    _notes([held, *(f"note: {note}" for note in plan.notes)]),
    planned,
    _table(_leaves_table(plan)),
  )


def _leaves_table(plan: Plan) -> Table:
  found = [(name, alike, sum(x.bytes_per_device for x in alike)) for name, alike in grouped(plan.leaves)]
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
  return Table("Largest leaves", ("leaves", "n>", "array", "spec", "per device>", "why"), rows)


def _memory(title: str, categories: Mapping[str, int], usable: int | None) -> str:
  """A bar of the memory in use, out of the memory that a device may use, and its legend."""
  parts = {html.escape(name): size for name, size in categories.items() if size}
  need = sum(parts.values())
  full, drawn, names = max(need, usable or 0, 1), "", ""
  for (name, size), colour in zip(parts.items(), itertools.cycle(_PALETTE)):
    drawn += f"<i style='width:{100 * size / full:.2f}%;background:{colour}' title='{name}'></i>"
    share = f"{format_bytes(size)} ({100 * size / max(need, 1):.0f} %)"
    names += f"<span><b style='background:{colour}'></b>{name} {share}</span>"
  of = f" of {format_bytes(usable)} usable" if usable else ""
  head = f"{title}: {format_bytes(need)}{of}"
  return _section(head, f"<div class=bar role=img>{drawn}</div><div class=key>{names}</div>")


def _verdict(sentence: str, fits: bool | None) -> str:
  state = {True: " fits", False: " short", None: ""}[fits]
  return f"<p class='verdict{state}'>{html.escape(sentence)}</p>"


def _notes(lines: Sequence[str]) -> str:
  return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _table(table: Table) -> str:
  """A section with a table; nothing where the table has no row."""
  if not table.rows:
    return ""
  right = [" class=n" if column.endswith(">") else "" for column in table.columns]

  def line(cells: Sequence[str], tag: str) -> str:
    made = zip(right, cells, strict=True)
    return f"<tr>{''.join(f'<{tag}{kind}>{html.escape(cell)}</{tag}>' for kind, cell in made)}</tr>"

  head = line([column.rstrip(">") for column in table.columns], "th")
  rows = "".join(line(row, "td") for row in table.rows)
  return _section(
    table.title,
    f"<div class=scroll><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"
    + (f"<p>{html.escape(table.note)}</p>" if table.note else ""),
  )


def _section(title: str, content: str) -> str:
  return f"<section><h2>{html.escape(title)}</h2>{content}</section>"


def _page(title: str, *body: str, data: str = "") -> str:
  # A string that holds "</script>" would end the element early.
  held = json.dumps(json.loads(data)).replace("</", "<\\/") if data else ""
  embedded = f"<script type='application/json' id=data>{held}</script>" if held else ""
  return (
    "<!doctype html><html lang=en><head><meta charset=utf-8>"
    "<meta name=viewport content='width=device-width, initial-scale=1'>"
    f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
    f"<h1>{html.escape(title)}</h1>{''.join(body)}{embedded}</body></html>"
  )
