"""Errors of steps that are damaged, removed, or cannot be read at the moment.

Only damage lets a restore take an older step instead. A limit on open files or a missing permission is no
damage.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

from etils import epath

from nnx_parallel.errors import CheckpointError

_NUMBERS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE})
# The messages of TensorStore for the same.
_TEXTS = (
  "RESOURCE_EXHAUSTED",
  "PERMISSION_DENIED",
  "Too many open files",
  "Cannot allocate memory",
  # Python's own, at a limit on threads and when the script has ended.
  "can't start new thread",
  "can't create new thread",
  "cannot schedule new futures",
)


class DamagedError(CheckpointError):
  """A checkpoint whose files or values differ from the saved ones."""


class VanishedError(CheckpointError):
  """A checkpoint that another process removed or replaced while it was read."""


def damage(step: object, problems: Sequence[str]) -> DamagedError:
  """The error for a damaged step."""
  return DamagedError(
    f"step {step} is damaged: {problems[0]}.",
    details="\n".join(problems[1:9]),
    fix='restore(..., on_corrupt="fallback") takes the newest good step; '
    "`nnx-parallel verify DIR` checks them all.",
  )


def vanished(step_dir: epath.Path) -> VanishedError:
  """The error for a step that another process removed or replaced."""
  return VanishedError(
    f"{step_dir} vanished: another process removed or replaced it.",
    fix="take another step: Checkpointer(...).steps() lists the steps.",
  )


def causes(error: BaseException | None) -> Iterator[BaseException]:
  """An error, its cause, the cause of the cause, and so on."""
  while error is not None:
    yield error
    error = error.__cause__ or error.__context__


def raise_transient(error: BaseException, what: str) -> None:
  """Raises if the cause of an error is this machine and not the checkpoint."""
  found = (
    cause
    for cause in causes(error)
    if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _NUMBERS)
  )
  cause = next(found, None)
  if cause is not None or any(text in str(error) for text in _TEXTS):
    raise CheckpointError(
      f"cannot read {what}: {cause.strerror if isinstance(cause, OSError) else type(error).__name__}.",
      details=str(error)[:300],
      fix="remove the cause and try again; this is not a sign of damage.",
    ) from error
