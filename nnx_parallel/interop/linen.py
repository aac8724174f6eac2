"""Weights of Flax Linen: trees of variables, msgpack files, and the names they have there.

A Linen module becomes an nnx module by `flax.nnx.bridge.ToNNX` and is then planned, made and trained like any
other module. Its leaves have Linen's names, below the collection: `params.Dense_0.kernel`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx, serialization, traverse_util
from flax.core import meta

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.nodes import path_str, value_of, variables
from nnx_parallel.core.text import with_article
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.weights import Rule, WeightMap, import_arrays, leaves_to_write
from nnx_parallel.layout.plan import Plan, check_plan

OTHERS = ("opt_state.*", "step", "tx.*")
"""Fields of a train state other than the variables of the model."""


@check_arguments(CheckpointError)
def linen_names(model: object) -> WeightMap:
  """Returns the names of a model's leaves in Linen: the collection of their type, then their path.

  Args:
    model: a module, abstract or not; or a plan.

  Returns:
    A weight map for `import_linen`, `export_linen`, `restore_orbax` and `Checkpointer.restore`.

  Raises:
    CheckpointError: it is neither a module nor a plan.

  Example:
    >>> names = linen_names(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    >>> sorted(rule.file for rule in names.rules)
    ['batch_stats.mean', 'batch_stats.var', 'params.bias', 'params.scale']
  """
  model = model.abstract_model if isinstance(model, Plan) else model
  if not isinstance(model, nnx.Pytree | nnx.State):
    raise CheckpointError(
      f"linen_names needs a module, and got {with_article(type(model).__name__)}.",
      fix="nxp.interop.linen_names(model), or nxp.interop.linen_names(plan).",
    )
  rules = [
    Rule(f"{nnx.variable_name_from_type(type(leaf), allow_register=True)}.{name}", name)
    for path, leaf in variables(model).items()
    for name in [path_str(path)]
    if not isinstance(leaf, nnx.RngState)
  ]
  return WeightMap(*rules, ignore=OTHERS)


@check_arguments(CheckpointError)
def import_linen(
  source: str | os.PathLike[str] | bytes | Mapping[str, Any],
  plan: Plan,
  weight_map: WeightMap | None = None,
  *,
  skip: Iterable[str] = (),
) -> Any:
  """Makes a model from variables of Linen; each array goes straight into its shards.

  Random-number state (`nnx.RngState`) is initialised. Checkpoints that were written with Orbax are read by
  `restore_orbax(..., weight_map=linen_names(plan))`.

  Args:
    source: a msgpack file (written with `flax.serialization.to_bytes` or `msgpack_serialize`), the bytes of
      such a file, or a tree of variables by collection. `nn.Partitioned` and `nn.LogicallyPartitioned` boxes
      are removed.
    plan: the plan of the model; if it has an optimizer, a new optimizer is created.
    weight_map: a `WeightMap` that says which arrays become which leaves, with rules such as
      `Rule("params.Dense_{i}.kernel", "layers.{i}.kernel")`. The default is `linen_names(plan)`, which fits a
      module made by `nnx.bridge.ToNNX`.
    skip: patterns of the paths of leaves that the source does not have; these leaves are initialised.

  Returns:
    The module, or (module, optimizer).

  Raises:
    CheckpointError: the file is not a msgpack file of a tree, the weight map is incomplete, or the shape or
      dtype of an array does not fit; the message names the array.

  Example:
    >>> import flax.linen as nn, jax.numpy as jnp
    >>> from flax.nnx import bridge
    >>> import nnx_parallel as nxp
    >>> net, x = nn.Dense(8), jnp.ones((1, 4))
    >>> init = lambda: bridge.lazy_init(bridge.ToNNX(net, rngs=nnx.Rngs(0)), x)
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0))
    >>> model = import_linen(net.init(jax.random.key(1), x), plan)
    >>> model.kernel.sharding.spec
    P(None, 'fsdp')
  """
  check_plan(plan, "nxp.interop.import_linen(source, plan)")
  name = "these variables" if isinstance(source, (bytes, Mapping)) else source
  return import_arrays(name, lambda: _read(source), plan, weight_map or linen_names(plan), skip)


@check_arguments(CheckpointError)
def export_linen(
  model: object, weight_map: WeightMap | None = None, *, skip: Iterable[str] = ()
) -> dict[str, Any]:
  """Returns the variables that the corresponding Linen model has, by collection.

  You can pass them to `module.apply`, `flax.serialization.to_bytes` and Orbax.

  Args:
    model: a module.
    weight_map: as for `import_linen`; it is applied in reverse.
    skip: patterns of the paths of leaves to leave out.

  Returns:
    A tree of global arrays without boxes. Each array has the sharding of its leaf, or a similar sharding if
    its dims differ.

  Raises:
    CheckpointError: the weight map is incomplete.

  Example:
    >>> export_linen(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))["params"]["kernel"].shape
    (4, 2)
  """
  names = weight_map or linen_names(model)
  leaves = leaves_to_write(model, skip)
  shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
  flat: dict[tuple[str, ...], Any] = {}
  for found in names.to_write(leaves):
    group, _ = found.numbered(shapes)
    layers = [group.layers[layer] for layer in sorted(group.layers)]
    arrays = [value_of(leaves[path]) for path in layers]
    made = group.make_arrays(arrays, shapes[layers[0]], arrays[0].sharding)
    flat |= {tuple(name.split(".")): array for name, array in zip(group.names, made, strict=True)}
  return traverse_util.unflatten_dict(flat)


def _read(source: str | os.PathLike[str] | bytes | Mapping[str, Any]) -> dict[str, np.ndarray]:
  """The arrays of a tree by their names."""
  tree: PyTree = source
  if not isinstance(source, Mapping):
    try:
      tree = serialization.msgpack_restore(source if isinstance(source, bytes) else Path(source).read_bytes())
    except (OSError, ValueError) as error:
      raise CheckpointError(
        f"cannot read {'these bytes' if isinstance(source, bytes) else source} as msgpack: {error}.",
        fix="a file of flax.serialization.to_bytes(variables);"
        " nxp.interop.restore_orbax(...) for a folder of Orbax.",
      ) from error
  if not isinstance(tree, Mapping):
    raise CheckpointError(
      f"expected variables of Linen, but got a {type(tree).__name__}.",
      fix='a tree by collection: {"params": {...}, "batch_stats": {...}}.',
    )
  rows = jax.tree_util.tree_leaves_with_path(meta.unbox(dict(tree)))
  return {_name(path): np.asarray(leaf) for path, leaf in rows}


def _name(path: Any) -> str:
  """A name as `linen_names` has it; msgpack keeps the array of a box under `value`."""
  keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
  return ".".join(keys[:-1] if keys[-1] == "value" and len(keys) > 2 else keys)
