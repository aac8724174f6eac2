"""Computes an attention from a trace with the fused kernel that JAX has for the chip.

The kernel computes softmax(scale * q k^T) v, with a soft cap and a mask of queries by keys. `jax.shard_map`
places it on the mesh, because a kernel runs on one device. Attentions of other forms are blockwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec

from nnx_parallel.core.flow import Meeting, meeting
from nnx_parallel.core.jaxprs import bind, call_equation, is_inexact, maker, makers, origin, struct
from nnx_parallel.core.shards import on_shards
from nnx_parallel.core.tiles import Grid, Labels, Tiles, described
from nnx_parallel.core.types import Jaxpr, JaxprEqn, Var
from nnx_parallel.layers.kernels import Kernel
from nnx_parallel.layers.masks import ALL, PLACES, Seen, seen_by
from nnx_parallel.layers.softmaxes import NotFused, Softmax, is_cast, uncast
from nnx_parallel.layout.batch import batch_axes
from nnx_parallel.layout.constrain import scope_in_use
from nnx_parallel.rules.ruleset import RuleSet

_FEATURES = -1
"""Stands for the dim of the features, which the scores lack."""
_FILL = -1e4
"""A score of which the exponential is 0."""


@dataclasses.dataclass(frozen=True)
class _Scores:
  """The scores of an attention: a product of queries and keys, scaled, capped and masked.

  Attributes:
    product: the product of queries and keys.
    dims: for each dim of the scores, the dim of the product.
    scale: the scale of the product.
    cap: `cap * tanh(x / cap)` of the scaled product, or None.
    masks: booleans, their dim for each dim of the scores, and whether a product is kept where they are true.
    fill: the value that replaces products that are not kept.
  """

  product: JaxprEqn
  dims: tuple[int, ...]
  scale: float
  cap: float | None
  masks: tuple[tuple[Var, tuple[int, ...], bool], ...]
  fill: float


@dataclasses.dataclass(frozen=True)
class _Form:
  """An attention as the kernel computes it.

  Attributes:
    scores: the scores.
    inputs: query, key and value.
    orders: for each input, its dims: first the batch dims, then other dims of the query, then length and
      features.
    shared: the number of batch dims, heads included.
    order: the dims of the result, in terms of the dims of the kernels' results.
    row, column: the dims of the scores that are queries and keys.
  """

  scores: _Scores
  inputs: tuple[Var, Var, Var]
  orders: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
  shared: int
  order: tuple[int, ...]
  row: int
  column: int


def by_kernel(body: Jaxpr, match: Softmax, kernel: Kernel) -> JaxprEqn:
  """The operation that computes an attention by a kernel, given its softmax.

  Raises:
    NotFused: it has not the form that the kernel computes.
  """
  made = makers(body)
  form = _form(match, _scores(match, made), _weights(match, made))
  ends, lengths = _ends(match, form)
  seen = seen_by(body, ends, lengths, form.row, form.column)
  masks, leaves = (None, []) if seen is not None else _mask(body, form, ends, lengths)
  out = match.product.outvars[0]

  def attention_by_kernel(*arrays: jax.Array) -> list[jax.Array]:
    query, key, value = (x.transpose(order) for x, order in zip(arrays[:3], form.orders, strict=True))
    mask, some = (None, None) if masks is None else masks(arrays[3:])
    found = _placed(form, kernel, seen or ALL, query, key, value, mask)
    if some is not None:  # a row that keeps nothing
      finite = math.isfinite(form.scores.fill)
      none = value.mean(-2, keepdims=True) if finite else jnp.full_like(value[..., :1, :], jnp.nan)
      none = jnp.expand_dims(none, range(form.shared, form.shared + found.ndim - none.ndim))
      found = jnp.where(some[:, None], found, none)
    found = found.transpose(form.order).astype(out.aval.dtype)
    where = struct(out.aval).sharding
    return [found if where is None else jax.sharding.reshard(found, where)]

  return call_equation(attention_by_kernel, [*form.inputs, *leaves], match.product.outvars, match.product)


def _scores(match: Softmax, made: Mapping[Var, JaxprEqn]) -> _Scores:
  """Reads back from the softmax to the product of queries and keys."""
  exp, largest = match.exp, match.largest.invars[0]
  var = made[exp.invars[0]].invars[0]
  if uncast(largest, made, ("stop_gradient",))[0] is not uncast(var, made)[0]:
    raise NotFused("it subtracts a maximum that is not of its scores")
  dims = tuple(range(len(exp.outvars[0].aval.shape)))
  factor, cap = 1.0, None
  masks: list[tuple[Var, tuple[int, ...], bool]] = []
  fills: set[float] = set()
  while (eqn := maker(var, made)) is not None and eqn.primitive.name != "dot_general":
    name, inputs = eqn.primitive.name, eqn.invars
    numbers = [_number(x, made) for x in inputs]
    if name == "transpose":
      dims = tuple(eqn.params["permutation"][d] for d in dims)
      var = inputs[0]
    elif is_cast(eqn):
      var = inputs[0]
    elif name == "tanh" and cap is None and factor > 0:
      cap, factor, var = factor, 1.0, inputs[0]
    elif name in ("mul", "div") and numbers[1] is not None:
      factor, var = factor * numbers[1] if name == "mul" else factor / numbers[1], inputs[0]
    elif name == "mul" and numbers[0] is not None:
      factor, var = factor * numbers[0], inputs[1]
    elif name == "select_n" and cap is None and _is_mask(inputs[0], var):
      low = {n: x * factor for n, x in enumerate(numbers) if n and x is not None and x * factor <= _FILL}
      if len(low) != 1:
        raise NotFused(f"its scores go through {described(eqn)}, which is not a mask")
      ((side, fill),) = low.items()
      masks.append((inputs[0], dims, side == 1))
      fills.add(fill)
      var = inputs[3 - side]
    else:
      raise NotFused(f"its scores go through {described(eqn)}")
  if eqn is None:
    raise NotFused("no product of queries and keys makes its scores")
  if len(fills) > 1:
    raise NotFused(f"its masks put different numbers: {sorted(fills)}")
  return _Scores(eqn, dims, factor * (cap or 1.0), cap, tuple(masks), min(fills, default=0.0))


def _weights(match: Softmax, made: Mapping[Var, JaxprEqn]) -> tuple[int, ...]:
  """The dims of the weights, as dims of the scores."""
  var, dims = uncast(match.product.invars[match.side], made)
  eqn, exponentials = made[var], uncast(match.exp.outvars[0], made)
  if eqn.primitive.name != "div" or uncast(eqn.invars[0], made) != exponentials:
    raise NotFused(f"its weights go through {described(eqn)}")
  if uncast(match.total.invars[0], made) != exponentials:
    raise NotFused("its exponentials are divided by another sum than their own")
  # The dims of the sum lie right: `Softmaxes.match` has followed them.
  if origin(eqn.invars[1], made, PLACES) is not match.total.outvars[0]:
    raise NotFused("its exponentials are divided by something else than their sum")
  return dims


def _form(match: Softmax, scores: _Scores, weights: tuple[int, ...]) -> _Form:
  """The operands of the kernel."""
  if match.zeros_too or len(match.summed) != 1:
    raise NotFused("its weights are masked after the softmax, or summed over several dims")
  (column,) = match.summed
  dot, sizes = scores.product, match.exp.outvars[0].aval.shape
  met: Any = meeting(dot)
  summed: Any = meeting(match.product)
  names = {place: name for name, place in enumerate(scores.dims)}  # dim of the product -> dim of the scores
  sides = [_names(met, side, names) for side in (0, 1)]
  of_weights, of_values = match.side, 1 - match.side
  shared = [weights[d] for d in summed.shared[of_weights]]
  free = [weights[d] for d in summed.free[of_weights]]
  key_side = 0 if column in sides[0].values() else 1
  key, query = sides[key_side], sides[1 - key_side]
  batch = [names[place] for place in range(len(met.shared[0]))]
  others = [name for name in query.values() if name != _FEATURES and name not in batch]
  is_plain = (
    [weights[d] for d in summed.summed[of_weights]] == [column]
    and sorted(shared) == sorted(batch)
    and sorted(free) == sorted(others)
    and sorted(key.values()) == sorted([*batch, column, _FEATURES])
    and [*query.values()].count(_FEATURES) == 1
    and len(summed.free[of_values]) == 1
    and met.places is None is summed.places
  )
  if not is_plain:
    raise NotFused(f"{described(dot)} and {described(match.product)} pair other dims")
  row = max(others, key=sizes.__getitem__, default=column)
  if row == column or sizes[row] == 1 or sizes[column] == 1:
    raise NotFused("there is only one query, or one key")
  groups = [name for name in others if name != row]
  value = dict(zip(summed.shared[of_values], shared, strict=True))
  value |= {summed.summed[of_values][0]: column, summed.free[of_values][0]: _FEATURES}
  inner, keys = [*batch, *groups, row, _FEATURES], [*batch, column, _FEATURES]
  order = (shared, free, [_FEATURES]) if of_weights == 0 else (shared, [_FEATURES], free)
  return _Form(
    scores=scores,
    inputs=(dot.invars[1 - key_side], dot.invars[key_side], match.product.invars[of_values]),
    orders=(_order(query, inner), _order(key, keys), _order(value, keys)),
    shared=len(batch),
    order=tuple(inner.index(name) for part in order for name in part),
    row=row,
    column=column,
  )


def _names(met: Meeting, side: int, names: Mapping[int, int]) -> dict[int, int]:
  """Maps the dims of an operand of the product of queries and keys to the dims of the scores."""
  first = len(met.shared[0]) + (len(met.free[0]) if side else 0)
  found = {dim: names[place] for place, dim in enumerate(met.shared[side])}
  found |= {dim: names[first + n] for n, dim in enumerate(met.free[side])}
  return found | dict.fromkeys(met.summed[side], _FEATURES)


def _order(dims: Mapping[int, int], wanted: Sequence[int]) -> tuple[int, ...]:
  found = {name: dim for dim, name in dims.items()}
  return tuple(found[name] for name in wanted)


def _is_mask(var: Var, scores: Var) -> bool:
  return var.aval.dtype == jnp.bool_ and var.aval.shape == scores.aval.shape


def _number(var: Var, made: Mapping[Var, JaxprEqn]) -> float | None:
  """The number that fills a constant value, if the trace shows it."""
  if isinstance(var, core.Literal):
    return float(var.val) if jnp.ndim(var.val) == 0 else None
  eqn = maker(var, made)
  if eqn is None or len(eqn.outvars) != 1 or not is_inexact(var.aval):
    return None
  if eqn.primitive.name in ("broadcast_in_dim", "convert_element_type", "copy", "stop_gradient"):
    return _number(eqn.invars[0], made)
  numbers: list[float] = []
  # The search ends at the first unknown operand. Otherwise it would walk back through the model, and its time
  # would grow exponentially with the depth of the model.
  for x in eqn.invars:
    number = None if var.aval.shape or x.aval.shape else _number(x, made)
    if number is None:
      return None
    numbers.append(number)
  with jax.ensure_compile_time_eval():
    return float(
      bind(eqn, [jnp.asarray(n, x.aval.dtype) for n, x in zip(numbers, eqn.invars, strict=True)])[0]
    )


def _ends(match: Softmax, form: _Form) -> tuple[list[tuple[Var, Labels, bool]], dict[int, int]]:
  """The masks of an attention, with the labels of their dims, and the lengths of the labeled dims."""
  lengths = {name: size for name, size in enumerate(match.exp.outvars[0].aval.shape) if size > 1}
  ends = [
    (var, tuple((name, dims[name], 1) for name in sorted(lengths, key=dims.__getitem__)), kept)
    for var, dims, kept in form.scores.masks
  ]
  return ends, lengths


def _mask(
  body: Jaxpr, form: _Form, ends: Sequence[tuple[Var, Labels, bool]], lengths: Mapping[int, int]
) -> tuple[Callable[[Sequence[jax.Array]], tuple[jax.Array, jax.Array]], list[Var]]:
  """A function of its leaves that gives the mask of queries by keys, and which of its rows keep a key."""
  grid = Grid(lengths, {name: 1 for name in lengths if name not in (form.row, form.column)})
  tiles = Tiles(body, grid, lambda _, own: {name for name, _, _ in own} <= {form.row, form.column})
  for var, labels, _ in ends:
    tiles.need(var, labels)
  for leaf, labels in tiles.leaves:
    if not {name for name, _, _ in labels} <= {form.row, form.column}:
      raise NotFused(f"its mask {leaf.aval.str_short()} differs between examples or heads")
  for (_, labels), (eqn, _) in tiles.parts.items():
    own = {name for name, dim, _ in labels if dim == eqn.params.get("dimension")}
    if eqn.primitive.name == "iota" and not own <= {form.row, form.column}:
      raise NotFused("its mask differs between examples or heads")
  leaves = [*tiles.leaves]

  def masks(arrays: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    known, places = dict(zip(leaves, arrays, strict=True)), dict.fromkeys(grid.blocks, 0)
    mask = jnp.ones((lengths[form.row], lengths[form.column]), bool)
    for var, labels, kept in ends:
      dims = {name: dim for name, dim, _ in labels}
      found = tiles.value(var, labels, known, places)
      found = (
        found.reshape(mask.shape) if dims[form.row] < dims[form.column] else found.reshape(mask.T.shape).T
      )
      mask &= found if kept else ~found
    some = mask.any(-1)
    return mask | ~some[:, None], some

  return masks, [var for var, _ in leaves]


def _placed(
  form: _Form,
  kernel: Kernel,
  seen: Seen,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: jax.Array | None,
) -> jax.Array:
  """The kernel on each device's examples and heads."""

  def local(query: jax.Array, key: jax.Array, value: jax.Array, *mask: jax.Array) -> jax.Array:
    first, n = min(form.shared, 1), form.shared  # the first of the shared dims is the examples'
    batch, heads, group = (math.prod(query.shape[a:b]) for a, b in ((0, first), (first, n), (n, -2)))
    found = kernel(
      query.reshape(batch, heads, group, *query.shape[-2:]),
      *(x.reshape(batch, heads, *x.shape[-2:]) for x in (key, value)),
      scale=form.scores.scale,
      causal=seen.causal,
      window=seen.window,
      mask=mask[0] if mask else None,
      cap=form.scores.cap,
    )
    return found.reshape(*query.shape[:-1], value.shape[-1])

  masks = () if mask is None else (mask,)
  mesh = jax.sharding.get_abstract_mesh()
  free = {axis: mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes}
  if math.prod(free.values()) == 1 and AxisType.Explicit not in mesh.axis_types:
    return local(query, key, value, *masks)
  split = _split(query.shape[:-2], free)
  specs = [PartitionSpec(*dims) for dims in (split, *[split[: form.shared]] * 2, *[[]] * len(masks))]
  return on_shards(local, mesh, specs, specs[0], {*free})(query, key, value, *masks)


def _split(sizes: Sequence[int], mesh: Mapping[str, int]) -> list[tuple[str, ...]]:
  """The mesh axes of each dim: batch axes on the first, each other axis on the first later dim it divides.

  The compiler moves arrays with another layout.
  """
  scope = scope_in_use()
  rules = RuleSet() if scope is None else scope.ruleset
  first = batch_axes(rules, mesh) or ()
  found: list[tuple[str, ...]] = [()] * len(sizes)
  for axis in [*first, *(axis for axis in mesh if axis not in first)]:
    for d in [0] if axis in first else range(1, len(sizes)):
      if sizes[d : d + 1] and sizes[d] % (mesh[axis] * math.prod(mesh[other] for other in found[d])) == 0:
        found[d] = (*found[d], axis)
        break
  return found
