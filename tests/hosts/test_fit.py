"""`fit` in two processes: lines, metrics and checkpoints are those of one, and none is written twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import nnx_parallel as nxp
from nnx_parallel.hosts.launch import Job, launch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import itertools, json, sys
import jax, numpy as np, optax
from flax import nnx
import nnx_parallel as nxp

nxp.init_distributed()
folder, steps = sys.argv[1], int(sys.argv[2])

def loss_fn(model, x):
  return ((model(x) - x) ** 2).mean()

def batches(samples):
  for step in itertools.count(samples // 16):
    yield np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)

def placed(samples):
  return nxp.batches(batches(samples), plan, global_batch=True)

init = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
plan = nxp.plan(init, nxp.make_mesh(data=4), nxp.fsdp("data", min_size=1), optimizer=optax.adam(0.1))
model, optimizer = nxp.create_sharded_model(plan)
evaluate_step, held_out = nxp.eval_step(loss_fn), [next(batches(10**6 + 16 * i)) for i in range(2)]
seen = []

def evaluate():
  return nxp.evaluate(evaluate_step, model, nxp.batches(held_out, plan, global_batch=True))

keeper = nxp.Checkpointer(f"{folder}/ckpt", best="eval_loss")
with keeper as checkpointer, nxp.loop.MetricsLog(f"{folder}/m.jsonl") as log:
  result = nxp.fit(
    nxp.train_step(loss_fn), model, optimizer, placed, steps=steps, plan=plan, checkpointer=checkpointer,
    save_every=4, resume="latest", evaluate=evaluate, eval_every=4,
    early_stop=nxp.loop.EarlyStop("eval_loss", 1, min_delta=0.05),
    trackers=[log.write, lambda step, values: seen.append(step)],
  )
losses = [record["loss"] for record in result.history if "loss" in record]
with open(f"{folder}/{jax.process_index()}.json", "w") as file:
  json.dump([result.step, result.stopped, losses, seen], file)
"""


@pytest.mark.slow
def test_two_processes_train_as_one_and_speak_once(tmp_path, monkeypatch):
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  script, found = tmp_path / "run.py", {}
  script.write_text(SCRIPT)
  for processes in (1, 2):
    folder, lines = tmp_path / str(processes), list[str]()
    folder.mkdir()
    command = [sys.executable, str(script), str(folder), "60"]
    job = Job(command, processes=processes, devices_per_process=4 // processes)
    assert launch(job, lines.append) == 0, lines
    assert launch(job, lines.append) == 0, lines  # resumes after the early stop, and is at the end
    found[processes] = {
      "lines": [line.partition("loss")[0].replace(str(folder), "") for line in lines],
      "steps": [record["step"] for record in nxp.loop.read_metrics(folder / "m.jsonl")],
      "files": {path.name for path in folder.iterdir()} - {"1.json"},
      "result": json.loads((folder / "0.json").read_text()),
    }
  one, two = found[1], found[2]
  step, stopped, losses, seen = two["result"]
  assert one == {**two, "result": [step, stopped, pytest.approx(losses, rel=1e-5), seen]}
  assert stopped == "early"
  assert "[0] step  1/60  " in two["lines"]
  assert seen == two["steps"]
  *same, nothing = json.loads((tmp_path / "2/1.json").read_text())
  assert same == [step, stopped, losses]
  assert nothing == []
