"""Grouped products compute the rows of several experts as each expert alone does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_parallel.core.jaxprs import equations
from nnx_parallel.core.keys import identity
from nnx_parallel.schemes.grouped import NotGroupedError, can_be_grouped, grouped

EXPERTS, WIDTH, HIDDEN, SIZES = 4, 6, 10, (3, 0, 5, 2)
SHAPES = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]

pytestmark = pytest.mark.usefixtures("as_users_have_it")


def gated(p, rows):
  return (jax.nn.silu(rows @ p["up"]) * jax.nn.relu(rows @ p["up"] + p["wide"])) @ p["down"] + p["narrow"]


def weight_first(p, rows):
  return jnp.einsum("fd,rf->rd", p["down"], jnp.einsum("df,rd->rf", p["up"], rows).clip(-1))


def heads(p, rows):
  """A weight with two free dims, one with two contracted dims, and rows with a dim of their own."""
  wide = jnp.einsum("rd,dhk->rhk", rows, p["up"].reshape(WIDTH, 2, 5))
  other = jnp.einsum("rhk,kj->rhj", wide, p["down"][:5, :5])
  return jnp.einsum("rhk,hkd->rd", jnp.tanh(other) + wide, p["down"].reshape(2, 5, WIDTH))


def normed(p, rows):
  """A norm, a scalar of each expert, a constant, and products with a weight that all experts share."""
  rows = rows / jnp.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * p["narrow"] * p["scalar"]
  return rows @ jnp.eye(WIDTH)[::-1] + jnp.arange(WIDTH) - jnp.where(p["scalar"] > 0, rows, 2 * rows)


def of_a_module(p, rows):
  up, down = nnx.eval_shape(lambda: [nnx.Linear(*n, rngs=nnx.Rngs(0)) for n in SHAPES])
  for variable, name in [(up.kernel, "up"), (up.bias, "wide"), (down.kernel, "down"), (down.bias, "narrow")]:
    variable.set_value(p[name])
  return down(nnx.gelu(up(rows)))


def in_bfloat16(p, rows):
  wide = jnp.dot(rows, p["up"], preferred_element_type=jnp.float32, precision="highest")
  return jnp.dot(wide.astype(rows.dtype), p["down"])


def drawn(dtype=jnp.float32):
  draw = np.random.default_rng(0).normal
  shapes = {
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
    "wide": (HIDDEN,),
    "narrow": (WIDTH,),
    "scalar": (),
  }
  parameters = {k: jnp.asarray(draw(size=(EXPERTS, *shape)) / 3, dtype) for k, shape in shapes.items()}
  return parameters, jnp.asarray(draw(size=(sum(SIZES), WIDTH)), dtype)


@pytest.mark.parametrize("function", [gated, weight_first, heads, normed, of_a_module, in_bfloat16])
def test_values_and_gradients_are_those_of_each_expert_alone(function):
  parameters, rows = drawn(jnp.bfloat16 if function is in_bfloat16 else jnp.float32)
  assert can_be_grouped(function, parameters, rows)

  def alone(parameters, rows):
    ends = np.cumsum(SIZES)
    parts = [
      function(jax.tree.map(lambda leaf, n=n: leaf[n], parameters), rows[end - size : end])
      for n, (size, end) in enumerate(zip(SIZES, ends, strict=True))
    ]
    return jnp.concatenate(parts)

  def together(parameters, rows):
    beyond = jnp.full((2, WIDTH), jnp.nan, rows.dtype)  # rows of no expert
    some = grouped(function, parameters, jnp.concatenate([rows, beyond]), jnp.array(SIZES))
    return some[: len(rows)]

  def with_gradients(run):
    loss = lambda *args: (run(*args).astype(jnp.float32) ** 2).sum()
    return jax.jit(lambda *args: (run(*args), jax.grad(loss, (0, 1))(*args)))(parameters, rows)

  tolerance = 2e-2 if function is in_bfloat16 else 1e-5
  found, wanted = with_gradients(together), with_gradients(alone)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), rtol=tolerance, atol=tolerance)


def test_products_are_grouped_products():
  program = jax.make_jaxpr(lambda *args: grouped(gated, *args))(*drawn(), jnp.array(SIZES))
  names = [eqn.primitive.name for eqn in equations(program)]
  assert names.count("ragged_dot_general") == 3
  assert "dot_general" not in names


def test_equal_experts_of_two_layers_have_equal_traces():
  """Or the layers would not be found as equal layers."""
  traced = [jax.make_jaxpr(lambda *args: grouped(gated, *args))(*drawn(), jnp.array(SIZES)) for _ in range(2)]
  assert identity(traced[0]) == identity(traced[1])


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 1)], ids=["rows", "weights", "both"])
def test_it_can_be_mapped(axes):
  def of(n):
    return [
      some if axis is None else jax.tree.map(lambda x: x / (n + 1), some)
      for some, axis in zip(drawn(), axes, strict=True)
    ]

  def run(parameters, rows):
    return jax.value_and_grad(lambda *args: (grouped(gated, *args, jnp.array(SIZES)) ** 2).sum(), (0, 1))(
      parameters, rows
    )

  stacked = [
    first if axis is None else jax.tree.map(lambda *xs, axis=axis: jnp.stack(xs, axis), first, second)
    for first, second, axis in zip(of(0), of(1), axes, strict=True)
  ]
  found = jax.jit(jax.vmap(run, axes))(*stacked)
  for n in range(2):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(run(*of(n))), strict=True):
      np.testing.assert_allclose(a[n], b, rtol=1e-5, atol=1e-5)


REFUSED = {
  "random": lambda p, rows: rows * jax.random.bernoulli(jax.random.key(0), 0.5, rows.shape),
  "a weight for each row": lambda p, rows: (rows[:, :, None] * p["up"]).sum(1),
  "batched": lambda p, rows: jnp.einsum("rd,df->rdf", rows, p["up"]).sum(1),
  "recomputed": lambda p, rows: jax.checkpoint(gated)(p, rows),
  "rows in pairs": lambda p, rows: rows.reshape(-1, 2, WIDTH).reshape(rows.shape),
  "another shape": lambda p, rows: rows.squeeze() @ p["up"],
  "a loop": lambda p, rows: jax.lax.fori_loop(0, 2, lambda _, x: x @ p["up"] @ p["down"], rows),
  "integers": lambda p, rows: jnp.round(rows).astype(jnp.int8) @ jnp.round(p["up"]).astype(jnp.int8),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_functions_are_not_grouped(case):
  parameters, rows = drawn()
  assert not can_be_grouped(REFUSED[case], parameters, rows)
  with pytest.raises(TypeError if case == "rows in pairs" else NotGroupedError):
    grouped(REFUSED[case], parameters, rows, jnp.array(SIZES))
