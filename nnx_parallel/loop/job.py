"""A recipe on a mesh: planned, created or restored, trained by `fit`, evaluated, saved."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.nodes import variables
from nnx_parallel.core.types import AnyMetrics, Model, PyTree
from nnx_parallel.errors import RecipeError
from nnx_parallel.layout.constrain import default_scope
from nnx_parallel.layout.resolve import shard_counts
from nnx_parallel.layout.show.diff import PlanDiff
from nnx_parallel.loop.fit import resume_from
from nnx_parallel.loop.loader import Recipe
from nnx_parallel.loop.metrics import Record
from nnx_parallel.loop.recorder import Position


def rules_of(recipe: Recipe) -> Any:
  """The recipe's rules; `nxp.fsdp()` for a recipe without rules."""
  return recipe.rules() if recipe.rules is not None else nxp.fsdp()


def plan_recipe(recipe: Recipe, mesh: Any, rules: Any = None, **options: Any) -> nxp.Plan:
  """Plans a recipe's model and optimizer.

  Args:
    recipe: from `load_recipe`.
    mesh: as for `nxp.plan`.
    rules: the rules to use instead of the rules of the recipe.
    **options: more options of `nxp.plan`, such as `zero=1`.

  Returns:
    The plan.

  Raises:
    ShardingError: the rules do not fit.

  Example:
    >>> import nnx_parallel as nxp
    >>> recipe = nxp.recipes.load_recipe("text_lm")
    >>> plan = nxp.recipes.plan_recipe(recipe, nxp.abstract_mesh(data=2, fsdp=2, tensor=2))
    >>> plan["head.kernel"].spec
    P('fsdp', 'tensor')
  """
  rules = rules_of(recipe) if rules is None else rules
  optimizer = recipe.optimizer() if recipe.optimizer is not None else None
  return nxp.plan(recipe.init, mesh, rules, optimizer=optimizer, **options)


@dataclasses.dataclass
class Job:
  """A live model and its optimizer, at some step of the training that a recipe describes.

  Attributes:
    recipe: the recipe, from `load_recipe`; it gives the loss and the batches.
    plan: the plan, from `plan_recipe`.
    model: the live module.
    optimizer: its optimizer.
    microbatches: the number of microbatches of each global batch.
    position: the number of the step, and the number of samples used so far.
    settings: JSON values that say how the job runs, and that each checkpoint stores: the given settings, the
      mesh, the number of microbatches, the number of the last step, and the SHA-256 of the recipe's file (not
      of its imports).
    changes: settings that differ from the settings of the restored checkpoint, as text.
    relaid: how the layout differs from the layout of the checkpoint, if the checkpoint has another mesh.
    options: options of `train_step` for the layers, such as `remat` and `pipeline`. Held-out batches also
      pass through a pipeline, unless the microbatches do not divide them.
  """

  recipe: Recipe
  plan: nxp.Plan
  model: nnx.Module
  optimizer: nnx.Optimizer[Any]
  microbatches: int = 1
  position: Position = dataclasses.field(default_factory=Position)
  settings: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
  changes: list[str] = dataclasses.field(default_factory=list[str])
  relaid: PlanDiff | None = None
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

  def __post_init__(self) -> None:
    if self.recipe.loss is None or self.recipe.batches is None:
      raise RecipeError(
        f"the recipe {self.recipe.name} cannot be trained: it has no loss() or no batches().",
        fix="load it with load_recipe(spec), which checks both.",
      )
    own: dict[str, Any] = {"mesh": axis_sizes(self.plan.mesh), "microbatches": self.microbatches}
    source = Path(self.recipe.source)
    if source.is_file():  # a module may come from an archive
      own["source_sha256"] = hashlib.sha256(source.read_bytes()).hexdigest()
    self.settings = own | self.settings
    self._batches = self.recipe.batches
    self._train_step = nxp.train_step(
      self.recipe.loss, microbatches=self.microbatches, diagnostics=True, pairs=True, **self.options
    )
    kept = {name: x for name, x in self.options.items() if name not in ("remat", "pipeline")}
    make_eval_step = functools.partial(nxp.eval_step, self.recipe.loss, pairs=True, **kept)
    self._eval_step = self._piped_eval_step = make_eval_step()
    if pipeline := self.options.get("pipeline"):
      self._piped_eval_step = make_eval_step(microbatches=self.microbatches, pipeline=pipeline)
    # Made once: it shares the model's Variables, and for another object the step would be compiled again.
    self._quiet = nnx.view(self.model, deterministic=True, use_running_average=True, raise_if_not_found=False)

  @classmethod
  def start(cls, recipe: Recipe, plan: nxp.Plan, **options: Any) -> Self:
    """Makes a job at step 0, and creates the model in its shards.

    Args:
      recipe: from `load_recipe`.
      plan: from `plan_recipe`.
      **options: other attributes of the job, such as `microbatches=2`.

    Returns:
      The job.
    """
    model, optimizer = nxp.create_sharded_model(plan)
    return cls(recipe, plan, model, optimizer, **options)

  @classmethod
  def restore(
    cls,
    recipe: Recipe,
    plan: nxp.Plan,
    checkpointer: nxp.Checkpointer,
    step: int | str | None = "latest",
    *,
    microbatches: int | None = None,
    **options: Any,
  ) -> Self:
    """Restores a job from a checkpoint, in the layout of this plan.

    Settings may differ from the settings of the checkpoint: `changes` lists them.

    Args:
      recipe: from `load_recipe`.
      plan: from `plan_recipe`, on any mesh.
      checkpointer: the checkpointer of the job's folder.
      step: a number, or `"latest"` for the newest step that is not damaged.
      microbatches: the number of microbatches; None takes the number of the checkpoint. If the new mesh
        shards the batch over another number of devices, the number of microbatches changes too, so that a
        device has as many examples at a time as before. This happens only if the model has nothing but
        parameters, because dropout or batch statistics would give other gradients.
      **options: other attributes of the job.

    Returns:
      The job, at the step of the checkpoint.

    Raises:
      CheckpointError: there is no step to restore, or the step does not fit the plan.
    """
    (model, optimizer), position = resume_from(checkpointer, plan, step)
    record = checkpointer.metadata(position.step)
    settings = record.extra.get("settings")
    saved: dict[str, Any] = settings if isinstance(settings, dict) else {}
    before = None if record.plan is None else nxp.Plan.from_json(json.dumps(record.plan))
    moved = before is not None and axis_sizes(before.mesh) != axis_sizes(plan.mesh)
    if microbatches is None:
      microbatches = int(saved.get("microbatches", recipe.parts(None)))
      parameters_only = all(isinstance(leaf, nnx.Param) for leaf in variables(model).values())
      if before is not None and moved and parameters_only and not options.get("options", {}).get("pipeline"):
        shards = [shard_counts(one.batch_spec(1), 1, axis_sizes(one.mesh))[0] for one in (before, plan)]
        microbatches = adapted(
          microbatches, shards[0], shards[1], options.get("settings", saved).get("batch")
        )
    job = cls(recipe, plan, model, optimizer, microbatches, position, **options)
    job.changes = differences(saved, job.settings)
    job.relaid = before.diff(plan) if before is not None and moved else None
    return job

  def train(self, steps: int, *, progress: Any = False, **options: Any) -> nxp.loop.FitResult:
    """Trains by `nxp.fit`, up to the step `steps`.

    Args:
      steps: the number of the last step. If the job has already reached it, the call does nothing.
      progress: as for `fit`.
      **options: other arguments of `fit`: `trackers`, `checkpointer`, `eval_every` and so on.

    Returns:
      The result of `fit`.

    Raises:
      TrainError: the batches end too early, or a loss is not finite.
      CheckpointError: a step that cannot be saved.
    """
    self.settings["steps"] = steps
    return nxp.fit(
      self._train_step,
      self.model,
      self.optimizer,
      self._placed,
      steps=steps,
      plan=self.plan,
      start=self.position,
      tokens=self.recipe.tokens,
      extra=None if options.get("checkpointer") is None else self._extra,
      progress=progress,
      **options,
    )

  def check_gradients(self) -> nxp.verify.GradientCheck:
    """Checks on the next batch that the gradients are right on this layout. It trains nothing.

    Raises:
      TrainError: there is no batch.
    """
    batch = next(iter(self._placed(self.samples)), None)
    if batch is None:
      raise nxp.errors.TrainError(
        "the recipe has no batch to check gradients on.", fix="batches() with one or more batches."
      )
    with default_scope(self.plan.activation_rules):
      return self._train_step.check_gradients(self.model, self.optimizer, batch)

  def save(self, checkpointer: nxp.Checkpointer) -> None:
    """Saves everything that `restore` needs.

    Args:
      checkpointer: the checkpointer of the job's folder; raises like `Checkpointer.save`.
    """
    options = self.position.save_options(self._extra())
    checkpointer.save(model=self.model, optimizer=self.optimizer, plan=self.plan, **options)

  def evaluate(self) -> Record:
    """Returns the mean metrics over the held-out batches, without dropout; empty without such batches."""
    held_out = nxp.batches(self._batches(0, split="held_out"), self.plan, global_batch=True)
    with default_scope(self.plan.activation_rules):
      return nxp.evaluate(self._evaluated, self._quiet, held_out)

  def _evaluated(self, model: Model, batch: PyTree) -> AnyMetrics:
    fits = not any(x.shape[0] % self.microbatches for x in jax.tree.leaves(batch) if x.ndim)
    return (self._piped_eval_step if fits else self._eval_step)(model, batch)

  def _placed(self, samples: int) -> Iterator[PyTree]:
    # Each process makes the same global batches, and places its share of them. fit prefetches.
    return nxp.batches(self._batches(samples), self.plan, prefetch=0, global_batch=True)

  def _extra(self) -> dict[str, Any]:
    return {"recipe": self.recipe.name, "settings": dict(self.settings)}

  @property
  def step(self) -> int:
    """The number of updates so far."""
    return self.position.step

  @property
  def samples(self) -> int:
    """The number of samples that the job has used so far, on any meshes and in any batch sizes."""
    return self.position.samples

  @property
  def unit(self) -> str:
    """The unit of the speed that the progress shows per second."""
    return "samples" if self.recipe.tokens is None else "tokens"


def adapted(microbatches: int, before: int, after: int, batch: int | None) -> int:
  """The number of microbatches after the batch is split into `after` shards and no longer into `before`.

  It is the smallest that divides `batch` evenly and gives no device more examples at a time than it had.

  Example:
    >>> adapted(1, before=8, after=2, batch=32), adapted(4, before=2, after=8, batch=32), adapted(1, 8, 6, 24)
    (4, 1, 2)
  """
  least = -(-microbatches * before // after)
  if batch is None:
    return least
  return next((n for n in range(least, batch // after + 1) if batch % (n * after) == 0), least)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """The settings in both that differ, as text.

  Example:
    >>> differences({"microbatches": 1, "steps": 5}, {"microbatches": 2, "steps": 5, "zero": 1})
    ['microbatches 1 -> 2']
  """
  changed = [name for name in now if name in saved and saved[name] != now[name]]
  return [f"{name} {_text(saved[name])} -> {_text(now[name])}" for name in changed]


def _text(value: Any) -> str:
  if isinstance(value, dict):
    return ",".join(f"{axis}={size}" for axis, size in value.items())
  return value[:12] if isinstance(value, str) and len(value) == 64 else json.dumps(value)
