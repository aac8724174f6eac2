"""SIGTERM and Ctrl-C as a flag that a training loop reads after each step."""

from __future__ import annotations

import os
import signal
import threading
import types
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.errors import HostError
from nnx_parallel.hosts.heartbeat import STOPPED, beat


class StopSignals:
  """A context manager in which SIGTERM and the first Ctrl-C ask the loop to stop, and do not end the process.

  At the end of the block, the earlier signal handlers are restored (a handler that was set within the block
  stays), and they get the signal that arrived. So the process ends as usual, only later. After SIGTERM, if
  there was no handler before the block, the exit code is 75, which says that the loop ended in order; 143
  would not say so. An exception that leaves the block has priority. A second Ctrl-C ends the process
  immediately. In a forked process, such as a worker that reads data, every signal ends the process
  immediately.

  In a job of several processes, the preemption service of JAX handles the signal, and it handles SIGTERM
  only: if one process gets SIGTERM, all processes agree on the step after which they stop. If this service is
  switched off (`jax_enable_preemption_service`), the signals act as without this class. So they do in a job
  of one process, if the block is not in the main thread.

  Example:
    >>> import nnx_parallel as nxp
    >>> with nxp.hosts.StopSignals() as stop:
    ...   for step in range(1, 4):
    ...     if stop.asked(step):  # after each update
    ...       break  # save here
    >>> step
    3
  """

  def __init__(self) -> None:
    self._former: dict[int, Any] = {}
    self._came: int | None = None
    self._together = False
    self._process: int | None = None  # that is in the block

  @check_arguments(HostError)
  def asked(self, step: int) -> bool:
    """Returns whether to stop now; the answer is the same on all processes.

    Args:
      step: the number of the last step. Each process must call `asked` after each step.

    Returns:
      True after a signal has arrived; in a job of several processes, after the step on which all processes
      agreed.
    """
    beat(step)
    if not jax.distributed.is_initialized():
      return self._came is not None
    if not jax.config.jax_enable_preemption_service:  # pyright: ignore
      return False
    self._together = multihost_utils.reached_preemption_sync_point(step) or self._together
    return self._together

  def __enter__(self) -> Self:
    if jax.distributed.is_initialized() or threading.current_thread() is not threading.main_thread():
      return self
    self._came, self._process = None, os.getpid()
    for number in (signal.SIGTERM, signal.SIGINT):
      former = signal.getsignal(number)
      # An ignored signal stays ignored; None is a handler that Python cannot restore.
      if former not in (signal.SIG_IGN, None):
        self._former[number] = former
        signal.signal(number, self._handle)
    return self

  def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
    self._process = None
    for number, former in self._former.items():
      if signal.getsignal(number) == self._handle:  # not a handler that was set within the block: it stays
        signal.signal(number, former)
    if error is not None:
      return
    if self._together:
      raise SystemExit(STOPPED)
    if self._came is None:
      return
    former = self._former[self._came]
    if not callable(former):
      # Not killed, so open files can be closed.
      raise SystemExit(STOPPED if self._came == signal.SIGTERM else 128 + self._came)
    former(self._came, None)

  def _handle(self, number: int, frame: types.FrameType | None) -> None:
    again = number == signal.SIGINT and self._came is not None
    # In a forked worker, or after the block, where this handler may have been kept, nothing reads the flag.
    if again or os.getpid() != self._process:
      self._pass_on(number, frame, again=again)
      return
    self._came = number
    if number == signal.SIGINT:
      # Not print: the interrupted code may be inside a print.
      os.write(2, b"\ninterrupted: stopping after this step; again to end at once\n")

  def _pass_on(self, number: int, frame: types.FrameType | None, *, again: bool) -> None:
    former = self._former[number]
    if not callable(former):
      signal.signal(number, former)
      signal.raise_signal(number)
      return
    outer = getattr(former, "__self__", None)
    if again and isinstance(outer, StopSignals):
      outer._came = number  # the first signal counts for both blocks
    former(number, frame)
