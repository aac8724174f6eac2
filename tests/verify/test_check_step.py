"""`check_step` sees what differs between two layouts, and takes rounding for rounding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp


class Net(nnx.Module):
  """A bias before a norm, whose gradient is zero but for rounding; statistics; random numbers."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.up = nnx.Linear(8, 16, rngs=rngs)
    self.norm = nnx.BatchNorm(16, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.down = nnx.Linear(16, 5, rngs=rngs)
    self.seen = nnx.BatchStat(jnp.zeros(()))

  def __call__(self, x):
    return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def loss_fn(model, x):
  y = model(x)
  return (y**2).mean(), {"largest": nxp.weighted(abs(y).sum(), jnp.float32(y.size))}


def plan_of(init, sizes, tx, over, **options):
  mesh = nxp.make_mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())])
  rules = [nxp.LogicalRules(batch=("data", "fsdp")), nxp.fsdp(over, min_size=0)]
  return nxp.plan(init, mesh, rules, optimizer=tx, **options)


def two_plans(init, tx, over="fsdp"):
  return [plan_of(init, {"data": data, "fsdp": 2}, tx, over) for data in (2, 4)]


X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")


@pytest.mark.slow
def test_equal_steps_are_equal_also_with_padding_zero_and_microbatches():
  plan = plan_of(Net, {"data": 2, "fsdp": 4}, optax.adam(1e-2), ("data", "fsdp"), uneven="pad", zero=1)
  found = nxp.check_step(plan, None, loss_fn, X, microbatches=2)
  assert found, str(found)
  assert [row.name for row in found.metrics] == ["loss", "largest"]
  names = {row.name for row in found.leaves}
  assert {"norm.mean", "dropout.rngs.count", "optimizer/opt_state.0.mu.down.kernel"} <= names
  assert f"{len(names) - 1} of {len(names)} arrays changed by the same" in str(found)
  assert found.meshes == ("data 2 x fsdp 4", "one device")


@pytest.mark.slow
def test_difference_in_loss_statistics_and_updates_is_named():
  def on(layout):
    """As if the compiler had computed something else on the smaller mesh."""
    return (layout.size == 4) * 1e-2

  def other(model, x):
    loss, metrics = loss_fn(model, x)
    off = on(jax.sharding.get_abstract_mesh())
    model.seen[...] += 1 + off
    return loss * (1 + off), metrics

  found = nxp.check_step(*two_plans(Net, optax.sgd(1.0), ("data", "fsdp")), other, X)
  assert [row.name for row in found.metrics if not row] == ["loss"]
  assert {"seen", "down.kernel"} <= {row.name for row in found.leaves if not row}
  with pytest.raises(nxp.errors.TrainError, match=r"(?s)different numbers.*down\.kernel.*different"):
    found.raise_if_wrong()


class Wrong(nnx.Module):
  """A layer whose gradient is twice too large on the smaller mesh; `change` is of the optimizer's kind."""

  def __init__(self, dtype="float32"):
    self.up = nnx.Linear(8, 16, param_dtype=dtype, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.up(x)


def doubled_on_four(model, x):
  on = jax.sharding.get_abstract_mesh().size == 4
  y = jax.custom_derivatives.linear_call(lambda _, y: y, lambda _, g: g * (2 if on else 1), (), model(x))
  return (y.astype(jnp.float32) ** 2).mean()


loss_of_square = lambda model, x: (model(x).astype(jnp.float32) ** 2).mean()


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("dtype", "rate"), [("float32", 1e-6), ("bfloat16", 0.3)])
def test_wrong_gradient_shows_in_a_small_change(dtype, rate):
  found = nxp.check_step(*two_plans(lambda: Wrong(dtype), optax.sgd(rate)), doubled_on_four, X.astype(dtype))
  assert {row.name for row in found.leaves if not row} == {"up.bias", "up.kernel"}
  assert {0.4 < row.difference < 0.6 for row in found.leaves if not row} == {True}
  right = nxp.check_step(*two_plans(lambda: Wrong(dtype), optax.sgd(rate)), loss_of_square, X.astype(dtype))
  assert right, str(right)
  assert not any(row.note for row in right.leaves)


def test_change_below_the_rounding_of_a_parameter_is_said_to_be_unseen():
  two = two_plans(lambda: Wrong("bfloat16"), optax.sgd(1e-6))
  found = nxp.check_step(*two, loss_of_square, X.astype("bfloat16"))
  (note,) = (row.note for row in found.leaves if row.name == "up.kernel")
  assert note == "not decided: no change above the rounding of bfloat16"
  assert "2 of 3 arrays changed by the same" in str(found)


@pytest.mark.slow
def test_integers_keys_and_float64_are_compared_exactly():
  class Counts(Wrong):
    def __init__(self):
      super().__init__()
      self.seen = nnx.BatchStat(jnp.int32(2**24))
      self.key = nnx.BatchStat(jax.random.key(2**24))

  def counting(model, x):
    on = jax.sharding.get_abstract_mesh().size == 4
    model.seen[...] += 1 + on
    model.key[...] = jax.random.wrap_key_data(jax.random.key_data(model.key[...]) + jnp.uint32([0, on]))
    return loss_of_square(model, x)

  found = nxp.check_step(*two_plans(Counts, optax.sgd(0.1)), counting, X)
  assert {row.name for row in found.leaves if not row} == {"key", "seen"}

  class Fine(nnx.Module):
    def __init__(self):
      self.w = nnx.Param(jnp.ones(16, "float64"))

  def fine(model, x):
    on = jax.sharding.get_abstract_mesh().size == 4
    return (model.w[...] * (1.0 + 1e-8 * on) * x.sum(1)).mean()

  with jax.enable_x64(True):
    found = nxp.check_step(*two_plans(Fine, optax.sgd(0.1)), fine, X.astype("float64"))
  assert {row.name for row in found.leaves if not row} == {"w"}


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(("part", "factor"), [("small", 5), ("large", 0.5)])
def test_optimizers_own_arithmetic_is_not_taken_for_rounding(part, factor):
  """Its moments agree; the small part's hardly changed: that excuses a step turned round, no longer one."""

  def update(updates, state, params=None):
    on = jax.sharding.get_abstract_mesh().size == 8
    changed = lambda path, u: u * (factor if on and part in jax.tree_util.keystr(path) else 1)
    return jax.tree.map_with_path(changed, updates), state

  class Small(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
      self.large, self.small = nnx.Linear(8, 8, rngs=rngs), nnx.Param(jnp.ones(8))

    def __call__(self, x: jax.Array) -> jax.Array:
      return self.large(x) + 1e-3 * self.small[None]

  tx = optax.chain(optax.adam(1e-2), optax.GradientTransformation(lambda params: optax.EmptyState(), update))
  found = nxp.check_step(*two_plans(lambda: Small(nnx.Rngs(0)), tx), loss_of_square, X)
  assert {row.name.partition(".")[0] for row in found.leaves if not row} == {part}


@pytest.mark.slow
def test_a_coarse_reduction_is_compared_with_one_device_that_reduces_nothing():
  plan = nxp.plan(Wrong, nxp.make_mesh(data=8), nxp.replicate(), optimizer=optax.adam(1e-3))
  found = nxp.check_step(plan, None, loss_of_square, X, reduction="bfloat16")
  assert found
  assert "changed by the same, to 1e-01" in str(found)
