"""Calls of a model whose layers are on the stages of a mesh axis; see `layers/stream.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.text import few
from nnx_parallel.errors import DecodeError
from nnx_parallel.layers.layers import LayerOptions, LayersUsed, streamed
from nnx_parallel.layers.stream import DecodePipeline, PipelineState, Prepared


class TurnsOfModel:
  """Traced once for each number of tokens.

  Args:
    call: `(arrays, (tokens, position), state) -> (logits, arrays, state)`, for one group of rows.
    options: with a pipeline.
    arrays: those of the model.
    state: that of one group before its first token.
    inputs: makes any tokens and position, for a number of tokens.
    labels: the names of the arrays.
    specs: of the leaves of the state; None where the compiler chooses.
    mesh: the mesh, if there is one.
    used: gets what was done with the layers.
  """

  def __init__(
    self,
    call: Callable[..., Any],
    options: LayerOptions,
    arrays: Sequence[Any],
    state: Any,
    inputs: Callable[[int], Any],
    labels: Sequence[str],
    specs: Sequence[PartitionSpec | None],
    mesh: AnyMesh | None,
    used: LayersUsed,
  ):
    self._call, self._options, self._mesh, self._used = call, options, mesh, used
    self._arrays, self._state, self._inputs = arrays, state, inputs
    self._labels = [label for label, x in zip(labels, arrays, strict=True) for _ in jax.tree.leaves(x)]
    self._specs = specs
    self._traced: dict[int, tuple[DecodePipeline, Prepared]] = {}

  @property
  def stages(self) -> int:
    """How many, and how many groups of rows."""
    return self._of(1)[0].schedule.stages

  def begin(self, tokens: int, going: PipelineState | None) -> PipelineState:
    """What goes round before calls with so many tokens: with empty caches, or with those of other calls."""
    stream, ready = self._of(tokens)
    begun = stream.begin(ready, self._states(), self._inputs(tokens))
    return begun if going is None else PipelineState(begun.ring, going.layers, going.alone)

  def __call__(self, going: PipelineState, tick: Any, entering: Any, leaving: Any, passes: Any = None) -> Any:
    """One tick, for the tokens and position of two groups: the logits of the second, and what goes round."""
    stream, ready = self._of(entering[0].shape[1])
    (logits,), going = stream.tick(ready, going, tick, entering, leaving, passes)
    return logits, going

  def _states(self) -> dict[int, Any]:
    """By the position of the input of the call."""
    return dict(enumerate(jax.tree.leaves(self._state), len(self._labels) + 2))

  def _of(self, tokens: int) -> tuple[DecodePipeline, Prepared]:
    if tokens not in self._traced:
      args = [*self._arrays], self._inputs(tokens), self._state
      stream = streamed(self._call, self._options, args, self._ends, self._specs, self._mesh, self._used)
      changed = [self._labels[i] for i in stream.changed.values() if i < len(self._labels)]
      if changed:
        raise lost(changed)
      self._traced[tokens] = stream, stream.ready(jax.tree.leaves(self._arrays), self._states())
    return self._traced[tokens]

  def _ends(self, places: Any) -> tuple[Mapping[int, int], Collection[int]]:
    logits, arrays, state = places
    inputs = [*range(len(self._labels)), *self._states()]
    return dict(zip((*jax.tree.leaves(arrays), *jax.tree.leaves(state)), inputs, strict=True)), {logits}


def lost(labels: Sequence[str]) -> DecodeError:
  """The error of a call that changes what is kept nowhere."""
  return DecodeError(
    f"the call changed {few([*labels])}, which no nnx.Cache holds: the next token would not see it.",
    fix="make it an nnx.Cache, or call model.eval() where it belongs to training.",
  )
