"""Accumulation: one exchange between replicas, accumulators where they should lie, exact weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.report.program.collectives import collectives
from train.models import RULES, Net
from training import placed

WIDTH, HIDDEN, PARTS = 64, 512, 4
KERNEL = WIDTH * HIDDEN * 4


def init():
  """Two kernels of 128 KiB."""
  return Net(nnx.Rngs(0), WIDTH, HIDDEN, use_bias=False)


def loss_fn(model, batch):
  errors = ((model(batch["x"]) - batch["x"]) ** 2).mean(-1)
  return nxp.weighted((errors * batch["w"]).sum(), batch["w"].sum())


def step_on(axes, *, microbatches=PARTS, gradients="like_parameters", **options):
  mesh = nxp.make_mesh({"data": 1, "fsdp": 1, "tensor": 1} | axes)
  plan = nxp.plan(init, mesh, RULES, optimizer=optax.sgd(0.1, momentum=0.9), **options)
  model, optimizer = placed(plan)
  rng = np.random.default_rng(0)
  host = {
    "x": rng.normal(size=(64, WIDTH)).astype(np.float32),
    "w": (rng.random(64) < 0.3).astype(np.float32),
  }
  step = nxp.train_step(loss_fn, microbatches=microbatches, gradients=gradients)
  return step, model, optimizer, nxp.shard_batch(host, plan)


def compiled(step, model, optimizer, batch):
  return step.lower(model, optimizer, batch).compile()


def gradient_exchanges(program, mesh, axis):
  """`(times, bytes)` of each all-reduce or reduce-scatter over `axis` that carries a gradient."""
  found = collectives(program.as_text(), dict(mesh.shape))
  kinds = ("all-reduce", "reduce-scatter")
  return [(c.times, c.bytes) for c in found if c.kind in kinds and axis in c.axes and c.bytes > 4096]


class Closing(nnx.Module):
  """A kernel, a statistic that is None, one that is copied, and rules that close over a traced array."""

  def __init__(self):
    self.kernel, self.slope = nnx.Param(jnp.ones((4, 4))), nnx.BatchStat(jnp.float32(2.0))
    self.a, self.b = nnx.BatchStat(None), nnx.BatchStat(jnp.float32(0.0))

  def __call__(self, x, rule):
    slope = self.slope[...]
    if rule == "vjp":
      scaled = jax.custom_vjp(lambda y: y)
      scaled.defvjp(lambda y: (y, None), lambda _, g: (slope * g,))
    elif rule == "jvp":
      scaled = jax.custom_jvp(lambda y: y)
      scaled.defjvp(lambda y, t: (y[0], slope * t[0]))
    else:
      scaled = jax.custom_gradient(lambda y: (y, lambda g: (slope * g,)))
    self.b[...] = slope
    return scaled(x @ self.kernel[...])


@pytest.mark.parametrize("rule", ["vjp", "jvp", "gradient"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_rules_that_close_over_traced_arrays_train_and_copied_values_are_kept(rule, microbatches):
  mesh = nxp.make_mesh(data=2, devices=jax.devices()[:2])
  plan = nxp.plan(Closing, mesh, nxp.replicate(), optimizer=optax.sgd(1.0))
  model, optimizer = placed(plan)
  step = nxp.train_step(lambda m, x: m(x, rule).sum() / 16, microbatches=microbatches)
  step(model, optimizer, nxp.shard_batch(np.ones((4, 4), np.float32), plan))
  # The gradient is 4 / 16 for one microbatch, and the sum of halves is divided by their number.
  np.testing.assert_allclose(model.kernel[...], 1 - 2 * (4 / 16) / microbatches)
  assert model.a.get_value() is None
  assert float(model.b[...]) == 2.0
  assert step.calls == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_exchange_once_at_each_stage(zero):
  """ZeRO with whole gradients: the sums of all microbatches are exchanged, then split."""
  step, model, optimizer, batch = step_on({"data": 8}, zero=zero)
  mesh = model.up.kernel.get_value().sharding.mesh
  found = gradient_exchanges(compiled(step, model, optimizer, batch), mesh, "data")
  assert {times for times, _ in found} == {1}
  assert sum(size for _, size in found) <= 2 * KERNEL + 4096
  step(model, optimizer, batch)
  assert step.reduction == "once, after the scan, over data, in float32"


def summed(model, batch):
  """The hits and the count of each of four classes, and a histogram."""
  scores = model(batch["x"])[:, :4]
  label = jnp.argmax(batch["x"][:, :4], axis=-1)
  seen = jax.nn.one_hot(label, 4)
  hits = seen * (jnp.argmax(scores, axis=-1) == label)[:, None].astype(scores.dtype)
  summaries = {
    "by_class": nxp.weighted(hits.sum(0), seen.sum(0)),
    "share": nxp.weighted(seen.sum(0), seen.sum()),
  }
  return loss_fn(model, batch), summaries


@pytest.mark.cases(1)
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_summaries_are_weighted_element_by_element(axes):
  _, model, optimizer, batch = step_on(axes)
  expected = nxp.eval_step(summed)(model, batch)
  found = nxp.train_step(summed, microbatches=PARTS)(model, optimizer, batch)
  assert found["by_class"].shape == (4,)
  np.testing.assert_allclose(found["by_class"], expected["by_class"], rtol=1e-6)
  label = np.argmax(np.asarray(batch["x"])[:, :4], axis=-1)
  np.testing.assert_allclose(found["share"], np.bincount(label, minlength=4) / 64, rtol=1e-6)
  assert all(value.sharding.is_fully_replicated for value in found.values())


def one_device(loss_fn, tx, microbatches):
  model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = nxp.train_step(loss_fn, microbatches=microbatches)
  step(model, optimizer, np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32))
  return np.asarray(model.kernel[...])


def test_a_count_that_depends_on_parameters_has_no_gradient_however_the_batch_is_split():
  def learned(model, x):
    """Examples are weighted by what the model says, so that the count moves with it."""
    weight = jax.nn.sigmoid(model(x)[:, 0])
    return nxp.weighted((weight * (x**2).sum(-1)).sum(), weight.sum())

  def fixed(model, x):
    total, count = learned(model, x)
    return total / jax.lax.stop_gradient(count)

  expected = one_device(fixed, optax.sgd(1.0), 1)
  for microbatches in (1, 2, 4):
    np.testing.assert_allclose(one_device(learned, optax.sgd(1.0), microbatches), expected, rtol=1e-5)


def by_value_fn():
  """Follows the gradients of the loss function that the step gives it, as SAM and line searches do."""

  def update(grads, state, params=None, *, value_fn, **_):
    return jax.tree.map(lambda g: -g, jax.grad(value_fn)(params)), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("pair", [False, True])
def test_an_optimizer_that_evaluates_the_loss_gets_it_in_microbatches_too(pair):
  seen = []

  def loss(model, x):
    seen.append(x.shape)
    errors = model(x) ** 2
    return nxp.weighted(errors.sum(), errors.size) if pair else errors.mean()

  parts = one_device(loss, by_value_fn(), 4)
  assert set(seen) == {(4, 4)}
  np.testing.assert_allclose(parts, one_device(loss, optax.sgd(1.0), 1), rtol=1e-5)
