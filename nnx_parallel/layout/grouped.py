"""Warns about an XLA bug: kernel gradients of grouped convolutions are too large on some meshes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flax import nnx

from nnx_parallel.layout.variables import few, occurrences, path_str


def check_grouped(model: nnx.Module, batch: Sequence[str], mesh: Mapping[str, int]) -> list[str]:
  """Finds grouped and depthwise convolutions on a mesh that has axes which do not split the batch.

  XLA multiplies the gradients of their kernels by the size of those axes. `train_step` computes them in
  another way; a step that users compile themselves does not, and nothing shows it: Adam trains on.

  Args:
    model: a live or abstract module.
    batch: the mesh axes that split the batch.
    mesh: mesh axis name -> size in devices.

  Returns:
    One note that names them, or none.
  """
  factor = math.prod(size for axis, size in mesh.items() if axis not in batch)
  if factor == 1:
    return []
  found = [
    path_str(path)
    for path, module in occurrences(model)
    if isinstance(module, nnx.Module)
    and isinstance(groups := getattr(module, "feature_group_count", 1), int)
    and groups > 1
  ]
  if not found:
    return []
  return [
    f"{few(found)}: grouped convolutions, whose kernel gradients XLA makes up to {factor} times too large on"
    " this mesh; train_step computes them right, a jit of your own does not"
  ]
