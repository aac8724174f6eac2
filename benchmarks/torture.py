"""Kills saving jobs and damages checkpoints, and counts what restoring then makes of them.

    python -m benchmarks.torture --kills 200 --corruptions 300 --trees 300 --interrupts 200 --reads 500

A job is killed with SIGKILL at a random moment while it saves: sync, async, with workers that it forks during
its saves and that outlive it, with several models and optimizers, and in two processes. Then the newest step
that it had reported must still be there, `latest` must restore with every value verified, and the next job
must start, clean up and save.

A corruption damages one random file of a copy of a directory with two steps, or swaps files, manifests or
folders between the steps: restoring must fail and name a file or leaf, or (when the damage is in bytes that
nobody reads) return exactly what was saved under that number.

Ctrl-C comes at random moments of a save, which must then be there as a whole or not at all, and of a training
step, which must have returned, have left the state that it found, or say that the state is gone. Readers that
open the directory again and again must be in no save's way, and read right values or hear that the step went.
Last, random trees are saved from random meshes and restored into others, under other names.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

DEVICES = 8
FLAGS = f"--xla_force_host_platform_device_count={DEVICES}"

# Jobs are forked from a process that has imported everything, so a kill costs a second and not ten.
JOBS = multiprocessing.get_context("forkserver")
JOBS.set_forkserver_preload(["nnx_parallel.checkpoint.checkpointer"])


def job(reports: Connection, directory: str, mode: str, process: int, processes: int, port: int) -> None:
  """Saves step after step, and says so, until it is killed."""
  flags = f"--xla_force_host_platform_device_count={DEVICES // processes}"
  os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
  import jax
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  from nnx_parallel.checkpoint.checkpointer import Checkpointer

  if processes > 1:
    jax.distributed.initialize(f"localhost:{port}", processes, process, heartbeat_timeout_seconds=10)
  kinds = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, DEVICES // 2), ("a", "b"), axis_types=kinds)
  layouts = {"w": P("a", "b"), "v": P("b"), "b": P()}

  def placed(values: dict[str, Any]) -> dict[str, jax.Array]:
    return {
      name: jax.make_array_from_callback(array.shape, NamedSharding(mesh, layouts[name]), array.__getitem__)
      for name, array in values.items()
    }

  def saved(step: int) -> tuple[Any, ...]:
    if mode != "several":
      return (placed(expected(step)),)
    return several(placed, step)

  checkpointer = Checkpointer(directory, asynchronous=mode in ("async", "forks"), max_to_keep=2)
  first = (checkpointer.latest() or 0) + 1
  reports.send("started")
  for step in range(first, first + 100):
    checkpointer.save(step, *saved(step))
    if mode == "forks":
      _fork_workers()
    checkpointer.wait()
    reports.send(step)
    if step % 3 == 0:
      checkpointer.save(step, *saved(step), overwrite=True)
  checkpointer.close()


def several(placed: Callable[[dict[str, Any]], dict[str, Any]], step: int) -> tuple[Any, Any]:
  """Two models, one of them in a tuple, and the optimizers of both."""
  import optax
  from flax import nnx

  class Model(nnx.Module):
    def __init__(self, values: dict[str, Any]):
      for name, array in placed(values).items():
        setattr(self, name, nnx.Param(array))

  models = {"d": Model(expected(step)), "g": (Model(expected(step + 1000)),)}
  made = {name: nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param) for name, model in _modules(models)}
  return models, {"d": made["d"], "g": (made["g"],)}


def _modules(models: dict[str, Any]) -> list[tuple[str, Any]]:
  return [("d", models["d"]), ("g", models["g"][0])]


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


@dataclasses.dataclass
class Kill:
  """One killed job: what it had reported, and what was found."""

  mode: str
  processes: int
  delay: float
  reported: int
  latest: int
  litter: int
  problem: str


def expected(step: int) -> dict[str, Any]:
  """What a job saves at a step."""
  import numpy as np

  def values(*shape: int) -> Any:
    return np.random.default_rng(step).standard_normal(shape).astype(np.float32)

  return {"w": values(256, 512), "v": values(64, 64), "b": values(512)}


def wrong(checkpointer: Any, step: int, mode: str = "") -> str:
  """What is wrong with the values of a step; empty when nothing is."""
  if mode != "several":
    same = _same(checkpointer.restore(step=step, as_numpy=True)["model"], expected(step))
    return "" if same else f"wrong values in step {step}"
  import jax

  models, optimizers = checkpointer.restore(several(dict, step + 1), step)
  for name, model in _modules(models):
    found = {leaf: jax.device_get(getattr(model, leaf)[...]) for leaf in ("w", "v", "b")}
    if not _same(found, expected(step + (1000 if name == "g" else 0))):
      return f"wrong values in model {name} of step {step}"
  if optimizers["d"].step[...] or optimizers["g"][0].step[...]:
    return f"wrong optimizer in step {step}"
  return ""


def kill_once(directory: pathlib.Path, mode: str, processes: int, saves: int, delay: float) -> Kill:
  """Starts a job, kills it `delay` seconds after its n-th save, and looks at what is left."""
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.errors import NnxParallelError

  before = Checkpointer(directory).latest() or 0
  port = _free_port()
  ends = [JOBS.Pipe(duplex=False) for _ in range(processes)]
  jobs = [
    JOBS.Process(target=job, args=(send, str(directory), mode, process, processes, port))
    for process, (_, send) in enumerate(ends)
  ]
  for one in jobs:
    one.start()
  for _, send in ends:
    send.close()
  reports = ends[0][0]
  try:
    said = [_next(reports) for _ in range(1 + saves)]
    time.sleep(delay)
  finally:
    for one in jobs:
      one.kill()
  for one in jobs:
    one.join()
  with contextlib.suppress(EOFError):
    while True:
      said.append(reports.recv())
  reported = max([before, *(step for step in said if isinstance(step, int))])
  found, problem, litter = 0, "", len(list(directory.glob("*.nnx-*")))
  try:
    checkpointer = Checkpointer(directory, max_to_keep=2)
    found = checkpointer.latest() or 0
    if found < reported:
      problem = f"step {reported} was reported as saved, the latest is {found}"
    for step in checkpointer.steps():
      if problem_of := wrong(checkpointer, step, mode):
        problem = problem_of
    if mode != "several":
      checkpointer.save(found + 1, expected(found + 1))  # which sweeps, as the next job would
    else:
      checkpointer.save(found + 1, *several(dict, found + 1))
    if list(directory.glob("*.nnx-*")):
      problem = f"litter stayed: {[path.name for path in directory.glob('*.nnx-*')]}"
  except NnxParallelError as error:
    problem = str(error)
  return Kill(mode, processes, delay, reported, found, litter, problem)


def kills(count: int, seed: int = 0, log: Callable[[str], None] = print) -> list[Kill]:
  """Kills `count` jobs: one after the other, all of a kind in the same directory."""
  kinds = [("sync", 1), ("forks", 1), ("several", 1), ("async", 2), ("async", 1), ("sync", 2)]

  def series(root: str, index: int) -> list[Kill]:
    mode, processes = kinds[index]
    rng, directory = random.Random(f"{seed} {index}"), pathlib.Path(root) / f"{mode}-{processes}"
    directory.mkdir()
    found: list[Kill] = []
    for _ in range(index, count, len(kinds)):
      found.append(kill_once(directory, mode, processes, rng.randrange(4), rng.uniform(0.0, 0.25)))
      if found[-1].problem:
        log(f"{found[-1]}")
      elif len(found) % 10 == 0:
        log(f"{mode}, {processes} process(es): {len(found)} kills")
    return found

  with tempfile.TemporaryDirectory() as root:
    return [kill for index in range(len(kinds)) for kill in series(root, index)]


@contextlib.contextmanager
def _interrupt_after(delay: float) -> Iterator[list[bool]]:
  """Presses Ctrl-C in the block; the list says whether it came. What the block raises is raised."""
  came: list[bool] = []
  armed, main_thread = [True], threading.main_thread().ident

  def handle(_: int, __: types.FrameType | None) -> None:
    if armed:
      armed.clear()
      came.append(True)
      raise KeyboardInterrupt

  before = signal.signal(signal.SIGINT, handle)
  timer = threading.Timer(delay, lambda: signal.pthread_kill(main_thread, signal.SIGINT))
  timer.start()
  try:
    yield came
  finally:
    armed.clear()
    timer.cancel()
    timer.join()
    signal.signal(signal.SIGINT, before)


def interrupted_saves(
  count: int, seed: int = 0, log: Callable[[str], None] = print
) -> collections.Counter[str]:
  """Presses Ctrl-C at random moments of saves, sync and async, new steps and overwritten ones.

  Returns:
    How many were `saved` or `left out` as a whole, and, which must not be, `wrong`.
  """
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.errors import NnxParallelError

  rng, results = random.Random(seed), collections.Counter[str]()
  with tempfile.TemporaryDirectory() as root:
    Checkpointer(root).save(0, expected(0))
    started = time.perf_counter()
    Checkpointer(root).save(1, expected(1))
    usual = time.perf_counter() - started
    last = 1
    for index in range(count):
      checkpointer = Checkpointer(root, asynchronous=rng.random() < 0.5, max_to_keep=2)
      overwrite = rng.random() < 0.3
      step = last if overwrite else last + 1
      problem = ""
      try:
        with _interrupt_after(rng.uniform(0, 1.2 * usual)) as came:
          checkpointer.save(step, expected(step), overwrite=overwrite)
          checkpointer.wait()
      except KeyboardInterrupt:
        pass
      try:
        checkpointer.close()
        there = checkpointer.steps()
        problem = next(filter(None, (wrong(checkpointer, one) for one in there)), "")
        if last not in there or (not came and step not in there):
          problem = f"of steps {last} and {step} there are {there}"
        with Checkpointer(root, max_to_keep=2) as again:
          last = max(there) + 1
          again.save(last, expected(last))
        if litter := [path.name for path in pathlib.Path(root).glob("*.nnx-*")]:
          problem = f"litter stayed: {litter}"
        results["wrong" if problem else "saved" if step in there else "left out"] += 1
      except NnxParallelError as error:
        problem = str(error)
        results["wrong"] += 1
      if problem:
        log(f"interrupted save {index}, step {step}: {problem}")
  return results


def interrupted_steps(
  count: int, seed: int = 0, log: Callable[[str], None] = print
) -> collections.Counter[str]:
  """Presses Ctrl-C at random moments of training steps.

  Returns:
    How many had `returned` or been `left` as they began, how many said that the state is `gone`, and, which
    must not be, `wrong`.
  """
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax
  from flax import nnx
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  import nnx_parallel as nxp

  layout = NamedSharding(nxp.make_mesh(x=DEVICES), P("x"))

  class Model(nnx.Module):
    def __init__(self) -> None:
      self.w = nnx.Param(jax.device_put(jnp.zeros(DEVICES * 128), layout))
      self.b = nnx.Param(jax.device_put(jnp.zeros(DEVICES), layout))

  def loss_fn(model: Any, batch: Any) -> Any:
    return (model.w[...] * batch).sum() + (model.b[...] * batch[:DEVICES]).sum()

  def begin() -> tuple[Any, Any]:
    model = Model()
    return model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)

  def steps_in(model: Any, optimizer: Any) -> int:
    """Each step takes 1 from every parameter; -1 where they do not multihost."""
    made = int(optimizer.step[...])
    same = all(np.all(np.asarray(leaf[...]) == -made) for leaf in (model.w, model.b))
    return made if same else -1

  rng, results = random.Random(seed), collections.Counter[str]()
  step, batch = nxp.train_step(loss_fn), jax.device_put(np.ones(DEVICES * 128, np.float32), layout)
  model, optimizer = begin()
  for _ in range(2):
    step(model, optimizer, batch)
  started = time.perf_counter()
  jax.block_until_ready(step(model, optimizer, batch))
  usual, made = time.perf_counter() - started, 3
  for index in range(count):
    problem, outcome, said = "", "", ""
    try:
      with _interrupt_after(rng.uniform(0, 1.5 * usual)):
        jax.block_until_ready(step(model, optimizer, batch))
    except KeyboardInterrupt as error:
      said = " ".join(getattr(error, "__notes__", []))
    state = [*jax.tree.leaves(nnx.state(model)), *jax.tree.leaves(nnx.state(optimizer))]
    if any(leaf.is_deleted() for leaf in state):
      outcome = "gone"
      try:
        step(model, optimizer, batch)
        problem = "a step on arrays that are gone went through"
      except nxp.NnxParallelError as error:
        said += str(error)
      if "restore" not in said:
        problem = f"nothing says that the state is gone and how to restore it: {said!r}"
      (model, optimizer), made = begin(), 0
    else:
      found = steps_in(model, optimizer)
      outcome = {made: "left", made + 1: "returned"}.get(found, "wrong")
      if outcome == "wrong":
        problem = f"after {made} steps the state is that of {found}"
        (model, optimizer), found = begin(), 0
      made = found
    results["wrong" if problem else outcome] += 1
    if problem:
      log(f"interrupted step {index}: {problem}")
  return results


def reader(reports: Connection, directory: str) -> None:
  """Opens the directory and restores the newest step, again and again, until it is told to end."""
  os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.checkpoint.damage import VanishedError

  found = collections.Counter[str]()
  while not reports.poll():
    checkpointer = Checkpointer(directory)
    step = checkpointer.latest()
    if step is None:
      continue
    try:
      found[wrong(checkpointer, step) or "right"] += 1
    except VanishedError:
      found["vanished"] += 1
    except Exception as error:  # noqa: BLE001 - whatever it is, it is counted and shown
      if f"cannot find step {step} " in str(error):  # the writer removed it before the restore began
        found["vanished"] += 1
        continue
      found[f"{type(error).__name__}: {error}"[:300]] += 1
  reports.send(found)


def readers_beside_a_writer(
  count: int, log: Callable[[str], None] = print
) -> tuple[collections.Counter[str], int]:
  """Saves `count` steps, and overwrites some, while two readers open and restore in a loop.

  Returns:
    How many restores were `right`, how many heard that their step had `vanished`, and anything else, which
    must not be; and how many saves were refused, which must not be either.
  """
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.errors import NnxParallelError

  total, refused = collections.Counter[str](), 0
  with tempfile.TemporaryDirectory() as root:
    ends = [JOBS.Pipe() for _ in range(2)]
    jobs = [JOBS.Process(target=reader, args=(theirs, root)) for _, theirs in ends]
    for one in jobs:
      one.start()
    try:
      with Checkpointer(root, max_to_keep=2) as checkpointer:
        for step in range(1, count + 1):
          try:
            checkpointer.save(step, expected(step))
            if step % 3 == 0:
              checkpointer.save(step, expected(step), overwrite=True)
          except NnxParallelError as error:
            refused += 1
            log(f"save of step {step}: {error}")
      for ours, theirs in ends:
        theirs.close()
        ours.send("end")
        total += ours.recv()
    finally:
      for one in jobs:
        one.kill()
        one.join()
  for problem in set(total) - {"right", "vanished"}:
    log(f"a reader, {total[problem]} times: {problem}")
  return total, refused


DAMAGE = ("flip", "truncate", "delete", "swap", "zero", "append")
BETWEEN = ("swap files", "swap manifests", "copy manifest", "rename step", "swap steps")
MANIFEST = "nnx_parallel.json"


def damage_one(step_dir: pathlib.Path, rng: random.Random) -> list[str]:
  """Damages one file (two when it swaps), small and large ones alike; returns the kind and the files."""
  every, target = _choose(step_dir, rng)
  data, how = bytearray(target.read_bytes()), rng.choice(DAMAGE)
  if how == "flip":
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  elif how == "truncate":
    del data[rng.randrange(len(data)) :]
  elif how == "zero":
    start = rng.randrange(len(data))
    data[start : start + 64] = bytes(len(data[start : start + 64]))
  elif how == "append":
    data += b"\0"
  touched = [target]
  if how == "delete":
    target.unlink()
  elif how == "swap":
    other = rng.choice([path for path in every if path != target])
    target.write_bytes(other.read_bytes())
    other.write_bytes(bytes(data))
    touched.append(other)
  else:
    target.write_bytes(bytes(data))
  return [how, *(str(path.relative_to(step_dir)) for path in touched)]


def damage_between(directory: pathlib.Path, rng: random.Random) -> tuple[int, list[str]]:
  """Mixes up steps 1 and 2; returns a step that may be hurt, and the kind and the files."""
  how, (one, other) = rng.choice(BETWEEN), rng.sample((1, 2), 2)
  source, goal, spare = directory / str(one), directory / str(other), directory / "3"
  if how == "rename step":
    goal.rename(spare)
    return 3, [how, MANIFEST]
  if how == "swap steps":
    for old, new in ((source, spare), (goal, source), (spare, goal)):
      old.rename(new)
    return one, [how, MANIFEST]
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


def corruptions(count: int, seed: int = 0, log: Callable[[str], None] = print) -> collections.Counter[str]:
  """Damages `count` copies of a directory with two steps and restores one of them into another layout.

  Returns:
    How many were `named` (an error that names a file or leaf), `harmless` (the right values came back),
    and, which must not be, `wrong` or `unnamed`.
  """
  import jax
  import numpy as np
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.errors import CheckpointError

  rng, results = random.Random(seed), collections.Counter[str]()
  mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

  def saved(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    values = np.random.default_rng(step).standard_normal((64, 64)).astype(np.float32)
    tree = {
      "w": jax.device_put(values, NamedSharding(mesh, P("a", "b"))),
      "key": jax.random.key(step),
      "b": jax.device_put(np.arange(32, dtype=np.int32) * step, NamedSharding(mesh, P())),
    }
    return tree, {"mu": tree["w"] * 2, "count": np.int32(step)}

  layouts = [P(), P("b"), P(None, "a"), P(("a", "b"))]
  everything = {step: saved(step) for step in (1, 2)}
  with tempfile.TemporaryDirectory() as root:
    good = pathlib.Path(root) / "good"
    for step, (tree, opt) in everything.items():
      Checkpointer(good, chunk_bytes=4096).save(step, tree, opt, extra={"data": {"cursor": 5}})
    for index in range(count):
      bad = pathlib.Path(root) / "bad"
      shutil.rmtree(bad, ignore_errors=True)
      shutil.copytree(good, bad)
      if rng.random() < 0.25:
        step, (how, *files) = damage_between(bad, rng)
      else:
        step = rng.choice((1, 2))
        how, *files = damage_one(bad / str(step), rng)
      # A file, or a leaf whose values are in one of the files of its item.
      names = [*files, *(f"files under {name.partition('/')[0]}" for name in files)]
      target = {
        "w": jax.ShapeDtypeStruct((64, 64), np.float32, sharding=NamedSharding(mesh, rng.choice(layouts))),
        "key": jax.random.key(0),
        "b": jax.ShapeDtypeStruct((32,), np.int32, sharding=NamedSharding(mesh, P("b"))),
      }
      checkpointer = Checkpointer(bad)
      try:
        again = checkpointer.restore(target, step, optimizer="drop")
        moments = checkpointer.restore(step=step, as_numpy=True)["optimizer"]
      except CheckpointError as error:
        outcome = "named" if any(name in str(error) for name in names) else "unnamed"
      else:
        tree, opt = everything.get(step, ({}, {}))
        right = again.keys() == tree.keys() and moments.keys() == opt.keys()
        right = right and all(np.array_equal(_plain(again[k]), _plain(tree[k])) for k in tree)
        right = right and all(np.array_equal(moments[k], opt[k]) for k in opt)
        outcome = "harmless" if right else "wrong"
      results[outcome] += 1
      if outcome in ("wrong", "unnamed"):
        log(f"{index}: step {step}: {how} {files}: {outcome}")
  return results


def trees(count: int) -> str:
  """Runs the tests of random trees and histories on `count` new examples, and says how they ended."""
  tests = pathlib.Path(__file__).parent.parent / "tests" / "checkpoint"
  random_trees = f"{tests / 'test_promises.py'}::test_any_tree_on_any_mesh_under_any_names"
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "--timeout=0", random_trees, str(tests / "test_histories.py")],
    env={**os.environ, "RANDOM_TREES": str(count), "RANDOM_HISTORIES": str(count)},
    cwd=tests.parent.parent,
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    print(done.stdout)
  return "all right" if done.returncode == 0 else "wrong, see above"


def _plain(leaf: object) -> object:
  import jax
  import numpy as np

  is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _same(found: dict[str, object], wanted: dict[str, object]) -> bool:
  import numpy as np

  return found.keys() == wanted.keys() and all(np.array_equal(found[k], wanted[k]) for k in wanted)


def _next(reports: Connection) -> object:
  try:
    return reports.recv()
  except EOFError:
    raise RuntimeError("a job ended by itself; its error is above") from None


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


def main() -> int:
  """Runs both, writes the record, and fails when anything was lost or wrong."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--kills", type=int, default=200)
  parser.add_argument("--corruptions", type=int, default=300)
  parser.add_argument("--trees", type=int, default=300)
  parser.add_argument("--interrupts", type=int, default=200, help="of saves, and as many of steps")
  parser.add_argument("--reads", type=int, default=200, help="steps that are saved beside two readers")
  parser.add_argument("--seed", type=int, default=0)
  arguments = parser.parse_args()
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
  from benchmarks.harness import environment  # starts jax, so after the flags

  started = time.time()
  damaged = corruptions(arguments.corruptions, arguments.seed)
  print(f"corruptions: {dict(damaged)}")
  saves = interrupted_saves(arguments.interrupts, arguments.seed)
  print(f"saves that Ctrl-C met: {dict(saves)}")
  steps = interrupted_steps(arguments.interrupts, arguments.seed)
  print(f"steps that Ctrl-C met: {dict(steps)}")
  reads, refused = readers_beside_a_writer(arguments.reads)
  print(f"restores beside a writer: {dict(reads)}; saves refused: {refused}")
  killed = kills(arguments.kills, arguments.seed)
  random_trees = trees(arguments.trees) if arguments.trees else "none tried"
  bad = [kill for kill in killed if kill.problem]
  by_kind = collections.Counter(f"{kill.mode}, {kill.processes} process(es)" for kill in killed)
  record = {
    "command": " ".join(["python -m benchmarks.torture", *sys.argv[1:]]),
    "seconds": round(time.time() - started),
    "corruptions": dict(damaged),
    "kills": dict(by_kind),
    "kills that left litter, swept by the next save": sum(kill.litter > 0 for kill in killed),
    "lost or wrong after a kill": len(bad),
    "saves that Ctrl-C met": dict(saves),
    "steps that Ctrl-C met": dict(steps),
    f"restores of two readers beside {arguments.reads} saves": dict(reads),
    "saves refused because of readers": refused,
    f"{arguments.trees} random trees and histories": random_trees,
    **environment(),
  }
  results = pathlib.Path(__file__).parent / "results"
  results.mkdir(exist_ok=True)
  (results / "torture.json").write_text(json.dumps(record, indent=2) + "\n")
  rows = "\n".join(f"| {name} | {value} |" for name, value in record.items() if name != "command")
  head = f"# Torture\n\n`{record['command']}`\n\n| what | found |\n|---|---|"
  (results / "torture.md").write_text(f"{head}\n{rows}\n")
  print(rows)
  failed = damaged["wrong"] + damaged["unnamed"] + saves["wrong"] + steps["wrong"] + refused + len(bad)
  return 1 if failed or reads.keys() - {"right", "vanished"} or "wrong" in random_trees else 0


if __name__ == "__main__":
  sys.exit(main())
