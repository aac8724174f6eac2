"""Saves and restores against raw reads and writes of the same bytes, and against plain Orbax.

    python benchmarks/checkpoint.py --gigabytes 2 --rounds 5

Every case takes its turn in every round; ratios are medians over rounds. Reads are cold: the files are
dropped from the page cache first. Peak memory is measured in a process of its own for each case.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

FLAGS = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from orbax.checkpoint import v1 as ocp  # noqa: E402

from nnx_parallel.checkpoint.checkpointer import Checkpointer  # noqa: E402

WIDTH = 2048
Tree = dict[str, Any]


def make_mesh(*sizes: int) -> Mesh:
  """A mesh of Auto axes over the first devices."""
  names = tuple("ab"[: len(sizes)])
  count = 1
  for size in sizes:
    count *= size
  return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:count])


def make_state(gigabytes: float) -> tuple[Tree, Tree]:
  """Parameters and Adam's moments, on a 2 x 4 mesh, cut along both dims."""
  layers = max(1, round(gigabytes * 1e9 / (3 * 4 * (WIDTH * WIDTH + WIDTH))))
  mesh = make_mesh(2, 4)
  wide, flat = NamedSharding(mesh, P("a", "b")), NamedSharding(mesh, P("b"))

  @functools.partial(jax.jit, out_shardings=(wide, flat))
  def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(key, (WIDTH, WIDTH)), jax.random.normal(key, (WIDTH,))

  def tree(seed: int) -> Tree:
    found: Tree = {}
    for layer in range(layers):
      kernel, bias = draw(jax.random.fold_in(jax.random.key(seed), layer))
      found |= {f"layer{layer}.kernel": kernel, f"layer{layer}.bias": bias}
    return found

  return tree(0), {
    f"{name}.{leaf}": value for i, name in enumerate(("mu", "nu")) for leaf, value in tree(i + 1).items()
  }


def target(tree: Tree, mesh: Mesh, spec: P) -> Tree:
  """Abstract arrays in another layout; vectors are replicated."""
  return {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec if x.ndim == 2 else P()))
    for name, x in tree.items()
  }


def drop_cache(folder: pathlib.Path) -> None:
  """Takes the files out of the page cache."""
  for path in folder.rglob("*"):
    if path.is_file():
      with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Cases:
  """What is timed; each method does one thing once and returns its seconds."""

  def __init__(self, root: pathlib.Path, model: Tree, optimizer: Tree):
    self.root, self.model, self.optimizer = root, model, optimizer
    self.nbytes = sum(x.nbytes for tree in (model, optimizer) for x in tree.values())
    self.layouts = {
      "same mesh": (make_mesh(2, 4), P("a", "b")),
      "rows, 4 devices": (make_mesh(4), P("a")),
      "columns, 8 devices": (make_mesh(8), P(None, "a")),
      "one device": (make_mesh(1), P()),
    }

  def _timed(self, call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began

  def _fresh(self, name: str) -> pathlib.Path:
    shutil.rmtree(self.root / name, ignore_errors=True)
    return self.root / name

  def raw_write(self) -> float:
    """One file, written in order and synced."""
    arrays = [x for tree in (self.model, self.optimizer) for x in tree.values()]
    shards = [
      memoryview(jax.device_get(s.data)).cast("B")
      for x in arrays
      for s in x.addressable_shards
      if not s.replica_id
    ]
    path = self._fresh("raw")
    path.mkdir()

    def write() -> None:
      with (path / "data").open("wb", buffering=0) as file:
        for shard in shards:
          file.write(shard)
        os.fsync(file.fileno())

    return self._timed(write)

  def raw_read(self) -> float:
    """The same file, read in order into memory that was never touched."""
    drop_cache(self.root / "raw")
    size = (self.root / "raw" / "data").stat().st_size
    out = memoryview(bytearray(size))

    def read() -> None:
      done = 0
      with (self.root / "raw" / "data").open("rb", buffering=0) as file:
        while done < size:
          done += file.readinto(out[done : done + (64 << 20)])

    return self._timed(read)

  def orbax_save(self) -> float:
    """Plain Orbax with the options that we use."""
    path = self._fresh("orbax")
    context = ocp.Context()
    context.array_options.saving.use_ocdbt = False
    context.array_options.saving.use_compression = False
    context.array_options.saving.storage_options.chunk_byte_size = 16 << 20
    with context:
      return self._timed(
        lambda: ocp.save_checkpointables(path, {"model": self.model, "optimizer": self.optimizer})
      )

  def orbax_restore(self, layout: str) -> float:
    """Plain Orbax into a layout."""
    drop_cache(self.root / "orbax")
    mesh, spec = self.layouts[layout]
    context = ocp.Context()
    context.memory_options.read_concurrent_bytes = 256 << 20
    with context:
      goal = {"model": target(self.model, mesh, spec), "optimizer": target(self.optimizer, mesh, spec)}
      return self._timed(lambda: ocp.load_checkpointables(self.root / "orbax", goal))

  def save(self) -> float:
    """Ours, with digests, synced and committed."""
    checkpointer = Checkpointer(self._fresh("ours"))
    return self._timed(lambda: checkpointer.save(1, self.model, self.optimizer))

  def save_blocking(self) -> float:
    """The part of a background save that the training loop waits for."""
    with Checkpointer(self._fresh("background"), asynchronous=True) as checkpointer:
      return self._timed(lambda: checkpointer.save(1, self.model, self.optimizer))

  def restore(self, layout: str, verify: str) -> float:
    """Ours, into a layout."""
    drop_cache(self.root / "ours")
    mesh, spec = self.layouts[layout]
    checkpointer = Checkpointer(self.root / "ours", verify=verify)
    goal = {"model": target(self.model, mesh, spec), "optimizer": target(self.optimizer, mesh, spec)}
    return self._timed(
      lambda: (
        checkpointer.restore(goal["model"]),
        checkpointer.restore_extra("optimizer", goal["optimizer"]),
      )
    )


def memory(gigabytes: float, case: str) -> None:
  """Runs one case in this process and prints state, and extra peak memory over it, in bytes."""
  root = pathlib.Path(os.environ["CHECKPOINT_BENCHMARK"])
  model, optimizer = make_state(gigabytes)
  cases = Cases(root, model, optimizer)
  if case == "save":
    jax.block_until_ready([*model.values(), *optimizer.values()])
    before = _resident()
    _reset_peak()
    Checkpointer(root / "memory").save(1, model, optimizer)
    print(cases.nbytes, _peak() - before)
    return
  mesh, spec = cases.layouts["columns, 8 devices"]
  goals = target(model, mesh, spec), target(optimizer, mesh, spec)
  nbytes = sum(jnp.dtype(x.dtype).itemsize * x.size for goal in goals for x in goal.values())
  del model, optimizer, cases
  before = _resident()
  _reset_peak()
  checkpointer = Checkpointer(root / "ours")
  kept = checkpointer.restore(goals[0]), checkpointer.restore_extra("optimizer", goals[1])
  jax.block_until_ready(kept)
  print(nbytes, _peak() - before - nbytes)


def _status(field: str) -> int:
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _resident() -> int:
  return _status("VmRSS")


def _peak() -> int:
  return _status("VmHWM")


def _reset_peak() -> None:
  pathlib.Path("/proc/self/clear_refs").write_text("5")


def measure_memory(root: pathlib.Path, gigabytes: float, case: str) -> float:
  """Extra peak memory of a case as a share of the state."""
  command = [sys.executable, __file__, "--gigabytes", str(gigabytes), "--memory", case]
  environment = {**os.environ, "CHECKPOINT_BENCHMARK": str(root)}
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
  nbytes, extra = map(int, done.stdout.split()[-2:])
  return extra / nbytes


def main() -> None:
  """Measures, prints and records."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--gigabytes", type=float, default=2.0, help="parameters and Adam moments together")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--memory", choices=["save", "restore"], help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.memory:
    memory(arguments.gigabytes, arguments.memory)
    return
  with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINT_BENCHMARK")) as name:
    report(pathlib.Path(name), arguments.gigabytes, arguments.rounds)


def report(root: pathlib.Path, gigabytes: float, rounds: int) -> None:
  """Times all cases in turns and writes the record."""
  from harness import Record, Timing

  cases = Cases(root, *make_state(gigabytes))
  seconds: dict[str, list[float]] = {}
  for number in range(rounds + 1):
    turn = {
      "raw write": cases.raw_write,
      "save, Orbax": cases.orbax_save,
      "save, ours": cases.save,
      "save, ours, blocking part of a background save": cases.save_blocking,
      "raw read": cases.raw_read,
    }
    for layout in cases.layouts:
      turn[f"restore, {layout}, Orbax"] = functools.partial(cases.orbax_restore, layout)
      turn[f"restore, {layout}, ours"] = functools.partial(cases.restore, layout, "off")
      turn[f"restore, {layout}, ours, verified"] = functools.partial(cases.restore, layout, "full")
    for case, call in turn.items():
      taken = call()
      if number:  # the first round compiles
        seconds.setdefault(case, []).append(taken)
  record = Record(
    "checkpoint",
    f"{cases.nbytes / 1e9:.2f} GB of parameters and Adam moments, 8 simulated devices, median of {rounds}",
    command=f"python benchmarks/checkpoint.py --gigabytes {gigabytes} --rounds {rounds}",
  )
  timings = {case: Timing(case, tuple(taken)) for case, taken in seconds.items()}
  for group in ("write", "read"):
    base = f"raw {group}"
    kind = "save" if group == "write" else "restore"
    chosen = {case: timing for case, timing in timings.items() if case == base or case.startswith(kind)}
    record.compare(chosen, baseline=base, group=group)
  for case in ("save", "restore"):
    share = measure_memory(root, gigabytes, case)
    record.value(f"extra peak memory, {case}", round(share, 3), "of the state")
  record.notes.append(
    f"Load average {os.getloadavg()[0]:.0f} at the end. "
    "The raw write is one stream; Orbax and ours write several."
  )
  record.write()


if __name__ == "__main__":
  main()
