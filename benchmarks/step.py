"""Host time of one train step against plain `jax.jit` on a flat donated list, by number of Variables.

The program is the same in every case: SGD on a sum of squares over parameters of four elements, so that what
is timed is the work between two dispatches, not the arithmetic. Nothing is waited for inside a timing.
"""

from __future__ import annotations

import os

DEVICES = 8
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES}")

import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import nnx_parallel as nxp  # noqa: E402
from harness import Record, measure  # noqa: E402

SIZES = (10, 100, 1000, 4000)


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


def flax_step(cached: bool, count: int, devices: int) -> Callable[[], jax.Array]:
  model, optimizer = live(count, devices)
  scale = jnp.ones(())

  def run(model: Pile, optimizer: nnx.Optimizer[Pile], scale: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(loss_fn)(model, scale)
    optimizer.update(model, grads)
    return value

  step = nnx.jit(run, donate_argnums=(0, 1))
  if cached:
    bound = nnx.cached_partial(step, model, optimizer)
    return lambda: bound(scale)
  return lambda: step(model, optimizer, scale)


def main(sizes: tuple[int, ...] = SIZES) -> None:
  record = Record(
    "step",
    "Host time of one train step by number of Variables",
    command="python -m benchmarks step",
    notes=[
      "Each case runs the same SGD update; `jax.jit, flat list` is written by hand and updates no module.",
      "`nnx.cached_partial` does not notice when a submodule is replaced; `nxp.train_step` does.",
    ],
  )
  for devices in (1, DEVICES):
    for count in sizes:
      mesh = nxp.make_mesh(data=devices, devices=jax.devices()[:devices])
      sharding = NamedSharding(mesh, PartitionSpec())
      model, optimizer = live(count, devices)
      arrays = [leaf.get_raw_value() for leaf in jax.tree.leaves(nnx.state(model), is_leaf=_is_variable)]
      arrays.append(optimizer.step.get_raw_value())
      del model, optimizer
      cases = {"jax.jit, flat list": plain(arrays, sharding), "nxp.train_step": ours(count, devices)}
      if count <= 1000:
        cases["nnx.jit"] = flax_step(False, count, devices)
        cases["nnx.cached_partial"] = flax_step(True, count, devices)
      few = count >= 1000
      timings = measure(cases, rounds=15 if few else 40, calls=3 if few else 20, wait=False)
      group = f"{count} Variables, {devices} device{'s' if devices > 1 else ''}"
      record.compare(timings, baseline="jax.jit, flat list", group=group)
      print(
        group,
        {k: round(t.ratio(timings["jax.jit, flat list"])[1], 2) for k, t in timings.items()},
        flush=True,
      )
  record.write()


def _is_variable(node: Any) -> bool:
  return isinstance(node, nnx.Variable)


if __name__ == "__main__":
  main(tuple(map(int, sys.argv[1:])) or SIZES)
