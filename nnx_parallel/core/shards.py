"""Functions of the shards of each device, and parts of a batch, on Auto and on Explicit meshes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from nnx_parallel.core.axes import axes_by_dim, axes_of, entry_of, without
from nnx_parallel.core.jaxprs import is_tracer
from nnx_parallel.core.mesh import AnyMesh, auto_mesh, mesh_inside
from nnx_parallel.core.text import format_array, with_article
from nnx_parallel.core.types import AnyArray, PyTree


def on_shards(
  f: Callable[..., Any],
  mesh: AnyMesh | None,
  in_specs: Sequence[PartitionSpec],
  out_specs: PyTree,
  axes: Collection[str] | None = None,
) -> Callable[..., Any]:
  """`jax.shard_map` over some axes, by default all that are not manual yet; `f` itself without a mesh."""
  # `f` places its own collectives and has its own backward pass: JAX checks neither.
  if mesh is None:
    return f
  manual = {*mesh.axis_names} - {*mesh.manual_axes} if axes is None else {*axes}
  # None named is all of them: a `vmap` over an Explicit axis takes it out of the mesh.
  names: Any = set() if axes is None and not mesh.manual_axes else manual
  mapped = jax.shard_map(
    f,
    mesh=mesh if jax.sharding.get_abstract_mesh().empty else None,
    in_specs=tuple(in_specs),
    out_specs=out_specs,
    axis_names=names,
    check_vma=False,
  )

  def placed(tree: PyTree, spec: PartitionSpec) -> PyTree:
    return jax.tree.map(lambda x: laid_out(x, mesh, spec, manual), tree)

  def run(*args: PyTree) -> PyTree:
    given = [*map(placed, args, in_specs)]
    # jax 0.10.2 cannot run a shard_map over some axes outside of jit on arrays that others split.
    traced = any(map(is_tracer, jax.tree.leaves(given)))
    return (mapped if traced or not names else jax.jit(mapped))(*given)

  return run


def laid_out(
  x: jax.Array, mesh: AnyMesh | None, spec: PartitionSpec, axes: Collection[str] | None = None
) -> jax.Array:
  """`x` with the Explicit axes of this spec in its type, of these axes or all; others stay as they are."""
  if mesh is None or AxisType.Explicit not in mesh.axis_types:
    return x
  if axes is not None:
    before = axes_by_dim(getattr(jax.typeof(x).sharding, "spec", ()), x.ndim)
    dims = zip(axes_by_dim(spec, x.ndim), before, strict=True)
    spec = PartitionSpec(*(entry_of((*asked, *without(own, frozenset(axes)))) for asked, own in dims))
  spec, active = explicit_part(spec, mesh), not jax.sharding.get_abstract_mesh().empty
  return jax.sharding.reshard(x, spec if active else NamedSharding(mesh, spec))  # pyright: ignore[reportArgumentType]


def pin(x: jax.Array, where: Sharding | None) -> jax.Array:
  """`x` in the sharding `where`, unless that is None: in its type on Explicit axes."""
  if where is None:
    return x
  if isinstance(where, NamedSharding) and AxisType.Explicit in where.mesh.axis_types:
    if mesh_inside(where.mesh) == where.mesh:
      return jax.sharding.reshard(x, NamedSharding(where.mesh, explicit_part(where.spec, where.mesh)))
    where = auto_sharding(where)
  return jax.lax.with_sharding_constraint(x, where)


def auto_sharding(where: NamedSharding) -> NamedSharding:
  """The same layout on Auto axes."""
  return NamedSharding(auto_mesh(where.mesh), where.spec, memory_kind=where.memory_kind)


def compute_on_auto_axes(
  run: Callable[..., PyTree], mesh: AnyMesh, specs: Callable[[PyTree], PyTree] = lambda _: PartitionSpec()
) -> Callable[..., Any]:
  """`run` with Auto axes in place of `mesh`'s Explicit axes; its arguments and results keep their types."""
  # To be traced under `jax.jit`. `specs` gives the `PartitionSpec`s of its results, as a prefix of their
  # tree.
  auto = auto_mesh(mesh)

  @functools.wraps(run)
  def changed(*args: PyTree) -> PyTree:
    with jax.sharding.use_abstract_mesh(auto.abstract_mesh):
      results = run(*jax.tree.map(_drop_type, args))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      typed = jax.tree.map(lambda spec: explicit_part(spec, mesh), specs(results))
      return jax.sharding.reshard(results, typed)

  return changed


def explicit_part(spec: PartitionSpec, mesh: AnyMesh) -> PartitionSpec:
  """The Explicit axes of a spec, which a type can express."""
  auto = frozenset(mesh.axis_names).difference(mesh.explicit_axes)
  return PartitionSpec(*(entry_of(without(axes_of(entry), auto)) for entry in spec))


def _drop_type(x: AnyArray) -> Any:
  typed = AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
  return jax.sharding.reshard(x, PartitionSpec()) if typed else x


def split_batch(x: AnyArray, count: int) -> jax.Array:
  """`[examples, ...]` as `[count, examples / count, ...]`: part `n` is every `count`-th from `n`."""
  # Each part stays spread over all devices that split the examples. A scalar is given to each part.
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


def describe(x: AnyArray) -> str:
  """The type and layout of an array as text: `float32[8,16] P('data', None) on (data=4)`."""
  if not hasattr(x, "shape") or not hasattr(x, "dtype"):
    return with_article(type(x).__name__)
  text = format_array(x.dtype, x.shape) + (" weak" if getattr(x, "weak_type", False) else "")
  sharding = getattr(x, "sharding", None)
  if isinstance(sharding, NamedSharding):
    sizes = ",".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items())
    memory = f" in {sharding.memory_kind}" if sharding.memory_kind not in (None, "device") else ""
    return f"{text} {sharding.spec} on ({sizes}){memory}"
  if sharding is None:
    return f"{text} {type(x).__name__}"
  return f"{text} on one device" + ("" if getattr(x, "committed", True) else " (uncommitted)")
