"""Disturbs a supervised training run at random moments, and compares its losses.

A run of four processes, two simulated devices each, saves every 20 steps under `nnx-parallel launch`. Again
and again a process of it (the coordinator too) gets SIGKILL, or now and then SIGSTOP, at a random moment:
while it trains, saves, starts, joins, compiles or restores. In between, its newest step is damaged while it
is down, its disk takes no more bytes or is slow, the data of one process ends early, or a second job is
started on its folder. In the end every loss must be that of an undisturbed run, each attempt must have gone
on from the newest good step that was reported as saved (one save may be complete and not reported), every
step that is kept must verify, each second job must have been refused, and no process may be left.

  python -m searches.soak --kills 30 --minutes 10
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.hosts.launch import Job, launch
from searches import driver

TROUBLES = ("a damaged step", "a full disk", "a second job", "data that ends early", "a slow disk")
PROCESSES, SAVE_EVERY, HANG_AFTER = 4, 20, 8.0
TRAINING = r"""
import os, pathlib, resource, sys, time

print(f"pid {os.getpid()}\n", end="", flush=True)
import numpy as np, optax
from flax import nnx
import nnx_parallel as nxp

folder, steps, pause, every = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
nxp.init_distributed(devices_per_process=2, timeout=60, heartbeat_timeout=10)
trouble, fsync = pathlib.Path(folder).parent / "trouble", os.fsync

def has(kind):
  return trouble.exists() and trouble.read_text() == kind

def slow(handle):
  time.sleep(0.3 if has("a slow disk") else 0.0)
  fsync(handle)

os.fsync = slow
init = lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0))
plan = nxp.plan(init, nxp.make_mesh(data=-1), nxp.fsdp("data", min_size=1), optimizer=optax.adam(1e-2))

def batches(samples):
  for step in range(samples // 16, steps):
    time.sleep(pause)
    if os.environ.get("RANK") == "1" and has("data that ends early"):
      return
    yield np.random.default_rng(step).normal(size=(16, 64)).astype(np.float32)

class Noted(nxp.Checkpointer):
  def save(self, step, *given, **options):
    if has("a full disk"):
      resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    super().save(step, *given, **options)
    if nxp.hosts.main_process():
      print(f"saved {step}\n", end="", flush=True)

def note(step, metrics):
  print(f"step {step} {metrics['loss']!r} {time.time()}\n", end="", flush=True)

source = lambda samples: nxp.batches(batches(samples), plan, global_batch=True)
with Noted(folder, max_to_keep=3) as checkpointer:
  train = nxp.train_step(lambda model, x: ((model(x) - x[::-1]) ** 2).mean())
  nxp.fit(train, *nxp.create_sharded_model(plan), source, steps=steps, plan=plan, checkpointer=checkpointer,
          save_every=every, resume="latest", progress=False, trackers=[note])
"""


class Run:
  """A supervised run, what it printed, and who of it is alive."""

  def __init__(self, script: Path, folder: Path, steps: int, pause: float, restarts: int):
    command = [sys.executable, str(script), str(folder), str(steps), str(pause), str(SAVE_EVERY)]
    limits: Any = {"restarts": restarts, "pause": 0.5, "hang_after": HANG_AFTER}
    self.job = Job(command, processes=PROCESSES, devices_per_process=2, **limits)
    self.pids: dict[int, int] = {}
    self.losses: dict[int, set[str]] = collections.defaultdict(set)
    self.problems: list[str] = []
    self.recoveries: list[float] = []
    self.reported = self.made = 0
    self.struck: float | None = None
    self.training = threading.Event()
    self.folder, self.restarts = folder, 0
    self.lines: list[str] = []

  def write(self, line: str) -> None:
    self.lines.append(line)
    words = line.split()
    if words[:2] == ["--", "restart"]:
      self.pids.clear()
      self.training.clear()
      self.restarts += 1
    elif not line.startswith("["):
      return  # the launcher's own, such as the last lines of a process that failed
    elif words[1:2] == ["pid"]:
      self.pids[int(words[0][1:-1])] = int(words[2])
    elif words[1:2] == ["saved"]:
      self.reported = int(words[2])
    elif words[1:2] == ["step"] and len(words) == 5:  # not what an error says of a step
      self.step(int(words[2]), words[3], float(words[4]))

  def step(self, step: int, loss: str, when: float) -> None:
    if not self.training.is_set():
      if not self.reported < step <= self.reported + SAVE_EVERY + 1:
        self.problems.append(f"went on with step {step}, and step {self.reported} was saved")
      if self.struck is not None:
        self.recoveries.append(when - self.struck)
      self.struck = None
      self.training.set()
    self.made += 1
    self.losses[step].add(loss)

  def trouble(self, kind: str, over: threading.Event) -> None:
    file, restarts, reported = self.folder.parent / "trouble", self.restarts, self.reported
    if kind == "a second job":
      command = [sys.executable, *self.job.command[1:]]
      alone = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
      second = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=300)
      refused = "another job is writing there" in second.stderr and "step " not in second.stdout
      if restarts == self.restarts and not refused:
        self.problems += ["a second job was not refused", second.stdout[-1000:], second.stderr[-1000:]]
    elif kind == "a damaged step":
      with contextlib.suppress(ProcessLookupError, KeyError):
        os.kill(self.pids[1], signal.SIGKILL)
      while restarts == self.restarts and not over.wait(0.01):
        pass
      *_, good, newest = [0, 0, *Checkpointer(self.folder).steps()]
      for victim in (self.folder / str(newest)).glob("*/d/*") if good else ():
        victim.write_bytes(bytes(255 - byte for byte in victim.read_bytes()))
        self.reported = good
    else:
      file.write_text(kind)
      # A slow disk is there for two saves; the others end the attempt.
      last = reported + 2 * SAVE_EVERY
      while not over.wait(0.05):
        if self.reported >= last if kind == "a slow disk" else restarts != self.restarts:
          break
      file.unlink()

  def strike(self, rng: random.Random) -> str:
    """Kills or stops one process, if there is one; returns what it did."""
    pids = dict(self.pids)
    if not pids:
      return ""
    number, kind = rng.choice(sorted(pids)), rng.choices((signal.SIGKILL, signal.SIGSTOP), (9, 1))[0]
    where = "training" if self.training.is_set() else "starting"
    if kind == signal.SIGSTOP and where == "starting":
      kind = signal.SIGKILL  # a process that stops before its first step is found by JAX, after its timeout
    with contextlib.suppress(ProcessLookupError):
      os.kill(pids[number], kind)
      self.struck = time.time()
      return f"{kind.name}, {'coordinator' if number == 0 else 'another'}, {where}"
    return ""


def left(token: str) -> list[int]:
  found: list[int] = []
  for entry in Path("/proc").iterdir():
    with contextlib.suppress(OSError):
      if entry.name.isdigit() and token.encode() in (entry / "environ").read_bytes():
        found.append(int(entry.name))
  return found  # not this one: its environment was fixed when it started


SEEDS, WORKERS = "0:1", 0
NOTES = [f"{PROCESSES} processes of two simulated devices each; a save every {SAVE_EVERY} steps, three kept."
         " The times are from a signal to the end of the next step that was made, where no other signal came"
         f" before: the pause of 0.5 s before a restart is in them, and, after SIGSTOP, {HANG_AFTER:g} s"
         " until the launcher calls it a hang."]  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
  parser.set_defaults(minutes=10)
  parser.add_argument("--kills", type=int, default=30)
  parser.add_argument("--steps", type=int, default=4000)


def cases(seed: int, _: argparse.Namespace) -> list[int]:
  return [seed]


def check(seed: int, given: argparse.Namespace) -> driver.Result:
  """A run until all kills are made, or the time is over, and to the last step."""
  os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
  os.environ.pop("XLA_FLAGS", None)  # the devices are the launcher's
  with tempfile.TemporaryDirectory() as root:
    run, done = soak(given, seed, Path(root))
  if done.total() < min(20, given.kills):
    run.problems.append(f"no more than {done.total()} troubles in the time")
  counts = {("troubles", what): count for what, count in sorted(done.items())} | {
    ("troubles", "all"): done.total(), ("run", "steps"): given.steps,
    ("run", "steps made again"): run.made - given.steps, ("run", "problems"): len(run.problems),
    ("recovery", "timed"): len(run.recoveries),
  }  # fmt: skip
  times = {"median": statistics.median(run.recoveries), "max": max(run.recoveries)}
  figures = {("recovery", f"signal to the next step, {n}"): (round(t, 2), "s") for n, t in times.items()}
  verdict, text = "WRONG" if run.problems else "right", "\n".join(run.problems)
  return {"verdict": verdict, "message": text, "counts": counts, "figures": figures}


def soak(given: argparse.Namespace, seed: int, root: Path) -> tuple[Run, collections.Counter[str]]:
  kills, steps, script = given.kills, given.steps, root / "train.py"
  script.write_text(TRAINING)
  plain = Run(script, root / "plain", steps, 0.0, 0)
  if launch(plain.job, plain.write):
    raise SystemExit("\n".join(plain.lines[-50:]))
  token = uuid.uuid4().hex
  os.environ["NNX_PARALLEL_SOAK"] = token
  run = Run(script, root / "run", steps, 0.02, 2 * kills + 5)
  rng, done, over = random.Random(seed), collections.Counter[str](), threading.Event()
  until = time.monotonic() + 60 * given.minutes

  def strikes() -> None:
    troubles = itertools.cycle(TROUBLES)
    while not over.is_set() and done.total() < kills and time.monotonic() < until:
      if done.total() % 3 == 2 and run.training.wait(60) and not over.is_set():
        run.trouble(kind := next(troubles), over)
        done[kind] += 1
        run.struck = None
        continue
      # Most wait until it trains again, which is what is timed; the others do not let it come so far.
      if rng.random() < 0.8:
        run.training.wait(60)
      over.wait(rng.uniform(0, 3))
      lines = len(run.lines)
      if what := run.strike(rng):
        done[what] += 1
        # Until the launcher has seen it: two strikes at one attempt would count as one.
        while not over.is_set() and not any("restart" in line for line in run.lines[lines:]):
          over.wait(0.05)

  thread = threading.Thread(target=strikes)
  thread.start()
  code = launch(run.job, run.write)
  over.set()
  thread.join()
  if code:
    run.problems += [f"the run ended with {code}", *run.lines[-40:]]
  wrong = [step for step in range(1, steps + 1) if run.losses[step] != plain.losses[step]]
  if wrong:
    run.problems.append(f"other losses at steps {wrong[:10]}")
  checkpointer = Checkpointer(root / "run")
  run.problems += [f"step {n}: {bad}" for n in checkpointer.steps() if (bad := checkpointer.verify(n))]
  if checkpointer.latest() != steps:
    run.problems.append(f"the newest step is {checkpointer.latest()}")
  if orphans := left(token):
    run.problems.append(f"processes that were left: {orphans}")
  return run, done


if __name__ == "__main__":
  driver.run("searches.soak")
