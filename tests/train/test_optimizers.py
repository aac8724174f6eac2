"""Every optimizer that optax ships: laid out as planned, and the same numbers on a mesh as on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.testing import assert_layout

RATE = 1e-2
PLAIN = [
  "adabelief",
  "adadelta",
  "adagrad",
  "adam",
  "adamax",
  "adamaxw",
  "adamw",
  "adan",
  "amsgrad",
  "fromage",
  "lamb",
  "lars",
  "lion",
  "nadam",
  "nadamw",
  "novograd",
  "optimistic_adam_v2",
  "optimistic_gradient_descent",
  "polyak_sgd",
  "radam",
  "rmsprop",
  "rprop",
  "sgd",
  "sign_sgd",
  "signum",
  "sm3",
  "yogi",
  "lbfgs",
]
OTHER = {
  "momentum": lambda: optax.sgd(RATE, momentum=0.9),
  "adafactor, factored": lambda: optax.adafactor(RATE, min_dim_size_to_factor=4),
  "lbfgs without search": lambda: optax.lbfgs(RATE, linesearch=None),
  "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(0)),
  "MultiSteps": lambda: optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
  "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=RATE),
}
QUICK = ("adamw", "adafactor, factored", "sm3", "lbfgs")


class Net(nnx.Module):
  """Two layers."""

  def __init__(self, rngs):
    self.up = nnx.Linear(8, 16, rngs=rngs, kernel_metadata={"out_sharding": ("embed", "mlp")})
    self.down = nnx.Linear(16, 8, rngs=rngs, kernel_metadata={"out_sharding": ("mlp", "embed")})

  def __call__(self, x):
    return self.down(nnx.relu(self.up(x)))


RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor")


def losses(tx, axes):
  count = int(np.prod(list(axes.values())))
  mesh = nxp.make_mesh(axes, devices=jax.devices()[:count])
  plan = nxp.plan(lambda: Net(nnx.Rngs(0)), mesh, RULES, optimizer=tx)
  model, optimizer = nxp.create_sharded_model(plan)
  assert_layout(plan, model, optimizer)
  step = nxp.train_step(lambda m, x: ((m(x) - x) ** 2).mean())
  found = []
  for i in range(3):
    x = np.random.default_rng(i).normal(size=(16, 8)).astype(np.float32)
    found.append(float(step(model, optimizer, nxp.shard_batch(x, plan))["loss"]))
  assert_layout(plan, model, optimizer)
  assert len(step.compiles) == 1
  return found


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in (*PLAIN, *OTHER)]
)
def test_the_same_numbers_on_a_mesh(name):
  make = OTHER.get(name, lambda: getattr(optax, name)(RATE))
  one = losses(make(), {"data": 1, "fsdp": 1, "tensor": 1})
  many = losses(make(), {"data": 2, "fsdp": 2, "tensor": 2})
  np.testing.assert_allclose(one, many, rtol=1e-5)
  assert len(set(one)) == 3


def test_lookahead_is_refused_with_a_reason(caplog):
  with pytest.raises(nxp.TrainError, match=r"optax.lookahead keeps two copies of the parameters"):
    losses(optax.lookahead(optax.sgd(RATE), 3, 0.5), {"data": 8, "fsdp": 1, "tensor": 1})


def test_only_some_parameters():
  def labels(params):
    return jax.tree.map(lambda x: "train" if jnp.ndim(x) > 1 else "keep", params)

  tx = optax.partition({"train": optax.adam(RATE), "keep": optax.set_to_zero()}, labels)
  one = losses(tx, {"data": 1, "fsdp": 1, "tensor": 1})
  np.testing.assert_allclose(one, losses(tx, {"data": 2, "fsdp": 2, "tensor": 2}), rtol=1e-5)
