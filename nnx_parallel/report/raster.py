"""Writes the pictures of this room as files: SVG as it is, PNG and PDF for papers through matplotlib."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from nnx_parallel.errors import ReportError

_NAMESPACE = "{http://www.w3.org/2000/svg}"
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def save_svg(text: str, file: str | Path) -> None:
  """Writes a picture to a file.

  Args:
    text: the SVG of a picture, e.g. from `report_svg`.
    file: ends in `.svg`; or in `.png` or `.pdf`, which needs matplotlib.

  Raises:
    ReportError: another suffix, or no matplotlib.

  Example:
    >>> import tempfile, pathlib
    >>> from nnx_parallel.report.svg import Item, bars
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "bars.svg"
    >>> save_svg(bars([Item("a", 1, "1 B")]), file)
    >>> file.read_text().startswith("<svg")
    True
  """
  path = Path(file)
  if path.suffix == ".svg":
    path.write_text(text)
    return
  if path.suffix not in (".png", ".pdf"):
    raise ReportError(f"cannot write a picture as {path.name}.", fix="end the name in .svg, .png or .pdf.")
  try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ReportError(
      f"cannot draw {path.name}: matplotlib is not installed.",
      fix="pip install 'nnx-parallel[plots]', or end the name in .svg.",
    ) from error
  root = ET.fromstring(text)
  width, height = (float(n) for n in root.attrib["viewBox"].split()[2:])
  figure: Any = Figure(figsize=(width / 72, height / 72))
  FigureCanvasAgg(figure)
  axes = figure.add_axes((0, 0, 1, 1))
  axes.set_xlim(0, width)
  axes.set_ylim(height, 0)
  axes.axis("off")
  for element in root.iter():
    _draw(axes, element)
  figure.savefig(path, dpi=200)


def _draw(axes: Any, element: ET.Element) -> None:
  """One shape of the few kinds that these pictures have."""
  from matplotlib.patches import Circle, Rectangle

  kind, get = element.tag.removeprefix(_NAMESPACE), element.attrib.get

  def number(name: str, default: str = "0") -> float:
    return float(get(name, default))

  def colour(name: str) -> str:
    value = get(name, "none")
    return "black" if value == "currentColor" else value

  if kind == "rect":
    corner, alpha = (number("x"), number("y")), number("fill-opacity", "1")
    size = (number("width"), number("height"))
    axes.add_patch(Rectangle(corner, *size, facecolor=colour("fill"), alpha=alpha, linewidth=0))
    if get("stroke"):
      axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=colour("stroke"), linewidth=0.7))
  elif kind == "circle":
    axes.add_patch(Circle((number("cx"), number("cy")), number("r"), facecolor=colour("fill"), linewidth=0))
  elif kind == "line":
    ends = ((number("x1"), number("x2")), (number("y1"), number("y2")))
    axes.plot(*ends, color=colour("stroke"), linewidth=number("stroke-width", "1"))
  elif kind == "text":
    axes.text(
      number("x"),
      number("y"),
      (element.text or "").replace("$", r"\$"),
      fontsize=number("font-size", "12") * 0.92,
      color=colour("fill"),
      ha=_ANCHORS[get("text-anchor", "start")],
      va="baseline",
    )
