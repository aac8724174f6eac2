"""A scan over layers as a pipeline: each stage of a mesh axis holds some layers and passes microbatches on.

A *tick* is one scan step, in which each stage computes one *chunk* of its layers for one microbatch. Arrays
have a stage dim, sharded over the axis; `jax.vmap` over it makes each device compute its own stage. Then
every result moves to the next stage: one collective-permute of one microbatch. For the backward pass a tick
saves only the inputs of its stages and recomputes the rest. The inputs of all ticks are saved, so memory
grows with the number of microbatches. In the order of `pipeline_1f1b.py`, memory does not grow
with it.

Chunk `c` of the `stages * virtual_stages` chunks lies on stage `c % stages`. Microbatches come in groups, one
microbatch for each stage. A group goes through all chunks before the next group starts, so the result of the
last stage reaches stage 0 exactly when stage 0 needs it, and no stage waits. In tick `t`, stage `s` computes
work item `i = t - s`, which determines its microbatch and chunk (`Schedule.item`).

Outside of the pipeline, microbatch `q * stages + s` lies on stage `s`, as `[q, s]`, so that the embedding and
the head are computed once, not once per stage. For this, the loop has one more buffer, of one microbatch per
stage. A group is loaded into the buffer and moves one stage down in each tick: stage 0 takes its microbatches
from it one by one, and the last stage writes its results into the free slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnx_parallel.core.axes import Entry, axes_of, entry_of, without
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.shards import on_shards
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.errors import SchemeError, TrainError
from nnx_parallel.layout.constrain import manual_too

Order: TypeAlias = Literal["gpipe", "1f1b"]
"""The order of the forward and backward passes in a train step; see `Pipeline`."""
GROUPS = 3
"""The number of groups under way in 1F1B: one forward, one backward, and the start of the next group."""
Layer = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]
"""`(carry, rows, state, shared arrays) -> (carry, state, results)`."""


@check_arguments(TrainError)
@dataclasses.dataclass(frozen=True)
class Pipeline:
  """How `train_step` runs the layers of a model as a pipeline.

  Attributes:
    axis: the mesh axis of the stages.
    virtual_stages: the number of chunks of layers on each stage. More than one chunk is a circular
      (interleaved) schedule, which has a smaller bubble and sends more.
    order: the order of the forward and backward passes in a train step. With `"gpipe"`, all microbatches pass
      forward before the first one passes backward, so a stage saves one input for each microbatch and chunk.
      With `"1f1b"`, groups of microbatches (one for each stage) pass forward and backward in turn, so a stage
      saves the inputs of at most `3 * stages * virtual_stages` chunks, however many microbatches there are.
      Both orders have the same bubble. None is `"1f1b"` where it can run: it needs two stages, and no loss
      scale; else `"gpipe"`.
    recompute: whether the backward pass computes the layers again, from their saved inputs. Without it, in
      the order 1F1B, a stage saves the activations of its layers for three groups of microbatches, and a step
      takes about 3/4 of the time; `remat` and `jax.checkpoint` inside of the layers have no effect.

  Raises:
    TrainError: the order is unknown.
    SchemeError: GPipe without recomputation.

  Source: GPipe, arXiv:1811.06965; 1F1B with a flush, arXiv:2006.09503; interleaved, arXiv:2104.04473.

  Example:
    >>> import nnx_parallel as nxp
    >>> stages = nxp.Pipeline("stage", virtual_stages=2)
    >>> step = nxp.train_step(lambda model, x: model(x).sum(), microbatches=32, pipeline=stages)
  """

  axis: str = "stage"
  virtual_stages: int = 1
  order: Order | None = None
  recompute: bool = True

  def __post_init__(self) -> None:
    if not self.recompute and self.order == "gpipe":
      raise SchemeError(
        f"order={self.order!r} computes the layers again in the backward pass.",
        fix='order="1f1b" with recompute=False.',
      )

  @check_arguments(TrainError)
  def saved_inputs(self, schedule: Schedule) -> int:
    """Returns the number of chunk inputs that each stage saves for the backward pass.

    Args:
      schedule: the timetable.

    Returns:
      The number of inputs. Each input is the activations of one microbatch.

    Example:
      >>> import nnx_parallel as nxp
      >>> schedule = nxp.parallel.Schedule(stages=4, microbatches=64, layers=8)
      >>> nxp.Pipeline(order="gpipe").saved_inputs(schedule), nxp.Pipeline().saved_inputs(schedule)
      (67, 12)
    """
    if self.order != "gpipe" and schedule.stages > 1:
      return min(GROUPS, schedule.groups) * schedule.stages * schedule.virtual_stages
    return schedule.ticks


@check_arguments(SchemeError, stages=1)
@dataclasses.dataclass(frozen=True)
class Schedule:
  """The timetable of a pipeline: which stage computes which microbatch in which tick.

  Attributes:
    stages: the size of the mesh axis.
    microbatches: a multiple of `stages`.
    layers: the number of layers.
    virtual_stages: the number of chunks of layers on each stage, as in `nxp.Pipeline`.

  Raises:
    SchemeError: `microbatches` is not a multiple of `stages`, or `layers` or `virtual_stages` is less than 1.

  Example:
    >>> import nnx_parallel as nxp
    >>> print(nxp.parallel.Schedule(stages=4, microbatches=8, layers=12))
    4 stages of 3 layers, 8 microbatches, 11 ticks, bubble 27.3 %
  """

  stages: int
  microbatches: int
  layers: int
  virtual_stages: int = 1

  def __post_init__(self) -> None:
    if self.microbatches < 1 or self.microbatches % self.stages:
      count = -(-max(self.microbatches, 1) // self.stages) * self.stages
      raise SchemeError(
        f"{self.microbatches} microbatches are not a multiple of {self.stages} stages.",
        details="they come in groups, one microbatch for each stage, so that no stage waits",
        fix=f"microbatches={count}; more microbatches make the bubble smaller.",
      )
    if self.virtual_stages < 1 or self.virtual_stages * self.stages > max(self.layers, self.stages):
      raise SchemeError(
        f"{self.layers} layers cannot be {self.virtual_stages} chunks on each of {self.stages} stages.",
        fix=f"virtual_stages={max(1, self.layers // self.stages)} or fewer, 1 at least.",
      )

  @property
  def chunk(self) -> int:
    """The number of layers of a chunk. If the chunks do not divide the layers, some layers do nothing."""
    return -(-self.layers // (self.stages * self.virtual_stages))

  @property
  def missing(self) -> int:
    """The number of layers that do nothing, because the chunks do not divide the layers."""
    return self.chunk * self.stages * self.virtual_stages - self.layers

  @property
  def groups(self) -> int:
    """The number of microbatches that each stage computes outside of the pipeline."""
    return self.microbatches // self.stages

  @property
  def ticks(self) -> int:
    """The number of ticks; each stage works in `microbatches * virtual_stages` of them."""
    return self.microbatches * self.virtual_stages + self.stages - 1

  @property
  def bubble_ratio(self) -> float:
    """The fraction of the time in which a stage does nothing useful."""
    return (self.stages - 1) / self.ticks

  @check_arguments(TrainError)
  def item(self, tick: AnyArray, stage: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Returns what a stage does in a tick.

    Args:
      tick: the number of the tick, or an array of numbers.
      stage: the number of the stage, or an array of numbers; arrays broadcast.

    Returns:
      Whether the stage works, on which microbatch, and with which of its chunks.
    """
    i = tick - stage
    of_group = i % (self.stages * self.virtual_stages)
    microbatch = i // (self.stages * self.virtual_stages) * self.stages + of_group % self.stages
    return (i >= 0) & (microbatch < self.microbatches), microbatch, of_group // self.stages

  def __str__(self) -> str:
    each = f"{self.virtual_stages} x {self.chunk}" if self.virtual_stages > 1 else f"{self.chunk}"
    idle = f" ({self.missing} of them empty)" if self.missing else ""
    return (
      f"{self.stages} stages of {each} layers{idle}, {self.microbatches} microbatches, {self.ticks} ticks,"
      f" bubble {self.bubble_ratio:.1%}".replace("%", " %")
    )


def staged(x: jax.Array, mesh: AnyMesh | None, axis: Entry, dim: int = 0) -> jax.Array:
  """`x` with one dim sharded over mesh axes, or over none; its other dims stay as they are."""
  if mesh is None:
    return x
  if AxisType.Explicit in mesh.axis_types:
    entries: list[PyTree] = [*jax.typeof(x).sharding.spec, *[None] * x.ndim][: x.ndim]
    entries[dim] = axis
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*entries)))  # pyright: ignore[reportArgumentType]
  free = PartitionSpec.UNCONSTRAINED
  spec = PartitionSpec(*(axis if n == dim else free for n in range(x.ndim)))
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))  # pyright: ignore[reportArgumentType]


def unstaged(x: PyTree, axis: str) -> PyTree:
  """The types of stacked layers without the Explicit axis of their stages: a scan needs dim 0 whole."""

  def of_scan(x: jax.Array) -> PyTree:
    where: Any = jax.typeof(x).sharding
    if AxisType.Explicit not in where.mesh.axis_types:
      return x
    spec = PartitionSpec(*(entry_of(without(axes_of(entry), frozenset((axis,)))) for entry in where.spec))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(where.mesh, spec))

  return jax.tree.map(of_scan, x)


class Belt(NamedTuple):
  """What is under way in one direction of a pipeline; each array is `[stages, ...]`."""

  ring: PyTree  # the results of the previous stages in the last tick
  line: PyTree  # the inputs that wait for stage 0, followed by the results of the last stage
  # the line when the last group entered: the first result of the group before it is on the last stage
  last: PyTree
  done: PyTree  # the line when the last result of a group was added to it


@dataclasses.dataclass(frozen=True)
class PipelineLoop:
  """A scan over layers, to be run as a pipeline."""

  schedule: Schedule  # which stage computes which microbatch in which tick
  axis: str  # the mesh axis of the stages
  mesh: AnyMesh | None  # the mesh; None: one device
  layer: Layer  # the program of one layer, for one microbatch

  def __call__(
    self, inputs: PyTree, rows: PyTree, state: PyTree, shared: PyTree
  ) -> tuple[PyTree, PyTree, PyTree]:
    """The last layer's results, like `inputs`; the state; other results, `[microbatches, layers, ...]`.

    `inputs` are `[groups, stages, ...]`; `rows` (arrays of each layer) and `state` (which layers change, each
    microbatch in turn, without gradients) `[virtual_stages, stages, chunk, ...]`.
    """
    plan, active = self.schedule, self.active
    stages = np.arange(plan.stages)
    first = jax.tree.map(lambda x: x[0], inputs)
    outputs = jax.tree.map(lambda x: jnp.zeros_like(jnp.concatenate([x, x[:1]])), inputs)
    # Weights are read inside the chunk: as inputs of the chunk they would be saved for each tick.
    compute = self.by_stage(jax.checkpoint(self.chunk, prevent_cse=False))
    read, write = self.by_stage(at), self.by_stage(put)
    shared = self.for_each_stage(shared)
    rows, active, state = swap((rows, active, state))  # the dim of stages first

    def step(carry: PyTree, t: AnyArray) -> tuple[PyTree, PyTree]:
      belt, state, outputs = carry

      def run(given: PyTree, works: AnyArray, _: AnyArray, repeat: AnyArray) -> tuple[PyTree, PyTree]:
        before = read(state, repeat)
        result, changed, made = compute(given, before, rows, active, repeat, shared)
        # A gradient through state that an earlier microbatch changed would differ from gradient accumulation.
        changed = jax.lax.stop_gradient(self._where(works, changed, before))
        return result, (write(state, repeat, changed), made)

      group = t // (plan.stages * plan.virtual_stages)
      entering = at(inputs, jnp.minimum(group, plan.groups - 1))
      belt, (state, made) = self.tick(belt, t, entering, first, run)
      return (belt, state, put(outputs, group, belt.line)), made

    carry = (Belt(first, first, first, first), jax.lax.stop_gradient(state), outputs)
    (belt, state, outputs), made = jax.lax.scan(step, carry, jnp.arange(plan.ticks))
    # The last group has one place to go.
    outputs = self._move(put(outputs, plan.groups, self._move(belt.line, -1)), 1, 1)
    early, late = (jax.tree.map(lambda x, n=n: x[n : n + plan.groups], outputs) for n in (0, 1))
    found = swap(self._where(stages == 0, swap(early), swap(late)))
    return found, swap(state), self._of(made)

  def tick(
    self,
    belt: Belt,
    tick: AnyArray,
    entering: PyTree,
    idle: PyTree,
    compute: Callable[[PyTree, AnyArray, AnyArray, AnyArray], tuple[PyTree, PyTree]],
    *,
    backwards: bool = False,
  ) -> tuple[Belt, PyTree]:
    """One tick of either direction: the new belt, and the others that `compute` returns.

    `entering` are the inputs of the group that may enter, `idle` those of stages that do not work; all arrays
    are `[stages, ...]`. Backwards, a group enters at the last stage, with its last microbatch.
    """
    plan = self.schedule
    stages, by = np.arange(plan.stages), 1
    if backwards:
      stages, by = stages[::-1].copy(), -1
    works, microbatch, repeat = plan.item(tick, stages)
    place = tick % (plan.stages * plan.virtual_stages)
    last = where(place == 0, belt.line, belt.last)
    line = where(place == 0, entering, belt.line)
    given = self._where((stages == 0) & (repeat == 0), line, belt.ring)
    # Bubbles compute on real values: their results are unused and have gradient 0, but 0 * inf is not 0.
    given = self._where(works, given, idle)
    if backwards:
      microbatch = microbatch // plan.stages * plan.stages + plan.stages - 1 - microbatch % plan.stages
      repeat = plan.virtual_stages - 1 - repeat
    result, others = compute(given, works, jnp.clip(microbatch, 0, plan.microbatches - 1), repeat)
    result = _marked(result, works)
    moved = self._where(stages == plan.stages - 1, result, self._move(line, -by))
    pushes = (place < plan.stages - 1) | (place == plan.stages * plan.virtual_stages - 1)
    line = where(pushes, moved, line) if plan.virtual_stages > 1 else moved
    done = where(place == plan.stages - 2, line, belt.done)
    return Belt(self._move(result, by), line, last, done), others

  def left(self, belt: Belt, *, backwards: bool = False) -> PyTree:
    """The results of the last group that left, each on the stage of its microbatch, `[stages, ...]`."""
    first = np.arange(self.schedule.stages) == (self.schedule.stages - 1 if backwards else 0)
    return self._where(first, self._move(belt.last, -1 if backwards else 1), belt.done)

  @property
  def active(self) -> AnyArray:
    """Which layers of each chunk are real, `[virtual_stages, stages, chunk]`."""
    plan = self.schedule
    active = np.arange(plan.layers + plan.missing) < plan.layers
    return active.reshape(plan.virtual_stages, plan.stages, plan.chunk)

  def split_layers(self, stacked: PyTree, *, replicated: bool = False) -> PyTree:
    """Arrays `[layers, ...]` as `[virtual_stages, stages, chunk, ...]`, the layers of a stage on its devices.

    `replicated`: every stage gets all layers, and one all-gather gives every stage all of their gradients.
    """
    plan = self.schedule

    def split(x: jax.Array) -> jax.Array:
      # Real values in the layers that do nothing: zeros may have no gradient, and 0 * inf would be its sum.
      x = jnp.concatenate([x, jnp.repeat(x[:1], plan.missing, 0)]) if plan.missing else x
      shape = (plan.virtual_stages, plan.stages, plan.chunk, *x.shape[1:])
      if self._explicit and plan.virtual_stages > 1:  # the layers of a stage are not neighbours
        spec = PartitionSpec(None, self.axis, None, *jax.typeof(x).sharding.spec[1:])
        return x.reshape(shape, out_sharding=spec)
      x = x.reshape(shape)
      return staged(staged(x, self.mesh, None, 1) if replicated else x, self.mesh, self.axis, 1)

    return jax.tree.map(split, stacked)

  def joined_layers(self, split: PyTree) -> PyTree:
    """The arrays that `split_layers` split."""

    def joined(x: jax.Array) -> jax.Array:
      return staged(x, self.mesh, None, 1).reshape(-1, *x.shape[3:])[: self.schedule.layers]

    return jax.tree.map(joined, split)

  def split_microbatches(self, microbatches: PyTree) -> PyTree:
    """Arrays `[microbatches, ...]` as `[groups, stages, ...]`, each microbatch on its stage."""
    plan = self.schedule

    def split(x: jax.Array) -> jax.Array:
      return staged(x.reshape(plan.groups, plan.stages, *x.shape[1:]), self.mesh, self.axis, 1)

    return jax.tree.map(split, microbatches)

  def joined_microbatches(self, split: PyTree) -> PyTree:
    """The arrays that `split_microbatches` split, equal on all stages."""
    return jax.tree.map(lambda x: staged(x, self.mesh, None, 1).reshape(-1, *x.shape[2:]), split)

  @property
  def _explicit(self) -> bool:
    return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

  def by_stage(self, f: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`f` of each stage's arrays; all have a dim of stages first."""
    auto = self.mesh is not None and not self._explicit
    mapped: PyTree = jax.vmap(f, spmd_axis_name=self.axis if auto else None)
    return lambda *args: mapped(*jax.tree.map(self._staged, args))

  def for_each_stage(self, tree: PyTree) -> PyTree:
    """A copy of arrays for each stage. Its gradient is summed once, where the copies are made."""
    return jax.tree.map(
      lambda x: self._staged(jnp.broadcast_to(x, (self.schedule.stages, *jnp.shape(x)))), tree
    )

  def _staged(self, x: jax.Array) -> jax.Array:
    return staged(jnp.asarray(x), self.mesh, self.axis)

  def _where(self, mask: AnyArray, a: PyTree, b: PyTree) -> PyTree:
    """By the dim of stages."""
    return self.by_stage(where)(mask, a, b)

  def chunk(
    self, carry: PyTree, state: PyTree, rows: PyTree, active: AnyArray, repeat: AnyArray, shared: PyTree
  ) -> tuple[PyTree, PyTree, PyTree]:
    """One chunk of layers of a stage, for one microbatch."""
    rows, active = at((rows, active), repeat)
    return self.layers(carry, state, rows, active, shared)

  def layers(
    self, carry: PyTree, state: PyTree, rows: PyTree, active: AnyArray, shared: PyTree
  ) -> tuple[PyTree, PyTree, PyTree]:
    """The layers of one chunk; `rows` and `active` are `[chunk, ...]`."""

    def one(carry: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
      row, old, active = given
      new, changed, made = self.one_layer(carry, old, row, active, shared)
      return new, (changed, made)

    carry, (state, made) = jax.lax.scan(one, carry, (rows, state, active))
    return carry, state, made

  def one_layer(
    self, carry: PyTree, state: PyTree, row: PyTree, active: AnyArray, shared: PyTree
  ) -> tuple[PyTree, PyTree, PyTree]:
    """One layer for one microbatch; a layer that is not `active` does nothing."""
    new, changed, made = self.layer(carry, row, state, shared)
    if self.schedule.missing:
      new, changed = where(active, (new, changed), (carry, state))
    return new, changed, made

  def _move(self, tree: PyTree, by: int, dim: int = 0) -> PyTree:
    """Each stage's arrays on the next stage, or on the previous stage; the ends wrap around."""
    size, mesh = self.schedule.stages, self.mesh
    pairs = [(n, (n + by) % size) for n in range(size)]

    # Not `jnp.roll`: XLA sends twice for its transpose.
    def shift(x: jax.Array) -> jax.Array:
      spec = jax.typeof(x).sharding.spec if self._explicit else PartitionSpec(*[None] * dim, self.axis)
      axes = None if self._explicit else {self.axis, *manual_too(mesh)}
      return on_shards(lambda x: jax.lax.ppermute(x, self.axis, pairs), mesh, (spec,), spec, axes)(x)

    return jax.tree.map(shift, tree) if size > 1 else tree

  def _of(self, made: PyTree) -> PyTree:
    """The results of layers, `[ticks, stages, chunk, ...]`, by microbatch and layer."""
    plan = self.schedule
    stage, microbatch, repeat = np.ix_(*map(np.arange, (plan.stages, plan.microbatches, plan.virtual_stages)))
    group, place = microbatch // plan.stages, microbatch % plan.stages
    tick = group * plan.stages * plan.virtual_stages + repeat * plan.stages + place + stage
    picked = self.by_stage(lambda made, tick: jax.tree.map(lambda x: x[tick], made))(swap(made), tick)

    def ordered(x: jax.Array) -> jax.Array:
      x = staged(jnp.moveaxis(x, 0, 2), self.mesh, None, 2)
      return x.reshape(plan.microbatches, -1, *x.shape[4:])[:, : plan.layers]

    return jax.tree.map(ordered, picked)


def in_order(pipeline: Pipeline, mesh: AnyMesh | None) -> Pipeline:
  """The pipeline with an order: by default 1F1B, or GPipe on one stage."""
  if pipeline.order is not None:
    return pipeline
  alone = size_along(mesh, pipeline.axis) == 1 and pipeline.recompute
  return dataclasses.replace(pipeline, order="gpipe" if alone else "1f1b")


def size_along(mesh: AnyMesh | None, axis: str) -> int:
  """The size of a mesh axis, 1 without a mesh; `SchemeError` if the mesh has no such axis."""
  sizes = {axis: 1} if mesh is None else axis_sizes(mesh)
  if axis not in sizes:
    raise SchemeError(
      f"the mesh of a pipeline has no axis {axis!r}.",
      details=f"mesh {sizes}",
      fix=f"nxp.make_mesh(data=2, {axis}=4), or the name of an axis that it has.",
    )
  return sizes[axis]


def _marked(result: PyTree, works: PyTree) -> PyTree:
  """Tests insert NaN into the results of bubbles here."""
  del works
  return result


def where(mask: AnyArray, a: PyTree, b: PyTree) -> PyTree:
  """`jnp.where` of the arrays of pytrees."""
  return jax.tree.map(lambda a, b: jnp.where(mask, a, b), a, b)


def at(tree: PyTree, n: AnyArray) -> PyTree:
  """Entry `n` on dim 0 of each array."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, n, keepdims=False), tree)


def put(tree: PyTree, n: AnyArray, new: PyTree) -> PyTree:
  """The arrays with another entry `n` on dim 0."""
  return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, n, 0), tree, new)


def swap(tree: PyTree) -> PyTree:
  """The arrays with dims 0 and 1 swapped."""
  return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
