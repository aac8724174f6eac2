"""Small pictures as SVG text, without any library: for pages, notebooks and papers."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Okabe and Ito's palette: told apart by readers with any colour vision.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#7A7A7A", "#333333")
_INK = {
  colour: "black" if colour in ("#E69F00", "#56B4E9", "#B8A800", "#CC79A7") else "white" for colour in PALETTE
}
_LETTER = 7.2  # pixels, of the wider letters at size 12
_FONT = "font-family='system-ui, sans-serif'"


@dataclass(frozen=True)
class Item:
  """Something with a size: its name, its value, the label of the value, and its group (a colour)."""

  name: str
  value: float
  label: str
  group: str = ""


@dataclass(frozen=True)
class Box:
  """A rectangle of a treemap, in pixels."""

  x: float
  y: float
  width: float
  height: float


def treemap(items: Sequence[Item], width: int = 900, height: int = 420) -> str:
  """Rectangles whose areas are the items' values.

  Example:
    >>> picture = treemap([Item("a", 3, "3 B"), Item("b", 1, "1 B")])
    >>> picture.count("<rect"), picture.startswith("<svg")
    (2, True)
  """
  ordered = sorted((i for i in items if i.value > 0), key=lambda i: -i.value)
  groups = list(dict.fromkeys(item.group for item in ordered))
  boxes = squarify([item.value for item in ordered], Box(0, 0, width, height))
  parts: list[str] = []
  for item, box in zip(ordered, boxes, strict=True):
    colour = PALETTE[groups.index(item.group) % len(PALETTE)]
    tip = html.escape(f"{item.name}: {item.label}")
    parts.append(
      f"<g><title>{tip}</title><rect x='{box.x:.1f}' y='{box.y:.1f}' width='{box.width:.1f}' "
      f"height='{box.height:.1f}' fill='{colour}' stroke='white'/>"
    )
    if box.width > 60 and box.height > 34:
      room = int((box.width - 8) / _LETTER)
      parts.append(_text(box.x + 5, box.y + 15, _tail(item.name, room), _INK[colour]))
      if len(item.label) <= room:
        parts.append(_text(box.x + 5, box.y + 29, item.label, _INK[colour]))
    parts.append("</g>")
  named = [Item(group, 1.0, "") for group in groups] if len(groups) > 1 else []
  more, below = _legend(named, width, height + 8)
  return _svg(width, height + below, [*parts, *more], f"{len(ordered)} parts by size")


def squarify(values: Sequence[float], box: Box) -> list[Box]:
  """Cuts a rectangle into areas in proportion to `values`, each as square as possible.

  Source: Bruls, Huizing and van Wijk, "Squarified treemaps", 2000.

  Args:
    values: positive, largest first.
    box: the rectangle to cut.
  """
  boxes: list[Box] = []
  left = list(values)
  total = sum(left)
  while left:
    scale = box.width * box.height / total
    short = min(box.width, box.height)
    count = 1
    while count < len(left) and _worst(left[: count + 1], short, scale) <= _worst(left[:count], short, scale):
      count += 1
    row = left[:count]
    depth = sum(row) * scale / short if short else 0.0
    at = 0.0
    for value in row:
      length = value * scale / depth if depth else 0.0
      if box.width >= box.height:
        boxes.append(Box(box.x, box.y + at, depth, length))
      else:
        boxes.append(Box(box.x + at, box.y, length, depth))
      at += length
    if box.width >= box.height:
      box = Box(box.x + depth, box.y, max(0.0, box.width - depth), box.height)
    else:
      box = Box(box.x, box.y + depth, box.width, max(0.0, box.height - depth))
    left, total = left[count:], total - sum(row)
    if total <= 0 or box.width * box.height <= 0:
      boxes += [Box(box.x, box.y, 0.0, 0.0)] * len(left)
      break
  return boxes


def stacked_bar(items: Sequence[Item], limit: Item | None = None, width: int = 900) -> str:
  """One bar of consecutive parts, with a mark at a limit, and a legend."""
  shown = [item for item in items if item.value > 0]
  whole = max(sum(i.value for i in shown), limit.value if limit else 0.0, 1e-30)
  scale = (width - 2) / whole
  parts: list[str] = []
  at = 1.0
  for n, item in enumerate(shown):
    colour = PALETTE[n % len(PALETTE)]
    tip = html.escape(f"{item.name}: {item.label}")
    parts.append(
      f"<rect x='{at:.1f}' y='22' width='{item.value * scale:.1f}' height='30' fill='{colour}'>"
      f"<title>{tip}</title></rect>"
    )
    at += item.value * scale
  if limit is not None:
    x = min(width - 1.0, 1 + limit.value * scale)
    parts.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='16' y2='58' stroke='#D55E00' stroke-width='2'/>")
    parts.append(_text(x, 12, f"{limit.name} {limit.label}", "#D55E00", anchor="end" if x > 200 else "start"))
  more, below = _legend(shown, width, 64)
  return _svg(width, 66 + below, [*parts, *more], "parts of a whole")


def scatter(
  items: Sequence[tuple[Item, float]],
  labels: tuple[str, str],
  limit: Item | None = None,
  formats: tuple[Callable[[float], str], Callable[[float], str]] = (str, str),
  width: int = 900,
) -> str:
  """Points on two scales that start at zero: those of the front are joined and named.

  Args:
    items: (point, height): the point's value runs to the right; a group marks it as on the front.
    labels: what runs to the right, and what upwards.
    limit: a mark on the scale to the right; only named where it is so far that the points would be one.
    formats: how the values on the two scales are written.
    width: in pixels.
  """
  high, base = 300, 326
  most = max((item.value for item, _ in items), default=1.0)
  near = limit is not None and limit.value <= 4 * most
  far = (max(most, limit.value) if limit and near else most) * 1.05 or 1.0
  top = max((height for _, height in items), default=1.0) * 1.08 or 1.0

  def place(item: Item, height: float) -> tuple[float, float]:
    return 70 + (width - 110) * item.value / far, base - high * height / top

  parts = [
    f"<line x1='70' x2='{width - 40}' y1='{base}' y2='{base}' stroke='currentColor'/>",
    f"<line x1='70' x2='70' y1='{base - high}' y2='{base}' stroke='currentColor'/>",
    _text(width - 40, base + 18, labels[0], anchor="end"),
    _text(74, base - high + 4, labels[1]),
    _text(64, base + 14, "0", anchor="end"),
  ]
  for value in _ticks(far, 1024):
    x = 70 + (width - 110) * value / far
    parts.append(_grid(x, x, base, base - high))
    if x < width - 190:  # the label of the scale stands there
      parts.append(_text(x, base + 18, formats[0](value), anchor="middle", size=11))
  for value in _ticks(top, 1000):
    y = base - high * value / top
    parts.append(_grid(70, width - 40, y, y))
    parts.append(_text(64, y + 4, formats[1](value), anchor="end", size=11))
  if limit is not None and not near:
    note = f"{limit.name} {limit.label}: far to the right"
    parts.append(_text(width - 44, base - high + 4, note, "#D55E00", anchor="end"))
  elif limit is not None:
    x = place(limit, 0)[0]
    parts.append(
      f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{base - high}' y2='{base}' stroke='#D55E00' stroke-width='2'/>"
    )
    parts.append(_text(x - 5, base - high + 4, f"{limit.name} {limit.label}", "#D55E00", anchor="end"))
  for item, height in sorted(items, key=lambda pair: bool(pair[0].group)):
    x, y = place(item, height)
    colour, radius = (PALETTE[5], 5) if item.group else (PALETTE[0], 2)
    tip = html.escape(f"{item.name}: {item.label}")
    parts.append(
      f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius}' fill='{colour}'><title>{tip}</title></circle>"
    )
  marked = [(item, height) for item, height in items if item.group]
  for item, height in (marked[0], marked[-1]) if len(marked) > 1 else marked:
    x, y = place(item, height)
    parts.append(_text(min(x, width - 130), y + 20, item.label, anchor="middle"))
  front = [place(item, height) for item, height in marked]
  for (x1, y1), (x2, y2) in itertools.pairwise(front):
    parts.append(
      f"<line x1='{x1:.1f}' x2='{x2:.1f}' y1='{y1:.1f}' y2='{y2:.1f}' stroke='#D55E00' stroke-width='1'/>"
    )
  return _svg(width, base + 26, parts, f"{labels[1]} against {labels[0]}")


def _ticks(most: float, base: int) -> list[float]:
  """Up to six round values from above 0 to `most`, in the unit of `base` (1000 or 1024) that it has."""
  unit = float(base) ** math.floor(math.log(most, base))
  steps = (digit * 10.0**power * unit for power in range(-1, 4) for digit in (1, 2, 5))
  step = next(s for s in steps if most / s <= 6)
  return [step * n for n in range(1, int(most / step) + 1)]


def _grid(x1: float, x2: float, y1: float, y2: float) -> str:
  place = f"x1='{x1:.1f}' x2='{x2:.1f}' y1='{y1:.1f}' y2='{y2:.1f}'"
  return f"<line {place} stroke='currentColor' stroke-opacity='0.15'/>"


def bars(items: Sequence[Item], width: int = 900) -> str:
  """Horizontal bars, one per item, longest as given."""
  most = max((item.value for item in items), default=0.0) or 1.0
  groups = list(dict.fromkeys(item.group for item in items))
  parts: list[str] = []
  for n, item in enumerate(items):
    y = 6 + 24 * n
    length = max(1.0, (width - 420) * item.value / most)
    colour = PALETTE[groups.index(item.group) % len(PALETTE)]
    parts.append(_text(262, y + 13, _short(item.name, 38), anchor="end"))
    parts.append(f"<rect x='270' y='{y}' width='{length:.1f}' height='17' fill='{colour}'/>")
    parts.append(_text(276 + length, y + 13, item.label))
  return _svg(width, 12 + 24 * max(1, len(items)), parts, "bars")


def device_grid(axes: Sequence[tuple[str, int]], width: int = 900, most: int = 256) -> str:
  """The mesh as a grid of numbered devices: the last axis runs to the right, the others downwards."""
  columns = axes[-1][1] if axes else 1
  rows = 1
  for _, size in axes[:-1]:
    rows *= size
  shown_rows, shown_columns = min(rows, max(1, most // min(columns, 32))), min(columns, 32)
  cell = min(46, (width - 260) // shown_columns)
  parts = [_text(255, 14, f"{axes[-1][0]} 0 .. {columns - 1}" if axes else "")]
  for row in range(shown_rows):
    y = 22 + row * 24
    parts.append(_text(248, y + 15, _coordinates(axes[:-1], row), anchor="end"))
    for column in range(shown_columns):
      number = row * columns + column
      colour = PALETTE[row % len(PALETTE)]
      x = 255 + column * cell
      parts.append(
        f"<rect x='{x}' y='{y}' width='{cell - 2}' height='21' fill='{colour}' fill-opacity='0.25' "
        f"stroke='{colour}'/>"
      )
      parts.append(_text(x + cell / 2 - 1, y + 15, str(number), anchor="middle", size=10))
  if (shown_rows, shown_columns) != (rows, columns):
    parts.append(
      _text(255, 22 + shown_rows * 24 + 14, f"{shown_rows * shown_columns} of {rows * columns} devices")
    )
  return _svg(width, 44 + shown_rows * 24, parts, "devices of the mesh")


def timeline(
  rows: Sequence[tuple[str, Sequence[tuple[float, float, str]]]], whole: float, unit: str, width: int = 900
) -> str:
  """Rows of (start, length, label) on one time scale that ends at `whole`."""
  scale = (width - 240) / (whole or 1.0)
  parts: list[str] = []
  for n, (name, spans) in enumerate(rows):
    y = 8 + 28 * n
    parts.append(_text(190, y + 15, _short(name, 28), anchor="end"))
    for start, length, label in spans:
      x, long = 200 + start * scale, max(1.0, length * scale)
      colour = PALETTE[n % len(PALETTE)]
      parts.append(
        f"<rect x='{x:.1f}' y='{y}' width='{long:.1f}' height='21' fill='{colour}'>"
        f"<title>{html.escape(label)}</title></rect>"
      )
      if long > 7 * len(label):
        parts.append(_text(x + 5, y + 15, label, _INK[colour]))
  y = 8 + 28 * len(rows)
  parts.append(f"<line x1='200' x2='{width - 40}' y1='{y}' y2='{y}' stroke='currentColor'/>")
  parts.append(_text(200, y + 15, "0"))
  parts.append(_text(width - 40, y + 15, unit, anchor="end"))
  return _svg(width, y + 22, parts, "predicted step")


def _legend(items: Sequence[Item], width: int, top: float) -> tuple[list[str], float]:
  """Coloured squares with names and values, in rows; and the height that they take."""
  parts: list[str] = []
  x, y = 1.0, top
  for n, item in enumerate(items):
    text = f"{item.name} {item.label}".strip()
    long = 18 + _LETTER * len(text) + 18
    if x > 1 and x + long > width:
      x, y = 1.0, y + 20
    colour = PALETTE[n % len(PALETTE)]
    parts.append(f"<rect x='{x:.1f}' y='{y:.1f}' width='11' height='11' fill='{colour}'/>")
    parts.append(_text(x + 17, y + 10, text))
    x += long
  return parts, y - top + 22 if items else 0.0


def _worst(row: Sequence[float], short: float, scale: float) -> float:
  """Largest ratio of sides in a row of a treemap."""
  area = sum(row) * scale
  if not area or not short:
    return float("inf")
  most, least = max(row) * scale, min(row) * scale
  return max(short**2 * most / area**2, area**2 / (short**2 * least))


def _coordinates(axes: Sequence[tuple[str, int]], row: int) -> str:
  words: list[str] = []
  for name, size in reversed(axes):
    if size > 1:
      words.append(f"{name} {row % size}")
    row //= size
  return ", ".join(reversed(words))


def _short(text: str, room: int) -> str:
  return text if len(text) <= room else f"{text[: max(1, room - 1)]}…"


def _tail(path: str, room: int) -> str:
  """Shortens a path by whole parts where it can: the number of its layer and its end tell leaves apart.

  Example:
    >>> _tail("blocks.3.mlp.up.kernel", 16), _tail("blocks.3.mlp.up.kernel", 12)
    ('3.mlp.up.kernel', '3…up.kernel')
  """
  if len(path) <= room:
    return path
  parts = path.replace("/", ".").split(".")
  # A position in optax's chain is not a layer.
  numbers = [
    n for n, part in enumerate(parts) if part.isdigit() and "opt_state" not in parts[max(0, n - 2) : n]
  ]
  layer = numbers[-1] if numbers else 0
  tails = [".".join(parts[n:]) for n in range(1, layer + 1)]
  head = f"{parts[layer]}…" if numbers else ""
  tails += [head + ".".join(parts[n:]) for n in range(layer + 1, len(parts))]
  return next((tail for tail in tails if len(tail) <= room), _short((tails or parts)[-1], room))


def _text(
  x: float, y: float, text: str, fill: str = "currentColor", anchor: str = "start", size: int = 12
) -> str:
  return (
    f"<text x='{x:.1f}' y='{y:.1f}' {_FONT} font-size='{size}' fill='{fill}' text-anchor='{anchor}'>"
    f"{html.escape(text)}</text>"
  )


def _svg(width: int, height: float, parts: Sequence[str], title: str) -> str:
  return (
    f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height:.0f}' width='{width}' "
    f"role='img' aria-label='{html.escape(title, quote=True)}'>{''.join(parts)}</svg>"
  )
