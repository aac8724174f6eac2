"""Finds the layers of a module: its repeated parts."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx

from nnx_parallel.core.nodes import Path, array_leaves, iter_nodes, path_str, value_of
from nnx_parallel.core.text import format_array
from nnx_parallel.core.types import Model

_NUMBER = re.compile(r"\d+$")


@dataclasses.dataclass(frozen=True)
class Layers:
  """Adjacent modules of one class and structure: the blocks of a model."""

  pattern: str  # their dotted paths, with `*` for the number
  kind: str  # the name of their class
  paths: tuple[Path, ...]  # where they are, in order
  unlike: str = ""  # how their Variables differ from earlier layers with the same pattern and class

  def __str__(self) -> str:
    unlike = f" (unlike {self.unlike})" if self.unlike else ""
    return f"{len(self.paths)} x {self.kind} at {self.pattern}{unlike}"


def find_layers(model: Model, pattern: str | None = None) -> tuple[Layers, ...]:
  """The layers of a model, outermost first; layers inside a layer are not searched."""
  # Layers are two or more modules of one class that have a matrix among their Variables, and are the elements
  # of a list, tuple or dict, or attributes that end in a number: `block_0`, `block_1`. Modules with Variables
  # of equal paths, types, shapes and dtypes form a group; at least one group has two or more modules. A
  # pattern gives their dotted paths instead, with `*` for any part: `"decoder.blocks.*"`.
  modules = list(modules_of(model))
  order = {path: n for n, (path, _) in enumerate(modules)}
  found: list[Layers] = []
  taken: set[Path] = set()
  for depth, same_depth in itertools.groupby(sorted(modules, key=_depth), _depth):
    beside: dict[tuple[str, type[nnx.Module]], list[tuple[Path, nnx.Module]]] = {}
    for path, module in same_depth:
      name = _pattern(path, pattern)
      if name is not None and not any(path[:n] in taken for n in range(depth)):
        beside.setdefault((name, type(module)), []).append((path, module))
    for (name, kind), members in beside.items():
      groups: dict[_Structure, list[Path]] = {}
      for path, module in members:
        groups.setdefault(_structure(module), []).append(path)
      # Parts of different widths are stages, which have layers inside.
      matrix = any(len(shape) > 1 for structure in groups for _, _, shape, _ in structure)
      if pattern is None and not (matrix and max(map(len, groups.values())) > 1):
        continue
      first = next(iter(groups))
      for structure, paths in groups.items():
        unlike = "" if structure is first else f"{path_str(members[0][0])}: {_unlike(structure, first)}"
        found.append(Layers(name, kind.__name__, tuple(paths), unlike))
        taken.update(paths)
  return tuple(sorted(found, key=lambda layers: order[layers.paths[0]]))


def _depth(row: tuple[Path, object]) -> int:
  return len(row[0])


def modules_of(model: Model) -> Iterator[tuple[Path, nnx.Module]]:
  """Every module but lists and dicts of modules, each once."""
  parts = dict(enumerate(model)) if isinstance(model, (tuple, list)) else model
  roots = parts.items() if isinstance(parts, dict) else [(None, model)]
  seen: set[int] = set()
  for key, root in roots:
    for path, node in iter_nodes(root):
      if isinstance(node, nnx.Module) and not isinstance(node, (nnx.List, nnx.Dict)) and id(node) not in seen:
        seen.add(id(node))
        yield (path if key is None else (key, *path)), node


def _pattern(path: Path, given: str | None) -> str | None:
  """The given pattern, or the path with `*` for the number at its end; None if it has neither."""
  if given is not None:
    return given if fnmatch.fnmatchcase(path_str(path), given) else None
  if not path:
    return None
  last = str(path[-1])
  name = _NUMBER.sub("*", last)
  return path_str((*path[:-1], name)) if name != last else None


_Structure = tuple[tuple[Path, type, tuple[int, ...], np.dtype[Any]], ...]


def _structure(module: object) -> _Structure:
  """Path, type, shape and dtype of each Variable."""
  arrays = {path: (leaf, value_of(leaf)) for path, leaf in array_leaves(module).items()}
  return tuple((path, type(leaf), value.shape, value.dtype) for path, (leaf, value) in arrays.items())


def _unlike(structure: _Structure, other: _Structure) -> str:
  """The first Variable of a structure that is missing in another structure, or has another form there."""
  more = [row for row in structure if row not in other] or [row for row in other if row not in structure]
  if not more:
    return "another order of Variables"
  path, kind, shape, dtype = more[0]
  text = f"{path_str(path)} is {kind.__name__} {format_array(dtype, shape)}"
  return text if more[0] in structure else f"there {text}"
