"""Models that state no shardings, on meshes with Explicit axes: their losses against those on Auto axes.

`jax.make_mesh` makes Explicit axes since jax 0.9, and layers of flax do not give the shardings of their
results there. A step of the toolkit computes such a model on Auto axes.
`tests/systems/test_explicit_axes.py` runs the same models, and more than train steps.
"""

from __future__ import annotations

import functools
import os
from typing import Any

if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["NPROC"] = "32"
  os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # of LLVM: half of the time
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.nnx import bridge
from jax.sharding import AxisType

import nnx_parallel as nxp
from benchmarks.harness import ROOT, Record
from nnx_parallel.interop.families import from_config

REFERENCES = ROOT / "tests" / "interop" / "references"
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {"auto": (AUTO, AUTO), "explicit": (EXPLICIT, EXPLICIT), "mixed": (EXPLICIT, AUTO)}
VOCAB, WIDTH, STEPS = 32, 16, 3


class Block(nnx.Module):
  """A layer of the decoder."""

  def __init__(self, rngs: nnx.Rngs):
    self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
    self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
    self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
    return x + self.down(nnx.gelu(self.up(x)))


class Decoder(nnx.Module):
  """A decoder of stock layers."""

  def __init__(self, depth: int = 2):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
    self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
    self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.embed(tokens)
    for block in self.blocks:
      x = block(x)
    return self.head(x)


class Images(nnx.Module):
  """Convolutions, batch statistics and dropout."""

  def __init__(self) -> None:
    rngs = nnx.Rngs(0)
    self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.second = nnx.Conv(8, 16, (3, 3), feature_group_count=4, rngs=rngs)
    self.drop = nnx.Dropout(0.1, rngs=rngs)
    self.head = nnx.Linear(16, 10, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = nnx.relu(self.norm(self.first(x)))
    x = nnx.relu(self.second(x))
    return self.head(self.drop(x.mean((1, 2))))


RELU_EXPERTS = functools.partial(nxp.parallel.mlp_experts, activation=nnx.relu)


class Experts(nnx.Module):
  """A layer of experts between stock layers."""

  def __init__(self) -> None:
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
    self.router = nnx.Linear(WIDTH, 4, rngs=rngs)
    shape, names = (4, WIDTH, 2 * WIDTH), ("expert", None, None)
    self.up = nnx.Param(jax.random.normal(rngs.params(), shape) / 4, out_sharding=names)
    self.down = nnx.Param(jax.random.normal(rngs.params(), (4, 2 * WIDTH, WIDTH)) / 4, out_sharding=names)
    self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.embed(tokens)
    weights = {"up": self.up[...], "down": self.down[...]}
    y, _ = nxp.parallel.experts(RELU_EXPERTS, weights, x, nxp.parallel.route(self.router(x), 2), capacity=4.0)
    return self.head(x + y)


class OfLinen(nn.Module):
  """Two layers of Linen."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = nn.relu(nn.Dense(2 * WIDTH)(x))
    return nn.Dense(WIDTH)(nn.LayerNorm()(x))


def tokens(rows: int = 16, length: int = 8) -> np.ndarray:
  return np.random.default_rng(0).integers(0, VOCAB, (rows, length))


def images() -> np.ndarray:
  return np.random.default_rng(0).normal(size=(16, 8, 8, 3)).astype(np.float32)


def vectors() -> np.ndarray:
  return np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def of_linen() -> nnx.Module:
  return bridge.lazy_init(bridge.ToNNX(OfLinen(), rngs=nnx.Rngs(0)), vectors())


def deep() -> nnx.Module:
  return Decoder(4)


def of_family(name: str) -> nnx.Module:
  return from_config(REFERENCES / name, nnx.Rngs(0))


def next_token(model: Any, batch: jax.Array) -> jax.Array:
  logits = model(batch)
  return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:]).mean()


def squares(model: Any, batch: jax.Array) -> jax.Array:
  return (model(batch).astype(jnp.float32) ** 2).mean()


FSDP = {"fsdp": 4, "tensor": 2}
SHARDED = nxp.fsdp(min_size=64)
REPLICAS = nxp.LogicalRules(batch="data")
BY_POSITION = nxp.LogicalRules(batch="data", seq="context")
EXPERTS = nxp.LogicalRules(expert="expert", batch="data")
LLAMA = [nxp.presets.llama(), nxp.presets.fsdp_tensor(min_size=16)]
MODELS: dict[str, Any] = {
  "decoder": (Decoder, tokens, next_token, FSDP, SHARDED),
  "images": (Images, images, squares, {"data": 2, "fsdp": 4}, SHARDED),
  "experts": (Experts, tokens, next_token, {"data": 2, "expert": 4}, EXPERTS),
  "mixtral": (lambda: of_family("mixtral"), tokens, next_token, FSDP, LLAMA),
  "qwen3": (lambda: of_family("qwen3"), tokens, next_token, FSDP, LLAMA),
  "linen": (of_linen, vectors, squares, FSDP, SHARDED),
  "of replicas": (Decoder, tokens, next_token, {"data": 8, "tensor": 1}, REPLICAS),
  "of parts": (Decoder, tokens, next_token, {"data": 2, "context": 4}, BY_POSITION),
  "of stages": (deep, tokens, next_token, {"data": 2, "stage": 4}, REPLICAS),
}
ALONE = ("decoder", "images", "experts", "mixtral", "qwen3", "linen")


def planned(name: str, kind: str, **options: Any) -> tuple[nxp.Plan, Any, Any]:
  """The plan of a model on axes of some types, a batch in its layout, and the loss."""
  init, batch, loss, axes, rules = MODELS[name]
  mesh = jax.make_mesh((*axes.values(),), (*axes,), axis_types=KINDS[kind])
  plan = nxp.plan(init, mesh, rules, optimizer=optax.adam(1e-2), **options)
  return plan, nxp.shard_batch(batch(), plan), loss


def trained(
  name: str, kind: str, zero: int = 0, steps: int = STEPS, **options: Any
) -> tuple[list[float], nxp.TrainStep]:
  """The losses of some steps, and the step; the layout is checked after them."""
  plan, batch, loss = planned(name, kind, zero=zero)
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(loss, **options)
  losses = [float(step(model, optimizer, batch)["loss"]) for _ in range(steps)]
  assert len(step.compiles) == 1, step.compiles
  nxp.check_layout(model, plan, optimizer=optimizer)
  return losses, step


WITH_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
  "decoder, 2 microbatches, ZeRO-2": ("decoder", {"microbatches": 2, "zero": 2}),
  "decoder, remat and scan": ("decoder", {"remat": "full", "scan_layers": True}),
  "decoder, attention by blocks": ("decoder", {"attention": 4}),
  "decoder, loss in chunks": ("decoder", {"loss_chunks": 2}),
  "decoder, ring": ("of parts", {"attention": "ring"}),
  "decoder, Ulysses": ("of parts", {"attention": "ulysses"}),
  "decoder, pipeline": ("of stages", {"pipeline": "stage", "microbatches": 4}),
  "decoder, 1F1B pipeline": (
    "of stages",
    {"pipeline": nxp.Pipeline("stage", order="1f1b"), "microbatches": 8},
  ),
  "decoder, replicas reduce once": ("of replicas", {"microbatches": 2}),
}


def main() -> None:
  """Writes the record."""
  record = Record(
    "explicit",
    f"Models that state no shardings on Explicit axes: the loss after {STEPS} steps against Auto axes",
    command="python -m benchmarks.explicit",
  )
  cases: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ALONE} | WITH_OPTIONS
  for title, (name, options) in cases.items():
    wanted = trained(name, "auto", **options)[0][-1]
    found = {kind: trained(name, kind, **options)[0][-1] - wanted for kind in KINDS if kind != "auto"}
    record.value("loss on Auto axes", wanted, "", group=title)
    record.value("difference on Explicit axes", found["explicit"], "", group=title)
    record.value("difference on mixed axes", found["mixed"], "", group=title)
    print(f"{title:44} {wanted:.6f} {found['explicit']:9.1e} {found['mixed']:9.1e}", flush=True)
  record.notes.append("Mixed: the first axis of the mesh is Explicit, and the second one is Auto.")
  record.write()


if __name__ == "__main__":
  main()
