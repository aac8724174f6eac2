"""What one step does to traced objects: losses, gradients, optimizer updates."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx

from nnx_parallel.errors import TrainError
from nnx_parallel.layout.padding import is_padded
from nnx_parallel.layout.sharded_optimizer import ShardedOptimizer, placement_of, plain_update
from nnx_parallel.layout.tracing import NEEDS_VALUES
from nnx_parallel.layout.variables import Path, path_str, plain_path, variables
from nnx_parallel.train.accumulate import Layout, Objective, Total, in_microbatches, loss_of, whole_batch
from nnx_parallel.train.binding import Template
from nnx_parallel.train.diagnostics import diagnostics, merged
from nnx_parallel.train.gradients import Gradients
from nnx_parallel.train.jaxprs import forwarded
from nnx_parallel.train.loss_call import call_loss
from nnx_parallel.train.loss_scale import common_scale, rescaled, scaled_in_backward
from nnx_parallel.train.losses import Metrics, check_examples, examples_in, mean, means, pairs, terms
from nnx_parallel.train.remat import Policy, rematerialised

LossFn = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What a step was asked to do.

  Attributes:
    loss_fn: one loss function, or key -> loss function for several models trained in turn.
    microbatches: parts that each batch is split into.
    remat: what layers keep for the backward pass; see `with_remat`.
    outputs: names of metrics that are per-example arrays.
    gradients: `"scattered"` where gradients take the layout of their optimizer state as soon as they exist,
      `"whole"` where they keep that of their parameter; None: as the optimizer's plan says.
    reduction: dtype in which replicas sum their gradients, or None.
    pairs: whether metrics come as `(sum, count)` pairs.
    diagnostics: whether the norm of the gradients and the learning rate are among the metrics.
  """

  loss_fn: LossFn | Mapping[Any, LossFn]
  microbatches: int = 1
  remat: Policy = None
  outputs: tuple[str, ...] = ()
  gradients: Gradients | None = None
  reduction: Any = None
  pairs: bool = False
  diagnostics: bool = False


def update(recipe: Recipe, models: Any, optimizers: Any, batch: Any, layouts: Any) -> tuple[Metrics, str]:
  """Updates traced `models` and `optimizers` in place.

  Args:
    recipe: what to do.
    models: a module, or a tuple or dict of modules.
    optimizers: one optimizer; or, for several models, a tuple or dict with optimizers under the same keys.
    batch: the batch.
    layouts: `(paths of the trained arrays inside models, the ZeRO stage of each) -> Layout`, see `step.py`.

  Returns:
    Mean metrics, and how gradients were reduced.
  """
  check_examples(batch)
  if not isinstance(recipe.loss_fn, Mapping):
    return _update_once(recipe, recipe.loss_fn, models, keyed(models, optimizers), batch, layouts)
  metrics: Metrics = {}
  how = ""
  chosen = keyed(models, optimizers)
  for key, loss_fn in recipe.loss_fn.items():
    optimizer = of_loss(key, chosen)
    found, how = _update_once(recipe, loss_fn, models, {key: optimizer}, batch, layouts)
    metrics |= {f"{key}/{name}": value for name, value in found.items()}
  return metrics, how


def of_loss(key: Any, optimizers: Mapping[Any, Any]) -> Any:
  """The optimizer that goes with a loss.

  Raises:
    TrainError: there is none.
  """
  if key not in optimizers:
    raise TrainError(
      f"there is a loss for {key!r}, and no optimizer.",
      details=f"optimizers {list(optimizers)}",
      fix="use the same keys for the losses and the optimizers.",
    )
  return optimizers[key]


def keyed(models: Any, optimizers: Any) -> dict[Any, Any]:
  """Optimizers by the key of the model that they train; None for a single model.

  Raises:
    TrainError: optimizers that do not match the models.
  """
  several = isinstance(models, (tuple, list, dict))
  many = isinstance(optimizers, (tuple, list, dict))
  if not several and not many:
    return {None: optimizers}
  names = list(models) if isinstance(models, dict) else list(range(len(models))) if several else []
  found: dict[Any, Any] = {}
  if isinstance(optimizers, dict):
    found = dict(optimizers)
  elif many:
    found = dict(enumerate(optimizers))
  if not several or not many or not found or not set(found) <= set(names):
    raise TrainError(
      "models and optimizers do not match.",
      details=f"models {names or type(models).__name__},"
      f" optimizers {list(found) or type(optimizers).__name__}",
      fix='step({"gen": gen, "disc": disc}, {"gen": gen_opt, "disc": disc_opt}, batch); a model without an'
      " optimizer is not trained.",
    )
  return found


class Differentiable(NamedTuple):
  """The loss of traced models as a function of the arrays that are trained.

  Attributes:
    objective: what is differentiated; see `accumulate.Objective`.
    train: the trained arrays.
    others: the other arrays, and the loss scale if there is one.
    paths: the path of each trained array inside the models.
    template: the structure of the models.
    order: the leaf of the template for each of `others`, then for each of `train`.
    whole: whether the batch stays in one piece, and the objective is its mean loss; else it is a sum.
  """

  objective: Objective
  train: list[Any]
  others: list[Any]
  paths: list[Path]
  template: Template
  order: list[int]
  whole: bool

  @property
  def trained(self) -> list[int]:
    """The leaf of the template for each trained array."""
    return self.order[len(self.order) - len(self.train) :]


def differentiable(
  recipe: Recipe, loss_fn: LossFn, models: Any, wrt: Mapping[Any, Any], scale: Any = None
) -> Differentiable:
  """The loss of traced models as a function of the arrays that are trained.

  Args:
    recipe: what the step does.
    loss_fn: one loss function.
    models: a module, or a tuple or dict of modules.
    wrt: the filter of the Variables that are trained, by the key of their model; None for a single model.
    scale: what the loss is multiplied by, or None.

  Returns:
    The function and its arguments.

  Raises:
    TrainError: nothing to train, or what has no gradient.
  """
  template = Template(models)
  arrays = template.arrays(models)
  trained = [i for i in range(len(arrays)) if _is_trained(template, i, wrt)]
  _check_trained(template, trained, wrt)
  rest = [i for i in range(len(arrays)) if i not in set(trained)]
  order = [*rest, *trained]
  whole = recipe.microbatches == 1 and recipe.reduction is None

  def objective(train: list[Any], others: list[Any], part: Any, *, exact: bool = True) -> Any:
    merged = [*arrays]
    # The scale travels with the arrays: a manual program closes over nothing.
    factor, others = (None, others) if scale is None else (others[-1], others[:-1])
    for i, array in zip([*trained, *rest], [*train, *others], strict=True):
      merged[i] = array
    inner = template.build(merged)
    found = terms(call_loss(loss_fn, inner, part), recipe.outputs)
    after = template.arrays(inner)
    changed = {n: after[i] for n, i in enumerate(order) if after[i] is not merged[i]}
    if not whole and exact and max(changed, default=-1) >= len(rest):
      # Perhaps only the outputs of `nnx.remat`, which returns every Variable that it gets.
      same = _unchanged(functools.partial(objective, exact=False), train, others, part, len(rest))
      changed = {n: array for n, array in changed.items() if n not in same}
    if not whole and exact and max(changed, default=-1) >= len(rest):
      raise TrainError(
        f"the loss function assigned to {path_str(template.paths[order[max(changed)]])}, which the optimizer"
        f" trains: the gradients of {recipe.microbatches} microbatches would be those of different models.",
        fix="microbatches=1 without reduction=; or leave it out of the optimizer's wrt.",
      )
    loss, count = found.sums["loss"], found.counts["loss"]
    if whole:
      loss, count = mean(loss, count), None
    elif factor is None:
      count = None
    elif count is not None:
      loss = mean(loss, count)  # a scaled sum over many examples would overflow
    return loss if factor is None else loss * factor.astype(loss.dtype), (found, changed, count)

  train, others = [arrays[i] for i in trained], [arrays[i] for i in rest]
  if scale is not None:
    others.append(scale)
  paths = [template.paths[i] for i in trained]
  return Differentiable(rematerialised(objective, recipe.remat), train, others, paths, template, order, whole)


def gradients_of(
  recipe: Recipe, loss: Differentiable, optimizers: dict[Any, Any], batch: Any, layouts: Any
) -> tuple[Total, list[Any]]:
  """What a step differentiates, and the gradient of the mean loss for each trained array.

  Args:
    recipe: what the step does.
    loss: what is differentiated.
    optimizers: by the key of the model that they train; they say where gradients lie.
    batch: the batch.
    layouts: as for `update`.

  Returns:
    Sums over the parts of the batch, and the gradients, multiplied by the loss scale if there is one.
  """
  stages = {key: _stage(optimizer) for key, optimizer in optimizers.items()}
  layout: Layout = layouts(loss.paths, [stages[None if None in stages else path[0]] for path in loss.paths])
  if loss.whole:
    total = whole_batch(loss.objective, loss.train, loss.others, batch, layout)
  else:
    total = in_microbatches(
      loss.objective, loss.train, loss.others, batch, recipe.microbatches, layout, recipe.reduction
    )
  return total, _scaled(total, loss.train)


def _update_once(
  recipe: Recipe, loss_fn: LossFn, models: Any, optimizers: dict[Any, Any], batch: Any, layouts: Any
) -> tuple[Metrics, str]:
  scale = common_scale(optimizers.values())
  wrt = {key: optimizer.wrt for key, optimizer in optimizers.items()}
  loss = differentiable(recipe, loss_fn, models, wrt, scale)
  for key, optimizer in optimizers.items():
    _check_state(optimizer, models if key is None else models[key], key)
  template, trained, train, others = loss.template, loss.trained, loss.train, loss.others
  total, grads = gradients_of(recipe, loss, optimizers, batch, layouts)
  for n, value in total.rest.items():
    leaf = template.leaves[loss.order[n]]
    if not isinstance(leaf, nnx.Variable):
      raise TrainError(
        f"the loss function replaced {path_str(template.paths[loss.order[n]])}, a raw array.",
        details="only Variables are written back after a step",
        fix="store it as nnx.Variable(...): then each step updates it.",
      )
    leaf.set_raw_value(value)
  metrics = means(total.terms, total.parts)
  noted: Metrics = {}
  for key, optimizer in optimizers.items():
    mine = [n for n, i in enumerate(trained) if key is None or template.paths[i][0] == key]
    own = rescaled([grads[n] for n in mine], optimizer, scale)
    leaves = [template.leaves[trained[n]].copy(grad) for n, grad in zip(mine, own, strict=True)]
    model = models if key is None else models[key]

    def value_fn(params: Any, mine: list[int] = mine) -> Any:
      replaced = [*train]
      for n, value in zip(mine, jax.tree.leaves(params), strict=True):
        replaced[n] = value if scale is None else scaled_in_backward(value, 1 / scale)
      value = loss_of(loss.objective, replaced, others, batch, recipe.microbatches)
      return value if scale is None else scaled_in_backward(value, scale)

    apply(optimizer, model, _state([loss.paths[n] for n in mine], leaves, key), metrics["loss"], value_fn)
    if recipe.diagnostics:
      noted |= diagnostics(optimizer, own, f"{key}/" if len(optimizers) > 1 else "")
  if recipe.pairs:
    examples = examples_in(batch)
    metrics = pairs(total.terms, total.parts, examples)
    noted = {name: (value * examples, jnp.full_like(value, examples)) for name, value in noted.items()}
  return merged(metrics, noted), total.how


def _unchanged(objective: Any, train: list[Any], others: list[Any], part: Any, rest: int) -> set[int]:
  """Positions, first those of the `rest`, of arrays that the objective gives back as it got them."""

  def given_back(train: list[Any], others: list[Any], part: Any) -> Any:
    return objective(train, others, part)[1][1]

  traced, shape = jax.make_jaxpr(given_back, return_shape=True)(train, others, part)
  inputs = [*range(rest, rest + len(train)), *range(len(others))]  # the position of each input
  found = zip(shape, forwarded(traced), strict=True)
  return {n for n, source in found if source is not None and source < len(inputs) and inputs[source] == n}


def _stage(optimizer: Any) -> int:
  """The ZeRO stage of the plan that an optimizer was made from; 0 without one."""
  placement = placement_of(optimizer)
  return 0 if placement is None else placement.zero


def _is_trained(template: Template, i: int, wrt: Mapping[Any, Any]) -> bool:
  path: Any = template.paths[i]
  leaf = template.leaves[i]
  for key, chosen in wrt.items():
    if key is None:
      return bool(nnx.filterlib.to_predicate(chosen)(path, leaf))
    if path[0] == key:
      return bool(nnx.filterlib.to_predicate(chosen)(path[1:], leaf))
  return False


def _check_trained(template: Template, trained: list[int], wrt: Mapping[Any, Any]) -> None:
  if not trained:
    raise TrainError(
      f"the optimizer's wrt={', '.join(map(str, wrt.values()))} matches no Variable of the model.",
      details=f"Variable types: {', '.join(sorted({type(leaf).__name__ for leaf in template.leaves}))}",
      fix="nnx.Optimizer(model, tx, wrt=nnx.Param)",
    )
  for i in trained:
    dtype = template.leaves[i].get_raw_value().dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
      raise TrainError(
        f"{path_str(template.paths[i])} is {dtype}, which has no gradient.",
        fix="give it another Variable type than those that the optimizer trains.",
      )


def _check_state(optimizer: Any, model: Any, key: Any) -> None:
  """Refuses an optimizer whose state is that of other parameters: of the model before an edit, of another."""
  parameters = nnx.as_pure(nnx.state(model, optimizer.wrt))
  try:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      needed = _shapes(jax.eval_shape(optimizer.tx.init, parameters))
  except NEEDS_VALUES:  # nobody can say then what it would hold
    return
  held = _shapes(nnx.as_pure(optimizer.opt_state))
  padded = any(map(is_padded, variables(model).values()))  # then the two may count the padding differently
  absent = [path for path in needed if path not in held]
  left = [path for path in held if path not in needed]
  other = [p for p in needed if not padded and p in held and held[p] != needed[p]]
  if not absent and not left and not other:
    return
  lines = [f"{path_str(path)}: not in the state, and a parameter of the model needs it" for path in absent]
  lines += [f"{path_str(path)}: in the state, and no parameter of the model needs it" for path in left]
  lines += [f"{path_str(path)}: shape {held[path]}, and its parameter needs {needed[path]}" for path in other]
  more = [f"... and {len(lines) - 5} more"] if len(lines) > 5 else []
  fix = "optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param), made after the change: its state starts anew."
  if isinstance(optimizer, ShardedOptimizer):
    fix = "plan = nxp.plan(edited_init, mesh, rules, optimizer=tx)\nnew = nxp.create_sharded_model(plan)"
    if not left and not other:
      fix += "\nnnx.update(new, nnx.state((model, optimizer))), which carries over what was trained."
  which = "the optimizer" if key is None else f"the optimizer of {key!r}"
  raise TrainError(
    f"the state of {which} is not that of the parameters that it trains: the model, wrt or tx was changed"
    " after the optimizer was made, or it is another model's.",
    details="\n".join([*lines[:5], *more]),
    fix=fix,
  )


def _shapes(state: Any) -> dict[Path, tuple[int, ...]]:
  flat = jax.tree_util.tree_leaves_with_path(state)
  return {plain_path(path): tuple(jnp.shape(leaf)) for path, leaf in flat}


def _scaled(total: Total, train: list[Any]) -> list[Any]:
  if total.parts == 1:
    return total.grads
  count = total.terms.counts["loss"]
  scale = mean(jnp.ones_like(total.terms.sums["loss"]), count) if count is not None else 1.0 / total.parts
  return [(g * jnp.asarray(scale, g.dtype)).astype(x.dtype) for g, x in zip(total.grads, train, strict=True)]


def _state(paths: list[Path], leaves: list[Any], key: Any) -> Any:
  flat: list[Any] = [
    (path if key is None else path[1:], leaf) for path, leaf in zip(paths, leaves, strict=True)
  ]
  return nnx.from_flat_state(flat)


def apply(optimizer: Any, model: Any, grads: Any, loss: Any, value_fn: Callable[[Any], Any]) -> None:
  """Updates a traced model; optimizers that search along a line also get the loss and its function.

  Args:
    optimizer: an `nnx.Optimizer`.
    model: the module that it trains.
    grads: a state of gradients.
    loss: the loss, a scalar.
    value_fn: the loss as a function of the parameters.
  """
  _check_transformation(optimizer)
  extra: dict[str, Any] = {}
  if isinstance(optimizer.tx, optax.GradientTransformationExtraArgs):
    given = {"value": loss, "grad": nnx.as_pure(grads), "value_fn": value_fn}
    extra = extra_arguments(optimizer.tx, optimizer.opt_state, given)
  # optax raises a Python float to an int32 power, and multiplies arrays of shape (1,) with matrices: a
  # user's strict promotion would refuse both.
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    # The program's outputs are laid out as its inputs; a constraint here would say so twice.
    plain_update(optimizer, model, grads, extra)


def extra_arguments(tx: Any, state: Any, given: dict[str, Any]) -> dict[str, Any]:
  """The named arguments for an update: most take any, some want other names, line searches refuse those.

  Args:
    tx: the transformation.
    state: its state.
    given: `value`, `grad` and `value_fn`.

  Returns:
    What to pass to `tx.update`.
  """
  value_fn = given["value_fn"]
  parameters = inspect.signature(tx.update).parameters
  closed = not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  # SAM, alone or inside a wrapper, which leaves out what SAM refuses.
  if closed or _holds(optax.contrib.SAMState, state):
    given = given | {"grad_fn": lambda params, _: jax.grad(value_fn)(params)}
  if closed:
    return {name: value for name, value in given.items() if name in parameters}
  if _holds(optax.contrib.HutchinsonState, state):  # Sophia
    return given | {"obj_fn": value_fn}
  return given


def _holds(kind: type, state: Any) -> bool:
  def matches(node: Any) -> bool:
    return isinstance(node, kind)

  return any(map(matches, jax.tree.leaves(state, is_leaf=matches)))


def _check_transformation(optimizer: Any) -> None:
  if _holds(optax.LookaheadState, optimizer.opt_state):
    raise TrainError(
      "optax.lookahead keeps two copies of the parameters, which nnx.Optimizer cannot give it.",
      details="its update needs optax.LookaheadParams(fast, slow) in place of the model's parameters",
      fix="use the fast optimizer alone; nnx.clone(model) and optax.incremental_update keep a slow copy.",
    )
