"""Masters, averages, skipped steps and clipping: laid out by the plan, equal to one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.core.nodes import path_str
from train import models
from train.models import RULES, Net, data, loss_fn
from training import placed


def net(dtype):
  """Parameters in a dtype; it computes in float32."""
  return Net(nnx.Rngs(0), dtype=jnp.float32, param_dtype=dtype)


def unplaced(dtype):
  with nnx.use_eager_sharding(False):
    return net(dtype)


def plan_on(name, tx, dtype=jnp.float32, **options):
  return models.plan_on(name, tx, lambda: net(dtype), **options)


def train(plan, batches, **options):
  return models.train(plan, batches, **options)[:2]


def arrays(module):
  found = models.arrays(module)
  return {path: x.astype(np.float32) for path, x in found.items() if jnp.issubdtype(x.dtype, jnp.floating)}


def assert_close(a, b, rtol=1e-5):
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_allclose(a[name], b[name], rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.slow
def test_small_updates_add_up_only_with_masters():
  def moved(tx):
    model, _ = train(plan_on("dp", tx, jnp.bfloat16), data(1) * 40)
    before = arrays(unplaced(jnp.bfloat16))
    return np.mean(arrays(model)["up.kernel"] != before["up.kernel"])

  # Adam moves every weight by its learning rate: far below the spacing of most bfloat16 weights here.
  assert moved(nxp.with_masters(optax.adam(2e-5))) > 2 * moved(optax.adam(2e-5))


def test_bytes_of_masters_and_averages():
  tx = nxp.with_masters(nxp.with_ema(optax.adam(1e-2), 0.9))
  plan = plan_on("dp", tx, jnp.bfloat16, zero=1)
  count = 16 * 32 + 32 + 32 * 16 + 16
  assert plan.bytes_per_device("model") == 2 * count
  held = 4 * 4 * count // 8 + 8  # master, average, two moments; counters
  assert plan.bytes_per_device("optimizer") == held
  model, optimizer = train(plan, data(2), gradients="scattered")
  nxp.check_layout(model, plan, optimizer=optimizer)


CLIPPED = {
  "ZeRO-1": ({"zero": 1}, {}, {}),
  "ZeRO-2 in microbatches": ({"zero": 2}, {}, {"gradients": "scattered", "microbatches": 2}),
  "Explicit": ({}, {"explicit": True}, {}),  # flax's layers do not trace there with split kernels
  "padded": ({"uneven": "pad"}, {"sizes": (2, 3, 1)}, {}),
}


@functools.cache
def clipped(layout):
  """How far each parameter moves by a clipped gradient: by global norm, and by block."""
  options, mesh, step = CLIPPED.get(layout, ({}, {"sizes": (1, 1, 1)}, {}))
  sizes = mesh.get("sizes", (2, 2, 2))
  axes = dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))
  devices = jax.devices()[: np.prod(sizes)]
  place = nxp.make_mesh(axes, devices=devices, explicit=mesh.get("explicit", False))
  moves = {}
  for name, clip in (("global", optax.clip_by_global_norm(0.05)), ("block", optax.clip_by_block_rms(2e-3))):
    tx = optax.chain(clip, optax.sgd(1.0))
    rules = RULES.replace(embed=None, mlp=None) if "explicit" in mesh else RULES
    plan = nxp.plan(lambda: net(jnp.float32), place, rules, optimizer=tx, **options)
    model, optimizer = placed(plan)
    nxp.train_step(loss_fn, **step)(model, optimizer, nxp.shard_batch(data(1)[0][:24], plan))
    before = arrays(unplaced(jnp.float32))
    after = {path_str(path): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}
    moves[name] = {key: after[key] - before[key] for key in before}
  return moves


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("layout", list(CLIPPED))
def test_clipping_is_exact(layout):
  one, many = clipped("one device"), clipped(layout)
  assert norm_of(one["global"].values()) == pytest.approx(0.05, rel=1e-4)
  assert norm_of(one["block"].values()) > 0.05
  for kind in one:
    assert_close(many[kind], one[kind], rtol=2e-6)


def norm_of(values):
  return float(np.sqrt(sum((value.astype(np.float64) ** 2).sum() for value in values)))


def test_ema_is_the_average_of_the_parameters():
  decay = 0.8
  plan = plan_on("dp x fsdp x tp", nxp.with_ema(optax.sgd(0.5), decay), zero=1)
  model, optimizer = placed(plan)
  step = nxp.train_step(loss_fn)
  expected = arrays(model)
  for batch in data():
    step(model, optimizer, nxp.shard_batch(batch, plan))
    expected = {key: decay * expected[key] + (1 - decay) * value for key, value in arrays(model).items()}
  averaged = nxp.ema_of(optimizer, model)
  assert_close(arrays(averaged), expected, rtol=1e-6)
  nxp.check_layout(averaged, plan)
  step(model, optimizer, nxp.shard_batch(data()[0], plan))
  assert_close(arrays(averaged), expected, rtol=1e-6)  # donation did not take its arrays


@pytest.mark.cases(1)
@pytest.mark.parametrize(("wrap", "dtype"), [
  (nxp.skip_nonfinite, jnp.float32), (nxp.skip_nonfinite, jnp.bfloat16),
  (lambda tx: nxp.with_masters(nxp.skip_nonfinite(tx)), jnp.bfloat16),
  (lambda tx: nxp.skip_nonfinite(nxp.with_masters(tx)), jnp.bfloat16),
], ids=["float32", "bfloat16", "inside masters", "outside masters"])  # fmt: skip
def test_a_nonfinite_step_changes_nothing(wrap, dtype):
  plan = plan_on("dp x fsdp x tp", wrap(optax.adam(1e-2)), dtype)
  good, bad = data(2), data(1)[0]
  bad[5, 3] = np.nan
  kept, optimizer = train(plan, [good[0], bad, bad, good[1]])
  nxp.check_layout(kept, plan, optimizer=optimizer)
  expected, _ = train(plan, good)
  assert_close(arrays(kept), arrays(expected), rtol=1e-6)
  state = optimizer.opt_state
  state = state if hasattr(state, "total_notfinite") else state.inner
  assert int(state.total_notfinite[...]) == 2
