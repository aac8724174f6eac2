"""A head, its cross-entropy and an embedding whose vocabulary is sharded over devices.

For each token, the devices exchange three numbers: the maximum of their logits, the sum of the exponentials,
and the logit of the label.

All axes of the mesh are manual here: each device first sums its tokens' gradients of the head locally, and
the devices then sum once. The compiler would sum over the devices for each part of the tokens.

Source: Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import Entry, count_shards, entry_of
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.shards import laid_out, on_shards
from nnx_parallel.core.types import AnyArray, Variable
from nnx_parallel.errors import SchemeError
from nnx_parallel.layout.constrain import active_mesh
from nnx_parallel.schemes.tokens import array_of, check_not_mapped, token_axes

_LOWEST = -1e30
"""The logit of a column that does not exist: finite, since a device may have only such columns."""


@check_arguments(SchemeError, ignore_index=range(-(2**31), 2**31))
def vocabulary_cross_entropy(
  hidden: jax.Array,
  head: jax.Array | Variable,
  labels: jax.Array | np.ndarray,
  *,
  axis: str | Sequence[str] = "tensor",
  parts: int = 1,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
  softcap: float | None = None,
  ignore_index: int | None = None,
  vocab_size: int | None = None,
) -> jax.Array:
  """Computes the cross-entropy of each token with a sharded head. No device holds all logits.

  It equals `optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels)`, values and gradients. A
  device holds the logits of `1/parts` of its tokens for its share of the vocabulary, and the backward pass
  recomputes them. A device sends three numbers per token in the forward pass, and the gradient of `hidden` in
  the backward pass. The gradient of `head` is summed once over the devices that share the batch.

  The mesh is the active mesh, the mesh of `use_rules`, or the mesh of the plan that created `head`. Without a
  mesh, or on a mesh without `axis`, each device has all columns of `head`, and still computes the tokens in
  parts.

  For a third-party model, use `train_step(loss_fn, loss_chunks=8)`.

  Args:
    hidden: the input of the head, of global shape (batch, seq, features), or with other token dims.
    head: the weights of the head, of global shape (features, vocabulary): an array, or a Variable such as
      `model.head.kernel`; the transposed table of an embedding for tied weights. A bias is not added.
    labels: the column of each token's target: integers of the shape of `hidden` without its features.
    axis: the mesh axis, or several axes, over which the vocabulary is sharded. The axis size need not divide
      the vocabulary.
    parts: the number of parts in which a device computes its tokens, one after another. Each part reads and
      writes the gradient of the head, so a part should have at least as many tokens as the head has features.
    label_smoothing: the fraction of the target that is spread over all columns, from 0 to 1.
    z_loss: the factor of `logsumexp(logits) ** 2`, which is added to the loss of each token.
    softcap: if given, logits become `softcap * tanh(logits / softcap)`.
    ignore_index: the label of tokens that have the loss 0 and no gradient.
    vocab_size: the number of leading columns that are real; the other columns are padding. None: all columns
      are real.

  Returns:
    The float32 loss of each token, of the shape of `labels`; NaN for a label that is not a column.

  Raises:
    SchemeError: shapes do not fit, `parts` is less than 1, or `axis` is already Manual.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> hidden, head = jnp.ones((4, 6, 16)), jnp.ones((16, 50))
    >>> labels = jnp.zeros((4, 6), int)
    >>> with nxp.use_rules(nxp.LogicalRules(batch="data"), nxp.make_mesh(data=2, tensor=4)):
    ...   losses = nxp.parallel.vocabulary_cross_entropy(hidden, head, labels, parts=2)
    >>> losses.shape, round(float(losses.mean()), 4)   # log(50)
    ((4, 6), 3.912)

  Source: Shoeybi et al. 2019 (arXiv:1909.08053); z-loss: Chowdhery et al. 2022 (arXiv:2204.02311).
  """
  x, w, y = map(array_of, (hidden, head, labels))
  if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[0] or y.shape != x.shape[:-1]:
    raise SchemeError(
      "the shapes of hidden states, head and labels do not fit.",
      details=f"hidden {x.shape}, head {w.shape}, labels {y.shape}",
      fix="hidden (batch, seq, features), head (features, vocabulary), labels (batch, seq);\n"
      "the table of an embedding is transposed: table.T",
    )
  count = w.shape[1] if vocab_size is None else vocab_size
  if not 0 < parts <= math.prod(hidden.shape[:-1]) or not 0 < count <= w.shape[1]:
    raise SchemeError(
      f"parts={parts} and vocab_size={vocab_size} do not fit a head of {w.shape[1]} columns.",
      fix=f"parts from 1 to the number of tokens; vocab_size from 1 to {w.shape[1]}.",
    )
  split = _Split.of(hidden, head, axis=axis, tokens=y.shape)
  kind = _Kind(parts, count, label_smoothing, z_loss, softcap)
  exists = (y >= 0) & (y < count)
  counted = exists if ignore_index is None else exists & (y != ignore_index)
  losses = _losses(kind, split, x, split.padded(w, 1), jnp.where(counted, y, 0))
  losses = jnp.where(counted, losses, jnp.nan)
  return losses if ignore_index is None else jnp.where(y == ignore_index, 0, losses)


@check_arguments(SchemeError)
def vocabulary_embedding(
  table: jax.Array | Variable, ids: jax.Array | np.ndarray, *, axis: str | Sequence[str] = "tensor"
) -> jax.Array:
  """Looks up rows of a table whose rows are sharded over devices. The table is not moved.

  Each device looks up its own rows and uses zeros for the other rows; the result is the sum over the devices.
  Each device computes the gradient of its own rows of the table, and the devices that share the batch sum
  this gradient once.

  The mesh is found as in `vocabulary_cross_entropy`.

  Args:
    table: the embedding table, of global shape (vocabulary, features): an array, or a Variable such as
      `model.embed.embedding`.
    ids: integers of any shape, for example (batch, seq); dim 0 is the batch.
    axis: as in `vocabulary_cross_entropy`.

  Returns:
    The rows, of the global shape of `ids` plus (features,); NaN for an id that is not a row.

  Raises:
    SchemeError: the table does not have two dims, or `axis` is already Manual.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> table = jnp.arange(10.0).reshape(5, 2)
    >>> with nxp.use_rules(nxp.LogicalRules(batch="data"), nxp.make_mesh(data=2, tensor=4)):
    ...   nxp.parallel.vocabulary_embedding(table, jnp.array([4, 0])).tolist()
    [[8.0, 9.0], [0.0, 1.0]]

  Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
  """
  rows, y = array_of(table), array_of(ids)
  if rows.ndim != 2:
    raise SchemeError(
      f"a table of shape {rows.shape} has no rows to look up.", fix="a table (vocabulary, features)."
    )
  if not jnp.issubdtype(y.dtype, jnp.integer):
    raise SchemeError(f"ids of {y.dtype} are no numbers of rows.", fix="ids.astype(jnp.int32)")
  split = _Split.of(ids, table, axis=axis, tokens=y.shape)
  exists = (y >= 0) & (y < rows.shape[0])
  found = _rows(split, split.padded(rows, 0), jnp.where(exists, y, 0))
  return jnp.where(exists[..., None], found, jnp.asarray(jnp.nan, found.dtype))


@dataclasses.dataclass(frozen=True)
class _Kind:
  """The static choices of a cross-entropy."""

  parts: int
  count: int
  smoothing: float
  z_loss: float
  softcap: float | None


@dataclasses.dataclass(frozen=True)
class _Split:
  """Which mesh axes split the vocabulary, and which the dims of the tokens."""

  mesh: AnyMesh | None
  axes: tuple[str, ...]
  tokens: tuple[tuple[str, ...], ...]

  @classmethod
  def of(cls, *arrays: AnyArray, axis: str | Sequence[str], tokens: Sequence[int]) -> _Split:
    around = active_mesh(*arrays)
    taken, wanted = around.manual | around.mapped, (axis,) if isinstance(axis, str) else tuple(axis)
    check_not_mapped("the vocabulary", wanted, taken)
    if around.mesh is None:
      return cls(None, (), ((),) * len(tokens))
    sizes = axis_sizes(around.mesh)
    axes = tuple(name for name in wanted if sizes.get(name, 1) > 1)
    free = {name for name, size in sizes.items() if size > 1 and name not in taken and name not in axes}
    found: list[tuple[str, ...]] = []
    for length, names in zip(tokens, token_axes(around.rules, sizes, free, len(tokens)), strict=True):
      while length % count_shards(names, sizes):
        names = names[:-1]
      found.append(names)
    return cls(around.mesh, axes, tuple(found))

  @property
  def ways(self) -> int:
    return count_shards(self.axes, axis_sizes(self.mesh))

  def padded(self, x: jax.Array, dim: int) -> jax.Array:
    """`x` with zeros behind its vocabulary, so that the devices have equal shares."""
    extra = -x.shape[dim] % self.ways
    return jnp.pad(x, [(0, extra if d == dim else 0) for d in range(x.ndim)]) if extra else x

  @property
  def token_axes(self) -> tuple[str, ...]:
    """The axes that split the tokens."""
    return tuple(name for dim in self.tokens for name in dim)

  def spec(self, *more: Entry) -> PartitionSpec:
    """That of an array with the dims of the tokens, and more."""
    return PartitionSpec(*map(entry_of, self.tokens), *more)

  def table(self, dim: int, features: tuple[str, ...] = ()) -> PartitionSpec:
    """That of an array of the vocabulary, on `dim`, and the features."""
    entries = [entry_of(features)]
    entries.insert(dim, entry_of(self.axes))
    return PartitionSpec(*entries)

  def scattered(self, features: int) -> tuple[str, ...]:
    """The axes that split the features of a table's gradient after its sum: the axes of the tokens.

    The minor axis of the tokens becomes the major axis: if it also splits the table's features, with fsdp,
    only the other axes are gathered, and nothing else moves.
    """
    axes, sizes = self.token_axes[::-1], axis_sizes(self.mesh)
    return axes if features % count_shards(axes, sizes) == 0 else ()

  def summed(self, x: jax.Array, dim: int) -> jax.Array:
    """The sum of all devices' contributions to the gradient of a table; `dim` is the dim of the features."""
    if scattered := self.scattered(x.shape[dim]):
      return jax.lax.psum_scatter(x, scattered, scatter_dimension=dim, tiled=True)
    return jax.lax.psum(x, self.token_axes) if self.token_axes else x

  def start(self, length: int) -> jax.Array | int:
    """The number of a device's first column or row."""
    return jax.lax.axis_index(self.axes) * length if self.axes else jnp.int32(0)

  def like(self, gradient: jax.Array, x: jax.Array) -> jax.Array:
    """A gradient in the dtype of its array, and on an Explicit mesh in its layout."""
    return laid_out(gradient.astype(x.dtype), self.mesh, jax.typeof(x).sharding.spec)


def _in_parts(x: jax.Array, parts: int) -> jax.Array:
  """Tokens as (parts, tokens of a part, ...), with zeros at the end."""
  extra = -x.shape[0] % parts
  padded = jnp.pad(x, [(0, extra), *[(0, 0)] * (x.ndim - 1)])
  return padded.reshape(parts, -1, *x.shape[1:])


def _logits(
  kind: _Kind, split: _Split, x: jax.Array, w: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The logits of a part of the tokens, which of them exist, and which of them belongs to the label."""
  logits = jax.lax.dot(x, w.astype(x.dtype), preferred_element_type=jnp.float32)
  if kind.softcap is not None:
    logits = kind.softcap * jnp.tanh(logits / kind.softcap)
  columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) + split.start(w.shape[1])
  return logits, columns < kind.count, columns == labels[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses(kind: _Kind, split: _Split, x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
  return _forward(kind, split, x, w, labels)[0]


def _forward(
  kind: _Kind, split: _Split, x: jax.Array, w: jax.Array, labels: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """The losses, and what the backward pass needs."""

  def local(x: jax.Array, w: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    def part(_: None, given: tuple[jax.Array, ...]) -> tuple[None, list[jax.Array]]:
      x, y = given
      logits, exists, is_label = _logits(kind, split, x, w, y)
      top = jnp.where(exists, logits, _LOWEST).max(-1)
      exponentials = jnp.where(exists, jnp.exp(logits - top[:, None]), 0)
      wanted = [exponentials, jnp.where(is_label, logits, 0)]
      wanted += [jnp.where(exists, logits, 0)] * (kind.smoothing > 0)
      return None, [top, *(value.sum(-1) for value in wanted)]

    flat = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    _, found = jax.lax.scan(part, None, tuple(_in_parts(value, kind.parts) for value in flat))
    own, exponentials, *sums = (value.reshape(-1)[: labels.size] for value in found)
    top = jax.lax.pmax(own, split.axes) if split.axes else own
    sums = jnp.stack([exponentials * jnp.exp(own - top), *sums])
    exponential, label, *logits = jax.lax.psum(sums, split.axes) if split.axes else sums
    lse = jnp.log(exponential) + top
    loss = lse - (1 - kind.smoothing) * label + kind.z_loss * lse**2
    if logits:
      loss -= kind.smoothing / kind.count * logits[0]
    return loss.reshape(labels.shape), lse.reshape(labels.shape)

  specs = [split.spec(None), split.table(1), split.spec()]
  losses, lse = on_shards(local, split.mesh, specs, (split.spec(), split.spec()))(x, w, labels)
  return losses, (x, w, labels, lse)


def _backward(
  kind: _Kind, split: _Split, kept: tuple[jax.Array, ...], arriving: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  x, w, labels, lse = kept

  def local(x: jax.Array, w: jax.Array, *tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    def part(total: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
      x, y, lse, g = given
      logits, exists, is_label = _logits(kind, split, x, w, y)
      lse, g = lse[:, None], g[:, None]
      by_logit = (1 + 2 * kind.z_loss * lse) * jnp.exp(logits - lse) - kind.smoothing / kind.count
      by_logit = g * (by_logit - (1 - kind.smoothing) * is_label.astype(jnp.float32))
      if kind.softcap is not None:
        by_logit *= 1 - (logits / kind.softcap) ** 2
      by_logit = jnp.where(exists, by_logit, 0).astype(x.dtype)
      product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
      by_x = product(by_logit, w.astype(x.dtype), (((1,), (1,)), ((), ())))
      return total + product(x, by_logit, (((0,), (0,)), ((), ()))), by_x.astype(x.dtype)

    flat = [x.reshape(-1, x.shape[-1]), *(value.reshape(-1) for value in tokens)]
    given = tuple(_in_parts(value, kind.parts) for value in flat)
    by_w, by_x = jax.lax.scan(part, jnp.zeros(w.shape, jnp.float32), given)
    by_x = by_x.reshape(-1, x.shape[-1])[: len(flat[0])].reshape(x.shape)
    return jax.lax.psum(by_x, split.axes) if split.axes else by_x, split.summed(by_w, 0)

  specs = [split.spec(None), split.table(1), *[split.spec()] * 3]
  results = split.spec(None), split.table(1, split.scattered(w.shape[0]))
  by_x, by_w = on_shards(local, split.mesh, specs, results)(x, w, labels, lse, arriving)
  return split.like(by_x, x), split.like(by_w, w), None


_losses.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(split: _Split, table: jax.Array, ids: jax.Array) -> jax.Array:
  def local(table: jax.Array, ids: jax.Array) -> jax.Array:
    places = ids - split.start(table.shape[0])
    own = (places >= 0) & (places < table.shape[0])
    found = jnp.where(own[..., None], table[jnp.where(own, places, 0)], 0)
    return jax.lax.psum(found, split.axes) if split.axes else found

  return on_shards(local, split.mesh, [split.table(0), split.spec()], split.spec(None))(table, ids)


def _by_rows(split: _Split, kept: tuple[jax.Array, jax.Array], arriving: jax.Array) -> tuple[jax.Array, None]:
  table, ids = kept
  length = table.shape[0] // split.ways

  def local(ids: jax.Array, g: jax.Array) -> jax.Array:
    places = ids - split.start(length)
    beyond = jnp.where((places >= 0) & (places < length), places, length)
    total = jnp.zeros((length, g.shape[-1]), jnp.float32)
    return split.summed(total.at[beyond].add(g.astype(jnp.float32), mode="drop"), 1)

  specs, result = [split.spec(), split.spec(None)], split.table(0, split.scattered(table.shape[1]))
  return split.like(on_shards(local, split.mesh, specs, result)(ids, arriving), table), None


_rows.defvjp(lambda split, table, ids: (_rows(split, table, ids), (table, ids)), _by_rows)
