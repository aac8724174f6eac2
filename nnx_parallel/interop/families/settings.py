"""The settings of a `config.json` that the modules of this folder follow: tables in `settings.toml`.

Every other key must have its default, or have no effect on the results of the model: a module that ignored
such a key would compute other numbers than the model does.
"""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path
from typing import Any

from nnx_parallel.errors import RecipeError
from nnx_parallel.interop.huggingface import ConfigJson

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_WITHOUT_EFFECT, _ALL = _TABLES.pop("without_effect"), _TABLES.pop("all")
FOLLOWED: dict[str, dict[str, Any]] = {
  family: {
    key: default
    for one in ([table] if family == "t5" else [_ALL, table])
    for key, default in (dict.fromkeys(one.get("optional", ())) | one["defaults"]).items()
  }
  for family, table in _TABLES.items()
}
_MAY_BE_NULL = ("sliding_window", "num_key_value_heads")
_KINDS: dict[str, type[Any]] = {
  "rope_parameters": dict,
  "rope_scaling": dict,
  "layer_types": list,
  "dense_act_fn": str,
  "is_gated_act": bool,
  "scale_decoder_outputs": bool,
}


def settings(found: ConfigJson) -> dict[str, Any]:
  """Each key that the family's module follows, as `config.json` has it, or with transformers' default."""
  family = found["model_type"]
  followed = FOLLOWED[family]
  for key, value in found.items():
    if key in followed:
      _require_kind(family, key, value, followed[key])
    elif not _is_without_effect(_TABLES[family], key, value):
      raise RecipeError(
        f"config.json has {key}={value!r}, which the module of {family!r} does not follow.",
        details=f"it follows: {', '.join(sorted(followed))}",
        fix=f"copy the module and add it; or, if the key has no effect,"
        f" nxp.interop.from_config(..., ignore=[{key!r}]).",
      )
  return {**followed, **found}


def _is_without_effect(table: dict[str, Any], key: str, value: Any) -> bool:
  if key in table.get("fixed", {}):
    return value is None or value == table["fixed"][key]
  names = (*_WITHOUT_EFFECT, *table.get("without_effect", ()))
  return value in (None, False, {}, [], "") or any(fnmatch.fnmatchcase(key, name) for name in names)


def _require_kind(family: str, key: str, value: Any, default: Any) -> None:
  if value is None and (default is None or (key in _MAY_BE_NULL and not family.startswith("gemma"))):
    return
  kind: type[Any] = _KINDS.get(key) or (int if default is None else type(default))
  kinds = (int, float) if kind is float else (kind,)
  if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
    expected = " or ".join(kind.__name__ for kind in kinds)
    raise RecipeError(
      f"config.json of a {family!r} has {key}={value!r}, where {expected} is expected.",
      fix=f"correct it, or remove it for the default, {default!r}.",
    )
