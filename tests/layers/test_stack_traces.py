"""What a scan of layers reads, and what waits for what, read from the trace of a gradient."""

import jax.numpy as jnp
import pytest
from flax import nnx

from layers.nets import Net, X, in_turn, trace
from nnx_parallel.core.jaxprs import equations

pytestmark = pytest.mark.usefixtures("as_users_have_it")


class Half(nnx.Module):
  """A product in bfloat16, and a scale that is read twice in float32."""

  def __init__(self, rngs, index=0):
    self.linear = nnx.Linear(4, 4, rngs=rngs, dtype=jnp.bfloat16)
    self.scale = nnx.Param(jnp.ones(4))

  def __call__(self, x):
    scale = self.scale[...]
    return x + self.linear(x.astype(jnp.bfloat16)).astype(jnp.float32) * scale * scale


class Headed(Net):
  """Layers between two others."""

  def __init__(self):
    super().__init__(3, in_turn, Half)
    self.first, self.head = nnx.Linear(4, 4, rngs=nnx.Rngs(1)), nnx.Linear(4, 7, rngs=nnx.Rngs(1))

  def __call__(self, x):
    return self.head(super().__call__(self.first(x)))


def read_by(name, **options):
  """The types that the operations of a name read, in order."""
  found = equations(trace(Headed(), X, scan_layers=True, **options)[0])
  return [[v.aval.str_short() for v in eqn.invars] for eqn in found if eqn.primitive.name == name]


@pytest.mark.parametrize("options", [{}, {"remat": "full"}], ids=str)
def test_layers_are_stacked_in_the_type_that_they_are_read_in(options):
  """Half the bytes; not where a layer reads the array itself too."""
  first = read_by("scan", **options)[0]
  assert sorted(first) == ["bfloat16[3,4,4]", "bfloat16[3,4]", "float32[2,3,4]", "float32[3,4]"]


def test_gradients_of_the_head_are_complete_before_those_of_the_layers_start():
  """Not those of what comes before the layers."""
  (tied,) = read_by("optimization_barrier")
  assert sorted(tied) == ["float32[2,3,4]", "float32[4,7]", "float32[7]"]
