"""The steps of a directory: the newest, the best, and the steps that may be deleted.

Each step names its predecessor in its run. The newest step is the end of the last lineage, and not always the
step with the largest number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import operator
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint import manifest, restore
from nnx_parallel.checkpoint.damage import damage
from nnx_parallel.checkpoint.manifest import LATEST, Header, Manifest
from nnx_parallel.checkpoint.storage import Storage
from nnx_parallel.errors import CheckpointError

policies = ocp.training.preservation_policies
PreservationPolicy = policies.PreservationPolicy


class Saved(NamedTuple):
  """A step as the policies of Orbax read it; the metrics are None where the step has no comparable one."""

  step: int
  time: datetime.datetime
  metrics: Mapping[str, float] | None


@dataclasses.dataclass(frozen=True)
class Retention:
  """Keeps the steps that a policy of Orbax keeps, the best by a metric, and always the newest step.

  Attributes:
    keep: the number of newest steps to keep, or a policy; None keeps all.
    best: the metric that `step="best"` compares.
    mode: `min` or `max`: whether small or large values of the metric are best.
  """

  keep: int | PreservationPolicy | None = None
  best: str | None = None
  mode: str = "min"

  def __post_init__(self) -> None:
    one_of("best_mode", self.mode, ("min", "max"))
    if not isinstance(self.keep, PreservationPolicy | None) and whole(self.keep, least=1) is None:
      raise CheckpointError(
        f"max_to_keep={self.keep!r} is not a number of steps from 1 up.",
        fix="pass 1 or more, None, or a policy of orbax.checkpoint.v1.training.preservation_policies.",
      )

  def best_of(self, headers: Mapping[int, Header | None]) -> int | None:
    """The step with the best metric, the newest of equals; NaN counts as not having the metric."""
    known = {step: self._metrics(header) for step, header in headers.items() if header is not None}
    values = {step: row[self.best] for step, row in known.items() if row is not None and self.best}
    sign = 1 if self.mode == "min" else -1
    return min(values, key=lambda step: (sign * values[step], -step), default=None)

  def _metrics(self, header: Header) -> Mapping[str, float] | None:
    return None if math.isnan(header.metrics.get(self.best or "", math.nan)) else header.metrics

  def expired(self, headers: Mapping[int, Header | None]) -> list[int]:
    """The steps to delete, in the order of their numbers; never the newest, the best, or a damaged step."""
    known = [header for step in newest_first(headers) if (header := headers[step]) is not None]
    if self.keep is None or not known:
      return []
    policy = self.keep if isinstance(self.keep, PreservationPolicy) else policies.LatestN(self.keep)
    utc = datetime.UTC
    saved = [
      Saved(x.step, datetime.datetime.fromtimestamp(x.time, utc), self._metrics(x)) for x in known[::-1]
    ]
    kept = policy.should_preserve(cast(Any, saved), context=policies.PreservationContext())
    always = {known[0].step, self.best_of(headers)}
    return sorted(x.step for x, stays in zip(saved, kept, strict=True) if not stays and x.step not in always)


@dataclasses.dataclass(frozen=True)
class Catalog:
  """The order of the steps in a directory, looked up anew at each call.

  Attributes:
    storage: the steps.
    retention: decides which step is best and which may be deleted.
  """

  storage: Storage
  retention: Retention

  def manifest(self, step: int) -> Manifest:
    """Reads and checks the manifest of a step."""
    found = manifest.read(self.storage.folder(step))
    if found.step != step:
      raise damage(step, [f"{manifest.FILE} is from step {found.step}"])
    return found

  def headers(self) -> dict[int, Header | None]:
    """The header of each step; None where it is damaged, or another program wrote the folder."""
    found: dict[int, Header | None] = dict.fromkeys(self.storage.unrecognised_steps())
    for step in self.storage.steps():
      found[step] = None
      with contextlib.suppress(CheckpointError):
        header = manifest.read_header(self.storage.folder(step))
        found[step] = header if header.step == step else None
    return found

  def latest(self) -> int | None:
    """The newest step whose manifest and files are all there, in their sizes, or None."""
    steps = newest_first(self.headers())
    while steps:
      found = self.storage.identity(step := steps.pop(0))
      with contextlib.suppress(CheckpointError):
        record = self.manifest(step)
        if not restore.damaged_files(self.storage.folder(step), record, record.files, hashed="none"):
          return step
      if found is None or self.storage.identity(step) != found:  # a writer removed or replaced it in between
        steps = newest_first(self.headers())
    return None

  def best(self) -> int | None:
    """The step with the best metric, or None if no step has the metric."""
    return self.retention.best_of(self.headers())

  def expired(self) -> list[int]:
    """The steps that need not be kept; never the newest, nor a damaged step."""
    return [] if self.retention.keep is None else self.retention.expired(self.headers())

  def resolve(self, step: int | str | None, *, whole: bool = True) -> int:
    """The number of the step that a number, `"latest"` (also None) or `"best"` means.

    The latest may be damaged, or have no manifest; reading it raises.
    """
    if step is None or step == "latest":
      number = next(iter(newest_first(self.headers())), None) if self.storage.steps() else None
    elif step == "best":
      if self.retention.best is None:
        raise CheckpointError(
          'step="best" is unknown: no metric decides which step is best.',
          fix='Checkpointer(directory, best="loss"), the name of a metric that was saved.',
        )
      number = self.best()
    elif isinstance(step, str):
      raise CheckpointError(f"step={step!r} is unknown.", fix='pass a number, "latest" or "best".')
    else:
      folder = self.storage.folder(number := as_step(step))
      if not ((folder / manifest.FILE).exists() or (not whole and self.storage.is_unrecognised(number))):
        number = None
    if number is None:
      raise self._no_step(step)
    return number

  def place(self, step: int, position: int | None, *, saved: bool = False, overwrite: bool) -> Place:
    """The place of a new step.

    `position` is the step that the run resumed from or saved last, if any, and `saved` says that it saved it.
    """
    self.storage.check_place(step)
    exists = (self.storage.folder(step) / manifest.FILE).exists()
    if exists and not overwrite:
      raise CheckpointError(
        f"cannot save step {step}: it exists in {self.storage.directory}.",
        details=f"steps: {self.storage.steps()}",
        fix="pass overwrite=True to replace it once the new step is complete, or use another step.",
      )
    if exists and not self.storage.can_replace():
      raise CheckpointError(
        f"cannot replace step {step} in {self.storage.directory}: renames are not atomic there.",
        fix="save under another step, or delete this one first.",
      )
    headers = self.headers()
    newest = next(iter(newest_first(headers)), None)
    # Another Checkpointer of the job may have saved since: the run did not leave its steps behind.
    if saved and position is not None and newest is not None and _follows(newest, position, headers):
      position = newest
    return place_of(step, position, headers, self.storage.directory)

  def _no_step(self, step: int | str | None) -> CheckpointError:
    steps = self.storage.steps()
    unrecognised = self.storage.unrecognised_steps()
    details = f"complete steps: {steps or 'none'}"
    if unrecognised:
      details += f"\nincomplete, or written by something else (no {manifest.FILE}): {unrecognised}"
    what = "a checkpoint" if step is None or step == "latest" else f"step {step}"
    if step == "best":
      what = f"a step with the metric {self.retention.best!r}"
    fix = "one of these steps, or the latest." if steps else "save one first, or check the path."
    if not self.storage.directory.exists():
      details = "there is no such directory"
    return CheckpointError(f"cannot find {what} in {self.storage.directory}.", details=details, fix=fix)


def whole(value: object, *, least: int) -> int | None:
  """The value as an int, or None if it is not an integer of at least `least`."""
  try:
    number = operator.index(value)  # pyright: ignore[reportArgumentType]
  except TypeError:
    return None
  return None if isinstance(value, bool) or number < least else number


def one_of(name: str, value: str, known: tuple[str, ...]) -> str:
  """Checks an argument that takes one of a few values, and returns it."""
  if value not in known:
    *most, last = (f'"{word}"' for word in known)
    raise CheckpointError(f"{name}={value!r} is unknown.", fix=f"pass {', '.join(most)} or {last}.")
  return value


def as_step(step: object) -> int:
  """The number of a step."""
  number = whole(step, least=0)
  if number is None or number >= 2**63:
    shown = f"step={step!r}" if isinstance(step, (int, float, str)) else f"a {type(step).__name__}"
    raise CheckpointError(
      f"{shown} is not a step.",
      fix="a whole number from 0 up, below 2**63, comes first: save(100, model, optimizer).",
    )
  return number


def newest_first(headers: Mapping[int, Header | None]) -> list[int]:
  """Sorts steps by age: first the steps of the last lineage, then the steps that it left behind.

  The last written step ends the last lineage. Each step of it follows its parent, or, if the parent was
  deleted, the youngest older step with a smaller number. For a step without a header only the number counts.

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


def _follows(step: int, earlier: int, headers: Mapping[int, Header | None]) -> bool:
  """Whether a step continues the run of an earlier step, as far as its parents are known."""
  while step > earlier and (header := headers.get(step)) is not None:
    step = -1 if header.parent is None else header.parent
  return step >= earlier


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of a step in the lineage of its run.

  Attributes:
    parent: the step that the run resumed from or saved before; None at its start.
    time: of the step's first save; None for a new step.
    after: time of the last save of another step.
  """

  parent: int | None
  time: float | None
  after: float

  def stamp(self) -> float:
    """The time of the commit. A new step is later than all other steps, even if the clock was set back."""
    now = min(max(time.time(), 0.0), LATEST)  # the clock may be wrong
    return max(now, math.nextafter(self.after, math.inf)) if self.time is None else self.time


def place_of(
  step: int, position: int | None, headers: Mapping[int, Header | None], directory: object
) -> Place:
  """Finds the place of a step that is about to be saved; `position` is as for `Catalog.place`."""
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
  resume = f"to continue from step {earlier}, restore(target, {earlier}) with this Checkpointer first; "
  raise CheckpointError(
    f"cannot save step {step}: {directory} holds newer steps, and step {step} would become the newest.",
    details=f"the newest is step {newest}; this run {came}",
    fix=f"{resume if earlier is not None else ''}for another run, choose another directory.",
  )
