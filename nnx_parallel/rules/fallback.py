"""Fallbacks: the layout of parameters without names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.errors import ShardingError
from nnx_parallel.rules.logical import Candidate, candidate_of

MIN_SIZE = 2**18
"""Elements up to which `fsdp` replicates an array."""


@dataclasses.dataclass(frozen=True)
class Fallback:
  """The layout of parameters without names; made by `fsdp`, `replicate` and `require_names`."""

  mode: Literal["fsdp", "replicate", "require_names"]
  axes: Candidate = ()
  min_size: int = 0
  extend: bool = False

  def __repr__(self) -> str:
    if self.mode != "fsdp":
      return f"{self.mode}()"
    axis = self.axes[0] if len(self.axes) == 1 else self.axes
    return f"fsdp({axis!r}, min_size={self.min_size}, extend={self.extend})"


@check_arguments(ShardingError, min_size=0)
def fsdp(axis: str | Sequence[str] = "fsdp", *, min_size: int = MIN_SIZE, extend: bool = True) -> Fallback:
  """A fallback that shards the largest free dim that `axis` divides (ZeRO-3).

  It applies to every Variable without names: to parameters, and to batch statistics or caches as large as
  parameters. RNG state is replicated. An embedding table (of `nnx.Embed`) is sharded along its rows, even if
  another axis already shards them. It is sharded along its columns only if `axis` does not divide the rows,
  because a step would then send activations instead of weights. If `axis` divides no free dim, it is added to
  the axes of a dim that is already sharded. If this is not possible either, the largest part of `axis` that
  divides a dim is used, or `plan(uneven="pad")` pads a dim.

  Args:
    axis: the mesh axis, or several axes (major to minor) that shard one dim together.
    min_size: arrays with at most this many elements (not bytes) are replicated.
    extend: whether `axis` also shards a free dim of Variables that have names, so that, for example, a
      tensor-parallel kernel is sharded over both axes.

  Returns:
    A fallback for the `rules` argument of `plan` and `create_sharded_model`.

  Raises:
    ShardingError: no axis is given, or an axis is given twice.

  Source: ZeRO, arXiv:1910.02054; the threshold and the choice of dim follow the UvA deep-learning notebooks.

  Example:
    >>> import jax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> plan = nxp.plan(lambda: nnx.Linear(512, 1024, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8), nxp.fsdp())
    >>> plan["kernel"].spec
    P(None, 'fsdp')
  """
  axes = candidate_of(axis)
  if not axes:
    raise ShardingError("fsdp() needs a mesh axis.", fix='nxp.fsdp("fsdp")')
  if len(set(axes)) != len(axes):
    raise ShardingError(
      f"fsdp({axes!r}) names an axis twice.", fix=f"nxp.fsdp({tuple(dict.fromkeys(axes))!r})"
    )
  return Fallback("fsdp", axes, min_size, extend)


def replicate() -> Fallback:
  """A fallback that replicates parameters without names: the default. `Plan.audit` lists large ones.

  Returns:
    A fallback for the `rules` argument.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> plan = nxp.plan(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8), nxp.replicate())
    >>> plan["kernel"].copies, plan["kernel"].decision.reason
    (8, 'no annotation, replicate()')
  """
  return Fallback("replicate")


def require_names() -> Fallback:
  """A fallback that raises an error if parameters have no names. The error lists all of them.

  Returns:
    A fallback for the `rules` argument.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> try:
    ...   nxp.plan(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8), nxp.require_names())
    ... except nxp.errors.ShardingError as error:
    ...   print(error)
    incomplete partition spec: 2 parameters have no annotation and match no rule.
        bias
        kernel
      Fix: ...
  """
  return Fallback("require_names")
