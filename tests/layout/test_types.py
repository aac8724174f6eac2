"""What a type checker knows of the results: the user's own module."""

import subprocess
import sys

import pytest

PROGRAM = """
from typing import assert_type

import optax
from flax import nnx

import nnx_parallel as nxp

class Model(nnx.Module): ...

Pair = tuple[Model, nxp.ShardedOptimizer[Model]]
mesh, tx = nxp.make_mesh(fsdp=8), optax.sgd(0.1)
plan = nxp.plan(Model, mesh, nxp.fsdp())
both = nxp.plan(Model, mesh, optimizer=tx, zero=1)
assert_type(plan, nxp.Plan[Model])
assert_type(nxp.create_sharded_model(plan), Model)
assert_type(nxp.create_sharded_model(both), Pair)
assert_type(nxp.create_sharded_model(Model, mesh), Model)
assert_type(nxp.create_sharded_model(Model, mesh, nxp.fsdp(), uneven="pad"), Model)
assert_type(nxp.create_sharded_model(Model, mesh, optimizer=tx), Pair)
assert_type(nxp.reshard(Model(), plan), Model)
assert_type(nxp.from_arrays({}, both, optimizer={}), Pair)
with nxp.Checkpointer("folder") as checkpointer:
  assert_type(checkpointer.restore(both), Pair)
"""


@pytest.mark.slow
def test_a_plan_knows_the_type_of_what_is_created_from_it(tmp_path):
  pytest.importorskip("pyright")
  file = tmp_path / "program.py"
  file.write_text(PROGRAM)
  command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(file)]
  found = subprocess.run(command, capture_output=True, text=True, timeout=300)
  assert found.returncode == 0, found.stdout
