"""Two processes of four devices each, on one machine."""

import os
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from checkpoint.runs import assert_same
from nnx_parallel.checkpoint.checkpointer import Checkpointer

START = """
import sys
directory, process, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
import jax
jax.distributed.initialize(f"localhost:{port}", 2, process, heartbeat_timeout_seconds=10)
import numpy as np
import nnx_parallel as nxp
from jax.sharding import NamedSharding, PartitionSpec as P
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.errors import CheckpointError

def put(values, mesh, *spec):
  sharding = NamedSharding(mesh, P(*spec))
  return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

mesh = nxp.make_mesh(a=2, b=4)
values = {"w": np.arange(128, dtype=np.float32).reshape(8, 16), "b": np.arange(16, dtype=np.int32)}
tree = {"w": put(values["w"], mesh, "a", "b"), "b": put(values["b"], mesh, "b")}
checkpointer = Checkpointer(directory, asynchronous=True)
"""


def run(tmp_path, body):
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
  }
  jobs = [
    subprocess.Popen(
      [sys.executable, "-c", START + textwrap.dedent(body), str(tmp_path), str(process), str(port)],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for process in range(2)
  ]
  try:
    results = [job.communicate(timeout=120) for job in jobs]
  finally:
    for job in jobs:
      job.kill()
  for job, (_, errors) in zip(jobs, results, strict=True):
    assert job.returncode == 0, errors
  return [out for out, _ in results]


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
    print("bytes", checkpointer.preflight(target).bytes_read)
  """
  for out in run(tmp_path, body):
    assert f"bytes {8 * 8 * 4 + 64}" in out
  found = Checkpointer(tmp_path).restore(as_numpy=True)["model"]
  wanted = {"w": np.arange(128, dtype=np.float32).reshape(8, 16), "b": np.arange(16, dtype=np.int32)}
  assert_same(found, wanted)
  assert Checkpointer(tmp_path).verify() == {}


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
  assert "refused: processes [0] could not go on, so this one stopped too." in second
