"""The packages of the package import downwards only; importing the package changes nothing."""

import ast
import graphlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "nnx_parallel"

# Lowest first. Rooms in one group are siblings: they do not import each other either.
ORDER = (
  {"errors"}, {"core"}, {"rules"}, {"layout"}, {"infer", "presets"}, {"create"}, {"checkpoint"},
  {"attention", "optimizers"}, {"layers"}, {"train", "schemes", "decode", "verify"}, {"interop", "hosts"},
  {"report"}, {"loop"}, {"recipes"}, {"cli"},
)  # fmt: skip
LEVEL = {package: level for level, group in enumerate(ORDER) for package in group}

# (importer, imported) pairs of siblings that may, each with its reason.
SIBLINGS: dict[tuple[str, str], str] = {
  ("decode", "train"): "generation binds a live module, and holds its layout, as a step does",
  ("verify", "train"): "checks what a step computes",
  ("train", "verify"): "`TrainStep.check_gradients`: a method of the step, which a user looks for there",
}

# The user's side of the public line: what a user would copy, run or call in a test.
# `verify.check_step` runs two whole jobs, from plan to step.
USES_PUBLIC_API = {"recipes", "loop", "cli", "testing", "verify", "__main__"}


@dataclass(frozen=True)
class Import:  # The module `importer` imports the module `target`, or `name` out of it
  importer: str
  target: str
  name: str | None
  line: int

  def __str__(self) -> str:
    return f"{self.importer}:{self.line} imports {self.target}"


def module_name(path: Path, root: Path) -> str:
  parts = path.relative_to(root.parent).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
  """`nnx_parallel.core.mesh` -> `core`; the package itself is the empty package."""
  return [*module.split("."), ""][1]


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
  if not node.level:
    return node.module or ""
  base = module.split(".") + ([""] if is_package else [])
  return ".".join([*base[: -node.level], *([node.module] if node.module else [])])


def imports_of(path: Path, root: Path, modules: set[str]) -> Iterator[Import]:
  """Every import of this package in one file, also inside functions and TYPE_CHECKING blocks."""
  module, tree = module_name(path, root), ast.parse(path.read_text(), str(path))
  for node in ast.walk(tree):
    found: list[tuple[str, str | None]] = []
    if isinstance(node, ast.Import):
      found = [(alias.name, None) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = absolute(node, module, path.name == "__init__.py")
      for alias in node.names:
        inner = f"{base}.{alias.name}"
        found.append((inner, None) if inner in modules else (base, alias.name))
    for target, name in found:
      if target.split(".")[0] == root.name:
        yield Import(module, target, name, node.lineno)


def complaint(found: Import) -> str | None:
  """What is wrong with one import, or None."""
  source, target = package_of(found.importer), package_of(found.target)
  if source == target:
    return None
  if not target:
    return None if source in USES_PUBLIC_API else f"{found}: only {sorted(USES_PUBLIC_API)} may"
  if any(part.startswith("_") for part in (*found.target.split("."), found.name or "")):
    return f"{found}: private to its package"
  if source == "testing" and target == "cli":
    return f"{found}: cli is the top"
  if source in ("", "parallel", "testing", "__main__"):
    return None
  unknown = [r for r in (source, target) if r not in LEVEL]
  if unknown:
    return f"{found}: package {unknown[0]!r} is not in ORDER"
  if LEVEL[target] > LEVEL[source]:
    return f"{found}: {target} is above {source}"
  if LEVEL[target] == LEVEL[source] and (source, target) not in SIBLINGS:
    return f"{found}: {target} and {source} are siblings"
  return None


def cycle(imports: list[Import]) -> list[str]:
  """One cycle of modules, or nothing. Imports inside functions and for types count: they hide cycles."""
  graph: dict[str, set[str]] = {}
  for found in imports:
    # `nnx_parallel/__init__.py` is above all packages, so what uses the public API is not below it.
    if found.target != found.importer and package_of(found.target):
      graph.setdefault(found.importer, set()).add(found.target)
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    return list(error.args[1])
  return []


def problems(root: Path) -> list[str]:
  files = sorted(root.rglob("*.py"))
  modules = {module_name(path, root) for path in files}
  imports = [found for path in files for found in imports_of(path, root, modules)]
  wrong = [text for found in imports if (text := complaint(found))]
  loop = cycle(imports)
  return wrong + ([f"cycle: {' -> '.join(loop)}"] if loop else [])


def test_packages_import_downwards_only():
  assert problems(PACKAGE) == []


IMPORT_TWICE = """
import json, os, sys, warnings
import jax, optax, orbax.checkpoint
from flax import nnx
from jax._src import monitoring

def state():
  return {
    "event listeners": repr(monitoring.get_event_listeners()),
    "event_duration_secs listeners": repr(monitoring.get_event_duration_listeners()),
    "event_time_span listeners": repr(monitoring.get_event_time_span_listeners()),
    "scalar listeners": repr(monitoring.get_scalar_listeners()),
    "environment": dict(os.environ),
    "jax config": {name: repr(value) for name, value in sorted(jax.config.values.items())},
    "warning filters": repr(warnings.filters),
    "working directory": os.getcwd(),
    "excepthook": repr(sys.excepthook),
  }

before = state()
import nnx_parallel
for name in getattr(nnx_parallel, "__all__", ()):
  getattr(nnx_parallel, name)
after = state()
changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
print(json.dumps(changed))
"""


@pytest.mark.slow
def test_importing_changes_nothing_and_starts_no_backend(tmp_path):
  # A platform that does not exist: whatever starts a backend fails.
  environment = {**os.environ, "JAX_PLATFORMS": "none_such", "PYTHONPATH": str(PACKAGE.parent)}
  command = [sys.executable, "-c", IMPORT_TWICE]
  result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  assert json.loads(result.stdout.splitlines()[-1]) == {}
  assert list(tmp_path.iterdir()) == []
