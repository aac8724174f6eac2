"""`nxp.parallel.attention` computes the plain softmax of any scores, by blocks, kernels and devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.attention import kernels
from nnx_parallel.core.jaxprs import equations
from nnx_parallel.errors import SchemeError, TrainError
from training import run_steps

BATCH, QUERIES, KEYS, HEADS, WIDTH = 2, 40, 40, 4, 8
DRAW = np.random.default_rng(0)
IDS = np.sort(DRAW.integers(0, 3, (BATCH, QUERIES))).astype(np.int32)

pytestmark = pytest.mark.usefixtures("as_users_have_it")


def drawn(kv_heads, queries=QUERIES, keys=KEYS):
  shapes = (BATCH, queries, HEADS, WIDTH), *[(BATCH, keys, kv_heads, WIDTH)] * 2
  return [DRAW.normal(size=shape).astype(np.float32) for shape in shapes]


def causal(s, rows, columns):
  return jnp.where(rows >= columns, s, -jnp.inf)


def of_documents(s, rows, columns):
  same = IDS[:, :, None] == IDS[:, None]
  return causal(jnp.where(same[:, None, None], s, -jnp.inf), rows, columns)


SCORES = {  # the scores, and heads of keys
  "plain": (lambda b: None, 4),
  "causal, grouped": (lambda b: causal, 2),
  "soft cap and window": (lambda b: lambda s, i, j: jnp.where(abs(i - j) < 7, 3 * jnp.tanh(s / 3), -1e9), 1),
  "bias": (lambda b: lambda s, i, j: causal(s + b.reshape(1, 2, 2, QUERIES, KEYS), i, j), 2),
  "linear biases": (lambda b: lambda s, i, j: s - b[None, :2, :1, :1, None] * abs(i - j), 2),
  "documents": (lambda b: of_documents, 4),
  "rows without keys": (lambda b: lambda s, i, j: jnp.where((i > j) & (i > 12), s, -jnp.inf), 4),
}


def test_blocks_that_positions_hide_are_not_computed():
  q, k, v = drawn(2)
  v[:, 24:] = np.nan  # 0 x NaN is NaN, where it is computed
  found = jax.jit(lambda *x: nxp.parallel.attention(*x, causal, how=8))(q, k, v)
  assert np.isfinite(found[:, :24]).all()
  assert np.isnan(found[:, 24:]).all()


def written(q, k, v, scores, scale=None):
  q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
  s = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
  if scores is not None:
    s = scores(s, *(jnp.arange(s.shape[d]).reshape([-1 if d == e else 1 for e in range(5)]) for d in (3, 4)))
  seen = s.max(-1, keepdims=True) > -jnp.inf
  weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, s, 0)), 0)
  return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(*q.shape[:2], HEADS, -1)


def both(run, arrays, bias, factor, name):
  scores = SCORES[name][0]
  loss = lambda arrays, bias: (run(*arrays, scores(bias)) * factor).sum()
  return jax.jit(jax.value_and_grad(loss, (0, 1)))(arrays, bias), jax.make_jaxpr(loss)(arrays, bias)


@pytest.mark.parametrize("how", [9, "fused"])
@pytest.mark.parametrize("name", SCORES)
def test_values_and_gradients_are_those_of_the_softmax_written_out(name, how, monkeypatch):
  kernel = functools.partial(kernels.cudnn_attention, implementation="xla")
  monkeypatch.setitem(kernels.KERNELS, "cpu", kernel)
  arrays, factor = drawn(SCORES[name][1]), DRAW.normal(size=(BATCH, QUERIES, HEADS, WIDTH)).astype(np.float32)
  bias = DRAW.normal(size=(HEADS, QUERIES, KEYS)).astype(np.float32)
  wanted, _ = both(written, arrays, bias, factor, name)
  found, program = both(functools.partial(nxp.parallel.attention, how=how), arrays, bias, factor, name)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
  sizes = [v.aval.size for eqn in equations(program) for v in eqn.outvars if v.aval.dtype == np.float32]
  if how == 9 and "bias" not in name:
    assert max(sizes) < BATCH * HEADS * QUERIES * KEYS


@pytest.mark.parametrize(("queries", "keys"), [(1, 40), (40, 1), (3, 50), (1, 1)])
def test_few_queries_or_keys(queries, keys):
  arrays = drawn(2, queries, keys)
  scores = lambda s, i, j: jnp.where((j < 30) & (i != 2), s, -jnp.inf)
  found = nxp.parallel.attention(*arrays, scores, scale=0.3, how=16)
  np.testing.assert_allclose(found, written(*arrays, scores, 0.3), rtol=1e-4, atol=1e-5)


def test_it_learns_in_a_step_whose_devices_share_the_positions():
  class Model(nnx.Module):
    def __init__(self, how):
      self.qkv = nnx.LinearGeneral(8, (3, HEADS, WIDTH), rngs=nnx.Rngs(0))
      self.how = how

    def __call__(self, x):
      q, k, v = jnp.moveaxis(self.qkv(x), 2, 0)
      return nxp.parallel.attention(q, k, v, causal, how=self.how)

  x = DRAW.normal(size=(4, 32, 8)).astype(np.float32)
  losses = []
  for how, sizes in (("blockwise", {"data": 1}), ("ring", {"data": 2, "context": 4}), (4, {"context": 2})):
    rules = [nxp.LogicalRules(batch="data" if "data" in sizes else None, seq="context"), nxp.replicate()]
    mesh = nxp.make_mesh(sizes, devices=jax.devices()[: int(np.prod([*sizes.values()]))])
    init, rules = functools.partial(Model, how), rules if "context" in sizes else nxp.replicate()
    plan = nxp.plan(init, mesh, rules, optimizer=optax.sgd(0.1))
    losses.append(run_steps(plan, lambda model, x: (model(x) ** 2).mean(), [x] * 2).losses)
  np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-5)


def test_what_cannot_be_computed_is_refused():
  q, k, v = drawn(2)
  with pytest.raises(SchemeError, match=r"(?s)cannot be computed for a block.*cumsum"):
    nxp.parallel.attention(q, k, v, lambda s, i, j: jnp.cumsum(s, -1), how=8)
  with pytest.raises(SchemeError, match="do not fit each other"):
    nxp.parallel.attention(q, k, v[:, :3])
  with pytest.raises(TrainError, match="needs a mesh axis that splits the positions"):
    nxp.parallel.attention(q, k, v, how="ring")
  with pytest.raises(TrainError, match="'flash' is not a way"):
    nxp.parallel.attention(q, k, v, how="flash")
