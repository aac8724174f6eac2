"""The memory plan: the least that a step needs on each device, without a compiler.

The state, the gradients and the batch are exact. The activations are those that the loss saves for its
backward pass, from a trace. Compilers add working memory: gathered parameters, the layer that they compute.

Of one case: `y = jnp.exp((x @ w).astype(jnp.float32))` saves `y`, 4 bytes for each element. A program may
keep the product in bfloat16 and compute `y` again, so the plan counts 2 bytes, over the axes that split `y`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
from flax import nnx

from nnx_parallel.attention.flow import (
  Flow,
  constraint,
  flow_facts,
  follow_flows,
  result_axes,
  shard_map_axes,
)
from nnx_parallel.core.axes import axes_by_dim
from nnx_parallel.core.checked import check_arguments, check_arrays
from nnx_parallel.core.interpret import Facts, facts_of, is_literal
from nnx_parallel.core.jaxprs import CALLS, inner_equations, nbytes, open_jaxpr, program_of
from nnx_parallel.core.mesh import abstract_mesh, axis_sizes, no_mesh
from nnx_parallel.core.nodes import Path
from nnx_parallel.core.text import Shown, format_bytes
from nnx_parallel.core.types import AnyArray, ClosedJaxpr, JaxprEqn, Leaf, LossFn, Program, PyTree, Var
from nnx_parallel.errors import ReportError
from nnx_parallel.infer.dims import ELEMENTWISE, PRODUCTS
from nnx_parallel.layers.layers import LayerOptions, LayersUsed, with_layers, with_stages
from nnx_parallel.layers.pipeline import Pipeline, Schedule
from nnx_parallel.layers.remat import Policy
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.plan import Plan, check_plan
from nnx_parallel.layout.resolve import count_shards_by_dim
from nnx_parallel.report.chips import Chip
from nnx_parallel.report.chips import chip as chip_named
from nnx_parallel.report.inputs import batch_structs, check_batch, state_categories
from nnx_parallel.report.tables import render
from nnx_parallel.train.axes import on_fitting_axes
from nnx_parallel.train.gradients import check_divides
from nnx_parallel.train.loss_call import call_loss
from nnx_parallel.train.options import Gradients, is_scattered

GRADIENTS, ACTIVATIONS = "gradients", "saved activations"


@dataclasses.dataclass(frozen=True)
class MemoryPlan(Shown):
  """The least memory that one step needs.

  Attributes:
    categories: bytes per device by category. All are exact, except `"saved activations"`, a lower bound.
    largest: the largest leaves of the state in device memory: (name, bytes per device).
    host_bytes: the optimizer state in host memory, in bytes per device; `need_bytes` does not include it.
    schedule: the schedule of the pipeline, or None.
    microbatches: the number of microbatches of the batch.
    remat: the remat policy: which activations the layers save for the backward pass.
    chip: the chip with whose memory the plan is compared, or None.
  """

  categories: Mapping[str, int]
  largest: tuple[tuple[str, int], ...]
  microbatches: int
  remat: Policy
  chip: Chip | None
  host_bytes: int = 0
  schedule: Schedule | None = None

  @property
  def at_peak(self) -> dict[str, int]:
    """The categories that count at the same time.

    Sums over microbatches are in memory with the activations. Otherwise the gradients take the place of the
    activations, and the larger of the two counts.
    """
    rivals = (GRADIENTS, ACTIVATIONS) if self.microbatches == 1 else ()
    smaller = min(rivals, key=lambda name: self.categories[name], default="")
    return {name: size for name, size in self.categories.items() if name != smaller}

  @property
  def need_bytes(self) -> int:
    """The least that one device needs, in bytes."""
    return sum(self.at_peak.values())

  @property
  def exact_bytes(self) -> int:
    """The bytes of the state, the gradients and the batch on one device: all but the saved activations."""
    return sum(self.categories.values()) - self.categories[ACTIVATIONS]

  @property
  def headroom_bytes(self) -> int | None:
    """The usable memory of the chip that is left, in bytes per device; negative if the step does not fit."""
    return None if self.chip is None else self.chip.usable_bytes - self.need_bytes

  @property
  def verdict(self) -> str:
    """One sentence: whether the step can fit on the chip, and the margin."""
    least = f"needs at least {format_bytes(self.need_bytes)} per device"
    if self.chip is None or self.headroom_bytes is None:
      return f"A step {least}; compile_report tells how much more."
    least += f", of {format_bytes(self.chip.usable_bytes)} usable{self.chip.usable_note}"
    margin = format_bytes(abs(self.headroom_bytes))
    if self.headroom_bytes < 0:
      return f"Does not fit on {self.chip.name}: {least}; {margin} too much."
    return f"May fit on {self.chip.name}: {least}; {margin} left; compile_report tells."

  def to_json(self) -> str:
    """The plan as JSON."""
    body = dataclasses.asdict(self)
    return json.dumps(body | {"need_bytes": self.need_bytes, "verdict": self.verdict}, indent=2)

  def __str__(self) -> str:
    rows = [(name, format_bytes(size)) for name, size in self.categories.items() if size]
    rows.append(("at least", format_bytes(self.need_bytes)))
    lines = [self.verdict, "", render("Planned memory per device", ("what", "bytes>"), rows).rstrip()]
    if self.microbatches == 1:
      lines.append("Gradients take the place of saved activations: the larger of the two counts.")
    lines += [] if self.schedule is None else [f"{self.schedule}; layers are recomputed."]
    lines += [f"Host memory: {format_bytes(self.host_bytes)} per device."] if self.host_bytes else []
    largest = [(name, format_bytes(size)) for name, size in self.largest]
    return "\n".join(
      [*lines, render("Largest arrays of the state, per device", ("array", "bytes>"), largest)]
    )


@check_arguments(ReportError, microbatches=1)
def memory_plan(
  plan: Plan,
  loss: LossFn,
  batch: PyTree,
  *,
  microbatches: int = 1,
  remat: Policy = "as written",
  layers: str | None = None,
  gradients: Gradients | None = None,
  pipeline: str | Pipeline | None = None,
  chip: Chip | str | None = None,
) -> MemoryPlan:
  """Counts the least memory that a train step needs, from an abstract trace of its loss.

  The bytes of the state, the gradients and the batch are exact. The activations are those that JAX's
  linearization of the loss saves, divided by the sizes of the mesh axes that shard them. Compilers need more:
  a step that is over the limit here does not fit, and `compile_report` tells whether the others do.

  Args:
    plan: the plan of the model and the optimizer, on any mesh.
    loss: `loss(model, batch)` -> scalar, or (scalar, metrics).
    batch: a pytree of arrays or `ShapeDtypeStruct`s of the global batch.
    microbatches: the number of microbatches of the batch.
    remat: the remat policy, as in `train_step`.
    layers: dotted paths of the layers, with `*` for any part; as in `train_step`.
    gradients: the layout of the gradients, as in `train_step`; by default, the ZeRO stage of the plan
      decides.
    pipeline: the mesh axis of pipeline stages, or a `Pipeline`; as in `train_step`. The saved activations are
      then the inputs of layers that a stage saves for all microbatches in flight.
    chip: the chip with whose memory the plan is compared, such as `"v5e"`.

  Returns:
    A `MemoryPlan`; print it, or read its `categories`.

  Raises:
    ReportError: `microbatches` is not positive, the chip is unknown, or the batch has no array or does not
      divide.
    TrainError: there is no such remat policy, no layer for it or for the pipeline, or the gradients cannot be
      scattered.
    SchemeError: the stages of the pipeline do not fit the mesh or the microbatches.

  Example:
    >>> import jax, jax.numpy as jnp, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(1024, 1024, use_bias=False, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.abstract_mesh(fsdp=256), nxp.fsdp(), optimizer=optax.adam(1e-3))
    >>> batch = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    >>> memory_plan(plan, lambda model, x: (model(x) ** 2).mean(), batch).categories["parameters"]
    16384
  """
  check_plan(plan, "nxp.memory_plan(plan, loss_fn, batch)")
  check_arrays(ReportError, "batch", batch)
  stages = Pipeline(pipeline) if isinstance(pipeline, str) else pipeline
  saved = trace_saved(
    plan, loss, batch, remat=remat, layers=layers, pipeline=stages, microbatches=microbatches
  )
  check_batch(plan, batch, microbatches)
  figures = chip_named(chip) if chip is not None else None
  return count_memory(plan, saved, batch, microbatches, remat, gradients, figures)


def count_memory(
  plan: Plan,
  saved: Saved,
  batch: PyTree,
  microbatches: int,
  remat: Policy,
  gradients: Gradients | None = None,
  chip: Chip | None = None,
) -> MemoryPlan:
  """The memory plan of a traced loss; the other arguments are as for `memory_plan`."""
  sizes, structs = axis_sizes(plan.mesh), jax.tree.leaves(batch_structs(batch))
  splits = (count_shards_by_dim(plan.batch_spec(x.ndim), x.ndim, sizes) for x in structs)
  near = sorted((x for x in plan.leaves if not x.on_host), key=lambda leaf: -leaf.bytes_per_device)
  state, masters = state_categories(plan), sum(x.bytes_per_device for x in near if "masters" in x.path)
  categories = {
    **state,
    "optimizer": state["optimizer"] - masters,
    "master weights": masters,
    "batch": sum(nbytes(x) // math.prod(split) for x, split in zip(structs, splits, strict=True)),
    GRADIENTS: _gradients(plan, gradients, summed=microbatches > 1),
    ACTIVATIONS: _activations(plan, saved, structs, microbatches),
  }
  largest = tuple((leaf.name, leaf.bytes_per_device) for leaf in near[:8])
  on_host = plan.bytes_per_device(host=True)
  return MemoryPlan(categories, largest, microbatches, remat, chip, on_host, saved.schedule)


def _gradients(plan: Plan, gradients: Gradients | None, *, summed: bool) -> int:
  """Bytes per device of the gradients, as large as the parameters; sums are float32 or wider."""
  # Optimizer state of a parameter's own shape has the axes over which a ZeRO stage splits the gradient.
  paths, count = _order(plan)
  rows = plan.of("model")
  held = ((leaf.parameter, leaf) for leaf in plan.leaves if leaf.root == "optimizer")
  states = {path: leaf for path, leaf in held if path and leaf.shape == rows[path].shape}
  pairs = [(rows[path], states.get(path, rows[path])) for path in paths[:count]]
  further = any(math.prod(state.shards) > math.prod(leaf.shards) for leaf, state in pairs)
  scattered = is_scattered(gradients, plan.zero, further=further)

  def size(leaf: LeafPlan, state: LeafPlan) -> int:
    width = max(4, leaf.dtype.itemsize) if summed else leaf.dtype.itemsize
    return leaf.bytes // leaf.dtype.itemsize * width // math.prod((state if scattered else leaf).shards)

  return sum(size(*pair) for pair in pairs)


class Saved(NamedTuple):
  """The program from the trained leaves, the others and the batch to all arrays that a loss saves.

  For a pipeline, `share` is the part of these arrays that exists at a time.
  """

  program: ClosedJaxpr
  schedule: Schedule | None = None
  share: float = 1.0


@no_mesh()
def trace_saved(
  plan: Plan,
  loss: LossFn,
  batch: PyTree,
  *,
  remat: Policy = "as written",
  layers: str | None = None,
  pipeline: Pipeline | None = None,
  microbatches: int = 1,
) -> Saved:
  """Traces what a loss saves, with the plan's rules in scope; the arguments are as for `memory_plan`."""
  if hasattr(loss, "options"):
    raise ReportError(
      f"a memory plan reads the loss function, but got a {type(loss).__name__}.",
      fix="nxp.memory_plan(plan, loss_fn, batch), with the loss function of the train step.",
    )
  batch, used = batch_structs(batch), LayersUsed()
  if pipeline is None:
    flat = flat_loss(plan, with_layers(loss, remat=remat, layers=layers), batch)
  else:
    check_divides(batch, microbatches)
    # 1F1B computes gradients in its forward pass: what it saves is the part of GPipe's that is in flight.
    gpipe = dataclasses.replace(pipeline, order="gpipe", recompute=True)
    options = LayerOptions(remat, pattern=layers, pipeline=gpipe)
    of_part = flat_loss(plan, loss, batch, options)
    run = with_stages(lambda model, x: of_part(*model, x), options, microbatches, lambda _: ({}, ()), used)
    flat = on_fitting_axes(lambda trained, rest, inputs: run((trained, rest), inputs), plan.activation_rules)

  def kept(trained: list[jax.Array], rest: list[jax.Array], inputs: list[jax.Array]) -> PyTree:
    _, pullback = jax.vjp(lambda t: flat(t, rest, inputs), trained)
    return jax.tree.leaves(pullback)

  program, schedule = jax.make_jaxpr(kept)(*structs_of(plan, batch)), used.schedule
  if pipeline is None or schedule is None:
    return Saved(program)
  return Saved(program, schedule, pipeline.saved_inputs(schedule) / schedule.ticks)


def _order(plan: Plan) -> tuple[list[Path], int]:
  """The paths of the model's leaves, trained leaves first, and the number of trained leaves."""
  trains = nnx.filterlib.to_predicate(plan.wrt)
  flat: Any = nnx.to_flat_state(plan.abstract["model"].state)
  chosen = [path for path, leaf in flat if trains(path, leaf)]
  return [*chosen, *(path for path, leaf in flat if not trains(path, leaf))], len(chosen)


def structs_of(
  plan: Plan, batch: PyTree
) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct], list[AnyArray]]:
  """The trained leaves of the model, its other leaves, and the batch, as `flat_loss` takes them."""
  paths, count = _order(plan)
  rows = (plan.of("model")[path] for path in paths)
  arrays = [jax.ShapeDtypeStruct(row.shape, row.dtype) for row in rows]
  return arrays[:count], arrays[count:], jax.tree.leaves(batch)


def flat_loss(
  plan: Plan, loss: LossFn, batch: PyTree, options: LayerOptions | None = None
) -> Callable[..., PyTree]:
  """The loss as a function of flat arrays: `structs_of`."""
  graphdef, state = plan.abstract["model"].graphdef, plan.abstract["model"].state
  by_path: Any = dict(nnx.to_flat_state(state))
  paths, structure = _order(plan)[0], jax.tree.structure(batch)
  # Variables of a live module have a mesh, and a model may lay out activations by it. All axes have size
  # one here, so that each dim divides; sizes are used when the bytes are counted.
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


def _activations(plan: Plan, saved: Saved, batch: Sequence[jax.ShapeDtypeStruct], microbatches: int) -> int:
  """Bytes per device of the saved activations that depend on the batch: a lower bound."""
  sizes, paths = axis_sizes(plan.mesh), _order(plan)[0]
  leaves = [plan.of("model")[path] for path in paths]
  flows = [Flow(axes_by_dim(leaf.spec, len(leaf.shape)), data=False) for leaf in leaves]
  flows += [Flow(axes_by_dim(plan.batch_spec(x.ndim), x.ndim), data=True) for x in batch]
  layouts = facts_of(saved.program, flows, _layouts(frozenset(plan.batch_axes)))
  body = open_jaxpr(saved.program)
  # `remat="offload"` moves values to the host's memory.
  near = [v for v in body.outvars if not is_literal(v) and v.aval.memory_space != jax.memory.Space.Host]
  read = find_stored(
    saved.program, [v for v in near if v in layouts and layouts[v].data and v not in body.invars]
  )
  each = (nbytes(v.aval) / math.prod(sizes.get(axis, 1) for axis in layouts[v].names) for v in read)
  return round(sum(each) * (saved.share if saved.schedule is not None else 1 / microbatches))


def _layouts(batch_axes: frozenset[str]) -> Facts[Flow]:
  """The layout of each array of a trace, as train steps hold it (`attention/flow.py`)."""

  def follow(eqn: JaxprEqn, inputs: list[Flow]) -> Sequence[Flow]:
    name, data = eqn.primitive.name, any(flow.data for flow in inputs)
    if name == "optimization_barrier":
      return inputs
    if name == "shard_map":
      manual = frozenset(eqn.params["newly_manual_axes"])
      specs = zip(eqn.params["out_specs"], result_axes(eqn, inputs), strict=True)
      return [Flow(shard_map_axes(spec, axes, manual), data) for spec, axes in specs]
    if name == "sharding_constraint":
      return [Flow(constraint(eqn, inputs[0].axes), data)]
    return follow_flows(eqn, inputs, batch_axes)

  return flow_facts(follow)


def find_stored(jaxpr: Program, saved: Collection[Var]) -> list[Var]:
  """The variables that a program keeps to recover the saved variables, except inputs."""
  # Compilers fuse an elementwise operation into its reader and repeat it in the backward pass, where its
  # sources, beside those kept anyway (operands of products), are no larger; see report_figures.json.
  body = open_jaxpr(jaxpr)
  sources = facts_of(jaxpr, [()] * len(body.invars), _SOURCES)
  read = {id(var) for eqn in body.eqns if _is_product(eqn) for var in eqn.invars}
  kept: dict[Var, None] = {var: None for var in saved if id(var) in read}
  for var in sorted((v for v in saved if v not in kept), key=lambda v: -nbytes(v.aval)):
    further = [source for source in sources[var] if source not in kept]
    kept |= dict.fromkeys(further if sum(nbytes(v.aval) for v in further) <= nbytes(var.aval) else [var])
  return list(kept)


def _is_product(eqn: JaxprEqn) -> bool:
  """Whether an operation is a product, or a function with a product (`jnp.einsum`)."""
  eqns = inner_equations(eqn) if eqn.primitive.name in CALLS else [eqn]
  return any(e.primitive.name in PRODUCTS for e in eqns)


_FUSED = ELEMENTWISE - {"name", "reduce_precision"} | {"broadcast_in_dim", "iota", "reshape", "squeeze"}
"""The argument of `checkpoint_name` may be kept, and the result of `reduce_precision` is stored as it is."""


def is_fused(eqn: JaxprEqn) -> bool:
  """Whether an operation is elementwise, or a function of such operations only (`jnp.where`)."""
  name = eqn.primitive.name
  if name in CALLS:
    return all(is_fused(inner) for inner in open_jaxpr(program_of(eqn)).eqns)
  return name in _FUSED


def _sources_after(eqn: JaxprEqn, inputs: list[tuple[Var, ...]]) -> list[tuple[Var, ...]]:
  if eqn.primitive.name == "optimization_barrier":
    return inputs
  if is_fused(eqn):
    return [tuple(dict.fromkeys(itertools.chain(*inputs)))] * len(eqn.outvars)
  return [(var,) for var in eqn.outvars]


_SOURCES: Facts[tuple[Var, ...]] = Facts(lambda _: (), _sources_after, lambda a, b: (*a, *b))
"""The results of operations that are not fused, from which a variable is computed."""
