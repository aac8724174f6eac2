"""Layers stacked by nnx.vmap: names follow the new dim or are refused, and created models still scan."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as Spec

import nnx_parallel as nxp
from layout.models import Block
from nnx_parallel.create.constructor import unsharded

DEPTH = 4


def stacked(name="layers", transform_metadata=True, depth=DEPTH):
  metadata = {"transform_metadata": {nnx.PARTITION_NAME: name}} if transform_metadata else {}

  @nnx.vmap(in_axes=0, out_axes=0, **metadata)
  def make(key):
    return Block(8, nnx.Rngs(key))

  return lambda: make(jax.random.split(jax.random.key(0), depth))


def scan(model, x, name):
  axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
  step = nnx.scan(lambda x, layer: layer(x), **axes, transform_metadata={nnx.PARTITION_NAME: name})
  return step(x, model)


RULES = {
  "layers whole": nxp.LogicalRules(layers=None, embed="fsdp", mlp="tensor"),
  "layers split": nxp.LogicalRules(layers="fsdp", embed=None, mlp="tensor"),
  "a name that falls back": nxp.LogicalRules(
    layers="tensor", embed="fsdp", mlp=nxp.LogicalRules.first("tensor", None)
  ),
  "un-annotated leaves by the fallback": [
    nxp.LogicalRules(layers=None, embed=None, mlp="tensor"),
    nxp.fsdp(min_size=8),
  ],
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_a_created_stack_scans_forward_and_backward_as_alone(rules):
  model = nxp.create_sharded_model(stacked(), nxp.make_mesh(fsdp=2, tensor=4), RULES[rules])
  alone, x = unsharded(stacked()), jax.random.normal(jax.random.key(1), (2, 8))
  loss = lambda model, x: (scan(model, x, "layers") ** 2).mean()
  run = nnx.jit(nnx.value_and_grad(loss))
  (value, grads), (expected, reference) = run(model, x), run(alone, x)
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(reference), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
  assert model.up.kernel.out_sharding == ("layers", "embed", "mlp")


def test_the_stacked_dim_is_carried_by_name():
  plan = nxp.plan(stacked(), nxp.make_mesh(fsdp=2, tensor=4), RULES["layers split"])
  assert plan["up.kernel"].names == ("layers", "embed", "mlp")
  assert plan["up.kernel"].spec == Spec("fsdp", None, "tensor")


SHIFTED = "nxp.PathRules([('down.kernel', {}), ('up.kernel', {})], strict=False)".format(
  (None, "mlp", "embed"), (None, "embed", "mlp")
)


def test_a_stack_whose_names_did_not_follow_is_noted_with_the_rules_that_shift_them():
  rules = nxp.LogicalRules(embed=None, mlp=None)
  plan = nxp.plan(stacked(transform_metadata=False), nxp.make_mesh(fsdp=8), rules)
  assert plan.notes == (
    "fewer names than dims, the last dims are replicated: down.kernel, up.kernel. For layers stacked by"
    f" nnx.vmap, add {SHIFTED}, or name the new dim by nnx.transform_metadata(partition='layers') below"
    " nnx.vmap, or by its transform_metadata={nnx.PARTITION_NAME: 'layers'}",
  )


def test_a_stack_that_does_not_divide_is_an_error_with_the_rule_that_shifts():
  rules = nxp.LogicalRules(embed="tensor", mlp=None)
  with pytest.raises(nxp.errors.ShardingError) as caught:
    nxp.plan(stacked(transform_metadata=False, depth=3), nxp.make_mesh(fsdp=2, tensor=4), rules)
  assert "cannot shard up.kernel: dim 0 ('embed') has length 3" in str(caught.value)
  assert str(caught.value).endswith(
    "If the layer is stacked, its names belong to the last dims: nxp.PathRules([('up.kernel', (None, 'embed',"
    " 'mlp'))], strict=False)"
  )
