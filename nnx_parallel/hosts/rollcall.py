"""A roll call of all processes before JAX's runtime starts.

JAX ends a process whose peers do not come (SIGABRT, no Python error), and does not say which. So process 0
first listens on the coordinator's port, and everyone reports there. The port is free again before JAX binds
it.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from nnx_parallel.errors import HostError


def roll_call(address: str, count: int, process: int, timeout: float) -> None:
  """Returns on all processes if all processes are there; otherwise raises on all of them."""
  host, port = address.rsplit(":", 1)
  deadline = time.monotonic() + timeout
  if process == 0:
    problem = _call(int(port), count, deadline)
  else:
    problem = _answer(host.strip("[]"), int(port), {"process": process, "count": count}, deadline)
  if problem:
    raise HostError(
      problem,
      details=f"this is process {process} of {count} on {socket.gethostname()}, coordinator {address},"
      f" timeout {timeout:g} s",
      fix="start every process with the same address and count and its own number; read the log"
      " of missing processes; open the port between the hosts; or raise timeout=.",
    )


def _call(port: int, count: int, deadline: float) -> str:
  """Process 0: returns the error, or an empty string."""
  came: dict[int, socket.socket] = {}
  problem = ""
  try:
    dual = socket.has_dualstack_ipv6()  # on IPv6 and IPv4, where the machine has both
    family = socket.AF_INET6 if dual else socket.AF_INET
    server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
  except OSError as error:
    return f"process 0 cannot listen on port {port}: {error.strerror}."
  with server:
    while len(came) < count - 1 and not problem:
      server.settimeout(max(0.01, deadline - time.monotonic()))
      try:
        caller, _ = server.accept()
      except TimeoutError:
        missing = sorted({*range(1, count)} - came.keys())
        problem = f"processes {missing} of {count} did not come."
        break
      found = _read(caller)
      if found is None:
        caller.close()  # a port scan, or a health check of the cluster
        continue
      number = found["process"]
      if found["count"] != count:
        problem = f"process {number} counts {found['count']} processes, and process 0 counts {count}."
      elif number in came or not 0 < number < count:
        problem = f"two processes have the number {number}."
      if problem:
        _close(caller, problem)
      else:
        came[number] = caller
  # The listening socket is closed by now: JAX binds the port as soon as all have heard.
  for caller in came.values():
    _close(caller, problem)
  return problem


def _close(caller: socket.socket, problem: str) -> None:
  with caller:
    try:
      caller.sendall(json.dumps(problem).encode() + b"\n")
      caller.settimeout(5)
      caller.recv(1)  # the other side closes first, and so keeps the TIME_WAIT away from this port
    except OSError:
      return  # it is gone: JAX's own heartbeat will say so


def _read(connection: socket.socket) -> dict[str, int] | None:
  connection.settimeout(5)
  try:
    with connection.makefile("rb") as file:
      found: Any = json.loads(file.readline(1000))
    return {name: int(found[name]) for name in ("process", "count")}
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _answer(host: str, port: int, mine: dict[str, int], deadline: float) -> str:
  """Any other process: returns the error, or an empty string."""
  last = "nothing listens there"
  while (left := deadline - time.monotonic()) > 0:
    try:
      with socket.create_connection((host, port), timeout=min(left, 5)) as connection:
        connection.sendall(json.dumps(mine).encode() + b"\n")
        # Process 0 answers when all are there, or when its own time is over.
        connection.settimeout(left + 5)
        with connection.makefile("rb") as file:
          answer = file.readline()
        if answer:
          return str(json.loads(answer))
        last = "the connection was closed"
    except (OSError, ValueError) as error:
      last = str(error)
    time.sleep(0.05)
  return f"process {mine['process']} found no process 0 at {host}:{port}: {last}."
