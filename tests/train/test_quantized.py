"""Low-precision products by qwix: they are in the program, train, and equal one device."""

import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from layout.models import named
from train.models import RULES, Net, data, loss_fn
from training import placed, run_steps

needs_qwix = pytest.mark.skipif(importlib.util.find_spec("qwix") is None, reason="qwix is optional")
# qwix 0.1.8 on flax 0.12.12
quiet = pytest.mark.filterwarnings("ignore:The 'm.iter_modules", "ignore:'.value' access")
init = lambda: Net(nnx.Rngs(0))


def run(build, sizes, steps=4):
  plan = planned(build, dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), RULES, tx=optax.adam(1e-2))
  step = nxp.train_step(loss_fn)
  x = nxp.shard_batch(data()[0], plan)
  text = step.lower(plan, batch=x).as_text()
  live = placed(plan) if steps else ()
  return [float(step(*live, x)["loss"]) for _ in range(steps)], text, plan


@pytest.mark.slow
@pytest.mark.cases(1)
@needs_qwix
@quiet
@pytest.mark.parametrize(("dtype", "mark"), [(jnp.int8, "xi8>"), (jnp.float8_e4m3fn, "xf8E4M3FN>")])
def test_products_are_low_and_train_like_one_device(dtype, mark):
  import qwix

  rule = qwix.QtRule(module_path=".*", weight_qtype=dtype, act_qtype=dtype, bwd_qtype=dtype)
  build = lambda: qwix.quantize_model(init(), qwix.QtProvider([rule]), jnp.zeros((1, 16)))
  with jax.numpy_dtype_promotion("standard"):
    one, _, _ = run(build, (1, 1, 1))
    many, text, plan = run(build, (2, 2, 2))
    _, plain, reference = run(init, (2, 2, 2), steps=0)
  assert mark in text
  assert mark not in plain
  np.testing.assert_allclose(one, many, rtol=5e-3)
  assert many[-1] < many[0]
  assert not plan.diff(reference)


# Blocks that share a scale: MXFP8 and MXFP4 (32 values, a power of two) and NVFP4 (16 values, an e4m3 scale).
#
# A value next to the border of two low-precision values is rounded up on one layout and down on another, if
# the layouts add in another order. The arithmetic is in float64 here, where this does not happen: every
# layout gives the losses of one device to 13 digits, and blocks of shards instead of dims would not.

SEQUENCE, WIDTH = 32, 64
BLOCKED = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor", heads="tensor")
STAGED = BLOCKED.replace(mlp=None, heads=None)
ONE = {"data": 1, "fsdp": 1, "tensor": 1}
EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}


class Block(nnx.Module):  # Attention of two heads and an MLP, in float64
  def __init__(self, rngs):
    linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs, param_dtype=jnp.float64)
    self.qkv = linear(WIDTH, 3 * WIDTH, kernel_metadata=named("embed", "heads"))
    self.out = linear(WIDTH, WIDTH, kernel_metadata=named("heads", "embed"))
    self.up = linear(WIDTH, WIDTH, kernel_metadata=named("embed", "mlp"))
    self.down = linear(WIDTH, WIDTH, kernel_metadata=named("mlp", "embed"))

  def __call__(self, x):
    batch, length, width = x.shape
    q, k, v = (part.reshape(batch, length, 2, -1) for part in jnp.split(self.qkv(x), 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.float64(np.sqrt(q.shape[-1]))
    weights = jax.nn.softmax(jnp.where(np.tril(np.ones((length, length), bool)), scores, -1e30))
    x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width))
    return x + self.down(jnp.tanh(self.up(x)))


def blocked_rule(form, path=r"layers/\d/.*"):
  """Products of a form; the backward pass of NVFP4 is not rounded: its gradients would be zero."""
  import qwix

  tile = 16 if form == "nvfp4" else 32
  backward = {}
  if form.startswith("mx"):
    tiles = {"dlhs_tile_size": tile, "drhs_tile_size": tile}
    low = {"dlhs_residual_qtype": form, "drhs_residual_qtype": form}
    backward = {"bwd_qtype": form, "additional_qt_config": tiles | low}
  return qwix.QtRule(module_path=path, weight_qtype=form, act_qtype=form, tile_size=tile, **backward)


def blocked(rules):
  """The constructor of two blocks under rules of qwix."""
  import qwix

  def init():
    rngs, x = nnx.Rngs(0), jnp.zeros((1, SEQUENCE, WIDTH), jnp.float64)
    return qwix.quantize_model(nnx.Sequential(Block(rngs), Block(rngs)), qwix.QtProvider(rules), x)

  return init


batches = lambda: [np.random.default_rng(n).normal(size=(16, SEQUENCE, WIDTH)) for n in range(2)]
squares = lambda model, x: ((model(x) - x[:, ::-1]) ** 2).mean()


def planned(build, sizes, rules=BLOCKED, *, explicit=False, tx=None, **options):
  mesh = nxp.make_mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())], explicit=explicit)
  return nxp.plan(build, mesh, rules, optimizer=tx or optax.sgd(0.3), **options)


@pytest.fixture
def wide():
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    yield


@functools.cache
def one_device(form, microbatches=1):
  plan = planned(blocked([blocked_rule(form)]), ONE)
  return run_steps(plan, squares, batches(), microbatches=microbatches).losses


LAYOUTS = {
  "data": ({"data": 8, "fsdp": 1, "tensor": 1}, {}, {}),
  "fsdp": ({"data": 1, "fsdp": 8, "tensor": 1}, {}, {}),
  "blocks straddle shards": ({"data": 1, "fsdp": 1, "tensor": 8}, {}, {}),
  "zero 2": ({"data": 4, "fsdp": 1, "tensor": 2}, {"zero": 2}, {}),
  "padded": ({"data": 1, "fsdp": 1, "tensor": 5}, {"uneven": "pad"}, {}),
  "explicit, blockwise": (EIGHT, {"explicit": True}, {"attention": 16}),
  "microbatches": (EIGHT, {}, {"microbatches": 4}),
  "scan, remat": (EIGHT, {}, {"scan_layers": True, "remat": "full"}),
  "pipeline": (
    {"data": 2, "fsdp": 2, "stage": 2},
    {"rules": STAGED},
    {"microbatches": 4, "pipeline": nxp.Pipeline("stage", order="gpipe")},
  ),
  "1F1B": (
    {"data": 4, "fsdp": 1, "stage": 2},
    {"rules": STAGED},
    {"microbatches": 4, "pipeline": nxp.Pipeline("stage", order="1f1b")},
  ),
}  # fmt: skip


@pytest.mark.cases(1)
@needs_qwix
@quiet
@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_block_formats_equal_one_device(wide, form, layout):
  sizes, planning, options = LAYOUTS[layout]
  plan = planned(blocked([blocked_rule(form)]), sizes, **planning)
  assert any(any(leaf.padding) for leaf in plan.leaves) == (layout == "padded")
  run = run_steps(plan, squares, batches(), **options)
  np.testing.assert_allclose(run.losses, one_device(form, options.get("microbatches", 1)), rtol=1e-13)
  done = {"scan, remat": "one scan of 2", "explicit, blockwise": "2 found", "pipeline": "pipeline over stage"}
  assert done.get(layout, "") in str(run.step.layers)


@pytest.mark.cases(2)
@needs_qwix
@quiet
@pytest.mark.parametrize("form", ["mxfp8", "mxfp4", "nvfp4"])
def test_a_product_is_that_of_values_rounded_in_blocks(wide, form):
  """The forms as they are defined, written here a second time."""
  import qwix

  size = 16 if form == "nvfp4" else 32
  low = jnp.float8_e4m3fn if form == "mxfp8" else jnp.float4_e2m1fn

  def rounded(x):  # in blocks along the last dim
    blocks = x.reshape(*x.shape[:-1], -1, size)
    scale = abs(blocks).max(-1, keepdims=True) / float(jnp.finfo(low).max)
    if form == "nvfp4":
      scale = scale.astype(jnp.float8_e4m3fn).astype(x.dtype)
    else:
      scale = 2.0 ** jnp.ceil(jnp.log2(scale))
    most = float(jnp.finfo(low).max)
    return ((blocks / scale).clip(-most, most).astype(low).astype(x.dtype) * scale).reshape(x.shape)

  x = jnp.asarray(batches()[0][0])
  layer = nnx.Linear(WIDTH, 8, use_bias=False, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
  quantized = qwix.quantize_model(layer, qwix.QtProvider([blocked_rule(form, path=".*")]), x)
  plain = layer(x)
  expected = rounded(x) @ rounded(layer.kernel[...].T).T
  np.testing.assert_allclose(quantized(x), expected, rtol=1e-13)
  assert 0.01 < jnp.abs(expected - plain).max() / jnp.abs(plain).max() < 0.3
