"""A picture of one array on a mesh, as text: which devices hold which block."""

from __future__ import annotations

import itertools
import math

import numpy as np
from jax.sharding import Mesh

from nnx_parallel.core.axes import axes_in, axes_of
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.text import format_array, format_bytes, format_spec, text_table
from nnx_parallel.layout.leaf import LeafPlan

LIMIT = 16
"""Blocks drawn along one side; the last line counts the others."""


def holders(leaf: LeafPlan) -> np.ndarray:
  """The ids of the devices that hold each block: shape `(*leaf.shards, leaf.copies)`."""
  sizes, mesh = axis_sizes(leaf.mesh), leaf.mesh
  ids = mesh.device_ids if isinstance(mesh, Mesh) else np.arange(mesh.size).reshape(tuple(sizes.values()))
  split = axes_in(leaf.spec)
  order = [*split, *(axis for axis in sizes if axis not in split)]
  return ids.transpose([list(sizes).index(axis) for axis in order]).reshape(*leaf.shards, leaf.copies)


def elements(leaf: LeafPlan, dim: int, shard: int) -> str:
  """The elements of a dim in a shard, without padding: `0:4`; `:` for a dim that is not split."""
  if leaf.shards[dim] == 1:
    return ":"
  size, end = leaf.local_shape[dim], leaf.shape[dim]
  return f"{min(shard * size, end)}:{min((shard + 1) * size, end)}"


def draw_blocks(leaf: LeafPlan) -> str:
  """Draws an array's blocks: the last split dim runs to the right, other split dims run downwards."""
  wide = [dim for dim, count in enumerate(leaf.shards) if count > 1]
  down, right = wide[:-1], wide[-1:]
  ids = holders(leaf).reshape(math.prod(leaf.shards[dim] for dim in down), -1, leaf.copies)

  def side(dims: list[int]) -> list[str]:
    places = itertools.islice(np.ndindex(*(leaf.shards[dim] for dim in dims)), LIMIT)
    return [", ".join(elements(leaf, *pair) for pair in zip(dims, place, strict=True)) for place in places]

  def name(dims: list[int]) -> str:
    return ", ".join(f"dim {dim} over {'+'.join(axes_of(leaf.spec[dim]))}" for dim in dims)

  rows = [
    (label, *map(_some, line[:LIMIT])) for label, line in zip(side(down), ids[:LIMIT].tolist(), strict=True)
  ]
  hidden = math.prod(leaf.shards) - sum(len(row) - 1 for row in rows)
  mesh = " x ".join(f"{axis}={size}" for axis, size in axis_sizes(leaf.mesh).items())
  array = f"{leaf.name}  {format_array(leaf.dtype, leaf.storage_shape)}  {format_spec(leaf.spec)}"
  lines = [
    f"{array}, {format_bytes(leaf.bytes_per_device)} per device on mesh {mesh}",
    f"in each block: its devices{f'; to the right: {name(right)}' if right else ''}",
    text_table((name(down), *side(right)), rows),
  ]
  return "\n".join([*lines, *([f"{hidden} more blocks are not drawn"] if hidden else [])])


def _some(devices: list[int]) -> str:
  if len(devices) > 4:
    return f"{devices[0]}, {devices[1]} ... {devices[-1]} ({len(devices)})"
  return ", ".join(map(str, devices))
