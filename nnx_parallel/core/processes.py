"""Messages between the processes of a job, through JAX's coordinator, without the devices."""

from __future__ import annotations

import collections
import contextlib
import itertools
import re
import socket
from typing import Any

import jax
from jax._src import distributed  # tests/test_upstream.py checks the private parts

from nnx_parallel.errors import HostError

LONGEST_S = 3600.0
_uses: dict[str, itertools.count[int]] = collections.defaultdict(itertools.count)
_old_keys: dict[str, str] = {}


def wait_for_all(name: str, timeout: float) -> None:
  """Waits until all processes have called `barrier` with the same name, equally often.

  A `HostError` names the processes that did not come within `timeout` seconds.
  """
  _wait(f"nnx_parallel/{name}/{next(_uses[name])}", name, timeout)


class Exchange:
  """A text of each process, for all processes; on any thread.

  All processes make it for the same purpose, `name`, and call `all` equally often.
  """

  def __init__(self, name: str):
    self._name, self._key = name, f"nnx_parallel/{name.replace('/', ':')}/{next(_uses[name])}"

  def say(self, text: str) -> None:
    """Says this process's text, without waiting."""
    _client().key_value_set(f"{self._key}/{jax.process_index()}", text)

  def so_far(self) -> dict[int, str]:
    """The texts so far, by process."""
    found = _client().key_value_dir_get(f"{self._key}/")
    return {int(key.rpartition("/")[2]): text for key, text in found}

  def all(self, timeout: float = LONGEST_S) -> list[str]:
    """Waits until all have said theirs, and returns the texts by process.

    A `HostError` names the processes that did not come within `timeout` seconds.
    """
    _wait(self._key, self._name, timeout)
    found = self.so_far()
    # All processes are here, so no process still reads the previous texts.
    mine = f"{self._key}/{jax.process_index()}"
    if old := _old_keys.pop(self._name, None):
      _client().key_value_delete(old)
    _old_keys[self._name] = mine
    return [found[process] for process in range(jax.process_count())]


def missing_tasks(text: str) -> list[int]:
  """The processes that the runtime's error names as missing at a barrier, or as dead.

  Example:
    >>> missing_tasks("UNAVAILABLE: Task 3 heartbeat timeout. This indicates that")
    [3]
  """
  found = re.search(r"timed out task names:\s*((?:\d+\s*\n)+)", text)
  numbers = found[1].split() if found else re.findall(r"Task (\d+) heartbeat timeout", text)
  return sorted({int(number) for number in numbers})


def _client() -> Any:
  return distributed.global_state.client


def _wait(key: str, name: str, timeout: float) -> None:
  client, here = _client(), f"{key}:here/"
  mine = f"{here}{jax.process_index()}"
  try:
    client.key_value_set(mine, "")
    client.wait_at_barrier(key, max(1, round(1000 * timeout)))
  except RuntimeError as error:  # JaxRuntimeError is a subclass
    missing = missing_tasks(str(error))
    with contextlib.suppress(RuntimeError):  # the coordinator may be gone
      came = {int(one.rpartition("/")[2]) for one, _ in client.key_value_dir_get(here)}
      missing = sorted({*range(jax.process_count())} - came) or missing
    raise _not_together(name, timeout, str(error), missing) from error
  with contextlib.suppress(RuntimeError):
    client.key_value_delete(mine)


def _not_together(name: str, timeout: float, text: str, missing: list[int]) -> HostError:
  who = f"processes {missing} did not come" if missing else "not all processes connected"
  return HostError(
    f"{who} to {name!r} within {timeout:g} s.",
    details=f"this is process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()};"
    f" {text.splitlines()[0] if text else ''}",
    fix="read the log of the first of them: it failed, hangs, took another branch, or needs a longer"
    " timeout=.",
  )
