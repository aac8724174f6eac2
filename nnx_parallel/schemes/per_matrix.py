"""Optimizers of whole matrices (Muon, Shampoo, SOAP) on any layout of the parameters.

Such an optimizer multiplies or factors each gradient as a whole, but a layout may shard the gradient.
`per_matrix` exchanges the shards, so that each device holds some whole matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

from nnx_parallel.core.axes import count_shards
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.extra_args import accept_extra
from nnx_parallel.core.mesh import AnyMesh, auto_mesh, axis_sizes, mesh_inside
from nnx_parallel.core.nodes import plain_path
from nnx_parallel.core.shards import compute_on_auto_axes, on_shards, pin
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import SchemeError
from nnx_parallel.layout.optimizer_layout import PerMatrixState, group_name, matrix_axes
from nnx_parallel.layout.sharded_optimizer import IN_USE, Placement


@check_arguments(SchemeError, "dims")
def per_matrix(
  tx: optax.GradientTransformation, dims: Callable[[PyTree], PyTree] | None = None
) -> optax.GradientTransformationExtraArgs:
  """Gives whole matrices to an optimizer such as Muon or Shampoo, and distributes them over all devices.

  Muon, Shampoo and SOAP multiply or factor the gradient of each matrix as a whole. If a layout shards the
  matrices, the compiler gathers them, and all devices compute the same products. With this wrapper, matrices
  of equal size and dtype form a group, and each device computes an equal number of whole matrices of the
  group. One all-to-all per group brings equal parts of the rows of all gradients to these devices, and a
  second all-to-all returns the updates; a matrix that is not sharded by rows is laid out by rows first. The
  state of a matrix stays on the device that computes it: the plan shards the state over all mesh axes, with
  padding. If a group has fewer matrices than the mesh has devices, the plan says how many devices have no
  matrix.

  `tx` gets one matrix at a time. A norm in `tx` is therefore the norm of one matrix; put
  `optax.clip_by_global_norm` around the wrapper. Counts, schedules and random keys in `tx` exist once for
  each matrix. If `tx` reads the parameters (weight decay), the parameters are exchanged too;
  `optax.add_decayed_weights` after the wrapper avoids this. Without a plan, or on one device, nothing is
  exchanged.

  Args:
    tx: the transformation. It also gets the parameters that are not matrices, in their own layout. To use
      another transformation for these parameters or for embeddings, put `optax.partition` around the wrapper.
    dims: a function from the parameters to a tree with an `optax.contrib.MuonDimensionNumbers` for each array
      of matrices, and None for every other array, as in `optax.contrib.muon`. Dims that are neither rows nor
      columns count matrices. By default, arrays with two dims are matrices.

  Returns:
    A transformation for `plan(optimizer=...)`.

  Raises:
    SchemeError: there is no matrix, `dims` does not fit an array, or `update` is called inside a `shard_map`.

  Example:
    >>> import optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.List([nnx.Linear(64, 128, rngs=nnx.Rngs(0)) for _ in range(8)])
    >>> muon = nxp.parallel.per_matrix(optax.contrib.muon(1e-3))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=muon)
    >>> momentum = next(leaf for leaf in plan.leaves if leaf.shape == (8, 64, 128))
    >>> momentum.spec, momentum.decision.reason
    (P('fsdp', None, None), '8 whole matrices on 8 devices')

  Sources: "Muon is Scalable for LLM Training", arXiv:2502.16982; Distributed Shampoo, arXiv:2309.06497.
  """
  if dims is not None and not callable(dims):
    raise SchemeError(f"dims={dims!r} is not a function of the parameters.", fix=_DIMS)
  inner = accept_extra(tx)

  def init(params: PyTree) -> PerMatrixState:
    groups, leaves = _groups(params, dims, None), jax.tree.leaves(params)
    if not groups:
      raise SchemeError(
        "per_matrix got no matrix.",
        details=f"shapes {[jnp.shape(x) for x in leaves][:5]}",
        fix="use the transformation without per_matrix, or pass dims= for matrices in arrays of more dims.",
      )
    states = {name: jax.vmap(inner.init)(group.stack(group.of(leaves))) for name, group in groups.items()}
    rest = _rest(params, groups)
    return PerMatrixState(states, inner.init(rest) if jax.tree.leaves(rest) else optax.EmptyState())

  def update(
    grads: PyTree, state: PerMatrixState, params: PyTree = None, **extra: Any
  ) -> tuple[PyTree, PerMatrixState]:
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
      raise SchemeError(
        "per_matrix was called in a shard_map, where each device has its own part of a matrix.",
        fix="call optimizer.update outside of the shard_map, under jax.jit.",
      )
    placement = IN_USE.get()
    mesh = None if placement is None else next(where.mesh for where in placement.model.values())
    extra = {name: x for name, x in extra.items() if isinstance(x, jax.Array | float) and not jnp.ndim(x)}
    # A parameter may have another dtype than its gradient; `init` knew the parameters only.
    groups = _groups(grads if params is None else params, dims, placement)
    updates, weights = jax.tree.leaves(grads), None if params is None else jax.tree.leaves(params)
    states: dict[str, PyTree] = {}
    for name, group in groups.items():
      mine = None if weights is None else group.of(weights)
      new, states[name] = _update(inner, group, mesh, group.of(updates), state.groups[name], mine, extra)
      for array, value in zip(group.arrays, new, strict=True):
        updates[array.number] = value
    other = state.rest
    rest = _rest(grads, groups)
    if jax.tree.leaves(rest):
      plain, other = inner.update(
        rest, state.rest, None if params is None else _rest(params, groups), **extra
      )
      kept = jax.tree.leaves(plain, is_leaf=_is_masked)
      updates = [new if _is_masked(x) else x for x, new in zip(kept, updates, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(grads), updates), PerMatrixState(states, other)

  return optax.GradientTransformationExtraArgs(init, cast(Any, update))


_DIMS = "dims=lambda parameters: jax.tree.map(lambda x: MuonDimensionNumbers(-2, -1), parameters)"


Change: TypeAlias = Callable[[jax.Array], jax.Array]


class _Array(NamedTuple):
  """An array of matrices."""

  number: int  # among the parameters
  shape: tuple[int, ...]  # global
  order: tuple[int, ...]  # its dims: those that count matrices, then those of rows, then those of columns
  where: Any  # its planned sharding, or None

  def stack(self, x: jax.Array, matrix: tuple[int, int]) -> jax.Array:
    """`[matrices, rows, columns]`."""
    return x.transpose(self.order).reshape(-1, *matrix)

  def unstack(self, matrices: jax.Array) -> jax.Array:
    """The inverse of `stack`."""
    return matrices.reshape([self.shape[dim] for dim in self.order]).transpose(np.argsort(self.order))


class _Group(NamedTuple):
  """The arrays with matrices of one size and dtype, in the order of the parameters."""

  matrix: tuple[int, int]
  arrays: list[_Array]

  def of(self, leaves: Sequence[Any]) -> list[Any]:
    """The arrays of the group among the leaves of a tree of parameters."""
    return [leaves[array.number] for array in self.arrays]

  @property
  def counts(self) -> list[int]:
    """The number of matrices of each array."""
    return [math.prod(array.shape) // math.prod(self.matrix) for array in self.arrays]

  def stack(self, values: Sequence[jax.Array], each: Change = lambda x: x) -> jax.Array:
    """All matrices, `[matrices, rows, columns]`; `each` is applied to those of each array."""
    pairs = zip(self.arrays, values, strict=True)
    return jnp.concatenate([each(array.stack(x, self.matrix)) for array, x in pairs])

  def unstack(self, matrices: jax.Array, each: Change = lambda x: x) -> list[jax.Array]:
    """The inverse of `stack`."""
    parts = jnp.split(matrices, np.cumsum(self.counts)[:-1])
    return [array.unstack(each(part)) for array, part in zip(self.arrays, parts, strict=True)]


def _update(
  inner: optax.GradientTransformationExtraArgs,
  group: _Group,
  mesh: AnyMesh | None,
  grads: list[jax.Array],
  state: PyTree,
  params: list[jax.Array] | None,
  extra: dict[str, Any],
) -> tuple[list[jax.Array], PyTree]:
  """The updates of the arrays of a group, and its new state."""

  def run(grads: jax.Array, state: PyTree, params: PyTree, extra: PyTree) -> PyTree:
    return jax.vmap(lambda g, s, p: inner.update(g, s, p, **extra))(grads, state, params)

  axes = matrix_axes(axis_sizes(mesh))
  if mesh is None or not axes:
    new, state = run(group.stack(grads), state, None if params is None else group.stack(params), extra)
    return group.unstack(new), state
  devices, count = count_shards(axes, axis_sizes(mesh)), sum(group.counts)
  # Gradients are first reduced into their own layout: else the compiler may sum all of them on every device.
  grads = [pin(x, array.where) for array, x in zip(group.arrays, grads, strict=True)]
  one, whole, by_row = PartitionSpec(), PartitionSpec(axes), PartitionSpec(None, axes)

  def lay_out(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(auto_mesh(mesh), spec))

  def pad(x: jax.Array, dim: int) -> jax.Array:
    """With zeros, so that the devices divide a dim."""
    return jnp.pad(x, [(0, -size % devices if d == dim else 0) for d, size in enumerate(x.shape)])

  # Each device has equal parts of the rows of all matrices, and then whole matrices: an all-to-all. The rows
  # of each array are laid out separately, or the compiler moves all arrays to the layout of one of them.
  def gather(values: list[jax.Array]) -> jax.Array:
    rows = group.stack(values, lambda x: lay_out(pad(x, 1), by_row))
    return lay_out(lay_out(pad(rows, 0), by_row), whole)[:, : group.matrix[0]]

  def scatter(matrices: jax.Array) -> list[jax.Array]:
    rows = lay_out(lay_out(pad(matrices, 1), whole), by_row)[:count]
    return group.unstack(rows, lambda x: lay_out(x, by_row)[:, : group.matrix[0]])

  def on_auto_axes(grads: PyTree, state: PyTree, params: PyTree, extra: PyTree) -> PyTree:
    state = jax.tree.map(lambda x: lay_out(pad(x, 0), whole), state)
    each = on_shards(run, mesh_inside(auto_mesh(mesh)), (whole, whole, whole, one), (whole, whole))
    new, state = each(gather(grads), state, None if params is None else gather(params), extra)
    return scatter(new), jax.tree.map(lambda x: x[:count], state)

  if AxisType.Explicit not in mesh_inside(mesh).axis_types:
    return on_auto_axes(grads, state, params, extra)
  specs = [array.where.spec for array in group.arrays], one if count % devices else whole
  return compute_on_auto_axes(on_auto_axes, mesh, lambda _: specs)(grads, state, params, extra)


def _groups(
  tree: PyTree, dims: Callable[[PyTree], PyTree] | None, placement: Placement | None
) -> dict[str, _Group]:
  """The equal matrices in a tree of parameters, by size and dtype."""
  if dims is None:
    dims = functools.partial(jax.tree.map, lambda x: MuonDimensionNumbers() if jnp.ndim(x) == 2 else None)
  # `dims` may give one value, also None, for a part of the tree: each leaf of the part gets it, in a list.
  boxed = jax.tree.map(
    lambda own, part: jax.tree.map(lambda _: [own], part),
    dims(tree),
    tree,
    is_leaf=lambda x: isinstance(x, None | MuonDimensionNumbers | optax.MaskedNode),
  )
  asked = jax.tree.leaves(boxed, is_leaf=lambda x: isinstance(x, list))
  shardings = {} if placement is None else placement.model
  groups: dict[str, _Group] = {}
  for number, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
    (own,) = asked[number]
    if own is not None:
      shape = tuple(x.shape)
      rows, columns = _rows_and_columns(shape, own)
      order = (*(dim for dim in range(len(shape)) if dim not in (*rows, *columns)), *rows, *columns)
      matrix = math.prod(shape[dim] for dim in rows), math.prod(shape[dim] for dim in columns)
      group = groups.setdefault(group_name(*matrix, x.dtype), _Group(matrix, []))
      group.arrays.append(_Array(number, shape, order, shardings.get(plain_path(path))))
  return groups


def _rows_and_columns(shape: tuple[int, ...], numbers: MuonDimensionNumbers) -> tuple[list[int], list[int]]:
  """The dims of an array of matrices that are rows, and those that are columns."""
  if not isinstance(numbers, MuonDimensionNumbers):  # pyright: ignore[reportUnnecessaryIsInstance]
    raise SchemeError(f"dims gave {numbers!r} for an array of shape {shape}.", fix=_DIMS)
  rows, columns = ([dim % len(shape) for dim in np.atleast_1d(dims).tolist()] for dims in numbers)
  if len({*rows, *columns}) != len(rows) + len(columns) or not rows or not columns:
    raise SchemeError(
      f"an array of shape {shape} cannot be read as matrices whose rows are dims {rows}, columns {columns}.",
      fix="name each dim at most once, for example MuonDimensionNumbers(-2, -1).",
    )
  return rows, columns


def _rest(tree: PyTree, groups: Mapping[str, _Group]) -> PyTree:
  """The parameters that are not matrices; the matrices are masked, as by `optax.masked`."""
  leaves, structure = jax.tree.flatten(tree)
  for array in (array for group in groups.values() for array in group.arrays):
    leaves[array.number] = optax.MaskedNode()
  return jax.tree.unflatten(structure, leaves)


def _is_masked(node: object) -> bool:
  return isinstance(node, optax.MaskedNode)
