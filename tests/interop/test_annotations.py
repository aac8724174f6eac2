"""Patches that make models run on Explicit axes: their text, and the numbers of Auto axes."""

import importlib
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from layout import families
from nnx_parallel.cli.command import main
from nnx_parallel.core.nodes import path_str, value_of, variables
from training import plain_step, run_steps

RECIPES = {
  "starter": ({"fsdp": 8}, None),
  "text_lm": ({"data": 2, "fsdp": 2, "tensor": 2}, None),
  "digits": ({"data": 2, "tensor": 4}, {"batch": "data", "pixels": (), "hidden": "tensor", "digit": ()}),
}
TOKENS = np.random.default_rng(0).integers(0, 32, (16, 8)).astype(np.int32)
IMAGES = np.random.default_rng(0).normal(size=(16, 4, 4, 3)).astype(np.float32)
NEXT = """
import optax


def loss(model, batch):
  logits = model(batch)
  return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:]).mean()
"""
PAIRS = NEXT.replace("model(batch)", "model(batch, batch)")
SQUARES = """

def loss(model, batch):
  return (model(batch) ** 2).mean()
"""
MODELS = {"Llama": (NEXT, TOKENS), "T5": (PAIRS, TOKENS), "GPT": (NEXT, TOKENS), "ViT": (SQUARES, IMAGES)}


def text_of(found):
  (text,) = found.texts.values()
  return text


def applied(found, file):
  """Applies a patch to a copy of its file, as a person does."""
  (patch := file.parent / "model.patch").write_text(found.patch)
  subprocess.run(["git", "apply", patch.name], cwd=file.parent, check=True)
  assert file.read_text() == text_of(found)
  assert "auto_axes" not in text_of(found)


def trained(file, axes, rules, batch, kind, steps=2):
  """Losses and the last arrays of plain flax on a mesh with axes of one type."""
  recipe = nxp.recipes.load_recipe(str(file), needs=("init", "loss"))
  mesh = jax.make_mesh((*axes.values(),), (*axes,), axis_types=(kind,) * len(axes))
  plan = nxp.plan(recipe.init, mesh, rules)
  model = nxp.create_sharded_model(plan)
  placed = nxp.shard_batch(batch, plan)

  def scalar(model, batch):
    found = recipe.loss(model, batch)
    return found[0] if isinstance(found, tuple) else found

  step = plain_step(scalar)
  with jax.set_mesh(mesh):
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    losses = [float(step(model, optimizer, placed)) for _ in range(steps)]
  arrays = {path_str(path): np.asarray(value_of(x)) for path, x in variables(model).items() if _is_float(x)}
  return losses, arrays


def _is_float(leaf):
  return jnp.issubdtype(value_of(leaf).dtype, jnp.floating)


def assert_parity(file, axes, rules, batch, tmp_path, rtol=2e-6):
  """The patched file has no type errors, and computes the numbers of Auto axes."""
  copy = tmp_path / Path(file).name
  copy.write_text(Path(file).read_text())
  auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
  wanted, arrays = trained(copy, axes, rules, batch, auto)
  with pytest.raises(Exception, match=r"(?i)shard"):
    trained(copy, axes, rules, batch, explicit)
  found = nxp.interop.annotate(copy, nxp.abstract_mesh(axes), rules, batch)
  assert not found.missing
  applied(found, copy)
  losses, after = trained(copy, axes, rules, batch, explicit)
  assert wanted[0] != wanted[1]
  np.testing.assert_allclose(losses, wanted, rtol=rtol)
  for path, array in arrays.items():
    np.testing.assert_allclose(after[path], array, rtol=100 * rtol, atol=10 * rtol, err_msg=path)
  again = nxp.interop.annotate(copy, nxp.abstract_mesh(axes), rules, batch)
  assert not again.patch
  assert not again.missing
  return copy


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["starter", "digits", pytest.param("text_lm", marks=pytest.mark.nightly)])
def test_a_recipe_runs_on_explicit_axes_with_its_patch(name, tmp_path):
  axes, chosen = RECIPES[name]
  recipe = nxp.recipes.load_recipe(name)
  rules = recipe.rules() if chosen is None else nxp.LogicalRules(chosen)
  batch = next(iter(recipe.batches(0, split="train")))
  in_bfloat16 = {"rtol": 1e-4} if name == "digits" else {}
  copy = assert_parity(recipe.source, axes, rules, batch, tmp_path, **in_bfloat16)
  losses = []
  for one, kind in ((recipe, "Auto"), (nxp.recipes.load_recipe(str(copy)), "Explicit")):
    mesh = jax.make_mesh((*axes.values(),), (*axes,), axis_types=(jax.sharding.AxisType[kind],) * len(axes))
    plan = nxp.plan(one.init, mesh, rules, optimizer=optax.sgd(0.1))
    run = run_steps(plan, one.loss, [batch] * 2, microbatches=2)
    losses.append(run.losses)
  assert str(run.step.layers).startswith("computed on Explicit axes")
  np.testing.assert_allclose(*losses, rtol=in_bfloat16.get("rtol", 2e-6))


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_somebody_else_runs_on_explicit_axes_with_its_patch(name, tmp_path):
  loss, batch = MODELS[name]
  file = tmp_path / "model" / "families.py"
  file.parent.mkdir()
  file.write_text(
    Path(families.__file__).read_text() + f"\n\ndef init():\n  return {name}(nnx.Rngs(0))\n" + loss
  )
  rules = [nxp.presets.llama(), nxp.presets.fsdp_tensor(min_size=128)]
  assert_parity(file, {"fsdp": 4, "tensor": 2}, rules, batch, tmp_path)


LINES = """import jax
import jax.numpy as jnp
from flax import nnx


class Model(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.table = nnx.Param(jax.random.normal(rngs.params(), (64, 16)))
    self.kernel = nnx.Param(jax.random.normal(rngs.params(), (16, 16)))
    self.row = nnx.Param(jax.random.normal(rngs.params(), (16,)))
    self.norm = nnx.LayerNorm(16, rngs=rngs)
    self.conv = nnx.Conv(1, 8, (3,), use_bias=False, rngs=rngs)
    self.groups = nnx.Conv(8, 8, (3,), feature_group_count=2, use_bias=False, rngs=rngs)


def init():
  return Model()


def loss(model, i):
  t, w, r = model.table[...], model.kernel[...], model.row[...]
  x = jax.nn.one_hot(i, 16)
  y = CODE
  return (y**2).mean()
"""
# On the axis fsdp, which splits the batch and the first dim of each parameter.
FORMS = {
  "jnp.take(t, i, axis=0)": 't.at[i].get(mode="fill", out_sharding=P("fsdp", None))',
  "jnp.take(t, i, 0)": 't.at[i].get(mode="fill", out_sharding=P("fsdp", None))',
  "t[i]": 't.at[i].get(out_sharding=P("fsdp", None))',
  "(x) @ w": 'jnp.matmul((x), w, out_sharding=P("fsdp", None))',
  "x+(x@w)": 'x+(jnp.matmul(x, w, out_sharding=P("fsdp", None)))',
  "jnp.dot(x, w).sum(-1)": 'jnp.dot(x, w, out_sharding=P("fsdp", None)).sum(-1)',
  "jnp.einsum('bi,io->bo', x, w,)": "jnp.einsum('bi,io->bo', x, w, out_sharding=P(\"fsdp\", None))",
  "jnp.einsum(\n    'bi,io->bo',\n    x,\n    w,\n  )": "jnp.einsum(\n    'bi,io->bo',\n    x,\n    w,\n"
  '    out_sharding=P("fsdp", None),\n  )',
  "x[:16] * model.kernel": 'x[:16] * jax.sharding.reshard(model.kernel, P("fsdp", None))',
  "jnp.where(x > 0, r, 0)": "jnp.where(x > 0, jax.sharding.reshard(r, P(None)), 0)",
  "jnp.stack([x + 1, *[x @ w]])": 'jnp.stack([x + 1, *[jnp.matmul(x, w, out_sharding=P("fsdp", None))]])',
  "jnp.concatenate([x, t[:32]])": "jnp.concatenate([x, t[:32]])",
  "x.at[0].set(r)": 'x.at[0].set(r, out_sharding=P("fsdp", None))',
  "x.T.reshape(-1)": "x.T.reshape(-1, out_sharding=P(None))",
  "(lambda a: a @ w)(x)": '(lambda a: jnp.matmul(a, w, out_sharding=P("fsdp", None)))(x)',
  "jax.vmap(lambda a: a @ w)(x)": "jax.vmap(lambda a: jnp.matmul(a, w, out_sharding=P(None)))(x)",
  "x if f'{x.shape[0]!r}' else 0": "x if f'{x.shape[0]!r}' else 0",
  "'ä' and x @ w": "'ä' and jnp.matmul(x, w, out_sharding=P(\"fsdp\", None))",
}
ROWS = np.zeros(32, np.int32)


def annotated(code, tmp_path):
  (file := tmp_path / "lines.py").write_text(LINES.replace("CODE", code))
  return nxp.interop.annotate(file, nxp.abstract_mesh(fsdp=8), nxp.fsdp(min_size=0), ROWS), file


@pytest.mark.cases(9)
@pytest.mark.parametrize("code", FORMS)
def test_each_form_of_code_is_written_in_its_place(code, tmp_path):
  found, file = annotated(code, tmp_path)
  assert not found.missing
  assert f"  y = {FORMS[code]}\n" in text_of(found)
  if FORMS[code] == code:
    assert not found.patch
  else:
    assert "import jax.numpy as jnp\nfrom jax.sharding import PartitionSpec as P\n" in text_of(found)
    applied(found, file)


def test_a_gather_of_the_batch_is_a_note(tmp_path):
  found, _ = annotated("model.norm(x)", tmp_path)
  (note,) = found.notes
  assert note == (
    "lines.py, line 24: model.norm(x)\n  gathers the batch over fsdp\n  the batch and bias, scale of this"
    " layer are split over fsdp; replicate each by a rule"
  )
  assert "model.norm(jax.sharding.reshard(x, P(None, None)))" in text_of(found)
  assert str(found).endswith(f"note: {note}")


def test_a_name_that_is_taken_is_not_used(tmp_path):
  found, _ = annotated("x @ w\n  P = 1", tmp_path)
  assert "from jax.sharding import PartitionSpec\n" in text_of(found)
  assert "out_sharding=PartitionSpec(" in text_of(found)


STACKED = """

class Block(nnx.Module):
  def __init__(self, rngs):
    self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

  def __call__(self, x):
    return x + self.down(nnx.relu(self.up(x)))


class Stack(nnx.Module):
  def __init__(self, rngs):
    self.blocks = nnx.vmap(Block)(rngs.split(4))

  def __call__(self, x):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def run(block, x):
      return block(x)

    return run(self.blocks, x)


def init():
  return Stack(nnx.Rngs(0))
"""


def test_layers_in_a_scan_and_a_remat(tmp_path):
  file = tmp_path / "model" / "stack.py"
  file.parent.mkdir()
  file.write_text("from flax import nnx\n" + STACKED + SQUARES)
  batch = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
  assert_parity(file, {"fsdp": 8}, nxp.fsdp(min_size=128), batch, tmp_path)


# What no annotation helps, and what is said: the line, the operation, jax's words.
OPEN = {
  "model.groups(model.conv(x[..., None]))": (
    "in its backward pass: y = model.groups(model.conv(x[..., None]))",
    "This reshape is not supported",
  ),
  "x + 0\n  y @= w": ("line 25: y @= w", "illegally sharded result"),
}


@pytest.mark.parametrize("code", OPEN)
def test_a_place_that_cannot_be_annotated_is_named(code, tmp_path):
  found, _ = annotated(code, tmp_path)
  (text,) = found.missing
  for part in OPEN[code]:
    assert part in text
  assert text.endswith(
    "Fix: use rules that replicate the arrays of this line; or x = x @ w in place of x @= w"
  )


MAIN = """from nets import model
from nets.model import Net


def init():
  return Net()


def loss(net, x):
  return (net(x) ** 2).mean()
"""
NET = """import jax
import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
  def __init__(self):
    self.w = nnx.Param(jax.random.normal(jax.random.key(0), (16, 32)))

  def __call__(self, x):
    return jnp.dot(
      x,
      self.w[...]  # of all layers, (in, out)
    )
"""


def test_a_model_in_a_file_of_its_own_is_named_and_changed(tmp_path, monkeypatch):
  (main := tmp_path / "main.py").write_text(MAIN)
  (file := tmp_path / "nets" / "model.py").parent.mkdir()
  (tmp_path / "nets" / "__init__.py").touch()
  file.write_text(NET)
  batch = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
  given = (main, nxp.abstract_mesh(fsdp=8), nxp.fsdp(min_size=0), batch)
  (text,) = nxp.interop.annotate(*given).notes
  assert text.startswith("main.py, line 10: net(x)\n  gathers the batch over fsdp\n")
  assert text.endswith(
    f"for model.py, line 11: return jnp.dot(\n  Fix: change that file too: modules=[{str(file)!r}]"
  )
  monkeypatch.syspath_prepend(tmp_path)
  before = importlib.import_module("nets.model")
  found = nxp.interop.annotate(*given, modules=[file])
  assert sys.modules["nets.model"] is before
  assert not found.missing
  assert found.texts[str(main)] == MAIN
  assert (
    'self.w[...],\n      out_sharding=P("fsdp", None),  # of all layers, (in, out)\n'
    in found.texts[str(file)]
  )
  assert "--- a/nets/model.py\n+++ b/nets/model.py\n" in found.patch
  (tmp_path / "a.patch").write_text(found.patch)
  subprocess.run(["git", "apply", "a.patch"], cwd=tmp_path, check=True)
  assert file.read_text() == found.texts[str(file)]


def test_the_command_prints_the_patch_or_writes_it(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert main(["new", "mine.py"]) == 0
  capsys.readouterr()
  assert main(["annotate", "mine.py", "--mesh", "fsdp=8", "--batch", "32"]) == 0
  printed = capsys.readouterr().out
  assert printed.startswith("--- a/mine.py\n+++ b/mine.py\n")
  assert 'out_sharding=P("fsdp", None, None)' in printed
  assert main(["annotate", "mine.py:init", "--mesh", "fsdp=8", "--batch", "32", "--output", "a.patch"]) == 0
  assert Path("a.patch").read_text() == printed
  subprocess.run(["git", "apply", "a.patch"], check=True)
  assert main(["annotate", "mine.py", "--mesh", "fsdp=8", "--batch", "32"]) == 0
  out, err = capsys.readouterr()
  assert out == ""
  assert err == "mine runs on Explicit axes as it is\n"


def test_the_command_ends_with_3_where_a_place_remains(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  recipe = LINES.replace("CODE", "x + 0\n  y @= w").replace("def init", BATCHES + "def init")
  Path("open.py").write_text(recipe)
  assert main(["annotate", "open.py", "--mesh", "fsdp=8"]) == 3
  assert capsys.readouterr().err.startswith("not annotated: open.py, line ")


BATCHES = """def batches(start=0, *, split="train"):
  yield jnp.zeros(32, int)


def rules():
  import nnx_parallel as nxp

  return nxp.fsdp(min_size=0)


"""


def test_missing_functions_and_padding_are_errors(tmp_path):
  (file := tmp_path / "none.py").write_text("def init():\n  pass\n")
  with pytest.raises(nxp.errors.RecipeError, match=r"none\.py does not define loss\(\)"):
    nxp.interop.annotate(file, nxp.abstract_mesh(fsdp=8), None, ROWS)
  padded = (
    LINES.replace("CODE", "x")
    .replace("(64, 16)", "(60, 16)")
    .replace(")))", ")), out_sharding=('rows', None))", 1)
  )
  file.write_text(padded)
  rules = nxp.LogicalRules({"batch": "fsdp", "rows": "fsdp"}, uneven={"rows": "pad"})
  with pytest.raises(nxp.errors.TrainError, match="the plan pads table"):
    nxp.interop.annotate(file, nxp.abstract_mesh(fsdp=8), rules, ROWS)


def test_files_that_a_patch_would_not_fit_are_errors(tmp_path):
  text = LINES.replace("CODE", "x @ w")
  for name, content, message in (
    ("crlf.py", text.replace("\n", "\r\n").encode(), r"has the character '\\r'"),
    ("latin.py", f"# -*- coding: latin-1 -*-\n# \xe4\n{text}".encode("latin-1"), "cannot be read"),
    ("relative.py", f"from .other import x\n{text}".encode(), "has relative imports"),
    ("none.py", None, "cannot be read"),
  ):
    if content is not None:
      (tmp_path / name).write_bytes(content)
    with pytest.raises(nxp.errors.RecipeError, match=message):
      nxp.interop.annotate(tmp_path / name, nxp.abstract_mesh(fsdp=8), nxp.fsdp(min_size=0), ROWS)


def test_names_of_a_file_are_its_own(tmp_path):
  code = "(lambda slice: x[:, 0:8])(3)\n  y = mm(y, w[:8], out_sharding=jax.P('fsdp', None))"
  own = "def mm(a, b, *, out_sharding):\n  return jnp.matmul(a, b, out_sharding=out_sharding)\n\n\ndef init"
  (file := tmp_path / "a file.py").write_text(LINES.replace("CODE", code).replace("def init", own))
  found = nxp.interop.annotate(file, nxp.abstract_mesh(fsdp=8), nxp.fsdp(min_size=0), ROWS)
  assert not found.missing, found.missing
  if found.patch:
    assert found.patch.startswith("--- a/a file.py\t\n")


def test_each_call_imports_the_files_of_its_folder(tmp_path):
  batch = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
  before = {*sys.modules}, [*sys.path]
  for name in ("one", "two"):
    (folder := tmp_path / name).mkdir()
    (folder / "net_of_folder.py").write_text(NET)
    (folder / "train.py").write_text(MAIN.replace("nets.model", "net_of_folder").replace("nets", "os"))
    file = folder / "train.py"
    file.write_text(file.read_text().replace("from os import model\n", ""))
    (text,) = nxp.interop.annotate(file, nxp.abstract_mesh(fsdp=8), nxp.fsdp(min_size=0), batch).notes
    assert str(folder / "net_of_folder.py") in text
  assert ({*sys.modules} - before[0], sys.path) == (set(), before[1])


def test_a_stated_sharding_that_is_not_seen_is_named(tmp_path):
  code = "mm(x, w)"
  own = "import functools\nmm = functools.partial(jnp.matmul, out_sharding=jax.P('fsdp', None))\n\n\ndef init"
  (file := tmp_path / "partial.py").write_text(LINES.replace("CODE", code).replace("def init", own))
  with pytest.raises(nxp.errors.RecipeError, match=r"where it is not seen(.|\n)*partial\.py, line"):
    nxp.interop.annotate(file, nxp.abstract_mesh(fsdp=8), nxp.fsdp(min_size=0), ROWS)


def test_the_command_does_not_write_over_its_recipe(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert main(["new", "mine.py"]) == 0
  text = Path("mine.py").read_text()
  assert main(["annotate", "mine.py", "--mesh", "fsdp=8", "--batch", "32", "--output", "mine.py"]) == 1
  assert "is a file that the patch changes" in capsys.readouterr().err
  assert Path("mine.py").read_text() == text
