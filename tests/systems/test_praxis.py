"""A Praxis task, with padded parameters, gives the numbers of one device in all that a step returns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.testing import assert_same_numbers, run_training, with_gradient_norms

VOCAB, WIDTH, LENGTH = 30, 16, 8  # 30 is uneven over 4 and 8 devices on purpose
CLASSES = 3
SEEN: list[tuple[int, ...]] = []


class Task(nnx.Module):  # An embedding, a layer, and logits; counts the steps that it sees
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


init = lambda: Task(nnx.Rngs(0))


def loss_fn(model, batch):
  """The weighted loss, mean metrics, a summary (accuracy by class), and a value for each example."""
  tokens, weights = batch["tokens"], batch["weights"][:, None]
  model.seen[...] += 1
  logits = model(tokens[:, :-1])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
  hits = jnp.where(logits.argmax(-1) == tokens[:, 1:], weights, 0.0)
  kind = jax.nn.one_hot(tokens[:, 1:] % CLASSES, CLASSES) * weights[:, :, None]
  count = weights.sum() * (LENGTH - 1)
  return nxp.weighted((losses * weights).sum(), count), {
    "accuracy": nxp.weighted(hits.sum(), count),
    "accuracy_by_class": nxp.weighted((hits[:, :, None] * kind).sum((0, 1)), kind.sum((0, 1))),
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


def test_padding_is_taken_off_before_the_models_code_and_changes_no_number():
  plan = partition(with_gradient_norms(optax.adam(1e-3)))
  assert plan["embed.embedding"].padding == (2, 0)
  assert plan["embed.embedding"].storage_shape == (32, WIDTH)
  SEEN.clear()
  batches = [batch_of(seed=seed) for seed in range(6)]
  scalar = lambda model, batch: loss_fn(model, batch)[0]
  many = run_training(plan, scalar, batches)
  assert set(SEEN) == {(VOCAB, WIDTH)}
  mesh = nxp.make_mesh(data=1, model=1, devices=jax.devices()[:1])
  tx = with_gradient_norms(optax.adam(1e-3))
  one = run_training(nxp.plan(init, mesh, (LOGICAL, BY_RANK), optimizer=tx), scalar, batches)
  assert_same_numbers("padded", one, many)
