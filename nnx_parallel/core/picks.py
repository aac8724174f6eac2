"""Reads an element of each row, the logit of a target, by a comparison, which fuses with its neighbours.

An indexed read needs the full array in memory, and its gradient is another array of that size: for the logits
of a large vocabulary they are the largest arrays of a step. The values are the same: a sum of the element and
zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from nnx_parallel.core.jaxprs import struct
from nnx_parallel.core.types import JaxprEqn

Results = list[jax.Array]


def is_pick(eqn: JaxprEqn) -> bool:
  """Whether an operation reads, or adds to, one element of each row: `take_along_axis` and its gradient."""
  name, params = eqn.primitive.name, eqn.params
  if name not in ("gather", "scatter-add"):
    return False
  shape = eqn.invars[0].aval.shape
  last = (len(shape) - 1,)
  # jax reads a dim of size 1 as a slice, and other dims index by index.
  before = tuple(d for d in range(len(shape) - 1) if shape[d] != 1)
  ones = tuple(d for d in range(len(shape) - 1) if shape[d] == 1)
  element = eqn.outvars[0] if name == "gather" else eqn.invars[2]
  return (
    # Dims of the window, of the indexed array, and of the batch, for a look-up as for an addition.
    tuple(map(tuple, params["dimension_numbers"])) == (ones, last, last, before, tuple(range(len(before))))
    and element.aval.shape == (*shape[:-1], 1)
    and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
    and params["mode"] == GatherScatterMode.FILL_OR_DROP
    and (name != "gather" or params["fill_value"] is None or math.isnan(params["fill_value"]))
  )


_sum_of_row = functools.partial(jnp.sum, axis=-1, keepdims=True)


def picked(
  x: jax.Array,
  indices: jax.Array,
  *updates: jax.Array,
  total: Callable[[jax.Array], jax.Array] = _sum_of_row,
) -> Results:
  """The results of such an operation; `total` sums each row."""
  full = indices.ndim > x.ndim  # else without the dims of size 1
  places = jax.lax.squeeze(indices, (indices.ndim - 1,)) if full else indices.reshape(*x.shape[:-1], 1)
  where = struct(jax.typeof(x)).sharding
  columns = jax.lax.broadcasted_iota(places.dtype, x.shape, x.ndim - 1, out_sharding=where)
  chosen = columns == jnp.broadcast_to(places, x.shape)
  zeros = jnp.zeros_like(x)
  if updates:
    return [x + jnp.where(chosen, jnp.broadcast_to(updates[0], x.shape), zeros)]
  found = total(jnp.where(chosen, x, zeros))
  inside = (places >= 0) & (places < x.shape[-1])
  return [found + jnp.where(inside, 0.0, jnp.nan).astype(found.dtype)]
