"""A stack of scanned MLP layers with a wide head: used by the tests of the memory plan and of the search."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nnx_parallel as nxp

DEPTH, WIDTH, HIDDEN = 6, 128, 512


def parameter(rngs, shape, names):
  return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape), out_sharding=names)


class Layer(nnx.Module):  # An MLP
  def __init__(self, rngs):
    self.up = parameter(rngs, (WIDTH, HIDDEN), ("embed", "mlp"))
    self.down = parameter(rngs, (HIDDEN, WIDTH), ("mlp", "embed"))

  def __call__(self, x):
    return x + jax.nn.gelu(x @ self.up[...]) @ self.down[...]


class Stack(nnx.Module):  # Scanned MLP layers and a wide head: enough to tell layers, head and remat apart
  def __init__(self, rngs):
    self.layers = nnx.vmap(Layer, transform_metadata={nnx.PARTITION_NAME: "layers"})(rngs.split(DEPTH))
    self.head = parameter(rngs, (WIDTH, HIDDEN), ("embed", "mlp"))

  def __call__(self, x):
    graphdef, stacked = nnx.split(self.layers)
    x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graphdef, layer)(x), None), x, stacked)
    return x @ self.head[...]


init = lambda: Stack(nnx.Rngs(0))
loss = lambda model, batch: jnp.mean(jnp.square(model(batch)))
RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor", layers=None)
BATCH = jax.ShapeDtypeStruct((512, WIDTH), jnp.float32)
PARAMS = 4 * (2 * DEPTH * WIDTH * HIDDEN + WIDTH * HIDDEN)


def plan(optimizer=None, **axes):
  sizes = {"data": 1, "fsdp": 1, "tensor": 1, **axes}
  return nxp.plan(init, nxp.abstract_mesh(sizes), RULES, optimizer=optimizer or optax.adam(1e-3))


class Named(nnx.Module):  # Two layers that only a pattern tells to be layers
  def __init__(self, rngs):
    self.part_a, self.part_b = (
      nnx.Sequential(nnx.Linear(WIDTH, HIDDEN, rngs=rngs), jnp.sin, nnx.Linear(HIDDEN, WIDTH, rngs=rngs))
      for _ in range(2)
    )

  def __call__(self, x):
    return self.part_b(self.part_a(x))
