"""Two processes of four devices each, or four of two, on one machine."""

import textwrap

import numpy as np
import pytest
import safetensors.numpy

from checkpoint.runs import assert_same
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from processes import run_in, run_two

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
    like = lambda name, spec: jax.ShapeDtypeStruct(
      tree[name].shape, tree[name].dtype, sharding=NamedSharding(other, spec))
    target = {"w": like("w", P(None, "c")), "b": like("b", P())}
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

    read, elements = Tensor.__getitem__, 0
    def counted(self, index):
      global elements
      values = read(self, index)
      elements += values.size
      return values
    patch(Tensor, "__getitem__", counted)
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


COUNTED = """
import optax
from flax import nnx
from jax._src import distributed
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.core import processes

real = distributed.global_state.client
seen = {"messages": 0, "bytes": 0, "rendezvous": 0}

def nbytes(value):
  if isinstance(value, (str, bytes)):
    return len(value)
  return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0

class Counting:
  def __getattr__(self, name):
    call = getattr(real, name)
    def counted(*given, **options):
      seen["messages"] += 1
      result = call(*given, **options)
      seen["bytes"] += nbytes(given) + nbytes(result)
      return result
    return counted if callable(call) else call

jax.devices()  # they are found with the real one
patch(distributed.global_state, "client", Counting())
patch(processes.Exchange, "is_warned", lambda self: False)  # it is asked once a second
answer = processes.Exchange.answer
def answered(*given, **options):
  seen["rendezvous"] += 1
  return answer(*given, **options)
patch(processes.Exchange, "answer", answered)

def count(name, call):
  seen.update(dict.fromkeys(seen, 0))
  call()
  print(name, *seen.values())

plan = nxp.plan(lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=8),
  optimizer=optax.adam(1e-2))
pair = nxp.create_sharded_model(plan)
step = nxp.train_step(lambda model, x: (model(x) ** 2).mean())
data = lambda samples: [np.ones((64 // count_of, 16), np.float32)] * 9
options = {"plan": plan, "progress": False}
checkpointer = Checkpointer(arguments[0])
nxp.fit(step, *pair, data, steps=1, checkpointer=checkpointer, **options)
count("save", lambda: checkpointer.save(2, *pair))
count("restore", lambda: checkpointer.restore(plan))
options |= {"steps": 3, "checkpointer": checkpointer, "resume": "latest"}
count("fit", lambda: nxp.fit(step, *pair, data, **options))
count("verify", checkpointer.verify)
checkpointer.close()
"""


MOST_RENDEZVOUS = {"save": 3, "restore": 3, "fit": 8, "verify": 5}


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 4), pytest.param((2, 4, 8), marks=pytest.mark.nightly)])
def test_messages_do_not_grow_with_processes_squared(tmp_path, counts):
  found = {}
  for number in counts:
    outputs = run_in(number, f"count_of = {number}\n{COUNTED}", tmp_path / str(number))
    for process, out in enumerate(outputs):
      for line in out.splitlines():
        name, messages, nbytes, rendezvous = line.split()
        found[number, process, name] = int(messages), int(nbytes)
        assert int(rendezvous) <= MOST_RENDEZVOUS[name], line
  few, many = counts[0], counts[-1]
  # In a save, Orbax asks in a loop whether its files are there: how often depends on the machine.
  for name in ("restore", "verify"):
    for kind in (0, 1):  # messages, and bytes
      total = {n: sum(found[n, process, name][kind] for process in range(n)) for n in (few, many)}
      assert total[many] <= 1.3 * total[few] * many / few, (name, found)
    # A process beside process 0 gets the same, however many there are.
    assert found[many, 1, name][1] <= 2.5 * found[few, 1, name][1], (name, found)
  print(found)
