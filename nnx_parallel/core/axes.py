"""Mesh axes in the entries of a spec."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

Entry = str | tuple[str, ...] | None
"""One dim of an annotation: a name, several names (major to minor), or None for a dim that is not split."""


def axes_of(entry: Any) -> tuple[str, ...]:
  """The mesh axes of one dim of a spec, major to minor; none if the compiler chooses them."""
  if entry is None or entry is PartitionSpec.UNCONSTRAINED:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_by_dim(spec: PartitionSpec | Sequence[Any], rank: int) -> tuple[tuple[str, ...], ...]:
  """The mesh axes of each dim of an array; a spec may leave out the last dims."""
  return (*map(axes_of, spec[:rank]), *((),) * (rank - len(spec)))


def axes_in(spec: Iterable[Any]) -> tuple[str, ...]:
  """The mesh axes of a full spec."""
  return tuple(axis for entry in spec for axis in axes_of(entry))


def entry_of(axes: tuple[str, ...]) -> Entry:
  """The inverse of `axes_of`: a single axis is not a tuple, and no axis is None."""
  return axes[0] if len(axes) == 1 else axes or None


def count_shards(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
  """The number of shards over mesh axes."""
  return math.prod(sizes[axis] for axis in axes)


def without(axes: tuple[str, ...], left_out: frozenset[str]) -> tuple[str, ...]:
  """The axes that are not in `left_out`."""
  return tuple(axis for axis in axes if axis not in left_out)
