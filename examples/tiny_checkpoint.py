"""Writes a tiny Hugging Face checkpoint and tokens, to try finetune.py and lora.py without a download.

The folder theirs/ has random weights. For a real checkpoint: hf download Qwen/Qwen3-0.6B --local-dir theirs

  python tiny_checkpoint.py
"""

import json
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from flax import nnx

import nnx_parallel as nxp

CONFIG = {
  "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 256, "head_dim": 64, "intermediate_size": 1024,
  "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
  "rms_norm_eps": 1e-6, "dtype": "float32", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
  "tie_word_embeddings": False,
}  # fmt: skip


def main(folder="."):
  """Writes a model with random weights, and int32 tokens (samples, length): here, each byte is a token."""
  theirs, tokens = Path(folder, "theirs"), Path(folder, "tokens.npy")
  with tempfile.TemporaryDirectory() as source:
    Path(source, "config.json").write_text(json.dumps(CONFIG))
    model = nxp.interop.from_config(source, nnx.Rngs(0))
    nxp.interop.export_safetensors(theirs, model, nxp.interop.weight_map_of(source))
  (theirs / "config.json").write_text(json.dumps(CONFIG))
  text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int32)
  np.save(tokens, text[: len(text) // 65 * 65].reshape(-1, 65))
  print(f"wrote {theirs}/ and {tokens}")


if __name__ == "__main__":
  main(*sys.argv[1:])
