"""Optimizer state in host memory, copied to the device a few parameters at a time.

A transformation that gets all of its state at once brings all of it to the device at once: with Adam, the
temporaries are then as large as the state (measured with the TPU compiler). So the update is traced, and its
equations are sorted by the parameter whose state they use. State is fetched parameter by parameter, and an
optimization barrier makes each fetch wait until the state of an earlier group is back in host memory. This
works for any optimizer: equations that depend only on gradients (a global norm) come first, and an equation
that depends on the state of several parameters comes after the last of them. An example, momentum of a and b:

    a.m = 0.9 * a.m + a.g; b.m = 0.9 * b.m + b.g
->
    fetch a.m; a.m = 0.9 * a.m + a.g; return a.m; fetch b.m; b.m = 0.9 * b.m + b.g; return b.m
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import optax

from nnx_parallel.core.extra_args import accept_extra
from nnx_parallel.core.interpret import Facts, facts_of, read, run_operations, values_of
from nnx_parallel.core.nodes import Path, path_str, plain_path
from nnx_parallel.core.types import JaxprEqn, Leaf, PyTree, TreeDef

Space = jax.memory.Space

GROUP_BYTES = 8 * 2**20
"""Bytes per device of state that are fetched at a time; smaller transfers do not fill the link."""

_AHEAD = 2  # groups in flight: one is fetched while another is computed or returned


def stream(
  tx: optax.GradientTransformation, rows: Mapping[str, tuple[Path | None, int]]
) -> optax.GradientTransformationExtraArgs:
  """Makes a transformation also take state in host memory: fetched, updated and put back by groups."""
  # `rows`: dotted path of a state array -> its parameter's path, if it has one, and its bytes per device.
  inner = accept_extra(tx)

  def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
    leaves, structure = jax.tree.flatten(state)
    if not any(map(_on_host, leaves)):
      return cast(Any, inner).update(grads, state, params, **extra)

    def run(grads: PyTree, leaves: list[jax.Array], params: PyTree) -> tuple[PyTree, list[jax.Array]]:
      state = jax.tree.unflatten(structure, leaves)
      updates, new = cast(Any, inner).update(grads, state, params, **extra)
      return updates, jax.tree.leaves(new)

    groups = _groups(state, grads, rows)
    return _run_in_groups(run, grads, leaves, params, groups, structure)

  return optax.GradientTransformationExtraArgs(tx.init, cast(Any, update))


def _on_host(leaf: Leaf) -> bool:
  return getattr(jax.typeof(leaf), "memory_space", None) == Space.Host


def _groups(state: PyTree, grads: PyTree, rows: Mapping[str, tuple[Path | None, int]]) -> list[int]:
  """The number of the fetch group of each leaf of `state`; 0 for leaves on the device."""
  parameters: Any = {plain_path(path): None for path, _ in jax.tree_util.tree_leaves_with_path(grads)}
  state_leaves = jax.tree_util.tree_leaves_with_path(state)
  found = [rows.get(path_str(plain_path(path)), (None, 0)) for path, _ in state_leaves]
  of_each = [of if _on_host(leaf) else () for (of, _), (_, leaf) in zip(found, state_leaves, strict=True)]
  numbers: dict[Path | None, int] = {(): 0}
  number, held = 1, 0
  size_of: collections.Counter[Path | None] = collections.Counter()
  for (_, size), of in zip(found, of_each, strict=True):
    size_of[of] += size
  for parameter in (*parameters, None):  # state without a parameter comes last, in one group
    if held and held + size_of[parameter] > GROUP_BYTES:
      number, held = number + 1, 0
    numbers[parameter] = number
    held += size_of[parameter]
  return [numbers[of] for of in of_each]


def _run_in_groups(
  run: Callable[[PyTree, list[jax.Array], PyTree], tuple[PyTree, list[jax.Array]]],
  grads: PyTree,
  leaves: list[jax.Array],
  params: PyTree,
  groups: list[int],
  structure: TreeDef,
) -> tuple[PyTree, PyTree]:
  # Traced for its equations; these transfers are never used, and so never made.
  near = [jax.device_put(leaf, Space.Device) if _on_host(leaf) else leaf for leaf in leaves]
  closed, shape = jax.make_jaxpr(run, return_shape=True)(grads, near, params)
  before, after = (len(jax.tree.leaves(x)) for x in (grads, params))
  of_inputs = [*[0] * before, *groups, *[0] * after]
  values = values_of(closed, [*jax.tree.leaves(grads), *leaves, *jax.tree.leaves(params)])
  levels = facts_of(closed, of_inputs, _LEVELS)
  operations: list[list[JaxprEqn]] = [[] for _ in range(max(groups) + 1)]
  for eqn in closed.jaxpr.eqns:
    operations[max((read(var, levels, _LEVELS.constant) for var in eqn.invars), default=0)].append(eqn)
  updates, state = jax.tree.unflatten(jax.tree.structure(shape), closed.jaxpr.outvars)
  held = closed.jaxpr.invars[before : before + len(leaves)]
  returned: list[list[jax.Array]] = []
  result: dict[int, jax.Array] = {}
  for level, members in enumerate(operations):
    mine = [var for var, group in zip(held, groups, strict=True) if level and group == level]
    earlier = returned[-_AHEAD] if len(returned) >= _AHEAD else []
    values |= zip(mine, _fetch([values[var] for var in mine], earlier), strict=True)
    run_operations(members, values)
    done = [
      i for i, var in enumerate(state) if i not in result and read(var, levels, _LEVELS.constant) <= level
    ]
    for i in done:
      value = read(state[i], values)
      result[i] = jax.device_put(value, Space.Host) if groups[i] else value
    if level:
      returned.append([result[i] for i in done if groups[i]])
  new = jax.tree.unflatten(structure, [result[i] for i in range(len(state))])
  return jax.tree.map(lambda var: read(var, values), updates), new


def _fetch(leaves: list[jax.Array], after: list[jax.Array]) -> list[jax.Array]:
  """Host arrays on the device, not before `after` exists."""
  if after and leaves:
    leaves, _ = jax.lax.optimization_barrier((leaves, after))
  return [jax.device_put(leaf, Space.Device) for leaf in leaves]


_LEVELS: Facts[int] = Facts(
  constant=lambda _: 0, follow=lambda eqn, some: [max(some, default=0)] * len(eqn.outvars), join=max
)
"""The group of state that a value needs, the last of them."""
