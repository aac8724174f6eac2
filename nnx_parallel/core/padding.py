"""Padded Variables: stored at a size that divides, with the user's size for every reader.

A padded Variable is a subclass of the Variable's type (so that filters such as `nnx.Param` match it). Its raw
value has the storage shape; its `get_value`, `[...]`, `.shape` and operators have the logical shape. Inside a
compiled program on Auto axes the slice is free: the shards of the stored array are already the shards of the
logical array, and no collective is added (measured: equal collectives and temporaries, and equal numbers).
Gradients have zeros in the padding, because the transpose of a slice does this.

Optimizers also see logical shapes (`logical_transformation`), so that means over a parameter, as in
Adafactor, and thresholds on its size equal the values on one device.
"""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any, cast

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnx_parallel.core.extra_args import accept_extra
from nnx_parallel.core.types import AnyArray, PyTree, Variable
from nnx_parallel.errors import ShardingError

PADDED = "padded_shape"
"""Metadata key of a padded Variable: `(logical shape, storage shape)`."""
# Attributes of the stored array; all other attributes belong to the logical array.
_STORED_ATTRIBUTES = frozenset(
  ("dtype", "ndim", "sharding", "addressable_shards", "is_deleted", "delete", "block_until_ready", "devices")
)


def is_padded(variable: object) -> bool:
  """Whether a Variable is stored with padding."""
  return isinstance(variable, nnx.Variable) and variable.has_metadata(PADDED)


def logical_kind(variable: Variable) -> type[Variable]:
  """The user's type of a Variable: `nnx.Param` for a padded `nnx.Param`."""
  kind = type(variable)
  return kind.__bases__[0] if is_padded(variable) else kind


def pad_variable(variable: Variable, array: AnyArray, storage_shape: tuple[int, ...]) -> Variable:
  """A padded Variable of the type, metadata and shape of `variable`, around an array of a storage shape."""
  shapes = (tuple(variable.get_raw_value().shape), tuple(storage_shape))
  metadata = {**variable.get_metadata(), PADDED: shapes}
  return cast(Any, _pad_type(type(variable))).from_metadata(array, metadata)


@functools.cache
def _pad_type(kind: type[Variable]) -> type[Variable]:
  def get_value(self: Variable, **index: Any) -> AnyArray:
    return _logical_variable(self).get_value(**index)

  def set_value(self: Variable, value: AnyArray, **index: Any) -> None:
    changed = _logical_variable(self)
    changed.set_value(value, **index)
    _store(self, changed.get_raw_value())

  def shape(self: Variable) -> tuple[int, ...]:
    return _limits(tuple(self.get_raw_value().shape), *self.get_metadata(PADDED))

  def get_attribute(self: Variable, name: str) -> Any:
    if name == "_read":  # nobody has read it yet
      return None
    if name in _STORED_ATTRIBUTES or self.has_metadata(name):
      return kind.__getattr__(self, name)
    return getattr(_logical_variable(self), name)

  def deepcopy(self: Variable, memo: dict[int, Any]) -> Any:
    # Found here, not on the array: else a deep copy of a module would hold bare logical arrays.
    return self.copy(copy.deepcopy(self.get_raw_value(), memo))

  def reduce(self: Variable) -> tuple[Any, ...]:
    return _rebuild, (kind, self.__getstate__())

  members = {
    "__doc__": f"A padded `{kind.__name__}`: stored with padding, seen without.",
    "__module__": __name__,
    "__slots__": ("_read",),
    "get_value": get_value,
    "set_value": set_value,
    "shape": property(shape),
    "__getattr__": get_attribute,
    "__deepcopy__": deepcopy,
    "__reduce__": reduce,
  }
  make: Any = type(kind)
  return make(f"Padded{kind.__name__}", (kind,), members)


def _rebuild(kind: type[Variable], state: dict[str, Any]) -> Any:
  padded: Any = _pad_type(kind)
  made = padded.__new__(padded)
  made.__setstate__(state)
  return made


def _logical_variable(variable: Variable) -> Variable:
  """The Variable with its original type and logical shape: hooks and overrides of that type apply."""
  metadata = {k: v for k, v in variable.get_metadata().items() if k not in (PADDED, "ref")} | {"ref": False}
  return cast(Any, logical_kind(variable)).from_metadata(_logical_array(variable), metadata)


def _logical_array(variable: Variable) -> AnyArray:
  """The array without the padding: one object for all reads of an unchanged Variable, as in flax."""
  # Libraries such as Qwix find the Variable of an operand by the identity of its array. The Variable does not
  # keep that array alive, and each trace has another.
  raw, (logical, storage) = variable.get_raw_value(), variable.get_metadata(PADDED)
  if variable.ref:
    return crop(raw[...], logical, storage)
  if not isinstance(raw, (jax.Array, np.ndarray)):
    return crop(raw, logical, storage)
  trace = jex.get_opaque_trace_state()
  read = variable._read
  if read is not None and read[0]() is raw and read[1] == trace and (kept := read[2]()) is not None:
    return kept
  value = crop(raw, logical, storage)
  object.__setattr__(variable, "_read", (weakref.ref(raw), trace, weakref.ref(value)))
  return value


def _store(variable: Variable, value: AnyArray) -> None:
  logical, storage = variable.get_metadata(PADDED)
  raw = variable.get_raw_value()
  if not isinstance(value, jax.Array) and not hasattr(value, "shape"):
    variable.set_raw_value(value)  # a placeholder of a transform, not an array
    return
  expected = _limits(tuple(raw.shape), logical, storage)
  if tuple(value.shape) != expected:
    raise ShardingError(
      f"cannot set a padded {logical_kind(variable).__name__} to an array of shape {tuple(value.shape)}.",
      details=f"its shape is {expected}, stored as {tuple(raw.shape)}",
      fix=f"set an array of shape {expected}, or plan again with uneven='replicate'.",
    )
  stored = _pad_like(value, raw)
  if variable.ref:
    raw[...] = stored
  else:
    variable.set_raw_value(stored)


def crop(value: AnyArray, logical: tuple[int, ...], storage: tuple[int, ...]) -> AnyArray:
  """Cuts an array of the storage shape to the logical shape; an array of the logical shape stays as it is."""
  # It may have lost or gained dims under `vmap` or `scan`. Values without a shape are returned unchanged; any
  # other shape is an error, because the position of the padding is unknown.
  shape = getattr(value, "shape", None)
  if shape is None or shape == logical:
    return value
  limits = _limits(tuple(shape), logical, storage)
  if not isinstance(value, (jax.Array, np.ndarray)):  # abstract, or the object that flax prints for an array
    return jax.ShapeDtypeStruct(limits, value.dtype)
  return _gather_cut_dims(value, limits)[tuple(slice(limit) for limit in limits)]


def _limits(shape: tuple[int, ...], logical: tuple[int, ...], storage: tuple[int, ...]) -> tuple[int, ...]:
  """The logical size of each dim of `shape`, which is `storage` or has lost or gained some dims."""
  # Of 3 rows stored as 4: (4, 8) is (3, 8), (n, 4, 8) under a `vmap` is (n, 3, 8), and a row (8,) stays.
  if shape in (storage, logical):
    return logical
  if len(shape) > len(storage):
    extra = len(shape) - len(storage)
    options = {
      logical[:at] + shape[at : at + extra] + logical[at:]
      for at in range(len(storage) + 1)
      if shape[:at] + shape[at + extra :] == storage
    }
  else:
    lost = len(storage) - len(shape)
    options = {
      logical[:at] + logical[at + lost :]
      for at in range(len(shape) + 1)
      if storage[:at] + storage[at + lost :] == shape
    }
  if len(options) == 1:
    return options.pop()
  raise ShardingError(
    f"a padded array of shape {storage} (logical {logical}) has the shape {shape} here.",
    details="so the padded dim is unknown" if options else "which is neither of the two",
    fix="map over another dim, or plan with uneven='replicate' for this array.",
  )


def _gather_cut_dims(value: AnyArray, limits: tuple[int, ...]) -> AnyArray:
  # With sharding in types an uneven dim cannot be split, so there it is gathered first; on Auto axes the
  # compiler keeps the shards.
  sharding = jax.typeof(value).sharding
  if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
    return value
  entries = (*sharding.spec, *([None] * (len(limits) - len(sharding.spec))))
  kept = [e if limit == size else None for e, limit, size in zip(entries, limits, value.shape, strict=True)]
  if tuple(kept) == entries:
    return value
  return jax.sharding.reshard(value, NamedSharding(sharding.mesh, PartitionSpec(*kept)))


def pad(value: AnyArray, shape: tuple[int, ...]) -> AnyArray:
  """Appends zeros to each dim of an array up to `shape` (global storage shape, elements)."""
  if tuple(value.shape) == shape:
    return value
  widths = [(0, new - old) for old, new in zip(value.shape, shape, strict=True)]
  return jnp.pad(value, widths)


def _pad_like(value: AnyArray, like: AnyArray) -> AnyArray:
  padded = pad(value, tuple(like.shape))
  if isinstance(padded, Tracer):
    target = jax.typeof(like).sharding
    is_explicit = AxisType.Explicit in target.mesh.axis_types
    return jax.sharding.reshard(padded, target) if is_explicit and padded.shape != value.shape else padded
  # Outside jit nothing else would keep the shards where they were.
  return jax.device_put(padded, like.sharding) if isinstance(like, jax.Array) else padded


def logical_transformation(
  tx: optax.GradientTransformation, parameters: PyTree
) -> optax.GradientTransformationExtraArgs:
  """Makes an optimizer compute at logical shapes, which `parameters` have, on padded arrays."""
  # Gradients, parameters and state are cut before the update and padded with zeros after it, so the optimizer
  # never averages, clips or counts the padding. The state keeps its structure.
  inner = accept_extra(tx)

  @functools.cache
  def state_shapes() -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(tx.init, parameters))]

  parameter_shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(parameters)]

  def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
    stored_grads, stored_state = jax.tree.leaves(grads), jax.tree.leaves(state)
    structure = jax.tree.structure(grads)
    cut = functools.partial(_cut, shapes=parameter_shapes)
    like_params = {k: cut(v) if jax.tree.structure(v) == structure else v for k, v in extra.items()}
    updates, new_state = inner.update(
      cut(grads), _cut(state, state_shapes()), None if params is None else cut(params), **like_params
    )
    return _fill(updates, stored_grads), _fill(new_state, stored_state)

  return optax.GradientTransformationExtraArgs(tx.init, cast(Any, update))


def _cut(tree: PyTree, shapes: list[tuple[int, ...]]) -> PyTree:
  leaves, structure = jax.tree.flatten(tree)
  cut = [crop(leaf, shape, tuple(leaf.shape)) for leaf, shape in zip(leaves, shapes, strict=True)]
  return jax.tree.unflatten(structure, cut)


def _fill(tree: PyTree, stored: list[AnyArray]) -> PyTree:
  leaves, structure = jax.tree.flatten(tree)
  full = [_pad_like(leaf, like) for leaf, like in zip(leaves, stored, strict=True)]
  return jax.tree.unflatten(structure, full)
