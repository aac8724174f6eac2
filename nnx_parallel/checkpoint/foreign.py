"""Checkpoints that other programs wrote with Orbax, plain trees or nnx states, read into our targets."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from etils import epath

from nnx_parallel.checkpoint import _orbax, encoding, paths, targets
from nnx_parallel.checkpoint.preflight import Wanted
from nnx_parallel.errors import CheckpointError

# nnx.State keeps the array of each Variable under this name.
_VALUE = "value"
Keys = tuple[str, ...]


def restore_orbax(
  path: str | os.PathLike[str],
  target: object,
  *,
  item: str | None = None,
  prefix: str = "",
  optimizer: str = "drop",
  byte_budget: int = 256 << 20,
) -> Any:
  """Restores a model that another program saved with Orbax. There are no digests, so nothing is verified.

  Args:
    path: the folder of the step.
    target: as for `Checkpointer.restore`.
    item: which of its trees, when it holds several.
    prefix: where the model is inside the tree, for example `"params"`.
    optimizer: `"drop"`, or `"fresh"` for a new one beside the model.
    byte_budget: most bytes in flight.

  Returns:
    As `Checkpointer.restore`.

  Raises:
    CheckpointError: no Orbax checkpoint, or leaves of the target that it does not have in that form.
  """
  if optimizer not in ("drop", "fresh"):
    raise CheckpointError(f"optimizer={optimizer!r} is unknown here.", fix='pass "drop" or "fresh".')
  step_dir = epath.Path(path) if "://" in os.fspath(path) else epath.Path(os.path.abspath(path))
  name, tree = _orbax.describe(step_dir, item)
  rows, structure = jax.tree_util.tree_flatten_with_path(tree)
  saved = {tuple(str(_part(key)) for key in keys): leaf for keys, leaf in rows}
  goal = targets.read(target, optimizer=optimizer)
  sources = _match(goal.wanted["model"], saved, tuple(map(str, paths.split(prefix))), step_dir)
  structs = {keys: _stored(goal.wanted["model"][text], saved[keys]) for text, keys in sources.items()}
  abstract = jax.tree_util.tree_unflatten(
    structure, [structs.get(keys, _orbax.PLACEHOLDER) for keys in saved]
  )
  loaded = _orbax.load_tree(step_dir, name, abstract, byte_budget=byte_budget)
  leaves = dict(zip(saved, jax.tree_util.tree_leaves(loaded), strict=True))
  found = {text: _decoded(leaves[keys], goal.wanted["model"][text]) for text, keys in sources.items()}
  return goal.build({"model": found})


def _match(wanted: Any, saved: dict[Keys, Any], prefix: Keys, step_dir: epath.Path) -> dict[str, Keys]:
  """Finds each leaf of the target, and checks its shape and dtype."""
  sources: dict[str, Keys] = {}
  problems: list[str] = []
  for text, one in wanted.items():
    plain = (*prefix, *map(str, paths.split(text)))
    keys = next((keys for keys in (plain, (*plain, _VALUE)) if keys in saved), None)
    if keys is None:
      problems.append(f"missing  {text}")
      continue
    stored = _stored(one, saved[keys])
    if tuple(saved[keys].shape) != _logical(one, stored):
      problems.append(f"shape    {text}: saved {tuple(saved[keys].shape)}, wanted {one.shape}")
    elif saved[keys].dtype != stored.dtype:
      problems.append(f"dtype    {text}: saved {saved[keys].dtype}, wanted {stored.dtype}")
    elif stored.shape != _logical(one, stored):
      problems.append(f"padding  {text}: a padded target cannot be read from plain Orbax")
    sources[text] = keys
  if problems:
    raise CheckpointError(
      f"cannot restore {step_dir}: {len(problems)} leaves of the target do not fit.",
      details="\n".join([*problems[:12], f"saved: {', '.join('.'.join(keys) for keys in list(saved)[:8])}"]),
      fix='if the model is inside another tree: prefix="params"; otherwise change the target.',
    )
  return sources


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
