"""Makes tiny random models of Hugging Face's families, and what they compute, for `test_huggingface.py`.

It needs torch, transformers and PEFT, which no test needs:

  python tests/interop/make_references.py                   write tests/interop/references/FAMILY
  python tests/interop/make_references.py FAMILY FOLDER     compare an exported FOLDER with FAMILY's outputs

Each folder holds `config.json` and `model.safetensors` as `save_pretrained` writes them, and `reference.npz`
with the arguments of the model and its outputs, in float32. Some have a folder `peft` too: an adapter as PEFT
writes it, and the logits of the model with it. A FOLDER with `adapter_config.json` is compared with these.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

ROOT = Path(__file__).parent / "references"
DECODER = {
  "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8,
  "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3_ROPE = {
  "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "decoder_start_token_id": 0}

# By family: the class of the config, the class of the model, and the config's arguments.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
  "llama": ("LlamaConfig", "LlamaForCausalLM", {**DECODER, "rope_parameters": LLAMA3_ROPE}),
  "mistral": ("MistralConfig", "MistralForCausalLM", {**DECODER, "sliding_window": 4}),
  "qwen2": ("Qwen2Config", "Qwen2ForCausalLM",
    {**{key: size for key, size in DECODER.items() if key != "head_dim"}, "tie_word_embeddings": True}),
  "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", DECODER),
  "gemma": ("GemmaConfig", "GemmaForCausalLM", DECODER),
  "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM",
    {**DECODER, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
     "query_pre_attn_scalar": 10}),
  "mixtral": ("MixtralConfig", "MixtralForCausalLM",
    {**DECODER, "intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2}),
  "t5": ("T5Config", "T5ForConditionalGeneration",
    {**T5, "num_layers": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}),
  "t5_gated": ("T5Config", "T5ForConditionalGeneration",
    {**T5, "num_layers": 1, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}  # fmt: skip


def inputs(family: str) -> dict[str, np.ndarray[Any, Any]]:
  """The arguments of a family's model."""
  rng = np.random.default_rng(1)
  found = {"input_ids": rng.integers(1, 64, (4, 10))}
  if family.startswith("t5"):
    found["attention_mask"] = (np.arange(10)[None] < [[10], [7], [10], [1]]).astype(np.int64)
    found["decoder_input_ids"] = rng.integers(1, 64, (4, 8))
  return found


def make(family: str) -> Any:
  """A model with weights and biases that all matter to its outputs."""
  config, model, arguments = FAMILIES[family]
  torch.manual_seed(0)
  made = getattr(transformers, model)(getattr(transformers, config)(**arguments))
  if arguments.get("tie_word_embeddings") is False:  # transformers 5 ties T5's head nevertheless
    made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
  with torch.no_grad():
    for weight in made.parameters():
      weight += 0.2 * torch.randn(weight.shape)
  return made.eval()


def outputs(model: Any, family: str) -> np.ndarray[Any, Any]:
  """The logits, float32."""
  with torch.no_grad():
    return model(**{name: torch.from_numpy(value) for name, value in inputs(family).items()}).logits.numpy()


ADAPTERS: dict[str, dict[str, Any]] = {
  "llama": {
    "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"],
    "rank_pattern": {"layers.1.mlp.down_proj": 2}, "alpha_pattern": {"v_proj": 3},
  },
}  # fmt: skip


def write_adapter(family: str, model: Any) -> None:
  """Writes a random adapter of a family beside it."""
  model.name_or_path = family
  config = peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[family])
  adapted, folder = peft.get_peft_model(model, config), ROOT / family / "peft"
  with torch.no_grad():
    for name, weight in adapted.named_parameters():
      if "lora_" in name:
        weight.copy_(0.3 * torch.randn(weight.shape))
  adapted.eval().save_pretrained(folder)
  (folder / "README.md").unlink(missing_ok=True)
  np.savez_compressed(folder / "reference.npz", logits=outputs(adapted, family))


def compare_adapter(family: str, folder: str) -> None:
  """Reads an adapter with PEFT, and compares the logits with those of the adapter in the references."""
  base = getattr(transformers, FAMILIES[family][1]).from_pretrained(ROOT / family)
  want = np.load(ROOT / family / "peft" / "reference.npz")["logits"]
  found = outputs(peft.PeftModel.from_pretrained(base, folder).eval(), family)
  difference = np.abs(found - want).max() / np.abs(want).max()
  print(f"{family}, adapter: differs by {difference:.1e}")
  sys.exit(not difference < 1e-6)


def main() -> None:
  """Writes the folders, or compares one."""
  if len(sys.argv) == 3 and (Path(sys.argv[2]) / "adapter_config.json").exists():
    compare_adapter(*sys.argv[1:])
  if len(sys.argv) == 3:
    family, folder = sys.argv[1:]
    want = np.load(ROOT / family / "reference.npz")["logits"]
    model, report = getattr(transformers, FAMILIES[family][1]).from_pretrained(
      folder, output_loading_info=True
    )
    lost = {kind: sorted(names) for kind, names in report.items() if names}
    difference = np.abs(outputs(model.eval(), family) - want).max() / np.abs(want).max()
    print(f"{family}: differs by {difference:.1e}; {lost or 'every array was used'}")
    sys.exit(bool(lost) or not difference < 1e-6)
  for family in FAMILIES:
    model = make(family)
    folder = ROOT / family
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "reference.npz", logits=outputs(model, family), **inputs(family))
    if family in ADAPTERS:
      write_adapter(family, model)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{family:12} {size / 1e3:5.1f} kB  {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
  main()
