"""Input layouts other than "dim 0 over the batch axes": by rank, or over all axes of the mesh."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from nnx_parallel.core.axes import Entry
from nnx_parallel.core.checked import shorten_traceback
from nnx_parallel.core.nodes import Names
from nnx_parallel.errors import ShardingError


@shorten_traceback
class InputRules:
  """Rules for the shardings of inputs, by the rank of the array. Scalars are always replicated.

  Args:
    **maps: a tuple for each rank: `map_1d=(...)`, `map_2d=(...)` and so on. A tuple has an entry for each
      dim: a logical name, a mesh axis, a tuple of these, or None.

  Raises:
    ShardingError: the number of entries of a tuple is not its rank.

  Source: Lingvo and Praxis, `map_1d` and `map_2d` of their partitioned inputs.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> rules = nxp.InputRules(map_1d=("data",), map_2d=("data", "tensor"))
    >>> plan = nxp.plan(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nxp.make_mesh(data=4, tensor=2), rules)
    >>> plan.batch_spec(1), plan.batch_spec(2)
    (P('data',), P('data', 'tensor'))
  """

  def __init__(self, **maps: Sequence[Entry]):
    self.every_axis = False
    self.by_rank = {rank: _names(rank, maps[key]) for rank, key in sorted((_rank(key), key) for key in maps)}

  @classmethod
  def all_axes(cls) -> InputRules:
    """Shards the batch dim of each input over all mesh axes, so all devices get different examples.

    Returns:
      Rules for inputs of any rank.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> mesh, rules = nxp.make_mesh(data=4, tensor=2), nxp.InputRules.all_axes()
      >>> nxp.plan(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh, rules).batch_spec(2)
      P(('data', 'tensor'), None)
    """
    rules = cls()
    rules.every_axis = True
    return rules

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, InputRules):
      return NotImplemented
    return (self.by_rank, self.every_axis) == (other.by_rank, other.every_axis)

  def __hash__(self) -> int:
    return hash((tuple(self.by_rank.items()), self.every_axis))

  def __repr__(self) -> str:
    if self.every_axis:
      return "InputRules.all_axes()"
    return f"InputRules({', '.join(f'map_{rank}d={names!r}' for rank, names in self.by_rank.items())})"


def input_names(rules: InputRules, ndim: int, axes: tuple[str, ...]) -> Names:
  """The names for an input of at least one dim; `axes` are the mesh axes, major to minor."""
  if rules.every_axis:
    return (axes, *([None] * (ndim - 1)))
  if ndim not in rules.by_rank:
    example = ("data", *[None] * (ndim - 1))
    raise ShardingError(
      f"no input rule for an array of {ndim} dims.",
      details=f"{rules!r}",
      fix=f"add a mapping for that rank, for example map_{ndim}d={example!r}.",
    )
  return rules.by_rank[ndim]


def _rank(key: str) -> int:
  found = re.fullmatch(r"map_([1-9]\d*)d", key)
  if found is None:
    raise ShardingError(
      f"{key!r} is not the rank of an input.",
      details="scalars are always replicated",
      fix='nxp.InputRules(map_1d=("data",))',
    )
  return int(found[1])


def _names(rank: int, names: Any) -> Names:
  if names is None:  # replicated, as in path rules
    return (None,) * rank
  entries: tuple[Any, ...] = tuple(names) if isinstance(names, (tuple, list)) else ()
  entries = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)
  if len(entries) != rank or not all(entry is None or isinstance(entry, (str, tuple)) for entry in entries):
    raise ShardingError(
      f"map_{rank}d={names!r} is not one name for each of {rank} dims.",
      fix=f"map_{rank}d={('data', *[None] * (rank - 1))!r}",
    )
  return entries
