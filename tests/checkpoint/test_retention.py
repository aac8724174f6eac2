import hypothesis
import pytest
from hypothesis import strategies as st

from checkpoint.runs import arrays, assert_same, target_of
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.retention import Retention
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
