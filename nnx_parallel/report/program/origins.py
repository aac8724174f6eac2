"""Follows values of a compiled program back to its arguments, and to the operations that made them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nnx_parallel.report.program import hlo

# Operations whose result holds only values of one operand.
_MOVES = frozenset({
  "copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "transpose", "slice",
  "dynamic-slice", "get-tuple-element", "optimization-barrier", "broadcast", "all-gather",
  "all-gather-start", "all-gather-done", "collective-permute", "collective-permute-start",
  "collective-permute-done", "fusion-done", "tuple",
})  # fmt: skip
_FUSIONS = frozenset({"fusion", "fusion-start"})
_REDUCES = frozenset({"all-reduce", "all-reduce-start", "all-reduce-done", "reduce-scatter", "all-to-all"})
_FAR = 200
# Lines of this package; and lines that compute a user's line in another way.
_PACKAGE, _REWRITES = "/nnx_parallel/", re.compile("/nnx_parallel/(layers|core)/")


class Origins:
  """Follows a value back through copies, slices and loops to the program's arguments."""

  def __init__(self, program: hlo.Program):
    self._program = program
    # Parameter or root of a computation -> the instruction that runs the computation.
    self._callers: dict[hlo.Instruction, hlo.Instruction] = {}
    self._readers: dict[hlo.Instruction, list[hlo.Instruction]] = {}
    for computation in program.computations.values():
      for instruction in computation.instructions:
        for read in instruction.inputs:
          self._readers.setdefault(read, []).append(instruction)
        for inner in self._called(instruction):
          for end in (*inner.parameters, inner.root):
            self._callers.setdefault(end, instruction)

  def _called(self, at: hlo.Instruction) -> list[hlo.Computation]:
    return [self._program.computations[name] for name in at.called if name in self._program.computations]

  def source(self, instruction: hlo.Instruction) -> str:
    """`file.py:line` of an instruction; where `layers` rewrote it, the first of the user's that reads it."""
    own = self._program.source(instruction)
    left: list[tuple[hlo.Instruction, int | None]] = [(instruction, None)]
    seen = set[tuple[hlo.Instruction, int | None]]()
    while left and len(seen) < _FAR and _REWRITES.search(own):
      at, index = left.pop(0)
      line = self._program.source(at)
      if line and _PACKAGE not in line:
        return line
      if (at, index) not in seen:
        seen.add((at, index))
        left += self._onward(at, index)
    return own

  def _onward(self, made: hlo.Instruction, index: int | None) -> Iterator[tuple[hlo.Instruction, int | None]]:
    """The readers of a value, also in loops and calls; for a tuple, of the element `index`."""
    for at in self._readers.get(made, ()):
      place, inner = at.inputs.index(made), self._called(at)
      if at.opcode == "get-tuple-element":
        if index in (None, at.index):
          yield at, None
      elif at.opcode in ("while", "fusion", "call") and inner:
        yield inner[-1].parameters[0 if at.opcode == "while" else place], index
      else:
        yield at, place if at.opcode == "tuple" else None
    caller = self._callers.get(made)
    if caller is not None and made.opcode != "parameter":
      yield caller, index

  def of(self, instruction: hlo.Instruction) -> tuple[str, ...]:
    """Names of the arguments that reach `instruction` unmixed, without duplicates."""
    names = [self.value(operand) for operand in instruction.inputs]
    return tuple(dict.fromkeys(name for name in names if name))

  def made(self, instruction: hlo.Instruction, caller: hlo.Instruction | None) -> hlo.Instruction | None:
    """The operation with the JAX name of a collective: itself, its caller, or the maker of its operand."""
    if instruction.op_name or (caller is not None and caller.op_name):
      return instruction if instruction.op_name else caller
    made = self.maker(instruction.inputs[0]) if instruction.inputs else None
    return made if made is not None and made.op_name else None

  def maker(self, instruction: hlo.Instruction) -> hlo.Instruction:
    """The operation with a JAX name that made a value; copies and loop carries have no name."""
    at, index = instruction, None
    for _ in range(_FAR):
      if at.op_name:
        return at
      if at.opcode == "parameter" and at in self._callers:
        at = self._callers[at]
        continue
      if not at.inputs or not (self._moves(at) or at.opcode in _REDUCES):
        break
      if at.opcode == "get-tuple-element":
        at, index = at.inputs[0], at.index
      elif index is not None and index < len(at.inputs):
        at, index = at.inputs[index], None
      else:
        at, index = max(at.inputs, key=lambda operand: operand.bytes), None
    return instruction

  def value(self, instruction: hlo.Instruction, index: int | None = None) -> str | None:
    """Name of the argument whose value a result is, unmixed; `index` picks an element of a tuple."""
    at = instruction
    for _ in range(_FAR):
      if at.opcode == "parameter":
        caller = self._callers.get(at)
        if caller is None:
          return at.op_name or at.name if at in self._program.entry.parameters else None
        number = 0 if caller.opcode == "while" else at.index
        if number >= len(caller.inputs):
          return None
        at = caller.inputs[number]
      elif at.opcode == "get-tuple-element":
        at, index = at.inputs[0], at.index
      elif at.opcode == "tuple" and index is not None:
        at, index = at.inputs[index], None
      elif at.opcode == "while" and index is not None and self._carries(at, index):
        at = at.inputs[0]
      elif at.opcode != "while" and at.inputs and self._moves(at):
        at, index = max(at.inputs, key=lambda operand: operand.bytes), None
      else:
        return None
    return None

  def _moves(self, at: hlo.Instruction) -> bool:
    """Whether it only slices or copies; a fusion's arithmetic on its scalar indices does not count."""
    if at.opcode not in _FUSIONS:
      return at.opcode in _MOVES
    inner = self._program.computations[at.called[0]].instructions
    return all(i.opcode in _MOVES or i.opcode == "parameter" or i.shapes[0].elements == 1 for i in inner)

  def _carries(self, loop: hlo.Instruction, index: int) -> bool:
    """Whether a value comes out of a loop as it went in."""
    root = self._program.body(loop).root
    carried = root.inputs[index] if root.opcode == "tuple" else None
    return carried is not None and carried.opcode == "get-tuple-element" and carried.index == index
