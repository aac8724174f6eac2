"""Groups the dims of a traced program into classes: a split of one dim carries over to all of its class."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from nnx_parallel.core.classes import Forest
from nnx_parallel.core.dims import PRODUCTS, dim_map
from nnx_parallel.core.jaxprs import called, opened, scan_counts


@dataclasses.dataclass
class Facts:
  """Facts of a class of dims.

  Attributes:
    sizes: of its dims, in elements; a split must divide all of them.
    collectives: what its split would cost: one for each sum over it and each look-up in it.
    is_product: whether it takes part in a matrix product, a convolution or a look-up.
  """

  sizes: set[int]
  collectives: int = 0
  is_product: bool = False


class Classes:
  """The dims of all values of a program, in classes; `classes[root]` has the facts of one."""

  def __init__(self) -> None:
    self._forest = Forest()
    self._facts: list[Facts] = []
    self._dims: dict[Any, list[int]] = {}

  def of(self, var: Any) -> list[int]:
    """The class of each dim of a value, as the number of its root."""
    return [self._forest.root(node) for node in self._nodes(var)]

  def __getitem__(self, root: int) -> Facts:
    return self._facts[root]

  def link(self, a: Any, dim_a: int, b: Any, dim_b: int) -> None:
    """Puts two dims into one class: a split of one carries over to the other."""
    root, other = self.of(a)[dim_a], self.of(b)[dim_b]
    one, two = self[root], self[other]
    # A dim of size 1 is broadcast, and so not the same dim.
    if 1 in one.sizes or 1 in two.sizes or self._forest.unite(root, other) is None:
      return
    one.sizes |= two.sizes
    one.collectives += two.collectives
    one.is_product |= two.is_product

  def link_all(self, a: Any, b: Any) -> None:
    """Links two values of equal rank dim by dim."""
    for dim in range(min(len(self._nodes(a)), len(self._nodes(b)))):
      self.link(a, dim, b, dim)

  def use(self, var: Any, dim: int, *, cost: int, product: bool = True) -> None:
    """Counts a product, a look-up or a sum that uses a dim, and the collectives of its split there."""
    facts = self[self.of(var)[dim]]
    facts.is_product |= product
    facts.collectives += cost

  def forget(self, jaxpr: Any) -> None:
    """Gives the next call of a program new classes: jax traces equal calls once, to one jaxpr."""
    for var in (*jaxpr.constvars, *jaxpr.invars, *(made for eqn in jaxpr.eqns for made in eqn.outvars)):
      self._dims.pop(var, None)

  def _nodes(self, var: Any) -> list[int]:
    if not _is_variable(var):  # a literal: it cannot be hashed, and is used once
      return [self._new(size) for size in _shape(var)]
    if var not in self._dims:
      self._dims[var] = [self._new(size) for size in _shape(var)]
    return self._dims[var]

  def _new(self, size: int) -> int:
    self._facts.append(Facts({size}))
    return self._forest.new()


def link(jaxpr: Any) -> Classes:
  """Links the dims of a jaxpr; `of` gives the classes of a value."""
  classes = Classes()
  _read(classes, jaxpr)
  return classes


def _read(classes: Classes, jaxpr: Any) -> None:
  for eqn in jaxpr.eqns:
    rule = _RULES.get(eqn.primitive.name)
    if rule is not None:
      rule(classes, eqn)
    elif not _read_call(classes, eqn):
      _read_operation(classes, eqn)


def _read_call(classes: Classes, eqn: Any) -> bool:
  """Operations that hold one program with the same inputs and outputs: jit, checkpoint, custom rules."""
  inner = opened(called(eqn))
  if inner is None or len(inner.invars) != len(eqn.invars) or len(inner.outvars) != len(eqn.outvars):
    return False
  _enter(classes, inner, eqn.invars, eqn.outvars)
  return True


def _enter(classes: Classes, inner: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
  for outside, inside in zip(inputs, inner.invars, strict=True):
    classes.link_all(outside, inside)
  _read(classes, inner)
  for outside, inside in zip(outputs, inner.outvars, strict=True):
    classes.link_all(outside, inside)
  classes.forget(inner)


def _read_operation(classes: Classes, eqn: Any) -> None:
  """Links the dims of each factor; a sum over one, or a look-up in it, costs a collective."""
  found = dim_map(eqn)
  if found is None:
    # Most other operations work element by element. A wrong link can only make a proposal worse.
    _same_size(classes, eqn)
    return
  arrays = zip((*eqn.invars, *eqn.outvars), (*found.operands, *found.results), strict=True)
  dims: dict[int, list[tuple[Any, int]]] = {}
  for var, factors in arrays:
    for dim, factor in enumerate(factors):
      if factor is not None:
        dims.setdefault(factor, []).append((var, dim))
  is_product = eqn.primitive.name in PRODUCTS
  for factor, places in dims.items():
    (first, dim), *others = places
    for var, other in others:
      if factor not in found.mixed or _shape(first)[dim] == _shape(var)[other]:
        classes.link(first, dim, var, other)
    if is_product or factor in found.reduced:
      looked_up = factor in found.mixed
      classes.use(first, dim, cost=int(factor in found.reduced), product=is_product or looked_up)


def _same_size(classes: Classes, eqn: Any) -> None:
  """Links dims at the same place that keep their size."""
  for source, result in itertools.product(eqn.invars, eqn.outvars):
    if len(_shape(source)) == len(_shape(result)):
      for dim, (a, b) in enumerate(zip(_shape(source), _shape(result), strict=True)):
        if a == b:
          classes.link(source, dim, result, dim)


def _scan(classes: Classes, eqn: Any) -> None:
  inner, counts = opened(eqn.params["jaxpr"]), scan_counts(eqn)
  consts, carries = counts.constants, counts.carried
  fixed = consts + carries
  for outside, inside in zip(eqn.invars[:fixed], inner.invars[:fixed], strict=True):
    classes.link_all(outside, inside)
  _link_stacked(classes, eqn.invars[fixed:], inner.invars[fixed:])
  _read(classes, inner)
  for place, inside in enumerate(inner.outvars[:carries]):
    classes.link_all(inside, inner.invars[consts + place])
    classes.link_all(eqn.outvars[place], inside)
  _link_stacked(classes, eqn.outvars[carries:], inner.outvars[carries:])
  classes.forget(inner)


def _link_stacked(classes: Classes, stacked: Sequence[Any], each: Sequence[Any]) -> None:
  for outside, inside in zip(stacked, each, strict=True):
    for dim in range(len(_shape(inside))):
      classes.link(outside, dim + 1, inside, dim)


def _cond(classes: Classes, eqn: Any) -> None:
  for branch in eqn.params["branches"]:
    _enter(classes, branch.jaxpr, eqn.invars[1:], eqn.outvars)


def _while(classes: Classes, eqn: Any) -> None:
  body, skipped = eqn.params["body_jaxpr"].jaxpr, eqn.params["cond_nconsts"]
  _enter(classes, body, eqn.invars[skipped:], eqn.outvars)


_RULES: dict[str, Callable[[Classes, Any], None]] = {
  "scan": _scan,
  "cond": _cond,
  "while": _while,
}


def _is_variable(var: Any) -> bool:
  return not hasattr(var, "val")


def _shape(var: Any) -> tuple[int, ...]:
  return tuple(getattr(var.aval, "shape", ()))
