"""A digest of an array's values that does not depend on how the array is laid out.

Each element's bits are mixed with its position and the results are summed modulo 2**32. A sum does not
care about order, so shards are digested where they are and only one number per array travels; the same
values give the same digest on any mesh, any process count, and on the host. Changing one element always
changes the digest; any other damage passes with probability 2**-32. It guards against rot, not malice.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.placement import on_auto_axes, spread

_STEP, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


def digest(array: Array, shape: tuple[int, ...] | None = None) -> jax.Array:
  """Digests an array's global value.

  Args:
    array: any dtype whose items are whole bytes; not a typed key. Of a `jax.Array` each device reads only
      its own shard. Host arrays are digested on the CPU.
    shape: logical global shape; what lies beyond it is padding and does not count.

  Returns:
    A uint32 scalar on the array's devices, not waited for: `int(...)` waits.

  Example:
    >>> x = np.arange(6, dtype=np.float32)
    >>> int(digest(x)) == int(digest(jnp.asarray(x))) == int(digest(np.pad(x, (0, 2)), shape=(6,)))
    True
    >>> int(digest(x)) == int(digest(x[::-1].copy()))
    False
  """
  shape = tuple(array.shape if shape is None else shape)
  if isinstance(array, np.ndarray):
    host = jax.devices("cpu")[0]
    return _digest(jax.device_put(_host_words(array), host), shape, None)
  array = on_auto_axes(array)
  sharding = array.sharding
  if not isinstance(sharding, NamedSharding):
    return _digest(array, shape, None)
  return _digest(array, shape, spread(sharding, array.shape))


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


@functools.partial(jax.jit, static_argnums=(1, 2))
def _digest(array: jax.Array, shape: tuple[int, ...], layout: NamedSharding | None) -> jax.Array:
  if layout is not None:
    array = jax.lax.with_sharding_constraint(array, layout)
  words = _device_words(array).astype(jnp.uint32)
  position, inside = jnp.zeros((), jnp.uint32), jnp.ones((), jnp.uint32)
  for dim, size in enumerate(words.shape):
    others = [d for d in range(words.ndim) if d != dim]
    index = jnp.arange(size, dtype=jnp.uint32)
    mixed = _mix((index + jnp.uint32(1)) * jnp.uint32(_STEP) + jnp.uint32(dim * _FIRST % 2**32))
    position = position + jnp.expand_dims(mixed, others)
    if dim < len(shape) and shape[dim] < size:
      inside = inside * jnp.expand_dims((index < jnp.uint32(shape[dim])).astype(jnp.uint32), others)
  return jnp.sum(_mix(words ^ position) * inside, dtype=jnp.uint32)


def _mix(words: jax.Array) -> jax.Array:
  """A bijection of 32-bit words in which each bit depends on many."""
  words = words * jnp.uint32(_FIRST)
  words = words ^ (words >> jnp.uint32(15))
  words = words * jnp.uint32(_SECOND)
  return words ^ (words >> jnp.uint32(13))
