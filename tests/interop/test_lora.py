"""Adapters that `add_lora` adds by path: planned, trained alone, saved, merged; in PEFT's form and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop import add_lora, merge_adapters

AXES = {"fsdp": 4, "tensor": 2}
RULES = [nxp.LogicalRules(batch="fsdp"), nxp.fsdp(min_size=256)]


class Block(nnx.Module):
  """Attention and two layers."""

  def __init__(self, rngs):
    self.attention = nnx.MultiHeadAttention(4, 32, rngs=rngs, decode=False)
    self.norm = nnx.LayerNorm(32, rngs=rngs)
    self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, use_bias=False, rngs=rngs)

  def __call__(self, x):
    x = x + self.attention(self.norm(x))
    return x + self.down(nnx.relu(self.up(x)))


class Net(nnx.Module):
  """Two blocks."""

  def __init__(self, rngs):
    self.blocks = nnx.List([Block(rngs) for _ in range(2)])

  def __call__(self, x):
    for block in self.blocks:
      x = block(x)
    return x


def base_init():
  return Net(nnx.Rngs(0))


def init(**options):
  model = base_init()
  add_lora(model, ["blocks.*.attention.*", "*.down"], rank=4, alpha=8.0, rngs=nnx.Rngs(1), **options)
  return model


X = np.random.default_rng(0).normal(size=(16, 6, 32)).astype(np.float32)


def loss_fn(model, x, y):
  return ((model(x) - y) ** 2).mean()


def outputs(model):
  return np.asarray(nnx.jit(lambda model, x: model(x))(model, jnp.asarray(X)))


def trained(plan, steps=5):
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(loss_fn)
  batch = nxp.shard_batch((X, X[:, ::-1].copy()), plan)
  losses = [float(step(model, optimizer, *batch)["loss"]) for _ in range(steps)]
  return model, optimizer, losses


def plan_of(init=init, axes=AXES, **options):
  mesh = nxp.make_mesh(axes, devices=jax.devices()[: int(np.prod([*axes.values()]))])
  return nxp.plan(init, mesh, RULES, optimizer=optax.adam(1e-2), wrt=nnx.LoRAParam, **options)


def test_adapters_by_path_change_nothing_at_first_and_keep_the_paths_of_the_weights():
  base, model = base_init(), init()
  np.testing.assert_array_equal(base(jnp.asarray(X)), model(jnp.asarray(X)))
  ours, theirs = (dict(nnx.to_flat_state(nnx.state(m, nnx.Not(nnx.LoRAParam)))) for m in (model, base))
  assert ours.keys() == theirs.keys()
  added = {
    ".".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
  }
  assert len(added) == 2 * 2 * 5
  assert added["blocks.0.attention.query.lora.lora_a"] == (32, 4)
  assert added["blocks.0.attention.out.lora.lora_b"] == (4, 32)
  assert added["blocks.1.down.lora.lora_a"] == (64, 4)
  assert isinstance(model.blocks[0].attention.query, nnx.LinearGeneral)


def test_only_adapters_are_trained_on_each_layout_as_on_one_device(tmp_path):
  alone = trained(plan_of(axes={"fsdp": 1, "tensor": 1}))[2]
  plan = plan_of()
  model, optimizer, losses = trained(plan)
  np.testing.assert_allclose(losses, alone, rtol=2e-5)
  assert losses[-1] < losses[0]
  base = nxp.create_sharded_model(base_init, nxp.make_mesh(AXES), RULES)
  frozen = nxp.hosts.to_host(nnx.state(model, nnx.Not(nnx.LoRAParam)))
  jax.tree.map(np.testing.assert_array_equal, frozen, nxp.hosts.to_host(nnx.state(base)))
  found = outputs(model)
  assert np.abs(found - outputs(base)).max() > 0.01

  with nxp.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(5, model, optimizer, only=nnx.LoRAParam)
  again = nxp.create_sharded_model(plan_of(axes={"fsdp": 2, "tensor": 1}))
  again, _ = nxp.Checkpointer(tmp_path).restore(again, only=nnx.LoRAParam)
  np.testing.assert_allclose(outputs(again), found, atol=1e-5)

  assert len(merge_adapters(base, model)) == 2 * 5
  np.testing.assert_allclose(outputs(base), found, atol=1e-4)


def test_an_adapter_computes_in_the_dtype_of_its_layer():
  layer = nnx.Linear(8, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  add_lora(layer, "*", rank=2, rngs=nnx.Rngs(1))
  assert layer.lora.lora_a.dtype == jnp.float32
  assert layer(jnp.ones((2, 8), jnp.bfloat16)).dtype == jnp.bfloat16


def test_contracted_dims_that_are_not_last():
  layer = nnx.LinearGeneral((3, 4), (5, 2), axis=(0, 2), rngs=nnx.Rngs(0))
  base = nnx.clone(layer)
  add_lora(layer, "*", rank=2, alpha=3.0, rngs=nnx.Rngs(1))
  layer.lora.lora_b[...] = jax.random.normal(jax.random.key(0), (2, 10))
  x = jax.random.normal(jax.random.key(1), (3, 7, 4))
  merge_adapters(base, layer)
  np.testing.assert_allclose(layer(x), base(x), atol=1e-5)


def test_errors():
  with pytest.raises(
    CheckpointError, match=r"\*\.gate matches no linear layer of the Net\.\n  linear layers: bl"
  ):
    add_lora(base_init(), ["*.up", "*.gate"], rank=2, rngs=nnx.Rngs(0))
  with pytest.raises(CheckpointError, match="norm matches no linear layer"):
    add_lora(base_init(), "*.norm", rank=2, rngs=nnx.Rngs(0))
  with pytest.raises(CheckpointError, match=r"blocks\.0\.down has an adapter already"):
    add_lora(init(), "*.down", rank=2, rngs=nnx.Rngs(0))
  stacked = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(nnx.Rngs(0).split(3))
  with pytest.raises(CheckpointError, match=r"no single layer: its kernel has the shape \(3, 8, 8\)"):
    add_lora(stacked, "*", rank=2, rngs=nnx.Rngs(0))
  with pytest.raises(CheckpointError, match="rank=0 is no rank"):
    add_lora(base_init(), "*.down", rank=0, rngs=nnx.Rngs(0))
