"""The operations of a trace, by what they have to do with its equal layers.

The layers are a chain of marked calls (`layers/roll.py`) or a scan that the model has. The other operations
are of three kinds:
- *fixed*: they depend on neither the batch nor the layers;
- *before*: they depend on the batch (the embedding);
- *after*: they depend on the layers (the head and the loss).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from nnx_parallel.core.interpret import Values, is_literal, read, run_operations
from nnx_parallel.core.jaxprs import among, dependents, is_inexact, nbytes, place_of, scan_counts
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.mark import is_marked, is_or_has_layers, repeats_layers
from nnx_parallel.layers.roll import Around, Chain, Rolled, Run, RunInUnit

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
class Loop:
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
    size: how many layers of the model each of them is.
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
  size: int = 1
  narrow: Mapping[Key, Any] = dataclasses.field(default_factory=dict[Key, Any])

  @property
  def nbytes(self) -> int:
    """Those of the rows."""
    return sum(nbytes(var.aval) for some in self.rows.values() for var in variables(each_of(some)))

  @property
  def inputs(self) -> set[Any]:
    """All variables that its layers read."""
    rows = (var for some in self.rows.values() for var in each_of(some))
    return {*variables((*self.same.values(), *self.carried, *rows))}


def find_loop(rolled: Rolled, how: Treatment) -> Loop:
  """The equal layers of a trace, marked calls or a scan, that hold the most bytes.

  Raises:
    TrainError: there are none.
  """
  loops = [_chain(rolled, chain, how) for chain in rolled.chains.values() if len(chain.units) > 1]
  loops += [_scan(rolled, n, how) for n in range(len(rolled.eqns)) if _is_loop(rolled.eqns[n])]
  loop = max(loops, key=lambda loop: loop.nbytes, default=None)
  if loop is None:
    inside = [eqn for eqn in rolled.eqns if is_or_has_layers(eqn) and not is_marked(eqn)]
    hidden = [
      f"a pipeline does not reach layers inside {eqn.primitive.name} ({place_of(eqn)})" for eqn in inside
    ]
    raise TrainError(
      "a pipeline needs consecutive equal layers, and the loss has none.",
      details="\n".join([*hidden, *rolled.reasons][:6]),
      fix='layers="decoder.blocks.*" names them; or nxp.pipeline on layers of your own.',
    )
  return loop


class Parts:
  """The operations of a trace by what they have to do with its layers.

  Args:
    rolled: the trace, with the chains of its layers.
    ends: what its inputs and results are.
    how: what is done with layers.
    loop: the layers.

  Attributes:
    changed: result -> input of the arrays that the program does change.
    kept: results that are arrays that it may change and does not.
    read: variables that are read outside of the layers.
    of_layers: inputs that each layer changes -> its results that are their new values.
    alone: result -> input of those that change outside of the layers.
  """

  def __init__(self, rolled: Rolled, ends: Ends, how: Treatment, loop: Loop):
    self.rolled, self.ends, self.how, self.loop = rolled, ends, how, loop
    self.eqns, self.inputs = rolled.eqns, [*rolled.body.invars]
    self.outputs = [*rolled.body.outvars]
    self.changed = {o: i for o, i in ends.states.items() if self.outputs[o] is not self.inputs[i]}
    self.kept = {o for o in ends.states if o not in self.changed}
    outside = [n for n in range(len(self.eqns)) if n not in loop.numbers]
    self.read = {*self.reads(outside)} | {
      *variables(v for o, v in enumerate(self.outputs) if o not in ends.states)
    }
    self.of_layers, news = self._of_layers()
    self.alone = {o: i for o, i in self.changed.items() if self.outputs[o] not in news}

  def sort(self, varying: Collection[Any]) -> None:
    """Sorts the operations outside of the layers into `fixed`, `before` and `after`; see above.

    `varies` are then the variables that depend on those given, which differ between microbatches.

    Raises:
      TrainError: each layer reads something of its own that depends on the batch.
    """
    loop = self.loop
    made = {*loop.final, *(var for some in loop.made.values() for var in each_of(some))}
    after, varies = dependents(self.eqns, made), dependents(self.eqns, varying)
    self.fixed: list[int] = []
    self.before: list[int] = []
    self.after: list[int] = []
    for n, eqn in enumerate(self.eqns):
      if n not in loop.numbers:
        of = {*eqn.outvars}
        (self.after if of & after else self.before if of & varies else self.fixed).append(n)
    own = (var for some in loop.rows.values() for var in each_of(some))
    if wrong := [var for var in own if among(var, varies)]:
      raise TrainError(
        "each layer reads something of its own that depends on the batch, so they cannot be a pipeline.",
        details=", ".join(str(var.aval) for var in wrong[:4]),
        fix="give all layers the same array, or compute theirs inside of them.",
      )
    self.varies = varies

  def reads(self, numbers: Iterable[int]) -> list[Any]:
    """The variables that some operations read, in order: programs of all processes must be equal."""
    return [*dict.fromkeys(var for n in numbers for var in variables(self.eqns[n].invars))]

  def evaluate(self, numbers: Iterable[int], values: Values) -> None:
    """Evaluates some operations, and adds their results to the values."""
    run_operations([self.eqns[n] for n in numbers], values, self.how.run)

  def stacked(self, key: Key, values: Values) -> Any:
    """A row of all layers, `[layers, ...]`, narrower where they only read it cast."""
    some, dtype = self.loop.rows[key], None if key in self.of_layers else self.loop.narrow.get(key)
    if not isinstance(some, list):
      return read(some, values)
    return jnp.stack([jnp.asarray(read(var, values), dtype) for var in each_of(some)])

  def _of_layers(self) -> tuple[dict[Key, Key], set[Any]]:
    """Inputs that each layer changes -> its results that are their new values; and the variables of those."""
    news = {self.inputs[i]: self.outputs[o] for o, i in self.changed.items()}
    makers = {var: (key, u) for key, some in self.loop.made.items() for u, var in enumerate(each_of(some))}
    found: dict[Key, Key] = {}
    new: set[Any] = set()
    for key, some in self.loop.rows.items():
      rows = each_of(some)
      if any(not among(row, news) or row in self.read for row in rows):
        continue
      made = [makers.get(news[row], (None, 0)) for row in rows]
      if made[0][0] is not None and made == [(made[0][0], u) for u in range(len(rows))]:
        found[key] = made[0][0]
        new.update(news[row] for row in rows)
    return found, new


def _chain(rolled: Rolled, chain: Chain, how: Treatment) -> Loop:
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

  return Loop(
    numbers=frozenset(n for unit in chain.units for n in unit),
    length=units,
    name=f"{paths[0]} to {paths[-1]}",
    same={place: wires.inputs[0][place] for place in chain.same},
    carried=[wires.inputs[0][slot] for slot in wires.slots],
    final=wires.final,
    rows={place: [unit[place] for unit in wires.inputs] for place in wires.rows},
    made={place: [unit[place] for unit in vars_of] for place in wires.stacked},
    layer=layer,
    size=len(chain.units[0]),
    narrow={place: rolled.read_as(chain.units[0][place[0]], place[1]) for place in wires.rows},
  )


def _is_loop(eqn: Any) -> bool:
  """Whether an operation is a scan over layers: over floating rows, in order."""
  if eqn.primitive.name != "scan" or eqn.params["reverse"] or not has_layer_rows(eqn):
    return False
  return not repeats_layers(eqn)


def has_layer_rows(eqn: Any) -> bool:
  """Whether a scan may be one over layers: it has floating rows, two or more."""
  _, _, rows = scan_counts(eqn).split(eqn.invars)
  return eqn.params["length"] > 1 and any(is_inexact(var.aval) for var in rows)


def _scan(rolled: Rolled, n: int, how: Treatment) -> Loop:
  """The layers of a scan."""
  eqn = rolled.eqns[n]
  counts, length = scan_counts(eqn), eqn.params["length"]
  fixed, carried, rows = counts.split(eqn.invars)
  keys = counts.split(range(len(eqn.invars)))
  body = how.in_scan(eqn)

  def layer(carry: Sequence[Any], given: Mapping[Key, Any]) -> tuple[list[Any], dict[Key, Any]]:
    out = body(*(given[k] for k in keys[0]), *carry, *(given[k] for k in keys[2]))
    return [*out[: counts.carried]], dict(enumerate(out[counts.carried :]))

  return Loop(
    numbers=frozenset((n,)),
    length=length,
    name=f"a scan of {length}",
    same=dict(zip(keys[0], fixed, strict=True)),
    carried=carried,
    final={var: k for k, var in enumerate(eqn.outvars[: counts.carried])},
    rows=dict(zip(keys[2], rows, strict=True)),
    made=dict(enumerate(eqn.outvars[counts.carried :])),
    layer=layer,
  )


def each_of(some: Any) -> list[Any]:
  """The variables of a row: one for each layer, or the one that has them stacked."""
  return some if isinstance(some, list) else [some]  # pyright: ignore[reportUnknownVariableType]


def variables(some: Iterable[Any]) -> Iterator[Any]:
  """Those that are no constants."""
  return (var for var in some if not is_literal(var))
