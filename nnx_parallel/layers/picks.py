"""Reads an element of each row, the logit of a target, by a comparison, which fuses with its neighbours.

An indexed read needs the full array in memory, and its gradient is another array of that size: for the logits
of a large vocabulary they are the largest arrays of a step. The values are the same: a sum of the element and
zeros.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.lax import GatherScatterMode

from nnx_parallel.core.jaxprs import bind, is_tracer, maker, makers, operations_behind, struct
from nnx_parallel.core.types import ClosedJaxpr, JaxprEqn, Var

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


def is_row_pick(eqn: JaxprEqn, program: ClosedJaxpr) -> bool:
  """Whether an operation of a flat program reads `x[arange(n), ..., index]`: one element of each row."""
  numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
  made, dims = makers(program), tuple(range(len(shape)))
  join = maker(eqn.invars[1], made)
  fits = not numbers.offset_dims and tuple(numbers.collapsed_slice_dims) == dims
  fits &= tuple(numbers.start_index_map) == dims and eqn.outvars[0].aval.shape == shape[:-1]
  if not fits or join is None or join.primitive.name != "concatenate" or len(join.invars) != len(shape):
    return False
  if eqn.params["mode"] not in (GatherScatterMode.PROMISE_IN_BOUNDS, GatherScatterMode.CLIP):
    return False
  for d, var in enumerate(join.invars[:-1]):
    found = _constant(var, program)
    rows = np.arange(shape[d]).reshape([-1 if d == e else 1 for e in dims])
    if found is None or not np.array_equal(found, np.broadcast_to(rows, (*shape[:-1], 1))):
      return False
  return True


def _constant(var: Var, program: ClosedJaxpr) -> np.ndarray | None:
  """A value of a flat program that depends on no input of it; None: it does."""
  known: dict[Var, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
  with jax.ensure_compile_time_eval():
    for eqn in operations_behind(program.jaxpr.eqns, [var]):
      inputs = [x.val if isinstance(x, core.Literal) else known.get(x) for x in eqn.invars]
      if any(x is None or is_tracer(x) for x in inputs):
        return None
      known.update(zip(eqn.outvars, bind(eqn, inputs), strict=True))
  found = known.get(var)
  return None if found is None or is_tracer(found) else np.asarray(found)


def place_in_row(eqn: JaxprEqn, indices: jax.Array) -> jax.Array:
  """The column that a pick, or a row pick, reads or changes in each row; the last dim has size 1."""
  shape = eqn.invars[0].aval.shape
  if is_pick(eqn):
    full = indices.ndim > len(shape)  # else without the dims of size 1
    return jax.lax.squeeze(indices, (indices.ndim - 1,)) if full else indices.reshape(*shape[:-1], 1)
  return jnp.clip(indices[..., -1:], 0, shape[-1] - 1)


def with_nan_outside(found: jax.Array, places: jax.Array, length: int) -> jax.Array:
  """Elements that were read from rows, with NaN where the place is outside of the row."""
  inside = (places >= 0) & (places < length)
  return found + jnp.where(inside, 0.0, jnp.nan).astype(found.dtype)


def pick(eqn: JaxprEqn, x: jax.Array, indices: jax.Array, *updates: jax.Array) -> Results:
  """The results of a pick, by a comparison of each column with the place."""
  places, where = place_in_row(eqn, indices), struct(jax.typeof(x)).sharding
  columns = jax.lax.broadcasted_iota(places.dtype, x.shape, x.ndim - 1, out_sharding=where)
  chosen = columns == jnp.broadcast_to(places, x.shape)
  zeros = jnp.zeros_like(x)
  if updates:
    return [x + jnp.where(chosen, jnp.broadcast_to(updates[0], x.shape), zeros)]
  return [with_nan_outside(jnp.where(chosen, x, zeros).sum(-1, keepdims=True), places, x.shape[-1])]
