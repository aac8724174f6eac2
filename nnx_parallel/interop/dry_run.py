"""The dry run of an import or export: what happens to each array, before any array is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nnx_parallel.core.text import number_pattern, text_table
from nnx_parallel.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Row:
  """What happens to an array of the file, or to a leaf of the model; its name, dtype and shape in both."""

  status: str
  file: str = ""
  array: str = ""
  model: str = ""
  leaf: str = ""
  note: str = ""


@dataclasses.dataclass(frozen=True)
class DryRun:
  """One row for each array, or stack of arrays, and leaf; prints as a table with equal layers in one row."""

  rows: Sequence[Row]

  @property
  def complete(self) -> bool:
    """Whether the import or export can go on."""
    return not any(row.status in ("unused", "missing", "does not fit") for row in self.rows)

  def require_complete(self) -> None:
    """Raises unless it is complete."""
    missing = [f"missing  {row.model}: {row.note}" for row in self.rows if row.status == "missing"]
    spare = [f"unused   {row.file or row.note}" for row in self.rows if row.status == "unused"]
    if missing or spare:
      raise CheckpointError(
        f"the weight map is not complete: {len(missing)} leaves of the model have no source, "
        f"{len(spare)} arrays of the file no use.",
        details="\n".join([*missing[:12], *spare[:12]]),
        fix="add rules, leave out leaves of the model by name (skip=[...], --skip) or arrays of the file "
        "(nxp.interop.WeightMap(..., ignore=[...])), or make a model of as many layers.",
      )
    if wrong := [row.note for row in self.rows if row.status == "does not fit"]:
      raise CheckpointError(
        wrong[0],
        fix="correct the pattern of its rule, or name the dtype in the file:"
        ' nxp.interop.Rule(..., dtype="float32").',
      )

  def __str__(self) -> str:
    folded: dict[tuple[str, ...], list[Row]] = {}
    for row in self.rows:
      key = (row.status, number_pattern(row.file), row.array, number_pattern(row.model), row.leaf, row.note)
      folded.setdefault(key, []).append(row)
    lines: list[tuple[str, ...]] = []
    for (status, file, array, model, leaf, note), found in folded.items():
      if len(found) == 1:
        file, model = found[0].file, found[0].model
      lines.append((status, str(len(found)), file, array, model, leaf, note))
    lines.sort(key=lambda line: line[0] in ("read", "write"))
    return text_table(("status", "n", "file", "array", "model", "leaf", "spec"), lines, right=(1,))
