"""What the NVIDIA compiler must know about a GPU that is not here, from public figures.

The text is a `GpuTargetConfigProto`. Sources: the compute-capability tables of the CUDA programming guide
(threads, registers, shared memory) and NVIDIA's architecture white papers (multiprocessors, clock, L2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nnx_parallel.errors import ReportError
from nnx_parallel.report.chips import Chip


@dataclasses.dataclass(frozen=True)
class _Target:
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
  """Text of the target description of an NVIDIA chip.

  Raises:
    ReportError: there is no description of this chip.
  """
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
