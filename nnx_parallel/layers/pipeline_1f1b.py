"""Computes a loss in a pipeline, and its gradients while later microbatches still pass forward (1F1B).

`TrainPipeline` computes all microbatches forward and then all backward, so each stage saves an input for each
of them. Here, forward and backward alternate, group by group (a group has one microbatch for each stage):

    fill:        the first `stages - 1` ticks forward
    round `g`:   ticks forward, until group `g` has left the last stage
                 the head and the loss of group `g`, and their gradients, each microbatch on its stage
                 as many ticks backward, from the last stage to the first
                 the gradients of the embedding, for group `g - 1`, which has left the first stage backward
                 (`Gradients._add_left`)
    drain:       the last `stages - 1` ticks backward

At most three groups are under way, so a stage saves the inputs of `3 * stages * virtual_stages` chunks,
however many microbatches there are. GPipe has the same number of ticks, and so the same bubble.

The rule of `jax.custom_vjp` that is defined here computes the gradients in the forward pass: the loss is a
sum over microbatches, so the gradients wait only for a factor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx_parallel.core.interpret import Values, read, values_of
from nnx_parallel.core.jaxprs import among, dependents, is_inexact
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.layers.pipeline import GROUPS, Belt, PipelineLoop, at, put, staged, swap, where
from nnx_parallel.layers.stacks import Key, variables
from nnx_parallel.layers.stages import TrainPipeline

PIPELINE_RULE = "pipeline_1f1b"
"""The name of the function that has the rule."""


class Weights(NamedTuple):
  """Arrays that have gradients and do not depend on the batch."""

  rows: dict[Key, jax.Array]  # an input of each layer -> `[stages, virtual_stages, chunk, ...]`
  outer: list[jax.Array]  # the values of `Gradients.outer`, a copy for each stage


class LayerInputs(NamedTuple):
  """What the layers of a chunk read, besides activations and the arrays that they change."""

  weights: Weights  # the arrays with gradients
  rest: PyTree  # the rows of the layers without gradients, `[stages, virtual_stages, chunk, ...]`
  active: AnyArray  # which layers of each chunk are real, `[stages, virtual_stages, chunk]`
  repeat: AnyArray  # for each stage, which of its chunks it computes, `[stages]`


class Under(NamedTuple):
  """The carry of the loop over groups. Each array has a dim of stages first."""

  forward: Belt  # activations that are under way
  backward: Belt  # gradients of activations that are under way
  state: PyTree  # the arrays that the layers change
  # what the backward passes of the chunks under way need: their inputs, or residuals (`pipeline_saving.py`);
  # dim 1 is the slot of `Gradients._slot`
  saved: PyTree
  made: PyTree  # the results of their layers that are read outside of the layers, with the same dims
  made_gradients: PyTree  # the gradients of these results
  # values that are computed before the layers and read after them, for the group that leaves next
  bridge: PyTree
  bridge_gradients: PyTree  # the gradients of these values, for the group that left
  gradients: Weights  # sums of the gradients of the weights, in float32 or wider; each stage has its own


class Gradients:
  """One call of a pipeline with gradients, of the arrays of the model in `trained`; see `__init__`."""

  def __init__(
    self, of: TrainPipeline, model: list[jax.Array], parts: list[jax.Array], trained: Collection[int]
  ):
    self.of, self.model, self.trained, self.stack = of, model, trained, of.stack
    self.groups = min(GROUPS, of.schedule.groups)
    starts, self.ends = of.count(model)
    varying: Values = dict(zip(of.inputs[of.signature.model :], parts, strict=True)) | starts
    self.fixed = values_of(of.program.jaxpr, model)
    of.evaluate(of.fixed, self.fixed)
    moving = dependents(of.eqns, [of.inputs[n] for n in trained])
    others = (*self.stack.same.values(), *self.stack.carried, of.outputs[0])  # a loss of weights alone
    reads = (*of.reads([*of.before, *of.after]), *variables(others))
    # With gradients and read once, not by layer: the embedding, the head, what all layers share.
    self.outer = [
      var for var in dict.fromkeys(reads) if var in self.fixed and var in moving and is_inexact(var.aval)
    ]
    self.trains = [
      key
      for key, some in self.stack.rows.items()
      if key not in of.of_layers and not moving.isdisjoint(some) and is_inexact(some[0].aval)
    ]
    places = {var: n for n, var in enumerate(self.outer)}
    # What all layers of a microbatch read: it travels with the microbatch, is in `outer`, or is known.
    self.shared = {key: places[var] for key, var in of.same.items() if var in places}
    known = {
      key: read(var, self.fixed)
      for key, var in self.stack.same.items()
      if key not in of.travels and key not in self.shared
    }
    late = dependents(of.eqns, {*self.stack.final, *variables(of.made_variables)})
    self.wanted = [
      var
      for o, var in enumerate(of.outputs)
      if o not in of.kept and o not in of.changed and (among(var, of.varies) or among(var, late))
    ]
    read_late = {*of.reads(of.after), *variables(self.wanted)}
    # Computed before the layers, and read after them.
    self.bridge = [var for n in of.before for var in of.eqns[n].outvars if var in read_late]
    self.loop = PipelineLoop(of.schedule, of.options.axis, of.mesh, of.layer(known, of.made_outside))
    self.batch_variables = [*varying]
    self.batch = [self.loop.split_microbatches(x) for x in varying.values()]
    still = [key for key in self.stack.rows if key not in self.trains]
    rows = {key: swap(of.split_row(self.loop, key, self.fixed)) for key in still}
    self.state = {key: rows.pop(key) for key in of.of_layers}
    self.rows = rows
    self.active = np.swapaxes(self.loop.active, 0, 1)

  def run(self) -> tuple[list[jax.Array], dict[int, jax.Array]]:
    """The results of the pipeline, and the gradient of the loss for each trained array."""
    arrays = {n: self.model[n] for n in self.trained}
    weights, pull = jax.vjp(self._weights, arrays)
    under, results = self._all_groups(weights)
    of = self.of
    varying = dict(zip(self.wanted, results, strict=True))
    ends = self.ends | of.changed_by_layers(self.loop, swap(under.state))
    found = [of.result(o, self.loop, self.model, self.fixed, varying, ends) for o in range(len(of.outputs))]
    (gradients,) = pull(jax.tree.map(lambda g, x: g.astype(x.dtype), under.gradients, weights))
    return found, gradients

  def _weights(self, arrays: dict[int, jax.Array]) -> Weights:
    """The weights, as functions of the trained arrays. The gradients of copies are summed over the stages."""
    fixed = values_of(self.of.program.jaxpr, [arrays.get(n, x) for n, x in enumerate(self.model)])
    self.of.evaluate(self.of.fixed, fixed)
    rows = {key: swap(self.of.split_row(self.loop, key, fixed)) for key in self.trains}
    return Weights(rows, self.loop.for_each_stage([fixed[var] for var in self.outer]))

  def _all_groups(self, weights: Weights) -> tuple[Under, list[jax.Array]]:
    """Runs the schedule; returns the sums, and the wanted results, `[groups, stages, ...]`."""
    plan, loop = self.of.schedule, self.loop
    length = plan.stages * plan.virtual_stages
    fill, full = jnp.arange(plan.stages - 1), jnp.arange(length)
    idle, bridge = loop.by_stage(self._enter)(weights.outer, at(self.batch, 0))
    under = self._start(weights, idle, bridge)
    under = self._forward(under, weights, fill, idle, idle)

    def group(under: Under, g: AnyArray) -> tuple[Under, list[jax.Array]]:
      of_next = at(self.batch, jnp.minimum(g + 1, plan.groups - 1))
      entering, bridge = loop.by_stage(self._enter)(weights.outer, of_next)
      under = self._forward(under, weights, g * length + plan.stages - 1 + full, entering, idle)
      results, (outer, of_bridge, of_carry, of_made) = loop.by_stage(self._leave)(
        weights.outer, at(self.batch, g), under.bridge, loop.left(under.forward), self._made_of(under, g)
      )
      under = self._with_made_gradients(under, g, of_made)._replace(gradients=added(under.gradients, outer))
      under = self._backward(under, weights, g * length + full, of_carry)
      gradients = self._add_left(under, weights, g - 1)
      return under._replace(bridge=bridge, bridge_gradients=of_bridge, gradients=gradients), results

    under, results = jax.lax.scan(group, under, jnp.arange(plan.groups))
    nothing = jax.tree.map(jnp.zeros_like, floats_of(idle))
    under = self._backward(under, weights, plan.groups * length + fill, nothing)
    return under._replace(gradients=self._add_left(under, weights, plan.groups - 1)), results

  def _start(self, weights: Weights, idle: PyTree, bridge: PyTree) -> Under:
    """The carry before the first tick. Slots hold real values: a bubble may compute on them."""
    plan, loop = self.of.schedule, self.loop
    stages = np.arange(plan.stages)
    first = loop.by_stage(at)(self.state, 0 * stages)
    _, _, made = jax.eval_shape(self._chunks, weights, idle, first, 0 * stages)
    made = jax.tree.map(lambda x: self._in_slots(zeros_of(x)), made)
    zeros = jax.tree.map(jnp.zeros_like, (floats_of(idle), floats_of(made), floats_of(bridge)))
    none = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), weights)
    return Under(
      forward=Belt(idle, idle, idle, idle),
      backward=Belt(*[zeros[0]] * 4),
      state=self.state,
      saved=jax.tree.map(self._in_slots, (idle, first)),
      made=made,
      made_gradients=zeros[1],
      bridge=bridge,
      bridge_gradients=zeros[2],
      gradients=none,
    )

  def _in_slots(self, x: jax.Array) -> jax.Array:
    """An array `[stages, ...]` in each slot of the groups under way, `[stages, slots, ...]`."""
    slots = self.groups * self.of.schedule.stages * self.of.schedule.virtual_stages
    return jnp.swapaxes(jnp.broadcast_to(x, (slots, *x.shape)), 0, 1)

  def _slot(self, microbatch: AnyArray, repeat: AnyArray) -> AnyArray:
    """Where a chunk's arrays are saved, for a microbatch: by group, chunk and microbatch of the group."""
    plan = self.of.schedule
    group, place = microbatch // plan.stages, microbatch % plan.stages
    return (group % self.groups * plan.virtual_stages + repeat) * plan.stages + place

  def _forward(
    self, under: Under, weights: Weights, ticks: AnyArray, entering: PyTree, idle: PyTree
  ) -> Under:
    """Some ticks forward."""
    loop = self.loop

    def tick(carry: PyTree, t: AnyArray) -> tuple[PyTree, None]:
      forward, state, saved, made = carry

      def compute(
        given: PyTree, works: AnyArray, microbatch: AnyArray, repeat: AnyArray
      ) -> tuple[PyTree, PyTree]:
        slot, before = self._slot(microbatch, repeat), loop.by_stage(at)(state, repeat)
        result, changed, results, for_back = self._chunks_forward(weights, given, before, repeat)
        keep = loop.by_stage(lambda store, n, there, new: put(store, n, where(there, new, at(store, n))))
        return result, (
          keep(state, repeat, works, jax.lax.stop_gradient(changed)),
          keep(saved, slot, works, for_back),
          keep(made, slot, works, results),
        )

      forward, others = loop.tick(forward, t, entering, idle, compute)
      return (forward, *others), None

    carry = (under.forward, under.state, under.saved, under.made)
    (forward, state, saved, made), _ = jax.lax.scan(tick, carry, ticks)
    return under._replace(forward=forward, state=state, saved=saved, made=made)

  def _chunks_forward(
    self, weights: Weights, given: PyTree, state: PyTree, repeat: AnyArray
  ) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    """As `_chunks`, with what is saved for the backward pass: here the inputs."""
    return *self._chunks(weights, given, state, repeat), (given, state)

  def _backward(self, under: Under, weights: Weights, ticks: AnyArray, entering: PyTree) -> Under:
    """Some ticks backward."""
    loop = self.loop
    idle = jax.tree.map(jnp.zeros_like, entering)

    def tick(carry: PyTree, t: AnyArray) -> tuple[PyTree, None]:
      backward, sums = carry

      def compute(
        given: PyTree, works: AnyArray, microbatch: AnyArray, repeat: AnyArray
      ) -> tuple[PyTree, Weights]:
        slot, inputs = self._slot(microbatch, repeat), self._inputs(weights, repeat)
        saved, of_made = loop.by_stage(at)((under.saved, under.made_gradients), slot)
        result, rows, outer = loop.by_stage(self._chunk_back)((given, of_made), saved, inputs)
        outer = added(sums, loop.by_stage(_where_else_zero)(works, outer)).outer
        return result, Weights(loop.by_stage(_add_where)(sums.rows, repeat, works, rows), outer)

      return loop.tick(backward, t, entering, idle, compute, backwards=True), None

    (backward, gradients), _ = jax.lax.scan(tick, (under.backward, under.gradients), ticks)
    return under._replace(backward=backward, gradients=gradients)

  def _inputs(self, weights: Weights, repeat: AnyArray) -> LayerInputs:
    """What the layers of all stages read, `[stages, ...]`."""
    return LayerInputs(weights, self.rows, self.active, repeat)

  def _add_left(self, under: Under, weights: Weights, group: AnyArray) -> Weights:
    """The sums, with the gradients that wait until a group has left backward; none before the first group."""
    # Not a conditional: TPUs would copy the sums.
    there = jnp.broadcast_to(group >= 0, (self.of.schedule.stages,))
    found = self.loop.by_stage(_where_else_zero)(there, self._of_entry(under, weights, group))
    return added(under.gradients, found)

  def _of_entry(self, under: Under, weights: Weights, group: AnyArray) -> list[jax.Array]:
    """The gradients of the outer weights in what is computed before the layers, for a group that has left."""
    loop, batch = self.loop, at(self.batch, jnp.maximum(group, 0))
    given = [*loop.left(under.backward, backwards=True), *under.bridge_gradients]

    def back(outer: PyTree, batch: PyTree, given: PyTree) -> PyTree:
      _, pull = jax.vjp(lambda outer: floats_of(self._enter(outer, batch)), outer)
      return pull(given)[0]

    return loop.by_stage(back)(weights.outer, batch, given)

  # The programs of one stage: no array has a dim of stages.

  def _values(self, outer: Sequence[jax.Array], batch: Sequence[jax.Array]) -> Values:
    given = dict(zip((*self.outer, *self.batch_variables), (*outer, *batch), strict=True))
    return {**self.fixed, **given}

  def _enter(self, outer: list[jax.Array], batch: list[jax.Array]) -> tuple[PyTree, list[jax.Array]]:
    """The inputs of the first layer, and the bridge."""
    values = self._values(outer, batch)
    self.of.evaluate(self.of.before, values)
    carried = [jnp.asarray(read(var, values)) for var in self.stack.carried]
    sent = {key: read(self.stack.same[key], values) for key in self.of.travels}
    return (carried, sent), [values[var] for var in self.bridge]

  def _leave(
    self,
    outer: list[jax.Array],
    batch: list[jax.Array],
    bridge: list[jax.Array],
    carry: PyTree,
    made: dict[Key, jax.Array],
  ) -> tuple[list[jax.Array], PyTree]:
    """The wanted results, and the gradients of the loss, for the arguments but the batch."""

    def leave(outer: PyTree, *floats: PyTree) -> tuple[jax.Array, list[jax.Array]]:
      parts = [with_floats(tree, some) for tree, some in zip((bridge, carry, made), floats, strict=True)]
      values = self._values(outer, batch) | dict(zip(self.bridge, parts[0], strict=True))
      values |= {var: parts[1][0][n] for var, n in self.stack.final.items()}
      for key, x in parts[2].items():
        values |= self.stack.by_variable(key, x)
      self.of.evaluate(self.of.after, values)
      return read(self.of.outputs[0], values), [read(var, values) for var in self.wanted]

    floats = map(floats_of, (bridge, carry, made))
    loss, pull, results = jax.vjp(leave, outer, *floats, has_aux=True)
    return results, pull(jnp.ones_like(loss))

  def _chunk_back(
    self, slopes: PyTree, saved: PyTree, inputs: LayerInputs
  ) -> tuple[list[jax.Array], PyTree, PyTree]:
    """The gradients of a chunk, which is computed again: of its input, its rows and the outer weights.

    `slopes` are the gradients of its result and of the layers' other results; `saved`, its input and state.
    """
    (carry, state), weights, repeat = saved, inputs.weights, inputs.repeat

    def chunk(floats: list[jax.Array], rows: PyTree, outer: PyTree) -> PyTree:
      rows, active = {**rows, **at(inputs.rest, repeat)}, at(inputs.active, repeat)
      shared = {key: outer[n] for key, n in self.shared.items()}
      result, _, made = self.loop.layers(with_floats(carry, floats), state, rows, active, shared)
      return floats_of(result), floats_of(made)

    _, pull = jax.vjp(chunk, floats_of(carry), at(weights.rows, repeat), weights.outer)
    return pull(slopes)

  def _chunks(
    self, weights: Weights, given: PyTree, state: PyTree, repeat: AnyArray
  ) -> tuple[PyTree, PyTree, PyTree]:
    """The chunks of all stages, `[stages, ...]`: results, changed state, and the layers' other results."""
    shared = {key: weights.outer[n] for key, n in self.shared.items()}
    rows = weights.rows | self.rows
    return self.loop.by_stage(self.loop.chunk)(given, state, rows, self.active, repeat, shared)

  def _made_of(self, under: Under, group: AnyArray) -> dict[Key, jax.Array]:
    """The layers' other results for a group, `[stages, layers, ...]`: each microbatch on its stage."""
    return jax.tree.map(lambda x: self._by_microbatch(self._of_group(x, group)), under.made)

  def _with_made_gradients(self, under: Under, group: AnyArray, gradients: list[jax.Array]) -> Under:
    plan = self.of.schedule
    start = group % self.groups * plan.stages * plan.virtual_stages

    def put(saved: jax.Array, new: jax.Array) -> jax.Array:
      part = jax.linear_transpose(self._by_microbatch, self._of_group(saved, group))(new)[0]
      return jax.lax.dynamic_update_slice_in_dim(saved, part, start, 1)

    return under._replace(made_gradients=jax.tree.map(put, under.made_gradients, gradients))

  def _of_group(self, saved: jax.Array, group: AnyArray) -> jax.Array:
    plan = self.of.schedule
    count = plan.stages * plan.virtual_stages
    return jax.lax.dynamic_slice_in_dim(saved, group % self.groups * count, count, 1)

  def _by_microbatch(self, x: jax.Array) -> jax.Array:
    """`[stage, virtual_stages x microbatch, chunk, ...]` as `[microbatch, layer, ...]`."""
    plan, mesh = self.of.schedule, self.of.mesh
    x = staged(x, mesh, None).reshape(plan.stages, plan.virtual_stages, plan.stages, *x.shape[2:])
    x = jnp.moveaxis(x, 2, 0).swapaxes(1, 2)
    return staged(x.reshape(plan.stages, -1, *x.shape[4:])[:, : plan.layers], mesh, self.of.options.axis)


class Pipeline1F1B(TrainPipeline):
  """A traced loss as a pipeline in 1F1B; only its first result, the loss, has a gradient, in reverse mode."""

  way = " 1F1B"
  gradients: type[Gradients] = Gradients
  """Runs the schedule."""

  def __call__(self, model: Sequence[jax.Array], parts: Sequence[jax.Array]) -> list[jax.Array]:
    """As in `TrainPipeline`."""

    def run(model: list[jax.Array], parts: list[jax.Array]) -> list[jax.Array]:
      return super(Pipeline1F1B, self).__call__(model, parts)

    run.__name__ = PIPELINE_RULE
    rule = jax.custom_vjp(run)

    def forward(model: list[Any], parts: list[Any]) -> tuple[list[jax.Array], dict[int, jax.Array]]:
      trained = [n for n, x in enumerate(model) if x.perturbed and is_inexact(x.value)]
      return self.gradients(self, [x.value for x in model], [x.value for x in parts], trained).run()

    def backward(gradients: dict[int, jax.Array], given: list[Any]) -> tuple[PyTree, PyTree]:
      # The loss may be several results: itself, and the sum from which its mean is computed.
      is_zero = [isinstance(x, jax.custom_derivatives.SymbolicZero) for x in given]
      rows = zip(self.outputs, given, is_zero, strict=True)
      factor: Any = sum(x for var, x, zero in rows if var is self.outputs[0] and not zero)
      scaled = {n: (x * factor).astype(x.dtype) for n, x in gradients.items()}
      return [scaled.get(n) for n in range(len(model))], [None] * len(parts)

    rule.defvjp(forward, backward, symbolic_zeros=True)
    return rule([*model], [*parts])


def zeros_of(x: jax.ShapeDtypeStruct) -> jax.Array:
  """Zeros of a shape, dtype and sharding."""
  return jax.lax.full(x.shape, 0, x.dtype, sharding=x.sharding)


def floats_of(tree: PyTree) -> list[jax.Array]:
  """The arrays of a pytree that may have gradients."""
  return [x for x in jax.tree.leaves(tree) if is_inexact(x)]


def with_floats(tree: PyTree, floats: Sequence[jax.Array]) -> PyTree:
  """A pytree with other arrays in place of `floats_of`."""
  new = iter(floats)
  return jax.tree.map(lambda x: next(new) if is_inexact(x) else x, tree)


def added(sums: Weights, outer: list[jax.Array]) -> Weights:
  """The sums, with further gradients of the outer weights."""
  return sums._replace(outer=jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums.outer, outer))


def _add_where(store: PyTree, n: AnyArray, there: AnyArray, new: PyTree) -> PyTree:
  old = at(store, n)
  return put(store, n, jax.tree.map(lambda a, b: a + b.astype(a.dtype), old, _where_else_zero(there, new)))


def _where_else_zero(there: AnyArray, new: PyTree) -> PyTree:
  return jax.tree.map(lambda x: jnp.where(there, x, jnp.zeros_like(x)), new)
