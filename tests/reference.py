"""Writes guides/95-reference.md from the signatures and docstrings of the public names."""

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
SECTIONS = {
  "core": "Meshes", "rules": "Declare", "presets": "Ready-made rules", "infer": "Propose rules",
  "layout": "Plan", "create": "Create",
  "layers": "Layers", "train": "Train", "optimizers": "Wrappers of optimizers", "verify": "Verify",
  "decode": "Generate", "loop": "The training loop", "checkpoint": "Checkpoints", "report": "Reports",
  "hosts": "Batches and hosts", "errors": "Errors and warnings",
  "nxp.parallel": "Schemes to call in a model: `nxp.parallel`", "nxp.hosts": "Many hosts: `nxp.hosts`",
  "nxp.report": "Types and parts of reports: `nxp.report`", "nxp.verify": "Results of checks: `nxp.verify`",
  "nxp.loop": "Metrics and results of a loop: `nxp.loop`",
  "nxp.interop": "Weights of other programs: `nxp.interop`", "nxp.recipes": "Recipes: `nxp.recipes`",
  "nxp.testing": "For your tests: `nxp.testing`", "nxp.errors": "All errors: `nxp.errors`",
}  # fmt: skip


class _Shown:  # A default value as it is written in code
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
  sections: dict[str, list[str]] = {name: [] for name in SECTIONS}
  for name, value in public_objects(module):
    space, _, _ = name.rpartition(".")
    if inspect.ismodule(value):
      home = f"nxp.{name}" if f"nxp.{name}" in SECTIONS else value.__name__.split(".")[1]
    else:
      home = f"nxp.{space}" if f"nxp.{space}" in SECTIONS else value.__module__.split(".")[1]
    sections[home] += entry(name, value)
  body = (f"## {title}\n\n" + "\n".join(sections[name]) for name, title in SECTIONS.items())
  return f"{HEAD}\n" + "\n".join(body)
