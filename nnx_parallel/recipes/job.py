"""A recipe on a mesh: planned, created or restored, trained, evaluated, saved. Read it to write your own."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import jax
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import RecipeError, TrainError
from nnx_parallel.recipes.loader import Recipe
from nnx_parallel.train.metrics import Record, StepClock

Observer = Callable[[int, Record], None]


def plan_recipe(recipe: Recipe, mesh: Any, rules: Any = None, **options: Any) -> nxp.ShardingPlan:
  """The plan of a recipe's model and optimizer.

  Args:
    recipe: gives `init`, and `optimizer` and `rules` if it has them.
    mesh: real or abstract.
    rules: instead of the recipe's; a recipe without rules is planned with `nxp.fsdp()`.
    **options: for `nxp.plan`: `zero`, `optimizer_memory`.

  Raises:
    ShardingError: rules that do not fit.

  Example:
    >>> from nnx_parallel.recipes import load_recipe
    >>> plan = plan_recipe(load_recipe("text_lm"), nxp.abstract_mesh(data=2, fsdp=2, tensor=2))
    >>> plan["head.kernel"].spec
    P('fsdp', 'tensor')
  """
  if rules is None:
    rules = recipe.rules() if recipe.rules is not None else nxp.fsdp()
  optimizer = recipe.optimizer() if recipe.optimizer is not None else None
  return nxp.plan(recipe.init, mesh, rules, optimizer=optimizer, **options)


@dataclasses.dataclass
class Job:
  """A live model with its optimizer, and how far they have come.

  Attributes:
    recipe: what is trained, on which batches.
    plan: how it is laid out.
    model: the live module.
    optimizer: its optimizer.
    microbatches: into how many parts each global batch is cut.
    step: how many updates were made.
    samples: the data cursor: how many samples were consumed, on whatever mesh, in whatever batches.
    passed_over: the newest step that was damaged when this job was restored from an older one; up to
      it, saves replace what is there.
  """

  recipe: Recipe
  plan: nxp.ShardingPlan
  model: nnx.Module
  optimizer: nnx.Optimizer[Any]
  microbatches: int = 1
  step: int = 0
  samples: int = 0
  passed_over: int = 0

  def __post_init__(self) -> None:
    if self.recipe.loss is None or self.recipe.batches is None:
      raise RecipeError(
        f"the recipe {self.recipe.name} cannot be trained: it has no loss() or no batches().",
        fix="load it with load_recipe(spec), which checks both.",
      )
    self._loss, self._batches = self.recipe.loss, self.recipe.batches
    self._train_step = nxp.train_step(self._loss, microbatches=self.microbatches)
    self._eval_step = nxp.eval_step(self._loss)
    self.clock = StepClock()
    self._late: tuple[int, Mapping[str, Any], int] | None = None

  @classmethod
  def start(cls, recipe: Recipe, plan: nxp.ShardingPlan, *, microbatches: int = 1) -> Self:
    """A new job at step 0, created straight into its shards."""
    model, optimizer = nxp.create_sharded_model(plan)
    return cls(recipe, plan, model, optimizer, microbatches)

  @classmethod
  def restore(
    cls,
    recipe: Recipe,
    plan: nxp.ShardingPlan,
    checkpointer: nxp.Checkpointer,
    *,
    microbatches: int = 1,
  ) -> Self:
    """The job as it was at its last good checkpoint, in the layout of this plan.

    A damaged one is passed over with a warning.

    Raises:
      CheckpointError: nothing to restore, or it does not fit the plan.
    """
    newest = max(checkpointer.steps(), default=0)
    model, optimizer = checkpointer.restore(plan, on_corrupt="fallback")
    step = checkpointer.restored.step if checkpointer.restored is not None else newest
    samples = checkpointer.restore_extra("data", step=step)["samples"]
    passed_over = newest if newest > step else 0
    return cls(recipe, plan, model, optimizer, microbatches, step, samples, passed_over)

  def save(self, checkpointer: nxp.Checkpointer) -> None:
    """Saves everything that `restore` needs.

    Raises:
      CheckpointError: as `Checkpointer.save`.
    """
    checkpointer.save(**self.state())

  def state(self) -> dict[str, Any]:
    """The arguments for `Checkpointer.save`, and for `Checkpointer.save_on_sigterm`."""
    return {
      "step": self.step,
      "model": self.model,
      "optimizer": self.optimizer,
      "extra": {"data": {"samples": self.samples, "recipe": self.recipe.name}},
      "plan": self.plan,
      "overwrite": self.step <= self.passed_over,
    }

  def train(
    self,
    steps: int,
    observe: Observer = lambda step, values: None,
    *,
    hold: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
  ) -> None:
    """Trains until `steps` updates were made in all.

    Args:
      steps: the number of the last step; nothing happens when it was reached before.
      observe: called after each step with its number and its metrics, `seconds` and
        `tokens_per_second`.
      hold: entered around each update and its reports, where model and step do not belong together:
        `Checkpointer.hold`.

    Raises:
      TrainError: the batches end too early, or a loss is not finite.
    """
    self.clock.start()
    # Metrics are read one step late, so that the devices always have the next step to work on.
    for number, batch in self._numbered_batches(steps):
      with hold():
        metrics = self._train_step(self.model, self.optimizer, batch)
        self.step, self.samples = number, self.samples + _batch_size(batch)
        self.report(observe)
        self._late = (number, metrics, self._tokens(batch))
    with hold():
      self.report(observe)

  def report(self, observe: Observer) -> None:
    """Reports the last step, if its metrics were not read yet.

    Raises:
      TrainError: its loss is not finite.
    """
    late, self._late = self._late, None
    if late is not None:
      self._report(late, observe)

  def _numbered_batches(self, steps: int) -> Iterator[tuple[int, Any]]:
    placed = nxp.batches(self._batches(self.samples), self.plan)
    for number in range(self.step + 1, steps + 1):
      batch = next(placed, None)
      if batch is None:
        raise TrainError(
          f"the batches of {self.recipe.name} ended after step {number - 1} of {steps}.",
          fix=f"--steps {number - 1}, or a batches() that goes on.",
        )
      yield number, batch

  def _report(self, late: tuple[int, Mapping[str, Any], int], observe: Observer) -> None:
    number, metrics, tokens = late
    values = _to_floats(metrics)
    values |= self.clock.tick(tokens)
    observe(number, values)
    if not math.isfinite(values["loss"]):
      raise TrainError(
        f"the loss of step {number} is {values['loss']}: training further is of no use.",
        details=", ".join(f"{k} {v:.4g}" for k, v in values.items()),
        fix="a lower learning rate or clipped gradients in optimizer(); then resume from a checkpoint.",
      )

  def evaluate(self) -> Record:
    """Mean metrics over the held-out batches, dropout off; empty when there are none."""
    quiet = nnx.view(self.model, deterministic=True, use_running_average=True, raise_if_not_found=False)
    totals: Record = {}
    samples = 0
    for batch in nxp.batches(self._batches(0, split="held_out"), self.plan):
      size = _batch_size(batch)
      for name, value in _to_floats(self._eval_step(quiet, batch)).items():
        totals[name] = totals.get(name, 0.0) + value * size
      samples += size
    return {name: total / samples for name, total in totals.items()}

  @property
  def unit(self) -> str:
    """What `tokens_per_second` counts."""
    return "samples" if self.recipe.tokens is None else "tokens"

  def _tokens(self, batch: Any) -> int:
    return self.recipe.tokens(batch) if self.recipe.tokens is not None else _batch_size(batch)


def _batch_size(batch: Any) -> int:
  return next(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim)


def _to_floats(metrics: Mapping[str, Any]) -> Record:
  # A compiled step returns its metrics sorted by name; the loss is what readers look for.
  names = sorted(metrics, key=lambda name: name != "loss")
  return {name: _to_float(metrics[name]) for name in names}


def _to_float(value: Any) -> float:
  if isinstance(value, tuple):
    total, count = value
    return float(total) / float(count)
  return float(value)
