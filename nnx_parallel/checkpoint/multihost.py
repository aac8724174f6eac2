"""Agreement between processes before a call in which each process waits for the others."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import jax

from nnx_parallel.checkpoint.damage import DamagedError
from nnx_parallel.core.processes import Exchange
from nnx_parallel.errors import CheckpointError, NnxParallelError

T = TypeVar("T")
_SOUND, _DAMAGED, _FAILED = range(3)


@dataclasses.dataclass
class Block:
  """A block of the function `together`.

  Attributes:
    mine: the JSON value that this process sends to the other processes at the end of the block.
    found: after the block, the value of each process.
  """

  mine: Any = None
  found: list[Any] = dataclasses.field(default_factory=list[Any])
  exchange: Exchange | None = None

  def wait_for(self, wait: Callable[[float], object]) -> None:
    """Calls `wait(seconds)` until it raises no `TimeoutError`, or another process has failed."""
    while True:
      try:
        wait(1.0)
        return
      except TimeoutError:
        said = self.exchange.so_far().values() if self.exchange is not None else ()
        if any(json.loads(text)["code"] != _SOUND for text in said):
          return  # the end of the block raises


@contextlib.contextmanager
def together(name: str = "together") -> Generator[Block]:
  """A block that fails on every process when it fails on one, so that no process waits forever.

  All processes raise a `DamagedError` or no process does: no process may take an older step alone. Blocks on
  another thread, which meet the other blocks in any order, have another name.
  """
  block = Block()
  if jax.process_count() == 1:
    yield block
    block.found = [block.mine]
    return
  error: Exception | None = None
  block.exchange = Exchange(name)
  try:
    yield block
  except Exception as caught:  # noqa: BLE001 (raised again, once the other processes know)
    error = caught
  code = _SOUND if error is None else _DAMAGED if isinstance(error, DamagedError) else _FAILED
  block.exchange.say(json.dumps({"code": code, "what": _what(error), "value": block.mine}))
  said = [json.loads(text) for text in block.exchange.all()]
  worst = max(one["code"] for one in said)
  if error is not None and code == worst:
    raise error
  if worst != _SOUND:
    kind = DamagedError if worst == _DAMAGED else CheckpointError
    failed = [process for process, one in enumerate(said) if one["code"] == worst]
    raise kind(
      f"processes {failed} failed, so this process stopped too.",
      details=f"process {failed[0]}: {said[failed[0]]['what']}",
      fix="read the error of the first of them.",
    ) from error
  block.found = [one["value"] for one in said]


def _what(error: Exception | None) -> str:
  if isinstance(error, NnxParallelError):
    return f"{error.what} {error.details}".strip()[:1000]
  return "" if error is None else f"{type(error).__name__}: {error}"[:1000]


def require_same(what: str, text: str) -> None:
  """Raises on every process unless all pass the same text."""
  with together() as block:
    block.mine = hashlib.sha256(text.encode()).hexdigest()
  others = [process for process, one in enumerate(block.found) if one != block.found[0]]
  if others:
    raise CheckpointError(
      f"the processes do not agree on {what}.",
      details=f"processes {others} differ from process 0; this is process {jax.process_index()}: "
      f"{text[:200]}",
      fix="make the same call with the same arguments on every process.",
    )


def decided(function: Callable[[], T]) -> T:
  """The function's result on process 0, a JSON value: other processes may not see the same files yet."""
  with together() as block:
    if jax.process_index() == 0:
      block.mine = function()
  return block.found[0]


def added_up(numbers: Sequence[int]) -> list[int]:
  """The sums over all processes, modulo 2**32. Each process passes equally many numbers."""
  with together() as block:
    block.mine = [int(number) for number in numbers]
  return summed(block.found)


def summed(shares: Sequence[Sequence[int]]) -> list[int]:
  """Adds up the numbers of each process, modulo 2**32.

  Example:
    >>> summed([[0, 5], [3, 2**32 - 1]])
    [3, 4]
  """
  return [sum(column) % 2**32 for column in zip(*shares, strict=True)]
