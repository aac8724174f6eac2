"""The fused attention kernel of GPUs, on a GPU; see `tests/conftest.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.plain import decoders
from nnx_parallel.layers.layers import LayerOptions, LayersUsed, with_options

pytestmark = [
  pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
  pytest.mark.usefixtures("as_users_have_it"),
]
LENGTH = 384


def arrays(length=LENGTH, heads=4, features=64, dtype=jnp.bfloat16, keys=None):
  numbers = np.random.default_rng(0)
  shapes = [(2, length, heads, features), *[(2, keys or length, 2, features)] * 2]
  return [jnp.asarray(numbers.normal(size=shape), dtype) for shape in shapes]


def causal(rows, columns, window=None):
  ahead = jnp.arange(rows)[:, None] - jnp.arange(columns)[None]
  return (ahead >= 0) & (ahead < (window or columns))


def attend(q, k, v, seen=lambda rows, columns: causal(rows, columns)):
  scores = jnp.einsum("bqhgd,bkhd->bhgqk", q.reshape(*q.shape[:2], 2, -1, q.shape[-1]), k) * 0.1
  scores = jnp.where(seen(q.shape[1], k.shape[1]), scores.astype(jnp.float32), -1e9)
  weights = jax.nn.softmax(scores).astype(v.dtype)
  return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(*q.shape[:3], -1)


def of_data(rows, columns):
  return jnp.asarray(np.random.default_rng(1).random((rows, columns)) < 0.5)


FORMS = {
  "causal": ({}, {}, None), "window": ({}, {"seen": functools.partial(causal, window=50)}, None),
  "all": ({}, {"seen": lambda r, c: causal(r, c) | ~causal(r, c)}, None),
  "mask": ({}, {"seen": of_data}, None),
  "row without keys": ({}, {"seen": lambda r, c: causal(r, c) & (jnp.arange(r)[:, None] > 4)}, None),
  "more keys": ({"keys": 640}, {}, None), "float16": ({"dtype": jnp.float16}, {}, None),
  "72 features": ({"features": 72}, {}, None), "20 features": ({"features": 20}, {}, "multiple of 8"),
  "odd length": ({"length": 333}, {"seen": of_data}, "Unsupported sequence length"),
  "float32": ({"dtype": jnp.float32}, {}, "got float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients(name):
  shape, options, reason = FORMS[name]
  given = arrays(**shape)
  factor = np.random.default_rng(2).normal(size=given[0].shape).astype(np.float32)
  loss = lambda given, factor: (attend(*given, **options).astype(jnp.float32) * factor).sum()
  used = LayersUsed()
  fused = with_options(loss, LayerOptions(attention="fused"), used)
  program = jax.jit(jax.value_and_grad(fused)).lower(given, factor).compile()
  found = jax.tree.leaves(program(given, factor))
  exact = jax.jit(jax.value_and_grad(loss))(jax.tree.map(lambda x: x.astype(jnp.float32), given), factor)
  for one, other in zip(found[1:], jax.tree.leaves(exact)[1:], strict=True):
    assert jnp.linalg.norm(one.astype(jnp.float32) - other) < 0.04 * jnp.linalg.norm(other)
  assert ("__cudnn" in program.as_text()) == (reason is None)
  assert (reason or "1 of 1 found") in str(used)


@pytest.mark.parametrize(
  "options", [{}, {"remat": "full", "scan_layers": True}, {"remat": "dots"}, {"microbatches": 2}]
)
def test_a_step(options):
  config = decoders.Config(vocab=64, width=64, heads=4, kv_heads=2, head_dim=16, hidden=64, depth=2)
  tokens = np.random.default_rng(1).integers(0, 64, (4, 129)).astype(np.int32)

  def losses(**options):
    model = nxp.Precision(compute=jnp.bfloat16).apply(lambda: decoders.Decoder(config, nnx.Rngs(0)))()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = nxp.train_step(decoders.loss, **options)
    return [float(step(model, optimizer, tokens)["loss"]) for _ in range(3)], str(step.layers)

  found, done = losses(attention="fused", **options)
  np.testing.assert_allclose(found, losses()[0], rtol=5e-3)
  assert "attention by the fused kernel: 2 of 2 found" in done


def test_all_positions_of_some_heads():
  given = arrays(heads=2)
  attend_here = nxp.parallel.context_attention(how="ulysses", causal=True, fused=True)
  with nxp.use_rules(nxp.LogicalRules(batch=None), nxp.make_mesh(context=1, devices=jax.devices()[:1])):
    program = jax.jit(attend_here).lower(*given).compile()
    found = program(*given).astype(jnp.float32)
  wide = [x.astype(jnp.float32) for x in given]
  other = jax.nn.dot_product_attention(*wide, is_causal=True)
  assert jnp.linalg.norm(found - other) < 0.04 * jnp.linalg.norm(other)
  assert "__cudnn" in program.as_text()
