"""Arithmetic and memory traffic of a compiled program, with loops multiplied out."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from nnx_parallel.core import hlo
from nnx_parallel.report.chips import ENDLESS, compiled_arithmetic

_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->(\w+)")
_DILATED = re.compile(r"\blhs_dilate=([\dx]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_ESTIMATE = re.compile(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)')
# Custom calls that annotate a layout or place, wait, or sort.
_LIGHT_CALLS = re.compile(
  r"Sharding|SPMD|xla\.sdy|AllocateBuffer|MoveTo|PinTo|annotate_device_placement|LayoutConstraint|TopK"
  r"|PartialReduce|cub\$|AsyncCollective"
)
_FREE = frozenset({
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
  "after-all", "partition-id", "replica-id", "optimization-barrier", "iota", "fusion-done", "async-update",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cost:
  """The work of one call of the program on one device.

  Attributes:
    arithmetic: floating point operations of matrix products, convolutions, and kernels that state theirs (a
      multiply-add is two), by type and precision; see `Chip.peak`.
    hbm_bytes: bytes read and written by the scheduled operations; values that a fusion keeps in registers do
      not count, values that stay in a cache do.
    uncounted: operation -> runs, of operations missing in `arithmetic`: custom calls, loops of unknown
      length.
  """

  arithmetic: Mapping[str, int]
  hbm_bytes: int
  uncounted: Mapping[str, int]

  @property
  def flops(self) -> int:
    """Floating point operations of all types."""
    return sum(self.arithmetic.values())


def cost(program: str | hlo.Program) -> Cost:
  """Counts matrix FLOPs and memory traffic of a program, per device.

  Compiler reports (`cost_analysis()`) count the body of a loop once; here it counts as often as it
  runs. Elementwise work is left out: it is bound by memory traffic on every chip.
  """
  program = hlo.parse(program) if isinstance(program, str) else program
  arithmetic: dict[str, int] = {}
  uncounted: dict[str, int] = {}
  traffic = 0
  for run in program.executed():
    instruction = run.instruction
    flops = _flops(instruction)
    if flops:
      types = [shape.dtype for shape in _operand_shapes(instruction)[:2]]
      name = compiled_arithmetic(types, instruction.rest)
      arithmetic[name] = arithmetic.get(name, 0) + run.times * flops
    else:
      missed = _missed(instruction, program)
      if missed:
        uncounted[missed] = uncounted.get(missed, 0) + run.times
    fused = run.caller is not None and run.caller.opcode not in ("while", "conditional", "call")
    if not fused:
      traffic += run.times * _traffic(instruction, program)
  return Cost(arithmetic, traffic, uncounted)


def _missed(instruction: hlo.Instruction, program: hlo.Program) -> str:
  """The compute of an instruction that is not counted, or an empty string."""
  if instruction.opcode == "while" and program.trips(instruction) is None:
    return ENDLESS
  target = _TARGET.search(instruction.rest) if instruction.opcode == "custom-call" else None
  return target[1] if target and not _LIGHT_CALLS.search(target[1]) else ""


def _operand_shapes(instruction: hlo.Instruction) -> list[hlo.Shape]:
  return [shape for operand in instruction.inputs for shape in operand.shapes]


def _flops(instruction: hlo.Instruction) -> int:
  if instruction.opcode == "dot":
    left = instruction.inputs[0].shapes[0]
    return 2 * instruction.shapes[0].elements * _product(left, instruction.numbers("lhs_contracting_dims"))
  if instruction.opcode == "custom-call":
    dims, estimate = _CONTRACTING.search(instruction.rest), _ESTIMATE.search(instruction.rest)
    if dims:
      left = instruction.inputs[0].shapes[0]
      return 2 * instruction.shapes[0].elements * _product(left, map(int, re.findall(r"\d+", dims[1])))
    return int(estimate[1]) if estimate else 0
  if instruction.opcode == "convolution":
    kernel = instruction.inputs[1].shapes[0]
    labels, dilated = _LABELS.search(instruction.rest), _DILATED.search(instruction.rest)
    out = kernel.dims[labels.group(1).index("o")] if labels else 1
    # Zeros between the elements of the left operand (a stride's gradient) are not counted.
    zeros = math.prod(int(n) for n in dilated[1].split("x")) if dilated else 1
    return 2 * instruction.shapes[0].elements * kernel.elements // max(1, out * zeros)
  return 0


def _product(shape: hlo.Shape, dims: Iterable[int]) -> int:
  return math.prod(shape.dims[d] for d in dims)


def _traffic(instruction: hlo.Instruction, program: hlo.Program) -> int:
  if instruction.opcode in _FREE:
    return 0
  if instruction.opcode == "dynamic-slice":
    return 2 * instruction.bytes
  if instruction.opcode == "dynamic-update-slice":
    return 2 * instruction.inputs[1].bytes
  if instruction.opcode in ("fusion", "fusion-start"):
    return _fusion_traffic(instruction, program)
  read = sum(shape.bytes for shape in _operand_shapes(instruction))
  # An asynchronous operation reads at its start and writes at its end; its start's result is not an array.
  if instruction.opcode.endswith("-start") or instruction.opcode in ("send", "recv"):
    return read
  if instruction.opcode.endswith("-done"):
    return instruction.bytes
  return instruction.bytes + read


def _fusion_traffic(fusion: hlo.Instruction, program: hlo.Program) -> int:
  """Operands and results, but only the slice of an operand that is sliced or updated in place."""
  inner = program.computations[fusion.called[0]]
  users: dict[hlo.Instruction, list[hlo.Instruction]] = {}
  for instruction in inner.instructions:
    for operand in instruction.inputs:
      users.setdefault(operand, []).append(instruction)
  read = 0
  for parameter in inner.parameters:
    reads = users.get(parameter, [])
    whole = parameter.bytes
    if reads and all(user.opcode in ("dynamic-slice", "slice", "gather") for user in reads):
      whole = min(whole, sum(user.bytes for user in reads))
    elif reads and all(u.opcode == "dynamic-update-slice" and u.inputs[0] is parameter for u in reads):
      whole = 0
    read += whole
  updates = [i for i in inner.instructions if i.opcode == "dynamic-update-slice"]
  return read + (sum(u.inputs[1].bytes for u in updates) if updates else inner.root.bytes)
