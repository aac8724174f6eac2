"""The decoder of Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma 1 and 3: one plain module, by its settings.

Its parts have the names that these models have in Hugging Face's files.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_parallel.errors import RecipeError
from nnx_parallel.interop.families.settings import settings
from nnx_parallel.interop.huggingface import ConfigJson
from nnx_parallel.schemes.expert_functions import ExpertFn, mlp_experts
from nnx_parallel.schemes.experts import experts
from nnx_parallel.schemes.routing import route

Cache = tuple[jax.Array, jax.Array]
"""Keys and values of a layer, (batch, length, kv_heads, head_dim)."""
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "silu": nnx.silu,
  "relu": nnx.relu,
  "gelu": functools.partial(nnx.gelu, approximate=False),
  "gelu_new": nnx.gelu,
  "gelu_pytorch_tanh": nnx.gelu,
}


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotary positions. Source: RoFormer, arXiv:2104.09864; `llama3`: Llama 3.1's own code."""

  theta: float = 10_000.0
  kind: Literal["default", "linear", "llama3"] = "default"
  factor: float = 1.0
  low: float = 1.0
  high: float = 4.0
  length: int = 8192

  def frequencies(self, size: int) -> np.ndarray:
    """Radians from one position to the next, float64 of shape (size / 2,)."""
    plain = self.theta ** -(np.arange(0, size, 2) / size)
    if self.kind != "llama3":
      return plain / self.factor
    turns = self.length * plain / (2 * np.pi)
    kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
    return plain * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes and settings; `from_json` reads the settings of a model on Hugging Face."""

  vocab: int
  width: int
  hidden: int
  heads: int
  kv_heads: int
  head_dim: int
  ropes: tuple[Rope, ...]
  windows: tuple[int | None, ...]
  score_scale: float
  eps: float = 1e-6
  activation: str = "silu"
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  gemma: bool = False
  post_norms: bool = False
  tied: bool = False
  experts: int = 0
  experts_per_token: int = 2
  param_dtype: str = "float32"

  @classmethod
  def from_json(cls, found: ConfigJson, param_dtype: str = "float32") -> Config:
    """Reads the contents of `config.json`, as transformers 4 and 5 write it."""
    found = settings(found)
    for key in ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size"):
      require(found[key] > 0, found, key)
    family, heads = found["model_type"], found["num_attention_heads"]
    head_dim = found["head_dim"] or found["hidden_size"] // heads
    windows, ropes = _windows(found), _ropes(found)
    name = "hidden_activation" if family == "gemma3_text" else "hidden_act"
    activation = found[name]
    require(activation in ACTIVATIONS, found, name)
    kv_heads = found["num_key_value_heads"] or heads
    require(heads % kv_heads == 0, found, "num_key_value_heads")
    bias = found.get("attention_bias", family == "qwen2")
    return cls(
      vocab=found["vocab_size"],
      width=found["hidden_size"],
      hidden=found["intermediate_size"],
      heads=heads,
      kv_heads=kv_heads,
      head_dim=head_dim,
      ropes=tuple(ropes[window is not None] for window in windows),
      windows=windows,
      score_scale=found.get("query_pre_attn_scalar", head_dim) ** -0.5,
      eps=found["rms_norm_eps"],
      activation="gelu_pytorch_tanh" if (family, activation) == ("gemma", "gelu") else activation,
      qkv_bias=bias,
      out_bias=bias and family != "qwen2",
      mlp_bias=found.get("mlp_bias", False),
      qk_norm=family in ("qwen3", "gemma3_text"),
      gemma=family.startswith("gemma"),
      post_norms=family == "gemma3_text",
      tied=found["tie_word_embeddings"],
      experts=found.get("num_local_experts", 0),
      experts_per_token=found.get("num_experts_per_tok", 2),
      param_dtype=param_dtype,
    )


def _windows(found: ConfigJson) -> tuple[int | None, ...]:
  """The window of each layer; the keys that say it differ between the families."""
  depth, window = found["num_hidden_layers"], found.get("sliding_window")
  if "layer_types" not in found:
    return (window,) * depth
  if not found.get("use_sliding_window", True):
    window = None
  if every := found.get("sliding_window_pattern"):
    is_local = [(layer + 1) % every for layer in range(depth)]
  else:
    is_local = [window is not None and layer >= found["max_window_layers"] for layer in range(depth)]
  kinds = found["layer_types"] or ["sliding_attention" if local else "full_attention" for local in is_local]
  is_known = len(kinds) == depth and set(kinds) <= {"sliding_attention", "full_attention"}
  require(is_known and (window is not None or "sliding_attention" not in kinds), found, "layer_types")
  return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _ropes(found: ConfigJson) -> tuple[Rope, Rope]:
  """The positions of layers that attend to all before them, and of layers with a window."""
  given, scaling = found["rope_parameters"], found["rope_scaling"]
  if found["model_type"] != "gemma3_text":
    one = _rope(scaling or given or {}, found["rope_theta"], found)
    return one, one
  given = {"full_attention": {"rope_type": "default"}} if given is None else given
  require(set(given) <= {"full_attention", "sliding_attention"}, found, "rope_parameters")
  return (
    _rope({**(given.get("full_attention") or {}), **(scaling or {})}, found["rope_theta"], found),
    _rope(given.get("sliding_attention") or {}, found["rope_local_base_freq"], found),
  )


def _rope(given: ConfigJson, theta: float, found: ConfigJson) -> Rope:
  kind = given.get("rope_type") or given.get("type") or "default"
  given = {"rope_theta": theta, **given, "rope_type": kind}
  require(kind in _ROPE_KEYS, given, "rope_type")
  needed = _ROPE_KEYS[kind]
  if kind == "llama3":
    given = {"original_max_position_embeddings": found["max_position_embeddings"], **given}
  for key in given.keys() - {"rope_type", "type", *needed}:
    require(given[key] is None or (key, given[key]) == ("partial_rotary_factor", 1), given, key)
  for key in needed:
    require(isinstance(given.get(key), int | float), given, key)
  return Rope(given["rope_theta"], kind, *(given[key] for key in needed[1:]))


_ROPE_KEYS = {
  "default": ("rope_theta",),
  "linear": ("rope_theta", "factor"),
  "llama3": (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ),
}


def require(holds: bool, found: ConfigJson, key: str) -> None:
  """Raises for a setting that the modules of this folder do not have."""
  if not holds:
    raise RecipeError(
      f"the modules of nnx_parallel/interop/families have no {key}={found.get(key)!r}.",
      fix="copy the module of the family, and add it.",
    )


class Norm(nnx.Module):
  """RMSNorm, in float32. Gemma adds 1 to its scale."""

  def __init__(self, width: int, config: Config, rngs: nnx.Rngs):
    del rngs
    self.eps, self.offset = config.eps, float(config.gemma)
    self.scale = nnx.Param(jnp.full((width,), 1 - self.offset, config.param_dtype))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Norms the last dim."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
    scale = self.scale.get_value().astype(jnp.float32) + self.offset
    return (y * jax.lax.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


class Attention(nnx.Module):
  """Causal grouped-query attention over (batch, seq, width)."""

  def __init__(self, config: Config, layer: int, rngs: nnx.Rngs):
    width, size = config.width, config.head_dim
    linear = functools.partial(nnx.LinearGeneral, param_dtype=config.param_dtype, rngs=rngs)
    self.q_proj = linear(width, (config.heads, size), use_bias=config.qkv_bias)
    self.k_proj = linear(width, (config.kv_heads, size), use_bias=config.qkv_bias)
    self.v_proj = linear(width, (config.kv_heads, size), use_bias=config.qkv_bias)
    self.o_proj = linear((config.heads, size), width, axis=(-2, -1), use_bias=config.out_bias)
    if config.qk_norm:
      self.q_norm, self.k_norm = Norm(size, config, rngs), Norm(size, config, rngs)
    self.config, self.layer = config, layer

  def __call__(
    self, x: jax.Array, cache: Cache | None = None, position: jax.Array | int = 0
  ) -> tuple[jax.Array, Cache | None]:
    """Each token attends to itself and the tokens before it, as many as its window has.

    With a cache of the earlier positions, `x` starts at `position`, and its keys and values are added.
    """
    q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    if self.config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    rope, window = self.config.ropes[self.layer], self.config.windows[self.layer]
    q, k = rotate(q, rope, position), rotate(k, rope, position)
    attend = functools.partial(jax.nn.dot_product_attention, scale=self.config.score_scale)
    if cache is None:
      local = None if window is None else (window - 1, 0)
      return self.o_proj(attend(q, k, v, is_causal=True, local_window_size=local)), None
    keys, values = (
      jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), position, 1)
      for old, new in zip(cache, (k, v), strict=True)
    )
    before = position + jnp.arange(x.shape[1])[:, None] - jnp.arange(keys.shape[1])[None]
    seen = (before >= 0) if window is None else (before >= 0) & (before < window)
    return self.o_proj(attend(q, keys, values, mask=seen[None, None])), (keys, values)


def rotate(x: jax.Array, rope: Rope, position: jax.Array | int = 0) -> jax.Array:
  """Rotary positions, from `position` on, on (batch, seq, heads, head_dim), in float32."""
  places = (position + jnp.arange(x.shape[1])).astype(jnp.float32)
  angles = places[:, None] * jnp.asarray(rope.frequencies(x.shape[-1]), jnp.float32)[None]
  sin, cos = (f(angles)[None, :, None] for f in (jnp.sin, jnp.cos))
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class GatedMLP(nnx.Module):
  """SwiGLU and its like. Source: arXiv:2002.05202."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    linear = functools.partial(
      nnx.Linear, use_bias=config.mlp_bias, param_dtype=config.param_dtype, rngs=rngs
    )
    self.gate_proj = linear(config.width, config.hidden)
    self.up_proj = linear(config.width, config.hidden)
    self.down_proj = linear(config.hidden, config.width)
    self.activation = config.activation

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps each position separately."""
    return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class Experts(nnx.Module):
  """Mixtral's experts: the best few compute each token. The mesh axis `expert`, if any, splits them."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    dtype = jnp.dtype(config.param_dtype)
    draw = functools.partial(nnx.initializers.lecun_normal(batch_axis=0), dtype=dtype)
    sizes = (config.experts, config.width, config.hidden)
    self.gate = nnx.Linear(config.width, config.experts, use_bias=False, param_dtype=dtype, rngs=rngs)
    self.w1 = nnx.Param(draw(rngs.params(), sizes))
    self.w3 = nnx.Param(draw(rngs.params(), sizes))
    self.w2 = nnx.Param(draw(rngs.params(), (sizes[0], sizes[2], sizes[1])))
    self.config = config

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps each position separately."""
    routing = route(self.gate(x), self.config.experts_per_token)
    weights = {"gate": self.w1, "up": self.w3, "down": self.w2}
    y, _ = experts(_expert_fn(self.config.activation), weights, x, routing)
    return y


@functools.cache  # one function for all layers: layers with different functions are not equal
def _expert_fn(activation: str) -> ExpertFn:
  return functools.partial(mlp_experts, activation=ACTIVATIONS[activation])


class Layer(nnx.Module):
  """Attention and MLP, each after a norm; in Gemma 3 each also before a norm."""

  def __init__(self, config: Config, layer: int, rngs: nnx.Rngs):
    norm = functools.partial(Norm, config.width, config, rngs)
    self.input_layernorm = norm()
    self.self_attn = Attention(config, layer, rngs)
    self.post_attention_layernorm = norm()
    if config.experts:
      self.block_sparse_moe = Experts(config, rngs)
    else:
      self.mlp = GatedMLP(config, rngs)
    if config.post_norms:
      self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
    self.config = config

  def __call__(
    self, x: jax.Array, cache: Cache | None = None, position: jax.Array | int = 0
  ) -> tuple[jax.Array, Cache | None]:
    """Adds attention, then the MLP, to the residual stream (batch, seq, width)."""
    mlp = self.block_sparse_moe if self.config.experts else self.mlp
    attended, cache = self.self_attn(self.input_layernorm(x), cache, position)
    if self.config.post_norms:
      x = x + self.post_attention_layernorm(attended)
      return x + self.post_feedforward_layernorm(mlp(self.pre_feedforward_layernorm(x))), cache
    x = x + attended
    return x + mlp(self.post_attention_layernorm(x)), cache


class Decoder(nnx.Module):
  """Logits of the next token, (batch, seq, vocab), for int32 tokens (batch, seq)."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    dtype = config.param_dtype
    self.embed_tokens = nnx.Embed(config.vocab, config.width, param_dtype=dtype, rngs=rngs)
    self.layers = nnx.List([Layer(config, layer, rngs) for layer in range(len(config.windows))])
    self.norm = Norm(config.width, config, rngs)
    if not config.tied:
      self.lm_head = nnx.Linear(config.width, config.vocab, use_bias=False, param_dtype=dtype, rngs=rngs)
    self.config = config

  def __call__(
    self, input_ids: jax.Array, cache: Sequence[Cache] | None = None, position: jax.Array | int = 0
  ) -> Any:
    """Logits for each position's next token; with a cache, (logits, cache) of tokens from `position` on."""
    x = self.embed_tokens(input_ids)
    if self.config.gemma:
      x = x * jnp.asarray(self.config.width**0.5, x.dtype)
    after: list[Cache | None] = []
    for layer, before in zip(self.layers, cache or [None] * len(self.layers), strict=True):
      x, own = layer(x, before, position)
      after.append(own)
    x = self.norm(x)
    logits = self.embed_tokens.attend(x) if self.config.tied else self.lm_head(x)
    return logits if cache is None else (logits, after)

  def empty_cache(self, batch: int, length: int) -> list[Cache]:
    """Keys and values (batch, length, kv_heads, head_dim) of each layer, for `length` tokens."""
    c = self.config
    empty = jnp.zeros((batch, length, c.kv_heads, c.head_dim), c.param_dtype)
    return [(empty, empty) for _ in c.windows]
