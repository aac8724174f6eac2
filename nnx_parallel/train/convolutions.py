"""Grouped convolutions whose gradients XLA gets wrong, computed on each device's own examples instead.

The kernel gradient of a grouped or depthwise convolution is a convolution with `batch_group_count` > 1. Where
mesh axes larger than 1 do not split the batch, XLA's partitioner sums it over all devices: on a 2x4 mesh with
the batch on the 2, it comes out 4 times too large; with the batch on the 4, twice. The forward pass and the
gradient of the input are right, and Adam hides the factor. With two groups and channels split over 4 devices,
the partitioner aborts the process. Measured on CPU with jax 0.10.2 and 0.12.0.1;
`tests/train/test_convolutions.py` says when it is mended.

So a step is traced first, and each such convolution in its jaxpr is replaced by a `shard_map`: examples are
split over as many mesh axes as divide them, each device runs the same convolution on its own, and the results
are summed over those axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnx_parallel.errors import TrainError
from nnx_parallel.train.accumulate import equations, inner_equations


def with_right_gradients(run: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
  """`run` with every grouped kernel gradient computed by hand-placed convolutions.

  `train_step` does this by itself; it is for steps of your own.

  Args:
    run: a function of pytrees of arrays, to be traced under `jax.jit`. It is traced once.
    mesh: the mesh of its arrays, concrete or abstract; None on one device.

  Returns:
    A function of the same arguments and results; `run` itself on one device.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> def loss(kernel, x):
    ...   y = jax.lax.conv_general_dilated(
    ...     x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=4
    ...   )
    ...   return y.sum()
    >>> mesh = nxp.make_mesh(data=2, model=4)
    >>> x = jax.device_put(jnp.ones((8, 6, 4)), jax.NamedSharding(mesh, jax.P("data")))
    >>> kernel = jax.device_put(jnp.ones((3, 1, 4)), jax.NamedSharding(mesh, jax.P()))
    >>> print(jax.jit(nxp.with_right_gradients(jax.grad(loss), mesh))(kernel, x)[:, 0, 0])
    [40. 48. 40.]
  """
  if mesh is None or mesh.size == 1:
    return run

  @functools.wraps(run)  # jax names the program's arguments after those of `run`, and reports show them
  def mended(*args: Any) -> Any:
    closed, shape = jax.make_jaxpr(run, return_shape=True)(*args)
    closed = _mend(closed, mesh)
    return jax.tree.unflatten(jax.tree.structure(shape), jaxpr_as_fun(closed)(*jax.tree.leaves(args)))

  return mended


def _mend(closed: Any, mesh: Any) -> Any:
  if not any(map(_is_faulty, equations(closed.jaxpr))):
    return closed
  return closed.replace(jaxpr=_mend_open(closed.jaxpr, mesh))


def _mend_open(jaxpr: Any, mesh: Any) -> Any:
  return jaxpr.replace(eqns=[_mend_equation(eqn, mesh) for eqn in jaxpr.eqns])


def _mend_equation(eqn: Any, mesh: Any) -> Any:
  if _is_faulty(eqn):
    return _by_hand(eqn, mesh)
  if not any(map(_is_faulty, inner_equations(eqn))):
    return eqn
  if eqn.primitive.name == "shard_map":
    _check_manual(eqn, mesh)
    return eqn
  return eqn.replace(params={name: _mend_param(value, mesh) for name, value in eqn.params.items()})


def _mend_param(value: Any, mesh: Any) -> Any:
  if type(value) is tuple:
    return tuple(_mend_param(item, mesh) for item in value)
  if hasattr(value, "jaxpr"):
    return _mend(value, mesh)
  return _mend_open(value, mesh) if hasattr(value, "eqns") else value


def _is_faulty(eqn: Any) -> bool:
  return eqn.primitive.name == "conv_general_dilated" and eqn.params["batch_group_count"] > 1


def _by_hand(eqn: Any, mesh: Any) -> Any:
  """The same convolution as one equation, its contracted dim (the examples of a gradient) split by hand."""
  numbers = eqn.params["dimension_numbers"]
  left, right = (var.aval for var in eqn.invars)
  lhs_dim, rhs_dim = numbers.lhs_spec[1], numbers.rhs_spec[1]
  axes = _dividing_axes(left.shape[lhs_dim], mesh)

  def local(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    partial = eqn.primitive.bind(lhs, rhs, **eqn.params)
    return jax.lax.psum(partial, axes) if axes else partial

  def split(rank: int, dim: int) -> PartitionSpec:
    return PartitionSpec(*[axes if axes and i == dim else None for i in range(rank)])

  specs = split(left.ndim, lhs_dim), split(right.ndim, rhs_dim)
  placed = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
  if AxisType.Explicit in mesh.axis_types:
    placed = _resharded(placed, specs, eqn.outvars[0].aval.sharding.spec, mesh)
  (made,) = jax.make_jaxpr(jax.jit(placed))(left, right).eqns
  return made.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _resharded(placed: Callable[..., Any], specs: Any, out: PartitionSpec, mesh: Any) -> Callable[..., Any]:
  """Explicit meshes have shardings in types: `placed` with those of the convolution that it replaces."""

  def run(*operands: jax.Array) -> jax.Array:
    moved = [jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
    return jax.reshard(placed(*moved), NamedSharding(mesh, out))

  return run


def _dividing_axes(length: int, mesh: Any) -> tuple[str, ...]:
  """Mesh axes, in order, whose product divides `length`."""
  found: tuple[str, ...] = ()
  for axis, size in mesh.shape.items():
    if size > 1 and length % (size * math.prod(mesh.shape[other] for other in found)) == 0:
      found = (*found, axis)
  return found


def _check_manual(eqn: Any, mesh: Any) -> None:
  """A `shard_map` over all axes is never partitioned; one over some of them is, and wrongly."""
  manual = set(eqn.params["newly_manual_axes"])
  others = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in manual}
  if others:
    names = ", ".join(others)
    raise TrainError(
      "XLA would multiply the kernel gradient of a grouped convolution by up to"
      f" {math.prod(others.values())}.",
      details=f"the convolution is in a shard_map over {sorted(manual)}, which leaves {names} to XLA",
      fix="jax.shard_map without axis_names, over all axes of the mesh; or leave the convolution out of it.",
    )
