"""Weight maps guessed from shapes and names."""

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import nnx_parallel as nxp
from interop.test_huggingface import PRESETS, RECIPE, REFERENCES, assert_reference, copy, plan_of
from nnx_parallel.cli.command import main
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.huggingface import weight_map_of
from nnx_parallel.interop.match import match_by_shape
from nnx_parallel.interop.safetensors import import_safetensors, read_tensors
from nnx_parallel.interop.weights import load_weight_map


def sources(weight_map, plan, folder):
  """The arrays of the file behind each leaf."""
  shapes = {name: tensor.shape for name, tensor in read_tensors(folder).items()}
  groups = weight_map.match([leaf.name for leaf in plan.leaves], shapes)
  return {path: (group.names, layer) for group in groups for layer, path in group.layers.items()}


@pytest.mark.parametrize("family", PRESETS)
def test_what_the_tables_say_or_a_doubt(family):
  folder, plan = REFERENCES / family, plan_of(family, nxp.abstract_mesh(fsdp=2, tensor=2))
  found = match_by_shape(folder, plan)
  assert found.complete
  guess, truth = (sources(one, plan, folder) for one in (found.weight_map, weight_map_of(folder)))
  wrong = {
    path.replace(".0.", ".{i}.").replace(".1.", ".{i}.") for path in truth if guess[path] != truth[path]
  }
  assert wrong <= {pair.model.name for pair in found.pairs if pair.how == "by order: check"}
  # The names in BERT and ViT do not tell which of two norms comes first.
  assert bool(wrong) == (family in ("bert", "vit"))


META = {
  "model.": "",
  "self_attn.": "attention.",
  "mlp.": "feed_forward.",
  **{f"{part}_proj": f"w{part}" for part in "qkvo"},
  "gate_proj": "w1",
  "down_proj": "w2",
  "up_proj": "w3",
  "post_attention_layernorm": "norm_2.after_attention",
  "input_layernorm": "norm_1.input",
  "embed_tokens": "tok_embeddings",
  "lm_head": "output",
}


def meta(name):
  for theirs, ours in META.items():
    name = name.replace(theirs, ours)
  return name


def test_other_names_give_the_reference(tmp_path, capsys):
  folder = copy("llama", tmp_path, rename=meta)
  (tmp_path / "mine.py").write_text(RECIPE.format(folder=str(REFERENCES / "llama")))
  mine, guess, steps = (str(tmp_path / name) for name in ("mine.py", "guess.py", "steps"))
  assert main(["import", str(folder), steps, mine, "--match", guess]) == 0
  assert "layers.{i}.attention.wq.weight" in capsys.readouterr().out
  assert main(["import", str(folder), steps, mine, "--match", guess]) == 1
  assert "cannot write" in capsys.readouterr().err
  plan = plan_of("llama", nxp.make_mesh(data=2, fsdp=2, tensor=2))
  assert_reference(import_safetensors(folder, plan, load_weight_map(guess)), "llama")


class Net(nnx.Module):
  """Layers of several widths, a square kernel, and one that the file has not."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.stages = nnx.List(
      [nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)]
    )
    self.conv = nnx.Conv(3, 5, (2, 2), rngs=rngs)
    self.table = nnx.Embed(9, 4, rngs=rngs)
    self.late = nnx.Param(np.zeros(11, np.float32))


def test_layers_of_several_widths_and_what_is_left(tmp_path):
  draw = np.random.default_rng(0).standard_normal
  there = {f"net.{i}.weight": draw(shape, np.float32) for i, shape in enumerate([(6, 4), (6, 6), (3, 6)])}
  there |= {f"net.{i}.bias": draw(size, np.float32) for i, size in enumerate([6, 6, 3])}
  there |= {"patch.weight": draw((5, 3, 2, 2), np.float32), "patch.bias": draw(5, np.float32)}
  there |= {"words.weight": draw((9, 4), np.float32).astype(np.float16), "lost": draw(13, np.float32)}
  safetensors.numpy.save_file(there, tmp_path / "model.safetensors")
  plan = nxp.plan(Net, nxp.make_mesh(fsdp=8), nxp.replicate())
  found = match_by_shape(tmp_path, plan)
  assert [one.name for one in found.missing] == ["late"]
  assert [one.name for one in found.unused] == ["lost"]
  assert not found.complete
  (tmp_path / "guess.py").write_text(found.as_code())
  model = import_safetensors(tmp_path, plan, load_weight_map(str(tmp_path / "guess.py")), skip=["late"])
  for i in range(3):
    np.testing.assert_array_equal(model.stages[i].kernel.get_value(), there[f"net.{i}.weight"].T)
    np.testing.assert_array_equal(model.stages[i].bias.get_value(), there[f"net.{i}.bias"])
  np.testing.assert_array_equal(model.conv.kernel.get_value(), there["patch.weight"].transpose(2, 3, 1, 0))
  np.testing.assert_array_equal(model.table.embedding.get_value(), there["words.weight"].astype(np.float32))
  with pytest.raises(
    CheckpointError, match="1 leaves of the model have no source, 1 arrays of the file no use"
  ):
    import_safetensors(tmp_path, plan, found.weight_map)


def test_kernels_of_flax_are_not_turned(tmp_path):
  there = {
    "a.w": np.ones((4, 4), np.float32),
    "b.w": np.ones((4, 6), np.float32),
    "c.w": np.ones((6, 4), np.float32),
  }
  safetensors.numpy.save_file(there, tmp_path / "model.safetensors")

  def init():
    rngs = nnx.Rngs(0)
    sizes = {"a": (4, 4), "b": (4, 6), "c": (6, 4)}
    return nnx.Dict({name: nnx.Linear(*size, use_bias=False, rngs=rngs) for name, size in sizes.items()})

  found = match_by_shape(
    tmp_path, nxp.plan(init, nxp.make_mesh(devices=jax.devices()[:1], x=1), nxp.replicate())
  )
  rules = {rule.file: (rule.model[0], rule.transform.pattern) for rule in found.weight_map.rules}
  assert rules == {f"{name}.w": (f"{name}.kernel", "") for name in "abc"}
