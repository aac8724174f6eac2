"""Batches land where the plan's batch rule says, and bad sizes are refused with the size that works."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp


def _plan(rules=None, **axes):
  return nxp.plan(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(**axes), rules)


def test_batch_rule_splits_dim_0_and_replicates_scalars():
  plan = _plan(nxp.LogicalRules(batch=("data", "fsdp")), data=2, fsdp=2, tensor=2)
  batch = nxp.shard_batch({"x": np.ones((8, 3), np.float32), "n": np.float32(2.0)}, plan)
  assert batch["x"].sharding.spec == P(("data", "fsdp"), None)
  assert batch["x"].addressable_shards[0].data.shape == (2, 3)
  assert batch["n"].sharding.is_fully_replicated


def test_without_a_rule_the_data_and_fsdp_axes_split_the_batch():
  plan = _plan(nxp.fsdp(), data=2, fsdp=2, tensor=2)
  assert plan.batch_spec(2) == P(("data", "fsdp"), None)


def test_no_axis_for_the_batch_is_an_error():
  with pytest.raises(nxp.ShardingError, match="no rule says which mesh axes split the batch") as error:
    _plan(tensor=8).batch_spec(2)
  assert 'LogicalRules(batch="tensor")' in str(error.value)


def test_uneven_batch_names_the_remainder_and_the_next_sizes():
  plan = _plan(data=8)
  with pytest.raises(nxp.ShardingError) as error:
    nxp.shard_batch({"x": np.ones((12, 3))}, plan)
  text = str(error.value)
  assert "batch['x'] has 12 examples, which 8 shards cannot split evenly (remainder 4)" in text
  assert "use a global batch of 8 or 16." in text


def test_an_abstract_mesh_cannot_hold_a_batch():
  plan = nxp.plan(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nxp.abstract_mesh(data=4096))
  with pytest.raises(nxp.ShardingError, match="abstract mesh"):
    nxp.shard_batch(np.ones((8, 3)), plan)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_batches_keep_order_and_lose_none(prefetch):
  plan = _plan(data=8)
  source = [np.full((8,), i, np.float32) for i in range(4)]
  seen = [int(batch[0]) for batch in nxp.batches(source, plan, prefetch=prefetch)]
  assert seen == [0, 1, 2, 3]


def test_values_survive_placement():
  plan = _plan(data=4, tensor=2)
  value = np.arange(24, dtype=np.float32).reshape(8, 3)
  np.testing.assert_array_equal(jax.device_get(nxp.shard_batch(value, plan)), value)
