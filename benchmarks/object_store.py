"""Saves and restores on an emulated object store, and beside them the requests alone.

    make store        installs the emulator and runs this

A model of 200 shards is saved, found and restored on a store that answers each request after a latency. The
requests alone: TensorStore writes, then reads, as many objects of the same bytes. Each latency has a process
and an emulator of its own; the emulator is a Python program on the same cores, so the times without latency
are its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import tensorstore as ts  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import nnx_parallel as nxp  # noqa: E402
from benchmarks.harness import Record  # noqa: E402
from tests.emulated_store import emulator  # noqa: E402

ARRAYS, ROWS, COLUMNS, ROUNDS = 25, 64, 1024, 3
LATENCIES_MS = (0, 40)


def timed(call: Callable[[], object]) -> float:
  """Seconds that a call takes."""
  began = time.perf_counter()
  call()
  return time.perf_counter() - began


def times(latency_ms: float) -> dict[str, float]:
  """Medians over the rounds, in seconds, by what is done."""
  where = NamedSharding(nxp.make_mesh(fsdp=8), P("fsdp"))
  tree = {f"a{i}": jax.device_put(jnp.full((ROWS, COLUMNS), i, jnp.float32), where) for i in range(ARRAYS)}
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)
  shard = bytes(ROWS * COLUMNS * 4 // 8)
  found: dict[str, list[float]] = {}
  with emulator(latency_ms) as bucket:
    for i in range(-1, ROUNDS):  # the first round opens connections, and is not counted
      store = ts.KvStore.open(f"{bucket}/plain{i}/").result()
      names = [str(n) for n in range(ARRAYS * 8)]
      checkpointer = nxp.Checkpointer(f"{bucket}/run{i}")
      round_ = {
        "requests alone, write": timed(lambda: [f.result() for f in [store.write(n, shard) for n in names]]),  # noqa: B023
        "save": timed(lambda: checkpointer.save(1, tree)),  # noqa: B023
        "requests alone, read": timed(lambda: [f.result() for f in [store.read(n) for n in names]]),  # noqa: B023
        "latest": timed(lambda: nxp.Checkpointer(f"{bucket}/run{i}").latest()),  # noqa: B023
        "restore": timed(lambda: checkpointer.restore(target)),  # noqa: B023
      }
      if i >= 0:
        for name, seconds in round_.items():
          found.setdefault(name, []).append(seconds)
  return {name: statistics.median(seconds) for name, seconds in found.items()}


def main() -> None:
  """Measures each latency in a process of its own, and writes the record."""
  notes = [
    f"{ARRAYS * 8} shards of {ROWS * COLUMNS * 4 // 8 // 1024} KiB; medians of {ROUNDS} rounds. Each request"
    " is answered after the latency, any number at a time. A save also reads the files again for their"
    " SHA-256, and a restore compares them."
  ]
  record = Record("object_store", "Checkpoints on an emulated object store", "make store", notes)
  for latency in LATENCIES_MS:
    command = [sys.executable, "-m", "benchmarks.object_store", str(latency)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    for name, seconds in json.loads(done.stdout.splitlines()[-1]).items():
      record.value(name, round(seconds, 3), "s", group=f"{latency} ms a request")
  record.write()


if __name__ == "__main__":
  if sys.argv[1:]:
    print(json.dumps(times(float(sys.argv[1]))))
  else:
    main()
