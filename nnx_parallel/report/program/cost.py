"""Arithmetic and memory traffic of a compiled program, with loops multiplied out."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

from nnx_parallel.report.chips import ENDLESS, compiled_arithmetic
from nnx_parallel.report.program import hlo

_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
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
  """The work of one call of the program on one device."""

  # floating point operations of matrix products, convolutions, and kernels that state theirs (a multiply-add
  # is two), by type and precision; see `Chip.peak`
  arithmetic: Mapping[str, int]
  # bytes read and written by the scheduled operations; values that a fusion keeps in registers do not count,
  # values that stay in a cache do
  hbm_bytes: int
  # operation -> runs, of operations missing in `arithmetic`: custom calls, loops of unknown length
  uncounted: Mapping[str, int]

  @property
  def flops(self) -> int:
    """Floating point operations of all types."""
    return sum(self.arithmetic.values())


def cost(program: str | hlo.Program) -> Cost:
  """Counts matrix FLOPs and memory traffic per device. `cost_analysis()` would count the body of a loop once.

  Elementwise work is left out: it is bound by memory traffic on every chip.
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
    return _convolution_flops(instruction)
  return 0


def _convolution_flops(instruction: hlo.Instruction) -> int:
  """Two FLOPs for each product with an element of the left operand; padding and holes do not count."""
  left, kernel = (operand.shapes[0].dims for operand in instruction.inputs[:2])
  out, labels = instruction.shapes[0], _LABELS.search(instruction.rest)
  if labels is None:
    return 2 * out.elements * math.prod(kernel)
  of_left, of_kernel, of_out = labels.groups()
  products = out.elements * math.prod(kernel) // max(1, kernel[of_kernel.index("o")])
  along = [str(n) for n in range(len(of_left) - 2)]
  sizes = [(left[of_left.index(n)], kernel[of_kernel.index(n)], out.dims[of_out.index(n)]) for n in along]
  window = dict(part.split("=") for part in instruction.attribute("window").strip("{}").split())
  steps = [_numbers(window.get(key), len(along)) for key in ("stride", "lhs_dilate", "rhs_dilate")]
  pads = _numbers(window.get("pad"), len(along), default=0)
  for size, *own in zip(sizes, *steps, pads, strict=True):
    products = products * _products_along(size, *own) // max(1, size[1] * size[2])
  return 2 * products


def _numbers(text: str | None, rank: int, default: int = 1) -> list[int]:
  """Reads `2x2` of a window; of `1_2x0_0`, the padding before the first elements."""
  return [int(part.split("_")[0]) for part in text.split("x")] if text else [default] * rank


@functools.cache
def _products_along(size: tuple[int, int, int], stride: int, holes: int, spread: int, pad: int) -> int:
  """The products along one dim, of sizes (left, kernel, out), that meet an element of the left operand."""
  left, kernel, out = size
  places = (np.arange(out) * stride - pad + k * spread for k in range(kernel))
  return sum(int(((at >= 0) & (at <= (left - 1) * holes) & (at % holes == 0)).sum()) for at in places)


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
