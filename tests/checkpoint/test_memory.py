"""Peak memory of a process, as the operating system counts it."""

import os
import subprocess
import sys
import textwrap

import pytest

START = """
import pathlib, sys
import jax, numpy as np
from flax import nnx
import nnx_parallel as nxp
from jax.sharding import NamedSharding, PartitionSpec as P
from nnx_parallel.interop.safetensors import import_safetensors
import safetensors.numpy

MIB = 1 << 20
def status(field):
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def extra_peak(call):
  call(); call()  # compiles, and starts the threads
  pathlib.Path("/proc/self/clear_refs").write_text("5")
  before = status("VmRSS")
  kept = jax.block_until_ready(call())
  return (status("VmHWM") - before) // MIB

folder = pathlib.Path(sys.argv[1])
mesh = nxp.make_mesh(a=8)
layout = NamedSharding(mesh, P(None, "a"))
"""


def run(tmp_path, body):
  own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "MALLOC_ARENA_MAX": "2", "XLA_FLAGS": ""}
  command = [sys.executable, "-c", START + textwrap.dedent(body), str(tmp_path)]
  done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return list(map(int, done.stdout.split()))


@pytest.mark.slow
def test_saving_and_restoring_keep_to_the_shards_and_the_budget(tmp_path):
  body = """
    rows = NamedSharding(mesh, P("a"))
    tree = {f"w{i}": jax.device_put(np.full((2048, 2048), i, np.float32), rows) for i in range(16)}
    checkpointer = nxp.Checkpointer(folder, byte_budget=32 * MIB)
    def save():
      checkpointer.save(1, tree, overwrite=True)
    print(extra_peak(save))
    target = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout) for name, x in tree.items()}
    del tree
    print(extra_peak(lambda: checkpointer.restore(target)))
  """
  saved, restored = run(tmp_path, body)
  budget, state, slack = 32, 256, 32
  assert saved <= budget + slack
  assert restored <= state + budget + slack
