"""1F1B with split backward passes: gradients of weights are computed apart from gradients of inputs.

All stages run one program, tick by tick, so a tick takes the same time on a stage that has nothing to do. In
1F1B, a tick backward computes a chunk again, then the gradients of its input and of its weights. Here, a tick
backward leaves the gradients of the weights out, and saves what they read (the *operands*: for a product, its
input and the gradient of its result). When a group of microbatches has left backward, each stage computes the
gradients of its weights for all microbatches of the group. No stage depends on another one then, so no stage
waits. If a forward pass, its recomputation, the gradients of inputs and the gradients of weights take equal
times, the bubble is `3 (stages - 1)` of these times; in 1F1B it is `4 (stages - 1)`. In return, each stage
saves the operands of two groups.

Without recomputation, a tick forward saves the residuals that a tick backward reads. No tick computes a chunk
again, and each stage saves the residuals of three groups.

The idea is that of zero-bubble pipelines, arXiv:2401.10241. Their stages run programs of their own and fill
the whole bubble with gradients of weights; stages of one program cannot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.core.interpret import Values, flattened, read, run_operations
from nnx_parallel.core.jaxprs import (
  constants,
  dependents,
  inner_equations,
  is_call_or_checkpoint,
  is_checkpoint,
  opened,
  operations_behind,
)
from nnx_parallel.core.types import AnyArray, JaxprEqn, PyTree, Var
from nnx_parallel.layers.pipeline import at
from nnx_parallel.layers.pipeline_1f1b import (
  Gradients,
  LayerInputs,
  Pipeline1F1B,
  Under,
  Weights,
  added,
  floats_of,
  put_where,
  with_floats,
  zeros_of,
)
from nnx_parallel.layers.stacks import variables

GROUPS = 2
"""The most groups whose operands are saved: one that has left backward, and the next one."""


class SplitPipeline1F1B(Pipeline1F1B):
  """A traced loss as a 1F1B pipeline, with the gradients of its weights apart from those of its inputs."""

  @property
  def gradients(self) -> type[Gradients]:
    """The class that runs the schedule."""
    return _SplitGradients

  @property
  def keeps(self) -> str:
    """What each stage saves for the backward pass."""
    chunks = self.options.saved_inputs(self.schedule)
    kept = super().keeps if self.options.recompute else f"the activations of {chunks} chunks"
    inside = (eqn for n in self.stack.numbers for eqn in inner_equations(self.eqns[n]))
    note = "; jax.checkpoint inside of the layers has no effect" * any(map(is_checkpoint, inside))
    return f"{kept}, and the operands of the gradients of weights{note}"


class _SplitGradients(Gradients):
  """One call of a pipeline with gradients.

  Attributes:
    cut: the backward pass of a layer; set before the first tick.
  """

  cut: Cut

  @property
  def _kept(self) -> int:
    """The number of groups whose operands are saved."""
    return min(GROUPS, self.of.schedule.groups)

  def _start(self, weights: Weights, idle: PyTree, bridge: PyTree) -> Under:
    under = super()._start(weights, idle, bridge)
    first = self._inputs(weights, jnp.zeros(self.of.schedule.stages, jnp.int32))
    saved, of_made = self.loop.by_stage(at)((under.saved, under.made_gradients), first.repeat)

    def shapes(slopes: PyTree, saved: tuple[PyTree, PyTree], inputs: LayerInputs) -> PyTree:
      self.cut = self._cut(slopes, saved, inputs)
      *_, residuals = self._chunk_forward(*saved, inputs)
      return residuals, self._chunk_back_split(slopes, residuals, inputs)[1]

    found = jax.eval_shape(self.loop.by_stage(shapes), (floats_of(idle), of_made), saved, first)
    residuals, operands = jax.tree.map(zeros_of, found)
    operands = jax.tree.map(lambda x: self._in_slots(x, self._kept), operands)
    if self.of.options.recompute:
      return under._replace(operands=operands)
    # A bubble computes on zeros, which may give NaN: nothing that a bubble computes is read.
    residuals = jax.tree.map(lambda x: self._in_slots(x, self.groups), residuals)
    return under._replace(operands=operands, saved=residuals)

  def _chunks_forward(
    self, weights: Weights, given: PyTree, state: PyTree, repeat: AnyArray
  ) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    if self.of.options.recompute:
      return super()._chunks_forward(weights, given, state, repeat)
    return self.loop.by_stage(self._chunk_forward)(given, state, self._inputs(weights, repeat))

  def _chunks_back(
    self,
    under: Under,
    slopes: PyTree,
    saved: PyTree,
    inputs: LayerInputs,
    works: AnyArray,
    microbatch: AnyArray,
  ) -> tuple[PyTree, tuple[Weights, PyTree]]:
    """The gradients of the inputs of the stages' chunks, and the operands of the gradients of weights."""
    by_stage = self.loop.by_stage
    if self.of.options.recompute:
      *_, saved = by_stage(self._chunk_forward)(*saved, inputs)
    result, operands = by_stage(self._chunk_back_split)(slopes, saved, inputs)
    slot = self._slot(microbatch, inputs.repeat, self._kept)
    return result, (under.gradients, by_stage(put_where)(under.operands, slot, works, operands))

  def _add_left(self, under: Under, weights: Weights, group: AnyArray) -> Weights:
    """As in 1F1B, with the gradients of the weights of the layers."""
    plan = self.of.schedule

    def one(sums: Weights, n: AnyArray) -> tuple[Weights, None]:
      repeat, place = (jnp.broadcast_to(x, (plan.stages,)) for x in (n // plan.stages, n % plan.stages))
      slot = self._slot(group * plan.stages + place, repeat, self._kept)
      operands = self.loop.by_stage(at)(under.operands, slot)
      inputs = self._inputs(weights, repeat)
      return self.loop.by_stage(self._chunk_weights)(sums, operands, inputs), None

    def add() -> Weights:
      sums = added(under.gradients, self._of_entry(under, weights, group))
      return jax.lax.scan(one, sums, jnp.arange(plan.stages * plan.virtual_stages))[0]

    return jax.lax.cond(group >= 0, add, lambda: under.gradients)

  # The programs of one stage: no array has a dim of stages.

  def _own_and_shared(self, inputs: LayerInputs) -> tuple[PyTree, PyTree]:
    """What the layers of a chunk read: arrays of their own, `[chunk, ...]`, and arrays that they share.

    A shared array may be several inputs of a layer, so its key is its position among the outer weights.
    """
    weights, repeat = inputs.weights, inputs.repeat
    own = at((weights.rows, inputs.rest, inputs.active), repeat)
    return own, {n: weights.outer[n] for n in self.shared.values()}

  def _cut(self, slopes: PyTree, saved: tuple[PyTree, PyTree], inputs: LayerInputs) -> Cut:
    """The backward pass of a layer, for the arguments of `_chunk_back`."""
    (carry, state), (own, shared), (given, of_made) = saved, self._own_and_shared(inputs), slopes
    state, own, of_made = jax.tree.map(lambda x: x[0], (state, own, of_made))

    def layer(carry: PyTree, state: PyTree, own: PyTree, shared: PyTree, slopes: PyTree) -> PyTree:
      row, rest, active = own

      def forward(floats: list[jax.Array], row: PyTree, shared: PyTree) -> PyTree:
        inputs = {key: shared[n] for key, n in self.shared.items()}
        given = with_floats(carry, floats), state, {**row, **rest}, active, inputs, {}
        result, changed, made = self.loop.one_layer(*given)
        return (floats_of(result), floats_of(made)), (result, changed, made)

      _, pull, results = jax.vjp(forward, floats_of(carry), row, shared, has_aux=True)
      of_input, *of_weights = pull(slopes)
      return results, of_input, of_weights

    return Cut.of(layer, (carry, state), (own, shared), (given, of_made))

  def _chunk_forward(
    self, carry: PyTree, state: PyTree, inputs: LayerInputs
  ) -> tuple[PyTree, PyTree, PyTree, list[jax.Array]]:
    """As `PipelineLoop.chunk`, with the residuals, `[chunk, ...]`."""
    own, shared = self._own_and_shared(inputs)

    def layer(carry: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
      state, own = given
      (carry, changed, made), residuals = self.cut.forward((carry, state), (own, shared))
      return carry, (changed, made, residuals)

    carry, others = jax.lax.scan(layer, carry, (state, own))
    return carry, *others

  def _chunk_back_split(
    self, slopes: PyTree, residuals: list[jax.Array], inputs: LayerInputs
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """The gradients of the input of a chunk, and the operands, `[chunk, ...]`."""
    (given, of_made), (own, shared) = slopes, self._own_and_shared(inputs)

    def layer(given: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
      residuals, own, of_made = xs
      return self.cut.backward(residuals, (own, shared), (given, of_made))

    return jax.lax.scan(layer, given, (residuals, own, of_made), reverse=True)

  def _chunk_weights(self, sums: Weights, operands: list[jax.Array], inputs: LayerInputs) -> Weights:
    """The sums with the gradients of the weights of a chunk."""
    own, shared = self._own_and_shared(inputs)

    def layer(of_shared: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
      operands, own, row = xs
      found = self.cut.weights(operands, (own, shared))
      row, of_shared = jax.tree.map(lambda a, b: a + b.astype(a.dtype), (row, of_shared), tuple(found))
      return of_shared, row

    of_shared = {n: sums.outer[n] for n in self.shared.values()}
    of_shared, rows = jax.lax.scan(layer, of_shared, (operands, own, at(sums.rows, inputs.repeat)))
    outer = [of_shared.get(n, x) for n, x in enumerate(sums.outer)]
    return Weights(put_where(sums.rows, inputs.repeat, True, rows), outer)


@dataclasses.dataclass(frozen=True)
class Cut:
  """The backward pass of a function in three programs.

  The function takes `varied` values, which differ by call; `weights`; and `slopes`, the gradients of its
  results. It returns its results, the gradients of the varied values, and the gradients of the weights.

  Attributes:
    constants: the values of constants.
    inputs: the variables of `varied`, `weights` and `slopes`.
    results: the variables of the results, of the gradients of the varied values, and of the weights.
    trees: the structures of these results.
    early: the operations that do not read slopes.
    again: those of them that read weights alone: each program computes them again.
    back: the operations that the gradients of the varied values need.
    apart: the remaining operations, for the gradients of the weights.
    residuals: the values that `forward` passes to `backward`.
    operands: the values that `backward` passes to `weights`.
  """

  constants: Values
  inputs: tuple[Sequence[Var], Sequence[Var], Sequence[Var]]
  results: tuple[Sequence[Var], Sequence[Var], Sequence[Var]]
  trees: tuple[Any, Any, Any]
  early: list[JaxprEqn]
  again: list[JaxprEqn]
  back: list[JaxprEqn]
  apart: list[JaxprEqn]
  residuals: list[Var]
  operands: list[Var]

  @classmethod
  def of(cls, function: Callable[..., PyTree], varied: PyTree, weights: PyTree, slopes: PyTree) -> Cut:
    """Cuts a function `(*varied, *weights, slopes) -> (results, of_varied, of_weights)`."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*varied, *weights, slopes)
    # Without calls and recomputation: one operation would compute both kinds of gradients.
    closed = flattened(closed, is_call_or_checkpoint)
    body = opened(closed)
    inputs = _in_parts(body.invars, (varied, weights, slopes))
    results = _in_parts(body.outvars, shapes)
    late = dependents(body, inputs[2])
    needed = operations_behind(body.eqns, body.outvars)
    early = [eqn for eqn in needed if late.isdisjoint(eqn.outvars)]
    by_call = dependents(early, inputs[0])
    again = [eqn for eqn in early if by_call.isdisjoint(eqn.outvars)]
    back = [eqn for eqn in operations_behind(body.eqns, results[1]) if not late.isdisjoint(eqn.outvars)]
    passed = by_call | {*inputs[2]} | {var for eqn in back for var in eqn.outvars}
    apart = [
      eqn
      for eqn in operations_behind(body.eqns, results[2])
      if not late.isdisjoint(eqn.outvars) and passed.isdisjoint(eqn.outvars)
    ]
    operands = [var for var in _reads(apart, results[2]) if var in passed]
    residuals = [var for var in dict.fromkeys((*_reads(back, results[1]), *operands)) if var in by_call]
    known = dict(zip(body.constvars, constants(closed), strict=True))
    trees = tuple(map(jax.tree.structure, shapes))
    return cls(known, inputs, results, trees, early, again, back, apart, residuals, operands)

  def forward(self, varied: PyTree, weights: PyTree) -> tuple[PyTree, list[jax.Array]]:
    """The results, and the residuals."""
    values = self._run(self.early, (*self.inputs[0], *self.inputs[1]), (varied, weights))
    return self._result(0, values), [values[var] for var in self.residuals]

  def backward(
    self, residuals: list[jax.Array], weights: PyTree, slopes: PyTree
  ) -> tuple[PyTree, list[jax.Array]]:
    """The gradients of the varied values, and the operands."""
    names = (*self.residuals, *self.inputs[1], *self.inputs[2])
    values = self._run([*self.again, *self.back], names, (residuals, weights, slopes))
    return self._result(1, values), [values[var] for var in self.operands]

  def weights(self, operands: list[jax.Array], weights: PyTree) -> PyTree:
    """The gradients of the weights."""
    names = (*self.operands, *self.inputs[1])
    return self._result(2, self._run([*self.again, *self.apart], names, (operands, weights)))

  def _run(self, eqns: list[JaxprEqn], names: Sequence[Var], given: PyTree) -> Values:
    values = self.constants | dict(zip(names, jax.tree.leaves(given), strict=True))
    run_operations(eqns, values)
    return values

  def _result(self, part: int, values: Values) -> PyTree:
    return jax.tree.unflatten(self.trees[part], [read(var, values) for var in self.results[part]])


def _in_parts(names: Sequence[Var], trees: Sequence[PyTree]) -> Any:
  """Variables, divided like the leaves of some pytrees."""
  rest = iter(names)
  return tuple([next(rest) for _ in jax.tree.leaves(tree)] for tree in trees)


def _reads(eqns: list[JaxprEqn], results: Sequence[Var]) -> list[Var]:
  """The variables that some operations read, and those of some results, in order."""
  return [*dict.fromkeys(variables((*(var for eqn in eqns for var in eqn.invars), *results)))]
