"""Finds each softmax that a product with values follows.

`exp(s - s.max(-1)) / exp(s - s.max(-1)).sum(-1) @ v` is one, also with casts, transposes, masks and factors
between these operations: `jax.nn.softmax`, and what models write by hand.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from nnx_parallel.attention.flow import meeting
from nnx_parallel.attention.masks import PLACES
from nnx_parallel.attention.tiling import DimName, Labels, Untiled, describe, push
from nnx_parallel.core.jaxprs import (
  among,
  dependents,
  is_inexact,
  maker,
  makers,
  open_jaxpr,
  operations_behind,
  origin,
)
from nnx_parallel.core.types import Jaxpr, JaxprEqn, Var

_SUMS = ("reduce_sum", "cumsum")
_WITH_OTHERS = ("add", "add_any", "log", "max", "sub")
"""Operations that join a sum of exponentials with something else."""
_PASSED = (*PLACES, "stop_gradient")
"""Operations between a maximum and where it is subtracted."""
_EXP, _SUM, _WEIGHT = "exponential", "sum", "weight"
Lengths = dict[DimName, int]


class NotByBlocks(Exception):
  """Why an attention stays as it is written."""


class NotFused(Exception):
  """Why an attention has no fused kernel."""


@dataclasses.dataclass(frozen=True)
class Softmax:
  """An attention in a flat program: its exponential, maximum, sum, and product of weights and values."""

  exp: JaxprEqn
  largest: JaxprEqn
  order: tuple[int, ...]  # for each dim of the scores, the matching dim of the array that `largest` reduces
  total: JaxprEqn
  product: JaxprEqn
  side: int  # which operand of the product the weights are
  labels: tuple[Labels, Labels]  # the dims of the weights and of the product's result, as dims of the scores
  zeros_too: bool  # whether a row of weights may be all zeros, where its sum does not exist

  @property
  def cuts(self) -> tuple[Var, Var]:
    """The maximum and the sum."""
    return self.largest.outvars[0], self.total.outvars[0]

  @property
  def summed(self) -> tuple[int, ...]:
    """The dims of the scores that the softmax sums over."""
    return tuple(int(axis) for axis in self.total.params["axes"])

  @property
  def turned(self) -> list[int]:
    """For each dim of the sum, the matching dim of the maximum."""
    kept = [d for d in range(len(self.order)) if d not in self.summed]
    return [sorted(self.order[d] for d in kept).index(self.order[d]) for d in kept]

  def __str__(self) -> str:
    return named_softmax(self.exp)


class Softmaxes:
  """The products of normalised exponentials and values in a flat program.

  An exponential is normalised if it, or its argument, depends on a sum of exponentials over a dim that the
  product sums over. Its scores are a product too, and the later product keeps one of their other dims.
  """

  def __init__(self, body: Jaxpr):
    self.body = open_jaxpr(body)
    self._readers: dict[Var, list[int]] = {}
    for n, eqn in enumerate(self.body.eqns):
      for var in eqn.invars:
        if not isinstance(var, core.Literal):
          self._readers.setdefault(var, []).append(n)
    products = [eqn.outvars[0] for eqn in self.body.eqns if eqn.primitive.name == "dot_general"]
    self._of_products = dependents(self.body, products)
    self._made = makers(self.body)

  def products(self, exp: JaxprEqn, lengths: Lengths, named: Labels) -> list[JaxprEqn]:
    """The products that sum weights of an exponential, with named dims, normalised, over its keys."""
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

  def before_sum(self, exp: JaxprEqn) -> str | None:
    """Describes a product that reads exponentials before their division by the sum; None without one."""
    readers = [self.body.eqns[n] for n in self._readers.get(exp.outvars[0], [])]
    product = next((eqn for eqn in readers if eqn.primitive.name == "dot_general"), None)
    if product is None:
      return None
    meet = f"its exponentials meet {describe(product)} before they are divided by their sum"
    return f"{named_softmax(exp)}: {meet}"

  def products_before(self, exp: JaxprEqn) -> Iterator[JaxprEqn]:
    """The products behind the argument of an exponential, through arrays of the same size."""
    size, todo, seen = exp.outvars[0].aval.size, [*exp.invars], set[Any]()
    while todo:
      var = todo.pop()
      if not among(var, self._made) or var in seen or var.aval.size < size // 2:
        continue
      seen.add(var)
      made = self._made[var]
      if made.primitive.name == "dot_general":
        yield made
      else:
        todo += made.invars

  def match(self, exp: JaxprEqn, product: JaxprEqn) -> Softmax:
    """The softmax that a product of `products` has for weights; `NotByBlocks` if it is another form."""
    text, top = named_softmax(exp), _top(exp, self._made)
    if top is None:
      raise NotByBlocks(
        f"{text}: it does not subtract the maximum from its scores (but another number, or nothing)"
      )
    no_quotient = NotByBlocks(
      f"{text}: its weights are not exponentials over their sum (a sink, an epsilon, softmax plus one)"
    )
    scores = exp.outvars[0]
    weighed = dependents(self.body, [scores])
    sides = [n for n, var in enumerate(product.invars) if among(var, weighed)]
    if len(sides) != 1:
      raise no_quotient
    (side,) = sides
    lengths, named = named_dims(scores.aval.shape)
    largest, order = top
    axes = {d for d, place in enumerate(order) if place in largest.params["axes"]}
    kinds: dict[Var, str] = {scores: _EXP}
    labels: dict[Var, Labels] = {scores: named}
    totals: list[JaxprEqn] = []
    selected: set[Var] = set()  # weights of which some were replaced: a row of them may be all zeros
    for eqn in operations_behind(self.body.eqns, [product.invars[side]]):
      used = [n for n, var in enumerate(eqn.invars) if among(var, weighed)]
      if not used:
        continue
      name, out, own_labels = eqn.primitive.name, eqn.outvars[0], labels[eqn.invars[used[0]]]
      own = [kinds[var] if among(var, weighed) else None for var in eqn.invars]
      is_total = name == "reduce_sum" and own == [_EXP] and {*own_labels} == {*named}
      if is_total and {*map(int, eqn.params["axes"])} == axes:
        totals.append(eqn)
        kinds[out], labels[out] = _SUM, push(eqn, 0, named, lengths)
        continue
      kind = _kind(eqn, own, self._made)
      if kind is None and name in _WITH_OTHERS and _SUM in own:
        raise no_quotient
      try:
        if kind is None:
          raise Untiled(eqn)
        kinds[out], labels[out] = kind, _joined(eqn, used, labels, lengths)
      except Untiled:
        raise NotByBlocks(f"{text}: its weights go through {describe(eqn)}") from None
      if kind == _WEIGHT and (name == "select_n" or among(eqn.invars[used[0]], selected)):
        selected.add(out)
    if len(totals) > 1:
      raise NotByBlocks(f"{text}: its weights are summed {len(totals)} times")
    weights = product.invars[side]
    placed = None
    if kinds[weights] == _WEIGHT:
      placed = _summed_over(product, side, labels[weights], axes, lengths)
    if placed is None:
      raise no_quotient
    given = labels[weights], placed
    return Softmax(exp, largest, order, totals[0], product, side, given, weights in selected)

  def _scores(self, exp: JaxprEqn) -> list[Var]:
    """The argument of an exponential, and the operand from which it subtracts a maximum."""
    given, shape = exp.invars[0], exp.outvars[0].aval.shape
    made = maker(given, self._made)
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
      placed = push(eqn, m, labels[var], lengths)
    except Untiled:
      if not eqn.outvars or len(eqn.outvars[0].aval.shape) != len(var.aval.shape):
        return None
      placed = labels[var]
    found.update({name: (dim, factor) for name, dim, factor in placed})
  return tuple((name, *place) for name, place in found.items()) if found else None


def named_dims(shape: Sequence[int]) -> tuple[dict[DimName, int], Labels]:
  """The lengths and labels of each dim `d` of scores, and of its prime factors `(d, n)`, if it is split."""
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


def named_softmax(exp: JaxprEqn) -> str:
  """The name of a softmax in messages, given its exponential."""
  return f"softmax of {exp.outvars[0].aval.str_short()}"


def _top(exp: JaxprEqn, made: Mapping[Var, JaxprEqn]) -> tuple[JaxprEqn, tuple[int, ...]] | None:
  """The maximum that is subtracted before an exponential, with `Softmax.order`; or None."""
  difference = maker(exp.invars[0], made)
  if difference is None or difference.primitive.name != "sub":
    return None
  var = difference.invars[1]
  while (eqn := maker(var, made)) is not None:
    name = eqn.primitive.name
    if name == "reduce_max":
      order = _order_of(eqn.invars[0], difference.invars[0], made)
      return None if order is None else (eqn, order)
    if name == "max" and isinstance(eqn.invars[0], core.Literal) and eqn.invars[0].val == -math.inf:
      var = eqn.invars[1]
    elif name in _PASSED:
      var = eqn.invars[0]
    else:
      return None
  return None


def _order_of(var: Var, scores: Var, made: Mapping[Var, JaxprEqn]) -> tuple[int, ...] | None:
  """For each dim of the scores, the matching dim of a transposed copy; None: the value is not such a copy."""
  (first, dims), (second, wanted) = (uncast(x, made, ("stop_gradient",)) for x in (var, scores))
  if first is second:
    return tuple(dims.index(d) for d in wanted)
  return tuple(range(len(wanted))) if var.aval.shape == scores.aval.shape else None


def uncast(var: Var, made: Mapping[Var, JaxprEqn], others: Sequence[str] = ()) -> tuple[Var, tuple[int, ...]]:
  """The value before casts, transposes and some other operations; and its dim for each dim of the value."""
  dims = tuple(range(len(var.aval.shape)))
  while among(var, made) and (is_cast(made[var]) or made[var].primitive.name in ("transpose", *others)):
    if made[var].primitive.name == "transpose":
      dims = tuple(made[var].params["permutation"][d] for d in dims)
    var = made[var].invars[0]
  return var, dims


def is_cast(eqn: JaxprEqn) -> bool:
  """Whether an operation changes nothing but a floating dtype."""
  floats = is_inexact(eqn.invars[0].aval) and is_inexact(eqn.outvars[0].aval)
  return eqn.primitive.name in ("convert_element_type", "copy") and floats


def _joined(
  eqn: JaxprEqn, operands: Sequence[int], labels: Mapping[Var, Labels], lengths: Mapping[DimName, int]
) -> Labels:
  """The labels of a result of exponentials and sums, which must lie along the same dims; or `Untiled`."""
  found: dict[DimName, tuple[int, int]] = {}
  for n in operands:
    for name, dim, factor in push(eqn, n, labels[eqn.invars[n]], lengths):
      if found.setdefault(name, (dim, factor)) != (dim, factor):
        raise Untiled(eqn)
  return tuple((name, *place) for name, place in found.items())


def _is_zero(var: Var, made: Mapping[Var, JaxprEqn]) -> bool:
  var = origin(var, made, ("broadcast_in_dim",))
  return isinstance(var, core.Literal) and not np.ndim(var.val) and not var.val


def _kind(eqn: JaxprEqn, own: list[str | None], made: Mapping[Var, JaxprEqn]) -> str | None:
  """What an operation of exponentials, their sum and weights makes; None for something else."""
  name = eqn.primitive.name
  if name in (*PLACES, "neg") or (name in ("mul", "div") and own[1] is None):
    return own[0]
  if name == "div" and own == [_EXP, _SUM]:
    return _WEIGHT
  if name == "mul" and own[0] is None:
    return own[1]
  if name == "select_n" and own[0] is None:
    cases = {kind for kind, var in zip(own[1:], eqn.invars[1:], strict=True) if not _is_zero(var, made)}
    return cases.pop() if len(cases) == 1 else None
  return None


def _summed_over(
  product: JaxprEqn, side: int, labels: Labels, axes: set[int], lengths: dict[int, int]
) -> Labels | None:
  """The labels of a product's result, if it sums over just the keys."""
  met: Any = meeting(product)
  keys = {d for d in axes if lengths[d] > 1}
  names = {dim: wholes(labels, [dim]) for dim in met.summed[side]}
  if sorted(name for own in names.values() for name in own) != sorted(keys) or any(
    product.invars[side].aval.shape[dim] != math.prod(lengths[name] for name in own)
    for dim, own in names.items()
  ):
    return None
  return push(product, side, labels, lengths)


def wholes(labels: Labels, dims: Sequence[int]) -> list[int]:
  """The dims of the scores that are, or are part of, some dims."""
  return [name for name, dim, _ in labels if dim in dims and isinstance(name, int)]
