"""Messages between processes, and blocks in which all fail or none: processes are threads of this one."""

import collections
import json
import threading
import time

import jax
import pytest

from nnx_parallel.core import processes, together
from nnx_parallel.errors import CheckpointError, DamagedError, HostError

COUNT = 3


class Coordinator:
  """The coordinator of JAX: values by key, and barriers."""

  def __init__(self):
    self.values, self.came, self.changed = {}, collections.Counter(), threading.Condition()

  def key_value_set(self, key, value, allow_overwrite=False):
    with self.changed:
      if key in self.values and not allow_overwrite:
        raise RuntimeError(f"ALREADY_EXISTS: {key}")
      self.values[key] = value
      self.changed.notify_all()

  def key_value_try_get(self, key):
    with self.changed:
      if key not in self.values:
        raise RuntimeError(f"NOT_FOUND: {key}")
      return self.values[key]

  def blocking_key_value_get(self, key, timeout_ms):
    self._wait(lambda: key in self.values, timeout_ms)
    return self.values[key]

  def key_value_dir_get(self, prefix):
    with self.changed:
      return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

  def key_value_delete(self, key):
    with self.changed:
      for own in [own for own in self.values if own == key or (key.endswith("/") and own.startswith(key))]:
        del self.values[own]

  def wait_at_barrier(self, key, timeout_ms):
    with self.changed:
      self.came[key] += 1
      self.changed.notify_all()
    self._wait(lambda: self.came[key] == COUNT, timeout_ms)

  def _wait(self, holds, timeout_ms):
    with self.changed:
      if not self.changed.wait_for(holds, timeout_ms / 1000):
        raise RuntimeError("in words of its own.")  # who is missing is known without them


class Counters(dict):
  """The counter of each purpose, for each process."""

  def __init__(self, me):
    self.me = me

  def __missing__(self, name):
    return iter(lambda: self.count(name), -1)

  def count(self, name):
    key = self.me(), name
    self[key] = self.get(key, -1) + 1
    return self[key]


@pytest.fixture
def job(monkeypatch):
  """Runs a function of the number of the process on each; gives what it returned or raised on each."""
  local, coordinator = threading.local(), Coordinator()
  monkeypatch.setattr(jax, "process_index", lambda: local.me)
  monkeypatch.setattr(jax, "process_count", lambda: COUNT)
  monkeypatch.setattr(processes, "_client", lambda: coordinator)
  monkeypatch.setattr(processes, "_uses", Counters(lambda: local.me))
  monkeypatch.setattr(processes, "_old_keys", {})

  def run(function):
    found = [None] * COUNT

    def one(me):
      local.me = me
      try:
        found[me] = function(me)
      except Exception as error:  # noqa: BLE001 (handed to the test)
        found[me] = error

    threads = [threading.Thread(target=one, args=(me,)) for me in range(COUNT)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    return found

  run.coordinator = coordinator
  return run


def test_an_answer_is_made_of_the_texts_of_all_in_order(job):
  def call(me):
    exchange = processes.Exchange("a/b")
    return [exchange.answer(f"{me}", "-".join), processes.Exchange("a/b").answer(f"{me + 5}", "+".join)]

  assert job(call) == [["0-1-2", "5+6+7"]] * COUNT


def test_old_messages_are_deleted(job):
  for _ in range(5):
    job(lambda me: processes.Exchange("x").answer("text", "".join))
  assert len(job.coordinator.values) <= COUNT + 1  # those of the last answer
  job(lambda me: processes.wait_for_all("y", 5))
  assert not [key for key in job.coordinator.values if "/y/" in key]


def test_a_warning_is_seen_before_the_answer(job):
  def call(me):
    exchange = processes.Exchange("w")
    before = exchange.is_warned()
    processes.wait_for_all("first", 5)
    if me == 1:
      exchange.warn()
      exchange.warn()  # again, without an error
    processes.wait_for_all("then", 5)
    return before, exchange.is_warned()

  assert job(call) == [(False, True)] * COUNT


def test_those_that_do_not_come_are_named(job):
  def call(me):
    if me != 1:
      processes.wait_for_all("start", 0.2)

  for me, error in enumerate(job(call)):
    if me == 1:
      assert error is None
    else:
      assert isinstance(error, HostError)
      assert "processes [1] did not come to 'start' within 0.2 s." in str(error)
      assert f"this is process {me} of {COUNT}" in str(error)
      assert "in words of its own" in str(error)


def test_an_answer_that_does_not_come_names_process_0(job):
  def call(me):
    return processes.Exchange("slow").answer("", lambda _: time.sleep(1) or "late", 0.3)

  found = job(call)
  assert found[0] == "late"
  assert all("processes [0] did not come" in str(error) for error in found[1:])


def test_the_processes_that_the_runtime_names():
  text = "Barrier timed out. Some timed out task names:\n2\n10\n\nother 7"
  assert processes.missing_tasks(text) == [2, 10]
  assert processes.missing_tasks("Task 4 heartbeat timeout, Task 3 heartbeat timeout") == [3, 4]
  assert processes.missing_tasks("DEADLINE_EXCEEDED") == []


OUTCOMES = {
  "value": lambda: None,
  "error": lambda: (_ for _ in ()).throw(ValueError("no space")),
  "damaged": lambda: (_ for _ in ()).throw(DamagedError("torn", details="at 3", fix="-")),
  "checkpoint": lambda: (_ for _ in ()).throw(CheckpointError("not there", details="in /x", fix="-")),
}


@pytest.mark.each_case
@pytest.mark.parametrize(
  "outcomes",
  [
    ("value", "value", "value"),
    ("value", "error", "value"),
    ("error", "value", "checkpoint"),
    ("value", "value", "damaged"),
    ("damaged", "error", "value"),
    ("checkpoint", "damaged", "damaged"),
    ("error", "error", "error"),
  ],
  ids=" ".join,
)
def test_all_fail_or_none(job, outcomes):
  """All raise a `DamagedError`, or none does: a process that took an older step alone would diverge."""

  def call(me):
    with together.together() as block:
      block.mine, block.decide = me, sum
      OUTCOMES[outcomes[me]]()
    return block.found

  found = job(call)
  if set(outcomes) == {"value"}:
    assert found == [3] * COUNT
    return
  assert all(isinstance(error, Exception) for error in found)
  torn = "damaged" in outcomes and not {"error", "checkpoint"} & {*outcomes}
  assert {isinstance(error, DamagedError) for error in found} == {torn}
  failed = [
    me for me, kind in enumerate(outcomes) if kind in (("damaged",) if torn else ("error", "checkpoint"))
  ]
  for me, error in enumerate(found):
    if me not in failed:
      assert f"processes {failed} failed, so this process stopped too." in str(error)
      assert f"process {failed[0]}: " in str(error)
      assert (error.__cause__ is None) == (outcomes[me] == "value")


def test_a_decision_that_fails_fails_on_all(job):
  def call(me):
    return together.decide(lambda: json.loads("{") if me == 0 else None)

  found = job(call)
  assert isinstance(found[0], json.JSONDecodeError)
  assert all("processes [0] failed" in str(error) and "JSONDecodeError" in str(error) for error in found[1:])


def test_the_decision_is_that_of_process_0(job):
  assert job(lambda me: together.decide(lambda: {"step": me + 7})) == [{"step": 7}] * COUNT


def test_any_process_may_say_so(job):
  assert job(lambda me: together.any_process(me == 2)) == [True] * COUNT
  assert job(lambda me: together.any_process(False)) == [False] * COUNT


def test_different_texts_are_told_to_all(job):
  assert job(lambda me: together.require_same("the step", "7")) == [None] * COUNT
  for me, error in enumerate(job(lambda me: together.require_same("the step", "8" if me == 2 else "7"))):
    assert isinstance(error, CheckpointError)
    assert "the processes do not agree on the step." in str(error)
    assert "processes [2] differ from process 0" in str(error)
    assert f"this is process {me}: {'8' if me == 2 else '7'}" in str(error)


def test_a_wait_ends_when_another_process_has_failed(job):
  waited = collections.Counter()

  def call(me):
    def wait(seconds):
      waited[me] += 1
      time.sleep(0.05)
      raise TimeoutError

    with together.together() as block:
      if me == 0:
        time.sleep(0.2)
        raise ValueError("full")
      block.wait_for(wait)

  found = job(call)
  assert isinstance(found[0], ValueError)
  assert all("ValueError: full" in str(error) for error in found[1:])
  assert waited[1] > 1
  assert waited[0] == 0


def test_one_process_alone_decides_by_itself():
  with together.together() as block:
    block.mine, block.decide = 4, lambda values: values * 2
  assert block.found == [4, 4]
  tries = iter([TimeoutError, None])

  def wait(seconds):
    if (error := next(tries)) is not None:
      raise error

  block.wait_for(wait)
  assert next(tries, "done") == "done"
  with pytest.raises(ZeroDivisionError), together.together():
    raise ZeroDivisionError
