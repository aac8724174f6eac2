"""Reads what Orbax stored on a local disk straight into the memory of the shards, by TensorStore.

Through Orbax a byte is copied three times: out of the file, into a host array, into the device's memory. On a
CPU that is most of a restore, and the copies are memory beyond the shards. Here each chunk is read once, into
the shards that overlap it. On CPUs these are the buffers of the new array itself, which nobody has seen yet:
memory of our own, which jax would take over too, could not be donated, and the first step after a restore
would hold everything twice. `_orbax.load` is the plain reference, and reads what `open_arrays` does not know.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath

from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.placement import on_cpu
from nnx_parallel.checkpoint.views import Box, box_of, whole

_READERS = 4
METADATA = "zarr.json"

Block: TypeAlias = "np.ndarray[Any, Any]"
Part: TypeAlias = tuple[Box, Block]
"""Where a shard lies in its array, and its memory."""


def open_arrays(
  folder: epath.Path, stored: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, ts.TensorStore] | None:
  """Opens the arrays of an item; None where one is stored in a way that only Orbax knows.

  Args:
    folder: of the item.
    stored: shape and dtype of each array, by the name of its folder.

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
  """The threads that `start` needs; they end with the `with` block."""
  return concurrent.futures.ThreadPoolExecutor(_READERS, "nnx_parallel-read")


def start(
  stores: Mapping[str, ts.TensorStore],
  targets: Mapping[str, jax.ShapeDtypeStruct],
  pool: concurrent.futures.Executor,
) -> Callable[[], dict[str, Array]]:
  """Starts to read arrays into their targets' shardings, each process its own shards.

  Host memory beyond the shards is at most `_READERS` chunks; on other devices than CPUs, the shards are in
  host memory too until the returned function is done. Nobody else has the arrays before.

  Args:
    stores: from `open_arrays`, by name.
    targets: shape, dtype and sharding wanted, by the same names; without a sharding a numpy array. The
      shape may be larger than what is stored; the rest is zero.
    pool: from `readers`.

  Returns:
    A function that waits, and gives the arrays by name. It raises ValueError when a file is not what was
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


def bytes_to_read(store: ts.TensorStore, target: jax.ShapeDtypeStruct) -> int:
  """Bytes of the chunks of an array that `start` reads here.

  Args:
    store: from `open_arrays`.
    target: as for `start`.
  """
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
  """Where a box lies in a larger one; the ellipsis keeps arrays of rank 0 arrays."""
  return (*(slice(b.start - a.start, b.stop - a.start) for a, b in zip(box, inner, strict=True)), ...)


def _memory(array: jax.Array) -> list[Part]:
  """The memory of each shard on a CPU of this process, to be written before anybody reads the array."""
  return [(box_of(one.index, array.shape), _view(one.data)) for one in array.addressable_shards]


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
    return [whole(target.shape)]
  places = target.sharding.addressable_devices_indices_map(target.shape).values()
  boxes = [box_of(index or (), target.shape) for index in places]
  return list({str(box): box for box in boxes}.values())


def _place(target: jax.ShapeDtypeStruct, blocks: Sequence[Part]) -> Array:
  if target.sharding is None:
    return blocks[0][1]
  found = {str(box): block for box, block in blocks}
  return jax.make_array_from_callback(
    target.shape, target.sharding, lambda index: found[str(box_of(index or (), target.shape))]
  )
