"""What users pass to `save` and `restore`, as tables of leaves: plans, live modules, pytrees."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_parallel.checkpoint import paths, trees
from nnx_parallel.checkpoint.digest import host_device
from nnx_parallel.checkpoint.encoding import Array, Json
from nnx_parallel.checkpoint.manifest import ItemRecord, LeafRecord
from nnx_parallel.checkpoint.preflight import Wanted
from nnx_parallel.checkpoint.save import Tree
from nnx_parallel.create.constructor import construct
from nnx_parallel.create.instantiate import instantiate
from nnx_parallel.errors import CheckpointError
from nnx_parallel.layout.leaf import Root
from nnx_parallel.layout.mesh import axis_sizes
from nnx_parallel.layout.padding import is_padded
from nnx_parallel.layout.plan import ShardingPlan
from nnx_parallel.layout.variables import kind_of, value_of, variables

OPTIMIZER = ("restore", "drop", "fresh")
Found = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Target:
  """What a restore fills.

  Attributes:
    wanted: the arrays to read, by item and path.
    values: the paths of leaves that are JSON values, by item.
    build: makes the result from the arrays and values that were read; leaves that were left out by name
      are what the target has, or what `init` makes.
  """

  wanted: Mapping[str, Mapping[str, Wanted]]
  values: Mapping[str, tuple[str, ...]]
  build: Callable[[Found], Any]


def read(target: object, *, optimizer: str, as_numpy: bool = False, item: str = "model") -> Target:
  """Reads a target.

  Args:
    target: a plan, a module, (module, optimizer), or a pytree of abstract or concrete arrays.
    optimizer: `restore`, `drop` or `fresh`.
    as_numpy: whether a pytree's leaves become numpy arrays.
    item: the item that a pytree stands for.

  Raises:
    CheckpointError: an unknown `optimizer`, or a leaf without a sharding.
  """
  if optimizer not in OPTIMIZER:
    raise CheckpointError(f"optimizer={optimizer!r} is unknown.", fix='pass "restore", "drop" or "fresh".')
  if callable(target) and not isinstance(target, nnx.Module):
    raise CheckpointError(
      f"cannot restore into the function {getattr(target, '__name__', type(target).__name__)}.",
      fix="restore(nxp.plan(init, mesh, rules)); restore(init()), on one device; restore(), for the arrays.",
    )
  if isinstance(target, ShardingPlan):
    return _plan_target(target, optimizer)
  if isinstance(target, nnx.Module):
    return _live_target({"model": target}, target)
  if isinstance(target, tuple) and target and isinstance(target[0], nnx.Module):
    return _pair_target(target, optimizer)
  return _tree_target(target, as_numpy=as_numpy, item=item)


def saved_roots(model: object, optimizer: object) -> dict[str, Tree]:
  """The items that `save` writes for a model and its optimizer."""
  roots = {"model": _tree_to_save(model)}
  if optimizer is not None:
    roots["optimizer"] = _tree_to_save(optimizer)
  return roots


def plan_json(plan: object) -> Json:
  """What the manifest keeps of a plan: all that `ShardingPlan.from_json` reads."""
  if plan is None:
    return None
  if not isinstance(plan, ShardingPlan):
    raise CheckpointError(f"plan={plan!r} is not a ShardingPlan.", fix="pass what nxp.plan(...) returned.")
  return json.loads(plan.to_json())


def as_saved(record: ItemRecord) -> dict[str, Wanted]:
  """A target of numpy arrays (and keys on the first CPU) for everything in an item."""
  return {path: _as_saved(leaf) for path, leaf in record.leaves.items()}


def _as_saved(leaf: LeafRecord) -> Wanted:
  if leaf.encoding.startswith("key:"):
    key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.encoding.removeprefix("key:")))
    host = jax.sharding.SingleDeviceSharding(host_device())
    return Wanted(jax.ShapeDtypeStruct(leaf.shape, key.dtype, sharding=host), leaf.shape)
  return Wanted(jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype)), leaf.shape)


def _tree_to_save(root: object) -> Tree:
  if not isinstance(root, (nnx.Module, nnx.Optimizer)):
    leaves, _ = trees.flatten(root)
    return Tree(leaves)
  found = {paths.join(path): leaf for path, leaf in variables(root).items()}  # pyright: ignore[reportArgumentType]
  shapes = {path: tuple(leaf.shape) for path, leaf in found.items() if is_padded(leaf)}
  return Tree(
    {path: value_of(leaf) for path, leaf in found.items()},
    shapes,
    {path: kind_of(leaf) for path, leaf in found.items()},
  )


def _plan_target(plan: ShardingPlan, optimizer: str) -> Target:
  if isinstance(plan.mesh, jax.sharding.AbstractMesh):
    raise CheckpointError(
      "cannot restore into a plan on an abstract mesh: it has no devices.",
      details=f"mesh {axis_sizes(plan.mesh)}",
      fix="plan on real devices: nxp.plan(init, nxp.make_mesh(...), rules).",
    )
  if optimizer == "drop":
    kept = tuple(leaf for leaf in plan.leaves if leaf.root == "model")
    plan = dataclasses.replace(plan, leaves=kept, tx=None, abstract_optimizer=None)
  roots: tuple[Root, ...] = ("model",)
  if plan.tx is not None and optimizer == "restore":
    roots = ("model", "optimizer")
  wanted = {
    root: {_text(path): Wanted(leaf.struct, leaf.shape) for path, leaf in plan.of(root).items()}
    for root in roots
  }

  def build(found: Found) -> Any:
    arrays: dict[Root, dict[Any, Any]] = {}
    for leaf in plan.leaves:
      text = _text(leaf.path)
      if text in found.get(leaf.root, {}):
        arrays.setdefault(leaf.root, {})[leaf.path] = found[leaf.root][text]
    left_out = sum(map(len, arrays.values())) < len(plan.leaves)
    if left_out:
      for root, made in construct(plan).items():
        arrays[root] = {**made, **arrays.get(root, {})}
    return instantiate(plan, arrays)

  return Target(wanted, {}, build)


def _pair_target(target: tuple[Any, ...], optimizer: str) -> Target:
  if len(target) != 2:
    raise CheckpointError(
      f"a target of {len(target)} objects cannot be restored.", fix="pass a module, or (module, optimizer)."
    )
  if optimizer == "fresh":
    raise CheckpointError(
      'optimizer="fresh" needs a plan: a live optimizer is filled or left as it is.',
      fix='restore(plan, optimizer="fresh"); or restore(model) beside an optimizer that was just made.',
    )
  model, live = target
  if optimizer == "drop":
    return _live_target({"model": model}, model)
  return _live_target({"model": model, "optimizer": live}, target)


def _live_target(roots: Mapping[str, Any], result: object) -> Target:
  leaves = {item: variables(root) for item, root in roots.items()}
  values = {
    item: {_text(path): value_of(leaf) for path, leaf in found.items()} for item, found in leaves.items()
  }
  wanted = {item: trees.wanted(found, item=item) for item, found in values.items()}
  for item, found in leaves.items():
    for path, leaf in found.items():
      if is_padded(leaf):
        wanted[item][_text(path)] = Wanted(wanted[item][_text(path)].struct, tuple(leaf.shape))
  plain = {item: tuple(p for p in found if p not in wanted[item]) for item, found in values.items()}

  def build(found: Found) -> Any:
    for item, root in roots.items():
      raw: list[tuple[Any, Any]] = []
      for path, leaf in leaves[item].items():
        if _text(path) not in found.get(item, {}):
          continue
        value = found[item][_text(path)]
        if isinstance(leaf, nnx.Variable):
          leaf.set_raw_value(value)
        else:
          raw.append((path, value))
      if raw:
        nnx.update(root, nnx.from_flat_state(raw))
    return result

  return Target(wanted, plain, build)


def _tree_target(tree: object, *, as_numpy: bool, item: str) -> Target:
  leaves, rebuild = trees.flatten(tree)
  wanted = trees.wanted(leaves, item=item, as_numpy=as_numpy)
  plain = tuple(path for path in leaves if path not in wanted)

  def build(found: Found) -> Any:
    return rebuild({**leaves, **found.get(item, {})})

  return Target({item: wanted}, {item: plain}, build)


def merge(arrays: Mapping[str, Mapping[str, Array]], values: Mapping[str, Mapping[str, Json]]) -> Found:
  """Arrays and values of each item in one table."""
  items = dict.fromkeys([*arrays, *values])
  return {item: {**arrays.get(item, {}), **values.get(item, {})} for item in items}


def _text(path: Any) -> str:
  return paths.join(path)
