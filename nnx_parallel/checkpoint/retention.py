"""Which steps are the newest, and which of them to keep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from nnx_parallel.errors import CheckpointError


def newest_first(times: Mapping[int, float | None]) -> list[int]:
  """Steps by age: those of the run that goes on, then those that it left behind.

  A step was left behind when a smaller one was written after it: a run went on from before it. So the
  first is the one that was written last.

  Args:
    times: when each step was written; None when nothing says it, and then its number decides.

  Example:
    >>> newest_first({100: 1.0, 150: 3.0, 200: 2.0})
    [150, 100, 200]
  """
  current: list[int] = []
  left: dict[int, float] = {}
  last = -math.inf
  for step in sorted(times):
    time = times[step]
    if time is not None and time < last:
      left[step] = time
    else:
      current.append(step)
      last = last if time is None else time
  return [*reversed(current), *sorted(left, key=lambda step: -left[step])]


@dataclasses.dataclass(frozen=True)
class Retention:
  """Keeps the newest steps, every k-th one, and the best by a metric; the newest always stays.

  Attributes:
    newest: how many of the newest steps to keep; None keeps all.
    every: keeps each step that this divides.
    best: the metric that `step="best"` and `keep_best` compare.
    mode: `min` or `max`: which value of the metric is best.
    keep_best: how many of the best steps to keep.

  Raises:
    CheckpointError: counts below 1, or an unknown mode.

  Example:
    >>> keep = Retention(newest=2, every=100, best="loss")
    >>> keep.doomed({100: {}, 150: {"loss": 1.0}, 160: {"loss": 2.0}, 170: {}, 180: {}})
    [160]
  """

  newest: int | None = None
  every: int | None = None
  best: str | None = None
  mode: str = "min"
  keep_best: int = 1

  def __post_init__(self) -> None:
    counts = {"max_to_keep": self.newest, "keep_every": self.every, "keep_best": self.keep_best}
    for name, count in counts.items():
      if count is not None and count < 1:
        raise CheckpointError(f"{name}={count} keeps nothing.", fix=f"pass {name}=1 or more, or None.")
    if self.mode not in ("min", "max"):
      raise CheckpointError(f"best_mode={self.mode!r} is unknown.", fix='pass "min" or "max".')

  def ranked(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
    """Steps that have the metric, best first; NaN counts as not having it."""
    if self.best is None:
      return []
    values = {step: row[self.best] for step, row in metrics.items() if self.best in row}
    sign = 1 if self.mode == "min" else -1
    finite = [step for step, value in values.items() if not math.isnan(value)]
    return sorted(finite, key=lambda step: (sign * values[step], -step))

  def doomed(
    self, metrics: Mapping[int, Mapping[str, float]], times: Mapping[int, float] | None = None
  ) -> list[int]:
    """The steps to delete, in the order of their numbers.

    Args:
      metrics: of every saved step.
      times: when each of them was written; None: in the order of their numbers.
    """
    if self.newest is None:
      return []
    steps = newest_first(dict.fromkeys(metrics) if times is None else times)
    kept = {*steps[: self.newest], *self.ranked(metrics)[: self.keep_best]}
    if self.every is not None:
      kept |= {step for step in steps if step % self.every == 0}
    return sorted(set(steps) - kept)
