"""Plain modules of Hugging Face's families, whose weights `nnx_parallel.interop.huggingface` maps.

A user copies one to change it. They hold no annotations: `nxp.presets.llama()` and its like name their dims.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flax import nnx

from nnx_parallel.errors import RecipeError
from nnx_parallel.interop.huggingface import has_own_head, read_config
from nnx_parallel.recipes.families.decoder import Config, Decoder
from nnx_parallel.recipes.families.encoder import Bert, ViT
from nnx_parallel.recipes.families.gpt2 import GPT2
from nnx_parallel.recipes.families.t5 import T5

DECODERS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma3_text")
OTHERS = {"gpt2": GPT2, "bert": Bert, "t5": T5, "vit": ViT}


def from_config(
  folder: str | os.PathLike[str],
  rngs: nnx.Rngs,
  *,
  param_dtype: str = "float32",
  ignore: Sequence[str] = (),
) -> nnx.Module:
  """Makes the module that a folder's `config.json` describes, with random weights.

  Where the folder also holds the weights, they decide whether the head is the embedding, as in transformers.

  Args:
    folder: of a model on Hugging Face.
    rngs: for the weights.
    param_dtype: of all parameters.
    ignore: keys of `config.json` that have no effect, although they are not known here.

  Raises:
    CheckpointError: files that cannot be read.
    RecipeError: a family, or a setting, that is not here.
  """
  found = {key: value for key, value in read_config(Path(folder)).items() if key not in ignore}
  family = found.get("model_type")
  if family == "t5":
    own = has_own_head(folder)
    found["scale_decoder_outputs"] = found.get(
      "scale_decoder_outputs", found.get("tie_word_embeddings", True)
    )
    found["tie_word_embeddings"] = found.get("tie_word_embeddings", True) if own is None else not own
  elif (family in DECODERS or family == "gpt2") and has_own_head(folder):
    found["tie_word_embeddings"] = False
  if family in DECODERS:
    return Decoder(Config.from_json(found, param_dtype), rngs)
  if family in OTHERS:
    return OTHERS[family](found, rngs, param_dtype)
  raise RecipeError(
    f"there is no module here for the family {family!r}, which {folder} is of.",
    fix=f"one of {', '.join([*DECODERS, *OTHERS])}, or a module of your own.",
  )
