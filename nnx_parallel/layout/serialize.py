"""Plans as JSON, the difference of two plans, and golden plans for tests."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path as File
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from nnx_parallel.errors import PlanError
from nnx_parallel.layout.inputs import InputRules
from nnx_parallel.layout.leaf import Decision, LeafPlan
from nnx_parallel.layout.mesh import AnyMesh, abstract_mesh, axis_sizes, is_explicit
from nnx_parallel.layout.render import (
  Shown,
  format_array,
  format_bytes,
  format_spec,
  grouped,
  number_pattern,
  text_table,
)
from nnx_parallel.layout.rules import Fallback, LogicalRules, PathRules, RuleSet
from nnx_parallel.layout.variables import Path, path_str

if TYPE_CHECKING:
  from nnx_parallel.layout.plan import ShardingPlan

FORMAT = 1
UPDATE = "NNX_PARALLEL_UPDATE_GOLDEN"
_KEY_TYPES = ("threefry2x32", "rbg", "unsafe_rbg")


def to_json(plan: ShardingPlan) -> str:
  """See `ShardingPlan.to_json`."""
  head: dict[str, Any] = {
    "format": FORMAT,
    "mesh": {"axes": axis_sizes(plan.mesh), "explicit": is_explicit(plan.mesh)},
    "rules": _rules_to_json(plan.rules),
    "notes": list(plan.notes),
  }
  if plan.zero:
    head["zero"] = plan.zero
  # One line per leaf, so that the difference of two files is readable.
  leaves = ",\n  ".join(json.dumps(_leaf_to_json(leaf)) for leaf in plan.leaves)
  return json.dumps(head)[:-1] + f',\n"leaves": [\n  {leaves}\n]}}\n'


@dataclasses.dataclass(frozen=True)
class Stored:
  """What a JSON plan holds."""

  mesh: AnyMesh
  rules: RuleSet
  leaves: tuple[LeafPlan, ...]
  notes: tuple[str, ...]
  zero: int


def from_json(text: str, mesh: AnyMesh | None) -> Stored:
  """Reads `to_json`'s text; see `ShardingPlan.from_json`."""
  try:
    data = json.loads(text)
  except json.JSONDecodeError as error:
    raise PlanError(f"this is not the JSON of a plan: {error}.", fix="text from plan.to_json()") from error
  if not isinstance(data, dict) or data.get("format") != FORMAT:
    seen = cast(Mapping[str, Any], data).get("format") if isinstance(data, dict) else type(data).__name__
    raise PlanError(
      "this JSON is not a plan that this version can read.",
      details=f"format {seen!r}; this version reads {FORMAT}",
      fix="write it again with plan.to_json().",
    )
  try:
    return _stored(data, mesh)
  except KeyError as error:
    raise PlanError(
      f"this JSON of a plan lacks {error}.", fix="write it again with plan.to_json(), and do not edit it."
    ) from error


def _stored(stored: Any, mesh: AnyMesh | None) -> Stored:
  axes = dict(stored["mesh"]["axes"])
  if mesh is None:
    mesh = abstract_mesh(axes, explicit=stored["mesh"]["explicit"])
  elif axis_sizes(mesh) != axes:
    raise PlanError(
      "the stored plan is for another mesh.",
      details=f"stored {axes}, given {axis_sizes(mesh)}",
      fix="pass a mesh of the stored shape, or plan again for the new one.",
    )
  leaves = tuple(_leaf_from_json(row, mesh) for row in stored["leaves"])
  return Stored(
    mesh, _rules_from_json(stored["rules"]), leaves, tuple(stored["notes"]), stored.get("zero", 0)
  )


def _leaf_to_json(leaf: LeafPlan) -> dict[str, Any]:
  row: dict[str, Any] = {
    "root": leaf.root,
    "path": [_part_to_json(part, leaf.name) for part in leaf.path],
    "kind": leaf.kind,
    "shape": leaf.shape,
    "dtype": str(leaf.dtype),
    "names": leaf.names,
    "spec": list(leaf.spec),
    "source": leaf.decision.source,
    "reason": leaf.decision.reason,
    "steps": leaf.decision.steps,
  }
  if any(leaf.padding):
    row["padding"] = leaf.padding
  if leaf.memory_kind:
    row["memory_kind"] = leaf.memory_kind
  if not leaf.decision.chosen:
    row["chosen"] = False
  if leaf.aliases:
    row["aliases"] = [[_part_to_json(part, leaf.name) for part in path] for path in leaf.aliases]
  if leaf.parameter is not None:
    row["parameter"] = [_part_to_json(part, leaf.name) for part in leaf.parameter]
  if leaf.is_parameter != _sounds_like_parameter(row):
    row["is_parameter"] = leaf.is_parameter
  return row


def _sounds_like_parameter(row: Mapping[str, Any]) -> bool:
  return row["root"] == "model" and "Param" in row["kind"]


def _leaf_from_json(row: Mapping[str, Any], mesh: AnyMesh) -> LeafPlan:
  shape = tuple(row["shape"])
  decision = Decision(row["source"], row["reason"], tuple(row["steps"]), row.get("chosen", True))
  names = row["names"]
  return LeafPlan(
    row["root"],
    _path(row["path"]),
    row["kind"],
    shape,
    _dtype(row["dtype"]),
    None if names is None else tuple(_entry(name) for name in names),
    PartitionSpec(*(_entry(entry) for entry in row["spec"])),
    tuple(row.get("padding") or (0,) * len(shape)),
    row.get("memory_kind"),
    decision,
    mesh,
    tuple(_path(path) for path in row.get("aliases", ())),
    row.get("is_parameter", _sounds_like_parameter(row)),
    _path(row["parameter"]) if "parameter" in row else None,
  )


def _part_to_json(part: Any, name: str) -> Any:
  # Lists stand for tuples, so that 1 and "1", and ("a", 1) and "('a', 1)", stay different.
  if isinstance(part, bool) or not isinstance(part, (str, int, tuple)):
    raise PlanError(
      f"{name} has the path part {part!r}, a {type(part).__name__}, which JSON cannot hold.",
      fix="use strings, ints or tuples of these as keys of the module.",
    )
  return [_part_to_json(item, name) for item in part] if isinstance(part, tuple) else part  # pyright: ignore[reportUnknownVariableType]


def _path(parts: Iterable[Any]) -> Path:
  return tuple(_path(part) if isinstance(part, list) else part for part in parts)


def _entry(entry: Any) -> Any:
  return tuple(entry) if isinstance(entry, list) else entry


def _dtype(name: str) -> Any:
  if not name.startswith("key<"):
    return jnp.dtype(name)
  for implementation in _KEY_TYPES:
    dtype = jax.eval_shape(lambda impl=implementation: jax.random.key(0, impl=impl)).dtype
    if str(dtype) == name:
      return dtype
  raise PlanError(
    f"the stored plan has PRNG keys of the unknown type {name}.",
    details=f"known implementations: {', '.join(_KEY_TYPES)}",
    fix="plan again with one of these.",
  )


def _rules_to_json(rules: RuleSet) -> dict[str, Any]:
  return {
    "logical": {name: [list(option) for option in options] for name, options in rules.logical.items()},
    "unknown": rules.logical.unknown,
    "uneven": rules.logical.uneven,
    "paths": [
      {
        "strict": table.strict,
        "optional": table.optional,
        "rules": [[rule.pattern, rule.names] for rule in table.rules],
      }
      for table in rules.paths
    ],
    "fallback": dataclasses.asdict(rules.fallback) if rules.fallback else None,
    "inputs": _inputs_to_json(rules.inputs),
  }


def _rules_from_json(data: Mapping[str, Any]) -> RuleSet:
  logical = {name: [tuple(option) for option in options] for name, options in data["logical"].items()}
  paths = tuple(
    PathRules(
      [
        (_entry(pattern), None if names is None else tuple(_entry(name) for name in names))
        for pattern, names in table["rules"]
      ],
      strict=table["strict"],
      optional=table.get("optional", False),
    )
    for table in data["paths"]
  )
  stored: Any = data["fallback"]
  fallback = stored and Fallback(stored["mode"], tuple(stored["axes"]), stored["min_size"], stored["extend"])
  logical_rules = LogicalRules(logical, unknown=data["unknown"], uneven=data["uneven"])
  return RuleSet(logical_rules, paths, fallback, _inputs_from_json(data["inputs"]))


def _inputs_to_json(inputs: InputRules | None) -> Any:
  return inputs and ("whole mesh" if inputs.every_axis else [[k, list(v)] for k, v in inputs.by_rank.items()])


def _inputs_from_json(data: Any) -> InputRules | None:
  if data is None:
    return None
  if data == "whole mesh":
    return InputRules.whole_mesh()
  return InputRules({rank: tuple(_entry(entry) for entry in entries) for rank, entries in data})


@dataclasses.dataclass(frozen=True)
class Change:
  """One field of one leaf that differs between two plans."""

  name: str
  field: str
  before: str
  after: str


@dataclasses.dataclass(frozen=True)
class PlanDiff(Shown):
  """The difference of two plans; prints as a table, and is falsy when they lay everything out alike.

  Attributes:
    mesh: the two meshes' axes, when they differ.
    removed: leaves that only the first plan has.
    added: leaves that only the second plan has.
    changes: what differs in the leaves of both.
    bytes_per_device: of the first plan and of the second.
  """

  mesh: tuple[dict[str, int], dict[str, int]] | None
  removed: tuple[LeafPlan, ...]
  added: tuple[LeafPlan, ...]
  changes: tuple[Change, ...]
  bytes_per_device: tuple[int, int]

  def __bool__(self) -> bool:
    return bool(self.mesh or self.removed or self.added or self.changes)

  def __str__(self) -> str:
    if not self:
      return "the plans lay everything out alike."
    rows: list[tuple[str, ...]] = []
    alike: dict[tuple[str, ...], list[str]] = {}
    for change in self.changes:
      pattern = number_pattern(change.name)
      alike.setdefault((pattern, change.field, change.before, change.after), []).append(change.name)
    for (pattern, field, before, after), names in alike.items():
      rows.append((pattern if len(names) > 1 else names[0], str(len(names)), field, before, after))
    for label, leaves in (("only before", self.removed), ("only after", self.added)):
      for name, found in grouped(leaves):
        shown = f"{format_array(found[0].dtype, found[0].shape)} {format_spec(found[0].spec)}"
        sides = (shown, "-") if label == "only before" else ("-", shown)
        rows.append((name, str(len(found)), "leaf", *sides))
    lines = [f"mesh {self.mesh[0]} -> {self.mesh[1]}"] if self.mesh else []
    if rows:
      lines += text_table(("changed", "n", "what", "before", "after"), rows, right=(1,)).splitlines()
    before, after = map(format_bytes, self.bytes_per_device)
    return "\n".join([*lines, f"per device {before} -> {after}"])


def diff(before: ShardingPlan, after: ShardingPlan) -> PlanDiff:
  """See `ShardingPlan.diff`."""
  old, new = ({leaf.name: leaf for leaf in p.leaves} for p in (before, after))
  changes: list[Change] = []
  for name, leaf in old.items():
    if name in new:
      pairs = zip(_layout(leaf).items(), _layout(new[name]).values(), strict=True)
      changes += [Change(name, field, a, b) for (field, a), b in pairs if a != b]
  meshes = axis_sizes(before.mesh), axis_sizes(after.mesh)
  return PlanDiff(
    meshes if list(meshes[0].items()) != list(meshes[1].items()) else None,
    tuple(leaf for name, leaf in old.items() if name not in new),
    tuple(leaf for name, leaf in new.items() if name not in old),
    tuple(changes),
    (before.bytes_per_device(), after.bytes_per_device()),
  )


def _layout(leaf: LeafPlan) -> dict[str, str]:
  return {
    "array": format_array(leaf.dtype, leaf.shape),
    "type": leaf.kind,
    "spec": format_spec(leaf.spec),
    "stored as": format_array("", leaf.storage_shape) if any(leaf.padding) else "-",
    "memory": leaf.memory_kind or "default",
    "tied to": ", ".join(map(path_str, leaf.aliases)) or "-",
  }


def golden_text(plan: ShardingPlan) -> str:
  """The layout alone, one line for each leaf, in a form that reviewers can read: what golden files hold."""
  mesh = " ".join(f"{axis}={size}" for axis, size in axis_sizes(plan.mesh).items())
  rows = [f"{leaf.name}: {'  '.join(v for v in _layout(leaf).values() if v != '-')}" for leaf in plan.leaves]
  held = f"{plan.bytes_per_device()} bytes per device"
  return "\n".join([f"mesh {mesh}", *rows, held, ""])


def assert_golden_plan(
  plan: ShardingPlan, file: str | os.PathLike[str], *, update: bool | None = None
) -> None:
  """Fails when a plan's layout is not the one in a file that is kept with the tests.

  Reasons and rules may change freely; types, shapes, dtypes, specs, padding and bytes may not.

  Args:
    plan: the plan to check.
    file: a text file, for example `tests/golden/llama_fsdp.txt`.
    update: write the file instead of comparing; by default, whether the environment variable
      `NNX_PARALLEL_UPDATE_GOLDEN` is `1`.

  Raises:
    AssertionError: the layout differs (the message has the lines that do), or the file does not exist.

  Example:
    >>> import tempfile, nnx_parallel as nxp
    >>> from flax import nnx
    >>> from nnx_parallel.layout.serialize import assert_golden_plan
    >>> init = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   assert_golden_plan(plan, f"{folder}/linear.txt", update=True)
    ...   assert_golden_plan(plan, f"{folder}/linear.txt")
  """
  target, now = File(file), golden_text(plan)
  if os.environ.get(UPDATE) == "1" if update is None else update:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(now)
    return
  how = f"If that is meant, write it with {UPDATE}=1 and read the difference in review."
  if not target.exists():
    raise AssertionError(f"the golden plan {target} does not exist. {how}")
  lines = difflib.unified_diff(
    target.read_text().splitlines(), now.splitlines(), str(target), "this plan", lineterm="", n=0
  )
  changes = "\n".join(lines)
  if changes:
    raise AssertionError(f"the layout is not the golden one:\n{changes}\n{how}")
