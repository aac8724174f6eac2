"""A step that the user writes: one compilation, and the plan's layout after every step."""

import functools

import jax
import jax.monitoring
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from training import placed

compilations: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def count_compilations():
  def count(name: str, seconds: float, **_) -> None:
    if "backend_compile" in name:
      compilations.append(name)

  jax.monitoring.register_event_duration_secs_listener(count)
  yield
  jax.monitoring.unregister_event_duration_listener(count)


class Block(nnx.Module):
  """Small replicated parameters, batch statistics and dropout around two split kernels."""

  def __init__(self, rngs):
    self.up = nnx.Linear(8, 64, rngs=rngs)
    self.batch_norm = nnx.BatchNorm(64, rngs=rngs)
    self.norm = nnx.LayerNorm(64, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.down = nnx.Linear(64, 8, rngs=rngs)

  def __call__(self, x):
    return self.down(self.dropout(self.norm(nnx.relu(self.batch_norm(self.up(x))))))


def update(model, optimizer, batch):
  loss, grads = nnx.value_and_grad(lambda m: ((m(batch) - batch) ** 2).mean())(model)
  optimizer.update(model, grads)
  return loss


def under_nnx_jit(model, optimizer):
  step = nnx.jit(update, donate_argnums=(0, 1))
  return lambda batch: step(model, optimizer, batch)


def under_jax_jit(model, optimizer):
  graphdef, _ = nnx.split((model, optimizer))

  @jax.jit
  def run(state, batch):
    objects = nnx.merge(graphdef, state)
    loss = update(*objects, batch)
    return nnx.state(objects), loss

  def step(batch):
    state, loss = run(nnx.state((model, optimizer)), batch)
    nnx.update((model, optimizer), state)
    return loss

  return step


def eager(model, optimizer):
  return lambda batch: update(model, optimizer, batch)


def linear(rngs):
  return nnx.Linear(8, 8, rngs=rngs)


def losses_of(make, *, kind=Block, explicit=False, count=3, **options):
  """Trains a few steps of `make(model, optimizer)`; the layout and the compilations are checked."""
  axes = {"data": 8} if explicit else {"data": 2, "fsdp": 4}
  rules = nxp.replicate() if explicit else nxp.fsdp(min_size=64)
  plan = nxp.plan(
    lambda: kind(nnx.Rngs(0)),
    nxp.make_mesh(**axes, explicit=explicit),
    rules,
    optimizer=optax.adamw(1e-2),
    **options,
  )
  model, optimizer = placed(plan)
  step = make(model, optimizer)
  x = np.random.default_rng(0).standard_normal((16, 8), dtype=np.float32)
  batch = nxp.shard_batch(x, plan)
  losses = [float(step(batch))]
  compilations.clear()
  losses += [float(step(batch)) for _ in range(count - 1)]
  assert make is eager or not compilations
  nxp.check_layout(model, plan, optimizer=optimizer)
  return losses


@functools.cache
def expected(kind=Block):
  model = kind(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
  x = np.random.default_rng(0).standard_normal((16, 8), dtype=np.float32)
  step = nnx.jit(update)
  return [float(step(model, optimizer, x)) for _ in range(3)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
  ("explicit", "zero", "memory"),
  [(True, 0, "pinned_host"), (True, 1, None), (False, 0, None), (False, 1, "pinned_host")],
)
def test_nnx_jit_compiles_once_and_keeps_the_layout(explicit, zero, memory):
  found = losses_of(under_nnx_jit, explicit=explicit, zero=zero, optimizer_memory=memory)
  np.testing.assert_allclose(found, expected(), rtol=1e-5)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind"), [(under_jax_jit, Block), (eager, linear)])
def test_so_do_jax_jit_and_no_jit(make, kind):
  np.testing.assert_allclose(losses_of(make, kind=kind, zero=1), expected(kind), rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_without_the_placement_the_compiler_moves_small_parameters():
  """What `ShardedOptimizer` is for; once this fails, XLA and flax keep the layout by themselves."""

  def plain(model, optimizer):
    optimizer.placement = None
    return under_nnx_jit(model, optimizer)

  with pytest.raises(AssertionError):
    losses_of(plain)


def test_inside_shard_map_arrays_are_shards_and_stay_so():
  plan = nxp.plan(
    lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
    nxp.make_mesh(data=8),
    nxp.replicate(),
    optimizer=optax.sgd(0.1),
  )
  model, optimizer = placed(plan)
  graphdef, state = nnx.split((model, optimizer))

  @jax.jit
  @jax.shard_map(mesh=plan.mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
  def run(state, batch):
    model, optimizer = nnx.merge(graphdef, state)
    grads = nnx.grad(lambda m: jax.lax.pmean((m(batch) ** 2).mean(), "data"))(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer))

  batch = np.ones((8, 4), np.float32)
  nnx.update((model, optimizer), run(state, batch))
  alone = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  grads = nnx.grad(lambda m: (m(batch) ** 2).mean())(alone)
  np.testing.assert_allclose(model.bias[...], -0.1 * grads["bias"][...], rtol=1e-5)
