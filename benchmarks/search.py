"""The search: how fast it is, and its counts against those of every candidate of a small grid, compiled.

Nothing is timed. `program_time` puts the FLOPs and collective bytes of a compiled program into the model that
made the prediction, so only the counting of FLOPs and bytes is tested. Programs come from the compiler for
simulated CPU devices, and from the TPU compiler where it is installed (`tpu-aot`).
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from benchmarks import llama
from benchmarks.harness import Record
from nnx_parallel.report.search.search import Candidate, SearchInputs, SearchResult, compile_candidate, search
from nnx_parallel.report.topology import missing_compiler, read_machine

ON_COUNTS = "the model on compiled counts"
TITLE = "The search: its speed, and its counts against those of compiled programs"
NOTES = [
  "The small model is Llama-shaped, 4 layers of width 512, 64 sequences of 256 tokens.",
  "The model on compiled counts: FLOPs and sent bytes of the compiled program in the same roofline of v5e;"
  " HBM traffic, and which links overlap, are the model's own. Nothing was timed: that the pick is the best"
  " says that the search counts FLOPs and bytes as compilers do, and nothing about seconds on a device.",
]
SMALL = llama.Config(vocab=2048, width=512, depth=4, heads=8, kv_heads=8, mlp=1536, sequence=256, batch=64)


def small() -> llama.Llama:
  return llama.Llama(SMALL, llama.nnx.Rngs(0))


def find(text: str, **options: Any) -> SearchResult:
  return search(
    small, llama.loss, text, batch=llama.batch_of(SMALL), rules=llama.RULES, optimizer=llama.optimizer(),
    offload=[False], **options,
  )  # fmt: skip


def pick(record: Record, text: str, compiler: str, **options: Any) -> None:
  """Every candidate of a grid compiled by `compiler`: the model on its counts and on compiled counts."""
  result = find(text, **options)
  task = SearchInputs(
    small, llama.loss, llama.RULES, llama.optimizer(), llama.batch_of(SMALL), read_machine(text)
  )
  began = time.process_time()
  done: list[Candidate] = []
  for candidate in result.fitting:
    done.append(compile_candidate(task, candidate, compiler))
    print(f"{len(done)} of {len(result.fitting)}: {done[-1].mesh_text}", flush=True)
  compiled = [c.compiled.seconds for c in done if c.compiled is not None]
  group = f"{len(done)} candidates for {text}, compiled for {compiler}"
  record.value(f"{ON_COUNTS}: the pick over the best", round(compiled[0] / min(compiled), 3), "", group=group)
  record.value(
    f"{ON_COUNTS}: the worst over the best", round(max(compiled) / min(compiled), 1), "", group=group
  )
  memory = [c.report.need_bytes / c.memory_bytes for c in done if c.report]
  text = f"compiled need over planned memory, {min(memory):.2f} to {max(memory):.2f}, median"
  record.value(text, round(statistics.median(memory), 2), "", group=group)
  record.value("processor time of the compilations", round(time.process_time() - began), "s", group=group)
  for c in sorted(done, key=lambda c: c.compiled.seconds if c.compiled else 0.0)[:5]:
    if c.compiled is not None and c.report is not None:
      place = f"{c.mesh_text}, {c.microbatches} parts, remat {c.remat}"
      text = f"{place}: the model {1e3 * c.time.seconds:.3f} ms, {ON_COUNTS}"
      record.value(text, round(1e3 * c.compiled.seconds, 3), "ms", group=group)


def speed(record: Record) -> None:
  """70B on 256 and on 8192 devices, every dimension of the search."""
  for topology, batch in (("tpu:v5p:4x8x8", 256), ("gpu:h100:1024x8", 8192)):
    began = time.process_time()
    result = search(
      llama.init_70b,
      llama.loss,
      topology,
      batch=llama.batch_of(llama.SIZES["70b"], batch=batch),
      rules=llama.RULES,
      optimizer=llama.optimizer(),
    )
    seconds = time.process_time() - began
    tried = len(result.fitting) + len(result.too_large)
    record.value(f"70B on {topology}, {tried} candidates", round(seconds, 1), "s", group="processor time")


def main() -> None:
  """Runs everything and writes the record."""
  record = Record(
    "search",
    TITLE,
    "python -m benchmarks search",
    notes=NOTES,
  )
  speed(record)
  pick(record, "tpu:v5e:2x4", "cpu:8", remat=["none", "full"], zero=[0], max_microbatches=1)
  record.write()
  text = "tpu:v5e:2x2"
  if missing_compiler(read_machine(text)) is None:
    pick(record, text, text, remat=["full"], zero=[0], max_microbatches=1)
  record.write()


if __name__ == "__main__":
  main()
