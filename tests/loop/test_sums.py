"""Sums of metrics: exact weights, on device, beside those of flax; where they are written."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from training import placed


def test_pairs_and_plain_numbers_are_weighted_exactly():
  sums = nxp.loop.MetricSums()
  assert sums.read() == {}
  sums.add({"b": 1.0, "loss": (jnp.float32(3), jnp.int32(1)), "none": (0.0, 0)}, weight=1)
  assert sums.read() == {"loss": 3.0, "b": 1.0, "none": 0.0}
  sums.add({"b": np.float16(5), "loss": (jnp.bfloat16(1), jnp.int32(3)), "none": (0.0, 0)}, weight=3)
  assert sums.read() == {"loss": 1.0, "b": 4.0, "none": 0.0}
  alone = nxp.loop.MetricSums()
  alone.add({"b": 0.1}, weight=3)
  assert alone.read() == {"b": 0.1}  # as it came, not 0.3 / 3


def test_many_small_parts_of_low_precision_add_up():
  sums = nxp.loop.MetricSums()
  for _ in range(300):
    sums.add({"loss": (jnp.bfloat16(1), jnp.bfloat16(1))})
  assert sums.read() == {"loss": 1.0}  # bfloat16 would stay at 256


def test_what_cannot_be_added():
  sums = nxp.loop.MetricSums()
  with pytest.raises(nxp.errors.TrainError, match=r"the metric 'rows' is an array, which has no mean here\."):
    sums.add({"rows": jnp.ones(3)})


def test_a_metric_that_only_some_steps_return_is_a_mean_over_those():
  sums = nxp.loop.MetricSums()
  for metrics in ({"loss": 1.0}, {"loss": 2.0, "mae": 4.0}, {"loss": 3.0}, {"loss": 4.0, "mae": (9.0, 3.0)}):
    sums.add(metrics)
  assert sums.read() == {"loss": 2.5, "mae": 13 / 4}


def loss_fn(model, batch):
  error = jnp.square(model(batch["x"])).mean(-1)
  pair = nxp.weighted((error * batch["w"]).sum(), batch["w"].sum())
  return pair, {"plain": error.mean(), "rows": error}


@pytest.fixture(scope="module")
def run():
  plan = nxp.plan(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8), optimizer=optax.sgd(0.0))
  rng = np.random.default_rng(0)
  data = [
    {"x": rng.normal(size=(n, 4)).astype(np.float32), "w": rng.uniform(size=n).astype(np.float32)}
    for n in (16, 32)
  ]
  both = {name: np.concatenate([part[name] for part in data]) for name in ("x", "w")}
  return plan, *placed(plan), data, both


@pytest.mark.parametrize("microbatches", [1, 2])
def test_two_steps_of_uneven_batches_weigh_what_one_large_batch_does(run, microbatches):
  plan, model, optimizer, data, both = run
  step = nxp.train_step(loss_fn, pairs=True, outputs=("rows",), microbatches=microbatches)
  sums = nxp.loop.MetricSums()
  for batch in data:
    metrics = step(model, optimizer, nxp.shard_batch(batch, plan))
    assert metrics.pop("rows").shape == batch["w"].shape
    sums.add(metrics)
  whole = nxp.eval_step(loss_fn, outputs=("rows",))(model, nxp.shard_batch(both, plan))
  found = sums.read()
  assert found.keys() == {"loss", "plain"}
  for name, value in found.items():
    np.testing.assert_allclose(value, whole[name], rtol=2e-6)


def test_evaluate_weighs_exactly_too(run):
  plan, model, _, data, both = run
  batches = [nxp.shard_batch(batch, plan) for batch in data]
  (whole,) = [nxp.evaluate(nxp.eval_step(loss_fn, outputs=("rows",)), model, [nxp.shard_batch(both, plan)])]
  found = nxp.evaluate(nxp.eval_step(loss_fn, pairs=True, outputs=("rows",)), model, batches)
  assert found == pytest.approx(whole, rel=2e-6)
