"""Bring-up of several processes on one machine, and the time from a kill to training again.

Bring-up: from the call of `init_distributed` to its return on the last process, roll call and check of the
devices included, beside `jax.distributed.initialize` and the first `jax.devices()` alone; each process first
imports everything. The recovery: under `nnx-parallel launch`, the last process is killed in a step, and the
clock runs from there to the end of the first step that comes after it: the others are ended, all start again,
import, join, compile, and restore.

  python -m benchmarks.hosts
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Record
from nnx_parallel.hosts.launch import Job, launch

ROUNDS = 3
BRING_UP = """
import json, os, sys, time
import jax, nnx_parallel as nxp
nxp.init_distributed, nxp.hosts.barrier
process, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gate = sys.argv[1] + f"-{process}"
open(gate, "w").close()
while not all(os.path.exists(sys.argv[1] + f"-{other}") for other in range(count)):
  time.sleep(0.001)
began = time.time()
if sys.argv[2] == "nxp":
  nxp.init_distributed(devices_per_process=2)
else:
  address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
  jax.distributed.initialize(address, count, process)
  jax.devices()
print("seconds", time.time() - began)
"""
TRAINING = r"""
import os, sys, time
import numpy as np, optax
from flax import nnx
import nnx_parallel as nxp

seen = nxp.init_distributed(devices_per_process=2)
folder, first = sys.argv[1], os.environ["NNX_PARALLEL_ATTEMPT"] == "0"
init = lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0))
plan = nxp.plan(init, nxp.make_mesh(data=-1), nxp.fsdp("data", min_size=1), optimizer=optax.adam(1e-2))

def batches(samples):
  for step in range(samples // 16 + 1, 100):
    if first and step == 12 and seen.index == seen.count - 1:
      print(f"killed now {time.time()}\n", end="", flush=True)
      os.kill(os.getpid(), 9)
    yield np.ones((16, 64), np.float32)

def note(step, metrics):
  if not first:
    print(f"step {step} {time.time()}\n", end="", flush=True)  # in one piece

source = lambda n: nxp.batches(batches(n), plan, global_batch=True, prefetch=0)
with nxp.Checkpointer(folder) as checkpointer:
  step = nxp.train_step(lambda model, x: (model(x) ** 2).mean())
  nxp.fit(step, *nxp.create_sharded_model(plan), source, steps=14, plan=plan, checkpointer=checkpointer,
          save_every=5, resume="latest", progress=False, trackers=[note])
"""


def run(script: str, count: int, *words: str, restarts: int = 0) -> list[list[str]]:
  """Runs a script in so many processes of two devices each; the words of each line that it printed."""
  lines: list[str] = []
  with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "script.py")
    file.write_text(script)
    command = [sys.executable, str(file), str(Path(folder, "state")), *words]
    job = Job(command, processes=count, devices_per_process=2, restarts=restarts, pause=1.0)
    if launch(job, lines.append):
      raise SystemExit("\n".join(lines))
  return [line.split() for line in lines]


def bring_up(count: int, way: str) -> float:
  """Seconds of the slowest process."""
  return max(float(words[2]) for words in run(BRING_UP, count, way) if words[1:2] == ["seconds"])


def recovery(count: int) -> float:
  """Seconds from the kill to the first step after it."""
  lines = run(TRAINING, count, restarts=1)
  killed = next(float(words[3]) for words in lines if words[1:2] == ["killed"])
  again = min(float(words[3]) for words in lines if words[1:2] == ["step"])
  return again - killed


def main() -> None:
  """Measures, in turns, and writes the record."""
  os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
  record = Record(
    "hosts",
    __doc__.split("\n", 1)[0],
    command="python -m benchmarks.hosts",
    notes=[
      f"Medians of {ROUNDS} rounds, and the slowest; two simulated devices in each process. The pause before"
      " a restart is its default, 1 s, and part of the recovery. The programs are compiled anew."
    ],
  )
  for count in (2, 4):
    found: dict[str, list[float]] = {"init_distributed": [], "jax alone": [], "kill to the next step": []}
    for _ in range(ROUNDS):
      found["init_distributed"].append(bring_up(count, "nxp"))
      found["jax alone"].append(bring_up(count, "jax"))
      found["kill to the next step"].append(recovery(count))
    print(count, json.dumps(found), flush=True)
    for case, seconds in found.items():
      record.value(case, round(statistics.median(seconds), 3), "s", group=f"{count} processes")
      record.value(f"{case}, slowest", round(max(seconds), 3), "s", group=f"{count} processes")
  record.write()


if __name__ == "__main__":
  main()
