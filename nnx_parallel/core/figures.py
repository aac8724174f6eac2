"""Shared parts of all figures (matplotlib)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nnx_parallel.errors import ReportError

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# Okabe and Ito's palette: distinct with any colour vision.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW = PALETTE = (
  "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442",
)  # fmt: skip
INSTALL = "pip install 'nnx-parallel[plots]'"
LIMIT = 16
"""Boxes drawn along one side of a grid; a note counts the remaining boxes."""
_LETTER = 0.085  # inches, of the wider letters at 9 points


@functools.singledispatch
def picture_of(report: Any, name: str) -> Figure:
  """A part of a report as a figure; the module that draws it registers itself for the type of the report."""
  raise TypeError(f"no picture {name!r} of {type(report).__name__}")


def new_figure(width: float = 9.0, height: float = 3.0) -> Figure:
  """An empty figure, in inches; a `ReportError` without matplotlib."""
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ReportError("cannot draw: matplotlib is not installed.", fix=INSTALL) from error
  return Figure(figsize=(width, height), dpi=150, layout="constrained")


def plain(text: str) -> str:
  """Text without formulas: matplotlib reads a dollar sign as the start of a formula."""
  return text.replace("$", r"\$")


def open_axes(axes: Any, grid: Literal["x", "both"] = "both") -> None:
  """Draws light grid lines behind the data, and no frame at the right and the top."""
  axes.grid(axis=grid, color="#e6e6e6")
  axes.set_axisbelow(True)
  axes.spines[["top", "right"]].set_visible(False)


def draw_grid(
  devices: np.ndarray[Any, Any],
  names: Sequence[str],
  label: Callable[[int, int], str],
  *,
  title: str = "",
  note: str,
  dashed: Callable[[tuple[int, ...]], bool] = lambda index: False,
) -> Figure:
  """A grid of boxes with device numbers; the last dim runs to the right, other dims run downwards.

  The numbers in each box are along the last dim of `devices`; `names` are of its other dims, which are left
  out if their size is 1. `label` gives the text for `(dim, position)` of a row or column; boxes at `dashed`
  indices are drawn dashed; `title` stands above, `note` below.
  """
  counts = devices.shape[:-1]
  wide = [dim for dim, count in enumerate(counts) if count > 1]
  down, right = wide[:-1], wide[-1:]
  boxes = devices.reshape(math.prod(counts[dim] for dim in down), -1, devices.shape[-1])
  shown = boxes[:LIMIT, :LIMIT]
  hidden = math.prod(counts) - math.prod(shown.shape[:2])
  note += f" {hidden} more are not drawn." if hidden else ""

  def side(dims: list[int], most: int) -> list[str]:
    places = itertools.islice(np.ndindex(*(counts[dim] for dim in dims)), most)
    return [", ".join(map(label, dims, place)) for place in places]

  rows, columns = side(down, shown.shape[0]), side(right, shown.shape[1])
  row_title = ", ".join(names[dim] for dim in down)
  texts = [[_some(held) for held in line] for line in shown.tolist()]
  cell = _LETTER * max(5, *(len(text) for line in texts for text in line)) + 0.15
  longest = _LETTER * max(map(len, columns)) + 0.15
  turned = longest > cell and longest * len(columns) > 9
  cell = cell if turned else max(cell, longest)
  left = _LETTER * (max(map(len, rows)) + len(row_title)) + 0.4
  words = _LETTER * max(map(len, [*title.splitlines(), note]))
  height = 0.42 * len(rows) + 0.25 * title.count("\n") + (2.1 if turned else 1.4)
  figure = new_figure(max(left + cell * len(columns), words) + 0.4, height)
  from matplotlib.patches import Rectangle  # after the error for a machine without matplotlib

  axes: Any = figure.subplots()
  for row, column in np.ndindex(*shown.shape[:2]):
    index = tuple(map(int, np.unravel_index(row * boxes.shape[1] + column, counts)))
    face, style = ("white", "--") if dashed(index) else ("#D6E8F3", "-")
    corner = (column + 0.03, row + 0.05)
    box = Rectangle(corner, 0.94, 0.9, facecolor=face, edgecolor=BLUE, linestyle=style)
    middle = (column + 0.5, row + 0.5)
    text = axes.text(*middle, texts[row][column], ha="center", va="center", fontsize=9)
    for artist in (axes.add_patch(box), text):
      artist.set_in_layout(False)  # to measure hundreds of them would take seconds
  axes.set_xlim(0, len(columns))
  axes.set_ylim(len(rows), 0)
  axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90 if turned else 0)
  axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
  axes.tick_params(length=0, labelsize=9, top=True, labeltop=True, bottom=False, labelbottom=False)
  axes.xaxis.set_label_position("top")
  axes.set_xlabel(", ".join(names[dim] for dim in right))
  axes.set_ylabel(row_title, rotation=0, ha="right", va="center")
  axes.spines[:].set_visible(False)
  figure.suptitle(plain(title), x=0.01, ha="left", fontsize=10)
  figure.supxlabel(note, x=0.01, ha="left", fontsize=9)
  return figure


def _some(devices: list[int]) -> str:
  if len(devices) > 4:
    return f"{devices[0]}, {devices[1]} ... {devices[-1]} ({len(devices)})"
  return ", ".join(map(str, devices))
