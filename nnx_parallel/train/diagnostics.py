"""Metrics of a step itself: the norm of its gradients, and the learning rate of its update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax
from flax import nnx

from nnx_parallel.errors import TrainError
from nnx_parallel.train.losses import Metrics, wide


def diagnostics(
  optimizer: Any, gradients: Sequence[jax.Array], scale: jax.Array | None, prefix: str = ""
) -> Metrics:
  """`grad_norm`, and the `learning_rate` of `optax.inject_hyperparams` where the state holds one.

  Several rates are numbered. `scale` is the loss scale that the gradients were multiplied by, if any.
  """
  norm = optax.tree.norm([wide(gradient) for gradient in gradients])
  found = {f"{prefix}grad_norm": norm if scale is None else norm / scale}
  rates = optax.tree.get_all_with_path(optimizer.opt_state, "learning_rate", filtering=_is_number)
  for number, (_, rate) in enumerate(rates):
    name = f"{prefix}learning_rate{f'/{number}' if len(rates) > 1 else ''}"
    found[name] = wide(rate.get_value())
  return found


def merged(metrics: Metrics, found: Metrics) -> Metrics:
  """Both dicts of metrics.

  Raises:
    TrainError: the loss function returned a metric of one of these names.
  """
  if taken := sorted(metrics.keys() & found.keys()):
    raise TrainError(
      f"the loss function returned a metric {taken[0]!r}, which diagnostics=True adds.",
      fix="another name for it, or diagnostics=False.",
    )
  return {**metrics, **found}


def _is_number(path: Any, value: Any) -> bool:
  return isinstance(value, nnx.Variable) and not value.get_raw_value().ndim  # not a schedule's own state
