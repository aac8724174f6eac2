"""An ordinary 8B decoder, unedited, compiled for machines that are not here, beside one written for them.

The ordinary one is `benchmarks/plain/decoders.py`: a Python loop over an `nnx.List`, plain attention, no
annotation. The other is `benchmarks/llama.py`. Both have the sizes of Llama 3 8B. Needs the TPU and NVIDIA
compilers, as `report_8b.py` does. Some cases again, by a part of their names:

    python -m benchmarks.plain_8b "depth 4"
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_parallel as nxp
from benchmarks import llama
from benchmarks.harness import Record
from benchmarks.plain import decoders
from nnx_parallel.report.compile_report import CompileReport
from nnx_parallel.report.program.collectives import Collective
from nnx_parallel.report.topology import missing_compiler, read_machine

GIB = 2**30
SIZES = decoders.Config(
  vocab=128_256, width=4096, heads=32, kv_heads=8, head_dim=128, hidden=14_336, depth=32, dtype="bfloat16"
)
# What a user writes for somebody else's decoder, from the paths that `print(plan)` shows.
RULES = [
  nxp.LogicalRules(batch=("data", "fsdp"), seq="tensor"),
  nxp.PathRules(
    {
      r"embed\.embedding": ("tensor", "fsdp"),
      r"(.*\.)?(q|k|v|gate|up|head)\.kernel": ("fsdp", "tensor"),
      r".*\.(o|down)\.kernel": ("tensor", "fsdp"),
      r"(.*\.)?norm\d?\.scale": (None,),
    },
    optional=True,
  ),
]


@dataclasses.dataclass(frozen=True)
class Case:
  """One model on one machine.

  Attributes:
    model: one of `MODELS`.
    depth: layers.
    sizes: of the mesh axes `fsdp` and `tensor`.
    topology: the machine.
    batch: sequences of 4096 tokens in the global batch.
  """

  model: str
  depth: int
  sizes: tuple[int, int] = (16, 1)
  topology: str = "tpu:v5e:4x4"
  batch: int = 16

  @property
  def name(self) -> str:
    axes = zip(("fsdp", "tensor"), self.sizes, strict=True)
    layout = " x ".join(f"{axis} {size}" for axis, size in axes if size > 1)
    return f"{self.topology}, {layout}, depth {self.depth}, {self.model}"

  def compiled(self) -> CompileReport:
    """The report of its train step."""
    mesh = nxp.abstract_mesh(dict(zip(("data", "fsdp", "tensor"), (1, *self.sizes), strict=True)))
    options = MODELS.get(self.model, {})
    if self.model.startswith("by hand"):
      init: Callable[[], Any] = functools.partial(llama.build, "8b", depth=self.depth, **options)
      plan = nxp.plan(init, mesh, llama.RULES, optimizer=llama.optimizer())
      batch: Any = llama.batch_of(llama.SIZES["8b"], batch=self.batch)
      return nxp.compile_report(nxp.train_step(llama.loss), plan, batch=batch, topology=self.topology)
    config = dataclasses.replace(SIZES, depth=self.depth)
    plan = nxp.plan(lambda: decoders.Decoder(config, nnx.Rngs(0)), mesh, RULES, optimizer=llama.optimizer())
    if self.model == UPDATE:
      step = nxp.train_step(stacked_alone)
    else:
      step = nxp.train_step(decoders.loss, remat="full", scan_layers=True, **options)
    batch = jax.ShapeDtypeStruct((self.batch, 4097), jnp.int32)
    return nxp.compile_report(step, plan, batch=batch, topology=self.topology)


def stacked_alone(model: nnx.Module, tokens: jax.Array) -> jax.Array:
  """A loss without layers. What is left of the step: to cast, stack, unstack and update each Variable."""
  groups = collections.defaultdict[tuple[int, ...], list[jax.Array]](list)
  for weight in jax.tree.leaves(nnx.state(model, nnx.Param)):
    groups[weight.shape].append(weight.astype(jnp.bfloat16))
  scale = tokens.mean().astype(jnp.bfloat16)
  return sum(
    (jnp.sin(scale * jnp.stack(group)).astype(jnp.float32).sum() for group in groups.values()), scale
  )


MODELS: dict[str, dict[str, Any]] = {
  "by hand": {},
  "by hand, whole attention": {"query_block": 4096},
  "plain": {},
  "plain, blocks": {"attention": "blockwise"},
  "plain, blocks and parts": {"attention": "blockwise", "loss_chunks": 8},
}
FUSED = "plain, fused"  # of TPUs
MODELS[FUSED] = {"attention": "fused"}
UPDATE = "no layers, cast and update alone"
TPU, GPU = "tpu:v5e:4x4", "gpu:h100:2x8"
CASES = (
  *(Case(model, depth) for depth in (4, 32) for model in MODELS),
  *(Case(UPDATE, depth) for depth in (4, 32)),
  *(Case(model, 16) for model in ("plain", "plain, blocks")),
  *(Case(model, 32, (8, 2)) for model in MODELS),
  *(Case(model, 32, sizes, GPU) for sizes in ((16, 1), (8, 2)) for model in MODELS if model != FUSED),
)
TITLE = (
  "An ordinary 8B decoder, unedited, compiled for machines that are not here, beside one written for them"
)
NOTES = [
  "Plain: `benchmarks/plain/decoders.py`, a loop over an `nnx.List` with no annotation, laid out by the four"
  " path rules of `benchmarks/plain_8b.py` and trained by"
  ' `nxp.train_step(loss, remat="full", scan_layers=True)`; with blocks also by'
  ' `attention="blockwise"`, with parts'
  ' also by `loss_chunks=8`; fused by `attention="fused"`. By hand:'
  " `benchmarks/llama.py`, whose attention goes by blocks of queries; whole attention is the same model"
  " without blocks.",
  "Batches of 16 sequences of 4096 tokens, AdamW, float32 state, bfloat16 compute."
  " Sent: by each device in one step with ring algorithms (`Collective.sent_bytes`), in which an all-reduce"
  " sends its payload twice.",
  "Processor time: of all threads, to plan, trace, lower, compile and read the program. The case without"
  " layers casts, stacks, unstacks and updates the same separate Variables: its growth with the depth"
  " is that of a step with separate Variables, whatever is rolled.",
]


def add(record: Record, case: Case) -> None:
  """Compiles a case and adds its rows."""
  start = time.process_time()
  report = case.compiled()
  processor_s = time.process_time() - start
  add_bytes(record, case.name, report, lambda found: f"{found.kind} over {' x '.join(found.axes)}")
  record.value("matrix FLOPs per device", round(report.cost.flops / 1e12, 2), "T", group=case.name)
  record.value("compiled in", round(report.seconds), "s", group=case.name)
  record.value("processor time", round(processor_s), "s", group=case.name)


def add_bytes(
  record: Record, group: str, report: CompileReport, kind_of: Callable[[Collective], str]
) -> None:
  """Adds the memory of a compiled step, and what each device sends, in all and by kind."""
  sent = collections.Counter[str]()
  for found in report.collectives:
    sent[kind_of(found)] += found.sent_bytes
  figures = {
    "need per device": report.need_bytes,
    "arguments": report.memory.arguments,
    "temporaries": report.memory.temporaries,
    "sent": report.sent().per_device,
    **{f"sent, {name}": size for name, size in sent.most_common() if size > 0.01 * GIB},
  }
  for name, size in figures.items():
    record.value(name, round(size / GIB, 2), "GiB", group=group)


def main(part: str = "") -> None:
  """Compiles every case whose compiler is here, or those with a part of their name, into the record."""
  here = [case for case in CASES if missing_compiler(read_machine(case.topology)) is None]
  chosen = [case for case in here if part in case.name]
  record = Record("plain_8b", TITLE, "python -m benchmarks plain_8b", notes=NOTES)
  # With a part of the names, the rows of all other cases stay; without, those of the compilers that are here.
  groups = {case.name: functools.partial(add, record, case) for case in (CASES if part else here)}
  record.make(groups, [case.name for case in chosen])


if __name__ == "__main__":
  main(*sys.argv[1:])
