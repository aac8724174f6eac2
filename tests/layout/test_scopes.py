"""The scope of several models, and the mesh and rules that apply to an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.core.nodes import SCOPE
from nnx_parallel.errors import MeshError, ShardingError, TrainError
from nnx_parallel.layout.constrain import (
  Scope,
  active_mesh,
  axes_of_positions,
  default_scope,
  manual_too,
  mapped_axes,
  scope_in_use,
  scope_of,
  scoped,
  split_positions,
)

P, FREE = jax.P, jax.P.UNCONSTRAINED


def mesh_of(explicit=False, **sizes):
  return nxp.make_mesh(sizes or {"data": 2, "fsdp": 2, "tensor": 2}, explicit=explicit)


def scope(mesh=None, *, stated=True, inputs=None, unknown="error", **rules):
  return Scope(nxp.LogicalRules(rules, unknown=unknown), mesh, inputs, stated)


def merged(*scopes):
  return scope_of(nnx.Param(jnp.ones(2), **{SCOPE: one}) for one in scopes)


def test_models_without_a_plan_have_no_scope():
  assert scope_of([]) is None
  assert scope_of([nnx.Param(jnp.ones(2)), jnp.ones(2)]) is None
  one = scope(mesh_of(), batch="data")
  assert merged(one, one) == one


def test_the_mesh_is_that_of_the_plan_that_has_one():
  mesh = mesh_of()
  assert merged(scope(batch="data"), scope(mesh, batch="data", mlp="tensor")).mesh == mesh
  assert merged(scope(mesh, batch="data", mlp="tensor"), scope(batch="data")).mesh == mesh
  with pytest.raises(TrainError, match="different meshes") as caught:
    merged(scope(mesh, batch="data"), scope(mesh_of(data=8), batch="data"))
  assert "{'data': 2, 'fsdp': 2, 'tensor': 2} (AxisType.Auto) and {'data': 8} (AxisType.Auto)" in str(
    caught.value
  )


@pytest.mark.parametrize("turned", [False, True])
def test_the_plan_that_states_the_batch_decides_it(turned):
  mesh = mesh_of()
  stated, other = scope(mesh, batch="data"), scope(mesh, stated=False, batch=("data", "fsdp"))
  found = merged(*([other, stated] if turned else [stated, other]))
  assert found.rules["batch"] == (("data",),)
  assert found.stated


@pytest.mark.parametrize("turned", [False, True])
def test_of_two_that_do_not_the_one_over_more_axes_decides(turned):
  mesh = mesh_of()
  both = [scope(mesh, stated=False, batch=("data", "fsdp")), scope(mesh, stated=False, batch="data")]
  found = merged(*(both[::-1] if turned else both))
  assert found.rules["batch"] == (("data", "fsdp"),)
  assert not found.stated


def test_batches_over_different_axes_are_refused():
  mesh = mesh_of()
  for stated, axes in ((True, ("data", "fsdp")), (True, "fsdp"), (False, "fsdp")):
    with pytest.raises(TrainError, match="split the examples differently") as caught:
      merged(scope(mesh, stated=stated, batch="data"), scope(mesh, stated=stated, batch=axes))
    assert "over ('data',) and over " in str(caught.value)
    assert "nxp.LogicalRules(batch=('data',))" in str(caught.value)
  small = mesh_of(data=8, fsdp=1, tensor=1)  # an axis of size 1 splits nothing
  assert merged(scope(small, batch="data"), scope(small, batch=("data", "fsdp"))).rules["batch"] == (
    ("data",),
  )


def test_positions_that_are_split_differently_are_refused():
  mesh = mesh_of()
  with pytest.raises(TrainError, match="split the positions differently"):
    merged(scope(mesh, batch="data", seq="tensor"), scope(mesh, batch="data", seq="fsdp"))
  found = merged(scope(mesh, batch="data", seq="tensor"), scope(mesh, batch="data"))
  assert found.rules["seq"] == (("tensor",),)


def test_inputs_that_are_split_differently_are_refused():
  mesh, inputs = mesh_of(), nxp.InputRules(map_2d=("data", "tensor"))
  others = nxp.InputRules(map_2d=("data", None))
  one, none = scope(mesh, batch="data", inputs=inputs), scope(mesh, batch="data", mlp="tensor")
  assert merged(one, none).inputs == merged(none, one).inputs == inputs
  with pytest.raises(TrainError, match=r"split the inputs differently[\s\S]*batch=\('data',\)"):
    merged(one, scope(mesh, batch="data", inputs=others))


def test_names_with_two_rules_belong_to_neither():
  mesh = mesh_of()
  one, two = (
    scope(mesh, batch="data", mlp="tensor", head="fsdp"),
    scope(mesh, batch="data", mlp="fsdp", embed="tensor"),
  )
  found = merged(one, two)
  assert found.apart == {"mlp"}
  assert {name: found.rules[name] for name in found.rules} == {
    "batch": (("data",),),
    "head": (("fsdp",),),
    "embed": (("tensor",),),
  }
  assert merged(one, two, scope(mesh, batch="data")).apart == {"mlp"}
  with scoped(found), pytest.raises(ShardingError, match=r"different rules for 'mlp'"):
    nxp.constrain(jnp.ones((2, 2)), "batch", "mlp")
  assert active_mesh().apart == set()


@pytest.mark.parametrize("turned", [False, True])
def test_unknown_names_are_replicated_if_one_plan_says_so(turned):
  mesh = mesh_of()
  both = [scope(mesh, batch="data"), scope(mesh, batch="data", unknown="replicate")]
  assert merged(*(both[::-1] if turned else both)).rules.unknown == "replicate"
  assert merged(both[0], scope(mesh, batch="data", mlp=None)).rules.unknown == "error"


def test_the_caller_goes_before_a_plan_and_gets_its_mesh():
  mesh, own = mesh_of(), nxp.LogicalRules(batch="tensor")
  plan = scope(mesh, batch="data")
  with default_scope(plan):
    assert scope_in_use() == plan
  with nxp.use_rules(own), default_scope(plan):
    assert scope_in_use().rules == own
    assert active_mesh().mesh.shape == mesh.shape
  with default_scope(None):
    assert scope_in_use() is None
  leaf = nnx.Param(jnp.ones((4, 4)), **{SCOPE: plan})
  with nxp.use_rules(own):
    found = active_mesh(leaf)
  assert (found.mesh, found.rules) == (mesh, own)
  assert active_mesh(leaf).rules == plan.rules
  assert active_mesh(jnp.ones(2)).mesh is None
  assert active_mesh(jnp.ones(2)).spec(("batch",), (2,)) == P()


def test_the_active_mesh_knows_the_transforms_around():
  mesh, seen = mesh_of(), []

  def look(x):
    found = active_mesh(x)
    seen.append((found.manual, found.spec(("batch", "mlp"), (4, 4))))
    return x

  with scoped(scope(mesh, batch=("data", "fsdp"), mlp="tensor")):
    jax.make_jaxpr(look)(jnp.ones((4, 4)))
    one = jax.shard_map(look, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    jax.make_jaxpr(one)(jnp.ones((4, 4)))
    with mapped_axes(("tensor",)):
      assert manual_too(mesh) == {"tensor"}
      assert manual_too(mesh_of(explicit=True)) == manual_too(None) == set()
      jax.make_jaxpr(look)(jnp.ones((4, 4)))
  assert seen == [
    (set(), P(("data", "fsdp"), "tensor")),
    ({"data"}, P("fsdp", "tensor")),
    (set(), P(("data", "fsdp"), None)),
  ]


def test_another_mesh_than_the_active_one_is_refused():
  outer, inner = mesh_of(), scoped(scope(mesh_of(data=8), batch="data"))
  with jax.set_mesh(outer), inner, jax.set_mesh(outer), pytest.raises(MeshError, match="in scope"):
    nxp.constrain(jnp.ones((8, 2)), "batch", None)
  x = jax.device_put(np.ones((8, 2), np.float32), jax.NamedSharding(mesh_of(other=8), P("other")))
  with jax.set_mesh(outer), pytest.raises(MeshError, match="of the array"):
    nxp.constrain(x, "other", None)


def test_a_real_array_needs_real_devices():
  abstract = scoped(scope(mesh_of().abstract_mesh, batch="data"))
  with pytest.raises(MeshError, match="a real array cannot be laid out on an abstract mesh"), abstract:
    nxp.constrain(jnp.ones((8, 2)), "batch", None)


@pytest.mark.parametrize(
  ("shape", "held"), [((4, 6, 8), True), ((4, 5, 8), False), ((3, 6, 8), False), ((4, 6), False)]
)
def test_positions_are_split_where_they_divide(shape, held):
  def constraints(x):
    eqns = jax.make_jaxpr(split_positions)(x).eqns
    return [eqn.params["sharding"].spec for eqn in eqns]

  with scoped(scope(mesh_of(), batch="data", seq="tensor")):
    assert axes_of_positions() == ("tensor",)
    assert constraints(jnp.ones(shape)) == ([P("data", "tensor", None)] if held else [])
    assert constraints(jnp.ones(shape, "int32")) == []
  with scoped(scope(mesh_of(), batch="data")):
    assert axes_of_positions() == ()
    assert constraints(jnp.ones(shape)) == []
  assert constraints(jnp.ones(shape)) == []
  with scoped(scope(mesh_of(explicit=True), batch="data", seq="tensor")):
    assert axes_of_positions() == ()
