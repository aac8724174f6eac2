"""A live module as a flat list of arrays: read, written back, and watched for edits.

`nnx.jit` traverses the module in every step, which is most of its cost. Here it is traversed once. Each step
then reads the arrays of the same Variables, after `Watch` has compared the structure with what was traversed.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sys import getrefcount
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.core.nodes import Path, path_str, value_of, variables
from nnx_parallel.core.text import few, with_article
from nnx_parallel.errors import TrainError

# The slot itself: the public accessors cost five times as much and check what a step has checked once.
_SLOT: Any = vars(nnx.Variable)["_raw_value"]
ABSENT: Any = object()
"""Stands for an absent object."""
_END = (ABSENT,)
"""Follows the items of a list or dict, so that none moves to the next one unnoticed."""
_SIMPLE = (bool, int, float, str, bytes, type(None), tuple)
current_trace: Callable[[], Any] = get_opaque_trace_state
"""What flax compares before it changes a Variable: equal while no `jit` is being traced."""
put: Callable[[Any, Any], None] = _SLOT.__set__
"""Sets the array of a Variable, without the checks that a step has made once."""
flat: Callable[[Iterable[Iterable[Any]]], Iterator[Any]] = itertools.chain.from_iterable
"""The items of several iterables, one after the other."""
exhaust: Callable[[Iterable[Any]], None] = collections.deque[Any](maxlen=0).extend
"""Runs an iterator to its end: `exhaust(map(put, variables, arrays))` is a loop without bytecode."""


class Template:
  """The structure of some modules, and how to rebuild them around other arrays.

  Args:
    objects: a module, or a tuple or dict of modules and optimizers; live or abstract.
  """

  def __init__(self, objects: Any):
    self.graphdef: Any = nnx.split(objects)[0]
    flat = variables(objects)
    self.paths: list[Path] = list(flat)
    self.leaves: list[Any] = list(flat.values())
    self.index: dict[Path, int] = {path: i for i, path in enumerate(self.paths)}

  def blank(self) -> Template:
    """The same structure without arrays, so that it keeps no model alive."""
    copied = copy.copy(self)
    copied.leaves = [_blank(leaf) for leaf in self.leaves]
    return copied

  def build(self, arrays: Sequence[Any]) -> Any:
    """New objects of the same structure around `arrays`, which are in the order of `paths`."""
    made: list[Any] = [
      (path, leaf.copy(array) if isinstance(leaf, nnx.Variable) else array)
      for path, leaf, array in zip(self.paths, self.leaves, arrays, strict=True)
    ]
    return nnx.merge(self.graphdef, nnx.from_flat_state(made))

  def arrays(self, objects: Any) -> list[Any]:
    """The arrays of `objects`, which `build` made, in the order of `paths`.

    Raises:
      TrainError: a Variable was added or removed since.
    """
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
    return [value_of(after[path]) for path in self.paths]


def plain_attributes(objects: Any) -> dict[str, Any]:
  """The attributes of modules, and the items of their lists and dicts, that hold no array, by dotted path."""
  return {
    f"{path}.{name}".removeprefix("."): value
    for path, node in _containers("", objects, set())
    for name, value in _items(node)
    if not str(name).startswith("_pytree__") and not _holds_state(value)
  }


def check_plain_attributes(before: Mapping[str, Any], objects: Any) -> None:
  """Refuses a loss function that wrote plain attributes, which no compiled step can write back.

  Raises:
    TrainError: an attribute of `before` has another value, is gone, or is new.
  """
  after = plain_attributes(objects)
  for name in dict.fromkeys([*before, *after]):
    old, new = before.get(name, ABSENT), after.get(name, ABSENT)
    if old is new or (type(old) is type(new) and isinstance(new, _SIMPLE) and old == new):
      continue
    change = "added" if old is ABSENT else "removed" if new is ABSENT else f"changed from {old!r} to {new!r}"
    raise TrainError(
      f"the loss function {change.split()[0]} the attribute {name}.",
      details=f"{name} was {change}; a compiled step writes back Variables only",
      fix=f"keep it in a Variable: {name.rsplit('.', 1)[-1]} = nnx.Variable(jnp.zeros(())), which each step"
      " updates; or change it outside of the loss function.",
    )


def _holds_state(value: Any) -> bool:
  """Whether a value holds Variables or arrays, or is a module or container whose items are looked at."""
  if isinstance(value, (nnx.Pytree, nnx.Variable, dict, list, tuple)):
    return not (isinstance(value, tuple) and all(isinstance(x, _SIMPLE) for x in value))
  return hasattr(value, "shape") and hasattr(value, "dtype")


class Parts(NamedTuple):
  """How the leaves of a template divide: Variables, raw arrays, and constants of a program.

  Attributes:
    leaves: how many there are.
    raw: the positions of raw arrays, which are arguments of a program and are not written back.
    constants: position -> NumPy array, or a Variable's value that is no array (optax's `MaskedNode`).
  """

  leaves: int
  raw: tuple[int, ...]
  constants: Mapping[int, Any]

  @classmethod
  def of(cls, leaves: Sequence[Any]) -> Parts:
    """The parts of these leaves."""
    raw = tuple(i for i, x in enumerate(leaves) if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)))
    places = {*raw}
    others = {
      i: value_of(leaf)
      for i, leaf in enumerate(leaves)
      if i not in places and not (isinstance(leaf, nnx.Variable) and jax.tree.leaves(leaf.get_raw_value()))
    }
    return cls(len(leaves), raw, others)

  @property
  def variables(self) -> list[int]:
    """The positions of Variables with an array."""
    others = {*self.constants, *self.raw}
    return [i for i in range(self.leaves) if i not in others]

  def join(self, arrays: Iterable[Any], raw: Iterable[Any]) -> list[Any]:
    """All leaves, from the arrays of the Variables and the raw arrays."""
    found = {**self.constants, **dict(zip(self.variables, arrays, strict=True))}
    found |= dict(zip(self.raw, raw, strict=True))
    return [found[i] for i in range(self.leaves)]


def _blank(leaf: Any) -> Any:
  value = value_of(leaf)
  if not isinstance(value, jax.Array):
    return leaf
  empty = jax.ShapeDtypeStruct(value.shape, value.dtype)
  return leaf.copy(empty) if isinstance(leaf, nnx.Variable) else empty


class Binding:
  """The Variables of live objects, in a fixed order, with their shardings pinned.

  Args:
    roots: name -> module, optimizer, or a tuple or dict of them; the names start the paths in messages.
    planned: shardings by path in the template; replaced layers are put there.
    move: whether arrays that are on no mesh are moved to the mesh of the others, in the live Variables.
  """

  def __init__(
    self,
    roots: Mapping[str, Any],
    planned: Mapping[Path, NamedSharding] = MappingProxyType({}),
    *,
    move: bool = True,
  ):
    self.names = tuple(roots)
    self.template = Template(tuple(roots.values()))
    self.labels = [self.label(path) for path in self.template.paths]
    leaves = self.template.leaves
    self.parts = Parts.of(leaves)
    self.raw: list[Any] = [leaves[i] for i in self.parts.raw]
    self._own = self.parts.variables
    self.variables: list[Any] = [leaves[i] for i in self._own]
    self._check_plain()
    self.watch = Watch(roots)
    self.shardings = [_sharding_of(value_of(leaf)) for leaf in self.template.leaves]
    self.mesh = _common_mesh(self.labels, self.shardings)
    if self.mesh is not None:
      self._settle(self.mesh, planned, move=move)

  def label(self, path: Path) -> str:
    """`(1, 'opt_state', 0)` -> `optimizer.opt_state.0`."""
    return ".".join([self.names[int(path[0])], *map(str, path[1:])])  # pyright: ignore[reportArgumentType]

  def read(self) -> list[Any]:
    """The current arrays of the Variables (raw arrays excluded), in order."""
    # Python reads a slot faster than `map` over its descriptor does.
    return [variable._raw_value for variable in self.variables]

  def with_raw(self, arrays: Iterable[Any]) -> list[Any]:
    """All leaves: `arrays` for the Variables, the module's own for raw arrays."""
    return self.parts.join(arrays, self.raw)

  def without_raw(self, leaves: Sequence[Any]) -> list[Any]:
    """The leaves of the Variables only, in the order of `read`."""
    return [leaves[i] for i in self._own]

  @property
  def variable_labels(self) -> list[str]:
    """The dotted paths in the order of `read`."""
    return [self.labels[i] for i in self._own]

  @property
  def variable_shardings(self) -> list[Any]:
    """The pinned shardings in the order of `read`; None where nothing is pinned."""
    return [self.shardings[i] for i in self._own]

  def _check_plain(self) -> None:
    values = [variable.get_raw_value() for variable in self.variables]
    for label, variable, value in zip(self.variable_labels, self.variables, values, strict=True):
      if _SLOT.__get__(variable) is not value or not hasattr(value, "shape"):
        raise TrainError(
          f"{label} holds {with_article(type(value).__name__)}, which a step cannot read and write back.",
          fix="store one array in each Variable (no array refs, no pytrees).",
        )
    gone = [label for label, value in zip(self.variable_labels, values, strict=True) if is_deleted(value)]
    if gone:
      raise deleted(gone, len(values))

  def _settle(self, mesh: Any, planned: Mapping[Path, NamedSharding], *, move: bool) -> None:
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
      if i in self.parts.raw:
        self.raw[self.parts.raw.index(i)] = jax.device_put(value, where)
      elif move and i not in self.parts.constants:
        put(leaf, jax.device_put(value, where))

  def pin(self, which: Iterable[int]) -> None:
    """Gives Variables (by their position in `read`) the pinned sharding, where theirs is equivalent to it."""
    for n in which:
      value = self.variables[n]._raw_value
      # A copy: the array may have other holders, and the step donates it.
      put(self.variables[n], as_pinned(value, self.shardings[self._own[n]], may_alias=False))


class Watch:
  """Notices that attributes of live modules were replaced, added or removed, by identity.

  Compared are the attributes of every module, and the items of the lists and dicts that a module holds. Not
  noticed are changes of a Variable's metadata, and those inside other objects.

  Args:
    roots: as for `Binding`.
  """

  def __init__(self, roots: Mapping[str, Any]):
    self._roots = {name: _weak(root) for name, root in roots.items()}
    self.look()

  def look(self) -> None:
    """Makes the present structure the one to compare with."""
    self._attributes: dict[str, Any] = {}
    self._views: list[Iterable[Any]] = []
    seen: set[int] = set()
    for name, make in self._roots.items():
      for path, node in _containers(name, make(), seen):
        self._attributes |= {f"{path}.{key}": value for key, value in _items(node)}
        if isinstance(node, nnx.Pytree):
          self._views.append(vars(node).values())  # flax keeps the names of its attributes among them
        else:
          self._views += [node.values(), node, _END] if isinstance(node, dict) else [node, _END]
    self._views.append(_END)
    self._saved: list[Any] = [*flat(self._views)]

  def same(self) -> bool:
    """Whether every attribute is still the same object; 20 nanoseconds for each."""
    # By identity: `==` runs the code of users, takes 1 for True, and compares arrays by their values.
    return all(map(operator.is_, flat(self._views), self._saved))

  def kinds(self) -> tuple[Any, ...]:
    """Name and type of every plain attribute: `True`, `1` and `1.0` are equal, and make other programs."""
    return tuple((name, type(value)) for name, value in self._attributes.items() if type(value) in _SIMPLE)

  def reference(self, name: str) -> Callable[[], Any]:
    """A function that returns the root while it is alive; of a tuple or dict, an object that is no root."""
    make = self._roots.get(name)
    return make if isinstance(make, weakref.ref) else lambda: ABSENT

  def alive(self) -> bool:
    """Whether none of the watched modules and optimizers was garbage-collected."""
    return all(item is not None for make in self._roots.values() for item in objects_in(make()))

  def is_for(self, roots: Mapping[str, Any]) -> bool:
    """Whether these are the objects being watched."""
    return all(_same_objects(self._roots[name](), root) for name, root in roots.items())

  def changes(self) -> tuple[list[str], bool]:
    """One phrase for each attribute that changed, and whether all of them are simple values such as flags.

    Another object with an equal simple value is no change.
    """
    now = Watch({name: make() for name, make in self._roots.items()})
    before, after = self._attributes, now._attributes
    phrases: list[str] = []
    simple = True
    for name in dict.fromkeys([*before, *after]):
      old, new = before.get(name, ABSENT), after.get(name, ABSENT)
      if old is new or name.rsplit(".", 1)[-1].startswith("_pytree__"):
        continue
      if old is ABSENT or new is ABSENT:
        phrases.append(f"{name} was {'added' if old is ABSENT else 'removed'}")
        simple = False
      elif not (type(old) is type(new) and isinstance(new, _SIMPLE) and old == new):
        plain = isinstance(old, _SIMPLE) and isinstance(new, _SIMPLE)
        phrases.append(f"{name}: {old!r} -> {new!r}" if plain else f"{name}: another object")
        simple = simple and plain
    return phrases, simple


def _count_when_alone() -> int:
  probe: Any = nnx.Variable(0)
  put(probe, object())
  (count,) = [getrefcount(array) for variable in [probe] for array in [variable._raw_value]]
  return count


_ALONE = _count_when_alone()
"""What `read_apart` counts for an array that only its Variable holds: measured, not assumed."""


# Compiled once: an operation of jax.numpy by itself runs Python code of jax, which a signal may interrupt
# while it changes jax's own state.
_copied = jax.jit(jnp.copy)


def read_apart(variables: Sequence[Any]) -> list[Any]:
  """The arrays of the Variables, which may be donated: copies of those that are held elsewhere too.

  Donating such an array would delete it under its other holder: an `nnx.clone` kept as an average, or a value
  that the user read before the step.
  """
  return [
    array if getrefcount(array) == _ALONE else _copied(array)
    for variable in variables
    for array in [variable._raw_value]
  ]


RESTORE = "restore the last checkpoint: model, optimizer = nxp.Checkpointer(directory).restore(plan)"


def is_deleted(array: Any) -> bool:
  """Whether it is an array whose memory was donated or freed."""
  return isinstance(array, jax.Array) and array.is_deleted()


def deleted(labels: Sequence[str], count: int) -> TrainError:
  """The error of a call on a model with `count` arrays, of which those with these labels are gone."""
  return TrainError(
    f"{labels[0]} was deleted: its memory was donated to a step that failed, or to another function.",
    details=f"gone: {some_of(labels, count)}",
    fix=f"{RESTORE}.\n"
    "Keep a copy of what another function donates: jax.tree.map(jnp.copy, nnx.state(model)).",
  )


def some_of(labels: Sequence[str], count: int) -> str:
  """`a, b and 3 more of 9 arrays`."""
  return f"{few(labels)} of {count} arrays"


def check_outside(roots: Iterable[Any]) -> None:
  """Refuses objects whose Variables may not be changed here, because another program is being traced.

  Raises:
    TrainError: the step is called inside `jax.jit`, `nnx.jit` or another transform.
  """
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


def objects_in(root: Any) -> list[Any]:
  """The modules or optimizers in `root`: itself, or the elements of a tuple, list or dict."""
  if isinstance(root, Mapping):
    return list(root.values())
  return list(root) if isinstance(root, (tuple, list)) else [root]


def _same_objects(a: Any, b: Any) -> bool:
  if isinstance(a, (tuple, list, dict)) != isinstance(b, (tuple, list, dict)):
    return False
  if isinstance(a, dict) and (not isinstance(b, dict) or list(a) != list(b)):
    return False
  left, right = objects_in(a), objects_in(b)
  return len(left) == len(right) and all(map(operator.is_, left, right))


def _weak(root: Any) -> Callable[[], Any]:
  """A root without keeping its modules alive: a step must not own the memory of a discarded model."""
  if isinstance(root, Mapping):
    refs = {key: weakref.ref(value) for key, value in root.items()}
    return lambda: {key: ref() for key, ref in refs.items()}
  if isinstance(root, (tuple, list)):
    many = [weakref.ref(value) for value in root]
    return lambda: tuple(ref() for ref in many)
  return weakref.ref(root)


def _containers(path: str, node: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
  """Every module, dict and list of a module tree."""
  watched = isinstance(node, (nnx.Pytree, dict, list, tuple)) and not isinstance(node, nnx.Variable)
  if not watched or id(node) in seen:
    return
  seen.add(id(node))
  if not isinstance(node, tuple):
    yield path, node
  for key, value in _items(node):
    yield from _containers(f"{path}.{key}", value, seen)


def _items(node: Any) -> list[tuple[Any, Any]]:
  """The attributes of a module, or the items of a dict, list or tuple."""
  if isinstance(node, (list, tuple)):
    return list(enumerate(node))
  return list((vars(node) if isinstance(node, nnx.Pytree) else node).items())


def _where(value: Any, mesh: Any, planned: NamedSharding | None, own: NamedSharding | None) -> NamedSharding:
  """The planned sharding, if the shape allows it; else the present one; else replicated on the mesh."""
  if planned is not None and planned.mesh == mesh:
    if own is not None and own.is_equivalent_to(planned, value.ndim):
      return own
    with contextlib.suppress(ValueError):  # an edited layer of a shape that the plan's sharding cannot split
      planned.shard_shape(value.shape)
      return planned
  return NamedSharding(mesh, PartitionSpec()) if own is None else own


def as_pinned(value: Any, where: NamedSharding | None, **options: Any) -> Any:
  """An array under the spelling of its layout that a program expects; itself where the layout is another.

  `P("fsdp", None)` and `P("fsdp")` are one layout and two types to jax. `options` are for `jax.device_put`.
  """
  own = _sharding_of(value)
  if where is None or own is None or own == where or own.mesh != where.mesh:
    return value
  return jax.device_put(value, where, **options) if own.is_equivalent_to(where, value.ndim) else value


def _sharding_of(value: Any) -> NamedSharding | None:
  sharding = getattr(value, "sharding", None)
  return sharding if isinstance(sharding, NamedSharding) else None


def _common_mesh(labels: list[str], shardings: list[NamedSharding | None]) -> Any:
  found = {s.mesh: label for label, s in zip(labels, shardings, strict=True) if s is not None}
  if len(found) > 1:
    (mesh, label), (other, second), *_ = found.items()
    raise TrainError(
      f"{label} and {second} are on different meshes.",
      details=f"{dict(mesh.shape)} ({mesh.axis_types[0]}) and {dict(other.shape)} ({other.axis_types[0]})",
      fix="create the model and its optimizer from one plan.",
    )
  return next(iter(found), None)


def _devices(value: jax.Array) -> str:
  devices = sorted(value.sharding.device_set, key=lambda d: d.id)
  return str(devices[0]) if len(devices) == 1 else f"{len(devices)} devices"
