import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

import nnx_parallel as nxp
from checkpoint.runs import assert_same
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.safetensors import Tensor, export_safetensors, import_safetensors, read_tensors
from nnx_parallel.interop.weights import Rule, WeightMap

RNG = np.random.default_rng(0)


class Block(nnx.Module):
  """Attention-like kernels: heads split out, heads merged, layers stacked, a table that is tied."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    draw = nnx.initializers.normal(1.0)
    self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)])
    self.query = nnx.Param(draw(rngs.params(), (8, 4, 6)))
    self.out = nnx.Param(draw(rngs.params(), (24, 8)))
    self.stacked = nnx.Param(draw(rngs.params(), (3, 8, 8)))
    self.table = nnx.Param(draw(rngs.params(), (30, 8)).astype(jnp.bfloat16))
    self.head = nnx.Param(self.table.get_value())
    self.noise = nnx.Dropout(0.5, rngs=rngs)


WEIGHT_MAP = WeightMap(
  Rule("fc.weight", "layers.{i}.kernel", "o layer i -> layer i o"), Rule("fc.{i}.bias", "layers.{i}.bias"),
  Rule("q.weight", "query", "(h d) e -> e h d", d=6), Rule("o.weight", "out", "h d e -> (h d) e", d=6),
  Rule("s.{i}.weight", "stacked", "layer o i -> layer i o"),
  Rule("embed", ("table", "head"), dtype=np.float32), ignore=["*.inv_freq"],
)  # fmt: skip


def make_plan(**mesh):
  mesh = nxp.make_mesh(**mesh, devices=jax.devices()[: np.prod(list(mesh.values()))])
  return nxp.plan(Block, mesh, nxp.fsdp(tuple(mesh.shape), min_size=4), optimizer=optax.sgd(1e-2))


def test_out_and_in_again_on_another_mesh(tmp_path):
  model, _ = nxp.create_sharded_model(make_plan(a=8))
  names = export_safetensors(tmp_path / "out", model, WEIGHT_MAP)
  theirs = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
  assert set(theirs) == set(names)
  kernel = np.asarray(model.layers[1].kernel.get_value())
  np.testing.assert_array_equal(theirs["fc.weight"][:, 1], kernel.T)
  query = np.asarray(model.query.get_value())
  np.testing.assert_array_equal(theirs["q.weight"], query.reshape(8, 24).T)
  np.testing.assert_array_equal(theirs["o.weight"], np.asarray(model.out.get_value()).reshape(4, 6, 8))
  np.testing.assert_array_equal(theirs["s.2.weight"], np.asarray(model.stacked.get_value())[2].T)
  assert theirs["embed"].dtype == np.float32
  again, optimizer = import_safetensors(tmp_path / "out", make_plan(a=2, b=2), WEIGHT_MAP)
  assert_same(again, model)
  assert isinstance(optimizer, nnx.Optimizer)


def test_many_files_have_an_index_that_others_read(tmp_path):
  model, _ = nxp.create_sharded_model(make_plan(a=8))
  names = export_safetensors(tmp_path / "out", model, file_bytes=1000)
  index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
  assert set(index["weight_map"]) == set(names)
  total = 0
  for file in set(index["weight_map"].values()):
    with safetensors.safe_open(tmp_path / "out" / file, "numpy") as opened:
      total += len(list(opened.keys()))
  assert total == len(names)
  again, _ = import_safetensors(tmp_path / "out", make_plan(b=4))
  assert_same(again, model)


def test_padding_is_cut_and_added(tmp_path):
  init = lambda: nnx.Linear(6, 10, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": (None, "x")})
  plan = nxp.plan(init, nxp.make_mesh(x=8), uneven="pad")
  model = nxp.create_sharded_model(plan)
  export_safetensors(tmp_path / "out", model)
  theirs = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
  assert theirs["kernel"].shape == (6, 10)
  assert_same(import_safetensors(tmp_path / "out", plan), model)


def test_files_of_others(tmp_path):
  theirs = {"kernel": RNG.standard_normal((8, 16), np.float32), "bias": np.zeros(16, np.float32)}
  safetensors.numpy.save_file({**theirs, "rope.inv_freq": np.ones(3)}, tmp_path / "m.safetensors")
  plan = nxp.plan(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nxp.make_mesh(a=8), nxp.fsdp("a", min_size=1))
  weight_map = WeightMap(Rule("kernel", "kernel"), Rule("bias", "bias"), ignore=["*.inv_freq"])
  model = import_safetensors(tmp_path / "m.safetensors", plan, weight_map)
  np.testing.assert_array_equal(model.kernel.get_value(), theirs["kernel"])
  text = r"0 leaves of the model have no source, 1 arrays of .* no use\.\n  unused   rope\.inv_freq\n  Fix: "
  with pytest.raises(CheckpointError, match=text):
    import_safetensors(tmp_path / "m.safetensors", plan)


def test_incomplete_mappings_name_the_leaves(tmp_path):
  safetensors.numpy.save_file({"kernel_": np.ones((8, 16), np.float32)}, tmp_path / "m.safetensors")
  plan = nxp.plan(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nxp.make_mesh(a=8), nxp.replicate())
  text = r"(?s)missing  bias: needs bias.*missing  kernel: needs kernel \(nearest: kernel_\).*unused   ker"
  with pytest.raises(CheckpointError, match=text):
    import_safetensors(tmp_path / "m.safetensors", plan)
  with pytest.raises(CheckpointError, match="missing  bias: no rule names it"):
    import_safetensors(tmp_path / "m.safetensors", plan, WeightMap(Rule("kernel_", "kernel")))
  wrong = WeightMap(Rule("kernel_", "kernel", "i o -> o i"))
  text = r"kernel does not fit: its rule makes float32\[16, 8\] of kernel_, the model has float32\[8, 16\]"
  with pytest.raises(CheckpointError, match=text):
    import_safetensors(tmp_path / "m.safetensors", plan, wrong, skip=["bias"])
  model = nxp.create_sharded_model(plan)
  with pytest.raises(CheckpointError, match=r"1 leaves of the model have no rule\.\n  no rule  bias"):
    export_safetensors(tmp_path / "out", model, WeightMap(Rule("kernel_", "kernel")))


def test_tied_leaves_must_be_equal(tmp_path):
  tree = {"a": jnp.ones(4), "b": jnp.zeros(4)}
  with pytest.raises(CheckpointError, match="b is tied to w, but its values differ"):
    export_safetensors(tmp_path / "out", tree, WeightMap(Rule("w", ("a", "b"))))
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("skipped", [[], ["layers.2.kernel"]])
def test_a_stack_of_another_depth(tmp_path, skipped):
  def plan_of(depth):
    def init():
      rngs = nnx.Rngs(0)
      layers = [nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(depth)]
      return nnx.Dict(layers=nnx.List(layers))

    return nxp.plan(init, nxp.make_mesh(a=8), nxp.replicate())

  weights = RNG.standard_normal((4, 6, 4), np.float32)
  safetensors.numpy.save_file({"h": weights}, tmp_path / "m.safetensors")
  weight_map = WeightMap(Rule("h", "layers.{i}.kernel", "i layer o -> layer i o"))
  text = r"unused   layers 4, 5: h has 6 layers, shape \(4, 6, 4\)\n  Fix: .*make a model of as many layers"
  with pytest.raises(CheckpointError, match=text):
    import_safetensors(tmp_path / "m.safetensors", plan_of(4), weight_map, skip=skipped)
  text = r"2 leaves of the model have no source, 0 .*\n  missing  layers\.6\.kernel: h has 6 layers"
  with pytest.raises(CheckpointError, match=text):
    import_safetensors(tmp_path / "m.safetensors", plan_of(8), weight_map, skip=skipped)
  left_out = [*skipped, "layers.6.kernel", "layers.7.kernel"]
  for model in (
    import_safetensors(tmp_path / "m.safetensors", plan_of(6), weight_map, skip=skipped),
    import_safetensors(tmp_path / "m.safetensors", plan_of(8), weight_map, skip=left_out),
  ):
    np.testing.assert_array_equal(model["layers"][5].kernel.get_value(), weights[:, 5])
  if skipped:
    with pytest.raises(CheckpointError, match=r"cannot write h: of its 6 layers there are only \[0, 1, 3,"):
      export_safetensors(tmp_path / "out", nxp.create_sharded_model(plan_of(6)), weight_map, skip=skipped)


PATTERNS = {
  "can't divide axis of length 10 in chunks of 4": Rule("q", "w", "e (h d) -> e h d", d=4),
  "Wrong shape: expected 3 dims": Rule("q", "w", "h d e -> (h d) e", d=4),
  "Identifiers only on one side": Rule("q", "w", "a b -> a c"),
}


@pytest.mark.parametrize("text", PATTERNS)
def test_patterns_that_do_not_fit_name_the_leaf(tmp_path, text):
  safetensors.numpy.save_file({"q": np.zeros((8, 10), np.float32)}, tmp_path / "m.safetensors")

  class Model(nnx.Module):
    def __init__(self):
      self.w = nnx.Param(jnp.zeros((8, 3, 4)))

  plan = nxp.plan(Model, nxp.make_mesh(a=8), nxp.replicate())
  weight_map = WeightMap(PATTERNS[text])
  text = rf"(?s)w and q do not fit the pattern of their rule\.\n.*{text}.*file: \[\(8, 10\)\]\n  Fix: correct"
  with pytest.raises(CheckpointError, match=text):
    import_safetensors(tmp_path / "m.safetensors", plan, weight_map)


@pytest.mark.parametrize("moment", ["before", "while the files are made", "while they are written"])
def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch, moment):
  if moment == "before":
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    text = r"cannot export to [^:]*[^g]: the disk is full\.\n  the export needs 400 bytes, 10 are free"
  else:

    def full(*_):
      raise OSError(28, "No space left on device")

    where = {"while the files are made": (os, "posix_fallocate"), "while they are written": (Tensor, "write")}
    monkeypatch.setattr(*where[moment], full)
    text = r"cannot export to out in .*: the disk is full\.\n  .*No space left on device"
  with pytest.raises(CheckpointError, match=text):
    export_safetensors(tmp_path / "out", {"w": jnp.ones(100)})
  assert list(tmp_path.iterdir()) == []


def test_only_one_of_two_exports_to_a_path_succeeds(tmp_path, monkeypatch):
  real, refused = Tensor.write, []

  def write(self, index, values):
    if not refused:
      refused.append(None)
      with pytest.raises(CheckpointError, match=r"cannot write to .*out\.nnx-saving: this") as caught:
        export_safetensors(tmp_path / "out", {"w": jnp.zeros(4)})
      refused.append(caught)
    real(self, index, values)

  monkeypatch.setattr(Tensor, "write", write)
  (tmp_path / "out.nnx-saving").mkdir()
  (tmp_path / "out.nnx-saving" / "model-00001.safetensors").touch()  # left by one that was killed
  export_safetensors(tmp_path / "out", {"w": jnp.ones(4)})
  assert len(refused) == 2
  with pytest.raises(CheckpointError, match="it exists"):
    export_safetensors(tmp_path / "out", {"w": jnp.zeros(4)})
  assert [path.name for path in tmp_path.rglob("*")] == ["out", "model.safetensors"]
  assert safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [1] * 4


@pytest.mark.parametrize("spec", [("a", "b", None), (None, "a", "b"), ("b", None, "a"), (), ("a",)])
def test_parts_are_written_where_they_belong(tmp_path, spec):
  mesh = nxp.make_mesh(a=2, b=4)
  values = RNG.standard_normal((8, 4, 8)).astype(np.float32)
  layout = jax.NamedSharding(mesh, jax.P(*spec))
  tree = {"before": jnp.ones(3), "w": jax.device_put(values, layout), "s": jnp.ones(())}
  export_safetensors(tmp_path / "out", tree)
  found = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
  np.testing.assert_array_equal(found["w"], values)
  assert (found["before"].tolist(), found["s"]) == ([1] * 3, 1)


@pytest.mark.parametrize("cut", [3, 40, -1])
def test_damaged_files(tmp_path, cut):
  file = tmp_path / "m.safetensors"
  safetensors.numpy.save_file({"w": np.ones(4, np.float32)}, file)
  file.write_bytes(file.read_bytes()[:cut])
  plan = nxp.plan(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nxp.make_mesh(a=8), nxp.replicate())
  with pytest.raises(CheckpointError, match=r"m\.safetensors is not a complete safetensors file"):
    import_safetensors(file, plan)


def entry(shape, begin, end, dtype="F32"):
  return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS = {
  "an overlap": {"a": entry([2], 0, 8), "b": entry([3], 0, 12)},
  "half an overlap": {"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, "a gap": {"a": entry([2], 4, 12)},
  "too many bytes": {"a": entry([2], 0, 12)}, "a negative shape": {"a": entry([-1, -3], 0, 12)},
  "no offsets": {"a": {"dtype": "F32", "shape": [3]}}, "great depth": "[" * 100_000, "great size": None,
}  # fmt: skip


@pytest.mark.parametrize("lie", HEADERS)
def test_headers_that_lie(tmp_path, lie):
  file, header = tmp_path / "m.safetensors", HEADERS[lie]
  text = (header if isinstance(header, str) else json.dumps(header)).encode()
  length = len(text) if header is not None else 6 << 30
  file.write_bytes(length.to_bytes(8, "little") + text + bytes(12))
  if header is None:
    os.truncate(file, (6 << 30) + 100)  # which takes no room on the disk
  with pytest.raises(CheckpointError, match=r"m\.safetensors is not a complete safetensors file: .*\n"):
    read_tensors(file)


def test_float8_and_empty_arrays_are_read(tmp_path):
  tensors = {"b": entry([4], 4, 8, "F8_E4M3"), "a": entry([2, 2], 0, 4, "I8"), "none": entry([0, 3], 8, 8)}
  header = json.dumps(tensors).encode()
  (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(8)))
  found = read_tensors(tmp_path)
  assert found["a"][()].tolist() == [[0, 1], [2, 3]]
  eighths = np.arange(4, 8, dtype=np.uint8).view(jnp.float8_e4m3fn)
  np.testing.assert_array_equal(found["b"][()], eighths)
  assert found["none"].shape == (0, 3)


@pytest.mark.parametrize(
  "file", ["../m.safetensors", "/tmp/m.safetensors", "..", "sub/m.safetensors", 3, None]
)
def test_an_index_does_not_lead_out_of_its_folder(tmp_path, file):
  safetensors.numpy.save_file({"w": np.ones(4, np.float32)}, tmp_path / "m.safetensors")
  index = tmp_path / "run" / "model.safetensors.index.json"
  index.parent.mkdir()
  index.write_text(json.dumps({"weight_map": {"w": file}}))
  with pytest.raises(CheckpointError, match=r"is not an index .*: w is not in a file of the same folder,"):
    read_tensors(tmp_path / "run")


def test_what_jax_would_shorten_is_not_written(tmp_path):
  with pytest.raises(CheckpointError, match="w is int64, and jax makes int32 of it"):
    export_safetensors(tmp_path / "out", {"w": np.arange(3)})


def test_layers_that_differ_are_not_written_as_one(tmp_path):
  weight_map = WeightMap(Rule("w", "{i}"))
  trees = {"shapes": (jnp.ones(4), jnp.ones(5)), "dtypes": (jnp.ones(4), jnp.ones(4, jnp.bfloat16))}
  for what, layers in trees.items():
    with pytest.raises(CheckpointError, match=rf"0, 1 cannot be layers of w: their {what} differ"):
      export_safetensors(tmp_path / "out", layers, weight_map)
