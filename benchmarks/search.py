"""The search: how fast it is, and its pick against every candidate of a small grid, compiled.

A compiled program is timed by `program_time`: its own FLOPs and collective bytes in the roofline of the named
chip. Nothing is run on devices. Programs come from the compiler for simulated CPU devices, and from the
TPU compiler where it is installed (`tpu-aot`).
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from benchmarks import llama
from benchmarks.harness import Record
from benchmarks.step_time import correlation
from nnx_parallel.report.search import Candidate, SearchResult, search
from nnx_parallel.report.search_compile import Task, compile_candidate
from nnx_parallel.report.topology import machine, missing_compiler

SMALL = llama.Config(vocab=2048, width=512, depth=4, heads=8, kv_heads=8, mlp=1536, sequence=256, batch=64)


def small() -> llama.Llama:
  return llama.Llama(SMALL, llama.nnx.Rngs(0))


def find(text: str, **options: Any) -> SearchResult:
  return search(
    small, llama.loss, text, batch=llama.batch_of(SMALL), rules=llama.RULES, optimizer=llama.optimizer(),
    offload=[False], **options,
  )  # fmt: skip


def pick(record: Record, text: str, compiler: str, **options: Any) -> None:
  """Every candidate of a grid compiled by `compiler`; the time of the search's pick over the best time."""
  result = find(text, **options)
  task = Task(small, llama.loss, llama.RULES, llama.optimizer(), llama.batch_of(SMALL), machine(text))
  began = time.process_time()
  done: list[Candidate] = []
  for candidate in result.fitting:
    done.append(compile_candidate(task, candidate, compiler))
    print(f"{len(done)} of {len(result.fitting)}: {done[-1].mesh_text}", flush=True)
  predicted = [c.time.seconds for c in done]
  compiled = [c.compiled.seconds for c in done if c.compiled is not None]
  group = f"{len(done)} candidates for {text}, compiled for {compiler}"
  record.value("the pick over the best", compiled[0] / min(compiled), "ratio", group=group)
  record.value("the worst over the best", max(compiled) / min(compiled), "ratio", group=group)
  record.value(
    "rank correlation of predicted and compiled time", correlation(predicted, compiled), "", group=group
  )
  memory = correlation([c.memory_bytes for c in done], [c.report.need_bytes for c in done if c.report])
  record.value("rank correlation of planned and compiled memory", memory, "", group=group)
  record.value("processor time of the compilations", time.process_time() - began, "s", group=group)
  for c in sorted(done, key=lambda c: c.compiled.seconds if c.compiled else 0.0)[:5]:
    if c.compiled is not None and c.report is not None:
      place = f"{c.mesh_text}, {c.microbatches} parts, remat {c.remat}"
      record.value(
        f"{place}: predicted {1e3 * c.time.seconds:.3f} ms", 1e3 * c.compiled.seconds, "ms", group=group
      )


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
    record.value(f"70B on {topology}, {tried} candidates", seconds, "s", group="processor time")


def main() -> None:
  """Runs everything and writes the record."""
  record = Record(
    "search",
    "The search: its speed, and its pick against every candidate compiled",
    "python -m benchmarks search",
    notes=[
      "The model is Llama-shaped, 4 layers of width 512, 64 sequences of 256 tokens.",
      "Compiled time: the program's FLOPs and sent bytes in v5e's roofline; HBM traffic is the model's.",
    ],
  )
  speed(record)
  pick(record, "tpu:v5e:2x4", "cpu:8", remat=["none", "full"], zero=[0], max_microbatches=1)
  record.write()
  text = "tpu:v5e:2x2"
  if missing_compiler(machine(text)) is None:
    pick(record, text, text, remat=["full"], zero=[0], max_microbatches=1)
  record.write()


if __name__ == "__main__":
  main()
