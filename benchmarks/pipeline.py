"""Layers as a pipeline against the same microbatches without one, as the number of stages grows.

A train step of a stack of layers runs on data x stage. Simulated devices share the processor, so the time of
a step is the work of all stages, bubbles included. By theory, this time is
`ticks / (microbatches * virtual_stages)`
times the time of the step on data alone. The bytes sent between stages are printed beside the bytes that must
be sent. The record also has the temporaries of a small decoder as the number of microbatches grows, in the
order of GPipe, in 1F1B, and in 1F1B without recomputation.

  python -m benchmarks pipeline           bytes for TPU and GPU where their compilers are installed
"""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp
from benchmarks.harness import Record, measure
from nnx_parallel.report.topology import missing_compiler, read_machine

Schedule = nxp.parallel.Schedule
DEVICES, LAYERS, WIDTH, BATCH, MICROBATCHES = 8, 16, 256, 512, 16
TOKENS, LENGTH = 1024, 256
WAYS = {
  f"{stages} stages" + (f", {virtual_stages} virtual stages" if virtual_stages > 1 else ""): Schedule(
    stages, MICROBATCHES, LAYERS, virtual_stages
  )
  for stages, virtual_stages in ((2, 1), (4, 1), (8, 1), (2, 4), (4, 2), (4, 4), (8, 2))
}
ORDERS = {("gpipe", True): "GPipe", ("1f1b", True): "1F1B", ("1f1b", False): "1F1B, saving"}
"""An order, and whether layers are recomputed."""
MACHINES = ("cpu:8", "tpu:v5e:2x4", "gpu:h100:1x8")
NOTES = [
  f"Temporaries by microbatches: a decoder of {LAYERS} such layers, {TOKENS} tokens and microbatches of 4 x"
  f" {LENGTH} tokens, on data=2 x stage=4.",
  f"{LAYERS} layers of two products, width {WIDTH}; {BATCH} examples in {MICROBATCHES} microbatches, float32,"
  " sgd; 8 devices, data x stage; a tick keeps what its stages got. The baseline is"
  " the same step on data=8 with remat='full'. Ratios are below theory, because there each device also adds"
  " up the gradients of all layers, in each microbatch; in a pipeline those of its stage.",
  "Sent between stages, payload of a device, forward and backward: one microbatch from stage to stage in each"
  " tick, and one in the buffer from which stage 0 takes its input; after the last tick, one, and the results"
  " of all groups. With virtual stages, weights and their gradients are sent too, once in a step.",
]


class Layer(nnx.Module):
  """A residual layer of two products."""

  def __init__(self, rngs: nnx.Rngs):
    self.up = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
    self.down = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return x + self.down(nnx.gelu(self.up(x)))


class Stacked(nnx.Module):
  """Layers in a stack."""

  def __init__(self, rngs: nnx.Rngs):
    make = nnx.vmap(Layer, in_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    self.stack = make(rngs.split(LAYERS))

  def __call__(self, x: jax.Array) -> jax.Array:
    through = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return through(x, self.stack)


class Decoder(nnx.Module):
  """The layers between an embedding and a head."""

  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
    self.body = Stacked(rngs)
    self.head = nnx.Linear(WIDTH, TOKENS, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    return self.head(self.body(self.embed(tokens)))


def next_token_loss(model: Decoder, tokens: jax.Array) -> jax.Array:
  logits = model(tokens)[:, :-1]
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def loss(model: Stacked, x: jax.Array) -> jax.Array:
  return (model(x) ** 2).mean()


def plan_of(mesh: Any, kind: Any = Stacked) -> nxp.Plan:
  stage = "stage" if "stage" in mesh.shape else None
  rules = [
    nxp.LogicalRules(batch="data"),
    nxp.PathRules({r"(body\.)?stack\..*": (stage, None, None)}),
    nxp.replicate(),
  ]
  return nxp.plan(lambda: kind(nnx.Rngs(0)), mesh, rules, optimizer=optax.sgd(1e-3))


def step_of(way: nxp.parallel.Schedule | None, *order: Any) -> Any:
  if way is None:
    return nxp.train_step(loss, microbatches=MICROBATCHES, remat="full")
  pipeline = nxp.Pipeline("stage", way.virtual_stages, *(order or ("gpipe",)))
  return nxp.train_step(loss, microbatches=MICROBATCHES, pipeline=pipeline)


def sizes_of(way: nxp.parallel.Schedule | None) -> dict[str, int]:
  return {"data": DEVICES} if way is None else {"data": DEVICES // way.stages, "stage": way.stages}


def analytic(way: nxp.parallel.Schedule) -> int:
  """Bytes that a device sends by collective-permutes: of activations, forward and backward."""
  microbatch = BATCH // MICROBATCHES // (DEVICES // way.stages) * WIDTH * 4
  return 2 * (2 * way.ticks + 1 + way.groups + 1) * microbatch


def temporaries(mesh: Any, microbatches: int, *order: Any) -> float:
  """MiB of temporaries of a device, for microbatches of 4 sequences."""
  step = nxp.train_step(next_token_loss, microbatches=microbatches, pipeline=nxp.Pipeline("stage", 1, *order))
  batch = jax.ShapeDtypeStruct((4 * microbatches, LENGTH), jnp.int32)
  return nxp.compile_report(step, plan_of(mesh, Decoder), batch=batch).memory.temporaries / 2**20


def main() -> None:
  """Measures and writes the record."""
  title = __doc__.split("\n", 1)[0]
  record = Record("pipeline", title, command="python -m benchmarks pipeline", notes=NOTES)
  x = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype(np.float32)
  cases: dict[str, Any] = {}
  for name, way in {"no pipeline": None, **WAYS}.items():
    plan = plan_of(nxp.make_mesh(sizes_of(way)))
    model, optimizer = nxp.create_sharded_model(plan)
    batch, step = nxp.shard_batch(x, plan), step_of(way)
    cases[name] = functools.partial(step, model, optimizer, batch)
    memory = nxp.compile_report(step, plan, batch=batch).memory
    record.value(f"{name}: arguments of a device", memory.arguments / 2**20, "MiB")
    record.value(f"{name}: temporaries of a device", memory.temporaries / 2**20, "MiB")
    if way is not None:
      record.value(f"{name}: time by theory", way.ticks / (MICROBATCHES * way.virtual_stages), "x")
      record.value(f"{name}: bubble", 100 * way.bubble_ratio, "%")
  way = WAYS["4 stages"]
  plan = plan_of(nxp.make_mesh(sizes_of(way)))
  model, optimizer = nxp.create_sharded_model(plan)
  batch = nxp.shard_batch(x, plan)
  for order, label in [*ORDERS.items()][1:]:
    cases[f"4 stages, {label}"] = functools.partial(step_of(way, *order), model, optimizer, batch)
  record.compare(measure(cases, rounds=15, warmup=2), baseline="no pipeline")
  for text in MACHINES:
    if missing_compiler(read_machine(text)):
      continue
    mesh = nxp.report.topology_mesh(text, data=2, stage=4)
    for microbatches in (4, 16, 64):
      for order, label in ORDERS.items():
        found = temporaries(mesh, microbatches, *order)
        print(f"{text}: {microbatches} microbatches, {label}: {found:.2f} MiB", flush=True)
        group = f"temporaries on {text}"
        record.value(f"{microbatches} microbatches: {label}", found, "MiB", group=group)
  for text in MACHINES:
    if missing_compiler(read_machine(text)):
      continue
    for name, way in WAYS.items():
      plan = plan_of(nxp.report.topology_mesh(text, **sizes_of(way)))
      batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
      report = nxp.compile_report(step_of(way), plan, batch=batch)
      found = [item for item in report.collectives if item.axes == ("stage",) and item.bytes > 4]
      activations = sum(item.total_bytes for item in found if "ppermute" in item.op)
      others = sum(item.total_bytes for item in found if "ppermute" not in item.op)
      print(f"{text}: {name}: {activations}, must {analytic(way)}; others {others}", flush=True)
      record.value(f"{name}: activations sent", activations, "bytes", group=text)
      record.value(f"{name}: activations that must be sent", analytic(way), "bytes", group=text)
      record.value(f"{name}: weights sent", others, "bytes", group=text)
  record.write()


if __name__ == "__main__":
  main()
