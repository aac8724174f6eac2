"""Which parameter an optimizer's array belongs to, and its layout after that parameter's.

By path and shape only, for any optimizer.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from nnx_parallel.core.axes import axes_in, count_shards
from nnx_parallel.core.nodes import Path
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.resolve import add_axes

if TYPE_CHECKING:
  from nnx_parallel.layout.leaf import LeafPlan

Shape = tuple[int, ...]


class PerMatrixState(NamedTuple):
  """State of `parallel.per_matrix`."""

  # by `group_name`, the state of the transformation for equal matrices: dim 0 of each array counts the
  # matrices, in the order of the parameters
  groups: dict[str, PyTree]
  rest: PyTree  # the state of the transformation for the parameters that are not matrices


def group_name(rows: int, columns: int, dtype: DTypeLike) -> str:
  """The name of the matrices of one size and dtype: `64x128_float32`."""
  return f"{rows}x{columns}_{np.dtype(dtype).name}"


def matrix_axes(mesh: Mapping[str, int]) -> tuple[str, ...]:
  """The mesh axes over which whole matrices are split, major to minor: all that have several devices."""
  return tuple(axis for axis, size in mesh.items() if size > 1)


def layout_of_matrices(shape: Shape, mesh: Mapping[str, int]) -> tuple[PartitionSpec, Shape, str]:
  """The layout of an array of `PerMatrixState.groups`: `(spec, padding, why)`."""
  axes, rest = matrix_axes(mesh), len(shape) - 1
  devices = math.prod(mesh.values())
  padding = -shape[0] % devices
  why = f"{shape[0]} whole {'matrix' if shape[0] == 1 else 'matrices'}"
  why += f" on {devices} devices" if devices > 1 else ""
  idle = devices - -(-shape[0] // -(-shape[0] // devices))
  why += f", {idle} of them without a matrix" if idle else ""
  return PartitionSpec(axes or None, *[None] * rest), (padding, *[0] * rest), why


def copies(shapes: Mapping[Path, Shape | None], parameters: Mapping[Path, Shape]) -> dict[Path, Path]:
  """Path -> parameter, for arrays under a prefix that has the path of every parameter.

  A masked transformation has some of them: then nothing else may be under the prefix, and shapes must be
  equal. An array without its own shape (`None`) is not a copy of a parameter.

  Example:
    >>> parameters = {("a",): (4,), ("b",): (2,)}
    >>> copies({("mu", "a"): (1,), ("mu", "b"): (2,), ("count",): None, ("b",): (2,)}, parameters)
    {('mu', 'a'): ('a',), ('mu', 'b'): ('b',)}
  """
  under: dict[Path, dict[Path, Path]] = {}
  counts: collections.Counter[Path] = collections.Counter()
  for path, shape in shapes.items():
    counts.update(path[:i] for i in range(len(path)))
    for i in range(len(path)) if shape is not None else ():
      if path[i:] in parameters:
        under.setdefault(path[:i], {})[path] = path[i:]
  return {
    path: of
    for prefix, found in under.items()
    if {*found.values()} == {*parameters}
    or (len(found) == counts[prefix] and all(shapes[p] == parameters[q] for p, q in found.items()))
    for path, of in found.items()
  }


def layout_after_parameter(
  parameter: LeafPlan, shape: tuple[int, ...]
) -> tuple[PartitionSpec, tuple[int, ...], str]:
  """Gives an optimizer array the layout of its parameter: `(spec, padding, why)`."""
  # The same shape gets the same spec (moments). Additional leading dims are replicated (the history of
  # L-BFGS). If the array has some of the parameter's dims, by size and in order, these keep their axes (the
  # factored moments of Adafactor and SM3). Any other array is replicated.
  own, extra = parameter.shape, len(shape) - len(parameter.shape)
  kept: Sequence[int | None] | None
  if shape == own:
    kept, why = range(len(own)), "as its parameter"
  elif extra > 0 and shape[extra:] == own:
    kept, why = (*[None] * extra, *range(len(own))), f"{extra} dims in front"
  else:
    kept, why = matching_dims(shape, own), f"factored {shape} of {own}"
  if kept is None:
    kept, why = [None] * len(shape), f"replicated: {shape} is not part of {own}"
  spec = PartitionSpec(*(None if dim is None else parameter.spec[dim] for dim in kept))
  return spec, tuple(0 if dim is None else parameter.padding[dim] for dim in kept), why


def zero_axes(
  zero: int, axes: Sequence[str] | str | None, batch: Sequence[str], mesh: Mapping[str, int]
) -> tuple[str, ...]:
  """The mesh axes, major to minor, over which a ZeRO stage splits the optimizer state; () for stage 0."""
  # `axes` is the user's choice; None takes those of the batch. Source: ZeRO, arXiv:1910.02054.
  if zero == 3:
    raise PlanError(
      "zero=3 splits the parameters too, which the rules decide.",
      fix="nxp.plan(init, mesh, nxp.fsdp()): the optimizer state follows the parameters.",
    )
  if axes is not None and zero == 0:
    raise PlanError("zero_axes needs a stage.", fix=f"zero=1, zero_axes={axes!r}")
  if zero == 0:
    return ()
  chosen = tuple(batch) if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
  absent = [axis for axis in chosen if axis not in mesh]
  why = ""
  if not chosen:
    why = "no mesh axis splits the batch" if axes is None else "zero_axes names no axis"
  elif absent:
    why = f"zero_axes names {absent[0]!r}, which is not in the mesh"
  elif len({*chosen}) != len(chosen):
    why = f"zero_axes={chosen!r} names an axis twice"
  if why:
    own = next(iter(mesh))
    raise PlanError(
      f"zero={zero} splits nothing: {why}.",
      details=f"mesh {dict(mesh)}",
      fix=f"zero_axes={tuple(batch) or own!r}, or split the batch: nxp.LogicalRules(batch={own!r}).",
    )
  return chosen


def add_zero_axes(
  spec: PartitionSpec, shape: Sequence[int], axes: Sequence[str], mesh: Mapping[str, int]
) -> tuple[PartitionSpec, str]:
  """Splits an optimizer array over more axes, as `add_axes`, and says where; unchanged if no dim divides."""
  used = {*axes_in(spec)}
  left = tuple(axis for axis in axes if axis not in used and mesh[axis] > 1)
  if not left:
    return spec, "no further axis"
  found = add_axes(spec, shape, left, mesh)
  if not found.added:
    return spec, f"no dim of {tuple(shape)} divides by {count_shards(left, mesh)} more"
  where = (f"dim {dim} also over {', '.join(added)}" for added, dim in found.added)
  return found.spec, f"ZeRO: {', '.join(where)}"


def matching_dims(shape: tuple[int, ...], own: tuple[int, ...]) -> tuple[int | None, ...] | None:
  """For each dim of an array, the dim of a parameter, by size and in order, or None; else None."""
  # Sizes of 1 match no dim: they are summed dims or placeholders.
  kept: list[int | None] = []
  start = 0
  for size in shape:
    if size == 1:
      kept.append(None)
      continue
    dim = next((d for d in range(start, len(own)) if own[d] == size), None)
    if dim is None:
      return None
    kept.append(dim)
    start = dim + 1
  return tuple(kept)
