"""Every collective of a compiled program: kind, mesh axes, bytes, count, overlap and origin."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nnx_parallel.report.program import hlo
from nnx_parallel.report.program.hlo_devices import AxisFinder, Labels, group_labels, pair_labels, pairs_of
from nnx_parallel.report.program.origins import Origins

KINDS = (
  "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
)  # fmt: skip
_KIND = re.compile(rf"^(?:ragged-)?({'|'.join(KINDS)})(-start)?$")
# A mark of TPU programs on later steps of one collective that a fusion interleaves with compute.
_LATER_STEP = re.compile(r'"async_collective_fusion_config":\{[^{}]*"flag_start":"(?!-1)')
# Between TPU slices, the hosts send the data: the program has a `send` and a `recv` that name a collective.
_ACROSS: Mapping[str, str] = {
  "ALL_REDUCE": "all-reduce",
  "ALL_GATHER": "all-gather",
  "REDUCE_SCATTER": "reduce-scatter",
  "ALL_TO_ALL": "all-to-all",
  "ONE_TO_ONE": "collective-permute",
}
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TARGET = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x')
_RENDEZVOUS = re.compile(r'rendezvous="([^"]*)"')
# Kinds whose payload is the value of their operand; the other kinds reduce.
_CARRIES = frozenset(KINDS) - {"all-reduce", "reduce-scatter"}
_COMPUTE = frozenset({"fusion", "dot", "convolution", "custom-call", "while", "call", "conditional"})


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective instruction and how often a step runs it."""

  kind: str  # one of `KINDS`
  # the mesh axes that the collective runs over, in mesh order; empty if no data leaves a device
  axes: tuple[str, ...]
  complete: bool  # False if a group is only a part of the devices along these axes
  group_size: int  # the number of devices of one group
  dtype: str  # element type of the first array
  # payload of one run in bytes: the full array of a group (the result of an all-gather, the input of a
  # reduce-scatter, the array of the other kinds, per device). A ragged all-to-all may send less.
  bytes: int
  times: int  # the number of runs in one call of the program, loops multiplied out
  overlapped: bool  # whether compute is scheduled between its start and its end
  op: str  # the JAX name stack
  source: str  # `file.py:line`, or an empty string
  # names of the program's arguments whose values it carries, if they can be followed
  parameters: tuple[str, ...]
  name: str
  # the number of TPU slices, or hosts of other devices, between which a group sends; 1 within one slice
  slices: int = 1

  @property
  def total_bytes(self) -> int:
    """The payload of all runs in one step."""
    return self.bytes * self.times

  @property
  def sent_bytes(self) -> int:
    """The bytes that each device sends in one step with ring algorithms (Thakur et al., MPICH, 2005)."""
    return self.times * ring_bytes(self.kind, self.bytes, self.group_size)


def ring_bytes(kind: str, payload: int, group_size: int) -> int:
  """The bytes that each device of a group sends for a collective of `payload` bytes."""
  if kind in ("collective-permute", "collective-broadcast"):
    return payload
  passes = 2 if kind == "all-reduce" else 1
  return passes * payload * (group_size - 1) // group_size


def collectives(
  program: str | hlo.Program, axes: Mapping[str, int], slices: Labels | None = None
) -> tuple[Collective, ...]:
  """The collectives that move data, in program order; `axes` are in mesh order, as `dict(mesh.shape)`.

  `slices` has the slice or host at each position of the mesh; by default there is one.
  """
  program = hlo.parse(program) if isinstance(program, str) else program
  finder = AxisFinder(axes)
  slices = np.zeros(finder.devices, np.int64) if slices is None else slices
  origins = Origins(program)
  found: list[Collective] = []
  for run in program.executed():
    opcode, rest = run.instruction.opcode, run.instruction.rest
    if match := _KIND.match(opcode):
      kind = match[1]
    elif opcode == "send" and (across := _TRANSFER.search(rest)):
      kind = _ACROSS.get(across[1], across[1].lower())
    else:
      continue
    if _LATER_STEP.search(rest):
      continue
    collective = _describe(program, run, kind, finder, slices, origins)
    if collective.group_size > 1:
      found.append(collective)
  return tuple(found)


def totals(items: Iterable[Collective], key: Callable[[Collective], Any]) -> dict[Any, int]:
  """Payload bytes per step, grouped by `key`."""
  sums = Counter[Any]()
  for item in items:
    sums[key(item)] += item.total_bytes
  return dict(sums)


def _describe(
  program: hlo.Program, run: hlo.Executed, kind: str, finder: AxisFinder, slices: Labels, origins: Origins
) -> Collective:
  instruction = run.instruction
  programs = finder.devices // program.partitions if program.partitions > 1 else 1
  across = instruction.opcode == "send"
  labels, group_size = (_between_programs if across else _groups)(instruction, finder.devices, programs)
  axes, complete = finder.match(labels)
  complete = complete and (not across or _all_programs(instruction, programs))
  # Fusions of a TPU program that are reduce-scatters: an all-reduce, then a slice of its result.
  if kind == "all-reduce" and run.computation.name.startswith("all-reduce-scatter"):
    kind = "reduce-scatter"
  groups, _ = np.unique(np.stack([labels, slices]), axis=1)  # each group once in each slice that it spans
  shapes = _payload(instruction, kind, group_size)
  made = origins.made(instruction, run.caller)
  return Collective(
    kind=kind,
    axes=axes,
    complete=complete,
    group_size=group_size,
    dtype=shapes[0].dtype if shapes else "",
    bytes=sum(shape.bytes for shape in shapes),
    times=run.times,
    overlapped=_overlapped_sending(run) if across else _overlapped(program, run),
    op=made.op_name if made else "",
    source=origins.source(made) if made else "",
    parameters=origins.of(instruction) if kind in _CARRIES else (),
    name=instruction.name,
    slices=int(np.unique(groups, return_counts=True)[1].max()),
  )


def _groups(instruction: hlo.Instruction, devices: int, programs: int) -> tuple[Labels, int]:
  """The number of the group of each device, and the size of a group; each TPU slice has its own program."""
  rest, own = instruction.rest, devices // programs
  if "source_target_pairs=" in rest:
    pairs = instruction.attribute("source_target_pairs")
    moves = any(a != b for a, b in pairs_of(pairs))
    return _in_each(pair_labels(pairs, own), programs), 2 if moves else 1
  labels = group_labels(rest, own)
  return _in_each(labels, programs), int(np.unique(labels, return_counts=True)[1].max())


def _in_each(labels: Labels, programs: int) -> Labels:
  """The groups of one slice, repeated in each slice: slices are consecutive positions of the mesh."""
  return np.concatenate([labels + number * len(labels) for number in range(programs)])


def _between_programs(instruction: hlo.Instruction, devices: int, programs: int) -> tuple[Labels, int]:
  """The devices that have the same place in each slice."""
  pair = "ONE_TO_ONE" in instruction.rest
  return np.arange(devices) % (devices // programs), 2 if pair else programs


def _all_programs(instruction: hlo.Instruction, programs: int) -> bool:
  """Whether a `send` goes to all slices, so that its group is complete."""
  target = _TARGET.search(instruction.rest)
  return target is not None and target[1].count(",") + 1 == programs


def _payload(instruction: hlo.Instruction, kind: str, group_size: int) -> tuple[hlo.Shape, ...]:
  """The shapes of a group's full payload, per run."""
  # Only the first operand is data. The second operand of a send is a token, and the further operands of a
  # ragged all-to-all are its result, offsets and sizes.
  count = 1 if instruction.opcode.startswith(("send", "ragged")) else None
  inputs = tuple(shape for operand in instruction.inputs[:count] for shape in operand.shapes)
  if kind != "all-gather":
    return inputs
  # Results of async starts repeat the inputs and add counters, so the inputs are scaled instead.
  return tuple(hlo.Shape(s.dtype, (group_size, *s.dims)) for s in inputs)


def _overlapped(program: hlo.Program, run: hlo.Executed) -> bool:
  instruction, caller = run.instruction, run.caller
  if '"is_sync":true' in instruction.rest:
    return False
  if '"async_collective_fusion_config"' in instruction.rest:
    return True
  if caller is not None and caller.opcode in ("async-start", "call-start"):
    order = next(c.instructions for c in program.reachable if caller in c.instructions)
    return any(_computes(at) for at in between(order, caller))
  if not instruction.opcode.endswith("-start"):
    return False
  return any(_computes(at) for at in between(run.computation.instructions, instruction))


def between(order: Sequence[hlo.Instruction], start: hlo.Instruction) -> Sequence[hlo.Instruction]:
  """The instructions scheduled between an asynchronous start and its end."""
  # A SparseCore gets its program (`call-start`), then its operands (`call-update`), and works from there on.
  first, last, chain = order.index(start), len(order), start
  for place, at in enumerate(order[first + 1 :], first + 1):
    if chain in at.inputs and at.opcode.endswith("-update"):
      first, chain = (first if start.inputs else place), at
    elif chain in at.inputs and at.opcode.endswith("-done"):
      last = place
      break
  return order[first + 1 : last]


def _overlapped_sending(run: hlo.Executed) -> bool:
  """Whether anything is computed between a `send` and the `recv-done` of the same rendezvous."""
  name, order = _RENDEZVOUS.search(run.instruction.rest), run.computation.instructions
  receive = next((i for i in order if i.opcode == "recv" and name and name.group() in i.rest), None)
  for later in order[order.index(run.instruction) + 1 :]:
    if receive is not None and receive in later.inputs and later.opcode == "recv-done":
      return False
    if _computes(later):
      return True
  return False


def _computes(at: hlo.Instruction) -> bool:
  """Whether an instruction computes more than scalars."""
  return at.opcode in _COMPUTE and max((s.elements for s in at.shapes), default=0) > 1
