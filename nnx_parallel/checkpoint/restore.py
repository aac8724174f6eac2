"""Restoring: from a committed step to arrays in the target's layout, verified."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from etils import epath

from nnx_parallel.checkpoint import array_io, encoding, multihost, storage
from nnx_parallel.checkpoint.damage import DamagedError, damage, raise_transient
from nnx_parallel.checkpoint.diff import Diff, LeafPair, TargetLeaf
from nnx_parallel.checkpoint.digest import digest
from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.manifest import LeafRecord, Manifest, is_no_file
from nnx_parallel.core.nodes import is_key, key_dtype

logger = logging.getLogger(__name__)

# The errors that readers raise for damaged files.
_READ_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError, MemoryError)
# Which small files' contents each kind of verification compares; digests cover the chunks in "full".
_HASHED = {"full": "metadata", "metadata": "all", "off": "none"}
VERIFY = tuple(_HASHED)


def read(
  step_dir: epath.Path, manifest: Manifest, diff: Diff, *, verify: str, byte_budget: int
) -> dict[str, dict[str, Array]]:
  """Reads all matched leaves, by item and the target's path.

  `verify="full"` compares every value's digest and the contents of the metadata, `"metadata"` the contents of
  all small files. File sizes are always compared.
  """
  logger.info(
    "restoring step %d: reading %s bytes; at most %s bytes of host memory here",
    manifest.step,
    f"{diff.bytes_read:,}",
    f"{diff.host_bytes:,}",
  )
  with multihost.together():
    _check_files(step_dir, manifest, diff.matches, hashed=_HASHED[verify])
  with multihost.together():
    results, found = _read_all(step_dir, manifest, diff, verify, byte_budget)
  # Of an array that is spread over processes, each has digested its share. Only now, when no process can fail
  # before it, are the shares added up.
  sums = iter(multihost.added_up([number for _, is_share, number in found if is_share]))
  problems: list[str] = []
  with multihost.together():
    for leaf, is_share, number in found:
      problems += _wrong_values(step_dir, manifest, leaf, next(sums) if is_share else number)
    if problems:
      raise damage(manifest.step, problems)
  return results


def _read_all(
  step_dir: epath.Path, manifest: Manifest, diff: Diff, verify: str, byte_budget: int
) -> tuple[dict[str, dict[str, Array]], list[tuple[LeafPair, bool, int]]]:
  """Reads the arrays; for each, whether this process's digest is only a share, and that digest."""
  results: dict[str, dict[str, Array]] = {}
  waiting: list[tuple[LeafPair, bool, Callable[[], int]]] = []
  for item, group in itertools.groupby(diff.matches, lambda leaf: leaf.item):
    leaves = [*group]
    last_use = {leaf.saved.folder: leaf for leaf in leaves}
    arrays = _load(step_dir, manifest, leaves, byte_budget)
    for leaf in leaves:
      take = arrays.pop if leaf is last_use[leaf.saved.folder] else arrays.get
      array = take(leaf.saved.folder, None)
      results.setdefault(item, {})[leaf.path] = place(array, leaf)
      if verify == "full" and array is not None:
        is_share = isinstance(array, jax.Array) and not array.is_fully_addressable
        waiting.append((leaf, is_share, digest(array, leaf.on_disk.shape)))
  return results, [(leaf, is_share, number()) for leaf, is_share, number in waiting]


def check_values(
  step_dir: epath.Path, manifest: Manifest, *, byte_budget: int, mine: tuple[int, int] = (0, 1)
) -> Iterator[tuple[str, str]]:
  """Reads the arrays of a step to the host, a budget at a time, and compares the digests.

  `mine=(1, 4)` takes the second of each four arrays.

  Yields:
    The name of each damaged leaf, and its first problem.
  """
  pairs = [
    LeafPair(item, path, _on_host(saved), path, saved)
    for item, record in manifest.items.items()
    for path, saved in record.leaves.items()
    if saved.encoding != encoding.EMPTY
  ]
  for group in _groups(pairs[mine[0] :: mine[1]], byte_budget):
    try:
      arrays = _load(step_dir, manifest, group, byte_budget)
    except DamagedError:
      arrays = {}  # each array is read alone, to name the damaged arrays
    for leaf in group:
      try:
        found = arrays or _load(step_dir, manifest, [leaf], byte_budget)
        number = digest(found[leaf.saved.folder])()
        if problems := _wrong_values(step_dir, manifest, leaf, number):
          raise damage(manifest.step, problems)
      except DamagedError as error:
        yield leaf.name, error.what


def damaged_files(
  step_dir: epath.Path, manifest: Manifest, names: Iterable[str], *, hashed: str = "all"
) -> dict[str, str]:
  """Lists files that are missing, cut short, unreadable, or changed, each with its problem.

  `hashed` says which small files have their contents checked: `"all"`, only `"metadata"`, or `"none"`.

  Raises:
    CheckpointError: a file that this machine cannot read at the moment.
  """
  files, size_of = list(names), storage.sizes_in(step_dir)
  problems = storage.each(lambda name: _problem(step_dir, manifest, name, size_of, hashed), files)
  return {name: f"{name} {problem}" for name, problem in zip(files, problems, strict=True) if problem}


def _problem(
  step_dir: epath.Path, manifest: Manifest, name: str, size_of: Callable[[str], int], hashed: str
) -> str:
  file, size = step_dir / name, manifest.files[name]
  holds_values = name.split("/")[2:3] == ["c"]  # ITEM/FOLDER/c/...
  is_checked = hashed == "all" or (hashed == "metadata" and not holds_values)
  sha256 = manifest.hashes.get(name) if is_checked else None
  try:
    found = size_of(name)
    if found != size:
      return f"has {found:,} bytes instead of {size:,}"
    if (not size and is_no_file(file)) or (sha256 is not None and storage.sha256(file) != sha256):
      return "does not have the contents that were written"
  except FileNotFoundError:
    return "is missing"
  except OSError as error:
    raise_transient(error, f"{file}")
    return f"cannot be read ({error.strerror or error})"
  return ""


def _check_files(
  step_dir: epath.Path, manifest: Manifest, matches: Iterable[LeafPair], *, hashed: str
) -> None:
  """Checks the files of the leaves to restore, and their metadata; other files may be missing."""
  leaves = {(match.item, match.saved.folder) for match in matches}
  items = {item for item, _ in leaves}
  unread = {
    (item, leaf.folder)
    for item, record in manifest.items.items()
    for leaf in record.leaves.values()
    if (item, leaf.folder) not in leaves
  }

  def is_read(name: str) -> bool:
    item, _, rest = name.partition("/")
    return item not in manifest.items or (item in items and (item, rest.partition("/")[0]) not in unread)

  names = [name for name in manifest.files if is_read(name)]
  if problems := damaged_files(step_dir, manifest, names, hashed=hashed):
    raise damage(manifest.step, [*problems.values()])


def _files_of(step_dir: epath.Path, manifest: Manifest, match: LeafPair) -> list[str]:
  """The problems of the files of a leaf."""
  folder = f"{match.item}/{match.saved.folder}/"
  names = [name for name in manifest.files if name.startswith(folder)]
  return [*damaged_files(step_dir, manifest, names).values()]


def _wrong_values(step_dir: epath.Path, manifest: Manifest, leaf: LeafPair, number: int) -> list[str]:
  """The problems of a leaf with this digest, its damaged files first; empty for a good leaf."""
  if number == leaf.saved.digest:
    return []
  where = f"{leaf.item}/{leaf.saved_path}"
  text = f"the values of {where} differ from the saved values (files under {leaf.item}/{leaf.saved.folder})"
  return [*_files_of(step_dir, manifest, leaf), text]


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
    return array_io.read(step_dir / item, stored, targets, byte_budget=byte_budget)
  except _READ_ERRORS as error:
    raise_transient(error, f"{step_dir / item}")
    if len(group) == 1:
      (leaf,) = group
      raise damage(
        step_dir.name,
        [
          *_files_of(step_dir, manifest, leaf),
          f"{item}/{leaf.saved_path} cannot be read "
          f"(files under {item}/{leaf.saved.folder}, or the metadata of {item})",
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
