"""T5, as a plain module whose parts have the names of Hugging Face's files."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.interop.families.decoder import ACTIVATIONS, require
from nnx_parallel.interop.families.settings import settings
from nnx_parallel.interop.huggingface import ConfigJson


class Attention(nnx.Module):
  """Attention without scale or biases, over (batch, seq, width)."""

  relative_attention_bias: nnx.Embed  # the embedding of the first layer

  def __init__(self, found: ConfigJson, rngs: nnx.Rngs, param_dtype: str):
    width, self.heads = found["d_model"], found["num_heads"]
    inner = self.heads * found["d_kv"]
    self.q, self.k, self.v = (
      nnx.Linear(width, inner, use_bias=False, param_dtype=param_dtype, rngs=rngs) for _ in range(3)
    )
    self.o = nnx.Linear(inner, width, use_bias=False, param_dtype=param_dtype, rngs=rngs)

  def __call__(self, x: jax.Array, source: jax.Array, bias: jax.Array) -> jax.Array:
    """From `x` to `source`; `bias` (1 or batch, heads, to, from) is added to the scores."""
    size = self.q.out_features // self.heads
    q, k, v = (
      layer(y).reshape(*y.shape[:2], self.heads, size)
      for layer, y in ((self.q, x), (self.k, source), (self.v, source))
    )
    mixed = jax.nn.dot_product_attention(q, k, v, bias=bias, scale=1.0)
    return self.o(mixed.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
  """One product and an activation, or a gate and two products."""

  wi: nnx.Linear
  wi_0: nnx.Linear
  wi_1: nnx.Linear

  def __init__(self, found: ConfigJson, rngs: nnx.Rngs, param_dtype: str):
    kind = found["feed_forward_proj"]
    require(kind.count("-") == kind.startswith("gated-"), found, "feed_forward_proj")
    activation = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    self.activation = found["dense_act_fn"] or activation
    gated = kind.startswith("gated-") if found["is_gated_act"] is None else found["is_gated_act"]
    require(
      self.activation in ACTIVATIONS, found, "dense_act_fn" if found["dense_act_fn"] else "feed_forward_proj"
    )
    width, hidden = found["d_model"], found["d_ff"]
    for name in ("wi_0", "wi_1") if gated else ("wi",):
      setattr(self, name, nnx.Linear(width, hidden, use_bias=False, param_dtype=param_dtype, rngs=rngs))
    self.wo = nnx.Linear(hidden, width, use_bias=False, param_dtype=param_dtype, rngs=rngs)
    self.gated = gated

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps each position separately."""
    activation = ACTIVATIONS[self.activation]
    return self.wo(activation(self.wi_0(x)) * self.wi_1(x) if self.gated else activation(self.wi(x)))


class Part(nnx.Module):
  """A residual part behind a norm: `SelfAttention`, `EncDecAttention` or `DenseReluDense`."""

  SelfAttention: Attention

  def __init__(self, kind: str, found: ConfigJson, rngs: nnx.Rngs, param_dtype: str):
    made = MLP if kind == "DenseReluDense" else Attention
    setattr(self, kind, made(found, rngs, param_dtype))
    self.layer_norm = norm(found, rngs, param_dtype)
    self.kind = kind

  def __call__(self, x: jax.Array, *args: jax.Array) -> jax.Array:
    """Adds the part's result; self-attention takes the bias, cross-attention also the encoder's values."""
    y, part = self.layer_norm(x), getattr(self, self.kind)
    if self.kind == "SelfAttention":
      return x + part(y, y, *args)
    return x + part(y, *args)


class Block(nnx.Module):
  """The parts of one layer, as the list `layer`."""

  def __init__(self, kinds: tuple[str, ...], found: ConfigJson, rngs: nnx.Rngs, param_dtype: str):
    self.layer = nnx.List([Part(kind, found, rngs, param_dtype) for kind in kinds])


class Stack(nnx.Module):
  """The encoder or the decoder. The first layer has the table of the biases by relative position."""

  def __init__(self, found: ConfigJson, rngs: nnx.Rngs, param_dtype: str, *, is_decoder: bool):
    cross = ("EncDecAttention",) if is_decoder else ()
    kinds = ("SelfAttention", *cross, "DenseReluDense")
    depth = (is_decoder and found["num_decoder_layers"]) or found["num_layers"]
    self.block = nnx.List([Block(kinds, found, rngs, param_dtype) for _ in range(depth)])
    self.buckets = found["relative_attention_num_buckets"]
    self.distance = found["relative_attention_max_distance"]
    self.block[0].layer[0].SelfAttention.relative_attention_bias = nnx.Embed(
      self.buckets, found["num_heads"], param_dtype=param_dtype, rngs=rngs
    )
    self.final_layer_norm = norm(found, rngs, param_dtype)
    self.is_decoder = is_decoder

  def __call__(self, x: jax.Array, mask: jax.Array, encoded: jax.Array | None = None) -> jax.Array:
    """Maps (batch, seq, width); `mask` (batch, 1, 1, from) is true where there is input to see."""
    hidden = jnp.where(mask, 0.0, -1e9)
    bias = self.relative_bias(x.shape[1])
    bias = bias if self.is_decoder else bias + hidden
    for block in self.block:
      x = block.layer[0](x, bias)
      if encoded is not None:
        x = block.layer[1](x, encoded, hidden)
      x = block.layer[-1](x)
    return self.final_layer_norm(x)

  def relative_bias(self, size: int) -> jax.Array:
    """Returns float32 of shape (1, heads, size, size); in the decoder, later positions are hidden."""
    positions = jnp.arange(size)
    ahead = positions[None, :] - positions[:, None]
    table = self.block[0].layer[0].SelfAttention.relative_attention_bias
    bias = jnp.transpose(table(self.bucket(ahead)), (2, 0, 1))[None].astype(jnp.float32)
    return jnp.where((ahead > 0)[None, None], -1e9, bias) if self.is_decoder else bias

  def bucket(self, ahead: jax.Array) -> jax.Array:
    """Near distances have a bucket each; far ones share buckets, by logarithm. Source: arXiv:1910.10683."""
    count = self.buckets if self.is_decoder else self.buckets // 2
    offset = 0 if self.is_decoder else jnp.where(ahead > 0, count, 0)
    distance = jnp.maximum(-ahead, 0) if self.is_decoder else jnp.abs(ahead)
    near = count // 2
    log = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / near) / math.log(self.distance / near)
    far = jnp.minimum(near + (log * (count - near)).astype(jnp.int32), count - 1)
    return offset + jnp.where(distance < near, distance, far)


class T5(nnx.Module):
  """Logits of the decoder's next token, (batch, to, vocab), of int32 tokens (batch, from) and (batch, to)."""

  def __init__(self, found: ConfigJson, rngs: nnx.Rngs, param_dtype: str = "float32"):
    found = settings(found)
    width, vocab = found["d_model"], found["vocab_size"]
    self.tied, scaled = found["tie_word_embeddings"], found["scale_decoder_outputs"]
    self.scale = width**-0.5 if (self.tied if scaled is None else scaled) else 1.0
    self.shared = nnx.Embed(vocab, width, param_dtype=param_dtype, rngs=rngs)
    self.encoder = Stack(found, rngs, param_dtype, is_decoder=False)
    self.decoder = Stack(found, rngs, param_dtype, is_decoder=True)
    if not self.tied:
      self.lm_head = nnx.Linear(width, vocab, use_bias=False, param_dtype=param_dtype, rngs=rngs)

  def __call__(
    self, input_ids: jax.Array, decoder_input_ids: jax.Array, attention_mask: jax.Array | None = None
  ) -> jax.Array:
    """Logits for each position of the decoder; `attention_mask` (batch, from) is 0 for padding."""
    mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
    mask = (mask != 0)[:, None, None, :]
    encoded = self.encoder(self.shared(input_ids), mask)
    x = self.decoder(self.shared(decoder_input_ids), mask, encoded) * self.scale
    return self.shared.attend(x) if self.tied else self.lm_head(x)


def norm(found: ConfigJson, rngs: nnx.Rngs, param_dtype: str) -> nnx.RMSNorm:
  """A norm of the model's width."""
  return nnx.RMSNorm(
    found["d_model"], epsilon=found["layer_norm_epsilon"], param_dtype=param_dtype, rngs=rngs
  )
