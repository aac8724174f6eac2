"""Creating a sharded transformer at several depths, four ways: time, compilation and peak memory.

`python benchmarks/creation.py` measures all of it on both axis types (an hour on 2 cores);
`--depths 4 12 --rounds 1 --axes auto` measures less. Each measurement has a process of its own, so that
nothing is compiled already and the peak of its memory is its own; the ways take turns.
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
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
from flax import nnx

import nnx_parallel as nxp
from harness import RESULTS, Record, Timing

WIDTH = 256
GUIDE = "nnx.jit constructor"
OURS = "create_sharded_model"
SECOND = f"{OURS}, second start"
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def linear(inputs: int, outputs: int, names: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
  return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": names})


class Block(nnx.Module):
  """A transformer block: its parameters, annotated with mesh axes."""

  def __init__(self, rngs: nnx.Rngs):
    self.norms = nnx.List(nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
    self.query, self.key, self.value = (linear(WIDTH, WIDTH, ("fsdp", "tensor"), rngs) for _ in range(3))
    self.out = linear(WIDTH, WIDTH, ("tensor", "fsdp"), rngs)
    self.gate, self.up = (linear(WIDTH, 4 * WIDTH, ("fsdp", "tensor"), rngs) for _ in range(2))
    self.down = linear(4 * WIDTH, WIDTH, ("tensor", "fsdp"), rngs)


def build(depth: int) -> nnx.List:
  rngs = nnx.Rngs(0)
  return nnx.List(Block(rngs) for _ in range(depth))


def guide(depth: int, mesh: jax.sharding.Mesh) -> nnx.Module:
  """The flax guide: construct under `nnx.jit`, constrain the state to its annotations."""

  @nnx.jit
  def constructor() -> nnx.Module:
    model = build(depth)
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model

  with jax.set_mesh(mesh):
    return constructor()


def eager(depth: int, mesh: jax.sharding.Mesh) -> nnx.Module:
  """Eager construction: flax places each Variable when it is made."""
  with jax.set_mesh(mesh):
    return build(depth)


def out_shardings(depth: int, mesh: jax.sharding.Mesh) -> nnx.Module:
  """One `jax.jit` of the state, with the shardings of an abstract build."""
  with jax.set_mesh(mesh):
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: build(depth)))
    shardings = nnx.get_named_sharding(abstract, mesh)
    return nnx.merge(graphdef, jax.jit(lambda: nnx.state(build(depth)), out_shardings=shardings)())


def ours(depth: int, mesh: jax.sharding.Mesh) -> nnx.Module:
  return nxp.create_sharded_model(lambda: build(depth), mesh)


def second_start(depth: int, mesh: jax.sharding.Mesh) -> nnx.Module:
  """Ours, with the programs that an earlier process left in the cache."""
  nxp.compilation_cache(os.environ["CREATION_CACHE"])
  return ours(depth, mesh)


WAYS: dict[str, Callable[[int, jax.sharding.Mesh], nnx.Module]] = {
  GUIDE: guide,
  "eager under jax.set_mesh": eager,
  "jax.jit, out_shardings": out_shardings,
  OURS: ours,
  SECOND: second_start,
}


def peak_bytes() -> int:
  lines = Path("/proc/self/status").read_text().splitlines()
  return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def child(way: str, depth: int, axes: str) -> None:
  """Creates once, and prints what it took."""
  compiling: list[float] = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiling.append(seconds) if event == COMPILE_EVENT else None
  )
  mesh = nxp.make_mesh(fsdp=4, tensor=2, explicit=axes == "explicit")
  jax.block_until_ready(jax.device_put(0.0, jax.NamedSharding(mesh, jax.P())))
  before, compiling[:] = peak_bytes(), []
  began = time.perf_counter()
  model = WAYS[way](depth, mesh)
  jax.block_until_ready(nnx.state(model))
  wall = time.perf_counter() - began
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
  found = {"wall": wall, "compile": sum(compiling), "grown": peak_bytes() - before, "bytes": size}
  print(json.dumps(found))


def measure_once(way: str, depth: int, axes: str) -> dict[str, Any]:
  command = [sys.executable, __file__, "--child", way, "--depths", str(depth), "--axes", axes]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    sys.exit(done.stderr)
  return json.loads(done.stdout.splitlines()[-1])


def median(found: list[dict[str, Any]], key: str) -> float:
  return sorted(row[key] for row in found)[len(found) // 2]


def picture(curves: dict[tuple[str, str], dict[int, float]]) -> None:
  """Seconds by depth, one line for each way."""
  import matplotlib as mpl

  mpl.use("agg")
  from matplotlib import pyplot as plt

  kinds = list(dict.fromkeys(axes for axes, _ in curves))
  figure, plots = plt.subplots(1, len(kinds), figsize=(5 * len(kinds), 4), sharey=True, squeeze=False)
  for plot, kind in zip(plots[0], kinds, strict=True):
    for (axes, way), curve in curves.items():
      if axes == kind:
        plot.plot(list(curve), list(curve.values()), marker="o", label=way)
    plot.set(title=f"{kind} axes", xlabel="blocks", ylabel="seconds to create", yscale="log")
    plot.set_xticks(sorted({depth for curve in curves.values() for depth in curve}))
    plot.grid(alpha=0.3)
  plots[0][0].legend()
  figure.tight_layout()
  figure.savefig(RESULTS / "creation.png", dpi=120)


def main() -> None:
  """Measures, and writes `results/creation.{json,md,png}`."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--depths", type=int, nargs="+", default=[4, 12, 24, 48, 96])
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--axes", nargs="+", choices=["auto", "explicit"], default=["auto", "explicit"])
  parser.add_argument("--child", choices=list(WAYS))
  options = parser.parse_args()
  if options.child:
    child(options.child, options.depths[0], options.axes[0])
    return
  record = Record(
    "creation",
    f"Creating a transformer of {WIDTH}-wide blocks on 8 simulated devices (fsdp=4, tensor=2)",
    command=f"python benchmarks/creation.py {' '.join(sys.argv[1:])}".rstrip(),
    notes=[
      "`second start` reads its programs from `nxp.compilation_cache`.",
      "`compiling` adds up the backend's time for each program; ours compile several at a time.",
      "`peak growth` is the growth of the process's peak resident memory, compiler included, over the bytes"
      " created.",
    ],
  )
  curves: dict[tuple[str, str], dict[int, float]] = {}
  os.environ["CREATION_CACHE"] = tempfile.mkdtemp()
  for axes in options.axes:
    for depth in options.depths:
      found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
      measure_once(SECOND, depth, axes)  # fills the cache
      for _ in range(options.rounds):
        for way, rows in found.items():
          rows.append(measure_once(way, depth, axes))
          print(axes, depth, way, rows[-1], flush=True)
      group = f"{axes} axes, {depth} blocks"
      timings = {way: Timing(way, tuple(row["wall"] for row in rows)) for way, rows in found.items()}
      record.compare(timings, baseline=GUIDE, group=group)
      for way, rows in found.items():
        curves.setdefault((axes, way), {})[depth] = timings[way].median
        record.value(f"{way}: compiling", median(rows, "compile"), "s", group=group)
        record.value(f"{way}: peak growth", median(rows, "grown") / rows[0]["bytes"], "x", group=group)
  record.write()
  picture(curves)


if __name__ == "__main__":
  main()
