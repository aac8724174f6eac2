"""SIGTERM: acted on between two operations, never inside one."""

from __future__ import annotations

import contextlib
import signal
import types
from collections.abc import Callable, Generator
from typing import Any


class Termination:
  """Does something when the process is asked to end, but not inside a block of `hold`, and then ends it."""

  def __init__(self) -> None:
    self._holds, self._asked = 0, False
    self._act: Callable[[], None] | None = None
    self._old_handler: Any = None

  def watch(self, act: Callable[[], None]) -> None:
    """Calls `act` at the next SIGTERM; the signal's former handler is called after it."""
    self.stop()

    def handle(_: int, __: types.FrameType | None) -> None:
      if self._holds:
        self._asked = True
      else:
        self._end()

    self._act, self._old_handler = act, signal.signal(signal.SIGTERM, handle)

  def stop(self) -> None:
    """Puts the former handler back."""
    if self._act is not None:
      self._act = None
      signal.signal(signal.SIGTERM, self._old_handler)

  @contextlib.contextmanager
  def hold(self) -> Generator[None]:
    """Puts off what SIGTERM asks for until the block, and every block around it, is left."""
    self._holds += 1
    try:
      yield
    finally:
      self._holds -= 1
    if self._asked and not self._holds:
      self._end()

  def _end(self) -> None:
    if self._act is not None:
      with self.hold():
        self._act()
        self._asked = False  # a second signal asked for the same
    self._asked = False  # closed meanwhile, and the former handler may return
    self.stop()
    signal.raise_signal(signal.SIGTERM)
