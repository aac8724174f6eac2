"""Jobs of several processes on this machine, joined by JAX's runtime.

The interpreters are started once for each pytest worker and run one body after another: to start them, and to
import jax in all, takes longer than most bodies. A body that fails ends its group.
"""

import atexit
import concurrent.futures
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from typing import Any

TIMEOUT_S = 240

RUNNER = """
import contextlib, io, json, os, sys, traceback, unittest.mock
process, count, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
answers = os.fdopen(int(sys.argv[4]), "w")  # gloo writes to stdout
import jax
jax.distributed.initialize(f"localhost:{port}", count, process, heartbeat_timeout_seconds=10)
import numpy as np
import nnx_parallel as nxp
from jax.sharding import NamedSharding, PartitionSpec as P

def put(values, mesh, *spec):
  sharding = NamedSharding(mesh, P(*spec))
  return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

given = dict(globals())
for line in sys.stdin:
  code, arguments = json.loads(line)
  printed, error = io.StringIO(), None
  with contextlib.ExitStack() as undo, contextlib.redirect_stdout(printed):
    def patch(owner, name, value):
      undo.enter_context(unittest.mock.patch.object(owner, name, value))
    try:
      exec(compile(code, "<body>", "exec"), {**given, "arguments": arguments, "patch": patch})
    except BaseException:
      error = traceback.format_exc()
  print(json.dumps([printed.getvalue(), error]), file=answers, flush=True)
"""


class Group:  # Processes with eight devices together that run the same Python code
  def __init__(self, count: int) -> None:
    with socket.socket() as probe:
      probe.bind(("localhost", 0))
      port = probe.getsockname()[1]
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // count}"}
    self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `end`)
    self.jobs, self.answers = [], []
    for process in range(count):
      answers, theirs = os.pipe()
      self.answers.append(os.fdopen(answers))
      job = subprocess.Popen(
        [sys.executable, "-c", RUNNER, *map(str, (process, count, port, theirs))],
        env={**os.environ, **flags, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE, stdout=self.output, stderr=self.output, pass_fds=[theirs], text=True,
      )  # fmt: skip
      os.close(theirs)
      self.jobs.append(job)

  def run(self, code: str, arguments: list[str]) -> list[tuple[str, str | None]]:
    """Runs the code in all; returns what each printed and its traceback, if any."""
    for job in self.jobs:
      job.stdin.write(json.dumps([code, arguments]) + "\n")
      job.stdin.flush()
    readers = concurrent.futures.ThreadPoolExecutor(len(self.jobs))
    try:
      lines = [readers.submit(answers.readline) for answers in self.answers]
      return [self._answer(line.result(timeout=TIMEOUT_S)) for line in lines]
    finally:
      readers.shutdown(wait=False)

  def _answer(self, line: str) -> tuple[str, str | None]:
    if line:
      printed, error = json.loads(line)
      return printed, error
    self.output.seek(0)
    return "", f"a process ended:\n{self.output.read()}"

  def end(self) -> None:
    for job, answers in zip(self.jobs, self.answers, strict=True):
      job.kill()
      job.wait()
      answers.close()
      with contextlib.suppress(BrokenPipeError):
        job.stdin.close()
    self.output.close()


_groups: dict[int, Group] = {}


@atexit.register
def end_groups() -> None:
  while _groups:
    _groups.popitem()[1].end()


def run_two(body: str, *arguments: Any) -> list[str]:
  """As `run_in`, in two processes of four devices each."""
  return run_in(2, body, *arguments)


def run_in(count: int, body: str, *arguments: Any) -> list[str]:
  """Runs Python code in processes with eight devices together; all must end well.

  Args:
    count: of processes: 2, 4 or 8.
    body: it has `process` (from 0), `count`, `arguments`, `put`, the modules that `RUNNER` imports, and
      `patch(owner, name, value)`, which is undone after it.
    *arguments: as text in `arguments`.

  Returns:
    What each of them printed.
  """
  if count not in _groups:
    _groups[count] = Group(count)
  try:
    results = _groups[count].run(textwrap.dedent(body), [str(argument) for argument in arguments])
  except BaseException:
    _groups.pop(count).end()
    raise
  failed = [error for _, error in results if error]
  if failed:
    _groups.pop(count).end()
  assert not failed, "\n".join(failed)
  return [printed for printed, _ in results]
