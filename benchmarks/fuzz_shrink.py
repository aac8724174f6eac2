"""Makes a wrong program smaller while it stays wrong: fewer operations, plainer options, whole parameters.

python -m benchmarks.fuzz_shrink 1005.3 2000.1 --step plain
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import fuzz_programs
from benchmarks.fuzz import Case, Options, Worker, cases
from benchmarks.fuzz_programs import BLOCKS, INPUTS, LOSSES, Layout, Program

CLEAR = 1e-2  # a smaller program must be wrong by more than this
PLAIN = {"input": {"op": "features"}, "loss": {"op": "sine"}}


def smaller(program: Program, layout: Layout) -> Iterator[tuple[Program, Layout]]:
  """Each program that is one piece smaller, the largest pieces first."""
  for i in range(len(program["blocks"])):
    yield _edited(program, lambda p, i=i: p["blocks"].pop(i)), layout
  for part, plain in PLAIN.items():
    if program[part]["op"] != plain["op"]:
      yield _edited(program, lambda p, part=part, plain=plain: p.update({part: dict(plain)})), layout
  yield from ((program, made) for made in _smaller_layouts(layout))
  for place, table in _places(program):
    piece = _at(program, place)
    plainest = {option: values[0] for option, values in table[piece["op"]].options.items()} | {
      "residual": False
    }
    for option, value in plainest.items():
      if piece.get(option, value) != value:
        yield _edited(program, lambda p, at=place, o=option, v=value: _at(p, at).update({o: v})), layout
  sizes = program["sizes"]
  if not sizes["flat"] and all(table[_at(program, place)["op"]].flat for place, table in _places(program)):
    yield _edited(program, lambda p: p["sizes"].update(flat=True)), layout
  for size, least in (("batch", 8), ("hidden", 8), ("width", 8), ("length", 4)):
    if sizes[size] > least:
      yield _edited(program, lambda p, s=size: p["sizes"].update({s: p["sizes"][s] // 2})), layout


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
  lists = [("batch",), ("length",)]
  lists += [("specs", name, dim) for name, spec in layout["specs"].items() for dim in range(len(spec))]
  for place in lists:
    for axis in _at(layout, place):
      yield _edited(layout, lambda p, at=place, a=axis: _at(p, at).remove(a))


def _places(program: Program) -> list[tuple[Any, Any]]:
  blocks = [(("blocks", i), BLOCKS) for i in range(len(program["blocks"]))]
  return [(("input",), INPUTS), *blocks, (("loss",), LOSSES)]


def _at(tree: Any, place: tuple[Any, ...]) -> Any:
  for key in place:
    tree = tree[key]
  return tree


def _edited(tree: Any, edit: Any) -> Any:
  made = copy.deepcopy(tree)
  edit(made)
  return made


def _consistent(program: Program, layout: Layout) -> tuple[Program, Layout] | None:
  """Drops specs of parameters that are gone; None where a size no longer divides."""
  program, layout = copy.deepcopy(program), copy.deepcopy(layout)
  if program["loss"].get("tied") and program["input"]["op"] != "embedding":
    return None
  try:
    weights = fuzz_programs.weights_of(program)
  except (KeyError, ZeroDivisionError):
    return None
  if program["sizes"]["flat"]:
    layout["length"] = []
  mesh = layout["mesh"]
  sizes = {name: found.shape for name, found in weights.items()}
  layout["specs"] = {name: layout["specs"].get(name, [[] for _ in shape]) for name, shape in sizes.items()}
  dims = [(program["sizes"]["batch"], layout["batch"]), (program["sizes"]["length"], layout["length"])]
  for name, shape in sizes.items():
    if len(layout["specs"][name]) != len(shape):
      return None
    dims += zip(shape, layout["specs"][name], strict=True)
  for size, axes in dims:
    for axis in axes:
      if size % mesh[axis]:
        return None
      size //= mesh[axis]
  return program, layout


def renumbered(program: Program, layout: Layout, old: int) -> Layout:
  """Specs of the blocks behind a dropped one, under their new names."""
  specs: dict[str, Any] = {}
  for name, spec in layout["specs"].items():
    prefix, rest = name.split("_", 1)
    if prefix.startswith("b"):
      number = int(prefix[1:])
      if number == old:
        continue
      prefix = f"b{number - (number > old)}"
    specs[f"{prefix}_{rest}"] = spec
  return {**layout, "specs": specs}


class Shrinker:
  """Tries programs in a forked process."""

  def __init__(self, options: Options, loud: bool = False):
    self.worker = Worker(options)
    self.tried = 0
    self.loud = loud

  def verdict(self, case: Case) -> dict[str, Any]:
    self.tried += 1
    self.worker.give([case])
    while True:
      for _, result in self.worker.results():
        return result

  def shrink(self, case: Case) -> tuple[Case, dict[str, Any]]:
    """The smallest program reached, and its result; the case itself where it is not wrong."""
    result = self.verdict(case)
    wanted = result["verdict"]
    if wanted not in ("wrong", "abort", "hang"):
      return case, result
    again = True
    while again:
      again = False
      for program, layout in smaller(case.program, case.layout):
        if len(program["blocks"]) < len(case.program["blocks"]):
          old = _dropped(case.program["blocks"], program["blocks"])
          layout = renumbered(program, layout, old)
        made = _consistent(program, layout)
        if made is None:
          continue
        attempt = Case(case.seed, case.number, *made)
        found = self.verdict(attempt)
        if found["verdict"] == wanted and (wanted != "wrong" or max(found["off"].values()) > CLEAR):
          case, result, again = attempt, found, True
          if self.loud:
            print(f"-- after {self.tried}\n{describe(case, result)}", flush=True)
          break
    return case, result


def _dropped(before: list[Any], after: list[Any]) -> int:
  return next((i for i, block in enumerate(after) if block != before[i]), len(after))


def describe(case: Case, result: dict[str, Any]) -> str:
  """A few lines that say what is left."""
  layout = case.layout
  weights = fuzz_programs.weights_of(case.program)
  specs = {n: (weights[n].shape, fuzz_programs.spec_of(s)) for n, s in layout["specs"].items()}
  parts = [case.program["input"], *case.program["blocks"], case.program["loss"]]
  return "\n".join(
    [
      f"{case.seed}.{case.number} {result['verdict']} {result.get('off') or result.get('message')}",
      f"  mesh {layout['mesh']}, batch {layout['batch']} {layout['length']}, sizes {case.program['sizes']}",
      *(f"  {part}" for part in parts),
      *(f"    {name} {shape} {spec}" for name, (shape, spec) in specs.items()),
    ]
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("programs", nargs="+", help="SEED.LAYOUT")
  parser.add_argument("--step", default="plain")
  parser.add_argument("--gspmd", action="store_true")
  parser.add_argument("--out", type=pathlib.Path)
  parser.add_argument("--loud", action="store_true", help="print each smaller program on the way")
  given = parser.parse_args()
  shrinker = Shrinker(Options(given.step, shardy=not given.gspmd), given.loud)
  for name in given.programs:
    seed, number = map(int, name.split("."))
    began = time.time()
    case, result = shrinker.shrink(cases(seed, [number])[0])
    print(describe(case, result), f"\n  ({shrinker.tried} tried, {time.time() - began:.0f} s)", flush=True)
    shrinker.tried = 0
    if given.out:
      with given.out.open("a") as stream:
        print(json.dumps(dataclasses.asdict(case)), file=stream)
  shrinker.worker.stop()


if __name__ == "__main__":
  from benchmarks.fuzz_shrink import main as run_main

  run_main()
