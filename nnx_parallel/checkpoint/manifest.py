"""The manifest: the list of a checkpoint's contents, written last and signed with its own digest.

It is the file `nnx_parallel.json` of a step's folder. A folder with a readable manifest is a complete
checkpoint. The first line, the header, is all that a search for the best step reads. Both lines are JSON.

In format 6, each chunk of an array holds a CRC-32C, which TensorStore compares whenever it reads the chunk.
Format 5 had one folder for each array, and here a digest of each array.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import platform
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from etils import epath

from nnx_parallel.checkpoint import encoding
from nnx_parallel.checkpoint.damage import VanishedError, raise_transient
from nnx_parallel.checkpoint.encoding import Json
from nnx_parallel.errors import CheckpointError, DamagedError

T = TypeVar("T")
FILE = "nnx_parallel.json"
# A field may be added to the format: readers ignore unknown fields. A field with a new meaning needs a new
# format.
FORMAT, OLD_FORMAT = 6, 5
LATEST = 253402300799.0 - 1e6  # seconds since 1970, in the year 9999
_LONGEST_FILE_NAME = 160
# The errors of parsing if fields are missing, of other types, or nested too deeply.
_NOT_THE_FORMAT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_PACKAGES = ("nnx_parallel", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class LeafRecord:
  """One array: its name in the item's folder, logical global shape, dtype, ...; `digest` is of format 5."""

  folder: str
  shape: tuple[int, ...]
  dtype: str
  encoding: str
  kind: str
  nbytes: int
  digest: int = 0
  layout: str = ""


@dataclasses.dataclass(frozen=True)
class ItemRecord:
  """One tree of a checkpoint (`model`, `optimizer`, ...): its arrays and its JSON values, by path."""

  leaves: Mapping[str, LeafRecord]
  values: Mapping[str, Json]

  @property
  def nbytes(self) -> int:
    """Bytes of the arrays."""
    return sum(leaf.nbytes for leaf in self.leaves.values())


@dataclasses.dataclass(frozen=True)
class Header:
  """The first line: the step, the time of its commit in seconds since 1970, and the metrics."""

  step: int
  time: float
  metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Manifest(Header):
  """All facts about a checkpoint that can be read without its arrays."""

  items: Mapping[str, ItemRecord]  # the trees, by name
  extra: Mapping[str, Json]  # JSON values saved with the trees, for example a data cursor
  plan: Json  # the JSON of `Plan.to_json`, or None; `Plan.from_json(json.dumps(...))` reads it
  versions: Mapping[str, str]  # the versions of Python and the packages that wrote it
  files: Mapping[str, int]  # the bytes of every other file of the step, by relative path
  format: int = FORMAT  # of the step's folder

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays."""
    return nbytes_of(self.items)

  def as_json(self) -> dict[str, Any]:
    """The fields as JSON."""
    return dataclasses.asdict(self) | {"metrics": encoding.check_json(self.metrics, path="metrics")}


def nbytes_of(items: Mapping[str, ItemRecord]) -> int:
  """Bytes of all arrays."""
  return sum(item.nbytes for item in items.values())


def write(manifest: Manifest, step_dir: epath.Path) -> None:
  """Writes the manifest into a step folder; the caller makes it durable."""
  fields = manifest.as_json()
  signed = {name: fields.pop(name) for name in ("format", "step", "time", "metrics")}
  body = json.dumps(fields, separators=(",", ":"))
  signed["body"] = _sha256(body)
  line = _json({**signed, "sha256": _sha256(_json(signed))})
  (step_dir / FILE).write_text(f"{line}\n{body}\n")


def read(step_dir: epath.Path) -> Manifest:
  """Reads and checks the manifest of a step folder."""
  return _check(step_dir, lambda file: file.read_bytes(), _parse)


def read_header(step_dir: epath.Path) -> Header:
  """Reads and checks the first line of a manifest."""

  def first_line(file: epath.Path) -> bytes:
    with file.open("rb") as stream:
      return stream.readline()

  return _check(step_dir, first_line, lambda signed, _: _header(signed))


def file_name(path: str) -> str:
  """A folder name for a leaf: safe on every file system, unique, and readable where it can be."""
  if not path:  # a tree that is a single array
    return "%"
  # Orbax and file systems treat leading dots and underscores as their own names.
  safe = quote(path, safe=" +-_.,()=@")
  safe = re.sub(r"^[._]", lambda first: f"%{ord(first[0]):02X}", safe)
  if len(safe) <= _LONGEST_FILE_NAME:
    return safe
  return f"{safe[:_LONGEST_FILE_NAME]}~{_sha256(safe)[:16]}"


def versions() -> dict[str, str]:
  """Versions of Python and of the packages that decide how a run behaves."""
  found = {"python": platform.python_version()}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue  # a source checkout on the path has no metadata
  return found


def _check(
  step_dir: epath.Path, load: Callable[[epath.Path], bytes], parse: Callable[[dict[str, Any], bytes], T]
) -> T:
  """Parses the signed fields of the header, and the body as far as `load` reads it."""
  file = step_dir / FILE
  try:
    line, _, body = load(file).partition(b"\n")
    signed = json.loads(line)
    if signed.pop("sha256") != _sha256(_json(signed)):
      raise ValueError("not the SHA-256 that it names")
    if signed["format"] in (FORMAT, OLD_FORMAT):
      return parse(signed, body.removesuffix(b"\n"))
  except FileNotFoundError:
    if not step_dir.exists():
      raise VanishedError(step_dir) from None
    raise DamagedError(
      f"{step_dir} is damaged, or something else wrote it: {FILE} is missing.",
      fix="restore another step: nxp.Checkpointer(...).steps() lists the complete steps; "
      'on_corrupt="fallback" takes the newest good step. If the folder is not a checkpoint, '
      "move it elsewhere.",
    ) from None
  except (OSError, *_NOT_THE_FORMAT) as error:
    why = f"it does not match the format ({type(error).__name__}: {error})"
    if isinstance(error, OSError):
      raise_transient(error, f"{file}")
      why = f"it cannot be read ({error.strerror or error})"
    raise DamagedError(
      f"{file} is damaged: {why}.",
      fix='restore another step, or let restore(..., on_corrupt="fallback") take the newest good step.',
    ) from error
  raise CheckpointError(
    f"cannot read {file}: it has format {signed['format']!r}, and this version reads format {FORMAT}.",
    fix="install the nnx_parallel that wrote it.",
  )


def _header(signed: Mapping[str, Any]) -> Header:
  metrics = {name: float(encoding.read_json(value)) for name, value in signed["metrics"].items()}
  return Header(_whole(signed["step"]), float(signed["time"]), metrics)


def _parse(signed: Mapping[str, Any], text: bytes) -> Manifest:
  if signed["body"] != _sha256(text):
    raise ValueError("not the SHA-256 that it names")
  body = json.loads(text)
  items = {
    _inside(name, parts=1): ItemRecord(
      {path: _parse_leaf(path, **leaf) for path, leaf in item["leaves"].items()}, _values(item["values"])
    )
    for name, item in body["items"].items()
  }
  return Manifest(
    **vars(_header(signed)),
    items=items,
    extra=_values(body["extra"]),
    plan=body["plan"],
    versions=body["versions"],
    files={_inside(name): _whole(size) for name, size in body["files"].items()},
    format=signed["format"],
  )


def _parse_leaf(path: str, **fields: Any) -> LeafRecord:
  known = {field.name for field in dataclasses.fields(LeafRecord)}
  fields["shape"], fields["digest"] = tuple(map(_whole, fields["shape"])), _whole(fields.get("digest", 0))
  leaf = LeafRecord(**{name: value for name, value in fields.items() if name in known})
  words, itemsize = encoding.stored_words(leaf.dtype, leaf.encoding)
  stored = leaf.shape + words if 0 not in leaf.shape else ()
  if leaf.folder != file_name(path):
    raise ValueError(f"{path} in the folder {leaf.folder!r}")
  if (leaf.encoding == encoding.EMPTY) != (0 in leaf.shape) or leaf.nbytes != math.prod(stored) * itemsize:
    raise ValueError(f"{path}: {leaf.nbytes:,} bytes of {leaf.dtype}{list(leaf.shape)} ({leaf.encoding})")
  return leaf


def _json(value: object) -> str:
  return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _sha256(text: str | bytes) -> str:
  return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def _values(values: dict[str, Any]) -> dict[str, Any]:
  for value in values.values():
    encoding.read_json(value)
  return values


def _whole(value: object) -> int:
  if type(value) is not int or not 0 <= value < 2**63:
    raise ValueError(f"{value!r:.100} is not a whole number")
  return value


def _inside(name: str, parts: float = math.inf) -> str:
  """A relative path of at most so many parts that does not leave its folder."""
  found = name.split("/")
  if {*found} & {"", ".", ".."} or "\\" in name or "\0" in name or len(found) > parts:
    raise ValueError(f"{name!r:.100} leads out of the folder")
  return name
