"""A digest of an array's values that does not depend on how the array is laid out.

Each element's bits are mixed with its position and the results are summed modulo 2**32. A sum has no order,
so each device digests its own shards, and sends only one number. The same values give the same digest on any
mesh, with any process count, and on the host.

A change within one 32-bit word (an element of up to four bytes, or half of an eight-byte element) always
changes the digest. Other damage passes with a probability of about 2**-32, including structured damage such
as the same bit flipped in several elements. The digest guards against rot, not malice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.relayout import on_cpu
from nnx_parallel.layout.leaf import HOST_KINDS

_PIECE = 1 << 20  # elements that are mixed and summed at a time on a CPU
_STEP, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35

Shape = tuple[int, ...]


def digest(array: Array, shape: Shape | None = None) -> Callable[[], int]:
  """Digests an array's global value.

  GPUs and TPUs digest their own shards, and send one number each. Host arrays, and arrays on CPUs, are
  digested before this returns.

  Args:
    array: any dtype with items of one byte or more; not a typed key.
    shape: logical global shape; the rest is padding and does not count.

  Returns:
    A function that waits and returns the digest. For an array that is spread over processes, each process
    gets its own share: the digest is their sum modulo 2**32.
  """
  shape = tuple(array.shape if shape is None else shape)
  if isinstance(array, np.ndarray) or on_cpu(array.sharding):
    number = _on_host(_parts(array), shape)
    return lambda: number
  on_host, near = array.sharding.memory_kind in HOST_KINDS, array.sharding.with_memory_kind("device")
  shards = _own(jax.device_put(array, near) if on_host else array)
  found = [_digest_at(shard.data, _starts(shard.index), np.array(shape, np.uint32)) for shard in shards]
  return lambda: sum(map(int, jax.device_get(found))) % 2**32


def digest_later(array: Array) -> Callable[[], int]:
  """Starts `digest`, so that a training loop need not wait for it.

  The array may be donated or changed as soon as this returns. On GPUs and TPUs the programs are already in
  the device's queue. On CPUs the work would take the caller's cores, so it is done later, on views of the
  shards' memory, as Orbax writes them: jax does not donate a buffer that has a view.

  Returns:
    A function like the result of `digest`. If every process holds the full array, it returns zero on all
    processes except process 0. Call it once, on any thread.
  """
  if jax.process_index() and (isinstance(array, np.ndarray) or array.is_fully_addressable):
    return lambda: 0
  if isinstance(array, np.ndarray) or not on_cpu(array.sharding):
    return digest(array)
  parts, shape = _parts(array), tuple(array.shape)

  def later() -> int:
    number = _on_host(parts, shape)
    parts.clear()
    return number

  return later


def _own(array: jax.Array) -> list[jax.Shard]:
  """The shards of this process, each of them on one process only."""
  return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _starts(index: tuple[slice, ...]) -> np.ndarray:
  return np.array([part.start or 0 for part in index], np.uint32)


def _parts(array: Array) -> list[tuple[np.ndarray, np.ndarray]]:
  """The parts of an array on this host, without copies: the values, and where they start."""
  if isinstance(array, np.ndarray):
    return [(array, np.zeros(array.ndim, np.uint32))]
  return [(np.asarray(shard.data), _starts(shard.index)) for shard in _own(array)]


def _on_host(parts: Iterable[tuple[np.ndarray, np.ndarray]], shape: Shape) -> int:
  """Digests parts a piece at a time: a program on a CPU writes the mixed words to memory before it sums."""
  device, number = host_device(), 0
  for values, starts in parts:
    for index in _pieces(values.shape):
      words = jax.device_put(_host_words(values[index]), device)
      number += int(_digest_at(words, starts + _starts(index), np.array(shape, np.uint32)))
  return number % 2**32


def _pieces(shape: Shape) -> Iterator[tuple[slice, ...]]:
  """Cuts an array into pieces of at most `_PIECE` elements that lie together in memory.

  They are rows of the first dim whose rows fit, at each place of the dims before it.
  """
  if not shape:
    yield ()
    return
  dim = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= _PIECE)
  rows = max(1, _PIECE // max(1, math.prod(shape[dim + 1 :])))
  after = [slice(0, size) for size in shape[dim + 1 :]]
  for before in np.ndindex(shape[:dim]):
    for start in range(0, shape[dim], rows):
      yield (*(slice(place, place + 1) for place in before), slice(start, start + rows), *after)


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


@jax.jit
def _digest_at(array: jax.Array, starts: Array, shape: Array) -> jax.Array:
  """Digests a part of an array of this logical shape; its place is not compiled in."""
  words = _device_words(array).astype(jnp.uint32)
  place, counts = jnp.uint32(0), jnp.uint32(1)
  for dim, size in enumerate(words.shape):
    # After the dims of the array come the words of its wide items.
    start, end = (starts[dim], shape[dim]) if dim < len(shape) else (0, size)
    index = jnp.arange(size, dtype=jnp.uint32) + jnp.uint32(start)
    inside = (index < jnp.uint32(end)).astype(jnp.uint32)
    others = [other for other in range(words.ndim) if other != dim]
    # Each place along a dim has its own value to be mixed with.
    mixed = _mix((index + jnp.uint32(1)) * jnp.uint32(_STEP) + jnp.uint32(dim * _FIRST % 2**32))
    place = place + jnp.expand_dims(mixed, others)
    counts = counts * jnp.expand_dims(inside, others)
  return jnp.sum(_mix(words ^ place) * counts, dtype=jnp.uint32)


def _mix(words: jax.Array) -> jax.Array:
  """A bijection of 32-bit words in which each bit depends on all: the finalizer of MurmurHash3 (`fmix32`).

  Source: https://github.com/aappleby/smhasher/blob/master/src/MurmurHash3.cpp
  """
  words = words ^ (words >> jnp.uint32(16))
  words = words * jnp.uint32(_FIRST)
  words = words ^ (words >> jnp.uint32(13))
  words = words * jnp.uint32(_SECOND)
  return words ^ (words >> jnp.uint32(16))
