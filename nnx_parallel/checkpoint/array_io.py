"""The arrays of a step on disk: Orbax writes and reads them.

Orbax stores one Zarr 3 folder per array, without compression: on local disks that is faster than the default
in both directions, and a damaged file belongs to one array. The step folder is an ordinary Orbax checkpoint,
readable with `orbax.checkpoint.v1.load_checkpointables` alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.encoding import Array

PLACEHOLDER: Any = ocp.PLACEHOLDER
_CLEAN_UP_S = 10.0  # in which what else is being written should end
# Below this a replicated array is written by one process, not cut into a file per replica.
_SMALLEST_REPLICA_SLICE = 4 << 20


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


def shard_bytes(target: jax.ShapeDtypeStruct) -> int:
  """Bytes of the distinct shards of an array that this process has."""
  if target.sharding is None:
    return math.prod(target.shape) * target.dtype.itemsize
  shards = {str(index) for index in target.sharding.addressable_devices_indices_map(target.shape).values()}
  return len(shards) * math.prod(target.sharding.shard_shape(target.shape)) * target.dtype.itemsize
