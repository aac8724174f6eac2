"""The groups of devices of a collective, in the text of compiled programs.

Groups are lists (`{{0,1},{2,3}}`), iota (`[4,2]<=[2,4]T(1,0)`), mesh axes (`mesh['a'=2,'b'=4] {'a'}`),
or mesh axes with `device_ids=`. Ids are positions in the flattened mesh, so a set of axes is recovered by
comparing groups with the sub-grids of the mesh.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# mesh['a'=2,'b'=4] {'a'}    mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}
# mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}
_AXES = re.compile(
  r"mesh\[(?P<sizes>[^\]]*)\](?:, *device_ids=\((?P<ids>(?:[^()]|\([\d,]*\))*)\))? *\{(?P<axes>[^}]*)\}"
)
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_MESH_ITEM = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_IOTA_IDS = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LIST = re.compile(r"\{([\d, ]+)\}")
_LISTS = re.compile(r"\{(?:\{[\d, ]*\},?\s*)*\}")
_PAIR = re.compile(r"\{(\d+), ?(\d+)\}")
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
  for row in _group_rows(text, devices):
    labels[row] = min(row)
  return labels


def _group_rows(text: str, devices: int) -> list[list[int]]:
  """The members of each group."""
  text = text.partition("replica_groups=")[2] or text
  mesh, iota, listed = _AXES.match(text), _IOTA.match(text), _LISTS.match(text)
  if iota:
    return _iota_ids(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2])).tolist()
  if mesh:
    return _mesh_rows(mesh)
  if not listed:
    raise ValueError(f"cannot read the device groups {text[:80]!r}")
  return [[int(i) for i in row.split(",")] for row in _LIST.findall(listed.group())] or [[*range(devices)]]


def _mesh_rows(mesh: re.Match[str]) -> list[list[int]]:
  """Groups over axes such as `'a', 'b':(2)2`, where the second is a part of an axis: 2 inside 2 others."""
  sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh["sizes"])}
  ids = rest = np.arange(math.prod(sizes.values()))
  if mesh["ids"]:
    iota = _IOTA_IDS.match(mesh["ids"])
    ids = _iota_ids(iota[1], iota[2]) if iota else np.array([int(i) for i in mesh["ids"].split(",")])
  widths, count = [*sizes.values(), 1], 1
  strides = {name: math.prod(widths[n + 1 :]) for n, name in enumerate(sizes)}
  for name, before, part in _MESH_ITEM.findall(mesh["axes"]):
    size = int(part or sizes[name])
    stride = strides[name] * (sizes[name] // (int(before or 1) * size))
    count, rest = count * size, rest - rest // stride % size * stride
  # Positions of one group differ only along these axes: without them, they are the same position.
  return ids[np.argsort(rest, kind="stable")].reshape(-1, count).tolist()


def _iota_ids(dims: str, order: str | None) -> Labels:
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
