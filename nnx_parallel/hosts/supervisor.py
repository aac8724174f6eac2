"""Runs one worker for the launcher, and never lets it outlive the launcher. A script: it is not imported.

  python supervisor.py PIPE COMMAND...

PIPE is a file descriptor whose other end only the launcher holds: it becomes readable when the launcher ends,
however it ends. Then this process group, with the worker and its children, is killed. A signal to the
supervisor is passed only to the worker; the supervisor's exit code is the worker's, 128 + n for a signal.
"""

import os
import select
import signal
import sys


def main() -> None:
  """Starts the worker, and waits for its end or the launcher's."""
  pipe, command = int(sys.argv[1]), sys.argv[2:]
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
  worker = os.fork()
  if worker == 0:
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, signal.SIG_DFL)
    os.close(pipe)
    try:
      os.execvp(command[0], command)
    except OSError as error:
      print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
      os._exit(127)
  signal.signal(signal.SIGTERM, lambda *_: os.kill(worker, signal.SIGTERM))
  # Only the launcher holds the worker's output now.
  ended = os.pidfd_open(worker)
  ready, _, _ = select.select([pipe, ended], [], [])
  if ended not in ready:
    os.killpg(os.getpgid(0), signal.SIGKILL)
  code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
  os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
  main()
