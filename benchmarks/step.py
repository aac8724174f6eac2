"""One train step: its host time by number of Variables, and whole steps against hand-written ones.

Host time is against plain `jax.jit` on a flat donated list. The program is the same in every case: SGD on a
sum of squares over parameters of four elements, so that what is timed is the work between two dispatches, not
the arithmetic. Nothing is waited for inside a timing.

Whole steps are those of the `digits` MLP and of a transformer on five layouts, against `by_hand.py`, with
what both programs compute and send.

    python -m benchmarks step                             both tables
    python benchmarks/step.py --name step_py311 --part host 10 100      one of them, into another file
"""

from __future__ import annotations

import os
import sys

DEVICES = 8
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES}")

import argparse  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import by_hand  # noqa: E402
import nnx_parallel as nxp  # noqa: E402
from harness import Record, Timing, measure  # noqa: E402
from nnx_parallel.recipes.digits import read_digits  # noqa: E402
from nnx_parallel.report.collectives import collectives  # noqa: E402
from nnx_parallel.report.cost import cost  # noqa: E402

SIZES = (10, 100, 1000, 4000)
PLAIN, PERSON, OURS = "jax.jit, flat list", "by hand", "nxp.train_step"


class Pile(nnx.Module):
  """`count` parameters in `nnx.Linear` layers, two in each."""

  def __init__(self, count: int):
    rngs = nnx.Rngs(0)
    self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(count // 2)])


def loss_fn(model: Pile, scale: jax.Array) -> jax.Array:
  # One stack: a chain of thousands of additions would take minutes to compile.
  parts = [(layer.kernel[...] ** 2).sum() + (layer.bias[...] ** 2).sum() for layer in model.layers]
  return jnp.stack(parts).sum() * scale


def plain(arrays: list[jax.Array], sharding: Any) -> Callable[[], jax.Array]:
  """The best that a person writes by hand: a flat list, donated, with pinned output shardings."""

  def run(state: list[jax.Array], scale: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(parameters: list[jax.Array]) -> jax.Array:
      return jnp.stack([(p**2).sum() for p in parameters]).sum() * scale

    *parameters, count = state
    value, grads = jax.value_and_grad(loss)(parameters)
    return [*(p - 1e-3 * g for p, g in zip(parameters, grads, strict=True)), count + 1], value

  pinned = {} if sharding is None else {"out_shardings": ([sharding] * len(arrays), None)}
  step = jax.jit(run, donate_argnums=0, **pinned)
  state = [jnp.copy(array) for array in arrays]
  scale = jnp.ones(())

  def case() -> jax.Array:
    nonlocal state
    state, value = step(state, scale)
    return value

  return case


def live(count: int, devices: int) -> tuple[Pile, nnx.Optimizer[Pile]]:
  mesh = nxp.make_mesh(data=devices, devices=jax.devices()[:devices])
  plan = nxp.plan(lambda: Pile(count), mesh, nxp.replicate(), optimizer=optax.sgd(1e-3))
  return nxp.create_sharded_model(plan)


def ours(count: int, devices: int) -> Callable[[], jax.Array]:
  model, optimizer = live(count, devices)
  step, scale = nxp.train_step(loss_fn), jnp.ones(())
  return lambda: step(model, optimizer, scale)["loss"]


def flax_step(kind: str, count: int, devices: int) -> Callable[[], jax.Array]:
  model, optimizer = live(count, devices)
  scale = jnp.ones(())

  def run(model: Pile, optimizer: nnx.Optimizer[Pile], scale: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(loss_fn)(model, scale)
    optimizer.update(model, grads)
    return value

  if kind == "nnx.jit_partial":

    def pure(model: Pile, optimizer: nnx.Optimizer[Pile], scale: jax.Array) -> jax.Array:
      value, grads = nnx.value_and_grad(loss_fn, graph=False)(model, scale)
      optimizer.update(model, grads)
      return value

    bound = nnx.jit_partial(pure, model, optimizer, graph=False, donate_argnums=0)
    return lambda: bound(scale)
  step = nnx.jit(run, donate_argnums=(0, 1))
  if kind == "nnx.cached_partial":
    cached = nnx.cached_partial(step, model, optimizer)
    return lambda: cached(scale)
  return lambda: step(model, optimizer, scale)


def host_times(record: Record, sizes: tuple[int, ...]) -> None:
  for devices in (1, DEVICES):
    for count in sizes:
      mesh = nxp.make_mesh(data=devices, devices=jax.devices()[:devices])
      sharding = NamedSharding(mesh, PartitionSpec())
      model, optimizer = live(count, devices)
      arrays = [leaf.get_raw_value() for leaf in jax.tree.leaves(nnx.state(model), is_leaf=_is_variable)]
      arrays.append(optimizer.step.get_raw_value())
      del model, optimizer
      cases = {PLAIN: plain(arrays, sharding), OURS: ours(count, devices)}
      if count <= 1000:
        kinds = ("nnx.jit", "nnx.cached_partial", "nnx.jit_partial")
        cases |= {kind: flax_step(kind, count, devices) for kind in kinds}
      few = count >= 1000
      timings = measure(cases, rounds=15 if few else 40, calls=3 if few else 20, wait=False)
      group = f"{count} Variables, {devices} device{'s' if devices > 1 else ''}"
      record.compare(timings, baseline=PLAIN, group=group)
      # A busy machine stretches the clock, not the time that this thread was running.
      pair = {name: cases[name] for name in (PLAIN, OURS)}
      ratio = _processor_time(pair, rounds=15 if few else 60, calls=3 if few else 50)
      record.value("nxp.train_step / jax.jit, processor time of the calling thread", ratio, "", group=group)
      _say(group, timings, PLAIN)


def _processor_time(cases: dict[str, Callable[[], jax.Array]], *, rounds: int, calls: int) -> float:
  spent: dict[str, list[float]] = {name: [] for name in cases}
  for i in range(rounds):
    for name in sorted(cases, reverse=bool(i % 2)):
      result = None
      began = time.thread_time()
      for _ in range(calls):
        result = cases[name]()
      spent[name].append(time.thread_time() - began)
      jax.block_until_ready(result)
  return Timing("", tuple(spent[OURS])).ratio(Timing("", tuple(spent[PLAIN])))[1]


def whole_steps(record: Record) -> None:
  pixels, labels = read_digits()
  digits = {"pixels": pixels[:512], "labels": labels[:512]}
  jobs = {
    "digits MLP": by_hand.classifier(512, digits),
    "4-layer transformer": by_hand.transformer(128, 8, 4, 16, 64),
  }
  tx = optax.adamw(1e-3)
  for job_name, job in jobs.items():
    for layout in by_hand.LAYOUTS:
      plan = job.plan(layout, tx)
      model, optimizer = nxp.create_sharded_model(plan)
      batch = nxp.shard_batch(job.batch, plan)
      parameters = by_hand.parameters_of(model)
      hand, state = by_hand.step_by_hand(job, tx, parameters, by_hand.moments_of(plan, parameters))
      step = nxp.train_step(job.loss)
      group = f"{job_name}, {layout}"
      lowered = {PERSON: hand.lower(parameters, state, batch), OURS: step.lower(model, optimizer, batch)}
      for name, program in lowered.items():
        text = program.compile().as_text()
        sent = sum(c.total_bytes for c in collectives(text, dict(plan.mesh.shape)))
        record.value(f"{name}: FLOPs per device", cost(text).flops, "", group=group)
        record.value(f"{name}: bytes in collectives", sent, "bytes", group=group)
      cases = {
        PERSON: _repeat(hand, parameters, state, batch),
        OURS: lambda step=step, m=model, o=optimizer, b=batch: step(m, o, b)["loss"],
      }
      timings = measure(cases, rounds=20, calls=5)
      record.compare(timings, baseline=PERSON, group=group)
      _say(group, timings, PERSON)


def _repeat(step: Any, parameters: Any, state: Any, batch: Any) -> Callable[[], jax.Array]:
  def case() -> jax.Array:
    nonlocal parameters, state
    parameters, state, loss = step(parameters, state, batch)
    return loss

  return case


def _say(group: str, timings: dict[str, Timing], baseline: str) -> None:
  print(group, {k: round(t.ratio(timings[baseline])[1], 2) for k, t in timings.items()}, flush=True)


def _is_variable(node: Any) -> bool:
  return isinstance(node, nnx.Variable)


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("sizes", nargs="*", type=int, default=SIZES)
  parser.add_argument("--name", default="step", help="name of the files in benchmarks/results")
  parser.add_argument("--part", choices=("host", "whole"), help="one of the two tables")
  chosen = parser.parse_args()
  record = Record(
    chosen.name,
    "One train step: host time by number of Variables, and whole steps against hand-written ones",
    command=" ".join(["python benchmarks/step.py", *sys.argv[1:]]),
    notes=[
      "Each host case runs the same SGD update; `jax.jit, flat list` is written by hand, updates no module.",
      "`nnx.cached_partial` and `nnx.jit_partial` (`graph=False`) do not notice when a submodule is replaced;"
      " `nxp.train_step` does.",
      "Whole steps are AdamW on 8 simulated devices, waited for every five; `by hand` has no flax in it, and"
      " the same layouts, pinned and donated.",
      f"Load of the machine when the record was made: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
    ],
  )
  if chosen.part != "whole":
    host_times(record, tuple(chosen.sizes))
  if chosen.part != "host":
    whole_steps(record)
  record.write()


if __name__ == "__main__":
  main()
