"""Notices edits of live modules: between two steps, and by the loss function inside a step."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain
from types import MethodType
from typing import Any

from flax import nnx

from nnx_parallel.core.nodes import FLAX_PREFIX, variables
from nnx_parallel.core.types import Model
from nnx_parallel.errors import TrainError

_ABSENT: Any = object()
"""Stands for an absent attribute."""
_END = (_ABSENT,)
"""Separates the items of a list or dict, so that no item moves to the next list or dict unnoticed."""
_SIMPLE = (bool, int, float, str, bytes, type(None))


class Watch:
  """Notices that attributes of live modules were replaced, added or removed, by identity.

  It compares the attributes of every module, and the items of the lists and dicts that a module holds. It
  does not notice changes of a Variable's metadata, or changes inside other objects. It keeps the values of
  attributes alive, but not the modules.
  """

  def __init__(self, roots: Mapping[str, Model]):
    self._attributes: dict[str, object] = {}
    self._views: list[Iterable[object]] = []
    seen: set[int] = set()
    for name, root in roots.items():
      for path, node in _containers(name, root, seen):
        if node is root and not isinstance(node, nnx.Pytree):
          continue  # a step knows several models by their identities, and must not keep them alive
        self._attributes |= {f"{path}.{key}": value for key, value in _items(node)}
        if isinstance(node, nnx.Pytree):
          self._views.append(vars(node).values())  # flax keeps the names of its attributes among them
        else:
          self._views += [node.values(), node, _END] if isinstance(node, dict) else [node, _END]
    _check_methods(self._attributes)
    self._views.append(_END)
    self._saved: list[object] = [*chain.from_iterable(self._views)]

  def same(self) -> bool:
    """Whether every attribute is still the same object; 20 nanoseconds for each."""
    # By identity: `==` runs the code of users, takes 1 for True, and compares arrays by their values.
    return all(map(operator.is_, chain.from_iterable(self._views), self._saved))

  def kinds(self) -> tuple[Hashable, ...]:
    """Name and type of every plain attribute: `True`, `1` and `1.0` are equal but make different programs."""
    return tuple((name, _kind(value)) for name, value in self._attributes.items() if _is_plain(value))

  def changes(self, now: Watch) -> list[str]:
    """One phrase for each attribute that has another value in `now`, a later watch of the same modules."""
    # A different object with an equal simple value is not a change.
    phrases: list[str] = []
    for name, old, new in _differences(self._attributes, now._attributes):
      if old is _ABSENT or new is _ABSENT:
        phrases.append(f"{name} was {'added' if old is _ABSENT else 'removed'}")
      elif _is_plain(old) and _is_plain(new):
        phrases.append(f"{name}: {old!r} -> {new!r}")
      else:
        phrases.append(f"{name}: another object")
    return phrases


def plain_attributes(objects: Model) -> dict[str, object]:
  """The attributes of modules, and the items of their lists and dicts, that hold no array, by dotted path."""
  return {
    f"{path}.{name}".removeprefix("."): value
    for path, node in _containers("", objects, set())
    for name, value in _items(node)
    if not _holds_state(value)
  }


def check_plain_attributes(before: Mapping[str, object], objects: Model) -> None:
  """Refuses (`TrainError`) a loss function that wrote plain attributes, which no step writes back."""
  for name, old, new in _differences(before, plain_attributes(objects)):
    change = (
      "added" if old is _ABSENT else "removed" if new is _ABSENT else f"changed from {old!r} to {new!r}"
    )
    own = name.rsplit(".", 1)[-1]
    if own in ("deterministic", "use_running_average", "training"):
      fix = (
        "call model.train() or model.eval() before the step; or use another mode inside the loss function:"
      )
      fix += f"\nnnx.view(model, {own}={new!r})."
    else:
      fix = (
        f"keep it in a Variable: {own} = nnx.Variable(jnp.zeros(())), which each step updates; or change it"
      )
      fix += " outside of the loss function."
    raise TrainError(
      f"the loss function {change.split()[0]} the attribute {name}.",
      details=f"{name} was {change}; a compiled step writes back Variables only",
      fix=fix,
    )


def _check_methods(attributes: Mapping[str, object]) -> None:
  """Refuses a method of a module as an attribute: a program would read that module's arrays as constants."""
  for name, value in attributes.items():
    if isinstance(value, MethodType) and isinstance(value.__self__, nnx.Pytree) and variables(value.__self__):
      raise TrainError(
        f"{name} is the method {value.__qualname__} of one module, whose arrays a step would not train.",
        details="flax takes it for a static attribute: a copy of the module still calls the first one's",
        fix=f"call self.{value.__name__}(...) where it is used; or keep its name, and getattr(self, name).",
      )


def objects_in(root: Model) -> list[Model]:
  """The modules or optimizers in `root`: itself, or the elements of a tuple, list or dict."""
  if isinstance(root, dict):  # an `nnx.Dict` is a mapping, and one module
    return list(root.values())
  return list(root) if isinstance(root, (tuple, list)) else [root]


def _differences(
  before: Mapping[str, object], after: Mapping[str, object]
) -> Iterator[tuple[str, object, object]]:
  """The attributes that differ, with both values; attributes that flax keeps for itself are left out."""
  for name in dict.fromkeys([*before, *after]):
    old, new = before.get(name, _ABSENT), after.get(name, _ABSENT)
    equal = old is new or (_is_plain(old) and _is_plain(new) and _kind(old) == _kind(new) and old == new)
    if not equal and not name.rsplit(".", 1)[-1].startswith(FLAX_PREFIX):
      yield name, old, new


def _is_plain(value: object) -> bool:
  """Whether a value can be compared with another value: a number, a string, or a tuple of these."""
  return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _SIMPLE)


def _kind(value: object) -> Hashable:
  """The type of a plain value, and of the items of a tuple."""
  return (type(value), *map(_kind, value)) if isinstance(value, tuple) else type(value)


def _holds_state(value: object) -> bool:
  """Whether a value holds Variables or arrays, or is a module or container whose items are looked at."""
  if isinstance(value, (nnx.Pytree, nnx.Variable, dict, list, tuple)):
    return not _is_plain(value)
  return hasattr(value, "shape") and hasattr(value, "dtype")


def _containers(path: str, node: Model, seen: set[int]) -> Iterator[tuple[str, Model]]:
  """Every module, dict and list of a module tree."""
  watched = isinstance(node, (nnx.Pytree, dict, list, tuple)) and not isinstance(node, nnx.Variable)
  if not watched or id(node) in seen:
    return
  seen.add(id(node))
  if not isinstance(node, tuple):
    yield path, node
  for key, value in _items(node):
    yield from _containers(f"{path}.{key}", value, seen)


def _items(node: Model) -> list[tuple[Hashable, object]]:
  """The attributes of a module, or the items of a dict, list or tuple."""
  if isinstance(node, (list, tuple)):
    return list(enumerate(node))
  return list((vars(node) if isinstance(node, nnx.Pytree) else node).items())
