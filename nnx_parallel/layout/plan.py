"""The plan: one table of every Variable, its layout, and the decision behind it.

`plan()` builds the module and its optimizer abstractly (no array exists), decides the layout of each leaf
once, and keeps the result. Creation, training, checkpoints and reports read this table, and derive no layout.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.linen import get_logical_axis_rules
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.core.axes import axes_of, entry_of
from nnx_parallel.core.layers import find_layers
from nnx_parallel.core.mesh import AnyMesh, axis_sizes, is_explicit
from nnx_parallel.core.nodes import Path, array_leaves, kind_of, path_str, value_of
from nnx_parallel.core.padding import logical_transformation
from nnx_parallel.core.text import as_html, few, format_array
from nnx_parallel.errors import PlanError
from nnx_parallel.layout import offload, optimizer_layout
from nnx_parallel.layout.batch import batch_axes, no_batch_axes
from nnx_parallel.layout.checks import check_attention, check_depthwise, check_tables
from nnx_parallel.layout.constrain import rules_in_scope
from nnx_parallel.layout.decide import Decisions
from nnx_parallel.layout.known_faults import fault_notes, possible_faults
from nnx_parallel.layout.leaf import LeafPlan, Root
from nnx_parallel.layout.sharded_optimizer import Placement
from nnx_parallel.layout.show import audit, diff, json, picture, text
from nnx_parallel.layout.show.audit import Audit, Trainable
from nnx_parallel.layout.show.diff import PlanDiff
from nnx_parallel.layout.table import Table
from nnx_parallel.layout.tracing import (
  Trace,
  factored_dims,
  placements,
  trace_module,
  trace_optimizer,
  why_one_program,
)
from nnx_parallel.rules.logical import UNEVEN, Uneven
from nnx_parallel.rules.ruleset import Rules, RuleSet, on_mesh

if TYPE_CHECKING:
  from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StoredPlan(Table):
  """A plan without its constructor: what can be looked at and compared. Made by `ShardingPlan.from_json`.

  Attributes:
    mesh: the mesh that the specs refer to.
    rules: the rules that were applied.
    leaves: every Variable of the model, then of the optimizer, in flax's order.
    notes: for the reader, for example rules that matched nothing.
    zero: ZeRO stage of the optimizer state (1), and of the gradients too (2).
    layers: the layers of the model, a line for each group.
  """

  def explain(self, name: str) -> str:
    """How one leaf came to its layout.

    Args:
      name: its dotted path, as in `LeafPlan.name`; of a tied Variable, any of its paths.

    Returns:
      A few lines: what it is, what named it, what was tried and dropped and why, what each device holds, and
      the optimizer state that follows it.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> names = {"out_sharding": ("embed", "mlp")}
      >>> init = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0), kernel_metadata=names)
      >>> rules = nxp.LogicalRules(embed=None, mlp="tensor")
      >>> print(nxp.plan(init, nxp.make_mesh(data=2, tensor=4), rules).explain("kernel"))
      kernel: Param float32[8,64] -> P(None, 'tensor')
        from its metadata: ('embed', 'mlp')
        'embed' -> None
        'mlp' -> 'tensor'
        each device holds float32[8,16], 512 bytes of 2048 (2 copies on 8 devices)
    """
    return text.explain(self, self[name])

  def __repr__(self) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in axis_sizes(self.mesh).items())
    return f"<{type(self).__name__}: {len(self.leaves)} arrays on mesh {mesh}; print it for the table>"

  def __str__(self) -> str:
    return text.plan_text(self)

  def _repr_html_(self) -> str:
    return as_html(text.plan_text(self, width=160))

  def show(self) -> None:
    """Prints the plan: in colours and the terminal's width, or as HTML in a notebook."""
    text.show(self)

  def picture(self, name: str) -> Figure:
    """Draws which devices hold which block of an array.

    Args:
      name: the leaf's dotted path.

    Returns:
      A matplotlib figure; its `savefig` writes SVG, PNG or PDF. At most 16 x 16 blocks are drawn, and the
      others are counted below.

    Raises:
      ReportError: matplotlib is not installed.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> init = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0))
      >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0))
      >>> plan.picture("kernel").axes[0].get_xlabel()
      'dim 1 over fsdp'
    """
    return picture.draw_blocks(self[name])

  def audit(self, *, min_bytes: int = 2**20) -> Audit:
    """Lists the large leaves that every device holds in full, and what could split them.

    Args:
      min_bytes: leaves of at most this many bytes are not reported.

    Returns:
      An `Audit`, worst first: prints as a table; empty (falsy) when nothing large is replicated. Its
      `faults` are known faults of XLA that a step of your own may meet on this layout.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> plan = nxp.plan(lambda: nnx.Linear(1024, 512, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8))
      >>> [(found.leaf.name, found.wasted, found.remedy) for found in plan.audit()]
      [('kernel', 1835008, 'fsdp could split dim 0 (1024)')]
    """
    sizes, leaves = axis_sizes(self.mesh), [leaf for leaf in self.leaves if leaf.root == "model"]
    batch = batch_axes(self.rules, sizes) or ()
    faults = fault_notes(possible_faults(leaves, None, self.rules, batch, sizes), sizes, batch)[1]
    return dataclasses.replace(audit.audit(self, min_bytes=min_bytes), faults=tuple(faults))

  def warn_replicated(self, *, stacklevel: int = 2) -> bool:
    """Warns, once and in one line, about large parameters that are replicated without a rule.

    There is no warning for a parameter that a rule replicates (`None`, `replicate()`, the threshold of
    `fsdp()`); `audit` lists it too.

    Args:
      stacklevel: as in `warnings.warn`; 2 points at the caller of this method.

    Returns:
      Whether there was anything to warn about.
    """
    return audit.warn_replicated(self, stacklevel=stacklevel + 1)

  def diff(self, other: Table) -> PlanDiff:
    """What changes in the layout from this plan to another.

    Args:
      other: the plan to compare with: of another mesh, other rules, another version of the model.

    Returns:
      A `PlanDiff`: prints as a table; falsy when both layouts are equal. Reasons are not compared.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> init, mesh = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8)
      >>> before, after = nxp.plan(init, mesh, nxp.replicate()), nxp.plan(init, mesh, nxp.fsdp(min_size=64))
      >>> print(before.diff(after))
      changed  n  what  before  after
      kernel   1  spec  whole   (-, fsdp)
      per device 2.25 KiB -> 512 B
    """
    check_plan(other, "plan.diff(other)", Table)
    return diff.diff(self, other)

  def to_json(self) -> str:
    """The plan as JSON: mesh axes, rules, and every leaf with its decision; not the constructor.

    Returns:
      JSON text, one line for each leaf; `from_json` reads it.

    Raises:
      PlanError: a path part that is no string, int or tuple of these.
    """
    return json.to_json(self)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ShardingPlan(StoredPlan):
  """The layout of a model, and of its optimizer, on a mesh, and how both are built; made by `plan`.

  Attributes:
    mesh: the mesh that the specs refer to.
    rules: the rules that were applied.
    leaves: every Variable of the model, then of the optimizer, in flax's order.
    notes: for the reader, for example rules that matched nothing.
    zero: ZeRO stage of the optimizer state (1), and of the gradients too (2).
    layers: the layers of the model, a line for each group.
    init: the constructor that was planned.
    tx: the optax transformation, or None when the plan has no optimizer.
    wrt: which Variables the optimizer trains.
    abstract_model: the module with `ShapeDtypeStruct` values; for reading, not for changing.
    abstract_optimizer: the optimizer with `ShapeDtypeStruct` values, or None.
  """

  init: Callable[[], nnx.Module]
  abstract_model: nnx.Module
  tx: optax.GradientTransformation | None = None
  wrt: Any = nnx.Param
  abstract_optimizer: nnx.Optimizer[Any] | None = None

  def trainable(self, wrt: Any = None) -> Trainable:
    """Counts what a filter trains and what it leaves frozen, before anything is built.

    Args:
      wrt: a filter as in `nnx.Optimizer`; the plan's own when None.

    Returns:
      The trained and frozen leaves; prints counts, bytes and paths.

    Raises:
      PlanError: the filter selects nothing.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> plan = nxp.plan(lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8))
      >>> print(plan.trainable(nnx.PathContains("bias")))
      trained      1 arrays               64 elements   256 B in all, 256 B per device
      frozen       1 arrays              512 elements   2 KiB in all, 2 KiB per device
      trained: bias
      frozen: kernel
    """
    return audit.trainable(self, self.abstract_model, self.wrt if wrt is None else wrt)

  @overload
  @classmethod
  def from_json(cls, text: str, *, mesh: AnyMesh | None = None) -> StoredPlan: ...

  @overload
  @classmethod
  def from_json(
    cls,
    text: str,
    *,
    mesh: AnyMesh | None = None,
    init: Callable[[], nnx.Module],
    optimizer: optax.GradientTransformation | None = None,
    wrt: Any = nnx.Param,
  ) -> ShardingPlan: ...

  @classmethod
  def from_json(
    cls,
    text: str,
    *,
    mesh: AnyMesh | None = None,
    init: Callable[[], nnx.Module] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    wrt: Any = nnx.Param,
  ) -> StoredPlan:
    """Reads a plan back: to compare with, to look at, or, with `init`, to create and restore from.

    Args:
      text: what `to_json` wrote.
      mesh: a mesh with the stored axes; an abstract one when None.
      init: the constructor. Its Variables must be those of the stored plan; they get the stored layout,
        whatever the rules are now. Without it the result is a `StoredPlan`, to print and compare.
      optimizer: the optax transformation, when the stored plan has optimizer state.
      wrt: which Variables it trains.

    Returns:
      A plan with the stored layout.

    Raises:
      PlanError: not a plan's JSON, a mesh with other axes, or a module that is not the stored one.
    """
    fields = json.from_json(text, mesh)
    if init is None and optimizer is not None:
      raise no_constructor()
    if init is None:
      return StoredPlan(**fields)
    model = trace_module(init, fields["mesh"]).node
    state = None if optimizer is None else trace_optimizer(model, optimizer, wrt).node
    fix = "pass the init (and optimizer) that the plan was made for, or plan again."
    check_structure(fields["leaves"], model, state, "the stored plan is for another module", fix)
    return cls(**fields, init=init, abstract_model=model, tx=optimizer, wrt=wrt, abstract_optimizer=state)

  @functools.cached_property
  def live_tx(self) -> Any:
    """The transformation of live optimizers: `tx` for padded arrays and for state in host memory."""
    tx = self.tx
    if tx is not None and any(any(leaf.padding) for leaf in self.leaves):
      tx = logical_transformation(tx, nnx.as_pure(nnx.state(self.abstract_model, self.wrt)))
    away = {path_str(leaf.path[1:]): leaf.bytes_per_device for leaf in self.leaves if leaf.on_host}
    return offload.streamed(tx, away) if tx is not None and away else tx

  @functools.cached_property
  def placement(self) -> Placement:
    """The shardings that live optimizers keep in a user's own step."""
    roots: tuple[Root, ...] = ("model", "optimizer")
    model, optimizer = ({path: leaf.sharding for path, leaf in self.of(root).items()} for root in roots)
    return Placement(model, optimizer, self.zero, self._scattered)

  @property
  def _scattered(self) -> dict[Path, NamedSharding]:
    """The shardings of gradients in the layout of their optimizer state, where that is split further."""
    parameters, found = self.of("model"), dict[Path, NamedSharding]()
    for leaf in self.leaves:
      own = parameters[leaf.parameter] if leaf.parameter is not None else leaf
      if leaf.shape == own.shape and math.prod(leaf.shards) > math.prod(own.shards):
        # The state may be stored in the host's memory; gradients are not.
        found.setdefault(own.path, NamedSharding(self.mesh, leaf.spec))  # pyright: ignore[reportArgumentType]
    return found


def no_constructor() -> PlanError:
  """The error for a plan that was read from JSON without its constructor, and so cannot create."""
  return PlanError(
    "this plan was read from JSON without its constructor, so it cannot build a module.",
    fix="ShardingPlan.from_json(text, mesh=mesh, init=init, optimizer=...)",
  )


def check_plan(plan: object, call: str, kind: type[Table] = ShardingPlan) -> None:
  """Raises a `PlanError` unless `plan` is a plan of this kind; `call` is the call that works."""
  if isinstance(plan, StoredPlan) and not isinstance(plan, kind):
    raise no_constructor()
  if not isinstance(plan, kind):
    raise PlanError(
      f"{call.partition('(')[0]} needs a plan, and got a value of type {type(plan).__name__}.",
      fix=f"{call}, with plan = nxp.plan(init, mesh, rules).",
    )


def check_structure(leaves: Iterable[LeafPlan], model: Any, optimizer: Any, what: str, fix: str) -> None:
  """Raises a `PlanError` for the first array of a built module or optimizer that is not as planned."""
  planned = {leaf.name: _described(leaf.kind, leaf.shape, leaf.dtype, leaf.is_parameter) for leaf in leaves}
  built: dict[str, str] = {}
  for prefix, node in (("", model), ("optimizer/", optimizer)):
    for path, leaf in array_leaves(node).items() if node is not None else ():
      value, is_parameter = value_of(leaf), not prefix and isinstance(leaf, nnx.Param)
      # Numbers and numpy arrays have the dtype that jax gives them under a trace.
      dtype = value.dtype if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) else jnp.result_type(value)
      built[prefix + path_str(path)] = _described(kind_of(leaf), np.shape(value), dtype, is_parameter)
  for name in dict.fromkeys([*planned, *built]):
    if planned.get(name) != built.get(name):
      details = f"planned {planned.get(name, 'nothing')}, built {built.get(name, 'nothing')}"
      raise PlanError(f"{what}: {name}.", details=details, fix=fix)


def _described(kind: str, shape: tuple[int, ...], dtype: Any, is_parameter: bool) -> str:
  return f"{kind} {format_array(dtype, shape)}" + (", a parameter" if is_parameter else "")


class PlanOptions(TypedDict, total=False):
  """The options of `plan`."""

  optimizer: optax.GradientTransformation | None
  wrt: Any
  uneven: Uneven
  zero: int
  zero_axes: Sequence[str] | str | None
  optimizer_memory: str | None


def plan(
  init: Callable[[], nnx.Module],
  mesh: AnyMesh,
  rules: Rules = None,
  *,
  optimizer: optax.GradientTransformation | None = None,
  wrt: Any = nnx.Param,
  uneven: Uneven = "error",
  zero: int = 0,
  zero_axes: Sequence[str] | str | None = None,
  optimizer_memory: str | None = None,
) -> ShardingPlan:
  """Plans the layout of a module, and of its optimizer, without making any array.

  Args:
    init: builds the module: a function without arguments.
    mesh: real devices (`make_mesh`) or an abstract mesh of any size (`abstract_mesh`).
    rules: `LogicalRules`, `PathRules`, a fallback such as `fsdp()`, a preset, or a sequence of these. None:
      annotations must name mesh axes, and other arrays are replicated. Names without a rule here get that of
      an active `nnx.logical_axis_rules`, with a note.
    optimizer: an optax transformation whose state is planned too.
    wrt: which Variables the optimizer trains; a filter as in `nnx.Optimizer`.
    uneven: what to do with a dim that its mesh axes do not divide: `"error"`, `"next"`, `"pad"` or
      `"replicate"`.
    zero: ZeRO stage of the optimizer state: 1 splits it over `zero_axes` too, beyond its parameter's layout;
      2 is the same state, and `train_step` keeps the gradients in its layout too. Stage 3 is `fsdp()`.
    zero_axes: the axes of that split; those of the batch when not given.
    optimizer_memory: where the optimizer state of parameters is stored between steps. With `"pinned_host"` it
      is off the devices; the optimizer fetches it, a few parameters at a time, and puts it back.

  Returns:
    A `ShardingPlan`: print it, `explain` it, create from it, restore into it.

  Raises:
    ShardingError: names, rules or fallback that do not fit a Variable; the message has its path.
    PlanError: `init` is not a constructor, or `wrt` selects nothing.

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


def plan_with_traces(
  init: Callable[[], nnx.Module],
  mesh: AnyMesh,
  rules: Rules = None,
  *,
  optimizer: optax.GradientTransformation | None = None,
  wrt: Any = nnx.Param,
  uneven: Uneven = "error",
  zero: int = 0,
  zero_axes: Sequence[str] | str | None = None,
  optimizer_memory: str | None = None,
) -> tuple[ShardingPlan, dict[Root, Trace]]:
  """Like `plan`; also returns the traces, for a caller that creates the model right away.

  A plan does not keep them: what `init` reads (a seed, a table) may change before a later creation.
  """
  is_explicit(mesh)  # refuses mixed axis types before any work is done
  if isinstance(rules, optax.GradientTransformation):
    raise PlanError("rules got an optax transformation.", fix="plan(init, mesh, rules, optimizer=...)")
  if uneven not in UNEVEN:
    raise PlanError(f"uneven={uneven!r} is not a policy.", fix=f"one of {', '.join(UNEVEN)}.")
  if (zero or zero_axes is not None) and optimizer is None:
    option = f"zero={zero}" if zero else f"zero_axes={zero_axes!r}"
    raise PlanError(
      f"{option} splits optimizer state, and there is no optimizer.", fix="optimizer=optax.adamw(...)"
    )
  offload.check_kind(optimizer_memory)
  if optimizer_memory is not None and optimizer is None:
    raise PlanError(
      f"optimizer_memory={optimizer_memory!r} places optimizer state, and there is no optimizer.",
      fix="optimizer=optax.adamw(...)",
    )
  ruleset, left_out = on_mesh(RuleSet.of(rules), axis_sizes(mesh))
  ruleset, context_notes = _with_context(ruleset, axis_sizes(mesh))
  if uneven != "error":  # later readers of the rules (`constrain`) then apply the plan's policy
    ruleset = ruleset.replace(uneven=dict.fromkeys(ruleset.logical, uneven) | ruleset.logical.uneven)
  traces: dict[Root, Trace] = {"model": trace_module(init, mesh)}
  model = traces["model"].node
  decisions = Decisions(mesh, ruleset, uneven)
  found = left_out + context_notes + check_attention(model, decisions.sizes)
  leaves = decisions.model_leaves(model)
  batch = batch_axes(ruleset, decisions.sizes)
  if batch is not None:  # a plan may do without axes for the batch: nothing to check then
    faults = possible_faults(leaves, model, ruleset, batch, decisions.sizes)
    found += fault_notes(faults, decisions.sizes, batch)[0]
    found += check_depthwise(model, leaves, batch, decisions.sizes)
    found += check_tables(decisions.table_leaves, batch, decisions.sizes)
  abstract_optimizer = None
  if optimizer is not None:
    if zero and zero_axes is None and batch is None:
      raise no_batch_axes(ruleset, decisions.sizes)
    axes = optimizer_layout.zero_axes(zero, zero_axes, batch or (), decisions.sizes)
    traces["optimizer"] = trace_optimizer(model, optimizer, wrt)
    abstract_optimizer = traces["optimizer"].node
    leaves += decisions.optimizer_leaves(
      abstract_optimizer,
      leaves,
      zero_axes=axes,
      memory_kind=None if optimizer_memory == "device" else optimizer_memory,
      factored_dims=factored_dims(model, optimizer, wrt, abstract_optimizer),
    )
  _check_names(leaves)
  found += _overridden(placements(traces["model"]), leaves)
  if whole := why_one_program(traces.values()):
    found.append(f"created as one program, which takes longer to compile: {whole}")
  made = ShardingPlan(
    mesh=mesh,
    rules=ruleset,
    leaves=tuple(leaves),
    notes=tuple(found + decisions.notes()),
    layers=tuple(map(str, find_layers(model))),
    zero=zero,
    init=init,
    abstract_model=model,
    tx=optimizer,
    wrt=wrt,
    abstract_optimizer=abstract_optimizer,
  )
  return made, traces


def _check_names(leaves: Iterable[LeafPlan]) -> None:
  """Refuses two arrays of one dotted path, such as those at `("a.b",)` and `("a", "b")`."""
  seen: dict[str, LeafPlan] = {}
  for leaf in leaves:
    other = seen.setdefault(leaf.name, leaf)
    if other is not leaf:
      raise PlanError(
        f"two arrays are called {leaf.name}.",
        details=f"their paths are {other.path} and {leaf.path}",
        fix="rename one of them: no dot in a key of a dict.",
      )


def _with_context(rules: RuleSet, mesh: Mapping[str, int]) -> tuple[RuleSet, list[str]]:
  """Adds the rules of an active `nnx.logical_axis_rules` whose axes the mesh has, as flax would."""
  # flax.nnx exports the context, flax.linen what reads it. Within a scope, its rules are those of the scope.
  active = () if rules_in_scope() is not None else get_logical_axis_rules()
  context = {name: axes_of(axes) for name, axes in active if set(axes_of(axes)) <= set(mesh)}
  added = {name: axes for name, axes in context.items() if name not in rules.logical}
  notes = [f"rules of nnx.logical_axis_rules: {few([*added])}"] if added else []
  notes += [
    f"nnx.logical_axis_rules has another rule for {name!r}, {entry_of(axes)!r}; the plan uses its own rule"
    for name, axes in context.items()
    if name in rules.logical and rules.logical[name] != (axes,)
  ]
  return rules.replace(added), notes


def _overridden(placed: Mapping[Path, PartitionSpec], leaves: Iterable[LeafPlan]) -> list[str]:
  """The note on arrays that `init` itself places in another way than the plan."""
  other: list[str] = []
  for leaf in leaves:
    asked = placed.get(leaf.path, leaf.spec) if leaf.root == "model" else leaf.spec
    entries = itertools.zip_longest(asked, leaf.spec)
    if any(a is not PartitionSpec.UNCONSTRAINED and axes_of(a) != axes_of(b) for a, b in entries):
      other.append(f"{leaf.name} {asked}, planned {leaf.spec}")
  advice = "the plan follows annotations (out_sharding=...) and rules"
  return [f"init itself places {few(other)}: {advice}"] if other else []
