"""Restoring: from a committed step to arrays in the target's layout, verified."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
from etils import epath

from nnx_parallel.checkpoint import array_io, encoding, format5, storage
from nnx_parallel.checkpoint.damage import DamagedError, damage, raise_transient
from nnx_parallel.checkpoint.diff import Diff, LeafPair, TargetLeaf
from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.manifest import OLD_FORMAT, LeafRecord, Manifest, is_no_file
from nnx_parallel.core.nodes import is_key, key_dtype

logger = logging.getLogger(__name__)

# The errors that readers raise for damaged files.
_READ_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError, MemoryError)


def read(
  step_dir: epath.Path, manifest: Manifest, diff: Diff, *, byte_budget: int
) -> dict[str, dict[str, Array]]:
  """Reads all matched leaves, by item and the target's path; the caller has checked the files."""
  logger.info(
    "restoring step %d: reading %s bytes; at most %s bytes of host memory here",
    manifest.step,
    f"{diff.bytes_read:,}",
    f"{diff.host_bytes:,}",
  )
  results: dict[str, dict[str, Array]] = {}
  for item, group in itertools.groupby(diff.matches, lambda leaf: leaf.item):
    leaves = [*group]
    last_use = {leaf.saved.folder: leaf for leaf in leaves}
    arrays = _load(step_dir, manifest, leaves, byte_budget)
    for leaf in leaves:
      take = arrays.pop if leaf is last_use[leaf.saved.folder] else arrays.get
      results.setdefault(item, {})[leaf.path] = place(take(leaf.saved.folder, None), leaf)
  return results


def check_values(
  step_dir: epath.Path,
  manifest: Manifest,
  *,
  byte_budget: int,
  mine: tuple[int, int] = (0, 1),
  chosen: Mapping[str, Iterable[str]] | None = None,
) -> Iterator[tuple[str, str]]:
  """Reads the arrays of a step to the host, a budget at a time, where TensorStore checks them.

  `mine=(1, 4)` takes the second of each four arrays; `chosen` has the saved paths to check, by item.

  Yields:
    The name of each damaged leaf, and its first problem.
  """
  pairs = [
    LeafPair(item, path, _on_host(saved), path, saved)
    for item, record in manifest.items.items()
    for path, saved in record.leaves.items()
    if saved.encoding != encoding.EMPTY and (chosen is None or path in chosen.get(item, ()))
  ]
  for group in _groups(pairs[mine[0] :: mine[1]], byte_budget):
    try:
      arrays = _load(step_dir, manifest, group, byte_budget)
    except DamagedError:
      arrays = {}  # each array is read alone, to name the damaged arrays
    for leaf in group:
      try:
        array = (arrays or _load(step_dir, manifest, [leaf], byte_budget))[leaf.saved.folder]
        if manifest.format == OLD_FORMAT and format5.digest(np.asarray(array)) != leaf.saved.digest:
          files = _files_of(step_dir, manifest, leaf)
          raise damage(manifest.step, [*files, f"the values of {leaf.name} differ from the saved values"])
      except DamagedError as error:
        yield leaf.name, error.what


def damaged_files(
  step_dir: epath.Path, manifest: Manifest, names: Iterable[str], *, hashed: bool = True
) -> dict[str, str]:
  """Lists files that are missing, cut short, unreadable, or changed, each with its problem.

  `hashed` says whether small files of format 5 have their contents checked.

  Raises:
    CheckpointError: a file that this machine cannot read at the moment.
  """
  files, size_of = list(names), storage.sizes_in(step_dir)
  problems = storage.each(lambda name: _problem(step_dir, manifest, name, size_of, hashed), files)
  return {name: f"{name} {problem}" for name, problem in zip(files, problems, strict=True) if problem}


def _problem(
  step_dir: epath.Path, manifest: Manifest, name: str, size_of: Callable[[str], int], hashed: bool
) -> str:
  file, size = step_dir / name, manifest.files[name]
  sha256 = manifest.hashes.get(name) if hashed else None
  try:
    found = size_of(name)
    if found != size:
      return f"has {found:,} bytes instead of {size:,}"
    if (not size and is_no_file(file)) or (sha256 is not None and format5.sha256(file) != sha256):
      return "does not have the contents that were written"
  except FileNotFoundError:
    return "is missing"
  except OSError as error:
    raise_transient(error, f"{file}")
    return f"cannot be read ({error.strerror or error})"
  return ""


def check_files(step_dir: epath.Path, manifest: Manifest, matches: Iterable[LeafPair]) -> None:
  """Checks the files of the items to restore; files of other items may be missing.

  In format 5, where each leaf has its own, the files of other leaves may be missing too.
  """
  leaves = {(match.item, match.saved.folder) for match in matches}
  items = {item for item, _ in leaves}
  unread = {
    (item, leaf.folder)
    for item, record in manifest.items.items()
    for leaf in record.leaves.values()
    if manifest.format == OLD_FORMAT and (item, leaf.folder) not in leaves
  }

  def is_read(name: str) -> bool:
    item, _, rest = name.partition("/")
    return item not in manifest.items or (item in items and (item, rest.partition("/")[0]) not in unread)

  names = [name for name in manifest.files if is_read(name)]
  if problems := damaged_files(step_dir, manifest, names):
    raise damage(manifest.step, [*problems.values()])


def check_old_values(
  step_dir: epath.Path, manifest: Manifest, matches: Iterable[LeafPair], *, byte_budget: int
) -> None:
  """Checks the digests of the leaves to restore of a step in format 5, each process its share."""
  if manifest.format != OLD_FORMAT:
    return
  chosen: dict[str, set[str]] = {}
  for match in matches:
    chosen.setdefault(match.item, set()).add(match.saved_path)
  mine = jax.process_index(), jax.process_count()
  found = check_values(step_dir, manifest, byte_budget=byte_budget, mine=mine, chosen=chosen)
  if problems := [what for _, what in found]:
    raise damage(manifest.step, problems)


def _files_of(step_dir: epath.Path, manifest: Manifest, match: LeafPair) -> list[str]:
  """The problems of the files of a leaf, which it shares with its item unless the format is 5."""
  folder = f"{match.item}/{match.saved.folder}/" if manifest.format == OLD_FORMAT else f"{match.item}/"
  names = [name for name in manifest.files if name.startswith(folder)]
  return [*damaged_files(step_dir, manifest, names).values()]


def _groups(matches: Iterable[LeafPair], byte_budget: int) -> Iterator[list[LeafPair]]:
  """Cuts the reads into groups of one item and about the size of the budget."""
  group: list[LeafPair] = []
  total = 0
  for leaf in matches:
    size = array_io.shard_bytes(leaf.stored)
    if group and (leaf.item != group[0].item or total + size > byte_budget):
      yield group
      group, total = [], 0
    group.append(leaf)
    total += size
  if group:
    yield group


def _load(
  step_dir: epath.Path, manifest: Manifest, group: Sequence[LeafPair], byte_budget: int
) -> dict[str, Array]:
  """Reads leaves of one item, by folder."""
  item = group[0].item
  full = [leaf for leaf in group if leaf.saved.encoding != encoding.EMPTY]
  targets = {leaf.saved.folder: leaf.stored for leaf in full}
  if not targets:
    return {}
  stored = {leaf.saved.folder: leaf.on_disk for leaf in full}
  try:
    merged = manifest.format != OLD_FORMAT
    return array_io.read(step_dir / item, stored, targets, byte_budget=byte_budget, merged=merged)
  except _READ_ERRORS as error:
    raise_transient(error, f"{step_dir / item}")
    if len(group) == 1:
      (leaf,) = group
      raise damage(
        step_dir.name,
        [
          *_files_of(step_dir, manifest, leaf),
          f"{item}/{leaf.saved_path} cannot be read (files under {item})",
          str(error)[:300],
        ],
      ) from error
  # One of several arrays failed: read them alone to learn which.
  return {
    name: array for leaf in group for name, array in _load(step_dir, manifest, [leaf], byte_budget).items()
  }


def _on_host(leaf: LeafRecord) -> TargetLeaf:
  key, _, implementation = leaf.encoding.partition(":")
  dtype = key_dtype(implementation) if key == "key" else np.uint8  # is read as it is stored
  return TargetLeaf(jax.ShapeDtypeStruct(leaf.shape, dtype), leaf.shape)


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
