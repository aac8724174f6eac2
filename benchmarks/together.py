"""One transformer over every sensible product of mesh axes, on 8 and on 16 devices, against one device.

The text recipe is trained for 20 float32 steps over data, fsdp, tensor, context and stage axes; with its MLPs
exchanged for mixtures of experts, over expert axes too. Compared at each step: the loss, and the norm of each
gradient as the optimizer got it. The model is not told about any axis: the plan splits its arrays and inputs,
and the options of `train_step` the work of its layers.

  python -m benchmarks.together           simulates 16 devices

`tests/schemes/test_together.py` runs a part of this table.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from typing import Any

if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["NPROC"] = "32"
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # a warning of the partitioner for each resharding
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"

import jax
import optax
from flax import nnx

import nnx_parallel as nxp
from benchmarks.parity import differences
from nnx_parallel.recipes import text_lm
from nnx_parallel.testing import Training, run_training, with_gradient_norms

STEPS, MICROBATCHES, EXPERTS = 20, 4, 4
CONFIG = text_lm.Config(width=16, depth=4, heads=4, mlp=32, sequence=16, batch=16)
AXES: dict[str, tuple[str, ...]] = {
  "batch": ("data", "fsdp"),
  "seq": ("context",),
  "embed": ("fsdp",),
  "mlp": ("tensor",),
  "heads": ("tensor",),
  "vocab": ("tensor", "fsdp"),
  "expert": ("expert",),
}
"""Logical name -> the mesh axes that split it, of those that a mesh has."""
DENSE: tuple[dict[str, int], ...] = (
  {"data": 2, "fsdp": 2, "tensor": 2},
  {"data": 2, "context": 4},
  {"fsdp": 2, "context": 2, "tensor": 2},
  {"data": 2, "stage": 4},
  {"fsdp": 2, "tensor": 2, "stage": 2},
  {"data": 2, "context": 2, "stage": 2},
  {"data": 2, "fsdp": 2, "tensor": 2, "stage": 2},
  {"data": 2, "fsdp": 2, "context": 2, "tensor": 2},
  {"data": 2, "fsdp": 2, "context": 2, "stage": 2},
  {"fsdp": 2, "context": 2, "tensor": 2, "stage": 2},
)
SPARSE: tuple[dict[str, int], ...] = (
  {"data": 2, "expert": 4},
  {"fsdp": 2, "tensor": 2, "expert": 2},
  {"context": 2, "tensor": 2, "expert": 2},
  {"data": 2, "expert": 2, "stage": 2},
  {"data": 2, "fsdp": 2, "tensor": 2, "expert": 2},
  {"data": 2, "context": 2, "tensor": 2, "expert": 2},
  {"fsdp": 2, "tensor": 2, "expert": 2, "stage": 2},
  {"context": 2, "tensor": 2, "expert": 2, "stage": 2},
)


class Experts(nnx.Module):
  """A mixture of gated experts, two for each token, in the place of an MLP."""

  def __init__(self, config: text_lm.Config, rngs: nnx.Rngs):
    draw = nnx.initializers.lecun_normal(batch_axis=0)

    def stacked(wide: int, narrow: int, names: tuple[str, str]) -> nnx.Param[Any]:
      value = draw(rngs.params(), (EXPERTS, wide, narrow))
      return nnx.Param(value, out_sharding=("expert", *names), eager_sharding=False)

    self.router = nnx.Linear(config.width, EXPERTS, use_bias=False, rngs=rngs)
    self.gate = stacked(config.width, config.mlp, ("embed", "mlp"))
    self.up = stacked(config.width, config.mlp, ("embed", "mlp"))
    self.down = stacked(config.mlp, config.width, ("mlp", "embed"))

  def __call__(self, x: jax.Array) -> jax.Array:
    weights = {"gate": self.gate, "up": self.up, "down": self.down}
    routing = nxp.parallel.route(self.router(x), 2)
    return nxp.parallel.experts(nxp.parallel.mlp_experts, weights, x, routing)[0]


def init(sparse: bool) -> text_lm.TextLM:
  """The recipe's model; with experts in the place of its MLPs, if it is sparse."""
  model, rngs = text_lm.init(CONFIG), nnx.Rngs(1)
  if sparse:
    for block in model.blocks:
      block.mlp = Experts(CONFIG, rngs)
  return model


def plan_of(sizes: dict[str, int], sparse: bool) -> nxp.Plan:
  """The model on the first devices."""
  mesh = nxp.make_mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())])
  kept = {name: tuple(axis for axis in axes if axis in sizes) for name, axes in AXES.items()}
  rules = nxp.LogicalRules(
    **{name: nxp.LogicalRules.first(axes, None) if axes else None for name, axes in kept.items()}
  )
  tx = with_gradient_norms(optax.adam(1e-3))
  return nxp.plan(functools.partial(init, sparse), mesh, [rules, nxp.replicate()], optimizer=tx)


class Runs:
  """Runs from one initial model; the reference, on one device, is made once."""

  def __init__(self, sparse: bool, steps: int = STEPS):
    self.sparse = sparse
    self.data = [batch for batch, _ in zip(text_lm.batches(config=CONFIG), range(steps), strict=False)]
    reference = plan_of({"data": 1}, sparse)
    self.start = nxp.create_sharded_model(reference)
    self.one = run_training(
      reference, text_lm.loss, self.data, start=self.start, microbatches=MICROBATCHES, scan_layers=False
    )

  def run(self, sizes: dict[str, int]) -> Training:
    """Trains on a mesh."""
    options: dict[str, Any] = {"pipeline": "stage"} if "stage" in sizes else {}
    options |= {"attention": 8} if "context" in sizes else {}
    plan = plan_of(sizes, self.sparse)
    return run_training(plan, text_lm.loss, self.data, start=self.start, microbatches=MICROBATCHES, **options)


def main() -> None:
  """Trains every case and writes the record."""
  from benchmarks.harness import Record

  title = __doc__.split("\n", 1)[0]
  notes = [
    f"{STEPS} steps of {CONFIG.batch} windows of {CONFIG.sequence} bytes, {MICROBATCHES} microbatches, adam;"
    f" {CONFIG.depth} layers of width {CONFIG.width}. The largest relative difference over all steps of the"
    " loss, and over all steps and parameters of the norm of a gradient; the bound is 1e-5. The same program"
    " on one device, other products of the same numbers, is the trivial baseline: 0 by definition.",
  ]
  record = Record("together", title, command="python -m benchmarks.together", notes=notes)
  worst = 0.0
  for sparse, cases in ((False, DENSE), (True, SPARSE)):
    runs, model = Runs(sparse), f"{EXPERTS} experts, 2 for each token" if sparse else "dense"
    for sizes in cases:
      began, name = time.monotonic(), " x ".join(f"{axis}={size}" for axis, size in sizes.items())
      loss, norm = differences(runs.one, runs.run(sizes))
      worst = max(worst, loss, norm)
      print(f"{model}: {name}: {loss:.1e} {norm:.1e} ({time.monotonic() - began:.0f} s)", flush=True)
      record.value(f"{model}: loss", loss, "", group=name)
      record.value(f"{model}: gradient norms", norm, "", group=name)
  record.write()
  if worst > 1e-5:
    sys.exit(f"{worst:.1e} is more than 1e-5")


if __name__ == "__main__":
  main()
