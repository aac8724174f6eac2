"""What a compiler keeps of what a trace saves."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.estimate.memory import memory_plan
from nnx_parallel.report.estimate.propagate import is_fused
from nnx_parallel.report.estimate.workload import stored

WORDS, WIDTH, TOKENS = 4096, 64, 512


def kept_of(function, *shapes):
  """Shapes and dtypes of what is stored for all results of a function."""
  body = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, t) for s, t in shapes)).jaxpr
  return sorted(v.aval.str_short() for v in stored(body, body.outvars))


def test_an_elementwise_result_is_what_it_is_computed_from():
  def of(x, w):
    logits = x @ w
    return jnp.exp(logits.astype(jnp.float32)), logits.astype(jnp.float32) > 0

  found = kept_of(of, ((8, 4), jnp.bfloat16), ((4, 16), jnp.bfloat16))
  assert found == ["bfloat16[8,16]"]


def test_a_narrow_copy_is_kept_rather_than_its_wide_source():
  found = kept_of(lambda x, w: (x @ w).astype(jnp.bfloat16), ((8, 4), jnp.float32), ((4, 16), jnp.float32))
  assert found == ["bfloat16[8,16]"]


def test_masks_of_inputs_cost_nothing():
  assert kept_of(lambda x: jax.nn.one_hot(x, 16, dtype=jnp.float32) == 1.0, ((8,), jnp.int32)) == []


def test_a_barrier_hands_each_operand_on():
  def of(x, w):
    y, w = jax.lax.optimization_barrier((x @ w, w))
    return 2 * y, 2 * w

  assert kept_of(of, ((8, 4), jnp.float32), ((4, 16), jnp.float32)) == ["float32[8,16]"]


def test_a_function_is_fused_when_all_of_it_is():
  eqns = jax.make_jaxpr(lambda x: (jnp.where(x > 0, x, 0.0), jax.nn.softmax(x)))(jnp.ones(3)).jaxpr.eqns
  names = {eqn.primitive.name: is_fused(eqn) for eqn in eqns}
  assert names["gt"]
  assert not names["reduce_sum"]
  assert all(is_fused(eqn) for eqn in eqns if eqn.params.get("name") == "_where")


class Head(nnx.Module):
  """A wide head alone: its logits outweigh everything else."""

  def __init__(self, rngs):
    self.head = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WORDS)), out_sharding=("embed", "words"))

  def __call__(self, x):
    return x @ self.head[...]


def loss(model, batch):
  logits = model(batch)
  chosen = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == 7
  return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(chosen, logits, 0.0), -1))


def plan(**axes):
  rules = nxp.LogicalRules(batch="data", embed=None, words="tensor")
  mesh = nxp.abstract_mesh({"data": 1, "tensor": 1, **axes})
  return nxp.plan(lambda: Head(nnx.Rngs(0)), mesh, rules, optimizer=optax.sgd(0.1))


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "tensor": 4}], ids=str)
def test_logits_count_once_and_their_mask_not_at_all(axes):
  batch = jax.ShapeDtypeStruct((8, TOKENS, WIDTH), jnp.float32)
  planned = memory_plan(plan(**axes), loss, batch)
  logits = 8 * TOKENS * WORDS * 4 // 8
  assert planned.categories["logits"] == logits
  assert logits <= planned.categories["kept activations"] < 1.01 * logits
  compiled = compile_report(nxp.train_step(loss), plan(**axes), batch=batch, topology="cpu:8")
  assert compiled.need_bytes == pytest.approx(planned.need_bytes, rel=0.35)
