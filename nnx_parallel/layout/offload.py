"""Optimizer state in host memory, copied to the device a few parameters at a time.

A transformation that gets all of its state at once brings all of it to the device at once: with Adam, the
temporaries are then as large as the state was (measured with the TPU compiler). So the update is traced, and
its equations are sorted by the parameter whose state they use. State is fetched parameter by parameter, and
an optimization barrier makes each fetch wait until the state of an earlier group is back in host memory.
This works for any optimizer: what depends on gradients alone (a global norm) comes first, and what depends on
several parameters' state comes when the last of them is there.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.extend.core as jex
import optax

from nnx_parallel.core.extra_args import accept_extra
from nnx_parallel.core.jaxprs import bind
from nnx_parallel.core.nodes import Path, path_str, plain_path
from nnx_parallel.errors import PlanError

Space = jax.memory.Space

GROUP_BYTES = 8 * 2**20
"""Bytes per device of state that are fetched together; smaller transfers do not fill the link."""

_AHEAD = 2  # groups under way: one is fetched while another is computed or returned


def check_kind(kind: str | None) -> None:
  """Raises a `PlanError` unless compiled programs can return arrays in this memory."""
  if kind not in (None, "device", "pinned_host"):
    raise PlanError(
      f"optimizer_memory={kind!r} is not a memory that state can be fetched from.",
      fix='optimizer_memory="pinned_host", or None for the device\'s own.',
    )


def streamed(
  tx: optax.GradientTransformation, rows: Mapping[str, tuple[Path | None, int]]
) -> optax.GradientTransformationExtraArgs:
  """A transformation that also takes state in host memory: fetched, updated and put back, group by group.

  Args:
    tx: the optax transformation.
    rows: dotted path of a state array -> its parameter's path, if it has one, and its bytes per device.

  Example:
    >>> import jax, jax.numpy as jnp, optax
    >>> from nnx_parallel.layout.offload import streamed
    >>> params = {"a": jnp.ones(4), "b": jnp.ones(4)}
    >>> tx = streamed(optax.trace(0.9), {})
    >>> state = jax.device_put(tx.init(params), jax.memory.Space.Host)
    >>> updates, state = jax.jit(tx.update)(params, state)
    >>> updates["a"].sharding.memory_kind, state.trace["a"].sharding.memory_kind
    ('device', 'pinned_host')
  """
  inner = accept_extra(tx)

  def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    leaves, structure = jax.tree.flatten(state)
    if not any(map(_on_host, leaves)):
      return cast(Any, inner).update(grads, state, params, **extra)

    def run(grads: Any, leaves: list[Any], params: Any) -> tuple[Any, list[Any]]:
      state = jax.tree.unflatten(structure, leaves)
      updates, new = cast(Any, inner).update(grads, state, params, **extra)
      return updates, jax.tree.leaves(new)

    groups = _groups(state, grads, rows)
    return _run_in_groups(run, grads, leaves, params, groups, structure)

  return optax.GradientTransformationExtraArgs(tx.init, cast(Any, update))


def _on_host(leaf: Any) -> bool:
  return getattr(jax.typeof(leaf), "memory_space", None) == Space.Host


def _groups(state: Any, grads: Any, rows: Mapping[str, tuple[Path | None, int]]) -> list[int]:
  """The group of each leaf of `state` that is fetched together; 0 for leaves on the device."""
  parameters: Any = {plain_path(path): None for path, _ in jax.tree_util.tree_leaves_with_path(grads)}
  state_leaves = jax.tree_util.tree_leaves_with_path(state)
  found = [rows.get(path_str(plain_path(path)), (None, 0)) for path, _ in state_leaves]
  of_each = [of if _on_host(leaf) else () for (of, _), (_, leaf) in zip(found, state_leaves, strict=True)]
  numbers: dict[Path | None, int] = {(): 0}
  number, held = 1, 0
  size_of: collections.Counter[Path | None] = collections.Counter()
  for (_, size), of in zip(found, of_each, strict=True):
    size_of[of] += size
  for parameter in (*parameters, None):  # state of no parameter comes last, in one group
    if held and held + size_of[parameter] > GROUP_BYTES:
      number, held = number + 1, 0
    numbers[parameter] = number
    held += size_of[parameter]
  return [numbers[of] for of in of_each]


def _run_in_groups(
  run: Any, grads: Any, leaves: list[Any], params: Any, groups: list[int], structure: Any
) -> tuple[Any, Any]:
  # Traced for its equations; these transfers are never used, and so never made.
  near = [jax.device_put(leaf, Space.Device) if _on_host(leaf) else leaf for leaf in leaves]
  closed, shape = jax.make_jaxpr(run, return_shape=True)(grads, near, params)
  jaxpr = closed.jaxpr
  first = len(jax.tree.leaves(grads))
  inputs = [*jax.tree.leaves(grads), *leaves, *jax.tree.leaves(params)]
  when: dict[Any, int] = dict.fromkeys(jaxpr.constvars, 0)
  for i, var in enumerate(jaxpr.invars):
    when[var] = groups[i - first] if first <= i < first + len(leaves) else 0
  equations: list[list[Any]] = [[] for _ in range(max(groups) + 1)]
  for eqn in jaxpr.eqns:
    level = max((when[v] for v in eqn.invars if not isinstance(v, jex.Literal)), default=0)
    when |= dict.fromkeys(eqn.outvars, level)
    equations[level].append(eqn)
  values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
  values |= {v: x for v, x in zip(jaxpr.invars, inputs, strict=True) if not when[v]}
  updates, state = jax.tree.unflatten(jax.tree.structure(shape), jaxpr.outvars)
  returned: list[list[jax.Array]] = []
  result: dict[int, Any] = {}
  for level, members in enumerate(equations):
    mine = [i for i, group in enumerate(groups) if level and group == level]
    fetched = _fetch([leaves[i] for i in mine], returned[-_AHEAD] if len(returned) >= _AHEAD else [])
    values |= {jaxpr.invars[first + i]: x for i, x in zip(mine, fetched, strict=True)}
    for eqn in members:
      _evaluate(eqn, values)
    done = [i for i, v in enumerate(state) if i not in result and _known(v, values)]
    for i in done:
      value = _read(state[i], values)
      result[i] = jax.device_put(value, Space.Host) if groups[i] else value
    if level:
      returned.append([result[i] for i in done if groups[i]])
  new = jax.tree.unflatten(structure, [result[i] for i in range(len(state))])
  return jax.tree.map(lambda v: _read(v, values), updates), new


def _fetch(leaves: list[Any], after: list[jax.Array]) -> list[jax.Array]:
  """Host arrays on the device, not before `after` exists."""
  if after and leaves:
    leaves, _ = jax.lax.optimization_barrier((leaves, after))
  return [jax.device_put(leaf, Space.Device) for leaf in leaves]


def _evaluate(eqn: Any, values: dict[Any, Any]) -> None:
  values |= zip(eqn.outvars, bind(eqn, [_read(v, values) for v in eqn.invars]), strict=True)


def _known(var: Any, values: dict[Any, Any]) -> bool:
  return isinstance(var, jex.Literal) or var in values


def _read(var: Any, values: dict[Any, Any]) -> Any:
  return var.val if isinstance(var, jex.Literal) else values[var]
