"""Plain modules of Hugging Face's families, whose weights `nnx_parallel.interop.huggingface` maps.

A user copies one to change it. They hold no annotations: `nxp.presets.llama()` and its like name their dims.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from flax import nnx

from nnx_parallel.errors import RecipeError
from nnx_parallel.recipes.families.decoder import Config, Decoder
from nnx_parallel.recipes.families.encoder import Bert, ViT
from nnx_parallel.recipes.families.gpt2 import GPT2
from nnx_parallel.recipes.families.t5 import T5

DECODERS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma3_text")
OTHERS = {"gpt2": GPT2, "bert": Bert, "t5": T5, "vit": ViT}


def from_config(
  folder: str | os.PathLike[str], rngs: nnx.Rngs, *, param_dtype: str = "float32"
) -> nnx.Module:
  """Makes the module that a folder's `config.json` describes, with random weights.

  Args:
    folder: of a model on Hugging Face.
    rngs: for the weights.
    param_dtype: of all parameters.

  Raises:
    RecipeError: a family, or a setting, that is not here.
  """
  found = json.loads((Path(folder) / "config.json").read_text())
  family = found.get("model_type")
  if family in DECODERS:
    return Decoder(Config.from_json(found, param_dtype), rngs)
  if family in OTHERS:
    return OTHERS[family](found, rngs, param_dtype)
  raise RecipeError(
    f"there is no module here for the family {family!r}, which {folder} is of.",
    fix=f"one of {', '.join([*DECODERS, *OTHERS])}, or a module of your own.",
  )
