"""What a step takes: the bytes of its planned state, and the shapes of its batch."""

from __future__ import annotations

import math

import jax
import numpy as np

from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.types import Leaf, PyTree
from nnx_parallel.errors import ReportError
from nnx_parallel.layout.plan import Plan
from nnx_parallel.layout.resolve import count_shards_by_dim


def state_categories(plan: Plan) -> dict[str, int]:
  """Bytes per device of the planned state in device memory: parameters, other model state, optimizer."""
  sums = {"parameters": 0, "other model state": 0, "optimizer": 0}
  for leaf in plan.leaves:
    if leaf.on_host:
      continue
    kind = "parameters" if leaf.is_parameter else "other model state"
    sums["optimizer" if leaf.root == "optimizer" else kind] += leaf.bytes_per_device
  return sums


def batch_structs(batch: PyTree) -> PyTree:
  """The batch as `ShapeDtypeStruct`s; Python numbers are scalars. A `ReportError` without any array."""

  def abstract(leaf: Leaf) -> jax.ShapeDtypeStruct:
    array = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    return jax.ShapeDtypeStruct(
      tuple(array.shape), jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)
    )

  found = jax.tree.map(abstract, batch)
  if not any(leaf.shape for leaf in jax.tree.leaves(found)):
    raise ReportError(
      f"the batch has no array: {batch!r:.80}.",
      fix="pass arrays, or their shapes and dtypes: jax.ShapeDtypeStruct((16, 8), jnp.float32).",
    )
  return found


def check_batch(plan: Plan, batch: PyTree, microbatches: int = 1) -> None:
  """Refuses (`ReportError`) a batch that a step with this plan could not split: its report would mislead."""
  sizes = axis_sizes(plan.mesh)
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch_structs(batch)):
    counts = count_shards_by_dim(plan.batch_spec(len(leaf.shape)), len(leaf.shape), sizes)
    name, parts = f"batch{jax.tree_util.keystr(path)}", (*counts[:1], microbatches)
    each = math.prod(parts) if counts else 1
    if counts and leaf.shape[0] % each:
      rest = leaf.shape[0] % each
      also = f" in each of {microbatches} microbatches" if microbatches > 1 else ""
      raise ReportError(
        f"{name} has {leaf.shape[0]} examples, which {counts[0]} shards{also} cannot split evenly: this"
        " layout cannot run.",
        details=f"shape {leaf.shape}, mesh {sizes}",
        fix=f"a global batch of {f'{leaf.shape[0] - rest} or ' if leaf.shape[0] > rest else ''}"
        f"{leaf.shape[0] - rest + each}, or fewer shards{' or microbatches' if also else ''}.",
      )
    uneven = next((dim for dim, count in enumerate(counts) if leaf.shape[dim] % count), None)
    if uneven is not None:
      raise ReportError(
        f"{name}: dim {uneven} has length {leaf.shape[uneven]}, which {counts[uneven]} shards cannot split"
        " evenly: this layout cannot run.",
        details=f"shape {leaf.shape}, mesh {sizes}",
        fix="change the length, or the InputRules for this rank.",
      )
