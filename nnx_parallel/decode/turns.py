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
from nnx_parallel.layers.stream import DecodePipeline, PipelineState


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
      how, axis = treatment_of(self.options), self.options.pipeline.axis
      known = {n: spec for n, spec in zip(self._states, self.specs, strict=True) if spec is not None}
      given = jax.tree.leaves(self.arrays), self._states, known
      stream = DecodePipeline(program, signature, how, axis, self.mesh, *given)
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
