"""Moves a live module, or arrays of any origin, into the layout of a plan."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import no_mesh
from nnx_parallel.core.nodes import Path, array_leaves, is_key, key_implementation, path_str, value_of
from nnx_parallel.core.padding import crop, is_padded, pad
from nnx_parallel.core.shards import auto_sharding, describe
from nnx_parallel.core.text import format_array, list_lines
from nnx_parallel.core.types import AnyArray, Leaf, Model
from nnx_parallel.create.constructor import real_mesh
from nnx_parallel.create.instantiate import instantiate
from nnx_parallel.create.slices import put
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.leaf import LeafPlan, Root
from nnx_parallel.layout.plan import Plan, check_plan

R = TypeVar("R")


@check_arguments(PlanError)
def reshard(
  model: nnx.Module,
  plan: Plan[R],
  *,
  optimizer: nnx.Optimizer[Any] | None = None,
  donate: bool = False,
  byte_budget: int = 2**28,
) -> R:
  """Moves a live module into the layout of a plan, from any mesh and any specs.

  It moves one array after another, so that at most about `byte_budget` bytes per device are in flight at a
  time. The arrays of the new module share no memory with the old arrays, so a step that donates the arrays of
  one module does not delete the arrays of the other module. Tied Variables remain tied.

  Args:
    model: the live module: the planned module, or a module with the same Variables.
    plan: the plan that gives the new layout.
    optimizer: the optimizer of the model, which is moved too. Pass it if and only if the plan has an
      optimizer.
    donate: whether to free each old array as soon as it is moved, so that the peak memory is one copy of the
      model plus `byte_budget`. The old module cannot be used afterwards.
    byte_budget: the bytes per device that may be in flight at a time; one array is moved even if it is
      larger.

  Returns:
    The new module; `(module, optimizer)` if the plan has an optimizer.

  Raises:
    PlanError: the module and the plan differ in paths, shapes or dtypes; or `optimizer` is missing, or given
      for a plan without an optimizer.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=64))
    >>> model = nxp.reshard(init(), plan, donate=True)
    >>> model.kernel.get_value().sharding.spec
    P(None, 'fsdp')
  """
  check_plan(plan, "nxp.reshard(model, plan)")
  _check_optimizer(plan, optimizer)
  roots: dict[Root, Model] = {"model": model}
  if optimizer is not None:
    roots["optimizer"] = optimizer
  leaves: dict[Root, dict[Path, Leaf]] = {root: array_leaves(node) for root, node in roots.items()}
  arrays: dict[Root, dict[Path, AnyArray]] = {
    root: {path: value_of(leaf) for path, leaf in found.items()} for root, found in leaves.items()
  }
  # A padded Variable may be stored at another size than this plan's; its logical shape must fit.
  padded = [leaf for found in leaves.values() for leaf in found.values() if is_padded(leaf)]
  shapes = {id(leaf.get_raw_value()): tuple(leaf.shape) for leaf in padded}
  return instantiate(plan, _place(plan, arrays, donate=donate, byte_budget=byte_budget, shapes=shapes))


@check_arguments(PlanError, "arrays")
def from_arrays(
  arrays: Mapping[Any, AnyArray], plan: Plan[R], *, optimizer: Mapping[Any, AnyArray] | None = None
) -> R:
  """Builds the planned module from arrays: NumPy arrays, memory-mapped files or JAX arrays.

  Of a NumPy array, only the shards of the local devices are read and copied. The `init` of the plan is not
  run, so it computes no values.

  Args:
    arrays: one array for each leaf of the model, by dotted path (`"up.kernel"`) or by path tuple. The arrays
      have global shapes, without padding. A PRNG key may be given as its `jax.random.key_data`.
    plan: the plan of the module.
    optimizer: the arrays of the optimizer, by path without `optimizer/`. Pass them if and only if the plan
      has an optimizer.

  Returns:
    The live module; `(module, optimizer)` if the plan has an optimizer.

  Raises:
    PlanError: a path is missing, the plan does not have a path, or a shape or dtype differs from the plan.

  Example:
    >>> import numpy as np, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=64))
    >>> arrays = {"kernel": np.ones((8, 64), np.float32), "bias": np.zeros(64, np.float32)}
    >>> nxp.from_arrays(arrays, plan).kernel.get_value().sharding.spec
    P(None, 'fsdp')
  """
  check_plan(plan, "nxp.from_arrays(arrays, plan)")
  _check_optimizer(plan, optimizer)
  for found in (arrays, {} if optimizer is None else optimizer):
    if not isinstance(found, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
      raise PlanError(
        f"from_arrays needs arrays by path, and got a value of type {type(found).__name__}.",
        fix="nxp.from_arrays({'up.kernel': array}, plan); for a live module, nxp.reshard(model, plan).",
      )
  given: dict[Root, Mapping[Any, AnyArray]] = {"model": arrays}
  if optimizer is not None:
    given["optimizer"] = optimizer
  by_path: dict[Root, dict[Path, AnyArray]] = {
    root: _by_path(plan, root, found) for root, found in given.items()
  }
  return instantiate(plan, _place(plan, by_path, donate=False, byte_budget=2**28))


def _check_optimizer(plan: Plan, optimizer: object) -> None:
  if plan.tx is not None and optimizer is None:
    fix = "model, optimizer = nxp.reshard(model, plan, optimizer=optimizer)"
    raise PlanError("the plan has an optimizer, but none was given.", fix=fix)
  if plan.tx is None and optimizer is not None:
    fix = "plan with nxp.plan(..., optimizer=tx)."
    raise PlanError("the plan has no optimizer, but one was given.", fix=fix)


def _by_path(plan: Plan, root: Root, given: Mapping[Any, AnyArray]) -> dict[Path, AnyArray]:
  names = {path_str(path): path for path in plan.of(root)}
  found: dict[Path, AnyArray] = {}
  for key, value in given.items():
    path: Any = names.get(key, (key,)) if isinstance(key, str) else key
    if not isinstance(path, tuple):
      raise PlanError(
        f"from_arrays got {path!r:.40}, which is no path.", fix="nxp.from_arrays({'up.kernel': ...})"
      )
    if path in found:
      raise PlanError(f"from_arrays got {path_str(path)} twice.", fix="give it once: by its dotted path.")
    found[path] = value
  return found


def _place(
  plan: Plan,
  arrays: Mapping[Root, dict[Path, AnyArray]],
  *,
  donate: bool,
  byte_budget: int,
  shapes: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
) -> dict[Root, dict[Path, jax.Array]]:
  """Moves the arrays; `shapes` has the logical shapes of padded arrays, by their ids."""
  real_mesh(plan)
  for root, found in arrays.items():
    _check_arrays(plan, root, found, shapes)
  # One array may be in several Variables; only the last Variable may free it.
  uses = collections.Counter(id(value) for found in arrays.values() for value in found.values())
  placed: dict[Root, dict[Path, jax.Array]] = {}
  moving: list[jax.Array] = []
  under_way = 0
  old: list[jax.Array] = []

  def settle() -> None:
    jax.block_until_ready(moving)
    for source in old:
      source.delete()
    moving.clear()
    old.clear()

  freed = 0
  try:
    for leaf in plan.leaves:
      source = arrays[leaf.root].pop(leaf.path)
      with no_mesh():
        moved = _move(source, leaf)
      placed.setdefault(leaf.root, {})[leaf.path] = moved
      moving.append(moved)
      uses[id(source)] -= 1
      if donate and isinstance(source, jax.Array) and not uses[id(source)]:
        old.append(source)
      under_way += leaf.bytes_per_device
      if under_way > byte_budget:
        freed += len(old)
        settle()
        under_way = 0
    settle()
  except BaseException as error:
    if freed:
      error.add_note(
        f"reshard(donate=True) had freed {freed} arrays of the old module, which cannot be used any more.\n"
        "  Fix: restore the last checkpoint into the plan."
      )
    raise
  return placed


def _move(source: AnyArray, leaf: LeafPlan) -> jax.Array:
  if is_key(leaf.dtype) and not is_key(source.dtype):
    source = jax.random.wrap_key_data(jnp.asarray(source), impl=key_implementation(leaf.dtype))
  if source.shape == leaf.storage_shape:
    return put(source, leaf.sharding)
  if isinstance(source, jax.Array):
    # Cut and padded on its own devices, which may differ from the plan's devices.
    return put(resize(source, leaf.shape, leaf.storage_shape), leaf.sharding)
  shape, host = leaf.storage_shape, np.asarray(source)
  return jax.make_array_from_callback(shape, leaf.sharding, lambda index: _pad(host, index, shape))


def resize(array: jax.Array, shape: tuple[int, ...], storage: tuple[int, ...]) -> jax.Array:
  """A stored array of this logical shape with the padding of another storage shape, on its own devices."""
  where = array.sharding
  if isinstance(where, NamedSharding):  # with Explicit axes in its type, jax pads no dim to an uneven size
    array = jax.device_put(array, auto_sharding(where))
  return _resize(array, shape, storage)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _resize(array: jax.Array, shape: tuple[int, ...], storage: tuple[int, ...]) -> jax.Array:
  return pad(crop(array, shape, tuple(array.shape)), storage)


def _pad(host: np.ndarray, index: Any, shape: tuple[int, ...]) -> np.ndarray:
  """One shard of `host` with zeros appended up to `shape`."""
  sizes = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)]
  shard = np.zeros(sizes, host.dtype)
  there = host[index]
  shard[tuple(slice(0, size) for size in there.shape)] = there
  return shard


def _check_arrays(
  plan: Plan, root: Root, found: Mapping[Path, AnyArray], shapes: Mapping[int, tuple[int, ...]]
) -> None:
  rows, what = plan.of(root), "module" if root == "model" else "optimizer"
  wrong = [
    f"{rows[path].name}: planned {format_array(rows[path].dtype, rows[path].shape)}, given "
    + (describe(found[path]) if path in found else "nothing")
    for path in rows
    if path not in found or not _fits(found[path], rows[path], shapes.get(id(found[path])))
  ]
  wrong += [f"{path_str(path)}: given, and not in the plan" for path in found if path not in rows]
  if wrong:
    raise PlanError(
      f"{len(wrong)} arrays do not fit the plan's {what}.",
      details=list_lines(wrong),
      fix="give one array for each leaf: [leaf.name for leaf in plan.leaves] lists them.",
    )


def _fits(value: AnyArray, leaf: LeafPlan, shape: tuple[int, ...] | None) -> bool:
  """Whether an array, whose logical shape is `shape` if it is padded, fits the planned array."""
  if not hasattr(value, "shape") or not hasattr(value, "dtype"):
    return False
  if is_key(leaf.dtype) and not is_key(value.dtype):
    data = jax.eval_shape(jax.random.key_data, leaf.struct)
    return (tuple(value.shape), value.dtype) == (data.shape, data.dtype)
  fits = shape == leaf.shape or tuple(value.shape) in (leaf.shape, leaf.storage_shape)
  return fits and value.dtype == leaf.dtype
