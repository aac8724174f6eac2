"""One policy sets the dtypes of any module, in the plan and in what is created."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from training import placed

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


@pytest.fixture(autouse=True)
def standard_promotion():
  """jax.nn.dot_product_attention promotes bfloat16 to float32 itself, which strict promotion refuses."""
  with jax.numpy_dtype_promotion("standard"):
    yield


class Model(nnx.Module):  # Every kind of layer that has dtypes, some with a choice of their own
  def __init__(self, rngs, rate=0.0):
    self.embed = nnx.Embed(32, 16, rngs=rngs)
    self.conv = nnx.Conv(16, 16, (3,), rngs=rngs)
    self.norm = nnx.LayerNorm(16, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(
      num_heads=2, in_features=16, dropout_rate=rate, decode=False, rngs=rngs
    )
    self.mix = nnx.Einsum("abc,cd->abd", (16, 16), (16,), rngs=rngs)
    self.blocks = nnx.List([nnx.LinearGeneral(16, 16, dtype=jnp.float16, rngs=rngs)])
    self.scale = nnx.Param(jnp.ones((16,)))
    self.steps = nnx.Param(jnp.zeros((2,), jnp.int32))
    self.average = nnx.BatchStat(jnp.zeros((16,)))
    self.head = nnx.Linear(16, 32, rngs=rngs)

  def __call__(self, tokens):
    x = self.conv(self.embed(tokens))
    x = x + self.attention(self.norm(x))
    return self.head(self.blocks[0](self.mix(x)))


init = lambda: Model(nnx.Rngs(0))


def loss_fn(model, tokens):
  logits = model(tokens).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def tokens(steps=3):
  return [np.random.default_rng(i).integers(0, 32, (16, 8), dtype=np.int32) for i in range(steps)]


def test_every_layer_gets_its_dtypes():
  module = nxp.Precision.bfloat16_parameters(output_layers=["head"]).apply(init)()
  for layer in (module.embed, module.conv, module.attention, module.attention.query, module.mix):
    assert (layer.dtype, layer.param_dtype) == (BF16, BF16)
  assert module.blocks[0].dtype == BF16
  assert (module.norm.dtype, module.norm.scale.dtype, module.norm.bias.dtype) == (F32, F32, F32)
  assert (module.head.dtype, module.head.kernel.dtype) == (F32, BF16)
  assert module.scale.dtype == module.embed.embedding.dtype == BF16
  assert (module.steps.dtype, module.average.dtype) == (jnp.int32, F32)
  assert module(tokens()[0]).dtype == F32


def test_bfloat16_computes_low_and_keeps_parameters():
  module, plain = nxp.Precision.bfloat16().apply(init)(), init()
  text = jax.jit(module).lower(tokens()[0]).as_text()
  operands = re.findall(r"stablehlo\.(?:dot_general|convolution).* : \((.*)\) ->", text)
  assert len(operands) >= 8
  assert all(both.count("bf16") == 2 for both in operands), operands
  flat = [nnx.to_flat_state(nnx.state(x)) for x in (module, plain)]
  for (path, a), (_, b) in zip(*flat, strict=True):
    if jnp.issubdtype(b.dtype, jnp.floating):
      np.testing.assert_array_equal(a.get_value(), b.get_value(), err_msg=str(path))


def test_bad_policies():
  with pytest.raises(nxp.errors.TrainError, match="compute=int8 is not a floating dtype"):
    nxp.Precision(compute=jnp.int8)
  with pytest.raises(nxp.errors.TrainError, match="parameters in float32 need no float32 masters"):
    nxp.Precision(masters=True)
  build = nxp.Precision.bfloat16(output_layers=["haed"]).apply(init)
  with pytest.raises(nxp.errors.TrainError, match=r"(?s)\['haed'\] match no layer of Model.*head"):
    build()


@pytest.mark.parametrize(("dtype", "mark"), [(jnp.bfloat16, "bf16"), (jnp.float32, "f32")])
def test_the_dtype_in_which_replicas_sum_gradients(dtype, mark):
  init = lambda: nnx.Linear(24, 40, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  loss_fn = lambda model, x: (model(x).astype(jnp.float32) ** 2).mean()
  policy = nxp.Precision(reduction=dtype)
  assert f"reduction {jnp.dtype(dtype)}" in str(policy)
  plan = nxp.plan(init, nxp.make_mesh(data=8), nxp.replicate(), optimizer=optax.sgd(0.1))
  x = nxp.shard_batch(np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32), plan)
  step = nxp.train_step(loss_fn, reduction=policy.reduction)
  text = step.lower(plan, batch=x).as_text()
  reduced = [
    line for line in text.splitlines() if "tensor<24x40x" in line and "->" in line and "}) :" in line
  ]
  assert reduced
  assert all(f"(tensor<24x40x{mark}>) -> tensor<24x40x{mark}>" in line for line in reduced)
  model, optimizer = placed(plan)
  step(model, optimizer, x)
  assert step.reduction == f"once, after the scan, over data, in {jnp.dtype(dtype)}"
  reference, other = placed(plan)
  nxp.train_step(loss_fn)(reference, other, x)
  np.testing.assert_allclose(model.kernel[...], reference.kernel[...], rtol=2e-2, atol=1e-3)
  whole = jax.device_put(x, jax.NamedSharding(plan.mesh, jax.P()))
  with pytest.raises(nxp.errors.TrainError, match=r"(?s)cannot be honoured.*no mesh axis splits"):
    step(model, optimizer, whole)  # the program of the batch before is not this one's
  split = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=optax.sgd(0.1))
  with pytest.raises(nxp.errors.TrainError, match=r"cannot be honoured: XLA places the reductions"):
    step.lower(split, batch=nxp.shard_batch(np.ones((16, 24), np.float32), split))
