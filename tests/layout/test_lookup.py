"""Look-up tables: the fallback splits their rows; split by columns over the batch's axes, they are noted."""

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel import presets
from training import other_notes


def embed(vocab=64, width=32):
  return lambda: nnx.Embed(vocab, width, rngs=nnx.Rngs(0))


def planned(rules, init=None, mesh=None, **options):
  return nxp.plan(init or embed(), nxp.abstract_mesh(**(mesh or {"fsdp": 8})), rules, **options)


@pytest.mark.parametrize(("mesh", "rules", "expected"), [
  ({"fsdp": 8}, [nxp.LogicalRules(unknown="replicate"), nxp.fsdp(min_size=0)], P("fsdp", None)),
  ({"data": 8}, presets.fsdp("data", min_size=0), P("data", None)),
  ({"replica": 2, "fsdp": 4}, presets.fsdp(replica="replica", min_size=0), P("fsdp", None)),
  ({"fsdp": 8, "tensor": 1}, presets.fsdp_tensor(min_size=0), P(("tensor", "fsdp"), None)),
  ({"fsdp": 4, "tensor": 2}, presets.fsdp_tensor(min_size=0), P(("tensor", "fsdp"), None)),
  ({"data": 2, "fsdp": 2, "tensor": 2}, presets.fsdp_tensor(min_size=0), P(("tensor", "fsdp"), None)),
  ({"data": 2, "context": 4}, presets.context(min_size=0), P("data", None)),
  ({"data": 2, "expert": 4}, presets.expert(min_size=0), P("data", None)),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(64, 32), (32, 64)], ids=["many rows", "wide rows"])
def test_the_fallback_splits_the_rows(mesh, rules, expected, shape):
  plan = planned([presets.layers(), rules], embed(*shape), mesh)
  assert plan["embedding"].spec == expected
  assert other_notes(plan) == ()


def test_what_the_plan_says():
  rules = [presets.layers(), presets.fsdp_tensor(min_size=0)]
  assert planned(rules, mesh={"fsdp": 4, "tensor": 2}).explain("embedding") == (
    "embedding: Param float32[64,32] -> P(('tensor', 'fsdp'), None)\n"
    "  no annotation; path rule ('embedding',): ('vocab', 'embed')\n"
    "  'vocab' -> 'tensor'\n"
    "  'embed' -> None\n"
    "  extended by fsdp('fsdp', min_size=0, extend=True): 'fsdp' behind 'tensor' on dim 0 (64), the rows of a"
    " look-up table\n"
    "  each device holds float32[8,32], 1024 bytes of 8192"
  )
  assert planned(nxp.fsdp(min_size=0))["embedding"].decision.reason == "fsdp on its rows"


def test_subclasses_stacks_and_tied_heads_are_tables_too():
  class Scaled(nnx.Embed):
    def __call__(self, inputs):
      return super().__call__(inputs) * 2

  class Tied(nnx.Module):
    def __init__(self):
      self.embed = Scaled(32, 64, rngs=nnx.Rngs(0))
      self.a_head = self.embed.embedding  # its first path in flax's order

  assert planned(nxp.fsdp(min_size=0), Tied)["a_head"].spec == P("fsdp", None)
  stack = nnx.vmap(lambda rngs: nnx.Embed(16, 32, rngs=rngs), in_axes=0, out_axes=0)
  plan = planned(nxp.fsdp(min_size=0), lambda: stack(nnx.Rngs(0).split(64)))
  assert plan["embedding"].spec == P(None, "fsdp", None)


def test_a_parameter_that_is_only_called_so_is_no_table():
  class Own(nnx.Module):
    def __init__(self):
      self.embedding = nnx.Param(jnp.zeros((32, 64)))

  assert planned(nxp.fsdp(min_size=0), Own)["embedding"].spec == P(None, "fsdp")


def test_columns_that_rules_ask_for_are_noted_once_for_all_tables():
  init = lambda: nnx.List([embed()() for _ in range(5)])
  rules = [nxp.LogicalRules(batch="fsdp", vocab=None, embed="fsdp"), presets.layers()]
  assert planned(rules, init).notes == (
    "*.embedding (5): look-up tables split by columns over fsdp, as the"
    " batch, so a step sends activations instead of weights; split the rows: names ('fsdp', None)",
  )
