"""One element of each row by a comparison: the values and gradients of `take_along_axis`, for any shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_parallel.core.interpret import DEFAULT, interpret, rewrite
from nnx_parallel.core.jaxprs import equations
from nnx_parallel.layers.picks import is_pick, pick


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
