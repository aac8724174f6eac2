import importlib.util
import subprocess
import sys
import textwrap

import pytest

from nnx_parallel.errors import ReportError
from nnx_parallel.report.chips import CHIPS, chip, chip_of
from nnx_parallel.report.topology import read_machine, topology_mesh

HAS_TPU = importlib.util.find_spec("libtpu") is not None
HAS_GPU = importlib.util.find_spec("jax_plugins") is not None and any(
  importlib.util.find_spec(f"jax_plugins.xla_cuda{v}") for v in (12, 13)
)


@pytest.mark.parametrize(("text", "devices", "slices"), [
  ("tpu:v5e:4x4", 16, 1), ("tpu:v5p:8x8x16", 1024, 1), ("tpu:v5p:4x4x4*2", 128, 2),
  ("tpu:tpu7x:2x2x2", 16, 1), ("gpu:h100:2x8", 16, 2), ("gpu:b200:8", 8, 1), ("cpu:8", 8, 1),
])  # fmt: skip
def test_names_are_read_without_a_compiler(text, devices, slices):
  found = read_machine(text)
  assert (found.devices, found.slices, found.slice_size) == (devices, slices, devices // slices)


@pytest.mark.parametrize(("text", "message"), [
  ("v5e-16", "cannot read the topology 'v5e-16'"), ("tpu:v5:4x4", "no figures for the chip 'v5'"),
  ("tpu:h100:4x4", "h100 is a GPU, not a TPU"), ("gpu:h100:2x8*2", "cannot read the GPU topology"),
])  # fmt: skip
def test_names_that_cannot_be_read(text, message):
  with pytest.raises(ReportError, match=message):
    read_machine(text)


def test_axes_must_fill_the_machine():
  assert dict(topology_mesh("cpu:8", data=2, fsdp=-1).shape) == {"data": 2, "fsdp": 4}
  with pytest.raises(ReportError, match="do not make the 8 devices of cpu:8"):
    topology_mesh("cpu:8", data=3)
  with pytest.raises(ReportError, match="do not make the 8 devices of cpu:8"):
    topology_mesh("cpu:8", data=0, fsdp=-1)


MISSING = [("tpu:v5e:4x4", r"jax\[tpu\]"), ("gpu:h100:2x8", r"jax\[cuda12-local\]")]


@pytest.mark.parametrize(("machine", "package"), MISSING)
def test_a_missing_compiler_says_what_to_install(machine, package):
  if HAS_TPU if machine.startswith("tpu") else HAS_GPU:
    pytest.skip("it is installed")
  with pytest.raises(ReportError, match=f"pip install '{package}'"):
    topology_mesh(machine, data=-1)


@pytest.mark.parametrize("name", CHIPS)
def test_the_table_is_consistent(name):
  found = CHIPS[name]
  share = 0.75 if found.platform == "gpu" else 1.0
  assert 0.95 * share * found.hbm_bytes <= found.usable_bytes <= share * found.hbm_bytes
  assert found.peak("bfloat16") > found.hbm_bandwidth / 100
  assert found.peak("complex128") == found.peak("float32 highest")
  assert found.peak("float4_e2m1fn") == found.peak("bfloat16")


def test_kinds_are_recognised_by_their_whole_name():
  assert chip_of("NVIDIA H100 80GB HBM3") is chip("h100")
  assert chip_of("TPU v5 lite") is chip("v5e")
  assert chip_of("TPU v5") is chip("v5p")
  small = chip_of("NVIDIA A100-SXM4-40GB")
  assert small.usable_bytes <= 30 * 2**30 < chip_of("NVIDIA A100-SXM4-80GB").usable_bytes
  for other in ("Quantum 9", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-PCIE-40GB", "TPU v4 lite"):
    assert chip_of(other) is None, other


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_gpu_has_the_memory_that_jax_may_take(monkeypatch, name):
  assert chip("h100").usable_bytes == int(0.75 * chip("h100").hbm_bytes)
  monkeypatch.setenv(name, "0.92")
  for found in (chip("h100"), chip_of("NVIDIA H100 80GB HBM3"), read_machine("gpu:h100:1x8").chip):
    assert found.usable_bytes == int(0.92 * found.hbm_bytes)
  assert chip("v5e").usable_bytes == CHIPS["v5e"].usable_bytes


# The compilers themselves run in a process of their own: this one's jax has only CPU devices.
SCRIPT = """
import jax, nnx_parallel as nxp
from nnx_parallel.report.compile_report import compile_report
from report import layouts
batch = jax.ShapeDtypeStruct(({rows}, layouts.WIDTH), "float32")
report = compile_report(
  nxp.train_step(layouts.loss), layouts.plan(**{axes}), batch=batch, topology="{topology}"
)
alive = sum(t.bytes for t in report.peak) + report.memory.arguments
kinds = sorted({{(c.kind, "+".join(c.axes)) for c in report.collectives}})
print("RESULT", report.target, report.fits, report.cost.flops, report.need_bytes, kinds,
      "BETWEEN", sorted({{"+".join(c.axes) for c in report.collectives if c.slices == report.slices > 1}}),
      "ALIVE", alive, report.need_bytes)
"""


def compile_for(topology, rows=1024, **axes):
  script = textwrap.dedent(SCRIPT).format(axes=axes, topology=topology, rows=rows)
  done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
  lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
  assert lines, done.stderr[-2000:]
  return lines[0]


FLOPS = 5 * 2 * 1024 * 64 * 128 // 8


@pytest.mark.skipif(not HAS_TPU, reason="needs the TPU compiler: pip install jax[tpu]")
def test_the_tpu_compiler_reports_on_a_slice_that_is_not_here(monkeypatch):
  monkeypatch.setenv("PYTHONPATH", ".:tests")
  line = compile_for("tpu:v5e:2x4", fsdp=8)
  assert f"8 x TPU v5 lite True {FLOPS}" in line


@pytest.mark.skipif(not HAS_TPU, reason="needs the TPU compiler: pip install jax[tpu]")
def test_a_step_that_does_not_fit_says_what_is_alive(monkeypatch):
  monkeypatch.setenv("PYTHONPATH", ".:tests")
  rows = 1 << 29
  line = compile_for("tpu:v5e:2x4", rows=rows, fsdp=8)
  # The batch, 16 GiB on each device, and what is computed from it: the sum of what is alive at the peak.
  alive, need = (int(word) for word in line.rpartition("ALIVE ")[2].split()[:2])
  assert "8 x TPU v5 lite False" in line
  assert alive == pytest.approx(need, rel=0.01)
  assert need > 2 * rows // 8 * 64 * 4


@pytest.mark.skipif(not HAS_GPU, reason="needs the NVIDIA compiler: pip install jax[cuda12-local]")
def test_the_gpu_compiler_reports_on_hosts_that_are_not_here(monkeypatch):
  monkeypatch.setenv("PYTHONPATH", ".:tests")
  line = compile_for("gpu:h100:1x8", fsdp=8)
  assert f"8 x NVIDIA H100 80GB HBM3 True {FLOPS}" in line
  assert "('all-gather', 'fsdp')" in line
