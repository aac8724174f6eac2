"""Seconds per step, and throughput."""

from __future__ import annotations

import collections
import math
import time

from nnx_parallel.loop.metrics import Record


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
