"""Small un-annotated models of the families that presets and inference know, with their path names."""

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.interop.families import t5
from nnx_parallel.interop.families.decoder import Config, Decoder, Rope


def Llama(rngs, *, depth=2, tied=False):
  """Grouped query heads, a gated MLP, the head apart or tied to the embedding."""
  sizes = {"vocab": 32, "width": 16, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 4}
  config = Config(**sizes, ropes=(Rope(),) * depth, windows=(None,) * depth, score_scale=0.5, tied=tied)
  return Decoder(config, rngs)


def T5(rngs):
  """An encoder-decoder with a shared embedding."""
  sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 32, "num_layers": 2}
  found = {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
  return t5.T5(found | sizes, rngs)


class GPTAttention(nnx.Module):
  def __init__(self, width, heads, rngs):
    self.heads = heads
    self.c_attn = nnx.Linear(width, 3 * width, rngs=rngs)
    self.c_proj = nnx.Linear(width, width, rngs=rngs)

  def __call__(self, x):
    q, k, v = jnp.split(self.c_attn(x).reshape(*x.shape[:2], self.heads, -1), 3, axis=-1)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return self.c_proj(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


class GPTMLP(nnx.Module):
  def __init__(self, width, rngs):
    self.c_fc = nnx.Linear(width, 4 * width, rngs=rngs)
    self.c_proj = nnx.Linear(4 * width, width, rngs=rngs)

  def __call__(self, x):
    return self.c_proj(nnx.gelu(self.c_fc(x)))


class GPTBlock(nnx.Module):
  def __init__(self, width, heads, rngs):
    self.ln_1, self.ln_2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
    self.attn, self.mlp = GPTAttention(width, heads, rngs), GPTMLP(width, rngs)

  def __call__(self, x):
    x = x + self.attn(self.ln_1(x))
    return x + self.mlp(self.ln_2(x))


class GPT(nnx.Module):  # Fused attention kernel, learned positions, tied head
  def __init__(self, rngs, *, vocab=32, width=16, heads=4, depth=2, length=8):
    self.wte, self.wpe = nnx.Embed(vocab, width, rngs=rngs), nnx.Embed(length, width, rngs=rngs)
    self.h = nnx.List([GPTBlock(width, heads, rngs) for _ in range(depth)])
    self.ln_f = nnx.LayerNorm(width, rngs=rngs)

  def __call__(self, tokens):
    x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))[None]
    for block in self.h:
      x = block(x)
    return self.wte.attend(self.ln_f(x))


class ViTBlock(nnx.Module):
  def __init__(self, width, heads, hidden, rngs):
    self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
    self.attn = nnx.MultiHeadAttention(num_heads=heads, in_features=width, decode=False, rngs=rngs)
    self.fc1, self.fc2 = nnx.Linear(width, hidden, rngs=rngs), nnx.Linear(hidden, width, rngs=rngs)

  def __call__(self, x):
    x = x + self.attn(self.norm1(x))
    return x + self.fc2(nnx.gelu(self.fc1(self.norm2(x))))


class ViT(nnx.Module):  # Patch convolution, class token, `nnx.MultiHeadAttention` with three-dim kernels
  def __init__(self, rngs, *, width=16, heads=4, hidden=32, depth=2, patches=4, classes=10):
    self.patch_embed = nnx.Conv(3, width, (2, 2), strides=(2, 2), padding="VALID", rngs=rngs)
    self.cls_token = nnx.Param(jnp.zeros((1, 1, width)))
    self.pos_embed = nnx.Param(jnp.zeros((1, patches + 1, width)))
    self.blocks = nnx.List([ViTBlock(width, heads, hidden, rngs) for _ in range(depth)])
    self.norm = nnx.LayerNorm(width, rngs=rngs)
    self.head = nnx.Linear(width, classes, rngs=rngs)

  def __call__(self, images):
    x = self.patch_embed(images)
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    token = jnp.broadcast_to(self.cls_token[...], (x.shape[0], 1, x.shape[-1]))
    x = jnp.concatenate([token, x], axis=1) + self.pos_embed[...]
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x)[:, 0])
