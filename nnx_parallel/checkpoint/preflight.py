"""Compares a checkpoint with a target before any array is read."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from nnx_parallel.checkpoint import encoding
from nnx_parallel.checkpoint.manifest import LeafRecord, Manifest
from nnx_parallel.errors import CheckpointError

_MOST_ROWS = 12


@dataclasses.dataclass(frozen=True)
class Wanted:
  """One leaf of a target.

  Attributes:
    struct: the array to make: its global shape with padding, dtype and sharding; None as the sharding
      means a numpy array.
    shape: logical global shape, without padding.
  """

  struct: jax.ShapeDtypeStruct
  shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Match:
  """A leaf of the target and the saved leaf that fills it."""

  item: str
  path: str
  wanted: Wanted
  saved_path: str
  saved: LeafRecord

  @property
  def name(self) -> str:
    """`item/path`, as errors print it."""
    return f"{self.item}/{self.path}"


@dataclasses.dataclass(frozen=True)
class Diff:
  """What would happen if a checkpoint were restored into a target.

  Attributes:
    step: the step compared.
    matches: leaves that fit.
    missing: leaves of the target that the checkpoint does not have, each with the nearest saved name of
      the same shape, or None.
    extra: saved leaves that the target has no place for.
    reshaped: leaves whose logical shape differs.
    retyped: leaves whose dtype or key implementation differs.
    skipped: leaves left out by name.
    misspelt: entries of `only`, `skip` and `rename` that match no leaf, with the nearest name.
    bytes_read: bytes of the shards that this process reads.
    device_bytes: most bytes on one device of this process when all is restored.
    host_bytes: most host memory of this process on the way: two groups of arrays in flight, each of half the
      byte budget or one larger array, and the shards of devices whose memory is the host's.
  """

  step: int
  matches: tuple[Match, ...]
  missing: tuple[tuple[str, str | None], ...]
  extra: tuple[str, ...]
  reshaped: tuple[Match, ...]
  retyped: tuple[Match, ...]
  skipped: tuple[str, ...]
  misspelt: tuple[tuple[str, str | None], ...]
  bytes_read: int
  device_bytes: int
  host_bytes: int

  @property
  def fits(self) -> bool:
    """Whether a strict restore would succeed."""
    return not (self.missing or self.extra or self.reshaped or self.retyped or self.misspelt)

  def __str__(self) -> str:
    lines = [f"step {self.step}: {'fits' if self.fits else 'does not fit'} the target"]
    lines += self._problems()
    lines.append(f"restored: {len(self.matches)} leaves, left out by name: {len(self.skipped)}")
    lines.append(
      f"this process reads {self.bytes_read:,} bytes; "
      f"at most {self.device_bytes:,} bytes per device and {self.host_bytes:,} bytes of host memory"
    )
    return "\n".join(lines)

  def require(self) -> None:
    """Raises unless everything fits.

    Raises:
      CheckpointError: lists what does not, with the nearest names.
    """
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
      details="\n".join(self._problems()),
      fix=self._fix(),
    )

  def _problems(self) -> list[str]:
    hint = "  (saved: {}?)"
    missing = [f"missing  {a}{hint.format(b) if b else ''}" for a, b in self.missing]
    extra = [f"extra    {a}" for a in self.extra]
    reshaped = [f"shape    {m.name}: saved {m.saved.shape}, wanted {m.wanted.shape}" for m in self.reshaped]
    retyped = [
      f"dtype    {m.name}: saved {m.saved.dtype}, wanted {encoding.dtype_name(m.wanted.struct.dtype)}"
      for m in self.retyped
    ]
    names = [f"no leaf  {a}{f'  (nearest: {b})' if b else ''}" for a, b in self.misspelt]
    return [row for rows in (missing, extra, reshaped, retyped, names) for row in _shorten(rows)]

  def _fix(self) -> str:
    if self.missing and all(name.startswith("optimizer/") for name, _ in self.missing):
      return 'if it has no such optimizer: restore(..., optimizer="fresh"), or optimizer="drop".'
    renames = {a.partition("/")[2]: b.partition("/")[2] for a, b in self.missing if b}
    if renames:
      first = dict(list(renames.items())[:3])
      return f"if they were renamed: restore(..., rename={first})."
    if self.misspelt:
      return "use the leaf's path, or a pattern such as 'layers.*.kernel'."
    if self.reshaped:
      return "build the target with the saved shapes, or leave them out by name: skip=[...]."
    if self.retyped:
      return "ask for the saved dtype, or for a conversion between float types: cast=True."
    return "name what may stay out: restore(..., skip=[...]), or what is wanted: only=[...]."


def compare(
  manifest: Manifest,
  target: Mapping[str, Mapping[str, Wanted]],
  *,
  only: Iterable[str] | None = None,
  skip: Iterable[str] = (),
  rename: Mapping[str, str] | None = None,
  cast: bool = False,
  byte_budget: int = 0,
) -> Diff:
  """Compares the leaves of a checkpoint with those of a target, by name.

  Args:
    manifest: of the checkpoint.
    target: leaves by item and path; saved items that are not in it are not looked at.
    only: patterns of the target's paths to restore (`fnmatch`); all others are left out.
    skip: patterns of paths, in the target or in the checkpoint, to leave out.
    rename: the target's path, or the start of it, to the saved one.
    cast: whether a float dtype may be restored into another.
    byte_budget: bytes in flight while reading.

  Returns:
    The comparison; nothing is raised for leaves that do not fit.
  """
  patterns, renames = Patterns(only, skip), _Renames(rename or {})
  matches: list[Match] = []
  missing: list[tuple[str, str | None]] = []
  extra: list[str] = []
  for item, leaves in target.items():
    saved = manifest.items[item].leaves if item in manifest.items else {}
    used: set[str] = set()
    absent: list[tuple[str, Wanted]] = []
    for path, wanted in leaves.items():
      saved_path = renames.apply(path)
      if patterns.leaves_out(path):
        used.add(saved_path)
      elif saved_path in saved:
        used.add(saved_path)
        matches.append(Match(item, path, wanted, saved_path, saved[saved_path]))
      else:
        absent.append((path, wanted))
    unused = {path: saved[path] for path in saved if path not in used}
    missing += [(f"{item}/{path}", _nearest(item, path, wanted, unused)) for path, wanted in absent]
    extra += [f"{item}/{path}" for path in unused if not patterns.leaves_out(path)]
  paths = [path for leaves in target.values() for path in leaves]
  paths += [path for item in target if item in manifest.items for path in manifest.items[item].leaves]
  reshaped = tuple(match for match in matches if match.saved.shape != match.wanted.shape)
  retyped = tuple(match for match in matches if not _same_type(match, cast))
  per_device = _bytes_per_device(match.wanted.struct for match in matches)
  read = [bytes_read(match.wanted.struct) for match in matches]
  in_flight = max(byte_budget, 2 * max(read, default=0))
  return Diff(
    step=manifest.step,
    matches=tuple(m for m in matches if m not in reshaped and m not in retyped),
    missing=tuple(missing),
    extra=tuple(extra),
    reshaped=reshaped,
    retyped=retyped,
    skipped=tuple(patterns.left_out),
    misspelt=tuple((name, _closest(name, paths)) for name in patterns.unused() + renames.unused()),
    bytes_read=sum(read),
    device_bytes=max(per_device.values(), default=0),
    host_bytes=in_flight + sum(n for d, n in per_device.items() if d is None or d.platform == "cpu"),
  )


def bytes_read(struct: jax.ShapeDtypeStruct) -> int:
  """Bytes of an array that this process must read: each of its distinct shards once."""
  if struct.sharding is None:
    return math.prod(struct.shape) * struct.dtype.itemsize
  shards = struct.sharding.addressable_devices_indices_map(struct.shape).values()
  distinct = {str(index): index for index in shards}
  return sum(_elements(index, struct.shape) for index in distinct.values()) * struct.dtype.itemsize


class Patterns:
  """`only` and `skip`, remembering what they matched."""

  def __init__(self, only: Iterable[str] | None, skip: Iterable[str]):
    self.only = None if only is None else _as_names(only, "only")
    self.skip = _as_names(skip, "skip")
    self.matched: set[str] = set()
    self.left_out: dict[str, None] = {}

  def leaves_out(self, path: str) -> bool:
    """Whether the names leave this path out."""
    chosen = self.only is None or self._any(path, self.only)
    if chosen and not self._any(path, self.skip):
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
  """`rename`, longest start first, remembering what it was used for."""

  def __init__(self, table: Mapping[str, str]):
    self.table = dict(sorted(table.items(), key=lambda pair: -len(pair[0])))
    self.used: set[str] = set()

  def apply(self, path: str) -> str:
    """The saved path of a target's path."""
    for new, old in self.table.items():
      if path == new or path.startswith(f"{new}."):
        self.used.add(new)
        return (old + path[len(new) :]).lstrip("." if not old else "")
    return path

  def unused(self) -> list[str]:
    """The entries that were never needed."""
    return [new for new in self.table if new not in self.used]


def _as_names(names: Iterable[str], argument: str) -> tuple[str, ...]:
  if isinstance(names, str):
    raise CheckpointError(
      f"{argument}={names!r} is one text, not a list of names.", fix=f"pass {argument}=[{names!r}]."
    )
  return tuple(names)


def _same_type(match: Match, cast: bool) -> bool:
  wanted = match.wanted.struct.dtype
  if encoding.dtype_name(wanted) == match.saved.dtype:
    return True
  if not cast or encoding.is_key(wanted) or match.saved.encoding.startswith("key:"):
    return False
  saved: Any = jax.numpy.dtype(match.saved.dtype)
  floating = jax.numpy.floating
  return jax.numpy.issubdtype(wanted, floating) and jax.numpy.issubdtype(saved, floating)


def _nearest(item: str, path: str, wanted: Wanted, saved: Mapping[str, LeafRecord]) -> str | None:
  same_shape = [name for name, leaf in saved.items() if leaf.shape == wanted.shape]
  nearest = same_shape[0] if len(same_shape) == 1 else _closest(path, same_shape)
  return f"{item}/{nearest}" if nearest else None


def _closest(name: str, names: list[str]) -> str | None:
  return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.4)), None)


def _bytes_per_device(structs: Iterable[jax.ShapeDtypeStruct]) -> dict[Any, int]:
  total: dict[Any, int] = {}
  for struct in structs:
    if struct.sharding is None:
      total[None] = total.get(None, 0) + math.prod(struct.shape) * struct.dtype.itemsize
      continue
    shard = math.prod(struct.sharding.shard_shape(struct.shape)) * struct.dtype.itemsize
    for device in struct.sharding.addressable_devices:
      total[device] = total.get(device, 0) + shard
  return total


def _elements(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> int:
  ranges = zip(index or (), shape, strict=False)
  return math.prod(len(range(*part.indices(size))) for part, size in ranges)


def _shorten(rows: list[str]) -> list[str]:
  if len(rows) <= _MOST_ROWS:
    return rows
  return [*rows[:_MOST_ROWS], f"         ... and {len(rows) - _MOST_ROWS} more"]
