"""Remat in a step: one vocabulary, layer by layer, and never without effect in silence."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from train import models
from train.models import RULES
from training import placed

WIDTH, DEPTH = 32, 2


class Layer(models.Net):
  """Two products and dropout."""

  def __init__(self, rngs):
    super().__init__(rngs, WIDTH, 4 * WIDTH)
    self.drop = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    return x + self.drop(self.down(nnx.gelu(self.up(x))))


class Marked(Layer):
  """The same, as a layer that recomputes itself."""

  @nnx.remat
  def __call__(self, x):
    return super().__call__(x)


class Net(nnx.Module):
  """A Python loop of layers."""

  def __init__(self, kind, rngs, depth=DEPTH):
    self.layers = nnx.List([kind(rngs) for _ in range(depth)])

  def __call__(self, x):
    for layer in self.layers:
      x = layer(x)
    return x


def loss_fn(model, x):
  return (model(x) ** 2).mean()


def plan_on(kind=Marked, *, explicit=False, rules=RULES, depth=DEPTH, **axes):
  mesh = nxp.make_mesh(axes or {"data": 2, "fsdp": 2, "tensor": 2}, explicit=explicit)
  return nxp.plan(lambda: Net(kind, nnx.Rngs(0), depth), mesh, rules, optimizer=optax.adam(1e-2))


def rows(examples=64):
  return np.random.default_rng(0).normal(size=(examples, WIDTH)).astype(np.float32)


def batch_of(plan, examples=64):
  return nxp.shard_batch(rows(examples), plan)


NO_LAYER = (
  r"remat='full' finds no layer in the loss, so it would change nothing\.\n"
  r"  a layer is one of several adjacent modules of one class and structure \(in a list, or as"
  r" attributes that end in numbers\), or a module of stacked arrays that a scan calls slice by slice; other"
  r" scans, and parts under nnx\.remat, stay as written\n"
  r"  Fix: layers of one class in an nnx\.List, or named by layers=\"decoder\.blocks\.\*\"; or nnx\.remat in"
  r" the model, on a __call__ or on the body of a scan; or leave remat out\."
)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_policy_that_finds_no_layer_is_refused(microbatches):
  plan = plan_on(Layer, depth=1)
  step = nxp.train_step(loss_fn, remat="full", microbatches=microbatches)
  with pytest.raises(nxp.errors.TrainError, match=NO_LAYER):
    step(*placed(plan), batch_of(plan))


@pytest.mark.parametrize("remat", ["as written", "none"])
def test_what_changes_nothing_needs_no_layer(remat):
  plan = plan_on(Layer, depth=1)
  assert nxp.train_step(loss_fn, remat=remat).lower(plan, batch=batch_of(plan))


def search(kind, depth=DEPTH, **options):
  batch = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
  init = lambda: Net(kind, nnx.Rngs(0), depth)
  options = {"optimizer": optax.adam(1e-2), "compile_best": 0, **options}
  return nxp.search(init, loss_fn, "cpu:8", batch=batch, rules=RULES, **options)
