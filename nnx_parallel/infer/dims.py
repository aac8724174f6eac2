"""How each operation of a trace treats the dims of its arrays: one table for all code that follows dims.

An operation is described as an einsum of named factors, the form of the sharding rules of Shardy: a product
of matrices is `ab,bc->ac`. A dim of an operand and a dim of a result that share a factor are the same dim:
the operation treats all positions along it alike, so a block of the operands gives the same block of the
results. A factor that no result has is reduced: the results of its blocks are added up, or combined as the
name of the operation says. Other cases are marked in the text of a `DimMap`:

- `A`, upper case: the dim is the same, but the operation mixes its positions, or picks some of them: the dim
  of a `cumsum`, a `sort` or a `concatenate`, a window, the looked-up dim of a `gather` (which no result has).
  Its layout can stay, but its blocks cannot be computed separately.
- `a+`: the major part of a dim that a reshape splits or merges. `moved` says where other parts go.
- `_`: a dim without a partner: of size 1 and broadcast, made by the operation, or not followed.

Sources: Shardy, https://openxla.org/shardy/sharding_representation; GSPMD, arXiv:2105.04663.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from nnx_parallel.core.jaxprs import open_jaxpr, programs
from nnx_parallel.core.types import JaxprEqn, Var

Factors = tuple[int | None, ...]
"""The factor of each dim of an array."""

ELEMENTWISE = frozenset((
  "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
  "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
  "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv",
  "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag",
  "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to",
  "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "or",
  "polygamma", "population_count", "pow", "real", "reduce_precision", "regularized_incomplete_beta", "rem",
  "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
  "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
))  # fmt: skip
"""Each element of the result depends on the elements at its place in the operands."""
IDENTITIES = frozenset((
  "device_put", "layout_constraint", "mesh_cast", "optimization_barrier", "pcast", "pvary", "reshard",
  "sharding_constraint",
))  # fmt: skip
"""The results have the values of the operands, in order; layouts and memories may change."""
MOVES = frozenset((
  "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "dynamic_slice", "name", "reduce_precision",
  "reshape", "rev", "slice", "split", "squeeze", "stop_gradient", "transpose",
))  # fmt: skip
"""The results have the values of the first operand, in another type, shape or order at most."""
CUMULATIVE = frozenset(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"))
REDUCTIONS = frozenset((
  "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum",
  "reduce_xor",
))  # fmt: skip
PRODUCTS = frozenset(("conv_general_dilated", "dot_general", "ragged_dot_general"))
SCATTERS = frozenset((
  "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter_max", "scatter-max",
  "scatter_min", "scatter-min", "scatter_sub", "scatter-sub",
))  # fmt: skip
MATRIX = frozenset((
  "cholesky", "eigh", "householder_product", "lu", "qr", "schur", "svd", "triangular_solve",
  "tridiagonal_solve",
))  # fmt: skip
"""Linear algebra on the last two dims."""


@dataclasses.dataclass(frozen=True)
class DimMap:
  """The dims of one operation, as factors."""

  operands: tuple[Factors, ...]  # the factors of each operand
  results: tuple[Factors, ...]  # the factors of each result
  mixed: frozenset[int] = frozenset()  # the factors along which positions are not treated alike
  # factors that are only the major part of some of their dims, in a reshape
  major: frozenset[int] = frozenset()

  @property
  def reduced(self) -> list[int]:
    """The factors that no result has: summed over, or looked up in (`mixed`)."""
    kept = {*itertools.chain(*self.results)}
    return [f for f in dict.fromkeys(itertools.chain(*self.operands)) if f is not None and f not in kept]

  def __str__(self) -> str:
    names: dict[int, str] = {}

    def text(factors: Factors) -> str:
      return "".join(map(name, factors))

    def name(factor: int | None) -> str:
      if factor is None:
        return "_"
      letter = names.setdefault(factor, chr(ord("a") + len(names)))
      return letter.upper() if factor in self.mixed else f"{letter}+" if factor in self.major else letter

    return "->".join(",".join(map(text, arrays)) for arrays in (self.operands, self.results))


def dim_map(eqn: JaxprEqn) -> DimMap | None:
  """How an operation treats dims; None for calls, loops, kernels, and operations that are not listed."""
  rule = _RULES.get(eqn.primitive.name)
  return None if rule is None else rule(eqn)


def moved(
  dim: int, outer: int, length: int, before: Sequence[int], after: Sequence[int]
) -> tuple[int, int] | None:
  """Where a part of a dim (`outer x length x rest`) goes in a reshape: dim, size before it there; or None."""
  if 0 in (*before, *after):
    return None
  ahead = math.prod(before[:dim]) * outer
  for d, size in enumerate(after):
    own, rest = divmod(ahead, math.prod(after[:d]))
    if not rest and size and not size % (own * length):
      return d, own
  return None


def same_majors(before: Sequence[int], after: Sequence[int]) -> list[int | None]:
  """For each dim before a reshape, the dim after it that starts with the same product of sizes, if any."""
  starts = {math.prod(after[:d]): d for d, size in enumerate(after) if size != 1}
  return [starts.get(math.prod(before[:d])) if size != 1 else None for d, size in enumerate(before)]


def _shapes(variables: Iterable[Var]) -> list[tuple[int, ...]]:
  return [tuple(getattr(v.aval, "shape", ())) for v in variables]


def _map_factors(eqn: JaxprEqn, *operands: Sequence[int | None], mixed: Iterable[int] = ()) -> DimMap:
  """The map of an operation with one result, whose dims are the factors 0, 1, ...; others have none."""
  shapes = _shapes(eqn.invars)
  rest = [(None,) * len(shape) for shape in shapes[len(operands) :]]
  (out,) = _shapes(eqn.outvars)
  return DimMap((*map(tuple, operands), *rest), (tuple(range(len(out))),), frozenset(mixed))


def _alike(eqn: JaxprEqn, mixed: Iterable[int] = ()) -> DimMap:
  """Operands and results with equal dims; other operands (scalars) and broadcast dims have no factors."""
  befores, afters = _shapes(eqn.invars), _shapes(eqn.outvars)
  mixed = frozenset(mixed)
  whole = afters[0]

  def factors(shape: tuple[int, ...]) -> Factors:
    if len(shape) != len(whole):
      return (None,) * len(shape)
    pairs = enumerate(zip(shape, whole, strict=True))
    return tuple(d if size == other or d in mixed else None for d, (size, other) in pairs)

  return DimMap(tuple(map(factors, befores)), tuple(map(factors, afters)), mixed)


def _elementwise(eqn: JaxprEqn) -> DimMap | None:
  ranks = {len(shape) for shape in _shapes(eqn.invars)} - {0}
  # A bitcast to another width changes the rank.
  return _alike(eqn) if ranks <= {len(shape) for shape in _shapes(eqn.outvars)} else None


def _custom_derivative(eqn: JaxprEqn) -> DimMap | None:
  """A function with its own derivative is in the table where it is elementwise (`jax.nn.relu`)."""
  inner = [e for body in programs(eqn) for e in open_jaxpr(body).eqns]
  return _elementwise(eqn) if all(e.primitive.name in ELEMENTWISE for e in inner) else None


def _identity(eqn: JaxprEqn) -> DimMap:
  """Each result equals one of the operands."""
  counts = itertools.count()
  own = [tuple(itertools.islice(counts, len(shape))) for shape in _shapes(eqn.invars)]
  return DimMap(tuple(own), tuple(own[: len(eqn.outvars)]))


def _mixing(key: str) -> Callable[[JaxprEqn], DimMap]:
  """Operations whose parameter `key` names the dims that they mix."""

  def rule(eqn: JaxprEqn) -> DimMap:
    dims: Iterable[int] = np.atleast_1d(eqn.params[key])  # a number, also of NumPy, or a tuple
    rank = len(eqn.invars[0].aval.shape)
    return _alike(eqn, [int(d) % rank for d in dims])

  return rule


def _map_resize(eqn: JaxprEqn) -> DimMap:
  """Slices and updates: a dim whose size differs between an operand and the result is mixed."""
  (out,) = _shapes(eqn.outvars)
  shapes = [shape for shape in _shapes(eqn.invars) if len(shape) == len(out)]
  return _alike(eqn, [d for d, sizes in enumerate(zip(out, *shapes, strict=True)) if len({*sizes}) > 1])


def _pad(eqn: JaxprEqn) -> DimMap:
  config = eqn.params["padding_config"]
  return _alike(eqn, [d for d, padding in enumerate(config) if tuple(padding) != (0, 0, 0)])


def _windows(eqn: JaxprEqn) -> DimMap:
  """Pooling, and its gradient."""
  keys = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
  sizes = [eqn.params[key] for key in keys if eqn.params.get(key)]
  pads = eqn.params["padding"]
  rank = range(len(pads))
  return _alike(eqn, [d for d in rank if tuple(pads[d]) != (0, 0) or any(own[d] != 1 for own in sizes)])


def _leading(count: Callable[[JaxprEqn], int]) -> Callable[[JaxprEqn], DimMap]:
  """Operations on the last `count` dims of their first operand: earlier dims are a batch."""

  def rule(eqn: JaxprEqn) -> DimMap:
    first = len(eqn.invars[0].aval.shape) - count(eqn)

    def factors(shape: tuple[int, ...]) -> Factors:
      return tuple(d if d < first else None for d in range(len(shape)))

    return DimMap(tuple(map(factors, _shapes(eqn.invars))), tuple(map(factors, _shapes(eqn.outvars))))

  return rule


def _iota(eqn: JaxprEqn) -> DimMap:
  along = eqn.params["dimension"]
  return DimMap(
    tuple((None,) * len(shape) for shape in _shapes(eqn.invars)),
    (tuple(None if d == along else d for d in range(len(eqn.params["shape"]))),),
  )


def _reduction(eqn: JaxprEqn) -> DimMap:
  rank, gone = len(eqn.invars[0].aval.shape), eqn.params["axes"]
  kept = itertools.count()
  lost = itertools.count(rank - len(gone))
  return _map_factors(eqn, [next(lost) if d in gone else next(kept) for d in range(rank)])


def _squeeze(eqn: JaxprEqn) -> DimMap:
  kept, gone = itertools.count(), eqn.params["dimensions"]
  return _map_factors(eqn, [None if d in gone else next(kept) for d in range(len(eqn.invars[0].aval.shape))])


def _transpose(eqn: JaxprEqn) -> DimMap:
  order = list(eqn.params["permutation"])
  return _map_factors(eqn, [order.index(d) for d in range(len(order))])


def _broadcast(eqn: JaxprEqn) -> DimMap:
  before, after = eqn.invars[0].aval.shape, eqn.params["shape"]
  pairs = zip(before, eqn.params["broadcast_dimensions"], strict=True)
  return _map_factors(eqn, [to if size == after[to] else None for size, to in pairs])


def _stack(eqn: JaxprEqn) -> DimMap:
  axis, rank = eqn.params["axis"], len(eqn.invars[0].aval.shape)
  found = _map_factors(eqn, *[[d + (d >= axis) for d in range(rank)]] * len(eqn.invars))
  return dataclasses.replace(found, results=(tuple(None if d == axis else d for d in found.results[0]),))


def _unstack(eqn: JaxprEqn) -> DimMap:
  axis, rank = eqn.params["axis"], len(eqn.invars[0].aval.shape)
  kept = tuple(d for d in range(rank) if d != axis)
  own = tuple(None if d == axis else d for d in range(rank))
  return DimMap((own,), (kept,) * len(eqn.outvars))


def _reshape(eqn: JaxprEqn) -> DimMap:
  """Dims at which the products of the sizes before them agree are the same, if only their major parts."""
  before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
  own = same_majors(before, after)
  major = {to for d, to in enumerate(own) if to is not None and before[d] != after[to]}
  shared = tuple(d if d in own else None for d in range(len(after)))
  rest = [(None,) * len(shape) for shape in _shapes(eqn.invars[1:])]
  return DimMap((tuple(own), *rest), (shared,), major=frozenset(major))


def _ragged_dot(eqn: JaxprEqn) -> DimMap | None:
  """Rows of the left operand in groups, each with a separate right operand: a layer of experts."""
  numbers = eqn.params["ragged_dot_dimension_numbers"]
  summed, shared = numbers.dot_dimension_numbers
  if set(numbers.lhs_ragged_dimensions) & {*summed[0], *shared[0]}:
    return None
  found = _product(eqn, summed, shared, numbers.rhs_group_dimensions)
  rows = {found.operands[0][d] for d in numbers.lhs_ragged_dimensions}
  return dataclasses.replace(found, mixed=frozenset(f for f in rows if f is not None))


def _product(
  eqn: JaxprEqn, summed: Sequence[Sequence[int]], shared: Sequence[Sequence[int]], groups: Sequence[int] = ()
) -> DimMap:
  """The result has the shared dims, then the other dims of the left, and of the right operand."""
  (rank,) = (len(shape) for shape in _shapes(eqn.outvars))
  free = itertools.count(len(shared[0]))
  sides: list[list[int | None]] = []
  for side, var in enumerate(eqn.invars[:2]):
    known: dict[int, int | None] = {d: n for n, d in enumerate(shared[side])}
    known |= {d: rank + n for n, d in enumerate(summed[side])}
    known |= dict.fromkeys(groups if side else (), None)
    sides.append([known[d] if d in known else next(free) for d in range(len(var.aval.shape))])
  return _map_factors(eqn, *sides)


def _convolution(eqn: JaxprEqn) -> DimMap:
  """Windows along the space dims; groups of channels, or of the batch, mix these dims."""
  numbers, params = eqn.params["dimension_numbers"], eqn.params
  (batch, channel, *space), (out, into, *_) = numbers.lhs_spec, numbers.rhs_spec
  out_batch, out_channel, *out_space = numbers.out_spec
  rank = len(numbers.out_spec)
  image, kernel = dict(zip((batch, *space), (out_batch, *out_space), strict=True)), {}
  mixed = {*out_space}
  if params["feature_group_count"] > 1:  # each group of channels has its own kernels
    image[channel] = out_channel
    mixed.add(out_channel)
  else:
    image[channel] = kernel[into] = rank
    kernel[out] = out_channel
  if params["batch_group_count"] > 1:
    mixed |= {out_batch, out_channel}
  return _map_factors(eqn, [image[d] for d in range(rank)], [kernel.get(d) for d in range(rank)], mixed=mixed)


def _gather(eqn: JaxprEqn) -> DimMap:
  """A look-up: the dims of the indices, and the dims of the table that are neither indexed nor cut."""
  numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
  (table, indices), (out,) = _shapes(eqn.invars[:2]), _shapes(eqn.outvars)
  looked_up = [d for d in range(len(out)) if d not in numbers.offset_dims]
  dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
  window = [d for d in range(len(table)) if d not in dropped]
  own: list[int | None] = [None] * len(table)
  cut: list[int] = []
  for d, to in zip(window, numbers.offset_dims, strict=True):
    if sizes[d] == table[d]:
      own[d] = to
    else:
      cut.append(to)
  for d, index in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
    own[d] = looked_up[index]
  for n, d in enumerate(numbers.collapsed_slice_dims):
    own[d] = len(out) + n
  picked = range(len(out), len(out) + len(numbers.collapsed_slice_dims))
  found = _map_factors(eqn, own, [*looked_up, None][: len(indices)], mixed=picked)
  return dataclasses.replace(found, results=(tuple(None if d in cut else d for d in range(len(out))),))


def _scatter(eqn: JaxprEqn) -> DimMap:
  """An update of rows of a table: the indices' dims are summed over, or one row is chosen."""
  numbers = eqn.params["dimension_numbers"]
  table, indices, updates = _shapes(eqn.invars[:3])
  dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
  window = [d for d in range(len(table)) if d not in dropped]
  looked_up = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
  own: dict[int, int] = {d: len(table) + n for n, d in enumerate(looked_up)}
  mixed = {*numbers.inserted_window_dims}
  for d, index in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
    own[looked_up[index]] = d
  for d, row in zip(window, numbers.update_window_dims, strict=True):
    if table[d] == updates[row]:
      own[row] = d
    else:
      mixed.add(d)
  places = [own[d] for d in looked_up]
  return _map_factors(
    eqn,
    range(len(table)),
    [*places, None][: len(indices)],
    [own.get(d) for d in range(len(updates))],
    mixed=mixed,
  )


_RULES: Mapping[str, Callable[[JaxprEqn], DimMap | None]] = {
  **dict.fromkeys(ELEMENTWISE, _elementwise),
  **dict.fromkeys(IDENTITIES, _identity),
  **dict.fromkeys(CUMULATIVE, _mixing("axis")),
  **dict.fromkeys(REDUCTIONS, _reduction),
  **dict.fromkeys(SCATTERS, _scatter),
  **dict.fromkeys(MATRIX, _leading(lambda eqn: 2)),
  **dict.fromkeys(("dynamic_slice", "dynamic_update_slice", "slice"), _map_resize),
  **dict.fromkeys(
    ("reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_gather_add",
     "select_and_scatter_add"), _windows
  ),
  "approx_top_k": _mixing("reduction_dimension"),
  "broadcast_in_dim": _broadcast,
  "concatenate": _mixing("dimension"),
  "conv_general_dilated": _convolution,
  "custom_jvp_call": _custom_derivative,
  "dot_general": lambda eqn: _product(eqn, *eqn.params["dimension_numbers"]),
  "fft": _leading(lambda eqn: len(eqn.params["fft_lengths"])),
  "gather": _gather,
  "iota": _iota,
  "pad": _pad,
  "ragged_dot_general": _ragged_dot,
  "random_bits": _leading(lambda eqn: 0),
  "reshape": _reshape,
  "rev": _mixing("dimensions"),
  "sort": _mixing("dimension"),
  "split": _mixing("axis"),
  "squeeze": _squeeze,
  "stack": _stack,
  "top_k": _mixing("axis"),
  "transpose": _transpose,
  "unstack": _unstack,
}  # fmt: skip
