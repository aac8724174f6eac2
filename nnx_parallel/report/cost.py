"""Arithmetic and memory traffic of a compiled program, with loops multiplied out."""

from __future__ import annotations

import dataclasses
import math
import re

from nnx_parallel.report import hlo

_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->(\w+)")
_FREE = frozenset({
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
  "after-all", "partition-id", "replica-id", "optimization-barrier", "iota", "copy-done", "fusion-done",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cost:
  """Work of one call of the program on one device.

  Attributes:
    flops: floating point operations of matrix products and convolutions (a multiply-add is two).
    hbm_bytes: bytes read and written by the scheduled operations; a value that a fusion keeps in
      registers does not count, one that stays in a cache does.
  """

  flops: int
  hbm_bytes: int


def cost(program: str | hlo.Program) -> Cost:
  """Counts matrix FLOPs and memory traffic of a program, per device.

  Compiler reports (`cost_analysis()`) count the body of a loop once; here it counts as often as it
  runs. Elementwise work is left out: it is bound by memory traffic on every chip.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> x = jnp.ones((8, 16))
    >>> text = jax.jit(lambda x: x @ x.T).lower(x).compile().as_text()
    >>> cost(text).flops
    2048
  """
  program = hlo.parse(program) if isinstance(program, str) else program
  flops = traffic = 0
  for run in program.executed():
    flops += run.times * _flops(run.instruction, run.computation)
    fused = run.caller is not None and run.caller.opcode not in ("while", "conditional", "call")
    if not fused:
      traffic += run.times * _traffic(run.instruction, run.computation, program)
  return Cost(flops, traffic)


def _flops(instruction: hlo.Instruction, computation: hlo.Computation) -> int:
  if instruction.opcode == "dot":
    left = computation.by_name[instruction.operands[0]].shapes[0]
    dims = instruction.attribute("lhs_contracting_dims").strip("{}")
    return 2 * instruction.shapes[0].elements * _product(left, dims)
  if instruction.opcode == "custom-call":
    dims = _CONTRACTING.search(instruction.rest)
    if not dims:
      return 0
    left = computation.by_name[instruction.operands[0]].shapes[0]
    return 2 * instruction.shapes[0].elements * _product(left, dims.group(1).replace('"', ""))
  if instruction.opcode == "convolution":
    kernel = computation.by_name[instruction.operands[1]].shapes[0]
    labels = _LABELS.search(instruction.rest)
    out = kernel.dims[labels.group(1).index("o")] if labels else 1
    return 2 * instruction.shapes[0].elements * kernel.elements // max(1, out)
  return 0


def _product(shape: hlo.Shape, dims: str) -> int:
  return math.prod(shape.dims[int(d)] for d in dims.split(",") if d)


def _traffic(instruction: hlo.Instruction, computation: hlo.Computation, program: hlo.Program) -> int:
  if instruction.opcode in _FREE:
    return 0
  if instruction.opcode == "dynamic-slice":
    return 2 * instruction.bytes
  if instruction.opcode == "dynamic-update-slice":
    return 2 * computation.by_name[instruction.operands[1]].bytes
  if instruction.opcode in ("fusion", "fusion-start"):
    return _fusion_traffic(instruction, program)
  operands = (computation.by_name[n] for n in instruction.operands if n in computation.by_name)
  return instruction.bytes + sum(operand.bytes for operand in operands)


def _fusion_traffic(fusion: hlo.Instruction, program: hlo.Program) -> int:
  """Operands and results, but only the slice of an operand that is sliced or updated in place."""
  inner = program.computations[fusion.called[0]]
  users: dict[str, list[hlo.Instruction]] = {}
  for instruction in inner.instructions:
    for name in instruction.operands:
      users.setdefault(name, []).append(instruction)
  read = 0
  for parameter in inner.instructions:
    if parameter.opcode != "parameter":
      continue
    reads = users.get(parameter.name, [])
    whole = parameter.bytes
    if reads and all(user.opcode in ("dynamic-slice", "slice", "gather") for user in reads):
      whole = min(whole, sum(user.bytes for user in reads))
    elif reads and all(_updates(user, parameter) for user in reads):
      whole = 0
    read += whole
  updates = [i for i in inner.instructions if i.opcode == "dynamic-update-slice"]
  if updates:
    return read + sum(inner.by_name[u.operands[1]].bytes for u in updates)
  return read + inner.root.bytes


def _updates(user: hlo.Instruction, parameter: hlo.Instruction) -> bool:
  return user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name
