"""Programs of `programs.py` that are one piece smaller than another: fewer operations, plainer options."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from searches.programs import BLOCKS, INPUTS, LOSSES, Layout, Program, weights_of

PLAIN = {"input": {"op": "features"}, "loss": {"op": "sine"}}
LEAST = {"batch": 8, "hidden": 8, "width": 8, "length": 4}


def smaller(program: Program, layout: Layout) -> Iterator[tuple[Program, Layout]]:
  """Each program that is one piece smaller and can be laid out, the largest pieces first."""
  for i in range(len(program["blocks"])):
    rest = [block for n, block in enumerate(program["blocks"]) if n != i]
    yield from _fitting({**program, "blocks": rest}, _renumbered(layout, i))
  for made in _smaller_programs(program):
    yield from _fitting(made, layout)
  for found in _smaller_layouts(layout):
    yield from _fitting(program, found)


def _smaller_programs(program: Program) -> Iterator[Program]:
  for part, plain in PLAIN.items():
    if program[part]["op"] != plain["op"]:
      yield {**program, part: plain}
  pieces = [(program["input"], INPUTS), (program["loss"], LOSSES), *((b, BLOCKS) for b in program["blocks"])]
  for n, (piece, table) in enumerate(pieces):
    plainest = {option: values[0] for option, values in table[piece["op"]].options.items()}
    for option, value in (plainest | {"residual": False}).items():
      if piece.get(option, value) != value:
        made = {**piece, option: value}
        where = {0: {"input": made}, 1: {"loss": made}}
        blocks = [made if one is piece else one for one in program["blocks"]]
        yield program | where.get(n, {"blocks": blocks})
  sizes = program["sizes"]
  if not sizes["flat"] and all(table[piece["op"]].flat for piece, table in pieces):
    yield program | {"sizes": sizes | {"flat": True}}
  for size, least in LEAST.items():
    if sizes[size] > least:
      yield program | {"sizes": sizes | {size: sizes[size] // 2}}


def _smaller_layouts(layout: Layout) -> Iterator[Layout]:
  """Without a mesh axis, with a shorter one, and with one axis less somewhere."""
  for axis, size in layout["mesh"].items():
    if mesh := {name: n for name, n in layout["mesh"].items() if name != axis}:
      yield _without(axis, {**layout, "mesh": mesh}, slice(None))
    if size > 2:
      yield {**layout, "mesh": {**layout["mesh"], axis: 2}}
  for name, spec in layout["specs"].items():
    if any(spec):
      yield {**layout, "specs": {**layout["specs"], name: [[] for _ in spec]}}
  for n, axes in enumerate(_lists(layout)):
    for axis in axes:
      yield _without(axis, layout, slice(n, n + 1))


def _lists(layout: Layout) -> list[list[str]]:
  return [layout["batch"], layout["length"], *(dim for spec in layout["specs"].values() for dim in spec)]


def _without(axis: str, layout: Layout, where: slice) -> Layout:
  made = copy.deepcopy(layout)
  for axes in _lists(made)[where]:
    axes[:] = [name for name in axes if name != axis]
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
  sizes, specs = program["sizes"], layout["specs"]
  if program["loss"].get("tied") and program["input"]["op"] != "embedding":
    return
  try:
    shapes = {name: found.shape for name, found in weights_of(program).items()}
  except (KeyError, ZeroDivisionError):
    return
  specs = {name: specs.get(name, [[] for _ in shape]) for name, shape in shapes.items()}
  layout = {**layout, "length": [] if sizes["flat"] else layout["length"], "specs": specs}
  dims = [sizes["batch"], sizes["length"], *(n for shape in shapes.values() for n in shape)]
  if len(dims) != len(_lists(layout)):
    return
  for size, axes in zip(dims, _lists(layout), strict=True):
    for axis in axes:
      if size % layout["mesh"][axis]:
        return
      size //= layout["mesh"][axis]
  yield program, layout
