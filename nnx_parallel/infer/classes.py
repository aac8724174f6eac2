"""Groups the dims of a traced program into classes: a split of one dim carries over to all of its class."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from nnx_parallel.core.interpret import DEFAULT, Facts, facts_of, wiring
from nnx_parallel.core.jaxprs import open_jaxpr
from nnx_parallel.core.types import AnyArray, JaxprEqn, Program, Value
from nnx_parallel.infer.dims import PRODUCTS, dim_map

Dims = tuple[int, ...]
"""A node for each dim of an array; linked nodes are in one class."""


@dataclasses.dataclass
class Class:
  """The facts about a class of dims."""

  sizes: set[int]  # the sizes of its dims, in elements; a split must divide all of them
  collectives: int = 0  # the cost of its split: one for each sum over it and each look-up in it
  is_product: bool = False  # whether it takes part in a matrix product, a convolution or a look-up


class Classes:
  """The dims of a program's values, in classes."""

  def __init__(self, jaxpr: Program):
    self._parents: list[int] = []  # of each node, another node of its class, up to the root: union-find
    self._classes: list[Class] = []
    self._sizes: list[int] = []
    inputs = [self._new(_shape(var.aval)) for var in open_jaxpr(jaxpr).invars]
    facts: Facts[Dims] = Facts(
      constant=lambda x: self._new(_shape(x)),
      follow=self._follow,
      join=self._joined,
      row=lambda _, dims: dims[1:],
      stack=lambda eqn, dims: (*self._new([eqn.params["length"]]), *dims),
    )
    facts_of(jaxpr, inputs, facts)
    self._inputs = inputs

  @property
  def inputs(self) -> list[list[int]]:
    """For each input of the program, the class of each dim, as the number of its root."""
    return [[self._root(node) for node in dims] for dims in self._inputs]

  def __getitem__(self, root: int) -> Class:
    return self._classes[root]

  def _new(self, sizes: Iterable[int]) -> Dims:
    first = len(self._sizes)
    self._sizes += sizes
    nodes = range(first, len(self._sizes))
    self._parents += nodes
    self._classes += [Class({self._sizes[node]}) for node in nodes]
    return tuple(nodes)

  def _root(self, node: int) -> int:
    """The node that stands for the class of a node; the way to it is halved each time."""
    while (parent := self._parents[node]) != node:
      self._parents[node] = self._parents[parent]
      node = parent
    return node

  def link(self, one: int, other: int) -> None:
    """Puts two dims into one class: a split of one dim carries over to the other."""
    a, b = self._root(one), self._root(other)
    first, second = self[a], self[b]
    # A dim of size 1 is broadcast, and so not the same dim.
    if a == b or 1 in first.sizes or 1 in second.sizes:
      return
    self._parents[b] = a
    first.sizes |= second.sizes
    first.collectives += second.collectives
    first.is_product |= second.is_product

  def _joined(self, one: Dims, other: Dims) -> Dims:
    for a, b in zip(one, other, strict=False):
      self.link(a, b)
    return one

  def _follow(self, eqn: JaxprEqn, inputs: list[Dims]) -> Sequence[Value]:
    """Links the dims of each factor; a sum over a dim, or a look-up in it, costs a collective."""
    found = dim_map(eqn)
    if found is None and wiring(eqn).inner:
      return DEFAULT
    results = [self._new(_shape(var.aval)) for var in eqn.outvars]
    if found is None:
      # Most other operations are elementwise. A wrong link can only make a proposal worse.
      self._link_equal_sizes(inputs, results)
      return results
    arrays = zip((*inputs, *results), (*found.operands, *found.results), strict=True)
    pairs = [pair for dims, factors in arrays for pair in zip(factors, dims, strict=True)]
    is_product = eqn.primitive.name in PRODUCTS
    for factor in dict.fromkeys(factor for factor, _ in pairs if factor is not None):
      first, *others = [node for other, node in pairs if other == factor]
      for node in others:
        if factor not in found.mixed or self._sizes[first] == self._sizes[node]:
          self.link(first, node)
      if is_product or factor in found.reduced:
        own = self[self._root(first)]
        own.is_product |= is_product or factor in found.mixed
        own.collectives += factor in found.reduced
    return results

  def _link_equal_sizes(self, inputs: Sequence[Dims], results: Sequence[Dims]) -> None:
    """Links dims at the same place that keep their size."""
    for source, result in itertools.product(inputs, results):
      if len(source) == len(result):
        for one, other in zip(source, result, strict=True):
          if self._sizes[one] == self._sizes[other]:
            self.link(one, other)


def _shape(x: AnyArray) -> tuple[int, ...]:
  return tuple(getattr(x, "shape", ()))
