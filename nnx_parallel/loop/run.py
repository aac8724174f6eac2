"""A run: a live model in training, its position in the data, and what is recorded of its metrics."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import math
import numbers
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.targets import Only, saved_roots
from nnx_parallel.core.checked import warn
from nnx_parallel.core.mesh import no_mesh, use_mesh
from nnx_parallel.core.nodes import value_of
from nnx_parallel.core.processes import Exchange
from nnx_parallel.core.text import format_bytes, with_article
from nnx_parallel.core.types import AnyMetrics, Leaf, Model, Optimizers, PyTree
from nnx_parallel.create.relayout import on_auto_axes
from nnx_parallel.errors import TrainError
from nnx_parallel.hosts.agree import to_host
from nnx_parallel.hosts.data import batches as placed
from nnx_parallel.hosts.stop import StopSignals
from nnx_parallel.layout.constrain import default_scope
from nnx_parallel.layout.plan import Plan
from nnx_parallel.loop.early_stop import EarlyStop
from nnx_parallel.loop.good_state import EVERY, GoodState
from nnx_parallel.loop.metrics import Record
from nnx_parallel.loop.progress import StepClock, StepProgress
from nnx_parallel.loop.sums import MetricSums, check_several_batches, is_scalar
from nnx_parallel.report.chips import chip_of
from nnx_parallel.report.program.cost import cost
from nnx_parallel.report.tables import not_counted
from nnx_parallel.train.losses import examples_in
from nnx_parallel.train.step import TrainStep

Source = Iterable[Any] | Callable[[int], Iterable[Any]]
Tracker = Callable[[int, Mapping[str, Any]], object]
KEPT = 10_000  # records in memory, of about 1 KB each
_END = object()
_EVALUATE = "evaluate=lambda: nxp.evaluate(eval_step, model, nxp.batches(held_out, plan))"
_RESCUE_S = 10.0  # in which all processes come to save the last step after an error


@dataclasses.dataclass(frozen=True)
class FitResult:
  """The result of a run.

  Attributes:
    step: the number of the last step.
    metrics: the newest value of every metric; the names of evaluation metrics start with `eval_`.
    history: the newest 10,000 records in order, each with its `step`. Trackers get all records.
    stopped: why the run ended: `"steps"`, `"data"` or `"early"`; or `"signal"` after SIGTERM or Ctrl-C, if
      the handler of the signal does not end the process.
  """

  step: int
  metrics: Record
  history: list[Record]
  stopped: str


@dataclasses.dataclass
class Position:
  """Updates and examples consumed so far, on any mesh, and the state of the run's `EarlyStop`."""

  step: int = 0
  samples: int = 0
  stop: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Run:
  """A live model in training, which `train` trains further; the fields are arguments of `nxp.fit`.

  Training advances `at` in place; the JSON values `settings` are saved with each step.
  """

  step: Callable[[Model, Optimizers, PyTree], AnyMetrics]
  model: Model
  optimizer: Optimizers
  batches: Source
  at: Position = dataclasses.field(default_factory=Position)
  settings: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
  plan: Plan | None = None
  steps: int | None = None
  evaluate: Callable[[], AnyMetrics] | None = None
  eval_every: int | None = None
  checkpointer: Checkpointer | None = None
  save_every: int | None = None
  only: Only | None = None
  extra: Callable[[], Mapping[str, Any]] | None = None
  early_stop: EarlyStop | None = None
  trackers: Sequence[Tracker] = ()
  log_every: int | None = None
  progress: bool | StepProgress = True
  tokens: Callable[[PyTree], int] | None = None
  flops: float | None = None
  peak_flops: float | None = None
  profile: tuple[int, int] | None = None
  profile_dir: str | os.PathLike[str] = "profile"
  nonfinite: Literal["error", "continue", "back"] = "error"
  check_gradients: bool = False

  def __post_init__(self) -> None:
    _check_intervals(self)
    self._saved = self._evaluated = -1  # the last step that was saved, and the last that was evaluated
    self._metrics: AnyMetrics | None = None  # of the last step, which may still be running
    self._programs: list[str] = []  # one entry for each program that was compiled
    self._tracing = contextlib.ExitStack()
    self._history: collections.deque[Record] = collections.deque(maxlen=KEPT)
    self._newest: Record = {}
    self._ended = False  # by the early stop
    self._ideal_seconds = math.nan  # of a step at the peak of the chip
    self._clock = StepClock(unit=self.unit)
    self._compiled = False  # since the last tick of the clock
    self._late: Callable[[], None] | None = None  # reports the pending record
    self._before: Any = None  # the metrics of the step before
    self._is_bad = False  # the loss or the state of the last step is not finite
    self._good: GoodState | None = None  # of `nonfinite="back"`
    self._start_window()

  @property
  def unit(self) -> str:
    """The unit of the speed that the progress shows per second."""
    return "samples" if self.tokens is None else "tokens"

  def train(
    self,
    steps: int,
    *,
    evaluate: Callable[[], AnyMetrics] | None = None,
    progress: bool | StepProgress = False,
    **options: Any,
  ) -> FitResult:
    """Trains up to a step, which the run may have reached; `options` and errors are those of `nxp.fit`."""
    if self.settings:
      self.settings["steps"] = steps
    return dataclasses.replace(self, steps=steps, evaluate=evaluate, progress=progress, **options)()

  def save(self, checkpointer: Checkpointer, metrics: Record | None = None) -> None:
    """Saves the model, the optimizer and the position as a step.

    Args:
      checkpointer: where to save; raises like `Checkpointer.save`.
      metrics: the metrics of the step.
    """
    found = self.extra() if self.extra is not None else {}
    if not isinstance(found, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
      raise TrainError(
        f"extra() returned {with_article(type(found).__name__)}.", fix='extra=lambda: {"ema": averages}'
      )
    own = dict(found)
    if "data" in own:
      raise TrainError(
        "extra() returns a 'data', which is the name of fit's data cursor.", fix="another name for yours."
      )
    own |= {"settings": dict(self.settings)} if self.settings else {}
    checkpointer.save(
      self.at.step,
      model=self.model,
      optimizer=self.optimizer,
      only=self.only,
      plan=self.plan,
      metrics=metrics,
      extra={**own, "data": {"samples": self.at.samples, "stop": self.at.stop}},
    )

  def __call__(self, resumed: str = "") -> FitResult:
    """Trains to the end; `resumed` is a line to show first."""
    self._first, self._shown = self.at.step + 1, self._display()
    if self.early_stop is not None and self.at.stop:
      self.early_stop.best, self.early_stop.waited = self.at.stop["best"], self.at.stop["waited"]
    host = iter(self.batches(self.at.samples) if callable(self.batches) else self.batches)
    source = host if self.plan is None else placed(host, self.plan)
    mesh_of_caller = jax.sharding.get_mesh()

    def next_batch() -> Any:
      with use_mesh(mesh_of_caller):  # batches may be results of another model on another mesh
        return next(source, _END)

    with contextlib.ExitStack() as stack:
      stop = stack.enter_context(StopSignals())
      stack.enter_context(_compilations(self._programs))
      if self.plan is not None:
        stack.enter_context(default_scope(self.plan.activation_rules))
      stack.enter_context(self._shown)
      stack.enter_context(self._tracing)
      stack.push(self._fail)
      if resumed:
        self._shown.note(self.at.step, resumed)
      if self.nonfinite == "back":
        self._keep()
      self._clock.start()
      try:
        stopped = self._train(next_batch, stop)
        self._finish(stopped)
      except Exception as error:
        self._rescue(error)
        raise
    return FitResult(self.at.step, self._newest, list(self._history), stopped)

  def _display(self) -> StepProgress:
    if not isinstance(self.progress, bool):
      return self.progress
    return StepProgress(
      self.steps,
      start=self.at.step,
      unit=self.unit,
      every_update=self.log_every is not None,
      quiet=not self.progress,
      console=None if self.progress else Console(quiet=True),
    )

  def _train(self, next_batch: Callable[[], Any], stop: StopSignals) -> str:
    """Runs the steps; returns why they ended."""
    while self.steps is None or self.at.step < self.steps:
      batch = self._agree_on_batch(next_batch)
      if batch is _END:
        self._check_end()
        return "data"
      number = self.at.step + 1
      self._prepare(number, batch)
      self._update(number, batch)
      evaluating, saving = (n is not None and number % n == 0 for n in (self.eval_every, self.save_every))
      due = evaluating or saving or number % EVERY == 0 or number == self.steps
      keeping = due and self._good is not None
      try:
        self._add(number, batch, flush=evaluating or saving or keeping)
        if keeping:
          self._keep()
      except TrainError as error:
        self._go_back(error)
        continue
      if stop.asked(number):
        return "signal"
      if evaluating:
        self._evaluation()
      if saving:
        self._save()
      if evaluating or saving:
        self._clock.start()  # so that its time does not count for the steps
      if self._ended:
        return "early"
    return "steps"

  def _agree_on_batch(self, next_batch: Callable[[], Any]) -> Any:
    """The next batch, if all processes have one of the same shapes; they agree while a step is running."""
    if jax.process_count() == 1:
      return next_batch()
    error: Exception | None = None
    try:
      batch = next_batch()
      leaves = jax.tree.leaves(batch)
      said = {
        "state": "end" if batch is _END else "batch",
        "shapes": "" if batch is _END else str([(np.shape(x), str(getattr(x, "dtype", ""))) for x in leaves]),
      }
    except Exception as caught:  # noqa: BLE001 (raised once the other processes know)
      batch, error = _END, caught
      said = {"state": "error", "shapes": f"{type(error).__name__}: {error}"[:500]}
    if self.at.step + 1 == self._first:
      said["shapes"] += f", in a run of steps={self.steps} with save_every={self.save_every}"
    problem = Exchange("the next batch").answer(json.dumps(said), judge_batches)
    if error is not None:
      raise error
    if problem:
      raise TrainError(
        f"step {self.at.step + 1} cannot be made: {problem}.",
        details=f"this is process {jax.process_index()}: {said['state']} {said['shapes']}",
        fix="as many batches of the same shapes on all processes: nxp.batches(samples, plan, batch=...), or"
        " the same steps=.",
      )
    return batch

  def _keep(self) -> None:
    """Copies the state to host memory, to go back to; an error if it is not finite."""
    self._is_bad = True
    _require_finite(saved_roots(self.model, self.optimizer), self.at.step)
    self._is_bad, first = False, self._good is None
    self._good = GoodState.of(self.model, self.optimizer, self.at.step, self.at.stop)
    if first:
      size = format_bytes(self._good.nbytes)
      text = f"the last good state takes {size} of host memory on each process, copied every {EVERY} steps"
      self._shown.note(self.at.step, f"{text} and with each evaluation and save")
    self._clock.start()

  def _go_back(self, error: TrainError) -> None:
    """Puts the last good state into the live objects, and the data goes on; raises any other error."""
    if (good := self._good) is None or not self._is_bad:
      raise error
    if not good.may_return:
      error.add_note(f"the run went back {good.times} times to step {good.step}")
      raise error
    good.put_back()
    left_out, self.at.step, self.at.stop = self.at.step - good.step, good.step, dict(good.stop)
    if self.early_stop is not None:
      self.early_stop.best, self.early_stop.waited = good.stop.get("best"), good.stop.get("waited", 0)
    self._is_bad = self._ended = False
    self._metrics = self._before = self._late = None
    self._start_window()
    self._tracing.close()  # a profile begins again with its first step
    self._shown.note(good.step, f"went back to here, behind {left_out} batches: {error.what}")
    self._clock.start()

  def _rescue(self, error: Exception) -> None:
    """Saves the last good step before an error goes on; says why if it cannot."""
    if self.checkpointer is None or self._is_bad or max(self._saved, self._first - 1) >= self.at.step:
      return
    try:
      if jax.process_count() > 1:  # a process that does not come waits in a step for this one
        Exchange("the end of a run").answer("", lambda texts: "", timeout=_RESCUE_S)
      self._save(finite=True)
      self.checkpointer.wait()
    except Exception as second:  # noqa: BLE001 (the first error goes on)
      error.add_note(f"step {self.at.step} could not be saved: {second}")
    else:
      error.add_note(f"step {self.at.step} was saved in {self.checkpointer.directory}")

  def _check_end(self) -> None:
    """Checks that no step is missing after the last batch."""
    if self.steps is None:
      return
    self._report_all()
    if not self.at.step:
      raise TrainError(
        f"there is no batch for step 1 of {self.steps}.",
        fix='more samples than batch=, nxp.batches(..., last="pad"), or an iterator that is not used up.',
      )
    raise TrainError(
      f"the batches ended after step {self.at.step} of {self.steps}.",
      fix=f"steps={self.at.step}, steps=None for all there are, or more batches.",
    )

  def _prepare(self, number: int, batch: PyTree) -> None:
    """Checks the gradients, if this is the first step; starts the profile, if it begins here."""
    if self.check_gradients and number == self._first and isinstance(self.step, TrainStep):
      found = self.step.check_gradients(self.model, self.optimizer, batch)
      found.raise_if_wrong()
      self._shown.note(self.at.step, found.summary)
    if self.profile is not None and number == self.profile[0]:
      jax.block_until_ready(self._metrics)
      self._tracing.enter_context(jax.profiler.trace(os.fspath(self.profile_dir)))

  def _update(self, number: int, batch: PyTree) -> None:
    """Runs a step."""
    before = len(self._programs)
    with jax.profiler.StepTraceAnnotation("train", step_num=number):
      found: Any = self.step(self.model, self.optimizer, batch)
    if not isinstance(found, Mapping):
      raise TrainError(
        f"the step returned a {type(found).__name__}, and fit needs a dict of metrics.",
        fix='return {"loss": loss} from the step.',
      )
    self._metrics = found
    self.at.step, self.at.samples = number, self.at.samples + examples_in(batch)
    compiled = len(self._programs) > before
    self._compiled = self._compiled or compiled
    if compiled or number == self._first:
      self._ideal_seconds = self._seconds_at_peak(batch)

  def _seconds_at_peak(self, batch: PyTree) -> float:
    """The seconds of a step at the peak of the chip; nan if either is unknown, as of simulated devices."""
    known, peak = chip_of(jax.devices()[0].device_kind), self.peak_flops
    if peak is None and known is not None and known.platform != "cpu":
      peak = known.peak("bfloat16")
    if not peak:
      return math.nan
    return (_flops(self.step, self.model, self.optimizer, batch) if self.flops is None else self.flops) / peak

  # Metrics are read one step late: one step ahead keeps the devices busy.

  def _start_window(self) -> None:
    self._sums, self._window, self._arrays = MetricSums(), (0, 0), dict[str, Any]()

  def _add(self, number: int, batch: PyTree, *, flush: bool) -> None:
    """Adds the metrics of a step to its record, and reports the record before, or this one with `flush`."""
    assert self._metrics is not None
    scalars = {name: value for name, value in self._metrics.items() if is_scalar(value)}
    self._sums.add(scalars, weight=examples_in(batch))
    steps, tokens = self._window
    self._window = steps + 1, tokens + (self.tokens or _rows)(batch)
    jax.block_until_ready(self._before)  # bounds the work in flight
    self._before = scalars
    self._flush()
    self._arrays = {name: value for name, value in self._metrics.items() if name not in scalars}
    if flush or number in (self._first, self.steps) or number % (self.log_every or 1) == 0:
      self._close_window(number)
    if flush:
      self._flush()
    if self.profile is not None and number == self.profile[1]:
      jax.block_until_ready(self._metrics)
      self._tracing.close()

  def _close_window(self, number: int) -> None:
    """Makes one record, to be reported later, of the steps since the last record."""
    if self._window[0]:
      self._late = functools.partial(self._report, number, self._sums, self._arrays, *self._window)
      self._start_window()

  def _flush(self) -> None:
    """Reports the pending record, if there is one."""
    late, self._late = self._late, None
    if late is not None:
      late()

  def _report_all(self) -> None:
    """Reports all steps so far, and goes back if the last of them are not finite."""
    try:
      self._flush()
      self._close_window(self.at.step)
      self._flush()
      if self._good is not None and self._good.step < self.at.step:
        self._keep()
    except TrainError as error:
      self._go_back(error)

  def _fail(self, kind: Any, error: BaseException | None, trace: Any) -> None:
    """After a failure, reports the step before it, if that did not fail too."""
    if error is not None:
      with contextlib.suppress(TrainError, RuntimeError):
        self._flush()

  def _report(self, number: int, sums: MetricSums, arrays: dict[str, Any], steps: int, tokens: int) -> None:
    # Reported one step late: the time since the last tick holds the compilation of the step after it.
    compiled, self._compiled = self._compiled, False
    values = sums.read() | self._clock.tick(tokens, steps=steps, compiled=compiled)
    if math.isfinite(mfu := self._ideal_seconds / self._clock.step_seconds):
      values["mfu"] = mfu
    self._shown.update(number, values, compiled=compiled)
    fetched = to_host(arrays) if arrays and self.trackers else {}
    # `loss`, or `critic/loss` and others of a dict of losses
    losses = [value for name, value in values.items() if name.rpartition("/")[2] == "loss"]
    self._is_bad = self.nonfinite != "continue" and not all(map(math.isfinite, losses))
    if self._is_bad and self._good is not None and self._good.may_return:
      values["back_to"] = self._good.step
    self._record(number, values, fetched, last=self.evaluate is None)
    if self._is_bad:
      raise TrainError(
        f"the loss of step {number} is {sum(losses)}: training further is of no use.",
        details=", ".join(f"{k} {v:.4g}" for k, v in values.items()),
        fix="a lower learning rate, or clipped gradients: optax.chain(optax.clip_by_global_norm(1.0), tx);\n"
        'then resume="latest" from a checkpoint.',
      )

  def _record(
    self, number: int, values: Record, arrays: Mapping[str, Any] | None = None, *, last: bool
  ) -> None:
    self._newest.update(values)
    self._history.append({"step": number, **values})
    if jax.process_index() == 0:
      for track in self.trackers:
        track(number, {**values, **(arrays or {})})
    stop = self.early_stop
    if stop is None:
      return
    self._ended = stop.update(values) or self._ended
    self.at.stop = {"best": stop.best, "waited": stop.waited}
    if last and stop.metric not in self._newest:
      raise TrainError(f"no record has the metric {stop.metric!r}.", fix=f"one of {', '.join(self._newest)}.")

  def _finish(self, stopped: str) -> None:
    """Reports, evaluates and saves the last step."""
    self._report_all()
    if stopped != "signal":
      self._evaluation()
    elif jax.process_index() == 0:
      done = "stopped after" if self.checkpointer is None else "saving"
      print(f"asked to end: {done} step {self.at.step}", flush=True)
    self._save()
    if self.checkpointer is not None:
      self.checkpointer.wait()  # its error must not be lost at exit

  def _evaluation(self) -> None:
    if self.evaluate is None or self._evaluated == self.at.step:
      return
    means = MetricSums()
    means.add(self.evaluate())
    found = {f"eval_{name}": value for name, value in means.read().items()}
    self._shown.note(self.at.step, "  ".join(f"{name} {value:.4f}" for name, value in found.items()))
    self._record(self.at.step, found, last=True)
    self._evaluated = self.at.step

  def _save(self, *, finite: bool = False) -> None:
    if self.checkpointer is None or self._saved == self.at.step or self.at.step < self._first:
      return
    if finite or self.nonfinite != "continue":
      _require_finite(saved_roots(self.model, self.optimizer, self.only), self.at.step)
    latest = [*itertools.islice(reversed(self._history), 2)][::-1]
    records = (record for record in latest if record["step"] == self.at.step)
    metrics = {name: value for record in records for name, value in record.items() if name != "step"}
    self.save(self.checkpointer, metrics)
    self._shown.note(self.at.step, f"checkpoint in {self.checkpointer.directory}")
    self._saved = self.at.step


def _check_intervals(run: Run) -> None:
  for name in ("steps", "eval_every", "save_every", "log_every"):
    steps, least = getattr(run, name), 0 if name == "steps" else 1
    if steps is not None and (not isinstance(steps, numbers.Integral) or steps < least):
      raise TrainError(f"{name}={steps!r} is not a number of steps.", fix=f"{name}={least} or more.")
  if run.profile is not None and not 0 < run.profile[0] <= run.profile[1]:
    raise TrainError(
      f"the profile of steps {run.profile[0]} to {run.profile[1]} holds no step.",
      details="steps are counted from 1, and both ends are in",
      fix="a few steps after the first, which compiles: (10, 12).",
    )
  if run.profile is not None and run.steps is not None and run.profile[0] > run.steps:
    raise TrainError(
      f"the profile starts at step {run.profile[0]}, and the run ends at step {run.steps}.",
      fix=f"profile=({max(1, run.steps - 1)}, {run.steps})",
    )
  check_several_batches("fit", run.batches)
  _check_arguments(
    "batches", run.batches, 1, "batches=lambda samples: nxp.batches(source, plan, batch=..., start=samples)"
  )
  _check_arguments("evaluate", run.evaluate, 0, _EVALUATE)
  if run.evaluate is None and run.eval_every is not None:
    raise TrainError("eval_every needs something to evaluate.", fix=_EVALUATE)


def _check_arguments(name: str, function: object, count: int, fix: str) -> None:
  """Refuses a function that takes another number of arguments."""
  if not callable(function):
    return
  try:
    inspect.signature(function).bind(*[None] * count)
  except TypeError as error:
    said = "no arguments" if not count else "the number of samples that the run has used"
    raise TrainError(f"{name} is called with {said}, and cannot be.", details=str(error), fix=fix) from None
  except ValueError:  # no Python function
    return


def judge_batches(texts: list[str]) -> str:
  """What differs between what the processes say of their next batches; empty if nothing does."""
  said = [json.loads(text) for text in texts]
  by_state = {name: [n for n, one in enumerate(said) if one["state"] == name] for name in ("end", "error")}
  if failed := by_state["error"]:
    return f"the data of processes {failed[:8]} failed ({said[failed[0]]['shapes']})"
  ended = by_state["end"]
  if 0 < len(ended) < len(said):
    return f"the data of processes {ended[:8]} of {len(said)} has ended, and the others have a batch"
  others = [n for n, one in enumerate(said) if one["shapes"] != said[0]["shapes"]]
  if others:
    return (
      f"processes {others[:8]} have another batch than process 0: {said[others[0]]['shapes']},"
      f" not {said[0]['shapes']}"
    )
  return ""


def _require_finite(roots: Mapping[str, Mapping[str, Leaf]], number: int) -> None:
  """Raises where a parameter is not finite or the optimizer holds a NaN; a loss is that before its update."""
  with no_mesh():
    found = {
      f"{root}/{path}": _is_sound(on_auto_axes(array), finite=root == "model")
      for root, leaves in roots.items()
      for path, leaf in leaves.items()
      if root != "model" or isinstance(leaf, nnx.Param)
      for array in jax.tree.leaves(value_of(leaf))
      if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jnp.inexact)
    }
  if bad := [name for name, sound in found.items() if not sound]:
    raise TrainError(
      f"step {number} is not saved: {bad[0]} is not finite.",
      details=f"{len(bad)} of {len(found)} arrays hold a NaN or an infinity; the steps saved before are"
      " untouched",
      fix="resume from the newest of them with a lower learning rate or clipped gradients;"
      ' optimizer=nxp.skip_nonfinite(...) leaves such updates out; nonfinite="continue" saves them.',
    )


@functools.partial(jax.jit, static_argnames="finite")
def _is_sound(array: jax.Array, *, finite: bool) -> jax.Array:
  return jnp.isfinite(array).all() if finite else ~jnp.isnan(array).any()


def _rows(batch: PyTree) -> int:
  """The examples of a batch; 0 where no array has a dim for them."""
  return examples_in(batch) if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(batch)) else 0


@contextlib.contextmanager
def _compilations(programs: list[str]) -> Generator[None]:
  """Adds to the list for each program that XLA compiles for this thread during the block."""
  thread = threading.get_ident()

  def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
    is_compilation = event == "/jax/core/compile/backend_compile_duration"  # tests/test_upstream.py checks it
    if is_compilation and threading.get_ident() == thread:
      programs.append(event)

  jax.monitoring.register_event_duration_secs_listener(note)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(note)


def _flops(step: Any, model: Model, optimizer: Optimizers, batch: PyTree) -> float:
  """FLOPs of a step on one device after a call with these arguments; nan if it shows no program."""
  if not isinstance(step, TrainStep):
    return math.nan
  found = cost(step.compiled(model, optimizer, batch).as_text() or "")
  if found.uncounted:
    warn(
      f"the recorded mfu is too low. {not_counted(found.uncounted)}\n"
      "  Fix: nxp.fit(..., flops=...), for one device."
    )
  return float(found.flops)
