"""How far the memory plan, a lower bound, is from the compilers: what they needed over what was planned.

TPU and NVIDIA programs are added where their compilers are installed (`tpu-aot`, `gpu-aot`).
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Iterator, Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=16")

import jax.numpy as jnp
from flax import nnx

import nnx_parallel as nxp
from benchmarks import llama
from benchmarks.harness import Record
from nnx_parallel.layers.layers import with_layers
from nnx_parallel.layers.remat import Remat
from nnx_parallel.report.compile_report import CompileReport, compile_report
from nnx_parallel.report.memory import MemoryPlan, memory_plan
from nnx_parallel.report.topology import missing_compiler, read_machine

# So large that a TPU's 128 MiB of vector memory, where its compiler puts what fits, matters little.
MODEL = llama.Config(
  vocab=32_768, width=1024, depth=4, heads=8, kv_heads=4, mlp=3072, sequence=4096, batch=32
)
MESHES = ((16, 1, 1), (1, 16, 1), (2, 4, 2), (1, 4, 4))
STEPS: tuple[tuple[Remat, int], ...] = (("none", 1), ("dots", 1), ("full", 1), ("full", 2))


NOTES = [
  "The model is Llama-shaped with scanned layers: 4 of width 1024, 32 768 words, 32 sequences of 4096"
  " tokens, in bfloat16, and for CPUs, which have no products in it, in float32.",
  "A ratio over 1 means that the compiler needed more, as it should: the plan counts the least. One model"
  " shape says little about others; `report_8b.json` has cases of another size.",
]


def machines() -> Iterator[tuple[str, int]]:
  """Topologies whose compiler is here, and the stride through the cases on each.

  A stride of 5 takes four, with each mesh once and each way to run the step once.
  """
  yield "cpu:16", 1
  for text in ("tpu:v5e:4x4", "gpu:h100:2x8"):
    if missing_compiler(read_machine(text)) is None:
      yield text, 5


def config_for(topology: str) -> llama.Config:
  """CPUs have no products in bfloat16: their programs hold float32 instead, so there the model is float32."""
  return dataclasses.replace(MODEL, compute=jnp.float32) if topology.startswith("cpu") else MODEL


def layout(topology: str, sizes: tuple[int, int, int]) -> nxp.Plan:
  mesh = nxp.abstract_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
  config = config_for(topology)

  def init() -> llama.Llama:
    return llama.Llama(config, nnx.Rngs(0), remat=False)  # the policy is the step's

  return nxp.plan(init, mesh, llama.RULES, optimizer=llama.optimizer())


def compiled(topology: str, sizes: tuple[int, int, int], remat: Remat, parts: int) -> CompileReport:
  step = nxp.train_step(with_layers(llama.loss, remat=remat), microbatches=parts)
  return compile_report(step, layout(topology, sizes), batch=llama.batch_of(MODEL), topology=topology)


def planned(topology: str, sizes: tuple[int, int, int], remat: Remat, parts: int) -> MemoryPlan:
  batch = llama.batch_of(MODEL)
  return memory_plan(layout(topology, sizes), llama.loss, batch, microbatches=parts, remat=remat)


def memory_cases(record: Record) -> None:
  """Compiled need over planned need."""
  ratios: list[tuple[str, str, float]] = []
  for topology, stride in machines():
    cases = [(sizes, *step) for sizes in MESHES for step in STEPS]
    for sizes, remat, parts in cases[::stride]:
      need = compiled(topology, sizes, remat, parts).need_bytes
      ratio = need / planned(topology, sizes, remat, parts).need_bytes
      ratios.append((topology, remat, ratio))
      case = f"{topology} data,fsdp,tensor={sizes} remat={remat} microbatches={parts}"
      record.value(case, round(ratio, 2), "compiled/planned", group="memory plan")
      print(f"{case}: {ratio:.2f}", flush=True)
  add_summary(record, ratios)


def add_summary(record: Record, ratios: Sequence[tuple[str, str, float]]) -> None:
  """Smallest, median and largest, for CPUs and for the others with full remat and without.

  Args:
    record: gets the rows.
    ratios: (topology, remat, compiled over planned).
  """

  def kind(topology: str, remat: str) -> str:
    if topology.startswith("cpu"):
      return "CPU"
    return "TPU and GPU, full remat" if remat == "full" else "TPU and GPU, other remat"

  for group in ("CPU", "TPU and GPU, full remat", "TPU and GPU, other remat", "all"):
    found = [ratio for topology, remat, ratio in ratios if group in (kind(topology, remat), "all")]
    if found:
      text = f"{len(found)} cases, {min(found):.2f} to {max(found):.2f}, median"
      record.value(text, round(statistics.median(found), 2), "compiled/planned", group=group)


def main() -> None:
  """Runs everything and writes the record."""
  record = Record(
    "report_figures",
    "How far the memory plan is from the compilers",
    "python -m benchmarks report_figures",
    notes=NOTES,
  )
  memory_cases(record)
  record.write()


if __name__ == "__main__":
  main()
