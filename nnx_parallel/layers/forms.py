"""Brings the softmaxes of a flat program into one form, so that one search finds all of them.

- `exp(scores - log_sum_exp)` becomes exponentials that are divided by their sum.
- A maximum that is subtracted from scores whose softmax subtracts it again is left out.
- Attention sinks, logits of each row that belong to no key, are taken apart from the scores. Models write
  `softmax(concatenate([scores, sink]))[..., :-1] @ values`. The same program with a separate sink has no
  array of scores and sink: the maximum is taken over the scores and the sink, and so is the sum.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from nnx_parallel.core.dims import ELEMENTWISE
from nnx_parallel.core.interpret import DEFAULT, flattened, interpret
from nnx_parallel.core.jaxprs import (
  among,
  bind,
  call_equation,
  dependents,
  maker,
  makers,
  opened,
  origin,
  traced,
  without_unused,
)
from nnx_parallel.core.tiles import Untiled, pushed
from nnx_parallel.core.types import ClosedJaxpr, Jaxpr, JaxprEqn, Value, Var
from nnx_parallel.layers.softmaxes import LAYOUT, STOPPED, named_dims

_BEFORE_MAXIMUM = ("convert_element_type", "copy", "stop_gradient", "sub")
_JOINED = {"reduce_max": jax.lax.max, "reduce_sum": jax.lax.add}


def as_quotients(flat: ClosedJaxpr) -> ClosedJaxpr:
  """A closed flat program with `exp(scores - log_sum_exp)` as exponentials that are divided by their sum.

  A log-softmax and `jax.nn.logsumexp` have this form.
  """
  body = opened(flat)
  made = makers(body)
  new: dict[int, JaxprEqn] = {}
  for eqn in body.eqns:
    found = _sum_before(eqn, made) if eqn.primitive.name == "exp" else None
    if found is not None:
      exponentials, axes = found.invars[0], tuple(map(int, found.params["axes"]))
      inputs = [exponentials, found.outvars[0]]
      new[id(eqn)] = call_equation(functools.partial(_quotient, axes), inputs, eqn.outvars, eqn)
  if not new:
    return flat
  calls = {id(eqn) for eqn in new.values()}
  program = flat.replace(jaxpr=body.replace(eqns=[new.get(id(eqn), eqn) for eqn in body.eqns]))
  return flattened(program, lambda eqn: id(eqn) in calls)


def without_shifts(flat: ClosedJaxpr) -> ClosedJaxpr:
  """A closed flat program in which no maximum is subtracted from scores whose softmax does it again."""
  body = opened(flat)
  made = makers(body)
  readers: dict[Var, list[str]] = collections.defaultdict(list)
  for eqn in body.eqns:
    for var in eqn.invars:
      if not isinstance(var, core.Literal):
        readers[var].append(eqn.primitive.name)
  same: dict[Var, Var] = {}
  for eqn in body.eqns:
    if eqn.primitive.name == "sub" and not any(isinstance(var, core.Literal) for var in eqn.invars):
      (scores, shift), out = eqn.invars, eqn.outvars[0]
      largest = maker(origin(shift, made, STOPPED), made)
      is_largest = largest is not None and largest.primitive.name == "reduce_max"
      is_largest = is_largest and largest.invars[0] is scores  # pyright: ignore[reportOptionalMemberAccess]
      if is_largest and out not in body.outvars and sorted(readers[out]) == ["reduce_max", "sub"]:
        same[out] = same.get(scores, scores)
  if not same:
    return flat
  eqns = [
    eqn.replace(invars=[x if isinstance(x, core.Literal) else same.get(x, x) for x in eqn.invars])
    for eqn in body.eqns
  ]
  return without_unused(flat.replace(jaxpr=body.replace(eqns=eqns)))


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
  made = makers(body)
  of_products = dependents(body, [eqn.outvars[0] for eqn in body.eqns if eqn.primitive.name == "dot_general"])

  found: set[Var] = set()
  for eqn in body.eqns:
    if eqn.primitive.name == "reduce_max" and among(
      var := origin(eqn.invars[0], made, _BEFORE_MAXIMUM), made
    ):
      join = made[var]
      if join.primitive.name == "concatenate" and len(join.invars) == 2:
        dim = join.params["dimension"]
        first, second = (x.aval.shape[dim] for x in join.invars)
        if dim in eqn.params["axes"] and first > 1 == second and among(join.invars[0], of_products):
          found.add(var)
  return found


def _quotient(axes: tuple[int, ...], exponentials: jax.Array, total: jax.Array) -> list[jax.Array]:
  return [exponentials / jnp.expand_dims(total, axes)]


def _sum_before(exp: JaxprEqn, made: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
  """The sum whose logarithm is subtracted before an exponential, of exponentials of the same scores."""
  difference = maker(exp.invars[0], made)
  if difference is None or difference.primitive.name != "sub":
    return None
  scores, path = difference.invars[0], list[Any]()
  var, largest = difference.invars[1], None
  while (eqn := maker(var, made)) is not None:
    name = eqn.primitive.name
    path.append((eqn, 0))
    if name == "reduce_sum":
      first = maker(eqn.invars[0], made)
      is_same = first is not None and first.primitive.name == "exp" and _is_of(first, scores, largest, made)
      return eqn if is_same and _lies_right(eqn, path[-2::-1]) else None
    if name == "add" and largest is None:
      side = next((n for n, x in enumerate(eqn.invars) if _leads_to_log(x, made)), None)
      if side is None:
        return None
      path[-1], largest = (eqn, side), eqn.invars[1 - side]
      var = eqn.invars[side]
    elif name in (*LAYOUT, "log", "abs"):
      var = eqn.invars[0]
    else:
      return None
  return None


def _leads_to_log(var: Var, made: Mapping[Var, JaxprEqn]) -> bool:
  found = maker(origin(var, made, LAYOUT), made)
  return found is not None and found.primitive.name == "log"


def _is_of(exp: JaxprEqn, scores: Var, largest: Var | None, made: Mapping[Var, JaxprEqn]) -> bool:
  """Whether the argument of an exponential is the scores, minus the offset of a logarithm if there is one."""
  if largest is None:
    return exp.invars[0] is scores
  difference = maker(exp.invars[0], made)
  if difference is None or difference.primitive.name != "sub" or difference.invars[0] is not scores:
    return False
  return origin(difference.invars[1], made, STOPPED) is origin(largest, made, STOPPED)


def _lies_right(total: JaxprEqn, path: Sequence[tuple[JaxprEqn, int]]) -> bool:
  """Whether the dims of a sum come where they were before it."""
  lengths, own = named_dims(total.invars[0].aval.shape)
  try:
    labels = pushed(total, 0, own, lengths)
    for eqn, side in path:
      labels = pushed(eqn, side, labels, lengths)
  except Untiled:
    return False
  axes = set(map(int, total.params["axes"]))
  return {*labels} == {label for label in own if label[1] not in axes}
