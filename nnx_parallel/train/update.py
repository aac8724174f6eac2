"""One step on traced objects: losses, gradients, optimizer updates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx

from nnx_parallel.core.nodes import Path, parts_of_type, path_str, plain_path, variables
from nnx_parallel.core.padding import is_padded
from nnx_parallel.core.types import Model, Optimizer, Optimizers, PyTree
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.layers import LayersUsed
from nnx_parallel.layout.sharded_optimizer import ShardedOptimizer, placement_of, plain_update
from nnx_parallel.layout.tracing import NEEDS_VALUES
from nnx_parallel.optimizers.loss_scale import common_scale, find_scale, rescale, scale_in_backward
from nnx_parallel.train import losses
from nnx_parallel.train.gradients import StepLayout, Total, in_microbatches, loss_of, whole_batch
from nnx_parallel.train.losses import Metrics, mean
from nnx_parallel.train.options import LossFn, StepOptions
from nnx_parallel.train.trace import Arrays, Differentiable, differentiable, trained_by

T = TypeVar("T")


def update(
  options: StepOptions, models: Model, optimizers: Optimizers, batch: PyTree, layout: StepLayout
) -> tuple[Metrics, str, LayersUsed]:
  """Updates traced `models` and `optimizers` in place; several are in tuples or dicts with the same keys."""
  # Returns metrics, how gradients were reduced, and how layers were computed.
  losses.check_examples(batch)
  if not isinstance(options.loss_fn, Mapping):
    return _update_once(options, options.loss_fn, models, by_key(models, optimizers), batch, layout)
  metrics: Metrics = {}
  how, layers = "", LayersUsed()
  chosen = by_key(models, optimizers)
  for key, loss_fn in options.loss_fn.items():
    optimizer = of_loss(key, chosen)
    found, how, layers = _update_once(options, loss_fn, models, {key: optimizer}, batch, layout)
    metrics |= {f"{key}/{name}": value for name, value in found.items()}
  return metrics, how, layers


def of_loss(key: Hashable, optimizers: Mapping[Hashable, T]) -> T:
  """The optimizer of a loss; a `TrainError` if there is none."""
  if key not in optimizers:
    raise TrainError(
      f"there is a loss for {key!r}, and no optimizer.",
      details=f"optimizers {list(optimizers)}",
      fix="use the same keys for the losses and the optimizers.",
    )
  return optimizers[key]


def by_key(models: Model, optimizers: Optimizers) -> dict[Hashable, Optimizer]:
  """Optimizers by the key of the model that they train; None for a single model."""
  several = isinstance(models, (tuple, list, dict))
  many = isinstance(optimizers, (tuple, list, dict))
  if not several and not many:
    return {None: optimizers}
  names = list(models) if isinstance(models, dict) else list(range(len(models))) if several else []
  found: dict[Hashable, Optimizer] = {}
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


def gradients_of(
  options: StepOptions, loss: Differentiable, batch: PyTree, layout: StepLayout
) -> tuple[Total, Arrays]:
  """The sums over the parts of a batch, and the gradient of the mean loss for each trained array."""
  # The gradients are multiplied by the loss scale, if there is one.
  layout = layout.of(loss)
  if options.in_one_piece:
    total = whole_batch(loss, batch, layout)
  else:
    total = in_microbatches(loss, batch, options.turns, layout, options.reduction)
  return total, _scale(total, loss.train)


def _update_once(
  options: StepOptions,
  loss_fn: LossFn,
  models: Model,
  optimizers: dict[Hashable, Optimizer],
  batch: PyTree,
  layout: StepLayout,
) -> tuple[Metrics, str, LayersUsed]:
  scale = common_scale(optimizers.values())
  wrt = {key: optimizer.wrt for key, optimizer in optimizers.items()}
  loss = differentiable(options, loss_fn, models, wrt, scale, layout.gather)
  for key, optimizer in optimizers.items():
    _check_state(optimizer, models if key is None else models[key], key)
  template = loss.template
  total, grads = gradients_of(options, loss, batch, layout)
  for i, value in total.rest.items():
    leaf = template.leaves[i]
    if not isinstance(leaf, nnx.Variable):
      if value is loss.rest[i]:  # `nnx.jit` and `nnx.remat` return every array
        continue
      raise TrainError(
        f"the loss function replaced {path_str(template.paths[i])}, a raw array.",
        details="only Variables are written back after a step",
        fix="store it as nnx.Variable(...): then each step updates it.",
      )
    leaf.set_raw_value(value)
  metrics = losses.means(total.terms, total.parts)
  noted: Metrics = {}
  for key, optimizer in optimizers.items():
    places = trained_by(template, models, key, wrt[key])
    mine = [*places.values()]
    own = rescale([grads[i] for i in mine], optimizer, scale)
    leaves = [template.leaves[i].copy(grad) for i, grad in zip(mine, own, strict=True)]
    model = models if key is None else models[key]

    def value_fn(params: PyTree, mine: list[int] = mine) -> jax.Array:
      values = jax.tree.leaves(params)
      if scale is not None:
        values = [scale_in_backward(value, 1 / scale) for value in values]
      replaced = {**loss.train, **dict(zip(mine, values, strict=True))}
      value = loss_of(loss._replace(train=replaced), batch, options.turns)
      return value if scale is None else scale_in_backward(value, scale)

    factor = find_scale(optimizer)
    flat: Any = [*zip(places, leaves, strict=True)]
    state = nnx.from_flat_state(flat)
    apply(optimizer, model, state, metrics["loss"], value_fn)
    if options.diagnostics:
      noted |= losses.diagnostics(optimizer, own, factor, f"{key}/" if len(optimizers) > 1 else "")
  if options.pairs:
    metrics = losses.pairs(total.terms, batch, total.parts)
    examples = losses.examples_in(batch)
    noted = {name: (value * examples, jnp.full_like(value, examples)) for name, value in noted.items()}
  return losses.merge(metrics, noted), total.how, loss.layers


def _check_state(optimizer: Optimizer, model: Model, key: Hashable) -> None:
  """Refuses an optimizer whose state is for other parameters: before an edit, or of another model."""
  parameters = nnx.as_pure(nnx.state(model, optimizer.wrt))
  if placement_of(optimizer) is not None:  # made at the shapes without padding
    state = nnx.state(model, optimizer.wrt)
    parameters = nnx.as_pure(nnx.map_state(lambda _, x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))
  try:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      needed = _shapes(jax.eval_shape(optimizer.tx.init, parameters))
  except NEEDS_VALUES:  # abstract parameters do not give its shapes
    return
  held = _shapes(nnx.as_pure(optimizer.opt_state))
  # Where arrays are padded, the two may count the padding differently.
  padded = any(map(is_padded, (*variables(model).values(), *variables(optimizer).values())))
  absent = [path for path in needed if path not in held]
  left = [path for path in held if path not in needed]
  other = [p for p in needed if not padded and p in held and held[p] != needed[p]]
  if not absent and not left and not other:
    return
  lines = [f"{path_str(path)}: not in the state, but a parameter of the model needs it" for path in absent]
  lines += [f"{path_str(path)}: in the state, but no parameter of the model needs it" for path in left]
  lines += [f"{path_str(path)}: shape {held[path]}, but its parameter needs {needed[path]}" for path in other]
  more = [f"... and {len(lines) - 5} more"] if len(lines) > 5 else []
  fix = "optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param), made after the change: its state starts anew."
  if isinstance(optimizer, ShardedOptimizer):
    fix = "plan = nxp.plan(edited_init, mesh, rules, optimizer=tx)\nnew = nxp.create_sharded_model(plan)"
    if not left and not other:
      fix += "\nnnx.update(new, nnx.state((model, optimizer))), which carries over the trained values."
  which = "the optimizer" if key is None else f"the optimizer of {key!r}"
  raise TrainError(
    f"the state of {which} does not fit the parameters that it trains: the model, wrt or tx was changed"
    " after the optimizer was made, or it is another model's.",
    details="\n".join([*lines[:5], *more]),
    fix=fix,
  )


def _shapes(state: PyTree) -> dict[Path, tuple[int, ...]]:
  flat = jax.tree_util.tree_leaves_with_path(state)
  return {plain_path(path): tuple(jnp.shape(leaf)) for path, leaf in flat}


def _scale(total: Total, train: Arrays) -> Arrays:
  if total.parts == 1:
    return total.grads
  count = total.terms.counts["loss"]
  scale = mean(jnp.ones_like(total.terms.sums["loss"]), count) if count is not None else 1.0 / total.parts
  return {i: (g * jnp.asarray(scale, g.dtype)).astype(train[i].dtype) for i, g in total.grads.items()}


def apply(
  optimizer: Optimizer, model: Model, grads: PyTree, loss: jax.Array, value_fn: Callable[[PyTree], jax.Array]
) -> None:
  """Updates a traced model; optimizers that search along a line also get the loss and its function."""
  if parts_of_type(optimizer.opt_state, optax.LookaheadState):
    raise TrainError(
      "optax.lookahead keeps two copies of the parameters, which nnx.Optimizer cannot give it.",
      details="its update needs optax.LookaheadParams(fast, slow) in place of the model's parameters",
      fix="use the fast optimizer alone; nnx.clone(model) and optax.incremental_update keep a slow copy.",
    )
  extra: dict[str, Any] = {}
  if isinstance(optimizer.tx, optax.GradientTransformationExtraArgs):
    given = {"value": loss, "grad": nnx.as_pure(grads), "value_fn": value_fn}
    extra = extra_arguments(optimizer.tx, optimizer.opt_state, given)
  # optax raises a Python float to an int32 power, and multiplies arrays of shape (1,) with matrices: a
  # user's strict promotion would refuse both.
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    # The program's outputs are laid out as its inputs; a constraint here would say so twice.
    plain_update(optimizer, model, grads, extra)


# Arguments besides `value`, `grad` and `value_fn`, by the state of the transformation that needs them: optax
# cannot say which arguments a transformation needs, and line searches refuse unknown arguments.
_NEEDED_BY_STATE: dict[type, tuple[str, Callable[[Any], Any]]] = {
  optax.contrib.SAMState: ("grad_fn", lambda value_fn: lambda params, _: jax.grad(value_fn)(params)),
  optax.contrib.HutchinsonState: ("obj_fn", lambda value_fn: value_fn),  # of Sophia
}


def extra_arguments(tx: optax.GradientTransformation, state: PyTree, given: dict[str, Any]) -> dict[str, Any]:
  """The named arguments for `tx.update`, from `value`, `grad` and `value_fn`."""
  parameters = inspect.signature(tx.update).parameters
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  more = {
    name: make(given["value_fn"])
    for kind, (name, make) in _NEEDED_BY_STATE.items()
    if parts_of_type(state, kind) or not takes_any
  }
  return {name: x for name, x in {**given, **more}.items() if takes_any or name in parameters}
