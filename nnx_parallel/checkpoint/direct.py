"""Reads what Orbax stored on a local disk straight into the memory of the shards.

Through Orbax a byte is copied three times: out of the file, into a host array, into the device's memory.
On a CPU that is most of a restore, and the copies are memory beyond the shards. Our arrays are stored
without compression, so a chunk's bytes lie in its file as they lie in the array: here each chunk is read
once, into the shards that overlap it. On CPUs these are the buffers of the new array itself, which nobody has
seen yet: memory of our own, which jax would take over too, could not be donated, and the first step after a
restore would hold everything twice. `_orbax.load` is the plain reference, and reads whatever `layout_of` does
not know: compressed arrays and object stores.

Source: Zarr 3, https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html, and its sharding codec.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.placement import on_cpu
from nnx_parallel.checkpoint.views import Box, box_of, whole

# Reading threads, and the largest piece that one of them reads beside the shards.
_READERS, _PIECE_BYTES = 4, 8 << 20
# The smallest gap between wanted bytes of a chunk that is passed over. A call for each run of bytes costs
# what reading 16 KiB of a cached file costs, and disks read ahead over small gaps anyhow. Measured on chunks
# of 16 MiB, to read every other run in times of reading all, cached (cold): runs of 4 KiB 1.9 (2.6),
# 16 KiB 1.6 (1.3), 32 KiB 0.9 (0.9), 64 KiB 0.4 (0.8).
_GAP_BYTES = 32 << 10
_BYTES = [{"name": "bytes"}, {"name": "bytes", "configuration": {"endian": "little"}}]

Shape: TypeAlias = tuple[int, ...]
Block: TypeAlias = "np.ndarray[Any, Any]"
Part: TypeAlias = tuple[Box, Block]
"""Where a shard lies in its array, and its memory."""


@dataclasses.dataclass(frozen=True)
class Layout:
  """How one array lies in its folder.

  Attributes:
    folder: of the array.
    shape: stored global shape in elements.
    dtype: of the elements, little-endian.
    file: elements that one file holds; those at the ends of the array are padded.
    chunk: elements that lie together in a file; divides `file`.
    indexed: whether a file ends with the places of its chunks.
  """

  folder: Path
  shape: Shape
  dtype: np.dtype[Any]
  file: Shape
  chunk: Shape
  indexed: bool

  @property
  def chunk_bytes(self) -> int:
    """Bytes of a chunk in its file."""
    return math.prod(self.chunk) * self.dtype.itemsize


def layout_of(folder: Path) -> Layout | None:
  """Reads how an array is stored; None when that is not a form that can be read directly.

  Raises:
    ValueError: the metadata is not what Zarr allows.
    LookupError: likewise.
    OSError: it is not there.
  """
  record = json.loads((folder / "zarr.json").read_bytes())
  grid, keys, codecs = record["chunk_grid"], record["chunk_key_encoding"], record["codecs"]
  separator = keys.get("configuration", {}).get("separator", "/")
  if (grid["name"], keys["name"], separator, len(codecs)) != ("regular", "default", "/", 1):
    return None
  file = chunk = tuple(grid["configuration"]["chunk_shape"])
  if indexed := codecs[0]["name"] == "sharding_indexed":
    inner = codecs[0]["configuration"]
    chunk, codecs = tuple(inner["chunk_shape"]), inner["codecs"]
    index = [codec["name"] for codec in inner["index_codecs"]]
    if index != ["bytes", "crc32c"] or inner.get("index_location", "end") != "end":
      return None
  if len(codecs) != 1 or codecs[0] not in _BYTES:
    return None
  return Layout(folder, tuple(record["shape"]), jnp.dtype(record["data_type"]), file, chunk, indexed)


def readers() -> concurrent.futures.Executor:
  """The threads that `start` needs; they end with the `with` block."""
  return concurrent.futures.ThreadPoolExecutor(_READERS, "nnx_parallel-read")


def start(
  layouts: Mapping[str, Layout],
  targets: Mapping[str, jax.ShapeDtypeStruct],
  pool: concurrent.futures.Executor,
) -> Callable[[], dict[str, Array]]:
  """Starts to read arrays into their targets' shardings, each process its own shards.

  Host memory beyond the shards is at most `_READERS * _PIECE_BYTES`; on other devices than CPUs, the
  shards are in host memory too until the returned function is done. Nobody else has the arrays before.

  Args:
    layouts: from `layout_of`, by name.
    targets: shape, dtype and sharding wanted, by the same names; without a sharding a numpy array. The
      shape may be larger than what is stored; the rest is zero.
    pool: from `readers`.

  Returns:
    A function that waits, and gives the arrays by name. It raises ValueError when a file is not what was
    written, and OSError when one is missing.

  Raises:
    ValueError: another dtype or rank is stored.
  """
  for name, target in targets.items():
    _check(layouts[name], target)
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
    pool.submit(_read_area, layouts[name], area, [blocks[name][shard] for shard in area.shards])
    for name in targets
    for area in _areas(layouts[name], [box for box, _ in blocks[name]])
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


def bytes_to_read(layout: Layout, target: jax.ShapeDtypeStruct) -> int:
  """Bytes of an array that `start` reads here, without the places of chunks at the end of a file.

  Args:
    layout: from `layout_of`.
    target: as for `start`.

  Raises:
    ValueError: another dtype or rank is stored.
  """
  _check(layout, target)
  return sum(_count(area.box) for area in _areas(layout, _boxes(target))) * layout.dtype.itemsize


def _check(layout: Layout, target: jax.ShapeDtypeStruct) -> None:
  if layout.dtype != target.dtype or len(layout.shape) != len(target.shape):
    raise ValueError(
      f"it holds {layout.dtype}{list(layout.shape)} instead of {target.dtype}{list(target.shape)}"
    )


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
  return [(box, np.zeros([_length(part) for part in box], target.dtype)) for box in _boxes(target)]


def _boxes(target: jax.ShapeDtypeStruct) -> list[Box]:
  """The distinct shards of this process."""
  if target.sharding is None:
    return [whole(target.shape)]
  places = target.sharding.addressable_devices_indices_map(target.shape).values()
  boxes = [box_of(index or (), target.shape) for index in places]
  return list({str(box): box for box in boxes}.values())


@dataclasses.dataclass(frozen=True)
class _Area:
  """What is read at once: a box in a chunk, and the shards that lie in it.

  Attributes:
    chunk: where the chunk starts in the array, in elements.
    box: counted from there.
    shards: their places in the list of shards.
  """

  chunk: Shape
  box: Box
  shards: list[int]


def _areas(layout: Layout, boxes: Sequence[Box]) -> Iterator[_Area]:
  """All that is read to fill the boxes: no byte that is not wanted, but for gaps too small to pass over."""
  wanted: dict[Shape, list[int]] = {}
  for shard, box in enumerate(boxes):
    ranges = [
      range(part.start // step * step, min(part.stop, size), step)
      for part, size, step in zip(box, layout.shape, layout.chunk, strict=True)
    ]
    for chunk in itertools.product(*ranges):
      wanted.setdefault(chunk, []).append(shard)
  for chunk, shards in wanted.items():
    cuts = {shard: _cut(layout, chunk, boxes[shard])[0] for shard in shards}
    cuts = {shard: cut for shard, cut in cuts.items() if _count(cut)}
    merged = [_without_small_gaps(area, layout) for area in _merge(cuts.values(), layout)]
    for area in _merge(merged, layout):
      yield _Area(chunk, area, [shard for shard, cut in cuts.items() if _hull(cut, area) == area])


def _merge(boxes: Iterable[Box], layout: Layout) -> list[Box]:
  """Joins boxes of a chunk as long as that adds no gap that would be passed over."""
  areas: list[Box] = []
  for box in boxes:
    area = box
    while (other := next((one for one in areas if _joins(one, area, layout)), None)) is not None:
      areas.remove(other)
      area = _hull(other, area)
    areas.append(area)
  return areas


def _joins(one: Box, other: Box, layout: Layout) -> bool:
  gap = _count(_hull(one, other)) - _count(one) - _count(other)
  return gap * layout.dtype.itemsize < _GAP_BYTES


def _hull(one: Box, other: Box) -> Box:
  return tuple(slice(min(a.start, b.start), max(a.stop, b.stop)) for a, b in zip(one, other, strict=True))


def _without_small_gaps(box: Box, layout: Layout) -> Box:
  """Takes whole dims, from the last one on, where the gaps between a box's runs of bytes are small."""
  area, row = list(box), layout.dtype.itemsize
  for dim in reversed(range(1, len(box))):
    size = layout.chunk[dim]
    gap = (size - _length(box[dim])) * row
    if gap >= _GAP_BYTES or _count(box[:dim]) == 1:
      break
    area[dim] = slice(0, size)
    row *= size
  return tuple(area)


def _length(part: slice) -> int:
  return max(0, part.stop - part.start)


def _count(box: Box) -> int:
  """Elements in a box."""
  return math.prod(map(_length, box))


def _read_area(layout: Layout, area: _Area, parts: Sequence[Part]) -> None:
  """Reads an area, in pieces of consecutive rows where it cannot go straight into the shards it holds."""
  cuts = [_cut(layout, area.chunk, box) for box, _ in parts]
  into = [block[(*theirs, ...)] for (_, block), (_, theirs) in zip(parts, cuts, strict=True)]
  inner = [ours for ours, _ in cuts]
  with (layout.folder / _file_name(layout, area.chunk)).open("rb", buffering=0) as file:
    begin = _begin(layout, area.chunk, file.fileno())
    if into[0].flags.c_contiguous and all(ours == area.box for ours in inner):
      _read_box(file.fileno(), begin, layout, area.box, into[0])
      for replica in into[1:]:
        replica[...] = into[0]
      return
    columns = area.box[1:]
    for rows in _pieces(area.box, layout):
      piece = np.empty([_length(part) for part in (rows, *columns)], layout.dtype)
      _read_box(file.fileno(), begin, layout, (rows, *columns), piece)
      for ours, block in zip(inner, into, strict=True):
        low, high = max(rows.start, ours[0].start), min(rows.stop, ours[0].stop)
        if low < high:
          taken = [
            slice(part.start - all_.start, part.stop - all_.start)
            for part, all_ in zip(ours[1:], columns, strict=True)
          ]
          block[low - ours[0].start : high - ours[0].start] = piece[
            (slice(low - rows.start, high - rows.start), *taken)
          ]


def _read_box(file: int, begin: int, layout: Layout, box: Box, block: Block) -> None:
  """Reads a box of the chunk that begins at `begin`, one run of consecutive bytes after the other."""
  dim = len(box) - 1  # what lies behind it is whole
  while dim > 0 and box[dim] == slice(0, layout.chunk[dim]):
    dim -= 1
  outer, first = box[: max(dim, 0)], box[dim].start if box else 0
  rows = _count(outer)
  runs = block.reshape(rows, -1).view(np.uint8)
  step = math.prod(layout.chunk[dim + 1 :]) * layout.dtype.itemsize if box else 0
  for at, place in enumerate(itertools.product(*(range(part.start, part.stop) for part in outer))):
    row = 0
    for index, size in zip(place, layout.chunk, strict=False):
      row = row * size + index
    row = row * (layout.chunk[dim] if box else 0) + first
    _fill(file, begin + row * step, runs[at])


def _cut(layout: Layout, starts: Shape, box: Box) -> tuple[Box, Box]:
  """What a chunk and a shard have in common, counted from the start of each."""
  ours: list[slice] = []
  theirs: list[slice] = []
  for start, step, size, part in zip(starts, layout.chunk, layout.shape, box, strict=True):
    low, high = max(start, part.start), min(start + step, part.stop, size)
    ours.append(slice(low - start, high - start))
    theirs.append(slice(low - part.start, high - part.start))
  return tuple(ours), tuple(theirs)


def _pieces(box: Box, layout: Layout) -> Iterator[slice]:
  """The rows of a box, in ranges that are read at once; scalars never get here."""
  rows = box[0]
  step = max(1, _PIECE_BYTES // (_count(box[1:]) * layout.dtype.itemsize))
  for start in range(rows.start, rows.stop, step):
    yield slice(start, min(start + step, rows.stop))


def _file_name(layout: Layout, starts: Shape) -> str:
  return "/".join(["c", *(str(start // size) for start, size in zip(starts, layout.file, strict=True))])


def _begin(layout: Layout, starts: Shape, file: int) -> int:
  """Where a chunk begins in its file, in bytes."""
  if not layout.indexed:
    return 0
  counts = [size // step for size, step in zip(layout.file, layout.chunk, strict=True)]
  places = [start % size // step for start, size, step in zip(starts, layout.file, layout.chunk, strict=True)]
  length = 16 * math.prod(counts)
  end = os.fstat(file).st_size - length - 4
  index = os.pread(file, length + 4, max(end, 0))
  if len(index) < length + 4 or _crc32c(index[:-4]) != int.from_bytes(index[-4:], "little"):
    raise ValueError("the index of a file does not have the checksum that it names")
  at = 16 * int(np.ravel_multi_index(places, counts)) if counts else 0
  begin, size = (int.from_bytes(index[i : i + 8], "little") for i in (at, at + 8))
  if size != layout.chunk_bytes or begin + size > end:
    raise ValueError(f"a file has {size:,} bytes at {begin:,} instead of a chunk of {layout.chunk_bytes:,}")
  return begin


def _fill(file: int, begin: int, run: Block) -> None:
  memory = memoryview(run)
  done = 0
  while done < len(memory):
    count = os.preadv(file, [memory[done:]], begin + done)
    if count == 0:
      raise ValueError(f"a file ends {len(memory) - done:,} bytes early")
    done += count


def _crc32c(data: bytes) -> int:
  """The checksum of an index, of a few hundred bytes."""
  value = 0xFFFFFFFF
  for byte in data:
    value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
  return value ^ 0xFFFFFFFF


def _table() -> list[int]:
  rows = list(range(256))
  for _ in range(8):
    rows = [(row >> 1) ^ (0x82F63B78 if row & 1 else 0) for row in rows]
  return rows


_TABLE = _table()


def _place(target: jax.ShapeDtypeStruct, blocks: Sequence[Part]) -> Array:
  if target.sharding is None:
    return blocks[0][1]
  found = {str(box): block for box, block in blocks}
  return jax.make_array_from_callback(
    target.shape, target.sharding, lambda index: found[str(box_of(index or (), target.shape))]
  )
