"""Float32 training on every layout equals one device: the loss of each step and the norm of each gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.parity import CASES, Case, Runs, differences
from nnx_parallel import testing
from nnx_parallel.testing import assert_same_numbers, assert_same_training, with_gradient_norms

VOCAB, WIDTH, HEADS, LENGTH, STEPS = 32, 16, 4, 8, 8


def linear(rngs, size_in, size_out, names):
  return nnx.Linear(size_in, size_out, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": names})


class Block(nnx.Module):
  """Attention with one kernel for query, key and value, then two layers."""

  def __init__(self, rngs):
    self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
    self.qkv = linear(rngs, WIDTH, 3 * WIDTH, ("embed", "heads"))
    self.out = linear(rngs, WIDTH, WIDTH, ("heads", "embed"))
    self.up = linear(rngs, WIDTH, 4 * WIDTH, ("embed", "mlp"))
    self.down = linear(rngs, 4 * WIDTH, WIDTH, ("mlp", "embed"))

  def __call__(self, x):
    batch, length, _ = x.shape
    heads = self.qkv(self.norm(x)).reshape(batch, length, 3, HEADS, WIDTH // HEADS)
    y = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
    x = x + self.out(y.reshape(batch, length, WIDTH))
    return x + self.down(nnx.gelu(self.up(x)))


class Transformer(nnx.Module):
  """A block and an embedding that is also the output."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, embedding_metadata={"out_sharding": ("vocab", "embed")})
    self.block = Block(rngs)

  def __call__(self, tokens):
    return self.embed.attend(self.block(self.embed(tokens)))


def loss_fn(model, tokens):
  losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
  return nxp.weighted(losses.sum(), jnp.asarray(losses.size, jnp.float32))


RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", heads="tensor", mlp="tensor", vocab="tensor")


def batches():
  start = np.random.default_rng(0).integers(VOCAB, size=(STEPS, 16, 1))
  return list(((start + np.arange(LENGTH + 1) * 3) % VOCAB).astype(np.int32))


# Each layout, each stage and both counts of the whole table, which benchmarks/parity.py runs.
PART = [
  Case("fsdp x tp", 2, 4),
  Case("one device", 0, 4),
  Case("dp", 2, 1),
  Case("fsdp", 1, 4),
  Case("tp", 0, 1),
  Case("dp x fsdp x tp", 1, 4),
  Case("Explicit dp", 1, 1),
  Case("Explicit dp x fsdp x tp", 2, 4),
]


@pytest.fixture(scope="module")
def runs():
  return Runs("adamw(1e-3)")


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", PART, ids=str)
def test_a_hundred_steps_equal_one_device(runs, case):
  found = runs.run(case)
  assert_same_numbers(str(case), runs.one, found)
  # Stricter than the kit: no leaf is excused because its gradient is small beside the others.
  assert max(differences(runs.one, found)) <= 1e-5
  assert len(found.losses) == 100
  assert found.losses[-1] < 0.7 * found.losses[0]


def test_the_part_has_each_layout_stage_and_count():
  for attribute in ("layout", "zero", "microbatches"):
    wanted, found = ({getattr(case, attribute) for case in cases} for cases in (CASES, PART))
    assert found == wanted


@pytest.mark.nightly
@pytest.mark.slow
def test_attention_on_three_axes_in_microbatches():
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  tx = with_gradient_norms(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
  plan = nxp.plan(lambda: Transformer(nnx.Rngs(0)), mesh, RULES, optimizer=tx)
  found = assert_same_training(loss_fn, {"split": plan}, batches(), microbatches=2)
  losses = found["one device"].losses
  assert losses[-1] < 0.98 * losses[0]
  assert set(found["split"].history) == set(found["split"].norms)


class Doubled(nnx.Module):
  """A layer whose gradient is multiplied by the number of devices, as a wrong reduction does."""

  def __init__(self, rngs):
    self.up = nnx.Linear(8, 8, rngs=rngs)

  def __call__(self, x):
    times = float(self.up.kernel.get_metadata("times", 1))
    kernel = self.up.kernel[...]
    return x @ (kernel + (times - 1) * (kernel - jax.lax.stop_gradient(kernel)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_gradient_that_is_wrong_by_a_factor_is_named(recorded):
  def init(times):
    model = Doubled(nnx.Rngs(0))
    model.up.kernel.set_metadata(times=times)
    return model

  tx = with_gradient_norms(optax.adam(1e-3)) if recorded else optax.adam(1e-3)
  right, wrong = (
    nxp.plan(lambda times=times: init(times), nxp.make_mesh(data=8), optimizer=tx) for times in (1, 2)
  )
  x = [np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32) for i in range(3)]

  def loss(model, x):
    return (model(x) ** 2).mean()

  one, many = (testing.run_training(plan, loss, x) for plan in (right, wrong))
  np.testing.assert_allclose(one.losses, many.losses, rtol=1e-5)  # Adam hides it
  step = ", step 0" if recorded else ""
  with pytest.raises(AssertionError, match=rf"wrong{step}: the gradient norm of up.kernel is .*\(ratio 2\)"):
    assert_same_numbers("wrong", one, many)


def test_a_wrong_loss_is_named():
  one = testing.Training(np.array([1.0, 2.0]), {}, {})
  many = testing.Training(np.array([1.0, 2.1]), {}, {})
  with pytest.raises(AssertionError, match=r"tp: the loss of step 1 is .*2.1.*, on one device .*2.0"):
    assert_same_numbers("tp", one, many)
