"""Where the steps are: a local directory or an object store. Only this module distinguishes the two.

On a local file system a step is written under a temporary name, made durable, and renamed. In an object store
its manifest, written last, makes it complete; a file marks a save or a deletion in progress, or a step that
was set aside. Only folders with one of these suffixes, such a mark, or our manifest are ever deleted.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable

import fsspec.config
import fsspec.core
from etils import epath

from nnx_parallel.checkpoint import manifest
from nnx_parallel.core.checked import warn
from nnx_parallel.errors import CheckpointError

SAVING, REPLACED, DELETING, ASIDE = ".nnx-saving", ".nnx-replaced", ".nnx-deleting", ".nnx-aside"
_SYNCING = 16
_MOST_MORE = 4096


def is_local(path: epath.Path) -> bool:
  """Whether the path is on a file system with locks, fsync and atomic renames."""
  return "://" not in os.fspath(path)


def absolute(directory: str | os.PathLike[str]) -> epath.Path:
  """The directory as an absolute path, or as the address of an object store."""
  try:
    path = epath.Path(directory).expanduser()
    if not is_local(path):
      # TensorStore writes files that fsspec lists: a listing that fsspec keeps would be out of date.
      fsspec.config.conf.setdefault(os.fspath(path).partition("://")[0], {})["use_listings_cache"] = False
      path.exists()  # imports the modules that the store needs
      return path
  except (KeyError, ImportError) as error:
    what = f"cannot open {directory}: no file system for it is installed."
    fix = "install the package of that store (gcsfs for gs://, s3fs for s3://), or pass a local path."
    raise CheckpointError(what, details=str(error), fix=fix) from error
  path = epath.Path(os.path.abspath(path))
  if "\\" in os.fspath(path):
    details = "TensorStore, which writes the arrays, reads it as the start of another folder"
    fix = "rename that folder, or choose another."
    raise CheckpointError(f"{path} holds a backslash.", details=details, fix=fix)
  if path.exists() and not path.is_dir():
    raise CheckpointError(f"{path} is a file, not a directory.", fix="choose a directory for the steps.")
  return path


class Storage:
  """A directory of steps, absolute. In an object store nothing locks it: only one job may write."""

  def __init__(self, directory: epath.Path):
    self.directory, self.local = directory, is_local(directory)

  def steps(self) -> list[int]:
    """The steps that have a manifest, smallest number first; other folders, even empty ones, do not count."""
    named = ((entry, entry.name.removesuffix(REPLACED)) for entry in self._entries())
    found = {int(name) for entry, name in named if _is_step_name(name) and (entry / manifest.FILE).exists()}
    return sorted(found.difference(() if self.local else self.aside()))

  def folder(self, step: int) -> epath.Path:
    """The folder of a step: its number, or the name it has until the step that replaces it is there."""
    folder, replaced = self._path(step), self._path(step, REPLACED)
    return replaced if not folder.exists() and (replaced / manifest.FILE).exists() else folder

  def identity(self, step: int) -> tuple[str, int] | None:
    """The name and number of a step's folder, which another folder of that name does not have; or None."""
    folder = self.folder(step)
    with contextlib.suppress(FileNotFoundError):
      if self.local or folder.exists():
        return folder.name, os.stat(folder).st_ino if self.local else 0
    return None

  def unrecognised_steps(self) -> list[int]:
    """The folders named like a step that hold files but no manifest: damaged, or of another program."""
    steps = {int(entry.name) for entry in self._entries() if _is_step_name(entry.name)}
    return sorted(filter(self.is_unrecognised, steps.difference(() if self.local else self.aside())))

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

  def make_directory(self) -> None:
    """Makes the directory, also where a link leads to it, and waits until its name is on the disk."""
    folder = epath.Path(os.path.realpath(self.directory)) if self.local else self.directory
    missing = [path for path in (folder, *folder.parents) if not path.exists()] if self.local else []
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # a parent that may be entered and not listed
      make_durable([path.parent for path in missing])

  def recover(self) -> None:
    """Finishes or undoes the work of a killed process, or of a save that failed."""
    for entry in self._entries():
      name, suffix = os.path.splitext(entry.name.partition(".orbax-checkpoint-tmp")[0])
      if suffix not in (SAVING, REPLACED, DELETING) or not _is_step_name(name):
        continue  # an export in progress, or a folder of another program
      folder = self._path(int(name))
      if self.local:
        if suffix == REPLACED and not folder.exists():
          entry.rename(folder)
        else:
          _try_remove(entry)
      elif suffix == SAVING and (folder / manifest.FILE).exists():
        entry.unlink()  # the manifest was the commit
      elif suffix != REPLACED and _try_remove(folder):
        entry.unlink()

  def check_place(self, step: int) -> None:
    """Raises if a step cannot be saved because something else has its folder."""
    folder = self.folder(step)
    if self.local and os.path.lexists(folder) and not folder.is_dir():
      why, fix = "is not a directory", "move it elsewhere; nothing was changed."
    elif self.is_unrecognised(step):
      why = "was not written by nnx_parallel, or is damaged"
      fix = "move that folder elsewhere, or choose another directory; nothing was changed."
    else:
      return
    raise CheckpointError(f"cannot save step {step}: {folder} {why}.", fix=fix)

  def check_space(self, step: int, nbytes: int) -> None:
    """Raises before a local save where it is known to fail: no space, no inodes, no permission."""
    if not self.local:
      return
    require_space(self.directory, nbytes)
    # If Orbax cannot make it on process 0, the other processes wait for it for twenty minutes.
    if not self.saving(step).exists():
      self.saving(step).mkdir()
      self.saving(step).rmdir()

  def set_aside(self, after: int) -> list[int]:
    """Takes the steps after this one, damaged ones too, out of `steps`; returns them."""
    later = [step for step in sorted([*self.steps(), *self.unrecognised_steps()]) if step > after]
    for step in later:
      aside = self._path(step, ASIDE)
      if not self.local:
        aside.write_text("")
        continue
      if aside.exists():
        aside.rmtree()
      self.folder(step).rename(aside)
    return later

  def aside(self) -> dict[int, epath.Path]:
    """The folders of the steps that were set aside. In a store they keep their name, beside a mark."""
    names = [entry.name.removesuffix(ASIDE) for entry in self._entries() if entry.name.endswith(ASIDE)]
    suffix = ASIDE if self.local else ""
    return {int(name): self._path(int(name), suffix) for name in names if _is_step_name(name)}

  def saving(self, step: int) -> epath.Path:
    """The folder that a save of the step writes to."""
    return self._path(step, SAVING if self.local else "")

  def begin(self, step: int) -> None:
    """Marks a save for a later recovery; a local folder's name is the mark."""
    if not self.local:
      if step in self.aside():
        self.delete(step, aside=True)
      self._path(step, SAVING).write_text("")

  def commit(self, step: int) -> None:
    """Turns the contents of `saving(step)`, with its manifest, into the step, replacing an older one."""
    if not self.local:
      self._path(step, SAVING).unlink()
      return
    final, replaced = self._path(step), self._path(step, REPLACED)
    make_tree_durable(self.saving(step))
    if (final / manifest.FILE).exists():
      final.rename(replaced)
    elif final.exists():
      final.rmdir()  # an empty folder; anything else was refused before the save began
    self.saving(step).rename(final)
    make_durable([self.directory])
    if replaced.exists():
      _try_remove(replaced)  # where a reader has files open, NFS keeps them; the step is saved

  def delete(self, step: int, *, aside: bool = False) -> None:
    """Deletes a step, or the one that was set aside; if the process is killed, no incomplete step remains."""
    mark = self._path(step, DELETING)
    if self.local:
      self._path(step, ASIDE if aside else "").rename(mark)
      make_durable([self.directory])
      mark.rmtree()
      return
    mark.write_text("")
    _remove(self._path(step))
    if aside:
      self._path(step, ASIDE).unlink()
    mark.unlink()

  def _path(self, step: int, suffix: str = "") -> epath.Path:
    return self.directory / f"{step}{suffix}"

  def _entries(self) -> list[epath.Path]:
    """The entries of the directory, by name; none where it is not there yet."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      return sorted(self.directory.iterdir(), key=lambda path: path.name)
    return []


def _remove(folder: epath.Path) -> None:
  (folder / manifest.FILE).unlink(missing_ok=True)  # first: from now on it is not a step
  if folder.exists():
    folder.rmtree()


def _try_remove(folder: epath.Path) -> bool:
  """Whether a folder could be removed. If not, the next save tries again."""
  try:
    _remove(folder)
  except OSError as error:
    warn(f"{folder}, left by an earlier save, could not be removed: {error}")
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


def tell_apart(folder: epath.Path) -> None:
  """Gives the files of arrays lengths of their own, because a checksum does not tell them apart."""
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
  directory: epath.Path, nbytes: int, *, doing: str = "save", fix: str = "free some space; keep fewer steps."
) -> None:
  """Raises when a local disk has too little free space."""
  if (free := shutil.disk_usage(directory).free) < nbytes:
    what = f"cannot {doing} to {directory}: the disk is full."
    details = f"the {doing} needs {nbytes:,} bytes, {free:,} are free"
    raise CheckpointError(what, details=details, fix=fix)


def _is_step_name(name: str) -> bool:
  return name.isdecimal() and str(int(name)) == name
