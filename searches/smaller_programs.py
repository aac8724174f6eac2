"""Programs of `programs.py` that are one piece smaller than another: fewer operations, plainer options."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from searches.programs import BLOCKS, INPUTS, LOSSES, Layout, Program, weights_of

PLAIN = {"input": {"op": "features"}, "loss": {"op": "sine"}}


def smaller(program: Program, layout: Layout) -> Iterator[tuple[Program, Layout]]:
  """Each program that is one piece smaller and can be laid out, the largest pieces first."""
  for i in range(len(program["blocks"])):
    yield from _fitting(_edited(program, lambda p, i=i: p["blocks"].pop(i)), _renumbered(layout, i))
  for made in (*_smaller_programs(program), program):
    for found in [layout] if made is not program else _smaller_layouts(layout):
      yield from _fitting(made, found)


def _smaller_programs(program: Program) -> Iterator[Program]:
  for part, plain in PLAIN.items():
    if program[part]["op"] != plain["op"]:
      yield _edited(program, lambda p, part=part, plain=plain: p.update({part: dict(plain)}))
  places = [(("input",), INPUTS), (("loss",), LOSSES)]
  places += [(("blocks", i), BLOCKS) for i in range(len(program["blocks"]))]
  for place, table in places:
    piece = _at(program, place)
    plainest = {option: values[0] for option, values in table[piece["op"]].options.items()}
    for option, value in (plainest | {"residual": False}).items():
      if piece.get(option, value) != value:
        yield _edited(program, lambda p, at=place, o=option, v=value: _at(p, at).update({o: v}))
  sizes = program["sizes"]
  if not sizes["flat"] and all(table[_at(program, place)["op"]].flat for place, table in places):
    yield _edited(program, lambda p: p["sizes"].update(flat=True))
  for size, least in (("batch", 8), ("hidden", 8), ("width", 8), ("length", 4)):
    if sizes[size] > least:
      yield _edited(program, lambda p, s=size: p["sizes"].update({s: p["sizes"][s] // 2}))


def _smaller_layouts(layout: Layout) -> Iterator[Layout]:
  mesh = layout["mesh"]
  for axis in mesh:
    if len(mesh) > 1:
      made = copy.deepcopy(layout)
      del made["mesh"][axis]
      for axes in (made["batch"], made["length"], *(dim for spec in made["specs"].values() for dim in spec)):
        axes[:] = [name for name in axes if name != axis]
      yield made
    if mesh[axis] > 2:
      yield _edited(layout, lambda p, a=axis: p["mesh"].update({a: 2}))
  split = [name for name, spec in layout["specs"].items() if any(spec)]
  parts = [split[: len(split) // 2], split[len(split) // 2 :]] if len(split) > 3 else []
  for names in (*parts, *([name] for name in split)):
    whole = {name: [[] for _ in layout["specs"][name]] for name in names}
    yield _edited(layout, lambda p, whole=whole: p["specs"].update(whole))
  lists: list[tuple[Any, ...]] = [("batch",), ("length",)]
  lists += [("specs", name, dim) for name, spec in layout["specs"].items() for dim in range(len(spec))]
  for place in lists:
    for axis in _at(layout, place):
      yield _edited(layout, lambda p, at=place, a=axis: _at(p, at).remove(a))


def _at(tree: Any, place: tuple[Any, ...]) -> Any:
  for key in place:
    tree = tree[key]
  return tree


def _edited(tree: Any, edit: Callable[[Any], object]) -> Any:
  made = copy.deepcopy(tree)
  edit(made)
  return made


def _renumbered(layout: Layout, old: int) -> Layout:
  """Specs of the blocks behind a dropped one, under their new names."""
  specs: dict[str, Any] = {}
  for name, spec in layout["specs"].items():
    prefix, rest = name.split("_", 1)
    number = int(prefix[1:]) if prefix.startswith("b") else -1
    if number != old:
      specs[f"b{number - 1}_{rest}" if number > old else name] = spec
  return {**layout, "specs": specs}


def _fitting(program: Program, layout: Layout) -> Iterator[tuple[Program, Layout]]:
  """The program without specs of parameters that are gone; nothing where a size no longer divides."""
  layout, sizes = copy.deepcopy(layout), program["sizes"]
  if program["loss"].get("tied") and program["input"]["op"] != "embedding":
    return
  try:
    shapes = {name: found.shape for name, found in weights_of(program).items()}
  except (KeyError, ZeroDivisionError):
    return
  layout["length"] = [] if sizes["flat"] else layout["length"]
  layout["specs"] = {name: layout["specs"].get(name, [[] for _ in shape]) for name, shape in shapes.items()}
  dims = [(sizes["batch"], layout["batch"]), (sizes["length"], layout["length"])]
  for name, shape in shapes.items():
    if len(layout["specs"][name]) != len(shape):
      return
    dims += zip(shape, layout["specs"][name], strict=True)
  for size, axes in dims:
    for axis in axes:
      if size % layout["mesh"][axis]:
        return
      size //= layout["mesh"][axis]
  yield program, layout
