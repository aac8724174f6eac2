"""Progress of a run (a bar on a terminal, plain lines in a log, one line when quiet), and its speed."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Mapping
from typing import Self

import jax
from rich import progress as bars
from rich.console import Console

from nnx_parallel.loop.metrics import Record

RATES = ("tokens_per_second", "samples_per_second")
TIMES = ("seconds", *RATES)
LONGEST_SILENCE_S = 30.0  # in a log
NARROW = 100  # columns; a narrower terminal shows no metric but the loss


class StepProgress:
  """A line that is redrawn on a terminal; in a log about ten lines for the run, and one every 30 seconds."""

  def __init__(
    self,
    steps: int | None,
    *,
    start: int = 0,
    unit: str = "tokens",
    every_update: bool = False,
    quiet: bool = False,
    console: Console | None = None,
  ):
    self._steps, self._start, self._unit, self._quiet = steps, start, unit, quiet
    self._console = console or Console(highlight=False, soft_wrap=True, quiet=jax.process_index() > 0)
    self._every = max(1, (steps - start) // 10) if steps is not None else 100
    self._every = 1 if every_update else self._every
    self._next, self._printed = start + 1, time.monotonic()
    self._bar = self._make_bar() if self._console.is_terminal and not self._quiet else None

  def _make_bar(self) -> bars.Progress:
    bar = bars.Progress(
      bars.TextColumn("step {task.completed}" + ("" if self._steps is None else "/{task.total}")),
      bars.BarColumn(bar_width=12 if self._console.width < NARROW else 24),
      bars.TextColumn("{task.description}"),
      bars.TextColumn("eta"),
      bars.TimeRemainingColumn(compact=True),
      console=self._console,
    )
    bar.add_task("compiling the step", total=self._steps, completed=self._start)
    return bar

  def update(self, step: int, values: Mapping[str, float], *, compiled: bool = False) -> None:
    """Shows a finished step, from 1, and its metrics, with `loss` and the result of `StepClock`."""
    if self._bar is not None:
      if self._console.width < NARROW:
        values = {name: values[name] for name in ("loss", *TIMES) if name in values}
      self._bar.update(self._bar.task_ids[0], completed=step, description=self._text(values, compiled))
    # Not only where it is a multiple: there may be updates for some steps only.
    elif step == self._steps or (
      not self._quiet and (step >= self._next or time.monotonic() - self._printed >= LONGEST_SILENCE_S)
    ):
      self._next, self._printed = (step // self._every + 1) * self._every, time.monotonic()
      self._console.print(f"{self._number(step)}  {self._text(values, compiled)}", markup=False)

  def note(self, step: int, text: str) -> None:
    """Prints a line for a step, above the bar if there is a bar; prints nothing when quiet."""
    if not self._quiet:
      self._console.print(f"{self._number(step)}  {text}", markup=False)

  def _number(self, step: int) -> str:
    return f"step {step}" if self._steps is None else f"step {step:{len(str(self._steps))}}/{self._steps}"

  def _text(self, values: Mapping[str, float], compiled: bool) -> str:
    shown = [f"{k} {v:.4f}" for k, v in values.items() if k not in (*TIMES, "mfu")]
    if "mfu" in values:
      shown.append(f"mfu {values['mfu']:.1%}")
    milliseconds = values["seconds"] * 1e3
    digits = 1 if milliseconds < 10 else 0
    rate = next((values[name] for name in RATES if name in values), None)
    if compiled:
      return "  ".join([*shown, f"{values['seconds']:.1f} s with compilation"])
    shown += [] if rate is None else [f"{rate:,.0f} {self._unit}/s"]
    return "  ".join([*shown, f"{milliseconds:.{digits}f} ms/step"])

  def __enter__(self) -> Self:
    if self._bar is not None:
      self._bar.start()
    return self

  def __exit__(self, *_: object) -> None:
    if self._bar is not None:
      self._bar.stop()


class StepClock:
  """Step time and throughput over the last `window` ticks; ticks with a compilation are left out."""

  def __init__(self, window: int = 20, unit: str = "tokens"):
    self._rate = f"{unit}_per_second"
    self._last = math.nan
    self._ticks: collections.deque[tuple[float, int, int]] = collections.deque(maxlen=window)

  def start(self) -> None:
    """Starts the time of the next step; time between a tick and the next start does not count."""
    self._last = time.perf_counter()

  def tick(self, tokens: int, *, steps: int = 1, compiled: bool = False) -> Record:
    """Ends the time of steps that consumed so many tokens or samples: seconds per step, and the rate."""
    now = time.perf_counter()
    seconds, self._last = now - self._last, now
    if compiled:
      return {"seconds": seconds / steps}
    self._ticks.append((seconds, tokens, steps))
    rate = {self._rate: self.tokens_per_second} if tokens else {}
    return {"seconds": seconds / steps, **rate}

  @property
  def step_seconds(self) -> float:
    """Mean seconds per step over the window; nan while it is empty."""
    return sum(s for s, _, _ in self._ticks) / sum(n for _, _, n in self._ticks) if self._ticks else math.nan

  @property
  def tokens_per_second(self) -> float:
    """Mean tokens per second over the window; nan while it is empty."""
    seconds = sum(s for s, _, _ in self._ticks)
    return sum(t for _, t, _ in self._ticks) / seconds if self._ticks else math.nan
