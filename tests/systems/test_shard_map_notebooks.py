"""What the guide on `shard_map` tells of the UvA deep-learning notebooks and does not run itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from training import placed

GUIDE = Path(__file__).parents[2] / "guides" / "05-from-shard-map.md"


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_batch_that_is_on_no_mesh_is_not_silently_computed_eight_times(caplog):
  def layer():
    return nnx.Linear(64, 64, rngs=nnx.Rngs(0))

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
  def noisy(model, batch):
    return (model(jax.vmap(lambda key: jax.random.normal(key, (4,)))(batch)) ** 2).mean()

  plan = nxp.plan(
    lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
    nxp.make_mesh(data=8),
    nxp.replicate(),
    optimizer=optax.sgd(0.1),
  )
  lowered = nxp.train_step(noisy).lower(plan, batch=jax.ShapeDtypeStruct((16,), jax.random.key(0).dtype))
  assert "sharding" in lowered.as_text()


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
  flags = ["--xla_gpu_enable_triton_softmax_fusion=true", "--xla_gpu_enable_async_collectives=true"]
  result = accepted(flags)
  assert result.returncode != 0
  assert f"Unknown flags in XLA_FLAGS: {' '.join(flags)}" in result.stderr
