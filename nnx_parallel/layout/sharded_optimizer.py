"""The optimizer of a plan: it keeps the layout of every array in a user's own step."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import optax
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import no_mesh
from nnx_parallel.core.nodes import Path, array_leaves, parts_of_type
from nnx_parallel.core.shards import pin
from nnx_parallel.core.text import with_article
from nnx_parallel.core.types import AnyArray, Model, Optimizer, PyTree
from nnx_parallel.errors import PlanError, TrainError
from nnx_parallel.layout.optimizer_layout import PerMatrixState

M = TypeVar("M", bound=nnx.Module)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Placement:
  """The planned shardings of a model and of its optimizer.

  Compared by identity, since Flax compares static attributes in every `nnx.jit` call, and a plan has one.
  """

  model: Mapping[Path, NamedSharding]  # path -> sharding of the storage shape
  optimizer: Mapping[Path, NamedSharding]  # the same for the optimizer's arrays
  zero: int  # the plan's ZeRO stage
  # path -> sharding of a scattered gradient, for parameters whose state is split further
  gradients: Mapping[Path, NamedSharding]

  def keep(self, model: Model, optimizer: Optimizer) -> None:
    """Puts, or under a trace constrains, every Variable to its sharding; not in `shard_map` and `vmap`."""
    for root, table in ((model, self.model), (optimizer, self.optimizer)):
      for path, leaf in array_leaves(root).items():
        if isinstance(leaf, nnx.Variable) and path in table:
          array = leaf.get_raw_value()
          kept = _keep(array, table[path])
          if kept is not array:
            leaf.set_raw_value(kept)


IN_USE: contextvars.ContextVar[Placement | None] = contextvars.ContextVar("placement", default=None)
"""The shardings of the plan whose optimizer is being updated; None without a plan."""


class ShardedOptimizer(nnx.Optimizer[M]):
  """An `nnx.Optimizer` whose updates keep the layout of a plan.

  In a step that you write yourself under `nnx.jit` or `jax.jit`, the compiler chooses the layout of the
  results. It may shard a small replicated parameter over the mesh. Then the second step is compiled again,
  and the model no longer has its planned layout. To prevent this, `update` constrains the model and the
  optimizer state. The steps of `nxp.train_step` do the same for everything that they return.

  Args:
    *args: as for `nnx.Optimizer`: the model and the transformation.
    **kwargs: as for `nnx.Optimizer`: `wrt=`.

  Attributes:
    placement: the planned shardings; if None, `update` equals `nnx.Optimizer.update`.

  Example:
    >>> import jax.numpy as jnp, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=64), optimizer=optax.sgd(0.1), zero=1)
    >>> model, optimizer = nxp.create_sharded_model(plan)
    >>> @nnx.jit
    ... def step(model, optimizer, x):
    ...   optimizer.update(model, nnx.grad(lambda m: (m(x) ** 2).mean())(model))
    >>> step(model, optimizer, jnp.ones((8, 8)))
    >>> nxp.check_layout(model, plan, optimizer=optimizer)
  """

  placement: Placement | None = None

  @check_arguments(PlanError)
  @no_mesh()
  def update(self, model: M, grads: PyTree, /, **kwargs: Any) -> optax.Updates:
    """Updates the model and the state in place, as `nnx.Optimizer.update`, and keeps their layout.

    Args:
      model: the module that this optimizer trains.
      grads: the gradients of the model, from `nnx.grad` or `nnx.value_and_grad`.
      **kwargs: more arguments of the transformation, such as `value=loss`.

    Returns:
      The updates that were added to the parameters.

    Raises:
      TrainError: the transformation evaluates the loss, and the plan has ZeRO on Explicit axes.
    """
    _check_structure(self.wrt, model, grads)
    updates = plain_update(self, model, grads, kwargs)
    if self.placement is not None:
      self.placement.keep(model, self)
    return updates


def _check_structure(wrt: nnx.filterlib.Filter, model: Model, grads: PyTree) -> None:
  try:
    found, wanted = (jax.tree.structure(nnx.as_pure(nnx.state(x, wrt))) for x in (grads, model))
  except (IndexError, TypeError, ValueError):
    found, wanted = None, ""
  if found != wanted:
    raise TrainError(
      f"the optimizer got {with_article(type(model).__name__)} and gradients that are not of its parameters.",
      details=f"gradients: {with_article(type(grads).__name__)}",
      fix="optimizer.update(model, nnx.grad(loss_fn)(model, batch)), in this order.",
    )


def placement_of(optimizer: Optimizer) -> Placement | None:
  """The shardings of the plan that an optimizer was made from; None without a plan."""
  return optimizer.placement if isinstance(optimizer, ShardedOptimizer) else None


def plain_update(
  optimizer: Optimizer, model: Model, grads: PyTree, extra: Mapping[str, Any]
) -> optax.Updates:
  """Updates in place without constraining the result; state may be sharded differently from its parameter."""
  if _is_split_further(optimizer, model, grads):
    return _update_on_auto_axes(optimizer, model, grads, extra)
  return _update(optimizer, model, grads, extra)


def _update(optimizer: Optimizer, model: Model, grads: PyTree, extra: Mapping[str, Any]) -> optax.Updates:
  token = IN_USE.set(placement_of(optimizer))
  try:
    if isinstance(optimizer, ShardedOptimizer):
      return nnx.Optimizer.update(optimizer, model, grads, **extra)
    return optimizer.update(model, grads, **extra)
  finally:
    IN_USE.reset(token)


def _is_split_further(optimizer: Optimizer, model: Model, grads: PyTree) -> bool:
  """Whether state on an Explicit mesh is sharded unlike its parameter (ZeRO, `parallel.per_matrix`)."""
  params: list[Any] = [jax.typeof(x) for x in jax.tree.leaves(nnx.state(model, optimizer.wrt))]
  if not any(AxisType.Explicit in kind.sharding.mesh.axis_types for kind in params):
    return False
  if parts_of_type(optimizer.opt_state, PerMatrixState):
    return True
  known = {(kind.shape, kind.sharding.spec) for kind in params}
  shapes = {kind.shape for kind in params}
  state: list[Any] = [jax.typeof(x) for x in jax.tree.leaves((grads, optimizer.opt_state))]
  return any(kind.shape in shapes and (kind.shape, kind.sharding.spec) not in known for kind in state)


def _update_on_auto_axes(
  optimizer: Optimizer, model: Model, grads: PyTree, extra: Mapping[str, Any]
) -> optax.Updates:
  """Lets the compiler choose the layouts inside optax, and returns every array in its old layout."""
  # The loss cannot be called there, since it was traced for Explicit axes.
  functions = {name: _no_function for name, value in extra.items() if callable(value)}
  extra = {name: value for name, value in extra.items() if name not in functions}
  graphdef, state = nnx.split((model, optimizer))

  def run(state: PyTree, grads: PyTree, extra: PyTree) -> PyTree:
    model, optimizer = nnx.merge(graphdef, state)
    updates = _update(optimizer, model, grads, {**extra, **functions})
    return nnx.state((model, optimizer), nnx.Variable), updates

  def placed(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.typeof(x).sharding, tree)

  params = nnx.as_pure(nnx.state(model, optimizer.wrt))
  changed = nnx.state((model, optimizer), nnx.Variable)
  on_auto_axes: Any = jax.sharding.auto_axes(run, out_sharding=(placed(changed), placed(params)))
  new, updates = on_auto_axes(state, grads, extra)
  nnx.update((model, optimizer), new)
  return updates


def _no_function(*_: object, **__: object) -> object:
  raise TrainError(
    "the optimizer evaluates the loss in its update, which does not work with ZeRO on Explicit axes.",
    details="its state is laid out otherwise than the parameters, so the update runs on Auto axes",
    fix="nxp.plan(..., zero=0), or a mesh with Auto axes: nxp.make_mesh without explicit=True.",
  )


def _keep(array: AnyArray, sharding: NamedSharding) -> AnyArray:
  if not isinstance(array, Tracer):
    moved = isinstance(array, jax.Array) and not array.sharding.is_equivalent_to(sharding, array.ndim)
    return jax.device_put(array, sharding) if moved else array
  kind: Any = jax.typeof(array)
  mesh = kind.sharding.mesh
  active = jax.sharding.get_abstract_mesh()
  if len(sharding.spec) > kind.ndim or AxisType.Manual in (*mesh.axis_types, *active.axis_types):
    return array
  return pin(array, sharding)
