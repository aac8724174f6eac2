"""Weight maps for models of Hugging Face: tables by family, found from `config.json`.

The tables are data: `huggingface.toml`. Their paths are the paths of `nnx_parallel.interop.families`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.safetensors import Tensor, read_tensors
from nnx_parallel.interop.weights import Rule, WeightMap, is_real

ConfigJson: TypeAlias = Mapping[str, Any]
"""The settings of a `config.json`, or a part of them."""

CONFIG = "config.json"
TABLES = Path(__file__).with_name("huggingface.toml")


@check_arguments(CheckpointError)
def weight_map_of(folder: str | os.PathLike[str]) -> WeightMap:
  """Finds the weight map of a model on Hugging Face, for import and for export.

  Args:
    folder: a folder that contains `config.json`. If it also contains the weights, their names decide between
      the names of older and newer files.

  Returns:
    The weight map. An import takes arrays of any floating-point dtype of 16 bits or more. An export writes
    each array with the dtype that it has in the folder. If the folder has no weights, it writes the dtype
    that `config.json` names, or float32 if it names none.

  Raises:
    CheckpointError: there is no `config.json`, or the family of models is not supported.

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
  return Folder(folder).weight_map()


class Folder:
  """A model in the format of Hugging Face: its settings, and the arrays of its files, each read once."""

  def __init__(self, path: str | os.PathLike[str]):
    self.path = Path(path)
    self.config = _read_config(self.path)

  @functools.cached_property
  def tensors(self) -> dict[str, Tensor]:
    """The arrays by name, of which only the headers are read; none without weights."""
    return read_tensors(self.path) if any(self.path.glob("*.safetensors")) else {}

  @functools.cached_property
  def has_own_head(self) -> bool | None:
    """Whether the weights have a head that differs from the embedding; None without weights."""
    # The values decide, as in transformers: files may hold a head although `config.json` ties it.
    if not self.tensors:
      return None
    return self._tied.get(_HEAD) is False  # and not where there is no head

  def weight_map(self) -> WeightMap:
    """See `weight_map_of`."""
    rules = [self._rule(self._rename(name), *rest) for name, *rest in self._table["rules"]]
    same = [name for name, is_same in self._tied.items() if is_same]
    return WeightMap(*rules, ignore=[*self._table.get("ignore", ()), *same])

  def module_names(self, paths: Iterable[str]) -> list[dict[str, str]]:
    """The names of modules in transformers, by the paths of their kernels: present names, and older ones."""
    found = WeightMap(*(self._rule(*row) for row in self._table["rules"])).names_of(paths)
    now = {path: name.removesuffix(".weight") for path, name in found.items()}
    before = dict(now)
    for new, old in self._table.get("older", ()):
      before = {path: name.replace(new, old) for path, name in before.items()}
    return [now, before]

  def _rule(self, file: str, model: str, *pattern: str) -> Rule:
    """A row of the table, with the dtype that the file has."""
    sizes = {"d": _head_size(self.config)} if pattern and re.search(r"\bd\b", pattern[0]) else {}
    named = re.compile(re.sub(r"\\\{\w+\\\}", "[0-9]+", re.escape(file)))
    stored = {array.dtype for name, array in self.tensors.items() if named.fullmatch(name)}
    dtype = np.dtype(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")
    if len(stored) == 1 and all(map(is_real, stored)):
      (dtype,) = stored
    return Rule(file, model, *pattern, dtype=dtype, **sizes)

  @functools.cached_property
  def _table(self) -> dict[str, Any]:
    tables, family = tomllib.loads(TABLES.read_text()), self.config.get("model_type")
    for table in tables.values():
      if family in table["model_types"]:
        return table
    known = sorted(name for table in tables.values() for name in table["model_types"])
    raise CheckpointError(
      f"{self.path} is of the family {family!r}, which has no table here.",
      details=f"families with a table: {', '.join(known)}",
      fix="write nxp.interop.WeightMap(nxp.interop.Rule(...), ...) for it;"
      " a dry run lists the names and shapes of both sides.",
    )

  def _rename(self, name: str) -> str:
    """The name in these files, which may be old."""
    for new, old in self._table.get("older", ()) if self.tensors else ():
      if not any(new in file for file in self.tensors):
        name = name.replace(new, old)
    return name

  @functools.cached_property
  def _tied(self) -> dict[str, bool]:
    """Whether stored arrays that the model ties to other arrays equal them, by name."""
    found: dict[str, bool] = {}
    for name, other in self._table.get("tied", ()):
      one, two = self.tensors.get(name), self.tensors.get(self._rename(other))
      is_t5 = self.config["model_type"] == "t5"
      may_be_tied = name != _HEAD or self.config.get("tie_word_embeddings", True) or is_t5
      if may_be_tied and one is not None and two is not None:
        found[name] = _is_same(one, two, one.file.stat().st_mtime_ns, two.file.stat().st_mtime_ns)
    return found


_HEAD = "lm_head.weight"
_ROWS = 4096  # that are compared at once


@functools.lru_cache(maxsize=64)
def _is_same(one: Tensor, two: Tensor, *changed: int) -> bool:
  """Whether two arrays are equal; `changed`, when their files last did, is a part of the cache's key."""
  del changed
  if (one.shape, one.dtype) != (two.shape, two.dtype):
    return False
  parts = (slice(start, start + _ROWS) for start in range(0, one.shape[0], _ROWS))
  return all(np.array_equal(one[(part,)], two[(part,)]) for part in parts)


def _read_config(folder: Path) -> dict[str, Any]:
  """The contents of `config.json`."""
  try:
    found = json.loads((folder / CONFIG).read_text())
    if not isinstance(found, dict):
      raise ValueError("it holds no object")
  except (OSError, ValueError) as error:
    raise CheckpointError(
      f"cannot read {folder / CONFIG}: {error}.",
      fix="pass the folder of a model on Hugging Face, with its config.json, or a WeightMap of your own.",
    ) from error
  return found


def _head_size(config: ConfigJson) -> int:
  """The size of a head, with the defaults of transformers."""
  known = {"qwen3": 128, "gemma": 256, "gemma3_text": 256}.get(config["model_type"])
  own = config.get("head_dim") or known
  return own or config.get("hidden_size", 4096) // config.get("num_attention_heads", 32)
