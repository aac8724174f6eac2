"""Two models as an NNX module and as plain JAX functions, and the train step a person writes for the latter.

The parameters of both have the same names, shapes and layouts, so that their compiled programs can be
compared byte by byte.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp

Arrays = dict[str, jax.Array]
Implementation = Literal["xla", "cudnn"]

LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
  "dp": ({"data": 8}, 0),
  "ZeRO-1": ({"data": 8}, 1),
  "fsdp": ({"fsdp": 8}, 0),
  "tp": ({"tensor": 8}, 0),
  "fsdp x tp": ({"fsdp": 4, "tensor": 2}, 0),
}
"""Name -> devices along each mesh axis, and the ZeRO stage."""


@dataclasses.dataclass(frozen=True)
class Job:
  """One model in both versions.

  Attributes:
    init: makes the module.
    loss: its loss, `(model, batch) -> scalar`.
    by_hand: the same for a dict of parameters by dotted path.
    batch: host arrays.
  """

  init: Callable[[], nnx.Module]
  loss: Callable[[Any, Any], jax.Array]
  by_hand: Callable[[Arrays, Arrays], jax.Array]
  batch: dict[str, np.ndarray]

  def plan(self, layout: str, tx: optax.GradientTransformation) -> nxp.Plan:
    """The plan of the module and `tx` on one of `LAYOUTS`."""
    sizes, zero = LAYOUTS[layout]
    mesh = nxp.make_mesh({"data": 1, "fsdp": 1, "tensor": 1} | sizes)
    # Tables by rows on both sides: by columns, whoever writes the step, XLA sends activations.
    rules = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor", vocab="fsdp")
    return nxp.plan(self.init, mesh, rules, optimizer=tx, zero=zero)


def step_by_hand(
  job: Job, tx: optax.GradientTransformation, parameters: Arrays, moments: Mapping[str, Any]
) -> tuple[Any, Any]:
  """The jitted, donating step with pinned layouts that a person writes without this library.

  Args:
    job: gives the loss.
    tx: AdamW.
    parameters: laid out.
    moments: the sharding of each parameter's moments.

  Returns:
    The step `(parameters, state, batch) -> (parameters, state, loss)`, and the state.
  """
  like = jax.eval_shape(tx.init, parameters)
  mesh = next(iter(moments.values())).mesh
  whole = jax.NamedSharding(mesh, jax.P())
  is_named = lambda node: isinstance(node, dict)  # noqa: E731
  layout = jax.tree.map(lambda node: dict(moments) if is_named(node) else whole, like, is_leaf=is_named)
  state = jax.jit(tx.init, out_shardings=layout)(parameters)

  def train_step(parameters: Arrays, state: Any, batch: Arrays) -> tuple[Arrays, Any, jax.Array]:
    loss, grads = jax.value_and_grad(job.by_hand)(parameters, batch)
    with jax.numpy_dtype_promotion("standard"):
      updates, state = tx.update(grads, state, parameters)
    return optax.apply_updates(parameters, updates), state, loss

  pinned = {name: array.sharding for name, array in parameters.items()}
  return jax.jit(train_step, donate_argnums=(0, 1), out_shardings=(pinned, layout, None)), state


def parameters_of(model: nnx.Module) -> Arrays:
  """Copies of a module's parameters by dotted path, in their layouts."""
  flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
  return {".".join(map(str, path)): jnp.copy(leaf.get_value()) for path, leaf in flat}


def moments_of(plan: nxp.Plan, names: Any) -> dict[str, Any]:
  """The sharding of each parameter's first moment in a plan with Adam."""
  return {name: plan[f"optimizer/opt_state.0.mu.{name}"].sharding for name in names}


def _linear(n: int, m: int, names: tuple[str, str], rngs: nnx.Rngs, *, bias: bool = False) -> nnx.Linear:
  return nnx.Linear(n, m, use_bias=bias, rngs=rngs, kernel_metadata={"out_sharding": names})


class Classifier(nnx.Module):
  """A digit from 64 pixels: two layers and SiLU."""

  def __init__(self, hidden: int):
    rngs = nnx.Rngs(0)
    self.input = _linear(64, hidden, ("embed", "mlp"), rngs, bias=True)
    self.output = nnx.Linear(hidden, 10, rngs=rngs, kernel_metadata={"out_sharding": ("mlp", None)})

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.output(nnx.silu(self.input(x)))


def classifier(hidden: int, batch: dict[str, np.ndarray]) -> Job:
  """The `digits` MLP on `pixels` (batch, 64) and `labels` (batch,)."""

  def loss(model: Classifier, batch: Arrays) -> jax.Array:
    return _nats(model(batch["pixels"]), batch["labels"])

  def by_hand(p: Arrays, batch: Arrays) -> jax.Array:
    x = jax.nn.silu(batch["pixels"] @ p["input.kernel"] + p["input.bias"][None])
    return _nats(x @ p["output.kernel"] + p["output.bias"][None], batch["labels"])

  return Job(lambda: Classifier(hidden), loss, by_hand, batch)


class Norm(nnx.Module):
  """Root mean square norm. Not flax's, which subtracts a mean of zero: XLA infers other layouts around it."""

  def __init__(self, width: int):
    self.scale = nnx.Param(jnp.ones((width,)))

  def __call__(self, x: jax.Array) -> jax.Array:
    return _norm(x, self.scale[...])


class Block(nnx.Module):
  """Causal attention and a GELU layer, each after a norm and beside a residual."""

  def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
    self.heads = heads
    self.before_attention = Norm(width)
    self.q, self.k, self.v = (_linear(width, width, ("embed", "mlp"), rngs) for _ in range(3))
    self.out = _linear(width, width, ("mlp", "embed"), rngs)
    self.before_mlp = Norm(width)
    self.up = _linear(width, 4 * width, ("embed", "mlp"), rngs)
    self.down = _linear(4 * width, width, ("mlp", "embed"), rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    y = self.before_attention(x)
    q, k, v = (_heads(layer(y), self.heads) for layer in (self.q, self.k, self.v))
    x = x + self.out(_attention(q, k, v))
    return x + self.down(nnx.gelu(self.up(self.before_mlp(x))))


class Transformer(nnx.Module):
  """Logits of the next of `vocabulary` tokens."""

  def __init__(self, vocabulary: int, width: int, heads: int, layers: int):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(vocabulary, width, rngs=rngs, embedding_metadata={"out_sharding": ("vocab", None)})
    self.layers = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
    self.norm = Norm(width)
    self.head = _linear(width, vocabulary, ("embed", "mlp"), rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.embed(tokens)
    for layer in self.layers:
      x = layer(x)
    return self.head(self.norm(x))


def transformer(
  width: int,
  heads: int,
  layers: int,
  batch: int,
  length: int,
  vocabulary: int = 256,
  *,
  attention: Implementation = "xla",
  remat: bool = False,
) -> Job:
  """A decoder on random `tokens` (batch, length + 1).

  Only the function by hand has the attention of `jax.nn.dot_product_attention`, and rematerialized blocks.
  """
  tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1)).astype(np.int32)

  def loss(model: Transformer, batch: Arrays) -> jax.Array:
    return _nats(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

  block = functools.partial(_block_by_hand, heads=heads, attention=attention)
  block = jax.checkpoint(block) if remat else block

  def by_hand(p: Arrays, batch: Arrays) -> jax.Array:
    x = jnp.take(p["embed.embedding"], batch["tokens"][:, :-1], axis=0)
    for i in range(layers):
      x = block({name: p[f"layers.{i}.{name}"] for name in _PARTS}, x)
    return _nats(_norm(x, p["norm.scale"]) @ p["head.kernel"], batch["tokens"][:, 1:])

  return Job(lambda: Transformer(vocabulary, width, heads, layers), loss, by_hand, {"tokens": tokens})


_PARTS = (
  "before_attention.scale", "q.kernel", "k.kernel", "v.kernel", "out.kernel", "before_mlp.scale",
  "up.kernel", "down.kernel",
)  # fmt: skip


def _block_by_hand(p: Arrays, x: jax.Array, heads: int, attention: Implementation) -> jax.Array:
  y = _norm(x, p["before_attention.scale"])
  q, k, v = (_heads(y @ p[f"{name}.kernel"], heads) for name in "qkv")
  x = x + _attention(q, k, v, attention) @ p["out.kernel"]
  return x + jax.nn.gelu(_norm(x, p["before_mlp.scale"]) @ p["up.kernel"]) @ p["down.kernel"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale[None, None]


def _heads(x: jax.Array, heads: int) -> jax.Array:
  return x.reshape(*x.shape[:2], heads, -1)


def _attention(
  q: jax.Array, k: jax.Array, v: jax.Array, implementation: Implementation | None = None
) -> jax.Array:
  y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
  return y.reshape(*y.shape[:2], -1)


def _nats(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
