"""Arrays, metadata and plan agree after creation, after steps and after a restore, whatever the module."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from create.models import Stack, arrays_of, assert_same_arrays, loss
from nnx_parallel.create import constructor

RULES = [nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor"), nxp.replicate()]


def make_plan(**axes: Any) -> nxp.Plan:
  init = lambda: Stack(1, 16, nnx.Rngs(0, dropout=1))
  return nxp.plan(init, nxp.make_mesh(**axes), RULES, optimizer=optax.adamw(1e-2))


def tokens(plan: nxp.Plan) -> jax.Array:
  return nxp.shard_batch(np.random.default_rng(0).integers(0, 32, (8, 5)), plan)


@pytest.fixture
def no_initial_values(monkeypatch: pytest.MonkeyPatch) -> None:
  def refuse(*_: object) -> None:
    raise AssertionError("initial values were made")

  monkeypatch.setattr(constructor, "assemble", refuse)
  monkeypatch.setattr(constructor, "construct_whole", refuse)


@pytest.mark.slow
def test_after_creation_each_step_an_assignment_and_a_restore(tmp_path, request):
  plan = make_plan(data=2, fsdp=2, tensor=2)
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(loss)
  nxp.check_layout(model, plan, optimizer=optimizer)
  for _ in range(2):
    step(model, optimizer, tokens(plan))
    nxp.check_layout(model, plan, optimizer=optimizer)
  assert len(step.compiles) == 1

  nnx.update(model, {"blocks": {0: {"up": {"kernel": np.ones((16, 64), np.float32)}}}})
  step(model, optimizer, tokens(plan))
  assert "model.blocks.0.up.kernel: float32[16,64] P('fsdp', 'tensor')" in str(step.compiles[1])
  nxp.check_layout(model, plan, optimizer=optimizer)

  request.getfixturevalue("no_initial_values")
  other = make_plan(data=1, fsdp=4, tensor=2, explicit=True)
  with nxp.Checkpointer(tmp_path / "checkpoints") as checkpointer:
    checkpointer.save(3, model, optimizer)
    restored = checkpointer.restore(other)
  nxp.check_layout(restored[0], other, optimizer=restored[1])
  for left, right in zip((model, optimizer), restored, strict=True):
    assert_same_arrays(arrays_of(left), arrays_of(right))


square = lambda model, x: (jnp.abs(model(x)) ** 2).mean()


@pytest.mark.auto_axes("what it expects is of Auto axes")
def test_a_layout_in_another_spelling_is_no_reason_to_compile():
  init = lambda: nnx.Linear(32, 16, rngs=nnx.Rngs(0))
  plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=optax.sgd(0.1))
  model, optimizer = nxp.create_sharded_model(plan)
  batch = nxp.shard_batch(np.ones((8, 32), np.float32), plan)
  steps = nxp.train_step(square), nxp.eval_step(square)

  def run() -> None:
    steps[0](model, optimizer, batch)
    steps[1](model, batch)

  run()
  nnx.update(model, jax.jit(lambda state: jax.tree.map(lambda x: x / 2, state))(nnx.state(model)))
  assert model.kernel.get_value().sharding.spec == jax.P("fsdp") != plan["kernel"].spec
  steps[1](model, batch)
  run()
  assert [len(step.compiles) for step in steps] == [1, 1]
