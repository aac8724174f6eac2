"""A picture of one array on a mesh: which devices hold which block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jax.sharding import Mesh

from nnx_parallel.core.axes import axes_in, axes_of
from nnx_parallel.core.figures import draw_grid
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.text import format_array, format_bytes, format_spec
from nnx_parallel.layout.leaf import LeafPlan

if TYPE_CHECKING:
  from matplotlib.figure import Figure


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


def draw_blocks(leaf: LeafPlan) -> Figure:
  """Draws an array's blocks; see `Plan.picture`."""

  def padded(block: tuple[int, ...]) -> bool:
    ends = zip(block, leaf.local_shape, leaf.shape, strict=True)
    return any((shard + 1) * size > end for shard, size, end in ends)

  array = f"{leaf.name}  {format_array(leaf.dtype, leaf.storage_shape)}  {format_spec(leaf.spec)}"
  mesh = " x ".join(f"{axis}={size}" for axis, size in axis_sizes(leaf.mesh).items())
  return draw_grid(
    holders(leaf),
    [f"dim {dim} over {'+'.join(axes_of(entry))}" for dim, entry in enumerate(leaf.spec)],
    lambda dim, shard: elements(leaf, dim, shard),
    title=f"{array}\nmesh {mesh}; {format_bytes(leaf.bytes_per_device)} per device",
    note="In each block: the devices that hold it." + " Dashed: with padding." * any(leaf.padding),
    dashed=padded,
  )
