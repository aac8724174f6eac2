"""The search: how fast it is, and its counts against those of every candidate of a small grid, compiled.

Nothing is timed. `program_time` puts the FLOPs and collective bytes of a compiled program into the model that
made the prediction, so only the counting of FLOPs and bytes is tested. Programs come from the compiler for
simulated CPU devices, and from the TPU compiler where it is installed (`tpu-aot`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from benchmarks import llama
from benchmarks.harness import Record
from nnx_parallel.core.axes import axes_in
from nnx_parallel.report.compile_report import CompileReport
from nnx_parallel.report.estimate.roofline import Links, StepTime, arithmetic_seconds
from nnx_parallel.report.search.search import Candidate, SearchResult, compile_candidate, search
from nnx_parallel.report.topology import Machine, missing_compiler, read_machine

ON_COUNTS = "the model on compiled counts"
TITLE = "The search: its speed, and its counts against those of compiled programs"
NOTES = [
  "The small model is Llama-shaped, 4 layers of width 512, 64 sequences of 256 tokens.",
  "The model on compiled counts: FLOPs and sent bytes of the compiled program in the same roofline of v5e;"
  " HBM traffic, and which links overlap, are the model's own. Nothing was timed: that the pick is the best"
  " says that the search counts FLOPs and bytes as compilers do, and nothing about seconds on a device.",
]
SMALL = llama.Config(vocab=2048, width=512, depth=4, heads=8, kv_heads=8, mlp=1536, sequence=256, batch=64)


def program_time(
  report: CompileReport, predicted: StepTime, machine: Machine, scattered: frozenset[str]
) -> StepTime:
  """The time of a compiled program on a machine that it may not be compiled for.

  FLOPs and collective bytes are the program's. Memory traffic, and which links overlap, are `predicted`: a
  CPU program is fused and scheduled differently from that of another chip. Two properties of CPU programs are
  corrected: bfloat16 collectives are in float32, and a reduce-scatter (of gradients, over the `scattered`
  axes) is an all-reduce and a slice. Along the axis of a pipeline weights may move beside compute; what the
  stages send, permutes, is waited for.
  """
  on_cpu = report.target.endswith("cpu")
  arithmetic = max(predicted.arithmetic, key=lambda name: predicted.arithmetic[name], default="")
  beside = {axis for name in predicted.overlapped for axis in name.split("+")}
  links = Links(report.axes, machine.chip, machine.slice_size)
  for c in report.collectives:
    widened = on_cpu and arithmetic == "bfloat16" and c.dtype == "f32"
    sliced = on_cpu and c.kind == "all-reduce" and set(c.axes) <= set(scattered)
    sent = c.sent_bytes / ((2 if widened else 1) * (2 if sliced else 1))
    hop = c.kind == "collective-permute" and "+".join(c.axes) in predicted.waiting
    links.add(c.axes, sent, c.times, hidden=beside.issuperset(c.axes) and not hop)
  host = {name: value for name, value in predicted.waiting.items() if name == "host"}
  return dataclasses.replace(
    predicted,
    compute=arithmetic_seconds(report.cost.arithmetic, machine.chip),
    overlapped=links.overlapped,
    waiting=host | links.waiting,
    arithmetic=report.cost.arithmetic,
    uncounted=report.cost.uncounted,
  )


def small() -> llama.Llama:
  return llama.Llama(SMALL, llama.nnx.Rngs(0), remat=False)  # the policies are the step's


def find(text: str, **options: Any) -> SearchResult:
  given = {"batch": llama.batch_of(SMALL), "rules": llama.RULES, "optimizer": llama.optimizer()}
  return search(small, llama.loss, text, **given, compile_best=0, **options)


def pick(record: Record, text: str, compiler: str, **options: Any) -> None:
  """Every candidate of a grid compiled by `compiler`: the model on its counts and on compiled counts."""
  result = find(text, **options)
  machine = read_machine(text)
  began = time.process_time()
  done: list[tuple[Candidate, float]] = []
  for candidate in result.fitting:
    made = compile_candidate(candidate, llama.loss, llama.batch_of(SMALL), compiler, machine)
    parameters = (axes_in(leaf.spec) for leaf in made.plan.leaves if leaf.is_parameter)
    scattered = frozenset(made.plan.batch_axes).intersection(*[frozenset().union(*parameters)])
    assert made.report is not None
    done.append((made, program_time(made.report, made.time, machine, scattered).seconds))
    print(f"{len(done)} of {len(result.fitting)}: {made.mesh_text}", flush=True)
  compiled = [seconds for _, seconds in done]
  group = f"{len(done)} candidates for {text}, compiled for {compiler}"
  record.value(f"{ON_COUNTS}: the pick over the best", round(compiled[0] / min(compiled), 3), "", group=group)
  record.value(
    f"{ON_COUNTS}: the worst over the best", round(max(compiled) / min(compiled), 1), "", group=group
  )
  memory = [c.report.need_bytes / c.memory_bytes for c, _ in done if c.report]
  text = f"compiled need over planned memory, {min(memory):.2f} to {max(memory):.2f}, median"
  record.value(text, round(statistics.median(memory), 2), "", group=group)
  record.value("processor time of the compilations", round(time.process_time() - began), "s", group=group)
  for c, seconds in sorted(done, key=lambda pair: pair[1])[:5]:
    place = f"{c.mesh_text}, {c.microbatches} parts, remat {c.remat}"
    text = f"{place}: the model {1e3 * c.time.seconds:.3f} ms, {ON_COUNTS}"
    record.value(text, round(1e3 * seconds, 3), "ms", group=group)


def speed(record: Record) -> None:
  """70B on 256 and on 8192 devices."""
  for topology, batch in (("tpu:v5p:4x8x8", 256), ("gpu:h100:1024x8", 8192)):
    began = time.process_time()
    result = search(
      functools.partial(llama.build, "70b", remat=False),
      llama.loss,
      topology,
      batch=llama.batch_of(llama.SIZES["70b"], batch=batch),
      rules=llama.RULES,
      optimizer=llama.optimizer(),
      compile_best=0,
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
  pick(record, "tpu:v5e:2x4", "cpu:8", remat=["none", "full"], max_microbatches=1)
  record.write()
  text = "tpu:v5e:2x2"
  if missing_compiler(read_machine(text)) is None:
    pick(record, text, text, remat=["full"], max_microbatches=1)
  record.write()


if __name__ == "__main__":
  main()
