"""Finds the layers of a module: what repeats in it."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterator
from typing import Any

from flax import nnx

from nnx_parallel.core.nodes import Path, array_leaves, iter_nodes, path_str, value_of

_NUMBER = re.compile(r"\d+$")
_PLAIN = (bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True)
class Layers:
  """Modules of one class and structure beside each other: the blocks of a model.

  Attributes:
    pattern: their dotted paths, with `*` for the number.
    kind: the name of their class.
    paths: where they are, in order.
    differ: attributes in which they differ, with the values seen.
  """

  pattern: str
  kind: str
  paths: tuple[Path, ...]
  differ: tuple[str, ...] = ()

  def __str__(self) -> str:
    text = f"{len(self.paths)} x {self.kind} at {self.pattern}"
    return text + (f" (they differ in {', '.join(self.differ)})" if self.differ else "")


def find_layers(model: Any, pattern: str | None = None) -> tuple[Layers, ...]:
  """The layers of a model, outermost first; inside a layer none are looked for.

  Layers are two or more modules of one class, with Variables of equal paths, types, shapes and dtypes, that
  are the elements of a list, tuple or dict, or attributes that end in a number: `block_0`, `block_1`.

  Args:
    model: a module, live or abstract, or a tuple or dict of them.
    pattern: dotted paths of the layers, with `*` for any part: `"decoder.blocks.*"`. None: see above.

  Returns:
    Groups of layers, in the order of the model.

  Example:
    >>> from flax import nnx
    >>> rngs = nnx.Rngs(0)
    >>> model = nnx.Sequential(*[nnx.Linear(4, 4, rngs=rngs) for _ in range(3)], nnx.Linear(4, 2, rngs=rngs))
    >>> print(*find_layers(model))
    3 x Linear at layers.*
  """
  by_depth: dict[int, list[tuple[Path, Any]]] = {}
  for path, module in _modules(model):
    by_depth.setdefault(len(path), []).append((path, module))
  found: list[Layers] = []
  taken: set[Path] = set()
  for depth in sorted(by_depth):
    groups: dict[Any, list[tuple[Path, Any]]] = {}
    for path, module in by_depth[depth]:
      name = _pattern(path) if pattern is None else _matched(path, pattern)
      if name is not None and not any(path[:n] in taken for n in range(depth)):
        groups.setdefault((name, type(module), _structure(module)), []).append((path, module))
    for (name, kind, _), members in groups.items():
      if len(members) > 1 or pattern is not None:
        paths = tuple(path for path, _ in members)
        found.append(Layers(name, kind.__name__, paths, _differences([module for _, module in members])))
        taken.update(paths)
  order = {path: n for n, (path, _) in enumerate(_modules(model))}
  return tuple(sorted(found, key=lambda layers: order[layers.paths[0]]))


def _modules(model: Any) -> Iterator[tuple[Path, Any]]:
  """Every module but lists and dicts of modules, each once."""
  parts = dict(enumerate(model)) if isinstance(model, (tuple, list)) else model
  roots = parts.items() if isinstance(parts, dict) else [(None, model)]
  seen: set[int] = set()
  for key, root in roots:
    for path, node in iter_nodes(root):
      if isinstance(node, nnx.Module) and not isinstance(node, (nnx.List, nnx.Dict)) and id(node) not in seen:
        seen.add(id(node))
        yield (path if key is None else (key, *path)), node


def _pattern(path: Path) -> str | None:
  """The path with `*` for the number at its end; None where it has none."""
  if not path:
    return None
  last = str(path[-1])
  name = _NUMBER.sub("*", last)
  return path_str((*path[:-1], name)) if name != last else None


def _matched(path: Path, pattern: str) -> str | None:
  return pattern if fnmatch.fnmatchcase(path_str(path), pattern) else None


def _structure(module: Any) -> Any:
  """Path, type, shape and dtype of each Variable."""
  arrays = {path: (leaf, value_of(leaf)) for path, leaf in array_leaves(module).items()}
  return tuple((path, type(leaf), value.shape, value.dtype) for path, (leaf, value) in arrays.items())


def _differences(modules: list[Any]) -> tuple[str, ...]:
  """The plain attributes in which modules of one structure differ: `window (None, 128)`."""
  values: dict[str, dict[Any, None]] = {}
  for module in modules:
    for path, node in iter_nodes(module):
      if isinstance(node, nnx.Module):
        for name, value in vars(node).items():
          if isinstance(value, _PLAIN) and not name.startswith("_"):
            values.setdefault(path_str((*path, name)), {})[value] = None
  return tuple(
    f"{name} ({', '.join(map(repr, list(seen)[:3]))}{', ...' if len(seen) > 3 else ''})"
    for name, seen in values.items()
    if 1 < len(seen) < len(modules)  # else it is a number or a name of each
  )
