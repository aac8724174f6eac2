"""The plan as text: a table for people, and the explanation of one leaf."""

from __future__ import annotations

import dataclasses
import io
import re
from typing import TYPE_CHECKING

from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Table

from nnx_parallel.layout.mesh import describe_mesh

if TYPE_CHECKING:
  from nnx_parallel.layout.plan import LeafPlan, ShardingPlan

WIDTH = 120


def format_bytes(count: float) -> str:
  """Bytes in binary units with three significant digits.

  Args:
    count: bytes.

  Returns:
    For example `"1.5 MiB"`.

  Example:
    >>> from nnx_parallel.layout.render import format_bytes
    >>> format_bytes(512), format_bytes(1.5 * 2**20)
    ('512 B', '1.5 MiB')
  """
  for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
    if abs(count) < 1024 or unit == "TiB":
      return f"{count:.4g} {unit}" if unit != "B" else f"{count:.0f} B"
    count /= 1024
  raise AssertionError("unreachable")


def format_array(dtype: object, shape: tuple[int, ...]) -> str:
  """`float32[8,64]`."""
  return f"{dtype}[{','.join(map(str, shape))}]"


def format_spec(spec: PartitionSpec) -> str:
  """A spec in one short word per dim: `(-, fsdp, data+fsdp)`; `whole` when nothing is split."""
  if not any(spec):
    return "whole"
  parts = ["-" if not e else e if isinstance(e, str) else "+".join(e) for e in spec]
  return f"({', '.join(parts)})"


def explain(leaf: LeafPlan) -> str:
  """The text of `ShardingPlan.explain`."""
  lines = [f"{leaf.name}: {leaf.kind} {format_array(leaf.dtype, leaf.shape)} -> {leaf.spec}"]
  lines += leaf.decision.steps or (leaf.decision.reason,)
  if any(leaf.padding):
    lines.append(f"stored as {format_array(leaf.dtype, leaf.storage_shape)}; the module sees {leaf.shape}")
  local = tuple(s // n for s, n in zip(leaf.storage_shape, leaf.shards, strict=True))
  held = f"each device holds {format_array(leaf.dtype, local)}, {leaf.bytes_per_device} bytes of {leaf.bytes}"
  return "\n  ".join([*lines, held])


def plan_text(plan: ShardingPlan) -> str:
  """The text of `print(plan)`: mesh, one row per group of alike leaves, totals, notes."""
  table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
  for column in ("Variable", "type", "array", "spec"):
    table.add_column(column, overflow="fold")
  table.add_column("per device", justify="right", no_wrap=True)
  table.add_column("why", overflow="fold")
  for row in [*_model_rows(plan), *_optimizer_rows(plan)]:
    table.add_row(*row)
  buffer = io.StringIO()
  console = Console(file=buffer, width=WIDTH, color_system=None)
  console.print(describe_mesh(plan.mesh), highlight=False, markup=False)
  if len(plan.rules.logical):
    rules = ", ".join(
      f"{name} -> {' | '.join('+'.join(c) or 'whole' for c in options)}"
      for name, options in plan.rules.logical.items()
    )
    console.print(f"rules {rules}", highlight=False, markup=False)
  console.print(table, highlight=False, markup=False)
  console.print(_totals(plan), highlight=False, markup=False)
  for note in plan.notes:
    console.print(f"note: {note}", highlight=False, markup=False)
  return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


@dataclasses.dataclass
class _Group:
  name: str
  leaves: list[LeafPlan]


def _groups(keyed: list[tuple[object, str, LeafPlan]]) -> list[_Group]:
  groups: dict[object, _Group] = {}
  for key, name, leaf in keyed:
    groups.setdefault(key, _Group(name, [])).leaves.append(leaf)
  return list(groups.values())


def _pattern(leaf: LeafPlan) -> str:
  return ".".join("*" if isinstance(part, int) else str(part) for part in leaf.path)


def _model_rows(plan: ShardingPlan) -> list[tuple[str, ...]]:
  keyed = [
    ((_pattern(leaf), leaf.shape, str(leaf.dtype), leaf.spec, leaf.kind), _pattern(leaf), leaf)
    for leaf in plan.leaves
    if leaf.root == "model"
  ]
  return [_row(group) for group in _groups(keyed)]


def _optimizer_rows(plan: ShardingPlan) -> list[tuple[str, ...]]:
  # Moments that lie exactly as their parameters do need one row for all of them.
  keyed: list[tuple[object, str, LeafPlan]] = []
  for leaf in plan.leaves:
    if leaf.root != "optimizer":
      continue
    owner, _, why = leaf.decision.reason.partition(": ")
    if leaf.decision.source == "parameter" and why == "same shape":
      prefix = leaf.name.removesuffix(owner)
      keyed.append((prefix, f"{prefix}*", leaf))
    else:
      name = re.sub(r"\.\d+(?=\.)", ".*", leaf.name) if leaf.decision.source == "parameter" else leaf.name
      keyed.append(((name, leaf.shape, leaf.spec), name, leaf))
  return [_row(group) for group in _groups(keyed)]


def _row(group: _Group) -> tuple[str, ...]:
  first, count = group.leaves[0], len(group.leaves)
  name = group.name if count > 1 else first.name
  same_array = len({(leaf.shape, str(leaf.dtype)) for leaf in group.leaves}) == 1
  same_spec = len({leaf.spec for leaf in group.leaves}) == 1
  why = first.decision.reason
  if first.decision.source == "parameter":
    why = "as its parameter" if why.endswith(": same shape") else why.partition(": ")[2]
  array = format_array(first.dtype, first.shape) if same_array else f"{first.dtype}"
  padded = "" if not any(first.padding) else f" stored {format_array('', first.storage_shape)}"
  return (
    f"{name}  x{count}" if count > 1 else name,
    first.kind,
    array + padded,
    format_spec(first.spec) if same_spec else "each its own",
    format_bytes(sum(leaf.bytes_per_device for leaf in group.leaves)),
    why,
  )


def _totals(plan: ShardingPlan) -> str:
  lines: list[str] = []
  for root in ("model", "optimizer"):
    leaves = [leaf for leaf in plan.leaves if leaf.root == root]
    if leaves:
      total, held = (
        sum(leaf.bytes for leaf in leaves),
        sum(leaf.bytes_per_device for leaf in leaves),
      )
      elements = sum(leaf.bytes // leaf.dtype.itemsize for leaf in leaves)
      lines.append(
        f"{root}: {len(leaves)} arrays, {elements:,} elements, {format_bytes(total)} in all,"
        f" {format_bytes(held)} per device ({held * plan.mesh.size / max(total, 1):.2f} copies)"
      )
  if plan.tx is not None:
    lines.append(f"together: {format_bytes(plan.bytes_per_device())} per device")
  return "\n".join(lines)
