import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoint.runs import arrays, assert_same, broken, target_of
from nnx_parallel.checkpoint import array_io, lock, save, storage
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.damage import friendly_errors
from nnx_parallel.errors import CheckpointError
from searches import torture


def names(directory):
  return sorted(path.name for path in directory.iterdir() if path.name != lock.LOCK)


def slow_disk(monkeypatch):
  """Saves end when the event is set."""
  go, make_durable = threading.Event(), storage.make_tree_durable
  monkeypatch.setattr(storage, "make_tree_durable", lambda folder: go.wait(60) and make_durable(folder))
  return go


def test_an_existing_step_is_replaced_only_by_name(saved):
  directory, trees = saved
  checkpointer = Checkpointer(directory)
  with pytest.raises(CheckpointError, match=r"cannot save step 2: it exists in .*\n  steps: \[1, 2\]"):
    checkpointer.save(2, trees[1])
  assert_same(checkpointer.restore(target_of(trees[2])), trees[2])
  checkpointer.save(2, trees[1], overwrite=True)
  assert_same(checkpointer.restore(target_of(trees[1])), trees[1])
  assert names(directory) == ["1", "2"]


@pytest.mark.parametrize("local", [True, False])
def test_a_step_is_saved_also_when_an_old_one_cannot_be_removed(tmp_path, monkeypatch, local):
  tree = arrays()
  monkeypatch.setattr(storage, "is_local", lambda _: local)
  checkpointer = Checkpointer(tmp_path, max_to_keep=1)
  checkpointer.save(1, tree)
  with monkeypatch.context() as patch:
    patch.setattr(type(checkpointer.directory), "rmtree", broken(13))
    text = r"step 2 is saved, but step 1, which need not be kept, could not be removed: .*Permission denied"
    with pytest.warns(UserWarning, match=text):
      checkpointer.save(2, tree)
    assert checkpointer.steps() == [2]
    text = r"1(\.nnx-deleting)?, left by an earlier save, could not be removed: .*Permission denied"
    second = pytest.warns(UserWarning, match="step 3 is saved, but step 2")
    with pytest.warns(UserWarning, match=text), second:
      checkpointer.save(3, tree)
    assert_same(checkpointer.restore(target_of(tree)), tree)
  with monkeypatch.context() as patch:
    patch.setattr(type(checkpointer._steps), "delete", broken(5))
    with pytest.warns(UserWarning, match="step 4 is saved, but step 3, .*Input/output error"):
      checkpointer.save(4, tree)
  assert checkpointer.steps() == [3, 4]
  checkpointer.save(5, tree)
  assert names(tmp_path) == ["5"]


def test_a_step_that_is_damaged_and_half_replaced_is_not_listed_twice(saved):
  directory, _ = saved
  shutil.copytree(directory / "2", directory / "2.nnx-replaced")
  assert Checkpointer(directory).steps() == [1, 2]


def test_a_fork_during_a_background_save_ends_and_holds_nothing(saved, monkeypatch):
  directory, trees = saved
  go = slow_disk(monkeypatch)
  fork = multiprocessing.get_context("fork")
  with Checkpointer(directory, asynchronous=True) as checkpointer:
    checkpointer.save(3, trees[1])
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # Python and jax warn of threads in forked processes
      short, long = fork.Process(target=checkpointer.wait), fork.Process(target=time.sleep, args=(60,))
      short.start()
      long.start()
    try:
      short.join(10)
      go.set()
      checkpointer.wait()
      checkpointer.save(4, trees[1])  # while the other worker lives
      checkpointer.wait()
      assert short.exitcode == 0
      assert long.is_alive()
    finally:
      short.kill()
      long.kill()
  assert names(directory) == ["1", "2", "3", "4"]


def test_only_what_a_step_left_is_swept(saved):
  directory, trees = saved
  others = ["hf.nnx-saving", "hf.nnx-deleting", "01.nnx-saving", "best.nnx-replaced"]
  for name in others:
    (directory / name).mkdir()
  Checkpointer(directory).save(3, trees[1])
  assert names(directory) == sorted([*others, "1", "2", "3"])


def test_two_writers_do_not_meet(saved):
  directory, trees = saved
  hold = lock.take(storage.epath.Path(directory))
  with hold.save():
    thread = threading.Thread(target=Checkpointer(directory).save, args=(3, trees[1]))
    thread.start()
    thread.join(1)
    assert Checkpointer(directory).steps() == [1, 2]  # it waits
  thread.join()
  assert Checkpointer(directory).steps() == [1, 2, 3]
  (directory / lock.LOCK).write_text("process 1 on elsewhere\n")
  text = r"another job is writing there\.\n  held by process 1 on elsewhere"
  with pytest.raises(CheckpointError, match=text):
    Checkpointer(directory).save(4, trees[1])
  (directory / lock.LOCK).unlink()
  Checkpointer(directory).save(4, trees[1])
  hold.let_go()


@pytest.mark.parametrize("number", [38, 95, 37])
def test_a_disk_without_locks_is_written_to_with_one_warning(tmp_path, monkeypatch, number):
  monkeypatch.setattr("fcntl.flock", broken(number))
  checkpointer = Checkpointer(tmp_path)
  with pytest.warns(UserWarning, match=r"has no file locks \(.*\), so nothing stops a second job"):
    checkpointer.save(1, arrays())
  checkpointer.save(2, arrays())
  checkpointer.close()
  monkeypatch.setattr("fcntl.flock", broken(5))
  with pytest.raises(CheckpointError, match="Input/output error"):
    Checkpointer(tmp_path).save(3, arrays())
  assert checkpointer.steps() == [1, 2]


def test_a_full_disk_is_noticed_before_writing(saved, monkeypatch):
  directory, trees = saved
  usage = storage.shutil.disk_usage(directory)._replace(free=100)
  monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: usage)
  with pytest.raises(CheckpointError, match=r"the disk is full\.\n  the save needs [\d,]+ bytes, 1"):
    Checkpointer(directory).save(3, trees[1])
  assert names(directory) == ["1", "2"]


@pytest.mark.parametrize("number", [30, 13])
def test_read_only_directories(tmp_path, monkeypatch, number):
  monkeypatch.setattr(lock, "take", broken(number))
  with pytest.raises(CheckpointError, match=r"cannot save step 1 in .*: it may not be written"):
    Checkpointer(tmp_path).save(1, arrays())


def test_folders_of_others_are_left_alone(tmp_path):
  (tmp_path / "5").mkdir()
  (tmp_path / "5" / "thesis.txt").touch()
  (tmp_path / "6").mkdir()
  checkpointer = Checkpointer(tmp_path, max_to_keep=1)
  with pytest.raises(CheckpointError, match=r"cannot save step 5: .* was not written by nnx_parallel"):
    checkpointer.save(5, arrays())
  checkpointer.save(6, arrays())
  checkpointer.save(7, arrays())
  assert names(tmp_path) == ["5", "7"]
  text = r"(?s)cannot find step 5 in .*complete steps: \[7\]\n  incomplete, or written by.*: \[5\]\n  Fix: "
  with pytest.raises(CheckpointError, match=text):
    checkpointer.restore(arrays(), 5)


def test_a_path_that_the_array_store_reads_otherwise_is_refused(tmp_path):
  with pytest.raises(CheckpointError, match=r"holds a backslash.*\n.*\n  Fix: rename"):
    Checkpointer(tmp_path / "a\\b" / "run")
  assert names(tmp_path) == []


def test_arrays_that_are_stored_elsewhere_are_missed_before_the_commit(saved, monkeypatch):
  directory, trees = saved
  real = array_io.start_save
  start = lambda folder, items, **options: real(folder, {"other": items["model"]}, **options)
  monkeypatch.setattr(array_io, "start_save", start)
  with pytest.raises(CheckpointError, match=r"cannot save step 3: .* no files of model\."):
    Checkpointer(directory).save(3, trees[1])
  assert names(directory) == ["1", "2"]


def test_background_errors_are_raised_at_the_next_call(saved, monkeypatch):
  directory, trees = saved
  checkpointer = Checkpointer(directory, asynchronous=True)
  with monkeypatch.context() as patch:
    patch.setattr(storage, "make_tree_durable", broken(28))
    checkpointer.save(3, trees[1])
    with pytest.raises(CheckpointError, match=r"cannot save step 3 in .*: the disk is full"):
      checkpointer.save(4, trees[1])
  checkpointer.save(4, trees[1])
  checkpointer.close()
  assert checkpointer.steps() == [1, 2, 4]


def test_background_saves_return_before_the_commit(saved, monkeypatch):
  directory, trees = saved
  go = slow_disk(monkeypatch)
  with Checkpointer(directory, asynchronous=True) as checkpointer:
    checkpointer.save(3, trees[1])
    assert checkpointer.steps() == [1, 2]
    go.set()
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2, 3]


def run(code, *arguments, timeout=None):
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
  return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_a_background_save_is_finished_at_exit(tmp_path):
  code = """
    import sys, jax.numpy as jnp
    from nnx_parallel.checkpoint.checkpointer import Checkpointer
    checkpointer = Checkpointer(sys.argv[1], asynchronous=True)
    checkpointer.save(1, {"w": jnp.ones((512, 512))})
  """
  done = run(code, tmp_path)
  assert (done.returncode, done.stderr) == (0, "")
  assert Checkpointer(tmp_path).latest() == 1


def test_each_of_two_threads_gets_the_outcome_of_its_own_save(saved):
  directory, trees = saved
  checkpointer = Checkpointer(directory)
  tree = {"b": trees[1]["b"]}
  problems = []

  def sound():
    for step in range(10, 30):
      try:
        checkpointer.save(step, tree)
      except CheckpointError as error:
        problems.append(str(error))

  thread = threading.Thread(target=sound)
  thread.start()
  refused = 0
  while thread.is_alive():
    with pytest.raises(CheckpointError, match="cannot save step 2: it exists"):
      checkpointer.save(2, tree)
    refused += 1
  thread.join()
  assert problems == []
  assert refused
  assert checkpointer.steps() == [1, 2, *range(10, 30)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ctrl_c_while_a_save_starts_comes_after_the_start(saved, monkeypatch, asynchronous):
  directory, trees = saved
  write, within = save.write, []

  def interrupted(*arguments, **options):
    signal.raise_signal(signal.SIGINT)
    within.append(True)
    return write(*arguments, **options)

  monkeypatch.setattr(save, "write", interrupted)
  handler = signal.getsignal(signal.SIGINT)
  checkpointer = Checkpointer(directory, asynchronous=asynchronous)
  with pytest.raises(KeyboardInterrupt):
    checkpointer.save(3, trees[1])
  assert within
  assert signal.getsignal(signal.SIGINT) is handler
  checkpointer.close()
  assert names(directory) == ["1", "2", "3"]
  assert_same(Checkpointer(directory).restore(target_of(trees[1]), 3), trees[1])


def test_ctrl_c_while_arrays_are_read_waits_for_them(tmp_path, monkeypatch):
  write, x = save.write, jnp.arange(3.0)

  def slow(*arguments, **options):
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    time.sleep(0.3)
    return write(*arguments, **options)

  monkeypatch.setattr(save, "write", slow)
  checkpointer = Checkpointer(tmp_path, asynchronous=True)
  with pytest.raises(KeyboardInterrupt):
    checkpointer.save(1, {"x": x})
  x.delete()  # as the next step does, which takes it over
  checkpointer.close()
  assert names(tmp_path) == ["1"]


@pytest.mark.slow
def test_killed_jobs_lose_nothing():
  found, problems = torture.kills(4, seed=3)  # the long form is `make torture`
  assert problems == []
  assert found.total() == 4


@pytest.mark.slow
def test_readers_are_in_no_writer_s_way():
  found, problems = torture.reads(8)
  assert problems == []
  assert found["right"]


def test_what_is_in_the_way_of_a_step_is_seen_before_it_is_written(saved, monkeypatch):
  directory, trees = saved
  monkeypatch.setattr(save, "write", None)
  (directory / "3").touch()
  (directory / "4").symlink_to(directory / "nowhere")
  for step in (3, 4):
    with pytest.raises(CheckpointError, match=rf"cannot save step {step}: .*{step} is not a directory\."):
      Checkpointer(directory).save(step, trees[1])


def test_a_limit_on_open_files_is_no_full_disk(tmp_path, monkeypatch):
  monkeypatch.setattr(storage, "make_tree_durable", broken(24))
  with pytest.raises(CheckpointError, match=r"cannot save step 1 in .*: too many files are open\."):
    Checkpointer(tmp_path).save(1, arrays())
  refused = pytest.raises(CheckpointError, match="too many files are open")
  with refused, friendly_errors("save", tmp_path):
    raise ValueError("RESOURCE_EXHAUSTED: Error opening local file: Too many open files")


TREE, NO_NUMBER = {"b": np.ones(2)}, r"metrics\['loss'\] is not one number"
NO_ARRAY = r"a \w+ is neither an array nor a JSON"
NO_DTYPE = [
  (np.zeros(2, np.longdouble), r"dtype float128 .*Fix: .*astype\(np\.float64\)"),
  (np.zeros(2, np.clongdouble), r"dtype complex256 .*Fix: .*astype\(np\.complex128\)"),
  (np.zeros(2, ml_dtypes.float6_e2m3fn), r"dtype float6_e2m3fn .*Fix: .*astype\(np\.float32\)"),
  (np.ma.masked_equal([1, 2], 2), r"mask.*Fix: .*\.filled\("),
]
UNREADABLE = [
  *((step, TREE, {}, "is not a step") for step in ("x", None, 1.5, True, -1, 2**63)),
  *((1, model, {}, "there is nothing to save: .* has no leaves") for model in (None, {})),
  (1, {"\ud800": np.ones(2)}, {}, "is not Unicode text"),
  (1, TREE, {"extra": {"model": 1}}, "cannot be used as a name"),
  *((1, TREE, {"metrics": {"loss": x}}, NO_NUMBER) for x in ("abc", [1, 2], None, np.ones(2), 10**400)),
  *((1, {"a": jnp.ones(2), "b": x}, {}, f"model/b: {NO_ARRAY}") for x in (object(), b"bytes", {1, 2})),
  *((1, {"a": {"b": array}}, {}, rf"(?s)cannot save model/a\.b: .*{text}") for array, text in NO_DTYPE),
]


@pytest.mark.parametrize(("step", "model", "options", "message"), UNREADABLE)
def test_what_could_not_be_read_again_writes_nothing(tmp_path, step, model, options, message):
  with pytest.raises(CheckpointError, match=message):
    Checkpointer(tmp_path / "run").save(step, model, **options)
  assert not (tmp_path / "run").exists()


def test_a_clock_that_is_wrong(tmp_path, monkeypatch):
  checkpointer = Checkpointer(tmp_path, max_to_keep=1)
  for step, clock in ((1, -1e9), (2, 1e12), (3, 0.0)):
    monkeypatch.setattr(time, "time", lambda now=clock: now)
    checkpointer.save(step, TREE)
    assert (checkpointer.steps(), checkpointer.latest()) == ([step], step)
  assert_same(checkpointer.restore(TREE), TREE)
