"""The Llama recipe: on any mesh it trains as on one device, and keeps only its part between layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks import llama
from nnx_parallel.report.memory import memory_plan
from nnx_parallel.testing import assert_same_training, with_gradient_norms

TINY = dataclasses.replace(llama.SIZES["tiny"], depth=2, compute=jnp.float32, batch=8, query_block=32)


def init():
  return llama.Llama(TINY, nnx.Rngs(0))


@pytest.mark.nightly
@pytest.mark.slow
def test_it_trains_on_three_axes_as_on_one_device():
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  optimizer = with_gradient_norms(optax.sgd(0.1))
  plan = nxp.plan(init, mesh, llama.RULES, optimizer=optimizer)
  draw = np.random.default_rng(0)
  batches = [{"tokens": draw.integers(0, TINY.vocab, (8, TINY.sequence + 1), np.int32)} for _ in range(3)]
  assert_same_training(llama.loss, {"split": plan}, batches, rtol=1e-4)


@pytest.mark.slow
def test_the_loss_by_parts_is_the_loss():
  draw = np.random.default_rng(0)
  batch = {"tokens": draw.integers(0, TINY.vocab, (8, TINY.sequence + 1), np.int32)}
  with nnx.use_eager_sharding(False):
    whole, split = (llama.Llama(dataclasses.replace(TINY, loss_chunks=n), nnx.Rngs(0)) for n in (1, 4))
  (a, grads), (b, others) = (
    nnx.jit(nnx.value_and_grad(llama.loss))(model, batch) for model in (whole, split)
  )
  assert float(a) == pytest.approx(float(b), rel=1e-6)
  for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)


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


@pytest.mark.slow
def test_what_is_kept_between_layers_is_split_over_the_tensor_axis():
  def kept(fsdp, tensor):
    plan = nxp.plan(
      init, nxp.abstract_mesh(data=1, fsdp=fsdp, tensor=tensor), llama.RULES, optimizer=optax.sgd(0.1)
    )
    return memory_plan(plan, llama.loss, llama.batch_of(TINY)).categories["saved activations"]

  whole = kept(8, 1)
  assert TINY.depth * TINY.sequence * TINY.width * 4 <= whole
  assert kept(4, 2) == pytest.approx(whole, rel=0.5)
