"""Models that state no shardings, on meshes with Explicit axes: what `jax.make_mesh` makes by default."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.nnx import bridge
from jax.sharding import AxisType

import nnx_parallel as nxp
from nnx_parallel.interop.families import from_config

REFERENCES = Path(__file__).parents[1] / "interop" / "references"
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {"auto": (AUTO, AUTO), "explicit": (EXPLICIT, EXPLICIT), "mixed": (EXPLICIT, AUTO)}
ON_EXPLICIT = ["explicit", "mixed"]
VOCAB, WIDTH = 32, 16


class Block(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
    self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
    self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x):
    x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
    return x + self.down(nnx.gelu(self.up(x)))


class Decoder(nnx.Module):
  """A decoder of stock layers."""

  def __init__(self, depth=2, block=Block):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
    self.blocks = nnx.List([block(rngs) for _ in range(depth)])
    self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

  def __call__(self, tokens):
    x = self.embed(tokens)
    for block in self.blocks:
      x = block(x)
    return self.head(x)


class Images(nnx.Module):
  """Convolutions, batch statistics and dropout."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.second = nnx.Conv(8, 16, (3, 3), feature_group_count=4, rngs=rngs)
    self.drop = nnx.Dropout(0.1, rngs=rngs)
    self.head = nnx.Linear(16, 10, rngs=rngs)

  def __call__(self, x):
    x = nnx.relu(self.norm(self.first(x)))
    x = nnx.relu(self.second(x))
    return self.head(self.drop(x.mean((1, 2))))


class Experts(nnx.Module):
  """A layer of experts between stock layers."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
    self.router = nnx.Linear(WIDTH, 4, rngs=rngs)
    shape, names = (4, WIDTH, 2 * WIDTH), ("expert", None, None)
    self.up = nnx.Param(jax.random.normal(rngs.params(), shape) / 4, out_sharding=names)
    self.down = nnx.Param(jax.random.normal(rngs.params(), (4, 2 * WIDTH, WIDTH)) / 4, out_sharding=names)
    self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

  def __call__(self, tokens):
    x = self.embed(tokens)
    weights = {"up": self.up[...], "down": self.down[...]}
    y, _ = nxp.parallel.experts(of_expert, weights, x, nxp.parallel.route(self.router(x), 2), capacity=4.0)
    return self.head(x + y)


def of_expert(weights, x):
  return nnx.relu(x @ weights["up"]) @ weights["down"]


class OfLinen(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(2 * WIDTH)(x))
    return nn.Dense(WIDTH)(nn.LayerNorm()(x))


def tokens(rows=16, length=8):
  return np.random.default_rng(0).integers(0, VOCAB, (rows, length))


def images():
  return np.random.default_rng(0).normal(size=(16, 8, 8, 3)).astype(np.float32)


def vectors():
  return np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def of_linen():
  return bridge.lazy_init(bridge.ToNNX(OfLinen(), rngs=nnx.Rngs(0)), vectors())


def of_family(name):
  return from_config(REFERENCES / name, nnx.Rngs(0))


def next_token(model, batch):
  logits = model(batch)
  return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:]).mean()


def squares(model, batch):
  return (model(batch).astype(jnp.float32) ** 2).mean()


FSDP = {"fsdp": 4, "tensor": 2}
SHARDED = nxp.fsdp(min_size=64)
EXPERTS = nxp.LogicalRules(expert="expert", batch="data")
LLAMA = [nxp.presets.llama(), nxp.presets.fsdp_tensor(min_size=16)]
MODELS: dict[str, Any] = {
  "decoder": (Decoder, tokens, next_token, FSDP, SHARDED),
  "images": (Images, images, squares, {"data": 2, "fsdp": 4}, SHARDED),
  "experts": (Experts, tokens, next_token, {"data": 2, "expert": 4}, EXPERTS),
  "mixtral": (lambda: of_family("mixtral"), tokens, next_token, FSDP, LLAMA),
  "qwen3": (lambda: of_family("qwen3"), tokens, next_token, FSDP, LLAMA),
  "linen": (of_linen, vectors, squares, FSDP, SHARDED),
}


def planned(name, kind, **options):
  init, batch, loss, axes, rules = MODELS[name]
  mesh = jax.make_mesh((*axes.values(),), (*axes,), axis_types=KINDS[kind])
  plan = nxp.plan(init, mesh, rules, optimizer=optax.adam(1e-2), **options)
  return plan, nxp.shard_batch(batch(), plan), loss


def trained(name, kind, zero=0, **options):
  plan, batch, loss = planned(name, kind, zero=zero)
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(loss, **options)
  losses = [float(step(model, optimizer, batch)["loss"]) for _ in range(2)]
  assert len(step.compiles) == 1
  nxp.check_layout(model, plan, optimizer=optimizer)
  return losses, step


@functools.cache
def on_auto_axes(name, options):
  return trained(name, "auto", **dict(options))[0]


def assert_parity(name, kind, **options):
  wanted = on_auto_axes(name, tuple(options.items()))
  losses, step = trained(name, kind, **options)
  np.testing.assert_allclose(losses, wanted, rtol=1e-6)
  assert wanted[0] != wanted[1]
  assert "computed on Auto axes: nothing states a sharding" in str(step.layers)
  return step


@pytest.mark.parametrize("kind", ON_EXPLICIT)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_on_auto_axes(name, kind):
  assert_parity(name, kind)


OPTIONS: dict[str, Any] = {
  "microbatches": {"microbatches": 2},
  "scattered": {"microbatches": 2, "zero": 2},
  "optimizer": {"zero": 1},
  "remat": {"remat": "full", "scan_layers": True},
  "blockwise": {"attention": 4},
  "chunks": {"loss_chunks": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_each_option_computes_what_it_does_on_auto_axes(options):
  assert_parity("decoder", "explicit", **OPTIONS[options])


def test_outputs_and_pairs_are_those_of_auto_axes():
  def loss(model, batch):
    rows = (model(batch) ** 2).mean(-1)
    return nxp.weighted(rows.sum(), len(rows)), {"rows": rows}

  found = {}
  for kind in KINDS:
    plan, batch, _ = planned("linen", kind)
    model = nxp.create_sharded_model(plan)[0]
    metrics = nxp.eval_step(loss, outputs=("rows",), pairs=True)(model, batch)
    assert metrics["rows"][0].sharding.mesh == plan.mesh
    found[kind] = jax.tree.map(np.asarray, metrics)
  for kind in ON_EXPLICIT:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found[kind], found["auto"])


def test_reports_are_those_of_auto_axes():
  """Estimates and the compiled program: bytes, products and collectives."""
  found = {}
  for kind in KINDS:
    plan, batch, loss = planned("decoder", kind)
    memory = nxp.memory_plan(plan, loss, batch, microbatches=2)
    report = nxp.compile_report(nxp.train_step(loss, microbatches=2), plan, batch=batch)
    found[kind] = str(memory).split("\n")[1:], report.peak_bytes, report.flops, report.collectives
  assert found["explicit"] == found["auto"]
  assert found["mixed"] == found["auto"]


def test_a_step_and_its_gradients_are_right_on_explicit_axes():
  plan, batch, loss = planned("decoder", "explicit")
  assert nxp.check_step(plan, None, loss, np.asarray(batch), microbatches=2)
  model, optimizer = nxp.create_sharded_model(plan)
  for active in (contextlib.nullcontext(), jax.set_mesh(plan.mesh), plan.scope()):
    with active:
      found = nxp.train_step(loss).check_gradients(model, optimizer, batch)
      assert found
      assert "by each device on its own" in str(found)


@pytest.mark.parametrize("kind", ON_EXPLICIT)
def test_fit_goes_on_from_a_checkpoint_and_counts_flops(kind, tmp_path):
  losses = {}
  for name in ("auto", kind):
    plan, batch, loss = planned("decoder", name)
    with nxp.Checkpointer(tmp_path / name) as checkpointer:
      for steps in (1, 3):
        model, optimizer = nxp.create_sharded_model(plan)
        nxp.fit(
          nxp.train_step(loss), model, optimizer, [batch] * steps, steps=steps, plan=plan,
          checkpointer=checkpointer, save_every=1, peak_flops=1e9,
        )  # fmt: skip
    losses[name] = float(nxp.eval_step(loss)(model, batch)["loss"])
  assert losses[kind] == pytest.approx(losses["auto"], rel=1e-6)


def test_scopes_in_use_and_arrays_of_the_host():
  plan, batch, loss = planned("decoder", "explicit")

  def constrained(model, batch):
    with plan.scope():
      return loss(lambda x: nxp.constrain(model(x), "batch", None, None), batch)

  wanted = on_auto_axes("decoder", ())
  for active in (contextlib.nullcontext(), jax.set_mesh(plan.mesh), plan.scope()):
    model, optimizer = nxp.create_sharded_model(plan)
    step = nxp.train_step(constrained)
    with active:
      losses = [float(step(model, optimizer, x)["loss"]) for x in (np.asarray(batch), batch)]
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)


def test_a_step_is_lowered_on_an_abstract_mesh():
  plan = nxp.plan(Decoder, nxp.abstract_mesh(FSDP, explicit=True), SHARDED, optimizer=optax.adam(1e-2))
  batch = jax.ShapeDtypeStruct((16, 8), jnp.int32)
  step = nxp.train_step(next_token, remat="full")
  assert "reshard" not in step.lower(plan, batch=batch).as_text()
  assert "computed on Auto axes" in str(step.layers)
