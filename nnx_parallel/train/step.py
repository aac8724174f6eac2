"""Train and eval steps: one compiled program, donated state, pinned layouts, and a module that stays live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.errors import TrainError
from nnx_parallel.layout.variables import path_str, value_of, variables

LossFn = Callable[[Any, Any], Any]
Metrics = dict[str, Any]


class TrainStep:
  """A compiled train step; made by `train_step`."""

  def __init__(self, loss_fn: LossFn, *, microbatches: int = 1):
    if microbatches < 1:
      raise TrainError(f"microbatches={microbatches} is not a positive number.", fix="microbatches=1")
    self.loss_fn, self.microbatches = loss_fn, microbatches
    self._bound: _Bound | None = None

  def __call__(self, model: nnx.Module, optimizer: nnx.Optimizer[Any], batch: Any) -> Metrics:
    """Updates `model` and `optimizer` in place with the gradients of one batch.

    Args:
      model: a live module.
      optimizer: its optimizer.
      batch: a pytree of arrays, global batch on dim 0.

    Returns:
      Metrics on device: `loss`, and what the loss function returned.
    """
    self._check_batch(batch)
    if self._bound is None or not self._bound.is_for(model, optimizer):
      self._bound = _Bound(self, model, optimizer)
    return self._bound(batch)

  def lower(self, model: Any, optimizer: Any, batch: Any) -> Any:
    """Lowers the step for these arguments, which may be abstract, without running it.

    Args:
      model: a live module.
      optimizer: its optimizer.
      batch: a pytree of arrays or `ShapeDtypeStruct`s.

    Returns:
      A `jax.stages.Lowered`; `.compile()` gives memory and cost.
    """
    bound = _Bound(self, model, optimizer)
    return bound.jitted.lower(bound.read(), batch)

  def _check_batch(self, batch: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
      shape = getattr(leaf, "shape", None)
      if shape is None or not shape:
        continue
      if shape[0] % self.microbatches:
        raise TrainError(
          f"batch{jax.tree_util.keystr(path)} has {shape[0]} examples, which {self.microbatches} microbatches"
          " cannot split evenly.",
          details=f"shape {shape}",
          fix=f"a global batch of {shape[0] + -shape[0] % self.microbatches}, or fewer microbatches.",
        )


def train_step(loss_fn: LossFn, *, microbatches: int = 1) -> TrainStep:
  """Makes a compiled train step from a loss function.

  Args:
    loss_fn: `loss_fn(model, batch)` returns a scalar loss, or `(loss, metrics)` with a dict of scalars.
    microbatches: split the batch and accumulate gradients over this many parts inside the compiled step.

  Returns:
    A callable `(model, optimizer, batch) -> metrics`.
  """
  return TrainStep(loss_fn, microbatches=microbatches)


def eval_step(loss_fn: LossFn) -> Callable[[nnx.Module, Any], Metrics]:
  """Makes a compiled evaluation step: the loss and metrics of a batch, with the module unchanged.

  Args:
    loss_fn: as in `train_step`.

  Returns:
    A callable `(model, batch) -> metrics`.
  """

  @nnx.jit
  def step(model: nnx.Module, batch: Any) -> Metrics:
    loss, metrics = _split_aux(loss_fn(model, batch))
    return {"loss": loss, **metrics}

  return step


class _Bound:
  """One step compiled for one (model, optimizer) pair: flat Variables in, flat arrays out."""

  def __init__(self, step: TrainStep, model: nnx.Module, optimizer: nnx.Optimizer[Any]):
    self.model, self.optimizer = model, optimizer
    pair = (model, optimizer)
    graphdef, state = nnx.split(pair)
    flat = variables(pair)
    self.paths, self.variables = list(flat), list(flat.values())
    for path, variable in flat.items():
      if not isinstance(variable, nnx.Variable):
        raise TrainError(
          f"{path_str(path[1:])} is a raw array, which a step cannot update in place.",
          fix="store it as nnx.Variable(...) so that steps can write it back.",
        )
    self.state = state
    shardings = [getattr(value_of(v), "sharding", None) for v in self.variables]

    def run(arrays: list[jax.Array], batch: Any) -> tuple[list[jax.Array], Metrics]:
      leaves = [
        (path, variable.copy(array))
        for path, variable, array in zip(self.paths, self.variables, arrays, strict=True)
      ]
      module, opt = nnx.merge(graphdef, nnx.from_flat_state(leaves))
      metrics = _update(step, module, opt, batch)
      after = variables((module, opt))
      return [value_of(after[path]) for path in self.paths], metrics

    self.jitted = jax.jit(run, donate_argnums=0, out_shardings=(shardings, None))

  def is_for(self, model: nnx.Module, optimizer: nnx.Optimizer[Any]) -> bool:
    return self.model is model and self.optimizer is optimizer

  def read(self) -> list[jax.Array]:
    return [variable.get_raw_value() for variable in self.variables]

  def __call__(self, batch: Any) -> Metrics:
    arrays, metrics = self.jitted(self.read(), batch)
    for variable, array in zip(self.variables, arrays, strict=True):
      variable.set_raw_value(array)
    return metrics


def _split_aux(result: Any) -> tuple[jax.Array, Metrics]:
  loss, metrics = result if isinstance(result, tuple) else (result, {})
  if jnp.ndim(loss) != 0 or not isinstance(metrics, Mapping):
    raise TrainError(
      "the loss function must return a scalar, or (scalar, dict of metrics).",
      details=f"it returned a loss of shape {jnp.shape(loss)} and metrics of type {type(metrics).__name__}",
      fix="return loss.mean(), {'accuracy': accuracy.mean()}",
    )
  return loss, dict(metrics)


def _update(step: TrainStep, model: nnx.Module, optimizer: nnx.Optimizer[Any], batch: Any) -> Metrics:
  grad_fn = nnx.value_and_grad(
    lambda m, b: _split_aux(step.loss_fn(m, b)),
    argnums=nnx.DiffState(0, optimizer.wrt),
    has_aux=True,
  )
  if step.microbatches == 1:
    (loss, metrics), grads = grad_fn(model, batch)
    _apply(optimizer, model, grads)
    return {"loss": loss, **metrics}
  parts = jax.tree.map(lambda x: _split_batch(x, step.microbatches), batch)
  graphdef, trained, rest = nnx.split(model, optimizer.wrt, ...)

  def body(carry: Any, part: Any) -> tuple[Any, Any]:
    rest, total = carry
    module = nnx.merge(graphdef, trained, rest, copy=True)
    (loss, metrics), grads = grad_fn(module, part)
    total = jax.tree.map(jnp.add, total, grads)
    return (nnx.state(module, nnx.Not(optimizer.wrt)), total), {"loss": loss, **metrics}

  zeros = jax.tree.map(jnp.zeros_like, trained)
  (rest, total), stacked = jax.lax.scan(body, (rest, zeros), parts)
  nnx.update(model, rest)
  grads = jax.tree.map(lambda g: g / step.microbatches, total)
  _apply(optimizer, model, grads)
  return jax.tree.map(lambda x: x.mean(0), stacked)


def _apply(optimizer: nnx.Optimizer[Any], model: nnx.Module, grads: Any) -> None:
  # optax raises a Python float to an int32 power, which a user's strict promotion would refuse.
  with jax.numpy_dtype_promotion("standard"):
    optimizer.update(model, grads)


def _split_batch(x: jax.Array, count: int) -> jax.Array:
  # reshape(count, n) would move the sharding of the batch dim onto the microbatch dim; taking every
  # count-th example keeps each microbatch spread over all devices.
  return x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
