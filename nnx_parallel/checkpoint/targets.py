"""What users pass to `save` and `restore`, as tables of leaves."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from flax import nnx

from nnx_parallel.checkpoint import paths, trees
from nnx_parallel.checkpoint.digest import host_device
from nnx_parallel.checkpoint.encoding import EMPTY, Array, Json
from nnx_parallel.checkpoint.manifest import ItemRecord, LeafRecord, Manifest
from nnx_parallel.checkpoint.preflight import Patterns, Wanted
from nnx_parallel.checkpoint.save import Tree
from nnx_parallel.create.constructor import construct
from nnx_parallel.create.instantiate import instantiate
from nnx_parallel.errors import CheckpointError
from nnx_parallel.layout.leaf import Root
from nnx_parallel.layout.mesh import axis_sizes
from nnx_parallel.layout.padding import is_padded
from nnx_parallel.layout.plan import ShardingPlan
from nnx_parallel.layout.variables import kind_of, value_of

OPTIMIZER = ("restore", "drop", "fresh")
_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")
Found = dict[str, dict[str, Any]]


Only: TypeAlias = "Iterable[str] | nnx.filterlib.Filter"
"""Patterns of paths, or a filter of nnx for the leaves of the model."""


@dataclasses.dataclass(frozen=True)
class Target:
  """What a restore fills.

  Attributes:
    wanted: the arrays to read, by item and path.
    values: the paths of leaves that are JSON values, by item.
    build: makes the result from the arrays and values that were read; leaves that were left out by name
      are what the target has, or what `init` makes.
    left_out: paths of the target that a filter does not choose, by item.
    drops_optimizer: whether a saved optimizer is left alone on purpose.
  """

  wanted: Mapping[str, Mapping[str, Wanted]]
  values: Mapping[str, tuple[str, ...]]
  build: Callable[[Found], Any]
  left_out: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict[str, Any])
  drops_optimizer: bool = False


class Remap(Protocol):
  """How saved leaves make up other ones: a `WeightMap`."""

  def through(self, target: Target) -> Target:
    """A target in the checkpoint's terms, whose `build` fills the given one."""
    ...


def read(
  target: object,
  *,
  optimizer: str,
  as_numpy: bool = False,
  item: str = "model",
  record: Manifest | None = None,
  choose: Any = None,
) -> Target:
  """Reads a target.

  Args:
    target: a plan; a module, `nnx.State`, or tree of these and of abstract or concrete arrays; or a pair
      of such a target and its optimizer.
    optimizer: `restore`, `drop` or `fresh`.
    as_numpy: whether a pytree's leaves become numpy arrays.
    item: the item that the target stands for.
    record: of the step; tells a tree of two from a pair.
    choose: a filter of nnx for the leaves of the model; None takes them all.

  Raises:
    CheckpointError: an unknown `optimizer`, options that the target cannot honour, a leaf without a
      sharding, or a filter that chooses nothing.
  """
  if optimizer not in OPTIMIZER:
    raise CheckpointError(f"optimizer={optimizer!r} is unknown.", fix='pass "restore", "drop" or "fresh".')
  if callable(target) and not isinstance(target, nnx.Module):
    raise CheckpointError(
      f"cannot restore into {getattr(target, '__name__', type(target).__name__)}: it has neither leaves nor a"
      " layout for them.",
      fix="restore(nxp.plan(init, mesh, rules)); restore(init()), on one device; restore(), for the arrays.",
    )
  is_plan = isinstance(target, ShardingPlan)
  if optimizer == "fresh" and not (is_plan and target.tx is not None):
    raise CheckpointError(
      'optimizer="fresh" needs a plan with an optimizer: only a plan can make one.',
      fix='restore(plan, optimizer="fresh"); or optimizer="drop", beside an optimizer that was just made.',
    )
  if as_numpy and (is_plan or trees.has_nodes(target)):
    raise CheckpointError(
      f"as_numpy=True cannot be honoured: a {type(target).__name__} is restored as jax arrays.",
      fix="restore(as_numpy=True) without a target; or pass a tree of jax.ShapeDtypeStruct.",
    )
  if is_plan:
    if item != "model":
      raise CheckpointError(
        f"cannot restore {item!r} into a plan: that is for the model and its optimizer.",
        fix="pass a module, or a tree of jax.ShapeDtypeStruct with shardings.",
      )
    found = _plan_target(target, optimizer)
    table = trees.flatten(target.abstract_model)[0] if choose is not None else {}
  else:
    roots: dict[str, Any] = {item: target}
    if item == "model" and _is_pair(target, record):
      pair: Any = target
      roots = {"model": pair[0], "optimizer": pair[1]}
    if optimizer == "drop":
      roots.pop("optimizer", None)
    found = _tree_target(roots, as_numpy=as_numpy)
    table = trees.flatten(roots[item])[0] if choose is not None else {}
  found = dataclasses.replace(found, drops_optimizer=optimizer != "restore" or item != "model")
  return found if choose is None else _only(found, item, table, choose)


def split_only(only: Only | None) -> tuple[tuple[str, ...] | str | None, Any]:
  """The patterns of `only`, and its filter of nnx; one of them is None."""
  if only is None or isinstance(only, str):
    return only, None
  if not isinstance(only, Iterable):
    return None, only
  several: tuple[Any, ...] = tuple(only)
  return (several, None) if all(isinstance(name, str) for name in several) else (None, several)


def saved_roots(model: object, optimizer: object, only: Only | None = None) -> dict[str, Tree]:
  """The items that `save` writes for a model, or the leaves of it that `only` names, and its optimizer."""
  leaves = trees.flatten(model)[0]
  if not leaves:
    raise CheckpointError(
      f"there is nothing to save: {model!r:.60} has no leaves.", fix="save(100, model, optimizer)."
    )
  patterns, choose = split_only(only)
  if choose is not None:
    leaves = _chosen(leaves, choose)
  if patterns is not None:
    names = Patterns(patterns, ())
    leaves = {name: leaf for name, leaf in leaves.items() if not names.leaves_out(name)}
    if unused := names.unused():
      raise CheckpointError(f"only= names no leaf of the model: {unused}.", fix="use a leaf's path.")
  roots = {"model": tree_to_save(leaves)}
  if optimizer is not None:
    roots["optimizer"] = tree_to_save(trees.flatten(optimizer)[0])
  return roots


def tree_to_save(leaves: Mapping[str, Any]) -> Tree:
  """An item of these leaves, with what is known of the Variables among them."""
  return Tree(
    {path: value_of(leaf) for path, leaf in leaves.items()},
    {path: tuple(leaf.shape) for path, leaf in leaves.items() if is_padded(leaf)},
    {path: kind_of(leaf) for path, leaf in leaves.items() if isinstance(leaf, nnx.Variable)},
  )


def plan_json(plan: object) -> Json:
  """What the manifest keeps of a plan: all that `ShardingPlan.from_json` reads."""
  if plan is None:
    return None
  if not isinstance(plan, ShardingPlan):
    raise CheckpointError(f"plan={plan!r} is not a ShardingPlan.", fix="pass what nxp.plan(...) returned.")
  return json.loads(plan.to_json())


def as_saved(record: ItemRecord) -> dict[str, Wanted]:
  """A target of numpy arrays (and keys on the first CPU) for everything in an item."""
  return {path: _as_saved(path, leaf) for path, leaf in record.leaves.items()}


def _as_saved(path: str, leaf: LeafRecord) -> Wanted:
  if leaf.encoding.startswith("key:") or leaf.dtype.startswith("key<"):
    kinds = _KEYS if leaf.encoding == EMPTY else (leaf.encoding.removeprefix("key:"),)
    keys = [jax.eval_shape(functools.partial(jax.random.key, 0, impl=kind)) for kind in kinds]
    key = next((key for key in keys if str(key.dtype) == leaf.dtype), None)
    if key is None:
      raise CheckpointError(
        f"cannot restore {path} without a target: its keys are of the unknown kind {leaf.dtype}.",
        fix=f"skip=[{path!r}], or pass a target that has them.",
      )
    host = jax.sharding.SingleDeviceSharding(host_device())
    return Wanted(jax.ShapeDtypeStruct(leaf.shape, key.dtype, sharding=host), leaf.shape)
  return Wanted(jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype)), leaf.shape)


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


def _is_pair(target: object, record: Manifest | None) -> bool:
  """Whether a target is (model, optimizer), and not a model that is a tuple of two."""
  if type(target) is not tuple or len(target) != 2:  # pyright: ignore[reportUnknownArgumentType]
    return False
  model, second = target  # pyright: ignore[reportUnknownVariableType]
  if trees.has_nodes(second):
    return trees.has_nodes(second, nnx.Optimizer) and not trees.has_nodes(model, nnx.Optimizer)
  if record is None or "optimizer" not in record.items:
    return False
  saved = record.items["model"]
  return not trees.flatten(target)[0].keys() <= {*saved.leaves, *saved.values}


def _tree_target(roots: Mapping[str, Any], *, as_numpy: bool) -> Target:
  tables = {item: trees.flatten(root) for item, root in roots.items()}
  wanted = {item: trees.wanted(leaves, item=item, as_numpy=as_numpy) for item, (leaves, _) in tables.items()}
  plain = {item: tuple(path for path in tables[item][0] if path not in wanted[item]) for item in roots}

  def build(found: Found) -> Any:
    made = [rebuild(found.get(item, {})) for item, (_, rebuild) in tables.items()]
    return made[0] if len(made) == 1 else tuple(made)

  return Target(wanted, plain, build)


def _only(target: Target, item: str, leaves: Mapping[str, Any], choose: Any) -> Target:
  chosen = _chosen(leaves, choose)
  return dataclasses.replace(
    target,
    wanted={**target.wanted, item: {p: one for p, one in target.wanted[item].items() if p in chosen}},
    values={
      name: tuple(p for p in all_ if name != item or p in chosen) for name, all_ in target.values.items()
    },
    left_out={item: frozenset(leaves.keys() - chosen.keys())},
  )


def _chosen(leaves: Mapping[str, Any], choose: Any) -> dict[str, Any]:
  predicate = nnx.filterlib.to_predicate(choose)
  chosen = {path: leaf for path, leaf in leaves.items() if predicate(paths.split(path), leaf)}  # pyright: ignore[reportArgumentType]
  if not chosen:
    kinds = sorted({type(leaf).__name__ for leaf in leaves.values()})
    raise CheckpointError(
      f"only={choose!r} chooses no leaf of the model.",
      details=f"its leaves are of the types {', '.join(kinds)}",
      fix="pass a filter of nnx that does, such as only=nnx.Param, or patterns of paths: only=['head'].",
    )
  return chosen


def merge(arrays: Mapping[str, Mapping[str, Array]], values: Mapping[str, Mapping[str, Json]]) -> Found:
  """Arrays and values of each item in one table."""
  items = dict.fromkeys([*arrays, *values])
  return {item: {**arrays.get(item, {}), **values.get(item, {})} for item in items}


def _text(path: Any) -> str:
  return paths.join(path)
