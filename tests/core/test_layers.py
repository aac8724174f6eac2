"""The layers of third-party models are found: what repeats, and what is unlike it."""

import functools

import pytest
from flax import nnx

from benchmarks.plain import decoders, others
from nnx_parallel.core.layers import find_layers


def decoder(**sizes):
  return functools.partial(decoders.Decoder, decoders.Config(**sizes))


FOUND = {
  "llama": (decoder(), ["4 x Block at layers.*"]),
  "local and global": (decoder(windows=(4, 4, None), depth=6), ["6 x Block at layers.*"]),
  "experts": (decoder(experts=4), ["2 x Block at layers.*",
    "2 x Block at layers.* (unlike layers.0: mlp.down is Param float32[4,64,32])"]),
  "bert": (others.Bert, ["3 x EncoderLayer at layer.*"]),
  "vit": (others.ViT, ["4 x EncoderLayer at block_*"]),
  "convolutions": (others.ConvNet, [f"{n} x ConvBlock at stages.{n - 2}.layers.*" for n in (2, 3)]),
  "encoder and decoder": (others.EncoderDecoder,
    ["3 x CrossLayer at decoder.*", "3 x EncoderLayer at encoder.*"]),
  "statistics and dropout": (others.ResNet, ["3 x Residual at blocks.*"]),
}  # fmt: skip


@pytest.mark.slow
def test_layers_are_found():
  for kind, found in FOUND.values():
    assert [*map(str, find_layers(nnx.eval_shape(lambda kind=kind: kind(nnx.Rngs(0)))))] == found
