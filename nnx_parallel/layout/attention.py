"""A trap of `nnx.MultiHeadAttention`: its output projection takes over the query's annotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from nnx_parallel.errors import ShardingError
from nnx_parallel.layout.variables import Names, annotation, axes_of, occurrences, path_str


def check_attention(model: nnx.Module, mesh: Mapping[str, int]) -> list[str]:
  """Finds output projections that carry the query's names, which name the wrong dims.

  The query's kernel is (embed, heads, head size) and the output's (heads, head size, embed); flax passes
  `kernel_metadata` (and `bias_metadata`) on to the output unless it has its own.

  Args:
    model: a live or abstract module.
    mesh: mesh axis name -> size in devices.

  Returns:
    One note for each projection whose names are all mesh axes: valid, if not what was meant.

  Raises:
    ShardingError: logical names that were passed on.
  """
  notes: list[str] = []
  for path, module in occurrences(model):
    if not isinstance(module, nnx.MultiHeadAttention):
      continue
    for part in ("kernel", "bias"):
      names = _passed_on(module, part)
      if names is None:
        continue
      where = path_str((*path, "out", part))
      if all(name in mesh for name in _flat(names)):
        notes.append(f"{where} has the query's annotation {names}; give it its own with out_{part}_metadata")
      else:
        shape = getattr(module.out, part).shape
        own = ("heads", None, "embed") if part == "kernel" else ("embed",)
        raise ShardingError(
          f"{where} has the query's names, which are not those of its dims.",
          details=f"names {names}, shape {shape}: flax passes {part}_metadata on to it",
          fix=f'MultiHeadAttention(..., out_{part}_metadata={{"out_sharding": {own!r}}})',
        )
  return notes


def _passed_on(module: nnx.MultiHeadAttention, part: str) -> Names | None:
  query, out = getattr(module.query, part), getattr(module.out, part)
  if query is None or out is None:
    return None
  names, wanted = _names(query), _names(out)
  # Names that read the same backwards can be right for both projections.
  if names is None or names != wanted or names == names[::-1]:
    return None
  return names


def _names(variable: Any) -> Names | None:
  # The names of the query are of another rank than the output's bias: they are compared as they are written.
  written = annotation(variable)
  names = written[1] if written is not None else None
  return tuple(names) if isinstance(names, (tuple, list, PartitionSpec)) else None


def _flat(names: Names) -> list[str]:
  return [name for entry in names if entry for name in axes_of(entry)]
