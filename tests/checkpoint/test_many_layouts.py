"""From eight devices to one and to sixteen, between ZeRO stages, and what replicas cost on the disk."""

import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import optax
import pytest
from jax import NamedSharding, P

import nnx_parallel as nxp
from checkpoint.runs import MESHES, Net, assert_same, chunks_of, make_plan
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.core.nodes import value_of, variables
from processes import run_two

SIXTEEN = """
  import sys
  import jax
  import nnx_parallel as nxp
  import optax
  from checkpoint.runs import Net
  from nnx_parallel.core.nodes import value_of, variables

  source, goal = sys.argv[1:]
  mesh = nxp.make_mesh(data=2, fsdp=8)
  plan = nxp.plan(Net, mesh, nxp.fsdp(min_size=16), optimizer=optax.adam(1e-2))
  model, optimizer = nxp.Checkpointer(source).restore(plan)
  kernel = model.layers[0].kernel.get_value()
  print(len(kernel.sharding.device_set), len({str(shard.index) for shard in kernel.addressable_shards}))
  nxp.Checkpointer(goal).save(1, model, optimizer)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_eight_devices_one_sixteen_and_back(tmp_path):
  eight, one, sixteen = (tmp_path / name for name in ("eight", "one", "sixteen"))
  plan = make_plan("8")
  run = nxp.create_sharded_model(plan)
  Checkpointer(eight).save(1, *run)
  Checkpointer(one).save(1, *Checkpointer(eight).restore(make_plan("1")))
  flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=16"}
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(SIXTEEN), str(one), str(sixteen)],
    env={**os.environ, **flags, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    capture_output=True,
    text=True,
    timeout=240,
    check=False,
  )
  assert (done.returncode, done.stdout) == (0, "16 8\n"), done.stderr
  for directory in (one, sixteen):
    for restored, saved in zip(Checkpointer(directory).restore(plan), run, strict=True):
      assert_same(restored, saved)
  assert Checkpointer(sixteen).diff(plan).resharded


@pytest.mark.cases(1)
@pytest.mark.parametrize(("saved", "wanted"), [(0, 2), (2, 1), (1, 0)])
def test_zero_stages_change_between_save_and_restore(tmp_path, saved, wanted):
  def plan(stage):
    axes = ["data"] if stage else None
    tx = optax.adam(1e-2)
    return nxp.plan(Net, MESHES["2x4"](), nxp.fsdp(min_size=16), optimizer=tx, zero=stage, zero_axes=axes)

  run = nxp.create_sharded_model(plan(saved))
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, *run)
  goal = plan(wanted)
  moved = [match.name for match in checkpointer.diff(goal).resharded]
  assert bool(moved) == (0 in (saved, wanted))  # stages 1 and 2 differ in gradients, not in state
  assert all(name.startswith("optimizer/") for name in moved)
  restored = checkpointer.restore(goal)
  for again, before in zip(restored, run, strict=True):
    assert_same(again, before)
  for path, leaf in goal.of("optimizer").items():
    assert value_of(variables(restored[1])[path]).sharding.is_equivalent_to(leaf.sharding, len(leaf.shape))


def test_replicas_are_written_once(tmp_path):
  mesh = nxp.make_mesh(a=2, b=4)
  values = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
  specs = {"everywhere": P(), "rows": P("a"), "parts": P("b", "a")}
  tree = {name: jax.device_put(values, NamedSharding(mesh, spec)) for name, spec in specs.items()}
  Checkpointer(tmp_path).save(1, tree)
  for name, files in (("everywhere", 1), ("rows", 2), ("parts", 8)):
    sizes = chunks_of(tmp_path, 1, name)
    assert (len(sizes), sum(sizes)) == (files, values.nbytes + 4 * files), name


@pytest.mark.nightly
@pytest.mark.slow
def test_a_replicated_array_is_written_once_by_both_processes(tmp_path):
  body = """
    from nnx_parallel.checkpoint import array_io
    from nnx_parallel.checkpoint.checkpointer import Checkpointer

    def written():
      lines = open("/proc/self/io").read().splitlines()
      return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))

    patch(array_io, "_SMALLEST_REPLICA_SLICE", 1 << 20)
    tree = {"w": put(np.ones((16, 1 << 20), np.uint8), nxp.make_mesh(x=8))}
    before = written()
    Checkpointer(arguments[0]).save(1, tree)
    print("wrote", written() - before)
  """
  counts = [int(out.split("wrote ")[1].split()[0]) for out in run_two(body, tmp_path)]
  assert 0 <= sum(chunks_of(tmp_path, 1, "w")) - (16 << 20) < 100
  assert all(8 << 20 <= count < 9 << 20 for count in counts), counts
