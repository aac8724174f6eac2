"""The arrays of a step on disk: Orbax writes them, TensorStore reads them.

Orbax merges the arrays of an item into a few files (OCDBT), without compression: on local disks that is
faster in both directions. Each chunk ends with a CRC-32C, so a read that meets a wrong bit fails. The step
folder is an ordinary Orbax checkpoint, readable with `orbax.checkpoint.v1.load_checkpointables` and a target.
Orbax cannot load it in a job of several processes: it counts its loads, and all processes must make equally
many, but a process that verifies its share, or meets damage, makes more loads than the others.
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
from orbax.checkpoint._src.serialization import tensorstore_utils  # tests/test_upstream.py checks it

from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.storage import is_local, kvstore_of

MERGED = "manifest.ocdbt"  # the file of an item that finds all others
_CLEAN_UP_S = 10.0  # other writes should end within this time
_NODES_BYTES = 64 << 20  # of the trees of names in merged files
# Below this a replicated array is written by one process, not cut into one file per replica.
_SMALLEST_REPLICA_SLICE = 4 << 20
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_writing: set[str] = set()  # the folders whose chunks get a CRC-32C

Box = tuple[tuple[int, int], ...]
"""The start and stop of a shard along each dim."""


@functools.cache
def _let_orbax_write_checksums() -> None:
  """Orbax has no option for the codecs of an array; other checkpoints of the process stay as they are."""
  build = tensorstore_utils.build_array_write_spec

  def with_checksums(info: Any, *args: Any, **kwargs: Any) -> Any:
    spec = build(info, *args, **kwargs)
    if any(info.parent_dir.as_posix().startswith(folder) for folder in [*_writing]):
      array = spec.json
      array.get("base", array)["metadata"]["codecs"] = _CODECS
    return spec

  tensorstore_utils.build_array_write_spec = with_checksums


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
  _let_orbax_write_checksums()
  context = ocp.Context()
  saving = context.array_options.saving
  saving.use_compression = False
  saving.enable_write_sharding_file = False  # the manifest has the layouts; it takes a third of the time
  saving.array_metadata_store = None  # TensorStore finds the shapes of chunks in the arrays
  saving.enable_post_merge_validation = False
  saving.min_slice_bytes_for_replica_parallel = _SMALLEST_REPLICA_SLICE
  saving.storage_options.chunk_byte_size = chunk_bytes
  budget = _write_budget(items, byte_budget)
  # Within the budget, all arrays are written in one transaction, which makes the fewest files.
  in_one = host_bytes_to_save(items, byte_budget=byte_budget, background=True) <= byte_budget
  context.memory_options.write_concurrent_bytes = None if in_one else budget
  context.memory_options.transfer_concurrent_bytes = None if background or in_one else budget
  # Else the writes of one item, which need the same cores, begin before the next item is copied.
  folders_later = background and jax.process_count() == 1 and is_local(step_dir)
  if folders_later:
    _require_folders(step_dir, items)
  context.async_options.create_directories_asynchronously = folders_later
  _writing.add(folder := step_dir.as_posix())
  with contextlib.ExitStack() as stack:
    stack.callback(_writing.discard, folder)
    stack.enter_context(quiet())
    with context:
      response: Any = ocp.save_checkpointables_async(step_dir, {name: dict(items[name]) for name in items})
    ended = stack.pop_all().close

  def wait(seconds: float) -> None:
    try:
      _wait(response, seconds)
    finally:
      if response._thread_runner._future.done():
        ended()

  return wait


def _require_folders(step_dir: epath.Path, items: Iterable[str]) -> None:
  """Makes the folders that a save needs, and deletes them.

  If Orbax cannot make one in the background, its threads and the process's end wait for twenty minutes.
  """
  try:
    for name in items:
      (step_dir / name / "ocdbt.process_0").mkdir(parents=True)
  finally:
    step_dir.rmtree(missing_ok=True)


def _wait(response: Any, seconds: float) -> None:
  """As `response.result`, without its endless clean-up after a failure.

  Orbax then waits for the other items, and they wait for the other processes, which may have failed too.
  """
  future = response._thread_runner._future  # tests/test_upstream.py checks these
  if jax.process_count() == 1 or (failed := future.exception(seconds)) is None:
    response.result(seconds)
    return

  def clean_up() -> None:
    with contextlib.suppress(Exception):  # it is raised below
      response.result()

  thread = threading.Thread(target=clean_up, daemon=True)
  thread.start()
  thread.join(_CLEAN_UP_S)
  raise failed


def host_bytes_to_save(
  items: Mapping[str, Mapping[str, Array]], *, byte_budget: int, background: bool
) -> int:
  """Most host memory that `start_save` takes on this process beyond the arrays."""
  copies = sum(_bytes_here(array, replicas=False) for tree in items.values() for array in tree.values())
  return copies if background else min(copies, _write_budget(items, byte_budget))


def _write_budget(items: Mapping[str, Mapping[str, Array]], byte_budget: int) -> int:
  # Orbax refuses an array that is larger than its budget.
  arrays = [array for tree in items.values() for array in tree.values()]
  return max(byte_budget, *(_bytes_here(array, replicas=True) + 1 for array in arrays))


def _bytes_here(array: Array, *, replicas: bool) -> int:
  """Bytes of this process's shards: of all replicas, or of the first only."""
  if isinstance(array, np.ndarray):
    return array.nbytes
  return sum(s.data.nbytes for s in array.addressable_shards if replicas or s.replica_id == 0)


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


def read(
  folder: epath.Path,
  stored: Mapping[str, jax.ShapeDtypeStruct],
  targets: Mapping[str, jax.ShapeDtypeStruct],
  *,
  byte_budget: int,
  merged: bool = True,
) -> dict[str, Array]:
  """Reads arrays of an item into their targets' shardings; each process reads its own shards, independently.

  A target without a sharding means a numpy array. Its shape may be larger than the stored shape; the rest is
  zero. Half of the budget is for shards being read, unless one array is larger, and half for chunks that
  several shards share. A damaged file raises a `ValueError`. `merged=False` reads the folders of format 5.
  """
  # Each array has its own cache, which ends with it: a shared cache would stay full of chunks that were read.
  sizes, half = {name: shard_bytes(target) for name, target in targets.items()}, byte_budget // 2
  nodes = ts.Context({"cache_pool#nodes": {"total_bytes_limit": _NODES_BYTES}})

  def start_opening(name: str) -> ts.Future[ts.TensorStore]:
    context = ts.Context({"cache_pool": {"total_bytes_limit": min(sizes[name], half)}}, nodes)
    return _open(folder, name, stored[name], context, merged=merged)

  opened = {name: start_opening(name) for name in stored}
  arrays: dict[str, Array] = {}
  reading = collections.deque[tuple[str, dict[Box, tuple[Any, Any]]]]()
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


def _open(
  folder: epath.Path, name: str, form: jax.ShapeDtypeStruct, context: ts.Context, *, merged: bool
) -> ts.Future[ts.TensorStore]:
  kvstore = kvstore_of(folder if merged else folder / name)
  if merged:
    kvstore = {"driver": "ocdbt", "base": kvstore, "path": f"{name}/", "cache_pool": "cache_pool#nodes"}
  # Where a chunk is missing, it would otherwise be read as zeros.
  spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
  wanted: dict[str, Any] = {"shape": form.shape, "dtype": ts.dtype(form.dtype)}
  return ts.open(spec, open=True, read=True, context=context, **wanted)


def _start_reading(store: ts.TensorStore, target: jax.ShapeDtypeStruct) -> dict[Box, tuple[Any, Any]]:
  """The memory of each distinct shard of this process, and the future of its read. Padding is zero."""
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
  shape = target.shape
  if target.sharding is None:
    return blocks[_box(None, shape)]
  return jax.make_array_from_callback(shape, target.sharding, lambda index: blocks[_box(index, shape)])


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
