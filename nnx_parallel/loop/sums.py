"""Sums of metrics over steps or batches, kept on the devices until they are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_parallel.core.checked import check_arguments, is_array
from nnx_parallel.core.mesh import no_mesh
from nnx_parallel.core.text import with_article
from nnx_parallel.core.types import AnyArray, AnyMetrics, LossFn, Model, PyTree
from nnx_parallel.errors import TrainError
from nnx_parallel.loop.metrics import Record
from nnx_parallel.train.losses import weight_of, wide


class MetricSums:
  """Exact means of metrics over many steps, without waiting for any of them.

  A pair `(sum, count)`, which steps of `train_step(..., pairs=True)` return, is weighted by its count. A
  plain number counts as a mean, with the weight that is passed to `add`.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> sums = nxp.loop.MetricSums()
    >>> sums.add({"loss": (jnp.float32(6.0), jnp.float32(2.0)), "accuracy": 1.0}, weight=2)
    >>> sums.add({"loss": (jnp.float32(1.0), jnp.float32(8.0)), "accuracy": 0.25}, weight=8)
    >>> sums.read()
    {'loss': 0.7, 'accuracy': 0.4}
  """

  def __init__(self) -> None:
    self._total: AnyMetrics = {}
    self._weight: float | None = None  # of the first step, until there is a second

  @check_arguments(TrainError)
  def add(self, metrics: AnyMetrics, *, weight: float = 1.0) -> None:
    """Adds the metrics of one step, on the devices, without waiting for them.

    Args:
      metrics: a dict: name -> scalar, or a pair `(sum, count)` of scalars.
      weight: the weight of plain scalars, for example the number of examples in the batch.

    Raises:
      TrainError: a metric is an array.
    """
    for name, value in metrics.items():
      if not is_scalar(value):
        raise TrainError(
          f"the metric {name!r} is an array, which has no mean here.",
          fix=f"sum it in the loss function, {name!r}: nxp.weighted(x.sum(), x.size), or leave it out.",
        )
    if not self._total:
      self._total, self._weight = dict(metrics), weight
      return
    with no_mesh():
      if self._weight is not None:
        self._total, self._weight = _as_pairs(self._total, np.float32(self._weight)), None
      again = {name: value for name, value in metrics.items() if name in self._total}
      new = {name: value for name, value in metrics.items() if name not in self._total}
      before = {name: self._total[name] for name in again}
      one = np.float32(weight)
      self._total = {**self._total, **_added(before, again, one), **(_as_pairs(new, one) if new else {})}

  def read(self) -> Record:
    """Returns the means, `loss` first, and waits for the steps. A mean of nothing is 0."""
    total: AnyMetrics = jax.device_get(self._total)
    return {name: _mean(total[name]) for name in sorted(total, key=lambda name: (name != "loss", name))}


def is_scalar(value: AnyArray | tuple[AnyArray, AnyArray]) -> bool:
  """Whether a metric is a number, or a pair of two numbers."""
  return not any(map(np.ndim, value if isinstance(value, tuple) else (value,)))


def in_evaluation_mode(loss_fn: LossFn) -> LossFn:
  """A loss of the same arguments that sees a model without dropout and with running averages."""

  @functools.wraps(loss_fn)
  def loss(model: Model, *batch: PyTree) -> PyTree:
    quiet = nnx.view(model, deterministic=True, use_running_average=True, raise_if_not_found=False)
    return loss_fn(quiet, *batch)

  return loss


@check_arguments(TrainError, "model")
def evaluate(step: Callable[[Model, PyTree], AnyMetrics], model: Model, batches: Iterable[PyTree]) -> Record:
  """Computes the mean of each metric over many batches, exactly weighted.

  Args:
    step: a function `(model, batch) -> metrics`. Metrics of `eval_step(loss_fn, pairs=True)` are weighted by
      their counts. The means of a step without pairs are weighted by the number of examples in the batch.
    model: a live module. To evaluate without dropout, pass
      `nnx.view(model, deterministic=True, use_running_average=True)`, which shares the Variables of the
      model. Make this view only once, because the step is compiled again for another object.
    batches: batches that are already placed on the devices, for example by `nxp.batches`.

  Returns:
    A dict: name -> mean, `loss` first; empty if there are no batches. Arrays with a value for each example
    are left out.

  Raises:
    TrainError: the step returns no dict.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> model = nxp.create_sharded_model(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8))
    >>> step = nxp.eval_step(lambda m, x: nxp.weighted(m(x).sum(), x.size), pairs=True)
    >>> nxp.evaluate(step, model, [jnp.zeros((16, 4)), jnp.zeros((8, 4))])
    {'loss': 0.0}
  """
  check_several_batches("evaluate", batches)
  sums = MetricSums()
  before: Any = None
  for batch in batches:
    returned: PyTree = step(model, batch)
    if not isinstance(returned, Mapping):
      raise TrainError(
        f"evaluate needs a step that returns a dict, and this one returned a {type(returned).__name__}.",
        fix="nxp.evaluate(nxp.eval_step(loss_fn, pairs=True), model, batches)",
      )
    metrics = {name: value for name, value in returned.items() if is_scalar(value)}
    plain = next((name for name, value in metrics.items() if not isinstance(value, tuple)), None)
    sums.add(metrics, weight=1 if plain is None else weight_of(plain, batch))
    # One batch ahead keeps the devices busy; more would only need more memory.
    jax.block_until_ready(before)
    before = metrics
  return sums.read()


def check_several_batches(name: str, batches: object) -> None:
  """Refuses one batch in the place of an iterable of batches: its rows would be taken for batches."""
  if isinstance(batches, Mapping) or is_array(batches):
    raise TrainError(
      f"{name} needs an iterable of batches, and got {with_article(type(batches).__name__)}.",
      fix="[batch] for one batch, iter(batches) for an array of batches;\n"
      "nxp.batches(samples, plan, batch=...) for samples.",
    )


def _mean(value: AnyArray | tuple[AnyArray, AnyArray]) -> float:
  if not isinstance(value, tuple):
    return float(value)
  total, count = map(float, value)
  return total / count if count else 0.0


@jax.jit
def _as_pairs(metrics: AnyMetrics, weight: AnyArray) -> AnyMetrics:
  return {name: _pair(value, weight) for name, value in metrics.items()}


@jax.jit
def _added(total: AnyMetrics, metrics: AnyMetrics, weight: AnyArray) -> AnyMetrics:
  return jax.tree.map(jnp.add, total, {name: _pair(value, weight) for name, value in metrics.items()})


def _pair(value: AnyArray | tuple[AnyArray, AnyArray], weight: AnyArray) -> tuple[jax.Array, jax.Array]:
  if isinstance(value, tuple):
    total, count = value
    return wide(total), wide(count)
  return wide(value) * weight.astype(wide(value).dtype), weight
