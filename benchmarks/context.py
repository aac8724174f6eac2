"""Attention with its positions split over eight devices, as the length grows.

The value and gradient of one causal attention, beside that of the attention that jax computes whole (the
compiler splits it by the same layout): its time on simulated devices, and for `tpu:v5e:2x4` the peak memory
of each chip, arguments and results included, and what a ring sends beside what it must send. The compiler's
temporaries are no measure here: it gives 0.5 MiB for programs that hold accumulators of 32 MiB.

  python -m benchmarks context            the chips' part needs the TPU compiler (`tpu-aot`)
  python -m benchmarks.context documents  the groups with that in their names
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import nnx_parallel as nxp
from benchmarks.harness import Record, measure
from nnx_parallel.attention.find import queries_over
from nnx_parallel.report.program.collectives import collectives
from nnx_parallel.report.topology import missing_compiler, read_machine

CHIPS, HEADS, KEY_HEADS, WIDTH = 8, 16, 8, 128
LENGTHS = (8192, 32768, 131072)
TIMED_LENGTHS, TIMED_WIDTH = (1024, 2048), 32
CHIP = "tpu:v5e:2x4"
PACKED = 131072  # positions of a sequence that is packed with documents
LAYOUT = PartitionSpec(None, "context")


def whole(q: Any, k: Any, v: Any) -> Any:
  return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def found(attention: Any) -> Any:
  """The attention of jax as a step of `train_step(attention=...)` computes it."""
  run = nxp.with_layers(lambda _, given: whole(*given), attention=attention)

  def attend(q: Any, k: Any, v: Any) -> Any:
    with queries_over("context"):
      return run(None, (q, k, v))

  return attend


WAYS = {
  "ring, zigzag": nxp.parallel.context_attention(causal=True, zigzag=True),
  "ring": nxp.parallel.context_attention(causal=True),
  "all to all": nxp.parallel.context_attention(how="ulysses", causal=True),
  "found, ring": found("ring"),
  "found, all to all": found("ulysses"),
  "found, blocks": found("blockwise"),
  "whole": whole,
}
KERNELS = {  # for TPUs only
  "all to all, by kernel": nxp.parallel.context_attention(how="ulysses", causal=True, fused=True),
}

NOTES = [
  "Times: 8 simulated devices on the cores of one shared machine, so only ratios say something. The tiles of"
  " a causal ring are 0.56 of all, with zigzag 0.53; those of the device with most work in each visit, for"
  " which the others wait, add up to 1.0 and 0.53 of what a device has without a mask. `found` is what"
  ' `train_step(attention=...)` makes of the attention of jax ("blockwise" gathers keys and values).',
  "Forward must be sent: 7 shards of keys and values. Forward and backward: those again, but for a send that"
  " the compiler shares between both ways, and the gradients, in float32 until they go home in bfloat16; this"
  " formula was written after reading the compiled program.",
  f"Packed documents: a causal ring over {PACKED:,} positions and {CHIPS} devices, in tiles of 512 x 512. The"
  " least is half of the square of each document's length. At each visit, the other devices wait for the"
  " device with most tiles: the last column is the sum of these tiles over the visits, times the number of"
  " devices. Counted from the data, without a compiler.",
]


def documents(draw: np.random.Generator) -> dict[str, list[int]]:
  """The lengths of the documents of some sequences."""
  found = {"8 of equal length": [PACKED // 8] * 8, "one of 65,536, 16 of 4,096": [65536] + [4096] * 16}
  for mean in (8, 9):
    lengths: list[int] = []
    while (rest := PACKED - sum(lengths)) > 0:
      lengths.append(min(int(draw.lognormal(mean, 1.2)) + 64, rest))
    found[f"{len(lengths)} of log-normal length, up to {max(lengths):,}"] = lengths
  return found


def packed(record: Record, group: str, lengths: list[int]) -> None:
  """Adds the tiles that a causal ring computes for documents of these lengths, in several orders."""
  attend, zigzag = WAYS["ring"], WAYS["ring, zigzag"]
  ids = np.repeat(np.arange(len(lengths)), lengths)[None]
  given = {"segment_ids": ids, "positions": np.concatenate([np.arange(n) for n in lengths])[None]}
  orders = {
    "one document, zigzag": zigzag.tiles(PACKED, CHIPS),
    "as packed": attend.tiles(PACKED, CHIPS, **given),
    "zigzag of the sequence": zigzag.tiles(PACKED, CHIPS, segment_ids=nxp.parallel.zigzag(ids, CHIPS)),
    "zigzag of each long document": attend.tiles(
      PACKED, CHIPS, **nxp.parallel.zigzag(given, CHIPS, segment_ids=ids)
    ),
  }
  least = sum(n * (n + 1) / 2 for n in lengths) / 512**2
  for order, tiles in orders.items():
    record.value(f"{order}: tiles over the least", round(float(tiles.sum() / least), 2), "", group=group)
    slowest = float(CHIPS * tiles.max(0).sum() / least)
    record.value(f"{order}: of the slowest devices", round(slowest, 2), "", group=group)


def summed(attend: Any, q: Any, k: Any, v: Any) -> Any:
  return attend(q, k, v).astype(jnp.float32).sum()


def timed(record: Record, group: str, length: int) -> None:
  """Adds the time of each way on simulated devices."""
  mesh, draw = nxp.make_mesh(context=CHIPS), np.random.default_rng(0).normal
  shapes = [(1, length, heads, TIMED_WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
  with jax.set_mesh(mesh):
    given = [
      jax.device_put(draw(size=shape).astype(np.float32), NamedSharding(mesh, LAYOUT)) for shape in shapes
    ]
    cases = {
      name: functools.partial(
        jax.jit(jax.value_and_grad(functools.partial(summed, way), (0, 1, 2))).lower(*given).compile(),
        *given,
      )
      for name, way in WAYS.items()
    }
  record.compare(measure(cases, rounds=9, warmup=1), baseline="whole", group=group)


def program(attend: Any, length: int, mesh: Any, gradient: bool = True) -> Any:
  """The compiled attention of one sequence, and its gradient."""
  layout = NamedSharding(mesh, LAYOUT)
  shapes = [(1, length, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
  given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=layout) for shape in shapes]
  function = jax.value_and_grad(functools.partial(summed, attend), (0, 1, 2)) if gradient else attend
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return jax.jit(function).lower(*given).compile()


def sent(compiled: Any) -> int:
  """The bytes that a chip sends by collective-permute."""
  items = collectives(compiled.as_text(), {"context": CHIPS})
  return sum(item.sent_bytes for item in items if "permute" in item.kind)


def compiled(record: Record, group: str, length: int) -> None:
  """Adds the memory of each way on chips, and what a ring sends."""
  mesh = nxp.report.topology_mesh(CHIP, context=CHIPS)
  for name, attend in {**WAYS, **KERNELS}.items():
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
  for name in ("ring, zigzag", "found, ring"):
    for gradient, moved in ((False, (CHIPS - 1) * shard), (True, None)):
      moves = sent(program({**WAYS, **KERNELS}[name], length, mesh, gradient))
      way = "forward and backward" if gradient else "forward"
      # Backward: keys and values again (XLA sends those to the next device once for both ways), and their
      # gradients: in float32, and home in bfloat16.
      expected = moved or (2 * (CHIPS - 1) - 1 + 2 * (CHIPS - 1) + 1) * shard
      print(f"{group}: {name}, {way}: sends {moves}, must send {expected}", flush=True)
      record.value(f"{name}, {way}: sent by a chip", moves / 2**20, "MiB", group=group)
      record.value(f"{name}, {way}: must be sent", expected / 2**20, "MiB", group=group)


def main(part: str = "") -> None:
  """Makes the record, or only the groups with a part of their name."""
  title, heads = __doc__.split("\n", 1)[0], f"{HEADS} heads of"
  record = Record("context", title, command="python -m benchmarks context", notes=NOTES)
  groups: dict[str, Callable[[], None]] = {}

  def add(group: str, function: Callable[..., None], of: Any) -> None:
    groups[group] = functools.partial(function, record, group, of)

  for length in TIMED_LENGTHS:
    add(f"{length} positions, float32, {heads} {TIMED_WIDTH}, {KEY_HEADS} of keys", timed, length)
  for name, lengths in documents(np.random.default_rng(0)).items():
    add(f"documents: {name}", packed, lengths)
  for length in LENGTHS:
    add(f"{length // 1024}k positions, bfloat16, {heads} {WIDTH}, {KEY_HEADS} of keys", compiled, length)
  here = [group for group in groups if "bfloat16" not in group or not missing_compiler(read_machine(CHIP))]
  record.make(groups, [group for group in here if part in group])


if __name__ == "__main__":
  main(*sys.argv[1:])
