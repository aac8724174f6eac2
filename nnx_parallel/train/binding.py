"""Live modules as a flat list of arrays: read, laid out, and rebuilt around other arrays.

`nnx.jit` traverses the module in every step, which is most of its cost. Here it is traversed once. Each step
then reads the arrays of the same Variables, after `Watch` has compared the structure with the traversed
structure.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnx_parallel.core.mesh import is_explicit, mesh_inside
from nnx_parallel.core.nodes import Path, path_str, value_of, variables
from nnx_parallel.core.text import few, with_article
from nnx_parallel.core.types import AnyArray, Leaf, Model, Variable
from nnx_parallel.errors import TrainError
from nnx_parallel.layout.constrain import scope_of
from nnx_parallel.train.donation import is_plain
from nnx_parallel.train.watch import Watch

current_trace: Callable[[], object] = get_opaque_trace_state
"""The trace state that flax compares before it changes a Variable: equal while no `jit` is being traced."""


class Template:
  """The structure of some modules and optimizers, live or abstract, to rebuild them around other arrays."""

  def __init__(self, objects: Model):
    self.graphdef: nnx.GraphDef[Any] = nnx.split(objects)[0]
    flat = variables(objects)
    self.paths: list[Path] = list(flat)  # of Variables, and of arrays outside of Variables
    self.leaves: list[Leaf] = list(flat.values())
    self.index: dict[Path, int] = {path: i for i, path in enumerate(self.paths)}
    self.variables: list[int] = []  # the positions of Variables with an array
    self.raw: list[int] = []  # of raw arrays: arguments of a program that are not written back
    # Position -> NumPy array, or a Variable's value that is not an array (optax's `MaskedNode`).
    self.constants: dict[int, AnyArray] = {}
    for i, leaf in enumerate(self.leaves):
      if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        self.raw.append(i)
      elif isinstance(leaf, nnx.Variable) and jax.tree.leaves(leaf.get_raw_value()):
        self.variables.append(i)
      else:
        self.constants[i] = value_of(leaf)

  def blank(self) -> Template:
    """The same structure without arrays, so that it keeps no model alive."""
    copied = copy.copy(self)
    copied.leaves = [_blank(leaf) for leaf in self.leaves]
    return copied

  def join(self, arrays: Iterable[AnyArray], raw: Iterable[AnyArray]) -> list[AnyArray]:
    """All leaves, from the arrays of the Variables and the raw arrays."""
    found = {**self.constants, **dict(zip(self.variables, arrays, strict=True))}
    found |= dict(zip(self.raw, raw, strict=True))
    return [found[i] for i in range(len(self.leaves))]

  def build(self, arrays: Sequence[AnyArray]) -> Any:
    """New objects of the same structure around `arrays`, which are in the order of `paths`."""
    made: list[Any] = [
      (path, _around(leaf, array) if isinstance(leaf, nnx.Variable) else array)
      for path, leaf, array in zip(self.paths, self.leaves, arrays, strict=True)
    ]
    return nnx.merge(self.graphdef, nnx.from_flat_state(made))

  def arrays(self, objects: Model) -> list[AnyArray]:
    """The arrays of `objects`, which `build` made; a `TrainError` if Variables were added or removed."""
    after = variables(objects)
    for path in after:
      if path not in self.index:
        raise TrainError(
          f"the step added {path_str(path)}, Variable type {type(after[path]).__name__}, to the module.",
          fix="create it before the first step, or remove it in the loss function: nnx.pop(model,"
          f" nnx.{type(after[path]).__name__}).",
        )
    for path in self.paths:
      if path not in after:
        raise TrainError(
          f"the step removed {path_str(path)} from the module.",
          fix="change the structure between steps, not inside them.",
        )
    for i, before in self.constants.items():
      path = self.paths[i]
      if jax.tree.leaves(value_of(after[path])) and not jax.tree.leaves(before):
        raise TrainError(
          f"the step put an array into {path_str(path)}, which held {before}.",
          details="a step has a place for the arrays that were there before it, and would drop this one",
          fix="create it with an array of its shape: nnx.Variable(jnp.zeros(shape)).",
        )
    return [value_of(after[path]) for path in self.paths]


def _around(leaf: Leaf, array: AnyArray) -> Leaf:
  """A copy of a Variable around an array; on the mesh that is active, where its own has other axis types."""
  mesh = leaf.get_metadata("mesh", None)
  inside = mesh_inside(mesh) if isinstance(mesh, Mesh) else mesh
  return leaf.copy(array) if inside == mesh else leaf.copy(array, mesh=inside)


def _blank(leaf: Leaf) -> Leaf:
  value = value_of(leaf)
  if not isinstance(value, jax.Array):
    return leaf
  empty = jax.ShapeDtypeStruct(value.shape, value.dtype)
  return leaf.copy(empty) if isinstance(leaf, nnx.Variable) else empty


class Binding:
  """The Variables of live objects, in a fixed order, with their shardings pinned.

  Names of `roots` start the paths in messages. `planned` are shardings of replaced layers. `move`: arrays
  without a mesh are moved to the mesh of the others, in the live Variables.
  """

  def __init__(
    self,
    roots: Mapping[str, Model],
    planned: Mapping[Path, NamedSharding] = MappingProxyType({}),
    *,
    move: bool = True,
  ):
    self.names = tuple(roots)
    self.template = Template(tuple(roots.values()))
    self.labels = [self.label(path) for path in self.template.paths]  # of all leaves
    leaves = self.template.leaves
    self.raw: list[AnyArray] = [leaves[i] for i in self.template.raw]
    self._own = self.template.variables
    self.variables: list[Variable] = [leaves[i] for i in self._own]
    self.variable_labels = [self.labels[i] for i in self._own]  # in the order of `read`
    self._check_plain()
    self.watch = Watch(roots)
    # The pinned shardings of all leaves; None where nothing is pinned.
    self.shardings = [_sharding_of(value_of(leaf)) for leaf in self.template.leaves]
    self.mesh = _common_mesh(self.labels, self.shardings)
    self.scope = scope_of(self.variables)
    if self.mesh is not None:
      self._settle(self.mesh, planned, move=move)
    self.variable_shardings = [self.shardings[i] for i in self._own]

  def label(self, path: Path) -> str:
    """`(1, 'opt_state', 0)` -> `optimizer.opt_state.0`."""
    return ".".join([self.names[int(path[0])], *map(str, path[1:])])  # pyright: ignore[reportArgumentType]

  def read(self) -> list[AnyArray]:
    """The current arrays of the Variables (raw arrays excluded), in order."""
    return [variable.get_raw_value() for variable in self.variables]

  def leaves(self) -> list[AnyArray]:
    """The current values of all leaves, raw arrays included."""
    return self.template.join(self.read(), self.raw)

  def _check_plain(self) -> None:
    values = [variable.get_raw_value() for variable in self.variables]
    for label, variable, value in zip(self.variable_labels, self.variables, values, strict=True):
      if not is_plain(variable) or not hasattr(value, "shape"):
        raise TrainError(
          f"{label} holds {with_article(type(value).__name__)}, which a step cannot read and write back.",
          fix="store one array in each Variable (no array refs, no pytrees).",
        )
    gone = [label for label, value in zip(self.variable_labels, values, strict=True) if is_deleted(value)]
    if gone:
      raise deleted(gone, len(values))

  def _settle(self, mesh: Mesh, planned: Mapping[Path, NamedSharding], *, move: bool) -> None:
    # Else XLA chooses a layout for arrays that are on no mesh, and the second step is compiled again for it.
    for i, (path, leaf) in enumerate(zip(self.template.paths, self.template.leaves, strict=True)):
      value, own = value_of(leaf), self.shardings[i]
      where = _where(value, mesh, planned.get(path), own)
      if where is own or isinstance(value, jax.ShapeDtypeStruct):
        continue
      if (
        isinstance(value, jax.Array)
        and value.committed
        and value.sharding.device_set != set(mesh.devices.flat)
      ):
        raise TrainError(
          f"{self.labels[i]} is on {_devices(value)}, and the rest on a mesh of {mesh.size} devices.",
          fix="create it with nxp.create_sharded_model, or jax.device_put(x, NamedSharding(mesh, P())).",
        )
      self.shardings[i] = where
      if i in self.template.raw:
        self.raw[self.template.raw.index(i)] = jax.device_put(value, where)
      elif move and i not in self.template.constants:
        leaf.set_raw_value(jax.device_put(value, where))

  def are_pinned(self, arrays: list[jax.Array]) -> bool:
    """Whether arrays, in the order of `read`, have the pinned shardings; 50 nanoseconds for each."""
    try:
      return self.mesh is None or [x.sharding for x in arrays] == self.variable_shardings
    except AttributeError:  # an array of NumPy
      return False

  def pin(self) -> bool:
    """Gives Variables the pinned sharding, where theirs is equivalent to it; whether all have it then."""
    for variable, where in zip(self.variables, self.variable_shardings, strict=True):
      value = variable.get_raw_value()
      # A copy: the array may have other holders, and the step donates it.
      pinned = as_pinned(value, where, may_alias=False)
      if pinned is not value:
        variable.set_raw_value(pinned)
    return self.are_pinned(self.read())


RESTORE = "restore the last checkpoint: model, optimizer = nxp.Checkpointer(directory).restore(plan)"


def is_deleted(array: object) -> bool:
  """Whether it is an array whose memory was donated or freed."""
  return isinstance(array, jax.Array) and array.is_deleted()


def deleted(labels: Sequence[str], count: int) -> TrainError:
  """The error of a call on a model with `count` arrays, of which the arrays with these labels are deleted."""
  return TrainError(
    f"{labels[0]} was deleted: its memory was donated to a step that failed, or to another function.",
    details=f"gone: {some_of(labels, count)}",
    fix=f"{RESTORE}.\n"
    "Keep a copy of arrays that another function donates: jax.tree.map(jnp.copy, nnx.state(model)).",
  )


def some_of(labels: Sequence[str], count: int) -> str:
  """`a, b and 3 more of 9 arrays`."""
  return f"{few(labels)} of {count} arrays"


def check_outside(roots: Iterable[Model]) -> None:
  """Refuses (`TrainError`) objects that are changed while `jax.jit` or another transform is traced."""
  for variable in variables(tuple(roots)).values():
    if not isinstance(variable, nnx.Variable):
      continue
    value = variable.get_raw_value()
    try:
      variable.set_raw_value(value)
    except TraceContextError as error:
      raise inside_a_program() from error
    if isinstance(value, Tracer):
      raise inside_a_program()


def inside_a_program() -> TrainError:
  """The error of a step that is called where jax traces another program."""
  return TrainError(
    "a train step cannot run inside jax.jit, nnx.jit or another transform: it is a compiled program itself.",
    details="it would write tracers into the live Variables",
    fix="call step(model, optimizer, batch) from plain Python; in a program of your own, use\n"
    "loss, grads = nnx.value_and_grad(loss_fn)(model, batch); optimizer.update(model, grads).",
  )


def _where(
  value: AnyArray, mesh: Mesh, planned: NamedSharding | None, own: NamedSharding | None
) -> NamedSharding:
  """The planned sharding, if the shape allows it; else the current sharding; else replicated on the mesh."""
  if planned is not None and planned.mesh == mesh:
    if own is not None and own.is_equivalent_to(planned, value.ndim):
      return own
    with contextlib.suppress(ValueError):  # an edited layer of a shape that the plan's sharding cannot split
      planned.shard_shape(value.shape)
      return planned
  return NamedSharding(mesh, PartitionSpec()) if own is None else own


def as_pinned(value: AnyArray, where: NamedSharding | None, **options: Any) -> AnyArray:
  """An array with the layout spelled as a program expects; the array itself if the layouts differ."""
  # `P("fsdp", None)` and `P("fsdp")` are one layout but two types in jax. An array without devices is put on
  # Explicit axes, where `jit` would not give it the type of the program. `options` are for `jax.device_put`.
  own = _sharding_of(value)
  is_loose = own is None and not getattr(value, "committed", False)
  if is_loose and where is not None and is_explicit(where.mesh):
    return jax.device_put(value, where, **options)
  if where is None or own is None or own == where or own.mesh != where.mesh:
    return value
  return jax.device_put(value, where, **options) if own.is_equivalent_to(where, value.ndim) else value


def _sharding_of(value: object) -> NamedSharding | None:
  sharding = getattr(value, "sharding", None)
  return sharding if isinstance(sharding, NamedSharding) else None


def _common_mesh(labels: list[str], shardings: list[NamedSharding | None]) -> Any:
  found = {s.mesh: label for label, s in zip(labels, shardings, strict=True) if s is not None}
  if len(found) > 1:
    (mesh, label), (other, second), *_ = found.items()
    raise TrainError(
      f"{label} and {second} are on different meshes.",
      details=f"{dict(mesh.shape)} ({mesh.axis_types[0]}) and {dict(other.shape)} ({other.axis_types[0]})",
      fix="create a model and its optimizer from one plan; models of one step share a mesh, and"
      " nxp.parallel.send moves arrays between meshes.",
    )
  return next(iter(found), None)


def _devices(value: jax.Array) -> str:
  devices = sorted(value.sharding.device_set, key=lambda d: d.id)
  return str(devices[0]) if len(devices) == 1 else f"{len(devices)} devices"
