"""Several models and optimizers in one step, parts of a model, and what is no module."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from checkpoint.runs import assert_same
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.errors import CheckpointError


class Adapted(nnx.Module):
  def __init__(self, seed):
    rngs = nnx.Rngs(seed)
    self.base = nnx.Linear(4, 4, rngs=rngs)
    self.lora = nnx.LoRA(4, 2, 4, base_module=self.base, rngs=rngs)
    self.lora.lora_b[...] = self.lora.lora_b[...] + seed


def linear(seed):
  return nnx.Linear(4, 4, rngs=nnx.Rngs(seed))


def adam(model, wrt=nnx.Param):
  return nnx.Optimizer(model, optax.adam(1e-2), wrt=wrt)


def states(tree):
  return [nnx.state(node) for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Pytree))]


def assert_equal(found, wanted):
  for one, other in zip(states(found), states(wanted), strict=True):
    assert_same(nnx.to_pure_dict(one), nnx.to_pure_dict(other))


@pytest.mark.parametrize("pack", [tuple, lambda p: {"d": p[0], "g": p[1]}, lambda p: {"d": [*p]}])
def test_several_models_and_optimizers(tmp_path, pack):
  models, others = ([linear(seed), linear(seed + 1)] for seed in (0, 5))
  optimizers, fresh = ([adam(model) for model in both] for both in (models, others))
  for model, optimizer in zip(models, optimizers, strict=True):
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, pack(models), pack(optimizers))
  target = pack(others), pack(fresh)
  found = checkpointer.restore(target)
  assert_equal(found, (pack(models), pack(optimizers)))
  assert states(others)[0]["kernel"][...] is states(found[0])[0]["kernel"][...]  # filled in place
  again = pack([linear(8), linear(9)])
  assert_equal(checkpointer.restore(again, optimizer="drop"), pack(models))


def test_a_model_that_is_a_tuple_of_two_is_no_pair(tmp_path):
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, (linear(0), linear(1)))
  assert_equal(checkpointer.restore((linear(2), linear(3))), (linear(0), linear(1)))
  tree = [np.ones(3, np.float32), {"m": np.zeros(2, np.float32)}]
  checkpointer.save(2, tuple(tree), {"mu": tree[0]})
  assert_same(checkpointer.restore(tuple(tree), optimizer="drop"), tuple(tree))


def test_adapters_alone_are_saved_and_restored_onto_another_base(tmp_path):
  model, other = Adapted(1), Adapted(2)
  optimizer, fresh = adam(model, nnx.LoRAParam), adam(other, nnx.LoRAParam)
  optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.LoRAParam)))
  base = np.asarray(other.base.kernel[...])
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, model, optimizer, only=nnx.LoRAParam)
  assert sorted(checkpointer.metadata().items["model"].leaves) == ["lora.lora_a", "lora.lora_b"]
  with pytest.raises(CheckpointError, match=r"missing  model/base\.kernel"):
    checkpointer.restore((other, fresh))
  diff = checkpointer.diff((other, fresh), only=nnx.LoRAParam)
  assert diff.fits
  assert "base.kernel" in diff.skipped
  checkpointer.restore((other, fresh), only=nnx.LoRAParam)
  np.testing.assert_array_equal(other.base.kernel[...], base)
  np.testing.assert_array_equal(other.lora.lora_a[...], model.lora.lora_a[...])
  assert_equal(fresh, optimizer)
  with pytest.raises(CheckpointError, match=r"chooses no leaf of the model\.\n  its leaves are of"):
    checkpointer.save(2, model, only=nnx.BatchStat)
  with pytest.raises(CheckpointError, match=r"names no leaf of the model: \['nothing'\]"):
    checkpointer.save(2, model, only=["nothing"])
  for call in (lambda: checkpointer.save(2, model, only=[]), lambda: checkpointer.restore(other, only=[])):
    with pytest.raises(CheckpointError, match=r"only=\[\] chooses no leaf"):
      call()


def test_states_are_saved_and_restored_into_their_modules(tmp_path):
  model, other = Adapted(1), Adapted(2)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, nnx.state(model))
  assert_equal(checkpointer.restore(other), model)
  checkpointer.save(2, nnx.state(model, nnx.LoRAParam), adam(model, nnx.LoRAParam))
  third = Adapted(3)
  checkpointer.restore(nnx.state(third, nnx.LoRAParam), optimizer="drop")
  np.testing.assert_array_equal(third.lora.lora_a[...], model.lora.lora_a[...])
  pure = nnx.state(model, nnx.LoRAParam)
  pure = nnx.from_flat_state([(path, leaf.get_value()) for path, leaf in nnx.to_flat_state(pure)])
  found = checkpointer.restore(jax.tree.map(jnp.zeros_like, pure), optimizer="drop")
  assert_same(nnx.to_pure_dict(found), nnx.to_pure_dict(pure))


@pytest.mark.parametrize("model", [np.arange(6.0, dtype=np.float32), nnx.Param(jnp.ones((2, 3)))], ids=type)
def test_a_single_array_is_a_tree_too(tmp_path, model):
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, model, extra={"ema": np.arange(3)})
  wanted = np.asarray(model)
  target = nnx.Param(jnp.zeros((2, 3))) if isinstance(model, nnx.Param) else np.zeros(6, np.float32)
  np.testing.assert_array_equal(checkpointer.restore(target), wanted, strict=True)
  np.testing.assert_array_equal(checkpointer.restore(as_numpy=True)["model"][""], wanted)
  np.testing.assert_array_equal(checkpointer.restore_extra("ema", np.zeros(3, int)), np.arange(3))
  assert checkpointer.verify() == {}


@pytest.mark.parametrize("pack", [lambda p: dict(zip(("actor", "target"), p, strict=True)), tuple])
def test_several_models_move_to_another_mesh_by_their_plans(tmp_path, pack):
  def plans(**axes):
    mesh = nxp.make_mesh(**axes, devices=jax.devices()[: max(axes.values())])
    made = lambda seed, tx: nxp.plan(lambda: linear(seed), mesh, nxp.fsdp(min_size=4), optimizer=tx)
    return made(0, optax.adam(1e-2)), made(1, None)

  actor, target = plans(fsdp=4)
  model, optimizer = nxp.create_sharded_model(actor)
  other = nxp.create_sharded_model(target)
  checkpointer = Checkpointer(tmp_path)
  models, optimizers = pack([model, other]), {"actor": optimizer}
  optimizers = optimizers if isinstance(models, dict) else (optimizer, None)
  checkpointer.save(1, models, optimizers)
  moved = pack(plans(fsdp=2))
  assert "fits" in str(checkpointer.diff(moved))
  found, updates = checkpointer.restore(moved)
  assert_equal((found, updates), (models, optimizers))
  assert type(found) is type(models)
  assert type(updates) is type(optimizers)
  assert {len(x.sharding.device_set) for x in jax.tree.leaves(nnx.state(found))} == {2}
  assert_equal(checkpointer.restore(moved, optimizer="drop"), models)
  mixed = pack([moved[0] if isinstance(moved, tuple) else moved["actor"], other])
  with pytest.raises(CheckpointError, match=r"a plan beside other targets: 1 of 2 .*\n  Fix: plans alone"):
    checkpointer.restore(mixed)


def test_another_optimizer_than_was_saved_may_be_made_anew(tmp_path):
  plan = lambda tx: nxp.plan(lambda: linear(0), nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=4), optimizer=tx)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, *nxp.create_sharded_model(plan(optax.adam(1e-2))))
  for other in (optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)):
    live = nxp.create_sharded_model(plan(other))
    for target in (plan(other), live):
      with pytest.raises(CheckpointError, match="Fix: another optimizer was saved") as error:
        checkpointer.restore(target)
    assert 'restore(plan, optimizer="fresh")' in str(error.value)
    checkpointer.restore(plan(other), optimizer="fresh")
    checkpointer.restore(live[0], optimizer="drop")
