"""A picture of one array on a mesh: which device holds which block."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path as File
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
from jax.sharding import Mesh

from nnx_parallel.core.axes import axes_of
from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.text import format_array, format_bytes, format_spec
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.leaf import LeafPlan

LIMIT = 16
"""Blocks drawn along one side; what is beyond is counted in words."""
_CELL = (104, 44)
_LETTER = 5.5  # pixels, in monospace of size 9
_PALETTE = ("#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5")


@dataclasses.dataclass(frozen=True)
class Blocks:
  """An array's shards as a grid.

  Attributes:
    leaf: the array.
    rows: the dim whose shards are drawn downwards, or None when one row is enough.
    columns: the dims whose shards are drawn to the right, major to minor.
    holders: grid position (row, column) -> the devices that hold that block.
    shape: rows and columns of the grid.
  """

  leaf: LeafPlan
  rows: int | None
  columns: tuple[int, ...]
  holders: dict[tuple[int, int], tuple[int, ...]]
  shape: tuple[int, int]

  def index(self, column: int) -> dict[int, int]:
    """Which shard of each column dim a grid column stands for."""
    counts = [self.leaf.shards[dim] for dim in self.columns]
    parts = np.unravel_index(column, counts) if counts else ()
    return {dim: int(part) for dim, part in zip(self.columns, parts, strict=True)}

  def slices(self, row: int, column: int) -> str:
    """The elements of a block, for example `[0:4, 8:16]`; `:` where the dim is whole."""
    shard = self.index(column) | ({self.rows: row} if self.rows is not None else {})
    parts: list[str] = []
    for dim, size in enumerate(self.leaf.local_shape):
      at = shard.get(dim)
      end = self.leaf.shape[dim]
      parts.append(":" if at is None else f"{min(at * size, end)}:{min((at + 1) * size, end)}")
    return f"[{', '.join(parts)}]"

  def padding(self, row: int, column: int) -> bool:
    """Whether the block holds padding."""
    shard = self.index(column) | ({self.rows: row} if self.rows is not None else {})
    size = self.leaf.local_shape
    return any((at + 1) * size[dim] > self.leaf.shape[dim] for dim, at in shard.items())


def blocks(leaf: LeafPlan) -> Blocks:
  """Which device holds which shard.

  Args:
    leaf: a row of a plan, on a real or an abstract mesh.

  Returns:
    The grid: the first split dim downwards (unless only one dim is split), the others to the right.
  """
  split = [dim for dim, count in enumerate(leaf.shards) if count > 1]
  rows, columns = (None, tuple(split)) if len(split) == 1 else (next(iter(split), None), tuple(split[1:]))
  counts = [leaf.shards[dim] for dim in columns]
  holders: dict[tuple[int, int], list[int]] = {}
  for device, place in _places(leaf.mesh):
    shard = [_position(entry, place, leaf.mesh) for entry in leaf.spec]
    row = 0 if rows is None else shard[rows]
    column = int(np.ravel_multi_index([shard[dim] for dim in columns], counts)) if columns else 0
    holders.setdefault((row, column), []).append(device)
  shape = (1 if rows is None else leaf.shards[rows], math.prod(counts))
  return Blocks(leaf, rows, columns, {key: tuple(value) for key, value in holders.items()}, shape)


def _places(mesh: AnyMesh) -> list[tuple[int, dict[str, int]]]:
  sizes = axis_sizes(mesh)
  if isinstance(mesh, Mesh):
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
  else:
    ids = np.arange(mesh.size).reshape(tuple(sizes.values()))
  return [(int(ids[at]), dict(zip(sizes, at, strict=True))) for at in np.ndindex(*ids.shape)]


def _position(entry: Any, place: dict[str, int], mesh: AnyMesh) -> int:
  position = 0
  for axis in axes_of(entry):  # major to minor
    position = position * axis_sizes(mesh)[axis] + place[axis]
  return position


def _holders_text(devices: tuple[int, ...]) -> str:
  if len(devices) > 4:
    return f"{devices[0]}, {devices[1]} ... {devices[-1]} ({len(devices)})"
  return ", ".join(map(str, devices))


def _title(found: Blocks) -> tuple[str, str]:
  leaf = found.leaf
  first = f"{leaf.name}  {format_array(leaf.dtype, leaf.storage_shape)}  {format_spec(leaf.spec)}"
  mesh = " x ".join(f"{axis}={size}" for axis, size in axis_sizes(leaf.mesh).items())
  return first, f"mesh {mesh}; {format_bytes(leaf.bytes_per_device)} per device"


def svg(leaf: LeafPlan) -> str:
  """Draws an array's blocks as SVG; see `ShardingPlan.picture`."""
  found = blocks(leaf)
  rows, columns = (min(count, LIMIT) for count in found.shape)
  longest = max(len(found.slices(row, column)) for row in range(rows) for column in range(columns))
  width, height = max(_CELL[0], round(_LETTER * longest) + 16), _CELL[1]
  title, subtitle = _title(found)
  parts: list[str] = []
  for row in range(rows):
    for column in range(columns):
      x, y = 8 + column * width, 48 + row * height
      color = _PALETTE[(row * found.shape[1] + column) % len(_PALETTE)]
      dash = ' stroke-dasharray="4 3"' if found.padding(row, column) else ""
      style = f'fill="{color}" stroke="#444"{dash}'
      parts += [
        f'<rect x="{x}" y="{y}" width="{width - 4}" height="{height - 4}" {style}/>',
        f'<text x="{x + 6}" y="{y + 16}" font-size="11">{_holders_text(found.holders[row, column])}</text>',
        f'<text x="{x + 6}" y="{y + 31}" font-size="9" fill="#444">{found.slices(row, column)}</text>',
      ]
  total_height = 48 + rows * height + 20
  total_width = max(16 + columns * width, 8 * len(title) + 16, 8 * len(subtitle) + 16)
  legend = _legend(found)
  return "\n".join(
    [
      f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width}" height="{total_height}"'
      ' font-family="monospace" style="white-space:pre">',
      '<rect width="100%" height="100%" fill="white"/>',
      f'<text x="8" y="18" font-size="13" font-weight="bold">{escape(title)}</text>',
      f'<text x="8" y="36" font-size="11">{escape(subtitle)}</text>',
      *parts,
      f'<text x="8" y="{total_height - 6}" font-size="10">{escape(legend)}</text>',
      "</svg>",
      "",
    ]
  )


def _legend(found: Blocks) -> str:
  legend = "each block: the devices that hold it, and its elements"
  if any(found.leaf.padding):
    legend += "; dashed: with padding"
  hidden = math.prod(found.shape) - math.prod(min(count, LIMIT) for count in found.shape)
  return f"{legend}; {hidden} more blocks not drawn" if hidden else legend


def save(leaf: LeafPlan, file: str) -> None:
  """Writes the picture as `.svg`, or as `.png` when matplotlib is installed.

  Raises:
    PlanError: another suffix, or `.png` without matplotlib.
  """
  suffix = File(file).suffix.lower()
  if suffix == ".svg":
    File(file).write_text(svg(leaf))
  elif suffix == ".png":
    _save_png(leaf, file)
  else:
    raise PlanError(f"cannot draw {file}: the suffix {suffix!r} is not .svg or .png.", fix="layout.svg")


def _save_png(leaf: LeafPlan, file: str) -> None:
  try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
  except ImportError as error:
    raise PlanError(
      f"cannot draw {file}: matplotlib is not installed.",
      fix='pip install "nnx-parallel[plots]", or write .svg, which needs nothing.',
    ) from error
  found = blocks(leaf)
  rows, columns = (min(count, LIMIT) for count in found.shape)
  figure = Figure(figsize=(max(6.0, 1.3 * columns), 1.2 + 0.6 * rows), dpi=120)
  FigureCanvasAgg(figure)
  axes: Any = figure.add_axes((0.01, 0.12, 0.98, 0.7 if rows > 1 else 0.45))
  for row in range(rows):
    for column in range(columns):
      color = _PALETTE[(row * found.shape[1] + column) % len(_PALETTE)]
      style = "--" if found.padding(row, column) else "-"
      axes.add_patch(_rectangle(column, rows - 1 - row, color, style))
      text = f"{_holders_text(found.holders[row, column])}\n{found.slices(row, column)}"
      axes.text(column + 0.5, rows - row - 0.5, text, ha="center", va="center", fontsize=7)
  axes.set_xlim(0, columns)
  axes.set_ylim(0, rows)
  axes.axis("off")
  figure.text(0.01, 0.95, "\n".join(_title(found)), va="top", fontsize=9, family="monospace")
  figure.text(0.01, 0.02, _legend(found), fontsize=7)
  figure.savefig(file)


def _rectangle(x: float, y: float, color: str, style: str) -> Any:
  from matplotlib.patches import Rectangle

  return Rectangle((x + 0.02, y + 0.05), 0.96, 0.9, facecolor=color, edgecolor="#444444", linestyle=style)
