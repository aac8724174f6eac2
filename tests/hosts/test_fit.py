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
    batch = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
    yield batch * np.float32(np.nan if step == 6 else 1)

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
      trackers=[log.write, lambda step, values: seen.append(step)], nonfinite="back",
    )
  losses = [record["loss"] for record in result.history if np.isfinite(record.get("loss", np.nan))]
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
    said = [line for line in text.splitlines() if "of host memory on each process" not in line]
    found.append(
      {
        "lines": [line.partition("loss")[0].replace(str(folder), "") for line in said],
        "steps": [record["step"] for record in nxp.loop.read_metrics(folder / "m.jsonl")],
        "files": {path.name for path in folder.iterdir()} - {"1.json"},
        "results": json.loads((folder / "0.json").read_text()),
      }
    )
  one, two = found
  results = [[step, why, pytest.approx(losses, rel=1e-5), seen] for step, why, losses, seen in two["results"]]
  assert one == {**two, "results": results}
  assert two["results"][0][1] == "early"
  assert any("went back to here, behind 4 batches: the loss of step 7" in line for line in first.splitlines())
  assert any(line.startswith("step  1/60  ") for line in two["lines"])
  assert two["results"][1][3] == two["steps"]  # a log that is opened anew has a new file
  assert second == ""
  other = json.loads((folders[1] / "1.json").read_text())
  assert other == [[step, why, losses, []] for step, why, losses, _ in two["results"]]


UNEVEN = """
import jax, numpy as np, optax
from flax import nnx
import nnx_parallel as nxp

folder, mode = arguments
me = jax.process_index()
init = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=8), optimizer=optax.adam(1e-2))
model, optimizer = nxp.create_sharded_model(plan)

def batches(samples):
  for step in range(6):
    if me == 1 and step == 3:
      if mode == "fails":
        raise ValueError("a bad shard")
      if mode == "ends":
        return
    yield np.ones((4 if mode == "rows" and me == 1 and step == 3 else 8, 16), np.float32)

options = {"steps": 5 + me} if mode == "steps" else {"steps": None}
with nxp.Checkpointer(folder) as checkpointer:
  try:
    nxp.fit(
      nxp.train_step(lambda model, x: (model(x) ** 2).mean()), model, optimizer, batches, plan=plan,
      checkpointer=checkpointer, progress=False, **options,
    )
  except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0], getattr(error, "__notes__", []))
  print("steps", checkpointer.steps())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "texts", "saved"), [
  ("ends", ["step 4 cannot be made: the data of processes [1] of 2 has ended"] * 2, [3]),
  ("fails", ["the data of processes [1] failed (ValueError: a bad shard)", "ValueError a bad shard"], [3]),
  ("rows", ["step 4 cannot be made: processes [1] have another batch than process 0"] * 2, [3]),
  ("steps", ["step 1 cannot be made: processes [1] have another batch than process 0"] * 2, []),
])  # fmt: skip
def test_processes_agree_on_the_end_and_save_the_last_step(tmp_path, mode, texts, saved):
  for out, text in zip(run_two(UNEVEN, tmp_path / "run", mode), texts, strict=True):
    assert text in out
    assert f"steps {saved}" in out
    assert "step 3 was saved" in out or not saved
