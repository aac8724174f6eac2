"""One row of the plan: a Variable, its layout, and the decision behind it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.nodes import Names, Path, path_str
from nnx_parallel.core.types import DType
from nnx_parallel.layout.resolve import count_shards_by_dim

HOST_KINDS = ("pinned_host", "unpinned_host")
"""Memory kinds that are not the device's own."""

Root = Literal["model", "optimizer"]
Source = Literal["metadata", "stated", "path rule", "fallback", "parameter", "replicated"]


@dataclasses.dataclass(frozen=True)
class Decision:
  """The reason for the spec of a leaf."""

  # the origin of its names: its `metadata`, a `path rule`, the `fallback`, its `parameter` (optimizer state),
  # or none: `replicated`
  source: Source
  reason: str  # one short phrase for the table
  steps: tuple[str, ...] = ()  # the attempts, in order, one sentence each; printed by `plan.explain(path)`
  # whether the rules mean this layout; False where an array or dim is not split because a rule, a free axis,
  # or a size that divides is missing. The audit warns about these.
  intended: bool = True


@dataclasses.dataclass(frozen=True)
class LeafPlan:
  """One row of the plan: a Variable (or raw array) and its layout.

  Attributes:
    root: `"model"` or `"optimizer"`: the object that the array belongs to.
    path: the parts of its path inside that object; ints index lists.
    kind: the name of the Variable's type, or `array`.
    shape: the global shape, without padding.
    dtype: the dtype; for a PRNG key, the dtype of the key.
    names: the logical names of its dims, or None if it has no names.
    spec: the `PartitionSpec`, with one entry for each dim.
    padding: for each dim, the number of elements that are added at its end for storage.
    memory_kind: None for the default memory of the device, or another memory, such as `"pinned_host"`.
    decision: where the names came from, and why they gave this spec.
    mesh: the plan's mesh.
    aliases: the other paths of the same Variable in the module (tied weights). The Variable is counted once,
      under `path`.
    is_parameter: whether the array is an `nnx.Param` of the model, or of a subclass of `nnx.Param`.
    parameter: for optimizer state, the path of the parameter of the model that it belongs to, if any.
  """

  root: Root
  path: Path
  kind: str
  shape: tuple[int, ...]
  dtype: DType
  names: Names | None
  spec: PartitionSpec
  padding: tuple[int, ...]
  memory_kind: str | None
  decision: Decision
  mesh: AnyMesh = dataclasses.field(repr=False)
  aliases: tuple[Path, ...] = ()
  is_parameter: bool = False
  parameter: Path | None = None

  @functools.cached_property
  def name(self) -> str:
    """The dotted path; optimizer leaves start with `optimizer/`."""
    return path_str(self.path) if self.root == "model" else f"optimizer/{path_str(self.path)}"

  @functools.cached_property
  def sharding(self) -> NamedSharding:
    """The `NamedSharding`, which is the spec on the mesh of the plan with the memory kind."""
    return NamedSharding(self.mesh, self.spec, memory_kind=self.memory_kind)  # pyright: ignore[reportArgumentType]

  @property
  def on_host(self) -> bool:
    """Whether the array is stored in the memory of the host."""
    return self.memory_kind in HOST_KINDS

  @functools.cached_property
  def storage_shape(self) -> tuple[int, ...]:
    """The global shape as stored, which is `shape` plus `padding`."""
    return tuple(size + extra for size, extra in zip(self.shape, self.padding, strict=True))

  @functools.cached_property
  def shards(self) -> tuple[int, ...]:
    """The number of shards along each dim."""
    return count_shards_by_dim(self.spec, len(self.shape), axis_sizes(self.mesh))

  @functools.cached_property
  def bytes(self) -> int:
    """The global size in bytes as stored; replicated copies are not counted."""
    return math.prod(self.storage_shape) * self.dtype.itemsize

  @functools.cached_property
  def bytes_per_device(self) -> int:
    """The bytes that each device holds."""
    return self.bytes // math.prod(self.shards)

  @property
  def local_shape(self) -> tuple[int, ...]:
    """The per-device shape, which is the shape of one shard of `storage_shape`."""
    return tuple(size // count for size, count in zip(self.storage_shape, self.shards, strict=True))

  @property
  def copies(self) -> int:
    """The number of devices that hold the same shard; 1 if the array is not replicated at all."""
    return self.mesh.size // math.prod(self.shards)

  @property
  def struct(self) -> jax.ShapeDtypeStruct:
    """The array as a `jax.ShapeDtypeStruct` with storage shape, dtype, sharding and memory kind."""
    return jax.ShapeDtypeStruct(self.storage_shape, self.dtype, sharding=self.sharding)
