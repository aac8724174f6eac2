"""Finds activations that are replicated over mesh axes that shard the batch.

The program right before the partitioner has the global shape and the layout of each array. The arrays of the
final program are the shards of one device. Its operations are matched with the operations before the
partitioner by their JAX name and line. The batch dim is followed from the arguments through every operation
(`example_dims.py`), not guessed from a size. A gathered parameter is therefore not reported.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nnx_parallel.core.jaxprs import HELD
from nnx_parallel.report.program import hlo
from nnx_parallel.report.program.example_dims import find_example_dims
from nnx_parallel.report.program.hlo_devices import Tiling, read_tiling
from nnx_parallel.report.program.hlo_dims import ELEMENTWISE

SHARE = 0.01
"""The smallest reported array, as a fraction of the needed memory; smaller arrays seldom matter."""
# Operations that make no new array.
_NO_ARRAY = frozenset({
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
  "opt-barrier", "after-all", "partition-id", "replica-id",
})  # fmt: skip
_MOVES = frozenset({"bitcast", "copy", "convert", "transpose", "reshape", "copy-done"})
_ON_HOST = "S(5)"
_Key = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class ReplicatedActivation:
  """Arrays of one shape, made at one line, that are replicated over mesh axes that shard the batch."""

  dtype: str  # as the compiler names it, e.g. `"f32"`.
  # the dims of one array on each device, as the program has them before the compiler merges any
  shape: tuple[int, ...]
  global_shape: tuple[int, ...]  # the global dims of the array
  batch_dim: int  # the dim of the examples
  bytes: int  # the bytes of one array, per device
  count: int  # the number of arrays that the compiled program makes at that line
  copies: int  # the number of devices that hold the same values, among the devices that share the batch
  place: int  # the place of the first array in the program; the smallest place is often the cause of the rest
  op: str  # the JAX name stack of the first array
  source: str  # `file.py:line`, or an empty string
  # `file.py:line` of the sharding constraint that replicates the arrays, or an empty string
  constraint: str = ""

  @property
  def fix(self) -> str:
    """The call that would shard the array; empty if the line is not in user code."""
    if not self.source or "/nnx_parallel/" in self.source:
      return ""
    names = ", ".join('"batch"' if dim == self.batch_dim else "None" for dim in range(len(self.shape)))
    where = f" in place of the constraint at {os.path.basename(self.constraint)}" if self.constraint else ""
    return f"nxp.constrain(x, {names}){where}"

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class _Array:
  """An array of the program before partitioning; `examples` is the dim of the examples, `place` its place.

  `constraint` is `file.py:line` of a sharding constraint that replicates its batch, or an empty string.
  """

  dims: tuple[int, ...]
  examples: int | None
  tiling: Tiling | None
  place: int
  constraint: str = ""

  def parts(self) -> set[tuple[int, ...]]:
    """The shapes that the array can have on one device, also while its layout changes."""
    block = self.tiling.local(self.dims) if self.tiling is not None else self.dims
    both = enumerate(zip(self.dims, block, strict=True))
    return {block, self.dims, tuple(n if d == self.examples else k for d, (n, k) in both)}

  def copies(self, local: Sequence[int], groups: npt.NDArray[np.int64]) -> int:
    """The number of devices of a group that hold the same values, if the batch is replicated; else 1."""
    if self.examples is None or local[self.examples] != self.dims[self.examples]:
      return 1
    shards, split = groups.shape[1], [d for d, n in enumerate(local) if n != self.dims[d]]
    if self.tiling is None or not split:
      return shards
    return shards // len(np.unique(self.tiling.blocks[groups[0]][:, split], axis=0))


def replicated_activations(
  before: hlo.Program,
  final: hlo.Program,
  sizes: Mapping[str, int],
  batch_axes: Collection[str],
  is_batch: Callable[[str], bool],
  least: float,
) -> tuple[ReplicatedActivation, ...]:
  """Lists activations of `least` bytes that are replicated over batch axes; merges equal shapes and lines.

  `before` is the program before partitioning; `is_batch` takes the JAX name of an argument.
  """
  groups = _groups(sizes, batch_axes)
  # The compiler may merge dims, so `known` has each array by its dims and by its size. If one line makes both
  # sharded and replicated arrays of the same size, none of them is reported.
  known: dict[tuple[_Key, object], tuple[int, int, _Array, tuple[int, ...]]] = {}
  for key, array in _arrays(before, is_batch, groups):
    for local in array.parts():
      found = array.copies(local, groups), array.place, array, local
      for size in (local, math.prod(local)):
        known[key, size] = min(found, known.get((key, size), found), key=lambda one: (one[0] > 1, one[1]))
  made: dict[tuple[object, ...], ReplicatedActivation] = {}
  for shape, makers in _in_memory(final):
    lines = [(one.op_name, final.source(one)) for one in makers]
    keys = ((line, size) for size in (shape.dims, shape.elements) for line in lines)
    key = next((key for key in keys if key in known), None)
    if shape.bytes < least or key is None:
      continue
    copies, place, array, local = known[key]
    if copies > 1:
      first = ReplicatedActivation(
        shape.dtype, local, array.dims, array.examples or 0, shape.bytes, 1, copies, place, *key[0],
        array.constraint,
      )  # fmt: skip
      same = shape.dtype, local, array.dims, first.source or first.op
      if same in made:
        earlier = min(first, made[same], key=lambda one: one.place)
        first = dataclasses.replace(earlier, count=1 + made[same].count)
      made[same] = first
  return tuple(sorted(made.values(), key=lambda one: -one.bytes * one.count))


def _arrays(
  program: hlo.Program, is_batch: Callable[[str], bool], groups: npt.NDArray[np.int64]
) -> Iterator[tuple[_Key, _Array]]:
  """The arrays of the program before partitioning, by JAX name and line."""

  def tiling_of(at: hlo.Instruction) -> Tiling | None:
    return read_tiling(at.attribute("sharding"), groups.size)

  batch: list[hlo.Instruction] = []
  for at in program.entry.parameters:
    tiling = tiling_of(at) if is_batch(at.op_name) else None
    if tiling is not None and tiling.parts and len(np.unique(tiling.blocks[groups[0], 0])) > 1:
      batch.append(at)
  carried = find_example_dims(program, batch)
  places = {run.instruction: place for place, run in enumerate(program.executed())}
  asked: dict[hlo.Instruction, str] = {}
  for at in reversed(places):
    tiling = tiling_of(at)
    # The arrays in a `shard_map` are shards, and their layout is the user's choice.
    if not at.op_name or len(at.shapes) != 1 or at.opcode in _NO_ARRAY or (tiling and tiling.manual):
      continue
    dims, source = at.shapes[0].dims, program.source(at)
    examples = next((d for d in carried(at) if dims[d] > 1), None)
    array = _Array(dims, examples, tiling, places[at], asked.get(at, ""))
    local = tiling.local(dims) if tiling is not None else dims
    if _is_users_constraint(at.op_name) and array.copies(local, groups) > 1:
      array = dataclasses.replace(array, constraint=source)
    if array.constraint and at.opcode in _MOVES | ELEMENTWISE:
      asked |= dict.fromkeys(at.inputs, array.constraint)
    yield (at.op_name, source), array


def _is_users_constraint(name: str) -> bool:
  *_, scope, operation = ("", *name.split("/"))  # `jvp(scope)` in a gradient
  return operation == "sharding_constraint" and HELD not in scope


def _groups(sizes: Mapping[str, int], batch_axes: Collection[str]) -> npt.NDArray[np.int64]:
  """The devices of each group, `[groups, devices]`; devices of a group differ only along the batch axes."""
  ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
  names = list(sizes)
  own = [names.index(axis) for axis in names if axis in batch_axes]
  shards = math.prod(sizes[axis] for axis in names if axis in batch_axes)
  return np.moveaxis(ids, own, range(-len(own), 0)).reshape(-1, shards)


def _in_memory(program: hlo.Program) -> Iterator[tuple[hlo.Shape, list[hlo.Instruction]]]:
  """The arrays in device memory made outside of fusions, each with its makers, the last maker first."""
  for run in program.executed():
    at = run.instruction
    if run.caller is not None and run.caller.opcode not in ("while", "conditional", "call"):
      continue
    if at.opcode not in _NO_ARRAY and not at.opcode.endswith("-start") and _ON_HOST not in at.result:
      root = program.computations[at.called[0]].root if at.opcode == "fusion" else at
      roots = root.inputs if root.opcode == "tuple" else [root]
      for shape, one in zip(at.shapes, roots, strict=False):
        yield shape, [*_chain(one), at]


def _chain(at: hlo.Instruction) -> list[hlo.Instruction]:
  """An instruction, and the earlier instructions whose array it only moves or casts."""
  found = [at]
  while at.opcode in _MOVES and at.inputs and at.inputs[0].opcode != "parameter":
    at = at.inputs[0]
    found.append(at)
  return found
