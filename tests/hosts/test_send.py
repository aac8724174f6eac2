"""Arrays and modules sent to the devices of another mesh."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp

FIRST, LAST = jax.devices()[:4], jax.devices()[4:]
X = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)


class Net(nnx.Module):  # Two layers, with random state
  def __init__(self, width: int, seed: int, dtype: Any = jnp.float32):
    rngs = nnx.Rngs(seed)
    self.up = nnx.Linear(16, width, rngs=rngs, param_dtype=dtype, dtype=dtype)
    self.drop = nnx.Dropout(0.1, rngs=rngs, deterministic=True)
    self.down = nnx.Linear(width, 4, rngs=rngs, param_dtype=dtype, dtype=dtype)

  def __call__(self, x):
    return self.down(self.drop(nnx.relu(self.up(x))))


def values(module):
  return jax.tree.map(
    lambda x: np.asarray(nxp.hosts.to_host(x)), nnx.to_pure_dict(nnx.state(module, nnx.Param))
  )


@pytest.mark.parametrize("explicit", [False, True])
def test_a_trainer_sends_its_weights_to_a_sampler(explicit):
  # 30 columns are padded to 32 on the trainer's mesh.
  mesh = nxp.make_mesh(fsdp=4, devices=FIRST, explicit=explicit)
  rules = nxp.fsdp(min_size=16)
  source = nxp.plan(lambda: Net(30, 0), mesh, rules, optimizer=optax.sgd(0.1), uneven="pad")
  trainer, optimizer = nxp.create_sharded_model(source)
  mesh = nxp.make_mesh(data=2, tensor=2, devices=LAST)
  sampler = nxp.create_sharded_model(lambda: Net(30, 1, jnp.bfloat16), mesh, nxp.fsdp("tensor", min_size=16))
  step = nxp.train_step(lambda model, x: (model(x) ** 2).mean())
  layouts = jax.tree.map(lambda x: x.sharding, nnx.state(sampler))
  random = jax.random.key_data(sampler.drop.rngs.key.get_value())
  for active in (contextlib.nullcontext, lambda: jax.set_mesh(mesh)):
    step(trainer, optimizer, X)  # donates its arrays, and never the sampler's
    with active():
      sent = nxp.parallel.send(trainer, sampler)
    assert sent is sampler
    assert jax.tree.map(lambda x: x.sharding, nnx.state(sampler)) == layouts
    jax.tree.map(
      lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16), b), values(trainer), values(sampler)
    )
  np.testing.assert_array_equal(jax.random.key_data(sampler.drop.rngs.key.get_value()), random)
