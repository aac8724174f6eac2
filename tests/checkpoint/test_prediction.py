"""What a diff says of dtypes, bytes and layouts, against what a restore does."""

import jax
import numpy as np
import pytest
from jax import NamedSharding, P

import nnx_parallel as nxp
from checkpoint.runs import assert_same, file_with, target_of
from nnx_parallel.checkpoint import array_io
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.errors import CheckpointError

# 64-bit arrays while jax has none.


@pytest.mark.parametrize(("name", "kind"), [("f", "float"), ("i", "int")])
def test_arrays_that_jax_would_make_smaller_are_refused_before_reading(tmp_path, monkeypatch, name, kind):
  tree = {"f": np.linspace(0, 1, 16), "i": np.arange(16, dtype=np.int64) << 40}
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, tree)
  layout = NamedSharding(nxp.make_mesh(x=8), P("x"))
  target = {name: jax.ShapeDtypeStruct((16,), tree[name].dtype, sharding=layout)}
  text = rf"dtype    model/{name}: saved {kind}64, wanted {kind}64 \(jax would make {kind}32 of it: jax_ena"
  diff = checkpointer.diff(target, only=[name])
  assert not diff.fits
  assert [match.name for match in diff.retyped] == [f"model/{name}"]
  monkeypatch.setattr(array_io, "read", lambda *_, **__: pytest.fail("an array was read"))
  fix = r'  Fix: jax.config.update\("jax_enable_x64", True\), or ask for .*cast=True, .*as_numpy=True\.'
  with pytest.raises(CheckpointError, match=rf"(?s)1 of another dtype.*{text}.*\n{fix}"):
    checkpointer.restore(target, only=[name])


# Bytes that are read.


@pytest.mark.parametrize(("spec", "count"), [(P(), 16), (P("x"), 16), (P(None, "x"), 16), (P("y", "x"), 16)])
def test_a_shard_is_counted_once_whatever_its_replicas(tmp_path, spec, count):
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, {"w": np.ones((16, 512), np.float32)})
  mesh = nxp.make_mesh(x=2, y=2, devices=jax.devices()[4:])
  target = {"w": jax.ShapeDtypeStruct((16, 512), np.float32, sharding=NamedSharding(mesh, spec))}
  assert checkpointer.diff(target).bytes_read == count * 512 * 4


def test_a_restore_says_what_it_will_read(saved, caplog):
  directory, trees = saved
  checkpointer = Checkpointer(directory, byte_budget=300)
  diff = checkpointer.diff(target_of(trees[2]))
  caplog.set_level("INFO", "nnx_parallel.checkpoint.restore")
  checkpointer.restore(target_of(trees[2]))
  text = f"reading {diff.bytes_read:,} bytes; at most {diff.host_bytes:,} bytes of host memory here"
  assert caplog.messages == [f"restoring step 2: {text}"]


# Layouts.


def test_leaves_that_change_their_layout_are_counted_and_named(saved):
  directory, trees = saved
  checkpointer = Checkpointer(directory)
  same = checkpointer.diff(target_of(trees[2]))
  assert same.resharded == ()
  assert "layout" not in str(same)
  mesh = nxp.make_mesh(x=4, devices=jax.devices()[:4])
  target = target_of(trees[2], mesh)
  target["w"] = jax.ShapeDtypeStruct((8, 16), np.float32, sharding=NamedSharding(mesh, P(None, "x")))
  diff = checkpointer.diff(target)
  assert diff.fits
  assert [match.path for match in diff.resharded] == ["b", "half", "step", "w"]
  assert str(diff).splitlines()[2:7] == [
    "in another layout than saved: 4 leaves",
    "  model/b: saved P('b') on {'a': 2, 'b': 4}, wanted P() on {'x': 4}",
    "  model/half: saved P(None, 'a') on {'a': 2, 'b': 4}, wanted P() on {'x': 4}",
    "  model/step: saved P() on {'a': 2, 'b': 4}, wanted P() on {'x': 4}",
    "  ... and 1 more",
  ]


# JSON values.


JSON = {"depth": 3, "name": "net"}
ONE_SIDE = [
  ({"depth": 0}, "extra    model/config.name", "config.name", {"depth": 3}),
  ({"depth": 0, "name": "", "width": 8}, "missing  model/config.width", "*.width", {**JSON, "width": 8}),
]


@pytest.mark.parametrize(("config", "problem", "skip", "restored"), ONE_SIDE)
def test_json_values_of_one_side_only(tmp_path, config, problem, skip, restored):
  tree, checkpointer = {"w": np.ones((4, 4), np.float32), "config": JSON}, Checkpointer(tmp_path)
  checkpointer.save(1, tree)
  target = {"w": tree["w"], "config": config}
  with pytest.raises(CheckpointError, match=rf"\(1 \w+\)\.\n  {problem}\n  Fix: .*skip="):
    checkpointer.restore(target)
  assert checkpointer.restore(target, skip=[skip])["config"] == restored


# Files of other leaves.


def test_damage_to_a_leaf_that_is_not_restored_does_no_harm(tmp_path):
  tree = {name: np.full(1024, value, np.float32) for name, value in {"w": 1.0, "b": 2.0}.items()}
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, tree)
  file = file_with(tmp_path, 1, tree["b"].tobytes())
  file.write_bytes(file.read_bytes().replace(tree["b"].tobytes(), tree["w"].tobytes()))
  assert_same(checkpointer.restore({"w": tree["w"]}, only=["w"]), {"w": tree["w"]})
  with pytest.raises(CheckpointError, match=r"step 1 is damaged: model/b cannot be read"):
    checkpointer.restore(tree)
  assert list(checkpointer.verify(1)) == ["model/b"]
