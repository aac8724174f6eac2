"""A hand-tuned Llama 8B compiled for machines that are not here, beside MaxText's on the same chips.

What saves memory here stands in the model file, `benchmarks/llama.py`; this compares two model files.
Needs the TPU and NVIDIA compilers (`tpu-aot`, `gpu-aot`); cases without their compiler are left out, and
MaxText's side where MaxText is not installed:

    pip install 'maxtext[tpu]==0.2.5' 'jax[tpu]==0.12.0.1'

A few cases again, into the record that is there, by a part of their names:

    python -m benchmarks.report_8b "fsdp 8 x tensor 2"
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections import Counter

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_parallel as nxp
from benchmarks import llama
from benchmarks.harness import Record
from benchmarks.maxtext_step import compile_by_maxtext, is_installed
from nnx_parallel.report.compile_report import CompileReport
from nnx_parallel.report.memory import memory_plan
from nnx_parallel.report.topology import missing_compiler, read_machine

GIB = 2**30


MAXTEXT = (
  "compile_topology=v5e-16",
  "compile_topology_num_slices=1",
  "model_name=llama3-8b",
  "per_device_batch_size=1",
  "max_target_length=4096",
  "remat_policy=full",
  "ici_fsdp_parallelism=16",
)
_OURS = ("grad_dtype=bfloat16", "gradient_clipping_threshold=0")
# Each is compiled; the first has our choices, the last MaxText's own.
MAXTEXT_OPTIONS = (_OURS, (*_OURS, "cast_logits_to_fp32=false"), (*_OURS, "attention=dot_product"), ())

TITLE = "A hand-tuned Llama 8B compiled for machines that are not here, beside MaxText's"
NOTES = [
  "Two model files are compared, not two toolkits. `benchmarks/llama.py` was tuned by hand against these"
  " figures: attention by blocks (all scores of a sequence were two arrays of 2 GiB); logits in bfloat16,"
  " cast inside the cross-entropy; the target's logit by a comparison; a barrier between the head's two"
  " gradients; the stacked weights cast before the scan, so that their gradients are kept in bfloat16; over"
  " a tensor axis, positions split between layers, which halves the saved activations. The toolkit does"
  " none of it by itself.",
  "Batches of 4096 tokens (16 sequences, 64 on 64 chips), AdamW, float32 state, bfloat16 compute, a scan"
  " over rematerialised layers. Sent: payload per step, what a group of devices holds together; below 0.01"
  " GiB it is left out.",
  "MaxText on v5e, fsdp 16: one jax and one libtpu compile both sides, and one reader, `nnx_parallel.report`,"
  " reads the peak and every collective of both. MaxText's side is `python -m benchmarks.maxtext_step"
  f" REPORT.pickle {' '.join(MAXTEXT)}` and the options in the name of its rows; this is MaxText's"
  " `train_compile` with the same options.",
  "Same choices: `grad_dtype=bfloat16 gradient_clipping_threshold=0` beside ours, and MaxText's defaults"
  " beside ours with choices of MaxText: gradients of the layers kept in float32, clipped by their global"
  " norm, and segment ids in the batch. Logits are no choice of ours: they are cast to float32 after a"
  " product in bfloat16, as MaxText does by default; with `cast_logits_to_fp32=false` its cross-entropy is"
  " computed in bfloat16.",
  "What differs in each pair: MaxText's attention is a fused kernel (splash) unless `attention=dot_product`,"
  " ours plain JAX by blocks; its batch has positions, targets and, always, segment ids; its learning rate"
  " has a schedule.",
  "fsdp 8 x tensor 2 is compiled twice: `nxp.train_step` holds the arrays of the step to the plan's layouts,"
  " a plain `nnx.jit` step of the same model leaves them to the compiler.",
  "No times are compared: ours is attention in plain JAX, MaxText's a fused kernel.",
]


@dataclasses.dataclass(frozen=True)
class Case:
  """One layout on one machine.

  Attributes:
    topology: the machine.
    sizes: of the mesh axes `data`, `fsdp`, `tensor`.
    batch: sequences of 4096 tokens in the global batch.
    like_maxtext: with MaxText's choices: gradients kept in float32 and clipped by their global norm, and
      a batch with segment ids.
    plain: the step is a plain `nnx.jit` one, and not that of `nxp.train_step`.
  """

  topology: str
  sizes: tuple[int, int, int]
  batch: int = 16
  like_maxtext: bool = False
  plain: bool = False

  @property
  def name(self) -> str:
    axes = zip(("data", "fsdp", "tensor"), self.sizes, strict=True)
    layout = " x ".join(f"{axis} {size}" for axis, size in axes if size > 1)
    choices = ", ours with choices of MaxText" if self.like_maxtext else ""
    return f"{self.topology}, {layout}{choices}{', plain nnx.jit step' if self.plain else ''}"


CASES = (
  Case("tpu:v5e:4x4", (1, 16, 1)),
  Case("tpu:v5e:4x4", (1, 16, 1), like_maxtext=True),
  Case("tpu:v5e:4x4", (1, 8, 2)),
  Case("tpu:v5e:4x4", (1, 8, 2), plain=True),
  Case("tpu:v5e:2x4", (1, 8, 1)),
  Case("tpu:v5p:4x4x4", (1, 64, 1), 64),
  Case("gpu:h100:1x8", (1, 8, 1)),
)


@nnx.jit(donate_argnums=(0, 1))
def plain_step(model: llama.Llama, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
  """What one writes without this package."""
  loss, grads = nnx.value_and_grad(llama.loss)(model, batch)
  optimizer.update(model, grads)
  return loss


def compiled(case: Case) -> tuple[CompileReport, int]:
  """The report of a case, and the bytes per device that the memory plan gives it."""
  mesh = nxp.abstract_mesh(dict(zip(("data", "fsdp", "tensor"), case.sizes, strict=True)))
  model, sizes = llama.init, llama.SIZES["8b"]
  optimizer, batch = llama.optimizer(), llama.batch_of(sizes, batch=case.batch)
  if case.like_maxtext:
    model = functools.partial(llama.build, "8b", gradients=jnp.float32)
    optimizer, batch = llama.optimizer(clip=1.0), llama.batch_of(sizes, "segments", batch=case.batch)
  plan = nxp.plan(model, mesh, llama.RULES, optimizer=optimizer)
  planned = memory_plan(plan, llama.loss, batch).need_bytes
  step = plain_step if case.plain else nxp.train_step(llama.loss)
  return nxp.compile_report(step, plan, batch=batch, topology=case.topology), planned


def add(record: Record, group: str, report: CompileReport, planned: int | None = None) -> None:
  """Adds the rows of a report."""
  verdict = "fits" if report.fits else "does not fit"
  record.value(f"need per device, {verdict}", round(report.need_bytes / GIB, 2), "GiB", group=group)
  if planned is not None:
    record.value("at least, without a compiler", round(planned / GIB, 2), "GiB", group=group)
  record.value("arguments", round(report.memory.arguments / GIB, 2), "GiB", group=group)
  sent: Counter[str] = Counter()
  for one in report.collectives:
    sent[f"{one.kind} over {'+'.join(one.axes)}"] += one.bytes * one.times
  for name, size in sent.most_common():
    if size > 0.01 * GIB:
      record.value(f"sent, {name}", round(size / GIB, 2), "GiB", group=group)
  print(f"{group}: {report.need_bytes / GIB:.2f} GiB", flush=True)


def add_case(record: Record, case: Case) -> None:
  """Compiles a case and adds its rows."""
  report, planned = compiled(case)
  add(record, case.name, report, planned)


def add_maxtext(record: Record, group: str, options: tuple[str, ...]) -> None:
  """Adds the rows of MaxText's own step for the first case."""
  add(record, group, compile_by_maxtext(*MAXTEXT, *options))


def main(part: str = "") -> None:
  """Compiles the cases with a part of their name whose compilers are here, into the record."""
  record = Record("report_8b", TITLE, "python -m benchmarks report_8b", notes=NOTES)
  groups = {case.name: functools.partial(add_case, record, case) for case in CASES}
  here = [case.name for case in CASES if missing_compiler(read_machine(case.topology)) is None]
  for options in MAXTEXT_OPTIONS:
    group = f"{CASES[0].name}, MaxText {' '.join(options) or 'defaults'}"
    groups[group] = functools.partial(add_maxtext, record, group, options)
    if CASES[0].name in here and is_installed():
      here.append(group)
  record.make(groups, [group for group in here if part in group])


if __name__ == "__main__":
  main(*sys.argv[1:])
