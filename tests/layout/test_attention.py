"""The annotation that `nnx.MultiHeadAttention` passes on to its output projection."""

import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel import LogicalRules
from nnx_parallel.errors import ShardingError
from training import other_notes

RULES = LogicalRules(embed=None, heads="tensor")
KERNEL = {"kernel_metadata": {"out_sharding": ("embed", "heads", None)}}
BIAS = {"bias_metadata": {"out_sharding": ("heads", None)}}
OUT_KERNEL = {"out_kernel_metadata": {"out_sharding": ("heads", None, "embed")}}
OUT_BIAS = {"out_bias_metadata": {"out_sharding": ("embed",)}}


class Net(nnx.Module):
  def __init__(self, **options):
    self.attn = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), **options)


def plan(rules=RULES, **options):
  return nxp.plan(lambda: Net(**options), nxp.abstract_mesh(fsdp=2, tensor=2), rules)


def test_names_that_were_passed_on_are_refused_with_the_argument_to_give():
  text = r"out\.kernel has the query's names, which do not fit[\s\S]*out_kernel_metadata=.*None, 'embed'"
  with pytest.raises(ShardingError, match=text):
    plan(**KERNEL)
  with pytest.raises(ShardingError, match=r"out\.bias has the query's names[\s\S]*out_bias_metadata=.*embed"):
    plan(**KERNEL, **BIAS, **OUT_KERNEL)


def test_its_own_annotation_is_honoured():
  made = plan(**KERNEL, **BIAS, **OUT_KERNEL, **OUT_BIAS)
  assert made["attn.query.kernel"].spec == P(None, "tensor", None)
  assert made["attn.out.kernel"].spec == P("tensor", None, None)
  assert made["attn.out.bias"].spec == P(None)
  assert other_notes(made) == ()


def test_mesh_axes_that_were_passed_on_are_noted():
  made = plan(kernel_metadata={"out_sharding": ("fsdp", "tensor", None)})
  assert other_notes(made) == (
    "attn.out.kernel has the query's annotation ('fsdp', 'tensor', None); set its own with"
    " out_kernel_metadata",
    "no array of the model has these names, so their rules act on activations only: heads",
  )
