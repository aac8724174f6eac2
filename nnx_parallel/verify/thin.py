"""Chooses a few positions of each dim, so that programs on large arrays can be evaluated with few numbers.

Every dim is divided by a number that divides all of its blocks, slices and offsets: a position then
represents a run of neighbours. Dims that meet (in a sum of two arrays, in a product, as argument and
parameter of a loop) form one class in all compared programs, because they must keep the same positions. Dims
of a window, a sort or a group of channels are not thinned. Of dims that a reshape merges, one dim is thinned;
if other dims are inside of it (the microbatches of a batch), the merged dim keeps a run of positions, its
grain, for each position of the thinned dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from nnx_parallel.core import hlo
from nnx_parallel.core.classes import Forest, Ratio
from nnx_parallel.core.hlo_devices import group_rows
from nnx_parallel.core.hlo_dims import ELEMENTWISE, dims_of, padding, slice_bounds

# The fewest positions that a dim keeps in total, and on one device, if it has as many.
_IN_ALL, _ON_ONE = 6, 2
# Without a rule for dims: they have no operand, or their results are not known (kernels).
_FREE = frozenset({
  "custom-call", "constant", "iota", "partition-id", "replica-id", "after-all", "rng-bit-generator",
  "parameter",
})  # fmt: skip
# Operations whose operands and results have the same dims, array by array.
_SAME = frozenset({
  "all-gather", "all-reduce", "all-to-all", "collective-permute", "custom-call", "opt-barrier",
  "reduce-scatter",
})  # fmt: skip
# Operations that unite the dims at one place of all operands with the dims of the result.
_PLACEWISE = ELEMENTWISE | {"concatenate", "dynamic-update-slice", "reverse"}

Dims = list[list[int]]
"""The dims of each array of an instruction, as nodes of a `Forest`."""
Sides = tuple[tuple[list[int], tuple[int, ...]], ...]


class Thinning:
  """The thinning of all arrays of programs; arguments, and results, of the same number are the same array.

  Args:
    programs: parsed programs whose entries take and return the same arrays, global or in blocks.
  """

  def __init__(self, programs: Sequence[hlo.Program]):
    self._rules = {
      "dynamic-slice": self._dynamic_slice, "pad": self._pad, "reshape": self._reshape, "slice": self._slice,
    }  # fmt: skip
    # For each class, in its root's elements: its smallest and largest dim size, and the divisor of the
    # thinning.
    self.forest = Forest()
    self._sizes: list[tuple[Ratio, Ratio]] = []
    self._step: list[Ratio] = []
    self._known: dict[hlo.Instruction, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    self._merges: list[Sides] = []
    # Unevenly cut parts, by JAX name, line and dim, in each program.
    self._cuts: list[dict[tuple[str, int, int], list[int]]] = []
    self.nodes = {
      at: [[self._new(n) for n in shape.dims] for shape in at.shapes]
      for program in programs
      for at in program.instructions
    }
    for program in programs:
      self._cuts.append({})
      for at in program.instructions:
        try:
          self._constrain(program, at)
        except (ValueError, LookupError):  # a form of it that is not known here
          self._keep(d for each in (at, *at.inputs) for dims in self.nodes[each] for d in dims)
    self._tie([program.entry for program in programs])
    for sides in self._merges:
      self._merge(sides)
    # The fewest elements of the root that are an integer number of elements of each dim in the class.
    self._unit = [1] * len(self.forest)
    for dim in range(len(self.forest)):
      root = self.forest.root(dim)
      self._unit[root] = math.lcm(self._unit[root], self.forest.ratio(dim).denominator)
    roots = {self.forest.root(dim) for dim in self._tied}
    self._scales = {r: _scale(self._step[r], self._sizes[r], self._unit[r]) for r in roots}

  def scales(self, at: hlo.Instruction, index: int = 0) -> tuple[int, ...]:
    """The divisor of each dim of an array; `index` picks one array of a tuple."""
    return self._found(at)[index][0]

  def shape(self, at: hlo.Instruction, index: int = 0) -> tuple[int, ...]:
    """Thinned sizes of an array."""
    return self._found(at)[index][1]

  def _found(self, at: hlo.Instruction) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Scales and sizes of each array of an instruction."""
    if at not in self._known:
      scales = [tuple(self._scales.get(self.forest.root(d), 1) for d in dims) for dims in self.nodes[at]]
      self._known[at] = [
        (by, tuple(n // s for n, s in zip(shape.dims, by, strict=True)))
        for by, shape in zip(scales, at.shapes, strict=True)
      ]
    return self._known[at]

  def grains(self, at: hlo.Instruction) -> tuple[int, ...]:
    """How many neighbours each dim of an array keeps at a time."""
    dims = self.nodes[at][0]
    return tuple(int(self._unit[self.forest.root(d)] * self.forest.ratio(d)) for d in dims)

  def kept(self, at: hlo.Instruction) -> list[npt.NDArray[np.int64]]:
    """The positions that each dim of an array keeps."""
    rows = zip(at.shapes[0].dims, self.scales(at), self.grains(at), strict=True)
    return [
      (np.arange(0, size, scale * grain)[:, None] + np.arange(grain)).ravel()
      if scale > 1
      else np.arange(size)
      for size, scale, grain in rows
    ]

  # Classes of dims ----------------------------------------------------------------------------

  def _new(self, size: int) -> int:
    self._sizes.append((size, size))
    self._step.append(size)
    return self.forest.new()

  def _unite(self, one: int, other: int, ratio: int = 1) -> None:
    """Puts two dims in one class; one element of the second is `ratio` elements of the first."""
    forest = self.forest
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
    root = self.forest.root(dim)
    self._step[root] = _common(self._step[root], _divided(number, self.forest.ratio(dim)))

  def _keep(self, dims: Iterable[int]) -> None:
    for dim in dims:
      self._divide(dim, 1)

  def _unite_all(self, ones: Sequence[int], others: Sequence[int]) -> None:
    for one, other in zip(ones, others, strict=True):
      self._unite(one, other)

  def _unite_arrays(self, ones: Dims, others: Dims) -> None:
    for one, other in zip(ones, others, strict=True):
      self._unite_all(one, other)

  def _tie(self, entries: Sequence[hlo.Computation]) -> None:
    """Unites the arguments and results of all programs, in order, and parts cut out at the same place.

    Only these dims and dims of their classes are thinned: other dims may be global in one program only.
    """
    self._tied = list[int]()
    for key, dims in self._cuts[0].items():
      # A partitioner makes several cuts and joins for one slice: the last one is the result.
      cuts = [dim for cut in self._cuts for dim in cut.get(key, [])[-len(dims) :]]
      self._tied += cuts
      for dim in cuts:
        self._unite(dims[0], dim)
    first: dict[object, Dims] = {}
    for entry in entries:
      for key, at in (("out", entry.root), *((i.index, i) for i in entry.parameters)):
        self._tied += itertools.chain(*self.nodes[at])
        self._unite_arrays(first.setdefault(key, self.nodes[at]), self.nodes[at])

  # The rule of each operation ----------------------------------------------------------------

  def _constrain(self, program: hlo.Program, at: hlo.Instruction) -> None:
    results = self.nodes[at]
    arrays = [dims for read in at.inputs for dims in self.nodes[read]]
    shapes = [shape.dims for read in at.inputs for shape in read.shapes]
    if at.opcode in ("while", "conditional", "call", "fusion"):
      self._calls(program, at)
    elif at.opcode == "tuple":
      self._unite_arrays(results, arrays)
    elif at.opcode == "get-tuple-element":
      self._unite_arrays(results, [arrays[at.index]])
    elif at.opcode in self._rules:
      self._rules[at.opcode](at, results[0], arrays[0], shapes[0])
    elif at.opcode in _PLACEWISE:
      for dims in arrays:
        if len(dims) == len(results[0]):
          self._unite_all(results[0], dims)
        elif dims:
          self._keep((*dims, *results[0]))
    elif at.opcode == "topk" or "TopK" in at.rest:
      for result in results:
        self._unite_all(result[:-1], arrays[0][:-1])
        self._keep((result[-1], arrays[0][-1]))
    elif at.opcode in _SAME and list(map(len, arrays)) == list(map(len, results)):
      self._unite_arrays(results, arrays)
      if at.opcode == "all-to-all" and len(arrays) == 1:
        (place,), members = at.numbers("dimensions"), group_rows(at.rest, program.partitions)[0]
        self._divide(arrays[0][place], shapes[0][place] // len(members))
    elif at.opcode not in _FREE:
      self._follow(at, arrays, results, shapes)

  def _follow(self, at: hlo.Instruction, arrays: Dims, results: Dims, shapes: list[tuple[int, ...]]) -> None:
    """Puts the dims that share a factor in the table of dims in one class."""
    found = dims_of(at, shapes, [shape.dims for shape in at.shapes])
    if found is None:
      self._keep(d for dims in (*arrays, *results) for d in dims)
      return
    operands, made = found.operands, found.results
    if at.opcode == "reduce":
      half = len(arrays) // 2
      operands, made = (operands[0],) * half + ((),) * half, made * len(results)
    # The dims of a look-up table may be thinned: an index then represents its neighbours.
    looked_up = {f for f in found.mixed if at.opcode == "gather" and f not in made[0]}
    looked_up |= {*at.numbers("inserted_window_dims")}
    first: dict[int, int] = {}
    for dims, factors in zip((*arrays, *results), (*operands, *made), strict=True):
      for dim, factor in zip(dims, factors, strict=True):
        if factor is None or factor in found.mixed - looked_up:
          self._divide(dim, 1)
        if factor is not None:
          self._unite(first.setdefault(factor, dim), dim)

  def _calls(self, program: hlo.Program, at: hlo.Instruction) -> None:
    for place, name in enumerate(at.called):
      inner = program.computations[name]
      inputs = [at.inputs[1 + place]] if at.opcode == "conditional" else at.inputs
      for parameter in inner.parameters:
        self._unite_arrays(self.nodes[parameter], self.nodes[inputs[parameter.index]])
      if at.opcode != "while" or inner is program.body(at):
        self._unite_arrays(self.nodes[inner.root], self.nodes[at])

  def _reshape(
    self, at: hlo.Instruction, result: list[int], array: list[int], shape: tuple[int, ...]
  ) -> None:
    sides = ((array, shape), (result, at.shapes[0].dims))
    for groups in _merged(shape, at.shapes[0].dims):
      self._merges.append(
        tuple(
          ([dims[n] for n in places], tuple(sizes[n] for n in places))
          for (dims, sizes), places in zip(sides, groups, strict=True)
        )
      )

  def _merge(self, sides: Sides) -> None:
    """Of dims that a reshape merges or splits, the largest is thinned; where it does both, the last."""

    def largest(dim: int) -> Ratio:
      """The size of the largest dim that is thinned like this dim, in elements of this dim."""
      return self._sizes[self.forest.root(dim)][1] * self.forest.ratio(dim)

    single = min(len(dims) for dims, _ in sides) == 1
    found: list[tuple[int, int]] = []
    for dims, shape in sides:
      place = len(dims) - 1
      if single:
        place = max(range(len(dims)), key=lambda n: (largest(dims[n]), n))
      self._keep(dims[:place] + dims[place + 1 :])
      found.append((dims[place], math.prod(shape[place + 1 :])))
    (one, inside), (other, within) = found
    # The first has `within` neighbours where the second has one, or the other way around.
    self._unite(one, other, within) if within > 1 else self._unite(other, one, inside)

  def _slice(self, at: hlo.Instruction, result: list[int], array: list[int], shape: tuple[int, ...]) -> None:
    for place, (start, stop, step) in enumerate(slice_bounds(at)):
      if step > 1:
        self._keep((result[place], array[place]))
      elif math.gcd(start, stop, shape[place]) == 1 and shape[place] > 1:
        self._cut_out(at, place, result[place], array[place])
      else:
        self._unite(result[place], array[place])
        self._divide(array[place], start)

  def _dynamic_slice(
    self, at: hlo.Instruction, result: list[int], array: list[int], shape: tuple[int, ...]
  ) -> None:
    for place, size in enumerate(at.shapes[0].dims):
      if size > 1 and math.gcd(size, shape[place]) == 1:
        self._cut_out(at, place, result[place], array[place])
      else:
        self._unite(result[place], array[place])

  def _cut_out(self, at: hlo.Instruction, place: int, result: int, source: int) -> None:
    """An uneven slice, such as all tokens but the first: its source is not thinned, its result may be."""
    self._divide(source, 1)
    if at.shapes[0].dims[place] > 1:
      self._cuts[-1].setdefault((at.op_name, at.frame, place), []).append(result)

  def _pad(self, at: hlo.Instruction, result: list[int], array: list[int], shape: tuple[int, ...]) -> None:
    for place, (low, high, between) in enumerate(padding(at)):
      self._unite(result[place], array[place])
      self._divide(array[place], 1 if between else math.gcd(low, high))


def _merged(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
  """Groups of dims that a reshape merges or splits, without dims of size 1.

  Example:
    >>> list(_merged((4, 6, 1, 5), (24, 5)))
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


def _scale(step: Ratio, sizes: tuple[Ratio, Ratio], unit: int) -> int:
  """The largest divisor of `step` that leaves enough positions; all are counted in units."""
  whole = Fraction(step) / unit
  if whole.denominator != 1:
    return 1
  low, high = (size / Fraction(unit) for size in sizes)
  number = whole.numerator
  divisors = {d for n in range(1, math.isqrt(number) + 1) if number % n == 0 for d in (n, number // n)}
  fits = [s for s in divisors if high // s >= min(_IN_ALL, high) and low // s >= min(_ON_ONE, low)]
  return max(fits, default=1)


def _divided(number: Ratio, by: Ratio) -> Ratio:
  return number if by == 1 else Fraction(number) / by


def _common(one: Ratio, other: Ratio) -> Ratio:
  """The greatest common divisor, of fractions too."""
  below = one.denominator * other.denominator
  above = math.gcd(one.numerator * other.denominator, other.numerator * one.denominator)
  return above if below == 1 else Fraction(above, below)
