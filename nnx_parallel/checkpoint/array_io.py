"""The arrays of a step on disk: Orbax writes them, TensorStore reads them.

Orbax merges the arrays of an item into a few files (OCDBT), without compression: on local disks that is
faster in both directions. Each chunk ends with a CRC-32C, so a read that meets a wrong bit fails. The folder
is an ordinary Orbax checkpoint. Orbax cannot load it in a job of several processes, which must make equally
many loads: a process that verifies its share, or meets damage, makes more than the others.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils  # tests/checkpoint checks it

from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.storage import is_local

T = TypeVar("T")
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
  """Starts writing arrays, by item and folder; the returned function waits, and raises the write's error."""
  # Each wait takes at most `seconds`, and may be repeated after a `TimeoutError` (see `Block.wait_for`). In
  # the background, all arrays are copied off the devices first; else the copies at a time stay within the
  # budget.
  _let_orbax_write_checksums()
  context = ocp.Context()
  saving = context.array_options.saving
  saving.use_compression = False
  saving.enable_write_sharding_file = False  # the manifest has the layouts; it takes a third of the time
  saving.array_metadata_store = None  # TensorStore finds the shapes of chunks in the arrays
  saving.enable_post_merge_validation = False
  saving.min_slice_bytes_for_replica_parallel = _SMALLEST_REPLICA_SLICE
  saving.storage_options.chunk_byte_size = chunk_bytes
  # Within the budget, all arrays are written in one transaction, which makes the fewest files.
  budget, copies = _write_budget(items, byte_budget)
  budget = None if copies <= byte_budget else budget
  context.memory_options.write_concurrent_bytes = budget
  context.memory_options.transfer_concurrent_bytes = None if background else budget
  # Else the writes of one item, which need the same cores, begin before the next item is copied.
  folders_later = background and jax.process_count() == 1 and is_local(step_dir)
  if folders_later:
    _require_folders(step_dir, items)
  context.async_options.create_directories_asynchronously = folders_later
  _writing.add(folder := step_dir.as_posix())
  with quiet(), context:
    response: Any = ocp.save_checkpointables_async(step_dir, {name: dict(items[name]) for name in items})

  def wait(seconds: float) -> None:
    try:
      with quiet():
        _wait(response, seconds)
    finally:
      if response._thread_runner._future.done():
        _writing.discard(folder)

  return wait


def _require_folders(step_dir: epath.Path, items: Iterable[str]) -> None:
  """Raises where a folder cannot be made: in the background, Orbax would wait for it for twenty minutes."""
  try:
    for name in items:
      (step_dir / name / "ocdbt.process_0").mkdir(parents=True)
  finally:
    step_dir.rmtree(missing_ok=True)


def _wait(response: Any, seconds: float) -> None:
  """As `response.result`, without its endless clean-up after a failure: it waits for the other processes."""
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
  budget, copies = _write_budget(items, byte_budget)
  return copies if background else min(copies, budget)


def _write_budget(items: Mapping[str, Mapping[str, Array]], byte_budget: int) -> tuple[int, int]:
  """The budget, above any array here with its replicas, which Orbax asks for; and the bytes of all arrays."""
  largest = copies = 0
  for array in (array for tree in items.values() for array in tree.values()):
    if isinstance(array, np.ndarray):
      shards = [(array.nbytes, 0)]
    else:
      shards = [(shard.data.nbytes, shard.replica_id) for shard in array.addressable_shards]
    largest = max(largest, sum(nbytes for nbytes, _ in shards))
    copies += sum(nbytes for nbytes, replica in shards if replica == 0)
  return max(byte_budget, largest + 1), copies


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
) -> Iterator[tuple[str, Array | Exception]]:
  """Yields arrays of an item in their targets' shardings, or the error of reading one."""
  # Each process reads its own shards, independently. A target without a sharding means a numpy array. Its
  # shape may be larger than the stored shape; the rest is zero. Half of the budget is for shards being read,
  # unless one array is larger, and half for chunks that several shards share. `merged=False`: folders of
  # format 5.
  # Each array has its own cache, which ends with it: a shared cache would stay full of chunks that were read.
  sizes, half = {name: shard_bytes(target) for name, target in targets.items()}, byte_budget // 2
  nodes = ts.Context({"cache_pool#nodes": {"total_bytes_limit": _NODES_BYTES}})

  def start_opening(name: str) -> ts.Future[ts.TensorStore]:
    context = ts.Context({"cache_pool": {"total_bytes_limit": min(sizes[name], half)}}, nodes)
    return _open(folder, name, stored[name], context, merged=merged)

  opened = {name: _attempt(lambda name=name: start_opening(name)) for name in stored}
  reading = collections.deque[tuple[str, dict[Box, tuple[Any, Any]] | Exception]]()
  in_flight = 0

  def start(name: str) -> dict[Box, tuple[Any, Any]] | Exception:
    future = opened.pop(name)
    if isinstance(future, Exception):
      return future
    return _attempt(lambda: _start_reading(future.result(), targets[name]))

  def finish_one() -> tuple[str, Array | Exception]:
    nonlocal in_flight
    name, reads = reading.popleft()
    in_flight -= sizes[name]
    return name, reads if isinstance(reads, Exception) else _attempt(lambda: _place(targets[name], reads))

  for name in targets:
    while reading and in_flight + sizes[name] > half:
      yield finish_one()
    reading.append((name, start(name)))
    in_flight += sizes[name]
  while reading:
    yield finish_one()


def _attempt(call: Callable[[], T]) -> T | Exception:
  """What a call returns, or its error, if it may come of a damaged file."""
  try:
    return call()
  except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError, MemoryError) as error:
    return error


def _open(
  folder: epath.Path, name: str, form: jax.ShapeDtypeStruct, context: ts.Context, *, merged: bool
) -> ts.Future[ts.TensorStore]:
  place = f"{os.fspath(folder if merged else folder / name)}/"
  kvstore: Any = {"driver": "file", "path": place} if "://" not in place else place
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
    box = box_of(index, target.shape)
    if box in reads:
      continue
    block = unshared_zeros([stop - start for start, stop in box], np.dtype(target.dtype))
    cut = tuple(slice(min(a, size), min(b, size)) for (a, b), size in zip(box, store.shape, strict=True))
    stored = block[(*(slice(part.stop - part.start) for part in cut), ...)]  # the ellipsis keeps rank 0
    reads[box] = block, ts.array(stored).write(store[cut])
  return reads


def _place(target: jax.ShapeDtypeStruct, reads: Mapping[Box, tuple[Any, Any]]) -> Array:
  """The array of its shards, once they are read."""
  for _, read in reads.values():
    read.result()
  shape = target.shape
  if target.sharding is None:
    return reads[box_of(None, shape)][0]
  made = jax.make_array_from_callback(shape, target.sharding, lambda index: reads[box_of(index, shape)][0])
  return jax.block_until_ready(made)


def unshared_zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
  """Zeros that jax copies: a step cannot donate shared memory, which it would make at a multiple of 64."""
  size = math.prod(shape) * dtype.itemsize
  memory = np.zeros(size + 96, np.uint8)
  start = -memory.ctypes.data % 64 + 32
  return memory[start : start + size].view(dtype).reshape(shape)


def bytes_of_shard(target: jax.ShapeDtypeStruct) -> int:
  """Bytes of one shard of an array."""
  shape = target.sharding.shard_shape(target.shape) if target.sharding else target.shape
  return math.prod(shape) * target.dtype.itemsize


def shard_bytes(target: jax.ShapeDtypeStruct) -> int:
  """Bytes of the distinct shards of an array that this process has."""
  return len({box_of(index, target.shape) for index in _indices(target)}) * bytes_of_shard(target)


def _indices(target: jax.ShapeDtypeStruct) -> Iterable[tuple[slice, ...] | None]:
  """The index of each shard of this process."""
  if target.sharding is None:
    return [None]
  return target.sharding.addressable_devices_indices_map(target.shape).values()


def box_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
  """The start and stop along each dim of a shard."""
  parts = index or (slice(None),) * len(shape)
  return tuple(part.indices(size)[:2] for part, size in zip(parts, shape, strict=True))
