"""One train step: its host time by number of Variables, and whole steps against hand-written ones.

Host time is against plain `jax.jit` on a flat donated list. The program is the same in every case: SGD on a
sum of squares over parameters of four elements, so that what is timed is the work between two dispatches, not
the arithmetic. Nothing is waited for inside a timing.

Whole steps are those of the `digits` MLP and of a transformer on five layouts, against `by_hand.py`, with
what both programs compute and send.

    python -m benchmarks step                                        both tables
    python -m benchmarks.step --part host --suffix _py311 10 100     one of them, into another file
"""

from __future__ import annotations

import os
import sys

DEVICES = 8
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES}")

import argparse  # noqa: E402
import collections  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import nnx_parallel as nxp  # noqa: E402
from benchmarks import by_hand  # noqa: E402
from benchmarks.harness import Record, Timing, measure  # noqa: E402
from nnx_parallel.recipes.digits import read_digits  # noqa: E402
from nnx_parallel.report.program.collectives import collectives  # noqa: E402
from nnx_parallel.report.program.cost import cost  # noqa: E402

SIZES = (10, 100, 1000, 4000)
WHOLE_LOSS = 1000
"""From more Variables than these, XLA takes minutes to compile the sum of all their squares."""
PLAIN, PERSON, OURS = "jax.jit, flat list", "by hand", "nxp.train_step"
FLOOR = "by hand, live"
Live = tuple[Any, Any]


class Pile(nnx.Module):
  """`count` parameters in `nnx.Linear` layers, two in each."""

  def __init__(self, count: int):
    rngs = nnx.Rngs(0)
    self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(count // 2)])


@jax.custom_vjp
def squares(parameters: list[jax.Array]) -> jax.Array:
  """Half the sum of squares, of which only the gradient is ever asked for; the value is that of the first."""
  return (parameters[0] ** 2).sum() / 2


def _keep(parameters: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
  return squares(parameters), parameters


def _times(parameters: list[jax.Array], factor: jax.Array) -> tuple[list[jax.Array]]:
  return ([p * factor for p in parameters],)


squares.defvjp(_keep, _times)


def loss_of(parameters: list[jax.Array], scale: jax.Array) -> jax.Array:
  if len(parameters) > WHOLE_LOSS:
    return squares(parameters) * scale
  # One stack: a chain of thousands of additions would take minutes to compile.
  return jnp.stack([(p**2).sum() for p in parameters]).sum() * scale


def loss_fn(model: Pile, scale: jax.Array) -> jax.Array:
  return loss_of([p for layer in model.layers for p in (layer.kernel[...], layer.bias[...])], scale)


def flat_step(count: int, sharding: Any) -> Any:
  """The best that a person writes by hand: `count` arrays in a flat list, donated, with pinned layouts."""

  def run(state: list[jax.Array], scale: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    *parameters, steps = state
    value, grads = jax.value_and_grad(loss_of)(parameters, scale)
    return [*(p - 1e-3 * g for p, g in zip(parameters, grads, strict=True)), steps + 1], value

  return jax.jit(run, donate_argnums=0, out_shardings=([sharding] * count, None))


def plain(arrays: list[jax.Array], sharding: Any) -> Callable[[], jax.Array]:
  step = flat_step(len(arrays), sharding)
  state = [jnp.copy(array) for array in arrays]
  scale = jnp.ones(())

  def case() -> jax.Array:
    nonlocal state
    state, value = step(state, scale)
    return value

  return case


def live(count: int, devices: int) -> Live:
  mesh = nxp.make_mesh(data=devices, devices=jax.devices()[:devices])
  plan = nxp.plan(lambda: Pile(count), mesh, nxp.replicate(), optimizer=optax.sgd(1e-3))
  return nxp.create_sharded_model(plan)


def copied(objects: Live) -> Live:
  """The same model and optimizer with arrays of their own: faster than to create thousands of Variables."""
  graphdef, state = nnx.split(objects)
  return nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


def ours(objects: Live) -> Callable[[], Any]:
  model, optimizer = objects
  step, scale = nxp.train_step(loss_fn), jnp.ones(())
  return lambda: step(model, optimizer, scale)


def floor(objects: Live, sharding: Any) -> Callable[[], jax.Array]:
  """The least that keeps a module live: reads all Variables, dispatches, writes them; looks at nothing."""
  model, optimizer = objects
  layers = [variable for layer in model.layers for variable in (layer.kernel, layer.bias)]
  variables = [*layers, optimizer.step]
  scale = jnp.ones(())
  step = flat_step(len(variables), sharding)
  put = vars(nnx.Variable)["_raw_value"].__set__
  exhaust = collections.deque[Any](maxlen=0).extend

  def case() -> jax.Array:
    new, value = step([variable._raw_value for variable in variables], scale)
    exhaust(map(put, variables, new))
    return value

  return case


def flax_step(kind: str, objects: Live) -> Callable[[], jax.Array]:
  model, optimizer = objects
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
      made = live(count, devices)
      arrays = [leaf.get_raw_value() for leaf in jax.tree.leaves(nnx.state(made[0]), is_leaf=_is_variable)]
      arrays.append(made[1].step.get_raw_value())
      cases = {
        PLAIN: plain(arrays, sharding),
        FLOOR: floor(copied(made), sharding),
        OURS: ours(copied(made)),
      }
      group = f"{count} Variables, {devices} device{'s' if devices > 1 else ''}"
      few = count >= 1000
      often: dict[str, Any] = (
        {"rounds": 21, "calls": 3} if few else {"rounds": 101, "calls": 20, "settle": 10}
      )
      timings = measure(cases, wait=False, **often)
      # A busy machine stretches the clock, not the time that this thread was running.
      spent = measure(cases, wait=False, clock=time.thread_time, **often)
      for name in (FLOOR, OURS):
        ratio = spent[name].ratio(spent[PLAIN])[1]
        record.value(f"{name} / jax.jit, processor time of the calling thread", ratio, "", group=group)
      # Apart, since some take a hundred times as long and leave cold caches.
      kinds = ("nnx.jit", "nnx.cached_partial", "nnx.jit_partial")
      others = {PLAIN: cases[PLAIN]} | {kind: flax_step(kind, copied(made)) for kind in kinds}
      rarely: dict[str, Any] = {"rounds": 5, "calls": 1} if few else {"rounds": 21, "calls": 10, "settle": 3}
      slow = measure(others, wait=False, **rarely)
      record.compare(timings, baseline=PLAIN, group=group)
      record.compare(slow, baseline=PLAIN, group=f"{group}: flax")
      _say(group, timings, PLAIN)
      _say(group, slow, PLAIN)
      record.write()  # what is measured is kept when a run is cut short


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
      held = sum(array.nbytes for array in parameters.values())
      hand, state = by_hand.step_by_hand(job, tx, parameters, by_hand.moments_of(plan, parameters))
      step = nxp.train_step(job.loss)
      group = f"{job_name}, {layout}"
      lowered = {PERSON: hand.lower(parameters, state, batch), OURS: step.lower(model, optimizer, batch)}
      for name, program in lowered.items():
        text = program.compile().as_text()
        sent = sum(c.total_bytes for c in collectives(text, dict(plan.mesh.shape)))
        record.value(f"{name}: FLOPs per device", cost(text).flops, "", group=group)
        record.value(f"{name}: bytes in collectives", sent, "bytes", group=group)
        record.value(f"{name}: bytes in collectives, of the parameters' bytes", sent / held, "", group=group)
      cases = {
        PERSON: _repeat(hand, parameters, state, batch),
        OURS: lambda step=step, m=model, o=optimizer, b=batch: step(m, o, b)["loss"],
      }
      short = job_name == "digits MLP"
      often: dict[str, Any] = (
        {"rounds": 201, "calls": 10, "settle": 2} if short else {"rounds": 31, "calls": 5}
      )
      timings = measure(cases, **often)
      record.compare(timings, baseline=PERSON, group=group)
      spent = measure(cases, clock=time.process_time, **often)
      ratio = spent[OURS].ratio(spent[PERSON])[1]
      record.value("nxp.train_step / by hand, processor time of all threads", ratio, "", group=group)
      _say(group, timings, PERSON)
      record.write()


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
  parser.add_argument("--part", choices=("host", "whole"), help="one of the two tables")
  parser.add_argument("--suffix", default="", help="of the names of the records")
  chosen = parser.parse_args()
  command = " ".join(["python -m benchmarks.step", *sys.argv[1:]])
  load = f"Load of the machine at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
  if chosen.part != "whole":
    notes = [
      "Each case runs the same SGD update; `jax.jit, flat list` is written by hand, updates no module."
      f" The loss is the sum of squares of all parameters, up to {WHOLE_LOSS} Variables; XLA takes minutes to"
      " compile it for more, and there it is one with the same gradients whose value reads one parameter.",
      "`by hand, live` is the least that keeps a module live: it reads every Variable, dispatches, and writes"
      " it back. It notices no edit, and deletes arrays that somebody else holds.",
      "`nnx.cached_partial` and `nnx.jit_partial` (`graph=False`) do not notice when a submodule is replaced;"
      " `nxp.train_step` does.",
      load,
    ]
    title = "One train step: host time by number of Variables"
    host_times(Record(f"step_host{chosen.suffix}", title, command=command, notes=notes), tuple(chosen.sizes))
  if chosen.part != "host":
    notes = [
      "AdamW on 8 simulated devices, waited for after 5 steps of the transformer, 10 of the MLP;"
      " `by hand` has no flax in it, and the same"
      " layouts, pinned and donated.",
      load,
    ]
    title = "One train step: whole steps against hand-written ones"
    whole_steps(Record(f"step_whole{chosen.suffix}", title, command=command, notes=notes))


if __name__ == "__main__":
  main()
