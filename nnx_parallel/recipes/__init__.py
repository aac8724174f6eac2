"""Complete small jobs on real data. Copy a recipe to start.

A recipe is one Python file that defines `init()`, `optimizer()`, `loss(model, batch)` and
`batches(start)`, and may define `rules()`, `mesh()`, `tokens(batch)` and `microbatches()`.
"""

from etils import epy

with epy.lazy_api_imports(globals()):
  from nnx_parallel.loop.loader import load_recipe
  from nnx_parallel.loop.recipe import Resumed, plan_recipe, restore, start

__all__ = ["Resumed", "load_recipe", "plan_recipe", "restore", "start"]
