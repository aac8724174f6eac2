"""Finds every softmax that a product with values follows, in whatever form it is written."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from nnx_parallel.core.flow import meeting
from nnx_parallel.core.jaxprs import among, dependents, opened
from nnx_parallel.core.tiles import Labels, Untiled, pushed

_SUMS = ("reduce_sum", "cumsum")
Lengths = dict[Any, int]


class Softmaxes:
  """The products of normalised exponentials and values in a flat program.

  An exponential is normalised if it, or what it is the exponential of, depends on a sum of exponentials over
  a dim that the product sums over. Its scores come from a product too, and the product keeps one of their
  other dims: the queries.

  Args:
    body: the program.
  """

  def __init__(self, body: Any):
    self.body = opened(body)
    self._readers: dict[Any, list[int]] = {}
    for n, eqn in enumerate(self.body.eqns):
      for var in eqn.invars:
        if not isinstance(var, core.Literal):
          self._readers.setdefault(var, []).append(n)
    products = [eqn.outvars[0] for eqn in self.body.eqns if eqn.primitive.name == "dot_general"]
    self._of_products = dependents(self.body, products)
    self._made = {out: eqn for eqn in self.body.eqns for out in eqn.outvars}

  def products(self, exp: Any, lengths: Lengths, named: Labels) -> list[Any]:
    """The products that sum weights of an exponential, normalised, over its keys.

    Args:
      exp: the operation.
      lengths: of the dims of its result, and of their factors.
      named: the labels of its result.
    """
    if isinstance(exp.invars[0], core.Literal) or exp.invars[0] not in self._of_products:
      return []
    labels: dict[Any, Labels] = dict.fromkeys(self._scores(exp), named)
    # Values that depend on the exponential, and the dims over which they are normalised.
    normal: dict[Any, frozenset[Any] | None] = dict.fromkeys(labels)
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

  def product_before(self, exp: Any) -> Any:
    """The product that an exponential is of, through what is as large; None where there is none."""
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

  def _scores(self, exp: Any) -> list[Any]:
    """What the exponential is of, and what a maximum is subtracted from before it."""
    given, shape = exp.invars[0], exp.outvars[0].aval.shape
    made = self._made.get(given)
    found = [given]
    if made is not None and made.primitive.name == "sub" and not isinstance(made.invars[0], core.Literal):
      found += [made.invars[0]]
    return [var for var in found if var.aval.shape == shape]

  def _sums(self, product: Any, own: list[int], labels: dict[Any, Labels], normal: frozenset[Any]) -> bool:
    """Whether a product sums over normalised dims of its only weights, and keeps others."""
    met: Any = meeting(product)
    if len(own) != 1:
      return False
    (side,) = own
    own_labels = labels[product.invars[side]]
    summed = {name for name, dim, _ in own_labels if dim in met.summed[side]}
    return bool(summed & normal) and any(dim in met.free[side] for _, dim, _ in own_labels)


def _placed(eqn: Any, own: list[int], labels: dict[Any, Labels], lengths: Lengths) -> Labels | None:
  """The labels of a result; those of an operand of its rank where the operation has no map of its dims."""
  found: dict[Any, tuple[int, int]] = {}
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


def named_dims(shape: Sequence[int]) -> tuple[dict[Any, int], Labels]:
  """The lengths and labels of the dims of the scores, and of their prime factors: `(dim, number)`.

  A dim that is split, such as heads into groups, is followed by its factors.
  """
  lengths: dict[Any, int] = {}
  labels: list[Any] = []
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
