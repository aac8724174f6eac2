"""The arrays that a plan replicates, their cost, and the leaves that the optimizer trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from flax import nnx

from nnx_parallel.core.checked import warn
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.text import Shown, format_array, format_bytes, text_table
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.show.text import grouped
from nnx_parallel.layout.table import PlanTable
from nnx_parallel.layout.tracing import Abstract, nothing_selected

LARGE = 2**20
"""Bytes above which a replicated leaf is reported: 1 MiB, which is the `min_size` of `fsdp()` in float32."""


@dataclasses.dataclass(frozen=True)
class Replicated:
  """A large leaf that every device holds in full."""

  leaf: LeafPlan  # its row in the plan
  axis: str | None  # the largest mesh axis that could split it; None if no axis divides a dim
  dim: int | None  # the dim that it would split, or None

  @property
  def wasted(self) -> int:
    """Bytes per device that splitting it over `axis` would save; 0 when nothing divides."""
    return (
      0 if self.axis is None else self.leaf.bytes - self.leaf.bytes // axis_sizes(self.leaf.mesh)[self.axis]
    )

  @property
  def remedy(self) -> str:
    """For example `fsdp could split dim 1`; or why nothing can."""
    if self.dim is None:
      return "no mesh axis divides a dim"
    return f"{self.axis} could split dim {self.dim} ({self.leaf.shape[self.dim]})"


@dataclasses.dataclass(frozen=True)
class Audit(Shown, Sequence[Replicated]):
  """The large replicated leaves, by bytes wasted; prints as a table, and is falsy if there are none."""

  findings: tuple[Replicated, ...]  # the leaves, worst first
  min_bytes: int  # the threshold that was used, in bytes

  def __len__(self) -> int:
    return len(self.findings)

  def __getitem__(self, index: Any) -> Any:
    return self.findings[index]

  @property
  def wasted(self) -> int:
    """Bytes per device that could be saved in total."""
    return sum(finding.wasted for finding in self.findings)

  def __str__(self) -> str:
    if not self.findings:
      return f"nothing above {format_bytes(self.min_bytes)} is replicated."
    rows: list[tuple[str, ...]] = []
    by_leaf = {finding.leaf.name: finding for finding in self.findings}
    for pattern, leaves in grouped(finding.leaf for finding in self.findings):
      first = by_leaf[leaves[0].name]
      rows.append(
        (
          pattern,
          str(len(leaves)),
          format_array(first.leaf.dtype, first.leaf.shape),
          format_bytes(sum(leaf.bytes_per_device for leaf in leaves)),
          format_bytes(sum(by_leaf[leaf.name].wasted for leaf in leaves)),
          first.leaf.decision.reason + ("" if first.leaf.decision.intended else " (!)"),
          first.remedy,
        )
      )
    header = ("replicated", "n", "array", "per device", "wasted", "why", "what could split it")
    marks = "\n(!) no rule asks for it" if any(not f.leaf.decision.intended for f in self.findings) else ""
    total = f"{format_bytes(self.wasted)} per device could be saved."
    return f"{text_table(header, rows, right=(1, 3, 4), wrap=(5, 6))}\n{total}{marks}"


def audit(plan: PlanTable, *, min_bytes: int = LARGE) -> Audit:
  """See `Plan.audit`."""
  large = [leaf for leaf in plan.leaves if leaf.bytes > min_bytes and leaf.copies == plan.mesh.size > 1]
  found = sorted(map(_replicated, large), key=lambda finding: (-finding.wasted, -finding.leaf.bytes))
  return Audit(tuple(found), min_bytes)


def _replicated(leaf: LeafPlan) -> Replicated:
  sizes = {axis: size for axis, size in axis_sizes(leaf.mesh).items() if size > 1}
  fitting = [
    (size, leaf.shape[dim], axis, dim)
    for axis, size in sizes.items()
    for dim in range(len(leaf.shape))
    if leaf.shape[dim] % size == 0
  ]
  if not fitting:
    return Replicated(leaf, None, None)
  # The largest axis saves most; among its dims, the largest keeps the shards thick.
  _, _, axis, dim = max(fitting, key=lambda option: option[:2])
  return Replicated(leaf, axis, dim)


def warn_replicated(plan: PlanTable) -> bool:
  """See `Plan.warn_replicated`."""
  found = [f for f in audit(plan) if not f.leaf.decision.intended and f.leaf.root == "model"]
  if not found:
    return False
  worst = found[0]
  shown = worst.leaf
  more = f" and {len(found) - 1} more" if len(found) > 1 else ""
  held = format_bytes(sum(finding.leaf.bytes for finding in found))
  others = sorted({finding.leaf.kind for finding in found if not finding.leaf.is_parameter})
  what = f"the model ({', '.join(others)})" if others else "parameters"
  fallback = plan.rules.fallback
  mend = "nxp.fsdp() at the end of the rules splits them"
  if fallback is not None and fallback.mode == "fsdp":
    mend = 'nxp.plan(..., uneven="pad") splits dims that no axis divides'
  message = (
    f"{held} of {what} are replicated on {plan.mesh.size} devices: {shown.name}"
    f" {format_array(shown.dtype, shown.shape)} ({shown.decision.reason}; {worst.remedy}){more}."
    f" print(plan.audit()) lists them; {mend}, nxp.replicate() accepts them."
  )
  warn(message)
  return True


@dataclasses.dataclass(frozen=True)
class Trainable(Shown):
  """The leaves that a filter trains and freezes; prints as a summary."""

  wrt: nnx.filterlib.Filter  # the filter
  trained: tuple[LeafPlan, ...]  # the model's leaves that it selects
  frozen: tuple[LeafPlan, ...]  # the other parameters (`nnx.Param` and its subclasses)
  other: tuple[LeafPlan, ...]  # the remaining leaves: statistics, RNG state, caches, raw arrays

  def __str__(self) -> str:
    lines = [_count(label, leaves) for label, leaves in self._parts()]
    for label, leaves in self._parts():
      patterns = [pattern for pattern, _ in grouped(leaves)]
      shown = ", ".join(patterns[:8]) + (f", and {len(patterns) - 8} more" if len(patterns) > 8 else "")
      lines += [f"{label}: {shown}"] if patterns else []
    return "\n".join(lines)

  def _parts(self) -> Iterator[tuple[str, tuple[LeafPlan, ...]]]:
    yield "trained", self.trained
    yield "frozen", self.frozen
    if self.other:
      yield "other", self.other


def _count(label: str, leaves: Iterable[LeafPlan]) -> str:
  rows = tuple(leaves)
  elements = sum(math.prod(leaf.shape) for leaf in rows)
  total, held = sum(leaf.bytes for leaf in rows), sum(leaf.bytes_per_device for leaf in rows)
  size = f"total size {format_bytes(total)}, {format_bytes(held)} per device"
  return f"{label:8}{len(rows):>6} arrays {elements:>16,} elements   {size}"


def trainable(plan: PlanTable, model: Abstract, wrt: nnx.filterlib.Filter) -> Trainable:
  """See `Plan.trainable`."""
  selects = nnx.filterlib.to_predicate(wrt)
  trained: list[LeafPlan] = []
  frozen: list[LeafPlan] = []
  other: list[LeafPlan] = []
  rows = plan.of("model")
  for path, leaf in model.leaves.items():
    target = trained if selects(cast(Any, path), leaf) else frozen if isinstance(leaf, nnx.Param) else other
    target.append(rows[path])
  if not trained:
    raise nothing_selected(wrt, model)
  return Trainable(wrt, tuple(trained), tuple(frozen), tuple(other))
