"""The Llama recipe: on any mesh it trains as on one device, and keeps only its part between layers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import llama

TINY = dataclasses.replace(llama.SIZES["tiny"], depth=2, compute=jnp.float32, batch=8, query_block=32)


@pytest.mark.slow
def test_documents_packed_in_one_sequence_have_the_loss_that_they_have_alone():
  with nnx.use_eager_sharding(False):
    model = llama.Llama(dataclasses.replace(TINY, loss_chunks=4), nnx.Rngs(0))
    alone = llama.Llama(TINY, nnx.Rngs(0))
  first, second = np.split(np.random.default_rng(0).integers(0, TINY.vocab, (1, 60), np.int32), [20], axis=1)
  tokens = np.concatenate([first, second, np.zeros((1, 5), np.int32)], axis=1)
  segments = np.repeat([[1, 2, 0]], [20, 40, 5], axis=1)
  packed = llama.loss(model, {"tokens": tokens, "segments": segments})
  separate = [float(llama.loss(alone, {"tokens": x})) for x in (first, second)]
  assert float(packed) == pytest.approx((19 * separate[0] + 39 * separate[1]) / 58, rel=1e-5)
