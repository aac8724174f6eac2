"""Plans as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, cast

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from nnx_parallel.core.mesh import AnyMesh, abstract_mesh, axis_sizes, explicit_axes
from nnx_parallel.core.nodes import named_key_dtype
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.leaf import Decision, LeafPlan
from nnx_parallel.layout.table import PlanTable
from nnx_parallel.rules.fallback import Fallback
from nnx_parallel.rules.inputs import InputRules
from nnx_parallel.rules.logical import LogicalRules
from nnx_parallel.rules.paths import PathRules
from nnx_parallel.rules.ruleset import RuleSet

FORMAT = 2
_PLAIN_FIELDS = (
  "root", "path", "kind", "shape", "names", "padding", "memory_kind", "aliases", "is_parameter", "parameter",
)  # fmt: skip
_DEFAULTS: dict[str, Any] = {
  "memory_kind": None, "aliases": (), "is_parameter": False, "parameter": None, "intended": True,
}  # fmt: skip


def to_json(plan: PlanTable) -> str:
  """See `Plan.to_json`."""
  head: dict[str, Any] = {
    "format": FORMAT,
    "mesh": {"axes": axis_sizes(plan.mesh), "explicit": explicit_axes(plan.mesh)},
    "rules": _rules_to_json(plan.rules),
    "notes": plan.notes,
    "zero": plan.zero,
    "layers": plan.layers,
  }
  # One line per leaf, so that the difference of two files is readable.
  leaves = ",\n  ".join(json.dumps(_leaf_to_json(leaf)) for leaf in plan.leaves)
  return json.dumps(head)[:-1] + f',\n"leaves": [\n  {leaves}\n]}}\n'


def from_json(text: str) -> dict[str, Any]:
  """Reads the text of `to_json`; see `Plan.from_json`. Returns the fields of a plan."""
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
    return _fields(_tuples(data))
  except KeyError as error:
    raise PlanError(
      f"this JSON of a plan lacks {error}.", fix="write it again with plan.to_json(), and do not edit it."
    ) from error


def _fields(stored: Any) -> dict[str, Any]:
  mesh = abstract_mesh(stored["mesh"]["axes"], explicit=stored["mesh"]["explicit"])
  return {
    "mesh": mesh,
    "rules": _rules_from_json(stored["rules"]),
    "leaves": tuple(_leaf_from_json(row, mesh) for row in stored["leaves"]),
    "notes": stored["notes"],
    "zero": stored["zero"],
    "layers": stored["layers"],
  }


def _tuples(value: Any) -> Any:
  """Every list as a tuple: JSON has no other sequence, and plans and rules have no lists."""
  if isinstance(value, dict):
    return {key: _tuples(item) for key, item in cast(dict[str, Any], value).items()}
  return tuple(map(_tuples, cast(list[Any], value))) if isinstance(value, list) else value


def _leaf_to_json(leaf: LeafPlan) -> dict[str, Any]:
  for path in (leaf.path, *leaf.aliases):
    for part in path:
      _check_part(part, leaf.name)
  row = {name: getattr(leaf, name) for name in _PLAIN_FIELDS} | vars(leaf.decision)
  row |= {"dtype": str(leaf.dtype), "spec": tuple(leaf.spec)}
  return {name: value for name, value in row.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}


def _leaf_from_json(row: Mapping[str, Any], mesh: AnyMesh) -> LeafPlan:
  row = {**_DEFAULTS, **row}
  decision = Decision(**{field.name: row[field.name] for field in dataclasses.fields(Decision)})
  fields = {name: row[name] for name in _PLAIN_FIELDS}
  return LeafPlan(
    **fields, dtype=_dtype(row["dtype"]), spec=PartitionSpec(*row["spec"]), decision=decision, mesh=mesh
  )


def _check_part(part: Any, name: str) -> None:
  # Keys of a dict may be tuples of strings and ints; True would come back as 1.
  if isinstance(part, tuple):
    for item in cast(tuple[Any, ...], part):
      _check_part(item, name)
  elif isinstance(part, bool) or not isinstance(part, (str, int)):
    raise PlanError(
      f"{name} has the path part {part!r}, a {type(part).__name__}, which JSON cannot hold.",
      fix="use strings, ints or tuples of these as keys of the module.",
    )


def _dtype(name: str) -> Any:
  if not name.startswith("key<"):
    return jnp.dtype(name)
  dtype = named_key_dtype(name)
  if dtype is None:
    raise PlanError(
      f"the stored plan has PRNG keys of the unknown type {name}.",
      fix="plan again with keys of threefry2x32, rbg or unsafe_rbg.",
    )
  return dtype


def _rules_to_json(rules: RuleSet) -> dict[str, Any]:
  inputs: Any = rules.inputs
  if inputs is not None:
    by_rank = {f"map_{rank}d": names for rank, names in inputs.by_rank.items()}
    inputs = "whole mesh" if inputs.every_axis else by_rank
  return {
    "logical": dict(rules.logical),
    "unknown": rules.logical.unknown,
    "uneven": rules.logical.uneven,
    "paths": [
      {"strict": table.strict, "optional": table.optional, "rules": table.pairs()} for table in rules.paths
    ],
    "fallback": rules.fallback and dataclasses.asdict(rules.fallback),
    "inputs": inputs,
  }


def _rules_from_json(data: Mapping[str, Any]) -> RuleSet:
  fallback, inputs = data["fallback"], data["inputs"]
  logical = {name: LogicalRules.first(*options) for name, options in data["logical"].items()}
  return RuleSet(
    LogicalRules(logical, unknown=data["unknown"], uneven=data["uneven"]),
    tuple(PathRules(row["rules"], strict=row["strict"], optional=row["optional"]) for row in data["paths"]),
    fallback and Fallback(**{field.name: fallback[field.name] for field in dataclasses.fields(Fallback)}),
    InputRules.all_axes() if inputs == "whole mesh" else inputs and InputRules(**inputs),
  )
