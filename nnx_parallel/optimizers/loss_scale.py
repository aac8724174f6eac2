"""Dynamic loss scaling: float16 gradients that neither vanish nor overflow.

The scale is part of the optimizer's state, so the plan lays it out and checkpoints carry it. `train_step`
multiplies the loss by it; the transformation divides the gradients. Both are exact: it is a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.extra_args import accept_extra
from nnx_parallel.core.nodes import parts_of_type, value_of
from nnx_parallel.core.types import Optimizer, PyTree
from nnx_parallel.errors import TrainError
from nnx_parallel.optimizers.wrappers import MastersState, all_finite, choose, widen

_MINIMUM, _MAXIMUM = 1.0, 2.0**24


class LossScaleState(NamedTuple):
  """State of `with_loss_scale`."""

  inner: PyTree  # state of the wrapped transformation
  scale: jax.Array  # the factor of the loss, a float32 power of two
  good_steps: jax.Array  # finite steps since the scale last changed
  skipped: jax.Array  # the total number of steps whose gradients were not finite


@check_arguments(TrainError, growth_interval=1)
def with_loss_scale(
  tx: optax.GradientTransformation, *, initial: float = 2.0**15, growth_interval: int = 2000
) -> optax.GradientTransformationExtraArgs:
  """Adds a dynamic loss scale to an optimizer, for computing in float16.

  The transformation divides the gradients by the scale. A step whose gradients contain a NaN or an infinity
  changes neither the parameters nor the state of `tx`, and halves the scale, to 1 at least. After
  `growth_interval` consecutive finite steps, the scale doubles, up to 2**24. Other Variables, such as batch
  statistics, keep the values of the forward pass. `train_step` finds the scale and multiplies the loss by it,
  but returns unscaled metrics. In a step that you write yourself, multiply the loss by
  `loss_scale_of(optimizer)` before you differentiate it.

  Args:
    tx: the transformation that gets unscaled gradients. `with_loss_scale` must be outermost: a transformation
      around it, such as a clip or `MultiSteps`, would get scaled gradients. Float16 parameters need
      `with_loss_scale(with_masters(tx))`.
    initial: the first scale, a power of two.
    growth_interval: the number of finite steps before the scale doubles.

  Returns:
    A transformation for `plan(optimizer=...)` or `nnx.Optimizer`; its state is a `LossScaleState`.

  Raises:
    TrainError: the first scale is not a power of two in these bounds, or the interval is less than 1.

  Example:
    >>> import jax.numpy as jnp, numpy as np, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 64, dtype=jnp.float16, rngs=nnx.Rngs(0))
    >>> tx = nxp.with_loss_scale(optax.adam(1e-3))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=tx)
    >>> model, optimizer = nxp.create_sharded_model(plan)
    >>> step = nxp.train_step(lambda model, x: (model(x).astype(jnp.float32) ** 2).mean())
    >>> _ = step(model, optimizer, np.full((8, 8), 3e4, "float16"))  # its gradients overflow
    >>> float(nxp.loss_scale_of(optimizer)), int(optimizer.opt_state.skipped[...])
    (16384.0, 1)

  Source: Mixed Precision Training, arXiv:1710.03740.
  """
  if math.frexp(initial)[0] != 0.5:
    raise TrainError(
      f"initial={initial} is not a power of two, so dividing by it would round gradients.",
      fix=f"initial={2.0 ** round(math.log2(initial)) if 0 < initial < math.inf else 2.0**15}",
    )
  if not _MINIMUM <= initial <= _MAXIMUM:
    raise TrainError(f"initial={initial} is not between {_MINIMUM} and {_MAXIMUM}.", fix="initial=2.0**15")
  inner = accept_extra(tx)

  def init(params: PyTree) -> LossScaleState:
    zero = jnp.zeros((), jnp.int32)
    return LossScaleState(inner.init(params), jnp.asarray(initial, jnp.float32), zero, zero)

  def update(
    grads: PyTree, state: LossScaleState, params: PyTree = None, **extra: Any
  ) -> tuple[PyTree, LossScaleState]:
    unscaled = jax.tree.map(lambda g: widen(g) / state.scale.astype(widen(g).dtype), grads)
    finite = all_finite(unscaled)
    if not parts_of_type(state.inner, MastersState):
      unscaled = jax.tree.map(lambda u, g: u.astype(g.dtype), unscaled, grads)
    if "grad" in extra:
      extra["grad"] = unscaled
    updates, inner_state = inner.update(unscaled, state.inner, params, **extra)
    good = jnp.where(finite, state.good_steps + 1, 0)
    grown = good >= growth_interval
    scale = jnp.where(grown, jnp.minimum(state.scale * 2, _MAXIMUM), state.scale)
    scale = jnp.where(finite, scale, jnp.maximum(state.scale / 2, _MINIMUM))
    new = LossScaleState(
      choose(finite, inner_state, state.inner),
      scale,
      jnp.where(grown, 0, good),
      state.skipped + jnp.where(finite, 0, 1),
    )
    return choose(finite, updates, jax.tree.map(jnp.zeros_like, updates)), new

  return optax.GradientTransformationExtraArgs(init, cast(Any, update))


@check_arguments(TrainError)
def loss_scale_of(optimizer: Optimizer) -> jax.Array:
  """Returns the factor by which you multiply the loss before you differentiate it.

  Args:
    optimizer: an `nnx.Optimizer`, live or traced, made with `with_loss_scale`.

  Returns:
    A float32 scalar.

  Raises:
    TrainError: the optimizer has no loss scale, or another transformation is around it.

  Example:
    >>> import jax.numpy as jnp, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> model = nnx.Linear(4, 4, dtype=jnp.float16, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, nxp.with_loss_scale(optax.sgd(0.1)), wrt=nnx.Param)
    >>> scale = nxp.loss_scale_of(optimizer)
    >>> loss_fn = lambda model: (model(jnp.ones((8, 4))) ** 2).mean().astype(jnp.float32) * scale
    >>> _ = optimizer.update(model, nnx.grad(loss_fn)(model))
    >>> float(loss_fn(model)) < float(loss_fn(nnx.Linear(4, 4, dtype=jnp.float16, rngs=nnx.Rngs(0))))
    True
  """
  scale = find_scale(optimizer)
  if scale is None:
    raise TrainError(
      "this optimizer has no loss scale.",
      details=f"state {type(optimizer.opt_state).__name__}",
      fix="nxp.plan(init, mesh, rules, optimizer=nxp.with_loss_scale(tx))",
    )
  return scale


def find_scale(optimizer: Optimizer) -> jax.Array | None:
  """The loss scale of an optimizer, or None; a `TrainError` if a transformation is around it."""
  state = optimizer.opt_state
  if isinstance(state, LossScaleState):
    return value_of(state.scale)
  if parts_of_type(state, LossScaleState):
    raise TrainError(
      "with_loss_scale must be the outermost transformation.",
      details=f"it is inside {type(state).__name__}, which would see gradients before they are unscaled",
      fix="nxp.with_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), tx))",
    )
  return None


def common_scale(optimizers: Iterable[Optimizer]) -> jax.Array | None:
  """The scale for a loss that these optimizers share: the first scale found."""
  return next((scale for scale in map(find_scale, optimizers) if scale is not None), None)


def rescale(grads: list[jax.Array], optimizer: Optimizer, used: jax.Array | None) -> list[jax.Array]:
  """Converts gradients of a loss that was scaled by `used` to the optimizer's own loss scale."""
  if used is None:
    return grads
  own = find_scale(optimizer)
  if own is used:
    return grads
  ratio = (jnp.ones_like(used) if own is None else own) / used
  return [(widen(g) * ratio.astype(widen(g).dtype)).astype(g.dtype) for g in grads]


@jax.custom_vjp
def scale_in_backward(x: jax.Array, factor: jax.Array) -> jax.Array:
  """`x` itself, whose gradient is multiplied by `factor` on its way back."""
  del factor
  return x


def _backward(factor: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
  return (widen(grad) * factor.astype(widen(grad).dtype)).astype(grad.dtype), jnp.zeros_like(factor)


scale_in_backward.defvjp(lambda x, factor: (x, factor), _backward)
