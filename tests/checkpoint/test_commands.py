import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from checkpoint.runs import assert_same, chunks_of, data_of
from nnx_parallel.cli.command import main

RECIPE = """
import optax
from flax import nnx
import nnx_parallel as nxp

def init():
  return nnx.Linear(16, {width}, rngs=nnx.Rngs(0))

def optimizer():
  return optax.adam(1e-3)

def rules():
  return nxp.fsdp(min_size=1)

def mesh():
  return dict(fsdp=8)
"""


@pytest.fixture
def run_dir(tmp_path):
  (tmp_path / "recipe.py").write_text(RECIPE.format(width=32))
  (tmp_path / "wide.py").write_text(RECIPE.format(width=64))
  init, rules = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nxp.fsdp(min_size=1)
  plan = nxp.plan(init, nxp.make_mesh(fsdp=8), rules, optimizer=optax.adam(1e-3))
  model, optimizer = nxp.create_sharded_model(plan)
  ema = {"kernel": model.kernel.get_value() * 2, "n": [jax.random.key(1)]}
  extra = {"data": {"samples": 640}, "ema": ema}
  with nxp.Checkpointer(tmp_path / "run") as checkpointer:
    for step in (10, 20):
      checkpointer.save(step, model, optimizer, extra=extra, metrics={"loss": jnp.float32(0.25)}, plan=plan)
  return tmp_path


def test_inspect(run_dir, capsys):
  assert main(["inspect", str(run_dir / "run"), "--leaves", "model/*"]) == 0
  text = capsys.readouterr().out
  assert "2 complete steps" in text
  assert "loss=0.25" in text
  assert "mesh         {'fsdp': 8}" in text
  assert 'data         {"samples": 640}' in text
  assert "kernel     Param  float32[16,32]  2 KiB\n" in text
  assert "mu.kernel" not in text
  assert main(["inspect", str(run_dir / "run"), "--step", "15"]) == 1
  assert "cannot find step 15" in capsys.readouterr().err


def test_verify(run_dir, capsys):
  assert main(["verify", str(run_dir / "run")]) == 0
  assert capsys.readouterr().out == "step 10: good\nstep 20: good\n2 good, 0 damaged\n"
  victim = data_of(run_dir / "run", 20)
  victim.write_bytes(bytes(victim.stat().st_size))
  assert main(["verify", str(run_dir / "run")]) == 3
  text = capsys.readouterr().out
  assert "step 20: damaged\n" in text
  assert "model/kernel" in text
  assert "1 good, 1 damaged" in text
  assert main(["verify", str(run_dir / "run"), "--json"]) == 3
  found = json.loads(capsys.readouterr().out)["steps"]
  assert found["10"] == []
  assert any("model/kernel" in what for what in found["20"])
  (run_dir / "run" / "10" / "nnx_parallel.json").unlink()
  for arguments, counts in (([], "0 good, 2 damaged"), (["--step", "10"], "0 good, 1 damaged")):
    assert main(["verify", str(run_dir / "run"), *arguments]) == 3
    text = capsys.readouterr().out
    assert re.search(r"step 10: damaged\n  .*10 is damaged, or something else wrote it: nnx_p.* is mis", text)
    assert counts in text
  assert main(["verify", str(run_dir / "nowhere")]) == 1
  assert "there is no such directory" in capsys.readouterr().err


def test_diff(run_dir, capsys):
  arguments = ["--mesh", "fsdp=4", "--devices", "4"]
  assert main(["diff", str(run_dir / "run"), str(run_dir / "recipe.py"), *arguments]) == 0
  assert "step 20: fits the target" in capsys.readouterr().out
  assert main(["diff", str(run_dir / "run"), str(run_dir / "wide.py"), *arguments]) == 3
  assert "shape    model/kernel: saved (16, 32), wanted (16, 64)" in capsys.readouterr().out
  assert main(["diff", str(run_dir / "run"), str(run_dir / "wide.py"), *arguments, "--json"]) == 3
  found = json.loads(capsys.readouterr().out)
  assert {"leaf": "model/kernel", "saved": [16, 32], "wanted": [16, 64]} in found["reshaped"]
  assert (found["step"], found["fits"], found["missing"]) == (20, False, [])


def test_reshard_keeps_everything(run_dir, capsys):
  out = run_dir / "out"
  arguments = [str(run_dir / "recipe.py"), "--mesh", "fsdp=2", "--devices", "2"]
  assert main(["reshard", str(run_dir / "run"), str(out), *arguments]) == 0
  assert "step 20:" in capsys.readouterr().out
  old, new = nxp.Checkpointer(run_dir / "run"), nxp.Checkpointer(out)
  assert new.metadata().metrics == old.metadata().metrics
  assert new.restore_extra("data") == {"samples": 640}
  before, after = (c.restore(step=20, as_numpy=True) for c in (old, new))
  for item in before:
    assert_same(before[item], after[item])
  assert isinstance(after["model"]["kernel"], np.ndarray)
  assert len(chunks_of(out, 20, "kernel")) < len(chunks_of(run_dir / "run", 20, "kernel"))
  assert main(["reshard", str(out), str(out), *arguments]) == 1
  assert "into itself" in capsys.readouterr().err


def test_export_and_import(run_dir, capsys):
  weights = "from nnx_parallel.interop.weights import Rule, WeightMap\n"
  weights += 'WEIGHT_MAP = WeightMap(Rule("fc.weight", "kernel", "o i -> i o"), Rule("fc.bias", "bias"))\n'
  (run_dir / "weights.py").write_text(weights)
  (run_dir / "empty.py").write_text("")
  recipe, out, back = str(run_dir / "recipe.py"), str(run_dir / "hf"), str(run_dir / "back")
  how = [recipe, "--weight-map", str(run_dir / "weights.py"), "--mesh", "fsdp=4", "--devices", "4"]
  assert main(["export", str(run_dir / "run"), out, *how]) == 0
  assert capsys.readouterr().out == f"2 arrays -> {out}\n"
  assert main(["import", out, back, *how]) == 0
  assert "step 0: " in capsys.readouterr().out
  old, new = (nxp.Checkpointer(run_dir / name).restore(as_numpy=True) for name in ("run", "back"))
  assert_same(old["model"], new["model"])
  assert main(["export", str(run_dir / "run"), out, *how]) == 1
  assert f"cannot export to {out}: it exists" in capsys.readouterr().err
  assert main(["import", out, str(run_dir / "run"), *how]) == 1
  text = capsys.readouterr().err
  assert "it holds the checkpoints of a run.\n  steps 10, 20\n  Fix: choose an empty directory" in text
  assert nxp.Checkpointer(run_dir / "run").latest() == 20
  assert main(["import", out, back, recipe, "--weight-map", str(run_dir / "empty.py")]) == 1
  assert "empty.py defines no WEIGHT_MAP" in capsys.readouterr().err
  assert main(["import", out, back, recipe, "--weight-map", str(run_dir / "none.py")]) == 1
  assert "none.py: No such file" in capsys.readouterr().err
