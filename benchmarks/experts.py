"""Experts over a mesh axis against all experts on all tokens, as the number of experts grows.

The benchmark computes the value and the gradients of one layer of gated experts on data x expert, with two
experts for each token. It prints the bytes that are sent and the bytes that must be sent. If the TPU compiler
is here, it compares grouped products with blocks of rows.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nnx_parallel as nxp
from benchmarks.harness import Record, measure
from benchmarks.overlap import estimates
from nnx_parallel.report.program import hlo
from nnx_parallel.report.program.collectives import collectives
from nnx_parallel.report.topology import missing_compiler, read_machine

SIZES = {"data": 2, "expert": 4}
TOKENS, WIDTH, HIDDEN, TOP_K = 2048, 256, 128, 2
MACHINES = ("cpu:8", "tpu:v5e:2x4", "gpu:h100:1x8")
NOTES = [
  f"Mesh data=2 x expert=4; {TOKENS} tokens, {WIDTH} features, hidden width {HIDDEN}, {TOP_K} experts for"
  " each token, float32, value and gradients. Dense: all experts on all tokens of a device, masked, split by"
  " the compiler. Capacity 1.25; without drops, buffer 1.1 and blocks of 128 rows.",
  "Sent: payload of all-to-alls of tokens, as compiled and as it must be; without drops, of the first round"
  " and of one more, of a quarter of its size. For the TPU all arrays are bfloat16: of float32 arrays it"
  " would send in bfloat16 what only products read, which it computes in bfloat16 by default. Its all-to-all"
  " is ragged: the figure is the most that it can send.",
  "Rows of an exchange: of one device, on a mesh of 8 devices over `expert` with random logits, as compiled,"
  " with the further rounds that this routing needs. Least: each token once for each device that it needs."
  " By choice: each token once for each of its experts.",
  "Cycles: of one v5e chip without an exchange, bfloat16, value and gradients, with an even load, as the TPU"
  " compiler estimates them. It has no estimate for the kernel of grouped products, which is counted with the"
  " least that its FLOPs take. Blocks: 512 rows; half of the last block of each expert is empty.",
]
WAYS = {
  "capacity": functools.partial(nxp.parallel.experts, capacity=1.25),
  "dropless": functools.partial(nxp.parallel.experts, block=128),
}
ROUTINGS = ((8, 2, 1024), (64, 8, 1024), (64, 8, 8192), (256, 8, 8192))
"""The number of experts, of experts for each token, and of tokens on each device."""
CHIP = "tpu:v5e:2x2"
FLOPS_OF_CYCLE = 2 * 4 * 128 * 128  # of a v5e chip
PRODUCTS = ((16, 2, 8192, 2048, 4096), (64, 8, 8192, 2048, 1024))
"""The number of experts, of experts for each token, of tokens, of features, and the hidden width."""


def dense(_: Any, parameters: Any, x: Any, routing: nxp.parallel.Routing) -> Any:
  """All experts on all tokens."""
  wide = jax.nn.silu(jnp.einsum("td,edf->etf", x, parameters["gate"]))
  rows = jnp.einsum("etf,efd->etd", wide * jnp.einsum("td,edf->etf", x, parameters["up"]), parameters["down"])
  chosen = jax.nn.one_hot(routing.experts, rows.shape[0]) * routing.weights[..., None]
  return jnp.einsum("etd,te->td", rows, chosen.sum(1)), 0


def program(
  layer: Any,
  mesh: Mesh,
  count: int,
  dtype: Any = jnp.float32,
  *,
  top_k: int = TOP_K,
  tokens: int = TOKENS,
  width: int = WIDTH,
  hidden: int = HIDDEN,
) -> tuple[Any, Any]:
  """The compiled value and gradients, and their abstract arguments."""

  def struct(spec: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(spec)))

  axis = "expert" if "expert" in mesh.axis_names else None
  wide = struct(axis, count, width, hidden)
  parameters = {"gate": wide, "up": wide, "down": struct(axis, count, hidden, width)}
  given = parameters, struct(mesh.axis_names, tokens, width), struct(mesh.axis_names, tokens, count)

  def loss(parameters: Any, x: Any, logits: Any) -> Any:
    y, _ = layer(nxp.parallel.mlp_experts, parameters, x, nxp.parallel.route(logits, top_k))
    return (y.astype(jnp.float32) ** 2).sum()

  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*given).compile(), given


def drawn(given: Any) -> Any:
  """Random arrays for the abstract arguments of a program."""
  keys = iter(jax.random.split(jax.random.key(0), 9))
  return jax.tree.map(
    lambda s: jax.device_put(jax.random.normal(next(keys), s.shape, s.dtype) / 8, s.sharding), given
  )


def analytic(name: str, count: int, size: int) -> int:
  """The bytes of tokens in the all-to-alls of a device; `size` is the number of bytes of one element."""
  tokens = TOKENS // 8
  if name == "capacity":
    return 4 * count * math.ceil(1.25 * tokens * TOP_K / count) * WIDTH * size
  share = 1 - math.comb(count - count // 4, TOP_K) / math.comb(count, TOP_K)
  slots = math.ceil(1.1 * tokens * share)
  return 5 * 4 * (slots + math.ceil(slots / 4)) * WIDTH * size


def rows(count: int, top_k: int, tokens: int) -> tuple[float, float]:
  """The rows that a device sends in an exchange of random routings: the least (a mean), and as compiled."""
  mesh = nxp.make_mesh(expert=8)
  compiled, _ = program(WAYS["dropless"], mesh, count, top_k=top_k, tokens=8 * tokens)
  found = [c for c in collectives(compiled.as_text(), {"expert": 8}) if c.kind == "all-to-all"]
  first = max(c.bytes for c in found) // (WIDTH * 4)
  logits = jax.random.normal(jax.random.key(0), (8, tokens, count))
  devices = np.asarray(nxp.parallel.route(logits, top_k).experts) // (count // 8)
  pairs = (devices[..., None] == np.arange(8)).any(2).sum(1)
  more = max(0, math.ceil((pairs.max() - first // 8) / math.ceil(first // 8 / 4)))
  return pairs.sum(1).mean(), first + more * 8 * math.ceil(first // 8 / 4)


def products(record: Record, count: int, top_k: int, tokens: int, width: int, hidden: int) -> None:
  """Compares blocks of rows with grouped products, on one chip."""
  group = f"{count} experts of {width} x {hidden}, {top_k} for each of {tokens} tokens"
  chip = Mesh(nxp.report.topology_mesh(CHIP, data=4).devices.flat[:1], ("data",))
  for name in ("blocks", "grouped"):
    jax.clear_caches()  # of traces: both have the same function of an expert
    with contextlib.ExitStack() as stack:
      if name == "blocks":
        stack.enter_context(mock.patch.object(jax.lax, "platform_dependent", elsewhere))
      compiled, _ = program(
        nxp.parallel.experts,
        chip,
        count,
        jnp.bfloat16,
        top_k=top_k,
        tokens=tokens,
        width=width,
        hidden=hidden,
      )
    cycles = cycles_of(hlo.parse(compiled.as_text()), tokens * top_k / 512 + count / 2)
    if name == "grouped":  # forward, again in the backward pass, and two products for each there
      cycles += 2 * 3 * tokens * top_k * width * hidden * 4 / FLOPS_OF_CYCLE
    temporaries = compiled.memory_analysis().temp_size_in_bytes / 2**20
    print(f"{group}: {name}: {cycles / 1e6:.1f} M cycles, {temporaries:.0f} MiB", flush=True)
    record.value(f"{name}: cycles", round(cycles / 1e6, 1), "M", group=group)
    record.value(f"{name}: temporaries", temporaries, "MiB", group=group)


def elsewhere(*args: Any, tpu: Any, default: Any) -> Any:
  """What the platforms without a kernel of grouped products run, in place of `platform_dependent`."""
  return default(*args)


def cycles_of(program: hlo.Program, blocks: float) -> float:
  """The TPU compiler's estimate of cycles; loops of unknown length, over blocks, run `blocks` times."""
  total = 0.0
  for run, estimate in estimates(program):
    loop = run.caller is not None and run.caller.opcode == "while"
    over_blocks = loop and program.trips(run.caller) is None
    total += run.times * estimate * (blocks if over_blocks else 1)
  return total


def main() -> None:
  """Measures and writes the record."""
  title = __doc__.split("\n", 1)[0]
  record = Record("experts", title, command="python -m benchmarks experts", notes=NOTES)
  mesh = nxp.make_mesh(SIZES)
  for count in (4, 8, 16, 32):
    group, cases = f"{count} experts", {}
    for name, layer in {"dense": dense, **WAYS}.items():
      compiled, given = program(layer, mesh, count)
      cases[name] = functools.partial(compiled, *drawn(given))
      temporaries = compiled.memory_analysis().temp_size_in_bytes / 2**20
      record.value(f"{name}: temporaries of a device", temporaries, "MiB", group=group)
    record.compare(measure(cases, rounds=9, warmup=2), baseline="dense", group=group)
  for count, top_k, tokens in ROUTINGS:
    group = f"{count} experts, {top_k} for each of {tokens} tokens"
    least, sent = rows(count, top_k, tokens)
    print(f"{group}: {sent / least:.2f} of the least", flush=True)
    record.value("rows of an exchange, least", least, "", group=group)
    record.value("rows of an exchange, dropless", sent, "", group=group)
    record.value("rows of an exchange, by choice", tokens * top_k, "", group=group)
  for text in MACHINES:
    if missing_compiler(read_machine(text)):
      continue
    dtype: Any = jnp.bfloat16 if text.startswith("tpu") else jnp.float32
    for name, layer in WAYS.items():
      compiled, _ = program(layer, nxp.report.topology_mesh(text, **SIZES), 8, dtype)
      found = [c for c in collectives(compiled.as_text(), SIZES) if c.kind == "all-to-all"]
      sent, wanted = (
        sum(c.total_bytes for c in found if c.bytes > 8192),
        analytic(name, 8, jnp.dtype(dtype).itemsize),
      )
      print(f"{text}: {name}: sends {sent}, must send {wanted}", flush=True)
      record.value(f"{name}: sent in all-to-alls", sent, "bytes", group=text)
      record.value(f"{name}: must be sent", wanted, "bytes", group=text)
  if not missing_compiler(read_machine(CHIP)):
    for shapes in PRODUCTS:
      products(record, *shapes)
  record.write()


if __name__ == "__main__":
  main()
