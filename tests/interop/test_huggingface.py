"""Models of Hugging Face's families: into shards, the reference's outputs, and back to the same files.

`make_references.py` made the files and outputs with transformers and torch.
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.cli.command import main
from nnx_parallel.errors import CheckpointError, RecipeError
from nnx_parallel.interop.families import from_config
from nnx_parallel.interop.families.decoder import Config
from nnx_parallel.interop.huggingface import weight_map_of
from nnx_parallel.interop.safetensors import dry_run_import, export_safetensors, import_safetensors

REFERENCES = Path(__file__).parent / "references"
DECODERS = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "mixtral"]
PRESETS = dict.fromkeys(DECODERS, nxp.presets.llama) | dict.fromkeys(["t5", "t5_gated"], nxp.presets.t5)


def plan_of(family, mesh, layout=None, **options):
  rules = [PRESETS[family](), layout or nxp.presets.fsdp_tensor(min_size=16)]
  return nxp.plan(lambda: from_config(REFERENCES / family, nnx.Rngs(0), **options), mesh, rules)


def reference(family):
  found = dict(np.load(REFERENCES / family / "reference.npz"))
  return found.pop("logits"), {name: jnp.asarray(value) for name, value in found.items()}


def assert_reference(model, family):
  want, inputs = reference(family)
  got = nnx.jit(lambda model, inputs: model(**inputs))(model, inputs)
  assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def load(folder):
  return safetensors.numpy.load_file(folder / "model.safetensors")


def assert_same_file(folder, other):
  want, got = load(folder), load(other)
  assert want.keys() == got.keys()
  for name, array in want.items():
    np.testing.assert_array_equal(got[name], array, strict=True)


def copy(family, tmp_path, config=(), rename=lambda name: name, cast=lambda array: array):
  """A family's folder with other settings, and arrays under other names or of another dtype."""
  folder = tmp_path / "theirs"
  folder.mkdir(parents=True)
  found = json.loads((REFERENCES / family / "config.json").read_text()) | dict(config)
  (folder / "config.json").write_text(json.dumps(found))
  arrays = {rename(name): cast(array) for name, array in load(REFERENCES / family).items()}
  safetensors.numpy.save_file(arrays, folder / "model.safetensors")
  return folder


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_with_a_cache_gives_the_same_logits_and_tokens(family):
  folder, mesh = REFERENCES / family, nxp.make_mesh(fsdp=4, tensor=2)
  model = import_safetensors(folder, plan_of(family, mesh), weight_map_of(folder))
  tokens = jnp.tile(reference(family)[1]["input_ids"][:1], (4, 1))
  whole = nnx.jit(lambda model, tokens: model(tokens))
  wanted, length = whole(model, tokens), tokens.shape[1]
  step = nnx.jit(lambda model, tokens, cache, position: model(tokens, cache, position))
  logits, cache = step(model, tokens[:, :5], model.empty_cache(4, length), 0)
  found = [logits]
  for n in range(5, length):
    logits, cache = step(model, tokens[:, n : n + 1], cache, n)
    found.append(logits)
  np.testing.assert_allclose(jnp.concatenate(found, 1), wanted, rtol=1e-4, atol=1e-4)
  call = lambda model, tokens, position, cache: model(tokens, cache, position)
  prompts = np.asarray(tokens)[:, :6] + np.arange(4)[:, None]
  for options in ({"prefill": 4}, {"slots": 4}):
    generate = nxp.generator(4, call=call, cache=model.empty_cache, **options)
    result = generate(model, prompts)
    text = np.concatenate([prompts, np.asarray(result.tokens)], 1)
    np.testing.assert_array_equal(text[:, 6:], np.argmax(whole(model, text), -1)[:, 5:-1])


@pytest.mark.cases(4)
@pytest.mark.parametrize("family", PRESETS)
def test_into_shards_and_back(tmp_path, family):
  folder = REFERENCES / family
  plan = plan_of(family, nxp.make_mesh(data=2, fsdp=2, tensor=2))
  axes = {axis for leaf in plan.leaves for entry in leaf.spec if entry for axis in np.atleast_1d(entry)}
  assert axes == {"fsdp", "tensor"}
  weight_map = weight_map_of(folder)
  model = import_safetensors(folder, plan, weight_map)
  assert_reference(model, family)
  export_safetensors(tmp_path / "out", model, weight_map)
  assert_same_file(folder, tmp_path / "out")


def test_experts_over_an_axis():
  plan = plan_of("mixtral", nxp.make_mesh(data=2, expert=4), nxp.presets.expert())
  assert plan["layers.0.block_sparse_moe.w1"].spec[0] == "expert"
  folder = REFERENCES / "mixtral"
  assert_reference(import_safetensors(folder, plan, weight_map_of(folder)), "mixtral")


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_a_file_in_bfloat16(tmp_path, param_dtype):
  folder = copy("qwen3", tmp_path, {"dtype": "bfloat16"}, cast=lambda array: array.astype(jnp.bfloat16))
  plan = plan_of("qwen3", nxp.make_mesh(fsdp=2, tensor=4), param_dtype=param_dtype)
  model = import_safetensors(folder, plan, weight_map_of(folder))
  assert model.lm_head.kernel.dtype == param_dtype
  export_safetensors(tmp_path / "out", model, weight_map_of(folder))
  assert_same_file(folder, tmp_path / "out")


def test_quantized_arrays_are_refused(tmp_path):
  cast = lambda array: array.astype(jnp.float8_e4m3fn) if array.ndim == 2 else array
  folder = copy("qwen3", tmp_path, cast=cast)
  with pytest.raises(CheckpointError, match=r"makes float8_e4m3fn\[64, 16\]"):
    import_safetensors(folder, plan_of("qwen3", nxp.make_mesh(fsdp=2, tensor=4)), weight_map_of(folder))


@pytest.mark.parametrize(
  "other", ["model.fp16.safetensors", "consolidated.safetensors", "adapter_model.safetensors"]
)
def test_a_second_file_beside_the_model(tmp_path, other):
  folder = copy("qwen2", tmp_path)
  (folder / other).write_bytes(b"not read")
  plan = plan_of("qwen2", nxp.make_mesh(fsdp=2, tensor=2, data=2))
  assert_reference(import_safetensors(folder, plan, weight_map_of(folder)), "qwen2")


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["qwen2", "t5"])
def test_a_head_that_is_tied_and_also_stored(tmp_path, family):
  folder = copy(family, tmp_path)
  embedding = {"qwen2": "model.embed_tokens.weight", "t5": "shared.weight"}
  arrays = load(folder)
  path = folder / "model.safetensors"

  def made():
    rules = [PRESETS[family](), nxp.presets.fsdp_tensor(min_size=16)]
    plan = nxp.plan(lambda: from_config(folder, nnx.Rngs(0)), nxp.make_mesh(fsdp=4, tensor=2), rules)
    return import_safetensors(folder, plan, weight_map_of(folder))

  safetensors.numpy.save_file(arrays | {"lm_head.weight": arrays[embedding[family]]}, path)
  assert_reference(made(), family)
  assert not hasattr(made(), "lm_head")
  safetensors.numpy.save_file(arrays | {"lm_head.weight": 2 * arrays[embedding[family]]}, path)
  want, inputs = reference(family)
  np.testing.assert_allclose(made()(**inputs), 2 * want, rtol=1e-3, atol=1e-3)


def test_older_names(tmp_path):
  folder = copy("qwen2", tmp_path, rename=lambda name: name.removeprefix("model."))
  model = import_safetensors(folder, plan_of("qwen2", nxp.make_mesh(fsdp=2, tensor=4)), weight_map_of(folder))
  assert_reference(model, "qwen2")


def test_a_window_and_positions_as_older_configs_have_them():
  new = json.loads((REFERENCES / "gemma3_text" / "config.json").read_text())
  ropes = new.pop("rope_parameters")
  kinds = new.pop("layer_types")
  old = new | {
    "rope_theta": ropes["full_attention"]["rope_theta"],
    "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"],
    "sliding_window_pattern": 2,
  }
  assert Config.from_json(old) == Config.from_json(new | {"rope_parameters": ropes, "layer_types": kinds})


def test_what_is_not_known(tmp_path):
  with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
    weight_map_of(tmp_path)
  folder = copy("llama", tmp_path, {"model_type": "xlstm"})
  with pytest.raises(CheckpointError, match=r"family 'xlstm', which has no table here\.\n  families with"):
    weight_map_of(folder)
  with pytest.raises(RecipeError, match="no module here for the family 'xlstm'"):
    from_config(folder, nnx.Rngs(0))
  config = json.loads((REFERENCES / "llama" / "config.json").read_text())
  with pytest.raises(RecipeError, match="have no rope_type='yarn'"):
    Config.from_json(config | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}})
  with pytest.raises(RecipeError, match="have no rope_type='dynamic'"):
    Config.from_json(config | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
  odd = copy("llama", tmp_path / "odd", {"fast": "yes"})
  with pytest.raises(RecipeError, match="has fast='yes', which the module of 'llama' does not follow"):
    from_config(odd, nnx.Rngs(0))
  from_config(odd, nnx.Rngs(0), ignore=["fast"])


RECIPE = """
from flax import nnx
import nnx_parallel as nxp
from nnx_parallel.interop.families import from_config

def init():
  return from_config({folder!r}, nnx.Rngs(0))

def mesh():
  return {{"data": 1, "fsdp": 4, "tensor": 2}}

def rules():
  return [nxp.presets.llama(), nxp.presets.fsdp_tensor(min_size=16)]
"""


@pytest.mark.slow
def test_the_commands(tmp_path, capsys):
  folder, recipe = str(REFERENCES / "qwen2"), tmp_path / "mine.py"
  recipe.write_text(RECIPE.format(folder=folder))
  steps, out = str(tmp_path / "steps"), str(tmp_path / "out")
  assert main(["import", folder, steps, str(recipe), "--dry-run"]) == 0
  printed = capsys.readouterr().out
  row = r"read +2 +model.layers.\*.self_attn.k_proj.weight +float32\[8,16\] +layers.\*.self_attn.k_proj"
  assert re.search(row + r".kernel +float32\[16,2,4\] +\(fsdp, tensor, -\)", printed)
  assert not Path(steps).exists()
  assert main(["import", folder, steps, str(recipe)]) == 0
  how = [str(recipe), "--weight-map", folder]
  assert main(["export", steps, out, *how, "--skip", "norm.scale", "--dry-run"]) == 0
  printed = capsys.readouterr().out
  assert re.search(r"write +2 +model.layers.\*.self_attn.k_proj.weight +float32\[8,16\] ", printed)
  assert re.search(r"left out +1 +norm.scale", printed)
  assert not Path(out).exists()
  assert main(["export", steps, out, *how]) == 0
  assert_same_file(REFERENCES / "qwen2", tmp_path / "out")
  assert (tmp_path / "out" / "config.json").read_text() == (REFERENCES / "qwen2" / "config.json").read_text()


def test_a_dry_run_tells_what_does_not_fit(tmp_path, capsys):
  rename = lambda name: name.replace("layers.1.mlp.up", "layers.1.mlp.top")
  cast = lambda array: array.astype(np.int16) if array.shape == (64, 16) else array
  folder = copy("qwen2", tmp_path, rename=rename, cast=cast)
  found = dry_run_import(folder, plan_of("qwen2", nxp.make_mesh(fsdp=2, tensor=4)), weight_map_of(folder))
  wrong = {row.status: row for row in found.rows if row.status != "read"}
  assert wrong["unused"].file == "model.layers.1.mlp.top_proj.weight"
  assert wrong["missing"].model == "layers.1.mlp.up_proj.kernel"
  assert wrong["missing"].note.startswith("needs model.layers.1.mlp.up_proj.weight")
  assert wrong["does not fit"].file == "model.embed_tokens.weight"
  assert "makes int16[64,16]" in wrong["does not fit"].note.replace(", ", ",")
  (tmp_path / "mine.py").write_text(RECIPE.format(folder=str(folder)))
  steps = tmp_path / "steps"
  assert main(["import", str(folder), str(steps), str(tmp_path / "mine.py"), "--dry-run"]) == 3
  assert "layers.1.mlp.top_proj" in capsys.readouterr().out


@pytest.mark.cases(3)
@pytest.mark.parametrize("family", ["gemma3_text", "mixtral", "t5_gated"])
def test_in_bfloat16(tmp_path, family):
  folder = copy(family, tmp_path, {"dtype": "bfloat16"}, cast=lambda array: array.astype(jnp.bfloat16))
  mesh = nxp.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
  want, inputs = reference(family)
  with jax.numpy_dtype_promotion("standard"):  # flax's norms promote
    plan = plan_of(family, mesh, param_dtype="bfloat16")
    model = import_safetensors(folder, plan, weight_map_of(folder))
    got = nnx.jit(lambda model, inputs: model(**inputs))(model, inputs)
  assert got.dtype == jnp.bfloat16
  assert np.abs(got.astype(np.float32) - want).mean() < 0.03 * np.abs(want).max()
