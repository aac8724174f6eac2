"""A store without locks, fsync and renames: a local folder for which this package believes so."""

import pytest

from checkpoint.runs import arrays, assert_same, data_of, flip, target_of
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
  assert "model/manifest.ocdbt" in checkpointer.metadata().files


@pytest.fixture
def saved_there(store):
  checkpointer, trees = Checkpointer(store), {step: arrays(step) for step in (1, 2)}
  for step, tree in trees.items():
    checkpointer.save(step, tree)
  return store, checkpointer, trees


def test_an_unfinished_save_is_no_damage_and_a_lost_manifest_is(saved_there):
  store, checkpointer, trees = saved_there
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


def test_an_array_that_cannot_be_decoded_is_damage(saved_there):
  store, checkpointer, trees = saved_there
  flip(data_of(store, 2))
  with pytest.raises(CheckpointError, match=r"step 2 is damaged: model/\w+ cannot be read"):
    checkpointer.restore(target_of(trees[2]))
  assert checkpointer.verify(2)
  with pytest.warns(UserWarning, match="step 2 was passed over"):
    assert_same(checkpointer.restore(target_of(trees[1]), on_corrupt="fallback"), trees[1])
