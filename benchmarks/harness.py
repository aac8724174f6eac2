"""Measures ratios against a baseline in the same run, and records them with what they depend on.

Absolute times of a shared machine mean little; the ratio of two things that took turns within one
process means something. So every case runs once per round, in an order that changes, and the ratio
is the median over rounds of case / baseline.

  from benchmarks.harness import Record, measure

  record = Record("step", "Host time of one train step", command="python -m benchmarks.step")
  record.compare(measure({"jax.jit": plain_step, "nxp.train_step": our_step}), baseline="jax.jit")
  record.value("temporaries per device", 19.2, "MiB")
  record.write()
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Those that are installed; libtpu is the TPU compiler.
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy", "maxtext")


@dataclass(frozen=True)
class Timing:
  """How long one case took in each round.

  Attributes:
    name: the case.
    seconds: one entry per round, for one call.
  """

  name: str
  seconds: tuple[float, ...]

  @property
  def median(self) -> float:
    """In seconds."""
    return statistics.median(self.seconds)

  def ratio(self, baseline: Timing) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of this / baseline, round by round."""
    ratios = [a / b for a, b in zip(self.seconds, baseline.seconds, strict=True)]
    if len(ratios) == 1:
      return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high


def measure(
  cases: Mapping[str, Callable[[], Any]],
  *,
  rounds: int = 30,
  warmup: int = 3,
  calls: int = 1,
  wait: bool = True,
  settle: int = 0,
  clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
  """Times several functions in turns.

  Args:
    cases: name -> a function without arguments; what it returns is waited for.
    rounds: how often each case is timed.
    warmup: untimed calls of each case before the first round, which take the compilation.
    calls: calls per timing, for cases too short for the clock; the time is divided by it.
    wait: whether to wait for the result's arrays; `False` measures only the host's part.
    settle: untimed calls before each timing, for cases of microseconds, which start slow in cold caches.
    clock: in seconds; `time.thread_time` or `time.process_time` do not see what else the machine runs.

  Returns:
    A timing for each case, in the order given; round `i` of all cases ran next to each other.
  """
  for case in cases.values():
    for _ in range(warmup):
      jax.block_until_ready(case())
  seconds: dict[str, list[float]] = {name: [] for name in cases}
  order = list(cases)
  shuffle = random.Random(0).shuffle
  gc.collect()
  gc.freeze()  # what lives by now need not be looked at in each round
  for _ in range(rounds):
    shuffle(order)
    gc.collect()  # else the garbage of one case is collected on the next one's time
    for name in order:
      for _ in range(settle):
        jax.block_until_ready(cases[name]())
      seconds[name].append(_time(cases[name], calls, wait, clock))
  gc.unfreeze()
  return {name: Timing(name, tuple(seconds[name])) for name in cases}


def _time(case: Callable[[], Any], calls: int, wait: bool, clock: Callable[[], float]) -> float:
  result = None
  began = clock()
  for _ in range(calls):
    result = case()
  if wait:
    jax.block_until_ready(result)
  elapsed = clock() - began
  jax.block_until_ready(result)
  return elapsed / calls


def environment() -> dict[str, Any]:
  """The hardware, date and versions that a result depends on."""
  devices = jax.devices()
  installed = {found.name: found.version for found in importlib.metadata.distributions()}
  return {
    "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    "commit": _commit(),
    "cpu": _cpu_name(),
    "cores": len(os.sched_getaffinity(0)),
    "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
    "python": platform.python_version(),
    **{name: installed[name] for name in PACKAGES if name in installed},
  }


def _commit() -> str:
  """The commit measured, marked where the working tree differs from it in more than records."""
  changed = ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"]
  try:
    commit, changes = (
      subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
      for words in (["rev-parse", "--short", "HEAD"], changed)
    )
  except FileNotFoundError:
    return "unknown"
  return f"{commit}-dirty" if changes else commit or "unknown"


def _cpu_name() -> str:
  info = Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
  return names[0] if names else platform.processor() or platform.machine()


@dataclass
class Record:
  """One benchmark's result, written as `<name>.json` and `<name>.md`.

  Attributes:
    name: the file name, for example `"step"`.
    title: one line: what was measured.
    command: what to type to measure it again.
    notes: sentences that a reader needs to judge the numbers.
    rows: one for each case or value, added by `compare` and `value`.
  """

  name: str
  title: str
  command: str
  notes: list[str] = field(default_factory=list)
  rows: list[dict[str, Any]] = field(default_factory=list)

  def compare(self, timings: Mapping[str, Timing], *, baseline: str, group: str = "") -> None:
    """Adds one row for each timing, as a ratio to the baseline of the same run.

    Args:
      timings: what `measure` returned.
      baseline: the name of the case that the others are divided by.
      group: tells the rows of several comparisons apart, for example `"100 Variables"`.
    """
    for timing in timings.values():
      low, middle, high = timing.ratio(timings[baseline])
      self.rows.append(
        {
          "group": group,
          "case": timing.name,
          "ratio": middle,
          "ratio_quartiles": [low, high],
          "median_seconds": timing.median,
          "rounds": len(timing.seconds),
          "baseline": baseline,
        }
      )

  def value(self, case: str, value: float, unit: str, *, group: str = "") -> None:
    """Adds one measured number that is not a time, for example bytes or a loss difference."""
    self.rows.append({"group": group, "case": case, "value": value, "unit": unit})

  def make(self, groups: Mapping[str, Callable[[], object]], chosen: Collection[str]) -> None:
    """Adds the rows of the chosen groups, each by its function; the other groups keep the rows last written.

    The record is written after each group, in the order of `groups`.
    """
    if not chosen:
      print("no case has this part in its name, or its compiler is not installed: no record is written")
    path, order = RESULTS / f"{self.name}.json", {group: place for place, group in enumerate(groups)}
    written = json.loads(path.read_text())["rows"] if path.exists() else []
    self.rows += [row for row in written if row["group"] in order.keys() - {*chosen}]
    for group in chosen:
      groups[group]()
      self.rows.sort(key=lambda row: order[row["group"]])
      self.write()

  def write(self, directory: Path = RESULTS) -> Path:
    """Writes both files and prints the table; returns the path of the markdown."""
    directory.mkdir(parents=True, exist_ok=True)
    where = environment()
    content = {
      "title": self.title,
      "command": self.command,
      "environment": where,
      "notes": self.notes,
      "rows": self.rows,
    }
    (directory / f"{self.name}.json").write_text(json.dumps(content, indent=2) + "\n")
    page = directory / f"{self.name}.md"
    page.write_text(self.markdown(where))
    print(page.read_text())
    return page

  def markdown(self, where: Mapping[str, Any]) -> str:
    """The record as a page: tables, notes, and where it was measured."""
    timed = [row for row in self.rows if "ratio" in row]
    valued = [row for row in self.rows if "value" in row]
    parts = [f"# {self.title}", f"`{self.command}`"]
    if compared := pivoted(timed, ratio_text):
      parts += ["Ratios to the case that shows a time, and their quartiles:", *compared]
    elif timed:
      header = ("group", "case", "ratio", "quartiles", "median", "rounds", "baseline")
      parts.append(table(header, [_timed_cells(row) for row in timed]))
    if tables := pivoted(valued, figure_text):
      parts += tables
    elif valued:
      parts.append(
        table(("group", "case", "value"), [(r["group"], r["case"], figure_text(r)) for r in valued])
      )
    parts += self.notes
    parts.append(", ".join(f"{name} {value}" for name, value in where.items()))
    return "\n\n".join(parts) + "\n"


COLUMNS = 14
"""The most figures in a row of a table."""


def pivoted(rows: Sequence[Mapping[str, Any]], cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
  """Tables with a row for each case and a column for each figure; none where each case has its own figures.

  A figure is the part of a case after ": ", where all cases have one, else the case within its group. Cases
  with figures that no table has start a new one.
  """
  last = {row["case"].rsplit(": ", 1)[-1] for row in rows}
  split = all(": " in row["case"] for row in rows) and len(last) <= COLUMNS
  cases: dict[tuple[str, ...], dict[str, str]] = {}
  for row in rows:
    *name, figure = row["case"].rsplit(": ", 1) if split else [row["case"]]
    cases.setdefault((row["group"], *name), {})[figure] = cell(row)
  tables: list[list[tuple[str, ...]]] = []
  for key, figures in cases.items():
    for keys in reversed(tables):
      shown = {figure for other in keys for figure in cases[other]}
      if shown & figures.keys() and len(shown | figures.keys()) <= COLUMNS:
        keys.append(key)
        break
    else:
      tables.append([key])
  if 2 * len(tables) > len(cases):
    return []
  return [_pivot({key: cases[key] for key in keys}) for keys in tables]


def figure_text(row: Mapping[str, Any]) -> str:
  return f"{row['value']:.6g} {row['unit']}".rstrip()


def ratio_text(row: Mapping[str, Any]) -> str:
  if row["case"] == row["baseline"]:
    return _duration(row["median_seconds"])
  low, high = row["ratio_quartiles"]
  return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def _pivot(cases: Mapping[tuple[str, ...], Mapping[str, str]]) -> str:
  figures = list(dict.fromkeys(figure for found in cases.values() for figure in found))
  names = ("group", "case")[: max(map(len, cases))]
  rows = [(*key, *(found.get(figure, "") for figure in figures)) for key, found in cases.items()]
  return table((*names, *figures), rows)


def _timed_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
  low, high = row["ratio_quartiles"]
  return (
    row["group"],
    row["case"],
    f"{row['ratio']:.2f}",
    f"{low:.2f} to {high:.2f}",
    _duration(row["median_seconds"]),
    str(row["rounds"]),
    row["baseline"],
  )


def _duration(seconds: float) -> str:
  for factor, unit in ((1, "s"), (1e3, "ms")):
    if seconds * factor >= 1:
      return f"{seconds * factor:.3g} {unit}"
  return f"{seconds * 1e6:.3g} us"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A markdown table; a group column that is empty throughout is left out."""
  keep = [i for i, name in enumerate(header) if name != "group" or any(row[i] for row in rows)]
  lines = [[row[i] for i in keep] for row in (header, ["---"] * len(header), *rows)]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)
