"""Agreement between processes before a call in which each process waits for the others."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import jax

from nnx_parallel.core.processes import Exchange
from nnx_parallel.errors import CheckpointError, DamagedError, NnxParallelError

T = TypeVar("T")
_SOUND, _DAMAGED, _FAILED = range(3)
_MOST_NAMED = 8


@dataclasses.dataclass
class Block:
  """A block of the function `together`, and what each process says at its end."""

  mine: Any = None  # the JSON value that this process sends to process 0
  same: tuple[str, str] | None = None  # what must be the same on all processes: its name and its text
  # what process 0 makes of the values of all, once all have come without an error
  decide: Callable[[list[Any]], Any] = lambda found: found[0]
  found: Any = None  # after the block, the JSON value that `decide` returned, on each process
  exchange: Exchange | None = None

  def wait_for(self, wait: Callable[[float], object]) -> None:
    """Calls `wait(seconds)` until it raises no `TimeoutError`, or another process has failed."""
    while True:
      try:
        wait(1.0)
        return
      except TimeoutError:
        if self.exchange is not None and self.exchange.is_warned():
          return  # the end of the block raises


@contextlib.contextmanager
def together(name: str = "together") -> Generator[Block]:
  """A block that fails on every process when it fails on one, so that no process waits forever."""
  # All processes raise a `DamagedError` or no process does: no process may take an older step alone. Blocks
  # on another thread, which meet the other blocks in any order, have another name. It is one rendezvous.
  block = Block()
  if jax.process_count() == 1:
    yield block
    block.found = block.decide([block.mine])
    return
  error: Exception | None = None
  block.exchange = Exchange(name)
  try:
    yield block
  except Exception as caught:  # noqa: BLE001 (raised again, once the other processes know)
    error = caught
    block.exchange.warn()

  # The answer for all has a value; or the processes that failed, or those that differ, and in what.
  def judge(texts: list[str]) -> str:
    nonlocal error
    said = [json.loads(text) for text in texts]
    code = max(one["code"] for one in said)
    answer: dict[str, Any] = {"code": code}
    if code != _SOUND:
      failed = [process for process, one in enumerate(said) if one["code"] == code]
      answer |= {"failed": failed[:_MOST_NAMED], "what": said[failed[0]]["what"]}
    elif others := [process for process, one in enumerate(said) if one["same"] != said[0]["same"]]:
      what = next(one["same"][0] for one in said if one["same"])
      answer = {"code": _FAILED, "differ": others[:_MOST_NAMED], "what": what}
    else:
      try:
        answer["value"] = block.decide([one["value"] for one in said])
      except Exception as caught:  # noqa: BLE001 (raised below)
        error = caught
        answer = {"code": _code(error), "failed": [0], "what": _what(error)}
    return json.dumps(answer)

  text = "" if block.same is None else block.same[1]
  same = block.same and [block.same[0], hashlib.sha256(text.encode()).hexdigest()]
  mine = {"code": _code(error), "what": _what(error), "value": block.mine, "same": same}
  answer = json.loads(block.exchange.answer(json.dumps(mine), judge))
  if error is not None and _code(error) == answer["code"]:
    raise error
  if answer["code"] == _SOUND:
    block.found = answer["value"]
    return
  if "differ" in answer:
    raise CheckpointError(
      f"the processes do not agree on {answer['what']}.",
      details=f"processes {answer['differ']} differ from process 0; this is process {jax.process_index()}: "
      f"{text[:200]}",
      fix="make the same call with the same arguments on every process.",
    ) from error
  kind = DamagedError if answer["code"] == _DAMAGED else CheckpointError
  raise kind(
    f"processes {answer['failed']} failed, so this process stopped too.",
    details=f"process {answer['failed'][0]}: {answer['what']}",
    fix="read the error of the first of them.",
  ) from error


def _code(error: Exception | None) -> int:
  return _SOUND if error is None else _DAMAGED if isinstance(error, DamagedError) else _FAILED


def _what(error: Exception | None) -> str:
  if isinstance(error, NnxParallelError):
    return f"{error.what} {error.details}".strip()[:1000]
  return "" if error is None else f"{type(error).__name__}: {error}"[:1000]


def require_same(what: str, text: str) -> None:
  """Raises on every process unless all pass the same text."""
  with together() as block:
    block.same = what, text


def decide(function: Callable[[], T]) -> T:
  """The function's result on process 0, a JSON value: other processes may not see the same files yet."""
  with together() as block:
    block.decide = lambda _: function()
  return block.found


def any_process(mine: bool) -> bool:
  """Whether it is so on any process."""
  with together() as block:
    block.mine, block.decide = bool(mine), any
  return block.found
