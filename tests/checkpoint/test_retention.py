import contextlib
import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from checkpoint.runs import arrays, assert_same, target_of
from nnx_parallel.checkpoint import manifest
from nnx_parallel.checkpoint.catalog import Retention, policies
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.manifest import Header
from nnx_parallel.errors import CheckpointError

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@hypothesis.settings(deadline=None)
@hypothesis.given(
  st.dictionaries(st.integers(0, 50), FLOATS),
  st.integers(1, 4),
  st.none() | st.integers(1, 10),
  st.sampled_from(["min", "max"]),
)
def test_the_newest_and_the_best_always_stay(losses, newest, every, mode):
  keep = newest
  if every:
    keep = policies.AnyPreservationPolicy([policies.LatestN(newest), policies.EveryNSteps(every)])
  headers = {step: Header(step, float(step), {"loss": loss}) for step, loss in losses.items()}
  kept = sorted(headers.keys() - Retention(keep, "loss", mode).choose_expired(headers))
  assert set(sorted(headers)[-newest:]) <= set(kept)
  best = [loss for loss in losses.values() if loss == loss]
  if best:
    wanted = min(best) if mode == "min" else max(best)
    assert any(losses[step] == wanted for step in kept)
  assert all(step in kept for step in headers if every and step % every == 0)
  assert len(kept) <= newest + 1 or every


@pytest.fixture
def two(tmp_path):
  """A directory with the steps 100 and 200 of one run, a tree, and a Checkpointer that keeps two."""
  tree = {"w": np.arange(4.0, dtype=np.float32)}
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(100, tree)
    checkpointer.save(200, tree)
  return tmp_path, tree, Checkpointer(tmp_path, max_to_keep=2)


def test_a_run_that_did_not_come_from_there_deletes_nothing(two):
  _, tree, checkpointer = two
  for step in (0, 150):
    for overwrite in (False, True):
      text = rf"(?s)cannot save step {step}: .* holds newer steps.*newest is step 200"
      with pytest.raises(CheckpointError, match=text):
        checkpointer.save(step, tree, overwrite=overwrite)
  assert (checkpointer.steps(), checkpointer.latest()) == ([100, 200], 200)
  checkpointer.save(300, tree)
  assert checkpointer.steps() == [200, 300]


def test_a_restore_alone_changes_nothing_and_the_next_save_sets_the_later_steps_aside(two):
  directory, tree, _ = two
  checkpointer = Checkpointer(directory)
  checkpointer.restore(tree, 100)
  checkpointer.restore(as_numpy=True)  # looks at step 200, and goes on from nowhere
  assert checkpointer.steps() == [100, 200]
  with pytest.warns(UserWarning, match=r"continues from step 100, so the later steps \[200\] in .* were"):
    checkpointer.save(150, tree)
  assert (checkpointer.steps(), checkpointer.latest()) == ([100, 150], 150)
  assert (directory / "200.nnx-aside" / "nnx_parallel.json").exists()
  checkpointer.save(200, tree)
  assert (checkpointer.steps(), checkpointer.latest()) == ([100, 150, 200], 200)
  assert checkpointer.verify() == {}


def test_a_run_that_resumes_from_an_older_step_keeps_its_own_steps(tmp_path, monkeypatch):
  tree = {"w": arrays()["w"]}
  with Checkpointer(tmp_path, max_to_keep=1, best="loss") as checkpointer:
    checkpointer.save(100, tree, metrics={"loss": 1.0})
    checkpointer.save(200, tree, metrics={"loss": 2.0})
    checkpointer.restore(target_of(tree), 100)
    monkeypatch.setattr("time.time", lambda: 1.0)  # the clock goes back
    for step in (150, 160):
      with pytest.warns(UserWarning, match="later steps") if step == 150 else contextlib.nullcontext():
        checkpointer.save(step, tree, metrics={"loss": 3.0})
      assert checkpointer.steps() == [100, step]
      assert (checkpointer.latest(), checkpointer.metadata().step) == (step, step)


def test_latest_and_best_are_steps_to_restore(tmp_path):
  trees = {step: {"w": arrays(step)["w"]} for step in (1, 2, 3)}
  with Checkpointer(tmp_path, best="loss") as checkpointer:
    for step, tree in trees.items():
      checkpointer.save(step, tree, metrics={"loss": abs(step - 2)})
    for step, number in ((None, 3), ("latest", 3), ("best", 2), (1, 1)):
      assert_same(checkpointer.restore(target_of(trees[1]), step), trees[number])
      assert checkpointer.restored.step == number
    assert checkpointer.diff(target_of(trees[1]), "best").step == 2
    with pytest.raises(CheckpointError, match=r"step='newest' is unknown\.\n.*\"latest\""):
      checkpointer.restore(target_of(trees[1]), "newest")
  with pytest.raises(CheckpointError, match=r'(?s)="best" is unknown.*Checkpointer\(directory, best='):
    Checkpointer(tmp_path).restore(target_of(trees[1]), "best")
  with pytest.raises(CheckpointError, match="cannot find a step with the metric 'accuracy'"):
    Checkpointer(tmp_path, best="accuracy").restore(target_of(trees[1]), "best")


def test_two_checkpointers_of_a_job_keep_each_other_s_steps(tmp_path):
  tree = {"w": np.arange(4.0, dtype=np.float32)}
  periodic, other = Checkpointer(tmp_path, max_to_keep=3), Checkpointer(tmp_path)
  for step in (1, 2):
    periodic.save(step, tree)
  other.save(3, tree)
  periodic.save(4, tree)
  assert (periodic.steps(), periodic.latest()) == ([2, 3, 4], 4)
  other.save(6, tree)
  with pytest.raises(CheckpointError, match=r"cannot save step 5: .* holds newer steps"):
    periodic.save(5, tree)
  periodic.restore(tree, 2)  # goes back on purpose
  with pytest.warns(UserWarning, match=r"later steps \[3, 4, 6\]"):
    periodic.save(3, tree)
  assert (periodic.steps(), periodic.latest()) == ([2, 3], 3)


def test_a_call_reads_no_manifest_twice(tmp_path, monkeypatch):
  tree = {"w": np.arange(4.0, dtype=np.float32)}
  checkpointer = Checkpointer(tmp_path, max_to_keep=200, best="loss")
  checkpointer.save(1, tree, metrics={"loss": float("nan")}, extra={"data": 3})
  record, folder = checkpointer.metadata(), checkpointer.directory
  for step in range(2, 100):
    (folder / str(step)).mkdir()
    manifest.write(dataclasses.replace(record, step=step, time=record.time + step), folder / str(step))
  heads, bodies = [], []
  head, body = manifest.read_header, manifest.read
  monkeypatch.setattr(manifest, "read_header", lambda step_dir: heads.append(step_dir) or head(step_dir))
  monkeypatch.setattr(manifest, "read", lambda step_dir: bodies.append(step_dir) or body(step_dir))

  def reads(call):
    heads.clear()
    bodies.clear()
    call()
    return len(heads), len(bodies)

  assert reads(checkpointer.steps) == (0, 0)
  assert reads(lambda: checkpointer.save(100, tree, extra={"data": 3})) == (100, 0)  # for what may go
  assert reads(checkpointer.latest) == (0, 1)
  assert reads(lambda: checkpointer.restore(tree)) == (0, 1)
  assert reads(lambda: checkpointer.restore_extra("data")) == (0, 0)
  assert reads(lambda: checkpointer.restore(tree, 1)) == (0, 1)
  assert reads(checkpointer.best) == (100, 0)
