"""Functions of the shards of each device, and parts of a batch, on Auto and on Explicit meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnx_parallel.core.mesh import AnyMesh


def on_shards(
  f: Callable[..., Any], mesh: AnyMesh | None, in_specs: Sequence[PartitionSpec], out_specs: Any
) -> Callable[..., Any]:
  """`jax.shard_map` over all axes that are not manual yet; `f` itself without a mesh.

  `f` places its own collectives and has its own backward pass: JAX checks neither.

  Args:
    f: a function of arrays.
    mesh: the mesh; the active one, if there is one.
    in_specs: one for each argument.
    out_specs: those of the results.
  """
  if mesh is None:
    return f
  kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
  axes: Any = {name for name, kind in kinds if kind != AxisType.Manual}
  mapped = jax.shard_map(
    f,
    mesh=mesh if jax.sharding.get_abstract_mesh().empty else None,
    in_specs=tuple(in_specs),
    out_specs=out_specs,
    axis_names=axes,
    check_vma=False,
  )
  return lambda *args: mapped(*(laid_out(x, mesh, spec) for x, spec in zip(args, in_specs, strict=True)))


def laid_out(x: Any, mesh: AnyMesh | None, spec: PartitionSpec) -> Any:
  """`x` with this spec in its type, on an Explicit mesh; elsewhere `x` itself."""
  if mesh is None or AxisType.Explicit not in mesh.axis_types:
    return x
  active = not jax.sharding.get_abstract_mesh().empty
  return jax.sharding.reshard(x, spec if active else NamedSharding(mesh, spec))  # pyright: ignore[reportArgumentType]


def split_batch(x: Any, count: int) -> jax.Array:
  """An array `[examples, ...]` as `[count, examples / count, ...]`: part `n` is each `count`-th one from `n`.

  Each part stays spread over all devices that split the examples. A scalar is given to each part.
  """
  # reshape(count, n) would move the sharding of the batch dim onto the microbatch dim.
  x = jnp.asarray(x)
  if not x.ndim:
    return jnp.broadcast_to(x, (count,))
  parts = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
  own: Any = jax.typeof(x).sharding
  if AxisType.Explicit in own.mesh.axis_types:
    # The types of a user's arrays must not depend on the microbatches: reshape drops axes of size 1.
    return jax.sharding.reshard(parts, NamedSharding(own.mesh, PartitionSpec(None, *own.spec)))
  return parts


def join_batch(x: jax.Array) -> jax.Array:
  """The array whose parts `split_batch` made."""
  return x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])
