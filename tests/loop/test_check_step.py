"""`check_step` sees what differs between two layouts, and takes rounding for rounding."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp


class Net(nnx.Module):
  """A bias before a norm, whose gradient is zero but for rounding; statistics; random numbers."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.up = nnx.Linear(8, 16, rngs=rngs)
    self.norm = nnx.BatchNorm(16, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.down = nnx.Linear(16, 5, rngs=rngs)
    self.seen = nnx.BatchStat(jnp.zeros(()))

  def __call__(self, x):
    return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def loss_fn(model, x):
  y = model(x)
  return (y**2).mean(), {"largest": (abs(y).sum(), jnp.float32(y.size))}


def plan_of(mesh, tx=None, **options):
  rules = [nxp.LogicalRules(batch=tuple(mesh)), nxp.fsdp(tuple(mesh), min_size=0)]
  devices = jax.devices()[: math.prod(mesh.values())]
  return nxp.plan(
    Net, nxp.make_mesh(mesh, devices=devices), rules, optimizer=tx or optax.adam(1e-2), **options
  )


X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")


def test_equal_steps_are_equal_also_with_padding_zero_and_microbatches():
  plan = plan_of({"data": 2, "fsdp": 4}, uneven="pad", zero=1)
  found = nxp.check_step(plan, None, loss_fn, X, microbatches=2)
  assert found, str(found)
  assert [row.name for row in found.metrics] == ["loss", "largest"]
  names = {row.name for row in found.leaves}
  assert {"norm.mean", "dropout.rngs.count", "optimizer/opt_state.0.mu.down.kernel"} <= names
  assert f"all {len(names)} arrays agree" in str(found)
  assert found.meshes == ("data 2 x fsdp 4", "one device")


def test_difference_in_loss_statistics_and_updates_is_named():
  def on(layout):
    """As if the compiler had computed something else on the smaller mesh."""
    return (layout.size == 4) * 1e-2

  def other(model, x):
    loss, metrics = loss_fn(model, x)
    off = on(jax.sharding.get_abstract_mesh())
    model.seen[...] += 1 + off
    return loss * (1 + off), metrics

  sgd = optax.sgd(1.0)
  two = plan_of({"data": 2, "fsdp": 2}, sgd), plan_of({"data": 4, "fsdp": 2}, sgd)
  found = nxp.check_step(*two, other, X)
  assert [row.name for row in found.metrics if not row] == ["loss"]
  assert {"seen", "down.kernel"} <= {row.name for row in found.leaves if not row}
  with pytest.raises(nxp.TrainError, match=r"(?s)different numbers.*down\.kernel.*different"):
    found.raise_if_wrong()
