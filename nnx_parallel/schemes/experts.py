"""Experts that are sharded over a mesh axis: each token is sent to the experts that its router chose.

Each device has some of the experts and some of the tokens. An all-to-all sends tokens to the devices of their
experts, and another returns the results. There are two forms:
- With a capacity, an expert has a fixed number of slots for the tokens of each device (arXiv:2006.16668). All
  shapes are fixed; tokens beyond the capacity are dropped, and counted.
- Without a capacity, no token is dropped (arXiv:2211.15841). Tokens are sorted by expert and exchanged in
  rounds: one round for a nearly even load, more rounds for a skewed load. An expert computes its tokens in as
  many blocks as needed. `jax.lax.ragged_dot` would do this on TPUs only: on other devices it multiplies each
  row by all experts, and it takes only products.

The axes that split the tokens are manual here: sorting, exchange and sums are placed by hand. The compiler
handles other axes, such as an axis that splits the width of each expert.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import entry_of
from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.shards import laid_out, on_shards
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.errors import SchemeError
from nnx_parallel.layout.constrain import manual_too, surroundings
from nnx_parallel.schemes.routing import Routing
from nnx_parallel.schemes.tokens import array_of, check_not_mapped, token_axes

ExpertFn = Callable[[Any, Any], Any]


def experts(
  expert_fn: ExpertFn,
  parameters: PyTree,
  x: jax.Array,
  routing: Routing,
  *,
  axis: str = "expert",
  capacity: float | None = None,
  buffer: float = 2.0,
  block: int = 512,
) -> tuple[jax.Array, jax.Array]:
  """Sends each token to its experts, and returns the weighted sums of their results.

  The mesh is found as in `vocabulary_cross_entropy`. Its batch axes and `axis` shard the tokens; the tokens
  are padded if the axes do not divide them. Without a mesh, or on a mesh without `axis`, each device computes
  its own tokens, with the same code.

  With `capacity`, an all-to-all carries `ceil(capacity * choices / experts)` slots for each pair of a device
  and an expert, where `choices` counts the choices of the device's tokens. All first choices come before all
  second choices, and so on, each in the order of the tokens. A choice without a slot is dropped, and its
  expert adds nothing to the result of the token. So the dropped choices depend on the number of devices.

  Without `capacity`, no token is dropped. In each round, a device sends up to `ceil(buffer * choices /
  devices)` tokens to each other device, and there are as many rounds as the fullest pair of devices needs.
  The backward pass sends the tokens again, and recomputes the experts.

  Args:
    expert_fn: a function `(parameters, rows) -> rows` that computes one expert, from the parameters of this
      expert and rows of shape (rows, features). It must compute each row independently, and must accept rows
      of zeros, which fill empty slots. All arrays that it uses are in `parameters`. On Explicit axes, a sum
      over a dim that another axis shards needs its `out_sharding`, as elsewhere.
    parameters: a pytree of arrays or Variables of global shape (experts, ...). `axis` shards dim 0. If batch
      axes, such as fsdp, shard the parameters, they are gathered; shardings over other axes, such as the axis
      of tensor parallelism, stay.
    x: the tokens, of global shape (tokens..., features), for example (batch, seq, features).
    routing: the routing of the tokens of `x`, from `route`. A number that is not the number of an expert,
      such as -1 for padding, is ignored.
    axis: the mesh axis that shards the experts. The number of experts must be a multiple of its size.
    capacity: the number of slots of an expert, as a multiple of the number for an even load. None drops no
      token.
    buffer: without `capacity`, the size of a round, as a multiple of the size for an even load.
    block: without `capacity`, the number of rows that an expert computes at a time. Some hundreds suit an
      accelerator.

  Returns:
    The sums, of global shape (tokens..., features of the result), in the dtype of the results; and the number
    of dropped choices, an int32 scalar: 0 without capacity.

  Raises:
    SchemeError: shapes do not fit, the number of experts is not a multiple of the size of `axis`, an option
      is not above 0, or `axis` is already Manual.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> draw = jax.random.normal
    >>> x, up, down = (draw(jax.random.key(i), s) for i, s in enumerate([(16, 8), (4, 8, 32), (4, 32, 8)]))
    >>> def expert(p, rows):
    ...   return jax.nn.silu(rows @ p["up"]) @ p["down"]
    >>> with jax.set_mesh(nxp.make_mesh(data=2, expert=4)):
    ...   routing = nxp.parallel.route(x[:, :4], 2)
    ...   y, dropped = nxp.parallel.experts(expert, {"up": up, "down": down}, x, routing)
    >>> y.shape, int(dropped)
    ((16, 8), 0)

  Source: GShard, arXiv:2006.16668; without capacity, MegaBlocks, arXiv:2211.15841.
  """
  leaves, structure = jax.tree.flatten(parameters, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
  weights: PyTree = jax.tree.unflatten(structure, [array_of(leaf) for leaf in leaves])
  count, top_k = routing.load.shape[0], routing.weights.shape[-1]
  _check_shapes(weights, x, routing, {"capacity": capacity, "buffer": buffer, "block": block})
  around = surroundings(x, *leaves)
  sizes = {} if around.mesh is None else axis_sizes(around.mesh)
  taken = around.manual | around.mapped
  check_not_mapped("the experts", [axis], taken)
  ways = sizes.get(axis, 1)
  if count % ways:
    raise SchemeError(
      f"{count} experts cannot be split evenly over {axis}={ways}.",
      fix=f"{count + -count % ways} experts, or a mesh on which {axis} is a divisor of {count}.",
    )
  free = {name: size for name, size in sizes.items() if size > 1 and name not in taken}
  given, shape = [x, routing.weights, routing.experts], x.shape[:-1]
  dims = token_axes(around.rules, sizes, free, len(shape))
  if axis in free and not any(axis in names for names in dims):
    dims[0] = (*dims[0], axis)  # the minor axis of the batch
  if any(n % _ways(free, names) for n, names in zip(shape, dims, strict=True)):
    dims = [tuple(name for names in dims for name in names)]
    fills = 0, 0, count  # padding chooses an expert that does not exist
    given = [_flat(x, around.mesh, _ways(free, dims[0]), n) for x, n in zip(given, fills, strict=True)]
  manual = tuple(name for names in dims for name in names)
  tokens = math.prod(given[0].shape[:-1]) // _ways(free, manual)
  choices = tokens * top_k
  kind = _Kind(
    expert_fn,
    axis if ways > 1 else None,
    ways,
    count,
    tuple(dims),
    None if capacity is None else math.ceil(capacity * choices / count),
    min(math.ceil(buffer * choices / ways), tokens * min(top_k, count // ways)),
    block,
    around.mesh if manual else None,
    manual_too(around.mesh),
  )
  traced = any(isinstance(leaf, Tracer) for leaf in (*jax.tree.leaves(weights), *given))
  run = _over_devices if traced else jax.jit(_over_devices, static_argnums=0)
  result, dropped = run(kind, weights, *given)
  if result.shape[:-1] != shape:
    own = laid_out(result, around.mesh, PartitionSpec())[: math.prod(shape)]
    result = own.reshape(*shape, result.shape[-1])
  return result, dropped


def _ways(sizes: dict[str, int], names: Sequence[str]) -> int:
  return math.prod(sizes[name] for name in names)


def _flat(x: jax.Array, mesh: AnyMesh | None, ways: int, fill: int) -> jax.Array:
  """The tokens in one dim, padded so that `ways` divides their number."""
  # On an Explicit mesh, a dim whose type has axes has a fixed length.
  x = laid_out(x, mesh, PartitionSpec()).reshape(-1, x.shape[-1])
  return jnp.pad(x, ((0, -x.shape[0] % ways), (0, 0)), constant_values=fill)


@dataclasses.dataclass(frozen=True)
class _Kind:
  """The static choices of a call of `experts`.

  Attributes:
    function: the function of one expert.
    axis: the mesh axis of the experts; None: one device.
    ways: the size of the axis.
    experts: the number of experts on all devices.
    tokens: the mesh axes of each dim of the tokens.
    capacity: slots for each pair of a device and an expert; None: no capacity.
    buffer: slots for each pair of devices in a round.
    block: rows that an expert computes at a time.
    mesh: the mesh; None: one device.
    mapped: mesh axes of an enclosing `jax.vmap`.
  """

  function: ExpertFn
  axis: str | None
  ways: int
  experts: int
  tokens: tuple[tuple[str, ...], ...]
  capacity: int | None
  buffer: int
  block: int
  mesh: AnyMesh | None
  mapped: frozenset[str]

  @property
  def own(self) -> int:
    """The number of experts of a device."""
    return self.experts // self.ways

  @property
  def manual(self) -> tuple[str, ...]:
    """The axes that split the tokens."""
    return tuple(name for names in self.tokens for name in names)

  def exchanged(self, x: jax.Array) -> jax.Array:
    """Exchanges parts with the other devices; dim 0 has one equal part for each device, then from each."""
    return x if self.axis is None else jax.lax.all_to_all(x, self.axis, 0, 0, tiled=True)


def _over_devices(kind: _Kind, parameters: PyTree, *given: jax.Array) -> PyTree:
  """The sums and the number of dropped choices, from global arrays."""

  def local(parameters: PyTree, x: jax.Array, weights: jax.Array, experts: jax.Array) -> PyTree:
    flat = [value.reshape(-1, value.shape[-1]) for value in (x, weights, experts)]
    if kind.capacity is not None:
      result, dropped = _with_capacity(kind, parameters, *flat)
      dropped = jax.lax.psum(dropped, kind.manual) if kind.manual else dropped
    else:
      result, dropped = _dropless(kind, parameters, *flat), jnp.int32(0)
    return result.reshape(*x.shape[:-1], result.shape[-1]), dropped

  split, own = PartitionSpec(*map(entry_of, kind.tokens)), PartitionSpec(kind.axis)
  axes = {*kind.manual, *kind.mapped}
  run = on_shards(local, kind.mesh, (own, split, split, split), (split, PartitionSpec()), axes)
  return run(parameters, *given)


# Slots hold the choices of tokens on the way to their experts. A slot has at most one choice, and a choice at
# most one slot, so both ways, and their gradients, are look-ups.


@dataclasses.dataclass(frozen=True)
class _Queues:
  """The choices of a device's tokens, sorted by expert.

  Choice `c` of token `t` has the number `c * tokens + t`: first choices come first.

  Attributes:
    order: the choices, sorted.
    rank: the place of each choice in that order.
    starts: of each expert, its first place.
    ends: of each expert, the place after its last.
    experts: of each choice.
    exist: whether that is an expert, and no padding.
  """

  order: jax.Array
  rank: jax.Array
  starts: jax.Array
  ends: jax.Array
  experts: jax.Array
  exist: jax.Array

  @classmethod
  def of(cls, experts: jax.Array, count: int) -> _Queues:
    """From the expert of each choice."""
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    ordered, numbers = experts[order], jnp.arange(count, dtype=jnp.int32)
    starts, ends = (
      jnp.searchsorted(ordered, numbers, side=side).astype(jnp.int32) for side in ("left", "right")
    )
    exist = (experts >= 0) & (experts < count)
    return cls(order, jnp.argsort(order).astype(jnp.int32), starts, ends, experts, exist)


def _at(order: jax.Array, places: jax.Array, filled: jax.Array) -> jax.Array:
  """The choice at each place of an order; where a place is not filled, a choice that does not exist."""
  return jnp.where(filled, order[jnp.clip(places, 0, order.size - 1)], order.size)


@jax.custom_vjp
def _sent(x: jax.Array, choices: jax.Array, slots: jax.Array) -> jax.Array:
  """The token `[features]` of each slot; zeros in an empty slot.

  Args:
    x: `[tokens, features]`.
    choices: the choice in each slot.
    slots: the slot of each choice, `[choices, tokens]`.
  """
  tokens = jnp.where(choices < slots.size, choices % slots.shape[1], slots.shape[1])
  return x.at[tokens].get(mode="fill", fill_value=0)


def _unsent(kept: PyTree, g: jax.Array) -> PyTree:
  found = g.at[kept].get(mode="fill", fill_value=0)
  return found.astype(jnp.float32).sum(0).astype(g.dtype), None, None


_sent.defvjp(lambda x, choices, slots: (_sent(x, choices, slots), slots), _unsent)


@jax.custom_vjp
def _summed(rows: jax.Array, weights: jax.Array, choices: jax.Array, slots: jax.Array) -> jax.Array:
  """The weighted sum of each token's results.

  Args:
    rows: the result of each slot.
    weights: of each choice, `[choices, tokens]`, float32.
    choices: the choice in each slot.
    slots: the slot of each choice, `[choices, tokens]`.
  """
  found = rows.at[slots].get(mode="fill", fill_value=0).astype(jnp.float32)
  return (found * weights[..., None]).sum(0).astype(rows.dtype)


def _unsummed(kept: PyTree, g: jax.Array) -> PyTree:
  rows, weights, choices, slots = kept
  wide = _sent(g, choices, slots).astype(jnp.float32)
  own = weights.reshape(-1).at[choices].get(mode="fill", fill_value=0)
  found = rows.at[slots].get(mode="fill", fill_value=0).astype(jnp.float32)
  by_weight = (found * g.astype(jnp.float32)[None]).sum(-1)
  return (wide * own[:, None]).astype(rows.dtype), by_weight, None, None


_summed.defvjp(lambda *given: (_summed(*given), given), _unsummed)


def _with_capacity(
  kind: _Kind, parameters: PyTree, x: jax.Array, weights: jax.Array, experts: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The sums of a device's tokens `[tokens, features]`, and how many of its choices were dropped."""
  assert kind.capacity is not None
  size = kind.capacity
  by_choice = experts.T
  queues = _Queues.of(by_choice.reshape(-1), kind.experts)
  places = queues.starts[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
  choices = _at(queues.order, places, places < queues.ends[:, None]).reshape(-1)
  exists = queues.exist
  own = jnp.where(exists, queues.experts, 0)
  at = queues.rank - queues.starts[own]
  slots = jnp.where(exists & (at < size), own * size + at, choices.size).reshape(by_choice.shape)
  rows = kind.exchanged(_sent(x, choices, slots).reshape(kind.experts, size, -1))
  rows = rows.reshape(kind.ways, kind.own, size, -1).swapaxes(0, 1).reshape(kind.own, kind.ways * size, -1)
  done = jax.vmap(kind.function)(parameters, rows)
  _check_rows(rows, done)
  rows = done.reshape(kind.own, kind.ways, size, -1).swapaxes(0, 1).reshape(kind.experts, size, -1)
  result = _summed(kind.exchanged(rows).reshape(choices.size, -1), weights.T, choices, slots)
  return result, jnp.maximum(queues.ends - queues.starts - size, 0).sum(dtype=jnp.int32)


# Without capacity: rounds of exchange, each with blocks of rows of one expert.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Rounds:
  """The tokens that a device sends and receives in each round.

  Attributes:
    kind: the static choices.
    order: the choices, sorted by expert, so also by device.
    places: the place of each choice among the choices for the same device, `[choices, tokens]`; padding comes
      after all of them.
    to: the device of each choice, `[choices, tokens]`.
    starts: for each device, its first choice in that order.
    sizes: for each device, the number of choices for it.
    arriving: for each device, the number of its choices for this device's first experts: `[devices,
      experts]`, running sums.
    count: the number of rounds.
  """

  kind: _Kind = dataclasses.field(metadata={"static": True})
  order: jax.Array
  places: jax.Array
  to: jax.Array
  starts: jax.Array
  sizes: jax.Array
  arriving: jax.Array
  count: jax.Array | int

  @classmethod
  def of(cls, kind: _Kind, experts: jax.Array) -> _Rounds:
    """From the experts of each token `[tokens, choices]`."""
    queues = _Queues.of(experts.T.reshape(-1), kind.experts)
    loads = (queues.ends - queues.starts).reshape(kind.ways, kind.own)
    starts, sizes = queues.starts.reshape(loads.shape)[:, 0], loads.sum(1, dtype=jnp.int32)
    exists = queues.exist
    to = jnp.where(exists, queues.experts, 0) // kind.own
    places = jnp.where(exists, queues.rank - starts[to], queues.rank.size)
    count: jax.Array | int = 1
    if kind.buffer < experts.shape[0] * min(experts.shape[1], kind.own):
      count = jax.lax.pmax(-(-sizes.max() // kind.buffer), kind.manual)
    arriving = jnp.cumsum(kind.exchanged(loads), 1, dtype=jnp.int32)
    shape = experts.T.shape
    return cls(kind, queues.order, places.reshape(shape), to.reshape(shape), starts, sizes, arriving, count)

  def run(self, visit: Callable[..., PyTree], state: PyTree) -> PyTree:
    """The state after all rounds."""
    return visit(0, state) if isinstance(self.count, int) else jax.lax.fori_loop(0, self.count, visit, state)

  def pairs(self, n: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """The choice in each slot of a round, and the slot of each choice."""
    size = self.kind.buffer
    own = jnp.arange(size, dtype=jnp.int32)[None] + n * size
    choices = _at(self.order, self.starts[:, None] + own, own < self.sizes[:, None])
    at = self.places - n * size
    slots = jnp.where((at >= 0) & (at < size), self.to * size + at, choices.size)
    return choices.reshape(-1), slots

  def blocks(self, n: jax.Array | int) -> _Blocks:
    """The rows that arrive in a round, by experts."""
    size = self.kind.buffer
    numbers = jnp.arange(size, dtype=jnp.int32) + n * size
    experts = (self.arriving[:, :, None] <= numbers[None, None]).sum(1, dtype=jnp.int32)
    return _Blocks.of(self.kind, experts.reshape(-1))


@dataclasses.dataclass(frozen=True)
class _Blocks:
  """Rows sorted by expert, in blocks of one expert each; the last block of an expert may be partly full.

  Attributes:
    size: the number of rows of a block.
    queues: the rows, sorted.
    last: for each expert, the number of the block after its last block.
  """

  size: int
  queues: _Queues
  last: jax.Array

  @classmethod
  def of(cls, kind: _Kind, experts: jax.Array) -> _Blocks:
    """Builds the blocks from the expert of each row; an empty row has a number beyond the last expert."""
    queues = _Queues.of(experts, kind.own)
    size = min(kind.block, experts.size)
    last = jnp.cumsum(-(-(queues.ends - queues.starts) // size), dtype=jnp.int32)
    return cls(size, queues, last)

  def run(self, visit: Callable[..., PyTree], state: PyTree) -> PyTree:
    """The state after all blocks: `visit(expert, rows, exists, place, state)`; `place` is of the first row.

    Rows that do not exist are copies of the last row that does.
    """

    def body(n: jax.Array | int, state: PyTree) -> PyTree:
      expert = (self.last <= n).sum(dtype=jnp.int32)
      before = jnp.where(expert > 0, self.last[expert - 1], 0)
      place = self.queues.starts[expert] + (n - before) * self.size
      places, end = place + jnp.arange(self.size, dtype=jnp.int32), self.queues.ends[expert]
      rows = self.queues.order[jnp.minimum(places, end - 1)]
      return visit(expert, rows, places < end, place, state)

    return jax.lax.fori_loop(0, self.last[-1], body, state)

  def zeros(self, row: AnyArray) -> jax.Array:
    """Room for a result of each row, sorted, and for the last block."""
    return jnp.zeros((self.queues.order.size + self.size, *row.shape[1:]), row.dtype)

  def unsorted(self, x: jax.Array) -> jax.Array:
    """Returns values to the order of the rows."""
    return x[self.queues.rank]


def _of_one(parameters: PyTree, expert: jax.Array | int = 0) -> PyTree:
  return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, 0, False), parameters)


def _put(x: jax.Array, rows: jax.Array, place: jax.Array) -> jax.Array:
  """Writes rows at their place; the next block overwrites rows that do not exist, or nothing reads them."""
  return jax.lax.dynamic_update_slice_in_dim(x, rows.astype(x.dtype), place, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dropless(
  kind: _Kind, parameters: PyTree, x: jax.Array, weights: jax.Array, experts: jax.Array
) -> jax.Array:
  """The sums of a device's tokens `[tokens, features]`."""
  return _dropless_forward(kind, parameters, x, weights, experts)[0]


def _dropless_forward(
  kind: _Kind, parameters: PyTree, x: jax.Array, weights: jax.Array, experts: jax.Array
) -> tuple[jax.Array, PyTree]:
  rounds = _Rounds.of(kind, experts)
  row = jax.eval_shape(kind.function, _of_one(parameters), x)
  _check_rows(x, row)

  def visit(n: jax.Array | int, total: PyTree) -> PyTree:
    pairs, blocks = rounds.pairs(n), rounds.blocks(n)
    arrived = kind.exchanged(_sent(x, *pairs))

    def block(expert: jax.Array, rows: jax.Array, _: object, place: jax.Array, done: PyTree) -> PyTree:
      return _put(done, kind.function(_of_one(parameters, expert), arrived[rows]), place)

    done = blocks.unsorted(blocks.run(block, blocks.zeros(row)))
    return total + _summed(kind.exchanged(done), weights.T, *pairs).astype(jnp.float32)

  total = rounds.run(visit, jnp.zeros(row.shape, jnp.float32))
  return total.astype(row.dtype), (rounds, parameters, x, weights)


def _dropless_backward(kind: _Kind, kept: PyTree, g: jax.Array) -> PyTree:
  rounds, parameters, x, weights = kept
  real = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(parameters)]

  def visit(n: jax.Array | int, state: PyTree) -> PyTree:
    by_parameter, by_x, by_weight = state
    pairs, blocks = rounds.pairs(n), rounds.blocks(n)
    choices, slots = pairs
    own = weights.T.reshape(-1).at[choices].get(mode="fill", fill_value=0)
    arrived, slopes, shares = (kind.exchanged(value) for value in (_sent(x, *pairs), _sent(g, *pairs), own))

    def block(
      expert: jax.Array, rows: jax.Array, exists: jax.Array, place: jax.Array, state: PyTree
    ) -> PyTree:
      by_parameter, by_row, by_share = state
      result, back = jax.vjp(kind.function, _of_one(parameters, expert), arrived[rows])
      slope, share = slopes[rows].astype(jnp.float32), jnp.where(exists, shares[rows], 0)
      added, by_rows = back((slope * share[:, None]).astype(result.dtype))
      added = [leaf for leaf, is_real in zip(jax.tree.leaves(added), real, strict=True) if is_real]
      by_parameter = [
        total.at[expert].add(leaf.astype(total.dtype))
        for total, leaf in zip(by_parameter, added, strict=True)
      ]
      shares_of = (slope * result.astype(jnp.float32)).sum(-1)
      return by_parameter, _put(by_row, by_rows, place), _put(by_share, shares_of, place)

    start = by_parameter, blocks.zeros(x), blocks.zeros(own)
    by_parameter, by_row, by_share = blocks.run(block, start)
    by_row, by_share = (kind.exchanged(blocks.unsorted(value)) for value in (by_row, by_share))
    by_row, by_share = (value.at[slots].get(mode="fill", fill_value=0) for value in (by_row, by_share))
    return by_parameter, by_x + by_row.astype(jnp.float32).sum(0), by_weight + by_share

  leaves, structure = jax.tree.flatten(parameters)
  zeros = [jnp.zeros_like(leaf, jnp.float32) for leaf, is_real in zip(leaves, real, strict=True) if is_real]
  start = zeros, jnp.zeros(x.shape, jnp.float32), jnp.zeros(weights.T.shape, jnp.float32)
  sums, by_x, by_weight = rounds.run(visit, start)
  found = iter(sums)
  by_leaf = [next(found).astype(leaf.dtype) if own else None for leaf, own in zip(leaves, real, strict=True)]
  return jax.tree.unflatten(structure, by_leaf), by_x.astype(x.dtype), by_weight.T, None


_dropless.defvjp(_dropless_forward, _dropless_backward)


def _check_shapes(
  parameters: PyTree, x: jax.Array, routing: Routing, options: dict[str, float | None]
) -> None:
  for name, value in options.items():
    if value is not None and not value > 0:
      raise SchemeError(f"{name}={value!r} is not above 0.", fix=f"{name}=2, for example.")
  found, count = routing.experts.shape, routing.load.shape[0]
  if x.ndim < 2 or x.shape[:-1] != found[:-1] or routing.weights.shape != found:
    raise SchemeError(
      "the routing was made for other tokens.",
      details=f"x {x.shape}, experts {found}, weights {routing.weights.shape}",
      fix="x (tokens..., features), and nxp.parallel.route(logits, top_k) of logits (tokens..., experts).",
    )
  for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
    if leaf.ndim < 1 or leaf.shape[0] != count:
      raise SchemeError(
        f"the parameters of {count} experts have one expert for each index of dim 0.",
        details=f"parameters{jax.tree_util.keystr(path)} {leaf.shape}",
        fix=f"shape ({count}, ...), and logits (tokens..., {count}).",
      )


def _check_rows(rows: jax.Array, found: AnyArray) -> None:
  if not hasattr(found, "shape") or found.shape[:-1] != rows.shape[:-1]:
    raise SchemeError(
      "an expert returns one row for each row that it is given.",
      details=f"rows {rows.shape}, result {jax.tree.map(jnp.shape, found)}",
      fix="lambda p, rows: jax.nn.silu(rows @ p['up']) @ p['down'], for example.",
    )
