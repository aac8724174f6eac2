"""Look-up tables, whose rows are what to split.

A table that is split by columns gives activations that are split by feature. Where the same axis splits the
batch, XLA keeps them so and communicates activations in the layers that follow; a table split by rows is
simply gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from flax import nnx

from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.variables import axes_of, entry_of, few, occurrences

ROWS = -2
"""The dim of a table's rows: `nnx.vmap` stacks tables in front of it."""


def tables(model: nnx.Module) -> frozenset[int]:
  """The look-up tables of a module: the `embedding` of every `nnx.Embed`, and of its subclasses.

  Args:
    model: a live, traced or abstract module.

  Returns:
    The `id` of each Variable, which a head that is tied to it has too.
  """
  found = (module.embedding for _, module in occurrences(model) if isinstance(module, nnx.Embed))
  return frozenset(id(table) for table in found if len(table.shape) >= -ROWS)


def check_tables(leaves: Iterable[LeafPlan], batch: Sequence[str], mesh: Mapping[str, int]) -> list[str]:
  """Finds look-up tables that are split by columns over axes which split the batch too.

  Args:
    leaves: the rows of the look-up tables.
    batch: the mesh axes that split the batch.
    mesh: mesh axis name -> size in devices.

  Returns:
    One note for all tables with the same layout.
  """
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
