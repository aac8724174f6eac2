"""A run goes on where it stopped: on its own mesh bit for bit, on another within rounding."""

import dataclasses
import hashlib
import math

import jax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import RecipeError
from nnx_parallel.loop.loader import load_recipe
from nnx_parallel.loop.recipe import plan_recipe, restore, start


@pytest.fixture
def recipe(tiny_file):
  return load_recipe(str(tiny_file))


def make_plan(recipe, **sizes):
  devices = jax.devices()[: math.prod(sizes.values())]
  return plan_recipe(recipe, nxp.make_mesh(sizes, devices=devices))


losses = lambda run, steps: {record["step"]: record["loss"] for record in run.train(steps).history}


def test_each_step_is_reported_once_in_order(recipe):
  run = start(recipe, make_plan(recipe, data=4, tensor=2))
  records = []
  run.train(5, trackers=[lambda step, values: records.append((step, values))])
  assert [step for step, _ in records] == [1, 2, 3, 4, 5]
  assert list(records[0][1]) == ["loss", "close", "grad_norm", "seconds"]
  assert list(records[1][1]) == ["loss", "close", "grad_norm", "seconds", "samples_per_second"]
  assert (run.at.step, run.at.samples, run.unit) == (5, 80, "samples")
  assert 0.0 <= records[0][1]["close"] <= 1.0


def test_a_job_resumes_bit_for_bit(recipe, tmp_path):
  plan = make_plan(recipe, data=4, tensor=2)
  straight = start(recipe, plan)
  straight.train(3)
  with nxp.Checkpointer(tmp_path / "ckpt") as checkpointer:
    straight.save(checkpointer)
    expected = losses(straight, 7)
    resumed = restore(recipe, plan, checkpointer).run
  assert (resumed.at.step, resumed.at.samples) == (3, 48)
  assert losses(resumed, 7) == expected


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("dropout", [False, True])
def test_a_job_goes_on_with_fewer_devices_and_more_as_if_nothing_had_happened(tiny_file, tmp_path, dropout):
  if not dropout:
    tiny_file.write_text(tiny_file.read_text().replace("nnx.Dropout(0.25, rngs=rngs)", "nnx.relu"))
  recipe = load_recipe(str(tiny_file))
  meshes = {devices: {"data": devices, "tensor": 1} for devices in (2, 4, 8)}
  wanted = losses(start(recipe, make_plan(recipe, **meshes[8])), 16)
  run, found, parts = start(recipe, make_plan(recipe, **meshes[8])), {}, []
  with nxp.Checkpointer(tmp_path / "ckpt") as checkpointer:
    for end, devices in ((4, 8), (8, 4), (12, 2), (16, 8)):
      if before := run.at.step:
        mesh = run.settings["mesh"]
        run, _, relaid = restore(recipe, make_plan(recipe, **meshes[devices]), checkpointer)
        assert (run.at.step, relaid.mesh) == (before, (mesh, meshes[devices]))
      found |= losses(run, end)
      parts.append(run.settings["microbatches"])
      run.save(checkpointer)
  assert found == pytest.approx(wanted, rel=1e-5 if dropout else 1e-6)
  # Each microbatch draws its own dropout, so their number is part of what is computed.
  assert parts == ([1, 1, 1, 1] if dropout else [1, 2, 4, 1])


@pytest.mark.slow
def test_settings_are_kept_and_a_resume_says_which_differ(recipe, tiny_file, tmp_path):
  run = start(recipe, make_plan(recipe, data=4, tensor=2), settings={"batch": 16, "zero": 0})
  with nxp.Checkpointer(tmp_path / "ckpt") as checkpointer:
    run.train(2, checkpointer=checkpointer)
    saved = checkpointer.restore_extra("settings")
    digest = hashlib.sha256(tiny_file.read_bytes()).hexdigest()
    given = {"mesh": {"data": 4, "tensor": 2}, "microbatches": 1, "batch": 16, "zero": 0, "steps": 2}
    assert saved == given | {"source_sha256": digest}
    assert restore(recipe, run.plan, checkpointer, settings={"batch": 16, "zero": 0}).changes == []
    tiny_file.write_text(tiny_file.read_text() + "\n")
    plan = make_plan(recipe, data=8, tensor=1)
    how = {"microbatches": 2, "settings": {"zero": 1, "offload": False}}
    other, changes, _ = restore(recipe, plan, checkpointer, **how)
    now = hashlib.sha256(tiny_file.read_bytes()).hexdigest()
    assert changes == [
      "mesh data=4,tensor=2 -> data=8,tensor=1", "microbatches 1 -> 2",
      f"source_sha256 {digest[:12]} -> {now[:12]}", "zero 0 -> 1",
    ]  # fmt: skip
    other.train(3)
    other.save(checkpointer)
    assert checkpointer.restore_extra("settings") == other.settings
    # by a program without them
    checkpointer.save(4, other.model, other.optimizer, extra={"data": {"samples": 0}})
    assert restore(recipe, plan, checkpointer).changes == []


@pytest.mark.slow
def test_evaluation_is_without_dropout_and_changes_nothing(recipe):
  plan = make_plan(recipe, data=4, tensor=2)
  run, other = start(recipe, plan), start(recipe, plan)
  assert run.evaluate() == run.evaluate()
  assert losses(run, 2) == losses(other, 2)
  run.evaluate()
  assert losses(run, 4) == losses(other, 4)


def test_a_recipe_for_planning_only_cannot_be_trained(recipe):
  bare = dataclasses.replace(recipe, loss=None)
  with pytest.raises(RecipeError, match=r"the recipe tiny cannot be trained"):
    start(bare, make_plan(recipe, data=4, tensor=2))


def test_a_recipe_without_rules_is_planned_with_fsdp(recipe):
  init = lambda: nnx.Linear(512, 1024, rngs=nnx.Rngs(0))
  plan = plan_recipe(dataclasses.replace(recipe, rules=None, init=init), nxp.abstract_mesh(fsdp=8))
  assert plan["kernel"].spec == jax.P(None, "fsdp")
