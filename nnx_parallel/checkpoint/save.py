"""Saving: from trees of leaves to a committed step."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping

import jax
from flax import nnx

from nnx_parallel.checkpoint import array_io, encoding, manifest, storage
from nnx_parallel.checkpoint.encoding import Array, Json
from nnx_parallel.checkpoint.manifest import ItemRecord, LeafRecord, Manifest
from nnx_parallel.checkpoint.storage import Storage
from nnx_parallel.core.nodes import kind_of, value_of
from nnx_parallel.core.padding import is_padded
from nnx_parallel.core.types import Leaf
from nnx_parallel.create.relayout import layout_text, without_padding
from nnx_parallel.errors import CheckpointError

logger = logging.getLogger(__name__)
Roots = Mapping[str, Mapping[str, Leaf]]
"""Variables, arrays and JSON values, by item and path."""


@dataclasses.dataclass(frozen=True)
class Request:
  """The arguments of `Checkpointer.save`, checked: what the manifest will hold, and the stored arrays."""

  step: int
  items: Mapping[str, ItemRecord]
  arrays: Mapping[str, Mapping[str, Array]]
  cut_bytes: int
  extra: Mapping[str, Json]
  metrics: Mapping[str, float]
  plan: Json
  overwrite: bool

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays."""
    return manifest.nbytes_of(self.items)

  @property
  def summary(self) -> str:
    """The leaves, which must be the same on all processes."""
    leaves = [leaf for item in self.items.values() for leaf in item.leaves.values()]
    return "\n".join([*self.items, *(f"{leaf.folder} {leaf.shape} {leaf.dtype}" for leaf in leaves)])


def describe(roots: Roots) -> dict[str, ItemRecord]:
  """The records of leaves, which are checked; nothing is computed or copied."""
  items: dict[str, ItemRecord] = {}
  for item, leaves in roots.items():
    items[item] = ItemRecord(records := {}, values := {})
    for path, leaf in leaves.items():
      if encoding.is_array(value_of(leaf)):
        records[path] = _record(path, leaf, f"{item}/{path}")
      else:
        values[path] = encoding.check_json(value_of(leaf), path=f"{item}/{path}")
  return items


def _record(path: str, leaf: Leaf, name: str) -> LeafRecord:
  value = value_of(leaf)
  if isinstance(value, jax.Array) and value.is_deleted():
    raise CheckpointError(
      f"cannot save {name}: its array was donated to a compiled function and is gone.",
      fix="save the arrays that the step returned, or save before the step.",
    )
  array = encoding.plain_array(value, path=name)
  shape = tuple(leaf.shape if is_padded(leaf) else array.shape)
  dtype, how = encoding.dtype_name(array.dtype), encoding.encoding_of(shape, array.dtype, path=name)
  words, itemsize = encoding.stored_words(dtype, how)
  return LeafRecord(
    folder=manifest.file_name(path),
    shape=shape,
    dtype=dtype,
    encoding=how,
    kind=kind_of(leaf) if isinstance(leaf, nnx.Variable) else "",
    nbytes=math.prod(shape + words) * itemsize,
    layout=layout_text(value.sharding) if isinstance(value, jax.Array) else "",
  )


def encode(roots: Roots, items: Mapping[str, ItemRecord]) -> tuple[dict[str, dict[str, Array]], int]:
  """The arrays to store, by item and folder, and the bytes on devices here of those that lost padding."""
  arrays: dict[str, dict[str, Array]] = {}
  cut_bytes = 0
  for item, record in items.items():
    for path, leaf in record.leaves.items():
      if leaf.encoding == encoding.EMPTY:
        continue
      array = encoding.plain_array(value_of(roots[item][path]), path=path)
      stored = encoding.encode(array, leaf.encoding)
      if leaf.shape != array.shape and isinstance(stored, jax.Array):
        stored = without_padding(stored, leaf.shape + stored.shape[array.ndim :])
        cut_bytes += sum(shard.data.nbytes for shard in stored.addressable_shards)
      arrays.setdefault(item, {})[leaf.folder] = stored
  return arrays, cut_bytes


def write(
  where: Storage, request: Request, *, chunk_bytes: int | None, byte_budget: int, background: bool
) -> Callable[[float], None]:
  """Starts writing a step, as `start_save`; then its arrays may be donated. The caller has the lock."""
  arrays, cut_bytes, folder = request.arrays, request.cut_bytes, where.saving(request.step)
  if jax.process_index() == 0:
    where.begin(request.step)
    if not arrays:
      folder.mkdir()
  if not arrays:
    return lambda seconds: None
  copies = array_io.host_bytes_to_save(arrays, byte_budget=byte_budget, background=background)
  cut = f", and {cut_bytes:,} bytes in addition to the padded arrays" if cut_bytes else ""
  sizes = f"{request.nbytes:,} bytes of arrays; at most {copies:,} bytes of host memory here{cut}"
  logger.info("saving step %d: %s", request.step, sizes)
  return array_io.start_save(
    folder, arrays, chunk_bytes=chunk_bytes, byte_budget=byte_budget, background=background
  )


def commit(where: Storage, request: Request) -> None:
  """Writes the manifest of a step whose arrays are all written, and makes it a step. For process 0."""
  folder = where.saving(request.step)
  storage.tell_apart(folder)
  files = storage.all_files(folder)
  if lost := [item for item in request.arrays if f"{item}/{array_io.MERGED}" not in files]:
    raise CheckpointError(
      f"cannot save step {request.step}: there are no files of {', '.join(lost)}.",
      details="its arrays were stored elsewhere, or not at all",
      fix="choose a directory whose path has letters, digits, dots and dashes only.",
    )
  record = Manifest(
    step=request.step,
    items=request.items,
    extra=request.extra,
    metrics=request.metrics,
    plan=request.plan,
    versions=manifest.versions(),
    time=min(max(time.time(), 0.0), manifest.LATEST),  # the clock may be wrong
    files=files,
  )
  manifest.write(record, folder)
  where.commit(request.step)
