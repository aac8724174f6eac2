"""Compares a checkpoint with a target before any array is read."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from nnx_parallel.checkpoint import array_io, encoding
from nnx_parallel.checkpoint.encoding import Json
from nnx_parallel.checkpoint.manifest import ItemRecord, LeafRecord, Manifest
from nnx_parallel.core.checked import fits
from nnx_parallel.core.nodes import is_key
from nnx_parallel.core.text import Shown
from nnx_parallel.create.relayout import is_on_host, layout_text
from nnx_parallel.errors import CheckpointError

_MOST_ROWS, _MOST_LAYOUTS, _MOST_RENAMES = 12, 3, 6
_NOTHING = ItemRecord({}, {})
Found = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class TargetLeaf:
  """The array to make, with padding (without a sharding: a numpy array), and its logical global shape."""

  struct: jax.ShapeDtypeStruct
  shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Target:
  """The leaves that a restore fills: arrays by item and path, and the paths of JSON values by item.

  `build` makes the result from what was read; omitted leaves keep the target's values, or get those of
  `init`. `left_out` are paths that a filter does not choose. `drops_optimizer`: a saved one is left.
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
    """The array to read, padded; a numpy array where jax lacks the dtype: `jax_enable_x64` is off."""
    struct, saved = self.target.struct, self.saved
    dtype = struct.dtype if is_key(struct.dtype) else np.dtype(saved.dtype)
    sharding = struct.sharding if _dtype_in_jax(dtype) == dtype else None
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

  @property
  def wants_x64(self) -> bool:
    """Whether jax would make another dtype of the target's, because `jax_enable_x64` is off."""
    struct = self.target.struct
    return struct.sharding is not None and _dtype_in_jax(struct.dtype) != struct.dtype

  @property
  def wanted_type(self) -> str:
    """The target's dtype, and what jax would make of it."""
    dtype = self.target.struct.dtype
    note = f" (jax would make {_dtype_in_jax(dtype)} of it: jax_enable_x64 is off)" if self.wants_x64 else ""
    return f"{encoding.dtype_name(dtype)}{note}"

  def has_type(self, cast: bool) -> bool:
    """Whether the saved dtype is the target's, or may be cast to it."""
    wanted, saved = self.target.struct.dtype, self.saved
    if self.wants_x64 or encoding.dtype_name(wanted) == saved.dtype:
      return not self.wants_x64
    is_cast = cast and not is_key(wanted) and not saved.encoding.startswith("key:")
    return is_cast and all(
      jax.numpy.issubdtype(x, jax.numpy.floating) for x in (wanted, np.dtype(saved.dtype))
    )


@dataclasses.dataclass(frozen=True)
class Diff(Shown):
  """The differences between a checkpoint and a target, and the bytes that a restore would read.

  `missing` are leaves of the target only, with the nearest saved name of the same shape, `extra` those of the
  checkpoint only; `misspelt` are names that match no leaf. `values` are the saved JSON values that fill the
  target's. `bytes_read` are those of this process's shards (chunks are read in full), `device_bytes` the most
  on a device after the restore, and `host_bytes` the most host memory during it.
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
    lines = [f"step {self.step}: {'fits' if self.fits else 'does not fit'} the target", *self.problems()]
    count = len(self.matches) + sum(map(len, self.values.values()))
    lines.append(f"restored: {count} leaves, left out by name: {len(self.skipped)}")
    if changes := [
      "  {}: saved {}, wanted {}".format(match.name, *match.layouts) for match in self.resharded
    ]:
      lines.append(f"in another layout than saved: {len(changes)} leaves")
      lines += _shorten(changes, _MOST_LAYOUTS, "  ")
    lines.append(
      f"this process reads {self.bytes_read:,} bytes; "
      f"at most {self.device_bytes:,} bytes per device and {self.host_bytes:,} bytes of host memory"
    )
    return "\n".join(lines)

  def to_json(self) -> str:
    """Returns the comparison as JSON: what does not fit by leaf, and the bytes."""

    def rows(names: str, table: Iterable[tuple[Any, ...]]) -> list[dict[str, Json]]:
      return [dict(zip(names.split(), row, strict=True)) for row in table]

    names = ("step", "fits", "extra", "skipped", "bytes_read", "device_bytes", "host_bytes")
    found = {name: getattr(self, name) for name in names} | {
      "matches": [match.name for match in self.matches],
      "missing": rows("leaf nearest", self.missing),
      "misspelt": rows("name nearest", self.misspelt),
      "reshaped": rows("leaf saved wanted", [(m.name, m.saved.shape, m.target.shape) for m in self.reshaped]),
      "retyped": rows("leaf saved wanted", [(m.name, m.saved.dtype, m.wanted_type) for m in self.retyped]),
    }
    return json.dumps(found, indent=2)

  def require(self) -> None:
    """Raises unless everything fits."""
    if self.fits:
      return
    kinds = ("missing", "extra", "reshaped", "of another dtype", "not found by name")
    wrong = (self.missing, self.extra, self.reshaped, self.retyped, self.misspelt)
    summary = ", ".join(f"{len(rows)} {what}" for what, rows in zip(kinds, wrong, strict=True) if rows)
    what = f"cannot restore step {self.step}: it does not fit the target ({summary})."
    raise CheckpointError(what, details="\n".join(self.problems()), fix=self._fix())

  def problems(self) -> list[str]:
    """A line for each leaf that does not fit."""
    hint = "  (saved: {}?)"
    both = {name for name, _ in self.missing}.intersection(self.extra)
    kinds = dict.fromkeys(both, "  (one is an array, the other a JSON value)")
    missing = [f"missing  {a}{kinds.get(a, hint.format(b) if b else '')}" for a, b in self.missing]
    extra = [f"extra    {a}{kinds.get(a, '')}" for a in self.extra]
    reshaped = [f"shape    {m.name}: saved {m.saved.shape}, wanted {m.target.shape}" for m in self.reshaped]
    retyped = [f"dtype    {m.name}: saved {m.saved.dtype}, wanted {m.wanted_type}" for m in self.retyped]
    names = [f"no leaf  {a}{f'  (nearest: {b})' if b else ''}" for a, b in self.misspelt]
    return [row for rows in (missing, extra, reshaped, retyped, names) for row in _shorten(rows)]

  def _fix(self) -> str:
    wrong = [*(a for a, _ in self.missing), *self.extra, *(match.name for match in self.reshaped)]
    is_optimizer = bool(wrong) and all(name.startswith("optimizer/") for name in wrong)
    renames = _shortest_renames((a, b) for a, b in self.missing if b)
    if renames and not (is_optimizer and {b for _, b in self.missing} != {*self.extra}):
      return f"if they were renamed: restore(..., rename={renames})."
    if is_optimizer and not self.missing and not any(match.item == "optimizer" for match in self.matches):
      return 'plan with optimizer=..., or pass (model, optimizer); to leave it, optimizer="drop".'
    if is_optimizer:
      return (
        'another optimizer was saved, or none: restore(plan, optimizer="fresh") makes a new one;'
        ' restore(model, optimizer="drop") restores the model only.'
      )
    if self.misspelt:
      return "use the leaf's path, or a pattern such as 'layers.*.kernel'."
    if self.reshaped:
      return "build the target with the saved shapes, or leave them out by name: skip=[...]."
    if any(match.wants_x64 for match in self.retyped):
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
  """Compares by name, with the arguments of `restore`; of the items of a step alone, optimizers are extra."""
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
    for path in absent:
      same = [name for name, leaf in unused.items() if path in leaves and leaf.shape == leaves[path].shape]
      nearest = same[0] if len(same) == 1 else _closest(path, same)
      missing.append((f"{item}/{path}", f"{item}/{nearest}" if nearest else None))
    rest = (path for path in (*saved.leaves, *saved.values) if path not in used)
    extra += [f"{item}/{path}" for path in rest if not patterns.leaves_out(path, start_of(path))]
    paths += [*leaves, *plain, *saved.leaves, *saved.values]
  if "optimizer" in manifest.items.keys() - target.leaves.keys() and not target.drops_optimizer:
    saved = manifest.items["optimizer"]
    extra += [f"optimizer/{p}" for p in (*saved.leaves, *saved.values) if not patterns.leaves_out(p)]
  reshaped = tuple(match for match in matches if match.saved.shape != match.target.shape)
  retyped = tuple(match for match in matches if not match.has_type(cast))
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


class Patterns:
  """The patterns of `only` and `skip`, and which of them matched."""

  def __init__(self, only: Iterable[str] | None, skip: Iterable[str]):
    self.only = None if only is None else _as_names(only, "only")
    self.skip = _as_names(skip, "skip")
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
  """The entries of `rename` that lead from leaves to saved ones, as `upper` to `up` for `upper.bias`."""
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


def _as_names(names: Iterable[str], argument: str) -> tuple[str, ...]:
  if isinstance(names, str):
    what, fix = f"{argument}={names!r} is one text, not a list of names.", f"pass {argument}=[{names!r}]."
  elif not fits(names, Iterable[str]):  # a filter of nnx
    what = f"{argument}={names!r} is not a list of names."
    fix = "only=nnx.Not(...) leaves out the leaves that a filter chooses."
  elif not (found := tuple(names)) and argument == "only":
    what, fix = "only=[] chooses no leaf.", "only=['head.*'], or leave it out for all leaves."
  else:
    return found
  raise CheckpointError(what, fix=fix)


def _closest(name: str, names: list[str]) -> str | None:
  return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.4)), None)


def _dtype_in_jax(dtype: DTypeLike) -> Any:
  """The dtype of an array that jax makes from this dtype: 32 bits for 64 while `jax_enable_x64` is off."""
  return dtype if is_key(dtype) else jax.dtypes.canonicalize_dtype(dtype)


def _bytes_per_device(structs: Iterable[jax.ShapeDtypeStruct]) -> Counter[Any]:
  """Bytes by device of this process; None stands for host memory."""
  total: Counter[Any] = Counter()
  for struct in structs:
    layout = struct.sharding
    on_host = layout is None or is_on_host(layout)
    for device in layout.addressable_devices if layout else (None,):
      total[None if on_host else device] += array_io.bytes_of_shard(struct)
  return total


def _shorten(rows: list[str], most: int = _MOST_ROWS, indent: str = " " * 9) -> list[str]:
  return rows if len(rows) <= most else [*rows[:most], f"{indent}... and {len(rows) - most} more"]
