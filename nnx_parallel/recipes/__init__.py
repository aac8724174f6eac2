"""Complete small jobs on real data. A user copies one to start.

A recipe is one Python file that defines `init()`, `optimizer()`, `loss(model, batch)` and
`batches(start)`, and may define `rules()`, `mesh()`, `tokens(batch)` and `microbatches()`.
"""

from __future__ import annotations

from nnx_parallel.recipes.loader import Recipe, embedded_recipes, load_recipe

__all__ = ["Recipe", "embedded_recipes", "load_recipe"]
