"""Checks of a finished table, and the notes of a plan for its reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flax import nnx
from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import axes_in, axes_of, count_shards, entry_of
from nnx_parallel.core.nodes import OTHER_KEYS, Names, iter_nodes, names_of, path_str
from nnx_parallel.core.text import few, list_lines
from nnx_parallel.core.types import Leaf, Variable
from nnx_parallel.errors import PlanError, ShardingError
from nnx_parallel.layout.batch import input_spec
from nnx_parallel.layout.decide import ROWS, Settings, matching_rule, nearest, unknown_names
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.tracing import Abstract
from nnx_parallel.rules.paths import shifted
from nnx_parallel.rules.ruleset import RuleSet


def check_attention(model: nnx.Module, mesh: Mapping[str, int]) -> list[str]:
  """Finds output projections with the query's names, which flax passes on unless they have their own."""
  # Logical names are an error; mesh axes are valid, though probably unintended, and give a note.
  notes: list[str] = []
  for path, module in iter_nodes(model):
    if not isinstance(module, nnx.MultiHeadAttention):
      continue
    for part in ("kernel", "bias"):
      names = _passed_on(module, part)
      if names is None:
        continue
      where = path_str((*path, "out", part))
      if all(name in mesh for name in axes_in(names)):
        notes.append(f"{where} has the query's annotation {names}; set its own with out_{part}_metadata")
      else:
        shape = getattr(module.out, part).shape
        own = ("heads", None, "embed") if part == "kernel" else ("embed",)
        raise ShardingError(
          f"{where} has the query's names, which do not fit its dims.",
          details=f"names {names}, shape {shape}: flax passes {part}_metadata on to it",
          fix=f'MultiHeadAttention(..., out_{part}_metadata={{"out_sharding": {own!r}}})',
        )
  return notes


def _passed_on(module: nnx.MultiHeadAttention, part: str) -> Names | None:
  query, out = getattr(module.query, part), getattr(module.out, part)
  if not isinstance(query, nnx.Variable) or not isinstance(out, nnx.Variable):
    return None  # no bias; or weights of another package, such as quantized weights
  names, wanted = _names(query), _names(out)
  # Names that read the same backwards can be right for both projections.
  return None if names is None or names != wanted or names == names[::-1] else names


def _names(variable: Variable) -> Names | None:
  # As written: the query's names have another rank than the output's bias.
  names = variable.get_metadata().get("out_sharding")
  return tuple(names) if isinstance(names, (tuple, list, PartitionSpec)) else None


def check_tables(tables: Iterable[LeafPlan], batch: Sequence[str], mesh: Mapping[str, int]) -> list[str]:
  """Finds look-up tables that are split by columns over axes which split the batch too."""
  found: dict[str, list[str]] = {}
  for leaf in tables:
    *front, rows, columns = map(axes_of, leaf.spec)
    both = tuple(axis for axis in columns if axis in batch and mesh[axis] > 1)
    if both:
      rest = tuple(axis for axis in columns if axis not in both)
      names = tuple(map(entry_of, (*front, rows + both, rest)))
      shards = count_shards(rows + both, mesh)
      pad = ', and pad them (uneven="pad")' if leaf.shape[ROWS] % shards else ""
      note = (
        f"split by columns over {', '.join(both)}, as the batch, so a step sends activations instead of"
        f" weights; split the rows{pad}: names {names}"
      )
      found.setdefault(note, []).append(leaf.name)
  return [
    f"{few(names)}: look-up {'tables' if names[1:] else 'table'} {note}" for note, names in found.items()
  ]


def check_complete(rows: Sequence[LeafPlan], rules: RuleSet) -> None:
  """Raises a `ShardingError` for parameters without names where the rules require names."""
  fallback = rules.fallback
  strict = any(table.strict for table in rules.paths)
  if not ((fallback is None and strict) or (fallback and fallback.mode == "require_names")):
    return
  unnamed = [row for row in rows if row.is_parameter and row.decision.source == "replicated"]
  if not unnamed:
    return
  raise ShardingError(
    f"incomplete partition spec: {len(unnamed)} parameters have no annotation and match no rule.",
    details=list_lines([f"  {row.name}{_nearest_rule(row.name, rules)}" for row in unnamed], 40),
    fix="path rules for them (None replicates an array), or nxp.fsdp() or nxp.replicate() as the last rule.",
  )


def _nearest_rule(name: str, rules: RuleSet) -> str:
  patterns = {
    p if isinstance(p, str) else ".".join(p): p
    for p in (rule.pattern for table in rules.paths for rule in table.rules)
  }
  near = nearest(name, patterns)
  return f"   (nearest rule: {patterns[near[0]]!r})" if near else ""


def check_names(rows: Iterable[LeafPlan]) -> None:
  """Refuses two arrays with one dotted path, such as the paths `("a.b",)` and `("a", "b")`."""
  seen: dict[str, LeafPlan] = {}
  for row in rows:
    other = seen.setdefault(row.name, row)
    if other is not row:
      raise PlanError(
        f"two arrays are called {row.name}.",
        details=f"their paths are {other.path} and {row.path}",
        fix="rename one of them: no dot in a key of a dict.",
      )


def check_rules(rows: Sequence[LeafPlan], model: Abstract, given: Settings) -> list[str]:
  """Notes on rules and annotations without effect."""
  rules, leaves = given.rules, [model.leaves[row.path] for row in rows]
  by_rule = [row for row in rows if row.decision.source == "path rule"]
  matched = [(row, matching_rule((row.path, *row.aliases), rules)) for row in by_rule]
  notes: list[str] = []
  pairs: list[tuple[LeafPlan, Leaf]] = [*zip(rows, leaves, strict=True)]
  short = [
    (row.name, own.short)
    for row, x in pairs
    if row.decision.source == "metadata" and (own := names_of(x, where=row.name)) and own.short
  ]
  if short:
    rule = shifted(short, {row.name: len(row.shape) for row in rows})
    notes.append(
      f"fewer names than dims, the last dims are replicated: {few([name for name, _ in short])}. For layers"
      f" stacked by nnx.vmap, add {rule}, or name the new dim by nnx.transform_metadata(partition='layers')"
      " below nnx.vmap, or by its transform_metadata={nnx.PARTITION_NAME: 'layers'}"
    )
  if any(table.optional for table in rules.paths):
    matrices = [row for row in rows if row.is_parameter and len(row.shape) > 1]
    left_out = [row.name for row in matrices if row.decision.source in ("fallback", "replicated")]
    notes += [f"without tensor parallelism, since no path rule names them: {few(left_out)}"] * bool(left_out)
  written = [(row.name, x.get_metadata()) for row, x in pairs if isinstance(x, nnx.Variable)]
  keys = [f"{name} {key}={own[key]!r}" for name, own in written for key in sorted(OTHER_KEYS & own.keys())]
  if keys:
    notes.append(f"metadata that flax does not read (an annotation is out_sharding=...): {few(keys)}")
  unknown = dict.fromkeys(
    str(name)
    for row, pair in matched
    if pair is not None and pair[0].optional
    for name in unknown_names(pair[1].names_for(len(row.shape), where=row.name) or (), given)
  )
  if unknown:
    notes.append(f"no rule for names of the path rules, so they split nothing: {few([*unknown])}")
  fired = {id(pair[1]) for _, pair in matched if pair is not None}
  required = [rule for table in rules.paths if not table.optional for rule in table.rules]
  return notes + [f"path rule {rule.pattern!r} matches nothing" for rule in required if id(rule) not in fired]


def check_use(
  rows: Iterable[LeafPlan], rules: RuleSet, batch: Sequence[str], mesh: Mapping[str, int]
) -> list[str]:
  """Notes on logical rules whose names no array has, and on mesh axes that nothing mentions."""
  rows = [*rows]
  named = {name for row in rows for name in axes_in(row.names or ())}
  splits = {name: {axis for option in rule for axis in option} for name, rule in rules.logical.items()}
  by_rank = {} if rules.inputs is None else rules.inputs.by_rank
  # Names of inputs and activations, and of presets for many models.
  ours = {"batch", "seq", *rules.optional}.union(*map(axes_in, by_rank.values()))
  unread = [name for name, axes in splits.items() if axes and name not in named | ours]
  notes = [f"no array of the model has these names, so their rules act on activations only: {few(unread)}"]
  inputs = (axes_in(input_spec(rules, rank, mesh)) for rank in by_rank)
  said = {*batch}.union(*splits.values(), *inputs, *(axes_in(row.spec) for row in rows))
  idle = [f"{axis}={size}" for axis, size in mesh.items() if size > 1 and axis not in said]
  work = f"no array and no rule uses {few(idle)}: these devices repeat the same work, unless an option of"
  return notes * bool(unread) + [f"{work} the step (pipeline=) or a layer uses them"] * bool(idle)
