"""The decisions behind a plan: the layout of each Variable, and the reason."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from flax import nnx
from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import Entry, axes_in, axes_of
from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.nodes import (
  Names,
  Path,
  aliases,
  is_rng,
  iter_nodes,
  kind_of,
  mesh_of,
  names_of,
  path_str,
  value_of,
)
from nnx_parallel.core.types import AnyArray, Leaf
from nnx_parallel.errors import PlanError, ShardingError
from nnx_parallel.layout import optimizer_layout
from nnx_parallel.layout.known_faults import dilated_kernels
from nnx_parallel.layout.leaf import Decision, LeafPlan, Root, Source
from nnx_parallel.layout.resolve import Extended, Resolution, extend_spec, resolve_spec
from nnx_parallel.layout.tracing import Trace
from nnx_parallel.rules.fallback import Fallback
from nnx_parallel.rules.logical import LogicalRules, Uneven
from nnx_parallel.rules.paths import PathRule, PathRules, shifted, show_names
from nnx_parallel.rules.ruleset import RuleSet

ROWS = -2
"""The dim of a look-up table's rows: `nnx.vmap` stacks tables in front of it."""


class Settings(NamedTuple):
  """The facts that decide the layout of an array, besides the array."""

  mesh: AnyMesh
  rules: RuleSet
  uneven: Uneven

  @property
  def sizes(self) -> dict[str, int]:
    """Mesh axis -> size in devices."""
    return axis_sizes(self.mesh)


class Named(NamedTuple):
  """The names of an array and their origin."""

  names: Names | None  # None where a path rule replicates the array
  logical: LogicalRules
  source: Source
  reason: str
  step: str
  short: Names = ()  # names from metadata that are fewer than dims


class Offered(NamedTuple):
  """What `fsdp` may split of an array."""

  is_table: bool  # whether it is a look-up table, whose rows come first
  taps: int  # the number of spatial dims of a dilated kernel, which stay whole: XLA gets their gradient wrong


def model_rows(traced: Trace, given: Settings) -> list[LeafPlan]:
  """Decides every array of a traced module, in flax's order."""
  model = traced.made
  _check_one_mesh(model.leaves)
  tied, embeddings, dilated = aliases(model.node), tables(model.node), dilated_kernels(model.node)
  rows: list[LeafPlan] = []
  for path, leaf in model.leaves.items():
    others = tied.get(path, ())
    offered = Offered(not embeddings.isdisjoint((path, *others)), dilated.get(path, 0))
    row = _model_row((path, *others), leaf, offered, given, traced.stated.get(path))
    rows.append(dataclasses.replace(row, aliases=others))
  return rows


def tables(model: nnx.Module) -> set[Path]:
  """The paths of look-up tables: the `embedding` of every `nnx.Embed`, also where a head is tied to it."""
  found = ((path, module) for path, module in iter_nodes(model) if isinstance(module, nnx.Embed))
  return {(*path, "embedding") for path, module in found if len(module.embedding.shape) >= -ROWS}


def _model_row(
  paths: tuple[Path, ...], leaf: Leaf, offered: Offered, given: Settings, stated: PartitionSpec | None
) -> LeafPlan:
  value = _array(leaf, path_str(paths[0]))
  if is_rng(leaf):
    own = names_of(leaf, where=path_str(paths[0]))
    return _row("model", paths[0], leaf, given, Decision("replicated", "RNG state"), own and own.names)
  if stated is not None and names_of(leaf, where=path_str(paths[0])) is None:
    why = f"stated by init: {stated}"
    found = Resolution(stated, (0,) * len(stated), ())
    return _row("model", paths[0], leaf, given, Decision("stated", why, (why,)), found=found)
  named = _find_names(paths, leaf, given)
  if named is None:
    return _fallback_row(paths[0], leaf, offered, given)
  names, logical, source, reason, step, short = named
  if names is None:
    return _row("model", paths[0], leaf, given, Decision(source, reason, (step,)))
  where = path_str(paths[0])
  try:
    found = resolve_spec(names, value.shape, given.sizes, logical, path=where, uneven=given.uneven)
  except ShardingError as error:
    _check_mesh(leaf, where, given, error)
    if not short:
      raise
    rule = shifted([(where, short)], {where: len(value.shape)})
    fix = f"{error.fix}\nIf the layer is stacked, its names belong to the last dims: {rule}"
    raise type(error)(error.what, details=error.details, fix=fix) from error
  if any(found.padding) and not isinstance(leaf, nnx.Variable):
    found = _drop_padding(names, value.shape, found)
  steps, missed = [step, *found.steps], _missed(names, found.spec, logical)
  if missed:
    whole = f"{missed[0]} replicated"
    reason += "; " + next((s for s in found.steps if s.startswith(f"{missed[0]!r} ->")), whole)
  fallback = given.rules.fallback
  if fallback is not None and fallback.mode == "fsdp" and fallback.extend:
    more, why, brief = _extend(found, value.shape, fallback, leaf, offered, given)
    steps.append(f"{'extended' if more.added else 'not extended'} by {fallback}: {why}")
    reason += f" + {brief}" if more.added else ""
    padding = tuple(map(sum, zip(found.padding, more.padding, strict=True)))
    found = dataclasses.replace(found, spec=more.spec, padding=padding)
  decision = Decision(source, reason, tuple(steps), not missed)
  return _row("model", paths[0], leaf, given, decision, names, found)


def _check_one_mesh(leaves: Mapping[Path, Leaf]) -> None:
  """Refuses one axis with two sizes in the meshes that Variables name: the plan has one."""
  seen: dict[str, tuple[Path, int]] = {}
  for path, leaf in leaves.items():
    own = mesh_of(leaf)
    names = names_of(leaf, where=path_str(path)) if own is not None else None
    sizes = axis_sizes(own) if own is not None and names is not None else {}
    for axis in sizes.keys() & {*axes_in(names.names if names else ())}:
      other, size = seen.setdefault(axis, (path, sizes[axis]))
      if size != sizes[axis]:
        raise ShardingError(
          f"{path_str(other)} and {path_str(path)} name different meshes, and a plan has one for all arrays.",
          details=f"{axis}={size} and {axis}={sizes[axis]}",
          fix=f"give one axis another name, with a rule such as nxp.LogicalRules({axis}2=('x', 'y'));\n"
          "or make one plan for each mesh, with the part of the model that is on it.",
        )


def _check_mesh(leaf: Leaf, where: str, given: Settings, error: ShardingError) -> None:
  """Says so if a Variable whose names do not fit was made for another mesh."""
  own = mesh_of(leaf)
  if own is None or axis_sizes(own) == given.sizes:
    return
  raise ShardingError(
    f"{where} names another mesh than the mesh of the plan, and a plan has one mesh for all arrays.",
    details=f"its mesh {axis_sizes(own)}, the plan's {given.sizes}\n{error.what}",
    fix=f"{error.fix.splitlines()[0]}\nOr make one plan for each mesh, with its part of the model;"
    " nxp.parallel.send moves arrays between meshes.",
  ) from error


def _find_names(paths: tuple[Path, ...], leaf: Leaf, given: Settings) -> Named | None:
  """The names from the metadata, or from the first path rule that matches or that completes them; or None."""
  where, logical = path_str(paths[0]), given.rules.logical
  own = names_of(leaf, where=where)
  short = own.short if own is not None else ()
  matched = matching_rule(paths, given.rules) if own is None or short else None
  completes = matched is not None and (matched[1].names or ())[-len(short) :] == short
  if own is not None and not completes:
    reason, step = f"names {_shown(own.names)}", f"from its metadata: {own.names}"
    if own.rules:
      logical = logical.replace(own.rules)
      reason, step = f"{reason} by its own sharding_rules", f"{step} with its own sharding_rules {own.rules}"
    return Named(own.names, logical, "metadata", reason, step, short)
  if matched is None:
    return None
  table, rule = matched
  names = rule.names_for(len(value_of(leaf).shape), where=where)
  if names is not None and table.optional:
    unknown = unknown_names(names, given)
    names = tuple(None if name in unknown else name for name in names)
  reason = f"rule {abbreviated(rule.pattern)!r}: {'replicated' if names is None else _shown(names)}"
  before = "no annotation" if own is None else f"its metadata {show_names(short)} does not name all dims"
  step = f"{before}; path rule {rule.pattern!r}: {names or 'replicated'}"
  return Named(names, logical, "path rule", reason, step)


def matching_rule(paths: Iterable[Path], rules: RuleSet) -> tuple[PathRules, PathRule] | None:
  """The first rule that matches any of the paths of a Variable, which may be tied, and its table."""
  pairs = ((table, rule) for table in rules.paths for rule in table.rules)
  return next((pair for pair in pairs if any(map(pair[1].matches, paths))), None)


def unknown_names(names: Names, given: Settings) -> list[Entry]:
  """The names of a rule for a family of models that the plan's rules do not have, and so leave out."""
  known = {*given.rules.logical, *given.sizes}
  if given.rules.logical.unknown == "replicate":
    return []
  return [name for name in names if name is not None and not {*axes_of(name)} <= known]


def _extend(
  found: Resolution, shape: Sequence[int], fallback: Fallback, leaf: Leaf, offered: Offered, given: Settings
) -> tuple[Extended, str, str]:
  """`extend_spec`, the reason, and its effect in brief."""
  stored = [size + extra for size, extra in zip(shape, found.padding, strict=True)]
  rows = len(shape) + ROWS if offered.is_table else None
  whole = range(len(shape) - 2 - offered.taps, len(shape) - 2)
  # A raw array has no place for its shape without padding.
  pad = given.uneven == "pad" and isinstance(leaf, nnx.Variable)
  more, why = extend_spec(found.spec, stored, given.sizes, fallback, rows=rows, whole=whole, pad=pad)
  return more, why, _brief(more, rows) if more.added else why


def _fallback_row(path: Path, leaf: Leaf, offered: Offered, given: Settings) -> LeafPlan:
  shape, fallback = value_of(leaf).shape, given.rules.fallback
  count = sum(len(table.rules) for table in given.rules.paths)
  step = f"no annotation; none of {count} path rules matches" if count else "no annotation"
  if fallback is None or fallback.mode != "fsdp":
    reason = "no annotation" if fallback is None else f"no annotation, {fallback}"
    intended = fallback is not None and fallback.mode == "replicate"
    decision = Decision("replicated", reason, (f"{step}; {fallback or 'no fallback'}: replicated",), intended)
    return _row("model", path, leaf, given, decision)
  more, why, reason = _extend(_replicated(shape), shape, fallback, leaf, offered, given)
  intended = bool(more.added) or math.prod(shape) <= fallback.min_size
  decision = Decision("fallback", reason, (f"{step}; {fallback}: {why}",), intended)
  return _row("model", path, leaf, given, decision, found=Resolution(more.spec, more.padding, ()))


def optimizer_rows(
  optimizer: Trace, model: Iterable[LeafPlan], given: Settings, *, memory_kind: str | None
) -> Iterator[LeafPlan]:
  """Decides the state of an optimizer: it follows the parameters, and is stored in this memory."""
  by_path = {row.path: row for row in model}
  for path, leaf in optimizer.made.leaves.items():
    if path in optimizer.matrices:
      spec, padding, why = optimizer_layout.layout_of_matrices(value_of(leaf).shape, given.sizes)
      decision = Decision("parameter", why, (f"state of parallel.per_matrix: {why}",))
      row = _row("optimizer", path, leaf, given, decision, found=Resolution(spec, padding, ()))
      yield dataclasses.replace(row, memory_kind=memory_kind)
      continue
    parameter = by_path.get(optimizer.origins.get(path, ()))
    if parameter is None:
      yield _row("optimizer", path, leaf, given, Decision("replicated", "not parameter state"))
      continue
    shape = tuple(value_of(leaf).shape)
    own = _own_layout(leaf, parameter, given)
    after = optimizer_layout.layout_after_parameter
    names, spec, padding, why = own or (parameter.names, *after(parameter, shape))
    decision = Decision("parameter", why, (f"state of parameter {path_str(parameter.path)}: {why}",))
    row = _row("optimizer", path, leaf, given, decision, names, Resolution(spec, padding, ()))
    # Scalars are not worth a transfer.
    yield dataclasses.replace(row, parameter=parameter.path, memory_kind=memory_kind if shape else None)


def split_further(row: LeafPlan, axes: tuple[str, ...]) -> LeafPlan:
  """The row of a parameter's state, split over the axes of a ZeRO stage too."""
  if row.parameter is None or not axes:
    return row
  spec, more = optimizer_layout.add_zero_axes(row.spec, row.storage_shape, axes, axis_sizes(row.mesh))
  why = f"{row.decision.reason}; {more}"
  decision = Decision("parameter", why, (f"state of parameter {path_str(row.parameter)}: {why}",))
  return dataclasses.replace(row, spec=spec, decision=decision)


def _own_layout(
  leaf: Leaf, parameter: LeafPlan, given: Settings
) -> tuple[Names, PartitionSpec, tuple[int, ...], str] | None:
  """Names and layout of state whose parameter has `optimizer_sharding`, which flax copies to the state."""
  shape = tuple(value_of(leaf).shape)
  if not isinstance(leaf, nnx.OptVariable) or shape != parameter.shape:
    return None
  own, source = names_of(leaf, where=parameter.name), parameter.decision.source
  if own is None or (source == "metadata" and own.names == parameter.names):
    return None
  if source == "path rule" and own.short:
    return None
  logical = given.rules.logical.replace(own.rules) if own.rules else given.rules.logical
  where = f"the state of {parameter.name}"
  found = resolve_spec(own.names, shape, given.sizes, logical, path=where, uneven="next")
  return own.names, found.spec, found.padding, f"its optimizer_sharding: {_shown(own.names)}"


def _replicated(shape: Sequence[int]) -> Resolution:
  return Resolution(PartitionSpec(*([None] * len(shape))), (0,) * len(shape), ())


def _row(
  root: Root,
  path: Path,
  leaf: Leaf,
  given: Settings,
  decision: Decision,
  names: Names | None = None,
  found: Resolution | None = None,
) -> LeafPlan:
  value = _array(leaf, path_str(path))
  shape = tuple(value.shape)
  found = found or _replicated(shape)
  return LeafPlan(
    root=root,
    path=path,
    kind=kind_of(leaf),
    shape=shape,
    dtype=value.dtype,
    names=names,
    spec=found.spec,
    padding=found.padding,
    memory_kind=None,
    decision=decision,
    mesh=given.mesh,
    is_parameter=root == "model" and isinstance(leaf, nnx.Param),
  )


def _array(leaf: Leaf, where: str) -> AnyArray:
  value = value_of(leaf)
  if hasattr(value, "shape") and hasattr(value, "dtype"):
    return value
  raise PlanError(
    f"{where} holds a {type(value).__name__} instead of one array, so it has no layout.",
    details=f"Variable type {kind_of(leaf)}",
    fix="give each array its own Variable, for example in an nnx.Dict or nnx.List.",
  )


def abbreviated(pattern: str | tuple[str, ...]) -> str | tuple[str, ...]:
  """A rule's pattern for a table; a long one ends after one of its alternatives: `attn|attention|…`."""
  if isinstance(pattern, tuple):
    return tuple(_cut(part, 16) for part in pattern)
  return _cut(pattern, 32)


def _cut(text: str, size: int) -> str:
  if len(text) <= size:
    return text
  alternatives = text.rfind("|", 0, size)
  return text[: alternatives + 1 or size] + "…"


def _shown(names: Names | None) -> str:
  return f"({', '.join('+'.join(axes_of(name)) or '-' for name in names or ())})"


def _brief(found: Extended, rows: int | None) -> str:
  def which(dim: int) -> str:
    return "its rows" if dim == rows else "the largest dim" + ("" if found.padding[dim] else " that divides")

  said = [
    f"{'+'.join(axes)} on {which(dim)}{', padded' * bool(found.padding[dim])}" for axes, dim in found.added
  ]
  return ", ".join(said)


def _drop_padding(names: Names, shape: tuple[int, ...], found: Resolution) -> Resolution:
  """Replicates padded dims of an array without a Variable, which its module would see with the padding."""
  entries: list[Entry] = []
  steps = [step for step in found.steps if " is padded to " not in step]
  for name, size, entry, extra in zip(names, shape, found.spec, found.padding, strict=True):
    entries.append(None if extra else entry)
    if extra and name is not None:
      shown = "+".join(axes_of(name))
      steps.append(f"{shown!r} -> replicated: {size} would be padded, which only an nnx.Variable hides")
  return Resolution(PartitionSpec(*entries), (0,) * len(shape), tuple(steps))


def _missed(names: Names, spec: PartitionSpec, logical: LogicalRules) -> list[str]:
  """Names whose first candidate would split their dim, although the dim is replicated."""
  found: list[str] = []
  for parts, entry in zip(map(axes_of, names), spec, strict=True):
    known = [part for part in parts if part in logical or logical.unknown != "replicate"]
    if entry is None and any(logical[part][0] if part in logical else (part,) for part in known):
      found.append("+".join(parts))
  return found


def nearest(name: str, options: Iterable[str]) -> list[str]:
  """Up to three options that a mistyped name may mean, the most similar first."""
  return difflib.get_close_matches(name, list(options), 3, cutoff=0.5)
