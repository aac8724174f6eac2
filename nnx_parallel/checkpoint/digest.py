"""Digests of an array's logical blocks that do not depend on how the array is laid out.

Each element's bits are mixed with its position and the results are summed modulo 2**32, block by block. A
block is a range of the global array, of about `BLOCK_BYTES`, fixed by the array's shape alone. A sum has no
order, so each device digests its own shards, and only a few numbers per device are sent. The same values give
the same digests on any mesh, any process count, and on the host.

A change within one 32-bit word (an element of up to four bytes, half of one of eight) always changes its
block's digest. Other damage passes with a probability of about 2**-32, also structured damage such as the
same bit flipped in several elements. That guards against rot, not malice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.relayout import on_auto_axes, on_cpu
from nnx_parallel.core.axes import axes_of

BLOCK_BYTES = 16 << 20
_TILE = 1 << 15  # words that are mixed and summed at a time on a CPU
_STEP, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35

Shape = tuple[int, ...]


def block_shape(shape: Shape, itemsize: int, block_bytes: int = BLOCK_BYTES) -> Shape:
  """Cuts an array into ranges of consecutive elements: 1 along the first dims, then a range, then full dims.

  Example:
    >>> block_shape((4, 6, 8), 1, 1000), block_shape((4, 6, 8), 1, 100), block_shape((4, 6, 8), 1, 20)
    ((4, 6, 8), (2, 6, 8), (1, 2, 8))
  """
  block = list(shape)
  for dim, size in enumerate(shape):
    rest = math.prod(shape[dim + 1 :]) * itemsize
    block[dim] = min(size, max(1, block_bytes // rest))
    if block[dim] > 1 or rest <= block_bytes:
      break
  return tuple(block)


def digest(array: Array, shape: Shape | None = None, block: Shape | None = None) -> jax.Array:
  """Digests an array's global value, block by block.

  Args:
    array: any dtype with items of one byte or more; not a typed key. Of a `jax.Array` each device reads only
      its own shard. Host arrays are digested on the CPU.
    shape: logical global shape; the rest is padding and does not count.
    block: from `block_shape`; None takes the whole array as one.

  Returns:
    uint32 numbers on the array's devices, of a `jax.Array` not waited for: `totals` waits and adds them up.
    Of an array that is spread over processes, each process gets its own share.

  Example:
    >>> x = np.arange(6, dtype=np.float32)
    >>> totals(digest(x)) == totals(digest(jnp.asarray(x))) == totals(digest(np.pad(x, (0, 2)), shape=(6,)))
    True
    >>> one, two, three = totals(digest(x, block=(2,)))
    >>> x[4] = 9
    >>> [a == b for a, b in zip(totals(digest(x, block=(2,))), (one, two, three))]
    [True, True, False]
  """
  shape = tuple(array.shape if shape is None else shape)
  block = shape if block is None else block
  if isinstance(array, np.ndarray):
    host = host_device()
    parts = _digest_whole(jax.device_put(_host_words(array), host), shape, block, by_tiles=True)
    return jax.block_until_ready(parts)  # jax on CPU may read the memory itself, and the caller may change it
  array = on_auto_axes(array)
  sharding = array.sharding
  if not isinstance(sharding, NamedSharding):
    return _digest_whole(array, shape, block, by_tiles=on_cpu(sharding))
  return _digest_shards(sharding, tuple(array.shape), shape, block)(array)


def digest_later(array: Array, block: Shape) -> Callable[[], tuple[int, ...]]:
  """Starts `digest`, so that a training loop need not wait for it.

  The array may be donated or changed as soon as this returns. On GPUs and TPUs the programs are in the
  device's queue by then. On CPUs the work would take the caller's cores, so it is done later, on views of the
  shards' memory, as Orbax writes them: jax donates no buffer that has a view.

  Returns:
    A function that waits and returns what `totals` does: of an array that is spread over processes, this
    process's share, and of another, zeros on all but process 0. To be called once, on any thread.

  Example:
    >>> x = jnp.arange(6.0)
    >>> later = digest_later(x, (2,))
    >>> x.delete()
    >>> later() == totals(digest(np.arange(6, dtype=np.float32), block=(2,)))
    True
  """
  everywhere = isinstance(array, np.ndarray) or array.is_fully_addressable
  if everywhere and jax.process_index():
    return lambda: (0,) * math.prod(_counts(array.shape, block))
  if isinstance(array, np.ndarray) or not on_cpu(array.sharding):
    # Not later: all processes must run this program in the same order among their others.
    parts = digest(array, block=block)
    return lambda: totals(parts)
  shape, wide = tuple(array.shape), array.dtype.itemsize > 4
  shards = [
    (np.asarray(one.data), one.device, [part.indices(n)[0] for part, n in zip(one.index, shape, strict=True)])
    for one in array.addressable_shards
    if one.replica_id == 0
  ]

  def later() -> tuple[int, ...]:
    # Aliases, no copies. Without x64, which is each thread's own, jax would make 32 bits of 64.
    with jax.enable_x64(wide):
      parts = [
        _digest_at(jax.device_put(view, device), np.array(starts, np.uint32), shape, block)
        for view, device, starts in shards
      ]
    shards.clear()
    return _added([np.asarray(part) for part in parts]) if parts else (0,) * math.prod(_counts(shape, block))

  return later


def totals(parts: jax.Array) -> tuple[int, ...]:
  """Waits for what `digest` returned, and adds up this process's share: a number per block, in C order."""
  rows = [parts]
  if not (parts.is_fully_addressable or parts.is_fully_replicated):
    rows = [shard.data for shard in parts.addressable_shards]
  return _added([np.asarray(row) for row in rows])


def _added(rows: Sequence[np.ndarray[Any, Any]]) -> tuple[int, ...]:
  sums = np.concatenate(rows).sum(axis=0, dtype=np.uint64) % 2**32
  return tuple(int(number) for number in sums)


def host_device() -> Any:
  """The device of this process on which host arrays are digested: a CPU, where jax has one."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:  # JAX_PLATFORMS names others only
    return jax.local_devices()[0]


def block_ranges(index: int, shape: Shape, block: Shape) -> str:
  """The place of a block, given by its number in C order, as `[0:8, 0:16]`; empty when there is only one.

  Example:
    >>> block_ranges(1, (10, 4), (8, 4)), block_ranges(0, (10, 4), (10, 4))
    ('[8:10, 0:4]', '')
  """
  if shape == block:
    return ""
  where = np.unravel_index(index, _counts(shape, block))
  starts = [int(at) * part for at, part in zip(where, block, strict=True)]
  ends = [min(start + part, size) for start, part, size in zip(starts, block, shape, strict=True)]
  return f"[{', '.join(f'{start}:{end}' for start, end in zip(starts, ends, strict=True))}]"


def _counts(shape: Shape, block: Shape) -> list[int]:
  """How many blocks there are along each dim."""
  return [-(-size // part) for size, part in zip(shape, block, strict=True)]


def _host_words(array: np.ndarray) -> np.ndarray:
  """The bits of a host array: at most 32 per word, wider items become a trailing dim."""
  size = array.dtype.itemsize
  words = np.ascontiguousarray(array).view(np.dtype(f"uint{8 * min(size, 4)}"))
  return words.reshape(array.shape + ((size // 4,) if size > 4 else ()))


def _device_words(array: jax.Array) -> jax.Array:
  """The same words as `_host_words`, on the device."""
  if array.dtype == jnp.bool_:
    return array.astype(jnp.uint8)
  parts = array
  if jnp.issubdtype(array.dtype, jnp.complexfloating):
    parts = jnp.stack([array.real, array.imag], axis=-1)
  word = jnp.dtype(f"uint{8 * min(parts.dtype.itemsize, 4)}")
  words = jax.lax.bitcast_convert_type(parts, word)
  return words.reshape((*array.shape, -1)) if array.dtype.itemsize > 4 else words


@functools.partial(jax.jit, static_argnames=("shape", "block", "by_tiles"))
def _digest_whole(array: jax.Array, shape: Shape, block: Shape, *, by_tiles: bool) -> jax.Array:
  full = tuple(array.shape[: len(shape)])
  return _digest_part(array, [jnp.uint32(0)] * len(shape), full, shape, block, by_tiles=by_tiles)


@functools.partial(jax.jit, static_argnames=("shape", "block"))
def _digest_at(part: jax.Array, starts: Array, shape: Shape, block: Shape) -> jax.Array:
  """Digests a shard on a CPU, whose place is not compiled in."""
  offsets = [starts[dim] for dim in range(len(shape))]
  return _digest_part(part, offsets, shape, shape, block, by_tiles=True)


@functools.lru_cache(maxsize=1024)
def _digest_shards(layout: NamedSharding, full: Shape, shape: Shape, block: Shape) -> jax.stages.Wrapped:
  """A program without communication: a row of numbers from each device, on a mesh with Auto axes."""
  mesh: Any = layout.mesh
  axes, ndim = mesh.axis_names, len(full)
  names = [axes_of(entry) for entry in layout.spec]
  names += [()] * (ndim - len(names))
  free = [axis for axis in axes if not any(axis in entry for entry in names)]

  def local(part: jax.Array) -> jax.Array:
    offsets = [_index(entry, mesh) * jnp.uint32(size) for entry, size in zip(names, part.shape, strict=True)]
    counts = jnp.uint32(1)
    for axis in free:  # replicas share the work where a dim divides; otherwise the first does it
      size, mine = mesh.shape[axis], jax.lax.axis_index(axis).astype(jnp.uint32)
      dim = next((dim for dim in range(ndim) if part.shape[dim] % size == 0), None)
      if dim is None:
        counts = counts * (mine == jnp.uint32(0)).astype(jnp.uint32)
        continue
      rows = part.shape[dim] // size
      part = jax.lax.dynamic_slice_in_dim(part, mine.astype(jnp.int32) * rows, rows, dim)
      offsets[dim] = offsets[dim] + mine * jnp.uint32(rows)
    return _digest_part(part, offsets, full, shape, block, by_tiles=on_cpu(layout)) * counts

  spec = PartitionSpec(*layout.spec)
  return jax.jit(
    jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(axes), check_vma=False)
  )


def _index(entry: tuple[str, ...], mesh: Any) -> jax.Array:
  """Which shard of a dim this device has, as a number from 0."""
  index = jnp.uint32(0)
  for axis in entry:
    index = index * jnp.uint32(mesh.shape[axis]) + jax.lax.axis_index(axis).astype(jnp.uint32)
  return index


def _digest_part(
  array: jax.Array, offsets: Sequence[jax.Array], full: Shape, shape: Shape, block: Shape, *, by_tiles: bool
) -> jax.Array:
  """Digests the part that starts at `offsets` of an array of shape `full`, whose logical shape is `shape`.

  Returns:
    uint32 of shape (1, blocks): the part's share in the digest of each block of the whole array.
  """
  cut = [dim for dim, size in enumerate(shape) if block[dim] < size]
  leading = cut[-1] + 1 if cut else 0
  if by_tiles and array.size * _words_in(array.dtype) >= 2 * _TILE:
    return _digest_by_tiles(array, offsets, full, shape, block, leading)
  words = _device_words(array).astype(jnp.uint32)
  places: list[jax.Array] = []
  inside: list[jax.Array] = []
  for dim, size in enumerate(words.shape):
    index = jnp.arange(size, dtype=jnp.uint32) + (offsets[dim] if dim < len(offsets) else jnp.uint32(0))
    places.append(_place(index, dim))
    end = shape[dim] if dim < len(shape) else size
    inside.append((index < jnp.uint32(end)).astype(jnp.uint32))
  mixed = _mix(words ^ _outer(jnp.add, places)) * _outer(jnp.multiply, inside)
  sums = jnp.sum(mixed, axis=tuple(range(leading, mixed.ndim)), dtype=jnp.uint32)
  if not leading:
    return sums.reshape(1, 1)
  return _sum_by_block(sums, offsets[:leading], full[:leading], shape[:leading], block[leading - 1])


def _place(index: jax.Array, dim: int) -> jax.Array:
  """What the places along a dim are mixed with."""
  return _mix((index + jnp.uint32(1)) * jnp.uint32(_STEP) + jnp.uint32(dim * _FIRST % 2**32))


def _words_in(dtype: Any) -> int:
  return max(1, dtype.itemsize // 4)


def _outer(combine: Callable[..., jax.Array], parts: Sequence[jax.Array]) -> jax.Array:
  """Combines one number for each index along each dim into one for each element."""
  whole = jnp.uint32(0) if combine is jnp.add else jnp.uint32(1)
  for dim, part in enumerate(parts):
    whole = combine(whole, jnp.expand_dims(part, [d for d in range(len(parts)) if d != dim]))
  return whole


def _digest_by_tiles(
  array: jax.Array, offsets: Sequence[jax.Array], full: Shape, shape: Shape, block: Shape, leading: int
) -> jax.Array:
  """As `_digest_part`, a tile at a time, so that no mixed copy of the array is ever in memory.

  XLA fuses the mixing with the sum on GPUs and TPUs, but on CPUs it writes the mixed words to memory first.
  The array is read as [outer, rows, columns]: a block is a range of rows of one `outer`, and a tile has so
  few rows that it lies in two blocks at most.
  """
  ndim, u32 = array.ndim, jnp.uint32
  split_words = array.shape[len(shape) :]  # of a host array, whose wide items are cut into words already
  offsets = [*offsets, *[u32(0)] * len(split_words)]
  full, shape = full + split_words, shape + split_words
  count = _words_in(array.dtype)
  first = max(leading - 1, 0)  # the dim that blocks cut into ranges, if they do
  small = (dim for dim in range(max(1, leading), ndim) if math.prod(array.shape[dim:]) * count <= _TILE)
  split = next(small, max(leading, ndim - 1))
  rows, columns = math.prod(array.shape[first:split]), math.prod(array.shape[split:])
  tensor = array.reshape(-1, rows, columns)
  inner = math.prod(array.shape[first + 1 : split])  # rows of one index of the first dim
  in_block = (block[first] if leading else full[first]) * inner
  width = min(columns, max(1, _TILE // count))
  height = min(rows, in_block, max(1, _TILE // (width * count)))
  down, across = -(-rows // height), -(-columns // width)

  def look(flat: jax.Array, dims: range) -> tuple[jax.Array, jax.Array]:
    """What the elements with these numbers are mixed with along these dims, and which of them count."""
    place, counts = jnp.zeros_like(flat), jnp.ones_like(flat)
    for dim in reversed(dims):
      size = u32(array.shape[dim])
      index = (flat % size if dim > dims[0] else flat) + offsets[dim]
      flat = flat // size if dim > dims[0] else flat
      place = place + _place(index, dim)
      if shape[dim] < full[dim]:
        counts = counts * (index < u32(shape[dim])).astype(u32)
    return place, counts

  def numbers(start: jax.Array, size: int) -> jax.Array:
    return jnp.arange(size, dtype=u32) + start

  every_column = look(numbers(u32(0), width), range(split, ndim)) if across == 1 else None
  words_place = _place(numbers(u32(0), count), ndim) if count > 1 else jnp.zeros(1, u32)
  cells = -(-full[first] // block[first]) + 1 if leading else 2

  def add_tile(i: jax.Array, sums: jax.Array) -> jax.Array:
    i = i.astype(u32)
    outer, i = i // u32(down * across), i % u32(down * across)
    top, left = (i // u32(across)) * u32(height), (i % u32(across)) * u32(width)
    row, column = jnp.minimum(top, u32(rows - height)), jnp.minimum(left, u32(columns - width))
    # The bits are taken here: outside the loop that would be a copy of the array.
    tile = jax.lax.dynamic_slice(tensor, (outer, row, column), (1, height, width))[0]
    words = _device_words(tile).astype(u32).reshape(height, width, count)
    row_numbers, column_numbers = numbers(row, height), numbers(column, width)
    row_place, row_counts = look(row_numbers, range(first, split))
    column_place, column_counts = every_column or look(column_numbers, range(split, ndim))
    if first:
      place, counts = look(outer, range(first))
      row_place, row_counts = row_place + place, row_counts * counts
    row_counts = row_counts * (row_numbers >= top).astype(u32)  # the last tiles overlap those before
    column_counts = column_counts * (column_numbers >= left).astype(u32)
    place = row_place[:, None, None] + column_place[None, :, None] + words_place[None, None]
    mixed = _mix(words ^ place) * column_counts[None, :, None]
    found = jnp.sum(mixed, axis=(1, 2), dtype=u32) * row_counts
    if not leading:
      return sums.at[0, 0].add(found.sum(dtype=u32))
    # Where the tile begins, and at which of its rows the next block does.
    at = (offsets[first] + row // u32(inner)) // u32(block[first])
    border = (at + u32(1)) * u32(block[first]) - offsets[first]
    before = jnp.sum(found * (row_numbers // u32(inner) < border).astype(u32), dtype=u32)
    pair = jnp.stack([before, found.sum(dtype=u32) - before])[None]
    old = jax.lax.dynamic_slice(sums, (outer, at), (1, 2))
    return jax.lax.dynamic_update_slice(sums, old + pair, (outer, at))

  steps = tensor.shape[0] * down * across
  sums = jax.lax.fori_loop(0, steps, add_tile, jnp.zeros((tensor.shape[0], cells + 1), u32))
  if not leading:
    return sums[:1, :1]
  grid = jnp.zeros((*full[:first], cells + 1), u32)
  sums = sums.reshape(*array.shape[:first], cells + 1)
  grid = jax.lax.dynamic_update_slice(grid, sums, (*offsets[:first], u32(0)))
  kept = (*shape[:first], -(-shape[first] // block[first]))
  return grid[tuple(slice(0, end) for end in kept)].reshape(1, -1)


def _sum_by_block(
  sums: jax.Array, offsets: Sequence[jax.Array], full: Shape, shape: Shape, rows: int
) -> jax.Array:
  """Adds up each range of `rows` along the last dim, at its place in the whole array."""
  *outer, size = sums.shape
  count = -(-size // rows) + 1  # a part need not begin where a block does
  zero, first = jnp.uint32(0), offsets[-1] % jnp.uint32(rows)
  aligned = jnp.zeros((*outer, count * rows), jnp.uint32)
  aligned = jax.lax.dynamic_update_slice(aligned, sums, (*[zero] * len(outer), first))
  found = jnp.sum(aligned.reshape(*outer, count, rows), axis=-1, dtype=jnp.uint32)
  grid = jnp.zeros((*full[:-1], -(-full[-1] // rows) + count), jnp.uint32)
  grid = jax.lax.dynamic_update_slice(grid, found, (*offsets[:-1], offsets[-1] // jnp.uint32(rows)))
  kept = (*shape[:-1], -(-shape[-1] // rows))
  return grid[tuple(slice(0, end) for end in kept)].reshape(1, -1)


def _mix(words: jax.Array) -> jax.Array:
  """A bijection of 32-bit words in which each bit depends on all: the finalizer of MurmurHash3 (`fmix32`).

  Source: https://github.com/aappleby/smhasher/blob/master/src/MurmurHash3.cpp
  """
  words = words ^ (words >> jnp.uint32(16))
  words = words * jnp.uint32(_FIRST)
  words = words ^ (words >> jnp.uint32(13))
  words = words * jnp.uint32(_SECOND)
  return words ^ (words >> jnp.uint32(16))
