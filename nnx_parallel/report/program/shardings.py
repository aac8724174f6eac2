"""The layout of an array as a compiled program writes it: which block of it each device holds.

HLO writes layouts in two ways: tiles (`{devices=[2,1,4]<=[8] last_tile_dim_replicate}`) and mesh axes
(`{mesh['data'=2,'fsdp'=4], [{'data'}, {}]}`). Devices are positions in the program's own numbering.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import numpy.typing as npt

from nnx_parallel.report.program import hlo
from nnx_parallel.report.program.groups import MESH, blocks_over, iota_ids, mesh_of

_TILES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))")
_LAST = re.compile(r"last_tile_dims=\{([^}]*)\}")
_COMMENT = re.compile(r"/\*.*?\*/")
_DIM = re.compile(r"\{([^{}]*)\}")
Numbers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Tiling:
  """How an array is split over devices.

  Attributes:
    parts: blocks along each dim; one for each dim of the array, or empty where it is replicated.
    blocks: (devices, dims): the number of the block that each device holds.
    manual: whether it is inside a `shard_map`, so that the array is a block already.
  """

  parts: tuple[int, ...]
  blocks: Numbers
  manual: bool = False

  def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of one block; the last along a dim may reach beyond the array."""
    return tuple(-(-n // k) for n, k in zip(shape, self.parts or (1,) * len(shape), strict=True))


def read_tiling(text: str, devices: int) -> Tiling | None:
  """Reads the value of `sharding=` of one array; empty means replicated.

  Returns None for a layout that is not known here (one device holds all, partial sums).
  """
  if "unreduced" in text or "maximal" in text:
    return None
  if not text or text.strip() in ("{replicated}", "{mesh[], replicated}"):
    return _whole(devices)
  mesh, tiles = MESH.search(text), _TILES.search(text)
  if mesh and mesh["sizes"]:
    return _of_mesh(text, mesh, devices)
  if tiles:
    return _of_tiles(text, tiles, devices)
  return dataclasses.replace(_whole(devices), manual=True) if "manual" in text else None


def split_layouts(text: str) -> tuple[str, ...]:
  """The layouts of a tuple's elements: `{{...}, {...}}` -> two texts; that of one array is the only one.

  Example:
    >>> split_layouts("{{replicated}, {devices=[2]<=[2]}}")
    ('{replicated}', '{devices=[2]<=[2]}')
    >>> split_layouts("{replicated}")
    ('{replicated}',)
  """
  inner = text.strip()
  inner = inner[1:-1] if inner.startswith("{") else inner
  if not inner.lstrip().startswith("{"):
    return (text,)
  return tuple(part.strip() for part in hlo.pieces(_COMMENT.sub("", inner)))


def _whole(devices: int) -> Tiling:
  return Tiling((), np.zeros((devices, 0), np.int64))


def _of_mesh(text: str, mesh: re.Match[str], devices: int) -> Tiling | None:
  sizes, numbers = mesh_of(mesh)
  listed = re.match(r",? *\[(.*?)\](?:,|\}|$)", text[mesh.end() :])
  if not listed or math.prod(sizes.values()) != devices:
    return None
  found = [blocks_over(dim, sizes) for dim in _DIM.findall(listed[1])]
  blocks = np.zeros((devices, len(found)), np.int64)
  for dim, (_, block, _) in enumerate(found):
    blocks[numbers, dim] = block
  rest = text[mesh.end() + listed.end() :]
  return Tiling(tuple(count for count, _, _ in found), blocks, "manual" in rest)


def _of_tiles(text: str, tiles: re.Match[str], devices: int) -> Tiling | None:
  dims = [int(n) for n in tiles[1].split(",")]
  numbers = iota_ids(tiles[2], tiles[3]) if tiles[2] else np.array([int(n) for n in tiles[4].split(",")])
  if len(numbers) != devices:
    return None
  named = _LAST.search(text)
  kinds = [kind.strip() for kind in named[1].split(",")] if named else []
  kinds = kinds or (["replicated"] if "last_tile_dim_replicate" in text else [])
  parts = dims[: len(dims) - len(kinds)]
  coords = np.indices(dims).reshape(len(dims), -1)[: len(parts)]
  blocks = np.empty((devices, len(parts)), np.int64)
  blocks[numbers] = coords.T
  return Tiling(tuple(parts), blocks, "manual" in kinds)
