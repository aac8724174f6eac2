"""Warns about depthwise convolutions whose activations are moved for their kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flax import nnx

from nnx_parallel.layout.known_faults import convolutions
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.variables import axes_of, few


def check_depthwise(
  model: nnx.Module, leaves: Iterable[LeafPlan], batch: Sequence[str], mesh: Mapping[str, int]
) -> list[str]:
  """Finds kernels of depthwise convolutions that are split by channels over axes which split the batch too.

  XLA does not gather such a kernel, small as it is: it moves the activations, where it can only by making
  them whole on each device (an "involuntary full rematerialization").

  Args:
    model: a live or abstract module.
    leaves: the rows of the model.
    batch: the mesh axes that split the batch.
    mesh: mesh axis name -> size in devices.

  Returns:
    One note that names them, or none.
  """
  rows = {leaf.path: leaf for leaf in leaves}
  grouped = [path for path, groups in convolutions(model) if groups > 1]
  kernels = [rows[found] for path in grouped if (found := (*path, "kernel")) in rows]
  split = {
    leaf.name: [axis for axis in axes_of(leaf.spec[-1]) if axis in batch and mesh[axis] > 1]
    for leaf in kernels
    if leaf.shape[-2] == 1
  }
  names = [name for name, axes in split.items() if axes]
  if not names:
    return []
  axes = dict.fromkeys(axis for found in split.values() for axis in found)
  return [
    f"{few(names)}: depthwise kernels split by channels over {', '.join(axes)}, as the batch, so a step sends"
    " activations instead of weights; keep them whole: a path rule of None, or a larger min_size"
  ]
