"""Who the processes are is read right, and what does not fit is an error with the fix, on every process."""

import concurrent.futures
import os
import socket
import subprocess
import sys

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


def test_one_process_of_torchrun_or_of_the_arguments_is_alone(monkeypatch):
  assert nxp.init_distributed("localhost:1", 1, 0).found == "alone"
  for name, value in (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}).items():
    monkeypatch.setenv(name, value)
  assert nxp.init_distributed().found == "alone"


def test_too_late_on_a_cluster_names_the_variable(monkeypatch):
  jax.devices()
  monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
  with pytest.raises(HostError, match=r"came too late.*\n  JOB_COMPLETION_INDEX=2\n  Fix: call it first"):
    nxp.init_distributed()


def test_too_late_with_arguments_is_not_a_job_of_one(monkeypatch):
  jax.devices()
  monkeypatch.setattr(bringup, "roll_call", lambda *_: None)
  with pytest.raises(HostError, match=r"came too late.*\n  address=localhost:1\n"):
    nxp.init_distributed("localhost:1", 2, 0)


def test_a_slurm_job_that_srun_did_not_start_is_a_warning(monkeypatch):
  monkeypatch.setenv("SLURM_NTASKS", "4")
  monkeypatch.setattr(jax.distributed, "initialize", fails("coordinator_address should be defined."))
  with pytest.warns(nxp.NnxParallelWarning, match=r"has 4 tasks, but this process runs alone.*srun python"):
    assert nxp.init_distributed().count == 1


def fails(text):
  def initialize(*_args, **_options):
    raise ValueError(text)

  return initialize


def test_another_failure_of_jax_is_shown(monkeypatch):
  monkeypatch.setattr(jax.distributed, "initialize", fails("no metadata server"))
  with pytest.raises(HostError, match=r"JAX could not join the processes\.\n  no metadata server"):
    nxp.init_distributed()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("host:1",), "needs all of address, count and index, or none"),
    (("host:1", 2, 2), "process 2 of 2 at host:1 cannot be"),
    (("host", 2, 1), "process 1 of 2 at host cannot be"),
  ],
)
def test_arguments_that_do_not_fit(arguments, message):
  with pytest.raises(HostError, match=message):
    nxp.init_distributed(*arguments)


def test_the_variables_of_torchrun():
  assert bringup.from_torchrun(TORCHRUN) == ("node0:29500", 4, 1)
  assert bringup.from_torchrun(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})[0] == "node0:29501"
  assert bringup.from_torchrun({"WORLD_SIZE": "4"}) is None
  with pytest.raises(HostError, match="MASTER_ADDR=None"):
    bringup.from_torchrun({"RANK": "1", "WORLD_SIZE": "4"})
  with pytest.raises(HostError, match="RANK=one"):
    bringup.from_torchrun(TORCHRUN | {"RANK": "one"})


@pytest.mark.parametrize(
  ("variables", "expected"),
  [
    ({}, None),
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "3"}, None),
    ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, []),
    ({"SLURM_STEP_TASKS_PER_NODE": "8", "CUDA_VISIBLE_DEVICES": "5"}, []),
    ({"SLURM_STEP_TASKS_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, None),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, []),
    (TORCHRUN, []),
    (TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, [1]),
    (TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "2"}, []),
  ],
)
def test_the_gpus_of_a_process(variables, expected):
  assert bringup.visible_devices(variables) == expected


SLURM = {"SLURM_GPUS_ON_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


@pytest.mark.parametrize(
  ("each", "backend", "wanted", "variables", "message"),
  [
    ({0: 4, 1: 4}, "gpu", None, {}, None),
    ({0: 4}, "gpu", None, {}, "processes [1] have no gpu devices."),
    ({0: 4, 1: 1}, "gpu", 4, {}, "processes [1] have [1] devices, not 4 (expected)."),
    ({0: 1, 1: 1}, "gpu", None, SLURM, "Slurm gave this node 8 GPUs, but its 1 tasks see 1 each."),
    ({0: 1, 1: 1}, "gpu", 1, SLURM, None),
    ({0: 8, 1: 8}, "gpu", None, SLURM, None),
    ({0: 1, 1: 1}, "cpu", None, SLURM, "Slurm gave this node 8 GPUs, but JAX sees none."),
    ({0: 1, 1: 1}, "cpu", None, SLURM | {"JAX_PLATFORMS": "cpu"}, None),
  ],
)
def test_the_devices_of_all_processes(each, backend, wanted, variables, message):
  problem = bringup.device_problem(each, 2, backend, wanted, variables)
  assert (problem and problem[0]) == message
  if message and "tasks see" in message:
    assert "srun --ntasks-per-node=8 --gpus-per-task=1" in problem[1]


def called(*processes, timeout=10.0, calls=None):
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


def test_without_process_0_the_address_is_named():
  (text,) = called((1, 2), timeout=0.3)
  assert text.startswith("process 1 found no process 0 at localhost:")
  assert "Connection refused" in text


def test_a_number_twice_and_another_count():
  assert all(t.startswith("two processes have the number 1.") for t in called((0, 4), (1, 4), (1, 4)))
  assert all("counts 3 processes, and process 0 counts 2" in t for t in called((0, 2), (1, 3)))


def test_a_port_that_is_taken():
  with socket.create_server(("", 0)) as server, pytest.raises(HostError, match="cannot listen on port"):
    roll_call(f"localhost:{server.getsockname()[1]}", 2, 0, 1)


SLURM_STEP = {
  "SLURM_JOB_ID": "4711",
  "SLURM_STEP_NODELIST": "localhost",
  "SLURM_STEP_TASKS_PER_NODE": "2",
  "SLURM_NTASKS": "2",
}
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:44131", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
  ("variables", "number", "local"),
  [
    (SLURM_STEP, "SLURM_PROCID", "SLURM_LOCALID"),
    (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
  ],
)
def test_schedulers_that_jax_knows(variables, number, local):
  """As their variables are on one host; an exception in one process ends it at once."""
  code = """if True:
    import nnx_parallel as nxp
    from jax.experimental import multihost_utils
    seen = nxp.init_distributed(timeout=60)
    told = multihost_utils.broadcast_one_to_all(seen.index, is_source=seen.index == 1)
    print(seen.index, seen.count, seen.devices, seen.found, told)
    nxp.hosts.barrier("printed", timeout=60)
    if seen.index == 1:
      raise OSError("no disk")
    nxp.hosts.barrier("both", timeout=1)
  """
  common = {**os.environ, **variables, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "2"}
  common |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_COORDINATOR_PORT": str(free_port())}
  jobs = [
    subprocess.Popen(
      [sys.executable, "-c", code],
      env={**common, number: str(process), local: str(process)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for process in range(2)
  ]
  try:
    for process in (1, 0):
      output, errors = jobs[process].communicate(timeout=60)
      assert f"{process} 2 4 jax 1\n" in output, errors
      assert jobs[process].returncode == 1, errors
      assert ("OSError: no disk", "processes [1] did not come to 'both'")[1 - process] in errors
  finally:
    for job in jobs:
      job.kill()


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
