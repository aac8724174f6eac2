"""Building an annotated module without any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from flax import nnx

M = TypeVar("M", bound=nnx.Module)


def unsharded(init: Callable[[], M]) -> M:
  """Builds a module on the default device, whatever its annotations say, and keeps them.

  flax refuses to build an annotated module without a mesh. This is for notebooks, exports and tests on one
  device; the annotations stay on the Variables, so the same constructor can be planned on a mesh later.

  Args:
    init: builds the module; may name mesh axes or logical names that exist nowhere.

  Returns:
    The live module, with whole arrays.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> from nnx_parallel.create.unsharded import unsharded
    >>> names = {"out_sharding": ("embed", "mlp")}
    >>> model = unsharded(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0), kernel_metadata=names))
    >>> model.kernel.out_sharding
    ('embed', 'mlp')
  """
  with nnx.use_eager_sharding(False):
    return init()
