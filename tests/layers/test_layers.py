"""Layers of models that nobody wrote for this package: found, rematerialised and rolled without an edit."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.plain import decoders, others
from nnx_parallel.core.layers import find_layers

TOKENS = np.random.default_rng(0).integers(1, 64, (8, 13))
IMAGES = np.random.default_rng(0).normal(size=(8, 8, 8, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def as_users_have_it():
  """jax's own promotion: the models are as people write them."""
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    yield


def square(model, x):
  return (model(x) ** 2).mean()


def decoder(**sizes):
  return lambda: decoders.Decoder(decoders.Config(**sizes), nnx.Rngs(0))


MODELS = {
  "llama": (decoder(), decoders.loss, TOKENS, "4 x Block at layers.*"),
  "local and global": (
    decoder(windows=(4, 4, None), depth=6),
    decoders.loss,
    TOKENS,
    "6 x Block at layers.* (they differ in attention.window (4, None))",
  ),
  "experts": (
    decoder(experts=4),
    decoders.loss,
    TOKENS,
    "2 x Block at layers.*\n2 x Block at layers.*",
  ),
  "bert": (lambda: others.Bert(nnx.Rngs(0)), square, TOKENS, "3 x EncoderLayer at layer.*"),
  "vit": (lambda: others.ViT(nnx.Rngs(0)), square, IMAGES, "4 x EncoderLayer at block_*"),
  "convolutions": (
    lambda: others.ConvNet(nnx.Rngs(0)),
    square,
    IMAGES,
    "2 x ConvBlock at stages.0.layers.*\n3 x ConvBlock at stages.1.layers.*",
  ),
  "encoder and decoder": (
    lambda: others.EncoderDecoder(nnx.Rngs(0)),
    square,
    TOKENS,
    "3 x CrossLayer at decoder.*\n3 x EncoderLayer at encoder.*",
  ),
  "statistics and dropout": (lambda: others.ResNet(nnx.Rngs(0)), square, IMAGES, "3 x Residual at blocks.*"),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_found(name):
  init, _, _, found = MODELS[name]
  assert "\n".join(map(str, find_layers(nnx.eval_shape(init)))) == found


def trained(name, mesh, rules, **options):
  """Losses of three steps, and the state after them."""
  init, loss, x, _ = MODELS[name]
  plan = nxp.plan(init, nxp.make_mesh(mesh), rules, optimizer=optax.sgd(0.1), uneven="next")
  model, optimizer = nxp.create_sharded_model(plan)
  step, batch = nxp.train_step(loss, **options), nxp.shard_batch(x, plan)
  losses = [float(step(model, optimizer, batch)["loss"]) for _ in range(3)]
  return losses, nxp.to_host(nnx.state(model))


@pytest.mark.parametrize("name", MODELS)
def test_remat_and_rolled_layers_train_as_written(name):
  mesh, rules = (
    {"data": 2, "fsdp": 2, "tensor": 2},
    [
      nxp.LogicalRules(batch=("data", "fsdp")),
      nxp.fsdp("fsdp", min_size=0),
    ],
  )
  plain = trained(name, mesh, rules)
  for options in ({"remat": "full"}, {"roll": True}, {"roll": True, "remat": "dots", "microbatches": 2}):
    if "microbatches" in options and name == "statistics and dropout":
      continue  # statistics of half a batch are others
    losses, state = trained(name, mesh, rules, **options)
    np.testing.assert_allclose(losses, plain[0], rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), state, plain[1])
