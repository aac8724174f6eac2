"""Compares a checkpoint with a target before any array is read."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.typing import DTypeLike

from nnx_parallel.checkpoint import array_io, encoding
from nnx_parallel.checkpoint.encoding import Json
from nnx_parallel.checkpoint.manifest import ItemRecord, LeafRecord, Manifest
from nnx_parallel.core.axes import axes_of, entry_of
from nnx_parallel.core.checked import fits
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.nodes import is_key
from nnx_parallel.core.text import Shown
from nnx_parallel.errors import CheckpointError
from nnx_parallel.layout.leaf import HOST_KINDS

_MOST_ROWS, _MOST_LAYOUTS, _MOST_RENAMES = 12, 3, 6
_NOTHING = ItemRecord({}, {})
Found = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class TargetLeaf:
  """One leaf of a target.

  Attributes:
    struct: the array to make: its global shape with padding, dtype and sharding; None as the sharding
      means a numpy array.
    shape: logical global shape, without padding.
  """

  struct: jax.ShapeDtypeStruct
  shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Target:
  """The leaves that a restore fills.

  Attributes:
    leaves: the arrays to read, by item and path.
    values: the paths of leaves that are JSON values, by item.
    build: makes the result from the read arrays and values; omitted leaves keep the target's values, or get
      the values of `init`.
    left_out: paths of the target that a filter does not choose, by item.
    drops_optimizer: whether a saved optimizer is not restored on purpose.
  """

  leaves: Mapping[str, Mapping[str, TargetLeaf]]
  values: Mapping[str, tuple[str, ...]]
  build: Callable[[Found], Any]
  left_out: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict[str, Any])
  drops_optimizer: bool = False


@dataclasses.dataclass(frozen=True)
class LeafPair:
  """A leaf of the target and the saved leaf that fills it."""

  item: str
  path: str
  target: TargetLeaf
  saved_path: str
  saved: LeafRecord

  @property
  def name(self) -> str:
    """`item/path`, as errors print it."""
    return f"{self.item}/{self.path}"

  @property
  def stored(self) -> jax.ShapeDtypeStruct:
    """The array to read: the stored dtype, the target's padded shape and sharding.

    It has no sharding (a numpy array) where jax lacks the dtype because `jax_enable_x64` is off.
    """
    struct, saved = self.target.struct, self.saved
    dtype = struct.dtype if is_key(struct.dtype) else np.dtype(saved.dtype)
    sharding = struct.sharding if _made_of(dtype) == dtype else None
    return encoding.stored_form(struct.shape, dtype, saved.encoding, sharding)

  @property
  def on_disk(self) -> jax.ShapeDtypeStruct:
    """The shape, without padding, and the dtype of the stored array."""
    words = self.stored.shape[len(self.target.struct.shape) :]
    return jax.ShapeDtypeStruct((*self.saved.shape, *words), self.stored.dtype)

  @property
  def layouts(self) -> tuple[str, str]:
    """The saved layout and the target's as text; empty where unknown."""
    return self.saved.layout, layout_text(self.target.struct.sharding)


@dataclasses.dataclass(frozen=True)
class Diff(Shown):
  """The differences between a checkpoint and a target, and the bytes that a restore would read.

  Attributes:
    step: the compared step.
    matches: leaves that fit.
    missing: leaves of the target that the checkpoint does not have, each with the nearest saved name of
      the same shape, or None.
    extra: saved leaves that the target does not have.
    reshaped: leaves with another logical shape.
    retyped: leaves with another dtype or key implementation, or with a dtype that jax cannot make now.
    skipped: leaves left out by name.
    misspelt: entries of `only`, `skip` and `rename` that match no leaf, with the nearest name.
    values: the saved JSON values that fill the target's, by item and the target's path.
    bytes_read: the bytes of arrays that this process needs: its shards. Chunks are always read in full.
    device_bytes: the maximum number of bytes on a device of this process after the restore.
    host_bytes: the maximum host memory of this process during the restore: the byte budget, or twice the
      largest array, and the shards of devices in host memory.
  """

  step: int
  matches: tuple[LeafPair, ...]
  missing: tuple[tuple[str, str | None], ...]
  extra: tuple[str, ...]
  reshaped: tuple[LeafPair, ...]
  retyped: tuple[LeafPair, ...]
  skipped: tuple[str, ...]
  misspelt: tuple[tuple[str, str | None], ...]
  values: Mapping[str, Mapping[str, Json]]
  bytes_read: int
  device_bytes: int
  host_bytes: int

  @property
  def resharded(self) -> tuple[LeafPair, ...]:
    """The leaves of `matches` that were saved in another layout, as far as the manifest records it."""
    return tuple(match for match in self.matches if all(match.layouts) and len({*match.layouts}) > 1)

  @property
  def fits(self) -> bool:
    """Whether a strict restore would succeed."""
    return not (self.missing or self.extra or self.reshaped or self.retyped or self.misspelt)

  def __str__(self) -> str:
    lines = [f"step {self.step}: {'fits' if self.fits else 'does not fit'} the target"]
    lines += self.problems()
    count = len(self.matches) + sum(map(len, self.values.values()))
    lines.append(f"restored: {count} leaves, left out by name: {len(self.skipped)}")
    lines += self._changes()
    lines.append(
      f"this process reads {self.bytes_read:,} bytes; "
      f"at most {self.device_bytes:,} bytes per device and {self.host_bytes:,} bytes of host memory"
    )
    return "\n".join(lines)

  def to_json(self) -> str:
    """Returns the comparison as JSON: what does not fit by leaf, and the bytes."""
    found: dict[str, Json] = {
      "step": self.step,
      "fits": self.fits,
      "matches": [match.name for match in self.matches],
      "missing": [{"leaf": leaf, "nearest": nearest} for leaf, nearest in self.missing],
      "extra": [*self.extra],
      "reshaped": [
        {"leaf": match.name, "saved": [*match.saved.shape], "wanted": [*match.target.shape]}
        for match in self.reshaped
      ],
      "retyped": [
        {"leaf": match.name, "saved": match.saved.dtype, "wanted": _wanted_type(match)}
        for match in self.retyped
      ],
      "misspelt": [{"name": name, "nearest": nearest} for name, nearest in self.misspelt],
      "skipped": [*self.skipped],
      "bytes_read": self.bytes_read,
      "device_bytes": self.device_bytes,
      "host_bytes": self.host_bytes,
    }
    return json.dumps(found, indent=2)

  def require(self) -> None:
    """Raises unless everything fits."""
    if self.fits:
      return
    counts = {
      "missing": self.missing,
      "extra": self.extra,
      "reshaped": self.reshaped,
      "of another dtype": self.retyped,
      "not found by name": self.misspelt,
    }
    summary = ", ".join(f"{len(rows)} {what}" for what, rows in counts.items() if rows)
    raise CheckpointError(
      f"cannot restore step {self.step}: it does not fit the target ({summary}).",
      details="\n".join(self.problems()),
      fix=self._fix(),
    )

  def problems(self) -> list[str]:
    """A line for each leaf that does not fit."""
    hint = "  (saved: {}?)"
    both = {name for name, _ in self.missing}.intersection(self.extra)
    kinds = dict.fromkeys(both, "  (one is an array, the other a JSON value)")
    missing = [f"missing  {a}{kinds.get(a, hint.format(b) if b else '')}" for a, b in self.missing]
    extra = [f"extra    {a}{kinds.get(a, '')}" for a in self.extra]
    reshaped = [f"shape    {m.name}: saved {m.saved.shape}, wanted {m.target.shape}" for m in self.reshaped]
    retyped = [f"dtype    {m.name}: saved {m.saved.dtype}, wanted {_wanted_type(m)}" for m in self.retyped]
    names = [f"no leaf  {a}{f'  (nearest: {b})' if b else ''}" for a, b in self.misspelt]
    return [row for rows in (missing, extra, reshaped, retyped, names) for row in _shorten(rows)]

  def _changes(self) -> list[str]:
    changed = self.resharded
    rows = ["  {}: saved {}, wanted {}".format(match.name, *match.layouts) for match in changed]
    if len(changed) > _MOST_LAYOUTS:
      rows[_MOST_LAYOUTS:] = [f"  ... and {len(changed) - _MOST_LAYOUTS} more"]
    return [f"in another layout than saved: {len(changed)} leaves", *rows] if changed else []

  def _fix(self) -> str:
    wrong = [*(a for a, _ in self.missing), *self.extra, *(match.name for match in self.reshaped)]
    is_optimizer = bool(wrong) and all(name.startswith("optimizer/") for name in wrong)
    renames = _shortest_renames((a, b) for a, b in self.missing if b)
    if renames and not (is_optimizer and {b for _, b in self.missing} != {*self.extra}):
      return f"if they were renamed: restore(..., rename={renames})."
    if is_optimizer:
      if not self.missing and not any(match.item == "optimizer" for match in self.matches):
        return (
          'to restore it, plan with optimizer=..., or pass (model, optimizer); to leave it, optimizer="drop".'
        )
      return (
        'another optimizer was saved, or none: restore(plan, optimizer="fresh") makes a new one;'
        ' restore(model, optimizer="drop") restores the model only.'
      )
    if self.misspelt:
      return "use the leaf's path, or a pattern such as 'layers.*.kernel'."
    if self.reshaped:
      return "build the target with the saved shapes, or leave them out by name: skip=[...]."
    if any(_wants_x64(match) for match in self.retyped):
      return (
        'jax.config.update("jax_enable_x64", True), or ask for a dtype of 32 bits with cast=True, '
        "or for numpy arrays: as_numpy=True."
      )
    if self.retyped:
      return "ask for the saved dtype, or for a conversion between float types: cast=True."
    return "name the leaves to leave out: restore(..., skip=[...]), or the leaves to restore: only=[...]."


def compare(
  manifest: Manifest,
  target: Target,
  *,
  only: Iterable[str] | None = None,
  skip: Iterable[str] = (),
  rename: Mapping[str, str] | None = None,
  cast: bool = False,
  byte_budget: int = 0,
) -> Diff:
  """Compares the leaves of a checkpoint with the leaves of a target, by name. Differences are not errors.

  `only`, `skip`, `rename`, `cast`: as for `Checkpointer.restore`. Among saved items that are not in the
  target, only an optimizer counts as `extra`.
  """
  patterns, renames = Patterns(only, skip), _Renames(rename or {})
  model = manifest.items.get("model", _NOTHING)
  parameters = {*target.leaves.get("model", ()), *target.left_out.get("model", ()), *model.leaves}
  matches: list[LeafPair] = []
  missing: list[tuple[str, str | None]] = []
  extra: list[str] = []
  paths: list[str] = []
  found: dict[str, dict[str, Json]] = {}
  for item, leaves in target.leaves.items():
    saved = manifest.items.get(item, _NOTHING)
    plain, left_out = target.values.get(item, ()), target.left_out.get(item, ())
    # The state of an optimizer goes where its parameters go.
    start_of = (lambda path: _start_of(path, parameters)) if item == "optimizer" else (lambda path: 0)
    used = {renames.apply(path, start_of(path)) for path in left_out}
    patterns.left_out |= dict.fromkeys(left_out)
    absent: list[str] = []
    for path in (*leaves, *plain):
      saved_path = renames.apply(path, start_of(path))
      if patterns.leaves_out(path, start_of(path)):
        pass
      elif path in leaves and saved_path in saved.leaves:
        matches.append(LeafPair(item, path, leaves[path], saved_path, saved.leaves[saved_path]))
      elif path not in leaves and saved_path in saved.values:
        found.setdefault(item, {})[path] = encoding.read_json(saved.values[saved_path])
      else:
        absent.append(path)
        continue
      used.add(saved_path)
    unused = {path: leaf for path, leaf in saved.leaves.items() if path not in used}
    missing += [
      (f"{item}/{path}", _nearest(item, path, leaves[path], unused) if path in leaves else None)
      for path in absent
    ]
    rest = (path for path in (*saved.leaves, *saved.values) if path not in used)
    extra += [f"{item}/{path}" for path in rest if not patterns.leaves_out(path, start_of(path))]
    paths += [*leaves, *plain, *saved.leaves, *saved.values]
  if "optimizer" in manifest.items.keys() - target.leaves.keys() and not target.drops_optimizer:
    saved = manifest.items["optimizer"]
    extra += [f"optimizer/{p}" for p in (*saved.leaves, *saved.values) if not patterns.leaves_out(p)]
  reshaped = tuple(match for match in matches if match.saved.shape != match.target.shape)
  retyped = tuple(match for match in matches if not _same_type(match, cast))
  wrong = {match.name for match in (*reshaped, *retyped)}
  fitting = tuple(match for match in matches if match.name not in wrong)
  per_device = _bytes_per_device(match.target.struct for match in matches)
  in_flight = max(byte_budget, 2 * max((array_io.shard_bytes(match.stored) for match in fitting), default=0))
  return Diff(
    step=manifest.step,
    matches=fitting,
    missing=tuple(missing),
    extra=tuple(extra),
    reshaped=reshaped,
    retyped=retyped,
    skipped=tuple(patterns.left_out),
    misspelt=tuple((name, _closest(name, paths)) for name in patterns.unused() + renames.unused()),
    values=found,
    bytes_read=sum(array_io.shard_bytes(match.stored) for match in fitting if match.saved.nbytes),
    device_bytes=max((n for device, n in per_device.items() if device is not None), default=0),
    host_bytes=in_flight + sum(n for d, n in per_device.items() if d is None or d.platform == "cpu"),
  )


def layout_text(sharding: Sharding | None) -> str:
  """A layout as text. Axes of size 1 are left out, so equal texts are equal layouts.

  Example:
    >>> mesh = jax.make_mesh((2, 1, 4), ("a", "b", "c"))
    >>> layout_text(NamedSharding(mesh, jax.P(("a", "b"), None, "c")))
    "P('a', None, 'c') on {'a': 2, 'c': 4}"
  """
  if sharding is None:
    return ""
  memory = sharding.memory_kind or ""
  where = f" in {memory}" if _on_host(sharding) else ""
  if sharding.num_devices == 1:
    return f"one device{where}"
  if not isinstance(sharding, NamedSharding):
    return f"{type(sharding).__name__} on {sharding.num_devices} devices{where}"
  sizes = {name: size for name, size in axis_sizes(sharding.mesh).items() if size > 1}
  split = [tuple(axis for axis in axes_of(entry) if axis in sizes) for entry in sharding.spec]
  while split and not split[-1]:
    split.pop()
  names = (repr(entry_of(axes)) for axes in split)
  return f"P({', '.join(names)}) on {sizes}{where}"


class Patterns:
  """The patterns of `only` and `skip`, and which of them matched."""

  def __init__(self, only: Iterable[str] | None, skip: Iterable[str]):
    self.only = None if only is None else as_names(only, "only")
    self.skip = as_names(skip, "skip")
    self.matched: set[str] = set()
    self.left_out: dict[str, None] = {}

  def leaves_out(self, path: str, start: int = 0) -> bool:
    """Whether the names leave this path out; `skip` also where a parameter's path starts in it."""
    chosen = self.only is None or self._any(path, self.only)
    if chosen and not (self._any(path, self.skip) or (start and self._any(path[start:], self.skip))):
      return False
    self.left_out[path] = None
    return True

  def unused(self) -> list[str]:
    """The patterns that matched nothing."""
    return [name for name in (*(self.only or ()), *self.skip) if name not in self.matched]

  def _any(self, path: str, patterns: tuple[str, ...]) -> bool:
    hits = [p for p in patterns if fnmatch.fnmatchcase(path, p) or path.startswith(f"{p}.")]
    self.matched.update(hits)
    return bool(hits)


class _Renames:
  """The entries of `rename`, longest start first, and which of them were used."""

  def __init__(self, table: Mapping[str, str]):
    self.table = dict(sorted(table.items(), key=lambda pair: -len(pair[0])))
    self.used: set[str] = set()

  def apply(self, path: str, start: int = 0) -> str:
    """The saved path of a target's path; a parameter's path may start in it."""
    for new, old in self.table.items():
      if path == new or path.startswith(f"{new}."):
        self.used.add(new)
        return old + path[len(new) :] if old else path[len(new) + 1 :]
    return path[:start] + self.apply(path[start:]) if start else path

  def unused(self) -> list[str]:
    """The entries that were never needed."""
    return [new for new in self.table if new not in self.used]


def _start_of(path: str, parameters: Container[str]) -> int:
  """Where the path of a parameter starts in the path of its optimizer state; 0 if there is none."""
  starts = (match.end() for match in re.finditer(r"\.", path))
  return next((start for start in starts if path[start:] in parameters), 0)


def _shortest_renames(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
  """The entries of `rename` that lead from each leaf to the saved one, without the ends that they share.

  Example:
    >>> _shortest_renames([("model/upper.bias", "model/up.bias"), ("model/upper.kernel", "model/up.kernel")])
    {'upper': 'up'}
  """
  found: dict[str, str] = {}
  several = [(a.partition("/"), b.partition("/")[2]) for a, b in pairs]
  models = [(a, b) for (item, _, a), b in several if item != "optimizer"]  # which carry their state
  for a, b in models or [(a, b) for (_, _, a), b in several]:
    new, old = a.split("."), b.split(".")
    while len(new) > 1 and old and new[-1] == old[-1]:
      del new[-1], old[-1]
    if found.setdefault(".".join(new), ".".join(old)) != ".".join(old):
      found[a] = b
  return dict([*found.items()][:_MOST_RENAMES])


def as_names(names: Iterable[str], argument: str) -> tuple[str, ...]:
  """The patterns that were passed as `argument`."""
  if isinstance(names, str):
    raise CheckpointError(
      f"{argument}={names!r} is one text, not a list of names.", fix=f"pass {argument}=[{names!r}]."
    )
  if not fits(names, Iterable[str]):  # a filter of nnx
    raise CheckpointError(
      f"{argument}={names!r} is not a list of names.",
      fix="only=nnx.Not(...) leaves out the leaves that a filter chooses.",
    )
  if not (found := tuple(names)) and argument == "only":
    raise CheckpointError("only=[] chooses no leaf.", fix="only=['head.*'], or leave it out for all leaves.")
  return found


def _same_type(match: LeafPair, cast: bool) -> bool:
  wanted = match.target.struct.dtype
  if _wants_x64(match):
    return False
  if encoding.dtype_name(wanted) == match.saved.dtype:
    return True
  if not cast or is_key(wanted) or match.saved.encoding.startswith("key:"):
    return False
  saved: Any = jax.numpy.dtype(match.saved.dtype)
  floating = jax.numpy.floating
  return jax.numpy.issubdtype(wanted, floating) and jax.numpy.issubdtype(saved, floating)


def _nearest(item: str, path: str, wanted: TargetLeaf, saved: Mapping[str, LeafRecord]) -> str | None:
  same_shape = [name for name, leaf in saved.items() if leaf.shape == wanted.shape]
  nearest = same_shape[0] if len(same_shape) == 1 else _closest(path, same_shape)
  return f"{item}/{nearest}" if nearest else None


def _closest(name: str, names: list[str]) -> str | None:
  return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.4)), None)


def _made_of(dtype: DTypeLike) -> Any:
  """The dtype of an array that jax makes from this dtype: 32 bits for 64 while `jax_enable_x64` is off."""
  return dtype if is_key(dtype) else jax.dtypes.canonicalize_dtype(dtype)


def _wants_x64(match: LeafPair) -> bool:
  struct = match.target.struct
  return struct.sharding is not None and _made_of(struct.dtype) != struct.dtype


def _wanted_type(match: LeafPair) -> str:
  dtype = match.target.struct.dtype
  note = f" (jax would make {_made_of(dtype)} of it: jax_enable_x64 is off)" if _wants_x64(match) else ""
  return f"{encoding.dtype_name(dtype)}{note}"


def _on_host(sharding: Sharding) -> bool:
  """Whether a layout is in host memory, on devices with their own memory."""
  device = next(iter(sharding.device_set))
  kind = sharding.memory_kind
  return kind in HOST_KINDS and kind != device.default_memory().kind


def _bytes_per_device(structs: Iterable[jax.ShapeDtypeStruct]) -> Counter[Any]:
  """Bytes by device of this process; None stands for host memory."""
  total: Counter[Any] = Counter()
  for struct in structs:
    layout = struct.sharding
    shape = layout.shard_shape(struct.shape) if layout else struct.shape
    on_host = layout is None or _on_host(layout)
    for device in layout.addressable_devices if layout else (None,):
      total[None if on_host else device] += math.prod(shape) * struct.dtype.itemsize
  return total


def _shorten(rows: list[str]) -> list[str]:
  if len(rows) > _MOST_ROWS:
    rows[_MOST_ROWS:] = [f"         ... and {len(rows) - _MOST_ROWS} more"]
  return rows
