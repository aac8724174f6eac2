"""Checks that a partitioner kept the meaning of a program: each device's results against the global results.

A compiler can write a program down right before it partitions it over devices, with the layout of each array,
and right after. Both are evaluated here (`evaluate`) with the same arguments, at a few positions of each dim:
the first on global arrays, the second on all devices at once, with its collectives. The results of each
device must be its blocks of the global results. A sum over a mesh axis that is missing or done too often,
blocks exchanged with another device, a wrong offset: each of these gives other numbers, in any operation.

Three kinds of faults are not found: faults of the compiler after partitioning; a fault that keeps the numbers
at the chosen positions (in a long program, the positions of the first two and the last two passes of each
loop); and a fault of the program itself, except a `shard_map` whose out_specs declare different values equal.
Operations that `evaluate` cannot run (kernels, a device's own random bits) are listed with the results that
depend on them, and do not count as wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nnx_parallel.core import hlo
from nnx_parallel.core.hlo_devices import Tiling, read_tiling, split_layouts
from nnx_parallel.verify.evaluate import ENDS, Evaluator, Value, Watch, blocks, corners, place_of
from nnx_parallel.verify.thin import Thinning

Array = npt.NDArray[Any]
_Projection = tuple[tuple[int, ...], Array]

# A result is wrong if it differs by more than `_SMALLEST`, relative to its largest number, and by more than
# `_MARGIN` times the effect of `_NOISE` in all arguments: many devices add up in another order.
_SMALLEST, _MARGIN, _NOISE = 1e-9, 1e3, 1e-13
# In a program that runs more operations than this, only some passes of loops are run.
_LONG = 30_000


@dataclasses.dataclass(frozen=True)
class Fault:
  """A result that the partitioned program gets wrong.

  Attributes:
    result: its name: the argument whose memory it takes, or its place among the results.
    what: how it is wrong, as text.
    error: largest difference, relative to the largest number of the result.
    factor: the factor by which the full result is off; None if it is wrong in another way.
    op: JAX name of the first wrong operation, e.g. `jit(step)/transpose(jvp())/dot_general`.
    source: its `file.py:line`, or an empty string.
    instruction: the partitioned program's instruction that computes it.
  """

  result: str
  what: str
  error: float
  factor: float | None
  op: str
  source: str
  instruction: str

  def __str__(self) -> str:
    at = self.source or self.op
    first = f"; first wrong at {at}: {self.instruction}" if at else ""
    return f"{self.result} is {self.what}{first}"


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The comparison of a program before and after partitioning.

  Attributes:
    right: the names of the correct results.
    faults: the wrong results.
    unknown: result -> why it could not be compared.
    shortened: whether only the first and last passes of the longest loops were run.
  """

  right: tuple[str, ...] = ()
  faults: tuple[Fault, ...] = ()
  unknown: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
  shortened: bool = False


def compare(whole: hlo.Program, split: hlo.Program, names: Mapping[int, str] | None = None) -> Comparison:
  """Compares a program right before it was split over devices, with layouts, and right after.

  `names` maps the number of a result to its name.
  """
  count = len(whole.entry.root.shapes)
  labels = [(names or {}).get(n, f"result {n}") for n in range(count)]
  if _ranks(whole) != _ranks(split) or any(len(i.shapes) != 1 for i in whole.entry.parameters):
    return Comparison(unknown=dict.fromkeys(labels, "its arguments or results were changed"))
  pair = _Pair(whole, split)
  found = dict(zip(labels, pair.results(), strict=True))
  wrong = {name: result for name, result in found.items() if result.state == "wrong"}
  origin = (pair.missing_sum() or pair.origin() or _Origin()) if wrong else _Origin()
  lost = "; ".join(sorted(pair.lost)) or "its numbers are not finite"
  return Comparison(
    tuple(name for name, result in found.items() if result.state == "right"),
    tuple(origin.fault(name, result) for name, result in wrong.items()),
    {name: lost for name, result in found.items() if result.state == "unknown"},
    bool(pair.shortened),
  )


def _ranks(program: hlo.Program) -> list[list[int]]:
  """The number of dims of each argument, and of each result."""
  return [[len(s.dims) for s in i.shapes] for i in (*program.entry.parameters, program.entry.root)]


class _Result(NamedTuple):
  state: str = "unknown"
  error: float = 0.0
  factor: float | None = None


class _Origin(NamedTuple):
  """Where a program is first wrong."""

  op: str = ""
  source: str = ""
  instruction: str = ""
  what: str = ""

  def fault(self, name: str, result: _Result) -> Fault:
    what = self.what
    if not what and result.factor is not None:
      what = f"{result.factor:.4g} times the correct value"
    if not what and not np.isfinite(result.error):
      what = "not a number, or infinite"
    what = what or f"off by {result.error:.2g} of its largest number"
    return Fault(name, what, result.error, result.factor, self.op, self.source, self.instruction)


class _Pair:
  """A program before and after it was split."""

  def __init__(self, whole: hlo.Program, split: hlo.Program):
    self._whole, self._split = whole, split
    self._devices = max(1, split.partitions)
    self._thinning = Thinning([whole, split])
    self._indices, self.shortened = _indices(whole), _shortened(whole, split)
    self.lost: set[str] = set()
    self._unequal: list[hlo.Instruction] = []

  def results(self) -> list[_Result]:
    """The state of each result."""
    arguments = self._arguments()
    expected = self._evaluate(self._whole, arguments)
    got = self._evaluate(self._split, self._blocks(arguments))
    layouts = split_layouts(self._whole.entry.root.attribute("sharding"))
    layouts = layouts if len(layouts) == len(expected) else ("",) * len(expected)
    found = [
      self._judge(n, expected[n], got[n], read_tiling(layout, self._devices))
      for n, layout in enumerate(layouts)
    ]
    if any(result.state == "wrong" for result in found):
      noisy = self._evaluate(self._whole, self._arguments(noise=_NOISE))
      for n, result in enumerate(found):
        if result.state == "wrong":
          change = _difference(expected[n], noisy[n]) if noisy[n] is not None else np.inf
          found[n] = _Result() if result.error <= _MARGIN * change else result
    return found

  def _evaluate(
    self, program: hlo.Program, arguments: Mapping[int, Value], watch: Watch | None = None
  ) -> tuple[Value, ...]:
    evaluator = Evaluator(program, self._thinning, self._devices, self.shortened, watch)
    results = evaluator.run(arguments)
    self._unequal += evaluator.unequal
    self.lost |= evaluator.lost
    return results

  def _arguments(self, noise: float = 0.0) -> dict[int, Value]:
    made: dict[int, Value] = {}
    for number, parameter in enumerate(self._whole.entry.parameters):
      shape = self._thinning.shape(parameter)
      random = np.random.default_rng(number)
      value = _drawn(random, parameter.shapes[0].dtype, shape, self._indices)
      if noise and value.dtype.kind == "f":
        value = value * (1 + noise * random.choice([-1.0, 1.0], shape))
      made[number] = value[None]
    return made

  def _blocks(self, arguments: Mapping[int, Value]) -> dict[int, Value]:
    """The blocks of the arguments that each device holds."""
    made: dict[int, Value] = {}
    both = zip(self._whole.entry.parameters, self._split.entry.parameters, strict=True)
    for number, (parameter, local) in enumerate(both):
      tiling = read_tiling(parameter.attribute("sharding"), self._devices)
      if tiling is None or tiling.local(parameter.shapes[0].dims) != local.shapes[0].dims:
        self.lost.add("an argument whose layout is not known")
        made[number] = None
        continue
      shape = self._thinning.shape(local)
      made[number] = blocks(arguments[number], corners(tiling, shape), shape)
    return made

  def _judge(self, number: int, expected: Value, got: Value, tiling: Tiling | None) -> _Result:
    whole, local = self._whole.entry.root.shapes[number], self._split.entry.root.shapes[number]
    if expected is None or got is None or tiling is None or tiling.local(whole.dims) != local.dims:
      return _Result()
    shape = self._thinning.shape(self._split.entry.root, number)
    starts = corners(tiling, shape)
    wanted = blocks(expected, starts, shape)
    inside = blocks(np.ones_like(expected[:1], np.bool_), starts, shape)
    got = np.broadcast_to(got, wanted.shape)
    inside &= np.isfinite(wanted)
    if not inside.any():
      return _Result("right") if not wanted.size else _Result()
    a, b = wanted[inside].astype(np.float64), got[inside].astype(np.float64)
    error = _difference(a, b)
    return _Result("right") if error <= _SMALLEST else _Result("wrong", float(error), _factor(a, b))

  def missing_sum(self) -> _Origin | None:
    """The first `shard_map` whose out_specs call a value replicated that differs between devices."""
    if not self._unequal:
      return None
    at = self._unequal[0]
    what = (
      "different between devices, though a shard_map's out_specs declare it replicated: a psum is missing"
    )
    return _Origin(at.op_name, self._whole.source(at), at.name, what=what)

  def origin(self) -> _Origin | None:
    """The first operation of the global program whose value no instruction of the partitioned program has."""
    wanted: list[tuple[hlo.Instruction, _Projection]] = []
    seen: dict[object, list[tuple[hlo.Instruction, Array]]] = {}

    def whole(at: hlo.Instruction, value: Value) -> None:
      tiling, dims = read_tiling(at.attribute("sharding"), self._devices), at.shapes[0].dims
      if not isinstance(value, np.ndarray) or not at.op_name or tiling is None or tiling.manual:
        return
      # Inside the region of a reduction, values have the shape of its operands, not the shape in the text.
      if value.ndim != 1 + len(dims) or len(tiling.parts) not in (0, len(dims)):
        return
      local, scales = tiling.local(dims), self._thinning.scales(at)
      shape = tuple(n // s for n, s in zip(local, scales, strict=True))
      if all(n % s == 0 for n, s in zip(local, scales, strict=True)):
        wanted.append((at, _projected(blocks(value, corners(tiling, shape), shape), local)))

    def split(at: hlo.Instruction, value: Value) -> None:
      if isinstance(value, np.ndarray) and at.op_name and at.opcode != "parameter":
        value = np.broadcast_to(value, (self._devices, *value.shape[1:]))
        local, number = _projected(value, at.shapes[0].dims)
        seen.setdefault((place_of(at), local), []).append((at, number))

    arguments = self._arguments()
    self._evaluate(self._whole, arguments, whole)
    self._evaluate(self._split, self._blocks(arguments), split)
    for at, (local, number) in wanted:
      twins = seen.get((place_of(at), local), [])
      same = any(np.allclose(number, other, 1e-7, 1e-12) for _, other in twins)
      if twins and np.isfinite(number).all() and not same:
        made, _ = twins[-1]
        return _Origin(at.op_name, self._whole.source(at), made.name)
    return None


def _shortened(whole: hlo.Program, split: hlo.Program) -> set[tuple[str, int]]:
  """Long loops that both programs have, with equal numbers of passes; not the compiler's own loops."""
  if sum(each.times for each in split.executed()) <= _LONG:
    return set()
  ours: dict[tuple[str, int], set[int]] = {}
  theirs: dict[tuple[str, int], set[int]] = {}
  for program, lengths in ((whole, ours), (split, theirs)):
    for at in program.instructions:
      if at.opcode == "while":
        passes = program.trips(at) if program.bound(at) else None
        lengths.setdefault(place_of(at), set()).add(passes or 0)
  return {
    place
    for place, passes in ours.items()
    if passes == theirs.get(place) and len(passes) == 1 and max(passes) > 2 * ENDS
  }


def _projected(value: Array, local: tuple[int, ...]) -> _Projection:
  """The shape of a block, and one number for the block of each device, which differs for different blocks."""
  flat = value.reshape(len(value), -1).astype(np.float64)
  return local, flat @ np.random.default_rng(flat.shape[1]).uniform(0.5, 1.5, flat.shape[1])


def _drawn(random: np.random.Generator, dtype: str, shape: tuple[int, ...], indices: int) -> Array:
  """An argument: numbers whose sums stay of similar size, or small indices."""
  if dtype == "pred":
    return random.random(shape) < 0.5
  if dtype.startswith("u"):
    kind = np.dtype(f"uint{max(8, int(dtype[1:]))}")
    return random.integers(0, 256 if kind.itemsize == 1 else 2**31, shape).astype(kind)
  if dtype.startswith("s"):
    bits = int(dtype[1:])
    high = min(indices, 2 ** (bits - 1)) if shape else 5
    return random.integers(1 if not shape else 0, high, shape).astype(f"int{max(8, bits)}")
  size = shape[-2] if len(shape) > 1 else 1
  return random.uniform(0.5, 1.5, shape) * random.choice([-1.0, 1.0], shape) / np.sqrt(size)


def _indices(program: hlo.Program) -> int:
  """A bound for indices in the arguments: the smallest dim that a gather or a scatter picks from."""
  found = [2**15]
  for at in program.instructions:
    picked = at.numbers("start_index_map") + at.numbers("scatter_dims_to_operand_dims")
    found += [at.inputs[0].shapes[0].dims[d] for d in picked if at.inputs[0].shapes[0].dims[d] > 1]
  return min(found)


def _difference(expected: Value, got: Value) -> float:
  expected, got = expected.astype(np.float64), got.astype(np.float64)
  finite = np.isfinite(expected)
  if not finite.any():
    return np.inf
  wanted, found = expected[finite], got[finite]
  largest = max(float(np.abs(wanted).max()), 1e-300)
  off = np.abs(wanted - found)
  return float(np.where(np.isfinite(off), off, np.inf).max()) / largest


def _factor(expected: Value, got: Value) -> float | None:
  size = float(expected @ expected)
  if not size:
    return None
  factor = float(expected @ got) / size
  return factor if _difference(expected * factor, got) < 1e-6 else None
