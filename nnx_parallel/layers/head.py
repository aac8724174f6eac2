"""Chunked cross-entropy: computes a model's head and its loss in chunks of columns, without an edit.

The head is the last product in the trace of a loss whose result goes through a softmax. Its columns, the
logits, may be summed, compared or looked up row by row: such statistics are computed one chunk of columns at
a time (`row_statistics`), so that the full logits never exist. An example: in `x - x.max(-1)`, the maximum is
a statistic, kept beside x as a number per row, so that `exp(...).sum(-1)` and the pick of a target belong to
the same pass over the weights. A value that mixes statistics and columns otherwise takes a second pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from nnx_parallel.attention.find import opens_attention
from nnx_parallel.attention.softmaxes import Softmaxes, named_dims
from nnx_parallel.attention.tiling import Grid, Labels, Tiles, Untiled, describe, finite, push
from nnx_parallel.core.interpret import DEFAULT, inline_calls, read, run_operations, values_of
from nnx_parallel.core.jaxprs import (
  among,
  bind,
  dependents,
  has_reverse_rule,
  has_rule,
  is_inexact,
  maker,
  makers,
  open_jaxpr,
  operations_behind,
  program_of,
  trace_like,
  without_unused,
)
from nnx_parallel.core.types import ClosedJaxpr, Jaxpr, JaxprEqn, Program, Value, Var
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.picks import is_pick, is_row_pick, place_in_row, with_nan_outside
from nnx_parallel.layers.row_statistics import (
  COLUMNS,
  EXPONENTIALS,
  LARGEST,
  LEAST,
  SUM,
  Head,
  Kind,
  Pass,
  Statistic,
  best,
  picked,
)
from nnx_parallel.layout.batch import batch_axes
from nnx_parallel.layout.constrain import scope_in_use
from nnx_parallel.rules.logical import LogicalRules
from nnx_parallel.rules.ruleset import RuleSet

_OPENED = ("_xlogx", "xlogy")
"""Functions of `jax.scipy.special.entr`, whose rules give the gradients of their operations."""


def check_chunks(chunks: int | None) -> None:
  """Raises a `TrainError` for an option that is not a positive number."""
  if chunks is not None and (type(chunks) is not int or chunks < 1):
    raise TrainError(
      f"loss_chunks={chunks!r} is not a positive number.", fix="loss_chunks=8; None: not chunked."
    )


def in_chunks(jaxpr: Program, chunks: int) -> tuple[ClosedJaxpr, str]:
  """The closed trace of a loss with its head in chunks, and a line that says so; or a `TrainError`."""
  flat: ClosedJaxpr = inline_calls(jaxpr, _opens_head)
  product, others = _head(flat.jaxpr, chunks)
  try:
    columns = _columns(flat, product, chunks)
    body = trace_like(columns.results, flat)
  except Untiled as problem:
    raise TrainError(
      f"loss_chunks={chunks} cannot be honoured: {problem} needs all columns of the logits at once.",
      details=f"logits {product.outvars[0].aval.str_short()}; their columns may go through elementwise"
      " operations, sums, maxima, minima, argmax, top_k, take_along_axis, and logits[arange, labels]",
      fix="jnp.where(jnp.arange(columns) < size, logits, -jnp.inf), which hides columns of padding; or leave"
      " loss_chunks out."
      if problem.eqn.primitive.name == "slice"
      else "take such values of the logits out of the loss; or leave loss_chunks out.",
    ) from None
  count, whole, shards = columns.grid.count(COLUMNS), columns.grid.lengths[COLUMNS], columns.shards
  line = f"the head and the loss of each token in {count} chunks of the {whole * shards} columns"
  if count < chunks:
    why = f"{shards} devices share the columns, {whole} each" if shards > 1 else "chunks are of equal length"
    line += f" (of {chunks} requested: {why})"
  if others:
    whole_heads = ", ".join(map(describe, others))
    line += f"; the last of {1 + len(others)} heads only, as written: {whole_heads}"
  return without_unused(body), line


def _opens_head(eqn: JaxprEqn) -> bool:
  if opens_attention(eqn) or not has_rule(eqn) or has_reverse_rule(eqn):
    return opens_attention(eqn)
  return str(open_jaxpr(program_of(eqn)).debug_info.func_name) in _OPENED


def _shards(length: int) -> tuple[int, int]:
  """How many devices may share the columns, and how many of these do not share the batch.

  A chunk has its share of the columns of each device. Devices that share just the columns sum the gradient of
  the head's input: each of them has its own until the last chunk.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return 1, 1
  shards = math.gcd(length, mesh.size)
  if AxisType.Explicit in mesh.axis_types:
    return shards, 1
  scope = scope_in_use()
  split = batch_axes(RuleSet(scope.rules if scope else LogicalRules()), dict(mesh.shape)) or ()
  apart = mesh.size // math.prod(mesh.shape[axis] for axis in split)
  return shards, 1 if shards % apart else apart


def _head(body: Jaxpr, chunks: int) -> tuple[JaxprEqn, list[JaxprEqn]]:
  """The last product that makes logits, and the earlier such products."""
  softmaxes = Softmaxes(body)
  found: dict[int, JaxprEqn] = {}
  for eqn in body.eqns:
    if eqn.primitive.name == "exp" and not softmaxes.products(eqn, *named_dims(eqn.outvars[0].aval.shape)):
      product = next(softmaxes.products_before(eqn), None)
      if product is not None:
        found[id(product)] = product
  # A router makes logits too, and the later operations depend on them.
  outs = {product.outvars[0] for product in found.values()}
  heads = [p for p in found.values() if not outs & (dependents(body, {p.outvars[0]}) - {p.outvars[0]})]
  heads = [eqn for eqn in body.eqns if any(eqn is head for head in heads)]
  if heads:
    return heads[-1], heads[:-1]
  count = sum(eqn.primitive.name == "dot_general" for eqn in body.eqns)
  raise TrainError(
    f"loss_chunks={chunks} finds no head in the loss.",
    details="a head is a product whose columns all go through a softmax, and that no product with values"
    f" follows; the loss has {count} products outside of its layers, scans and checkpoints, and no head",
    fix="logits = x @ weights and a cross-entropy of them in the loss function; or leave loss_chunks out.",
  )


def _columns(flat: ClosedJaxpr, product: JaxprEqn, chunks: int) -> _Columns:
  """The columns of a product's result: along the dim that the softmax sums over."""
  problem: Untiled | None = None
  for dim, size in reversed([*enumerate(product.outvars[0].aval.shape)]):
    if size > 1:
      columns = _Columns(flat, product, dim, chunks)
      if columns.has_softmax and columns.problem is None:
        return columns
      problem = problem or columns.problem
      if columns.has_softmax:
        break
  raise problem or Untiled(product)


class _Reading(NamedTuple):
  """A statistic that an operation reads, of a value to which it adds numbers of each row: `(sign, number)`."""

  statistic: Statistic
  shifts: tuple[tuple[int, Var], ...]
  level: int  # the number of passes until it is known


class _Columns:
  """What a loss does with the columns of its logits along a dim: which operations read which statistics."""

  def __init__(self, flat: ClosedJaxpr, product: JaxprEqn, dim: int, chunks: int):
    self._flat, self._made, logits = flat, makers(flat), product.outvars[0]
    self._product, self._size = product, logits.aval.size
    self.shards, groups = _shards(logits.aval.shape[dim])
    whole = logits.aval.shape[dim] // self.shards
    self.grid = Grid({COLUMNS: whole}, {COLUMNS: -(-whole // min(chunks, whole))})
    self._labels: dict[Var, Labels] = {logits: ((COLUMNS, dim, self.shards),)}  # of the values with columns
    self._head = Head(product, self._labels[logits], self.grid, groups)
    # The values that are another value plus numbers of each row, of which some need a statistic.
    self._shifted: dict[Var, tuple[Var, tuple[tuple[int, Var], ...]]] = {}
    self._levels: dict[Var, int] = {}  # the passes that a value needs
    self._readings: dict[int, _Reading] = {}  # by the id of an operation
    self.problem: Untiled | None = None  # the first operation that needs all columns at once
    # The values whose gradients the loss needs, if it is differentiated.
    passing = [eqn for eqn in flat.jaxpr.eqns if eqn.primitive.name != "stop_gradient"]
    self._derived = {out for eqn in operations_behind(passing, flat.jaxpr.outvars) for out in eqn.outvars}
    exponentials: set[Var] = set()
    self.has_softmax = False  # whether it sums exponentials over the columns
    for eqn in flat.jaxpr.eqns:
      level = max(map(self._level, eqn.invars), default=0)
      if any(among(var, self._labels) for var in eqn.invars):
        try:
          reading = self._follow(eqn)
        except Untiled as problem:
          self.problem = self.problem or problem
          continue
        if reading is not None:
          self._readings[id(eqn)] = reading
          level = max([reading.level, *(self._level(var) for _, var in reading.shifts)])
          self.has_softmax |= (
            eqn.primitive.name == "reduce_sum"
            and among(eqn.invars[0], exponentials)
            # Most tokens: the last token has no target.
            and self._size // 2 <= eqn.invars[0].aval.size <= self._size
          )
        if eqn.primitive.name == "exp" or any(among(var, exponentials) for var in eqn.invars):
          exponentials.update(eqn.outvars)
      self._levels.update(dict.fromkeys(eqn.outvars, level))

  def _level(self, var: Var) -> int:
    return self._levels[var] if among(var, self._levels) else 0

  def _read(
    self, eqn: JaxprEqn, kind: Kind, var: Var, *others: Var, shifts: tuple[tuple[int, Var], ...] = ()
  ) -> _Reading:
    nodes = (var, self._labels[var]), *((other, ()) for other in others)
    derived = any(out in self._derived and is_inexact(out.aval) for out in eqn.outvars)
    return _Reading(Statistic(kind, nodes, derived), shifts, 1 + max(map(self._level, (var, *others))))

  def _follow(self, eqn: JaxprEqn) -> _Reading | None:
    """The statistic that an operation reads; None if its result has columns. `Untiled` if it needs them all."""
    name, var = eqn.primitive.name, eqn.invars[0]
    sides = [n for n, x in enumerate(eqn.invars) if among(x, self._labels)]
    ndim, dim = len(var.aval.shape), self._labels[eqn.invars[sides[0]]][0][1]
    if name in ("argmax", "top_k"):
      count = eqn.params.get("k", 1)
      along = tuple(eqn.params["axes"]) if name == "argmax" else (eqn.params.get("axis", ndim - 1),)
      if along != (dim,) or count > self.grid.blocks[COLUMNS] * self.shards:
        raise Untiled(eqn)
      return self._read(eqn, best(count), var)
    base, shifts = self._shifted.get(var, (var, ())) if 0 in sides else (var, ())
    if name == "gather" and sides == [0] and dim == ndim - 1:
      if is_pick(eqn) or is_row_pick(eqn, self._flat):
        return self._read(eqn, picked(functools.partial(_place, eqn)), base, eqn.invars[1], shifts=shifts)
    labels = {push(eqn, n, self._labels[eqn.invars[n]], self.grid.lengths) for n in sides}
    if len(labels) > 1:
      raise Untiled(eqn)
    if own := labels.pop():
      self._labels.update(dict.fromkeys(eqn.outvars, own))
      self._shift(eqn, dim)
      return None
    if name == "reduce_sum":
      made = maker(var, self._made)
      if made is not None and made.primitive.name == "exp" and among(made.invars[0], self._shifted):
        base, shifts = self._shifted[made.invars[0]]
        return self._read(eqn, EXPONENTIALS, base, shifts=shifts)
      return self._read(eqn, SUM, base, shifts=shifts)
    if name in ("reduce_max", "reduce_min") and is_inexact(var.aval):
      return self._read(eqn, LARGEST if name == "reduce_max" else LEAST, var)
    raise Untiled(eqn)

  def _shift(self, eqn: JaxprEqn, dim: int) -> None:
    """Keeps a result as its first operand and a shift, so that its statistics need no pass of their own."""
    name, var, out = eqn.primitive.name, eqn.invars[0], eqn.outvars[0]
    if not among(var, self._labels) or var.aval.shape != out.aval.shape:
      return
    base, shifts = self._shifted.get(var, (var, ()))
    if name in ("add", "add_any", "sub"):
      other = eqn.invars[1]
      by_row = not among(other, self._labels) and (not other.aval.shape or other.aval.shape[dim] == 1)
      if by_row and (shifts or self._level(other)):
        self._shifted[out] = base, (*shifts, (-1 if name == "sub" else 1, other))
    elif name == "convert_element_type" and shifts and is_inexact(out.aval):
      self._shifted[out] = base, shifts

  def results(self, *inputs: jax.Array) -> list[Value]:
    """The results of the loss, with its statistics computed by chunks."""
    body = self._flat.jaxpr
    for var in body.outvars:
      if among(var, self._labels):
        raise TrainError(
          f"loss_chunks cannot be honoured: the loss returns {var.aval.str_short()}.",
          details=f"it depends on the logits {self._product.outvars[0].aval.str_short()}, and has their columns",
          fix="return sums over the columns, or a number for each token; or leave loss_chunks out.",
        )
    known, found = values_of(self._flat, inputs), dict[int, list[jax.Array]]()
    known.update(dict.fromkeys(self._labels))

    def rule(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
      reading = self._readings.get(id(eqn))
      if reading is None:
        return DEFAULT
      if id(eqn) not in found:
        now = {key: one.statistic for key, one in self._readings.items() if one.level == reading.level}
        found.update(zip(now, self._pass([*now.values()]).results(known), strict=True))
      shift = [sign * read(var, known) for sign, var in reading.shifts]
      return self._finish(eqn, reading.statistic, found[id(eqn)], sum(shift, jnp.zeros(())), inputs)

    order = [eqn for eqn in body.eqns if not any(var in self._labels for var in eqn.outvars)]
    # All that a pass needs comes before it.
    order.sort(key=lambda eqn: max(map(self._level, (*eqn.invars, *eqn.outvars)), default=0))
    run_operations(order, known, rule)
    return [read(var, known) for var in body.outvars]

  def _pass(self, statistics: Sequence[Statistic]) -> Pass:
    depends = dependents(self._flat, self._product.outvars)

    def leaf(var: Var, own: Labels) -> bool:
      small = var not in depends and 2 * var.aval.size < self._size
      return not own or var in self._product.invars or small

    tiles = Tiles(self._flat.jaxpr, self.grid, leaf)
    for one in statistics:
      for node in one.nodes:
        tiles.need(*node, depends.__contains__)
    whole = next((var for var, _ in tiles.leaves if var in self._labels), None)
    if whole is not None:
      raise Untiled(self._made[whole])
    return Pass(statistics, tiles, self._head)

  def _finish(
    self, eqn: JaxprEqn, statistic: Statistic, numbers: list[jax.Array], shift: jax.Array, inputs: list[Value]
  ) -> Sequence[jax.Array]:
    """The results of an operation that reads a statistic."""
    name, given = eqn.primitive.name, eqn.invars[0].aval
    ((_, dim, _),) = self._labels[eqn.invars[0]]
    first, *others = (jnp.moveaxis(x, -1, dim) for x in numbers)
    if name in ("argmax", "top_k"):
      places = others[0].astype(eqn.outvars[-1].aval.dtype)
      return [places.squeeze(dim)] if name == "argmax" else [first, places]
    if name == "gather":
      out = eqn.outvars[0].aval
      found = with_nan_outside(first + shift, _place(eqn, inputs[1]), given.shape[dim]).astype(out.dtype)
      return [found.reshape(found.shape[: len(out.shape)])]
    if statistic.kind is EXPONENTIALS:
      first = jnp.exp(jax.lax.stop_gradient(finite(first)) + shift) * others[0]
    elif statistic.kind is SUM:
      first += shift * given.shape[dim]
    elif statistic.kind is LEAST:
      first = -first
    shape = [1 if d == dim else size for d, size in enumerate(given.shape)]
    return bind(eqn, [jnp.broadcast_to(first, shape).astype(given.dtype)])


def _place(eqn: JaxprEqn, indices: jax.Array) -> jax.Array:
  """The column that a gather reads of each row, with size 1."""
  shape = eqn.invars[0].aval.shape
  if is_pick(eqn):
    return place_in_row(indices, shape)
  return jnp.clip(indices[..., -1:], 0, shape[-1] - 1)
