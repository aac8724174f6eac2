"""Exact attention over sequences whose positions are sharded over a mesh axis.

In a ring (arXiv:2310.01889), each device keeps its queries, and the keys and values travel around the ring.
With all-to-all (arXiv:2309.14509), each device gets all positions of some heads instead. With two mesh axes,
a ring and all-to-alls can be combined (arXiv:2405.07719). This module has the masks and the layouts; the rest
is `attention`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.lax import PrecisionLike
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from nnx_parallel.attention.blocks import Way
from nnx_parallel.attention.call import attend, check_shapes
from nnx_parallel.attention.kernels import kernel_in_use
from nnx_parallel.attention.tiles import Share
from nnx_parallel.attention.tiling import DimName, Grid
from nnx_parallel.core.axes import axes_by_dim, count_shards
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.types import AnyArray
from nnx_parallel.errors import SchemeError
from nnx_parallel.layout.batch import batch_axes
from nnx_parallel.layout.constrain import active_mesh, manual_too, scope_in_use
from nnx_parallel.schemes.tokens import check_not_mapped

How = Literal["ring", "ulysses"]


@check_arguments(SchemeError, window=range(1, 2**31), block=range(1, 2**31))
def context_attention(
  axis: str = "context",
  *,
  how: How = "ring",
  causal: bool = False,
  window: int | None = None,
  zigzag: bool = False,
  block: int = 512,
  fused: bool = False,
  heads_axis: str | None = None,
) -> Callable[..., jax.Array]:
  """Makes a function for attention over sequences whose positions are sharded over a mesh axis.

  The mesh is the active mesh, which `train_step`, `plan.scope()` or `jax.set_mesh` sets; outside of jit, it
  is the mesh of the queries. The shardings over its other axes do not change. Without a mesh, one device
  computes the attention blockwise.

  The returned function takes
  `(query, key, value, mask=None, *, segment_ids=None, positions=None, is_causal=False, dtype=None,
  precision=None)` with global shapes:

  - queries `[batch..., length, heads, head_dim]`; keys and values with the same number of heads, or with
    fewer heads, each for a group of query heads;
  - `segment_ids` `[batch..., length]`, integers: a position attends only to positions with the same integer;
  - `positions` `[batch..., length]`, integers: the number of each position in its sequence or document, for
    elements in another order, such as the order of `nxp.parallel.zigzag(..., segment_ids=...)`;
  - `mask` `[batch or 1, 1, 1, length]`: the visible keys.

  A device does not compute blocks that these arrays hide in all of its examples. The function is also an
  `attention_fn` of `nnx.MultiHeadAttention`. Dropout, biases, a mask of queries x keys and sown weights are
  errors. A query that sees no key has the result 0.

  Args:
    axis: the mesh axis that shards the positions. The length must be a multiple of the size of this axis.
      With `zigzag`, it must be a multiple of twice this size. With `heads_axis`, it must also be a multiple
      of the product of the sizes of both axes.
    how: `"ring"` sends each shard of the keys and values around the ring of devices, in axis size - 1 steps;
      the backward pass sends them again, together with their gradients. `"ulysses"` sends queries, keys,
      values and results once, in all-to-alls; the number of heads must be a multiple of the axis size.
    causal: whether a query attends to no later position.
    window: a query attends to the last `window` positions, including its own; if attention is not causal,
      also to the same number of positions ahead. A ring then ends after the last shard that is visible.
    zigzag: whether the positions are in the order of `nxp.parallel.zigzag`, so that a causal ring gives all
      devices equal work.
    block: the number of queries, and of keys, for which scores are computed at a time.
    fused: with `"ulysses"`, compute with the fused kernel of the chip where JAX has a suitable one, without
      `zigzag` and `positions`; else blockwise. The kernel of TPUs needs a length that is a multiple of 128,
      and no `mask`. The kernel of NVIDIA GPUs (cuDNN) needs bfloat16 or float16; of `segment_ids` or a
      `mask`, it reads an array of queries x keys for each example.
    heads_axis: with `"ring"`, a second mesh axis, whose size must divide the number of heads. Outside the
      attention, `axis` and `heads_axis` shard the positions, with `axis` as the major axis. Inside the
      attention, `heads_axis` shards the heads, and only `axis` shards the positions: all-to-alls over
      `heads_axis` change the layout, and a ring over `axis` computes the attention.

  Returns:
    The attention function. Equal arguments return equal functions.

  Raises:
    SchemeError: an option has an invalid value; at the call, shapes or arguments are not supported.

  Source: ring attention, arXiv:2310.01889; balance, arXiv:2311.09431; all-to-all (Ulysses), arXiv:2309.14509;
  both, arXiv:2405.07719.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> attend = nxp.parallel.context_attention(causal=True)
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 8))
    >>> with jax.set_mesh(nxp.make_mesh(data=2, context=4)):
    ...   split = jax.jit(attend)(q, k, v)
    >>> bool(jnp.allclose(split, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5))
    True
  """
  return ContextAttention(axis, how, causal, window, zigzag, block, fused, heads_axis)


@dataclasses.dataclass(frozen=True)
class ContextAttention:
  """The result of `context_attention`."""

  axis: str
  how: How
  causal: bool
  window: int | None
  zigzag: bool
  block: int
  fused: bool = False
  heads_axis: str | None = None

  def __post_init__(self) -> None:
    if self.heads_axis is not None and (self.how != "ring" or self.heads_axis in (self.axis, "")):
      raise SchemeError(
        f"heads_axis={self.heads_axis!r} is not a second mesh axis beside the axis of a ring.",
        details=f"axis={self.axis!r}, how={self.how!r}",
        fix='nxp.parallel.context_attention("context", how="ring", heads_axis="heads")',
      )

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    is_causal: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike | None = None,
    bias: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    module: nnx.Module | None = None,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = True,
  ) -> jax.Array:
    """See `context_attention`."""
    del dropout_rng, broadcast_dropout
    _check_options(bias, 0.0 if deterministic else dropout_rate, module)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    shape = query.shape
    by_position = _by_position({"segment_ids": segment_ids, "positions": positions}, shape, key.shape)
    if positions is not None and self.zigzag:
      raise SchemeError(
        "zigzag=True and positions= both say how the positions are ordered.",
        fix="positions= for documents that are ordered separately; zigzag=True for one sequence.",
      )
    if query.ndim != 4:
      query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
      mask = None if mask is None else mask.reshape(-1, *mask.shape[-3:])
    around = active_mesh(query)
    mesh = around.mesh
    sizes = axis_sizes(mesh)
    self._check_axes(sizes)
    check_not_mapped("the positions", [*self.axes.values()], around.manual | around.mapped)
    sequence = _Sequence(
      dataclasses.replace(self, causal=self.causal or is_causal),
      sizes.get(self.axis, 1),
      sizes.get(self.heads_axis or "", 1),
      query.shape[1],
      precision,
      manual_too(mesh),
      _examples_over(query, mesh, {*self.axes.values(), *around.manual, *around.mapped}),
    )
    _check_lengths(sequence, query, key, value)
    if mask is not None:
      by_position["keep"] = _seen_keys(mask, key)
    if (copies := sequence.copies(query, key)) > 1:
      key, value = (jnp.repeat(x, copies, 2) for x in (key, value))
    with _active(mesh):
      result = _attention(sequence, query, key, value, by_position)
    return result.reshape(*shape[:-1], value.shape[-1])

  @property
  def axes(self) -> dict[str, str]:
    """The mesh axes that shard the positions outside the attention, major to minor, by their options."""
    return {"axis": self.axis} | ({} if self.heads_axis is None else {"heads_axis": self.heads_axis})

  def _check_axes(self, sizes: Mapping[str, int]) -> None:
    for option, name in self.axes.items():
      if sizes and name not in sizes:
        other = next((axis for axis in sizes if axis not in self.axes.values()), None)
        raise SchemeError(
          f"the mesh has no axis {name!r}, over which context_attention splits the positions.",
          details=f"mesh {sizes}",
          fix=f"nxp.make_mesh(..., {name}=2)"
          + ("." if other is None else f", or nxp.parallel.context_attention({option}={other!r})."),
        )

  def tiles(
    self, length: int, shards: int, *, segment_ids: AnyArray | None = None, positions: AnyArray | None = None
  ) -> np.ndarray:
    """The tiles of scores that each device computes at each shard that it visits, `[devices, visits]`.

    `length` and `shards` are the sizes of the sequence and of the axis; the arrays are as for a call.
    """
    sequence, at = _Sequence(self, shards, 1, length), np.arange(length)[None]
    grid = Grid.even(dict.fromkeys("qk", length), self.block, dict.fromkeys("qk", sequence.parts))
    share = Share(self.axis, shards, "q", "k", "q", "k" if self.how == "ring" else None, grid)
    if self.how == "ulysses":  # each device has all positions
      share = dataclasses.replace(share, axis=None, size=1)
    arrays = {"segment_ids": segment_ids, "positions": positions}
    batch = next((len(x) for x in arrays.values() if x is not None), 1)
    given = _by_position(arrays, *[(batch, length, 1, 1)] * 2)
    if positions is None:
      given |= dict.fromkeys(("row positions", "column positions"), sequence.position(at))
    visits = share.visits(np.asarray(sequence.needed(given, grid, "q", "k"))).sum((-1, -2)).T
    return visits if self.how == "ring" else np.repeat(visits, shards, 0)


@dataclasses.dataclass(frozen=True)
class _Sequence:
  """Attention over sequences of one length: which positions see each other, and the part of each device.

  `shards` and `rings` are the sizes of `axis` and `heads_axis`; `mapped`, axes of an enclosing `jax.vmap`;
  `examples`, the mesh axes that split the examples, as far as they are known.
  """

  options: ContextAttention
  shards: int
  rings: int
  length: int
  precision: PrecisionLike = None
  mapped: frozenset[str] = frozenset()
  examples: tuple[str, ...] = ()

  @property
  def heads(self) -> int:
    """The number of devices along `axis` and `heads_axis` that share the heads."""
    return self.rings * (self.shards if self.options.how == "ulysses" else 1)

  @property
  def parts(self) -> int:
    """The number of parts of the sequence that are cut into blocks separately."""
    zigzag = self.options.zigzag
    return self.shards * (2 if zigzag else 1) if zigzag or self.options.how == "ring" else 1

  def way(self, names: Sequence[str]) -> Way:
    """How the attention is computed, given the names of its arrays by position."""
    options = self.options
    takes = options.how == "ulysses" and not options.zigzag and "row positions" not in names
    dynamic = {"row segment_ids", "row positions", "keep"} & {*names}

    def needed(given: Mapping[int, jax.Array], grid: Grid, row: DimName, column: DimName) -> jax.Array:
      return self.needed({names[n]: x for n, x in given.items()}, grid, row, column)

    return Way(
      asked=options.how,
      block=options.block,
      kernel=kernel_in_use() if options.fused and takes and not self.mapped else None,
      axis=options.axis if self.shards > 1 else None,
      size=self.shards,
      mapped=self.mapped,
      row=4,
      parts=self.parts,
      examples=self.examples if dynamic and not self.mapped else (),
      needed=needed if dynamic else None,
      zeros=True,
    )

  def position(self, index: Any) -> Any:
    """The position in the sequence of the element at an index, in zigzag order if that is asked."""
    if not self.options.zigzag:
      return index
    half, divided = self.length // (2 * self.shards), operator.floordiv
    if isinstance(index, jax.Array):  # of no sign, so that intervals of positions stay exact
      divided = jax.lax.div
      index = index.astype(jnp.int32)
    part = divided(index, half)
    device = divided(part, 2)
    is_late = part - 2 * device
    return index + (device + is_late * (2 * self.shards - 1 - 2 * device) - part) * half

  def near(self, least: Any, most: Any) -> Any:
    """Whether a query may see a key that is between `least` and `most` positions before it."""
    seen, window = most >= 0 if self.options.causal else True, self.options.window
    return seen if window is None else seen & (least < window) & (most > -window)

  def needed(self, given: Mapping[str, AnyArray], grid: Grid, row: DimName, column: DimName) -> jax.Array:
    """Which tiles have a query that sees a key in any example, `[blocks of queries, blocks of keys]`.

    `given` are segments, positions and mask of the queries `row` and keys `column` of a grid.
    """

    def bounds(name: str) -> list[jax.Array]:
      dim, x = row if name.startswith("row") else column, given[name]
      parts, size = grid.parts.get(dim, 1), grid.blocks[dim]
      split = jnp.reshape(x, (len(x), parts, -1))
      last = jnp.repeat(split[..., -1:], -split.shape[-1] % size, -1)
      blocks = jnp.concatenate([split, last], -1).reshape(len(x), grid.count(dim), size)
      found = blocks.min(-1), blocks.max(-1)
      return [x[:, :, None] if dim == row else x[:, None] for x in found]

    seen = jnp.ones((1, grid.count(row), grid.count(column)), bool)
    if "row segment_ids" in given:
      (first, last), (low, high) = bounds("row segment_ids"), bounds("column segment_ids")
      seen &= (first <= high) & (low <= last)
    if "row positions" in given:
      (first, last), (low, high) = bounds("row positions"), bounds("column positions")
      seen &= self.near(first - high, last - low)
    if "keep" in given:
      seen &= bounds("keep")[1]
    return seen.any(0)

  def copies(self, query: jax.Array, key: jax.Array) -> int:
    """How often keys and values are repeated, so that their heads can be split."""
    kv_heads, n, axis = key.shape[2], self.heads, self.options.heads_axis or self.options.axis
    copies = n // math.gcd(n, kv_heads)
    if query.shape[2] // kv_heads % copies:
      raise SchemeError(
        f"{n} devices cannot share {query.shape[2]} heads evenly.",
        details=f"{query.shape[2]} heads of queries, {kv_heads} of keys; {axis}={n}",
        fix=f'how="ring" without heads_axis=, or a number of heads that is a multiple of {n}.',
      )
    return copies

  def scores(self, scores: jax.Array, given: Mapping[str, jax.Array]) -> jax.Array:
    """Scores `[batch, key heads, devices, group, queries, keys]`, `-inf` for unseen keys."""
    seen: list[jax.Array] = []
    if self.options.causal or self.options.window is not None:
      if "row positions" in given:
        row, column = given["row positions"][:, :, None], given["column positions"][:, None]
      else:
        at = self.position(jnp.arange(self.length))
        row, column = at[None, :, None], at[None, None]
      seen.append(self.near(row - column, row - column))
    if "row segment_ids" in given:
      seen.append(given["row segment_ids"][:, :, None] == given["column segment_ids"][:, None])
    if "keep" in given:
      seen.append(given["keep"][:, None])
    for own in seen:
      scores = jnp.where(own[:, None, None, None], scores, -jnp.inf)
    return scores


@functools.partial(jax.jit, static_argnums=0)
def _attention(
  sequence: _Sequence, q: jax.Array, k: jax.Array, v: jax.Array, by_position: Mapping[str, jax.Array]
) -> jax.Array:
  """Attention of global arrays `[batch, length, heads, head_dim]`, on Auto axes."""
  run = functools.partial(_on_auto_axes, sequence, [*by_position])
  explicit = jax.sharding.get_abstract_mesh().explicit_axes
  if explicit:
    layout = jax.typeof(q).sharding.spec
    on_auto: Any = jax.sharding.auto_axes
    run = on_auto(run, axes=explicit, out_sharding=layout)
  return run(q, k, v, *by_position.values())


def _on_auto_axes(
  sequence: _Sequence, names: Sequence[str], q: jax.Array, k: jax.Array, v: jax.Array, *more: jax.Array
) -> jax.Array:
  (batch, rows, heads, _), kv_heads, n = q.shape, k.shape[2], sequence.heads
  # XLA turns the change of layout into an all-to-all. For `jax.lax.all_to_all` in a region that is manual
  # over one axis only, it would gather the dims that other axes split.
  given = [
    q.reshape(batch, rows, kv_heads // n, n, heads // kv_heads, q.shape[-1]),
    *(x.reshape(*x.shape[:2], kv_heads // n, n, x.shape[-1]) for x in (k, v)),
    *more,
  ]
  # Without the first of these constraints, XLA may gather arrays whose layout is not constrained.
  for m, x in enumerate(given):
    dims = 1, 3 if x.ndim > 2 else None
    given[m] = _by_rings(_by_rings(x, sequence, *dims, inverse=True), sequence, *dims)

  def scores(s: jax.Array, *more: jax.Array) -> jax.Array:
    return sequence.scores(s, dict(zip(names, more, strict=True)))

  way = sequence.way(["query", "key", "value", *names])
  q, k, v = given[:3]
  result = attend(q, k, v, scores, way, *given[3:], precision=sequence.precision).astype(q.dtype)
  # Without the first constraint, XLA would reshard each partial result instead of the final result.
  result = _by_rings(_by_rings(result, sequence, 4, 2), sequence, 4, 2, inverse=True)
  return result.transpose(0, 4, 1, 2, 3, 5).reshape(batch, rows, heads, v.shape[-1])


def _by_rings(
  x: jax.Array, sequence: _Sequence, rows: int, heads: int | None, *, inverse: bool = False
) -> jax.Array:
  """Moves `heads_axis` from the dim of the positions to the dim of the heads, or back if `inverse`."""
  axis, second = sequence.options.axis, sequence.options.heads_axis
  if second is None or sequence.rings == 1:
    return x
  layout: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
  layout[rows] = (axis, second) if inverse else axis
  if heads is not None:
    layout[heads] = None if inverse else second
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*layout))


def _examples_over(query: jax.Array, mesh: AnyMesh | None, others: Collection[str]) -> tuple[str, ...]:
  """The axes that split the examples, by the type of the queries or the plan in scope; `()` if unknown."""
  if mesh is None:
    return ()
  scope, sizes = scope_in_use(), axis_sizes(mesh)
  found = () if scope is None else batch_axes(scope.ruleset, sizes) or ()
  if AxisType.Explicit in mesh.axis_types:
    found = axes_by_dim(jax.typeof(query).sharding.spec, query.ndim)[0]
  axes = tuple(axis for axis in found if axis not in others and sizes[axis] > 1)
  return axes if query.shape[0] % count_shards(axes, sizes) == 0 else ()


def _active(mesh: AnyMesh | None) -> contextlib.AbstractContextManager[object]:
  """A context in which a mesh is active."""
  if mesh is None or not jax.sharding.get_abstract_mesh().empty:
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _seen_keys(mask: jax.Array, key: jax.Array) -> jax.Array:
  """A mask of keys `[batch, length]`."""
  batch, length = key.shape[:2]
  if mask.ndim != 4 or mask.shape[1:] != (1, 1, length) or mask.shape[0] not in (1, batch):
    raise SchemeError(
      "context_attention takes no mask of queries and keys, whose size is the square of the length.",
      details=f"mask {tuple(mask.shape)}; keys {tuple(key.shape)}",
      fix="nxp.parallel.context_attention(causal=True, window=...) and segment_ids= say the same; a mask of"
      f" keys is ({batch}, 1, 1, {length}).",
    )
  return jnp.broadcast_to(mask[:, 0, 0].astype(bool), (batch, length))


def _by_position(
  given: Mapping[str, AnyArray | None], query: Sequence[int], key: Sequence[int]
) -> dict[str, AnyArray]:
  """Integers `[batch, length]` of the queries and of the keys, by name; `given` may have None."""
  found: dict[str, AnyArray] = {}
  for name, x in given.items():
    if x is None:
      continue
    shape = tuple(query[:-2])
    if x.shape != shape or query[-3] != key[-3] or not jnp.issubdtype(x.dtype, jnp.integer):
      raise SchemeError(
        f"{name} are {x.dtype} of shape {tuple(x.shape)}, not one integer for each position.",
        details=f"query {tuple(query)}, key {tuple(key)}",
        fix=f"integers of shape {shape}, for queries and keys of the same length.",
      )
    # A difference of small or unsigned integers would wrap around.
    x = x.astype(jax.dtypes.canonicalize_dtype(jnp.promote_types(x.dtype, jnp.int32))).reshape(-1, shape[-1])
    found |= dict.fromkeys((f"row {name}", f"column {name}"), x)
  return found


def _check_options(bias: jax.Array | None, dropout: float, module: nnx.Module | None) -> None:
  given = {
    "a bias": bias is not None,
    f"dropout_rate={dropout}": dropout > 0,
    "sow_weights": module is not None,
  }
  for name, wanted in given.items():
    if wanted:
      raise SchemeError(
        f"context_attention cannot use {name}: the full attention weights never exist.",
        fix="attention without it; dropout of the layer's result does not need the weights.",
      )


def _check_lengths(sequence: _Sequence, query: jax.Array, key: jax.Array, value: jax.Array) -> None:
  n, options = sequence.shards * sequence.rings, sequence.options
  axes = " and ".join(options.axes.values())
  needed = math.lcm(n, 2 * sequence.shards if options.zigzag else 1)
  details = f"query {query.shape}, key {key.shape}, value {value.shape}"
  check_shapes(query, key, value)
  for x in (query, key):
    if x.shape[1] % needed:
      raise SchemeError(
        f"{x.shape[1]} positions cannot be split evenly over {n} devices along {axes}.",
        details=details
        + (f", in zigzag order: two parts for each shard of {options.axis}" if options.zigzag else ""),
        fix=f"pad them to {-(-x.shape[1] // needed) * needed}.",
      )
  if query.shape[1] != key.shape[1] and (options.causal or options.window is not None):
    raise SchemeError(
      "a causal or windowed query must have its key at the same position.",
      details=details,
      fix="causal=False and window=None for attention to another sequence.",
    )
