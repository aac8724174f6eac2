"""The plan as a table: what it holds, how it is asked, and what it refuses."""

import jax
import optax
from flax import nnx
from jax.sharding import PartitionSpec as Spec

import nnx_parallel as nxp
from layout.models import LM, named

RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor", vocab="tensor")
init = lambda: LM(64, 8, 2, nnx.Rngs(0))


def lm_plan(mesh=None, **kwargs):
  return nxp.plan(init, mesh or nxp.make_mesh(data=2, fsdp=2, tensor=2), RULES, **kwargs)


def test_nothing_is_computed_while_planning():
  before = jax.live_arrays()  # kept, because what earlier tests left would go at any time
  plan = lm_plan(nxp.abstract_mesh(data=2, fsdp=2, tensor=2), optimizer=optax.adam(1e-3))
  assert {*map(id, jax.live_arrays())} <= {*map(id, before)}
  assert isinstance(plan["embed.embedding"].struct, jax.ShapeDtypeStruct)


def test_predicted_bytes_are_those_that_the_devices_hold():
  plan = lm_plan(optimizer=optax.adam(1e-3))
  held = dict.fromkeys(jax.devices(), 0)
  for variable in jax.tree.leaves(nnx.state(nxp.create_sharded_model(plan))):
    for shard in variable.addressable_shards:
      held[shard.device] += shard.data.nbytes
  assert set(held.values()) == {plan.bytes_per_device()}


def test_a_plan_of_real_devices_and_of_an_abstract_mesh_agree():
  real, abstract = lm_plan(), lm_plan(nxp.abstract_mesh(data=2, fsdp=2, tensor=2))
  assert not real.diff(abstract)


def test_the_abstract_state_has_the_planned_shardings():
  plan = lm_plan()
  state = plan.abstract_state()
  specs = {path: struct.sharding.spec for path, struct in state.items()}
  assert specs == {leaf.path: leaf.spec for leaf in plan.leaves}


def test_a_named_kernel_is_extended_by_the_fallback_and_says_so():
  init = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_metadata=named(None, "mlp"))
  rules = [nxp.LogicalRules(mlp="tensor"), nxp.fsdp(min_size=8)]
  plan = nxp.plan(init, nxp.make_mesh(fsdp=2, tensor=4), rules)
  assert plan["kernel"].spec == Spec("fsdp", "tensor")
  assert plan["kernel"].decision.reason == "names (-, mlp) + fsdp on the largest dim that divides"
  assert "extended by fsdp('fsdp', min_size=8, extend=True): 'fsdp' on dim 0 (8)" in plan.explain("kernel")


def test_a_path_rule_reaches_a_tied_variable_by_any_of_its_paths():
  rules = nxp.PathRules([("head", ("tensor", None))], strict=False)
  plan = nxp.plan(init, nxp.make_mesh(tensor=8), [rules, nxp.LogicalRules(unknown="replicate")])
  assert plan["head"].decision.source == "metadata"

  def plain():
    table = nnx.Embed(64, 8, rngs=nnx.Rngs(0))
    return nnx.Dict(embed=table, head=nnx.Dict(kernel=table.embedding))

  plan = nxp.plan(plain, nxp.make_mesh(tensor=8), nxp.PathRules([(r"head\.kernel", ("tensor", None))]))
  assert plan["embed.embedding"].spec == Spec("tensor", None)
  assert plan.notes == ()
