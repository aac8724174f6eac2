"""Common to schemes over the tokens of a batch: their arrays, and the mesh axes that split them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import SchemeError
from nnx_parallel.layout.batch import batch_axes, position_axes
from nnx_parallel.rules.logical import LogicalRules
from nnx_parallel.rules.ruleset import RuleSet


def array_of(x: PyTree) -> jax.Array:
  """The array of a Variable as the model sees it, without padding that it is stored with."""
  return jnp.asarray(x.get_value() if isinstance(x, nnx.Variable) else x)


def token_axes(
  rules: LogicalRules, sizes: Mapping[str, int], free: Collection[str], rank: int
) -> list[tuple[str, ...]]:
  """The mesh axes among `free` of each dim of the tokens: the batch axes, then the axes of positions."""
  known = RuleSet(logical=rules)
  batch = batch_axes(known, sizes) or ()
  positions = tuple(name for name in position_axes(known, sizes) if name not in batch)
  dims = (batch, positions, *[()] * rank)[:rank]
  return [tuple(name for name in names if name in free) for names in dims]


def check_not_mapped(what: str, axes: Sequence[str], taken: Collection[str]) -> None:
  """Raises a `SchemeError` for axes that are manual, or mapped by an enclosing `jax.vmap`."""
  if inside := [name for name in axes if name in taken]:
    raise SchemeError(
      f"{what} cannot be split over {inside[0]!r}: this code is mapped over that axis already.",
      details=f"axes of the enclosing shard_map or vmap: {', '.join(sorted(taken))}",
      fix="call it outside of the shard_map, with global arrays.",
    )
