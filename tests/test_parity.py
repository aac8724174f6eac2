"""Float32 training on every layout equals one device: the loss of each step and the norm of each gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel import testing
from nnx_parallel.testing import assert_layout, assert_same_training

VOCAB, WIDTH, HEADS, LENGTH, STEPS = 32, 16, 4, 8, 20


def linear(rngs, size_in, size_out, names):
  return nnx.Linear(size_in, size_out, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": names})


class Block(nnx.Module):
  """Attention with one kernel for query, key and value, then two layers."""

  def __init__(self, rngs):
    self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
    self.qkv = linear(rngs, WIDTH, 3 * WIDTH, ("embed", "heads"))
    self.out = linear(rngs, WIDTH, WIDTH, ("heads", "embed"))
    self.up = linear(rngs, WIDTH, 4 * WIDTH, ("embed", "mlp"))
    self.down = linear(rngs, 4 * WIDTH, WIDTH, ("mlp", "embed"))

  def __call__(self, x):
    batch, length, _ = x.shape
    heads = self.qkv(self.norm(x)).reshape(batch, length, 3, HEADS, WIDTH // HEADS)
    y = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
    x = x + self.out(y.reshape(batch, length, WIDTH))
    return x + self.down(nnx.gelu(self.up(x)))


class Transformer(nnx.Module):
  """Two blocks and an embedding that is also the output."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, embedding_metadata={"out_sharding": ("vocab", "embed")})
    self.blocks = nnx.List([Block(rngs) for _ in range(2)])

  def __call__(self, tokens):
    x = self.embed(tokens)
    for block in self.blocks:
      x = block(x)
    return self.embed.attend(x)


def loss_fn(model, tokens):
  losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
  return losses.sum(), jnp.asarray(losses.size, jnp.float32)


RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", heads="tensor", mlp="tensor", vocab="tensor")
LAYOUTS = {
  "dp": (8, 1, 1),
  "fsdp": (1, 8, 1),
  "tp": (1, 1, 8),
  "dp x fsdp": (2, 4, 1),
  "dp x tp": (4, 1, 2),
  "fsdp x tp": (1, 4, 2),
  "dp x fsdp x tp": (2, 2, 2),
}


def plan_on(layout, **options):
  data, fsdp, tensor = LAYOUTS[layout]
  mesh = nxp.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  return nxp.plan(lambda: Transformer(nnx.Rngs(0)), mesh, RULES, optimizer=tx, **options)


def batches(count=STEPS, size=16):
  rng = np.random.default_rng(0)
  start = rng.integers(VOCAB, size=(count, size, 1))
  return list(((start + np.arange(LENGTH + 1) * 3) % VOCAB).astype(np.int32))


@pytest.mark.slow
def test_twenty_steps_on_seven_layouts():
  plans = {name: plan_on(name) for name in LAYOUTS}
  runs = assert_same_training(loss_fn, plans, batches())
  assert len(runs) == 8
  losses = runs["one device"].losses
  assert losses[-1] < 0.9 * losses[0]


def test_microbatches_on_three_layouts():
  plans = {name: plan_on(name) for name in ("dp", "fsdp", "dp x fsdp x tp")}
  assert_same_training(loss_fn, plans, batches(5), microbatches=2)


def test_a_gradient_that_is_wrong_by_a_factor_is_named(monkeypatch):
  wrong = {"embed.embedding": 2.0}
  norms = testing.gradient_norms

  def on_the_mesh(loss, model, batch, **options):
    found = norms(loss, model, batch, **options)
    scale = wrong if len(batch.sharding.device_set) > 1 else {}
    return {path: norm * scale.get(path, 1.0) for path, norm in found.items()}

  monkeypatch.setattr(testing, "gradient_norms", on_the_mesh)
  with pytest.raises(AssertionError, match=r"dp: the gradient norm of embed.embedding is .*\(ratio 2\)"):
    assert_same_training(loss_fn, {"dp": plan_on("dp")}, batches(1))


def test_assert_layout_names_the_leaf():
  plan = plan_on("fsdp")
  model, optimizer = nxp.create_sharded_model(plan)
  assert_layout(plan, model, optimizer)
  model.embed.embedding.set_value(jnp.zeros((VOCAB, WIDTH)))
  with pytest.raises(AssertionError, match=r"embed.embedding: .*planned"):
    assert_layout(plan, model, optimizer)
