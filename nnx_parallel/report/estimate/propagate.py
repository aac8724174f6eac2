"""Follows mesh axes through the trace of a loss, without a compiler and without axis sizes.

The trace gives shapes; parameters and batch have axes; `core.flow` has the rule of each operation. Axis sizes
are used only when the result is evaluated, so one trace serves every factorisation of a mesh.

It counts matrix products, convolutions, and kernels (Pallas) that state their cost. All branches of a
conditional count. A loop of unknown length counts once. Other compute, and collectives that a program calls
under `shard_map`, are not counted: `Propagation.uncounted` lists them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from nnx_parallel.core.dims import ELEMENTWISE, IDENTITIES, MOVES
from nnx_parallel.core.flow import (
  Flow,
  Meeting,
  Met,
  constraint,
  flow_facts,
  meeting,
  result_axes,
  shard_map_axes,
  unsplit,
)
from nnx_parallel.core.interpret import DEFAULT, Inner, read, through, values_of, walk, wiring
from nnx_parallel.core.jaxprs import CALLS, called, is_checkpoint, nbytes, opened
from nnx_parallel.core.types import JaxprEqn, Program, Var
from nnx_parallel.report.chips import ENDLESS, traced_arithmetic

# Operations outside `jax.lax` without arithmetic worth counting.
_LIGHT = MOVES | IDENTITIES | {
  "custom_lin", "debug_callback", "debug_print", "random_bits", "random_clone", "random_fold_in",
  "random_seed", "random_split", "random_unwrap", "random_wrap", "threefry2x32",
}  # fmt: skip
_HEAVY = frozenset(("custom_linear_solve", "fft", "linear_solve"))
# Collectives that the user writes under `shard_map`: their traffic is not counted.
_COLLECTIVES = frozenset((
  "all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "psum_scatter", "ragged_all_to_all",
  "reduce_scatter",
))  # fmt: skip
_FUSED = ELEMENTWISE - {"name", "reduce_precision"} | {"broadcast_in_dim", "iota", "reshape", "squeeze"}
"""The argument of `checkpoint_name` may be kept, and the result of `reduce_precision` is stored as it is."""
_FLOWS = flow_facts(lambda eqn, _: DEFAULT)

Split = frozenset[str]
Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Sharded:
  """Bytes that a set of axes divides."""

  bytes: int
  split: Split

  def per_device(self, sizes: Sizes) -> float:
    """Bytes on each device of a mesh."""
    return self.bytes / math.prod(sizes.get(axis, 1) for axis in self.split)

  def gathered(self, axes: Iterable[str]) -> Sharded:
    """The same bytes, replicated over some axes."""
    return Sharded(self.bytes, self.split.difference(axes))


@dataclasses.dataclass(frozen=True)
class LayoutChange:
  """An array of the batch that changes its layout, forward and (the other way) backward.

  Attributes:
    axes: the exchanged axes.
    part: the array, per run, and the axes that divide it while it is sent: before an exchange of dims, after
      a gather.
    times: the number of runs.
  """

  axes: Split
  part: Sharded
  times: int


@dataclasses.dataclass(frozen=True)
class Product:
  """One matrix product or convolution, or a kernel that states its cost.

  Attributes:
    arithmetic: type and precision, as `Chip.peak` takes them.
    flops: the FLOPs of the full product, once per run.
    times: the number of runs.
    split: axes that divide the work.
    summed: axes over which partial results are added up.
    out: the result, per run.
    source: the identity of the data operand, so that products of one input are recognised.
    data: the data operand as it is multiplied, per run.
    spread: axes of the other operand's free dims that the data operand does not have: its gradient is summed
      over them. If the data is split over them (sequence parallelism), a gather before and a scatter of the
      gradient send as much as this sum.
    other: the other operand at its source; nothing for a kernel.
    weighs: whether the other operand is made of parameters only.
    shared: axes of dims that both operands have and the result keeps, such as the dim of experts.
    tokens: axes of the data operand's free dims: the gradient of a parameter is summed over them.
    gathers: operands, gathered over the axes that the product does not use.
  """

  arithmetic: str
  flops: int
  times: int
  split: Split
  summed: Split
  out: Sharded
  source: int
  data: Sharded
  spread: Split
  other: Sharded = Sharded(0, frozenset())
  weighs: bool = False
  shared: Split = frozenset()
  tokens: Split = frozenset()
  gathers: tuple[LayoutChange, ...] = ()


class Propagation:
  """One pass over a jaxpr.

  Attributes:
    products: matrix products in order.
    kept: parts under `jax.checkpoint`, the flows of their inputs, and their runs.
    largest: axes -> bytes of the largest array that depends on the batch, per run; without elementwise
      results, which compilers fuse into their readers.
    flows: the flow of every variable of the outermost trace.
    moves: arrays that change their layout.
    hops: activations that go to the next stage of a pipeline, or come from it.
    reordered: weights that move to their stages, with one run for each move of them or of their gradients.
    copied: weights that each stage has a copy of: the sum of their gradients.
    read: parameter -> bytes per element of the widest type in which it is used; see `Flow.parameter`.
    uncounted: operation -> runs, of operations that compute and are not in `products`.
  """

  def __init__(
    self,
    saves: Callable[..., bool] | None = None,
    batch_axes: Sequence[str] = (),
    stage: str | None = None,
  ) -> None:
    """Leaves out products whose results a policy of `jax.checkpoint` saves.

    `stage` is the axis of stages in the trace of a pipeline (`layers/pipeline.py`).
    """
    self._saves, self._batch, self._stage = saves, frozenset(batch_axes), stage
    self.products: list[Product] = []
    self.kept: list[tuple[JaxprEqn, list[Flow], int]] = []
    self.largest: dict[frozenset[str], int] = {}
    self.moves: list[LayoutChange] = []
    self.hops: list[LayoutChange] = []
    self.reordered: list[LayoutChange] = []
    self.copied: list[Sharded] = []
    self.flows: dict[Var, Flow] = {}
    self.read: dict[int, int] = {}
    self.uncounted: dict[str, int] = {}
    self._manual: Mapping[str, int] = {}  # mesh axes over which shapes are per device

  def run(self, jaxpr: Program, inputs: Sequence[Flow], times: int = 1) -> list[Flow]:
    """Propagates through a jaxpr that runs `times` times."""

    def step(eqn: JaxprEqn, inputs: list[Flow]) -> list[Flow]:
      results = self._step(eqn, inputs, times)
      if not is_fused(eqn):
        for var, flow in zip(eqn.outvars, results, strict=True):
          if flow.data:
            size = self._part(flow.names, var).bytes
            self.largest[flow.names] = max(size, self.largest.get(flow.names, 0))
      return results

    flows = values_of(jaxpr, inputs, unsplit)
    walk(opened(jaxpr).eqns, flows, step, unsplit)
    self.flows = flows  # the outermost trace is done last
    return [read(var, flows, unsplit) for var in opened(jaxpr).outvars]

  def _step(self, eqn: JaxprEqn, inputs: list[Flow], times: int) -> list[Flow]:
    name = eqn.primitive.name
    if name == "shard_map":
      return self._shard_map(eqn, inputs, times)
    if wiring(eqn).inner:
      return self._inside(eqn, inputs, times)
    if name == "optimization_barrier":
      return inputs
    if name == "sharding_constraint":
      return [self._constrain(eqn, inputs[0], times)]
    if name == "ppermute" and self._stage is not None and self._stage in eqn.params["axis_name"]:
      self.hops.append(
        LayoutChange(frozenset((self._stage,)), self._part(inputs[0].names, eqn.invars[0]), times)
      )
      return inputs
    data, weight = any(f.data for f in inputs), any(f.weight for f in inputs)
    own = inputs[0].parameter if name in MOVES else None
    if own is None:
      self._read(eqn, inputs)
    found = meeting(eqn)
    if found is not None:
      return [self._dot(eqn, inputs, times, found)]
    flows = [Flow(axes, data, weight, own) for axes in result_axes(eqn, inputs)]
    if _is_heavy(name):
      self._kernel(eqn, inputs, flows, times)
    return flows

  def _inside(self, eqn: JaxprEqn, inputs: list[Flow], times: int) -> list[Flow]:
    """An operation that runs programs: counted once the carries of its loops are known."""
    changes, arriving = bool(wiring(eqn).carried), dict[Inner, list[Flow]]()
    if is_checkpoint(eqn):
      self.kept.append((eqn, inputs, times))
    times *= eqn.params.get("length", 1)

    def inside(inner: Inner, inputs: list[Flow]) -> list[Flow]:
      arriving[inner] = inputs
      counter = Propagation(batch_axes=tuple(self._batch), stage=self._stage) if changes else self
      return counter.run(inner.program, inputs, times)

    results, before = through(eqn, inputs, inside, _FLOWS), (len(self.products), dict(self.uncounted))
    if changes:
      for inner, flows in arriving.items():
        self.run(inner.program, flows, times)
    if eqn.primitive.name == "while" and (len(self.products), self.uncounted) != before:
      self._miss(ENDLESS, times)
    return results

  def _read(self, eqn: JaxprEqn, inputs: Sequence[Flow]) -> None:
    for var, flow in zip(eqn.invars, inputs, strict=True):
      if flow.parameter is not None:
        size = var.aval.dtype.itemsize
        self.read[flow.parameter] = max(size, self.read.get(flow.parameter, 0))

  def _miss(self, what: str, times: int) -> None:
    self.uncounted[what] = self.uncounted.get(what, 0) + times

  def _kernel(self, eqn: JaxprEqn, inputs: Sequence[Flow], flows: Sequence[Flow], times: int) -> None:
    """An operation without a jaxpr: counted by its own cost estimate, or listed as uncounted."""
    estimate: Any = eqn.params.get("cost_estimate")
    if not getattr(estimate, "flops", 0):
      self._miss(eqn.primitive.name, times)
      return
    first = max(range(len(inputs)), key=lambda n: (inputs[n].data, nbytes(eqn.invars[n].aval)))
    split = flows[0].names
    self.products.append(
      Product(
        arithmetic=traced_arithmetic([eqn.invars[first].aval]),
        flops=int(estimate.flops) * self._shards(split),
        times=times,
        split=split,
        summed=frozenset(),
        out=self._part(split, *eqn.outvars),
        source=inputs[first].value,
        data=self._part(inputs[first].names, *eqn.invars),
        spread=frozenset(),
      )
    )

  def _part(self, split: Split, *variables: Var) -> Sharded:
    return Sharded(sum(nbytes(v.aval) for v in variables) * self._shards(split), split)

  def _shards(self, names: frozenset[str]) -> int:
    """The factor from the sizes of one device to the global sizes; 1 outside `shard_map`."""
    return math.prod(self._manual.get(axis, 1) for axis in names)

  def _shard_map(self, eqn: JaxprEqn, inputs: list[Flow], times: int) -> list[Flow]:
    manual, sizes = frozenset(eqn.params["newly_manual_axes"]), eqn.params["mesh"].shape

    def laid(flow: Flow, spec: Sequence[Any]) -> Flow:
      return Flow(shard_map_axes(spec, flow.axes, manual), flow.data, flow.weight, flow.parameter)

    before = self._manual
    self._manual = {**before, **{axis: sizes[axis] for axis in manual}}
    inside = [laid(flow, spec) for flow, spec in zip(inputs, eqn.params["in_specs"], strict=True)]
    out = self.run(eqn.params["jaxpr"], inside, times)
    self._manual = before
    return [laid(flow, spec) for flow, spec in zip(out, eqn.params["out_specs"], strict=True)]

  def _dot(self, eqn: JaxprEqn, inputs: list[Flow], times: int, found: Meeting) -> Flow:
    left, right = inputs[:2]
    met = found.meet(left, right, self._batch)
    out = Flow(met.axes, left.data or right.data, left.weight or right.weight)
    operands = list(zip(eqn.invars[:2], (left, right), strict=True))
    for (var, flow), dims in zip(operands, found.shared, strict=True):
      if flow.data:
        own = {axis for d in dims for axis in flow.axes[d]}
        self._exchange(var, flow.names, met.shared - own, times)
    if self._saves and self._saves(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params):
      return out
    (main_var, main), (other_var, other) = operands if met.main_is_left else operands[::-1]
    summed = {axis for a, b in zip(*found.summed, strict=True) for axis in (*left.axes[a], *right.axes[b])}
    both = (left.names & right.names & summed) - out.names
    gathered = main.names - met.wanted
    weighs = other.weight and not other.data
    self.products.append(
      Product(
        arithmetic=traced_arithmetic([v.aval for v in eqn.invars[:2]], eqn.params["precision"]),
        flops=found.flops * self._shards(out.names | both),
        times=times,
        split=out.names | both,
        # Under `shard_map` the user's program sums.
        summed=both - self._manual.keys(),
        out=self._part(out.names, eqn.outvars[0]),
        source=main.value,
        data=self._part(gathered, main_var),
        spread=frozenset() if other.data else frozenset(itertools.chain(*met.other)) - gathered,
        other=self._part(other.names, other_var),
        weighs=weighs,
        shared=met.shared if weighs else frozenset(),
        tokens=frozenset(itertools.chain(*met.main)),
        gathers=tuple(self._gathers(eqn, inputs, found, met, times)),
      )
    )
    return out

  def _gathers(
    self, eqn: JaxprEqn, inputs: list[Flow], found: Meeting, met: Met, times: int
  ) -> Iterator[LayoutChange]:
    """The operands that are gathered: over axes of free dims that the result lacks, or of one sum."""
    kept = [frozenset(itertools.chain(*dims)) for dims in (met.main, met.other)]
    for side, (var, flow) in enumerate(zip(eqn.invars[:2], inputs[:2], strict=True)):
      other = inputs[1 - side]
      lost = {axis for d in found.free[side] for axis in flow.axes[d]} - kept[side != (not met.main_is_left)]
      for own, across in zip(found.summed[side], found.summed[1 - side], strict=True):
        lost |= {*flow.axes[own]} - {*other.axes[across]}
      if lost:
        yield LayoutChange(frozenset(lost), self._part(flow.names - lost, var), times)

  def _constrain(self, eqn: JaxprEqn, flow: Flow, times: int) -> Flow:
    """A sharding constraint; an axis that moves to another dim is an all-to-all."""
    out, axes = eqn.outvars[0], constraint(eqn, flow.axes)
    if flow.data:
      moved = {a for before, after in zip(flow.axes, axes, strict=True) for a in after if a not in before}
      self._exchange(out, flow.names, frozenset(moved), times)
    elif flow.weight and self._stage is not None:
      self._to_stages(self._stage, out, flow, axes, times)
    return Flow(axes, flow.data, flow.weight, flow.parameter)

  def _to_stages(self, stage: str, var: Var, flow: Flow, axes: Sequence[Sequence[str]], times: int) -> None:
    """Weights of a pipeline that are split over its stages from here on, and were not, or along another dim.

    A copy for each stage has the stages on dim 0; layers have them on dim 1.
    """
    arrives = [stage in now and stage not in old for now, old in zip(axes, flow.axes, strict=True)]
    if not any(arrives):
      return
    here = self._part(flow.names, var)
    if arrives[0]:
      self.copied.append(Sharded(here.bytes // var.aval.shape[0], flow.names))
    else:
      # If replicated on each stage, only the gradients move: an all-gather. In another order, both move.
      both = 2 if stage in flow.names else 1
      self.reordered.append(LayoutChange(frozenset((stage,)), here, both * times))

  def _exchange(self, var: Var, split: Split, arriving: Split, times: int) -> None:
    """An array that is split over some of the `arriving` axes along another dim: an all-to-all."""
    if split & arriving:
      self.moves.append(LayoutChange(split & arriving, self._part(split, var), times))


def is_fused(eqn: JaxprEqn) -> bool:
  """Whether an operation is elementwise, or a function of such operations only (`jnp.where`)."""
  name = eqn.primitive.name
  if name in CALLS:
    return all(is_fused(inner) for inner in opened(called(eqn)).eqns)
  return name in _FUSED


def _is_heavy(name: str) -> bool:
  """Whether an operation may compute much: all that are not in `jax.lax`, except products and `_LIGHT`."""
  if name.removesuffix("_invariant") in _COLLECTIVES:
    return True
  return name in _HEAVY or not (name in _LIGHT or hasattr(jax.lax, f"{name}_p"))
