"""Reads a module: its Variables by path, and their sharding metadata."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import nnx
from flax.nnx import graphlib
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from nnx_parallel.core.axes import Entry
from nnx_parallel.core.padding import PADDED, logical_kind
from nnx_parallel.core.types import AnyArray, Leaf, PyTree, State
from nnx_parallel.errors import ShardingError

Path = tuple[Hashable, ...]
Names = tuple[Entry, ...]
SCOPE = "sharding_scope"
"""The metadata key of a plan, on each Variable that it creates; the value is a `constrain.Scope`."""
FLAX_PREFIX = "_pytree__"
"""Starts the names of the attributes that flax keeps for itself in each module."""
_NO_NODES = frozenset((str, int, float, bool, type(None), type, FunctionType, np.ndarray))
OTHER_KEYS = frozenset(("shardings", "partition_spec", "pspec"))
"""Metadata keys that are a layout in other code, but mean nothing to flax."""
_FLAX_KEYS = frozenset((
  "out_sharding", "sharding_rules", "mesh", "optimizer_sharding", "eager_sharding", "hijax", "ref",
  SCOPE, PADDED,
))  # fmt: skip


def path_str(path: Path) -> str:
  """The dotted form for printing and matching: `("blocks", 0, "kernel")` -> `blocks.0.kernel`."""
  return ".".join(map(str, path))


def plain_path(path: Sequence[object]) -> Path:
  """Converts a path of `jax.tree_util` to the plain parts of a plan's paths."""

  def part(key: object) -> Hashable:
    # A pytree may be registered with custom keys, for example strings.
    return next((getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)), key)

  return tuple(map(part, path))


def named_leaves(batch: PyTree) -> list[tuple[str, Leaf]]:
  """The leaves of a batch, with the names that messages give them: `batch['x']`."""
  leaves = jax.tree_util.tree_leaves_with_path(batch)
  return [(f"batch{jax.tree_util.keystr(path)}", leaf) for path, leaf in leaves]


def parts_of_type(tree: PyTree, kind: type) -> list[Any]:
  """The parts of a pytree that are of a type; what is inside them is not searched."""

  def is_part(part: object) -> bool:
    return isinstance(part, kind)

  return [part for part in jax.tree.leaves(tree, is_leaf=is_part) if is_part(part)]


def iter_nodes(module: object) -> Iterator[tuple[Path, object]]:
  """Path and object of modules and Variables, in flax's order; children of a shared object only once."""
  yield from _iter_nodes(module, (), set())


def _iter_nodes(node: object, path: Path, seen: set[int]) -> Iterator[tuple[Path, object]]:
  if isinstance(node, nnx.Pytree) and id(node) not in seen:
    seen.add(id(node))
    attributes: list[tuple[Any, Any]] = [
      (int(name) if name.isdecimal() and isinstance(node, nnx.List) else name, value)
      for name, value in vars(node).items()
      if type(value) not in _NO_NODES and not name.startswith(FLAX_PREFIX)
    ]
    for name, value in sorted(attributes, key=lambda item: (isinstance(item[0], str), item[0])):
      if _is_node(value):
        yield from _iter_nodes(value, (*path, name), seen)
      elif not isinstance(value, jax.Array):
        for inner, part in jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_node):
          if _is_node(part):
            yield from _iter_nodes(part, (*path, name, *plain_path(inner)), seen)
  yield path, node


def _is_node(value: Leaf) -> bool:
  return isinstance(value, (nnx.Pytree, nnx.Variable))


def variables(module: object) -> dict[Path, Leaf]:
  """The own Variables and raw arrays of a module by path, in flax's order; tied ones at their first path."""
  return dict(nnx.to_flat_state(nnx.state(module)))


def array_leaves(module: object) -> dict[Path, Leaf]:
  """`variables`, except Variables that hold no array but `None` or optax's `MaskedNode`."""
  return {path: leaf for path, leaf in variables(module).items() if jax.tree.leaves(value_of(leaf))}


def merge(graphdef: nnx.GraphDef[Any], state: State) -> Any:
  """`nnx.merge`, also around `ShapeDtypeStruct`s in place of raw arrays."""
  # flax takes a struct inside a tuple, dict or other pytree for a static value, and so would lose it.
  node, flat = nnx.merge(graphdef, state), dict(nnx.to_flat_state(state))
  structs = {path for path, leaf in flat.items() if isinstance(leaf, jax.ShapeDtypeStruct)}
  lost = structs - variables(node).keys() if structs else structs
  if not lost:
    return node
  marked: list[Any] = [(path, graphlib.DataElem(x) if path in lost else x) for path, x in flat.items()]
  return nnx.merge(graphdef, nnx.from_flat_state(marked))


def set_arrays(module: nnx.Pytree, arrays: Mapping[Path, AnyArray]) -> None:
  """Puts raw arrays at their paths in a live module; a tuple that holds some is replaced by a copy."""
  # Other containers that are not modules are copied too: `nnx.update` rejects tuples and dataclasses.
  for path, node in [*iter_nodes(module)]:
    for name, value in [*vars(node).items()] if isinstance(node, nnx.Pytree) else ():
      here = (*path, int(name) if isinstance(node, nnx.List) and name.isdecimal() else name)
      if _is_node(value) or not any(where[: len(here)] == here for where in arrays):
        continue
      new = jax.tree_util.tree_map_with_path(
        lambda keys, old, here=here: arrays.get((*here, *plain_path(keys)), old), value, is_leaf=_is_node
      )
      setattr(node, name, nnx.data(new))


def aliases(module: object) -> dict[Path, tuple[Path, ...]]:
  """The other paths of tied Variables and shared submodules, by path in `variables(module)`."""
  found = [id(node) for _, node in iter_nodes(module)]
  if len(set(found)) == len(found):
    return {}
  groups = [[tuple(path) for path in group] for group in nnx.find_duplicates(module)]
  result: dict[Path, tuple[Path, ...]] = {}
  for path in variables(module):
    others = [
      (*other, *path[len(member) :])
      for group in groups
      for member in group
      if path[: len(member)] == member
      for other in group
      if other != member
    ]
    if others:
      result[path] = tuple(dict.fromkeys(others))
  return result


def value_of(leaf: Leaf) -> AnyArray:
  """The array (or `ShapeDtypeStruct`) of a Variable, or the leaf itself when it is a raw array."""
  return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def kind_of(leaf: Leaf) -> str:
  """The Variable's type name, or `array` for a raw array."""
  return logical_kind(leaf).__name__ if isinstance(leaf, nnx.Variable) else "array"


def is_rng(leaf: Leaf) -> bool:
  """Whether this leaf is RNG state (a key or a counter), which is always replicated."""
  if isinstance(leaf, nnx.RngState):
    return True
  dtype = getattr(value_of(leaf), "dtype", None)
  return dtype is not None and is_key(dtype)


def is_key(dtype: Any) -> bool:
  """Whether this is the dtype of typed PRNG keys."""
  return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def key_implementation(dtype: Any) -> str:
  """The name of the implementation, such as `threefry2x32`, of keys of this dtype."""
  found: list[str] = []
  # jax.random.key_impl takes only keys; a traced key has a dtype and costs nothing.
  key = jax.ShapeDtypeStruct((), dtype)
  jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), key)
  return found[0]


@functools.lru_cache(maxsize=16)
def key_dtype(implementation: str) -> Any:
  """The dtype of keys of `threefry2x32` and the like; a ValueError if jax has no such implementation."""
  return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype


def named_key_dtype(name: str) -> Any:
  """The dtype of keys that prints as `key<fry>` and the like; None if it is of no implementation of jax."""
  dtypes = map(key_dtype, ("threefry2x32", "rbg", "unsafe_rbg"))
  return next((dtype for dtype in dtypes if str(dtype) == name), None)


class Annotation(NamedTuple):
  """What the author of a Variable wrote about its dims."""

  names: Names  # one for each dim; dims beyond the end of what was written are replicated, as in flax
  short: Names  # the names as written, if they are fewer than the dims; a spec may leave out the last dims
  rules: dict[str, Any]  # the `sharding_rules` of the Variable itself


def names_of(leaf: Leaf, *, where: str) -> Annotation | None:
  """The annotation of a Variable (`out_sharding`: names or a spec), or None; `where` is its path."""
  # It is the author's also on a live Variable of a plan, whose `sharding_rules` creation wrote.
  if not isinstance(leaf, nnx.Variable):
    return None
  metadata, ndim = cast(Mapping[str, Any], leaf.get_metadata()), len(value_of(leaf).shape)
  _check_keys(metadata, where)
  value = metadata.get("out_sharding")
  if value is None:
    return None
  value = value.spec if isinstance(value, NamedSharding) else value
  if isinstance(value, str) or not isinstance(value, (Sequence, PartitionSpec)):
    raise ShardingError(
      f"{where}: out_sharding must be one name (or None) for each dim, not {value!r}.",
      fix=f"out_sharding=({value!r}, None)" if isinstance(value, str) else 'out_sharding=("embed", "mlp")',
    )
  names = tuple(_entry(entry, where) for entry in value)
  if len(names) > ndim:
    raise ShardingError(
      f"{where}: {len(names)} names for an array of {ndim} dims.",
      details=f"out_sharding {names}, at most one name for each dim",
      fix=f"write {ndim} entries, None for a replicated dim.",
    )
  short = len(names) < ndim and not isinstance(value, PartitionSpec)
  full = (*names, *[None] * (ndim - len(names)))
  return Annotation(full, names if short else (), _rules(own_rules(metadata), where))


def mesh_of(leaf: Leaf) -> Mesh | AbstractMesh | None:
  """The mesh that the author of a Variable wrote: `mesh=`, or in a `NamedSharding`."""
  if not isinstance(leaf, nnx.Variable) or SCOPE in leaf.get_metadata():
    return None
  metadata = cast(Mapping[str, Any], leaf.get_metadata())
  return metadata.get("mesh") or getattr(metadata.get("out_sharding"), "mesh", None)


def own_rules(metadata: Mapping[str, Any]) -> Any:
  """The `sharding_rules` of the author of a Variable; a live Variable of a plan has them in its scope."""
  return metadata[SCOPE].own if SCOPE in metadata else metadata.get("sharding_rules") or ()


def _check_keys(metadata: Mapping[str, Any], where: str) -> None:
  # flax ignores a key that it does not know, so an array with a misspelt annotation would be replicated.
  for key in metadata.keys() - _FLAX_KEYS:
    meant = difflib.get_close_matches(
      key, ("out_sharding", "sharding_names", "sharding_rules"), 1, cutoff=0.85
    )
    if key.startswith("opt") and "shard" in key:  # `opt_sharding`
      meant = ["optimizer_sharding"]
    if meant and key not in OTHER_KEYS:
      name = meant[0]
      raise ShardingError(
        f"{where}: the metadata key {key!r} means nothing to flax, so it would be ignored.",
        details=f"value {metadata[key]!r}",
        fix=f"did you mean {name!r}? {name}={metadata[key]!r}",
      )


def _rules(rules: Any, where: str) -> dict[str, Any]:
  pairs = list(rules.items()) if isinstance(rules, Mapping) else [tuple(rule) for rule in rules]
  result: dict[str, Any] = {}
  for name, axes in pairs:
    if name in result and result[name] != axes:
      raise ShardingError(
        f"{where}: sharding_rules maps {name!r} twice.",
        details=f"sharding_rules {pairs}",
        fix="keep one entry for each name.",
      )
    result[name] = axes
  return result


def _entry(entry: object, where: str) -> Entry:
  if entry is None or isinstance(entry, str):
    return entry
  if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
    return tuple(entry) or None
  raise ShardingError(
    f"{where}: {entry!r} in out_sharding is not a name.",
    fix="use a string, a tuple of strings (several mesh axes, major to minor), or None.",
  )
