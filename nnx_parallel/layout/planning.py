"""Plans a model: traces its constructor, decides each array, checks the finished table.

No array exists meanwhile: the module and its optimizer are a graph definition and an abstract state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict, TypeVar, Unpack, overload

import optax
from flax import nnx
from flax.linen import get_logical_axis_rules
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from nnx_parallel.core.axes import axes_of
from nnx_parallel.core.checked import are_texts, is_one_of, shorten_traceback
from nnx_parallel.core.layers import find_layers
from nnx_parallel.core.mesh import AnyMesh, axis_sizes, is_explicit, no_mesh
from nnx_parallel.core.nodes import Path
from nnx_parallel.core.text import few
from nnx_parallel.errors import PlanError, ShardingError
from nnx_parallel.layout import checks, optimizer_layout, tracing
from nnx_parallel.layout.batch import batch_axes, no_batch_axes
from nnx_parallel.layout.constrain import scope_in_use
from nnx_parallel.layout.decide import Settings, model_rows, optimizer_rows, split_further, tables
from nnx_parallel.layout.known_faults import check_convolutions, own_step_notes
from nnx_parallel.layout.leaf import LeafPlan, Root
from nnx_parallel.layout.plan import Plan
from nnx_parallel.layout.sharded_optimizer import ShardedOptimizer
from nnx_parallel.layout.tracing import Trace
from nnx_parallel.rules.logical import UNEVEN, LogicalRules, Uneven, check_axes, show_candidates
from nnx_parallel.rules.ruleset import Rules, RuleSet, on_mesh

M = TypeVar("M", bound=nnx.Module)


class StateOptions(TypedDict, total=False):
  """The options of `plan` besides the optimizer."""

  wrt: nnx.filterlib.Filter
  uneven: Uneven
  zero: int
  zero_axes: Sequence[str] | str | None
  optimizer_memory: str | None


class PlanOptions(StateOptions, total=False):
  """The options of `plan`."""

  optimizer: optax.GradientTransformation | None


@overload
def plan(
  init: Callable[[], M], mesh: AnyMesh, rules: Rules = None, *, uneven: Uneven = "error"
) -> Plan[M]: ...


@overload
def plan(
  init: Callable[[], M],
  mesh: AnyMesh,
  rules: Rules = None,
  *,
  optimizer: optax.GradientTransformation,
  **options: Unpack[StateOptions],
) -> Plan[tuple[M, ShardedOptimizer[M]]]: ...


@overload
def plan(
  init: Callable[[], nnx.Module], mesh: AnyMesh, rules: Rules = None, **options: Unpack[PlanOptions]
) -> Plan: ...


@shorten_traceback
def plan(
  init: Callable[[], nnx.Module],
  mesh: AnyMesh,
  rules: Rules = None,
  *,
  optimizer: optax.GradientTransformation | None = None,
  wrt: nnx.filterlib.Filter = nnx.Param,
  uneven: Uneven = "error",
  zero: int = 0,
  zero_axes: Sequence[str] | str | None = None,
  optimizer_memory: str | None = None,
) -> Plan:
  """Plans the layout of a module and its optimizer without making any array.

  Args:
    init: a function without arguments that builds the module.
    mesh: a mesh of real devices (`make_mesh`), or an abstract mesh of any size (`abstract_mesh`).
    rules: `LogicalRules`, `PathRules`, a fallback such as `fsdp()`, a preset, or a sequence of these. If
      None, annotations must name mesh axes, and arrays without annotations are replicated. The rules of an
      active `nnx.logical_axis_rules` are added.
    optimizer: an Optax transformation, whose state is planned too.
    wrt: which Variables the optimizer trains; a filter as in `nnx.Optimizer`.
    uneven: what to do with a dim that the mesh axes of its rule do not divide. `"error"` raises an error if
      no candidate of the rule divides the dim, `"next"` then does not shard it, and `"pad"` then pads it for
      the first candidate. `"replicate"` does not shard the dim as soon as one candidate does not divide it.
    zero: the ZeRO stage. With 1, the optimizer state has the layout of its parameter and is also sharded over
      `zero_axes`. With 2, `train_step` also keeps the gradients in the layout of the optimizer state. For
      stage 3, use `fsdp()`.
    zero_axes: the mesh axes over which `zero` shards the optimizer state; by default the batch axes.
    optimizer_memory: where the optimizer state of parameters is stored between steps; by default in the
      memory of the devices. With `"pinned_host"`, it is in host memory; each update fetches it, for a few
      parameters at a time, and writes it back.

  Returns:
    A `Plan`: print it, call its methods, create a model from it, or restore a checkpoint into it.

  Raises:
    ShardingError: names, rules or the fallback do not fit a Variable; the message has its path.
    PlanError: `init` is not a constructor, or `wrt` selects nothing.

  Source: ZeRO, arXiv:1910.02054.

  Example:
    >>> import jax, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(512, 1024, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.abstract_mesh(fsdp=512), nxp.fsdp(), optimizer=optax.adam(1e-3))
    >>> plan["kernel"].spec, plan["optimizer/opt_state.0.mu.kernel"].bytes_per_device
    (P(None, 'fsdp'), 4096)
  """
  return plan_with_traces(
    init,
    mesh,
    rules,
    optimizer=optimizer,
    wrt=wrt,
    uneven=uneven,
    zero=zero,
    zero_axes=zero_axes,
    optimizer_memory=optimizer_memory,
  )[0]


@no_mesh()
def plan_with_traces(
  init: Callable[[], nnx.Module], mesh: AnyMesh, rules: Rules = None, **options: Unpack[PlanOptions]
) -> tuple[Plan, dict[Root, Trace]]:
  """Like `plan`; also returns the traces, for a caller that creates the model right away."""
  # A plan does not keep them: data that `init` reads (a seed, a table) may change before a later creation.
  _check_options(mesh, rules, options)
  tx, wrt, zero = options.get("optimizer"), options.get("wrt", nnx.Param), options.get("zero", 0)
  uneven: Uneven = options.get("uneven", "error")
  ruleset, notes = _rules_on(mesh, rules, uneven)
  given = Settings(mesh, ruleset, uneven)
  without_effect = check_axes(ruleset.logical, given.sizes)
  batch = batch_axes(ruleset, given.sizes)
  traces: dict[Root, Trace] = {"model": tracing.trace_module(init, mesh)}
  model = traces["model"].made
  notes += tracing.variable_notes()
  notes += checks.check_attention(model.node, given.sizes)  # says more than the error for wrong names
  rows = model_rows(traces["model"], given)
  checks.check_complete(rows, ruleset)
  without_effect += checks.check_rules(rows, model, given)
  state: list[LeafPlan] = []
  if tx is not None:
    zero_axes = options.get("zero_axes")
    if zero and zero_axes is None and batch is None:
      raise no_batch_axes(ruleset, given.sizes)
    axes = optimizer_layout.zero_axes(zero, zero_axes, batch or (), given.sizes)
    traces["optimizer"] = tracing.trace_optimizer(model, tx, wrt)
    kind = options.get("optimizer_memory")
    kind = None if kind == "device" else kind
    followed = [*optimizer_rows(traces["optimizer"], rows, given, memory_kind=kind)]
    state = [split_further(row, axes) for row in followed]
    if axes and all(a.spec == b.spec for a, b in zip(followed, state, strict=True)):
      sizes = ", ".join(f"{axis}={given.sizes[axis]}" for axis in axes)
      notes.append(f"zero splits nothing: {sizes}, and no optimizer state has a dim left for them")
  checks.check_names((*rows, *state))
  notes += _notes(traces, rows, batch, given) + without_effect
  notes += checks.check_use((*rows, *state), ruleset, batch or (), given.sizes)
  made = Plan(
    mesh=mesh,
    rules=ruleset,
    leaves=(*rows, *state),
    notes=tuple(notes),
    layers=tuple(map(str, find_layers(model.node))),
    zero=zero,
    init=init,
    tx=tx,
    wrt=wrt,
    abstract={root: one.made for root, one in traces.items()},
  )
  return made, traces


def _check_options(mesh: AnyMesh, rules: object, options: PlanOptions) -> None:
  """Refuses options that do not go together, before any work is done."""
  if isinstance(rules, (Mesh, AbstractMesh)):
    raise PlanError("the mesh comes before the rules.", fix="nxp.plan(init, mesh, rules), in this order.")
  is_explicit(mesh)  # refuses what is no mesh, and Manual axes
  tx, memory = options.get("optimizer"), options.get("optimizer_memory")
  zero, zero_axes, uneven = options.get("zero", 0), options.get("zero_axes"), options.get("uneven", "error")
  if isinstance(rules, optax.GradientTransformation):
    raise PlanError("rules got an optax transformation.", fix="nxp.plan(init, mesh, rules, optimizer=...)")
  if not is_one_of(uneven, UNEVEN):
    raise PlanError(f"uneven={uneven!r} is not a policy.", fix=f"one of {', '.join(UNEVEN)}.")
  fix = "optimizer=optax.adamw(...)"
  if zero_axes is not None and type(zero_axes) is not str and not are_texts(zero_axes):
    raise PlanError(f"zero_axes={zero_axes!r:.60} names no axes.", fix='zero_axes="data"')
  if not is_one_of(zero, (0, 1, 2, 3)):
    raise PlanError(f"zero={zero!r:.60} is not a stage.", fix="zero=0, 1 or 2.")
  try:
    nnx.filterlib.to_predicate(options.get("wrt", nnx.Param))
  except (TypeError, ValueError) as error:
    raise PlanError(
      f"wrt={options.get('wrt')!r:.60} is no filter of Flax.", fix="wrt=nnx.Param, a type of Variables."
    ) from error
  if (zero or zero_axes is not None) and tx is None:
    option = f"zero={zero}" if zero else f"zero_axes={zero_axes!r}"
    raise PlanError(f"{option} splits optimizer state, but there is no optimizer.", fix=fix)
  if not is_one_of(memory, (None, "device", "pinned_host")):  # what compiled programs can return arrays in
    raise PlanError(
      f"optimizer_memory={memory!r} is not a memory that state can be fetched from.",
      fix='optimizer_memory="pinned_host", or None for the device\'s own.',
    )
  if memory is not None and tx is None:
    what = f"optimizer_memory={memory!r} places optimizer state, but there is no optimizer."
    raise PlanError(what, fix=fix)


def _rules_on(mesh: AnyMesh, rules: Rules, uneven: Uneven) -> tuple[RuleSet, list[str]]:
  """The rules as they apply on a mesh, and notes on rules that were left out or added."""
  ruleset = RuleSet.of(rules)
  if scope_in_use() is None:  # else `use_rules` has put its own there
    around = LogicalRules(dict(get_logical_axis_rules()))
    for name in around.keys() & ruleset.logical.keys():
      if around[name] != ruleset.logical[name]:  # as in flax, they may not differ
        raise ShardingError(
          f"logical name {name!r} has two rules: in the plan, and in nnx.logical_axis_rules around it.",
          details=f"{show_candidates(ruleset.logical[name])} and {show_candidates(around[name])}",
          fix="keep one of them.",
        )
    ruleset = ruleset.replace({**around, **ruleset.logical}) if around else ruleset
  ruleset, left_out = on_mesh(ruleset, axis_sizes(mesh))
  if uneven != "error":  # later readers of the rules (`constrain`) then apply the plan's policy
    ruleset = ruleset.replace(uneven=dict.fromkeys(ruleset.logical, uneven) | ruleset.logical.uneven)
  return ruleset, left_out


def _notes(
  traces: Mapping[Root, Trace], rows: list[LeafPlan], batch: tuple[str, ...] | None, given: Settings
) -> list[str]:
  """Checks the finished table, and adds notes for its reader."""
  model, sizes = traces["model"].made, given.sizes
  notes: list[str] = []
  if batch is not None:  # a plan may do without axes for the batch: nothing to check then
    check_convolutions(model.node, rows, given.rules, batch, sizes)
    paths = tables(model.node)  # tied weights may be looked up under an alias
    looked_up = [row for row in rows if not paths.isdisjoint((row.path, *row.aliases))]
    notes += checks.check_tables(looked_up, batch, sizes)
    notes += own_step_notes(model.node, rows, looked_up, batch, sizes)
  notes += _overridden({**tracing.placements(traces["model"]), **traces["model"].stated}, rows)
  if whole := tracing.why_one_program(traces.values()):
    notes.append(f"created as one program, which takes longer to compile: {whole}")
  return notes


def _overridden(placed: Mapping[Path, PartitionSpec], leaves: Iterable[LeafPlan]) -> list[str]:
  """The note on arrays that `init` itself places in another way than the plan."""
  other: list[str] = []
  for leaf in leaves:
    asked = placed.get(leaf.path, leaf.spec)
    entries = itertools.zip_longest(asked, leaf.spec)
    if any(a is not PartitionSpec.UNCONSTRAINED and axes_of(a) != axes_of(b) for a, b in entries):
      other.append(f"{leaf.name} {asked}, planned {leaf.spec}")
  advice = "the plan follows annotations (out_sharding=...) and rules"
  return [f"init itself places {few(other)}: {advice}"] if other else []
