"""The axes that a program computes on: Auto axes, unless its model states shardings that they refuse.

On Explicit axes the sharding of an array is part of its type, and each operation must know the sharding of
its result. Layers of flax, and most models, do not state it. So a program takes its arrays off the Explicit
axes, computes on the same devices with Auto axes, and gives its results their types again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import auto_mesh, is_explicit, own_mesh
from nnx_parallel.core.nodes import parts_of_type
from nnx_parallel.core.shards import auto_sharding, compute_on_auto_axes
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.errors import TrainError
from nnx_parallel.layout.constrain import Scope, default_scope, scope_in_use, scoped
from nnx_parallel.train.binding import Binding, Template
from nnx_parallel.train.loss_call import call_loss
from nnx_parallel.train.options import LossFn, StepOptions

_REFUSED = "Auto"
"""A word of jax's errors for a sharding on Auto axes that only Explicit axes accept."""


class Shardings(NamedTuple):
  """The layout of arrays as a program sees them."""

  mesh: Any  # the mesh of all arrays; None on one device
  shardings: list[NamedSharding | None]  # the sharding of each array, if it has one
  scope: Scope | None  # the scope of the plan, if there is one
  note: str = ""  # the axes that the program computes on, and why; empty on a mesh without Explicit axes

  def on_auto_axes(self) -> Shardings:
    """The same shardings on Auto axes."""
    if self.mesh is None or not is_explicit(self.mesh):
      return self
    scope = self.scope and self.scope.on_auto_axes()
    shardings = [None if where is None else auto_sharding(where) for where in self.shardings]
    return Shardings(
      auto_mesh(self.mesh), shardings, scope, "computed on Auto axes: nothing states a sharding"
    )

  def as_stated(self, error: BaseException) -> Shardings:
    """These places, for a program whose model states shardings: `error` says that Auto axes have none."""
    said = str(error).split("\n")[0].split(" This error occurs at")[0]
    return self._replace(note=f"computed on Explicit axes: the model states shardings ({said})")

  def active(self) -> contextlib.AbstractContextManager[object]:
    """Makes the mesh of the program active, if another mesh is active."""
    return own_mesh(self.mesh)

  def place(self, tree: PyTree) -> PyTree:
    """Arrays outside of a program on its mesh: the same buffers under another type; or abstract arrays."""

    def moved(x: AnyArray) -> PyTree:
      where = getattr(x, "sharding", None)
      if not isinstance(where, NamedSharding) or not is_explicit(where.mesh):
        return x
      where = auto_sharding(where)
      abstract = isinstance(x, jax.ShapeDtypeStruct)
      return x.update(sharding=where) if abstract else jax.device_put(x, where)

    return tree if self.mesh is None or is_explicit(self.mesh) else jax.tree.map(moved, tree)


def shardings_of_loss(binding: Binding, loss_fn: LossFn, batch: PyTree, options: StepOptions) -> Shardings:
  """The shardings in a program of a loss of these objects."""

  def forward(arrays: list[jax.Array], batch: PyTree) -> PyTree:
    models = binding.template.build(arrays)[0]
    return options.terms(call_loss(loss_fn, models, batch), batch)

  return shardings_inside(shardings_outside(binding), forward, binding.leaves(), batch)


def shardings_outside(binding: Binding) -> Shardings:
  """The shardings of live objects."""
  return Shardings(binding.mesh, binding.shardings, binding.scope)


def shardings_inside(outside: Shardings, run: Callable[..., PyTree], *args: Any) -> Shardings:
  """The shardings in a program that calls `run(*args)`; it is traced to see whether it states shardings."""
  # The program raises all other errors too, and explains them.
  inside = outside.on_auto_axes()
  if inside is outside:
    return outside

  def in_scope(*args: PyTree) -> PyTree:
    with default_scope(inside.scope):
      return run(*args)

  try:
    jax.eval_shape(compute_on_auto_axes(in_scope, outside.mesh), *args)
  except (TypeError, ValueError) as error:
    if states_shardings(error):
      return outside.as_stated(error)
  return inside


def on_fitting_axes(run: Callable[..., PyTree], scope: Scope) -> Callable[..., PyTree]:
  """`run`, of abstract arrays without types, in a scope on Auto axes; or as it is, if it states shardings."""

  def fitting(*args: PyTree) -> PyTree:
    try:
      with scoped(scope.on_auto_axes()):
        return run(*args)
    except (TypeError, ValueError) as error:
      if not states_shardings(error):
        raise
    with scoped(scope):
      return run(*args)

  return fitting


def states_shardings(error: BaseException) -> bool:
  """Whether an error says that a program on Auto axes states shardings."""
  return _REFUSED in str(error)


@check_arguments(TrainError)
def auto_axes(step: Callable[..., Any]) -> Callable[..., Any]:
  """Lets a step of your own compute on Auto axes if its mesh has Explicit axes, as `train_step` does.

  On Explicit axes, the layers of Flax would have to state the shardings of their results, which they do not.
  Inside of the function, no array has a sharding in its type, and the compiler chooses the shardings. The
  Variables keep their types.

  Args:
    step: a function of modules, optimizers and pytrees of arrays that returns arrays and is called under
      `nnx.jit`. It may change Variables, but it must not add or remove any.

  Returns:
    A function with the same arguments. Its results are replicated over Explicit axes. On other meshes, it
    equals `step`.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
    >>> init = lambda: nnx.Embed(16, 8, rngs=nnx.Rngs(0))
    >>> model = nxp.create_sharded_model(init, mesh, nxp.fsdp(min_size=0))
    >>> forward = nnx.jit(nxp.parallel.auto_axes(lambda model, tokens: model(tokens).sum(-1)))
    >>> forward(model, jnp.arange(4)).shape
    (4,)
  """

  @functools.wraps(step)
  def on_auto(*args: Any) -> Any:
    objects = {n: x for n, x in enumerate(args) if parts_of_type(x, nnx.Pytree)}
    template = Template(objects)
    arrays = template.arrays(objects)
    kinds: list[Any] = [jax.typeof(arrays[i]).sharding for i in template.variables]
    mesh = next((kind.mesh for kind in kinds if AxisType.Explicit in kind.mesh.axis_types), None)
    if mesh is None:
      return step(*args)

    def run(arrays: list[jax.Array], rest: dict[int, Any]) -> PyTree:
      built = template.build(arrays)
      with default_scope(scope_in_use()):  # it is of Explicit axes
        result = step(*({**built, **rest}[n] for n in range(len(args))))
      after = template.arrays(built)
      return [after[i] for i in template.variables], result

    rest = {n: x for n, x in enumerate(args) if n not in objects}
    specs = [kind.spec for kind in kinds], PartitionSpec()
    after, result = compute_on_auto_axes(run, mesh, lambda _: specs)(arrays, rest)
    for i, value in zip(template.variables, after, strict=True):
      template.leaves[i].set_raw_value(value)
    return result

  return on_auto


def with_types(
  run: Callable[..., PyTree], outside: Shardings, inside: Shardings, specs: Callable[[PyTree], PyTree]
) -> Callable[..., Any]:
  """A program of arrays in the layout `outside` that computes `inside`; `specs`: of its results."""
  return run if inside.mesh == outside.mesh else compute_on_auto_axes(run, outside.mesh, specs)
