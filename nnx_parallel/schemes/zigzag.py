"""The order of positions in which causal attention gives all devices of a mesh axis equal work."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from nnx_parallel.core.checked import check_arguments, is_array
from nnx_parallel.core.text import with_article
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import SchemeError


@check_arguments(SchemeError, shards=range(1, 2**20), block=range(1, 2**31))
def zigzag(
  tree: PyTree,
  shards: int,
  *,
  dim: int = 1,
  inverse: bool = False,
  segment_ids: np.ndarray | None = None,
  block: int = 256,
) -> PyTree:
  """Reorders positions so that each shard has an early and a late part of the sequence.

  The sequence is cut into `2 * shards` parts. Shard `i` gets part `i` and, after it, part
  `2 * shards - 1 - i`. Apply it to everything that is indexed by position: tokens, labels, loss weights,
  segment ids, and the position numbers that rotary or learned position embeddings need. Compute labels first:
  after the reordering the next token is no longer the next element. A sum or mean over positions stays the
  same.

  With `segment_ids`, each long document of a packed sequence is cut separately, and each shard has an early
  and a late part of the document. The parts have equal lengths, which are a multiple of `block`; the first
  positions of a document stay uncut if they do not fill all parts. The shards share these positions, and the
  short documents, in their old order. Pass the ids, and the number of each position in its document, in the
  new order to `context_attention`, without its option `zigzag`.

  Args:
    tree: a pytree of NumPy or JAX arrays with the positions along `dim`. The length must be a multiple of
      `2 * shards`.
    shards: the size of the mesh axis that shards the positions; with `heads_axis`, the size of `axis` alone.
    dim: the array dim of the positions.
    inverse: whether to restore the original order instead.
    segment_ids: integers of global shape `[batch, length]`, in the original order: a document is a run of
      equal integers. The length must be a multiple of `shards`, and the arrays of `tree` have the shape
      `[batch, length, ...]`.
    block: with `segment_ids`, the positions of the smallest part. Documents of fewer than
      `2 * shards * block` positions are not cut. Half of the block of the attention suits most lengths.

  Returns:
    Arrays of the same kinds and shapes.

  Raises:
    SchemeError: the length is not a multiple of `2 * shards`, or with `segment_ids` of `shards`; or an
      argument does not fit the arrays.

  Source: The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2.

  Example:
    >>> import numpy as np, nnx_parallel as nxp
    >>> nxp.parallel.zigzag(np.arange(8), 2, dim=0)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    >>> ids = np.array([[1, 1, 1, 1, 1, 2, 2, 2]])
    >>> nxp.parallel.zigzag(np.arange(8)[None], 2, segment_ids=ids, block=1)
    array([[1, 4, 0, 5, 2, 3, 6, 7]])
  """
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    if not is_array(x) or not -x.ndim <= dim < x.ndim:
      raise SchemeError(
        f"tree{jax.tree_util.keystr(path)} has no dim {dim} of positions.",
        details=f"{with_article(type(x).__name__)}, shape {getattr(x, 'shape', 'none')}",
        fix="arrays of shape [batch, length, ...], and dim=1.",
      )
  if segment_ids is not None:
    order = _order_of_documents(np.asarray(segment_ids), shards, dim, block)
    order = np.argsort(order, -1) if inverse else order
    return jax.tree.map(lambda x: _in_order(x, order), tree)
  parts = [part for i in range(shards) for part in (i, 2 * shards - 1 - i)]
  order = np.argsort(parts) if inverse else np.asarray(parts)

  def moved(x: jax.Array) -> jax.Array:
    length = x.shape[dim]
    _check_parts(length, 2 * shards, f"dim {dim} of an array of shape {tuple(x.shape)}, for {shards} shards")
    ahead = dim % x.ndim
    split = x.reshape(*x.shape[:ahead], 2 * shards, length // (2 * shards), *x.shape[ahead + 1 :])
    if isinstance(x, np.ndarray):
      return split.take(order, ahead).reshape(x.shape)
    layout = jax.typeof(split).sharding  # on Explicit axes, a moved dim keeps its layout only if it is named
    picked = split.at[(*[slice(None)] * ahead, order)]
    named = AxisType.Explicit in layout.mesh.axis_types
    return (picked.get(out_sharding=layout) if named else picked.get()).reshape(x.shape)

  return jax.tree.map(moved, tree)


def _order_of_documents(segment_ids: np.ndarray, shards: int, dim: int, block: int) -> np.ndarray:
  """For each element in the new order, its old index, `[batch, length]`."""
  if segment_ids.ndim != 2 or dim != 1:
    raise SchemeError(
      "documents are ordered in arrays of shape [batch, length, ...].",
      details=f"segment_ids {segment_ids.shape}, dim={dim}",
      fix="segment_ids of shape [batch, length], and dim=1.",
    )
  count, length = 2 * shards, segment_ids.shape[1]
  _check_parts(length, shards, f"segment_ids {segment_ids.shape}, for {shards} shards")
  found = np.empty(segment_ids.shape, int)
  for row, ids in enumerate(segment_ids):
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    kept, cut = np.ones(length, bool), list[np.ndarray]()
    for start, size in zip(starts, np.diff(starts, append=length), strict=True):
      if size >= count * block:
        inside = np.arange(start + size % (count * block), start + size)
        kept[inside] = False
        cut.append(inside.reshape(count, -1))
    others = np.flatnonzero(kept).reshape(shards, -1)
    shares = [[*(x[[i, count - 1 - i]].ravel() for x in cut), others[i]] for i in range(shards)]
    found[row] = np.concatenate([part for share in shares for part in share])
  return found


def _check_parts(length: int, count: int, details: str) -> None:
  if length % count:
    raise SchemeError(
      f"{length} positions cannot be cut into {count} equal parts.",
      details=details,
      fix=f"pad them to {-(-length // count) * count}, with a loss weight of 0.",
    )


def _in_order(x: Any, order: np.ndarray) -> Any:
  """An array `[batch, length, ...]` with the elements of each row in another order."""
  if x.shape[:2] != order.shape:
    raise SchemeError(
      f"an array of shape {tuple(x.shape)} does not fit segment ids of shape {order.shape}.",
      fix="arrays [batch, length, ...] with the batch and the length of the segment ids.",
    )
  index = order.reshape(*order.shape, *[1] * (x.ndim - 2))
  return (np if isinstance(x, np.ndarray) else jnp).take_along_axis(x, index, 1)
