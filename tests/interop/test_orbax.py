"""Checkpoints written with Orbax alone."""

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

import nnx_parallel as nxp
from checkpoint.runs import Net, assert_same, batch_of, loss_fn, make_plan
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.orbax import restore_orbax


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


@pytest.mark.cases(2)
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
  for options in ({}, {"prefix": "params"}):
    assert_same(restore_orbax(tmp_path / "step", plan, item="train", **options), model)
  head = restore_orbax(tmp_path / "step", plan, item="train", only=["head"]).head
  np.testing.assert_array_equal(head.kernel[...], model.head.kernel[...])
  with pytest.raises(CheckpointError, match=r'(?s)missing  model/.*saved: params\..*prefix="params"'):
    restore_orbax(tmp_path / "step", plan, item="train", prefix="step")
  twice = {"ema": tree["params"], "params": tree["params"]}
  ocp.save(tmp_path / "twice", twice)
  with pytest.raises(CheckpointError, match=r'(?s)missing  model/.*prefix="params"'):  # either could be meant
    restore_orbax(tmp_path / "twice", plan)


def test_a_checkpoint_of_another_depth(tmp_path):
  init = lambda depth: nnx.Dict(layers=nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(depth)]))
  plan_of = lambda depth: nxp.plan(lambda: init(depth), nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=1))
  model = init(12)
  ocp.save(tmp_path / "step", {"net": nnx.state(model), "cursor": jnp.ones(2)})
  text = r"(?s)it does not fit the target\.\n  extra    model/layers\.10\.bias\n.*leave out: skip=\[\.\.\.\]"
  with pytest.raises(CheckpointError, match=text):
    restore_orbax(tmp_path / "step", plan_of(8), prefix="net")
  with pytest.raises(CheckpointError, match=r"does not fit the target\.\n  missing  model/layers\.12\.bias"):
    restore_orbax(tmp_path / "step", plan_of(13), prefix="net")
  skip = ["layers.8", "layers.9", "layers.1?.*"]
  fewer = restore_orbax(tmp_path / "step", plan_of(8), prefix="net", skip=skip)
  assert_same(fewer["layers"][7], model["layers"][7])
  more = restore_orbax(tmp_path / "step", plan_of(13), prefix="net", skip=["layers.12"])
  assert_same(more["layers"][11], model["layers"][11])
  with pytest.raises(CheckpointError, match=r"no leaf  layer\.3  \(nearest: layers\."):
    restore_orbax(tmp_path / "step", plan_of(12), prefix="net", skip=["layer.3"])


OPTIMIZERS = {
  "two trees": {"item": "model", "optimizer_item": "optimizer"},
  "one tree": {"prefix": "model", "optimizer_prefix": "optimizer"},
}


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "pure"), [("two trees", False), ("one tree", True)])
def test_the_optimizer_too(tmp_path, name, pure):
  model, optimizer = trained = nxp.create_sharded_model(make_plan("8"))
  nxp.train_step(loss_fn)(model, optimizer, batch_of(0))
  state = (lambda x: nnx.to_pure_dict(nnx.state(x))) if pure else nnx.state
  tree = {"model": state(model), "optimizer": state(optimizer)}
  save = ocp.save_checkpointables if name == "two trees" else ocp.save
  save(tmp_path / "step", tree)
  where = OPTIMIZERS[name]
  for target in (make_plan("2x4"), nxp.create_sharded_model(make_plan("4 explicit"))):
    found = restore_orbax(tmp_path / "step", target, optimizer="restore", **where)
    for one, other in zip(found, trained, strict=True):
      assert_same(one, other)
  with pytest.raises(CheckpointError, match=r"cannot restore an optimizer: the target has none\.\n  Fix:"):
    restore_orbax(tmp_path / "step", make_plan("8", optimizer=False), optimizer="restore", **where)
  prefix = "model" if "prefix" in where else ""
  wrong = {**where, "optimizer_item": where.get("item"), "optimizer_prefix": prefix}
  with pytest.raises(CheckpointError, match=r"missing  optimizer/opt_state\.0\.count"):
    restore_orbax(tmp_path / "step", make_plan("8"), optimizer="restore", **wrong)


def test_what_does_not_fit(tmp_path):
  model = nxp.create_sharded_model(make_plan("8", optimizer=False))
  ocp.save(tmp_path / "step", nnx.to_pure_dict(nnx.state(model)))
  with pytest.raises(CheckpointError, match=r"shape    model/head\.kernel: saved \(32, 6\), wanted \(64,"):
    restore_orbax(tmp_path / "step", make_plan("8", width=64))
  (tmp_path / "empty").mkdir()
  with pytest.raises(CheckpointError, match="is not an Orbax checkpoint that can be read here"):
    restore_orbax(tmp_path / "empty", make_plan("8"))
