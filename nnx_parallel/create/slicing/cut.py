"""Cuts a traced constructor into slices: the equations behind each Variable, equal ones grouped.

A large model is built from few initializers: 96 blocks hold 96 equal kernels, drawn from 96 keys. Compiled
as one program, each of them is compiled again. So the constructor is traced once and the trace is cut:

1. Tiny values (keys, counters, scalars) are evaluated first, operation by operation, as eager Python would.
2. What is left falls apart into *slices*: the operations behind one Variable, or behind several that share
   work. Tiny values are the inputs of a slice. So are the numbers written in it: slices that differ in those
   only (the initial scale of each layer) are equal, and the compiler cannot fold what it does not see. With
   a barrier after each operation, a slice rounds where eager execution rounds.
3. Equal slices with equal shardings are one program: compiled once, run once for each member.

Compile time follows the number of distinct slices instead of depth; temporaries are those of one slice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

FLOATS = 64
COUNTS = 4096
"""Arrays of at most `FLOATS` floats, or `COUNTS` keys or integers (one per layer), are evaluated first."""
_CALLS = ("jit", "pjit", "closed_call")
# How to differentiate a call: functions that differ by identity in each trace, and nothing is differentiated.
_DERIVATIVES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd")


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
  """One program of several that run one after the other.

  Attributes:
    program: a closed jaxpr.
    reads: its inputs, as positions among the results of all earlier stages.
  """

  program: Any
  reads: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
  """An array that one step makes and others read; stands beside the trace's own variables."""

  aval: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
  """One operation of the trace.

  Attributes:
    primitive: what it does.
    params: its static parameters.
    context: the trace-time configuration it ran under.
    inputs: variables, or literals: numbers written in the program.
    outputs: variables.
    compiled: it comes from inside a call that the user compiled, so its numbers were constants there too.
  """

  primitive: Any
  params: dict[str, Any]
  context: Any
  inputs: tuple[Any, ...]
  outputs: tuple[Any, ...]
  compiled: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Slice:
  """The steps behind some outputs of the trace.

  Attributes:
    outputs: positions in the trace's outputs; several when they share work.
    results: the variables of those outputs.
    steps: in order; empty in all members of a group but the first.
    inputs: what feeds it: tiny values and constants (variables), and numbers (literals).
    key: equal keys mean equal programs.
  """

  outputs: tuple[int, ...]
  results: tuple[Any, ...]
  steps: tuple[Step, ...]
  inputs: tuple[Any, ...]
  key: Hashable


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
  """A traced constructor in pieces.

  Attributes:
    first: the steps to evaluate first.
    constants: arrays that the constructor captured, by variable.
    given: outputs that no slice makes, because they are tiny values or constants: position -> variable.
    groups: lists of equal slices.
  """

  first: tuple[Step, ...]
  constants: dict[Any, Any]
  given: dict[int, Any]
  groups: tuple[tuple[Slice, ...], ...]


def cut(stages: Sequence[Stage], outputs: Sequence[int], shardings: Sequence[NamedSharding]) -> Cut:
  """Cuts a traced constructor into groups of equal slices.

  Args:
    stages: the traced constructor, without side effects.
    outputs: which results of all stages are wanted; each is one array of the model.
    shardings: the sharding of each output.

  Returns:
    The pieces.
  """
  program = _Program(stages, outputs)
  while True:
    first, members = program.split()
    if not program.open_shared_calls(members):
      break
  groups: dict[Hashable, list[Slice]] = {}
  keys = _Keys()
  for outputs, steps in members:
    piece = _slice(program, outputs, steps, [shardings[i] for i in outputs], keys)
    group = groups.setdefault(piece.key, [])
    # The trace of a deep model is large beside a shard; the first member's steps serve the whole group.
    group.append(dataclasses.replace(piece, steps=()) if group else piece)
  sliced = {i for outputs, _ in members for i in outputs}
  given = {i: value for i, value in enumerate(program.results) if i not in sliced}
  return Cut(tuple(first), program.constants, given, tuple(tuple(group) for group in groups.values()))


def evaluate(steps: Iterable[Step], values: dict[Any, Any], *, apart: bool = False) -> None:
  """Runs steps on the values that they read, each under its own configuration, adding what they make.

  Args:
    steps: in order.
    values: variable -> array, read and extended; the id of a literal stands for that literal.
    apart: this is under `jit`: run each step in its whole context, and keep the compiler from merging
      floating-point steps that eager execution rounds one by one.
  """
  for step in steps:
    operands = [read(value, values) for value in step.inputs]
    # Eagerly only what changes values: a mesh would run tiny operations on all devices.
    partitionable = jax.threefry_partitionable(step.context.threefry_partitionable)
    with step.context.manager if apart else partitionable:
      results = step.primitive.bind(*operands, **step.primitive.get_bind_params(step.params))
    if not step.primitive.multiple_results:
      results = [results]
    if apart and not step.compiled and any(_is_float(value) for value in step.outputs):
      results = jax.lax.optimization_barrier(list(results))
    values.update(zip(step.outputs, results, strict=True))


def read(value: Any, values: dict[Any, Any]) -> Any:
  """The array of a variable; a literal that nothing replaces is the number itself."""
  if isinstance(value, jex.Literal):
    return values.get(id(value), value.val)
  return values[value]


class _Program:
  """The trace as steps that can be split, and whose calls can be opened."""

  def __init__(self, stages: Sequence[Stage], outputs: Sequence[int]):
    self.constants: dict[Any, Any] = {}
    self.steps: list[Step] = []
    made: list[Any] = []
    for stage in stages:
      jaxpr = stage.program.jaxpr
      self.constants.update(zip(jaxpr.constvars, stage.program.consts, strict=True))
      names = dict(zip(jaxpr.invars, (made[i] for i in stage.reads), strict=True))
      self.steps += [
        Step(
          eqn.primitive,
          eqn.params,
          eqn.ctx,
          tuple([_rename(value, names) for value in eqn.invars]),
          tuple(eqn.outvars),
        )
        for eqn in jaxpr.eqns
      ]
      made += [_rename(value, names) for value in jaxpr.outvars]
    self.results: list[Any] = [made[i] for i in outputs]

  def split(self) -> tuple[list[Step], list[tuple[tuple[int, ...], list[Step]]]]:
    """The steps to evaluate first; and for each slice, its outputs and its steps."""
    known: set[Any] = set(self.constants)
    first: list[Step] = []
    maker: dict[Any, int] = {}
    for i, step in enumerate(self.steps):
      if _comes_first(step, known):
        first.append(step)
        known.update(step.outputs)
      else:
        maker.update(dict.fromkeys(step.outputs, i))
    slices = _Union()
    owner: dict[int, int] = {}
    for position, result in enumerate(self.results):
      todo = [result]
      while todo:
        value = todo.pop()
        if isinstance(value, jex.Literal) or value not in maker:
          continue
        i = maker[value]
        slices.join(position, owner.setdefault(i, position))
        if owner[i] == position and not slices.seen(i):
          todo += self.steps[i].inputs
    members: dict[int, list[Step]] = {}
    for i in sorted(owner):
      members.setdefault(slices.root(owner[i]), []).append(self.steps[i])
    return first, [(tuple(outputs), members[root]) for root, outputs in slices.sets().items()]

  def open_shared_calls(self, members: list[tuple[tuple[int, ...], list[Step]]]) -> bool:
    """Replaces calls that make several Variables (a compiled sub-constructor) by what is in them."""
    shared = {
      id(step)
      for outputs, steps in members
      if len(outputs) > 1
      for step in steps
      if step.primitive.name in _CALLS and len(step.outputs) > 1
    }
    if not shared:
      return False
    renamed: dict[Any, Any] = {}
    opened: list[Step] = []
    for step in self.steps:
      inputs = tuple(_rename(value, renamed) for value in step.inputs)
      step = dataclasses.replace(step, inputs=inputs) if id(step) not in shared else step
      opened += [step] if id(step) not in shared else self._open(step, inputs, renamed)
    self.steps = opened
    self.results = [_rename(value, renamed) for value in self.results]
    return True

  def _open(self, call: Step, inputs: tuple[Any, ...], renamed: dict[Any, Any]) -> list[Step]:
    inner = call.params["jaxpr"]
    names: dict[Any, Any] = dict(zip(inner.jaxpr.invars, inputs, strict=True))
    for variable, constant in zip(inner.jaxpr.constvars, inner.consts, strict=True):
      names[variable] = Value(variable.aval)
      self.constants[names[variable]] = constant
    steps: list[Step] = []
    for eqn in inner.jaxpr.eqns:
      read_by = tuple(_rename(value, names) for value in eqn.invars)
      # The same body may be opened many times, so each copy gets variables of its own.
      names.update((made, Value(made.aval)) for made in eqn.outvars)
      made_by = tuple(names[made] for made in eqn.outvars)
      steps.append(Step(eqn.primitive, eqn.params, eqn.ctx, read_by, made_by, compiled=True))
    results = [_rename(value, names) for value in inner.jaxpr.outvars]
    renamed.update(zip(call.outputs, results, strict=True))
    return steps


class _Union:
  """Disjoint sets of outputs that share steps."""

  def __init__(self) -> None:
    self.parent: dict[int, int] = {}
    self.visited: set[int] = set()

  def seen(self, step: int) -> bool:
    """Whether this step was visited before; it is from now on."""
    before = step in self.visited
    self.visited.add(step)
    return before

  def root(self, i: int) -> int:
    while self.parent.setdefault(i, i) != i:
      self.parent[i] = self.parent[self.parent[i]]
      i = self.parent[i]
    return i

  def join(self, a: int, b: int) -> None:
    self.parent[self.root(a)] = self.root(b)

  def sets(self) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for i in sorted(self.parent):
      found.setdefault(self.root(i), []).append(i)
    return found


def _comes_first(step: Step, known: set[Any]) -> bool:
  values = [value for value in step.inputs if not isinstance(value, jex.Literal)]
  if not all(value in known for value in values):
    return False
  if step.compiled and any(_is_float(value) for value in step.outputs):
    return False  # alone, its rounding could differ from that inside the user's compiled call
  return all(is_tiny(value.aval) for value in (*values, *step.outputs))


def is_tiny(aval: Any) -> bool:
  """Whether an array of this shape and dtype is evaluated first, and given whole to the slices."""
  return math.prod(aval.shape) <= (FLOATS if jnp.issubdtype(aval.dtype, np.inexact) else COUNTS)


def _is_float(value: Any) -> bool:
  return jnp.issubdtype(value.aval.dtype, np.inexact)


def _rename(value: Any, names: dict[Any, Any]) -> Any:
  return value if isinstance(value, jex.Literal) else names.get(value, value)


def _slice(
  program: _Program, outputs: tuple[int, ...], steps: list[Step], shardings: list[NamedSharding], keys: _Keys
) -> Slice:
  numbers: dict[Any, int] = {}
  inputs: list[Any] = []
  code: list[Hashable] = []
  for step in steps:
    operands: list[Hashable] = []
    for value in step.inputs:
      if isinstance(value, jex.Literal):
        if step.compiled:
          operands.append(keys.literal(value))
          continue
        inputs.append(value)
        operands.append(("number", str(value.aval)))
      elif value in numbers:
        operands.append(numbers[value])
      else:
        numbers[value] = len(numbers)
        inputs.append(value)
        operands.append((numbers[value], str(value.aval)))
    for value in step.outputs:
      numbers[value] = len(numbers)
    code.append((step.primitive, keys.params(step.params), keys.context(step.context), tuple(operands)))
  results = tuple(program.results[i] for i in outputs)
  targets = tuple((s.spec, s.memory_kind, numbers[r]) for s, r in zip(shardings, results, strict=True))
  return Slice(outputs, results, tuple(steps), tuple(inputs), (tuple(code), targets))


class _Keys:
  """Hashable stand-ins for the static parts of a program; equal only if the parts are equal."""

  def __init__(self) -> None:
    self.bodies: dict[int, int] = {}
    self.numbers: dict[Hashable, int] = {}

  def params(self, params: dict[str, Any]) -> Hashable:
    return tuple((k, self.of(v)) for k, v in sorted(params.items()) if k not in _DERIVATIVES)

  def context(self, context: Any) -> Hashable:
    return context.compute_type, context.threefry_partitionable, self.of(context.xla_metadata)

  def literal(self, literal: Any) -> Hashable:
    return str(literal.aval), np.asarray(literal.val).tobytes()

  def of(self, value: Any) -> Hashable:
    if hasattr(value, "eqns"):
      if id(value) not in self.bodies:  # jax traces equal calls once, so most bodies are the same object
        self.bodies[id(value)] = self.numbers.setdefault(self._body(value), len(self.numbers))
      return "body", self.bodies[id(value)]
    if isinstance(value, (tuple, list)):
      return type(value).__name__, tuple(self.of(item) for item in value)
    if isinstance(value, dict):
      return tuple((k, self.of(v)) for k, v in value.items())
    try:
      hash(value)
    except TypeError:
      # What cannot be hashed equals nothing but itself: not grouped, and still right.
      return type(value), id(value)
    return type(value), value

  def _body(self, body: Any) -> Hashable:
    jaxpr, constants = getattr(body, "jaxpr", body), getattr(body, "consts", ())
    numbers: dict[Any, int] = {}
    for value in (*jaxpr.constvars, *jaxpr.invars):
      numbers[value] = len(numbers)
    code: list[Hashable] = [str(value.aval) for value in numbers]
    for eqn in jaxpr.eqns:
      operands = tuple(self._operand(value, numbers) for value in eqn.invars)
      for value in eqn.outvars:
        numbers[value] = len(numbers)
      code.append((eqn.primitive, self.params(eqn.params), self.context(eqn.ctx), operands))
    results = tuple(self._operand(value, numbers) for value in jaxpr.outvars)
    return tuple(code), results, tuple(map(id, constants))

  def _operand(self, value: Any, numbers: dict[Any, int]) -> Hashable:
    return self.literal(value) if isinstance(value, jex.Literal) else numbers[value]
