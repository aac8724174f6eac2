"""A search result as text, and its winner as code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nnx_parallel.report.tables import render
from nnx_parallel.report.units import format_bytes, format_seconds

if TYPE_CHECKING:
  from nnx_parallel.report.search import Candidate, SearchResult

_COLUMNS = ("mesh", "parts>", "remat", "ZeRO>", "besides", "memory>", "step>", "MFU>", "bound by")
_HOW = 5  # columns that say how a candidate runs


def search_text(result: SearchResult) -> str:
  """Counts, the Pareto front, why the others lost, and the code of the winner."""
  target = result.machine
  tried = len(result.fitting) + len(result.too_large)
  lines = [
    f"{tried} layouts for {target.devices} x {target.chip.name} "
    f"({format_bytes(target.chip.usable_bytes)} usable each): {len(result.fitting)} fit."
  ]
  lines += [f"  left out, {count} meshes: {why}" for why, count in _largest(result.refused)]
  lines += [f"  {note}" for note in result.notes]
  if result.best is None:
    smallest = [_row(c) for c in result.too_large[:3]]
    return "\n".join([*lines, render("Nothing fits. The smallest", _COLUMNS, smallest)])
  front = [_row(c) for c in result.pareto()[:10]]
  lines += ["", render("Fastest for their memory (Pareto front)", _COLUMNS, front)]
  others = [
    (*_row(c)[:_HOW], _why(c, result.best, target.chip.usable_bytes)) for c in _other_meshes(result)[:8]
  ]
  if others:
    lines.append(render("Other meshes, at their best", (*_COLUMNS[:_HOW], "why not"), others))
  compiled = [c for c in result.fitting if c.report is not None and c.compiled is not None]
  if compiled:
    rows = [(*_row(c)[:_HOW], *_compiled(c)) for c in compiled]
    lines.append(render("Compiled", (*_COLUMNS[:_HOW], "compiler needs>", "fits", "step>"), rows))
  lines += ["The winner:", "", *("  " + line for line in result.code().splitlines())]
  return "\n".join(lines) + "\n"


def winner_code(best: Candidate, *, scoped: bool) -> str:
  """A candidate as code to paste, for `init`, `loss`, `rules` and `optimizer`.

  Args:
    best: the candidate.
    scoped: whether the loss names dims of activations.
  """
  options = f", zero={best.zero}" if best.zero else ""
  options += ', optimizer_memory="pinned_host"' if best.offload else ""
  name = "scoped" if scoped else "loss"
  loss = name if best.remat == "as written" else f'nxp.with_remat({name}, "{best.remat}")'
  gradients = ', gradients="scattered"' if best.zero == 2 else ""
  lines: list[str] = []
  if best.changes:
    changes = ", ".join(f"{key}={_axes(axes)}" for key, axes in best.changes.items())
    lines.append(f"rules = nxp.RuleSet.of(rules).replace({changes})")
  lines += [
    f"mesh = nxp.make_mesh({best.mesh_text})",
    f"plan = nxp.plan(init, mesh, rules, optimizer=optimizer{options})",
    "model, state = nxp.create_sharded_model(plan)",
  ]
  if scoped:
    lines += ["", "def scoped(model, batch):", "  with plan.scope():", "    return loss(model, batch)", ""]
  lines.append(f"step = nxp.train_step({loss}, microbatches={best.microbatches}{gradients})")
  return "\n".join(lines) + "\n"


def _axes(axes: tuple[str, ...]) -> str:
  return f'"{axes[0]}"' if len(axes) == 1 else "(" + ", ".join(f'"{axis}"' for axis in axes) + ")"


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
  if candidate.report is not None and not candidate.report.fits:
    return f"the compiler needs {format_bytes(candidate.report.need_bytes)}"
  if candidate.memory_bytes > usable:
    return f"does not fit: {format_bytes(candidate.memory_bytes)}"
  return f"{ratio:.2f} times slower, bound by {candidate.time.binds}"


def _compiled(candidate: Candidate) -> tuple[str, ...]:
  report, time = candidate.report, candidate.compiled
  if report is None or time is None:
    return ("", "", "")
  return format_bytes(report.need_bytes), "yes" if report.fits else "no", format_seconds(time.seconds)


def _besides(candidate: Candidate) -> str:
  """What is not a number: offload, and names that are split differently."""
  words = ["offload"] if candidate.offload else []
  words += [f"{name}={'+'.join(axes)}" for name, axes in candidate.changes.items() if name != "batch"]
  return ", ".join(words)


def _row(candidate: Candidate) -> tuple[str, ...]:
  return (
    candidate.mesh_text,
    str(candidate.microbatches),
    candidate.remat,
    str(candidate.zero),
    _besides(candidate),
    format_bytes(candidate.memory_bytes),
    format_seconds(candidate.time.seconds),
    f"{100 * candidate.time.mfu:.0f} %",
    candidate.time.binds,
  )
