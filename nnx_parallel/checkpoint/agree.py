"""Agreement between processes before any of them enters a call that waits for the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from nnx_parallel.errors import CheckpointError

_T = TypeVar("_T")


def require_same(what: str, text: str) -> None:
  """Raises on every process when they do not all pass the same text.

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


def raise_together(error: CheckpointError | None) -> None:
  """Raises on every process when any of them has an error, so that none is left waiting.

  Raises:
    CheckpointError: this process's error, or word of the others'.
  """
  if jax.process_count() == 1:
    failed = [0] if error else []
  else:
    everyone = np.asarray(multihost_utils.process_allgather(np.int32(error is not None)))
    failed = [i for i in range(everyone.size) if everyone.reshape(-1)[i]]
  if error is not None:
    raise error
  if failed:
    raise CheckpointError(
      f"processes {failed} could not go on, so this one stopped too.",
      fix="read the error of the first of them.",
    )


def together(call: Callable[[], _T]) -> _T:
  """Makes a call on every process; when it fails on one, it fails on all.

  Raises:
    CheckpointError: see `raise_together`.
  """
  try:
    result = call()
  except CheckpointError as error:
    raise_together(error)
    raise
  raise_together(None)
  return result
