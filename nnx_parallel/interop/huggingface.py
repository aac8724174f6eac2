"""Weight maps for models of Hugging Face: tables by family, found from `config.json`.

The tables are data: `huggingface.toml`. Their paths are those of `nnx_parallel.recipes.families`.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.safetensors import read_tensors
from nnx_parallel.interop.weights import Rule, WeightMap

CONFIG = "config.json"
TABLES = Path(__file__).with_name("huggingface.toml")


def weight_map_of(folder: str | os.PathLike[str]) -> WeightMap:
  """Finds the weight map of a model on Hugging Face, for import and for export.

  Args:
    folder: holds `config.json`. Where it also holds the weights, their names decide between the names that
      older and newer files have.

  Returns:
    The weight map; arrays in the file have the dtype that `config.json` names, float32 without.

  Raises:
    CheckpointError: no `config.json`, or a family without a table.

  Example:
    >>> import json, pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "dtype": "bfloat16"}
    >>> _ = (folder / "config.json").write_text(json.dumps(config))
    >>> rule = weight_map_of(folder).rules[2]
    >>> rule.file, rule.model[0]
    ('model.layers.{i}.self_attn.q_proj.weight', 'layers.{i}.self_attn.q_proj.kernel')
    >>> str(rule.dtype), rule.transform.sizes
    ('bfloat16', (('d', 16),))
  """
  folder = Path(folder)
  config = read_config(folder)
  table = _table(config, folder)
  names = read_tensors(folder) if any(folder.glob("*.safetensors")) else ()
  older = [(new, old) for new, old in table.get("older", ()) if names and not any(new in n for n in names)]
  dtype = np.dtype(config.get("dtype") or config.get("torch_dtype") or "float32")
  rules: list[Rule] = []
  for file, model, *pattern in table["rules"]:
    for new, old in older:
      file = file.replace(new, old)
    sizes = {"d": _head_size(config)} if pattern and re.search(r"\bd\b", pattern[0]) else {}
    rules.append(Rule(file, model, *pattern, dtype=dtype, **sizes))
  return WeightMap(*rules, ignore=table.get("ignore", ()))


def read_config(folder: Path) -> dict[str, Any]:
  """What `config.json` holds.

  Raises:
    CheckpointError: there is none, or it cannot be read.
  """
  try:
    found = json.loads((folder / CONFIG).read_text())
  except (OSError, ValueError) as error:
    raise CheckpointError(
      f"cannot read {folder / CONFIG}: {error}.",
      fix="pass the folder of a model on Hugging Face, with its config.json, or a WeightMap of your own.",
    ) from error
  return found


def _table(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
  tables = tomllib.loads(TABLES.read_text())
  family = config.get("model_type")
  for table in tables.values():
    if family in table["model_types"]:
      return table
  known = sorted(name for table in tables.values() for name in table["model_types"])
  raise CheckpointError(
    f"{folder} is of the family {family!r}, which has no table here.",
    details=f"families with a table: {', '.join(known)}",
    fix="write WeightMap(Rule(...), ...) for it, or have one guessed (match_by_shape, --match).",
  )


def _head_size(config: Mapping[str, Any]) -> int:
  return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
