"""Propagates mesh axes through the operations of a trace: the layout that each result should have.

A dim keeps its axes, and an array uses each axis once. Two dims of a product may need the same axis: an axis
of the batch stays with the data (the parameter is gathered: fsdp), any other axis stays with the parameter
(the data is gathered: tensor parallel, after a sequence-parallel part). Axis sizes do not matter. Reports
count by these layouts; train steps constrain the compiler to them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import axes_by_dim, without

DimAxes = tuple[str, ...]
Axes = tuple[DimAxes, ...]
_REDUCTIONS = (
  "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax",
  "argmin",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Flow:
  """The origin of an array, and its layout.

  Attributes:
    axes: mesh axes of each dim.
    data: whether its values depend on the batch.
    weight: whether they depend on parameters.
    parameter: position of the input with the same values, if that is a parameter.
    value: a number for this value. Its variable is not enough: jax traces equal calls once, to one jaxpr.
  """

  axes: Axes
  data: bool
  weight: bool = False
  parameter: int | None = None
  value: int = dataclasses.field(default_factory=itertools.count().__next__, compare=False)

  @property
  def names(self) -> frozenset[str]:
    """All axes that split the array."""
    return frozenset(axis for dim in self.axes for axis in dim)


@dataclasses.dataclass(frozen=True)
class Met:
  """The layout of a product's result, and the axes of its operands.

  Attributes:
    axes: of the result.
    main_is_left: whether the left operand is the data; the other one is then a parameter, or data too.
    shared: axes of the dims that both operands have and the result keeps.
    wanted: axes of the parameter's free dims that do not split the batch.
    main: axes of the data operand's free dims in the result.
    other: axes of the other operand's free dims in the result.
  """

  axes: Axes
  main_is_left: bool
  shared: frozenset[str]
  wanted: frozenset[str]
  main: tuple[DimAxes, ...]
  other: tuple[DimAxes, ...]


@dataclasses.dataclass(frozen=True)
class Meeting:
  """The pairs of dims of the two operands of a product.

  Attributes:
    summed: dims of the left and of the right operand that are summed over.
    shared: dims that both have and the result keeps.
    free: dims that only one of them has.
    flops: of the whole product.
    places: dim of the result, for each of the shared dims, the free ones of the left, and of the right.
  """

  summed: tuple[Sequence[int], Sequence[int]]
  shared: tuple[Sequence[int], Sequence[int]]
  free: tuple[Sequence[int], Sequence[int]]
  flops: int
  places: Sequence[int] | None = None

  def meet(self, left: Flow, right: Flow, batch: frozenset[str]) -> Met:
    """The layout of the result; an axis that both operands have on different dims goes to one of them."""
    main_is_left = left.data or not right.data
    main, other = (left, right) if main_is_left else (right, left)
    main_free, other_free = self.free if main_is_left else self.free[::-1]
    used = _Used()
    shared = [used.take(left.axes[a], right.axes[b]) for a, b in zip(*self.shared, strict=True)]
    names = frozenset(used.names)
    free = frozenset[str]() if other.data else {axis for d in other_free for axis in other.axes[d]}
    wanted = frozenset(free) - batch
    kept = tuple(used.take(without(main.axes[d], wanted)) for d in main_free)
    added = tuple(used.take(other.axes[d]) for d in other_free)
    frees = (kept, added) if main_is_left else (added, kept)
    axes = self._arranged((*shared, *frees[0], *frees[1]))
    return Met(axes, main_is_left, names, wanted, kept, added)

  def _arranged(self, axes: Axes) -> Axes:
    """The axes of the shared and the free dims in the order of the result."""
    if self.places is None:
      return axes
    placed = dict(zip(self.places, axes, strict=True))
    return tuple(placed[d] for d in sorted(placed))


def meeting(eqn: Any) -> Meeting | None:
  """The pairs of dims of a product; None for other operations."""
  make = _MEETINGS.get(eqn.primitive.name)
  return make(eqn) if make else None


def _dot_meeting(eqn: Any) -> Meeting:
  return _meet(eqn, *eqn.params["dimension_numbers"])


def _ragged_meeting(eqn: Any) -> Meeting | None:
  """Rows of the left operand in groups, each with a separate right operand: a layer of experts."""
  numbers = eqn.params["ragged_dot_dimension_numbers"]
  (left_sum, right_sum), shared = numbers.dot_dimension_numbers
  if set(numbers.lhs_ragged_dimensions) & {*left_sum, *shared[0]}:
    return None
  return _meet(eqn, (left_sum, right_sum), shared, numbers.rhs_group_dimensions)


def _meet(
  eqn: Any,
  summed: tuple[Sequence[int], Sequence[int]],
  shared: tuple[Sequence[int], Sequence[int]],
  groups: Sequence[int] = (),
) -> Meeting:
  left, right = (v.aval.shape for v in eqn.invars[:2])
  free = (
    [d for d in range(len(left)) if d not in (*summed[0], *shared[0])],
    [d for d in range(len(right)) if d not in (*summed[1], *shared[1], *groups)],
  )
  flops = 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[d] for d in summed[0])
  return Meeting(summed, shared, free, flops)


def _convolution_meeting(eqn: Any) -> Meeting:
  """Windows of the left operand times the kernel; zeros from padding and dilation are not counted."""
  numbers, kernel = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
  (batch, channel, *space), (out, into, *_) = numbers.lhs_spec, numbers.rhs_spec
  result = eqn.outvars[0].aval.shape
  dilated = math.prod(eqn.params["lhs_dilation"])
  flops = 2 * math.prod(result) * math.prod(kernel) // max(1, kernel[out] * dilated)
  out_batch, out_channel, *out_space = numbers.out_spec
  if eqn.params["feature_group_count"] > 1:  # each group of channels has its own kernels
    places = (out_batch, out_channel, *out_space)
    return Meeting(((), ()), ((), ()), ((batch, channel, *space), ()), flops, places)
  free = ((batch, *space), (out,))
  return Meeting(((channel,), (into,)), ((), ()), free, flops, (out_batch, *out_space, out_channel))


_MEETINGS: Mapping[str, Callable[[Any], Meeting | None]] = {
  "dot_general": _dot_meeting,
  "conv_general_dilated": _convolution_meeting,
  "ragged_dot_general": _ragged_meeting,
}


class _Used:
  """Hands out axes to the dims of one array, each axis once."""

  def __init__(self) -> None:
    self.names: set[str] = set()

  def take(self, *options: DimAxes) -> DimAxes:
    for option in options:
      free = tuple(axis for axis in option if axis not in self.names)
      if free:
        self.names.update(free)
        return free
    return ()


def result_axes(eqn: Any, shape: tuple[int, ...], inputs: list[Flow]) -> Axes:
  """Axes of an operation's result: by its dim mapping where it has one, else by equal sizes."""
  name, used = eqn.primitive.name, _Used()
  if name == "gather":
    return _gather(eqn, len(shape), *inputs[:2])
  if name.startswith("scatter"):
    return _scatter(eqn, *inputs[:3])
  if inputs and (origins := sources(eqn)) is not None:
    return tuple(used.take(inputs[0].axes[dim]) if dim is not None else () for dim in origins)
  ranked = sorted(
    (pair for pair in zip(eqn.invars, inputs, strict=True) if pair[1].names),
    key=lambda pair: not pair[1].data,
  )
  same_rank = [flow for var, flow in ranked if len(var.aval.shape) == len(shape)]
  if same_rank:
    return tuple(used.take(*(flow.axes[d] for flow in same_rank)) for d in range(len(shape)))
  result: list[DimAxes] = [()] * len(shape)
  for var, flow in ranked:
    _match_sizes(var.aval.shape, flow, shape, result, used)
  return tuple(result)


def _gather(eqn: Any, rank: int, table: Flow, indices: Flow) -> Axes:
  """A look-up: the dims of the indices, and the dims of the table that are not indexed."""
  numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
  dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
  window = [d for d in range(len(sizes)) if d not in dropped]
  source = dict(zip(numbers.offset_dims, window, strict=True))
  shared = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
  used = _Used()
  result: list[DimAxes] = [()] * rank
  for dim, d in enumerate(d for d in range(rank) if d not in source):
    options = (indices.axes[dim], table.axes[shared[dim]]) if dim in shared else (indices.axes[dim],)
    result[d] = used.take(*options)
  for d, dim in source.items():
    if sizes[dim] == eqn.invars[0].aval.shape[dim]:
      result[d] = used.take(table.axes[dim])
  return tuple(result)


def _scatter(eqn: Any, table: Flow, _: Flow, updates: Flow) -> Axes:
  """The dims of the table, and equally long dims of the updates that are not indexed."""
  numbers = eqn.params["dimension_numbers"]
  before, rows = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
  dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
  window = [d for d in range(len(before)) if d not in dropped]
  source = dict(zip(window, numbers.update_window_dims, strict=True))
  looked_up = [d for d in range(len(rows)) if d not in numbers.update_window_dims]
  shared = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
  source |= {d: looked_up[dim] for d, dim in shared}
  used = _Used()
  return tuple(
    used.take(axes, updates.axes[source[d]] if before[d] == rows[source[d]] else ())
    if d in source
    else used.take(axes)
    for d, axes in enumerate(table.axes)
  )


def _match_sizes(
  before: tuple[int, ...], flow: Flow, shape: tuple[int, ...], result: list[DimAxes], used: _Used
) -> None:
  """Reshapes and gathers: a dim keeps its axes where the running product of sizes is equal, or the size."""
  starts = {math.prod(shape[:d]): d for d in reversed(range(len(shape))) if shape[d] > 1}
  for d, axes in enumerate(flow.axes):
    if not axes:
      continue
    at = starts.get(math.prod(before[:d]))
    if at is None or result[at]:
      at = next((e for e, n in enumerate(shape) if n == before[d] and not result[e]), None)
    if at is not None and not result[at]:
      result[at] = used.take(axes)


def shard_map_axes(spec: Sequence[Any], before: Axes, manual: frozenset[str]) -> Axes:
  """The axes of an array inside or outside a `shard_map`: those of its spec, then the automatic ones."""
  dims = axes_by_dim(spec, len(before))
  return tuple((*dim, *without(own, manual)) for dim, own in zip(dims, before, strict=True))


def constraint(eqn: Any, before: Axes) -> Axes:
  """The axes of a sharding constraint; an unconstrained dim keeps its axes."""
  spec: Sequence[Any] = getattr(eqn.params["sharding"], "spec", ())
  free = [n < len(spec) and spec[n] is PartitionSpec.UNCONSTRAINED for n in range(len(before))]
  asked = axes_by_dim(spec, len(before))
  return tuple(own if left else axes for left, own, axes in zip(free, before, asked, strict=True))


def sources(eqn: Any) -> list[int | None] | None:
  """The dim of the first input for each dim of the result (None if new), where an operation maps dims."""
  name, params = eqn.primitive.name, eqn.params
  if name == "transpose":
    return list(params["permutation"])
  if name == "broadcast_in_dim":
    new = {target: dim for dim, target in enumerate(params["broadcast_dimensions"])}
    return [new.get(dim) for dim in range(len(params["shape"]))]
  if name == "stack":
    dims: list[int | None] = list(range(len(eqn.invars[0].aval.shape)))
    dims.insert(params["axis"], None)
    return dims
  if name == "unstack":
    return [dim for dim in range(len(eqn.invars[0].aval.shape)) if dim != params["axis"]]
  if name in _REDUCTIONS or name == "squeeze":
    gone = params["dimensions" if name == "squeeze" else "axes"]
    return [dim for dim in range(len(eqn.invars[0].aval.shape)) if dim not in gone]
  return None
