"""Variables that name a mesh of their own, and rules from Flax's context."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel.errors import ShardingError
from training import run_steps

AUTO = jax.sharding.AxisType.Auto
ONE = jax.make_mesh((2, 4), ("a", "b"), (AUTO,) * 2)
OTHER = jax.make_mesh((8,), ("c",), (AUTO,))
SAME_NAME = jax.make_mesh((8,), ("a",), (AUTO,))


class Two(nnx.Module):  # Each parameter is made for a mesh of its own, as Flax allows
  def __init__(self, first, second):
    self.first = nnx.Param(jnp.full((16, 16), 0.1), **first)
    self.second = nnx.Param(jnp.full((16, 16), 0.1), **second)

  def __call__(self, x):
    return x @ self.first[...] @ self.second[...]


FIRST = {"out_sharding": ("a", "b"), "mesh": ONE}
SECONDS = {
  "mesh=": ({"out_sharding": ("c",), "mesh": OTHER}, "its mesh {'c': 8}, the plan's {'a': 2, 'b': 4}"),
  "a sharding": (
    {"out_sharding": jax.NamedSharding(OTHER, P(None, "c"))},
    "its mesh {'c': 8}, the plan's {'a': 2, 'b': 4}",
  ),
  "one name": ({"out_sharding": ("a",), "mesh": SAME_NAME}, "a=2 and a=8"),
}


@pytest.mark.each_case
@pytest.mark.parametrize(("second", "text"), SECONDS.values(), ids=SECONDS)
def test_several_meshes_in_one_model_are_refused_with_both(second, text):
  with pytest.raises(ShardingError, match="a plan has one") as found:
    nxp.plan(lambda: Two(FIRST, second), ONE)
  assert text in str(found.value)
  assert "one plan for each mesh" in str(found.value)


def test_rules_plan_a_model_of_several_meshes_on_one():
  init = lambda: Two(FIRST, SECONDS["mesh="][0])
  plan = nxp.plan(init, ONE, {"c": ("a", "b"), "batch": "a"}, optimizer=optax.sgd(1e-3))
  assert (plan["first"].spec, plan["second"].spec) == (P("a", "b"), P(("a", "b"), None))
  x = np.ones((16, 16), np.float32)
  run = run_steps(plan, lambda model, x: (model(x) ** 2).mean(), [x])
  assert run.losses == pytest.approx([(1.6 * 1.6) ** 2], rel=1e-5)


class Named(nnx.Module):
  def __init__(self):
    self.kernel = nnx.Param(jnp.ones((8, 8)), out_sharding=("embed", "mlp"))

  def __call__(self, x):
    return nxp.constrain(x @ self.kernel[...], "batch", "mlp")


def test_the_rules_of_flax_around_a_plan_are_its_rules():
  mesh = nxp.make_mesh(data=2, tensor=4)
  with nnx.logical_axis_rules((("embed", None), ("mlp", "tensor"))):
    plan = nxp.plan(Named, mesh, nxp.LogicalRules(batch="data"), optimizer=optax.sgd(1e-3))
    model, _ = nxp.create_sharded_model(plan)
    nnx.state(nnx.clone(model))
  assert plan["kernel"].spec == model.kernel.sharding.spec == P(None, "tensor")
  assert "mlp='tensor'" in repr(plan.rules)
  run = run_steps(plan, lambda model, x: model(x).mean(), [np.ones((8, 8), np.float32)])
  assert run.losses == [8.0]


def test_the_rules_of_flax_and_of_the_plan_may_not_differ():
  mesh = nxp.abstract_mesh(data=2, tensor=4)
  with nnx.logical_axis_rules((("embed", None), ("mlp", "tensor"))):
    with pytest.raises(ShardingError, match=r"'mlp' has two rules: in the plan, and in nnx\.logical_axis"):
      nxp.plan(Named, mesh, {"mlp": "data"})
    assert nxp.plan(Named, mesh, {"mlp": "tensor"})["kernel"].spec == P(None, "tensor")


def test_rules_in_use_are_no_rules_of_a_plan():
  """`use_rules` gives flax its rules too, for activations; a plan is made from its arguments."""
  mesh = nxp.make_mesh(data=2, tensor=4)
  with nxp.use_rules({"embed": None, "mlp": "data"}, mesh):
    assert nxp.plan(Named, mesh, {"embed": None, "mlp": "tensor"})["kernel"].spec == P(None, "tensor")
    with pytest.raises(ShardingError, match="neither a rule nor a mesh axis"):
      nxp.plan(Named, mesh)


@pytest.mark.parametrize("key", ["opt_sharding", "optimizer_shard", "optim_sharding"])
def test_a_misspelt_layout_of_state_is_not_taken_for_the_layout_of_the_parameter(key):
  with pytest.raises(ShardingError, match=rf"'{key}' means nothing to flax[\s\S]*optimizer_sharding=\('a',"):
    nxp.plan(lambda: Two({**FIRST, key: ("a", "b")}, FIRST), ONE, optimizer=optax.adam(1e-3))


def test_a_mesh_from_an_array_of_devices():
  mesh = nxp.make_mesh(data=2, fsdp=4, devices=np.array(jax.devices()).reshape(2, 4))
  assert mesh == nxp.make_mesh(data=2, fsdp=4)
