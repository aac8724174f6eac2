"""Metrics of a step: the results of a loss function, as sums and counts, and metrics that the step adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_parallel.core.nodes import named_leaves
from nnx_parallel.core.text import format_array, with_article
from nnx_parallel.core.types import AnyArray, Optimizer, PyTree, Value
from nnx_parallel.errors import TrainError

Metrics = dict[str, Any]


class Weighted(NamedTuple):
  """A sum and its weight; made by `weighted`."""

  sum: AnyArray
  count: AnyArray


def weighted(sum: AnyArray, count: AnyArray) -> Weighted:
  """A weighted mean that a loss function may return: `sum / count`, exact for every split of the batch.

  If a batch is masked or padded, its microbatches and its shards have different numbers of tokens. The step
  adds the sums and the counts over all of them and divides once, so that each token has the same weight.

  Args:
    sum: a scalar: the sum over the examples of the (micro)batch. For a metric, it may also be an array, for
      example with one number for each class.
    count: the divisor of the sum: the number of examples, or the sum of their weights. It has no gradient.

  Returns:
    The sum and the count, as a pytree.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> def loss_fn(model, batch):
    ...   losses = (model(batch["x"]) - batch["y"]) ** 2
    ...   return nxp.weighted((losses * batch["mask"]).sum(), batch["mask"].sum())
    >>> batch = {"x": jnp.array([1.0, 2.0]), "y": jnp.zeros(2), "mask": jnp.array([1.0, 0.0])}
    >>> found = loss_fn(lambda x: 3 * x, batch)
    >>> float(found.sum), float(found.count)
    (9.0, 1.0)
  """
  return Weighted(sum, count)


class Terms(NamedTuple):
  """The terms of one (micro)batch."""

  sums: dict[str, Any]  # name -> float32 scalar, or an array for a summary; one of the names is `loss`
  # name -> float32, the divisor of the sum; None for a plain scalar, which counts as one whether the part is
  # large or small
  counts: dict[str, Any]
  outputs: dict[str, jax.Array]  # name -> array with the examples on dim 0


AUX = "aux"
"""The name of what a loss function returns beside the loss, with `has_aux`."""


def terms(result: PyTree, outputs: Sequence[str] = (), *, has_aux: bool = False) -> Terms:
  """Reads the result of a loss function; a `TrainError` for anything that is none."""
  # The result is a scalar or `weighted(sum, count)`, or either with a dict of metrics: `(loss, metrics)`. The
  # sum of a metric may be an array (a summary: accuracy by class, a histogram), with one count or a count for
  # each element. `outputs` names metrics that are per-example arrays. With `has_aux`, it is `(loss, aux)`
  # with any pytree, whose leaves become metrics with names such as `aux` or `aux[0]`.
  if has_aux:
    return _with_aux(result)
  loss, metrics = result, {}
  if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
    loss, metrics = result
  found = Terms({}, {}, {})
  _add(found, "loss", loss)
  if "loss" in map(str, metrics):
    raise TrainError(
      "the loss function returned a metric called 'loss', which would take the place of the loss.",
      details=f"metrics {', '.join(map(str, metrics))}",
      fix="give the metric another name; the step returns the loss as 'loss' anyhow.",
    )
  for name, value in metrics.items():
    if name in outputs:
      found.outputs[name] = value
    else:
      _add(found, str(name), value)
  missing = [name for name in outputs if name not in found.outputs]
  if missing:
    raise TrainError(
      f"outputs names {missing[0]!r}, which the loss function did not return.",
      details=f"it returned the metrics {', '.join(map(str, metrics)) or 'none'}",
      fix=f"return loss, {{{missing[0]!r}: array}}",
    )
  return found


def _with_aux(result: PyTree) -> Terms:
  if not isinstance(result, tuple) or isinstance(result, Weighted) or len(result) != 2:
    raise TrainError(
      f"has_aux=True takes a loss function that returns (loss, aux); it returned {_show(result)}.",
      fix="return loss, aux; or leave has_aux=True out.",
    )
  found = Terms({}, {}, {})
  _add(found, "loss", result[0])
  for path, leaf in jax.tree_util.tree_leaves_with_path(result[1]):
    name = f"{AUX}{jax.tree_util.keystr(path)}"
    if jnp.ndim(leaf):
      found.outputs[name] = jnp.asarray(leaf)
    else:
      _add(found, name, leaf)
  return found


def check_outputs(found: Terms, examples: int, microbatches: int) -> None:
  """Refuses arrays beside the loss that have no examples to join those of microbatches by."""
  for name, value in found.outputs.items():
    if microbatches > 1 and value.shape[0] != examples:
      raise TrainError(
        f"{name} does not have the examples on dim 0, so the arrays of {microbatches} microbatches cannot be"
        " joined.",
        details=f"shape {value.shape}, for {examples} examples in a microbatch",
        fix="leave it out of what the loss function returns, or return its mean; or microbatches=1.",
      )


def _add(found: Terms, name: str, value: Value) -> None:
  pair = value if isinstance(value, Weighted) else (value, None)
  shapes = [tuple(getattr(x, "shape", ())) for x in pair if x is not None]
  # A summary: as many means as the sum has elements, over one count or a count for each element.
  summary = name != "loss" and len(shapes) == 2 and shapes[1] in ((), shapes[0])
  numbers = _is_number(pair[0]) and (pair[1] is None or _is_number(pair[1]))
  if not numbers or not (summary or all(shape == () for shape in shapes)):
    raise _not_a_term(name, value)
  found.sums[name] = wide(pair[0])
  # A count is a weight: were it differentiated, the gradient would depend on how the batch is split.
  count = None if pair[1] is None else jax.lax.stop_gradient(jnp.asarray(pair[1]))
  found.counts[name] = None if count is None else count.astype(found.sums[name].dtype)


def _is_number(x: Value) -> bool:
  if not hasattr(x, "shape"):
    return isinstance(x, (bool, int, float))
  return not jnp.issubdtype(x.dtype, jnp.complexfloating)


def _not_a_term(name: str, value: Value) -> TrainError:
  what = "the loss" if name == "loss" else f"the metric {name!r}"
  return TrainError(
    f"{what} must be a scalar or nxp.weighted(sum, count); the loss function returned {_show(value)}.",
    details="return loss or (loss, metrics); the sum of a metric may be an array, over one count or a count"
    " for each element",
    fix=_fix(name, value),
  )


def _fix(name: str, value: Value) -> str:
  if name != "loss" and isinstance(value, tuple):
    return f'nxp.weighted(sum, count) for a weighted mean; or two metrics: {{"{name}": a, "other": b}}.'
  if name != "loss":
    return "x.mean(), or nxp.weighted(x.sum(), x.size); name per-example arrays in outputs=(...)."
  if value is None:
    return "end the loss function with: return loss"
  if isinstance(value, Mapping):
    return 'return loss, metrics: the loss first, then a dict of the other metrics; or value["loss"].'
  if isinstance(value, tuple):
    return (
      'return loss, {"accuracy": accuracy} for a loss with a metric (outputs=(...) names arrays);\n'
      "train_step(loss_fn, has_aux=True) for any other arrays beside the loss;\n"
      "return nxp.weighted(sum, count) for a mean by weights."
    )
  if jnp.issubdtype(getattr(value, "dtype", float), jnp.complexfloating):
    return "loss.real, or abs(loss): the imaginary part would be dropped."
  return "loss.mean(), or nxp.weighted(loss.sum(), loss.size), which weights uneven batches exactly."


def _show(value: Value) -> str:
  """The result in the user's terms: a tracer is an array."""
  if isinstance(value, tuple):
    return f"({', '.join(map(_show, value))})"
  if hasattr(value, "shape") and hasattr(value, "dtype"):
    return format_array(value.dtype, value.shape)
  return "None" if value is None else with_article(type(value).__name__)


def wide(x: AnyArray) -> jax.Array:
  """`x` as float32, or as it is if it is wider or complex: sums in less lose the small terms."""
  x = jnp.asarray(x)
  kept = x.dtype == jnp.float64 or jnp.issubdtype(x.dtype, jnp.complexfloating)
  return x if kept else x.astype(jnp.float32)


def mean(total: AnyArray, count: AnyArray) -> jax.Array:
  """`total / count`, and 0 where nothing was counted."""
  if count is None:
    return total
  empty = count == 0
  return jnp.where(empty, jnp.zeros_like(total), total / jnp.where(empty, jnp.ones_like(count), count))


def means(found: Terms, parts: int = 1) -> Metrics:
  """The mean of each term, and the outputs, of terms that were summed over `parts` parts."""
  result: Metrics = {}
  for name, total in found.sums.items():
    count = found.counts[name]
    result[name] = mean(total, count) if count is not None else total if parts == 1 else total / parts
  return {**result, **found.outputs}


def pairs(found: Terms, batch: PyTree, parts: int = 1) -> Metrics:
  """Each term as `(sum, count)`, and the outputs, of terms that were summed over `parts` parts."""
  # A plain scalar is taken for the mean over the examples of the batch.
  result: Metrics = {}
  for name, total in found.sums.items():
    count = found.counts[name]
    if count is None:
      count = jnp.full_like(total, weight_of(name, batch))
      total = total * (count / parts)
    result[name] = (total, count)
  return {**result, **found.outputs}


def check_examples(batch: PyTree) -> None:
  """Refuses (`TrainError`) a batch without examples, whose mean would be NaN."""
  for name, leaf in named_leaves(batch):
    if jnp.shape(leaf)[:1] == (0,):
      raise TrainError(
        f"{name} holds no examples.",
        details=f"shape {jnp.shape(leaf)}",
        fix="skip empty batches where the data are read.",
      )


def examples_in(batch: PyTree) -> int:
  """The length of dim 0 of the batch's first array; 1 when it holds scalars only."""
  return next((leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)), 1)


def weight_of(metric: str, batch: PyTree) -> int:
  """The weight of a plain scalar: the number of examples; a `TrainError` if arrays differ in length."""
  sizes = {leaf.shape[0]: name for name, leaf in named_leaves(batch) if jnp.ndim(leaf)}
  if len(sizes) > 1:
    raise TrainError(
      f"the arrays of the batch differ in their length, so the metric {metric!r} has no weight.",
      details=", ".join(f"{name} has {size} rows" for size, name in sizes.items()),
      fix=f"return nxp.weighted(sum, count) for {metric!r}.",
    )
  return next(iter(sizes), 1)


def diagnostics(
  optimizer: Optimizer, gradients: Sequence[jax.Array], scale: jax.Array | None, prefix: str = ""
) -> Metrics:
  """`grad_norm`, and the `learning_rate` of `optax.inject_hyperparams` if the state holds it."""
  # Several rates are numbered. `scale` is the loss scale that the gradients were multiplied by, if any.
  norm = optax.tree.norm([wide(gradient) for gradient in gradients])
  found = {f"{prefix}grad_norm": norm if scale is None else norm / scale}
  rates = optax.tree.get_all_with_path(optimizer.opt_state, "learning_rate", filtering=_is_rate)
  for number, (_, rate) in enumerate(rates):
    name = f"{prefix}learning_rate{f'/{number}' if len(rates) > 1 else ''}"
    found[name] = wide(rate.get_value())
  return found


def merge(metrics: Metrics, found: Metrics) -> Metrics:
  """Both dicts of metrics; a `TrainError` if the loss function returned one of these names."""
  if taken := sorted(metrics.keys() & found.keys()):
    raise TrainError(
      f"the loss function returned a metric {taken[0]!r}, which diagnostics=True adds.",
      fix="another name for it, or diagnostics=False.",
    )
  return {**metrics, **found}


def _is_rate(path: Any, value: Value) -> bool:
  return isinstance(value, nnx.Variable) and not value.get_raw_value().ndim  # not a schedule's own state
