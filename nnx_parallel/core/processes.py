"""Messages between the processes of a job, through JAX's coordinator, without the devices."""

from __future__ import annotations

import collections
import contextlib
import itertools
import re
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # tests/test_upstream.py checks the private parts

from nnx_parallel.errors import HostError

LONGEST_S = 3600.0
_PATIENCE_S = 60.0  # then process 0 says for whom it waits
_uses: dict[str, itertools.count[int]] = collections.defaultdict(itertools.count)
_old_keys: dict[str, tuple[str, ...]] = {}  # of the last answers, on process 0


def wait_for_all(name: str, timeout: float) -> None:
  """Waits until all processes have come to `name`, equally often; a `HostError` names those that did not."""
  key = f"nnx_parallel/{name}/{next(_uses[name])}"
  _wait(key, name, timeout)
  with contextlib.suppress(RuntimeError):
    _client().key_value_delete(f"{key}/{jax.process_index()}")


class Exchange:
  """A text of each process, from which process 0 makes one answer for all; on any thread."""

  def __init__(self, name: str):
    self._name, self._key = name, f"nnx_parallel/{name.replace('/', ':')}/{next(_uses[name])}"

  def warn(self) -> None:
    """Says, before `answer`, that this process has failed, to those that look by `is_warned`."""
    _client().key_value_set(f"{self._key}:warned", "", allow_overwrite=True)

  def is_warned(self) -> bool:
    """Whether a process has failed already. It is one message."""
    with contextlib.suppress(RuntimeError):  # not found
      _client().key_value_try_get(f"{self._key}:warned")
      return True
    return False

  def answer(self, text: str, decide: Callable[[list[str]], str], timeout: float = LONGEST_S) -> str:
    """Waits until all have given their texts; returns what `decide`, which must not raise, makes of them."""
    client, me = _client(), jax.process_index()
    _wait(self._key, self._name, timeout, text)
    answer = f"{self._key}:answer"
    if me == 0:
      found = {int(key.rpartition("/")[2]): said for key, said in client.key_value_dir_get(f"{self._key}/")}
      said = decide([found[process] for process in range(jax.process_count())])
      # All processes are here, so none still reads the previous answer.
      for old in _old_keys.pop(self._name, ()):
        client.key_value_delete(old)
      _old_keys[self._name] = (f"{self._key}/", f"{self._key}:warned", answer)
      client.key_value_set(answer, said)
      return said
    try:
      return client.blocking_key_value_get(answer, max(1, round(1000 * timeout)))
    except RuntimeError as error:
      raise _not_together(self._name, timeout, str(error), [0]) from error


def missing_tasks(text: str) -> list[int]:
  """The processes that the runtime's error names as missing at a barrier, or as dead."""
  found = re.search(r"timed out task names:\s*((?:\d+\s*\n)+)", text)
  numbers = found[1].split() if found else re.findall(r"Task (\d+) heartbeat timeout", text)
  return sorted({int(number) for number in numbers})


def _client() -> Any:
  return distributed.global_state.client


def _wait(key: str, name: str, timeout: float, text: str = "") -> None:
  client, here = _client(), f"{key}/"

  def missing() -> list[int]:
    came = {int(one.rpartition("/")[2]) for one, _ in client.key_value_dir_get(here)}
    return sorted({*range(jax.process_count())} - came)

  def show() -> None:
    with contextlib.suppress(RuntimeError):  # the coordinator may be gone
      print(f"process 0 waits for processes {missing()} to come to {name!r}", file=sys.stderr, flush=True)

  patience = threading.Timer(_PATIENCE_S, show)
  patience.daemon = True
  if jax.process_index() == 0:
    patience.start()
  try:
    client.key_value_set(f"{here}{jax.process_index()}", text)
    client.wait_at_barrier(key, max(1, round(1000 * timeout)))
  except RuntimeError as error:  # JaxRuntimeError is a subclass
    absent = missing_tasks(str(error))
    with contextlib.suppress(RuntimeError):
      absent = missing() or absent
    raise _not_together(name, timeout, str(error), absent) from error
  finally:
    patience.cancel()


def _not_together(name: str, timeout: float, text: str, missing: list[int]) -> HostError:
  who = f"processes {missing} did not come" if missing else "not all processes connected"
  return HostError(
    f"{who} to {name!r} within {timeout:g} s.",
    details=f"this is process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()};"
    f" {text.splitlines()[0] if text else ''}",
    fix="read the log of the first of them: it failed, hangs, took another branch, or needs a longer"
    " timeout=.",
  )
