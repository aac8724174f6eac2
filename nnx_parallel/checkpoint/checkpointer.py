"""`Checkpointer`: saves and restores the steps of a run."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import json
import os
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable
from collections.abc import Mapping as MappingType
from concurrent.futures.thread import ThreadPoolExecutor  # its exit hook must be set before the hook below
from typing import Any, TypeVar, overload

import jax
import numpy as np
from etils import epath
from flax import nnx

from nnx_parallel.checkpoint import encoding, manifest, multihost, restore, save, storage, targets
from nnx_parallel.checkpoint.catalog import (
  Catalog,
  PreservationPolicy,
  Retention,
  as_step,
  one_of,
  whole,
)
from nnx_parallel.checkpoint.damage import DamagedError, VanishedError, vanished
from nnx_parallel.checkpoint.diff import Diff, Target, as_names, compare
from nnx_parallel.checkpoint.manifest import Manifest
from nnx_parallel.checkpoint.targets import Only, Remap
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import no_mesh
from nnx_parallel.core.nodes import parts_of_type, value_of
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import CheckpointError
from nnx_parallel.layout.plan import Plan

R = TypeVar("R")

_RESERVED = ("model", "optimizer")

_UNFINISHED: set[Checkpointer] = set()
"""Objects with a background save that is running or has failed: kept alive, so that its error is raised."""

_LIVE: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
_ENDING = threading.Event()  # the script has ended; hooks and threads may still run
_lost = False  # a save failed since then: nothing but the exit code can tell


class Checkpointer:
  """Saves and restores steps in a directory.

  Each step is one folder, an ordinary Orbax checkpoint with a manifest. A step appears under its number only
  when it is complete and on disk, so every step in `steps()` can be restored. In a job of several processes,
  make each call on all of them.

  Args:
    directory: a local directory, or a path in an object store that `etils.epath` and TensorStore support. The
      first save creates it. An object store has no lock, so let only one job write there, and it cannot
      replace steps in place.
    max_to_keep: the number of newest steps to keep, or a policy of
      `orbax.checkpoint.v1.training.preservation_policies`; None keeps all steps. The newest and the best step
      are always kept. Steps that a resumed run left behind, which are set aside, are deleted.
    best: the name of the metric that decides which step is best.
    best_mode: `"min"` or `"max"`.
    asynchronous: whether `save` returns as soon as the arrays are copied off the devices. When the script
      ends, a save that is still running is finished first; if this save fails, the exit code is 1.
    byte_budget: the bytes of host memory that reads and writes may use in addition to the arrays themselves.
      A background save also holds a copy of all arrays.
    chunk_bytes: the largest piece of an array that is read at once; None stores each shard as one piece.

  Attributes:
    directory: the absolute path, an `epath.Path`.
    restored: the `Manifest` of the step that the last `restore` took; None before the first restore.

  Raises:
    CheckpointError: an option has an unknown value, or the path is a file.

  Example:
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> with Checkpointer(tempfile.mkdtemp()) as checkpointer:
    ...   checkpointer.save(3, {"w": jnp.arange(4.0)})
    ...   target = {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jnp.zeros(4).sharding)}
    ...   print(checkpointer.restore(target)["w"], checkpointer.latest())
    [0. 1. 2. 3.] 3
  """

  @check_arguments(CheckpointError)
  def __init__(
    self,
    directory: str | os.PathLike[str],
    *,
    max_to_keep: int | PreservationPolicy | None = None,
    best: str | None = None,
    best_mode: str = "min",
    asynchronous: bool = False,
    byte_budget: int = 256 << 20,
    chunk_bytes: int | None = 16 << 20,
  ):
    self.directory = storage.absolute(directory)
    self.restored: Manifest | None = None
    retention = Retention(max_to_keep, best, best_mode)
    self._storage = storage.storage_of(self.directory)
    self._catalog = Catalog(self._storage, retention)
    self._asynchronous = asynchronous
    self._byte_budget = _checked_bytes("byte_budget", byte_budget, least=0)
    self._chunk_bytes = None if chunk_bytes is None else _checked_bytes("chunk_bytes", chunk_bytes, least=1)
    self._pool = ThreadPoolExecutor(1, "nnx_parallel-checkpoint")
    self._pending: concurrent.futures.Future[None] | None = None
    self._resumed: int | None = None  # the step that this run resumed from, before its first save
    self._restored_step: int | None = None
    self._let_go: weakref.finalize[[], Any] | None = None  # set while this object holds the directory
    self._closed = False
    self._lock = threading.RLock()  # for one save; a signal handler may save within a save
    _LIVE.add(self)

  def __enter__(self) -> Checkpointer:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  # Saving.

  @check_arguments(CheckpointError, "step")
  def save(
    self,
    step: int,
    model: object,
    optimizer: object = None,
    *,
    only: Only | None = None,
    extra: MappingType[str, object] | None = None,
    metrics: MappingType[str, object] | None = None,
    plan: object = None,
    overwrite: bool = False,
  ) -> None:
    """Saves the state of a run as one step, completely or not at all.

    The first save takes the directory for this process, until `close` (see `prepare`). If this object last
    restored an earlier step, the later steps are first set aside: 40 becomes `40.nnx-aside`. Otherwise, a new
    step must be newer than all others.

    Before the save starts, the logger reports (at level INFO) the bytes of the step and the host memory that
    this process will need. Ctrl-C ends the wait for a save, not the save itself: `wait`, `close` and the next
    save finish it. Padded arrays are first cut to their logical shape, which copies them.

    Args:
      step: the number of the step, not negative.
      model: a module, with Variables of every type; an `nnx.State`; a pytree of arrays; or a tuple or dict of
        these.
      optimizer: an `nnx.Optimizer`, a pytree of arrays, or a tuple or dict of these.
      only: the leaves of the model to save: an NNX filter (such as `nnx.LoRAParam`), or patterns of paths.
      extra: more trees of arrays, or JSON values, by name, such as `{"ema": averages, "data": position}`.
      metrics: numbers by name; `best` compares them.
      plan: the plan of the model and the optimizer, which is stored with the step for information.
      overwrite: whether to replace the step if it exists; the old step stays until the new step is complete.

    Raises:
      CheckpointError: the step exists, newer steps of another run exist, a leaf cannot be stored, the disk
        cannot be written, another job is writing to the directory, or an earlier background save failed.
    """
    with self._lock, no_mesh():
      self.wait()
      self._require_open(f"save step {step}")
      # An error is raised where the other processes hear of it.
      make = _result_of(
        lambda: save.Request(
          as_step(step),
          *_content(model, optimizer, only, extra),
          _numbers(metrics or {}),
          _plan_json(plan),
          overwrite,
        )
      )
      started = concurrent.futures.Future[bool]()
      self._start_thread(step)
      _UNFINISHED.add(self)
      pending = self._pending = self._pool.submit(self._run, step, make, started)
      pending.add_done_callback(functools.partial(_forget_finished, self))
      try:
        begun = started.result()
      except KeyboardInterrupt:
        concurrent.futures.wait([started])  # the arrays are being read, and a step may delete them
        raise
      if not begun or not self._asynchronous:
        self._settle(pending)

  def wait(self) -> None:
    """Waits for a background save.

    Raises:
      CheckpointError: the save failed.
    """
    with self._lock:
      if self._pending is not None:
        self._settle(self._pending)

  def _settle(self, pending: concurrent.futures.Future[None]) -> None:
    global _lost
    try:
      pending.result()  # which all processes know: `_run` agreed on it
    finally:
      if pending.done():  # else an interrupt ended the wait, and the save goes on
        _lost = _lost or (_ENDING.is_set() and pending.exception() is not None)
        if self._pending is pending:
          self._pending = None
          _UNFINISHED.discard(self)

  def close(self) -> None:
    """Waits for a background save, ends the thread of this object, and lets the directory go.

    Raises:
      CheckpointError: the save failed.
    """
    self._closed = True
    try:
      self.wait()
    finally:
      self._pool.shutdown()
      if self._let_go is not None:
        self._let_go()

  @check_arguments(CheckpointError)
  def prepare(self, model: object = None, optimizer: object = None, *, only: Only | None = None) -> list[int]:
    """Finds out before a run what its saves would find out. `fit` calls it.

    It makes the directory, checks that it can be written, and takes it for this process until `close`: a
    second job on the same directory is refused. With a model, it checks the space for a save.

    Args:
      model: as for `save`.
      optimizer: as for `save`.
      only: as for `save`.

    Returns:
      The complete steps, as `steps` returns them.

    Raises:
      CheckpointError: the directory cannot be written, another job holds it, the disk is too full, or folders
        of other programs have names of steps, and there is no step to resume from.
    """
    with self._lock, no_mesh(), multihost.together() as block:
      self.wait()
      self._require_open("prepare a run")
      nbytes = 0 if model is None else save.check(targets.saved_roots(model, optimizer, only))
      block.decide = lambda _: self._prepare(nbytes)
    return block.found

  def _prepare(self, nbytes: int) -> list[int]:
    with storage.friendly_errors("save", self.directory):
      self._storage.make_directory()
      self._hold()
      with self._storage.lock():
        self._storage.recover()
        steps = self._storage.steps()
        self._storage.check_space(max(steps, default=-1) + 1, nbytes)
        if not steps:
          for step in self._storage.unrecognised_steps():
            self._storage.check_place(step)
        return steps

  def _hold(self) -> None:
    """Holds the directory until this object is closed, or nobody has it."""
    if self._let_go is None or not self._let_go.alive:
      self._storage.hold()
      self._let_go = weakref.finalize(self, self._storage.let_go)

  def _require_open(self, doing: str) -> None:
    if self._closed:
      raise CheckpointError(
        f"cannot {doing}: this Checkpointer was closed.",
        fix=f"make another: Checkpointer({os.fspath(self.directory)!r}).",
      )

  # Finding.

  def steps(self) -> list[int]:
    """The complete steps, in the order of their numbers; `latest` is the newest."""
    return multihost.decided(self._storage.steps)

  def latest(self) -> int | None:
    """The newest complete step of the run that saved last, or None.

    A step counts as complete if its files have the right sizes; only `restore` and `verify` read the files.
    """
    return multihost.decided(self._catalog.latest)

  def best(self) -> int | None:
    """The step with the best metric, or None if no step has the metric."""
    return multihost.decided(self._catalog.best)

  @check_arguments(CheckpointError)
  def metadata(self, step: int | str | None = None) -> Manifest:
    """The contents of a step, without reading its arrays.

    Args:
      step: a number, `"latest"` or `"best"`; None means `"latest"`.

    Returns:
      The `Manifest` of the step: its number, metrics, extra values, plan and versions, and the shape of each
      leaf.

    Raises:
      CheckpointError: the step does not exist, or its manifest cannot be read.
    """
    number = self._resolve(step)
    with multihost.together():
      return self._catalog.manifest(number)

  # Restoring.

  @check_arguments(CheckpointError, "skip")
  def diff(
    self,
    target: object,
    step: int | str | None = None,
    *,
    only: Only | None = None,
    skip: Iterable[str] = (),
    rename: MappingType[str, str] | None = None,
    cast: bool = False,
    weight_map: Remap | None = None,
    optimizer: str = "restore",
    as_numpy: bool = False,
  ) -> Diff:
    """Compares a step with a target; no array is read.

    Args:
      target: as for `restore`. Pass the same values for it, and for the arguments below, as you pass to
        `restore`.
      step: a number, `"latest"` or `"best"`; None means `"latest"`.
      only: as for `restore`.
      skip: as for `restore`.
      rename: as for `restore`.
      cast: as for `restore`.
      weight_map: as for `restore`.
      optimizer: as for `restore`.
      as_numpy: as for `restore`.

    Returns:
      The leaves that fit, are missing, are extra, are renamed or are changed, and the bytes that a restore
      would read.

    Raises:
      CheckpointError: the step does not exist, or an argument matches no leaf.
    """
    record = self.metadata(step)
    names, choose = targets.split_only(only)
    goal = _goal(target, record, weight_map, optimizer=optimizer, as_numpy=as_numpy, choose=choose)
    budget = self._byte_budget
    return compare(record, goal, only=names, skip=skip, rename=rename, cast=cast, byte_budget=budget)

  @overload
  def restore(
    self,
    target: Plan[R],
    step: int | str | None = None,
    *,
    only: Only | None = None,
    skip: Iterable[str] = (),
    rename: MappingType[str, str] | None = None,
    cast: bool = False,
    weight_map: Remap | None = None,
    on_corrupt: str = "error",
  ) -> R: ...

  @overload
  def restore(
    self,
    target: object = None,
    step: int | str | None = None,
    *,
    only: Only | None = None,
    skip: Iterable[str] = (),
    rename: MappingType[str, str] | None = None,
    cast: bool = False,
    weight_map: Remap | None = None,
    optimizer: str = "restore",
    on_corrupt: str = "error",
    as_numpy: bool = False,
  ) -> Any: ...

  @check_arguments(CheckpointError, "skip")
  def restore(
    self,
    target: object = None,
    step: int | str | None = None,
    *,
    only: Only | None = None,
    skip: Iterable[str] = (),
    rename: MappingType[str, str] | None = None,
    cast: bool = False,
    weight_map: Remap | None = None,
    optimizer: str = "restore",
    on_corrupt: str = "error",
    as_numpy: bool = False,
  ) -> Any:
    """Restores a step into the target's layout; the saved layout does not matter.

    Before the restore starts, the logger reports (at level INFO) the bytes to read and the host memory that
    they take. A step that is restored into a target is the one that the next `save` of this object continues:
    that save sets later steps aside. Therefore, use another Checkpointer to look at other steps of a run.

    Args:
      target: a plan, or a tuple or dict of plans if several models were saved in this form; a module or an
        `nnx.State`, whose values are replaced; a pytree of `jax.ShapeDtypeStruct`s with shardings; a tuple or
        dict of these; or a pair (model, optimizer), if both were saved.
      step: a number, `"latest"` or `"best"`; None means `"latest"`.
      only: patterns of the paths to restore, or an NNX filter for the leaves of the model (such as
        `nnx.LoRAParam`); all other leaves keep the values of the target.
      skip: patterns of paths, in the target or the checkpoint, that are not restored; the optimizer's state
        of a parameter is skipped with it.
      rename: maps a path in the target, or the beginning of one, to the saved path; the optimizer's state of
        a parameter is renamed with it.
      cast: whether saved floating-point arrays may be cast to the dtype of the target.
      weight_map: a `WeightMap` that says how saved leaves become leaves of the target. It can stack or
        unstack layers, and transpose, split or merge dims. The patterns above then match the saved paths.
      optimizer: `"restore"`, `"drop"` (ignore it, and return only the model) or, with a plan, `"fresh"` (make
        a new optimizer).
      on_corrupt: what to do if the step is damaged: `"error"`, or `"fallback"` to restore the newest good
        step instead, with a warning.
      as_numpy: whether to return NumPy arrays; without a target, all saved leaves are returned.

    Returns:
      The model, or (model, optimizer), or a tree like the target; for several plans, (models, optimizers).

    Raises:
      CheckpointError: the step does not exist, leaves do not fit, or files are damaged; the message names all
        of them.
    """
    names, choose = targets.split_only(only)

    def check() -> None:
      one_of("on_corrupt", on_corrupt, ("error", "fallback"))
      as_names(skip, "skip")
      if target is None:
        self._require_no_target_options(
          as_numpy, rename=rename, cast=cast, weight_map=weight_map, optimizer=optimizer, choose=choose
        )

    def fill(record: Manifest) -> tuple[Target, Diff]:
      goal = _goal(target, record, weight_map, optimizer=optimizer, as_numpy=as_numpy, choose=choose)
      budget = self._byte_budget
      return goal, compare(
        record, goal, only=names, skip=as_names(skip, "skip"), rename=rename, cast=cast, byte_budget=budget
      )

    with no_mesh():
      self.wait()
      found = self._try_steps(step, on_corrupt, check, fill)
      if target is not None:
        self._resumed = self._restored_step
      return found

  @check_arguments(CheckpointError)
  def restore_extra(
    self, name: str, target: object = None, step: int | str | None = None, *, as_numpy: bool = False
  ) -> Any:
    """Restores one tree that was saved with `extra=`, or returns its JSON value.

    Args:
      name: the name of the tree or value in `extra`.
      target: a pytree of `jax.ShapeDtypeStruct`s with shardings; JSON values need no target.
      step: a number, `"latest"` or `"best"`. None means the step that `restore` took, if this object has
        saved no step since then; otherwise the latest step.
      as_numpy: whether to return NumPy arrays.

    Returns:
      A tree like the target; without a target, but with `as_numpy`, NumPy arrays by path; for a JSON value,
      the value.

    Raises:
      CheckpointError: the step or the name does not exist, leaves do not fit, files are damaged, or neither
        `target` nor `as_numpy` is given.
    """
    with no_mesh():
      self.wait()
      record = self.restored
      if step is not None or record is None or record.step != self._restored_step:
        record = self.metadata(self._restored_step if step is None else step)
      if name in record.extra:
        return encoding.read_json(record.extra[name])
      if name not in record.items:
        raise CheckpointError(
          f"step {record.step} has no {name!r}.",
          details=f"it has {sorted({*record.items, *record.extra})}",
          fix="use one of these names.",
        )
      if target is None and not as_numpy:
        raise _no_target(self.directory)

      def fill(record: Manifest) -> tuple[Target, Diff]:
        if target is None:
          goal = targets.as_saved(record, name)
        else:
          goal = targets.read(target, optimizer="drop", as_numpy=as_numpy, item=name)
        return goal, compare(record, goal, byte_budget=self._byte_budget)

      with self._there(record.step):
        return self._fill(lambda: record, fill)[1]

  @check_arguments(CheckpointError)
  def verify(self, step: int | str | None = None) -> dict[str, str]:
    """Checks every value and file of a step. A folder without its manifest is a step too.

    Args:
      step: a number, `"latest"` or `"best"`; None means `"latest"`.

    Returns:
      A description of the damage by file or leaf; empty if the step is good.

    Raises:
      CheckpointError: the step does not exist, or another process removed or replaced it during the check.
    """
    number = self._resolve(step, whole=False)
    found = self._storage.identity(number)
    problems = self._problems(number)
    if multihost.any_process(bool(problems) and self._storage.identity(number) != found):
      raise vanished(self.directory / str(number))
    return problems

  # Inside.

  def _begin(self, request: save.Request, lock: contextlib.ExitStack) -> None:
    """Takes the directory for a save and checks that it can begin. For process 0."""
    with storage.friendly_errors(f"save step {request.step}", self.directory):
      self._storage.make_directory()
      self._hold()
      lock.enter_context(self._storage.lock())
      self._storage.recover()
      self._catalog.check_place(request.step, resumed=self._resumed, overwrite=request.overwrite)
      self._storage.check_space(request.step, request.content.nbytes)

  def _run(
    self, step: int, make: Callable[[], save.Request], started: concurrent.futures.Future[bool]
  ) -> None:
    """Makes a save. `started` gets True once it has begun to write, and False if it cannot begin.

    It runs on a thread, so Ctrl-C ends the wait for it and not the save. Orbax, interrupted while it starts
    to write, would leave threads that keep writing and collide with the next save.
    """
    friendly = functools.partial(storage.friendly_errors, f"save step {step}", self.directory)
    is_first = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
      stack.callback(lambda: started.done() or started.set_result(False))
      with multihost.together() as block:
        request = make()
        block.same = "what to save", save.describe(self.directory, request)
        block.decide = lambda _: self._begin(request, stack)
      self._resumed = None
      try:
        with multihost.together(), friendly():
          wait = save.write(
            self._storage,
            request,
            chunk_bytes=self._chunk_bytes,
            byte_budget=self._byte_budget,
            background=self._asynchronous,
          )
        self._restored_step = None
        started.set_result(True)

        def commit(_: object) -> None:
          with friendly():
            save.commit(self._storage, request)

        # A training loop has the main thread, so its order among other blocks may differ between processes.
        with multihost.together(f"save to {self.directory}") as block:
          block.decide = commit
          with friendly():
            block.wait_for(wait)
      except CheckpointError:
        if is_first:
          with contextlib.suppress(OSError):
            self._storage.abandon(request.step)
        raise
      if is_first:
        for problem in self._storage.delete_all(self._catalog.expired, aside=self._catalog.keeps_some):
          warnings.warn(f"step {request.step} is saved, but {problem}", stacklevel=2)

  def _start_thread(self, step: int) -> None:
    """Starts the thread of the saves: an interrupt during the start would lose a save."""
    global _lost
    try:
      self._pool.submit(int).result()
    except RuntimeError as error:
      if not _ENDING.is_set():
        raise
      _lost = True
      raise CheckpointError(
        f"cannot save step {step}: the script has ended, and Python starts no more threads.",
        details=str(error),
        fix="save before the script ends, and join the thread that trains; StopSignals ends a loop in order.",
      ) from error

  def _forget_parent(self) -> None:
    """Repairs the copy in a forked process, which has no threads and no pending save."""
    self._pool = ThreadPoolExecutor(1, "nnx_parallel-checkpoint")
    self._pending, self._lock = None, threading.RLock()

  def _fill(
    self, look: Callable[[], Manifest], fill: Callable[[Manifest], tuple[Target, Diff]]
  ) -> tuple[Manifest, PyTree]:
    """Restores a step into a target, in two rendezvous."""
    with multihost.together() as block:
      record = look()
      folder = self._storage.folder(record.step)
      goal, diff = fill(record)
      diff.require()
      if diff.skipped and not (diff.matches or any(diff.values.values())):
        raise CheckpointError(
          f"only= and skip= leave nothing of step {record.step} to restore.",
          details=f"{len(diff.skipped)} leaves are left out",
          fix="fewer patterns in skip=, or the leaves that are wanted in only=.",
        )
      restore.check_files(folder, record, diff.matches)
      names = "\n".join(f"{leaf.name} {leaf.target.shape}" for leaf in diff.matches)
      block.same = "what to restore", f"step {record.step}\n{names}"
    with multihost.together():
      restore.check_old_values(folder, record, diff.matches, byte_budget=self._byte_budget)
      arrays = restore.read(folder, record, diff, byte_budget=self._byte_budget)
    items = (*arrays, *diff.values)
    return record, goal.build({x: {**arrays.get(x, {}), **diff.values.get(x, {})} for x in items})

  def _require_no_target_options(self, as_numpy: bool, **given: Any) -> None:
    """Refuses options of `restore` that need a target."""
    if not as_numpy:
      raise _no_target(self.directory)
    given["optimizer"] = given["optimizer"] != "restore"
    given["filter as only"] = given.pop("choose") is not None
    if unused := [name for name, value in given.items() if value]:
      raise CheckpointError(
        f"restore(as_numpy=True) without a target takes no {unused[0]}=: it returns all saved leaves.",
        fix="only= and skip= choose leaves by their paths; pass a target for the rest.",
      )

  def _problems(self, step: int) -> dict[str, str]:
    folder = self._storage.folder(step)
    try:
      with multihost.together():
        record = self._catalog.manifest(step)
    except DamagedError as error:
      return {manifest.FILE: error.what}
    me, count = jax.process_index(), jax.process_count()  # each checks its share
    with multihost.together() as files:
      files.mine = restore.damaged_files(folder, record, [*record.files][me::count])
      files.decide = _merged
    if any(manifest.is_no_file(folder / name) for name in files.found):  # opening a pipe would block
      return files.found
    with multihost.together() as values, no_mesh():
      values.mine = dict(
        restore.check_values(folder, record, byte_budget=self._byte_budget, mine=(me, count))
      )
      values.decide = _merged
    return files.found | values.found

  def _resolve(self, step: int | str | None, *, whole: bool = True) -> int:
    """The number of a step. One process looks: the others may not see the same folders yet."""
    return multihost.decided(lambda: self._catalog.resolve(step, whole=whole))

  @contextlib.contextmanager
  def _there(self, step: int) -> Generator[None]:
    """Raises `VanishedError` when the block fails because another process removed or replaced the step."""
    found = self._storage.identity(step)
    try:
      yield
    except CheckpointError as error:
      if multihost.any_process(found is None or self._storage.identity(step) != found):
        raise vanished(self.directory / str(step)) from error
      raise

  def _try_steps(
    self,
    step: int | str | None,
    on_corrupt: str,
    check: Callable[[], None],
    fill: Callable[[Manifest], tuple[Target, Diff]],
  ) -> PyTree:
    with multihost.together() as block:
      check()
      block.decide = lambda _: self._catalog.resolve(step)
    number, older = block.found, None
    while True:
      try:
        with self._there(number):
          record, result = self._fill(functools.partial(self._catalog.manifest, number), fill)
      except VanishedError:
        if step not in (None, "latest", "best"):
          raise
        number, older = self._resolve(step), None
      except DamagedError as error:
        if on_corrupt == "error":
          raise
        if older is None:
          older = multihost.decided(functools.partial(self._catalog.older, number))
        if not older:
          raise
        warnings.warn(f"step {number} was passed over: {error.what}", stacklevel=4)
        number = older.pop()
      else:
        self.restored, self._restored_step = record, number
        return result


def _result_of(function: Callable[[], R]) -> Callable[[], R]:
  """Calls a function; what is returned gives its result, or raises its error."""
  done = concurrent.futures.Future[R]()
  try:
    done.set_result(function())
  except Exception as error:  # noqa: BLE001 (raised by the result)
    done.set_exception(error)
  return done.result


def _merged(shares: list[dict[str, str]]) -> dict[str, str]:
  return {name: what for share in shares for name, what in share.items()}


def _goal(
  target: object, record: Manifest, weight_map: Remap | None, *, optimizer: str, as_numpy: bool, choose: Any
) -> Target:
  """The leaves of a step that the arguments of `restore` name."""
  if target is None:
    return targets.as_saved(record)
  goal = targets.read(target, optimizer=optimizer, as_numpy=as_numpy, record=record, choose=choose)
  return weight_map.through(goal) if weight_map else goal


def _forget_finished(checkpointer: Checkpointer, pending: concurrent.futures.Future[None]) -> None:
  if not pending.exception():
    _UNFINISHED.discard(checkpointer)


def _content(
  model: object, optimizer: object, only: Only | None, extra: MappingType[str, object] | None
) -> tuple[save.Content, dict[str, encoding.Json]]:
  """The arrays to save, and the JSON values among `extra`."""
  if isinstance(model, nnx.Optimizer) and isinstance(optimizer, nnx.Pytree):
    raise CheckpointError("save got the optimizer before the model.", fix="save(step, model, optimizer)")
  roots = targets.saved_roots(model, optimizer, only)
  if parts_of_type((model, optimizer), nnx.GraphDef):
    raise CheckpointError(
      "save got an nnx.GraphDef, which holds no arrays.",
      fix="save(step, model), or save(step, nnx.state(model)).",
    )
  values: dict[str, encoding.Json] = {}
  for name, value in (extra or {}).items():
    if name in _RESERVED or not name.isidentifier():
      raise CheckpointError(
        f"extra={{{name!r}: ...}} cannot be used as a name.", fix="use another identifier."
      )
    leaves, _ = targets.flatten(value)
    if any(isinstance(value_of(leaf), (jax.Array, np.ndarray)) for leaf in leaves.values()):
      roots[name] = leaves
    else:
      values[name] = encoding.check_json(value, path=f"extra[{name!r}]")
  return save.encode(roots), values


def _plan_json(plan: object) -> encoding.Json:
  if plan is not None and not isinstance(plan, Plan):
    raise CheckpointError(f"plan={plan!r} is not a Plan.", fix="pass what nxp.plan(...) returned.")
  return None if plan is None else json.loads(plan.to_json())


def _checked_bytes(name: str, value: object, *, least: int) -> int:
  number = whole(value, least=least)
  if number is None:
    raise CheckpointError(
      f"{name}={value!r} is not a number of bytes from {least} up.", fix=f"{name}=256 << 20 is 256 MiB."
    )
  return number


def _numbers(metrics: MappingType[str, object]) -> dict[str, float]:
  numbers: dict[str, float] = {}
  for name, value in metrics.items():
    try:
      numbers[name] = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError) as error:
      raise CheckpointError(
        f"metrics[{name!r}] is not one number.", details=f"{value!r}"[:200], fix="reduce it before saving."
      ) from error
  return numbers


def _no_target(directory: epath.Path) -> CheckpointError:
  return CheckpointError(
    f"cannot restore from {directory} without a target: the layout it was saved in is not used.",
    fix="pass a plan, a live model, or a tree of jax.ShapeDtypeStruct with shardings; "
    "as_numpy=True returns numpy arrays.",
  )


def _after_fork() -> None:
  storage.drop_locks()
  _UNFINISHED.clear()
  for checkpointer in _LIVE:
    checkpointer._forget_parent()  # pyright: ignore[reportPrivateUsage]


if hasattr(os, "register_at_fork"):
  os.register_at_fork(after_in_child=_after_fork)


def finish_saves() -> None:
  """Waits for the background saves. Their errors are left for `report_lost`, or for whoever waits."""
  _ENDING.set()
  concurrent.futures.wait([one._pending for one in [*_UNFINISHED] if one._pending is not None])  # pyright: ignore


def report_lost() -> None:
  """Shows the errors of background saves, and ends the process with code 1 if there are any."""
  for checkpointer in [*_UNFINISHED]:
    try:
      checkpointer.wait()
    except Exception:  # noqa: BLE001 (shown; the remaining errors must be shown too)
      traceback.print_exc()
  if _lost:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # Python's own code would be 0


# atexit comes too late to finish a background save: by then Python starts no more threads, and Orbax needs
# threads. Only this other hook runs earlier.
threading._register_atexit(finish_saves)  # pyright: ignore
atexit.register(report_lost)
