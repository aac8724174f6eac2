"""Devices of machines that are not here: the TPU and NVIDIA compilers run on a bare CPU machine.

| text | devices |
|---|---|
| `tpu:v5e:4x4` | 16 chips of one slice; v4, v5p and tpu7x take three numbers |
| `tpu:v5p:4x4x4*2` | two such slices, joined by the data-centre network |
| `gpu:h100:2x8` | two hosts of 8 GPUs, NVLink inside a host |
| `cpu:8` | the first 8 devices of this process |
| `cpu:4*2` | the same, as two slices of 4: only the report differs |

With several slices of v4 or v5p the compiler uses no wrap links (libtpu 0.0.50), and writes gathers inside a
slice as all-reduces, which send twice as much: to see the traffic inside a slice, compile for one slice.

The devices can be put in a mesh, and programs lowered and compiled for them, but hold no array.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import math
import os
import re
from collections.abc import Collection, Generator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import topologies
from jax.sharding import Mesh

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import make_mesh
from nnx_parallel.errors import ReportError
from nnx_parallel.report.chips import Chip, chip

_TEXT = re.compile(r"(?P<platform>tpu|gpu):(?P<chip>\w+):(?P<size>\d+(?:x\d+)*)(?:\*(?P<slices>\d+))?")
_CPU = re.compile(r"cpu:(?P<count>\d+)(?:\*(?P<slices>\d+))?")
# Chips of one TPU host board; the compiler's default splits a v4 chip into two devices.
_HOST_BOUNDS: Mapping[str, tuple[int, int, int]] = {"v4": (2, 2, 1), "v5p": (2, 2, 1)}
# On a machine without a TPU: a second process would die on a lock file, start-up would wait for a
# metadata server that only Google Cloud has, and complain that this host has no name.
_NO_TPU_HERE: Mapping[str, str] = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}


@dataclasses.dataclass(frozen=True)
class Machine:
  """What a topology's name says, without a compiler. A slice is a TPU slice, or an NVLink host."""

  text: str
  chip: Chip
  size: tuple[int, ...]
  slices: int
  devices: int

  @property
  def slice_size(self) -> int:
    """The number of devices of one slice."""
    return self.devices // self.slices


def read_machine(text: str) -> Machine:
  """Reads the name of a topology; see the table at the top of this module."""
  here = _CPU.fullmatch(text)
  if here:
    count, slices = int(here["count"]), int(here["slices"] or 1)
    return Machine(text, chip("cpu"), (count,), slices, count * slices)
  match = _TEXT.fullmatch(text)
  if not match:
    raise ReportError(
      f"cannot read the topology {text!r}.",
      fix="write tpu:v5e:4x4, tpu:v5p:4x4x4*2 (two slices), gpu:h100:2x8 (hosts x GPUs), cpu:8 or cpu:4*2.",
    )
  kind, size = chip(match["chip"]), tuple(int(n) for n in match["size"].split("x"))
  if kind.platform != match["platform"]:
    raise ReportError(
      f"{kind.name} is a {kind.platform.upper()}, not a {match['platform'].upper()}.",
      details=f"topology {text!r}",
      fix=f"write {text.replace(match['platform'], kind.platform, 1)}.",
    )
  slices = int(match["slices"] or 1)
  if kind.platform == "tpu":
    return Machine(text, kind, size, slices, math.prod(size) * slices * kind.devices_per_chip)
  if len(size) > 2 or slices > 1:
    raise ReportError(
      f"cannot read the GPU topology {text!r}.", fix=f"hosts x GPUs per host: gpu:{kind.name}:2x8."
    )
  size = size if len(size) == 2 else (1, *size)
  return Machine(text, kind, size, size[0], math.prod(size))


def missing_compiler(named: Machine) -> ReportError | None:
  """The error to raise where the compiler of a machine is not installed here, or None."""
  compiler, package, modules = {
    "cpu": ("", "", ["jax"]),
    "tpu": ("TPU", "jax[tpu]", ["libtpu"]),
    "gpu": ("NVIDIA", "jax[cuda12-local]", ["jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"]),
  }[named.chip.platform]
  # The package first: `find_spec` of a module imports its package.
  if any(find_spec(module.partition(".")[0]) and find_spec(module) for module in modules):
    return None
  return ReportError(
    f"cannot compile for {named.text!r}: the {compiler} compiler is not installed.",
    details="it needs no accelerator and no driver, only the wheels of this jax version",
    fix=f"pip install '{package}'",
  )


@check_arguments(ReportError)
def topology_mesh(text: str, *, explicit: bool | Collection[str] = False, **axes: int) -> Mesh:
  """Makes a mesh over the devices of a named machine, in an order that fits its links.

  Args:
    text: the name of the machine, such as `"tpu:v5p:4x4x4*2"` (two slices), `"gpu:h100:2x8"` (hosts x GPUs)
      or `"cpu:8"`.
    explicit: as in `make_mesh`.
    **axes: axis name -> size in devices. One size may be -1: the axis then gets the remaining devices. The
      first axes are the outermost, and run between slices.

  Returns:
    A mesh that programs can be lowered and compiled for; its devices hold no array.

  Raises:
    ReportError: the text cannot be read, the chip is unknown, its compiler is not installed, or the sizes do
      not multiply to the number of devices.

  Example:
    >>> dict(topology_mesh("cpu:8", data=2, fsdp=-1).shape)
    {'data': 2, 'fsdp': 4}
  """
  named = read_machine(text)
  missing = missing_compiler(named)
  if missing is not None:
    raise missing
  devices = {"cpu": _local, "tpu": _tpu, "gpu": _gpu}[named.chip.platform](named)
  known = max(1, math.prod(size for size in axes.values() if size != -1))
  sizes = {name: len(devices) // known if size == -1 else size for name, size in axes.items()}
  if not sizes or list(axes.values()).count(-1) > 1 or math.prod(sizes.values()) != len(devices):
    raise ReportError(
      f"the axes {axes} do not make the {len(devices)} devices of {text}.",
      fix=f"nxp.report.topology_mesh({text!r}, data=-1), or sizes whose product is {len(devices)}.",
    )
  left, across = 1 if named.chip.platform == "gpu" else named.slices, dict[str, int]()
  for name, size in sizes.items():
    across[name] = math.gcd(size, left)
    left //= across[name]
  return make_mesh(sizes, devices=devices, explicit=explicit, dcn=across)


def slice_numbers(mesh: Mesh, text: str | None = None) -> npt.NDArray[np.int64]:
  """The slice or host at each position of a mesh; of simulated devices, the topology's name tells."""
  if text is not None and text.startswith("cpu:"):
    return np.arange(mesh.size) // read_machine(text).slice_size
  numbers = [
    getattr(device, "slice_index", None) or 0 if device.platform == "tpu" else device.process_index
    for device in mesh.devices.flat
  ]
  return np.array(numbers, np.int64)


def _local(named: Machine) -> list[Any]:
  devices = jax.devices("cpu")
  if len(devices) < named.devices:
    raise ReportError(
      f"{named.text} needs {named.devices} devices, this process has {len(devices)}.",
      fix=f"start it with JAX_NUM_CPU_DEVICES={named.devices} JAX_PLATFORMS=cpu.",
    )
  return devices[: named.devices]


@contextlib.contextmanager
def _variables(defaults: Mapping[str, str]) -> Generator[None]:
  """Sets environment variables that have no value while a compiler's library is loaded."""
  added = {name: value for name, value in defaults.items() if name not in os.environ}
  os.environ.update(added)
  try:
    yield
  finally:
    for name in added:
      os.environ.pop(name, None)


def _tpu(named: Machine) -> list[Any]:
  options: dict[str, Any] = {"num_slices": named.slices} if named.slices > 1 else {}
  if named.chip.name in _HOST_BOUNDS:
    # A real v4 or v5p slice is a torus: without the wrap links the compiler picks other collectives.
    options |= {"chip_config_name": "megacore", "chips_per_host_bounds": _HOST_BOUNDS[named.chip.name]}
    if all(n % 4 == 0 for n in named.size):
      options["wrap"] = (True,) * len(named.size)
  name = f"{named.chip.name}:{'x'.join(map(str, named.size))}"
  no_tpu = not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/*")
  try:
    with _variables(_NO_TPU_HERE if no_tpu else {}):
      found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
  except RuntimeError as error:
    raise ReportError(
      f"the TPU compiler does not know the topology {named.text!r}.",
      details=str(error)[:300],
      fix="v5e and v6e take two numbers (tpu:v5e:4x4), v4, v5p and tpu7x three (tpu:v5p:4x4x4).",
    ) from error
  return list(found.devices)


def _gpu(named: Machine) -> list[Any]:
  with _variables({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):  # the plugin loads on a machine without a driver
    found = topologies.get_topology_desc(
      platform="cuda", target_config=target_text(named.chip), topology=f"{named.size[0]}x1x{named.size[1]}"
    )
  return list(found.devices)


class _Target(NamedTuple):
  """Facts about a GPU that the NVIDIA compiler needs beside `Chip`: CUDA programming guide, white papers."""

  label: str
  major: int
  multiprocessors: int
  l2_mib: int
  clock_ghz: float
  shared_kib: int
  fpus: int


_TARGETS: Mapping[str, _Target] = {
  "a100": _Target("NVIDIA A100-SXM4-80GB", 8, 108, 40, 1.41, 164, 64),
  "a100_40gb": _Target("NVIDIA A100-SXM4-40GB", 8, 108, 40, 1.41, 164, 64),
  "h100": _Target("NVIDIA H100 80GB HBM3", 9, 132, 50, 1.98, 228, 128),
  "h200": _Target("NVIDIA H200", 9, 132, 50, 1.98, 228, 128),
  "b200": _Target("NVIDIA B200", 10, 148, 126, 1.965, 228, 128),
}


def target_text(chip: Chip) -> str:
  """The `GpuTargetConfigProto` of an NVIDIA chip, as text; a `ReportError` without a description of it."""
  if chip.name not in _TARGETS:
    raise ReportError(
      f"no compiler target for the GPU {chip.name!r}.", fix=f"use one of {', '.join(_TARGETS)}."
    )
  target = _TARGETS[chip.name]
  shared = target.shared_kib * 1024
  return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared - 1024}
  core_count: {target.multiprocessors} fpus_per_core: {target.fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.hbm_bandwidth)} l2_cache_size: {target.l2_mib << 20}
  clock_rate_ghz: {target.clock_ghz} device_memory_size: {chip.hbm_bytes}
  cuda_compute_capability {{ major: {target.major} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{target.label}"
"""
