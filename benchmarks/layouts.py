"""Small steps whose communication is known by hand, and the least that each can send.

Layouts that a plan makes, and the schemes that are written with `shard_map`: a ring of attention blocks,
a pipeline, experts. Each is compiled for simulated CPU devices and, where their compilers are
installed (`tpu-aot`, `gpu-aot`), for TPU and NVIDIA.

    python -m benchmarks.layouts
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel.report.topology import missing_compiler, read_machine

# So many examples that gathering the parameters is cheaper than gathering activations.
WIDTH, HIDDEN, BATCH = 64, 128, 1024
PARAMS = 2 * WIDTH * HIDDEN * 4
FLOAT = 4
DEVICES = 8


class MLP(nnx.Module):
  """Two bias-free layers with logical names."""

  def __init__(self, rngs: nnx.Rngs):
    self.up = nnx.Linear(
      WIDTH, HIDDEN, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": ("embed", "mlp")}
    )
    self.down = nnx.Linear(
      HIDDEN, WIDTH, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": ("mlp", "embed")}
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down(nnx.relu(self.up(x)))


def init() -> MLP:
  return MLP(nnx.Rngs(0))


def loss(model: MLP, batch: jax.Array) -> jax.Array:
  return jnp.mean(jnp.square(model(batch)))


def batch() -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


def plan(mesh: Any = None, optimizer: Any = None, zero: int = 0, **axes: int) -> nxp.Plan:
  """A plan of the MLP: batch over data and fsdp, embed over fsdp, mlp over tensor."""
  rules = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor")
  mesh = mesh or nxp.abstract_mesh({"data": 1, "fsdp": 1, "tensor": 1, **axes})
  return nxp.plan(init, mesh, rules, optimizer=optimizer or optax.sgd(0.1), zero=zero)


# Schemes by hand: each is a loss with its gradients, on one mesh axis (or two) ---------------------

BLOCK, HEAD = 32, 16
"""Tokens that one device of the ring holds, and the width of its one head."""


def ring_attention(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Attention over a sequence split along `ring`: keys and values go round, queries stay."""
  size = mesh.shape["ring"]
  around = [(i, (i + 1) % size) for i in range(size)]

  def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    def part(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
      weights = jnp.exp(q @ k.T / HEAD)
      return weights @ v, weights.sum(1, keepdims=True)

    def hop(carry: Any, _: None) -> tuple[Any, None]:
      k, v, top, bottom = carry
      k, v = jax.lax.ppermute((k, v), "ring", around)
      new_top, new_bottom = part(k, v)
      return (k, v, top + new_top, bottom + new_bottom), None

    (_, _, top, bottom), _ = jax.lax.scan(hop, (k, v, *part(k, v)), None, length=size - 1)
    return top / bottom

  mapped = jax.shard_map(attend, mesh=mesh, in_specs=P("ring"), out_specs=P("ring"))
  rows = jax.ShapeDtypeStruct((size * BLOCK, HEAD), jnp.float32, sharding=NamedSharding(mesh, P("ring")))
  step = jax.value_and_grad(lambda q, k, v: jnp.square(mapped(q, k, v)).sum(), argnums=(0, 1, 2))
  return step, (rows, rows, rows)


MICROBATCHES, MICROBATCH = 8, 16


def pipeline(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """GPipe: one layer on each device of `stage`, microbatches split along `data`."""
  stages = mesh.shape["stage"]
  onward = [(i, i + 1) for i in range(stages - 1)]

  def local_loss(weight: jax.Array, batch: jax.Array) -> jax.Array:
    weight = weight[0]
    # Declared as different on each replica before the loop: else their gradients are added in each tick.
    weight = jax.lax.pcast(weight, ("data",), to="varying")
    stage = jax.lax.axis_index("stage")
    here = jax.lax.pcast(jnp.zeros_like(batch[0]), ("stage",), to="varying")
    total = jax.lax.pcast(jnp.float32(0), ("data", "stage"), to="varying")

    def tick(carry: tuple[jax.Array, jax.Array], t: jax.Array) -> tuple[Any, None]:
      received, total = carry
      fresh = batch[jnp.minimum(t, MICROBATCHES - 1)]
      out = jnp.tanh(jnp.where(stage == 0, fresh, received) @ weight)
      done = (stage == stages - 1) & (t >= stages - 1)
      total += jnp.where(done, jnp.square(out).sum(), 0.0)
      return (jax.lax.ppermute(out, "stage", onward), total), None

    ticks = jnp.arange(MICROBATCHES + stages - 1)
    (_, total), _ = jax.lax.scan(tick, (here, total), ticks)
    return jax.lax.psum(total, ("data", "stage"))

  mapped = jax.shard_map(local_loss, mesh=mesh, in_specs=(P("stage"), P(None, "data")), out_specs=P())
  weights = (stages, WIDTH, WIDTH), P("stage")
  batch = (MICROBATCHES, MICROBATCH, WIDTH), P(None, "data")
  arguments = (
    jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    for shape, spec in (weights, batch)
  )
  return jax.value_and_grad(mapped), tuple(arguments)


TOKENS = 64
"""Tokens of one device, as many for each expert."""


def experts(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """One expert on each device of `expert`: tokens go out to them and come back."""

  def route(weight: jax.Array, x: jax.Array) -> jax.Array:
    there = jax.lax.all_to_all(x, "expert", 0, 0, tiled=True)
    return jax.lax.all_to_all(jnp.tanh(there @ weight[0]), "expert", 0, 0, tiled=True)

  mapped = jax.shard_map(route, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
  size = mesh.shape["expert"]
  arguments = (
    jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("expert")))
    for shape in ((size, WIDTH, WIDTH), (size * TOKENS, WIDTH))
  )
  step = jax.value_and_grad(lambda w, x: jnp.square(mapped(w, x)).sum(), argnums=(0, 1))
  return step, tuple(arguments)


@dataclasses.dataclass(frozen=True)
class Case:
  """A layout and the least that it can send in one step.

  Attributes:
    name: of the layout.
    axes: mesh axis -> size.
    least: `<kind>_<axis>` as budgets name them -> payload in bytes per step. A reduction that scatters
      is written as an all-reduce, which has the same payload, and which CPU programs use.
    why: where the figure comes from.
    options: of `plan`, for layouts; the scheme otherwise.
  """

  name: str
  axes: Mapping[str, int]
  least: Mapping[str, int]
  why: str
  options: Mapping[str, Any] | Callable[[Mesh], tuple[Callable[..., Any], tuple[Any, ...]]]

  def report(self, topology: str) -> nxp.report.CompileReport:
    """Compiles it for a machine."""
    if callable(self.options):
      mesh = nxp.report.topology_mesh(topology, **self.axes)
      step, arguments = self.options(mesh)
      return nxp.compile_report(jax.jit(step).lower(*arguments))
    options = dict(self.options)
    step = nxp.train_step(loss, microbatches=options.pop("microbatches", 1))
    laid = plan(**options, **self.axes)
    return nxp.compile_report(step, laid, batch=batch(), topology=topology)


_ACTIVATION = BATCH * WIDTH * FLOAT
_ROW = BLOCK * HEAD * FLOAT
_HOP = MICROBATCH // 2 * WIDTH * FLOAT
_TICKS = MICROBATCHES + 4 - 1
_ROUTED = TOKENS * WIDTH * FLOAT
CASES = (
  Case("dp", {"data": 8}, {"all_reduce_data": PARAMS + FLOAT}, "gradients once, the loss", {}),
  Case(
    "fsdp",
    {"fsdp": 8},
    {"all_gather_fsdp": PARAMS, "all_reduce_fsdp": PARAMS + FLOAT},
    "parameters once (two layers are kept whole until their gradient), gradients once, the loss",
    {},
  ),
  Case("tp", {"tensor": 8}, {"all_reduce_tensor": _ACTIVATION}, "the output of the second layer", {}),
  Case(
    "dp x tp",
    {"data": 4, "tensor": 2},
    {"all_reduce_data": PARAMS // 2 + FLOAT, "all_reduce_tensor": _ACTIVATION // 4},
    "half of the gradients, a quarter of the output",
    {},
  ),
  Case(
    "ZeRO-1",
    {"data": 8},
    {"all_reduce_data": PARAMS + FLOAT, "all_gather_data": PARAMS},
    "gradients once, updated parameters once",
    {"zero": 1, "optimizer": optax.adam(1e-3)},
  ),
  Case(
    "ZeRO-1, 4 microbatches",
    {"data": 8},
    {"all_reduce_data": PARAMS + FLOAT, "all_gather_data": PARAMS},
    "the same: gradients are summed before they are reduced",
    {"zero": 1, "optimizer": optax.adam(1e-3), "microbatches": 4},
  ),
  Case(
    "ZeRO-2",
    {"data": 8},
    {"all_reduce_data": PARAMS + FLOAT, "all_gather_data": PARAMS},
    "as ZeRO-1",
    {"zero": 2, "optimizer": optax.adam(1e-3)},
  ),
  Case(
    "ZeRO-2, 4 microbatches",
    {"data": 8},
    {"all_reduce_data": 4 * (PARAMS + FLOAT), "all_gather_data": PARAMS},
    "whole gradients are never kept, so each microbatch reduces its own",
    {"zero": 2, "optimizer": optax.adam(1e-3), "microbatches": 4},
  ),
  Case(
    "ring",
    {"ring": 8},
    {"collective_permute_ring": 4 * 7 * _ROW, "all_reduce_ring": FLOAT},
    "keys, values and their gradients 7 hops each, the loss",
    ring_attention,
  ),
  Case(
    "pipeline",
    {"data": 2, "stage": 4},
    {
      "collective_permute_stage": 2 * _TICKS * _HOP,
      "all_reduce_data": WIDTH * WIDTH * FLOAT + FLOAT,
      "all_reduce_stage": FLOAT,
    },
    "an activation and its gradient in each tick of the schedule, weights of a stage once, the loss",
    pipeline,
  ),
  Case(
    "experts",
    {"expert": 8},
    {"all_to_all_expert": 4 * _ROUTED, "all_reduce_expert": FLOAT},
    "tokens out and back, their gradients back and out, the loss",
    experts,
  ),
)


def machines() -> Iterator[str]:
  """Eight devices of each kind whose compiler is here."""
  texts = ("cpu:8", "tpu:v5e:2x4", "gpu:h100:1x8")
  return (text for text in texts if missing_compiler(read_machine(text)) is None)


def main() -> None:
  """Compiles every case for every machine and writes the record."""
  from benchmarks.harness import Record

  record = Record(
    "collective_bytes",
    "What each layout sends, over the least that it can send",
    "python -m benchmarks layouts",
    notes=[
      "Payload per step in bytes: what a group of devices holds together, summed over the collectives.",
      "Below 1 on TPU: its matrix products round float32 operands to bfloat16, and it sends them rounded.",
      "The least of each layout: "
      + "; ".join(f"{case.name}: {case.why}" for case in CASES if not case.why.startswith("as "))
      + ".",
    ],
  )
  for topology in machines():
    for case in CASES:
      report = case.report(topology)
      sent, least = sum(c.total_bytes for c in report.collectives), sum(case.least.values())
      kinds = ", ".join(f"{kind} {size}" for (kind,), size in report.bytes_by("kind").items())
      record.value(f"{case.name}: {kinds}; least {least}", sent / least, "of the least", group=topology)
      print(topology, case.name, sent, least, flush=True)
  record.write()


if __name__ == "__main__":
  main()
