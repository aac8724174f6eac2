"""Starts the processes of a job on this machine, shows their output, and restarts them if one fails.

Nothing here imports jax: the launcher holds no device.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import IO

from nnx_parallel.hosts.heartbeat import STOPPED, VARIABLE, last_beat

Write = Callable[[str], None]  # shows a line; several threads call it
LOOK_S = 0.05
SEEN_LATE_S = 0.3
LAST_LINES = 12
WELL_BEFORE_S = 1.0
FINAL_CODES = (2, 3, STOPPED)  # wrong usage, an answer that is no, and an end that was asked for
LONGEST_PAUSE_S = 60
END_AFTER_S = 0.5  # between a failure and the forced end of the others, which cannot save alone


@dataclasses.dataclass(frozen=True)
class Job:
  """The command of a job, and the options of `launch`; `again` is the command once a step was made."""

  command: Sequence[str]
  again: Sequence[str] = ()
  processes: int = 1
  devices_per_process: int | None = None
  cluster: bool = False  # the scheduler's variables say the number and the peers of the one process
  restarts: int = 0
  pause: float = 1.0
  hang_after: float | None = None
  grace: float = 30.0


class Worker:
  """One process of an attempt, within its supervisor; `watched` becomes readable when the launcher ends."""

  def __init__(self, number: int, command: Sequence[str], env: Mapping[str, str], watched: int, write: Write):
    self.number, self._beats = number, Path(env[VARIABLE])
    self.step: int | None = None
    self.stepped, self.code = 0.0, None
    # When it ended, and when its last traceback began, if no step came after.
    self.ended = self.complained = 0.0
    self.last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
    self._supervisor = subprocess.Popen(
      [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py")), str(watched), *command],
      env=env,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      errors="replace",
      pass_fds=[watched],
      start_new_session=True,  # a separate group, which Ctrl-C in the terminal does not reach
    )
    self._reader = threading.Thread(target=self._show, args=(self._supervisor.stdout, write), daemon=True)
    self._reader.start()

  def _show(self, output: IO[str], write: Write) -> None:
    with output:
      for line in output:
        if line.startswith("Traceback (most"):
          self.complained = time.monotonic()
        self.last.append(line.rstrip())
        write(f"[{self.number}] {line.rstrip()}")

  def end(self) -> None:
    """Ends what is left of the process and its children, and reads its last lines."""
    self.signal(signal.SIGKILL)
    self._supervisor.wait()
    self._reader.join(1)  # a process in a session of its own may hold the output

  def has_ended(self) -> bool:
    """Whether the process has ended; then ends what it started, and sets `code`."""
    if (code := self._supervisor.poll()) is None:
      return False
    self.code = code if code >= 0 else 128 - code  # the supervisor itself was killed
    self.ended = time.monotonic()
    self.end()
    return True

  def failed_at(self) -> float | None:
    """When it failed: at its last traceback, or when it ended. Peers complain at once when one is killed."""
    if self.code is None or self.code == STOPPED:
      return self.complained or None
    if self.code > 128 and self.code not in (128 + signal.SIGABRT, 128 + signal.SIGTERM):
      return self.ended - SEEN_LATE_S
    return (self.complained or self.ended) if self.code else None

  def look(self) -> None:
    """Reads the newest step. Its time is this process's own: clocks that are set do not count."""
    found = last_beat(self._beats)
    if found is not None and (self.step is None or found > self.step):
      self.step, self.stepped, self.complained = found, time.monotonic(), 0.0

  def signal(self, number: signal.Signals) -> None:
    """To the worker alone; SIGKILL to all that it started."""
    with contextlib.suppress(ProcessLookupError):
      if number == signal.SIGKILL:
        os.killpg(self._supervisor.pid, number)
      else:
        self._supervisor.send_signal(number)


def launch(job: Job, write: Write = print) -> int:
  """Runs a job to its end; no process outlives the launcher.

  Returns 0, the code of the first that failed, 75 after an orderly stop, or 128 + n after another signal.
  """
  best, pause, code = -1, job.pause, 0
  with _signals() as came, tempfile.TemporaryDirectory(prefix="nnx_parallel-") as folder:
    for number in range(job.restarts + 1):
      command = job.again if best >= 0 and job.again else job.command
      attempt = _Attempt(job, command, number, Path(folder), came, write)
      code = attempt.run()
      if came or code in (0, *FINAL_CODES) or not job.restarts:
        return code
      if number == job.restarts:
        break
      if (step := max(attempt.steps().values(), default=-1)) > best:
        best, pause = step, job.pause
      write(f"-- restart {number + 1} of {job.restarts} in {pause:g} s")
      until = time.monotonic() + pause
      while not came and time.monotonic() < until:
        time.sleep(LOOK_S)
      if came:
        return 128 + came[0]
      pause = min(2 * pause, LONGEST_PAUSE_S)
  write(f"-- no restart is left of {job.restarts}")
  return code


@contextlib.contextmanager
def _signals() -> Generator[list[int]]:
  """The signals that came, in a list that grows."""
  came = list[int]()
  former = {n: signal.signal(n, lambda n, _: came.append(n)) for n in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield came
  finally:
    for number, handler in former.items():
      signal.signal(number, handler)


@dataclasses.dataclass
class _Attempt:
  """All processes of a job, started once; those that remain at `end_by` are ended by force."""

  job: Job
  command: Sequence[str]
  number: int
  folder: Path
  came: Sequence[int]
  write: Write
  workers: list[Worker] = dataclasses.field(default_factory=list[Worker])
  code: int = 0
  failed_at: float = 0.0  # 0: not
  signalled: int = 0
  end_by: float = math.inf
  started: float = dataclasses.field(default_factory=time.monotonic)

  def run(self) -> int:
    """Returns the exit code when all processes, and all processes that they started, have ended."""
    job, port = self.job, free_port()
    low, alive = os.pipe()  # `alive` is closed when this process ends, however it ends
    watched = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3)  # `low` is 0 if stdin is closed, which workers open
    os.close(low)
    try:
      for n in range(job.processes):
        variables = worker_variables(job, n, port, os.environ) | {"NNX_PARALLEL_ATTEMPT": str(self.number)}
        variables[VARIABLE] = str(self.folder / f"{self.number}-{n}")
        self.workers.append(Worker(n, self.command, variables, watched, self.write))
      while any(worker.code is None for worker in self.workers):
        time.sleep(LOOK_S)
        self._look()
    finally:
      for worker in self.workers:
        worker.end()
      os.close(watched)
      os.close(alive)
    self._show_failures()
    codes = {worker.code for worker in self.workers}
    return STOPPED if not self.failed_at and codes <= {0, STOPPED} and STOPPED in codes else self.code

  def steps(self) -> dict[int, int]:
    """The last step of each process that has made one."""
    return {worker.number: worker.step for worker in self.workers if worker.step is not None}

  def _look(self) -> None:
    """Checks which processes ended or hang and which signals came, and reacts."""
    for worker in self.workers:
      worker.look()
    ended = self._ended()
    if self.code in (0, STOPPED):
      if ended is not None and ended.code == STOPPED:
        self.code = STOPPED
        self.end_by = min(self.end_by, time.monotonic() + self.job.grace)
      elif ended is not None:
        first = min(self.workers, key=lambda worker: worker.failed_at() or math.inf)
        how = describe(first.code) if first.code else "it raised an error, and waits for the others"
        self._fail(first, f"failed first: {how}")
      elif (hung := self._hung()) is not None:
        self._fail(hung, f"hangs: no step for {self.job.hang_after:g} s; last steps {self.steps()}")
    if not self.failed_at and len(self.came) > self.signalled:
      self._pass_on()
    if time.monotonic() > self.end_by or (self.failed_at and self.came):
      self._signal(signal.SIGKILL)
      self.end_by = time.monotonic() + 1

  def _ended(self) -> Worker | None:
    """A process that just ended with an error; of several one that was killed, at which the others fail."""
    ended = [worker for worker in self.workers if worker.code is None and worker.has_ended()]
    return max((w for w in ended if w.code), key=lambda w: (w.code != STOPPED, w.code), default=None)

  def _hung(self) -> Worker | None:
    """The process behind all others, if a process has made no step for too long."""
    stepped = [worker for worker in self.workers if worker.code is None and worker.step is not None]
    limit = time.monotonic() - (self.job.hang_after or math.inf)
    hangs = any(worker.stepped < limit for worker in stepped)
    return min(stepped, key=lambda worker: (worker.step, worker.stepped)) if hangs else None

  def _fail(self, worker: Worker, how: str) -> None:
    self.code, self.failed_at = worker.code or 1, time.monotonic()
    self.write(f"-- process {worker.number} {how} after {time.monotonic() - self.started:.1f} s")
    for other in self.workers:
      if other.code == 0 and time.monotonic() - other.ended > WELL_BEFORE_S:
        when = f"after {other.ended - self.started:.1f} s, while the others went on"
        self.write(f"-- process {other.number} had ended with exit code 0 {when}")
    self.end_by = time.monotonic() + END_AFTER_S
    self._signal(signal.SIGTERM)

  def _show_failures(self) -> None:
    """The last lines of each process that failed, in the order of their failures, where several did."""
    known = [(worker.failed_at() or math.inf, worker.number, worker) for worker in self.workers]
    failed = sorted(one for one in known if one[0] <= self.failed_at)  # the others may be what we ended
    for at, number, worker in failed if len(failed) > 1 else ():
      after = max(0.0, at - self.started)
      self.write(f"-- process {number}, {describe(worker.code or 0)}, failed after {after:.1f} s:")
      self.write("\n".join(f"--   {line}" for line in worker.last))

  def _signal(self, number: signal.Signals) -> None:
    for worker in self.workers:
      if worker.code is None:
        worker.signal(number)

  def _pass_on(self) -> None:
    """The first signal lets processes save; the second ends them."""
    self.signalled += 1  # one at a time: the next signal may come at any moment
    first = self.signalled == 1
    self.write(f"-- {signal.Signals(self.came[0]).name}: passed on" if first else "-- ending at once")
    self.end_by = time.monotonic() + (self.job.grace if first else 0)
    self.code = 128 + self.came[0]
    self._signal(signal.SIGTERM)


def free_port() -> int:
  """A port of this machine that nobody listens on."""
  with socket.create_server(("127.0.0.1", 0)) as probe:
    return probe.getsockname()[1]


def describe(code: int) -> str:
  """An exit code in words."""
  names = {128 + number: number.name for number in signal.Signals}
  return f"killed by {names[code]}" if code in names else f"exit code {code}"


def worker_variables(job: Job, number: int, port: int, environment: Mapping[str, str]) -> dict[str, str]:
  """The environment of one process: the launcher's, the address of its peers, and its simulated devices."""
  variables = {**environment, "PYTHONUNBUFFERED": "1"}
  if not job.cluster:
    variables |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(number))
    variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job.processes))
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables.pop("TORCHELASTIC_USE_AGENT_STORE", None)
  if job.devices_per_process is not None:
    count, flags = str(job.devices_per_process), environment.get("XLA_FLAGS", "").split()
    flags = " ".join(flag for flag in flags if "xla_force_host_platform_device_count" not in flag)
    variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": count, "XLA_FLAGS": flags}
    # Devices that wait in a collective hold a thread each of a pool as large as this.
    variables.setdefault("NPROC", str(4 * max(job.devices_per_process, os.cpu_count() or 1)))
  return variables
