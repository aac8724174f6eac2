"""Custom reverse rules (`jax.custom_vjp`) and stopped gradients in a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from nnx_parallel.core.interpret import DEFAULT, rewritten
from nnx_parallel.core.jaxprs import (
  as_function,
  bind,
  called,
  equations,
  has_reverse_rule,
  inner_equations,
  opened,
)
from nnx_parallel.core.types import ClosedJaxpr, JaxprEqn, Program, PyTree, Value
from nnx_parallel.layers.pipeline_1f1b import PIPELINE_RULE


def own_rules(jaxpr: Program) -> dict[str, bool]:
  """The functions of a program with a custom reverse rule; True if the rule is kept because it rounds."""
  found: dict[str, bool] = {}
  for eqn in equations(jaxpr):
    if has_reverse_rule(eqn):
      name = opened(called(eqn)).debug_info.func_name
      found[name] = found.get(name, False) or _is_kept(eqn)
  return found


def without_own_rules(jaxpr: Program) -> ClosedJaxpr:
  """The same program with each `jax.custom_vjp` function replaced by a function that has a forward mode.

  If a function rounds, the replacement still uses the reverse rule of the function, because this rule differs
  from the derivative on purpose. The rule of a pipeline is never used, because it is the rule to check; the
  layers in a pipeline may round.
  """

  def rule(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    if not has_reverse_rule(eqn):
      return DEFAULT
    function = _at_its_word(eqn) if _is_kept(eqn) else as_function(without_own_rules(called(eqn)))
    return function(*inputs)

  return rewritten(jaxpr, rule)


def _at_its_word(eqn: JaxprEqn) -> Callable[..., Sequence[jax.Array]]:
  """A function with a forward mode that is the transpose of its reverse rule."""
  floats = [n for n, var in enumerate(eqn.invars) if jnp.issubdtype(var.aval.dtype, jnp.inexact)]

  @jax.custom_jvp
  def function(*inputs: PyTree) -> PyTree:
    return bind(eqn, inputs)

  @function.defjvp
  def derivative(inputs: PyTree, tangents: PyTree) -> PyTree:  # pyright: ignore[reportUnusedFunction]
    def of_floats(*chosen: PyTree) -> PyTree:
      given = dict(zip(floats, chosen, strict=True))
      return bind(eqn, [given.get(n, x) for n, x in enumerate(inputs)])

    out, back = jax.vjp(of_floats, *[inputs[n] for n in floats])
    try:
      if any(map(_is_rounding, equations(jax.make_jaxpr(back)(out)))):
        raise NotImplementedError("rounding")
      return out, jax.linear_transpose(back, out)(tuple(tangents[n] for n in floats))[0]
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
      name = opened(called(eqn)).debug_info.func_name
      raise NotImplementedError(f"the reverse rule of {name}, which rounds, is not linear") from error

  return function


def without_stops(jaxpr: Program) -> ClosedJaxpr:
  """The same program with copies in place of `jax.lax.stop_gradient`."""

  def rule(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    return [jnp.positive(*inputs)] if eqn.primitive.name == "stop_gradient" else DEFAULT

  return rewritten(jaxpr, rule)


def _is_kept(eqn: JaxprEqn) -> bool:
  return opened(called(eqn)).debug_info.func_name != PIPELINE_RULE and rounds(eqn)


def rounds(eqn: JaxprEqn) -> bool:
  """Whether the inner programs of an operation round values to integers, or to a dtype of 8 bits or less."""
  return any(map(_is_rounding, inner_equations(eqn)))


def _is_rounding(eqn: JaxprEqn) -> bool:
  if eqn.primitive.name != "convert_element_type":
    return eqn.primitive.name in ("round", "floor", "ceil")
  before, after = (var.aval.dtype for var in (*eqn.invars, *eqn.outvars))
  return jnp.issubdtype(before, jnp.floating) and after.itemsize == 1 and after.kind != "b"
