"""Small un-annotated models of the families that presets and inference know, with their path names."""

import jax
import jax.numpy as jnp
from flax import nnx


class Attention(nnx.Module):  # Projections named by `names`: query, key, value, output
  def __init__(self, width, inner, heads, names, rngs, *, bias=False, kv_inner=None):
    self.heads, self.names = heads, names
    widths = (inner, kv_inner or inner, kv_inner or inner)
    for name, size in zip(names[:3], widths, strict=True):
      setattr(self, name, nnx.Linear(width, size, use_bias=bias, rngs=rngs))
    setattr(self, names[3], nnx.Linear(inner, width, use_bias=bias, rngs=rngs))

  def __call__(self, x, context=None, bias=0.0):
    source = x if context is None else context
    size = getattr(self, self.names[0]).out_features // self.heads
    split = lambda name, y: getattr(self, name)(y).reshape(*y.shape[:2], -1, size)
    q, k, v = map(split, self.names[:3], (x, source, source))
    k, v = (jnp.repeat(y, self.heads // y.shape[2], axis=2) for y in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return getattr(self, self.names[3])(mixed.reshape(*x.shape[:2], -1))


class T5Dense(nnx.Module):
  def __init__(self, width, hidden, rngs):
    self.wi_0 = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
    self.wi_1 = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
    self.wo = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

  def __call__(self, x):
    return self.wo(nnx.gelu(self.wi_0(x)) * self.wi_1(x))


class T5Part(nnx.Module):
  """One residual part: `layer_norm` and one of SelfAttention, EncDecAttention, DenseReluDense."""

  def __init__(self, kind, width, inner, heads, hidden, rngs, relative=False):
    self.kind = kind
    self.layer_norm = nnx.RMSNorm(width, rngs=rngs)
    if kind == "DenseReluDense":
      setattr(self, kind, T5Dense(width, hidden, rngs))
    else:
      setattr(self, kind, Attention(width, inner, heads, ("q", "k", "v", "o"), rngs))
    if relative:
      getattr(self, kind).relative_attention_bias = nnx.Embed(8, heads, rngs=rngs)

  def __call__(self, x, context):
    layer, y = getattr(self, self.kind), self.layer_norm(x)
    if self.kind == "DenseReluDense":
      return x + layer(y)
    bias = 0.0
    if hasattr(layer, "relative_attention_bias"):
      distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])[None]
      bias = layer.relative_attention_bias(jnp.clip(jnp.abs(distance), 0, 7)).transpose(2, 0, 1)[None]
    return x + layer(y, context if self.kind == "EncDecAttention" else None, bias)


class T5Block(nnx.Module):
  def __init__(self, kinds, *sizes, rngs, relative):
    self.layer = nnx.List(
      [T5Part(k, *sizes, rngs=rngs, relative=relative and i == 0) for i, k in enumerate(kinds)]
    )

  def __call__(self, x, context):
    for part in self.layer:
      x = part(x, context)
    return x


class T5Stack(nnx.Module):
  def __init__(self, kinds, depth, width, *sizes, rngs):
    self.block = nnx.List([T5Block(kinds, width, *sizes, rngs=rngs, relative=i == 0) for i in range(depth)])
    self.final_layer_norm = nnx.RMSNorm(width, rngs=rngs)

  def __call__(self, x, context=None):
    for block in self.block:
      x = block(x, context)
    return self.final_layer_norm(x)


class T5(nnx.Module):  # An encoder-decoder with a shared embedding and the path parts of the original
  def __init__(self, rngs, *, vocab=32, width=16, inner=16, heads=4, hidden=32, depth=2):
    self.shared = nnx.Embed(vocab, width, rngs=rngs)
    sizes = (depth, width, inner, heads, hidden)
    self.encoder = T5Stack(("SelfAttention", "DenseReluDense"), *sizes, rngs=rngs)
    self.decoder = T5Stack(("SelfAttention", "EncDecAttention", "DenseReluDense"), *sizes, rngs=rngs)
    self.lm_head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

  def __call__(self, source, target):
    return self.lm_head(self.decoder(self.shared(target), self.encoder(self.shared(source))))


class LlamaMLP(nnx.Module):
  def __init__(self, width, hidden, rngs):
    self.gate_proj = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
    self.up_proj = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
    self.down_proj = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

  def __call__(self, x):
    return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nnx.Module):
  def __init__(self, width, heads, kv_heads, hidden, rngs):
    self.input_layernorm = nnx.RMSNorm(width, rngs=rngs)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    self.self_attn = Attention(width, width, heads, names, rngs, kv_inner=width // heads * kv_heads)
    self.post_attention_layernorm = nnx.RMSNorm(width, rngs=rngs)
    self.mlp = LlamaMLP(width, hidden, rngs)

  def __call__(self, x):
    x = x + self.self_attn(self.input_layernorm(x))
    return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):  # Grouped query heads, gated MLP, head apart or tied to the embedding
  def __init__(self, rngs, *, vocab=32, width=16, heads=4, kv_heads=2, hidden=32, depth=2, tied=False):
    self.embed_tokens = nnx.Embed(vocab, width, rngs=rngs)
    self.layers = nnx.List([LlamaLayer(width, heads, kv_heads, hidden, rngs) for _ in range(depth)])
    self.norm = nnx.RMSNorm(width, rngs=rngs)
    self.lm_head = None if tied else nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

  def __call__(self, tokens):
    x = self.embed_tokens(tokens)
    for layer in self.layers:
      x = layer(x)
    x = self.norm(x)
    return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


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
