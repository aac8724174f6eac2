"""Follows the dim of the examples through a program: which dim of each array is it?

Dims that meet index the same things, and form one class. In a program with `p0[16,8]` (16 examples) and
`p1[8,4]`:

    dot      = dot(p0, p1), contracting p0's dim 1        [16,4]   dim 0 is p0's dim 0
    reshaped = reshape(dot)                               [2,8,4]  dim 0 holds the runs of dim 0: the examples
    sum      = reduce(reshaped, dimensions={2})           [2,8]    dim 0 is reshaped's dim 0

all dims 0 are in one class with dim 0 of `p0`, and the dims of `p1` are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

from nnx_parallel.core.classes import Forest
from nnx_parallel.report.program import hlo
from nnx_parallel.report.program.hlo_dims import ELEMENTWISE, dims_of

# Operations whose results have the dims of their operands at the same places: of the first operand, of all
# operands, or array by array.
_FIRST = frozenset({"dynamic-slice", "pad", "slice"})
_PLACEWISE = ELEMENTWISE | {"concatenate", "dynamic-update-slice", "reverse"}
_BY_ARRAY = frozenset({
  "all-gather", "all-reduce", "all-to-all", "collective-permute", "custom-call", "opt-barrier",
  "reduce-scatter", "tuple",
})  # fmt: skip
_CALLS = frozenset({"while", "conditional", "call", "fusion"})

Dims = list[list[int]]
"""The dims of each array of an instruction, as nodes of a `Forest`."""


def find_example_dims(
  program: hlo.Program, arguments: Collection[hlo.Instruction]
) -> Callable[[hlo.Instruction], list[int]]:
  """A function that returns the dims of an instruction in the class of dim 0 of these arguments."""
  forest = Forest()
  nodes = {at: [[forest.new() for _ in shape.dims] for shape in at.shapes] for at in program.instructions}
  for at in program.instructions:
    try:
      for ones, others in _meetings(program, at, nodes):
        for one, other in zip(ones, others, strict=False):
          forest.unite(one, other)
    except (ValueError, LookupError):  # a form of it that is not known here
      continue
  roots = {forest.root(nodes[argument][0][0]) for argument in arguments}
  return lambda at: [n for n, dim in enumerate(nodes[at][0]) if forest.root(dim) in roots]


def _meetings(
  program: hlo.Program, at: hlo.Instruction, nodes: dict[hlo.Instruction, Dims]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
  """Pairs of lists of dims; dims at the same place of both lists are in one class."""
  results = nodes[at]
  arrays = [dims for read in at.inputs for dims in nodes[read]]
  shapes = [shape.dims for read in at.inputs for shape in read.shapes]
  if at.opcode in _CALLS:
    yield from _calls(program, at, nodes)
  elif at.opcode == "get-tuple-element":
    yield results[0], arrays[at.index]
  elif at.opcode == "reshape":
    for before, after in _merged(shapes[0], at.shapes[0].dims):
      yield [arrays[0][before[0]]], [results[0][after[0]]]  # the outermost dim holds runs of the others
  elif at.opcode in _FIRST:
    yield results[0], arrays[0]
  elif at.opcode in _PLACEWISE:
    yield from ((results[0], dims) for dims in arrays if len(dims) == len(results[0]))
  elif at.opcode == "topk" or "TopK" in at.rest:
    yield from ((result[:-1], arrays[0][:-1]) for result in results)
  elif at.opcode in _BY_ARRAY and list(map(len, arrays)) == list(map(len, results)):
    yield from zip(results, arrays, strict=True)
  elif (found := dims_of(at, shapes, [shape.dims for shape in at.shapes])) is not None:
    operands, made = found.operands, found.results
    if at.opcode == "reduce":  # the arrays, then the first value of each
      operands, made = operands[:1] * (len(arrays) // 2), made * len(results)
    first: dict[int, int] = {}
    for dims, factors in zip((*arrays[: len(operands)], *results), (*operands, *made), strict=True):
      for dim, factor in zip(dims, factors, strict=True):
        if factor is not None:
          yield [first.setdefault(factor, dim)], [dim]


def _calls(
  program: hlo.Program, at: hlo.Instruction, nodes: dict[hlo.Instruction, Dims]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
  """Arguments meet parameters, and results meet results."""
  for place, name in enumerate(at.called):
    inner = program.computations[name]
    inputs = [at.inputs[1 + place]] if at.opcode == "conditional" else at.inputs
    for parameter in inner.parameters:
      yield from zip(nodes[parameter], nodes[inputs[parameter.index]], strict=True)
    if at.opcode != "while" or inner is program.body(at):
      yield from zip(nodes[inner.root], nodes[at], strict=True)


def _merged(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
  """Groups of dims that a reshape merges or splits, without dims of size 1.

  (4, 6, 1, 5) to (24, 5): ([0, 1], [0]) and ([3], [1]).
  """
  ones = [n for n, size in enumerate(before) if size != 1]
  others = [n for n, size in enumerate(after) if size != 1]
  while ones and others:
    left, right = [ones.pop(0)], [others.pop(0)]
    while (a := math.prod(before[n] for n in left)) != (b := math.prod(after[n] for n in right)):
      side, rest = (left, ones) if a < b else (right, others)
      side.append(rest.pop(0))
    yield left, right
