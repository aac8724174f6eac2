"""`train` on a tiny recipe: what it prints, what it leaves behind, how it goes on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nnx_parallel as nxp
from nnx_parallel import cli

TINY = """
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp


class Layer(nnx.Linear):
  def __init__(self, *sizes, rngs, **options):
    super().__init__(*sizes, rngs=rngs, **options)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(super().__call__(x))


def init():
  return Layer(8, 8, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": ("rows", "columns")})


def optimizer():
  return optax.sgd(0.1)


def loss(model, batch):
  return jnp.square(model(batch["x"]) - 1.0).mean()


def mesh():
  return {"data": 4, "tensor": 2}


def rules():
  return nxp.LogicalRules(batch="data", rows=None, columns="tensor")


def batches(start=0, *, split="train"):
  for i in range(start, start + (32 if split == "held_out" else 10**9), 16):
    yield {"x": np.random.default_rng(i).standard_normal((16, 8)).astype(np.float32)}


def tokens(batch):
  return 1000
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  Path("tiny.py").write_text(TINY)
  return "tiny.py"


def records(path):
  return [json.loads(line) for line in Path(path).read_text().splitlines()]


def losses(out):
  return [(r["step"], r["loss"]) for r in records(f"{out}/metrics.jsonl") if "loss" in r]


def test_a_run_prints_its_course_and_leaves_metrics_curve_and_checkpoint(tiny, capsys):
  assert cli.main(["train", tiny, "--steps", "20", "--checkpoint", "ckpt"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith("tiny, 72 parameters on mesh data=4,tensor=2, ")
  assert lines[1].startswith("step  0/20  held out  loss ")
  assert lines[2].startswith("step  1/20  loss ")
  assert lines[12].startswith("step 20/20  loss ")
  assert "tokens/s" in lines[12]
  assert lines[13].startswith("step 20/20  eval_loss ")
  assert lines[14].startswith("step 20/20  checkpoint in ")
  assert lines[15].startswith("held out at step 20: loss ")
  assert [line.split()[0] for line in lines[16:]] == ["metrics", "MFU", "checkpoint"]
  written = records("runs/tiny/metrics.jsonl")
  assert [r["step"] for r in written] == [*range(1, 21), 20]
  assert written[-2]["loss"] < written[0]["loss"]
  assert written[-1].keys() == {"step", "eval_loss"}
  assert Path("ckpt/20").is_dir()


def test_a_run_that_is_done_says_how_to_go_on(tiny, capsys):
  common = ["train", tiny, "--steps", "3", "--checkpoint", "ckpt", "--quiet"]
  assert cli.main(common) == 0
  capsys.readouterr()
  assert cli.main([*common, "--resume"]) == 0
  assert capsys.readouterr().out == "step 3 is reached; continue with --steps 6\n"


def test_evaluations_retention_and_the_best_step(tiny, capsys):
  common = ["train", tiny, "--steps", "8", "--checkpoint", "ckpt", "--peak-flops", "1e9", "--log-every", "3"]
  assert cli.main([*common, "--eval-every", "2", "--save-every", "2", "--keep", "1", "--profile", "3:4"]) == 0
  out = capsys.readouterr().out
  evaluations = [line[:8] for line in out.splitlines() if "eval_loss" in line]
  assert evaluations == [f"step {n}/8" for n in (2, 4, 6, 8)]
  assert re.search(r"^MFU         \d+\.\d%$", out, re.MULTILINE)
  assert "profile     xprof runs/tiny/profile" in out
  assert list(Path("runs/tiny/profile").rglob("*.xplane.pb"))
  assert [r["step"] for r in records("runs/tiny/metrics.jsonl") if "loss" in r] == [1, 2, 3, 4, 6, 8]
  kept = sorted(int(p.name) for p in Path("ckpt").iterdir() if p.name.isdigit())
  assert kept[-1] == 8
  assert len(kept) <= 2


def test_text_is_refused_where_it_cannot_be_used(tiny, capsys):
  assert cli.main(["train", tiny, "--text", "."]) == 1
  said = capsys.readouterr().err
  assert said.startswith("RecipeError: the recipe tiny takes no text.")
  assert "Fix: leave --text out, or add the argument: def batches(start=0" in said


def environment():
  import os

  root = str(Path(cli.__file__).parents[2])
  return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": root}


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_saves_and_goes_on_as_if_it_never_had(tiny, capsys):
  """The signal comes after an update, before its metrics are kept."""
  Path("ended.py").write_text(
    TINY.replace("def tokens(batch):", "def tokens(batch):\n  global n; n += 1\n  if n == 3: end()")
    + "\nimport os, signal\nn = 0\ndef end():\n  os.kill(os.getpid(), signal.SIGTERM)\n"
  )
  command = [sys.executable, "-m", "nnx_parallel", "train"]
  common = ["--checkpoint", "ckpt", "--out", "parts", "--steps", "8"]
  options = {"env": environment(), "capture_output": True, "text": True}
  done = subprocess.run([*command, "ended.py", *common], **options, check=False)
  assert done.returncode == 75, done.stderr
  assert done.stdout.splitlines()[-2] == "asked to end: saving step 3"
  capsys.readouterr()
  assert cli.main(["train", tiny, *common, "--resume"]) == 0
  assert "resumed from step 3" in capsys.readouterr().out.splitlines()[0]
  assert cli.main(["train", tiny, "--steps", "8", "--out", "straight", "--quiet"]) == 0
  assert losses("parts") == losses("straight")


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tiny.py", "digits"])
@pytest.mark.usefixtures("tiny")
def test_weights_of_others_are_trained_and_given_back(recipe, capsys):
  mesh = ["--mesh", "data=1", "--devices", "1"]
  train = ["train", recipe, *mesh, "--steps", "1", "--quiet", "--checkpoint"]
  train[2:2] = [] if recipe == "tiny.py" else ["--batch", "4"]
  assert cli.main([*train, "first"]) == 0
  assert cli.main(["export", "first", "weights", recipe, *mesh]) == 0
  assert cli.main(["import", "weights", "tuned", recipe, *mesh]) == 0
  assert cli.main([*train, "tuned"]) == 1
  said = capsys.readouterr().err
  assert "Fix: --resume" in said
  assert cli.main([*train, "tuned", "--resume"]) == 0
  said = capsys.readouterr().err
  assert "tuned has no data cursor, so the data starts at its beginning" in said
  assert cli.main(["export", "tuned", "trained", recipe, *mesh]) == 0
  first, tuned = (nxp.Checkpointer(name).restore(as_numpy=True)["model"] for name in ("first", "tuned"))
  assert first.keys() == tuned.keys()
