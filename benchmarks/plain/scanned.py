"""The decoder of `decoders.py` written for scanning: stacked layers, one `jax.lax.scan`, remat by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.plain.decoders import Block, Config

POLICIES: dict[str, Any] = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}


class Decoder(nnx.Module):
  """Token ids `[batch, seq]` -> float32 logits."""

  def __init__(self, c: Config, rngs: nnx.Rngs, remat: str = "full"):
    self.c, self.remat = c, remat
    self.embed = nnx.Embed(c.vocab, c.width, dtype=c.dtype, rngs=rngs)
    self.layers = nnx.vmap(lambda rngs: Block(c, 0, rngs))(rngs.fork(split=c.depth))
    self.norm = nnx.RMSNorm(c.width, dtype=c.dtype, rngs=rngs)
    self.head = nnx.Linear(c.width, c.vocab, use_bias=False, dtype=c.dtype, rngs=rngs)

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
