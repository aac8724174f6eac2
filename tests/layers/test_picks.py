"""One element of each row by a comparison: the values and gradients of `take_along_axis`, for any shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_parallel.core.interpret import DEFAULT, inline_calls, interpret, rewrite
from nnx_parallel.core.jaxprs import equations, is_call
from nnx_parallel.layers.picks import is_pick, is_row_pick, pick


@pytest.mark.parametrize("shape", [(5,), (4, 5), (1, 5), (3, 4, 5), (1, 4, 5), (3, 1, 5), (1, 1, 5)])
def test_a_pick_is_found_and_equal_also_with_dims_of_size_1(shape):
  rng = np.random.default_rng(0)
  x, weights = rng.normal(size=shape).astype(np.float32), rng.normal(size=(*shape[:-1], 1)).astype(np.float32)
  indices = rng.integers(0, shape[-1], (*shape[:-1], 1)).astype(np.int32)
  loss = lambda x: (jnp.take_along_axis(x, indices, -1) * weights).sum()
  traced = jax.make_jaxpr(jax.value_and_grad(loss))(x)
  assert [e.primitive.name for e in equations(traced.jaxpr) if is_pick(e)] == ["gather", "scatter-add"]

  found = rewrite(traced, lambda eqn, inputs: pick(eqn, *inputs) if is_pick(eqn) else DEFAULT)
  for ours, theirs in zip(interpret(found, [x]), jax.value_and_grad(loss)(x), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def rows_of(*shape):  # for each dim but the last, the number of the row, to index with
  return jnp.meshgrid(*map(jnp.arange, shape[:-1]), indexing="ij", sparse=True)


READS = {
  "own label": (lambda x, labels: x[(*rows_of(*x.shape), labels)], True),
  "whole rows": (lambda x, labels: x[labels], False),
  "other rows": (lambda x, labels: x[(*(n[::-1] for n in rows_of(*x.shape)), labels)], False),
  "rows as data": (lambda x, labels: x[(*(labels for _ in x.shape[:-1]), labels)], False),
  "filled": (lambda x, labels: x.at[(*rows_of(*x.shape), labels)].get(mode="fill", fill_value=0.0), False),
}


@pytest.mark.parametrize("shape", [(4, 5), (3, 4, 5), (5, 5, 5)])
@pytest.mark.parametrize("name", READS)
def test_the_own_label_of_each_row_is_told_from_other_reads(name, shape):
  read, is_one = READS[name]
  labels = jnp.arange(np.prod(shape[:-1])).reshape(shape[:-1]) % min(shape)
  program = inline_calls(jax.make_jaxpr(read)(jnp.ones(shape), labels), is_call)
  found = [is_row_pick(e, program) for e in program.jaxpr.eqns if e.primitive.name == "gather"]
  assert found[-1] == is_one


@pytest.mark.parametrize("options", [{"mode": "fill", "fill_value": 0.0}, {"mode": "clip"}])
def test_a_pick_has_no_value_outside(options):
  read = lambda x, i: jnp.take_along_axis(x, i, -1, **options)
  traced = jax.make_jaxpr(read)(jnp.ones((4, 5)), jnp.ones((4, 1), int))
  assert not any(is_pick(eqn) for eqn in equations(traced.jaxpr))
