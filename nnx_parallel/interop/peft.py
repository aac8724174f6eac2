"""Adapters in the form of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

A file has `base_model.model.NAME.lora_A.weight` `(rank, inputs)` and `lora_B.weight` `(outputs, rank)`, where
NAME is a module in transformers. Source: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import collections
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.nodes import value_of
from nnx_parallel.core.text import few
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.adapters import adapt, linear_layers
from nnx_parallel.interop.huggingface import Folder
from nnx_parallel.interop.safetensors import Tensor, read_tensors, write_folder
from nnx_parallel.interop.weights import Rule, WeightMap

CONFIG, ARRAYS = "adapter_config.json", "adapter_model.safetensors"
_START = "base_model.model."
# Settings of PEFT that are followed here, or that change nothing once an adapter is trained. All other
# settings, also of later versions of PEFT, must be off.
_FOLLOWED = {
  "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules",
  "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "lora_dropout", "task_type",
  "inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "megatron_core",
  "loftq_config", "eva_config", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
_OFF = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva")}


@check_arguments(CheckpointError)
def export_peft(path: str | os.PathLike[str], model: nnx.Module, base: str | os.PathLike[str]) -> list[str]:
  """Writes the adapters of a model in the format of PEFT, for transformers, vLLM and other programs.

  Each process writes its share, as in `export_safetensors`.

  Args:
    path: the folder to write. It must not exist yet, and it appears only when it is complete.
    model: a model made by `load_huggingface` or `from_config`, with adapters of `add_lora` or of
      `nnx.LoRALinear`.
    base: the folder of the Hugging Face model for which the adapters were trained. Its `config.json`
      determines the names of the arrays, and the written config names this folder as the base model.

  Returns:
    The names of the written arrays.

  Raises:
    CheckpointError: the model has no adapter, the folder exists, or `config.json` cannot be read.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.interop.export_peft("adapter", model, "Qwen3-0.6B")  # doctest: +SKIP
  """
  layers = linear_layers(model)
  adapted = {name: layer for name, layer in layers.items() if hasattr(layer, "lora")}
  if not adapted:
    raise CheckpointError(
      f"{type(model).__name__} has no adapter.",
      fix="call nxp.interop.add_lora(model, ...) in the planned function.",
    )
  folder = Folder(base)
  names = _names(folder, layers)[0]
  if nameless := [path for path in adapted if path not in names]:
    raise CheckpointError(
      f"{few(nameless)} has an adapter, but no name in {base}.",
      fix="add adapters only to layers of the family; or export the model with export_safetensors.",
    )
  rules = [rule for path in adapted for rule in _rules(path, names[path])]
  settings = _settings(adapted, names) | {
    "base_model_name_or_path": os.fspath(base),
    "task_type": "SEQ_2_SEQ_LM" if folder.config["model_type"] == "t5" else "CAUSAL_LM",
    "fan_in_fan_out": False,
  }
  state = nnx.state(model, nnx.LoRAParam)
  text = json.dumps(dict(sorted(settings.items())), indent=2)
  return write_folder(
    path, state, WeightMap(*rules), single=ARRAYS, beside={CONFIG: text}, file_bytes=1 << 62
  )


@check_arguments(CheckpointError)
def import_peft(path: str | os.PathLike[str], model: nnx.Module, base: str | os.PathLike[str]) -> list[str]:
  """Reads adapters in the format of PEFT into a live model, in place.

  If the model has adapters, they get the values and keep their layout. If it has none, the call adds them,
  replicated on the mesh of the model; this is enough for evaluation, generation and `merge_adapters`. To
  train the adapters, plan a model with `add_lora`.

  Args:
    path: a folder with `adapter_config.json` and `adapter_model.safetensors`.
    model: a live model made by `load_huggingface` or `from_config`.
    base: the folder of the Hugging Face model, with its `config.json`.

  Returns:
    The paths of the layers with adapters.

  Raises:
    CheckpointError: the files cannot be read, the adapter is not LoRA of linear layers, or it does not fit
      the model; the message names the layer.

  Example:
    >>> import nnx_parallel as nxp
    >>> model = nxp.interop.load_huggingface("Qwen3-0.6B", mesh, nxp.fsdp())  # doctest: +SKIP
    >>> nxp.interop.import_peft("adapter", model, "Qwen3-0.6B")  # doctest: +SKIP
  """
  settings, arrays = _read_settings(Path(path)), read_tensors(path)
  layers = linear_layers(model)
  pairs, used = dict[str, tuple[str, Tensor, Tensor]](), set[str]()
  for names in _names(Folder(base), layers):
    for layer, name in names.items():
      keys = [f"{_START}{name}.lora_{factor}.weight" for factor in "AB"]
      if all(key in arrays for key in keys) and not used.intersection(keys):
        pairs[layer] = (name, arrays[keys[0]], arrays[keys[1]])
        used.update(keys)
  if unknown := arrays.keys() - used:
    raise CheckpointError(
      f"{path} has {len(unknown)} arrays that fit no linear layer of the {type(model).__name__}.",
      details="\n".join(sorted(unknown)[:12]),
      fix="pass the base model of the adapter.",
    )
  found = {layer: _factors(layer, layers[layer], *pair) for layer, pair in pairs.items()}
  present = [layer for layer, one in layers.items() if hasattr(one, "lora")]
  if present and {*present} != found.keys():
    raise CheckpointError(
      f"the adapters of the model and of {path} are on different layers.",
      details=f"only in the model: {few([x for x in present if x not in found]) or 'none'}\n"
      f"only in the file: {few([x for x in found if x not in present]) or 'none'}",
      fix="pass a model without adapters, which gets them all; or use add_lora with the same targets.",
    )
  for layer, factors in found.items():
    one, rank = layers[layer], factors[0].shape[1]
    scale = _scale(settings, pairs[layer][0], rank)
    if not present:
      adapt(layer, one, rank, scale, nnx.Rngs(0), factors[0].dtype)
    one.lora_scale = scale
    for leaf, values in zip((one.lora.lora_a, one.lora.lora_b), factors, strict=True):
      if leaf.shape != values.shape:
        raise CheckpointError(
          f"the adapter of {layer} has rank {rank} in {path}, and another in the model.",
          details=f"shapes {values.shape} and {leaf.shape}",
          fix=f"nxp.interop.add_lora(..., rank={rank}); or pass a model without adapters, which gets all.",
        )
      where = value_of(leaf).sharding if present else _replicated(one.kernel)
      leaf.set_raw_value(_placed(values, value_of(leaf), where))
  return [*found]


def _names(base: Folder, layers: Mapping[str, Any]) -> list[dict[str, str]]:
  """The names in transformers of linear layers, by path: the present names, and the names of older files."""
  found = base.module_names(f"{path}.kernel" for path in layers)
  return [{path.removesuffix(".kernel"): name for path, name in names.items()} for names in found]


def _rules(path: str, name: str) -> list[Rule]:
  return [
    Rule(f"{_START}{name}.lora_A.weight", f"{path}.lora.lora_a", "r i -> i r"),
    Rule(f"{_START}{name}.lora_B.weight", f"{path}.lora.lora_b", "o r -> r o"),
  ]


def _settings(adapted: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
  """What `adapter_config.json` says of the adapters; the most frequent rank and alpha hold for all."""
  ranks = {names[path]: layer.lora.lora_a.shape[1] for path, layer in adapted.items()}
  alphas = {
    names[path]: _plain(getattr(layer, "lora_scale", 1.0) * ranks[names[path]])
    for path, layer in adapted.items()
  }
  rank, alpha = (collections.Counter(x.values()).most_common(1)[0][0] for x in (ranks, alphas))
  short = {name.rpartition(".")[2] for name in ranks}
  covered = {name for name in names.values() if name.rpartition(".")[2] in short}
  return {
    "peft_type": "LORA",
    "r": rank,
    "lora_alpha": alpha,
    "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
    "alpha_pattern": {name: a for name, a in alphas.items() if a != alpha},
    # A short name stands for all modules that end in it.
    "target_modules": sorted(short if covered == ranks.keys() else ranks),
    "lora_dropout": 0.0,
    "init_lora_weights": True,
    "inference_mode": True,
    "use_rslora": False,
    "bias": "none",
  }


def _plain(x: float) -> float:
  return int(x) if x == int(x) else x


def _read_settings(folder: Path) -> dict[str, Any]:
  try:
    found = json.loads((folder / CONFIG).read_text())
    if found["peft_type"] != "LORA":
      raise ValueError(f"it is of the type {found['peft_type']!r}, and not LORA")
  except (OSError, ValueError, LookupError, TypeError) as error:
    raise CheckpointError(
      f"cannot read {folder / CONFIG}: {error}.", fix="pass a folder that PEFT's save_pretrained wrote."
    ) from error
  for key, value in found.items():
    if key not in _FOLLOWED and value and value not in _OFF.get(key, ()):
      raise CheckpointError(
        f"{folder} has {key}={value!r}, which adapters here do not have.",
        fix="merge it into its base with PEFT (merge_and_unload), and load the merged model.",
      )
  return found


def _factors(path: str, layer: Any, name: str, a: Tensor, b: Tensor) -> tuple[np.ndarray, np.ndarray]:
  """Both factors as they are here, (inputs, rank) and (rank, outputs)."""
  first, second = a[()].T, b[()].T
  kernel, inputs = layer.kernel.shape, np.prod(layer.in_features, dtype=int)
  expected = (int(inputs), int(np.prod(kernel)) // int(inputs))
  if (first.shape[0], second.shape[1]) != expected or first.shape[1] != second.shape[0]:
    raise CheckpointError(
      f"the adapter of {name} does not fit {path}.",
      details=f"lora_A {a.shape}, lora_B {b.shape}; inputs and outputs of the layer {expected}",
      fix="pass the base model that the adapter was trained beside.",
    )
  return first, second


def _scale(settings: Mapping[str, Any], name: str, rank: int) -> float:
  alpha = settings.get("lora_alpha", 8)
  for pattern, other in (settings.get("alpha_pattern") or {}).items():
    if re.match(rf"(.*\.)?({pattern})$", name):
      alpha = other
      break
  return float(alpha) / (rank**0.5 if settings.get("use_rslora") else rank)


def _replicated(kernel: Any) -> Any:
  where = value_of(kernel).sharding
  return jax.NamedSharding(where.mesh, jax.P()) if isinstance(where, jax.NamedSharding) else where


def _placed(values: np.ndarray, like: Any, where: Any) -> jax.Array:
  """Values in the dtype and the stored shape, which may be padded, of another array."""
  padded = np.zeros(like.shape, like.dtype)
  padded[: values.shape[0], : values.shape[1]] = values
  return jax.make_array_from_callback(padded.shape, where, lambda index: padded[index])
