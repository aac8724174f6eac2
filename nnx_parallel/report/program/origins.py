"""Follows values of a compiled program back to its arguments, and to the operations that made them."""

from __future__ import annotations

from nnx_parallel.core import hlo

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


class Origins:
  """Follows a value back through copies, slices and loops to the program's arguments."""

  def __init__(self, program: hlo.Program):
    self._program = program
    self._callers: dict[str, tuple[hlo.Instruction, hlo.Computation]] = {}
    for computation in program.computations.values():
      for instruction in computation.instructions:
        for name in instruction.called:
          self._callers.setdefault(name, (instruction, computation))

  def of(self, instruction: hlo.Instruction, computation: hlo.Computation) -> tuple[str, ...]:
    """Names of the arguments that reach `instruction` unmixed, without duplicates."""
    names = [self._follow(operand, computation, None) for operand in instruction.operands]
    return tuple(dict.fromkeys(name for name in names if name))

  def value(self, instruction: hlo.Instruction, computation: hlo.Computation, index: str = "") -> str | None:
    """Name of the argument whose value a result is, unmixed; `index` picks an element of a tuple."""
    return self._follow(instruction.name, computation, int(index) if index.isdigit() else None)

  def made(
    self, instruction: hlo.Instruction, computation: hlo.Computation, caller: hlo.Instruction | None
  ) -> hlo.Instruction | None:
    """The operation with the JAX name of a collective: itself, its caller, or the maker of its operand."""
    if instruction.op_name or (caller is not None and caller.op_name):
      return instruction if instruction.op_name else caller
    operand = computation.by_name.get(instruction.operands[0]) if instruction.operands else None
    made = self.maker(operand, computation) if operand is not None else None
    return made if made is not None and made.op_name else None

  def maker(self, instruction: hlo.Instruction, computation: hlo.Computation) -> hlo.Instruction:
    """The operation with a JAX name that made a value; copies and what loops carry have none of their own."""
    at, index = instruction, None
    for _ in range(_FAR):
      if at.op_name:
        return at
      if at.opcode == "parameter" and computation.name in self._callers:
        at, computation = self._callers[computation.name]
        continue
      onward = self._source_of(at, computation, index)
      if onward is None:
        break
      index = int(at.attribute("index")) if at.opcode == "get-tuple-element" else None
      at = onward
    return instruction

  def _source_of(
    self, at: hlo.Instruction, computation: hlo.Computation, index: int | None
  ) -> hlo.Instruction | None:
    operands = [computation.by_name[name] for name in at.operands if name in computation.by_name]
    if not operands or not (self._moves(at) or at.opcode in _REDUCES):
      return None
    if index is not None and index < len(operands) and at.opcode != "get-tuple-element":
      return operands[index]
    return max(operands, key=lambda operand: operand.bytes)

  def _follow(self, name: str, computation: hlo.Computation, index: int | None) -> str | None:
    for _ in range(_FAR):
      at = computation.by_name.get(name)
      if at is None:
        return None
      if at.opcode == "parameter":
        if computation is self._program.entry:
          return at.op_name or at.name
        if computation.name not in self._callers:
          return None
        caller, computation = self._callers[computation.name]
        number = 0 if caller.opcode == "while" else int(at.arguments)
        if number >= len(caller.operands):
          return None
        name = caller.operands[number]
      elif at.opcode == "get-tuple-element":
        name, index = at.operands[0], int(at.attribute("index"))
      elif at.opcode == "tuple" and index is not None:
        name, index = at.operands[index], None
      elif at.opcode == "while" and index is not None:
        if not self._carries(at, index):
          return None
        name = at.operands[0]
      elif at.operands and self._moves(at):
        known = [n for n in at.operands if n in computation.by_name]
        name, index = max(known, key=lambda n: computation.by_name[n].bytes), None
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
    body = self._program.computations[loop.attribute("body").lstrip("%")]
    if body.root.opcode != "tuple":
      return False
    carried = body.by_name[body.root.operands[index]]
    return carried.opcode == "get-tuple-element" and int(carried.attribute("index")) == index
