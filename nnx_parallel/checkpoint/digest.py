"""A digest of an array's values that does not depend on how the array is laid out.

Each element's bits are mixed with its position and the results are summed modulo 2**32. A sum does not
care about order, so shards are digested where they are, without communication, and only one number per
device travels. The same values give the same digest on any mesh, any process count, and on the host.
Changing one element always changes the digest; any other damage passes with probability 2**-32. It guards
against rot, not malice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.placement import on_auto_axes

_STEP, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


def digest(array: Array, shape: tuple[int, ...] | None = None) -> jax.Array:
  """Digests an array's global value.

  Args:
    array: any dtype whose items are whole bytes; not a typed key. Of a `jax.Array` each device reads only
      its own shard. Host arrays are digested on the CPU.
    shape: logical global shape; what lies beyond it is padding and does not count.

  Returns:
    uint32 numbers on the array's devices, not waited for: `total` waits and adds them up.

  Example:
    >>> x = np.arange(6, dtype=np.float32)
    >>> total(digest(x)) == total(digest(jnp.asarray(x))) == total(digest(np.pad(x, (0, 2)), shape=(6,)))
    True
    >>> total(digest(x)) == total(digest(x[::-1].copy()))
    False
  """
  shape = tuple(array.shape if shape is None else shape)
  if isinstance(array, np.ndarray):
    host = jax.devices("cpu")[0]
    return _digest_whole(jax.device_put(_host_words(array), host), shape)
  array = on_auto_axes(array)
  sharding = array.sharding
  if not isinstance(sharding, NamedSharding):
    return _digest_whole(array, shape)
  parts = _digest_shards(sharding, len(array.shape), shape)(array)
  return parts if parts.is_fully_addressable else _sum_everywhere(sharding.mesh)(parts)


def total(parts: jax.Array) -> int:
  """Waits for what `digest` returned, and adds it up."""
  return int(np.asarray(parts).sum(dtype=np.uint64) % 2**32)


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


@functools.partial(jax.jit, static_argnums=1)
def _digest_whole(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return _digest_block(array, [jnp.uint32(0)] * len(shape), shape)


@functools.lru_cache(maxsize=1024)
def _digest_shards(layout: NamedSharding, ndim: int, shape: tuple[int, ...]) -> jax.stages.Wrapped:
  """A program without communication: one number from each device, on a mesh with Auto axes."""
  mesh: Any = layout.mesh
  axes = mesh.axis_names
  names = [entry if isinstance(entry, tuple) else (entry,) * (entry is not None) for entry in layout.spec]
  names += [()] * (ndim - len(names))
  free = [axis for axis in axes if not any(axis in entry for entry in names)]

  def local(block: jax.Array) -> jax.Array:
    offsets = [_index(entry, mesh) * jnp.uint32(size) for entry, size in zip(names, block.shape, strict=True)]
    counts = jnp.uint32(1)
    for axis in free:  # replicas share the work where a dim divides; elsewhere one of them does it
      size, mine = mesh.shape[axis], jax.lax.axis_index(axis).astype(jnp.uint32)
      dim = next((dim for dim in range(ndim) if block.shape[dim] % size == 0), None)
      if dim is None:
        counts = counts * (mine == jnp.uint32(0)).astype(jnp.uint32)
        continue
      rows = block.shape[dim] // size
      block = jax.lax.dynamic_slice_in_dim(block, mine.astype(jnp.int32) * rows, rows, dim)
      offsets[dim] = offsets[dim] + mine * jnp.uint32(rows)
    return (_digest_block(block, offsets, shape) * counts).reshape(1)

  spec = PartitionSpec(*layout.spec)
  return jax.jit(
    jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(axes), check_vma=False)
  )


@functools.lru_cache(maxsize=16)
def _sum_everywhere(mesh: Any) -> jax.stages.Wrapped:
  """Processes that see only their own shards need the sum; it is dispatched in the caller's order."""

  def add(parts: jax.Array) -> jax.Array:
    return jnp.sum(parts, dtype=jnp.uint32)

  return jax.jit(add, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _index(entry: tuple[str, ...], mesh: Any) -> jax.Array:
  """Which shard of a dim this device has, as a number from 0."""
  index = jnp.uint32(0)
  for axis in entry:
    index = index * jnp.uint32(mesh.shape[axis]) + jax.lax.axis_index(axis).astype(jnp.uint32)
  return index


def _digest_block(array: jax.Array, offsets: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
  """Digests a block that starts at `offsets` of an array whose logical shape is `shape`."""
  words = _device_words(array).astype(jnp.uint32)
  position, inside = jnp.uint32(0), jnp.uint32(1)
  for dim, size in enumerate(words.shape):
    others = [d for d in range(words.ndim) if d != dim]
    start = offsets[dim] if dim < len(offsets) else jnp.uint32(0)
    index = jnp.arange(size, dtype=jnp.uint32) + start
    mixed = _mix((index + jnp.uint32(1)) * jnp.uint32(_STEP) + jnp.uint32(dim * _FIRST % 2**32))
    position = position + jnp.expand_dims(mixed, others)
    if dim < len(shape):
      inside = inside * jnp.expand_dims((index < jnp.uint32(shape[dim])).astype(jnp.uint32), others)
  return jnp.sum(_mix(words ^ position) * inside, dtype=jnp.uint32)


def _mix(words: jax.Array) -> jax.Array:
  """A bijection of 32-bit words in which each bit depends on many."""
  words = words * jnp.uint32(_FIRST)
  words = words ^ (words >> jnp.uint32(15))
  words = words * jnp.uint32(_SECOND)
  return words ^ (words >> jnp.uint32(13))
