"""Ways in which a checkpoint could have lied, each of them once found by trying."""

import concurrent.futures
import errno
import gc
import os
import shutil
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from checkpoint.runs import arrays, assert_same, broken, data_of, make_plan, target_of
from nnx_parallel.checkpoint import array_io, lock, restore, storage
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.damage import VanishedError
from nnx_parallel.errors import CheckpointError


def test_a_manifest_of_another_step_is_damage(saved):
  directory, trees = saved
  shutil.copy(directory / "1" / "nnx_parallel.json", directory / "2" / "nnx_parallel.json")
  checkpointer = Checkpointer(directory)
  with pytest.raises(CheckpointError, match=r"step 2 is damaged: nnx_parallel.json is from step 1\."):
    checkpointer.restore(target_of(trees[2]))
  assert list(checkpointer.verify(2)) == ["nnx_parallel.json"]
  assert checkpointer.latest() == 1
  with pytest.warns(UserWarning, match="step 2 was passed over"):
    assert_same(checkpointer.restore(target_of(trees[1]), on_corrupt="fallback"), trees[1])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_arrays_of_64_bits_outside_of_their_scope(tmp_path, asynchronous):
  with jax.enable_x64(True):
    tree = {"w": jnp.arange(64, dtype=jnp.float64) / 3, "n": jnp.arange(64, dtype=jnp.int64) << 40}
  with Checkpointer(tmp_path, asynchronous=asynchronous) as checkpointer:
    checkpointer.save(1, tree)
    checkpointer.wait()
    assert checkpointer.verify() == {}
    found = checkpointer.restore(as_numpy=True)["model"]
  assert_same(found, tree)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["8", "4 explicit"])
def test_a_mesh_that_is_set_changes_nothing(tmp_path, name):
  plan = make_plan(name)
  model, optimizer = nxp.create_sharded_model(plan)
  with jax.set_mesh(plan.mesh):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model, optimizer)
    assert checkpointer.verify() == {}
    restored, _ = checkpointer.restore(plan)
  assert_same(restored, model)
  other = make_plan("2x4")
  with jax.set_mesh(other.mesh):
    assert_same(checkpointer.restore(other)[0], model)


def test_an_interrupted_wait_loses_no_error(tmp_path, monkeypatch):
  monkeypatch.setattr(storage, "make_tree_durable", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
  checkpointer = Checkpointer(tmp_path, asynchronous=True)
  checkpointer.save(1, arrays())
  pending = checkpointer._pending
  concurrent.futures.wait([pending])

  checkpointer._pending = interrupted = mock.Mock()
  interrupted.result.side_effect, interrupted.done.return_value = KeyboardInterrupt, False
  with pytest.raises(KeyboardInterrupt):
    checkpointer.wait()
  assert checkpointer._pending is interrupted
  checkpointer._pending = pending
  with pytest.raises(CheckpointError, match="cannot save step 1"):
    checkpointer.close()
  with pytest.raises(CheckpointError, match=r"cannot save step 2: this Checkpointer was closed\."):
    checkpointer.save(2, arrays())
  assert sorted(path.name for path in tmp_path.iterdir()) == [lock.LOCK]


def test_a_checkpointer_without_a_save_is_collected(tmp_path):
  checkpointer = Checkpointer(tmp_path, asynchronous=True)
  checkpointer.save(1, arrays())
  concurrent.futures.wait([checkpointer._pending])
  held = weakref.ref(checkpointer)
  del checkpointer
  gc.collect()
  assert held() is None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_what_says_nothing_of_the_files_is_no_damage(saved, monkeypatch, number):
  directory, trees = saved
  for owner, name in ((array_io, "_open"), (storage, "all_files")):
    with monkeypatch.context() as patch:
      patch.setattr(owner, name, broken(number))
      with pytest.raises(CheckpointError, match=rf"cannot read .*2.*: {os.strerror(number)}\.") as caught:
        Checkpointer(directory).restore(target_of(trees[2]), on_corrupt="fallback")
      assert "not a sign of damage" in str(caught.value)


def test_a_file_that_the_disk_cannot_read_is_damage(saved, monkeypatch):
  directory, trees = saved
  right, fail = storage.all_files, broken(errno.EIO)
  monkeypatch.setattr(storage, "all_files", lambda folder: (fail if folder.name == "2" else right)(folder))
  checkpointer = Checkpointer(directory)
  with pytest.warns(UserWarning, match="step 2 was passed over: step 2 is damaged: .* cannot be read"):
    assert_same(checkpointer.restore(target_of(trees[1]), on_corrupt="fallback"), trees[1])


def test_a_manifest_that_cannot_be_read(saved, monkeypatch):
  directory, trees = saved
  checkpointer, number, local = Checkpointer(directory), errno.EIO, type(Checkpointer(directory).directory)
  read = local.read_bytes

  def fail(self):
    if os.fspath(self).endswith("/2/nnx_parallel.json"):
      raise OSError(number, os.strerror(number))
    return read(self)

  monkeypatch.setattr(local, "read_bytes", fail)
  with pytest.warns(UserWarning, match=r"step 2 was passed over: .*json is damaged: it cannot be read"):
    assert_same(checkpointer.restore(target_of(trees[1]), on_corrupt="fallback"), trees[1])
  number = errno.EACCES
  with pytest.raises(CheckpointError, match=r"cannot read .*2/nnx_parallel.json: Permission denied\."):
    checkpointer.restore(target_of(trees[1]), 2, on_corrupt="fallback")


def test_a_live_pair_says_what_becomes_of_its_optimizer(tmp_path):
  plan = make_plan()
  model, optimizer = nxp.create_sharded_model(plan)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, model, optimizer)
  assert checkpointer.restore((model, optimizer), optimizer="drop") is model
  with pytest.raises(CheckpointError, match='optimizer="fresh" needs a plan'):
    checkpointer.restore((model, optimizer), optimizer="fresh")
  with pytest.raises(CheckpointError, match=r"missing  model/0\.dropout"):
    checkpointer.restore((model, optimizer, 1))


def test_extras_are_those_of_the_step_that_was_restored(saved):
  directory, trees = saved
  checkpointer = Checkpointer(directory)
  for step in (3, 4):
    data = {"samples": np.int64(step * 10), "rate": np.float32(0.5)}
    checkpointer.save(step, trees[1], extra={"data": data})
  checkpointer.restore(target_of(trees[1]), 3)
  assert checkpointer.restore_extra("data") == {"samples": 30, "rate": 0.5}
  assert checkpointer.restore_extra("data", step="latest")["samples"] == 40
  with pytest.warns(UserWarning, match="later steps"):
    checkpointer.save(5, trees[1], extra={"data": {"samples": 50}})
  assert checkpointer.restore_extra("data") == {"samples": 50}


def test_options_that_a_target_cannot_honour(tmp_path):
  plan = make_plan(optimizer=False)
  model = nxp.create_sharded_model(plan)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, model)
  for target in (plan, model, {"a": jnp.ones(2)}):
    with pytest.raises(CheckpointError, match='optimizer="fresh" needs a plan with an optimizer'):
      checkpointer.restore(target, optimizer="fresh")
  for target in (plan, model, {"a": model}):
    with pytest.raises(CheckpointError, match=f"as_numpy=True cannot be honoured: a {type(target).__name__}"):
      checkpointer.restore(target, as_numpy=True)


def test_an_optimizer_is_not_dropped_without_a_word(tmp_path):
  plan = make_plan()
  model, optimizer = nxp.create_sharded_model(plan)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, model, optimizer)
  alone = make_plan(optimizer=False)
  for target in (alone, model, nnx.state(model)):
    assert not checkpointer.diff(target).fits
    with pytest.raises(CheckpointError, match=r'extra    optimizer/.*(\n.*)*Fix: .*optimizer="drop"'):
      checkpointer.restore(target)
  assert_same(checkpointer.restore(alone, optimizer="drop"), model)
  head = checkpointer.restore(alone, only=["head"]).head
  np.testing.assert_array_equal(head.kernel[...], model.head.kernel[...])


def test_problems_of_names_with_spaces_stay_apart(tmp_path):
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, {"a b": np.ones(3, np.float32), "a c": np.ones(3, np.float32)})
  data_of(tmp_path, 1).unlink()
  assert {"model/a b", "model/a c"} <= checkpointer.verify().keys()


def test_keys_without_elements_do_not_stop_a_restore_as_numpy(tmp_path):
  tree = {name: jax.random.split(jax.random.key(0, impl=name), 2)[:0] for name in ("rbg", "threefry2x32")}
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, {**tree, "w": np.ones(3, np.float32)})
  found = checkpointer.restore(as_numpy=True)["model"]
  for name, keys in tree.items():
    assert (found[name].shape, found[name].dtype) == (keys.shape, keys.dtype)


def test_a_step_that_vanishes_is_not_called_damaged(saved, monkeypatch):
  directory, trees = saved
  checkpointer, other, real = Checkpointer(directory), Checkpointer(directory, max_to_keep=1), restore.read
  checkpointer.save(3, trees[1])

  def read(*arguments, **options):
    monkeypatch.undo()
    other.save(4, trees[2])  # and deletes the others
    return real(*arguments, **options)

  monkeypatch.setattr(restore, "read", read)
  assert_same(checkpointer.restore(target_of(trees[2])), trees[2])  # the newest was asked for
  assert checkpointer.restored.step == 4
  with monkeypatch.context() as patch:  # between the manifest and the arrays
    patch.setattr(storage, "all_files", lambda file: (_ for _ in ()).throw(FileNotFoundError(file)))
    assert checkpointer.diff(target_of(trees[2])).bytes_read == sum(x.nbytes for x in trees[2].values())
  monkeypatch.setattr(restore, "read", lambda *_, **__: shutil.rmtree(directory / "4") or real(*_, **__))
  with pytest.raises(CheckpointError, match=r"4 vanished: another process removed or replaced it"):
    checkpointer.restore(target_of(trees[2]), 4, on_corrupt="fallback")


def test_a_step_that_is_being_replaced_is_not_called_damaged(tmp_path, monkeypatch):
  checkpointer, real = Checkpointer(tmp_path), restore.damaged_files
  for step in (1, 2):
    checkpointer.save(step, {"w": np.full(2, step)})

  def damaged_files(folder, *arguments, **options):
    monkeypatch.undo()
    # A save replaces the step: the old folder has another name already, and the new one has no name yet.
    folder.rename(tmp_path / f"2{storage.REPLACED}")
    return real(folder, *arguments, **options)

  monkeypatch.setattr(restore, "damaged_files", damaged_files)
  with pytest.raises(VanishedError, match=r"/2 vanished: another process removed or replaced it"):
    checkpointer.restore(as_numpy=True, step=2)
  (tmp_path / f"2{storage.REPLACED}").rename(tmp_path / "2")
  monkeypatch.setattr(restore, "damaged_files", damaged_files)
  assert checkpointer.latest() == 2
