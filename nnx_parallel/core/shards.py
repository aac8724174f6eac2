"""Functions of the shards of each device, on Auto and on Explicit meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
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
