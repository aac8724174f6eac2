"""Computes several experts at once: their products are grouped products, `jax.lax.ragged_dot`.

The function of an expert is traced for one row, and run for all rows. Each value is the same for all rows, or
has one part for each expert (a weight), or one for each row. The product of a row and a weight is a grouped
product. In every other operation, a part of an expert, such as a bias, is repeated for each of its rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from nnx_parallel.core.interpret import interpret
from nnx_parallel.core.jaxprs import bind, called, is_call, is_inexact, is_random
from nnx_parallel.core.types import AnyArray, JaxprEqn, PyTree

ExpertFn = Callable[[Any, Any], Any]


def grouped(function: ExpertFn, parameters: PyTree, rows: jax.Array, sizes: jax.Array) -> jax.Array:
  """`function(parameters of its expert, row)` for each row, `[rows, features]`.

  Args:
    function: computes the rows `[rows, features]` of one expert, each row independently.
    parameters: arrays `[experts, ...]`.
    rows: `[rows, features]`, sorted by expert.
    sizes: the number of rows of each expert, int32. Rows after the last expert's rows have any result, and no
      gradient.

  Raises:
    NotGroupedError: the function is not made of operations that can be grouped: see `can_be_grouped`.
  """
  one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), parameters)
  row = jax.ShapeDtypeStruct((1, *rows.shape[1:]), rows.dtype)
  program, result = jax.make_jaxpr(function, return_shape=True)(one, row)
  if result.shape[:-1] != (1,):
    raise NotGroupedError("the result is not a row for each row")
  ends = jnp.cumsum(sizes, dtype=jnp.int32)
  experts = jnp.searchsorted(ends, jnp.arange(len(rows), dtype=jnp.int32), side="right")
  values = [_Value(leaf, "expert") for leaf in jax.tree.leaves(parameters)]
  rule = functools.partial(_run, sizes, experts)
  (found,) = interpret(program, [*values, _Value(rows[:, None], "row")], rule, lambda x: _Value(x, "same"))
  return _by_row(found, experts)[:, 0]


def can_be_grouped(function: ExpertFn, parameters: PyTree, rows: jax.Array, count: int) -> bool:
  """Whether `grouped` can run a function for `count` experts.

  It can't if an operation other than a product takes a weight that is larger than a row: each row would get a
  copy. It can't if the function draws random numbers, which differ for each row of a block, if it takes more
  than one row at a time, or if Explicit axes shard the weights.
  """
  sizes = jax.ShapeDtypeStruct((count,), jnp.int32)
  if any(any(jax.typeof(leaf).sharding.spec) for leaf in jax.tree.leaves(parameters)):
    return False
  try:
    jax.eval_shape(functools.partial(grouped, function), parameters, rows, sizes)
  except Exception:  # noqa: BLE001 (with one row, the function may raise anything; blocks have more rows)
    return False
  return True


class NotGroupedError(Exception):
  """A function cannot be run by `grouped`."""


@dataclasses.dataclass(frozen=True)
class _Value:
  """A value of the trace: the `same` array for all rows, or arrays for each `expert` or `row` along dim 0."""

  array: jax.Array
  of: Literal["same", "expert", "row"]


def _run(sizes: jax.Array, experts: jax.Array, eqn: JaxprEqn, inputs: list[_Value]) -> Sequence[_Value]:
  """The results of one operation."""
  if is_call(eqn):
    rule = functools.partial(_run, sizes, experts)
    return interpret(called(eqn), inputs, rule, lambda x: _Value(x, "same"))
  if is_random(eqn):
    raise NotGroupedError(eqn.primitive.name)
  kinds = {value.of for value in inputs}
  if "row" not in kinds:
    of = "expert" if "expert" in kinds else "same"
  elif eqn.primitive.name == "dot_general" and kinds == {"row", "expert"}:
    return [_Value(_product(eqn, inputs, sizes), "row")]
  else:
    of, largest = "row", max(_size(value) for value in inputs if value.of == "row")
    if any(value.of == "expert" and _size(value) > largest for value in inputs):
      raise NotGroupedError(eqn.primitive.name)
    inputs = [value if value.of == "same" else _Value(_by_row(value, experts), "row") for value in inputs]
  arrays = [value.array for value in inputs]
  if of == "same":
    return [_Value(x, of) for x in bind(eqn, arrays)]
  mapped = [None if value.of == "same" else 0 for value in inputs]
  results = jax.vmap(lambda *arrays: tuple(bind(eqn, arrays)), mapped)(*arrays)
  return [_Value(x, of) for x in results]


def _size(value: _Value) -> int:
  return math.prod(value.array.shape[1:])


def _by_row(value: _Value, experts: jax.Array) -> jax.Array:
  """An array for each row: the array of its expert, or the same array for all rows."""
  if value.of == "expert":
    return value.array.at[experts].get(mode="fill", fill_value=0)
  if value.of == "same":
    return jnp.broadcast_to(value.array, (len(experts), *value.array.shape))
  return value.array


def _product(eqn: JaxprEqn, inputs: list[_Value], sizes: jax.Array) -> jax.Array:
  """The product of a row and a weight, in either order, as a grouped product."""
  left, right = inputs
  contracted, batch = eqn.params["dimension_numbers"]
  real = is_inexact(left.array) and is_inexact(right.array)
  if any(batch) or eqn.params["out_sharding"] is not None or not real:
    raise NotGroupedError("dot_general")
  row, weight = (left, right) if left.of == "row" else (right, left)
  of_row, of_weight = contracted if left.of == "row" else contracted[::-1]
  x, own = _free_first(row.array, of_row)
  w, others = _free_first(weight.array, of_weight)
  multiply = _multiplication(eqn.params["precision"], eqn.params["preferred_element_type"])
  result = multiply(x.reshape(-1, x.shape[-1]), w.swapaxes(1, 2), sizes * x.shape[1])
  result = result.reshape(len(x), *own, *others)
  if left.of == "row":
    return result
  order = [*range(1 + len(own), result.ndim), *range(1, 1 + len(own))]
  return result.transpose(0, *order)


@functools.cache
def _multiplication(precision: Any, dtype: Any) -> Callable[..., jax.Array]:
  """`jax.lax.ragged_dot`; `jax.vmap` maps it, and its derivatives, one after the other."""

  def general(contracted: tuple[int, int], of_groups: Sequence[int]) -> Callable[..., jax.Array]:
    left, right = contracted
    dims = jax.lax.RaggedDotDimensionNumbers((((left,), (right,)), ((), ())), [0], of_groups)

    @jax.jit  # `sequential_vmap` makes a new object in each trace, and layers are equal if their traces are
    @jax.custom_batching.sequential_vmap
    def run(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
      return jax.lax.ragged_dot_general(x, y, sizes, dims, precision=precision, preferred_element_type=dtype)

    return run

  plain, by_row, by_weight = general((1, 1), [0]), general((1, 2), [0]), general((0, 0), [])
  multiply = jax.custom_vjp(plain)

  def forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, PyTree]:
    return plain(x, w, sizes), (x, w, sizes)

  def backward(kept: PyTree, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = kept
    return by_row(g, w, sizes).astype(x.dtype), by_weight(x, g, sizes).astype(w.dtype), None

  multiply.defvjp(forward, backward)
  return multiply


def _free_first(x: AnyArray, contracted: Sequence[int]) -> tuple[jax.Array, tuple[int, ...]]:
  """`[first, free, contracted]`, and the lengths of the free dims, of an array `[first, ...]`."""
  free = [dim for dim in range(x.ndim - 1) if dim not in contracted]
  shape = tuple(x.shape[dim + 1] for dim in free)
  ordered = jnp.transpose(x, [0, *(dim + 1 for dim in (*free, *contracted))])
  return ordered.reshape(len(x), math.prod(shape), -1), shape
