"""Warnings of a plan: attention split inside a head, depthwise kernels, look-up tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import axes_in, axes_of, entry_of
from nnx_parallel.core.nodes import Names, annotation, iter_nodes, path_str
from nnx_parallel.core.text import few
from nnx_parallel.errors import ShardingError
from nnx_parallel.layout.known_faults import convolutions
from nnx_parallel.layout.leaf import LeafPlan


def check_attention(model: nnx.Module, mesh: Mapping[str, int]) -> list[str]:
  """Finds output projections with the names of the query's dims.

  The query's kernel is (embed, heads, head size) and the output's (heads, head size, embed); flax passes
  `kernel_metadata` (and `bias_metadata`) on to the output unless the output has its own. Logical names are an
  error; mesh axes are valid, if not what was meant, and give a note.
  """
  notes: list[str] = []
  for path, module in iter_nodes(model):
    if not isinstance(module, nnx.MultiHeadAttention):
      continue
    for part in ("kernel", "bias"):
      names = _passed_on(module, part)
      if names is None:
        continue
      where = path_str((*path, "out", part))
      if all(name in mesh for name in axes_in(names)):
        notes.append(f"{where} has the query's annotation {names}; set its own with out_{part}_metadata")
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
  if not isinstance(query, nnx.Variable) or not isinstance(out, nnx.Variable):
    return None  # no bias; or weights of another package, such as quantized ones
  names, wanted = _names(query), _names(out)
  # Names that read the same backwards can be right for both projections.
  if names is None or names != wanted or names == names[::-1]:
    return None
  return names


def _names(variable: Any) -> Names | None:
  # As written: the query's names have another rank than the output's bias.
  written = annotation(variable)
  names = written[1] if written is not None else None
  return tuple(names) if isinstance(names, (tuple, list, PartitionSpec)) else None


def check_depthwise(
  model: nnx.Module, leaves: Iterable[LeafPlan], batch: Sequence[str], mesh: Mapping[str, int]
) -> list[str]:
  """Finds kernels of depthwise convolutions that are split by channels over axes which split the batch too.

  XLA does not gather such a kernel, small as it is. It moves the activations, if necessary by replicating
  them (an "involuntary full rematerialization").
  """
  rows = {leaf.path: leaf for leaf in leaves}
  grouped = [path for path, groups in convolutions(model) if groups > 1]
  kernels = [rows[found] for path in grouped if (found := (*path, "kernel")) in rows]
  split = {
    leaf.name: [axis for axis in axes_of(leaf.spec[-1]) if axis in batch and mesh[axis] > 1]
    for leaf in kernels
    if leaf.shape[-2] == 1
  }
  names = [name for name, axes in split.items() if axes]
  if not names:
    return []
  axes = dict.fromkeys(axis for found in split.values() for axis in found)
  return [
    f"{few(names)}: depthwise kernels split by channels over {', '.join(axes)}, as the batch, so a step sends"
    " activations instead of weights; keep them whole: a path rule of None, or a larger min_size"
  ]


ROWS = -2
"""The dim of a table's rows: `nnx.vmap` stacks tables in front of it."""


def tables(model: nnx.Module) -> frozenset[int]:
  """The `id` of each look-up table: the `embedding` of every `nnx.Embed`, also where a head is tied to it."""
  found = (module.embedding for _, module in iter_nodes(model) if isinstance(module, nnx.Embed))
  return frozenset(id(table) for table in found if len(table.shape) >= -ROWS)


def check_tables(leaves: Iterable[LeafPlan], batch: Sequence[str], mesh: Mapping[str, int]) -> list[str]:
  """Finds look-up tables that are split by columns over axes which split the batch too."""
  found: dict[str, list[str]] = {}
  for leaf in leaves:
    *front, rows, columns = map(axes_of, leaf.spec)
    both = tuple(axis for axis in columns if axis in batch and mesh[axis] > 1)
    if both:
      rest = tuple(axis for axis in columns if axis not in both)
      names = tuple(map(entry_of, (*front, rows + both, rest)))
      shards = math.prod(mesh[axis] for axis in rows + both)
      pad = ', and pad them (uneven="pad")' if leaf.shape[ROWS] % shards else ""
      note = (
        f"split by columns over {', '.join(both)}, as the batch, so a step sends activations instead of"
        f" weights; split the rows{pad}: names {names}"
      )
      found.setdefault(note, []).append(leaf.name)
  return [
    f"{few(names)}: look-up {'tables' if names[1:] else 'table'} {note}" for note, names in found.items()
  ]
