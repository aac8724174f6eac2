"""Joins the processes of a job by JAX's runtime, and checks that they see the same devices."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import os
import re
import socket
import sys
import threading
import types
from collections.abc import Mapping, Sequence

import jax

from nnx_parallel.checkpoint.checkpointer import finish_saves, report_lost
from nnx_parallel.core.checked import check_arguments, warn
from nnx_parallel.errors import HostError
from nnx_parallel.hosts.rollcall import roll_call

# If one of these is set, several processes were meant to start.
MARKERS = (
  "RANK",
  "WORLD_SIZE",
  "SLURM_STEP_NODELIST",
  "OMPI_COMM_WORLD_SIZE",
  "OMPI_MCA_orte_hnp_uri",
  "JOB_COMPLETION_INDEX",
  "JAX_COORDINATOR_ADDRESS",
  "TPU_WORKER_HOSTNAMES",
)


@dataclasses.dataclass(frozen=True)
class Processes:
  """The processes of a job, as one process sees them.

  Attributes:
    index: the number of this process.
    count: the number of processes.
    local_devices: the number of devices of this process.
    devices: the number of devices of all processes.
    found: how the other processes were found: `"arguments"`; `"RANK and WORLD_SIZE"`; `"jax"` if JAX detected
      the cluster; `"before"` if the distributed runtime was already initialized; `"alone"` if there are no
      other processes.
  """

  index: int
  count: int
  local_devices: int
  devices: int
  found: str

  def __str__(self) -> str:
    return (
      f"process {self.index} of {self.count} ({self.found}) on {socket.gethostname()}:"
      f" {self.local_devices} of {self.devices} {jax.default_backend()} devices"
    )


@check_arguments(HostError)
def init_distributed(
  address: str | None = None,
  count: int | None = None,
  index: int | None = None,
  *,
  local_devices: int | Sequence[int] | None = None,
  devices_per_process: int | None = None,
  timeout: float = 300,
  heartbeat_timeout: float = 100,
) -> Processes:
  """Joins all processes of the job; call it before anything that uses JAX's devices.

  The call finds the other processes with the first of these methods that applies: the arguments; the
  environment variables of torchrun (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `LOCAL_RANK`), which
  `nnx-parallel launch` also sets; the detection in JAX (Slurm, Open MPI, Kubernetes, GKE, Cloud TPU). If none
  of them applies, the job has one process, and the call returns immediately. So the same script runs
  everywhere. A second call changes nothing. The call initialises JAX's devices, so settings such as
  `jax_num_cpu_devices` must come before it.

  In a job of several processes, an uncaught exception ends its process immediately after the traceback. JAX
  by itself would first wait for the other processes, which in turn wait for this process.

  Args:
    address: `host:port` of process 0, with a port that is free on that host. If you pass it, also pass
      `count` and `index`.
    count: the number of processes.
    index: the number of this process, from 0.
    local_devices: the numbers of the GPUs of this host that this process uses. By default, the only process
      of a host uses all visible GPUs, and otherwise each process uses the GPU with its local number.
    devices_per_process: the number of devices that each process must have; another number is an error.
    timeout: the time to wait for the other processes, in seconds.
    heartbeat_timeout: the seconds without a heartbeat after which JAX regards a process as dead and ends all
      processes.

  Returns:
    A `Processes`: the number of this process, the number of processes, and the number of their devices.

  Raises:
    HostError: a process did not arrive (the message names it if the address is known), the numbers of the
      processes contradict each other, the devices of JAX were used before the call, processes have different
      numbers of devices, or some GPUs belong to no process.

  Example:
    >>> import nnx_parallel as nxp
    >>> processes = nxp.init_distributed()
    >>> processes.index, processes.count, processes.found
    (0, 1, 'alone')
  """
  if jax.distributed.is_initialized():
    seen = _check_devices("before", devices_per_process)
    if (count, index) not in ((None, None), (seen.count, seen.index)):
      raise HostError(
        f"this is process {seen.index} of {seen.count} already, and cannot become {index} of {count}.",
        fix="call init_distributed once, or again with the same arguments.",
      )
    return seen
  found, peers = _peers(address, count, index)
  alone = peers is not None and peers[1] == 1
  if alone or not _join(peers, local_devices, timeout, heartbeat_timeout):
    return _check_devices("alone", devices_per_process)
  if jax.process_count() > 1:
    end_at_once_on_failure()
  return _check_devices(found, devices_per_process)


def _peers(
  address: str | None, count: int | None, index: int | None
) -> tuple[str, tuple[str, int, int] | None]:
  """Returns how the processes find each other, and address, count and index, or None if JAX detects them."""
  found = "arguments"
  if (address, count, index) == (None, None, None):
    peers = from_torchrun(os.environ)
    found = "jax" if peers is None else "RANK and WORLD_SIZE"
  elif address is not None and count is not None and index is not None:
    peers = (address, count, index)
  else:
    raise HostError(
      "init_distributed needs all of address, count and index, or none of them.",
      details=f"address={address}, count={count}, index={index}",
      fix='nxp.init_distributed("10.0.0.1:8476", count=4, index=0), or set RANK, WORLD_SIZE, MASTER_ADDR and'
      " MASTER_PORT.",
    )
  if peers is not None:
    address, count, index = peers
    if not 0 <= index < count or not re.fullmatch(r".+:\d+", address):
      raise HostError(
        f"process {index} of {count} at {address} cannot be.",
        fix="an index from 0 to count - 1, and an address such as 10.0.0.1:8476.",
      )
  return found, peers


def _join(
  peers: tuple[str, int, int] | None,
  local_devices: int | Sequence[int] | None,
  timeout: float,
  heartbeat_timeout: float,
) -> bool:
  """Joins the other processes; returns False if there are none."""
  address, count, index = (None, None, None) if peers is None else peers
  if local_devices is None:
    local_devices = visible_devices(os.environ)
  try:
    if peers is not None:
      roll_call(*peers, timeout)
    jax.distributed.initialize(
      address,
      count,
      index,
      local_devices,
      initialization_timeout=max(1, round(timeout)),
      heartbeat_timeout_seconds=max(1, round(heartbeat_timeout)),
      cluster_detection_method="deactivate" if address is not None else None,
    )
  except ValueError as error:
    if address is not None or "coordinator_address should be defined" not in str(error):
      raise HostError("JAX could not join the processes.", details=str(error)) from error
    _warn_without_srun()
    return False
  except RuntimeError as error:
    if isinstance(error, HostError):
      raise
    if "must be called before" not in str(error):
      raise HostError("JAX could not join the processes.", details=str(error)) from error
    if address is None and not any(os.environ.get(name) for name in MARKERS):
      return False  # a notebook that has used its devices
    raise HostError(
      "init_distributed came too late: JAX's devices are in use already.",
      details=", ".join(f"{name}={os.environ[name]}" for name in MARKERS if os.environ.get(name))
      or f"address={address}",
      fix="call it first in the script, before jax.devices(), make_mesh or any array.",
    ) from error
  return True


def from_torchrun(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
  """Address, count and index from the variables of torchrun; None without them."""
  if "RANK" not in environment or "WORLD_SIZE" not in environment:
    return None
  names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
  shown = ", ".join(f"{name}={environment.get(name)}" for name in names)
  try:
    index, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if count == 1:
      return "localhost:0", 1, index
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
  except (KeyError, ValueError) as error:
    raise HostError(
      "the variables that say where the other processes are do not fit together.",
      details=f"{shown}; {type(error).__name__}: {error}",
      fix="set all four, or unset RANK and WORLD_SIZE for a job of one process.",
    ) from error
  # torchrun's agent listens on the port itself.
  port += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
  return f"{host}:{port}", count, index


def visible_devices(environment: Mapping[str, str]) -> list[int] | None:
  """The `local_device_ids` to pass to JAX: `[]` for all visible devices, None for JAX's own choice.

  JAX's choice is the GPU of the task's local number: wrong if the task is alone, or sees only its own.
  """
  visible = environment.get("CUDA_VISIBLE_DEVICES", environment.get("ROCR_VISIBLE_DEVICES", ""))
  one_gpu = bool(visible) and "," not in visible
  if "RANK" in environment and "WORLD_SIZE" in environment:
    alone = environment.get("LOCAL_WORLD_SIZE", "1") == "1"
    return [] if alone or one_gpu else [int(environment["LOCAL_RANK"])]
  here = re.match(
    r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
  )
  return [] if one_gpu or (here is not None and here[0] == "1") else None


def _warn_without_srun() -> None:
  tasks = os.environ.get("SLURM_NTASKS", "1")
  if tasks != "1" and "SLURM_STEP_NODELIST" not in os.environ:
    warn(
      f"this Slurm job has {tasks} tasks, but this process runs alone: srun did not start it."
      "  Fix: srun python train.py"
    )


def _check_devices(found: str, devices_per_process: int | None) -> Processes:
  """Compares the devices of all processes: every process sees the same list, so all of them raise or none."""
  count = jax.process_count()
  each = collections.Counter(device.process_index for device in jax.devices())
  seen = Processes(jax.process_index(), count, jax.local_device_count(), jax.device_count(), found)
  problem = device_problem(each, count, jax.default_backend(), devices_per_process, os.environ)
  if problem is not None:
    what, fix = problem
    raise HostError(what, details=f"{seen}; devices of each process: {dict(sorted(each.items()))}", fix=fix)
  return seen


def device_problem(
  each: Mapping[int, int],
  count: int,
  backend: str,
  devices_per_process: int | None,
  environment: Mapping[str, str],
) -> tuple[str, str] | None:
  """The error about the number of devices of each process, and its fix; None without an error."""
  without = [process for process in range(count) if not each.get(process)]
  if without:
    return (
      f"processes {without} have no {backend} devices.",
      "check the GPUs or the plugin of their hosts; JAX_PLATFORMS must be the same everywhere.",
    )
  wanted = devices_per_process or max(set(each.values()), key=list(each.values()).count)
  others = [process for process in range(count) if each[process] != wanted]
  if others:
    meant = "expected" if devices_per_process else "as most have"
    return (
      f"processes {others} have {sorted({each[process] for process in others})} devices, not {wanted}"
      f" ({meant}).",
      "give every process the same number: under Slurm --ntasks-per-node=N --gpus-per-task=1, or one task"
      " per node with --ntasks-per-node=1 --gpus-per-node=N; check CUDA_VISIBLE_DEVICES.",
    )
  granted, tasks = environment.get("SLURM_GPUS_ON_NODE", ""), environment.get("SLURM_STEP_TASKS_PER_NODE", "")
  here = re.match(r"\d+", tasks)
  if devices_per_process is not None or not granted.isdigit() or here is None:
    return None
  if backend == "cpu" and not environment.get("JAX_PLATFORMS", "").startswith("cpu"):
    return (
      f"Slurm gave this node {granted} GPUs, but JAX sees none.",
      'install the GPU build (pip install "jax[cuda12]"), or set JAX_PLATFORMS=cpu on purpose.',
    )
  if backend in ("gpu", "cuda", "rocm") and wanted * int(here[0]) < int(granted):
    return (
      f"Slurm gave this node {granted} GPUs, but its {here[0]} tasks see {wanted} each.",
      f"srun --ntasks-per-node={granted} --gpus-per-task=1, or one task per node that sees all:"
      f" srun --ntasks-per-node=1 --gpus-per-task={granted};"
      " devices_per_process= if the rest is meant to be idle.",
    )
  return None


_failed = False


def mark_failed() -> None:
  """Lets this process end at once, with code 1, without waiting for the other processes."""
  global _failed
  _failed = True


def end_at_once_on_failure() -> None:
  """After an uncaught exception, ends the process, and finishes background saves before.

  JAX's exit waits for the others, which may wait for us: five minutes; Python's waits for Orbax's threads.
  """
  former = sys.excepthook

  def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    former(kind, error, trace)
    mark_failed()

  def end() -> None:
    if _failed:
      finish_saves()
      report_lost()
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(1)

  sys.excepthook = hook
  threading._register_atexit(end)  # pyright: ignore
  atexit.register(end)  # the last registered is the first called
