"""An encoder, a vision transformer, convolutional nets (in stages, with statistics), an encoder-decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class EncoderLayer(nnx.Module):
  """Post-norm, as in BERT, with dropout."""

  def __init__(self, width: int, heads: int, rngs: nnx.Rngs, dropout: float = 0.1):
    self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
    self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
    self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
    self.dropout = nnx.Dropout(dropout, rngs=rngs)

  def __call__(
    self, x: jax.Array, mask: jax.Array | None = None, *, deterministic: bool = False
  ) -> jax.Array:
    x = self.norm1(x + self.dropout(self.attention(x, mask=mask), deterministic=deterministic))
    return self.norm2(x + self.dropout(self.down(nnx.gelu(self.up(x))), deterministic=deterministic))


class Bert(nnx.Module):
  """Token ids `[batch, seq]`, 0 for padding -> one logit for each token."""

  def __init__(self, rngs: nnx.Rngs, vocab: int = 64, width: int = 32, heads: int = 4, depth: int = 3):
    self.tokens, self.positions = nnx.Embed(vocab, width, rngs=rngs), nnx.Embed(16, width, rngs=rngs)
    self.norm = nnx.LayerNorm(width, rngs=rngs)
    self.layer = nnx.List([EncoderLayer(width, heads, rngs) for _ in range(depth)])
    self.head = nnx.Linear(width, vocab, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.norm(self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])))
    mask = (tokens != 0)[:, None, None, :]
    for layer in self.layer:
      x = layer(x, mask)
    return self.head(x)


class ViT(nnx.Module):
  """Images `[batch, 8, 8, 3]` -> logits; its blocks are attributes with numbers."""

  def __init__(self, rngs: nnx.Rngs, width: int = 32, heads: int = 4, depth: int = 4):
    self.patch = nnx.Conv(3, width, (2, 2), strides=(2, 2), rngs=rngs)
    self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 16, width)))
    self.depth = depth
    for n in range(depth):
      setattr(self, f"block_{n}", EncoderLayer(width, heads, rngs, dropout=0.0))
    self.head = nnx.Linear(width, 10, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    x = self.patch(images)
    x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.position[...]
    for n in range(self.depth):
      x = getattr(self, f"block_{n}")(x)
    return self.head(x.mean(1))


class ConvBlock(nnx.Module):
  """A depthwise convolution and an inverted bottleneck."""

  def __init__(self, width: int, rngs: nnx.Rngs):
    self.depthwise = nnx.Conv(width, width, (3, 3), feature_group_count=width, rngs=rngs)
    self.norm = nnx.LayerNorm(width, rngs=rngs)
    self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return x + self.down(nnx.gelu(self.up(self.norm(self.depthwise(x)))))


class ConvNet(nnx.Module):
  """Images `[batch, 8, 8, 3]` -> logits; stages of different widths."""

  def __init__(self, rngs: nnx.Rngs, widths: tuple[int, ...] = (8, 16), depths: tuple[int, ...] = (2, 3)):
    self.stem = nnx.Conv(3, widths[0], (2, 2), strides=(2, 2), rngs=rngs)
    self.stages, self.down = nnx.List([]), nnx.List([])
    for width, depth, before in zip(widths, depths, (widths[0], *widths), strict=False):
      self.down.append(nnx.Conv(before, width, (1, 1), rngs=rngs))
      self.stages.append(nnx.Sequential(*[ConvBlock(width, rngs) for _ in range(depth)]))
    self.head = nnx.Linear(widths[-1], 10, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    x = self.stem(images)
    for down, stage in zip(self.down, self.stages, strict=True):
      x = stage(down(x))
    return self.head(x.mean((1, 2)))


class CrossLayer(nnx.Module):
  """Self-attention, attention to what was encoded, and a feed-forward part."""

  def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
    self.own = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
    self.cross = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
    self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(3)])
    self.mlp = nnx.Sequential(nnx.Linear(width, 64, rngs=rngs), nnx.relu, nnx.Linear(64, width, rngs=rngs))

  def __call__(self, x: jax.Array, encoded: jax.Array, mask: jax.Array) -> jax.Array:
    x = x + self.own(self.norms[0](x), mask=mask)
    x = x + self.cross(self.norms[1](x), encoded)
    return x + self.mlp(self.norms[2](x))


class EncoderDecoder(nnx.Module):
  """Token ids `[batch, seq]` -> logits of the next token."""

  def __init__(self, rngs: nnx.Rngs, vocab: int = 64, width: int = 32, heads: int = 4, depth: int = 3):
    self.embed = nnx.Embed(vocab, width, rngs=rngs)
    self.encoder = nnx.List([EncoderLayer(width, heads, rngs, dropout=0.0) for _ in range(depth)])
    self.decoder = nnx.List([CrossLayer(width, heads, rngs) for _ in range(depth)])

  def __call__(self, tokens: jax.Array) -> jax.Array:
    encoded = self.embed(tokens)
    for layer in self.encoder:
      encoded = layer(encoded)
    x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
    for layer in self.decoder:
      x = layer(x, encoded, mask)
    return self.embed.attend(x)


class Residual(nnx.Module):
  """A convolution with batch statistics and dropout."""

  def __init__(self, width: int, rngs: nnx.Rngs):
    self.conv = nnx.Conv(width, width, (3, 3), rngs=rngs)
    self.norm = nnx.BatchNorm(width, rngs=rngs)
    self.dropout = nnx.Dropout(0.2, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return x + self.dropout(nnx.relu(self.norm(self.conv(x))))


class ResNet(nnx.Module):
  """Images `[batch, 8, 8, 3]` -> logits."""

  def __init__(self, rngs: nnx.Rngs, width: int = 8, depth: int = 3):
    self.stem = nnx.Conv(3, width, (3, 3), rngs=rngs)
    self.blocks = nnx.List([Residual(width, rngs) for _ in range(depth)])
    self.head = nnx.Linear(width, 10, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    x = self.stem(images)
    for block in self.blocks:
      x = block(x)
    return self.head(x.mean((1, 2)))
