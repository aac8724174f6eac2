"""The loops of generation, to be traced: over a batch, and over slots that are filled again.

Each row reads its prompt and then its own tokens. So rows of different length need no mask: a short prompt
just starts to write earlier.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nnx_parallel.core.types import PyTree
from nnx_parallel.decode.sampling import Sampling


class Asked(NamedTuple):
  """Prompts `(rows, width)`, their lengths, and a key for each row."""

  prompts: jax.Array
  lengths: jax.Array
  keys: jax.Array


class _Texts(NamedTuple):
  """What rows have written so far; dim 0 of all arrays is the rows."""

  token: jax.Array  # the next tokens that they read
  found: jax.Array  # the tokens that they have written, `(rows, limit)`
  counts: jax.Array  # how many
  ended: jax.Array


class Generated(NamedTuple):
  """The result of a call of a generator, on the devices. The call does not wait until it is computed.

  Attributes:
    tokens: int32 of global shape `(batch, max_new_tokens)`: the new tokens of each row, then zeros.
    lengths: int32 `(batch,)`: the number of new tokens of each row, including the stop token.
  """

  tokens: jax.Array
  lengths: jax.Array


@dataclasses.dataclass(frozen=True)
class Loop:
  """Common to all loops. `forward` takes (tokens `(rows, n)`, position, state); logits are of the last token.

  `sizes`: prompt tokens, above 1, read at once. `rows`, `replicated`, `kept` and `logits` lay out arrays.
  """

  limit: int
  stops: tuple[int, ...]
  sizes: tuple[int, ...]
  forward: Callable[[jax.Array, jax.Array, PyTree], tuple[jax.Array, PyTree]]
  rows: Callable[[PyTree], PyTree]
  replicated: Callable[[PyTree], PyTree]
  kept: Callable[[PyTree], PyTree]
  logits: Callable[[PyTree], PyTree]
  dims: PyTree

  def stopped(self, tokens: jax.Array) -> jax.Array:
    """Which of the tokens end a row."""
    found = jnp.zeros(tokens.shape, bool)
    for stop in self.stops:
      found |= tokens == stop
    return found

  def unfinished(self, rows: _Texts, step: jax.Array, last: jax.Array) -> jax.Array:
    """Whether a row may still write. Whether all have ended takes an all-reduce for each token."""
    return ~jnp.all(rows.ended) if self.stops else step < last

  def read_together(self, prompts: jax.Array, lengths: jax.Array, state: PyTree) -> tuple[jax.Array, PyTree]:
    """Reads the positions that all prompts share, several at once, except the last of the shortest."""
    last = lengths.min() - 1

    def read(count: int, carry: PyTree) -> PyTree:
      position, state = carry
      tokens = self.rows(jax.lax.dynamic_slice_in_dim(prompts, position, count, -1))
      return position + count, self.forward(tokens, position, state)[1]

    carry = jnp.zeros((), jnp.int32), state
    for count in self.sizes:
      more = functools.partial(lambda count, carry: carry[0] + count <= last, count)
      carry = jax.lax.while_loop(more, functools.partial(read, count), carry)
    return carry

  def read_prefix(self, prefix: jax.Array, most: int, rows: int, state: PyTree) -> PyTree:
    """The state after the tokens ahead of all prompts, at positions below 0, `most` at once."""
    (length,) = prefix.shape
    part = min(most, length)

    def read(count: int, start: jax.Array | int, state: PyTree) -> PyTree:
      some = jax.lax.dynamic_slice_in_dim(prefix, start, count)
      tokens = self.rows(jnp.broadcast_to(some, (rows, count)))
      return self.forward(tokens, jnp.asarray(start - length, jnp.int32), state)[1]

    whole, rest = divmod(length, part)
    state = jax.lax.fori_loop(0, whole, lambda n, state: read(part, n * part, state), state)
    return read(rest, whole * part, state) if rest else state

  def chosen(self, rows: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """For each row, the new state or the old state."""
    return _choose(rows, new, old, self.dims)


class Written(NamedTuple):
  """What rows have written in a step, `(rows,)`: the number of the prompt, and the token; -1 for nothing."""

  row: jax.Array
  token: jax.Array


class Steps(NamedTuple):
  """A loop, in parts."""

  begin: Callable[[], PyTree]  # the carry before the first step; the prompts may have been read
  more: Callable[[PyTree], jax.Array]  # whether a step is left
  # the carry after a step, which calls the model with a token of each row, and what it has written
  one: Callable[[PyTree], tuple[PyTree, Written]]
  end: Callable[[PyTree], tuple[PyTree, Generated]]  # the state, and the results

  def all(self) -> tuple[PyTree, Generated]:
    """The state and the results after all steps."""
    return self.end(jax.lax.while_loop(self.more, lambda carry: self.one(carry)[0], self.begin()))


def sizes_of(most: int, width: int, *, equal: bool) -> tuple[int, ...]:
  """The numbers of prompt tokens that are read at once; the last token of a prompt is read for its logits.

  Equal prompts: parts and a rest. Others: each size is an eighth of the one before, so few tokens remain.
  """
  last = width - 1
  part = min(most, last)
  sizes = [part, last % max(part, 1)] if equal else [part // 8**n for n in range(16)]
  return tuple(size for size in sizes if size > 1)


def by_batch(loop: Loop, sampling: Sampling, asked: Asked, state: PyTree) -> Steps:
  """Continues all prompts at once; `position` is the same for all rows."""
  last = asked.lengths.max() + loop.limit - 1

  def begin() -> PyTree:
    position, read = loop.read_together(asked.prompts, asked.lengths, state)
    return position, _begin(loop, asked, position), read

  def one(carry: PyTree) -> tuple[PyTree, Written]:
    position, rows, state = carry
    logits, state = loop.forward(rows.token[:, None], position, state)
    after = _advance(loop, sampling, asked, position, rows, logits)
    return (position + 1, after, state), _written(jnp.arange(rows.token.shape[0]), rows, after)

  return Steps(
    begin,
    lambda carry: loop.unfinished(carry[1], carry[0], last),
    one,
    lambda carry: (carry[2], Generated(carry[1].found, carry[1].counts)),
  )


def _begin(loop: Loop, asked: Asked, position: jax.Array) -> _Texts:
  """Rows that have read so many tokens of their prompts."""
  batch = asked.prompts.shape[0]
  counts = loop.kept(jnp.zeros((batch,), jnp.int32))
  found = loop.kept(jnp.zeros((batch, loop.limit), jnp.int32))
  return _Texts(loop.kept(_column(asked.prompts, position)), found, counts, counts != 0)


def _advance(
  loop: Loop, sampling: Sampling, asked: Asked, position: jax.Array, rows: _Texts, logits: jax.Array
) -> _Texts:
  """Rows after a token at a position, whose logits these are."""
  drawn = loop.rows(jax.vmap(jax.random.fold_in)(asked.keys, rows.counts))
  chosen = loop.kept(sampling.choose(loop.logits(logits), drawn))
  reads = position + 1 < asked.lengths
  writes = ~reads & ~rows.ended
  here = writes[:, None] & (jnp.arange(loop.limit)[None] == rows.counts[:, None])
  counts = rows.counts + writes.astype(jnp.int32)
  return _Texts(
    token=loop.kept(jnp.where(reads, _column(asked.prompts, position + 1), chosen)),
    found=loop.kept(jnp.where(here, chosen[:, None], rows.found)),
    counts=counts,
    ended=rows.ended | (writes & (loop.stopped(chosen) | (counts == loop.limit))),
  )


def _written(row: jax.Array, before: _Texts, after: _Texts) -> Written:
  return Written(row, jnp.where(after.counts > before.counts, after.token, -1))


def _column(prompts: jax.Array, position: jax.Array) -> jax.Array:
  """The tokens at one position, or at a position for each row; no row reads past the widest prompt."""
  column = jnp.minimum(position, prompts.shape[1] - 1)
  if not column.ndim:
    return jax.lax.dynamic_index_in_dim(prompts, column, 1, keepdims=False)
  return jax.vmap(lambda row, column: row[column])(prompts, column)


class _Slots(NamedTuple):
  """The loop over rows with separate states. All but the state is small, and replicated."""

  request: jax.Array  # the prompt that a slot works on; the number of prompts, if no prompt is left
  position: jax.Array  # tokens that its cache has read
  rows: _Texts
  state: PyTree
  done: Generated  # the results of the requests that have ended
  following: jax.Array  # the next request that no slot has begun


def by_slots(
  loop: Loop, sampling: Sampling, asked: Asked, fresh: PyTree, slots: int, shards: int | None
) -> Steps:
  """Continues any number of prompts in as many slots as `fresh` has rows; free slots take new prompts.

  In a step, a long prompt reads a part first: in each slot, or in one on each of `shards`, the oldest.
  """
  asked = jax.tree.map(loop.replicated, asked)
  requests = asked.prompts.shape[0]

  def of(request: jax.Array) -> Asked:
    return jax.tree.map(lambda x: x[jnp.minimum(request, requests - 1)], asked)

  def begun(request: jax.Array) -> _Texts:
    rows = _begin(loop, of(request), jnp.zeros((), jnp.int32))
    return rows._replace(ended=request >= requests)

  def can_read(s: _Slots, count: int) -> jax.Array:
    return ~s.rows.ended & (s.position + count < of(s.request).lengths)

  def read(count: int, s: _Slots) -> _Slots:
    here, some = can_read(s, count), _Some(None)
    if shards is not None and shards < slots:
      waiting = jnp.where(here, s.request, requests).reshape(shards, -1)
      some = _Some(jnp.argmin(waiting, 1))
      here &= some.put(jnp.zeros_like(here), jnp.ones((shards,), bool))
    prompts, position = of(some.of(s.request)).prompts, some.of(s.position)
    tokens = loop.rows(_column(prompts, position[:, None] + jnp.arange(count)[None]))
    before = jax.tree.map(some.of, s.state)
    new, able = loop.forward(tokens, loop.rows(position), before)[1], loop.rows(some.of(here))
    after = jax.lax.cond(able.all(), lambda: new, lambda: loop.chosen(able, new, before))
    position = jnp.where(here, s.position + count, s.position)
    token = jnp.where(here, _column(of(s.request).prompts, position), s.rows.token)
    state = jax.tree.map(some.put, s.state, after)
    return s._replace(position=position, rows=s.rows._replace(token=token), state=state)

  def one(s: _Slots) -> tuple[_Slots, Written]:
    if loop.sizes:
      able = jnp.stack([can_read(s, count).any() for count in loop.sizes] + [jnp.ones((), bool)])
      reads = [functools.partial(read, count) for count in loop.sizes]
      s = jax.lax.switch(jnp.argmax(able), [*reads, lambda s: s], s)
    logits, state = loop.forward(loop.rows(s.rows.token[:, None]), loop.rows(s.position), s.state)
    rows = _advance(loop, sampling, of(s.request), s.position, s.rows, logits)
    ends = rows.ended & (s.request < requests)
    # A slot that goes on writes to a row that is not there, which drops it.
    row = jnp.where(ends, s.request, requests)
    news = zip(s.done, (rows.found, rows.counts), strict=True)
    request = jnp.where(ends, jnp.minimum(s.following + jnp.cumsum(ends) - 1, requests), s.request)
    if requests > slots:  # only where a slot begins anew: it takes a pass over all caches
      begins = ends & (request < requests)
      state = jax.lax.cond(begins.any(), lambda: loop.chosen(loop.rows(begins), fresh, state), lambda: state)
    after = _Slots(
      request=request,
      position=jnp.where(ends, 0, s.position + 1),
      rows=_choose(ends, begun(request), rows),
      state=state,
      done=Generated(*(x.at[row].set(new, mode="drop") for x, new in news)),
      following=s.following + ends.sum(dtype=jnp.int32),
    )
    return after, _written(s.request, s.rows, rows)

  def begin() -> _Slots:
    first = jnp.minimum(loop.replicated(jnp.arange(slots, dtype=jnp.int32)), requests)
    none = Generated(jnp.zeros((requests, loop.limit), jnp.int32), jnp.zeros((requests,), jnp.int32))
    following = jnp.asarray(min(slots, requests), jnp.int32)
    return _Slots(first, first * 0, begun(first), fresh, jax.tree.map(loop.replicated, none), following)

  return Steps(begin, lambda s: (s.request < requests).any(), one, lambda s: (s.state, s.done))


class _Some(NamedTuple):
  """One slot on each shard; or all slots."""

  which: jax.Array | None

  def of(self, x: jax.Array) -> jax.Array:
    """Their entries."""
    return x if self.which is None else _take(self._split(x), self.which)

  def put(self, x: jax.Array, new: jax.Array) -> jax.Array:
    """The entries of all slots, with theirs replaced."""
    if self.which is None:
      return new
    return jax.vmap(lambda x, n, new: x.at[n].set(new))(self._split(x), self.which, new).reshape(x.shape)

  def _split(self, x: jax.Array) -> jax.Array:
    return x if self.which is None else x.reshape(self.which.shape[0], -1, *x.shape[1:])


def _choose(rows: jax.Array, new: PyTree, old: PyTree, dims: PyTree = 0) -> PyTree:
  """For each row, the new state or the old state; `dims` has the dim of the rows in each array."""

  def choose(row: jax.Array, *states: PyTree) -> PyTree:
    return jax.tree.map(functools.partial(jnp.where, row), *states)

  return jax.vmap(choose, (0, dims, dims), dims)(rows, new, old)


def _take(x: jax.Array, which: jax.Array) -> jax.Array:
  """For each row, its entries `which` of dim 1; rows stay on their devices."""
  return jax.vmap(lambda x, which: x[which])(x, which)
