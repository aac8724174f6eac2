"""Placing batches: host arrays in, global arrays in the plan's batch layout out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from nnx_parallel.errors import ShardingError
from nnx_parallel.layout.mesh import axis_sizes
from nnx_parallel.layout.plan import ShardingPlan
from nnx_parallel.layout.resolve import shard_counts


def shard_batch(batch: Any, plan: ShardingPlan) -> Any:
  """Places one batch: dim 0 of each array split by the `batch` rule, the other dims whole.

  Args:
    batch: a pytree of host or device arrays (global shapes, batch on dim 0); scalars are replicated.
    plan: gives the mesh and the `batch` rule.

  Returns:
    The same pytree of global `jax.Array`s.

  Raises:
    ShardingError: a batch that the mesh axes cannot split evenly; the message has the next size that works.

  Example:
    >>> import numpy as np, nnx_parallel as nxp
    >>> from flax import nnx
    >>> plan = nxp.plan(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8))
    >>> nxp.shard_batch({"x": np.zeros((16, 4))}, plan)["x"].sharding.spec
    P('data', None)
  """
  if isinstance(plan.mesh, AbstractMesh):
    raise ShardingError(
      "a batch cannot be placed on an abstract mesh.",
      fix="plan on real devices with make_mesh(...).",
    )
  sizes = axis_sizes(plan.mesh)

  def place(path: Any, array: Any) -> jax.Array:
    shape = tuple(array.shape) if hasattr(array, "shape") else ()
    spec = plan.batch_spec(len(shape))
    counts = shard_counts(spec, len(shape), sizes)
    shards = counts[0] if counts else 1
    if shape and shape[0] % shards:
      below, above = shape[0] - shape[0] % shards, shape[0] + -shape[0] % shards
      raise ShardingError(
        f"batch{jax.tree_util.keystr(path)} has {shape[0]} examples, which {shards} shards cannot split"
        f" evenly (remainder {shape[0] % shards}).",
        details=f"shape {shape}, batch axes {spec[0]}, mesh {sizes}",
        fix=f"use a global batch of {f'{below} or ' if below else ''}{above}.",
      )
    uneven = next((dim for dim, count in enumerate(counts) if shape[dim] % count), None)
    if uneven is not None:
      raise ShardingError(
        f"batch{jax.tree_util.keystr(path)}: dim {uneven} has length {shape[uneven]}, which {counts[uneven]}"
        " shards cannot split evenly.",
        details=f"shape {shape}, spec {spec}, mesh {sizes}",
        fix="change the length, or the InputRules for this rank.",
      )
    return jax.device_put(array, NamedSharding(plan.mesh, spec))

  return jax.tree_util.tree_map_with_path(place, batch)


def batches(source: Iterable[Any], plan: ShardingPlan, *, prefetch: int = 2) -> Iterator[Any]:
  """Places each batch of `source`, a few ahead of the step that uses it.

  Args:
    source: host batches, as for `shard_batch`.
    plan: gives the mesh and the `batch` rule.
    prefetch: how many batches are on the devices before they are asked for.

  Yields:
    Placed batches, in order.

  Raises:
    ShardingError: a batch that the rules cannot place; as `shard_batch`.

  Example:
    >>> import numpy as np
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> mesh, rules = nxp.make_mesh(data=8), nxp.presets.data_parallel()
    >>> plan = nxp.plan(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)), mesh, rules)
    >>> host = [np.full((16, 4), number, np.float32) for number in range(3)]
    >>> [(batch.sharding.spec, float(batch.sum())) for batch in nxp.batches(host, plan)]
    [(P('data', None), 0.0), (P('data', None), 64.0), (P('data', None), 128.0)]
  """
  queue: deque[Any] = deque()
  for batch in source:
    queue.append(shard_batch(batch, plan))
    if len(queue) > prefetch:
      yield queue.popleft()
  yield from queue
