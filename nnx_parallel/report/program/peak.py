"""The arrays in memory at the moment when a program needs the most memory."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from nnx_parallel.report.program import hlo
from nnx_parallel.report.program.origins import Origins

# After the live range of every value, the dump lists the values that are alive at the peak:
#   Live ranges at 921 (peak):
#     while.199{2}: 134217728 bytes (cumulative: 134217728 bytes)
_SECTION = re.compile(r"Live ranges at \d+ \(peak\):\n((?: +\S+: \d+ bytes .*\n?)+)")
_VALUE = re.compile(r"^ +(?P<name>\S+?)\{(?P<index>[\d,]*)\}: (?P<bytes>\d+) bytes", re.MULTILINE)
_SMALL = 1024


@dataclasses.dataclass(frozen=True)
class PeakBuffer:
  """Arrays of one shape and line that are in memory at the peak, besides the program's arguments."""

  shape: str  # dtype and dims of one array, per device
  count: int  # the number of arrays of that shape from that place
  bytes: int  # the bytes of all arrays, per device, with the padding of the backend
  op: str  # the JAX name stack of one array, or its HLO name if there is no name stack
  source: str  # `file.py:line`, or an empty string
  # names of the program's arguments whose values they hold: a gathered or cast parameter
  parameters: tuple[str, ...]


def at_peak(dump: str, program: hlo.Program, names: Mapping[str, str]) -> tuple[PeakBuffer, ...]:
  """The values that are alive at the peak, by the compiler's list (`*-live-range.txt`), largest first.

  Arrays of one shape and line are merged; arguments and arrays below a KiB are left out.
  """
  section = _SECTION.search(dump)
  if not section:
    return ()
  where = {i.name: i for c in program.computations.values() for i in c.instructions}
  origins = Origins(program)
  found: list[PeakBuffer] = []
  for value in _VALUE.finditer(section.group(1)):
    instruction = where.get(value["name"])
    if int(value["bytes"]) < _SMALL or instruction in program.entry.parameters:
      continue
    if instruction is None:
      found.append(PeakBuffer("", 1, int(value["bytes"]), value["name"], "", ()))
      continue
    made = origins.maker(instruction)
    held = origins.value(instruction, int(value["index"]) if value["index"].isdigit() else None)
    found.append(
      PeakBuffer(
        shape=_shape(instruction, value["index"]),
        count=1,
        bytes=int(value["bytes"]),
        op=names.get(made.op_name, made.op_name or made.name),
        source=origins.source(made),
        parameters=(names.get(held, held),) if held else (),
      )
    )
  return _together(found)


def _shape(instruction: hlo.Instruction, index: str) -> str:
  shapes = instruction.shapes
  place = int(index) if index.isdigit() and int(index) < len(shapes) else 0
  return str(shapes[place]) if shapes else ""


def _together(buffers: Iterable[PeakBuffer]) -> tuple[PeakBuffer, ...]:
  groups: dict[tuple[object, ...], list[PeakBuffer]] = {}
  for buffer in buffers:
    # Forward and backward operations of one line are one row, because only the line is printed.
    groups.setdefault((buffer.shape, buffer.source or buffer.op, buffer.parameters), []).append(buffer)
  merged = (
    dataclasses.replace(group[0], count=len(group), bytes=sum(one.bytes for one in group))
    for group in groups.values()
  )
  return tuple(sorted(merged, key=lambda buffer: -buffer.bytes))
