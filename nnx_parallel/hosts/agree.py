"""Barriers between processes, and work for one process."""

from __future__ import annotations

import jax

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.processes import wait_for_all
from nnx_parallel.errors import HostError


def main_process() -> bool:
  """Returns whether this is process 0, which prints, writes files and talks to other services.

  Do not make calls under `if main_process():` that all processes must make (steps, `to_host`,
  `Checkpointer.save`).

  Returns:
    True on process 0, and in a job of one process.

  Example:
    >>> import nnx_parallel as nxp
    >>> if nxp.hosts.main_process():
    ...   print("once")
    once
  """
  return jax.process_index() == 0


@check_arguments(HostError)
def barrier(name: str, *, timeout: float = 300) -> None:
  """Waits until all processes have called `barrier` with the same name the same number of times.

  The barrier does not wait for earlier work on the devices. In a job of one process, it returns immediately.

  Args:
    name: the reason for the wait. The error shows it if a process does not arrive.
    timeout: the time to wait in seconds, counted from the first process that waits. The runtime checks about
      once a second.

  Raises:
    HostError: a process did not arrive in time; the message names it. All processes that wait raise the
      error, and so do processes that arrive later.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.hosts.barrier("the data is there", timeout=60)
  """
  if jax.process_count() > 1:
    wait_for_all(name, timeout)
