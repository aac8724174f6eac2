"""Temporary layouts: evenly sharded, on Auto axes, without padding; and layouts as text."""

from __future__ import annotations

import functools

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from nnx_parallel.core.axes import axes_of, count_shards, entry_of
from nnx_parallel.core.mesh import auto_mesh, axis_sizes
from nnx_parallel.layout.leaf import HOST_KINDS
from nnx_parallel.layout.resolve import add_axes


def auto_layout(sharding: Sharding) -> Sharding:
  """The same layout in device memory, on a mesh whose axes are all Auto."""
  # On Explicit axes each operation would need its output sharding.
  if not isinstance(sharding, NamedSharding):
    return sharding
  return NamedSharding(auto_mesh(sharding.mesh), sharding.spec)


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


def even_layout(sharding: Sharding, shape: tuple[int, ...], *, keep: bool = False) -> Sharding:
  """A layout that splits an array over all mesh axes that divide it, along dim 0 if it can, on Auto axes."""
  # With `keep`, the parts of `sharding`'s layout that divide the global shape stay.
  layout = auto_layout(sharding)
  if not isinstance(layout, NamedSharding):
    return layout
  mesh = layout.mesh
  names: list[tuple[str, ...]] = [()] * len(shape)
  for dim, entry in enumerate(layout.spec if keep else ()):
    for axis in axes_of(entry):
      if shape[dim] % count_shards((*names[dim], axis), mesh.shape) == 0:
        names[dim] += (axis,)
  spec = PartitionSpec(*map(entry_of, names))
  return NamedSharding(mesh, add_axes(spec, shape, mesh.axis_names, mesh.shape, rows=0).spec)


def without_padding(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Cuts an array to its logical shape, still in shards wherever the shape allows it."""
  array = on_auto_axes(array)
  return _cut(shape, even_layout(array.sharding, shape, keep=True))(array)


@functools.lru_cache(maxsize=256)
def _cut(shape: tuple[int, ...], layout: jax.sharding.Sharding) -> jax.stages.Wrapped:
  window = tuple(slice(0, size) for size in shape)
  return jax.jit(lambda array: array[window], out_shardings=layout)


def is_on_host(sharding: Sharding) -> bool:
  """Whether a layout is in host memory, on devices with their own memory."""
  kind = sharding.memory_kind
  return kind in HOST_KINDS and kind != next(iter(sharding.device_set)).default_memory().kind


def layout_text(sharding: Sharding | None) -> str:
  """A layout as text. Axes of size 1 are left out, so equal texts are equal layouts."""
  if sharding is None:
    return ""
  where = f" in {sharding.memory_kind}" if is_on_host(sharding) else ""
  if sharding.num_devices == 1:
    return f"one device{where}"
  if not isinstance(sharding, NamedSharding):
    return f"{type(sharding).__name__} on {sharding.num_devices} devices{where}"
  sizes = {name: size for name, size in axis_sizes(sharding.mesh).items() if size > 1}
  split = [tuple(axis for axis in axes_of(entry) if axis in sizes) for entry in sharding.spec]
  while split and not split[-1]:
    split.pop()
  names = (repr(entry_of(axes)) for axes in split)
  return f"P({', '.join(names)}) on {sizes}{where}"
