"""100 float32 steps on every layout x ZeRO stage x microbatches, against one device.

Compared at every step: the loss, and the norm of each gradient as the optimizer got it, leaf by leaf. Losses
alone would not do: Adam trains alike with gradients that are wrong by a factor.

`tests/test_parity.py` runs a part of this table, chosen so that each layout, stage and count is in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import time
from typing import Any

if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["NPROC"] = "32"
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # a warning of the partitioner for each resharding
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.testing import Training, run_training, with_gradient_norms

STEPS, EXAMPLES, LENGTH = 100, 32, 8
VOCAB, WIDTH = 32, 16
RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor", vocab="tensor")
AXES = ("data", "fsdp", "tensor")
LAYOUTS = {
  "one device": (1, 1, 1),
  "dp": (8, 1, 1),
  "fsdp": (1, 8, 1),
  "tp": (1, 1, 8),
  "fsdp x tp": (1, 4, 2),
  "dp x fsdp x tp": (2, 2, 2),
  "Explicit dp": (8, 1, 1),
  "Explicit dp x fsdp x tp": (2, 2, 2),
}
# The rate is small and labels are noisy, so that the loss stays of order 1: on its way to 0 it is a
# difference of nearly equal numbers, and its relative error grows on one device as well.
OPTIMIZERS = {
  "adamw(1e-3)": lambda: optax.adamw(1e-3),
  "sgd(0.1, momentum=0.9)": lambda: optax.sgd(0.1, momentum=0.9),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """One row of the table."""

  layout: str
  zero: int
  microbatches: int

  def __str__(self) -> str:
    return f"{self.layout}, ZeRO-{self.zero}, {self.microbatches} microbatches"


CASES = [Case(*case) for case in itertools.product(LAYOUTS, (0, 1, 2), (1, 4))]


class Net(nnx.Module):
  """An embedding that is also the output, and two layers between them."""

  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, embedding_metadata={"out_sharding": ("vocab", "embed")})
    self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
    up, down = {"out_sharding": ("embed", "mlp")}, {"out_sharding": ("mlp", "embed")}
    bias = {"out_sharding": ("mlp",)}
    self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs, kernel_metadata=up, bias_metadata=bias)
    self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs, kernel_metadata=down)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.embed(tokens)
    x = x + self.down(nnx.gelu(self.up(self.norm(x))))
    return self.embed.attend(x)


class TypedNet(Net):
  """The same for Explicit meshes, where a contraction of split dims must say how its result lies."""

  def __call__(self, tokens: jax.Array) -> jax.Array:
    batch, table = ("data", "fsdp"), self.embed.embedding[...]
    whole, split = jax.P(batch, None, None), jax.P(batch, None, "tensor")
    x = table.at[tokens].get(out_sharding=whole)
    h = nnx.gelu(self.up(self.norm(x), out_sharding=split))
    x = x + self.down(h, out_sharding=whole)
    return jnp.einsum("bld,vd->blv", x, table, out_sharding=split)


def loss_fn(model: Net, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """A fifth of the targets is padding, unevenly spread: the weights of microbatches and shards differ."""
  logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
  losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, VOCAB))
  weights = (targets % 5 != 0).astype(losses.dtype)
  return nxp.weighted((losses * weights).sum(), weights.sum())


def batches(steps: int = STEPS) -> list[np.ndarray]:
  """Arithmetic sequences with a fifth of the tokens replaced by noise."""
  rng = np.random.default_rng(0)
  clean = (rng.integers(VOCAB, size=(steps, EXAMPLES, 1)) + np.arange(LENGTH + 1) * 3) % VOCAB
  noise = rng.integers(VOCAB, size=clean.shape)
  return list(np.where(rng.random(clean.shape) < 0.2, noise, clean).astype(np.int32))


def plan_of(case: Case, optimizer: str) -> nxp.Plan:
  sizes = LAYOUTS[case.layout]
  explicit = case.layout.startswith("Explicit")
  devices = jax.devices()[: int(np.prod(sizes))]
  mesh = nxp.make_mesh(dict(zip(AXES, sizes, strict=True)), explicit=explicit, devices=devices)
  net = TypedNet if explicit else Net
  tx = with_gradient_norms(OPTIMIZERS[optimizer]())
  return nxp.plan(lambda: net(nnx.Rngs(0)), mesh, RULES, optimizer=tx, zero=case.zero)


class Runs:
  """Runs of one optimizer from one initial model; the reference is made once."""

  def __init__(self, optimizer: str, steps: int = STEPS):
    self.optimizer, self.data = optimizer, batches(steps)
    reference = plan_of(Case("one device", 0, 1), optimizer)
    self.start = nxp.create_sharded_model(reference)
    self.one = run_training(reference, loss_fn, self.data, start=self.start)

  def run(self, case: Case) -> Training:
    plan = plan_of(case, self.optimizer)
    explicit = case.layout.startswith("Explicit")
    with jax.set_mesh(plan.mesh) if explicit else contextlib.nullcontext():
      return run_training(
        plan,
        loss_fn,
        self.data,
        start=self.start,
        microbatches=case.microbatches,
      )


def differences(one: Training, many: Training) -> tuple[float, float]:
  """The largest relative difference of a loss, and of the norm of a gradient, over all steps and leaves."""
  losses = np.abs(many.losses - one.losses) / np.abs(one.losses)
  norms = [np.abs(many.history[path] - norm) / norm for path, norm in one.history.items()]
  return float(losses.max()), float(np.max(norms))


def measured() -> dict[str, Any]:
  """The whole table with the installed versions."""
  from benchmarks.harness import environment

  rows: list[dict[str, Any]] = []
  began = time.process_time()
  for optimizer in OPTIMIZERS:
    runs = Runs(optimizer)
    print(
      f"{optimizer}: the loss goes from {runs.one.losses[0]:.2f} to {runs.one.losses[-1]:.2f}", flush=True
    )
    for case in CASES:
      loss, norm = differences(runs.one, runs.run(case))
      rows.append({"optimizer": optimizer, **dataclasses.asdict(case), "loss": loss, "norm": norm})
      print(f"{case!s:46} losses {loss:.1e}  gradient norms {norm:.1e}", flush=True)
  return {"environment": environment(), "processor_seconds": time.process_time() - began, "rows": rows}


def worst(run: dict[str, Any]) -> float:
  return max(max(row["loss"], row["norm"]) for row in run["rows"])


def main() -> None:
  from benchmarks.harness import RESULTS

  file = RESULTS / "parity.json"
  runs: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
  runs[f"jax {jax.__version__}"] = run = measured()
  file.write_text(json.dumps(runs, indent=1) + "\n")
  if worst(run) > 1e-5:
    sys.exit(f"{worst(run):.1e} is more than 1e-5")


if __name__ == "__main__":
  main()
