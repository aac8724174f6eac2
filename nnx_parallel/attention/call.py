"""Attention as a function of queries, keys, values and a function of scores, never of all scores at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike

from nnx_parallel.attention.blocks import Way
from nnx_parallel.attention.find import Attention, Found, check_attention, rewrite, way_of
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.jaxprs import as_function
from nnx_parallel.errors import SchemeError

Scores = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@check_arguments(SchemeError, "how")
def attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  scores: Scores | None = None,
  *,
  scale: float | None = None,
  how: Attention = "blockwise",
) -> jax.Array:
  """Computes softmax(scores(scale * q k^T)) v, by blocks of queries and keys or by a fused kernel.

  The full scores never exist, forward or backward. `scores` may be any function of the scores of one query
  and one key and of their positions: masks, biases, soft caps, documents. Blocks that a mask of positions
  hides completely are not computed. A query whose scores are all `-inf` has the result 0.

  Args:
    query: `[batch, queries, heads, head_dim]`.
    key: `[batch, keys, key heads, head_dim]`; each head of keys is for a group of `heads / key heads`
      consecutive heads of queries.
    value: `[batch, keys, key heads, out_dim]`.
    scores: a function `(s, rows, columns) -> scores`. `s` are scores `[batch, key heads, group, queries,
      keys]` in float32 at least; `rows` `[1, 1, 1, queries, 1]` and `columns` `[1, 1, 1, 1, keys]` are
      positions. It is traced once for all scores and computed for one block at a time, so it must not
      reduce over positions. It may use other arrays, which get gradients. None: the scores as they are.
    scale: the factor of the scores; None: `head_dim ** -0.5`.
    how: as the option `attention=` of `nxp.train_step`: `"blockwise"`; the length of the blocks; `"fused"`,
      a fused kernel where JAX has a suitable one; `"ring"` or `"ulysses"`, over the mesh axis that the rules
      of a step assign to `seq`.

  Returns:
    `[batch, queries, heads, out_dim]`, in the dtype of the values.

  Raises:
    SchemeError: the shapes do not fit, or `scores` cannot be computed for a block at a time.
    TrainError: `how` is not valid, or needs a mesh axis that is not there.

  Source: online softmax, arXiv:1805.02867; by blocks, arXiv:2112.05682; FlashAttention, arXiv:2205.14135.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 8))
    >>> causal = lambda s, rows, columns: jnp.where(rows >= columns, s, -jnp.inf)
    >>> found = nxp.parallel.attention(q, k, v, causal, how=16)
    >>> bool(jnp.allclose(found, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5))
    True
  """
  check_attention(how)
  check_shapes(query, key, value)
  (batch, length, heads, _), kv_heads = query.shape, key.shape[2]
  q = query.reshape(batch, length, kv_heads, heads // kv_heads, -1)
  way = dataclasses.replace(way_of(how or "blockwise"), row=3, zeros=True)

  def changed(s: jax.Array) -> jax.Array:
    shapes = (1, 1, 1, s.shape[3], 1), (1, 1, 1, 1, s.shape[4])
    at = [jax.lax.broadcasted_iota(jnp.int32, shape, d) for shape, d in zip(shapes, (3, 4), strict=True)]
    return s if scores is None else scores(s, *at)

  found = attend(q, key, value, changed, way, scale=scale)
  return jnp.moveaxis(found, 3, 1).reshape(batch, length, heads, value.shape[-1])


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  scores: Callable[..., jax.Array],
  way: Way,
  *more: jax.Array,
  scale: float | None = None,
  precision: PrecisionLike = None,
) -> jax.Array:
  """Attention of queries `[batch, length, *heads, group, features]`: `[batch, *heads, group, length, out]`.

  `scores` is of the scaled scores `[batch, *heads, group, queries, keys]` and of `more` arrays.
  """
  dims = "hn"[: query.ndim - 4]
  factor = query.shape[-1] ** -0.5 if scale is None else scale

  def written(q: jax.Array, k: jax.Array, v: jax.Array, *more: jax.Array) -> jax.Array:
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = functools.partial(jnp.einsum, f"bq{dims}gd,bk{dims}d->b{dims}gqk", precision=precision)
    given = scores(product(q, k, preferred_element_type=wide) * factor, *more)
    weights = jax.nn.softmax(given)
    if 1 in given.shape[-2:]:  # nothing to cut into blocks
      weights = jnp.where(jnp.max(given, -1, keepdims=True) == -jnp.inf, 0, weights)
    return jnp.einsum(f"b{dims}gqk,bk{dims}v->b{dims}gqv", weights.astype(v.dtype), v, precision=precision)

  given = (query, key, value, *more)
  if 1 in (query.shape[1], key.shape[1]):
    return written(*given)
  found = Found()
  changed = rewrite(jax.make_jaxpr(written)(*given), way, found, {})
  if len(found.taken) != 1:
    raise SchemeError(
      "these scores of an attention cannot be computed for a block of queries and keys at a time.",
      details="; ".join([*found.left, *found.reasons]),
      fix="scores that are a function of each score and its positions: jnp.where, additions, jnp.tanh.",
    )
  return as_function(changed)(*given)[0]


def check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
  """Raises a `SchemeError` for queries, keys and values that do not fit each other."""
  shapes: Sequence[tuple[int, ...]] = query.shape, key.shape, value.shape
  fits = all(len(shape) == 4 for shape in shapes) and key.shape[:3] == value.shape[:3]
  if not fits or key.shape[::3] != query.shape[::3] or query.shape[2] % key.shape[2]:
    raise SchemeError(
      "queries, keys and values do not fit each other.",
      details=f"query {query.shape}, key {key.shape}, value {value.shape}",
      fix="[batch, length, heads, head_dim]; the heads of queries are a multiple of the heads of keys.",
    )
