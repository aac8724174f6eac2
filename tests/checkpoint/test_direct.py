import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import nnx_parallel as nxp
from checkpoint.runs import arrays, assert_same, target_of
from nnx_parallel.checkpoint import _orbax, direct
from nnx_parallel.checkpoint.checkpointer import Checkpointer

RNG = np.random.default_rng(0)
SHAPES = {"cube": (8, 12, 16), "wide": (3, 8), "row": (24,), "one": ()}
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


@pytest.mark.parametrize(
  ("chunk_bytes", "gap"), [(None, 1), (None, 40), (96, 1), (1000, 40), (1000, 1 << 15)]
)
@pytest.mark.parametrize("saved", SPECS)
def test_the_same_as_orbax_in_any_layout(tmp_path, monkeypatch, bytes_read, chunk_bytes, gap, saved):
  mesh = nxp.make_mesh(x=4, y=2)
  monkeypatch.setattr(direct, "_PIECE_BYTES", 200)
  monkeypatch.setattr(direct, "_GAP_BYTES", gap)
  values = {
    name: RNG.standard_normal(shape).astype(dtype)
    for (name, shape), dtype in zip(
      SHAPES.items(), [np.float32, jnp.bfloat16, np.int8, np.bool_], strict=True
    )
  }

  def placed(spec):
    layouts = {name: NamedSharding(mesh, fitting(spec, x.shape, mesh)) for name, x in values.items()}
    return jax.device_put(values, layouts)

  Checkpointer(tmp_path, chunk_bytes=chunk_bytes).save(1, placed(saved))
  folder = tmp_path / "1" / "model"
  layouts = {name: direct.layout_of(folder / name) for name in values}
  for spec in SPECS:
    targets = target_of(placed(spec))
    bytes_read.clear()
    with direct.readers() as pool:
      found = direct.start(layouts, targets, pool)()
    assert sum(bytes_read) == sum(direct.bytes_to_read(layouts[name], targets[name]) for name in values)
    plain = _orbax.load(tmp_path / "1", "model", targets, frozenset(), byte_budget=1 << 20, pad=False)
    for name in values:
      assert found[name].sharding == plain[name].sharding
      for one, other in zip(found[name].addressable_shards, plain[name].addressable_shards, strict=True):
        np.testing.assert_array_equal(one.data, other.data, strict=True)


@pytest.mark.parametrize(
  ("columns", "split", "fraction"),
  [
    (2048, P(None, "x"), 1),  # half of each row of 8 KiB: the other half is not worth a call
    (32768, P(None, "x"), 2),  # of 128 KiB
    (2048, P("x"), 2),
    (32768, P("y", "x"), 4),
  ],
)
def test_what_is_not_wanted_of_a_chunk_is_passed_over(tmp_path, bytes_read, columns, split, fraction):
  values = np.arange(64 * columns, dtype=np.float32).reshape(64, columns)
  saved = jax.device_put({"w": values}, jax.devices()[0])
  Checkpointer(tmp_path).save(1, saved)
  layout = direct.layout_of(tmp_path / "1" / "model" / "w")
  assert layout.chunk == values.shape
  [area] = direct._areas(layout, [_first(values.shape, split)])
  count = np.prod([part.stop - part.start for part in area.box])
  assert count * fraction == values.size
  out = np.zeros([part.stop - part.start for part in _first(values.shape, split)], np.float32)
  bytes_read.clear()
  direct._read_area(layout, area, [(_first(values.shape, split), out)])
  assert sum(bytes_read) == count * 4
  np.testing.assert_array_equal(out, values[_first(values.shape, split)])


def _first(shape, split):
  halves = [size // 2 if axis else size for size, axis in zip(shape, (*split, None), strict=False)]
  return tuple(slice(0, size) for size in halves)


@pytest.mark.parametrize("spec", [P(), P("y", "x"), P(None, ("x", "y"))])
def test_devices_that_are_no_cpus_get_what_the_host_read(tmp_path, monkeypatch, spec):
  tree = arrays(mesh=nxp.make_mesh(a=2, b=4))
  Checkpointer(tmp_path).save(1, tree)
  monkeypatch.setattr(direct, "on_cpu", lambda _: False)
  mesh = nxp.make_mesh(x=4, y=2)
  layouts = {name: NamedSharding(mesh, fitting(spec, x.shape, mesh)) for name, x in tree.items()}
  again = Checkpointer(tmp_path).restore(target_of(jax.device_put(tree, layouts)))
  assert_same(again, tree)
  assert all(again[name].sharding == layouts[name] for name in tree)


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


def test_what_is_compressed_is_left_to_orbax(tmp_path):
  context = ocp.Context()
  context.array_options.saving.use_ocdbt = False
  context.array_options.saving.use_compression = True
  with context, _orbax.quiet():
    ocp.save_checkpointables(tmp_path / "1", {"model": {"w": jnp.ones((8, 8))}})
  assert direct.layout_of(tmp_path / "1" / "model" / "w") is None


def test_a_wrong_place_in_a_file_is_not_read(tmp_path):
  Checkpointer(tmp_path).save(1, {"w": jnp.arange(64.0)})
  folder = tmp_path / "1" / "model" / "w"
  file = folder / "c" / "0"
  data = bytearray(file.read_bytes())
  target = {"w": jax.ShapeDtypeStruct((64,), np.float32)}
  for position in range(len(data) - 20, len(data)):
    data[position] ^= 1
    file.write_bytes(data)
    data[position] ^= 1
    with direct.readers() as pool, pytest.raises(ValueError, match="does not have the checksum"):
      direct.start({"w": direct.layout_of(folder)}, target, pool)()


def test_the_checksum_is_crc32c():
  assert direct._crc32c(b"123456789") == 0xE3069283  # the check value of the polynomial's definition
