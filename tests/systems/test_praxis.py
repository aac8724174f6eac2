"""What Praxis' `partition_spmd_model` gives: from one plan, on a plain module.

The partitioned state, its specs, the input specs, a train and an eval step, the number of parameters; inputs
by rank; padded variables that the model's code does not see; all but the state replicated; the state donated.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel.testing import assert_same_numbers, run_training, with_gradient_norms

VOCAB, WIDTH, LENGTH = 30, 16, 8  # 30 is uneven over 4 and 8 devices on purpose
CLASSES = 3
SEEN: list[tuple[int, ...]] = []


class Task(nnx.Module):
  """An embedding, a layer, and logits; counts the steps that it sees."""

  def __init__(self, rngs):
    names = {"out_sharding": ("vocab", None)}
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, embedding_metadata=names)
    self.up = nnx.Linear(WIDTH, 64, rngs=rngs, kernel_metadata={"out_sharding": (None, "mlp")})
    self.down = nnx.Linear(64, WIDTH, rngs=rngs, kernel_metadata={"out_sharding": ("mlp", None)})
    self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

  def __call__(self, tokens):
    table = self.embed.embedding[...]
    SEEN.append(table.shape)
    x = table[tokens]
    return (x + self.down(nnx.gelu(self.up(x)))) @ table.T


def init():
  return Task(nnx.Rngs(0))


def loss_fn(model, batch):
  """The weighted loss, mean metrics, a summary (accuracy by class), and a value for each example."""
  tokens, weights = batch["tokens"], batch["weights"][:, None]
  model.seen[...] += 1
  logits = model(tokens[:, :-1])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
  hits = jnp.where(logits.argmax(-1) == tokens[:, 1:], weights, 0.0)
  kind = jax.nn.one_hot(tokens[:, 1:] % CLASSES, CLASSES) * weights[:, :, None]
  count = weights.sum() * (LENGTH - 1)
  return ((losses * weights).sum(), count), {
    "accuracy": (hits.sum(), count),
    "accuracy_by_class": ((hits[:, :, None] * kind).sum((0, 1)), kind.sum((0, 1))),
    "per_example": losses.mean(-1),
  }


LOGICAL = nxp.LogicalRules(batch=("data", "model"), vocab="model", mlp="model")
BY_RANK = nxp.InputRules(map_1d=("batch",), map_2d=("batch", None))


def partition(tx=None, rules=(LOGICAL, BY_RANK), **axes):
  mesh = nxp.make_mesh({"data": 2, "model": 4} | axes)
  return nxp.plan(init, mesh, rules, optimizer=tx or optax.adam(1e-2), uneven="pad")


def batch_of(examples=16, seed=0):
  rng = np.random.default_rng(seed)
  return {
    "tokens": rng.integers(VOCAB, size=(examples, LENGTH)).astype(np.int32),
    "weights": (np.arange(examples) < examples - 3).astype(np.float32),
  }


def test_one_plan_gives_what_praxis_partitions():
  plan = partition()
  model, optimizer = nxp.create_sharded_model(plan)
  nxp.check_layout(model, plan, optimizer=optimizer)  # the partitioned state, as in its specs
  assert plan["embed.embedding"].spec == P("model", None)
  assert plan["optimizer/opt_state.0.mu.down.kernel"].spec == P("model", None)
  assert plan.batch_spec(2) == P(("data", "model"), None)  # the input specs
  assert plan.num_parameters() == VOCAB * WIDTH + (WIDTH * 64 + 64) + (64 * WIDTH + WIDTH)
  step = nxp.train_step(loss_fn, outputs=("per_example",))
  evaluate = nxp.eval_step(loss_fn, outputs=("per_example",))
  batch = nxp.shard_batch(batch_of(), plan)
  before = evaluate(model, batch)
  after = [step(model, optimizer, batch) for _ in range(20)][-1]
  assert float(after["loss"]) < 0.8 * float(before["loss"])
  assert set(before) == set(after) == {"loss", "accuracy", "accuracy_by_class", "per_example"}
  assert int(model.seen[...]) == 20  # other Variables are part of the state; evaluation leaves them alone
  nxp.check_layout(model, plan, optimizer=optimizer)
  assert len(step.compiles) == 1


def test_steps_return_what_a_single_device_returns():
  mesh = nxp.make_mesh(data=1, model=1, devices=jax.devices()[:1])
  alone = nxp.plan(init, mesh, (LOGICAL, BY_RANK), optimizer=optax.adam(1e-2))
  results = []
  for plan in (alone, partition()):
    model, optimizer = nxp.create_sharded_model(plan)
    step = nxp.train_step(loss_fn, outputs=("per_example",))
    results.append(nxp.to_host(step(model, optimizer, nxp.shard_batch(batch_of(), plan))))
  assert results[0]["per_example"].shape == (16,)
  assert results[0]["accuracy_by_class"].shape == (CLASSES,)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)


def test_everything_but_the_state_comes_out_replicated_and_the_state_is_donated():
  plan = partition()
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(loss_fn, outputs=("per_example",))
  batch = nxp.shard_batch(batch_of(), plan)
  metrics = step(model, optimizer, batch)
  whole = {name: value.sharding.is_fully_replicated for name, value in metrics.items()}
  assert whole.pop("per_example") in (True, False)  # as the compiler left it; one line replicates it
  assert all(whole.values())
  replicated = jax.device_put(metrics["per_example"], jax.NamedSharding(plan.mesh, P()))
  assert replicated.sharding.is_fully_replicated
  np.testing.assert_array_equal(nxp.to_host(metrics)["per_example"], replicated)
  memory = step.lower(model, optimizer, batch).compile().memory_analysis()
  assert memory.alias_size_in_bytes == plan.bytes_per_device()


def test_padding_is_taken_off_before_the_models_code_and_changes_no_number():
  plan = partition(with_gradient_norms(optax.adam(1e-3)))
  assert plan["embed.embedding"].padding == (2, 0)
  assert plan["embed.embedding"].storage_shape == (32, WIDTH)
  SEEN.clear()
  batches = [batch_of(seed=seed) for seed in range(6)]

  def scalar(model, batch):
    return loss_fn(model, batch)[0]

  many = run_training(plan, scalar, batches)
  assert set(SEEN) == {(VOCAB, WIDTH)}
  mesh = nxp.make_mesh(data=1, model=1, devices=jax.devices()[:1])
  tx = with_gradient_norms(optax.adam(1e-3))
  one = run_training(nxp.plan(init, mesh, (LOGICAL, BY_RANK), optimizer=tx), scalar, batches)
  assert_same_numbers("padded", one, many)


def test_inputs_by_rank_and_a_missing_rank_shows_the_mapping():
  plan = partition()
  batch = nxp.shard_batch(batch_of(), plan)
  assert batch["tokens"].sharding.shard_shape((16, LENGTH)) == (2, LENGTH)
  assert batch["weights"].sharding.shard_shape((16,)) == (2,)
  with pytest.raises(nxp.errors.ShardingError, match="no input rule for an array of 3 dims") as error:
    nxp.shard_batch(np.zeros((16, 4, 4)), plan)
  assert "InputRules(map_1d=('batch',), map_2d=('batch', None))" in str(error.value)
  whole = partition(rules=(LOGICAL, nxp.InputRules.whole_mesh()))
  assert whole.batch_spec(3) == P(("data", "model"), None, None)


def test_the_number_of_parameters_counts_tied_weights_once_and_by_filter():
  class Tied(nnx.Module):
    def __init__(self, rngs):
      self.a = nnx.Linear(8, 8, rngs=rngs)
      self.b = self.a
      self.norm = nnx.BatchNorm(8, rngs=rngs)

  plan = nxp.plan(lambda: Tied(nnx.Rngs(0)), nxp.abstract_mesh(data=1024), nxp.replicate())
  assert plan.num_parameters() == 8 * 8 + 8 + 2 * 8
  assert sum(math.prod(leaf.shape) for leaf in plan.trainable(nnx.BatchStat).trained) == 2 * 8
