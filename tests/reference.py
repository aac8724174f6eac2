"""Writes guides/95-reference.md from the signatures and docstrings of the public names."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

from surface import public_members, public_objects

HEAD = """\
# Reference

Every public name of `import nnx_parallel as nxp`: how it is called, and what it is. `help(nxp.plan)` has the
rest: each argument, what is returned, what is raised, and an example that runs.
`python tests/test_public_surface.py --update` writes this page.
"""
PACKAGES = {
  "core": "Meshes",
  "rules": "Declare",
  "layout": "Plan",
  "create": "Create",
  "layers": "Layers",
  "train": "Train",
  "verify": "Verify",
  "schemes": "Schemes",
  "decode": "Generation",
  "hosts": "Batches and hosts",
  "loop": "The loop",
  "checkpoint": "Checkpoints",
  "interop": "Weights of other programs",
  "report": "Reports",
  "errors": "Errors and warnings",
}


class _Shown:
  """A default value as it is written in code."""

  def __init__(self, value: object):
    self.value = value

  def __repr__(self) -> str:
    named = inspect.isclass(self.value) or inspect.isroutine(self.value)
    return self.value.__name__ if named else re.sub(r" at 0x[0-9a-f]+", "", repr(self.value))


def call(name: str, function: Any) -> str:
  """A signature without annotations, one line."""
  function = function.__func__ if isinstance(function, classmethod | staticmethod) else function
  found = inspect.signature(function)
  shown = [
    p.replace(annotation=p.empty, default=p.default if p.default is p.empty else _Shown(p.default))
    for p in found.parameters.values()
    if p.name not in ("self", "cls")
  ]
  # A method without its `self` may begin with what is by keyword only.
  text = str(found.replace(parameters=shown, return_annotation=found.empty))
  return f"{name}{text}"


def first_words(value: Any, *, whole: bool) -> str:
  """The first paragraph of a docstring, or its first sentence."""
  paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
  return paragraph if whole else re.split(r"[.;]\s", paragraph)[0].rstrip(".") + "."


def entry(name: str, value: Any) -> Iterator[str]:
  """The lines of one name: a heading, how it is called, what it is, and its members."""
  yield f"### {name}\n"
  plain = inspect.ismodule(value) or (inspect.isclass(value) and issubclass(value, BaseException))
  if not plain and callable(value):
    yield f"```py\n{call('nxp.' + name, value)}\n```\n"
  yield first_words(value, whole=True) + "\n"
  if inspect.isclass(value) and not plain:
    rows = [row for row in public_members(value, "nnx_parallel") if not row[0].startswith("__")]
    for member, how in rows:
      property_like = isinstance(how, property | functools.cached_property)
      shown = member if property_like else call(member, how)
      yield f"- `{shown}`: {first_words(getattr(value, member), whole=False)}"
    if rows:
      yield ""


def reference(module: types.ModuleType) -> str:
  """The page."""
  sections: dict[str, list[str]] = {package: [] for package in PACKAGES}
  for name, value in public_objects(module):
    home = value.__name__ if inspect.ismodule(value) else value.__module__
    sections[home.split(".")[1]] += entry(name, value)
  body = (f"## {title}\n\n" + "\n".join(sections[package]) for package, title in PACKAGES.items())
  return f"{HEAD}\n" + "\n".join(body)
