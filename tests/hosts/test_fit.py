"""`fit` in two processes: lines, metrics and checkpoints are those of one, and none is written twice."""

import json

import pytest

import nnx_parallel as nxp
from processes import run_two

SCRIPT = """
import itertools, json
import jax, numpy as np, optax
from flax import nnx
import nnx_parallel as nxp

(folder,) = arguments

def loss_fn(model, x):
  return ((model(x) - x) ** 2).mean()

def batches(samples):
  for step in itertools.count(samples // 16):
    yield np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)

def placed(samples):
  return nxp.batches(batches(samples), plan, global_batch=True)

init = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
plan = nxp.plan(init, nxp.make_mesh(data=8), nxp.fsdp("data", min_size=1), optimizer=optax.adam(0.1))
evaluate_step, held_out = nxp.eval_step(loss_fn), [next(batches(10**6 + 16 * i)) for i in range(2)]

def evaluate():
  return nxp.evaluate(evaluate_step, model, nxp.batches(held_out, plan, global_batch=True))

found = []
for _ in range(2):  # the second resumes after the early stop, and is at the end
  model, optimizer = nxp.create_sharded_model(plan)
  seen, keeper = [], nxp.Checkpointer(f"{folder}/ckpt", best="eval_loss")
  with keeper as checkpointer, nxp.loop.MetricsLog(f"{folder}/m.jsonl") as log:
    result = nxp.fit(
      nxp.train_step(loss_fn), model, optimizer, placed, steps=60, plan=plan, checkpointer=checkpointer,
      save_every=4, resume="latest", evaluate=evaluate, eval_every=4,
      early_stop=nxp.loop.EarlyStop("eval_loss", 1, min_delta=0.05),
      trackers=[log.write, lambda step, values: seen.append(step)],
    )
  losses = [record["loss"] for record in result.history if "loss" in record]
  found.append([result.step, result.stopped, losses, seen])
with open(f"{folder}/{jax.process_index()}.json", "w") as file:
  json.dump(found, file)
"""


@pytest.mark.everyday
@pytest.mark.slow
def test_two_processes_train_as_one_and_speak_once(tmp_path, capsys):
  folders = tmp_path / "one", tmp_path / "two"
  for folder in folders:
    folder.mkdir()
  exec(SCRIPT, {"arguments": [str(folders[0])]})
  (first, second) = run_two(SCRIPT, folders[1])
  found = []
  for folder, text in zip(folders, (capsys.readouterr().out, first), strict=True):
    found.append(
      {
        "lines": [line.partition("loss")[0].replace(str(folder), "") for line in text.splitlines()],
        "steps": [record["step"] for record in nxp.loop.read_metrics(folder / "m.jsonl")],
        "files": {path.name for path in folder.iterdir()} - {"1.json"},
        "results": json.loads((folder / "0.json").read_text()),
      }
    )
  one, two = found
  results = [[step, why, pytest.approx(losses, rel=1e-5), seen] for step, why, losses, seen in two["results"]]
  assert one == {**two, "results": results}
  assert two["results"][0][1] == "early"
  assert any(line.startswith("step  1/60  ") for line in two["lines"])
  assert two["results"][1][3] == two["steps"]  # a log that is opened anew has a new file
  assert second == ""
  other = json.loads((folders[1] / "1.json").read_text())
  assert other == [[step, why, losses, []] for step, why, losses, _ in two["results"]]
