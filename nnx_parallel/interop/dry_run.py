"""The dry run of an import or export: what happens to each array, before any array is read."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from nnx_parallel.checkpoint import encoding
from nnx_parallel.checkpoint.diff import TargetLeaf
from nnx_parallel.core.text import format_array, format_spec, number_pattern, text_table
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.safetensors import Tensor, read_tensors
from nnx_parallel.interop.weights import Group, SameNames, WeightMap, initialised, model_leaves, require_fit
from nnx_parallel.layout.plan import Plan


@dataclasses.dataclass(frozen=True)
class Row:
  """What happens to an array of the file, or to a leaf of the model.

  Attributes:
    status: `read`, `write`, `ignored`, `initialised`, `left out`; or `unused`, `missing`, `does not fit`.
    file: the name in the file, or empty; `*` replaces the numbers of a stack.
    array: the array's dtype and shape in the file.
    model: the path in the model, or empty.
    leaf: the leaf's dtype and shape in the model.
    note: the spec of a leaf that is read; otherwise the reason.
  """

  status: str
  file: str = ""
  array: str = ""
  model: str = ""
  leaf: str = ""
  note: str = ""


@dataclasses.dataclass(frozen=True)
class DryRun:
  """What would happen to each array; prints as a table with equal layers in one row.

  Attributes:
    rows: one row for each array, or stack of arrays, and leaf.
  """

  rows: Sequence[Row]

  @property
  def complete(self) -> bool:
    """Whether the import or export can go on."""
    return not any(row.status in ("unused", "missing", "does not fit") for row in self.rows)

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


def dry_run_import(
  path: str | os.PathLike[str],
  plan: Plan,
  weight_map: WeightMap | None = None,
  *,
  skip: Iterable[str] = (),
) -> DryRun:
  """Shows what `import_safetensors` would do with the same arguments; it reads only the headers of the files.

  Args:
    path: as for `import_safetensors`.
    plan: the plan of the model; it may be on an abstract mesh.
    weight_map: as for `import_safetensors`.
    skip: as for `import_safetensors`.

  Returns:
    A table of what happens to each array; `complete` says whether the import can proceed.

  Raises:
    CheckpointError: the files cannot be read, a pattern does not fit its arrays, or a `skip` pattern matches
      nothing.

  Example:
    >>> import pathlib, tempfile
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> folder = pathlib.Path(tempfile.mkdtemp(), "model")
    >>> init = lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    >>> _ = nxp.interop.export_safetensors(folder, init())
    >>> plan = nxp.plan(init, nxp.abstract_mesh(fsdp=8), nxp.fsdp(min_size=8))
    >>> [(row.status, row.file, row.model) for row in dry_run_import(folder, plan).rows]
    [('read', 'bias', 'bias'), ('read', 'kernel', 'kernel')]
  """
  wanted = model_leaves(plan)
  left_out = initialised(plan, wanted, skip)
  tensors = read_tensors(path)
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  found = (weight_map or SameNames()).compare(wanted, shapes, left_out)
  rows: list[Row] = []
  for group in found.groups:
    status, reason = "read", ""
    try:
      require_fit(group, tensors, wanted)
    except CheckpointError as error:
      status, reason = "does not fit", error.what
    for leaf in group.layers.values():
      if leaf in left_out or leaf in found.missing:
        continue
      note = reason or format_spec(wanted[leaf].struct.sharding.spec)
      rows.append(Row(status, *_of_file(group, tensors), leaf, _leaf(wanted[leaf]), note))
  for leaf, reason in found.missing.items():
    rows.append(Row("missing", model=leaf, leaf=_leaf(wanted[leaf]), note=reason))
  for name in found.cut:
    rows.append(Row("unused", note=name))
  for status, names in (("unused", found.unused), ("ignored", found.ignored)):
    rows += [Row(status, name, format_array(tensors[name].dtype, tensors[name].shape)) for name in names]
  rows += [Row("initialised", model=leaf, leaf=_leaf(wanted[leaf])) for leaf in wanted if leaf in left_out]
  return DryRun(rows)


def dry_run_export(plan: Plan, weight_map: WeightMap | None = None, *, skip: Iterable[str] = ()) -> DryRun:
  """Lists the arrays that `export_safetensors` would write for a model with this plan; no array is read.

  Args:
    plan: the plan of the model.
    weight_map: as for `export_safetensors`.
    skip: as for `export_safetensors`.

  Returns:
    A table of the arrays that would be written.

  Raises:
    CheckpointError: the weight map is incomplete, or a `skip` pattern matches nothing.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> plan = nxp.plan(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nxp.abstract_mesh(fsdp=8), nxp.fsdp())
    >>> [(row.status, row.file, row.array) for row in dry_run_export(plan, skip=["bias"]).rows]
    [('write', 'kernel', 'float32[8,4]'), ('left out', '', '')]
  """
  leaves = model_leaves(plan)
  left_out = initialised(plan, leaves, skip)
  shapes = {path: leaf.shape for path, leaf in leaves.items()}
  rows: list[Row] = []
  for group in (weight_map or SameNames()).to_write(path for path in leaves if path not in left_out):
    group, made = group.numbered(shapes)
    for path in group.layers.values():
      dtype = encoding.dtype_name(group.rule.dtype or leaves[path].struct.dtype)
      array = _stacked(group, format_array(dtype, made[0]))
      rows.append(Row("write", _name(group), array, path, _leaf(leaves[path])))
  rows += [Row("left out", model=path, leaf=_leaf(leaves[path])) for path in leaves if path in left_out]
  return DryRun(rows)


def _of_file(group: Group, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
  first = tensors[group.names[0]]
  return _name(group), _stacked(group, format_array(first.dtype, first.shape))


def _name(group: Group) -> str:
  return re.sub(r"\{\w+\}", "*", group.file)


def _stacked(group: Group, array: str) -> str:
  return f"{len(group.names)} x {array}" if len(group.names) > 1 else array


def _leaf(leaf: TargetLeaf) -> str:
  return format_array(encoding.dtype_name(leaf.struct.dtype), leaf.shape)
