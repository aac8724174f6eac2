"""Attention sinks apart from the scores: a logit of each row that belongs to no key.

Models write `softmax(concatenate([scores, sink]))[..., :-1] @ values`. The same program with a separate sink
has no array of scores and sink: the maximum is taken over the scores and the sink, and so is the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.extend import core

from nnx_parallel.core.dims import ELEMENTWISE
from nnx_parallel.core.interpret import DEFAULT, flattened, interpret
from nnx_parallel.core.jaxprs import among, bind, dependents, opened, traced, without_unused
from nnx_parallel.core.types import ClosedJaxpr, Jaxpr, JaxprEqn, Value, Var

_JOINED = {"reduce_max": jax.lax.max, "reduce_sum": jax.lax.add}


def with_sinks_apart(flat: ClosedJaxpr, opens: Callable[[JaxprEqn], bool]) -> ClosedJaxpr:
  """A closed flat program in which attention sinks are not joined to the scores.

  Args:
    flat: the program.
    opens: which of its calls are opened, so that it is flat.
  """
  joins = _joins(opened(flat))
  if not joins:
    return flat

  def run(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    if eqn.outvars and eqn.outvars[0] in joins:
      scores, sink = inputs
      return [_Pair(scores, sink, eqn.params["dimension"])]
    pairs = [x for x in inputs if isinstance(x, _Pair)]
    if not pairs:
      return DEFAULT
    found = pairs[0].after(eqn, inputs)
    return [found] if found is not None else bind(eqn, [_whole(x) for x in inputs])

  program = traced(lambda *inputs: [_whole(x) for x in interpret(flat, inputs, run)], flat)
  return without_unused(flattened(program, opens))


@dataclasses.dataclass(frozen=True)
class _Pair:
  """An array without its last column along a dim, and that column."""

  scores: jax.Array
  sink: jax.Array
  dim: int

  def after(self, eqn: JaxprEqn, inputs: Sequence[Value]) -> _Pair | jax.Array | None:
    """The result of an operation: a pair or an array; None if the operation needs the concatenated array."""
    name, params = eqn.primitive.name, eqn.params
    if name in ELEMENTWISE and len(eqn.outvars) == 1:
      scores, sink = (bind(eqn, [self._part(x, n) for x in inputs])[0] for n in (0, 1))
      return _Pair(scores, sink, self.dim)
    if name in _JOINED and tuple(params["axes"]) == (self.dim,):
      return _JOINED[name](bind(eqn, [self.scores])[0], self.sink.squeeze(self.dim))
    if name == "slice":
      start, stop, size = (params["start_indices"], params["limit_indices"], eqn.invars[0].aval.shape)
      kept = [size[d] - (d == self.dim) for d in range(len(size))]
      if not any(start) and list(stop) == kept and {*(params["strides"] or (1,))} == {1}:
        return self.scores
    return None

  def _part(self, x: Value, n: int) -> jax.Array:
    """The part of an operand that one part of the result needs."""
    if isinstance(x, _Pair):
      return x.sink if n else x.scores
    if not getattr(x, "ndim", 0) or x.shape[self.dim] == 1:
      return x
    last = x.shape[self.dim] - 1
    return jax.lax.slice_in_dim(x, last * n, last + n, axis=self.dim)


def _whole(x: Value) -> jax.Array:
  return jax.lax.concatenate([x.scores, x.sink], x.dim) if isinstance(x, _Pair) else x


def _joins(body: Jaxpr) -> set[Var]:
  """Scores of products, concatenated with one column, whose maximum along that dim is taken."""
  made = {out: eqn for eqn in body.eqns for out in eqn.outvars}
  of_products = dependents(body, [eqn.outvars[0] for eqn in body.eqns if eqn.primitive.name == "dot_general"])

  def before(var: Var) -> Var:
    """The value before a cast or a subtraction."""
    while among(var, made) and made[var].primitive.name in (
      "convert_element_type", "copy", "stop_gradient", "sub"
    ):  # fmt: skip
      var = made[var].invars[0]
    return var

  found: set[Var] = set()
  for eqn in body.eqns:
    if eqn.primitive.name == "reduce_max" and not isinstance(var := before(eqn.invars[0]), core.Literal):
      join = made.get(var)
      if join is not None and join.primitive.name == "concatenate" and len(join.invars) == 2:
        dim = join.params["dimension"]
        first, second = (x.aval.shape[dim] for x in join.invars)
        if dim in eqn.params["axes"] and first > 1 == second and among(join.invars[0], of_products):
          found.add(var)
  return found
