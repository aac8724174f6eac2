"""Plans that leave the process: JSON, differences, golden files."""

import json

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from layout.models import LM
from nnx_parallel.report.compile_report import state_categories
from nnx_parallel.testing import assert_golden_plan

MLP = nxp.LogicalRules.first("tensor", None)
RULES = [
  nxp.LogicalRules(embed="fsdp", mlp=MLP, vocab=("tensor", "data"), uneven={"vocab": "pad"}),
  nxp.PathRules([(("norm", "scale"), None), (r".*\.bias", (None,))], strict=False),
  nxp.fsdp(min_size=100),
]
init = lambda: LM(61, 8, 2, nnx.Rngs(0))


def lm_plan(mesh=None, rules=RULES, optimizer=None):
  return nxp.plan(init, mesh or nxp.make_mesh(data=2, fsdp=2, tensor=2), rules, optimizer=optimizer)


def test_json_holds_the_whole_plan():
  mesh = nxp.abstract_mesh(data=2, fsdp=2, tensor=2)
  plan = lm_plan(mesh, optimizer=optax.adam(1e-3))
  back = nxp.Plan.from_json(plan.to_json())
  assert back.leaves == plan.leaves
  assert (str(back), back.notes, repr(back.rules)) == (str(plan), plan.notes, repr(plan.rules))
  assert back.batch_spec(2) == plan.batch_spec(2)
  assert back.explain("embed.embedding") == plan.explain("embed.embedding")
  axes = {"data": 2, "fsdp": 2, "tensor": 2}
  assert json.loads(plan.to_json())["mesh"] == {"axes": axes, "explicit": False}


def test_a_stored_plan_cannot_create():
  plan = nxp.Plan.from_json(lm_plan().to_json())
  with pytest.raises(
    nxp.errors.PlanError, match=r"read from JSON, without its constructor.*\n.*nxp.plan\(init"
  ):
    nxp.create_sharded_model(plan)


def without(name):
  """A stored plan whose fallback lacks a part."""
  plan = nxp.plan(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8), nxp.fsdp())
  data = json.loads(plan.to_json())
  del data["rules"]["fallback"][name]
  return json.dumps(data)


REFUSED = [
  (lambda: "{", "this is not the JSON of a plan"),
  (lambda: "[]", r"not a plan that this version can read.\n  format 'list'; this version reads 2"),
  (lambda: '{"format": 99}', r"format 99; this version reads 2"),
  (lambda: '{"format": 2}', r"JSON of a plan lacks 'mesh'.\n  Fix: write it again with plan.to_json\(\)"),
  (lambda: without("mode"), "this JSON of a plan lacks 'mode'"),
  (lambda: without("extend"), "this JSON of a plan lacks 'extend'"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_is_not_the_stored_plan_is_refused(text, message):
  with pytest.raises(nxp.errors.PlanError, match=message):
    nxp.Plan.from_json(text())


def test_a_difference_names_what_changed_once_for_all_layers():
  before = lm_plan()
  after = lm_plan(rules=[nxp.LogicalRules(embed=None, mlp="tensor", vocab=None)])
  assert str(before.diff(after)) == (
    "changed               n  what       before               after\n"
    "blocks.*.down.kernel  2  spec       (tensor, fsdp)       (tensor, -)\n"
    "blocks.*.up.kernel    2  spec       (fsdp, tensor)       (-, tensor)\n"
    "embed.embedding       1  spec       (tensor+data, fsdp)  replicated\n"
    "embed.embedding       1  stored as  [64,8]               -\n"
    f"per device {before.bytes_per_device() / 1024:.4g} KiB -> {after.bytes_per_device() / 1024:.4g} KiB"
  )


def test_a_golden_plan_is_written_compared_and_its_difference_shown(tmp_path, monkeypatch):
  file = tmp_path / "golden" / "lm.txt"
  with pytest.raises(AssertionError, match=r"does not exist.*write it with NNX_PARALLEL_UPDATE"):
    assert_golden_plan(lm_plan(), file)
  monkeypatch.setenv("NNX_PARALLEL_UPDATE_GOLDEN", "1")
  assert_golden_plan(lm_plan(), file)
  monkeypatch.delenv("NNX_PARALLEL_UPDATE_GOLDEN")
  assert_golden_plan(lm_plan(), file)
  assert_golden_plan(nxp.Plan.from_json(lm_plan().to_json()), file)  # it has no constructor
  said = "embed.embedding: float32[61,8]  Param  (tensor+data, fsdp)  [64,8]  default  head"
  assert said in file.read_text()
  other = lm_plan(rules=[nxp.LogicalRules(embed=None, mlp="tensor", vocab=None)])
  with pytest.raises(AssertionError, match=r"-embed.embedding: .*\n(.*\n)*\+embed.embedding: .*replicated"):
    assert_golden_plan(other, file)


class Weight(nnx.Param):
  """A parameter whose name does not say so."""


class NotAParam(nnx.Variable):
  """The other way round."""


def test_a_parameter_is_known_by_its_type_and_not_by_its_name():
  class Net(nnx.Module):
    def __init__(self):
      self.weight, self.other = Weight(jnp.zeros((4, 8))), NotAParam(jnp.zeros(3))
      self.bias = nnx.Param(jnp.zeros(8))

  plan = nxp.plan(Net, nxp.abstract_mesh(data=2), nxp.replicate(), optimizer=optax.adam(1e-3))
  again = nxp.Plan.from_json(plan.to_json())
  for found in (plan, again):
    assert {leaf.name for leaf in found.leaves if leaf.is_parameter} == {"weight", "bias"}
    assert state_categories(found)["parameters"] == 4 * (32 + 8)
    assert state_categories(found)["other model state"] == 12
  assert again.to_json() == plan.to_json()
