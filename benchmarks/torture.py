"""Kills saving jobs and damages checkpoints, and counts what restoring then makes of them.

    python benchmarks/torture.py --kills 200 --corruptions 300 --reads 200 --trees 300

A job is killed with SIGKILL at a random moment while it saves two models (sync, async, and in two processes).
Then the newest step that it had reported must still be there, `latest` must restore with every value
verified, and the next job must start, clean up and save. A corruption damages one random file of a copy of a
directory with two steps, or swaps files, manifests or folders between the steps: restoring must fail and name
a file or leaf, or (when the damage is in bytes that nobody reads) return exactly what was saved under that
number. A reader restores the newest step again and again beside a job that saves, replaces and deletes: each
restore is right, and none is refused. Last, random trees are saved from random meshes and restored into
others, under other names.
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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
  from flax import nnx
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  from nnx_parallel.checkpoint.checkpointer import Checkpointer

  if processes > 1:
    jax.distributed.initialize(f"localhost:{port}", processes, process, heartbeat_timeout_seconds=10)
  kinds = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, DEVICES // 2), ("a", "b"), axis_types=kinds)
  layouts = {"one.w": P("a", "b"), "two.v": P("b"), "two.b": P()}

  def models(step: int) -> dict[str, nnx.Module]:
    made = {"one": nnx.Module(), "two": nnx.Module()}
    for path, values in expected(step).items():
      layout, (model, name) = NamedSharding(mesh, layouts[path]), path.split(".")
      array = jax.make_array_from_callback(values.shape, layout, values.__getitem__)
      setattr(made[model], name, nnx.Param(array))
    return made

  checkpointer = Checkpointer(directory, asynchronous=mode == "async", max_to_keep=2)
  first = (checkpointer.latest() or 0) + 1
  reports.send("started")
  for step in range(first, first + 100):
    checkpointer.save(step, models(step))
    if mode == "async":
      checkpointer.wait()
    reports.send(step)
    if step % 3 == 0:
      checkpointer.save(step, models(step), overwrite=True)
  checkpointer.close()


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

  return {"one.w": values(256, 512), "two.v": values(64, 64), "two.b": values(512)}


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
      if not _same(checkpointer.restore(step=step, as_numpy=True)["model"], expected(step)):
        problem = f"wrong values in step {step}"
    checkpointer.save(found + 1, expected(found + 1))  # which sweeps, as the next job would
    if list(directory.glob("*.nnx-*")):
      problem = f"litter stayed: {[path.name for path in directory.glob('*.nnx-*')]}"
  except NnxParallelError as error:
    problem = str(error)
  return Kill(mode, processes, delay, reported, found, litter, problem)


def kills(count: int, seed: int = 0, log: Callable[[str], None] = print) -> list[Kill]:
  """Kills `count` jobs: one after the other, all of a kind in the same directory."""
  kinds = [("sync", 1), ("async", 1), ("sync", 2), ("async", 2)]

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
  ours, theirs = path.read_bytes(), (goal / name).read_bytes()
  path.write_bytes(theirs)
  (goal / name).write_bytes(ours)
  return other, [how, name]


def _choose(step_dir: pathlib.Path, rng: random.Random) -> tuple[list[pathlib.Path], pathlib.Path]:
  """All files of a step that are not empty, and one of them; each kind is as likely as the others."""
  every = sorted(path for path in step_dir.rglob("*") if path.is_file() and path.stat().st_size)
  kinds = collections.defaultdict(list)
  for path in every:
    kinds["chunk" if "c" in path.relative_to(step_dir).parts else path.name].append(path)
  return every, rng.choice(kinds[rng.choice(sorted(kinds))])


def reads_beside_a_writer(count: int, log: Callable[[str], None] = print) -> collections.Counter[str]:
  """Restores the newest step so many times while a job saves, replaces and deletes steps."""
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.errors import NnxParallelError

  results: collections.Counter[str] = collections.Counter()
  with tempfile.TemporaryDirectory() as root:
    reports, send = JOBS.Pipe(duplex=False)
    writer = JOBS.Process(target=job, args=(send, root, "sync", 0, 1, 0))
    writer.start()
    send.close()
    try:
      while _next(reports) == "started":
        pass  # until the first step is there
      while sum(results.values()) < count and writer.is_alive():
        reader = Checkpointer(root)
        try:
          found = reader.restore(as_numpy=True, on_corrupt="fallback")["model"]
          results["right" if _same(found, expected(reader.restored.step)) else "wrong"] += 1
        except (NnxParallelError, UserWarning) as error:
          results["refused"] += 1
          log(f"{error}")
    finally:
      writer.kill()
      writer.join()
  return results


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
      # A leaf is named by its folder, metadata by the file.
      names = [name.rpartition("/c/")[0].replace("/c", "") or name for name in files]
      names += [name.rpartition("/")[0] for name in files if name.endswith("zarr.json")]
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
  """Runs the test of random trees on `count` new examples, and says how it ended."""
  tests = pathlib.Path(__file__).parent.parent / "tests" / "checkpoint" / "test_promises.py"
  test = f"{tests}::test_any_tree_on_any_mesh_under_any_names"
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "--timeout=0", test],
    env={**os.environ, "RANDOM_TREES": str(count)},
    cwd=tests.parent.parent.parent,
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
  parser.add_argument("--reads", type=int, default=200)
  parser.add_argument("--trees", type=int, default=300)
  parser.add_argument("--seed", type=int, default=0)
  arguments = parser.parse_args()
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
  from harness import environment  # starts jax, so after the flags

  started = time.time()
  damaged = corruptions(arguments.corruptions, arguments.seed)
  print(f"corruptions: {dict(damaged)}")
  read = reads_beside_a_writer(arguments.reads) if arguments.reads else collections.Counter[str]()
  print(f"reads beside a writer: {dict(read)}")
  killed = kills(arguments.kills, arguments.seed)
  random_trees = trees(arguments.trees) if arguments.trees else "none tried"
  bad = [kill for kill in killed if kill.problem]
  by_kind = collections.Counter(f"{kill.mode}, {kill.processes} process(es)" for kill in killed)
  record = {
    "command": " ".join(["python benchmarks/torture.py", *sys.argv[1:]]),
    "seconds": round(time.time() - started),
    "corruptions": dict(damaged),
    "reads beside a writer": dict(read),
    "kills": dict(by_kind),
    "kills that left litter, swept by the next save": sum(kill.litter > 0 for kill in killed),
    "lost or wrong after a kill": len(bad),
    f"{arguments.trees} random trees": random_trees,
    **environment(),
  }
  results = pathlib.Path(__file__).parent / "results"
  results.mkdir(exist_ok=True)
  (results / "torture.json").write_text(json.dumps(record, indent=2) + "\n")
  rows = "\n".join(f"| {name} | {value} |" for name, value in record.items())
  (results / "torture.md").write_text(f"# Torture\n\n| what | found |\n|---|---|\n{rows}\n")
  print(rows)
  failed = bad or read["wrong"] or read["refused"]
  return 1 if failed or damaged["wrong"] or damaged["unnamed"] or "wrong" in random_trees else 0


if __name__ == "__main__":
  sys.exit(main())
