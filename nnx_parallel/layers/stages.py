"""A traced loss as a pipeline over its equal layers: microbatches in, sums of their losses out.

The loss is traced for one microbatch. Its layers (`layers/stacks.py`) become a pipeline
(`layers/pipeline.py`). The remaining operations are of three kinds:
- *fixed*: they depend on neither the batch nor the layers, and are computed once;
- *before*: they depend on the batch (the embedding);
- *after*: they depend on the layers (the head and the loss).
Operations before and after are computed for one microbatch of each stage at a time, on its stage. An example:
of `loss(norm(blocks(embed(tokens))) @ head.astype(bfloat16), labels)`, the cast of the head is fixed, the
embedding is before, the blocks are the pipeline, and the norm, the product and the loss are after.

The values equal the values of sequential microbatches: each microbatch in turn changes a Variable of a layer
(batch statistics), and a Variable that does not depend on the batch (the count of a random stream) is counted
ahead for all microbatches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from nnx_parallel.core.interpret import Values, inline_calls, is_literal, read, run_operations, values_of
from nnx_parallel.core.jaxprs import (
  among,
  dependents,
  is_call,
  is_inexact,
  is_marked,
  nbytes,
  open_jaxpr,
  operations_behind,
)
from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.text import few, format_bytes
from nnx_parallel.core.types import ClosedJaxpr, JaxprEqn, PyTree, Var
from nnx_parallel.errors import SchemeError, TrainError
from nnx_parallel.layers.mark import is_or_has_layers, layer_of
from nnx_parallel.layers.pipeline import Layer, Pipeline, PipelineLoop, Schedule, size_along
from nnx_parallel.layers.stacks import Key, Stacks, as_called, variables


@dataclasses.dataclass(frozen=True)
class Signature:
  """The roles of the inputs and results of a traced loss, by position."""

  model: int  # the number of leading inputs that are arrays of the model; the rest are arrays of a microbatch
  states: Mapping[int, int]  # result -> input, for arrays of the model that the loss may change
  outputs: Collection[int]  # results with the examples on dim 0; all other results are sums


class TrainPipeline:
  """A traced loss of one microbatch as a pipeline of its equal layers.

  `TrainError` if there are none, or a Variable changes in a way that a pipeline cannot follow.
  """

  way = ""  # what the name of the pipeline says of its order

  def __init__(
    self, program: Stacks, signature: Signature, options: Pipeline, microbatches: int, mesh: AnyMesh | None
  ):
    self.program, self.signature, self.stack = program, signature, program.largest()
    self.eqns, self.inputs, self.outputs = program.eqns, [*program.body.invars], [*program.body.outvars]
    states = signature.states
    # Results for arrays that the program may change, by whether it does: `changed` is result -> input.
    self.changed = {o: i for o, i in states.items() if self.outputs[o] is not self.inputs[i]}
    self.kept = {o for o in states if o not in self.changed}
    outside = [n for n in range(len(self.eqns)) if n not in self.stack.numbers]
    self.read = {*self.reads(outside), *variables(v for o, v in enumerate(self.outputs) if o not in states)}
    # What each layer changes, and what changes outside of the layers, such as the count of a random stream.
    self.of_layers, news = self._of_layers()
    self.alone = {o: i for o, i in self.changed.items() if self.outputs[o] not in news}
    self.options, self.mesh = options, mesh
    stages = size_along(mesh, options.axis)
    if options.order != "gpipe" and stages == 1:
      raise SchemeError(
        f'order="{options.order}" needs at least 2 stages.',
        details=f"the mesh axis {options.axis!r} has size 1",
        fix="microbatches= without pipeline=, which saves the activations of one microbatch.",
      )
    self.schedule = Schedule(stages, microbatches, self.stack.length, options.virtual_stages)
    self._steps = self._count_steps()
    self._sort()
    same = self.same
    self.travels = [key for key, var in same.items() if var in self.varies]
    self.shared = [key for key, var in same.items() if var not in self.varies and is_inexact(var.aval)]

  def _sort(self) -> None:
    """Sorts the operations outside of the layers into `fixed`, `before` and `after`; see above.

    Sets `varies`: the variables that depend on the batch. `TrainError` if each layer reads another one.
    """
    varying = (*self.inputs[self.signature.model :], *(self.inputs[i] for i in self.alone.values()))
    made = {*self.stack.final, *self.made_variables}
    after, self.varies = dependents(self.eqns, made), dependents(self.eqns, varying)
    self.fixed: list[int] = []
    self.before: list[int] = []
    self.after: list[int] = []
    for n, eqn in enumerate(self.eqns):
      if n not in self.stack.numbers:
        of = {*eqn.outvars}
        (self.after if of & after else self.before if of & self.varies else self.fixed).append(n)
    if wrong := [var for var in self.stack.row_variables if var in self.varies]:
      raise TrainError(
        "each layer reads a different value that depends on the batch, so they cannot be a pipeline.",
        details=", ".join(str(var.aval) for var in wrong[:4]),
        fix="give all layers the same array, or compute theirs inside of them.",
      )

  @property
  def made_variables(self) -> list[Var]:
    """The results of the layers besides the carry."""
    return [var for some in self.stack.made.values() for var in some]

  @property
  def made_outside(self) -> list[Key]:
    """Those of them that are read outside of the layers."""
    return [key for key, some in self.stack.made.items() if not self.read.isdisjoint(some)]

  @property
  def same(self) -> dict[Key, Var]:
    """The variables that are one value for all layers."""
    return {key: var for key, var in self.stack.same.items() if not is_literal(var)}

  def reads(self, numbers: Iterable[int]) -> list[Var]:
    """The variables that some operations read, in order: programs of all processes must be equal."""
    return [*dict.fromkeys(var for n in numbers for var in variables(self.eqns[n].invars))]

  def evaluate(self, numbers: Iterable[int], values: Values) -> None:
    """Evaluates some operations, and adds their results to the values."""
    run_operations([self.eqns[n] for n in numbers], values, as_called)

  def layer(self, known: Mapping[Key, jax.Array], kept: Collection[Key] = ()) -> Layer:
    """One layer, for `PipelineLoop`; its carry includes the arrays that travel with the microbatch.

    `known` are the values of `same` that all microbatches share; `kept`, results that are read elsewhere.
    """

    def layer(carry: PyTree, row: PyTree, state: PyTree, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
      carried, sent = carry
      given = {**known, **shared, **sent, **row, **state}
      carried, made = self.stack.layer(carried, given)
      changed = {key: made[new] for key, new in self.of_layers.items()}
      return (carried, sent), changed, {key: made[key] for key in kept}

    return layer

  def split_row(self, piped: PipelineLoop, key: Key, values: Values) -> jax.Array:
    """A row of all layers, on their stages."""
    stacked = self.stack.stacked(key, values, narrow=key not in self.of_layers)
    return piped.split_layers(stacked, replicated=not self.stack.scanned)

  def _of_layers(self) -> tuple[dict[Key, Key], set[Var]]:
    """Inputs that each layer changes -> results that are the new values; and the variables of the inputs."""
    news = {self.inputs[i]: self.outputs[o] for o, i in self.changed.items()}
    makers = {var: (key, u) for key, some in self.stack.made.items() for u, var in enumerate(some)}
    found: dict[Key, Key] = {}
    new: set[Var] = set()
    for key, some in self.stack.rows.items():
      if any(not among(row, news) or row in self.read for row in some):
        continue
      made = [makers.get(news[row], (None, 0)) for row in some]
      if made[0][0] is not None and made == [(made[0][0], u) for u in range(len(some))]:
        found[key] = made[0][0]
        new.update(news[row] for row in some)
    return found, new

  def __str__(self) -> str:
    stack, plan, options = self.stack, self.schedule, self.options
    common = {var for var in self.same.values() if var in {*self.inputs[: self.signature.model]}}
    shared = sum(nbytes(var.aval) for var in common if is_inexact(var.aval))
    each = f" and {format_bytes(shared)} that all stages have" * bool(shared)
    each += f"; each of its {stack.length} layers is {stack.size} layers of the model" * (stack.size > 1)
    return (
      f"{stack.name}: a{self.way} pipeline over {options.axis}, {plan}; keeps {self.keeps}; weights of"
      f" {format_bytes(stack.nbytes)}, {format_bytes(stack.nbytes // plan.stages)} on each stage{each}"
      f"{self._outside()}"
    )

  @property
  def keeps(self) -> str:
    """What each stage saves for the backward pass."""
    saved = self.options.saved_inputs(self.schedule)
    sent = (self.stack.same[key] for key in self.travels)
    size = sum(nbytes(var.aval) for var in (*self.stack.carried, *sent))
    return f"{format_bytes(saved * size)} for each stage, the inputs of {saved} chunks"

  def _outside(self) -> str:
    """The layers that are not in the pipeline, and the bytes of their weights."""
    layers = [eqn for n, eqn in enumerate(self.eqns) if n not in self.stack.numbers and is_or_has_layers(eqn)]
    if not layers:
      return ""
    given = {*self.inputs[: self.signature.model]}
    read_by = {var for eqn in layers for var in variables(eqn.invars)}
    size = format_bytes(sum(nbytes(var.aval) for var in given & read_by))
    names = few(list(dict.fromkeys(layer_of(eqn) for eqn in layers if is_marked(eqn))) or ["others"])
    return f"; outside of the pipeline, computed by each stage: {names}, weights of {size}"

  def __call__(self, model: Sequence[jax.Array], parts: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of the loss: sums of the microbatches, new arrays, and outputs `[microbatches, ...]`."""
    stack, count = self.stack, self.signature.model
    fixed = values_of(self.program.jaxpr, model)
    self.evaluate(self.fixed, fixed)
    apart = {*self.travels, *self.shared}
    known = {key: read(var, fixed) for key, var in stack.same.items() if key not in apart}
    piped = PipelineLoop(self.schedule, self.options.axis, self.mesh, self.layer(known, self.made_outside))
    starts, ends = self.count(model)
    varying: Values = dict(zip(self.inputs[count:], parts, strict=True)) | starts
    varying = {var: piped.split_microbatches(x) for var, x in varying.items()}
    wanted = {*stack.inputs, *self.reads(self.after), *variables(self.outputs)}
    varying |= self._of_each(piped, self.before, wanted, fixed, varying)
    made, changed = self._run_layers(piped, fixed, varying)
    varying |= made
    varying |= self._of_each(piped, self.after, wanted, fixed, varying, recompute=True)
    ends |= changed
    return [self.result(o, piped, model, fixed, varying, ends) for o in range(len(self.outputs))]

  def _run_layers(self, piped: PipelineLoop, fixed: Values, varying: Values) -> tuple[Values, Values]:
    """The results of the layers for each microbatch, and the final values of the arrays that they change."""
    stack = self.stack

    def spread(var: Var) -> jax.Array:
      if among(var, varying):
        return varying[var]
      x = jnp.asarray(read(var, fixed))
      return piped.split_microbatches(jnp.broadcast_to(x, (self.schedule.microbatches, *x.shape)))

    carried = [spread(var) for var in stack.carried]
    sent = {key: varying[stack.same[key]] for key in self.travels}
    rows = {key: self.split_row(piped, key, fixed) for key in stack.rows}
    state = {key: rows.pop(key) for key in self.of_layers}
    shared = {key: read(stack.same[key], fixed) for key in self.shared}
    (final, _), state, made = piped((carried, sent), rows, state, shared)
    found = {var: final[n] for var, n in stack.final.items()}
    for key, x in made.items():
      found |= {var: piped.split_microbatches(x[:, place]) for var, place in stack.places(key)}
    return found, self.changed_by_layers(piped, state)

  def changed_by_layers(self, piped: PipelineLoop, state: dict[Key, jax.Array]) -> Values:
    """The final values of the arrays that the layers change."""
    changed: Values = {}
    for key, new in state.items():
      changed |= self.stack.by_variable(self.of_layers[key], piped.joined_layers(new))
    return changed

  def result(
    self,
    o: int,
    piped: PipelineLoop,
    model: Sequence[jax.Array],
    fixed: Values,
    varying: Values,
    ends: Values,
  ) -> jax.Array:
    """One result of all microbatches."""
    var, count = self.outputs[o], self.schedule.microbatches
    if o in self.kept:
      return model[self.signature.states[o]]
    if o in self.changed:
      return ends[var]
    if among(var, varying):
      x = varying[var]
      return piped.joined_microbatches(x) if o in self.signature.outputs else x.sum((0, 1))
    x = jnp.asarray(read(var, fixed))
    return jnp.broadcast_to(x, (count, *x.shape)) if o in self.signature.outputs else x * count

  @functools.cached_property
  def _flat(self) -> ClosedJaxpr:
    """The program without calls: a result of a call may depend on only some of its inputs."""
    return inline_calls(self.program.jaxpr, is_call)

  def _count_steps(self) -> list[JaxprEqn]:
    """The operations that update the values that do not depend on the batch or the layers."""
    if not self.alone:
      return []
    body = open_jaxpr(self._flat)
    changing = {row for key in self.of_layers for row in self.stack.rows[key]}
    of_batch = [
      body.invars[n] for n, var in enumerate(self.inputs) if n >= self.signature.model or var in changing
    ]
    of_batch = dependents(body, of_batch)
    if wrong := [i for o, i in self.alone.items() if among(body.outvars[o], of_batch)]:
      raise TrainError(
        "a Variable outside of the layers changes with the batch, so that a pipeline cannot compute"
        " microbatches at the same time.",
        details=", ".join(str(self.inputs[i].aval) for i in wrong[:4])
        + ": batch statistics, for example, or the Variables of layers that are called in several places",
        fix="a layer without them there (GroupNorm, LayerNorm), layers that are called once; or microbatches="
        " without pipeline=.",
      )
    return operations_behind(body.eqns, [body.outvars[o] for o in self.alone])

  def count(self, model: Sequence[jax.Array]) -> tuple[Values, Values]:
    """The initial values of each microbatch, `[microbatches, ...]`, and the final values after the last."""
    if not self.alone:
      return {}, {}
    body = open_jaxpr(self._flat)
    known = values_of(self._flat, model)

    def advance(counts: list[jax.Array], _: None) -> tuple[list[jax.Array], list[jax.Array]]:
      values = known | {body.invars[i]: x for i, x in zip(self.alone.values(), counts, strict=True)}
      run_operations(self._steps, values)
      return [read(body.outvars[o], values) for o in self.alone], counts

    first = [model[i] for i in self.alone.values()]
    last, starts = jax.lax.scan(advance, first, length=self.schedule.microbatches)
    begun = {self.inputs[i]: x for i, x in zip(self.alone.values(), starts, strict=True)}
    return begun, {self.outputs[o]: x for o, x in zip(self.alone, last, strict=True)}

  def _of_each(
    self,
    piped: PipelineLoop,
    numbers: list[int],
    wanted: set[Var],
    fixed: Values,
    varying: Values,
    *,
    recompute: bool = False,
  ) -> Values:
    """The results of some operations for each microbatch, `[groups, stages, ...]`."""
    results = [var for n in numbers for var in self.eqns[n].outvars if var in wanted]
    if not results:
      return {}
    reads = self.reads(numbers)
    known = {var: fixed[var] for var in reads if var in fixed}
    weights = [var for var, x in known.items() if is_inexact(jnp.asarray(x))]
    given = [var for var in reads if var in varying]

    def one(copies: list[jax.Array], rows: list[jax.Array]) -> list[jax.Array]:
      values = known | dict(zip((*weights, *given), (*copies, *rows), strict=True))
      self.evaluate(numbers, values)
      return [values[var] for var in results]

    of_stages = piped.by_stage(jax.checkpoint(one) if recompute else one)
    # Each stage has its own copy, and so its own gradients; they are summed where the copies are made.
    copies = piped.for_each_stage([known[var] for var in weights])
    rows = [varying[var] for var in given]
    _, found = jax.lax.scan(lambda _, row: (None, of_stages(copies, row)), None, rows)
    return dict(zip(results, found, strict=True))
