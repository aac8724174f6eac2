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
  flip(data_of(store, 2))
  with pytest.raises(CheckpointError, match=r"step 2 is damaged: model/\w+ cannot be read"):
    checkpointer.restore(target_of(trees[2]))
  assert checkpointer.verify(2)
  with pytest.warns(UserWarning, match="step 2 was passed over"):
    assert_same(checkpointer.restore(target_of(trees[1]), on_corrupt="fallback"), trees[1])


def test_folders_of_others_and_complete_steps_are_left_alone(store):
  (store / "5").mkdir()
  (store / "5" / "thesis.txt").touch()
  checkpointer = Checkpointer(store)
  with pytest.raises(CheckpointError, match="was not written by nnx_parallel"):
    checkpointer.save(5, arrays())
  checkpointer.save(6, arrays())
  with pytest.raises(
    CheckpointError,
    match=r"(?s)cannot save step 6: it exists .*renames are not atomic",
  ):
    checkpointer.save(6, arrays(), overwrite=True)
  assert names(store) == ["5", "6"]
  assert (store / "5" / "thesis.txt").exists()


def test_a_store_that_nothing_here_can_open():
  with pytest.raises(CheckpointError, match=r"cannot open nowhere://run: no file system for it is installed"):
    Checkpointer("nowhere://run")


def test_the_store_is_asked_once_for_all_files(store, monkeypatch):
  checkpointer = Checkpointer(store)
  checkpointer.save(1, arrays())
  checkpointer.save(2, arrays())
  calls = {"all_files": [], "stat": []}
  for owner, name in ((storage, "all_files"), (type(checkpointer.directory), "stat")):
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, real=real, n=name: calls[n].append(1) or real(*given))
  assert checkpointer.latest() == 2
  assert len(calls["all_files"]) == 1
  assert len(calls["stat"]) < 5


def test_a_run_that_continues_from_an_older_step_marks_the_later_ones(store):
  trees = {step: arrays(step) for step in (1, 2, 3)}
  with Checkpointer(store) as checkpointer:
    for step in (1, 2):
      checkpointer.save(step, trees[step])
    checkpointer.restore(target_of(trees[1]), 1)
    with pytest.warns(UserWarning, match=r"the later steps \[2\] in .* were set aside"):
      checkpointer.save(3, trees[3])
    assert (checkpointer.steps(), names(store)) == ([1, 3], ["1", "2", "2.nnx-aside", "3"])
    checkpointer.restore(target_of(trees[1]), 1)
    with pytest.warns(UserWarning, match=r"the later steps \[3\] in .* were set aside"):
      checkpointer.save(2, trees[2])
    assert (checkpointer.steps(), names(store)) == ([1, 2], ["1", "2", "3", "3.nnx-aside"])
    assert_same(checkpointer.restore(target_of(trees[2])), trees[2])
  with Checkpointer(store, max_to_keep=2) as checkpointer:
    checkpointer.save(4, trees[1])
  assert names(store) == ["2", "4"]
