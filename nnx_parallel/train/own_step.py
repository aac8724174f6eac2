"""For a step that the user writes: its loss with the parameters gathered where it reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import auto_mesh, axis_sizes
from nnx_parallel.core.nodes import Path, value_of, variables
from nnx_parallel.core.text import with_article
from nnx_parallel.core.types import Model, PyTree
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.gather import Gather
from nnx_parallel.layout.batch import batch_axes as axes_of_batch
from nnx_parallel.layout.constrain import scope_of
from nnx_parallel.layout.plan import Plan
from nnx_parallel.rules.ruleset import RuleSet
from nnx_parallel.train.binding import Template
from nnx_parallel.train.watch import objects_in

F = TypeVar("F", bound=Callable[..., Any])


@check_arguments(TrainError)
def gather_on_read(loss_fn: F, model: Model | Plan, *, batch_axes: Sequence[str] | None = None) -> F:
  """Returns a loss for a step of your own that gathers parameters where it reads them, as `train_step` does.

  If a mesh axis shards both parameters and the batch, and the mesh has another axis, XLA can compute wrong
  gradients (`plan.notes` says so). With each parameter gathered over the axes of the batch where the loss
  reads it, XLA has no choice to get wrong. A cast comes before the gather, and the body of a scan or of
  `nnx.remat` gathers again in the backward pass. A table that tokens are looked up in is not gathered: the
  devices exchange the rows that they find, also on a mesh with a single axis. On such a mesh, all else stays
  as it is. The gradients of grouped convolutions need `nxp.verify.with_correct_convolutions` too.

  The shardings are read in this call, and nothing is stored on the model.

  Args:
    loss_fn: `(model, *args, **kwargs) -> results`, to be called inside of `jax.jit` or `nnx.jit`, also under
      `nnx.grad`. It may change Variables, but it must not add or remove any.
    model: the live module, or a tuple or dict of modules, in the layout of the step; or its plan.
    batch_axes: the mesh axes that shard the batch. None takes them from the plan that made the model; without
      a plan, the axes named like in `plan` (`data`, `fsdp` and so on).

  Returns:
    A function with the same arguments and results.

  Raises:
    TrainError: nothing says which axes shard the batch; or inside of the step, a parameter is the result of a
      condition, so that it cannot be gathered where it is read.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init, mesh = lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nxp.make_mesh(data=2, fsdp=2, tensor=2)
    >>> model = nxp.create_sharded_model(init, mesh, nxp.fsdp(min_size=0))
    >>> loss = nxp.parallel.gather_on_read(lambda model, x: (model(x) ** 2).mean(), model)
    >>> gradients = nnx.jit(lambda model, x: nnx.grad(loss)(model, x))(model, jnp.ones((8, 16)))
    >>> gradients.kernel.shape
    (16, 16)
  """
  if not isinstance(model, Plan) and not all(isinstance(x, nnx.Pytree) for x in objects_in(model)):
    raise TrainError(
      f"gather_on_read needs a live model, and got {with_article(type(model).__name__)}.",
      fix="nxp.parallel.gather_on_read(loss_fn, model), or nxp.parallel.gather_on_read(loss_fn, plan)",
    )
  gather = _gather_of(model, batch_axes)

  @functools.wraps(loss_fn)
  def gathered(model: Model, *args: Any, **kwargs: Any) -> Any:
    template = Template(model)
    before = template.arrays(model)
    kinds = [jax.typeof(before[i]).sharding.mesh for i in template.variables]
    if gather is None or any(AxisType.Explicit in mesh.axis_types for mesh in kinds):
      return loss_fn(model, *args, **kwargs)
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, nnx.Pytree))
    moving = [n for n, x in enumerate(leaves) if isinstance(x, (jax.Array, np.ndarray))]
    own = [*template.variables, *template.raw]

    def run(arrays: list[Any], moved: list[Any]) -> PyTree:
      given = {**template.constants, **dict(zip(own, arrays, strict=True))}
      built = template.build([given[i] for i in range(len(before))])
      everything = {**dict(enumerate(leaves)), **dict(zip(moving, moved, strict=True))}
      args, kwargs = jax.tree.unflatten(structure, everything.values())
      result = loss_fn(built, *args, **kwargs)
      after = template.arrays(built)
      return result, {i: after[i] for i in template.variables if after[i] is not given[i]}

    def paths(arrays: list[Any], moved: list[Any]) -> list[Path | None]:
      named = [template.paths[i] for i, x in zip(own, arrays, strict=True) for _ in jax.tree.leaves(x)]
      return [*named, *(None for _ in moved)]

    result, changed = gather.on(run, paths)([before[i] for i in own], [leaves[n] for n in moving])
    for i, value in changed.items():
      template.leaves[i].set_raw_value(value)
    return result

  return gathered  # pyright: ignore[reportReturnType]


def _gather_of(model: Model | Plan, batch_axes: Sequence[str] | None) -> Gather | None:
  if isinstance(model, Plan):
    shardings: dict[Path, Any] = {path: leaf.sharding for path, leaf in model.of("model").items()}
    scope = model.activation_rules
  else:
    found = variables(model)
    shardings = {path: getattr(value_of(leaf), "sharding", None) for path, leaf in found.items()}
    scope = scope_of(found.values())
  mesh = next((where.mesh for where in shardings.values() if isinstance(where, NamedSharding)), None)
  if mesh is None or mesh.size == 1:
    return None
  axes = batch_axes
  if axes is None:
    axes = axes_of_batch(RuleSet() if scope is None else scope.ruleset, axis_sizes(mesh))
  if axes is None:
    raise TrainError(
      "gather_on_read does not know which mesh axes shard the batch.",
      details=f"mesh {axis_sizes(mesh)}; the model was made without a plan",
      fix=f'nxp.parallel.gather_on_read(loss, model, batch_axes=("{mesh.axis_names[0]}",))',
    )
  return Gather.of(shardings, axes, auto_mesh(mesh))
