"""No whole parameter anywhere: temporaries from the compiler, resident memory from the kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.create import slices

KERNEL = 1024 * 1024 * 4


def layers(depth: int) -> nnx.List:
  rngs = nnx.Rngs(0)
  return nnx.List(nnx.Linear(1024, 1024, use_bias=False, rngs=rngs) for _ in range(depth))


@pytest.mark.parametrize("explicit", [False, True])
def test_temporaries_are_those_of_one_shard(explicit, monkeypatch):
  programs = []

  def record(*arguments: object) -> jax.stages.Lowered:
    programs.append(lower(*arguments))
    return programs[-1]

  lower = slices.lower_slice
  monkeypatch.setattr(slices, "lower_slice", record)
  mesh = nxp.make_mesh(fsdp=4, tensor=2, explicit=explicit)
  plan = nxp.plan(
    lambda: layers(3), mesh, nxp.fsdp(("fsdp", "tensor"), min_size=0), optimizer=optax.adam(1e-3)
  )
  nxp.create_sharded_model(plan)
  memory = [program.compile().memory_analysis() for program in programs]
  assert sorted(m.output_size_in_bytes for m in memory) == [KERNEL // 8] * 2
  # Bits, uniform numbers and their error function are alive together: three shards, not one whole kernel.
  assert max(m.temp_size_in_bytes for m in memory) < 3.2 * KERNEL / 8


SCRIPT = """
import json
from pathlib import Path
import jax
import nnx_parallel as nxp
from create.test_memory import layers

def peak():
  lines = Path("/proc/self/status").read_text().splitlines()
  return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

mesh = nxp.make_mesh(fsdp=8)
plan = lambda depth: nxp.plan(lambda: layers(depth), mesh, nxp.fsdp(min_size=0))
del_me = nxp.create_sharded_model(plan(2))  # what compiling needs is there before anything is measured
del del_me
Path("/proc/self/clear_refs").write_text("5")
before = peak()
model = nxp.create_sharded_model(plan(64))
print(json.dumps({"grown": peak() - before, "bytes": plan(64).bytes_per_device() * 8}))
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to reset the peak")
def test_resident_memory_grows_by_what_is_created():
  paths = os.pathsep.join(path for path in sys.path if path)
  environment = {**os.environ, "PYTHONPATH": paths, "MALLOC_ARENA_MAX": "2"}
  done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found["bytes"] == 64 * KERNEL
  assert found["grown"] < 1.15 * found["bytes"]
