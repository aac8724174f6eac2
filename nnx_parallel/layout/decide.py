"""The decisions behind a plan: the layout of each Variable, and the reason."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import axes_of
from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.nodes import (
  OTHER_KEYS,
  Names,
  Path,
  aliases,
  array_leaves,
  declared,
  is_rng,
  kind_of,
  path_str,
  value_of,
)
from nnx_parallel.core.text import few, listed
from nnx_parallel.errors import PlanError, ShardingError
from nnx_parallel.layout import checks as lookup
from nnx_parallel.layout import optimizer_layout
from nnx_parallel.layout.leaf import Decision, LeafPlan, Root, Source
from nnx_parallel.layout.resolve import Extended, Resolution, extend_spec, resolve_spec
from nnx_parallel.rules.fallback import Fallback
from nnx_parallel.rules.logical import LogicalRules, Uneven, check_axes
from nnx_parallel.rules.ruleset import RuleSet


class Decisions:
  """Decides leaf by leaf, and records which rules were used."""

  def __init__(self, mesh: AnyMesh, rules: RuleSet, uneven: Uneven):
    self.mesh, self.rules = mesh, rules
    self.uneven: Uneven = uneven
    self.sizes = axis_sizes(mesh)
    self.zero_notes: list[str] = []
    self.short: list[str] = []
    self.left_out: list[str] = []
    self.without_rule: dict[str, None] = {}
    self.other_keys: list[str] = []
    self.axis_notes = check_axes(rules.logical, self.sizes)
    self.fired: set[int] = set()
    self.path_rules = sum(len(table.rules) for table in rules.paths)
    self.tables: frozenset[int] = frozenset()
    self.table_leaves: list[LeafPlan] = []

  def model_leaves(self, model: nnx.Module) -> list[LeafPlan]:
    """Decides every array of the abstract module, in flax's order."""
    tied, self.tables = aliases(model), lookup.tables(model)
    leaves: list[LeafPlan] = []
    unnamed: list[Path] = []
    for path, leaf in array_leaves(model).items():
      row = self._model_leaf((path, *tied.get(path, ())), leaf)
      if path in tied:
        row = dataclasses.replace(row, aliases=tied[path])
      leaves.append(row)
      if id(leaf) in self.tables:
        self.table_leaves.append(row)
      if row.decision.source == "replicated" and isinstance(leaf, nnx.Param):
        unnamed.append(path)
    self._check_unnamed(unnamed)
    return leaves

  def _model_leaf(self, paths: tuple[Path, ...], leaf: Any) -> LeafPlan:
    path = paths[0]
    where = path_str(path)
    value = _array(leaf, where)
    if is_rng(leaf):
      return self._leaf("model", path, leaf, Decision("replicated", "RNG state"))
    source: Source = "metadata"
    names, own_rules = declared(leaf, where=where)
    self.other_keys += [f"{where} {key}={value!r}" for key, value in _other_metadata(leaf)]
    step, reason = f"from its metadata: {names}", f"names {_shown(names)}"
    if names is not None and 0 < _written(leaf) < len(names):
      self.short.append(where)
    if names is None:
      matched = self._path_rule(paths, len(value.shape))
      if matched is None:
        if any(table.optional for table in self.rules.paths) and _is_matrix(leaf):
          self.left_out.append(where)
        return self._fallback_leaf(path, leaf)
      source, (pattern, names) = "path rule", matched
      step = f"no annotation; path rule {pattern!r}: {names or 'whole'}"
      reason = f"rule {abbreviated(pattern)!r}"
      if names is None:
        return self._leaf("model", path, leaf, Decision(source, f"{reason}: whole", (step,)))
      reason += f": {_shown(names)}"
    logical = self.rules.logical
    if own_rules:
      logical = logical.replace(own_rules)
      step += f" with its own sharding_rules {own_rules}"
    found = resolve_spec(names, value.shape, self.sizes, logical, path=where, uneven=self.uneven)
    if any(found.padding) and not isinstance(leaf, nnx.Variable):
      found = _unpadded(names, value.shape, found)
    steps, missed = [step, *found.steps], _missed(names, found.spec, logical)
    if missed:
      reason += "; " + next(
        (s for s in found.steps if s.startswith(f"{missed[0]!r} ->")), f"{missed[0]} whole"
      )
    fallback = self.rules.fallback
    if fallback is not None and fallback.mode == "fsdp" and fallback.extend:
      stored = [size + extra for size, extra in zip(value.shape, found.padding, strict=True)]
      more, why, brief = self._extended(found.spec, stored, fallback, leaf)
      if more.added:
        steps.append(f"extended by {fallback}: {why}")
        reason += f" + {brief}"
        padding = tuple(map(sum, zip(found.padding, more.padding, strict=True)))
        found = dataclasses.replace(found, spec=more.spec, padding=padding)
      else:
        steps.append(f"not extended by {fallback}: {why}")
    return self._leaf("model", path, leaf, Decision(source, reason, tuple(steps), not missed), names, found)

  def _extended(
    self, spec: PartitionSpec, shape: Sequence[int], fallback: Fallback, leaf: Any
  ) -> tuple[Extended, str, str]:
    """`extend_spec`, and what it did in brief."""
    rows = len(shape) + lookup.ROWS if id(leaf) in self.tables else None
    # A raw array has no place for its shape without padding.
    pad = self.uneven == "pad" and isinstance(leaf, nnx.Variable)
    more, why = extend_spec(spec, shape, self.sizes, fallback, rows=rows, pad=pad)
    return more, why, _brief(more, rows) if more.added else why

  def _path_rule(
    self, paths: tuple[Path, ...], ndim: int
  ) -> tuple[str | tuple[str, ...], Names | None] | None:
    """The first rule that matches any of the paths of a Variable, which may be tied."""
    for table, rule in ((some, rule) for some in self.rules.paths for rule in some.rules):
      if any(map(rule.matches, paths)):
        self.fired.add(id(rule))
        names = rule.names_for(ndim, where=path_str(paths[0]))
        return rule.pattern, self._known(names) if table.optional and names is not None else names
    return None

  def _known(self, names: Names) -> Names:
    """The names of a table for a family of models, without those that the rules do not have."""
    known = {*self.rules.logical, *self.sizes}
    if self.rules.logical.unknown == "replicate":
      return names
    unknown = [name for name in names if name is not None and not {*axes_of(name)} <= known]
    self.without_rule |= dict.fromkeys(map(str, unknown))
    return tuple(None if name in unknown else name for name in names)

  def _fallback_leaf(self, path: Path, leaf: Any) -> LeafPlan:
    value, fallback = value_of(leaf), self.rules.fallback
    whole = PartitionSpec(*([None] * len(value.shape)))
    step = "no annotation"
    if self.path_rules:
      step += f"; none of {self.path_rules} path rules matches"
    if fallback is None or fallback.mode != "fsdp":
      reason = "no annotation" if fallback is None else f"no annotation, {fallback}"
      intended = fallback is not None and fallback.mode == "replicate"
      decision = Decision("replicated", reason, (f"{step}; {fallback or 'no fallback'}: whole",), intended)
      return self._leaf("model", path, leaf, decision)
    more, why, reason = self._extended(whole, value.shape, fallback, leaf)
    found = Resolution(more.spec, more.padding, ())
    intended = bool(more.added) or math.prod(value.shape) <= fallback.min_size
    decision = Decision("fallback", reason, (f"{step}; {fallback}: {why}",), intended)
    return self._leaf("model", path, leaf, decision, found=found)

  def _check_unnamed(self, unnamed: list[Path]) -> None:
    fallback = self.rules.fallback
    strict = any(rules.strict for rules in self.rules.paths)
    if not unnamed or not ((fallback is None and strict) or (fallback and fallback.mode == "require_names")):
      return
    raise ShardingError(
      f"incomplete partition spec: {len(unnamed)} parameters have no annotation and match no rule.",
      details=listed([f"  {path_str(path)}{self._nearest_rule(path)}" for path in unnamed], 40),
      fix="add path rules for them (None replicates one), or end the rules with fsdp() or replicate().",
    )

  def _nearest_rule(self, path: Path) -> str:
    patterns = {
      p if isinstance(p, str) else ".".join(p): p
      for rules in self.rules.paths
      for p in (rule.pattern for rule in rules.rules)
    }
    near = nearest(path_str(path), patterns)
    return f"   (nearest rule: {patterns[near[0]]!r})" if near else ""

  def optimizer_leaves(
    self,
    optimizer: nnx.Optimizer[Any],
    model_leaves: Iterable[LeafPlan],
    *,
    zero_axes: tuple[str, ...],
    memory_kind: str | None,
    factored_dims: Mapping[Path, tuple[int | None, ...]],
  ) -> list[LeafPlan]:
    """Decides the state of an optimizer, which follows the parameters.

    Args:
      optimizer: the abstract optimizer.
      model_leaves: the rows of the model.
      zero_axes: axes of a ZeRO stage, which split it further; empty with stage 0.
      memory_kind: where state of parameters is stored between steps; None is device memory.
      factored_dims: path -> dims of the parameter, for state with ambiguous shapes.
    """
    by_path = {leaf.path: leaf for leaf in model_leaves}
    rows: list[LeafPlan] = []
    spread = False
    state = array_leaves(optimizer)
    owned = optimizer_layout.parameters_of(filter(optimizer_layout.of_parameters(state), state), by_path)
    for path, leaf in state.items():
      shape = tuple(value_of(leaf).shape)
      parameter = owned.get(path)
      if parameter is None:
        row = self._leaf("optimizer", path, leaf, Decision("replicated", "not parameter state"))
      else:
        spec, padding, why = optimizer_layout.layout_after_parameter(
          by_path[parameter], shape, factored_dims.get(path)
        )
        own = self._own_layout(leaf, by_path[parameter])
        if own is not None:
          spec, padding, why = own
        if zero_axes:
          stored = [size + extra for size, extra in zip(shape, padding, strict=True)]
          before = spec
          spec, more = optimizer_layout.add_zero_axes(spec, stored, zero_axes, self.sizes)
          spread = spread or spec != before
          why += f"; {more}"
        found = Resolution(spec, padding, ())
        steps = (f"state of parameter {path_str(parameter)}: {why}",)
        decision = Decision("parameter", why, steps)
        row = self._leaf("optimizer", path, leaf, decision, by_path[parameter].names, found)
        row = dataclasses.replace(row, parameter=parameter)
        if shape:  # scalars are not worth a transfer
          row = dataclasses.replace(row, memory_kind=memory_kind)
      rows.append(row)
    if zero_axes and not spread:
      axes = ", ".join(f"{axis}={self.sizes[axis]}" for axis in zero_axes)
      self.zero_notes = [f"zero splits nothing: {axes}, and no optimizer state has a dim left for them"]
    return rows

  def _own_layout(self, leaf: Any, parameter: LeafPlan) -> tuple[PartitionSpec, tuple[int, ...], str] | None:
    """The layout of state whose parameter has `optimizer_sharding`, which flax copies to the state."""
    shape = tuple(value_of(leaf).shape)
    if not isinstance(leaf, nnx.OptVariable) or shape != parameter.shape:
      return None
    names, own_rules = declared(leaf, where=parameter.name)
    if names is None or (parameter.decision.source == "metadata" and names == parameter.names):
      return None
    logical = self.rules.logical.replace(own_rules) if own_rules else self.rules.logical
    found = resolve_spec(
      names, shape, self.sizes, logical, path=f"the state of {parameter.name}", uneven="next"
    )
    return found.spec, found.padding, f"its optimizer_sharding: {_shown(names)}"

  def _leaf(
    self,
    root: Root,
    path: Path,
    leaf: Any,
    decision: Decision,
    names: Names | None = None,
    found: Resolution | None = None,
  ) -> LeafPlan:
    value = _array(leaf, path_str(path))
    shape = tuple(value.shape)
    spec = found.spec if found else PartitionSpec(*([None] * len(shape)))
    padding = found.padding if found else (0,) * len(shape)
    return LeafPlan(
      root=root,
      path=path,
      kind=kind_of(leaf),
      shape=shape,
      dtype=value.dtype,
      names=names,
      spec=spec,
      padding=padding,
      memory_kind=None,
      decision=decision,
      mesh=self.mesh,
      is_parameter=root == "model" and isinstance(leaf, nnx.Param),
    )

  def notes(self) -> list[str]:
    """Notes for the reader of a plan: axes and rules without effect."""
    tables = [rules for rules in self.rules.paths if not rules.optional]
    dead = [rule.pattern for rules in tables for rule in rules.rules if id(rule) not in self.fired]
    short = (
      f"fewer names than dims, the last dims are replicated: {few(self.short)} (a layer stacked by nnx.vmap"
    )
    short += " needs transform_metadata={nnx.PARTITION_NAME: 'layers'})"
    notes = self.axis_notes + self.zero_notes + ([short] if self.short else [])
    if self.left_out:
      notes.append(f"without tensor parallelism, since no path rule names them: {few(self.left_out)}")
    if self.other_keys:
      notes.append(
        f"metadata that flax does not read (an annotation is out_sharding=...): {few(self.other_keys)}"
      )
    if self.without_rule:
      notes.append(f"no rule for names of the path rules, so they split nothing: {few([*self.without_rule])}")
    return notes + [f"path rule {pattern!r} matches nothing" for pattern in dead]


def _array(leaf: Any, where: str) -> Any:
  value = value_of(leaf)
  if hasattr(value, "shape") and hasattr(value, "dtype"):
    return value
  raise PlanError(
    f"{where} holds a {type(value).__name__} instead of one array, so it has no layout.",
    details=f"Variable type {kind_of(leaf)}",
    fix="give each array its own Variable, for example in an nnx.Dict or nnx.List.",
  )


def _other_metadata(leaf: Any) -> list[tuple[str, Any]]:
  if not isinstance(leaf, nnx.Variable):
    return []
  metadata: Mapping[str, Any] = leaf.get_metadata()
  return [(key, metadata[key]) for key in sorted(OTHER_KEYS & metadata.keys())]


def _is_matrix(leaf: Any) -> bool:
  return isinstance(leaf, nnx.Param) and len(value_of(leaf).shape) > 1


def _written(leaf: nnx.Variable[Any]) -> int:
  """How many names the user wrote in a tuple; 0 for a spec, whose missing entries mean None."""
  names = leaf.get_metadata("out_sharding", None)
  return len(names) if isinstance(names, (tuple, list)) else 0


def abbreviated(pattern: str | tuple[str, ...]) -> str | tuple[str, ...]:
  """A rule's pattern for a table; a long one ends after one of its alternatives.

  Example:
    >>> abbreviated(("attn|attention|self_attention", "c_attn|qkv|q_proj|k_proj|query|key", "kernel"))
    ('attn|attention|…', 'c_attn|qkv|…', 'kernel')
  """
  if isinstance(pattern, tuple):
    return tuple(_cut(part, 16) for part in pattern)
  return _cut(pattern, 32)


def _cut(text: str, size: int) -> str:
  if len(text) <= size:
    return text
  alternatives = text.rfind("|", 0, size)
  return text[: alternatives + 1 or size] + "…"


def _shown(names: Names | None) -> str:
  parts = ["-" if n is None else n if isinstance(n, str) else "+".join(n) for n in names or ()]
  return f"({', '.join(parts)})"


def _brief(found: Extended, rows: int | None) -> str:
  def which(dim: int) -> str:
    return "its rows" if dim == rows else "the largest dim" + ("" if found.padding[dim] else " that divides")

  said = [
    f"{'+'.join(axes)} on {which(dim)}{', padded' * bool(found.padding[dim])}" for axes, dim in found.added
  ]
  return ", ".join(said)


def _unpadded(names: Names, shape: tuple[int, ...], found: Resolution) -> Resolution:
  """Replicates padded dims of an array without a Variable, which its module would see with the padding."""
  entries: list[Any] = []
  steps = [step for step in found.steps if " is padded to " not in step]
  for name, size, entry, extra in zip(names, shape, found.spec, found.padding, strict=True):
    entries.append(None if extra else entry)
    if extra and name is not None:
      shown = name if isinstance(name, str) else "+".join(name)
      steps.append(f"{shown!r} -> whole: {size} would be padded, which only an nnx.Variable hides")
  return Resolution(PartitionSpec(*entries), (0,) * len(shape), tuple(steps))


def _missed(names: Names, spec: PartitionSpec, logical: LogicalRules) -> list[str]:
  """Names whose first candidate would split their dim, which is replicated all the same."""
  return [
    name if isinstance(name, str) else "+".join(name)
    for name, entry in zip(names, spec, strict=True)
    if name is not None and entry is None and _first_choice(name, logical)
  ]


def _first_choice(name: str | tuple[str, ...], logical: LogicalRules) -> tuple[str, ...]:
  parts = (name,) if isinstance(name, str) else name
  if logical.unknown == "replicate":
    parts = tuple(part for part in parts if part in logical)
  return tuple(axis for part in parts for axis in (logical[part][0] if part in logical else (part,)))


def nearest(name: str, options: Iterable[str]) -> list[str]:
  """Up to three options that a mistyped name may mean, the most similar first."""
  return difflib.get_close_matches(name, list(options), 3, cutoff=0.5)
