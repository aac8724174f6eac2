"""The loop: what is recorded, saved and resumed, when it ends, and what it refuses."""

import functools
import itertools
import math
import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.loop.fit import resume_from
from nnx_parallel.loop.run import Position
from training import placed


class Net(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(4, 8, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.down = nnx.Linear(8, 4, rngs=rngs)

  def __call__(self, x):
    return self.down(self.dropout(nnx.relu(self.up(x))))


loss_fn = lambda model, x: jnp.square(model(x) - x).mean()
STEP = nxp.train_step(loss_fn, pairs=True)


@functools.cache
def plan():
  mesh, tx = nxp.make_mesh(data=4, fsdp=2), optax.adam(1e-2)
  return nxp.plan(lambda: Net(nnx.Rngs(0)), mesh, nxp.fsdp(min_size=8), optimizer=tx)


@functools.cache
def objects():
  """One model for all tests that do not mind where it starts: it is compiled for once."""
  return placed(plan())


def endless(samples=0):
  for i in itertools.count(samples // 16):
    yield np.random.default_rng(i).standard_normal((16, 4)).astype(np.float32)


def fit(batches=endless, *, on=None, **options):
  return nxp.fit(STEP, *(on or objects()), batches, plan=plan(), progress=False, **options)


def fake(batches, **options):
  """The loop around a step that returns its batch as the loss."""
  step = lambda model, optimizer, batch: {"loss": batch}
  return nxp.fit(step, None, None, batches, progress=False, **options)


def of_losses(result):
  return {r["step"]: r["loss"] for r in result.history if "loss" in r}


def test_records_are_exactly_weighted_means_of_their_steps():
  pairs = [(6.0, 1.0), (1.0, 2.0), (12.0, 3.0), (4.0, 4.0), (20.0, 5.0)]
  seen = []
  track = lambda step, values: seen.append((step, values["loss"]))
  result = fake(pairs, steps=5, log_every=3, trackers=[track])
  assert of_losses(result) == {1: 6.0, 3: (1 + 12) / (2 + 3), 5: pytest.approx(24 / 9)}
  assert seen == list(of_losses(result).items())
  assert (result.step, result.stopped, result.metrics["loss"]) == (5, "steps", seen[-1][1])
  plain = fake([1.0, 2.0, 3.0, 4.0], log_every=4)
  assert of_losses(plain) == {1: 1.0, 4: 3.0}


def test_a_run_resumes_bit_for_bit_with_its_data_and_dropout(tmp_path):
  with nxp.Checkpointer(tmp_path) as checkpointer:
    first = fit(steps=4, checkpointer=checkpointer, save_every=3, resume="latest")
    assert checkpointer.steps() == [3, 4]
    straight = of_losses(first) | of_losses(fit(steps=7, start=Position(4, 64)))
    other = placed(plan())
    rest = fit(on=other, steps=7, checkpointer=checkpointer, resume="latest")
    assert of_losses(rest) == {n: straight[n] for n in (5, 6, 7)}
    # From an older step: later steps of the run before are set aside.
    with pytest.warns(UserWarning, match=r"continues from step 3, so the later steps \[4, 7\] in"):
      again = fit(on=other, steps=7, checkpointer=checkpointer, save_every=1, resume=3)
    assert of_losses(again) == {n: straight[n] for n in (4, 5, 6, 7)}
    assert checkpointer.steps() == [3, 4, 5, 6, 7]
    assert checkpointer.restore_extra("data", step=7) == {"samples": 112, "stop": {}}
    assert not nxp.Plan.from_json((tmp_path / "plan.json").read_text()).diff(plan())
    (tmp_path / "plan.json").unlink()
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(nxp.errors.CheckpointError, match=r"cannot write plan\.json in"):
      fit(on=other, steps=8, checkpointer=checkpointer, resume="latest")


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [dict, tuple])
def test_several_models_are_killed_and_go_on_bit_for_bit(tmp_path, kind):
  def made():
    pairs = [nxp.create_sharded_model(linear), nxp.create_sharded_model(linear)]
    several = [dict(zip("ab", side, strict=True)) for side in zip(*pairs, strict=True)]
    return several if kind is dict else [tuple(side.values()) for side in several]

  def both(models, x):
    first, second = models.values() if kind is dict else models
    return jnp.square(second(first(x)) - x).mean()

  def run(models, optimizers, **options):
    return nxp.fit(step, models, optimizers, endless, steps=4, plan=linear, progress=False, **options)

  def kill(number, _):
    if number == 3:
      raise KeyboardInterrupt

  init, tx = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), optax.adam(1e-2)
  linear = nxp.plan(init, plan().mesh, nxp.replicate(), optimizer=tx)
  step = nxp.train_step(both)
  straight = of_losses(run(*made()))
  with nxp.Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(KeyboardInterrupt):
      run(*made(), checkpointer=checkpointer, save_every=2, trackers=[kill])
    rest = run(*made(), checkpointer=checkpointer, resume="latest")
  assert of_losses(rest) == {n: straight[n] for n in (3, 4)}


def test_best_is_the_step_with_the_best_evaluation(tmp_path):
  values = iter([3.0, 1.0, 2.0])
  with nxp.Checkpointer(tmp_path, max_to_keep=1, best="eval_score") as checkpointer:
    options = {"evaluate": lambda: {"score": next(values)}, "eval_every": 1, "save_every": 1}
    result = fit(steps=3, checkpointer=checkpointer, **options)
    assert checkpointer.steps() == [2, 3]
    assert [r["eval_score"] for r in result.history if "eval_score" in r] == [3.0, 1.0, 2.0]
    assert result.metrics["eval_score"] == 2.0
    _, position = resume_from(checkpointer, objects(), "best")
  assert (position.step, position.samples) == (2, 32)


@pytest.mark.parametrize(
  ("mode", "values", "last"), [("min", [3, 2, 2, 2, 2], 4), ("max", [1, 2, 3, 3, 2], 5)]
)
def test_early_stop(mode, values, last):
  scores = iter(values)
  stop = nxp.loop.EarlyStop("eval_score", patience=2, mode=mode)
  result = fake([1.0] * 9, evaluate=lambda: {"score": next(scores)}, eval_every=1, early_stop=stop)
  assert (result.step, result.stopped, stop.waited) == (last, "early", 2)


def test_the_data_cursor_cannot_be_overwritten(tmp_path):
  checkpointer, wanted = nxp.Checkpointer(tmp_path), pytest.raises(nxp.errors.TrainError, match="data cursor")
  with checkpointer, wanted:
    fit(steps=1, checkpointer=checkpointer, extra=lambda: {"data": 3})


def test_the_end_of_the_data():
  assert fake([1.0] * 3).stopped == "data"
  with pytest.raises(nxp.errors.TrainError, match=r"the batches ended after step 3 of 5\.\n  Fix: steps=3, "):
    fake([1.0] * 3, steps=5)
  with pytest.raises(nxp.errors.TrainError, match=r"cannot continue after 32 samples: batches is a list\."):
    fake([], start=Position(2, 32))


def test_a_loss_that_is_not_finite():
  with pytest.raises(nxp.errors.TrainError, match=r"the loss of step 2 is nan: training further is of no"):
    fake([1.0, math.nan, 1.0])
  assert len(fake([1.0, math.nan, 1.0], nonfinite="continue").history) == 3
  with pytest.raises(nxp.errors.TrainError, match=r"the loss of step 2 is nan"):
    fake([1.0, math.nan], steps=5)  # and not that the data ended


@pytest.mark.parametrize("memory", [None, "pinned_host"])
@pytest.mark.parametrize(
  ("log_every", "bad", "used"),
  [
    (None, {4, 9}, [0, 1, 2, 6, 7, 8, 11, 12, 13]),  # a loss is read one step late
    (3, {4, 8}, [0, 1, 2, 9, 10, 11, 12, 13, 14]),  # twice back to step 3
  ],
)
def test_a_run_goes_back_behind_bad_batches(tmp_path, memory, log_every, bad, used, capsys):
  """As a run that never sees them, bit for bit: dropout, donated arrays and host memory too."""
  mesh, options = nxp.make_mesh(data=4, fsdp=2), {"optimizer": optax.adam(1e-2), "optimizer_memory": memory}
  where = nxp.plan(lambda: Net(nnx.Rngs(0)), mesh, nxp.fsdp(min_size=8), **options)

  def run(source, name, **options):
    pair = nxp.create_sharded_model(where)
    with nxp.Checkpointer(tmp_path / name) as checkpointer:
      result = nxp.fit(
        STEP, *pair, source, steps=9, plan=where, checkpointer=checkpointer, save_every=3,
        log_every=log_every, **options,
      )  # fmt: skip
      return pair, result, checkpointer.restore_extra("data")["samples"] // 16

  data = list(itertools.islice(endless(), 20))
  with_bad = [batch * np.float32(math.nan if i in bad else 1) for i, batch in enumerate(data)]
  got, result, consumed = run(lambda samples: with_bad[samples // 16 :], "bad", nonfinite="back")
  said = capsys.readouterr().out
  want, straight, _ = run(lambda samples: [data[i] for i in used], "good", progress=False)
  assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), nnx.state(got), nnx.state(want))))
  good = {r["step"]: r["loss"] for r in result.history if math.isfinite(r["loss"])}
  assert good == {r["step"]: r["loss"] for r in straight.history}
  assert [r["back_to"] for r in result.history if "back_to" in r] == ([3, 6] if log_every is None else [3, 3])
  assert consumed - 9 == sum(map(int, re.findall(r"went back to here, behind (\d) batches", said)))
  assert "of host memory on each process" in said
  nxp.check_layout(got[0], where, optimizer=got[1])


def test_a_run_that_goes_back_begins_its_profile_again(tmp_path):
  data = [x * np.float32(math.nan if i == 2 else 1) for i, x in enumerate(itertools.islice(endless(), 7))]
  fit(data, nonfinite="back", profile=(2, 4), profile_dir=tmp_path)
  assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.parametrize("explicit", [False, True])
def test_several_models_go_back_together(explicit):
  """A dict of losses, whose metrics have the names of the models."""
  mesh = nxp.make_mesh(data=4, fsdp=2, explicit=explicit)
  where = nxp.plan(lambda: Net(nnx.Rngs(0)), mesh, nxp.fsdp(min_size=8), optimizer=optax.adam(1e-2))
  step = nxp.train_step({
    "a": lambda both, x: jnp.square(both["a"](x) - both["b"](x)).mean(),
    "b": lambda both, x: jnp.square(both["b"](x) - x).mean(),
  })  # fmt: skip
  data = [*itertools.islice(endless(), 8)]
  bad = [x * np.float32(math.nan if i == 3 else 1) for i, x in enumerate(data)]

  def run(batches, **options):
    pairs = {name: nxp.create_sharded_model(where) for name in "ab"}
    models, optimizers = ({name: pair[n] for name, pair in pairs.items()} for n in (0, 1))
    result = nxp.fit(step, models, optimizers, batches, plan=where, progress=False, **options)
    return nnx.state((models, optimizers)), result

  got, result = run(bad, nonfinite="back")
  assert [(r["step"], r["back_to"]) for r in result.history if "back_to" in r] == [(4, 0)]
  same = jax.tree.map(lambda a, b: (a == b).all(), got, run(data[5:])[0])
  assert all(jax.tree.leaves(same))
  with pytest.raises(nxp.errors.TrainError, match=r"the loss of step 4 is nan"):
    run(bad)


def test_a_run_does_not_go_back_for_ever():
  with pytest.raises(nxp.errors.TrainError, match=r"the loss of step 1 is nan") as caught:
    fit(itertools.repeat(np.full((16, 4), np.nan, np.float32)), nonfinite="back", on=placed(plan()))
  assert caught.value.__notes__ == ["the run went back 3 times to step 0"]
  result = fit([*itertools.islice(endless(), 2), np.full((16, 4), np.nan, np.float32)], nonfinite="back")
  assert (result.step, result.stopped) == (0, "data")


def test_a_damaged_step_is_passed_over_only_by_latest(tmp_path):
  with nxp.Checkpointer(tmp_path) as checkpointer:
    fit(steps=2, checkpointer=checkpointer, save_every=1)
    next(path for path in tmp_path.glob("2/model/d/*")).unlink()
    with pytest.raises(nxp.errors.CheckpointError, match=r"step 2 is damaged"):
      fit(steps=3, checkpointer=checkpointer, resume=2)
    with (
      pytest.warns(UserWarning, match=r"step 2 was passed over: step 2 is damaged"),
      pytest.warns(UserWarning, match=r"the later steps \[2\] in"),
    ):
      assert of_losses(fit(steps=2, checkpointer=checkpointer, resume="latest")).keys() == {2}


@pytest.mark.cases(1)
@pytest.mark.parametrize("save_every", [2, None])
def test_a_step_whose_parameters_are_nan_is_not_saved(tmp_path, save_every):
  def batches(samples=0):
    for i, batch in enumerate(endless(samples), start=samples // 16):
      yield batch * (i != 3)

  # Its gradient at zero is a nan, and its value is not.
  step = nxp.train_step(lambda model, x: jnp.sqrt(jnp.square(x * model.up.kernel.sum()).sum()))
  model, optimizer = placed(plan())

  def run(steps, **options):
    options |= {"checkpointer": checkpointer, "plan": plan(), "progress": False, "resume": "latest"}
    return nxp.fit(step, model, optimizer, batches, steps=steps, **options)

  with nxp.Checkpointer(tmp_path, max_to_keep=1) as checkpointer:
    run(2)
    text = r"step 4 is not saved: model/up.kernel is not finite\.\n  \d of \d+ arrays .*\n  Fix: resume from"
    with pytest.raises(nxp.errors.TrainError, match=text):
      run(4, save_every=save_every)
    assert checkpointer.steps() == [2]
    restored, _ = checkpointer.restore((model, optimizer))
    assert jnp.isfinite(restored.up.kernel[...]).all()
    assert run(4, nonfinite="continue").step == 4
    assert checkpointer.steps() == [4]


def test_checkpoints_of_another_run_and_missing_checkpointers(tmp_path):
  with pytest.raises(nxp.errors.TrainError, match="save_every, only, extra and resume need a checkpointer"):
    fit(steps=2, resume="latest")
  with nxp.Checkpointer(tmp_path) as checkpointer:
    fit(steps=1, checkpointer=checkpointer)
    with pytest.raises(nxp.errors.CheckpointError, match="holds the checkpoints of an earlier run"):
      fit(steps=2, checkpointer=checkpointer)


def test_a_checkpoint_of_another_program_starts_the_data_at_its_beginning(tmp_path):
  with nxp.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(2, *objects(), extra={"data": {"samples": "shuffled.npy"}})
    with pytest.warns(nxp.NnxParallelWarning, match=r"step 2 in .* has no data cursor"):
      result = fit(steps=3, checkpointer=checkpointer, resume="latest")
    assert (result.step, checkpointer.steps()) == (3, [2, 3])
    assert checkpointer.restore_extra("data", step=3)["samples"] == 16


def test_utilisation_needs_a_peak():
  result = fit(steps=4)
  assert "mfu" not in result.metrics
  measured = lambda result: next(record for record in result.history if "mfu" in record)
  first = measured(fit(steps=3, peak_flops=1e12))
  # A device has 2 rows of 16. Two products forward, and three backward: none for the gradient of the batch.
  assert first["mfu"] * 1e12 * first["seconds"] == pytest.approx(5 * 2 * 2 * 4 * 8)
  given = measured(fit(steps=3, peak_flops=1e12, flops=1e3))
  assert given["mfu"] * 1e12 * given["seconds"] == pytest.approx(1e3)


def test_a_profile_of_two_steps(tmp_path):
  fake([jnp.float32(1)] * 4, profile=(2, 3), profile_dir=tmp_path)
  assert list(tmp_path.rglob("*.xplane.pb"))
  with pytest.raises(nxp.errors.TrainError, match="the profile of steps 3 to 2 holds no step"):
    fake([], profile=(3, 2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_ends_the_run(tmp_path, capfd, number):
  came = []
  before = signal.signal(number, lambda *_: came.append(True))
  model, optimizer = placed(plan())
  straight = of_losses(fit(on=placed(plan()), steps=5))
  kill = lambda step, _: os.kill(os.getpid(), number) if step == 2 else None
  try:
    with nxp.Checkpointer(tmp_path) as checkpointer:
      options = {"trackers": [kill], "evaluate": lambda: 1 / 0}
      ended = fit(on=(model, optimizer), steps=5, checkpointer=checkpointer, **options)
      assert (ended.step, ended.stopped, checkpointer.steps(), came) == (3, "signal", [3], [True])
      assert "asked to end: saving step 3" in capfd.readouterr().out
      os.kill(os.getpid(), number)
      assert (came, checkpointer.steps()) == ([True, True], [3])  # nothing listens after the run
      rest = fit(on=(model, optimizer), steps=5, checkpointer=checkpointer, resume="latest")
  finally:
    signal.signal(number, before)
  assert of_losses(ended) | of_losses(rest) == straight


def test_what_it_shows(capsys):
  step = lambda model, optimizer, batch: {"plain": 2.0, "loss": batch}
  score = lambda: {"loss": 0.25}
  result = nxp.fit(step, None, None, [2.5, 1.5], steps=2, evaluate=score, tokens=lambda _: 100)
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith("step 1/2  loss 2.5000  plain 2.0000  ")
  assert all(" tokens/s  " in line and line.endswith(" ms/step") for line in lines[:2])
  assert lines[2] == "step 2/2  eval_loss 0.2500"
  assert "tokens_per_second" in result.metrics
  assert "samples_per_second" not in fake([1.0, 1.0]).metrics  # scalars have no examples


@pytest.mark.slow
def test_gradients_are_checked_on_the_first_batch_and_wrong_ones_train_nothing(capsys):
  model, optimizer = placed(plan())
  nxp.fit(STEP, model, optimizer, endless, plan=plan(), steps=1, check_gradients=True)
  assert "the gradients of 4 leaves are right" in capsys.readouterr().out
  double = lambda x: jax.custom_derivatives.linear_call(lambda _, x: x, lambda _, g: 2 * g, (), x)
  wrong = nxp.train_step(lambda model, x: loss_fn(model, double(model.up(x))[:, :4]))
  before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
  with pytest.raises(nxp.errors.TrainError, match=r"(?s)gradients on this layout are wrong.*up\.kernel"):
    nxp.fit(wrong, model, optimizer, endless, plan=plan(), steps=1, check_gradients=True, progress=False)
  jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model, nnx.Param))
  with pytest.raises(nxp.errors.TrainError, match="cannot check the gradients of a function"):
    nxp.fit(lambda *_: {}, model, optimizer, endless, plan=plan(), steps=1, check_gradients=True)


# No run is lost.


def of_sixteen(count, error=None):
  def batches(samples=0):
    yield from itertools.islice(endless(samples), max(0, count - samples // 16))
    if error is not None:
      raise error

  return batches


def fail_at(number):
  def track(step, values):
    if step == number:
      raise OSError("the disk of the log is full")

  return track


@pytest.mark.each_case
@pytest.mark.parametrize(("batches", "options", "error", "saved"), [
  (of_sixteen(4), {}, nxp.errors.TrainError, 4),
  (of_sixteen(4, OSError("disk gone")), {}, OSError, 4), (endless, {"trackers": [fail_at(3)]}, OSError, 4),
  (endless, {"evaluate": lambda: 1 / 0, "eval_every": 3}, ZeroDivisionError, 3),
], ids=["data ends", "data fails", "tracker fails", "evaluation fails"])  # fmt: skip
def test_whatever_ends_a_run_its_last_good_step_is_saved(tmp_path, batches, options, error, saved):
  straight = of_losses(fit(on=placed(plan()), steps=6))
  with nxp.Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(error) as caught:
      fit(batches, on=placed(plan()), steps=20, checkpointer=checkpointer, **options)
    assert checkpointer.steps() == [saved]
    assert caught.value.__notes__ == [f"step {saved} was saved in {checkpointer.directory}"]
    rest = fit(on=placed(plan()), steps=6, checkpointer=checkpointer, resume="latest")
  assert of_losses(rest) == {number: straight[number] for number in range(saved + 1, 7)}


def never(samples=0):
  raise AssertionError("a batch was read")
  yield


def test_a_directory_that_cannot_be_written_is_refused_before_the_first_step():
  for directory, why in (("/proc/x", "cannot save in /proc/x"), ("/dev/null/x", "a file is in the way")):
    with pytest.raises(nxp.errors.CheckpointError, match=why):
      fit(never, steps=2, checkpointer=nxp.Checkpointer(directory))


def test_a_second_job_on_the_directory_is_refused_before_its_first_step(tmp_path):
  import subprocess
  import sys

  body = f"""
import sys, nnx_parallel as nxp
checkpointer = nxp.Checkpointer({str(tmp_path)!r})
checkpointer.prepare()
print("held", flush=True)
sys.stdin.read()
"""
  pipe = subprocess.PIPE
  with subprocess.Popen([sys.executable, "-c", body], stdin=pipe, stdout=pipe, text=True) as other:
    assert other.stdout.readline() == "held\n"
    text = r"another job is writing there\.\n  held by run \w+, process \d+ on .*\n  Fix: give each job its"
    with pytest.raises(nxp.errors.CheckpointError, match=text):
      fit(never, steps=2, checkpointer=nxp.Checkpointer(tmp_path))
    other.stdin.close()
    other.wait(60)
  with nxp.Checkpointer(tmp_path) as checkpointer:
    assert fit(steps=1, checkpointer=checkpointer).step == 1


def test_a_folder_of_another_program_is_refused_before_the_first_step(tmp_path):
  (tmp_path / "2").mkdir()
  (tmp_path / "2" / "thesis.txt").touch()
  with pytest.raises(nxp.errors.CheckpointError, match=r"2 was not written by nnx_parallel, or is damaged"):
    fit(never, steps=2, checkpointer=nxp.Checkpointer(tmp_path))
