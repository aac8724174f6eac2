"""Figures by matplotlib: what all pictures of the package share."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from nnx_parallel.errors import ReportError

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# Okabe and Ito's palette: readers with any colour vision tell its colours apart.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW = PALETTE = (
  "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442",
)  # fmt: skip
INSTALL = "pip install 'nnx-parallel[plots]'"
_LETTER = 0.085  # inches, of the wider letters at 9 points


def can_draw() -> bool:
  """Whether matplotlib is installed."""
  return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float = 9.0, height: float = 3.0) -> Figure:
  """An empty figure.

  Args:
    width: in inches.
    height: in inches.

  Raises:
    ReportError: matplotlib is not installed.
  """
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ReportError("cannot draw: matplotlib is not installed.", fix=INSTALL) from error
  return Figure(figsize=(width, height), dpi=150, layout="constrained")


def plain(text: str) -> str:
  """Text as matplotlib prints it letter by letter: a dollar sign starts no formula."""
  return text.replace("$", r"\$")


def svg_text(figure: Figure) -> str:
  """The figure as an SVG element for a page; the same text each time."""
  import matplotlib as mpl

  file = io.StringIO()
  # Letters stay letters: small, and a reader can search for them.
  with mpl.rc_context({"svg.hashsalt": "nnx_parallel", "svg.fonttype": "none"}):
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
  text = file.getvalue()
  return text[text.index("<svg") :]


def cells(
  texts: Sequence[Sequence[str]],
  *,
  rows: tuple[str, Sequence[str]],
  columns: tuple[str, Sequence[str]],
  title: str = "",
  note: str = "",
  dashed: Collection[tuple[int, int]] = (),
) -> Figure:
  """A grid of boxes, each with its text.

  Args:
    texts: of each row, from the top.
    rows: what the rows are, and the label of each.
    columns: what the columns are, and the label of each.
    title: a few lines above.
    note: a line below.
    dashed: (row, column) of the boxes that are drawn dashed.
  """
  from matplotlib.patches import Rectangle

  cell = _LETTER * max(5, *(len(text) for row in texts for text in row)) + 0.15
  label = _LETTER * max(map(len, columns[1]), default=0) + 0.15
  turned = label > cell and label * len(columns[1]) > 9
  cell = cell if turned else max(cell, label)
  left = _LETTER * (max(map(len, rows[1]), default=0) + len(rows[0])) + 0.4
  words = _LETTER * max(len(line) for line in (*title.splitlines(), note, ""))
  width = max(left + cell * len(texts[0]), words) + 0.4
  lines = title.count("\n") + 2
  figure = new_figure(width, 0.42 * len(texts) + 0.25 * lines + (1.6 if turned else 0.9))
  axes: Any = figure.subplots()
  for row, line in enumerate(texts):
    for column, text in enumerate(line):
      face, line_style = ("white", "--") if (row, column) in dashed else ("#D6E8F3", "-")
      box = Rectangle((column + 0.03, row + 0.05), 0.94, 0.9, facecolor=face, edgecolor=BLUE)
      box.set_linestyle(line_style)
      axes.add_patch(box)
      label = axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9)
      for artist in (box, label):
        artist.set_in_layout(False)  # measuring hundreds of them takes seconds
  axes.set_xlim(0, len(texts[0]))
  axes.set_ylim(len(texts), 0)
  axes.set_xticks([n + 0.5 for n in range(len(texts[0]))], columns[1], rotation=90 if turned else 0)
  axes.set_yticks([n + 0.5 for n in range(len(texts))], rows[1])
  axes.tick_params(length=0, labelsize=9, top=True, labeltop=True, bottom=False, labelbottom=False)
  axes.xaxis.set_label_position("top")
  axes.set_xlabel(columns[0])
  axes.set_ylabel(rows[0], rotation=0, ha="right", va="center")
  axes.spines[:].set_visible(False)
  figure.suptitle(plain(title), x=0.01, ha="left", fontsize=10)
  figure.supxlabel(note, x=0.01, ha="left", fontsize=9)
  return figure
