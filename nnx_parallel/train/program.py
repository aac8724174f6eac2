"""The programs of a step for some live objects, and a record of why each was compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from nnx_parallel.core.axes import axes_in
from nnx_parallel.core.jaxprs import is_tracer
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.nodes import Path, is_key, value_of
from nnx_parallel.errors import ShardingError, TrainError
from nnx_parallel.layers.attention import queries_over
from nnx_parallel.layers.layers import LayersUsed, with_options, with_stages
from nnx_parallel.layout.batch import input_spec, position_axes
from nnx_parallel.layout.constrain import default_scope, rules_in_scope, scope_of
from nnx_parallel.layout.sharded_optimizer import Placement, placement_of
from nnx_parallel.rules.ruleset import RuleSet
from nnx_parallel.train.binding import (
  RESTORE,
  Binding,
  as_pinned,
  current_trace,
  deleted,
  exhaust,
  flat,
  inside_a_program,
  is_deleted,
  put,
  read_apart,
  some_of,
)
from nnx_parallel.train.gradients import Layout, batch_axes_of, check_divides
from nnx_parallel.train.hold import RELAXED, held, is_refused
from nnx_parallel.train.loss_call import call_loss
from nnx_parallel.train.losses import Metrics, check_examples, means, pairs, terms
from nnx_parallel.train.options import LossFn, StepOptions, is_scattered
from nnx_parallel.train.update import keyed, update
from nnx_parallel.verify.subject import Subject

logger = logging.getLogger("nnx_parallel")

# As jax 0.10 and 0.12 say it, in Python and in XLA, at the dispatch of a program: nothing has run then.
_DELETED = re.compile(r"^Array has been deleted|Buffer has been deleted or donated\.?$")
_SETTINGS = ("jax_enable_x64", "jax_numpy_dtype_promotion", "jax_default_matmul_precision", "jax_debug_nans")
Signature = dict[str, str]
"""Label -> text of the type and layout."""


@dataclasses.dataclass(frozen=True)
class Compile:
  """One compilation of a step.

  Attributes:
    step: the number of the call that needed it, counted from 0.
    reasons: what was new, one phrase each: an argument, its shape, dtype or layout, or a changed attribute.
  """

  step: int
  reasons: tuple[str, ...]

  def __str__(self) -> str:
    return f"call {self.step}: {'; '.join(self.reasons)}"


class WatchedJit:
  """A jitted `run(arrays, raw arrays, batch)` whose cache is watched.

  Args:
    runs: the function to compile, and what to compile instead where XLA cannot compile it.
    labels: dotted paths of the arrays and of the raw arrays, for reasons and errors.
    shardings: of the arrays, which are donated and are the first results; None for a function that changes
      nothing.

  Attributes:
    jitted: what `jax.jit` made; a step calls it directly.
    known: entries of jax's cache of it that were accounted for; `jitted._cache_size()` is more when something
      was compiled since `reasons`.
  """

  def __init__(self, runs: Sequence[Callable[..., Any]], labels: Sequence[str], shardings: Any):
    self.labels = labels
    options: dict[str, Any] = {}
    if shardings is not None:
      options = {"donate_argnums": 0, "out_shardings": [*shardings, None]}
    self._options, self._others = options, [*dict.fromkeys(runs)]
    self.jitted: Any = jax.jit(self._others.pop(0), **options)
    # `jitted._cache_size` is not kept: jax 0.10 cannot collect the cycle that this bound method closes.
    self.known = 0
    self._seen: list[Signature] = []

  def relax(self, error: BaseException) -> bool:
    """Takes a program with fewer constraints, if there is one and XLA refused what it made of this one."""
    if not self._others or not is_refused(error):
      return False
    self.jitted = jax.jit(self._others.pop(0), **self._options)
    logger.warning(
      "XLA cannot compile the step with all layouts of its plan held (%s); it is compiled with fewer."
      " step.check_gradients(model, optimizer, batch) tells whether its gradients are right",
      str(error).split("hlo verifier]: ")[-1].split("\n")[0],
    )
    return True

  def explain(self, error: BaseException, arrays: Sequence[Any], batch: Any) -> None:
    """Explains a failed call in terms of the module, from its arguments as they are after the call.

    Raises:
      TrainError: the arguments explain the failure: an array was deleted before the call, is on other devices
        than the rest, or is none. Otherwise, where the program has donated the arrays, the error gets a note
        that they are gone.
    """
    gone = [label for label, array in zip(self.labels, arrays, strict=True) if is_deleted(array)]
    problem: TrainError | None = None
    if _DELETED.search(str(error)):
      problem = deleted(gone, len(self.labels)) if gone else _deleted_in(batch)
    elif isinstance(error, (TypeError, ValueError)) and not isinstance(error, TrainError) and not gone:
      problem = self._misplaced(arrays, batch) or _no_array(batch)
    if problem is not None:
      raise problem from error
    if gone:
      error.add_note(
        f"The step was under way and had taken over its arrays: {some_of(gone, len(self.labels))} are lost.\n"
        f"  Fix: {RESTORE}."
      )

  def reasons(self, arrays: list[Any], batch: Any) -> tuple[str, ...] | None:
    """What was new in the call that made the cache grow; empty for the first compilation.

    None when nothing was compiled: jax adds a second entry for the same program when typed PRNG keys first
    take its fast path. Donated arrays still have a type.
    """
    self.known = self.jitted._cache_size()
    now = signature(self.labels, arrays, batch)
    differences = [_difference(before, now) for before in self._seen]
    if not differences:
      self._seen.append(now)
      return ()
    least = min(differences, key=len)
    if not least:
      return None
    self._seen.append(now)
    return tuple(least)

  def _misplaced(self, arrays: Sequence[Any], batch: Any) -> TrainError | None:
    """The error of an array that is on other devices than the model, if there is one."""
    placed = [(label, x) for label, x in zip(self.labels, arrays, strict=True) if isinstance(x, jax.Array)]
    meshes = [x.sharding.mesh for _, x in placed if isinstance(x.sharding, NamedSharding)]
    mesh: Any = meshes[0] if meshes else None
    if mesh is None:
      return None
    # In their order: a program runs on one assignment of devices.
    devices = tuple(mesh.devices.flat)
    for label, array in placed:
      if array.committed and not _lies_on(array, devices):
        return TrainError(
          f"{label} is on {len(array.sharding.device_set)} device(s), and the model on {mesh.size}.",
          details=f"{label}: {array.sharding}; the model's mesh: {dict(mesh.shape)}",
          fix="write values in place, which keeps the layout: variable[...] = value.",
        )
    for path, array in jax.tree_util.tree_leaves_with_path(batch):
      if isinstance(array, jax.Array) and array.committed and not _lies_on(array, devices):
        return TrainError(
          f"batch{jax.tree_util.keystr(path)} is not on the model's mesh.",
          details=f"its devices {_ids(array.sharding)}, the model's {[d.id for d in devices]}"
          f" (mesh {dict(mesh.shape)})",
          fix="nxp.shard_batch(batch, plan) with the plan of this model.",
        )
    return None


class Structure:
  """The programs of a step for all live objects of one structure; it holds no arrays.

  Attributes:
    reduction: how the last traced program reduces gradients between replicas.
    layers: what the last traced program does with the layers of the loss.
  """

  def __init__(self, options: StepOptions, binding: Binding, placements: Mapping[Any, Placement | None]):
    self.options, self.trains, self.mesh = options, len(binding.names) > 1, binding.mesh
    self.template, self.parts = binding.template.blank(), binding.parts
    self.labels, self.variable_labels = binding.labels, binding.variable_labels
    self.shardings, self.variable_shardings = binding.shardings, binding.variable_shardings
    self.scope = scope_of(binding.variables)
    self._placements = placements
    self.reduction, self.layers = "", LayersUsed()
    self._programs: dict[tuple[str, ...], WatchedJit] = {}

  def program(self, axes: tuple[str, ...]) -> WatchedJit:
    """The program for batches whose dim 0 is split over these axes."""
    found = self._programs.get(axes)
    if found is None:
      own = self.variable_shardings
      run = self._train(axes) if self.trains else self._evaluate
      labels = [*self.variable_labels, *(self.labels[i] for i in self.parts.raw)]
      held_as = [*own, *(self.shardings[i] for i in self.parts.raw)]
      runs = [self.held(run, held_as, 2, relaxed) for relaxed in RELAXED]
      found = self._programs[axes] = WatchedJit(runs, labels, own if self.trains else None)
    return found

  def _train(self, axes: tuple[str, ...]) -> Callable[[list[Any], list[Any], Any], list[Any]]:
    layout, own = self.layout(axes), self.parts.variables

    def train_step(arrays: list[Any], raw: list[Any], batch: Any) -> list[Any]:
      objects = self.template.build(self.parts.join(arrays, raw))
      with default_scope(self.scope), queries_over(self._positions()):
        metrics, self.reduction, self.layers = update(self.options, objects[0], objects[1], batch, layout)
      after = self.template.arrays(objects)
      return [*(after[i] for i in own), metrics]

    return train_step

  def _evaluate(self, arrays: list[Any], raw: list[Any], batch: Any) -> Metrics:
    check_examples(batch)
    loss_fn: Any = self.options.loss_fn
    options, used, parts = self.options.layers, LayersUsed(), self.options.microbatches

    def run(arrays: list[Any], batch: Any) -> Any:
      (models,) = self.template.build(arrays)
      with options.marking(models, used):
        return terms(call_loss(loss_fn, models, batch), self.options.outputs)

    evaluate = with_options(run, options, used)
    if options.pipeline is not None:
      check_divides(batch, parts)
      evaluate = with_stages(run, options, parts, lambda found: ({}, {*found.outputs.values()}), used)
    with default_scope(self.scope), queries_over(self._positions()):
      found = evaluate(self.parts.join(arrays, raw), batch)
    self.layers = used
    return pairs(found, batch, parts) if self.options.pairs else means(found, parts)

  def _positions(self) -> str | None:
    """The mesh axis that splits queries in layers too: one of the rule for `seq` that splits no weight."""
    mesh, scope = self.mesh, self.scope
    if mesh is None or scope is None:
      return None
    named = position_axes(RuleSet(logical=scope.rules, inputs=scope.inputs), axis_sizes(mesh))
    used = {axis for where in self.shardings if where for axis in axes_in(where.spec)}
    return next((axis for axis in named if mesh.shape[axis] > 1 and axis not in used), None)

  def held(
    self, run: Callable[..., Any], shardings: Any, batch_at: int = 1, relaxed: int = 0
  ) -> Callable[..., Any]:
    """A program of these arrays with the layouts of their plan held."""
    mesh, scope = self.mesh, self.scope
    if (
      scope is None and not relaxed and mesh is not None and sum(size > 1 for size in mesh.shape.values()) > 1
    ):
      logger.warning(
        "the step leaves the layout of activations to XLA, which gets some wrong on several mesh axes: the"
        " models have no plan, or plans with different rules; nxp.check_gradients(model, batch, loss) tells"
      )
    return held(run, mesh, scope, shardings, batch_at, relaxed)

  def layout(self, axes: tuple[str, ...]) -> Layout:
    """The layout of each gradient, for a batch that is split over `axes`."""
    pairs = zip(self.template.paths, self.shardings, strict=True)
    own = {path[1:]: sharding for path, sharding in pairs if path[0] == 0}
    split = {key: _scattered(placement, key, own) for key, placement in self._placements.items()}
    in_turn = isinstance(self.options.loss_fn, Mapping)
    scattered: dict[Path, NamedSharding] = {}
    for key, placement in self._placements.items():
      stage = 0 if placement is None else placement.zero
      further = bool(split[key]) if in_turn else any(split.values())
      if is_scattered(self.options.gradients, stage, further=further):
        scattered |= split[key]
    used = {axis for where in own.values() if where for axis in axes_in(where.spec)}
    return Layout(self.mesh, {**own, **scattered}, frozenset(scattered), frozenset(used), axes)


class BoundStep:
  """A step for some live objects: their binding, and the programs of their structure.

  Args:
    options: of the step.
    roots: as for `Binding`.
    reasons: why it was made.
    structures: the structures that the step knows; a new one is added.
  """

  def __init__(
    self,
    options: StepOptions,
    roots: Mapping[str, Any],
    reasons: tuple[str, ...] = (),
    structures: dict[Any, Structure] | None = None,
  ):
    self.options, self.reasons = options, reasons
    trains = "optimizer" in roots
    optimizers = keyed(roots["model"], roots["optimizer"]) if trains else {}
    self._placements = {key: placement_of(optimizer) for key, optimizer in optimizers.items()}
    self.binding = Binding(roots, self._planned(), move=trains)
    self.watch = self.binding.watch
    self.trace = current_trace()
    self.variables = self.binding.variables
    self.structure = self._structure({} if structures is None else structures)
    # What the fast path compares: a tuple or dict of modules is new in each call, and is looked up.
    self.model, self.optimizer = (self.watch.reference(name) for name in ("model", "optimizer"))
    # Only microbatches depend on how the batch is sharded; jit handles all else.
    self._batch_axes: Callable[[Any], tuple[str, ...]] = (
      (lambda _: ()) if options.in_one_piece else batch_axes_of
    )
    self._written: list[int] = []
    self._loss: Any = None
    if trains:
      self._separate_buffers()

  def _structure(self, known: dict[Any, Structure]) -> Structure:
    """The structure of these objects, shared with all that are equal."""
    binding = self.binding
    constants = [(i, _value(x)) for i, x in binding.parts.constants.items()]
    key = (
      binding.template.graphdef,
      tuple(binding.template.paths),
      tuple(binding.shardings),
      binding.parts.raw,
      tuple(constants),
      self.watch.kinds(),
    )
    try:
      found = known.get(key)
    except (TypeError, ValueError):  # a static attribute cannot be hashed or compared
      found, key = None, object()
    if found is None:
      found = known[key] = Structure(self.options, binding, self._placements)
    return found

  def alive(self) -> bool:
    """Whether none of its objects was garbage-collected."""
    return self.watch.alive()

  def program(self, batch: Any) -> WatchedJit:
    """The program for batches that are sharded like this one."""
    return self.structure.program(self._batch_axes(batch))

  def placed(self, batch: Any) -> Any:
    """The batch with host arrays laid out by the plan of the models, where that splits them evenly."""
    mesh, scope = self.structure.mesh, self.structure.scope
    if mesh is None or mesh.size == 1 or scope is None or all(map(is_placed, jax.tree.leaves(batch))):
      return batch
    if jax.process_count() > 1:  # a host array may be this process's share, or the whole batch
      return batch
    rules, sizes = RuleSet(logical=scope.rules, inputs=scope.inputs), axis_sizes(mesh)

    def place(x: Any) -> Any:
      loose = isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm"
      if not loose and (not isinstance(x, jax.Array) or is_placed(x) or is_tracer(x) or x.committed):
        return x
      with contextlib.suppress(ShardingError, ValueError):  # no rule for the batch, or it does not divide
        where = NamedSharding(mesh, input_spec(rules, x.ndim, sizes))
        where.shard_shape(x.shape)
        return jax.device_put(x, where)
      return x

    return jax.tree.map(place, batch)

  def update(self, program: WatchedJit, batch: Any) -> tuple[list[Any], Metrics]:
    """Runs a program and writes its arrays back, all or none; returns the old ones and the metrics."""
    if current_trace() != self.trace:
      raise inside_a_program()
    self._check_last()
    self._pin()
    try:
      arrays = read_apart(self.variables)
      results = flat(map(program.jitted, (arrays,), (self.binding.raw,), (batch,)))
      # One call, from the start of the program to the last array written back. Python handles signals between
      # calls. So none, Ctrl-C included, comes after the program has taken the donated arrays and before the
      # Variables have the new ones.
      exhaust(map(put, self.variables, results))
    except BaseException as error:
      if program.relax(error):
        return self.update(program, batch)
      program.explain(error, [*self.binding.read(), *self.binding.raw], batch)
      raise
    self._written = [*map(id, self.binding.read())]
    metrics = next(results)  # they follow the arrays
    self._loss = next(iter(metrics.values()))
    return [*arrays, *self.binding.raw], metrics

  def _pin(self) -> None:
    """Lays out what was written into Variables since the last step as the program expects it."""
    now = [*map(id, self.binding.read())]
    if now != self._written:
      before = self._written or [0] * len(now)
      self.binding.pin(n for n, (old, new) in enumerate(zip(before, now, strict=True)) if old != new)

  def _check_last(self) -> None:
    """Raises what went wrong on the devices in the last step, once it is known.

    Raises:
      TrainError: the last step failed after it had returned, so that its arrays hold nothing.
    """
    loss, self._loss = jax.tree.leaves(self._loss), None
    if not loss or loss[0].is_deleted() or not loss[0].is_ready():
      return
    try:
      loss[0].block_until_ready()
    except RuntimeError as error:
      raise TrainError(
        "the last step failed on the devices after it had returned, so the model and the optimizer are lost.",
        details=str(error).strip().split("\n")[-1],
        fix=f"{RESTORE}.",
      ) from error

  def evaluate(self, program: WatchedJit, batch: Any) -> tuple[list[Any], Metrics]:
    """Runs a program that changes nothing. Returns the arrays and the metrics."""
    pinned = zip(self.binding.read(), self.structure.variable_shardings, strict=True)
    arrays, raw = [as_pinned(x, where) for x, where in pinned], self.binding.raw
    try:
      return [*arrays, *raw], program.jitted(arrays, raw, batch)
    except (TypeError, ValueError, RuntimeError) as error:
      if program.relax(error):
        return self.evaluate(program, batch)
      program.explain(error, [*arrays, *raw], batch)
      raise

  def subject(self, loss_fn: LossFn, wrt: Mapping[Any, Any], batch: Any) -> Subject:
    """What `check_gradients` checks: one loss, differentiated as in this step."""
    structure = self.structure
    layout = structure.layout(self._batch_axes(batch))
    return Subject(self.options, loss_fn, self.binding, batch, wrt, layout, structure.held)

  def _planned(self) -> dict[Path, NamedSharding]:
    """Where the plans of the optimizers put arrays, by path in the binding's template."""
    found: dict[Path, NamedSharding] = {}
    for key, placement in self._placements.items():
      if placement is not None:
        for root, shardings in enumerate((placement.model, placement.optimizer)):
          found |= {(root, *_inside(key), *path): where for path, where in shardings.items()}
    return found

  def unplanned(self) -> list[str]:
    """The replicated arrays of planned models that are not in the plan, or not in this shape."""
    planned, binding = self._planned(), self.binding
    rows = zip(
      binding.labels, binding.template.paths, binding.template.leaves, binding.shardings, strict=True
    )
    return [
      label
      for label, path, leaf, where in rows
      if path[0] == 0 and self._placements.get(None if None in self._placements else path[1]) is not None
      if (ndim := getattr(value_of(leaf), "ndim", 0)) and where is not None and where.is_fully_replicated
      if path not in planned or not where.is_equivalent_to(planned[path], ndim)
    ]

  def _separate_buffers(self) -> None:
    """Gives each Variable its own buffers: one buffer cannot be donated twice."""
    first: dict[Any, str] = {}
    for label, variable in zip(self.binding.variable_labels, self.variables, strict=True):
      value = variable.get_raw_value()
      if not isinstance(value, jax.Array):
        continue
      where = _pointer(value)
      if where in first:
        logger.info("%s and %s shared one array; each has its own now", first[where], label)
        variable.set_raw_value(jnp.copy(value))
      first.setdefault(where, label)


def is_placed(x: Any) -> bool:
  """Whether an array lies on a mesh."""
  return isinstance(getattr(x, "sharding", None), NamedSharding)


def _value(x: Any) -> Any:
  """What a constant of a program is compared by."""
  return (x.shape, str(x.dtype), x.tobytes()) if isinstance(x, np.ndarray) else x


def _inside(key: Any) -> Path:
  """The start of a model's paths: its key, where there are several."""
  return () if key is None else (key,)


def _scattered(
  placement: Placement | None, key: Any, own: Mapping[Path, NamedSharding | None]
) -> dict[Path, NamedSharding]:
  """The gradients of a model that its optimizer's plan can scatter, and their layout."""
  gradients = {} if placement is None else placement.gradients
  paths = {(*_inside(key), *path): where for path, where in gradients.items()}
  return {path: where for path, where in paths.items() if (mine := own.get(path)) and mine.mesh == where.mesh}


def _pointer(value: jax.Array) -> Any:
  if is_key(value.dtype):
    value = jax.random.key_data(value)
  shards = value.addressable_shards
  if not shards or not value.size:
    return id(value)
  return shards[0].device.id, shards[0].data.unsafe_buffer_pointer()


def _deleted_in(batch: Any) -> TrainError | None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    if is_deleted(leaf):
      return TrainError(
        f"batch{jax.tree_util.keystr(path)} was deleted: its memory was donated or freed before the step.",
        fix="make or fetch the batch again; a step does not donate its batch.",
      )
  return None


def _no_array(batch: Any) -> TrainError | None:
  """The first leaf of a batch that jax cannot take, if there is one."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    dtype = getattr(leaf, "dtype", None)
    if isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "__jax_array__"):
      continue
    if dtype is None or (isinstance(leaf, (np.ndarray, np.generic)) and dtype.kind in "OSUMm"):
      kind = f"a {type(leaf).__name__}" + ("" if dtype is None else f" of {dtype}")
      return TrainError(
        f"batch{jax.tree_util.keystr(path)} is {kind}, which no program can take.",
        details=f"value {reprlib.repr(leaf)}",
        fix="give a step arrays of numbers only; keep names and texts beside the batch.",
      )
  return None


def _lies_on(array: jax.Array, devices: tuple[Any, ...]) -> bool:
  sharding: Any = array.sharding
  if isinstance(sharding, NamedSharding):
    return _in_order(sharding) == devices
  return sharding.device_set == set(devices)


def _in_order(sharding: NamedSharding) -> tuple[Any, ...]:
  mesh: Any = sharding.mesh  # of a live array, so it has devices
  return tuple(mesh.devices.flat)


def _ids(sharding: Any) -> list[int]:
  if isinstance(sharding, NamedSharding):
    return [device.id for device in _in_order(sharding)]
  return sorted(device.id for device in sharding.device_set)


def signature(labels: Sequence[str], arrays: Sequence[Any], batch: Any) -> Signature:
  """Type and layout of every argument, by label, and what else jax compiles for."""
  found = {label: describe(array) for label, array in zip(labels, arrays, strict=True)}
  found["rules in scope"] = str(rules_in_scope())
  found["active mesh"] = str(dict(jax.sharding.get_abstract_mesh().shape))
  found |= {name: str(getattr(jax.config, name)) for name in _SETTINGS}
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    found[f"batch{jax.tree_util.keystr(path)}"] = describe(leaf)
  return found


def describe(x: Any) -> str:
  """The type and layout of an array as text: `float32[8,16] P('data', None)`."""
  if not hasattr(x, "shape") or not hasattr(x, "dtype"):
    return type(x).__name__
  text = f"{x.dtype}[{','.join(map(str, x.shape))}]"
  if getattr(x, "weak_type", False):
    text += " weak"
  sharding = getattr(x, "sharding", None)
  if isinstance(sharding, NamedSharding):
    sizes = ",".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items())
    memory = f" in {sharding.memory_kind}" if sharding.memory_kind not in (None, "device") else ""
    return f"{text} {sharding.spec} on ({sizes}){memory}"
  if sharding is None:
    return f"{text} {type(x).__name__}"
  return f"{text} on {'a device' if getattr(x, 'committed', True) else 'no particular device'}"


def _difference(before: Signature, now: Signature) -> list[str]:
  return [
    f"{label}: {before.get(label, 'absent')} -> {now.get(label, 'absent')}"
    for label in dict.fromkeys([*before, *now])
    if before.get(label) != now.get(label)
  ]
