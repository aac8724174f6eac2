"""A picture of one array on a mesh: which devices hold which block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh

from nnx_parallel.layout.figures import cells
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.mesh import axis_sizes
from nnx_parallel.layout.render import format_array, format_bytes, format_spec
from nnx_parallel.layout.variables import axes_of

if TYPE_CHECKING:
  from matplotlib.figure import Figure

LIMIT = 16
"""Blocks drawn along one side; the note below counts the others."""


def holders(leaf: LeafPlan) -> np.ndarray[Any, Any]:
  """The ids of the devices that hold each block: shape `(*leaf.shards, leaf.copies)`."""
  sizes, mesh = axis_sizes(leaf.mesh), leaf.mesh
  ids = mesh.device_ids if isinstance(mesh, Mesh) else np.arange(mesh.size).reshape(tuple(sizes.values()))
  split = [axis for entry in leaf.spec for axis in axes_of(entry)]
  order = [*split, *(axis for axis in sizes if axis not in split)]
  return ids.transpose([list(sizes).index(axis) for axis in order]).reshape(*leaf.shards, leaf.copies)


def elements(leaf: LeafPlan, dim: int, shard: int) -> str:
  """The elements of one dim that a shard holds, without padding: `0:4`; `:` where the dim is whole."""
  if leaf.shards[dim] == 1:
    return ":"
  size, end = leaf.local_shape[dim], leaf.shape[dim]
  return f"{min(shard * size, end)}:{min((shard + 1) * size, end)}"


def draw_blocks(leaf: LeafPlan) -> Figure:
  """Draws an array's blocks; see `ShardingPlan.picture`."""
  split = [dim for dim, count in enumerate(leaf.shards) if count > 1]
  down, right = (split[:1], split[1:]) if len(split) > 1 else ([], split)
  grid = holders(leaf).reshape(math.prod(leaf.shards[dim] for dim in down), -1, leaf.copies)
  shown = grid[:LIMIT, :LIMIT]

  def side(dims: list[int], count: int) -> tuple[str, list[str]]:
    """What stands along one side: the dims, and the elements of each block."""
    shards = list(np.ndindex(*(leaf.shards[dim] for dim in dims)))[:count]
    title = ", ".join(f"dim {dim} over {'+'.join(axes_of(leaf.spec[dim]))}" for dim in dims)
    return title, [", ".join(map(elements, [leaf] * len(dims), dims, shard)) for shard in shards]

  rows, columns = side(down, shown.shape[0]), side(right, shown.shape[1])
  padded = [dim for dim in split if leaf.padding[dim]]
  dashed = {
    (row, column)
    for row, column in np.ndindex(*shown.shape[:2])
    for dim, shard in zip(
      split, np.unravel_index(row * grid.shape[1] + column, [leaf.shards[d] for d in split]), strict=True
    )
    if dim in padded and (shard + 1) * leaf.local_shape[dim] > leaf.shape[dim]
  }
  mesh = " x ".join(f"{axis}={size}" for axis, size in axis_sizes(leaf.mesh).items())
  array = format_array(leaf.dtype, leaf.storage_shape)
  note = "In each block: the devices that hold it." + (" Dashed: with padding." if dashed else "")
  hidden = grid.shape[0] * grid.shape[1] - shown.shape[0] * shown.shape[1]
  return cells(
    [[_some(devices) for devices in line] for line in shown.tolist()],
    rows=rows,
    columns=columns,
    title=f"{leaf.name}  {array}  {format_spec(leaf.spec)}\n"
    f"mesh {mesh}; {format_bytes(leaf.bytes_per_device)} per device",
    note=note + (f" {hidden} more blocks are not drawn." if hidden else ""),
    dashed=dashed,
  )


def _some(devices: list[int]) -> str:
  if len(devices) > 4:
    return f"{devices[0]}, {devices[1]} ... {devices[-1]} ({len(devices)})"
  return ", ".join(map(str, devices))
