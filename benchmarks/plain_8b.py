"""An ordinary 8B decoder, unedited, compiled for machines that are not here, beside one written for them.

The ordinary one is `benchmarks/plain/decoders.py`: a Python loop over an `nnx.List`, plain attention, no
annotation. The other is `benchmarks/llama.py`. Both have the sizes of Llama 3 8B. Needs the TPU and NVIDIA
compilers, as `report_8b.py` does. Some cases again, by a part of their names:

    python benchmarks/plain_8b.py "depth 4"
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_parallel as nxp
from benchmarks import llama
from benchmarks.harness import RESULTS, Record
from benchmarks.plain import decoders
from nnx_parallel.report.compile_report import CompileReport
from nnx_parallel.report.topology import missing_compiler, read_machine

GIB = 2**30
SIZES = decoders.Config(
  vocab=128_256, width=4096, heads=32, kv_heads=8, head_dim=128, hidden=14_336, depth=32, dtype="bfloat16"
)
# What a user writes for somebody else's decoder, from the paths that `print(plan)` shows.
RULES = [
  nxp.LogicalRules(batch=("data", "fsdp")),
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
    model: `"plain"`, or `"by hand"`.
    depth: layers.
    sizes: of the mesh axes `fsdp` and `tensor`.
    topology: the machine.
    remat: the policy for a plain model's layers.
    parts: whether attention is computed by blocks and the loss by parts of the columns.
    batch: sequences of 4096 tokens in the global batch.
  """

  model: str
  depth: int
  sizes: tuple[int, int] = (16, 1)
  topology: str = "tpu:v5e:4x4"
  remat: str = "full"
  parts: bool = False
  batch: int = 16

  @property
  def name(self) -> str:
    axes = zip(("fsdp", "tensor"), self.sizes, strict=True)
    layout = " x ".join(f"{axis} {size}" for axis, size in axes if size > 1)
    remat = "" if self.remat == "full" else f", remat {self.remat}"
    parts = ", blocks" if self.parts else ""
    return f"{self.topology}, {layout}, depth {self.depth}, {self.model}{remat}{parts}"

  def compiled(self) -> CompileReport:
    """The report of its train step."""
    mesh = nxp.abstract_mesh(dict(zip(("data", "fsdp", "tensor"), (1, *self.sizes), strict=True)))
    if self.model == "by hand":
      init: Callable[[], Any] = functools.partial(llama.build, "8b", depth=self.depth)
      plan = nxp.plan(init, mesh, llama.RULES, optimizer=llama.optimizer())
      batch: Any = llama.batch_of(llama.SIZES["8b"], batch=self.batch)
      return nxp.compile_report(nxp.train_step(llama.loss), plan, batch=batch, topology=self.topology)
    config = dataclasses.replace(SIZES, depth=self.depth)
    rules: Any = RULES if self.sizes[1] > 1 else nxp.fsdp()
    plan = nxp.plan(lambda: decoders.Decoder(config, nnx.Rngs(0)), mesh, rules, optimizer=llama.optimizer())
    options: Any = {"attention": "blocks", "loss_parts": 8} if self.parts else {}
    step = nxp.train_step(decoders.loss, remat=self.remat, roll=True, **options)
    batch = jax.ShapeDtypeStruct((self.batch, 4097), jnp.int32)
    return nxp.compile_report(step, plan, batch=batch, topology=self.topology)


LAYOUTS = ((16, 1), (8, 2))
MODELS = (("by hand", False), ("plain", False), ("plain", True))
CASES = tuple(
  Case(model, depth, sizes, topology, parts=parts)
  for topology in ("tpu:v5e:4x4", "gpu:h100:2x8")
  for sizes in LAYOUTS
  for depth in (4, 16, 32)
  for model, parts in MODELS
)
TITLE = (
  "An ordinary 8B decoder, unedited, compiled for machines that are not here, beside one written for them"
)
NOTES = [
  "Plain: `benchmarks/plain/decoders.py`, a loop over an `nnx.List` with plain attention and no annotation,"
  ' trained by `nxp.train_step(loss, remat="full", roll=True)`; laid out by `nxp.fsdp()`, or by the four path'
  " rules of `benchmarks/plain_8b.py` where there is a tensor axis. By hand: `benchmarks/llama.py`, with"
  " attention by blocks and positions over the tensor axis between layers, which the plain one has not.",
  "Batches of 16 sequences of 4096 tokens, AdamW, float32 state, bfloat16 compute. Sent: payload per step.",
]


def add(record: Record, case: Case, report: CompileReport) -> None:
  """Adds the rows of a case."""
  sent = report.bytes_by("kind", "axes")
  figures = {
    "need per device": report.need_bytes,
    "arguments": report.memory.arguments,
    "temporaries": report.memory.temporaries,
    "sent": sum(sent.values()),
    **{f"sent, {kind} over {axes}": size for (kind, axes), size in sent.items() if size > 0.01 * GIB},
  }
  for name, size in figures.items():
    record.value(name, round(size / GIB, 2), "GiB", group=case.name)
  record.value("matrix FLOPs per device", round(report.cost.flops / 1e12, 2), "T", group=case.name)
  record.value("compiled in", round(report.seconds), "s", group=case.name)
  print(
    f"{case.name}: {figures['need per device'] / GIB:.2f} GiB, {figures['sent'] / GIB:.2f} sent", flush=True
  )


def main(part: str = "") -> None:
  """Compiles every case whose compiler is here, or those with a part of their name, into the record."""
  here = [case for case in CASES if missing_compiler(read_machine(case.topology)) is None]
  chosen = [case for case in here if part in case.name]
  if not chosen:
    print("no case, or no compiler of another machine is installed: no record is written")
    return
  record, path = (
    Record("plain_8b", TITLE, "python -m benchmarks plain_8b", notes=NOTES),
    RESULTS / "plain_8b.json",
  )
  if part and path.exists():
    names = {case.name for case in chosen}
    record.rows = [row for row in json.loads(path.read_text())["rows"] if row["group"] not in names]
  for case in chosen:
    add(record, case, case.compiled())
    record.write()


if __name__ == "__main__":
  main(*sys.argv[1:])
