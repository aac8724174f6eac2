"""BERT as a masked language model, and ViT as a classifier of images: plain modules of one encoder layer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.interop.families.decoder import ACTIVATIONS, require
from nnx_parallel.interop.families.settings import settings
from nnx_parallel.interop.huggingface import ConfigJson


class Layer(nnx.Module):
  """Attention and an MLP, each after a norm as in ViT, or each before a norm as in BERT."""

  def __init__(self, found: ConfigJson, rngs: nnx.Rngs, param_dtype: str, *, norm_first: bool):
    require(found["hidden_act"] in ACTIVATIONS, found, "hidden_act")
    width, hidden = found["hidden_size"], found["intermediate_size"]
    linear = functools.partial(nnx.Linear, param_dtype=param_dtype, rngs=rngs)
    self.attn = nnx.MultiHeadAttention(
      found["num_attention_heads"], width, decode=False, param_dtype=param_dtype, rngs=rngs
    )
    self.norm1, self.norm2 = norm(found, rngs, param_dtype), norm(found, rngs, param_dtype)
    self.fc1, self.fc2 = linear(width, hidden), linear(hidden, width)
    self.activation, self.norm_first = found["hidden_act"], norm_first

  def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Maps (batch, seq, width); `mask` (batch, 1, 1, seq) is true where there is something to see."""
    if self.norm_first:
      x = x + self.attn(self.norm1(x), mask=mask)
      return x + self.feed_forward(self.norm2(x))
    x = self.norm1(x + self.attn(x, mask=mask))
    return self.norm2(x + self.feed_forward(x))

  def feed_forward(self, x: jax.Array) -> jax.Array:
    """The MLP."""
    return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))


def norm(found: ConfigJson, rngs: nnx.Rngs, param_dtype: str) -> nnx.LayerNorm:
  """A norm of the model's width."""
  return nnx.LayerNorm(
    found["hidden_size"], epsilon=found["layer_norm_eps"], param_dtype=param_dtype, rngs=rngs
  )


def _pair(size: int | list[int]) -> tuple[int, int]:
  """Height and width."""
  height, width = (size, size) if isinstance(size, int) else size
  return height, width


class Bert(nnx.Module):
  """Logits of each token, (batch, seq, vocab), for int32 tokens (batch, seq), of which some are masked.

  Args:
    found: the contents of `config.json`.
    rngs: for the weights.
    param_dtype: the dtype of all parameters.

  Raises:
    RecipeError: a setting that this module does not have.
  """

  def __init__(self, found: ConfigJson, rngs: nnx.Rngs, param_dtype: str = "float32"):
    found = settings(found)
    width, vocab = found["hidden_size"], found["vocab_size"]
    embed = functools.partial(nnx.Embed, features=width, param_dtype=param_dtype, rngs=rngs)
    self.token_embedding = embed(vocab)
    self.position_embedding = embed(found["max_position_embeddings"])
    self.type_embedding = embed(found["type_vocab_size"])
    self.norm = norm(found, rngs, param_dtype)
    self.layers = nnx.List(
      [Layer(found, rngs, param_dtype, norm_first=False) for _ in range(found["num_hidden_layers"])]
    )
    self.transform = nnx.Linear(width, width, param_dtype=param_dtype, rngs=rngs)
    self.transform_norm = norm(found, rngs, param_dtype)
    self.bias = nnx.Param(jnp.zeros(vocab, param_dtype))
    self.activation = found["hidden_act"]

  def __call__(
    self,
    input_ids: jax.Array,
    attention_mask: jax.Array | None = None,
    token_type_ids: jax.Array | None = None,
  ) -> jax.Array:
    """Logits for each position; `attention_mask` (batch, seq) is 0 for padding."""
    positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
    types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
    x = self.token_embedding(input_ids) + self.position_embedding(positions) + self.type_embedding(types)
    x = self.norm(x)
    mask = None if attention_mask is None else (attention_mask != 0)[:, None, None, :]
    for layer in self.layers:
      x = layer(x, mask)
    x = self.transform_norm(ACTIVATIONS[self.activation](self.transform(x)))
    return self.token_embedding.attend(x) + self.bias.get_value()[None, None, :]


class ViT(nnx.Module):
  """Logits of each class, (batch, labels), for images (batch, channels, height, width).

  Args:
    found: the contents of `config.json`.
    rngs: for the weights.
    param_dtype: the dtype of all parameters.

  Raises:
    RecipeError: a setting that this module does not have.
  """

  def __init__(self, found: ConfigJson, rngs: nnx.Rngs, param_dtype: str = "float32"):
    found = settings(found)
    width, patch, image = found["hidden_size"], _pair(found["patch_size"]), _pair(found["image_size"])
    patches = (image[0] // patch[0]) * (image[1] // patch[1])
    labels = found["num_labels"] or len(found["id2label"] or (0, 1))
    self.patch_embed = nnx.Conv(
      found["num_channels"],
      width,
      patch,
      strides=patch,
      padding="VALID",
      param_dtype=param_dtype,
      rngs=rngs,
    )
    draw = nnx.initializers.truncated_normal(0.02)
    self.cls_token = nnx.Param(draw(rngs.params(), (1, 1, width), param_dtype))
    self.pos_embed = nnx.Param(draw(rngs.params(), (1, patches + 1, width), param_dtype))
    self.layers = nnx.List(
      [Layer(found, rngs, param_dtype, norm_first=True) for _ in range(found["num_hidden_layers"])]
    )
    self.norm = norm(found, rngs, param_dtype)
    self.classifier = nnx.Linear(width, labels, param_dtype=param_dtype, rngs=rngs)

  def __call__(self, pixel_values: jax.Array) -> jax.Array:
    """Logits of each image's classes."""
    x = self.patch_embed(jnp.moveaxis(pixel_values, 1, -1))
    batch, _, _, width = x.shape
    first = jnp.broadcast_to(self.cls_token.get_value(), (batch, 1, width))
    x = jnp.concatenate([first, x.reshape(batch, -1, width)], axis=1) + self.pos_embed.get_value()
    for layer in self.layers:
      x = layer(x)
    return self.classifier(self.norm(x)[:, 0])
