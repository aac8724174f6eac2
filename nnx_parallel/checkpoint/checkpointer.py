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
import weakref
from collections.abc import Callable, Generator, Iterable
from collections.abc import Mapping as MappingType
from concurrent.futures.thread import ThreadPoolExecutor  # its exit hook must be set before the hook below
from typing import Any, TypedDict, TypeVar, overload

import jax
import numpy as np
from flax import nnx
from typing_extensions import Unpack

from nnx_parallel.checkpoint import encoding, lock, manifest, restore, save, targets
from nnx_parallel.checkpoint.catalog import Catalog, PreservationPolicy, Retention, as_step, one_of
from nnx_parallel.checkpoint.damage import VanishedError, friendly_errors
from nnx_parallel.checkpoint.diff import Diff, Target, compare
from nnx_parallel.checkpoint.manifest import Manifest
from nnx_parallel.checkpoint.storage import absolute
from nnx_parallel.checkpoint.targets import Only, Remap
from nnx_parallel.core import together as multihost
from nnx_parallel.core.checked import check_arguments, warn
from nnx_parallel.core.mesh import no_mesh
from nnx_parallel.core.nodes import parts_of_type, value_of
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import CheckpointError, DamagedError
from nnx_parallel.layout.plan import Plan

R = TypeVar("R")
Fill = Callable[[Manifest], tuple[Target, Diff]]
Named = MappingType[str, object] | None

_RESERVED = ("model", "optimizer")
_unfinished: set[Checkpointer] = set()
"""Objects with a background save that is running or has failed: kept alive, so that its error is raised."""
_lost = False  # a save failed when the script had ended: nothing but the exit code can tell


class _Choice(TypedDict, total=False):
  only: Only | None
  skip: Iterable[str]
  rename: MappingType[str, str] | None
  cast: bool
  weight_map: Remap | None
  on_corrupt: str


class _Options(_Choice, total=False):
  optimizer: str
  as_numpy: bool


class Checkpointer:
  """Saves and restores steps in a directory.

  Each step is one folder, an ordinary Orbax checkpoint with a manifest. A step appears under its number only
  when it is complete and on disk, so every step in `steps()` can be restored. In a job of several processes,
  make each call on all of them.

  Args:
    directory: a local directory, which the first save makes, or a path in an object store that `etils.epath`
      and TensorStore support, where only one job may write, and no step can be replaced.
    max_to_keep: the number of newest steps to keep, or a policy of
      `orbax.checkpoint.v1.training.preservation_policies`; None keeps all steps. The newest and the best step
      are always kept; steps that were set aside are deleted.
    best: the name of the metric that decides which step is best.
    best_mode: `"min"` or `"max"`.
    asynchronous: whether `save` returns as soon as the arrays are copied off the devices. When the script
      ends, a save that is still running is finished first; if this save fails, the exit code is 1.
    byte_budget: the bytes of host memory that reads and writes may use beside the arrays themselves. A
      background save also holds a copy of all arrays.
    chunk_bytes: the largest piece of an array that is read at once; None stores each shard as one piece.

  Attributes:
    directory: the absolute path, an `epath.Path`.
    restored: the `Manifest` of the step that the last `restore` took; None before the first restore.

  Example:
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> with Checkpointer(tempfile.mkdtemp()) as checkpointer:
    ...   checkpointer.save(3, {"w": jnp.arange(4.0)})
    ...   target = {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jnp.zeros(4).sharding)}
    ...   print(checkpointer.restore(target)["w"], checkpointer.latest())
    [0. 1. 2. 3.] 3
  """

  @check_arguments(CheckpointError, max_to_keep=1, byte_budget=0, chunk_bytes=1)
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
    self.directory = absolute(directory)
    self.restored: Manifest | None = None
    self._steps = Catalog(self.directory, Retention(max_to_keep, best, best_mode))
    self._asynchronous = asynchronous
    self._byte_budget, self._chunk_bytes = byte_budget, chunk_bytes
    self._pool = ThreadPoolExecutor(1, "nnx_parallel-checkpoint")
    self._pending: concurrent.futures.Future[None] | None = None
    self._resumed: int | None = None  # the step that this run resumed from, before its first save
    self._restored_step: int | None = None
    self._let_go: weakref.finalize[[], Any] | None = None  # set while this object holds the directory
    self._closed = False
    self._lock = threading.RLock()  # for one save; a signal handler may save within a save

  def __enter__(self) -> Checkpointer:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

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
      made, started = concurrent.futures.Future[save.Request](), concurrent.futures.Future[bool]()
      try:
        roots = targets.saved_roots(model, optimizer, only)
        _check_objects(model, optimizer)
        made.set_result(_request(as_step(step), roots, extra, metrics, plan, overwrite))
      except Exception as error:  # noqa: BLE001 (raised by the result, where the other processes hear of it)
        made.set_exception(error)
      _unfinished.add(self)
      pending = self._pending = self._pool.submit(self._run, step, made.result, started)
      pending.add_done_callback(lambda done: done.exception() or _unfinished.discard(self))
      try:
        begun = started.result()
      except KeyboardInterrupt:
        concurrent.futures.wait([started])  # the arrays are being read, and a step may delete them
        raise
      if not begun or not self._asynchronous:
        self.wait()

  def wait(self) -> None:
    """Waits for a background save; raises the `CheckpointError` of one that failed."""
    with self._lock:
      if (pending := self._pending) is None:
        return
      try:
        pending.result()  # which all processes know: `_run` agreed on it
      finally:
        if pending.done():  # else an interrupt ended the wait, and the save goes on
          self._pending = None
          _unfinished.discard(self)

  def close(self) -> None:
    """Waits as `wait` does, ends the thread of this object, and lets the directory go."""
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
      CheckpointError: the directory cannot be written, is held by another job, is too full, or has no step to
        resume from, but folders of other programs.
    """
    with self._lock, no_mesh(), multihost.together() as block:
      self.wait()
      self._require_open("prepare a run")
      items = {} if model is None else save.describe(targets.saved_roots(model, optimizer, only))

      def look(_: object) -> list[int]:
        with friendly_errors("save", self.directory), self._hold():
          steps = self._steps.steps()
          self._steps.check_space(max(steps, default=-1) + 1, manifest.nbytes_of(items))
          for step in () if steps else self._steps.unrecognised_steps():
            self._steps.check_place(step)
          return steps

      block.decide = look
    return block.found

  @contextlib.contextmanager
  def _hold(self) -> Generator[None]:
    """Takes the directory until this object is closed, or nobody has it, and locks out other saves."""
    self._steps.make_directory()
    with contextlib.ExitStack() as stack:
      if self._steps.local:
        hold, before = lock.take(self.directory), self._let_go
        self._let_go = weakref.finalize(self, hold.let_go)
        if before is not None:
          before()
        stack.enter_context(hold.save())
      self._steps.recover()
      yield

  def _require_open(self, doing: str) -> None:
    """Raises if nothing can be saved; starts the thread: an interrupt during the start would lose a save."""
    global _lost
    try:
      self._pool.submit(int).result()
    except RuntimeError as error:
      why = "this Checkpointer was closed"
      fix = f"make another: nxp.Checkpointer({os.fspath(self.directory)!r})."
      if not self._closed:
        _lost, why = True, "the script has ended, and Python starts no more threads"
        fix = (
          "save before the script ends, and join the thread that trains; StopSignals ends a loop in order."
        )
      raise CheckpointError(f"cannot {doing}: {why}.", fix=fix) from error

  def steps(self) -> list[int]:
    """The complete steps, in the order of their numbers; `latest` is the newest."""
    return multihost.decide(self._steps.steps)

  def latest(self) -> int | None:
    """The newest complete step of the run that saved last, or None.

    A step counts as complete if its files have the right sizes; only `restore` and `verify` read the files.
    """
    return multihost.decide(self._steps.latest)

  def best(self) -> int | None:
    """The step with the best metric, or None if no step has the metric."""
    return multihost.decide(self._steps.best)

  @check_arguments(CheckpointError)
  def metadata(self, step: int | str | None = None) -> Manifest:
    """The contents of a step, without reading its arrays.

    Args:
      step: a number, `"latest"` or `"best"`; None means `"latest"`.

    Returns:
      The `Manifest` of the step: its number, metrics, extra values, plan, versions, and the shapes of leaves.
    """
    number = multihost.decide(lambda: self._steps.resolve(step))
    with multihost.together():
      return self._steps.manifest(number)

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
      target: as for `restore`, like all that follow.
      step: which step.
      only: what to compare.
      skip: what to leave out.
      rename: other names.
      cast: whether to cast.
      weight_map: another structure.
      optimizer: what becomes of the optimizer.
      as_numpy: whether to make NumPy arrays.

    Returns:
      The leaves that fit, are missing, are extra or are changed, and the bytes that a restore would read.
    """
    more = {"rename": rename, "cast": cast, "weight_map": weight_map, "optimizer": optimizer}
    return self._filler(target, only, skip, as_numpy, **more)(self.metadata(step))[1]

  @overload
  def restore(self, target: Plan[R], step: int | str | None = None, **options: Unpack[_Choice]) -> R: ...
  @overload
  def restore(self, target: object = ..., step: int | str | None = ..., **more: Unpack[_Options]) -> Any: ...

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

    Before it starts, the logger reports (at level INFO) the bytes to read and the host memory that they take.
    A step that is restored into a target is the one that the next `save` of this object continues: that save
    sets later steps aside. Therefore, use another Checkpointer to look at other steps of a run.

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
      CheckpointError: no such step, or leaves that do not fit, or damaged files, all of them named.
    """
    more = {"rename": rename, "cast": cast, "weight_map": weight_map, "optimizer": optimizer}
    with no_mesh():
      self.wait()
      result = self._try_steps(step, on_corrupt, self._filler(target, only, skip, as_numpy, **more))
      if target is not None:
        self._resumed = self._restored_step
      return result

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
      A tree like the target; without one, NumPy arrays by path; or a JSON value.

    Raises:
      CheckpointError: no such step or name, or as for `restore`.
    """
    with no_mesh():
      self.wait()
      record = self.restored
      if step is not None or record is None or record.step != self._restored_step:
        record = self.metadata(self._restored_step if step is None else step)
      if name in record.extra:
        return encoding.read_json(record.extra[name])
      if name not in record.items:
        details, fix = f"it has {sorted({*record.items, *record.extra})}", "use one of these names."
        raise CheckpointError(f"step {record.step} has no {name!r}.", details=details, fix=fix)

      def fill(record: Manifest) -> tuple[Target, Diff]:
        if target is None:
          goal = self._as_saved(record, name, as_numpy, [])
        else:
          goal = targets.read(target, optimizer="drop", as_numpy=as_numpy, item=name)
        return goal, compare(record, goal, byte_budget=self._byte_budget)

      return self._fill(record.step, lambda: record, fill)[1]

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
    number = multihost.decide(lambda: self._steps.resolve(step, whole=False))
    found = self._steps.identity(number)
    problems = self._problems(number)
    if multihost.any_process(bool(problems) and self._steps.identity(number) != found):
      raise VanishedError(self.directory / str(number))
    return problems

  def _run(
    self, step: int, make: Callable[[], save.Request], started: concurrent.futures.Future[bool]
  ) -> None:
    """Makes a save. `started` gets True once it has begun to write, and False if it cannot begin."""
    # On a thread: Orbax, interrupted while it starts, would leave threads that collide with the next save.
    # All agree on what to save, and process 0 takes the directory (`begin`); all write; all wait for their
    # writes, and process 0 makes them a step (`commit`). Each of the three blocks fails on all or on none.
    friendly = functools.partial(friendly_errors, f"save step {step}", self.directory)
    is_first = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
      stack.callback(lambda: started.done() or started.set_result(False))

      def begin(_: object) -> None:
        with friendly():
          stack.enter_context(self._hold())
          self._steps.make_place(step, resumed=self._resumed, overwrite=request.overwrite)
          self._steps.check_space(step, request.nbytes)

      def commit(_: object) -> None:
        with friendly():
          save.commit(self._steps, request)

      with multihost.together() as block:
        request = make()
        block.same = "what to save", f"{self.directory} step {step}\n{request.summary}"
        block.decide = begin
      self._resumed = None
      try:
        with multihost.together(), friendly():
          wait = save.write(
            self._steps,
            request,
            chunk_bytes=self._chunk_bytes,
            byte_budget=self._byte_budget,
            background=self._asynchronous,
          )
        self._restored_step = None
        started.set_result(True)
        # A training loop has the main thread, so its order among other blocks may differ between processes.
        with multihost.together(f"save to {self.directory}") as block:
          block.decide = commit
          with friendly():
            block.wait_for(wait)
      except CheckpointError:
        if is_first:
          with contextlib.suppress(OSError):
            self._steps.recover()
        raise
      if is_first:
        self._steps.delete_old(step)

  def _filler(
    self, target: object, only: Only | None, skip: Iterable[str], as_numpy: bool, **more: Any
  ) -> Fill:
    """What finds, for a manifest, the leaves that the arguments of `restore` name."""
    names, choose = targets.split_only(only)

    def fill(record: Manifest) -> tuple[Target, Diff]:
      optimizer, weight_map = more["optimizer"], more["weight_map"]
      if target is None:
        given = {**more, "optimizer": optimizer != "restore", "filter as only": choose is not None}
        goal = self._as_saved(record, None, as_numpy, [name for name, value in given.items() if value])
      else:
        goal = targets.read(target, optimizer=optimizer, as_numpy=as_numpy, record=record, choose=choose)
        goal = weight_map.through(goal) if weight_map else goal
      budget, rename, cast = self._byte_budget, more["rename"], more["cast"]
      return goal, compare(record, goal, only=names, skip=skip, rename=rename, cast=cast, byte_budget=budget)

    return fill

  def _as_saved(self, record: Manifest, item: str | None, as_numpy: bool, unused: list[str]) -> Target:
    """The target without a target, where `unused` names the options that need one."""
    if not as_numpy:
      raise CheckpointError(
        f"cannot restore from {self.directory} without a target: the layout it was saved in is not used.",
        fix="pass a plan, a live model, or a tree of jax.ShapeDtypeStruct with shardings; "
        "as_numpy=True returns numpy arrays.",
      )
    if unused:
      raise CheckpointError(
        f"restore(as_numpy=True) without a target takes no {unused[0]}=: it returns all saved leaves.",
        fix="only= and skip= choose leaves by their paths; pass a target for the rest.",
      )
    return targets.as_saved(record, item)

  def _fill(self, step: int, look: Callable[[], Manifest], fill: Fill) -> tuple[Manifest, PyTree]:
    """Restores a step, in two rendezvous; a `VanishedError` if another process removed or replaced it."""
    found = self._steps.identity(step)
    try:
      with multihost.together() as block:
        record, folder = look(), self._steps.folder(step)
        goal, diff = fill(record)
        diff.require()
        if diff.skipped and not (diff.matches or any(diff.values.values())):
          raise CheckpointError(
            f"only= and skip= leave nothing of step {step} to restore.",
            details=f"{len(diff.skipped)} leaves are left out",
            fix="fewer patterns in skip=, or the leaves that are wanted in only=.",
          )
        restore.check_files(folder, record, diff.matches)
        names = "\n".join(f"{leaf.name} {leaf.target.shape}" for leaf in diff.matches)
        block.same = "what to restore", f"step {step}\n{names}"
      with multihost.together():
        arrays: dict[str, dict[str, Any]] = restore.read(folder, record, diff, byte_budget=self._byte_budget)
    except CheckpointError as error:
      if multihost.any_process(found is None or self._steps.identity(step) != found):
        raise VanishedError(self.directory / str(step)) from error
      raise
    for item, values in diff.values.items():
      arrays.setdefault(item, {}).update(values)
    return record, goal.build(arrays)

  def _problems(self, step: int) -> dict[str, str]:
    folder, budget = self._steps.folder(step), self._byte_budget
    try:
      with multihost.together():
        record = self._steps.manifest(step)
    except DamagedError as error:
      return {manifest.FILE: error.what}
    mine = slice(jax.process_index(), None, jax.process_count())  # each checks its share
    merge = functools.partial(functools.reduce, dict.__or__)
    with multihost.together() as files:
      files.mine = restore.damaged_files(folder, record, [*record.files][mine])
      files.decide = merge
    rows = [(name, *row) for name, item in record.items.items() for row in item.leaves.items()]
    with multihost.together() as values, no_mesh():
      values.mine = dict(
        restore.check_values(folder, record, restore.as_stored(rows)[mine], byte_budget=budget)
      )
      values.decide = merge
    return files.found | values.found

  def _try_steps(self, step: int | str | None, on_corrupt: str, fill: Fill) -> PyTree:
    with multihost.together() as block:
      one_of("on_corrupt", on_corrupt, ("error", "fallback"))
      block.decide = lambda _: self._steps.resolve(step)  # the others may not see the same folders yet
    number, older = block.found, None
    while True:
      try:
        record, result = self._fill(number, functools.partial(self._steps.manifest, number), fill)
      except VanishedError:
        if step not in (None, "latest", "best"):
          raise
        number, older = multihost.decide(functools.partial(self._steps.resolve, step)), None
      except DamagedError as error:
        if on_corrupt == "error":
          raise
        if older is None:
          older = multihost.decide(functools.partial(self._steps.older, number))
        if not older:
          raise
        warn(f"step {number} was passed over: {error.what}")
        number = older.pop()
      else:
        self.restored, self._restored_step = record, number
        return result


def _check_objects(model: object, optimizer: object) -> None:
  if isinstance(model, nnx.Optimizer) and isinstance(optimizer, nnx.Pytree):
    raise CheckpointError("save got the optimizer before the model.", fix="save(step, model, optimizer)")
  if parts_of_type((model, optimizer), nnx.GraphDef):
    fix = "save(step, model), or save(step, nnx.state(model))."
    raise CheckpointError("save got an nnx.GraphDef, which holds no arrays.", fix=fix)


def _request(
  step: int, roots: dict[str, Any], extra: Named, metrics: Named, plan: object, overwrite: bool
) -> save.Request:
  """The arguments of `save`, checked; arrays among `extra` are more items."""
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
  numbers: dict[str, float] = {}
  for name, value in (metrics or {}).items():
    try:
      numbers[name] = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError) as error:
      raise CheckpointError(
        f"metrics[{name!r}] is not one number.", details=f"{value!r}"[:200], fix="reduce it before saving."
      ) from error
  if plan is not None and not isinstance(plan, Plan):
    raise CheckpointError(f"plan={plan!r} is not a Plan.", fix="pass what nxp.plan(...) returned.")
  items = save.describe(roots)
  plan_json = None if plan is None else json.loads(plan.to_json())
  return save.Request(step, items, *save.encode(roots, items), values, numbers, plan_json, overwrite)


def _after_fork() -> None:
  """A forked process has none of its parent's threads, and must not keep its directories locked."""
  lock.drop_all()
  for checkpointer in _unfinished:
    checkpointer._pending = None  # pyright: ignore[reportPrivateUsage]
  _unfinished.clear()


if hasattr(os, "register_at_fork"):
  os.register_at_fork(after_in_child=_after_fork)


def finish_saves() -> None:
  """Waits for the background saves. Their errors are left for `report_lost`, or for whoever waits."""
  global _lost
  pending = [one._pending for one in [*_unfinished] if one._pending is not None]  # pyright: ignore[reportPrivateUsage]
  _lost = any([future.exception() is not None for future in pending]) or _lost  # noqa: C419 (waits for all)


def report_lost() -> None:
  """Shows the errors of background saves, and ends the process with code 1 if there were any."""
  for checkpointer in [*_unfinished]:
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
