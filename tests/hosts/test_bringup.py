"""Who the processes are is read right, and what does not fit is an error with the fix, on every process."""

import concurrent.futures
import socket

import jax
import pytest

import nnx_parallel as nxp
from nnx_parallel.hosts import bringup
from nnx_parallel.hosts.launch import free_port
from nnx_parallel.hosts.rollcall import roll_call
from processes import run_two

HostError = nxp.errors.HostError
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
  for name in (*bringup.MARKERS, "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS"):
    monkeypatch.delenv(name, raising=False)


def test_without_variables_this_is_a_job_of_one_process():
  for _ in range(2):
    seen = nxp.init_distributed()
    assert (seen.index, seen.count, seen.found) == (0, 1, "alone")
    assert seen.local_devices == seen.devices == jax.device_count()
  assert not jax.distributed.is_initialized()
  assert str(seen).startswith("process 0 of 1 (alone) on ")


def test_too_late_on_a_cluster_names_the_variable(monkeypatch):
  jax.devices()
  monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
  with pytest.raises(HostError, match=r"came too late.*\n  JOB_COMPLETION_INDEX=2\n  Fix: call it first"):
    nxp.init_distributed()


def test_the_variables_of_torchrun():
  assert bringup.from_torchrun(TORCHRUN) == ("node0:29500", 4, 1)
  assert bringup.from_torchrun(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})[0] == "node0:29501"
  assert bringup.from_torchrun({"WORLD_SIZE": "4"}) is None
  with pytest.raises(HostError, match="MASTER_ADDR=None"):
    bringup.from_torchrun({"RANK": "1", "WORLD_SIZE": "4"})
  with pytest.raises(HostError, match="RANK=one"):
    bringup.from_torchrun(TORCHRUN | {"RANK": "one"})


@pytest.mark.parametrize(("variables", "expected"), [
  ({}, None),
  ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "3"}, None),
  ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, []),
  ({"SLURM_STEP_TASKS_PER_NODE": "8", "CUDA_VISIBLE_DEVICES": "5"}, []),
  ({"SLURM_STEP_TASKS_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, None),
  ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, []), (TORCHRUN, []),
  (TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, [1]),
  (TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "2"}, []),
])  # fmt: skip
def test_the_gpus_of_a_process(variables, expected):
  assert bringup.visible_devices(variables) == expected


def called(*processes, timeout=10.0):
  """What the roll call says to each of these, as (number, count)."""
  address = f"localhost:{free_port()}"

  def one(process):
    number, count = process
    try:
      roll_call(address, count, number, timeout)
    except HostError as error:
      return str(error)
    return ""

  with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
    return list(pool.map(one, processes))


def test_all_come_in_any_order_and_the_port_is_free_again():
  assert called((3, 4), (0, 4), (2, 4), (1, 4)) == [""] * 4


def test_missing_processes_are_named_on_all_that_came():
  for text in called((0, 4), (2, 4), timeout=0.5):
    assert text.startswith("processes [1, 3] of 4 did not come.")
    assert "timeout 0.5 s" in text


def test_a_port_that_is_taken():
  with socket.create_server(("", 0)) as server, pytest.raises(HostError, match="cannot listen on port"):
    roll_call(f"localhost:{server.getsockname()[1]}", 2, 0, 1)


@pytest.mark.slow
def test_two_processes_see_the_same():
  body = """
    seen = nxp.init_distributed()
    assert (seen.index, seen.count, seen.found) == (process, 2, "before")
    assert (seen.local_devices, seen.devices) == (4, 8)
    assert nxp.init_distributed("localhost:1", 2, process) == seen
    for wrong in ({"address": "localhost:1", "count": 4, "index": 3}, {"devices_per_process": 8}):
      try:
        nxp.init_distributed(**wrong)
      except nxp.errors.HostError as error:
        print(error)
  """
  for process, text in enumerate(run_two(body)):
    assert f"this is process {process} of 2 already, and cannot become 3 of 4" in text
    assert "processes [0, 1] have [4] devices, not 8 (expected)" in text


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_roll_call_is_heard_on_each_family_of_addresses(host):
  if ":" in host and not socket.has_dualstack_ipv6():
    pytest.skip("this machine has no IPv6")
  with socket.create_server(("", 0)) as probe:
    port = probe.getsockname()[1]
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    calls = [pool.submit(roll_call, f"{host}:{port}", 2, process, 10) for process in (0, 1)]
    assert [call.result() for call in calls] == [None, None]
