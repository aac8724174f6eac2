"""The trace of a loss as a pipeline over its layers: microbatches in, sums of their losses out.

The loss is traced for one microbatch. Its layers, a chain of marked calls (`layers/roll.py`) or a scan that
the model has, become a pipeline (`layers/pipeline.py`). The other operations are of three kinds:
- *fixed*: they depend on neither the batch nor the layers, and are computed once;
- *before*: they depend on the batch (the embedding);
- *after*: they depend on the layers (the head and the loss).
Those before and after are computed for one microbatch of each stage at a time, on its stage.

The values are those of the microbatches one after the other: a Variable of a layer changes with each of
them in turn (batch statistics), and one that does not depend on the batch (the count of a random stream)
is counted ahead for all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from nnx_parallel.core.jaxprs import (
  CALLS,
  among,
  bind,
  constants,
  dependents,
  flattened,
  forwarded,
  is_inexact,
  nbytes,
  opened,
  placed,
  scan_counts,
)
from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.text import format_bytes
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.pipeline import Piped, Pipeline, Schedule, size_along
from nnx_parallel.layers.roll import Around, Chain, Rolled, Run, RunInUnit

Values = dict[Any, Any]
Key = Any
"""What names an input or a result of one layer: its position, in a chain also that of the call."""


@dataclasses.dataclass(frozen=True)
class Ends:
  """What the inputs and results of a traced loss are, by position.

  Attributes:
    model: so many first inputs are the arrays of the model; the others are those of a microbatch.
    states: result -> input, for arrays of the model that the loss may change.
    outputs: results with the examples on dim 0; all others are sums.
  """

  model: int
  states: Mapping[int, int]
  outputs: Collection[int]


@dataclasses.dataclass(frozen=True)
class Treatment:
  """What is done with layers.

  Attributes:
    run: evaluates operations outside of the layers.
    in_unit: evaluates the calls of a unit.
    around: is put around the program of a unit.
    in_scan: the program of one layer of a scan, a function of flat arrays.
  """

  run: Run
  in_unit: RunInUnit
  around: Around
  in_scan: Callable[[Any], Callable[..., Sequence[Any]]]


@dataclasses.dataclass
class _Loop:
  """Equal layers of a trace.

  Attributes:
    numbers: the positions of their operations.
    length: how many layers.
    name: the paths of the first and the last one, or "a scan".
    same: inputs that are one value for all layers.
    carried: what the first layer gets from outside of what each later one gets from the one before.
    final: a result of the last layer -> which of these it would be.
    rows: an input of each layer -> the variable of each, or the one that has them stacked.
    made: a result of each layer -> likewise.
    narrow: rows that the layers only read cast -> the narrower dtype.
    layer: `(carried, inputs by key) -> (carried, results by key)`.
  """

  numbers: frozenset[int]
  length: int
  name: str
  same: dict[Key, Any]
  carried: list[Any]
  final: dict[Any, int]
  rows: dict[Key, Any]
  made: dict[Key, Any]
  layer: Callable[[Sequence[Any], Mapping[Key, Any]], tuple[list[Any], dict[Key, Any]]]
  narrow: Mapping[Key, Any] = dataclasses.field(default_factory=dict[Key, Any])

  @property
  def nbytes(self) -> int:
    """Those of the rows."""
    return sum(nbytes(var.aval) for some in self.rows.values() for var in _each(some) if not _literal(var))

  @property
  def inputs(self) -> set[Any]:
    """All variables that its layers read."""
    rows = (var for some in self.rows.values() for var in _each(some))
    return {var for var in (*self.same.values(), *self.carried, *rows) if not _literal(var)}


def pipelined(
  rolled: Rolled, ends: Ends, how: Treatment, options: Pipeline, microbatches: int, mesh: AnyMesh | None
) -> Staged:
  """A traced loss of one microbatch as a pipeline.

  Args:
    rolled: its program, with the chains of its layers.
    ends: what its inputs and results are.
    how: what is done with layers.
    options: the axis, the repeats, and whether ticks are recomputed.
    microbatches: how many.
    mesh: the mesh, if there is one.

  Raises:
    TrainError: there are no equal layers, or a Variable changes in a way that a pipeline cannot follow.
    SchemeError: no such axis, or microbatches that do not fit it.
  """
  loops = [_chain(rolled, chain, how) for chain in rolled.chains.values() if len(chain.units) > 1]
  loops += [_scan(rolled, n, how) for n in range(len(rolled.eqns)) if _is_loop(rolled.eqns[n])]
  loop = max(loops, key=lambda loop: loop.nbytes, default=None)
  if loop is None:
    raise TrainError(
      "a pipeline needs consecutive equal layers, and the loss has none.",
      details="\n".join(rolled.reasons[:6]),
      fix='layers="decoder.blocks.*" names them; or nxp.pipeline on layers of your own.',
    )
  schedule = Schedule(size_along(mesh, options.axis), microbatches, loop.length, options.repeats)
  return Staged(rolled, ends, how, loop, schedule, options, mesh)


class Staged:
  """See `pipelined`; call it with the arrays of the model and those of the microbatches.

  Attributes:
    schedule: when which stage computes what.
  """

  def __init__(
    self,
    rolled: Rolled,
    ends: Ends,
    how: Treatment,
    loop: _Loop,
    schedule: Schedule,
    options: Pipeline,
    mesh: AnyMesh | None,
  ):
    self.rolled, self.ends, self.how, self.loop = rolled, ends, how, loop
    self.schedule, self.options, self.mesh = schedule, options, mesh
    self.eqns, self.inputs = rolled.eqns, [*rolled.body.invars]
    self.outputs = [rolled.seen(var) for var in rolled.body.outvars]
    same = forwarded(rolled.jaxpr)
    self.changed = {o: i for o, i in ends.states.items() if same[o] != i}
    """Result -> input of the arrays that the loss does change."""
    self.kept = {o for o in ends.states if o not in self.changed}
    read = {
      rolled.seen(v) for n, eqn in enumerate(self.eqns) if n not in loop.numbers for v in _vars(eqn.invars)
    }
    self.read = read | {*_vars(v for o, v in enumerate(self.outputs) if o not in ends.states)}
    """Variables that are read outside of the loop."""
    self.of_layers, news = self._of_layers()
    self.counted = {o: i for o, i in self.changed.items() if self.outputs[o] not in news}
    self._steps = self._count_steps()
    self.varying = {*self.inputs[ends.model :], *(self.inputs[i] for i in self.counted.values())}
    self._sort()

  def __str__(self) -> str:
    loop, plan = self.loop, self.schedule
    size = sum(nbytes(v.aval) for v in (*loop.carried, *(self.loop.same[key] for key in self.travels)))
    kept = format_bytes(plan.ticks * size)
    moved = format_bytes(loop.nbytes)
    return (
      f"{loop.name}: a pipeline over {self.options.axis}, {plan}; keeps {kept} for each stage, the inputs of"
      f" its ticks; weights of {moved}, {format_bytes(loop.nbytes // plan.stages)} on each stage"
    )

  def __call__(self, model: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """The results of the loss: sums over the microbatches, new arrays, and outputs `[microbatches, ...]`.

    Args:
      model: the arrays of the model.
      parts: arrays `[microbatches, ...]`.
    """
    loop, rolled, count = self.loop, self.rolled, self.ends.model
    fixed: Values = dict(zip(rolled.body.constvars, constants(rolled.jaxpr), strict=True))
    fixed.update(zip(self.inputs[:count], model, strict=True))
    self._evaluate(self.fixed, fixed)
    piped = Piped(self.schedule, self.options.axis, self.mesh, self._layer(fixed))
    starts, ends = self._count(model)
    varying: Values = dict(zip(self.inputs[count:], parts, strict=True)) | starts
    varying = {var: piped.split_microbatches(x) for var, x in varying.items()}
    wanted = {*loop.inputs, *self._reads(self.after), *_vars(self.outputs)}
    varying |= self._of_each(piped, self.before, wanted, fixed, varying)
    made, changed = self._run_layers(piped, fixed, varying)
    varying |= made
    varying |= self._of_each(piped, self.after, wanted, fixed, varying, recompute=True)
    ends |= changed
    return [self._result(o, piped, model, fixed, varying, ends) for o in range(len(self.outputs))]

  def _run_layers(self, piped: Piped, fixed: Values, varying: Values) -> tuple[Values, Values]:
    """The results of the layers for each microbatch, and what the layers have changed for good."""
    loop = self.loop

    def stacked(key: Key) -> Any:
      some, dtype = loop.rows[key], None if key in self.of_layers else loop.narrow.get(key)
      if not isinstance(some, list):
        return _read(some, fixed)
      return jnp.stack([jnp.asarray(_read(var, fixed), dtype) for var in _each(some)])

    def spread(var: Any) -> Any:
      if among(var, varying):
        return varying[var]
      x = jnp.asarray(_read(var, fixed))
      return piped.split_microbatches(jnp.broadcast_to(x, (self.schedule.microbatches, *x.shape)))

    carried = [spread(var) for var in loop.carried]
    sent = {key: varying[loop.same[key]] for key in self.travels}
    rows = {
      key: piped.split_layers(stacked(key), whole=isinstance(some, list)) for key, some in loop.rows.items()
    }
    state = {key: rows.pop(key) for key in self.of_layers}
    shared = {key: _read(loop.same[key], fixed) for key in self.shared}
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
    x = jnp.asarray(_read(var, fixed))
    return jnp.broadcast_to(x, (count, *x.shape)) if o in self.ends.outputs else x * count

  def _of_layers(self) -> tuple[dict[Key, Key], set[Any]]:
    """Inputs that each layer changes -> its results that are their new values; and the variables of those."""
    news = {self.inputs[i]: self.outputs[o] for o, i in self.changed.items()}
    makers = {var: (key, u) for key, some in self.loop.made.items() for u, var in enumerate(_each(some))}
    found: dict[Key, Key] = {}
    new: set[Any] = set()
    for key, some in self.loop.rows.items():
      rows = _each(some)
      if any(not among(row, news) or row in self.read for row in rows):
        continue
      made = [makers.get(news[row], (None, 0)) for row in rows]
      if made[0][0] is not None and made == [(made[0][0], u) for u in range(len(rows))]:
        found[key] = made[0][0]
        new.update(news[row] for row in rows)
    return found, new

  @functools.cached_property
  def _flat(self) -> Any:
    """The program without calls: what a call gives may depend on some of its inputs only."""
    return flattened(self.rolled.jaxpr, lambda eqn: eqn.primitive.name in CALLS)

  def _count_steps(self) -> list[Any]:
    """The operations that compute the new value of what changes apart from the batch and the layers.

    Raises:
      TrainError: it does depend on the batch.
    """
    if not self.counted:
      return []
    body = opened(self._flat)
    rows = (self.loop.rows[key] for key in self.of_layers)
    changing = {row for some in rows for row in _each(some)}
    of_batch = [
      body.invars[n] for n, var in enumerate(self.inputs) if n >= self.ends.model or var in changing
    ]
    tainted = dependents(body, of_batch)
    if wrong := [i for o, i in self.counted.items() if among(body.outvars[o], tainted)]:
      raise TrainError(
        "a Variable outside of the layers changes with the batch, so that a pipeline cannot compute"
        " microbatches at the same time.",
        details=", ".join(str(self.inputs[i].aval) for i in wrong[:4]) + ": batch statistics, for example",
        fix="a layer without them there (GroupNorm, LayerNorm); or microbatches= without pipeline=.",
      )
    needed = {var for o in self.counted for var in _vars([body.outvars[o]])}
    steps: list[Any] = []
    for eqn in reversed(body.eqns):
      if not needed.isdisjoint(eqn.outvars):
        steps.append(eqn)
        needed.update(_vars(eqn.invars))
    return steps[::-1]

  def _count(self, model: Sequence[Any]) -> tuple[Values, Values]:
    """What each microbatch starts with, `[microbatches, ...]`, and what is left after the last one."""
    if not self.counted:
      return {}, {}
    body = opened(self._flat)
    known: Values = dict(zip(body.constvars, constants(self._flat), strict=True))
    known.update(zip(body.invars[: self.ends.model], model, strict=True))

    def advance(counts: list[Any], _: None) -> tuple[list[Any], list[Any]]:
      values = known | {body.invars[i]: x for i, x in zip(self.counted.values(), counts, strict=True)}
      for eqn in self._steps:
        values.update(zip(eqn.outvars, bind(eqn, [_read(v, values) for v in eqn.invars]), strict=True))
      return [_read(body.outvars[o], values) for o in self.counted], counts

    first = [model[i] for i in self.counted.values()]
    last, starts = jax.lax.scan(advance, first, length=self.schedule.microbatches)
    begun = {self.inputs[i]: x for i, x in zip(self.counted.values(), starts, strict=True)}
    return begun, {self.outputs[o]: x for o, x in zip(self.counted, last, strict=True)}

  def _sort(self) -> None:
    """Sorts the operations that are not of the loop, and what its layers share.

    Raises:
      TrainError: each layer reads something of its own that depends on the batch.
    """
    loop, last = self.loop, len(self.eqns) - 1
    made = {*loop.final, *(var for some in loop.made.values() for var in _each(some))}
    after = self.rolled.tainted(made, -1, last)
    varies = self.rolled.tainted(self.varying, -1, last)
    self.fixed: list[int] = []
    self.before: list[int] = []
    self.after: list[int] = []
    for n, eqn in enumerate(self.eqns):
      if n not in loop.numbers:
        of = {*eqn.outvars}
        (self.after if of & after else self.before if of & varies else self.fixed).append(n)
    own = (var for some in loop.rows.values() for var in _each(some))
    if wrong := [var for var in own if among(var, varies)]:
      raise TrainError(
        "each layer reads something of its own that depends on the batch, so they cannot be a pipeline.",
        details=", ".join(str(var.aval) for var in wrong[:4]),
        fix="give all layers the same array, or compute theirs inside of them.",
      )
    same = {key: var for key, var in loop.same.items() if not _literal(var)}
    self.travels = [key for key, var in same.items() if var in varies and is_inexact(var.aval)]
    self.gathered = [key for key, var in same.items() if var in varies and not is_inexact(var.aval)]
    self.shared = [key for key, var in same.items() if var not in varies and is_inexact(var.aval)]

  def _layer(self, fixed: Values) -> Callable[..., Any]:
    """One layer, for `Piped`."""
    loop = self.loop
    apart = {*self.travels, *self.gathered, *self.shared}
    known = {key: _read(var, fixed) for key, var in loop.same.items() if key not in apart}
    kept = [key for key, some in loop.made.items() if not self.read.isdisjoint(_each(some))]

    def layer(carry: Any, row: Any, state: Any, shared: Any, gathered: Any) -> tuple[Any, Any, Any]:
      carried, sent = carry
      carried, made = loop.layer(carried, {**known, **shared, **gathered, **sent, **row, **state})
      changed = {key: made[new] for key, new in self.of_layers.items()}
      return (carried, sent), changed, {key: made[key] for key in kept}

    return layer

  def _reads(self, numbers: Iterable[int]) -> list[Any]:
    """The variables that some operations read, in order: programs of all processes must be equal."""
    return [*dict.fromkeys(self.rolled.seen(var) for n in numbers for var in _vars(self.eqns[n].invars))]

  def _evaluate(self, numbers: Iterable[int], values: Values) -> None:
    for n in numbers:
      eqn = self.eqns[n]
      with placed(eqn):
        inputs = [_read(self.rolled.seen(var), values) for var in eqn.invars]
        values.update(zip(eqn.outvars, self.how.run(eqn, inputs), strict=True))

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
    reads = self._reads(numbers)
    given = {n: (var, varying[var]) for n, var in enumerate(reads) if var in varying}
    known = {var: fixed[var] for var in reads if var in fixed}
    weights = {n: (var, x) for n, (var, x) in enumerate(known.items()) if is_inexact(jnp.asarray(x))}

    def one(weights_: dict[int, Any], given_: dict[int, Any]) -> list[Any]:
      values = {**known, **{weights[n][0]: x for n, x in weights_.items()}}
      values.update({given[n][0]: x for n, x in given_.items()})
      self._evaluate(numbers, values)
      return [values[var] for var in results]

    of_stages = piped.by_stage(jax.checkpoint(one) if recompute else one)
    # Each stage has its own copy, and so its own gradients; they are summed where the copies are made.
    copies = piped.for_each_stage({n: x for n, (_, x) in weights.items()})
    rows = {n: x for n, (_, x) in given.items()}
    if not results:
      return {}
    _, found = jax.lax.scan(lambda _, row: (None, of_stages(copies, row)), None, rows)
    return dict(zip(results, found, strict=True))


def _chain(rolled: Rolled, chain: Chain, how: Treatment) -> _Loop:
  """Marked calls of equal layers."""
  chain = dataclasses.replace(chain, scan=True)
  wires, units = rolled.wires(chain), len(chain.units)
  paths = rolled.calls(chain)
  vars_of = [{place: var for var, place in unit.items()} for unit in wires.results]

  def layer(carry: Sequence[Any], given: Mapping[Key, Any]) -> tuple[list[Any], dict[Key, Any]]:
    same = {place: given[place] for place in chain.same}
    body = how.around(chain, rolled.unit(chain, wires, how.in_unit, same))
    carry, made = body(carry, [given[place] for place in wires.rows])
    return carry, dict(zip(wires.stacked, made, strict=True))

  return _Loop(
    numbers=frozenset(n for unit in chain.units for n in unit),
    length=units,
    name=f"{paths[0]} to {paths[-1]}",
    same={place: wires.inputs[0][place] for place in chain.same},
    carried=[wires.inputs[0][slot] for slot in wires.slots],
    final=wires.final,
    rows={place: [unit[place] for unit in wires.inputs] for place in wires.rows},
    made={place: [unit[place] for unit in vars_of] for place in wires.stacked},
    layer=layer,
    narrow={place: rolled.read_as(chain.units[0][place[0]], place[1]) for place in wires.rows},
  )


def _is_loop(eqn: Any) -> bool:
  """Whether an operation is a scan over layers: over floating rows, in order."""
  if eqn.primitive.name != "scan" or eqn.params["reverse"] or eqn.params["length"] < 2:
    return False
  counts = scan_counts(eqn)
  rows = eqn.invars[counts.constants + counts.carried :]
  return any(is_inexact(var.aval) for var in rows)


def _scan(rolled: Rolled, n: int, how: Treatment) -> _Loop:
  """The layers of a scan."""
  eqn = rolled.eqns[n]
  counts, length = scan_counts(eqn), eqn.params["length"]
  inputs = [rolled.seen(var) for var in eqn.invars]
  first = counts.constants + counts.carried
  body = how.in_scan(eqn)

  def layer(carry: Sequence[Any], given: Mapping[Key, Any]) -> tuple[list[Any], dict[Key, Any]]:
    out = body(
      *[
        carry[k - counts.constants] if counts.constants <= k < first else given[k] for k in range(len(inputs))
      ]
    )
    return [*out[: counts.carried]], dict(enumerate(out[counts.carried :]))

  return _Loop(
    numbers=frozenset((n,)),
    length=length,
    name=f"a scan of {length}",
    same=dict(enumerate(inputs[: counts.constants])),
    carried=inputs[counts.constants : first],
    final={var: k for k, var in enumerate(eqn.outvars[: counts.carried])},
    rows=dict(enumerate(inputs[first:], first)),
    made=dict(enumerate(eqn.outvars[counts.carried :])),
    layer=layer,
  )


def _each(some: Any) -> list[Any]:
  return some if isinstance(some, list) else [some]  # pyright: ignore[reportUnknownVariableType]


def _literal(var: Any) -> bool:
  return isinstance(var, core.Literal)


def _vars(some: Iterable[Any]) -> Iterator[Any]:
  return (var for var in some if not _literal(var))


def _read(var: Any, values: Values) -> Any:
  return var.val if _literal(var) else values[var]
