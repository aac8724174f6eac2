"""Saving: from trees of leaves to a committed step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping

import jax
from etils import epath
from flax import nnx

from nnx_parallel.checkpoint import array_io, encoding, manifest, multihost, storage
from nnx_parallel.checkpoint.catalog import Place
from nnx_parallel.checkpoint.diff import layout_text
from nnx_parallel.checkpoint.digest import digest_later
from nnx_parallel.checkpoint.encoding import Array, Json
from nnx_parallel.checkpoint.manifest import ItemRecord, LeafRecord, Manifest
from nnx_parallel.checkpoint.relayout import without_padding
from nnx_parallel.checkpoint.storage import Storage
from nnx_parallel.core.nodes import kind_of, value_of
from nnx_parallel.core.padding import is_padded
from nnx_parallel.core.types import Leaf
from nnx_parallel.errors import CheckpointError

logger = logging.getLogger(__name__)

# Files up to this size are hashed: all of the metadata, but no large arrays.
_HASHED_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Content:
  """The encoded content of a step.

  Attributes:
    items: the records, by item.
    arrays: the stored arrays, by item and folder.
    cut_bytes: device memory that this process holds for arrays that were padded, cut to their logical shape.
  """

  items: Mapping[str, ItemRecord]
  arrays: Mapping[str, Mapping[str, Array]]
  cut_bytes: int

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays."""
    return sum(item.nbytes for item in self.items.values())


@dataclasses.dataclass(frozen=True)
class Request:
  """The arguments of `Checkpointer.save`, checked and encoded."""

  step: int
  content: Content
  extra: Mapping[str, Json]
  metrics: Mapping[str, float]
  plan: Json
  overwrite: bool


def encode(roots: Mapping[str, Mapping[str, Leaf]]) -> Content:
  """Checks and encodes Variables, arrays and JSON values, given by item and path."""
  items: dict[str, ItemRecord] = {}
  arrays: dict[str, dict[str, Array]] = {}
  cut_bytes = 0
  for item, leaves in roots.items():
    records: dict[str, LeafRecord] = {}
    values: dict[str, Json] = {}
    stored: dict[str, Array] = {}
    for path, leaf in leaves.items():
      value = value_of(leaf)
      if not encoding.is_array(value):
        values[path] = encoding.check_json(value, path=f"{item}/{path}")
        continue
      record, array = _encode_leaf(item, path, leaf)
      records[path] = record
      if array is not None:
        stored[record.folder] = array
        if isinstance(array, jax.Array) and record.shape != value.shape:
          cut_bytes += sum(shard.data.nbytes for shard in array.addressable_shards)
    items[item] = ItemRecord(records, values)
    if stored:
      arrays[item] = stored
  return Content(items, arrays, cut_bytes)


def write(
  where: Storage,
  request: Request,
  *,
  place: Place | None,
  chunk_bytes: int | None,
  byte_budget: int,
  background: bool,
) -> Callable[[], None]:
  """Starts writing a step, and replaces an existing step; the returned function waits, and commits it.

  The caller has locked the storage. In the background, arrays may be donated or changed as soon as this
  returns. Only process 0 has a `place`.
  """
  step, content = request.step, request.content
  # Before the write, whose threads need the same cores.
  digests = {
    (item, path): digest_later(content.arrays[item][leaf.folder])
    for item, record in content.items.items()
    for path, leaf in record.leaves.items()
    if leaf.encoding != encoding.EMPTY
  }
  folder = where.saving(step)
  if jax.process_index() == 0:
    where.begin(step)
  wait = None
  with contextlib.ExitStack() as stack:
    stack.enter_context(array_io.quiet())
    if content.arrays:
      copies = array_io.host_bytes_to_save(content.arrays, byte_budget=byte_budget, background=background)
      logger.info(
        "saving step %d: %s bytes of arrays; at most %s bytes of host memory here%s",
        step,
        f"{content.nbytes:,}",
        f"{copies:,}",
        f", and {content.cut_bytes:,} bytes in addition to the padded arrays" if content.cut_bytes else "",
      )
      wait = array_io.start_save(
        folder, content.arrays, chunk_bytes=chunk_bytes, byte_budget=byte_budget, background=background
      )
    elif jax.process_index() == 0:
      folder.mkdir()
    quiet = stack.pop_all()

  def finish() -> None:
    # A training loop has the main thread, so its order among other blocks may differ between processes.
    with quiet, multihost.together(f"save to {where.directory}") as block:
      block.mine = [later() for later in digests.values()]
      names = [*digests]
      digests.clear()
      if wait is not None:
        block.wait_for(wait)
    if place is None:
      return
    sums = dict(zip(names, multihost.summed(block.found), strict=True))
    items = _with_digests(content.items, sums)
    sizes = storage.all_files(folder)
    _require_stored(step, items, sizes)
    small = [name for name, size in sizes.items() if size <= _HASHED_BYTES]
    hashes = storage.each(lambda name: storage.sha256(folder / name), small)
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
      hashes=dict(zip(small, hashes, strict=True)),
      parent=place.parent,
    )
    manifest.write(record, folder)
    where.commit(step)

  return finish


def _encode_leaf(item: str, path: str, leaf: Leaf) -> tuple[LeafRecord, Array | None]:
  name, value = f"{item}/{path}", value_of(leaf)
  if isinstance(value, jax.Array) and value.is_deleted():
    raise CheckpointError(
      f"cannot save {name}: its array was donated to a compiled function and is gone.",
      fix="save the arrays that the step returned, or save before the step.",
    )
  array = encoding.plain_array(value, path=name)
  shape = tuple(leaf.shape if is_padded(leaf) else array.shape)
  how = encoding.encoding_of(shape, array.dtype, path=name)
  stored = None
  if how != encoding.EMPTY:
    stored = encoding.encode(array, how)
    if shape != array.shape and isinstance(stored, jax.Array):
      stored = without_padding(stored, shape + stored.shape[array.ndim :])
  return LeafRecord(
    folder=manifest.file_name(path),
    shape=shape,
    dtype=encoding.dtype_name(array.dtype),
    encoding=how,
    kind=kind_of(leaf) if isinstance(leaf, nnx.Variable) else "",
    nbytes=stored.nbytes if stored is not None else 0,
    layout=layout_text(value.sharding) if isinstance(value, jax.Array) else "",
  ), stored


def _with_digests(
  items: Mapping[str, ItemRecord], digests: Mapping[tuple[str, str], int]
) -> dict[str, ItemRecord]:
  return {
    item: ItemRecord(
      {
        path: dataclasses.replace(leaf, digest=digests.get((item, path), 0))
        for path, leaf in record.leaves.items()
      },
      record.values,
    )
    for item, record in items.items()
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
