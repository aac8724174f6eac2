"""Folders: which steps there are, one writer at a time, and commits that survive a crash.

On a local file system a step is written under a temporary name, made durable, and renamed: a folder with the
name of a step is a complete checkpoint. Object stores have no atomic rename. There a step is written under
its final name and is complete with its manifest, written last; a file beside it marks a save or a deletion in
progress. This package deletes only what has one of its suffixes, such a mark, or its manifest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import io
import os
import shutil
import socket
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from etils import epath

from nnx_parallel.checkpoint import manifest
from nnx_parallel.checkpoint.damage import causes
from nnx_parallel.errors import CheckpointError, NnxParallelWarning

T = TypeVar("T")
R = TypeVar("R")
LOCK = ".nnx_parallel.lock"
SAVING, REPLACED, DELETING = ".nnx-saving", ".nnx-replaced", ".nnx-deleting"
_PIECE = 1 << 20
_SYNCING = 16
_REQUESTS = 64  # to an object store at a time
# What flock says on Lustre without the option `flock`, on NFS without its lock service, and on some FUSE.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)

_LOCKS: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


def is_local(directory: epath.Path) -> bool:
  """Whether the path is on a file system with locks, fsync and atomic renames."""
  return "://" not in os.fspath(directory)


def saved_steps(directory: epath.Path) -> list[int]:
  """The steps that have a manifest, smallest number first; other folders, empty ones too, do not count."""
  if not directory.is_dir():
    return []
  named = ((entry, entry.name.removesuffix(REPLACED)) for entry in directory.iterdir())
  return sorted(
    {int(name) for entry, name in named if _is_step_name(name) and (entry / manifest.FILE).exists()}
  )


def folder_of(directory: epath.Path, step: int) -> epath.Path:
  """The folder of a step: its number, or the name it has until the step that replaces it is there."""
  folder, replaced = directory / str(step), directory / f"{step}{REPLACED}"
  return replaced if not folder.exists() and (replaced / manifest.FILE).exists() else folder


def unrecognised_steps(directory: epath.Path) -> list[int]:
  """The folders named like a step that hold files but no manifest: damaged, or of another program."""
  if not directory.is_dir():
    return []
  return sorted(
    int(entry.name) for entry in directory.iterdir() if _is_step_name(entry.name) and is_unrecognised(entry)
  )


def is_unrecognised(folder: epath.Path) -> bool:
  """Whether a folder named like a step holds files but no manifest, and is not being saved or deleted."""
  file = folder / manifest.FILE
  if file.exists() or any((folder.parent / f"{folder.name}{mark}").exists() for mark in (SAVING, DELETING)):
    return False
  # Another process may have finished the step, or deleted it, since the manifest was looked for.
  with contextlib.suppress(FileNotFoundError):
    return folder.is_dir() and any(folder.iterdir()) and not file.exists()
  return False


@contextlib.contextmanager
def writer_lock(directory: epath.Path) -> Generator[None]:
  """Holds the directory for writing.

  Object stores have no lock, nor have some shared disks: there the caller must let only one job write.

  Raises:
    CheckpointError: another process, or another save of this one, holds it.
  """
  if not is_local(directory):
    yield
    return
  import fcntl  # not on Windows

  with open(directory / LOCK, "a+b", buffering=0) as file:
    _LOCKS.add(file)
    me = f"process {os.getpid()} on {socket.gethostname()}"
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      holder = file.read().decode().strip()
      own = holder == me
      raise CheckpointError(
        f"cannot write to {directory}: {'this process is already' if own else 'another job is'} writing"
        " there.",
        details=f"held by {holder or 'a process without a name yet'}",
        fix="wait until the other save has finished: checkpointer.wait(); or share one Checkpointer."
        if own
        else "give each job its own directory, or wait until the other has finished.",
      ) from None
    except OSError as error:
      if error.errno not in _NO_LOCKS:
        raise
      _warn_of_no_locks(str(directory), error.strerror or str(error))
    _require_same_file(file, directory / LOCK)
    file.truncate(0)
    file.write(f"{me}\n".encode())
    try:
      yield
    finally:
      if not file.closed:
        file.truncate(0)


def _require_same_file(file: io.FileIO, path: epath.Path) -> None:
  """Raises where the lock's file was removed since it was opened: another process may lock the new one."""
  with contextlib.suppress(FileNotFoundError):
    if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
      return
  raise CheckpointError(
    f"cannot write to {path.parent}: its lock file {path.name} was removed.",
    fix="leave that file to the Checkpointers, and save again.",
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
  for file in _LOCKS:
    file.close()


def recover(directory: epath.Path) -> list[str]:
  """Finishes or undoes what a killed process left; the caller holds the lock.

  Returns:
    The names of the folders that were removed or put back.
  """
  if not is_local(directory):
    return _recover_marked(directory)
  touched: list[str] = []
  for entry in sorted(directory.iterdir(), key=lambda path: path.name):
    name, suffix = os.path.splitext(entry.name.partition(".orbax-checkpoint-tmp")[0])
    if not _is_step_name(name):
      continue  # an export in progress, or a folder of another program
    if suffix == REPLACED and not (directory / name).exists():
      entry.rename(directory / name)
    elif suffix in (SAVING, REPLACED, DELETING):
      if not _removed(entry.rmtree, entry):
        continue
    else:
      continue
    touched.append(entry.name)
  return touched


def _recover_marked(directory: epath.Path) -> list[str]:
  touched: list[str] = []
  for entry in sorted(directory.iterdir(), key=lambda path: path.name):
    name, suffix = os.path.splitext(entry.name)
    if suffix not in (SAVING, DELETING) or not _is_step_name(name):
      continue
    if suffix == DELETING or not (directory / name / manifest.FILE).exists():
      if not _removed(functools.partial(_remove_marked, directory, int(name)), directory / name):
        continue  # the mark stays
      touched.append(name)
    entry.unlink()
  return touched


def _removed(remove: Callable[[], None], folder: epath.Path) -> bool:
  """Whether a folder could be removed. If not, the next save tries again."""
  try:
    remove()
  except OSError as error:
    warnings.warn(f"{folder}, left by an earlier save, could not be removed: {error}", stacklevel=4)
    return False
  return True


def _remove_marked(directory: epath.Path, step: int) -> None:
  folder = directory / str(step)
  (folder / manifest.FILE).unlink(missing_ok=True)  # first: from now on it is no step
  if folder.exists():
    folder.rmtree()


def mark(directory: epath.Path, step: int, suffix: str) -> epath.Path:
  """Writes a mark beside a step on an object store before it changes, for a later recovery."""
  path = directory / f"{step}{suffix}"
  path.write_text("")
  return path


def commit(temporary: epath.Path, final: epath.Path) -> None:
  """Gives a finished, durable folder its name, replacing an older step of that name."""
  replaced = final.parent / f"{final.name}{REPLACED}"
  if (final / manifest.FILE).exists():
    final.rename(replaced)
  elif final.exists():
    final.rmdir()  # an empty folder; anything else was refused before the save began
  temporary.rename(final)
  make_durable([final.parent])
  if replaced.exists():
    _removed(replaced.rmtree, replaced)  # where a reader has files open, NFS keeps them; the step is saved


def delete_steps(directory: epath.Path, expired: Callable[[], Iterable[int]]) -> list[str]:
  """Deletes the steps that `expired` returns, and returns the failures as text: they undo no save."""
  problems: list[str] = []
  try:
    steps = [*expired()]
  except OSError as error:
    return [f"the old steps could not be listed: {error}"]
  for step in steps:
    try:
      delete_step(directory, step)
    except OSError as error:
      problems.append(f"step {step}, which need not be kept, could not be removed: {error}")
  return problems


def delete_step(directory: epath.Path, step: int) -> None:
  """Deletes a step. If the process is killed, no incomplete step remains."""
  if not is_local(directory):
    marked = mark(directory, step, DELETING)
    _remove_marked(directory, step)
    marked.unlink()
    return
  moved = directory / f"{step}{DELETING}"
  (directory / str(step)).rename(moved)
  make_durable([directory])
  moved.rmtree()


def all_files(folder: epath.Path) -> dict[str, int]:
  """Bytes of each file below a folder, by relative path."""
  found: dict[str, int] = {}
  if not is_local(folder):
    level = [folder]
    while level:
      entries = [
        entry for listed in each(folder, lambda path: list(path.iterdir()), level) for entry in listed
      ]
      looks = list(zip(entries, each(folder, lambda path: path.stat(), entries), strict=True))
      found |= {os.fspath(p.relative_to(folder)): look.length for p, look in looks if not look.is_directory}
      level = [path for path, look in looks if look.is_directory]
    return found
  for parent, _, names in os.walk(folder):
    for name in names:
      path = os.path.join(parent, name)
      found[os.path.relpath(path, folder)] = os.path.getsize(path)
  return found


def each(folder: epath.Path, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
  """Calls the function for each item: many at a time on an object store, where each waits for an answer."""
  if is_local(folder):
    return [call(item) for item in items]
  with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
    return list(pool.map(call, items))


def sha256(file: epath.Path) -> str:
  """SHA-256 of a file, read piece by piece."""
  total = hashlib.sha256()
  # Steps have thousands of small files, which Python opens much faster than epath.
  with open(file, "rb") if is_local(file) else file.open("rb") as stream:
    while piece := stream.read(_PIECE):
      total.update(piece)
  return total.hexdigest()


def make_durable(paths: Iterable[epath.Path]) -> None:
  """Waits until files or folders are on a local disk."""
  for path in paths:
    if not is_local(path):
      continue
    handle = os.open(path, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)


def make_tree_durable(folder: epath.Path) -> None:
  """Waits until everything below a step's folder is on the disk.

  TensorStore has synced the files of the arrays, but Orbax syncs neither its metadata nor the folders.
  """
  if not is_local(folder):
    return
  paths: list[epath.Path] = []
  for parent, folders, names in os.walk(folder):
    if "zarr.json" in names:
      paths += [epath.Path(below) for below, _, _ in os.walk(parent)]
      folders.clear()
    else:
      paths += [epath.Path(parent), *(epath.Path(parent) / name for name in names)]
  with concurrent.futures.ThreadPoolExecutor(_SYNCING) as pool:
    list(pool.map(lambda path: make_durable([path]), paths))


def make_directory(directory: epath.Path) -> None:
  """Makes the folder of the steps, also where a link leads to it, and waits until its name is on the disk."""
  if not is_local(directory):
    directory.mkdir(parents=True, exist_ok=True)
    return
  folder = epath.Path(os.path.realpath(directory))
  missing = [path for path in (folder, *folder.parents) if not path.exists()]
  folder.mkdir(parents=True, exist_ok=True)
  with contextlib.suppress(PermissionError):  # a parent that may be entered and not listed
    make_durable([path.parent for path in missing])


def check_folder(directory: epath.Path, step: int) -> None:
  """Makes the folder that a save writes to, and removes it.

  Where Orbax cannot make it on process 0, the other processes wait for it for twenty minutes.

  Raises:
    OSError: it cannot be made: no space, no inodes, no permission.
  """
  folder = directory / f"{step}{SAVING}"
  if is_local(directory) and not folder.exists():
    folder.mkdir()
    folder.rmdir()


def check_space(
  directory: epath.Path,
  nbytes: int,
  *,
  doing: str = "save",
  fix: str = "free some space, or keep fewer checkpoints: Checkpointer(..., max_to_keep=2).",
) -> None:
  """Raises when the disk has too little free space.

  Raises:
    CheckpointError: fewer bytes are free than `nbytes`.
  """
  if is_local(directory) and (free := shutil.disk_usage(directory).free) < nbytes:
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
