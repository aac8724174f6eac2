"""A search result as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nnx_parallel.report.tables import render
from nnx_parallel.report.units import format_bytes, format_seconds

if TYPE_CHECKING:
  from nnx_parallel.report.search import Candidate, SearchResult

_COLUMNS = ("mesh", "microbatches>", "remat", "ZeRO>", "memory>", "step>", "MFU>", "bound by")


def search_text(result: SearchResult) -> str:
  """Counts, the Pareto front, why the others lost, and the code of the winner."""
  target = result.machine
  tried = len(result.fitting) + len(result.too_large)
  lines = [
    f"{tried} layouts for {target.devices} x {target.chip.name} "
    f"({format_bytes(target.chip.usable_bytes)} usable each): {len(result.fitting)} fit."
  ]
  lines += [f"  left out, {count} meshes: {why}" for why, count in _largest(result.refused)]
  if result.best is None:
    smallest = [_row(c) for c in result.too_large[:3]]
    return "\n".join([*lines, render("Nothing fits. The smallest", _COLUMNS, smallest)])
  front = [_row(c) for c in result.pareto()[:10]]
  lines += ["", render("Fastest for their memory (Pareto front)", _COLUMNS, front)]
  others = [(*_row(c)[:4], _why(c, result.best)) for c in _other_meshes(result)[:8]]
  if others:
    lines.append(render("Other meshes, at their best", (*_COLUMNS[:4], "why not"), others))
  lines += ["The winner:", "", *("  " + line for line in result.code().splitlines())]
  return "\n".join(lines) + "\n"


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


def _why(candidate: Candidate, best: Candidate) -> str:
  ratio = candidate.time.seconds / best.time.seconds
  if candidate.report is not None and not candidate.report.fits:
    return f"the compiler needs {format_bytes(candidate.report.need_bytes)}"
  if ratio < 1:
    return f"does not fit: {format_bytes(candidate.memory_bytes)}"
  return f"{ratio:.2f} times slower, bound by {candidate.time.binds}"


def _row(candidate: Candidate) -> tuple[str, ...]:
  return (
    candidate.mesh_text,
    str(candidate.microbatches),
    candidate.remat,
    str(candidate.zero),
    format_bytes(candidate.memory_bytes),
    format_seconds(candidate.time.seconds),
    f"{100 * candidate.time.mfu:.0f} %",
    candidate.time.binds,
  )
