"""Floating types with less than 32 bits, and their values in float32."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def is_low(array: Any) -> bool:
  """Whether it is floating with less than 32 bits: its updates and sums are better made in float32."""
  return jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits < 32


def widen(array: Any) -> Any:
  """The array in at least float32."""
  return array.astype(jnp.float32) if is_low(array) else array
