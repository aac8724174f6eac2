"""Chunked cross-entropy: computes a model's head and its loss in chunks of columns, without an edit.

The head is the last product in the trace of a loss whose result goes through a softmax. Its columns, the
logits, may be summed, compared or looked up row by row: such statistics are computed one chunk of columns at
a time (`row_statistics`), so that the full logits never exist. An example: in `x - x.max(-1)`, the maximum is
a statistic, and a shift beside x: `exp(...).sum(-1)` and the pick of a target need just x, and belong to the
same pass over the weights. A value that mixes statistics and columns otherwise takes a second pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from nnx_parallel.attention.find import opens_attention
from nnx_parallel.attention.softmaxes import Softmaxes, named_dims
from nnx_parallel.attention.tiling import Grid, Labels, Tiles, Untiled, describe, push
from nnx_parallel.core.axes import count_shards
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
from nnx_parallel.layers.picks import is_pick, is_row_pick, place_in_row
from nnx_parallel.layers.row_statistics import (
  COLUMNS,
  EXPONENTIALS,
  EXTREMES,
  SUM,
  Kind,
  Pass,
  Shifts,
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
  apart = mesh.size // count_shards(split, mesh.shape)
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
    columns = _Columns(flat, product, dim, chunks) if size > 1 else None
    if columns is not None and columns.has_softmax:
      if columns.problem is not None:
        raise columns.problem
      return columns
    problem = problem or (columns and columns.problem)
  raise problem or Untiled(product)


class _Columns:
  """What a loss does with the columns of its logits along a dim: which operations read which statistics."""

  def __init__(self, flat: ClosedJaxpr, product: JaxprEqn, dim: int, chunks: int):
    eqns, logits = flat.jaxpr.eqns, product.outvars[0]
    self.shards, self._groups = _shards(logits.aval.shape[dim])
    whole = logits.aval.shape[dim] // self.shards
    self.grid = Grid({COLUMNS: whole}, {COLUMNS: -(-whole // min(chunks, whole))})
    self.problem: Untiled | None = None  # the first operation that needs all columns at once
    self._flat, self._product, self._made, self._size = flat, product, makers(flat), logits.aval.size
    self._labels: dict[Var, Labels] = {logits: ((COLUMNS, dim, self.shards),)}  # of the values with columns
    # Values that are another value plus numbers of each row that need a pass.
    self._shifted: dict[Var, tuple[Var, Shifts]] = {}
    self._levels: dict[Var, int] = {}  # the passes that a value needs
    self._read: dict[int, Statistic] = {}  # by the id of the operation that it is the result of
    # The values whose gradients the loss needs, if it is differentiated.
    passing = [eqn for eqn in eqns if eqn.primitive.name != "stop_gradient"]
    self._derived = {out for eqn in operations_behind(passing, flat.jaxpr.outvars) for out in eqn.outvars}
    for eqn in eqns:
      try:
        level = max(map(self._level, eqn.invars), default=0)
        if any(among(var, self._labels) for var in eqn.invars):
          level = max(level, self._follow(eqn))
        self._levels.update(dict.fromkeys(eqn.outvars, level))
      except Untiled as problem:
        self.problem = self.problem or problem
    powers = {*self._labels} & {eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "exp"}
    exponentials = dependents(flat, powers)
    summed = [eqn.invars[0] for eqn in eqns if id(eqn) in self._read and eqn.primitive.name == "reduce_sum"]
    # Of most tokens: the last token has no target.
    self.has_softmax = any(self._size // 2 <= x.aval.size <= self._size for x in exponentials & {*summed})

  def _level(self, var: Var) -> int:
    return self._levels[var] if among(var, self._levels) else 0

  def _split(self, var: Var) -> tuple[Var, Shifts]:
    return self._shifted[var] if among(var, self._shifted) else (var, ())

  def _add(self, eqn: JaxprEqn, kind: Kind, var: Var, shifts: Shifts = (), *others: Var) -> int:
    """Adds a statistic that an operation reads; returns its level."""
    nodes = (var, self._labels[var]), *((other, ()) for other in others)
    derived = any(out in self._derived and is_inexact(out.aval) for out in eqn.outvars)
    level = 1 + max(map(self._level, (var, *others)))
    self._read[id(eqn)] = Statistic(kind, nodes, derived, shifts, level)
    return level

  def _follow(self, eqn: JaxprEqn) -> int:
    """Labels a result with columns, or adds the statistic that it is; returns its level. Raises `Untiled`."""
    name, var, made = eqn.primitive.name, eqn.invars[0], maker(eqn.invars[0], self._made)
    sides = [n for n, x in enumerate(eqn.invars) if among(x, self._labels)]
    ndim, dim = len(var.aval.shape), self._labels[eqn.invars[sides[0]]][0][1]
    if name in ("argmax", "top_k"):
      count = eqn.params.get("k", 1)
      along = tuple(eqn.params["axes"]) if name == "argmax" else (eqn.params.get("axis", ndim - 1),)
      if along != (dim,) or count > self.grid.blocks[COLUMNS] * self.shards or not is_inexact(var.aval):
        raise Untiled(eqn)
      return self._add(eqn, best(count, name == "argmax"), var)
    is_gather = name == "gather" and sides == [0] and dim == ndim - 1
    if is_gather and (is_pick(eqn) or is_row_pick(eqn, self._flat)):
      kind = picked(functools.partial(place_in_row, eqn), var.aval.shape[dim])
      return self._add(eqn, kind, *self._split(var), eqn.invars[1])
    labels = {push(eqn, n, self._labels[eqn.invars[n]], self.grid.lengths) for n in sides}
    if len(labels) > 1:
      raise Untiled(eqn)
    if own := labels.pop():
      self._labels.update(dict.fromkeys(eqn.outvars, own))
      self._shift(eqn, dim)
      return 0
    if name == "reduce_sum":
      if made is not None and made.primitive.name == "exp" and among(made.invars[0], self._shifted):
        return self._add(eqn, EXPONENTIALS, *self._shifted[made.invars[0]])
      return self._add(eqn, SUM, *self._split(var))
    if name in EXTREMES and is_inexact(var.aval):
      return self._add(eqn, EXTREMES[name], var)
    raise Untiled(eqn)

  def _shift(self, eqn: JaxprEqn, dim: int) -> None:
    """Keeps a result as its first operand and a shift, so that its statistics need no pass of their own."""
    name, (var, *others), out = eqn.primitive.name, eqn.invars, eqn.outvars[0]
    base, shifts = self._split(var)
    if not among(var, self._labels) or var.aval.shape != out.aval.shape:
      return
    if name in ("add", "add_any", "sub"):
      (other,) = others
      by_row = not other.aval.shape or other.aval.shape[dim] == 1
      if by_row and (shifts or self._level(other)):
        self._shifted[out] = base, (*shifts, (-1 if name == "sub" else 1, other))
    elif name == "convert_element_type" and shifts and is_inexact(out.aval):
      self._shifted[out] = base, shifts

  def results(self, *inputs: jax.Array) -> list[Value]:
    """The results of the loss, with its statistics computed by chunks."""
    known, found = values_of(self._flat, inputs), dict[int, list[jax.Array]]()
    known.update(dict.fromkeys(self._labels))

    def rule(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
      one = self._read.get(id(eqn))
      if one is None:
        return DEFAULT
      if id(eqn) not in found:
        now = {key: other for key, other in self._read.items() if other.level == one.level}
        found.update(zip(now, self._pass([*now.values()]).results(known), strict=True))
      var, ((_, dim, _),) = one.nodes[0]
      shift = jnp.zeros(())
      for sign, number in one.shifts:
        shift += sign * read(number, known)
      numbers = [jnp.moveaxis(x, -1, dim) for x in found[id(eqn)]]
      results = one.kind.result(numbers, shift, var.aval.shape[dim])
      if eqn.primitive.name.startswith("reduce"):  # perhaps over other dims too
        results = bind(eqn, [results[0].astype(eqn.invars[0].aval.dtype)])
      avals = [out.aval for out in eqn.outvars]
      return [x.reshape(aval.shape).astype(aval.dtype) for x, aval in zip(results, avals, strict=True)]

    body = self._flat.jaxpr
    order = [eqn for eqn in body.eqns if not any(out in self._labels for out in eqn.outvars)]
    # All that a pass needs comes before it.
    order.sort(key=lambda eqn: max(map(self._level, (*eqn.invars, *eqn.outvars)), default=0))
    run_operations(order, known, rule)
    for var in body.outvars:
      if among(var, self._labels):
        logits = self._product.outvars[0].aval.str_short()
        raise TrainError(
          f"loss_chunks cannot be honoured: the loss returns {var.aval.str_short()}.",
          details=f"it depends on the logits {logits}, and has their columns",
          fix="return sums over the columns, or a number for each token; or leave loss_chunks out.",
        )
    return [read(var, known) for var in body.outvars]

  def _pass(self, statistics: Sequence[Statistic]) -> Pass:
    depends = dependents(self._flat.jaxpr, self._product.outvars)

    def leaf(var: Var, own: Labels) -> bool:
      if not own and var in self._labels:
        raise Untiled(self._made[var])
      return not own or var in self._product.invars or (var not in depends and 2 * var.aval.size < self._size)

    tiles = Tiles(self._flat.jaxpr, self.grid, leaf)
    for node in (node for one in statistics for node in one.nodes):
      tiles.need(*node, depends.__contains__)
    logits = self._product.outvars[0]
    return Pass(statistics, tiles, self._product, self._labels[logits], self._groups)
