"""A whole task in one call: each part works, and the printed text has them all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel.errors import DecodeError, TrainError


class Language(nnx.Module):  # Predicts from the token and the sum of those before it, which a cache keeps
  def __init__(self, rngs, cached=True):
    self.table = nnx.Param(jax.random.normal(rngs.params(), (32, 16)), out_sharding=("vocab", None))
    self.seen = nnx.Cache(jnp.zeros((8, 16)), out_sharding=("batch", None)) if cached else None

  def __call__(self, tokens):
    x = jax.nn.one_hot(tokens, 32) @ self.table[...]
    if tokens.shape[1] == 1 and self.seen is not None:
      self.seen[...] += x[:, 0]
      x = x + self.seen[...][:, None]
    return x @ self.table[...].T


def loss_fn(model, tokens):
  losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
  return losses.mean(), {"per_example": losses.mean(-1)}


def made(explicit=False, cached=True, **options):
  options = {"optimizer": optax.adam(1e-2), "loss": loss_fn, "outputs": ("per_example",), **options}
  return nxp.task(
    lambda: Language(nnx.Rngs(0), cached), nxp.make_mesh(data=2, model=4, explicit=explicit),
    nxp.LogicalRules(batch="data", vocab=None if explicit else "model"),
    batch=jax.ShapeDtypeStruct((8, 9), jnp.int32), generate=nxp.generator(3), **options,
  )  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("explicit", [False, True])
def test_all_parts_of_a_module(explicit):
  task = made(explicit, plan={"zero": 1}, microbatches=2)
  assert task.num_parameters == 32 * 16
  assert task.input_specs == P("data", None)
  assert task.state_specs["table"] == P(None if explicit else "model", None)
  assert {"seen", "optimizer/opt_state.0.mu.table"} <= task.state_specs.keys()
  tokens = np.random.default_rng(0).integers(32, size=(8, 9)).astype(np.int32)
  batch = nxp.shard_batch(tokens, task.plan)
  before = task.eval_step(task.model, batch)
  assert before["per_example"].shape == (8,)
  after = task.train_step(task.model, task.optimizer, batch)
  np.testing.assert_allclose(after["per_example"], before["per_example"], rtol=1e-6)
  assert float(task.eval_step(task.model, batch)["loss"]) < float(before["loss"])
  assert task.generate(task.model, tokens[:, :2]).tokens.shape == (8, 3)
  text = str(task)
  for part in ("table", "int32[8, 9]", "512 parameters", "train_step(", "eval_step(", "generate("):
    assert part in text


class Noisy(nnx.Module):
  def __init__(self, rngs):
    self.norm, self.layer = nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(self.layer(self.norm(x)))


def test_a_task_evaluates_in_evaluation_mode_and_keeps_the_mode_of_the_model():
  init, loss = lambda: Noisy(nnx.Rngs(0)), lambda model, x: (model(x) ** 2).mean()
  task = nxp.task(init, nxp.make_mesh(data=8), loss=loss, optimizer=optax.sgd(0.1))
  x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
  batch = nxp.shard_batch(x, task.plan)
  for _ in range(2):
    task.train_step(task.model, task.optimizer, batch)
    wanted = nnx.merge(*nnx.split(task.model))
    wanted.eval()
    found = task.eval_step(task.model, batch)
    assert float(found["loss"]) == pytest.approx(float((wanted(x) ** 2).mean()), rel=1e-5)
  assert len(task.eval_step.compiles) == 1
  task.model.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(7))
  edited = nnx.merge(*nnx.split(task.model))
  edited.eval()
  found = task.eval_step(task.model, batch)
  assert float(found["loss"]) == pytest.approx(float((edited(x) ** 2).mean()), rel=1e-5)
  assert not task.model.dropout.deterministic
  assert not task.model.norm.use_running_average


def test_what_is_missing_is_said():
  with pytest.raises(TrainError, match=r"a task needs optimizer\."):
    made(optimizer=None)
  task = made(cached=False)
  with pytest.raises(DecodeError, match="cache"):
    task.generate(task.model, np.zeros((8, 2), np.int32))
