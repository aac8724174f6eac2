"""Reads the public surface of the package: what users may rely on, and nothing else."""

import functools
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

KINDS = {
  property: "property", functools.cached_property: "property", classmethod: "classmethod",
  staticmethod: "staticmethod",
}  # fmt: skip


def public_objects(module: types.ModuleType, prefix: str = "") -> Iterator[tuple[str, Any]]:
  """Yields `(name, object)` for each name in `__all__`, and in that of its public submodules."""
  for name in sorted(getattr(module, "__all__", ())):
    value = getattr(module, name)
    yield prefix + name, value
    if isinstance(value, types.ModuleType):
      yield from public_objects(value, f"{prefix}{name}.")


def public_members(cls: type, package: str) -> Iterator[tuple[str, Any]]:
  """Yields the public methods and properties that the package itself gives to a class.

  `__call__` and its like are part of the surface; what comes from a base class elsewhere (object,
  tuple, an exception) is not ours to freeze.
  """
  ours = [base for base in cls.__mro__ if base.__module__.split(".")[0] == package]
  for name in sorted({name for base in ours for name in vars(base)}):
    member = inspect.getattr_static(cls, name)
    is_special = name in ("__call__", "__enter__", "__exit__", "__iter__", "__getitem__", "__len__")
    if (is_special or not name.startswith("_")) and (
      inspect.isroutine(member) or isinstance(member, tuple(KINDS))
    ):
      yield name, member


def signature(function: Any) -> str:
  """The signature as written; addresses in the text of defaults are left out."""
  if isinstance(function, classmethod | staticmethod):
    function = function.__func__
  try:
    text = str(inspect.signature(function))
  except ValueError:  # a class made by a C type has no signature to read
    return "(...)"
  return re.sub(r" at 0x[0-9a-f]+", "", text)


def describe(name: str, value: Any, package: str) -> Iterator[str]:
  """Yields one line for a name and one for each public member of a class."""
  if isinstance(value, types.ModuleType):
    yield f"module {name}"
  elif inspect.isclass(value):
    bases = ", ".join(base.__name__ for base in value.__bases__)
    is_error = issubclass(value, BaseException)
    yield f"class {name}({bases})" + ("" if is_error else signature(value))
    for member_name, member in public_members(value, package):
      kind = KINDS.get(type(member), "method")
      text = "" if kind == "property" else signature(member)
      yield f"  {kind} {name}.{member_name}{text}"
  elif callable(value):
    yield f"def {name}{signature(value)}"
  else:
    yield f"value {name}: {type(value).__name__}"


def surface(module: types.ModuleType) -> list[str]:
  """The whole public surface, one line for each thing that a user can name."""
  package = module.__name__.split(".")[0]
  return [line for name, value in public_objects(module) for line in describe(name, value, package)]
