"""Attention with its positions split over eight v5e chips, as the length grows.

Each program is the value and gradient of one causal attention, compiled for `tpu:v5e:2x4`: the peak memory of
each chip, arguments and results included, beside that of the attention that jax computes whole (the compiler
splits it by the same layout), and what a ring sends beside what it must send. The compiler's temporaries are
no measure here: it gives 0.5 MiB for programs that hold accumulators of 32 MiB.

  python benchmarks/context.py            needs the TPU compiler (`tpu-aot`)
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import nnx_parallel as nxp
from harness import Record
from nnx_parallel.report.program.collectives import collectives

CHIPS, HEADS, KEY_HEADS, WIDTH = 8, 16, 8, 128
LENGTHS = (8192, 32768, 131072)
WAYS = {
  "ring, zigzag": nxp.context_attention(causal=True, zigzag=True),
  "ring": nxp.context_attention(causal=True),
  "all to all": nxp.context_attention(how="all_to_all", causal=True),
  "whole": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
}

NOTES = [
  "Forward must be sent: 7 shards of keys and values. Forward and backward: those again, but for a send that"
  " the compiler shares between both ways, and the gradients, in float32 until they go home in bfloat16; this"
  " formula was written after reading the compiled program.",
]


def program(attend: Any, length: int, mesh: Any, gradient: bool = True) -> Any:
  """The compiled attention of one sequence, and its gradient."""

  def summed(q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, v).astype(jnp.float32).sum()

  layout = NamedSharding(mesh, PartitionSpec(None, "context"))
  shapes = [(1, length, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
  given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=layout) for shape in shapes]
  function = jax.value_and_grad(summed, (0, 1, 2)) if gradient else attend
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return jax.jit(function).lower(*given).compile()


def sent(compiled: Any) -> int:
  """The bytes that a chip sends by collective-permute."""
  found = collectives(compiled.as_text(), {"context": CHIPS})
  return sum(item.sent_bytes for item in found if "permute" in item.kind)


def main() -> None:
  """Compiles every program and writes the record."""
  mesh = nxp.topology_mesh("tpu:v5e:2x4", context=CHIPS)
  title = __doc__.split("\n", 1)[0]
  record = Record("context", title, command="python benchmarks/context.py", notes=NOTES)
  for length in LENGTHS:
    group = f"{length // 1024}k positions, bfloat16, {HEADS} heads of {WIDTH}, {KEY_HEADS} of keys"
    for name, attend in WAYS.items():
      try:
        peak = program(attend, length, mesh).memory_analysis().peak_memory_in_bytes / 2**20
        print(f"{group}: {name}: {peak:.1f} MiB", flush=True)
        record.value(f"{name}: peak of a chip", round(peak, 1), "MiB", group=group)
      except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
          raise
        print(f"{group}: {name}: does not fit: {str(error)[:200]}", flush=True)
        record.value(f"{name}: does not fit in a chip's memory of", 16, "GiB", group=group)
    shard = 2 * length // CHIPS * KEY_HEADS * WIDTH * 2
    for gradient, moved in ((False, (CHIPS - 1) * shard), (True, None)):
      found = sent(program(WAYS["ring, zigzag"], length, mesh, gradient))
      way = "forward and backward" if gradient else "forward"
      # Backward: keys and values again (XLA sends those to the next device once for both ways), and their
      # gradients: in float32, and home in bfloat16.
      expected = moved or (2 * (CHIPS - 1) - 1 + 2 * (CHIPS - 1) + 1) * shard
      print(f"{group}: ring {way}: sends {found}, must send {expected}", flush=True)
      record.value(f"ring, {way}: sent by a chip", found / 2**20, "MiB", group=group)
      record.value(f"ring, {way}: must be sent", expected / 2**20, "MiB", group=group)
  record.write()


if __name__ == "__main__":
  main()
