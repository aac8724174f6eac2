"""Device groups of a collective, decoded and named after the mesh axes they run over.

HLO writes groups in four ways: lists (`{{0,1},{2,3}}`), iota (`[4,2]<=[2,4]T(1,0)`), mesh axes
(`mesh['data'=2,'model'=4] {'data'}`), and mesh axes with `device_ids=`. Ids are positions in the
flattened mesh, so a set of axes is recovered by comparing groups with the sub-grids of the mesh.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence

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
Labels = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class AxisMatch:
  """The mesh axes a collective runs over.

  Attributes:
    axes: names, in mesh order; empty when every group is a single device.
    whole: whether a group is all of those axes; False when it is a part of them (a pair of
      neighbours, a split axis).
  """

  axes: tuple[str, ...]
  whole: bool


class AxisFinder:
  """Names the mesh axes of a grouping.

  Args:
    sizes: axis name -> size in devices, in mesh order.

  Example:
    >>> finder = AxisFinder({"data": 2, "model": 4})
    >>> finder.match(group_labels("[4,2]<=[2,4]T(1,0)", 8))
    AxisMatch(axes=('data',), whole=True)
    >>> finder.match(group_labels("{{0,1},{2,3},{4,5},{6,7}}", 8))
    AxisMatch(axes=('model',), whole=False)
  """

  def __init__(self, sizes: Mapping[str, int]):
    self._devices = math.prod(sizes.values())
    wide = [name for name, size in sizes.items() if size > 1]
    self._grids: dict[tuple[str, ...], Labels] = {}
    for count in range(len(wide) + 1):
      for axes in itertools.combinations(wide, count):
        self._grids[axes] = _grid_labels(sizes, axes)
    self._exact = {labels.tobytes(): axes for axes, labels in reversed(self._grids.items())}

  @property
  def devices(self) -> int:
    """Number of devices in the mesh."""
    return self._devices

  def match(self, labels: Labels) -> AxisMatch:
    """Axes of a grouping; `labels[i]` is the smallest member of the group that holds position `i`."""
    exact = self._exact.get(labels.tobytes())
    if exact is not None:
      return AxisMatch(exact, True)
    for axes, grid in self._grids.items():
      # Smaller groups fit inside the sub-grid when both members share the sub-grid's label.
      if bool(np.all(grid == grid[labels])):
        return AxisMatch(axes, False)
    raise AssertionError("the whole mesh contains every group")


def group_labels(text: str, devices: int) -> Labels:
  """Decodes `replica_groups`.

  Args:
    text: begins with the attribute's value; empty braces mean one group of all devices.
    devices: number of positions in the mesh.

  Returns:
    For each position, the smallest member of its group; positions in no group are alone.
  """
  labels = np.arange(devices)
  for row in group_rows(text, devices):
    labels[row] = min(row)
  return labels


def group_rows(text: str, devices: int) -> list[list[int]]:
  """Decodes `replica_groups` as `group_labels` does, with the members of each group in their order."""
  mesh = _AXES.match(text)
  iota = _IOTA.match(text)
  if iota:
    return _iota_rows(iota).tolist()
  if not mesh:
    listed = _LISTS.match(text)
    if not listed:
      raise ValueError(f"cannot read the device groups {text[:80]!r}")
    return [[int(i) for i in row.split(",")] for row in _LIST.findall(listed.group())] or [[*range(devices)]]
  sizes, ids = mesh_of(mesh)
  split: list[int] = []
  at: dict[str, list[int]] = {}
  for name, size in sizes.items():
    parts = sorted(
      (int(b or 1), int(n) if n else size) for a, b, n in MESH_ITEM.findall(mesh["axes"]) if a == name
    )
    done = 1
    for before, part in parts:
      split += [before // done, part] if before > done else [part]
      at.setdefault(f"{name}:{before}", []).append(len(split) - 1)
      done = before * part
    split.append(size // done)
  inside = [at[f"{a}:{int(b or 1)}"][0] for a, b, _ in MESH_ITEM.findall(mesh["axes"])]
  outside = [dim for dim in range(len(split)) if dim not in inside]
  return (
    ids.reshape(split)
    .transpose([*outside, *inside])
    .reshape(-1, math.prod(split[d] for d in inside))
    .tolist()
  )


def mesh_of(mesh: re.Match[str]) -> tuple[dict[str, int], Labels]:
  """Axis name -> size, and the device at each position, of a mesh that `MESH` matched."""
  sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh["sizes"])}
  return sizes, _device_ids(mesh["ids"]) if mesh["ids"] else np.arange(math.prod(sizes.values()))


def pair_labels(text: str, devices: int) -> Labels:
  """Positions connected by `source_target_pairs`, as groups."""
  labels = np.arange(devices)
  pairs = [(int(a), int(b)) for a, b in _PAIR.findall(text)]

  def root(i: int) -> int:
    while labels[i] != i:
      i = int(labels[i])
    return i

  for a, b in pairs:
    low, high = sorted((root(a), root(b)))
    labels[high] = low
  return np.array([root(i) for i in range(devices)])


def pairs_of(text: str) -> list[tuple[int, int]]:
  """(source, target) of `source_target_pairs`."""
  return [(int(a), int(b)) for a, b in _PAIR.findall(text)]


def count_pairs(text: str) -> int:
  """Number of source -> target pairs, those to oneself excluded."""
  return sum(a != b for a, b in _PAIR.findall(text))


def _iota_rows(iota: re.Match[str]) -> Labels:
  groups, size = int(iota.group(1)), int(iota.group(2))
  dims = [int(d) for d in iota.group(3).split(",")]
  ids = np.arange(math.prod(dims)).reshape(dims)
  if iota.group(4):
    ids = ids.transpose([int(d) for d in iota.group(4).split(",")])
  return ids.reshape(groups, size)


def _device_ids(text: str) -> Labels:
  iota = _IOTA_IDS.match(text)
  if not iota:
    return np.array([int(i) for i in re.findall(r"\d+", text)])
  dims = [int(d) for d in iota.group(1).split(",")]
  order = [int(d) for d in iota.group(2).split(",")] if iota.group(2) else range(len(dims))
  return np.arange(math.prod(dims)).reshape(dims).transpose(order).ravel()


def _grid_labels(sizes: Mapping[str, int], axes: Sequence[str]) -> Labels:
  """Labels of the sub-grids over `axes`."""
  shape = tuple(sizes.values())
  coords = np.indices(shape).reshape(len(shape), -1) if shape else np.zeros((0, 1), np.int64)
  key = np.zeros(coords.shape[1], np.int64)
  for (name, size), coord in zip(sizes.items(), coords, strict=True):
    if name not in axes:
      key = key * size + coord
  _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
  return first[inverse.reshape(-1)].astype(np.int64)
