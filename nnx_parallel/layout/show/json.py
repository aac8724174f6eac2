"""Plans as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from nnx_parallel.core.mesh import AnyMesh, abstract_mesh, axis_sizes, is_explicit
from nnx_parallel.core.nodes import Path
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.leaf import Decision, LeafPlan
from nnx_parallel.layout.table import Table
from nnx_parallel.rules.fallback import Fallback
from nnx_parallel.rules.inputs import InputRules
from nnx_parallel.rules.logical import LogicalRules
from nnx_parallel.rules.paths import PathRules
from nnx_parallel.rules.ruleset import RuleSet

FORMAT = 1
_KEY_TYPES = ("threefry2x32", "rbg", "unsafe_rbg")


def to_json(plan: Table) -> str:
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


def from_json(text: str, mesh: AnyMesh | None) -> dict[str, Any]:
  """Reads what `to_json` wrote; see `ShardingPlan.from_json`. Returns the fields of a `Table`."""
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
    return _fields(data, mesh)
  except KeyError as error:
    raise PlanError(
      f"this JSON of a plan lacks {error}.", fix="write it again with plan.to_json(), and do not edit it."
    ) from error


def _fields(stored: Any, mesh: AnyMesh | None) -> dict[str, Any]:
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
  return {
    "mesh": mesh,
    "rules": _rules_from_json(stored["rules"]),
    "leaves": leaves,
    "notes": tuple(stored["notes"]),
    "zero": stored.get("zero", 0),
  }


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
