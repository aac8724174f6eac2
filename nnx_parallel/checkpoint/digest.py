"""A digest of an array's values that does not depend on how the array is laid out.

Each element's bits are mixed with its position and the results are summed modulo 2**32. A sum has no order,
so each device digests its own shards, and sends only one number. The same values give the same digest on any
mesh, with any process count, and on the host.

A change within one 32-bit word (an element of up to four bytes, or half of an eight-byte element) always
changes the digest. Other damage passes with a probability of about 2**-32, including structured damage such
as the same bit flipped in several elements. The digest guards against rot, not malice.
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
from nnx_parallel.core.types import DType

_TILE = 1 << 15  # words that are mixed and summed at a time on a CPU
_STEP, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35

Shape = tuple[int, ...]


def digest(array: Array, shape: Shape | None = None) -> jax.Array:
  """Digests an array's global value.

  Args:
    array: any dtype with items of one byte or more; not a typed key. Each device reads only its own shard of
      a `jax.Array`. Host arrays are digested on the CPU.
    shape: logical global shape; the rest is padding and does not count.

  Returns:
    uint32 numbers on the array's devices, without waiting: `total` waits and adds them up. For an array that
    is spread over processes, each process gets its own share.

  Example:
    >>> x = np.arange(6, dtype=np.float32)
    >>> total(digest(x)) == total(digest(jnp.asarray(x))) == total(digest(np.pad(x, (0, 2)), shape=(6,)))
    True
    >>> total(digest(x)) == total(digest(x[::-1]))
    False
  """
  shape = tuple(array.shape if shape is None else shape)
  if isinstance(array, np.ndarray):
    words = jax.device_put(_host_words(array), host_device())
    parts = _digest_whole(words, shape, by_tiles=True)
    return jax.block_until_ready(parts)  # jax on CPU may read the memory itself, and the caller may change it
  array = on_auto_axes(array)
  sharding = array.sharding
  if not isinstance(sharding, NamedSharding):
    return _digest_whole(array, shape, by_tiles=on_cpu(sharding))
  return _digest_shards(sharding, shape)(array)


def digest_later(array: Array) -> Callable[[], int]:
  """Starts `digest`, so that a training loop need not wait for it.

  The array may be donated or changed as soon as this returns. On GPUs and TPUs the programs are already in
  the device's queue. On CPUs the work would take the caller's cores, so it is done later, on views of the
  shards' memory, as Orbax writes them: jax does not donate a buffer that has a view.

  Returns:
    A function that waits and returns the result of `total`: for an array that is spread over processes, this
    process's share; for any other array, zero on all processes but process 0. Call it once, on any thread.

  Example:
    >>> x = jnp.arange(6.0)
    >>> later = digest_later(x)
    >>> x.delete()
    >>> later() == total(digest(np.arange(6, dtype=np.float32)))
    True
  """
  everywhere = isinstance(array, np.ndarray) or array.is_fully_addressable
  if everywhere and jax.process_index():
    return lambda: 0
  if isinstance(array, np.ndarray) or not on_cpu(array.sharding):
    # Not later: all processes must run this program at the same place in their order of programs.
    parts = digest(array)
    return lambda: total(parts)
  shape, wide = tuple(array.shape), array.dtype.itemsize > 4
  shards = [
    (np.asarray(one.data), one.device, [part.indices(n)[0] for part, n in zip(one.index, shape, strict=True)])
    for one in array.addressable_shards
    if one.replica_id == 0
  ]

  def later() -> int:
    # Views, not copies. Without x64, which is a setting of each thread, jax would turn 64 bits into 32.
    with jax.enable_x64(wide):
      parts = [
        _digest_at(jax.device_put(view, device), np.array(starts, np.uint32), shape)
        for view, device, starts in shards
      ]
    shards.clear()
    return sum(int(np.asarray(part)[0]) for part in parts) % 2**32

  return later


def total(parts: jax.Array) -> int:
  """Waits for the result of `digest`, and adds up this process's share."""
  rows = [parts]
  if not (parts.is_fully_addressable or parts.is_fully_replicated):
    rows = [shard.data for shard in parts.addressable_shards]
  return int(sum(np.asarray(row).sum(dtype=np.uint64) for row in rows) % 2**32)


def host_device() -> Any:
  """The device of this process on which host arrays are digested: a CPU, if jax has one."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:  # JAX_PLATFORMS names other platforms only
    return jax.local_devices()[0]


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


@functools.partial(jax.jit, static_argnames=("shape", "by_tiles"))
def _digest_whole(array: jax.Array, shape: Shape, *, by_tiles: bool) -> jax.Array:
  return _digest_part(array, [jnp.uint32(0)] * len(shape), shape, by_tiles=by_tiles)


@functools.partial(jax.jit, static_argnames="shape")
def _digest_at(part: jax.Array, starts: Array, shape: Shape) -> jax.Array:
  """Digests a shard on a CPU, whose place is not compiled in."""
  return _digest_part(part, [starts[dim] for dim in range(len(shape))], shape, by_tiles=True)


@functools.lru_cache(maxsize=1024)
def _digest_shards(layout: NamedSharding, shape: Shape) -> jax.stages.Wrapped:
  """A program without communication: one number from each device, on a mesh with Auto axes."""
  mesh: Any = layout.mesh
  axes, ndim = mesh.axis_names, len(shape)
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
    return _digest_part(part, offsets, shape, by_tiles=on_cpu(layout)) * counts

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
  array: jax.Array, offsets: Sequence[jax.Array], shape: Shape, *, by_tiles: bool
) -> jax.Array:
  """Digests the part that starts at `offsets` of an array whose logical shape is `shape`.

  Returns:
    uint32 of shape (1,).
  """
  words_in = array.shape[len(shape) :]  # of a host array, whose wide items are cut into words already
  offsets = [*offsets, *[jnp.uint32(0)] * len(words_in)]
  shape = shape + words_in
  if by_tiles and array.size * _words_per_item(array.dtype) >= 2 * _TILE:
    return _digest_by_tiles(array, offsets, shape)
  words = _device_words(array).astype(jnp.uint32)
  place, counts = jnp.uint32(0), jnp.uint32(1)
  for dim, size in enumerate(words.shape):
    index = jnp.arange(size, dtype=jnp.uint32) + (offsets[dim] if dim < len(offsets) else jnp.uint32(0))
    inside = (index < jnp.uint32(shape[dim] if dim < len(shape) else size)).astype(jnp.uint32)
    others = [other for other in range(words.ndim) if other != dim]
    place = place + jnp.expand_dims(_place(index, dim), others)
    counts = counts * jnp.expand_dims(inside, others)
  return jnp.sum(_mix(words ^ place) * counts, dtype=jnp.uint32).reshape(1)


def _place(index: jax.Array, dim: int) -> jax.Array:
  """The value that each place along a dim is mixed with."""
  return _mix((index + jnp.uint32(1)) * jnp.uint32(_STEP) + jnp.uint32(dim * _FIRST % 2**32))


def _words_per_item(dtype: DType) -> int:
  return max(1, dtype.itemsize // 4)


def _digest_by_tiles(array: jax.Array, offsets: Sequence[jax.Array], shape: Shape) -> jax.Array:
  """As `_digest_part`, a tile at a time, so that no mixed copy of the array is ever in memory.

  XLA fuses the mixing with the sum on GPUs and TPUs, but on CPUs it writes the mixed words to memory first.
  The array is read as a table of rows and columns: the last dims that fit into a tile are the columns.
  """
  ndim, u32 = array.ndim, jnp.uint32
  count = _words_per_item(array.dtype)
  small = (dim for dim in range(1, ndim) if math.prod(array.shape[dim:]) * count <= _TILE)
  split = next(small, ndim - 1)
  rows, columns = math.prod(array.shape[:split]), math.prod(array.shape[split:])
  table = array.reshape(rows, columns)
  width = min(columns, max(1, _TILE // count))
  height = min(rows, max(1, _TILE // (width * count)))
  down, across = -(-rows // height), -(-columns // width)

  def look(flat: jax.Array, dims: range) -> tuple[jax.Array, jax.Array]:
    """The values to mix into the elements with these numbers along these dims, and which elements count."""
    place, counts = jnp.zeros_like(flat), jnp.ones_like(flat)
    for dim in reversed(dims):
      size = u32(array.shape[dim])
      index = (flat % size if dim > dims[0] else flat) + offsets[dim]
      flat = flat // size
      place = place + _place(index, dim)
      counts = counts * (index < u32(shape[dim])).astype(u32)
    return place, counts

  def numbers(start: jax.Array, size: int) -> jax.Array:
    return jnp.arange(size, dtype=u32) + start

  every_column = look(numbers(u32(0), width), range(split, ndim)) if across == 1 else None
  words_place = _place(numbers(u32(0), count), ndim) if count > 1 else jnp.zeros(1, u32)

  def add_tile(i: jax.Array, found: jax.Array) -> jax.Array:
    i = i.astype(u32)
    top, left = (i // u32(across)) * u32(height), (i % u32(across)) * u32(width)
    row, column = jnp.minimum(top, u32(rows - height)), jnp.minimum(left, u32(columns - width))
    # The bits are taken here: outside the loop that would be a copy of the array.
    tile = jax.lax.dynamic_slice(table, (row, column), (height, width))
    words = _device_words(tile).astype(u32).reshape(height, width, count)
    row_numbers, column_numbers = numbers(row, height), numbers(column, width)
    row_place, row_counts = look(row_numbers, range(split))
    column_place, column_counts = every_column or look(column_numbers, range(split, ndim))
    row_counts = row_counts * (row_numbers >= top).astype(u32)  # the last tiles overlap the tiles before
    column_counts = column_counts * (column_numbers >= left).astype(u32)
    place = row_place[:, None, None] + column_place[None, :, None] + words_place[None, None]
    mixed = _mix(words ^ place) * column_counts[None, :, None]
    return found + jnp.sum(jnp.sum(mixed, axis=(1, 2), dtype=u32) * row_counts, dtype=u32)

  return jax.lax.fori_loop(0, down * across, add_tile, u32(0)).reshape(1)


def _mix(words: jax.Array) -> jax.Array:
  """A bijection of 32-bit words in which each bit depends on all: the finalizer of MurmurHash3 (`fmix32`).

  Source: https://github.com/aappleby/smhasher/blob/master/src/MurmurHash3.cpp
  """
  words = words ^ (words >> jnp.uint32(16))
  words = words * jnp.uint32(_FIRST)
  words = words ^ (words >> jnp.uint32(13))
  words = words * jnp.uint32(_SECOND)
  return words ^ (words >> jnp.uint32(16))
