"""Which step of a directory is the newest: each step names the one before it in its run."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping

from nnx_parallel.checkpoint.manifest import Header
from nnx_parallel.errors import CheckpointError


def newest_first(headers: Mapping[int, Header | None]) -> list[int]:
  """Steps by age: those of the last lineage, then those that it left behind.

  The step that was written last ends the last lineage. Each step of it follows its parent, or, when that was
  deleted, the youngest older step with a smaller number.

  Args:
    headers: of each step; None where it cannot be read, and then the number alone decides.

  Example:
    >>> parents = {100: None, 200: 100, 150: 100}
    >>> newest_first({step: Header(step, i, {}, parents[step]) for i, step in enumerate(parents)})
    [150, 100, 200]
  """
  known = sorted((one for one in headers.values() if one is not None), key=lambda one: -one.time)
  times: dict[float, float] = {header.step: header.time for header in known}
  behind: list[int] = []
  parent = math.inf
  for header in known:
    if header.step > parent or (header.step < parent and times.get(parent, math.inf) < header.time):
      behind.append(header.step)
    else:
      parent = -1 if header.parent is None else header.parent
  return [*sorted(headers.keys() - behind, reverse=True), *behind]


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a step belongs in the lineage of its run.

  Attributes:
    parent: the step that the run resumed from or saved before; None at its start.
    time: when the step was first written; None for a new one.
    after: when the last of the other steps was written.
  """

  parent: int | None
  time: float | None
  after: float

  def stamp(self) -> float:
    """The time to commit with; a new step's is later than all others, also when the clock went back."""
    return max(time.time(), math.nextafter(self.after, math.inf)) if self.time is None else self.time


def place(step: int, position: int | None, headers: Mapping[int, Header | None], directory: object) -> Place:
  """The place of a step that is about to be saved.

  Args:
    step: its number; it may exist, and is replaced then.
    position: the step that this run resumed from or saved last; None when it did neither.
    headers: of the steps there are.
    directory: where they are, for the error.

  Raises:
    CheckpointError: the directory holds newer steps, and the run did not come from before them.
  """
  known = {number: header for number, header in headers.items() if header is not None}
  after = max((header.time for header in known.values()), default=-math.inf)
  newest = next(iter(newest_first(known)), None)
  start = newest if position is None else position
  old = known.get(step)
  if old is not None and (position is None or step <= position):
    return Place(old.parent, old.time, after)
  if start is None or step > start:
    return Place(start, None, after)
  came = f"is at step {position}" if position is not None else "resumed from none of its steps"
  earlier = max((number for number in known if number < step), default=None)
  resume = f"to go on from step {earlier}, restore(target, {earlier}) with this Checkpointer first; "
  raise CheckpointError(
    f"cannot save step {step}: {directory} holds newer steps, and step {step} would become the newest.",
    details=f"the newest is step {newest}; this run {came}",
    fix=f"{resume if earlier is not None else ''}for another run, choose another directory.",
  )
