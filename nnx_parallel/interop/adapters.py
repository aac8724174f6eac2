"""Low-rank adapters (LoRA, arXiv:2106.09685), merged into the weights that they adapt."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.core.nodes import Path, path_str, value_of, variables
from nnx_parallel.core.shards import pinned
from nnx_parallel.core.text import few
from nnx_parallel.errors import CheckpointError


def merge_adapters(base: nnx.Module, adapted: nnx.Module, *, scale: float = 1.0) -> list[str]:
  """Adds the adapters of one model to the weights of another, in place and in their layout.

  Args:
    base: a live module without adapters, on the mesh of `adapted`: it supplies float weights even if the
      weights of `adapted` are quantized.
    adapted: a live module with adapters, of `nnx.LoRALinear` or of Qwix: `kernel_lora_a` `(inputs, rank)` and
      `kernel_lora_b` `(rank, outputs)` next to `kernel`, whose first dims are the inputs.
    scale: the factor of their product; Qwix computes with `alpha / rank`.

  Returns:
    Paths of the weights that were changed.

  Raises:
    CheckpointError: there is no adapter, the base has no such weight, or it has another size.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from nnx_parallel.interop.adapters import merge_adapters
    >>> base = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    >>> adapted = nnx.LoRALinear(4, 2, lora_rank=1, rngs=nnx.Rngs(0))
    >>> adapted.lora.lora_b[...] = jnp.ones((1, 2))
    >>> merge_adapters(base, adapted)
    ['kernel']
    >>> bool(jnp.allclose(base(jnp.ones((1, 4))), adapted(jnp.ones((1, 4))), rtol=1e-5))
    True
  """
  weights, found = variables(base), variables(adapted)
  pairs = {_weight(path): (path, (*path[:-1], _second(path))) for path in found if _is_first(path)}
  if not pairs:
    raise CheckpointError(
      f"{type(adapted).__name__} has no adapter.",
      fix="merge_adapters(base, adapted): the model with adapters comes second.",
    )
  wrong = [
    path_str(path)
    for path, (a, b) in pairs.items()
    if path not in weights or math.prod(weights[path].shape) != found[a].shape[0] * found[b].shape[-1]
  ]
  if wrong:
    raise CheckpointError(
      f"the base has no {few(wrong)}, or not of the size of its adapter.",
      fix="give the base model of the adapters, made without adapters.",
    )
  for path, (a, b) in pairs.items():
    leaf = weights[path]
    leaf.set_value(_merged(value_of(leaf), value_of(found[a]), value_of(found[b]), scale))
  return [path_str(path) for path in pairs]


def _merged(weight: Any, a: Any, b: Any, scale: float) -> Any:
  where = weight.sharding if isinstance(weight.sharding, jax.NamedSharding) else None
  whole = None if where is None else jax.NamedSharding(where.mesh, jax.P())

  def add(weight: Any, a: Any, b: Any) -> Any:
    a, b = (pinned(x, whole).astype(jnp.float32) for x in (a, b))
    delta = pinned((scale * (a @ b)).reshape(weight.shape), where)
    return pinned((weight.astype(jnp.float32) + delta).astype(weight.dtype), where)

  # Not donated: a base may share its arrays with the model that was trained.
  return jax.jit(add)(weight, a, b)


def _is_first(path: Path) -> bool:
  return str(path[-1]).endswith("lora_a")


def _second(path: Path) -> str:
  return str(path[-1]).removesuffix("a") + "b"


def _weight(path: Path) -> Path:
  """The weight that a first factor adapts."""
  if path[-1] == "lora_a":
    return (*path[:-2], "kernel")
  return (*path[:-1], str(path[-1]).removesuffix("_lora_a"))
