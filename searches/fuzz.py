"""Searches for programs that the compiler gets wrong: random small models under random layouts, on 8 devices.

    python -m searches.fuzz --minutes 15 --workers 2               steps of the toolkit
    python -m searches.fuzz --seeds 0:200 --step plain             the compiler alone
    python -m searches.fuzz --seeds 7:8 --layout 3 --show          one program, printed
    python -m searches.fuzz --programs found.jsonl --shrink        what --show printed, made smaller

A program is a model of `programs.py` and a layout. Its loss and gradients in float32 are compared with
those of one device, at the parameters drawn and at those after a step of SGD.

What is wrong. The difference of a gradient is divided by its norm on one device plus a hundredth of that of
all gradients, that of a loss by its size. One device also runs with parameters moved by their last bit, and
30 times what that changes is allowed. Beyond 1e-3 and that, a program is *wrong*; between 1e-4 and 1e-3 it is
*suspicious*. With float16 or bfloat16 inside, both bounds are 50 times that, and the difference of a loss is
divided by its size plus 1: many of them are 1 plus a sum, which may cancel. A difference beyond them, but
below 0.3, is decided by the same program in float32: in a sine, rounding became 9 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

import nnx_parallel as nxp
from searches import driver, programs, smaller_programs
from searches.programs import Arrays, Layout, Program, spec_of

RATE = 0.1
WRONG, SUSPICIOUS = 1e-3, 1e-4
CLEAR = 1e-2  # a smaller program must be wrong by more than this
NOISE, LOW, ROUNDED = 30, 50, 0.3
PATIENCE = 120
BAD = ("wrong", "BROKEN")  # what dies is the compiler's
Step = Callable[[Arrays, Arrays], tuple[Any, Arrays]]


def options(parser: argparse.ArgumentParser) -> None:
  kind = parser.add_mutually_exclusive_group()
  text = "nxp.train_step, or jax.jit of the loss and its gradients"
  kind.add_argument("--step", choices=("toolkit", "plain"), default="toolkit", help=text)
  kind.add_argument("--explicit", action="store_true", help="nxp.train_step, on Explicit axes")
  parser.add_argument("--gspmd", action="store_true", help="without Shardy")
  parser.add_argument("--style", choices=("", *dict.fromkeys(programs.STYLES)), default="")
  parser.add_argument("--layouts", type=int, default=8, help="of each model")
  parser.add_argument("--layout", type=int, help="this one only")
  parser.add_argument("--programs", type=pathlib.Path, help="JSON lines, not seeds")


def group(given: argparse.Namespace) -> str:
  partitioner, axes = "GSPMD" if given.gspmd else "Shardy", "Explicit" if given.explicit else "Auto"
  return f"{given.step}, jax {jax.__version__}, {partitioner}, {axes}"


@dataclasses.dataclass
class Case:
  """One program: a model, by its seed, and one of its layouts."""

  seed: int
  number: int
  program: Program
  layout: Layout

  def __str__(self) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in self.layout["mesh"].items())
    where = f"{self.layout['style']} on {mesh}, batch {self.layout['batch']} {self.layout['length'] or ''}"
    ops = ", ".join(self.ops)
    return f"{self.seed}.{self.number} [{ops}] {where}\n{json.dumps(dataclasses.asdict(self))}"

  @property
  def ops(self) -> list[str]:
    parts = [self.program["input"], *self.program["blocks"], self.program["loss"]]
    return [f"{part['op']} {part['kind']}" if "kind" in part else part["op"] for part in parts]


def cases(seed: int, given: argparse.Namespace) -> list[Case]:
  if given.programs:
    return found_in(given.programs)[seed : seed + 1]
  numbers = range(given.layouts) if given.layout is None else [given.layout]
  seeds = dict.fromkeys((seed, seed + programs.SMALL * (seed < programs.SMALL)))
  models = [(n, programs.draw(n)) for n in seeds]
  return [Case(n, i, p, programs.draw_layout(p, n, i, given.style)) for n, p in models for i in numbers]


def found_in(path: pathlib.Path) -> list[Case]:
  return [Case(**json.loads(line)) for line in path.read_text().splitlines() if line.startswith("{")]


def smaller(case: Case) -> Iterator[Case]:
  for program, layout in smaller_programs.smaller(case.program, case.layout):
    yield Case(case.seed, case.number, program, layout)


def still(found: driver.Result, wanted: driver.Result) -> bool:
  """Whether a smaller program is wrong too, and not by a rounding."""
  same = found["verdict"] == wanted["verdict"]
  return same and (found["verdict"] != "wrong" or max(found["off"].values()) > CLEAR)


@dataclasses.dataclass(frozen=True)
class Numbers:
  """What two steps gave: both losses and both trees of gradients, on the host."""

  losses: tuple[float, float]
  gradients: tuple[Arrays, Arrays]


# One device.


def two_steps(step: Step, params: Arrays, batch: Arrays) -> Numbers:
  """The step at these parameters, and at those after SGD, which stay where they are."""
  first, grads = step(params, batch)
  on_host = {name: np.asarray(p) - RATE * np.asarray(grads[name]) for name, p in params.items()}
  moved = {name: jax.device_put(p, params[name].sharding) for name, p in on_host.items()}
  second, more = step(moved, batch)
  first, second, grads, more = jax.device_get((first, second, grads, more))
  return Numbers((float(first), float(second)), (grads, more))


class Model:
  """One model with its parameters, its batch, and what one device makes of them."""

  def __init__(self, program: Program, seed: int):
    self.program, (self.params, self.batch) = program, programs.values_of(program, seed)
    self.step: Step = jax.value_and_grad(functools.partial(programs.loss_of, program))
    step, rng = jax.jit(self.step), np.random.default_rng(seed)
    self.right = two_steps(step, jax.device_put(self.params), self.batch)
    moved = {k: v * (1 + np.float32(1.2e-7) * rng.choice((-1, 1), v.shape)) for k, v in self.params.items()}
    near = two_steps(step, jax.device_put({k: v.astype(np.float32) for k, v in moved.items()}), self.batch)
    self.noise = differences(self.right, near)  # what the last bit of the parameters changes


def differences(right: Numbers, found: Numbers, least: float = 1e-2) -> dict[str, float]:
  """Relative differences by name; `least` is added to the size of a loss, which may be near 0."""
  result: dict[str, float] = {}
  for n, step in enumerate(("", "second ")):
    result[f"{step}loss"] = abs(found.losses[n] - right.losses[n]) / (abs(right.losses[n]) + least)
    grads = right.gradients[n]
    everything = np.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in grads.values()))
    for name, g in grads.items():
      off = np.linalg.norm(found.gradients[n][name].astype(np.float64) - g)
      result[f"{step}grad {name}"] = float(off / (np.linalg.norm(g) + everything / 100 + 1e-9))
  return {name: value if np.isfinite(value) else float("inf") for name, value in result.items()}


# Eight devices.


def run_plain(model: Model, layout: Layout, mesh: Mesh) -> Numbers:
  placed = {name: NamedSharding(mesh, spec_of(spec)) for name, spec in layout["specs"].items()}
  dims = [layout["batch"], layout["length"]]
  inputs = {name: NamedSharding(mesh, spec_of(dims[: min(x.ndim, 2)])) for name, x in model.batch.items()}
  jitted = jax.jit(model.step, out_shardings=(None, placed))
  return two_steps(jitted, jax.device_put(model.params, placed), jax.device_put(model.batch, inputs))


def run_toolkit(model: Model, layout: Layout, mesh: Mesh) -> Numbers:
  class Net(nnx.Module):
    def __init__(self) -> None:
      for name, value in model.params.items():
        setattr(self, name, nnx.Param(jnp.asarray(value)))

  def loss(net: Any, batch: Arrays) -> Any:
    return programs.loss_of(model.program, {name: getattr(net, name)[...] for name in model.params}, batch)

  def keep(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return jax.tree.map(lambda g: -RATE * g, grads), grads

  tx = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), keep)
  paths = nxp.PathRules([(name, tuple(spec_of(spec))) for name, spec in layout["specs"].items()])
  rules = [paths, nxp.LogicalRules(batch=tuple(layout["batch"]) or None)]
  plan = nxp.plan(Net, mesh, rules, optimizer=tx)
  net, optimizer = nxp.create_sharded_model(plan)
  step, batch = nxp.train_step(loss), nxp.shard_batch(model.batch, plan)
  found: list[tuple[float, Arrays]] = []
  for _ in range(2):
    value = float(step(net, optimizer, batch)["loss"])
    kept = nnx.to_pure_dict(nnx.state(optimizer.opt_state))
    found.append((value, jax.device_get({name: kept[name] for name in model.params})))
  return Numbers(*zip(*found, strict=True))


@functools.lru_cache(maxsize=1)
def model_of(seed: int, program: str) -> Model:
  """The model of a program, as JSON; its layouts come one after the other."""
  jax.clear_caches()
  return Model(json.loads(program), seed)


def check(case: Case, given: argparse.Namespace) -> driver.Result:
  """Runs one program and compares it: `verdict`, and `off` by name where something is."""
  model = model_of(case.seed, json.dumps(case.program))
  if not np.isfinite(model.right.losses).all() or max(model.noise.values()) > 1e-2:
    return {"verdict": "unfit"}
  sizes = case.layout["mesh"]
  devices = np.array(jax.devices()[: int(np.prod([*sizes.values()]))]).reshape(*sizes.values())
  kinds = (AxisType.Explicit if given.explicit else AxisType.Auto,) * len(sizes)
  run, refusals = run_plain, ()
  if given.step == "toolkit":  # it may have no such layout: an error that a user would see
    run, refusals = run_toolkit, (nxp.NnxParallelError, TypeError, ValueError)
  jax.config.update("jax_use_shardy_partitioner", not given.gspmd)
  try:
    found = run(model, case.layout, Mesh(devices, tuple(sizes), axis_types=kinds))
  except refusals as error:
    return {"verdict": "refused", "message": f"{type(error).__name__}: {error}"[:300]}
  finally:
    jax.config.update("jax_use_shardy_partitioner", True)
  is_half = any(block.get("dtype") in ("bfloat16", "float16") for block in model.program["blocks"])
  low, least = (LOW, 1.0) if is_half else (1, 1e-2)
  off = differences(model.right, found, least).items()
  off = {name: value for name, value in off if value > max(low * SUSPICIOUS, NOISE * model.noise[name])}
  if is_half and off and max(off.values()) < ROUNDED:
    wide = [block | {"dtype": "float32"} if "dtype" in block else block for block in case.program["blocks"]]
    exact = check(dataclasses.replace(case, program={**case.program, "blocks": wide}), given)
    return {"verdict": "rounded"} if exact["verdict"] == "right" else exact
  if not off:
    return {"verdict": "right"}
  off = {name: value for name, value in off.items() if not name.startswith("second")} or off
  worst = max(off.values())
  off = {name: float(f"{value:.3g}") for name, value in off.items()}
  return {"verdict": "wrong" if worst > low * WRONG else "suspicious", "off": off}


if __name__ == "__main__":
  driver.run("searches.fuzz")
