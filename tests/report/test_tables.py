"""What a step of a language model sends under the ready-made rules: weights, not activations."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from layout.families import Llama
from nnx_parallel import presets

ROWS, LENGTH, VOCAB = 32, 128, 512


def compiled(sizes, *rules):
  init = lambda: Llama(nnx.Rngs(0), vocab=VOCAB, width=64, heads=4, hidden=128, depth=3, tied=True)
  rules = [*rules, presets.llama(), presets.fsdp_tensor(min_size=1024)]
  plan = nxp.plan(init, nxp.make_mesh(sizes), rules, optimizer=optax.adamw(1e-3))
  tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
  return nxp.compile_report(nxp.train_step(loss), plan, batch={"inputs": tokens, "targets": tokens})


def loss(model, batch):
  logits = model(batch["inputs"])
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


COLUMNS = nxp.PathRules([("embed_tokens.embedding", ("tensor", "fsdp"))])


# By fsdp alone, parameters are gathered and gradients are summed; a table is looked up by columns, also one
# that is split by rows, and what is found is exchanged. The tensor axis sums activations on top.
@pytest.mark.nightly
@pytest.mark.cases(1)
@pytest.mark.parametrize("rules", [(), (COLUMNS,)], ids=["by rows", "by columns"])
@pytest.mark.parametrize(
  ("sizes", "budget"), [({"fsdp": 8, "tensor": 1}, 2.6), ({"fsdp": 4, "tensor": 2}, 14)]
)
@pytest.mark.slow
def test_a_language_model_sends_weights(sizes, budget, rules):
  report = compiled(sizes, *rules)
  assert report.sent().bytes <= budget * report.quantities["params"]
  assert report.sent(axis="fsdp").bytes <= 2.6 * report.quantities["params"]
