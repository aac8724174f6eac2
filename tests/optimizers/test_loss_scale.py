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
def losses_with_a_scale():
  plan = plan_on("dp x fsdp x tp", nxp.with_loss_scale(optax.adam(1e-2)), zero=1)
  model, optimizer, losses = train(plan, data(4))
  nxp.check_layout(model, plan, optimizer=optimizer)
  return losses


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
  for key, value in arrays(expected).items():  # gradients under another scale
    np.testing.assert_allclose(arrays(model)[key], value, rtol=1e-3, atol=1e-4)
  state = optimizer.opt_state
  assert (float(state.scale[...]), int(state.skipped[...]), int(state.good_steps[...])) == (2.0**9, 1, 1)
  assert int(state.inner[0].count[...]) == int(reference.opt_state.inner[0].count[...]) == 2
  _, optimizer, _ = train(plan, good[:3])
  assert float(nxp.loss_scale_of(optimizer)) == 2.0**11
  assert int(optimizer.opt_state.good_steps[...]) == 0


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", list(MESHES))
def test_microbatches_of_sums_do_not_overflow(name):
  plan = plan_on(name, nxp.with_loss_scale(optax.adam(1e-2)))
  _, optimizer, losses = train(plan, data(4), sum_loss, microbatches=2)
  np.testing.assert_allclose(losses, losses_with_a_scale(), rtol=2e-3)
  assert int(optimizer.opt_state.skipped[...]) == 0


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
  np.testing.assert_allclose(losses, losses_with_a_scale(), rtol=1e-3)


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
