"""What a diff says of dtypes, bytes and layouts, against what a restore does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

import nnx_parallel as nxp
from checkpoint.runs import assert_same, file_with, target_of
from nnx_parallel.checkpoint import array_io
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.create import relayout
from nnx_parallel.errors import CheckpointError

# 64-bit arrays while jax has none.


@pytest.fixture
def wide(tmp_path):
  """A step of 64-bit numpy arrays, and them."""
  tree = {"f": np.linspace(0, 1, 16), "i": np.arange(16, dtype=np.int64) << 40}
  Checkpointer(tmp_path).save(1, tree)
  return tmp_path, tree


def struct(name, tree, dtype=None):
  layout = NamedSharding(nxp.make_mesh(x=8), P("x"))
  return jax.ShapeDtypeStruct(tree[name].shape, dtype or tree[name].dtype, sharding=layout)


@pytest.mark.parametrize(
  ("name", "text"),
  [
    (
      "f",
      r"dtype    model/f: saved float64, wanted float64 \(jax would make float32 of it: jax_enable_x64 is",
    ),
    (
      "i",
      r"dtype    model/i: saved int64, wanted int64 \(jax would make int32 of it: jax_enable_x64 is off\)",
    ),
  ],
)
def test_arrays_that_jax_would_make_smaller_are_refused_before_reading(wide, monkeypatch, name, text):
  directory, tree = wide
  checkpointer = Checkpointer(directory)
  target = {name: struct(name, tree)}
  diff = checkpointer.diff(target, only=[name])
  assert not diff.fits
  assert [match.name for match in diff.retyped] == [f"model/{name}"]
  monkeypatch.setattr(array_io, "read", lambda *_, **__: pytest.fail("an array was read"))
  fix = r'  Fix: jax.config.update\("jax_enable_x64", True\), or ask for .*cast=True, .*as_numpy=True\.'
  with pytest.raises(CheckpointError, match=rf"(?s)1 of another dtype.*{text}.*\n{fix}"):
    checkpointer.restore(target, only=[name])


def test_each_way_out_of_64_bits_works(wide):
  directory, tree = wide
  checkpointer = Checkpointer(directory)
  assert_same(checkpointer.restore(target_of_wide(tree), as_numpy=True), tree)
  target = {"f": struct("f", tree, np.float32)}
  again = checkpointer.restore(target, only=["f"], cast=True)["f"]
  assert again.sharding == target["f"].sharding
  np.testing.assert_array_equal(again, tree["f"].astype(np.float32), strict=True)
  assert checkpointer.diff(target, only=["f"], cast=True).bytes_read == 16 * 8
  with jax.enable_x64(True):
    again = checkpointer.restore(target_of_wide(tree))
    assert {name: array.dtype for name, array in again.items()} == {"f": np.float64, "i": np.int64}
    assert_same(again, tree)


def target_of_wide(tree):
  return {name: struct(name, tree) for name in tree}


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


def test_state_in_host_memory_is_not_counted_on_devices(tmp_path):
  mesh = nxp.make_mesh(x=8)
  tree = {name: np.ones((64, 8), np.float32) for name in ("near", "away")}
  checkpointer = Checkpointer(tmp_path, byte_budget=0)
  checkpointer.save(1, tree)

  def diff(kind):
    layouts = {"near": NamedSharding(mesh, P("x")), "away": NamedSharding(mesh, P("x"), memory_kind=kind)}
    return checkpointer.diff(
      {n: jax.ShapeDtypeStruct((64, 8), np.float32, sharding=layout) for n, layout in layouts.items()}
    )

  shard = 8 * 8 * 4
  assert diff("device").device_bytes == 2 * shard
  assert diff("pinned_host").device_bytes == shard
  # Devices that are CPUs have their memory in the host's too.
  assert diff("pinned_host").host_bytes == diff("device").host_bytes


# Layouts.


def test_leaves_that_change_their_layout_are_counted_and_named(saved):
  directory, trees = saved
  checkpointer = Checkpointer(directory)
  same = checkpointer.diff(target_of(trees[2]))
  assert same.resharded == ()
  assert "layout" not in str(same)
  mesh = nxp.make_mesh(x=4, devices=jax.devices()[:4])
  target = target_of(trees[2], mesh) | {
    "w": jax.ShapeDtypeStruct((8, 16), np.float32, sharding=NamedSharding(mesh, P(None, "x")))
  }
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


def test_layouts_as_text():
  one = jax.devices()[0]
  assert relayout.layout_text(jnp.ones(2).sharding) == "one device"
  assert relayout.layout_text(NamedSharding(nxp.make_mesh(x=1, devices=[one]), P("x"))) == "one device"
  mesh = nxp.make_mesh(a=2, b=4, c=1)
  layout = NamedSharding(mesh, P(("a", "b"), "c"), memory_kind="pinned_host")
  assert relayout.layout_text(layout) == "P(('a', 'b')) on {'a': 2, 'b': 4} in pinned_host"
  assert relayout.layout_text(None) == ""


# JSON values.


@pytest.fixture
def mixed(tmp_path):
  """A checkpointer with a step of arrays and JSON values, and that tree."""
  tree = {"w": np.ones((4, 4), np.float32), "config": {"depth": 3, "name": "net"}}
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, tree)
  return checkpointer, tree


@pytest.mark.parametrize(
  ("config", "problem", "skip", "restored"),
  [
    ({"depth": 0}, "extra    model/config.name", "config.name", {"depth": 3}),
    (
      {"depth": 0, "name": "", "width": 8},
      "missing  model/config.width",
      "*.width",
      {"depth": 3, "name": "net", "width": 8},
    ),
  ],
)
def test_json_values_of_one_side_only(mixed, config, problem, skip, restored):
  checkpointer, tree = mixed
  target = {"w": tree["w"], "config": config}
  with pytest.raises(CheckpointError, match=rf"\(1 \w+\)\.\n  {problem}\n  Fix: .*skip="):
    checkpointer.restore(target)
  assert checkpointer.restore(target, skip=[skip])["config"] == restored


def test_json_values_are_counted_left_out_and_renamed(mixed):
  checkpointer, tree = mixed
  target = {"w": tree["w"], "settings": {"depth": 0, "name": ""}}
  rename = {"settings": "config"}
  assert checkpointer.restore(target, rename=rename)["settings"] == tree["config"]
  assert "restored: 3 leaves, left out by name: 0" in str(checkpointer.diff(target, rename=rename))
  diff = checkpointer.diff(tree, skip=["config"])
  assert diff.skipped == ("config.depth", "config.name")
  assert checkpointer.restore(tree | {"config": {"depth": 7, "name": ""}}, skip=["config"])["config"] == {
    "depth": 7,
    "name": "",
  }


def test_a_value_where_an_array_is_wanted_is_both_missing_and_extra(mixed):
  checkpointer, tree = mixed
  target = {**tree, "config": {"depth": np.int32(0), "name": ""}}
  diff = checkpointer.diff(target)
  assert [name for name, _ in diff.missing] == ["model/config.depth"]
  assert diff.extra == ("model/config.depth",)
  for kind in ("missing", "extra  "):
    assert f"{kind}  model/config.depth  (one is an array, the other a JSON value)" in str(diff)


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
