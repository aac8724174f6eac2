"""Agreement between processes before any of them enters a call that waits for the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from nnx_parallel.checkpoint.manifest import DamagedError
from nnx_parallel.errors import CheckpointError

_T = TypeVar("_T")
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


def raise_together(error: Exception | None) -> None:
  """Raises on every process when one of them has an error, so that none waits forever.

  All raise a `DamagedError` or none does: who takes an older step instead must not be alone.

  Raises:
    Exception: this process's error.
    CheckpointError: word of the others'.
  """
  if jax.process_count() == 1:
    if error is not None:
      raise error
    return
  code = _SOUND if error is None else _DAMAGED if isinstance(error, DamagedError) else _FAILED
  codes = np.asarray(multihost_utils.process_allgather(np.int32(code))).reshape(-1)
  worst = codes.max()
  if error is not None and code == worst:
    raise error
  if worst != _SOUND:
    kind = DamagedError if worst == _DAMAGED else CheckpointError
    raise kind(
      f"processes {np.flatnonzero(codes == worst).tolist()} could not go on, so this one stopped too.",
      fix="read the error of the first of them.",
    ) from error


def together(call: Callable[[], _T]) -> _T:
  """Makes a call on every process; when it fails on one, it fails on all.

  Raises:
    Exception: see `raise_together`.
  """
  try:
    result = call()
  except Exception as error:
    raise_together(error)
    raise
  raise_together(None)
  return result


def added_up(numbers: Sequence[int]) -> list[int]:
  """The sums over all processes, modulo 2**32; each passes as many numbers."""
  if jax.process_count() == 1:
    return list(numbers)
  everyone = np.asarray(multihost_utils.process_allgather(np.asarray(numbers, np.uint32)))
  return [int(total) for total in everyone.sum(axis=0, dtype=np.uint64) % 2**32]
