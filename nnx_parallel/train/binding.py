"""A live module as a flat list of arrays: read, written back, and watched for edits.

The cost of `nnx.jit` per step is the traversal of the module. Here it is traversed once; each step then reads
the arrays of the same Variables, and `Watch` tells whether the module still is what was traversed.
"""

from __future__ import annotations

import collections
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sys import getrefcount
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.errors import TrainError
from nnx_parallel.layout.variables import Path, path_str, value_of, variables
from nnx_parallel.train.edits import hear, heard

# The slot itself: the public accessors cost five times as much and check what a step has checked once.
_SLOT: Any = vars(nnx.Variable)["_raw_value"]
_END: Any = object()
_SIMPLE = (bool, int, float, str, bytes, type(None), tuple)
PATIENCE = 256
"""A look at everything follows after so many steps at most that only listened."""
put: Callable[[Any, Any], None] = _SLOT.__set__
"""Gives a Variable its array, without the checks that a step has made once."""
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

  def build(self, arrays: Sequence[Any]) -> Any:
    """The same structure with new Variables around `arrays`, one for each path.

    Args:
      arrays: in the order of `paths`.

    Returns:
      New objects; the originals are untouched.
    """
    made: list[Any] = [
      (path, leaf.copy(array) if isinstance(leaf, nnx.Variable) else array)
      for path, leaf, array in zip(self.paths, self.leaves, arrays, strict=True)
    ]
    return nnx.merge(self.graphdef, nnx.from_flat_state(made))

  def arrays(self, objects: Any) -> list[Any]:
    """The arrays of `objects`, which `build` made, in the order of `paths`.

    Args:
      objects: as returned by `build`, perhaps changed since.

    Returns:
      One array for each path.

    Raises:
      TrainError: a Variable was added or removed.
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


class Binding:
  """The Variables of live objects, in a fixed order, with their shardings pinned.

  Args:
    roots: name -> module, optimizer, or a tuple or dict of them; the names start the paths in messages.
  """

  def __init__(self, roots: Mapping[str, Any]):
    self.names = tuple(roots)
    self.template = Template(tuple(roots.values()))
    self.labels = [self.label(path) for path in self.template.paths]
    self.raw = {i: leaf for i, leaf in enumerate(self.template.leaves) if not isinstance(leaf, nnx.Variable)}
    self.variables: list[Any] = [leaf for leaf in self.template.leaves if isinstance(leaf, nnx.Variable)]
    self._check_plain()
    self.watch = Watch(roots)
    self.shardings = [_sharding_of(value_of(leaf)) for leaf in self.template.leaves]
    self.mesh = _common_mesh(self.labels, self.shardings)
    if self.mesh is not None:
      self._settle(self.mesh)

  def label(self, path: Path) -> str:
    """`(1, 'opt_state', 0)` -> `optimizer.opt_state.0`."""
    return ".".join([self.names[int(path[0])], *map(str, path[1:])])  # pyright: ignore[reportArgumentType]

  def read(self) -> list[Any]:
    """The current arrays of the Variables (raw arrays excluded), in order."""
    # Python reads a slot faster than `map` over its descriptor does.
    return [variable._raw_value for variable in self.variables]

  def with_raw(self, arrays: Iterable[Any]) -> list[Any]:
    """All leaves: `arrays` for the Variables, the module's own for raw arrays."""
    given = iter(arrays)
    return [self.raw[i] if i in self.raw else next(given) for i in range(len(self.labels))]

  def without_raw(self, leaves: Sequence[Any]) -> list[Any]:
    """The leaves of the Variables only, in the order of `read`."""
    return [leaf for i, leaf in enumerate(leaves) if i not in self.raw]

  @property
  def variable_labels(self) -> list[str]:
    """The dotted paths in the order of `read`."""
    return [label for i, label in enumerate(self.labels) if i not in self.raw]

  @property
  def variable_shardings(self) -> list[Any]:
    """The pinned shardings in the order of `read`; None where nothing is pinned."""
    return [sharding for i, sharding in enumerate(self.shardings) if i not in self.raw]

  def _check_plain(self) -> None:
    for label, variable in zip(self.variable_labels, self.variables, strict=True):
      value = variable.get_raw_value()
      if _SLOT.__get__(variable) is not value or not hasattr(value, "shape"):
        raise TrainError(
          f"{label} holds a {type(value).__name__}, which a step cannot read and write back.",
          fix="store one array in each Variable (no array refs, no pytrees).",
        )

  def _settle(self, mesh: Any) -> None:
    # Without this, XLA chooses a layout for what lies on no mesh, the second step starts from that layout,
    # and everything is compiled again.
    for i, (leaf, sharding) in enumerate(zip(self.template.leaves, self.shardings, strict=True)):
      value = value_of(leaf)
      if isinstance(value, jax.ShapeDtypeStruct) or sharding is not None:
        continue
      if (
        isinstance(value, jax.Array)
        and value.committed
        and value.sharding.device_set != set(mesh.devices.flat)
      ):
        raise TrainError(
          f"{self.labels[i]} lies on {_devices(value)}, and the rest on a mesh of {mesh.size} devices.",
          fix="create it with nxp.create_sharded_model, or jax.device_put(x, NamedSharding(mesh, P())).",
        )
      whole = NamedSharding(mesh, PartitionSpec())
      self.shardings[i] = whole
      if i in self.raw:
        self.raw[i] = jax.device_put(value, whole)
      else:
        put(leaf, jax.device_put(value, whole))


class Watch:
  """Notices that attributes of live modules were replaced, added or removed, by identity.

  At the next `same`: attributes assigned to, added to or deleted from a module, and items of lists and dicts
  that a module holds. Within 256 calls of `same`: attributes replaced past the module's `__setattr__`, as
  `vars(module)["name"] = value` does. Not at all: Variables' metadata, and what lies inside other objects.

  Args:
    roots: as for `Binding`.

  Attributes:
    looked_at: the count of `heard` at the last look; while it is the same, nothing that is heard changed.
  """

  def __init__(self, roots: Mapping[str, Any]):
    self._roots = {name: _weak(root) for name, root in roots.items()}
    self._take()

  def _take(self) -> None:
    self._views: list[Any] = []
    self._unheard: list[Any] = []
    self._names: list[str] = []
    seen: set[int] = set()
    for name, make in self._roots.items():
      for path, node, container in _containers(name, make(), seen):
        view = container if isinstance(container, list) else container.values()
        self._views.append(view)
        if not (isinstance(node, nnx.Pytree) and hear(node)):
          self._unheard.append(view)
        keys = range(len(container)) if isinstance(container, list) else container
        self._names += [f"{path}.{key}" for key in keys]
    self._saved: list[Any] = [*itertools.chain.from_iterable(self._views), _END]
    self._saved_unheard: list[Any] = [*itertools.chain.from_iterable(self._unheard), _END]
    self._looked()

  def _looked(self) -> None:
    self.looked_at = heard[0]
    self._patience = PATIENCE

  @property
  def hears_all(self) -> bool:
    """Whether every container is a module that is heard, so that listening is enough."""
    return not self._unheard

  def same(self) -> bool:
    """Whether every attribute still is the same object."""
    if self.looked_at == heard[0] and self._patience:
      self._patience -= 1
      return not self._unheard or _identical(self._unheard, self._saved_unheard)
    return self.looks_same()

  def looks_same(self) -> bool:
    """`same` without hearing: looks at every attribute, at tens of nanoseconds for each."""
    if not _identical(self._views, self._saved):
      self._patience = 0  # `same` does not say otherwise until somebody has dealt with it
      return False
    self._looked()
    return True

  def reference(self, name: str) -> Callable[[], Any]:
    """Gives the watched root while it lives; for tuples and dicts of them, something that is never given."""
    make = self._roots.get(name)
    return make if isinstance(make, weakref.ref) else lambda: _END

  def alive(self) -> bool:
    """Whether none of the watched modules and optimizers was garbage-collected."""
    return all(item is not None for make in self._roots.values() for item in objects_in(make()))

  def is_for(self, roots: Mapping[str, Any]) -> bool:
    """Whether these are the objects being watched."""
    return all(_same_objects(self._roots[name](), root) for name, root in roots.items())

  def changes(self) -> tuple[list[str], bool]:
    """What changed since `same` was true, in words; equal simple values are no change.

    Returns:
      One phrase for each attribute that differs, and whether all of them are simple values such as flags.
    """
    now = Watch({name: make() for name, make in self._roots.items()})
    before = dict(zip(self._names, self._saved, strict=False))
    after = dict(zip(now._names, now._saved, strict=False))
    phrases: list[str] = []
    simple = True
    for name in dict.fromkeys([*before, *after]):
      old, new = before.get(name, _END), after.get(name, _END)
      if old is new or name.rsplit(".", 1)[-1].startswith("_pytree__"):
        continue
      if old is _END or new is _END:
        phrases.append(f"{name} was {'added' if old is _END else 'removed'}")
        simple = False
      elif not (type(old) is type(new) and isinstance(new, _SIMPLE) and old == new):
        plain = isinstance(old, _SIMPLE) and isinstance(new, _SIMPLE)
        phrases.append(f"{name}: {old!r} -> {new!r}" if plain else f"{name}: another object")
        simple = simple and plain
    return phrases, simple

  def look(self) -> None:
    """Takes what is there now as the state to compare with."""
    self._take()


def _references(variables: Iterable[Any]) -> list[int]:
  """The reference counts of the Variables' arrays, as a loop sees them that names each array once."""
  return [getrefcount(array) for variable in variables for array in [variable._raw_value]]


def _count_when_alone() -> int:
  probe = nnx.Variable(0)
  put(probe, object())
  return _references([probe])[0]


ALONE = _count_when_alone()
"""The reference count of an array that only its Variable holds, in a loop like that of `_references`.

Measured rather than assumed: what the Variable and the loop's own name account for.
"""


def shared(variables: Iterable[Any]) -> list[int]:
  """Positions of the Variables whose arrays somebody else holds too.

  Donating such an array would delete it under its other holder: an `nnx.clone` kept as an average, or a value
  that the user read before the step.

  Args:
    variables: live Variables.

  Returns:
    Positions, usually none.
  """
  return [i for i, count in enumerate(_references(variables)) if count != ALONE]


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


def _identical(views: list[Any], saved: list[Any]) -> bool:
  current = itertools.chain(itertools.chain.from_iterable(views), (_END,))
  return all(map(operator.is_, current, saved))


def _containers(path: str, node: Any, seen: set[int]) -> Iterator[tuple[str, Any, Any]]:
  """Every mutable container of a module tree, and its owner: attribute dicts, dicts and lists."""
  if isinstance(node, (nnx.Variable, *_SIMPLE[:-1])) or id(node) in seen:
    return
  if isinstance(node, nnx.Pytree):
    container: Any = vars(node)
  elif isinstance(node, (dict, list, tuple)):
    container = node
  else:
    return
  seen.add(id(node))
  if not isinstance(container, tuple):
    yield path, node, container
  for key, value in list(container.items()) if isinstance(container, dict) else enumerate(container):
    yield from _containers(f"{path}.{key}", value, seen)


def _sharding_of(value: Any) -> NamedSharding | None:
  sharding = getattr(value, "sharding", None)
  return sharding if isinstance(sharding, NamedSharding) else None


def _common_mesh(labels: list[str], shardings: list[NamedSharding | None]) -> Any:
  found = {s.mesh: label for label, s in zip(labels, shardings, strict=True) if s is not None}
  if len(found) > 1:
    (mesh, label), (other, second), *_ = found.items()
    raise TrainError(
      f"{label} and {second} lie on different meshes.",
      details=f"{dict(mesh.shape)} ({mesh.axis_types[0]}) and {dict(other.shape)} ({other.axis_types[0]})",
      fix="create the model and its optimizer from one plan.",
    )
  return next(iter(found), None)


def _devices(value: jax.Array) -> str:
  devices = sorted(value.sharding.device_set, key=lambda d: d.id)
  return str(devices[0]) if len(devices) == 1 else f"{len(devices)} devices"
