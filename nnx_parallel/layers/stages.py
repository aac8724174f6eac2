"""The trace of a loss as a pipeline over its layers: microbatches in, sums of their losses out.

The loss is traced for one microbatch. Its layers become a pipeline (`layers/pipeline.py`). Of the other
operations (`layers/parts.py`), fixed ones are computed once, and those before and after the layers for one
microbatch of each stage at a time, on its stage.

The values are those of the microbatches one after the other: a Variable of a layer changes with each of
them in turn (batch statistics), and one that does not depend on the batch (the count of a random stream)
is counted ahead for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.core.interpret import Values, flattened, is_literal, read, run_operations, values_of
from nnx_parallel.core.jaxprs import among, dependents, is_call, is_inexact, nbytes, opened, operations_behind
from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.text import few, format_bytes
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.mark import is_marked, is_or_has_layers, layer_of
from nnx_parallel.layers.parts import Ends, Loop, Parts, Treatment, each_of, find_loop, variables
from nnx_parallel.layers.pipeline import Piped, Pipeline, Schedule, size_along
from nnx_parallel.layers.roll import Rolled


def pipelined(
  rolled: Rolled, ends: Ends, how: Treatment, options: Pipeline, microbatches: int, mesh: AnyMesh | None
) -> Staged:
  """A traced loss of one microbatch as a pipeline.

  Args:
    rolled: its program, with the chains of its layers.
    ends: what its inputs and results are.
    how: what is done with layers.
    options: the axis, the virtual_stages, and whether ticks are recomputed.
    microbatches: how many.
    mesh: the mesh, if there is one.

  Raises:
    TrainError: there are no equal layers, or a Variable changes in a way that a pipeline cannot follow.
    SchemeError: no such axis, or microbatches that do not fit it.
  """
  loop = find_loop(rolled, how)
  schedule = Schedule(size_along(mesh, options.axis), microbatches, loop.length, options.virtual_stages)
  return Staged(rolled, ends, how, loop, schedule, options, mesh)


class Staged(Parts):
  """See `pipelined`; call it with the arrays of the model and those of the microbatches.

  Attributes:
    schedule: when which stage computes what.
  """

  def __init__(
    self,
    rolled: Rolled,
    ends: Ends,
    how: Treatment,
    loop: Loop,
    schedule: Schedule,
    options: Pipeline,
    mesh: AnyMesh | None,
  ):
    super().__init__(rolled, ends, how, loop)
    self.schedule, self.options, self.mesh = schedule, options, mesh
    self._steps = self._count_steps()
    self.sort((*self.inputs[ends.model :], *(self.inputs[i] for i in self.alone.values())))
    same = {key: var for key, var in loop.same.items() if not is_literal(var)}
    self.travels = [key for key, var in same.items() if var in self.varies and is_inexact(var.aval)]
    self.gathered = [key for key, var in same.items() if var in self.varies and not is_inexact(var.aval)]
    self.shared = [key for key, var in same.items() if var not in self.varies and is_inexact(var.aval)]

  def __str__(self) -> str:
    loop, plan = self.loop, self.schedule
    size = sum(nbytes(v.aval) for v in (*loop.carried, *(self.loop.same[key] for key in self.travels)))
    kept = format_bytes(plan.ticks * size)
    moved = format_bytes(loop.nbytes)
    return (
      f"{loop.name}: a pipeline over {self.options.axis}, {plan}; keeps {kept} for each stage, the inputs of"
      f" its ticks; weights of {moved}, {format_bytes(loop.nbytes // plan.stages)} on each stage"
      f"{self._units()}{self._outside()}"
    )

  def _units(self) -> str:
    size = self.loop.size
    return f"; each of its {self.loop.length} layers is {size} layers of the model" if size > 1 else ""

  def _outside(self) -> str:
    """The layers that are not in the pipeline, and what their weights take."""
    layers = [eqn for n, eqn in enumerate(self.eqns) if n not in self.loop.numbers and is_or_has_layers(eqn)]
    if not layers:
      return ""
    given = {*self.inputs[: self.ends.model]}
    read_by = {var for eqn in layers for var in variables(eqn.invars)}
    size = format_bytes(sum(nbytes(var.aval) for var in given & read_by))
    names = few(list(dict.fromkeys(layer_of(eqn) for eqn in layers if is_marked(eqn))) or ["others"])
    return f"; outside of the pipeline, computed by each stage: {names}, weights of {size}"

  def __call__(self, model: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """The results of the loss: sums over the microbatches, new arrays, and outputs `[microbatches, ...]`.

    Args:
      model: the arrays of the model.
      parts: arrays `[microbatches, ...]`.
    """
    loop, count = self.loop, self.ends.model
    fixed = values_of(self.rolled.jaxpr, model)
    self.evaluate(self.fixed, fixed)
    piped = Piped(self.schedule, self.options.axis, self.mesh, self._layer(fixed))
    starts, ends = self._count(model)
    varying: Values = dict(zip(self.inputs[count:], parts, strict=True)) | starts
    varying = {var: piped.split_microbatches(x) for var, x in varying.items()}
    wanted = {*loop.inputs, *self.reads(self.after), *variables(self.outputs)}
    varying |= self._of_each(piped, self.before, wanted, fixed, varying)
    made, changed = self._run_layers(piped, fixed, varying)
    varying |= made
    varying |= self._of_each(piped, self.after, wanted, fixed, varying, recompute=True)
    ends |= changed
    return [self._result(o, piped, model, fixed, varying, ends) for o in range(len(self.outputs))]

  def _run_layers(self, piped: Piped, fixed: Values, varying: Values) -> tuple[Values, Values]:
    """The results of the layers for each microbatch, and what the layers have changed for good."""
    loop = self.loop

    def spread(var: Any) -> Any:
      if among(var, varying):
        return varying[var]
      x = jnp.asarray(read(var, fixed))
      return piped.split_microbatches(jnp.broadcast_to(x, (self.schedule.microbatches, *x.shape)))

    carried = [spread(var) for var in loop.carried]
    sent = {key: varying[loop.same[key]] for key in self.travels}
    rows = {
      key: piped.split_layers(self.stacked(key, fixed), whole=isinstance(some, list))
      for key, some in loop.rows.items()
    }
    state = {key: rows.pop(key) for key in self.of_layers}
    shared = {key: read(loop.same[key], fixed) for key in self.shared}
    gathered = {key: piped.joined_microbatches(varying[loop.same[key]]) for key in self.gathered}
    (final, _), state, made = piped((carried, sent), rows, state, shared, gathered)
    found = {var: final[n] for var, n in loop.final.items()}
    for key, x in made.items():
      some = loop.made[key]
      of = enumerate(some) if isinstance(some, list) else [(slice(None), some)]
      found |= {var: piped.split_microbatches(x[:, u]) for u, var in of}
    changed: Values = {}
    for key, new in state.items():
      new, out = piped.joined_layers(new), loop.made[self.of_layers[key]]
      changed |= {var: new[u] for u, var in enumerate(out)} if isinstance(out, list) else {out: new}
    return found, changed

  def _result(
    self, o: int, piped: Piped, model: Sequence[Any], fixed: Values, varying: Values, ends: Values
  ) -> Any:
    """One result of all microbatches."""
    var, count = self.outputs[o], self.schedule.microbatches
    if o in self.kept:
      return model[self.ends.states[o]]
    if o in self.changed:
      return ends[var]
    if among(var, varying):
      x = varying[var]
      return piped.joined_microbatches(x) if o in self.ends.outputs else x.sum((0, 1))
    x = jnp.asarray(read(var, fixed))
    return jnp.broadcast_to(x, (count, *x.shape)) if o in self.ends.outputs else x * count

  @functools.cached_property
  def _flat(self) -> Any:
    """The program without calls: what a call gives may depend on some of its inputs only."""
    return flattened(self.rolled.jaxpr, is_call)

  def _count_steps(self) -> list[Any]:
    """The operations that compute the new value of what changes apart from the batch and the layers.

    Raises:
      TrainError: it does depend on the batch.
    """
    if not self.alone:
      return []
    body = opened(self._flat)
    rows = (self.loop.rows[key] for key in self.of_layers)
    changing = {row for some in rows for row in each_of(some)}
    of_batch = [
      body.invars[n] for n, var in enumerate(self.inputs) if n >= self.ends.model or var in changing
    ]
    of_batch = dependents(body, of_batch)
    if wrong := [i for o, i in self.alone.items() if among(body.outvars[o], of_batch)]:
      raise TrainError(
        "a Variable outside of the layers changes with the batch, so that a pipeline cannot compute"
        " microbatches at the same time.",
        details=", ".join(str(self.inputs[i].aval) for i in wrong[:4]) + ": batch statistics, for example",
        fix="a layer without them there (GroupNorm, LayerNorm); or microbatches= without pipeline=.",
      )
    return operations_behind(body.eqns, [body.outvars[o] for o in self.alone])

  def _count(self, model: Sequence[Any]) -> tuple[Values, Values]:
    """What each microbatch starts with, `[microbatches, ...]`, and what is left after the last one."""
    if not self.alone:
      return {}, {}
    body = opened(self._flat)
    known = values_of(self._flat, model)

    def advance(counts: list[Any], _: None) -> tuple[list[Any], list[Any]]:
      values = known | {body.invars[i]: x for i, x in zip(self.alone.values(), counts, strict=True)}
      run_operations(self._steps, values)
      return [read(body.outvars[o], values) for o in self.alone], counts

    first = [model[i] for i in self.alone.values()]
    last, starts = jax.lax.scan(advance, first, length=self.schedule.microbatches)
    begun = {self.inputs[i]: x for i, x in zip(self.alone.values(), starts, strict=True)}
    return begun, {self.outputs[o]: x for o, x in zip(self.alone, last, strict=True)}

  def _layer(self, fixed: Values) -> Callable[..., Any]:
    """One layer, for `Piped`."""
    loop = self.loop
    apart = {*self.travels, *self.gathered, *self.shared}
    known = {key: read(var, fixed) for key, var in loop.same.items() if key not in apart}
    kept = [key for key, some in loop.made.items() if not self.read.isdisjoint(each_of(some))]

    def layer(carry: Any, row: Any, state: Any, shared: Any, gathered: Any) -> tuple[Any, Any, Any]:
      carried, sent = carry
      carried, made = loop.layer(carried, {**known, **shared, **gathered, **sent, **row, **state})
      changed = {key: made[new] for key, new in self.of_layers.items()}
      return (carried, sent), changed, {key: made[key] for key in kept}

    return layer

  def _of_each(
    self,
    piped: Piped,
    numbers: list[int],
    wanted: set[Any],
    fixed: Values,
    varying: Values,
    *,
    recompute: bool = False,
  ) -> Values:
    """What some operations compute for each microbatch, `[groups, stages, ...]`."""
    results = [var for n in numbers for var in self.eqns[n].outvars if var in wanted]
    reads = self.reads(numbers)
    given = {n: (var, varying[var]) for n, var in enumerate(reads) if var in varying}
    known = {var: fixed[var] for var in reads if var in fixed}
    weights = {n: (var, x) for n, (var, x) in enumerate(known.items()) if is_inexact(jnp.asarray(x))}

    def one(weights_: dict[int, Any], given_: dict[int, Any]) -> list[Any]:
      values = {**known, **{weights[n][0]: x for n, x in weights_.items()}}
      values.update({given[n][0]: x for n, x in given_.items()})
      self.evaluate(numbers, values)
      return [values[var] for var in results]

    of_stages = piped.by_stage(jax.checkpoint(one) if recompute else one)
    # Each stage has its own copy, and so its own gradients; they are summed where the copies are made.
    copies = piped.for_each_stage({n: x for n, (_, x) in weights.items()})
    rows = {n: x for n, (_, x) in given.items()}
    if not results:
      return {}
    _, found = jax.lax.scan(lambda _, row: (None, of_stages(copies, row)), None, rows)
    return dict(zip(results, found, strict=True))
