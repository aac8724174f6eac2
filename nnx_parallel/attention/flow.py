"""Propagates mesh axes through the operations of a trace: the layout that each result should have.

A dim keeps its axes, and an array uses each axis once. Two dims of a product may need the same axis: a batch
axis stays with the data (the parameter is gathered: fsdp), any other axis stays with the parameter (the data
is gathered: tensor parallelism, after a sequence-parallel part). Axis sizes do not matter. The memory plan
counts by these layouts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import axes_by_dim, without
from nnx_parallel.core.interpret import DEFAULT, Facts, wiring
from nnx_parallel.core.types import AnyArray, JaxprEqn
from nnx_parallel.infer.dims import PRODUCTS, dim_map, same_majors

DimAxes = tuple[str, ...]
Axes = tuple[DimAxes, ...]


@dataclasses.dataclass(frozen=True)
class Flow:
  """The origin of an array, and its layout."""

  axes: Axes  # mesh axes of each dim
  data: bool  # whether its values depend on the batch

  @property
  def names(self) -> frozenset[str]:
    """All axes that split the array."""
    return frozenset(axis for dim in self.axes for axis in dim)


@dataclasses.dataclass(frozen=True)
class Meeting:
  """The pairs of dims of the two operands of a product."""

  # dims of the left and of the right operand that are summed over
  summed: tuple[Sequence[int], Sequence[int]]
  shared: tuple[Sequence[int], Sequence[int]]  # dims that both have and the result keeps
  free: tuple[Sequence[int], Sequence[int]]  # dims that only one operand has
  # the dim of the result for each of the shared dims, the free dims of the left, and of the right operand.
  # None for a plain product: in this order.
  places: Sequence[int] | None = None

  def meet(self, left: Flow, right: Flow, batch: frozenset[str]) -> Axes:
    """The axes of the result; an axis on different dims of the two operands goes to one of them."""
    main_is_left = left.data or not right.data  # the other operand is a parameter, or data too
    main, other = (left, right) if main_is_left else (right, left)
    main_free, other_free = self.free if main_is_left else self.free[::-1]
    used = _Used()
    shared = [used.take(left.axes[a], right.axes[b]) for a, b in zip(*self.shared, strict=True)]
    free = frozenset[str]() if other.data else {axis for d in other_free for axis in other.axes[d]}
    kept = [used.take(without(main.axes[d], frozenset(free) - batch)) for d in main_free]
    added = [used.take(other.axes[d]) for d in other_free]
    axes: Axes = (*shared, *kept, *added) if main_is_left else (*shared, *added, *kept)
    placed = dict(zip(range(len(axes)) if self.places is None else self.places, axes, strict=True))
    return tuple(placed[d] for d in sorted(placed))


def meeting(eqn: JaxprEqn) -> Meeting | None:
  """The pairs of dims of a product; None for other operations."""
  found = dim_map(eqn) if eqn.primitive.name in PRODUCTS else None
  if found is None:
    return None
  (left, right, *_), (out,) = found.operands, found.results
  pairs = {f: (left.index(f), right.index(f)) for f in left if f is not None and f in right}
  shared = [f for f in out if f in pairs]
  free = tuple([f for f in side if f in out and f not in pairs] for side in (left, right))
  order = [out.index(f) for f in (*shared, *free[0], *free[1])]

  def places(factors: Iterable[int | None]) -> tuple[Sequence[int], Sequence[int]]:
    both = [pairs[f] for f in factors if f is not None]
    return [a for a, _ in both], [b for _, b in both]

  return Meeting(
    summed=places(sorted(pairs.keys() - {*out})),
    shared=places(shared),
    free=([left.index(f) for f in free[0]], [right.index(f) for f in free[1]]),
    places=order if found.mixed else None,
  )


class _Used:
  """Assigns axes to the dims of an array, each axis once."""

  def __init__(self) -> None:
    self.names: set[str] = set()

  def take(self, *options: DimAxes) -> DimAxes:
    for option in options:
      free = tuple(axis for axis in option if axis not in self.names)
      if free:
        self.names.update(free)
        return free
    return ()


def result_axes(eqn: JaxprEqn, inputs: list[Flow]) -> list[Axes]:
  """The axes of each result of an operation: a dim takes the axes of the same dim of an operand, data first.

  If a reshape splits dims, or an operation has no map, dims of equal place or size count as the same dim.
  """
  shapes, results = (
    [tuple(getattr(v.aval, "shape", ())) for v in side] for side in (eqn.invars, eqn.outvars)
  )
  split = sorted((n for n, flow in enumerate(inputs) if flow.names), key=lambda n: not inputs[n].data)
  found = dim_map(eqn)

  def axes(position: int, shape: tuple[int, ...]) -> Axes:
    used = _Used()
    if found is None:
      own = [tuple(range(len(x))) if len(x) == len(shape) else () for x in shapes]
      factors = tuple(range(len(shape)))
    else:
      own, factors = found.operands, found.results[position]
    if (found is not None and found.major) or not any(own[n] for n in split):
      return _match_sizes([(shapes[n], inputs[n]) for n in split], shape, used)
    sources = [
      [(inputs[n], own[n].index(f)) for n in split if f is not None and f in own[n]] for f in factors
    ]
    return tuple(used.take(*(flow.axes[dim] for flow, dim in options)) for options in sources)

  return list(itertools.starmap(axes, enumerate(results)))


def _match_sizes(
  sources: Sequence[tuple[tuple[int, ...], Flow]], shape: tuple[int, ...], used: _Used
) -> Axes:
  """Other ranks: a dim keeps its axes where the product of the sizes before it is equal, or the size."""
  result: list[DimAxes] = [()] * len(shape)
  for before, flow in sources:
    places = same_majors(before, shape)
    for d, axes in enumerate(flow.axes):
      at = places[d]
      if axes and (at is None or result[at]):
        at = next((e for e, n in enumerate(shape) if n == before[d] and not result[e]), None)
      if axes and at is not None:
        result[at] = used.take(axes)
  return tuple(result)


def shard_map_axes(spec: Sequence[Any], before: Axes, manual: frozenset[str]) -> Axes:
  """The axes of an array inside or outside a `shard_map`: first the axes of its spec, then automatic axes."""
  dims = axes_by_dim(spec, len(before))
  return tuple((*dim, *without(own, manual)) for dim, own in zip(dims, before, strict=True))


def constraint(eqn: JaxprEqn, before: Axes) -> Axes:
  """The axes of a sharding constraint; an unconstrained dim keeps its axes."""
  spec: Sequence[Any] = getattr(eqn.params["sharding"], "spec", ())
  free = [n < len(spec) and spec[n] is PartitionSpec.UNCONSTRAINED for n in range(len(before))]
  asked = axes_by_dim(spec, len(before))
  return tuple(own if left else axes for left, own, axes in zip(free, before, asked, strict=True))


def unsplit(array: AnyArray) -> Flow:
  """The flow of a number or an array that is part of the program."""
  return Flow(((),) * np.ndim(array), data=False)


def follow_flows(eqn: JaxprEqn, inputs: list[Flow], batch: frozenset[str]) -> Any:
  """The flows of the results of an operation; `DEFAULT` for one that runs programs."""
  if wiring(eqn).inner:
    return DEFAULT
  product, data = meeting(eqn), any(flow.data for flow in inputs)
  results = [product.meet(inputs[0], inputs[1], batch)] if product is not None else result_axes(eqn, inputs)
  return [Flow(axes, data) for axes in results]


def flow_facts(follow: Callable[[JaxprEqn, list[Flow]], Any]) -> Facts[Flow]:
  """How layouts propagate through operations (`follow`), loops and branches."""
  return Facts(
    constant=unsplit,
    follow=follow,
    join=_either,
    row=lambda _, flow: Flow(flow.axes[1:], flow.data),
    stack=lambda _, flow: Flow(((), *flow.axes), flow.data),
  )


def _either(one: Flow, other: Flow) -> Flow:
  """The common layout of two values: a carry that starts as zeros takes the layout of the body's result."""
  if one == other:
    return one
  return Flow(one.axes if one.names else other.axes, one.data or other.data)
