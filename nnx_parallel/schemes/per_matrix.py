"""Optimizers of whole matrices (Muon, Shampoo, SOAP) on any layout of the parameters.

Such an optimizer multiplies or factors each gradient as a whole, but a layout may shard the gradient.
`per_matrix` exchanges the shards, so that each device holds some whole matrices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec
from optax.contrib import MuonDimensionNumbers

from nnx_parallel.core.axes import axes_by_dim, axes_in, entry_of
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.extra_args import accept_extra
from nnx_parallel.core.mesh import AnyMesh, axis_sizes, mesh_inside
from nnx_parallel.core.nodes import plain_path
from nnx_parallel.core.shards import on_shards, pinned
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import SchemeError
from nnx_parallel.layout.optimizer_layout import PerMatrixState, group_name, matrix_axes
from nnx_parallel.layout.sharded_optimizer import Placement, placement_in_use


@check_arguments(SchemeError)
def per_matrix(
  tx: optax.GradientTransformation, dims: Callable[[PyTree], PyTree] | None = None
) -> optax.GradientTransformationExtraArgs:
  """Gives whole matrices to an optimizer such as Muon or Shampoo, and distributes them over all devices.

  Muon, Shampoo and SOAP multiply or factor the gradient of each matrix as a whole. If a layout shards the
  matrices, the compiler gathers them, and all devices compute the same products. With this wrapper, matrices
  of equal size and dtype form a group, and each device computes an equal number of whole matrices of the
  group. One all-to-all per group brings the parts of the gradients to these devices, and a second all-to-all
  returns the updates. The state of a matrix stays on the device that computes it: the plan shards the state
  over all mesh axes, with padding. If a group has fewer matrices than the mesh has devices, the plan says how
  many devices have no matrix.

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
    states = {name: jax.vmap(inner.init)(group.gather(group.of(leaves))) for name, group in groups.items()}
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
    placement = placement_in_use()
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


class _Cut(NamedTuple):
  """How a matrix is cut into one piece for each device.

  Attributes:
    shape: the sizes of the dims that are its rows, then of those that are its columns.
    rows: the number of dims that are its rows.
    axes: for each dim, the mesh axes that split it, major to minor. All axes of the exchange occur once.
  """

  shape: tuple[int, ...]
  rows: int
  axes: tuple[tuple[str, ...], ...]

  @property
  def matrix(self) -> tuple[int, int]:
    """Rows and columns."""
    return math.prod(self.shape[: self.rows]), math.prod(self.shape[self.rows :])


class _Array(NamedTuple):
  """An array of matrices.

  Attributes:
    number: its number among the parameters.
    shape: its global shape.
    order: its dims: first those that count matrices, then the dims of `cut`.
    cut: how each of its matrices is cut.
    where: the planned sharding of the array, or None.
  """

  number: int
  shape: tuple[int, ...]
  order: tuple[int, ...]
  cut: _Cut
  where: Any

  @property
  def counted(self) -> list[int]:
    """The sizes of the dims that count matrices."""
    return [self.shape[dim] for dim in self.order[: -len(self.cut.shape)]]

  @property
  def spec(self) -> PartitionSpec:
    """With it, the part of a device is its piece of each matrix."""
    entries = dict(zip(self.order[-len(self.cut.shape) :], self.cut.axes, strict=True))
    return PartitionSpec(*(entry_of(entries.get(dim, ())) for dim in range(len(self.shape))))


@dataclasses.dataclass(frozen=True)
class _Group:
  """Arrays with matrices of one size and dtype, and the exchange of their pieces for whole matrices.

  `gather` and `scatter` run on each device of a `shard_map`. Without mesh axes, they only stack and cut.

  Attributes:
    arrays: the arrays, in the order of the parameters.
    sizes: mesh axis -> size, of the axes of the exchange, in mesh order.
  """

  arrays: list[_Array]
  sizes: Mapping[str, int]

  def of(self, leaves: Sequence[Any]) -> list[Any]:
    """The arrays of the group among the leaves of a tree of parameters."""
    return [leaves[array.number] for array in self.arrays]

  @functools.cached_property
  def cuts(self) -> list[_Cut]:
    """The different cuts of its matrices."""
    return [*dict.fromkeys(array.cut for array in self.arrays)]

  @functools.cached_property
  def count(self) -> int:
    """The number of matrices."""
    return sum(math.prod(array.counted) for array in self.arrays)

  @functools.cached_property
  def table(self) -> np.ndarray[Any, Any]:
    """The number of the cut of each matrix, by device and place on the device; 0 for padding."""
    numbers = [self.cuts.index(array.cut) for array in self.arrays]
    found = np.repeat(numbers, [math.prod(array.counted) for array in self.arrays])
    devices = math.prod(self.sizes.values())
    return np.pad(found, (0, -self.count % devices)).reshape(devices, -1)

  @functools.cached_property
  def largest(self) -> int:
    """The elements of the largest piece, to which all pieces are padded."""
    return max(math.prod(self.piece(cut)) for cut in self.cuts)

  def ways(self, cut: _Cut) -> list[int]:
    """Into how many parts each dim of a matrix is cut."""
    return [math.prod(self.sizes[axis] for axis in axes) for axes in cut.axes]

  def piece(self, cut: _Cut) -> list[int]:
    """The shape of a piece."""
    return [-(-size // ways) for size, ways in zip(cut.shape, self.ways(cut), strict=True)]

  def padded(self, array: _Array, x: jax.Array) -> jax.Array:
    """The array with zeros, so that the mesh axes divide its dims."""
    cut = array.cut
    extra = [-size % ways for size, ways in zip(cut.shape, self.ways(cut), strict=True)]
    widths = dict(zip(array.order[-len(extra) :], extra, strict=True))
    return jnp.pad(x, [(0, widths.get(dim, 0)) for dim in range(x.ndim)])

  def gather(self, values: Sequence[jax.Array]) -> jax.Array:
    """The pieces of all matrices on a device -> `[whole matrices of the device, rows, columns]`."""
    flat: list[jax.Array] = []
    for array, x in zip(self.arrays, values, strict=True):
      pieces = x.transpose(array.order).reshape(math.prod(array.counted), -1)
      flat.append(jnp.pad(pieces, ((0, 0), (0, self.largest - pieces.shape[1]))))
    stack = jnp.pad(jnp.concatenate(flat), ((0, self.table.size - self.count), (0, 0)))
    stack = self._exchanged(stack.reshape(*self.table.shape, self.largest))
    return self._selected([self._joined(stack, cut) for cut in self.cuts], dim=0)

  def scatter(self, whole: jax.Array) -> list[jax.Array]:
    """The inverse of `gather`."""
    stack = self._exchanged(self._selected([self._split(whole, cut) for cut in self.cuts], dim=1))
    flat, start, found = stack.reshape(self.table.size, self.largest), 0, list[jax.Array]()
    for array in self.arrays:
      piece, stop = self.piece(array.cut), start + math.prod(array.counted)
      x = flat[start:stop, : math.prod(piece)].reshape(*array.counted, *piece)
      found.append(x.transpose(np.argsort(array.order)))
      start = stop
    return found

  def _exchanged(self, stack: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(stack, (*self.sizes,), 0, 0, tiled=True) if self.sizes else stack

  def _selected(self, values: list[jax.Array], dim: int) -> jax.Array:
    """For each matrix of the device, along `dim`, the value that its own cut gives."""
    result, *others = values
    device = jax.lax.axis_index((*self.sizes,)) if self.sizes and others else 0
    mine = jnp.asarray(self.table)[device].reshape(-1, *[1] * (result.ndim - dim - 1))
    for number, other in enumerate(others, 1):
      result = jnp.where(mine == number, other, result)
    return result

  def _places(self, cut: _Cut) -> list[int]:
    """The order `[matrix, *(axes, piece) by dim]` of the dims `[*mesh axes, matrix, *piece]`."""
    axes, first = [*self.sizes], len(self.sizes) + 1
    inner = [(*map(axes.index, own), first + dim) for dim, own in enumerate(cut.axes)]
    return [len(axes), *(place for group in inner for place in group)]

  def _joined(self, stack: jax.Array, cut: _Cut) -> jax.Array:
    """`[devices, matrices, piece]` -> `[matrices, rows, columns]`."""
    piece = self.piece(cut)
    parts = stack[:, :, : math.prod(piece)].reshape(*self.sizes.values(), stack.shape[1], *piece)
    full = [size * ways for size, ways in zip(piece, self.ways(cut), strict=True)]
    whole = parts.transpose(self._places(cut)).reshape(-1, *full)
    return whole[(slice(None), *map(slice, cut.shape))].reshape(-1, *cut.matrix)

  def _split(self, whole: jax.Array, cut: _Cut) -> jax.Array:
    """The inverse of `_joined`."""
    piece, count = self.piece(cut), len(whole)
    widths = [(0, size * ways - n) for size, ways, n in zip(piece, self.ways(cut), cut.shape, strict=True)]
    whole = jnp.pad(whole.reshape(count, *cut.shape), [(0, 0), *widths])
    dims = [(*(self.sizes[axis] for axis in own), size) for own, size in zip(cut.axes, piece, strict=True)]
    parts = whole.reshape(count, *(size for group in dims for size in group))
    flat = parts.transpose(np.argsort(self._places(cut))).reshape(self.table.shape[0], count, -1)
    return jnp.pad(flat, ((0, 0), (0, 0), (0, self.largest - flat.shape[2])))


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

  def run(grads: list[jax.Array], state: PyTree, params: PyTree, extra: PyTree) -> PyTree:
    whole = group.gather(grads), state, None if params is None else group.gather(params)
    updates, state = jax.vmap(lambda g, s, p: inner.update(g, s, p, **extra))(*whole)
    return group.scatter(cast(Any, updates)), state

  if mesh is None or not group.sizes:
    return run(grads, state, params, extra)

  def padded(values: list[jax.Array]) -> list[jax.Array]:
    return [group.padded(array, x) for array, x in zip(group.arrays, values, strict=True)]

  # Gradients are first reduced into their own layout: else the compiler may sum all of them on every device.
  grads = [pinned(x, array.where) for array, x in zip(group.arrays, grads, strict=True)]
  rows = group.table.size - group.count
  state = jax.tree.map(lambda x: jnp.pad(x, [(0, rows), *[(0, 0)] * (x.ndim - 1)]), state)
  specs: Any = [array.spec for array in group.arrays]
  stacked = PartitionSpec((*group.sizes,))
  on_devices = on_shards(run, mesh_inside(mesh), (specs, stacked, specs, PartitionSpec()), (specs, stacked))
  new, state = on_devices(padded(grads), state, None if params is None else padded(params), extra)
  new = [x[tuple(map(slice, array.shape))] for array, x in zip(group.arrays, new, strict=True)]
  return new, jax.tree.map(lambda x: x[: group.count], state)


def _groups(
  tree: PyTree, dims: Callable[[PyTree], PyTree] | None, placement: Placement | None
) -> dict[str, _Group]:
  """The equal matrices in a tree of parameters, by size and dtype."""
  asked = jax.tree.map(_if_two_dims, tree) if dims is None else dims(tree)
  boxed = jax.tree.map(lambda x, part: jax.tree.map(lambda _: [x], part), asked, tree, is_leaf=_is_asked)
  numbers = jax.tree.leaves(boxed, is_leaf=lambda x: isinstance(x, list))
  shardings = {} if placement is None else placement.model
  sizes = next((axis_sizes(where.mesh) for where in shardings.values()), dict[str, int]())
  sizes = {axis: sizes[axis] for axis in matrix_axes(sizes)}
  groups: dict[str, _Group] = {}
  for number, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
    (own,) = numbers[number]
    if own is not None:
      where = shardings.get(plain_path(path))
      spec = axes_by_dim(PartitionSpec() if where is None else where.spec, x.ndim)
      order, cut = _cut(tuple(x.shape), own, spec, sizes)
      group = groups.setdefault(group_name(*cut.matrix, x.dtype), _Group([], sizes))
      group.arrays.append(_Array(number, tuple(x.shape), order, cut, where))
  return groups


def _cut(
  shape: tuple[int, ...],
  numbers: MuonDimensionNumbers,
  spec: Sequence[tuple[str, ...]],
  sizes: Mapping[str, int],
) -> tuple[tuple[int, ...], _Cut]:
  """The order of the dims of an array of matrices, and how each matrix is cut."""
  if not isinstance(numbers, MuonDimensionNumbers):  # pyright: ignore[reportUnnecessaryIsInstance]
    raise SchemeError(f"dims gave {numbers!r} for an array of shape {shape}.", fix=_DIMS)
  rows, columns = ([dim % len(shape) for dim in np.atleast_1d(dims).tolist()] for dims in numbers)
  matrix = (*rows, *columns)
  order = (*(dim for dim in range(len(shape)) if dim not in matrix), *matrix)
  if len(order) != len(shape) or not rows or not columns:
    raise SchemeError(
      f"an array of shape {shape} cannot be read as matrices whose rows are dims {rows}, columns {columns}.",
      fix="name each dim at most once, for example MuonDimensionNumbers(-2, -1).",
    )
  inner = tuple(shape[dim] for dim in matrix)
  axes = [tuple(axis for axis in spec[dim] if axis in sizes) for dim in matrix]
  # Axes that split no dim of the matrix, as those of the batch, split the largest: each device sends a part.
  parts = [size / math.prod(sizes[a] for a in own) for size, own in zip(inner, axes, strict=True)]
  axes[parts.index(max(parts))] += tuple(axis for axis in sizes if axis not in axes_in(axes))
  return order, _Cut(inner, len(rows), tuple(axes))


def _if_two_dims(x: Any) -> MuonDimensionNumbers | None:
  return MuonDimensionNumbers() if jnp.ndim(x) == 2 else None


def _rest(tree: PyTree, groups: Mapping[str, _Group]) -> PyTree:
  """The parameters that are not matrices; the matrices are masked, as by `optax.masked`."""
  leaves, structure = jax.tree.flatten(tree)
  for array in (array for group in groups.values() for array in group.arrays):
    leaves[array.number] = optax.MaskedNode()
  return jax.tree.unflatten(structure, leaves)


def _is_asked(node: object) -> bool:
  return node is None or isinstance(node, MuonDimensionNumbers | optax.MaskedNode)


def _is_masked(node: object) -> bool:
  return isinstance(node, optax.MaskedNode)
