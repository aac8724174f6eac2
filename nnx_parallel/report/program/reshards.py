"""Tensors that the compiler could only re-shard by replicating them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from nnx_parallel.report.program import hlo

_WARNING = re.compile(
  r"Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from sharding "
  r"(?P<before>.+?) to (?P<after>.+?) (?:efficiently|without)[^%]*"
  r"%(?P<name>[\w.\-]+) = (?P<shape>\w+\[[\d,]*\])[^ ]* (?P<opcode>[\w\-]+)\((?P<rest>.*)"
)


@dataclasses.dataclass(frozen=True)
class Reshard:
  """One `Involuntary full rematerialization` warning of the partitioner.

  Attributes:
    op: the JAX name stack, or the HLO name where there is none.
    source: `file.py:line`, or an empty string.
    shape: dtype and dims as the compiler printed them, which may be one device's block.
    bytes: of that shape.
    before: the sharding it had, as the compiler writes it.
    after: the sharding that was requested.
  """

  op: str
  source: str
  shape: str
  bytes: int
  before: str
  after: str


def find_reshards(log: str, frames: Mapping[int, str]) -> tuple[Reshard, ...]:
  """The partitioner's warnings in a compiler's log, each once; `frames` are those of the program."""
  found: list[Reshard] = []
  for match in _WARNING.finditer(log):
    op = hlo.op_name(match["rest"])
    if not op and "fake_parameter" in match["rest"]:
      continue  # a trial of the partitioner, repeated with the true operands
    reshard = Reshard(
      op=op or match["name"],
      source=hlo.frame_of(match["rest"], frames),
      shape=match["shape"],
      bytes=sum(shape.bytes for shape in hlo.read_shapes(match["shape"])),
      before=match["before"],
      after=match["after"],
    )
    if reshard not in found:
      found.append(reshard)
  return tuple(found)
