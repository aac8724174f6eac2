"""Devices in the text of compiled programs: the groups of a collective, and the blocks of an array.

Groups are lists (`{{0,1},{2,3}}`), iota (`[4,2]<=[2,4]T(1,0)`), mesh axes (`mesh['a'=2,'b'=4] {'a'}`),
or mesh axes with `device_ids=`. Ids are positions in the flattened mesh, so a set of axes is recovered by
comparing groups with the sub-grids of the mesh. Layouts of arrays are tiles
(`{devices=[2,1,4]<=[8] last_tile_dim_replicate}`) or mesh axes (`{mesh['data'=2,'fsdp'=4], [{'data'}, {}]}`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# mesh['a'=2,'b'=4] {'a'}    mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}
# mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}
MESH = re.compile(r"mesh\[(?P<sizes>[^\]]*)\](?:, *device_ids=\((?P<ids>(?:[^()]|\([\d,]*\))*)\))?")
_AXES = re.compile(MESH.pattern + r" *\{(?P<axes>[^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
MESH_ITEM = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_IOTA_IDS = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LIST = re.compile(r"\{([\d, ]+)\}")
_LISTS = re.compile(r"\{(?:\{[\d, ]*\},?\s*)*\}")
_PAIR = re.compile(r"\{(\d+), ?(\d+)\}")
_TILES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))")
_LAST = re.compile(r"last_tile_dims=\{([^}]*)\}")
_DIM = re.compile(r"\{([^{}]*)\}")
Labels = npt.NDArray[np.int64]


class AxisFinder:
  """Names the mesh axes of a grouping, for axis sizes in mesh order."""

  def __init__(self, sizes: Mapping[str, int]):
    self.devices = math.prod(sizes.values())
    wide = [name for name, size in sizes.items() if size > 1]
    ids = np.arange(self.devices).reshape(*sizes.values())
    self._grids: dict[tuple[str, ...], Labels] = {}
    for count in range(len(wide) + 1):
      for axes in itertools.combinations(wide, count):
        first = ids[tuple(slice(1) if name in axes else slice(None) for name in sizes)]
        self._grids[axes] = np.broadcast_to(first, ids.shape).ravel()
    self._exact = {labels.tobytes(): axes for axes, labels in reversed(self._grids.items())}

  def match(self, labels: Labels) -> tuple[tuple[str, ...], bool]:
    """The axes of a grouping, in mesh order, and whether a group spans all of them, or only neighbours."""
    exact = self._exact.get(labels.tobytes())
    if exact is not None:
      return exact, True
    for axes, grid in self._grids.items():
      # Smaller groups fit inside the sub-grid when both members share the sub-grid's label.
      if bool(np.all(grid == grid[labels])):
        return axes, False
    raise AssertionError("the full mesh contains every group")


def group_labels(text: str, devices: int) -> Labels:
  """The smallest member of the group of each position, from the text of `replica_groups`."""
  labels = np.arange(devices)
  for row in group_rows(text, devices):
    labels[row] = min(row)
  return labels


def group_rows(text: str, devices: int) -> list[list[int]]:
  """Decodes `replica_groups` as `group_labels` does, with the members of each group in their order."""
  text = text.partition("replica_groups=")[2] or text
  mesh, iota, listed = _AXES.match(text), _IOTA.match(text), _LISTS.match(text)
  if iota:
    return iota_ids(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2])).tolist()
  if mesh:
    sizes, ids = mesh_of(mesh)
    count, block, rest = blocks_over(mesh["axes"], sizes)
    return ids[np.lexsort((block, rest))].reshape(-1, count).tolist()
  if not listed:
    raise ValueError(f"cannot read the device groups {text[:80]!r}")
  return [[int(i) for i in row.split(",")] for row in _LIST.findall(listed.group())] or [[*range(devices)]]


def blocks_over(text: str, sizes: Mapping[str, int]) -> tuple[int, Labels, Labels]:
  """Reads axes as `'a', 'b':(2)2`, where the second is a part of an axis: 2 blocks, inside 2 other blocks.

  Returns their number, the block of each position, and the position at its place in the first block.
  """
  rest = np.arange(math.prod(sizes.values()))
  count, block = 1, np.zeros_like(rest)
  widths = [*sizes.values(), 1]
  strides = {name: math.prod(widths[n + 1 :]) for n, name in enumerate(sizes)}
  for name, before, part in MESH_ITEM.findall(text):
    size = int(part or sizes[name])
    stride = strides[name] * (sizes[name] // (int(before or 1) * size))
    place = rest // stride % size
    count, block, rest = count * size, block * size + place, rest - place * stride
  return count, block, rest


def mesh_of(mesh: re.Match[str]) -> tuple[dict[str, int], Labels]:
  """Axis name -> size, and the device at each position, of a mesh that `MESH` matched."""
  sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh["sizes"])}
  if not mesh["ids"]:
    return sizes, np.arange(math.prod(sizes.values()))
  iota = _IOTA_IDS.match(mesh["ids"])
  return sizes, iota_ids(iota[1], iota[2]) if iota else np.array([int(i) for i in mesh["ids"].split(",")])


def iota_ids(dims: str, order: str | None) -> Labels:
  """The flat array that HLO writes as `[2,4]T(1,0)`: numbers in order, transposed."""
  sizes = [int(n) for n in dims.split(",")]
  axes = [int(n) for n in order.split(",")] if order else range(len(sizes))
  return np.arange(math.prod(sizes)).reshape(sizes).transpose(axes).ravel()


def pair_labels(text: str, devices: int) -> Labels:
  """Positions connected by `source_target_pairs`, as groups."""
  labels = np.arange(devices)
  for pair in pairs_of(text):
    low, high = sorted(labels[n] for n in pair)
    labels[labels == high] = low
  return labels


def pairs_of(text: str) -> list[tuple[int, int]]:
  """(source, target) of `source_target_pairs`."""
  return [(int(a), int(b)) for a, b in _PAIR.findall(text)]


@dataclasses.dataclass(frozen=True)
class Tiling:
  """The number of blocks along each dim (none: replicated), and the block of each device, (devices, dims)."""

  parts: tuple[int, ...]
  blocks: Labels
  manual: bool = False

  def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of one block; the last block along a dim may reach beyond the array."""
    return tuple(-(-n // k) for n, k in zip(shape, self.parts or (1,) * len(shape), strict=True))


@functools.lru_cache(maxsize=1024)
def read_tiling(text: str, devices: int) -> Tiling | None:
  """Reads the `sharding=` of one array; empty is replicated. None: one device holds all, or partial sums."""
  if "unreduced" in text or "maximal" in text:
    return None
  if not text or text.strip() in ("{replicated}", "{mesh[], replicated}"):
    return _replicated(devices)
  mesh, tiles = MESH.search(text), _TILES.search(text)
  if mesh and mesh["sizes"]:
    return _of_mesh(text, mesh, devices)
  if tiles:
    return _of_tiles(text, tiles, devices)
  return dataclasses.replace(_replicated(devices), manual=True) if "manual" in text else None


def _replicated(devices: int) -> Tiling:
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
