"""Random histories of saves, restores, failures and kills, and what a power cut may leave of a save.

`make torture` tries many more histories: the variable RANDOM_HISTORIES is their number.
"""

import collections
import os
import random
import shutil
import threading
import warnings

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from checkpoint.runs import data_of
from nnx_parallel.checkpoint import manifest, storage
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.damage import DamagedError
from nnx_parallel.errors import CheckpointError

COUNT = int(os.environ.get("RANDOM_HISTORIES", "20"))
TARGET = {"w": np.zeros(3), "n": 0}
KEPT = {"all": None, "two": 2}  # the handles, and how many steps each keeps


# Where a save may end: after its arrays, with its manifest, on its way to its name, and while old ones go.
DISK = ("make_tree_durable", "make_durable", "_try_remove")
MOMENTS = [(manifest, "write"), *((storage, name) for name in DISK)]


class Killed(BaseException):
  """Ends a save as SIGKILL does: nothing that comes after it is done."""


full = lambda: OSError(28, "No space left on device")


def tree(value):
  return {"w": np.full(3, value, np.float64), "n": value}


def value_of(checkpointer, step=None):
  found = checkpointer.restore(TARGET, step, as_numpy=True)
  assert set(found["w"]) == {found["n"]}
  return found["n"]


class Histories(stateful.RuleBasedStateMachine):
  """Two Checkpointers of one directory, against a dict of what each step must hold."""

  def __init__(self):
    super().__init__()
    self.handles, self.values, self.resumed, self.next = {}, {}, {}, 0

  @stateful.initialize()
  def begin(self):
    self.directory = self.made()
    for name in KEPT:
      self.reopen(name, False)

  @stateful.rule(name=st.sampled_from(sorted(KEPT)), asynchronous=st.booleans())
  def reopen(self, name, asynchronous):
    if name in self.handles:
      self.handles[name].close()
    self.resumed[name] = None
    self.handles[name] = Checkpointer(self.directory, max_to_keep=KEPT[name], asynchronous=asynchronous)

  @stateful.rule(name=st.sampled_from(sorted(KEPT)), step=st.integers(1, 6), overwrite=st.booleans(),
    error=st.sampled_from([Killed, full]), moment=st.none() | st.sampled_from(MOMENTS))  # fmt: skip
  def save(self, name, step, overwrite, moment, error):
    handle, why = self.handles[name], ""
    resumed = self.resumed[name]  # the steps after it are set aside
    self.values = {one: value for one, value in self.values.items() if resumed is None or one <= resumed}
    before = dict(self.values)
    self.next += 1
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
      warnings.simplefilter("ignore")  # what could not be removed
      if moment is not None:
        patch.setattr(*moment, raising(error))
      try:
        handle.save(step, tree(self.next), overwrite=overwrite)
        handle.wait()
      except CheckpointError as refused:
        why = refused.what
      except Killed:
        why = "killed"
        self.reopen(name, handle._asynchronous)
    there = Checkpointer(self.directory).steps()
    is_saved = step in there and value_of(Checkpointer(self.directory), step) == self.next
    assert is_saved or why
    assert "it exists" not in why or (step in before and not (overwrite and self.local))
    assert "holds newer steps" not in why or step <= max(before)
    assert moment or not why or any(text in why for text in ("it exists", "holds newer steps"))
    if not is_saved:
      assert there == sorted(before)
      return
    self.resumed[name] = None
    self.values[step] = self.next
    assert set(there) <= self.values.keys()
    if len(there) < len(self.values):
      assert len(there) >= KEPT[name]
    self.values = {one: self.values[one] for one in there}
    assert step == max(there) or step in before
    assert Checkpointer(self.directory).latest() == max(there)

  @stateful.rule(name=st.sampled_from(sorted(KEPT)), data=st.data())
  def restore(self, name, data):
    if self.values:
      step = data.draw(st.sampled_from([None, *sorted(self.values)]))
      number = max(self.values) if step is None else step
      assert value_of(self.handles[name], step) == self.values[number]
      self.resumed[name] = number

  @stateful.rule(data=st.data(), bit=st.integers(0, 7))
  def damage(self, data, bit):
    """Flips a bit of a chunk, sees that this is noticed, and flips it back."""
    if not self.values:
      return
    step = data.draw(st.sampled_from(sorted(self.values)))
    file = data_of(self.directory, step)
    whole = file.read_bytes()
    file.write_bytes(bytes([*whole[:20], whole[20] ^ (1 << bit), *whole[21:]]))
    with pytest.raises(DamagedError):
      value_of(Checkpointer(self.directory), step)
    file.write_bytes(whole)

  @stateful.invariant()
  def every_step_holds_what_was_saved(self):
    if self.handles:
      reader = Checkpointer(self.directory)
      assert reader.steps() == sorted(self.values)
      assert reader.latest() == max(self.values, default=None)
      assert {step: value_of(reader, step) for step in self.values} == self.values

  def teardown(self):
    for handle in self.handles.values():
      handle.close()


def raising(error):
  def fail(*_, **__):
    raise error()

  return fail


@pytest.mark.cases(1)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.slow
def test_any_history_leaves_what_was_saved(tmp_path_factory, monkeypatch, local):
  monkeypatch.setattr(storage, "is_local", lambda _: local)
  Histories.made, Histories.local = lambda _: tmp_path_factory.mktemp("run"), local
  same = {
    "derandomize": "RANDOM_HISTORIES" not in os.environ,
    "suppress_health_check": [*hypothesis.HealthCheck],
  }
  settings = hypothesis.settings(max_examples=COUNT, stateful_step_count=12, deadline=None, **same)
  stateful.run_state_machine_as_test(Histories, settings=settings)


class Disk:
  """A directory as it is after each call to the file system, and what of it an fsync has put on the disk.

  A folder is the numbers of its files by name, a file its bytes.
  """

  CALLS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "remove")

  def __init__(self, root, patch):
    self.root, self.lock, self.moments = os.fspath(root), threading.RLock(), []
    self.numbered = {}  # descriptors: while one is open, no other file gets the same number
    self.now = {}
    self.look(self.root)
    self.synced = dict(self.now)
    for name in self.CALLS:
      patch.setattr(os, name, self.watched(getattr(os, name)))

  def watched(self, call):
    def observed(first, *rest, **options):
      with self.lock:
        result = call(first, *rest, **options)
        self.look(self.root)
        if call.__name__ == "fsync":
          self.sync(os.readlink(f"/proc/self/fd/{first}"))
        self.moments.append((dict(self.now), dict(self.synced)))
        return result

    return observed

  def number(self, path):
    found = os.lstat(path).st_ino
    if found not in self.numbered:
      self.numbered[found] = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    return found

  def look(self, path):
    try:
      number = self.number(path)
      if os.path.isdir(path):
        names = os.listdir(path)
        found = {name: self.look(os.path.join(path, name)) for name in names}
        self.now[number] = {name: inner for name, inner in found.items() if inner is not None}
      else:
        with open(path, "rb") as file:
          self.now[number] = file.read()
    except FileNotFoundError:  # a thread of TensorStore has renamed it
      return None
    return number

  def sync(self, path):
    if path.startswith(self.root) and (number := self.number(path)) in self.now:
      self.synced[number] = self.now[number]

  def after_a_power_cut(self, moment, survives):
    """Files by path; of what no fsync has put on the disk, there is what `survives()`, file by file."""
    now, synced = self.moments[moment]
    files = {}

    def walk(number, path):
      held = now[number]
      is_array = "/d/" in path  # TensorStore syncs these itself
      if not (is_array and isinstance(held, bytes)) and not survives():
        held = synced.get(number, type(held)())
      if isinstance(held, bytes):
        files[path] = held
        return
      files[path] = None
      for name, inner in held.items():
        walk(inner, f"{path}/{name}")

    walk(self.number(self.root), "")
    return files

  def close(self):
    for descriptor in self.numbered.values():
      os.close(descriptor)


def written(folder, files):
  for path, content in files.items():
    place = f"{folder}{path}"
    if content is None:
      os.makedirs(place, exist_ok=True)
    else:
      with open(place, "wb") as file:
        file.write(content)
  return folder


@pytest.mark.cases(1)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.slow
def test_a_power_cut_at_any_moment_leaves_the_last_step_or_the_new_one(tmp_path, overwrite):
  """Every prefix of a save's file operations, with all, none or some of its unsynced writes on the disk."""
  run, step = tmp_path / "run", 2 if overwrite else 3
  with Checkpointer(run) as checkpointer:
    for old in (1, 2):
      checkpointer.save(old, tree(old))
  before, after = {1: 1, 2: 2}, {2: 9} if overwrite else {2: 2, 3: 9}
  with pytest.MonkeyPatch.context() as patch:
    disk = Disk(run, patch)
    Checkpointer(run, max_to_keep=len(after)).save(step, tree(9), overwrite=overwrite)
  rng = random.Random(0)
  chances = [lambda: True, lambda: False, *[lambda: rng.random() < 0.5] * (1 if COUNT <= 20 else 20)]
  images = [disk.after_a_power_cut(m, chance) for m in range(len(disk.moments)) for chance in chances]
  disk.close()
  different = {repr(sorted(files.items())): files for files in images}.values()
  outcomes = collections.Counter()
  for place, files in enumerate(different):
    found = Checkpointer(written(tmp_path / str(place), files))
    values = {one: value_of(found, one) for one in found.steps()}
    assert all(values[one] in (before.get(one), after.get(one)) for one in values)
    assert found.latest() == max(values)
    assert values[max(values)] in (2, 9)
    assert all(found.verify(one) == {} for one in values)
    found.save(10, tree(10))  # which removes what is left of the other
    assert not [name for name in os.listdir(found.directory) if ".nnx-" in name]
    assert {one: value_of(found, one) for one in found.steps()} == values | {10: 10}
    outcomes[values[max(values)]] += 1
    shutil.rmtree(found.directory)
  assert len(outcomes) == 2
