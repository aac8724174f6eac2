"""Layers of third-party models: found, rematerialised and scanned without an edit."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.plain import decoders, others
from training import run_steps

TOKENS = np.random.default_rng(0).integers(1, 64, (8, 13))
IMAGES = np.random.default_rng(0).normal(size=(8, 8, 8, 3)).astype(np.float32)

pytestmark = pytest.mark.usefixtures("as_users_have_it")
square = lambda model, x: (model(x) ** 2).mean()


def decoder(**sizes):
  return functools.partial(decoders.Decoder, decoders.Config(**sizes))


# A model, its input, and what becomes one scan. Which layers are found: core/test_layers.py.
MODELS = {
  "llama": (decoder(), TOKENS, "layers.0 to layers.3: one scan of 4"),
  "local and global": (decoder(windows=(4, 4, None), depth=6), TOKENS,
    "layers.0 to layers.5: one scan of 2, 3 layers each"),
  "experts": (decoder(experts=4), TOKENS, "layers.0 to layers.3: one scan of 2, 2 layers each"),
  "vit": (others.ViT, IMAGES, "block_0 to block_3: one scan of 4"),
  "convolutions": (others.ConvNet, IMAGES, "stages.1.layers.0 to stages.1.layers.2: one scan of 3"),
  "encoder and decoder": (others.EncoderDecoder, TOKENS, "decoder.0 to decoder.2: one scan of 3"),
  "statistics and dropout": (others.ResNet, IMAGES, "blocks.0 to blocks.2: one scan of 3"),
}  # fmt: skip
PATHS = {
  ("q|k|v|gate|up", "kernel"): ("embed", "mlp"), ("o|down", "kernel"): ("mlp", "embed"),
  ("query|key|value", "kernel"): ("embed", "mlp", None),
}  # fmt: skip
NAMES = nxp.LogicalRules(batch="fsdp", embed="fsdp", mlp="tensor")
MESHES = {
  "data": ({"data": 8}, nxp.presets.data_parallel()),
  "fsdp": ({"fsdp": 8}, nxp.presets.fsdp(min_size=0)),
  "fsdp x tensor": ({"fsdp": 4, "tensor": 2},
    [NAMES, nxp.PathRules([*PATHS.items()]), nxp.fsdp("fsdp", min_size=0)]),
}  # fmt: skip


def trained(name, mesh, steps=2, **options):
  """Losses, and the state after some steps."""
  kind, x, _ = MODELS[name]
  loss = decoders.loss if isinstance(kind, functools.partial) else square
  axes, rules = MESHES[mesh]
  init, tx = lambda: kind(nnx.Rngs(0)), optax.sgd(0.1)
  plan = nxp.plan(init, nxp.make_mesh(axes), rules, optimizer=tx, uneven="next")
  model, _, losses, step = run_steps(plan, loss, [x] * steps, **options)
  return losses, nxp.hosts.to_host(nnx.state(model)), step


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
  ("name", "mesh"),
  [("llama", "fsdp"), ("llama", "fsdp x tensor"), ("local and global", "fsdp"), ("experts", "fsdp x tensor"),
   ("vit", "data"), ("convolutions", "fsdp"), ("encoder and decoder", "fsdp x tensor"),
   ("statistics and dropout", "data")],
)  # fmt: skip
def test_scanned_and_recomputed_layers_train_as_written(name, mesh):
  losses, state, _ = trained(name, mesh)
  mine, after, step = trained(name, mesh, scan_layers=True, remat="full")
  assert f"{MODELS[name][-1]}; remat full" in str(step.layers)
  np.testing.assert_allclose(mine, losses, rtol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), after, state)


def test_an_evaluation_scans_layers():
  model = decoder()(nnx.Rngs(0))
  steps = [nxp.eval_step(decoders.loss), nxp.eval_step(decoders.loss, scan_layers=True, layers="layers.*")]
  plain, scanned = (float(step(model, TOKENS)["loss"]) for step in steps)
  assert scanned == pytest.approx(plain, rel=1e-6)
  assert str(steps[1].layers) == "4 x Block at layers.*\n  layers.0 to layers.3: one scan of 4"
