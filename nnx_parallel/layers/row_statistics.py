"""Statistics of the columns of logits, computed in chunks of the columns, forward and backward.

A statistic is one number, or a few, per row: a sum, a sum of exponentials, a maximum, the best columns. The
statistics of the chunks combine to that of all columns. The columns are the last dim, and stay, with size 1.
An example: chunks [1, 2] and [5, 4] have the maxima and sums of exponentials (2, 1.37) and (5, 1.37), and
together (5, 1.37 * exp(2 - 5) + 1.37). Backward, each chunk is computed again; its part of the sum is
`exp(chunk - 5).sum()`, and the gradients of these parts are the softmax. The maximum needs no gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnx_parallel.attention.tiling import BlockNumbers, Node, Tiles, fill, finite, tie
from nnx_parallel.core.jaxprs import bind, is_inexact
from nnx_parallel.core.types import JaxprEqn, PyTree, TreeDef

COLUMNS = "columns"


def _wide(x: jax.Array) -> DTypeLike:
  return jnp.promote_types(x.dtype, jnp.float32) if is_inexact(x) else x.dtype


class Kind(NamedTuple):
  """A statistic: of a chunk, of two chunks together, and the part of it that has a gradient by a chunk."""

  of: Callable[..., list[jax.Array]]  # `*arrays -> numbers` per row
  combined: Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]]  # `(numbers, numbers) -> numbers`
  # `(numbers of all columns, *arrays) -> [number]`, of the one that is `derived`; None: none is
  part: Callable[..., list[jax.Array]]
  start: tuple[float, ...]  # the numbers of no columns, and of columns that an earlier chunk has
  derived: int | None = 0


def _sum(x: jax.Array) -> list[jax.Array]:
  return [x.sum(-1, keepdims=True, dtype=_wide(x))]


SUM = Kind(_sum, lambda a, b: [a[0] + b[0]], lambda _, x: _sum(x), start=(0,))


def _exponentials(power: jax.Array) -> list[jax.Array]:
  # The derivative by the maximum is 0 in all, and the part leaves it out too.
  largest = jax.lax.stop_gradient(power.astype(_wide(power)).max(-1, keepdims=True))
  return [largest, *_exponentials_of([largest], power)]


def _exponentials_of(known: Sequence[jax.Array], power: jax.Array) -> list[jax.Array]:
  return [jnp.exp(power.astype(_wide(power)) - finite(known[0])).sum(-1, keepdims=True)]


def _exponentials_of_both(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
  largest = jnp.maximum(a[0], b[0])
  base = finite(largest)
  return [largest, a[1] * jnp.exp(a[0] - base) + b[1] * jnp.exp(b[0] - base)]


EXPONENTIALS = Kind(_exponentials, _exponentials_of_both, _exponentials_of, start=(-math.inf, 0), derived=1)
"""The maximum, and the sum of `exp(x - maximum)`."""


def _largest(x: jax.Array) -> list[jax.Array]:
  largest = x.max(-1, keepdims=True)
  return [largest, (x == largest).sum(-1, keepdims=True, dtype=x.dtype)]


def _larger(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
  largest = jnp.maximum(a[0], b[0])
  counts = (jnp.where(x[0] == largest, x[1], jnp.zeros_like(x[1])) for x in (a, b))
  return [largest, sum(counts, jnp.zeros_like(largest))]


def _share_of_largest(known: Sequence[jax.Array], x: jax.Array) -> list[jax.Array]:
  return _sum(jnp.where(x == known[0], x / known[1], jnp.zeros_like(x)))


LARGEST = Kind(_largest, _larger, _share_of_largest, start=(-math.inf, 0))
"""The maximum, and how many elements equal it: each has its share of the gradient."""
LARGEST_FIXED = LARGEST._replace(part=lambda *_: [], derived=None)
"""The same without a gradient."""


@functools.cache
def best(count: int) -> Kind:
  """The largest elements, and their columns."""

  def of(x: jax.Array, columns: jax.Array) -> list[jax.Array]:
    alone = x.max(-1, keepdims=True), x.argmax(-1, keepdims=True)
    found, places = alone if count == 1 else jax.lax.top_k(x, count)
    columns = columns + jnp.zeros_like(x, dtype=columns.dtype)
    return [found, jnp.take_along_axis(columns, places, -1)]

  def combined(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    pairs = [jnp.concatenate(pair, -1) for pair in zip(a, b, strict=True)]
    ordered = jax.lax.sort((-pairs[0], pairs[1]), num_keys=2)  # of equal elements, the first column
    return [-ordered[0][..., :count], ordered[1][..., :count]]

  def part(known: Sequence[jax.Array], x: jax.Array, columns: jax.Array) -> list[jax.Array]:
    chosen = (jnp.where(columns == known[1][..., n : n + 1], x, jnp.zeros_like(x)) for n in range(count))
    return [jnp.concatenate([row.sum(-1, keepdims=True) for row in chosen], -1)]

  return Kind(of, combined, part, start=(-math.inf, 0))


@dataclasses.dataclass(frozen=True)
class Apart:
  """The head, a product, for `count` groups of its columns, each with a copy of its input: operand `side`."""

  product: JaxprEqn
  count: int
  out: Node
  given: list[Node]
  side: int

  def value(self, x: jax.Array, weights: jax.Array) -> jax.Array:
    """The result for copies of the input and all columns of a part."""
    ((_, dim, _),) = self.given[1 - self.side][1]
    groups = weights.reshape(*weights.shape[:dim], self.count, -1, *weights.shape[dim + 1 :])
    pair = [x, jnp.moveaxis(groups, dim, 0)]
    found = jax.vmap(lambda *xs: bind(self.product, xs)[0])(*(pair if self.side == 0 else pair[::-1]))
    ((_, dim, _),) = self.out[1]
    return jax.lax.collapse(jnp.moveaxis(found, 0, dim), dim, dim + 2)


def apart_of(tiles: Tiles, product: JaxprEqn, count: int) -> Apart | None:
  """None for one group, for groups of one column, or if the input has no gradient."""
  out, wanted = next((node, own) for node, (eqn, own) in tiles.parts.items() if eqn is product)
  given = list(zip(product.invars, wanted, strict=True))
  side = next((n for n, (_, own) in enumerate(given) if not own), None)
  if count == 1 or side is None or not is_inexact(given[side][0].aval) or not given[1 - side][1]:
    return None
  return Apart(product, count, out, given, side)


@dataclasses.dataclass(frozen=True)
class Statistics:
  """Some statistics, with their inputs and the calls they replace, in chunks of the columns of tiles."""

  tiles: Tiles
  kinds: Sequence[Kind]
  ends: Sequence[Sequence[Node]]
  calls: Sequence[JaxprEqn]
  apart: Apart | None

  @functools.cached_property
  def leaves(self) -> list[Node]:
    """The arguments of the function; arguments with gradients come first."""
    return sorted(self.tiles.leaves, key=lambda node: not is_inexact(node[0].aval))

  @property
  def _blocks(self) -> jax.Array:
    """The numbers of the chunks."""
    return jnp.arange(self.tiles.grid.count(COLUMNS), dtype=jnp.int32)

  @property
  def _floats(self) -> int:
    return sum(is_inexact(var.aval) for var, _ in self.leaves)

  def function(self) -> Callable[..., Sequence[jax.Array]]:
    """The function, with a gradient that computes the tiles again."""

    @jax.custom_vjp
    def statistics(*given: jax.Array) -> list[list[jax.Array]]:
      return self._forward(*given)

    def with_kept(*given: jax.Array) -> tuple[list[list[jax.Array]], PyTree]:
      found = self._forward(*given)
      return found, (given, found)

    statistics.defvjp(with_kept, self._backward)

    def loss_in_chunks(*given: jax.Array) -> list[jax.Array]:
      return jax.tree.leaves(statistics(*given))

    return loss_in_chunks

  def _inputs(self, known: dict[Node, jax.Array], places: BlockNumbers) -> list[list[jax.Array]]:
    """The tiles that each statistic takes, in the first of them without columns that an earlier chunk has."""
    found: list[list[jax.Array]] = []
    for kind, wanted in zip(self.kinds, self.ends, strict=True):
      first, *others = (self.tiles.value(*node, known, places) for node in wanted)
      found.append([self.tiles.grid.fresh(first, wanted[0][1], places, kind.start[0]), *others])
    return found

  def _forward(self, *arrays: jax.Array) -> list[list[jax.Array]]:
    *given, row = tie([*arrays, self._blocks])

    def body(state: list[list[jax.Array]], places: BlockNumbers) -> tuple[list[list[jax.Array]], None]:
      pairs = zip(self.leaves, given, strict=True)
      known = {node: self.tiles.grid.take(x, node[1], places) for node, x in pairs}
      taken = zip(self.kinds, self._inputs(known, places), state, strict=True)
      return [kind.combined(before, kind.of(*xs)) for kind, xs, before in taken], None

    start = [
      [fill(out.aval, x, out.aval.dtype) for out, x in zip(eqn.outvars, kind.start, strict=False)]
      for kind, eqn in zip(self.kinds, self.calls, strict=True)
    ]
    return jax.lax.scan(body, start, {COLUMNS: row})[0]

  def _backward(self, kept: PyTree, cotangent: PyTree) -> tuple[jax.Array | None, ...]:
    given, found = kept
    kinds = zip(self.kinds, cotangent, strict=True)
    arriving = [g[kind.derived] for kind, g in kinds if kind.derived is not None]
    pairs = [(x, own) for x, (_, own) in zip(given, self.leaves, strict=True)]
    first, rest = pairs[: self._floats], pairs[self._floats :]
    fixed = [*rest, *((x, ()) for x in jax.tree.leaves(found))]
    apart, copied, grid = self.apart, 0, self.tiles.grid
    if apart is not None:
      copied = self.leaves.index(apart.given[apart.side])
      x = first[copied][0]
      first[copied] = jnp.broadcast_to(x[None], (apart.count, *x.shape)), ()
    part = functools.partial(self._part, jax.tree.structure(found))
    owns = [own for _, own in first]

    def body(totals: list[jax.Array], block: jax.Array) -> tuple[list[jax.Array], None]:
      places = {COLUMNS: block}
      tiles, others = ([grid.take(x, own, places) for x, own in some] for some in (first, fixed))
      _, pull = jax.vjp(lambda *xs: part(places, others, *xs), *tiles)
      triples = zip(totals, pull(arriving), owns, strict=True)
      news = [grid.take(x, own, places) + new.astype(x.dtype) for x, new, own in triples]
      return [grid.put(x, new, own, places) for x, new, own in zip(totals, news, owns, strict=True)], None

    # What all chunks read has a sum over them, in float32.
    zeros = [jnp.zeros_like(x if own else x.astype(_wide(x))) for x, own in first]
    sums, _ = jax.lax.scan(body, zeros, self._blocks)
    results = [total.astype(x.dtype) for total, (x, _) in zip(sums, first, strict=True)]
    if apart is not None:
      results[copied] = results[copied].sum(0)
    return (*results, *[None] * len(rest))

  def _part(
    self, form: TreeDef, places: BlockNumbers, fixed: Sequence[jax.Array], *inputs: jax.Array
  ) -> list[jax.Array]:
    """The contribution of a chunk of columns to the statistics, given the statistics of all columns."""
    apart, count = self.apart, len(self.leaves) - self._floats
    known = dict(zip(self.leaves, (*inputs, *fixed[:count]), strict=True))
    if apart is not None:
      known[apart.out] = apart.value(*(known[apart.given[n]] for n in (apart.side, 1 - apart.side)))
    totals = jax.tree.unflatten(form, fixed[count:])
    taken = zip(self.kinds, self._inputs(known, places), totals, strict=True)
    return [x for kind, xs, total in taken for x in kind.part(total, *xs)]
