"""From eight devices to one and to sixteen, between ZeRO stages, and what replicas cost on the disk."""

import jax
import numpy as np
import optax
import pytest
from jax import NamedSharding, P

import nnx_parallel as nxp
from checkpoint.runs import MESHES, Net, assert_same, chunks_of
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.core.nodes import value_of, variables


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
