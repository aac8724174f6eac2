"""Finds stacks of equal layers in a trace: consecutive calls of layers, or a scan that the model has.

A run of marked calls is a chain if each input of a call is one of
- *inner*: always the same result of an earlier call of its unit;
- *carried*: always the same result of the unit before (activations, a shared random state);
- *same*: one value in all units (a mask, shared weights);
- a row: a different value in each unit, which does not depend on the chain (weights, statistics).

A unit is one call, or a few calls where kinds alternate: (local, local, global) has a period of 3. Units pass
activations on; two towers side by side do not. A chain becomes one scan, whose program does not grow with
depth, or the stages of a pipeline. Rows are stacked. An example: of `for b in blocks: x = b(x, mask)`, x is
carried, the mask is the same, and the weights of the blocks are a row:

  x = b0(x, mask); x = b1(x, mask)   ->   scan(lambda x, w: body(x, w, mask), x, stack(w0, w1))

Consecutive scans of one body are also one stack of layers, for a pipeline.
Weights that a layer only reads after a cast are cast first. Operations between the calls that do not depend
on the chain are evaluated before the chain.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnx_parallel.core.interpret import (
  DEFAULT,
  Rule,
  Values,
  inline_calls,
  interpret,
  is_literal,
  read,
  run_operations,
  values_of,
  without_copies,
)
from nnx_parallel.core.jaxprs import (
  among,
  as_function,
  bind,
  dependents,
  equations,
  is_checkpoint,
  is_inexact,
  is_marked,
  nbytes,
  open_jaxpr,
  params_of,
  place_of,
  program_of,
  programs,
  scan_counts,
)
from nnx_parallel.core.keys import DERIVATIVES, Keys, identity, value_of_constant
from nnx_parallel.core.types import JaxprEqn, Program, Value, Var
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.mark import is_or_has_layers, kind_of_layer, layer_of, repeats_layers
from nnx_parallel.layers.remat import AS_WRITTEN, Body, Remat, checkpoint_unit, is_joint

MAX_PERIOD = 4
Place = tuple[int, int]
"""The number of a call in its unit, and the position of one of its inputs or results."""
Key = Any
"""Identifies an input or a result of a layer: its position, or its place in a chain."""
EachLayer: TypeAlias = list[Var]
"""Variables that layers read or make: one for each layer, or one for each scan, with the layers on dim 0."""


@dataclasses.dataclass
class Chain:
  """Units of calls that form one scan."""

  units: list[tuple[int, ...]]  # the positions of the operations of each unit in the program
  inner: dict[Place, Place]  # input -> the result of an earlier call of its unit
  carried: dict[Place, Place]  # input -> the result of the unit before
  same: set[Place]  # inputs that are one value in all units; all remaining inputs are rows
  dependents: set[Var]  # the variables that depend on a result of the chain
  scan: bool = False  # whether the chain is one scan

  @property
  def calls(self) -> list[int]:
    """The positions of all its operations."""
    return [n for unit in self.units for n in unit]


@dataclasses.dataclass
class Stack:
  """Equal layers of a trace."""

  numbers: frozenset[int]  # the positions of their operations
  length: int  # the number of layers
  name: str  # the paths of the first and the last layer, or "a scan"
  same: dict[Key, Var]  # inputs that are one value for all layers
  # the inputs that the first layer takes from outside, and later layers from the previous layer
  carried: list[Var]
  final: dict[Var, int]  # a result of the last layer -> the carried input that it would be
  rows: dict[Key, EachLayer]  # an input of each layer -> its variables
  made: dict[Key, EachLayer]  # a result of each layer -> its variables
  # `(values of same) -> Body`, of rows and results in the order of `rows` and `made`
  step: Callable[[Mapping[Key, jax.Array]], Body]
  used: set[Var]  # the variables that are read outside of the layers
  scanned: bool = False  # whether it is a scan of the model, whose variables have all layers on dim 0
  size: int = 1  # how many layers of the model each layer is
  # rows that the layers only read cast -> the narrower dtype
  narrow: Mapping[Key, DTypeLike | None] = dataclasses.field(default_factory=dict[Key, DTypeLike | None])

  @property
  def row_variables(self) -> list[Var]:
    """The variables of all rows."""
    return [var for some in self.rows.values() for var in variables(some)]

  @property
  def nbytes(self) -> int:
    """The bytes of the rows."""
    return sum(nbytes(var.aval) for var in self.row_variables)

  @property
  def inputs(self) -> set[Var]:
    """All variables that its layers read."""
    return {*variables((*self.same.values(), *self.carried)), *self.row_variables}

  def layer(
    self, carry: Sequence[jax.Array], given: Mapping[Key, jax.Array]
  ) -> tuple[list[jax.Array], dict[Key, jax.Array]]:
    """One layer: `(carried, inputs by key) -> (carried, results by key)`."""
    carry, made = self.step(given)(carry, [given[key] for key in self.rows])
    return carry, dict(zip(self.made, made, strict=True))

  def stacked(self, key: Key, values: Values, *, narrow: bool = True) -> jax.Array:
    """A row of all layers, `[layers, ...]`; narrower where they only read it cast."""
    found = [read(var, values) for var in self.rows[key]]
    dtype = self.narrow.get(key) if narrow else None
    return found[0] if self.scanned else jnp.stack([jnp.asarray(x, dtype) for x in found])

  def places(self, key: Key) -> Iterator[tuple[Var, int | slice]]:
    """Each variable of a result, and its place in the results of all layers: a layer, or all of them."""
    for n, var in enumerate(self.made[key]):
      yield var, slice(None) if self.scanned else n

  def by_variable(self, key: Key, x: jax.Array) -> Values:
    """A result of all layers, `[layers, ...]`, as the values of its variables."""
    return {var: x[place] for var, place in self.places(key)}

  def run(self, values: Values, *, scan: bool) -> Values:
    """The results of calls that are used elsewhere, from one scan or from one layer after another."""
    step = self.step({key: read(var, values) for key, var in self.same.items()})
    carry: list[jax.Array] = [read(var, values) for var in self.carried]
    if scan:
      rows = [self.stacked(key, values) for key in self.rows]
      carry, made = jax.lax.scan(step, carry, rows, length=self.length)
    else:
      of_layers: list[list[jax.Array]] = []
      for n in range(self.length):
        carry, results = step(carry, [read(some[n], values) for some in self.rows.values()])
        of_layers.append(results)
      made = list(zip(*of_layers, strict=True))
    found = {var: carry[n] for var, n in self.final.items()}
    for some, xs in zip(self.made.values(), made, strict=True):
      found |= {var: xs[n] for n, var in enumerate(some) if var in self.used and var not in found}
    return found


_BETWEEN = "changes an input of the second"


def move_inside(reasons: Iterable[str]) -> str:
  """What to do about operations between layers, such as `x = x + block(x)`; empty without such a reason."""
  if not any(reason.endswith(_BETWEEN) for reason in reasons):
    return ""
  return "move it into the layer, so that its __call__ returns x + self.inner(x), for example.\nOtherwise "


class Stacks:
  """A program with its chains of layers.

  A chain of at least `scan_from` layers becomes a scan (None: none does). Other chains are evaluated unit by
  unit where `remat` recomputes a unit as one.
  """

  def __init__(self, jaxpr: Program, scan_from: int | None = 2, remat: Remat = AS_WRITTEN):
    self.jaxpr = without_copies(jaxpr)
    self.body = open_jaxpr(self.jaxpr)
    self.eqns: list[JaxprEqn] = list(self.body.eqns)
    marks = [n for n, eqn in enumerate(self.eqns) if is_marked(eqn)]
    bodies = {id(program_of(self.eqns[n])): program_of(self.eqns[n]) for n in marks}
    identities = {key: identity(body) for key, body in bodies.items()}
    self._programs = {n: identities[id(program_of(self.eqns[n]))] for n in marks}
    self._remat = remat
    group, loops = max(remat.every, remat.group), is_joint(remat)
    self.chains: dict[int, Chain] = {}
    self.reasons: list[str] = []
    periods = range(group, group * MAX_PERIOD + 1, group)
    short = 0  # up to this call, the layers belong to a chain that is too short
    while marks:
      chains = [self._chain(marks, period) for period in periods if period <= len(marks)]
      chains = [chain for chain in chains if chain.units]
      again = [chain for chain in chains if self._is_passed_on(chain)]
      found = max(again, key=lambda chain: (len(chain.calls), -self._stacked(chain)), default=None)
      if found is not None and scan_from is not None:
        found.scan = len(found.calls) >= scan_from
        if not found.scan and marks[0] >= short:
          names, short = self.paths(found), found.calls[-1]
          self.reasons.append(
            f"{names[0]} to {names[-1]}: {len(names)} layers, and a scan has {scan_from} or more"
          )
      if found is not None and not found.scan and not loops:  # only units that are recomputed stay chains
        found = None
      elif found is None and loops and group > 1 and chains:
        found = chains[0]  # one unit, without an equal
      if found is not None:
        self.chains[marks[0]] = found
      used = len(found.calls) if found is not None else 1
      if scan_from is not None and used < len(marks) and marks[used - 1] >= short:
        self.reasons += filter(None, [self._why(marks[used - 1], marks[used])])
      marks = marks[used:]

  def __call__(self, inputs: Sequence[jax.Array], rule: Rule) -> list[jax.Array]:
    """The results of the program for its arrays; the rule is for operations outside of chains."""
    values = values_of(self.jaxpr, inputs)
    done: set[int] = set()

    def evaluate(numbers: Collection[int]) -> None:
      run_operations([self.eqns[n] for n in numbers if n not in done], values, rule)
      done.update(numbers)

    for n in range(len(self.eqns)):
      chain = self.chains.get(n)
      if chain is not None and n not in done:
        calls = {*chain.calls}
        between = range(n, max(calls))
        evaluate([m for m in between if m not in calls and not chain.dependents & {*self.eqns[m].outvars}])
        found = self.stack(chain, scan=chain.scan).run(values, scan=chain.scan)
        done |= calls
        values.update(self._joint(found, values, done) if chain.scan else found)
      evaluate([n])
    # A result that the program did not change is the input.
    values.update(zip(self.body.invars, inputs, strict=True))
    return [read(var, values) for var in self.body.outvars]

  def largest(self) -> Stack:
    """The equal layers, marked calls or scans, that hold the most bytes; `TrainError` if there are none."""
    stacks = [self.stack(chain) for chain in self.chains.values() if len(chain.units) > 1]
    stacks += [self._of_scan(n) for n, eqn in enumerate(self.eqns) if _is_stack(eqn)]
    found = max(stacks, key=lambda stack: stack.nbytes, default=None)
    if found is None:
      inside = [eqn for eqn in self.eqns if is_or_has_layers(eqn) and not is_marked(eqn)]
      hidden = [
        f"a pipeline does not reach layers inside {eqn.primitive.name} ({place_of(eqn)})" for eqn in inside
      ]
      fix = 'layers="decoder.blocks.*" names them; or nxp.parallel.pipeline on layers of your own.'
      if any(map(is_checkpoint, inside)):
        fix = "@nnx.remat on the __call__ of their class, instead of jax.checkpoint around calls of them."
      raise TrainError(
        "a pipeline needs consecutive equal layers, and the loss has none.",
        details="\n".join([*dict.fromkeys(hidden), *self.reasons][:6]),
        fix=move_inside(self.reasons) + fix,
      )
    if found.scanned:
      _check_reached(self._remat, "offload")
    return found

  def stack(self, chain: Chain, *, scan: bool = True) -> Stack:
    """The layers of a chain, and their connections with each other and with the rest of the program."""
    inputs, results = ([places(unit) for unit in chain.units] for places in (self._inputs, self._results))
    slots, linked = [*chain.carried], {*chain.inner, *chain.carried, *chain.same}
    rows = [place for place in inputs[0] if place not in linked]
    numbers, paths = frozenset(chain.calls), self.paths(chain)
    used = self.used(numbers)
    final = {results[-1][chain.carried[slot]]: n for n, slot in enumerate(slots)}
    made = sorted({p for unit in results for p, var in unit.items() if var in used and var not in final})

    def step(same: Mapping[Place, jax.Array]) -> Body:
      def body(
        carry: Sequence[jax.Array], row: Sequence[jax.Array]
      ) -> tuple[list[jax.Array], list[jax.Array]]:
        given = {**same, **dict(zip(slots, carry, strict=True)), **dict(zip(rows, row, strict=True))}
        found: dict[Place, jax.Array] = {}
        for c, n in enumerate(chain.units[0]):
          places = [(c, j) for j in range(len(self.eqns[n].invars))]
          values = [found[chain.inner[place]] if place in chain.inner else given[place] for place in places]
          results = layer_in_unit(self.eqns[n], values, self._remat, in_scan=scan)
          found.update({(c, p): x for p, x in enumerate(results)})
        return [found[chain.carried[slot]] for slot in slots], [found[place] for place in made]

      return checkpoint_unit(body, self._remat, in_scan=scan)

    return Stack(
      numbers=numbers,
      length=len(chain.units),
      name=f"{paths[0]} to {paths[-1]}",
      same={place: inputs[0][place] for place in chain.same},
      carried=[inputs[0][slot] for slot in slots],
      final=final,
      rows={place: [unit[place] for unit in inputs] for place in rows},
      made={place: [unit[place] for unit in results] for place in made},
      step=step,
      used=used,
      size=len(chain.units[0]),
      narrow={place: self._read_as(chain.units[0][place[0]], place[1]) for place in rows},
    )

  def _of_scan(self, number: int) -> Stack:
    """The layers of a scan of the model."""
    eqn = self.eqns[number]
    counts, length = scan_counts(eqn), eqn.params["length"]
    same, carried, rows = counts.split(eqn.invars)
    keys, run = counts.split(range(len(eqn.invars))), as_function(eqn.params["jaxpr"])
    return Stack(
      numbers=frozenset((number,)),
      length=length,
      name=f"a scan of {length}",
      same=dict(zip(keys[0], same, strict=True)),
      carried=carried,
      final={var: n for n, var in enumerate(eqn.outvars[: counts.carried])},
      rows={key: [row] for key, row in zip(keys[2], rows, strict=True)},
      made={n: [var] for n, var in enumerate(eqn.outvars[counts.carried :])},
      step=lambda same: step_of_scan(eqn, [same[key] for key in keys[0]], run),
      used=self.used((number,)),
      scanned=True,
    )

  def _is_passed_on(self, chain: Chain) -> bool:
    """Whether units pass activations on; two towers side by side may share only the count of random keys."""
    first = self._inputs(chain.units[0]) if chain.units else {}
    return any(is_inexact(first[place].aval) for place in chain.carried)

  def _stacked(self, chain: Chain) -> int:
    """The bytes of a chain's rows; two alternating shared layers have no rows in units of two."""
    linked = {*chain.inner, *chain.carried, *chain.same}
    first = self._inputs(chain.units[0])
    return len(chain.units) * sum(nbytes(var.aval) for place, var in first.items() if place not in linked)

  def paths(self, chain: Chain) -> list[str]:
    """The paths of the layers of a chain, in the order of their calls."""
    return [layer_of(self.eqns[n]) for n in chain.calls]

  def _why(self, before: int, after: int) -> str:
    """Why two successive calls are not in one chain."""
    first, second = self.eqns[before], self.eqns[after]
    names = f"{layer_of(first)} and {layer_of(second)}"
    if kind_of_layer(first) != kind_of_layer(second):
      return ""  # nobody takes them for equal
    # It is empty where `Remat(every=2)` has a checkpoint in one of them only.
    how = self._programs[before] != self._programs[after] and _difference(
      program_of(first), program_of(second)
    )
    if how:
      return f"{names} differ{how}"
    between = self.eqns[before + 1 : after]
    later = dependents(between, first.outvars)
    if not any(among(var, later) for var in second.invars):
      return f"{layer_of(second)} reads no result of {layer_of(first)}"
    for eqn in reversed(between):
      if later & {*eqn.outvars} and any(among(var, eqn.outvars) for var in second.invars):
        return f"{eqn.primitive.name} between {names} {_BETWEEN}"
    return f"{names} read other results of earlier calls than their neighbours, or one layer is left over"

  def _inputs(self, unit: Sequence[int]) -> dict[Place, Var]:
    return {(c, j): var for c, n in enumerate(unit) for j, var in enumerate(self.eqns[n].invars)}

  def _results(self, unit: Sequence[int]) -> dict[Place, Var]:
    return {(c, p): var for c, n in enumerate(unit) for p, var in enumerate(self.eqns[n].outvars)}

  def _chain(self, marks: Sequence[int], period: int) -> Chain:
    """The longest chain from the first mark on, of units of `period` calls."""
    first = tuple(marks[:period])
    chain = Chain([], {}, {}, set(), set())
    given, before, after = self._inputs(first), {}, -1
    for start in range(0, len(marks) - period + 1, period):
      unit = tuple(marks[start : start + period])
      if any(self._programs[n] != self._programs[m] for n, m in zip(unit, first, strict=True)):
        break
      own, wanted = {var: place for place, var in self._results(unit).items()}, self._inputs(unit)
      later = dependents(self.eqns[after + 1 : unit[-1] + 1], chain.dependents | own.keys())
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

  def _joint(self, found: Values, values: Values, done: Collection[int]) -> Values:
    """The results of a chain, and of single operations after it, with gradients behind one barrier.

    So the gradients of a head are complete before the backward pass of the layers starts. A compiler that
    computes them after it keeps the gradient of all logits meanwhile.
    """
    apart = {n for chain in self.chains.values() for n in chain.calls} | {*done}
    rest = [eqn for n, eqn in enumerate(self.eqns) if n not in apart]
    reads = {var for eqn in rest for var in variables(eqn.invars)}
    later = {var: x for var, x in values.items() if var in reads}
    tied = {var: x for var, x in {**later, **found}.items() if is_inexact(var.aval)}
    return {**found, **dict(zip(tied, _with_joint_gradients(*tied.values()), strict=True))}

  def used(self, calls: Collection[int]) -> set[Var]:
    """The variables that are read outside of these calls."""
    readers = [eqn.invars for n, eqn in enumerate(self.eqns) if n not in calls]
    return {var for some in (*readers, self.body.outvars) for var in variables(some)}

  def _read_as(self, call: int, position: int) -> DTypeLike | None:
    """The narrower dtype to which a call casts an input before all else; None where it does not."""
    eqn = self.eqns[call]
    for is_outer in (is_marked, is_checkpoint):  # `layer_in_unit` traces these two anew
      if is_outer(eqn):
        program = open_jaxpr(program_of(eqn))
        var = program.invars[position]
        reads = [(use, n) for use in program.eqns for n, x in enumerate(use.invars) if x is var]
        if len(reads) != 1:
          return None
        ((eqn, position),) = reads
    if eqn.primitive.name != "convert_element_type":
      return None
    dtype = eqn.params["new_dtype"]
    return dtype if dtype.itemsize < eqn.invars[0].aval.dtype.itemsize else None


def layer_in_unit(eqn: JaxprEqn, inputs: Sequence[Value], remat: Remat, *, in_scan: bool) -> Sequence[Value]:
  """The results of a marked call in a unit: without its own checkpoint if the unit is recomputed as one."""

  def rule(inner: JaxprEqn, values: list[Value]) -> Sequence[Value]:
    if not is_checkpoint(inner) or not (in_scan or is_joint(remat)):
      return DEFAULT
    body: Any = lambda *xs: interpret(program_of(inner), xs)  # noqa: E731
    # Traced anew: the inputs may be narrower, see `_read_as`.
    again = jax.checkpoint(body, policy=params_of(inner)["policy"], prevent_cse=False)
    return (body if is_joint(remat) else again)(*values)

  return interpret(program_of(eqn), inputs, rule)


def as_called(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
  """A rule that calls layers without their marks: a loss may be part of a loss with other options."""
  return interpret(program_of(eqn), inputs) if is_marked(eqn) else DEFAULT


def scan_of_layers(eqn: JaxprEqn, inputs: list[jax.Array], remat: Remat) -> Sequence[jax.Array]:
  """The results of a scan of the model over layers, whose marks have their policy; or its carry offloaded."""
  _check_reached(remat)
  if remat.policy != "offload":
    return bind(eqn, inputs)
  fixed, carry, rows = scan_counts(eqn).split(inputs)

  def layers(inner: JaxprEqn, values: list[Value]) -> Sequence[Value]:
    return layer_in_unit(inner, values, remat, in_scan=True) if is_marked(inner) else DEFAULT

  step = step_of_scan(eqn, fixed, lambda *xs: interpret(eqn.params["jaxpr"], xs, layers))
  carry, made = jax.lax.scan(
    checkpoint_unit(step, remat, in_scan=True),
    carry,
    rows,
    length=eqn.params["length"],
    reverse=eqn.params["reverse"],
    unroll=eqn.params["unroll"],
  )
  return [*carry, *made]


def _check_reached(remat: Remat, *policies: str) -> None:
  """Refuses what a scan of the model does not do: it has one body for all its layers."""
  if remat.needs_layers and (max(remat.every, remat.group) > 1 or remat.policy in policies):
    raise TrainError(
      f"remat={str(remat)!r} does not apply to a scan of the model.",
      details="it has one body for all its layers" + "; it is run as a pipeline" * bool(policies),
      fix='remat="full"; or Remat and "offload" with layers in an nnx.List.',
    )


def step_of_scan(eqn: JaxprEqn, fixed: Sequence[jax.Array], body: Callable[..., Sequence[jax.Array]]) -> Body:
  """A step of a scan with another body, a function of flat arrays, given its constants."""
  count = scan_counts(eqn).carried

  def step(carry: Sequence[jax.Array], row: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    out = body(*fixed, *carry, *row)
    return [*out[:count]], [*out[count:]]

  return step


def _is_stack(eqn: JaxprEqn) -> bool:
  """Whether an operation may be a scan over layers, in order: it has floating rows, two or more."""
  if eqn.primitive.name != "scan" or eqn.params["length"] < 2 or eqn.params["reverse"]:
    return False
  _, _, rows = scan_counts(eqn).split(eqn.invars)
  return any(is_inexact(var.aval) for var in rows) and not repeats_layers(eqn)


def variables(some: Iterable[Var]) -> Iterator[Var]:
  """The variables that are not constants."""
  return (var for var in some if not is_literal(var))


@jax.custom_jvp
def _with_joint_gradients(*xs: jax.Array) -> tuple[jax.Array, ...]:
  """The arrays, with a barrier: no gradient is used before all of them are computed."""
  return xs


def _tangents(
  xs: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  is_zero = [isinstance(x, jax.custom_derivatives.SymbolicZero) for x in tangents]
  tied = iter(
    jax.lax.optimization_barrier([x for x, zero in zip(tangents, is_zero, strict=True) if not zero])
  )
  return xs, tuple(x if zero else next(tied) for x, zero in zip(tangents, is_zero, strict=True))


_with_joint_gradients.defjvp(_tangents, symbolic_zeros=True)


def _difference(first: Program, second: Program) -> str:
  """How two programs of layers differ."""
  one, two = open_jaxpr(first), open_jaxpr(second)
  given = [collections.Counter(var.aval.str_short() for var in program.invars) for program in (one, two)]
  if given[0] != given[1]:
    texts = [
      f"{', '.join((some - other).elements()) or 'none'} ({some.total()} arrays)"
      for some, other in (given, given[::-1])
    ]
    numbers = all(text.endswith("[]") for text in ((given[0] - given[1]) + (given[1] - given[0])).elements())
    hint = "; a number that becomes an array starts from jnp.zeros(()) in the loss" if numbers else ""
    return f" in the arrays that they get: {texts[0]} / {texts[1]}{hint}"
  bodies = [inline_calls(program, is_checkpoint) for program in (first, second)]
  for pair in itertools.zip_longest(*map(equations, bodies)):
    texts = [_told(eqn) for eqn in pair]
    if texts[0] != texts[1]:
      return f": {texts[0]} / {texts[1]}"
    if None not in pair and (names := differing(*pair)):
      return f": {texts[0]} with another {' and '.join(names)}"
  if identity(bodies[0]) == identity(bodies[1]):
    return ""
  return " in a constant, or in a rule of jax.custom_jvp or jax.custom_vjp"


def differing(one: JaxprEqn, other: JaxprEqn) -> list[str]:
  """The parameters in which two operations of one kind differ, unless they run programs."""
  if programs(one):
    return []
  a, b = ({k: Keys(value_of_constant).of(v) for k, v in eqn.params.items()} for eqn in (one, other))
  return [k for k in a if k not in DERIVATIVES and a[k] != b.get(k)]


def _told(eqn: JaxprEqn | None) -> str:
  """An operation with its numbers and plain parameters."""
  if eqn is None:
    return "no more"
  numbers = [f"{var.val}" for var in eqn.invars if is_literal(var)]
  plain = [f"{k}={v}" for k, v in sorted(eqn.params.items()) if k != "name" and _is_plain(v)]
  return textwrap.shorten(" ".join([eqn.primitive.name, *numbers, *plain]), 80, placeholder=" ...")


def _is_plain(x: object) -> bool:
  return isinstance(x, (bool, int, float, str)) or (isinstance(x, tuple) and all(map(_is_plain, x)))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _is_same(a: Var, b: Var) -> bool:
  if is_literal(a) and is_literal(b):
    return bool(a.val == b.val)
  return a is b
