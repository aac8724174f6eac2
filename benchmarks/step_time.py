"""The step-time model against what others measured and published: model FLOP utilisation, case by case.

Each case is planned from its published shapes, batch and mesh; nothing is compiled and nothing is run.
Sources, with the files read:

- MaxText: `MaxText/configs/v5e/README.md` and `MaxText/configs/v5p/README.md` (figures), the `*.sh` beside
  them (batch per chip, remat, mesh) and `MaxText/configs/base.yml` (shapes; head_dim 128, 32 000 words).
- TorchTitan: `benchmarks/llama3_h100_202412_torchtitan.md`, tables 1 and 3, FSDP + torch.compile in bfloat16.
  Their H100 has a 500 W limit and 2.4 TB/s of memory; MFU is against the peak of the SXM data sheet.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

import nnx_parallel as nxp
from benchmarks import llama
from benchmarks.harness import Record
from nnx_parallel.report.chips import chip
from nnx_parallel.report.roofline import StepTime, step_time
from nnx_parallel.report.workload import trace_workload
from nnx_parallel.train.remat import Remat

MEASURED = chip("h100")
H100 = dataclasses.replace(MEASURED, hbm_bandwidth=2.4e12)


@dataclasses.dataclass(frozen=True)
class WideHeads(llama.Config):
  """MaxText's default decoder: heads of 128 whatever the width."""

  @property
  def head(self) -> int:
    return 128


@dataclasses.dataclass(frozen=True)
class Case:
  """One published run; `batch` is per device, `slices` are joined by the data-centre network."""

  name: str
  config: llama.Config
  chip: str
  mesh: tuple[int, int, int]
  slices: int
  batch: int
  remat: Remat
  mfu: float


def maxtext(scale: int) -> WideHeads:
  """The default decoder at a `global_parameter_scale`, by the doubling rule of `pyconfig.py`."""
  base, rest = divmod(int(math.log2(scale)), 3)
  wide, heads, deep = 2 ** (base + (rest > 1)), 2 ** (base + (rest > 0)), 2**base
  return WideHeads(
    vocab=32_000, width=2048 * wide, depth=16 * deep, heads=16 * heads, kv_heads=16 * heads, mlp=7168 * heads,
    sequence=2048,
  )  # fmt: skip


# global_parameter_scale: (batch per chip, MFU in per cent by number of v5e-256 slices); fsdp 256, full remat.
V5E = {
  16: (6, {1: 61.10, 2: 59.37, 4: 59.14, 8: 58.27, 16: 56.56, 32: 54.65}),
  32: (4, {1: 66.86, 2: 64.81, 4: 64.10, 8: 63.67, 16: 62.26, 32: 60.40}),
  64: (2, {1: 59.90, 2: 56.66, 4: 55.85, 8: 54.96, 16: 53.29, 32: 50.18}),
}
# scale, chips of a slice (a v5p-128 has 64), tensor, batch per chip, remat, MFU by slices.
V5P: Sequence[tuple[int, int, int, int, Remat, dict[int, float]]] = (
  (32, 64, 4, 7, "dots", {1: 71.47, 2: 69.43}),
  (64, 64, 4, 3, "dots", {1: 70.31, 2: 67.26}),
  (128, 128, 8, 1, "dots", {1: 68.68, 2: 66.34}),
  (128, 256, 8, 1, "dots", {1: 68.83, 2: 59.66}),
  (256, 512, 8, 1, "dots", {1: 67.09, 2: 62.99}),
  (512, 512, 8, 2, "full", {1: 63.99, 2: 61.45}),
)
LLAMA_8B = dataclasses.replace(llama.SIZES["8b"], sequence=8192)
TITAN = ((8, 6667.0), (128, 6514.0))  # GPUs, tokens per second and GPU; batch 2 per GPU, selective remat


def cases() -> list[Case]:
  found = [
    Case(f"MaxText {scale}B, {n} x v5e-256", maxtext(scale), "v5e", (n, 256, 1), n, batch, "full", mfu / 100)
    for scale, (batch, figures) in V5E.items()
    for n, mfu in figures.items()
  ]
  for scale, chips, tensor, batch, remat, figures in V5P:
    for n, mfu in figures.items():
      mesh, name = (n, chips // tensor, tensor), f"MaxText {scale}B, {n} x v5p-{2 * chips}"
      found.append(Case(name, maxtext(scale), "v5p", mesh, n, batch, remat, mfu / 100))
  for gpus, tokens in TITAN:
    flops = model_flops(LLAMA_8B) * tokens / LLAMA_8B.sequence
    found.append(
      Case(
        f"TorchTitan 8B, {gpus} x H100",
        LLAMA_8B,
        "h100",
        (1, gpus, 1),
        gpus // 8,
        2,
        "dots",
        flops / MEASURED.peak("bfloat16"),
      )
    )
  return found


def model_flops(config: llama.Config) -> float:
  """FLOPs of one sequence, forward and backward, by the rule that both projects use.

  Six per parameter and token, the embedding left out, and twelve per layer for each pair of positions and
  element of all heads together: attention without its causal half.
  """
  parameters = config.parameters - config.vocab * config.width
  attention = 12 * config.depth * config.heads * config.head * config.sequence
  return config.sequence * (6 * parameters + attention)


def predict(case: Case) -> StepTime:
  sizes = dict(zip(("data", "fsdp", "tensor"), case.mesh, strict=True))
  devices = math.prod(case.mesh)
  config = dataclasses.replace(case.config, batch=case.batch * devices)

  def init() -> llama.Llama:
    return llama.Llama(config, llama.nnx.Rngs(0))

  plan = nxp.plan(init, nxp.abstract_mesh(sizes), llama.RULES, optimizer=llama.optimizer())
  work = trace_workload(plan, llama.loss, llama.batch_of(config), remat=case.remat)
  figures = H100 if case.chip == "h100" else chip(case.chip)
  return step_time(work, sizes, figures, slice_size=devices // case.slices)


def ranks(values: Sequence[float]) -> np.ndarray:
  """Ranks, equal values sharing their mean rank."""
  found = np.asarray(values)
  return np.array([np.mean(np.flatnonzero(np.sort(found) == value)) for value in found])


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
  """Spearman's rank correlation."""
  return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def main() -> None:
  """Predicts every case and writes the record."""
  record = Record(
    "step_time",
    "The step-time model against published model FLOP utilisation",
    "python -m benchmarks step_time",
    notes=[
      "Sources: MaxText `MaxText/configs/v5e/README.md` and `MaxText/configs/v5p/README.md`, with the"
      " scripts beside them; TorchTitan `benchmarks/llama3_h100_202412_torchtitan.md`, tables 1 and 3 (H100"
      " limited to 500 W).",
      "Left out: runs whose remat policy or number format the model does not have (MaxText 128B on v5e and"
      " Llama 2, TorchTitan in float8), and 1024B, whose mesh is ambiguous in its script.",
      "Two constants, the share of the peak that products reach on TPUs (0.78) and on GPUs (0.5), were chosen"
      " with these figures in view. The model knows no stragglers: it does not see the 10 to 16 % that"
      " MaxText loses from 1 to 32 slices. That is why the ranks on v5e agree little: each model was run on 1"
      " to 32 slices, which are equally fast here, as the sums between slices hide behind compute.",
    ],
  )
  published: list[float] = []
  predicted: list[float] = []
  for case in cases():
    time = predict(case)
    published.append(case.mfu)
    predicted.append(time.mfu)
    text = f"{case.name}: published {100 * case.mfu:.1f} %, predicted {100 * time.mfu:.1f} %, by {time.binds}"
    record.value(text, time.mfu / case.mfu, "predicted/published", group="MFU")
  ratios = [a / b for a, b in zip(predicted, published, strict=True)]
  for name, value in (
    ("smallest", min(ratios)), ("median", statistics.median(ratios)), ("largest", max(ratios))
  ):  # fmt: skip
    record.value(f"{name} of {len(ratios)}", value, "predicted/published", group="MFU, summary")
  for name in ("v5e", "v5p", "H100", ""):
    rows = [n for n, case in enumerate(cases()) if name in case.name]
    if len(rows) > 2:
      value = correlation([published[n] for n in rows], [predicted[n] for n in rows])
      label = name or "all"
      record.value(f"rank correlation, {label}, {len(rows)} runs", value, "", group="MFU, summary")
  record.write()


if __name__ == "__main__":
  main()
