"""Reads the arguments of `save` and `restore` into tables of leaves."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from flax import nnx

from nnx_parallel.checkpoint import encoding
from nnx_parallel.checkpoint.catalog import one_of
from nnx_parallel.checkpoint.diff import Found, Patterns, Target, TargetLeaf
from nnx_parallel.checkpoint.manifest import LeafRecord, Manifest
from nnx_parallel.core import nodes
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.nodes import Path, path_str, plain_path, value_of
from nnx_parallel.core.padding import is_padded
from nnx_parallel.core.types import AnyArray, Leaf, Model, PyTree
from nnx_parallel.create.constructor import construct
from nnx_parallel.create.instantiate import instantiate
from nnx_parallel.errors import CheckpointError
from nnx_parallel.layout.leaf import Root
from nnx_parallel.layout.plan import Plan, check_plan

OPTIMIZER = ("restore", "drop", "fresh")
Leaves = dict[str, Any]
Rebuild = Callable[[Mapping[str, Any]], Any]

Only: TypeAlias = "Iterable[str] | nnx.filterlib.Filter"
"""Patterns of paths, or a filter of nnx for the leaves of the model."""


class Remap(Protocol):
  """Makes leaves of a target from other saved leaves, such as a `WeightMap`."""

  def through(self, target: Target) -> Target:
    """A target of the saved leaves, whose `build` makes the leaves of the given target."""
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
  """Reads a target. The manifest tells a tree of two from a pair; `choose` is a filter of nnx."""
  if plans := _plans_in(target, optimizer, as_numpy):
    if item != "model":
      raise CheckpointError(
        f"cannot restore {item!r} into a plan: that is for the model and its optimizer.",
        fix="pass a module, or a tree of jax.ShapeDtypeStruct with shardings.",
      )
    found = _plan_target(plans[0], optimizer) if target is plans[0] else _plans_target(target, optimizer)
    root: Any = jax.tree.map(lambda plan: plan.abstract_model, target)
  else:
    roots: dict[str, Model] = {item: target}
    if item == "model" and _is_pair(target, record):
      pair: Any = target
      roots = {"model": pair[0], "optimizer": pair[1]}
    if optimizer == "drop" and item != "optimizer":
      roots.pop("optimizer", None)
    found, root = _tree_target(roots, as_numpy=as_numpy), roots[item]
  found = dataclasses.replace(found, drops_optimizer=optimizer != "restore" or item != "model")
  if choose is None:
    return found
  leaves = flatten(root)[0]
  chosen = _choose(root, leaves, choose)
  kept = {path: leaf for path, leaf in found.leaves[item].items() if path in chosen}
  values = tuple(path for path in found.values.get(item, ()) if path in chosen)
  return dataclasses.replace(
    found,
    leaves={**found.leaves, item: kept},
    values={**found.values, item: values},
    left_out={item: frozenset(leaves.keys() - chosen.keys())},
  )


def _plans_in(target: object, optimizer: str, as_numpy: bool) -> list[Plan[Any]]:
  """The plans of a target, which is checked."""
  one_of("optimizer", optimizer, OPTIMIZER)
  leaves = jax.tree.leaves(target, is_leaf=_is_node)
  plans = [leaf for leaf in leaves if isinstance(leaf, Plan)]
  what = fix = ""
  for plan in plans:
    check_plan(plan, "restore(plan)")
  if plans and len(plans) < len(leaves):
    what = f"cannot restore into a plan beside other targets: {len(plans)} of {len(leaves)} are plans."
    fix = 'plans alone: restore({"a": plan1, "b": plan2}); or live models: restore((models, optimizers)).'
  elif callable(target) and not has_nodes(target):
    name = getattr(target, "__name__", type(target).__name__)
    what = f"cannot restore into {name}: it has neither leaves nor a layout for them."
    fix = "restore(nxp.plan(init, mesh, rules)); restore(nxp.unsharded(init)), on one device;\n"
    fix += "restore(as_numpy=True), for numpy arrays."
  elif optimizer == "fresh" and all(plan.tx is None for plan in plans):
    what = 'optimizer="fresh" needs a plan with an optimizer: only a plan can make one.'
    fix = 'restore(plan, optimizer="fresh"); or optimizer="drop", with an optimizer that was just made.'
  elif as_numpy and (plans or has_nodes(target)):
    what = f"as_numpy=True cannot be honoured: a {type(target).__name__} is restored as jax arrays."
    fix = "restore(as_numpy=True) without a target; or pass a tree of jax.ShapeDtypeStruct."
  if what:
    raise CheckpointError(what, fix=fix)
  return plans


def split_only(only: Only | None) -> tuple[tuple[str, ...] | str | None, Any]:
  """Splits `only` into patterns and a filter of nnx; one of the two is None."""
  if only is None or isinstance(only, str):
    return only, None
  if not isinstance(only, Iterable):
    return None, only
  several: tuple[Any, ...] = tuple(only)
  return (several, None) if all(isinstance(name, str) for name in several) else (None, several)


def saved_roots(model: object, optimizer: object, only: Only | None = None) -> dict[str, Leaves]:
  """The leaves that `save` writes, by item: the optimizer's, and the model's that `only` selects."""
  leaves = flatten(model)[0]
  if not leaves:
    raise CheckpointError(
      f"there is nothing to save: {model!r:.60} has no leaves.", fix="save(100, model, optimizer)."
    )
  patterns, choose = split_only(only)
  if choose is not None:
    leaves = _choose(model, leaves, choose)
  if patterns is not None:
    names = Patterns(patterns, ())
    leaves = {name: leaf for name, leaf in leaves.items() if not names.leaves_out(name)}
    if unused := names.unused():
      raise CheckpointError(f"only= names no leaf of the model: {unused}.", fix="use a leaf's path.")
  return {"model": leaves} if optimizer is None else {"model": leaves, "optimizer": flatten(optimizer)[0]}


def as_saved(record: Manifest, item: str | None = None) -> Target:
  """A target of numpy arrays (and keys on the first CPU) for everything in a step, or in one item of it."""
  items = {name: saved for name, saved in record.items.items() if item in (None, name)}

  def build(found: Found) -> PyTree:
    made = {name: found.get(name, {}) for name in items}
    return made if item is None else made[item]

  leaves = {
    name: {path: _as_saved(path, leaf) for path, leaf in s.leaves.items()} for name, s in items.items()
  }
  return Target(leaves, {name: tuple(s.values) for name, s in items.items()}, build, drops_optimizer=True)


def _as_saved(path: str, leaf: LeafRecord) -> TargetLeaf:
  if not leaf.dtype.startswith("key<"):
    return TargetLeaf(jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype)), leaf.shape)
  if (key := nodes.named_key_dtype(leaf.dtype)) is None:
    raise CheckpointError(
      f"cannot restore {path} without a target: its keys are of the unknown kind {leaf.dtype}.",
      fix=f"skip=[{path!r}], or pass a target that has them.",
    )
  try:
    device = jax.local_devices(backend="cpu")[0]
  except RuntimeError:  # JAX_PLATFORMS names other platforms only
    device = jax.local_devices()[0]
  struct = jax.ShapeDtypeStruct(leaf.shape, key, sharding=jax.sharding.SingleDeviceSharding(device))
  return TargetLeaf(struct, leaf.shape)


def _plan_target(plan: Plan, optimizer: str) -> Target:
  if isinstance(plan.mesh, jax.sharding.AbstractMesh):
    raise CheckpointError(
      "cannot restore into a plan on an abstract mesh: it has no devices.",
      details=f"mesh {axis_sizes(plan.mesh)}",
      fix="plan on real devices: nxp.plan(init, nxp.make_mesh(...), rules).",
    )
  if optimizer == "drop":
    plan = plan.without_optimizer()
  is_whole = plan.tx is not None and optimizer == "restore"
  roots: tuple[Root, ...] = ("model", "optimizer") if is_whole else ("model",)
  wanted = {
    root: {path_str(path): TargetLeaf(leaf.struct, leaf.shape) for path, leaf in plan.of(root).items()}
    for root in roots
  }

  def build(found: Found) -> PyTree:
    arrays: dict[Root, dict[Any, Any]] = {}
    for leaf in plan.leaves:
      text = path_str(leaf.path)
      if text in found.get(leaf.root, {}):
        arrays.setdefault(leaf.root, {})[leaf.path] = found[leaf.root][text]
    if sum(map(len, arrays.values())) < len(plan.leaves):
      for root, made in construct(plan).items():
        arrays[root] = {**made, **arrays.get(root, {})}
    return instantiate(plan, arrays)

  return Target(wanted, {}, build)


def _plans_target(tree: PyTree, optimizer: str) -> Target:
  """The target of a tuple or dict of plans: the models, or (models, optimizers)."""
  rows, structure = jax.tree_util.tree_flatten_with_path(tree)
  parts = [(path_str(plain_path(keys)), _plan_target(plan, optimizer)) for keys, plan in rows]
  wanted: dict[str, dict[str, TargetLeaf]] = {}
  for name, part in parts:
    for root, leaves in part.leaves.items():
      wanted.setdefault(root, {}).update({_below(name, text): leaf for text, leaf in leaves.items()})

  def build(found: Found) -> PyTree:
    def of(name: str, part: Target) -> PyTree:
      return {
        root: {text: found[root][full] for text in leaves if (full := _below(name, text)) in found[root]}
        for root, leaves in part.leaves.items()
        if root in found
      }

    made = [part.build(of(name, part)) for name, part in parts]
    pairs = [one if isinstance(one, tuple) else (one, None) for one in made]
    models, optimizers = (structure.unflatten(side) for side in zip(*pairs, strict=True))
    if isinstance(optimizers, dict):  # a model that is not trained has no optimizer
      optimizers = {name: one for name, one in optimizers.items() if one is not None}
    return models if all(one is None for _, one in pairs) else (models, optimizers)

  return Target(wanted, {}, build)


def _below(name: str, text: str) -> str:
  return f"{name}.{text}" if text else name


def _is_pair(target: object, record: Manifest | None) -> bool:
  """Whether a target is (model, optimizer) and not a tuple of two models."""
  if type(target) is not tuple or len(target) != 2:  # pyright: ignore[reportUnknownArgumentType]
    return False
  model, second = target  # pyright: ignore[reportUnknownVariableType]
  if has_nodes(second):
    return has_nodes(second, nnx.Optimizer) and not has_nodes(model, nnx.Optimizer)
  if record is None or "optimizer" not in record.items:
    return False
  saved = record.items["model"]
  return not flatten(target)[0].keys() <= {*saved.leaves, *saved.values}


def _tree_target(roots: Mapping[str, PyTree], *, as_numpy: bool) -> Target:
  tables = {item: flatten(root) for item, root in roots.items()}
  wanted = {item: _abstract(leaves, item, as_numpy) for item, (leaves, _) in tables.items()}
  plain = {item: tuple(path for path in tables[item][0] if path not in wanted[item]) for item in roots}

  def build(found: Found) -> PyTree:
    made = [rebuild(found.get(item, {})) for item, (_, rebuild) in tables.items()]
    return made[0] if len(made) == 1 else tuple(made)

  return Target(wanted, plain, build)


def _choose(tree: PyTree, leaves: Leaves, choose: Any) -> Leaves:
  """The leaves of a tree that a filter of nnx chooses."""
  predicate: Callable[[Path, Leaf], bool] = nnx.filterlib.to_predicate(choose)  # pyright: ignore[reportAssignmentType]
  nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_node)
  paths = [(*plain_path(keys), *path) for keys, node in nodes for path in _leaves_of(node)]
  by_name = {path_str(path): path for path in paths}
  chosen = {name: leaf for name, leaf in leaves.items() if predicate(by_name[name], leaf)}
  if not chosen:
    kinds = sorted({type(leaf).__name__ for leaf in leaves.values()})
    details = f"its leaves are of the types {', '.join(kinds)}"
    fix = "pass a filter of nnx that does, such as only=nnx.Param, or patterns of paths: only=['head']."
    raise CheckpointError(f"only={choose!r} chooses no leaf of the model.", details=details, fix=fix)
  return chosen


def flatten(tree: object) -> tuple[Leaves, Rebuild]:
  """The leaves of a tree by path, each Variable once, and a function that puts values in their place."""
  # It takes new values of some or all leaves, fills Variables in place, and copies the containers of others.
  try:
    rows, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_node)
  except ValueError as error:
    fix = "keys of one type in each dict, all texts for example."
    raise CheckpointError(f"a checkpoint cannot hold this tree: {error}", fix=fix) from error
  leaves: Leaves = {}
  tables: list[tuple[Any, dict[str, tuple[Any, Any]]]] = []
  seen: set[int] = set()
  for keys, node in rows:
    table: dict[str, tuple[Any, Any]] = {}
    for path, leaf in _leaves_of(node).items():
      if isinstance(leaf, nnx.Variable):
        if id(leaf) in seen:  # pyright: ignore[reportUnknownArgumentType]
          continue
        seen.add(id(leaf))  # pyright: ignore[reportUnknownArgumentType]
      name = path_str((*plain_path(keys), *path))
      if name in leaves or re.search("[\ud800-\udfff]", name):
        what = "there are two of them" if name in leaves else "that is not Unicode text"
        raise CheckpointError(
          f"a checkpoint cannot hold the leaf {name!r}: {what}.", fix="use another name for it."
        )
      leaves[name], table[name] = leaf, (path, leaf)
    tables.append((node, table))

  def rebuild(values: Mapping[str, AnyArray]) -> PyTree:
    return jax.tree_util.tree_unflatten(structure, [_fill(node, table, values) for node, table in tables])

  return leaves, rebuild


def has_nodes(tree: object, kind: type | tuple[type, ...] = (nnx.Pytree, nnx.State, nnx.Variable)) -> bool:
  """Whether a tree has, or is, an nnx object of this kind."""
  return any(isinstance(node, kind) for node in jax.tree.leaves(tree, is_leaf=_is_node))


def _is_node(value: object) -> bool:
  return isinstance(value, (nnx.Pytree, nnx.State, nnx.Variable))


def _leaves_of(node: Any) -> Mapping[Any, Any]:
  if isinstance(node, nnx.State):
    return dict(nnx.to_flat_state(node))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
  return nodes.variables(node) if isinstance(node, nnx.Pytree) else {(): node}


def _fill(node: Any, table: Mapping[str, tuple[Any, Any]], values: Mapping[str, AnyArray]) -> PyTree:
  raw: dict[Any, Any] = {}
  for name in table.keys() & values.keys():
    path, leaf = table[name]
    if isinstance(leaf, nnx.Variable):
      leaf.set_raw_value(values[name])  # pyright: ignore[reportUnknownMemberType]
    else:
      raw[path] = values[name]
  if not raw:
    return node
  if isinstance(node, nnx.State):
    return nnx.from_flat_state([*{**_leaves_of(node), **raw}.items()])
  if isinstance(node, nnx.Pytree):
    nodes.set_arrays(node, raw)
    return node
  return raw[()]


def _abstract(leaves: Mapping[str, Leaf], item: str, as_numpy: bool) -> dict[str, TargetLeaf]:
  """The shape, dtype and sharding of each leaf that is an array; other leaves are left out."""
  found: dict[str, TargetLeaf] = {}
  for path, one in leaves.items():
    leaf = value_of(one)
    if not encoding.is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
      continue
    is_host = as_numpy or isinstance(leaf, (np.ndarray, np.generic))
    sharding = None if is_host else leaf.sharding  # pyright: ignore[reportAttributeAccessIssue]
    if sharding is None and not is_host:
      raise CheckpointError(
        f"cannot restore {item}/{path}: the target has no sharding for it.",
        details=f"target: {leaf}",
        fix="pass a plan, a live model, or jax.ShapeDtypeStruct(shape, dtype, sharding=...); "
        "restore(..., as_numpy=True) gives numpy arrays.",
      )
    # Arrays are restored in the byte order of this machine, as they are saved.
    dtype = leaf.dtype.newbyteorder("=") if isinstance(leaf.dtype, np.dtype) else leaf.dtype
    struct = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)
    found[path] = TargetLeaf(struct, tuple(one.shape if is_padded(one) else leaf.shape))
  return found
