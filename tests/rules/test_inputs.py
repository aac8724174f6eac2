"""Inputs by rank, and over the whole mesh."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel import InputRules, LogicalRules
from nnx_parallel.errors import ShardingError


def plan(*rules, **axes):
  mesh = nxp.make_mesh(**(axes or {"data": 4, "tensor": 2}))
  return nxp.plan(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh, rules)


def test_by_rank_with_axes_and_with_names():
  rules = InputRules(map_1d=("data",), map_2d=("batch", "seq"), map_3d=("batch", None, ("tensor",)))
  made = plan(rules, LogicalRules(batch="data", seq=LogicalRules.first("tensor", None)))
  specs = [P(), P("data"), P("data", "tensor"), P("data", None, "tensor")]
  assert [made.batch_spec(n) for n in range(4)] == specs


def test_inputs_activations_zero_and_reports_split_the_batch_alike():
  mesh = nxp.make_mesh(data=2, x=4)
  init = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
  for inputs in (InputRules.all_axes(), InputRules(map_2d=(("data", "x"), None))):
    made = nxp.plan(init, mesh, [inputs, nxp.replicate()], optimizer=optax.adam(1e-3), zero=1)
    assert made.batch_spec(2) == P(("data", "x"), None)
    assert made.batch_axes == ("data", "x")
    with made.scope():
      assert nxp.constrain(np.zeros((8, 8)), "batch", None).sharding.spec == P(("data", "x"), None)
    assert made["optimizer/opt_state.0.mu.kernel"].shards == (1, 8)
    step, batch = nxp.train_step(lambda m, x: m(x).mean()), jax.ShapeDtypeStruct((16, 8), "float32")
    assert nxp.memory_plan(made, lambda m, x: m(x).mean(), batch).need_bytes
    assert nxp.compile_report(step, made, batch=batch).batch_split == 8


def test_a_missing_rank_shows_the_mapping():
  text = r"of 3 dims\.\n  InputRules\(map_1d=.*, map_2d=.*\)\n  Fix: .* example map_3d=\('data', None, None\)"
  with pytest.raises(ShardingError, match=text):
    plan(InputRules(map_1d=("data",), map_2d=("data", None))).batch_spec(3)


def test_an_unknown_name_says_where():
  with pytest.raises(ShardingError, match=r"cannot shard inputs of 2 dims: dim 1 is named 'tokens'"):
    plan(InputRules(map_2d=("data", "tokens"))).batch_spec(2)
