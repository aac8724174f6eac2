"""A profile of a few steps, for xprof."""

from __future__ import annotations

import os
from typing import Any, Self

import jax

from nnx_parallel.errors import TrainError


class ProfileWindow:
  """Traces the steps `first` to `last` into a directory that `xprof` (or TensorBoard's profile tab) opens.

  Args:
    directory: one folder for each run.
    first: the first step that is traced; not the very first of a run, which compiles.
    last: the last one. A run that ends sooner ends the trace.

  Raises:
    TrainError: a window that holds no step.
  """

  def __init__(self, directory: str | os.PathLike[str], first: int, last: int):
    if not 0 < first <= last:
      raise TrainError(
        f"the profile of steps {first} to {last} holds no step.",
        details="steps are counted from 1, and both ends are in",
        fix="a few steps after the first, which compiles: (10, 12).",
      )
    self._directory, self._first, self._last = os.fspath(directory), first, last
    self._running = False

  def before(self, step: int, pending: Any = None) -> None:
    """Starts the trace if this step begins the window, once `pending` arrays are there."""
    if step == self._first:
      jax.block_until_ready(pending)
      jax.profiler.start_trace(self._directory)
      self._running = True

  def after(self, step: int, pending: Any) -> None:
    """Ends the trace if this step ends the window, once `pending` arrays are there."""
    if self._running and step >= self._last:
      jax.block_until_ready(pending)
      self.close()

  def close(self) -> None:
    """Ends the trace if it is running."""
    if self._running:
      self._running = False
      jax.profiler.stop_trace()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()
