"""Ends a run when a metric no longer improves."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.types import AnyMetrics
from nnx_parallel.errors import TrainError


@check_arguments(TrainError, patience=1, min_delta=0)
@dataclasses.dataclass
class EarlyStop:
  """Ends a run when a metric has not improved for a while.

  Attributes:
    metric: the metric's name in the records: `"eval_loss"` is the `loss` of the evaluations.
    patience: the number of consecutive records without a better value after which the run ends.
    mode: `"min"` if small values are better, or `"max"` if large values are better.
    min_delta: the minimum difference that counts as an improvement.
    best: the best value so far.
    waited: the number of records since the best value. Checkpoints store `best` and `waited`.
  """

  metric: str = "eval_loss"
  patience: int = 3
  mode: Literal["min", "max"] = "min"
  min_delta: float = 0.0
  best: float | None = None
  waited: int = 0

  @check_arguments(TrainError)
  def update(self, record: AnyMetrics) -> bool:
    """Updates the best value.

    Args:
      record: metrics by name; a record without the watched metric does not count.

    Returns:
      Whether the run should end.
    """
    if self.metric not in record:
      return False
    value = float(record[self.metric])
    gain = math.inf if self.best is None else self.best - value if self.mode == "min" else value - self.best
    if gain > self.min_delta and not math.isnan(value):  # after a nan, no value would be an improvement
      self.best, self.waited = value, 0
    else:
      self.waited += 1
    return self.waited >= self.patience
