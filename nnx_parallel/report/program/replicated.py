"""Finds activations that hold all examples of the batch on every device, although the plan splits the batch.

The program right before the partitioner has the global dims of each array, and the final program the dims of
one device; an operation has the same JAX name and line in both. Of 16 examples over 8 devices:

    before  sine  [16,64,64]  jit(step)/sin  model.py:7
    final   sine  [2,64,64]   jit(step)/sin  model.py:7    sharded: 2 examples on each device
    final   sine  [16,64,64]  jit(step)/sin  model.py:7    replicated

The dim of the examples is known by its length. Arrays with the dims of a parameter (gathered parameters,
gradients) are left out, and so are arrays with two dims of that length.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator

from nnx_parallel.report.program import hlo

Dims = tuple[int, ...]
SHARE = 0.01
"""The smallest reported array, as a fraction of the needed memory; smaller arrays seldom matter."""
# Operations that make no new array.
_NO_ARRAY = frozenset({
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
  "opt-barrier", "after-all", "partition-id", "replica-id",
})  # fmt: skip
_MOVES = frozenset({"bitcast", "copy", "convert", "transpose", "reshape", "copy-done"})
_ON_HOST = "S(5)"


@dataclasses.dataclass(frozen=True)
class ReplicatedActivation:
  """Arrays of one shape, made at one line, that hold all examples on every device."""

  dtype: str  # as the compiler names it, e.g. `"f32"`.
  shape: Dims  # the dims of one array on each device
  batch_dim: int  # the dim of the examples
  bytes: int  # the bytes of one array, per device
  count: int  # the number of arrays that the compiled program makes at that line
  place: int  # the place of the first array in the program; the smallest place is often the cause of the rest
  op: str  # the JAX name stack of the first array
  source: str  # `file.py:line`, or an empty string

  @property
  def fix(self) -> str:
    """The call that would shard the array; empty if the line is not in user code."""
    if not self.source or "/nnx_parallel/" in self.source:
      return ""
    names = ", ".join('"batch"' if dim == self.batch_dim else "None" for dim in range(len(self.shape)))
    return f"nxp.constrain(x, {names})"

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Batch:
  """What tells activations from other arrays: the examples of a (micro)batch, and the dims of parameters.

  `others` is the number of devices that share no examples: those along the axes that do not split the batch.
  """

  examples: int
  others: int
  parameters: Collection[Dims]

  @functools.cached_property
  def _of_parameters(self) -> set[Dims]:
    """The dims of parameters, sorted; layers may be stacked in the model, or by a scan."""
    return {tuple(sorted(shape)) for one in self.parameters for shape in (one, one[1:])}

  def dim_of(self, dims: Dims) -> int | None:
    """The dim of the examples of an activation of these global dims; None for other arrays."""
    if dims.count(self.examples) != 1:
      return None
    parts = (dims,) if dims[0] == self.examples else (dims, dims[1:])
    if any(tuple(sorted(part)) in self._of_parameters for part in parts):
      return None
    return dims.index(self.examples)

  def is_whole(self, local: Dims, dims: Dims, dim: int) -> bool:
    """Whether a device has all examples of an array, which only the other axes split."""
    if math.prod(local) == math.prod(dims):
      # Other dims are those of another array of the same line, unless the compiler has merged some.
      return len(local) != len(dims) or sorted(local) == sorted(dims)
    if len(local) != len(dims) or local[dim] != dims[dim] or any(map(int.__gt__, local, dims)):
      return False
    return self.others % math.ceil(math.prod(dims) / math.prod(local)) == 0


def replicated_activations(
  before: hlo.Program, final: hlo.Program, batch: Batch, least: float
) -> tuple[ReplicatedActivation, ...]:
  """Lists activations of `least` bytes that hold all examples; merges equal shapes and lines."""
  known: dict[tuple[str, str], dict[Dims, int]] = {}
  for at in before.instructions:
    if at.op_name and len(at.shapes) == 1 and (dim := batch.dim_of(at.shapes[0].dims)) is not None:
      known.setdefault((at.op_name, before.source(at)), {})[at.shapes[0].dims] = dim
  made: dict[tuple[object, ...], ReplicatedActivation] = {}
  for place, (shape, makers) in enumerate(_in_memory(final)):
    line = next((line for one in makers if (line := (one.op_name, final.source(one))) in known), None)
    if shape.bytes < least or line is None:
      continue
    whole = [(dims, dim) for dims, dim in known[line].items() if batch.is_whole(shape.dims, dims, dim)]
    if whole:
      dims, dim = whole[0]
      local = shape.dims if len(shape.dims) == len(dims) else dims
      first = ReplicatedActivation(shape.dtype, local, dim, shape.bytes, 1, place, *line)
      same = shape.dtype, local, first.source or first.op
      earlier = made.setdefault(same, dataclasses.replace(first, count=0))
      made[same] = dataclasses.replace(earlier, count=earlier.count + 1)
  return tuple(sorted(made.values(), key=lambda one: -one.bytes * one.count))


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
