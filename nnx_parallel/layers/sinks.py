"""Attention sinks as keys: a logit of each row that belongs to no key becomes that of a key with value 0.

Models write `softmax(concatenate([scores, sink]))[..., :-1] @ values`. The same is an attention over one more
key, whose scores are the sink's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from nnx_parallel.core.dims import ELEMENTWISE
from nnx_parallel.core.flow import meeting
from nnx_parallel.core.interpret import flattened, interpret
from nnx_parallel.core.jaxprs import among, bind, dependents, opened, traced, without_unused


def with_sinks_as_keys(flat: Any, opens: Callable[[Any], bool]) -> Any:
  """A closed flat program in which attention sinks are keys.

  Args:
    flat: the program.
    opens: which of its calls are opened, so that it is flat.
  """
  sinks = _Sinks(flat)
  if not sinks.joins:
    return flat
  program = traced(lambda *inputs: interpret(flat, inputs, sinks.run), flat)
  return without_unused(flattened(program, opens))


class _Sinks:
  """Evaluates a program once more.

  Attributes:
    joins: the concatenations of scores and a sink, by the variable that they make.
  """

  def __init__(self, flat: Any):
    body = opened(flat)
    self._made = {out: eqn for eqn in body.eqns for out in eqn.outvars}
    products = [eqn.outvars[0] for eqn in body.eqns if eqn.primitive.name == "dot_general"]
    of_products = dependents(body, products)
    largest = [eqn for eqn in body.eqns if eqn.primitive.name == "reduce_max"]
    of_maxima = {(self._before(eqn.invars[0]), int(axis)) for eqn in largest for axis in eqn.params["axes"]}
    self.joins: dict[Any, Any] = {
      eqn.outvars[0]: eqn
      for eqn in body.eqns
      if _is_join(eqn)
      and among(eqn.invars[0], of_products)
      and (eqn.outvars[0], eqn.params["dimension"]) in of_maxima
    }
    self._joined = dependents(body, self.joins)
    self._values: dict[Any, Any] = {}
    # Weights of all keys, by those of which the sink's are cut off, and the dim of the keys.
    self._whole: dict[Any, tuple[Any, int]] = {}

  def _before(self, var: Any) -> Any:
    """What a value is in another dtype, or before something is subtracted from it; None for a number."""
    while not isinstance(var, core.Literal) and (eqn := self._made.get(var)) is not None:
      if eqn.primitive.name not in ("convert_element_type", "copy", "stop_gradient", "sub"):
        break
      var = eqn.invars[0]
    return None if isinstance(var, core.Literal) else var

  def run(self, eqn: Any, inputs: list[Any]) -> Sequence[Any]:
    """The results of an operation."""
    pairs = zip(eqn.invars, inputs, strict=True)
    self._values.update((var, x) for var, x in pairs if not isinstance(var, core.Literal))
    if eqn.outvars and eqn.outvars[0] in self.joins:
      return [self._join(eqn, inputs[1])]
    found = bind(eqn, inputs)
    if len(eqn.outvars) == 1 and any(among(var, self._joined) for var in eqn.invars):
      found = self._with_whole(eqn, inputs) or found
    return found

  def _join(self, eqn: Any, sink: Any) -> Any:
    dim, (scores, _) = eqn.params["dimension"], eqn.invars
    shape = eqn.outvars[0].aval.shape
    is_key = jax.lax.broadcasted_iota(jnp.int32, shape, dim) < shape[dim] - 1
    return jnp.where(is_key, self._padded(scores, dim), jnp.broadcast_to(sink, shape))

  def _padded(self, var: Any, dim: int) -> Any:
    """A value with one more element along a dim, at its end: any."""
    eqn = self._made.get(var)
    shape = (*var.aval.shape[:dim], var.aval.shape[dim] + 1, *var.aval.shape[dim + 1 :])
    name, params = (eqn.primitive.name, eqn.params) if eqn is not None else ("", {})
    if eqn is not None and name in ELEMENTWISE:
      return bind(eqn, [self._operand(x, dim, var) for x in eqn.invars])[0]
    if eqn is not None and name == "transpose":
      return self._padded(eqn.invars[0], params["permutation"][dim]).transpose(params["permutation"])
    if name == "iota" and params["sharding"] is None:
      return bind(eqn, [], shape=shape)[0]
    if eqn is not None and name == "broadcast_in_dim" and params["sharding"] is None:
      (x,), places = eqn.invars, params["broadcast_dimensions"]
      own = places.index(dim) if dim in places else None
      given = x.val if isinstance(x, core.Literal) else self._values[x]
      if own is not None and not isinstance(x, core.Literal) and x.aval.shape[own] > 1:
        given = self._padded(x, own)
      return bind(eqn, [given], shape=shape)[0]
    if eqn is not None and name == "reshape" and dim == len(shape) - 1:
      (x,) = eqn.invars
      if x.aval.ndim and x.aval.shape[-1] == var.aval.shape[-1]:
        return self._padded(x, x.aval.ndim - 1).reshape(shape)
    place = _operand_of(eqn, dim) if name == "dot_general" else None
    if place is not None:
      inputs = [self._values[x] for x in eqn.invars]  # pyright: ignore[reportOptionalMemberAccess]
      inputs[place[0]] = _with_one_more(inputs[place[0]], place[1])
      return bind(eqn, inputs)[0]
    return _with_one_more(self._values[var], dim)

  def _operand(self, x: Any, dim: int, result: Any) -> Any:
    if isinstance(x, core.Literal):
      return x.val
    same = x.aval.ndim == result.aval.ndim and x.aval.shape[dim] == result.aval.shape[dim]
    return self._padded(x, dim) if same else self._values[x]

  def _with_whole(self, eqn: Any, inputs: list[Any]) -> list[Any] | None:
    """Notes weights of all keys, and gives their product with values that have one more."""
    name, out = eqn.primitive.name, eqn.outvars[0]
    if name == "slice":
      cut = _cut_last(eqn)
      if cut is not None:
        self._whole[out] = inputs[0], cut
      return None
    sides = [n for n, var in enumerate(eqn.invars) if among(var, self._whole)]
    if not sides:
      return None
    whole, dim = self._whole[eqn.invars[sides[0]]]
    if name == "dot_general" and len(sides) == 1:
      met: Any = meeting(eqn)
      (side,) = sides
      if met is None or dim not in met.summed[side]:
        return None
      own = met.summed[1 - side][met.summed[side].index(dim)]
      pair = [*inputs]
      pair[side], pair[1 - side] = whole, _with_one_more(inputs[1 - side], own)
      return [*bind(eqn, pair)]
    others = [x for n, x in enumerate(inputs) if n not in sides]
    if name in ELEMENTWISE and len(sides) == 1 and all(jnp.ndim(x) == 0 or x.shape[dim] == 1 for x in others):
      pair = [whole if n in sides else x for n, x in enumerate(inputs)]
      self._whole[out] = bind(eqn, pair)[0], dim
    return None


def _is_join(eqn: Any) -> bool:
  """Whether an operation puts one more column beside others."""
  if eqn.primitive.name != "concatenate" or len(eqn.invars) != 2:
    return False
  first, second = (var.aval.shape[eqn.params["dimension"]] for var in eqn.invars)
  return first > 1 and second == 1


def _cut_last(eqn: Any) -> int | None:
  """The dim of which a slice leaves out the last element, and nothing else."""
  shape, params = eqn.invars[0].aval.shape, eqn.params
  bounds = enumerate(zip(params["start_indices"], params["limit_indices"], shape, strict=True))
  cut = [(d, start, size - stop) for d, (start, stop, size) in bounds if (start, stop) != (0, size)]
  return (
    cut[0][0] if len(cut) == 1 and cut[0][1:] == (0, 1) and {*(params["strides"] or (1,))} == {1} else None
  )


def _operand_of(product: Any, dim: int) -> tuple[int, int] | None:
  """The operand of a product that alone has a dim of its result, and its dim there."""
  met = meeting(product)
  if met is None or dim < len(met.shared[0]):
    return None
  free = [(0, d) for d in met.free[0]] + [(1, d) for d in met.free[1]]
  return free[dim - len(met.shared[0])]


def _with_one_more(x: Any, dim: int) -> Any:
  return jnp.pad(x, [(0, int(d == dim)) for d in range(x.ndim)])
