"""Changes single operations of a step's program.

- The kernel gradient of a grouped convolution is summed by hand (`layout/known_faults.py`).
- A Fourier transform on a CPU gets arrays in row-major order: XLA picks others for some, and then fails.
- An element of each row, such as the logit of a target, is read by a comparison (`layers/picks.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, PartitionSpec

from nnx_parallel.core.axes import count_shards
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.interpret import DEFAULT, NO_FACTS, Interpreter, is_walked
from nnx_parallel.core.jaxprs import (
  as_function,
  bind,
  by_trace,
  equations,
  inner_equations,
  is_call_or_checkpoint,
)
from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.shards import laid_out, on_shards
from nnx_parallel.core.types import ClosedJaxpr, JaxprEqn, PyTree, Value
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.picks import is_pick, pick


@check_arguments(TrainError)
def with_correct_convolutions(run: Callable[..., PyTree], mesh: AnyMesh | None) -> Callable[..., PyTree]:
  """Returns `run` with correct kernel gradients of grouped convolutions on every mesh.

  Use it in a step that you write yourself. `train_step` already does this.

  Args:
    run: a function of pytrees of arrays that is traced under `jax.jit`. It is traced only once.
    mesh: the mesh of the arrays, real or abstract; None on one device.

  Returns:
    A function with the same arguments and results. On one device, it is `run` itself.

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
    >>> print(jax.jit(nxp.verify.with_correct_convolutions(jax.grad(loss), mesh))(kernel, x)[:, 0, 0])
    [40. 48. 40.]
  """
  return mend(run, mesh, picks=False)


def mend(run: Callable[..., PyTree], mesh: AnyMesh | None, *, picks: bool) -> Callable[..., PyTree]:
  """A program with its wrong operations corrected; with `picks`, elements of rows are read by comparisons."""
  if mesh is None or mesh.size == 1:
    return run
  compares = picks and AxisType.Explicit not in mesh.axis_types

  def is_changed(eqn: JaxprEqn) -> bool:
    return _is_faulty(eqn) or (compares and (_is_fourier(eqn) or is_pick(eqn)))

  def rule(eqn: JaxprEqn, inputs: list[Value], _: list[None]) -> object:
    return DEFAULT if _is_opened(eqn) else (_mend_one(eqn, inputs, mesh, compares), [None] * len(eqn.outvars))

  def evaluate(traced: ClosedJaxpr, args: tuple[PyTree, ...]) -> Sequence[jax.Array]:
    leaves = jax.tree.leaves(args)
    if any(is_changed(eqn) for eqn in equations(traced.jaxpr)):
      return Interpreter(rule, NO_FACTS)(traced, leaves, [None] * len(leaves))[0]
    return as_function(traced)(*leaves)

  return by_trace(run, evaluate)


def _is_opened(eqn: JaxprEqn) -> bool:
  """Whether the programs of an operation are mended; a custom rule has no gradient left to mend."""
  name = eqn.primitive.name
  return is_walked(eqn) and (name in ("scan", "while", "cond") or is_call_or_checkpoint(eqn))


def _mend_one(eqn: JaxprEqn, inputs: list[Value], mesh: AnyMesh, compares: bool) -> Sequence[Value]:
  """The results of an operation whose programs, if it has any, stay as they are."""
  if _is_faulty(eqn):
    return [_by_hand(eqn, mesh, *inputs)]
  if any(map(_is_faulty, inner_equations(eqn))):
    if eqn.primitive.name == "shard_map":
      _check_manual(eqn, mesh)
    elif not is_walked(eqn):
      raise TrainError(
        f"a grouped convolution is in a {eqn.primitive.name} that takes something else than arrays.",
        details="XLA would compute a wrong kernel gradient, and the program cannot be traced anew",
        fix="take the convolution out of it, or give it arrays as arguments.",
      )
  if compares and _is_fourier(eqn):
    return [*map(_row_major, bind(eqn, [*map(_row_major, inputs)]))]
  return pick(eqn, *inputs) if compares and is_pick(eqn) else bind(eqn, inputs)


def _is_fourier(eqn: JaxprEqn) -> bool:
  return eqn.primitive.name == "fft" and jax.default_backend() == "cpu"


def _row_major(x: Value) -> jax.Array:
  return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _is_faulty(eqn: JaxprEqn) -> bool:
  """A kernel gradient of a grouped convolution."""
  # It is a convolution with `batch_group_count` > 1. Where mesh axes larger than 1 do not split the batch,
  # XLA sums it over all devices: on a 2x4 mesh with the batch on the 2, it comes out 4 times too large; with
  # the batch on the 4, twice. The forward pass and the gradient of the input are right, and Adam hides the
  # factor. With two groups and channels split over 4 devices, the partitioner aborts the process.
  return eqn.primitive.name == "conv_general_dilated" and eqn.params["batch_group_count"] > 1


def _by_hand(eqn: JaxprEqn, mesh: AnyMesh, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
  """The same convolution with its contracted dim (the examples of a gradient) split by hand."""
  numbers = eqn.params["dimension_numbers"]
  lhs_dim, rhs_dim = numbers.lhs_spec[1], numbers.rhs_spec[1]
  axes = _dividing_axes(lhs.shape[lhs_dim], mesh)

  def local(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    partial = eqn.primitive.bind(lhs, rhs, **eqn.params)
    return jax.lax.psum(partial, axes) if axes else partial

  specs = [PartitionSpec(*[None] * dim, axes or None) for dim in (lhs_dim, rhs_dim)]
  found = on_shards(local, mesh, specs, PartitionSpec())(lhs, rhs)
  return laid_out(found, mesh, eqn.outvars[0].aval.sharding.spec)


def _dividing_axes(length: int, mesh: AnyMesh) -> tuple[str, ...]:
  """Mesh axes, in order, whose product divides `length`."""
  found: tuple[str, ...] = ()
  for axis, size in mesh.shape.items():
    if size > 1 and length % count_shards((*found, axis), mesh.shape) == 0:
      found = (*found, axis)
  return found


def _check_manual(eqn: JaxprEqn, mesh: AnyMesh) -> None:
  """A `shard_map` over all axes is never partitioned; a `shard_map` over some axes is, and incorrectly."""
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
