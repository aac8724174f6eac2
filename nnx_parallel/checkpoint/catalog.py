"""The steps of a directory: the newest, which has the largest number, the best, and those that may go."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from etils import epath
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint import manifest, restore
from nnx_parallel.checkpoint.damage import damage
from nnx_parallel.checkpoint.manifest import Header, Manifest
from nnx_parallel.checkpoint.storage import Storage
from nnx_parallel.core.checked import warn
from nnx_parallel.errors import CheckpointError

policies = ocp.training.preservation_policies
PreservationPolicy = policies.PreservationPolicy


class Saved(NamedTuple):
  """A step as the policies of Orbax read it, without metrics where it has no comparable one."""

  step: int
  time: datetime.datetime
  metrics: Mapping[str, float] | None


@dataclasses.dataclass(frozen=True)
class Retention:
  """Keeps the steps that a policy of Orbax keeps, the best by a metric, and always the newest step."""

  keep: int | PreservationPolicy | None = None
  best: str | None = None
  mode: str = "min"

  def __post_init__(self) -> None:
    one_of("best_mode", self.mode, ("min", "max"))

  def best_of(self, headers: Mapping[int, Header | None]) -> int | None:
    """The step with the best metric, the newest of equals; NaN counts as not having the metric."""
    known = {step: self._metrics(header) for step, header in headers.items() if header is not None}
    values = {step: row[self.best] for step, row in known.items() if row is not None and self.best}
    sign = 1 if self.mode == "min" else -1
    return min(values, key=lambda step: (sign * values[step], -step), default=None)

  def _metrics(self, header: Header) -> Mapping[str, float] | None:
    return None if math.isnan(header.metrics.get(self.best or "", math.nan)) else header.metrics

  def choose_expired(self, headers: Mapping[int, Header | None]) -> list[int]:
    """The steps to delete, in the order of their numbers; never the newest, the best, or a damaged step."""
    known = [header for step in sorted(headers, reverse=True) if (header := headers[step]) is not None]
    if self.keep is None or not known:
      return []
    policy = self.keep if isinstance(self.keep, PreservationPolicy) else policies.LatestN(self.keep)
    when = [datetime.datetime.fromtimestamp(header.time, datetime.UTC) for header in known]
    saved = [Saved(x.step, time, self._metrics(x)) for x, time in zip(known, when, strict=True)][::-1]
    kept = policy.should_preserve(cast(Any, saved), context=policies.PreservationContext())
    always = {known[0].step, self.best_of(headers)}
    return sorted(x.step for x, stays in zip(saved, kept, strict=True) if not stays and x.step not in always)


class Catalog(Storage):
  """The steps of a directory in their order, looked up anew at each call."""

  def __init__(self, directory: epath.Path, retention: Retention):
    super().__init__(directory)
    self.retention = retention

  def manifest(self, step: int) -> Manifest:
    """Reads and checks the manifest of a step."""
    found = manifest.read(self.folder(step))
    if found.step != step:
      raise damage(step, [f"{manifest.FILE} is from step {found.step}"])
    return found

  def headers(self) -> dict[int, Header | None]:
    """The header of each step; None where it is damaged, or another program wrote the folder."""
    found: dict[int, Header | None] = dict.fromkeys(self.unrecognised_steps())
    for step in self.steps():
      found[step] = None
      with contextlib.suppress(CheckpointError):
        header = manifest.read_header(self.folder(step))
        found[step] = header if header.step == step else None
    return found

  def latest(self) -> int | None:
    """The newest step whose manifest and files are all there, in their sizes, or None."""
    steps = self.steps()
    while steps:
      found = self.identity(step := steps.pop())
      with contextlib.suppress(CheckpointError):
        record = self.manifest(step)
        if not restore.damaged_files(self.folder(step), record, record.files):
          return step
      if found is None or self.identity(step) != found:  # a writer removed or replaced it in between
        steps = self.steps()
    return None

  def older(self, step: int) -> list[int]:
    """The steps before this one, damaged ones too, in order."""
    return sorted(other for other in [*self.steps(), *self.unrecognised_steps()] if other < step)

  def best(self) -> int | None:
    """The step with the best metric, or None if no step has the metric."""
    return self.retention.best_of(self.headers())

  def delete_old(self, saved: int) -> None:
    """Deletes steps that need not be kept or were set aside, never damaged ones; a failure is a warning."""
    if self.retention.keep is None:
      return
    why = "the old steps could not be listed"
    try:
      doomed = [(step, False) for step in self.retention.choose_expired(self.headers())]
      doomed += [(step, True) for step, folder in self.aside().items() if (folder / manifest.FILE).exists()]
      for step, aside in doomed:
        why = f"step {step}, which need not be kept, could not be removed"
        self.delete(step, aside=aside)
    except OSError as error:
      warn(f"step {saved} is saved, but {why}: {error}")

  def resolve(self, step: int | str | None, *, whole: bool = True) -> int:
    """The step that a number, `"latest"` (also None) or `"best"` means; reading the latest may raise."""
    if step is None or step == "latest":
      steps = self.steps()
      number = max([*steps, *self.unrecognised_steps()]) if steps else None
    elif step == "best":
      if self.retention.best is None:
        fix = 'nxp.Checkpointer(directory, best="loss"), the name of a metric that was saved.'
        raise CheckpointError('step="best" is unknown: no metric decides which step is best.', fix=fix)
      number = self.best()
    elif isinstance(step, str):
      raise CheckpointError(f"step={step!r} is unknown.", fix='pass a number, "latest" or "best".')
    else:
      folder = self.folder(number := as_step(step))
      if not ((folder / manifest.FILE).exists() or (not whole and self.is_unrecognised(number))):
        number = None
    if number is not None:
      return number
    steps, others = self.steps(), self.unrecognised_steps()
    details = f"complete steps: {steps or 'none'}"
    if others:
      details += f"\nincomplete, or written by something else (no {manifest.FILE}): {others}"
    if not self.directory.exists():
      details = "there is no such directory"
    latest = "a checkpoint"
    known = {None: latest, "latest": latest, "best": f"a step with the metric {self.retention.best!r}"}
    what = known[step] if isinstance(step, str | None) else f"step {step}"
    fix = "one of these steps, or the latest." if steps else "save one first, or check the path."
    raise CheckpointError(f"cannot find {what} in {self.directory}.", details=details, fix=fix)

  def make_place(self, step: int, *, resumed: int | None, overwrite: bool) -> None:
    """Checks that a step can be saved; sets aside the steps that a run resumed from `resumed` left."""
    if resumed is not None and (aside := self.set_aside(resumed)):
      why = f"the run continues from step {resumed}, so the later steps {aside} in {self.directory} were"
      warn(f"{why} set aside (as N.nnx-aside).")
    self.check_place(step)
    steps = self.steps()
    where, newest = self.directory, max(steps, default=-1)
    if step in steps and not overwrite:
      what, details = f"it exists in {where}", f"steps: {steps}"
      fix = "pass overwrite=True to replace it once the new step is complete, or use another step."
    elif step in steps and not self.local:
      what, details = f"it exists in {where}", "it cannot be replaced: renames are not atomic there"
      fix = "save under another step, or delete this one first."
    elif step not in steps and newest > step:
      earlier = max((other for other in steps if other < step), default=None)
      resume = f"to continue from step {earlier}, restore(target, {earlier}) with this Checkpointer first; "
      what, details = f"{where} holds newer steps", f"the newest is step {newest}"
      fix = f"{resume if earlier is not None else ''}for another run, choose another directory."
    else:
      return
    raise CheckpointError(f"cannot save step {step}: {what}.", details=details, fix=fix)


def one_of(name: str, value: str, known: tuple[str, ...]) -> str:
  """An argument that takes one of a few values."""
  if value not in known:
    raise CheckpointError(f"{name}={value!r} is unknown.", fix=f"pass {' or '.join(map(json.dumps, known))}.")
  return value


def as_step(step: object) -> int:
  """The number of a step."""
  with contextlib.suppress(TypeError):
    number = operator.index(step)  # pyright: ignore[reportArgumentType]
    if not isinstance(step, bool) and 0 <= number < 2**63:
      return number
  shown = f"step={step!r}" if isinstance(step, int | float | str | None) else f"a {type(step).__name__}"
  fix = "a number below 2**63 comes first: save(100, model, optimizer)."
  raise CheckpointError(f"{shown} is not a step from 0 up.", fix=fix)
