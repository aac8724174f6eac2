"""Runs of recipes: planned, created or restored on any mesh; `Run.train` trains them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.nodes import variables
from nnx_parallel.core.types import AnyMetrics, Model, PyTree
from nnx_parallel.errors import RecipeError
from nnx_parallel.layout.constrain import default_scope
from nnx_parallel.layout.resolve import count_shards_by_dim
from nnx_parallel.layout.show.diff import PlanDiff
from nnx_parallel.loop.fit import resume_from
from nnx_parallel.loop.loader import Recipe
from nnx_parallel.loop.metrics import Record
from nnx_parallel.loop.run import Position, Run
from nnx_parallel.loop.sums import in_evaluation_mode


def rules_of(recipe: Recipe) -> Any:
  """The recipe's rules; `nxp.fsdp()` for a recipe without rules."""
  return recipe.rules() if recipe.rules is not None else nxp.fsdp()


@check_arguments(RecipeError)
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


class Resumed(NamedTuple):
  """How a run that was restored differs from the run that was saved.

  Attributes:
    run: the run, at the step of the checkpoint.
    changes: settings that differ, as text.
    relaid: how the layout differs, if the checkpoint has another mesh; else None.
  """

  run: Run
  changes: list[str]
  relaid: PlanDiff | None


@check_arguments(RecipeError)
def start(
  recipe: Recipe,
  plan: nxp.Plan,
  *,
  microbatches: int = 1,
  settings: Mapping[str, Any] | None = None,
  options: Mapping[str, Any] | None = None,
) -> Run:
  """Makes a run at step 0, and creates the model in its shards.

  Args:
    recipe: from `load_recipe`; it gives the loss and the batches.
    plan: from `plan_recipe`.
    microbatches: the number of microbatches of each global batch.
    settings: JSON values that say how the run trains. Each checkpoint stores them, with the mesh, the number
      of microbatches, the number of the last step, and the SHA-256 of the recipe's file (not of its imports).
    options: options of `train_step` for the layers, such as `remat` and `pipeline`. Held-out batches also
      pass through a pipeline, unless the microbatches do not divide them.

  Returns:
    The run: `run.train(steps)` trains it, `run.evaluate()` gives the mean metrics over the held-out batches
    without dropout (none without such batches), and `run.save(checkpointer)` saves it.

  Raises:
    RecipeError: the recipe cannot be trained.

  Example:
    >>> import nnx_parallel as nxp
    >>> recipe = nxp.recipes.load_recipe("starter")
    >>> plan = nxp.recipes.plan_recipe(recipe, nxp.make_mesh(fsdp=8))
    >>> run = nxp.recipes.start(recipe, plan)
    >>> run.train(2).step, run.at.step
    (2, 2)
  """
  model, optimizer = nxp.create_sharded_model(plan)
  return _run_of(recipe, plan, model, optimizer, microbatches, Position(), settings, options)


@check_arguments(RecipeError)
def restore(
  recipe: Recipe,
  plan: nxp.Plan,
  checkpointer: nxp.Checkpointer,
  step: int | str | None = "latest",
  *,
  microbatches: int | None = None,
  settings: Mapping[str, Any] | None = None,
  options: Mapping[str, Any] | None = None,
) -> Resumed:
  """Restores a run from a checkpoint, in the layout of this plan. Its settings may differ.

  Args:
    recipe: from `load_recipe`.
    plan: from `plan_recipe`, on any mesh.
    checkpointer: the checkpointer of the run's folder.
    step: a number, or `"latest"` for the newest step that is not damaged.
    microbatches: the number of microbatches; None takes the number of the checkpoint. If the new mesh
      shards the batch over another number of devices, the number of microbatches changes too, so that a
      device has as many examples at a time as before. This happens only if the model has nothing but
      parameters, because dropout or batch statistics would give other gradients.
    settings: as for `start`.
    options: as for `start`.

  Returns:
    The run, at the step of the checkpoint, and what differs.

  Raises:
    CheckpointError: there is no step to restore, or the step does not fit the plan.

  Example:
    >>> import tempfile
    >>> import jax, nnx_parallel as nxp
    >>> recipe = nxp.recipes.load_recipe("starter")
    >>> meshes = [nxp.make_mesh(fsdp=n, devices=jax.devices()[:n]) for n in (8, 2)]
    >>> plans = [nxp.recipes.plan_recipe(recipe, mesh) for mesh in meshes]
    >>> with nxp.Checkpointer(tempfile.mkdtemp()) as checkpointer:
    ...   nxp.recipes.start(recipe, plans[0]).save(checkpointer)
    ...   found = nxp.recipes.restore(recipe, plans[1], checkpointer)
    >>> found.changes
    ['mesh fsdp=8 -> fsdp=2', 'microbatches 1 -> 4']
  """
  (model, optimizer), position = resume_from(checkpointer, plan, step)
  record = checkpointer.metadata(position.step)
  stored = record.extra.get("settings")
  saved: dict[str, Any] = stored if isinstance(stored, dict) else {}
  before = None if record.plan is None else nxp.Plan.from_json(json.dumps(record.plan))
  moved = before is not None and axis_sizes(before.mesh) != axis_sizes(plan.mesh)
  if microbatches is None:
    microbatches = int(saved.get("microbatches", recipe.parts(None)))
    parameters_only = all(isinstance(leaf, nnx.Param) for leaf in variables(model).values())
    if before is not None and moved and parameters_only and not (options or {}).get("pipeline"):
      shards = [count_shards_by_dim(one.batch_spec(1), 1, axis_sizes(one.mesh))[0] for one in (before, plan)]
      batch = (saved if settings is None else settings).get("batch")
      microbatches = adapt_microbatches(microbatches, shards[0], shards[1], batch)
  run = _run_of(recipe, plan, model, optimizer, microbatches, position, settings, options)
  relaid = before.diff(plan) if before is not None and moved else None
  return Resumed(run, list_differences(saved, run.settings), relaid)


def _run_of(
  recipe: Recipe,
  plan: nxp.Plan,
  model: Any,
  optimizer: Any,
  microbatches: int,
  position: Position,
  settings: Mapping[str, Any] | None,
  options: Mapping[str, Any] | None,
) -> Run:
  if recipe.loss is None or recipe.batches is None:
    raise RecipeError(
      f"the recipe {recipe.name} cannot be trained: it has no loss() or no batches().",
      fix="load it with load_recipe(spec), which checks both.",
    )
  own: dict[str, Any] = {"mesh": axis_sizes(plan.mesh), "microbatches": microbatches}
  source, batches = Path(recipe.source), recipe.batches
  if source.is_file():  # a module may come from an archive
    own["source_sha256"] = hashlib.sha256(source.read_bytes()).hexdigest()

  def placed(samples: int) -> Iterator[PyTree]:
    # Each process makes the same global batches, and places its share of them. fit prefetches.
    return nxp.batches(batches(samples), plan, prefetch=0, global_batch=True)

  options = options or {}
  return Run(
    step=nxp.train_step(recipe.loss, microbatches=microbatches, diagnostics=True, pairs=True, **options),
    model=model,
    optimizer=optimizer,
    batches=placed,
    at=position,
    settings=own | dict(settings or {}),
    plan=plan,
    evaluate=_evaluation(recipe, plan, model, microbatches, options),
    extra=lambda: {"recipe": recipe.name},
    tokens=recipe.tokens,
  )


def _evaluation(
  recipe: Recipe, plan: nxp.Plan, model: nnx.Module, microbatches: int, options: Mapping[str, Any]
) -> Callable[[], Record]:
  """The mean metrics over the held-out batches, without dropout; through a pipeline, if they fit it."""
  kept = {name: x for name, x in options.items() if name not in ("remat", "pipeline")}
  assert recipe.loss is not None
  make = functools.partial(nxp.eval_step, in_evaluation_mode(recipe.loss), pairs=True, **kept)
  whole = piped = make()
  if pipeline := options.get("pipeline"):
    piped = make(microbatches=microbatches, pipeline=pipeline)

  def step(model: Model, batch: PyTree) -> AnyMetrics:
    fits = not any(x.shape[0] % microbatches for x in jax.tree.leaves(batch) if x.ndim)
    return (piped if fits else whole)(model, batch)

  def evaluate() -> Record:
    assert recipe.batches is not None
    held_out = nxp.batches(recipe.batches(0, split="held_out"), plan, global_batch=True)
    with default_scope(plan.activation_rules):
      return nxp.evaluate(step, model, held_out)

  return evaluate


def adapt_microbatches(microbatches: int, before: int, after: int, batch: int | None) -> int:
  """The fewest microbatches in `after` shards that give no device more examples than in `before` shards."""
  least = -(-microbatches * before // after)
  if batch is None:
    return least
  return next((n for n in range(least, batch // after + 1) if batch % (n * after) == 0), least)


def list_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """The settings in both that differ, as text: "microbatches 1 -> 2"."""
  changed = [name for name in now if name in saved and saved[name] != now[name]]
  return [f"{name} {_text(saved[name])} -> {_text(now[name])}" for name in changed]


def _text(value: Any) -> str:
  if isinstance(value, dict):
    return ",".join(f"{axis}={size}" for axis, size in value.items())
  return value[:12] if isinstance(value, str) and len(value) == 64 else json.dumps(value)
