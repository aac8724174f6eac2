"""One transformer over products of mesh axes, against one device; `benchmarks/together.py` runs them all."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx_parallel as nxp
from benchmarks import together
from benchmarks.parity import differences
from benchmarks.together import DENSE, SPARSE, Runs

pytestmark = [pytest.mark.usefixtures("compiled_here"), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
STEPS = 4
PART = (
  (True, {"data": 2, "expert": 2, "stage": 2}),  # the case of CI: experts in a pipeline were wrong
  (False, {"fsdp": 2, "context": 2, "tensor": 2}),
  (False, {"fsdp": 2, "tensor": 2, "stage": 2}),
  (True, {"context": 2, "tensor": 2, "expert": 2}),
  (False, {"data": 2, "context": 2, "stage": 2}),
  (True, {"data": 2, "expert": 4}),
)
SIXTEEN = {"context": 2, "tensor": 2, "expert": 2, "stage": 2}

runs = functools.cache(Runs)


@pytest.fixture(autouse=True)
def two_layers(monkeypatch):
  """One on each stage: the benchmark has four."""
  monkeypatch.setattr(together, "CONFIG", dataclasses.replace(together.CONFIG, depth=2))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("sparse", "sizes"), PART, ids=str)
def test_steps_equal_one_device(sparse, sizes):
  assert sizes in (SPARSE if sparse else DENSE)
  one = runs(sparse, STEPS)
  assert max(differences(one.one, one.run(sizes))) <= 1e-5


@pytest.mark.nightly
def test_four_axes_on_sixteen_devices():
  assert SIXTEEN in SPARSE
  program = f"""
import jax
jax.config.update("jax_num_cpu_devices", 16)
from benchmarks.parity import differences
from benchmarks.together import Runs
runs = Runs(True, {STEPS})
print(len(jax.devices()), max(differences(runs.one, runs.run({SIXTEEN}))) <= 1e-5)
"""
  flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
  variables = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": " ".join(flags)}
  variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # see `compiled_here`
  done = subprocess.run(
    [sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=280
  )
  assert done.stdout == "16 True\n", done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["ring", "ulysses"])
def test_context_attention_in_a_pipeline(how):
  attend = nxp.parallel.context_attention(causal=True, how=how, block=4)
  weights = jax.random.normal(jax.random.key(0), (4, 3, 8, 8)) / 8
  x = jax.random.normal(jax.random.key(1), (4, 16, 8))

  def layer(w, x):
    q, k, v = (x @ m for m in w)
    return x + attend(*(y.reshape(*y.shape[:2], 2, 4) for y in (q, k, v))).reshape(x.shape)

  def one(weights, x):
    return (jax.lax.scan(lambda x, w: (layer(w, x), None), x, weights)[0] ** 2).sum()

  def piped(weights, x):
    return (nxp.parallel.pipeline(layer, weights, x, microbatches=2) ** 2).sum()

  wanted = jax.value_and_grad(one, (0, 1))(weights, x)
  with jax.set_mesh(nxp.make_mesh(data=2, context=2, stage=2)):
    found = jax.jit(jax.value_and_grad(piped, (0, 1)))(weights, x)
  assert jnp.allclose(found[0], wanted[0], rtol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found[1], wanted[1])
