import dataclasses
import shutil
from unittest import mock

import jax
import numpy as np
import pytest
from etils import epath

import nnx_parallel as nxp
from checkpoint.runs import assert_same, data_of, file_with, flip, target_of
from nnx_parallel.checkpoint import array_io, manifest
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.damage import DamagedError
from nnx_parallel.errors import CheckpointError
from searches import torture


def test_damage_to_any_file_is_found_and_named():
  # The long form is `make torture`.
  found, problems = torture.corruptions(20, seed=1)
  assert problems == []
  assert found["named"] + found["harmless"] == 20


def test_a_flipped_bit_names_the_leaf_and_its_files(saved):
  directory, trees = saved
  flip(data_of(directory, 2))
  checkpointer = Checkpointer(directory)
  text = r"step 2 is damaged: model/\w+ cannot be read \(files under model\)(.*\n)*  Fix: .*=\"fallback\"\)"
  with pytest.raises(CheckpointError, match=text):
    checkpointer.restore(target_of(trees[2]))
  assert checkpointer.verify(2).keys() & {"model/w", "model/b"}
  assert checkpointer.verify(1) == {}


@pytest.mark.parametrize("mesh", [None, "x"])
def test_a_wrong_bit_is_found_in_the_one_array_that_has_it(tmp_path, mesh):
  layout = jax.NamedSharding(nxp.make_mesh(x=8), jax.P("x"))
  tree = {name: jax.device_put(np.full((64, 64), n, np.float32), layout) for name, n in (("a", 1), ("b", 2))}
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, tree)
  row = np.full(64, 2.0, np.float32).tobytes()
  file = file_with(tmp_path, 1, row)
  at = file.read_bytes().index(row)
  flip(file, bit=8 * (at + 100) + 3)
  target = target_of(tree, nxp.make_mesh(y=4, devices=jax.devices()[:4]) if mesh else None)
  with pytest.raises(CheckpointError, match=r"step 1 is damaged: model/b cannot be read(.*\n)*.*igest"):
    checkpointer.restore(target)
  assert_same(checkpointer.restore(target, only=["a"])["a"], tree["a"])
  assert list(checkpointer.verify(1)) == ["model/b"]


def test_fallback_takes_the_newest_good_step_and_says_so(saved):
  directory, trees = saved
  flip(data_of(directory, 2))
  checkpointer = Checkpointer(directory)
  with pytest.warns(UserWarning, match="step 2 was passed over: step 2 is damaged"):
    again = checkpointer.restore(target_of(trees[1]), on_corrupt="fallback")
  assert_same(again, trees[1])
  assert checkpointer.restored.step == 1
  flip(data_of(directory, 1))
  damaged = pytest.raises(CheckpointError, match="step 1 is damaged")
  with pytest.warns(UserWarning, match="step 2 was"), damaged:
    checkpointer.restore(target_of(trees[1]), on_corrupt="fallback")


@pytest.mark.parametrize("text", [r"is missing", r"has [\d,]+ bytes instead of [\d,]+"])
def test_metadata_is_checked_before_reading(saved, text):
  directory, trees = saved
  record = dataclasses.replace(Checkpointer(directory).metadata(2), step=3)
  for name in ("model/manifest.ocdbt", "model/_METADATA", "_CHECKPOINT_METADATA"):
    shutil.copytree(directory / "2", directory / "3")
    manifest.write(record, epath.Path(directory / "3"))
    file = directory / "3" / name
    file.unlink() if text == "is missing" else file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=f"step 3 is damaged: {name} {text}"):
      Checkpointer(directory).restore(target_of(trees[2]), 3)
    shutil.rmtree(directory / "3")


def test_formats_of_other_versions(saved):
  directory, trees = saved
  checkpointer = Checkpointer(directory)
  record = checkpointer.metadata(2)
  manifest.write(dataclasses.replace(record, format=7), checkpointer.directory / "2")
  text = r"it has format 7, and this version reads format 6\.\n  Fix: install the nnx_parallel"
  with pytest.raises(CheckpointError, match=text):
    checkpointer.restore(target_of(trees[2]), on_corrupt="fallback")


def test_a_missing_manifest_is_damage(saved):
  directory, trees = saved
  checkpointer = Checkpointer(directory)
  checkpointer.save(3, trees[2])
  (directory / "2" / "nnx_parallel.json").unlink()
  assert_same(checkpointer.restore(target_of(trees[2])), trees[2])  # an old one is in nobody's way
  (directory / "3" / "nnx_parallel.json").unlink()
  text = r"3 is damaged, or something else wrote it: nnx_parallel\.json is missing\.\n  Fix: restore another"
  with pytest.raises(CheckpointError, match=text):
    checkpointer.restore(target_of(trees[1]))
  warned = [pytest.warns(UserWarning, match=f"step {n} was passed over") for n in (3, 2)]
  with warned[0], warned[1]:
    assert_same(checkpointer.restore(target_of(trees[1]), on_corrupt="fallback"), trees[1])
  assert checkpointer.latest() == 1
  assert checkpointer.verify(1) == {}
  for step in (2, 3, "latest"):
    assert list(checkpointer.verify(step)) == ["nnx_parallel.json"]
  text = r"(?s)cannot save step 2: .* was not written by nnx_parallel, or is damaged.*Fix: move that fold"
  with pytest.raises(CheckpointError, match=text):
    Checkpointer(directory).save(2, trees[2], overwrite=True)
  with pytest.warns(UserWarning, match=r"the run continues from step 1, so the later steps \[2, 3\]"):
    checkpointer.save(2, trees[2])
  assert (checkpointer.steps(), checkpointer.latest()) == ([1, 2], 2)


def test_latest_skips_what_is_not_whole(saved):
  directory, _ = saved
  (directory / "7").mkdir()
  shutil.copytree(directory / "2", directory / "8")
  (directory / "8" / "nnx_parallel.json").unlink()
  shutil.copytree(directory / "2", directory / "9")
  data_of(directory, 9).unlink()
  checkpointer = Checkpointer(directory)
  assert checkpointer.latest() == 2
  assert checkpointer.steps() == [1, 2, 9]


def test_a_limit_on_threads_is_no_damage(saved, monkeypatch):
  directory, trees = saved
  limited = mock.Mock(side_effect=RuntimeError("can't start new thread"))
  with monkeypatch.context() as patch:
    patch.setattr(array_io, "_open", limited)
    text = r"(?s)cannot read .*can.t start new thread.*not a sign of damage"
    with pytest.raises(CheckpointError, match=text) as error:
      Checkpointer(directory).restore(target_of(trees[2]), on_corrupt="fallback")
  assert not isinstance(error.value, DamagedError)
  assert_same(Checkpointer(directory).restore(target_of(trees[2])), trees[2])
