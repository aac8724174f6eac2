"""Adapters that `add_lora` adds by path: planned, trained alone, saved, merged; in PEFT's form and back."""

import json
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop import (
  add_lora,
  export_peft,
  export_safetensors,
  from_config,
  import_peft,
  merge_adapters,
  weight_map_of,
)
from nnx_parallel.interop.huggingface import TABLES
from nnx_parallel.interop.safetensors import read_tensors

REFERENCES = Path(__file__).parent / "references"
AXES = {"fsdp": 4, "tensor": 2}
RULES = [nxp.LogicalRules(batch="fsdp"), nxp.fsdp(min_size=256)]


class Block(nnx.Module):  # Attention and two layers
  def __init__(self, rngs):
    self.attention = nnx.MultiHeadAttention(4, 32, rngs=rngs, decode=False)
    self.norm = nnx.LayerNorm(32, rngs=rngs)
    self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, use_bias=False, rngs=rngs)

  def __call__(self, x):
    x = x + self.attention(self.norm(x))
    return x + self.down(nnx.relu(self.up(x)))


def base_init():
  rngs = nnx.Rngs(0)
  return nnx.Sequential(Block(rngs), Block(rngs))


def init(**options):
  model = base_init()
  add_lora(model, ["layers.*.attention.*", "*.down"], rank=4, alpha=8.0, rngs=nnx.Rngs(1), **options)
  return model


X = np.random.default_rng(0).normal(size=(16, 6, 32)).astype(np.float32)


def test_adapters_by_path_change_nothing_at_first_and_keep_the_paths_of_the_weights():
  base, model = base_init(), init()
  np.testing.assert_array_equal(base(jnp.asarray(X)), model(jnp.asarray(X)))
  ours, theirs = (dict(nnx.to_flat_state(nnx.state(m, nnx.Not(nnx.LoRAParam)))) for m in (model, base))
  assert ours.keys() == theirs.keys()
  flat = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
  added = {".".join(map(str, path)): x.shape for path, x in flat}
  assert len(added) == 2 * 2 * 5
  assert added["layers.0.attention.query.lora.lora_a"] == (32, 4)
  assert added["layers.0.attention.out.lora.lora_b"] == (4, 32)
  assert added["layers.1.down.lora.lora_a"] == (64, 4)
  assert isinstance(model.layers[0].attention.query, nnx.LinearGeneral)


def test_an_adapter_computes_in_the_dtype_of_its_layer():
  layer = nnx.Linear(8, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  add_lora(layer, "*", rank=2, rngs=nnx.Rngs(1))
  assert layer.lora.lora_a.dtype == jnp.float32
  assert layer(jnp.ones((2, 8), jnp.bfloat16)).dtype == jnp.bfloat16


def test_contracted_dims_that_are_not_last():
  layer = nnx.LinearGeneral((3, 4), (5, 2), axis=(0, 2), rngs=nnx.Rngs(0))
  base = nnx.clone(layer)
  add_lora(layer, "*", rank=2, alpha=3.0, rngs=nnx.Rngs(1))
  layer.lora.lora_b[...] = jax.random.normal(jax.random.key(0), (2, 10))
  x = jax.random.normal(jax.random.key(1), (3, 7, 4))
  merge_adapters(base, layer)
  np.testing.assert_allclose(layer(x), base(x), atol=1e-5)


def test_errors():
  with pytest.raises(CheckpointError, match=r"\*\.gate matches no linear layer of the Sequential\.\n  lin"):
    add_lora(base_init(), ["*.up", "*.gate"], rank=2, rngs=nnx.Rngs(0))
  with pytest.raises(CheckpointError, match=r"up matches no linear layer of the Linear\.\n.*: the model"):
    add_lora(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "up", rank=2, rngs=nnx.Rngs(0))
  with pytest.raises(CheckpointError, match="norm matches no linear layer"):
    add_lora(base_init(), "*.norm", rank=2, rngs=nnx.Rngs(0))
  with pytest.raises(CheckpointError, match=r"layers\.0\.down has an adapter already"):
    add_lora(init(), "*.down", rank=2, rngs=nnx.Rngs(0))
  stacked = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(nnx.Rngs(0).split(3))
  with pytest.raises(CheckpointError, match=r"not a single layer: its kernel has the shape \(3, 8, 8\)"):
    add_lora(stacked, "*", rank=2, rngs=nnx.Rngs(0))
  with pytest.raises(CheckpointError, match="rank=0"):
    add_lora(base_init(), "*.down", rank=0, rngs=nnx.Rngs(0))


QWEN = {
  "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 64, "head_dim": 16, "intermediate_size": 96,
  "vocab_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
  "rms_norm_eps": 1e-6, "dtype": "float32", "tie_word_embeddings": False,
  "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 128, (8, 12)).astype(np.int32)


def folder_of(tmp_path, config):
  """A folder of a model on Hugging Face, with random weights."""
  (tmp_path / "config.json").write_text(json.dumps(config))
  export_safetensors(tmp_path / "theirs", from_config(tmp_path, nnx.Rngs(3)), weight_map_of(tmp_path))
  (tmp_path / "config.json").rename(tmp_path / "theirs" / "config.json")
  return tmp_path / "theirs"


def filled(model):
  """The same model with second factors that are not zero."""
  for n, (_, leaf) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))):
    if leaf.shape[0] < leaf.shape[1]:
      leaf[...] = jax.device_put(jax.random.normal(jax.random.key(n), leaf.shape), leaf.get_value().sharding)
  return model


def logits(model):
  return np.asarray(
    nxp.hosts.to_host(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(TOKENS)))
  )


def adapters_of(folder):
  return {name: tensor[()] for name, tensor in read_tensors(folder).items()}


def test_ranks_and_scales_that_differ_are_named_by_module(tmp_path):
  theirs = folder_of(tmp_path, QWEN)
  model = from_config(theirs, nnx.Rngs(0))
  add_lora(model, ["layers.*.self_attn.q_proj", "layers.0.mlp.up_proj"], rank=4, rngs=nnx.Rngs(1))
  add_lora(model, "layers.1.self_attn.o_proj", rank=2, alpha=5.0, rngs=nnx.Rngs(2))
  found = logits(filled(model))
  export_peft(tmp_path / "peft", model, theirs)
  settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
  assert settings["target_modules"] == [  # not each up_proj and o_proj
    "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.q_proj",
  ]  # fmt: skip
  assert settings["rank_pattern"] == {"model.layers.1.self_attn.o_proj": 2}
  assert settings["alpha_pattern"] == {"model.layers.1.self_attn.o_proj": 5}
  plain = from_config(theirs, nnx.Rngs(0))
  import_peft(tmp_path / "peft", plain, theirs)
  np.testing.assert_allclose(logits(plain), found, rtol=1e-4, atol=1e-4)
  assert plain.layers[1].self_attn.o_proj.lora_scale == 2.5


def peft_folder(path, arrays, **settings):
  """A folder as another program writes it."""
  path.mkdir()
  settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, **settings}
  (path / "adapter_config.json").write_text(json.dumps(settings))
  safetensors.numpy.save_file(arrays, path / "adapter_model.safetensors")
  return path


def query(prefix="model.", out=64, rank=2):
  start = f"base_model.model.{prefix}layers.0.self_attn.q_proj"
  return {
    f"{start}.lora_A.weight": np.ones((rank, 64), np.float32),
    f"{start}.lora_B.weight": np.ones((out, rank), np.float32),
  }


def test_adapters_of_other_programs(tmp_path):
  theirs = folder_of(tmp_path, QWEN)
  cases = [
    (query(), {}, 4.0),
    (query(""), {}, 4.0),  # of the class without a head
    (query(), {"use_rslora": True}, 8 / 2**0.5),
    (query(), {"alpha_pattern": {"k_proj": 3, "q_proj": 16}}, 8.0),
  ]
  for n, (arrays, settings, scale) in enumerate(cases):
    model, folder = from_config(theirs, nnx.Rngs(0)), peft_folder(tmp_path / f"{n}", arrays, **settings)
    assert import_peft(folder, model, theirs) == ["layers.0.self_attn.q_proj"]
    assert model.layers[0].self_attn.q_proj.lora_scale == pytest.approx(scale)


def test_adapters_that_peft_wrote_compute_what_peft_computes(tmp_path):
  base = REFERENCES / "llama"
  given, want = np.load(base / "reference.npz"), np.load(base / "peft" / "reference.npz")["logits"]
  model = nxp.interop.load_huggingface(base, nxp.make_mesh(AXES), RULES)
  import_peft(base / "peft", model, base)

  def run(model):
    found = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(given["input_ids"]))
    return np.asarray(nxp.hosts.to_host(found))

  np.testing.assert_allclose(run(model), want, rtol=1e-4, atol=1e-4)
  export_peft(tmp_path / "ours", model, base)  # make_references.py reads such a folder with PEFT
  ours, theirs = adapters_of(tmp_path / "ours"), adapters_of(base / "peft")
  assert ours.keys() == theirs.keys()
  for name, values in theirs.items():
    np.testing.assert_array_equal(ours[name], values)
  again = nxp.interop.load_huggingface(base, nxp.make_mesh(AXES), RULES)
  import_peft(tmp_path / "ours", again, base)
  np.testing.assert_allclose(run(again), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  "setting",
  [
    {"use_dora": True},
    {"bias": "all"},
    {"init_lora_weights": "pissa"},  # trained beside other base weights
    {"alora_invocation_tokens": [1, 2]},
    {"of_a_later_version": {"on": True}},
  ],
)
def test_settings_of_peft_that_adapters_here_do_not_have(tmp_path, setting):
  ((key, value),) = setting.items()
  folder = peft_folder(tmp_path / "peft", query(), **setting)
  with pytest.raises(CheckpointError, match=rf"has {key}={re.escape(repr(value))}, which adapters here"):
    import_peft(folder, from_config(folder_of(tmp_path, QWEN), nnx.Rngs(0)), tmp_path / "theirs")


def test_adapters_that_do_not_fit_are_named(tmp_path):
  theirs = folder_of(tmp_path, QWEN)
  fresh = lambda: from_config(theirs, nnx.Rngs(0))
  with pytest.raises(CheckpointError, match="Decoder has no adapter"):
    export_peft(tmp_path / "peft", fresh(), theirs)
  with pytest.raises(CheckpointError, match=r"cannot read .*adapter_config.json.*\n.*folder that PEFT"):
    import_peft(tmp_path, fresh(), theirs)
  with pytest.raises(CheckpointError, match="it is of the type 'IA3', and not LORA"):
    import_peft(peft_folder(tmp_path / "ia3", query(), peft_type="IA3"), fresh(), theirs)
  unknown = query() | {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((2, 128), np.float32)}
  with pytest.raises(CheckpointError, match=r"1 arrays that fit no linear layer of the Decoder\.\n"):
    import_peft(peft_folder(tmp_path / "unknown", unknown), fresh(), theirs)
  with pytest.raises(CheckpointError, match=r"q_proj does not fit .*\n  lora_A \(2, 64\), lora_B \(32, 2\)"):
    import_peft(peft_folder(tmp_path / "small", query(out=32)), fresh(), theirs)
  model = fresh()
  add_lora(model, "layers.*.self_attn.q_proj", rank=2, rngs=nnx.Rngs(1))
  with pytest.raises(CheckpointError, match=r"only in the model: layers.1.self_attn.q_proj\n  only in the"):
    import_peft(peft_folder(tmp_path / "fewer", query()), model, theirs)
  model = fresh()
  add_lora(model, "layers.0.self_attn.q_proj", rank=4, rngs=nnx.Rngs(1))
  with pytest.raises(CheckpointError, match=r"has rank 2 in (.|\n)*add_lora\(..., rank=2\)"):
    import_peft(peft_folder(tmp_path / "rank", query()), model, theirs)


def test_the_tables_keep_the_order_of_inputs_and_outputs():
  for table in tomllib.loads(TABLES.read_text()).values():
    for _, path, *pattern in table["rules"]:
      if path.endswith(".kernel") and pattern:
        left, right = pattern[0].split(" -> ")
        dims = [part.strip("()").split() for part in re.findall(r"\([^)]*\)|\w+", left)]
        if len(dims) == 2:  # not of a convolution
          out, inputs = dims
          assert right.split() == [*inputs, *out]
