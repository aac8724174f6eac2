"""Transient read errors (open-file limit, permissions): they do not mean damage."""

from __future__ import annotations

import errno

from nnx_parallel.errors import CheckpointError

_NUMBERS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE})
# TensorStore's names of the same.
_WORDS = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "Too many open files", "Cannot allocate memory")


def raise_passing(error: BaseException, what: str) -> None:
  """Raises when an error says nothing of the checkpoint: then no older step may be taken instead.

  Raises:
    CheckpointError: what could not be read, and why.
  """
  cause: BaseException | None = error
  while cause is not None and not (
    isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _NUMBERS)
  ):
    cause = cause.__cause__ or cause.__context__
  if cause is not None or any(word in str(error) for word in _WORDS):
    raise CheckpointError(
      f"cannot read {what}: {cause.strerror if isinstance(cause, OSError) else type(error).__name__}.",
      details=str(error)[:300],
      fix="see to the cause and try again; this is no sign of damage.",
    ) from error
