"""Calls of a model that repeat without end, with its layers on the stages of a mesh axis: no stage waits.

A generated token must pass all layers before the next token begins. So the pipeline circulates as many groups
of rows as it has stages: while one group is on the last stage, the next group is on the stage before it
(`PipelineLoop.turn`). In each tick one group enters, through the operations before the layers, and another
leaves, through the operations after them. Weights are moved to their stages once; each stage holds the caches
of its layers, for all groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.core.axes import axes_of, entry_of, without
from nnx_parallel.core.interpret import Values, read, values_of
from nnx_parallel.core.jaxprs import nbytes
from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.shards import pinned
from nnx_parallel.core.text import few, format_bytes
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.errors import DecodeError, TrainError
from nnx_parallel.layers.layers import LayerOptions, LayersUsed, program_of
from nnx_parallel.layers.pipeline import PipelineLoop, Schedule, size_along, staged
from nnx_parallel.layers.stacks import Key, Stacks
from nnx_parallel.layers.stages import AroundLayers, Signature


class PipelineState(NamedTuple):
  """The circulating state of a pipeline.

  Attributes:
    ring: the inputs of each stage from the stage before, `[stages, ...]`.
    layers: the arrays that the layers change, `[stages, groups, layers of a stage, ...]`; by the position of
      the input that the first layer changes.
    alone: the arrays that change outside of the layers, `[groups, ...]`, by the position of the input.
  """

  ring: PyTree
  layers: dict[int, jax.Array]
  alone: dict[int, jax.Array]


class DecodePipeline(AroundLayers):
  """A traced call of one group of rows, whose layers are a circulating pipeline.

  Args:
    program: as for `AroundLayers`.
    signature: as for `AroundLayers`; the inputs after the model's arrays differ in each call, and each group
      has its own states.
    axis: the mesh axis of the stages.
    mesh: the mesh, or None.
    model: the arrays of the model.
    states: input -> the initial state of each group.
    specs: input -> the spec of a state; the compiler chooses the spec of a missing state.

  Raises:
    TrainError: there are no equal layers, or results of theirs other than the last result and their states
      are used outside of them.
    SchemeError: no such axis.
  """

  def __init__(
    self,
    program: Stacks,
    signature: Signature,
    axis: str,
    mesh: AnyMesh | None,
    model: Sequence[jax.Array],
    states: Mapping[int, jax.Array],
    specs: Mapping[int, PartitionSpec],
  ):
    super().__init__(program, signature)
    stages = size_along(mesh, axis)
    self.schedule = Schedule(stages, stages, self.stack.length)
    self.axis, self.mesh, self.states, self.specs = axis, mesh, states, specs
    self.calls = [i for i in range(signature.model, len(self.inputs)) if i not in states]
    """The inputs that differ in each call."""
    self.sort([self.inputs[i] for i in (*self.calls, *self.alone.values())])
    wrong = [var for some in self.stack.made.values() for var in some if var in self.read]
    if wrong:
      raise TrainError(
        "a second result of a layer is used outside of the layers.",
        details=", ".join(str(var.aval) for var in wrong[:4]),
        fix="leave it out of the results of the call; or call without pipeline=.",
      )
    self.first = {key: self.inputs.index(self.stack.rows[key][0]) for key in self.of_layers}
    """State of the layers -> the position of the input that the first layer changes."""
    self.travels = [key for key, var in self.same.items() if var in self.varies]
    """The values that all layers read and that differ between groups: they travel with the group."""
    # What all ticks share: arrays by variable, and the weights of the layers on their stages.
    self.values = values_of(program.jaxpr, model)
    self.values.update({self.inputs[i]: x for i, x in states.items() if i not in self.changed.values()})
    self.evaluate(self.fixed, self.values)
    known = {key: read(var, self.values) for key, var in self.stack.same.items() if key not in self.travels}
    self.loop = PipelineLoop(self.schedule, axis, mesh, self.layer(known))
    weights = [key for key in self.stack.rows if key not in self.of_layers]
    self.rows = {key: self.split_row(self.loop, key, self.values) for key in weights}

  def __str__(self) -> str:
    stack, stages, chunk = self.stack, self.schedule.stages, self.schedule.chunk
    moved = stack.scanned < stack.length and stack.rows.keys() > self.of_layers.keys()
    sizes = {key: sum(nbytes(var.aval) for var in some) for key, some in stack.rows.items()}
    caches = sum(sizes[key] for key in self.of_layers)
    weights = (sum(sizes.values()) - caches) // stages
    return (
      f"{stack.name}: {stages} stages of {chunk} layers over {self.axis}, {stages} groups of rows go round;"
      f" no stage waits but in the first {stages - 1} ticks; on each stage {format_bytes(caches)} of caches"
      f" and {format_bytes(weights)} of weights" + (", moved there in each call" if moved else "")
    )

  def begin(self, inputs: Sequence[jax.Array]) -> PipelineState:
    """The state before the first tick, given inputs of any value."""
    states, groups = self.states, self.schedule.stages
    first = {self.inputs[i]: x for i, x in states.items()}

    def of_groups(key: Key) -> PyTree:
      x = jnp.squeeze(self.split_row(self.loop, key, first), 0)
      return jnp.broadcast_to(x[:, None], (x.shape[0], groups, *x.shape[1:]))

    layers = {i: self._laid(key, of_groups(key)) for key, i in self.first.items()}
    alone = {i: jnp.broadcast_to(states[i], (groups, *jnp.shape(states[i]))) for i in self.alone.values()}
    # Any values: the stages that still wait compute on them.
    entering = self._enter({i: x[0] for i, x in alone.items()}, inputs)
    return PipelineState(self.loop.for_each_stage(entering), layers, alone)

  def tick(
    self,
    going: PipelineState,
    tick: AnyArray,
    entering: Sequence[jax.Array],
    leaving: Sequence[jax.Array],
    passes: AnyArray = None,
  ) -> tuple[list[jax.Array], PipelineState]:
    """Group `tick % stages` enters; group `(tick + 1) % stages` leaves, without meaning in the first ticks.

    Args:
      going: the result of `begin`, or of the previous tick.
      tick: the tick's number.
      entering: the call inputs of the group that enters.
      leaving: the call inputs of the group that leaves, from when it entered.
      passes: the number of calls of each group; None: without an end.

    Returns:
      The results of the group that leaves, and the state of the next tick.
    """
    stages = self.schedule.stages
    enters, leaves = tick % stages, (tick + 1) % stages
    entered = self._enter({i: x[enters] for i, x in going.alone.items()}, entering)
    old = {key: going.layers[i] for key, i in self.first.items()}
    ring, new, (final, _) = self.loop.turn(entered, going.ring, self.rows, old, tick, passes)
    layers = {i: self._laid(key, new[key]) for key, i in self.first.items()}
    values = self._before({i: x[leaves] for i, x in going.alone.items()}, leaving)
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

  def _before(self, alone: Mapping[int, jax.Array], inputs: Sequence[jax.Array]) -> Values:
    """The values of a group before the layers."""
    values = dict(self.values)
    values.update({self.inputs[i]: x for i, x in (*zip(self.calls, inputs, strict=True), *alone.items())})
    self.evaluate(self.before, values)
    return values

  def _enter(self, alone: Mapping[int, jax.Array], inputs: Sequence[jax.Array]) -> PyTree:
    """The inputs of the first layer, and the inputs that all layers read of this group."""
    values = self._before(alone, inputs)
    carried = [jnp.asarray(read(var, values), var.aval.dtype) for var in self.stack.carried]
    return carried, {key: values[self.stack.same[key]] for key in self.travels}

  def _laid(self, key: Key, x: jax.Array) -> jax.Array:
    """States of layers, `[stages, groups, layers of a stage, ...]`, on their stages."""
    spec = self.specs.get(self.first[key])
    if spec is None or self.mesh is None:
      return staged(x, self.mesh, self.axis)
    spec = spec[1:] if self.stack.scanned else spec
    own = [entry_of(without(axes_of(entry), frozenset((self.axis,)))) for entry in spec]
    return pinned(x, NamedSharding(self.mesh, PartitionSpec(self.axis, None, None, *own)))


@dataclasses.dataclass(eq=False)
class Turns:
  """Calls of a model, for as many groups of rows as stages; traced once for each number of tokens.

  Attributes:
    call: `(arrays, (tokens, position), state) -> (logits, arrays, state)`, for one group of rows.
    options: the options of the layers, including a pipeline.
    arrays: the arrays of the model.
    state: the state of one group before its first token.
    inputs: makes any tokens and position, for a number of tokens.
    labels: the names of the leaves of the arrays.
    specs: the specs of the leaves of the state; None: the compiler chooses.
    mesh: the mesh, or None.
    used: receives how the layers were computed.
  """

  call: Callable[..., PyTree]
  options: LayerOptions
  arrays: Sequence[jax.Array]
  state: PyTree
  inputs: Callable[[int], PyTree]
  labels: Sequence[str]
  specs: Sequence[PartitionSpec | None]
  mesh: AnyMesh | None
  used: LayersUsed

  def __post_init__(self) -> None:
    self._states = dict(enumerate(jax.tree.leaves(self.state), len(self.labels) + 2))
    """By the position of the input of the call."""
    self._traced: dict[int, DecodePipeline] = {}

  def begin(self, tokens: int, going: PipelineState | None) -> PipelineState:
    """The state before calls with this many tokens: with empty caches, or the caches of earlier calls."""
    begun = self._of(tokens).begin(self.inputs(tokens))
    return begun if going is None else PipelineState(begun.ring, going.layers, going.alone)

  def __call__(
    self, going: PyTree, tick: PyTree, entering: PyTree, leaving: PyTree, passes: PyTree = None
  ) -> PyTree:
    """One tick, for the tokens and position of two groups: the logits of the second, and the next state."""
    (logits,), going = self._of(entering[0].shape[1]).tick(going, tick, entering, leaving, passes)
    return logits, going

  def _of(self, tokens: int) -> DecodePipeline:
    if tokens not in self._traced:
      assert self.options.pipeline is not None
      args = [*self.arrays], self.inputs(tokens), self.state
      program, signature, _ = program_of(self.call, args, self.options, self._ends, self.used)
      axis = self.options.pipeline.axis
      known = {n: spec for n, spec in zip(self._states, self.specs, strict=True) if spec is not None}
      given = jax.tree.leaves(self.arrays), self._states, known
      stream = DecodePipeline(program, signature, axis, self.mesh, *given)
      self.used.done = (str(stream),)
      changed = [self.labels[i] for i in stream.changed.values() if i < len(self.labels)]
      if changed:
        raise lost(changed)
      self._traced[tokens] = stream
    return self._traced[tokens]

  def _ends(self, places: PyTree) -> tuple[Mapping[int, int], Collection[int]]:
    logits, arrays, state = places
    inputs = [*range(len(self.labels)), *self._states]
    return dict(zip((*jax.tree.leaves(arrays), *jax.tree.leaves(state)), inputs, strict=True)), {logits}


def lost(labels: Sequence[str]) -> DecodeError:
  """The error of a call that changes values that are not stored."""
  return DecodeError(
    f"the call changed {few([*labels])}, which no nnx.Cache holds: the next token would not see it.",
    fix="make it an nnx.Cache, or call model.eval() where it belongs to training.",
  )
