"""The pictures of reports, plans and searches, drawn by matplotlib."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from nnx_parallel.core.figures import BLUE, PALETTE, RED, draw_grid, new_figure, open_axes, plain
from nnx_parallel.core.text import format_bytes
from nnx_parallel.errors import ReportError
from nnx_parallel.report.estimate.roofline import compiled_time, share_of

if TYPE_CHECKING:
  from matplotlib.figure import Figure

  from nnx_parallel.report.chips import Chip
  from nnx_parallel.report.compile_report import Argument, CompileReport
  from nnx_parallel.report.estimate.roofline import StepTime
  from nnx_parallel.report.search.search import Candidate, SearchResult

Picture = Literal["memory", "treemap", "devices", "collectives", "timeline"]

_BYTES = tuple((1024.0**n, name) for n, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))


class Bar(NamedTuple):
  """A horizontal bar: its name, its length, the length in words, its colour's group, and where it starts."""

  name: str
  value: float
  label: str
  group: str = ""
  start: float = 0.0


def report_figure(report: CompileReport, picture: Picture) -> Figure:
  """The figure of `CompileReport.picture`."""
  makers = {
    "memory": lambda: memory_figure(report.categories, report.chip),
    "treemap": lambda: treemap([(a.name, a.bytes, _group(a)) for a in report.arguments]),
    "devices": lambda: devices_figure(report.axes),
    "collectives": lambda: collectives_figure(report) if report.collectives else None,
    "timeline": lambda: time_figure(time) if (time := compiled_time(report)) else None,
  }
  if picture not in makers:
    raise ReportError(f"no picture {picture!r}.", fix=f"one of {', '.join(makers)}.")
  figure = makers[picture]()
  if figure is None:
    reason = "the step sends nothing" if picture == "collectives" else "no figures of the chip are known"
    raise ReportError(
      f"there is nothing to draw in {picture!r}: {reason}.",
      fix=f"another picture, of {', '.join(makers)}; a timeline needs compile_report(..., chip=...).",
    )
  return figure


def _group(argument: Argument) -> str:
  if not argument.donated:
    return "not donated"
  return argument.name.partition("/")[0] if "/" in argument.name else "model"


def memory_figure(categories: Mapping[str, int], chip: Chip | None) -> Figure:
  """Bytes per device by category, each from the end of the one above, and what a device has."""
  starts = itertools.accumulate(categories.values(), initial=0)
  items = [
    Bar(name, size, format_bytes(size), start=start)
    for (name, size), start in zip(categories.items(), starts, strict=False)
    if size
  ]
  return bars(items, "memory per device", _BYTES, limit=chip.usable_bytes if chip else 0)


def collectives_figure(report: CompileReport) -> Figure:
  """Payload per step by kind and axes."""
  sums = report.bytes_by("kind", "axes").items()
  items = [Bar(f"{kind} over {axes}", size, format_bytes(size), kind) for (kind, axes), size in sums]
  return bars(items[:20], "payload per device and step", _BYTES)


def time_figure(time: StepTime) -> Figure:
  """The terms of a step: those that overlap start together; what waits follows them."""
  items = [Bar(name, seconds, share_of(time, seconds), "overlaps") for name, seconds in time.terms().items()]
  at = max(time.terms().values())
  waits = {f"{name} (waiting)": seconds for name, seconds in time.waiting.items()}
  for name, seconds in (waits | {"exposed communication": time.exposed}).items():
    if seconds:
      items.append(Bar(name, seconds, share_of(time, seconds), "waited for", at))
      at += seconds
  return bars(items, "share of a step", ((time.seconds / 100 or 1.0, "%"),))


def devices_figure(axes: Mapping[str, int]) -> Figure:
  """The numbered devices of a mesh."""
  devices = np.arange(math.prod(axes.values())).reshape(*axes.values(), 1)
  note = "In each box: the number of the device."
  return draw_grid(devices, list(axes), lambda axis, place: str(place), note=note)


def bars(items: Sequence[Bar], label: str, units: Sequence[tuple[float, str]], limit: float = 0.0) -> Figure:
  """Horizontal bars, the first on top.

  `label` is what the scale measures, `units` are scale and name of its units, smallest first. `limit`, what a
  device may use, is a line, if it is near. More than one group of items has a legend.
  """
  most = max((item.start + item.value for item in items), default=1.0)
  scale, unit = _unit(most, units)
  figure = new_figure(height=0.28 * len(items) + 1.0)
  axes: Any = figure.subplots()
  for group, colour in zip(dict.fromkeys(item.group for item in items), itertools.cycle(PALETTE)):
    rows = [(n, item) for n, item in enumerate(items) if item.group == group]
    drawn = axes.barh(
      [n for n, _ in rows],
      [item.value / scale for _, item in rows],
      left=[item.start / scale for _, item in rows],
      color=colour,
      label=group,
    )
    axes.bar_label(drawn, [item.label for _, item in rows], padding=3, fontsize=9)
  axes.set_yticks(range(len(items)), [plain(item.name) for item in items])
  axes.invert_yaxis()
  axes.set_xlim(0, 1.15 * most / scale or 1.0)
  axes.set_xlabel(f"{label} ({unit})" + _mark(axes, limit, most, scale))
  open_axes(axes, "x")
  if axes.get_legend_handles_labels()[0]:
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
  return figure


def treemap(leaves: Sequence[tuple[str, int, str]]) -> Figure:
  """Rectangles whose areas are bytes per device; the layers of a list share one.

  A leaf is a name, bytes and a group, which has a colour.
  """
  groups: dict[str, dict[str, list[int]]] = {group: {} for group in sorted({group for *_, group in leaves})}
  for name, size, group in leaves:
    groups[group].setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(size)
  sums = [sum(map(sum, alike.values())) for alike in groups.values()]
  figure = new_figure(height=4.6)
  from matplotlib.patches import Patch, Rectangle  # after the error for a machine without matplotlib

  figure.set_layout_engine("none")
  axes: Any = figure.add_axes((0.0, 0.08, 1.0, 0.92))
  axes.set_xlim(0, 9.0)
  axes.set_ylim(0, 4.2)
  axes.axis("off")
  for alike, area, colour in zip(groups.values(), cut(sums, (0.0, 0.0, 9.0, 4.2)), itertools.cycle(PALETTE)):
    largest = sorted(alike.items(), key=lambda item: -sum(item[1]))
    areas = cut([sum(sizes) for _, sizes in largest], area)
    for (name, sizes), (x, y, width, height) in zip(largest, areas, strict=True):
      axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, alpha=0.45, edgecolor="white"))
      # The position in an optax chain is left out. Lines end after a dot; what does not fit is left out.
      parts = name.rpartition("state.*.")[2].replace(".", ". ")
      lines = textwrap.wrap(parts, max(1, int(width / 0.075)), break_long_words=False)
      lines += [f"{len(sizes)} arrays"] if len(sizes) > 1 else []
      words = plain("\n".join(line.replace(". ", ".") for line in (*lines, format_bytes(sum(sizes)))))
      text = axes.text(x + 0.05, y + height - 0.05, words, va="top", fontsize=7)
      box = text.get_window_extent().transformed(axes.transData.inverted())
      text.set_visible(box.width < width - 0.08 and box.height < height - 0.06)
  named = [
    Patch(facecolor=colour, alpha=0.45, label=f"{group}: {format_bytes(size)} per device")
    for group, size, colour in zip(groups, sums, itertools.cycle(PALETTE))
  ]
  figure.legend(handles=named, loc="lower left", ncols=max(1, len(named)), frameon=False)
  return figure


Area = tuple[float, float, float, float]


def cut(values: Sequence[float], area: Area) -> list[Area]:
  """Cuts a rectangle (x, y, width, height) in proportion to `values`, by halves across its longer side.

  Example:
    >>> cut([2, 1, 1], (0, 0, 4, 1))
    [(0, 0, 2.0, 1), (2.0, 0, 1.0, 1), (3.0, 0, 1.0, 1)]
  """
  if len(values) < 2 or not sum(values):
    return [area] * len(values)
  sums = list(itertools.accumulate(values))
  middle = min(range(1, len(values)), key=lambda n: abs(sums[n - 1] - sums[-1] / 2))
  x, y, width, height = area
  share = sums[middle - 1] / sums[-1]
  if width >= height:
    first, second = (x, y, width * share, height), (x + width * share, y, width * (1 - share), height)
  else:
    first, second = (x, y, width, height * share), (x, y + height * share, width, height * (1 - share))
  return cut(values[:middle], first) + cut(values[middle:], second)


def search_figure(result: SearchResult) -> Figure:
  """Every candidate by memory and time, up to four times the best; those of the Pareto front are joined."""
  front = result.pareto()
  slowest = 4 * front[0].time.seconds
  front = [c for c in front if c.time.seconds <= slowest]
  joined = set(map(id, front))
  others = [c for c in result.fitting[:1500] if c.time.seconds <= slowest and id(c) not in joined]
  most = max(c.memory_bytes for c in (*front, *others))
  space, space_unit = _unit(most, _BYTES)
  fastest = front[0].time.seconds
  figure = new_figure(height=5.0)
  axes: Any = figure.subplots()

  def points(found: Sequence[Candidate], name: str, **style: Any) -> None:
    places = ([c.memory_bytes / space for c in found], [c.time.seconds / fastest for c in found])
    axes.plot(*places, label=name, **style)

  points(others, "slower for their memory", marker=".", linestyle="", color=BLUE, alpha=0.5)
  points(front, "fastest for their memory", marker="o", color=RED)
  for best, name, marker in ((front[0], "fastest", "*"), (front[-1], "smallest", "s")):
    figures = f"{format_bytes(best.memory_bytes)}, {best.time.seconds / fastest:.2f}"
    points(
      [best], f"{name}: {best.mesh_text}; {figures}", marker=marker, markersize=10, linestyle="", color=RED
    )
  axes.set_xlim(0, 1.15 * most / space)
  axes.set_ylim(0)
  axes.set_xlabel(
    f"memory per device ({space_unit})" + _mark(axes, result.machine.chip.usable_bytes, most, space)
  )
  axes.set_ylabel("predicted time of a step, relative to the fastest")
  figure.legend(loc="outside lower left", frameon=False, fontsize=9)
  open_axes(axes)
  return figure


def _unit(most: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
  """Scale and name of the largest unit that `most` reaches."""
  return next((unit for unit in reversed(units) if most >= unit[0]), units[0])


def _mark(axes: Any, limit: float, most: float, scale: float) -> str:
  """Draws what a device may use, and widens the scale for it; in words where it is far to the right."""
  if not limit:
    return ""
  if limit > 4 * most:
    return f"; usable: {format_bytes(limit)}, far to the right"
  axes.axvline(limit / scale, color=RED, linestyle="--", label=f"usable: {format_bytes(limit)}")
  axes.set_xlim(0, 1.15 * max(limit, most) / scale)
  return ""
