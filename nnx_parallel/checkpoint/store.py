"""The arrays of a step on disk: Orbax writes them, TensorStore reads them.

Orbax stores one Zarr 3 folder per array, without compression: on local disks that is faster than the default
in both directions, and a damaged file belongs to one array. The step folder is an ordinary Orbax checkpoint,
readable with `orbax.checkpoint.v1.load_checkpointables` alone.

Orbax copies a byte three times: out of the file, into a host array, into the device's memory. On a CPU that
is most of a restore, and the copies are memory beyond the shards. TensorStore reads each chunk once, into the
shards that overlap it. On CPUs these are the buffers of a new jax array, before it is returned: buffers made
by numpy could not be donated, and the first step after a restore would hold everything twice. `load` uses
Orbax alone, and reads what `open_arrays` cannot.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.relayout import on_cpu

METADATA = "zarr.json"
PLACEHOLDER: Any = ocp.PLACEHOLDER
_READERS = 4
_CLEAN_UP_S = 10.0  # in which what else is being written should end
# Below this a replicated array is written by one process, not cut into a file per replica.
_SMALLEST_REPLICA_SLICE = 4 << 20

Box = tuple[slice, ...]
Block: TypeAlias = "np.ndarray[Any, Any]"
Part: TypeAlias = tuple[Box, Block]
"""The place of a shard in its array, and its memory."""


def start_save(
  step_dir: epath.Path,
  items: Mapping[str, Mapping[str, Array]],
  *,
  chunk_bytes: int | None,
  byte_budget: int,
  background: bool,
) -> Callable[[float], None]:
  """Starts writing the arrays; the returned function waits, and raises the error of a failed write.

  It takes seconds to wait at most, and may be called again after a `TimeoutError`. Where one process cannot
  write, Orbax makes the others wait up to twenty minutes for it: see `Block.wait_for`.

  Args:
    step_dir: created by this call; appears under its name once complete.
    items: arrays by item and folder name; none of them empty.
    chunk_bytes: largest piece that is read as a whole; None stores each shard as one piece.
    byte_budget: most bytes in flight beyond the arrays themselves.
    background: whether all arrays are copied off the devices before this returns; otherwise only a budget's
      worth of copies exists at a time.
  """
  context = _context(byte_budget=None)
  budget = _write_budget(items, byte_budget)
  context.memory_options.write_concurrent_bytes = budget
  context.memory_options.transfer_concurrent_bytes = None if background else budget
  context.array_options.saving.storage_options.chunk_byte_size = chunk_bytes
  with context, quiet():
    response: Any = ocp.save_checkpointables_async(
      step_dir, {name: dict(tree) for name, tree in items.items()}
    )
  return response.result if jax.process_count() == 1 else functools.partial(_result, response)


def _result(response: Any, seconds: float) -> None:
  """As `response.result`, without its endless clean-up after a failure.

  Orbax then waits for the other items, and these for the other processes, which may have failed too.
  """
  failed = response._thread_runner._future.exception(seconds)  # tests/test_upstream.py has what is used of it
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


def load(step_dir: epath.Path, item: str | None, tree: Any, *, byte_budget: int, pad: bool) -> Any:
  """Reads some arrays of one item by Orbax, each process its own shards.

  Args:
    step_dir: the step.
    item: the item's name.
    tree: shape, dtype and sharding wanted in place of each array, without a sharding for a numpy array;
      `PLACEHOLDER` in place of those that are not wanted.
    byte_budget: most bytes in flight.
    pad: whether arrays may be larger than the stored ones; the rest is zero.
  """
  wanted = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.ShapeDtypeStruct)]
  # Orbax refuses a shard that is as large as its budget.
  largest = max(map(_bytes_of_one_shard, wanted), default=0)
  context = _context(byte_budget=max(byte_budget, largest + 1))
  context.array_options.loading.enable_padding_and_truncation = pad
  # Each process reads alone: the others must not wait for one that cannot read a file.
  me = jax.process_index()
  context.multiprocessing_options.primary_host = me
  context.multiprocessing_options.active_processes = {me}
  abstract = jax.tree.map(_abstract, tree)
  with context, quiet():
    try:
      return ocp.load(step_dir, abstract, checkpointable_name=item)
    except Exception as error:
      # Orbax wraps what TensorStore raised while it read a shard in a bare `Exception`.
      if type(error) is not Exception or error.__cause__ is None:
        raise
      cause = error.__cause__
    raise cause  # not above, where the two would be each other's cause


def _abstract(leaf: Any) -> Any:
  # np.empty reserves addresses, not memory.
  is_host = isinstance(leaf, jax.ShapeDtypeStruct) and not leaf.sharding
  return np.empty(leaf.shape, leaf.dtype) if is_host else leaf


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


def _bytes_of_one_shard(target: jax.ShapeDtypeStruct) -> int:
  shape = target.sharding.shard_shape(target.shape) if target.sharding else target.shape
  return math.prod(shape) * target.dtype.itemsize


def _write_budget(items: Mapping[str, Mapping[str, Array]], byte_budget: int) -> int:
  # As in `load`, an array that is larger than the budget goes alone.
  arrays = [array for tree in items.values() for array in tree.values()]
  return max(byte_budget, *(_bytes_here(array, replicas=True) + 1 for array in arrays))


def _bytes_here(array: Array, *, replicas: bool) -> int:
  """Bytes of this process's shards: of all replicas, or of the first only."""
  if isinstance(array, np.ndarray):
    return array.nbytes
  return sum(s.data.nbytes for s in array.addressable_shards if replicas or s.replica_id == 0)


def _context(*, byte_budget: int | None) -> ocp.Context:
  context = ocp.Context()
  saving = context.array_options.saving
  saving.use_ocdbt = False
  saving.use_compression = False
  saving.min_slice_bytes_for_replica_parallel = _SMALLEST_REPLICA_SLICE
  context.memory_options.read_concurrent_bytes = byte_budget
  # In the background an unwritable parent is noticed late, and the process then hangs at exit.
  context.async_options.create_directories_asynchronously = False
  return context


def open_arrays(
  folder: epath.Path, stored: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, ts.TensorStore] | None:
  """Opens the arrays of an item's folder, by name. Returns None where only Orbax can read one of them.

  Raises:
    ValueError: the metadata is not what Zarr allows, or that of another array.
    OSError: it cannot be looked for.
  """
  if "://" in os.fspath(folder) or not all((folder / name / METADATA).exists() for name in stored):
    return None
  opened = {name: _open(folder / name, form) for name, form in stored.items()}
  return {name: future.result() for name, future in opened.items()}


def _open(folder: epath.Path, stored: jax.ShapeDtypeStruct) -> ts.Future[ts.TensorStore]:
  files = {"driver": "file", "path": f"{os.fspath(folder)}/"}
  spec = {"driver": "zarr3", "kvstore": files, "fill_missing_data_reads": False}  # else as zeros
  return ts.open(spec, open=True, read=True, shape=stored.shape, dtype=ts.dtype(stored.dtype))


def readers() -> concurrent.futures.Executor:
  """The threads that `start` needs, as a context manager."""
  return concurrent.futures.ThreadPoolExecutor(_READERS, "nnx_parallel-read")


def start(
  stores: Mapping[str, ts.TensorStore],
  targets: Mapping[str, jax.ShapeDtypeStruct],
  pool: concurrent.futures.Executor,
) -> Callable[[], dict[str, Array]]:
  """Starts to read arrays into their targets' shardings, each process its own shards.

  Host memory beyond the shards is at most `_READERS` chunks; on other devices than CPUs, the shards are in
  host memory too until the returned function is done.

  Args:
    stores: from `open_arrays`, by name.
    targets: shape, dtype and sharding wanted; without a sharding a numpy array. A shape may be larger than
      the stored one; the rest is zero.
    pool: from `readers`.

  Returns:
    A function that waits, and returns the arrays by name. It raises ValueError when a file is not what was
    written, or missing.
  """
  ready = {
    name: jnp.zeros(target.shape, target.dtype, device=target.sharding)
    for name, target in targets.items()
    if target.sharding is not None and on_cpu(target.sharding)
  }
  jax.block_until_ready(ready)
  blocks = {
    name: _memory(ready[name]) if name in ready else _staging(target) for name, target in targets.items()
  }
  reads = [
    pool.submit(_read_chunk, stores[name], chunk, [blocks[name][shard] for shard in shards])
    for name in targets
    for chunk, shards in _chunks(stores[name], [box for box, _ in blocks[name]])
  ]

  def finish() -> dict[str, Array]:
    try:
      for read in reads:
        read.result()
    finally:
      for read in reads:
        read.cancel()
    arrays: dict[str, Array] = {
      name: ready[name] if name in ready else _place(target, blocks[name]) for name, target in targets.items()
    }
    return jax.block_until_ready(arrays)

  return finish


def shard_bytes(target: jax.ShapeDtypeStruct) -> int:
  """Bytes of the distinct shards of an array that this process has."""
  sizes = (math.prod(part.stop - part.start for part in box) for box in _boxes(target))
  return sum(sizes) * target.dtype.itemsize


def bytes_to_read(store: ts.TensorStore, target: jax.ShapeDtypeStruct) -> int:
  """Bytes of the chunks of an array that `start` reads here."""
  count = sum(1 for _ in _chunks(store, _boxes(target)))
  return count * math.prod(_chunk_shape(store)) * target.dtype.itemsize


def _chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
  return tuple(size or 1 for size in store.chunk_layout.read_chunk.shape or ())


def _chunks(store: ts.TensorStore, boxes: Sequence[Box]) -> Iterator[tuple[Box, list[int]]]:
  """The chunks that overlap the boxes, each with the places of its boxes in the list."""
  found: dict[tuple[int, ...], list[int]] = {}
  steps = _chunk_shape(store)
  for place, box in enumerate(boxes):
    ranges = [
      range(part.start // step * step, min(part.stop, size), step)
      for part, size, step in zip(box, store.shape, steps, strict=True)
    ]
    for starts in itertools.product(*ranges):
      found.setdefault(starts, []).append(place)
  for starts, places in found.items():
    ends = (min(start + step, size) for start, step, size in zip(starts, steps, store.shape, strict=True))
    yield tuple(map(slice, starts, ends)), places


def _read_chunk(store: ts.TensorStore, chunk: Box, parts: Sequence[Part]) -> None:
  """Reads a chunk into the shards that overlap it: straight into one, through a copy into several."""
  cuts = [_common(chunk, box) for box, _ in parts]
  into = [block[_from(box, cut)] for (box, block), cut in zip(parts, cuts, strict=True)]
  if len(parts) == 1:
    ts.array(into[0]).write(store[cuts[0]]).result()
    return
  values = store[chunk].read().result()
  for cut, part in zip(cuts, into, strict=True):
    part[...] = values[_from(chunk, cut)]


def _common(one: Box, other: Box) -> Box:
  return tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))


def _from(box: Box, inner: Box) -> tuple[Any, ...]:
  """The place of a box in a larger one; the ellipsis keeps arrays of rank 0 arrays."""
  return (*(slice(b.start - a.start, b.stop - a.start) for a, b in zip(box, inner, strict=True)), ...)


def _memory(array: jax.Array) -> list[Part]:
  """The memory of each shard on a CPU of this process. It is written before the array is returned."""
  return [(_box_of(one.index, array.shape), _view(one.data)) for one in array.addressable_shards]


def _view(shard: jax.Array) -> Block:
  if not shard.size:
    return np.empty(shard.shape, shard.dtype)
  memory = (ctypes.c_ubyte * shard.nbytes).from_address(shard.unsafe_buffer_pointer())
  return np.frombuffer(memory, np.uint8).view(shard.dtype).reshape(shard.shape)


def _staging(target: jax.ShapeDtypeStruct) -> list[Part]:
  """Host memory for each distinct shard of this process."""
  return [(box, np.zeros([part.stop - part.start for part in box], target.dtype)) for box in _boxes(target)]


def _boxes(target: jax.ShapeDtypeStruct) -> list[Box]:
  """The distinct shards of this process."""
  if target.sharding is None:
    return [_box_of((), target.shape)]
  places = target.sharding.addressable_devices_indices_map(target.shape).values()
  boxes = [_box_of(index, target.shape) for index in places]
  return list({str(box): box for box in boxes}.values())


def _place(target: jax.ShapeDtypeStruct, blocks: Sequence[Part]) -> Array:
  if target.sharding is None:
    return blocks[0][1]
  found = {str(box): block for box, block in blocks}
  return jax.make_array_from_callback(
    target.shape, target.sharding, lambda index: found[str(_box_of(index, target.shape))]
  )


def _box_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
  """A shard's index with every start and stop written out."""
  index = index or (slice(None),) * len(shape)
  parts = (part.indices(size) for part, size in zip(index, shape, strict=True))
  return tuple(slice(start, stop) for start, stop, _ in parts)
