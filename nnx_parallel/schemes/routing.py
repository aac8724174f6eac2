"""The router of a mixture of experts: which experts compute each token, and how their loads are balanced."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.errors import SchemeError

Score = Literal["softmax", "sigmoid"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """The experts of each token, their weights, and the losses that balance them; see `route`.

  Attributes:
    weights: the weight of each choice in the result, float32 of global shape (tokens..., choices); 0 for a
      masked token.
    experts: the numbers of the experts, int32 of the same shape. The experts of a token differ. For a masked
      token, all numbers are -1, which is not an expert.
    auxiliary_loss: a float32 scalar. It is 1 for even loads, and it grows as loads and scores concentrate on
      few experts.
    z_loss: a float32 scalar, the mean of `logsumexp(logits) ** 2`.
    load: the number of choices of each expert, int32 of shape (experts,).
  """

  weights: jax.Array
  experts: jax.Array
  auxiliary_loss: jax.Array
  z_loss: jax.Array
  load: jax.Array


@check_arguments(SchemeError)
def route(
  logits: jax.Array | np.ndarray,
  top_k: int,
  *,
  score: Score = "softmax",
  bias: jax.Array | np.ndarray | None = None,
  normalize: bool = True,
  groups: int = 1,
  top_groups: int = 1,
  mask: jax.Array | np.ndarray | None = None,
) -> Routing:
  """Chooses `top_k` experts for each token.

  The losses and loads are computed over the global batch. Add the losses to the loss of the model, each with
  a small factor: 0.01 and 0.001 are usual.

  Args:
    logits: the logits of the router, of global shape (tokens..., experts), such as `router(x)`. The function
      computes in float32.
    top_k: the number of experts for each token.
    score: how logits become scores: by `"softmax"` over the experts, or by `"sigmoid"` of each logit.
    bias: numbers of shape (experts,) that are added to the scores only to choose the experts; see
      `balanced_bias`. They have no gradient.
    normalize: whether the weights of a token are its scores divided by their sum, or the plain scores.
    groups: the number of groups into which the experts are divided, in order and evenly; for example, a group
      for each device or host.
    top_groups: the number of groups from which the experts of a token come. They are the groups whose best
      `ceil(top_k / top_groups)` scores have the largest sums. If each device holds one group, a token is sent
      to at most this many devices.
    mask: booleans of global shape (tokens...), true for tokens that have experts; masked tokens, such as
      padding, are in no loss and no load. None: all tokens have experts.

  Returns:
    A `Routing`: weights, experts, losses and loads.

  Raises:
    SchemeError: the score does not exist, `top_k` is larger than the number of experts in `top_groups`,
      `groups` does not divide the number of experts, or the bias or the mask has another shape.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> routing = nxp.parallel.route(jnp.array([[0.0, 3.0, 1.0], [2.0, 0.0, 2.0]]), 2)
    >>> routing.experts.tolist(), routing.load.tolist(), routing.weights[1].tolist()
    ([[1, 2], [0, 2]], [1, 1, 2], [0.5, 0.5])

  Source: auxiliary loss: Fedus et al. 2021 (arXiv:2101.03961), with sigmoid as in arXiv:2412.19437; z-loss:
  Zoph et al. 2022 (arXiv:2202.08906); bias: Wang et al. 2024 (arXiv:2408.15664); groups: arXiv:2412.19437.
  """
  if not logits.ndim:
    raise SchemeError(
      "route needs the logits of all experts, and got a number.", fix="nxp.parallel.route(router(x), 2)"
    )
  _check(logits, top_k, bias, groups, top_groups, mask)
  count, logits = logits.shape[-1], logits.astype(jnp.float32)
  if mask is not None:  # padding may be NaN
    mask = jnp.asarray(mask, bool)[..., None]
    logits = jnp.where(mask, logits, 0)
  scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
  left = jax.lax.stop_gradient(scores)
  if bias is not None:
    own = jax.lax.stop_gradient(jnp.asarray(bias, jnp.float32))
    left = left + own.reshape((1,) * (left.ndim - 1) + (-1,))
  left = jnp.maximum(left, jnp.finfo(jnp.float32).min)
  if top_groups < groups:
    apart = left.reshape(*left.shape[:-1], groups, count // groups)
    best: Any = sum(jnp.where(own, apart, 0).sum(-1) for own in _best(apart, -(-top_k // top_groups)))
    seen = functools.reduce(jnp.logical_or, _best(best, top_groups))
    left = jnp.where(seen[..., None], apart, -jnp.inf).reshape(left.shape)
  numbers = jax.lax.broadcasted_iota(jnp.int32, left.shape, left.ndim - 1)
  chosen = _best(left, top_k)
  experts = jnp.stack([jnp.where(own, numbers, 0).sum(-1, dtype=jnp.int32) for own in chosen], -1)
  weights = jnp.stack([jnp.where(own, scores, 0).sum(-1) for own in chosen], -1)
  if normalize:
    weights = weights / _total(weights)
  parts = scores if score == "softmax" else scores / _total(scores)
  large, kept = jax.nn.logsumexp(logits, -1, keepdims=True) ** 2, math.prod(logits.shape[:-1])
  if mask is not None:
    experts, weights = jnp.where(mask, experts, -1), jnp.where(mask, weights, 0)
    chosen = [own & mask for own in chosen]
    parts, large = jnp.where(mask, parts, 0), jnp.where(mask, large, 0)
    kept = jnp.maximum(mask.sum(dtype=jnp.float32), 1)
  tokens = tuple(range(logits.ndim - 1))
  load = functools.reduce(jnp.logical_or, chosen).sum(tokens, dtype=jnp.int32)
  auxiliary = count * (load.astype(jnp.float32) / (kept * top_k) * (parts.sum(tokens) / kept)).sum()
  return Routing(weights, experts, auxiliary, large.sum() / kept, load)


def _total(scores: jax.Array) -> jax.Array:
  """The sum of a token's scores, never 0: each sigmoid of logits below -104 is 0 in float32."""
  return scores.sum(-1, keepdims=True) + 1e-12


def _best(scores: jax.Array, count: int) -> list[jax.Array]:
  """Where the largest of the last dim are, a mask for each: of the first, of the second, and so on.

  One after another: XLA for CPU gathers the tokens of all devices for `jax.lax.top_k`.
  """
  numbers = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
  found: list[jax.Array] = []
  for _ in range(count):
    found.append(numbers == jnp.argmax(scores, -1, keepdims=True).astype(jnp.int32))
    scores = jnp.where(found[-1], -jnp.inf, scores)
  return found


def _check(
  logits: jax.Array | np.ndarray,
  top_k: int,
  bias: jax.Array | np.ndarray | None,
  groups: int,
  top_groups: int,
  mask: jax.Array | np.ndarray | None,
) -> None:
  """Raises a `SchemeError` for arguments of `route` that do not fit."""
  count = logits.shape[-1]
  if not 1 <= top_k <= count:
    raise SchemeError(
      f"each token cannot choose {top_k} of {count} experts.", fix=f"top_k from 1 to {count}."
    )
  for name, array, what, shape in (
    ("bias", bias, "number for each expert", (count,)),
    ("mask", mask, "boolean for each token", logits.shape[:-1]),
  ):
    if array is not None and array.shape != shape:
      raise SchemeError(
        f"the {name} of a router has one {what}.",
        details=f"{name} {array.shape}, logits {logits.shape}",
        fix=f"a {name} of shape {shape}.",
      )
  if groups < 1 or count % groups:
    raise SchemeError(f"{count} experts cannot be in {groups} equal groups.", fix=f"a divisor of {count}.")
  each = count // groups
  if not 1 <= top_groups <= groups or top_k > top_groups * each:
    least = -(-top_k // each)
    raise SchemeError(
      f"{top_k} experts of a token cannot be of {top_groups} groups with {each} experts.",
      fix=f"top_groups from {least} to {groups}.",
    )


@check_arguments(SchemeError)
def balanced_bias(bias: jax.Array, load: jax.Array | np.ndarray, rate: float = 1e-3) -> jax.Array:
  """Returns the next bias of a router: lower for experts with high loads, higher for the other experts.

  The bias balances the loads without a loss term that affects the model. It falls by `rate` for experts with
  more than the mean load, and rises by `rate` for experts with less. Keep the bias in an `nnx.Variable` that
  is not a parameter, and set it in the forward pass; the step writes it back like the statistics of
  BatchNorm.

  Args:
    bias: the current bias, of shape (experts,); zeros at first.
    load: the load of each expert, `Routing.load`.
    rate: the change in one step. The scores, to which the bias is added, are between 0 and 1.

  Returns:
    The bias for the next step.

  Raises:
    SchemeError: the bias and the load have other shapes.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> nxp.parallel.balanced_bias(jnp.zeros(3), jnp.array([5, 2, 2]), 0.5).tolist()
    [-0.5, 0.5, 0.5]

  Source: Wang et al. 2024 (arXiv:2408.15664).
  """
  load = jnp.asarray(load, jnp.float32)
  if bias.shape != load.shape:
    raise SchemeError(
      "balanced_bias needs a bias and a load for each expert.",
      details=f"bias {bias.shape}, load {load.shape}",
      fix="nxp.parallel.balanced_bias(bias, routing.load)",
    )
  return bias + (rate * jnp.sign(load.mean() - load)).astype(bias.dtype)
