"""A small model with names, its meshes and its data, shared by the tests of this package."""

import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnx_parallel as nxp
from layout.models import named
from nnx_parallel.core.nodes import path_str, value_of, variables
from training import run_steps

RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor")
MESHES = {"dp": (8, 1, 1), "dp x fsdp x tp": (2, 2, 2)}


class Net(nnx.Module):  # Two layers
  def __init__(self, rngs, width=16, hidden=32, out=None, **options):
    linear = functools.partial(nnx.Linear, rngs=rngs, **options)
    self.up = linear(width, hidden, kernel_metadata=named("embed", "mlp"))
    self.down = linear(hidden, out or width, kernel_metadata=named("mlp", "embed"))

  def __call__(self, x):
    return self.down(nnx.relu(self.up(x)))


class Noisy(Net):  # With a batch norm and a dropout
  def __init__(self, rngs, width=8, hidden=16):
    super().__init__(rngs, width, hidden)
    self.norm, self.drop = nnx.BatchNorm(hidden, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

  def __call__(self, x):
    return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


class Normed(nnx.Module):
  """Norms over the tensor axis before kernels over fsdp and tensor: XLA alone swaps their examples."""

  def __init__(self, rngs):
    self.norms = nnx.List([nnx.RMSNorm(16, scale_metadata=named("mlp"), rngs=rngs) for _ in range(2)])
    kernel = named("embed", "mlp")
    self.layers = nnx.List([nnx.Linear(16, 16, kernel_metadata=kernel, rngs=rngs) for _ in range(2)])

  def __call__(self, x):
    for norm, layer in zip(self.norms, self.layers, strict=True):
      x = x + jnp.sin(layer(norm(x)))
    return x


loss_fn = lambda model, x: ((model(x).astype(jnp.float32) - x) ** 2).mean()


def data(steps=3):
  return [np.random.default_rng(i).normal(size=(32, 16)).astype(np.float32) for i in range(steps)]


def plan_on(name, tx, init=lambda: Net(nnx.Rngs(0)), **options):
  mesh = nxp.make_mesh(dict(zip(("data", "fsdp", "tensor"), MESHES[name], strict=True)))
  return nxp.plan(init, mesh, RULES, optimizer=tx, **options)


def train(plan, batches, loss=loss_fn, **options):
  """The model and the optimizer after a step on each batch, and the losses."""
  model, optimizer, losses, step = run_steps(plan, loss, batches, **options)
  assert len(step.compiles) == 1
  return model, optimizer, losses


def arrays(module):
  return {path_str(path): np.asarray(value_of(leaf)) for path, leaf in variables(module).items()}
