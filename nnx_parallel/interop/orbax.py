"""Restores checkpoints of other programs that use Orbax: plain trees, or states of nnx."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint import array_io, encoding, targets
from nnx_parallel.checkpoint.diff import LeafPair, Patterns, TargetLeaf, compare
from nnx_parallel.checkpoint.manifest import ItemRecord, LeafRecord, Manifest
from nnx_parallel.checkpoint.restore import place
from nnx_parallel.checkpoint.storage import absolute
from nnx_parallel.checkpoint.targets import Only
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.nodes import is_key, path_str, plain_path
from nnx_parallel.core.types import AnyArray, Leaf, PyTree, TreeDef
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.weights import WeightMap

Keys = tuple[str, ...]
_Rows = dict[Keys, Any]


@check_arguments(CheckpointError)
def restore_orbax(
  path: str | os.PathLike[str],
  target: object,
  *,
  item: str | None = None,
  prefix: str = "",
  optimizer: str = "drop",
  optimizer_item: str | None = None,
  optimizer_prefix: str = "",
  only: Only | None = None,
  skip: Iterable[str] = (),
  weight_map: WeightMap | None = None,
  byte_budget: int = 256 << 20,
) -> Any:
  """Restores a model that another program saved with Orbax. There are no digests, so nothing is verified.

  Args:
    path: the folder of one checkpoint step.
    target: as for `Checkpointer.restore`.
    item: the name of the Orbax item that holds the model, if there are several items.
    prefix: the path of the model inside the tree, for example `"params"`. By default it is found: the one
      node that has all leaves of the target.
    optimizer: `"drop"` returns only the model; `"fresh"` makes a new optimizer; `"restore"` restores the
      optimizer, if the target has one.
    optimizer_item: the name of the item that holds the optimizer, if it is another item.
    optimizer_prefix: the path of the optimizer inside the tree, that is, of the node that holds `step` and
      `opt_state`.
    only: as for `Checkpointer.restore`.
    skip: patterns of paths, in the target or under the prefix, that are not restored.
    weight_map: a `WeightMap` that says how saved arrays become leaves, if the target has another structure;
      for example `linen_names(plan)`.
    byte_budget: the maximum number of bytes in flight.

  Returns:
    The same as `Checkpointer.restore`.

  Raises:
    CheckpointError: the folder is not an Orbax checkpoint, it lacks a leaf of the target or has it in another
      form, or it has a leaf under the prefix that the target does not have.

  Example:
    >>> import tempfile
    >>> import numpy as np
    >>> ocp.save(f"{(folder := tempfile.mkdtemp())}/1", {"params": {"w": np.arange(4.0, dtype=np.float32)}})
    >>> restore_orbax(f"{folder}/1", {"w": np.zeros(4, np.float32)}, prefix="params")["w"]
    array([0., 1., 2., 3.], dtype=float32)
  """
  step_dir = absolute(path)
  names, choose = targets.split_only(only)
  goal = targets.read(target, optimizer=optimizer, choose=choose)
  if optimizer == "restore" and "optimizer" not in goal.leaves:
    raise CheckpointError(
      "cannot restore an optimizer: the target has none.",
      fix='pass a plan with optimizer=..., or (model, optimizer); or optimizer="drop".',
    )
  goal = goal if weight_map is None else weight_map.through(goal)
  places = {"model": (item, prefix), "optimizer": (optimizer_item or item, optimizer_prefix)}
  trees = {name: _describe(step_dir, name) for name in {places[root][0] for root in goal.leaves}}
  tables: dict[str, dict[str, Keys]] = {}
  items: dict[str, ItemRecord] = {}
  for root, wanted in goal.leaves.items():
    where, start = places[root]
    rows = trees[where][1]
    start = start or _prefix_of(rows, [path for path in wanted if not Patterns(names, skip).leaves_out(path)])
    others = {
      _keys(other) for name, (tree, other) in places.items() if name != root and tree == where and other
    }
    tables[root] = _below(rows, _keys(start), others)
    leaves = {text: _record(rows[keys], wanted.get(text)) for text, keys in tables[root].items()}
    items[root] = ItemRecord(leaves, {})
  record = Manifest(0, 0.0, {}, items, {}, None, {}, {})
  diff = compare(record, dataclasses.replace(goal, values={}), only=names, skip=skip)
  if not diff.fits:
    saved = dict.fromkeys(".".join(keys) for _, rows, _ in trees.values() for keys in rows)
    raise CheckpointError(
      f"cannot restore {step_dir}: it does not fit the target.",
      details="\n".join([*diff.problems(), f"saved: {', '.join([*saved][:8])}"]),
      fix='if the model is inside another tree: prefix="params", and for the optimizer optimizer_item= or '
      "optimizer_prefix=; leaves to leave out: skip=[...].",
    )
  found: dict[str, dict[str, AnyArray]] = {}
  for root in goal.leaves:
    name, rows, structure = trees[places[root][0]]
    matches = {tables[root][match.saved_path]: match for match in diff.matches if match.item == root}
    tree = [matches[keys].stored if keys in matches else ocp.PLACEHOLDER for keys in rows]
    pad = any(match.saved.shape != match.target.struct.shape for match in matches.values())
    loaded = _load(step_dir, name, jax.tree.unflatten(structure, tree), byte_budget=byte_budget, pad=pad)
    arrays = dict(zip(rows, jax.tree.leaves(loaded), strict=True))
    found[root] = {match.path: _place(arrays[keys], match) for keys, match in matches.items()}
  return goal.build(found)


def _describe(step_dir: epath.Path, item: str | None) -> tuple[str | None, _Rows, TreeDef]:
  """The contents of an Orbax checkpoint: the name of its item, shapes and dtypes by path, and their tree."""
  with array_io.quiet():
    try:
      names = sorted(ocp.checkpointables_metadata(step_dir).metadata)
    except ocp.errors.InvalidLayoutError:
      names = []  # a tree without a name, or not a checkpoint of Orbax; the next call tells which
    if item is None and len(names) > 1:
      raise CheckpointError(
        f"{step_dir} holds several trees.", details=f"names: {names}", fix=f"pass item={names[0]!r}."
      )
    name = item or next(iter(names), None)
    try:
      tree = ocp.metadata(step_dir, checkpointable_name=name).metadata
    except (ValueError, LookupError, OSError) as error:
      raise CheckpointError(
        f"{step_dir} is not an Orbax checkpoint that can be read here.",
        details=str(error)[:300],
        fix=f"check the path and the item; names: {names or 'none'}.",
      ) from error
  rows, structure = jax.tree_util.tree_flatten_with_path(tree)
  return name, {tuple(map(str, plain_path(keys))): leaf for keys, leaf in rows}, structure


def _keys(prefix: str) -> Keys:
  return tuple(prefix.split(".")) if prefix else ()


def _below(rows: _Rows, start: Keys, others: Iterable[Keys]) -> dict[str, Keys]:
  """The leaves under a prefix by their paths as text, without leaves under the prefixes of other trees."""
  away = [other for other in others if len(other) > len(start)]
  inside = [
    keys
    for keys in rows
    if keys[: len(start)] == start and not any(keys[: len(other)] == other for other in away)
  ]
  return {_text(keys[len(start) :]): keys for keys in inside}


def _prefix_of(rows: _Rows, wanted: Iterable[str]) -> str:
  """The one node of a tree below which all wanted leaves are; empty if there is none, or more than one."""
  paths = {*wanted}
  if not paths:
    return ""
  starts: dict[str, set[str]] = {}
  for keys in rows:
    for length in range(len(keys)):
      if (text := _text(keys[length:])) in paths:
        starts.setdefault(".".join(keys[:length]), set()).add(text)
  whole = [start for start, found in starts.items() if found == paths]
  return whole[0] if len(whole) == 1 else ""


def _text(keys: Keys) -> str:
  """A path as this package writes it; nnx.State keeps the array of each Variable under `value`."""
  return path_str(keys[:-1] if keys[-1:] == ("value",) else keys)


def _record(leaf: Leaf, wanted: TargetLeaf | None) -> LeafRecord:
  """A leaf as a manifest would describe it. Keys were saved as keys, or as their data."""
  shape, dtype, kind = tuple(leaf.shape), leaf.dtype, encoding.PLAIN
  if is_key(dtype):
    kind = encoding.key_encoding(dtype)
  elif wanted is not None and is_key(wanted.struct.dtype):
    kind = encoding.key_encoding(wanted.struct.dtype)
    data = encoding.stored_form((), wanted.struct.dtype, kind, None)
    if dtype == data.dtype and shape[len(shape) - len(data.shape) :] == data.shape:
      shape, dtype = shape[: len(shape) - len(data.shape)], wanted.struct.dtype
  return LeafRecord("", shape, encoding.dtype_name(dtype), kind, "", 0)


def _place(array: AnyArray, match: LeafPair) -> AnyArray:
  """Makes a leaf of a stored array. Orbax returns typed keys, although its metadata describes their data."""
  if is_key(array.dtype):
    return jax.device_put(array, match.target.struct.sharding)
  return place(array, match)


def _load(step_dir: epath.Path, item: str | None, tree: PyTree, *, byte_budget: int, pad: bool) -> PyTree:
  """Reads some arrays of one item by Orbax, each process its own shards; with `pad`, into larger arrays."""
  # `tree` has a struct in place of each array (without a sharding: for numpy), or `PLACEHOLDER`.
  wanted = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.ShapeDtypeStruct)]
  # Orbax refuses a shard that is as large as its budget.
  largest = max(map(array_io.bytes_of_shard, wanted), default=0)
  context = ocp.Context()
  context.memory_options.read_concurrent_bytes = max(byte_budget, largest + 1)
  context.array_options.loading.enable_padding_and_truncation = pad
  # Each process reads independently: the others must not wait for a process that cannot read a file.
  me = jax.process_index()
  context.multiprocessing_options.primary_host = me
  context.multiprocessing_options.active_processes = {me}
  abstract = jax.tree.map(_abstract, tree)
  with context, array_io.quiet():
    try:
      return ocp.load(step_dir, abstract, checkpointable_name=item)
    except Exception as error:
      if "Requested more bytes" in f"{error}{error.__cause__}":
        raise CheckpointError(
          f"byte_budget={byte_budget} is less than a stored chunk.",
          details=str(error),
          fix="byte_budget=2**28",
        ) from error
      # Orbax wraps the error that TensorStore raised while it read a shard in a bare `Exception`.
      if type(error) is not Exception or error.__cause__ is None:
        raise
      cause = error.__cause__
    raise cause  # not above, where the two errors would be each other's cause


def _abstract(leaf: Leaf) -> AnyArray:
  # np.empty reserves addresses, not memory.
  is_host = isinstance(leaf, jax.ShapeDtypeStruct) and not leaf.sharding
  return np.empty(leaf.shape, leaf.dtype) if is_host else leaf
