"""Freezing: what is not trained has no optimizer state, no gradient in the program, and does not move."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from train.models import arrays
from training import placed

WIDTH = 64


class Net(nnx.Module):  # A frozen trunk, a head, and a low-rank adapter beside the trunk
  def __init__(self, rngs):
    self.trunk = nnx.List([nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(4)])
    self.adapter = nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)
    self.head = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

  def __call__(self, x):
    y = x
    for layer in self.trunk:
      y = jnp.tanh(layer(y))
    return self.head(y + self.adapter(x))


init = lambda: Net(nnx.Rngs(0))
loss_fn = lambda model, x: ((model(x) - x) ** 2).mean()
HEAD = nnx.All(nnx.Param, nnx.PathContains("head"))
X = np.random.default_rng(0).normal(size=(64, WIDTH)).astype(np.float32)


def plan_on(wrt=nnx.Param, tx=None):
  mesh = nxp.make_mesh(data=2, fsdp=4)
  return nxp.plan(init, mesh, nxp.fsdp(min_size=0), optimizer=tx or optax.adam(1e-2), wrt=wrt)


def flops(plan, **options):
  step = nxp.train_step(loss_fn, **options)
  return step.lower(plan, batch=nxp.shard_batch(X, plan)).compile().cost_analysis()["flops"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_subset_is_trained_and_the_rest_has_no_state(microbatches):
  plan = plan_on(nnx.LoRAParam)
  moments = [leaf.name for leaf in plan.leaves if leaf.root == "optimizer" and leaf.shape]
  wanted = [f"optimizer/opt_state.0.{m}.adapter.lora_{k}" for m in ("mu", "nu") for k in "ab"]
  assert sorted(moments) == wanted
  model, optimizer = placed(plan)
  before = arrays(model)
  step = nxp.train_step(loss_fn, microbatches=microbatches)
  losses = [float(step(model, optimizer, nxp.shard_batch(X, plan))["loss"]) for _ in range(4)]
  assert losses[-1] < losses[0]
  nxp.check_layout(model, plan, optimizer=optimizer)
  moved = {name for name, value in arrays(model).items() if (value != before[name]).any()}
  assert moved == {"adapter.lora_a", "adapter.lora_b"}


def test_gradients_of_frozen_parameters_are_not_computed():
  product = 2 * X.size * WIDTH / 8  # on each of 8 devices
  everything, head = flops(plan_on()), flops(plan_on(HEAD))
  # Five layers and two thin ones: forward, gradient of the kernel, gradient of the input (not of the first).
  assert everything == pytest.approx(14 * product, rel=0.15)
  assert head == pytest.approx(6 * product, rel=0.15)  # five forward, one gradient
