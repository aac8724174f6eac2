"""Saves and restores against raw reads and writes of the same bytes, and against plain Orbax.

    python -m benchmarks.checkpoint --gigabytes 2 --rounds 5

Every case takes its turn in every round, readers in another order each round; ratios are medians over
rounds. All find the machine alike: files to be read are dropped from the page cache, what was written before
is on the disk, the allocator has given back what earlier cases left, and as much free memory as a case needs
was touched (on a virtual machine the first touch costs more than reading does). Each save has a new folder,
and old ones are emptied rather than deleted: ext4 searches long for inodes that were not freed in the last
minutes.
Processor time is recorded too: on a shared machine it tells what a case costs where the clock tells what the
others do. Peak memory is measured in a process of its own for each case.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import gc
import mmap
import os
import pathlib
import statistics
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
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from orbax.checkpoint import v1 as ocp  # noqa: E402

import nnx_parallel as nxp  # noqa: E402
from nnx_parallel.checkpoint import manifest  # noqa: E402
from nnx_parallel.checkpoint.checkpointer import Checkpointer  # noqa: E402
from nnx_parallel.interop.safetensors import export_safetensors, import_safetensors  # noqa: E402

WIDTH = 2048
MEMORY = ("save", "restore", "import of safetensors")
Tree = dict[str, Any]


def make_mesh(*sizes: int) -> Mesh:
  """A mesh of Auto axes over the first devices."""
  names = tuple("ab"[: len(sizes)])
  count = 1
  for size in sizes:
    count *= size
  return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:count])


def names(gigabytes: float) -> list[str]:
  """Of the layers: as many as make that many bytes together with Adam's moments."""
  return [f"layer{i}" for i in range(max(1, round(gigabytes * 1e9 / (3 * 4 * (WIDTH * WIDTH + WIDTH)))))]


def shapes(gigabytes: float, prefixes: tuple[str, ...]) -> Tree:
  """The arrays of `make_state` without values."""
  forms = {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)}
  return {
    f"{prefix}{layer}_{leaf}": jax.ShapeDtypeStruct(shape, jnp.float32)
    for prefix in prefixes
    for layer in names(gigabytes)
    for leaf, shape in forms.items()
  }


def make_state(gigabytes: float) -> tuple[Tree, Tree]:
  """Parameters and Adam's moments, on a 2 x 4 mesh, cut along both dims."""
  mesh = make_mesh(2, 4)
  layouts = {2: NamedSharding(mesh, P("a", "b")), 1: NamedSharding(mesh, P("b"))}
  draw = {
    ndim: jax.jit(functools.partial(jax.random.normal, shape=(WIDTH,) * ndim), out_shardings=layout)
    for ndim, layout in layouts.items()
  }

  def tree(*prefixes: str) -> Tree:
    wanted = shapes(gigabytes, prefixes)
    keys = jax.random.split(jax.random.key(len(prefixes)), len(wanted))
    return {name: draw[x.ndim](key) for (name, x), key in zip(wanted.items(), keys, strict=True)}

  return tree(""), tree("mu_", "nu_")


def bag_plan(gigabytes: float) -> nxp.Plan:
  """A module that holds the whole state, for safetensors; kernels cut into columns over 8 devices."""

  class Bag(nnx.Module):
    def __init__(self) -> None:
      for name, x in shapes(gigabytes, ("", "mu_", "nu_")).items():
        layout = (None, "a") if x.ndim == 2 else (None,)
        setattr(self, name, nnx.Param(jnp.zeros(x.shape, x.dtype), out_sharding=layout))

  return nxp.plan(Bag, make_mesh(8))


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


def empty(folder: pathlib.Path) -> None:
  """Frees the blocks of the files, keeps their inodes, and waits for the disk."""
  for path in folder.rglob("*"):
    if path.is_file():
      os.truncate(path, 0)
  os.sync()


def orbax_like_ours() -> ocp.Context:
  """Orbax with the options that we use to save."""
  context = ocp.Context()
  context.array_options.saving.use_compression = False
  context.array_options.saving.storage_options.chunk_byte_size = 16 << 20
  return context


def level_memory(nbytes: int) -> None:
  """Gives back what the allocator kept, then touches as much new memory and frees it."""
  gc.collect()
  trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
  if trim is not None:
    trim(0)
  memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
  if hasattr(mmap, "MADV_HUGEPAGE"):
    memory.madvise(mmap.MADV_HUGEPAGE)
  page = bytes(1)
  for start in range(0, nbytes, mmap.PAGESIZE):
    memory[start : start + 1] = page
  memory.close()


class Cases:
  """What is timed; each method does one thing once and returns its seconds."""

  def __init__(self, root: pathlib.Path, model: Tree, optimizer: Tree, plan: nxp.Plan):
    self.root, self.model, self.optimizer, self.plan = root, model, optimizer, plan
    self.spent = 0.0  # processor seconds of the last case
    self.folders: dict[str, pathlib.Path] = {}  # the newest of each writer
    self.written = 0
    self.nbytes = sum(x.nbytes for tree in (model, optimizer) for x in tree.values())
    self.layouts = {
      "same mesh": (make_mesh(2, 4), P("a", "b")),
      "rows, 4 devices": (make_mesh(4), P("a")),
      "columns, 8 devices": (make_mesh(8), P(None, "a")),
      "one device": (make_mesh(1), P()),
    }

  def _timed(self, call: Callable[[], Any]) -> float:
    level_memory(2 * self.nbytes)  # the state, and the files in the page cache
    began, spent = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    self.spent = time.process_time() - spent
    return time.perf_counter() - began

  def _fresh(self, name: str) -> pathlib.Path:
    if name in self.folders:
      empty(self.folders[name])
    self.written += 1
    self.folders[name] = self.root / f"{name}{self.written}"
    return self.folders[name]

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
    path = self.folders["raw"]
    drop_cache(path)
    size = (path / "data").stat().st_size

    def read() -> None:
      done, out = 0, memoryview(bytearray(size))
      with (path / "data").open("rb", buffering=0) as file:
        while done < size:
          done += file.readinto(out[done : done + (64 << 20)])

    return self._timed(read)

  def orbax_save(self) -> float:
    """Plain Orbax with the options that we use: no compression, and no checksums either."""
    with orbax_like_ours():
      return self._save_by_orbax("orbax")

  def orbax_as_it_comes(self) -> float:
    """Plain Orbax with the options that it has by itself: it compresses."""
    return self._save_by_orbax("orbax_default")

  def _save_by_orbax(self, name: str) -> float:
    path = self._fresh(name)
    return self._timed(
      lambda: ocp.save_checkpointables(path, {"model": self.model, "optimizer": self.optimizer})
    )

  def orbax_restore(self, layout: str) -> float:
    """Plain Orbax into a layout."""
    drop_cache(self.folders["orbax"])
    mesh, spec = self.layouts[layout]
    context = ocp.Context()
    context.memory_options.read_concurrent_bytes = 256 << 20
    with context:
      goal = {"model": target(self.model, mesh, spec), "optimizer": target(self.optimizer, mesh, spec)}
      return self._timed(lambda: ocp.load_checkpointables(self.folders["orbax"], goal))

  def save(self) -> float:
    """Ours, with checksums, synced and committed."""
    checkpointer = Checkpointer(self._fresh("ours"))
    return self._timed(lambda: checkpointer.save(1, self.model, self.optimizer))

  def save_blocking(self) -> float:
    """The part of a background save that the training loop waits for."""
    with Checkpointer(self._fresh("background"), asynchronous=True) as checkpointer:
      return self._timed(lambda: checkpointer.save(1, self.model, self.optimizer))

  def copy_to_host(self) -> float:
    """Every shard once into new host memory: what a background save cannot do without."""
    arrays = [x for tree in (self.model, self.optimizer) for x in tree.values()]
    shards = [s.data for x in arrays for s in x.addressable_shards if not s.replica_id]
    return self._timed(lambda: [np.array(shard, copy=True) for shard in shards])

  def orbax_blocking(self) -> float:
    """The part of a background save by Orbax, with the options that we use."""
    path = self._fresh("orbax_background")
    pending: list[Any] = []

    def save() -> None:
      items = {"model": self.model, "optimizer": self.optimizer}
      pending.append(ocp.save_checkpointables_async(path, items))

    with orbax_like_ours():
      seconds = self._timed(save)
      pending[0].result()
    return seconds

  def restore(self, layout: str) -> float:
    """Ours, into a layout; the checksum of each chunk is compared."""
    drop_cache(self.folders["ours"])
    mesh, spec = self.layouts[layout]
    checkpointer = Checkpointer(self.folders["ours"])
    goal = target(self.model, mesh, spec), target(self.optimizer, mesh, spec)
    return self._timed(lambda: checkpointer.restore(goal))

  def export(self) -> None:
    """Writes the whole state as one safetensors file, once."""
    export_safetensors(self._fresh("safetensors"), self.model | self.optimizer)

  def import_safetensors(self) -> float:
    """Ours, into columns over 8 devices."""
    drop_cache(self.folders["safetensors"])
    return self._timed(
      lambda: nnx.to_pure_dict(nnx.state(import_safetensors(self.folders["safetensors"], self.plan)))
    )

  def orbax_import(self) -> float:
    """Orbax's own reader of safetensors, into the same layout."""
    drop_cache(self.folders["safetensors"])
    mesh, spec = self.layouts["columns, 8 devices"]
    context = ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS)
    context.memory_options.read_concurrent_bytes = 256 << 20
    goal = target(self.model | self.optimizer, mesh, spec)
    with context:
      return self._timed(lambda: ocp.load(self.folders["safetensors"], goal))


def memory(gigabytes: float, case: str) -> None:
  """Runs one case in this process and prints state, and extra peak memory over it, in bytes."""
  root = pathlib.Path(os.environ["CHECKPOINT_BENCHMARK"])
  abstract = shapes(gigabytes, ("",)), shapes(gigabytes, ("mu_", "nu_"))
  nbytes = sum(x.size * x.dtype.itemsize for tree in abstract for x in tree.values())
  call: Callable[[], Any]
  if case == "save":
    state = jax.block_until_ready(make_state(gigabytes))
    call, kept = functools.partial(Checkpointer(root / "memory").save, 1, *state), 0
  elif case == "restore":
    goals = tuple(target(tree, make_mesh(8), P(None, "a")) for tree in abstract)
    checkpointer, kept = Checkpointer(root / "ours"), nbytes

    def call() -> Any:
      return checkpointer.restore(goals)
  else:
    plan, kept = bag_plan(gigabytes), nbytes

    def call() -> Any:
      return nnx.to_pure_dict(nnx.state(import_safetensors(root / "safetensors", plan)))

  before = _status("VmRSS")
  pathlib.Path("/proc/self/clear_refs").write_text("5")
  jax.block_until_ready(call())
  print(nbytes, _status("VmHWM") - before - kept)


def _status(field: str) -> int:
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_memory(root: pathlib.Path, gigabytes: float, case: str) -> float:
  """Extra peak memory of a case as a share of the state."""
  command = [sys.executable, "-m", "benchmarks.checkpoint", "--gigabytes", str(gigabytes), "--memory", case]
  environment = {**os.environ, "CHECKPOINT_BENCHMARK": str(root)}
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
  nbytes, extra = map(int, done.stdout.split()[-2:])
  return extra / nbytes


def catalogue(root: pathlib.Path, rounds: int) -> list[float]:
  """Seconds to find the best of 200 steps that have 1 000 leaves each, which reads their headers."""
  checkpointer = Checkpointer(root / "many", best="loss")
  checkpointer.save(1, {f"leaf{i}": np.zeros(4, np.float32) for i in range(1000)}, metrics={"loss": 1.0})
  record = checkpointer.metadata()
  for step in range(2, 201):
    folder = checkpointer.directory / str(step)
    folder.mkdir()
    manifest.write(dataclasses.replace(record, step=step, time=record.time + step), folder)
  taken: list[float] = []
  for _ in range(rounds):
    start = time.perf_counter()
    checkpointer.best()
    taken.append(time.perf_counter() - start)
  return taken


def many_leaves(root: pathlib.Path, rounds: int) -> dict[str, tuple[float, float, int]]:
  """Median seconds, wall and processor, to save and restore 3,000 small arrays; and the files of a step."""
  tree = {f"leaf{i}": jnp.full(4, i, jnp.float32) for i in range(3000)}
  taken: dict[str, list[tuple[float, float]]] = {}
  files: dict[str, int] = {}

  def timed(name: str, call: Callable[[], Any]) -> None:
    began, spent = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    taken.setdefault(name, []).append((time.perf_counter() - began, time.process_time() - spent))

  for number in range(rounds + 1):
    theirs, ours = root / f"small-orbax{number}", root / f"small-ours{number}"
    checkpointer = Checkpointer(ours)
    timed("save, Orbax", functools.partial(ocp.save_checkpointables, theirs, {"model": tree}))
    timed("save, ours", functools.partial(checkpointer.save, 1, tree))
    timed("restore, Orbax", functools.partial(ocp.load_checkpointables, theirs, {"model": tree}))
    timed("restore, ours", functools.partial(checkpointer.restore, tree))
    for name, folder in (("Orbax", theirs), ("ours", ours / "1")):
      files[name] = sum(path.is_file() for path in folder.rglob("*"))
  return {
    name: (
      statistics.median(wall for wall, _ in pairs[1:]),
      statistics.median(spent for _, spent in pairs[1:]),
      files[name.rpartition(" ")[2]],
    )
    for name, pairs in taken.items()
  }


def main() -> None:
  """Measures, prints and records."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--gigabytes", type=float, default=2.0, help="parameters and Adam moments together")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--memory", choices=MEMORY, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.memory:
    memory(arguments.gigabytes, arguments.memory)
    return
  with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINT_BENCHMARK")) as name:
    report(pathlib.Path(name), arguments.gigabytes, arguments.rounds)


def report(root: pathlib.Path, gigabytes: float, rounds: int) -> None:
  """Times all cases in turns and writes the record."""
  from benchmarks.harness import Record, Timing

  cases = Cases(root, *make_state(gigabytes), bag_plan(gigabytes))
  cases.export()
  seconds: dict[str, list[float]] = {}
  spent: dict[str, list[float]] = {}
  writes: dict[str, Callable[[], float]] = {
    "raw write": cases.raw_write,
    "save, Orbax": cases.orbax_save,
    "save, Orbax as it comes": cases.orbax_as_it_comes,
    "save, ours": cases.save,
  }
  waits: dict[str, Callable[[], float]] = {
    "copy to the host": cases.copy_to_host,
    "background save, Orbax": cases.orbax_blocking,
    "background save, ours": cases.save_blocking,
  }
  reads: dict[str, Callable[[], float]] = {"raw read": cases.raw_read}
  for layout in cases.layouts:
    reads[f"restore, {layout}, Orbax"] = functools.partial(cases.orbax_restore, layout)
    reads[f"restore, {layout}, ours"] = functools.partial(cases.restore, layout)
  reads["import of safetensors, Orbax"] = cases.orbax_import
  reads["import of safetensors, ours"] = cases.import_safetensors
  for number in range(rounds + 1):
    first = 7 * number % len(reads)
    order = [*writes, *waits, *list(reads)[first:], *list(reads)[:first]]
    for case in order:
      taken = (writes | waits | reads)[case]()
      print(f"round {number}: {case} {taken:.2f} s", flush=True)
      if number:  # the first round compiles
        seconds.setdefault(case, []).append(taken)
        spent.setdefault(case, []).append(cases.spent)
  cases.folders["ours"].rename(root / "ours")
  cases.folders["safetensors"].rename(root / "safetensors")
  spent = {case: spent[case] for case in [*writes, *waits, *reads]}
  record = Record(
    "checkpoint",
    f"{cases.nbytes / 1e9:.2f} GB of parameters and Adam moments, 8 simulated devices, median of {rounds}",
    command=f"python -m benchmarks.checkpoint --gigabytes {gigabytes} --rounds {rounds}",
  )
  groups = {"write": writes, "wait for a background save": waits, "read": reads}
  for group, members in groups.items():
    timings = {case: Timing(case, tuple(seconds[case])) for case in members}
    record.compare(timings, baseline=next(iter(members)), group=group)
  for case, taken in spent.items():
    record.value(
      f"processor time, {case}", round(statistics.median(taken) * 1e9 / cases.nbytes, 2), "s per GB"
    )
  looked_up = statistics.median(catalogue(root, 2 * rounds + 1))
  record.value("the best of 200 steps of 1 000 leaves is found in", round(looked_up * 1e3, 1), "ms")
  for case, (wall, processor, count) in many_leaves(root, rounds).items():
    record.value(f"3,000 small arrays, {case}", round(wall, 2), "s")
    record.value(f"3,000 small arrays, {case}, processor", round(processor, 2), "s")
    record.value(f"3,000 small arrays, {case}, files of a step", count, "")
  for case in MEMORY:
    share = measure_memory(root, gigabytes, case)
    record.value(f"extra peak memory, {case}", round(share, 3), "of the state")
  record.notes.append(
    f"Load average {os.getloadavg()[0]:.0f} at the end. "
    "Raw write and raw read are one stream and one file. Orbax has no compression and no checksums, but "
    "where it runs as it comes, and for the 3,000 arrays. Ours writes by Orbax, with a checksum for each "
    "chunk, which each restore compares; TensorStore computes it by a table, half a second for a GB. "
    f"The byte budget of a restore is {(256 << 20) / cases.nbytes:.2f} of the state."
  )
  record.write()


if __name__ == "__main__":
  main()
