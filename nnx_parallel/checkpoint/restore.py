"""Restoring: from a committed step to arrays in the target's layout, verified."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from etils import epath

from nnx_parallel.checkpoint import agree, encoding, files, store
from nnx_parallel.checkpoint.digest import block_ranges, digest, totals
from nnx_parallel.checkpoint.encoding import Array
from nnx_parallel.checkpoint.manifest import DamagedError, LeafRecord, Manifest, is_no_file
from nnx_parallel.checkpoint.passing import raise_passing
from nnx_parallel.checkpoint.preflight import Diff, Match, Wanted, shard_bytes

logger = logging.getLogger(__name__)

# What files that are not what was written make their readers raise.
_READ_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError, MemoryError)
VERIFY = ("full", "metadata", "off")


@dataclasses.dataclass(frozen=True)
class _Read:
  match: Match
  stored: jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class _Digested:
  read: _Read
  spread: bool  # over processes, each of which has found its own share
  digests: tuple[int, ...]


def wanted_from(struct: jax.ShapeDtypeStruct, shape: tuple[int, ...] | None = None) -> Wanted:
  """A target's leaf; `shape` is the logical shape of a padded one."""
  return Wanted(struct, tuple(struct.shape if shape is None else shape))


def read(
  step_dir: epath.Path, manifest: Manifest, diff: Diff, *, verify: str, byte_budget: int
) -> dict[str, dict[str, Array]]:
  """Reads all matched leaves, half a budget at a time, verifying one group while reading the next.

  Args:
    step_dir: of the step.
    manifest: of the step.
    diff: fits.
    verify: `full` compares every value's digest and the contents of the metadata, `metadata` those of all
      small files, `off` nothing; but for `off`, the sizes of the files too.
    byte_budget: most bytes in flight.

  Returns:
    Arrays by item and the target's path.

  Raises:
    DamagedError: names the leaf and the files that are not what was saved.
  """
  logger.info(
    "restoring step %d: reading %s bytes; at most %s bytes of host memory here",
    manifest.step,
    f"{diff.bytes_read:,}",
    f"{diff.host_bytes:,}",
  )
  if verify != "off":
    agree.together(
      lambda: _raise(_damage_of_files(step_dir, manifest, diff.matches, chunks=verify == "metadata"))
    )
  results, digested = agree.together(lambda: _read_all(step_dir, manifest, diff, verify, byte_budget))
  # Only now, when no process can fail before it, do they add up their digests.
  summed = _added_up(digested)
  agree.together(lambda: _raise(_damage_of_values(step_dir, manifest, summed)))
  return results


def _raise(error: Exception | None) -> None:
  if error is not None:
    raise error


def _read_all(
  step_dir: epath.Path, manifest: Manifest, diff: Diff, verify: str, byte_budget: int
) -> tuple[dict[str, dict[str, Array]], list[_Digested]]:
  """The arrays, and what this process found of their digests; it waits for no other process."""
  results: dict[str, dict[str, Array]] = {}
  waiting: list[tuple[_Read, bool, jax.Array]] = []
  with store.readers() as pool:
    # Two groups are in flight: one is read while the other is placed, and its digests are started.
    groups = _groups(diff.matches, byte_budget // 2)
    started = ((group, _start(step_dir, manifest, group, byte_budget, pool)) for group in groups)
    following = next(started, None)
    while following is not None:
      group, finish = following
      following = next(started, None)
      arrays = finish()
      for one in group:
        array = arrays.get(one.match.saved.folder)
        results.setdefault(one.match.item, {})[one.match.path] = place(array, one.match)
        if verify == "full" and array is not None:
          parts = digest(array, one.match.stored_form(one.stored).shape, one.match.saved.block)
          waiting.append((one, _is_spread(array), parts))
  return results, [_Digested(one, spread, totals(parts)) for one, spread, parts in waiting]


def _is_spread(array: Array) -> bool:
  return isinstance(array, jax.Array) and not array.is_fully_addressable


def _added_up(digested: Sequence[_Digested]) -> list[_Digested]:
  """The digests with the shares of all processes, in arrays that are spread over them."""
  sums = iter(agree.added_up([number for one in digested if one.spread for number in one.digests]))
  return [
    dataclasses.replace(one, digests=tuple(next(sums) for _ in one.digests)) if one.spread else one
    for one in digested
  ]


def check_values(
  step_dir: epath.Path, manifest: Manifest, *, byte_budget: int
) -> Iterator[tuple[str, DamagedError | None]]:
  """Reads every array of a step to the host, one after the other, and compares the digests.

  Yields:
    Each leaf's name, and what is wrong with it or None.
  """
  for item, record in manifest.items.items():
    matches = [
      Match(item, path, wanted_from(jax.ShapeDtypeStruct(leaf.shape, np.uint8)), path, leaf)
      for path, leaf in record.leaves.items()
    ]
    for match in matches:
      if match.saved.encoding == encoding.EMPTY:
        yield match.name, None
        continue
      one = _Read(match, _stored_on_host(match.saved))
      try:
        array = _load(step_dir, manifest, [one], byte_budget)[match.saved.folder]
      except DamagedError as error:
        yield match.name, error
        continue
      digests = totals(digest(array, block=match.saved.block))
      yield match.name, _damage_of_values(step_dir, manifest, [_Digested(one, False, digests)])


def damaged_files(
  step_dir: epath.Path, manifest: Manifest, names: Iterable[str], *, chunks: bool = True
) -> dict[str, str]:
  """Says which of the named files are missing, cut short, unreadable, or not what was written.

  Args:
    step_dir: of the step.
    manifest: of the step.
    names: of files in the manifest.
    chunks: whether the contents of files that hold values are looked at too, as far as they are small.

  Returns:
    What is wrong, by name.

  Raises:
    CheckpointError: a file that cannot be read for a reason that says nothing of the file.
  """
  problems: dict[str, str] = {}
  for name in names:
    sha256 = manifest.hashes.get(name) if chunks or not _holds_values(name) else None
    try:
      problem = _problem_of_file(step_dir / name, manifest.files[name], sha256)
    except OSError as error:
      raise_passing(error, f"{step_dir / name}")
      problem = f"cannot be read ({error.strerror or error})"
    if problem:
      problems[name] = f"{name} {problem}"
  return problems


def _problem_of_file(file: epath.Path, size: int, sha256: str | None) -> str:
  try:
    found = file.stat().length
    is_pipe = not size and is_no_file(file)
    if found == size and not is_pipe and (sha256 is None or files.sha256(file) == sha256):
      return ""
  except FileNotFoundError:
    return "is missing"
  return (
    f"has {found:,} bytes instead of {size:,}"
    if found != size
    else "does not have the contents that were written"
  )


def damage(step: object, problems: Sequence[str]) -> DamagedError:
  """The error for a damaged step."""
  return DamagedError(
    f"step {step} is damaged: {problems[0]}.",
    details="\n".join(problems[1:9]),
    fix='restore(..., on_corrupt="fallback") takes the newest good step; '
    "`nnx-parallel verify DIR` checks them all.",
  )


def _damage_of_files(
  step_dir: epath.Path, manifest: Manifest, matches: Iterable[Match], *, chunks: bool
) -> DamagedError | None:
  """Checks the files of the wanted leaves, and what they have in common; others may be gone."""
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
  problems = damaged_files(step_dir, manifest, names, chunks=chunks)
  return damage(manifest.step, [*problems.values()]) if problems else None


def _damaged_files_of(step_dir: epath.Path, manifest: Manifest, match: Match) -> list[str]:
  folder = f"{match.item}/{match.saved.folder}/"
  names = [name for name in manifest.files if name.startswith(folder)]
  return [*damaged_files(step_dir, manifest, names).values()]


def _holds_values(name: str) -> bool:
  """Whether a file of a step lies under `ITEM/FOLDER/c`, where the values are."""
  return name.split("/")[2:3] == ["c"]


def _damage_of_values(
  step_dir: epath.Path, manifest: Manifest, digested: Iterable[_Digested]
) -> DamagedError | None:
  """Names the ranges that are not what was saved, after the files where these are known."""
  values: list[str] = []
  damaged: list[str] = []
  for one in digested:
    match = one.read.match
    folder = f"{match.item}/{match.saved.folder}"
    blocks = _damaged_blocks(one)
    values += [
      f"the values of {match.item}/{match.saved_path}{where} are not those that were saved "
      f"(files under {folder})"
      for where in blocks
    ]
    if blocks:
      damaged += _damaged_files_of(step_dir, manifest, match)
  return damage(step_dir.name, [*damaged, *values]) if values else None


def _damaged_blocks(one: _Digested) -> list[str]:
  """The ranges whose digests are not those that were saved."""
  match = one.read.match
  saved, shape = match.saved, match.stored_form(one.read.stored).shape
  pairs = zip(one.digests, saved.digests, strict=True)
  return [block_ranges(i, shape, saved.block) for i, (found, wanted) in enumerate(pairs) if found != wanted]


def _groups(matches: Iterable[Match], byte_budget: int) -> Iterator[list[_Read]]:
  """Cuts the reads into groups of about the budget; padded leaves are read apart from the others."""
  groups: dict[bool, list[_Read]] = {False: [], True: []}
  sizes = {False: 0, True: 0}
  item = None
  for match in matches:
    one = _Read(match, match.stored)
    padded, size = one.match.wanted.struct.shape != match.saved.shape, shard_bytes(one.stored)
    if match.item != item or sizes[padded] + size > byte_budget:
      flush = list(groups) if match.item != item else [padded]
      for key in flush:
        if groups[key]:
          yield groups[key]
        groups[key], sizes[key] = [], 0
      item = match.item
    groups[padded].append(one)
    sizes[padded] += size
  yield from (group for group in groups.values() if group)


def _load(
  step_dir: epath.Path, manifest: Manifest, group: Sequence[_Read], byte_budget: int
) -> dict[str, Array]:
  with store.readers() as pool:
    return _start(step_dir, manifest, group, byte_budget, pool)()


def _start(
  step_dir: epath.Path,
  manifest: Manifest,
  group: Sequence[_Read],
  byte_budget: int,
  pool: concurrent.futures.Executor,
) -> Callable[[], dict[str, Array]]:
  """Starts to read a group; the returned function waits, and raises `DamagedError`."""
  item = group[0].match.item
  targets = {
    one.match.saved.folder: one.stored for one in group if one.match.saved.encoding != encoding.EMPTY
  }
  if not targets:
    return dict
  leaves = manifest.items[item].leaves.values()
  stored = {leaf.folder for leaf in leaves if leaf.encoding != encoding.EMPTY}
  read = failed = None
  try:
    forms = {one.match.saved.folder: one.match.stored_form(one.stored) for one in group}
    opened = store.open_arrays(step_dir / item, {name: forms[name] for name in targets})
    if opened is not None:
      read = store.start(opened, targets, pool)
  except _READ_ERRORS as error:
    failed = error

  def finish() -> dict[str, Array]:
    try:
      if failed is not None:
        raise failed
      if read is not None:
        return read()
      pad = any(one.match.stored_form(one.stored).shape != one.stored.shape for one in group)
      tree = {**dict.fromkeys(stored, store.PLACEHOLDER), **targets}
      loaded = store.load(step_dir, item, tree, byte_budget=byte_budget, pad=pad)
      return {name: loaded[name] for name in targets}
    except _READ_ERRORS as error:
      raise_passing(error, f"{step_dir / item}")
      if len(group) == 1:
        match = group[0].match
        raise damage(
          step_dir.name,
          [
            *_damaged_files_of(step_dir, manifest, match),
            f"{item}/{match.saved_path} cannot be read "
            f"(files under {item}/{match.saved.folder}, or the metadata of {item})",
            str(error)[:300],
          ],
        ) from error
    # One of several arrays failed: read them alone to learn which.
    return {
      name: array for one in group for name, array in _load(step_dir, manifest, [one], byte_budget).items()
    }

  return finish


def _stored_on_host(leaf: LeafRecord) -> jax.ShapeDtypeStruct:
  key, _, implementation = leaf.encoding.partition(":")
  dtype = encoding.key_dtype(implementation) if key == "key" else np.dtype(leaf.dtype)
  return encoding.stored_form(leaf.shape, dtype, leaf.encoding, None)


def place(array: Array | None, match: Match) -> Array:
  """Turns what was read (None for an array without elements) into the leaf, in its dtype and sharding."""
  struct, saved = match.wanted.struct, match.saved
  if array is None:
    return _without_elements(struct)
  leaf = encoding.decode(array, saved.encoding, saved.dtype)
  if leaf.dtype != struct.dtype:
    leaf = leaf.astype(struct.dtype)
  if isinstance(leaf, np.ndarray) and struct.sharding is not None:
    values = leaf  # of 64 bits, and read to the host because jax makes no such arrays now
    return jax.make_array_from_callback(values.shape, struct.sharding, lambda index: values[index])
  if isinstance(leaf, jax.Array) and struct.sharding is not None and leaf.sharding != struct.sharding:
    leaf = jax.device_put(leaf, struct.sharding)
  return leaf


def _without_elements(struct: jax.ShapeDtypeStruct) -> Array:
  if struct.sharding is None:
    return np.zeros(struct.shape, struct.dtype)
  if not encoding.is_key(struct.dtype):
    return jax.numpy.zeros(struct.shape, struct.dtype, device=struct.sharding)
  data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(struct.shape, struct.dtype))
  keys = encoding.decode(np.zeros(data.shape, data.dtype), encoding.key_encoding(struct.dtype), "")
  return jax.device_put(keys, struct.sharding)
