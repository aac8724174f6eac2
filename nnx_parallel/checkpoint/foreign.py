"""Checkpoints that other programs wrote with Orbax, plain trees or nnx states, read into our targets."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from nnx_parallel.checkpoint import _orbax, encoding, paths, targets
from nnx_parallel.checkpoint.preflight import Patterns, Wanted
from nnx_parallel.errors import CheckpointError

# nnx.State keeps the array of each Variable under this name.
_VALUE = "value"
Keys = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Tree:
  """One tree of the checkpoint: its name there, its leaves without values, and its structure."""

  item: str | None
  leaves: Mapping[Keys, Any]
  structure: Any


@dataclasses.dataclass(frozen=True)
class _Root:
  """The model or the optimizer.

  Attributes:
    name: put before its paths in errors: `optimizer/`, or nothing.
    wanted: the target's leaves.
    tree: what holds it.
    prefix: where it is in there.
  """

  name: str
  wanted: Mapping[str, Wanted]
  tree: _Tree
  prefix: Keys


def restore_orbax(
  path: str | os.PathLike[str],
  target: object,
  *,
  item: str | None = None,
  prefix: str = "",
  optimizer: str = "drop",
  optimizer_item: str | None = None,
  optimizer_prefix: str = "",
  skip: Iterable[str] = (),
  byte_budget: int = 256 << 20,
) -> Any:
  """Restores a model that another program saved with Orbax. There are no digests, so nothing is verified.

  Args:
    path: the folder of the step.
    target: as for `Checkpointer.restore`.
    item: which of its trees, when it holds several.
    prefix: where the model is inside the tree, for example `"params"`.
    optimizer: `"drop"`; `"fresh"` for a new one beside the model; or `"restore"`, when the target has one.
    optimizer_item: which tree holds the optimizer, when that is another.
    optimizer_prefix: where the optimizer is inside the tree: what holds `step` and `opt_state`.
    skip: patterns of paths, in the target or under the prefix, to leave alone.
    byte_budget: most bytes in flight.

  Returns:
    As `Checkpointer.restore`.

  Raises:
    CheckpointError: no Orbax checkpoint, leaves of the target that it does not have in that form, or leaves
      under the prefix that the target does not have.
  """
  step_dir = epath.Path(path) if "://" in os.fspath(path) else epath.Path(os.path.abspath(path))
  goal = targets.read(target, optimizer=optimizer)
  if optimizer == "restore" and "optimizer" not in goal.wanted:
    raise CheckpointError(
      "cannot restore an optimizer: the target has none.",
      fix='pass a plan with optimizer=..., or (model, optimizer); or optimizer="drop".',
    )
  places = {"model": (item, prefix), "optimizer": (optimizer_item or item, optimizer_prefix)}
  trees = {name: _read_tree(step_dir, name) for name in {places[root][0] for root in goal.wanted}}
  roots: dict[str, _Root] = {}
  for root, wanted in goal.wanted.items():
    where, start = places[root]
    name = "" if root == "model" else f"{root}/"
    roots[root] = _Root(name, wanted, trees[where], tuple(map(str, paths.split(start))))
  sources = _match(roots, Patterns(None, skip), step_dir)
  return goal.build({name: _load(step_dir, root, sources[name], byte_budget) for name, root in roots.items()})


def _read_tree(step_dir: epath.Path, item: str | None) -> _Tree:
  name, tree = _orbax.describe(step_dir, item)
  rows, structure = jax.tree_util.tree_flatten_with_path(tree)
  return _Tree(name, {tuple(str(_part(key)) for key in keys): leaf for keys, leaf in rows}, structure)


def _load(step_dir: epath.Path, root: _Root, sources: Mapping[str, Keys], byte_budget: int) -> dict[str, Any]:
  saved = root.tree.leaves
  structs = {keys: _stored(root.wanted[text], saved[keys]) for text, keys in sources.items()}
  abstract = jax.tree_util.tree_unflatten(
    root.tree.structure, [structs.get(keys, _orbax.PLACEHOLDER) for keys in saved]
  )
  loaded = _orbax.load_tree(step_dir, root.tree.item, abstract, byte_budget=byte_budget)
  leaves = dict(zip(saved, jax.tree_util.tree_leaves(loaded), strict=True))
  return {text: _decoded(leaves[keys], root.wanted[text]) for text, keys in sources.items()}


def _match(
  roots: Mapping[str, _Root], patterns: Patterns, step_dir: epath.Path
) -> dict[str, dict[str, Keys]]:
  """Finds each leaf of the target, checks its shape and dtype, and that none is left over."""
  sources: dict[str, dict[str, Keys]] = {}
  used: set[tuple[str | None, Keys]] = set()
  problems: list[str] = []
  for name, root in roots.items():
    sources[name], saved = {}, root.tree.leaves
    for text, one in root.wanted.items():
      plain = (*root.prefix, *map(str, paths.split(text)))
      keys = next((keys for keys in (plain, (*plain, _VALUE)) if keys in saved), None)
      if keys is not None:
        used.add((root.tree.item, keys))
      if patterns.leaves_out(text):
        continue
      if keys is None:
        problems.append(f"missing  {root.name}{text}")
        continue
      problems += _misfit(f"{root.name}{text}", one, saved[keys])
      sources[name][text] = keys
  for root in roots.values():
    problems += _left_over(root, used, patterns)
  problems += [f"no leaf  skip={pattern!r}" for pattern in patterns.unused()]
  if problems:
    raise CheckpointError(
      f"cannot restore {step_dir}: {len(problems)} leaves do not fit.",
      details="\n".join([*problems[:12], *_saved_names(roots)]),
      fix='if the model is inside another tree: prefix="params", and for the optimizer optimizer_item= or '
      "optimizer_prefix=; what may stay out: skip=[...].",
    )
  return sources


def _misfit(name: str, one: Wanted, saved: Any) -> list[str]:
  stored = _stored(one, saved)
  if tuple(saved.shape) != _logical(one, stored):
    return [f"shape    {name}: saved {tuple(saved.shape)}, wanted {one.shape}"]
  if saved.dtype != stored.dtype:
    return [f"dtype    {name}: saved {saved.dtype}, wanted {stored.dtype}"]
  if stored.shape != _logical(one, stored):
    return [f"padding  {name}: a padded target cannot be read from plain Orbax"]
  return []


def _left_over(root: _Root, used: Container[tuple[str | None, Keys]], patterns: Patterns) -> list[str]:
  depth, found = len(root.prefix), list[str]()
  for keys in root.tree.leaves:
    if keys[:depth] == root.prefix and (root.tree.item, keys) not in used:
      inner = keys[depth:-1] if keys[-1] == _VALUE else keys[depth:]
      if not patterns.leaves_out(".".join(inner)):
        found.append(f"extra    {root.name}{'.'.join(inner)}")
  return found


def _saved_names(roots: Mapping[str, _Root]) -> list[str]:
  names = {".".join(keys): None for root in roots.values() for keys in root.tree.leaves}
  return [f"saved: {', '.join(list(names)[:8])}"]


def _stored(one: Wanted, leaf: Any) -> jax.ShapeDtypeStruct:
  """How to ask Orbax for a leaf: keys were saved as keys, or by nnx's own tools as their data."""
  struct = one.struct
  if encoding.is_key(struct.dtype) and not encoding.is_key(leaf.dtype):
    return encoding.stored_form(
      struct.shape, struct.dtype, encoding.key_encoding(struct.dtype), struct.sharding
    )
  return struct


def _logical(one: Wanted, stored: jax.ShapeDtypeStruct) -> tuple[int, ...]:
  return one.shape + stored.shape[len(one.struct.shape) :]


def _decoded(leaf: Any, one: Wanted) -> Any:
  if encoding.is_key(one.struct.dtype) and not encoding.is_key(leaf.dtype):
    leaf = encoding.decode(leaf, encoding.key_encoding(one.struct.dtype), "")
  return leaf if isinstance(leaf, np.ndarray) else jax.device_put(leaf, one.struct.sharding)


def _part(key: Any) -> object:
  return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))
