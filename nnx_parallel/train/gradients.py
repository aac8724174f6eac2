"""Gradients of a batch or of its microbatches, reduced between replicas once where that is exact."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from nnx_parallel.core.axes import axes_of, count_shards
from nnx_parallel.core.jaxprs import equations
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.nodes import Path, named_leaves
from nnx_parallel.core.shards import join_batch, pin, split_batch
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.gather import Gather
from nnx_parallel.layout.constrain import mapped_axes
from nnx_parallel.optimizers.wrappers import widen
from nnx_parallel.train.draws import DRAWS, REPLICA, Draws, UnknownDraw, draw_rows
from nnx_parallel.train.linearity import factors
from nnx_parallel.train.losses import Terms, mean
from nnx_parallel.train.trace import Arrays, Differentiable, Objective, why_not_by_replica

_SLOPE = 0
"""The place of the derivative along a direction, where gradients are by leaf."""


class StepLayout(NamedTuple):
  """Where the arrays of a step are sharded, as seen from outside the program."""

  mesh: Any  # the mesh, or None on one device
  # path in the models -> the sharding of its gradient: the array's sharding, or the sharding of its optimizer
  # state. None if it is on no mesh.
  gradients: Mapping[Path, NamedSharding | None]
  # the paths of gradients that take the sharding of their optimizer state as soon as they exist, in each
  # microbatch
  scattered: frozenset[Path] = frozenset()
  used: frozenset[str] = frozenset()  # mesh axes that split some array of the model
  # mesh axes that split dim 0 of every array of the batch; () when they differ or are unknown
  batch: tuple[str, ...] = ()
  gather: Gather | None = None  # what the losses gather where they read it

  def of(self, loss: Differentiable) -> StepLayout:
    """The layout for a loss, which may train some of the arrays only."""
    return self._replace(scattered=self.scattered.intersection(loss.paths.values()))

  @property
  def shards(self) -> int:
    """The number of shards of the batch; 1 if its arrays have different shards, or unknown ones."""
    return count_shards(self.batch, axis_sizes(self.mesh))

  def by_leaf(self, loss: Differentiable) -> dict[int, NamedSharding | None]:
    """The sharding of each gradient of a loss."""
    return {i: self.gradients.get(path) for i, path in loss.paths.items()}


class Total(NamedTuple):
  """The results of a batch."""

  grads: Arrays  # for each trained array; float32 sums, not yet divided, if there are several parts
  terms: Terms  # the terms, summed over the parts
  parts: int  # the number of parts in the sum, local parts included
  rest: Arrays  # the arrays that the loss assigned
  how: str  # where the gradients of replicas are reduced, as a phrase


@dataclasses.dataclass(frozen=True)
class Accumulation:
  """The gradients and terms of a loss, summed over `count` microbatches."""

  objective: Objective  # the function to differentiate
  trained: Arrays  # the arrays with gradients
  rest: Arrays  # the other arrays
  count: int  # the number of microbatches
  layouts: Mapping[int, NamedSharding | None]  # the layouts of the gradients
  changes: Collection[int] = ()  # the arrays of `rest` that the objective changes
  tangents: Arrays | None = None  # a direction; the derivative along it takes the place of the gradients

  def scan(self, batch: PyTree) -> tuple[Arrays, Terms, Arrays]:
    """Sums over the microbatches of this batch (local or global); also returns the changed arrays."""
    like = self.trained if self.tangents is None else {_SLOPE: jnp.zeros(())}
    zeros = self._pin({i: jnp.zeros_like(widen(x)) for i, x in like.items()})
    parts = jax.tree.map(lambda x: split_batch(x, self.count), batch)
    moving = {i: self.rest[i] for i in self.changes}
    (total, moving), stacked = jax.lax.scan(self._add, (zeros, moving), parts, length=self.count)
    return total, _sum_parts(stacked, join_batch), moving

  def _add(self, carry: PyTree, part: PyTree) -> tuple[PyTree, Terms]:
    total, moving = carry
    current = {**self.rest, **moving}
    if self.tangents is None:
      grads, (found, changed, weight) = jax.grad(self.objective, has_aux=True)(self.trained, current, part)
    else:
      slope, (found, changed, weight) = _jvp(self.objective, self.trained, self.tangents, current, part)
      grads = {_SLOPE: slope}
    # In float32: many small gradients are added, and summed over replicas.
    grads = self._pin({i: _weigh(widen(g), weight) for i, g in grads.items()})
    total = self._pin({i: x + grads[i] for i, x in total.items()})
    moving = {i: changed[i].astype(array.dtype) if i in changed else array for i, array in moving.items()}
    return (total, moving), found

  def _pin(self, grads: Arrays) -> Arrays:
    return {i: pin(x, self.layouts.get(i)) for i, x in grads.items()}

  def sum_on_devices(
    self, batch: PyTree, mesh: Mesh, axes: tuple[str, ...], reduction: DTypeLike | None
  ) -> tuple[Arrays, Terms]:
    """For replicas that hold the full model: each sums its own gradients in a `shard_map`."""

    def local(trained: Arrays, rest: Arrays, batch: PyTree) -> tuple[PyTree, PyTree, PyTree, PyTree]:
      alone = dataclasses.replace(self, trained=trained, rest=rest, layouts={})
      grads, found, _ = alone.scan(batch)
      grads = grads if reduction is None else {i: g.astype(reduction) for i, g in grads.items()}
      # One call for all arrays: XLA combines them into one all-reduce.
      grads, sums, counts = jax.lax.psum((grads, found.sums, found.counts), axes)
      return jax.tree.map(widen, grads), sums, counts, found.outputs

    split, everywhere = PartitionSpec(axes), PartitionSpec()
    grads, sums, counts, outputs = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(everywhere, everywhere, split),
      out_specs=(everywhere, everywhere, everywhere, split),
      # Replication is not tracked in types: a user's scan over a carry of zeros would have to declare it.
      check_vma=False,
    )(self.trained, self.rest, batch)
    return grads, Terms(sums, counts, outputs)

  def map_replicas(
    self, batch: PyTree, layout: StepLayout, axes: tuple[str, ...]
  ) -> tuple[Arrays, Terms, Arrays]:
    """For replicas that are sharded themselves: a replica dim, sharded over `axes`, is summed at the end."""
    # A `shard_map` over some axes of the mesh would do the same, but XLA aborts the process for some of them
    # (a gather next to another batch axis, jax 0.12.0.1).
    replicas = count_shards(axes, axis_sizes(layout.mesh))
    inner = tuple(axis for axis in layout.batch if axis not in axes)

    def by_replica(x: jax.Array) -> jax.Array:
      x = jnp.reshape(x, (replicas, x.shape[0] // replicas, *x.shape[1:]))
      return pin(x, NamedSharding(layout.mesh, PartitionSpec(axes, inner or None)))

    with mapped_axes(axes):
      mapped = jax.vmap(self.scan, axis_name=REPLICA, spmd_axis_name=axes)(jax.tree.map(by_replica, batch))
    grads, found, moved = mapped
    # Each replica changes an array, such as the counter of a stream, to the same value.
    return (
      {i: g.sum(0) for i, g in grads.items()},
      _sum_parts(found, lambda x: jax.lax.collapse(x, 0, 2)),
      {i: x[0] for i, x in moved.items()},
    )


def _sum_parts(stacked: Terms, joined: Callable[[jax.Array], jax.Array]) -> Terms:
  """The sums of the terms of parts that are stacked on dim 0, and their outputs joined."""
  sums, counts = jax.tree.map(lambda x: x.sum(0), (stacked.sums, stacked.counts))
  return Terms(sums, counts, jax.tree.map(joined, stacked.outputs))


def whole_batch(loss: Differentiable, batch: PyTree, layout: StepLayout) -> Total:
  """The gradients of the full batch at once."""
  (_, (found, changed, _)), grads = jax.value_and_grad(loss.objective, has_aux=True)(
    loss.train, loss.rest, batch
  )
  if not layout.scattered:
    return Total(grads, found, 1, changed, "once: one batch")
  grads = {i: pin(grads[i], where) for i, where in layout.by_leaf(loss).items()}
  return Total(grads, found, 1, changed, "once: one batch, into the layout of the optimizer state")


def in_microbatches(
  loss: Differentiable, batch: PyTree, count: int, layout: StepLayout, reduction: DTypeLike | None = None
) -> Total:
  """Gradients summed over `count` microbatches in a scan; a pipeline takes `loss.parts` of them at once."""
  # Microbatch `m` is every `count`-th example from `m` on, so that each microbatch stays spread over all
  # devices. Where the model is replicated over mesh axes that split the batch, each replica sums its own
  # gradients, and they are reduced once, after the scan. This needs a loss that is a mean or a sum over
  # examples, changes no Variable by its examples (batch statistics), and has no sharding constraint of jax
  # over those axes (`nxp.constrain` is handled). Otherwise gradients are reduced in each microbatch, and
  # `Total.how` gives the reason. In both cases the numbers equal the numbers on one device. `reduction` is
  # the dtype in which replicas that hold the full model sum their gradients; None: float32.
  check_divides(batch, count * loss.parts, layout.shards)
  axes, why = _replica_axes(batch, count * loss.parts, layout)
  once, why = _compare(loss, batch, count, layout, axes) if axes else (None, why)
  if once is None and loss.parts > 1:
    loss.inspect(_first(batch, count))  # what cannot be a pipeline says so before its batch is looked at
  changed = loss.write(_first(batch, count * loss.parts)).changed if once is None else once.changed
  _check_shards(batch, count * loss.parts, layout)
  summed = Accumulation(loss.objective, loss.train, loss.rest, count, layout.by_leaf(loss), changed)
  if once is not None and (once.alone or reduction is None):
    try:
      return once.total(summed, loss.parts, batch, layout, reduction)
    except (UnknownDraw, jax.errors.UnexpectedTracerError) as error:
      why = f"random numbers cannot be drawn by replica: {_first_line(error)}"
  if reduction is not None:
    raise TrainError(
      f"reduction={jnp.dtype(reduction)} cannot be honoured: XLA places the reductions of this step.",
      details=why or "the replicas are split themselves, or change Variables",
      fix='gradients="like_parameters"; or leave reduction out.'
      if layout.scattered
      else "leave reduction out: gradients are reduced in the dtype in which their layers compute.",
    )
  grads, found, moved = summed.scan(batch)
  each = "tick" if loss.parts > 1 else "microbatch"
  return Total(grads, found, count * loss.parts, moved, f"in each {each}: {why}")


class Once(NamedTuple):
  """How replicas each sum their own gradients, which are then reduced once."""

  axes: tuple[str, ...]  # the mesh axes of the replicas
  alone: bool  # whether each replica is one device, and only returns sums
  factors: tuple[float, Terms]  # for the loss, for the terms
  draws: Draws  # the random numbers for the examples
  times: int  # how many times the examples of a replica they were compared with
  changed: set[int]  # the leaves whose arrays the loss changes

  def total(
    self, summed: Accumulation, pieces: int, batch: PyTree, layout: StepLayout, reduction: DTypeLike | None
  ) -> Total:
    """The results of a batch; `pieces` is the number of microbatches that one call of the loss takes."""
    how = f"once, after the {'last tick' if pieces > 1 else 'scan'}, over {', '.join(self.axes)}"
    replicas = count_shards(self.axes, axis_sizes(layout.mesh))
    moved: Arrays = {}
    if self.alone:
      how += f", in {jnp.dtype(reduction or jnp.float32)}"
      grads, found = summed.sum_on_devices(batch, layout.mesh, self.axes, reduction)
    else:
      if self.draws:
        where = NamedSharding(layout.mesh, PartitionSpec(self.axes))
        drawn = draw_rows(summed.objective, self.draws, self.times, replicas, where)
        summed = dataclasses.replace(summed, objective=drawn)
      grads, found, moved = summed.map_replicas(batch, layout, self.axes)
    of_loss, of_terms = self.factors
    grads = {i: g if of_loss == 1 else g * of_loss for i, g in grads.items()}
    terms = jax.tree.map(lambda x, factor: x if factor == 1 else x * factor, found, of_terms)
    return Total(grads, terms, summed.count * replicas * pieces, moved, how)


def _first_line(error: Exception) -> str:
  return next(iter(str(error).splitlines()), type(error).__name__)


def _compare(
  loss: Differentiable, batch: PyTree, count: int, layout: StepLayout, axes: tuple[str, ...]
) -> tuple[Once | None, str]:
  """How replicas each sum their gradients, or why not."""
  replicas = count_shards(axes, axis_sizes(layout.mesh))
  parts = count * loss.parts
  inputs, times = (_first(batch, parts * replicas), _first(batch, parts)), 1
  if any(jnp.shape(x)[:1] == (1,) for x in jax.tree.leaves(inputs[0])):
    # A dim of one example is broadcast or left out, so the traces would differ.
    times, inputs = 2, jax.tree.map(lambda x: jnp.concatenate([x, x]) if jnp.ndim(x) else x, inputs)
  whole = loss.write(inputs[1])
  draws = any(eqn.primitive.name in DRAWS for eqn in equations(whole.trace))
  alone = all(size == 1 for axis, size in layout.mesh.shape.items() if axis not in axes)
  alone = alone and not draws and not whole.changed
  if whole.changed and loss.parts > 1:
    return None, "the loss changes Variables in a pipeline"
  try:
    with _as_replica(layout.mesh, axes, alone=alone):
      loss.write(_first(batch, parts * replicas))
      part, traced = loss.write(inputs[0]), loss.inspect(_first(batch, count * replicas))
  except Exception as error:  # noqa: BLE001 (the loss is the user's code)
    return None, f"the loss cannot be computed for the examples of one replica: {_first_line(error)}"
  if why := why_not_by_replica(traced, axes):
    return None, why
  # A dim of replicas makes it a grouped convolution, whose kernel gradient XLA gets wrong.
  if not alone and any(eqn.primitive.name == "conv_general_dilated" for eqn in equations(traced)):
    return None, "the model has convolutions, and replicas that are split themselves"
  split = [bool(jnp.ndim(x)) for x in jax.tree.leaves(batch)]
  splits = [False] * (len(part.trace.jaxpr.invars) - len(split)) + split
  leaves, structure = jax.tree.flatten(part.kinds)
  found, draws, why = factors(part.trace, whole.trace, replicas, splits, leaves)
  if why:
    return None, why
  of_loss, (of_terms, _, _) = jax.tree.unflatten(structure, found)
  return Once(axes, alone, (of_loss, of_terms), draws, times, whole.changed), ""


def _as_replica(
  mesh: Mesh, axes: tuple[str, ...], *, alone: bool
) -> contextlib.AbstractContextManager[object]:
  """Traces as `Accumulation.sum_on_devices` does if `alone`, else as `Accumulation.map_replicas` does."""
  if not alone:
    return mapped_axes(axes)
  kinds = dict.fromkeys(mesh.axis_names, AxisType.Manual)
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update_axis_types(kinds))


def slope_of(
  loss: Differentiable, tangents: Arrays, batch: PyTree, count: int | None
) -> tuple[PyTree, PyTree]:
  """The mean loss of a batch, and its derivative along `tangents` by forward mode."""
  # `count` as in `in_microbatches`, or None for the full batch at once.
  if count is None:
    slope, (found, _, _) = _jvp(loss.objective, loss.train, tangents, loss.rest, batch)
    return mean(found.sums["loss"], found.counts["loss"]), slope
  changed = loss.write(_first(batch, count * loss.parts)).changed
  summed = Accumulation(loss.objective, loss.train, loss.rest, count, {}, changed, tangents)
  found_by, found, _ = summed.scan(batch)
  slope = found_by[_SLOPE]
  total, weight = found.sums["loss"], found.counts["loss"]
  if weight is None:
    return total / (count * loss.parts), slope / (count * loss.parts)
  return mean(total, weight), mean(slope, weight)


def _jvp(
  objective: Objective, trained: Arrays, tangents: Arrays, rest: Arrays, part: PyTree
) -> tuple[PyTree, PyTree]:
  _, slope, found = jax.jvp(lambda train: objective(train, rest, part), (trained,), (tangents,), has_aux=True)
  return slope, found


def loss_of(loss: Differentiable, batch: PyTree, count: int) -> PyTree:
  """The mean loss of a batch, part by part, for optimizers that evaluate it."""

  # It can be differentiated: each part is then recomputed, so only one part is kept at a time.
  def part_of(part: PyTree) -> tuple[PyTree, PyTree]:
    found = loss.objective(loss.train, loss.rest, part)[1][0]
    return found.sums["loss"], found.counts["loss"]

  loss.write(_first(batch, count * loss.parts))  # an optimizer evaluates it several times
  if count == 1:
    total, weight = part_of(batch)
    return total / loss.parts if weight is None else mean(total, weight)
  parts = jax.tree.map(lambda x: split_batch(x, count), batch)
  _, (sums, counts) = jax.lax.scan(lambda _, part: (None, jax.checkpoint(part_of)(part)), None, parts)
  return sums.mean() if counts is None else mean(sums.sum(), counts.sum())


def check_divides(batch: PyTree, count: int, shards: int = 1) -> None:
  """Refuses a batch that `count` microbatches cannot split evenly; scalars are given to each of them."""
  # The error proposes a batch whose microbatches `shards` devices can split.
  leaves = [(name, jnp.shape(leaf)) for name, leaf in named_leaves(batch) if jnp.ndim(leaf)]
  for name, shape in leaves:
    size = shape[0]
    if not size % count:
      continue
    other = next(((name, shape) for name, shape in leaves if shape[0] != size), None)
    if other is not None:
      raise TrainError(
        f"{name} has {size} rows on dim 0, which {count} microbatches cannot split evenly, and {other[0]} has"
        f" {other[1][0]}.",
        details=f"shapes {shape} and {other[1]}; microbatches split dim 0 of every array, the batch dim",
        fix=f"give {name} the batch dim: jnp.broadcast_to(x, ({other[1][0]}, *x.shape)); or keep it in the"
        " model, as nnx.Variable(x).",
      )
    raise TrainError(
      f"{name} has {size} examples, which {count} microbatches cannot split evenly.",
      details=f"shape {shape}",
      fix=f"a global batch of {size + -size % (count * shards)}, or fewer microbatches.",
    )


def _check_shards(batch: PyTree, count: int, layout: StepLayout) -> None:
  """Refuses microbatches with fewer examples than the batch has shards."""
  shards = layout.shards
  for name, leaf in named_leaves(batch):
    size = jnp.shape(leaf)[0] if jnp.ndim(leaf) else shards * count
    if size // count % shards:
      most = max(n for n in range(1, size // shards + 1) if not size % (n * shards))
      raise TrainError(
        f"{count} microbatches of {size} examples have {size // count} each, which {shards} shards cannot"
        " split evenly.",
        details=f"{name}, shape {jnp.shape(leaf)}, split over {', '.join(layout.batch)}",
        fix=f"microbatches={most}, or a global batch of {shards * count}.",
      )


def _weigh(x: jax.Array, weight: jax.Array | None) -> jax.Array:
  return x if weight is None else x * weight.astype(x.dtype)


def _first(batch: PyTree, count: int) -> PyTree:
  return jax.tree.map(lambda x: split_batch(x, count)[0], batch)


def _replica_axes(batch: PyTree, count: int, layout: StepLayout) -> tuple[tuple[str, ...], str]:
  """The axes whose replicas hold the full model and full microbatches; or (), and why there are none."""
  if layout.mesh is None or layout.mesh.size == 1:
    return (), "one device"
  if layout.scattered:
    return (), "gradients are scattered into the layout of the optimizer state"
  if AxisType.Explicit in layout.mesh.axis_types:
    return (), "the model states shardings on Explicit axes"
  if not layout.batch:
    return (), "no mesh axis splits every array of the batch"
  split = [axis for axis in layout.batch if layout.mesh.shape[axis] > 1]
  if not split:
    return (), "no mesh axis splits the batch"
  axes = tuple(axis for axis in split if axis not in layout.used)
  if not axes:
    return (), f"{' and '.join(split)} split{'s' * (len(split) == 1)} the parameters too"
  if axes != layout.batch[: len(axes)]:
    return (), f"{', '.join(axes)} are not the major axes of the batch's {', '.join(layout.batch)}"
  replicas = count_shards(axes, axis_sizes(layout.mesh))
  sizes = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
  if any(size % (replicas * count) for size in sizes):
    return (), f"{count} microbatches on each of {replicas} replicas do not divide the batch"
  return axes, ""


def batch_axes_of(batch: PyTree) -> tuple[str, ...]:
  """The mesh axes of dim 0, when every array of the batch has the same; else ()."""
  found = {examples_over(leaf) for leaf in jax.tree.leaves(batch)}
  return found.pop() if len(found) == 1 else ()


def examples_over(array: AnyArray) -> tuple[str, ...]:
  """The mesh axes that split dim 0 of an array."""
  sharding = getattr(array, "sharding", None)
  if not isinstance(sharding, NamedSharding) or not jnp.ndim(array) or not sharding.spec:
    return ()
  return axes_of(sharding.spec[0])
