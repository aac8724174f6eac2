"""How long planning takes: a 70B-parameter transformer on 4096 devices, and the growth with size.

The baseline is what planning cannot avoid: building the module and its optimizer abstractly with flax.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import optax
from flax import nnx

import nnx_parallel as nxp
from benchmarks.harness import Record

MESH = nxp.abstract_mesh(data=8, fsdp=64, tensor=8)
RULES = nxp.LogicalRules(
  batch=("data", "fsdp"), vocab="tensor", embed="fsdp", mlp="tensor", heads="tensor", kv="tensor"
)


def _linear(width: int, out: int, names: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
  return nnx.Linear(width, out, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": names})


class Block(nnx.Module):
  def __init__(self, width: int, hidden: int, kv: int, rngs: nnx.Rngs):
    self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
    self.q = _linear(width, width, ("embed", "heads"), rngs)
    self.k = _linear(width, kv, ("embed", "kv"), rngs)
    self.v = _linear(width, kv, ("embed", "kv"), rngs)
    self.out = _linear(width, width, ("heads", "embed"), rngs)
    self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
    self.gate = _linear(width, hidden, ("embed", "mlp"), rngs)
    self.up = _linear(width, hidden, ("embed", "mlp"), rngs)
    self.down = _linear(hidden, width, ("mlp", "embed"), rngs)


class Transformer(nnx.Module):
  """Llama-shaped; `Transformer(80)` has 70.55 billion parameters."""

  def __init__(self, depth: int, width: int = 8192, hidden: int = 28672, kv: int = 1024, vocab: int = 128256):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Param(
      nnx.initializers.normal()(rngs.params(), (vocab, width)), out_sharding=("vocab", "embed")
    )
    self.blocks = nnx.List([Block(width, hidden, kv, rngs) for _ in range(depth)])
    self.norm = nnx.RMSNorm(width, rngs=rngs)
    self.head = _linear(width, vocab, ("embed", "vocab"), rngs)


def plan_of(depth: int) -> Callable[[], Any]:
  tx = optax.adam(1e-3)
  return lambda: nxp.plan(lambda: Transformer(depth), MESH, RULES, optimizer=tx)


def abstract_of(depth: int) -> Callable[[], Any]:
  tx = optax.adam(1e-3)

  def build() -> None:
    with nnx.use_eager_sharding(False):
      module = nnx.eval_shape(lambda: Transformer(depth))
      nnx.eval_shape(lambda: nnx.Optimizer(module, tx, wrt=nnx.Param))

  return build


def processor_seconds(case: Callable[[], Any]) -> float:
  began = time.process_time()
  case()
  return time.process_time() - began


def main() -> None:
  record = Record(
    "planning",
    "Planning a transformer of 70.55B parameters with Adam on 4096 abstract devices",
    command="python -m benchmarks planning",
    notes=["All times are processor time of one process, so that a busy machine does not count."],
  )
  record.value("first plan of the process, 80 layers", processor_seconds(plan_of(80)), "s")
  plan = plan_of(80)()
  record.value("arrays planned", len(plan.leaves), "arrays")
  record.value("per device", plan.bytes_per_device() / 2**20, "MiB")
  pairs = [(processor_seconds(abstract_of(80)), processor_seconds(plan_of(80))) for _ in range(5)]
  flax, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
  record.value("flax builds model and optimizer abstractly", flax, "s")
  record.value("nxp.plan, which contains that", ours, "s")
  record.value("ratio", statistics.median(plan / build for build, plan in pairs), "")
  for depth in (40, 160, 370, 3700):
    arrays = 27 * depth + 11
    seconds = processor_seconds(plan_of(depth))
    record.value(f"time per array, {arrays} arrays ({depth} layers)", seconds / arrays * 1e6, "us")
  record.write()


if __name__ == "__main__":
  main()
