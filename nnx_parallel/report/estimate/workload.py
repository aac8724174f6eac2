"""The bytes and FLOPs of one step, over mesh axes whose sizes are not chosen yet."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from nnx_parallel.core.axes import axes_by_dim, axes_in
from nnx_parallel.core.dims import PRODUCTS
from nnx_parallel.core.flow import Flow, unsplit
from nnx_parallel.core.interpret import Facts, facts_of, is_literal
from nnx_parallel.core.jaxprs import (
  CALLS,
  as_function,
  called,
  inner_equations,
  nbytes,
  opened,
  params_of,
  scan_counts,
  without_unused,
)
from nnx_parallel.core.mesh import abstract_mesh, axis_sizes, no_mesh
from nnx_parallel.core.nodes import Path
from nnx_parallel.core.types import AnyArray, ClosedJaxpr, JaxprEqn, Leaf, LossFn, Program, PyTree, Var
from nnx_parallel.errors import ReportError
from nnx_parallel.layers.layers import (
  LayerOptions,
  LayersUsed,
  has_layers,
  with_layers,
  with_marks,
  with_stages,
)
from nnx_parallel.layers.pipeline import Pipeline, Schedule
from nnx_parallel.layers.remat import Policy
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.optimizer_layout import bytes_of_matrix, matrix_axes
from nnx_parallel.layout.plan import Plan
from nnx_parallel.layout.resolve import shard_counts
from nnx_parallel.layout.sharded_optimizer import per_matrix_states
from nnx_parallel.layout.tracing import state_paths
from nnx_parallel.report.estimate.propagate import (
  LayoutChange,
  Product,
  Propagation,
  Sharded,
  Sizes,
  Split,
  is_fused,
)
from nnx_parallel.train.axes import on_fitting_axes
from nnx_parallel.train.gradients import check_divides
from nnx_parallel.train.loss_call import call_loss
from nnx_parallel.train.options import Gradients, is_scattered
from nnx_parallel.train.update import apply


@dataclasses.dataclass(frozen=True)
class Trained:
  """Trained parameters of one layout, and their gradients.

  Attributes:
    stored: the parameters.
    read: their bytes in the type in which the loss uses them, which is also the type of a microbatch's
      gradients.
    summed: bytes of the gradients' sum over microbatches, which is in float32 or wider.
    further: additional axes over which the ZeRO stage splits their update.
  """

  stored: Sharded
  read: int
  summed: int
  further: Split = frozenset()


@dataclasses.dataclass(frozen=True)
class StagedWork:
  """The work of the layers of a step as a pipeline, in addition to the compute of its trace.

  Attributes:
    schedule: which stage computes which microbatch in which tick; with the microbatches of the step.
    saved_inputs: the number of inputs of chunks that each stage saves; the trace saves one for each tick.
    useful: matrix products of the forward pass without the pipeline: no bubbles.
    hops: activations that go to the next stage.
    reordered: weights that move to their stages, or whose gradients come from there, once per step.
    copied: weights outside of the layers: each stage sums its own gradients.
  """

  schedule: Schedule
  saved_inputs: int
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
  """One step of a model on a batch.

  Attributes:
    parameters: trained and frozen parameters.
    used: the same parameters in the type in which they are gathered: the type of their use if it is narrower,
      else their own type.
    trained: the parameters that get a gradient.
    other: the model's other state.
    optimizer: the optimizer's state in device memory, without the masters.
    masters: float32 copies of parameters in a smaller type; see `with_masters`.
    on_host: the optimizer's state in host memory; leaves of one shape and layout are merged.
    batch: the inputs.
    batch_axes: axes that split the batch.
    gather_axes: the `batch_axes` over which parameters are gathered before use; the other batch axes hold
      different experts.
    token_axes: axes over which gradients of parameters are summed: the batch axes, and an axis that splits
      sequences.
    kept: arrays that scanned layers save for the backward pass and that scale with the batch.
    kept_outside: the same, outside scans.
    kept_weights: such arrays that depend on parameters only (casts).
    layer: arrays of the largest recomputed layer while it is differentiated.
    layer_weights: the parameters of one scanned layer, in the type in which they are used.
    casts: scanned parameters in the type in which they are multiplied, if it is narrower than their own type.
    narrowed: the bytes that gradients of scanned parameters save until the update, if the model casts the
      parameters of all layers before it scans them; nothing if they are scattered.
    largest: the largest array computed from the batch, for each way of splitting.
    moves: arrays of the batch that change their layout.
    products: matrix products of the forward pass.
    recomputed: matrix products that recomputation repeats.
    update: matrix products of the optimizer.
    exchanged: groups of matrices that `per_matrix` sends to other devices, and back.
    uncounted: operation -> runs, of operations that compute and are not among the products.
    stage: ZeRO stage, 0 if it splits nothing.
    scattered: whether gradients have the layout of their update.
    staged: the work of a pipeline over its layers, whose trace this is; None without a pipeline.
  """

  parameters: tuple[Sharded, ...]
  used: tuple[Sharded, ...]
  trained: tuple[Trained, ...]
  other: tuple[Sharded, ...]
  optimizer: tuple[Sharded, ...]
  masters: tuple[Sharded, ...]
  on_host: tuple[Sharded, ...]
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
  products: tuple[Product, ...]
  recomputed: tuple[Product, ...]
  update: tuple[Product, ...]
  exchanged: tuple[Sharded, ...]
  uncounted: Mapping[str, int]
  stage: int
  scattered: bool
  staged: StagedWork | None = None

  @functools.cached_property
  def gradients(self) -> tuple[Sharded, ...]:
    """The gradients of one batch or microbatch, in the types of their parameters."""
    return _merge(Sharded(t.stored.bytes, self._held(t)) for t in self.trained)

  @functools.cached_property
  def sums(self) -> tuple[Sharded, ...]:
    """The sums of gradients over microbatches."""
    return _merge(Sharded(t.summed, self._held(t)) for t in self.trained)

  def _held(self, trained: Trained) -> Split:
    return trained.stored.split | (trained.further if self.scattered else frozenset())


def per_device(parts: Iterable[Sharded], sizes: Sizes) -> float:
  """Sum of bytes on each device."""
  return sum(part.per_device(sizes) for part in parts)


@dataclasses.dataclass(frozen=True)
class StepTrace:
  """The programs of a step; they do not depend on the sizes of mesh axes, except the axis of pipeline stages.

  Attributes:
    forward: the loss.
    backward: from the same inputs to the activations that the loss saves for the backward pass.
    update: from the parameters, their gradients and the optimizer's state to the new values; None without an
      optimizer.
    schedule: the schedule of the pipeline, if `forward` is the trace of a pipeline.
    plain: the loss without the pipeline.
    parts: recomputed part of the loss -> its own `backward`, computed on request.
  """

  forward: ClosedJaxpr
  backward: ClosedJaxpr
  update: ClosedJaxpr | None
  schedule: Schedule | None = None
  plain: Any = None
  parts: dict[int, ClosedJaxpr] = dataclasses.field(default_factory=dict[int, Any])


def trace_step(
  plan: Plan,
  loss: LossFn,
  batch: PyTree,
  *,
  remat: Policy = "as written",
  layers: str | None = None,
  pipeline: Pipeline | None = None,
  microbatches: int = 1,
) -> StepTrace:
  """Traces a step abstractly, with the plan's rules in scope; the arguments are as for `memory_plan`."""
  if hasattr(loss, "options"):
    raise ReportError(
      f"an estimate reads the loss function, but got a {type(loss).__name__}.",
      fix="memory_plan(plan, loss_fn, batch), with the loss function of the train step.",
    )
  batch = batch_structs(batch)
  used, plain, options = LayersUsed(), None, None
  if pipeline is None:
    loss = with_layers(loss, remat=remat, layers=layers)
  else:
    check_divides(batch, microbatches)
    if pipeline.order == "1f1b-split":
      raise ReportError(
        'estimates do not count what order="1f1b-split" saves for the gradients of weights.',
        fix="nxp.compile_report(step, plan, batch=batch) or `nnx-parallel compile`, which compile the step;"
        ' or order="1f1b".',
      )
    # 1F1B computes gradients in its forward pass, which an estimate does not read.
    gpipe = dataclasses.replace(pipeline, order="gpipe")
    options = LayerOptions(remat, pattern=layers, pipeline=gpipe)
    plain = jax.make_jaxpr(_flat_loss(plan, loss, batch))(*_structs(plan, batch))
  flat = _flat_loss(plan, loss, batch, options)
  if options is not None:
    flat = _with_stages(plan, flat, options, microbatches, used)
  arrays = _structs(plan, batch)

  def kept(trained: list[jax.Array], rest: list[jax.Array], inputs: list[jax.Array]) -> PyTree:
    _, pullback = jax.vjp(lambda t: flat(t, rest, inputs), trained)
    return jax.tree.leaves(pullback)

  forward, backward = jax.make_jaxpr(flat)(*arrays), jax.make_jaxpr(kept)(*arrays)
  return StepTrace(forward, backward, _trace_update(plan), used.schedule, plain)


@no_mesh()
def trace_workload(
  plan: Plan,
  loss: LossFn,
  batch: PyTree,
  *,
  remat: Policy = "as written",
  layers: str | None = None,
  gradients: Gradients | None = None,
  pipeline: str | Pipeline | None = None,
  microbatches: int = 1,
) -> Workload:
  """Traces a step, lists its arrays, products and collectives, and checks that its batch divides."""
  pipeline = Pipeline(pipeline) if isinstance(pipeline, str) else pipeline
  options: Any = {"remat": remat, "layers": layers, "pipeline": pipeline, "microbatches": microbatches}
  work = workload_of(plan, trace_step(plan, loss, batch, **options), batch, gradients, pipeline)
  check_batch(plan, batch, microbatches)
  return work


def workload_of(
  plan: Plan,
  trace: StepTrace,
  batch: PyTree,
  gradients: Gradients | None = None,
  pipeline: Pipeline | None = None,
) -> Workload:
  """The arrays, products and collectives of a traced step; a `TrainError` if it cannot scatter gradients."""
  batch_axes, inputs = plan.batch_axes, jax.tree.leaves(batch_structs(batch))
  paths, trained_count = _order(plan)
  leaves = [plan.of("model")[path] for path in paths]
  flows = [_flow(leaf, n) for n, leaf in enumerate(leaves)]
  batch_flows = [Flow(axes_by_dim(plan.batch_spec(x.ndim), x.ndim), True) for x in inputs]
  flows += batch_flows
  seen = Propagation(batch_axes=batch_axes, stage=pipeline.axis if pipeline is not None else None)
  seen.run(trace.forward, flows)
  read = [seen.read.get(n) or leaf.dtype.itemsize or 1 for n, leaf in enumerate(leaves)]
  kept, kept_outside, kept_weights = _residuals(trace.backward, flows, batch_axes)
  again = [_layer(*item, batch_axes, trace.parts) for item in seen.kept]
  layer_weights, casts, narrowed = _scanned(trace.forward, seen.flows, leaves[:trained_count], read)
  model = [leaf for leaf in plan.leaves if leaf.root == "model"]
  state = [leaf for leaf in plan.leaves if leaf.root == "optimizer"]
  near = [leaf for leaf in state if not leaf.on_host]
  trained = _trained(plan, leaves[:trained_count], read)
  further = any(t.further for t in trained)
  scattered = is_scattered(gradients, plan.zero, further=further)
  weighted = [product for product in seen.products if product.weighs]
  shared = frozenset[str]().union(*(product.shared for product in weighted))
  tokens = frozenset(batch_axes).union(*(product.tokens for product in weighted))
  return Workload(
    parameters=_merge(_part(leaf) for leaf in model if leaf.is_parameter),
    used=_merge(
      Sharded(_resized(leaf, min(size, leaf.dtype.itemsize)), _part(leaf).split)
      for leaf, size in zip(leaves, read, strict=True)
      if leaf.is_parameter
    ),
    trained=trained,
    other=_merge(_part(leaf) for leaf in model if not leaf.is_parameter),
    optimizer=_merge(_part(leaf) for leaf in near if "masters" not in leaf.path),
    masters=_merge(_part(leaf) for leaf in near if "masters" in leaf.path),
    on_host=_alike(leaf for leaf in state if leaf.on_host),
    batch=_merge(Sharded(nbytes(x), f.names) for x, f in zip(inputs, batch_flows, strict=True)),
    batch_axes=batch_axes,
    gather_axes=tuple(axis for axis in batch_axes if axis not in shared),
    token_axes=tuple(axis for axis in axis_sizes(plan.mesh) if axis in tokens),
    kept=kept,
    kept_outside=kept_outside,
    kept_weights=kept_weights,
    layer=max((parts for parts, _ in again), key=_total, default=()),
    layer_weights=layer_weights,
    casts=casts,
    # Scattered gradients leave the scan for another layout, one layer at a time.
    narrowed=() if scattered else narrowed,
    largest=tuple(Sharded(size, split) for split, size in seen.largest.items()),
    moves=tuple(seen.moves),
    products=tuple(seen.products),
    recomputed=tuple(product for _, products in again for product in products),
    update=_update_products(plan, trace.update),
    exchanged=_exchanged(plan),
    uncounted=dict(seen.uncounted),
    stage=(2 if scattered else 1) if further else 0,
    scattered=scattered,
    staged=None if pipeline is None else _staged(trace, seen, flows, pipeline),
  )


def finds_layers(plan: Plan, loss: LossFn, batch: PyTree, layers: str | None = None) -> bool:
  """Whether the loss has layers that remat policies apply to; see `with_layers`."""
  return has_layers(jax.make_jaxpr(_flat_loss(plan, with_marks(loss, layers), batch))(*_structs(plan, batch)))


def batch_structs(batch: PyTree) -> PyTree:
  """The batch as `ShapeDtypeStruct`s; Python numbers are scalars. A `ReportError` without any array."""

  def abstract(leaf: Leaf) -> jax.ShapeDtypeStruct:
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


def check_batch(plan: Plan, batch: PyTree, microbatches: int = 1) -> None:
  """Refuses (`ReportError`) a batch that a step with this plan could not split: its report would mislead."""
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


def _staged(trace: StepTrace, seen: Propagation, flows: Sequence[Flow], pipeline: Pipeline) -> StagedWork:
  """The work of a pipeline, from its trace and the trace of the loss without it."""
  assert trace.schedule is not None
  whole = Propagation()
  whole.run(trace.plain, flows)
  return StagedWork(
    schedule=trace.schedule,
    saved_inputs=pipeline.saved_inputs(trace.schedule),
    useful=tuple(dataclasses.replace(p, split=p.split | {pipeline.axis}) for p in whole.products),
    hops=tuple(seen.hops),
    reordered=tuple(seen.reordered),
    copied=tuple(seen.copied),
  )


def _order(plan: Plan) -> tuple[list[Path], int]:
  """The paths of the model's leaves, trained leaves first, and the number of trained leaves."""
  trains = nnx.filterlib.to_predicate(plan.wrt)
  flat: Any = nnx.to_flat_state(plan.abstract["model"].state)
  chosen = [path for path, leaf in flat if trains(path, leaf)]
  return [*chosen, *(path for path, leaf in flat if not trains(path, leaf))], len(chosen)


def _structs(
  plan: Plan, batch: PyTree
) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct], list[AnyArray]]:
  """The trained leaves of the model, its other leaves, and the batch, as a trace's functions take them."""
  paths, count = _order(plan)
  rows = (plan.of("model")[path] for path in paths)
  arrays = [jax.ShapeDtypeStruct(row.shape, row.dtype) for row in rows]
  return arrays[:count], arrays[count:], jax.tree.leaves(batch)


def _flat_loss(
  plan: Plan, loss: LossFn, batch: PyTree, options: LayerOptions | None = None
) -> Callable[..., PyTree]:
  """The loss as a function of flat arrays."""
  graphdef, state = plan.abstract["model"].graphdef, plan.abstract["model"].state
  by_path: Any = dict(nnx.to_flat_state(state))
  paths, structure = _order(plan)[0], jax.tree.structure(batch)
  # Variables of a live module have a mesh, and a model may lay out activations by it. All axes have size
  # one here, so that each dim divides; sizes are used when the workload is evaluated.
  mesh = abstract_mesh(dict.fromkeys(axis_sizes(plan.mesh), 1))

  def live(path: Path, x: AnyArray) -> Leaf:
    leaf = by_path[path]
    if not isinstance(leaf, nnx.Variable):
      return x
    return leaf.copy(x, mesh=mesh) if leaf.get_metadata().get("out_sharding") else leaf.copy(x)

  def flat(trained: list[jax.Array], rest: list[jax.Array], inputs: list[jax.Array]) -> PyTree:
    values = zip(paths, (*trained, *rest), strict=True)
    made = nnx.from_flat_state(cast(Any, [(path, live(path, x)) for path, x in values]))
    with nnx.use_eager_sharding(False):
      module = nnx.merge(graphdef, made)
      with contextlib.nullcontext() if options is None else options.marking(module):
        result = call_loss(loss, module, jax.tree.unflatten(structure, inputs))
    return result[0] if isinstance(result, tuple) else result

  return on_fitting_axes(flat, plan.activation_rules)


def _with_stages(
  plan: Plan, flat: Callable[..., PyTree], options: LayerOptions, microbatches: int, used: LayersUsed
) -> Callable[..., PyTree]:
  """The flat loss as a pipeline over its layers."""

  def staged(trained: list[jax.Array], rest: list[jax.Array], inputs: list[jax.Array]) -> PyTree:
    piped = with_stages(
      lambda model, part: flat(*model, part), options, microbatches, lambda _: ({}, ()), used
    )
    return piped((trained, rest), inputs)

  return on_fitting_axes(staged, plan.activation_rules)


def _trace_update(plan: Plan) -> ClosedJaxpr | None:
  """The optimizer's update, from the model, the gradients and the state; None without an optimizer."""
  if "optimizer" not in plan.abstract:
    return None
  model, optimizer = plan.abstract["model"], plan.abstract["optimizer"]

  def update(state: PyTree, grads: PyTree, held: PyTree) -> PyTree:
    with nnx.use_eager_sharding(False):
      live, made = nnx.merge(model.graphdef, state), nnx.merge(optimizer.graphdef, held)
      apply(made, live, grads, jnp.float32(0), optax.tree.norm)
      return nnx.state((live, made))

  return jax.make_jaxpr(update)(model.state, model.chosen(plan.wrt), optimizer.state)


def _update_products(plan: Plan, update: ClosedJaxpr | None) -> tuple[Product, ...]:
  """The matrix products of the optimizer's update (Muon, Shampoo); gradients lie as their parameters do."""
  if update is None:
    return ()
  model, optimizer = plan.abstract["model"], plan.abstract["optimizer"]
  rows, held = plan.of("model"), plan.of("optimizer")
  states = [(model.state, rows), (model.chosen(plan.wrt), rows), (optimizer.state, held)]
  leaves = [table.get(path) for state, table in states for path in state_paths(state)]
  given = zip(opened(update).invars, leaves, strict=True)
  seen = Propagation(batch_axes=plan.batch_axes)
  seen.run(update, [unsplit(var.aval) if leaf is None else _flow(leaf) for var, leaf in given])
  return tuple(seen.products)


def _exchanged(plan: Plan) -> tuple[Sharded, ...]:
  """The matrices that travel in an update of `per_matrix`, on the layout of their state."""
  if "optimizer" not in plan.abstract:
    return ()
  found: list[Sharded] = []
  axes = frozenset(matrix_axes(axis_sizes(plan.mesh)))
  for state in per_matrix_states(plan.abstract["optimizer"].node.opt_state):
    for name, group in state.groups.items():
      counts = [x.shape[0] for x in jax.tree.leaves(nnx.as_pure(group))]
      found += [Sharded(count * bytes_of_matrix(name), axes) for count in counts[:1]]
  return tuple(found)


def _flow(leaf: LeafPlan, number: int | None = None) -> Flow:
  """A planned array as an input of a trace."""
  return Flow(axes_by_dim(leaf.spec, len(leaf.shape)), False, True, number)


def _residuals(
  traced: Program, flows: Sequence[Flow], batch_axes: Sequence[str]
) -> tuple[tuple[Sharded, ...], tuple[Sharded, ...], tuple[Sharded, ...]]:
  """The residuals of a traced forward pass but its inputs: of scans, outside scans, and of weights only."""
  body = opened(traced)
  seen = Propagation(batch_axes=batch_axes)
  seen.run(traced, flows)
  loops = {var for eqn in body.eqns if eqn.primitive.name == "scan" for var in eqn.outvars}
  # Values without `data` and `weight` are masks and tables of positions: compilers keep one copy, outside
  # loops.
  results = dict.fromkeys(var for var in body.outvars if not is_literal(var))
  inputs = set(body.invars)
  # `remat="offload"` moves values to the host's memory.
  near = [var for var in results if var.aval.memory_space is not jax.memory.Space.Host]
  saved = [var for var in near if var in seen.flows and var not in inputs]
  data = [var for var in saved if seen.flows[var].data]
  weights = [var for var in saved if seen.flows[var].weight and not seen.flows[var].data]
  rows = dict.fromkeys(var for var in data if var in loops)
  outside = [var for var in stored(traced, [v for v in data if v not in loops]) if var not in rows]
  weights = [v for v in weights if v in loops] + stored(traced, [v for v in weights if v not in loops])

  def parts(group: Iterable[Var]) -> tuple[Sharded, ...]:
    return _merge(Sharded(nbytes(var.aval), seen.flows[var].names) for var in group)

  return parts(rows), parts(outside), parts(weights)


def _is_product(eqn: JaxprEqn) -> bool:
  """Whether an operation is a product, or a function with a product (`jnp.einsum`)."""
  eqns = inner_equations(eqn) if eqn.primitive.name in CALLS else [eqn]
  return any(e.primitive.name in PRODUCTS for e in eqns)


def stored(jaxpr: Program, saved: Collection[Var]) -> list[Var]:
  """The variables of a jaxpr that a program keeps to recover the saved variables, except inputs.

  Compilers fuse an elementwise operation into the operation that reads it, and repeat it in the backward pass
  rather than keep its result. They keep results of products, loops, gathers and reductions, and the operands
  of products, which are in memory anyway. So where a trace saves `exp(logits)` in float32 and a mask of the
  targets, the program keeps the logits: an elementwise result is replaced by its sources if these, without
  the sources that are kept anyway, are no larger. Inputs of the trace cost nothing.
  Source: XLA's fusion passes; the figures are in `benchmarks/results/report_figures.md`.
  """
  body = opened(jaxpr)
  sources = facts_of(jaxpr, [()] * len(body.invars), _SOURCES)
  read = {id(var) for eqn in body.eqns if _is_product(eqn) for var in eqn.invars}
  kept: dict[Var, None] = {var: None for var in saved if id(var) in read}
  for var in sorted((v for v in saved if v not in kept), key=lambda v: -nbytes(v.aval)):
    further = [source for source in sources[var] if source not in kept]
    kept |= dict.fromkeys(further if sum(nbytes(v.aval) for v in further) <= nbytes(var.aval) else [var])
  return list(kept)


def _sources_after(eqn: JaxprEqn, inputs: list[tuple[Var, ...]]) -> list[tuple[Var, ...]]:
  if eqn.primitive.name == "optimization_barrier":
    return inputs
  if is_fused(eqn):
    return [tuple(dict.fromkeys(itertools.chain(*inputs)))] * len(eqn.outvars)
  return [(var,) for var in eqn.outvars]


_SOURCES: Facts[tuple[Var, ...]] = Facts(lambda _: (), _sources_after, lambda a, b: (*a, *b))
"""The results of operations that are not fused, from which a variable is computed."""


def _layer(
  eqn: JaxprEqn, inputs: list[Flow], times: int, batch_axes: Sequence[str], known: dict[int, ClosedJaxpr]
) -> tuple[tuple[Sharded, ...], tuple[Product, ...]]:
  """Arrays alive while a recomputed layer is differentiated, and the products run for them."""
  program = called(eqn)

  def kept(*values: jax.Array) -> PyTree:
    _, pullback = jax.vjp(as_function(program), *values)
    return jax.tree.leaves(pullback)

  if id(program) not in known:
    arrays = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in opened(program).invars]
    known[id(program)] = jax.make_jaxpr(kept)(*arrays)
  traced = known[id(program)]
  again = Propagation(params_of(eqn).get("policy"), batch_axes)
  again.run(without_unused(traced), inputs, times)
  scanned, outside, _ = _residuals(traced, inputs, batch_axes)
  return _merge((*scanned, *outside)), tuple(again.products)


def _scanned(
  traced: Program, flows: Mapping[Var, Flow], trained: Sequence[LeafPlan], read: Sequence[int]
) -> tuple[tuple[Sharded, ...], tuple[Sharded, ...], tuple[Sharded, ...]]:
  """`layer_weights`, `casts` and `narrowed` of a `Workload`, from the scans of the outermost level.

  `flows` are of its variables, `read` the bytes per element in which parameters are used, first the trained.
  """
  passes, casts, narrowed = [list[Sharded]()], dict[tuple[int, int], Sharded](), list[Sharded]()
  for place, eqn in enumerate(opened(traced).eqns):
    if eqn.primitive.name != "scan":
      continue
    passes.append([])
    for var in scan_counts(eqn).split(eqn.invars)[2]:
      if is_literal(var) or (number := flows[var].parameter) is None:
        continue
      own, split = opened(traced).invars[number].aval, flows[var].names
      used = math.prod(var.aval.shape) * min(read[number], own.dtype.itemsize)
      passes[-1].append(Sharded(used // eqn.params["length"], split))
      if used < nbytes(own):
        casts[place, number] = Sharded(used, split)
      if number < len(trained) and nbytes(var.aval) < nbytes(own):
        narrowed.append(Sharded(nbytes(own) - nbytes(var.aval), split))
  return max(map(tuple, passes), key=_total), _merge(casts.values()), _merge(narrowed)


def _total(parts: Iterable[Sharded]) -> int:
  return sum(part.bytes for part in parts)


def _part(leaf: LeafPlan) -> Sharded:
  return Sharded(leaf.bytes, frozenset(axes_in(leaf.spec)))


def _alike(leaves: Iterable[LeafPlan]) -> tuple[Sharded, ...]:
  """One part for leaves of one shape and layout."""
  sums = Counter[Any]()
  for leaf in leaves:
    sums[leaf.shape, leaf.spec, _part(leaf).split] += leaf.bytes
  return tuple(Sharded(size, split) for (_, _, split), size in sums.items())


def _resized(leaf: LeafPlan, itemsize: int) -> int:
  """Bytes of a leaf with elements of another size."""
  return leaf.bytes // leaf.dtype.itemsize * itemsize


def _trained(plan: Plan, leaves: Sequence[LeafPlan], read: Sequence[int]) -> tuple[Trained, ...]:
  """The trained parameters by layout; `read` are the bytes per element of their use.

  The optimizer's state of a parameter's own shape says over which axes a ZeRO stage splits the update.
  """
  held = ((leaf.parameter, leaf) for leaf in plan.leaves if leaf.root == "optimizer")
  states = {path: leaf for path, leaf in held if path and leaf.shape == plan.of("model")[path].shape}
  sums: dict[tuple[Split, Split], list[int]] = {}
  for leaf, size in zip(leaves, read, strict=False):
    state, split = states.get(leaf.path), _part(leaf).split
    further = _part(state).split - split if state is not None else frozenset()
    stored, used, summed = sums.get((split, further), (0, 0, 0))
    sums[split, further] = [
      stored + leaf.bytes,
      used + _resized(leaf, size),
      summed + _resized(leaf, max(4, leaf.dtype.itemsize)),
    ]
  return tuple(Trained(Sharded(a, split), b, c, further) for (split, further), (a, b, c) in sums.items())


def _merge(parts: Iterable[Sharded]) -> tuple[Sharded, ...]:
  sums = Counter[Split]()
  for part in parts:
    sums[part.split] += part.bytes
  return tuple(Sharded(size, split) for split, size in sums.items())
