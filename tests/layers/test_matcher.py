"""Which softmax a product has for weights, and what the match says of it, read from traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_parallel.attention import find
from nnx_parallel.attention.find import by_blocks, opens_attention, queries_over
from nnx_parallel.attention.softmaxes import NotByBlocks, Softmaxes, named_dims
from nnx_parallel.core.interpret import inline_calls
from nnx_parallel.core.jaxprs import MARK, open_jaxpr

Q, K, V = (np.random.default_rng(n).normal(size=(5 + n, 4)).astype(np.float32) for n in (0, 1, 1))
MASK = np.tri(5, 6, dtype=bool)


def matches(function, *args):
  """The matches of a function's softmaxes, or why there is none; one for each product that is found."""
  body = open_jaxpr(inline_calls(jax.make_jaxpr(function)(*args), opens_attention))
  softmaxes, found = Softmaxes(body), []
  for eqn in body.eqns:
    if eqn.primitive.name == "exp":
      for product in softmaxes.products(eqn, *named_dims(eqn.outvars[0].aval.shape)):
        try:
          found.append(softmaxes.match(eqn, product))
        except NotByBlocks as problem:
          found.append(str(problem))
  return found


def attend(weights=lambda w: w, softmax=jax.nn.softmax):
  return lambda q, k, v: weights(softmax(q @ k.T)) @ v


def test_a_softmax_between_two_products_is_attention():
  (match,) = matches(attend(), Q, K, V)
  assert match.exp.outvars[0].aval.shape == (5, 6)
  assert (match.summed, match.order, match.side) == ((1,), (0, 1), 0)
  assert match.product.outvars[0].aval.shape == (5, 4)
  (turned,) = matches(lambda q, k, v: v.T @ jax.nn.softmax(k @ q.T, axis=0), Q, K, V)
  assert (turned.summed, turned.side) == ((0,), 1)


@pytest.mark.parametrize(
  ("weights", "zeros"),
  [
    (lambda w: w, False),
    (lambda w: w * 0.5, False),
    (lambda w: jnp.where(MASK, w, 0.0), True),
    (lambda w: jnp.where(MASK, w, 0.0) * 0.5, True),
  ],
)
def test_weights_that_a_mask_chose_may_be_zeros(weights, zeros):
  (match,) = matches(attend(weights), Q, K, V)
  assert match.zeros_too == zeros


def test_what_sums_over_queries_or_keeps_no_dim_is_no_attention():
  assert matches(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v[:, 0] @ v[:5], Q, K, V)  # a vector of values
  assert matches(lambda q, k, v: jax.nn.softmax(q @ k.T, axis=0) @ v, Q, K, V) == []
  pooled = lambda q, k, v: jnp.einsum("bk,bkd->bd", jax.nn.softmax(jnp.einsum("bd,bkd->bk", q, k)), v)
  assert matches(pooled, Q, *np.ones((2, 5, 3, 4), np.float32)) == []  # one query for each
  assert matches(lambda q, k, v: jax.nn.softmax(jnp.tanh(q)) @ k.T, Q, K, V) == []  # no scores
  assert matches(lambda q, k, v: jnp.exp(q @ k.T) @ v, Q, K, V) == []  # not normalised


def test_a_product_of_weights_with_weights_is_none():
  both = lambda q, k, v: jax.nn.softmax(q @ k.T) @ jax.nn.softmax(q @ k.T).T
  assert matches(both, Q, K, V) != []
  square = lambda q, k, v: (lambda w: w @ w)(jax.nn.softmax(q @ k[:5].T))
  assert matches(square, Q, K, V) == []


def test_weights_by_their_logarithm_are_found_and_named():
  (why,) = matches(attend(softmax=lambda s: jnp.exp(jax.nn.log_softmax(s))), Q, K, V)[-1:]
  assert why.startswith("softmax of float32[5,6]: ")
  (why,) = matches(attend(softmax=lambda s: jnp.exp(s) / jnp.exp(s).sum(-1, keepdims=True)), Q, K, V)
  assert "does not subtract the maximum" in why


def test_only_the_first_product_of_weights_is_taken():
  """Behind it, no dim of the weights is left."""

  def loss(q, k, v):
    k2 = k.reshape(3, 2, 4)
    weights = jax.nn.softmax(jnp.einsum("qd,xyd->qxy", q, k2), axis=(-2, -1))
    return jnp.einsum("qyd,yd->qd", jnp.einsum("qxy,xd->qyd", weights, v[:3]), v[:2])

  assert len(matches(loss, Q, K, V)) == 1


def shifted(s):
  return jnp.exp(s - s.max(-1, keepdims=True))


@pytest.mark.parametrize(
  ("softmax", "why"),
  [
    (lambda s: shifted(s) / (shifted(s).sum(-1, keepdims=True) + 1e-6), "over their sum (a sink, an epsilon"),
    (lambda s: jnp.sqrt(jax.nn.softmax(s)), "its weights go through sqrt"),
    (lambda s: jnp.cumsum(jax.nn.softmax(s), -1), "its weights go through cumsum"),
  ],
)
def test_other_forms_are_named(softmax, why):
  found = matches(attend(softmax=softmax), Q, K, V)
  assert found
  assert all(why in one for one in found)


def test_dims_are_named_with_their_prime_factors():
  lengths, labels = named_dims((12, 1, 5))
  assert lengths == {0: 12, (0, 0): 2, (0, 1): 2, (0, 2): 3, 2: 5}
  assert labels == ((0, 0, 1), ((0, 0), 0, 1), ((0, 1), 0, 2), ((0, 2), 0, 4), (2, 2, 1))


def line_of(function, *args):
  return by_blocks(jax.make_jaxpr(function)(*args), 2)[1]


def test_attention_is_found_in_branches_and_in_calls_of_layers():
  branches = lambda p, *qkv: jax.lax.cond(p, attend(), attend(lambda w: w * 0.5), *qkv)
  assert line_of(branches, True, Q, K, V).endswith(": 2 found")
  layer = attend()
  layer.__name__ = f"{MARK}Layer:layers.0"
  marked = jax.jit(layer)
  twice = lambda q, k, v: marked(marked(q, k, v), k, v)
  assert line_of(twice, Q, K, V).endswith(": 2 found")


def test_the_axis_of_the_positions_ends_with_its_body():
  with queries_over("seq"), queries_over(None):
    assert find._AXIS.get() is None
  assert find._AXIS.get() is None
  with queries_over("seq"):
    with queries_over("other"):
      pass
    assert find._AXIS.get() == "seq"
