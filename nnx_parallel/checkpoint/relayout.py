"""Temporary layouts: work shared by replicas, padding cut off."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from nnx_parallel.layout.variables import axes_of, entry_of


def on_cpu(sharding: Sharding) -> bool:
  """Whether its devices are CPUs."""
  return next(iter(sharding.device_set)).platform == "cpu"


def no_mesh() -> contextlib.AbstractContextManager[Any]:
  """Hides the mesh of `jax.set_mesh`: programs here run on the meshes of their arrays."""
  return jax.set_mesh(Mesh(np.empty((), object), ()))


def auto_layout(sharding: Sharding) -> Sharding:
  """The same layout in device memory, on a mesh whose axes are all Auto.

  On Explicit axes each operation below would need its output sharding spelt out.
  """
  if not isinstance(sharding, NamedSharding):
    return sharding
  names, devices = sharding.mesh.axis_names, cast(Mesh, sharding.mesh).devices
  return NamedSharding(Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names)), sharding.spec)


def on_auto_axes(array: jax.Array) -> jax.Array:
  """The same buffers in `auto_layout`; only an array in host memory is copied."""
  sharding = array.sharding
  if not isinstance(sharding, NamedSharding):
    return array
  layout = auto_layout(sharding)
  if sharding.memory_kind not in (None, layout.memory_kind):
    array = jax.device_put(array, NamedSharding(sharding.mesh, sharding.spec))
  shards = [shard.data for shard in array.addressable_shards]
  return jax.make_array_from_single_device_arrays(array.shape, layout, shards)


def spread(layout: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
  """Keeps what divides `shape` of a layout, and gives every other mesh axis to the first dim it divides.

  Args:
    layout: on a mesh with Auto axes.
    shape: global shape in elements.

  Example:
    >>> mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    >>> tuple(spread(NamedSharding(mesh, PartitionSpec("b")), (6, 8)).spec)
    ('a', 'b')
  """
  mesh = layout.mesh
  wanted = [axes_of(entry) for entry in layout.spec]
  wanted += [()] * (len(shape) - len(wanted))
  names: list[tuple[str, ...]] = [()] * len(shape)

  def divides(dim: int, axis: str) -> bool:
    return shape[dim] % math.prod(mesh.shape[name] for name in (*names[dim], axis)) == 0

  for dim, entry in enumerate(wanted):
    for axis in entry:
      if divides(dim, axis):
        names[dim] += (axis,)
  for axis in mesh.axis_names:
    if not any(axis in entry for entry in names):
      dim = next((dim for dim in range(len(shape)) if divides(dim, axis)), None)
      if dim is not None:
        names[dim] += (axis,)
  return NamedSharding(mesh, PartitionSpec(*map(entry_of, names)))


def even_layout(sharding: Sharding, shape: tuple[int, ...], *, keep: bool = False) -> Sharding:
  """A layout that splits an array over all mesh axes that divide it, on Auto axes.

  Args:
    sharding: gives the mesh.
    shape: global shape in elements.
    keep: whether to start from the layout of `sharding`.
  """
  layout = auto_layout(sharding)
  if not isinstance(layout, NamedSharding):
    return layout
  return spread(layout if keep else NamedSharding(layout.mesh, PartitionSpec()), shape)


def without_padding(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Cuts an array to its logical shape, still in shards wherever the shape allows it."""
  array = on_auto_axes(array)
  return _cut(shape, even_layout(array.sharding, shape, keep=True))(array)


@functools.lru_cache(maxsize=256)
def _cut(shape: tuple[int, ...], layout: jax.sharding.Sharding) -> jax.stages.Wrapped:
  window = tuple(slice(0, size) for size in shape)
  return jax.jit(lambda array: array[window], out_shardings=layout)
