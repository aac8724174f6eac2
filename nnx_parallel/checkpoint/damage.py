"""Errors of steps that cannot be read or written. Only damage lets a restore take an older step instead."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator, Iterator, Sequence

from etils import epath

from nnx_parallel.errors import CheckpointError, DamagedError

# Errors of this machine, by number, and by the messages of TensorStore and of Python at a limit on threads.
_NUMBERS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE})
_TEXTS = (
  "RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "Too many open files", "Cannot allocate memory",
  "can't start new thread", "can't create new thread", "cannot schedule new futures",
)  # fmt: skip
# Why a save fails, what helps, and how its error is known.
_UNTOUCHED = "; the steps saved before are untouched."
_REASONS = (
  ("too many files are open", "raise the limit (ulimit -n), or close files.",
   {errno.EMFILE, errno.ENFILE}, ("Too many open files",)),
  ("the disk is full", f"free some space{_UNTOUCHED}",
   {errno.ENOSPC, errno.EDQUOT}, ("No space left", "RESOURCE_EXHAUSTED")),
  ("it may not be written", "choose a directory that this user can write to.",
   {errno.EACCES, errno.EPERM, errno.EROFS}, ("Permission denied",)),
  ("a file is in the way", "choose a directory, not a file.", {errno.ENOTDIR, errno.EEXIST}, ()),
)  # fmt: skip


class VanishedError(CheckpointError):
  """A checkpoint that another process removed or replaced while it was read."""

  def __init__(self, step_dir: epath.Path):
    fix = "take another step: nxp.Checkpointer(...).steps() lists the steps."
    super().__init__(f"{step_dir} vanished: another process removed or replaced it.", fix=fix)


def damage(step: object, problems: Sequence[str]) -> DamagedError:
  """The error for a damaged step."""
  return DamagedError(
    f"step {step} is damaged: {problems[0]}.",
    details="\n".join(problems[1:9]),
    fix='restore(..., on_corrupt="fallback") takes the newest good step; '
    "`nnx-parallel verify DIR` checks them all.",
  )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
  while error is not None:
    yield error
    error = error.__cause__ or error.__context__


def raise_transient(error: BaseException, what: str) -> None:
  """Raises if the cause of an error is this machine and not the checkpoint."""
  found = [
    cause
    for cause in _causes(error)
    if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _NUMBERS)
  ]
  if found or any(text in str(error) for text in _TEXTS):
    why = getattr(found[0], "strerror", None) if found else None
    raise CheckpointError(
      f"cannot read {what}: {why or type(error).__name__}.",
      details=str(error)[:300],
      fix="remove the cause and try again; this is not a sign of damage.",
    ) from error


@contextlib.contextmanager
def friendly_errors(doing: str, directory: os.PathLike[str]) -> Generator[None]:
  """Turns errors of the operating system or Orbax in its block into a `CheckpointError`."""
  try:
    yield
  except CheckpointError:
    raise
  except (OSError, ValueError, RuntimeError, TypeError) as error:
    code = next((cause.errno for cause in _causes(error) if isinstance(cause, OSError)), None)
    text = str(error)
    why, fix = type(error).__name__, f"see the cause above{_UNTOUCHED}"
    for known, helps, numbers, words in _REASONS:
      if code in numbers or any(word in text for word in words):
        why, fix = known, helps
        break
    raise CheckpointError(
      f"cannot {doing} in {os.fspath(directory)}: {why}.", details=text[:500] or repr(error), fix=fix
    ) from error
