"""Saving: from trees of leaves to a committed step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from nnx_parallel.checkpoint import encoding, folders, manifest, multihost, paths, store
from nnx_parallel.checkpoint.catalog import Place
from nnx_parallel.checkpoint.diff import layout_text
from nnx_parallel.checkpoint.digest import block_shape, digest_later, totals
from nnx_parallel.checkpoint.encoding import Array, Json
from nnx_parallel.checkpoint.manifest import ItemRecord, LeafRecord, Manifest
from nnx_parallel.checkpoint.relayout import without_padding
from nnx_parallel.errors import CheckpointError

logger = logging.getLogger(__name__)

# Files up to this size are hashed as a whole: all of the metadata, none of the large arrays.
_HASHED_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Tree:
  """One item to save.

  Attributes:
    leaves: arrays and JSON values by path as text.
    shapes: logical shapes of the arrays that are padded.
    kinds: Variable types, where known.
  """

  leaves: Mapping[str, object]
  shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict[str, Any])
  kinds: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


@dataclasses.dataclass(frozen=True)
class Content:
  """The encoded content of a step.

  Attributes:
    items: the records, by item.
    arrays: what is stored, by item and folder.
    cut_bytes: device memory that this process holds for arrays that were padded, cut to their logical shape.
  """

  items: Mapping[str, ItemRecord]
  arrays: Mapping[str, Mapping[str, Array]]
  cut_bytes: int

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays."""
    return sum(leaf.nbytes for item in self.items.values() for leaf in item.leaves.values())


@dataclasses.dataclass(frozen=True)
class Request:
  """The arguments of `Checkpointer.save`, checked and encoded."""

  step: int
  content: Content
  extra: Mapping[str, Json]
  metrics: Mapping[str, float]
  plan: Json
  overwrite: bool


def prepare(trees: Mapping[str, Tree]) -> Content:
  """Checks and encodes the leaves.

  Raises:
    CheckpointError: a leaf that cannot be stored, named by its path.
  """
  items: dict[str, ItemRecord] = {}
  arrays: dict[str, dict[str, Array]] = {}
  cut_bytes = 0
  for item, tree in trees.items():
    records: dict[str, LeafRecord] = {}
    values: dict[str, Json] = {}
    stored: dict[str, Array] = {}
    for path, leaf in tree.leaves.items():
      name = f"{item}/{path}"
      if not encoding.is_array(leaf):
        values[path] = encoding.check_json(leaf, path=name)
        continue
      record, array = _encode_leaf(name, path, leaf, tree)  # pyright: ignore[reportArgumentType]
      records[path] = record
      if array is not None:
        stored[record.folder] = array
        if isinstance(array, jax.Array) and record.shape != leaf.shape:  # pyright: ignore[reportAttributeAccessIssue]
          cut_bytes += sum(shard.data.nbytes for shard in array.addressable_shards)
    items[item] = ItemRecord(records, values)
    if stored:
      arrays[item] = stored
  return Content(items, arrays, cut_bytes)


def write(
  directory: epath.Path,
  request: Request,
  *,
  place: Place | None,
  chunk_bytes: int | None,
  byte_budget: int,
  background: bool,
) -> Callable[[], None]:
  """Starts writing a step; in the background, arrays may be donated or changed as soon as this returns.

  Args:
    directory: exists and is locked by the caller.
    request: what to save; a step that exists is replaced.
    place: in the lineage of its run; only process 0 needs it.
    chunk_bytes: see `store.start_save`.
    byte_budget: see `store.start_save`.
    background: see `store.start_save`.

  Returns:
    A function that waits until everything is on the disk and commits it.
  """
  step, content = request.step, request.content
  # Before the write, whose threads want the same cores; and whether or not that can begin, because the
  # processes of a job add up their digests together.
  digests = _start_digests(content)
  final = directory / str(step)
  folder = directory / f"{step}{folders.SAVING}" if folders.is_local(directory) else final
  if folder == final and jax.process_index() == 0:
    folders.mark(directory, step, folders.SAVING)
  pending = None
  if content.arrays:
    copies = store.host_bytes_to_save(content.arrays, byte_budget=byte_budget, background=background)
    logger.info(
      "saving step %d: %s bytes of arrays; at most %s bytes of host memory here%s",
      step,
      f"{content.nbytes:,}",
      f"{copies:,}",
      f", and {content.cut_bytes:,} bytes beside the padded arrays" if content.cut_bytes else "",
    )
  elif jax.process_index() == 0:
    folder.mkdir()
  with contextlib.ExitStack() as stack:
    stack.enter_context(store.quiet())
    if content.arrays:
      pending = store.start_save(
        folder, content.arrays, chunk_bytes=chunk_bytes, byte_budget=byte_budget, background=background
      )
    quiet = stack.pop_all()

  def finish() -> None:
    with quiet:
      try:
        parts = {leaf: later() for leaf, later in digests.items()}
        digests.clear()
      finally:
        if pending is not None:
          pending()
    items = _with_digests(content, parts)
    if place is None:
      return
    sizes = folders.all_files(folder)
    _require_stored(step, items, sizes)
    record = Manifest(
      step=step,
      items=items,
      extra=request.extra,
      metrics=request.metrics,
      plan=request.plan,
      versions=manifest.versions(),
      fingerprint=manifest.fingerprint(items),
      time=place.stamp(),
      files=sizes,
      hashes={name: folders.sha256(folder / name) for name, n in sizes.items() if n <= _HASHED_BYTES},
      parent=place.parent,
    )
    manifest.write(record, folder)
    folders.make_tree_durable(folder)
    if folder != final:
      folders.commit(folder, final)
    else:  # the manifest was the commit
      (directory / f"{step}{folders.SAVING}").unlink()

  return finish


def abandon(directory: epath.Path, step: int) -> None:
  """Removes what a failed save left. The next save removes what remains."""
  if jax.process_index() != 0:
    return
  with contextlib.suppress(OSError):
    if not folders.is_local(directory):
      folders.recover(directory)
      return
    for entry in directory.glob(f"{step}{folders.SAVING}*"):
      entry.rmtree()


def _encode_leaf(
  name: str, path: str, leaf: Array | np.generic, tree: Tree
) -> tuple[LeafRecord, Array | None]:
  if isinstance(leaf, jax.Array) and leaf.is_deleted():
    raise CheckpointError(
      f"cannot save {name}: its array was donated to a compiled function and is gone.",
      fix="save the arrays that the step returned, or save before the step.",
    )
  array = encoding.plain_array(leaf, path=name)
  shape = tuple(tree.shapes.get(path, array.shape))
  how = encoding.encoding_of(shape, array.dtype, path=name)
  stored = None
  if how != encoding.EMPTY:
    stored = encoding.encode(array, how)
    if shape != array.shape and isinstance(stored, jax.Array):
      stored = without_padding(stored, shape + stored.shape[array.ndim :])
  return LeafRecord(
    folder=paths.file_name(path),
    shape=shape,
    dtype=encoding.dtype_name(array.dtype),
    encoding=how,
    kind=tree.kinds.get(path, ""),
    nbytes=stored.nbytes if stored is not None else 0,
    block=block_shape(tuple(stored.shape), stored.dtype.itemsize) if stored is not None else (),
    digests=(),
    layout=layout_text(leaf.sharding) if isinstance(leaf, jax.Array) else "",
  ), stored


def _start_digests(content: Content) -> dict[tuple[str, str], Callable[[], jax.Array]]:
  return {
    (item, path): digest_later(content.arrays[item][leaf.folder], leaf.block)
    for item, record in content.items.items()
    for path, leaf in record.leaves.items()
    if leaf.encoding != encoding.EMPTY
  }


def _with_digests(content: Content, parts: Mapping[tuple[str, str], jax.Array]) -> dict[str, ItemRecord]:
  known = {leaf: totals(numbers) for leaf, numbers in parts.items()}
  return {
    item: dataclasses.replace(
      record,
      leaves={
        path: dataclasses.replace(leaf, digests=known.get((item, path), ()))
        for path, leaf in record.leaves.items()
      },
    )
    for item, record in content.items.items()
  }


def _require_stored(step: int, items: Mapping[str, ItemRecord], names: Iterable[str]) -> None:
  """Raises when an array has no file in the step's folder."""
  there = {"/".join(name.split("/")[:2]) for name in names}
  lost = [
    f"{item}/{path}"
    for item, record in items.items()
    for path, leaf in record.leaves.items()
    if leaf.encoding != encoding.EMPTY and f"{item}/{leaf.folder}" not in there
  ]
  if lost:
    raise CheckpointError(
      f"cannot save step {step}: there are no files of {', '.join(sorted(lost)[:8])}.",
      details=f"{len(lost)} arrays were stored elsewhere, or not at all",
      fix="choose a directory whose path has letters, digits, dots and dashes only.",
    )


def require_same(directory: epath.Path, request: Request) -> None:
  """Raises on all processes when they are about to save different things."""
  rows = [
    f"{item}/{path} {leaf.shape} {leaf.dtype}"
    for item, record in request.content.items.items()
    for path, leaf in record.leaves.items()
  ]
  text = "\n".join([f"{directory} step {request.step}", *rows])
  multihost.require_same("what to save", text)
