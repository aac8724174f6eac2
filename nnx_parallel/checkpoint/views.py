"""Lazy views of stored arrays: transposed, split, merged, stacked, cast.

A view has a shape and dtype, and reads or writes any box of itself by reading or writing boxes of what it
stands on. So a mapping between two programs' weights works one shard at a time, in both directions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nnx_parallel.errors import CheckpointError

Box = tuple[slice, ...]
Block = np.ndarray[Any, Any]


def _keep() -> None:
  """Memory that is nobody's file stays."""


class View(Protocol):
  """A stored array, or a window onto one."""

  @property
  def shape(self) -> tuple[int, ...]:
    """Global shape in elements."""
    ...

  @property
  def dtype(self) -> np.dtype[Any]:
    """Element type."""
    ...

  def read(self, box: Box) -> Block:
    """The values of a box; every slice has a start and a stop."""
    ...

  def write(self, box: Box, values: Block) -> None:
    """Stores the values of a box."""
    ...


@dataclasses.dataclass(frozen=True)
class Memory:
  """A numpy array, possibly mapped from a file, as a view.

  Attributes:
    array: the values.
    forget: called after each read; lets the pages of a file go again.
  """

  array: Block
  forget: Callable[[], None] = _keep

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the array."""
    return self.array.shape

  @property
  def dtype(self) -> np.dtype[Any]:
    """Of the array."""
    return self.array.dtype

  def read(self, box: Box) -> Block:
    """A copy, because jax on CPU may keep the memory it is given."""
    values = np.array(self.array[box], copy=True, order="C")
    self.forget()
    return values

  def write(self, box: Box, values: Block) -> None:
    """Into the array itself."""
    self.array[box] = values


def mapped(file: Path) -> Callable[[int, tuple[int, ...], np.dtype[Any]], View]:
  """Maps a file to be read; the function makes views of arrays from their first byte, shape and dtype."""
  with file.open("rb") as stream:
    data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

  def view(begin: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> View:
    if not math.prod(shape):
      return Memory(np.empty(shape, dtype))  # without pages of its own to let go
    array = np.frombuffer(data, dtype, math.prod(shape), begin).reshape(shape)
    # Pages that were read stay in the page cache, but count no longer as this process's memory.
    first = begin - begin % mmap.PAGESIZE
    pages = first, begin + array.nbytes - first
    return Memory(array, functools.partial(data.madvise, mmap.MADV_DONTNEED, *pages))

  return view


@dataclasses.dataclass(frozen=True)
class InFile:
  """An array in a file that others write to as well, each its own bytes and no page around them.

  Attributes:
    file: it has its full size.
    begin: first byte of the array.
  """

  file: Path
  begin: int
  shape: tuple[int, ...]
  dtype: np.dtype[Any]

  def read(self, box: Box) -> Block:
    """What the file holds now."""
    return mapped(self.file)(self.begin, self.shape, self.dtype).read(box)

  def write(self, box: Box, values: Block) -> None:
    """One run of consecutive bytes after the other."""
    if not values.size:
      return
    dim = len(box)  # whole from here on
    while dim and box[dim - 1] == slice(0, self.shape[dim - 1]):
      dim -= 1
    strides = [math.prod(self.shape[at + 1 :]) * self.dtype.itemsize for at in range(len(box))]
    starts = np.array(self.begin)
    for at, (part, stride) in enumerate(zip(box[:dim], strides, strict=False)):
      places = np.arange(part.start, part.stop if at < dim - 1 else part.start + 1) * stride
      starts = np.add.outer(starts, places)
    runs = np.ascontiguousarray(values, self.dtype).reshape(starts.size, -1).view(np.uint8)
    with self.file.open("r+b", buffering=0) as stream:
      for start, run in zip(starts.flat, runs, strict=True):
        stream.seek(int(start))
        rest = memoryview(run)
        while rest:
          rest = rest[stream.write(rest) :]


@dataclasses.dataclass(frozen=True)
class Transposed:
  """Dims in another order: dim k of the view is dim `order[k]` of the source."""

  source: View
  order: tuple[int, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """In the new order."""
    return tuple(self.source.shape[dim] for dim in self.order)

  @property
  def dtype(self) -> np.dtype[Any]:
    """Of the source."""
    return self.source.dtype

  def read(self, box: Box) -> Block:
    """Reads the box in the source's order."""
    return self.source.read(self._inner(box)).transpose(self.order)

  def write(self, box: Box, values: Block) -> None:
    """Writes the box in the source's order."""
    self.source.write(self._inner(box), values.transpose(tuple(np.argsort(self.order))))

  def _inner(self, box: Box) -> Box:
    return tuple(box[int(k)] for k in np.argsort(self.order))


@dataclasses.dataclass(frozen=True)
class SplitDim:
  """Dim `dim` of the source as two dims, the second of size `size`: heads out of features."""

  source: View
  dim: int
  size: int

  @property
  def shape(self) -> tuple[int, ...]:
    """With one dim more."""
    shape = self.source.shape
    return (*shape[: self.dim], shape[self.dim] // self.size, self.size, *shape[self.dim + 1 :])

  @property
  def dtype(self) -> np.dtype[Any]:
    """Of the source."""
    return self.source.dtype

  def read(self, box: Box) -> Block:
    """Whole rows in one piece, parts of rows one by one."""
    out = np.empty([part.stop - part.start for part in box], self.dtype)
    for inner, rows, shape in self._pieces(box):
      self._rows(out, rows)[...] = self.source.read(inner).reshape(shape)
    return out

  def write(self, box: Box, values: Block) -> None:
    """Whole rows in one piece, parts of rows one by one."""
    for inner, rows, _ in self._pieces(box):
      piece = self._rows(values, rows)
      flat = [part.stop - part.start for part in inner]
      self.source.write(inner, piece.reshape(flat))

  def _rows(self, array: Block, rows: slice) -> Block:
    return array[(slice(None),) * self.dim + (rows,)]

  def _pieces(self, box: Box) -> Iterator[tuple[Box, slice, tuple[int, ...]]]:
    rows, columns = box[self.dim], box[self.dim + 1]
    before, after = box[: self.dim], box[self.dim + 2 :]
    step = rows.stop - rows.start if columns == slice(0, self.size) else 1
    for row in range(rows.start, rows.stop, max(step, 1)):
      start = row * self.size + columns.start
      stop = (row + step - 1) * self.size + columns.stop
      inner = (*before, slice(start, stop), *after)
      shape = [part.stop - part.start for part in (*before, rows, columns, *after)]
      shape[self.dim] = step
      yield inner, slice(row - rows.start, row - rows.start + step), tuple(shape)


@dataclasses.dataclass(frozen=True)
class MergedDims:
  """Dims `dim` and `dim + 1` of the source as one: features out of heads."""

  source: View
  dim: int

  @property
  def shape(self) -> tuple[int, ...]:
    """With one dim less."""
    shape = self.source.shape
    return (*shape[: self.dim], shape[self.dim] * shape[self.dim + 1], *shape[self.dim + 2 :])

  @property
  def dtype(self) -> np.dtype[Any]:
    """Of the source."""
    return self.source.dtype

  def read(self, box: Box) -> Block:
    """The rows that the box touches, at most three boxes of the source."""
    out = np.empty([part.stop - part.start for part in box], self.dtype)
    for inner, part in self._pieces(box):
      block = self.source.read(inner)
      self._part(out, part)[...] = block.reshape(self._part(out, part).shape)
    return out

  def write(self, box: Box, values: Block) -> None:
    """Exactly the box, at most three boxes of the source."""
    for inner, part in self._pieces(box):
      self.source.write(inner, self._part(values, part).reshape([p.stop - p.start for p in inner]))

  def _part(self, array: Block, part: slice) -> Block:
    return array[(slice(None),) * self.dim + (part,)]

  def _pieces(self, box: Box) -> Iterator[tuple[Box, slice]]:
    wanted, size = box[self.dim], self.source.shape[self.dim + 1]
    position = wanted.start
    while position < wanted.stop:
      row, column = divmod(position, size)
      whole = (wanted.stop - position) // size
      if column or not whole:
        stop = min(size, column + wanted.stop - position)
        rows, columns, taken = slice(row, row + 1), slice(column, stop), stop - column
      else:
        rows, columns, taken = slice(row, row + whole), slice(0, size), whole * size
      inner = (*box[: self.dim], rows, columns, *box[self.dim + 1 :])
      yield inner, slice(position - wanted.start, position - wanted.start + taken)
      position += taken


@dataclasses.dataclass(frozen=True)
class Stacked:
  """Several arrays of one shape as one, along a new dim."""

  sources: Sequence[View]
  dim: int

  @property
  def shape(self) -> tuple[int, ...]:
    """With one dim more."""
    shape = self.sources[0].shape
    return (*shape[: self.dim], len(self.sources), *shape[self.dim :])

  @property
  def dtype(self) -> np.dtype[Any]:
    """Of the sources."""
    return self.sources[0].dtype

  def read(self, box: Box) -> Block:
    """Only the sources that the box touches."""
    rest = box[: self.dim] + box[self.dim + 1 :]
    layers = range(box[self.dim].start, box[self.dim].stop)
    return np.stack([self.sources[layer].read(rest) for layer in layers], self.dim)

  def write(self, box: Box, values: Block) -> None:
    """Only the sources that the box touches."""
    rest = box[: self.dim] + box[self.dim + 1 :]
    for offset, layer in enumerate(range(box[self.dim].start, box[self.dim].stop)):
      self.sources[layer].write(rest, values.take(offset, self.dim))


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer of a stacked array."""

  source: View
  dim: int
  layer: int

  @property
  def shape(self) -> tuple[int, ...]:
    """With one dim less."""
    return self.source.shape[: self.dim] + self.source.shape[self.dim + 1 :]

  @property
  def dtype(self) -> np.dtype[Any]:
    """Of the source."""
    return self.source.dtype

  def read(self, box: Box) -> Block:
    """Only this layer."""
    return self.source.read(self._inner(box)).squeeze(self.dim)

  def write(self, box: Box, values: Block) -> None:
    """Only this layer."""
    self.source.write(self._inner(box), np.expand_dims(values, self.dim))

  def _inner(self, box: Box) -> Box:
    return (*box[: self.dim], slice(self.layer, self.layer + 1), *box[self.dim :])


@dataclasses.dataclass(frozen=True)
class Reshaped:
  """Any other shape of the same size; reads and writes the whole array."""

  source: View
  shape: tuple[int, ...]

  @property
  def dtype(self) -> np.dtype[Any]:
    """Of the source."""
    return self.source.dtype

  def read(self, box: Box) -> Block:
    """Reads everything, keeps the box."""
    return self.source.read(whole(self.source.shape)).reshape(self.shape)[box]

  def write(self, box: Box, values: Block) -> None:
    """Writes everything at once.

    Raises:
      CheckpointError: a part of the array, which would need the rest of it too.
    """
    if box != whole(self.shape):
      raise CheckpointError(
        f"cannot write a part {box} of an array that is reshaped to {self.shape}.",
        fix="use Split and Merge, which work on parts, or export from one device.",
      )
    self.source.write(whole(self.source.shape), values.reshape(self.source.shape))


@dataclasses.dataclass(frozen=True)
class Cast:
  """The same values in another dtype."""

  source: View
  dtype: np.dtype[Any]

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the source."""
    return self.source.shape

  def read(self, box: Box) -> Block:
    """Converted after reading."""
    return self.source.read(box).astype(self.dtype)

  def write(self, box: Box, values: Block) -> None:
    """Converted before writing."""
    self.source.write(box, values.astype(self.source.dtype))


def whole(shape: tuple[int, ...]) -> Box:
  """The box that is everything."""
  return tuple(slice(0, size) for size in shape)


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
  """A shard's index with every start and stop written out."""
  parts = (part.indices(size) for part, size in zip(index, shape, strict=True))
  return tuple(slice(start, stop) for start, stop, _ in parts)
