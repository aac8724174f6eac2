"""Checkpoints written with Orbax alone."""

import jax.numpy as jnp
import orbax.checkpoint as v0
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

import nnx_parallel as nxp
from checkpoint.runs import Net, assert_same, make_plan
from nnx_parallel.checkpoint.foreign import restore_orbax
from nnx_parallel.errors import CheckpointError


def standard(path, model):
  with v0.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, nnx.state(model))


def manager(path, model):
  with v0.CheckpointManager(path.parent / "manager") as steps:
    steps.save(3, args=v0.args.Composite(state=v0.args.StandardSave(nnx.to_pure_dict(nnx.state(model)))))
    steps.wait_until_finished()
  (path.parent / "manager" / "3").rename(path)


WRITERS = {
  "v0 StandardCheckpointer, nnx.State": standard,
  "v0 CheckpointManager, pure dict": manager,
  "v1 save, nnx.State": lambda path, model: ocp.save(path, nnx.state(model)),
  "v1 save, pure dict": lambda path, model: ocp.save(path, nnx.to_pure_dict(nnx.state(model))),
}


@pytest.fixture
def quiet(monkeypatch):
  """Orbax v0 warns about itself."""
  import warnings

  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    yield


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.usefixtures("quiet")
def test_written_by_orbax_alone(tmp_path, name):
  model = Net()
  WRITERS[name](tmp_path / "step", model)
  plan = make_plan("2x4")
  again = restore_orbax(tmp_path / "step", plan)
  assert_same(again, model)
  assert again.head.kernel.get_value().sharding.is_equivalent_to(plan["head.kernel"].sharding, 2)
  both = restore_orbax(tmp_path / "step", plan, optimizer="fresh")
  assert isinstance(both[1], nnx.Optimizer)


def test_inside_another_tree_and_among_others(tmp_path):
  model = nxp.create_sharded_model(make_plan("8", optimizer=False))
  tree = {"params": nnx.to_pure_dict(nnx.state(model)), "step": jnp.int32(3)}
  ocp.save_checkpointables(tmp_path / "step", {"train": tree, "other": {"a": jnp.ones(2)}})
  plan = make_plan("4 explicit", optimizer=False)
  with pytest.raises(CheckpointError, match=r"holds several trees\.\n  names: \['other', 'train'\]"):
    restore_orbax(tmp_path / "step", plan)
  with pytest.raises(CheckpointError, match=r'(?s)missing  head\.bias.*saved: params\..*prefix="params"'):
    restore_orbax(tmp_path / "step", plan, item="train")
  assert_same(restore_orbax(tmp_path / "step", plan, item="train", prefix="params"), model)


def test_what_does_not_fit(tmp_path):
  model = nxp.create_sharded_model(make_plan("8", optimizer=False))
  ocp.save(tmp_path / "step", nnx.to_pure_dict(nnx.state(model)))
  with pytest.raises(CheckpointError, match=r"shape    head\.kernel: saved \(32, 6\), wanted \(64, 6\)"):
    restore_orbax(tmp_path / "step", make_plan("8", width=64))
  (tmp_path / "empty").mkdir()
  with pytest.raises(CheckpointError, match="is not an Orbax checkpoint that can be read here"):
    restore_orbax(tmp_path / "empty", make_plan("8"))
