"""Int8 and float8 products by qwix: they are in the program, train, and equal one device."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from train.models import RULES, Net, data, loss_fn

needs_qwix = pytest.mark.skipif(importlib.util.find_spec("qwix") is None, reason="qwix is optional")


def init():
  return Net(nnx.Rngs(0))


def run(build, sizes, steps=4):
  mesh = nxp.make_mesh(
    dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), devices=jax.devices()[: np.prod(sizes)]
  )
  plan = nxp.plan(build, mesh, RULES, optimizer=optax.adam(1e-2))
  step = nxp.train_step(loss_fn)
  x = nxp.shard_batch(data()[0], plan)
  text = step.lower(plan, batch=x).as_text()
  live = nxp.create_sharded_model(plan) if steps else ()
  return [float(step(*live, x)["loss"]) for _ in range(steps)], text, plan


@needs_qwix
# qwix 0.1.8 on flax 0.12.12
@pytest.mark.filterwarnings("ignore:The 'm.iter_modules", "ignore:'.value' access")
@pytest.mark.parametrize(("dtype", "mark"), [(jnp.int8, "xi8>"), (jnp.float8_e4m3fn, "xf8E4M3FN>")])
def test_products_are_low_and_train_like_one_device(dtype, mark):
  import qwix

  rule = qwix.QtRule(module_path=".*", weight_qtype=dtype, act_qtype=dtype, bwd_qtype=dtype)

  def build():
    return qwix.quantize_model(init(), qwix.QtProvider([rule]), jnp.zeros((1, 16)))

  with jax.numpy_dtype_promotion("standard"):
    one, _, _ = run(build, (1, 1, 1))
    many, text, plan = run(build, (2, 2, 2))
    _, plain, reference = run(init, (2, 2, 2), steps=0)
  assert mark in text
  assert mark not in plain
  np.testing.assert_allclose(one, many, rtol=5e-3)
  assert many[-1] < many[0]
  assert not plan.diff(reference)


@needs_qwix
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix 0.1.8 on flax 0.12.12
def test_lora_beside_a_padded_weight_gets_its_gradients():
  """qwix finds a weight by the identity of its array, so two reads of one Variable must give one array."""
  import qwix

  x = jnp.ones((8, 8))

  def init():
    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=1.0)
    model = nnx.Sequential(nnx.Linear(8, 30, use_bias=False, rngs=nnx.Rngs(0)))
    return qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(1))

  rules = [nxp.PathRules([(r".*\.kernel", (None, "tensor"))]), nxp.replicate()]
  plan = nxp.plan(init, nxp.make_mesh(tensor=8), rules, uneven="pad")
  assert plan["layers.0.kernel"].padding == (0, 2)
  model = nxp.create_sharded_model(plan)
  grads = nnx.jit(nnx.grad(lambda m: (m(x) ** 2).mean(), argnums=nnx.DiffState(0, nnx.LoRAParam)))(model)
  assert jnp.abs(grads["layers"][0]["kernel_lora_b"][...]).max() > 0
