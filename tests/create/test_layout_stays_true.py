"""Arrays, metadata and plan agree after creation, after steps and after a restore, whatever the module."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from create.models import Stack, arrays_of, assert_same_arrays, loss
from create.test_wild import WILD
from nnx_parallel.create import constructor
from training import plain_step

RULES = [nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor"), nxp.replicate()]


def stack() -> Stack:
  return Stack(1, 16, nnx.Rngs(0, dropout=1))


def make_plan(**axes: Any) -> nxp.Plan:
  return nxp.plan(stack, nxp.make_mesh(**axes), RULES, optimizer=optax.adamw(1e-2))


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


def square(model: Any, x: jax.Array) -> jax.Array:
  return (jnp.abs(model(x)) ** 2).mean()


def train(init: Callable[[], nnx.Module], loss_fn: Callable[..., jax.Array]) -> nnx.Module:
  """Two steps on the mesh and two on one device, with equal losses; the sharded model."""
  rules = [nxp.LogicalRules(batch="data"), nxp.fsdp("tensor", min_size=0)]
  plan = nxp.plan(init, nxp.make_mesh(data=4, tensor=2), rules, optimizer=optax.sgd(1e-2))
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(loss_fn)
  x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
  alone = init()
  its_optimizer = nnx.Optimizer(alone, optax.sgd(1e-2), wrt=nnx.Param)
  reference = plain_step(loss_fn)
  for _ in range(2):
    expected = reference(alone, its_optimizer, jnp.asarray(x))
    found = step(model, optimizer, nxp.shard_batch(x, plan))["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
  nxp.check_layout(model, plan, optimizer=optimizer)
  return model


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", ["rotary", "unhashable", "metadata", "optional", "tied"])
def test_wild_modules_train_in_their_layout(name):
  train(lambda: WILD[name](nnx.Rngs(0)), square)


def test_a_cache_made_in_the_loss_is_named_with_its_mend():
  def init():
    return WILD["caching"](nnx.Rngs(0))

  with pytest.raises(nxp.errors.TrainError) as caught:
    train(init, square)
  assert str(caught.value) == (
    "the step added seen, Variable type Cache, to the module.\n"
    "  Fix: create it before the first step, or remove it in the loss function: nnx.pop(model, nnx.Cache)."
  )

  def mended(model: Any, x: jax.Array) -> jax.Array:
    value = square(model, x)
    nnx.pop(model, nnx.Cache)
    return value

  assert not hasattr(train(init, mended), "seen")


@pytest.mark.auto_axes("what it expects is of Auto axes")
def test_a_layout_in_another_spelling_is_no_reason_to_compile():
  def init() -> nnx.Linear:
    return nnx.Linear(32, 16, rngs=nnx.Rngs(0))

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
