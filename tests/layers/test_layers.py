"""Layers of third-party models: found, rematerialised and scanned without an edit."""

import functools

import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.plain import decoders, others
from nnx_parallel.core.layers import find_layers

TOKENS = np.random.default_rng(0).integers(1, 64, (8, 13))
IMAGES = np.random.default_rng(0).normal(size=(8, 8, 8, 3)).astype(np.float32)


pytestmark = pytest.mark.usefixtures("as_users_have_it")


def decoder(**sizes):
  return functools.partial(decoders.Decoder, decoders.Config(**sizes))


UNLIKE = "\n2 x Block at layers.* (unlike layers.0: mlp.down is Param float32[4,64,32])"
STAGES = "2 x ConvBlock at stages.0.layers.*\n3 x ConvBlock at stages.1.layers.*"
# A model, its input, the layers that are found, and what becomes one scan.
MODELS = {
  "llama": (decoder(), TOKENS, "4 x Block at layers.*", "layers.0 to layers.3: one scan of 4"),
  "local and global": (
    decoder(windows=(4, 4, None), depth=6),
    TOKENS,
    "6 x Block at layers.*",
    "layers.0 to layers.5: one scan of 2, 3 layers each",
  ),
  "experts": (
    decoder(experts=4),
    TOKENS,
    f"2 x Block at layers.*{UNLIKE}",
    "layers.0 to layers.3: one scan of 2, 2 layers each",
  ),
  "bert": (others.Bert, TOKENS, "3 x EncoderLayer at layer.*", "layer.0 to layer.2: one scan of 3"),
  "vit": (others.ViT, IMAGES, "4 x EncoderLayer at block_*", "block_0 to block_3: one scan of 4"),
  "convolutions": (others.ConvNet, IMAGES, STAGES, "stages.1.layers.0 to stages.1.layers.2: one scan of 3"),
  "encoder and decoder": (
    others.EncoderDecoder,
    TOKENS,
    "3 x CrossLayer at decoder.*\n3 x EncoderLayer at encoder.*",
    "decoder.0 to decoder.2: one scan of 3",
  ),
  "statistics and dropout": (
    others.ResNet,
    IMAGES,
    "3 x Residual at blocks.*",
    "blocks.0 to blocks.2: one scan of 3",
  ),
}


@pytest.mark.slow
def test_layers_are_found():
  for kind, _, found, _ in MODELS.values():
    assert "\n".join(map(str, find_layers(nnx.eval_shape(lambda kind=kind: kind(nnx.Rngs(0)))))) == found


def test_an_evaluation_scans_layers():
  model = decoder()(nnx.Rngs(0))
  steps = [nxp.eval_step(decoders.loss), nxp.eval_step(decoders.loss, scan_layers=True, layers="layers.*")]
  plain, scanned = (float(step(model, TOKENS)["loss"]) for step in steps)
  assert scanned == pytest.approx(plain, rel=1e-6)
  assert str(steps[1].layers) == "4 x Block at layers.*\n  layers.0 to layers.3: one scan of 4"
