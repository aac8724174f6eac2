"""Equivalence classes of nodes, with ratios between the nodes, by union-find."""

from __future__ import annotations

from fractions import Fraction

Ratio = int | Fraction


class Forest:
  """Nodes in classes; within a class, each node has a ratio to each other node.

  Example:
    >>> forest = Forest()
    >>> minute, hour, day = (forest.new() for _ in range(3))
    >>> _ = forest.unite(hour, minute, 60), forest.unite(day, hour, 24)
    >>> forest.root(minute) == forest.root(day), forest.ratio(day) / forest.ratio(minute)
    (True, Fraction(1440, 1))
  """

  def __init__(self) -> None:
    self._parent: list[int] = []
    self._ratio: list[Ratio] = []

  def __len__(self) -> int:
    return len(self._parent)

  def new(self) -> int:
    """Makes a node in a new class."""
    self._parent.append(len(self._parent))
    self._ratio.append(1)
    return len(self._parent) - 1

  def root(self, node: int) -> int:
    """The node that represents the class."""
    parent = self._parent
    while parent[node] != node:
      above = parent[node]
      self._ratio[node] *= self._ratio[above]
      parent[node] = parent[above]
      node = parent[node]
    return node

  def ratio(self, node: int) -> Ratio:
    """The ratio of a node to the root of its class."""
    ratio: Ratio = 1
    while self._parent[node] != node:
      ratio *= self._ratio[node]
      node = self._parent[node]
    return ratio

  def unite(self, one: int, other: int, ratio: Ratio = 1) -> tuple[int, int] | None:
    """Puts two nodes into one class: `one` is `ratio` times `other`.

    Returns the root that remains and the root that does not; None if they were in one class already.
    """
    a, b = self.root(one), self.root(other)
    if a == b:
      return None
    self._parent[b] = a
    found = Fraction(self.ratio(one)) / (ratio * self.ratio(other))
    self._ratio[b] = found.numerator if found.denominator == 1 else found
    return a, b
