"""Lets the attentions of flax read several tokens of a prompt at once; unchanged, they read one."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.core.types import AnyArray, PyTree


def read_several(model: nnx.Module) -> None:
  """Changes a copy of a model, made for one trace: its attentions write all positions into their caches."""
  for _, node in nnx.iter_modules(model):
    if isinstance(node, nnx.MultiHeadAttention) and node.decode and node.cached_key is not None:
      # A transform such as nnx.scan makes the module anew, by its class.
      node.__class__ = _reading(type(node))


@functools.cache
def _reading(kind: type) -> type:
  return types.new_class(kind.__name__, (_ReadsSeveral, kind))


class _ReadsSeveral(nnx.MultiHeadAttention):
  """An attention that is called as in training, and attends to its cache."""

  def __call__(self, *args: PyTree, **options: PyTree) -> PyTree:
    attend = self.attention_fn
    self.decode, self.attention_fn = False, functools.partial(_through_cache, self, attend)
    try:
      return super().__call__(*args, **options)
    finally:
      self.decode, self.attention_fn = True, attend


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
