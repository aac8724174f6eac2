"""The commands that answer before anything runs."""

import json
import pathlib
import re
import shlex
import textwrap
from types import SimpleNamespace

import pytest

from nnx_parallel.cli.command import main

RECIPE = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import nnx_parallel as nxp


class Net(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(64, 128, rngs=rngs)

  def __call__(self, x):
    return self.up(x)


def init():
  return Net(nnx.Rngs(0))


def optimizer():
  return optax.sgd(0.1)


def loss(model, batch):
  return jnp.mean(jnp.square(model(batch)))


def batches(start=0, *, split="train"):
  while True:
    yield np.zeros((256, 64), np.float32)


def rules():
  return [nxp.LogicalRules(batch="fsdp"), nxp.fsdp(min_size=0)]


def mesh():
  return {"fsdp": 4}
"""


@pytest.fixture
def recipe(tmp_path):
  path = tmp_path / "small.py"
  path.write_text(textwrap.dedent(RECIPE))
  return str(path)


def edit(recipe, *changes):
  """Writes a recipe again, with texts (old, new) exchanged."""
  path = pathlib.Path(recipe)
  text = path.read_text()
  for old, new in changes:
    assert old in text
    text = text.replace(old, new)
  path.write_text(text)


def printed_command(text):
  """The words of the command that a search prints for its winner."""
  line = next(line for line in text.splitlines() if line.startswith("  nnx-parallel compile"))
  return shlex.split(line)[1:]


@pytest.fixture
def run(capsys):
  """Runs a command in this process, which has eight devices; gives its exit code and what it printed."""

  def run(*arguments):
    code = main(arguments)
    return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

  return run


def test_compile_prints_a_report_and_writes_a_page(recipe, tmp_path, run):
  page = tmp_path / "page.html"
  done = run("compile", recipe, "--topology", "cpu:8", "--html", str(page))
  assert done.code == 0, done.err
  assert "Compiled for 8 x cpu (mesh fsdp 8)" in done.out
  assert "FITS" in done.out
  assert page.read_text().startswith("<!doctype html>")


def test_compile_ends_with_3_when_it_does_not_fit(recipe, run):
  # 256 Mi examples of 64 floats: 64 GiB of inputs, 8 on each device, and as much again for results.
  done = run("compile", recipe, "--topology", "cpu:8", "--batch", str(1 << 28), "--chip", "v5e", "--json")
  assert done.code == 3, done.err
  report = json.loads(done.out)
  assert report["fits"] is False
  assert report["need_bytes"] > report["available_bytes"]


def test_search_prints_the_winner(recipe, run):
  done = run("search", recipe, "--topology", "tpu:v5e:4x4")
  assert done.code == 0, done.err
  assert "Best layout of each mesh" in done.out
  assert "nxp.make_mesh(fsdp=16)" in done.out
  body = json.loads(run("search", recipe, "--topology", "tpu:v5e:2x4", "--json").out)
  assert body["best"]["mesh"] == {"fsdp": 8}
  assert body["best"]["compiled_bytes"] > 0
  assert not any("simulated" in note for note in body["notes"])


def test_the_command_of_the_winner_runs_as_printed(recipe, run):
  found = run("search", recipe, "--topology", "cpu:8", "--batch", "512")
  assert found.code == 0, found.err
  done = run(*printed_command(found.out), "--json")
  assert done.code == 0, done.err
  report = json.loads(done.out)
  assert report["axes"] == {"fsdp": 8}
  assert report["quantities"]["batch"] == 512 * 64 * 4


def test_commands_name_a_stage_an_offload_and_rules(recipe, run):
  rules = 'nxp.LogicalRules(batch="data", sequence=None, hidden="tensor")'
  edit(
    recipe,
    *(("sgd(0.1)", "adam(0.1)"), ("(256, 64)", "(256, 32, 64)"), ('{"fsdp": 4}', '{"data": 4, "tensor": 1}')),
    ("return self.up(x)", 'return self.up(nxp.constrain(x, "batch", "sequence", None))'),
    ('nxp.LogicalRules(batch="fsdp")', f'{rules}, nxp.PathRules({{"up.kernel": (None, "hidden")}})'),
    ("nxp.fsdp(min_size=0)", "nxp.replicate()"),
  )
  how = ("--zero", "2", "--offload", "--rules", "sequence=tensor", "--batch", "64")
  found = run("search", recipe, "--topology", "cpu:8", "--compile-best", "0", *how)
  assert found.code == 0, found.err
  assert "--zero 2 --offload --rules sequence=tensor --batch 64" in found.out
  text = re.sub(r"--mesh \S+ --microbatches \d+", "--mesh data=4,tensor=2 --microbatches 2", found.out)
  words = printed_command(text)
  done = run(*words, "--json")
  assert done.code == 0, done.err
  report = json.loads(done.out)
  assert report["examples"] == 64 // 4 // 2
  assert report["categories"].get("optimizer", 0) < 64
  # The kernel's gradient over both axes, not over tensor alone: what whole gradients would need is more.
  assert any(c["kind"] == "all-to-all" or "tensor" in c["axes"] for c in report["collectives"])
  planned = run("plan", recipe, "--chip", "cpu", *words[4:])
  assert planned.code == 0, planned.err
  assert "Host memory: " in planned.out


def test_plan_compares_its_memory_with_a_chip_and_writes_a_page(recipe, tmp_path, run):
  page = tmp_path / "plan.html"
  done = run("plan", recipe, "--chip", "v5e", "--html", str(page))
  assert done.code == 0, done.err
  assert "Planned memory per device" in done.out
  assert "May fit on v5e: needs at least " in done.out
  assert page.read_text().startswith("<!doctype html>")
  assert "Planned memory per device" in page.read_text()


def test_search_ends_with_3_when_nothing_fits(recipe, run):
  done = run("search", recipe, "--topology", "tpu:v5e:1x1", "--batch", str(1 << 30))
  assert done.code == 3, done.err
  assert "Nothing fits" in done.out


def test_plan_ends_with_3_when_its_memory_does_not_fit(recipe, run):
  large = ("plan", recipe, "--chip", "v5e", "--batch", str(1 << 30))
  done = run(*large)
  assert done.code == 3, done.err
  assert "Does not fit on v5e: needs at least " in done.out
  # More devices along the axis of the batch are the cure.
  done = run(*large, "--mesh", "fsdp=1024", "--json")
  assert done.code == 0, done.err
  assert json.loads(done.out)
