"""What one step is made of, as bytes and FLOPs over mesh axes whose sizes are not chosen yet."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend import core
from jax.sharding import PartitionSpec

from nnx_parallel.layout.mesh import axis_sizes
from nnx_parallel.layout.optimizer_layout import owner
from nnx_parallel.layout.plan import LeafPlan, ShardingPlan
from nnx_parallel.report.jaxprs import as_function, opened, scan_counts
from nnx_parallel.report.propagate import Flow, Kept, Product, Propagation
from nnx_parallel.report.remat import Remat, with_remat

Split = frozenset[str]
Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Part:
  """Bytes that a set of axes divides."""

  bytes: int
  split: Split

  def per_device(self, sizes: Sizes) -> float:
    """Bytes on each device of a mesh."""
    return self.bytes / math.prod(sizes.get(axis, 1) for axis in self.split)


@dataclasses.dataclass(frozen=True)
class Leaf:
  """Arrays of the state that are alike, with what decides how a ZeRO stage splits them.

  Attributes:
    shape: global shape of one of them, in elements.
    spec: its layout at stage 0.
    part: all of them, at stage 0.
    spreads: whether a stage may split them: the state of a parameter, and parameters that have state of
      their own shape.
  """

  shape: tuple[int, ...]
  spec: PartitionSpec
  part: Part
  spreads: bool


@dataclasses.dataclass(frozen=True)
class Workload:
  """One step of a model on a batch, for any sizes of the mesh axes.

  Attributes:
    parameters: trained and frozen parameters.
    trained: those that get a gradient.
    other: the model's other state.
    optimizer: the optimizer's state.
    batch: the inputs.
    batch_axes: axes that split the batch.
    kept: arrays that scanned layers keep for the backward pass and that scale with the batch.
    kept_outside: the same, of what is outside scans.
    kept_weights: such arrays that depend on parameters only (casts).
    layer: arrays of the largest rematerialised layer while it is differentiated.
    layer_weights: the parameters of one scanned layer.
    largest: the largest array computed from the batch, for each way of splitting.
    products: matrix products of the forward pass.
    recomputed: matrix products that rematerialisation runs again.
    compute_bytes: bytes per element of the type in which weights are multiplied.
    optimizer_leaves: the optimizer's state, leaf by leaf.
    trained_leaves: trained parameters, leaf by leaf.
    stage: ZeRO stage; see `with_zero`.
    gradients: as they are held until the update.
    reduced: trained parameters, each with the axes over which the stage splits its update.
  """

  parameters: tuple[Part, ...]
  trained: tuple[Part, ...]
  other: tuple[Part, ...]
  optimizer: tuple[Part, ...]
  batch: tuple[Part, ...]
  batch_axes: tuple[str, ...]
  kept: tuple[Part, ...]
  kept_outside: tuple[Part, ...]
  kept_weights: tuple[Part, ...]
  layer: tuple[Part, ...]
  layer_weights: tuple[Part, ...]
  largest: tuple[Part, ...]
  products: tuple[Product, ...]
  recomputed: tuple[Product, ...]
  compute_bytes: int
  optimizer_leaves: tuple[Leaf, ...]
  trained_leaves: tuple[Leaf, ...]
  stage: int
  gradients: tuple[Part, ...]
  reduced: tuple[tuple[Part, Split], ...]


def per_device(parts: Iterable[Part], sizes: Sizes) -> float:
  """Sum of bytes on each device."""
  return sum(part.per_device(sizes) for part in parts)


def trace_workload(
  plan: ShardingPlan, loss: Callable[[Any, Any], Any], batch: Any, *, remat: Remat = "as written"
) -> Workload:
  """Traces a loss abstractly and says what its step is made of.

  Args:
    plan: gives the model, the optimizer and the axes of every leaf; its axis sizes are not used.
    loss: `loss(model, batch)` -> scalar, or (scalar, metrics).
    batch: a pytree of arrays or `ShapeDtypeStruct`s of the global batch.
    remat: what layers keep; see `with_remat`.
  """
  traces = _Traces(plan, with_remat(loss, remat), batch)
  forward, flows = traces.loss(), traces.flows
  seen = Propagation()
  seen.run(forward, flows)
  kept = _residuals(traces.backward(), flows)
  layers = [_layer(item) for item in seen.kept]
  layer = max((parts for parts, _ in layers), key=lambda p: sum(x.bytes for x in p), default=())
  model = [leaf for leaf in plan.leaves if leaf.root == "model"]
  params = [leaf for leaf in model if "Param" in leaf.kind]
  owners = [(leaf, owner(leaf.path, plan.of("model"))) for leaf in plan.leaves if leaf.root == "optimizer"]
  own_shape = {path for leaf, path in owners if path and leaf.shape == plan.of("model")[path].shape}
  rows = [(plan.of("model")[path], path in own_shape) for path in traces.trained_paths]
  owners = [(leaf, path) for leaf, path in owners if not leaf.on_host]
  trained = _merge(_part(leaf) for leaf, _ in rows)
  return Workload(
    parameters=_merge(_part(leaf) for leaf in params),
    trained=trained,
    other=_merge(_part(leaf) for leaf in model if leaf not in params),
    optimizer=_merge(_part(leaf) for leaf, _ in owners),
    batch=_merge(Part(_size(x), f.names) for x, f in zip(traces.inputs, traces.batch_flows, strict=True)),
    batch_axes=plan_batch_axes(plan),
    kept=kept.scanned,
    kept_outside=kept.outside,
    kept_weights=kept.weights,
    layer=layer,
    layer_weights=max(_scanned(forward, flows), key=lambda p: sum(x.bytes for x in p), default=()),
    largest=tuple(Part(size, split) for split, size in seen.largest.items()),
    products=tuple(seen.products),
    recomputed=tuple(product for _, products in layers for product in products),
    compute_bytes=_compute_bytes(forward),
    optimizer_leaves=_alike((leaf, path is not None) for leaf, path in owners),
    trained_leaves=_alike(rows),
    stage=0,
    gradients=trained,
    reduced=tuple((part, frozenset[str]()) for part in trained),
  )


def plan_batch_axes(plan: ShardingPlan) -> tuple[str, ...]:
  """Axes that split the batch, of those in the mesh."""
  entry = plan.batch_spec(1)[0]
  axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
  return tuple(axis for axis in axes if axis in axis_sizes(plan.mesh))


class _Traces:
  """The loss as a function of flat arrays, and the axes of each."""

  def __init__(self, plan: ShardingPlan, loss: Callable[[Any, Any], Any], batch: Any):
    graphdef, trained, rest = nnx.split(plan.abstract_model, plan.wrt, ...)
    rows = plan.of("model")
    trained_flat, rest_flat = list(nnx.to_flat_state(trained)), list(nnx.to_flat_state(rest))
    self.trained_paths = [path for path, _ in trained_flat]
    self.inputs, structure = jax.tree.flatten(batch)
    self.batch_flows = [Flow(_dims(plan.batch_spec(len(x.shape)), len(x.shape)), True) for x in self.inputs]
    leaves = [rows[path] for path, _ in (*trained_flat, *rest_flat)]
    self.flows = [Flow(_dims(leaf.spec, len(leaf.shape)), False, True) for leaf in leaves]
    self.flows += self.batch_flows
    self._arrays = [
      [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves[: len(trained_flat)]],
      [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves[len(trained_flat) :]],
      [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs],
    ]

    def pure(trained: list[Any], rest: list[Any], inputs: list[Any]) -> Any:
      states = [
        nnx.from_flat_state(
          [
            (path, leaf.copy(x) if isinstance(leaf, nnx.Variable) else x)
            for (path, leaf), x in zip(flat, arrays, strict=True)
          ]
        )
        for flat, arrays in ((trained_flat, trained), (rest_flat, rest))
      ]
      with nnx.use_eager_sharding(False):
        module = nnx.merge(graphdef, *states)
        result = loss(module, jax.tree.unflatten(structure, inputs))
      return result[0] if isinstance(result, tuple) else result

    self._pure = pure

  def loss(self) -> Any:
    return jax.make_jaxpr(self._pure)(*self._arrays)

  def backward(self) -> Any:
    def kept(trained: list[Any], rest: list[Any], inputs: list[Any]) -> Any:
      _, pullback = jax.vjp(lambda t: self._pure(t, rest, inputs), trained)
      return jax.tree.leaves(pullback)

    return jax.make_jaxpr(kept)(*self._arrays)


@dataclasses.dataclass(frozen=True)
class _Residuals:
  scanned: tuple[Part, ...]
  outside: tuple[Part, ...]
  weights: tuple[Part, ...]


def _residuals(traced: Any, flows: Sequence[Flow]) -> _Residuals:
  """What a traced forward pass hands to its backward pass, inputs left out."""
  body = opened(traced)
  outs = Propagation().run(traced, flows)
  loops = {var for eqn in body.eqns if eqn.primitive.name == "scan" for var in eqn.outvars}
  seen: set[Any] = set(body.invars)
  groups: tuple[list[Part], list[Part], list[Part]] = ([], [], [])
  for var, flow in zip(body.outvars, outs, strict=True):
    if isinstance(var, core.Literal) or var in seen:
      continue
    seen.add(var)
    if not flow.data and not flow.weight:
      continue  # masks and tables of positions: the compiler keeps one, outside the loop
    group = 2 if not flow.data else 0 if var in loops else 1
    groups[group].append(Part(_size(var.aval), flow.names))
  return _Residuals(*(_merge(group) for group in groups))


def _layer(item: Kept) -> tuple[tuple[Part, ...], tuple[Product, ...]]:
  """Arrays alive while one rematerialised layer is differentiated, and the products run for them."""
  run = as_function(item.jaxpr)
  arrays = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in opened(item.jaxpr).invars]
  real = [n for n, x in enumerate(arrays) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]

  def kept(*values: Any) -> Any:
    def of(*changed: Any) -> Any:
      full = list(values)
      for n, x in zip(real, changed, strict=True):
        full[n] = x
      return run(*full)

    _, pullback = jax.vjp(of, *(values[n] for n in real))
    return jax.tree.leaves(pullback)

  traced = jax.make_jaxpr(kept)(*arrays)
  again = Propagation(item.saves)
  again.run(traced, item.inputs, item.times, live=_live(traced))
  found = _residuals(traced, item.inputs)
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


def _scanned(traced: Any, flows: Sequence[Flow]) -> list[tuple[Part, ...]]:
  """For each scan of the outermost level, the parameters that one pass reads."""
  by_var = dict(zip(opened(traced).invars, flows, strict=True))
  found: list[tuple[Part, ...]] = []
  for eqn in opened(traced).eqns:
    if eqn.primitive.name != "scan":
      continue
    counts = scan_counts(eqn)
    rows = eqn.invars[counts.constants + counts.carried :]
    parts = [
      Part(_size(v.aval) // eqn.params["length"], by_var[v].names)
      for v in rows
      if not isinstance(v, core.Literal) and v in by_var and not by_var[v].data
    ]
    found.append(tuple(parts))
  return found


def _compute_bytes(traced: Any) -> int:
  """Bytes per element of the largest matrix product's operands."""
  sizes: list[tuple[int, int]] = []

  def visit(jaxpr: Any) -> None:
    for eqn in jaxpr.eqns:
      if eqn.primitive.name == "dot_general":
        aval = eqn.invars[1].aval
        sizes.append((_size(eqn.outvars[0].aval), aval.dtype.itemsize))
      for inner in core.jaxprs_in_params(eqn.params):
        visit(opened(inner))

  visit(opened(traced))
  return max(sizes, default=(0, 4))[1]


def _part(leaf: LeafPlan) -> Part:
  return Part(leaf.bytes, frozenset(axis for dim in _dims(leaf.spec, len(leaf.shape)) for axis in dim))


def _alike(rows: Iterable[tuple[LeafPlan, bool]]) -> tuple[Leaf, ...]:
  """One entry for each shape, layout and answer."""
  sums: dict[tuple[tuple[int, ...], PartitionSpec, bool], Part] = {}
  for leaf, spreads in rows:
    key, part = (leaf.shape, leaf.spec, spreads), _part(leaf)
    so_far = sums[key].bytes if key in sums else 0
    sums[key] = Part(so_far + part.bytes, part.split)
  return tuple(Leaf(shape, spec, part, spreads) for (shape, spec, spreads), part in sums.items())


def _merge(parts: Iterable[Part]) -> tuple[Part, ...]:
  sums: dict[Split, int] = {}
  for part in parts:
    sums[part.split] = sums.get(part.split, 0) + part.bytes
  return tuple(Part(size, split) for split, size in sums.items())


def _dims(spec: Any, rank: int) -> tuple[tuple[str, ...], ...]:
  dims = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
  return (*dims, *(((),) * (rank - len(dims))))


def _size(x: Any) -> int:
  return math.prod(x.shape) * x.dtype.itemsize
