"""Agreement between processes before a call in which each waits for the others."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from nnx_parallel.checkpoint.damage import DamagedError
from nnx_parallel.errors import CheckpointError

_SOUND, _DAMAGED, _FAILED = range(3)


def require_same(what: str, text: str) -> None:
  """Raises on every process unless all pass the same text.

  Raises:
    CheckpointError: names the processes that differ from process 0.
  """
  if jax.process_count() == 1:
    return
  mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
  everyone = np.asarray(multihost_utils.process_allgather(mine))
  others = [i for i in range(len(everyone)) if not np.array_equal(everyone[i], everyone[0])]
  if others:
    raise CheckpointError(
      f"the processes do not agree on {what}.",
      details=f"processes {others} differ from process 0; this is process {jax.process_index()}: "
      f"{text[:200]}",
      fix="make the same call with the same arguments on every process.",
    )


@contextlib.contextmanager
def together() -> Generator[None]:
  """A block that fails on every process when it fails on one, so that none waits for the others forever.

  All processes raise a `DamagedError` or none does: no process may take an older step alone.

  Raises:
    Exception: this process's error.
    CheckpointError: another process failed.
  """
  error: Exception | None = None
  try:
    yield
  except Exception as caught:
    if jax.process_count() == 1:
      raise
    error = caught
  if jax.process_count() == 1:
    return
  code = _SOUND if error is None else _DAMAGED if isinstance(error, DamagedError) else _FAILED
  codes = np.asarray(multihost_utils.process_allgather(np.int32(code))).reshape(-1)
  worst = codes.max()
  if error is not None and code == worst:
    raise error
  if worst != _SOUND:
    kind = DamagedError if worst == _DAMAGED else CheckpointError
    raise kind(
      f"processes {np.flatnonzero(codes == worst).tolist()} failed, so this one stopped too.",
      fix="read the error of the first of them.",
    ) from error


def added_up(numbers: Sequence[int]) -> list[int]:
  """The sums over all processes, modulo 2**32. Each process passes equally many numbers."""
  if jax.process_count() == 1:
    return list(numbers)
  everyone = np.asarray(multihost_utils.process_allgather(np.asarray(numbers, np.uint32)))
  return [int(total) for total in everyone.sum(axis=0, dtype=np.uint64) % 2**32]
