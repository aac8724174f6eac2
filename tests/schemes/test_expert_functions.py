"""Functions of experts compute the rows of several experts as each expert alone does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx_parallel as nxp

EXPERTS, WIDTH, HIDDEN, SIZES = 4, 6, 10, (3, 0, 5, 2)

pytestmark = pytest.mark.usefixtures("as_users_have_it")


def drawn(dtype=jnp.float32, *names):
  draw = np.random.default_rng(0).normal
  shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "bias": (WIDTH,)}
  parameters = {k: jnp.asarray(draw(size=(EXPERTS, *shapes[k])) / 3, dtype) for k in names or shapes}
  return parameters, jnp.asarray(draw(size=(sum(SIZES), WIDTH)), dtype)


def biased(p, rows, sizes):
  product = nxp.parallel.ragged_dot
  return product(jnp.tanh(product(rows, p["up"], sizes)), p["down"], sizes, bias=p["bias"])


def by_jax(p, rows, sizes):
  bias = jnp.repeat(p["bias"], sizes, axis=0, total_repeat_length=len(rows))
  product = jax.lax.ragged_dot
  return product(jnp.tanh(product(rows, p["up"], sizes)), p["down"], sizes) + bias


def biased_alone(p, rows):
  return jnp.tanh(rows @ p["up"]) @ p["down"] + p["bias"]


def gated_alone(p, rows):
  return (jax.nn.silu(rows @ p["gate"]) * (rows @ p["up"])) @ p["down"]


def relu_alone(p, rows):
  return jax.nn.relu(rows @ p["up"]) @ p["down"]


gated = nxp.parallel.mlp_experts
FUNCTIONS = {
  "gated": (gated, gated_alone, ("gate", "up", "down"), jnp.float32),
  "gated bfloat16": (gated, gated_alone, ("gate", "up", "down"), jnp.bfloat16),
  "relu": (functools.partial(gated, activation=jax.nn.relu), relu_alone, ("up", "down"), jnp.float32),
  "biased": (biased, biased_alone, (), jnp.float32),
  "JAX's product": (by_jax, biased_alone, (), jnp.float32),
}


@pytest.mark.parametrize("case", FUNCTIONS)
@pytest.mark.parametrize("sizes", [SIZES, (0, 10, 0, 0), (1, 2, 3, 4)])
def test_values_and_gradients_are_those_of_each_expert_alone(case, sizes):
  function, of_one, names, dtype = FUNCTIONS[case]
  parameters, rows = drawn(dtype, *names)

  def alone(parameters, rows):
    parts = enumerate(np.split(np.arange(len(rows)), np.cumsum(sizes)[:-1]))
    own = lambda n: jax.tree.map(lambda leaf: leaf[n], parameters)
    return jnp.concatenate([of_one(own(n), rows[part]) for n, part in parts])

  def with_gradients(run):
    loss = lambda *args: (run(*args).astype(jnp.float32) ** 2).sum()
    return jax.jit(lambda *args: (run(*args), jax.grad(loss, (0, 1))(*args)))(parameters, rows)

  tolerance = 2e-2 if dtype == jnp.bfloat16 else 1e-5
  found, wanted = with_gradients(lambda *args: function(*args, jnp.array(sizes))), with_gradients(alone)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 1)], ids=["rows", "weights", "both"])
def test_it_can_be_mapped(axes):
  def of(n):
    return [
      some if axis is None else jax.tree.map(lambda x: x / (n + 1), some)
      for some, axis in zip(drawn(jnp.float32, "gate", "up", "down"), axes, strict=True)
    ]

  run = jax.value_and_grad(lambda *args: (gated(*args, jnp.array(SIZES)) ** 2).sum(), (0, 1))
  stacked = [
    first if axis is None else jax.tree.map(lambda *xs, axis=axis: jnp.stack(xs, axis), first, second)
    for first, second, axis in zip(of(0), of(1), axes, strict=True)
  ]
  found = jax.jit(jax.vmap(run, axes))(*stacked)
  for n in range(2):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(run(*of(n))), strict=True):
      np.testing.assert_allclose(a[n], b, rtol=1e-5, atol=1e-5)
