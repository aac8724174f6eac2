"""Errors of JAX in a step that name neither the model nor what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel.errors import TrainError
from training import placed

X = np.ones((8, 4), np.float32)


class Net(nnx.Module):
  def __init__(self, between):
    self.linear, self.between = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), between

  def __call__(self, x):
    return self.between(self.linear(x))


def run(between, **mesh):
  plan = nxp.plan(lambda: Net(between), nxp.make_mesh(**mesh), nxp.fsdp(min_size=0), optimizer=optax.sgd(0.1))
  return nxp.train_step(lambda model, x: (model(x) ** 2).mean())(*placed(plan), X)


@pytest.mark.parametrize("axis", ["batch", "fsdp"])
def test_an_axis_name_of_pmap(axis):
  norm = nnx.BatchNorm(4, axis_name=axis, rngs=nnx.Rngs(0))
  plan = nxp.plan(
    lambda: nnx.clone(norm), nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=optax.sgd(0.1)
  )
  with pytest.raises(TrainError, match=rf"reduces over the axis name '{axis}'[\s\S]*leave out axis_name="):
    nxp.train_step(lambda model, x: model(x).mean())(*placed(plan), X)
  with pytest.raises(TrainError, match=rf"Net, line \d+ of __call__\) reduces over the axis name '{axis}'"):
    run(lambda x: jax.lax.pmean(x, axis), fsdp=8)


OTHERS = {
  "with_sharding_constraint": jax.lax.with_sharding_constraint,
  "device_put": jax.device_put,
  "jit": lambda x, where: jax.jit(lambda x: x + 1, out_shardings=where)(x),
}


@pytest.mark.parametrize("place", OTHERS.values(), ids=OTHERS)
@pytest.mark.auto_axes("what it expects is of Auto axes")
def test_a_sharding_on_a_mesh_of_other_devices(place):
  eight = jax.NamedSharding(nxp.make_mesh(fsdp=8), P("fsdp"))
  with pytest.raises(TrainError, match=r"states a sharding on other devices[\s\S]*the mesh of the plan"):
    run(lambda x: place(x, eight), fsdp=4, devices=jax.devices()[:4])
  metrics = run(lambda x: jnp.sin(place(x, eight)), fsdp=4, data=2)
  assert np.isfinite(float(metrics["loss"]))
