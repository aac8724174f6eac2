"""Modules and arrays from elsewhere, into the layout of a plan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from create.models import arrays_of, assert_same_arrays, stack

RULES = [nxp.LogicalRules(embed="fsdp", mlp="tensor"), nxp.replicate()]


def mesh(fsdp: int = 4, tensor: int = 2, **options: object) -> jax.sharding.Mesh:
  return nxp.make_mesh(fsdp=fsdp, tensor=tensor, **options)


@pytest.fixture
def alone() -> tuple[nnx.Module, nnx.Optimizer]:
  with nnx.use_eager_sharding(False):
    model = stack()
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def pointers(node: object) -> set[int]:
  found = set()
  for _, leaf in nnx.to_flat_state(nnx.state(node)):
    value = leaf.get_raw_value()
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
      value = jax.random.key_data(value)
    found |= {shard.data.unsafe_buffer_pointer() for shard in value.addressable_shards}
  return found


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("byte_budget", [0, 2**28])
def test_from_one_device_to_a_mesh_to_another_mesh(alone, explicit, byte_budget):
  expected = [arrays_of(node) for node in alone]
  model, optimizer = alone
  for target in (mesh(), mesh(2, 4, explicit=explicit), mesh(2, 2, devices=jax.devices()[4:])):
    plan = nxp.plan(stack, target, RULES, optimizer=optax.adamw(1e-2))
    model, optimizer = nxp.reshard(model, plan, optimizer=optimizer, donate=True, byte_budget=byte_budget)
    nxp.check_layout(model, plan, optimizer=optimizer)
    assert_same_arrays(arrays_of(model), expected[0])
    assert_same_arrays(arrays_of(optimizer), expected[1])
    assert model.head is model.embed


def test_without_donation_both_live_and_share_nothing(alone):
  plan = nxp.plan(stack, mesh(), RULES)
  first = nxp.reshard(alone[0], plan)
  second = nxp.reshard(first, plan)
  assert not pointers(first) & pointers(second)

  @nnx.jit(donate_argnums=0)
  def step(model: nnx.Module) -> None:
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)):
      leaf[...] = leaf[...] + 1

  before = arrays_of(second)
  step(second)
  assert_same_arrays(arrays_of(first), before)
  assert_same_arrays(arrays_of(alone[0]), before)


def test_donation_frees_the_old_arrays(alone):
  plan = nxp.plan(stack, mesh(), RULES)
  old = [leaf.get_raw_value() for _, leaf in nnx.to_flat_state(nnx.state(alone[0]))]
  nxp.reshard(alone[0], plan, donate=True)
  assert all(array.is_deleted() for array in old)


def test_numpy_arrays_by_name(alone):
  plan = nxp.plan(stack, mesh(), RULES, optimizer=optax.adamw(1e-2))
  given = [jax.tree.map(np.array, arrays_of(node)) for node in alone]
  model, optimizer = nxp.from_arrays(given[0], plan, optimizer=given[1])
  nxp.check_layout(model, plan, optimizer=optimizer)
  assert_same_arrays(arrays_of(model), given[0])
  given[0]["table"][:] = 7
  assert float(model.table[...].max()) <= 1


def test_uneven_arrays_are_padded():
  init = lambda: nnx.Linear(8, 13, rngs=nnx.Rngs(0))
  rules = nxp.PathRules([("kernel", (None, "fsdp")), ("bias", ("fsdp",))])
  plan = nxp.plan(init, nxp.make_mesh(fsdp=8), rules, uneven="pad")
  assert plan["kernel"].storage_shape == (8, 16)
  arrays = arrays_of(init())
  expected = np.pad(arrays["kernel"], [(0, 0), (0, 3)])
  for model in (nxp.create_sharded_model(plan), nxp.from_arrays(arrays, plan), nxp.reshard(init(), plan)):
    np.testing.assert_array_equal(np.asarray(model.kernel.get_raw_value()), expected)


def test_arrays_that_do_not_fit():
  plan = nxp.plan(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8))
  with pytest.raises(nxp.errors.PlanError) as caught:
    nxp.from_arrays({"kernel": np.ones((8, 4), np.float32), "scale": np.ones(3)}, plan)
  kernel = "kernel: planned float32[8,16], given float32[8,4] ndarray"
  problems = ["bias: planned float32[16], given nothing", kernel, "scale: given, and not in the plan"]
  assert [line.strip() for line in str(caught.value).splitlines()[1:-1]] == problems
  assert "Fix: give one array for each leaf: [leaf.name for leaf in plan.leaves]" in str(caught.value)
  with pytest.raises(nxp.errors.PlanError, match="the plan has no optimizer, but one was given"):
    nxp.from_arrays({}, plan, optimizer={})
  plan = nxp.plan(stack, mesh(), RULES, optimizer=optax.sgd(0.1))
  with pytest.raises(nxp.errors.PlanError, match=r"none was given.\n  Fix: model, optimizer = nxp.reshard"):
    nxp.reshard(nxp.unsharded(stack), plan)


def test_check_layout_names_each_difference():
  plan = nxp.plan(stack, mesh(), RULES, optimizer=optax.adamw(1e-2))
  model, optimizer = nxp.create_sharded_model(plan)
  nxp.check_layout(model, plan, optimizer=optimizer)
  block = model.blocks[0]
  block.up.kernel.set_value(jnp.zeros((16, 64)))
  nnx.update(model, {"blocks": {1: {"norm": {"scale": np.ones(16, np.float32)}}}})
  block.extra = nnx.Param(jnp.zeros(3))
  del block.up.bias
  optimizer.step.set_value(jnp.zeros((), jnp.int32))
  table = model.blocks[1].up.bias
  table.set_value(jax.device_put(table[...].astype(jnp.bfloat16), plan["blocks.1.up.bias"].sharding))
  one, split = "on one device (uncommitted)", "P('tensor',)"
  expected = [
    f"blocks.0.up.bias: planned float32[64] {split}, found nothing",
    f"blocks.0.up.kernel: planned float32[16,64] P('fsdp', 'tensor'), found float32[16,64] {one}",
    "blocks.1.norm.scale: planned float32[16] P(None,), found float32[16] ndarray",
    f"blocks.1.up.bias: planned float32[64] {split}, found bfloat16[64] {split} on (fsdp=4,tensor=2)",
    f"optimizer/step: planned uint32[] P(), found int32[] {one}",
    f"blocks.0.extra: planned nothing, found float32[3] {one}",
  ]
  message = r"5 of \d+ arrays are not laid out as planned, and 1 is not in the plan\."
  with pytest.raises(nxp.errors.LayoutMismatchError, match=message) as caught:
    nxp.check_layout(model, plan, optimizer=optimizer)
  assert [line.strip() for line in str(caught.value).splitlines()[1:-2]] == expected
  assert "model, optimizer = nxp.reshard(model, plan, optimizer=optimizer)" in str(caught.value)


def test_a_failure_after_arrays_were_freed_says_so(monkeypatch):
  model = nnx.List([nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(i)) for i in range(3)])
  plan = nxp.plan(lambda: nnx.clone(model), nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0))
  model[2].kernel.get_raw_value().delete()
  with pytest.raises(RuntimeError, match="deleted") as caught:
    nxp.reshard(model, plan, donate=True, byte_budget=1)
  assert "reshard(donate=True) had freed 2 arrays of the old module" in caught.value.__notes__[0]
  assert "Fix: restore the last checkpoint into the plan." in caught.value.__notes__[0]
