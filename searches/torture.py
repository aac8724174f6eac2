"""Kills saving jobs and damages checkpoints, and counts what restoring then makes of them.

    python -m searches.torture --seeds 0:24            six times each kind of trouble
    python -m searches.torture --seeds 3:4 --count 200    many kills

A job is killed with SIGKILL at a random moment while it saves: sync, async, with workers that it forks during
its saves and that outlive it, with several models and optimizers, and in two processes. Then the newest step
that it had reported must still be there, `latest` must restore with every value verified, and the next job
must start, clean up and save.

A corruption damages one random file of a copy of a directory with two steps, or swaps files, manifests or
folders between the steps: restoring must fail and name a file or leaf, or (when the damage is in bytes that
nobody reads) return exactly what was saved under that number.

Ctrl-C comes at random moments of a save, which must then be there as a whole or not at all. Readers that
open the directory again and again must be in no save's way, and read right values or hear that the step went.
`make torture` also runs the tests of random trees and histories on many more examples.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel.checkpoint.damage import VanishedError
from nnx_parallel.errors import CheckpointError, NnxParallelError
from searches import driver

DEVICES = 8
SEEDS, WORKERS = "0:24", 0  # the main thread presses Ctrl-C, and jobs are processes of their own
Found = tuple[collections.Counter[str], list[str]]
"""How often something came out, and what is wrong."""

# Jobs are forked from a process that has imported everything, so a kill costs a second and not ten.
JOBS = multiprocessing.get_context("forkserver")
JOBS.set_forkserver_preload(["searches.torture"])


def expected(step: int) -> dict[str, Any]:
  shapes = {"w": (256, 512), "v": (64, 64), "b": (512,)}
  return {n: np.random.default_rng(step).standard_normal(shape, np.float32) for n, shape in shapes.items()}


def job(reports: Connection, directory: str, mode: str, process: int, processes: int, port: int) -> None:
  os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // processes}"
  if processes > 1:
    jax.distributed.initialize(f"localhost:{port}", processes, process, heartbeat_timeout_seconds=10)
  mesh, layouts = nxp.make_mesh(a=2, b=DEVICES // 2), {"w": P("a", "b"), "v": P("b"), "b": P()}

  def placed(values: dict[str, Any]) -> dict[str, jax.Array]:
    made, shardings = jax.make_array_from_callback, {n: NamedSharding(mesh, s) for n, s in layouts.items()}
    return {name: made(array.shape, shardings[name], array.__getitem__) for name, array in values.items()}

  checkpointer = nxp.Checkpointer(directory, asynchronous=mode in ("async", "forks"), max_to_keep=2)
  first = (checkpointer.latest() or 0) + 1
  reports.send("started")
  for step in range(first, first + 100):
    checkpointer.save(step, *saved_in(mode, step, placed))
    if mode == "forks":
      _fork_workers()
    checkpointer.wait()
    reports.send(step)
    if step % 3 == 0:
      checkpointer.save(step, *saved_in(mode, step, placed), overwrite=True)
  checkpointer.close()


def saved_in(mode: str, step: int, placed: Callable[[dict[str, Any]], dict[str, Any]]) -> tuple[Any, ...]:
  """What a save takes: arrays; or two models, one of them in a tuple, and the optimizers of both."""
  if mode != "several":
    return (placed(expected(step)),)

  made = (placed(expected(n)) for n in (step, step + 1000))
  d, g = (nnx.Dict({name: nnx.Param(array) for name, array in arrays.items()}) for arrays in made)
  of_d, of_g = (nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param) for model in (d, g))
  return {"d": d, "g": (g,)}, {"d": of_d, "g": (of_g,)}


def _fork_workers() -> None:
  """Forks a worker that outlives this job, and one that ends as a data loader's does, which must not wait."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Python and jax warn of threads in forked processes
    if os.fork() == 0:
      time.sleep(3)
      os._exit(0)
    worker = multiprocessing.get_context("fork").Process(target=int)
    worker.start()
  worker.join(20)
  if worker.exitcode != 0:
    worker.kill()
    raise RuntimeError(f"a forked worker did not end by itself: {worker.exitcode}")


def wrong(checkpointer: Any, step: int, mode: str = "") -> str:
  """What is wrong with the values of a step; empty when nothing is."""
  if mode != "several":
    same = _same(checkpointer.restore(step=step, as_numpy=True)["model"], expected(step))
    return "" if same else f"wrong values in step {step}"
  models, optimizers = checkpointer.restore(saved_in(mode, step + 1, dict), step)
  for model, wanted in ((models["d"], step), (models["g"][0], step + 1000)):
    if not _same({n: jax.device_get(getattr(model, n)[...]) for n in ("w", "v", "b")}, expected(wanted)):
      return f"wrong values in a model of step {step}"
  made = optimizers["d"].step[...] or optimizers["g"][0].step[...]
  return f"wrong optimizer in step {step}" if made else ""


def next_job(directory: pathlib.Path, mode: str = "") -> tuple[list[int], str]:
  """The steps that the next job finds, and what is wrong with them or with its save, which sweeps."""
  there, problem = list[int](), ""
  try:
    checkpointer = nxp.Checkpointer(directory, max_to_keep=2)
    there = checkpointer.steps()
    for step in there:
      problem = wrong(checkpointer, step, mode) or problem
    new = (checkpointer.latest() or 0) + 1
    checkpointer.save(new, *saved_in(mode, new, dict))
    if litter := [path.name for path in directory.glob("*.nnx-*")]:
      problem = f"litter stayed: {litter}"
  except NnxParallelError as error:
    problem = str(error)
  return there, problem


@contextlib.contextmanager
def _running(jobs: list[Any]) -> Iterator[None]:
  """Starts the processes, and kills them at the end."""
  for one in jobs:
    one.start()
  try:
    yield
  finally:
    for one in jobs:
      one.kill()
      one.join()


def kill_once(directory: pathlib.Path, mode: str, processes: int, saves: int, delay: float) -> list[str]:
  """Starts a job, kills it `delay` seconds after its n-th save; returns what was left, and what is wrong."""
  before = nxp.Checkpointer(directory).latest() or 0
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
  ends = [JOBS.Pipe(duplex=False) for _ in range(processes)]
  given = [(send, str(directory), mode, process, processes, port) for process, (_, send) in enumerate(ends)]
  reports = ends[0][0]
  with _running([JOBS.Process(target=job, args=args) for args in given]):
    for _, send in ends:
      send.close()
    said = [reports.recv() for _ in range(1 + saves)]
    time.sleep(delay)
  with contextlib.suppress(EOFError):
    while True:
      said.append(reports.recv())
  reported = max([before, *(step for step in said if isinstance(step, int))])
  left = "litter" if [*directory.glob("*.nnx-*")] else "nothing"
  there, problem = next_job(directory, mode)
  lost = f"step {reported} was reported as saved, of the steps {there}"
  return [left, problem or ("" if reported <= max(there, default=0) else lost)]


def kills(count: int, seed: int = 0) -> Found:
  """Kills `count` jobs, one after the other, all of a kind in the same directory."""
  found, problems = collections.Counter[str](), list[str]()
  kinds = [("sync", 1), ("forks", 1), ("several", 1), ("async", 2), ("async", 1), ("sync", 2)]
  with tempfile.TemporaryDirectory() as root:
    for index, (mode, processes) in enumerate(kinds):
      rng, directory = random.Random(f"{seed} {index}"), pathlib.Path(root) / f"{mode}-{processes}"
      directory.mkdir()
      for _ in range(index, count, len(kinds)):
        left, problem = kill_once(directory, mode, processes, rng.randrange(4), rng.uniform(0.0, 0.25))
        found["lost or wrong" if problem else f"left {left}"] += 1
        problems += [f"{mode}, {processes} process(es): {problem}"] if problem else []
  return found, problems


@contextlib.contextmanager
def _interrupt_after(delay: float) -> Iterator[list[bool]]:
  """Presses Ctrl-C in the block; the list says whether it came. What the block raises is raised."""
  came: list[bool] = []

  def press(*_: object) -> None:
    came.append(True)
    raise KeyboardInterrupt

  signal.signal(signal.SIGALRM, press)
  signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))  # 0 would be never
  try:
    yield came
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)


def interrupted_saves(count: int, seed: int = 0) -> Found:
  rng, found, problems = random.Random(seed), collections.Counter[str](), list[str]()
  with tempfile.TemporaryDirectory() as root:
    nxp.Checkpointer(root).save(0, expected(0))
    started = time.perf_counter()
    nxp.Checkpointer(root).save(1, expected(1))
    usual, last = time.perf_counter() - started, 1
    for _ in range(count):
      checkpointer = nxp.Checkpointer(root, asynchronous=rng.random() < 0.5, max_to_keep=2)
      overwrite = rng.random() < 0.3
      step = last if overwrite else last + 1
      with contextlib.suppress(KeyboardInterrupt), _interrupt_after(rng.uniform(0, 1.2 * usual)) as came:
        checkpointer.save(step, expected(step), overwrite=overwrite)
        checkpointer.wait()
      checkpointer.close()
      there, problem = next_job(pathlib.Path(root))
      if last not in there or (not came and step not in there):
        problem = problem or f"of steps {last} and {step} there are {there}"
      last = max(there, default=0) + 1
      found["wrong" if problem else "saved" if step in there else "left out"] += 1
      problems += [f"step {step}: {problem}"] if problem else []
  return found, problems


def reader(reports: Connection, directory: str) -> None:
  """Opens the directory and restores the newest step, again and again, until it is told to end."""
  found = collections.Counter[str]()
  while not reports.poll():
    checkpointer = nxp.Checkpointer(directory)
    if (step := checkpointer.latest()) is None:
      continue
    try:
      found[wrong(checkpointer, step) or "right"] += 1
    except Exception as error:  # noqa: BLE001 - whatever it is, it is counted and shown
      # The writer may remove it before the restore begins.
      gone = isinstance(error, VanishedError) or f"cannot find step {step} " in str(error)
      found["vanished" if gone else f"{type(error).__name__}: {error}"[:300]] += 1
  reports.send(found)


def reads(count: int, seed: int = 0) -> Found:
  found, problems = collections.Counter[str](), list[str]()
  with tempfile.TemporaryDirectory() as root:
    ends = [JOBS.Pipe() for _ in range(2)]
    with _running([JOBS.Process(target=reader, args=(theirs, root)) for _, theirs in ends]):
      with nxp.Checkpointer(root, max_to_keep=2) as checkpointer:
        for step in range(1, count + 1):
          try:
            checkpointer.save(step, expected(step))
            if step % 3 == 0:
              checkpointer.save(step, expected(step), overwrite=True)
          except NnxParallelError as error:
            problems.append(f"save of step {step}: {error}")
      for ours, theirs in ends:
        theirs.close()
        ours.send("end")
        found += ours.recv()
  return found, problems + [f"a reader: {what}" for what in found if what not in ("right", "vanished")]


DAMAGE = ("flip", "truncate", "delete", "swap", "zero", "append")
BETWEEN = ("swap files", "swap manifests", "copy manifest", "rename step", "swap steps")
MANIFEST = "nnx_parallel.json"


def damage_one(step_dir: pathlib.Path, rng: random.Random) -> list[str]:
  """Damages one file (two when it swaps), small and large ones alike; returns the kind and the files."""
  every, target = _choose(step_dir, rng)
  data, how, touched = bytearray(target.read_bytes()), rng.choice(DAMAGE), [target]
  if how == "flip":
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  elif how == "truncate":
    del data[rng.randrange(len(data)) :]
  elif how == "zero":
    start = rng.randrange(len(data))
    data[start : start + 64] = bytes(len(data[start : start + 64]))
  elif how == "append":
    data += b"\0"
  elif how == "swap":
    touched.append(rng.choice([path for path in every if path != target]))
    target.write_bytes(touched[1].read_bytes())
  touched[-1].write_bytes(data)
  if how == "delete":
    target.unlink()
  return [how, *(str(path.relative_to(step_dir)) for path in touched)]


def damage_between(directory: pathlib.Path, rng: random.Random) -> tuple[int, list[str]]:
  """Mixes up steps 1 and 2; returns a step that may be hurt, and the kind and the files."""
  how, (one, other) = rng.choice(BETWEEN), rng.sample((1, 2), 2)
  source, goal, spare = directory / str(one), directory / str(other), directory / "3"
  moves = {"rename step": [(goal, spare)], "swap steps": [(source, spare), (goal, source), (spare, goal)]}
  for old, new in moves.get(how, ()):
    old.rename(new)
  if how in moves:
    return 3 if how == "rename step" else one, [how, MANIFEST]
  if how == "copy manifest":
    shutil.copyfile(source / MANIFEST, goal / MANIFEST)
    return other, [how, MANIFEST]
  path = source / MANIFEST if how == "swap manifests" else _choose(source, rng)[1]
  name = str(path.relative_to(source))
  twin = goal / name
  if not twin.exists():  # files of arrays have names of their own
    twin = max((p for p in twin.parent.iterdir() if p.is_file()), key=lambda p: p.stat().st_size)
  ours, theirs = path.read_bytes(), twin.read_bytes()
  path.write_bytes(theirs)
  twin.write_bytes(ours)
  return other, [how, str(twin.relative_to(goal))]


def _choose(step_dir: pathlib.Path, rng: random.Random) -> tuple[list[pathlib.Path], pathlib.Path]:
  """All files of a step that are not empty, and one of them; each kind is as likely as the others."""
  every = sorted(path for path in step_dir.rglob("*") if path.is_file() and path.stat().st_size)
  kinds = collections.defaultdict(list)
  for path in every:
    kinds["arrays" if path.parent.name == "d" else path.name].append(path)
  return every, rng.choice(kinds[rng.choice(sorted(kinds))])


def corruptions(count: int, seed: int = 0) -> Found:
  """Each is `named` by an error, or `harmless`: the right values came back."""
  rng, found, problems = random.Random(seed), collections.Counter[str](), list[str]()
  mesh = nxp.make_mesh(a=2, b=4)

  def saved(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    values = np.random.default_rng(step).standard_normal((64, 64)).astype(np.float32)
    w = jax.device_put(values, NamedSharding(mesh, P("a", "b")))
    b = jax.device_put(np.arange(32, dtype=np.int32) * step, NamedSharding(mesh, P()))
    return {"w": w, "key": jax.random.key(step), "b": b}, {"mu": w * 2, "count": np.int32(step)}

  layouts = [P(), P("b"), P(None, "a"), P(("a", "b"))]
  everything = {step: saved(step) for step in (1, 2)}
  with tempfile.TemporaryDirectory() as root:
    good, bad = pathlib.Path(root) / "good", pathlib.Path(root) / "bad"
    for step, (tree, opt) in everything.items():
      nxp.Checkpointer(good, chunk_bytes=4096).save(step, tree, opt, extra={"data": {"cursor": 5}})
    for _ in range(count):
      shutil.rmtree(bad, ignore_errors=True)
      shutil.copytree(good, bad)
      if rng.random() < 0.25:
        step, (how, *files) = damage_between(bad, rng)
      else:
        step = rng.choice((1, 2))
        how, *files = damage_one(bad / str(step), rng)
      # A file, or a leaf whose values are in one of the files of its item.
      names = [*files, *(f"files under {name.partition('/')[0]}" for name in files)]
      specs, like = {"w": rng.choice(layouts), "b": P("b")}, everything[1][0]
      there = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
      target = {n: jax.ShapeDtypeStruct(like[n].shape, like[n].dtype, sharding=s) for n, s in there.items()}
      target["key"] = jax.random.key(0)
      checkpointer = nxp.Checkpointer(bad)
      try:
        again = checkpointer.restore(target, step, optimizer="drop")
        moments = checkpointer.restore(step=step, as_numpy=True)["optimizer"]
      except CheckpointError as error:
        outcome = "named" if any(name in str(error) for name in names) else "unnamed"
      else:
        tree, opt = everything.get(step, ({}, {}))
        outcome = "harmless" if _same(again, tree) and _same(moments, opt) else "wrong"
      found[outcome] += 1
      problems += [f"step {step}: {how} {files}: {outcome}"] if outcome in ("wrong", "unnamed") else []
  return found, problems


def _same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
  def plain(leaf: Any) -> Any:
    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

  same = (np.array_equal(plain(found[k]), plain(wanted[k])) for k in wanted if k in found)
  return found.keys() == wanted.keys() and all(same)


KINDS: dict[str, tuple[Callable[[int, int], Found], int]] = {
  "corruptions": (corruptions, 50), "saves that Ctrl-C met": (interrupted_saves, 50),
  "restores of two readers beside a writer": (reads, 50), "kills": (kills, 36),
}  # fmt: skip
"""What is done, and how often for one seed."""


def options(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--count", type=int, help="how often, for one seed")


def cases(seed: int, _: argparse.Namespace) -> list[tuple[str, int]]:
  return [([*KINDS][seed % len(KINDS)], seed)]


def check(case: tuple[str, int], given: argparse.Namespace) -> driver.Result:
  kind, seed = case
  do, usual = KINDS[kind]
  found, problems = do(given.count or usual, seed)
  print(f"{kind}: {dict(found)}", flush=True)
  counts = {(kind, outcome): n for outcome, n in found.items()}
  return {"verdict": "WRONG" if problems else "right", "message": "\n".join(problems), "counts": counts}


if __name__ == "__main__":
  driver.run("searches.torture")
