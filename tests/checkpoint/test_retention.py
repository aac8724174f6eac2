import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from checkpoint.runs import arrays, assert_same, target_of
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.retention import Retention, newest_first
from nnx_parallel.errors import CheckpointError

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@hypothesis.given(
  st.dictionaries(st.integers(0, 50), FLOATS),
  st.integers(1, 4),
  st.none() | st.integers(1, 10),
  st.integers(1, 3),
  st.sampled_from(["min", "max"]),
)
def test_the_newest_and_the_best_always_stay(losses, newest, every, keep_best, mode):
  keep = Retention(newest, every, "loss", mode, keep_best)
  metrics = {step: {"loss": loss} for step, loss in losses.items()}
  kept = sorted(metrics.keys() - keep.doomed(metrics))
  assert set(sorted(metrics)[-newest:]) <= set(kept)
  best = [loss for loss in losses.values() if loss == loss]
  if best:
    wanted = min(best) if mode == "min" else max(best)
    assert any(losses[step] == wanted for step in kept)
  assert all(step in kept for step in metrics if every and step % every == 0)


@hypothesis.given(st.permutations(range(12)), st.integers(0, 11), st.integers(1, 4))
def test_the_step_written_last_is_the_newest(order, count, newest):
  times = {step: float(i) for i, step in enumerate(order[: count + 1])}
  found = newest_first(times)
  assert sorted(found) == sorted(times)
  assert found[0] == order[count]
  current = found[: next((i for i in range(1, len(found)) if found[i] > found[i - 1]), len(found))]
  assert all(times[a] > times[b] for a, b in itertools.pairwise(current))
  assert order[count] not in Retention(newest).doomed({step: {} for step in times}, times)


def test_a_run_that_resumes_from_an_older_step_keeps_its_own_steps(tmp_path, monkeypatch):
  tree = {"w": arrays()["w"]}
  with Checkpointer(tmp_path, max_to_keep=1, best="loss") as checkpointer:
    checkpointer.save(100, tree, metrics={"loss": 1.0})
    checkpointer.save(200, tree, metrics={"loss": 2.0})
    monkeypatch.setattr("time.time", lambda: 1.0)  # the clock goes back
    for step in (150, 160):
      checkpointer.save(step, tree, metrics={"loss": 3.0})
      assert checkpointer.steps() == [100, step]
      assert (checkpointer.latest(), checkpointer.metadata().step) == (step, step)


def test_a_fallback_keeps_to_the_run_that_goes_on(tmp_path):
  trees = {step: {"w": arrays(step)["w"]} for step in (100, 120, 110, 130)}
  with Checkpointer(tmp_path) as checkpointer:
    for step, tree in trees.items():
      checkpointer.save(step, tree)
    (tmp_path / "130" / "nnx_parallel.json").write_text("{}")
    with pytest.warns(UserWarning, match="step 130 was passed over"):
      restored = checkpointer.restore(target_of(trees[100]), on_corrupt="fallback")
    assert_same(restored, trees[110])  # 120 was left behind


def test_what_a_run_left_behind_goes_first(tmp_path):
  tree = {"w": arrays()["w"]}
  with Checkpointer(tmp_path) as checkpointer:
    for step in (100, 200, 300, 150):
      checkpointer.save(step, tree)
    assert checkpointer.latest() == 150
  with Checkpointer(tmp_path, max_to_keep=3) as checkpointer:
    checkpointer.save(160, tree)
    assert checkpointer.steps() == [100, 150, 160]


def test_steps_on_disk(tmp_path):
  tree = {"w": arrays()["w"]}
  losses = {1: 5.0, 2: 1.0, 3: float("nan"), 4: 3.0, 5: 4.0}
  with Checkpointer(tmp_path, max_to_keep=1, keep_every=3, best="loss", keep_best=2) as checkpointer:
    for step, loss in losses.items():
      checkpointer.save(step, tree, metrics={"loss": loss})
    assert checkpointer.steps() == [2, 3, 4, 5]
    assert checkpointer.best() == 2
    assert checkpointer.metadata("best").step == 2
    assert checkpointer.latest() == 5


def test_latest_and_best_are_steps_to_restore(tmp_path):
  trees = {step: {"w": arrays(step)["w"]} for step in (1, 2, 3)}
  with Checkpointer(tmp_path, best="loss") as checkpointer:
    for step, tree in trees.items():
      checkpointer.save(step, tree, metrics={"loss": abs(step - 2)})
    for step, number in ((None, 3), ("latest", 3), ("best", 2), (1, 1)):
      assert_same(checkpointer.restore(target_of(trees[1]), step), trees[number])
      assert checkpointer.restored.step == number
    assert checkpointer.preflight(target_of(trees[1]), "best").step == 2
    with pytest.raises(
      CheckpointError, match=r"step='newest' is unknown\.\n  Fix: pass a number, \"latest\""
    ):
      checkpointer.restore(target_of(trees[1]), "newest")
  with pytest.raises(
    CheckpointError, match=r'(?s)step="best" says nothing.*Fix: Checkpointer\(directory, best='
  ):
    Checkpointer(tmp_path).restore(target_of(trees[1]), "best")
  with pytest.raises(CheckpointError, match="cannot find a step with the metric 'accuracy'"):
    Checkpointer(tmp_path, best="accuracy").restore(target_of(trees[1]), "best")
