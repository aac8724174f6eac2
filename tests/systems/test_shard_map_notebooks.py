"""Data parallelism and FSDP by hand, as the UvA deep-learning notebooks teach them, and the same without.

The numbers are those of the notebooks: local shapes, collectives on small arrays, the classifier, its specs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel.testing import assert_same_numbers, run_training, with_gradient_norms

GUIDE = Path(__file__).parents[2] / "guides" / "20-from-the-shard-map-notebooks.md"


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_sharded_product_has_the_local_blocks_of_the_notebook():
  mesh = nxp.make_mesh(i=4, j=2)
  x, w = normal(0, 192, 64), normal(1, 64, 128)
  seen = {}

  def product(x, w):
    seen.update(x=x.shape, w=w.shape)
    return x @ w

  made = jax.jit(
    jax.shard_map(product, mesh=mesh, in_specs=(P("i", None), P(None, "j")), out_specs=P("i", "j"))
  )
  out = made(x, w)
  assert seen == {"x": (48, 64), "w": (64, 64)}
  assert out.sharding.shard_shape(out.shape) == (48, 64)
  np.testing.assert_allclose(out, x @ w, rtol=1e-4, atol=1e-4)
  # The same without shard_map: places say it, and the compiler cuts the product.
  with nxp.use_rules(nxp.LogicalRules(batch="i", features="j"), mesh):
    placed = nxp.constrain(jnp.asarray(x), "batch", None), nxp.constrain(jnp.asarray(w), None, "features")
    out = jax.jit(lambda x, w: nxp.constrain(x @ w, "batch", "features"))(*placed)
  assert [a.sharding.shard_shape(a.shape) for a in placed] == [(48, 64), (64, 64)]
  np.testing.assert_allclose(out, x @ w, rtol=1e-4, atol=1e-4)


def test_normalising_over_a_split_dim_takes_pmean():
  mesh = nxp.make_mesh(i=4, j=2)
  x = normal(0, 192, 64) * 3 + 5

  def local(x):
    mean = jax.lax.pmean(x.mean(-1, keepdims=True), "j")
    var = jax.lax.pmean(((x - mean) ** 2).mean(-1, keepdims=True), "j")
    return (x - mean) / jnp.sqrt(var + 1e-6)

  by_hand = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("i", "j"), out_specs=P("i", "j")))(x)
  np.testing.assert_allclose(np.mean(by_hand, -1), 0, atol=1e-6)
  np.testing.assert_allclose(np.std(by_hand, -1), 1, rtol=1e-5)
  # A plain layer normalises over the whole dim, however it is split.
  split = jax.device_put(x, NamedSharding(mesh, P("i", "j")))
  layer = nnx.LayerNorm(64, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))
  np.testing.assert_allclose(jax.jit(layer)(split), by_hand, atol=1e-4)


def test_a_split_weight_is_gathered_for_the_product():
  mesh = nxp.make_mesh(i=4, j=2)
  x, w = normal(0, 192, 64), normal(1, 64, 128)

  def gathered(x, w):
    return x @ jax.lax.all_gather(w, "j", axis=1, tiled=True)

  specs = {"in_specs": (P("i", None), P(None, "j")), "out_specs": P("i", None)}
  out = jax.jit(jax.shard_map(gathered, mesh=mesh, check_vma=False, **specs))(x, w)
  np.testing.assert_allclose(out, x @ w, rtol=1e-4, atol=1e-4)


def test_psum_scatter_gives_the_numbers_of_the_notebook():
  mesh = nxp.make_mesh(devices=jax.devices()[:4], i=4)
  x = np.array([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 1, 2]])

  def scatter(row):
    return jax.lax.psum_scatter(row[0], "i", tiled=True)

  out = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=P("i", None), out_specs=P("i")))(x)
  assert out.tolist() == [22, 20, 12, 17]


def test_ppermute_shifts_a_ring_and_axis_index_numbers_it():
  mesh = nxp.make_mesh(devices=jax.devices()[:4], i=4)

  def shift(_):
    mine = jax.lax.axis_index("i")[None]
    return jax.lax.ppermute(mine, "i", [(n, (n + 1) % 4) for n in range(4)])

  out = jax.jit(jax.shard_map(shift, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(np.zeros(4))
  assert out.tolist() == [3, 0, 1, 2]


def test_a_key_folded_over_the_data_axis_differs_there_and_agrees_elsewhere():
  mesh = nxp.make_mesh(data=4, model=2)

  def draw(key):
    key = jax.random.fold_in(key, jax.lax.axis_index("data"))
    return jax.random.bernoulli(key, 0.5, (1, 1, 64))

  specs = {"in_specs": P(), "out_specs": P("data", "model")}
  masks = np.asarray(jax.jit(jax.shard_map(draw, mesh=mesh, check_vma=False, **specs))(jax.random.key(0)))
  np.testing.assert_array_equal(masks[:, 0], masks[:, 1])
  assert len({mask.tobytes() for mask in masks[:, 0]}) == 4


class Classifier(nnx.Module):
  """The notebooks' model: 784 -> 512 -> 10."""

  def __init__(self, rngs):
    self.input = nnx.Linear(784, 512, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)
    self.output = nnx.Linear(512, 10, rngs=rngs)

  def __call__(self, x):
    return self.output(self.dropout(nnx.silu(self.input(x))))


def init():
  return Classifier(nnx.Rngs(0))


BFLOAT16 = nxp.Precision.bfloat16(output_layers=["output"])


def loss_fn(model, batch):
  """Sums and counts, so that shards and microbatches weigh what they hold."""
  logits = model(batch["x"])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
  hits = (logits.argmax(-1) == batch["y"]).sum()
  return (losses.sum(), losses.size), {"accuracy": (hits, losses.size)}


def images(count=128):
  return {"x": normal(0, count, 784), "y": np.random.default_rng(1).integers(10, size=count).astype(np.int32)}


def test_bfloat16_inside_and_float32_logits():
  model = nxp.create_sharded_model(BFLOAT16.apply(init), nxp.make_mesh(data=8), nxp.presets.data_parallel())
  assert model.input(jnp.ones((1, 784))).dtype == jnp.bfloat16
  assert model(jnp.ones((1, 784))).dtype == jnp.float32
  assert {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}


def test_the_data_parallel_classifier():
  tx = optax.adamw(1e-3)
  rules = nxp.presets.data_parallel()
  plan = nxp.plan(BFLOAT16.apply(init), nxp.make_mesh(data=8), rules, optimizer=tx)
  model, optimizer = nxp.create_sharded_model(plan)
  assert all(leaf.copies == 8 for leaf in plan.leaves)
  batch = nxp.shard_batch(images(), plan)
  assert batch["x"].sharding.shard_shape(batch["x"].shape) == (16, 784)
  step = nxp.train_step(loss_fn, microbatches=4)
  history = [step(model, optimizer, batch) for _ in range(15)]
  assert set(history[0]) == {"loss", "accuracy"}
  assert float(history[-1]["loss"]) < 0.5 * float(history[0]["loss"])
  assert float(history[-1]["accuracy"]) > 0.9
  assert all(value.sharding.is_fully_replicated for value in history[-1].values())
  memory = step.lower(model, optimizer, batch).compile().memory_analysis()
  assert memory.alias_size_in_bytes == plan.bytes_per_device()  # the state is donated, all of it
  model.eval()
  pairs = nxp.eval_step(loss_fn, pairs=True)(model, batch)
  assert float(pairs["accuracy"][1]) == 128


SPECS = {
  "input.kernel": P("data", None),
  "input.bias": P("data"),
  "output.kernel": P("data", None),
  "output.bias": P(None),
}


def fsdp_plan(min_size=2**4, init=init, **options):
  rules = nxp.fsdp("data", min_size=min_size) if min_size is not None else nxp.fsdp("data")
  return nxp.plan(init, nxp.make_mesh(data=8), rules, **options)


def test_the_specs_of_the_fsdp_notebook():
  plan = fsdp_plan()
  assert {path: plan[path].spec for path in SPECS} == SPECS
  assert plan["output.bias"].decision.reason == "10 elements, at most min_size=16"
  # With the default of 2**18, only the first kernel (401,408 elements) is worth it.
  plan = fsdp_plan(None)
  assert plan["input.kernel"].spec == P("data", None)
  for path in ("input.bias", "output.kernel", "output.bias"):
    assert plan[path].copies == 8
    assert "at most min_size=262144" in plan[path].decision.reason


def test_every_reason_to_stay_whole_is_said():
  class Odd(nnx.Module):
    def __init__(self, rngs):
      names = {"out_sharding": (None, "data")}
      self.split = nnx.Linear(64, 64, rngs=rngs, kernel_metadata=names)
      self.odd = nnx.Linear(63, 65, use_bias=False, rngs=rngs)

  plan = fsdp_plan(init=lambda: Odd(nnx.Rngs(0)))
  assert "axis 'data' is already used" in plan.explain("split.kernel")
  assert plan["odd.kernel"].decision.reason == "no dim of (63, 65) divides by 8 ('data')"


def test_the_optimizer_follows_and_each_device_holds_an_eighth():
  plan = fsdp_plan(optimizer=optax.adamw(1e-3))
  for path, spec in SPECS.items():
    for moment in ("mu", "nu"):
      assert plan[f"optimizer/opt_state.0.{moment}.{path}"].spec == spec
  model, optimizer = nxp.create_sharded_model(plan)
  nxp.train_step(loss_fn, microbatches=4)(model, optimizer, nxp.shard_batch(images(), plan))
  nxp.check_layout(model, plan, optimizer=optimizer)
  held = plan.num_parameters() - 10
  # Parameters and two moments in float32; the small bias whole; counters and the dropout's key besides.
  rest = sum(leaf.bytes_per_device for leaf in plan.leaves if leaf.copies == 8)
  assert plan.bytes_per_device() - rest == 3 * 4 * held // 8


def test_data_parallel_and_fsdp_train_like_one_device_with_dropout():
  """Means over `data` for what is whole, scattered means for what is split: the gradients are the same."""
  tx = with_gradient_norms(optax.adamw(1e-3))
  batches = [images()] * 4
  alone = nxp.plan(init, nxp.make_mesh(data=1, devices=jax.devices()[:1]), nxp.replicate(), optimizer=tx)
  one = run_training(alone, loss_fn, batches)
  dp = nxp.plan(init, nxp.make_mesh(data=8), nxp.replicate(), optimizer=tx)
  assert_same_numbers("data parallel", one, run_training(dp, loss_fn, batches))
  assert_same_numbers("fsdp", one, run_training(fsdp_plan(optimizer=tx), loss_fn, batches))


def test_one_line_makes_a_module_data_parallel():
  net = nxp.create_sharded_model(init, nxp.make_mesh(data=8), nxp.presets.data_parallel())
  assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(nnx.state(net, nnx.Param)))
  assert net.input.kernel.get_value().sharding.device_set == set(jax.devices())


def test_a_batch_that_is_on_no_mesh_is_not_silently_computed_eight_times(caplog):
  def layer():
    return nnx.Linear(64, 64, rngs=nnx.Rngs(0))

  plan = nxp.plan(layer, nxp.make_mesh(data=8), nxp.replicate(), optimizer=optax.sgd(0.1))
  model, optimizer = nxp.create_sharded_model(plan)
  step, batch = nxp.train_step(lambda model, batch: (model(batch["x"]) ** 2).mean()), {"x": normal(0, 64, 64)}
  step(model, optimizer, nxp.shard_batch(batch, plan))
  assert not caplog.records
  step(model, optimizer, batch)
  assert "batch['x'] is on no mesh, so every device computes all of its examples" in caplog.text
  assert "nxp.shard_batch(batch, plan)" in caplog.text
  flops = [
    step.lower(model, optimizer, b).compile().cost_analysis()["flops"]
    for b in (batch, nxp.shard_batch(batch, plan))
  ]
  assert flops[0] > 3 * flops[1]


def gpu_flags():
  """The flags that the guide lists for NVIDIA GPUs."""
  return re.findall(r"^(--xla_gpu\S+)$", GUIDE.read_text(), re.MULTILINE)


def accepted(flags):
  code = "import jax; jax.devices()"
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
  return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_this_xla_knows_the_flags_of_the_guide():
  flags = gpu_flags()
  assert len(flags) >= 4
  result = accepted(flags)
  assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_two_flags_of_the_notebooks_are_gone():
  for flag in ("--xla_gpu_enable_triton_softmax_fusion=true", "--xla_gpu_enable_async_collectives=true"):
    result = accepted([flag])
    assert result.returncode != 0
    assert f"Unknown flag in XLA_FLAGS: {flag}" in result.stderr
