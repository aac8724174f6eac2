"""Chooses a few positions of each dim, so that programs on large arrays can be evaluated with few numbers.

Every dim is divided by a number that divides all of its blocks, slices and offsets: one position then stands
for a run of neighbours. Dims that meet (in a sum of two arrays, in a product, as argument and parameter of a
loop) are one class in all programs that are compared, because they must keep the same positions. Dims of a
window, a sort or a group of channels are not thinned. Of dims that a reshape merges, one is thinned; where
others are inside of it (the microbatches of a batch), the merged dim keeps a run of positions, its grain,
for each position of the thinned one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from nnx_parallel.core.classes import Forest, Ratio
from nnx_parallel.report.program import hlo
from nnx_parallel.report.program.devices import group_rows, read_tiling

# The fewest positions that a dim keeps in all, and on one device, where it has as many.
_IN_ALL, _ON_ONE = 6, 2
_BOUND = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")
_PAD = re.compile(r"(-?\d+)_(-?\d+)(?:_(\d+))?")
_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")
_LOOPS_AND_CALLS = frozenset(
  {"while", "conditional", "call", "fusion", "tuple", "get-tuple-element", "parameter"}
)
ELEMENTWISE = frozenset({
  "abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "convert", "copy", "cosine",
  "count-leading-zeros", "divide", "erf", "exponential", "exponential-minus-one", "floor", "is-finite", "log",
  "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "power",
  "reduce-precision", "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select",
  "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "subtract", "tan",
  "tanh", "xor", "bitcast-convert",
})  # fmt: skip
"""Operations on each position by itself; all operands have the shape of the result, or are scalars."""
_LINKED = ELEMENTWISE | {
  "dot", "convolution", "gather", "scatter", "reduce", "iota", "sort", "topk", "reduce-window", "broadcast",
}  # fmt: skip
# Without a rule for dims: they have no operand, or their results are not known (kernels).
_FREE = frozenset(
  {"custom-call", "constant", "iota", "partition-id", "replica-id", "after-all", "rng-bit-generator"}
)
_COLLECTIVES = frozenset({"all-reduce", "collective-permute", "all-gather", "reduce-scatter", "all-to-all"})
# Operations that unite the dims at one place of all operands with those of the result.
_PLACEWISE = ELEMENTWISE | {"concatenate", "dynamic-update-slice", "reverse"}

Window = tuple[int, int, int, int, int, int, bool]
Node = tuple[int, str, str]
"""Number of a program, computation, instruction."""
_Dims = list[list[int]]
_Shapes = list[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class _Alike:
  """Operations of the whole program with one name, line, sizes and layout.

  Attributes:
    first: one of them.
    sizes: of all dims that each of them reads and makes.
    dims: those dims, of each operation.
  """

  first: hlo.Instruction
  sizes: tuple[int, ...]
  dims: list[list[int]]

  def united(self, unite: Callable[[list[int], list[int]], None]) -> list[int]:
    """Puts the dims of all in the classes of the first one's, and returns those."""
    while len(self.dims) > 1:
      unite(self.dims[0], self.dims.pop())
    return self.dims[0]


class Thinning:
  """The thinning of all arrays of programs; arguments, and results, of the same number are the same array.

  Args:
    programs: parsed programs whose entries take and return the same arrays, whole or in blocks.
    finer: array -> dim -> what its thinning must divide, as found while evaluating.
  """

  def __init__(self, programs: Sequence[hlo.Program], finer: Mapping[Node, Mapping[int, int]] | None = None):
    self._programs = programs
    self._rules: Mapping[str, Callable[[hlo.Instruction, _Dims, _Dims, _Shapes], None]] = {
      "broadcast": self._broadcast, "transpose": self._transpose, "reshape": self._reshape,
      "slice": self._slice, "dynamic-slice": self._dynamic_slice, "pad": self._pad,
      "reduce": self._reduce, "dot": self._dot, "convolution": self._convolution,
      "gather": self._gather, "scatter": self._scatter, "sort": self._sort,
      "reduce-window": self._window, "select-and-scatter": self._window,
    }  # fmt: skip
    # Of a class, in its root's elements: sizes of its smallest and largest dim, and what thinning divides.
    self._forest = Forest()
    self._sizes: list[tuple[Ratio, Ratio]] = []
    self._step: list[Ratio] = []
    self._known: dict[Node, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    self._merges: list[tuple[tuple[list[int], tuple[int, ...]], ...]] = []
    self._nodes: dict[Node, list[list[int]]] = {}
    self._shapes: dict[Node, tuple[tuple[int, ...], ...]] = {}
    # What is cut out unevenly, by JAX name, line and dim, in each program.
    self._cuts: list[dict[tuple[str, int, int], list[int]]] = [{} for _ in programs]
    for number, program in enumerate(programs):
      for computation in reachable(program):
        self._enter(number, computation)
    for number, program in enumerate(programs):
      self._cut = self._cuts[number]
      for computation in reachable(program):
        for instruction in computation.instructions:
          try:
            self._constrain(number, computation, instruction)
          except (ValueError, LookupError):  # a form of it that is not known here
            self._keep(self._dims_of(number, computation, instruction))
    self._tie()
    self._link()
    for sides in self._merges:
      self._merge(sides)
    for node, steps in (finer or {}).items():
      for dim, step in steps.items():
        self._divide(self._nodes[node][0][dim], step)
    # The fewest elements of the root that are an integer number of elements of each dim in the class.
    self._unit = [1] * len(self._forest)
    for dim in range(len(self._forest)):
      root = self._forest.root(dim)
      self._unit[root] = math.lcm(self._unit[root], self._forest.ratio(dim).denominator)
    roots = {self._forest.root(dim) for dim in self._tied}
    self._scales = {r: _scale(self._step[r], self._sizes[r], self._unit[r]) for r in roots}

  def scales(self, program: int, computation: str, instruction: str, index: int = 0) -> tuple[int, ...]:
    """By what each dim of an array is divided; `index` picks one of a tuple."""
    return self._found((program, computation, instruction))[index][0]

  def shape(self, program: int, computation: str, instruction: str, index: int = 0) -> tuple[int, ...]:
    """Thinned sizes of an array."""
    return self._found((program, computation, instruction))[index][1]

  def _found(self, node: Node) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Scales and sizes of each array of an instruction."""
    if node not in self._known:
      scales = [tuple(self._scales.get(self._forest.root(d), 1) for d in dims) for dims in self._nodes[node]]
      self._known[node] = [
        (by, tuple(n // s for n, s in zip(sizes, by, strict=True)))
        for by, sizes in zip(scales, self._shapes[node], strict=True)
      ]
    return self._known[node]

  def grains(self, program: int, computation: str, instruction: str) -> tuple[int, ...]:
    """How many neighbours each dim of an array keeps at a time."""
    dims = self._nodes[program, computation, instruction][0]
    return tuple(int(self._unit[self._forest.root(d)] * self._forest.ratio(d)) for d in dims)

  def kept(self, program: int, computation: str, instruction: str) -> list[Sequence[int]]:
    """The positions that each dim of an array keeps."""
    node = (program, computation, instruction)
    rows = zip(self._shapes[node][0], self.scales(*node), self.grains(*node), strict=True)
    return [
      range(size) if scale == 1 else [n + m for n in range(0, size, scale * grain) for m in range(grain)]
      for size, scale, grain in rows
    ]

  # Classes of dims ----------------------------------------------------------------------------

  def _enter(self, number: int, computation: hlo.Computation) -> None:
    for instruction in computation.instructions:
      node = (number, computation.name, instruction.name)
      self._shapes[node] = tuple(shape.dims for shape in instruction.shapes)
      self._nodes[node] = [[self._new(n) for n in shape.dims] for shape in instruction.shapes]

  def _dims_of(self, number: int, computation: hlo.Computation, at: hlo.Instruction) -> list[int]:
    """All dims that an instruction reads and makes."""
    names = [at.name, *(name for name in at.operands if name in computation.by_name)]
    return [d for name in names for dims in self._nodes[number, computation.name, name] for d in dims]

  def _new(self, size: int) -> int:
    self._sizes.append((size, size))
    self._step.append(size)
    return self._forest.new()

  def _unite(self, one: int, other: int, ratio: int = 1) -> None:
    """Puts two dims in one class; one element of the second is `ratio` elements of the first."""
    forest = self._forest
    united = forest.unite(one, other, ratio)
    if united is not None:
      a, b = united
      each = forest.ratio(b)
      low, high = self._sizes[b]
      self._step[a] = _common(self._step[a], _divided(self._step[b], each))
      self._sizes[a] = (
        min(self._sizes[a][0], _divided(low, each)),
        max(self._sizes[a][1], _divided(high, each)),
      )
    elif forest.ratio(one) != ratio * forest.ratio(other):
      self._keep((one, other))

  def _divide(self, dim: int, number: int) -> None:
    root = self._forest.root(dim)
    self._step[root] = _common(self._step[root], _divided(number, self._forest.ratio(dim)))

  def _keep(self, dims: Iterable[int]) -> None:
    for dim in dims:
      self._divide(dim, 1)

  def _unite_all(self, ones: Sequence[int], others: Sequence[int]) -> None:
    for one, other in zip(ones, others, strict=True):
      self._unite(one, other)

  def _tie(self) -> None:
    """Arguments and results of all programs, in their order, and what they cut out in the same place."""
    self._tied = list[int]()
    for key, dims in self._cuts[0].items():
      # A partitioner makes several cuts and joins for one slice: the last is the result.
      cuts = [dim for cut in self._cuts for dim in cut.get(key, [])[-len(dims) :]]
      self._tied += cuts
      for dim in cuts:
        self._unite(dims[0], dim)
    first: dict[object, list[int]] = {}
    for number, program in enumerate(self._programs):
      entry = program.entry
      arrays: list[tuple[object, list[int]]] = []
      for instruction in entry.instructions:
        if instruction.opcode == "parameter":
          node = self._nodes[number, entry.name, instruction.name]
          arrays += [(("in", instruction.arguments, index), dims) for index, dims in enumerate(node)]
      node = self._nodes[number, entry.name, entry.root.name]
      arrays += [(("out", index), dims) for index, dims in enumerate(node)]
      for key, dims in arrays:
        self._tied += dims
        if key in first:
          self._unite_all(first[key], dims)
        first.setdefault(key, dims)

  def _link(self) -> None:
    """Unites operations of two programs with one JAX name and line, and shapes of an array and of its block.

    Dims that are in no argument or result would otherwise be thinned in one program only. Several
    operations can have one name, for example the forward and backward products of a line.
    """
    # By their key; then by sizes and layout, since an optimizer does the same to many arrays of one kind.
    first: dict[tuple[object, ...], dict[tuple[object, ...], _Alike]] = {}
    for number, program in enumerate(self._programs):
      for computation in reachable(program):
        for at in computation.instructions:
          if not at.op_name or at.opcode not in _LINKED:
            continue
          names = [at.name] if at.opcode in ELEMENTWISE else [at.name, *at.operands]
          nodes = [(number, computation.name, name) for name in names]
          dims = [d for node in nodes for array in self._nodes[node] for d in array]
          shapes = [shape for node in nodes for shape in self._shapes[node]]
          sizes = tuple(n for shape in shapes for n in shape)
          key = (at.opcode, at.op_name, at.frame, *map(len, shapes))
          if number == 0:
            kind = sizes, at.attribute("sharding"), str(dot_dims(at)) if at.opcode == "dot" else ""
            first.setdefault(key, {}).setdefault(kind, _Alike(at, sizes, [])).dims.append(dims)
            continue
          found = [
            (_likeness(at, alike.first, program.partitions), alike)
            for alike in first.get(key, {}).values()
            if _are_blocks(sizes, alike.sizes, program.partitions)
          ]
          closest = max((likeness for likeness, _ in found), default=0)
          for likeness, alike in found:
            if likeness == closest:
              self._unite_all(dims, alike.united(self._unite_all))

  # The rule of each operation ----------------------------------------------------------------

  def _constrain(self, number: int, computation: hlo.Computation, at: hlo.Instruction) -> None:
    results = self._nodes[number, computation.name, at.name]
    operands = [self._nodes[number, computation.name, name] for name in at.operands]
    if at.opcode in _LOOPS_AND_CALLS:
      self._calls(number, computation, at, results, operands)
      return
    arrays = [dims for operand in operands for dims in operand]
    shapes = [s for name in at.operands for s in self._shapes[number, computation.name, name]]
    rule = self._rules.get(at.opcode)
    if rule is not None:
      rule(at, results, arrays, shapes)
    elif at.opcode in _PLACEWISE:
      for dims in arrays:
        if len(dims) == len(results[0]):
          self._unite_all(results[0], dims)
        elif dims:
          self._keep((*dims, *results[0]))
    elif at.opcode in _COLLECTIVES:
      for dims, result in zip(arrays, results, strict=True):
        self._unite_all(result, dims)
      if at.opcode == "all-to-all" and len(arrays) == 1:
        place, members = (
          at.numbers("dimensions")[0],
          group_rows(at.rest, self._programs[number].partitions)[0],
        )
        self._divide(arrays[0][place], shapes[0][place] // len(members))
    elif at.opcode == "opt-barrier" or (at.opcode == "custom-call" and len(arrays) == len(results) == 1):
      for dims, result in zip(arrays, results, strict=True):
        if len(dims) == len(result):
          self._unite_all(result, dims)
    elif at.opcode == "topk" or "TopK" in at.rest:
      for result in results:
        self._unite_all(result[:-1], arrays[0][:-1])
        self._keep((result[-1], arrays[0][-1]))
    elif at.opcode not in _FREE:
      self._keep(d for dims in (*arrays, *results) for d in dims)

  def _calls(
    self,
    number: int,
    computation: hlo.Computation,
    at: hlo.Instruction,
    results: _Dims,
    operands: list[_Dims],
  ) -> None:
    def unite(ones: _Dims, others: _Dims) -> None:
      for one, other in zip(ones, others, strict=True):
        self._unite_all(one, other)

    if at.opcode == "tuple":
      unite(results, [dims for operand in operands for dims in operand])
    elif at.opcode == "get-tuple-element":
      unite(results, [operands[0][int(at.attribute("index"))]])
    elif at.opcode != "parameter":
      for place, name in enumerate(at.called):
        inner = self._programs[number].computations[name]
        inputs = [operands[1 + place]] if at.opcode == "conditional" else operands
        for parameter in inner.instructions:
          if parameter.opcode == "parameter":
            unite(self._nodes[number, name, parameter.name], inputs[int(parameter.arguments)])
        if name != at.attribute("condition").lstrip("%"):
          unite(self._nodes[number, name, inner.root.name], results)

  def _broadcast(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    for dim, place in zip(arrays[0], at.numbers("dimensions"), strict=True):
      self._unite(dim, results[0][place])

  def _transpose(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    for dim, place in zip(results[0], at.numbers("dimensions"), strict=True):
      self._unite(dim, arrays[0][place])

  def _reshape(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    sides = ((arrays[0], shapes[0]), (results[0], at.shapes[0].dims))
    for groups in merged(shapes[0], at.shapes[0].dims):
      self._merges.append(
        tuple(
          ([dims[n] for n in places], tuple(shape[n] for n in places))
          for (dims, shape), places in zip(sides, groups, strict=True)
        )
      )

  def _largest(self, dim: int) -> Ratio:
    """The size of the largest dim that is thinned like this one, in this one's elements."""
    return self._sizes[self._forest.root(dim)][1] * self._forest.ratio(dim)

  def _merge(self, sides: tuple[tuple[list[int], tuple[int, ...]], ...]) -> None:
    """Of dims that a reshape merges or splits, the largest is thinned; where it does both, the last."""
    single = min(len(dims) for dims, _ in sides) == 1
    found: list[tuple[int, int]] = []
    for dims, shape in sides:
      place = len(dims) - 1
      if single:
        place = max(range(len(dims)), key=lambda n: (self._largest(dims[n]), n))
      self._keep(dims[:place] + dims[place + 1 :])
      found.append((dims[place], math.prod(shape[place + 1 :])))
    (one, inside), (other, within) = found
    # The first has `within` neighbours where the second has one, or the other way around.
    self._unite(one, other, within) if within > 1 else self._unite(other, one, inside)

  def _slice(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    for place, (start, stop, step) in enumerate(slice_bounds(at)):
      one, other, size = results[0][place], arrays[0][place], shapes[0][place]
      if step > 1:
        self._keep((one, other))
      elif math.gcd(start, stop, size) == 1 and size > 1:
        self._cut_out(at, place, one, other)
      else:
        self._unite(one, other)
        self._divide(other, start)

  def _cut_out(self, at: hlo.Instruction, place: int, result: int, source: int) -> None:
    """An uneven slice, such as all tokens but the first: its source is not thinned, its result may be."""
    self._divide(source, 1)
    if at.shapes[0].dims[place] > 1:
      self._cut.setdefault((at.op_name, at.frame, place), []).append(result)

  def _dynamic_slice(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    for place, (one, other) in enumerate(zip(results[0], arrays[0], strict=True)):
      size = at.shapes[0].dims[place]
      if size > 1 and math.gcd(size, shapes[0][place]) == 1:
        self._cut_out(at, place, one, other)
      else:
        self._unite(one, other)

  def _pad(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    for place, (low, high, inside) in enumerate(padding(at)):
      self._unite(results[0][place], arrays[0][place])
      self._divide(arrays[0][place], 1 if inside else math.gcd(low, high))

  def _reduce(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    arrays = arrays[: len(arrays) // 2]
    gone = at.numbers("dimensions")
    kept = [place for place in range(len(arrays[0])) if place not in gone]
    for dims in arrays:
      self._unite_all(arrays[0], dims)
    for result in results:
      self._unite_all(result, [arrays[0][place] for place in kept])

  def _dot(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    left, right = arrays[:2]
    sides = dot_dims(at)
    for a, b in zip(sides["lhs_batch"], sides["rhs_batch"], strict=True):
      self._unite(left[a], right[b])
    for a, b in zip(sides["lhs"], sides["rhs"], strict=True):
      self._unite(left[a], right[b])
    free = [left[d] for d in sides["lhs_batch"]]
    free += [d for n, d in enumerate(left) if n not in sides["lhs"] + sides["lhs_batch"]]
    free += [d for n, d in enumerate(right) if n not in sides["rhs"] + sides["rhs_batch"]]
    self._unite_all(results[0], free)

  def _convolution(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    named = [
      dict(zip(text, dims, strict=True))
      for text, dims in zip(labels(at), (arrays[0], arrays[1], results[0]), strict=True)
    ]
    for dims in named:
      for label, dim in dims.items():
        if label.isdigit():
          self._divide(dim, 1)
    pairs = [(named[0]["f"], named[1]["i"]), (named[1]["o"], named[2]["f"]), (named[0]["b"], named[2]["b"])]
    grouped = group_counts(at) != (1, 1)
    for number, (one, other) in enumerate(pairs):
      if grouped and (number < 2 or group_counts(at)[1] > 1):
        self._divide(one, 1)
        self._divide(other, 1)
      else:
        self._unite(one, other)

  def _gather(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    found = gather_dims(at)
    sizes = at.numbers("slice_sizes")
    self._indexed(found, arrays[0], shapes[0], sizes, arrays[1], results[0])

  def _scatter(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    count = len(results)
    found = gather_dims(at)
    for number in range(count):
      self._unite_all(results[number], arrays[number])
      operand, updates = shapes[number], shapes[count + 1 + number]
      sizes = found.slice_sizes((updates[d] for d in found.offset_dims), len(operand))
      self._indexed(found, arrays[number], operand, sizes, arrays[count], arrays[count + 1 + number])

  def _indexed(
    self,
    found: GatherDims,
    operand: list[int],
    shape: tuple[int, ...],
    sizes: Sequence[int],
    indices: list[int],
    result: list[int],
  ) -> None:
    vector, offsets = found.index_vector_dim, found.offset_dims
    rows = [d for n, d in enumerate(indices) if n != vector]
    if vector < len(indices):
      self._divide(indices[vector], 1)
    self._unite_all(rows, [d for n, d in enumerate(result) if n not in offsets])
    kept = [n for n in range(len(operand)) if n not in found.absent]
    for place, offset in zip(kept, offsets, strict=True):
      if sizes[place] == shape[place]:
        self._unite(operand[place], result[offset])
      else:
        self._divide(operand[place], 1)
        self._divide(result[offset], 1)
    for place, row in zip(found.operand_batching_dims, found.start_indices_batching_dims, strict=True):
      self._unite(operand[place], indices[row])

  def _sort(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    for dims, result in zip(arrays, results, strict=True):
      self._unite_all(result, dims)
      self._unite_all(results[0], dims)
    self._divide(results[0][at.numbers("dimensions")[0]], 1)

  def _window(self, at: hlo.Instruction, results: _Dims, arrays: _Dims, shapes: _Shapes) -> None:
    arrays = arrays[:2] if at.opcode == "select-and-scatter" else arrays[: len(arrays) // 2]
    for place, window in enumerate(windows(at, len(results[0]))):
      plain = window == (1, 1, 0, 0, 1, 1, False)
      for dims in (*arrays, *results):
        self._unite(results[0][place], dims[place]) if plain else self._divide(dims[place], 1)


def reachable(program: hlo.Program) -> Iterator[hlo.Computation]:
  """The computations that the program runs on arrays, each once."""
  seen, left = set[str](), [program.entry.name]
  while left:
    name = left.pop()
    if name in seen:
      continue
    seen.add(name)
    computation = program.computations[name]
    yield computation
    for instruction in computation.instructions:
      left += instruction.called


def _are_blocks(sizes: Sequence[int], wholes: Sequence[int], devices: int) -> bool:
  pairs = zip(sizes, wholes, strict=True)
  return all(n and m % n == 0 and devices % (m // n) == 0 for n, m in pairs)


def _likeness(at: hlo.Instruction, whole: hlo.Instruction, devices: int) -> int:
  """How much an operation on blocks is like one of the whole program."""
  tiling = read_tiling(whole.attribute("sharding"), devices)
  place = len(whole.shapes[0].dims)
  laid = (
    tiling is not None
    and len(tiling.parts) in (0, place)
    and (tiling.local(whole.shapes[0].dims) == at.shapes[0].dims)
  )
  return 2 * laid + (at.opcode == "dot" and dot_dims(at) == dot_dims(whole))


def merged(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
  """Groups of dims that a reshape merges or splits, without those of size 1.

  Example:
    >>> list(merged((4, 6, 1, 5), (24, 5)))
    [([0, 1], [0]), ([3], [1])]
  """
  ones = [n for n, size in enumerate(before) if size != 1]
  others = [n for n, size in enumerate(after) if size != 1]
  while ones and others:
    left, right = [ones.pop(0)], [others.pop(0)]
    a, b = before[left[0]], after[right[0]]
    while a != b:
      if a < b:
        left.append(ones.pop(0))
        a *= before[left[-1]]
      else:
        right.append(others.pop(0))
        b *= after[right[-1]]
    yield left, right


def slice_bounds(at: hlo.Instruction) -> list[tuple[int, int, int]]:
  """(start, stop, step) of each dim of a `slice`."""
  return [(int(a), int(b), int(c or 1)) for a, b, c in _BOUND.findall(at.attribute("slice"))]


def padding(at: hlo.Instruction) -> list[tuple[int, int, int]]:
  """(low, high, between) of each dim of a `pad`."""
  return [(int(a), int(b), int(c or 0)) for a, b, c in _PAD.findall(at.attribute("padding"))]


def dot_dims(at: hlo.Instruction) -> dict[str, list[int]]:
  """Contracted and batch dims of both operands of a `dot`."""
  return {
    f"{side}{kind}": at.numbers(f"{side}{name}")
    for side in ("lhs", "rhs")
    for kind, name in (("", "_contracting_dims"), ("_batch", "_batch_dims"))
  }


class GatherDims(NamedTuple):
  """The dims that a `gather` or `scatter` names, by the names of a gather."""

  offset_dims: list[int]
  collapsed_slice_dims: list[int]
  start_index_map: list[int]
  operand_batching_dims: list[int]
  start_indices_batching_dims: list[int]
  index_vector_dim: int

  @property
  def absent(self) -> list[int]:
    """Dims of the operand that a window of the result does not have."""
    return self.collapsed_slice_dims + self.operand_batching_dims

  def slice_sizes(self, window: Iterable[int], rank: int) -> list[int]:
    """Sizes along all dims of the operand, from those of a window of the result."""
    given = iter(window)
    return [1 if d in self.absent else next(given) for d in range(rank)]


def gather_dims(at: hlo.Instruction) -> GatherDims:
  """The dims that a `gather` or `scatter` names."""
  of_scatter = (
    "update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims", "input_batching_dims",
    "scatter_indices_batching_dims",
  )  # fmt: skip
  names = GatherDims._fields[:-1] if at.opcode == "gather" else of_scatter
  offset, collapsed, start, batching, indices = map(at.numbers, names)
  return GatherDims(offset, collapsed, start, batching, indices, int(at.attribute("index_vector_dim")))


def group_counts(at: hlo.Instruction) -> tuple[int, int]:
  """Groups of features, and of examples, of a convolution."""
  return int(at.attribute("feature_group_count") or 1), int(at.attribute("batch_group_count") or 1)


def labels(at: hlo.Instruction) -> tuple[str, str, str]:
  """The dims of both operands and of the result of a convolution, a letter or digit for each."""
  left, kernel, out = _LABELS.findall(at.attribute("dim_labels"))[0]
  return left, kernel, out


def windows(at: hlo.Instruction, rank: int) -> list[Window]:
  """(size, stride, low, high, base dilation, window dilation, reversed) of each dim of a window."""
  text = at.attribute("window").strip("{}")
  given = dict(part.split("=") for part in text.split())
  sizes = given["size"].split("x") if "size" in given else ["1"] * rank

  def each(name: str, default: str) -> list[str]:
    return given[name].split("x") if name in given else [default] * len(sizes)

  rows = zip(sizes, each("stride", "1"), each("pad", "0_0"), each("lhs_dilate", "1"),
             each("rhs_dilate", "1"), each("rhs_reversal", "0"), strict=True)  # fmt: skip
  return [
    (int(n), int(stride), int(pad.split("_")[0]), int(pad.split("_")[1]), int(base), int(wide), back == "1")
    for n, stride, pad, base, wide, back in rows
  ]


def _scale(step: Ratio, sizes: tuple[Ratio, Ratio], unit: int) -> int:
  """The largest divisor of `step` that leaves enough positions; all are counted in units."""
  whole = Fraction(step) / unit
  if whole.denominator != 1:
    return 1
  low, high = (size / Fraction(unit) for size in sizes)
  fits = [
    s for s in _divisors(whole.numerator) if high // s >= min(_IN_ALL, high) and low // s >= min(_ON_ONE, low)
  ]
  return max(fits, default=1)


def _divided(number: Ratio, by: Ratio) -> Ratio:
  return number if by == 1 else Fraction(number) / by


def _common(one: Ratio, other: Ratio) -> Ratio:
  """The greatest common divisor, of fractions too."""
  below = one.denominator * other.denominator
  above = math.gcd(one.numerator * other.denominator, other.numerator * one.denominator)
  return above if below == 1 else Fraction(above, below)


def _divisors(number: int) -> Iterator[int]:
  for n in range(1, math.isqrt(number) + 1):
    if number % n == 0:
      yield n
      yield number // n
