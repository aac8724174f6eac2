"""The decoder of `decoders.py` written for scanning: stacked layers, one `jax.lax.scan`, remat by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.plain import decoders

POLICIES: dict[str, Any] = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}


class Decoder(decoders.Decoder):
  """Token ids `[batch, seq]` -> float32 logits."""

  def __init__(self, c: decoders.Config, rngs: nnx.Rngs, remat: str = "full"):
    super().__init__(dataclasses.replace(c, depth=0), rngs)
    self.c, self.remat = c, remat
    self.layers = nnx.vmap(lambda rngs: decoders.Block(c, 0, rngs))(rngs.fork(split=c.depth))

  def __call__(self, tokens: jax.Array) -> jax.Array:
    seq = tokens.shape[1]
    positions = jnp.arange(seq, dtype=jnp.float32)[None]
    mask = jnp.tril(jnp.ones((seq, seq), bool))[None, None]
    graphdef, stacked = nnx.split(self.layers)
    # Cast as a whole: else each layer's gradient would be kept in float32.
    stacked = jax.tree.map(lambda w: w.astype(self.c.dtype), stacked)

    def body(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
      return nnx.merge(graphdef, state)(x, positions, mask), None

    if self.remat != "none":
      body = jax.checkpoint(body, policy=POLICIES[self.remat], prevent_cse=False)
    x, _ = jax.lax.scan(body, self.embed(tokens), stacked)
    return self.head(self.norm(x)).astype(jnp.float32)
