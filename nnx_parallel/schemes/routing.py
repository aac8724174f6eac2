"""The router of a mixture of experts: which experts compute each token, and what balances their loads."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from nnx_parallel.errors import SchemeError

Score = Literal["softmax", "sigmoid"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """Which experts compute each token, and what balances them; see `route`.

  Attributes:
    weights: of each choice in the result, float32 of global shape (tokens..., choices).
    experts: the numbers of the experts, int32 of the same shape; those of one token differ.
    auxiliary_loss: a float32 scalar, 1 for even loads; it grows as loads and scores gather on few experts.
    z_loss: a float32 scalar, the mean of `logsumexp(logits) ** 2`.
    load: how many choices fell on each expert, int32 of shape (experts,).
  """

  weights: Any
  experts: Any
  auxiliary_loss: Any
  z_loss: Any
  load: Any


def route(
  logits: Any, top_k: int, *, score: Score = "softmax", bias: Any = None, normalize: bool = True
) -> Routing:
  """Chooses `top_k` experts for each token.

  The losses and loads are those of the whole batch, also where a mesh splits it. Add the losses to that of
  the model, each with a small factor: 0.01 and 0.001 are usual.

  Args:
    logits: of global shape (tokens..., experts), such as `router(x)`; computed with in float32.
    top_k: experts for each token.
    score: what makes scores of logits: `"softmax"` over the experts, or `"sigmoid"` of each.
    bias: added to the scores for the choice alone, of shape (experts,); see `balanced_bias`. It has no
      gradient.
    normalize: whether the weights of a token are its scores divided by their sum, or the scores.

  Returns:
    Weights, experts, losses and loads.

  Raises:
    SchemeError: no such score, a `top_k` beyond the number of experts, or a bias of another shape.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> routing = nxp.route(jnp.array([[0.0, 3.0, 1.0], [2.0, 0.0, 2.0]]), 2)
    >>> routing.experts.tolist(), routing.load.tolist(), routing.weights[1].tolist()
    ([[1, 2], [0, 2]], [1, 1, 2], [0.5, 0.5])

  Source: auxiliary loss: Fedus et al. 2021 (arXiv:2101.03961), with sigmoid as in arXiv:2412.19437; z-loss:
  Zoph et al. 2022 (arXiv:2202.08906); bias: Wang et al. 2024 (arXiv:2408.15664).
  """
  if score not in ("softmax", "sigmoid"):
    raise SchemeError(f"score={score!r} makes no scores of logits.", fix='score="softmax" or "sigmoid".')
  count = logits.shape[-1]
  if not 1 <= top_k <= count:
    raise SchemeError(
      f"each token cannot choose {top_k} of {count} experts.", fix=f"top_k from 1 to {count}."
    )
  if bias is not None and bias.shape != (count,):
    raise SchemeError(
      "the bias of a router has one number for each expert.",
      details=f"bias {bias.shape}, logits {logits.shape}",
      fix=f"jnp.zeros({count})",
    )
  logits = logits.astype(jnp.float32)
  scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
  left = jax.lax.stop_gradient(scores)
  if bias is not None:
    left = left + jax.lax.stop_gradient(jnp.asarray(bias, jnp.float32)).reshape(
      (1,) * (left.ndim - 1) + (-1,)
    )
  # One after another: XLA for CPU gathers the tokens of all devices for `jax.lax.top_k`.
  left = jnp.maximum(left, jnp.finfo(jnp.float32).min)
  numbers = jax.lax.broadcasted_iota(jnp.int32, left.shape, left.ndim - 1)
  chosen: list[Any] = []
  for _ in range(top_k):
    best = jnp.argmax(left, -1, keepdims=True).astype(jnp.int32)
    chosen.append(numbers == best)
    left = jnp.where(chosen[-1], -jnp.inf, left)
  experts = jnp.stack([jnp.where(own, numbers, 0).sum(-1, dtype=jnp.int32) for own in chosen], -1)
  weights = jnp.stack([jnp.where(own, scores, 0).sum(-1) for own in chosen], -1)
  if normalize:
    weights = weights / weights.sum(-1, keepdims=True)
  tokens = tuple(range(logits.ndim - 1))
  load = functools.reduce(jnp.logical_or, chosen).sum(tokens, dtype=jnp.int32)
  parts = scores if score == "softmax" else scores / scores.sum(-1, keepdims=True)
  total = math.prod(logits.shape[:-1]) * top_k
  auxiliary = count * (load.astype(jnp.float32) / total * parts.mean(tokens)).sum()
  return Routing(weights, experts, auxiliary, (jax.nn.logsumexp(logits, -1) ** 2).mean(), load)


def balanced_bias(bias: Any, load: Any, rate: float = 1e-3) -> jax.Array:
  """The next bias of a router: lower for experts with more than the mean load, higher for the others.

  It balances without a loss that pulls at the model. Keep the bias as an `nnx.Variable` that is no parameter,
  and set it in the forward pass: a step writes it back as it does the statistics of BatchNorm.

  Args:
    bias: of shape (experts,), zeros at first.
    load: as in `Routing`.
    rate: by how much it changes in one step; scores are between 0 and 1.

  Returns:
    The bias for the next step.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> nxp.balanced_bias(jnp.zeros(3), jnp.array([5, 2, 2]), 0.5).tolist()
    [-0.5, 0.5, 0.5]

  Source: Wang et al. 2024 (arXiv:2408.15664).
  """
  load = jnp.asarray(load, jnp.float32)
  return bias + (rate * jnp.sign(load.mean() - load)).astype(bias.dtype)
