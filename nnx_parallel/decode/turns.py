"""Calls of a model whose layers are on the stages of a mesh axis; see `layers/stream.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.text import few
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import DecodeError
from nnx_parallel.layers.layers import LayerOptions, LayersUsed, program_of, treatment_of
from nnx_parallel.layers.stream import DecodePipeline, PipelineState, Prepared


@dataclasses.dataclass(eq=False)
class Turns:
  """Calls of a model, for as many groups of rows as stages; traced once for each number of tokens.

  Attributes:
    call: `(arrays, (tokens, position), state) -> (logits, arrays, state)`, for one group of rows.
    options: the options of the layers, including a pipeline.
    axis: the mesh axis of the stages.
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
  axis: str
  arrays: Sequence[jax.Array]
  state: PyTree
  inputs: Callable[[int], PyTree]
  labels: Sequence[str]
  specs: Sequence[PartitionSpec | None]
  mesh: AnyMesh | None
  used: LayersUsed
  _traced: dict[int, tuple[DecodePipeline, Prepared]] = dataclasses.field(
    default_factory=dict[int, "tuple[DecodePipeline, Prepared]"], init=False
  )

  def begin(self, tokens: int, going: PipelineState | None) -> PipelineState:
    """The state before calls with this many tokens: with empty caches, or the caches of earlier calls."""
    stream, prepared = self._of(tokens)
    begun = stream.begin(prepared, self._states(), self.inputs(tokens))
    return begun if going is None else PipelineState(begun.ring, going.layers, going.alone)

  def __call__(
    self, going: PyTree, tick: PyTree, entering: PyTree, leaving: PyTree, passes: PyTree = None
  ) -> PyTree:
    """One tick, for the tokens and position of two groups: the logits of the second, and the next state."""
    stream, prepared = self._of(entering[0].shape[1])
    (logits,), going = stream.tick(prepared, going, tick, entering, leaving, passes)
    return logits, going

  def _states(self) -> dict[int, PyTree]:
    """By the position of the input of the call."""
    return dict(enumerate(jax.tree.leaves(self.state), len(self.labels) + 2))

  def _of(self, tokens: int) -> tuple[DecodePipeline, Prepared]:
    if tokens not in self._traced:
      args = [*self.arrays], self.inputs(tokens), self.state
      program, signature, _ = program_of(self.call, args, self.options, self._ends, self.used)
      known = {n: spec for n, spec in zip(self._states(), self.specs, strict=True) if spec is not None}
      how = treatment_of(self.options)
      stream = DecodePipeline(program, signature, how, self.axis, self.mesh, known)
      self.used.done = (str(stream),)
      changed = [self.labels[i] for i in stream.changed.values() if i < len(self.labels)]
      if changed:
        raise lost(changed)
      self._traced[tokens] = stream, stream.prepare(jax.tree.leaves(self.arrays), self._states())
    return self._traced[tokens]

  def _ends(self, places: PyTree) -> tuple[Mapping[int, int], Collection[int]]:
    logits, arrays, state = places
    inputs = [*range(len(self.labels)), *self._states()]
    return dict(zip((*jax.tree.leaves(arrays), *jax.tree.leaves(state)), inputs, strict=True)), {logits}


def lost(labels: Sequence[str]) -> DecodeError:
  """The error of a call that changes values that are not stored."""
  return DecodeError(
    f"the call changed {few([*labels])}, which no nnx.Cache holds: the next token would not see it.",
    fix="make it an nnx.Cache, or call model.eval() where it belongs to training.",
  )
