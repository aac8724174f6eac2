"""Statistics of the columns of logits, computed in chunks of the columns, forward and backward.

A statistic is one number, or a few, per row: a sum, a sum of exponentials, a maximum, the best columns. The
statistics of the chunks combine to that of all columns. The columns are the last dim, and stay, with size 1.
An example: chunks [1, 2] and [5, 4] have the maxima and sums of exponentials (2, 1.37) and (5, 1.37), and
together (5, 1.37 * exp(2 - 5) + 1.37). Backward, each chunk is computed again, and its gradient follows from
the statistics of all columns: for this sum `exp(chunk - 5)`, the softmax but for the sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnx_parallel.attention.tiling import BlockNumbers, Labels, Node, Tiles, fill, finite, pull, tie
from nnx_parallel.core.interpret import read
from nnx_parallel.core.jaxprs import bind, is_inexact
from nnx_parallel.core.types import JaxprEqn, PyTree, Value, Var
from nnx_parallel.layers.picks import with_nan_outside

COLUMNS = "columns"
Arrays: TypeAlias = list[jax.Array]
Shifts: TypeAlias = tuple[tuple[int, Var], ...]
"""Numbers that are added to each row, each with its sign."""


def _wide(x: jax.Array) -> DTypeLike:
  return jnp.promote_types(x.dtype, jnp.float32) if is_inexact(x) else x.dtype


class Kind(NamedTuple):
  """A statistic of a chunk `x`, of which `columns` are the numbers; `others` are more numbers of each row."""

  of: Callable[..., Arrays]  # `(x, columns, *others) -> numbers` per row
  combine: Callable[[Arrays, Arrays], Arrays]  # `(numbers, numbers) -> numbers`
  # `(their gradients, the numbers of all columns, x, columns, *others) -> gradient of x`
  pull: Callable[..., jax.Array]
  # `(numbers, shift, length) -> results` for all of `x + shift`, where `shift` is a number per row
  result: Callable[[Arrays, jax.Array, int], Arrays]
  start: tuple[float, ...] = (-math.inf, 0)  # the numbers of no columns
  absent: float = -math.inf  # an element that changes nothing


def _sum(x: jax.Array) -> Arrays:
  return [x.sum(-1, keepdims=True, dtype=_wide(x))]


def _total(choose: Callable[..., jax.Array], result: Callable[[Arrays, jax.Array, int], Arrays]) -> Kind:
  """The sum of the elements, or of those that `choose(x, columns, *others)` keeps; the others are 0."""
  return Kind(
    of=lambda x, *others: _sum(choose(x, *others)),
    combine=lambda a, b: [a[0] + b[0]],
    pull=lambda g, _, x, *others: choose(g[0] + jnp.zeros_like(x), *others),
    result=result,
    start=(0,),
    absent=0,
  )


SUM = _total(lambda x, _: x, lambda numbers, shift, length: [numbers[0] + shift * length])


def picked(place: Callable[[jax.Array], jax.Array], length: int) -> Kind:
  """The element of each row in the column `place(others)`; NaN if it is none of `length` columns."""

  def choose(x: jax.Array, columns: jax.Array, others: jax.Array) -> jax.Array:
    return jnp.where(columns == place(others), x, jnp.zeros_like(x))

  def of(x: jax.Array, columns: jax.Array, others: jax.Array) -> Arrays:
    return [with_nan_outside(found, place(others), length) for found in _sum(choose(x, columns, others))]

  return _total(choose, lambda numbers, shift, _: [numbers[0] + shift])._replace(of=of)


def _largest(sign: int = 1, has_powers: bool = False) -> Kind:
  """The maximum of `sign * x`, and how many elements equal it, or the sum of `exp(x - maximum)`.

  The gradient is that of the maximum, shared by equal elements, or that of the sum, for a constant maximum.
  """

  def weigh(x: jax.Array, largest: jax.Array) -> jax.Array:
    # Not `x - largest == 0`: a compiler may round the difference otherwise than its operands.
    return jnp.exp(x - finite(largest)) if has_powers else (x == largest).astype(x.dtype)

  def of(x: jax.Array, _: jax.Array) -> Arrays:
    x = sign * x.astype(_wide(x))
    largest = x.max(-1, keepdims=True)
    return [largest, *_sum(weigh(x, jax.lax.stop_gradient(largest)))]

  def combine(a: Arrays, b: Arrays) -> Arrays:
    largest = jnp.maximum(a[0], b[0])
    weights = [weigh(*jax.lax.stop_gradient((x, largest))) for x in (a[0], b[0])]
    return [largest, a[1] * weights[0] + b[1] * weights[1]]

  def pull(g: Arrays, known: Arrays, x: jax.Array, _: jax.Array) -> jax.Array:
    # A compiled count may round the elements otherwise than their maximum, and be 0.
    share = g[1] if has_powers else sign * g[0] / jnp.maximum(known[1], 1)
    return share * weigh(sign * x.astype(_wide(x)), known[0])

  def result(numbers: Arrays, shift: jax.Array, _: int) -> Arrays:
    if has_powers:
      return [jnp.exp(jax.lax.stop_gradient(finite(numbers[0])) + shift) * numbers[1]]
    return [sign * numbers[0]]

  return Kind(of, combine, pull, result, absent=-sign * math.inf)


EXPONENTIALS = _largest(has_powers=True)
EXTREMES = {"reduce_max": _largest(), "reduce_min": _largest(sign=-1)}


@functools.cache
def best(count: int, only_columns: bool) -> Kind:
  """The largest elements, and their columns."""

  def of(x: jax.Array, columns: jax.Array) -> Arrays:
    alone = x.max(-1, keepdims=True), x.argmax(-1, keepdims=True)
    found, places = alone if count == 1 else jax.lax.top_k(x, count)
    return [found, jnp.take_along_axis(columns, places, -1)]

  def combine(a: Arrays, b: Arrays) -> Arrays:
    pairs = [jnp.concatenate(pair, -1) for pair in zip(a, b, strict=True)]
    ordered = jax.lax.sort((-pairs[0], pairs[1]), num_keys=2)  # of equal elements, the first column
    return [-ordered[0][..., :count], ordered[1][..., :count]]

  def pull(g: Arrays, known: Arrays, x: jax.Array, columns: jax.Array) -> jax.Array:
    found = jnp.zeros_like(x)
    for n in (slice(n, n + 1) for n in range(count)):
      found = jnp.where(columns == known[1][..., n], g[0][..., n], found)
    return found

  return Kind(of, combine, pull, lambda numbers, *_: numbers[only_columns:])


class Statistic(NamedTuple):
  """A statistic of values of a program, to the first of which numbers of each row are added."""

  kind: Kind
  nodes: tuple[Node, ...]  # the value with columns comes first
  derived: bool  # whether its gradient may be needed
  shifts: Shifts
  level: int  # the number of passes until it is known


class Pass:
  """Some statistics, in one pass over the chunks of the columns; another pass computes their gradients.

  `head` is the product that makes logits with these labels. In the backward pass, each of `groups` groups of
  columns has its own copy of the head's input. The gradients of the copies are summed once, behind the last
  chunk: else the devices that share only the columns would sum them in each chunk.
  """

  def __init__(
    self, statistics: Sequence[Statistic], tiles: Tiles, head: JaxprEqn, labels: Labels, groups: int
  ):
    self._statistics, self._tiles, self._grid, self._head = statistics, tiles, tiles.grid, head
    self._groups, self._logits = groups, (head.outvars[0], labels)
    # Values with gradients come first.
    self._leaves = sorted(tiles.leaves, key=lambda node: not is_inexact(node[0].aval))
    self._floats = sum(is_inexact(var.aval) for var, _ in self._leaves)
    self._operands = list(zip(head.invars, pull(head, labels, self._grid.lengths), strict=True))
    whole = [node for node in self._operands if not node[1]]  # the input, and weights of one column
    is_copied = groups > 1 and len(whole) == 1 and is_inexact(whole[0][0].aval)
    self._copied = self._leaves.index(whole[0]) if is_copied else None

  @property
  def _blocks(self) -> jax.Array:
    """The numbers of the chunks."""
    return jnp.arange(self._grid.count(COLUMNS), dtype=jnp.int32)

  def results(self, known: Mapping[Var, Value]) -> list[Arrays]:
    """The numbers of each statistic, given the values that the chunks are made of."""
    loss_in_chunks = jax.custom_vjp(lambda *given: self._forward(*given)[0])
    loss_in_chunks.defvjp(self._forward, self._backward)
    return jax.jit(loss_in_chunks, inline=False)(*(read(var, known) for var, _ in self._leaves))

  def _forward(self, *given: jax.Array) -> tuple[list[Arrays], PyTree]:
    *tied, blocks = tie([*given, self._blocks])

    def of(block: jax.Array) -> list[Arrays]:
      places = {COLUMNS: block}
      triples = zip(self._statistics, self._inputs(self._take(tied, places), places), strict=True)
      return [one.kind.of(self._fresh(x, places, one.kind.absent), *others) for one, (x, *others) in triples]

    def body(state: list[Arrays], block: jax.Array) -> tuple[list[Arrays], None]:
      triples = zip(self._statistics, state, of(block), strict=True)
      return [one.kind.combine(before, new) for one, before, new in triples], None

    start = [
      [fill(aval, x, aval.dtype) for aval, x in zip(avals, one.kind.start, strict=False)]
      for one, avals in zip(self._statistics, jax.eval_shape(of, blocks[0]), strict=True)
    ]
    found = jax.lax.scan(body, start, blocks)[0]
    return found, (given, found)

  def _take(self, given: Sequence[jax.Array], places: BlockNumbers) -> Arrays:
    """The values that a chunk is made of."""
    return [self._grid.take(x, own, places) for x, (_, own) in zip(given, self._leaves, strict=True)]

  def _inputs(self, taken: Sequence[jax.Array], places: BlockNumbers, copied: bool = False) -> list[Arrays]:
    """What each statistic takes: a chunk of the value with columns, the numbers of these, other values."""
    known, ((_, _, factor),) = dict(zip(self._leaves, taken, strict=True)), self._logits[1]
    if copied:
      known[self._logits] = self._of_copies([known[node] for node in self._operands])
    parts = jnp.arange(factor, dtype=jnp.int32)[:, None] * self._grid.lengths[COLUMNS]
    columns = (parts + self._grid.indices(COLUMNS, places)).reshape(-1)
    found: list[Arrays] = []
    for one in self._statistics:
      x, *others = [self._tiles.value(*node, known, places) for node in one.nodes]
      x = jnp.moveaxis(x, one.nodes[0][1][0][1], -1)
      found.append([x, columns + jnp.zeros_like(x, columns.dtype), *others])
    return found

  def _fresh(self, x: jax.Array, places: BlockNumbers, absent: float) -> jax.Array:
    """A chunk without the columns that an earlier chunk has."""
    return self._grid.fresh(x, ((COLUMNS, x.ndim - 1, self._logits[1][0][2]),), places, absent)

  def _of_copies(self, operands: Arrays) -> jax.Array:
    """A chunk of the logits, given copies of their input, and a chunk of the weights."""
    ((_, dim, _),), dims = self._logits[1], [own[0][1] if own else 0 for _, own in self._operands]
    for n, (_, own) in enumerate(self._operands):
      if own:
        before, after = operands[n].shape[: dims[n]], operands[n].shape[dims[n] + 1 :]
        operands[n] = operands[n].reshape(*before, self._groups, -1, *after)
    product = jax.vmap(lambda *xs: bind(self._head, xs)[0], dims, dim)
    return jax.lax.collapse(product(*operands), dim, dim + 2)

  def _backward(self, kept: PyTree, gradients: PyTree) -> tuple[jax.Array | None, ...]:
    (given, found), floats, copied = kept, self._floats, self._copied
    first, rest = list(given[:floats]), given[floats:]
    if copied is not None:
      first[copied] = jnp.broadcast_to(first[copied][None], (self._groups, *first[copied].shape))

    def body(totals: Arrays, block: jax.Array) -> tuple[Arrays, None]:
      places = {COLUMNS: block}
      taken = self._take([*first, *rest], places)

      def chunks(*own: jax.Array) -> tuple[Arrays, list[Arrays]]:
        inputs = self._inputs([*own, *taken[floats:]], places, copied is not None)
        return [xs[0] for one, xs in zip(self._statistics, inputs, strict=True) if one.derived], inputs

      _, back, inputs = jax.vjp(chunks, *taken[:floats], has_aux=True)
      arriving = [
        self._fresh(one.kind.pull(g, total, *xs), places, 0).astype(xs[0].dtype)
        for one, g, total, xs in zip(self._statistics, gradients, found, inputs, strict=True)
        if one.derived
      ]
      before = self._take([*totals, *rest], places)[:floats]
      after = [x + new.astype(x.dtype) for x, new in zip(before, back(arriving), strict=True)]
      triples = zip(totals, after, self._leaves, strict=False)
      return [self._grid.put(x, new, own, places) for x, new, (_, own) in triples], None

    # What all chunks read has a sum over them, in float32.
    zeros = [
      jnp.zeros_like(x if own else x.astype(_wide(x)))
      for x, (_, own) in zip(first, self._leaves, strict=False)
    ]
    sums, _ = jax.lax.scan(body, zeros, self._blocks)
    results = [total.astype(x.dtype) for total, x in zip(sums, first, strict=True)]
    if copied is not None:
      results[copied] = results[copied].sum(0)
    return (*results, *[None] * len(rest))
