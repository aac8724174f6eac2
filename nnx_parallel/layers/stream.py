"""The layers of a call that is repeated for ever: a pipeline in which no stage waits.

A generated token has to pass all layers before the next one begins. So as many groups of rows as stages go
round: while one of them is on the last stage, the next is on the one before (`PipelineLoop.turn`). In a tick
one group enters, by what stands before the layers, and another leaves, by what stands after them. Weights are
brought to their stages once; each stage holds the caches of its layers, for all groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.core.axes import axes_of, entry_of, without
from nnx_parallel.core.interpret import Values, read, values_of
from nnx_parallel.core.jaxprs import nbytes
from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.shards import pinned
from nnx_parallel.core.text import format_bytes
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.pipeline import PipelineLoop, Schedule, size_along, staged
from nnx_parallel.layers.stacks import Key, Stacks, Treatment, each_of
from nnx_parallel.layers.stages import AroundLayers, Signature


class PipelineState(NamedTuple):
  """What goes round.

  Attributes:
    ring: what each stage got from the one before, `[stages, ...]`.
    layers: what the layers change, `[stages, groups, layers of a stage, ...]`; by the position of the input
      that the first layer changes.
    alone: what changes outside of the layers, `[groups, ...]`, by the position of the input.
  """

  ring: PyTree
  layers: dict[int, jax.Array]
  alone: dict[int, jax.Array]


class Prepared(NamedTuple):
  """What is the same in all ticks: arrays by variable, and the weights of the layers on their stages."""

  values: Values
  rows: dict[Key, jax.Array]


class DecodePipeline(AroundLayers):
  """A traced call of one group of rows, whose layers are a pipeline that goes round.

  Args:
    program, how: as for `AroundLayers`.
    signature: also; the inputs behind the model's arrays are those that differ in each call, and states,
      which each group has for itself.
    axis: the mesh axis of the stages.
    mesh: the mesh, if there is one.
    specs: input -> the spec of a state; those that are not there are left to the compiler.

  Raises:
    TrainError: there are no equal layers, or what they give is used outside of them, apart from the last
      result and their states.
    SchemeError: no such axis.
  """

  def __init__(
    self,
    program: Stacks,
    signature: Signature,
    how: Treatment,
    axis: str,
    mesh: AnyMesh | None,
    specs: Mapping[int, PartitionSpec],
  ):
    super().__init__(program, signature, how)
    stages = size_along(mesh, axis)
    self.schedule = Schedule(stages, stages, self.stack.length)
    self.axis, self.mesh, self.specs = axis, mesh, specs
    changing, states = {*self.changed.values()}, {*signature.states.values()}
    others = range(signature.model, len(self.inputs))
    self.calls = [i for i in others if i not in states]
    """The inputs that differ in each call."""
    self.constant = [i for i in others if i in states - changing]
    """The states that do not change."""
    self.sort([self.inputs[i] for i in (*self.calls, *self.alone.values())])
    wrong = [var for some in self.stack.made.values() for var in each_of(some) if var in self.read]
    if wrong:
      raise TrainError(
        "what a layer gives besides its result is used outside of the layers.",
        details=", ".join(str(var.aval) for var in wrong[:4]),
        fix="leave it out of what the call returns; or call without pipeline=.",
      )
    self.first = {key: self.inputs.index(each_of(self.stack.rows[key])[0]) for key in self.of_layers}
    """State of the layers -> the position of the input that the first layer changes."""
    self.travels = [key for key, var in self.same.items() if var in self.varies]
    """What all layers read, and what differs between groups: it goes round with them."""

  def __str__(self) -> str:
    stack, stages, chunk = self.stack, self.schedule.stages, self.schedule.chunk
    moved = any(isinstance(some, list) for key, some in stack.rows.items() if key not in self.of_layers)
    sizes = {key: sum(nbytes(var.aval) for var in each_of(some)) for key, some in stack.rows.items()}
    caches = sum(sizes[key] for key in self.of_layers)
    weights = (sum(sizes.values()) - caches) // stages
    return (
      f"{stack.name}: {stages} stages of {chunk} layers over {self.axis}, {stages} groups of rows go round;"
      f" no stage waits but in the first {stages - 1} ticks; on each stage {format_bytes(caches)} of caches"
      f" and {format_bytes(weights)} of weights" + (", moved there in each call" if moved else "")
    )

  def prepare(self, model: Sequence[jax.Array], states: Mapping[int, jax.Array]) -> Prepared:
    """What all ticks share, given the arrays of the model and the state that each group starts with."""
    values = values_of(self.program.jaxpr, model)
    values.update({self.inputs[i]: states[i] for i in self.constant})
    self.evaluate(self.fixed, values)
    piped, rows = self._piped(values), [key for key in self.stack.rows if key not in self.of_layers]
    return Prepared(values, {key: self.split_row(piped, key, values) for key in rows})

  def begin(
    self, prepared: Prepared, states: Mapping[int, jax.Array], inputs: Sequence[jax.Array]
  ) -> PipelineState:
    """What goes round before the first tick, given the state that each group starts with, and any inputs."""
    piped, groups = self._piped(prepared.values), self.schedule.stages
    first = {self.inputs[i]: x for i, x in states.items()}

    def of_groups(key: Key) -> PyTree:
      x = jnp.squeeze(self.split_row(piped, key, first), 0)
      return jnp.broadcast_to(x[:, None], (x.shape[0], groups, *x.shape[1:]))

    layers = {i: self._laid(key, of_groups(key)) for key, i in self.first.items()}
    alone = {i: jnp.broadcast_to(states[i], (groups, *jnp.shape(states[i]))) for i in self.alone.values()}
    # Any values: the stages that still wait compute on them.
    entering = self._enter(prepared, {i: x[0] for i, x in alone.items()}, inputs)
    return PipelineState(piped.for_each_stage(entering), layers, alone)

  def tick(
    self,
    prepared: Prepared,
    going: PipelineState,
    tick: AnyArray,
    entering: Sequence[jax.Array],
    leaving: Sequence[jax.Array],
    passes: AnyArray = None,
  ) -> tuple[list[jax.Array], PipelineState]:
    """Group `tick % stages` enters; group `(tick + 1) % stages` leaves, in the first ticks with no meaning.

    Args:
      prepared: of `prepare`.
      going: of `begin`, or of the tick before.
      tick: its number.
      entering: the inputs of the call of the group that enters.
      leaving: those with which the group that leaves had entered.
      passes: how many calls there are of each group; None: without an end.

    Returns:
      The results of the group that leaves, and what goes on.
    """
    stages = self.schedule.stages
    enters, leaves = tick % stages, (tick + 1) % stages
    entered = self._enter(prepared, {i: x[enters] for i, x in going.alone.items()}, entering)
    piped = self._piped(prepared.values)
    old = {key: going.layers[i] for key, i in self.first.items()}
    ring, new, (final, _) = piped.turn(entered, going.ring, prepared.rows, old, tick, passes)
    layers = {i: self._laid(key, new[key]) for key, i in self.first.items()}
    values = self._before(prepared, {i: x[leaves] for i, x in going.alone.items()}, leaving)
    values.update({var: final[n] for var, n in self.stack.final.items()})
    self.evaluate(self.after, values)
    item = tick + 1 - stages
    works = item >= 0 if passes is None else (item >= 0) & (item < passes * stages)
    alone = dict(going.alone)
    for o, i in self.alone.items():
      after = jnp.where(works, read(self.outputs[o], values), alone[i][leaves])
      alone[i] = alone[i].at[leaves].set(after)
    results = [read(self.outputs[o], values) for o in sorted(self.signature.outputs)]
    return results, PipelineState(ring, layers, alone)

  def _before(
    self, prepared: Prepared, alone: Mapping[int, jax.Array], inputs: Sequence[jax.Array]
  ) -> Values:
    """What is known of a group before the layers."""
    values = dict(prepared.values)
    values.update({self.inputs[i]: x for i, x in (*zip(self.calls, inputs, strict=True), *alone.items())})
    self.evaluate(self.before, values)
    return values

  def _enter(self, prepared: Prepared, alone: Mapping[int, jax.Array], inputs: Sequence[jax.Array]) -> PyTree:
    """What the first layer gets, and what all layers get of this group."""
    values = self._before(prepared, alone, inputs)
    carried = [jnp.asarray(read(var, values), var.aval.dtype) for var in self.stack.carried]
    return carried, {key: values[self.stack.same[key]] for key in self.travels}

  def _piped(self, values: Values) -> PipelineLoop:
    known = {key: read(var, values) for key, var in self.stack.same.items() if key not in self.travels}
    return PipelineLoop(self.schedule, self.axis, self.mesh, self.layer(known))

  def _laid(self, key: Key, x: jax.Array) -> jax.Array:
    """States of layers, `[stages, groups, layers of a stage, ...]`, on their stages."""
    spec = self.specs.get(self.first[key])
    if spec is None or self.mesh is None:
      return staged(x, self.mesh, self.axis)
    spec = spec if isinstance(self.stack.rows[key], list) else spec[1:]
    own = [entry_of(without(axes_of(entry), frozenset((self.axis,)))) for entry in spec]
    return pinned(x, NamedSharding(self.mesh, PartitionSpec(self.axis, None, None, *own)))
