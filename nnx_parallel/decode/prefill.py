"""Lets the attentions of flax read several tokens of a prompt at once; unchanged, they read one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.core.types import AnyArray
from nnx_parallel.layers.calls import around_calls


@contextlib.contextmanager
def read_several(model: nnx.Module) -> Generator[None]:
  """In its body, the attentions of a copy of a model write all positions into their caches."""
  found = [node for _, node in nnx.iter_modules(model) if isinstance(node, nnx.MultiHeadAttention)]
  with around_calls((node, _read_several) for node in found):
    yield


def _read_several(call: Callable[..., Any], node: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
  """An attention that is called as in training, and attends to its cache."""
  if not node.decode or node.cached_key is None:  # or a subclass calls `super().__call__`
    return call(node, *args, **options)
  attend = node.attention_fn
  node.decode, node.attention_fn = False, functools.partial(_through_cache, node, attend)
  try:
    return call(node, *args, **options)
  finally:
    node.decode, node.attention_fn = True, attend


def _through_cache(
  node: Any,
  attend: Callable[..., jax.Array],
  query: jax.Array,
  key: AnyArray,
  value: jax.Array,
  mask: jax.Array | None = None,
  **options: object,
) -> jax.Array:
  count, length = key.shape[-3], node.cached_key.shape[-3]
  index = node.cache_index[...]
  zero = jnp.zeros((), index.dtype)
  start = (*[zero] * (key.ndim - 3), index, zero, zero)
  whole = [
    jax.lax.dynamic_update_slice(cache[...], new, start)
    for cache, new in ((node.cached_key, key), (node.cached_value, value))
  ]
  node.cached_key[...], node.cached_value[...] = whole
  node.cache_index[...] = index + count
  seen = jnp.arange(length)[None] <= index + jnp.arange(count)[:, None]
  seen = jnp.broadcast_to(seen, (*key.shape[:-3], 1, count, length))
  return attend(query, *whole, mask=nnx.combine_masks(mask, seen), **options)
