"""Import and export of a Llama-shaped checkpoint in bfloat16, against a loop by hand and plain reading.

  python -m benchmarks.huggingface              0.8 GB
  python -m benchmarks.huggingface --depth 1    a short run, no record

Each case starts with the file in the page cache. The memory is that of a process of its own: the most
anonymous memory it had during an import, over what it had before; 1 is that of the model alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

import safetensors.numpy  # noqa: E402
from flax import nnx  # noqa: E402

import nnx_parallel as nxp  # noqa: E402
from benchmarks.harness import Record, measure  # noqa: E402
from nnx_parallel.interop.families import from_config  # noqa: E402
from nnx_parallel.interop.huggingface import weight_map_of  # noqa: E402
from nnx_parallel.interop.safetensors import Tensor, export_safetensors, import_safetensors  # noqa: E402

DEPTH = 6
CASES = ("import", "by hand")
CONFIG: dict[str, Any] = {
  "model_type": "llama",
  "hidden_act": "silu",
  "hidden_size": 2048,
  "intermediate_size": 5632,
  "num_attention_heads": 16,
  "num_key_value_heads": 4,
  "vocab_size": 32000,
  "rms_norm_eps": 1e-6,
  "dtype": "bfloat16",
}


def make_plan(folder: Path) -> nxp.Plan:
  """Each array in 8 parts, on both axes."""
  rules = [nxp.presets.llama(), nxp.presets.fsdp_tensor()]
  mesh = nxp.make_mesh(fsdp=4, tensor=2)
  return nxp.plan(lambda: from_config(folder, nnx.Rngs(0), param_dtype="bfloat16"), mesh, rules)


def by_hand(folder: Path, plan: nxp.Plan) -> list[jax.Array]:
  """Reads each array, turns it, and cuts it into the shards: a loop as people write it."""
  file = safetensors.numpy.load_file(folder / "model.safetensors")
  made: list[jax.Array] = []
  leaves = plan.of("model")
  groups = weight_map_of(folder).to_write(leaf.name for leaf in leaves.values())
  by_name = {leaf.name: leaf for leaf in leaves.values()}
  for group in groups:
    leaf = by_name[group.layers[min(group.layers)]]
    array = file.pop(group.file)
    if array.ndim == 2 and leaf.shape != array.shape:
      array = np.ascontiguousarray(array.T)
    made.append(jax.device_put(array.reshape(leaf.shape), leaf.sharding))
  return made


def case(name: str, folder: Path, plan: nxp.Plan) -> Callable[[], Any]:
  """A case of `CASES`."""
  if name == "by hand":
    return lambda: by_hand(folder, plan)
  weight_map = weight_map_of(folder)
  return lambda: nnx.to_pure_dict(nnx.state(import_safetensors(folder, plan, weight_map)))


def anonymous() -> int:
  """Bytes of this process that no file holds."""
  text = Path("/proc/self/status").read_text()
  return int(text.split("RssAnon:")[1].split()[0]) * 1024


def memory(name: str, folder: Path) -> None:
  """Prints the extra peak memory of a case in bytes, after a first call that compiles."""
  call = case(name, folder, make_plan(folder))
  first = call()  # kept, so that the next one needs memory of its own
  before = peak = anonymous()
  done = threading.Event()

  def watch() -> None:
    nonlocal peak
    while not done.is_set():
      peak = max(peak, anonymous())
      time.sleep(0.002)

  watcher = threading.Thread(target=watch)
  watcher.start()
  kept = call()
  done.set()
  watcher.join()
  del first, kept
  print(peak - before)


def bytes_read(folder: Path, plan: nxp.Plan) -> int:
  """The bytes that an import reads of the arrays."""
  total, read = 0, Tensor.read

  def counted(self: Tensor, index: tuple[slice, ...] = ()) -> np.ndarray[Any, Any]:
    nonlocal total
    values = read(self, index)
    total += values.nbytes
    return values

  Tensor.read = counted
  import_safetensors(folder, plan, weight_map_of(folder))
  Tensor.read = read
  return total


def main() -> None:
  """Measures and writes the record."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--depth", type=int, default=DEPTH)
  parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.memory:
    return memory(arguments.memory[0], Path(arguments.memory[1]))
  record = Record(
    "huggingface",
    f"A Llama-shaped checkpoint of {arguments.depth} layers, bfloat16, into fsdp=4 x tensor=2 and back",
    command="python -m benchmarks.huggingface",
    notes=[
      "By hand: the whole file is read, each array is transposed and cut with device_put.",
      "Plain: all bytes of the file, read or written in one stream without fsync.",
    ],
  )
  with tempfile.TemporaryDirectory() as name:
    root = Path(name)
    (root / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": arguments.depth}))
    plan = make_plan(root)
    model = nxp.create_sharded_model(plan)
    folder, weight_map = root / "theirs", weight_map_of(root)
    export_safetensors(folder, model, weight_map)
    shutil.copy(root / "config.json", folder)
    file = folder / "model.safetensors"
    size = file.stat().st_size
    content = file.read_bytes()

    def export() -> None:
      shutil.rmtree(root / "out", ignore_errors=True)
      export_safetensors(root / "out", model, weight_map)

    reads = {"plain": lambda: np.fromfile(file, np.uint8)}
    reads |= {one: case(one, folder, plan) for one in CASES}
    record.compare(measure(reads, rounds=7, warmup=1), baseline="plain", group="read")
    writes = {"plain": lambda: (root / "plain").write_bytes(content), "export": export}
    record.compare(measure(writes, rounds=5, warmup=1), baseline="plain", group="write")
    record.value("bytes read", round(bytes_read(folder, plan) / size, 4), "of the file")
    for one in CASES:
      command = [sys.executable, "-m", "benchmarks.huggingface", "--memory", one, str(folder)]
      extra = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
      record.value(f"extra peak memory, {one}", round(extra / size, 3), "of the file")
  if arguments.depth == DEPTH:
    record.write()
  else:
    print(json.dumps(record.rows, indent=1))


if __name__ == "__main__":
  main()
