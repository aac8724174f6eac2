"""Float32 training on every layout equals one device: the loss of each step and the norm of each gradient."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel import testing
from nnx_parallel.testing import assert_same_numbers, with_gradient_norms


class Doubled(nnx.Module):
  """A layer whose gradient is multiplied by the number of devices, as a wrong reduction does."""

  def __init__(self, rngs, times):
    self.up, self.times = nnx.Linear(8, 8, rngs=rngs), times

  def __call__(self, x):
    kernel = self.up.kernel[...]
    return x @ (kernel + (self.times - 1) * (kernel - jax.lax.stop_gradient(kernel)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_gradient_that_is_wrong_by_a_factor_is_named(recorded):
  tx = with_gradient_norms(optax.adam(1e-3)) if recorded else optax.adam(1e-3)
  x = [np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32) for i in range(3)]

  def run(times):
    plan = nxp.plan(lambda: Doubled(nnx.Rngs(0), times), nxp.make_mesh(data=8), optimizer=tx)
    return testing.run_training(plan, lambda model, x: (model(x) ** 2).mean(), x)

  one, many = run(1), run(2)
  np.testing.assert_allclose(one.losses, many.losses, rtol=1e-5)  # Adam hides it
  step = ", step 0" if recorded else ""
  with pytest.raises(AssertionError, match=rf"wrong{step}: the gradient norm of up.kernel is .*\(ratio 2\)"):
    assert_same_numbers("wrong", one, many)


def test_a_wrong_loss_is_named():
  one = testing.Training(np.array([1.0, 2.0]), {}, {})
  many = testing.Training(np.array([1.0, 2.1]), {}, {})
  with pytest.raises(AssertionError, match=r"tp: the loss of step 1 is .*2.1.*, on one device .*2.0"):
    assert_same_numbers("tp", one, many)
