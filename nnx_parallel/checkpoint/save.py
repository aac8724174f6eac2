"""Saving: from trees of leaves to a committed step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping

import jax
from etils import epath
from flax import nnx

from nnx_parallel.checkpoint import array_io, encoding, manifest, storage
from nnx_parallel.checkpoint.diff import layout_text
from nnx_parallel.checkpoint.encoding import Array, Json
from nnx_parallel.checkpoint.manifest import ItemRecord, LeafRecord, Manifest
from nnx_parallel.checkpoint.relayout import without_padding
from nnx_parallel.checkpoint.storage import Storage
from nnx_parallel.core.nodes import kind_of, value_of
from nnx_parallel.core.padding import is_padded
from nnx_parallel.core.types import Leaf
from nnx_parallel.errors import CheckpointError

logger = logging.getLogger(__name__)


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


def check(roots: Mapping[str, Mapping[str, Leaf]]) -> int:
  """Checks that leaves can be saved, as `encode` does, and returns the bytes of the arrays."""
  total = 0
  for item, leaves in roots.items():
    for path, leaf in leaves.items():
      name, value = f"{item}/{path}", value_of(leaf)
      if not encoding.is_array(value):
        encoding.check_json(value, path=name)
        continue
      encoding.encoding_of(value.shape, value.dtype, path=name)
      total += value.size * value.dtype.itemsize
  return total


def write(
  where: Storage, request: Request, *, chunk_bytes: int | None, byte_budget: int, background: bool
) -> Callable[[float], None]:
  """Starts writing a step; the returned function waits, and may be called again after a `TimeoutError`.

  The caller has locked the storage. In the background, arrays may be donated or changed as soon as this
  returns.
  """
  content, folder = request.content, where.saving(request.step)
  if jax.process_index() == 0:
    where.begin(request.step)
  if not content.arrays:
    if jax.process_index() == 0:
      folder.mkdir()
    return lambda seconds: None
  copies = array_io.host_bytes_to_save(content.arrays, byte_budget=byte_budget, background=background)
  cut = f", and {content.cut_bytes:,} bytes in addition to the padded arrays" if content.cut_bytes else ""
  logger.info(
    "saving step %d: %s bytes of arrays; at most %s bytes of host memory here%s",
    request.step,
    f"{content.nbytes:,}",
    f"{copies:,}",
    cut,
  )
  with contextlib.ExitStack() as stack:
    stack.enter_context(array_io.quiet())
    wait = array_io.start_save(
      folder, content.arrays, chunk_bytes=chunk_bytes, byte_budget=byte_budget, background=background
    )
    quiet = stack.pop_all()

  def finish(seconds: float) -> None:
    try:
      wait(seconds)
    except TimeoutError:
      raise
    except BaseException:
      quiet.close()
      raise
    quiet.close()

  return finish


def commit(where: Storage, request: Request) -> None:
  """Writes the manifest of a step whose arrays are all written, and makes it a step. For process 0."""
  folder, content = where.saving(request.step), request.content
  storage.tell_apart(folder)
  files = storage.all_files(folder)
  if lost := [item for item in content.arrays if f"{item}/{array_io.MERGED}" not in files]:
    raise CheckpointError(
      f"cannot save step {request.step}: there are no files of {', '.join(lost)}.",
      details="its arrays were stored elsewhere, or not at all",
      fix="choose a directory whose path has letters, digits, dots and dashes only.",
    )
  record = Manifest(
    step=request.step,
    items=content.items,
    extra=request.extra,
    metrics=request.metrics,
    plan=request.plan,
    versions=manifest.versions(),
    time=min(max(time.time(), 0.0), manifest.LATEST),  # the clock may be wrong
    files=files,
  )
  manifest.write(record, folder)
  where.commit(request.step)


def describe(directory: epath.Path, request: Request) -> str:
  """What a process is about to save, which must be the same on all."""
  rows = [
    f"{item}/{path} {leaf.shape} {leaf.dtype}"
    for item, record in request.content.items.items()
    for path, leaf in record.leaves.items()
  ]
  return "\n".join([f"{directory} step {request.step}", *rows])


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
