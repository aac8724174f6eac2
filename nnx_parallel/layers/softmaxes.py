"""Finds every softmax that a product with values follows, in whatever form it is written."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from nnx_parallel.core.flow import meeting
from nnx_parallel.core.interpret import flattened
from nnx_parallel.core.jaxprs import among, call_equation, dependents, opened, without_unused
from nnx_parallel.core.tiles import DimName, Labels, Untiled, pushed
from nnx_parallel.core.types import ClosedJaxpr, Jaxpr, JaxprEqn, Var

_SUMS = ("reduce_sum", "cumsum")
Lengths = dict[DimName, int]


class Softmaxes:
  """The products of normalised exponentials and values in a flat program.

  An exponential is normalised if it, or its argument, depends on a sum of exponentials over a dim that the
  product sums over. Its scores are a product too, and the later product keeps one of their other dims: the
  queries.

  Args:
    body: the program.
  """

  def __init__(self, body: Jaxpr):
    self.body = opened(body)
    self._readers: dict[Var, list[int]] = {}
    for n, eqn in enumerate(self.body.eqns):
      for var in eqn.invars:
        if not isinstance(var, core.Literal):
          self._readers.setdefault(var, []).append(n)
    products = [eqn.outvars[0] for eqn in self.body.eqns if eqn.primitive.name == "dot_general"]
    self._of_products = dependents(self.body, products)
    self._made = {out: eqn for eqn in self.body.eqns for out in eqn.outvars}

  def products(self, exp: JaxprEqn, lengths: Lengths, named: Labels) -> list[JaxprEqn]:
    """The products that sum weights of an exponential, normalised, over its keys.

    Args:
      exp: the operation.
      lengths: of the dims of its result, and of their factors.
      named: the labels of its result.
    """
    if isinstance(exp.invars[0], core.Literal) or exp.invars[0] not in self._of_products:
      return []
    labels: dict[Var, Labels] = dict.fromkeys(self._scores(exp), named)
    # Values that depend on the exponential, and the dims over which they are normalised.
    normal: dict[Var, frozenset[DimName] | None] = dict.fromkeys(labels)
    todo = sorted({n for var in labels for n in self._readers.get(var, [])})
    seen, found = {*todo}, list[Any]()
    while todo:
      n = heapq.heappop(todo)
      eqn = self.body.eqns[n]
      own = [m for m, var in enumerate(eqn.invars) if among(var, labels)]
      states = [normal[eqn.invars[m]] for m in own]
      after = None if all(s is None for s in states) else frozenset[Any]().union(*(s or () for s in states))
      if eqn is exp:
        after = after or frozenset()
      if eqn.primitive.name == "dot_general" and after and self._sums(eqn, own, labels, after):
        found.append(eqn)
        continue
      placed = _placed(eqn, own, labels, lengths)
      if placed is None:
        continue
      if eqn.primitive.name in _SUMS and after is not None:
        before = {name for m in own for name, _, _ in labels[eqn.invars[m]]}
        after |= before - {name for name, _, _ in placed}
      for out in eqn.outvars:
        labels[out], normal[out] = placed, after
        for reader in self._readers.get(out, []):
          if reader not in seen:
            seen.add(reader)
            heapq.heappush(todo, reader)
    return found

  def product_before(self, exp: JaxprEqn) -> JaxprEqn | None:
    """The product behind the argument of an exponential, through arrays of the same size, or None."""
    size, todo, seen = exp.outvars[0].aval.size, [*exp.invars], set[Any]()
    while todo:
      var = todo.pop()
      if isinstance(var, core.Literal) or var in seen or var.aval.size < size // 2 or var not in self._made:
        continue
      seen.add(var)
      made = self._made[var]
      if made.primitive.name == "dot_general":
        return made
      todo += made.invars
    return None

  def _scores(self, exp: JaxprEqn) -> list[Var]:
    """The argument of an exponential, and the operand from which it subtracts a maximum."""
    given, shape = exp.invars[0], exp.outvars[0].aval.shape
    made = self._made.get(given)
    found = [given]
    if made is not None and made.primitive.name == "sub" and not isinstance(made.invars[0], core.Literal):
      found += [made.invars[0]]
    return [var for var in found if var.aval.shape == shape]

  def _sums(
    self, product: JaxprEqn, own: list[int], labels: dict[Var, Labels], normal: frozenset[DimName]
  ) -> bool:
    """Whether a product sums over normalised dims of its weights, its only weights, and keeps other dims."""
    met: Any = meeting(product)
    if len(own) != 1:
      return False
    (side,) = own
    own_labels = labels[product.invars[side]]
    summed = {name for name, dim, _ in own_labels if dim in met.summed[side]}
    return bool(summed & normal) and any(dim in met.free[side] for _, dim, _ in own_labels)


def _placed(eqn: JaxprEqn, own: list[int], labels: dict[Var, Labels], lengths: Lengths) -> Labels | None:
  """The labels of a result; if the operation has no dim map, the labels of an operand of equal rank."""
  found: dict[DimName, tuple[int, int]] = {}
  for m in own:
    var = eqn.invars[m]
    try:
      placed = pushed(eqn, m, labels[var], lengths)
    except Untiled:
      if not eqn.outvars or len(eqn.outvars[0].aval.shape) != len(var.aval.shape):
        return None
      placed = labels[var]
    found.update({name: (dim, factor) for name, dim, factor in placed})
  return tuple((name, *place) for name, place in found.items()) if found else None


def named_dims(shape: Sequence[int]) -> tuple[dict[DimName, int], Labels]:
  """The lengths and labels of the dims of the scores, and of their prime factors: `(dim, number)`.

  A dim that is split, such as heads into groups, is followed by its factors.
  """
  lengths: dict[DimName, int] = {}
  labels: list[tuple[DimName, int, int]] = []
  for d, size in enumerate(shape):
    if size > 1:
      lengths[d] = size
      labels.append((d, d, 1))
    ahead, count = 1, 0
    for prime in range(2, size):
      while not size // ahead % prime:
        lengths[d, count] = prime
        labels.append(((d, count), d, ahead))
        ahead, count = ahead * prime, count + 1
  return lengths, tuple(labels)


def as_quotients(flat: ClosedJaxpr) -> ClosedJaxpr:
  """A closed flat program with `exp(scores - log_sum_exp)` as exponentials that are divided by their sum.

  A log-softmax and `jax.nn.logsumexp` have this form.
  """
  body = opened(flat)
  made = {out: eqn for eqn in body.eqns for out in eqn.outvars}
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
  made = {out: eqn for eqn in body.eqns for out in eqn.outvars}
  readers: dict[Var, list[str]] = {}
  for eqn in body.eqns:
    for var in eqn.invars:
      if not isinstance(var, core.Literal):
        readers.setdefault(var, []).append(eqn.primitive.name)
  same: dict[Var, Var] = {}
  for eqn in body.eqns:
    if eqn.primitive.name == "sub" and not any(isinstance(var, core.Literal) for var in eqn.invars):
      (scores, shift), out = eqn.invars, eqn.outvars[0]
      first = origin(shift, made)
      largest = None if isinstance(first, core.Literal) else made.get(first)
      is_largest = largest is not None and largest.primitive.name == "reduce_max"
      is_largest = is_largest and largest.invars[0] is scores  # pyright: ignore[reportOptionalMemberAccess]
      if is_largest and out not in body.outvars and sorted(readers.get(out, [])) == ["reduce_max", "sub"]:
        same[out] = same.get(scores, scores)
  if not same:
    return flat
  eqns = [
    eqn.replace(invars=[x if isinstance(x, core.Literal) else same.get(x, x) for x in eqn.invars])
    for eqn in body.eqns
  ]
  return without_unused(flat.replace(jaxpr=body.replace(eqns=eqns)))


def _quotient(axes: tuple[int, ...], exponentials: jax.Array, total: jax.Array) -> list[jax.Array]:
  return [exponentials / jnp.expand_dims(total, axes)]


def _sum_before(exp: JaxprEqn, made: dict[Var, JaxprEqn]) -> JaxprEqn | None:
  """The sum whose logarithm is subtracted before an exponential, of exponentials of the same scores."""
  difference = made.get(exp.invars[0])
  if difference is None or difference.primitive.name != "sub":
    return None
  scores, path = difference.invars[0], list[Any]()
  var, largest = difference.invars[1], None
  while not isinstance(var, core.Literal) and (eqn := made.get(var)) is not None:
    name = eqn.primitive.name
    path.append((eqn, 0))
    if name == "reduce_sum":
      first = made.get(eqn.invars[0])
      is_same = first is not None and first.primitive.name == "exp" and _is_of(first, scores, largest, made)
      return eqn if is_same and _lies_right(eqn, path[-2::-1]) else None
    if name == "add" and largest is None:
      side = next((n for n, x in enumerate(eqn.invars) if _leads_to_log(x, made)), None)
      if side is None:
        return None
      path[-1], largest = (eqn, side), eqn.invars[1 - side]
      var = eqn.invars[side]
    elif name in (*_LAYOUT, "log", "abs"):
      var = eqn.invars[0]
    else:
      return None
  return None


_LAYOUT = ("broadcast_in_dim", "copy", "reshape", "squeeze")


def _leads_to_log(var: Var, made: dict[Var, JaxprEqn]) -> bool:
  while not isinstance(var, core.Literal) and (eqn := made.get(var)) is not None:
    if eqn.primitive.name == "log":
      return True
    if eqn.primitive.name not in _LAYOUT:
      return False
    var = eqn.invars[0]
  return False


def _is_of(exp: JaxprEqn, scores: Var, largest: Var | None, made: dict[Var, JaxprEqn]) -> bool:
  """Whether the argument of an exponential is the scores, minus the offset of a logarithm if there is one."""
  if largest is None:
    return exp.invars[0] is scores
  difference = made.get(exp.invars[0])
  if difference is None or difference.primitive.name != "sub" or difference.invars[0] is not scores:
    return False
  return origin(difference.invars[1], made) is origin(largest, made)


def origin(var: Var, made: Mapping[Var, JaxprEqn]) -> Var:
  """The value that another value is a new layout of."""
  while not isinstance(var, core.Literal) and (eqn := made.get(var)) is not None:
    if eqn.primitive.name not in (*_LAYOUT, "stop_gradient"):
      break
    var = eqn.invars[0]
  return var


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
