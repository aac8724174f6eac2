"""Optax transformations around other transformations: float32 masters, averaged parameters, skipped steps.

Their state mirrors the parameters, so the plan lays it out by path and shape like any optimizer state.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.extra_args import accept_extra
from nnx_parallel.core.mesh import no_mesh
from nnx_parallel.core.nodes import parts_of_type, path_str, value_of, variables
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.errors import TrainError


class MastersState(NamedTuple):
  """State of `with_masters`."""

  inner: PyTree  # state of the wrapped transformation, made for the masters
  masters: PyTree  # the parameters in float32; `optax.MaskedNode()` for parameters that need no copy


class AverageState(NamedTuple):
  """State of `with_ema`."""

  inner: PyTree  # state of the wrapped transformation
  average: PyTree  # the averaged parameters, at least float32


@check_arguments(TrainError)
def with_masters(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Keeps a float32 copy of each bfloat16 or float16 parameter, and updates the copy.

  A bfloat16 parameter has 8 significant bits, so an update smaller than 1/512 of the parameter is lost. With
  this wrapper, `tx` gets float32 gradients and float32 copies (masters), so its state is float32 too. The
  model gets the rounded masters. Parameters of other dtypes are not copied.

  Args:
    tx: the transformation that trains the masters. Wrap `tx` in `skip_nonfinite` and `with_ema` first, if you
      use them.

  Returns:
    A transformation for `plan(optimizer=...)` or `nnx.Optimizer`; its state is a `MastersState`.

  Source: Mixed Precision Training, arXiv:1710.03740.

  Raises:
    TrainError: `update` is called without parameters.

  Example:
    >>> import jax.numpy as jnp, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 64, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> mesh, tx = nxp.make_mesh(fsdp=8), nxp.with_masters(optax.adam(1e-3))
    >>> plan = nxp.plan(init, mesh, nxp.fsdp(min_size=0), optimizer=tx)
    >>> master = plan["optimizer/opt_state.masters.kernel"]
    >>> master.dtype.name, master.spec, master.bytes_per_device
    ('float32', P(None, 'fsdp'), 256)
  """
  inner = accept_extra(tx)

  def init(params: PyTree) -> MastersState:
    masters = jax.tree.map(lambda x: widen(x) if is_low(x) else optax.MaskedNode(), params)
    return MastersState(inner.init(_merge(masters, params)), masters)

  def update(
    grads: PyTree, state: MastersState, params: PyTree = None, **extra: Any
  ) -> tuple[PyTree, MastersState]:
    params = _need(params, "with_masters")
    full = _merge(state.masters, params)
    updates, inner_state = inner.update(jax.tree.map(widen, grads), state.inner, full, **extra)
    new = optax.apply_updates(full, updates)
    moved = jax.tree.map(lambda old, p, n: n if is_low(p) else old, updates, params, new)
    updates = jax.tree.map(_round_update, moved, params)
    masters = jax.tree.map(
      lambda m, n: m if _is_masked(m) else n, state.masters, cast(Any, new), is_leaf=_is_masked
    )
    return updates, MastersState(inner_state, masters)

  return optax.GradientTransformationExtraArgs(init, cast(Any, update))


@check_arguments(TrainError)
def with_ema(tx: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
  """Keeps an exponential moving average of the trained parameters in the optimizer state.

  After each update, `average = decay * average + (1 - decay) * parameter`, in float32. The first average is
  the parameter itself. `ema_of` makes a module with the averages.

  Args:
    tx: the transformation that trains the parameters. `with_masters(with_ema(tx, decay))` averages the
      float32 masters.
    decay: the weight of the old average, 0 <= decay < 1; 0.999 averages over about 1000 steps.

  Returns:
    A transformation for `plan(optimizer=...)` or `nnx.Optimizer`; its state is an `AverageState`.

  Raises:
    TrainError: `decay` is out of range, or `update` is called without parameters.

  Example:
    >>> import optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init, mesh = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8)
    >>> tx = nxp.with_ema(optax.sgd(0.1), 0.99)
    >>> plan = nxp.plan(init, mesh, nxp.fsdp(min_size=0), optimizer=tx)
    >>> plan["optimizer/opt_state.average.kernel"].spec
    P(None, 'fsdp')
  """
  if not 0 <= decay < 1:
    raise TrainError(f"decay={decay} is not a weight of the past.", fix="0 <= decay < 1, for example 0.999.")
  inner = accept_extra(tx)

  def init(params: PyTree) -> AverageState:
    return AverageState(inner.init(params), jax.tree.map(widen, params))

  def update(
    grads: PyTree, state: AverageState, params: PyTree = None, **extra: Any
  ) -> tuple[PyTree, AverageState]:
    params = _need(params, "with_ema")
    updates, inner_state = inner.update(grads, state.inner, params, **extra)
    new: PyTree = jax.tree.map(widen, optax.apply_updates(params, updates))
    return updates, AverageState(inner_state, optax.incremental_update(new, state.average, 1 - decay))

  return optax.GradientTransformationExtraArgs(init, cast(Any, update))


@check_arguments(TrainError)
def ema_of(optimizer: nnx.Optimizer[Any], model: nnx.Module) -> Any:
  """Returns a copy of a module that holds the averages of `with_ema`.

  Args:
    optimizer: the live optimizer of `model`.
    model: the live module. It does not change.

  Returns:
    A new module. The averages have the dtype and the layout of the parameters; everything else is a copy.
    Further training does not change the new module.

  Raises:
    TrainError: the optimizer state holds no average, or several averages.

  Example:
    >>> import numpy as np, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init, mesh = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8)
    >>> plan = nxp.plan(init, mesh, nxp.fsdp(min_size=0), optimizer=nxp.with_ema(optax.sgd(1.0), 0.75))
    >>> model, optimizer = nxp.create_sharded_model(plan)
    >>> step = nxp.train_step(lambda model, x: model(x).mean() * 64)
    >>> _ = step(model, optimizer, np.ones((8, 8), "float32"))
    >>> float(model.bias[0]), float(nxp.ema_of(optimizer, model).bias[0])
    (-1.0, -0.25)
  """
  states = parts_of_type(optimizer.opt_state, AverageState)
  if len(states) != 1:
    raise TrainError(
      f"the optimizer's state holds {len(states)} averages, but ema_of needs one.",
      details=f"state {type(optimizer.opt_state).__name__}",
      fix="nxp.plan(init, mesh, rules, optimizer=nxp.with_ema(tx, 0.999))",
    )
  module = nnx.clone(model)
  found = variables(module)
  for path, average in nnx.to_flat_state(states[0].average):
    if path not in found:
      raise TrainError(
        f"the optimizer averages {path_str(path)}, which the model does not have.",
        fix="nxp.ema_of(optimizer, model) with the model that this optimizer trains.",
      )
    array = value_of(found[path])
    # Copied, because a train step donates the optimizer's own.
    with no_mesh():
      copy = jnp.copy(value_of(average)).astype(array.dtype)
    found[path].set_raw_value(jax.device_put(copy, array.sharding))
  return module


@check_arguments(TrainError, max_consecutive=range(2**31))
def skip_nonfinite(
  tx: optax.GradientTransformation, max_consecutive: int | None = None
) -> optax.GradientTransformationExtraArgs:
  """Leaves parameters and state unchanged if the gradients contain a NaN or an infinity.

  It equals `optax.apply_if_finite` and has the same state, but it selects values instead of branching. This
  takes less memory, and it works with transformations whose updates have another dtype than the gradients.
  `optimizer.opt_state.total_notfinite` counts the skipped steps.

  Args:
    tx: the transformation to protect. With masters, write `with_masters(skip_nonfinite(tx))`.
    max_consecutive: after this number of consecutive skipped steps, the next step is applied even if it is
      not finite, so that the failure becomes visible. None always skips.

  Returns:
    A transformation for `plan(optimizer=...)` or `nnx.Optimizer`.

  Raises:
    TrainError: `max_consecutive` is negative.

  Example:
    >>> import numpy as np, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init, mesh = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8)
    >>> tx = nxp.skip_nonfinite(optax.adam(1e-3))
    >>> plan = nxp.plan(init, mesh, nxp.fsdp(min_size=0), optimizer=tx)
    >>> model, optimizer = nxp.create_sharded_model(plan)
    >>> step = nxp.train_step(lambda model, x: model(x).mean())
    >>> _ = step(model, optimizer, np.full((8, 8), np.inf, "float32"))
    >>> int(optimizer.opt_state.total_notfinite[...]), bool((model.bias[...] == 0).all())
    (1, True)
  """
  inner = accept_extra(tx)

  def init(params: PyTree) -> optax.ApplyIfFiniteState:
    zero = jnp.zeros((), jnp.int32)
    return optax.ApplyIfFiniteState(zero, jnp.array(True), zero, inner.init(params))

  def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
    finite = all_finite(grads)
    count = jnp.where(finite, 0, optax.safe_increment(state.notfinite_count))
    apply = finite if max_consecutive is None else finite | (count > max_consecutive)
    updates, new = inner.update(grads, state.inner_state, params, **extra)
    total = jnp.where(finite, state.total_notfinite, optax.safe_increment(state.total_notfinite))
    after = optax.ApplyIfFiniteState(count, finite, total, choose(apply, new, state.inner_state))
    return choose(apply, updates, jax.tree.map(jnp.zeros_like, updates)), after

  return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def all_finite(tree: PyTree) -> jax.Array:
  """Whether no array of `tree` holds a NaN or an infinity."""
  found = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
  return functools.reduce(jnp.logical_and, found, jnp.array(True))


def choose(first: jax.Array, a: PyTree, b: PyTree) -> PyTree:
  """`a` where `first` is true, else `b`: array by array.

  `lax.cond` would hold both trees at once, and host-resident state could not be streamed.
  """
  return jax.tree.map(lambda x, y: jnp.where(first, x, y), a, b)


def _is_masked(node: object) -> bool:
  return isinstance(node, optax.MaskedNode)


def _merge(masters: PyTree, params: PyTree) -> PyTree:
  return jax.tree.map(lambda m, p: p if _is_masked(m) else m, masters, params, is_leaf=_is_masked)


def _round_update(moved: PyTree, param: PyTree) -> PyTree:
  """The float32 step from a parameter to its rounded master; other updates as they are."""
  if not is_low(param):
    return moved
  return moved.astype(param.dtype).astype(jnp.float32) - param.astype(jnp.float32)


def _need(params: PyTree, name: str) -> Any:
  if params is None:
    raise TrainError(f"{name} needs the parameters.", fix="tx.update(grads, state, params)")
  return params


def is_low(array: AnyArray) -> bool:
  """Whether it is floating with less than 32 bits: its updates and sums are better made in float32."""
  return jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits < 32


def widen(array: AnyArray) -> jax.Array:
  """The array in at least float32."""
  return array.astype(jnp.float32) if is_low(array) else array
