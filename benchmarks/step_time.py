"""The step-time model, and a constant, against what others measured and published: model FLOP utilisation.

Each case is planned from its published shapes, batch and mesh; nothing is compiled and nothing is run.
Sources, with the files read:

- MaxText: `MaxText/configs/v5e/README.md` and `MaxText/configs/v5p/README.md` (figures), the `*.sh` beside
  them (batch per chip, remat, mesh) and `MaxText/configs/base.yml` (shapes; head_dim 128, 32 000 words).
- TorchTitan: `benchmarks/llama3_h100_202412_torchtitan.md`, tables 1 and 3, FSDP + torch.compile in bfloat16.
  Their H100 has a 500 W limit and 2.4 TB/s of memory; MFU is against the peak of the SXM data sheet.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import nnx_parallel as nxp
from benchmarks import llama
from benchmarks.harness import Record
from nnx_parallel.layers.remat import Remat
from nnx_parallel.report.chips import chip
from nnx_parallel.report.estimate.roofline import StepTime, step_time
from nnx_parallel.report.estimate.workload import Workload, trace_workload

AXES = ("data", "fsdp", "tensor")
FAMILIES = ("v5e", "v5p", "h100")
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


@functools.cache
def traced(config: llama.Config, mesh: tuple[int, int, int], remat: Remat) -> Workload:
  sizes = dict(zip(AXES, mesh, strict=True))

  def init() -> llama.Llama:
    return llama.Llama(config, llama.nnx.Rngs(0), remat=False)  # the policy is the step's

  plan = nxp.plan(init, nxp.abstract_mesh(sizes), llama.RULES, optimizer=llama.optimizer())
  return trace_workload(plan, llama.loss, llama.batch_of(config), remat=remat)


def predict(case: Case, efficiency: float | None = None) -> StepTime:
  """The model's step time; with another efficiency of the chip than its row has."""
  devices = math.prod(case.mesh)
  config = dataclasses.replace(case.config, batch=case.batch * devices)
  figures = H100 if case.chip == "h100" else chip(case.chip)
  if efficiency is not None:
    figures = dataclasses.replace(figures, efficiency=efficiency)
  sizes = dict(zip(AXES, case.mesh, strict=True))
  return step_time(traced(config, case.mesh, case.remat), sizes, figures, slice_size=devices // case.slices)


def fitted_efficiency(runs: Sequence[Case]) -> float:
  """The share of the peak with which the model's ratios to published figures are 1 in the mean."""
  return statistics.fmean(chip(run.chip).efficiency * run.mfu / predict(run).mfu for run in runs)


def add_errors(record: Record, name: str, ratios: Sequence[float], group: str) -> None:
  """Mean absolute error, smallest and largest of predicted over published figures."""
  error = 100 * statistics.fmean(abs(ratio - 1) for ratio in ratios)
  low, high = min(ratios), max(ratios)
  case = f"{name}: predicted/published {low:.2f} to {high:.2f}, mean error"
  record.value(case, round(error, 1), "%", group=group)


def main() -> None:
  """Predicts every case and writes the record."""
  runs = cases()
  times = [predict(run) for run in runs]
  by_compute = sum(time.binds == "compute" for time in times)
  record = Record(
    "step_time",
    "The step-time model against published model FLOP utilisation, beside one constant for each chip",
    "python -m benchmarks step_time",
    notes=[
      "Sources: MaxText `MaxText/configs/v5e/README.md` and `MaxText/configs/v5p/README.md`, with the"
      " scripts beside them; TorchTitan `benchmarks/llama3_h100_202412_torchtitan.md`, tables 1 and 3 (H100"
      " limited to 500 W).",
      "Left out: runs whose remat policy or number format the model does not have (MaxText 128B on v5e and"
      " Llama 2, TorchTitan in float8), and 1024B, whose mesh is ambiguous in its script.",
      f"{by_compute} of {len(runs)} runs are predicted to be bound by compute. So these runs test the count"
      " of FLOPs and one number for each platform, the share of the peak that products reach. They do not"
      " test bandwidths of links, of networks or of memory, latency, or which links overlap.",
      "The baseline is one constant for each chip: the mean of its published figures.",
      "One family left out: the efficiency (or the constant) comes from the other families, in the mean of"
      " their ratios, and is held against the family left out. There is one family of GPU runs; for it both"
      " come from the TPU runs.",
      "The model knows no stragglers: it does not see the 10 to 16 % that MaxText loses from 1 to 32 slices.",
    ],
  )
  for run, time in zip(runs, times, strict=True):
    text = f"{run.name}: published {100 * run.mfu:.1f} %, predicted {100 * time.mfu:.1f} %, by {time.binds}"
    record.value(text, round(time.mfu / run.mfu, 2), "predicted/published", group="MFU")

  def constant(families: Sequence[str]) -> float:
    return statistics.fmean(run.mfu for run in runs if run.chip in families)

  group = f"all {len(runs)} runs"
  add_errors(record, "the model", [t.mfu / r.mfu for t, r in zip(times, runs, strict=True)], group)
  add_errors(record, "one constant for each chip", [constant([r.chip]) / r.mfu for r in runs], group)
  for family, others in (("v5e", ["v5p"]), ("v5p", ["v5e"]), ("h100", ["v5e", "v5p"])):
    group, source = f"{family} left out", " and ".join(others)
    efficiency = fitted_efficiency([run for run in runs if run.chip in others])
    kept = [run for run in runs if run.chip == family]
    ratios = [predict(run, efficiency).mfu / run.mfu for run in kept]
    add_errors(record, f"the model, efficiency {efficiency:.2f} from {source}", ratios, group)
    mean = constant(others)
    add_errors(record, f"the mean of {source}, {100 * mean:.1f} %", [mean / run.mfu for run in kept], group)
  for family in FAMILIES:
    kept = [run for run in runs if run.chip == family]
    case = f"{family}: efficiency that fits its own {len(kept)} runs, where the chip's row has"
    record.value(f"{case} {chip(family).efficiency:.2f}", round(fitted_efficiency(kept), 2), "", group="fit")
  record.write()


if __name__ == "__main__":
  main()
