"""Metrics in `fit`: read a step late, shown, recorded and tracked; early stopping."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from nnx_parallel.core.types import AnyMetrics, PyTree
from nnx_parallel.errors import TrainError
from nnx_parallel.hosts.fetch import to_host
from nnx_parallel.loop.metrics import Record
from nnx_parallel.loop.progress import StepProgress
from nnx_parallel.loop.sums import MetricSums, is_scalar
from nnx_parallel.loop.timing import StepClock
from nnx_parallel.train.losses import examples_in

Tracker = Callable[[int, Mapping[str, Any]], object]
KEPT = 10_000  # records in memory, of about 1 KB each


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

  def __post_init__(self) -> None:
    if self.mode not in ("min", "max") or self.patience < 1 or self.min_delta < 0:
      raise TrainError(
        f"{self} cannot stop a run.",
        fix='mode "min" or "max", patience from 1 up, min_delta from 0 up.',
      )

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


@dataclasses.dataclass
class Position:
  """The step and the data cursor of a run.

  Attributes:
    step: the number of updates so far.
    samples: the data cursor: the number of examples consumed so far, on any mesh, in batches of any size.
    replaces: saves up to this step replace saves that an earlier run made after the step it resumes from.
    stop: `best` and `waited` of the run's `EarlyStop`.
  """

  step: int = 0
  samples: int = 0
  replaces: int = 0
  stop: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

  def save_options(self, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Checkpointer.save` that store the position with `extra`."""
    data = {"samples": self.samples, "stop": self.stop}
    return {"step": self.step, "extra": {**extra, "data": data}, "overwrite": self.step <= self.replaces}


class Recorder:
  """Reads metrics one step late, for the display, the trackers and the early stop."""

  def __init__(
    self,
    at: Position,
    shown: StepProgress,
    trackers: Sequence[Tracker],
    early_stop: EarlyStop | None,
    finite: bool,
    evaluates: bool,
    unit: str = "samples",
  ):
    self.at, self.shown, self.early_stop = at, shown, early_stop
    self.trackers, self.finite, self.evaluates = trackers, finite, evaluates
    self.history: collections.deque[Record] = collections.deque(maxlen=KEPT)
    self.newest: Record = {}
    self.ended = False
    self.ideal_seconds = math.nan  # of a step at the peak of the chip
    self.clock = StepClock(unit=unit)
    self._compiled = False  # since the last tick of the clock
    self._start_window()
    self._late: Callable[[], None] | None = None
    self._before: Any = None
    self._arrays: dict[str, Any] = {}
    if early_stop is not None and at.stop:
      early_stop.best, early_stop.waited = at.stop["best"], at.stop["waited"]

  def add(
    self,
    number: int,
    metrics: AnyMetrics,
    batch: PyTree,
    tokens: Callable[[PyTree], int],
    *,
    report: bool,
    compiled: bool,
  ) -> None:
    """Adds the metrics of a step, and reports the step before; `report` ends the window of a record."""
    scalars = {name: value for name, value in metrics.items() if is_scalar(value)}
    self._sums.add(scalars, weight=examples_in(batch))
    self._steps, self._tokens = self._steps + 1, self._tokens + tokens(batch)
    self._compiled = self._compiled or compiled
    # One step ahead keeps the devices busy; waiting for the previous step bounds the work in flight.
    jax.block_until_ready(self._before)
    self._before = scalars
    self.flush()
    self._arrays = {name: value for name, value in metrics.items() if name not in scalars}
    if report:
      self.close_window(number)

  def close_window(self, number: int) -> None:
    """Makes one record, to be reported later, of the steps since the last record."""
    if self._steps:
      args = (number, self._sums, self._arrays, self._tokens, self._steps)
      self._late = functools.partial(self._report, *args)
      self._start_window()

  def _start_window(self) -> None:
    self._sums, self._steps, self._tokens = MetricSums(), 0, 0

  def flush(self) -> None:
    """Reports the pending record, if there is one."""
    late, self._late = self._late, None
    if late is not None:
      late()

  def finish(self, number: int) -> None:
    """Reports all steps up to this one, the last."""
    self.flush()
    self.close_window(number)
    self.flush()

  def evaluation(self, number: int, values: AnyMetrics) -> None:
    """Records the metrics of an evaluation, as `eval_...`."""
    means = MetricSums()
    means.add(values)
    found = {f"eval_{name}": value for name, value in means.read().items()}
    self.shown.note(number, "  ".join(f"{name} {value:.4f}" for name, value in found.items()))
    self._record(number, found, last=True)

  def of_step(self, number: int) -> Record:
    """All metrics that were recorded for one step."""
    newest = [*itertools.islice(reversed(self.history), 2)][::-1]
    found = [record for record in newest if record["step"] == number]
    return {name: value for record in found for name, value in record.items() if name != "step"}

  def fail(self, kind: Any, error: BaseException | None, trace: Any) -> None:
    """After a failure, reports the step before it, if that did not fail too."""
    if error is not None:
      with contextlib.suppress(TrainError, RuntimeError):
        self.flush()

  def _report(self, number: int, sums: MetricSums, arrays: dict[str, Any], tokens: int, steps: int) -> None:
    # Reported one step late: the time since the last tick holds the compilation of the step after it.
    compiled, self._compiled = self._compiled, False
    values = sums.read() | self.clock.tick(tokens, steps=steps, compiled=compiled)
    if math.isfinite(mfu := self.ideal_seconds / self.clock.step_seconds):
      values["mfu"] = mfu
    self.shown.update(number, values, compiled=compiled)
    fetched = to_host(arrays) if arrays and self.trackers else {}
    self._record(number, values, fetched, last=not self.evaluates)
    if self.finite and not math.isfinite(values.get("loss", 0.0)):
      raise TrainError(
        f"the loss of step {number} is {values['loss']}: training further is of no use.",
        details=", ".join(f"{k} {v:.4g}" for k, v in values.items()),
        fix="a lower learning rate or clipped gradients in optimizer(); then resume from a checkpoint.",
      )

  def _record(
    self, number: int, values: Record, arrays: Mapping[str, Any] | None = None, *, last: bool
  ) -> None:
    self.newest.update(values)
    self.history.append({"step": number, **values})
    if jax.process_index() == 0:
      for track in self.trackers:
        track(number, {**values, **(arrays or {})})
    stop = self.early_stop
    if stop is None:
      return
    self.ended = stop.update(values) or self.ended
    self.at.stop = {"best": stop.best, "waited": stop.waited}
    if last and stop.metric not in self.newest:
      raise TrainError(f"no record has the metric {stop.metric!r}.", fix=f"one of {', '.join(self.newest)}.")
