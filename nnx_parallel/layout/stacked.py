"""Layers stacked by `nnx.vmap`: what their common first dim is called."""

from __future__ import annotations

from collections.abc import Iterable

from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.layout.variables import Entry, Path


def stack_labels(leaves: Iterable[LeafPlan]) -> dict[Path, str]:
  """The name of the first dim of parameters that have no names, taken from their annotated siblings.

  `nnx.scan` takes the stacked dim's name off every annotation and refuses to run where it finds another. A
  bias that the fallback split therefore needs the name that its kernel has. The layout does not depend on
  this: each Variable carries the rule that maps the name to the axes it really has.

  Args:
    leaves: the rows of a module.

  Returns:
    Path -> name, for leaves without names whose nearest annotated relatives agree on the name and the length
    of their first dim.
  """
  rows = [leaf for leaf in leaves if leaf.shape]
  first_dims: dict[Path, set[tuple[Entry, int]]] = {}
  for leaf in rows:
    if leaf.names:
      for depth in range(len(leaf.path)):
        first_dims.setdefault(leaf.path[:depth], set()).add((leaf.names[0], leaf.shape[0]))
  labels: dict[Path, str] = {}
  for leaf in rows:
    if leaf.names is None and any(leaf.spec):
      above = (first_dims.get(leaf.path[:depth]) for depth in reversed(range(len(leaf.path))))
      nearest = next((found for found in above if found), set[tuple[Entry, int]]())
      name, size = next(iter(nearest)) if len(nearest) == 1 else (None, 0)
      if isinstance(name, str) and size == leaf.shape[0]:
        labels[leaf.path] = name
  return labels
