"""Attention in tiles of queries and keys, forward and backward, on one device or shared by several.

The caller supplies the scores, the weights and their sums as a program for one tile. This module has the
loops over tiles, with a running maximum and sum (arXiv:2112.05682, 2205.14135), so that an array of size
queries x keys never exists. A tile that the mask or the data hides completely is not computed. `Share` says
which part one device of a mesh axis computes: its own queries, for keys that are replicated or travel around
a ring (arXiv:2310.01889), or its own heads (arXiv:2309.14509).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from nnx_parallel.attention.tiling import BlockNumbers, DimName, Grid, Labels, fill, finite
from nnx_parallel.core.shards import on_shards
from nnx_parallel.core.types import AnyArray, PyTree


@dataclasses.dataclass(frozen=True)
class Share:
  """A device's part of an attention that the devices of a mesh axis share; None: one device has it all."""

  axis: str | None
  size: int
  row: DimName  # and `column`, `dim`: the names of queries, of keys, and of what is split, queries or heads
  column: DimName
  dim: DimName
  # the name of the keys' dim, if it is sharded too and its shards travel around the ring; else None
  moving: DimName
  grid: Grid  # the blocks of the scores, of all devices
  mapped: frozenset[str] = frozenset()  # mesh axes of an enclosing `jax.vmap`
  examples: tuple[str, ...] = ()  # mesh axes that shard dim 0 of the scores, and of each array that has it

  @property
  def names(self) -> tuple[DimName, ...]:
    """The dims of the scores of which there are parts, of a device or of a tile."""
    return tuple(sorted({self.row, self.column, self.dim} | ({0} if self.examples else set())))

  @property
  def own(self) -> Grid:
    """The blocks that a device holds at a time."""
    split = {self.dim, self.moving} if self.axis is not None else set[Any]()
    lengths = {name: n // self.size if name in split else n for name, n in self.grid.lengths.items()}
    parts = {name: n // self.size if name in split else n for name, n in self.grid.parts.items()}
    return Grid(lengths, {name: self.grid.blocks[name] for name in (self.row, self.column)}, parts)

  def split(self, labels: Labels) -> tuple[DimName, int, int] | None:
    """The label along which an array is sharded; None for a replicated array."""
    names = () if self.axis is None else (self.dim, self.moving)
    return next((label for name in names for label in labels if label[0] == name), None)

  def moves(self, labels: Labels) -> bool:
    """Whether the shards of an array travel around the ring: the array has keys, and no queries."""
    found = self.split(labels)
    return found is not None and found[0] == self.moving

  def has(self, labels: Labels) -> bool:
    """Whether a device has its own part of an array: a sharded array, or any array on one device."""
    return self.axis is None or self.split(labels) is not None

  def local(self, shape: Sequence[int], labels: Labels) -> tuple[int, ...]:
    """The shape of one device's part of an array."""
    found = self.split(labels)
    own = None if found is None else found[1]
    return tuple(n // self.size if d == own else n for d, n in enumerate(shape))

  def spec(self, labels: Labels) -> PartitionSpec:
    """The spec of an array."""
    found = self.split(labels)
    entries: list[Any] = [] if found is None else [*[None] * found[1], self.axis]
    if self.examples and any(name == 0 for name, _, _ in labels):
      entries[:1] = [self.examples]
    return PartitionSpec(*entries)

  def places(self, device: AnyArray, source: AnyArray, places: BlockNumbers) -> BlockNumbers:
    """The numbers of blocks in the global grid, for the keys of the device `source`."""
    counts = {
      name: self.grid.count(name) // self.size for name in (self.dim, self.moving) if name is not None
    }
    starts = {self.dim: device, self.moving: source}
    found = {**places}
    if self.axis is not None:
      found |= {name: places.get(name, 0) + starts[name] * count for name, count in counts.items()}
    return found

  def keys_of(
    self, source: AnyArray, x: jax.Array, labels: Labels, new: jax.Array | None = None
  ) -> jax.Array:
    """The part of an array for the keys of `source`; with `new`, the array with that in its place."""
    if self.moving is None or self.moves(labels):
      return x if new is None else new
    length = self.grid.lengths[self.moving]
    keys, where = Grid(self.grid.lengths, {self.moving: length // self.size}), {self.moving: source}
    return keys.take(x, labels, where) if new is None else keys.put(x, new, labels, where)

  def sent(self, tree: PyTree, by: int = 1) -> PyTree:
    """Sends arrays `by` places forward around the ring of the axis."""
    pairs = [(i, (i + by) % self.size) for i in range(self.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree) if by % self.size else tree

  def over(self, function: Callable[..., PyTree], given: PyTree, results: PyTree) -> Callable[..., PyTree]:
    """A function of `(device, *arrays)` for all devices; `given` and `results` are specs."""
    names = {*self.examples, *([] if self.axis is None else [self.axis])}
    if not names:
      return lambda *arrays: function(0, *arrays)
    run = on_shards(
      lambda numbers, *arrays: function(numbers[0], *arrays),
      jax.sharding.get_abstract_mesh(),
      (PartitionSpec(self.axis), *given),
      results,
      {*names, *self.mapped},
    )
    # As an array: not every partitioner can place the instruction of `jax.lax.axis_index` of one axis.
    numbers = jnp.arange(self.size, dtype=jnp.int32)
    return lambda *arrays: run(numbers, *arrays)

  def by_heads(self, x: jax.Array, labels: Labels) -> jax.Array:
    """Reshards an array to heads, if they are split: XLA would compute them from all positions."""
    return self._on(self.by_positions(x, labels), self.split(labels))

  def by_positions(self, x: jax.Array, labels: Labels) -> jax.Array:
    """An array that is split by heads, split by positions."""
    label = next((own for own in labels if own[0] in (self.row, self.column)), None)
    return x if self.split(labels) is None else self._on(x, label)

  def _on(self, x: jax.Array, label: tuple[DimName, int, int] | None) -> jax.Array:
    if self.dim == self.row or label is None or label[2] > 1:
      return x
    if x.shape[label[1]] % self.size:
      return x
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[label[1]] = self.axis
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))

  def visits(self, seen: np.ndarray) -> np.ndarray:
    """Which visible tiles each device computes at each visit to a shard of keys; its own shard comes first.

    `[visits, devices, blocks of its queries, blocks of the shard's keys]`, up to the last that is seen.
    """
    rows, columns = (self.own.count(name) for name in (self.row, self.column))
    by_shard = seen.reshape(-1, rows, seen.shape[1] // columns, columns).transpose(0, 2, 1, 3)
    devices = np.arange(self.size if self.axis is not None else 1)
    hops = np.arange(self.size if self.moving is not None and self.axis is not None else 1)
    found = by_shard[devices % len(by_shard), (devices - hops[:, None]) % by_shard.shape[1]]
    last = max((hop for hop in hops if found[hop].any()), default=0)
    return found[: last + 1]


@dataclasses.dataclass(frozen=True)
class TileAttention:
  """The values, weighted by the softmax of scores, as a function of arrays that are read in tiles."""

  share: Share
  # `inputs`, `row` and `result`: the labels of the arrays, of a number per row of the scores, of the result
  inputs: Sequence[Labels]
  slopes: int  # the number of leading arrays that have gradients
  row: Labels
  result: Labels
  dtype: DTypeLike
  # `(tiles, places) -> maxima` of a tile's scores over its keys, `-inf` where they do not count
  largest: Callable[[Sequence[jax.Array], BlockNumbers], jax.Array]
  # `(tiles, largest, total, places) -> (product, sums)`: the product of a tile's weights and values, and the
  # sums of its exponentials over the keys, for the maxima and the sums of the rows
  weighed: Callable[[Sequence[jax.Array], jax.Array, jax.Array, BlockNumbers], tuple[jax.Array, jax.Array]]
  # `(array like row, shape) -> array` with the dims of a result of that shape
  spread: Callable[[jax.Array, Sequence[int]], jax.Array]
  # which tiles `[blocks of queries, blocks of keys]` a mask does not hide completely; None: all tiles
  seen: np.ndarray | None = None
  # `arrays -> tiles` that the values that a device holds during a visit do not hide; None: all tiles
  needed: Callable[[Sequence[jax.Array]], jax.Array] | None = None
  zeros_too: bool = False  # whether a row of weights may be all zeros, where its sum does not exist

  def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result, and the maxima of the rows, which have no gradient."""
    attention = jax.custom_vjp(lambda *given: self._with_kept(*given)[0])
    attention.defvjp(self._with_kept, self._pulled)
    return attention(*arrays)

  @property
  def _wide(self) -> DTypeLike:
    return jnp.promote_types(self.dtype, jnp.float32)

  @functools.cached_property
  def _visits(self) -> np.ndarray:
    """Which tiles each device computes at each visit."""
    counts = [self.share.grid.count(name) for name in (self.share.row, self.share.column)]
    return self.share.visits(np.ones(counts, bool) if self.seen is None else self.seen)

  def _with_kept(self, *given: jax.Array) -> tuple[PyTree, PyTree]:
    own = tuple(self.share.by_heads(x, labels) for x, labels in zip(given, self.inputs, strict=True))
    specs = [self.share.spec(labels) for labels in self.inputs]
    stats = tuple(self.share.spec(labels) for labels in (self.result, self.row, self.row))
    result, largest, total = self.share.over(self._forward, specs, stats)(*own)
    return (self.share.by_positions(result, self.result), largest), (own, result, largest, total)

  def _pulled(self, saved: PyTree, cotangents: PyTree) -> tuple[jax.Array | None, ...]:
    given, *results = saved
    share, floats = self.share, self.inputs[: self.slopes]
    specs = [share.spec(labels) for labels in self.inputs]
    stats = [share.spec(labels) for labels in (self.result, self.row, self.row, self.result)]
    slopes = [share.spec(own) if share.has(own) else PartitionSpec(share.axis) for own in floats]
    arriving = share.by_heads(cotangents[0], self.result)
    found = share.over(self._backward, [*stats, *specs], slopes)(*results, arriving, *given)
    found = [
      share.by_positions(x, own) if share.has(own) else x.sum(0) for x, own in zip(found, floats, strict=True)
    ]
    return (*found, *[None] * (len(given) - len(found)))

  def _forward(self, device: AnyArray, *arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The result of a device, and the maxima and sums of its rows."""
    grid, carried = self.share.own, (self.row, self.row, self.result)

    def tile(tiles: Sequence[jax.Array], state: PyTree, at: BlockNumbers) -> PyTree:
      before, total, result = state
      # The result does not depend on the maximum, so that its derivative is left out.
      after = jnp.maximum(before, jax.lax.stop_gradient(self.largest(tiles, at)))
      part, more = self.weighed(tiles, finite(after), jnp.ones_like(total), at)
      scale = jnp.exp(before - finite(after))
      return after, total * scale + more, result * self.spread(scale, result.shape) + part

    def visit(hop: AnyArray, moving: Mapping[int, jax.Array], state: PyTree) -> PyTree:
      source = (device - hop) % self.share.size

      def body(state: PyTree, given: Sequence[jax.Array], places: BlockNumbers, at: BlockNumbers) -> PyTree:
        tiles = [grid.take(x, own, places) for x, own in zip(given, self.inputs, strict=True)]
        parts = tuple(grid.take(x, own, places) for x, own in zip(state, carried, strict=True))
        new = tile(tiles, parts, at)
        return tuple(grid.put(x, y, own, places) for x, y, own in zip(state, new, carried, strict=True))

      return self._each_tile(hop, device, source, body, state, self._at_hand(arrays, moving, source))

    largest, total, result = self._around(visit, arrays, self._start(device, arrays))
    if self.zeros_too:
      total = jnp.where(total == 0, jnp.ones_like(total), total)
    result = (result / self.spread(total, result.shape)).astype(self.dtype)
    return result, largest, total

  def _start(self, device: AnyArray, arrays: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The maxima, sums and result of a device before its first tile."""
    grid, names = self.share.own, (self.share.row, self.share.column)
    places = dict.fromkeys(names, 0)

    def first(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
      given = self._at_hand(arrays, {}, device)
      tiles = [grid.take(x, own, places) for x, own in zip(given, self.inputs, strict=True)]
      at = self.share.places(device, device, places)
      largest = self.largest(tiles, at)
      return largest, self.weighed(tiles, largest, jnp.ones_like(largest), at)[0]

    avals: Any = jax.make_jaxpr(first)(*arrays).out_avals
    row, result = avals
    cases = (row, self.row, -math.inf), (row, self.row, 0), (result, self.result, 0)
    largest, total, result = (
      fill(aval.update(shape=grid.untile(aval.shape, labels)), value, self._wide)
      for aval, labels, value in cases
    )
    return largest, total, result

  def _backward(
    self,
    device: AnyArray,
    result: jax.Array,
    largest: jax.Array,
    total: jax.Array,
    arriving: jax.Array,
    *given: jax.Array,
  ) -> PyTree:
    """The gradients of a device's arrays."""
    share, grid, floats = self.share, self.share.own, self.inputs[: self.slopes]
    arriving = arriving.astype(self._wide)
    pull = jax.linear_transpose(lambda x: self.spread(x, result.shape), total)
    (sloped,) = pull(arriving * result.astype(self._wide))
    rows = [
      (finite(largest), self.row),
      (total, self.row),
      (arriving, self.result),
      (-sloped / total, self.row),
    ]

    def gradients(
      tiles: Sequence[jax.Array], of_rows: Sequence[jax.Array], places: BlockNumbers, at: BlockNumbers
    ) -> list[jax.Array]:
      top, total, *cotangents = of_rows
      pairs = zip(cotangents, (self.result, self.row), strict=True)
      cotangents = tuple(grid.fresh(x, own, places) for x, own in pairs)
      fixed = tiles[self.slopes :]
      _, pull = jax.vjp(lambda *xs: self.weighed([*xs, *fixed], top, total, at), *tiles[: self.slopes])
      return [*pull(cotangents)]

    def visit(hop: AnyArray, moving: Mapping[int, jax.Array], sums: PyTree) -> PyTree:
      source = (device - hop) % share.size
      # The gradients of a shard arrive while its share of this device is computed.
      if not isinstance(hop, int) or hop:
        sums = [self.share.sent(x) if share.moves(own) else x for x, own in zip(sums, floats, strict=True)]

      def body(sums: PyTree, given: Sequence[jax.Array], places: BlockNumbers, at: BlockNumbers) -> PyTree:
        tiles = [grid.take(x, own, places) for x, own in zip(given, self.inputs, strict=True)]
        of_rows = [grid.take(x, own, places) for x, own in rows]
        before = [grid.take(x, own, places) for x, own in zip(sums, floats, strict=True)]

        found = gradients(tiles, of_rows, places, at)
        after = [x + new.astype(x.dtype) for x, new in zip(before, found, strict=True)]
        return [grid.put(x, new, own, places) for x, new, own in zip(sums, after, floats, strict=True)]

      parts = [share.keys_of(source, x, own) for x, own in zip(sums, floats, strict=True)]
      parts = self._each_tile(hop, device, source, body, parts, self._at_hand(given, moving, source))
      triples = zip(sums, parts, floats, strict=True)
      return [share.keys_of(source, x, own, new) for x, new, own in triples]

    zeros = [jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)) for x in given[: self.slopes]]
    found = self._around(visit, given, zeros)
    found = [g.astype(x.dtype) for g, x in zip(found, given, strict=False)]
    # An array that all devices read has one gradient per device, summed outside: XLA gathers the examples for
    # a sum here.
    home = self.share.size - (len(self._visits) - 1)
    return [
      (self.share.sent(x, home) if share.moves(own) else x) if share.has(own) else x[None]
      for x, own in zip(found, floats, strict=True)
    ]

  def _each_tile(
    self,
    hop: AnyArray,
    device: AnyArray,
    source: AnyArray,
    body: Callable[..., PyTree],
    state: PyTree,
    given: Sequence[jax.Array],
  ) -> PyTree:
    """A scan of `(state, given, places, places among all devices) -> state` over the tiles of a visit."""
    needed = None if self.needed is None else self.needed(given)
    # An int is the first or the last hop; a tracer, one between, in a loop.
    ahead, visits = (hop, self._visits[hop : hop + 1]) if isinstance(hop, int) else (1, self._visits[1:-1])
    patterns, which = np.unique(visits.reshape(-1, visits[0, 0].size), axis=0, return_inverse=True)
    counts = patterns.sum(1)
    lists = np.zeros((len(patterns), counts.max(), 2), np.int32)
    for own, pattern in zip(lists, patterns, strict=True):
      own[: pattern.sum()] = np.argwhere(pattern.reshape(visits.shape[2:]))
    mine = 0 if len(patterns) == 1 else jnp.asarray(which.reshape(visits.shape[:2]))[hop - ahead, device]
    # Arrays that depend on positions only, such as a mask, would otherwise be computed, and saved, for all
    # tiles ahead of the scan.
    *given, tiles = jax.lax.optimization_barrier((*given, jnp.asarray(lists)[mine]))

    def step(state: PyTree, numbered: PyTree) -> tuple[PyTree, None]:
      number, tile = numbered
      places = {self.share.row: tile[0], self.share.column: tile[1]}

      def computed(state: PyTree) -> PyTree:
        return body(state, given, places, self.share.places(device, source, places))

      wanted = [number < jnp.asarray(counts)[mine]] if len({*counts}) > 1 else []
      wanted += [] if needed is None else [needed[tile[0], tile[1]]]
      if not wanted:
        return computed(state), None
      return jax.lax.cond(jnp.stack(wanted).all(), computed, lambda state: state, state), None

    return jax.lax.scan(step, state, (jnp.arange(len(lists[0])), tiles))[0]

  def _around(self, visit: Callable[..., PyTree], given: Sequence[jax.Array], state: PyTree) -> PyTree:
    """The state after `visit(hop, moving, state) -> state` for a device's own keys and those that arrive.

    Arrays are sent on before they are used, so that the next arrays arrive meanwhile. `hop` is an int at the
    first and the last visit.
    """
    last, send = len(self._visits) - 1, self.share.sent
    pairs = enumerate(zip(given, self.inputs, strict=True))
    moving = {n: x for n, (x, own) in pairs if self.share.moves(own)}
    following = send(moving) if last else moving
    state = visit(0, moving, state)
    if not last:
      return state

    def body(carry: PyTree, hop: AnyArray) -> tuple[PyTree, None]:
      moving, state = carry
      following = send(moving)
      return (following, visit(hop, moving, state)), None

    if last > 1:
      numbers = jnp.arange(1, last, dtype=jnp.int32)
      (following, state), _ = jax.lax.scan(body, (following, state), numbers)
    return visit(last, following, state)

  def _at_hand(
    self, given: Sequence[jax.Array], moving: Mapping[int, jax.Array], source: AnyArray
  ) -> list[jax.Array]:
    """The arrays that a device holds while it has the keys of another device."""
    whole = [self.share.keys_of(source, x, own) for x, own in zip(given, self.inputs, strict=True)]
    return [moving.get(n, x) for n, x in enumerate(whole)]
