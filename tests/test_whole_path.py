"""The whole path at once: plan, create, train, save, restore on another mesh, and simply go on."""

import functools
import itertools
import json

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from train.models import Noisy
from training import plain_step

init = lambda: Noisy(nnx.Rngs(0))
loss_fn = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()


def source(start, count):
  for index in range(start, start + count):
    draw = np.random.default_rng(index).standard_normal
    yield {"x": draw((16, 8), dtype=np.float32), "y": draw((16, 8), dtype=np.float32)}


first = nxp.LogicalRules.first
BATCH = first(("data", "fsdp"), "rows")
RULES = nxp.LogicalRules(batch=BATCH, embed=first("fsdp", "rows"), mlp=first("tensor", "columns"))
MESHES = {
  "data2_fsdp2_tensor2": ({"data": 2, "fsdp": 2, "tensor": 2}, 8),
  "data1_fsdp4_tensor1": ({"data": 1, "fsdp": 4, "tensor": 1}, 4),
  "rows2_columns4": ({"rows": 2, "columns": 4}, 8),  # other axis names
  "one_device": ({"data": 1, "fsdp": 1, "tensor": 1}, 1),
  "explicit": ({"data": 2, "fsdp": 2, "tensor": 2}, 8),
}


def plan_on(name):
  axes, count = MESHES[name]
  mesh = nxp.make_mesh(axes, devices=jax.devices()[:count], explicit=name == "explicit")
  return nxp.plan(init, mesh, RULES, optimizer=optax.adamw(1e-2))


def losses_of(model, optimizer, plan, start, count):
  step = nxp.train_step(loss_fn)
  return [float(step(model, optimizer, b)["loss"]) for b in nxp.batches(source(start, count), plan)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """By mesh: a checkpoint after 3 steps, and the 3 losses of the run that went on without stopping."""

  @functools.cache
  def run(name):
    plan = plan_on(name)
    model, optimizer = nxp.create_sharded_model(plan)
    losses_of(model, optimizer, plan, 0, 3)
    directory = tmp_path_factory.mktemp(name)
    with nxp.Checkpointer(directory) as checkpointer:
      checkpointer.save(3, model, optimizer, plan=plan)
    return directory, losses_of(model, optimizer, plan, 3, 3)

  return run


# Each mesh once as the origin and once as the target; any pair of meshes: checkpoint/test_promises.py.
@pytest.mark.cases(2)
@pytest.mark.parametrize(("origin", "target"), [*itertools.pairwise([*MESHES, next(iter(MESHES))])])
def test_restore_on_any_mesh_continues_the_run(saved, origin, target):
  directory, expected = saved(origin)
  plan = plan_on(target)
  with nxp.Checkpointer(directory) as checkpointer:
    model, optimizer = checkpointer.restore(plan)
  nxp.check_layout(model, plan, optimizer=optimizer)
  assert nxp.Plan.from_json(json.dumps(checkpointer.restored.plan)).to_json() == plan_on(origin).to_json()
  assert int(optimizer.step[...]) == 3
  np.testing.assert_allclose(losses_of(model, optimizer, plan, 3, 3), expected, rtol=1e-5)


def test_a_hand_written_step_works_on_what_was_created_and_restored(saved):
  directory, expected = saved("rows2_columns4")
  plan = plan_on("data2_fsdp2_tensor2")
  with nxp.Checkpointer(directory) as checkpointer:
    model, optimizer = checkpointer.restore(plan)
  step = plain_step(loss_fn)
  found = [float(step(model, optimizer, b)) for b in nxp.batches(source(3, 3), plan)]
  np.testing.assert_allclose(found, expected, rtol=1e-5)
