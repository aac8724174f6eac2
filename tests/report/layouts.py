"""Small programs whose communication is known by hand: used by several tests of this room."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nnx_parallel as nxp

# So many examples that gathering the parameters is cheaper than gathering activations.
WIDTH, HIDDEN, BATCH = 64, 128, 1024


class MLP(nnx.Module):
  """Two bias-free layers with logical names."""

  def __init__(self, rngs: nnx.Rngs):
    self.up = nnx.Linear(
      WIDTH, HIDDEN, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": ("embed", "mlp")}
    )
    self.down = nnx.Linear(
      HIDDEN, WIDTH, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": ("mlp", "embed")}
    )

  def __call__(self, x):
    return self.down(nnx.relu(self.up(x)))


def init():
  return MLP(nnx.Rngs(0))


def loss(model, batch):
  return jnp.mean(jnp.square(model(batch)))


def batch():
  return jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


def plan(mesh=None, optimizer=None, zero=0, **axes):
  """A plan of the MLP: batch over data and fsdp, embed over fsdp, mlp over tensor."""
  rules = nxp.LogicalRules(
    batch=("data", "fsdp"),
    embed="fsdp",
    mlp="tensor",
  )
  sizes = {"data": 1, "fsdp": 1, "tensor": 1, **axes}
  mesh = mesh or nxp.abstract_mesh(sizes)
  return nxp.plan(init, mesh, rules, optimizer=optimizer or optax.sgd(0.1), zero=zero)


PARAMS = 2 * WIDTH * HIDDEN * 4
