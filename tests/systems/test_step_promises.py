"""Promises that no single package keeps: what is restored is donated, and what cannot be donated is said."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from train.models import Noisy
from training import placed


class Layer(Noisy):  # The same, recomputed as it is written
  @nnx.remat
  def __call__(self, x):
    return super().__call__(x)


RULES = nxp.LogicalRules(batch="data", embed=None, mlp="tensor")
SIZES = {"data": 2, "tensor": 4}


def make(net=Noisy, *, explicit=False, **options):
  mesh = nxp.make_mesh(SIZES, explicit=explicit)
  plan = nxp.plan(lambda: net(nnx.Rngs(0), 8, 64), mesh, RULES, optimizer=optax.adam(1e-2), **options)
  return plan, *placed(plan)


loss_fn = lambda model, x: ((model(x) - x) ** 2).mean()


def batch_of(plan):
  return nxp.shard_batch(np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32), plan)


def buffers(*objects):
  """Where the float arrays of the objects are in memory."""
  leaves = [x for x in jax.tree.leaves(nnx.state(objects)) if x.dtype == np.float32]
  return {shard.data.unsafe_buffer_pointer() for x in leaves for shard in x.addressable_shards}


def test_the_first_step_reuses_the_buffers_after_a_restore(tmp_path):
  """A restore that leaves arrays where donation cannot take them needs twice the memory, from step 1 on."""
  plan, model, optimizer = make(zero=1)
  with nxp.Checkpointer(tmp_path / "run") as checkpoints:
    checkpoints.save(0, model, optimizer)
    model, optimizer = checkpoints.restore(plan)
  before = buffers(model, optimizer)
  step = nxp.train_step(loss_fn)
  step(model, optimizer, batch_of(plan))
  # Nearly all: XLA may give a bias a new place, as it likes.
  kept = buffers(model, optimizer) & before
  assert len(kept) > 0.8 * len(before)
  assert len(step.compiles) == 1
  memory = step.lower(model, optimizer, batch_of(plan)).compile().memory_analysis()
  held = plan.bytes_per_device("optimizer") + plan.bytes_per_device("model")
  assert memory.alias_size_in_bytes >= held - 64


@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "remat": "full"}])
def test_a_module_from_outside_is_named_where_flax_speaks_of_trace_levels(options):
  plan, model, optimizer = make(Layer)
  noise = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
  loss = lambda model, x: (noise(model(x)) ** 2).mean()
  with pytest.raises(nxp.errors.TrainError) as error:
    nxp.train_step(loss, **options)(model, optimizer, batch_of(plan))
  text = str(error.value)
  assert text.startswith("the loss function changes a Variable of noise (Dropout), which it does not get")
  assert "Cannot mutate RngCount from a different trace level" in text
  assert 'Fix: step({"model": model, "other": other}, {"model": optimizer}, batch)' in text
  with pytest.raises(nxp.errors.TrainError, match="a Variable of noise"):
    nxp.eval_step(loss)(model, batch_of(plan))


def test_the_layer_that_explicit_axes_stop_is_named():
  plan, model, optimizer = make(explicit=True)
  step = nxp.train_step(lambda model, x: loss_fn(model, jax.reshard(x, jax.P("data"))))
  with pytest.raises(nxp.errors.TrainError) as error:
    step(model, optimizer, batch_of(plan))
  text = str(error.value)
  assert text.startswith("down (Linear, line")
  assert "does not give the sharding of its result, and other operations of the model state theirs" in text
  assert "Contracting dimensions are sharded" in text
  assert "Fix: out_sharding=... for that operation too" in text
