"""Which steps to keep."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from nnx_parallel.errors import CheckpointError


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
    CheckpointError: counts that are not whole or below 1, or an unknown mode.

  Example:
    >>> keep = Retention(newest=2, every=100, best="loss")
    >>> metrics = {100: {}, 150: {"loss": 1.0}, 160: {"loss": 2.0}, 170: {}, 180: {}}
    >>> keep.doomed(metrics, newest_first=[180, 170, 160, 150, 100])
    [160]
  """

  newest: int | None = None
  every: int | None = None
  best: str | None = None
  mode: str = "min"
  keep_best: int = 1

  def __post_init__(self) -> None:
    counts: dict[str, Any] = {
      "max_to_keep": self.newest,
      "keep_every": self.every,
      "keep_best": self.keep_best,
    }
    for name, count in counts.items():
      is_whole = type(count) is not bool and isinstance(count, numbers.Integral)
      if count is not None and (not is_whole or count < 1):
        raise CheckpointError(
          f"{name}={count!r} is not a number of steps from 1 up.", fix=f"pass {name}=1 or more, or None."
        )
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

  def doomed(self, metrics: Mapping[int, Mapping[str, float]], newest_first: Sequence[int]) -> list[int]:
    """The steps to delete, in the order of their numbers.

    Args:
      metrics: of every saved step.
      newest_first: these steps by age.
    """
    if self.newest is None:
      return []
    kept = {*newest_first[: self.newest], *self.ranked(metrics)[: self.keep_best]}
    if self.every is not None:
      kept |= {step for step in newest_first if step % self.every == 0}
    return sorted(set(newest_first) - kept)
