"""Other layouts for leaves whose gradients are wrong, the smallest change first."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.core.axes import axes_by_dim, axes_of, entry_of
from nnx_parallel.core.text import format_bytes, format_spec
from nnx_parallel.core.types import AnyArray
from nnx_parallel.layout.resolve import shard_counts


@dataclasses.dataclass(frozen=True)
class Relayout:
  """Another layout for a group of equal leaves.

  Attributes:
    name: the group.
    positions: the positions of its leaves among the trained arrays.
    sharding: the other layout.
    extra_bytes: the additional bytes on each device.
  """

  name: str
  positions: tuple[int, ...]
  sharding: NamedSharding
  extra_bytes: int

  def __str__(self) -> str:
    spec, extra = self.sharding.spec, self.extra_bytes
    cost = f"{format_bytes(extra)} more per device" if extra > 0 else "no more memory"
    return f"{self.name} as {spec} ({format_spec(spec)}, {cost})"


def relayouts(
  name: str, positions: Sequence[int], array: AnyArray, where: NamedSharding
) -> Iterator[Relayout]:
  """Layouts that split an array evenly: with an axis less, with two dims exchanged, replicated.

  `array` gives the shape and dtype of each leaf of the group, and `where` its present layout.
  """
  mesh: Any = where.mesh
  sizes: Mapping[str, int] = dict(mesh.shape)
  entries = axes_by_dim(where.spec, array.ndim)
  options = [[()] * array.ndim]
  for dim, axes in enumerate(entries):
    options += [[*entries[:dim], tuple(a for a in axes if a != axis), *entries[dim + 1 :]] for axis in axes]
  for a, b in itertools.combinations(range(array.ndim), 2):
    swapped = [*entries]
    swapped[a], swapped[b] = entries[b], entries[a]
    options.append(swapped)

  def held(spec: PartitionSpec) -> int:
    return array.size * array.dtype.itemsize // math.prod(shard_counts(spec, array.ndim, sizes))

  seen = {tuple(entries)}
  for option in options:
    spec = PartitionSpec(*map(entry_of, option))
    counts = shard_counts(spec, array.ndim, sizes)
    if tuple(option) in seen or any(n % count for n, count in zip(array.shape, counts, strict=True)):
      continue
    seen.add(tuple(option))
    extra = (held(spec) - held(where.spec)) * len(positions)
    yield Relayout(name, tuple(positions), NamedSharding(mesh, spec, memory_kind=where.memory_kind), extra)


def cheapest(found: Sequence[Relayout]) -> list[Relayout]:
  """In order of extra bytes, in steps of 1 MiB; among equals, layouts that split less come first."""
  return sorted(found, key=lambda r: (r.extra_bytes >> 20, sum(map(len, map(axes_of, r.sharding.spec)))))
