"""Draws random `config.json` files of each family, and computes with transformers, for `test_configs.py`.

It needs torch and transformers, which no test needs:

  python tests/interop/make_configs.py [COUNT [SEED [FILE]]]     COUNT configs of each family

A case is what `config.json` holds, the arrays that such a model's file has, and either the model's outputs or
the error of transformers. `weights` and `inputs` make the numbers, for both sides.
"""

import dataclasses
import gzip
import json
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

CASES = Path(__file__).parent / "references" / "configs.json.gz"
Case = dict[str, Any]
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[Any] = [
  None, {"rope_type": "default"}, {"rope_type": "default", "rope_theta": 20.0},
  {"rope_type": "default", "factor": 4.0}, {"type": "linear", "factor": 3.0},
  {"rope_type": "linear", "factor": 3.0, "rope_theta": 30.0},
  {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, {"rope_type": "linear"},
  {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8, "rope_theta": 50.0},
  {"rope_type": "llama3", **LLAMA3}, {"rope_type": "llama3", "factor": 2.0},
  {"type": "dynamic", "factor": 2.0},
  {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
]  # fmt: skip
KINDS = ["full_attention", "sliding_attention"]
ACTIVATIONS = ["silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh"]

DECODER: dict[str, list[Any]] = {
  "hidden_act": ACTIVATIONS, "rms_norm_eps": [1e-6, 1e-2], "tie_word_embeddings": [True, False],
  "rope_theta": [10.0, 100.0], "rope_scaling": ROPES, "rope_parameters": ROPES,
  "num_key_value_heads": [1, 1, 1, 2, 2, 2, None, 4], "head_dim": [2, 4, 4, 4, None],
  "max_position_embeddings": [16, 64],
}  # fmt: skip
WINDOWS: dict[str, list[Any]] = {
  "use_sliding_window": [True, False], "sliding_window": [2, 3, None], "max_window_layers": [0, 1, 2],
  "layer_types": [None, KINDS, KINDS[::-1], [KINDS[0]] * 2, [KINDS[1]] * 2, KINDS[:1]],
}  # fmt: skip
OPTIONS: dict[str, dict[str, list[Any]]] = {
  "llama": {**DECODER, "attention_bias": [True, False], "mlp_bias": [True, False]},
  "mistral": {**DECODER, "sliding_window": [2, 3, None]},
  "mixtral": {**DECODER, "sliding_window": [None, 3], "num_local_experts": [2, 3],
    "num_experts_per_tok": [1, 2]},
  "qwen2": {**DECODER, **WINDOWS},
  "qwen3": {**DECODER, **WINDOWS, "attention_bias": [True, False]},
  "gemma": {**DECODER, "attention_bias": [True, False],
    "hidden_activation": [None, "gelu_pytorch_tanh", "relu"]},
  "gemma3_text": {
    **DECODER,
    **WINDOWS,
    "hidden_act": [None],
    "hidden_activation": ACTIVATIONS,
    "attention_bias": [True, False],
    "query_pre_attn_scalar": [4, 9],
    "sliding_window_pattern": [1, 2, 3],
    "rope_local_base_freq": [20.0, 1000.0],
    "rope_parameters": [
      None,
      {"rope_type": "default", "rope_theta": 7.0},
      {"full_attention": {"rope_type": "default", "rope_theta": 40.0}},
      {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"rope_theta": 9.0}},
    ],
  },
  "t5": {
    "num_decoder_layers": [None, 1, 2],
    "relative_attention_num_buckets": [4, 8],
    "relative_attention_max_distance": [5, 16],
    "layer_norm_epsilon": [1e-6, 1e-2],
    "feed_forward_proj": ["relu", "gelu", "gated-gelu", "gated-silu", "gated-relu"],
    "dense_act_fn": [None, "relu", "gelu_new"],
    "is_gated_act": [True, False],
    "scale_decoder_outputs": [True, False],
    "tie_word_embeddings": [True, False],
  },
}  # fmt: skip
T5 = {"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
ENCODER = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
STRAYS: dict[str, list[Any]] = {
  "query_pre_attn_scalar": [9], "attention_bias": [True], "mlp_bias": [True], "num_experts": [4],
  "n_head": [4], "attn_logit_softcapping": [1.0], "final_logit_softcapping": [1.0],
  "use_bidirectional_attention": [True], "partial_rotary_factor": [0.5, 1.0],
  "original_max_position_embeddings": [8], "position_embedding_type": ["relative_key"],
  "quantization_config": [{"quant_method": "fp8"}], **WINDOWS,
}  # fmt: skip
# Sizes and what a file cannot say without other arrays; each is drawn above where it matters.
NOT_DRAWN = {"vocab_size", "dtype", "architectures", "transformers_version", "return_dict", "problem_type"}


def weights(case: Case) -> dict[str, np.ndarray[Any, Any]]:
  """The arrays of a case's file; numpy keeps the numbers of `RandomState` for good."""
  made: dict[str, np.ndarray[Any, Any]] = {}
  for i, (name, shape) in enumerate(case["arrays"].items()):
    made[name] = (0.5 * np.random.RandomState([case["seed"], i]).standard_normal(shape)).astype(np.float32)
  for name, other in case["equal"].items():
    made[name] = made[other]
  return made


def inputs(family: str, config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
  """The arguments of a case's model."""
  random = np.random.RandomState(0)
  found = {"input_ids": random.randint(0, 11, (2, 7))}
  if family == "t5":
    found["attention_mask"] = (np.arange(7)[None] < [[7], [4]]).astype(np.int64)
    found["decoder_input_ids"] = random.randint(0, 11, (2, 5))
  return found


def draw(rng: random.Random, family: str, fields: dict[str, Any]) -> dict[str, Any]:
  """What a `config.json` holds: known keys or their defaults, and at times one that does not belong."""
  config = {"model_type": family, **(T5 if family == "t5" else {"vocab_size": 11, **ENCODER})}
  for key, values in OPTIONS[family].items():
    must = key == "num_key_value_heads" or (key == "head_dim" and fields.get(key))  # too large by default
    if must or rng.random() < (0.2 if key.startswith("rope_") else 0.4):
      config[key] = rng.choice(values)
  if rng.random() < 0.2:
    key = rng.choice([*STRAYS])
    config.setdefault(key, rng.choice(STRAYS[key]))
  if rng.random() < 0.2:
    key = rng.choice(sorted(fields.keys() - NOT_DRAWN - config.keys()))
    config[key] = other_than(fields[key])
  if rng.random() < 0.05:
    config[rng.choice(sorted(config.keys() - {"model_type"}))] = None
  return config


def other_than(value: Any) -> Any:
  """Another value of the same kind."""
  if isinstance(value, bool) or value is None:
    return not value
  if isinstance(value, str):
    return "relu"
  return value * 2 + 1 if isinstance(value, int | float) else value


def main() -> None:
  """Writes the cases."""
  import torch
  import transformers
  from safetensors.numpy import load_file, save_file

  warnings.simplefilter("ignore")
  transformers.logging.set_verbosity_error()

  def fields_of(family: str) -> dict[str, Any]:
    kind = transformers.CONFIG_MAPPING[family]
    fields = {one.name: one.default for one in dataclasses.fields(kind)}
    return {name: default for name, default in fields.items() if default is not dataclasses.MISSING}

  def solve(case: Case, rng: random.Random) -> None:
    """Adds the names of the file, and outputs or an error."""
    config, family = case["config"], case["config"]["model_type"]
    t5 = transformers.T5ForConditionalGeneration
    kind = t5 if family == "t5" else transformers.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as name:
      folder = Path(name)
      (folder / "config.json").write_text(json.dumps(config))
      made = transformers.AutoConfig.from_pretrained(folder)
      model = kind.from_config(made) if kind is transformers.AutoModelForCausalLM else kind(made)
      model.save_pretrained(folder)
      arrays = load_file(folder / "model.safetensors")
      case["arrays"] = {key: list(array.shape) for key, array in arrays.items()}
      embedding = next((key for key in case["arrays"] if "embed_tokens" in key), "shared.weight")
      if "lm_head.weight" not in case["arrays"] and rng.random() < 0.3:
        case["arrays"]["lm_head.weight"] = case["arrays"][embedding]
        if rng.random() < 0.5:
          case["equal"]["lm_head.weight"] = embedding
      (folder / "config.json").write_text(json.dumps(config))
      save_file(weights(case), folder / "model.safetensors", {"format": "pt"})
      model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
      given = {key: torch.from_numpy(value) for key, value in inputs(family, config).items()}
      logits = model(**given).logits
    case["logits"] = [float(f"{x:.7g}") for x in logits.flatten().tolist()]

  count, seed = [*map(int, sys.argv[1:3]), *(16, 0)[len(sys.argv[1:3]) :]]
  cases: list[Case] = []
  for family in OPTIONS:
    fields, rng = fields_of(family), random.Random(f"{family} {seed}")
    for number in range(count):
      case: Case = {"config": draw(rng, family, fields), "seed": number, "arrays": {}, "equal": {}}
      try:
        solve(case, rng)
      except Exception as error:  # noqa: BLE001 (whatever transformers raises is its refusal)
        case["refused"] = f"{type(error).__name__}: {error}"[:100]
      cases.append(case)
    refused = sum("refused" in case for case in cases if case["config"]["model_type"] == family)
    print(f"{family:12} {count} cases, {refused} refused")
  defaults = {family: fields_of(family) for family in OPTIONS}
  found = json.dumps({"defaults": defaults, "cases": cases}, separators=(",", ":")).encode()
  file = Path(sys.argv[3]) if len(sys.argv) > 3 else CASES
  file.write_bytes(gzip.compress(found, mtime=0))
  print(f"{file}: {file.stat().st_size / 1e3:.1f} kB")


if __name__ == "__main__":
  main()
