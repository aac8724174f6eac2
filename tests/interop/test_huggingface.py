"""Models of Hugging Face's families: into shards, the reference's outputs, and back to the same files.

`make_references.py` made the files and outputs with transformers and torch.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import CheckpointError, RecipeError
from nnx_parallel.interop.huggingface import weight_map_of
from nnx_parallel.interop.safetensors import export_safetensors, import_safetensors
from nnx_parallel.recipes.families import from_config

REFERENCES = Path(__file__).parent / "references"
PRESETS = {
  "llama": nxp.presets.llama,
  "mistral": nxp.presets.llama,
  "qwen2": nxp.presets.llama,
  "qwen3": nxp.presets.llama,
  "gemma": nxp.presets.llama,
  "gemma3_text": nxp.presets.llama,
  "mixtral": nxp.presets.llama,
  "gpt2": nxp.presets.gpt,
  "bert": nxp.presets.vit,
  "vit": nxp.presets.vit,
  "t5": nxp.presets.t5,
  "t5_gated": nxp.presets.t5,
}


def plan_of(family, mesh, **options):
  rules = [PRESETS[family](), nxp.presets.fsdp_tensor(min_size=16)]
  return nxp.plan(lambda: from_config(REFERENCES / family, nnx.Rngs(0), **options), mesh, rules)


def reference(family):
  found = dict(np.load(REFERENCES / family / "reference.npz"))
  return found.pop("logits"), {name: jnp.asarray(value) for name, value in found.items()}


def load(folder):
  return safetensors.numpy.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", PRESETS)
def test_into_shards_and_back(tmp_path, family):
  folder = REFERENCES / family
  plan = plan_of(family, nxp.make_mesh(data=2, fsdp=2, tensor=2))
  weight_map = weight_map_of(folder)
  model = import_safetensors(folder, plan, weight_map)
  specs = [spec for leaf in plan.leaves for spec in leaf.spec]
  assert "fsdp" in specs
  assert "tensor" in specs
  want, inputs = reference(family)
  got = nnx.jit(lambda model, inputs: model(**inputs))(model, inputs)
  assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
  export_safetensors(tmp_path / "out", model, weight_map)
  theirs, ours = load(folder), load(tmp_path / "out")
  assert theirs.keys() == ours.keys()
  for name, array in theirs.items():
    np.testing.assert_array_equal(array, ours[name], strict=True)
