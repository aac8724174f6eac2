"""Masks of positions that layers receive: which of them are made inside the layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_parallel.attention.sink import sink_masks
from nnx_parallel.core.jaxprs import MARK, as_function, is_marked, program_of
from nnx_parallel.core.keys import identity

X = jnp.arange(16.0).reshape(4, 4)


def _layer(x, mask):
  return jnp.where(mask.astype(bool), x, -x)


_layer.__name__ = f"{MARK}layer"
layer = jax.jit(_layer)


def of_positions(x):
  mask = jnp.arange(4)[:, None] >= jnp.arange(4)[None]
  return layer(layer(x, mask), mask)


def in_turn(x):
  away = jnp.arange(4)[:, None] - jnp.arange(4)[None]
  for mask in (away > 0, away >= 0, away > 0):
    x = layer(x, mask)
  return x


def of_an_array_that_the_model_holds(x, table=jnp.arange(4) * 2):  # noqa: B008 (captured)
  mask = table[:, None] >= table[None]
  return layer(layer(x, mask), mask)


def of_angles(x):
  table = jnp.cos(jnp.arange(4.0))[:, None]  # no comparison made it
  return layer(layer(x, table), table)


@pytest.mark.parametrize(
  ("run", "inside"),
  [(of_positions, True), (in_turn, False), (of_angles, False), (of_an_array_that_the_model_holds, False)],
)
def test_a_mask_is_made_inside_if_all_calls_receive_the_same(run, inside):
  traced = jax.make_jaxpr(run)(X)
  found = traced.replace(jaxpr=sink_masks(traced.jaxpr))
  layers = [program_of(eqn) for eqn in found.jaxpr.eqns if is_marked(eqn)]
  assert len(set(map(identity, layers))) == 1
  assert any(eqn.primitive.name in ("ge", "cos") for eqn in layers[0].jaxpr.eqns) == inside
  np.testing.assert_array_equal(as_function(found)(X)[0], run(X))
