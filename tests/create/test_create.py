"""What creation promises on each kind of mesh; under an active mesh: `systems/test_active_meshes.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from create.models import arrays_of, assert_same_arrays, stack

RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor")

compiled = pytest.mark.parametrize("compile", ["slices", "jit"])


def mesh_of(kind: str) -> jax.sharding.Mesh:
  return nxp.make_mesh(data=2, fsdp=2, tensor=2, explicit=kind == "explicit")


@pytest.fixture(scope="module")
def eager() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  with nnx.use_eager_sharding(False):
    model = stack()
    return arrays_of(model), arrays_of(nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@compiled
def test_values_layout_and_metadata(compile, kind, eager):
  mesh = mesh_of(kind)
  plan = nxp.plan(stack, mesh, [RULES, nxp.replicate()], optimizer=optax.adamw(1e-2))
  model, optimizer = nxp.create_sharded_model(plan, compile=compile)
  assert_same_arrays(arrays_of(model), eager[0])
  assert_same_arrays(arrays_of(optimizer), eager[1])
  assert model.head is model.embed
  for root, node in (("model", model), ("optimizer", optimizer)):
    for path, leaf in plan.of(root).items():
      variable = dict(nnx.to_flat_state(nnx.state(node)))[path]
      value = variable.get_raw_value()
      assert value.sharding == leaf.sharding, leaf.name
      assert {shard.data.nbytes for shard in value.addressable_shards} == {leaf.bytes_per_device}
  kernel = model.blocks[0].up.kernel
  assert kernel.get_value().sharding.spec == jax.P("fsdp", "tensor")
  assert nnx.get_partition_spec(nnx.state(model))["blocks"][0]["up"]["kernel"] == jax.P("fsdp", "tensor")
  assert kernel.get_metadata("out_sharding") == ("embed", "mlp")
  assert kernel.get_metadata("mesh") == mesh


@compiled
def test_no_two_leaves_share_memory(compile):
  plan = nxp.plan(stack, mesh_of("auto"), [RULES, nxp.replicate()], optimizer=optax.adamw(1e-2))
  seen: dict[int, str] = {}
  for node, root in zip(nxp.create_sharded_model(plan, compile=compile), ("model", "optimizer"), strict=True):
    for path, leaf in nnx.to_flat_state(nnx.state(node)):
      value = leaf.get_raw_value()
      if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
      for shard in value.addressable_shards:
        pointer = shard.data.unsafe_buffer_pointer()
        # Devices of one leaf may read the same host memory; two leaves may not, or donating one frees both.
        assert seen.setdefault(pointer, f"{root} {path}") == f"{root} {path}"


def test_init_may_build_something_else_only_before_planning():
  widths = iter([4, 8])
  plan = nxp.plan(lambda: nnx.Linear(8, next(widths), rngs=nnx.Rngs(0)), nxp.make_mesh(data=8))
  text = r"than in the plan: bias\.\n  planned Param float32\[4\], .*built .*\[8\].*\n  Fix: make init"
  with pytest.raises(nxp.errors.PlanError, match=text):
    nxp.create_sharded_model(plan)


@compiled
def test_values_that_numpy_computes_in_init(compile):
  class Scaled(nnx.Module):
    def __init__(self):
      self.scale, self.order = nnx.Variable(np.sqrt(16.0)), nnx.Variable(np.arange(3))

  model = nxp.create_sharded_model(Scaled, nxp.make_mesh(fsdp=8), compile=compile)
  assert float(model.scale[...]) == 4
  np.testing.assert_array_equal(model.order[...], [0, 1, 2])
