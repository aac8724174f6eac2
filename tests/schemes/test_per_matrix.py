"""Optimizers of whole matrices: equal to one device on every layout, each product once, two exchanges."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

import nnx_parallel as nxp
from layout.models import named
from nnx_parallel.core.nodes import path_str, variables
from training import placed

RATE = 1e-2
PERMUTE = "collective-permute"
RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor")


class Net(nnx.Module):  # Square and long kernels in both orders of their axes, and biases
  def __init__(self, depth=2, width=16, hidden=32, use_bias=True):
    linear = functools.partial(nnx.Linear, rngs=nnx.Rngs(0), use_bias=use_bias)
    up, down = ({"kernel_metadata": named(*names)} for names in (("embed", "mlp"), ("mlp", "embed")))
    self.blocks = nnx.List()
    for _ in range(depth):
      block = {"a": linear(width, width, **up), "b": linear(width, width, **down)}
      block |= {"up": linear(width, hidden, **up), "down": linear(hidden, width, **down)}
      self.blocks.append(nnx.Dict(block))

  def __call__(self, x):
    for block in self.blocks:
      x = x + block.b(jnp.tanh(block.a(x)))
      x = x + block.down(jnp.tanh(block.up(x)))
    return x


class Stacked(nnx.Module):  # Layers in one array, and an attention kernel whose columns are two dims
  def __init__(self):
    rngs = nnx.Rngs(0)
    init = nnx.initializers.lecun_normal()
    self.layers = nnx.Param(init(rngs.params(), (3, 16, 32)), out_sharding=("layers", "embed", "mlp"))
    self.query = nnx.Param(init(rngs.params(), (16, 4, 8)), out_sharding=("embed", "mlp", None))
    self.out = nnx.Param(init(rngs.params(), (16, 32)), out_sharding=("mlp", "embed"))
    self.norm = nnx.RMSNorm(16, rngs=rngs)

  def __call__(self, x):
    x = self.norm(x)
    for layer in self.layers[...]:
      x = x + jnp.tanh(x @ layer) @ self.out[...].T
    return x + jnp.einsum("be,ehd->bhd", x, self.query[...]).reshape(len(x), -1) @ self.out[...].T


loss_fn = lambda model, x: ((model(x) - x[:, ::-1]) ** 2).mean()


def dims(params):
  kinds = {2: MuonDimensionNumbers(), 3: MuonDimensionNumbers(-2, -1)}
  of = lambda path, x: MuonDimensionNumbers(0, (1, 2)) if "query" in str(path) else kinds.get(x.ndim)
  return jax.tree_util.tree_map_with_path(of, params)


class ShampooState(NamedTuple):
  left: optax.Params
  right: optax.Params


def shampoo(rate):
  """Shampoo with exact roots: state of other shapes than the parameter's."""

  def init(params):
    eye = lambda dim: jax.tree.map(lambda x: 1e-3 * jnp.eye(x.shape[dim]), params)
    return ShampooState(eye(0), eye(1))

  def root(x):
    values, vectors = jnp.linalg.eigh(x)
    return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T

  def update(grads, state, params=None):
    left = jax.tree.map(lambda s, g: s + g @ g.T, state.left, grads)
    right = jax.tree.map(lambda s, g: s + g.T @ g, state.right, grads)
    new = jax.tree.map(lambda a, g, b: -rate * root(a) @ g @ root(b), left, grads, right)
    return new, ShampooState(left, right)

  return optax.GradientTransformation(init, update)


def parts(wrap, name="muon"):
  """A transformation for matrices, another for the rest."""
  kernels = shampoo(RATE) if name == "shampoo" else optax.contrib.muon(RATE, weight_decay=0.1)
  labels = lambda params: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "rest", params)
  both = optax.partition({"matrix": wrap(kernels), "rest": optax.adam(RATE)}, labels)
  return optax.chain(optax.clip_by_global_norm(0.5), both)


TRANSFORMATIONS = {
  "muon": lambda wrap: wrap(optax.contrib.muon(RATE)),
  "muon with decay and adam": parts,
  "shampoo and adam": functools.partial(parts, name="shampoo"),
}
LAYOUTS = {
  "fsdp": ((1, 8, 1), {}), "tensor": ((1, 1, 8), {}), "data": ((8, 1, 1), {}),
  "data x fsdp x tensor": ((2, 2, 2), {}), "explicit": ((2, 2, 2), {"explicit": True}),
  "zero": ((2, 4, 1), {"zero": 1}),
}  # fmt: skip


def plan_on(sizes, tx, init=Net, explicit=False, rules=RULES, **options):
  axes = dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))
  mesh = nxp.make_mesh(axes, devices=jax.devices()[: math.prod(sizes)], explicit=explicit)
  return nxp.plan(init, mesh, rules.replace(layers=None), optimizer=tx, **options)


def batch_of(plan, width=16, seed=0):
  return nxp.shard_batch(np.random.default_rng(seed).normal(size=(32, width)).astype(np.float32), plan)


def arrays(module):
  return {path_str(path): np.asarray(leaf[...]) for path, leaf in variables(module).items()}


def trained(plan, steps=3, width=16, **options):
  model, optimizer = placed(plan)
  step = nxp.train_step(loss_fn, **options)
  for seed in range(steps):
    step(model, optimizer, batch_of(plan, width, seed))
  assert len(step.compiles) == 1
  nxp.check_layout(model, plan, optimizer=optimizer)
  return model, optimizer


def assert_equal(model, other):
  left, right = arrays(model), arrays(other)
  assert left.keys() == right.keys()
  for name, value in left.items():
    np.testing.assert_allclose(value, right[name], rtol=2e-4, atol=2e-5, err_msg=name)


@functools.cache
def alone(name):
  """Trained on one device, without the wrapper."""
  return trained(plan_on((1, 1, 1), TRANSFORMATIONS[name](lambda tx: tx)))[0]


SLOW = ("tensor", "data")
CASES = [
  *(pytest.param("muon", layout, marks=[pytest.mark.slow] * (layout in SLOW)) for layout in LAYOUTS),
  ("muon with decay and adam", "zero"),
  ("shampoo and adam", "fsdp"),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.slow
def test_the_numbers_are_those_of_one_device(name, layout):
  sizes, options = LAYOUTS[layout]
  plan = plan_on(sizes, TRANSFORMATIONS[name](nxp.parallel.per_matrix), **options)
  assert_equal(trained(plan)[0], alone(name))


@functools.cache
def stacked_alone():
  """`Stacked` on one device, with and without the wrapper."""
  own = optax.contrib.muon(RATE, muon_weight_dimension_numbers=dims)
  both = (nxp.parallel.per_matrix(optax.contrib.muon(RATE), dims), own)
  wrapped, plain = (trained(plan_on((1, 1, 1), tx, Stacked))[0] for tx in both)
  assert_equal(wrapped, plain)
  return plain


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("sizes", "layers"), [((1, 8, 1), None), ((2, 2, 2), None), ((1, 4, 2), "fsdp")])
def test_dims_say_what_the_matrices_of_an_array_are(sizes, layers):
  tx = nxp.parallel.per_matrix(optax.contrib.muon(RATE), dims)
  mesh = nxp.make_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
  rules = RULES.replace(layers=layers) if layers is None else RULES.replace(layers=layers, embed=None)
  plan = nxp.plan(Stacked, mesh, rules, optimizer=tx, uneven="pad")
  model, optimizer = trained(plan)
  assert_equal(model, stacked_alone())
  groups = optimizer.opt_state.groups
  assert {*groups} == {"16x32_float32"}
  assert {x.shape[0] for x in jax.tree.leaves(nnx.as_pure(groups))} == {8}  # 3 + 1 + 1, padded


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "explicit"), [((2, 2, 2), False), ((8, 1, 1), True)], ids=str)
def test_a_step_written_by_hand_exchanges_too(sizes, explicit):
  rules = nxp.LogicalRules(batch="data", embed=None, mlp=None) if explicit else RULES
  plan = plan_on(sizes, nxp.parallel.per_matrix(optax.contrib.muon(RATE)), explicit=explicit, rules=rules)
  model, optimizer = placed(plan)

  @nnx.jit
  def step(model, optimizer, x):
    optimizer.update(model, nnx.grad(loss_fn)(model, x))

  for seed in range(3):
    step(model, optimizer, batch_of(plan, seed=seed))
  nxp.check_layout(model, plan, optimizer=optimizer)
  assert_equal(model, alone("muon"))


@pytest.mark.slow
def test_the_plan_says_where_the_matrices_are():
  plan = plan_on((2, 2, 2), nxp.parallel.per_matrix(shampoo(RATE)), functools.partial(Net, 3, use_bias=False))
  rows = {leaf.name.partition("groups.")[2]: leaf for leaf in plan.leaves if "groups." in leaf.name}
  square, long = rows["16x16_float32.left"], rows["16x32_float32.right"]
  assert (square.shape, square.padding) == ((6, 16, 16), (2, 0, 0))
  assert (long.shape, long.padding) == ((3, 32, 32), (5, 0, 0))
  assert square.spec == jax.P(("data", "fsdp", "tensor"), None, None)
  assert square.decision.reason == "6 whole matrices on 8 devices, 2 of them without a matrix"
  assert square.bytes_per_device == 16 * 16 * 4
  assert nxp.Plan.from_json(plan.to_json())[square.name].spec == square.spec


def report(plan, batch):
  step = nxp.train_step(loss_fn)
  return nxp.compile_report(step, plan, batch=jax.ShapeDtypeStruct(batch, jnp.float32))


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("sizes", "shares"), [((1, 8, 1), 3), ((1, 4, 2), 32 / 7)], ids=str)
def test_each_product_runs_once_and_gradients_travel_by_rows(sizes, shares):
  """Whole matrices and back are two shares; half of the matrices are cut by columns, or by both."""
  init = functools.partial(Net, 8, 64, 128, use_bias=False)
  of = lambda tx: report(plan_on(sizes, tx, init), (64, 64))
  muon, adam = of(nxp.parallel.per_matrix(optax.contrib.muon(RATE))), of(optax.adam(RATE))
  # Five times x @ x.T, a @ a and b @ x, of the smaller side: by hand.
  square, long = 3 * 64**3, 64 * 64 * 128 * 2 + 64**3
  least = 5 * 2 * 8 * (2 * square + 2 * long) / 8
  assert muon.cost.flops - adam.cost.flops == pytest.approx(least, rel=1e-3)
  share = 4 * 8 * (2 * 64 * 64 + 2 * 64 * 128) / 8
  extra = muon.sent().per_device - adam.sent().per_device
  assert extra == pytest.approx(shares * share * 7 / 8, rel=1e-3)
  assert {c.kind for c in muon.collectives} <= {c.kind for c in adam.collectives} | {"all-to-all", PERMUTE}


def test_dims_of_another_kind_are_an_error():
  with pytest.raises(nxp.errors.SchemeError, match="dims=3 is not a function"):
    nxp.parallel.per_matrix(optax.contrib.muon(1e-3), dims=3)
  tx = nxp.parallel.per_matrix(optax.contrib.muon(1e-3), dims=lambda x: jax.tree.map(lambda _: 3, x))
  with pytest.raises(nxp.errors.SchemeError, match="dims gave 3 for an array of shape"):
    tx.init({"w": jnp.ones((4, 4))})


def test_inside_shard_map_is_an_error():
  plan = plan_on((1, 8, 1), nxp.parallel.per_matrix(optax.contrib.muon(RATE)))
  model, optimizer = placed(plan)
  update = lambda model, optimizer: optimizer.update(model, nnx.state(model, nnx.Param))
  with pytest.raises(nxp.errors.SchemeError, match="called in a shard_map"):
    nnx.jit(nxp.parallel.map_shards(update, plan))(model, optimizer)
