"""Restoring: from a committed step to arrays in the target's layout, verified."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from etils import epath

from nnx_parallel.checkpoint import array_io, encoding, format5, storage
from nnx_parallel.checkpoint.damage import damage, raise_transient
from nnx_parallel.checkpoint.diff import Diff, LeafPair, TargetLeaf
from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.manifest import OLD_FORMAT, LeafRecord, Manifest
from nnx_parallel.core.nodes import is_key, key_dtype
from nnx_parallel.errors import DamagedError

logger = logging.getLogger(__name__)


def read(
  step_dir: epath.Path, manifest: Manifest, diff: Diff, *, byte_budget: int
) -> dict[str, dict[str, Array]]:
  """Reads all matched leaves, by item and the target's path; the caller has checked the files."""
  sizes = f"reading {diff.bytes_read:,} bytes; at most {diff.host_bytes:,} bytes of host memory here"
  logger.info("restoring step %d: %s", manifest.step, sizes)
  if manifest.format == OLD_FORMAT:
    here = as_stored((leaf.item, leaf.saved_path, leaf.saved) for leaf in diff.matches)
    here = here[jax.process_index() :: jax.process_count()]
    if problems := [what for _, what in check_values(step_dir, manifest, here, byte_budget=byte_budget)]:
      raise damage(manifest.step, problems)
  results: dict[str, dict[str, Array]] = {}
  for leaf, array in _load(step_dir, manifest, diff.matches, byte_budget):
    if isinstance(array, DamagedError):
      raise array
    results.setdefault(leaf.item, {})[leaf.path] = place(array, leaf)
  return results


def as_stored(saved: Iterable[tuple[str, str, LeafRecord]]) -> list[LeafPair]:
  """Leaves with elements, given by item and path, with targets on the host that take them as they are."""
  pairs: list[LeafPair] = []
  for item, path, leaf in saved:
    key, _, implementation = leaf.encoding.partition(":")
    struct = jax.ShapeDtypeStruct(leaf.shape, key_dtype(implementation) if key == "key" else np.uint8)
    if key != encoding.EMPTY:
      pairs.append(LeafPair(item, path, TargetLeaf(struct, leaf.shape), path, leaf))
  return pairs


def check_values(
  step_dir: epath.Path, manifest: Manifest, pairs: Iterable[LeafPair], *, byte_budget: int
) -> Iterator[tuple[str, str]]:
  """Reads leaves `as_stored`, and drops them; yields the name of each damaged leaf, and its first problem."""
  for leaf, array in _load(step_dir, manifest, pairs, byte_budget):
    if isinstance(array, DamagedError):
      yield leaf.name, array.what
    elif manifest.format == OLD_FORMAT and format5.digest(np.asarray(array)) != leaf.saved.digest:
      what = f"the values of {leaf.name} differ from the saved values"
      yield leaf.name, damage(manifest.step, [*_files_of(step_dir, manifest, leaf), what]).what


def damaged_files(step_dir: epath.Path, manifest: Manifest, names: Iterable[str]) -> dict[str, str]:
  """The files that are missing or of another length; a `CheckpointError` if that cannot be said now."""
  problems: dict[str, str] = {}
  try:
    sizes = storage.all_files(step_dir)
    for name in names:
      if name not in sizes:
        problems[name] = f"{name} is missing"
      elif sizes[name] != (size := manifest.files[name]):
        problems[name] = f"{name} has {sizes[name]:,} bytes instead of {size:,}"
  except OSError as error:
    raise_transient(error, f"{step_dir}")
    problems[os.fspath(step_dir)] = f"its files cannot be read ({error.strerror or error})"
  return problems


def check_files(step_dir: epath.Path, manifest: Manifest, matches: Iterable[LeafPair]) -> None:
  """Checks the files of the items to restore; files of other items may be missing."""
  unread = manifest.items.keys() - {match.item for match in matches}
  names = [name for name in manifest.files if name.partition("/")[0] not in unread]
  if problems := damaged_files(step_dir, manifest, names):
    raise damage(manifest.step, [*problems.values()])


def _files_of(step_dir: epath.Path, manifest: Manifest, match: LeafPair) -> list[str]:
  """The problems of the files of a leaf, which it shares with its item."""
  names = [name for name in manifest.files if name.startswith(f"{match.item}/")]
  return [*damaged_files(step_dir, manifest, names).values()]


def _load(
  step_dir: epath.Path, manifest: Manifest, leaves: Iterable[LeafPair], byte_budget: int
) -> Iterator[tuple[LeafPair, Array | DamagedError | None]]:
  """Each leaf with its stored array, its damage, or None if it has no elements."""
  for item, group in itertools.groupby(leaves, lambda leaf: leaf.item):
    by_folder: dict[str, list[LeafPair]] = {}
    for leaf in group:
      if leaf.saved.encoding == encoding.EMPTY:
        yield leaf, None
      else:
        by_folder.setdefault(leaf.saved.folder, []).append(leaf)
    stored = {folder: same[-1].on_disk for folder, same in by_folder.items()}
    wanted = {folder: same[-1].stored for folder, same in by_folder.items()}
    merged = manifest.format != OLD_FORMAT
    for folder, array in array_io.read(
      step_dir / item, stored, wanted, byte_budget=byte_budget, merged=merged
    ):
      for leaf in by_folder[folder]:
        if not isinstance(array, Exception):
          yield leaf, array
          continue
        raise_transient(array, f"{step_dir / item}")
        what = f"{item}/{leaf.saved_path} cannot be read (files under {item})"
        found = damage(step_dir.name, [*_files_of(step_dir, manifest, leaf), what, str(array)[:300]])
        found.__cause__ = array
        yield leaf, found


def place(array: Array | None, leaf: LeafPair) -> Array:
  """Turns a stored array (None for an array without elements) into the leaf, in its dtype and sharding."""
  struct, how = leaf.target.struct, leaf.saved.encoding
  if array is None:
    how = encoding.key_encoding(struct.dtype) if is_key(struct.dtype) else encoding.PLAIN
    form = encoding.stored_form(struct.shape, struct.dtype, how, None)
    array = np.zeros(form.shape, form.dtype)
  made = encoding.decode(array, how, leaf.saved.dtype)
  if made.dtype != struct.dtype:
    made = made.astype(struct.dtype)
  if struct.sharding is None:
    return made
  if isinstance(made, np.ndarray):
    values = made  # of 64 bits, and read to the host because jax makes no such arrays now
    return jax.make_array_from_callback(values.shape, struct.sharding, lambda index: values[index])
  return made if made.sharding == struct.sharding else jax.device_put(made, struct.sharding)
