"""Grouped products compute the rows of several experts as each expert alone does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import nnx_parallel as nxp
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
  assert can_be_grouped(function, parameters, rows, EXPERTS)

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


OPERATIONS = {
  "up": lambda p, x: x @ p["up"] if x.shape[-1] == WIDTH else x,
  "down": lambda p, x: jnp.einsum("hd,...h->...d", p["down"], x) if x.shape[-1] == HIDDEN else x,
  "bias": lambda p, x: x + p["wide" if x.shape[-1] == HIDDEN else "narrow"],
  "scalar": lambda p, x: jnp.where(p["scalar"] > 0, x, x * p["scalar"]),
  "activation": lambda p, x: jax.nn.relu(x) + jax.nn.gelu(x),
  "norm": lambda p, x: x / (1 + jnp.linalg.norm(x + 0.1, axis=-1, keepdims=True)),
  "jit": lambda p, x: jax.jit(lambda x, b: jnp.tanh(x) * b.sum())(x, p["narrow"]),
  "loop": lambda p, x: jax.lax.fori_loop(0, 2, lambda n, x: jnp.sin(x) + n, x),
  "branch": lambda p, x: jax.lax.cond(p["scalar"] > 0, jnp.sin, jnp.cos, x),
  "flipped": lambda p, x: jnp.concatenate([x[..., ::-1][..., :2], x[..., 2:]], -1),
}


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
  names=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=6),
  sizes=st.lists(st.integers(0, 4), min_size=EXPERTS, max_size=EXPERTS).filter(any),
)
def test_any_chain_of_operations_is_that_of_each_expert_alone(names, sizes):
  parameters, _ = drawn()
  rows = jnp.asarray(np.random.default_rng(1).normal(size=(sum(sizes), WIDTH)), jnp.float32)

  def chain(p, x):
    for name in names:
      x = OPERATIONS[name](p, x)
    return x

  def alone(parameters, rows):
    own = jax.tree.map(lambda leaf: leaf[np.repeat(np.arange(EXPERTS), sizes)], parameters)
    return jax.vmap(lambda p, x: chain(p, x[None])[0])(own, rows)

  def together(parameters, rows):
    return grouped(chain, parameters, rows, jnp.array(sizes))

  def with_gradients(run):
    loss = lambda *args: ((run(*args) ** 2).sum(), run(*args))
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(parameters, rows)

  assert can_be_grouped(chain, parameters, rows, EXPERTS)
  for a, b in zip(*(jax.tree.leaves(with_gradients(f)) for f in (together, alone)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_experts_without_parameters():
  _, rows = drawn()
  assert can_be_grouped(lambda _, rows: rows * 2, {}, rows, EXPERTS)
  routing = nxp.parallel.route(rows[:, :EXPERTS], 2)
  found, _ = nxp.parallel.experts(lambda _, rows: rows * 2, {}, rows, routing)
  np.testing.assert_allclose(found, rows * 2, rtol=1e-6)


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
  assert not can_be_grouped(REFUSED[case], parameters, rows, EXPERTS)
  with pytest.raises(TypeError if case == "rows in pairs" else NotGroupedError):
    grouped(REFUSED[case], parameters, rows, jnp.array(SIZES))
