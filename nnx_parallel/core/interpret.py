"""Interprets traces (jaxprs): one walk through the operations of a program, for every purpose.

A rule says what happens to an operation. If it returns `DEFAULT`, the walk handles the operation:
- `interpret` runs a program with arrays, or with values that represent arrays. Default: the operation itself.
- `facts_of` propagates facts about values, without values. Default: the facts from the operation's own
  programs; a loop is walked until the facts of its carry stay the same.
- `Interpreter` does both, also inside calls, checkpoints, loops, branches, custom rules and `shard_map`:
  their programs are traced again under the rule. `rewrite` does this for a rule without facts.

Only `wiring` knows how the programs inside an operation are connected with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeGuard, TypeVar

import jax
from jax.core import ShapedArray
from jax.extend import core

from nnx_parallel.core.jaxprs import (
  CALLS,
  at_place_of,
  bind,
  constants,
  has_rule,
  is_checkpoint,
  map_shards_as,
  open_jaxpr,
  params_of,
  program_of,
  scan_counts,
  trace_like,
)
from nnx_parallel.core.types import ClosedJaxpr, JaxprEqn, P, Program, Value, Var

F = TypeVar("F")
ROUNDS = 64
"""The maximum number of walks of a loop, until the facts of its carry stay the same."""
DEFAULT: Any = object()
"""The result of a rule for an operation that it leaves to the walk."""
Values: TypeAlias = dict[Var, Value]
Rule: TypeAlias = Callable[[JaxprEqn, list[Value]], Sequence[Value]]
"""`(operation, values of its inputs) -> values of its results`, or `DEFAULT`."""


def _same(x: Value) -> Value:
  return x


def is_literal(var: Var) -> TypeGuard[core.Literal]:
  """Whether an input of an operation is a number that is written in the program."""
  return isinstance(var, core.Literal)


def read(var: Var, values: Mapping[Value, Value], lift: Callable[[jax.Array], Value] = _same) -> Value:
  """The value of an input of an operation; `lift` makes such a value of an array, for literals."""
  return lift(var.val) if isinstance(var, core.Literal) else values[var]


def values_of(jaxpr: Program, inputs: Sequence[Value], lift: Callable[[jax.Array], Value] = _same) -> Values:
  """The values of a program's constants and of its first inputs, or all, by variable."""
  body = open_jaxpr(jaxpr)
  values: Values = dict(zip(body.constvars, map(lift, constants(jaxpr)), strict=True))
  values.update(zip(body.invars[: len(inputs)], inputs, strict=True))
  return values


def walk(
  eqns: Iterable[JaxprEqn], values: Values, step: Rule, lift: Callable[[jax.Array], Value] = _same
) -> None:
  """Adds the results of operations, in order, to `values`: the results of `step` for each operation."""
  for eqn in eqns:
    results = step(eqn, [read(var, values, lift) for var in eqn.invars])
    values.update(zip(eqn.outvars, results, strict=True))


def run_operations(
  eqns: Iterable[JaxprEqn], values: Values, rule: Rule = bind, lift: Callable[[jax.Array], Value] = _same
) -> None:
  """Runs operations in order, with the source line and name stack of each; adds their results to `values`."""

  def step(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    with at_place_of(eqn):
      found = rule(eqn, inputs)
      return bind(eqn, inputs) if found is DEFAULT else found

  walk(eqns, values, step, lift)


def interpret(
  jaxpr: Program, inputs: Sequence[Value], rule: Rule = bind, lift: Callable[[jax.Array], Value] = _same
) -> list[Value]:
  """The results of a program, one operation at a time, for one value of each input."""
  # `rule` gives the results of an operation, or `DEFAULT`: the operation itself, on arrays. `lift` makes a
  # value from an array, for literals and constants.
  values = values_of(jaxpr, inputs, lift)
  run_operations(open_jaxpr(jaxpr).eqns, values, rule, lift)
  return [read(var, values, lift) for var in open_jaxpr(jaxpr).outvars]


def inline_calls(jaxpr: Program, opens: Callable[[JaxprEqn], bool]) -> ClosedJaxpr:
  """A closed jaxpr with the operations of some calls in their place."""

  def rule(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    return interpret(program_of(eqn), inputs, rule) if opens(eqn) else DEFAULT

  return trace_like(lambda *inputs: interpret(jaxpr, inputs, rule), jaxpr)


@dataclasses.dataclass(frozen=True, eq=False)
class Inner:
  """A program that an operation runs."""

  key: str  # the parameter of the operation that holds it; the branches of a cond share one parameter
  program: Program  # the program, closed or not
  inputs: Sequence[int]  # for each input of the program, the position of the operation's input that it reads
  # whether the operation returns the program's results; a while does not return its condition
  gives: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Wiring:
  """How the programs that an operation runs are connected with it."""

  inner: Sequence[Inner] = ()  # the programs; empty for an operation that JAX runs as one unit (a kernel)
  # in a loop, a result -> the input that it is in the next step
  carried: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])
  rows: Collection[int] = ()  # inputs that a scan reads row by row
  stacked: Collection[int] = ()  # results that a scan makes row by row


def wiring(eqn: JaxprEqn) -> Wiring:
  """How the programs inside an operation are connected with it."""
  name, params, count = eqn.primitive.name, params_of(eqn), len(eqn.invars)
  if name == "scan":
    _, carried, rows = scan_counts(eqn).split(range(count))
    inner = [Inner("jaxpr", params["jaxpr"], range(count))]
    return Wiring(inner, dict(enumerate(carried)), {*rows}, range(len(carried), len(eqn.outvars)))
  if name == "while":
    asked, fixed = params["cond_nconsts"], params["body_nconsts"]
    state = range(asked + fixed, count)
    condition = Inner("cond_jaxpr", params["cond_jaxpr"], [*range(asked), *state], gives=False)
    body = Inner("body_jaxpr", params["body_jaxpr"], range(asked, count))
    return Wiring([condition, body], dict(enumerate(state)))
  if name == "cond":
    return Wiring([Inner("branches", branch, range(1, count)) for branch in params["branches"]])
  if name in (*CALLS, "shard_map") or is_checkpoint(eqn) or has_rule(eqn):
    key = next((key for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "traced") if key in params), None)
    return Wiring([] if key is None else [Inner(key, program_of(eqn), range(count))])
  return Wiring()


@dataclasses.dataclass(frozen=True)
class Facts(Generic[F]):
  """Facts about values, and how they propagate through operations, loops and branches."""

  constant: Callable[[jax.Array], F]  # the fact of a constant array of the program, given the array
  # `(operation, facts of its inputs) -> facts of its results`. For an operation that runs programs it may
  # return `DEFAULT`: the facts of the results of these programs.
  follow: Callable[[JaxprEqn, list[F]], Sequence[F]]
  # a join in the sense of lattices (equal facts give the same fact, in any order, and it soon stops growing):
  # the fact of a value that is one of two: the results of two branches, or the first carry of a loop and the
  # carry after a step
  join: Callable[[F, F], F]
  # the fact of a row in a scan, given the scan and the fact of all rows
  row: Callable[[JaxprEqn, F], F] = lambda _, fact: fact
  # the inverse: the fact of all rows, given the fact of a row
  stack: Callable[[JaxprEqn, F], F] = lambda _, fact: fact


NO_FACTS: Facts[None] = Facts(lambda _: None, lambda eqn, _: [None] * len(eqn.outvars), lambda *_: None)


def facts_of(jaxpr: Program, inputs: Sequence[F], facts: Facts[F]) -> dict[Var, F]:
  """The fact of each variable of a program, given the facts of its inputs."""
  known = values_of(jaxpr, inputs, facts.constant)
  walk(open_jaxpr(jaxpr).eqns, known, lambda eqn, some: facts_after(eqn, some, facts), facts.constant)
  return known


def facts_after(eqn: JaxprEqn, inputs: Sequence[F], facts: Facts[F]) -> Sequence[F]:
  """The facts of the results of an operation."""

  def inside(inner: Inner, inputs: list[F]) -> list[F]:
    known = facts_of(inner.program, inputs, facts)
    return [read(var, known, facts.constant) for var in open_jaxpr(inner.program).outvars]

  found = facts.follow(eqn, [*inputs])
  return through(eqn, inputs, inside, facts) if found is DEFAULT else found


def through(
  eqn: JaxprEqn, inputs: Sequence[F], inside: Callable[[Inner, list[F]], Sequence[F]], facts: Facts[F]
) -> list[F]:
  """The facts of the results of an operation that runs programs, given the facts of its inputs."""
  # `inside` gives the facts of the results of one of its programs, from those of its inputs. For a loop it is
  # called until the facts of the carry stay the same, which `join` has to ensure; the last result counts.
  wires, known = wiring(eqn), list(inputs)
  for _ in range(ROUNDS):
    arriving = [facts.row(eqn, fact) if n in wires.rows else fact for n, fact in enumerate(known)]
    found = [inside(inner, [arriving[n] for n in inner.inputs]) for inner in wires.inner]
    results = [list(some) for inner, some in zip(wires.inner, found, strict=True) if inner.gives]
    met = {n: facts.join(known[n], results[0][out]) for out, n in wires.carried.items()}
    if all(known[n] == fact for n, fact in met.items()):
      break
    known = [met.get(n, fact) for n, fact in enumerate(known)]
  else:
    raise RuntimeError(
      f"facts do not settle in {ROUNDS} rounds of {eqn.primitive.name}: `join` is not a join"
    )
  joined = results[0]
  for others in results[1:]:
    joined = [facts.join(a, b) for a, b in zip(joined, others, strict=True)]
  for out, fact in enumerate(joined):
    if out in wires.carried:
      joined[out] = known[wires.carried[out]]
    elif out in wires.stacked:
      joined[out] = facts.stack(eqn, fact)
  return joined


class Interpreter(Generic[F]):
  """Runs programs with a fact for each value, also inside the programs that operations run."""

  def __init__(self, rule: Callable[[JaxprEqn, list[Value], list[F]], Any], facts: Facts[F]):
    # Each program is traced again, once for each combination of facts; the derivative of a custom rule stays.
    # `rule`: `(operation, values of its inputs, their facts) -> (values of its results, their facts)`, or
    # `DEFAULT`: the operation as it is, but its programs under this rule.
    self._rule, self._facts = rule, facts
    # By the id of a program, with the program, so that its id stays.
    self._done: dict[Hashable, tuple[Program, list[F], Program]] = {}

  def __call__(
    self, jaxpr: Program, inputs: Sequence[Value], facts: Sequence[F]
  ) -> tuple[list[Value], list[F]]:
    """The results of a program, and their facts."""

    def step(eqn: JaxprEqn, pairs: list[tuple[Value, F]]) -> list[tuple[Value, F]]:
      inputs, facts = [x for x, _ in pairs], [fact for _, fact in pairs]
      found = self._rule(eqn, inputs, facts)
      return list(zip(*(self.default(eqn, inputs, facts) if found is DEFAULT else found), strict=True))

    pairs = list(zip(inputs, facts, strict=True))
    found = interpret(jaxpr, pairs, step, lambda x: (x, self._facts.constant(x)))
    return [x for x, _ in found], [fact for _, fact in found]

  def default(
    self, eqn: JaxprEqn, inputs: list[Value], facts: list[F]
  ) -> tuple[Sequence[Value], Sequence[F]]:
    """The results of an operation with its programs under the rule, and their facts."""
    if not is_walked(eqn):
      return bind(eqn, inputs), facts_after(eqn, facts, self._facts)
    if eqn.primitive.name == "shard_map":
      function, after = self._function(eqn.params["jaxpr"], facts)
      return map_shards_as(eqn, function, eqn.params["mesh"])(*inputs), after
    new: dict[Inner, Program] = {}

    def inside(inner: Inner, facts: list[F]) -> list[F]:
      new[inner], found = self._retrace(inner.program, facts)
      return found

    found = through(eqn, facts, inside, self._facts)
    changed: dict[str, Any] = {inner.key: program for inner, program in new.items()}
    if "branches" in changed:
      changed["branches"] = tuple(new.values())
    return bind(eqn, inputs, **changed), found

  def _retrace(self, program: Program, facts: list[F]) -> tuple[Program, list[F]]:
    key = id(program), *facts
    if key not in self._done:
      function, found = self._function(program, facts)
      made = trace_like(function, program)
      self._done[key] = open_jaxpr(made) if open_jaxpr(program) is program else made, found, program
    return self._done[key][:2]

  def _function(self, program: Program, facts: list[F]) -> tuple[Callable[..., list[Value]], list[F]]:
    """A program as a function of arrays, and the facts of its results once it has been traced."""
    found: list[F] = []

    def function(*inputs: Value) -> list[Value]:
      results, found[:] = self(program, inputs, facts)
      return results

    return function, found


def is_walked(eqn: JaxprEqn) -> bool:
  """Whether an operation runs programs that can be traced anew: they take arrays only."""
  # A custom rule that JAX keeps in an object (`call_hi_primitive`) can't.
  inner = wiring(eqn).inner
  arrays = all(isinstance(var.aval, ShapedArray) for some in inner for var in open_jaxpr(some.program).invars)
  return bool(inner) and arrays and all(some.key != "traced" for some in inner)


def rewrite(jaxpr: Program, rule: Rule) -> ClosedJaxpr:
  """The closed jaxpr of a program under a rule, also inside calls, loops, branches and custom rules."""

  def paired(eqn: JaxprEqn, inputs: list[Value], _: list[None]) -> Sequence[Value]:
    found = rule(eqn, inputs)
    return found if found is DEFAULT else (found, [None] * len(eqn.outvars))

  interpreter = Interpreter(paired, NO_FACTS)
  return trace_like(lambda *inputs: interpreter(jaxpr, inputs, [None] * len(inputs))[0], jaxpr)


def find_forwarded(jaxpr: Program) -> list[int | None]:
  """For each output, the position of the input that it is equal to; None for computed outputs."""
  # Also through calls, checkpoints, loops and branches: `nnx.remat` and `nnx.scan` return every Variable that
  # they receive. The result of a custom rule has another gradient.
  known = facts_of(jaxpr, range(len(open_jaxpr(jaxpr).invars)), _POSITIONS)
  return [read(var, known, _POSITIONS.constant) for var in open_jaxpr(jaxpr).outvars]


def _returned(eqn: JaxprEqn, _: object) -> Any:
  inside = eqn.primitive.name in (*CALLS, "scan", "while", "cond") or is_checkpoint(eqn)
  return DEFAULT if inside else [None] * len(eqn.outvars)


_POSITIONS: Facts[Hashable] = Facts(
  constant=lambda _: None,
  follow=_returned,
  join=lambda a, b: a if a == b else None,
  row=lambda eqn, fact: ("row", id(eqn), fact),
  stack=lambda eqn, fact: fact[2] if isinstance(fact, tuple) and fact[:2] == ("row", id(eqn)) else None,
)


def without_copies(jaxpr: P) -> P:
  """A jaxpr, closed or not, that reads inputs directly where an operation returns them unchanged."""
  # `nnx.jit` returns every Variable that it receives.
  inner = open_jaxpr(jaxpr)
  if inner is not jaxpr:
    return jaxpr.replace(jaxpr=without_copies(inner))
  same: dict[Var, Var] = {}

  def seen(some: Sequence[Var]) -> list[Var]:
    return [var if is_literal(var) else same.get(var, var) for var in some]

  eqns: list[JaxprEqn] = []
  for eqn in jaxpr.eqns:
    inputs = seen(eqn.invars)
    eqns.append(eqn.replace(invars=inputs))
    positions: Sequence[Any] = facts_after(eqn, range(len(inputs)), _POSITIONS)
    same.update((out, inputs[n]) for out, n in zip(eqn.outvars, positions, strict=True) if n is not None)
  return jaxpr.replace(eqns=eqns, outvars=seen(inner.outvars))
