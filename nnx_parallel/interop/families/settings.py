"""The settings of a `config.json` that the modules of this folder follow, with the defaults of transformers.

Every other key must have its default, or have no effect on the results of the model: a module that ignored
such a key would compute other numbers than the model does.
"""

from __future__ import annotations

import fnmatch
from typing import Any

from nnx_parallel.errors import RecipeError
from nnx_parallel.interop.huggingface import ConfigJson

# Names without an effect on the results of the model, as patterns.
WITHOUT_EFFECT = (
  "_*", "*dropout*", "*_pdrop", "*_token_id", "*_token_ids", "architectures", "attn_implementation",
  "bad_words_ids", "begin_suppress_tokens", "cache_implementation", "chunk_size_feed_forward",
  "diversity_penalty", "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size",
  "experts_implementation", "exponential_decay_length_penalty", "finetuning_task", "gradient_checkpointing",
  "id2label", "initializer_factor", "initializer_range", "is_llama_config", "label2id", "length_penalty",
  "max_length", "min_length", "model_type", "name_or_path", "no_repeat_ngram_size", "num_beam_groups",
  "num_beams", "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states",
  "output_past", "output_router_logits", "output_scores", "pretraining_tp", "prefix", "problem_type",
  "remove_invalid_values", "reorder_and_upcast_attn", "repetition_penalty", "return_dict",
  "return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise", "suppress_tokens",
  "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
  "transformers.js_config", "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version",
  "use_bfloat16", "use_cache",
)  # fmt: skip

_DECODER: dict[str, Any] = {
  "vocab_size": 32_000,
  "hidden_size": 4096,
  "hidden_act": "silu",
  "rms_norm_eps": 1e-6,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "head_dim": None,
  "tie_word_embeddings": False,
  "rope_parameters": None,
  "rope_scaling": None,
  "rope_theta": 10_000.0,
}
_MISTRAL: dict[str, Any] = {
  "intermediate_size": 14_336,
  "num_key_value_heads": 8,
  "max_position_embeddings": 131_072,
  "sliding_window": 4096,
}
_QWEN: dict[str, Any] = {
  "vocab_size": 151_936,
  "intermediate_size": 22_016,
  "num_key_value_heads": 32,
  "max_position_embeddings": 32_768,
  "use_sliding_window": False,
  "sliding_window": 4096,
  "max_window_layers": 28,
  "layer_types": None,
}
FOLLOWED: dict[str, dict[str, Any]] = {
  "llama": {
    **_DECODER,
    "intermediate_size": 11_008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
  },
  "mistral": {**_DECODER, **_MISTRAL},
  "mixtral": {
    **_DECODER,
    **_MISTRAL,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
  },
  "qwen2": {**_DECODER, **_QWEN},
  "qwen3": {**_DECODER, **_QWEN, "head_dim": 128, "attention_bias": False},
  "gemma": {
    **_DECODER,
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
  },
  "gemma3_text": {
    **{key: default for key, default in _DECODER.items() if key != "hidden_act"},
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "layer_types": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
  },
  "t5": {
    "vocab_size": 32_128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_decoder_layers": None,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "dense_act_fn": None,
    "is_gated_act": None,
    "scale_decoder_outputs": None,
    "tie_word_embeddings": True,
  },
}

# Keys that transformers follows and these modules do not, where the default is another than None or False.
FIXED: dict[str, dict[str, Any]] = {
  "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
  "t5": {"is_encoder_decoder": True},
}
WITHOUT_EFFECT_IN: dict[str, tuple[str, ...]] = {
  "t5": ("is_decoder", "n_positions"),
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
    elif not _is_without_effect(family, key, value):
      raise RecipeError(
        f"config.json has {key}={value!r}, which the module of {family!r} does not follow.",
        details=f"it follows: {', '.join(sorted(followed))}",
        fix=f"copy the module and add it; or, if the key has no effect, from_config(..., ignore=[{key!r}]).",
      )
  return {**followed, **found}


def _is_without_effect(family: str, key: str, value: Any) -> bool:
  if key in FIXED.get(family, {}):
    return value is None or value == FIXED[family][key]
  names = (*WITHOUT_EFFECT, *WITHOUT_EFFECT_IN.get(family, ()))
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
