"""How a recipe was run, kept in its checkpoints, so that a resume can say what is different now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.layout.plan import ShardingPlan
from nnx_parallel.loop.loader import Recipe

Settings = dict[str, Any]


def settings_of(recipe: Recipe, plan: ShardingPlan, microbatches: int) -> Settings:
  """What is known without asking: JSON values by name.

  Args:
    recipe: its file is hashed, and not the modules that it imports.
    plan: says the mesh.
    microbatches: into how many parts each global batch is cut.

  Example:
    >>> import nnx_parallel as nxp
    >>> from nnx_parallel.loop.loader import load_recipe
    >>> from nnx_parallel.loop.job import plan_recipe
    >>> recipe = load_recipe("text_lm")
    >>> plan = plan_recipe(recipe, nxp.abstract_mesh(data=2, fsdp=2, tensor=2))
    >>> found = settings_of(recipe, plan, 4)
    >>> found["mesh"], found["microbatches"], len(found["source_sha256"])
    ({'data': 2, 'fsdp': 2, 'tensor': 2}, 4, 64)
  """
  settings: Settings = {"mesh": axis_sizes(plan.mesh), "microbatches": microbatches}
  source = Path(recipe.source)
  if source.is_file():  # a module may come from an archive
    settings["source_sha256"] = hashlib.sha256(source.read_bytes()).hexdigest()
  return settings


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """The settings that both know and that are not the same, as text.

  Example:
    >>> differences({"microbatches": 1, "steps": 5}, {"microbatches": 2, "steps": 5, "zero": 1})
    ['microbatches 1 -> 2']
  """
  return [f"{name} {_text(saved[name])} -> {_text(now[name])}" for name in now if _differ(name, saved, now)]


def _differ(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
  return name in saved and saved[name] != now[name]


def _text(value: Any) -> str:
  if isinstance(value, dict):
    return ",".join(f"{axis}={size}" for axis, size in value.items())
  return value[:12] if isinstance(value, str) and len(value) == 64 else json.dumps(value)
