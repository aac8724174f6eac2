"""What is public is documented, what is shown runs, and what is linked exists."""

import ast
import doctest
import functools
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import leaks
import nnx_parallel
from surface import public_members, public_objects

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nnx_parallel"
PUBLIC = dict(public_objects(nnx_parallel))
GUIDES = sorted((ROOT / "guides").glob("*.md"))
EXPLAINING = [guide for guide in GUIDES if guide.name != "95-reference.md"]  # that one lists all names
PAGES = [*GUIDES, *ROOT.glob("*.md"), ROOT / "examples" / "README.md"]
WITH_EXAMPLES = sorted(
  ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
  for path in PACKAGE.rglob("*.py")
  if path.name != "__main__.py" and ">>> " in path.read_text()
)
IN_GUIDES = ("interop.adapters", "attention.call", "schemes.collectives", "schemes.context",
             "schemes.experts", "schemes.vocabulary", "optimizers.loss_scale")  # fmt: skip
"""Modules with expensive examples, whose functions guides call too: CI runs the guides."""


def plain(function: Any) -> Any:
  """The function in a classmethod or staticmethod."""
  return function.__func__ if isinstance(function, classmethod | staticmethod) else function


def parameters(function: Any) -> list[str]:
  """The names that a caller passes."""
  names = inspect.signature(plain(function)).parameters
  return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def section(doc: str, *titles: str) -> str:
  """The indented text under the first of these titles, or an empty string."""
  found = re.search(rf"^(?:{'|'.join(titles)}):\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE)
  return found[1] if found else ""


def returns_a_value(function: Any) -> bool:
  return inspect.signature(plain(function)).return_annotation not in (None, "None", inspect.Signature.empty)


def raises(function: Any) -> bool:
  """Whether its own code raises an error, other than one that it caught."""
  tree = ast.parse(textwrap.dedent(inspect.getsource(plain(function))))
  return any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(tree))


def missing_from_docs(name: str, value: Any) -> list[str]:
  """What the docstring of one public object leaves out."""
  if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
    return []
  # A class without its own docstring shows that of its base, or the generated one of a dataclass.
  doc = inspect.cleandoc((vars(value) if inspect.isclass(value) else {}).get("__doc__") or "")
  doc = doc if inspect.isclass(value) else inspect.getdoc(value) or ""
  if not doc or doc.startswith(f"{name.split('.')[-1]}("):
    return [f"{name}: no docstring"]
  if inspect.ismodule(value):
    return []
  if inspect.isclass(value):
    return missing_from_class(name, value, doc)
  missing = missing_from_function(name, value, doc)
  return missing + ([] if ">>>" in section(doc, "Example") else [f"{name}: no Example:"])


def missing_from_args(name: str, function: Any, listed: str) -> list[str]:
  missing = [one for one in parameters(function) if not re.search(rf"(?m)^\s+\**{one}\b.*:", listed)]
  return [f"{name}: {one} is not under Args:" for one in missing]


def missing_from_function(name: str, function: Any, doc: str, returns: bool = True) -> list[str]:
  missing = missing_from_args(name, function, section(doc, "Args"))
  if returns and returns_a_value(function) and not section(doc, "Returns", "Yields"):
    missing.append(f"{name}: no Returns:")
  if raises(function) and not section(doc, "Raises"):
    missing.append(f"{name}: no Raises:")
  return missing


def missing_from_class(name: str, cls: type, doc: str) -> list[str]:
  """A class lists its constructor's arguments, its methods theirs."""
  missing = []
  if not issubclass(cls, BaseException) and cls.__init__ is not object.__init__:
    missing += missing_from_args(name, cls, section(doc, "Args") + section(doc, "Attributes"))
  for own, member in public_members(cls, cls.__module__.split(".")[0]):
    member_doc = inspect.getdoc(getattr(cls, own)) or ""
    if own.startswith("__"):
      continue
    if not member_doc:
      missing.append(f"{name}.{own}: no docstring")
    elif not isinstance(member, property | functools.cached_property):
      missing += missing_from_function(f"{name}.{own}", member, member_doc, "Args:" in member_doc)
  return missing


def mentioned(name: str, text: str) -> bool:
  return re.search(rf"\b{re.escape(name.split('.')[-1])}\b", text) is not None


def test_each_public_name_is_documented():
  assert [line for name, value in PUBLIC.items() for line in missing_from_docs(name, value)] == []


def test_each_public_name_is_in_a_guide():
  text = "\n".join(guide.read_text() for guide in EXPLAINING)
  assert [name for name in PUBLIC if not mentioned(name, text)] == []


def examples():
  for name in WITH_EXAMPLES:
    marks = (pytest.mark.nightly,) if name.removeprefix("nnx_parallel.") in IN_GUIDES else ()
    yield pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize("name", [*examples()])
def test_docstring_examples_run(name, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  module, before = importlib.import_module(name), leaks.read()
  result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
  leaks.take_back(before)  # an example may set a cache or a mesh, as users do
  assert result.failed == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_commands_in_pages_exist(page):
  text = page.read_text()
  links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", re.sub(r"(?ms)^```.*?^```", "", text))
  assert [link for link in links if not (page.parent / link).exists()] == []
  targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
  assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) - targets == set()


def test_a_guide_has_at_most_300_lines():
  assert [guide.name for guide in EXPLAINING if len(guide.read_text().splitlines()) > 300] == []


def test_each_guide_is_linked_from_the_readme():
  links = re.findall(r"\]\((guides/[^)#\s]+)", (ROOT / "README.md").read_text())
  assert {f"guides/{guide.name}" for guide in GUIDES} - set(links) == set()


def test_links_to_sections_exist():
  anchor = lambda title: re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
  for page in PAGES:
    for link, section in re.findall(r"\]\(((?!\w+:)[^)#\s]*)#([^)\s]+)\)", page.read_text()):
      target = page.parent / link if link else page
      titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
      assert section in [anchor(title) for title in titles], f"{page.name}: {link}#{section}"
