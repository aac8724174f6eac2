"""Finds a recipe by name or file, and checks that it defines what a command needs."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.types import LossFn, Model, PyTree
from nnx_parallel.errors import RecipeError

SIGNATURES = {
  "init": "def init() -> nnx.Module",
  "optimizer": "def optimizer() -> optax.GradientTransformation",
  "loss": "def loss(model, batch) -> (scalar, {name: metric})",
  "batches": "def batches(start=0, *, split='train') -> iterator of global batches",
  "rules": "def rules() -> nxp.LogicalRules",
  "mesh": "def mesh() -> {axis: devices}",
  "tokens": "def tokens(batch) -> int",
  "microbatches": "def microbatches() -> int",
}
# Positional arguments and keywords that commands pass to these functions; other functions take none.
_CALLS: dict[str, Any] = {"loss": (2, ()), "batches": (1, ("split",)), "tokens": (1, ())}
EMBEDDED = Path(__file__).parent.parent / "recipes"
TRAINING = ("init", "optimizer", "loss", "batches")


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The functions of a recipe file (`SIGNATURES` has their forms); None for those that it does not define."""

  name: str
  source: str
  init: Callable[[], Model]
  optimizer: Callable[[], Any] | None = None
  loss: LossFn | None = None
  batches: Callable[..., Iterator[PyTree]] | None = None
  rules: Callable[[], Any] | None = None
  mesh: Callable[[], dict[str, int]] | None = None
  tokens: Callable[[PyTree], int] | None = None
  microbatches: Callable[[], int] | None = None

  def parts(self, asked: int | None) -> int:
    """The number of microbatches: `asked`, else the recipe's, else one."""
    return asked or (self.microbatches() if self.microbatches else 1)

  def given(self, **options: Any) -> Recipe:
    """The recipe with options for `init` and `batches`, where these have such arguments; None is none."""
    functions = {name: getattr(self, name) for name in ("init", "batches")}
    for option, value in options.items():
      if value is None:
        continue
      takers = [n for n, f in functions.items() if f and option in inspect.signature(f).parameters]
      if not takers:
        raise RecipeError(
          f"the recipe {self.name} takes no {option}.",
          details=f"neither its init() nor its batches() has an argument named {option}",
          fix=f"leave --{option} out, or add the argument:"
          f" def batches(start=0, *, split='train', {option}=None).",
        )
      for name in takers:
        functions[name] = functools.partial(functions[name], **{option: value})
    return dataclasses.replace(self, **functions)


def embedded_recipes() -> list[str]:
  """Names of the recipes that come with the package."""
  return sorted(file.stem for file in EMBEDDED.glob("*.py") if file.stem != "__init__")


@check_arguments(RecipeError)
def load_recipe(spec: str, *, needs: Sequence[str] = TRAINING) -> Recipe:
  """Loads a recipe and checks it.

  Args:
    spec: the name of a recipe of this package (`text_lm`), a file (`jobs/mine.py`), or a file followed by the
      function to use as `init` (`jobs/mine.py:init_small`). A file can import modules of its own folder at
      its top, but not inside a function.
    needs: the functions that the recipe must define; the other functions are optional.

  Returns:
    The recipe: an object whose attributes are the functions of the file, and None for a function that it
    does not define.

  Raises:
    RecipeError: no recipe has this name, or a function is missing or has other arguments.

  Example:
    >>> import nnx_parallel as nxp
    >>> recipe = nxp.recipes.load_recipe("text_lm")
    >>> recipe.name, recipe.mesh()
    ('text_lm', {'data': 2, 'fsdp': 2, 'tensor': 2})
  """
  if unknown := [name for name in needs if name not in SIGNATURES]:
    raise RecipeError(f"no recipe has a function {unknown[0]}.", fix=f"needs= of {', '.join(SIGNATURES)}.")
  place, _, entry = spec.rpartition(":")
  if not (place.endswith(".py") and entry.isidentifier()):
    place, entry = spec, "init"
  if place.endswith(".py"):
    return _check(_load_file(Path(place)), place, needs, entry)
  if spec not in embedded_recipes():
    raise _unknown(spec)
  module = importlib.import_module(f"nnx_parallel.recipes.{spec}")
  return _check(module, str(module.__file__), needs, entry)


def _load_file(path: Path) -> ModuleType:
  if not path.is_file():
    near = difflib.get_close_matches(path.name, [f.name for f in path.parent.glob("*.py")], n=1)
    raise RecipeError(
      f"no recipe file at {path}.",
      details=f"the nearest file there is {path.parent / near[0]}" if near else "",
      fix=f"an existing .py file, or an embedded recipe: {_listed(embedded_recipes())}.",
    )
  name = f"nnx_parallel_recipe_{path.stem}"
  spec = importlib.util.spec_from_file_location(name, path)
  if spec is None or spec.loader is None:
    raise RecipeError(f"{path} is not a Python file.", fix="a .py file.")
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  # As in `python file.py`: while the file runs, it can import modules of its folder.
  folder = str(path.parent.resolve())
  sys.path.insert(0, folder)
  try:
    spec.loader.exec_module(module)
  finally:
    sys.path.remove(folder)
  return module


def _unknown(spec: str) -> RecipeError:
  names = embedded_recipes()
  fix = f"one of {_listed(names)}; or a file, path/to/recipe.py."
  if near := difflib.get_close_matches(spec, names, n=1):
    fix = f"did you mean {near[0]}? Otherwise {fix}"
  elif Path(f"{spec}.py").is_file():
    fix = f"the file is there: {spec}.py."
  return RecipeError(f"no recipe named {spec!r}.", fix=fix)


def _check(module: ModuleType, source: str, needs: Sequence[str], entry: str) -> Recipe:
  """The recipe in a module; `entry` is the name of its `init`."""
  # Not inspect.getmembers: it would run the imports of a module with lazy attributes.
  own = [(name, value) for name, value in vars(module).items() if inspect.isfunction(value)]
  there = sorted(n for n, f in own if f.__module__ == module.__name__ and not n.startswith("_"))
  defines = f"it defines {_listed(there, 'and') or 'no functions'}"
  if getattr(module, entry, None) is None and entry != "init":
    raise RecipeError(
      f"{source} does not define {entry}().", details=defines, fix="write one of these after the colon."
    )
  places = {name: entry if name == "init" else name for name in SIGNATURES}
  values = {name: getattr(module, place, None) for name, place in places.items()}
  found = {name: value for name, value in values.items() if value is not None}
  for name, function in found.items():
    _check_call(name, function, source)
  if missing := [name for name in needs if name not in found]:
    nearest = {name: difflib.get_close_matches(name, there, n=1) for name in missing}
    lines = [f"{near[0]}() has nearly the name {name}()" for name, near in nearest.items() if near]
    raise RecipeError(
      f"the recipe {source} does not define {_listed([f'{m}()' for m in missing], 'and')}.",
      details="\n".join([defines, *lines]),
      fix="add\n" + "\n".join(f"{SIGNATURES[m]}: ..." for m in missing),
    )
  return Recipe(name=Path(source).stem, source=source, **found)


def _check_call(name: str, function: Any, source: str) -> None:
  positional, keywords = _CALLS.get(name, (0, ()))
  if not callable(function):
    raise RecipeError(
      f"{name} in the recipe {source} is {type(function).__name__}, not a function.",
      fix=f"{SIGNATURES[name]}: ...",
    )
  signature = inspect.signature(function)
  try:
    signature.bind(*range(positional), **dict.fromkeys(keywords))
  except TypeError as error:
    raise RecipeError(
      f"{name}{signature} in the recipe {source} cannot be called as commands call it: {error}.",
      fix=f"{SIGNATURES[name]}: ...",
    ) from None


def _listed(names: Iterable[str], last: str = "or") -> str:
  *most, end = list(names) or [""]
  return f"{', '.join(most)} {last} {end}" if most else end
