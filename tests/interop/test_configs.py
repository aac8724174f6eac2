"""Random `config.json` files of each family: the outputs of transformers, or an error that names the key.

`make_configs.py` made the cases with transformers and torch. `NNX_CONFIG_CASES=FILE` takes other cases.
"""

import gzip
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import CheckpointError, RecipeError
from nnx_parallel.interop.families import from_config
from nnx_parallel.interop.families.settings import FOLLOWED, settings
from nnx_parallel.interop.huggingface import weight_map_of
from nnx_parallel.interop.safetensors import import_safetensors
from tests.interop.make_configs import CASES, inputs, weights

FOUND = json.loads(gzip.decompress(Path(os.environ.get("NNX_CONFIG_CASES", CASES)).read_bytes()))


def run(case, folder):
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(case["config"]))
  safetensors.numpy.save_file(weights(case), folder / "model.safetensors")
  mesh = nxp.make_mesh(fsdp=1, devices=jax.devices()[:1])
  plan = nxp.plan(lambda: from_config(folder, nnx.Rngs(0)), mesh, nxp.fsdp())
  model = import_safetensors(folder, plan, weight_map_of(folder))
  given = inputs(case["config"]["model_type"], case["config"])
  return np.ravel(model(**{name: jnp.asarray(value) for name, value in given.items()}))


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", FOLLOWED)
@pytest.mark.slow
def test_the_outputs_of_transformers_or_an_error(tmp_path, family):
  equal, wrong = 0, []
  cases = [case for case in FOUND["cases"] if case["config"]["model_type"] == family]
  for number, case in enumerate(cases):
    try:
      got = run(case, tmp_path / str(number))
    except (CheckpointError, RecipeError):
      continue
    want = np.array(case.get("logits", np.nan))
    if not np.abs(got - want).max() < 3e-5 * np.abs(want).max():
      wrong.append((case["config"], case["equal"], case.get("refused", np.abs(got - want).max())))
    equal += 1
  assert not wrong, "\n".join(map(str, wrong))
  assert equal > sum("logits" in case for case in cases) / 3


@pytest.mark.parametrize("family", FOLLOWED)
def test_the_defaults_of_transformers(family):
  defaults = FOUND["defaults"][family]
  for key, value in FOLLOWED[family].items():
    assert defaults.get(key, value) == value, key
  for key, value in defaults.items():  # a key that is not followed passes with its default, and with no other
    settings({"model_type": family, key: value})


@pytest.mark.parametrize(("config", "size"), [
  ({"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4}, 128),
  ({"model_type": "llama", "hidden_size": 64}, 2), ({"model_type": "gemma"}, 256),
])  # fmt: skip
def test_sizes_that_a_config_leaves_out(tmp_path, config, size):
  (tmp_path / "config.json").write_text(json.dumps(config))
  sizes = {
    size for rule in weight_map_of(tmp_path).rules for name, size in rule.transform.sizes if name == "d"
  }
  assert sizes == {size}


def test_a_key_that_is_not_followed_is_named():
  with pytest.raises(RecipeError) as error:
    settings({"model_type": "llama", "sliding_window": 4})
  assert "config.json has sliding_window=4, which the module of 'llama' does not follow." in str(error.value)
  assert "from_config(..., ignore=['sliding_window'])" in str(error.value)
  with pytest.raises(RecipeError, match=r"has hidden_size='16', where int is expected"):
    settings({"model_type": "llama", "hidden_size": "16"})
