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

from nnx_parallel.report.program.groups import MESH, MESH_ITEM, mesh_of

_TILES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))")
_LAST = re.compile(r"last_tile_dims=\{([^}]*)\}")
_DIM = re.compile(r"\{([^{}]*)\}")
Numbers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Tiling:
  """How an array lies over devices.

  Attributes:
    parts: blocks along each dim; one for each dim of the array, or empty where all of it is whole.
    blocks: (devices, dims): the number of the block that each device holds.
    manual: whether the program itself works on blocks there (`shard_map`), so that this says nothing.
  """

  parts: tuple[int, ...]
  blocks: Numbers
  manual: bool = False

  def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of one block; the last along a dim may reach beyond the array."""
    return tuple(-(-n // k) for n, k in zip(shape, self.parts or (1,) * len(shape), strict=True))


def read_tiling(text: str, devices: int) -> Tiling | None:
  """Reads the text of one array's layout.

  Args:
    text: the value of `sharding=`; empty means whole on each device.
    devices: of the program.

  Returns:
    The layout, or None for one that is not known here (one device holds all, partial sums).
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
  found, depth, start = list[str](), 0, 0
  for at, char in enumerate(inner):
    if char == "{":
      start, depth = (at if depth == 0 else start), depth + 1
    elif char == "}":
      depth -= 1
      if depth == 0:
        found.append(inner[start : at + 1])
  return tuple(found)


def _whole(devices: int) -> Tiling:
  return Tiling((), np.zeros((devices, 0), np.int64))


def _of_mesh(text: str, mesh: re.Match[str], devices: int) -> Tiling | None:
  sizes, numbers = mesh_of(mesh)
  listed = re.match(r",? *\[(.*?)\](?:,|\}|$)", text[mesh.end() :])
  if not listed or math.prod(sizes.values()) != devices:
    return None
  coords = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
  place = dict(zip(sizes, coords, strict=True))
  parts, blocks = list[int](), list[Numbers]()
  for dim in _DIM.findall(listed[1]):
    count, block = 1, np.zeros(devices, np.int64)
    for name, before, part in MESH_ITEM.findall(dim):
      size = int(part) if part else sizes[name]
      after = sizes[name] // (int(before or 1) * size)
      count, block = count * size, block * size + (place[name] // after) % size
    at = np.empty(devices, np.int64)
    at[numbers] = block
    parts.append(count)
    blocks.append(at)
  rest = text[mesh.end() + listed.end() :]
  return Tiling(tuple(parts), np.stack(blocks, 1) if blocks else _whole(devices).blocks, "manual" in rest)


def _of_tiles(text: str, tiles: re.Match[str], devices: int) -> Tiling | None:
  dims = [int(n) for n in tiles[1].split(",")]
  if tiles[2]:
    sizes = [int(n) for n in tiles[2].split(",")]
    order = [int(n) for n in tiles[3].split(",")] if tiles[3] else list(range(len(sizes)))
    numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).ravel()
  else:
    numbers = np.array([int(n) for n in tiles[4].split(",") if n])
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
