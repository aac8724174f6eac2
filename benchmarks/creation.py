"""Creating a sharded transformer at several depths, four ways: time, compilation and peak memory.

`python -m benchmarks.creation` measures all of it on both axis types;
`--depths 4 12 --rounds 1 --axes auto` measures less. Each measurement has a process of its own, so that
nothing is compiled already and the peak of its memory is its own; the ways take turns. Processor time stands
beside wall time, because a machine that does other work too stretches only the latter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
from flax import nnx

import nnx_parallel as nxp
from benchmarks.harness import Record
from nnx_parallel.create import slices

WIDTH = 256
WIDE = 1024
GUIDE = "nnx.jit constructor"
OURS = "create_sharded_model"
SECOND = f"{OURS}, second start"
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def linear(inputs: int, outputs: int, names: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
  return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": names})


class Block(nnx.Module):
  """A transformer block: its parameters, annotated with mesh axes."""

  def __init__(self, rngs: nnx.Rngs, width: int):
    self.norms = nnx.List(nnx.RMSNorm(width, rngs=rngs) for _ in range(2))
    self.query, self.key, self.value = (linear(width, width, ("fsdp", "tensor"), rngs) for _ in range(3))
    self.out = linear(width, width, ("tensor", "fsdp"), rngs)
    self.gate, self.up = (linear(width, 4 * width, ("fsdp", "tensor"), rngs) for _ in range(2))
    self.down = linear(4 * width, width, ("tensor", "fsdp"), rngs)


def build(depth: int, width: int = WIDTH) -> nnx.List:
  rngs = nnx.Rngs(0)
  return nnx.List(Block(rngs, width) for _ in range(depth))


Init = Callable[[], nnx.Module]
Way = Callable[[Init, jax.sharding.Mesh], nnx.Module]


def guide(init: Init, mesh: jax.sharding.Mesh) -> nnx.Module:
  """The flax guide: construct under `nnx.jit`, constrain the state to its annotations."""

  @nnx.jit
  def constructor() -> nnx.Module:
    model = init()
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model

  with jax.set_mesh(mesh):
    return constructor()


def eager(init: Init, mesh: jax.sharding.Mesh) -> nnx.Module:
  """Eager construction: flax places each Variable when it is made."""
  with jax.set_mesh(mesh):
    return init()


def out_shardings(init: Init, mesh: jax.sharding.Mesh) -> nnx.Module:
  """One `jax.jit` of the state, with the shardings of an abstract build."""
  with jax.set_mesh(mesh):
    graphdef, abstract = nnx.split(nnx.eval_shape(init))
    shardings = nnx.get_named_sharding(abstract, mesh)
    return nnx.merge(graphdef, jax.jit(lambda: nnx.state(init()), out_shardings=shardings)())


def ours(init: Init, mesh: jax.sharding.Mesh) -> nnx.Module:
  return nxp.create_sharded_model(init, mesh)


def second_start(init: Init, mesh: jax.sharding.Mesh) -> nnx.Module:
  """Ours, with the programs that an earlier process left in the cache."""
  nxp.compilation_cache(os.environ["CREATION_CACHE"])
  return ours(init, mesh)


WAYS: dict[str, Way] = {
  GUIDE: guide,
  "eager under jax.set_mesh": eager,
  "jax.jit, out_shardings": out_shardings,
  OURS: ours,
  SECOND: second_start,
}


DEEPEST = {GUIDE: 48, "jax.jit, out_shardings": 24}
"""Blocks beyond which a way is not tried: their time is in proportion to depth, about a second a block."""


def peak_bytes() -> int:
  lines = Path("/proc/self/status").read_text().splitlines()
  return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


class Stopwatch:
  """Processor seconds of a function, over all its calls and all threads."""

  def __init__(self) -> None:
    self.seconds = 0.0

  def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
      began = time.process_time()
      result = function(*arguments)
      if not isinstance(result, nnx.Module):
        jax.block_until_ready(result)
      self.seconds += time.process_time() - began
      return result

    return timed


def child(way: str, depth: int, width: int, axes: str) -> None:
  """Creates once, and prints what it took."""
  compiling: list[float] = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiling.append(seconds) if event == COMPILE_EVENT else None
  )
  mesh = nxp.make_mesh(fsdp=4, tensor=2, explicit=axes == "explicit")
  jax.block_until_ready(jax.device_put(0.0, jax.NamedSharding(mesh, jax.P())))
  started = peak_bytes()
  # Some tens of MB of compiler are read into memory by the first program, whatever it is.
  jax.block_until_ready(jax.jit(lambda key: jax.random.normal(key, (8, 8)))(jax.random.key(0)))
  constructor, execution = Stopwatch(), Stopwatch()
  slices.run_slices = execution.around(slices.run_slices)
  before, compiling[:] = peak_bytes(), []
  began, worked = time.perf_counter(), time.process_time()
  model = WAYS[way](constructor.around(lambda: build(depth, width)), mesh)
  reading = time.thread_time()
  state = nnx.state(model)
  reading = time.thread_time() - reading  # the measurement's own work
  jax.block_until_ready(state)
  found = {
    "wall": time.perf_counter() - began,
    "processor": time.process_time() - worked - reading,
    "constructor": constructor.seconds,
    "execution": execution.seconds,
    "compile": sum(compiling),
    "grown": peak_bytes() - before,
    "compiler": before - started,
    "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))),
  }
  print(json.dumps(found))


Row = dict[str, Any]


def measure_once(way: str, depth: int, width: int, axes: str, limit_s: float) -> Row | None:
  """What one creation took; None when its process ran for longer than the limit and was stopped."""
  command = [
    sys.executable,
    "-m",
    "benchmarks.creation",
    "--child",
    way,
    "--depths",
    str(depth),
    "--axes",
    axes,
  ]
  try:
    done = subprocess.run([*command, "--width", str(width)], capture_output=True, text=True, timeout=limit_s)
  except subprocess.TimeoutExpired:
    return None
  if done.returncode:
    sys.exit(done.stderr)
  return json.loads(done.stdout.splitlines()[-1])


class Measured:
  """The measurements of all ways at all depths on one kind of axes."""

  def __init__(self, options: argparse.Namespace, axes: str):
    self.options, self.axes = options, axes
    self.rows: dict[tuple[str, int], list[Row]] = {}
    self.over: set[str] = set()
    """Ways that took over the limit; they are not tried deeper."""
    self.wide: list[Row] = []
    """Ours, of `--wide-depth` blocks of `WIDE`."""

  def depth(self, depth: int) -> None:
    """Measures one depth, in rounds."""
    options = self.options
    measure_once(SECOND, depth, options.width, self.axes, options.limit_s)  # fills the cache
    for _ in range(options.rounds):
      for way in WAYS:
        rows = self.rows.setdefault((way, depth), [])
        if way in self.over or depth > DEEPEST.get(way, depth) or (rows and rows[0]["wall"] > options.once_s):
          continue
        row = measure_once(way, depth, options.width, self.axes, options.limit_s)
        print(self.axes, depth, way, row or f"over {options.limit_s:g} s", flush=True)
        if row is None:
          self.over.add(way)
        else:
          rows.append(row)

  def measure_wide(self) -> None:
    """Measures ours on wide blocks, whose shards are large beside what the host keeps for each array."""
    options = self.options
    for _ in range(options.rounds if options.wide_depth else 0):
      row = measure_once(OURS, options.wide_depth, WIDE, self.axes, options.limit_s)
      print(self.axes, options.wide_depth, f"{WIDE} wide", OURS, row, flush=True)
      self.wide += [row] if row is not None else []

  def baseline(self, depth: int) -> tuple[float, str]:
    """The seconds that ratios at one depth refer to, and what they are: the guide's, as deep as it came."""
    if self.rows[GUIDE, depth]:
      return self.median(GUIDE, depth, "wall"), GUIDE
    if GUIDE in self.over:
      limit = self.options.limit_s
      return limit, f"{limit:g} s, which {GUIDE} took more than"
    last = max(d for d in self.depths() if self.rows[GUIDE, d])
    seconds = self.median(GUIDE, last, "wall")
    return seconds, f"{seconds:.3g} s, of {GUIDE} at {last} blocks"

  def median(self, way: str, depth: int, key: str) -> float:
    return median(row[key] for row in self.rows[way, depth])

  def record(self, record: Record, depth: int) -> None:
    """Adds the rows of one depth."""
    group = f"{self.axes} axes, {depth} blocks"
    reference, baseline = self.baseline(depth)
    for way in WAYS:
      rows = self.rows[way, depth]
      if not rows:
        if way in self.over:
          record.value(f"{way}: stopped, or not tried, after", self.options.limit_s, "s", group=group)
        else:
          record.value(f"{way}: not tried beyond", DEEPEST[way], "blocks", group=group)
        continue
      walls = sorted(row["wall"] / reference for row in rows)
      record.rows.append(
        {
          "group": group,
          "case": way,
          "ratio": median(walls),
          "ratio_quartiles": [walls[0], walls[-1]],
          "median_seconds": self.median(way, depth, "wall"),
          "rounds": len(rows),
          "baseline": baseline,
        }
      )
      record.value(f"{way}: processor time", self.median(way, depth, "processor"), "s", group=group)
      record.value(f"{way}: compiling", self.median(way, depth, "compile"), "s", group=group)
      grown = self.median(way, depth, "grown") / rows[0]["bytes"]
      record.value(f"{way}: peak growth", grown, "x", group=group)

  def record_growth(self, record: Record) -> None:
    """Adds what depth costs ours: processor time besides execution, and memory for each byte created."""
    small = 12 if 12 in self.depths() else self.depths()[0]
    large = self.depths()[-1]
    group = f"{self.axes} axes, ours from {small} to {large} blocks"
    host = {d: self.median(OURS, d, "processor") - self.median(OURS, d, "execution") for d in (small, large)}
    own = {d: host[d] - self.median(OURS, d, "constructor") for d in (small, large)}
    for d in (small, large):
      record.value(f"{d} blocks: executing the programs", self.median(OURS, d, "execution"), "s", group=group)
      record.value(
        f"{d} blocks: the user's constructor, traced", self.median(OURS, d, "constructor"), "s", group=group
      )
      record.value(f"{d} blocks: all else", own[d], "s", group=group)
    record.value("growth apart from execution", host[large] / host[small], "x", group=group)
    record.value("growth apart from execution and the constructor", own[large] / own[small], "x", group=group)
    if small == large:
      return
    grown, size = (
      self.median(OURS, large, key) - self.median(OURS, small, key) for key in ("grown", "bytes")
    )
    record.value("peak memory for each further byte created", grown / size, "bytes", group=group)
    record.value(
      "peak memory of a process's first program",
      self.median(OURS, large, "compiler") / 1e6,
      "MB",
      group=group,
    )

  def record_wide(self, record: Record) -> None:
    """Adds the peak memory of wide blocks."""
    if self.wide:
      grown = median(row["grown"] / row["bytes"] for row in self.wide)
      group = f"{self.axes} axes, {self.options.wide_depth} blocks, {WIDE} wide"
      record.value(f"{OURS}: bytes created", self.wide[0]["bytes"] / 1e6, "MB", group=group)
      record.value(f"{OURS}: peak growth", grown, "x", group=group)

  def depths(self) -> list[int]:
    return sorted({depth for _, depth in self.rows})


def parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser()
  parser.add_argument("--depths", type=int, nargs="+", default=[4, 12, 24, 48, 96])
  parser.add_argument("--width", type=int, default=WIDTH)
  parser.add_argument("--rounds", type=int, default=2)
  parser.add_argument("--wide-depth", type=int, default=6, help=f"blocks of {WIDE}, for memory; 0 for none")
  parser.add_argument("--once-s", type=float, default=8, help="a way that takes longer has one round")
  parser.add_argument(
    "--limit-s",
    type=float,
    default=240,
    help="a way whose process takes longer is stopped, and not tried deeper",
  )
  parser.add_argument("--axes", nargs="+", choices=["auto", "explicit"], default=["auto", "explicit"])
  parser.add_argument("--record-name", default="creation", help="the record's file name in results")
  parser.add_argument("--child", choices=list(WAYS))
  return parser.parse_args()


def main() -> None:
  """Measures, and writes `results/<record name>.{json,md}`."""
  options = parse()
  if options.child:
    child(options.child, options.depths[0], options.width, options.axes[0])
    return
  record = Record(
    options.record_name,
    f"Creating a transformer of {options.width}-wide blocks on 8 simulated devices (fsdp=4, tensor=2)",
    command=f"python -m benchmarks.creation {' '.join(sys.argv[1:])}".rstrip(),
    notes=[
      "`ratio` is of wall times; `quartiles` are the least and the greatest round. A way that takes over"
      f" {options.once_s:g} s has one round; one whose process takes over {options.limit_s:g} s is stopped,"
      " and not tried deeper. "
      + "; ".join(f"{way} is not tried beyond {depth} blocks" for way, depth in DEEPEST.items())
      + ". Where the baseline is not measured, a lesser time stands for it, and the true ratios are smaller.",
      "`second start` reads its programs from `nxp.compilation_cache`.",
      "`processor time` is user and system time of all threads. `compiling` adds up the backend's wall time"
      " for each program; ours compile several at a time.",
      "`peak growth` is the growth of the process's peak resident memory over the bytes created, compiler"
      " included, in a process that has compiled one 8 x 8 program.",
      "Seconds in `ours from ... to ...` are processor time. `the user's constructor` is flax's own work"
      " while it is traced, once for the plan and the programs.",
    ],
  )
  os.environ["CREATION_CACHE"] = tempfile.mkdtemp()
  measured: list[Measured] = []
  for axes in options.axes:
    measured.append(Measured(options, axes))
    for depth in options.depths:
      measured[-1].depth(depth)
      measured[-1].record(record, depth)
    measured[-1].record_growth(record)
    measured[-1].measure_wide()
    measured[-1].record_wide(record)
    record.notes.append(f"Load average over 15 minutes, {axes} axes done: {os.getloadavg()[2]:.1f}.")
    record.write()


if __name__ == "__main__":
  main()
