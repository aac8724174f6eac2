"""Trees of leaves as flat tables, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from nnx_parallel.checkpoint import encoding, paths
from nnx_parallel.checkpoint.preflight import Wanted
from nnx_parallel.errors import CheckpointError


def flatten(tree: object) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], Any]]:
  """Gives the leaves of a pytree by path as text, and a function that puts others in their place.

  Args:
    tree: dicts, lists, tuples and any other registered pytree; None is not a leaf.

  Example:
    >>> leaves, rebuild = flatten({"a": [1, 2], "b": 3})
    >>> leaves
    {'a.0': 1, 'a.1': 2, 'b': 3}
    >>> rebuild({"a.0": 10, "a.1": 20, "b": 30})
    {'a': [10, 20], 'b': 30}
  """
  rows, structure = jax.tree_util.tree_flatten_with_path(tree)
  names = [paths.join(tuple(_part(key) for key in keys)) for keys, _ in rows]
  leaves = dict(zip(names, (leaf for _, leaf in rows), strict=True))
  if len(leaves) < len(names):
    twice = next(name for name in names if names.count(name) > 1)
    raise CheckpointError(
      f"cannot save a tree in which two leaves are both called {twice!r}.", fix="rename one of them."
    )

  def rebuild(values: Mapping[str, Any]) -> Any:
    return jax.tree_util.tree_unflatten(structure, [values[name] for name in names])

  return leaves, rebuild


def wanted(leaves: Mapping[str, Any], *, item: str, as_numpy: bool = False) -> dict[str, Wanted]:
  """Reads shape, dtype and sharding off arrays or `jax.ShapeDtypeStruct`s; other leaves are left out.

  Raises:
    CheckpointError: a leaf without a sharding, unless numpy arrays are asked for.
  """
  found: dict[str, Wanted] = {}
  for path, leaf in leaves.items():
    if not encoding.is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
      continue
    sharding = None if as_numpy or isinstance(leaf, (np.ndarray, np.generic)) else leaf.sharding
    if sharding is None and not as_numpy and not isinstance(leaf, (np.ndarray, np.generic)):
      raise CheckpointError(
        f"cannot restore {item}/{path}: the target does not say where it goes.",
        details=f"target: {leaf}",
        fix="pass a plan, a live model, or jax.ShapeDtypeStruct(shape, dtype, sharding=...); "
        "restore(..., as_numpy=True) gives numpy arrays.",
      )
    struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    found[path] = Wanted(struct, tuple(leaf.shape))
  return found


def _part(key: Any) -> paths.Part:
  if isinstance(key, jax.tree_util.DictKey):
    return key.key
  if isinstance(key, jax.tree_util.SequenceKey):
    return key.idx
  if isinstance(key, jax.tree_util.GetAttrKey):
    return key.name
  return key.key
