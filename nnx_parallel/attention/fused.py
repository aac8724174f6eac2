"""Computes an attention from a trace with the fused kernel that JAX has for the chip.

The kernel computes softmax(scale * q k^T + bias) v, with a soft cap and a mask of queries by keys.
`jax.shard_map` places it on the mesh, because a kernel runs on one device. Attentions of other forms go by
tiles. An example: `softmax(where(causal & (ids_q == ids_k), 0.1 * q k^T, -1e9)) v` is read back from the
exponential to the product as scale=0.1, and the conditions `causal`, which becomes a rule of positions, and
`ids_q == ids_k`, which becomes segments if both are one array.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec

from nnx_parallel.attention.flow import Meeting, meeting
from nnx_parallel.attention.kernels import Kernel, Terms
from nnx_parallel.attention.masks import ALL, HIDDEN, PLACES, seen_by
from nnx_parallel.attention.softmaxes import NotFused, Softmax, is_cast, uncast
from nnx_parallel.attention.tiling import Grid, Labels, Tiles, Untiled, call_equation, describe, order, pull
from nnx_parallel.core.axes import count_shards
from nnx_parallel.core.jaxprs import among, bind, is_inexact, maker, makers, origin, struct
from nnx_parallel.core.shards import on_shards
from nnx_parallel.core.types import AnyArray, Jaxpr, JaxprEqn, Var
from nnx_parallel.layout.batch import batch_axes
from nnx_parallel.layout.constrain import scope_in_use
from nnx_parallel.rules.ruleset import RuleSet

_FEATURES = -1
"""Stands for the dim of the features, which the scores lack."""
Makers = Mapping[Var, JaxprEqn]
Condition = tuple[Var, Labels, bool]
"""A boolean, the labels of its dims, and whether a score is kept where it is true."""


@dataclasses.dataclass(frozen=True)
class _Scores:
  """A product of queries and keys, scaled, capped by `cap * tanh(x / cap)`, masked, plus a bias."""

  dims: tuple[int, ...]  # for each dim of the scores, the dim of the product
  scale: float = 1.0
  cap: float | None = None
  masks: tuple[Condition, ...] = ()
  fills: frozenset[float] = frozenset()  # the values of what is not kept
  # what is added, its dim for each dim of the scores, and its factor
  bias: tuple[Var, tuple[int, ...], float] | None = None
  # whether something is added to the number that a mask puts, so that it has a gradient
  is_open: bool = False

  @property
  def fill(self) -> float:
    """The value of what is not kept."""
    return min(self.fills, default=0.0)

  def masked(self, mask: Condition, fill: float, *, added: bool) -> _Scores:
    """The scores with another mask inside of those so far."""
    is_open = self.is_open or (math.isfinite(fill) and (added or self.bias is not None))
    return dataclasses.replace(self, masks=(*self.masks, mask), fills=self.fills | {fill}, is_open=is_open)

  def labels(self, shape: Sequence[int]) -> Labels:
    """The labels of a value with dims of the product, some of them of length 1."""
    return order((name, dim, 1) for name, dim in enumerate(self.dims) if shape[dim] > 1)


@dataclasses.dataclass(frozen=True)
class _Form:
  """An attention as the kernel computes it."""

  scores: _Scores
  inputs: tuple[Var, Var, Var]  # query, key and value, and their dims in the order of `names`, then features
  orders: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
  # the dims of the scores: `shared` dims (examples, heads), other dims of the query, queries, keys
  names: tuple[int, ...]
  shared: int
  order: tuple[int, ...]  # the dims of the result, in terms of the dims of the kernels' results

  @property
  def whole(self) -> list[int]:
    """The dims of the scores that a mask may have: examples, queries and keys."""
    return [*self.names[: min(1, self.shared)], *self.names[-2:]]


def by_kernel(body: Jaxpr, match: Softmax, kernel: Kernel, *, zeros: bool = False) -> JaxprEqn:
  """The operation of an attention by a kernel, or `NotFused`; with `zeros`, a row of `-inf` is 0, not NaN."""
  made = makers(body)
  scores, product = _scores(match, made)
  form = _form(match, scores, product, _weights(match, made))
  lengths = {name: size for name, size in enumerate(match.exp.outvars[0].aval.shape) if size > 1}
  conditions = _conditions(form, lengths, made)
  segments, rest = _segments(form, conditions, lengths, made)
  seen = seen_by(body, rest, lengths, *form.names[-2:])
  if seen is None and segments is not None:  # a row might not see its own position
    segments, rest = None, conditions
  if seen is None and (len(scores.fills) > 1 or scores.is_open):
    raise NotFused("a query may see no key, and the numbers of its masks differ, or are added to its scores")
  masks, leaves = (None, []) if seen is not None else _mask(body, form, rest, lengths)
  more = [] if scores.bias is None else [scores.bias[0]]
  more += [] if segments is None else [segments[0]]
  out = match.product.outvars[0]

  def attention_by_kernel(*arrays: jax.Array) -> list[jax.Array]:
    query, key, value = (x.transpose(order) for x, order in zip(arrays[:3], form.orders, strict=True))
    rest = [*arrays[3:]]
    bias = None if scores.bias is None else _bias(form, rest.pop(0), query, key)
    ids = None
    if segments is not None:
      ids = _arrange(rest.pop(0), segments[1], form.whole[:-1]).reshape(-1, query.shape[-2])
      ids = jnp.broadcast_to(ids, (query.shape[0] if form.shared else 1, query.shape[-2]))
    mask, some = (None, None) if masks is None else masks(rest)
    terms = Terms(scores.scale, *(seen or ALL), ids, mask, bias, scores.cap)
    found = _place(form, kernel, terms, query, key, value)
    if some is not None:  # a row that keeps nothing
      nothing = jnp.full_like(value[..., :1, :], 0 if zeros else jnp.nan)
      none = value.mean(-2, keepdims=True) if math.isfinite(scores.fill) else nothing
      none = jnp.expand_dims(none, range(form.shared, form.shared + found.ndim - none.ndim))
      some = some.reshape(*some.shape[: min(1, form.shared)], *[1] * (found.ndim - 3), some.shape[-1], 1)
      found = jnp.where(some if form.shared else some[0], found, none)
    found = found.transpose(form.order).astype(out.aval.dtype)
    where = struct(out.aval).sharding
    return [found if where is None else jax.sharding.reshard(found, where)]

  inputs = [*form.inputs, *more, *leaves]
  return call_equation(attention_by_kernel, inputs, match.product.outvars, match.product)


def _scores(match: Softmax, made: Makers) -> tuple[_Scores, JaxprEqn]:
  """Reads back from the softmax to the product of queries and keys."""
  exp, largest = match.exp, match.largest.invars[0]
  var = made[exp.invars[0]].invars[0]
  if uncast(largest, made, ("stop_gradient",))[0] is not uncast(var, made)[0]:
    raise NotFused("it subtracts a maximum that is not of its scores")
  found, product = _read(var, _Scores(tuple(range(len(exp.outvars[0].aval.shape)))), made)
  return dataclasses.replace(found, scale=found.scale * (found.cap or 1.0)), product


def _read(var: Var, found: _Scores, made: Makers) -> tuple[_Scores, JaxprEqn]:
  """The scores from a value back to the product, given what was found behind it."""
  eqn = maker(var, made)
  if eqn is None:
    raise NotFused("no product of queries and keys makes its scores")
  name, inputs = eqn.primitive.name, eqn.invars
  if name == "dot_general":
    return found, eqn
  numbers = [_number(x, made) for x in inputs]
  if name == "transpose":
    dims = tuple(eqn.params["permutation"][d] for d in found.dims)
    return _read(inputs[0], dataclasses.replace(found, dims=dims), made)
  if is_cast(eqn):
    return _read(inputs[0], found, made)
  if name == "tanh" and found.cap is None and found.scale > 0 and found.bias is None:
    return _read(inputs[0], dataclasses.replace(found, cap=found.scale, scale=1.0), made)
  if name in ("mul", "div") and numbers[1] is not None:
    scale = found.scale * numbers[1] if name == "mul" else found.scale / numbers[1]
    return _read(inputs[0], dataclasses.replace(found, scale=scale), made)
  if name == "mul" and numbers[0] is not None:
    return _read(inputs[1], dataclasses.replace(found, scale=found.scale * numbers[0]), made)
  if name == "select_n" and found.cap is None and inputs[0].aval.dtype == jnp.bool_:
    low = {n: x * found.scale for n, x in enumerate(numbers) if n and x is not None}
    low = {n: x for n, x in low.items() if x <= HIDDEN}
    if len(low) != 1 or inputs[0].aval.shape != var.aval.shape:
      raise NotFused(f"its scores go through {describe(eqn)}, which is not a mask")
    ((side, fill),) = low.items()
    mask = inputs[0], found.labels(var.aval.shape), side == 1
    return _read(inputs[3 - side], found.masked(mask, fill, added=False), made)
  if name == "add" and found.cap is None:
    return _after_sum(eqn, found, made)
  raise NotFused(f"its scores go through {describe(eqn)}")


def _after_sum(eqn: JaxprEqn, found: _Scores, made: Makers) -> tuple[_Scores, JaxprEqn]:
  """The scores behind a sum of them and a mask, or of them and a bias."""
  for x, other in (eqn.invars, eqn.invars[::-1]):
    added = None if isinstance(x, core.Literal) else _added_mask(x, found.labels(x.aval.shape), made)
    if added is not None and added[1] * found.scale <= HIDDEN:
      return _read(other, found.masked(added[0], added[1] * found.scale, added=True), made)
  for x, other in (eqn.invars, eqn.invars[::-1]):
    if found.bias is None and _number(other, made) is None and x.aval.shape == eqn.outvars[0].aval.shape:
      with contextlib.suppress(NotFused):
        return _read(x, dataclasses.replace(found, bias=(other, found.dims, found.scale)), made)
  raise NotFused(f"its scores go through {describe(eqn)}")


def _added_mask(var: Var, labels: Labels, made: Makers) -> tuple[Condition, float] | None:
  """A mask that is 0 where a score is kept and a negative number elsewhere, and that number; or None."""
  lengths = {name: var.aval.shape[dim] for name, dim, _ in labels}
  var, labels = _before_places(var, labels, lengths, made, is_inexact)
  eqn = maker(var, made)
  if eqn is None:
    return None
  name, numbers = eqn.primitive.name, [_number(x, made) for x in eqn.invars]
  if name == "select_n" and len(numbers) == 3 and 0 in numbers and eqn.invars[0].aval.shape == var.aval.shape:
    zero = numbers.index(0)
    fill = numbers[3 - zero]
    return None if fill is None else ((eqn.invars[0], labels, zero == 2), fill)
  if name != "mul" or (n := next((n for n, x in enumerate(numbers) if x is not None), None)) is None:
    return None
  x, kept = eqn.invars[1 - n], False
  minus = maker(x, made)
  if minus is not None and minus.primitive.name == "sub" and _number(minus.invars[0], made) == 1:
    x, kept = minus.invars[1], True
  if x.aval.shape != var.aval.shape:
    return None
  mask, labels = _before_places(x, labels, lengths, made, lambda x: is_inexact(x) or x.dtype == jnp.bool_)
  fill: Any = numbers[n]
  return ((mask, labels, kept), fill) if mask.aval.dtype == jnp.bool_ else None


def _weights(match: Softmax, made: Makers) -> tuple[int, ...]:
  """The dims of the weights, as dims of the scores."""
  var, dims = uncast(match.product.invars[match.side], made)
  eqn, exponentials = made[var], uncast(match.exp.outvars[0], made)
  if eqn.primitive.name != "div" or uncast(eqn.invars[0], made) != exponentials:
    raise NotFused(f"its weights go through {describe(eqn)}")
  if uncast(match.total.invars[0], made) != exponentials:
    raise NotFused("its exponentials are divided by another sum than their own")
  # The dims of the sum lie right: `Softmaxes.match` has followed them.
  if origin(eqn.invars[1], made, PLACES) is not match.total.outvars[0]:
    raise NotFused("its exponentials are divided by something else than their sum")
  return dims


def _form(match: Softmax, scores: _Scores, dot: JaxprEqn, weights: tuple[int, ...]) -> _Form:
  """The operands of the kernel."""
  if match.zeros_too or len(match.summed) != 1:
    raise NotFused("its weights are masked after the softmax, or summed over several dims")
  (column,) = match.summed
  sizes = match.exp.outvars[0].aval.shape
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
    raise NotFused(f"{describe(dot)} and {describe(match.product)} pair other dims")
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
    names=(*batch, *groups, row, column),
    shared=len(batch),
    order=tuple(inner.index(name) for part in order for name in part),
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


def _number(var: Var, made: Makers) -> float | None:
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


def _conditions(form: _Form, lengths: Mapping[int, int], made: Makers) -> list[Condition]:
  """Booleans that all must hold where a score is kept: masks are taken apart at their `and`."""

  def apart(var: Var, labels: Labels, kept: bool) -> list[Condition]:
    number = origin(var, made, PLACES)
    if isinstance(number, core.Literal) and bool(number.val) == kept:  # `jnp.ones(shape, bool) & mask`
      return []
    eqn = maker(var, made)
    name = None if eqn is None else eqn.primitive.name
    joins = name in (*PLACES, "not", "and" if kept else "or")
    if (
      eqn is None
      or not joins
      or any(isinstance(x, core.Literal) or x.aval.dtype != jnp.bool_ for x in eqn.invars)
    ):
      return [(var, labels, kept)]
    try:
      wanted = pull(eqn, labels, lengths)
    except Untiled:
      return [(var, labels, kept)]
    pairs = [*zip(eqn.invars, wanted, strict=True)]
    if any(x.aval.shape[dim] != lengths[name] for x, own in pairs for name, dim, _ in own):
      return [(var, labels, kept)]
    return [part for x, own in pairs for part in apart(x, own, kept != (name == "not"))]

  return [part for mask in form.scores.masks for part in apart(*mask)]


def _segments(
  form: _Form, conditions: list[Condition], lengths: Mapping[int, int], made: Makers
) -> tuple[tuple[Var, Labels] | None, list[Condition]]:
  """The array whose equal numbers see each other, with its labels, and the other conditions.

  It must be one array for queries and keys: then a causal query sees at least its own position.
  """
  *batch, row, column = form.whole
  for n, (var, labels, kept) in enumerate(conditions):
    eqn = maker(var, made)
    if eqn is None or eqn.primitive.name != ("eq" if kept else "ne") or is_inexact(eqn.invars[0].aval):
      continue
    pairs = zip(eqn.invars, pull(eqn, labels, lengths), strict=True)
    # Another type might not tell all numbers apart.
    ends = [
      _before_places(x, own, lengths, made, lambda y, dtype=x.aval.dtype: y.dtype == dtype)
      for x, own in pairs
    ]
    (one, own), (other, theirs) = sorted(ends, key=lambda end: any(name == column for name, _, _ in end[1]))
    turned = {(row if name == column else name, *place) for name, *place in theirs}
    if (
      one is other
      and turned == {*own}
      and row in (names := {name for name, _, _ in own})
      and names <= {*batch, row}
    ):
      return (one, own), conditions[:n] + conditions[n + 1 :]
  return None, conditions


def _before_places(
  var: Var, labels: Labels, lengths: Mapping[int, int], made: Makers, fits: Callable[[AnyArray], bool]
) -> tuple[Var, Labels]:
  """The value behind operations that only move it, if it is of a type that fits, with its labels."""
  while among(var, made) and made[var].primitive.name in PLACES:
    before = made[var].invars[0]
    if isinstance(before, core.Literal) or not fits(before.aval):
      break
    try:
      (own,) = pull(made[var], labels, lengths)
    except Untiled:
      break
    if any(before.aval.shape[dim] != lengths[name] for name, dim, _ in own):
      break
    var, labels = before, own
  return var, labels


def _arrange(x: jax.Array, labels: Labels, names: Sequence[int]) -> jax.Array:
  """An array with one dim for each name, of length 1 if its labels lack the name."""
  places = {name: dim for name, dim, _ in labels}
  own = [places[name] for name in names if name in places]
  x = x.transpose(*own, *(d for d in range(x.ndim) if d not in own))
  lengths = iter(x.shape)
  return x.reshape([next(lengths) if name in places else 1 for name in names])


def _mask(
  body: Jaxpr, form: _Form, conditions: Sequence[Condition], lengths: Mapping[int, int]
) -> tuple[Callable[[Sequence[jax.Array]], tuple[jax.Array, jax.Array]], list[Var]]:
  """A function of its leaves that gives the mask of queries by keys, and which of its rows keep a key."""
  names = form.whole
  grid = Grid(lengths, {name: 1 for name in lengths if name not in names})
  tiles = Tiles(body, grid, lambda _, own: {name for name, _, _ in own} <= {*names})
  for var, labels, _ in conditions:
    tiles.need(var, labels)
  for leaf, labels in tiles.leaves:
    if not {name for name, _, _ in labels} <= {*names}:
      raise NotFused(f"its mask {leaf.aval.str_short()} differs between heads")
  for (_, labels), (eqn, _) in tiles.parts.items():
    own = {name for name, dim, _ in labels if dim == eqn.params.get("dimension")}
    if eqn.primitive.name == "iota" and not own <= {*names}:
      raise NotFused("its mask differs between heads")
  leaves = [*tiles.leaves]

  def masks(arrays: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    known, places = dict(zip(leaves, arrays, strict=True)), dict.fromkeys(grid.blocks, 0)
    mask = jnp.ones([lengths[name] if name in names[-2:] else 1 for name in names], bool)
    for var, labels, kept in conditions:
      found = _arrange(tiles.value(var, labels, known, places), labels, names)
      mask = mask & (found if kept else ~found)
    mask = mask.reshape(-1, *mask.shape[-2:])
    some = mask.any(-1)
    return mask | ~some[..., None], some

  return masks, [var for var, _ in leaves]


def _bias(form: _Form, bias: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
  """What is added to the scores, with its factor, and with all examples, all heads and groups, or one."""
  assert form.scores.bias is not None
  _, dims, factor = form.scores.bias
  bias = bias.transpose([dims[name] for name in form.names]) * factor
  whole, ends = (*query.shape[:-1], key.shape[-2]), (0, min(1, form.shared), form.shared, bias.ndim - 2)
  sizes = [*bias.shape[:-2], *whole[-2:]]
  for a, b in itertools.pairwise(ends):
    if max(sizes[a:b], default=1) > 1:
      sizes[a:b] = whole[a:b]
  return jnp.broadcast_to(bias, sizes)


def _place(
  form: _Form, kernel: Kernel, terms: Terms, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
  """The kernel on each device's examples and heads."""
  given = {name: x for name, x in terms._asdict().items() if isinstance(x, jax.Array)}

  def local(query: jax.Array, key: jax.Array, value: jax.Array, *arrays: jax.Array) -> jax.Array:
    first, n = min(form.shared, 1), form.shared  # the first of the shared dims is the examples'

    def sizes(shape: Sequence[int]) -> list[int]:
      """Those of examples, heads and group."""
      return [math.prod(shape[a:b]) for a, b in ((0, first), (first, n), (n, -2))]

    own = terms._replace(**dict(zip(given, arrays, strict=True)))
    if own.bias is not None:
      own = own._replace(bias=own.bias.reshape(*sizes(own.bias.shape), *own.bias.shape[-2:]))
    batch, heads, group = sizes(query.shape)
    key, value = (x.reshape(batch, heads, *x.shape[-2:]) for x in (key, value))
    found = kernel(query.reshape(batch, heads, group, *query.shape[-2:]), key, value, own)
    return found.reshape(*query.shape[:-1], value.shape[-1])

  mesh = jax.sharding.get_abstract_mesh()
  free = {axis: mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes}
  if math.prod(free.values()) == 1 and AxisType.Explicit not in mesh.axis_types:
    return local(query, key, value, *given.values())
  split = _split(query.shape[:-2], free)
  shared = split[: form.shared]
  specs = [PartitionSpec(*dims) for dims in (split, shared, shared)]
  for name, x in given.items():
    dims = split if name == "bias" else shared[:1]
    specs.append(PartitionSpec(*(own if size > 1 else () for own, size in zip(dims, x.shape, strict=False))))
  return on_shards(local, mesh, specs, specs[0], {*free})(query, key, value, *given.values())


def _split(sizes: Sequence[int], mesh: Mapping[str, int]) -> list[tuple[str, ...]]:
  """The mesh axes of each dim: batch axes on the first, each other axis on the first later dim it divides."""
  scope = scope_in_use()
  rules = RuleSet() if scope is None else scope.ruleset
  first = batch_axes(rules, mesh) or ()
  found: list[tuple[str, ...]] = [()] * len(sizes)
  for axis in [*first, *(axis for axis in mesh if axis not in first)]:
    for d in [0] if axis in first else range(1, len(sizes)):
      if sizes[d : d + 1] and sizes[d] % count_shards((*found[d], axis), mesh) == 0:
        found[d] = (*found[d], axis)
        break
  return found
