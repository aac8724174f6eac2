"""Published figures of the chips that people train on, per JAX device.

A TPU7x chip appears as two JAX devices, so its row is half a chip; the other chips are one device.

Sources: NVIDIA data sheets for A100 80GB SXM, H100 SXM, H200 SXM and HGX B200 (dense figures, without
sparsity; NVLink per direction; one 200 or 400 Gb/s network port per GPU) and the memory that `nvidia-smi`
shows; Google Cloud's "TPU system architecture" pages, and for one-way link bandwidth "How to Scale Your
Model" (jax-ml.github.io/scaling-book), chapter 2. The 40 GB A100: NVIDIA A100 data sheet, SXM. `usable_bytes`
of a TPU is the limit that its compiler enforces (libtpu 0.0.42 and 0.0.50); of a GPU, the 75 % that JAX takes
by default, or the value of `XLA_CLIENT_MEM_FRACTION` (formerly `XLA_PYTHON_CLIENT_MEM_FRACTION`) in this
process.

The arithmetic of a matrix product has the same name in compiled programs and `Chip.peak`:
`"bfloat16"`, `"float8"`, `"float32"` (JAX's default precision), `"float32 high"`, `"float32 highest"`, or a
type and its number of passes: `"bfloat16 x3"`. Float32 products follow the text of `jax.lax.Precision`. TPUs
run them as one, three or six bfloat16 passes (`DEFAULT`, `HIGH`, `HIGHEST`), GPUs as TF32, and only at
`HIGHEST` in float32.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping, Sequence

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.errors import ReportError

ENDLESS = "passes of a loop of unknown length, after its first"
"""The part of a loop of unknown length that is not counted."""
_HLO_TYPES: Mapping[str, str] = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
# First word of an algorithm's name, as in `jax.lax.DotAlgorithmPreset` and in HLO.
_ALGORITHMS: Mapping[str, str] = {
  "BF16": "bfloat16", "F16": "float16", "TF32": "tf32", "F32": "float32 highest", "F64": "float64",
  "ANY": "float8",
}  # fmt: skip
_PASSES = re.compile(r"_X(\d+)$")
_GIB, _MIB = 2**30, 2**20
_GPU_SHARE = 0.75
# Types that a chip without units for them multiplies as bfloat16.
_NARROW = ("float4", "float8", "int8", "float16")
_TPU_PASSES: Mapping[str, int] = {"float32": 1, "float32 high": 3, "float32 highest": 6}


@check_arguments(ReportError)
@dataclasses.dataclass(frozen=True)
class Chip:
  """The figures of one JAX device of a certain kind.

  Attributes:
    name: short name, e.g. `"h100"`, `"v5e"`.
    platform: `"gpu"`, `"tpu"` or `"cpu"`.
    hbm_bytes: memory in bytes.
    usable_bytes: the part of the memory that a program may use, in bytes.
    hbm_bandwidth: bytes per second.
    flops: peak matrix FLOP per second by dtype of the operands; `"tf32"` is the GPU arithmetic for float32.
    link_bandwidth: bytes per second in one direction, over NVLink to the switch or over one ICI link.
    links: the number of ICI links that one mesh axis can use at a time (2 on a ring, one in each direction);
      1 for NVLink.
    network_bandwidth: bytes per second in one direction between hosts (GPU) or slices (TPU).
    devices_per_chip: the number of JAX devices for each chip that the name of a topology counts.
  """

  name: str
  platform: str
  hbm_bytes: int
  usable_bytes: int
  hbm_bandwidth: float
  flops: Mapping[str, float]
  link_bandwidth: float
  links: int
  network_bandwidth: float
  devices_per_chip: int = 1

  @property
  def usable_note(self) -> str:
    """The setting that decides how much of a GPU's memory is usable, as text; empty for other devices."""
    if self.platform != "gpu":
      return ""
    share = 100 * self.usable_bytes / self.hbm_bytes
    return f", the {share:.0f} % that JAX takes (XLA_CLIENT_MEM_FRACTION)"

  @check_arguments(ReportError)
  def peak(self, arithmetic: str) -> float:
    """Peak FLOP per second for matrix products.

    Args:
      arithmetic: the dtype of the operands, such as `"bfloat16"`. For float32, also the precision:
        `"float32"`, `"float32 high"` or `"float32 highest"`. `"bfloat16 x3"` means three passes in bfloat16.
        A dtype that `flops` does not list counts as bfloat16 if it is narrow, and as float32 at the highest
        precision otherwise.

    Returns:
      FLOP per second.

    Example:
      >>> [round(chip("v5e").peak(f"float32{how}") / 1e12) for how in ("", " high", " highest")]
      [197, 66, 33]
    """
    name, _, passes = arithmetic.partition(" x")
    if passes:
      return self.peak(name) / int(passes)
    if name in _TPU_PASSES:
      if self.platform == "tpu":
        return self.flops["bfloat16"] / _TPU_PASSES[name]
      row = "tf32" if name != "float32 highest" and "tf32" in self.flops else "float32"
      return self.flops.get(row, self.flops["bfloat16"])
    if name in self.flops:
      return self.flops[name]
    return self.flops["bfloat16"] if name.startswith(_NARROW) else self.peak("float32 highest")


def _gpu(
  name: str, memory_mib: int, bandwidth: float, flops: Mapping[str, float], nvlink: float, net: float
) -> Chip:
  memory = memory_mib * _MIB
  usable = int(memory * _GPU_SHARE)
  return Chip(name, "gpu", memory, usable, bandwidth, flops, nvlink, 1, net)


def _tpu(
  name: str, gib: float, usable_gib: float, bandwidth: float, flops: Mapping[str, float], link: float
) -> Chip:
  # Between slices: 6.25 GB/s of data-centre network per chip, the scaling book's planning figure.
  halves = 2 if name == "tpu7x" else 1
  memory, usable = int(gib * _GIB), int(usable_gib * _GIB)
  return Chip(name, "tpu", memory, usable, bandwidth, flops, link, 2, 6.25e9, halves)


_HOPPER = {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "int8": 1979e12,
           "tf32": 494e12, "float32": 67e12}  # fmt: skip
_AMPERE = {"bfloat16": 312e12, "float16": 312e12, "int8": 624e12, "tf32": 156e12, "float32": 19.5e12}
_BLACKWELL = {"bfloat16": 2250e12, "float16": 2250e12, "float8": 4500e12, "int8": 4500e12,
              "tf32": 1125e12, "float32": 75e12}  # fmt: skip

CHIPS: Mapping[str, Chip] = {
  chip.name: chip
  for chip in (
    _gpu("a100", 81920, 2.039e12, _AMPERE, 300e9, 25e9),
    _gpu("a100_40gb", 40960, 1.555e12, _AMPERE, 300e9, 25e9),
    _gpu("h100", 81559, 3.35e12, _HOPPER, 450e9, 50e9),
    _gpu("h200", 143771, 4.8e12, _HOPPER, 450e9, 50e9),
    _gpu("b200", 183359, 8.0e12, _BLACKWELL, 900e9, 50e9),
    _tpu("v4", 32, 30.75, 1.228e12, {"bfloat16": 275e12, "int8": 275e12}, 45e9),
    _tpu("v5e", 16, 15.75, 0.819e12, {"bfloat16": 197e12, "int8": 394e12}, 45e9),
    _tpu("v5p", 95.74, 95.73, 2.765e12, {"bfloat16": 459e12, "int8": 918e12}, 90e9),
    _tpu("v6e", 32, 31.24, 1.64e12, {"bfloat16": 918e12, "int8": 1836e12}, 90e9),
    _tpu("tpu7x", 96, 94.74, 3.69e12, {"bfloat16": 1153.5e12, "float8": 2307e12}, 100e9),
    # Round figures for simulated devices, not measured on any machine.
    Chip("cpu", "cpu", 16 * _GIB, 16 * _GIB, 20e9, {"bfloat16": 50e9, "float32": 100e9}, 5e9, 1, 1e9),
  )
}  # fmt: skip


@check_arguments(ReportError)
def chip(name: str | Chip) -> Chip:
  """Returns the figures of a chip by its short name.

  Args:
    name: a short name, such as `"h100"` or `"v5e"`. A `Chip` is returned unchanged.

  Returns:
    The `Chip` with its figures.

  Raises:
    ReportError: the table does not have this chip.

  Example:
    >>> chip("v5e").usable_bytes / 2**30
    15.75
  """
  if isinstance(name, Chip):
    return name
  if name.lower() not in CHIPS:
    close = difflib.get_close_matches(name.lower(), CHIPS, n=1)
    raise ReportError(
      f"no figures for the chip {name!r}.",
      details=f"known chips: {', '.join(CHIPS)}",
      fix=f"{(close or ['h100'])[0]!r}, or pass your own nxp.report.Chip(...).",
    )
  return _as_set(CHIPS[name.lower()])


# `jax.Device.device_kind` -> row. Full names: other cards of a family differ in memory, links or clock.
_KINDS: Mapping[str, str] = {
  "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA A100-SXM4-40GB": "a100_40gb", "NVIDIA H100 80GB HBM3": "h100",
  "NVIDIA H200": "h200", "NVIDIA B200": "b200", "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e",
  "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "tpu7x", "cpu": "cpu",
}  # fmt: skip


def chip_of(device_kind: str) -> Chip | None:
  """The row for a `jax.Device.device_kind`, or None if the table does not have it."""
  name = _KINDS.get(device_kind)
  return None if name is None else _as_set(CHIPS[name])


def _as_set(row: Chip) -> Chip:
  """The row with the share of a GPU's memory that the environment lets JAX take."""
  share = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
  if row.platform != "gpu" or not share:
    return row
  try:
    usable = int(row.hbm_bytes * min(1.0, float(share)))
  except ValueError as error:
    raise ReportError(
      f"XLA_CLIENT_MEM_FRACTION={share} in the environment is not a number.",
      details="JAX reads it as the share of a GPU's memory",
      fix="XLA_CLIENT_MEM_FRACTION=0.75.",
    ) from error
  return dataclasses.replace(row, usable_bytes=usable)


def compiled_arithmetic(types: Sequence[str], attributes: str) -> str:
  """The arithmetic of an instruction, such as "float32 high", from its operands' types and its attributes."""
  found = re.search(r"\balgorithm=dot_(\w+)", attributes)
  name = found[1].upper() if found else ""
  if algorithm := _ALGORITHMS.get(name.split("_")[0]):
    passes = _PASSES.search(name)
    return f"{algorithm} x{passes[1]}" if passes else algorithm
  widest = max(types, key=lambda name: int((re.search(r"\d+", name) or ["8"])[0]))
  levels = re.search(r'operand_precision(?:=\{|":\[)([^}\]]*)', attributes)
  words = levels[1].lower() if levels else ""
  level = next((name for name in ("highest", "high") if name in words), "default")
  dtype = _HLO_TYPES.get(widest, widest)
  if dtype.startswith(("float8", "f8")):
    return "float8"
  if dtype in ("int8", "uint8", "int4", "uint4", "s8", "u8", "s4", "u4"):
    return "int8"
  return f"float32 {level}" if dtype == "float32" and level != "default" else dtype
