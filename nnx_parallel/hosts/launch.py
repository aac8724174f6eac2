"""Starts the processes of a job on this machine, shows their output, and restarts them if one fails.

Nothing here imports jax: the launcher holds no device.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from nnx_parallel.errors import HostError
from nnx_parallel.hosts.heartbeat import STOPPED, VARIABLE, last_beat

NOISE = re.compile(
  # Threads of gloo write parts of its lines in turn.
  r".*(?:\[Gloo\] Rank \d+ is connected|number of connected peer ranks)|[IW]\d{4} \d\d:\d\d:\d\d\.\d+ "
  r"|WARNING: All log messages before absl::"
  r"|    @ +0x[0-9a-f]+ |=== Source Location Trace|\*\*\* Check failure stack trace|external/xla"
)
REST_OF_NOISE = re.compile(r"\s*\d*\s*$")  # the last part of a line of gloo, on a separate line
LONGEST_LINE = 1 << 16
LOOK_S = 0.05
FINAL_CODES = (2, 3, STOPPED)  # wrong usage, an answer that is no, and an end that was asked for
LONGEST_PAUSE_S = 60
TAIL = 30  # lines


@dataclasses.dataclass(frozen=True)
class Job:
  """The command of a job, and how to supervise it.

  Attributes:
    command: the command of each process.
    again: the command after an attempt that made a step; by default the same.
    processes: the number of processes to start here.
    devices_per_process: the number of simulated CPU devices of each process; None for accelerators, one for
      each process.
    cluster: whether there is one process, whose number and peers come from the scheduler's variables,
      unchanged.
    restarts: how often all processes are restarted after a failure.
    pause: seconds before the first restart; the pause doubles for each next restart, up to a minute, and
      starts over after an attempt that got further than all before.
    hang_after: seconds without a step, after its first step, that count as a failure of a process; None:
      never.
    grace: seconds between a signal to the launcher and the end by force.
    end_after: seconds between a failure and the forced end of the other processes: they cannot save alone.
    all_logs: whether to show noise, and the output of other processes after the first failure.
  """

  command: Sequence[str]
  again: Sequence[str] = ()
  processes: int = 1
  devices_per_process: int | None = None
  cluster: bool = False
  restarts: int = 0
  pause: float = 1.0
  hang_after: float | None = None
  grace: float = 30.0
  end_after: float = 0.5
  all_logs: bool = False


@dataclasses.dataclass
class Worker:
  """One process of an attempt, within its supervisor."""

  number: int
  supervisor: subprocess.Popen[bytes]
  beats: Path
  step: int | None = None
  stepped: float = 0.0
  lines: collections.deque[str] = dataclasses.field(default_factory=collections.deque[str])
  tail: collections.deque[str] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=TAIL))
  held: int = 0
  code: int | None = None

  def start(self, *, all_logs: bool) -> None:
    """Starts to read the lines of the process."""
    self._reader = threading.Thread(target=self._read, args=(all_logs,), daemon=True)
    self._reader.start()

  def _read(self, all_logs: bool) -> None:
    """Reads the lines, without noise, and at most one state a second of a bar that is redrawn."""
    noisy, redrawn = False, 0.0
    with io.TextIOWrapper(cast(BinaryIO, self.supervisor.stdout), errors="replace", newline="") as output:
      while text := output.readline(LONGEST_LINE):
        line = text.rstrip("\r\n")
        if text.endswith("\r"):
          if not line.strip() or time.monotonic() - redrawn < 1:
            continue
          redrawn = time.monotonic()
        noisy = bool(NOISE.match(line) or (noisy and REST_OF_NOISE.match(line)))
        if all_logs or not noisy:
          self.lines.append(line)

  def end(self) -> None:
    """Ends what is left of the process and its children, and reads its last lines."""
    self.signal(signal.SIGKILL)
    self.supervisor.wait()
    self._reader.join(1)  # a process in a session of its own may hold the output

  def look(self) -> None:
    """Reads the newest step. Its time is this process's own: clocks that are set do not count."""
    found = last_beat(self.beats)
    if found is not None and (self.step is None or found > self.step):
      self.step, self.stepped = found, time.monotonic()

  def signal(self, number: signal.Signals) -> None:
    """To the worker alone; SIGKILL to all that it started."""
    if number != signal.SIGKILL:
      with contextlib.suppress(ProcessLookupError):
        self.supervisor.send_signal(number)
      return
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.supervisor.pid, number)


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How an attempt ended: the code of the launcher, the first failure, and the last step."""

  code: int
  failure: str = ""
  step: int = -1


def launch(job: Job, write: Callable[[str], None] = print) -> int:
  """Runs a job to its end: all processes ended well, the budget of restarts is used up, or a signal came.

  SIGTERM and the first Ctrl-C are passed on to the processes, which may save; the second ends them at once.
  No process outlives the launcher, even if the launcher is killed.

  Args:
    job: the job to start.
    write: shows a line.

  Returns:
    0, the code of the process that failed first, 75 if a process was asked to stop (SIGTERM, to the launcher
    or to any process) and all processes saved and ended in order, or 128 + n after another end by a signal.
  """
  if job.processes < 1 or (job.cluster and job.processes != 1):
    raise HostError(
      f"cannot start {job.processes} processes{' of a cluster here' if job.cluster else ''}.",
      fix="--processes 1 or more; with --cluster 1, since the scheduler starts a launcher for each.",
    )
  best, pause, outcome = -1, job.pause, Outcome(0)
  with _signals() as came, tempfile.TemporaryDirectory(prefix="nnx_parallel-") as folder:
    for attempt in range(job.restarts + 1):
      command = job.again if best >= 0 and job.again else job.command
      outcome = _Attempt(job, command, attempt, Path(folder), came, write).run()
      if outcome.code == 0 or came or outcome.code in FINAL_CODES:
        return outcome.code
      if attempt == job.restarts:
        break
      if outcome.step > best:
        best, pause = outcome.step, job.pause
      write(f"-- restart {attempt + 1} of {job.restarts} in {pause:g} s")
      _wait(pause, came)
      if came:
        return 128 + came[0]
      pause = min(2 * pause, LONGEST_PAUSE_S)
  if job.restarts:
    write(f"-- no restart is left of {job.restarts}")
  return outcome.code


def _wait(seconds: float, came: list[int]) -> None:
  until = time.monotonic() + seconds
  while not came and time.monotonic() < until:
    time.sleep(0.05)


@contextlib.contextmanager
def _signals() -> Generator[list[int]]:
  """The signals that came, in a list that grows."""
  came: list[int] = []

  def handle(number: int, _: types.FrameType | None) -> None:
    came.append(number)

  former = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield came
  finally:
    for number, handler in former.items():
      signal.signal(number, handler)


@dataclasses.dataclass
class _Attempt:
  """All processes of a job, started once.

  Attributes:
    came: the signals that the launcher got so far.
    outcome: the first failure, or the signal.
    signalled: the number of handled signals.
    end_by: the time at which remaining processes are ended by force.
  """

  job: Job
  command: Sequence[str]
  number: int
  folder: Path
  came: Sequence[int]
  write: Callable[[str], None]
  workers: list[Worker] = dataclasses.field(default_factory=list[Worker])
  outcome: Outcome = Outcome(0)
  signalled: int = 0
  end_by: float = float("inf")
  started: float = dataclasses.field(default_factory=time.monotonic)

  def run(self) -> Outcome:
    """Returns when all processes, and all processes that they started, have ended."""
    watched, alive = os.pipe()  # `alive` is closed when this process ends, however it ends
    try:
      self._start(watched)
      while any(worker.code is None for worker in self.workers):
        time.sleep(LOOK_S)
        self._look()
    finally:
      for worker in self.workers:
        worker.end()
      os.close(watched)
      os.close(alive)
    for worker in self.workers:
      self._show(worker)
      if worker.held and not self.job.all_logs:
        self.write(f"-- process {worker.number}: {worker.held} more lines after that (--all-logs shows them)")
    codes = {worker.code for worker in self.workers}
    code = STOPPED if not self.outcome.failure and {0} != codes <= {0, STOPPED} else self.outcome.code
    return dataclasses.replace(
      self.outcome, code=code, step=max(_last_steps(self.workers).values(), default=-1)
    )

  def _start(self, watched: int) -> None:
    job, port = self.job, free_port()
    for n in range(job.processes):
      beats = self.folder / f"{self.number}-{n}"
      variables = worker_variables(job, n, port, os.environ)
      variables |= {VARIABLE: str(beats), "NNX_PARALLEL_ATTEMPT": str(self.number)}
      self.workers.append(Worker(n, _start(self.command, variables, watched), beats))
      self.workers[-1].start(all_logs=job.all_logs)

  def _look(self) -> None:
    """Checks which processes ended or hang and which signals came, and reacts."""
    for worker in self.workers:
      self._show(worker)
      worker.look()
    failed = self._ended()
    if failed is not None:
      self._show(failed)
    if self.outcome.code in (0, STOPPED):
      if failed is not None and failed.code == STOPPED:
        self.outcome = Outcome(STOPPED)
        self.end_by = min(self.end_by, time.monotonic() + self.job.grace)
      elif failed is not None:
        self._fail(failed, failed.code or 1, f"failed first: {describe(failed.code or 1)}")
      elif hung := _hung(self.job, self.workers):
        worker, how = hung
        steps = f"last steps {_last_steps(self.workers)}"
        self._fail(worker, 1, f"{how}: no step for {self.job.hang_after:g} s; {steps}")
    if not self.outcome.failure and len(self.came) > self.signalled:
      self._pass_on()
    if time.monotonic() > self.end_by or (self.outcome.failure and self.came):
      _signal_all(self.workers, signal.SIGKILL)
      self.end_by = time.monotonic() + 1

  def _ended(self) -> Worker | None:
    """The first process that was not known to have ended, with an error.

    Several may have ended since the last look. Then a process that was killed comes first: the others fail
    within a tenth of a second, because it no longer answers.
    """
    ended: list[Worker] = []
    for worker in self.workers:
      if worker.code is None and (code := worker.supervisor.poll()) is not None:
        worker.code = code if code >= 0 else 128 - code  # the supervisor itself was killed
        worker.end()
        ended.append(worker)
    return min((worker for worker in ended if worker.code), key=_order_of_failure, default=None)

  def _fail(self, worker: Worker, code: int, how: str) -> None:
    failure = f"process {worker.number} {how} after {time.monotonic() - self.started:.1f} s"
    self.outcome = Outcome(code, failure)
    self.write(f"-- {failure}")
    for line in worker.tail:
      self.write(f"-- [{worker.number}] {line}")
    self.end_by = time.monotonic() + self.job.end_after
    _signal_all(self.workers, signal.SIGTERM)

  def _pass_on(self) -> None:
    """The first signal lets processes save; the second ends them."""
    self.signalled += 1  # one at a time: the next signal may come at any moment
    first = self.signalled == 1
    self.write(f"-- {signal.Signals(self.came[0]).name}: passed on" if first else "-- ending at once")
    self.end_by = time.monotonic() + (self.job.grace if first else 0)
    self.outcome = Outcome(128 + self.came[0])
    _signal_all(self.workers, signal.SIGTERM)

  def _show(self, worker: Worker) -> None:
    """Shows the new lines of a process; after a failure they are only counted."""
    while worker.lines:
      line = worker.lines.popleft()
      if self.outcome.failure and not self.job.all_logs:
        worker.held += 1
      else:
        worker.tail.append(line)
        self.write(f"[{worker.number}] {line}")


def _start(command: Sequence[str], variables: Mapping[str, str], watched: int) -> subprocess.Popen[bytes]:
  supervisor = str(Path(__file__).with_name("supervisor.py"))
  return subprocess.Popen(
    [sys.executable, "-I", "-S", supervisor, str(watched), *command],
    env=dict(variables),
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    pass_fds=[watched],
    start_new_session=True,  # a separate group, which Ctrl-C in the terminal does not reach
  )


def _signal_all(workers: Sequence[Worker], number: signal.Signals) -> None:
  for worker in workers:
    if worker.code is None:
      worker.signal(number)


def _hung(job: Job, workers: Sequence[Worker]) -> tuple[Worker, str] | None:
  """The process behind all others, if a process has made no step for too long, and its state."""
  if job.hang_after is None:
    return None
  stepped = [worker for worker in workers if worker.code is None and worker.step is not None]
  if not any(time.monotonic() - worker.stepped > job.hang_after for worker in stepped):
    return None
  worker = min(stepped, key=lambda worker: (worker.step, worker.stepped))
  alone = sum(other.step == worker.step for other in stepped) == 1 or len(workers) == 1
  return worker, "hangs" if alone else "hangs, or waits for another that does"


def _last_steps(workers: Sequence[Worker]) -> dict[int, int]:
  return {worker.number: worker.step for worker in workers if worker.step is not None}


def free_port() -> int:
  """A port of this machine that nobody listens on."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def _order_of_failure(worker: Worker) -> int:
  """Sorts processes that ended at the same time: killed, failed, aborted by JAX, stopped in order."""
  code = worker.code or 0
  if code == STOPPED:
    return 3
  if code == 128 + signal.SIGABRT:
    return 2
  return int(code <= 128)


def describe(code: int) -> str:
  """An exit code in words."""
  with contextlib.suppress(ValueError):
    if code > 128:
      return f"killed by {signal.Signals(code - 128).name}"
  return f"exit code {code}"


def worker_variables(job: Job, number: int, port: int, environment: Mapping[str, str]) -> dict[str, str]:
  """The environment of one process: the launcher's, the address of its peers, and its simulated devices."""
  variables = {**environment, "PYTHONUNBUFFERED": "1"}
  if not job.cluster:
    count = str(job.processes)
    variables |= {"RANK": str(number), "LOCAL_RANK": str(number), "MASTER_ADDR": "127.0.0.1"}
    variables |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": str(port)}
    variables.pop("TORCHELASTIC_USE_AGENT_STORE", None)
  if job.devices_per_process is not None:
    flags = environment.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if "xla_force_host_platform_device_count" not in flag]
    variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(job.devices_per_process)}
    variables["XLA_FLAGS"] = " ".join(kept)
    # Devices that wait in a collective hold a thread each of a pool as large as this.
    variables.setdefault("NPROC", str(4 * max(job.devices_per_process, os.cpu_count() or 1)))
  return variables
