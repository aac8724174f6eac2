"""Which mesh axes split the batch: the only place, for inputs, activations, ZeRO and reports."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import Entry, axes_of
from nnx_parallel.core.nodes import Names
from nnx_parallel.errors import ShardingError
from nnx_parallel.layout.resolve import resolve_spec
from nnx_parallel.rules.inputs import input_names
from nnx_parallel.rules.logical import LogicalRules
from nnx_parallel.rules.ruleset import RuleSet

AXES = ("replica", "data", "dp", "fsdp")
"""Names of mesh axes that split the batch by default."""


def batch_axes(rules: RuleSet, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
  """The mesh axes that shard dim 0 of the inputs (of any rank: the most); None if nothing decides it."""
  logical = _with_conventional(rules, mesh)
  first: list[Entry] = ["batch"]
  if rules.inputs is not None:
    first = [input_names(rules.inputs, rank, tuple(mesh))[0] for rank in rules.inputs.by_rank or (1,)]
  elif "batch" not in logical:
    return None
  found = [_resolve((name,), logical, mesh, "the batch")[0] for name in first]
  return max(map(axes_of, found), key=len)


def position_axes(rules: RuleSet, mesh: Mapping[str, int]) -> tuple[str, ...]:
  """The mesh axes that split the positions of activations between layers: of the rule for `seq`, if any."""
  logical = _with_conventional(rules, mesh)
  if "seq" not in logical:
    return ()
  names: Names = ("batch" if "batch" in logical else None, "seq")
  with contextlib.suppress(ShardingError):  # the batch has its axes
    return axes_of(_resolve(names, logical, mesh, "activations")[1])
  return ()


def with_batch(rules: RuleSet, mesh: Mapping[str, int]) -> LogicalRules:
  """The logical rules of a plan, with `batch_axes` as the rule for `batch` if there is none."""
  if "batch" in rules.logical:
    return rules.logical
  axes = batch_axes(rules, mesh)
  return rules.logical if axes is None else rules.logical.replace(batch=axes)


def input_spec(rules: RuleSet, ndim: int, mesh: Mapping[str, int]) -> PartitionSpec:
  """The spec of an input; see `Plan.batch_spec`."""
  if ndim == 0:
    return PartitionSpec()
  logical = _with_conventional(rules, mesh)
  names: Names = ("batch", *[None] * (ndim - 1))
  if rules.inputs is not None:
    names = input_names(rules.inputs, ndim, tuple(mesh))
  elif "batch" not in logical:
    raise no_batch_axes(rules, mesh)
  return _resolve(names, logical, mesh, f"inputs of {ndim} dims")


def check_split(
  name: str,
  shape: tuple[int, ...],
  spec: PartitionSpec,
  sizes: dict[str, int],
  mine: tuple[int, ...],
  counts: tuple[int, ...],
) -> None:
  """Refuses an input that its shards cannot split evenly: `mine` on this process, `counts` in total."""
  if shape and not shape[0]:
    raise ShardingError(
      f"{name} has no examples.", details=f"shape {shape}", fix="leave empty batches out of the source."
    )
  if shape and shape[0] % mine[0]:
    below, above = shape[0] - shape[0] % mine[0], shape[0] + -shape[0] % mine[0]
    own = mine != counts
    raise ShardingError(
      f"{name} has {shape[0]} examples{' on this process' if own else ''}, which {mine[0]} shards cannot"
      f" split evenly (remainder {shape[0] % mine[0]}).",
      details=f"shape {shape}, batch axes {spec[0]}, mesh {sizes}",
      fix=f"{'pass each process' if own else 'use'} a {'share' if own else 'global batch'} of"
      f" {f'{below} or ' if below else ''}{above}.\n"
      'The last batch of a data set: nxp.batches(samples, plan, batch=..., last="pad") fills it.\n'
      "An array without examples, such as class weights, belongs to the model, in an nnx.Variable.",
    )
  uneven = next((dim for dim, count in enumerate(mine) if shape[dim] % count), None)
  if uneven is not None:
    raise ShardingError(
      f"{name}: dim {uneven} has length {shape[uneven]}, which {mine[uneven]} shards cannot split evenly.",
      details=f"shape {shape}, spec {spec}, mesh {sizes}",
      fix="change the length, or the InputRules for this rank.",
    )


def check_fits(name: str, array: object) -> None:
  """Refuses 64-bit integers that jax would wrap around, because it holds them in 32 bits."""
  if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or not array.size:  # pyright: ignore[reportUnknownMemberType]
    return
  held = jax.dtypes.canonicalize_dtype(array.dtype)
  if held == array.dtype or not array.dtype.isnative:
    return
  least, most = int(array.min()), int(array.max())
  if least < np.iinfo(held).min or most > np.iinfo(held).max:
    raise ShardingError(
      f"{name} has integers that {held} cannot hold.",
      details=f"{array.dtype} from {least} to {most}; jax holds it as {held} while jax_enable_x64 is off",
      fix="map them to smaller numbers first (ids modulo a table's rows, times less a start), or"
      ' jax.config.update("jax_enable_x64", True).',
    )


def no_batch_axes(rules: RuleSet, mesh: Mapping[str, int]) -> ShardingError:
  """The error for rules and a mesh that do not decide how the batch is split."""
  return ShardingError(
    "no rule says which mesh axes split the batch.",
    details=f"mesh {dict(mesh)}, rules {rules}",
    fix=f'add nxp.LogicalRules(batch="{next(iter(mesh))}"), or batch=None to replicate the batch.',
  )


def _with_conventional(rules: RuleSet, mesh: Mapping[str, int]) -> LogicalRules:
  known = {*AXES, *(rules.fallback.axes if rules.fallback else ())}
  axes = tuple(axis for axis in mesh if axis in known)
  return rules.logical.replace(batch=axes) if axes and "batch" not in rules.logical else rules.logical


def _resolve(names: Names, logical: LogicalRules, mesh: Mapping[str, int], where: str) -> PartitionSpec:
  # A size that everything divides: whether a given batch does is checked where it is placed.
  shape = (math.prod(mesh.values()),) * len(names)
  return resolve_spec(names, shape, mesh, logical, path=where).spec
