"""What a test may change for the tests after it, read before and after each one."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import flax.core.spmd
import jax
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from nnx_parallel.layout.constrain import scope_in_use

LOGGERS = ("", "absl", "jax", "nnx_parallel")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Idle threads of pools, by the start of their names: Orbax, TensorStore, jax and Python keep theirs until the
# process ends, and a `Checkpointer` keeps one until it is closed or collected.
POOLS = (
  "ThreadPoolExecutor", "asyncio_", "base_pytree_ch", "metadata_store", "execnet", "Dummy-", "grpc",
  "nnx_parallel-checkpoint",
)  # fmt: skip
# Libraries set these when they are imported: pytest, scikit-learn's OpenMP, and jax's Pallas for GPUs.
OWN_VARIABLES = {"PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "MOSAIC_GPU_CUDA_ROOT"}


def _configuration() -> dict[str, Any]:
  # A context manager of jax changes what the attribute says, and not `values`.
  return {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}


def _loggers() -> dict[str, Any]:
  found = {name: logging.getLogger(name) for name in LOGGERS}
  handlers = lambda logger: [h for h in logger.handlers if not type(h).__module__.startswith("_pytest")]
  return {name: (log.level, log.disabled, log.propagate, handlers(log)) for name, log in found.items()}


def _threads() -> dict[str, Any]:
  alive = [thread for thread in threading.enumerate() if not thread.name.startswith(POOLS)]
  return {f"{thread.name} ({thread.ident})": "running" for thread in alive}


READERS: dict[str, Callable[[], Mapping[str, Any]]] = {
  "mesh": lambda: {
    "jax.set_mesh": jax.sharding.get_mesh(),
    "jax.sharding.use_abstract_mesh": jax.sharding.get_abstract_mesh(),
  },
  "rules": lambda: {
    "use_rules": scope_in_use(),
    "nnx.logical_axis_rules": tuple(flax.core.spmd.get_logical_axis_rules()),
    "nnx.use_eager_sharding": nnx.using_eager_sharding(),
  },
  "jax.config": _configuration,
  "os.environ": lambda: {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES},
  "working folder": lambda: {"os.getcwd()": os.getcwd()},
  "signal handlers": lambda: {number.name: signal.getsignal(number) for number in SIGNALS},
  "logging": _loggers,
  "sys.path": lambda: {"sys.path": tuple(sys.path)},
  "threads": _threads,
}

State = dict[str, Mapping[str, Any]]


def read() -> State:
  """The state of this process that tests share."""
  return {kind: reader() for kind, reader in READERS.items()}


def differences(before: State, after: State) -> list[str]:
  """One line for each thing that is not as before."""
  lines: list[str] = []
  for kind, old in before.items():
    new = after[kind]
    for name in sorted(old.keys() | new.keys()):
      if kind == "threads" and name not in new:
        continue  # one that ended
      if old.get(name) != new.get(name):
        lines.append(f"{kind}: {name} was {old.get(name)!r}, is {new.get(name)!r}")
  return lines


def left_since(before: State, patience_s: float = 5.0) -> list[str]:
  """What a test left, `patience_s` after its end at the latest: its threads may be about to end."""
  deadline = time.monotonic() + patience_s
  left = differences(before, read())
  while any(line.startswith("threads:") for line in left) and time.monotonic() < deadline:
    time.sleep(0.02)
    left = differences(before, read())
  return left


def take_back(before: State) -> None:
  """Undoes what can be undone, so that one test that leaves something is one failure."""
  jax.set_mesh(before["mesh"]["jax.set_mesh"])
  if changed := differences_of(before["jax.config"], _configuration()):
    for name, value in changed.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()  # jax looks for its folder once
  for name in os.environ.keys() - before["os.environ"].keys() - OWN_VARIABLES:
    del os.environ[name]
  os.environ.update(before["os.environ"])
  os.chdir(before["working folder"]["os.getcwd()"])
  for number in SIGNALS:
    signal.signal(number, before["signal handlers"][number.name])
  sys.path[:] = before["sys.path"]["sys.path"]


def differences_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
  """The values before, of what has another value after."""
  return {name: value for name, value in before.items() if after.get(name) != value}
