"""Rolls consecutive calls of equal layers into one scan: the program does not grow with depth.

A run of marked calls is a chain if each input of a call is one of
- *inner*: always the same result of an earlier call of its unit;
- *carried*: always the same result of the unit before (activations, a shared random state);
- *same*: one value in all units (a mask, shared weights);
- a row: a value of its own, which does not depend on the chain (weights, statistics).

A unit is one call, or a few where kinds alternate: (local, local, global) has a period of 3. Rows are
stacked; weights that a layer only reads cast are cast first. Operations between the calls that do not
depend on the chain are evaluated before it.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.core.interpret import Values, is_literal, read, run_operations, values_of, without_copies
from nnx_parallel.core.jaxprs import among, called, dependents, is_inexact, nbytes, opened, programs
from nnx_parallel.core.keys import identity
from nnx_parallel.layers.mark import is_marked, kind_of_layer, layer_of

MAX_PERIOD = 4
Place = tuple[int, int]
"""The number of a call in its unit, and the position of one of its inputs or results."""
Run = Callable[[Any, list[Any]], Sequence[Any]]
"""`(operation, values of its inputs) -> values of its results`."""


@dataclasses.dataclass
class Chain:
  """Units of calls that are one scan.

  Attributes:
    units: the positions of the operations of each unit in the program.
    inner: input -> the result of an earlier call of its unit.
    carried: input -> the result of the unit before.
    same: inputs that are one value in all units; those in none of the three are rows.
    dependents: the variables that depend on a result of the chain.
    scan: whether it is one scan.
  """

  units: list[tuple[int, ...]]
  inner: dict[Place, Place]
  carried: dict[Place, Place]
  same: set[Place]
  dependents: set[Any]
  scan: bool = False


RunInUnit = Callable[[Chain, int, Any, list[Any]], Sequence[Any]]
"""The same, with the chain and the number of the call in its unit before."""
Body = Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
Around = Callable[[Chain, Body], Body]


@dataclasses.dataclass
class Wires:
  """How the units of a chain are connected.

  Attributes:
    inputs: of each unit, the variable of each input.
    results: of each unit, the result that each variable is.
    rows: the inputs that are rows.
    slots: the inputs that are carried.
    stacked: the results of units that are used elsewhere, other than the last ones that are carried.
    final: variable -> the slot of the last unit's result.
    used: the variables that are read outside of the chain.
  """

  inputs: list[dict[Place, Any]]
  results: list[dict[Any, Place]]
  rows: list[Place]
  slots: list[Place]
  stacked: list[Place]
  final: dict[Any, int]
  used: set[Any]

  def found(self, carry: Sequence[Any], stacks: Mapping[Place, Any], dim: int = 0) -> dict[Any, Any]:
    """The variables that are used elsewhere, from what is carried last and what each unit gave.

    Args:
      carry: a value for each slot.
      stacks: arrays with a dim of units, or a sequence with one value for each.
      dim: which one it is.
    """
    found = {var: carry[n] for var, n in self.final.items()}
    for number, unit in enumerate(self.results):
      places = {var: place for var, place in unit.items() if place in stacks and var in self.used}
      found |= {var: _of_unit(stacks[place], number, dim) for var, place in places.items()}
    return found


class Rolled:
  """A program whose chains of layers are scans.

  Args:
    jaxpr: the trace of a loss.
    scan_from: the fewest layers of a scan; None: no chain is one.
    group: the number of calls of a unit is a multiple of it.
    loops: whether chains that are no scan are evaluated unit by unit too, and not call by call.

  Attributes:
    chains: by the position of their first operation.
    reasons: why neighbours are not of one chain.
  """

  def __init__(self, jaxpr: Any, scan_from: int | None = 2, group: int = 1, *, loops: bool = False):
    self.jaxpr = without_copies(jaxpr)
    self.body = opened(self.jaxpr)
    self.eqns: list[Any] = list(self.body.eqns)
    marks = [n for n, eqn in enumerate(self.eqns) if is_marked(eqn)]
    bodies = {id(called(self.eqns[n])): called(self.eqns[n]) for n in marks}
    identities = {key: identity(body) for key, body in bodies.items()}
    self._programs = {n: identities[id(called(self.eqns[n]))] for n in marks}
    self.chains: dict[int, Chain] = {}
    self.reasons: list[str] = []
    periods = range(group, group * MAX_PERIOD + 1, group)
    short = 0  # up to this call, the layers are those of a chain that is too short
    while marks:
      chains = [self._chain(marks, period) for period in periods if period <= len(marks)]
      chains = [chain for chain in chains if chain.units]
      again = [chain for chain in chains if len(chain.units) > 1]
      found = max(again, key=lambda chain: (_calls(chain), -self._stacked(chain)), default=None)
      if found is not None and scan_from is not None:
        found.scan = _calls(found) >= scan_from
        if not found.scan and marks[0] >= short:
          names, short = self.calls(found), found.units[-1][-1]
          self.reasons.append(
            f"{names[0]} to {names[-1]}: {len(names)} layers, and a scan has {scan_from} or more"
          )
      if found is not None and not found.scan and not loops:
        found = None
      if found is None and loops and group > 1:
        found = chains[0] if chains else None  # once
      if found is not None:
        self.chains[marks[0]] = found
      used = _calls(found) if found is not None else 1
      if scan_from is not None and used < len(marks) and marks[used - 1] >= short:
        self.reasons += filter(None, [self._why(marks[used - 1], marks[used])])
      marks = marks[used:]

  def __call__(self, inputs: Sequence[Any], run: Run, in_unit: RunInUnit, around: Around) -> list[Any]:
    """The results of the program.

    Args:
      inputs: its arrays.
      run: evaluates operations outside of chains.
      in_unit: evaluates the calls in chains, given their number in the unit too.
      around: is put around the program of a unit, a function of what is carried and of the rows.
    """
    values = values_of(self.jaxpr, inputs)
    done: set[int] = set()

    def evaluate(numbers: Collection[int]) -> None:
      run_operations([self.eqns[n] for n in numbers if n not in done], values, run)
      done.update(numbers)

    for n in range(len(self.eqns)):
      chain = self.chains.get(n)
      if chain is not None and n not in done:
        calls = {m for unit in chain.units for m in unit}
        between = range(n, max(calls))
        evaluate([m for m in between if m not in calls and not chain.dependents & {*self.eqns[m].outvars}])
        found = self._run(chain, values, in_unit, around)
        done |= calls
        values.update(self._joint(found, values, done) if chain.scan else found)
      evaluate([n])
    # What the program did not change is the input itself.
    values.update(zip(self.body.invars, inputs, strict=True))
    return [read(var, values) for var in self.body.outvars]

  def _stacked(self, chain: Chain) -> int:
    """The bytes of a chain's rows: two shared layers in turn have none as units of two."""
    linked = {*chain.inner, *chain.carried, *chain.same}
    first = self._inputs(chain.units[0])
    return len(chain.units) * sum(nbytes(var.aval) for place, var in first.items() if place not in linked)

  def calls(self, chain: Chain) -> list[str]:
    """The paths of the layers of a chain, in the order of their calls."""
    return [layer_of(self.eqns[n]) for unit in chain.units for n in unit]

  def _why(self, before: int, after: int) -> str:
    """Why two calls that follow each other are not of one chain."""
    first, second = self.eqns[before], self.eqns[after]
    names = f"{layer_of(first)} and {layer_of(second)}"
    if kind_of_layer(first) != kind_of_layer(second):
      return ""  # nobody takes them for equal
    if self._programs[before] != self._programs[after]:
      return f"{names} differ{_difference(called(first), called(second))}"
    later = self.dependents(first.outvars, before, after)
    between = [eqn for eqn in self.eqns[before + 1 : after] if later & {*eqn.outvars}]
    used = [eqn for eqn in between if any(among(var, eqn.outvars) for var in second.invars)]
    if used:
      return f"{used[-1].primitive.name} between {names} changes what the second one gets"
    return f"{names} read other results of the calls before them than their neighbours, or one is left over"

  def _inputs(self, unit: Sequence[int]) -> dict[Place, Any]:
    return {(c, j): var for c, n in enumerate(unit) for j, var in enumerate(self.eqns[n].invars)}

  def _results(self, unit: Sequence[int]) -> dict[Any, Place]:
    return {var: (c, p) for c, n in enumerate(unit) for p, var in enumerate(self.eqns[n].outvars)}

  def _chain(self, marks: Sequence[int], period: int) -> Chain:
    """The longest chain from the first mark on, of units of `period` calls."""
    first = tuple(marks[:period])
    chain = Chain([], {}, {}, set(), set())
    given, before, after = self._inputs(first), {}, -1
    for start in range(0, len(marks) - period + 1, period):
      unit = tuple(marks[start : start + period])
      if any(self._programs[n] != self._programs[m] for n, m in zip(unit, first, strict=True)):
        break
      own, wanted = self._results(unit), self._inputs(unit)
      later = self.dependents(chain.dependents | own.keys(), after, unit[-1])
      inner = {place: own[var] for place, var in wanted.items() if among(var, own)}
      carried = {place: before[var] for place, var in wanted.items() if among(var, before)}
      linked = inner.keys() | carried.keys()
      if any(among(var, later) for place, var in wanted.items() if place not in linked):
        break
      same = {place for place, var in wanted.items() if _is_same(var, given[place])} - linked
      if start == 0:
        chain.units, chain.inner, chain.dependents = [unit], inner, later
      elif inner != chain.inner or (start > period and carried != chain.carried):
        break
      else:
        chain.units.append(unit)
        chain.carried, chain.dependents = carried, later
        chain.same = same if start == period else chain.same & same
      before, after = own, unit[-1]
    return chain

  def dependents(self, known: Iterable[Any], after: int, last: int) -> set[Any]:
    """Some variables, and those up to an operation that depend on them."""
    return dependents(self.eqns[after + 1 : last + 1], known)

  def wires(self, chain: Chain) -> Wires:
    """How the units of a chain are connected with each other and with the rest of the program."""
    inputs = [self._inputs(unit) for unit in chain.units]
    results = [self._results(unit) for unit in chain.units]
    slots = list(chain.carried)
    used = self.used({n for unit in chain.units for n in unit})
    final = {chain.carried[slot]: n for n, slot in enumerate(slots)}
    last = {place: var for var, place in results[-1].items()}
    wanted = {(var, place) for unit in results for var, place in unit.items() if var in used}
    return Wires(
      inputs,
      results,
      rows=[p for p in inputs[0] if p not in chain.carried and p not in chain.inner and p not in chain.same],
      slots=slots,
      stacked=sorted({place for var, place in wanted if place not in final or var is not last[place]}),
      final={last[place]: n for place, n in final.items()},
      used=used,
    )

  def unit(self, chain: Chain, wires: Wires, run: RunInUnit, same: Mapping[Place, Any]) -> Body:
    """The program of one unit."""

    def body(carry: Sequence[Any], row: Sequence[Any]) -> tuple[list[Any], list[Any]]:
      given = {
        **same,
        **dict(zip(wires.slots, carry, strict=True)),
        **dict(zip(wires.rows, row, strict=True)),
      }
      made: dict[Place, Any] = {}
      for c, n in enumerate(chain.units[0]):
        places = [(c, j) for j in range(len(self.eqns[n].invars))]
        values = [made[chain.inner[place]] if place in chain.inner else given[place] for place in places]
        made.update({(c, p): x for p, x in enumerate(run(chain, c, self.eqns[n], values))})
      return [made[chain.carried[slot]] for slot in wires.slots], [made[place] for place in wires.stacked]

    return body

  def _stack(self, chain: Chain, wires: Wires, place: Place, values: Values) -> Any:
    """A row of all units, `[units, ...]`."""
    dtype = self.read_as(chain.units[0][place[0]], place[1])
    rows = [read(unit[place], values) for unit in wires.inputs]
    return jnp.stack(rows if dtype is None else [row.astype(dtype) for row in rows])

  def _run(self, chain: Chain, values: Values, run: RunInUnit, around: Around) -> Values:
    """The results of a chain's calls that are used elsewhere."""
    wires = self.wires(chain)
    first = wires.inputs[0]
    same = {place: read(first[place], values) for place in chain.same}
    step = around(chain, self.unit(chain, wires, run, same))
    carry = [read(first[slot], values) for slot in wires.slots]
    if chain.scan:
      rows = [self._stack(chain, wires, place, values) for place in wires.rows]
      carry, ys = jax.lax.scan(step, carry, rows, length=len(wires.inputs))
    else:
      made = []
      for unit in wires.inputs:
        carry, y = step(carry, [read(unit[place], values) for place in wires.rows])
        made.append(y)
      ys = list(zip(*made, strict=True))
    return wires.found(carry, dict(zip(wires.stacked, ys, strict=True)))

  def _joint(self, found: Values, values: Values, done: Collection[int]) -> Values:
    """The results of a chain, and what single operations read after it; their gradients come together.

    So the gradients of a head are complete before the backward pass of the layers starts. A compiler that
    computes them after it keeps the gradient of all logits meanwhile.
    """
    apart = {n for chain in self.chains.values() for unit in chain.units for n in unit} | {*done}
    rest = [eqn for n, eqn in enumerate(self.eqns) if n not in apart]
    reads = {var for eqn in rest for var in eqn.invars if not is_literal(var)}
    later = {var: x for var, x in values.items() if var in reads}
    tied = {var: x for var, x in {**later, **found}.items() if is_inexact(var.aval)}
    return {**found, **dict(zip(tied, _with_joint_gradients(*tied.values()), strict=True))}

  def used(self, calls: Collection[int]) -> set[Any]:
    """The variables that are read outside of these calls."""
    readers = [eqn.invars for n, eqn in enumerate(self.eqns) if n not in calls]
    return {var for some in (*readers, self.body.outvars) for var in some if not is_literal(var)}

  def read_as(self, call: int, position: int) -> Any:
    """The narrower dtype to which a call casts an input before all else; None where it does not."""
    program = opened(called(self.eqns[call]))
    var = program.invars[position]
    uses = [eqn for eqn in program.eqns for read in eqn.invars if read is var]
    if len(uses) != 1 or uses[0].primitive.name != "convert_element_type":
      return None
    dtype = uses[0].params["new_dtype"]
    return dtype if dtype.itemsize < var.aval.dtype.itemsize else None


@jax.custom_jvp
def _with_joint_gradients(*xs: Any) -> tuple[Any, ...]:
  """The arrays; none of their gradients is used before all of them are computed."""
  return xs


def _tangents(xs: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
  is_zero = [isinstance(x, jax.custom_derivatives.SymbolicZero) for x in tangents]
  tied = iter(
    jax.lax.optimization_barrier([x for x, zero in zip(tangents, is_zero, strict=True) if not zero])
  )
  return xs, tuple(x if zero else next(tied) for x, zero in zip(tangents, is_zero, strict=True))


_with_joint_gradients.defjvp(_tangents, symbolic_zeros=True)


def _of_unit(stack: Any, number: int, dim: int) -> Any:
  return stack[(*[slice(None)] * dim, number)] if dim else stack[number]


def _calls(chain: Chain) -> int:
  return sum(map(len, chain.units))


def _difference(first: Any, second: Any) -> str:
  """How two programs of layers differ."""
  one, two = opened(first), opened(second)
  given = [[var.aval.str_short() for var in program.invars] for program in (one, two)]
  if given[0] != given[1]:
    only = [", ".join(_without(a, b)) or "none" for a, b in (given, given[::-1])]
    counts = [f"{len(some)} arrays" for some in given]
    return f" in the arrays that they get: {only[0]} ({counts[0]}) / {only[1]} ({counts[1]})"
  for a, b in zip(one.eqns, two.eqns, strict=False):
    texts = [_told(eqn) for eqn in (a, b)]
    if texts[0] != texts[1]:
      return f": {texts[0]} / {texts[1]}"
  if len(one.eqns) != len(two.eqns):
    longer, n = max((one, two), key=lambda program: len(program.eqns)), min(len(one.eqns), len(two.eqns))
    return f": one of them goes on with {longer.eqns[n].primitive.name}"
  for a, b in zip(one.eqns, two.eqns, strict=True):
    for x, y in zip(programs(a), programs(b), strict=False):
      if identity(x) != identity(y):
        return _difference(x, y)
  return " in a constant, or in a rule of jax.custom_jvp or jax.custom_vjp"


def _without(some: list[str], others: list[str]) -> list[str]:
  rest = [*others]
  return [x for x in some if x not in rest or rest.remove(x)]


def _told(eqn: Any) -> str:
  """An operation with its numbers and plain parameters."""
  numbers = [f"{var.val}" for var in eqn.invars if is_literal(var)]
  plain = [f"{k}={v}" for k, v in sorted(eqn.params.items()) if k != "name" and _is_plain(v)]
  return textwrap.shorten(" ".join([eqn.primitive.name, *numbers, *plain]), 80, placeholder=" ...")


def _is_plain(x: Any) -> bool:
  return isinstance(x, (bool, int, float, str)) or (isinstance(x, tuple) and all(map(_is_plain, x)))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _is_same(a: Any, b: Any) -> bool:
  if is_literal(a) and is_literal(b):
    return bool(a.val == b.val)
  return a is b
