"""Layers stacked by nnx.vmap: names follow the new dim or are refused, and created models still scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as Spec

import nnx_parallel as nxp
from layout.models import Block
from nnx_parallel.create.constructor import unsharded

DEPTH = 4


def stacked(name="layers", transform_metadata=True):
  metadata = {"transform_metadata": {nnx.PARTITION_NAME: name}} if transform_metadata else {}

  @nnx.vmap(in_axes=0, out_axes=0, **metadata)
  def make(key):
    return Block(8, nnx.Rngs(key))

  return lambda: make(jax.random.split(jax.random.key(0), DEPTH))


def scan(model, x, name):
  step = nnx.scan(
    lambda x, layer: layer(x),
    in_axes=(nnx.Carry, 0),
    out_axes=nnx.Carry,
    transform_metadata={nnx.PARTITION_NAME: name},
  )
  return step(x, model)


RULES = {
  "layers whole": nxp.LogicalRules(layers=None, embed="fsdp", mlp="tensor"),
  "layers split": nxp.LogicalRules(layers="fsdp", embed=None, mlp="tensor"),
  "a name that falls back": nxp.LogicalRules(layers="tensor", embed="fsdp", mlp=["tensor", None]),
  "un-annotated leaves by the fallback": [
    nxp.LogicalRules(layers=None, embed=None, mlp="tensor"),
    nxp.fsdp(min_size=8),
  ],
}


@pytest.mark.parametrize("rules", RULES)
def test_a_created_stack_scans_forward_and_backward_as_alone(rules):
  model = nxp.create_sharded_model(stacked(), nxp.make_mesh(fsdp=2, tensor=4), RULES[rules])
  alone, x = unsharded(stacked()), jax.random.normal(jax.random.key(1), (2, 8))

  def loss(model, x):
    return (scan(model, x, "layers") ** 2).mean()

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


def test_a_stack_without_a_name_is_carried_as_whole():
  rules = nxp.LogicalRules(embed="fsdp", mlp="tensor")
  model = nxp.create_sharded_model(stacked(None), nxp.make_mesh(fsdp=2, tensor=4), rules)
  assert model.up.kernel.out_sharding == (None, "embed", "mlp")
  x = jnp.ones((2, 8))
  expected = scan(unsharded(stacked(None)), x, None)
  np.testing.assert_allclose(nnx.jit(lambda m, x: scan(m, x, None))(model, x), expected, atol=1e-6)


def test_a_stack_whose_names_did_not_follow_is_noted_with_the_way_to_carry_them():
  rules = nxp.LogicalRules(embed=None, mlp=None)
  plan = nxp.plan(stacked(transform_metadata=False), nxp.make_mesh(fsdp=2, tensor=4), rules)
  assert plan.notes == (
    "fewer names than dims, the last dims are replicated: down.kernel, up.kernel (a layer stacked by nnx.vmap"
    " needs transform_metadata={nnx.PARTITION_NAME: 'layers'})",
  )


def test_a_trained_stack_keeps_its_layout():
  rules = RULES["layers split"].replace(batch="fsdp")
  plan = nxp.plan(stacked(), nxp.make_mesh(fsdp=2, tensor=4), rules)
  model = nxp.create_sharded_model(plan)

  @nnx.jit
  def forward(model, x):
    return scan(model, x, "layers")

  forward(model, jnp.ones((2, 8)))
  assert model.up.kernel.get_raw_value().sharding == plan["up.kernel"].sharding
  assert model.up.kernel.out_sharding == ("layers", "embed", "mlp")
