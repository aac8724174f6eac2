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


def init():
  return nnx.Linear(8, 8, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": ("rows", "columns")})


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
  assert lines[16:] == [
    "metrics     runs/tiny/metrics.jsonl",
    "MFU         n/a (the peak of this device is not known)",
    "checkpoint  ckpt/20",
  ]
  written = records("runs/tiny/metrics.jsonl")
  assert [r["step"] for r in written] == [*range(1, 21), 20]
  assert written[-2]["loss"] < written[0]["loss"]
  assert written[-1].keys() == {"step", "eval_loss"}
  assert Path("ckpt/20").is_dir()


def test_a_resumed_run_equals_the_one_that_never_stopped(tiny, capsys):
  assert cli.main(["train", tiny, "--steps", "8", "--out", "straight"]) == 0
  common = ["train", tiny, "--checkpoint", "ckpt", "--out", "parts", "--resume"]
  assert cli.main([*common, "--steps", "3"]) == 0
  capsys.readouterr()
  assert cli.main([*common, "--steps", "8"]) == 0
  assert "from step 3" in capsys.readouterr().out.splitlines()[0]
  assert losses("parts") == losses("straight")


def test_a_resume_with_other_settings_says_which_differ(tiny, capsys):
  common = ["train", tiny, "--checkpoint", "ckpt", "--resume", "--quiet"]
  assert cli.main([*common, "--steps", "1"]) == 0
  assert cli.main(["inspect", "ckpt"]) == 0
  out = capsys.readouterr().out
  kept = json.loads(
    next(line for line in out.splitlines() if line.startswith("  settings ")).split(maxsplit=1)[1]
  )
  assert len(kept.pop("source_sha256")) == 64
  assert kept == {
    "mesh": {"data": 4, "tensor": 2},
    "microbatches": 1,
    "batch": 16,
    "steps": 1,
    "zero": 0,
    "offload": False,
    "remat": "as written",
    "rules": "",
    "text": None,
    "seed": None,
    "eval_every": None,
    "early_stop": None,
  }
  assert cli.main([*common, "--steps", "2", "--microbatches", "2", "--mesh", "data=8"]) == 0
  assert capsys.readouterr().err == (
    "a different layout than at step 1:\n"
    "mesh {'data': 4, 'tensor': 2} -> {'data': 8, 'tensor': 1}\n"
    "per device 164 B -> 292 B\n"
    "settings changed since step 1: mesh data=4,tensor=2 -> data=8,tensor=1; microbatches 1 -> 2;"
    " steps 1 -> 2\n"
  )


def test_a_run_that_is_done_says_how_to_go_on(tiny, capsys):
  common = ["train", tiny, "--steps", "3", "--checkpoint", "ckpt", "--quiet"]
  assert cli.main(common) == 0
  capsys.readouterr()
  assert cli.main([*common, "--resume"]) == 0
  assert capsys.readouterr().out == "step 3 is reached; continue with --steps 6\n"


def test_the_checkpoints_of_another_run_are_not_mixed_up(tiny, capsys):
  common = ["train", tiny, "--steps", "2", "--checkpoint", "ckpt", "--quiet"]
  assert cli.main(common) == 0
  assert cli.main(common) == 1
  assert capsys.readouterr().err == (
    "CheckpointError: ckpt holds the checkpoints of an earlier run.\n"
    "  steps 2\n"
    "  Fix: --resume to continue from the newest, or another --checkpoint DIR.\n"
  )


def test_evaluations_retention_and_the_best_step(tiny, capsys):
  common = ["train", tiny, "--steps", "8", "--checkpoint", "ckpt", "--peak-flops", "1e9", "--log-every", "3"]
  assert cli.main([*common, "--eval-every", "2", "--save-every", "2", "--keep", "1", "--profile", "3:4"]) == 0
  out = capsys.readouterr().out
  assert [line[:8] for line in out.splitlines() if "eval_loss" in line] == [
    f"step {n}/8" for n in (2, 4, 6, 8)
  ]
  assert re.search(r"^MFU         \d+\.\d%$", out, re.MULTILINE)
  assert "profile     xprof runs/tiny/profile" in out
  assert list(Path("runs/tiny/profile").rglob("*.xplane.pb"))
  assert [r["step"] for r in records("runs/tiny/metrics.jsonl") if "loss" in r] == [1, 2, 3, 4, 6, 8]
  kept = sorted(int(p.name) for p in Path("ckpt").iterdir() if p.name.isdigit())
  assert kept[-1] == 8
  assert len(kept) <= 2


STUCK = TINY.replace("optax.sgd(0.1)", "optax.sgd(0.0)")


def test_early_stop_ends_a_run_that_no_longer_improves(tiny, capsys):
  Path("stuck.py").write_text(STUCK)
  common = ["train", "stuck.py", "--steps", "20", "--checkpoint", "ckpt", "--eval-every", "2", "--quiet"]
  assert cli.main([*common, "--early-stop", "2"]) == 0
  assert "ended at step 6: no lower eval_loss in 2 evaluations" in capsys.readouterr().out
  # The first evaluation was the best; what was evaluated since is part of the checkpoint.
  assert cli.main([*common, "--early-stop", "3", "--resume", "6"]) == 0
  assert "ended at step 8: no lower eval_loss in 3 evaluations" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--early-stop", "2"], "--early-stop needs --eval-every N"),
    (["--keep", "2"], "--resume, --save-every and --keep need --checkpoint DIR"),
    (["--profile", "9"], "argument --profile: '9' is not a window of steps, such as 10:12"),
    (["--resume", "newest"], "argument --resume: 'newest' is not a step: a number, latest or best"),
  ],
)
def test_flags_that_mean_nothing(tiny, capsys, words, message):
  with pytest.raises(SystemExit):
    cli.main(["train", tiny, *words])
  assert message in capsys.readouterr().err


def test_text_is_refused_where_it_cannot_be_used(tiny, capsys):
  assert cli.main(["train", tiny, "--text", "."]) == 1
  assert capsys.readouterr().err == (
    "RecipeError: the recipe tiny takes no text.\n"
    "  neither its init() nor its batches() has an argument named text\n"
    "  Fix: leave --text out, or add the argument: def batches(start=0, *, split, text=None).\n"
  )


def test_the_batch_and_the_seed_reach_the_recipe(tiny, capsys):
  text = TINY.replace("def init():", "def init(seed=0):").replace("nnx.Rngs(0)", "nnx.Rngs(seed)")
  text = text.replace('split="train"):', 'split="train", batch=16):').replace(", 16):", ", batch):")
  Path("given.py").write_text(text.replace("(16, 8)", "(batch, 8)"))
  common = ["train", "given.py", "--steps", "2", "--quiet"]
  assert cli.main([*common, "--out", "plain"]) == 0
  assert cli.main([*common, "--out", "same", "--batch", "16", "--seed", "0"]) == 0
  assert cli.main([*common, "--out", "other", "--seed", "1", "--checkpoint", "ckpt"]) == 0
  assert losses("plain") == losses("same") != losses("other")
  assert cli.main([*common, "--batch", "32", "--steps", "3", "--checkpoint", "ckpt", "--resume"]) == 0
  assert nxp.Checkpointer("ckpt").restore_extra("data")["samples"] == 2 * 16 + 32
  assert "batch 16 -> 32" in capsys.readouterr().err


def test_a_batch_that_the_mesh_cannot_split(tiny, capsys):
  sizes = ["--mesh", "data=3", "--devices", "3"]
  assert cli.main(["train", tiny, *sizes, "--steps", "1"]) == 1
  assert "has 16 examples, which 3 shards cannot split evenly" in capsys.readouterr().err


def environment():
  import os

  root = str(Path(cli.__file__).parents[2])
  return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": root}


@pytest.mark.filterwarnings("ignore:the run continues from step 2")
def test_a_damaged_step_is_passed_over_and_made_again(tiny, capsys):
  common = ["train", tiny, "--checkpoint", "ckpt", "--resume", "--save-every", "2", "--quiet"]
  assert cli.main([*common, "--steps", "4"]) == 0
  next(Path("ckpt/4/model/d").iterdir()).write_bytes(b"")
  capsys.readouterr()
  assert cli.main([*common, "--steps", "6"]) == 0
  assert capsys.readouterr().err.startswith("warning: step 4 was passed over: step 4 is damaged: model/d/")
  assert cli.main(["verify", "ckpt"]) == 0


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_saves_and_goes_on_as_if_it_never_had(tiny, capsys):
  """The signal comes after an update, before its metrics are kept."""
  Path("ended.py").write_text(
    TINY.replace("def tokens(batch):", "def tokens(batch):\n  global n; n += 1\n  if n == 3: end()")
    + "\nimport os, signal\nn = 0\ndef end():\n  os.kill(os.getpid(), signal.SIGTERM)\n"
  )
  command = [sys.executable, "-m", "nnx_parallel", "train"]
  common = ["--checkpoint", "ckpt", "--out", "parts", "--steps", "8"]
  done = subprocess.run(
    [*command, "ended.py", *common], env=environment(), capture_output=True, text=True, check=False
  )
  assert done.returncode == 75, done.stderr
  assert done.stdout.splitlines()[-2] == "asked to end: saving step 3"
  capsys.readouterr()
  assert cli.main(["train", tiny, *common, "--resume"]) == 0
  assert "resumed from step 3" in capsys.readouterr().out.splitlines()[0]
  assert cli.main(["train", tiny, "--steps", "8", "--out", "straight", "--quiet"]) == 0
  assert losses("parts") == losses("straight")


LAYERED = (
  TINY.replace(
    "def init():",
    """class Layer(nnx.Linear):
  @nnx.remat
  def __call__(self, x):
    return nxp.constrain(super().__call__(x), "batch", "width")


def init():""",
  )
  .replace("return nnx.Linear(", "return Layer(")
  .replace('columns="tensor")', 'columns="tensor", width=None)')
)


@pytest.fixture
def layered(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  Path("layered.py").write_text(LAYERED)
  return "layered.py"


@pytest.mark.slow
def test_train_takes_the_way_that_search_prints(layered, capsys):
  """The same losses on every way, and a resume on another says which settings differ."""
  assert LAYERED != TINY
  common = ["train", layered, "--steps", "3", "--quiet"]
  assert cli.main([*common, "--out", "plain", "--checkpoint", "ckpt"]) == 0
  way = ["--remat", "none", "--rules", "width=tensor,columns=tensor", "--microbatches", "2", "--zero", "2"]
  assert cli.main([*common, "--out", "way", *way]) == 0
  expected = [loss for _, loss in losses("plain")]
  assert [loss for _, loss in losses("way")] == pytest.approx(expected, rel=1e-5)
  capsys.readouterr()
  resume = ["train", layered, "--steps", "4", "--quiet", "--checkpoint", "ckpt", "--resume", "--out", "plain"]
  assert cli.main([*resume, *way]) == 0
  said = capsys.readouterr().err
  assert 'remat "as written" -> "none"' in said
  assert 'rules "" -> "width=tensor,columns=tensor"' in said
  assert "zero 0 -> 2" in said


def test_the_rules_of_a_run_reach_its_loss(layered):
  from nnx_parallel.cli import options
  from nnx_parallel.loop.loader import load_recipe
  from nnx_parallel.loop.recipe import plan_recipe, start

  recipe = load_recipe(layered)
  mesh = nxp.make_mesh(data=4, tensor=2)
  texts = []
  for changes in ({}, {"width": ("tensor",)}):
    plan = plan_recipe(recipe, mesh, options.changed_rules(recipe, changes))
    run = start(recipe, plan)
    batch = nxp.shard_batch(next(iter(recipe.batches(0, split="train"))), plan)
    texts.append(run.step.lower(plan, batch=batch).as_text())
  assert texts[0] != texts[1]


DROPOUT = TINY.replace(
  "def init():",
  """class Layer(nnx.Linear):
  def __init__(self, *args, rngs, **options):
    super().__init__(*args, rngs=rngs, **options)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(super().__call__(x))


def init():""",
).replace("return nnx.Linear(", "return Layer(")


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dropout.py", "digits"])
def test_weights_of_others_are_trained_and_given_back(recipe, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  Path("dropout.py").write_text(DROPOUT)
  mesh = ["--mesh", "data=1", "--devices", "1"]
  train = ["train", recipe, *mesh, "--steps", "1", "--quiet", "--checkpoint"]
  train[2:2] = [] if recipe == "dropout.py" else ["--batch", "4"]
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
