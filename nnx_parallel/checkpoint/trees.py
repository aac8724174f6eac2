"""Trees of leaves, with nnx objects in them or not, as flat tables, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_parallel.checkpoint import encoding, paths
from nnx_parallel.checkpoint.preflight import Wanted
from nnx_parallel.core.nodes import value_of, variables
from nnx_parallel.core.padding import is_padded
from nnx_parallel.errors import CheckpointError

Leaves = dict[str, Any]
Rebuild = Callable[[Mapping[str, Any]], Any]


def flatten(tree: object) -> tuple[Leaves, Rebuild]:
  """Gives the leaves of a tree by path as text, and a function that puts values in their place.

  Args:
    tree: a module, an optimizer, an `nnx.State`, or dicts, lists, tuples and any other registered pytree of
      these, of arrays and of JSON values; None is not a leaf.

  Returns:
    The leaves (a Variable that is there twice at its first path only), and a function that takes new values
    of some or all of them. It fills Variables in place, and copies the containers around other leaves.

  Example:
    >>> leaves, rebuild = flatten({"a": [1, 2], "b": nnx.Linear(2, 2, rngs=nnx.Rngs(0))})
    >>> list(leaves)
    ['a.0', 'a.1', 'b.bias', 'b.kernel']
    >>> rebuild({"a.0": 10})["a"]
    [10, 2]
  """
  rows, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_node)
  leaves: Leaves = {}
  tables: list[tuple[Any, dict[str, tuple[Any, Any]]]] = []
  seen: set[int] = set()
  for keys, node in rows:
    table: dict[str, tuple[Any, Any]] = {}
    for path, leaf in _leaves_of(node).items():
      if isinstance(leaf, nnx.Variable):
        if id(leaf) in seen:  # pyright: ignore[reportUnknownArgumentType]
          continue
        seen.add(id(leaf))  # pyright: ignore[reportUnknownArgumentType]
      name = paths.join((*map(_part, keys), *path))
      if name in leaves:
        raise CheckpointError(
          f"cannot save a tree in which two leaves are both called {name!r}.", fix="rename one of them."
        )
      leaves[name], table[name] = leaf, (path, leaf)
    tables.append((node, table))

  def rebuild(values: Mapping[str, Any]) -> Any:
    return jax.tree_util.tree_unflatten(structure, [_fill(node, table, values) for node, table in tables])

  return leaves, rebuild


def has_nodes(tree: object, kind: type | tuple[type, ...] = (nnx.Pytree, nnx.State, nnx.Variable)) -> bool:
  """Whether a tree has, or is, an nnx object of this kind."""
  return any(isinstance(node, kind) for node in jax.tree.leaves(tree, is_leaf=_is_node))


def _is_node(value: object) -> bool:
  return isinstance(value, (nnx.Pytree, nnx.State, nnx.Variable))


def _leaves_of(node: Any) -> Mapping[Any, Any]:
  if isinstance(node, nnx.State):
    return dict(nnx.to_flat_state(node))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
  return variables(node) if isinstance(node, nnx.Pytree) else {(): node}


def _fill(node: Any, table: Mapping[str, tuple[Any, Any]], values: Mapping[str, Any]) -> Any:
  raw: dict[Any, Any] = {}
  for name, (path, leaf) in table.items():
    if name not in values:
      continue
    if isinstance(leaf, nnx.Variable):
      leaf.set_raw_value(values[name])  # pyright: ignore[reportUnknownMemberType]
    else:
      raw[path] = values[name]
  if not raw:
    return node
  if isinstance(node, nnx.State):
    return nnx.from_flat_state([*{**_leaves_of(node), **raw}.items()])
  if isinstance(node, nnx.Pytree):
    nnx.update(node, nnx.from_flat_state([*raw.items()]))
    return node
  return raw[()]


def wanted(leaves: Mapping[str, Any], *, item: str, as_numpy: bool = False) -> dict[str, Wanted]:
  """Reads shape, dtype and sharding off Variables, arrays or `jax.ShapeDtypeStruct`s, and leaves out others.

  Raises:
    CheckpointError: a leaf without a sharding, unless numpy arrays are asked for.
  """
  found: dict[str, Wanted] = {}
  for path, one in leaves.items():
    leaf = value_of(one)
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
    found[path] = Wanted(struct, tuple(one.shape if is_padded(one) else leaf.shape))
  return found


def _part(key: Any) -> paths.Part:
  if isinstance(key, jax.tree_util.DictKey):
    return key.key
  if isinstance(key, jax.tree_util.SequenceKey):
    return key.idx
  if isinstance(key, jax.tree_util.GetAttrKey):
    return key.name
  return key.key
