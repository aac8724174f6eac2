"""The pictures of reports, drawn by matplotlib."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nnx_parallel.core.figures import PALETTE, RED, draw_grid, new_figure, open_axes, picture_of, plain
from nnx_parallel.core.text import format_bytes
from nnx_parallel.errors import ReportError
from nnx_parallel.report.chips import Chip
from nnx_parallel.report.compile_report import CompileReport, Picture
from nnx_parallel.report.estimate.roofline import StepTime, compiled_time, share_of

if TYPE_CHECKING:
  from matplotlib.figure import Figure

_BYTES = tuple((1024.0**n, name) for n, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))


class Bar(NamedTuple):
  """A horizontal bar: its name, its length, the length in words, its colour's group, and where it starts."""

  name: str
  value: float
  label: str
  group: str = ""
  start: float = 0.0


@picture_of.register(CompileReport)
def report_figure(report: CompileReport, picture: Picture) -> Figure:
  """The figure of `CompileReport.picture`."""
  makers = {
    "memory": lambda: memory_figure(report.categories, report.chip),
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


def memory_figure(categories: Mapping[str, int], chip: Chip | None) -> Figure:
  """Bytes per device by category, stacked, and the memory of a device."""
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
  """The terms of a step: overlapping terms start at the same time; waiting terms follow them."""
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
  """Horizontal bars, the first on top; more than one group of items has a legend.

  `label` names the quantity; `units` are its units, smallest first. `limit`, the memory that a device may
  use, is a line, if it is near.
  """
  most = max((item.start + item.value for item in items), default=1.0)
  scale, unit = next((unit for unit in reversed(units) if most >= unit[0]), units[0])
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


def _mark(axes: Any, limit: float, most: float, scale: float) -> str:
  """Draws the memory that a device may use, and widens the scale for it; as text if it is far right."""
  if not limit:
    return ""
  if limit > 4 * most:
    return f"; usable: {format_bytes(limit)}, far to the right"
  axes.axvline(limit / scale, color=RED, linestyle="--", label=f"usable: {format_bytes(limit)}")
  axes.set_xlim(0, 1.15 * max(limit, most) / scale)
  return ""
