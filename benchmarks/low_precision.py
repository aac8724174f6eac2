"""The text recipe in low precision: losses over 500 steps, compared with float32 and bfloat16.

All runs start from the same parameters and use the same batches, on fsdp x tensor. The runs take turns: all
runs make step n before any run makes step n + 1. Qwix rounds the operands of the matrix products in all
blocks; the head and the embedding compute as `nxp.Precision.bfloat16` says. On CPUs, Qwix emulates the
formats: the times show the cost of rounding, and say nothing about a chip with low-precision products.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax.numpy as jnp
import numpy as np
import qwix

import nnx_parallel as nxp
from benchmarks.harness import Record, Timing
from nnx_parallel.recipes import text_lm

CONFIG = text_lm.Config(width=64, depth=2, heads=2, mlp=128, sequence=64, batch=16)
MESH = {"fsdp": 4, "tensor": 2}
BLOCKS = r"blocks/\d/(attention|mlp)/.*"
LAST = 50
"""The training loss in the record is the mean over this many last steps."""
WARM = 20
"""The number of first steps that are not timed."""

Init = Callable[[], text_lm.TextLM]


def forward(kind: Any, tile: int | None = None) -> dict[str, Any]:
  """A rule that rounds the operands of the forward pass; gradients stay in bfloat16."""
  return {"weight_qtype": kind, "act_qtype": kind, "tile_size": tile}


def blocked(kind: str, tile: int) -> dict[str, Any]:
  """A rule that rounds all operands of both passes in blocks."""
  tiles = {"dlhs_tile_size": tile, "drhs_tile_size": tile}
  residuals = {"dlhs_residual_qtype": kind, "drhs_residual_qtype": kind}
  return {**forward(kind, tile), "bwd_qtype": kind, "additional_qt_config": tiles | residuals}


FORMS: Mapping[str, dict[str, Any]] = {
  "int8": {**forward(jnp.int8), "bwd_qtype": jnp.int8},
  "float8": {**forward(jnp.float8_e4m3fn), "bwd_qtype": jnp.float8_e5m2},
  "MXFP8": blocked("mxfp8", 32),
  "NVFP4, forward only": forward("nvfp4", 16),
  "NVFP4": blocked("nvfp4", 16),
}


def inits() -> dict[str, Init]:
  """A constructor for each form."""
  policy = nxp.Precision.bfloat16(output_layers=["head"])
  bfloat16 = policy.apply(lambda: text_lm.init(CONFIG))

  def low(settings: dict[str, Any]) -> Init:
    rule = qwix.QtRule(module_path=BLOCKS, **settings)
    tokens = jnp.zeros((1, CONFIG.sequence), jnp.int32)
    return lambda: qwix.quantize_model(bfloat16(), qwix.QtProvider([rule]), tokens)

  forms = {form: low(settings) for form, settings in FORMS.items()}
  return {"float32": lambda: text_lm.init(CONFIG), "bfloat16": bfloat16, **forms}


class Run:
  """One form: its model, its losses and the time of each step."""

  def __init__(self, init: Init):
    rules = text_lm.rules().replace(batch="fsdp")
    self.plan = nxp.plan(init, nxp.make_mesh(MESH), rules, optimizer=text_lm.optimizer(CONFIG))
    self.model, self.optimizer = nxp.create_sharded_model(self.plan)
    self.step = nxp.train_step(text_lm.loss)
    self.losses: list[float] = []
    self.seconds: list[float] = []

  def train(self, batch: text_lm.Batch) -> None:
    """One step."""
    placed = nxp.shard_batch(batch, self.plan)
    began = time.perf_counter()
    self.losses.append(float(self.step(self.model, self.optimizer, placed)["loss"]))
    self.seconds.append(time.perf_counter() - began)

  def validation(self) -> float:
    """The mean loss of the held-out windows."""
    step = nxp.eval_step(text_lm.loss)
    batches = text_lm.batches(split="held_out", config=CONFIG)
    return float(np.mean([float(step(self.model, nxp.shard_batch(b, self.plan))["loss"]) for b in batches]))


def main() -> None:
  """Trains all forms, and writes `results/low_precision.{json,md}`."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--steps", type=int, default=500)
  options = parser.parse_args()
  warnings.filterwarnings("ignore", category=DeprecationWarning)  # of flax, for what qwix 0.1.8 calls
  record = Record(
    "low_precision",
    f"The text recipe in low precision: {options.steps} steps on 8 simulated devices, {axes_text(MESH)}",
    command="python -m benchmarks low_precision",
  )
  runs = {form: Run(init) for form, init in inits().items()}
  for n, (batch, _) in enumerate(zip(text_lm.batches(config=CONFIG), range(options.steps), strict=False)):
    for run in runs.values():
      run.train(batch)
    if n % 25 == 0:
      print(n, {form: round(run.losses[-1], 3) for form, run in runs.items()}, flush=True)
  validation = {form: run.validation() for form, run in runs.items()}
  for form, run in runs.items():
    training = float(np.mean(run.losses[-LAST:]))
    record.value(f"{form}: training loss", training, "nats", group="losses")
    record.value(f"{form}: validation loss", validation[form], "nats", group="losses")
    record.value(
      f"{form}: validation, less bfloat16's",
      validation[form] - validation["bfloat16"],
      "nats",
      group="losses",
    )
  timings = {form: Timing(form, tuple(run.seconds[WARM:])) for form, run in runs.items()}
  record.compare(timings, baseline="bfloat16", group="time of a step")
  record.notes = [
    f"The model has {CONFIG.depth} blocks of width {CONFIG.width} (MLP {CONFIG.mlp}, {CONFIG.heads} heads);"
    f" a batch has {CONFIG.batch} windows of {CONFIG.sequence} bytes of Python's standard library. The"
    f" training loss is the mean of the last {LAST} steps, in nats per byte; the validation loss is that of"
    f" {CONFIG.held_out_batches * CONFIG.batch} windows that were held out, with the products of training.",
    "`MXFP8`, `NVFP4`, `int8` and `float8` round all operands of the products of the blocks, in both"
    " passes (`float8`: e4m3, gradients e5m2). `forward only` keeps the gradients in bfloat16.",
    f"Qwix {qwix.__version__} has no float32 scale for each tensor of NVFP4: its scales are e4m3 numbers, and"
    " a block whose largest magnitude is below 0.006 becomes zeros. Gradients are smaller than that.",
    "CPUs have no products of these formats. The times are those of an emulation, and say nothing about a"
    " chip that has them.",
  ]
  record.write()


def axes_text(sizes: Mapping[str, int]) -> str:
  """Axes and sizes, for a title."""
  return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


if __name__ == "__main__":
  main()
