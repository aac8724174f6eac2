"""The loop of `fit`: batches, updates, evaluations and saves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.relayout import on_auto_axes
from nnx_parallel.checkpoint.targets import Only, saved_roots
from nnx_parallel.core.mesh import no_mesh, use_mesh
from nnx_parallel.core.nodes import value_of
from nnx_parallel.core.text import not_counted
from nnx_parallel.core.types import AnyMetrics, Leaf, Model, Optimizers, PyTree
from nnx_parallel.errors import NnxParallelWarning, TrainError
from nnx_parallel.hosts.data import batches as placed
from nnx_parallel.hosts.stop import StopSignals
from nnx_parallel.layout.constrain import default_scope
from nnx_parallel.layout.plan import Plan
from nnx_parallel.loop.metrics import Record
from nnx_parallel.loop.progress import StepProgress
from nnx_parallel.loop.recorder import Position, Recorder
from nnx_parallel.report.chips import chip_of
from nnx_parallel.report.program.cost import cost
from nnx_parallel.train.losses import examples_in
from nnx_parallel.train.step import TrainStep

Source = Iterable[Any] | Callable[[int], Iterable[Any]]
_END = object()


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
class Run:
  """A run of `fit`, whose arguments have been checked.

  Attributes:
    at: the position, advanced in place.
    shown: the display.
    recorder: of the metrics.
    peak: the peak FLOP/s of a device, or None.
    profile: the numbers of the first and the last step to trace, from 1; 0 for none.
    finite: whether a number that is not finite is an error.

  The other attributes are arguments of `fit`.
  """

  step: Callable[[Model, Optimizers, PyTree], AnyMetrics]
  model: Model
  optimizer: Optimizers
  plan: Plan | None
  at: Position
  shown: StepProgress
  recorder: Recorder
  steps: int | None
  evaluate: Callable[[], AnyMetrics] | None
  eval_every: int | None
  checkpointer: Checkpointer | None
  save_every: int | None
  only: Only | None
  extra: Callable[[], Mapping[str, Any]] | None
  log_every: int
  tokens: Callable[[PyTree], int] | None
  flops: float | None
  peak: float | None
  profile: tuple[int, int]
  profile_dir: str | os.PathLike[str]
  finite: bool
  check_gradients: bool

  def __post_init__(self) -> None:
    self._first = self.at.step + 1
    self._saved = self._evaluated = -1  # the last step that was saved, and the last that was evaluated
    self._metrics: AnyMetrics | None = None  # of the last step, which may still be running
    self._programs: list[str] = []  # one entry for each program that was compiled
    self._tracing = contextlib.ExitStack()

  def __call__(self, batches: Source, resumed: str) -> FitResult:
    """Trains to the end; `resumed` is a line to show first."""
    host = iter(batches(self.at.samples) if callable(batches) else batches)
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
      stack.enter_context(self.shown)
      stack.enter_context(self._tracing)
      stack.push(self.recorder.fail)
      if resumed:
        self.shown.note(self.at.step, resumed)
      self.recorder.clock.start()
      stopped = self._train(next_batch, stop)
      self._finish(stopped)
    newest, history = self.recorder.newest, list(self.recorder.history)
    return FitResult(self.at.step, newest, history, stopped)

  def _train(self, next_batch: Callable[[], Any], stop: StopSignals) -> str:
    """Runs the steps; returns why they ended."""
    while self.steps is None or self.at.step < self.steps:
      batch = next_batch()
      if batch is _END:
        self._check_end()
        return "data"
      number = self.at.step + 1
      self._prepare(number, batch)
      compiled = self._update(number, batch)
      evaluating, saving = (n is not None and number % n == 0 for n in (self.eval_every, self.save_every))
      self._report(number, batch, compiled=compiled, flush=evaluating or saving)
      if stop.asked(number):
        return "signal"
      if evaluating:
        self._evaluation()
      if saving:
        self._save()
      if evaluating or saving:
        self.recorder.clock.start()  # so that its time does not count for the steps
      if self.recorder.ended:
        return "early"
    return "steps"

  def _check_end(self) -> None:
    """Checks that no step is missing after the last batch."""
    if self.steps is None:
      return
    self.recorder.finish(self.at.step)
    raise TrainError(
      f"the batches ended after step {self.at.step} of {self.steps}.",
      fix=f"steps={self.at.step}, steps=None for all there are, or more batches.",
    )

  def _prepare(self, number: int, batch: PyTree) -> None:
    """Checks the gradients, if this is the first step; starts the profile, if it begins here."""
    if self.check_gradients and number == self._first and isinstance(self.step, TrainStep):
      found = self.step.check_gradients(self.model, self.optimizer, batch)
      found.raise_if_wrong()
      self.shown.note(self.at.step, found.summary)
    if number == self.profile[0]:
      jax.block_until_ready(self._metrics)
      self._tracing.enter_context(jax.profiler.trace(os.fspath(self.profile_dir)))

  def _update(self, number: int, batch: PyTree) -> bool:
    """Runs a step; returns whether it compiled a program."""
    before = len(self._programs)
    with jax.profiler.StepTraceAnnotation("train", step_num=number):
      self._metrics = _checked(self.step(self.model, self.optimizer, batch))
    self.at.step, self.at.samples = number, self.at.samples + examples_in(batch)
    compiled = len(self._programs) > before
    if self.peak and (compiled or number == self._first):
      flops = _flops(self.step, self.model, self.optimizer, batch) if self.flops is None else self.flops
      self.recorder.ideal_seconds = flops / self.peak
    return compiled

  def _report(self, number: int, batch: PyTree, *, compiled: bool, flush: bool) -> None:
    """Records the metrics of a step, immediately with `flush`; ends the profile after its last step."""
    assert self._metrics is not None
    now = flush or number in (self._first, self.steps) or number % self.log_every == 0
    self.recorder.add(number, self._metrics, batch, self.tokens or _rows, report=now, compiled=compiled)
    if flush:
      self.recorder.flush()
    if number == self.profile[1]:
      jax.block_until_ready(self._metrics)
      self._tracing.close()

  def _finish(self, stopped: str) -> None:
    """Reports, evaluates and saves the last step."""
    self.recorder.finish(self.at.step)
    if stopped != "signal":
      self._evaluation()
    elif jax.process_index() == 0:
      done = "stopped after" if self.checkpointer is None else "saving"
      print(f"asked to end: {done} step {self.at.step}", flush=True)
    self._save()
    if self.checkpointer is not None:
      self.checkpointer.wait()  # its error must not be lost at exit

  def _evaluation(self) -> None:
    if self.evaluate is not None and self._evaluated != self.at.step:
      self.recorder.evaluation(self.at.step, self.evaluate())
      self._evaluated = self.at.step

  def _save(self) -> None:
    if self.checkpointer is None or self._saved == self.at.step or self.at.step < self._first:
      return
    if self.finite:
      _require_finite(saved_roots(self.model, self.optimizer, self.only), self.at.step)
    own = self.extra() if self.extra is not None else {}
    if "data" in own:
      raise TrainError(
        "extra() returns a 'data', which is the name of fit's data cursor.",
        fix="another name for yours.",
      )
    self.checkpointer.save(
      model=self.model,
      optimizer=self.optimizer,
      only=self.only,
      plan=self.plan,
      metrics=self.recorder.of_step(self.at.step),
      **self.at.save_options(own),
    )
    self.shown.note(self.at.step, f"checkpoint in {self.checkpointer.directory}")
    self._saved = self.at.step


def _checked(metrics: object) -> AnyMetrics:
  if not isinstance(metrics, Mapping):
    raise TrainError(
      f"the step returned a {type(metrics).__name__}, and fit needs a dict of metrics.",
      fix='return {"loss": loss} from the step.',
    )
  return metrics  # pyright: ignore[reportUnknownVariableType]


def _require_finite(roots: Mapping[str, Mapping[str, Leaf]], number: int) -> None:
  """Raises where a parameter is not finite, or the optimizer's state holds a NaN.

  The loss of a step is that before its update: it may be finite when the gradient is not.
  """
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


def peak_of_chip() -> float | None:
  """The bfloat16 peak of a device here, or None; simulated devices have none."""
  known = chip_of(jax.devices()[0].device_kind)
  return None if known is None or known.platform == "cpu" else known.peak("bfloat16")


def _flops(step: Any, model: Model, optimizer: Optimizers, batch: PyTree) -> float:
  """FLOPs of a step on one device after a call with these arguments; nan if it shows no program."""
  if not isinstance(step, TrainStep):
    return math.nan
  found = cost(step.compiled(model, optimizer, batch).as_text() or "")
  if found.uncounted:
    warnings.warn(
      f"the recorded mfu is too low. {not_counted(found.uncounted)}\n"
      "  Fix: fit(..., flops=...), for one device.",
      NnxParallelWarning,
      stacklevel=6,
    )
  return float(found.flops)
