"""Inputs by rank, and over the whole mesh."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel import InputRules, LogicalRules, RuleSet
from nnx_parallel.errors import ShardingError


def plan(*rules, **axes):
  return nxp.plan(
    lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nxp.make_mesh(**(axes or {"data": 4, "tensor": 2})), rules
  )


def test_by_rank_with_axes_and_with_names():
  rules = InputRules(map_1d=("data",), map_2d=("batch", "seq"), map_3d=("batch", None, ("tensor",)))
  made = plan(rules, LogicalRules(batch="data", seq=LogicalRules.first("tensor", None)))
  assert [made.batch_spec(n) for n in range(4)] == [
    P(),
    P("data"),
    P("data", "tensor"),
    P("data", None, "tensor"),
  ]


def test_the_whole_mesh_splits_the_batch():
  made = plan(InputRules.all_axes(), LogicalRules(batch="data"))
  assert made.batch_spec(3) == P(("data", "tensor"), None, None)
  placed = nxp.shard_batch({"x": np.zeros((16, 3)), "n": np.float32(1)}, made)
  assert {shard.data.shape for shard in placed["x"].addressable_shards} == {(2, 3)}
  assert placed["n"].sharding.is_fully_replicated


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


def test_a_batch_is_placed_by_rank():
  made = plan(InputRules(map_2d=("data", "tensor")))
  placed = nxp.shard_batch(np.zeros((8, 6)), made)
  assert placed.sharding.shard_shape((8, 6)) == (2, 3)
  with pytest.raises(ShardingError, match=r"batch: dim 1 has length 5, which 2 shards cannot split evenly"):
    nxp.shard_batch(np.zeros((8, 5)), made)


def test_a_missing_rank_shows_the_mapping():
  with pytest.raises(ShardingError) as caught:
    plan(InputRules(map_1d=("data",), map_2d=("data", None))).batch_spec(3)
  assert str(caught.value) == (
    "no input rule for an array of 3 dims.\n"
    "  InputRules(map_1d=('data',), map_2d=('data', None))\n"
    "  Fix: add a mapping for that rank, for example map_3d=('data', None, None)."
  )


def test_an_unknown_name_says_where():
  with pytest.raises(ShardingError, match=r"cannot shard inputs of 2 dims: dim 1 is named 'tokens'"):
    plan(InputRules(map_2d=("data", "tokens"))).batch_spec(2)


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (
      {"map_2d": ("data",)},
      r"map_2d=\('data',\) is not one name for each of 2 dims[\s\S]*map_2d=\('data', None\)",
    ),
    ({"map_1d": "data"}, r"map_1d='data' is not one name for each of 1 dims"),
    ({"map_0d": ()}, r"'map_0d' is not the rank of an input[\s\S]*scalars are always replicated"),
    ({"two": ("data", None)}, r"'two' is not the rank"),
  ],
)
def test_mappings_that_make_no_sense(arguments, text):
  with pytest.raises(ShardingError, match=text):
    InputRules(**arguments)


@pytest.mark.parametrize(
  "rules", [InputRules(map_1d=("data",), map_2d=[["a", "b"], None]), InputRules.all_axes()]
)
def test_they_read_back_as_written(rules):
  assert eval(repr(rules)) == rules
  assert hash(eval(repr(rules))) == hash(rules)
  assert RuleSet.of([rules, nxp.fsdp()]).inputs == rules


def test_two_input_rules():
  with pytest.raises(
    ShardingError, match=r"two input rules: InputRules\.all_axes\(\) and InputRules\(map_1d="
  ):
    RuleSet.of([InputRules.all_axes(), InputRules(map_1d=("data",))])
