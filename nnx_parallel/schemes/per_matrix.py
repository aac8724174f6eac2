"""Optimizers of whole matrices (Muon, Shampoo, SOAP) on any layout of the parameters.

Such an optimizer multiplies or factors each gradient as a whole, but a layout gives each device a part of each
matrix. `per_matrix` exchanges the parts, so that each device holds some matrices as a whole.
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

from nnx_parallel.core.axes import axes_by_dim, axes_in, entry_of
from nnx_parallel.core.extra_args import accept_extra
from nnx_parallel.core.mesh import AnyMesh, axis_sizes, mesh_inside
from nnx_parallel.core.nodes import Path, path_str, plain_path
from nnx_parallel.core.shards import on_shards, pinned
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import SchemeError
from nnx_parallel.layout.optimizer_layout import PerMatrixState, matrix_axes
from nnx_parallel.layout.sharded_optimizer import placement_in_use

Dims = Callable[[PyTree], PyTree]
"""parameters -> for each, a `MuonDimensionNumbers`, or None for a parameter that is no matrix."""


def per_matrix(
  tx: optax.GradientTransformation, dims: Dims | None = None
) -> optax.GradientTransformationExtraArgs:
  """Gives whole matrices to a transformation, spread over all devices of the plan.

  Muon, Shampoo and SOAP multiply or factor the gradient of each matrix as a whole. If a plan shards matrices,
  the compiler gathers each one on every device, and each device computes the same products. With this
  wrapper, matrices of equal size and dtype form a group, and each device computes equally many whole matrices
  of it. The parts of the gradients travel to these devices in one all-to-all for each group, and the updates
  travel back in another. The state of the matrices stays where they are computed: the plan shards it over all
  mesh axes, with padding where their number does not divide. If a group has fewer matrices than devices, some
  devices have no matrix, and the plan says how many.

  The transformation gets one matrix at a time. A norm in it is the norm of a matrix, so put
  `optax.clip_by_global_norm` in front, outside. If it reads the parameters (weight decay), they travel too;
  `optax.add_decayed_weights` behind it, outside, reads them where they are. Counts and schedules in it are
  kept for each matrix. Without a plan, or on one device, nothing travels.

  Args:
    tx: the transformation. Parameters that are no matrices get it too, in their own layout. Use
      `optax.partition` for another one, also for matrices such as embeddings.
    dims: as `muon_weight_dimension_numbers` of `optax.contrib.muon`: a function from the parameters to a tree
      with a `MuonDimensionNumbers` for each array of matrices, and None for other arrays. The dims that it
      does not name count matrices. None: arrays with two dims are matrices.

  Returns:
    A transformation for `plan(optimizer=...)`.

  Raises:
    SchemeError: `update` is called in a `shard_map`, or the parameters have no matrix.

  Example:
    >>> import optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init, mesh = lambda: nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8)
    >>> muon = nxp.parallel.per_matrix(optax.contrib.muon(1e-3))
    >>> plan = nxp.plan(init, mesh, nxp.fsdp(min_size=0), optimizer=muon)
    >>> momentum = next(leaf for leaf in plan.leaves if leaf.name.endswith("64x128_float32.inner_states.muon.inner_state.0.mu"))
    >>> momentum.spec, momentum.decision.reason
    (P('fsdp', None, None), '1 whole matrices on 8 devices, 7 of them without any')

  Sources: "Muon is Scalable for LLM Training", arXiv:2502.16982; Distributed Shampoo, arXiv:2309.06497.
  """
  inner = accept_extra(tx)

  def init(params: PyTree) -> PerMatrixState:
    groups, rest = _sorted(params, dims)
    if not groups:
      raise SchemeError(
        "per_matrix got no matrix.",
        details=f"shapes {[jnp.shape(x) for x in jax.tree.leaves(params)][:5]}",
        fix="use the transformation alone; or dims=, for matrices in arrays with more dims.",
      )
    leaves = jax.tree.leaves(params)
    states = {key: jax.vmap(inner.init)(group.gather(group.of(leaves))) for key, group in groups.items()}
    return PerMatrixState(states, inner.init(rest) if jax.tree.leaves(rest) else optax.EmptyState())

  def update(
    grads: PyTree, state: PerMatrixState, params: PyTree = None, **extra: Any
  ) -> tuple[PyTree, PerMatrixState]:
    placement = placement_in_use()
    specs = {} if placement is None else {path: where.spec for path, where in placement.model.items()}
    mesh = None if placement is None else next(where.mesh for where in placement.model.values())
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
      raise SchemeError(
        "per_matrix was called in a shard_map, where each device has its own part of a matrix.",
        fix="call optimizer.update outside of the shard_map, under jax.jit.",
      )
    scalars = {name: x for name, x in extra.items() if isinstance(x, jax.typing.ArrayLike) and not np.ndim(x)}
    groups, rest = _sorted(grads, dims, mesh, specs)
    leaves, structure = jax.tree.flatten(grads)
    if placement is not None:
      paths = [plain_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
      leaves = [pinned(x, placement.model.get(path)) for path, x in zip(paths, leaves, strict=True)]
    weights = None if params is None else structure.flatten_up_to(params)
    updates, states = [*leaves], dict[str, PyTree]()
    for key, group in groups.items():
      mine = None if weights is None else group.of(weights)
      new, states[key] = _update(inner, group, mesh, group.of(leaves), state.groups[key], mine, scalars)
      for array, value in zip(group.arrays, new, strict=True):
        updates[array.number] = value
    after = state.rest
    if jax.tree.leaves(rest):
      others = None if weights is None else _only_rest(jax.tree.unflatten(structure, weights), groups)
      plain, after = inner.update(rest, state.rest, others, **scalars)
      masked = jax.tree.leaves(plain, is_leaf=_is_masked)
      updates = [new if _is_masked(kept) else kept for kept, new in zip(masked, updates, strict=True)]
    return jax.tree.unflatten(structure, updates), PerMatrixState(states, after)

  return optax.GradientTransformationExtraArgs(init, cast(Any, update))


class _Kind(NamedTuple):
  """How the matrices of an array are stored.

  Attributes:
    order: the dims of the array: those that count matrices, the rows, the columns.
    counted: the number of dims that count matrices.
    rows: the number of dims that are rows.
    shape: the sizes of the dims of a matrix, in this order.
    axes: for each dim of a matrix, the mesh axes that split it, major to minor.
  """

  order: tuple[int, ...]
  counted: int
  rows: int
  shape: tuple[int, ...]
  axes: tuple[tuple[str, ...], ...]

  @property
  def matrix(self) -> tuple[int, int]:
    """Rows and columns."""
    return math.prod(self.shape[: self.rows]), math.prod(self.shape[self.rows :])

  @property
  def spec(self) -> PartitionSpec:
    """Of the array: no dim that counts matrices is split."""
    entries = dict(zip(self.order[self.counted :], map(entry_of, self.axes), strict=True))
    return PartitionSpec(*(entries.get(dim) for dim in range(len(self.order))))


class _Array(NamedTuple):
  """An array of matrices: its number among the leaves, its global shape, and its kind."""

  number: int
  shape: tuple[int, ...]
  kind: _Kind


@dataclasses.dataclass(frozen=True)
class _Group:
  """Arrays with matrices of one size and dtype.

  Each device has a piece of each matrix before, and some whole matrices after the exchange. The methods run on
  one device of a `shard_map`; without mesh axes, they only stack and cut.

  Attributes:
    arrays: the arrays, in the order of the parameters.
    sizes: mesh axis -> devices, of the axes of the exchange.
  """

  arrays: list[_Array]
  sizes: Mapping[str, int]

  def of(self, leaves: Sequence[Any]) -> list[Any]:
    """The arrays among the leaves of a tree of parameters."""
    return [leaves[array.number] for array in self.arrays]

  @functools.cached_property
  def devices(self) -> int:
    """The number of devices."""
    return math.prod(self.sizes.values())

  @functools.cached_property
  def kind_of(self) -> np.ndarray[Any, Any]:
    """The number of the kind of each matrix, by device and by its place there; 0 for padding."""
    numbers = [self.kinds.index(array.kind._replace(order=(), counted=0)) for array in self.arrays]
    found = np.repeat(numbers, [math.prod(array.shape) // self.numel for array in self.arrays])
    return np.pad(found, (0, -len(found) % self.devices)).reshape(self.devices, -1)

  @functools.cached_property
  def kinds(self) -> list[_Kind]:
    """The different ways in which matrices are cut into pieces."""
    return [*dict.fromkeys(array.kind._replace(order=(), counted=0) for array in self.arrays)]

  @functools.cached_property
  def numel(self) -> int:
    """The elements of a matrix."""
    return math.prod(self.arrays[0].kind.matrix)

  def local(self, kind: _Kind) -> list[int]:
    """The shape of a piece."""
    return [
      -(-size // math.prod(self.sizes[axis] for axis in axes))
      for size, axes in zip(kind.shape, kind.axes, strict=True)
    ]

  @functools.cached_property
  def piece(self) -> int:
    """The elements of the largest piece, to which others are padded."""
    return max(math.prod(self.local(kind)) for kind in self.kinds)

  def padded(self, array: _Array) -> tuple[int, ...]:
    """The global shape that the mesh axes divide."""
    shape = [*array.shape]
    local = self.local(array.kind)
    for dim, part, axes in zip(array.kind.order[array.kind.counted :], local, array.kind.axes, strict=True):
      shape[dim] = part * math.prod(self.sizes[axis] for axis in axes)
    return tuple(shape)

  def gather(self, values: Sequence[jax.Array]) -> jax.Array:
    """Pieces of all matrices -> some whole matrices: `[matrices of this device, rows, columns]`."""
    flat: list[jax.Array] = []
    for array, x in zip(self.arrays, values, strict=True):
      size = math.prod(self.local(array.kind))
      pieces = x.transpose(array.kind.order).reshape(-1, size)
      flat.append(jnp.pad(pieces, ((0, 0), (0, self.piece - size))))
    stack = jnp.concatenate(flat)
    stack = jnp.pad(stack, ((0, self.kind_of.size - len(stack)), (0, 0)))
    stack = self._exchanged(stack.reshape(*self.kind_of.shape, self.piece))
    return self._chosen([self._joined(stack, kind) for kind in self.kinds], dim=0)

  def scatter(self, whole: jax.Array) -> list[jax.Array]:
    """The inverse of `gather`."""
    stack = self._exchanged(self._chosen([self._cut(whole, kind) for kind in self.kinds], dim=1))
    stack, found, start = stack.reshape(self.kind_of.size, self.piece), list[jax.Array](), 0
    for array in self.arrays:
      order, counted, local = array.kind.order, array.kind.counted, self.local(array.kind)
      batch = [array.shape[dim] for dim in order[:counted]]
      stop = start + math.prod(batch)
      pieces = stack[start:stop, : math.prod(local)].reshape(*batch, *local)
      found.append(pieces.transpose(np.argsort(order)))
      start = stop
    return found

  def _exchanged(self, stack: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(stack, (*self.sizes,), 0, 0, tiled=True) if self.sizes else stack

  def _chosen(self, values: list[jax.Array], dim: int) -> jax.Array:
    """For each matrix, along `dim`, the value for its own kind."""
    result, *others = values
    if others:
      table = jnp.asarray(self.kind_of)
      mine = table[jax.lax.axis_index((*self.sizes,))] if self.sizes else table[0]
      mine = mine.reshape(-1, *[1] * (result.ndim - dim - 1))
      for number, other in enumerate(others, 1):
        result = jnp.where(mine == number, other, result)
    return result

  def _places(self, kind: _Kind) -> list[int]:
    """Where the dims `[*mesh axes, matrix, *dims of a piece]` go in `[matrix, *(axes, dim) by dim]`."""
    numbers = {axis: number for number, axis in enumerate(self.sizes)}
    dims = enumerate(kind.axes, len(numbers) + 1)
    return [len(numbers), *(place for dim, axes in dims for place in (*(numbers[a] for a in axes), dim))]

  def _joined(self, stack: jax.Array, kind: _Kind) -> jax.Array:
    local = self.local(kind)
    pieces = stack[:, :, : math.prod(local)].reshape(*self.sizes.values(), stack.shape[1], *local)
    full = [n * math.prod(self.sizes[a] for a in axes) for n, axes in zip(local, kind.axes, strict=True)]
    whole = pieces.transpose(self._places(kind)).reshape(-1, *full)
    return whole[(slice(None), *map(slice, kind.shape))].reshape(-1, *kind.matrix)

  def _cut(self, whole: jax.Array, kind: _Kind) -> jax.Array:
    local, count = self.local(kind), len(whole)
    full = [n * math.prod(self.sizes[a] for a in axes) for n, axes in zip(local, kind.axes, strict=True)]
    widths = [(0, n - size) for n, size in zip(full, kind.shape, strict=True)]
    whole = jnp.pad(whole.reshape(count, *kind.shape), [(0, 0), *widths])
    split = [n for axes, part in zip(kind.axes, local, strict=True) for n in (*map(self.sizes.get, axes), part)]
    pieces = whole.reshape(count, *cast(Any, split)).transpose(np.argsort(self._places(kind)))
    flat = pieces.reshape(self.devices, count, -1)
    return jnp.pad(flat, ((0, 0), (0, 0), (0, self.piece - flat.shape[2])))


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
    return group.scatter(updates), state

  if mesh is None or not group.sizes:
    return run(grads, state, params, extra)

  def padded(values: list[jax.Array]) -> list[jax.Array]:
    shapes = [group.padded(array) for array in group.arrays]
    return [jnp.pad(x, [(0, b - a) for a, b in zip(x.shape, s, strict=True)]) for x, s in zip(values, shapes, strict=True)]

  specs, stacked = [array.kind.spec for array in group.arrays], PartitionSpec((*group.sizes,))
  count = jax.tree.leaves(state)[0].shape[0] if jax.tree.leaves(state) else 0
  rows = group.kind_of.size - count
  state = jax.tree.map(lambda x: jnp.pad(x, [(0, rows), *[(0, 0)] * (x.ndim - 1)]), state)
  split = on_shards(
    run, mesh_inside(cast(Any, mesh)), (specs, stacked, specs, PartitionSpec()), (specs, stacked)
  )
  new, state = split(padded(grads), state, None if params is None else padded(params), extra)
  new = [x[tuple(map(slice, array.shape))] for array, x in zip(group.arrays, new, strict=True)]
  return new, jax.tree.map(lambda x: x[:count], state)


def _sorted(
  tree: PyTree, dims: Dims | None, mesh: AnyMesh | None = None, specs: Mapping[Path, PartitionSpec] = {}
) -> tuple[dict[str, _Group], PyTree]:
  """The groups of equal matrices in a tree of parameters, and the tree without them."""
  asked = _two_dims(tree) if dims is None else dims(tree)
  boxed = jax.tree.map(lambda spec, part: jax.tree.map(lambda _: [spec], part), asked, tree, is_leaf=_is_asked)
  found = jax.tree.leaves(boxed, is_leaf=lambda x: isinstance(x, list))
  sizes = {} if mesh is None else {axis: axis_sizes(mesh)[axis] for axis in matrix_axes(axis_sizes(mesh))}
  groups: dict[str, _Group] = {}
  for number, ((path, x), (numbers,)) in enumerate(zip(jax.tree_util.tree_leaves_with_path(tree), found, strict=True)):
    if numbers is None:
      continue
    place = plain_path(path)
    kind = _kind(place, tuple(x.shape), numbers, specs.get(place, PartitionSpec()), sizes)
    key = f"{kind.matrix[0]}x{kind.matrix[1]}_{x.dtype}"
    groups.setdefault(key, _Group([], sizes)).arrays.append(_Array(number, tuple(x.shape), kind))
  return groups, _only_rest(tree, groups)


def _kind(path: Path, shape: tuple[int, ...], numbers: MuonDimensionNumbers, spec: PartitionSpec, sizes: Mapping[str, int]) -> _Kind:
  rows, columns = (
    tuple(dim % len(shape) for dim in ((dims,) if isinstance(dims, int) else dims)) for dims in numbers
  )
  counted = tuple(dim for dim in range(len(shape)) if dim not in (*rows, *columns))
  order = (*counted, *rows, *columns)
  if len(order) != len(shape) or not rows or not columns:
    raise SchemeError(
      f"an array of shape {shape} cannot be read as matrices whose rows are dims {rows}, columns {columns}.",
      fix="dims that name each dim at most once, such as MuonDimensionNumbers(-2, -1).",
    )
  split = [tuple(a for a in axes if a in sizes) for axes in axes_by_dim(spec, len(shape))]
  axes, inner = [split[dim] for dim in (*rows, *columns)], [shape[dim] for dim in (*rows, *columns)]
  # Axes that do not split a matrix, as those of the batch, split its largest dim: each device sends a part.
  parts = [size / math.prod(sizes[a] for a in own) for size, own in zip(inner, axes, strict=True)]
  largest = max(range(len(parts)), key=parts.__getitem__)
  axes[largest] += tuple(axis for axis in sizes if axis not in axes_in(axes))
  return _Kind(order, len(counted), len(rows), tuple(inner), tuple(axes))


def _two_dims(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: MuonDimensionNumbers() if jnp.ndim(x) == 2 else None, tree)


def _only_rest(tree: PyTree, groups: Mapping[str, _Group]) -> PyTree:
  leaves, structure = jax.tree.flatten(tree)
  for array in (array for group in groups.values() for array in group.arrays):
    leaves[array.number] = optax.MaskedNode()
  return jax.tree.unflatten(structure, leaves)


def _is_asked(node: object) -> bool:
  return node is None or isinstance(node, (MuonDimensionNumbers, optax.MaskedNode))


def _is_masked(node: object) -> bool:
  return isinstance(node, optax.MaskedNode)
