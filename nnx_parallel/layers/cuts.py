"""Slices weights instead of logits: the padded columns of a vocabulary are not computed."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend import core

from nnx_parallel.core.dims import ELEMENTWISE
from nnx_parallel.core.flow import meeting
from nnx_parallel.core.interpret import DEFAULT, interpret
from nnx_parallel.core.jaxprs import among, bind, maker, makers, traced, without_unused
from nnx_parallel.core.types import ClosedJaxpr, JaxprEqn, Value, Var


def with_cut_weights(flat: ClosedJaxpr) -> ClosedJaxpr:
  """A closed flat program that does not compute the columns of a product that are sliced off.

  The program changes only where `product[..., :n]`, or the same slice of the product after a bias or a cast,
  is the only read of the product's columns.
  """
  made = makers(flat)
  values: dict[Var, jax.Array] = {}
  cuts: list[JaxprEqn] = []

  def sliced(var: Var, dim: int, start: int, stop: int) -> jax.Array | None:
    """A part of a value, computed from the columns of a product; None: it is not of a product."""
    eqn = maker(var, made)
    if eqn is not None and eqn.primitive.name == "dot_general" and (place := _column_of(eqn, dim)):
      inputs = [values[x] for x in eqn.invars]
      inputs[place[0]] = jax.lax.slice_in_dim(inputs[place[0]], start, stop, axis=place[1])
      return bind(eqn, inputs)[0]
    if eqn is None or eqn.primitive.name not in ELEMENTWISE:
      return None
    # A bias has another shape, or is the result of a broadcast.
    same = [x for x in eqn.invars if among(x, made) and x.aval.shape == var.aval.shape]
    before = [x for x in same if made[x].primitive.name != "broadcast_in_dim"]
    part = sliced(before[0], dim, start, stop) if len(before) == 1 else None
    if part is None:
      return None

    def operand(x: Var) -> jax.Array:
      if isinstance(x, core.Literal):
        return x.val
      is_along = x.aval.ndim == var.aval.ndim and x.aval.shape[dim] == var.aval.shape[dim]
      return jax.lax.slice_in_dim(values[x], start, stop, axis=dim) if is_along else values[x]

    return bind(eqn, [part if x is before[0] else operand(x) for x in eqn.invars])[0]

  def run(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    values.update((x, y) for x, y in zip(eqn.invars, inputs, strict=True) if not isinstance(x, core.Literal))
    cut = _cut_of(eqn) if eqn.primitive.name == "slice" else None
    found = None if cut is None else sliced(eqn.invars[0], *cut)
    if found is None:
      return DEFAULT
    cuts.append(eqn)
    return [found]

  program = traced(lambda *inputs: interpret(flat, inputs, run), flat)
  return without_unused(program) if cuts else flat


def _cut_of(eqn: JaxprEqn) -> tuple[int, int, int] | None:
  """The only dim that a slice cuts, and where; None for several, or with strides."""
  shape, params = eqn.invars[0].aval.shape, eqn.params
  bounds = zip(params["start_indices"], params["limit_indices"], shape, strict=True)
  cut = [(d, start, stop) for d, (start, stop, size) in enumerate(bounds) if (start, stop) != (0, size)]
  strides = params["strides"] or (1,)
  return cut[0] if len(cut) == 1 and {*strides} == {1} else None


def _column_of(product: JaxprEqn, dim: int) -> tuple[int, int] | None:
  """The operand of a product that has a dim of its result, the weights, and its dim there."""
  met = meeting(product)
  if met is None or dim < len(met.shared[0]) + len(met.free[0]):
    return None
  return 1, met.free[1][dim - len(met.shared[0]) - len(met.free[0])]
