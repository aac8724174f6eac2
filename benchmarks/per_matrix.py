"""Muon on sharded matrices: FLOPs and bytes with `per_matrix`, without it, and the smallest possible.

One train step of a model with square and long kernels is compiled for simulated devices and for TPUs. The
FLOPs and bytes that Muon adds to a step with Adam are compared with the least that it must add.
"""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx

import nnx_parallel as nxp
from benchmarks.harness import Record
from nnx_parallel.report.topology import missing_compiler, read_machine

DEPTH, WIDTH, HIDDEN, ROWS, DEVICES = 8, 256, 1024, 64, 8
MACHINES = ("cpu:8", "tpu:v5e:2x4", "tpu:v5p:2x2x2", "gpu:h100:1x8")
MESHES = {
  "fsdp 8": {"fsdp": 8},
  "fsdp 4 x tensor 2": {"fsdp": 4, "tensor": 2},
  "data 2 x fsdp 4": {"data": 2, "fsdp": 4},
  "data 8": {"data": 8},
}
CASES = {
  "optax.contrib.muon": lambda: optax.contrib.muon(1e-3),
  "per_matrix(muon)": lambda: nxp.parallel.per_matrix(optax.contrib.muon(1e-3)),
}
NOTES = [
  f"{DEPTH} blocks with two kernels of {WIDTH} x {WIDTH}, one of {WIDTH} x {HIDDEN} and one of {HIDDEN} x"
  f" {WIDTH}, float32, {ROWS} rows; all kernels are matrices. Five Newton-Schulz steps.",
  "FLOPs are the FLOPs of the update on a device, divided by one eighth of the matrix products of all"
  " matrices. Sent is the bytes that a device sends in a step, divided by the bytes with Adam on the same"
  " layout. Exchange is the bytes that Muon adds to Adam's, divided by twice the share of a device of all"
  " matrices. On meshes with data > 1, a reduce-scatter of the gradients and a gather of the updates replace"
  " the all-reduce of the gradients if the compiler makes a reduce-scatter. It did not do so for simulated"
  " devices, nor for v5p with data 8.",
]


class Block(nnx.Module):
  """Kernels in both orders of their axes."""

  def __init__(self, rngs: nnx.Rngs):
    def kernel(ins: int, outs: int, *names: str) -> nnx.Linear:
      return nnx.Linear(ins, outs, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": names})

    self.value = kernel(WIDTH, WIDTH, "embed", "mlp")
    self.out = kernel(WIDTH, WIDTH, "mlp", "embed")
    self.up = kernel(WIDTH, HIDDEN, "embed", "mlp")
    self.down = kernel(HIDDEN, WIDTH, "mlp", "embed")

  def __call__(self, x: jax.Array) -> jax.Array:
    x = x + self.out(jnp.tanh(self.value(x)))
    return x + self.down(jnp.tanh(self.up(x)))


def init() -> nnx.Module:
  """The model."""
  return nnx.Sequential(*(Block(nnx.Rngs(n)) for n in range(DEPTH)))


def loss(model: Any, x: Any) -> Any:
  """Any loss."""
  return (model(x) ** 2).mean()


def products(rows: int, columns: int) -> int:
  """FLOPs of five steps: `a = x @ x.T`, `a @ a`, `b @ x`, with the smaller side as rows."""
  rows, columns = sorted((rows, columns))
  return 5 * 2 * (2 * rows * rows * columns + rows**3)


def report(machine: str, sizes: dict[str, int], tx: optax.GradientTransformation) -> Any:
  """The report of a compiled step."""
  mesh = nxp.report.topology_mesh(machine, **sizes)
  batch = tuple(axis for axis in ("data", "fsdp") if axis in sizes)
  present = {"embed": "fsdp" if "fsdp" in sizes else None, "mlp": "tensor" if "tensor" in sizes else None}
  plan = nxp.plan(init, mesh, nxp.LogicalRules(batch=batch, **present), optimizer=tx)
  x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
  return nxp.compile_report(nxp.train_step(loss), plan, batch=x)


def main() -> None:
  """Measures and writes the record."""
  title = __doc__.split("\n", 1)[0]
  record = Record("per_matrix", title, command="python -m benchmarks per_matrix", notes=[*NOTES])
  least = DEPTH * (2 * products(WIDTH, WIDTH) + 2 * products(WIDTH, HIDDEN)) / DEVICES
  share = 4 * DEPTH * (2 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN) / DEVICES
  for machine in MACHINES:
    if missing_compiler(read_machine(machine)):
      record.notes.append(f"{machine} is left out: its compiler was not installed.")
      continue
    for name, sizes in MESHES.items():
      of = functools.partial(report, machine, sizes)
      adam = of(optax.adam(1e-3))
      for case, tx in CASES.items():
        muon = of(tx())
        sent, before = muon.sent().per_device, adam.sent().per_device
        group = f"{machine}, {name}"
        record.value(
          f"{case}: FLOPs", (muon.cost.flops - adam.cost.flops) / least, "of the least", group=group
        )
        record.value(f"{case}: sent", sent / before, "of Adam's", group=group)
        record.value(f"{case}: exchange", (sent - before) / (2 * share), "of two shares", group=group)
        print(record.rows[-3:], flush=True)
  record.write()


if __name__ == "__main__":
  main()
