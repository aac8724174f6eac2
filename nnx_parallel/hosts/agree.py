"""Barriers between processes, and work for one process of a host."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import jax

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.processes import Exchange, wait_for_all
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


@check_arguments(HostError)
def once_per_host(function: Callable[[], object], *, timeout: float = 1800) -> bool:
  """Calls a function on one process of each host. All processes wait until all hosts are done.

  Use it for downloads and for files on a local disk. Hosts are distinguished by their host names (in
  containers, by the name of the container). On each host, the process with the lowest number makes the call.

  Args:
    function: a function without arguments. Its result is discarded.
    timeout: seconds to wait for the slowest host.

  Returns:
    Whether this process made the call.

  Raises:
    Exception: the function's error, on the process that made the call.
    HostError: the function failed on another process, or a process did not arrive in time; the message names
      the process.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.hosts.once_per_host(lambda: print("downloading"))
    downloading
    True
  """
  if jax.process_count() == 1:
    function()
    return True
  hosts = Exchange("the names of the hosts").answer(socket.gethostname(), json.dumps, timeout)
  mine = json.loads(hosts).index(socket.gethostname()) == jax.process_index()
  error: Exception | None = None
  if mine:
    try:
      function()
    except Exception as caught:  # noqa: BLE001 (raised again, once the other processes know)
      error = caught
  ends = Exchange("once_per_host").answer("" if error is None else "failed", json.dumps, timeout)
  failed = [process for process, text in enumerate(json.loads(ends)) if text]
  if error is not None:
    raise error
  if failed:
    raise HostError(f"once_per_host failed on processes {failed}.", fix="read the log of the first of them.")
  return mine
