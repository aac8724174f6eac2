"""Where the steps are: a local directory or an object store. Only this module distinguishes the two.

On a local file system a step is written under a temporary name, made durable, and renamed: a folder with the
name of a step is a complete checkpoint. Object stores have no atomic rename. There a step is written under
its final name, and its manifest, written last, makes it complete; a separate file marks a save or a deletion
in progress, or a step that was set aside. This package deletes only folders with one of its suffixes, such a
mark, or its manifest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import io
import os
import secrets
import shutil
import socket
import threading
import uuid
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import fsspec.config
import fsspec.core
from etils import epath
from typing_extensions import override

from nnx_parallel.checkpoint import manifest
from nnx_parallel.checkpoint.damage import causes
from nnx_parallel.errors import CheckpointError, NnxParallelWarning

T = TypeVar("T")
R = TypeVar("R")
LOCK = ".nnx_parallel.lock"
SAVING, REPLACED, DELETING, ASIDE = ".nnx-saving", ".nnx-replaced", ".nnx-deleting", ".nnx-aside"
_SYNCING = 16
_MOST_MORE = 4096
_REQUESTS = 64  # to an object store at a time
# The errors of flock on Lustre without the option `flock`, on NFS without its lock service, and on some FUSE.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)

_RUN = uuid.uuid4().hex[:12]


class _Hold:
  """This process's hold of a directory, which its Checkpointers share, one save at a time."""

  def __init__(self, file: io.FileIO):
    self.file, self.users, self.saving = file, 0, threading.Lock()


_HOLDS: dict[str, _Hold] = {}  # by real path


def is_local(path: epath.Path) -> bool:
  """Whether the path is on a file system with locks, fsync and atomic renames."""
  return "://" not in os.fspath(path)


def absolute(directory: str | os.PathLike[str]) -> epath.Path:
  """The directory as an absolute path, or as the address of an object store."""
  try:
    path = epath.Path(directory).expanduser()
    remote = not is_local(path)
    if remote:
      # TensorStore writes files that fsspec lists: a listing that fsspec keeps would be out of date.
      fsspec.config.conf.setdefault(os.fspath(path).partition("://")[0], {})["use_listings_cache"] = False
      path.exists()  # imports the modules that the store needs
  except (KeyError, ImportError) as error:
    raise CheckpointError(
      f"cannot open {directory}: no file system for it is installed.",
      details=str(error),
      fix="install the package of that store (gcsfs for gs://, s3fs for s3://), or pass a local path.",
    ) from error
  if remote:
    return path
  path = epath.Path(os.path.abspath(path))
  if "\\" in os.fspath(path):
    raise CheckpointError(
      f"{path} holds a backslash.",
      details="TensorStore, which writes the arrays, reads it as the start of another folder",
      fix="rename that folder, or choose another.",
    )
  if path.exists() and not path.is_dir():
    raise CheckpointError(f"{path} is a file, not a directory.", fix="choose a directory for the steps.")
  return path


def kvstore_of(path: epath.Path) -> Any:
  """How TensorStore names a folder."""
  place = f"{os.fspath(path)}/"
  return place if "://" in place else {"driver": "file", "path": place}


def storage_of(directory: epath.Path) -> Storage:
  """The storage of a directory of steps."""
  return LocalStorage(directory) if is_local(directory) else Storage(directory)


class Storage:
  """A directory of steps in an object store. It has no lock: the caller must let only one job write.

  Args:
    directory: absolute.
  """

  def __init__(self, directory: epath.Path):
    self.directory = directory

  # Reading.

  def steps(self) -> list[int]:
    """The steps that have a manifest, smallest number first; other folders, even empty ones, do not count."""
    if not self.directory.is_dir():
      return []
    named = ((entry, entry.name.removesuffix(REPLACED)) for entry in self.directory.iterdir())
    found = {int(name) for entry, name in named if _is_step_name(name) and (entry / manifest.FILE).exists()}
    return sorted(found.difference(self._marked_aside()))

  def folder(self, step: int) -> epath.Path:
    """The folder of a step: its number, or the name it has until the step that replaces it is there."""
    folder, replaced = self._path(step), self._path(step, REPLACED)
    return replaced if not folder.exists() and (replaced / manifest.FILE).exists() else folder

  def identity(self, step: int) -> tuple[str, int] | None:
    """The name of a step's folder, and a number that changes when another folder takes that name.

    None if there is no folder.
    """
    folder = self.folder(step)
    return (folder.name, 0) if folder.exists() else None

  def unrecognised_steps(self) -> list[int]:
    """The folders named like a step that hold files but no manifest: damaged, or of another program."""
    steps = [int(entry.name) for entry in self._entries() if _is_step_name(entry.name)]
    return sorted(step for step in {*steps}.difference(self._marked_aside()) if self.is_unrecognised(step))

  def is_unrecognised(self, step: int) -> bool:
    """Whether the folder of a step holds files but no manifest, and is not being saved or deleted."""
    folder = self.folder(step)
    file = folder / manifest.FILE
    if file.exists() or any(self._path(step, mark).exists() for mark in (SAVING, DELETING)):
      return False
    # Another process may have finished the step, or deleted it, since the manifest was looked for.
    with contextlib.suppress(FileNotFoundError):
      return folder.is_dir() and any(folder.iterdir()) and not file.exists()
    return False

  # Writing.

  def make_directory(self) -> None:
    """Makes the directory."""
    self.directory.mkdir(parents=True, exist_ok=True)

  def hold(self) -> None:
    """Takes the directory for this process until as many calls of `let_go`.

    Raises:
      CheckpointError: another process holds it.
    """

  def let_go(self) -> None:
    """Ends a `hold`."""

  def lock(self) -> contextlib.AbstractContextManager[None]:
    """Holds the directory for one save.

    Raises:
      CheckpointError: another process, or another save of this process, holds it.
    """
    return contextlib.nullcontext()

  def recover(self) -> list[str]:
    """Finishes or undoes the work of a killed process; returns the folders that it removed or put back."""
    touched: list[str] = []
    for entry in self._entries():
      name, suffix = os.path.splitext(entry.name)
      if suffix not in (SAVING, DELETING) or not _is_step_name(name):
        continue
      if suffix == DELETING or not (self._path(int(name)) / manifest.FILE).exists():
        if not _removed(functools.partial(self._remove, int(name)), self._path(int(name))):
          continue  # the mark stays
        touched.append(name)
      entry.unlink()
    return touched

  def check_place(self, step: int) -> None:
    """Raises if a step cannot be saved because something else has its folder."""
    if self.is_unrecognised(step):
      raise CheckpointError(
        f"cannot save step {step}: {self.folder(step)} was not written by nnx_parallel, or is damaged.",
        fix="move that folder elsewhere, or choose another directory; nothing was changed.",
      )

  def check_space(self, step: int, nbytes: int) -> None:
    """Raises before a save where it is known to fail: no space, no inodes, no permission.

    Raises:
      CheckpointError: fewer bytes are free than `nbytes`.
      OSError: the folder of the step cannot be made.
    """

  def set_aside(self, after: int) -> list[int]:
    """Takes the steps after this one, damaged ones too, out of `steps`; returns them."""
    later = [step for step in sorted([*self.steps(), *self.unrecognised_steps()]) if step > after]
    for step in later:
      self._set_aside(step)
    return later

  def _set_aside(self, step: int) -> None:
    self._path(step, ASIDE).write_text("")

  def _marked_aside(self) -> set[int]:
    """The steps that a mark takes out of `steps`."""
    names = [entry.name.removesuffix(ASIDE) for entry in self._entries() if entry.name.endswith(ASIDE)]
    return {int(name) for name in names if _is_step_name(name)}

  def delete_aside(self) -> None:
    """Deletes the steps of this package that were set aside."""
    for step in self._marked_aside():
      if (self._path(step) / manifest.FILE).exists():
        self._clear(step)

  def _clear(self, step: int) -> None:
    """Makes room for a step whose name was set aside."""
    if (mark := self._path(step, ASIDE)).exists():
      self._remove(step)
      mark.unlink()

  def can_replace(self) -> bool:
    """Whether a step can be replaced in place."""
    return False

  def saving(self, step: int) -> epath.Path:
    """The folder that a save of the step writes to."""
    return self._path(step)

  def begin(self, step: int) -> None:
    """Marks a save, for a later recovery."""
    self._clear(step)
    self._path(step, SAVING).write_text("")

  def commit(self, step: int) -> None:
    """Turns the contents of `saving(step)`, with its manifest, into the step."""
    self._path(step, SAVING).unlink()  # the manifest was the commit

  def abandon(self, step: int) -> None:
    """Removes the files of a failed save. The next save removes any remaining files."""
    self.recover()

  def delete(self, step: int) -> None:
    """Deletes a step. If the process is killed, no incomplete step remains."""
    mark = self._path(step, DELETING)
    mark.write_text("")
    self._remove(step)
    mark.unlink()

  def delete_all(self, expired: Callable[[], Iterable[int]], *, aside: bool) -> list[str]:
    """Deletes the steps that `expired` returns, and those that were set aside.

    Returns the failures as text: they undo no save.
    """
    problems: list[str] = []
    try:
      steps = [*expired()]
      if aside:
        self.delete_aside()
    except OSError as error:
      return [f"the old steps could not be listed: {error}"]
    for step in steps:
      try:
        self.delete(step)
      except OSError as error:
        problems.append(f"step {step}, which need not be kept, could not be removed: {error}")
    return problems

  def _path(self, step: int, suffix: str = "") -> epath.Path:
    return self.directory / f"{step}{suffix}"

  def _entries(self) -> list[epath.Path]:
    """The entries of the directory, by name; none where a store has no file in it yet."""
    with contextlib.suppress(FileNotFoundError):
      return sorted(self.directory.iterdir(), key=lambda path: path.name)
    return []

  def _remove(self, step: int) -> None:
    folder = self._path(step)
    (folder / manifest.FILE).unlink(missing_ok=True)  # first: from now on it is not a step
    if folder.exists():
      folder.rmtree()


class LocalStorage(Storage):
  """A directory of steps on a file system with locks, fsync and atomic renames."""

  @override
  def identity(self, step: int) -> tuple[str, int] | None:
    folder = self.folder(step)
    with contextlib.suppress(FileNotFoundError):
      return folder.name, os.stat(folder).st_ino
    return None

  @override
  def make_directory(self) -> None:
    """Makes the directory, also where a link leads to it, and waits until its name is on the disk."""
    folder = epath.Path(os.path.realpath(self.directory))
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # a parent that may be entered and not listed
      make_durable([path.parent for path in missing])

  @override
  def _set_aside(self, step: int) -> None:
    aside = self._path(step, ASIDE)
    if aside.exists():
      aside.rmtree()
    self.folder(step).rename(aside)

  @override
  def _marked_aside(self) -> set[int]:
    return set()  # they have another name

  @override
  def delete_aside(self) -> None:
    for entry in self._entries():
      if entry.name.endswith(ASIDE) and (entry / manifest.FILE).exists():
        entry.rmtree()

  @override
  def hold(self) -> None:
    name = os.path.realpath(self.directory)
    hold = _HOLDS.get(name)
    if hold is None:
      hold = _HOLDS[name] = _Hold(_locked(self.directory))
    hold.users += 1

  @override
  def let_go(self) -> None:
    name = os.path.realpath(self.directory)
    if (hold := _HOLDS.get(name)) is None:
      return  # of the process that forked this one
    hold.users -= 1
    if not hold.users:
      del _HOLDS[name]
      hold.file.truncate(0)
      hold.file.close()

  @override
  @contextlib.contextmanager
  def lock(self) -> Generator[None]:
    self.hold()
    hold = _HOLDS[os.path.realpath(self.directory)]
    try:
      self._check(hold)
      if not hold.saving.acquire(blocking=False):
        raise _held(self.directory, _me(), own=True)
      try:
        yield
      finally:
        hold.saving.release()
    finally:
      self.let_go()

  def _check(self, hold: _Hold) -> None:
    """Raises if another job took the directory, where nothing locks it; takes it again if it was removed."""
    file = self.directory / LOCK
    there = os.path.exists(file) and os.path.samestat(os.stat(file), os.fstat(hold.file.fileno()))
    if not there:
      hold.file.close()
      hold.file = _locked(self.directory)
    elif (holder := file.read_text().strip()) != _me():
      raise _held(self.directory, holder)

  @override
  def recover(self) -> list[str]:
    touched: list[str] = []
    for entry in self._entries():
      name, suffix = os.path.splitext(entry.name.partition(".orbax-checkpoint-tmp")[0])
      if suffix not in (SAVING, REPLACED, DELETING) or not _is_step_name(name):
        continue  # an export in progress, or a folder of another program
      if suffix == REPLACED and not self._path(int(name)).exists():
        entry.rename(self._path(int(name)))
      elif not _removed(entry.rmtree, entry):
        continue
      touched.append(entry.name)
    return touched

  @override
  def check_place(self, step: int) -> None:
    folder = self.folder(step)
    if os.path.lexists(folder) and not folder.is_dir():
      raise CheckpointError(
        f"cannot save step {step}: {folder} is not a directory.",
        fix="move it elsewhere; nothing was changed.",
      )
    super().check_place(step)

  @override
  def can_replace(self) -> bool:
    return True

  @override
  def check_space(self, step: int, nbytes: int) -> None:
    require_space(self.directory, nbytes)
    # If Orbax cannot make it on process 0, the other processes wait for it for twenty minutes.
    if not self.saving(step).exists():
      self.saving(step).mkdir()
      self.saving(step).rmdir()

  @override
  def saving(self, step: int) -> epath.Path:
    return self._path(step, SAVING)

  @override
  def begin(self, step: int) -> None:
    pass  # the name of the folder is the mark

  @override
  def commit(self, step: int) -> None:
    """Gives the finished folder its name once it is on the disk, replacing an older step of that name."""
    final, replaced = self._path(step), self._path(step, REPLACED)
    make_tree_durable(self.saving(step))
    if (final / manifest.FILE).exists():
      final.rename(replaced)
    elif final.exists():
      final.rmdir()  # an empty folder; anything else was refused before the save began
    self.saving(step).rename(final)
    make_durable([self.directory])
    if replaced.exists():
      _removed(replaced.rmtree, replaced)  # where a reader has files open, NFS keeps them; the step is saved

  @override
  def abandon(self, step: int) -> None:
    for entry in self.directory.glob(f"{step}{SAVING}*"):
      entry.rmtree()

  @override
  def delete(self, step: int) -> None:
    moved = self._path(step, DELETING)
    self._path(step).rename(moved)
    make_durable([self.directory])
    moved.rmtree()


def _me() -> str:
  return f"run {_RUN}, process {os.getpid()} on {socket.gethostname()}"


def _locked(directory: epath.Path) -> io.FileIO:
  """The lock file of a directory, locked, with the name of this run in it."""
  import fcntl  # not on Windows

  file = io.FileIO(directory / LOCK, "a+")
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.seek(0)
    holder = file.read().decode().strip()
    file.close()
    raise _held(directory, holder) from None
  except OSError as error:
    if error.errno not in _NO_LOCKS:
      file.close()
      raise
    _warn_of_no_locks(str(directory), error.strerror or str(error))
  file.truncate(0)
  file.write(f"{_me()}\n".encode())
  return file


def _held(directory: epath.Path, holder: str, *, own: bool = False) -> CheckpointError:
  return CheckpointError(
    f"cannot write to {directory}: {'this process is already' if own else 'another job is'} writing there.",
    details=f"held by {holder or 'a process without a name yet'}",
    fix="wait until the other save has finished: checkpointer.wait(); or share one Checkpointer."
    if own
    else "give each job its own directory; or end the other job, or close() its Checkpointer.",
  )


@functools.cache
def _warn_of_no_locks(directory: str, why: str) -> None:
  warnings.warn(
    f"{directory} has no file locks ({why}), so nothing stops a second job from writing there.  Fix: let one"
    " job write to it; Lustre has locks when it is mounted with flock.",
    NnxParallelWarning,
    stacklevel=3,
  )


def drop_locks() -> None:
  """Closes the parent's locks in a forked process, because a lock is held until all its copies are closed."""
  for hold in _HOLDS.values():
    hold.file.close()
  _HOLDS.clear()


def _removed(remove: Callable[[], None], folder: epath.Path) -> bool:
  """Whether a folder could be removed. If not, the next save tries again."""
  try:
    remove()
  except OSError as error:
    warnings.warn(f"{folder}, left by an earlier save, could not be removed: {error}", stacklevel=4)
    return False
  return True


def all_files(folder: epath.Path) -> dict[str, int]:
  """Bytes of each file below a folder, by relative path; in an object store by one listing."""
  if is_local(folder):
    paths = [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names]
    found = {os.path.relpath(path, folder): os.path.getsize(path) for path in paths}
  else:
    files, root = fsspec.core.url_to_fs(os.fspath(folder))
    listed = files.find(root, detail=True)
    found = {os.path.relpath(name, root): look["size"] for name, look in listed.items()}
  if not found and not folder.exists():
    raise FileNotFoundError(os.fspath(folder))
  return found


def sizes_in(folder: epath.Path) -> Callable[[str], int]:
  """A function from the relative path of a file to its bytes, which raises FileNotFoundError.

  In an object store, one listing answers for all files.
  """
  if is_local(folder):
    return lambda name: (folder / name).stat().length
  found: dict[str, int] = {}
  with contextlib.suppress(FileNotFoundError):
    found = all_files(folder)

  def size(name: str) -> int:
    if name not in found:
      raise FileNotFoundError(name)
    return found[name]

  return size


def each(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
  """Calls the function for each item, many at a time: object stores and shared disks take long to answer."""
  with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
    return list(pool.map(call, items))


def tell_apart(folder: epath.Path) -> None:
  """Gives the files of arrays lengths of their own: some bytes more, which nobody reads.

  A checksum does not tell a file from one that another process, or another step, wrote.
  """
  for path in folder.glob("*/*/d/*") if is_local(folder) else ():
    os.truncate(path, path.stat().length + 1 + secrets.randbelow(_MOST_MORE))


def make_durable(paths: Iterable[epath.Path]) -> None:
  """Waits until local files or folders are on the disk."""
  for path in paths:
    handle = os.open(path, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)


def make_tree_durable(folder: epath.Path) -> None:
  """Waits until everything below a local folder is on the disk; Orbax syncs only the arrays."""
  paths = [epath.Path(parent) / name for parent, _, names in os.walk(folder) for name in (*names, "")]
  with concurrent.futures.ThreadPoolExecutor(_SYNCING) as pool:
    list(pool.map(lambda path: make_durable([path]), paths))


def require_space(
  directory: epath.Path,
  nbytes: int,
  *,
  doing: str = "save",
  fix: str = "free some space, or keep fewer checkpoints: Checkpointer(..., max_to_keep=2).",
) -> None:
  """Raises when a local disk has too little free space."""
  if (free := shutil.disk_usage(directory).free) < nbytes:
    raise CheckpointError(
      f"cannot {doing} to {directory}: the disk is full.",
      details=f"the {doing} needs {nbytes:,} bytes, {free:,} are free",
      fix=fix,
    )


@contextlib.contextmanager
def friendly_errors(doing: str, directory: os.PathLike[str]) -> Generator[None]:
  """Turns errors of the operating system or Orbax in its block into a `CheckpointError`."""
  try:
    yield
  except CheckpointError:
    raise
  except (OSError, ValueError, RuntimeError, TypeError) as error:
    cause = next((cause for cause in causes(error) if isinstance(cause, OSError)), None)
    code, text = cause and cause.errno, f"{error}"
    if code in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
      why, fix = "too many files are open", "raise the limit (ulimit -n), or close files."
    elif code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "RESOURCE_EXHAUSTED" in text:
      why, fix = "the disk is full", "free some space; the steps saved before are untouched."
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS) or "Permission denied" in text:
      why, fix = "it may not be written", "choose a directory that this user can write to."
    elif code in (errno.ENOTDIR, errno.EEXIST) or isinstance(cause, NotADirectoryError):
      why, fix = "a file is in the way", "choose a directory, not a file."
    else:
      why, fix = f"{type(error).__name__}", "see the cause above; the steps saved before are untouched."
    details = text[:500] or repr(error)
    raise CheckpointError(
      f"cannot {doing} in {os.fspath(directory)}: {why}.", details=details, fix=fix
    ) from error


def _is_step_name(name: str) -> bool:
  return name.isdecimal() and str(int(name)) == name
