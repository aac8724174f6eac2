import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.core.nodes import value_of, variables
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.weights import Rule, WeightMap


class Listed(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs) for _ in range(3)])
    self.head = nnx.Linear(8, 4, rngs=rngs)


class Stacked(nnx.Module):
  def __init__(self):
    self.kernel = nnx.Param(jnp.zeros((3, 16, 8)))
    self.bias = nnx.Param(jnp.zeros((3, 16)))
    self.head = nnx.Linear(8, 4, rngs=nnx.Rngs(1))


LISTED = "layers.{i}.kernel", "layers.{i}.bias"
STACK = WeightMap(Rule(LISTED[0], "kernel", "layer i o -> layer o i"), Rule(LISTED[1], "bias"))
UNSTACK = WeightMap(Rule("kernel", LISTED[0], "layer o i -> layer i o"), Rule("bias", LISTED[1]))


def make_plan(init, **mesh):
  explicit = mesh.pop("explicit", False)
  devices = jax.devices()[: np.prod(list(mesh.values()))]
  mesh = nxp.make_mesh(mesh, devices=devices, explicit=explicit)
  return nxp.plan(init, mesh, nxp.fsdp(tuple(mesh.shape), min_size=4), optimizer=optax.adam(1e-3))


@pytest.mark.cases(1)
@pytest.mark.parametrize("explicit", [False, True])
def test_a_list_of_layers_becomes_a_stack_and_back(tmp_path, explicit):
  listed, optimizer = nxp.create_sharded_model(make_plan(Listed, a=8))
  mu = variables(optimizer)["opt_state", 0, "mu", "layers", 1, "kernel"]
  mu.set_raw_value(value_of(mu) + 3)
  Checkpointer(tmp_path / "list").save(1, listed, optimizer)
  plan = make_plan(Stacked, a=2, b=2, explicit=explicit)
  stacked, stacked_optimizer = Checkpointer(tmp_path / "list").restore(plan, weight_map=STACK)
  kernel = stacked.kernel.get_value()
  assert kernel.sharding.is_equivalent_to(plan["kernel"].sharding, 3)
  for i in range(3):
    np.testing.assert_array_equal(np.asarray(kernel)[i], np.asarray(listed.layers[i].kernel.get_value()).T)
  moment = np.asarray(value_of(variables(stacked_optimizer)["opt_state", 0, "mu", "kernel"]))
  np.testing.assert_array_equal(moment[1], 3 * np.ones((16, 8)))
  np.testing.assert_array_equal(moment[0], np.zeros((16, 8)))
  Checkpointer(tmp_path / "stack").save(1, stacked, stacked_optimizer)
  again, _ = Checkpointer(tmp_path / "stack").restore(make_plan(Listed, a=4), weight_map=UNSTACK)
  for path, leaf in variables(listed).items():
    np.testing.assert_array_equal(np.asarray(value_of(leaf)), np.asarray(value_of(variables(again)[path])))


def test_what_the_weight_map_leaves_over_is_an_error(tmp_path):
  listed, _ = nxp.create_sharded_model(make_plan(Listed, a=8))
  Checkpointer(tmp_path).save(1, listed)
  plan = make_plan(Stacked, a=8)
  half = WeightMap(STACK.rules[0])
  with pytest.raises(CheckpointError, match=r"(?s)missing  model/bias.*extra    model/layers\.0\.bias"):
    Checkpointer(tmp_path).restore(plan, weight_map=half, optimizer="drop")
  wrong = WeightMap(Rule("layers.{i}.kernel", "kernel"), STACK.rules[1])
  text = r"shape    model/layers\.0\.kernel: saved \(8, 16\), wanted \(16, 8\)"
  with pytest.raises(CheckpointError, match=text):
    Checkpointer(tmp_path).restore(plan, weight_map=wrong, optimizer="drop")


def test_each_byte_of_a_list_is_read_once(tmp_path):
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, *nxp.create_sharded_model(make_plan(Listed, a=8)))
  diff = checkpointer.diff(make_plan(Stacked, a=2, b=4), weight_map=STACK)
  ruled = {match.name: match for match in diff.matches if "layers." in match.path}
  assert len(ruled) == 18  # kernel and bias of three layers, and two moments of each
  for match in ruled.values():
    shard = match.stored.sharding.shard_shape(match.stored.shape)
    assert np.prod(shard) * match.stored.dtype.itemsize * 8 == match.saved.nbytes
  assert diff.bytes_read == checkpointer.metadata().nbytes
