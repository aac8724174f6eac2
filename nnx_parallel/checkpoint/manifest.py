"""The manifest: what a checkpoint holds, written last and signed with its own digest.

One JSON file, `nnx_parallel.json`, lies in each step folder. A folder with a readable manifest is a
complete checkpoint; without one it is none. The manifest names every leaf with its logical shape, dtype,
kind and digests, every file with its size, and the versions, plan and JSON values that belong to the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from typing import Any

from etils import epath

from nnx_parallel.checkpoint.encoding import Json
from nnx_parallel.checkpoint.passing import raise_passing
from nnx_parallel.errors import CheckpointError

FILE = "nnx_parallel.json"
FORMAT = 3
_READ = (2, FORMAT)
_PACKAGES = ("nnx_parallel", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class DamagedError(CheckpointError):
  """A checkpoint whose files or values are not those that were saved."""


@dataclasses.dataclass(frozen=True)
class LeafRecord:
  """One array of a checkpoint.

  Attributes:
    folder: name under which the array store holds it, inside the item's folder.
    shape: logical global shape in elements, without padding.
    dtype: as `encoding.dtype_name` writes it.
    encoding: how the stored array stands for the leaf (`encoding.encoding_of`).
    kind: the Variable's type, for example `"Param"`; empty for plain arrays.
    nbytes: bytes of the stored array.
    block: shape of the stored array's logical blocks, in elements.
    digests: one for each block, in C order; none for an array without elements.
    layout: the one it was saved in, as `preflight.layout_text` writes it; empty for numpy arrays.
  """

  folder: str
  shape: tuple[int, ...]
  dtype: str
  encoding: str
  kind: str
  nbytes: int
  block: tuple[int, ...]
  digests: tuple[int, ...]
  layout: str = ""

  @property
  def digest(self) -> int:
    """Of the whole array; the size of the blocks does not matter."""
    return sum(self.digests) % 2**32


@dataclasses.dataclass(frozen=True)
class ItemRecord:
  """One tree of a checkpoint: `model`, `optimizer`, `ema`, ...

  Attributes:
    leaves: the arrays, by path as text.
    values: the leaves that are JSON values, by path as text.
  """

  leaves: Mapping[str, LeafRecord]
  values: Mapping[str, Json]


@dataclasses.dataclass(frozen=True)
class Manifest:
  """All that is known about a checkpoint without reading its arrays.

  Attributes:
    step: the training step.
    items: the trees, by name.
    extra: JSON values saved beside the trees, for example a data cursor.
    metrics: numbers that `best` compares; not finite ones included.
    plan: what `ShardingPlan.to_json` wrote, or None; `ShardingPlan.from_json(json.dumps(...))` reads it.
    versions: of Python and the packages that wrote it.
    fingerprint: changes whenever any value, path, shape or dtype changes.
    time: seconds since 1970 when it was committed; later than that of any step committed before it.
    files: bytes of every other file of the step, by relative path.
    hashes: SHA-256 of the files that hold no array data, by relative path.
  """

  step: int
  items: Mapping[str, ItemRecord]
  extra: Mapping[str, Json]
  metrics: Mapping[str, float]
  plan: Json
  versions: Mapping[str, str]
  fingerprint: str
  time: float
  files: Mapping[str, int]
  hashes: Mapping[str, str]

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays."""
    return sum(leaf.nbytes for item in self.items.values() for leaf in item.leaves.values())


def write(manifest: Manifest, step_dir: epath.Path) -> None:
  """Writes the manifest into a step folder; the caller makes it durable."""
  body = json.loads(_body(dataclasses.asdict(manifest)))
  text = json.dumps({"format": FORMAT, "sha256": _signature(FORMAT, body), "manifest": body})
  (step_dir / FILE).write_text(text)


def read(step_dir: epath.Path) -> Manifest:
  """Reads and checks the manifest of a step folder.

  Raises:
    CheckpointError: no manifest, one that was damaged, or one of another format.
  """
  file = step_dir / FILE
  try:
    document = json.loads(file.read_bytes())
    number, sha256, body = document["format"], document["sha256"], document["manifest"]
  except FileNotFoundError:
    raise DamagedError(
      f"{step_dir} is damaged, or something else wrote it: {FILE} is missing.",
      fix='restore another step: Checkpointer(...).steps() lists the complete ones; on_corrupt="fallback" '
      "takes the newest good one. If the folder is not a checkpoint, move it elsewhere.",
    ) from None
  except (ValueError, TypeError, LookupError) as error:
    raise _damaged(file, f"it cannot be read as JSON ({error})") from error
  except OSError as error:
    raise_passing(error, f"{file}")
    raise _damaged(file, f"it cannot be read ({error.strerror or error})") from error
  if number in _READ and sha256 == _signature(number, body):
    return _parse(body)
  # A format that is not the one that was signed is a damaged number, not a newer format.
  if number in _READ or sha256 in (_signature(known, body) for known in _READ):
    raise _damaged(file, "its contents do not have the SHA-256 that it names")
  raise CheckpointError(
    f"cannot read {file}: it has format {number!r}, and this version reads the formats 2 to {FORMAT}.",
    fix="install the nnx_parallel that wrote it.",
  )


def _signature(number: int, body: Any) -> str:
  """SHA-256 of a manifest; until format 2 the format was not part of it."""
  return _sha256(_body(body if number == 2 else [number, body]))


def versions() -> dict[str, str]:
  """Versions of Python and of the packages that decide how a run behaves."""
  found = {"python": platform.python_version()}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue  # a source checkout on the path has no metadata
  return found


def fingerprint(items: Mapping[str, ItemRecord]) -> str:
  """SHA-256 over paths, shapes, dtypes, digests and values of all items."""
  rows = [
    [name, path, leaf.shape, leaf.dtype, leaf.encoding, leaf.digest]
    for name, item in sorted(items.items())
    for path, leaf in sorted(item.leaves.items())
  ]
  values = {name: dict(item.values) for name, item in items.items()}
  return _sha256(_body([rows, values]))


def _parse(body: Any) -> Manifest:
  items = {
    name: ItemRecord(
      {path: _parse_leaf(leaf) for path, leaf in item["leaves"].items()},
      item["values"],
    )
    for name, item in body["items"].items()
  }
  return Manifest(**(body | {"items": items}))


def _parse_leaf(leaf: Any) -> LeafRecord:
  return LeafRecord(**leaf | {name: tuple(leaf[name]) for name in ("shape", "block", "digests")})


def _body(value: object) -> str:
  return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _sha256(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _damaged(file: epath.Path, why: str) -> DamagedError:
  return DamagedError(
    f"{file} is damaged: {why}.",
    fix='restore another step, or let restore(..., on_corrupt="fallback") take the newest good one.',
  )
