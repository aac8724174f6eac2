"""A Llama-shaped recipe: plain NNX, logical names on every parameter, layers stacked for one scan.

Sizes as published for Llama 3 (arXiv:2407.21783, table 3): 8B and 70B. `tiny` is for tests.

    nnx-parallel compile benchmarks/llama.py --topology tpu:v5e:4x4 --mesh fsdp=16
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes of a model; `sequence` and `batch` are those of one global batch.

  Attention takes `query_block` queries at a time, and the loss one of `loss_chunks` parts of the sequence.
  Gradients of the layers are kept in `gradients` until the update; by default in the dtype of compute.
  """

  vocab: int
  width: int
  depth: int
  heads: int
  kv_heads: int
  mlp: int
  sequence: int = 4096
  batch: int = 16
  compute: jnp.dtype = jnp.bfloat16
  gradients: jnp.dtype | None = None
  query_block: int = 512
  loss_chunks: int = 1

  @property
  def head(self) -> int:
    return self.width // self.heads

  @property
  def parameters(self) -> int:
    """Number of parameters."""
    attention = self.width * self.head * (2 * self.heads + 2 * self.kv_heads)
    layer = attention + 3 * self.width * self.mlp + 2 * self.width
    return self.depth * layer + 2 * self.vocab * self.width + self.width


SIZES = {
  "tiny": Config(vocab=256, width=64, depth=4, heads=4, kv_heads=2, mlp=192, sequence=64),
  "8b": Config(vocab=128_256, width=4096, depth=32, heads=32, kv_heads=8, mlp=14_336),
  "70b": Config(vocab=128_256, width=8192, depth=80, heads=64, kv_heads=8, mlp=28_672, batch=256),
}


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], names: tuple[str | None, ...]) -> nnx.Param:
  """A normal parameter scaled by the fan-in of its first dims."""
  scale = (shape[0] if len(shape) == 2 else np.prod(shape[:-1])) ** -0.5
  return nnx.Param(scale * jax.random.normal(rngs.params(), shape, jnp.float32), out_sharding=names)


class Block(nnx.Module):
  """One decoder layer: grouped-query attention and a gated MLP, each after an RMS norm."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    c, self.config = config, config
    self.attention_norm = nnx.Param(jnp.ones(c.width), out_sharding=("norm",))
    self.query = parameter(rngs, (c.width, c.heads, c.head), ("embed", "heads", None))
    self.key = parameter(rngs, (c.width, c.kv_heads, c.head), ("embed", "kv_heads", None))
    self.value = parameter(rngs, (c.width, c.kv_heads, c.head), ("embed", "kv_heads", None))
    self.out = parameter(rngs, (c.heads, c.head, c.width), ("heads", None, "embed"))
    self.mlp_norm = nnx.Param(jnp.ones(c.width), out_sharding=("norm",))
    self.gate = parameter(rngs, (c.width, c.mlp), ("embed", "mlp"))
    self.up = parameter(rngs, (c.width, c.mlp), ("embed", "mlp"))
    self.down = parameter(rngs, (c.mlp, c.width), ("mlp", "embed"))

  def __call__(self, x: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    x = x + self.attend(norm(x, self.attention_norm), segments)
    return keep_batch_split(x + self.feed(norm(x, self.mlp_norm)), self.query)

  def attend(self, x: jax.Array, segments: jax.Array | None) -> jax.Array:
    weights = (w[...].astype(x.dtype) for w in (self.query, self.key, self.value))
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in weights)
    q, k = rotate(q), rotate(k)
    y = causal_attention(q, k, v, self.config.query_block, segments)
    return jnp.einsum("bshk,hkd->bsd", y, self.out[...].astype(x.dtype))

  def feed(self, x: jax.Array) -> jax.Array:
    gate, up, down = (w[...].astype(x.dtype) for w in (self.gate, self.up, self.down))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


class Llama(nnx.Module):
  """The whole model: embedding, scanned layers, final norm, untied head."""

  def __init__(self, config: Config, rngs: nnx.Rngs, remat: bool = True):
    c, self.config, self.remat = config, config, remat
    self.embed = parameter(rngs, (c.vocab, c.width), ("vocab", "embed"))

    @nnx.split_rngs(splits=c.depth)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def stack(rngs: nnx.Rngs) -> Block:
      return Block(c, rngs)

    self.layers = stack(rngs)
    self.norm = nnx.Param(jnp.ones(c.width), out_sharding=("norm",))
    self.head = parameter(rngs, (c.width, c.vocab), ("embed", "vocab"))

  def __call__(self, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    """Token ids (batch, sequence) -> logits (batch, sequence, vocab) in the dtype of compute.

    `segments` numbers the documents that share a sequence; a token sees its own one only.
    """
    x, head = self.before_logits(tokens, segments)
    return x @ head

  def before_logits(
    self, tokens: jax.Array, segments: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """Token ids (batch, sequence) -> (batch, sequence, width), and the head that makes logits of it."""
    x = self.embed[...].astype(self.config.compute)[tokens]
    x = split_sequences(x, self.embed)
    graphdef, stacked = nnx.split(self.layers)
    # Cast as a whole: a layer's gradient is made in this dtype, and is then kept in it until the update.
    kept = self.config.gradients or x.dtype
    stacked = jax.tree.map(lambda w: w.astype(kept) if w.ndim > 2 else w, stacked)

    def layer(x: jax.Array, state: nnx.State) -> jax.Array:
      x = keep_batch_split(split_sequences(x, self.embed), self.embed)
      return split_sequences(nnx.merge(graphdef, state)(x, segments), self.embed)

    def body(x: jax.Array, state: nnx.State) -> tuple[jax.Array, None]:
      # Laid out outside of the checkpoint, because its input is what is kept for the backward pass.
      x = split_sequences(x, self.embed)
      return (jax.checkpoint(layer) if self.remat else layer)(x, state), None

    x, _ = jax.lax.scan(body, x, stacked)
    x = keep_batch_split(norm(x, self.norm), self.embed)
    # The barrier makes the head's gradient wait for nothing: else the gradient of the logits, the largest
    # array of the step, may live on through the backward pass of the layers.
    return jax.lax.optimization_barrier((x, self.head[...].astype(x.dtype)))


def split_sequences(x: jax.Array, near: nnx.Param) -> jax.Array:
  """Splits activations between layers over the tensor axis too, along their positions.

  So each device keeps its part only of what the backward pass needs. Source: arXiv:2205.05198.
  """
  mesh = near.get_metadata().get("mesh")
  return x if mesh is None or "tensor" not in mesh.shape else keep_batch_split(x, near, "tensor")


def keep_batch_split(x: jax.Array, near: nnx.Param, positions: str | None = None) -> jax.Array:
  """Holds activations to the batch axes; else the embedding's layout would spread to all of them."""
  mesh = near.get_metadata().get("mesh")
  if mesh is None:
    return x
  axes = tuple(axis for axis in ("data", "fsdp") if axis in mesh.shape)
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(axes, positions, None)))


def norm(x: jax.Array, scale: nnx.Param) -> jax.Array:
  """RMS norm, computed in float32."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-5)
  return (y * scale[...].reshape(1, 1, -1)).astype(x.dtype)


def causal_attention(
  q: jax.Array, k: jax.Array, v: jax.Array, block: int, segments: jax.Array | None = None
) -> jax.Array:
  """Causal attention by blocks of queries, so that only one block's scores exist at a time.

  Scores and softmax are float32. All scores of one sequence of 4096 tokens would be 2 GiB per device.
  Source: Rabe and Staats, arXiv:2112.05682.

  Args:
    q: (batch, sequence, heads, head_dim).
    k: (batch, sequence, kv_heads, head_dim).
    v: as `k`.
    block: queries at a time; the whole sequence where it does not divide it.
    segments: (batch, sequence); a query sees the keys of its own segment only.
  """
  batch, length, heads, dim = q.shape
  block = block if length % block == 0 else length
  starts = jnp.arange(0, length, block)

  @jax.checkpoint
  def one(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
    start, queries = rows
    seen = (start + jnp.arange(block)[:, None] >= jnp.arange(length)[None, :])[None, None]
    if segments is not None:
      own = jax.lax.dynamic_slice_in_dim(segments, start, block, axis=1)
      seen &= own[:, None, :, None] == segments[:, None, None, :]
    return jax.nn.dot_product_attention(queries, k, v, mask=seen)

  y = jax.lax.map(one, (starts, q.reshape(batch, -1, block, heads, dim).swapaxes(0, 1)))
  return y.swapaxes(0, 1).reshape(q.shape)


def rotate(x: jax.Array) -> jax.Array:
  """Rotary positions on (batch, sequence, heads, head_dim). Source: RoFormer, arXiv:2104.09864."""
  half = x.shape[-1] // 2
  frequency = 500_000.0 ** (-np.arange(half, dtype=np.float32) / half)
  angle = np.arange(x.shape[1], dtype=np.float32)[:, None] * frequency[None, :]
  cos = jnp.asarray(np.cos(angle), x.dtype)[None, :, None, :]
  sin = jnp.asarray(np.sin(angle), x.dtype)[None, :, None, :]
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Cross-entropy (batch, sequence) of (batch, sequence, vocab) logits, in float32.

  The target's logit is picked by a comparison, which fuses; the gradient of an indexed read would be
  one more array of the size of the logits, and gather them where the vocabulary is split.
  """
  logits = logits.astype(jnp.float32)
  chosen = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
  picked = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)
  return jax.nn.logsumexp(logits, axis=-1) - picked


def build(size: str, *, remat: bool = True, **changes: Any) -> Llama:
  """A model by the name of its size; `changes` replaces sizes."""
  return Llama(dataclasses.replace(SIZES[size], **changes), nnx.Rngs(0), remat)


def init() -> Llama:
  return build("8b")


def init_70b() -> Llama:
  return build("70b")


def optimizer(clip: float | None = None) -> optax.GradientTransformation:
  adamw = optax.adamw(3e-4, weight_decay=0.1)
  return adamw if clip is None else optax.chain(optax.clip_by_global_norm(clip), adamw)


def loss(model: Llama, batch: dict[str, jax.Array]) -> jax.Array:
  """Mean cross-entropy; with `segments`, of the targets in their token's segment, without 0 (padding)."""
  tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
  segments, counted = None, None
  if "segments" in batch:
    segments, following = batch["segments"][:, :-1], batch["segments"][:, 1:]
    counted = (segments == following) & (segments != 0)
  parts = model.config.loss_chunks
  if parts == 1:
    return jnp.mean(cross_entropy(model(tokens, segments), targets), where=counted)
  x, head = model.before_logits(tokens, segments)

  @jax.checkpoint
  def add(total: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array | None]) -> tuple[jax.Array, None]:
    x, targets, counted = part
    return total + jnp.sum(cross_entropy(x @ head, targets), where=counted), None

  by_part = jax.tree.map(
    lambda y: y.reshape(y.shape[0], parts, -1, *y.shape[2:]).swapaxes(0, 1), (x, targets, counted)
  )
  total, _ = jax.lax.scan(add, jnp.zeros(()), by_part)
  return total / (targets.size if counted is None else jnp.sum(counted, dtype=jnp.float32))


def rules() -> nxp.LogicalRules:
  return RULES


def mesh() -> dict[str, int]:
  return {"data": 1, "fsdp": 8, "tensor": 1}


def batch_of(config: Config, *names: str, **changes: int) -> dict[str, jax.ShapeDtypeStruct]:
  """An abstract global batch of `tokens` and of `names`, which may be `segments`.

  One token more than the sequence, for the shifted targets.
  """
  config = dataclasses.replace(config, **changes)
  array = jax.ShapeDtypeStruct((config.batch, config.sequence + 1), jnp.int32)
  return dict.fromkeys(("tokens", *names), array)


def batches(start: int = 0, *, split: str = "train") -> Iterator[dict[str, np.ndarray]]:
  """Random tokens: this recipe is for compiling, not for learning."""
  config = SIZES["8b"]
  draw = np.random.default_rng(start)
  while True:
    yield {"tokens": draw.integers(0, config.vocab, (config.batch, config.sequence + 1), dtype=np.int32)}


RULES = nxp.LogicalRules(
  batch=("data", "fsdp"),
  vocab="tensor",
  embed="fsdp",
  heads="tensor",
  kv_heads="tensor",
  mlp="tensor",
  layers=None,
  norm=None,
)
small = functools.partial(build, "tiny")
