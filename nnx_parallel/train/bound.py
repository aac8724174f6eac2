"""A step for some live objects: their arrays are read, run through a program, and written back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from nnx_parallel.core.checked import check_arrays
from nnx_parallel.core.jaxprs import is_tracer
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.nodes import Path, value_of
from nnx_parallel.core.types import AnyArray, Model, PyTree
from nnx_parallel.errors import ShardingError, TrainError
from nnx_parallel.layout.batch import check_fits, check_split, input_spec
from nnx_parallel.layout.resolve import count_shards_by_dim
from nnx_parallel.layout.sharded_optimizer import Placement, placement_of
from nnx_parallel.train.binding import RESTORE, Binding, as_pinned, current_trace, inside_a_program
from nnx_parallel.train.donation import owned, run, separate
from nnx_parallel.train.losses import Metrics, check_examples
from nnx_parallel.train.mistakes import explain
from nnx_parallel.train.options import LossFn, StepOptions
from nnx_parallel.train.program import Programs, inside, is_placed
from nnx_parallel.train.update import by_key
from nnx_parallel.train.watch import objects_in
from nnx_parallel.verify.subject import Subject

News = tuple[str, ...] | None
"""Why a call compiled: empty for the first call of a structure; None where it did not."""


class Bound(Binding):
  """Live objects and the programs of a step for them, which equal objects share: `known`, by structure.

  `forget` is called when one of the objects is garbage-collected, so that its arrays are not kept alive.
  """

  def __init__(
    self,
    options: StepOptions,
    roots: Mapping[str, Model],
    reasons: tuple[str, ...],
    known: dict[Hashable, Programs],
    forget: Callable[[weakref.ref[Model]], object] | None = None,
  ):
    trains = "optimizer" in roots
    optimizers = by_key(roots["model"], roots["optimizer"]) if trains else {}
    self._placements = {key: placement_of(optimizer) for key, optimizer in optimizers.items()}
    self._planned = _planned(self._placements)
    super().__init__(roots, self._planned, move=trains)
    self.options, self.reasons = options, reasons
    self.programs = self._find_programs(known)
    self._objects = [weakref.ref(item, forget) for root in roots.values() for item in objects_in(root)]
    self._trace = current_trace()
    self._loss: Any = None
    if trains:
      separate(self.variable_labels, self.variables)

  def _find_programs(self, known: dict[Hashable, Programs]) -> Programs:
    """The programs of this structure, shared with all objects that are equal."""
    template = self.template
    key: Hashable = (
      template.graphdef,
      tuple(template.paths),
      tuple(self.shardings),
      tuple(template.raw),
      tuple((i, _comparable(x)) for i, x in template.constants.items()),
      self.watch.kinds(),
    )
    try:
      found = known.get(key)
    except (TypeError, ValueError):  # a static attribute cannot be hashed or compared
      return Programs(self.options, self, self._placements)
    if found is None:
      found = known[key] = Programs(self.options, self, self._placements)
    return found

  def train(self, batch: PyTree) -> tuple[Metrics, News]:
    """Runs a train step, and writes all or none of its arrays into the Variables."""
    if current_trace() != self._trace:
      raise inside_a_program()
    self._check_last()
    as_planned = True
    try:
      program = self.programs.find(self.read(), self.raw, batch)
      arrays = owned(self.variables)
      if not self.are_pinned(arrays):  # somebody wrote arrays of another layout
        del arrays
        as_planned = self.pin()
        arrays = owned(self.variables)
      (metrics,) = run(program, self.variables, arrays, self.raw, batch)
    except BaseException as error:
      self._explain(error, batch)
      raise
    self._loss = next(iter(metrics.values()))
    return metrics, None if as_planned and not self.programs.is_new else self._news(arrays, batch)

  def evaluate(self, batch: PyTree) -> tuple[Metrics, News]:
    """Runs an evaluation, which changes nothing."""
    arrays = self.read()
    as_planned = self.are_pinned(arrays)
    if not as_planned:
      arrays = [as_pinned(x, where) for x, where in zip(arrays, self.variable_shardings, strict=True)]
    try:
      metrics = self.programs.find(arrays, self.raw, batch)(arrays, self.raw, batch)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
      self._explain(error, batch)
      raise
    return metrics, None if as_planned and not self.programs.is_new else self._news(arrays, batch)

  def trace(self, batch: PyTree) -> jax.stages.Traced:
    """The traced program for a batch, live or abstract."""
    check_arrays(TrainError, "batch", batch)
    arrays = self.read()
    return self.programs.find(arrays, self.raw, batch).trace(arrays, self.raw, batch)

  def _news(self, arrays: list[jax.Array], batch: PyTree) -> News:
    found = self.programs.compare([*arrays, *self.raw], batch)
    return found if found is None else found or self.reasons

  def _explain(self, error: BaseException, batch: PyTree) -> None:
    explain(error, self.programs.argument_labels, [*self.read(), *self.raw], batch)

  def _check_last(self) -> None:
    """Raises a `TrainError` if the last step failed on the devices after it had returned."""
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

  def place(self, batch: PyTree, *, abstract: bool = False) -> PyTree:
    """The batch with host arrays laid out by the plan of the models, if the plan says how to split them."""
    # With `abstract`, they become `ShapeDtypeStruct`s, as do `ShapeDtypeStruct`s without shardings.
    mesh, scope = self.mesh, self.scope
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
      if isinstance(x, np.ndarray):
        check_fits(f"batch{jax.tree_util.keystr(path)}", x)
    if mesh is None or mesh.size == 1 or scope is None or all(is_placed(x) for x in jax.tree.leaves(batch)):
      return batch
    check_examples(batch)
    sizes = axis_sizes(mesh)

    def place_leaf(path: Any, x: AnyArray) -> PyTree:
      if not jnp.ndim(x) or not _is_loose(x, abstract):  # `jit` replicates scalars, which takes less time
        return x
      try:
        spec = input_spec(scope.ruleset, x.ndim, sizes)
      except ShardingError:  # no rule for the batch
        return x
      name = f"batch{jax.tree_util.keystr(path)}"
      # A struct has the global shape; an array is the share of a process, or the global batch.
      if jax.process_count() > 1 and not isinstance(x, jax.ShapeDtypeStruct):
        raise TrainError(
          f"{name} is an array of the host, in a job of {jax.process_count()} processes.",
          details=f"shape {x.shape}, mesh {sizes}",
          fix="nxp.shard_batch(batch, plan), with the share of each process; with global_batch=True, each\n"
          "passes the same global batch.",
        )
      counts = count_shards_by_dim(spec, x.ndim, sizes)
      check_split(name, x.shape, spec, sizes, counts, counts)
      where = NamedSharding(mesh, spec)
      if abstract:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=where)
      return jax.device_put(x, where)

    return jax.tree_util.tree_map_with_path(place_leaf, batch)

  def subject(self, loss_fn: LossFn, wrt: Mapping[Hashable, nnx.filterlib.Filter], batch: PyTree) -> Subject:
    """The subject of `check_gradients`: one loss, differentiated as in this step."""
    check_arrays(TrainError, "batch", batch)
    self.programs.find(self.read(), self.raw, batch)  # decides which axes they compute on
    layout, places = self.programs.find_layout(batch), self.programs.places
    batch = places.place(batch)
    return Subject(self.options, loss_fn, self, batch, wrt, layout, places, layout.gather, self.programs.mend)

  def unplanned(self) -> list[str]:
    """The replicated arrays of planned models that are not in the plan, or not in this shape."""
    rows = zip(self.labels, self.template.paths, self.template.leaves, self.shardings, strict=True)
    return [
      label
      for label, path, leaf, where in rows
      if path[0] == 0 and self._placements.get(None if None in self._placements else path[1]) is not None
      if (ndim := getattr(value_of(leaf), "ndim", 0)) and where is not None and where.is_fully_replicated
      if path not in self._planned or not where.is_equivalent_to(self._planned[path], ndim)
    ]


def _is_loose(x: AnyArray, abstract: bool) -> bool:
  """Whether an array of a batch is still to be laid out: of the host, uncommitted, or abstract."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return abstract and x.sharding is None
  if isinstance(x, np.ndarray):
    return x.dtype.kind not in "OSUMm"
  return isinstance(x, jax.Array) and not (is_placed(x) or is_tracer(x) or x.committed)


def _planned(placements: Mapping[Hashable, Placement | None]) -> dict[Path, NamedSharding]:
  """Where the plans of the optimizers put arrays, by path in the binding's template."""
  return {
    (root, *inside(key), *path): where
    for key, placement in placements.items()
    if placement is not None
    for root, shardings in enumerate((placement.model, placement.optimizer))
    for path, where in shardings.items()
  }


def _comparable(x: AnyArray) -> AnyArray:
  """The value by which a constant of a program is compared."""
  return (x.shape, str(x.dtype), x.tobytes()) if isinstance(x, np.ndarray) else x
