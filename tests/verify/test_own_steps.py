"""Where a jit of one's own gets gradients wrong, `check_gradients` names these arrays, and no others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from create.models import arrays_of
from tests.train.test_known_faults import Adapted, Mapped
from training import placed

RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor", norm="tensor")


class Scaled(nnx.Module):  # A norm whose scale is over another axis than the dim of the kernel behind it
  def __init__(self, rngs: nnx.Rngs):
    self.norm = nnx.RMSNorm(64, scale_metadata={"out_sharding": ("norm",)}, rngs=rngs)
    self.up = nnx.Linear(64, 128, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.up(self.norm(x))


class Images(nnx.Module):  # The discriminator of a DCGAN behind a linear layer, without names
  def __init__(self, rngs: nnx.Rngs):
    self.lin, self.out = nnx.Linear(8, 768, rngs=rngs), nnx.Linear(256, 1, rngs=rngs)
    self.c1 = nnx.Conv(3, 8, (4, 4), strides=2, rngs=rngs)
    self.c2, self.bn = nnx.Conv(8, 16, (4, 4), strides=2, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = jnp.tanh(self.lin(x)).reshape(-1, 16, 16, 3)
    x = nnx.leaky_relu(self.bn(self.c2(nnx.leaky_relu(self.c1(x)))))
    return self.out(x.reshape(len(x), -1))


class Grouped(nnx.Module):  # A convolution of each channel
  def __init__(self, rngs: nnx.Rngs):
    self.conv = nnx.Conv(8, 8, (3,), feature_group_count=8, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.conv(x)


squares = lambda model, x, power=2: (jnp.sin(model(x)) ** power).mean()


def gradients(plan: nxp.Plan, x: Any, loss: Any) -> dict[str, Any]:
  """What a step of one's own with a learning rate of 1 subtracts."""
  model, optimizer = placed(plan)
  names = [leaf.name for leaf in plan.leaves if leaf.is_parameter]
  before = arrays_of(model)

  @nnx.jit
  def step(model: Any, optimizer: Any, x: Any) -> None:
    optimizer.update(model, nnx.grad(loss)(model, x, power=2))

  step(model, optimizer, nxp.shard_batch(x, plan))
  after = arrays_of(model)
  return {name: before[name] - after[name] for name in names}


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.auto_axes("layers of Flax compute on Auto axes only")
@pytest.mark.parametrize(("make", "shape", "rules"), [
  (Scaled, (32, 64), RULES), (Images, (16, 8), nxp.fsdp(min_size=64)), (Adapted, (16, 8), RULES),
  (Mapped, (16, 16), RULES), (Grouped, (8, 4, 8), RULES),
])  # fmt: skip
def test_what_comes_out_wrong_is_named(make: Any, shape: Any, rules: Any) -> None:
  def plan_on(**sizes: int) -> nxp.Plan:
    return nxp.plan(lambda: make(nnx.Rngs(0)), nxp.make_mesh(**sizes), rules, optimizer=optax.sgd(1.0))

  plan, alone = plan_on(data=2, fsdp=2, tensor=2), {"devices": jax.devices()[:1]}
  x = np.random.default_rng(0).normal(size=shape).astype("float32")
  model, batch = placed(plan)[0], nxp.shard_batch(x, plan)
  right = gradients(plan_on(data=1, fsdp=1, tensor=1, **alone), x, squares)
  total = np.sqrt(sum(np.sum(g**2) for g in right.values()))

  def wrong(loss: Any) -> set[str]:
    off = {name: np.linalg.norm(g - right[name]) for name, g in gradients(plan, x, loss).items()}
    return {name for name, size in off.items() if size > 1e-3 * (np.linalg.norm(right[name]) + total / 100)}

  assert wrong(squares), f"jax {jax.__version__} computes it right: see layout/known_faults.py"
  assert {*nxp.check_gradients(model, batch, squares).wrong} == wrong(squares)
  for by in (model, plan) if make is not Grouped else ():
    mended = nxp.parallel.gather_on_read(squares, by)
    assert not wrong(mended)
    assert nxp.check_gradients(model, batch, mended)
