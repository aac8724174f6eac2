"""Hashable keys for programs: equal only if the programs are equal."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Generator, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from nnx_parallel.core.jaxprs import (
  constants,
  gradient_of,
  has_rule,
  inner_equations,
  is_tracer,
  open_jaxpr,
)
from nnx_parallel.core.nodes import is_key
from nnx_parallel.core.types import JaxprEqn, Program, Var

# How to differentiate a call: functions that differ by identity in each trace.
DERIVATIVES = (
  *("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees", "debug_info"),
  *("jvp_rule", "fwd", "remat_rules", "bwd_accums"),  # of `jax_custom_jvp3` and `jax_custom_vjp3`
)


def identity(jaxpr: Program) -> Hashable:
  """The identity of a jaxpr, with constants by value, and gradients that have custom rules."""
  return Keys(value_of_constant, rules=True, shared=False).of(jaxpr)


def value_of_constant(x: jax.Array | np.ndarray) -> Hashable:
  """The type and the bytes of an array; for a tracer, its identity."""
  if is_tracer(x):
    return id(x)
  if is_key(jnp.result_type(x)):
    x = jax.random.key_data(x)
  return str(jnp.result_type(x)), np.shape(x), np.asarray(x).tobytes()


class Keys:
  """Keys for the static parts of programs."""

  def __init__(
    self, of_constant: Callable[[jax.Array], Hashable] = id, *, rules: bool = False, shared: bool = True
  ):
    self._of_constant = of_constant  # the key of a constant that a program carries
    self._rules = rules  # whether gradients by `jax.custom_jvp` and `jax.custom_vjp` are compared now
    self._shared = shared  # whether equal inner programs get a number: only keys of one object compare
    # By the id of a program, with the program, so that its id stays.
    self._bodies: dict[tuple[int, bool], tuple[Program, Hashable]] = {}
    self._numbers: dict[Hashable, int] = {}

  def params(self, params: dict[str, Any]) -> Hashable:
    """Those of the static parameters of an operation."""
    return tuple((k, self.of(v)) for k, v in sorted(params.items()) if k not in DERIVATIVES)

  def _params(self, eqn: JaxprEqn) -> Hashable:
    # A rule inside of these cannot be traced separately: it may use an axis of the mesh.
    if eqn.primitive.name not in ("shard_map", "pallas_call"):
      return self.params(eqn.params)
    with self._without_rules():
      return self.params(eqn.params)

  @contextlib.contextmanager
  def _without_rules(self) -> Generator[None]:
    before, self._rules = self._rules, False
    try:
      yield
    finally:
      self._rules = before

  def context(self, context: Any) -> Hashable:
    """The key of the configuration that an operation was traced under."""
    return context.compute_type, context.threefry_partitionable, self.of(context.xla_metadata)

  def literal(self, literal: core.Literal) -> Hashable:
    """The key of a number in a program."""
    return str(literal.aval), np.asarray(literal.val).tobytes()

  def of(self, value: Any) -> Hashable:
    """The key of a program, or of another parameter."""
    if hasattr(open_jaxpr(value), "eqns"):  # a program, or a traced program
      place = id(value), self._rules
      if place not in self._bodies:  # jax traces equal calls once, so most bodies are the same object
        key = self._body(value)
        if self._shared:
          key = self._numbers.setdefault(key, len(self._numbers))
        self._bodies[place] = value, key
      return "body", self._bodies[place][1]
    if isinstance(value, (tuple, list)):
      return type(value).__name__, tuple(self.of(item) for item in value)
    if isinstance(value, dict):
      return tuple((k, self.of(v)) for k, v in value.items())
    if isinstance(value, np.ndarray):
      return value_of_constant(value)
    if hasattr(value, "in_avals") and hasattr(value, "params"):  # see `jaxprs.params_of`
      return type(value), self.params(value.params)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # the grid of a kernel holds programs
      fields = [field.name for field in dataclasses.fields(value) if field.name not in DERIVATIVES]
      return type(value), tuple((name, self.of(getattr(value, name, None))) for name in fields)
    return _key_of_value(value)

  def _body(self, body: Program) -> Hashable:
    jaxpr = open_jaxpr(body)
    numbers = {value: i for i, value in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    shapes = [str(value.aval) for value in numbers]
    code = self.code(jaxpr.eqns, numbers, [])
    results = tuple(
      self.literal(value) if isinstance(value, core.Literal) else numbers[value] for value in jaxpr.outvars
    )
    rules = tuple(self._rule(eqn) for eqn in jaxpr.eqns) if self._rules else ()
    return tuple(shapes), code, results, tuple(map(self._of_constant, constants(body))), rules

  def _rule(self, eqn: JaxprEqn) -> Hashable:
    """The gradient of an operation that has a custom gradient."""
    # A rule in a shard_map cannot be traced outside of it, but the gradient of the full shard_map can.
    mapped = eqn.primitive.name == "shard_map" and any(map(has_rule, inner_equations(eqn)))
    if not (has_rule(eqn) or mapped):
      return None
    with self._without_rules():  # the gradient of relu calls relu
      return self.of(gradient_of(eqn))

  def code(self, eqns: Iterable[JaxprEqn], numbers: dict[Var, int], inputs: list[Var]) -> Hashable:
    """A key of operations, with numbers in place of variables; `numbers` receives those of new variables.

    `inputs` receives the variables that no operation makes.
    """
    code: list[Hashable] = []
    for eqn in eqns:
      operands: list[Hashable] = []
      for value in eqn.invars:
        if isinstance(value, core.Literal):
          operands.append(self.literal(value))
        elif value in numbers:
          operands.append(numbers[value])
        else:
          numbers[value] = len(numbers)
          inputs.append(value)
          operands.append((numbers[value], str(value.aval)))
      for value in eqn.outvars:
        numbers[value] = len(numbers)
      code.append((eqn.primitive, self._params(eqn), self.context(eqn.ctx), tuple(operands)))
    return tuple(code)


def _key_of_value(value: Any, around: tuple[object, ...] = ()) -> Hashable:
  """The key of a value that a program holds; a function is the same if it closes over the same objects.

    jax.debug.callback(lambda x: print("mean", x), x)   # a new function in each layer, and the same key

  An unhashable object equals only itself: two lists are equal until one of them changes.
  """
  if isinstance(value, types.FunctionType) and not any(value is f for f in around):
    try:
      kept = [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError:  # a variable without a value yet
      return value
    if str(value.__module__).startswith("jax."):  # holds the user's function, and other arguments in a dict
      kept = [tuple(x.items()) if isinstance(x, dict) else x for x in kept]
    kept += [value.__defaults__, tuple((value.__kwdefaults__ or {}).items())]
    return value.__code__, id(value.__globals__), *(_key_of_value(x, (*around, value)) for x in kept)
  if isinstance(value, tuple):
    return tuple(_key_of_value(x, around) for x in value)
  try:
    hash(value)
  except TypeError:
    return type(value), id(value)
  return type(value), value
