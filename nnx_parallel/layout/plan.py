"""The plan: one table of every Variable, its layout, and the decision behind it.

`plan()` builds the module and its optimizer abstractly (no array exists), decides each leaf's layout once,
and keeps the result. Creation, training, checkpoints and reports read this table; nothing else derives a
layout.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.errors import PlanError, ShardingError
from nnx_parallel.layout import optimizer_layout
from nnx_parallel.layout.mesh import AnyMesh, axis_sizes, is_explicit
from nnx_parallel.layout.resolve import Resolution, extend_spec, resolve_spec, shard_counts
from nnx_parallel.layout.rules import UNEVEN, RuleSet, Uneven
from nnx_parallel.layout.variables import (
  Names,
  Path,
  declared,
  is_rng,
  kind_of,
  path_str,
  value_of,
  variables,
)

Root = Literal["model", "optimizer"]
Source = Literal["metadata", "path rule", "fallback", "parameter", "whole"]


@dataclasses.dataclass(frozen=True)
class Decision:
  """Why a leaf has its spec.

  Attributes:
    source: what named it: its `metadata`, a `path rule`, the `fallback`, its `parameter` (optimizer state), or
      nothing: `whole`.
    reason: one short phrase for the table.
    steps: what was tried, in order, one sentence each; printed by `plan.explain(path)`.
  """

  source: Source
  reason: str
  steps: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class LeafPlan:
  """One row of the plan: a Variable (or raw array) and its layout.

  Attributes:
    root: which object it belongs to.
    path: its path parts inside that object; ints index lists.
    kind: the Variable's type name, or `array`.
    shape: global shape in elements, as the module sees it.
    dtype: its dtype; PRNG keys have theirs.
    names: the names that were resolved, or None when nothing named it.
    spec: one entry per dim.
    padding: elements that storage adds at the end of each dim.
    memory_kind: `None` for the device's default memory, or for example `"pinned_host"`.
    decision: what decided the spec.
    mesh: the plan's mesh.
  """

  root: Root
  path: Path
  kind: str
  shape: tuple[int, ...]
  dtype: Any
  names: Names | None
  spec: PartitionSpec
  padding: tuple[int, ...]
  memory_kind: str | None
  decision: Decision
  mesh: AnyMesh = dataclasses.field(repr=False)

  @functools.cached_property
  def name(self) -> str:
    """The dotted path; optimizer leaves start with `optimizer/`."""
    return path_str(self.path) if self.root == "model" else f"optimizer/{path_str(self.path)}"

  @property
  def sharding(self) -> NamedSharding:
    """The spec on the plan's mesh, with the memory kind."""
    return NamedSharding(self.mesh, self.spec, memory_kind=self.memory_kind)  # pyright: ignore[reportArgumentType]

  @property
  def storage_shape(self) -> tuple[int, ...]:
    """Global shape in elements as stored: `shape` plus `padding`."""
    return tuple(size + extra for size, extra in zip(self.shape, self.padding, strict=True))

  @property
  def shards(self) -> tuple[int, ...]:
    """How many shards each dim is cut into."""
    return shard_counts(self.spec, len(self.shape), axis_sizes(self.mesh))

  @property
  def bytes(self) -> int:
    """Global size in bytes as stored, counted once."""
    return math.prod(self.storage_shape) * self.dtype.itemsize

  @property
  def bytes_per_device(self) -> int:
    """Bytes that each device holds."""
    return self.bytes // math.prod(self.shards)

  @property
  def struct(self) -> jax.ShapeDtypeStruct:
    """The abstract array as stored: storage shape, dtype, sharding and memory kind."""
    return jax.ShapeDtypeStruct(self.storage_shape, self.dtype, sharding=self.sharding)


@dataclasses.dataclass(frozen=True, eq=False)
class ShardingPlan:
  """The layout of a model, and of its optimizer, on a mesh. Made by `plan`; see there.

  Attributes:
    mesh: the mesh that the specs refer to.
    rules: the rules that were applied.
    leaves: every Variable of the model, then of the optimizer, in flax's order.
    init: the constructor that was planned.
    tx: the optax transformation, or None when the plan has no optimizer.
    wrt: which Variables the optimizer trains.
    abstract_model: the module with `ShapeDtypeStruct` values; for reading, not for changing.
    abstract_optimizer: the optimizer likewise, or None.
    notes: what a reader should know, for example rules that matched nothing.
  """

  mesh: AnyMesh
  rules: RuleSet
  leaves: tuple[LeafPlan, ...]
  init: Callable[[], nnx.Module]
  tx: optax.GradientTransformation | None
  wrt: Any
  abstract_model: nnx.Module
  abstract_optimizer: nnx.Optimizer[Any] | None
  notes: tuple[str, ...] = ()

  def __getitem__(self, name: str) -> LeafPlan:
    """The leaf with this dotted path (`optimizer/...` for optimizer state)."""
    found = self._by_name.get(name)
    if found is None:
      raise PlanError(
        f"the plan has no leaf {name!r}.",
        details=f"nearest: {', '.join(_nearest(name, self._by_name)) or 'nothing like it'}",
        fix="list them with [leaf.name for leaf in plan.leaves].",
      )
    return found

  @functools.cached_property
  def _by_name(self) -> dict[str, LeafPlan]:
    return {leaf.name: leaf for leaf in self.leaves}

  def of(self, root: Root) -> dict[Path, LeafPlan]:
    """The leaves of one object by path.

    Args:
      root: `"model"` or `"optimizer"`.

    Returns:
      Path -> leaf, in flax's order; empty for the optimizer of a plan without one.
    """
    return {leaf.path: leaf for leaf in self.leaves if leaf.root == root}

  def abstract_state(self, root: Root = "model") -> dict[Path, jax.ShapeDtypeStruct]:
    """Abstract arrays with the planned sharding, as stored; what a restore or an AOT compile needs.

    Args:
      root: `"model"` or `"optimizer"`.

    Returns:
      Path -> `ShapeDtypeStruct` (global storage shape, dtype, sharding).
    """
    return {path: leaf.struct for path, leaf in self.of(root).items()}

  def bytes_per_device(self, root: Root | None = None) -> int:
    """Bytes that each device holds.

    Args:
      root: count only this object; both when None.

    Returns:
      Bytes per device.
    """
    return sum(leaf.bytes_per_device for leaf in self.leaves if root in (None, leaf.root))

  def explain(self, name: str) -> str:
    """How one leaf came to its layout.

    Args:
      name: its dotted path, as in `LeafPlan.name`.

    Returns:
      A few lines: what it is, what named it, what was tried, and what each device holds.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> init = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": ("embed", "mlp")})
      >>> rules = nxp.LogicalRules(embed=None, mlp="tensor")
      >>> print(nxp.plan(init, nxp.make_mesh(data=2, tensor=4), rules).explain("kernel"))
      kernel: Param float32[8,64] -> P(None, 'tensor')
        from its metadata: ('embed', 'mlp')
        'embed' -> None
        'mlp' -> 'tensor'
        each device holds float32[8,16], 512 bytes of 2048
    """
    from nnx_parallel.layout import render  # a plan must not need rich until it is printed

    return render.explain(self[name])

  def __str__(self) -> str:
    from nnx_parallel.layout import render

    return render.plan_text(self)

  def batch_spec(self, ndim: int) -> PartitionSpec:
    """The spec of an input with the batch as its first dim: the `batch` rule on dim 0, the rest whole.

    Without a `batch` rule, the batch is split over the axes called `data`, `replica` and `fsdp`, and the
    fallback's, as far as the mesh has them.

    Args:
      ndim: rank of the input; a scalar is replicated.

    Returns:
      A spec with `ndim` entries.

    Raises:
      ShardingError: no `batch` rule and no such axis.
    """
    if ndim == 0:
      return PartitionSpec()
    axes = self._batch_axes
    return PartitionSpec(axes[0] if len(axes) == 1 else axes or None, *([None] * (ndim - 1)))

  @functools.cached_property
  def _batch_axes(self) -> tuple[str, ...]:
    sizes = axis_sizes(self.mesh)
    if "batch" in self.rules.logical:
      options = self.rules.logical["batch"]
      fitting = [option for option in options if all(axis in sizes for axis in option)]
      if fitting:
        return fitting[0]
      raise ShardingError(
        "the rule for 'batch' names no axis of this mesh.",
        details=f"rule {options}, mesh {sizes}",
        fix=f'LogicalRules(batch="{next(iter(sizes))}", ...)',
      )
    known = {"data", "replica", "fsdp", *(self.rules.fallback.axes if self.rules.fallback else ())}
    axes = tuple(axis for axis in sizes if axis in known)
    if not axes:
      raise ShardingError(
        "no rule says which mesh axes split the batch.",
        details=f"mesh {sizes}, rules {self.rules}",
        fix=f'add LogicalRules(batch="{next(iter(sizes))}"), or batch=None to replicate the batch.',
      )
    return axes


def plan(
  init: Callable[[], nnx.Module],
  mesh: AnyMesh,
  rules: Any = None,
  *,
  optimizer: optax.GradientTransformation | None = None,
  wrt: Any = nnx.Param,
  uneven: Uneven = "error",
) -> ShardingPlan:
  """Plans the layout of a module, and of its optimizer, without making any array.

  Args:
    init: builds the module: a function without arguments.
    mesh: real devices (`make_mesh`) or an abstract mesh of any size (`abstract_mesh`).
    rules: `LogicalRules`, `PathRules`, a fallback such as `fsdp()`, a preset, or a sequence of these. None:
      annotations must name mesh axes, and the rest stays whole.
    optimizer: an optax transformation whose state is planned too.
    wrt: which Variables the optimizer trains; a filter as in `nnx.Optimizer`.
    uneven: what to do with a dim that its mesh axes do not divide: `"error"`, `"next"`, `"pad"` or
      `"replicate"`.

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
  is_explicit(mesh)  # refuses mixed axis types before any work is done
  if uneven not in UNEVEN:
    raise PlanError(f"uneven={uneven!r} is not a policy.", fix=f"one of {', '.join(UNEVEN)}.")
  ruleset = RuleSet.of(rules)
  model = abstract_module(init)
  builder = _Builder(mesh, ruleset, uneven)
  leaves = builder.model_leaves(model)
  abstract_optimizer = None
  if optimizer is not None:
    abstract_optimizer = _abstract_optimizer(model, optimizer, wrt)
    leaves += builder.optimizer_leaves(abstract_optimizer, leaves)
  return ShardingPlan(
    mesh,
    ruleset,
    tuple(leaves),
    init,
    optimizer,
    wrt,
    model,
    abstract_optimizer,
    tuple(builder.notes()),
  )


def abstract_module(init: Callable[[], nnx.Module]) -> nnx.Module:
  """Builds the module with `ShapeDtypeStruct` values, keeping every annotation, whatever mesh is active.

  Args:
    init: a function without arguments that returns an `nnx.Module`.

  Returns:
    The abstract module.

  Raises:
    PlanError: `init` is a module, needs arguments, or returns something else.
  """
  if isinstance(init, nnx.Module) or not callable(init):
    raise PlanError(
      f"init must be a function that builds the module, not a {type(init).__name__}.",
      fix=f"lambda: {type(init).__name__}(..., rngs=nnx.Rngs(0))",
    )
  missing = [
    p.name
    for p in inspect.signature(init).parameters.values()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  ]
  if missing:
    shown = getattr(init, "__name__", type(init).__name__)
    raise PlanError(
      f"init must take no arguments, and {shown} needs {', '.join(missing)}.",
      fix=f"lambda: {shown}({', '.join(f'{name}=...' for name in missing)})",
    )
  with nnx.use_eager_sharding(False):
    module = nnx.eval_shape(init)
  if not isinstance(module, nnx.Pytree):
    raise PlanError(
      f"init returned a {type(module).__name__}, not an nnx.Module.",
      fix="return the module itself.",
    )
  return module  # pyright: ignore[reportReturnType]


def _abstract_optimizer(model: nnx.Module, tx: optax.GradientTransformation, wrt: Any) -> nnx.Optimizer[Any]:
  if not jax.tree.leaves(nnx.state(model, wrt)):
    kinds = sorted({kind_of(leaf) for leaf in variables(model).values()})
    raise PlanError(
      f"wrt={wrt!r} selects none of the model's Variables, so there is nothing to train.",
      details=f"Variable types in the model: {', '.join(kinds)}",
      fix="wrt=nnx.Param, or a filter that matches some of them.",
    )
  with nnx.use_eager_sharding(False):
    return nnx.eval_shape(lambda: nnx.Optimizer(model, tx, wrt=wrt))


class _Builder:
  """Decides leaf by leaf, and remembers which rules fired."""

  def __init__(self, mesh: AnyMesh, rules: RuleSet, uneven: Uneven):
    self.mesh, self.rules, self.uneven = mesh, rules, uneven
    self.sizes = axis_sizes(mesh)
    self.axis_notes = rules.logical.check_axes(self.sizes)
    self.fired: set[int] = set()

  def model_leaves(self, model: nnx.Module) -> list[LeafPlan]:
    leaves: list[LeafPlan] = []
    unnamed: list[Path] = []
    for path, leaf in variables(model).items():
      row = self._model_leaf(path, leaf)
      leaves.append(row)
      if row.decision.source == "whole" and isinstance(leaf, nnx.Param):
        unnamed.append(path)
    self._check_unnamed(unnamed)
    return leaves

  def _model_leaf(self, path: Path, leaf: Any) -> LeafPlan:
    where = path_str(path)
    value = value_of(leaf)
    if is_rng(leaf):
      return self._leaf("model", path, leaf, None, None, Decision("whole", "RNG state"))
    names, own_rules = declared(leaf, where=where)
    source, reason = "metadata", f"its metadata: {names}"
    if names is None:
      matched = self._path_rule(path, len(value.shape))
      if matched is not None:
        source, reason = "path rule", f"path rule {matched[0]}: {matched[1]}"
        names = matched[1]
        if names is None:
          return self._leaf("model", path, leaf, None, None, Decision("path rule", f"{reason} (whole)"))
    if names is None:
      return self._fallback_leaf(path, leaf)
    logical = self.rules.logical
    if own_rules:
      logical = logical.replace(**own_rules)
    found = resolve_spec(names, value.shape, self.sizes, logical, path=where, uneven=self.uneven)
    steps = [f"from {reason}", *found.steps]
    fallback = self.rules.fallback
    if fallback is not None and fallback.mode == "fsdp" and fallback.extend:
      spec, why = extend_spec(found.spec, value.shape, self.sizes, fallback)
      if spec != found.spec:
        steps.append(f"extended by {fallback}: {why}")
        found = dataclasses.replace(found, spec=spec)
        reason += f" + {why}"
      else:
        steps.append(f"not extended by {fallback}: {why}")
    decision = Decision(source, reason, tuple(steps))  # pyright: ignore[reportArgumentType]
    return self._leaf("model", path, leaf, names, found, decision)

  def _path_rule(self, path: Path, ndim: int) -> tuple[str, Names | None] | None:
    for rules in self.rules.paths:
      rule = rules.match(path)
      if rule is not None:
        self.fired.add(id(rule))
        return repr(rule.pattern), rule.names_for(ndim, where=path_str(path))
    return None

  def _fallback_leaf(self, path: Path, leaf: Any) -> LeafPlan:
    value, fallback = value_of(leaf), self.rules.fallback
    whole = PartitionSpec(*([None] * len(value.shape)))
    if fallback is None or fallback.mode != "fsdp":
      reason = "no annotation" if fallback is None else f"no annotation, {fallback}"
      return self._leaf("model", path, leaf, None, None, Decision("whole", reason))
    spec, why = extend_spec(whole, value.shape, self.sizes, fallback)
    found = Resolution(spec, (0,) * len(value.shape), ())
    shown = "fsdp" if spec != whole else "whole"
    decision = Decision("fallback", f"{shown}: {why}", (f"no annotation; {fallback}: {why}",))
    return self._leaf("model", path, leaf, None, found, decision)

  def _check_unnamed(self, unnamed: list[Path]) -> None:
    fallback = self.rules.fallback
    strict = any(rules.strict for rules in self.rules.paths)
    if not unnamed or not ((fallback is None and strict) or (fallback and fallback.mode == "error")):
      return
    shown = "\n".join(f"  {path_str(path)}{self._nearest_rule(path)}" for path in unnamed[:40])
    more = f"\n  ... and {len(unnamed) - 40} more" if len(unnamed) > 40 else ""
    raise ShardingError(
      f"incomplete partition spec: {len(unnamed)} parameters have no annotation and match no rule.",
      details=shown + more,
      fix="add path rules for them (None keeps one whole), or end the rules with fsdp() or replicate().",
    )

  def _nearest_rule(self, path: Path) -> str:
    patterns = {
      p if isinstance(p, str) else ".".join(p): p
      for rules in self.rules.paths
      for p in (rule.pattern for rule in rules.rules)
    }
    near = _nearest(path_str(path), patterns)
    return f"   (nearest rule: {patterns[near[0]]!r})" if near else ""

  def optimizer_leaves(
    self, optimizer: nnx.Optimizer[Any], model_leaves: Iterable[LeafPlan]
  ) -> list[LeafPlan]:
    by_path = {leaf.path: leaf for leaf in model_leaves}
    rows: list[LeafPlan] = []
    for path, leaf in variables(optimizer).items():
      shape = tuple(value_of(leaf).shape)
      parameter = optimizer_layout.owner(path, by_path)
      if parameter is None:
        row = self._leaf("optimizer", path, leaf, None, None, Decision("whole", "not parameter state"))
      else:
        spec, padding, why = optimizer_layout.follow(by_path[parameter], shape)
        found = Resolution(spec, padding, ())
        steps = (f"state of parameter {path_str(parameter)}: {why}",)
        decision = Decision("parameter", f"{path_str(parameter)}: {why}", steps)
        row = self._leaf("optimizer", path, leaf, by_path[parameter].names, found, decision)
      rows.append(row)
    return rows

  def _leaf(
    self,
    root: Root,
    path: Path,
    leaf: Any,
    names: Names | None,
    found: Resolution | None,
    decision: Decision,
  ) -> LeafPlan:
    value = value_of(leaf)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
      raise PlanError(
        f"{path_str(path)} holds a {type(value).__name__}, which is not an array.",
        fix="wrap constants with nnx.static(...), or store an array.",
      )
    shape = tuple(value.shape)
    spec = found.spec if found else PartitionSpec(*([None] * len(shape)))
    padding = found.padding if found else (0,) * len(shape)
    return LeafPlan(
      root, path, kind_of(leaf), shape, value.dtype, names, spec, padding, None, decision, self.mesh
    )

  def notes(self) -> list[str]:
    dead = [rule.pattern for rules in self.rules.paths for rule in rules.rules if id(rule) not in self.fired]
    return self.axis_notes + [f"path rule {pattern!r} matches nothing" for pattern in dead]


def _nearest(name: str, options: Iterable[str]) -> list[str]:
  import difflib

  return difflib.get_close_matches(name, list(options), 3, cutoff=0.5)
