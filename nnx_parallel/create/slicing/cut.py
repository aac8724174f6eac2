"""Cuts a traced constructor into slices: the equations behind each Variable, with equal slices grouped.

A large model is built from few initializers: 96 blocks hold 96 equal kernels, drawn from 96 keys. As one
program, each of them would be compiled again. So the constructor is traced once and the trace is cut:

1. Tiny values (keys, counters, scalars) are evaluated first, operation by operation, as eager Python would.
2. The rest is divided into *slices*: the operations behind one Variable, or behind several that share work.
   Tiny values are the inputs of a slice. Numbers in it are inputs too: slices that differ only in numbers
   (the initial scale of each layer) are equal, and the compiler cannot fold unknown numbers. With a barrier
   after each operation, a slice rounds where eager execution rounds.
3. Equal slices with equal shardings are one program: compiled once, run once for each member.

Compile time depends on the number of distinct slices instead of depth; only a single
slice needs temporaries at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from nnx_parallel.core.classes import Forest
from nnx_parallel.core.interpret import is_literal, walk
from nnx_parallel.core.jaxprs import bind, called, is_call
from nnx_parallel.core.keys import Keys
from nnx_parallel.core.types import AnyArray, Aval, ClosedJaxpr, JaxprEqn, Var

FLOATS = 64
COUNTS = 4096
"""Arrays of at most `FLOATS` floats, or `COUNTS` keys or integers (one per layer), are evaluated first."""


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
  """One of several programs that run one after another.

  Attributes:
    program: a closed jaxpr.
    reads: its inputs, as positions among the results of all earlier phases.
  """

  program: ClosedJaxpr
  reads: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
  """A variable in place of a number, or of a variable in an opened call: a call may be opened many times."""

  aval: Aval


@dataclasses.dataclass(frozen=True, eq=False)
class Slice:
  """The operations behind some outputs of the trace.

  Attributes:
    outputs: positions in the trace's outputs; several if they share work.
    results: the variables of the outputs.
    operations: in order; empty in all members of a group but the first.
    inputs: its inputs: tiny values and constants (variables), and numbers (literals).
    key: equal keys mean equal programs.
  """

  outputs: tuple[int, ...]
  results: tuple[Var, ...]
  operations: tuple[JaxprEqn, ...]
  inputs: tuple[Var, ...]
  key: Hashable


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
  """A traced constructor in slices.

  Attributes:
    prologue: the operations to evaluate first.
    constants: arrays that the constructor captured, by variable.
    given: outputs that no slice makes, because they are tiny values or constants: position -> variable.
    groups: lists of equal slices.
  """

  prologue: tuple[JaxprEqn, ...]
  constants: dict[Var, AnyArray]
  given: dict[int, Var]
  groups: tuple[tuple[Slice, ...], ...]


def cut(phases: Sequence[Phase], outputs: Sequence[int], shardings: Sequence[NamedSharding]) -> Cut:
  """Cuts a traced constructor without side effects into groups of equal slices that make these results."""
  program = _Program(phases, outputs)
  while True:
    first, members = program.split()
    if not program.open_shared_calls(members):
      break
  groups: dict[Hashable, list[Slice]] = {}
  keys = Keys()
  for outputs, operations in members:
    member = _slice(program, outputs, operations, [shardings[i] for i in outputs], keys)
    group = groups.setdefault(member.key, [])
    # The trace of a deep model is large compared with a shard; the first member's operations serve the group.
    group.append(dataclasses.replace(member, operations=()) if group else member)
  sliced = {i for outputs, _ in members for i in outputs}
  given = {i: value for i, value in enumerate(program.results) if i not in sliced}
  return Cut(tuple(first), program.constants, given, tuple(tuple(group) for group in groups.values()))


def evaluate(operations: Iterable[JaxprEqn], values: dict[Var, AnyArray], *, isolated: bool = False) -> None:
  """Runs operations in order, each under its own configuration, and adds their results to `values`.

  `isolated` is for operations under `jit`: it uses the full context of each, and keeps the compiler from
  merging floating-point operations that eager execution rounds one by one.
  """

  def eager(op: JaxprEqn, inputs: list[Var]) -> Sequence[jax.Array]:
    # Only the settings that change values: a mesh would run tiny operations on all devices.
    with jax.threefry_partitionable(op.ctx.threefry_partitionable):
      results = op.primitive.bind(*inputs, **op.primitive.get_bind_params(op.params))
    return results if op.primitive.multiple_results else [results]

  def alone(op: JaxprEqn, inputs: list[Var]) -> Sequence[jax.Array]:
    results = bind(op, inputs)
    rounds = not _is_compiled(op) and any(_is_float(value) for value in op.outvars)
    return jax.lax.optimization_barrier([*results]) if rounds else results

  walk(operations, values, alone if isolated else eager)


class _Program:
  """The operations of a trace; splits them into slices and inlines calls."""

  def __init__(self, phases: Sequence[Phase], outputs: Sequence[int]):
    self.constants: dict[Var, AnyArray] = {}
    self.operations: list[JaxprEqn] = []
    made: list[Var] = []
    for phase in phases:
      jaxpr = phase.program.jaxpr
      self.constants.update(zip(jaxpr.constvars, phase.program.consts, strict=True))
      names = dict(zip(jaxpr.invars, (made[i] for i in phase.reads), strict=True))
      for eqn in jaxpr.eqns:
        self.operations.append(eqn.replace(invars=[_rename(value, names) for value in eqn.invars]))
      made += [_rename(value, names) for value in jaxpr.outvars]
    self.results: list[Var] = [made[i] for i in outputs]

  def split(self) -> tuple[list[JaxprEqn], list[tuple[tuple[int, ...], list[JaxprEqn]]]]:
    """The operations to evaluate first; and for each slice, its outputs and its operations."""
    known: set[Var] = set(self.constants)
    first: list[JaxprEqn] = []
    maker: dict[Var, int] = {}
    for i, op in enumerate(self.operations):
      if _comes_first(op, known):
        first.append(op)
        known.update(op.outvars)
      else:
        maker.update(dict.fromkeys(op.outvars, i))
    slices = Forest()
    owner: dict[int, int] = {}
    members: dict[int, tuple[list[int], list[JaxprEqn]]] = {}
    for position, result in enumerate(self.results):
      slices.new()
      todo = [result]
      while todo:
        value = todo.pop()
        if is_literal(value) or value not in maker:
          continue
        i = maker[value]
        if i not in owner:
          todo += self.operations[i].invars
        slices.unite(position, owner.setdefault(i, position))
    for position, result in enumerate(self.results):
      if not is_literal(result) and result in maker:
        members.setdefault(slices.root(position), ([], []))[0].append(position)
    for i in sorted(owner):
      members[slices.root(owner[i])][1].append(self.operations[i])
    return first, [(tuple(outputs), operations) for outputs, operations in members.values()]

  def open_shared_calls(self, members: list[tuple[tuple[int, ...], list[JaxprEqn]]]) -> bool:
    """Replaces calls that make several Variables (a compiled sub-constructor) by their operations."""
    shared = {
      id(op)
      for outputs, operations in members
      if len(outputs) > 1
      for op in operations
      if is_call(op) and len(op.outvars) > 1
    }
    if not shared:
      return False
    renamed: dict[Var, Var] = {}
    opened: list[JaxprEqn] = []
    for op in self.operations:
      inputs = [_rename(value, renamed) for value in op.invars]
      opened += self._open(op, inputs, renamed) if id(op) in shared else [op.replace(invars=inputs)]
    self.operations = opened
    self.results = [_rename(value, renamed) for value in self.results]
    return True

  def _open(self, call: JaxprEqn, inputs: list[Var], renamed: dict[Var, Var]) -> list[JaxprEqn]:
    inner = called(call)
    names: dict[Var, Var] = dict(zip(inner.jaxpr.invars, inputs, strict=True))
    for variable, constant in zip(inner.jaxpr.constvars, inner.consts, strict=True):
      names[variable] = Value(variable.aval)
      self.constants[names[variable]] = constant
    operations: list[JaxprEqn] = []
    for eqn in inner.jaxpr.eqns:
      read_by = [_rename(value, names) for value in eqn.invars]
      # The same body may be inlined many times, so each copy gets new variables.
      names.update((made, Value(made.aval)) for made in eqn.outvars)
      operations.append(eqn.replace(invars=read_by, outvars=[names[made] for made in eqn.outvars]))
    results = [_rename(value, names) for value in inner.jaxpr.outvars]
    renamed.update(zip(call.outvars, results, strict=True))
    return operations


def _comes_first(op: JaxprEqn, known: set[Var]) -> bool:
  values = [value for value in op.invars if not is_literal(value)]
  if not all(value in known for value in values):
    return False
  if _is_compiled(op) and any(_is_float(value) for value in op.outvars):
    return False  # alone, its rounding could differ from that inside the user's compiled call
  return all(is_tiny(value.aval) for value in (*values, *op.outvars))


def is_tiny(aval: Aval) -> bool:
  """Whether an array of this shape and dtype is evaluated first; slices get all of it."""
  return math.prod(aval.shape) <= (FLOATS if jnp.issubdtype(aval.dtype, np.inexact) else COUNTS)


def _is_compiled(op: JaxprEqn) -> bool:
  """Whether an operation comes from a call that the user compiled: its numbers were constants there too."""
  return any(isinstance(value, Value) for value in op.outvars)


def _is_float(value: Var) -> bool:
  return jnp.issubdtype(value.aval.dtype, np.inexact)


def _rename(value: Var, names: dict[Var, Var]) -> Var:
  return value if is_literal(value) else names.get(value, value)


def _slice(
  program: _Program,
  outputs: tuple[int, ...],
  operations: list[JaxprEqn],
  shardings: list[NamedSharding],
  keys: Keys,
) -> Slice:
  numbers: dict[Var, int] = {}
  inputs: list[Var] = []
  code = keys.code(operations, numbers, inputs, _is_compiled)
  results = tuple(program.results[i] for i in outputs)
  targets = tuple((s.spec, s.memory_kind, numbers[r]) for s, r in zip(shardings, results, strict=True))
  return Slice(outputs, results, tuple(operations), tuple(inputs), (code, targets))
