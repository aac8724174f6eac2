"""The bytes and FLOPs of one step, over mesh axes whose sizes are not chosen yet."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.extend import core
from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import axes_by_dim, axes_in
from nnx_parallel.core.flow import Flow
from nnx_parallel.core.jaxprs import as_function, nbytes, opened, scan_counts
from nnx_parallel.core.mesh import abstract_mesh, axis_sizes
from nnx_parallel.errors import ReportError
from nnx_parallel.layers.layers import (
  LayerOptions,
  LayersUsed,
  Policy,
  has_layers,
  with_layers,
  with_marks,
  with_stages,
)
from nnx_parallel.layers.pipeline import Pipeline, Schedule
from nnx_parallel.layout import optimizer_layout
from nnx_parallel.layout.constrain import scoped
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.plan import Plan
from nnx_parallel.layout.resolve import shard_counts
from nnx_parallel.report.estimate.fusion import stored
from nnx_parallel.report.estimate.propagate import (
  LayoutChange,
  Product,
  Propagation,
  RematRegion,
  Sharded,
  Sizes,
  Split,
)
from nnx_parallel.train.gradients import check_divides
from nnx_parallel.train.options import Gradients, is_scattered


@dataclasses.dataclass(frozen=True)
class StateGroup:
  """Arrays of the state of one shape and layout, with what decides how a ZeRO stage splits them.

  Attributes:
    shape: global shape of one of them, in elements.
    spec: its layout in the plan.
    part: all of them; `with_zero` splits it further than `spec`.
    spreads: whether a stage may split them: the state of a parameter, and parameters that have state of
      their own shape.
    masters: whether they are float32 copies of parameters in a smaller type; see `with_masters`.
    on_host: whether the plan keeps them in the host's memory.
  """

  shape: tuple[int, ...]
  spec: PartitionSpec
  part: Sharded
  spreads: bool
  masters: bool = False
  on_host: bool = False


@dataclasses.dataclass(frozen=True)
class Trained:
  """Trained parameters of one shape and layout, and their gradients.

  Attributes:
    leaf: the parameters.
    read: their bytes in the type in which the loss uses them, which is that of a microbatch's gradients.
    summed: bytes of the gradients' sum over microbatches, which is in float32 at least.
    further: axes over which the stage splits their update beside the axes that split them.
  """

  leaf: StateGroup
  read: int
  summed: int
  further: Split = frozenset()


@dataclasses.dataclass(frozen=True)
class StagedWork:
  """What the layers of a step do as a pipeline, besides what its trace computes.

  Attributes:
    schedule: when which stage computes what; with the microbatches of the step.
    useful: matrix products of the forward pass without the pipeline: no bubbles.
    hops: activations that go to the next stage.
    reordered: weights that go to their stages, or whose gradients come from there, once in a step.
    copied: weights outside of the layers: each stage sums its own gradients.
  """

  schedule: Schedule
  useful: tuple[Product, ...]
  hops: tuple[LayoutChange, ...]
  reordered: tuple[LayoutChange, ...]
  copied: tuple[Sharded, ...]

  @property
  def rounds(self) -> float:
    """How often a stage reads all of its layers in one pass: once for each tick and repeat."""
    return self.schedule.ticks / self.schedule.virtual_stages


@dataclasses.dataclass(frozen=True)
class Workload:
  """One step of a model on a batch, for any sizes of the mesh axes.

  Attributes:
    parameters: trained and frozen parameters.
    used: the same in the type in which they are gathered: their own, or the one in which they are used where
      that is narrower.
    trained: those that get a gradient.
    other: the model's other state.
    optimizer: the optimizer's state.
    batch: the inputs.
    batch_axes: axes that split the batch.
    gather_axes: those of `batch_axes` over which parameters are gathered before use; the others hold
      different experts.
    token_axes: axes over which gradients of parameters are summed: those of the batch, and one that splits
      sequences.
    kept: arrays that scanned layers keep for the backward pass and that scale with the batch.
    kept_outside: the same, outside scans.
    kept_weights: such arrays that depend on parameters only (casts).
    layer: arrays of the largest rematerialised layer while it is differentiated.
    layer_weights: the parameters of one scanned layer, in the type in which they are used.
    casts: scanned parameters in the type in which they are multiplied, where that is narrower than theirs.
    narrowed: what gradients of scanned parameters take less until the update, where the model casts the
      parameters of all layers before it scans them; nothing where they are scattered.
    largest: the largest array computed from the batch, for each way of splitting.
    moves: arrays of the batch that change their layout.
    constrained: (size, axes) of dims of activations that have sharding constraints.
    products: matrix products of the forward pass.
    recomputed: matrix products that rematerialisation runs again.
    uncounted: operation -> runs, of operations that compute and are not among the products.
    stage: ZeRO stage; see `with_zero`.
    scattered: whether gradients are held split as their update is.
    offload: whether the state of parameters is in host memory, also where the plan keeps it on the device.
    staged: what a pipeline over its layers does, whose trace this is; None without one.
  """

  parameters: tuple[Sharded, ...]
  used: tuple[Sharded, ...]
  trained: tuple[Trained, ...]
  other: tuple[Sharded, ...]
  optimizer: tuple[StateGroup, ...]
  batch: tuple[Sharded, ...]
  batch_axes: tuple[str, ...]
  gather_axes: tuple[str, ...]
  token_axes: tuple[str, ...]
  kept: tuple[Sharded, ...]
  kept_outside: tuple[Sharded, ...]
  kept_weights: tuple[Sharded, ...]
  layer: tuple[Sharded, ...]
  layer_weights: tuple[Sharded, ...]
  casts: tuple[Sharded, ...]
  narrowed: tuple[Sharded, ...]
  largest: tuple[Sharded, ...]
  moves: tuple[LayoutChange, ...]
  constrained: frozenset[tuple[int, tuple[str, ...]]]
  products: tuple[Product, ...]
  recomputed: tuple[Product, ...]
  uncounted: Mapping[str, int]
  stage: int
  scattered: bool
  offload: bool
  staged: StagedWork | None = None

  @functools.cached_property
  def gradients(self) -> tuple[Sharded, ...]:
    """The gradients of one batch or microbatch, in the types of their parameters."""
    return _merge(Sharded(t.leaf.part.bytes, self._held(t)) for t in self.trained)

  @functools.cached_property
  def sums(self) -> tuple[Sharded, ...]:
    """The sums of gradients over microbatches."""
    return _merge(Sharded(t.summed, self._held(t)) for t in self.trained)

  @functools.cached_property
  def reduced(self) -> Mapping[tuple[Split, Split], tuple[int, int, int]]:
    """(axes of parameters, further axes of their update) -> bytes stored, read and summed."""
    found: dict[tuple[Split, Split], tuple[int, int, int]] = {}
    for t in self.trained:
      key = (t.leaf.part.split, t.further)
      stored, read, summed = found.get(key, (0, 0, 0))
      found[key] = (stored + t.leaf.part.bytes, read + t.read, summed + t.summed)
    return found

  def _held(self, trained: Trained) -> Split:
    return trained.leaf.part.split | (trained.further if self.scattered else frozenset())

  def host_state(self) -> tuple[Sharded, ...]:
    """The optimizer's state in the host's memory."""
    return tuple(group.part for group in self.optimizer if self._on_host(group))

  def device_state(self, *, masters: bool = False) -> tuple[Sharded, ...]:
    """The optimizer's state in device memory: the float32 masters, or everything else."""
    groups = [group for group in self.optimizer if group.masters == masters]
    return tuple(group.part for group in groups if not self._on_host(group))

  def _on_host(self, group: StateGroup) -> bool:
    # Scalars are not worth a transfer, and stay on the device.
    return group.on_host or (self.offload and group.spreads and bool(group.shape))


def with_zero(work: Workload, sizes: Sizes, stage: int) -> Workload:
  """The same step with the optimizer's state split over the batch axes too, as `plan(..., zero=stage)` does.

  An array is split only where one of its dims divides; `work` itself is returned where nothing is. Stage 3,
  which splits the parameters too, is an axis of the rules (`fsdp`), not a stage here.
  Source: ZeRO, arXiv:1910.02054.
  """
  spread = functools.partial(_spread, axes=work.batch_axes, sizes=sizes)
  optimizer = tuple(dataclasses.replace(group, part=spread(group)) for group in work.optimizer)
  if not stage or optimizer == work.optimizer:
    return work
  return dataclasses.replace(
    work,
    stage=stage,
    optimizer=optimizer,
    scattered=stage == 2,
    narrowed=() if stage == 2 else work.narrowed,
    trained=tuple(
      dataclasses.replace(t, further=spread(t.leaf).split - t.leaf.part.split) for t in work.trained
    ),
  )


def with_offload(work: Workload) -> Workload:
  """The same step with the state of parameters in the host's memory, as `plan(optimizer_memory=...)` does.

  It comes after `with_zero`: what a stage splits further is also less to fetch. `work` itself is returned
  where there is no such state.
  """
  moved = dataclasses.replace(work, offload=True)
  return moved if len(moved.host_state()) > len(work.host_state()) else work


def _spread(group: StateGroup, axes: tuple[str, ...], sizes: Sizes) -> Sharded:
  if not group.spreads:
    return group.part
  spec, _ = optimizer_layout.add_zero_axes(group.spec, group.shape, axes, sizes)
  return Sharded(group.part.bytes, frozenset(axes_in(spec)))


def per_device(parts: Iterable[Sharded], sizes: Sizes) -> float:
  """Sum of bytes on each device."""
  return sum(part.per_device(sizes) for part in parts)


def trace_workload(
  plan: Plan,
  loss: Callable[[Any, Any], Any],
  batch: Any,
  *,
  remat: Policy = "as written",
  layers: str | None = None,
  gradients: Gradients | None = None,
  pipeline: Pipeline | None = None,
  microbatches: int = 1,
) -> Workload:
  """Traces a loss abstractly and lists what its step holds, multiplies and sends.

  The arguments are those of `memory_plan`; the sizes of the plan's axes are not used, but for that of the
  stages of a pipeline, which takes all microbatches at once. The loss is traced with
  the plan's rules in scope, so that `constrain` means here what it means in training.

  Raises:
    TrainError: no such remat policy, no layer for it, or gradients that cannot be scattered.
    ReportError: a step in place of its loss function.
  """
  if hasattr(loss, "options"):
    raise ReportError(
      f"an estimate reads the loss function, and got a {type(loss).__name__}.",
      fix="memory_plan(plan, loss_fn, batch), with what train_step(loss_fn) was made from.",
    )
  batch = batch_structs(batch)
  changed = with_layers(loss, remat=remat, layers=layers) if pipeline is None else loss
  options = None if pipeline is None else LayerOptions(remat, pattern=layers, pipeline=pipeline)
  if options is not None:
    check_divides(batch, microbatches)
  traces = _Traces(plan, changed, batch, options, microbatches)
  batch_axes = plan.batch_axes
  forward, flows = traces.loss(), traces.flows
  seen = Propagation(batch_axes=batch_axes, stage=pipeline.axis if pipeline is not None else None)
  seen.run(forward, flows)
  read = [seen.read.get(n) or leaf.dtype.itemsize or 1 for n, leaf in enumerate(traces.leaves)]
  kept = _residuals(traces.backward(), flows, batch_axes)
  again = [_layer(item, batch_axes) for item in seen.kept]
  scanned = _scanned(forward, flows, read, trained=len(traces.trained_paths))
  layer = max((parts for parts, _ in again), key=lambda p: sum(x.bytes for x in p), default=())
  model = [leaf for leaf in plan.leaves if leaf.root == "model"]
  owners = [(leaf, leaf.parameter) for leaf in plan.leaves if leaf.root == "optimizer"]
  own_shape = {p: leaf for leaf, p in owners if p and leaf.shape == plan.of("model")[p].shape}
  trained = _trained(
    (plan.of("model")[path], own_shape.get(path), size)
    for path, size in zip(traces.trained_paths, read, strict=False)
  )
  further = any(t.further for t in trained)
  scattered = is_scattered(gradients, plan.zero, further=further)
  weighted = [product for product in seen.products if product.weighs]
  shared = frozenset[str]().union(*(product.shared for product in weighted))
  tokens = frozenset(batch_axes).union(*(product.tokens for product in weighted))
  return Workload(
    parameters=parameter_parts(plan),
    used=_merge(
      Sharded(_resized(leaf, min(size, leaf.dtype.itemsize)), _part(leaf).split)
      for leaf, size in zip(traces.leaves, read, strict=True)
      if leaf.is_parameter
    ),
    trained=trained,
    other=_merge(_part(leaf) for leaf in model if not leaf.is_parameter),
    optimizer=_grouped((leaf, path is not None) for leaf, path in owners),
    batch=_merge(Sharded(nbytes(x), f.names) for x, f in zip(traces.inputs, traces.batch_flows, strict=True)),
    batch_axes=batch_axes,
    gather_axes=tuple(axis for axis in batch_axes if axis not in shared),
    token_axes=tuple(axis for axis in axis_sizes(plan.mesh) if axis in tokens),
    kept=kept.scanned,
    kept_outside=kept.outside,
    kept_weights=kept.weights,
    layer=layer,
    layer_weights=max((x.once for x in scanned), key=lambda p: sum(x.bytes for x in p), default=()),
    casts=_merge(part for x in scanned for part in x.casts),
    # Scattered gradients leave the scan for another layout, one layer at a time.
    narrowed=() if scattered else _merge(part for x in scanned for part in x.narrowed),
    largest=tuple(Sharded(size, split) for split, size in seen.largest.items()),
    moves=tuple(seen.moves),
    constrained=frozenset(seen.constrained),
    products=tuple(seen.products),
    recomputed=tuple(product for _, products in again for product in products),
    uncounted=dict(seen.uncounted),
    stage=(2 if scattered else 1) if further else 0,
    scattered=scattered,
    offload=False,
    staged=None if pipeline is None else _staged(traces, seen, _Traces(plan, loss, batch), pipeline.axis),
  )


def batch_structs(batch: Any) -> Any:
  """The batch as `ShapeDtypeStruct`s; Python numbers are scalars.

  Raises:
    ReportError: no array in it.
  """

  def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    array = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    return jax.ShapeDtypeStruct(
      tuple(array.shape), jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)
    )

  found = jax.tree.map(abstract, batch)
  if not any(leaf.shape for leaf in jax.tree.leaves(found)):
    raise ReportError(
      f"the batch has no array: {batch!r:.80}.",
      fix="pass arrays, or their shapes and dtypes: jax.ShapeDtypeStruct((16, 8), jnp.float32).",
    )
  return found


def check_batch(plan: Plan, batch: Any, microbatches: int = 1) -> None:
  """Refuses a batch that a step with this plan could not split: a report of it would mislead.

  Raises:
    ReportError: the shards of the batch, in each microbatch, or another dim cannot be even.
  """
  sizes = axis_sizes(plan.mesh)
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch_structs(batch)):
    counts = shard_counts(plan.batch_spec(len(leaf.shape)), len(leaf.shape), sizes)
    name, parts = f"batch{jax.tree_util.keystr(path)}", (*counts[:1], microbatches)
    each = math.prod(parts) if counts else 1
    if counts and leaf.shape[0] % each:
      rest = leaf.shape[0] % each
      also = f" in each of {microbatches} microbatches" if microbatches > 1 else ""
      raise ReportError(
        f"{name} has {leaf.shape[0]} examples, which {counts[0]} shards{also} cannot split evenly: this"
        " layout cannot run.",
        details=f"shape {leaf.shape}, mesh {sizes}",
        fix=f"a global batch of {f'{leaf.shape[0] - rest} or ' if leaf.shape[0] > rest else ''}"
        f"{leaf.shape[0] - rest + each}, or fewer shards{' or microbatches' if also else ''}.",
      )
    uneven = next((dim for dim, count in enumerate(counts) if leaf.shape[dim] % count), None)
    if uneven is not None:
      raise ReportError(
        f"{name}: dim {uneven} has length {leaf.shape[uneven]}, which {counts[uneven]} shards cannot split"
        " evenly: this layout cannot run.",
        details=f"shape {leaf.shape}, mesh {sizes}",
        fix="change the length, or the InputRules for this rank.",
      )


def _staged(traces: _Traces, seen: Propagation, plain: _Traces, axis: str) -> StagedWork:
  """What a pipeline does, by its trace and that of the loss without it."""
  assert traces.used.schedule is not None
  whole = Propagation()
  whole.run(plain.loss(), plain.flows)
  return StagedWork(
    schedule=traces.used.schedule,
    useful=tuple(dataclasses.replace(p, split=p.split | {axis}) for p in whole.products),
    hops=tuple(seen.hops),
    reordered=tuple(seen.reordered),
    copied=tuple(seen.copied),
  )


def finds_layers(plan: Plan, loss: Callable[[Any, Any], Any], batch: Any, layers: str | None = None) -> bool:
  """Whether the loss has layers that remat policies apply to; see `with_layers`."""
  return has_layers(_Traces(plan, with_marks(loss, layers), batch).loss())


def parameter_parts(plan: Plan) -> tuple[Sharded, ...]:
  """The parameters of a plan, by the axes that split them."""
  return _merge(_part(leaf) for leaf in plan.leaves if leaf.is_parameter)


class _Traces:
  """The loss as a function of flat arrays, and the axes of each."""

  def __init__(
    self,
    plan: Plan,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    options: LayerOptions | None = None,
    microbatches: int = 1,
  ):
    graphdef, state = plan.abstract["model"].graphdef, plan.abstract["model"].state
    is_trained, rows = nnx.filterlib.to_predicate(plan.wrt), plan.of("model")
    flat = sorted(nnx.to_flat_state(state), key=lambda row: not is_trained(*row))
    self.trained_paths = [path for path, leaf in flat if is_trained(path, leaf)]
    self.inputs, structure = jax.tree.flatten(batch)
    ranks = [len(x.shape) for x in self.inputs]
    self.batch_flows = [Flow(axes_by_dim(plan.batch_spec(rank), rank), True) for rank in ranks]
    self.leaves = [rows[path] for path, _ in flat]
    self.flows = [Flow(axes_by_dim(x.spec, len(x.shape)), False, True, n) for n, x in enumerate(self.leaves)]
    self.flows += self.batch_flows
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*self.leaves, *self.inputs)]
    first, last = len(self.trained_paths), len(flat)
    self._arrays = arrays[:first], arrays[first:last], arrays[last:]

    # Variables of a live module have a mesh, and a model may lay out activations by it. All axes have size
    # one here, so that each dim divides; sizes are used when the workload is evaluated.
    mesh = abstract_mesh(dict.fromkeys(axis_sizes(plan.mesh), 1))
    scope = plan.activation_rules
    if (
      options is not None
    ):  # a pipeline lays out its arrays by types on Explicit axes, which are not followed
      scope = dataclasses.replace(scope, mesh=abstract_mesh(axis_sizes(plan.mesh)))

    def live(path: Any, leaf: Any, x: Any) -> Any:
      if not isinstance(leaf, nnx.Variable):
        return x
      placed = any(rows[path].spec) or leaf.get_metadata().get("out_sharding")
      return leaf.copy(x, mesh=mesh) if placed else leaf.copy(x)

    def pure(trained: list[Any], rest: list[Any], inputs: list[Any]) -> Any:
      values = zip(flat, (*trained, *rest), strict=True)
      made = nnx.from_flat_state([(path, live(path, leaf, x)) for (path, leaf), x in values])
      with nnx.use_eager_sharding(False), scoped(scope):
        module = nnx.merge(graphdef, made)
        with contextlib.nullcontext() if options is None else options.marking(module):
          result = loss(module, jax.tree.unflatten(structure, inputs))
      return result[0] if isinstance(result, tuple) else result

    self._pure = pure
    self.used = LayersUsed()
    if options is None:
      return

    def staged(trained: list[Any], rest: list[Any], inputs: list[Any]) -> Any:
      piped = with_stages(
        lambda model, part: pure(model[0], model[1], part),
        options,
        microbatches,
        lambda _: ({}, ()),
        self.used,
      )
      with scoped(scope):
        return piped((trained, rest), inputs)

    self._pure = staged

  def loss(self) -> Any:
    return jax.make_jaxpr(self._pure)(*self._arrays)

  def backward(self) -> Any:
    def kept(trained: list[Any], rest: list[Any], inputs: list[Any]) -> Any:
      _, pullback = jax.vjp(lambda t: self._pure(t, rest, inputs), trained)
      return jax.tree.leaves(pullback)

    return jax.make_jaxpr(kept)(*self._arrays)


class _Residuals(NamedTuple):
  scanned: tuple[Sharded, ...]
  outside: tuple[Sharded, ...]
  weights: tuple[Sharded, ...]


def _residuals(traced: Any, flows: Sequence[Flow], batch_axes: Sequence[str]) -> _Residuals:
  """The residuals of a traced forward pass, without its inputs."""
  body = opened(traced)
  seen = Propagation(batch_axes=batch_axes)
  seen.run(traced, flows)
  loops = {var for eqn in body.eqns if eqn.primitive.name == "scan" for var in eqn.outvars}
  # Values without `data` and `weight` are masks and tables of positions: compilers keep one, outside loops.
  results = dict.fromkeys(var for var in body.outvars if not isinstance(var, core.Literal))
  inputs = set(body.invars)
  saved = [var for var in results if var in seen.flows and var not in inputs and not _on_host(var)]
  data = [var for var in saved if seen.flows[var].data]
  weights = [var for var in saved if seen.flows[var].weight and not seen.flows[var].data]
  rows = dict.fromkeys(var for var in data if var in loops)
  outside = [var for var in stored(body, [v for v in data if v not in loops]) if var not in rows]
  weights = [v for v in weights if v in loops] + stored(body, [v for v in weights if v not in loops])

  def parts(group: Iterable[Any]) -> tuple[Sharded, ...]:
    return _merge(Sharded(nbytes(var.aval), seen.flows[var].names) for var in group)

  return _Residuals(parts(rows), parts(outside), parts(weights))


def _on_host(var: Any) -> bool:
  """Whether a value was moved to the host's memory, as by `remat="offload"`."""
  return var.aval.memory_space is jax.memory.Space.Host


def _layer(item: RematRegion, batch_axes: Sequence[str]) -> tuple[tuple[Sharded, ...], tuple[Product, ...]]:
  """Arrays alive while one rematerialised layer is differentiated, and the products run for them."""
  arrays = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in opened(item.jaxpr).invars]

  def kept(*values: Any) -> Any:
    _, pullback = jax.vjp(as_function(item.jaxpr), *values)
    return jax.tree.leaves(pullback)

  traced = jax.make_jaxpr(kept)(*arrays)
  again = Propagation(item.saves, batch_axes)
  again.run(traced, item.inputs, item.times, live=_live(traced))
  found = _residuals(traced, item.inputs, batch_axes)
  return _merge((*found.scanned, *found.outside)), tuple(again.products)


def _live(traced: Any) -> frozenset[int]:
  """Positions of the operations whose results are needed; the compiler drops the others."""
  body = opened(traced)
  needed: set[Any] = {v for v in body.outvars if not isinstance(v, core.Literal)}
  live: set[int] = set()
  for position in reversed(range(len(body.eqns))):
    eqn = body.eqns[position]
    if needed.isdisjoint(eqn.outvars):
      continue
    live.add(position)
    needed.update(v for v in eqn.invars if not isinstance(v, core.Literal))
  return frozenset(live)


class _Scanned(NamedTuple):
  """Parameters that a scan reads.

  Attributes:
    once: those of one pass, in the type in which they are used.
    casts: all of them, as cast where they are multiplied.
    narrowed: bytes that the trained ones have more than what the scan reads of them, cast before it.
  """

  once: tuple[Sharded, ...]
  casts: tuple[Sharded, ...]
  narrowed: tuple[Sharded, ...]


def _scanned(traced: Any, flows: Sequence[Flow], read: Sequence[int], *, trained: int) -> list[_Scanned]:
  """One for each scan of the outermost level; `read` are bytes per element in which parameters are used.

  The first `trained` inputs get gradients.
  """
  body = opened(traced)
  flow = dict(zip(body.invars, flows, strict=True))
  with_gradient = set(body.invars[:trained])
  cast_from = {
    eqn.outvars[0]: eqn.invars[0] for eqn in body.eqns if eqn.primitive.name == "convert_element_type"
  }
  narrow = {var: min(size, var.aval.dtype.itemsize) for var, size in zip(body.invars, read, strict=False)}
  found: list[_Scanned] = []
  for eqn in body.eqns:
    if eqn.primitive.name != "scan":
      continue
    counts = scan_counts(eqn)
    rows = [v for v in eqn.invars[counts.constants + counts.carried :] if not isinstance(v, core.Literal)]
    pairs = [(v, cast_from.get(v, v)) for v in rows]
    pairs = [(v, own) for v, own in pairs if own in narrow]
    used = {own: nbytes(own.aval) // own.aval.dtype.itemsize * narrow[own] for _, own in pairs}
    found.append(
      _Scanned(
        once=tuple(Sharded(used[own] // eqn.params["length"], flow[own].names) for _, own in pairs),
        casts=tuple(Sharded(size, flow[own].names) for own, size in used.items() if size < nbytes(own.aval)),
        narrowed=tuple(
          Sharded(nbytes(own.aval) - nbytes(v.aval), flow[own].names)
          for v, own in pairs
          if own in with_gradient and nbytes(v.aval) < nbytes(own.aval)
        ),
      )
    )
  return found


def _part(leaf: LeafPlan) -> Sharded:
  return Sharded(leaf.bytes, frozenset(axes_in(leaf.spec)))


def _grouped(rows: Iterable[tuple[LeafPlan, bool]]) -> tuple[StateGroup, ...]:
  """One entry for leaves of one shape, layout and place, that a stage may split or not."""
  sums = Counter[tuple[Any, ...]]()
  for leaf, spreads in rows:
    masters = leaf.root == "optimizer" and "masters" in leaf.path
    sums[leaf.shape, leaf.spec, _part(leaf).split, spreads, masters, leaf.on_host] += leaf.bytes
  return tuple(
    StateGroup(shape, spec, Sharded(size, split), *rest) for (shape, spec, split, *rest), size in sums.items()
  )


def _resized(leaf: LeafPlan, itemsize: int) -> int:
  """Bytes of a leaf with elements of another size."""
  return leaf.bytes // leaf.dtype.itemsize * itemsize


def _trained(rows: Iterable[tuple[LeafPlan, LeafPlan | None, int]]) -> tuple[Trained, ...]:
  """One entry for parameters of one shape and layout.

  A row is a parameter, its optimizer state of its own shape, and the bytes per element of its use.
  """
  groups: dict[tuple[Any, ...], list[tuple[LeafPlan, int]]] = {}
  for leaf, state, size in rows:
    further = _part(state).split - _part(leaf).split if state else frozenset[str]()
    groups.setdefault((leaf.shape, leaf.spec, state is not None, further), []).append((leaf, size))
  return tuple(
    Trained(
      StateGroup(
        shape, spec, Sharded(sum(leaf.bytes for leaf, _ in group), _part(group[0][0]).split), spreads
      ),
      read=sum(_resized(leaf, size) for leaf, size in group),
      summed=sum(_resized(leaf, max(4, leaf.dtype.itemsize)) for leaf, _ in group),
      further=further,
    )
    for (shape, spec, spreads, further), group in groups.items()
  )


def _merge(parts: Iterable[Sharded]) -> tuple[Sharded, ...]:
  sums = Counter[Split]()
  for part in parts:
    sums[part.split] += part.bytes
  return tuple(Sharded(size, split) for split, size in sums.items())
