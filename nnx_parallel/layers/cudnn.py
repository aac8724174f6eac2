"""The fused attention kernel of NVIDIA GPUs (cuDNN), through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from nnx_parallel.layers.softmaxes import NotFused


def cudnn_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  scale: float,
  causal: bool = False,
  window: int | None = None,
  segments: jax.Array | None = None,
  mask: jax.Array | None = None,
  cap: float | None = None,
  implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
  """The kernel of GPUs, a `Kernel`. It does not compute what `causal` and `window` hide.

  It reads a mask as a bias. With the implementation `"xla"`, JAX computes the same on any platform.

  Raises:
    NotFused: cuDNN is not here, or does not support these dtypes, shapes or options.
  """
  if cap is not None:
    raise NotFused("cuDNN has no soft cap")
  if segments is not None:
    raise NotFused("for segments, cuDNN needs a mask of queries x keys for each example")
  if window is not None and not causal:
    raise NotFused("cuDNN has no window that is not causal")
  batch, heads, group, rows, features = query.shape
  queries = query.reshape(batch, heads * group, rows, features)
  arrays = [x.swapaxes(1, 2) for x in (queries, key, value)]
  attend = functools.partial(
    jax.nn.dot_product_attention,
    mask=None if mask is None else mask[None, None],
    scale=scale,
    is_causal=causal,
    local_window_size=None if window is None else (window - 1, 0),
    implementation=implementation,
  )
  try:  # the rule of its gradients has requirements of its own
    jax.eval_shape(jax.grad(lambda *xs: attend(*xs).astype(jnp.float32).sum(), (0, 1, 2)), *arrays)
  except (RuntimeError, TypeError, ValueError) as problem:
    raise NotFused(f"cuDNN: {problem}") from problem
  return attend(*arrays).swapaxes(1, 2).reshape(*query.shape[:-1], value.shape[-1])
