"""The functions that compute experts: a (gated) MLP, and the product of rows and weights for others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.errors import SchemeError

ExpertFn = Callable[[Any, Any, Any], Any]
"""`(parameters, rows, group_sizes) -> rows`; see `mlp_experts`."""


@check_arguments(SchemeError)
def mlp_experts(
  parameters: Mapping[str, jax.Array],
  rows: jax.Array,
  group_sizes: jax.Array,
  *,
  activation: Callable[[jax.Array], jax.Array] = nnx.silu,
) -> jax.Array:
  """Computes experts that are MLPs, gated or not, as the `expert_fn` of `nxp.parallel.experts`.

  It computes `activation(rows @ up) @ down`, or with a gate `(activation(rows @ gate) * (rows @ up)) @ down`,
  with the weights of the expert of each row. For another activation, make one
  `functools.partial(nxp.parallel.mlp_experts, activation=...)` outside of the model: layers with different
  functions are not equal.

  Args:
    parameters: `"up"` of shape (experts, features, hidden), `"down"` of shape (experts, hidden, features),
      and optionally `"gate"`, with the shape of `"up"`.
    rows: the rows of the first expert, then of the second, and so on, of shape (rows, features).
    group_sizes: the number of rows of each expert, int32 of shape (experts,); their sum is that of all rows.
    activation: a function of each element.

  Returns:
    The results, of shape (rows, features).

  Raises:
    SchemeError: the parameters have other names.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> weights = {"up": jnp.ones((2, 3, 4)), "down": jnp.ones((2, 4, 3)) * jnp.array([[[1.0]], [[2.0]]])}
    >>> rows, relu = jnp.ones((3, 3)), lambda x: jnp.maximum(x, 0)
    >>> nxp.parallel.mlp_experts(weights, rows, jnp.array([1, 2]), activation=relu)[:, 0].tolist()
    [12.0, 24.0, 24.0]
  """
  if not {"up", "down"} <= set(parameters) <= {"gate", "up", "down"}:
    raise SchemeError(
      f"MLPs have other parameters than {', '.join(map(repr, parameters))}.",
      fix="{'up': up, 'down': down}, or {'gate': gate, 'up': up, 'down': down}.",
    )
  wide = ragged_dot(rows, parameters["up"], group_sizes)
  if "gate" in parameters:
    wide = activation(ragged_dot(rows, parameters["gate"], group_sizes)) * wide
  else:
    wide = activation(wide)
  return ragged_dot(wide, parameters["down"], group_sizes)


@check_arguments(SchemeError)
def ragged_dot(
  rows: jax.Array,
  weights: jax.Array,
  group_sizes: jax.Array,
  *,
  bias: jax.Array | None = None,
  precision: str | jax.lax.Precision | None = None,
  preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
  """Multiplies each row by the weight of its expert: `jax.lax.ragged_dot` for the `expert_fn` of `experts`.

  Unlike JAX's function, it can be mapped by `jax.vmap` (so by a pipeline) over any of its arguments, and the
  product of one expert is an ordinary product, on all platforms and on Explicit axes.

  Args:
    rows: the rows of the first expert, then of the second, and so on, of shape (rows, features).
    weights: one matrix for each expert, of shape (experts, features, results).
    group_sizes: the number of rows of each expert, int32 of shape (experts,); their sum is that of all rows.
    bias: numbers of shape (experts, results) that are added to the products of the rows of each expert.
    precision: as in `jax.numpy.matmul`.
    preferred_element_type: the dtype of the results; None: the dtype that the arguments promote to.

  Returns:
    The products, of shape (rows, results).

  Raises:
    SchemeError: the shapes do not fit, or JAX has no such precision.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> rows, weights, bias = jnp.ones((3, 3)), jnp.ones((2, 3, 1)), jnp.array([[0.0], [10.0]])
    >>> nxp.parallel.ragged_dot(rows, weights, jnp.array([1, 2]), bias=bias)[:, 0].tolist()
    [3.0, 13.0, 13.0]
  """
  if (
    (rows.ndim, weights.ndim) != (2, 3)
    or rows.shape[1] != weights.shape[1]
    or group_sizes.shape != weights.shape[:1]
    or (bias is not None and bias.shape != (len(weights), weights.shape[2]))
  ):
    shown = {"rows": rows, "weights": weights, "group_sizes": group_sizes, "bias": bias}
    raise SchemeError(
      "ragged_dot multiplies the rows of each expert by its matrix, and these shapes do not fit.",
      details=", ".join(f"{name} {x.shape}" for name, x in shown.items() if x is not None),
      fix="rows (n, features), weights (experts, features, results), group_sizes (experts,), bias (experts,"
      " results).",
    )
  try:
    return _product(rows, weights, group_sizes, bias, precision, preferred_element_type)
  except ValueError as error:
    if "recision" not in str(error):
      raise
    raise SchemeError(
      f"precision={precision!r} is none of JAX's.", fix='"default", "high", "highest".'
    ) from error


def _product(
  rows: jax.Array,
  weights: jax.Array,
  group_sizes: jax.Array,
  bias: jax.Array | None,
  precision: Any,
  dtype: Any,
) -> jax.Array:
  if len(weights) > 1:
    found = _grouped(precision, dtype)(rows, weights, group_sizes)
    if bias is None:
      return found
    return found + jnp.repeat(bias, group_sizes, axis=0, total_repeat_length=len(rows))
  weight = weights[0]
  contracted, *others = (*jax.typeof(weight).sharding.spec, None, None)[:2]
  # The type of a sum over a dim that an Explicit axis shards is the caller's choice.
  out: Any = {} if contracted is None else {"out_sharding": PartitionSpec(None, *others)}
  found = jnp.matmul(rows, weight, precision=precision, preferred_element_type=dtype, **out)
  return found if bias is None else found + bias[0]


@functools.cache
def _grouped(precision: Any, dtype: Any) -> Callable[..., jax.Array]:
  """`jax.lax.ragged_dot`; `jax.vmap` maps it, and its derivatives, one after the other.

  JAX maps it only if all operands are mapped over dim 0 ("ragged_dot vmap over any dim but 0 - NYI").
  """

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


def check_expert_fn(function: ExpertFn) -> None:
  """Raises a `SchemeError` for a function that does not take three arguments."""
  try:
    inspect.signature(function).bind(None, None, None)
  except TypeError as error:
    raise SchemeError(
      f"the function of experts takes (parameters, rows, group_sizes): {error}.",
      fix="nxp.parallel.mlp_experts, or a function whose products are nxp.parallel.ragged_dot(rows, p['up'],"
      " group_sizes).",
    ) from None


def check_rows(rows: jax.Array, found: AnyArray) -> None:
  """Raises a `SchemeError` unless `found` is one row for each row."""
  if getattr(found, "shape", ())[:-1] != rows.shape[:-1]:
    raise SchemeError(
      "experts return one row for each row that they are given.",
      details=f"rows {rows.shape}, result {jax.tree.map(jnp.shape, found)}",
      fix="nxp.parallel.mlp_experts, or nxp.parallel.ragged_dot(rows, p['up'], group_sizes), for example.",
    )
