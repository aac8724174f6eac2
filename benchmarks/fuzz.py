"""Searches for programs that the compiler gets wrong: random small models under random layouts, on 8 devices.

    python -m benchmarks.fuzz --minutes 15                          the record's search
    python -m benchmarks.fuzz --seeds 0:200 --step plain            the compiler alone
    python -m benchmarks.fuzz --seeds 7:8 --layout 3 --show         one program, printed
    python -m benchmarks.fuzz --seeds 0:200 --mend module:function  a mend of a plain step, on the same seeds

A program is a model of `fuzz_programs.py` and a layout. Its loss and gradients in float32 are compared with
those of one device, at the parameters drawn and at those after a step of SGD.

What is wrong. The difference of a gradient is divided by its norm on one device plus a hundredth of that
of all gradients, so that one which is zero but for rounding does not count; that of a loss by its size.
Float32 on another layout agrees to 1e-6 or so. Some programs are worse conditioned (bfloat16 inside, top-k),
so one device also runs with parameters moved by their last bit, and 30 times what that changes is allowed.
Beyond 1e-3 and that, a program is *wrong*; between 1e-4 and 1e-3 it is *suspicious*. With float16 or bfloat16
inside, where one program rounds what another one fuses, both bounds are 50 times that, and the difference of
a loss is divided by its size plus 1: many of the losses are 1 plus a sum, which may cancel.

The compiler ends the process on some programs: workers are forked, and the search goes on behind the one that
died.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib
import json
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("NPROC", "32")  # a collective holds one of XLA's threads for each device that waits
# Compiled once and run twice: what the code is worth does not matter. The partitioner does not see these.
os.environ.setdefault(
  "XLA_FLAGS",
  "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
  " --xla_llvm_disable_expensive_passes=true",
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import fuzz_programs
from benchmarks.fuzz_programs import Arrays, Layout, Program, spec_of

RATE = 0.1
WRONG, SUSPICIOUS = 1e-3, 1e-4
NOISE, LOW = 30, 50
PATIENCE = 120  # seconds for one program
STEPS = ("toolkit", "plain", "held", "gathered")
Step = Callable[[Arrays, Arrays], tuple[Any, Arrays]]


@dataclasses.dataclass(frozen=True)
class Options:
  """How programs are compiled.

  Attributes:
    step: "plain" is `jax.jit` of the loss and its gradients; "held" is that with activations held to the
      layout of the batch; "gathered" also has each parameter whole where it is used; "toolkit" is
      `nxp.train_step`.
    mend: `module:function`, applied to a plain step before it is compiled: the function gets the step, the
      mesh, the specs of the parameters and the axes of the batch, and returns a step.
    explicit: whether the axes of the mesh are Explicit; else they are Auto.
    shardy: whether Shardy partitions; else GSPMD.
  """

  step: str = "toolkit"
  mend: str = ""
  explicit: bool = False
  shardy: bool = True


@dataclasses.dataclass(frozen=True)
class Numbers:
  """What two steps gave: both losses and both trees of gradients, on the host."""

  losses: tuple[float, float]
  gradients: tuple[Arrays, Arrays]


class Refused(Exception):
  """The program has no such layout: an error that a user would see."""


# One device.


def plain_step(program: Program, hold: Callable[[Any], Any] = lambda x: x, use: Any = None) -> Step:
  def step(params: Arrays, batch: Arrays) -> tuple[Any, Arrays]:
    def loss(params: Arrays) -> Any:
      used = {name: use(name, p) for name, p in params.items()} if use else params
      return fuzz_programs.loss_of(program, used, batch, hold)

    return jax.value_and_grad(loss)(params)

  return step


def two_steps(step: Step, params: Arrays, batch: Arrays) -> Numbers:
  """The step at these parameters, and at those after SGD, which stay where they are."""
  first, grads = step(params, batch)
  moved = {
    name: jax.device_put(np.asarray(p) - RATE * np.asarray(grads[name]), p.sharding)
    for name, p in params.items()
  }
  second, more = step(moved, batch)
  first, second, grads, more = jax.device_get((first, second, grads, more))
  return Numbers((float(first), float(second)), (grads, more))


class Model:
  """One model with its parameters, batch, and what one device makes of them."""

  def __init__(self, program: Program, seed: int):
    self.program, self.seed = program, seed
    self.params, self.batch = fuzz_programs.values_of(program, seed)

  @functools.cached_property
  def step(self) -> Step:
    """One function for all layouts, so that it is traced once."""
    return plain_step(self.program)

  @functools.cached_property
  def reference(self) -> tuple[Numbers, dict[str, float]]:
    """The right numbers, and for each of them what the last bit of the parameters changes."""
    step = jax.jit(self.step)
    right = two_steps(step, jax.device_put(self.params), self.batch)
    rng = np.random.default_rng(self.seed)
    moved = {k: v * (1 + np.float32(1.2e-7) * rng.choice((-1, 1), v.shape)) for k, v in self.params.items()}
    near = two_steps(step, jax.device_put({k: v.astype(np.float32) for k, v in moved.items()}), self.batch)
    return right, differences(right, near)


def differences(right: Numbers, found: Numbers, least: float = 1e-2) -> dict[str, float]:
  """Relative differences by name: `loss`, `grad NAME`, and those of the second step.

  Args:
    right: numbers of one device.
    found: numbers to compare.
    least: is added to the size of a loss, which may be near 0.
  """
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


def mesh_of(layout: Layout, explicit: bool = False) -> Mesh:
  sizes = tuple(layout["mesh"].values())
  devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
  kind = AxisType.Explicit if explicit else AxisType.Auto
  return Mesh(devices, tuple(layout["mesh"]), axis_types=(kind,) * len(sizes))


def batch_specs(layout: Layout, batch: Arrays) -> dict[str, P]:
  return {name: spec_of([layout["batch"], layout["length"]][: min(x.ndim, 2)]) for name, x in batch.items()}


def run_plain(model: Model, layout: Layout, options: Options) -> Numbers:
  """Two steps of a jitted function on the layout."""
  mesh = mesh_of(layout, options.explicit)
  specs = {name: spec_of(spec) for name, spec in layout["specs"].items()}
  placed = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
  inputs = {name: NamedSharding(mesh, spec) for name, spec in batch_specs(layout, model.batch).items()}
  with jax.set_mesh(mesh) if options.explicit else contextlib.nullcontext():
    failed: Exception | None = None
    for step in _steps(model, layout, mesh, options):
      if options.mend:
        module, name = options.mend.split(":")
        mend = getattr(importlib.import_module(module), name)
        step = mend(step, mesh, specs, tuple(layout["batch"]))
      jitted = jax.jit(step, out_shardings=(None, placed))
      params, batch = jax.device_put(model.params, placed), jax.device_put(model.batch, inputs)
      try:
        return two_steps(jitted, params, batch)
      except Exception as error:
        # Explicit axes leave a sharding for the user to say. Its type is in no public place of jax.
        if not options.explicit or type(error).__name__ not in ("ShardingTypeError", "TypeError"):
          raise
        failed = error
    raise Refused(f"{type(failed).__name__}: {failed}") from failed


def _steps(model: Model, layout: Layout, mesh: Mesh, options: Options) -> Iterator[Step]:
  """The step; on Explicit axes, ways to write it until one has all its shardings decided."""

  def hold(x: Any) -> Any:
    spec = P(tuple(layout["batch"]) or None, *layout["length"] if x.ndim > 2 else ())
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

  def gather(name: str, p: Any) -> Any:
    return jax.lax.with_sharding_constraint(p, NamedSharding(mesh, P()))

  if options.explicit:
    yield model.step
    yield plain_step(model.program, use=lambda name, p: jax.sharding.reshard(p, NamedSharding(mesh, P())))
  elif options.step == "held":
    yield plain_step(model.program, hold)
  elif options.step == "gathered":
    yield plain_step(model.program, hold, gather)
  else:
    yield model.step


def run_toolkit(model: Model, layout: Layout, options: Options) -> Numbers:
  """Two steps of `nxp.train_step` on a plan with these specs."""
  import optax
  from flax import nnx

  import nnx_parallel as nxp

  class Net(nnx.Module):
    def __init__(self) -> None:
      for name, value in model.params.items():
        setattr(self, name, nnx.Param(jnp.asarray(value)))

  def loss(net: Any, batch: Arrays) -> Any:
    params = {name: getattr(net, name)[...] for name in model.params}
    return fuzz_programs.loss_of(model.program, params, batch)

  def keep(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return jax.tree.map(lambda g: -RATE * g, grads), grads

  tx = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), keep)
  axes = {tuple(layout["batch"]): "batch"} if layout["batch"] else {}
  rules = [
    nxp.PathRules([(name, tuple(spec_of(spec))) for name, spec in layout["specs"].items()]),
    nxp.LogicalRules(batch=next(iter(axes), None)),
  ]
  try:
    plan = nxp.plan(Net, mesh_of(layout, options.explicit), rules, optimizer=tx)
    net, optimizer = nxp.create_sharded_model(plan)
    step = nxp.train_step(loss)
    batch = nxp.shard_batch(model.batch, plan)
    found: list[tuple[float, Arrays]] = []
    for _ in range(2):
      value = float(step(net, optimizer, batch)["loss"])
      kept = nnx.to_pure_dict(nnx.state(optimizer.opt_state))
      found.append((value, jax.device_get({name: kept[name] for name in model.params})))
  except (nxp.NnxParallelError, TypeError, ValueError) as error:
    raise Refused(f"{type(error).__name__}: {error}") from error
  return Numbers((found[0][0], found[1][0]), (found[0][1], found[1][1]))


def check(model: Model, layout: Layout, options: Options) -> dict[str, Any]:
  """Runs one program and compares it: `verdict`, and `off` by name where something is."""
  right, noise = model.reference
  if not np.isfinite(right.losses).all() or max(noise.values()) > 1e-2:
    return {"verdict": "unfit"}
  jax.config.update("jax_use_shardy_partitioner", options.shardy)
  try:
    found = (run_toolkit if options.step == "toolkit" else run_plain)(model, layout, options)
  except Refused as refused:
    return {"verdict": "refused", "message": str(refused)[:300]}
  finally:
    jax.config.update("jax_use_shardy_partitioner", True)
  is_half = any(block["op"] == "half" for block in model.program["blocks"])
  low, least = (LOW, 1.0) if is_half else (1, 1e-2)
  off = differences(right, found, least)
  off = {name: value for name, value in off.items() if value > low * SUSPICIOUS}
  off = {name: value for name, value in off.items() if value > NOISE * noise[name]}
  if not off:
    return {"verdict": "right"}
  first = {name: value for name, value in off.items() if not name.startswith("second")}
  off = first or off
  worst = max(off.values())
  off = {name: float(f"{value:.3g}") for name, value in off.items()}
  return {"verdict": "wrong" if worst > low * WRONG else "suspicious", "off": off}


# Workers.


@dataclasses.dataclass
class Case:
  """One program: a model, by its seed, and one of its layouts."""

  seed: int
  number: int
  program: Program
  layout: Layout

  def about(self) -> dict[str, Any]:
    layout = self.layout
    return {
      "seed": self.seed,
      "layout": self.number,
      "style": layout["style"],
      "mesh": list(layout["mesh"].items()),
      "batch": layout["batch"],
      "length": layout["length"],
      "ops": operations(self.program),
    }


def cases(seed: int, numbers: Sequence[int], style: str = "") -> list[Case]:
  """Layouts of one model."""
  program = fuzz_programs.draw(seed)
  return [Case(seed, n, program, fuzz_programs.draw_layout(program, seed, n, style)) for n in numbers]


def operations(program: Program) -> list[str]:
  """Each operation with its kind, for tables."""
  parts = [program["input"], *program["blocks"], program["loss"]]
  return [f"{part['op']} {part['kind']}" if "kind" in part else part["op"] for part in parts]


def work(connection: Any, options: Options, errors: str) -> None:
  """Checks the cases that come in, each list of one model; sends a word before each, and its result."""
  with open(errors, "w") as stream:
    os.dup2(stream.fileno(), 2)
  while (job := connection.recv()) is not None:
    model = Model(job[0].program, job[0].seed)
    for case in job:
      connection.send("begun")
      began = time.time()
      result = check(model, case.layout, options)
      connection.send(result | {"seconds": round(time.time() - began, 2)})
    jax.clear_caches()


class Worker:
  """A forked process that checks cases; a new one where the last one died."""

  def __init__(self, options: Options):
    self.options = options
    self.process: Any = None
    self.job: list[Case] = []
    self.begun = False

  def start(self) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.fuzz"])
    self.connection, theirs = context.Pipe()
    self.errors = pathlib.Path(tempfile.mkstemp(suffix=".err")[1])
    self.process = context.Process(target=work, args=(theirs, self.options, self.errors), daemon=True)
    self.process.start()
    theirs.close()

  def give(self, job: list[Case]) -> None:
    if self.process is None:
      self.start()
    self.job, self.begun, self.since = job, False, time.time()
    self.connection.send(job)

  def results(self) -> Iterator[tuple[Case, dict[str, Any]]]:
    """What came in by now, after waiting a moment."""
    try:
      while self.job and self.connection.poll(0.05):
        result = self.connection.recv()
        self.since = time.time()
        self.begun = result == "begun"
        if not self.begun:
          yield self.job.pop(0), result
    except (EOFError, ConnectionResetError):
      yield from self._died("abort")
      return
    if self.job and time.time() - self.since > PATIENCE:
      self.process.kill()
      yield from self._died("hang")

  def _died(self, verdict: str) -> Iterator[tuple[Case, dict[str, Any]]]:
    self.process.join()
    if self.process.exitcode == 1:
      verdict = "error"  # an exception of Python's
    result = {"verdict": verdict if self.begun else "unfit", "message": _last_words(self.errors)}
    case, rest = self.job[0], self.job[1:]
    self.stop()
    yield case, result
    if rest:
      self.give(rest)

  def stop(self) -> None:
    if self.process is not None:
      self.process.kill()
      self.process.join()
      self.connection.close()
      self.errors.unlink()
    self.process, self.job = None, []


def _last_words(errors: pathlib.Path) -> str:
  lines = errors.read_text(errors="replace").splitlines()
  fatal = [
    line for line in lines if "Check failed" in line or re.match(r"F\d{4} ", line) or "terminate" in line
  ]
  raised = [line for line in lines if line and not line.startswith((" ", "-", "Traceback", "For simplicity"))]
  return " ".join((fatal or raised[-1:])[:2])[:400]


def search(
  jobs: Iterator[list[Case]], options: Options, workers: int, until: float
) -> Iterator[tuple[Case, dict[str, Any]]]:
  """Results of all cases as they come, until the jobs or the time are used up."""
  pool = [Worker(options) for _ in range(workers)]
  try:
    while True:
      for worker in pool:
        if not worker.job and time.time() < until and (job := next(jobs, None)) is not None:
          worker.give(job)
      if not any(worker.job for worker in pool):
        return
      for worker in pool:
        yield from worker.results()
  finally:
    for worker in pool:
      worker.stop()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument(
    "--seeds", default="0:1000000", help="START:STOP of the models; a small one for each large one"
  )
  parser.add_argument("--minutes", type=float, default=1e6)
  parser.add_argument("--workers", type=int, default=2)
  parser.add_argument(
    "--out", type=pathlib.Path, help="JSON lines are added to it; what it has is not done again"
  )
  parser.add_argument("--step", choices=STEPS, default="toolkit")
  parser.add_argument("--mend", default="")
  parser.add_argument("--explicit", action="store_true")
  parser.add_argument("--gspmd", action="store_true", help="without Shardy")
  parser.add_argument("--style", choices=("", *dict.fromkeys(fuzz_programs.STYLES)), default="")
  parser.add_argument("--layouts", type=int, default=8)
  parser.add_argument("--layout", type=int)
  parser.add_argument(
    "--programs", type=pathlib.Path, nargs="+", help="JSON lines as --show prints them, not seeds"
  )
  parser.add_argument("--show", action="store_true", help="print each program")
  given = parser.parse_args()
  options = Options(given.step, given.mend, given.explicit, not given.gspmd)
  start, stop = (int(part) for part in given.seeds.split(":"))
  numbers = range(given.layouts) if given.layout is None else [given.layout]
  done = {(line["seed"], line["layout"]) for line in lines_of(given.out)}
  seeds = (kind + seed for seed in range(start, stop) for kind in (0, fuzz_programs.SMALL))
  if start >= fuzz_programs.SMALL:
    seeds = iter(range(start, stop))
  todo = ((seed, [n for n in numbers if (seed, n) not in done]) for seed in seeds)
  jobs = (cases(seed, left, given.style) for seed, left in todo if left)
  if given.programs:
    jobs = ([Case(**line)] for path in given.programs for line in lines_of(path))
  counts: collections.Counter[str] = collections.Counter()
  began = time.time()
  how = {"jax": jax.__version__, **dataclasses.asdict(options)}
  with open(given.out, "a") if given.out else contextlib.nullcontext() as stream:
    for case, found in search(jobs, options, given.workers, began + given.minutes * 60):
      result = case.about() | found
      counts[result["verdict"]] += 1
      if stream:
        print(json.dumps(how | result), file=stream, flush=True)
      if result["verdict"] not in ("right", "refused", "unfit") or given.show:
        print(_line(result), flush=True)
      if given.show:
        print(json.dumps(dataclasses.asdict(case)), flush=True)
  total = sum(counts.values())
  pace = total / (time.time() - began) * 60
  print(
    f"{total} programs, {pace:.0f} a minute: " + ", ".join(f"{n} {name}" for name, n in counts.most_common())
  )
  sys.exit(1 if options.step == "toolkit" and counts["wrong"] else 0)


def environment_for(shardy: bool) -> dict[str, str]:
  """Of a process that runs a program by itself."""
  flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_USE_SHARDY_PARTITIONER": str(shardy)}
  return {**os.environ, "JAX_PLATFORMS": "cpu", **flags}


def lines_of(path: pathlib.Path | None) -> list[dict[str, Any]]:
  """The JSON lines of a file; none where there is no file."""
  if path is None or not path.exists():
    return []
  return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def _line(result: dict[str, Any]) -> str:
  mesh = " x ".join(f"{axis} {size}" for axis, size in result.get("mesh", ()))
  words = [
    f"{result['verdict']:10} {result['seed']}.{result['layout']}",
    f"[{', '.join(result['ops'])}]",
    f"{result.get('style', '')} on {mesh}, batch {result.get('batch')} {result.get('length') or ''}",
    str(result.get("off") or result.get("message", "")),
  ]
  return " ".join(words)


if __name__ == "__main__":
  from benchmarks.fuzz import main as run_main  # so that forked workers find what they unpickle

  run_main()
