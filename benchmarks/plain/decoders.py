"""Decoders: a Llama, one with local and global attention in turn, a mixture of experts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes; those of a test."""

  vocab: int = 64
  width: int = 32
  heads: int = 4
  kv_heads: int = 2
  head_dim: int = 8
  hidden: int = 64
  depth: int = 4
  windows: tuple[int | None, ...] = (None,)
  experts: int = 0
  dtype: str = "float32"


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
  """Rotary positions on `[batch, seq, heads, dim]`."""
  frequencies = 10000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
  angles = positions[..., None, None] * frequencies
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
  """Grouped-query attention by einsum."""

  def __init__(self, c: Config, window: int | None, rngs: nnx.Rngs):
    self.c, self.window = c, window
    self.q = nnx.Linear(c.width, c.heads * c.head_dim, use_bias=False, dtype=c.dtype, rngs=rngs)
    self.k = nnx.Linear(c.width, c.kv_heads * c.head_dim, use_bias=False, dtype=c.dtype, rngs=rngs)
    self.v = nnx.Linear(c.width, c.kv_heads * c.head_dim, use_bias=False, dtype=c.dtype, rngs=rngs)
    self.o = nnx.Linear(c.heads * c.head_dim, c.width, use_bias=False, dtype=c.dtype, rngs=rngs)

  def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
    c, (batch, seq, _) = self.c, x.shape
    q = rope(self.q(x).reshape(batch, seq, c.heads, c.head_dim), positions)
    k = rope(self.k(x).reshape(batch, seq, c.kv_heads, c.head_dim), positions)
    v = self.v(x).reshape(batch, seq, c.kv_heads, c.head_dim)
    k, v = (jnp.repeat(y, c.heads // c.kv_heads, axis=2) for y in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / c.head_dim**0.5
    if self.window is not None:
      mask = mask & (jnp.arange(seq)[:, None] - jnp.arange(seq)[None] < self.window)[None, None]
    scores = jnp.where(mask, scores.astype(jnp.float32), -1e9)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    return self.o(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, seq, -1))


class MLP(nnx.Module):
  """SwiGLU."""

  def __init__(self, c: Config, rngs: nnx.Rngs):
    self.gate = nnx.Linear(c.width, c.hidden, use_bias=False, dtype=c.dtype, rngs=rngs)
    self.up = nnx.Linear(c.width, c.hidden, use_bias=False, dtype=c.dtype, rngs=rngs)
    self.down = nnx.Linear(c.hidden, c.width, use_bias=False, dtype=c.dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Experts(nnx.Module):
  """Every expert on every token, weighted by a softmax over the best two."""

  def __init__(self, c: Config, rngs: nnx.Rngs):
    self.router = nnx.Linear(c.width, c.experts, use_bias=False, rngs=rngs)
    init = nnx.initializers.lecun_normal(batch_axis=0)
    self.up = nnx.Param(init(rngs.params(), (c.experts, c.width, c.hidden)))
    self.down = nnx.Param(init(rngs.params(), (c.experts, c.hidden, c.width)))

  def __call__(self, x: jax.Array) -> jax.Array:
    logits = self.router(x.astype(jnp.float32))
    best, which = jax.lax.top_k(logits, 2)
    chosen = jax.nn.one_hot(which, logits.shape[-1]) * jax.nn.softmax(best)[..., None]
    hidden = nnx.gelu(jnp.einsum("bsd,edf->bsef", x, self.up[...].astype(x.dtype)))
    each = jnp.einsum("bsef,efd->bsed", hidden, self.down[...].astype(x.dtype))
    return jnp.einsum("bsed,bse->bsd", each, chosen.sum(-2).astype(x.dtype))


class Block(nnx.Module):
  """Attention and a feed-forward part, each behind a norm."""

  def __init__(self, c: Config, index: int, rngs: nnx.Rngs):
    self.index = index
    self.norm1 = nnx.RMSNorm(c.width, dtype=c.dtype, rngs=rngs)
    self.attention = Attention(c, c.windows[index % len(c.windows)], rngs)
    self.norm2 = nnx.RMSNorm(c.width, dtype=c.dtype, rngs=rngs)
    self.mlp = Experts(c, rngs) if c.experts and index % 2 else MLP(c, rngs)

  def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
    x = x + self.attention(self.norm1(x), positions, mask)
    return x + self.mlp(self.norm2(x))


class Decoder(nnx.Module):
  """Token ids `[batch, seq]` -> float32 logits."""

  def __init__(self, c: Config, rngs: nnx.Rngs):
    self.embed = nnx.Embed(c.vocab, c.width, dtype=c.dtype, rngs=rngs)
    self.layers = nnx.List([Block(c, index, rngs) for index in range(c.depth)])
    self.norm = nnx.RMSNorm(c.width, dtype=c.dtype, rngs=rngs)
    self.head = nnx.Linear(c.width, c.vocab, use_bias=False, dtype=c.dtype, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    seq = tokens.shape[1]
    positions = jnp.arange(seq, dtype=jnp.float32)[None]
    mask = jnp.tril(jnp.ones((seq, seq), bool))[None, None]
    x = self.embed(tokens)
    for layer in self.layers:
      x = layer(x, positions, mask)
    return self.head(self.norm(x)).astype(jnp.float32)


def loss(model: Decoder, tokens: jax.Array) -> jax.Array:
  """Cross-entropy of the next token."""
  logits = model(tokens[:, :-1])
  logp = jax.nn.log_softmax(logits)
  return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()
