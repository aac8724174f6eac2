"""Silent replication, and filters that match more or less than meant."""

import jax
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from layout.models import LM, named
from nnx_parallel.errors import NnxParallelWarning


def big(**kwargs):
  return nnx.Linear(1024, 512, rngs=nnx.Rngs(0), **kwargs)


def flat(text):
  """The words of a table, in reading order where no cell wraps."""
  return " ".join(str(text).split())


def test_a_large_leaf_without_a_rule_is_found_with_bytes_and_a_remedy():
  plan = nxp.plan(big, nxp.make_mesh(data=2, fsdp=4))
  (found,) = plan.audit()
  assert (found.leaf.name, found.axis, found.dim) == ("kernel", "fsdp", 0)
  assert found.wasted == 2**21 * 3 // 4
  assert flat(plan.audit()) == (
    "replicated n array per device wasted why what could split it"
    " kernel 1 float32[1024,512] 2 MiB 1.5 MiB no annotation (!) fsdp could split dim 0 (1024)"
    " 1.5 MiB per device could be saved. (!) no rule asks for it"
  )


def test_creation_can_warn_once_and_points_at_the_caller():
  plan = nxp.plan(big, nxp.make_mesh(data=2, fsdp=4))
  with pytest.warns(NnxParallelWarning) as caught:
    assert plan.warn_replicated()
  (warning,) = caught
  assert warning.filename == __file__
  said = "2 MiB of parameters are replicated on 8 devices: kernel float32[1024,512] (no annotation; fsdp"
  assert str(warning.message).startswith(said)


@pytest.mark.parametrize(("rules", "options", "reason"), [
  ({"embed": "fsdp"}, {"uneven": "next"}, "4 does not divide 1022"),
  ({"embed": "fsdp"}, {"uneven": "replicate"}, "4 does not divide 1022"),
  ({"embed": nxp.LogicalRules.first("fsdp", None)}, {}, "'embed' -> None; not 'fsdp': 4 does not divide"),
])  # fmt: skip
def test_a_fallback_to_whole_warns_and_says_why(rules, options, reason):
  init = lambda: nnx.Linear(1022, 511, rngs=nnx.Rngs(0), kernel_metadata=named("embed", None))
  plan = nxp.plan(init, nxp.make_mesh(data=2, fsdp=4), nxp.LogicalRules(**rules), **options)
  assert not plan["kernel"].decision.intended
  assert reason in plan.audit()[0].leaf.decision.reason
  with pytest.warns(NnxParallelWarning, match=r"kernel .*4 does not divide 1022.*data could split dim 0"):
    assert plan.warn_replicated()


def test_trained_and_frozen_are_counted():
  rules = nxp.LogicalRules(vocab="fsdp", embed=None, mlp="fsdp")
  plan = nxp.plan(lambda: LM(64, 8, 3, nnx.Rngs(0)), nxp.make_mesh(fsdp=8), rules)
  selection = plan.trainable(nnx.PathContains("norm"))
  assert [leaf.name for leaf in selection.trained] == [f"blocks.{i}.norm.scale" for i in range(3)]
  assert len(selection.frozen) == 13
  lines = [" ".join(line.split()) for line in str(selection).splitlines()]
  assert lines[0] == "trained 3 arrays 24 elements total size 96 B, 96 B per device"
  assert lines[1] == "frozen 13 arrays 2,168 elements total size 8.469 KiB, 1.469 KiB per device"


def test_a_filter_that_matches_nothing_is_an_error():
  plan = nxp.plan(big, nxp.make_mesh(fsdp=8))
  with pytest.raises(nxp.errors.PlanError, match=r"selects none of the model's Variables.*\n.*types in the"):
    plan.trainable(nnx.LoRAParam)
  with pytest.raises(nxp.errors.PlanError, match="selects none of the model's Variables"):
    nxp.plan(big, nxp.make_mesh(fsdp=8), optimizer=optax.sgd(1.0), wrt=nnx.LoRAParam)


def test_an_axis_of_size_one_splits_nothing():
  plan = nxp.plan(big, nxp.make_mesh(data=8, fsdp=1), nxp.fsdp())
  assert plan["kernel"].spec == jax.P("fsdp", None)
  assert [(found.leaf.name, found.axis) for found in plan.audit()] == [("kernel", "data")]
