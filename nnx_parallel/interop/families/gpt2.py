"""GPT-2, as a plain module whose parts have the names of Hugging Face's files."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.interop.families.decoder import ACTIVATIONS, require
from nnx_parallel.interop.families.settings import settings
from nnx_parallel.interop.huggingface import ConfigJson


class Attention(nnx.Module):
  """Causal attention over (batch, seq, width), with query, key and value in one product."""

  def __init__(self, width: int, heads: int, rngs: nnx.Rngs, param_dtype: str):
    self.c_attn = nnx.Linear(width, 3 * width, param_dtype=param_dtype, rngs=rngs)
    self.c_proj = nnx.Linear(width, width, param_dtype=param_dtype, rngs=rngs)
    self.heads = heads

  def __call__(self, x: jax.Array) -> jax.Array:
    """Each token attends to itself and the tokens before it."""
    batch, seq, width = x.shape
    parts = jnp.split(self.c_attn(x), 3, axis=-1)
    q, k, v = (part.reshape(batch, seq, self.heads, width // self.heads) for part in parts)
    return self.c_proj(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class MLP(nnx.Module):
  """Two linear layers."""

  def __init__(self, width: int, hidden: int, activation: str, rngs: nnx.Rngs, param_dtype: str):
    self.c_fc = nnx.Linear(width, hidden, param_dtype=param_dtype, rngs=rngs)
    self.c_proj = nnx.Linear(hidden, width, param_dtype=param_dtype, rngs=rngs)
    self.activation = activation

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps each position separately."""
    return self.c_proj(ACTIVATIONS[self.activation](self.c_fc(x)))


class Layer(nnx.Module):
  """A pre-norm block."""

  def __init__(self, found: ConfigJson, rngs: nnx.Rngs, param_dtype: str):
    width = found["n_embd"]
    norm = functools.partial(
      nnx.LayerNorm, width, epsilon=found["layer_norm_epsilon"], param_dtype=param_dtype, rngs=rngs
    )
    self.ln_1, self.ln_2 = norm(), norm()
    self.attn = Attention(width, found["n_head"], rngs, param_dtype)
    hidden = found["n_inner"] or 4 * width
    self.mlp = MLP(width, hidden, found["activation_function"], rngs, param_dtype)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Adds attention, then the MLP, to the residual stream."""
    x = x + self.attn(self.ln_1(x))
    return x + self.mlp(self.ln_2(x))


class GPT2(nnx.Module):
  """Logits of the next token, (batch, seq, vocab), for int32 tokens (batch, seq).

  Args:
    found: the contents of `config.json`.
    rngs: for the weights.
    param_dtype: the dtype of all parameters.

  Raises:
    RecipeError: a setting that this module does not have.
  """

  def __init__(self, found: ConfigJson, rngs: nnx.Rngs, param_dtype: str = "float32"):
    found = settings(found)
    require(found["activation_function"] in ACTIVATIONS, found, "activation_function")
    width = found["n_embd"]
    self.wte = nnx.Embed(found["vocab_size"], width, param_dtype=param_dtype, rngs=rngs)
    self.wpe = nnx.Embed(found["n_positions"], width, param_dtype=param_dtype, rngs=rngs)
    self.h = nnx.List([Layer(found, rngs, param_dtype) for _ in range(found["n_layer"])])
    self.ln_f = nnx.LayerNorm(width, epsilon=found["layer_norm_epsilon"], param_dtype=param_dtype, rngs=rngs)
    self.tied = found["tie_word_embeddings"]
    if not self.tied:
      self.lm_head = nnx.Linear(
        width, found["vocab_size"], use_bias=False, param_dtype=param_dtype, rngs=rngs
      )

  def __call__(self, input_ids: jax.Array) -> jax.Array:
    """Logits for each position's next token."""
    positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
    x = self.wte(input_ids) + self.wpe(positions)
    for layer in self.h:
      x = layer(x)
    x = self.ln_f(x)
    return self.wte.attend(x) if self.tied else self.lm_head(x)
