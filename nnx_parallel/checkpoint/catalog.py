"""Which steps a directory holds, and which of them is meant."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
from collections.abc import Mapping

from etils import epath

from nnx_parallel.checkpoint import files, lineage, manifest, restore
from nnx_parallel.checkpoint.lineage import Place
from nnx_parallel.checkpoint.manifest import Header, Manifest
from nnx_parallel.checkpoint.retention import Retention
from nnx_parallel.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Catalog:
  """The steps in a directory, looked up anew at each call.

  Attributes:
    directory: absolute.
    retention: says which step is best, and which may go.
  """

  directory: epath.Path
  retention: Retention

  def steps(self) -> list[int]:
    """The complete steps, in the order of their numbers."""
    return files.saved_steps(self.directory)

  def folder(self, step: int) -> epath.Path:
    """Of a step."""
    return files.folder_of(self.directory, step)

  def manifest(self, step: int) -> Manifest:
    """Of a step; read and checked.

    Raises:
      CheckpointError: see `manifest.read`.
      DamagedError: it is the manifest of another step.
    """
    found = manifest.read(self.folder(step))
    if found.step != step:
      raise restore.damage(step, [f"{manifest.FILE} is that of step {found.step}"])
    return found

  def newest_first(self) -> list[int]:
    """All steps, damaged ones too, as `lineage.newest_first` orders them."""
    return lineage.newest_first(self.headers())

  def headers(self) -> dict[int, Header | None]:
    """Of all steps; None for one that is damaged, or somebody else's."""
    found: dict[int, Header | None] = dict.fromkeys(files.foreign_steps(self.directory))
    for step in self.steps():
      found[step] = None
      with contextlib.suppress(CheckpointError):
        header = manifest.read_header(self.folder(step))
        found[step] = header if header.step == step else None
    return found

  def latest(self) -> int | None:
    """The newest step whose manifest and files are all there, or None."""
    steps = self.newest_first()
    while steps:
      found = self.identity(step := steps.pop(0))
      with contextlib.suppress(CheckpointError):
        record = self.manifest(step)
        if not restore.damaged_files(self.folder(step), record, record.files):
          return step
      if found is None or self.identity(step) != found:
        steps = self.newest_first()  # a writer removed or replaced it in between
    return None

  def identity(self, step: int) -> int | None:
    """Tells the folder of a step from another one of the same name; None when there is none."""
    folder = self.folder(step)
    if not files.is_local(folder):
      return 0 if folder.exists() else None
    with contextlib.suppress(FileNotFoundError):
      return os.stat(folder).st_ino
    return None

  def best(self) -> int | None:
    """The step with the best metric, or None when no step has it."""
    return next(iter(self.retention.ranked(_metrics(self.headers()))), None)

  def doomed(self) -> list[int]:
    """The steps that need not be kept; never the newest, nor a damaged one."""
    if self.retention.newest is None:
      return []
    metrics = _metrics(headers := self.headers())
    return self.retention.doomed(metrics, [s for s in lineage.newest_first(headers) if s in metrics])

  def resolve(self, step: int | str | None, *, whole: bool = True) -> int:
    """The number that is meant by a number, `"latest"` (also None) or `"best"`.

    The latest may be damaged, and have no manifest: then whoever reads it says so.

    Args:
      step: as above.
      whole: whether a number must be that of a step with a manifest.

    Raises:
      CheckpointError: there is no such step; the message lists those there are.
    """
    if step is None or step == "latest":
      number = next(iter(self.newest_first()), None) if self.steps() else None
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
      folder = self.folder(number := as_step(step))
      if not ((folder / manifest.FILE).exists() or (not whole and files.is_foreign(folder))):
        number = None
    if number is None:
      raise self._no_step(step)
    return number

  def place(self, step: int, position: int | None, *, overwrite: bool) -> Place:
    """Where a step belongs that is about to be written.

    Args:
      step: its number.
      position: the step that this run resumed from or saved last, if any.
      overwrite: whether it may exist.

    Raises:
      CheckpointError: it exists, its folder is somebody else's, or the run did not come from before it.
    """
    self._check_free(step, overwrite=overwrite)
    return lineage.place(step, position, self.headers(), self.directory)

  def _check_free(self, step: int, *, overwrite: bool) -> None:
    folder = self.folder(step)
    if files.is_foreign(folder):
      raise CheckpointError(
        f"cannot save step {step}: {folder} was not written by nnx_parallel, or is damaged.",
        fix="move that folder elsewhere, or choose another directory; nothing was changed.",
      )
    if not (folder / manifest.FILE).exists():
      return
    if not overwrite:
      raise CheckpointError(
        f"cannot save step {step}: it exists in {self.directory}.",
        details=f"steps: {self.steps()}",
        fix="pass overwrite=True to replace it once the new one is complete, or use another step.",
      )
    if not files.is_local(self.directory):
      raise CheckpointError(
        f"cannot replace step {step} in {self.directory}: renames are not atomic there.",
        fix="save under another step, or delete this one first.",
      )

  def _no_step(self, step: int | str | None) -> CheckpointError:
    steps = self.steps()
    foreign = files.foreign_steps(self.directory)
    details = f"complete steps: {steps or 'none'}"
    if foreign:
      details += f"\nincomplete, or written by something else (no {manifest.FILE}): {foreign}"
    what = "a checkpoint" if step is None or step == "latest" else f"step {step}"
    if step == "best":
      what = f"a step with the metric {self.retention.best!r}"
    fix = "one of these steps, or the latest." if steps else "save one first, or check the path."
    if not self.directory.exists():
      details = "there is no such directory"
    return CheckpointError(f"cannot find {what} in {self.directory}.", details=details, fix=fix)


def as_step(step: object) -> int:
  """The number of a step.

  Raises:
    CheckpointError: not a whole number from 0 up.
  """
  try:
    number = operator.index(step)  # pyright: ignore[reportArgumentType]
  except TypeError:
    number = -1
  if isinstance(step, bool) or number < 0:
    shown = f"step={step!r}" if isinstance(step, (int, float, str)) else f"a {type(step).__name__}"
    raise CheckpointError(
      f"{shown} is not a step.", fix="a whole number from 0 up comes first: save(100, model, optimizer)."
    )
  return number


def _metrics(headers: Mapping[int, Header | None]) -> dict[int, Mapping[str, float]]:
  return {step: header.metrics for step, header in headers.items() if header is not None}


def absolute(directory: str | os.PathLike[str]) -> epath.Path:
  """The directory as an absolute path, or as the address of an object store.

  Raises:
    CheckpointError: a file, a path with a backslash, or a store for which no package is installed.
  """
  try:
    path = epath.Path(directory).expanduser()
    remote = not files.is_local(path)
    if remote:
      path.exists()  # imports what the store needs
  except (KeyError, ImportError) as error:
    raise CheckpointError(
      f"cannot open {directory}: no file system for it is installed.",
      details=str(error),
      fix="install the package of that store (gcsfs for gs://, s3fs for s3://), or pass a local path.",
    ) from error
  if remote:
    return path
  path = epath.Path(os.path.abspath(path))
  if "\\" in os.fspath(path):
    raise CheckpointError(
      f"{path} holds a backslash.",
      details="TensorStore, which writes the arrays, takes it for the start of another folder",
      fix="rename that folder, or choose another.",
    )
  if path.exists() and not path.is_dir():
    raise CheckpointError(f"{path} is a file, not a directory.", fix="choose a directory for the steps.")
  return path
