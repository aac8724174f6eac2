"""Safetensors in and out, one shard at a time; Hugging Face's sharded index included.

The package `safetensors` reads and checks the headers. Behind them the arrays' bytes follow one another: each
process reads only the pages of its own shards, from a memory map, and writes only the bytes of its own.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Mapping as MappingType
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

from nnx_parallel.checkpoint import agree, encoding, files, paths, preflight, targets, views
from nnx_parallel.checkpoint.mapping import (
  Bound,
  Cast,
  Identity,
  Mapping,
  Spec,
  Stack,
  layer_counts,
  stack_size,
  with_layers,
)
from nnx_parallel.checkpoint.views import View
from nnx_parallel.core.nodes import variables
from nnx_parallel.errors import CheckpointError
from nnx_parallel.layout.plan import ShardingPlan

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES: dict[str, Any] = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": jnp.bfloat16,
  "F8_E4M3": jnp.float8_e4m3fn,
  "F8_E5M2": jnp.float8_e5m2,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U64": np.uint64,
  "U32": np.uint32,
  "U16": np.uint16,
  "U8": np.uint8,
  "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_LARGEST_INDEX = 100 << 20
_T = TypeVar("_T")
_ViewsOf: TypeAlias = Callable[[Path], Callable[[int, tuple[int, ...], np.dtype[Any]], View]]
"""From a file to what makes the view of an array in it from its first byte, shape and dtype."""


def read_tensors(path: str | os.PathLike[str]) -> dict[str, View]:
  """Opens the arrays of a file, or of a folder with an index, without reading them.

  Args:
    path: a `.safetensors` file, an index (`*.index.json`), or a folder that holds either.

  Returns:
    Views by name.

  Raises:
    CheckpointError: nothing there, or a file that is damaged or incomplete.
  """
  return _read_all(Path(path), views.mapped)


def _read_all(path: Path, views_of: _ViewsOf) -> dict[str, View]:
  found: dict[str, View] = {}
  places, index = _files(path)
  for file in places:
    opened = _open(file, views_of)
    if lost := [name for name, where in index.items() if where == file.name and name not in opened]:
      raise CheckpointError(
        f"{file} does not hold {lost[0]}, which its index places there.",
        details=f"{len(lost)} arrays are missing" if len(lost) > 1 else "",
        fix="copy or download the folder again.",
      )
    for name, view in opened.items():
      if name in found:
        raise CheckpointError(f"{name} is in two files of {path}.", fix="remove one of them.")
      found[name] = view
  return found


def import_safetensors(
  path: str | os.PathLike[str],
  plan: ShardingPlan,
  mapping: Mapping | None = None,
  *,
  skip: Iterable[str] = (),
) -> Any:
  """Makes a model from safetensors, each shard read straight from the file.

  Random-number state (`nnx.RngState`) is not in such files: it is initialised.

  Args:
    path: see `read_tensors`.
    plan: the layout; when it has an optimizer, a fresh one is made.
    mapping: how their names and shapes become ours; None: names are our paths.
    skip: patterns of our paths that the files do not have; they are initialised.

  Returns:
    The module, or (module, optimizer).

  Raises:
    CheckpointError: an incomplete mapping, or a shape or dtype that does not fit, named.
  """
  rules = mapping or Identity()
  target = targets.read(plan, optimizer="drop" if plan.tx is None else "fresh")
  patterns = preflight.Patterns(None, skip)
  left_out = {path for path in target.wanted["model"] if patterns.leaves_out(path)}
  left_out |= _random_state(plan.abstract_model)
  wanted = {path: one for path, one in target.wanted["model"].items() if path not in left_out}

  def read() -> dict[str, jax.Array]:
    _no_unused(patterns.unused())
    sources = read_tensors(path)
    bounds = rules.bind(wanted, sources)
    rules.check_layers(target.wanted["model"], wanted, sources)
    try:
      return {bound.ours: _load(bound, bound.view(sources), wanted[bound.ours]) for bound in bounds}
    except OSError as error:
      raise CheckpointError(f"cannot read {path}: {error}.", fix="copy or download it again.") from error

  return target.build({"model": agree.together(read)})


def export_safetensors(
  path: str | os.PathLike[str],
  model: object,
  mapping: Mapping | None = None,
  *,
  skip: Iterable[str] = (),
  file_bytes: int = 5 << 30,
) -> list[str]:
  """Writes a model as safetensors, each process its own shards into the same files.

  Random-number state (`nnx.RngState`) is left out.

  Args:
    path: a folder that does not exist yet; it appears when it is complete.
    model: a module, or a pytree of arrays.
    mapping: as for `import_safetensors`; undone. None: names are our paths.
    skip: patterns of our paths to leave out, for example `["*.bias"]`.
    file_bytes: largest file; more are split and get an index, as Hugging Face's loaders expect.

  Returns:
    The names written.

  Raises:
    CheckpointError: the folder exists, the mapping is incomplete, or a leaf has no form in safetensors.
  """
  final, temporary = Path(path), Path(f"{os.fspath(path)}.nnx-saving")
  doing = f"export to {final.name}"
  leaves, bounds, specs = _together(lambda: _plan_export(final, model, mapping, skip), doing, final.parent)
  agree.require_same("what to export", f"{final}\n{specs}")

  def lay_out() -> None:
    if jax.process_index() == 0:
      temporary.mkdir(parents=True, exist_ok=True)
      stack.enter_context(files.writer_lock(epath.Path(temporary)))
      stack.callback(shutil.rmtree, temporary, ignore_errors=True)
      _require_new(final)  # whoever had the lock before may just have written it
      for left in temporary.iterdir():
        if left.name != files.LOCK:
          left.unlink()
      _lay_out(temporary, specs, file_bytes)

  def store() -> dict[str, View]:
    sources = _read_all(temporary, lambda file: functools.partial(views.InFile, file))
    for bound in first:
      view, (spec, array) = bound.view(sources), leaves[bound.ours]
      _require_fit(bound, view, spec.shape, spec.dtype)
      _store(view, spec, array)
    files.make_tree_durable(epath.Path(temporary))
    return sources

  def compare(sources: MappingType[str, View]) -> None:
    for bound in tied:
      view, (spec, array) = bound.view(sources), leaves[bound.ours]
      _require_fit(bound, view, spec.shape, spec.dtype)
      _require_same(bound, view, spec, array)

  def publish() -> None:
    if jax.process_index() == 0:
      temporary.rename(final)
      (final / files.LOCK).unlink()
      files.make_durable([epath.Path(final), epath.Path(final.parent)])

  first, tied = _first_and_tied(bounds)
  with contextlib.ExitStack() as stack:
    _together(lay_out, doing, final.parent)
    sources = _together(store, doing, final.parent)
    # Only now: other processes may have written what a tied leaf here is compared with.
    _together(lambda: compare(sources), doing, final.parent)
    _together(publish, doing, final.parent)
  return list(specs)


def _together(call: Callable[[], _T], doing: str, folder: Path) -> _T:
  """Makes a call on every process; what one of them cannot do ends it on all, with an error that says it."""
  return agree.together(lambda: files.explained(call, doing, epath.Path(folder)))


def _plan_export(
  final: Path, model: object, mapping: Mapping | None, skip: Iterable[str]
) -> tuple[dict[str, tuple[Spec, jax.Array]], list[Bound], dict[str, Spec]]:
  _require_new(final)
  leaves = _leaves(model, skip)
  bounds = [
    with_layers(b, stack_size(b, leaves[b.ours][0])) if isinstance(b.rule.layers, Stack) else b
    for b in (mapping or Identity()).names_for(leaves)
  ]
  return leaves, bounds, _their_specs(bounds, leaves)


def _require_new(final: Path) -> None:
  if final.exists():
    raise CheckpointError(f"cannot export to {final}: it exists.", fix="choose a folder that does not.")


def _first_and_tied(bounds: Iterable[Bound]) -> tuple[list[Bound], list[Bound]]:
  """The first leaf of ours for each of their arrays, or layer of one; the others are tied to it."""
  first: dict[tuple[tuple[str, ...], int | None], Bound] = {}
  tied = [bound for bound in bounds if first.setdefault((bound.theirs, bound.layer), bound) is not bound]
  return list(first.values()), tied


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
  """The files to read, and which of them holds which array, as far as an index says so."""
  index: dict[str, str] = {}
  if path.is_dir():
    if (path / INDEX).exists():
      return _files(path / INDEX)
    found = sorted(path.glob("*.safetensors"))
  elif path.name.endswith(".index.json") and path.exists():
    index = _weight_map(path)
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


def _weight_map(index: Path) -> dict[str, str]:
  """File names by array; all of them in the folder of the index."""
  try:
    if (size := index.stat().st_size) > _LARGEST_INDEX:
      raise ValueError(f"it has {size:,} bytes")
    names = json.loads(index.read_text())["weight_map"]
    for tensor, file in names.items():
      if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or os.sep in file:
        raise ValueError(f"{tensor} is not in a file beside it, but in {file!r}")
    return names
  except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
    raise CheckpointError(
      f"{index} is not an index of safetensors files: {error}.", fix="copy or download it again."
    ) from error


def _open(file: Path, views_of: _ViewsOf) -> dict[str, View]:
  try:
    from safetensors import SafetensorError, safe_open
  except ImportError as error:
    raise CheckpointError(
      f"cannot read {file}: the package safetensors is not installed.",
      fix="pip install 'nnx-parallel[safetensors]'.",
    ) from error
  try:
    with safe_open(file, "numpy") as opened:
      slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
      entries = [(name, one.get_dtype(), tuple(one.get_shape())) for name, one in slices]
    begin = file.stat().st_size
  except OSError as error:
    raise CheckpointError(f"cannot open {file}: {error}.", fix="check who may read it.") from error
  except SafetensorError as error:
    raise CheckpointError(
      f"{file} is not a whole safetensors file: {error}.", fix="copy or download it again."
    ) from error
  view_of, found = views_of(file), dict[str, View]()
  # The arrays lie in this order without a gap, up to the end.
  for name, dtype, shape in reversed(entries):
    _require_known(file, name, dtype)
    begin -= math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    found[name] = view_of(begin, shape, np.dtype(_DTYPES[dtype]))
  return dict(reversed(found.items()))


def _require_known(file: Path, name: str, dtype: str) -> None:
  if dtype not in _DTYPES:
    raise CheckpointError(
      f"{name} in {file} has the dtype {dtype}, which is not known here.",
      details=f"known: {', '.join(_DTYPES)}",
      fix="convert the file.",
    )


def _load(bound: Bound, view: View, wanted: preflight.Wanted) -> jax.Array:
  struct = wanted.struct
  _require_fit(bound, view, wanted.shape, struct.dtype)

  def block(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
    box = views.box_of(index or (), struct.shape)
    inside = tuple(
      slice(min(part.start, size), min(part.stop, size)) for part, size in zip(box, wanted.shape, strict=True)
    )
    values = view.read(inside)
    lengths = [
      (part.stop - part.start, kept.stop - kept.start) for part, kept in zip(box, inside, strict=True)
    ]
    return values if inside == box else np.pad(values, [(0, full - kept) for full, kept in lengths])

  return jax.make_array_from_callback(struct.shape, struct.sharding, block)


def _require_fit(bound: Bound, view: View, shape: tuple[int, ...], dtype: Any) -> None:
  if view.shape != shape or view.dtype != dtype:
    raise CheckpointError(
      f"{bound.ours} does not fit: the mapping makes {view.dtype}{list(view.shape)} of "
      f"{', '.join(bound.theirs[:3])}, the model has {encoding.dtype_name(dtype)}{list(shape)}.",
      fix="correct the operations of its rule, or add Cast(theirs, ours) for the dtype.",
    )


def _leaves(model: object, skip: Iterable[str]) -> dict[str, tuple[Spec, jax.Array]]:
  tree, random = targets.saved_roots(model, None)["model"], _random_state(model)
  patterns = preflight.Patterns(None, skip)
  found: dict[str, tuple[Spec, jax.Array]] = {}
  for path, leaf in tree.leaves.items():
    if patterns.leaves_out(path) or path in random:
      continue
    array: Any = leaf
    if not encoding.is_array(leaf) or encoding.is_key(array.dtype) or np.dtype(array.dtype) not in _NAMES:
      raise CheckpointError(
        f"{path} has no form in safetensors: {getattr(leaf, 'dtype', type(leaf).__name__)}.",
        fix=f"leave it out by name: skip=[{path!r}].",
      )
    spec = Spec(tuple(tree.shapes.get(path, array.shape)), np.dtype(array.dtype))
    found[path] = spec, jnp.asarray(array)
  _no_unused(patterns.unused())
  return found


def _random_state(model: object) -> set[str]:
  """The paths of a module's keys and counters of random numbers, known by their type."""
  if not isinstance(model, nnx.Module):
    return set()
  return {paths.join(path) for path, leaf in variables(model).items() if isinstance(leaf, nnx.RngState)}  # pyright: ignore[reportArgumentType]


def _no_unused(names: list[str]) -> None:
  if names:
    raise CheckpointError(f"skip={names} matches no leaf.", fix="use paths, or patterns such as '*rngs*'.")


def _their_specs(bounds: list[Bound], leaves: MappingType[str, tuple[Spec, jax.Array]]) -> dict[str, Spec]:
  layers = layer_counts(bounds)
  specs: dict[str, Spec] = {}
  for bound in bounds:
    for name, spec in bound.their_specs(leaves[bound.ours][0], layers.get(bound.theirs[0], 1)).items():
      if specs.setdefault(name, spec) != spec:
        raise CheckpointError(
          f"{name} would be written twice, with different shapes: {specs[name]} and {spec}.",
          fix="give each of our leaves its own name.",
        )
  return specs


def _lay_out(folder: Path, specs: MappingType[str, Spec], file_bytes: int) -> None:
  """Creates the files with their headers and full sizes, and their place on the disk."""
  groups: list[dict[str, Spec]] = [{}]
  sizes = [0]
  for name, spec in specs.items():
    size = math.prod(spec.shape) * spec.dtype.itemsize
    if groups[-1] and sizes[-1] + size > file_bytes:
      groups.append({})
      sizes.append(0)
    groups[-1][name] = spec
    sizes[-1] += size
  files.check_space(
    epath.Path(folder.parent), sum(sizes), doing="export", what="the model", fix="free some space."
  )
  single = len(groups) == 1
  names = [
    SINGLE if single else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))
  ]
  for name, group in zip(names, groups, strict=True):
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor, spec in group.items():
      end = offset + math.prod(spec.shape) * spec.dtype.itemsize
      header[tensor] = {
        "dtype": _NAMES[spec.dtype],
        "shape": list(spec.shape),
        "data_offsets": [offset, end],
      }
      offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # arrays start aligned
    with (folder / name).open("wb") as file:
      file.write(len(text).to_bytes(8, "little") + text)
      file.flush()
      _reserve(file.fileno(), 8 + len(text) + offset)
  if not single:
    weight_map = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _reserve(file: int, size: int) -> None:
  """Gives a file its size, and a place on the disk, so that a full one is noticed before the writing."""
  if hasattr(os, "posix_fallocate"):
    try:
      os.posix_fallocate(file, 0, size)
    except OSError as error:
      if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
        raise
  os.ftruncate(file, size)


def _pieces(spec: Spec, array: jax.Array) -> Iterator[tuple[views.Box, views.Block]]:
  """The shards here, of replicas the first, as boxes of the leaf without its padding."""
  for shard in array.addressable_shards:
    if shard.replica_id:
      continue
    box = views.box_of(shard.index, array.shape)
    kept = tuple(
      slice(min(p.start, size), min(p.stop, size)) for p, size in zip(box, spec.shape, strict=True)
    )
    if all(part.stop > part.start for part in kept):
      window = tuple(slice(0, part.stop - part.start) for part in kept)
      yield kept, np.asarray(shard.data)[window]


def _store(view: View, spec: Spec, array: jax.Array) -> None:
  for box, values in _pieces(spec, array):
    view.write(box, values)


def _require_same(bound: Bound, view: View, spec: Spec, array: jax.Array) -> None:
  for box, values in _pieces(spec, array):
    for cast in (operation for operation in bound.rule.operations if isinstance(operation, Cast)):
      values = values.astype(cast.theirs_dtype).astype(values.dtype)
    if view.read(box).tobytes() != values.tobytes():
      raise CheckpointError(
        f"{bound.ours} is tied to {bound.theirs[0]}, but its values differ.",
        fix="tie them in the model, or give each its own name.",
      )
