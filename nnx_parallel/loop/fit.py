"""A training loop. It is optional: a hand-written loop over `train_step` lacks only these features."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Never

import jax
from flax import nnx

from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.damage import friendly_errors
from nnx_parallel.checkpoint.targets import Only
from nnx_parallel.core.checked import check_arguments, warn
from nnx_parallel.core.types import AnyMetrics, Model, Optimizers, PyTree
from nnx_parallel.errors import CheckpointError, TrainError
from nnx_parallel.layout.plan import Plan
from nnx_parallel.loop.early_stop import EarlyStop
from nnx_parallel.loop.progress import StepProgress
from nnx_parallel.loop.run import FitResult, Position, Run, Source, Tracker
from nnx_parallel.train.step import TrainStep, unknown_option


def resume_from(
  checkpointer: Checkpointer, target: PyTree, step: int | str | None = "latest", *, only: Only | None = None
) -> tuple[PyTree, Position]:
  """Restores a run; `"latest"` passes over a damaged step, with a warning. Returns it and its position.

  A step that `fit` did not save, such as imported weights, has no data cursor: the data starts anew.
  """
  on_corrupt = "fallback" if step in (None, "latest") else "error"  # not for a step that was asked for
  restored = checkpointer.restore(target, step, only=only, on_corrupt=on_corrupt)
  found = checkpointer.restored
  assert found is not None
  number = found.step
  data: Any = checkpointer.restore_extra("data") if "data" in found.extra else None
  if not isinstance(data, dict) or not isinstance(data.get("samples"), int):  # pyright: ignore[reportUnknownMemberType]
    warn(
      f"step {number} in {checkpointer.directory} has no data cursor, so the data starts at its beginning."
    )
    data = {"samples": 0}
  return restored, Position(number, data["samples"], data.get("stop", {}))


@check_arguments(TrainError, "model", "optimizer")
def fit(
  step: Callable[[Model, Optimizers, PyTree], AnyMetrics],
  model: Model,
  optimizer: Optimizers,
  batches: Source,
  *,
  steps: int | None = None,
  plan: Plan | None = None,
  evaluate: Callable[[], AnyMetrics] | None = None,
  eval_every: int | None = None,
  checkpointer: Checkpointer | None = None,
  save_every: int | None = None,
  only: Only | None = None,
  extra: Callable[[], Mapping[str, Any]] | None = None,
  resume: int | Literal["latest", "best"] | None = None,
  start: Position | None = None,
  early_stop: EarlyStop | None = None,
  trackers: Sequence[Tracker] = (),
  log_every: int | None = None,
  progress: bool | StepProgress = True,
  tokens: Callable[[PyTree], int] | None = None,
  flops: float | None = None,
  peak_flops: float | None = None,
  profile: tuple[int, int] | None = None,
  profile_dir: str | os.PathLike[str] = "profile",
  nonfinite: Literal["error", "continue", "back"] = "error",
  check_gradients: bool = False,
  **unknown: Never,
) -> FitResult:
  """Trains a live model, with progress, evaluation, checkpoints and metrics.

  The next step is dispatched before the last step has finished, so metrics are read one step late. With a
  checkpointer, its directory is checked and taken before the first step (see `Checkpointer.prepare`), and the
  last step is saved. SIGTERM and Ctrl-C end the run after the current step, which is also saved; the signal
  then acts as usual (see `StopSignals`). A second Ctrl-C acts immediately. If data, a step, an evaluation or
  a tracker fails, the records of the earlier steps are still written, and the last good step is saved.

  In a job of several processes, all must have equally many batches, of the same shapes: before each step,
  they agree on that, while the devices run the step before.

  Args:
    step: a function `(model, optimizer, batch) -> metrics`, made by `nxp.train_step`, or your own function
      under `nnx.jit`.
    model: a module, or a tuple or dict of modules.
    optimizer: the optimizer of the model; for several models, a tuple or dict of optimizers.
    batches: a function `batches(samples)` that returns an iterable of the batches after this number of
      examples (of all processes); a run needs such a function to resume. Or any iterable of batches. In a job
      of several processes, each process passes its own shares, or batches that `nxp.batches` placed.
    steps: the number of the last step, counted from the start of the first run. None trains to the end of the
      data.
    plan: the plan of the model. It places host batches, is stored in the checkpoints, and beside them in
      `plan.json`, and puts its rules in scope for `constrain`, unless other rules are in scope. Without a
      plan, batches are not moved.
    evaluate: a function without arguments that returns metrics, for example of `nxp.evaluate`. They are
      recorded with names that start with `eval_`. A pair `(sum, count)` is divided.
    eval_every: the number of steps between evaluations; by default, `fit` evaluates only after the last step.
    checkpointer: an `nxp.Checkpointer(directory)`, which saves the steps. Set `max_to_keep` and `best` (for
      example to `"eval_loss"`) there.
    save_every: the number of steps between saves; by default, only the last step is saved.
    only: the leaves of the model to save, and to restore when the run resumes, as for `Checkpointer.save`.
      The other leaves, such as the base model under adapters, must have the same values as when the run
      began.
    extra: a function without arguments that returns more values to save: trees of arrays, or JSON values, by
      name. The name `"data"` is reserved.
    resume: `"latest"`, `"best"` or a number: the step to restore into the live model first. With `"latest"`,
      the run starts at step 0 if there is no checkpoint, and skips a damaged step with a warning. On the same
      mesh, the run continues bit for bit. If `fit` did not save the checkpoint, the data starts at its
      beginning, with a warning.
    start: the position of the model, which `resume_from` returned; `fit` advances it in place.
    early_stop: an `nxp.loop.EarlyStop(metric)`, which ends the run when a metric no longer improves.
    trackers: a list such as `[nxp.loop.MetricsLog(path).write]`, of functions `(step, metrics) -> None` that
      process 0 calls with each record. Metrics that are arrays are passed as NumPy arrays.
    log_every: the number of steps in one record, which contains their exactly weighted means; by default 1.
      If it is given, the progress prints a line for each record; otherwise, it prints about ten lines for the
      run, and a line every 30 seconds.
    progress: whether to show the progress, as a bar in a terminal and as lines in a log; or a `StepProgress`.
    tokens: the number of tokens in a batch, for the metric `tokens_per_second`. By default, the metric is
      `samples_per_second`, if the batch has an array with a dim of examples.
    flops: the FLOPs of a step on one device; by default the FLOPs of the matrix products in the compiled
      step, which include recomputation.
    peak_flops: the peak FLOP/s of one device; by default the bfloat16 peak of its chip. If both are known,
      the metric `mfu` is recorded: the FLOP/s of the step relative to the peak.
    profile: a pair with the numbers of the first and the last step to trace for xprof.
    profile_dir: the folder of the trace.
    nonfinite: what to do if the loss is not finite, or if the parameters of a step that is to be saved are
      not finite. `"error"` raises an error and does not save the step; `"continue"` trains on and saves it;
      `"back"` goes back to the last good state and trains on with the batches that follow. For that, each
      process keeps one copy of its shards in host memory, made at the start, every 100 steps, and with each
      evaluation and save; its size is printed. The record of the bad step says `back_to`, the step of the
      copy. What the run does outside of the model and the optimizer, such as `trackers`, is not undone. The
      fourth time from one copy is an error.
    check_gradients: whether to check before training, on the first batch, that the gradients of the step are
      the derivatives of its loss on this layout (see `TrainStep.check_gradients`). Wrong gradients are an
      error.
    **unknown: misspelt names, for an error that shows the nearest name.

  Returns:
    A `FitResult`: the last step, the metrics, and why the run ended.

  Raises:
    TrainError: the data ends before `steps`, or on some processes only, the loss or the parameters to save
      are not finite, the checked gradients are wrong, the step returns no dict, `extra` returns a value named
      `"data"`, a metric of an evaluation is an array, or an option has an invalid value.
    CheckpointError: the directory has steps of another run or lacks the step to resume from, or a step cannot
      be saved or restored.

  Example:
    >>> import numpy as np, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(data=8), nxp.replicate(), optimizer=optax.sgd(0.1))
    >>> model, optimizer = nxp.create_sharded_model(plan)
    >>> step = nxp.train_step(lambda model, x: (model(x) ** 2).mean())
    >>> data = [np.ones((16, 4), np.float32)] * 3
    >>> result = nxp.fit(step, model, optimizer, data, plan=plan, progress=False)
    >>> result.step, result.stopped, result.history[-1]["loss"] < result.history[0]["loss"]
    (3, 'data', True)
  """
  if unknown:
    raise unknown_option(fit, next(iter(unknown)))
  _check_step(step)
  if isinstance(plan, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
    raise TrainError(
      "fit takes one plan, which places the batches, and got a dict of plans.",
      fix=f"plan=plans[{next(iter(plan), '')!r}]: the plan of any of the models.",
    )
  if check_gradients and not isinstance(step, TrainStep):
    raise TrainError(
      f"fit cannot check the gradients of a {type(step).__name__}: it does not show its loss.",
      fix="a step of nxp.train_step; or nxp.check_gradients(model, batch, loss_fn) before fit.",
    )
  run = Run(
    step=step, model=model, optimizer=optimizer, batches=batches, at=start or Position(), plan=plan,
    steps=steps, evaluate=evaluate, eval_every=eval_every, checkpointer=checkpointer, save_every=save_every,
    only=only, extra=extra, early_stop=early_stop, trackers=trackers, log_every=log_every, progress=progress,
    tokens=tokens, flops=flops, peak_flops=peak_flops, profile=profile, profile_dir=profile_dir,
    nonfinite=nonfinite, check_gradients=check_gradients,
  )  # fmt: skip
  resumed, saved = "", list[int]()
  if checkpointer is not None:
    saved = checkpointer.prepare(model, optimizer, only=only)
    if resume is not None and (resume != "latest" or saved):
      _, start = resume_from(checkpointer, (model, optimizer), resume, only=only)
      run.at, resumed = start, f"resumed from step {start.step} of {checkpointer.directory}"
  _check(checkpointer, save_every or only or extra, resume, start, batches, saved)
  if checkpointer is not None and plan is not None and jax.process_index() == 0:
    with friendly_errors("write plan.json", checkpointer.directory):
      (checkpointer.directory / "plan.json").write_text(plan.to_json())
  return run(resumed)


def _check(
  checkpointer: Checkpointer | None,
  saving: Any,
  resume: int | str | None,
  start: Position | None,
  batches: Source,
  saved: list[int],
) -> None:
  if checkpointer is None and (saving is not None or resume is not None):
    raise TrainError(
      "save_every, only, extra and resume need a checkpointer.",
      fix="checkpointer=nxp.Checkpointer(directory)",
    )
  if checkpointer is not None and start is None and saved:
    raise CheckpointError(
      f"{checkpointer.directory} holds the checkpoints of an earlier run.",
      details=f"steps {', '.join(map(str, saved))}",
      fix='resume="latest" to continue from the newest, or another directory.',
    )
  if start is not None and start.samples and not callable(batches):
    raise TrainError(
      f"the data cannot continue after {start.samples} samples: batches is a {type(batches).__name__}.",
      fix="pass a function: batches(samples) -> the batches after so many examples.",
    )


def _check_step(step: Any) -> None:
  try:
    if not isinstance(step, nnx.Pytree):
      inspect.signature(step).bind(None, None, None)
      return
    problem = "it is a module or an optimizer"
  except TypeError as error:
    problem = str(error)
  except ValueError:  # no Python function
    return
  raise TrainError(
    f"fit needs a step that it can call with (model, optimizer, batch), and got a {type(step).__name__}.",
    details=problem,
    fix="nxp.fit(nxp.train_step(loss_fn), model, optimizer, batches)",
  )
