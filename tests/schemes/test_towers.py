"""Pipelines of models whose layers do not all follow each other."""

import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import TrainError
from nnx_parallel.testing import with_gradient_norms
from training import run_steps

X = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")


class Inner(nnx.Module):
  def __init__(self, rngs):
    self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

  def __call__(self, x):
    return self.down(nnx.gelu(self.up(x)))


class Block(Inner):
  def __call__(self, x):
    return x + super().__call__(x)


class Towers(nnx.Module):  # Two towers of a few layers: their outputs meet behind the last layers
  def __init__(self, depth, shared, kind=Block):
    rngs = nnx.Rngs(0)
    self.one = nnx.List([kind(rngs) for _ in range(depth)])
    self.two = self.one if shared else nnx.List([kind(rngs) for _ in range(depth)])

  def __call__(self, x):
    one, two = x, 2 * x
    for layer in self.one:
      one = layer(one)
    for layer in self.two:
      two = layer(two)
    return one - two


class Outside(Towers):  # The residual is outside of the layer
  def __call__(self, x):
    for layer in self.one:
      x = x + layer(x)
    return x


def mesh(**axes):
  return nxp.make_mesh(**axes, devices=jax.devices()[: int(np.prod([*axes.values()]))])


def plan(init, mesh):
  return nxp.plan(init, mesh, nxp.LogicalRules(batch="data"), optimizer=with_gradient_norms(optax.sgd(0.1)))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
  ("depth", "shared"), [(2, False), (4, True), (4, False)], ids=["two of two", "one, twice", "two of four"]
)
def test_towers_of_a_few_layers_are_a_pipeline(depth, shared):
  init, loss = lambda: Towers(depth, shared), lambda model, x: (model(x) ** 2).mean()
  one = run_steps(plan(init, mesh(data=1)), loss, [X, X])
  piped = run_steps(plan(init, mesh(data=2, stage=2)), loss, [X, X], pipeline="stage", microbatches=2)
  assert piped.losses == pytest.approx(one.losses, rel=1e-5)
  first = rf"one.0 to one.{depth - 1}: a 1F1B pipeline over stage, .*; weights of ([^,]*), .*"
  found = re.search(f"{first}; outside of the pipeline, computed by each stage: (.*)", str(piped.step.layers))
  rest = "one.* (4)" if shared else "two.0, two.1" if depth == 2 else "two.* (4)"
  assert found[2] == f"{rest}, weights of {found[1]}"  # as many as in the pipeline


@pytest.mark.parametrize(
  "options", [{"pipeline": "stage", "microbatches": 2}, {"scan_layers": True}], ids=str
)
def test_a_residual_outside_of_the_layer_is_an_error_that_says_where_it_belongs(options):
  step = nxp.train_step(lambda model, x: (model(x) ** 2).mean(), **options)
  abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
  with pytest.raises(TrainError, match=r"add between one\.0 and one\.1[\s\S]*returns x \+ self\.inner\(x\)"):
    step.lower(plan(lambda: Outside(4, True, Inner), mesh(data=2, stage=2)), batch=abstract)
