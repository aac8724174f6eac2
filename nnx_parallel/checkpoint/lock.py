"""Which process has a local directory: a lock on a file in it, which names the run, until it is let go."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
import threading
import uuid
from collections.abc import Generator

from etils import epath

from nnx_parallel.core.checked import warn
from nnx_parallel.errors import CheckpointError

LOCK = ".nnx_parallel.lock"
# The errors of flock on Lustre without the option `flock`, on NFS without its lock service, and on some FUSE.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)
_RUN = uuid.uuid4().hex[:12]
_TAKING = threading.RLock()  # a Checkpointer may be collected meanwhile
_holds: dict[str, Hold] = {}  # by real path


class Hold:
  """A directory that this process has taken, which its Checkpointers share, one save at a time."""

  def __init__(self, directory: epath.Path, name: str):
    self.name, self.path, self.users = name, directory / LOCK, 0
    self.saving = threading.Lock()
    self.file = _lock_file(self.path)

  def let_go(self) -> None:
    """Ends one `take` of the directory."""
    with _TAKING:
      self.users -= 1
      if not self.users and _holds.get(self.name) is self:  # else it is of the process that forked this one
        del _holds[self.name]
        self.file.truncate(0)
        self.file.close()

  @contextlib.contextmanager
  def save(self, *, wait: bool = True) -> Generator[None]:
    """Waits for the other saves of this process; takes the directory again if somebody removed it."""
    if not self.saving.acquire(blocking=wait):
      raise _held_error(self.path, _me())
    try:
      holder = self.path.read_text().strip() if self.path.exists() else ""
      if not holder:
        self.file.close()
        self.file = _lock_file(self.path)
      elif holder != _me():  # where nothing locks
        raise _held_error(self.path, holder)
      yield
    finally:
      self.saving.release()


def take(directory: epath.Path) -> Hold:
  """Takes a directory for this process; a `CheckpointError` says which other process has it."""
  name = os.path.realpath(directory)
  with _TAKING:
    hold = _holds[name] = _holds.get(name) or Hold(directory, name)
    hold.users += 1
  return hold


def drop_all() -> None:
  """Closes the parent's files in a forked process, because a lock is held until all its copies are closed."""
  for hold in _holds.values():
    hold.file.close()
  _holds.clear()


def _me() -> str:
  return f"run {_RUN}, process {os.getpid()} on {socket.gethostname()}"


def _lock_file(path: epath.Path) -> io.FileIO:
  """The lock file, locked, with the name of this run in it."""
  import fcntl  # not on Windows

  file = io.FileIO(path, "a+")
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.seek(0)
    holder = file.read().decode().strip()
    file.close()
    raise _held_error(path, holder) from None
  except OSError as error:
    if error.errno not in _NO_LOCKS:
      file.close()
      raise
    warn(
      f"{path.parent} has no file locks ({error.strerror}), so nothing stops a second job from writing there."
      "  Fix: let one job write to it; Lustre has locks when it is mounted with flock."
    )
  file.truncate(0)
  file.write(f"{_me()}\n".encode())
  return file


def _held_error(path: epath.Path, holder: str) -> CheckpointError:
  who = "this process is already" if holder == _me() else "another job is"
  return CheckpointError(
    f"cannot write to {path.parent}: {who} writing there.",
    details=f"held by {holder or 'a process without a name yet'}",
    fix="give each job its own directory; or end the other job, or close() its Checkpointer.",
  )
