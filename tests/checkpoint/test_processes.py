"""Two processes of four devices each, or four of two, on one machine."""

import textwrap

import numpy as np
import pytest
import safetensors.numpy

from checkpoint.runs import assert_same
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from processes import run_two

START = """
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.errors import CheckpointError

mesh = nxp.make_mesh(a=2, b=4)
values = {"w": np.arange(128, dtype=np.float32).reshape(8, 16), "b": np.arange(16, dtype=np.int32)}
tree = {"w": put(values["w"], mesh, "a", "b"), "b": put(values["b"], mesh, "b")}
checkpointer = Checkpointer(arguments[0], asynchronous=True)
"""


def run(tmp_path, body):
  return run_two(START + textwrap.dedent(body), tmp_path)


@pytest.mark.everyday
@pytest.mark.slow
def test_two_processes_save_and_restore_what_one_process_reads(tmp_path):
  body = """
    checkpointer.save(1, tree, extra={"data": {"cursor": 3}})
    checkpointer.wait()
    other = nxp.make_mesh(c=8)
    sharding = NamedSharding(other, P(None, "c"))
    target = {
      "w": jax.ShapeDtypeStruct((8, 16), np.float32, sharding=sharding),
      "b": jax.ShapeDtypeStruct((16,), np.int32, sharding=NamedSharding(other, P())),
    }
    again = checkpointer.restore(target)
    for name in tree:
      for shard in again[name].addressable_shards:
        np.testing.assert_array_equal(shard.data, values[name][shard.index])
    print("bytes", checkpointer.diff(target).bytes_read)
  """
  for out in run(tmp_path, body):
    assert f"bytes {8 * 8 * 4 + 64}" in out
  found = Checkpointer(tmp_path).restore(as_numpy=True)["model"]
  wanted = {"w": np.arange(128, dtype=np.float32).reshape(8, 16), "b": np.arange(16, dtype=np.int32)}
  assert_same(found, wanted)
  assert Checkpointer(tmp_path).verify() == {}


@pytest.mark.slow
def test_a_write_that_fails_on_one_process_is_an_error_on_all_at_once(tmp_path):
  body = """
    import resource, time
    everything = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    large = {"w": put(np.ones((64, 4096), np.float32), mesh, "a", "b")}
    checkpointer.save(1, large)
    checkpointer.wait()
    for asynchronous in (False, True):
      saving = Checkpointer(arguments[0], asynchronous=asynchronous)
      saving.restore(large)
      if process == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000, resource.RLIM_INFINITY))
      began = time.monotonic()
      try:
        saving.save(2, large)
        saving.wait()
      except CheckpointError as error:
        print("refused:", error)
      assert time.monotonic() - began < 100, "waited for the one that failed"
      resource.setrlimit(resource.RLIMIT_FSIZE, everything)
      print("latest", saving.latest())
    saving.save(3, large)
    saving.wait()
    print("after", saving.latest(), saving.verify())
  """
  first, second = run(tmp_path, body)
  assert first.count("refused: processes [1] failed") == 2
  assert all("File too large" in out for out in (first, second))
  for out in (first, second):
    assert out.count("latest 1") == 2
    assert "after 3 {}" in out


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("worst", [0, 1])
def test_a_disk_that_is_full_for_all_is_an_error_on_all(tmp_path, worst):
  # One process cannot write its large array, and waits for the other to write its small one.
  body = """
    import os, resource
    from nnx_parallel.checkpoint import array_io
    patch(array_io, "_CLEAN_UP_S", 1.0)
    everything = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    large = {"w": put(np.ones((64, 4096), np.float32), mesh, "a", "b")}
    small = {"m": put(np.ones((64, 64), np.float32), mesh, "a", "b")}
    checkpointer.save(1, large, small)
    checkpointer.wait()

    def attempt(saving):
      try:
        saving.save(2, large, small)
        saving.wait()
      except CheckpointError as error:
        print("refused:", str(error))

    for asynchronous in (False, True):
      saving = Checkpointer(arguments[0], asynchronous=asynchronous)
      room = 100 if process == int(arguments[1]) else 50_000
      resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
      attempt(saving)
      resource.setrlimit(resource.RLIMIT_FSIZE, everything)
    mkdir = os.mkdir
    def no_inodes(path, *rest):
      if ".nnx-saving" in str(path):
        raise OSError(28, "No space left on device")
      mkdir(path, *rest)
    if process == 0:
      patch(os, "mkdir", no_inodes)
    attempt(saving)
    os.mkdir = mkdir
    print("latest", saving.latest())
    saving.save(3, large, small)
    saving.wait()
    print("after", saving.latest(), saving.verify())
  """
  first, second = run_two(START + textwrap.dedent(body), tmp_path, worst)
  assert "refused: cannot save step 2 in" in first
  assert "the disk is full" in first
  for out in (first, second):
    assert out.count("refused: ") == 3
    assert out.count("File too large") >= 2
    assert "latest 1\nafter 3 {}" in out


@pytest.mark.slow
def test_process_0_decides_what_is_latest_and_verify_leaves_none_waiting(tmp_path):
  body = """
    from nnx_parallel.checkpoint import storage, restore

    for step in (1, 2):
      checkpointer.save(step, tree)
    checkpointer.wait()
    if process == 1:  # its file system has not heard of step 2
      patch(storage.Storage, "steps", lambda self: [1])
    print(checkpointer.steps(), checkpointer.latest())
    checkpointer.restore(tree)
    print("took", checkpointer.restored.step)
    if process == 1:
      def unreadable(*_, **__):
        raise CheckpointError("the disk of this process is away")
      patch(restore, "_load", unreadable)
    try:
      print("went on", checkpointer.verify())
    except CheckpointError as error:
      print("refused:", error)
  """
  for out in run(tmp_path, body):
    assert "[1, 2] 2\ntook 2\nrefused:" in out
    assert "the disk of this process is away" in out


@pytest.mark.slow
def test_what_fails_on_one_process_fails_on_both_and_none_hangs(tmp_path):
  body = """
    checkpointer.save(1, tree)
    def attempt(call):
      try:
        call()
      except CheckpointError as error:
        print("refused:", error.what)
    attempt(lambda: checkpointer.save(1, tree))
    attempt(lambda: checkpointer.save(2 + process, tree))
    attempt(lambda: checkpointer.restore(tree if process else {"w": tree["w"]}))
    attempt(lambda: checkpointer.restore(tree, only=["w"] if process else ["b"]))
    checkpointer.save(5, tree)
    checkpointer.close()
    print("steps", checkpointer.steps())
  """
  first, second = run(tmp_path, body)
  for out in (first, second):
    assert out.count("refused:") == 4
    assert "the processes do not agree on what to save" in out
    assert "the processes do not agree on what to restore" in out
    assert "steps [1, 5]" in out
  assert "refused: cannot save step 1: it exists" in first
  assert "refused: processes [0] failed, so this process stopped too." in second


@pytest.mark.slow
def test_safetensors_are_read_and_written_each_process_its_own_slices(tmp_path):
  kernel = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
  theirs = {"fc.weight": kernel.T.copy(), "fc.bias": np.arange(32, dtype=np.float32)}
  safetensors.numpy.save_file(theirs, tmp_path / "in.safetensors")
  body = """
    import pathlib
    from flax import nnx
    from nnx_parallel.interop.safetensors import Tensor, export_safetensors, import_safetensors
    from nnx_parallel.interop.weights import Rule, WeightMap

    read, elements = Tensor.read, 0
    def counted(self, index):
      global elements
      values = read(self, index)
      elements += values.size
      return values
    patch(Tensor, "read", counted)
    root = pathlib.Path(arguments[0])
    init = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    plan = nxp.plan(init, nxp.make_mesh(x=8), nxp.fsdp("x", min_size=64))
    weight_map = WeightMap(Rule("fc.weight", "kernel", "o i -> i o"), Rule("fc.bias", "bias"))
    model = import_safetensors(root / "in.safetensors", plan, weight_map)
    print("read", elements)
    export_safetensors(root / "out", model, weight_map)
  """
  for out in run(tmp_path, body):
    assert f"read {16 * 32 // 2 + 32 // 2}" in out
  found = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
  assert_same(found, theirs)


@pytest.mark.slow
def test_damage_that_one_process_sees_ends_both_and_both_fall_back(tmp_path):
  body = """
    import pathlib, warnings
    from jax.experimental import multihost_utils

    wide = np.arange(8 * 8192, dtype=np.float32).reshape(8, 8192)
    trees = {f"w{i}": put(wide, mesh, "a", "b") for i in range(4)}
    for step in (1, 2):
      checkpointer.save(step, trees)
    checkpointer.wait()
    if process == 0:
      files = (pathlib.Path(arguments[0]) / "2/model/ocdbt.process_1/d").iterdir()
      file = max(files, key=lambda path: path.stat().st_size)
      data = bytearray(file.read_bytes())
      data[5000] ^= 1
      file.write_bytes(bytes(data))
    multihost_utils.sync_global_devices("damaged")
    try:
      checkpointer.restore(trees)
    except CheckpointError as error:
      print("refused:", type(error).__name__, error.what)
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      again = checkpointer.restore(trees, on_corrupt="fallback")
    print("took", checkpointer.restored.step)
    for shard in again["w0"].addressable_shards:
      np.testing.assert_array_equal(shard.data, wide[shard.index])
  """
  for out in run(tmp_path, body):
    assert out.count("refused: DamagedError") == 1
    assert "took 1" in out
