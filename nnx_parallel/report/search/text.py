"""A search result as text, and its winner as code."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from nnx_parallel.core.text import format_bytes
from nnx_parallel.layers.layers import Remat, RematName
from nnx_parallel.report.estimate.memory import BAND_TEXT, CASES
from nnx_parallel.report.search.space import mesh_text
from nnx_parallel.report.tables import render, results_text, usable_note

if TYPE_CHECKING:
  from nnx_parallel.report.search.search import Candidate, SearchResult

FRONT_COLUMNS = (
  "mesh", "microbatches>", "remat", "ZeRO>", "options", "memory>", "fits", "time>", "bound by",
)  # fmt: skip
_HOW = 5  # columns that say how a candidate runs
PARETO = "Pareto front of memory and time; times are relative to the fastest"
OTHERS = "Best candidate of each other mesh"
OTHER_COLUMNS = (*FRONT_COLUMNS[:_HOW], "why not")


def search_text(result: SearchResult) -> str:
  """Counts, the Pareto front, why the others lost, and the code of the winner."""
  target = result.machine
  sure = sum(candidate.fits == "likely" for candidate in result.fitting)
  tried = len(result.fitting) + len(result.too_large)
  lines = [
    f"{tried} layouts for {target.devices} x {target.chip.name}, "
    f"{format_bytes(target.chip.usable_bytes)} usable each{usable_note(target.chip)}: "
    f"{len(result.fitting)} fit by the memory plan, {sure} of them likely."
  ]
  if sure < len(result.fitting) or result.best is None:
    lines.append(f"  In {CASES} test cases {BAND_TEXT}.")
  lines += [f"  left out, {count} meshes: {why}" for why, count in _largest(result.refused)]
  lines += [f"  {note}" for note in result.notes]
  compiled = [c for c in result.fitting if c.report is not None and c.compiled is not None]
  quickest = min((c.compiled.seconds for c in compiled if c.compiled is not None), default=1.0)
  fastest = _fastest(result)
  rows = [(*_row(c, fastest)[:_HOW], *_compiled(c, quickest)) for c in compiled]
  table = render("Compiled", (*FRONT_COLUMNS[:_HOW], "compiler needs>", "fits", "results", "time>"), rows)
  if result.best is None:
    smallest = [_row(c, fastest) for c in result.too_large[:3]]
    nothing = render("Nothing fits. The smallest", FRONT_COLUMNS, smallest)
    return "\n".join([*lines, table if rows else nothing])
  front = front_rows(result)[:10]
  lines += ["", render(PARETO, FRONT_COLUMNS, front)]
  others = other_rows(result)[:8]
  if others:
    lines.append(render(OTHERS, OTHER_COLUMNS, others))
  lines += [table] if rows else []
  title = "The winner"
  if result.best.report is None and result.best.fits == "borderline":
    title += " is a borderline fit; check it with search(..., compile_best=1)"
  lines += [f"{title}:", "", *("  " + line for line in result.code().splitlines())]
  return "\n".join(lines) + "\n"


def winner_code(best: Candidate, layers: str | None = None, idle: Container[str] = ()) -> str:
  """A candidate as code to paste, for `init`, `loss`, `rules` and `optimizer`."""
  options = f", zero={best.zero}" if best.zero else ""
  options += ', optimizer_memory="pinned_host"' if best.offload else ""
  remat = "" if best.remat == "as written" else f", remat={_remat(best.remat)}"
  remat += f', layers="{layers}"' if remat and layers else ""
  lines: list[str] = []
  if best.changes:
    changes = ", ".join(f"{key}={_axes(axes)}" for key, axes in best.changes.items())
    lines.append(f"rules = nxp.RuleSet.of(rules).replace({changes})")
  lines += [
    f"mesh = nxp.make_mesh({mesh_text(best.sizes, idle)})",
    f"plan = nxp.plan(init, mesh, rules, optimizer=optimizer{options})",
    "model, state = nxp.create_sharded_model(plan)",
  ]
  piped = ""
  if best.pipeline is not None:
    axis, virtual_stages = best.pipeline.axis, best.pipeline.virtual_stages
    piped = (
      f', pipeline="{axis}"'
      if virtual_stages == 1
      else f', pipeline=nxp.Pipeline("{axis}", virtual_stages={virtual_stages})'
    )
  lines.append(f"step = nxp.train_step(loss, microbatches={best.microbatches}{remat}{piped})")
  return "\n".join(lines) + "\n"


def _remat(remat: RematName | Remat) -> str:
  return f'"{remat}"' if isinstance(remat, str) else f"nxp.{remat!r}"


def _axes(axes: tuple[str, ...]) -> str:
  return f'"{axes[0]}"' if len(axes) == 1 else "(" + ", ".join(f'"{axis}"' for axis in axes) + ")"


def front_rows(result: SearchResult) -> list[tuple[str, ...]]:
  """The Pareto front, one row of `FRONT_COLUMNS` for each candidate."""
  return [_row(candidate, _fastest(result)) for candidate in result.pareto()]


def other_rows(result: SearchResult) -> list[tuple[str, ...]]:
  """Each other mesh at its best, and why it lost: one row of `OTHER_COLUMNS` for each."""
  best, usable = result.best, result.machine.chip.usable_bytes
  if best is None:
    return []
  return [(*_row(c, 1.0)[:_HOW], _why(c, best, usable)) for c in _other_meshes(result)]


def _fastest(result: SearchResult) -> float:
  """Seconds of the fastest candidate that fits, or of all of them."""
  return min((c.time.seconds for c in result.fitting or result.too_large), default=1.0)


def _largest(refused: Mapping[str, int]) -> list[tuple[str, int]]:
  return sorted(refused.items(), key=lambda pair: -pair[1])[:5]


def _other_meshes(result: SearchResult) -> list[Candidate]:
  seen = {tuple(result.best.sizes.items())} if result.best else set()
  found: list[Candidate] = []
  for candidate in (*result.fitting, *result.too_large):
    key = tuple(candidate.sizes.items())
    if key not in seen:
      seen.add(key)
      found.append(candidate)
  return found


def _why(candidate: Candidate, best: Candidate, usable: int) -> str:
  ratio = candidate.time.seconds / best.time.seconds
  if candidate.refused:
    return candidate.refused
  if candidate.memory_bytes > usable:
    return f"does not fit: {format_bytes(candidate.memory_bytes)}"
  if candidate.report is None and candidate.fits == "borderline" and best.fits == "likely" and ratio < 0.995:
    return f"borderline fit; {1 / ratio:.2f} times faster"
  if candidate.compiled is not None and best.compiled is not None:
    slower = candidate.compiled.seconds / best.compiled.seconds
    if slower > 1:
      return f"{slower:.2f} times slower as compiled"
  if ratio > 1.01:
    return f"{ratio:.2f} times slower, bound by {candidate.time.binds}"
  more = candidate.memory_bytes - best.memory_bytes
  if more > 0:
    return f"as fast, {format_bytes(more)} more"
  if best.report is not None and candidate.report is None:
    return "as fast by the model, and was not compiled"
  if ratio > 1:
    return f"{100 * (ratio - 1):.2g} % slower"
  return "as fast and as large: a tie"


def _compiled(candidate: Candidate, quickest: float) -> tuple[str, ...]:
  report, time = candidate.report, candidate.compiled
  if report is None or time is None:
    return ("", "", "", "")
  fits = "yes" if report.fits else "no"
  return format_bytes(report.need_bytes), fits, results_text(report.results), f"{time.seconds / quickest:.2f}"


def _options(candidate: Candidate) -> str:
  """Offload, a pipeline, and the names that are split differently from the user's rules."""
  words = ["offload"] if candidate.offload else []
  if candidate.schedule is not None:
    virtual_stages = candidate.schedule.virtual_stages
    kind = "pipeline" if virtual_stages == 1 else f"pipeline of {virtual_stages} virtual stages"
    words.append(f"{kind}, bubble {100 * candidate.schedule.bubble:.0f} %")
  words += [f"{name}={'+'.join(axes)}" for name, axes in candidate.changes.items() if name != "batch"]
  return ", ".join(words)


def _row(candidate: Candidate, fastest: float) -> tuple[str, ...]:
  return (
    candidate.mesh_text,
    str(candidate.microbatches),
    str(candidate.remat),
    str(candidate.zero),
    _options(candidate),
    format_bytes(candidate.memory_bytes),
    candidate.fits,
    f"{candidate.time.seconds / fastest:.2f}",
    candidate.time.binds,
  )
