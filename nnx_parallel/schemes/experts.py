"""Experts that are sharded over a mesh axis: each token is sent to the experts that its router chose.

Without a capacity, an expert computes its rows in as many blocks as it needs. On TPUs, the experts of a
device compute all rows at once, with grouped products. Elsewhere, XLA would multiply each row by the weights
of all experts (`jax.lax.ragged_dot` without a kernel), so there each call of `expert_fn` has one expert.

The axes that shard the tokens are Manual in this module: its code sorts, exchanges and sums the tokens of one
device. The compiler handles the other axes, such as an axis that shards the width of each expert.

An example: 4 experts on 2 devices, top 2, no capacity. Token 0 of device 0 chose experts 2 and 3, token 1
chose 0 and 2. `_Rounds` sends both tokens to device 1 (once, though token 0 has two experts there) and token
1 to device 0. Device 1 sorts the choices of the rows that arrived, [0, 1 | 0] for its experts 2 and 3, and
computes them part by part; row 0 returns as w2 * expert2(x0) + w3 * expert3(x0). Rows are sums of choices, so
an exchange in each direction is enough.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import count_shards, entry_of
from nnx_parallel.core.checked import check_arguments, check_arrays
from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.shards import laid_out, on_shards
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import SchemeError
from nnx_parallel.layout.constrain import active_mesh, manual_too
from nnx_parallel.schemes.expert_functions import ExpertFn, check_expert_fn, check_rows
from nnx_parallel.schemes.routing import Routing
from nnx_parallel.schemes.tokens import array_of, check_not_mapped, token_axes

TILE = 128
"""The number of rows of a grouped product is a multiple of this, as the kernel of TPUs needs it."""


@check_arguments(SchemeError, block=1)
def experts(
  expert_fn: ExpertFn,
  parameters: PyTree,
  x: jax.Array,
  routing: Routing,
  *,
  axis: str = "expert",
  capacity: float | None = None,
  buffer: float = 1.1,
  block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Sends each token to its experts, and returns the weighted sums of their results.

  The mesh is found as in `vocabulary_cross_entropy`. Its batch axes and `axis` shard the tokens; the tokens
  are padded if the axes do not divide them. Without a mesh, or on a mesh without `axis`, each device computes
  its own tokens, with the same code.

  A *choice* is one expert of one token. With `capacity`, each device has
  `ceil(capacity * choices / experts)` slots for each expert, where `choices` is the number of choices of its
  tokens, and an all-to-all sends all slots. First choices of all tokens get slots before second choices, and
  so on, each in the order of the tokens. A choice without a slot is dropped: its expert adds nothing to the
  result of the token. Which choices are dropped therefore depends on the number of devices.

  Without `capacity`, no token is dropped. A token is sent once to each device that has some of its experts,
  and one row returns from this device: the weighted sum of the results of these experts. In the first round,
  a device sends up to `buffer` times as many tokens to each other device as an even load would. Rounds of a
  quarter of this size follow until all tokens are sent. On TPUs, the all-to-all of the rows is ragged: it
  sends no padding. (The numbers and weights of the experts are sent with padding.) The backward pass sends
  the tokens again, and recomputes the experts.

  Args:
    expert_fn: a function `(parameters, rows, group_sizes) -> rows` that computes one or more experts, such as
      `nxp.parallel.mlp_experts`: from their parameters, of shape (experts, ...), rows of shape (rows,
      features), sorted by expert, and the number of rows of each expert. Its products are
      `nxp.parallel.ragged_dot(rows, weights, group_sizes)`, or `jax.lax.ragged_dot` where no `jax.vmap` maps
      the layer. It must compute each row independently, and must accept rows of zeros, which fill empty
      slots. All arrays that it uses are in `parameters`. On Explicit axes, a sum over a dim that another axis
      shards needs its `out_sharding`, as elsewhere; `nxp.parallel.ragged_dot` has it.
    parameters: a pytree of arrays or Variables of global shape (experts, ...). `axis` shards dim 0. If batch
      axes, such as fsdp, shard the parameters, they are gathered; shardings over other axes, such as the axis
      of tensor parallelism, stay.
    x: the tokens, of global shape (tokens..., features), for example (batch, seq, features).
    routing: the routing of the tokens of `x`, from `route`. A number that is not the number of an expert,
      such as -1 for padding, is ignored.
    axis: the mesh axis that shards the experts. The number of experts must be a multiple of its size.
    capacity: the number of slots of an expert, as a multiple of the number for an even load. None drops no
      token.
    buffer: without `capacity`, the size of the first round, as a multiple of the size for an even load, in
      which all sets of experts are equally probable.
    block: without `capacity`, the number of rows that an expert computes at a time. None: 512, and on TPUs
      2048. On TPUs, all experts of a device compute their rows together, `block` rows for each expert on
      average, unless Explicit axes shard the weights. Elsewhere, each call has one expert.

  Returns:
    The sums, of global shape (tokens..., features of the result), in the dtype of the results; and the number
    of dropped choices, an int32 scalar, which is 0 without `capacity`.

  Raises:
    SchemeError: shapes do not fit, `expert_fn` does not take three arguments, the number of experts is not a
      multiple of the size of `axis`, an option is not above 0, or `axis` is already Manual.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> draw = jax.random.normal
    >>> x, up, down = (draw(jax.random.key(i), s) for i, s in enumerate([(16, 8), (4, 8, 32), (4, 32, 8)]))
    >>> with jax.set_mesh(nxp.make_mesh(data=2, expert=4)):
    ...   routing = nxp.parallel.route(x[:, :4], 2)
    ...   y, dropped = nxp.parallel.experts(nxp.parallel.mlp_experts, {"up": up, "down": down}, x, routing)
    >>> y.shape, int(dropped)
    ((16, 8), 0)

  Source: GShard, arXiv:2006.16668; without capacity, and for grouped products, MegaBlocks, arXiv:2211.15841.
  """
  check_arrays(SchemeError, "parameters", nnx.as_pure(parameters))
  leaves, structure = jax.tree.flatten(parameters, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
  weights: PyTree = jax.tree.unflatten(structure, [array_of(leaf) for leaf in leaves])
  count, top_k = routing.load.shape[0], routing.weights.shape[-1]
  check_expert_fn(expert_fn)
  _check_shapes(weights, x, routing, {"capacity": capacity, "buffer": buffer})
  around = active_mesh(x, *leaves)
  sizes = axis_sizes(around.mesh)
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
  if any(n % count_shards(names, free) for n, names in zip(shape, dims, strict=True)):
    dims = [tuple(name for names in dims for name in names)]
    fills = 0, 0, count  # padding chooses an expert that does not exist
    given = [_flat(x, around.mesh, count_shards(dims[0], free), n) for x, n in zip(given, fills, strict=True)]
  tokens = math.prod(given[0].shape[:-1]) // count_shards([name for names in dims for name in names], free)
  choices = tokens * top_k
  # The share of tokens that choose some expert of a device, where all sets of `top_k` are equally probable.
  share = 1 - math.comb(count - count // ways, top_k) / max(math.comb(count, top_k), 1)
  kind = _Kind(
    expert_fn,
    axis if ways > 1 else None,
    ways,
    count,
    tuple(dims),
    None if capacity is None else min(math.ceil(capacity * choices / count), choices),
    math.ceil(min(buffer * tokens * share, tokens)),
    block,
    1 / (ways * share),
    around.mesh if any(dims) else None,
    manual_too(around.mesh),
  )
  result, dropped = _over_devices(kind, weights, *given)
  if result.shape[:-1] != shape:
    own = laid_out(result, around.mesh, PartitionSpec())[: math.prod(shape)]
    result = own.reshape(*shape, result.shape[-1])
  return result, dropped


def _flat(x: jax.Array, mesh: AnyMesh | None, ways: int, fill: int) -> jax.Array:
  """The tokens in one dim, padded so that `ways` divides their number."""
  # On an Explicit mesh, a dim whose type has axes has a fixed length.
  x = laid_out(x, mesh, PartitionSpec()).reshape(-1, x.shape[-1])
  return jnp.pad(x, ((0, -x.shape[0] % ways), (0, 0)), constant_values=fill)


@dataclasses.dataclass(frozen=True)
class _Kind:
  """The static options of a call of `experts`."""

  function: ExpertFn
  axis: str | None  # the mesh axis of the experts; None: one device
  ways: int  # the size of the axis
  experts: int  # on all devices
  tokens: tuple[tuple[str, ...], ...]  # the mesh axes that shard each dim of the tokens
  capacity: int | None  # slots for each pair of a device and an expert
  buffer: int  # slots for the tokens of each pair of devices in the first round
  block: int | None  # rows that an expert computes at a time, if the user chose
  even: float  # the fraction of the slots for choices in a round that are filled if the load is even
  mesh: AnyMesh | None  # None: one device
  mapped: frozenset[str]  # mesh axes of an enclosing `jax.vmap`

  @property
  def own(self) -> int:
    """The number of experts of a device."""
    return self.experts // self.ways

  @property
  def size_of_more(self) -> int:
    """Slots for the tokens of each pair of devices in a round after the first one."""
    return -(-self.buffer // 4)

  @property
  def manual(self) -> tuple[str, ...]:
    """The axes that shard the tokens."""
    return tuple(name for names in self.tokens for name in names)

  def exchange(self, x: jax.Array) -> jax.Array:
    """Sends one equal part of dim 0 to each device, and returns the parts received from each device."""
    return x if self.axis is None else jax.lax.all_to_all(x, self.axis, 0, 0, tiled=True)

  def exchange_filled(
    self, x: jax.Array, sent: jax.Array, received: jax.Array, spare: jax.Array | None = None
  ) -> jax.Array:
    """As `exchange`, but of each part only the first `sent` rows; the others may have arbitrary numbers.

    The result takes the memory of `spare`, which is no longer needed, if it has the shape and dtype of `x`.
    """
    if self.axis is None:
      return x
    size = x.shape[0] // self.ways
    starts = jnp.arange(self.ways, dtype=jnp.int32) * size
    there = jnp.full_like(starts, size) * jax.lax.axis_index(self.axis)
    # `jax.vmap` maps a ragged all-to-all only if all of its offsets and sizes are mapped. `zero` depends on
    # `x`, so they are mapped if `x` is mapped.
    zero = jnp.where(x[:1, :1].sum() > 0, 0, 0).astype(jnp.int32)
    starts, there, sent, received = (count + zero for count in (starts, there, sent, received))

    same = spare is not None and (spare.shape, spare.dtype) == (x.shape, x.dtype)
    into = spare if same else jax.lax.empty(x.shape, x.dtype)

    def ragged(x: jax.Array, into: jax.Array) -> jax.Array:
      # The exchange has a layout of its own. The barrier keeps the compiler from computing `x` in this
      # layout, which is slower than a copy of `x`, and from allocating `into` before it is needed.
      x, into = jax.lax.optimization_barrier((x, into))
      return jax.lax.ragged_all_to_all(x, into, starts, sent, there, received, axis_name=self.axis)

    return jax.lax.platform_dependent(x, into, tpu=ragged, default=lambda x, _: self.exchange(x))


@functools.partial(jax.jit, static_argnums=0)
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


# Slots hold choices on their way to the experts. A slot has at most one choice, and a choice has at most one
# slot, so filling the slots, reading the results, and the gradients of both are look-ups.


class _Queues(NamedTuple):
  """A device's choices by expert; choice `c` of token `t` is `c * tokens + t`: first choices come first."""

  order: jax.Array  # the numbers of the choices, sorted by expert
  starts: jax.Array  # for each expert, the place of its first choice in `order`
  ends: jax.Array  # for each expert, the place after its last choice

  @classmethod
  def sort(cls, experts: jax.Array, count: int) -> _Queues:
    """Sorts the choices, from the expert of each choice; a number that no expert has is padding."""
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    ordered, numbers = experts[order], jnp.arange(count, dtype=jnp.int32)
    starts, ends = (
      jnp.searchsorted(ordered, numbers, side=side).astype(jnp.int32) for side in ("left", "right")
    )
    return cls(order, starts, ends)

  @property
  def rank(self) -> jax.Array:
    """For each choice, its place in `order`."""
    return jnp.argsort(self.order).astype(jnp.int32)


def _at(order: jax.Array, places: jax.Array, filled: jax.Array) -> jax.Array:
  """The choice at each place of `order`; where a place is not filled, the number after the last choice."""
  return jnp.where(filled, order[jnp.clip(places, 0, order.size - 1)], order.size)


def _read(x: jax.Array, places: jax.Array) -> jax.Array:
  """The elements of dim 0 at some places; zeros for a place beyond the last one."""
  return x.at[places].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _look_up(x: jax.Array, places: jax.Array, readers: jax.Array) -> jax.Array:
  """`_read`, whose gradient is a look-up too: `readers` `[n, length]` are the places of each element."""
  return _read(x, places)


def _pull_back(readers: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
  found = _read(g.reshape(-1, g.shape[-1]), readers)
  return found.astype(jnp.float32).sum(0).astype(g.dtype), None, None


_look_up.defvjp(lambda x, places, readers: (_read(x, places), readers), _pull_back)


@jax.checkpoint
def _sum_results(rows: jax.Array, weights: jax.Array, choices: jax.Array, slots: jax.Array) -> jax.Array:
  """The weighted sum of each token's results `rows[slots]`; `weights` and `slots` are `[choices, tokens]`."""
  found = _look_up(rows, slots, choices[None]).astype(jnp.float32)
  return (found * weights[..., None]).sum(0).astype(rows.dtype)


def _with_capacity(
  kind: _Kind, parameters: PyTree, x: jax.Array, weights: jax.Array, experts: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The sums of a device's tokens `[tokens, features]`, and how many of its choices were dropped."""
  assert kind.capacity is not None
  size = kind.capacity
  own = experts.T.reshape(-1)
  queues = _Queues.sort(own, kind.experts)
  places = queues.starts[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
  choices = _at(queues.order, places, places < queues.ends[:, None]).reshape(-1)
  exists = (own >= 0) & (own < kind.experts)
  own = jnp.where(exists, own, 0)
  at = queues.rank - queues.starts[own]
  slots = jnp.where(exists & (at < size), own * size + at, choices.size).reshape(experts.T.shape)
  tokens = jnp.where(choices < slots.size, choices % len(x), len(x))
  rows = kind.exchange(_look_up(x, tokens, slots).reshape(kind.experts, size, -1))
  rows = rows.reshape(kind.ways, kind.own, size, -1).swapaxes(0, 1).reshape(kind.own, kind.ways * size, -1)

  def compute(weights: PyTree, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    return kind.function(jax.tree.map(lambda leaf: leaf[None], weights), rows, sizes)

  # One product for each expert is fastest for equal numbers of rows. JAX maps its `ragged_dot` if the sizes
  # are mapped too.
  sizes = jnp.full((kind.own, 1), rows.shape[1], jnp.int32)
  done = jax.vmap(compute)(parameters, rows, sizes)
  check_rows(rows, done)
  rows = done.reshape(kind.own, kind.ways, size, -1).swapaxes(0, 1).reshape(kind.experts, size, -1)
  result = _sum_results(kind.exchange(rows).reshape(choices.size, -1), weights.T, choices, slots)
  return result, jnp.maximum(queues.ends - queues.starts - size, 0).sum(dtype=jnp.int32)


# Without capacity: rounds of exchange, each with blocks of rows of one expert.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Rounds:
  """The tokens that a device sends and receives in all rounds.

  If several experts of a token are on one device, the token is sent to this device once, in the slot of the
  first of these choices.
  """

  kind: _Kind = dataclasses.field(metadata={"static": True})
  weights: jax.Array  # of each token, `[tokens, choices]`
  experts: jax.Array
  order: jax.Array  # the first choice of each token for each device, sorted by device; then the others
  places: jax.Array  # for each choice, its place among the first choices for its device, or beyond all places
  to: jax.Array  # the number of the device of each choice; for padding, the number of devices
  starts: jax.Array  # for each device, the place in `order` of the first choice for it
  sent: jax.Array  # the number of tokens for each device
  received: jax.Array  # the number of tokens from each device
  more: jax.Array | None  # the number of rounds after the first; None: its slots are enough for all tokens

  @classmethod
  def plan(cls, kind: _Kind, weights: jax.Array, experts: jax.Array) -> _Rounds:
    """Plans the rounds, from the weights and experts of each token."""
    by_choice = experts.T
    to = jnp.where((by_choice >= 0) & (by_choice < kind.experts), by_choice // kind.own, kind.ways)
    before = jnp.tril(jnp.ones((len(to), len(to)), bool), -1)
    is_first = ~((to[:, None] == to[None]) & before[..., None]).any(1) & (to < kind.ways)
    queues = _Queues.sort(jnp.where(is_first, to, kind.ways).reshape(-1), kind.ways)
    places = queues.rank.reshape(to.shape) - _read(queues.starts, to)
    sent = queues.ends - queues.starts
    more = None
    if kind.buffer < experts.shape[0]:
      more = jax.lax.pmax(-((kind.buffer - sent.max()) // kind.size_of_more), kind.manual)
    places = jnp.where(is_first, places, jnp.iinfo(jnp.int32).max)
    received = kind.exchange(sent)
    return cls(kind, weights, experts, queues.order, places, to, queues.starts, sent, received, more)

  def run(self, visit: Callable[..., PyTree], state: PyTree) -> PyTree:
    """The state after all rounds; `visit(round, state)` handles one."""
    first, size = self.kind.buffer, self.kind.size_of_more
    state = visit(self._round(0, first), state)
    if self.more is None:
      return state

    def more(n: jax.Array | int, state: PyTree) -> PyTree:
      return visit(self._round(first + n * size, size), state)

    return jax.lax.fori_loop(0, self.more, more, state)

  def _round(self, start: jax.Array | int, size: int) -> _Round:
    """The round of some slots of each pair of devices."""
    kind = self.kind
    at = self.places - start
    slots = jnp.where((at >= 0) & (at < size), self.to * size + at, kind.ways * size)
    own = jnp.arange(size, dtype=jnp.int32)[None] + start
    choices = _at(self.order, self.starts[:, None] + own, own < self.sent[:, None]).reshape(-1)
    tokens = jnp.where(choices < at.size, choices % at.shape[1], at.shape[1])
    there = self.experts.at[tokens].get(mode="fill", fill_value=-1)
    there = there - jnp.repeat(jnp.arange(kind.ways, dtype=jnp.int32), size)[:, None] * kind.own
    there = kind.exchange(jnp.where((there >= 0) & (there < kind.own), there, kind.own))
    shares = kind.exchange(_read(self.weights, tokens))
    queues = _Queues.sort(there.T.reshape(-1), kind.own)
    sent, received = (jnp.clip(count - start, 0, size) for count in (self.sent, self.received))
    return _Round(kind, tokens, slots, sent, received, queues, shares.T.reshape(-1))


class _Round(NamedTuple):
  """One round: what a device sends, and what it computes."""

  kind: _Kind
  tokens: jax.Array  # for each slot, its token; for an empty slot, a number beyond the last token
  slots: jax.Array  # for each choice, its slot in this round or a number beyond, `[choices, tokens]`
  sent: jax.Array  # the number of filled slots for each device
  received: jax.Array  # the number of rows from each device
  queues: _Queues  # the choices of the rows that arrive; choice `c` of row `r` is `c * rows + r`
  shares: jax.Array  # the weights of these choices

  def send(self, x: jax.Array) -> jax.Array:
    """Sends the tokens of this device, and returns the rows that arrive from all devices."""
    rows = _read(x, self.tokens)
    return self.kind.exchange_filled(rows, self.sent, self.received)

  def send_back(self, rows: jax.Array, arrived: jax.Array) -> jax.Array:
    """Returns the rows to their devices; for each token, the float32 sum of the rows that it gets back.

    `arrived` are the rows from which they were computed; they are no longer needed.
    """
    rows = self.kind.exchange_filled(rows, self.received, self.sent, arrived)
    return _read(rows, self.slots).astype(jnp.float32).sum(0)


class _Part(NamedTuple):
  """Some choices, sorted by expert, that a device computes at once."""

  choices: jax.Array  # their numbers; at the end of a part, the last choice may be repeated
  exist: jax.Array  # False for a repeated choice
  parameters: PyTree  # of one expert, or of all experts of the device
  sizes: jax.Array  # the number of choices of each of these experts
  add: Callable[[jax.Array, jax.Array], jax.Array]  # adds their gradient to the sum for all experts

  def take(self, arrived: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers of the rows of the choices, and the rows; ones if there is no choice.

    An exchange may leave NaN in a row that was not sent, and NaN times a gradient of 0 is NaN.
    """
    numbers = self.choices % len(arrived)
    return numbers, jnp.where(self.exist[0], arrived[numbers], jnp.ones((), arrived.dtype))


Visit = Callable[[_Part, PyTree], PyTree]


def _in_parts(kind: _Kind, queues: _Queues, parameters: PyTree, visit: Visit, state: PyTree) -> PyTree:
  """The state after all parts of the choices of a round; `visit(part, state)` handles one."""
  blocks, groups = (functools.partial(f, kind, queues, parameters, visit) for f in (_in_blocks, _in_groups))
  if any(any(jax.typeof(leaf).sharding.spec) for leaf in jax.tree.leaves(parameters)):
    return blocks(state)  # JAX has no grouped product of weights that Explicit axes shard
  return jax.lax.platform_dependent(state, tpu=groups, default=blocks)


def _in_blocks(kind: _Kind, queues: _Queues, parameters: PyTree, visit: Visit, state: PyTree) -> PyTree:
  """Each part has choices of one expert. The last part of an expert may be partly full."""
  size = min(kind.block or 512, queues.order.size)
  last = jnp.cumsum(-(-(queues.ends - queues.starts) // size), dtype=jnp.int32)

  def body(n: jax.Array | int, state: PyTree) -> PyTree:
    expert = (last <= n).sum(dtype=jnp.int32)
    before = jnp.where(expert > 0, last[expert - 1], 0)
    places = queues.starts[expert] + (n - before) * size + jnp.arange(size, dtype=jnp.int32)
    end = queues.ends[expert]
    own = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, expert, 1), parameters)
    choices = queues.order[jnp.minimum(places, end - 1)]
    sizes = jnp.full(1, size, jnp.int32)
    return visit(_Part(choices, places < end, own, sizes, lambda x, g: x.at[expert].add(g[0])), state)

  return jax.lax.fori_loop(0, last[-1], body, state)


def _in_groups(kind: _Kind, queues: _Queues, parameters: PyTree, visit: Visit, state: PyTree) -> PyTree:
  """Each part has choices of several experts: all choices of an even load, unless `block` limits a part."""
  size = min(kind.even * queues.order.size, (kind.block or 2048) * kind.own)
  size = math.ceil(size / TILE) * TILE
  end = queues.ends[-1]

  def body(n: jax.Array | int, state: PyTree) -> PyTree:
    places = n * size + jnp.arange(size, dtype=jnp.int32)
    # The last expert with choices also gets the repeated ones.
    ends = jnp.where(queues.ends < end, jnp.clip(queues.ends - n * size, 0, size), size)
    choices = queues.order[jnp.minimum(places, end - 1)]
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
    return visit(_Part(choices, places < end, parameters, sizes, jnp.add), state)

  # One part is no loop, whose sums of gradients would be as large as the weights, in float32.
  state = body(0, state)
  return jax.lax.fori_loop(1, -(-end // size), body, state) if size < queues.order.size else state


def _of_one(function: ExpertFn) -> Callable[[PyTree, jax.Array], PyTree]:
  """`function` of the first expert and all rows."""
  first = functools.partial(jax.tree.map, lambda leaf: leaf[:1])
  return lambda parameters, rows: function(first(parameters), rows, jnp.full(1, len(rows), jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dropless(
  kind: _Kind, parameters: PyTree, x: jax.Array, weights: jax.Array, experts: jax.Array
) -> jax.Array:
  """The sums of a device's tokens `[tokens, features]`."""
  return _dropless_forward(kind, parameters, x, weights, experts)[0]


def _dropless_forward(
  kind: _Kind, parameters: PyTree, x: jax.Array, weights: jax.Array, experts: jax.Array
) -> tuple[jax.Array, PyTree]:
  rounds = _Rounds.plan(kind, weights, experts)
  row = jax.eval_shape(_of_one(kind.function), parameters, x)
  check_rows(x, row)
  if any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in (*jax.tree.leaves(parameters), row)):
    raise SchemeError("experts without a capacity add up real numbers.", fix="capacity=2, for example.")

  def visit(now: _Round, total: jax.Array) -> jax.Array:
    arrived = now.send(x)

    def part(part: _Part, sums: jax.Array) -> jax.Array:
      rows, given = part.take(arrived)
      found = kind.function(part.parameters, given, part.sizes).astype(jnp.float32)
      found = found * now.shares[part.choices][:, None]
      return sums.at[rows].add(jnp.where(part.exist[:, None], found, 0))

    sums = jnp.zeros((len(arrived), *row.shape[1:]), jnp.float32)
    sums = _in_parts(kind, now.queues, parameters, part, sums)
    return total + now.send_back(sums.astype(row.dtype), arrived)

  total = rounds.run(visit, jnp.zeros(row.shape, jnp.float32))
  return total.astype(row.dtype), (rounds, parameters, x)


def _dropless_backward(kind: _Kind, kept: PyTree, g: jax.Array) -> PyTree:
  # Without the barrier, XLA sees that the first round receives the same rows as in the forward pass. It then
  # keeps these rows in memory instead of sending them again.
  (rounds, parameters, x), g = jax.lax.optimization_barrier((kept, g))
  real = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(parameters)]

  def visit(now: _Round, state: PyTree) -> PyTree:
    by_parameter, by_x, by_weight = state
    arrived, slopes = now.send(x), now.send(g)

    def part(part: _Part, state: PyTree) -> PyTree:
      by_parameter, by_row, by_share = state
      (rows, given), exist = part.take(arrived), part.exist[:, None]
      result, back = jax.vjp(
        lambda weights, rows: kind.function(weights, rows, part.sizes), part.parameters, given
      )
      slope = slopes[rows].astype(jnp.float32)
      own = jnp.where(exist, slope * now.shares[part.choices][:, None], 0)
      added, by_rows = back(own.astype(result.dtype))
      added = [leaf for leaf, is_real in zip(jax.tree.leaves(added), real, strict=True) if is_real]
      by_parameter = [
        part.add(total, leaf.astype(total.dtype)) for total, leaf in zip(by_parameter, added, strict=True)
      ]
      by_row = by_row.at[rows].add(jnp.where(exist, by_rows.astype(jnp.float32), 0))
      shares = jnp.where(part.exist, (slope * result.astype(jnp.float32)).sum(-1), 0)
      return by_parameter, by_row, by_share.at[part.choices].add(shares)

    zeros = jnp.zeros(arrived.shape, jnp.float32), jnp.zeros_like(now.shares)
    by_parameter, by_row, by_share = _in_parts(kind, now.queues, parameters, part, (by_parameter, *zeros))
    # A token's weights for a device are in the slot of its first choice for the device.
    back = kind.exchange(by_share.reshape(-1, len(by_row)).T)
    by_weight += _read(back, now.slots).sum(0)
    return by_parameter, by_x + now.send_back(by_row.astype(x.dtype), arrived), by_weight

  leaves, structure = jax.tree.flatten(parameters)
  zeros = [jnp.zeros_like(leaf, jnp.float32) for leaf, is_real in zip(leaves, real, strict=True) if is_real]
  start = zeros, jnp.zeros(x.shape, jnp.float32), jnp.zeros(rounds.weights.shape, jnp.float32)
  sums, by_x, by_weight = rounds.run(visit, start)
  found = iter(sums)
  by_leaf = [next(found).astype(leaf.dtype) if own else None for leaf, own in zip(leaves, real, strict=True)]
  return jax.tree.unflatten(structure, by_leaf), by_x.astype(x.dtype), by_weight, None


_dropless.defvjp(_dropless_forward, _dropless_backward)


def _check_shapes(
  parameters: PyTree, x: jax.Array, routing: Routing, options: dict[str, float | None]
) -> None:
  for name, value in options.items():
    if value is not None and not (isinstance(value, numbers.Real) and value > 0):
      raise SchemeError(f"{name}={value!r} is not a number above 0.", fix=f"{name}=2, for example.")
  if options["capacity"] == math.inf:
    raise SchemeError("capacity=inf is not a number of slots.", fix="no capacity=, which drops no token.")
  found, count = routing.experts.shape, routing.load.shape[0]
  if x.ndim < 2 or x.shape[:-1] != found[:-1] or routing.weights.shape != found or 0 in found:
    raise SchemeError(
      "the routing has no choices." if 0 in found else "the routing was made for other tokens.",
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
