"""Statistics of the columns of logits, computed in chunks of the columns, forward and backward.

A statistic is one number, or a few, per row: a sum, a sum of exponentials, a maximum, the best columns. The
statistics of the chunks combine to that of all columns. The columns are the last dim, and stay, with size 1.
An example: chunks [1, 2] and [5, 4] have the maxima and sums of exponentials (2, 1.37) and (5, 1.37), and
together (5, 1.37 * exp(2 - 5) + 1.37). Backward, each chunk is computed again, and its gradient follows from
the statistics of all columns: for this sum `exp(chunk - 5)`, the softmax but for the sum.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx_parallel.attention.tiling import BlockNumbers, Grid, Labels, Node, Tiles, fill, finite, pull, tie
from nnx_parallel.core.interpret import read
from nnx_parallel.core.jaxprs import bind, is_inexact
from nnx_parallel.core.types import JaxprEqn, PyTree, Value, Var
from nnx_parallel.layers.picks import place_in_row

COLUMNS = "columns"


def _wide(x: jax.Array) -> DTypeLike:
  return jnp.promote_types(x.dtype, jnp.float32) if is_inexact(x) else x.dtype


class Kind(NamedTuple):
  """A statistic of a chunk `x`, of which `columns` are the numbers; `others` are more numbers of each row."""

  of: Callable[..., list[jax.Array]]  # `(x, columns, *others) -> numbers` per row
  combine: Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]]  # `(numbers, numbers) -> numbers`
  # `(their gradients, the numbers of all columns, x, columns, *others) -> gradient of x`
  pull: Callable[..., jax.Array]
  start: tuple[float, ...]  # the numbers of no columns
  absent: float  # an element that changes nothing


def _sum(x: jax.Array) -> jax.Array:
  return x.sum(-1, keepdims=True, dtype=_wide(x))


def _add(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
  return [a[0] + b[0]]


SUM = Kind(lambda x, _: [_sum(x)], _add, lambda g, _, x, __: g[0] + jnp.zeros_like(x), start=(0,), absent=0)


def _exponentials(power: jax.Array, _: jax.Array) -> list[jax.Array]:
  # The derivative by the maximum is 0 in all.
  largest = jax.lax.stop_gradient(power.astype(_wide(power)).max(-1, keepdims=True))
  return [largest, jnp.exp(power - finite(largest)).sum(-1, keepdims=True)]


def _combine_exponentials(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
  largest = jnp.maximum(a[0], b[0])
  base = finite(largest)
  return [largest, a[1] * jnp.exp(a[0] - base) + b[1] * jnp.exp(b[0] - base)]


EXPONENTIALS = Kind(
  _exponentials, _combine_exponentials,
  lambda g, known, power, _: g[1] * jnp.exp(power - finite(known[0])),
  start=(-math.inf, 0), absent=-math.inf,
)  # fmt: skip
"""The maximum, as a constant, and the sum of `exp(x - maximum)`."""


def _extreme(sign: int) -> Kind:
  """The maximum of `sign * x`, and how many elements equal it: each has its share of the gradient."""

  def of(x: jax.Array, _: jax.Array) -> list[jax.Array]:
    largest = (sign * x).max(-1, keepdims=True)
    return [largest, _sum((sign * x == largest).astype(x.dtype)).astype(x.dtype)]

  def combine(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    largest = jnp.maximum(a[0], b[0])
    counts = [jnp.where(x[0] == largest, x[1], jnp.zeros_like(x[1])) for x in (a, b)]
    return [largest, counts[0] + counts[1]]

  def pull(g: list[jax.Array], known: list[jax.Array], x: jax.Array, _: jax.Array) -> jax.Array:
    # A compiled sum may round the elements otherwise than their maximum, and count none.
    share = sign * g[0] / jnp.maximum(known[1], 1)
    return jnp.where(sign * x == known[0], share, jnp.zeros_like(x))

  return Kind(of, combine, pull, start=(-math.inf, 0), absent=-sign * math.inf)


LARGEST, LEAST = _extreme(1), _extreme(-1)


@functools.cache
def best(count: int) -> Kind:
  """The largest elements, and their columns."""

  def of(x: jax.Array, columns: jax.Array) -> list[jax.Array]:
    alone = x.max(-1, keepdims=True), x.argmax(-1, keepdims=True)
    found, places = alone if count == 1 else jax.lax.top_k(x, count)
    return [found, jnp.take_along_axis(columns, places, -1)]

  def combine(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    pairs = [jnp.concatenate(pair, -1) for pair in zip(a, b, strict=True)]
    ordered = jax.lax.sort((-pairs[0], pairs[1]), num_keys=2)  # of equal elements, the first column
    return [-ordered[0][..., :count], ordered[1][..., :count]]

  def pull(g: list[jax.Array], known: list[jax.Array], x: jax.Array, columns: jax.Array) -> jax.Array:
    found = jnp.zeros_like(x)
    for n in range(count):
      found = jnp.where(columns == known[1][..., n : n + 1], g[0][..., n : n + 1], found)
    return found

  return Kind(of, combine, pull, start=(-math.inf, 0), absent=-math.inf)


def picked(place: Callable[[jax.Array], jax.Array]) -> Kind:
  """The element of each row in the column `place(others)`; 0 if there is none."""

  def of(x: jax.Array, columns: jax.Array, others: jax.Array) -> list[jax.Array]:
    return [_sum(jnp.where(columns == place(others), x, jnp.zeros_like(x)))]

  def pull(g: list[jax.Array], _: object, x: jax.Array, columns: jax.Array, others: jax.Array) -> jax.Array:
    return jnp.where(columns == place(others), g[0], jnp.zeros_like(x))

  return Kind(of, _add, pull, start=(0,), absent=0)


class Statistic(NamedTuple):
  """A statistic of a value of a program, and of other values of it."""

  kind: Kind
  nodes: tuple[Node, ...]  # the value with columns comes first
  derived: bool  # whether its gradient may be needed


@dataclasses.dataclass(frozen=True)
class Head:
  """The product that makes logits, for `groups` of its columns, each with a copy of its input."""

  product: JaxprEqn
  labels: Labels  # of its result
  grid: Grid
  groups: int

  @functools.cached_property
  def _wanted(self) -> list[Labels]:
    return pull(self.product, self.labels, self.grid.lengths)

  @functools.cached_property
  def side(self) -> int | None:
    """Which operand is copied; None for one group, for groups of one column, or without a gradient."""
    side = next((n for n, own in enumerate(self._wanted) if not own), None)
    if self.groups == 1 or side is None or not is_inexact(self.product.invars[side].aval):
      return None
    return side if self._wanted[1 - side] else None

  def add(self, known: dict[Node, jax.Array]) -> None:
    """Adds a chunk of the result, given copies of the input and a chunk of the weights."""
    nodes = list(zip(self.product.invars, self._wanted, strict=True))
    weights = 1 - (self.side or 0)
    ((_, dim, _),) = self._wanted[weights]
    pair = [known[node] for node in nodes]
    whole = pair[weights]
    groups = whole.reshape(*whole.shape[:dim], self.groups, -1, *whole.shape[dim + 1 :])
    pair[weights] = jnp.moveaxis(groups, dim, 0)
    found = jax.vmap(lambda *xs: bind(self.product, xs)[0])(*pair)
    ((_, dim, _),) = self.labels
    logits = jax.lax.collapse(jnp.moveaxis(found, 0, dim), dim, dim + 2)
    known[self.product.outvars[0], self.labels] = logits


class Pass:
  """Some statistics, in one pass over the chunks of the columns; another pass computes their gradients."""

  def __init__(self, statistics: Sequence[Statistic], tiles: Tiles, head: Head):
    self._statistics, self._tiles, self._head, self._grid = statistics, tiles, head, head.grid
    # Values with gradients come first.
    self._leaves = sorted(tiles.leaves, key=lambda node: not is_inexact(node[0].aval))
    self._floats = sum(is_inexact(var.aval) for var, _ in self._leaves)
    self._blocks = np.arange(self._grid.count(COLUMNS), dtype=np.int32)

  def results(self, known: Mapping[Var, Value]) -> list[list[jax.Array]]:
    """The numbers of each statistic, given the values that the chunks are made of."""

    @jax.custom_vjp
    def loss_in_chunks(*given: jax.Array) -> list[list[jax.Array]]:
      return self._forward(*given)

    def with_kept(*given: jax.Array) -> tuple[list[list[jax.Array]], PyTree]:
      found = self._forward(*given)
      return found, (given, found)

    loss_in_chunks.defvjp(with_kept, self._backward)
    return jax.jit(loss_in_chunks, inline=False)(*(read(var, known) for var, _ in self._leaves))

  def _forward(self, *given: jax.Array) -> list[list[jax.Array]]:
    *given, blocks = tie([*given, jnp.asarray(self._blocks)])

    def of(block: jax.Array) -> list[list[jax.Array]]:
      places = {COLUMNS: block}
      found = self._inputs(self._take(given, places), places)
      pairs = zip(self._statistics, found, strict=True)
      return [kind.of(self._fresh(x, places, kind.absent), *others) for (kind, *_), (x, *others) in pairs]

    def body(state: list[list[jax.Array]], block: jax.Array) -> tuple[list[list[jax.Array]], None]:
      pairs = zip(self._statistics, state, of(block), strict=True)
      return [one.kind.combine(before, new) for one, before, new in pairs], None

    numbers = jax.eval_shape(of, blocks[0])
    start = [
      [fill(aval, x, aval.dtype) for aval, x in zip(avals, one.kind.start, strict=False)]
      for one, avals in zip(self._statistics, numbers, strict=True)
    ]
    return jax.lax.scan(body, start, blocks)[0]

  def _take(self, given: Sequence[jax.Array], places: BlockNumbers) -> list[jax.Array]:
    """The leaves for a chunk."""
    pairs = zip(given, self._leaves, strict=False)
    return [self._grid.take(x, own, places) for x, (_, own) in pairs]

  def _inputs(
    self, tiles: Sequence[jax.Array], places: BlockNumbers, copied: bool = False
  ) -> list[list[jax.Array]]:
    """What each statistic takes: a chunk of the value with columns, the numbers of these, other values."""
    known = dict(zip(self._leaves, tiles, strict=True))
    if copied:
      self._head.add(known)
    length, factor = self._grid.lengths[COLUMNS], self._head.labels[0][2]
    columns = self._grid.indices(COLUMNS, places) + length * jnp.arange(factor)[:, None]
    found: list[list[jax.Array]] = []
    for _, ((var, own), *others), _ in self._statistics:
      x = jnp.moveaxis(self._tiles.value(var, own, known, places), own[0][1], -1)
      numbers = columns.astype(jnp.int32).reshape(-1) + jnp.zeros_like(x, jnp.int32)
      found.append([x, numbers, *(self._tiles.value(*node, known, places) for node in others)])
    return found

  def _fresh(self, x: jax.Array, places: BlockNumbers, absent: float) -> jax.Array:
    """A chunk without the columns that an earlier chunk has."""
    return self._grid.fresh(x, ((COLUMNS, x.ndim - 1, self._head.labels[0][2]),), places, absent)

  def _backward(self, kept: PyTree, gradients: PyTree) -> tuple[jax.Array | None, ...]:
    given, found = kept
    owns = [own for _, own in self._leaves[: self._floats]]
    first, rest = list(given[: self._floats]), given[self._floats :]
    side = self._head.side
    copied = None if side is None else self._leaves.index((self._head.product.invars[side], ()))
    if copied is not None:
      x = first[copied]
      first[copied] = jnp.broadcast_to(x[None], (self._head.groups, *x.shape))

    def body(totals: list[jax.Array], block: jax.Array) -> tuple[list[jax.Array], None]:
      places = {COLUMNS: block}
      tiles = self._take([*first, *rest], places)

      def chunks(*floats: jax.Array) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        inputs = self._inputs([*floats, *tiles[self._floats :]], places, copied=copied is not None)
        pairs = zip(self._statistics, inputs, strict=True)
        return [x for one, (x, *_) in pairs if one.derived], inputs

      _, pull, inputs = jax.vjp(chunks, *tiles[: self._floats], has_aux=True)
      arriving = [
        self._fresh(one.kind.pull(g, total, x, *others), places, 0).astype(x.dtype)
        for one, g, total, (x, *others) in zip(self._statistics, gradients, found, inputs, strict=True)
        if one.derived
      ]
      triples = zip(totals, pull(arriving), owns, strict=True)
      news = [self._grid.take(x, own, places) + new.astype(x.dtype) for x, new, own in triples]
      pairs = zip(totals, news, owns, strict=True)
      return [self._grid.put(x, new, own, places) for x, new, own in pairs], None

    # What all chunks read has a sum over them, in float32.
    zeros = [jnp.zeros_like(x if own else x.astype(_wide(x))) for x, own in zip(first, owns, strict=True)]
    sums, _ = jax.lax.scan(body, zeros, self._blocks)
    results = [total.astype(x.dtype) for total, x in zip(sums, first, strict=True)]
    if copied is not None:
      results[copied] = results[copied].sum(0)
    return (*results, *[None] * len(rest))
