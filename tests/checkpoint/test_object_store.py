"""A store without locks, fsync and renames: a local folder for which this package believes so."""

import threading

import pytest

from checkpoint.runs import arrays, assert_same, target_of
from nnx_parallel.checkpoint import manifest, storage
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.cli.command import main
from nnx_parallel.errors import CheckpointError


@pytest.fixture
def store(tmp_path, monkeypatch):
  def unknown(*_):
    raise AssertionError("not on an object store")

  monkeypatch.setattr(storage, "is_local", lambda _: False)
  monkeypatch.setattr(storage.os, "fsync", unknown)
  return tmp_path


def names(directory):
  return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_come_back_and_old_ones_go(store, asynchronous):
  trees = {step: arrays(step) for step in (1, 2, 3)}
  with Checkpointer(store, max_to_keep=2, asynchronous=asynchronous) as checkpointer:
    for step, tree in trees.items():
      checkpointer.save(step, tree)
    assert_same(checkpointer.restore(target_of(trees[3])), trees[3])
    assert checkpointer.verify() == {}
  assert names(store) == ["2", "3"]
  assert "model/w/zarr.json" in checkpointer.metadata().files


def test_an_unfinished_save_is_no_damage_and_a_lost_manifest_is(store):
  checkpointer = Checkpointer(store)
  trees = {step: arrays(step) for step in (1, 2)}
  for step, tree in trees.items():
    checkpointer.save(step, tree)
  (store / "2" / manifest.FILE).unlink()
  for suffix in (storage.SAVING, storage.DELETING):
    mark = store / f"2{suffix}"
    mark.touch()
    assert_same(checkpointer.restore(target_of(trees[1])), trees[1])
    assert main(["verify", str(store)]) == 0
    mark.unlink()
  with pytest.warns(UserWarning, match="step 2 was passed over"):
    assert_same(checkpointer.restore(target_of(trees[1]), on_corrupt="fallback"), trees[1])
  assert main(["verify", str(store)]) == 3


def test_an_array_that_cannot_be_decoded_is_damage(store):
  trees = {step: arrays(step) for step in (1, 2)}
  checkpointer = Checkpointer(store)
  for step, tree in trees.items():
    checkpointer.save(step, tree)
  chunk = min(path for path in (store / "2" / "model" / "w" / "c").rglob("*") if path.is_file())
  data = bytearray(chunk.read_bytes())
  data[-1] ^= 1  # of the checksum of its index
  chunk.write_bytes(data)
  with pytest.raises(CheckpointError, match=r"step 2 is damaged: model/w/c/0/0 does not have the contents"):
    checkpointer.restore(target_of(trees[2]))
  assert list(checkpointer.verify(2)) == ["model/w/c/0/0", "model/w"]
  with pytest.warns(UserWarning, match="step 2 was passed over"):
    assert_same(checkpointer.restore(target_of(trees[1]), on_corrupt="fallback"), trees[1])


def test_folders_of_others_and_complete_steps_are_left_alone(store):
  (store / "5").mkdir()
  (store / "5" / "thesis.txt").touch()
  checkpointer = Checkpointer(store)
  with pytest.raises(CheckpointError, match="was not written by nnx_parallel"):
    checkpointer.save(5, arrays())
  checkpointer.save(6, arrays())
  with pytest.raises(CheckpointError, match=r"cannot replace step 6 in .*: renames are not atomic there"):
    checkpointer.save(6, arrays(), overwrite=True)
  assert names(store) == ["5", "6"]
  assert (store / "5" / "thesis.txt").exists()


def test_a_store_that_nothing_here_can_open():
  with pytest.raises(CheckpointError, match=r"cannot open nowhere://run: no file system for it is installed"):
    Checkpointer("nowhere://run")


class Crowd:
  """A call that takes until another one is made at the same time, or a moment."""

  def __init__(self, call):
    self.call, self.inside, self.met, self.count = call, 0, threading.Event(), 0

  def __call__(self, *arguments):
    self.count, self.inside = self.count + 1, self.inside + 1
    if self.inside > 1:
      self.met.set()
    self.met.wait(0.1)
    self.inside -= 1
    return self.call(*arguments)


def test_the_store_is_asked_for_many_files_at_a_time(store, monkeypatch):
  tree = arrays()
  checkpointer = Checkpointer(store)

  def crowded(owner, name, call):
    with monkeypatch.context() as patch:
      # Without the descriptor of a method.
      crowd = Crowd(getattr(owner, name))
      patch.setattr(owner, name, lambda *arguments: crowd(*arguments))
      call()
    return crowd

  kind = type(checkpointer.directory)
  assert crowded(storage, "sha256", lambda: checkpointer.save(1, tree)).met.is_set()
  checkpointer.save(2, tree)
  # The sizes of all files are in one listing.
  assert crowded(storage, "all_files", lambda: checkpointer.latest()).count == 1
  assert crowded(kind, "stat", lambda: checkpointer.latest()).count < 5
  assert crowded(storage, "sha256", lambda: checkpointer.latest()).count == 0
  restored = crowded(storage, "sha256", lambda: checkpointer.restore(target_of(tree)))
  assert restored.met.is_set()
  assert restored.count <= len(checkpointer.metadata().files)
  assert_same(checkpointer.restore(target_of(tree)), tree)
