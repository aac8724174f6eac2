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
  """One benchmark's result, written as `<name>.json`.

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
    order = {group: place for place, group in enumerate(groups)}
    self.rows += [row for row in self.written() if row["group"] in order.keys() - {*chosen}]
    for group in chosen:
      groups[group]()
      self.rows.sort(key=lambda row: order[row["group"]])
      self.write()

  def keep_other_groups(self) -> None:
    """Adds the rows last written of groups that this run does not have."""
    groups = {row["group"] for row in self.rows}
    self.rows += [row for row in self.written() if row["group"] not in groups]

  def written(self) -> list[dict[str, Any]]:
    """The rows last written; `measured` says when each was, since the record has the date of the new rows."""
    path = RESULTS / f"{self.name}.json"
    last = json.loads(path.read_text()) if path.exists() else {"rows": []}
    return [{"measured": last["environment"]["date"], **row} for row in last["rows"]]

  def write(self, directory: Path = RESULTS) -> Path:
    """Writes the file, whose path it returns, and prints its rows."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {
      "title": self.title,
      "command": self.command,
      "environment": environment(),
      "notes": self.notes,
      "rows": self.rows,
    }
    path = directory / f"{self.name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    cells = [
      (row["group"], row["case"], (figure_text if "value" in row else ratio_text)(row)) for row in self.rows
    ]
    print(table(("group", "case", "figure"), cells))
    return path


def figure_text(row: Mapping[str, Any]) -> str:
  return f"{three(row['value'])} {row['unit']}".rstrip()


def three(value: float) -> str:
  """Three significant digits, and all those before the point."""
  return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def ratio_text(row: Mapping[str, Any]) -> str:
  if row["case"] == row["baseline"]:
    return _duration(row["median_seconds"])
  low, high = row["ratio_quartiles"]
  return f"{row['ratio']:.3g} ({low:.3g} to {high:.3g})"


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
