"""The result of a check of gradients: rows of numbers, a verdict, and their text."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Hashable, Mapping
from typing import Any, Literal

from nnx_parallel.core.text import Shown, few, format_spec, page_width, text_table
from nnx_parallel.errors import TrainError

Verdict = Literal["right", "wrong", "not decided"]


@dataclasses.dataclass(frozen=True)
class GradientComparison:
  """Derivatives of the loss along random directions in some leaves, in reverse mode and in forward mode.

  Attributes:
    name: the leaves, with `*` for the numbers of layers.
    leaves: their dotted paths.
    reverse: the product of the gradient with each direction.
    forward: the derivative of the loss along each direction, in forward mode; NaN if that is impossible.
    difference: the difference between `reverse` and `forward` (root mean square over the directions),
      relative to the value that is typical for a gradient of this norm.
    verdict: `"right"`, `"wrong"` or `"not decided"`.
    why: the reason for a verdict other than `"right"`.
  """

  name: str
  leaves: tuple[str, ...]
  reverse: tuple[float, ...]
  forward: tuple[float, ...]
  difference: float
  verdict: Verdict
  why: str = ""

  def __bool__(self) -> bool:
    return self.verdict != "wrong"

  @property
  def factor(self) -> float | None:
    """The factor by which the gradient is too large, if one factor explains all directions."""
    square = sum(f * f for f in self.forward)
    if not square:
      return None
    factor = sum(r * f for r, f in zip(self.reverse, self.forward, strict=True)) / square
    left = math.hypot(*(r - factor * f for r, f in zip(self.reverse, self.forward, strict=True)))
    return factor if len(self.forward) > 1 and left <= 0.02 * math.hypot(*self.reverse) else None


@dataclasses.dataclass(frozen=True)
class GradientCheck(Shown):
  """The result of `check_gradients`. It prints as a table, and is true if nothing is wrong.

  Attributes:
    comparisons: the comparisons: one for each group of equal layers, and for each leaf of a wrong group.
    losses: the loss that each program computed, by the name of the program.
    loss_verdict: whether the losses agree with a program that the compiler need not partition; `"not
      decided"` if there is no such program.
    tolerance: the largest `difference` that counts as right, in this dtype.
    dtype: the coarsest floating dtype in which the loss computes.
    layouts: dotted path -> spec, for the leaves whose gradients are wrong.
    mesh: mesh axis name -> size in devices.
    batch: the mesh axes that shard the batch.
    not_checked: the values that were not checked, and why.
    notes: further remarks: remedies, known faults.
    fix: the fix if something is wrong.
  """

  comparisons: tuple[GradientComparison, ...]
  losses: dict[str, float]
  loss_verdict: Verdict
  tolerance: float
  dtype: str
  layouts: dict[str, Any]
  mesh: dict[str, int]
  batch: tuple[str, ...]
  not_checked: tuple[str, ...] = ()
  notes: tuple[str, ...] = ()
  fix: str = ""

  def __bool__(self) -> bool:
    return all(self.comparisons) and self.loss_verdict != "wrong"

  @property
  def wrong(self) -> tuple[str, ...]:
    """The paths of the leaves whose gradients are wrong, by the smallest comparison with each leaf."""
    closest = {leaf: look for look in self.comparisons for leaf in look.leaves}
    found = tuple(leaf for leaf, look in closest.items() if not look)
    return found or tuple(leaf for look in self.comparisons if not look for leaf in look.leaves)

  @property
  def summary(self) -> str:
    """One line of text with the verdict on the gradients and the values that were not checked."""
    leaves = {leaf: look.verdict for look in self.comparisons for leaf in look.leaves}
    undecided = [leaf for leaf, verdict in leaves.items() if verdict == "not decided"]
    right = len(leaves) - len(undecided)
    said = f"the gradients of {right} leaves are right, to {self.tolerance:.0e} ({self.dtype})"
    if undecided:
      said += f", and of {few(undecided)} not decided"
    if not self:
      said = f"wrong gradients: {few(self.wrong)}" if self.wrong else "the loss is wrong"
    return "; ".join([said, *(f"not checked: {text}" for text in self.not_checked)])

  def raise_if_wrong(self) -> None:
    """Raises an error if something is wrong.

    Raises:
      TrainError: something is wrong; the message is the printed table.
    """
    if not self:
      raise TrainError(
        "the gradients on this layout are wrong." if self.wrong else "the loss on this layout is wrong.",
        details=str(self),
        fix=self.fix,
      )

  def __str__(self) -> str:
    rows: list[tuple[str, ...]] = []
    for look in self.comparisons:
      slopes = f"{look.reverse[0]:.4g}", f"{look.forward[0]:.4g}", format_difference(look.difference)
      verdict = f"{look.verdict}: {look.why}" if look.why else look.verdict
      rows.append((look.name, str(len(look.leaves)), *slopes, verdict))
    header = ("gradient of", "leaves", "reverse", "forward", "difference", "verdict")
    split = f", batch over {'+'.join(self.batch)}" if self.batch else ""
    lines = [f"mesh {format_mesh(self.mesh)}{split}; tolerance {self.tolerance:.0e} ({self.dtype})"]
    lines += [text_table(header, rows, right=(1, 2, 3, 4), wrap=(5,))]
    mark = ": wrong" if self.loss_verdict == "wrong" else ""
    lines.append("loss " + ", ".join(f"{value:.5g} {name}" for name, value in self.losses.items()) + mark)
    lines += [f"{path} is sharded {format_spec(spec)}" for path, spec in self.layouts.items()]
    texts = [f"not checked: {text}" for text in self.not_checked] + [f"note: {text}" for text in self.notes]
    for text in texts:
      lines += textwrap.wrap(text, page_width(), subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def merge_checks(found: dict[Hashable, GradientCheck]) -> GradientCheck:
  """One result for several losses, by the key of their model: all are right to the coarsest tolerance."""
  checks = list(found.values())
  if len(checks) == 1:
    return checks[0]
  return dataclasses.replace(
    max(checks, key=lambda check: check.tolerance),
    comparisons=tuple(look for check in checks for look in check.comparisons),
    losses={f"of {key} {name}": x for key, check in found.items() for name, x in check.losses.items()},
    loss_verdict=max((check.loss_verdict for check in checks), key=("right", "not decided", "wrong").index),
    layouts={name: spec for check in checks for name, spec in check.layouts.items()},
    not_checked=tuple(dict.fromkeys(text for check in checks for text in check.not_checked)),
    notes=tuple(dict.fromkeys(text for check in checks for text in check.notes)),
    fix=" ".join(dict.fromkeys(check.fix for check in checks if check.fix)),
  )


def format_mesh(sizes: Mapping[str, int]) -> str:
  """The axes of a mesh that split something, with their sizes."""
  return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


def format_difference(difference: float) -> str:
  """Rounding errors differ from machine to machine: of a small difference, only the size is shown."""
  if not difference < 0.01:
    return f"{difference:.2g}"
  return f"< {10.0 ** (math.floor(math.log10(max(difference, 1e-7))) + 1):.0e}"
