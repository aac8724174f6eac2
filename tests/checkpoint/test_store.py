import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import nnx_parallel as nxp
from checkpoint.runs import assert_same, target_of
from nnx_parallel.checkpoint import folders, manifest, store
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.errors import CheckpointError

RNG = np.random.default_rng(0)
SHAPES = {"cube": (8, 12, 16), "wide": (3, 8), "row": (24,), "one": ()}
DTYPES = [np.float32, jnp.bfloat16, np.int8, np.bool_]
SPECS = [P(), P("x"), P(None, "x"), P("y", "x"), P(None, ("x", "y")), P(None, None, "y")]


def fitting(spec, shape, mesh):
  """The spec without the axes that do not divide the array's dims."""
  entries = [
    entry if shape[dim] % np.prod([mesh.shape[a] for a in np.atleast_1d(entry)]) == 0 else None
    for dim, entry in enumerate(spec[: len(shape)])
    if entry is not None or dim < len(shape)
    for entry in [entry or ()]
  ]
  return P(*entries)


@pytest.mark.parametrize("chunk_bytes", [None, 96, 1000])
@pytest.mark.parametrize("saved", [P(), P("y", "x"), P(None, None, "y")])
def test_the_same_as_orbax_in_any_layout(tmp_path, chunk_bytes, saved):
  mesh = nxp.make_mesh(x=4, y=2)
  values = {
    name: RNG.standard_normal(shape).astype(dtype)
    for (name, shape), dtype in zip(SHAPES.items(), DTYPES, strict=True)
  }

  def placed(spec):
    layouts = {name: NamedSharding(mesh, fitting(spec, x.shape, mesh)) for name, x in values.items()}
    return jax.device_put(values, layouts)

  Checkpointer(tmp_path, chunk_bytes=chunk_bytes).save(1, placed(saved))
  opened = store.open_arrays(epath.Path(tmp_path / "1" / "model"), target_of(placed(saved)))
  for spec in SPECS:
    targets = target_of(placed(spec))
    with store.readers() as pool:
      found = store.start(opened, targets, pool)()
    plain = store.load(tmp_path / "1", "model", targets, byte_budget=1 << 20, pad=False)
    for name in values:
      assert found[name].sharding == plain[name].sharding
      for one, other in zip(found[name].addressable_shards, plain[name].addressable_shards, strict=True):
        np.testing.assert_array_equal(one.data, other.data, strict=True)


@pytest.mark.parametrize("shape", [(512, 1024), (8,), ()], ids=str)
@pytest.mark.parametrize("spec", [P(), P("x")], ids=["replicated", "split"])
def test_the_first_step_after_a_restore_reuses_the_buffers(tmp_path, shape, spec):
  layout = NamedSharding(nxp.make_mesh(x=8), spec if shape else P())
  tree = {name: jax.device_put(np.ones(shape, np.float32), layout) for name in "vw"}
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, tree)
  restored = checkpointer.restore(target_of(tree))
  buffers = {name: pointers(array) for name, array in restored.items()}
  assert len({*buffers["v"], *buffers["w"]}) == 16
  after = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(restored)
  assert {name: pointers(array) for name, array in after.items()} == buffers
  for shard in (*after["v"].addressable_shards, *after["w"].addressable_shards):
    np.testing.assert_array_equal(shard.data, np.full(shard.data.shape, 2, np.float32))


def pointers(array):
  return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def test_devices_that_are_no_cpus_are_given_host_arrays(tmp_path, monkeypatch):
  mesh = nxp.make_mesh(x=4, y=2)
  tree = {"w": jax.device_put(RNG.standard_normal((8, 12)), NamedSharding(mesh, P("x")))}
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, tree)
  monkeypatch.setattr(store, "on_cpu", lambda _: False)
  for spec in (P("x"), P("y", "x"), P()):
    layout = NamedSharding(mesh, spec)
    found = checkpointer.restore({"w": jax.ShapeDtypeStruct((8, 12), tree["w"].dtype, sharding=layout)})["w"]
    assert found.sharding == layout
    assert_same(found, tree["w"])


@pytest.fixture(params=["ocdbt", "compressed"])
def foreign(request, tmp_path):
  """A run whose steps 1 and 2 Orbax stored in another layout than now, and its tree."""
  tree = {"w": RNG.standard_normal((8, 4)).astype(np.float32), "b": np.ones(3, np.float32)}
  checkpointer = Checkpointer(tmp_path)
  context = ocp.Context()
  context.array_options.saving.use_ocdbt = request.param == "ocdbt"
  context.array_options.saving.use_compression = request.param == "compressed"
  for step in (1, 2):
    checkpointer.save(step, tree)
    folder, record = checkpointer.directory / str(step), checkpointer.metadata(step)
    folder.rmtree()
    with context, store.quiet():
      ocp.save_checkpointables(folder, {"model": tree})
    sizes = folders.all_files(folder)
    hashes = {name: folders.sha256(folder / name) for name in sizes}
    manifest.write(dataclasses.replace(record, files=sizes, hashes=hashes), folder)
  return checkpointer, tree


def test_what_orbax_stores_otherwise_is_not_damaged(foreign):
  checkpointer, tree = foreign
  assert checkpointer.latest() == 2
  assert checkpointer.verify() == {}
  assert checkpointer.diff(tree).fits
  assert_same(checkpointer.restore(tree, on_corrupt="fallback"), tree)
  assert checkpointer.restored.step == 2


@pytest.mark.parametrize(
  "change",
  [
    lambda grid, record: record.update(shape=[4, 4]),
    lambda grid, record: grid.update(chunk_shape=[0, 4]),
    lambda grid, record: record.update(data_type="int32"),
  ],
  ids=["shape", "chunk", "dtype"],
)
def test_metadata_of_another_array_is_damage_also_unverified(tmp_path, change):
  tree = {"w": np.ones((8, 4), np.float32)}
  Checkpointer(tmp_path).save(1, tree)
  file = tmp_path / "1" / "model" / "w" / "zarr.json"
  record = json.loads(file.read_text())
  change(record["chunk_grid"]["configuration"], record)
  file.write_text(json.dumps(record))
  with pytest.raises(CheckpointError, match=r"step 1 is damaged: model/w/zarr\.json has"):
    Checkpointer(tmp_path, verify="off").restore(tree)


def test_a_chunk_that_is_missing_is_not_read_as_zeros(tmp_path):
  tree = {"w": np.ones((8, 4), np.float32)}
  Checkpointer(tmp_path).save(1, tree)
  (tmp_path / "1" / "model" / "w" / "c" / "0" / "0").unlink()
  with pytest.raises(CheckpointError, match="step 1 is damaged: model/w/c/0/0 is missing"):
    Checkpointer(tmp_path, verify="off").restore(tree)
