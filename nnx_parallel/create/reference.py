"""The reference constructor: what every faster way of creating is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from nnx_parallel.create.build import build
from nnx_parallel.layout.plan import ShardingPlan


def construct_whole(
  the_plan: ShardingPlan, shardings: Sequence[NamedSharding], mesh: Mesh
) -> list[jax.Array]:
  """Runs the constructor under `nnx.jit`, with its state constrained to the layout.

  Args:
    the_plan: the plan.
    shardings: one for each leaf of the plan, on `mesh`.
    mesh: real devices, Auto axes.

  Returns:
    One array (global storage shape) for each leaf.

  Source: the flax guide "Scale up on multiple devices".
  """

  @nnx.jit
  def constructor() -> Any:
    return jax.lax.with_sharding_constraint(build(the_plan), list(shardings))

  with jax.set_mesh(mesh):
    return constructor()
