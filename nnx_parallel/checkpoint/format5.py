"""The digests of arrays in format 5: each element's bits, mixed with its place, are summed modulo 2**32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_STEP, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
_PIECE = 1 << 20  # words that are mixed at a time


def digest(array: np.ndarray[Any, Any]) -> int:
  """The digest of an array as it is stored."""
  size = array.dtype.itemsize
  words = np.ascontiguousarray(array).view(np.dtype(f"u{min(size, 4)}"))
  words = words.reshape(array.shape + ((size // 4,) if size > 4 else ())) if array.ndim else words.reshape(-1)
  shape = words.shape if array.ndim or size > 4 else ()
  steps = [_mix(np.arange(1, n + 1) * _STEP + dim * _FIRST) for dim, n in enumerate(shape)]
  flat, total = words.reshape(-1), 0
  for start in range(0, flat.size, _PIECE):
    piece = flat[start : start + _PIECE].astype(np.uint64)
    index = np.arange(start, start + piece.size)
    place = np.zeros(piece.size, np.uint64)
    for dim, step in enumerate(steps):
      place += step[index // math.prod(shape[dim + 1 :]) % shape[dim]]
    total += int(_mix(piece ^ (place & 0xFFFFFFFF)).sum())
  return total % 2**32


def _mix(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:  # the finalizer of MurmurHash3
  words = words.astype(np.uint64) & 0xFFFFFFFF
  words = (words ^ (words >> 16)) * _FIRST & 0xFFFFFFFF
  words = (words ^ (words >> 13)) * _SECOND & 0xFFFFFFFF
  return words ^ (words >> 16)
