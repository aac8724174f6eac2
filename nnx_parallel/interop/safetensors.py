"""Import and export of safetensors, with Hugging Face's index of several files.

The package `safetensors` reads and checks the headers. Each process reads only the pages of its own shards,
from a memory map, and writes only the bytes of its own shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Sharding

from nnx_parallel.checkpoint import encoding, lock, storage
from nnx_parallel.checkpoint.damage import friendly_errors
from nnx_parallel.core import together as multihost
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.nodes import is_key, value_of
from nnx_parallel.core.text import format_array
from nnx_parallel.core.types import DType
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.dry_run import DryRun, Row
from nnx_parallel.interop.weights import (
  Group,
  SameNames,
  Shape,
  WeightMap,
  find_initialised,
  import_arrays,
  in_model,
  leaves_to_write,
  model_leaves,
)
from nnx_parallel.layout.plan import Plan, check_plan

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {
  **{
    f"{kind[0].upper()}{bits}": np.dtype(f"{kind}{bits}")
    for kind in ("int", "uint")
    for bits in (8, 16, 32, 64)
  },
  **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
  "BF16": np.dtype(jnp.bfloat16),
  "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
  "F8_E5M2": np.dtype(jnp.float8_e5m2),
  "BOOL": np.dtype(bool),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_INDEX = 100 << 20


@dataclasses.dataclass(frozen=True)
class Tensor:
  """An array in a safetensors file of full size, from the byte `begin` on."""

  file: Path
  begin: int
  shape: Shape
  dtype: DType

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    """Copies a part of the array out of the file; all of it for `()`."""
    if 0 in self.shape:
      return np.empty(self.shape, self.dtype)[index]
    return np.array(np.memmap(self.file, self.dtype, "r", self.begin, self.shape)[index])

  def write(self, index: tuple[slice, ...], values: np.ndarray) -> None:
    """Writes a part of the array, one run of consecutive bytes after another."""
    # A memory map would write full pages, and so the bytes of other processes in the same file.
    if not values.size:
      return
    ends = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
    dim = len(ends)  # not cut from here on
    while dim and ends[dim - 1] == (0, self.shape[dim - 1]):
      dim -= 1
    starts = np.array(self.begin)
    for at, (start, stop) in enumerate(ends[:dim]):
      stride = math.prod(self.shape[at + 1 :]) * self.dtype.itemsize
      places = np.arange(start, stop if at < dim - 1 else start + 1) * stride
      starts = np.add.outer(starts, places)
    runs = np.ascontiguousarray(values, self.dtype).reshape(starts.size, -1).view(np.uint8)
    with self.file.open("r+b", buffering=0) as stream:
      for start, run in zip(starts.flat, runs, strict=True):
        stream.seek(int(start))
        rest = memoryview(run)
        while rest:
          rest = rest[stream.write(rest) :]


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
  """The arrays of a file, an index or a folder, by name; not their values."""
  path = Path(path)
  found: dict[str, Tensor] = {}
  places, index = _files(path)
  for file in places:
    opened = _open(file)
    if lost := [name for name, where in index.items() if where == file.name and name not in opened]:
      raise CheckpointError(
        f"{file} does not hold {lost[0]}, which its index places there.",
        details=f"{len(lost)} arrays are missing" if len(lost) > 1 else "",
        fix="copy or download the folder again.",
      )
    if twice := opened.keys() & found:
      raise CheckpointError(f"{min(twice)} is in two files of {path}.", fix="remove one of them.")
    found |= opened
  return found


@check_arguments(CheckpointError)
def import_safetensors(
  path: str | os.PathLike[str], plan: Plan, weight_map: WeightMap | None = None, *, skip: Iterable[str] = ()
) -> Any:
  """Creates a model from safetensors files; each process reads its share of each array.

  Random-number state (`nnx.RngState`) is not in such files, so it is initialised.

  Args:
    path: a safetensors file, or a folder of them.
    plan: the plan of the model; if it has an optimizer, a new optimizer is created.
    weight_map: a `WeightMap` that says which arrays become which leaves. None: the names in the files are the
      paths of the leaves.
    skip: patterns of the paths of leaves that the files do not have; these leaves are initialised.

  Returns:
    The module, or (module, optimizer).

  Raises:
    CheckpointError: the weight map is incomplete, or the shape or dtype of an array does not fit; the message
      names the array.

  Example:
    >>> import pathlib, tempfile
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> folder = pathlib.Path(tempfile.mkdtemp(), "model")
    >>> init = lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    >>> _ = export_safetensors(folder, init())
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=8))
    >>> import_safetensors(folder, plan).kernel.sharding.spec
    P('fsdp', None)
  """
  check_plan(plan, "nxp.interop.import_safetensors(path, plan)")
  return import_arrays(path, lambda: read_tensors(path), plan, weight_map or SameNames(), skip)


@check_arguments(CheckpointError)
def export_safetensors(
  path: str | os.PathLike[str],
  model: object,
  weight_map: WeightMap | None = None,
  *,
  skip: Iterable[str] = (),
  file_bytes: int = 5 << 30,
) -> list[str]:
  """Writes a model as safetensors files; each process writes its share of each array into the same files.

  Random-number state (`nnx.RngState`) is left out.

  Args:
    path: the folder to write. It must not exist yet, and it appears only when it is complete.
    model: a module, or a pytree of arrays.
    weight_map: as for `import_safetensors`; it is applied in reverse. None: the paths of the leaves are the
      names in the files.
    skip: patterns of the paths of leaves to leave out, for example `["*.bias"]`.
    file_bytes: the maximum size of a file, and about the host memory that process 0 needs. A larger model is
      written as several files with an index, as the loaders of Hugging Face expect.

  Returns:
    The names of the written arrays.

  Raises:
    CheckpointError: the folder exists, the weight map is incomplete, or safetensors cannot store the dtype of
      a leaf.

  Example:
    >>> import pathlib, tempfile
    >>> from flax import nnx
    >>> folder = pathlib.Path(tempfile.mkdtemp(), "model")
    >>> export_safetensors(folder, nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    ['bias', 'kernel']
  """
  return write_folder(path, model, weight_map, skip=skip, file_bytes=file_bytes)


@check_arguments(CheckpointError)
def dry_run_import(
  path: str | os.PathLike[str], plan: Plan, weight_map: WeightMap | None = None, *, skip: Iterable[str] = ()
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
  check_plan(plan, "nxp.interop.dry_run_import(path, plan)", creates=False)
  wanted = model_leaves(plan)
  left_out = find_initialised(plan, wanted, skip)
  return (weight_map or SameNames()).compare(wanted, read_tensors(path), left_out)[1]


@check_arguments(CheckpointError)
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
  check_plan(plan, "nxp.interop.dry_run_export(plan)", creates=False)
  leaves = model_leaves(plan)
  left_out = find_initialised(plan, leaves, skip)
  shapes = {path: leaf.shape for path, leaf in leaves.items()}
  rows: list[Row] = []
  for group in (weight_map or SameNames()).to_write(path for path in leaves if path not in left_out):
    group, made = group.numbered(shapes)
    for path in group.layers.values():
      dtype = encoding.dtype_name(group.rule.dtype or leaves[path].struct.dtype)
      rows.append(Row("write", *group.in_file(format_array(dtype, made[0])), path, in_model(leaves[path])))
  rows += [Row("left out", model=path, leaf=in_model(leaves[path])) for path in leaves if path in left_out]
  return DryRun(rows)


def write_folder(
  path: str | os.PathLike[str],
  model: object,
  weight_map: WeightMap | None = None,
  *,
  skip: Iterable[str] = (),
  file_bytes: int = 5 << 30,
  single: str = SINGLE,
  beside: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
  """`export_safetensors`, with the name of a single file, and texts to write beside it by file name."""
  final = Path(path).absolute()
  temporary = final.with_name(f"{final.name}.nnx-saving")
  is_first = jax.process_index() == 0

  @contextlib.contextmanager
  def on_all() -> Generator[None]:
    """A block of the export; an error on one process ends it on all processes."""
    with multihost.together(), friendly_errors(f"export to {final.name}", final.parent):
      yield

  with on_all():
    _require_new(final)
    leaves = _leaves(model, skip)
    families, specs = _to_write((weight_map or SameNames()).to_write(leaves), leaves)
  multihost.require_same("what to export", f"{final}\n{specs}")
  with contextlib.ExitStack() as stack:
    with on_all():
      if is_first:
        temporary.mkdir(parents=True, exist_ok=True)
        hold = lock.take(epath.Path(temporary))
        stack.callback(hold.let_go)
        stack.enter_context(hold.save(wait=False))
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        _require_new(final)  # whoever had the lock before may just have written it
        for left in temporary.iterdir():
          if left.name != lock.LOCK:
            left.unlink()
        _lay_out(temporary, specs, file_bytes, single)
        for name, text in beside.items():
          (temporary / name).write_text(text)
    with on_all():
      tensors = read_tensors(temporary)
    for first, *tied in families:
      near = leaves[next(iter(first.layers.values()))].array.sharding
      arrays = _arrays(first, leaves, near)
      for group in tied:
        with on_all():
          _require_same(group, _arrays(group, leaves, near), arrays)
      with on_all():
        _store([tensors[name] for name in first.names], arrays)
    with on_all():
      storage.make_tree_durable(epath.Path(temporary))
    with on_all():
      if is_first:
        temporary.rename(final)
        (final / lock.LOCK).unlink()
        storage.make_durable([epath.Path(final), epath.Path(final.parent)])
  return [*specs]


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """A leaf to be written, and its logical shape, without padding."""

  array: jax.Array
  shape: Shape


def _require_new(final: Path) -> None:
  if final.exists():
    raise CheckpointError(f"cannot export to {final}: it exists.", fix="choose a folder that does not.")


def _to_write(
  groups: Iterable[Group], leaves: Mapping[str, _Leaf]
) -> tuple[list[list[Group]], dict[str, jax.ShapeDtypeStruct]]:
  """The groups, with tied leaves in one group, and the arrays of the file."""
  families: dict[tuple[str, ...], list[Group]] = {}
  specs: dict[str, jax.ShapeDtypeStruct] = {}
  for found in groups:
    group, shapes = found.numbered({path: leaf.shape for path, leaf in leaves.items()})
    dtypes = {leaves[path].array.dtype for path in group.layers.values()}
    if len(dtypes) > 1:
      raise CheckpointError(
        f"{group.paths} cannot be layers of {group.file}: their dtypes differ.",
        details=f"dtypes {sorted(map(str, dtypes))}",
        fix="convert the leaves, or give each its own name in the file.",
      )
    dtype = group.rule.dtype or dtypes.pop()
    made = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in zip(group.names, shapes, strict=True)}
    is_tied = group.names in families
    for name, spec in made.items():
      if name in specs and not (is_tied and specs[name] == spec):
        raise CheckpointError(
          f"{name} would be written twice: {specs[name]} and {spec}.",
          fix="give each leaf of the model its own name in the file.",
        )
    specs |= made
    families.setdefault(group.names, []).append(group)
  return [*families.values()], specs


def _arrays(group: Group, leaves: Mapping[str, _Leaf], near: Sharding) -> list[jax.Array]:
  layers = [leaves[group.layers[layer]] for layer in sorted(group.layers)]
  return group.make_arrays([leaf.array for leaf in layers], layers[0].shape, near)


def _store(tensors: Iterable[Tensor], arrays: Iterable[jax.Array]) -> None:
  for tensor, array in zip(tensors, arrays, strict=True):
    for shard in array.addressable_shards:
      if shard.replica_id == 0:
        tensor.write(shard.index, np.asarray(shard.data).astype(tensor.dtype))


def _require_same(group: Group, arrays: Iterable[jax.Array], first: Iterable[jax.Array]) -> None:
  dtype = group.rule.dtype
  for pair in zip(arrays, first, strict=True):
    for one, other in zip(*(array.addressable_shards for array in pair), strict=True):
      values = [np.asarray(shard.data).astype(dtype or shard.data.dtype).tobytes() for shard in (one, other)]
      if values[0] != values[1]:
        raise CheckpointError(
          f"{group.paths} is tied to {group.file}, but its values differ.",
          fix="tie them in the model, or give each its own name.",
        )


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
  """The files to read, and the file of each array, if there is an index."""
  index: dict[str, str] = {}
  if path.is_dir():
    if (path / INDEX).exists():
      return _files(path / INDEX)
    single = path / SINGLE
    found = [single] if single.exists() else sorted(path.glob("*.safetensors"))
  elif path.name.endswith(".index.json") and path.exists():
    index = _file_names(path)
    found = [path.parent / name for name in sorted(set(index.values()))]
  else:
    found = [path]
  missing = [file.name for file in found if not file.is_file()]
  if missing or not found:
    raise CheckpointError(
      f"cannot read safetensors from {path}: {', '.join(missing) or 'there are none'} is missing.",
      fix="pass a .safetensors file, its index, or the folder that holds them.",
    )
  return found, index


def _file_names(index: Path) -> dict[str, str]:
  """File names by array; all of them in the folder of the index."""
  try:
    if (size := index.stat().st_size) > _LARGEST_INDEX:
      raise ValueError(f"it has {size:,} bytes")
    names = json.loads(index.read_text())["weight_map"]
    for tensor, file in names.items():
      if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or os.sep in file:
        raise ValueError(f"{tensor} is not in a file of the same folder, but in {file!r}")
    return names
  except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
    raise CheckpointError(
      f"{index} is not an index of safetensors files: {error}.", fix="copy or download it again."
    ) from error


def _open(file: Path) -> dict[str, Tensor]:
  try:
    from safetensors import SafetensorError, safe_open
  except ImportError as error:
    raise CheckpointError(
      f"cannot read {file}: the package safetensors is not installed.", fix="pip install safetensors"
    ) from error
  try:
    with safe_open(file, "numpy") as opened:
      slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
      entries = [(name, one.get_dtype(), tuple(one.get_shape())) for name, one in slices]
    end = file.stat().st_size
  except OSError as error:
    raise CheckpointError(f"cannot open {file}: {error}.", fix="check who may read it.") from error
  except SafetensorError as error:
    raise CheckpointError(
      f"{file} is not a complete safetensors file: {error}.", fix="copy or download it again."
    ) from error
  found: dict[str, Tensor] = {}
  # The arrays are stored in this order without a gap, up to the end.
  for name, kind, shape in reversed(entries):
    if kind not in _DTYPES:
      raise CheckpointError(
        f"{name} in {file} has the dtype {kind}, which is not known here.",
        details=f"known: {', '.join(_DTYPES)}",
        fix="convert the file.",
      )
    end -= math.prod(shape) * _DTYPES[kind].itemsize
    found[name] = Tensor(file, end, shape, _DTYPES[kind])
  return dict(reversed(found.items()))


def _leaves(model: object, skip: Iterable[str]) -> dict[str, _Leaf]:
  found: dict[str, _Leaf] = {}
  for path, leaf in leaves_to_write(model, skip).items():
    array: Any = value_of(leaf)
    if not encoding.is_array(array) or is_key(array.dtype) or np.dtype(array.dtype) not in _NAMES:
      raise CheckpointError(
        f"{path} has no form in safetensors: {getattr(array, 'dtype', type(array).__name__)}.",
        fix=f"leave it out by name: skip=[{path!r}] (--skip {path}).",
      )
    made = jnp.asarray(array)
    if made.dtype != array.dtype:
      raise CheckpointError(
        f"{path} is {array.dtype}, and jax makes {made.dtype} of it.",
        fix='jax.config.update("jax_enable_x64", True), or convert it first.',
      )
    found[path] = _Leaf(made, tuple(leaf.shape))
  return found


def _cut_into_files(specs: Mapping[str, jax.ShapeDtypeStruct], file_bytes: int) -> Iterator[dict[str, Any]]:
  group: dict[str, jax.ShapeDtypeStruct] = {}
  for name, spec in specs.items():
    if group and _nbytes(group) + _nbytes({name: spec}) > file_bytes:
      yield group
      group = {}
    group[name] = spec
  yield group


def _nbytes(specs: Mapping[str, jax.ShapeDtypeStruct]) -> int:
  return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())


def _lay_out(folder: Path, specs: Mapping[str, jax.ShapeDtypeStruct], file_bytes: int, single: str) -> None:
  """Creates the files with their headers and full sizes, and the index."""
  total = _nbytes(specs)
  storage.require_space(epath.Path(folder.parent), total, doing="export", fix="free some space.")
  groups = [*_cut_into_files(specs, file_bytes)]
  names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
  names = names if len(groups) > 1 else [single]
  for name, group in zip(names, groups, strict=True):
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Wide elements first, so that each array is aligned to its own; some readers need that.
    for tensor, spec in sorted(group.items(), key=lambda item: -item[1].dtype.itemsize):
      end = offset + _nbytes({tensor: spec})
      kind = _NAMES[np.dtype(spec.dtype)]
      header[tensor] = {"dtype": kind, "shape": list(spec.shape), "data_offsets": [offset, end]}
      offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # arrays start aligned
    with (folder / name).open("wb") as file:
      file.write(len(text).to_bytes(8, "little") + text)
      file.flush()
      _reserve(file.fileno(), 8 + len(text) + offset)
  if len(groups) > 1:
    where = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _reserve(file: int, size: int) -> None:
  """Gives a file its size and its space on the disk, so that a full disk is noticed before the writing."""
  if hasattr(os, "posix_fallocate"):
    try:
      os.posix_fallocate(file, 0, size)
    except OSError as error:
      if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
        raise
  os.ftruncate(file, size)
