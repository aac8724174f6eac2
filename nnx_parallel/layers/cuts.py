"""Slices of logits as slices of the weights: what a padded vocabulary has too many is not computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from nnx_parallel.core.dims import ELEMENTWISE
from nnx_parallel.core.flow import meeting
from nnx_parallel.core.interpret import interpret
from nnx_parallel.core.jaxprs import bind, opened, traced, without_unused


def with_cut_weights(flat: Any) -> Any:
  """A closed flat program in which columns of a product that are sliced off are not computed.

  It has other operations only where `product[..., :n]`, or that of the product with a bias or in another
  dtype, is all that is read of the product's columns.
  """
  cuts = _Cuts(flat)
  if not any(map(cuts.is_cut, opened(flat).eqns)):
    return flat
  return without_unused(traced(lambda *inputs: interpret(flat, inputs, cuts.run), flat))


class _Cuts:
  def __init__(self, flat: Any):
    body = opened(flat)
    self._made = {out: eqn for eqn in body.eqns for out in eqn.outvars}
    self._values: dict[Any, Any] = {}

  def is_cut(self, eqn: Any) -> bool:
    """Whether an operation is a slice of a product's columns."""
    return eqn.primitive.name == "slice" and _cut_of(eqn) is not None and self._reaches(eqn)

  def _reaches(self, eqn: Any) -> bool:
    var, (dim, _, _) = eqn.invars[0], _cut_of(eqn) or (0, 0, 0)
    while not isinstance(var, core.Literal) and (made := self._made.get(var)) is not None:
      if made.primitive.name == "dot_general":
        return _column_of(made, dim) is not None
      if made.primitive.name not in ELEMENTWISE:
        return False
      # A bias has another shape, or is the result of a broadcast.
      same = [x for x in made.invars if not isinstance(x, core.Literal) and x.aval.shape == var.aval.shape]
      before = [x for x in same if x in self._made and self._made[x].primitive.name != "broadcast_in_dim"]
      if len(before) != 1:
        return False
      (var,) = before
    return False

  def run(self, eqn: Any, inputs: list[Any]) -> Sequence[Any]:
    """The results of an operation, noted for slices of what is computed from them."""
    self._values.update(
      (var, x) for var, x in zip(eqn.invars, inputs, strict=True) if not isinstance(var, core.Literal)
    )
    if not self.is_cut(eqn):
      return bind(eqn, inputs)
    found = _cut_of(eqn)
    assert found is not None
    return [self._sliced(eqn.invars[0], *found)]

  def _sliced(self, var: Any, dim: int, start: int, stop: int) -> Any:
    made = self._made.get(var)
    if made is not None and made.primitive.name in ELEMENTWISE:
      inputs: list[Any] = []
      for x in made.invars:
        if isinstance(x, core.Literal):
          inputs.append(x.val)
        elif x.aval.ndim == var.aval.ndim and x.aval.shape[dim] == var.aval.shape[dim]:
          inputs.append(self._sliced(x, dim, start, stop))
        else:
          inputs.append(self._values[x])
      return bind(made, inputs)[0]
    if made is not None and made.primitive.name == "dot_general" and (place := _column_of(made, dim)):
      side, own = place
      inputs = [self._values[x] for x in made.invars]
      inputs[side] = jax.lax.slice_in_dim(inputs[side], start, stop, axis=own)
      return bind(made, inputs)[0]
    return jax.lax.slice_in_dim(self._values[var], start, stop, axis=dim)


def _cut_of(eqn: Any) -> tuple[int, int, int] | None:
  """The only dim that a slice cuts, and where; None for several, or with strides."""
  shape, params = eqn.invars[0].aval.shape, eqn.params
  bounds = zip(params["start_indices"], params["limit_indices"], shape, strict=True)
  cut = [(d, start, stop) for d, (start, stop, size) in enumerate(bounds) if (start, stop) != (0, size)]
  strides = params["strides"] or (1,)
  return cut[0] if len(cut) == 1 and {*strides} == {1} else None


def _column_of(product: Any, dim: int) -> tuple[int, int] | None:
  """The operand of a product that has a dim of its result, the weights, and its dim there."""
  met = meeting(product)
  if met is None or dim < len(met.shared[0]) + len(met.free[0]):
    return None
  return 1, met.free[1][dim - len(met.shared[0]) - len(met.free[0])]
