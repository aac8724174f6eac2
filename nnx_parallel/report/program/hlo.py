"""A reader for the text of a compiled program (HLO), as CPU, NVIDIA and TPU compilers print it.

It reads only what reports need: computations, instructions, which computations call which and how often, and
the source line of each instruction. `Compiled.as_text()` and the files of `xla_dump_to` are both accepted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

# Bits per element; sub-byte types are packed on TPU and GPU.
_DTYPE_BITS: Mapping[str, int] = {
  "pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8,
  "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32,
  "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8,
  "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8,
}  # fmt: skip
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)?)")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
  r"(?:calls|to_apply|condition|body|true_computation|false_computation|select|scatter)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_PARENTHESIS = re.compile(r"[()]")
_ALIASES = re.compile(r"\{([\d, ]*)\}: \((\d+), ")
_PARTITIONS = re.compile(r"^HloModule .*\bnum_partitions=(\d+)", re.MULTILINE)
# The metadata of a Pallas kernel are on separate lines, inside its instruction.
_GOES_ON = re.compile(r'\n+(?="|\}\})')


@dataclasses.dataclass(frozen=True)
class Shape:
  """Dtype and dims of one array, per device."""

  dtype: str
  dims: tuple[int, ...]

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.dims))}]"

  @property
  def elements(self) -> int:
    """Number of elements, per device."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    """Bytes per device, without the tile padding that some backends add."""
    return (self.elements * _DTYPE_BITS.get(self.dtype, 0) + 7) // 8


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
  """One line of a computation; `arguments` is the text between its parentheses, `rest` what follows."""

  name: str
  opcode: str
  result: str
  inputs: tuple[Instruction, ...] = dataclasses.field(repr=False)
  arguments: str
  rest: str
  root: bool = False

  @functools.cached_property
  def shapes(self) -> tuple[Shape, ...]:
    """The arrays of the result; several for a tuple."""
    return read_shapes(self.result)

  @property
  def bytes(self) -> int:
    """Bytes of the result, per device."""
    return sum(shape.bytes for shape in self.shapes)

  @functools.cached_property
  def op_name(self) -> str:
    """The JAX name stack, e.g. `jit(step)/jvp()/while/body/dot_general`."""
    found = _OP_NAME.search(self.rest)
    return found[1].replace("\\'", "'") if found else ""

  @functools.cached_property
  def frame(self) -> int:
    """The number of its stack frame, or -1."""
    found = _FRAME.search(self.rest)
    return int(found[1]) if found else -1

  def attribute(self, name: str) -> str:
    """The text of `name=...` up to the next top-level comma, or an empty string."""
    at = re.search(rf"(?:^|[ ,]){re.escape(name)}=", self.rest)
    return next(pieces(self.rest[at.end() :])) if at else ""

  def numbers(self, name: str) -> list[int]:
    """The numbers of `name={...}`; empty where it is not there."""
    return [int(n) for n in self.attribute(name).strip("{}").split(",") if n.strip()]

  @functools.cached_property
  def index(self) -> int:
    """The number of a parameter, or the index of an element that is read from a tuple."""
    return int(self.arguments if self.opcode == "parameter" else self.attribute("index"))

  @property
  def number(self) -> int | None:
    """The value of an integer constant; None for anything else."""
    is_integer = self.opcode == "constant" and re.fullmatch(r"[su]\d+", self.shapes[0].dtype)
    return int(self.arguments) if is_integer and re.fullmatch(r"-?\d+", self.arguments) else None

  @functools.cached_property
  def called(self) -> tuple[str, ...]:
    """Names of the computations this instruction runs; of a `while`, its condition and its body."""
    names = list(_CALLED.findall(self.rest))
    for branches in _BRANCHES.findall(self.rest):
      names += _NAME.findall(branches)
    return tuple(names)


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
  """A named list of instructions, in the order in which the compiler scheduled them."""

  name: str
  instructions: tuple[Instruction, ...]

  @functools.cached_property
  def root(self) -> Instruction:
    """The instruction whose value the computation returns."""
    return next((i for i in self.instructions if i.root), self.instructions[-1])

  @functools.cached_property
  def parameters(self) -> tuple[Instruction, ...]:
    """The instructions that take its arguments, by number."""
    return tuple(sorted((i for i in self.instructions if i.opcode == "parameter"), key=lambda i: i.index))


@dataclasses.dataclass(frozen=True)
class Executed:
  """An instruction with how often one call of the program runs it."""

  instruction: Instruction
  computation: Computation
  times: int
  caller: Instruction | None


@dataclasses.dataclass(frozen=True)
class Program:
  """A full module of HLO text."""

  computations: Mapping[str, Computation]
  entry: Computation
  frames: Mapping[int, str]
  # the devices of the program, or of one of several slices; 0 if the text does not give the number
  partitions: int = 0
  # the place of each result that takes an argument's memory, and the number of the argument
  aliases: tuple[tuple[int, int], ...] = ()

  @functools.cached_property
  def reachable(self) -> tuple[Computation, ...]:
    """The computations that the program runs on arrays, each once."""
    found: dict[str, Computation] = {}
    left = [self.entry.name]
    while left:
      name = left.pop()
      if name not in found:
        found[name] = self.computations[name]
        left += [called for at in found[name].instructions for called in at.called]
    return tuple(found.values())

  @property
  def instructions(self) -> Iterator[Instruction]:
    """The instructions of these computations."""
    return (at for computation in self.reachable for at in computation.instructions)

  def source(self, instruction: Instruction) -> str:
    """`file.py:line` of an instruction, or an empty string."""
    return self.frames.get(instruction.frame, "")

  def executed(self) -> Iterator[Executed]:
    """Every instruction that runs, loops multiplied out, with fused computations and all branches.

    So it is an upper bound; a loop of unknown length (`trips`) is listed once, which is a lower bound.
    """
    yield from self._walk(self.entry, 1, None)

  def _walk(self, computation: Computation, times: int, caller: Instruction | None) -> Iterator[Executed]:
    for instruction in computation.instructions:
      yield Executed(instruction, computation, times, caller)
      inner = times * (self.trips(instruction) or 1) if instruction.opcode == "while" else times
      # Later steps of an asynchronous operation name the computation that its start runs.
      again = instruction.opcode in ("async-update", "async-done")
      for name in () if again else instruction.called:
        if name in self.computations:
          yield from self._walk(self.computations[name], inner, instruction)

  def condition(self, loop: Instruction) -> Computation:
    """The computation that decides whether a `while` continues."""
    return self.computations[loop.attribute("condition").lstrip("%")]

  def body(self, loop: Instruction) -> Computation:
    """One pass of a `while`."""
    return self.computations[loop.attribute("body").lstrip("%")]

  def trips(self, loop: Instruction) -> int | None:
    """How often a `while` runs, from the compiler's note or its condition; None if it is in neither."""
    known = _TRIPS.search(loop.rest)
    if known:
      return int(known.group(1))
    bound = self.bound(loop)
    if bound is None:
      return None
    index, limit = bound
    start, step = _initial(loop, index), _step(self.body(loop), index)
    return None if start is None or step is None else max(1, -(-(limit - start) // step))

  def bound(self, loop: Instruction) -> tuple[int, int] | None:
    """The tuple index of a loop's counter and the limit, where its condition is `counter < limit`."""
    test = self.condition(loop).root
    outer: tuple[Instruction, ...] = ()
    if test.opcode == "fusion":
      outer, test = test.inputs, self.computations[test.called[0]].root
    if test.opcode != "compare" or test.attribute("direction") != "LT":
      return None
    left, right = (outer[i.index] if outer and i.opcode == "parameter" else i for i in test.inputs[:2])
    if left.opcode != "get-tuple-element" or right.number is None:
      return None
    return left.index, right.number


def _initial(loop: Instruction, index: int) -> int | None:
  """The counter before the loop, or None where it is computed."""
  if not loop.inputs or loop.inputs[0].opcode != "tuple":
    return None
  start = loop.inputs[0].inputs[index]
  while start.opcode in ("copy", "bitcast", "convert") and start.inputs:
    start = start.inputs[0]
  return start.number


def _step(body: Computation, index: int) -> int | None:
  """The counter's step per pass: two in windowed products on TPU. None: the step is not a constant."""
  if body.root.opcode != "tuple":
    return 1
  at, step = body.root.inputs[index], 0
  while at.opcode in ("add", "copy", "bitcast"):
    step += sum(source.number or 0 for source in at.inputs)
    onward = [source for source in at.inputs if source.opcode != "constant"]
    if not onward:
      break
    at = onward[0]
  return max(1, step) if at.opcode in ("get-tuple-element", "parameter", "fusion", "constant") else None


def parse(text: str) -> Program:
  """Reads HLO text: `Compiled.as_text()`, or a file written by `xla_dump_to`."""
  computations: dict[str, Computation] = {}
  entry = name = ""
  known: dict[str, Instruction] = {}
  for line in _GOES_ON.sub("", text).splitlines():
    if not line.startswith((" ", "}")):
      header = _HEADER.match(line) if "->" in line else None
      if header:
        name, known = header.group(2), {}
        entry = name if header.group(1) else entry
      continue
    if line.startswith("}") and name:
      computations[name] = Computation(name, tuple(known.values()))
      name = ""
    elif name:
      instruction = read_instruction(line, known)
      if instruction:
        known[instruction.name] = instruction
  if not entry:
    raise ValueError("the text holds no HLO entry computation")
  partitions = _PARTITIONS.search(text)
  _, _, aliases = text.partition("\n")[0].partition("input_output_alias=")
  return Program(
    computations,
    computations[entry],
    _read_frames(text),
    int(partitions[1]) if partitions else 0,
    tuple((int(place or 0), int(number)) for place, number in _ALIASES.findall(next(pieces(aliases)))),
  )


def read_shapes(text: str) -> tuple[Shape, ...]:
  """All array shapes in a piece of HLO text, such as "(f32[4,8]{1,0:T(8,128)}, bf16[])", left to right."""
  return tuple(
    Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
    for dtype, dims in _SHAPE.findall(text)
    if dtype in _DTYPE_BITS
  )


def read_instruction(line: str, known: dict[str, Instruction] | None = None) -> Instruction | None:
  """One indented line of a computation, or None; `known` has the instructions before it, by name."""
  match = _INSTRUCTION.match(line)
  if not match:
    return None
  at = match.end()
  stop = _closing(line, at) if line[at] == "(" else line.index(" ", at)
  opening = line.index("(", stop)
  closing = _closing(line, opening)
  arguments = line[opening + 1 : closing - 1]
  inputs: list[Instruction] = []
  known = {} if known is None else known
  for name in _NAME.findall(arguments):
    whole, _, index = name.partition("#")
    if index and name not in known and whole in known:
      shape = [m.group() for m in _SHAPE.finditer(known[whole].result)][int(index)]
      known[name] = Instruction(
        name, "get-tuple-element", shape, (known[whole],), f"%{whole}", f"index={index}"
      )
    if name in known:
      inputs.append(known[name])
  return Instruction(
    name=match.group(2),
    opcode=line[stop:opening].strip(),
    result=line[at:stop],
    inputs=tuple(inputs),
    arguments=arguments,
    rest=line[closing:].lstrip(", "),
    root=bool(match.group(1)),
  )


def _closing(text: str, opening: int) -> int:
  """The index just after the parenthesis that closes the parenthesis at `opening`."""
  depth = 0
  for match in _PARENTHESIS.finditer(text, opening):
    depth += 1 if match.group() == "(" else -1
    if depth == 0:
      return match.end()
  return len(text)


def pieces(text: str) -> Iterator[str]:
  """The pieces of a text between its commas outside brackets."""
  depth = start = 0
  for at, char in enumerate(text):
    depth += (char in "([{") - (char in ")]}")
    if char == "," and depth == 0:
      yield text[start:at]
      start = at + 1
  yield text[start:]


def _read_frames(text: str) -> dict[int, str]:
  """Stack frame id -> `file:line`, from the tables at the head of the module."""
  files = dict(re.findall(r'^(\d+) "([^"]*)"$', _table(text, "FileNames"), re.MULTILINE))
  places = {
    found[0]: f"{files.get(found[1], '?')}:{found[2]}"
    for found in re.findall(
      r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", _table(text, "FileLocations"), re.MULTILINE
    )
  }
  rows = re.findall(
    r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _table(text, "StackFrames"), re.MULTILINE
  )
  # Parents are numbered from one more than frames; the outermost frame is its own parent.
  parents = {int(frame): int(parent or 1) - 1 for frame, _, parent in rows}
  own = {int(frame): places[place] for frame, place, _ in rows if place in places}
  return {frame: _users_line(frame, own, parents) for frame in own}


def _users_line(frame: int, own: Mapping[int, str], parents: Mapping[int, int]) -> str:
  """The innermost line outside other packages, or the innermost line."""
  at = frame
  while at in own and "site-packages" in own[at].replace("site-packages/nnx_parallel/", ""):
    at = parents[at]
  return own.get(at, own[frame])


def _table(text: str, title: str) -> str:
  found = re.search(rf"^{title}\n((?:\d.*\n)+)", text, re.MULTILINE)
  return found.group(1) if found else ""
