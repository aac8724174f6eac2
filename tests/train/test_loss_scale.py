"""Dynamic loss scaling: float16 trains like float32, overflows are skipped, the scale is optimizer state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from train import models
from train.models import MESHES, Net, arrays, data, loss_fn, train
from training import placed


def tiny_loss(model, x):
  """Gradients far below what float16 can hold (6e-8)."""
  return loss_fn(model, x) * 2e-7


def sum_loss(model, x):
  error = (model(x).astype(jnp.float32) - x) ** 2
  return nxp.weighted(error.sum(), error.size)


def plan_on(name, tx, dtype=jnp.float16, **options):
  return models.plan_on(name, tx, lambda: Net(nnx.Rngs(0), dtype=dtype), **options)


@functools.cache
def run(scaled, dtype):
  tx = optax.adam(1e-2)
  plan = plan_on("dp x fsdp x tp", nxp.with_loss_scale(tx) if scaled else tx, dtype, zero=1)
  model, optimizer, losses = train(plan, data(4))
  nxp.check_layout(model, plan, optimizer=optimizer)
  return model, optimizer, losses


def test_float16_trains_like_float32_and_reports_the_unscaled_loss():
  _, optimizer, low = run(True, jnp.float16)
  np.testing.assert_allclose(low, run(False, jnp.float32)[2], rtol=2e-3)
  assert int(optimizer.opt_state.good_steps[...]) == 4


def test_gradients_are_unscaled_exactly():
  tx = nxp.with_loss_scale(optax.identity(), initial=2.0**13)
  grads = {"a": jnp.asarray(np.random.default_rng(0).normal(size=64), jnp.float32)}
  updates, _ = tx.update(jax.tree.map(lambda g: g * 2.0**13, grads), tx.init(grads), grads)
  np.testing.assert_array_equal(updates["a"], grads["a"])


def test_in_float32_the_scale_changes_nothing():
  (scaled, _, scaled_losses), (plain, _, losses) = run(True, jnp.float32), run(False, jnp.float32)
  np.testing.assert_allclose(scaled_losses, losses, rtol=1e-6)
  for key, value in arrays(plain).items():
    np.testing.assert_allclose(arrays(scaled)[key], value, rtol=1e-5, atol=1e-6)


def test_small_gradients_survive():
  def moved(tx):
    model, _, _ = train(plan_on("dp", tx), data(1), tiny_loss)
    before = arrays(unplaced())
    return np.abs(arrays(model)["up.kernel"] - before["up.kernel"]).mean()

  assert moved(optax.sgd(1e7)) < 0.5 * moved(nxp.with_loss_scale(optax.sgd(1e7)))


def unplaced():
  with nnx.use_eager_sharding(False):
    return Net(nnx.Rngs(0), dtype=jnp.float16)


def test_an_overflow_is_skipped_and_halves_the_scale_and_good_steps_double_it():
  tx = nxp.with_loss_scale(optax.adam(1e-2), initial=2.0**10, growth_interval=3)
  plan = plan_on("dp x fsdp x tp", tx)
  good, bad = data(4), data(1)[0] * 1e4
  model, optimizer, losses = train(plan, [good[0], bad, good[1]])
  assert np.isfinite(losses[1])  # the backward pass overflows, not the loss
  expected, reference, _ = train(plan, good[:2])
  for key, value in arrays(expected).items():
    np.testing.assert_allclose(
      arrays(model)[key], value, rtol=1e-3, atol=1e-4
    )  # gradients under another scale
  state = optimizer.opt_state
  assert (float(state.scale[...]), int(state.skipped[...]), int(state.good_steps[...])) == (2.0**9, 1, 1)
  assert int(state.inner[0].count[...]) == int(reference.opt_state.inner[0].count[...]) == 2
  _, optimizer, _ = train(plan, good[:3])
  assert float(nxp.loss_scale_of(optimizer)) == 2.0**11
  assert int(optimizer.opt_state.good_steps[...]) == 0


def test_the_scale_stays_within_its_bounds():
  low, high = (nxp.with_loss_scale(optax.sgd(0.0), initial=x, growth_interval=1) for x in (2.0, 2.0**23))
  bad = np.full((32, 16), np.nan, np.float32)
  assert float(nxp.loss_scale_of(train(plan_on("dp", low), [bad] * 3)[1])) == 1.0
  assert float(nxp.loss_scale_of(train(plan_on("dp", high, jnp.float32), data(3))[1])) == 2.0**24


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", list(MESHES))
def test_microbatches_of_sums_do_not_overflow(name):
  plan = plan_on(name, nxp.with_loss_scale(optax.adam(1e-2)))
  _, optimizer, losses = train(plan, data(4), sum_loss, microbatches=2)
  np.testing.assert_allclose(losses, run(True, jnp.float16)[2], rtol=2e-3)
  assert int(optimizer.opt_state.skipped[...]) == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_models_with_their_own_scale_or_none():
  def loss(models, x):
    return loss_fn(models["a"], x) + loss_fn(models["b"], x)

  def trained(txs):
    plans = {key: plan_on("dp", tx, jnp.float32) for key, tx in txs.items()}
    made = {key: placed(plan) for key, plan in plans.items()}
    models, optimizers = ({key: pair[i] for key, pair in made.items()} for i in (0, 1))
    nxp.train_step(loss)(models, optimizers, nxp.shard_batch(data(1)[0], plans["a"]))
    return arrays(models["a"]) | {f"b.{key}": value for key, value in arrays(models["b"]).items()}

  plain = trained({"a": optax.sgd(0.1), "b": optax.sgd(0.1)})
  for b in (optax.sgd(0.1), nxp.with_loss_scale(optax.sgd(0.1), initial=2.0**3)):
    mixed = trained({"a": nxp.with_loss_scale(optax.sgd(0.1)), "b": b})
    for key, value in plain.items():
      np.testing.assert_array_equal(mixed[key], value)


@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_in_a_step_of_your_own():
  plan = plan_on("dp x fsdp x tp", nxp.with_loss_scale(optax.adam(1e-2)))
  model, optimizer = placed(plan)

  @nnx.jit
  def step(model, optimizer, x):
    scale = nxp.loss_scale_of(optimizer)
    loss, grads = nnx.value_and_grad(lambda model: loss_fn(model, x) * scale)(model)
    with jax.numpy_dtype_promotion("standard"):
      optimizer.update(model, grads)
    return loss / scale

  losses = [float(step(model, optimizer, nxp.shard_batch(batch, plan))) for batch in data(4)]
  np.testing.assert_allclose(losses, run(True, jnp.float16)[2], rtol=1e-3)


@pytest.mark.nightly
def test_float16_parameters_with_masters_and_without():
  for inner in (optax.sgd(0.1, momentum=0.5), nxp.with_masters(optax.adam(1e-2))):
    tx = nxp.with_loss_scale(inner)
    init = lambda: Net(nnx.Rngs(0), dtype=jnp.float16, param_dtype=jnp.float16)
    plan = models.plan_on("dp x fsdp x tp", tx, init)
    model, optimizer, losses = train(plan, [data(1)[0]] * 4)
    nxp.check_layout(model, plan, optimizer=optimizer)
    assert losses[-1] < losses[0]
    assert int(optimizer.opt_state.skipped[...]) == 0


def test_the_policy():
  policy = nxp.Precision.float16()
  assert str(policy).endswith("compute float16, norms float32, softmax float32, dynamic loss scale")
  plan = plan_on("dp", policy.optimizer(optax.sgd(0.1)), jnp.float32)
  assert plan["optimizer/opt_state.scale"].dtype == jnp.float32
  with pytest.warns(nxp.NnxParallelWarning, match="float16 without a loss scale loses gradients below 6e-8"):
    nxp.Precision(compute=jnp.float16).optimizer(optax.sgd(0.1))


@pytest.mark.nightly
def test_a_checkpoint_carries_the_scale(tmp_path):
  plan = plan_on("dp", nxp.with_loss_scale(optax.adam(1e-2), growth_interval=2))
  model, optimizer, _ = train(plan, data(3))
  with nxp.Checkpointer(tmp_path) as checkpoints:
    checkpoints.save(3, model, optimizer)
    _, restored = checkpoints.restore(plan_on("dp x fsdp x tp", plan.tx))
  assert float(nxp.loss_scale_of(restored)) == 2.0**16
  assert int(restored.opt_state.good_steps[...]) == 1


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"initial": 1000.0}, r"initial=1000.0 is not a power of two(.|\n)*Fix: initial=1024.0"),
    ({"initial": float("inf")}, r"initial=inf is not a power of two(.|\n)*Fix: initial=32768.0"),
    ({"initial": 0.0}, r"initial=0.0 is not a power of two"),
    ({"initial": 0.5}, r"initial=0.5 is not between 1.0 and 16777216.0"),
    ({"growth_interval": 0}, "growth_interval=0 is not a number of steps"),
  ],
)
def test_bad_scales(options, message):
  with pytest.raises(nxp.errors.TrainError, match=message):
    nxp.with_loss_scale(optax.sgd(0.1), **options)


def test_it_must_be_outermost():
  plan = plan_on("dp", optax.chain(optax.clip(1.0), nxp.with_loss_scale(optax.sgd(0.1))))
  model, optimizer = placed(plan)
  with pytest.raises(nxp.errors.TrainError, match="with_loss_scale must be the outermost transformation"):
    nxp.train_step(loss_fn)(model, optimizer, nxp.shard_batch(data(1)[0], plan))
  plain = placed(plan_on("dp", optax.sgd(0.1)))[1]
  with pytest.raises(nxp.errors.TrainError, match="this optimizer has no loss scale"):
    nxp.loss_scale_of(plain)


@pytest.mark.nightly
def test_the_gradients_that_an_optimizer_takes_of_the_loss_are_scaled_too():
  def update(grads, state, params=None, *, value_fn, **_):
    return jax.tree.map(lambda g: -1e6 * g, jax.grad(value_fn)(params)), state

  found = {}
  for dtype in (jnp.float32, jnp.float16):
    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    model = nnx.Linear(16, 16, dtype=dtype, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, nxp.with_loss_scale(tx), wrt=nnx.Param)
    before = np.asarray(model.kernel[...])
    nxp.train_step(tiny_loss, microbatches=2)(model, optimizer, data(1)[0])
    found[dtype] = np.asarray(model.kernel[...]) - before
  moved = np.abs(found[jnp.float32]).max()
  assert moved > 0
  np.testing.assert_allclose(found[jnp.float16], found[jnp.float32], atol=0.01 * moved)
