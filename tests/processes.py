"""Jobs of several processes on this machine, started together and joined by JAX's runtime."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

START = """
import sys
process, port, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
import jax
jax.distributed.initialize(f"localhost:{port}", 2, process, heartbeat_timeout_seconds=10)
import numpy as np
import nnx_parallel as nxp
from jax.sharding import NamedSharding, PartitionSpec as P

def put(values, mesh, *spec):
  sharding = NamedSharding(mesh, P(*spec))
  return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
"""


def run_two(body: str, *arguments: object) -> list[str]:
  """Runs Python code in two processes of four devices each; both must end well.

  Args:
    body: runs after `START`: it has `process` (0 or 1), `arguments`, `put`, and the modules imported there.
    *arguments: as text in `arguments`.

  Returns:
    What each of them printed.
  """
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
  flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
  code = START + textwrap.dedent(body)
  jobs = [
    subprocess.Popen(
      [sys.executable, "-c", code, str(process), str(port), *map(str, arguments)],
      env={**os.environ, **flags},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for process in range(2)
  ]
  try:
    results = [job.communicate(timeout=240) for job in jobs]
  finally:
    for job in jobs:
      job.kill()
  for job, (_, errors) in zip(jobs, results, strict=True):
    assert job.returncode == 0, errors
  return [out for out, _ in results]
