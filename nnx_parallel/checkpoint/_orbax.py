"""Everything that touches Orbax: its v1 API, as of orbax-checkpoint 0.12.

Arrays are stored by Orbax as one Zarr 3 folder per array, without compression: on local disks that is
faster than the default in both directions, and a damaged file belongs to one array. The step folder is
an ordinary Orbax checkpoint, readable with `orbax.checkpoint.v1.load_checkpointables` alone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Generator, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.errors import CheckpointError

# Below this a replicated array is written by one process, not cut into a file per replica.
_SMALLEST_REPLICA_SLICE = 4 << 20


class Pending(Protocol):
  """A save that goes on in the background."""

  def result(self, timeout: float | None = None) -> None:
    """Waits, and raises what went wrong."""
    ...


def start_save(
  step_dir: epath.Path,
  items: Mapping[str, Mapping[str, Array]],
  *,
  chunk_bytes: int | None,
  byte_budget: int,
  background: bool,
) -> Pending:
  """Starts writing the arrays.

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
    return ocp.save_checkpointables_async(step_dir, {name: dict(tree) for name, tree in items.items()})


def host_bytes_to_save(
  items: Mapping[str, Mapping[str, Array]], *, byte_budget: int, background: bool
) -> int:
  """Most host memory of this process that `start_save` takes beyond the arrays: their copies at a time.

  Args:
    items: as for `start_save`, and so are the others.
    byte_budget: see there.
    background: see there.
  """
  copies = sum(_first_copies(array) for tree in items.values() for array in tree.values())
  return copies if background else min(copies, _write_budget(items, byte_budget))


def load(
  step_dir: epath.Path,
  item: str,
  targets: Mapping[str, jax.ShapeDtypeStruct],
  others: frozenset[str],
  *,
  byte_budget: int,
  pad: bool,
) -> dict[str, Array]:
  """Reads some arrays of one item, each process its own shards.

  Args:
    step_dir: the step.
    item: the item's name.
    targets: shape, dtype and sharding wanted, by folder name; without a sharding a numpy array.
    others: the item's arrays that are not wanted.
    byte_budget: most bytes in flight.
    pad: whether targets may be larger than what is stored; the rest is zero.
  """
  # Orbax refuses a shard that is as large as its budget, rather than read it alone.
  largest = max(_shard_bytes(target) for target in targets.values())
  context = _context(byte_budget=max(byte_budget, largest + 1))
  context.array_options.loading.enable_padding_and_truncation = pad
  # Each process reads alone: a file that one of them cannot read must not leave the others waiting.
  me = jax.process_index()
  context.multiprocessing_options.primary_host = me
  context.multiprocessing_options.active_processes = {me}
  abstract: dict[str, Any] = dict.fromkeys(others, ocp.PLACEHOLDER)
  for name, target in targets.items():
    # np.empty reserves addresses, not memory.
    abstract[name] = target if target.sharding else np.empty(target.shape, target.dtype)
  with context, quiet():
    loaded = _load(step_dir, abstract, item)
  return {name: loaded[name] for name in targets}


@contextlib.contextmanager
def quiet() -> Generator[None]:
  """Keeps Orbax's log out of the terminal, and nobody else's: failures are raised, with their cause."""
  logger = logging.getLogger("absl")

  # One for each call: a shared filter would be taken away by the first of two threads that ends.
  def is_of_others(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname

  logger.addFilter(is_of_others)
  try:
    yield
  finally:
    logger.removeFilter(is_of_others)


def _load(step_dir: epath.Path, abstract: Any, item: str | None) -> Any:
  """Raises what TensorStore raised while it read a shard, which Orbax wraps in a bare `Exception`."""
  try:
    return ocp.load(step_dir, abstract, checkpointable_name=item)
  except Exception as error:
    if type(error) is not Exception or error.__cause__ is None:
      raise
    cause = error.__cause__
  raise cause  # not above, where the two would be each other's cause


def _shard_bytes(target: jax.ShapeDtypeStruct) -> int:
  shape = target.sharding.shard_shape(target.shape) if target.sharding else target.shape
  return math.prod(shape) * target.dtype.itemsize


def _write_budget(items: Mapping[str, Mapping[str, Array]], byte_budget: int) -> int:
  # As in `load`, an array that is larger than the budget goes alone.
  return max(byte_budget, *(_bytes_here(array) + 1 for tree in items.values() for array in tree.values()))


def _first_copies(array: Array) -> int:
  """Bytes of the shards here, of replicas only the first."""
  if isinstance(array, np.ndarray):
    return array.nbytes
  return sum(shard.data.nbytes for shard in array.addressable_shards if shard.replica_id == 0)


def _bytes_here(array: Array) -> int:
  if isinstance(array, np.ndarray):
    return array.nbytes
  return sum(shard.data.nbytes for shard in array.addressable_shards)


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


def describe(step_dir: epath.Path, item: str | None) -> tuple[str | None, Any]:
  """What any Orbax checkpoint holds: the name of its item, and a tree of shapes and dtypes.

  Raises:
    CheckpointError: not an Orbax checkpoint, or several items and none named.
  """
  with quiet():
    try:
      names = sorted(ocp.checkpointables_metadata(step_dir).metadata)
    except ocp.errors.InvalidLayoutError:
      names = []  # a tree without a name, or nothing of Orbax's: the next call says which
    if item is None and len(names) > 1:
      raise CheckpointError(
        f"{step_dir} holds several trees.", details=f"names: {names}", fix=f"pass item={names[0]!r}."
      )
    name = item or next(iter(names), None)
    try:
      return name, ocp.metadata(step_dir, checkpointable_name=name).metadata
    except (ValueError, LookupError, OSError) as error:
      raise CheckpointError(
        f"{step_dir} is not an Orbax checkpoint that can be read here.",
        details=str(error)[:300],
        fix=f"check the path and the item; names: {names or 'none'}.",
      ) from error


def load_tree(step_dir: epath.Path, item: str | None, abstract: Any, *, byte_budget: int) -> Any:
  """Reads a tree in which leaves that are not wanted are `PLACEHOLDER`."""
  context = _context(byte_budget=byte_budget)
  with context, quiet():
    return _load(step_dir, abstract, item)


PLACEHOLDER = ocp.PLACEHOLDER
