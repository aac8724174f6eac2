"""Reads the samples of global batches ahead of their use; each process reads only its own rows."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

import jax
import numpy as np

from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import TrainError

Last = Literal["drop", "pad", "keep"]
MASK = "mask"


class Samples(Protocol):
  """Samples by their global index: a Grain `MapDataset` or `RandomAccessDataSource`, or a list."""

  def __len__(self) -> int: ...
  def __getitem__(self, index: int, /) -> PyTree: ...


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Global batches of consecutive samples: from `start` to `start + size`, and so on, to the end."""

  source: Samples
  size: int
  start: int = 0
  last: Last = "drop"

  def __post_init__(self) -> None:
    for method in ("__len__", "__getitem__"):
      if not hasattr(self.source, method):
        raise TrainError(
          f"a {type(self.source).__name__} has no samples by index (it has no {method}).",
          fix="a grain.MapDataset, a list, or a class with both; or no batch= for an iterable of batches.",
        )

  @property
  def remainder(self) -> int:
    """The number of samples in the shorter last batch; 0 if there is no such batch, or it is dropped."""
    left = max(len(self.source) - self.start, 0)
    return 0 if self.last == "drop" else left % self.size

  def lengths(self) -> Iterator[tuple[int, int]]:
    """The first index of each batch and the number of its rows, including padded batches."""
    end = len(self.source) - self.remainder
    for first in range(self.start, end - self.size + 1, self.size):
      yield first, self.size
    if self.remainder:
      yield end, self.size if self.last == "pad" else self.remainder

  def sample(self, index: int) -> PyTree:
    """A sample; after the end, the last sample. With `last="pad"` it is marked as real or as a copy."""
    real = min(index, len(self.source) - 1)
    try:
      found = self.source[real]
    except Exception as error:
      error.add_note(f"This was sample {real} of the source.")
      raise
    if found is None:
      raise TrainError(
        f"sample {real} is None.",
        details="a filter of Grain leaves None in place of removed samples, so batches would differ in size",
        fix="filter before: a source of the indices that stay; or batches from to_iter_dataset(), without"
        " batch=.",
      )
    if self.last != "pad":
      return found
    if not isinstance(found, dict) or MASK in found:
      raise TrainError(
        f'last="pad" adds {MASK!r} to samples that are dicts without it, and sample {real} is not.',
        details=f"a {type(found).__name__}: {found!r:.60}",
        fix=f'samples as dicts, without {MASK!r}; or last="drop".',
      )
    return {**found, MASK: index == real}

  def read(self, rows: dict[int, np.ndarray], *, threads: int, ahead: int) -> Iterator[PyTree]:
    """Reads these rows, for each length of a batch, in the background.

    Yields the number of rows of the global batch, and a tree of arrays with this process's rows on dim 0.
    """
    readers, stacker = ThreadPoolExecutor(threads), ThreadPoolExecutor(1)
    futures: deque[Any] = deque()
    # Once: here, or at the interpreter's exit, where the frame of a generator ends too late for it.
    end = weakref.finalize(self, _shut_down, readers, stacker)

    def part(indices: list[int]) -> list[PyTree]:
      return [self.sample(index) for index in indices]

    def share(first: int, length: int) -> PyTree:
      indices = [first + int(row) for row in rows[length]]
      size = -(-len(indices) // threads)  # one task per thread; one per sample costs more than a quick read
      parts = readers.map(part, [indices[at : at + size] for at in range(0, len(indices), size)])
      return length, stack(list(itertools.chain(*parts)), indices)

    try:
      for first, length in self.lengths():
        futures.append(stacker.submit(share, first, length))
        if len(futures) > ahead:
          yield futures.popleft().result()
      while futures:
        yield futures.popleft().result()
    finally:
      end()


def _shut_down(readers: ThreadPoolExecutor, stacker: ThreadPoolExecutor) -> None:
  readers.shutdown(wait=False, cancel_futures=True)  # first, so that the stacker waits for no more reads
  stacker.shutdown(cancel_futures=True)
  readers.shutdown()


def stack(samples: list[PyTree], indices: list[int]) -> PyTree:
  """One tree with the samples along a new dim 0."""
  first = _shapes(samples[0])
  for index, sample in zip(indices, samples, strict=True):
    if (found := _shapes(sample)) != first:
      raise TrainError(
        f"sample {index} has other arrays than sample {indices[0]}, so they cannot form a batch.",
        details=f"{found}\nand not {first}",
        fix="crop or pad them to one shape: grain.MapDataset.source(...).map(...).",
      )
  return jax.tree.map(lambda *leaves: np.stack(leaves), *samples)


def _shapes(sample: PyTree) -> dict[str, tuple[int, ...]]:
  leaves = jax.tree_util.tree_leaves_with_path(sample)
  return {f"sample{jax.tree_util.keystr(path)}": np.shape(leaf) for path, leaf in leaves}
