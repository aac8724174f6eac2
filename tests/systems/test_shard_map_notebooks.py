"""What the guide on `shard_map` tells of the UvA deep-learning notebooks and does not run itself."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from training import placed


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_batch_that_is_on_no_mesh_is_not_silently_computed_eight_times(caplog):
  layer = lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0))
  plan = nxp.plan(layer, nxp.make_mesh(data=8), nxp.replicate(), optimizer=optax.sgd(0.1))
  model, optimizer = placed(plan)
  step, batch = nxp.train_step(lambda model, batch: (model(batch["x"]) ** 2).mean()), {"x": normal(0, 64, 64)}
  step(model, optimizer, batch)  # laid out as shard_batch does
  assert not caplog.records
  step(model, optimizer, nxp.shard_batch(batch, plan))
  assert len(step.compiles) == 1
  with pytest.raises(nxp.errors.ShardingError, match=r"\['x'\] has 60 examples, which 8 [\s\S]*of 56 or 64"):
    step(model, optimizer, {"x": batch["x"][:60]})
  bare = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
  bare.kernel[...], bare.bias[...] = model.kernel[...], model.bias[...]  # on a mesh, without a plan
  nxp.eval_step(lambda model, batch: (model(batch["x"]) ** 2).mean())(bare, batch)
  assert "batch['x'] is on no mesh, so every device computes all of its examples" in caplog.text
  assert "nxp.shard_batch(batch, plan)" in caplog.text
  structs = {"x": jax.ShapeDtypeStruct((64, 64), np.float32)}
  flops = [
    step.lower(model, optimizer, b).compile().cost_analysis()["flops"]
    for b in (batch, structs, nxp.shard_batch(batch, plan))
  ]
  flops.append(step.compiled(model, optimizer, structs).cost_analysis()["flops"])
  assert len({*flops}) == 1  # lowered as it is called


def test_a_batch_of_keys_may_be_abstract():
  noisy = lambda model, batch: (model(jax.vmap(lambda key: jax.random.normal(key, (4,)))(batch)) ** 2).mean()
  init = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  plan = nxp.plan(init, nxp.make_mesh(data=8), nxp.replicate(), optimizer=optax.sgd(0.1))
  lowered = nxp.train_step(noisy).lower(plan, batch=jax.ShapeDtypeStruct((16,), jax.random.key(0).dtype))
  assert "sharding" in lowered.as_text()
