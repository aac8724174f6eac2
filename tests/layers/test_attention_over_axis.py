"""Attention by blocks where a mesh axis splits the queries: each device computes its own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.plain import decoders
from nnx_parallel.layers.attention import queries_over
from nnx_parallel.report.program.cost import cost

CONFIG = decoders.Config(
  vocab=64, width=32, heads=4, kv_heads=2, head_dim=8, hidden=64, depth=2, dtype="float32"
)
INIT = lambda: decoders.Decoder(CONFIG, nnx.Rngs(0))
TENSOR = nxp.PathRules(
  {r".*\.(q|k|v|gate|up)\.kernel": (None, "tensor"), r".*\.(o|down)\.kernel": ("tensor", None)}, optional=True
)


@pytest.fixture(autouse=True)
def as_users_have_it():
  """jax's own promotion: the models are as people write them."""
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    yield


def planned(mesh, *rules, batch="data", seq="context"):
  rest = rules or [nxp.replicate()]
  rules = [nxp.LogicalRules(batch=batch, **({"seq": seq} if seq else {})), *rest]
  return nxp.plan(INIT, mesh, rules, optimizer=optax.sgd(0.1))


@functools.cache
def one_device():
  return planned(nxp.make_mesh(data=1, devices=jax.devices()[:1]), seq=None)


@functools.cache
def tokens(length):
  return np.random.default_rng(0).integers(0, CONFIG.vocab, (4, length + 1))


@functools.cache
def alone(length):
  return trained(one_device(), length)


def trained(plan, length, **options):
  """Losses of three steps, and the parameters after them."""
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(decoders.loss, attention=16, **options)
  batch = nxp.shard_batch(tokens(length), plan)
  losses = [float(step(model, optimizer, batch)["loss"]) for _ in range(3)]
  return losses, jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(model, nnx.Param)))


LAYOUTS = {
  "data": ({"data": 2, "context": 4}, [], {}, 48),
  "fsdp": ({"fsdp": 2, "context": 4}, [nxp.fsdp(min_size=0)], {"batch": "fsdp"}, 48),
  "tensor": ({"data": 2, "context": 2, "tensor": 2}, [TENSOR, nxp.replicate()], {}, 48),
  "odd lengths": ({"data": 2, "context": 4}, [], {}, 4 * 21),
  "does not divide": ({"data": 2, "context": 4}, [], {}, 46),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_that_of_one_device(layout):
  mesh, rules, options, length = LAYOUTS[layout]
  losses, params = trained(planned(nxp.make_mesh(mesh), *rules, **options), length)
  np.testing.assert_allclose(losses, alone(length)[0], rtol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), params, alone(length)[1])


def test_recomputed_and_rolled_layers():
  losses, params = trained(planned(nxp.make_mesh(data=2, context=4)), 48, remat="full", roll=True)
  np.testing.assert_allclose(losses, alone(48)[0], rtol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), params, alone(48)[1])


def test_a_device_computes_its_share_and_gathers_keys_and_values_once():
  length, batch, data, context = 512, 4, 2, 4
  plan = planned(nxp.make_mesh(data=data, context=context))
  step = nxp.train_step(decoders.loss, attention=64)
  abstract = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
  flops = [cost(step.lower(of, batch=abstract).compile().as_text()).flops for of in (one_device(), plan)]
  assert flops[0] == flops[1] * data * context
  report = nxp.compile_report(step, plan, batch=abstract)
  sent = report.bytes_by("kind", "axes")
  gathered = CONFIG.depth * 2 * (batch // data) * length * CONFIG.heads * CONFIG.head_dim * 4
  assert sent["all-gather", "context"] == gathered  # the model repeats keys and values for groups of heads
  assert ("all-gather", "data") not in sent
  whole = nxp.compile_report(step, one_device(), batch=abstract).memory.temporaries
  assert report.memory.temporaries < whole / 4


def test_an_axis_that_splits_weights_is_left_to_them():
  mesh = nxp.make_mesh(data=2, tensor=4)
  plan = planned(mesh, TENSOR, nxp.replicate(), seq="tensor")
  abstract = jax.ShapeDtypeStruct((4, 49), jnp.int32)
  step = nxp.train_step(decoders.loss, attention=16)
  assert "manual_computation" not in step.lower(plan, batch=abstract).as_text()
  split = planned(nxp.make_mesh(data=2, context=4))
  assert "manual_computation" in step.lower(split, batch=abstract).as_text()


Q, K, V = np.random.default_rng(1).normal(size=(3, 2, 24, 4, 8)).astype(np.float32)
BIAS = np.random.default_rng(2).normal(size=(4, 24, 24)).astype(np.float32)


def biased(q, k, v, bias):
  seen = jnp.arange(24)[:, None] >= jnp.arange(24)[None]
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
  return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)


def merged(q, k, v, bias):
  """Queries behind the heads in one dim, whose parts are no queries of all heads."""
  rows = q.transpose(0, 2, 1, 3).reshape(2, -1, 8)
  scores = jnp.einsum("brd,bkd->brk", rows, k[:, :, 0]).reshape(2, 4, 24, 24) + bias
  return jnp.einsum("bhqk,bkd->bhqd", jax.nn.softmax(scores), v[:, :, 0])


@pytest.mark.parametrize("function", [biased, merged])
def test_values_and_gradients_of_masks_and_biases(function):
  def both(change):
    def total(*given):
      out = change(function)(*given)
      return (out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)).sum()

    return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(Q, K, V, BIAS)

  def by_fives(f):
    run = nxp.with_layers(lambda _, given: f(*given), attention=5)
    return lambda *given: run(None, given)

  expected = both(lambda f: f)
  with jax.set_mesh(nxp.make_mesh(data=2, context=4)), queries_over("context"):
    found = both(by_fives)
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found[1], expected[1])
