"""1F1B without recomputation: a tick forward saves what the tick backward reads; no layer is computed again.

A tick backward of `pipeline_1f1b` computes a chunk again from its saved inputs. Here, the trace of a layer
and of its backward pass is cut in two: the operations that do not read gradients run in the tick forward, and
the others in the tick backward. Values of weights alone are not saved: both ticks compute them. Where a
forward pass, the gradients of inputs and those of weights take equal times, a chunk takes 3 of these times,
not 4; in return, each stage saves the activations of three groups of microbatches. An example: of a layer
`y = tanh(x @ w)` and its gradients `h = g * (1 - y**2)`, `h @ w.T`, `x.T @ h`, the tick forward computes y
and `1 - y**2`, and saves x and `1 - y**2`; the three operations that read g run in the tick backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.core.interpret import Values, inline_calls, read, run_operations
from nnx_parallel.core.jaxprs import (
  constants,
  dependents,
  inner_equations,
  is_call_or_checkpoint,
  is_checkpoint,
  open_jaxpr,
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
  floats_of,
  with_floats,
  zeros_of,
)
from nnx_parallel.layers.stacks import variables


class _SavingGradients(Gradients):
  """One call of a pipeline with gradients; `cut` is of a layer, and set before the first tick."""

  cut: Cut

  def _start(self, weights: Weights, idle: PyTree, bridge: PyTree) -> Under:
    under = super()._start(weights, idle, bridge)
    first = self._inputs(weights, jnp.zeros(self.of.schedule.stages, jnp.int32))
    saved, of_made = self.loop.by_stage(at)((under.saved, under.made_gradients), first.repeat)

    def residuals(slopes: PyTree, saved: tuple[PyTree, PyTree], inputs: LayerInputs) -> PyTree:
      self.cut = self._cut(slopes, saved, inputs)
      *_, found = self._chunk_forward(*saved, inputs)
      return found

    found = jax.eval_shape(self.loop.by_stage(residuals), (floats_of(idle), of_made), saved, first)
    # A bubble computes on zeros, which may give NaN: nothing that a bubble computes is read.
    return under._replace(saved=[self._in_slots(zeros_of(x)) for x in found])

  def _chunks_forward(
    self, weights: Weights, given: PyTree, state: PyTree, repeat: AnyArray
  ) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    return self.loop.by_stage(self._chunk_forward)(given, state, self._inputs(weights, repeat))

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
        given = with_floats(carry, floats), state, {**row, **rest}, active, inputs
        result, changed, made = self.loop.one_layer(*given)
        return (floats_of(result), floats_of(made)), (result, changed, made)

      _, pull, results = jax.vjp(forward, floats_of(carry), row, shared, has_aux=True)
      of_input, *of_weights = pull(slopes)
      return results, (of_input, of_weights)

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

  def _chunk_back(
    self, slopes: PyTree, saved: list[jax.Array], inputs: LayerInputs
  ) -> tuple[list[jax.Array], PyTree, PyTree]:
    """The gradients of a chunk, from its residuals `[chunk, ...]`."""
    (given, of_made), (own, shared) = slopes, self._own_and_shared(inputs)

    def layer(carry: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
      (given, of_shared), (residuals, own, of_made) = carry, xs
      given, (row, more) = self.cut.backward(residuals, (own, shared), (given, of_made))
      return (given, jax.tree.map(lambda a, b: a + b.astype(a.dtype), of_shared, more)), row

    wide = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), shared)
    (given, of_shared), rows = jax.lax.scan(layer, (given, wide), (saved, own, of_made), reverse=True)
    return given, rows, [of_shared.get(n, jnp.zeros_like(x)) for n, x in enumerate(inputs.weights.outer)]


class SavingPipeline1F1B(Pipeline1F1B):
  """A traced loss as a 1F1B pipeline that computes no layer again."""

  gradients = _SavingGradients

  @property
  def keeps(self) -> str:
    """What each stage saves for the backward pass."""
    inside = (eqn for n in self.stack.numbers for eqn in inner_equations(self.eqns[n]))
    note = "; jax.checkpoint inside of the layers has no effect" * any(map(is_checkpoint, inside))
    return f"the activations of {self.options.saved_inputs(self.schedule)} chunks{note}"


@dataclasses.dataclass(frozen=True)
class Cut:
  """The backward pass of a function in two programs.

  The function takes `varied` values, which differ by call; `weights`; and `slopes`, the gradients of its
  results. It returns its results, and the gradients of the varied values and of the weights.
  """

  constants: Values  # the values of constants
  # the variables of `varied`, `weights` and `slopes`
  inputs: tuple[Sequence[Var], Sequence[Var], Sequence[Var]]
  # the variables of the results and of the gradients, and their structures
  results: tuple[Sequence[Var], Sequence[Var]]
  trees: tuple[Any, Any]
  early: list[JaxprEqn]  # the operations that do not read slopes
  again: list[JaxprEqn]  # those of them that read weights alone: both programs compute them
  back: list[JaxprEqn]  # the other operations
  residuals: list[Var]  # the values that `forward` passes to `backward`

  @classmethod
  def of(cls, function: Callable[..., PyTree], varied: PyTree, weights: PyTree, slopes: PyTree) -> Cut:
    """Cuts a function `(*varied, *weights, slopes) -> (results, gradients)`."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*varied, *weights, slopes)
    closed = inline_calls(closed, is_call_or_checkpoint)  # one operation would be of both programs
    body = open_jaxpr(closed)
    inputs = _in_parts(body.invars, (varied, weights, slopes))
    results = _in_parts(body.outvars, shapes)
    late = dependents(body, inputs[2])
    needed = operations_behind(body.eqns, body.outvars)
    early = [eqn for eqn in needed if late.isdisjoint(eqn.outvars)]
    back = [eqn for eqn in needed if not late.isdisjoint(eqn.outvars)]
    by_call = dependents(early, inputs[0])
    again = [eqn for eqn in early if by_call.isdisjoint(eqn.outvars)]
    read_late = variables((*(var for eqn in back for var in eqn.invars), *results[1]))
    residuals = [var for var in dict.fromkeys(read_late) if var in by_call]
    known = dict(zip(body.constvars, constants(closed), strict=True))
    trees: Any = tuple(map(jax.tree.structure, shapes))
    return cls(known, inputs, results, trees, early, again, back, residuals)

  def forward(self, varied: PyTree, weights: PyTree) -> tuple[PyTree, list[jax.Array]]:
    """The results, and the residuals."""
    values = self._run(self.early, (*self.inputs[0], *self.inputs[1]), (varied, weights))
    return self._result(0, values), [values[var] for var in self.residuals]

  def backward(self, residuals: list[jax.Array], weights: PyTree, slopes: PyTree) -> PyTree:
    """The gradients."""
    names = (*self.residuals, *self.inputs[1], *self.inputs[2])
    return self._result(1, self._run([*self.again, *self.back], names, (residuals, weights, slopes)))

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
