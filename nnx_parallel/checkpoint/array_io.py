"""The arrays of a step on disk: Orbax writes them, TensorStore reads them.

Orbax stores one Zarr 3 folder per array, without compression: on local disks that is faster than the default
in both directions, and a damaged file belongs to one array. The step folder is an ordinary Orbax checkpoint,
readable with `orbax.checkpoint.v1.load_checkpointables` alone. Orbax cannot load it in a job of several
processes: it counts its loads, and all processes must make equally many, but a process that verifies its
share, or meets damage, makes more loads than the others.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.storage import is_local, kvstore_of

_CLEAN_UP_S = 10.0  # other writes should end within this time
# Below this a replicated array is written by one process, not cut into one file per replica.
_SMALLEST_REPLICA_SLICE = 4 << 20

Box = tuple[tuple[int, int], ...]
"""The start and stop of a shard along each dim."""


def start_save(
  step_dir: epath.Path,
  items: Mapping[str, Mapping[str, Array]],
  *,
  chunk_bytes: int | None,
  byte_budget: int,
  background: bool,
) -> Callable[[float], None]:
  """Starts writing arrays, by item and folder; the returned function waits, and raises the write's error.

  Each wait takes at most `seconds`, and may be repeated after a `TimeoutError`. If one process cannot write,
  Orbax makes the other processes wait up to twenty minutes for it: see `Block.wait_for`. In the background,
  all arrays are copied off the devices before this returns; otherwise the copies that exist at a time stay
  within the budget.
  """
  context = _context()
  budget = _write_budget(items, byte_budget)
  context.memory_options.write_concurrent_bytes = budget
  context.memory_options.transfer_concurrent_bytes = None if background else budget
  context.array_options.saving.storage_options.chunk_byte_size = chunk_bytes
  # Else the writes of one item, which need the same cores, begin before the next item is copied.
  folders_later = background and jax.process_count() == 1 and is_local(step_dir)
  if folders_later:
    _require_folders(step_dir, items)
  context.async_options.create_directories_asynchronously = folders_later
  with context, quiet():
    response: Any = ocp.save_checkpointables_async(
      step_dir, {name: dict(tree) for name, tree in items.items()}
    )
  return response.result if jax.process_count() == 1 else functools.partial(_result, response)


def _require_folders(step_dir: epath.Path, items: Iterable[str]) -> None:
  """Makes the folders that a save needs, and deletes them.

  If Orbax cannot make a folder in the background, its threads wait for twenty minutes, and the process cannot
  end before.
  """
  try:
    for name in items:
      (step_dir / name / "array_metadatas" / "process_0").mkdir(parents=True)
  finally:
    step_dir.rmtree(missing_ok=True)


def _result(response: Any, seconds: float) -> None:
  """As `response.result`, without its endless clean-up after a failure.

  Orbax then waits for the other items, and they wait for the other processes, which may have failed too.
  """
  failed = response._thread_runner._future.exception(seconds)  # tests/test_upstream.py checks these
  if failed is None:
    response.result()
    return
  clean_up = threading.Thread(target=_ignore_failure, args=(response,), daemon=True)
  clean_up.start()
  clean_up.join(_CLEAN_UP_S)
  raise failed


def _ignore_failure(response: Any) -> None:
  with contextlib.suppress(Exception):  # it is raised elsewhere
    response.result()


def host_bytes_to_save(
  items: Mapping[str, Mapping[str, Array]], *, byte_budget: int, background: bool
) -> int:
  """Most host memory that `start_save` takes on this process beyond the arrays."""
  arrays = [array for tree in items.values() for array in tree.values()]
  copies = sum(_bytes_here(array, replicas=False) for array in arrays)
  return copies if background else min(copies, _write_budget(items, byte_budget))


@contextlib.contextmanager
def quiet() -> Generator[None]:
  """Keeps the log of Orbax out of the terminal; its failures are raised with their cause."""
  logger = logging.getLogger("absl")

  # One for each call: of two threads, the first that ends would remove a shared filter.
  def is_of_others(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname

  logger.addFilter(is_of_others)
  try:
    yield
  finally:
    logger.removeFilter(is_of_others)


def _write_budget(items: Mapping[str, Mapping[str, Array]], byte_budget: int) -> int:
  # Orbax refuses an array that is larger than its budget.
  arrays = [array for tree in items.values() for array in tree.values()]
  return max(byte_budget, *(_bytes_here(array, replicas=True) + 1 for array in arrays))


def _bytes_here(array: Array, *, replicas: bool) -> int:
  """Bytes of this process's shards: of all replicas, or of the first only."""
  if isinstance(array, np.ndarray):
    return array.nbytes
  return sum(s.data.nbytes for s in array.addressable_shards if replicas or s.replica_id == 0)


def _context() -> ocp.Context:
  context = ocp.Context()
  saving = context.array_options.saving
  saving.use_ocdbt = False
  saving.use_compression = False
  saving.min_slice_bytes_for_replica_parallel = _SMALLEST_REPLICA_SLICE
  return context


def read(
  folder: epath.Path,
  stored: Mapping[str, jax.ShapeDtypeStruct],
  targets: Mapping[str, jax.ShapeDtypeStruct],
  *,
  byte_budget: int,
) -> dict[str, Array]:
  """Reads arrays of an item into their targets' shardings; each process reads its own shards, independently.

  A target without a sharding means a numpy array. Its shape may be larger than the stored shape; the rest is
  zero. Half of the budget is for shards being read, unless one array is larger, and half for chunks that
  several shards share. A damaged file raises a `ValueError`.
  """
  # Each array has its own cache, which ends with it: a shared cache would stay full of chunks that were read.
  sizes, half = {name: shard_bytes(target) for name, target in targets.items()}, byte_budget // 2
  opened = {name: _open(folder / name, form, min(sizes[name], half)) for name, form in stored.items()}
  arrays: dict[str, Array] = {}
  reading: collections.deque[tuple[str, dict[Box, tuple[Any, Any]]]] = collections.deque()
  in_flight = 0

  def finish_one() -> None:
    nonlocal in_flight
    name, reads = reading.popleft()
    for _, read in reads.values():
      read.result()
    blocks = {box: block for box, (block, _) in reads.items()}
    arrays[name] = jax.block_until_ready(_placed(targets[name], blocks))
    in_flight -= sizes[name]

  for name, target in targets.items():
    while reading and in_flight + sizes[name] > half:
      finish_one()
    reading.append((name, _start_reading(opened.pop(name).result(), target)))
    in_flight += sizes[name]
  while reading:
    finish_one()
  return arrays


def _open(folder: epath.Path, stored: jax.ShapeDtypeStruct, cache_bytes: int) -> ts.Future[ts.TensorStore]:
  context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
  # Where a chunk is missing, it would otherwise be read as zeros.
  spec = {"driver": "zarr3", "kvstore": kvstore_of(folder), "fill_missing_data_reads": False}
  form: dict[str, Any] = {"shape": stored.shape, "dtype": ts.dtype(stored.dtype)}
  return ts.open(spec, open=True, read=True, context=context, **form)


def _start_reading(store: ts.TensorStore, target: jax.ShapeDtypeStruct) -> dict[Box, tuple[Any, Any]]:
  """Starts to read each distinct shard of this process: its memory, and a future. Padding is zero."""
  reads: dict[Box, tuple[Any, Any]] = {}
  for index in _indices(target):
    box = _box(index, target.shape)
    if box in reads:
      continue
    block = _unshared_zeros([stop - start for start, stop in box], np.dtype(target.dtype))
    cut = tuple(slice(min(a, size), min(b, size)) for (a, b), size in zip(box, store.shape, strict=True))
    stored = block[(*(slice(part.stop - part.start) for part in cut), ...)]  # the ellipsis keeps rank 0
    reads[box] = block, ts.array(stored).write(store[cut])
  return reads


def _placed(target: jax.ShapeDtypeStruct, blocks: Mapping[Box, Any]) -> Array:
  if target.sharding is None:
    return blocks[_box(None, target.shape)]
  return jax.make_array_from_callback(
    target.shape, target.sharding, lambda index: blocks[_box(index, target.shape)]
  )


def _unshared_zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
  """Zeros that jax copies. It would share memory at a multiple of 64, and a step cannot donate shared memory.

  `jax.device_put(may_alias=False)` copies only from jax 0.12 on.
  """
  size = math.prod(shape) * dtype.itemsize
  memory = np.zeros(size + 96, np.uint8)
  start = -memory.ctypes.data % 64 + 32
  return memory[start : start + size].view(dtype).reshape(shape)


def shard_bytes(target: jax.ShapeDtypeStruct) -> int:
  """Bytes of the distinct shards of an array that this process has."""
  shards = {_box(index, target.shape) for index in _indices(target)}
  shape = target.sharding.shard_shape(target.shape) if target.sharding else target.shape
  return len(shards) * math.prod(shape) * target.dtype.itemsize


def _indices(target: jax.ShapeDtypeStruct) -> Iterable[tuple[slice, ...] | None]:
  """The index of each shard of this process."""
  if target.sharding is None:
    return [None]
  return target.sharding.addressable_devices_indices_map(target.shape).values()


def _box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
  """The start and stop along each dim of a shard."""
  parts = index or (slice(None),) * len(shape)
  return tuple(part.indices(size)[:2] for part, size in zip(parts, shape, strict=True))
