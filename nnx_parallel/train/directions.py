"""Directions in which a loss is differentiated: random signs that each program makes for itself."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09)


def signs(seed: jax.Array, number: int, like: Any) -> jax.Array:
  """Random +1 and -1 with the shape and dtype of an array, the same in every program and every layout.

  They are computed from the positions of the elements, so that a compiler can fuse them into their use: there
  is no copy of the array, and nothing that is drawn in one layout and moved to another. `jax.random` would
  hold two words for each element on some devices. `number` distinguishes the arrays of a model. A complex
  array gets signs for both parts.

  Example:
    >>> import jax.numpy as jnp
    >>> signs(jnp.uint32(0), 0, jnp.zeros((2, 6))).astype(int)
    Array([[ 1, -1, -1,  1, -1,  1],
           [-1, -1,  1,  1, -1,  1]], dtype=int32)
  """
  if jnp.issubdtype(like.dtype, jnp.complexfloating):
    part = jax.ShapeDtypeStruct(like.shape, jnp.finfo(like.dtype).dtype)
    return jax.lax.complex(signs(seed, 2 * number, part), signs(~seed, 2 * number + 1, part))
  found = jnp.full(like.shape, _mixed(seed + jnp.uint32(number * _ODD[0] % 2**32)), jnp.uint32)
  for dim in range(len(like.shape)):
    found += jax.lax.broadcasted_iota(jnp.uint32, like.shape, dim) * jnp.uint32(_ODD[dim % len(_ODD)])
  return jnp.where(_mixed(_mixed(found)) >> 31 == 0, 1, -1).astype(like.dtype)


def _mixed(x: jax.Array) -> jax.Array:
  """The finalizer of MurmurHash3: each bit of the result depends on all bits of `x`."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def inner(a: jax.Array, b: jax.Array) -> jax.Array:
  """The real part of the sum of products, in at least float32: how a gradient meets a direction."""
  with jax.numpy_dtype_promotion("standard"):
    dtype = jnp.result_type(a, b, jnp.float32)
  return jnp.real(jnp.sum(a.astype(dtype) * b.astype(dtype)))


def power_of_two(x: float) -> float:
  """The nearest power of two, by which every floating dtype multiplies without rounding."""
  return 2.0 ** round(math.log2(x))
