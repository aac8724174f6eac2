"""The difference of two plans, and golden plans for tests."""

from __future__ import annotations

import dataclasses
import difflib
import os
from pathlib import Path as File

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.nodes import path_str
from nnx_parallel.core.text import Shown, format_array, format_bytes, format_spec, number_pattern, text_table
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.show.text import grouped
from nnx_parallel.layout.table import PlanTable

UPDATE = "NNX_PARALLEL_UPDATE_GOLDEN"


@dataclasses.dataclass(frozen=True)
class Change:
  """One field of a leaf that differs between two plans."""

  name: str
  field: str
  before: str
  after: str


@dataclasses.dataclass(frozen=True)
class PlanDiff(Shown):
  """The difference of two plans; prints as a table, and is falsy for equal layouts."""

  mesh: tuple[dict[str, int], dict[str, int]] | None  # the two meshes' axes, when they differ
  removed: tuple[LeafPlan, ...]  # leaves that only the first plan has
  added: tuple[LeafPlan, ...]  # leaves that only the second plan has
  changes: tuple[Change, ...]  # the differences of leaves that both plans have
  bytes_per_device: tuple[int, int]  # the bytes of the first plan and of the second plan

  def __bool__(self) -> bool:
    return bool(self.mesh or self.removed or self.added or self.changes)

  def __str__(self) -> str:
    if not self:
      return "the two layouts are equal."
    rows: list[tuple[str, ...]] = []
    equal: dict[tuple[str, ...], list[str]] = {}
    for change in self.changes:
      pattern = number_pattern(change.name)
      equal.setdefault((pattern, change.field, change.before, change.after), []).append(change.name)
    for (pattern, field, before, after), names in equal.items():
      rows.append((pattern if len(names) > 1 else names[0], str(len(names)), field, before, after))
    for label, leaves in (("only before", self.removed), ("only after", self.added)):
      for name, found in grouped(leaves):
        shown = f"{format_array(found[0].dtype, found[0].shape)} {format_spec(found[0].spec)}"
        sides = (shown, "-") if label == "only before" else ("-", shown)
        rows.append((name, str(len(found)), "leaf", *sides))
    lines = [f"mesh {self.mesh[0]} -> {self.mesh[1]}"] if self.mesh else []
    if rows:
      lines += text_table(("changed", "n", "what", "before", "after"), rows, right=(1,)).splitlines()
    before, after = map(format_bytes, self.bytes_per_device)
    return "\n".join([*lines, f"per device {before} -> {after}"])


def diff(before: PlanTable, after: PlanTable) -> PlanDiff:
  """See `Plan.diff`."""
  old, new = ({leaf.name: leaf for leaf in p.leaves} for p in (before, after))
  changes: list[Change] = []
  for name, leaf in old.items():
    if name in new:
      pairs = zip(_layout(leaf).items(), _layout(new[name]).values(), strict=True)
      changes += [Change(name, field, a, b) for (field, a), b in pairs if a != b]
  meshes = axis_sizes(before.mesh), axis_sizes(after.mesh)
  return PlanDiff(
    meshes if list(meshes[0].items()) != list(meshes[1].items()) else None,
    tuple(leaf for name, leaf in old.items() if name not in new),
    tuple(leaf for name, leaf in new.items() if name not in old),
    tuple(changes),
    (before.bytes_per_device(), after.bytes_per_device()),
  )


def _layout(leaf: LeafPlan) -> dict[str, str]:
  return {
    "array": format_array(leaf.dtype, leaf.shape),
    "type": leaf.kind,
    "spec": format_spec(leaf.spec),
    "stored as": format_array("", leaf.storage_shape) if any(leaf.padding) else "-",
    "memory": leaf.memory_kind or "default",
    "tied to": ", ".join(map(path_str, leaf.aliases)) or "-",
  }


def golden_text(plan: PlanTable) -> str:
  """Only the layout, one readable line for each leaf: the content of golden files."""
  mesh = " ".join(f"{axis}={size}" for axis, size in axis_sizes(plan.mesh).items())
  rows = [f"{leaf.name}: {'  '.join(v for v in _layout(leaf).values() if v != '-')}" for leaf in plan.leaves]
  held = f"{plan.bytes_per_device()} bytes per device"
  return "\n".join([f"mesh {mesh}", *rows, held, ""])


@check_arguments(PlanError)
def assert_golden_plan(plan: PlanTable, file: str | os.PathLike[str], *, update: bool | None = None) -> None:
  """Fails if the layout of a plan differs from the layout in a file that you keep with your tests.

  Types, shapes, dtypes, specs, padding and bytes are compared; reasons and rules may change.

  Args:
    plan: the plan to check.
    file: the text file, for example `tests/golden/llama_fsdp.txt`.
    update: whether to write the file instead of comparing; by default, only if the environment variable
      `NNX_PARALLEL_UPDATE_GOLDEN` is `1`.

  Raises:
    AssertionError: the layout differs (the message shows the lines that differ), or the file does not exist.

  Example:
    >>> import tempfile, nnx_parallel as nxp
    >>> from flax import nnx
    >>> from nnx_parallel.layout.show.diff import assert_golden_plan
    >>> init = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   assert_golden_plan(plan, f"{folder}/linear.txt", update=True)
    ...   assert_golden_plan(plan, f"{folder}/linear.txt")
  """
  target, now = File(file), golden_text(plan)
  if os.environ.get(UPDATE) == "1" if update is None else update:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(now)
    return
  how = f"If that is meant, write it with {UPDATE}=1 and read the difference in review."
  if not target.exists():
    raise AssertionError(f"the golden plan {target} does not exist. {how}")
  lines = difflib.unified_diff(
    target.read_text().splitlines(), now.splitlines(), str(target), "this plan", lineterm="", n=0
  )
  changes = "\n".join(lines)
  if changes:
    raise AssertionError(f"the layout differs from the golden layout:\n{changes}\n{how}")
