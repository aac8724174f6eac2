"""Chunked cross-entropy: computes a model's head and its loss in chunks of columns, without an edit.

The head is the last product in the trace of a loss whose result goes through a softmax. Its columns, the
logits, may be summed, compared or looked up row by row: such statistics are computed one chunk of columns at
a time (`row_statistics`), so that the full logits never exist. An example: in `x - x.max(-1)`, the maximum is
a statistic, kept beside x as a number per row, so that `exp(...).sum(-1)` and the pick of a target belong to
the same pass over the weights. A value that mixes statistics and columns otherwise takes a second pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from nnx_parallel.attention.find import opens_attention
from nnx_parallel.attention.softmaxes import Softmaxes, named_dims
from nnx_parallel.attention.tiling import Grid, Labels, Tiles, Untiled, describe, finite, push
from nnx_parallel.core.interpret import inline_calls, interpret
from nnx_parallel.core.jaxprs import (
  among,
  bind,
  call_equation,
  dependents,
  has_reverse_rule,
  has_rule,
  is_inexact,
  open_jaxpr,
  operations_behind,
  program_of,
  trace_like,
  without_unused,
)
from nnx_parallel.core.types import Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Program, Value, Var
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.picks import is_pick, is_row_pick, pick
from nnx_parallel.layers.row_statistics import (
  COLUMNS,
  EXPONENTIALS,
  LARGEST,
  LARGEST_FIXED,
  SUM,
  Kind,
  Statistics,
  apart_of,
  best,
)
from nnx_parallel.layout.batch import batch_axes
from nnx_parallel.layout.constrain import scope_in_use
from nnx_parallel.rules.logical import LogicalRules
from nnx_parallel.rules.ruleset import RuleSet

_OPENED = ("_xlogx", "xlogy")
"""Functions of `jax.scipy.special.entr`, whose rules give the gradients of their operations."""
_NAME = "of columns: "
"""Starts the name of each call that computes a statistic."""


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
  logits = product.outvars[0].aval
  try:
    dim = _columns(flat.jaxpr, product)
    length = logits.shape[dim]
    shards, apart = _shards(length)
    whole = length // shards
    grid = Grid({COLUMNS: whole}, {COLUMNS: -(-whole // min(chunks, whole))})
    body = _Rewriting(flat, product, ((COLUMNS, dim, shards),), grid, apart).body()
  except Untiled as problem:
    raise TrainError(
      f"loss_chunks={chunks} cannot be honoured: {problem} needs all columns of the logits at once.",
      details=f"logits {logits.str_short()}; their columns may go through elementwise operations, sums,"
      " maxima, minima, argmax, top_k, take_along_axis, and logits[arange, labels]",
      fix="jnp.where(jnp.arange(columns) < size, logits, -jnp.inf), which hides columns of padding; or leave"
      " loss_chunks out."
      if problem.eqn.primitive.name == "slice"
      else "take such values of the logits out of the loss; or leave loss_chunks out.",
    ) from None
  count = -(-whole // grid.blocks[COLUMNS])
  line = f"the head and the loss of each token in {count} chunks of the {length} columns"
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


def _columns(body: Jaxpr, product: JaxprEqn) -> int:
  """The dim of a product's result that the softmax sums over."""
  logits = product.outvars[0]
  shape, size = logits.aval.shape, logits.aval.size
  problem: JaxprEqn | None = None
  for dim in reversed([d for d, size in enumerate(shape) if size > 1]):
    labels: dict[Var, Labels] = {logits: ((COLUMNS, dim, 1),)}
    exponentials: set[Var] = set()
    for eqn in body.eqns:
      side = next((n for n, var in enumerate(eqn.invars) if among(var, labels)), None)
      if side is None:
        continue
      try:
        own = push(eqn, side, labels[eqn.invars[side]], {COLUMNS: shape[dim]})
      except Untiled:
        problem = problem or eqn
        continue
      if not own and eqn.primitive.name == "reshape":
        problem = problem or eqn
      if eqn.primitive.name == "exp" or any(among(var, exponentials) for var in eqn.invars):
        exponentials.update(eqn.outvars)
      if own:
        labels.update(dict.fromkeys(eqn.outvars, own))
      elif (
        eqn.primitive.name == "reduce_sum"
        and among(eqn.invars[0], exponentials)
        and size // 2 <= eqn.invars[0].aval.size <= size  # most tokens: the last token has no target
      ):
        return dim
  raise Untiled(problem or product)


class _Logits(NamedTuple):
  """A value with columns: `base + shift`, or `exp(base + shift)`; `shift` is a number per row, None: 0."""

  base: jax.Array
  labels: Labels
  shift: jax.Array | None = None
  is_exponential: bool = False

  @property
  def dim(self) -> int:
    """The dim of the columns."""
    return self.labels[0][1]

  @property
  def is_plain(self) -> bool:
    """Whether it is just the base."""
    return self.shift is None and not self.is_exponential

  def has_columns(self, x: Any) -> bool:
    """Whether an array has a number for each column."""
    return jnp.ndim(x) > 0 and x.shape[self.dim] > 1

  def value(self, aval: Aval) -> jax.Array:
    """As one array."""
    found = self.base if self.shift is None else self.base + self.shift
    return jnp.broadcast_to(jnp.exp(found) if self.is_exponential else found, aval.shape).astype(aval.dtype)

  def change(self, linear: Callable[[jax.Array], jax.Array]) -> _Logits:
    """With a linear function of it."""
    return self._replace(base=linear(self.base), shift=None if self.shift is None else linear(self.shift))


class _Statistic(NamedTuple):
  """A value that depends on a statistic."""

  value: jax.Array


def _array(x: Value) -> jax.Array:
  return x.value if isinstance(x, _Statistic) else x


class _Rewriting:
  """Evaluates a loss once more, with all that sums or compares columns as calls of statistics.

  `apart` is how many groups of columns have an own gradient of the head's input, until the last chunk.
  """

  def __init__(self, flat: ClosedJaxpr, product: JaxprEqn, labels: Labels, grid: Grid, apart: int):
    self._flat, self._product, self._labels, self._grid, self._apart = flat, product, labels, grid, apart
    # The variables whose gradients a program needs, if it is differentiated.
    passing = [eqn for eqn in flat.jaxpr.eqns if eqn.primitive.name != "stop_gradient"]
    behind = operations_behind(passing, flat.jaxpr.outvars)
    self._derived = {out for eqn in behind for out in eqn.outvars}
    self._kinds: dict[str, Kind] = {}
    self._made: dict[Hashable, tuple[tuple[jax.Array, ...], list[jax.Array]]] = {}

  def body(self) -> ClosedJaxpr:
    """The closed trace of the loss with its statistics computed by chunks; `Untiled` if all are needed."""

    def is_call(eqn: JaxprEqn) -> bool:
      return _opens_head(eqn) and eqn.params.get("name") not in self._kinds

    def products(body: Jaxpr) -> list[JaxprEqn]:
      return [eqn for eqn in body.eqns if eqn.primitive.name == "dot_general"]

    number = next(n for n, eqn in enumerate(products(self._flat.jaxpr)) if eqn is self._product)
    new = inline_calls(trace_like(self._results, self._flat), is_call)
    return new.replace(jaxpr=self._in_levels(new.jaxpr, products(new.jaxpr)[number]))

  def _results(self, *inputs: jax.Array) -> list[jax.Array]:
    """The results of the loss."""
    found = interpret(self._flat, inputs, self._run)
    logits = self._product.outvars[0].aval
    for x, var in zip(found, self._flat.jaxpr.outvars, strict=True):
      if isinstance(x, _Logits):
        raise TrainError(
          f"loss_chunks cannot be honoured: the loss returns {var.aval.str_short()}.",
          details=f"it depends on the logits {logits.str_short()}, and has their columns",
          fix="return sums over the columns, or a number for each token; or leave loss_chunks out.",
        )
    return [_array(x) for x in found]

  def _run(self, eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    if eqn is self._product:
      return [_Logits(bind(eqn, inputs)[0], self._labels)]
    logits = [n for n, x in enumerate(inputs) if isinstance(x, _Logits)]
    if not logits:
      found = bind(eqn, [_array(x) for x in inputs])
      return [_Statistic(x) for x in found] if any(isinstance(x, _Statistic) for x in inputs) else found
    name, x = eqn.primitive.name, inputs[logits[0]]
    if name in ("argmax", "top_k"):
      return self._best(eqn, x)
    if name == "gather" and isinstance(inputs[0], _Logits) and (is_pick(eqn) or is_row_pick(eqn, self._flat)):
      return [_Statistic(self._pick(eqn, x, _array(inputs[1])))]
    labels = {push(eqn, n, inputs[n].labels, self._grid.lengths) for n in logits}
    if len(labels) > 1:
      raise Untiled(eqn)
    own = labels.pop()
    if not own:
      return [_Statistic(self._reduce(eqn, inputs))]
    is_plain = all(inputs[n].is_plain for n in logits) and not any(isinstance(x, _Statistic) for x in inputs)
    form = None if is_plain or len(logits) > 1 else self._keep(eqn, x, logits[0], inputs)
    if form is not None:
      return [form._replace(labels=own)]
    values = [
      x.value(var.aval) if isinstance(x, _Logits) else _array(x)
      for x, var in zip(inputs, eqn.invars, strict=True)
    ]
    return [_Logits(x, own) for x in bind(eqn, values)]

  def _keep(self, eqn: JaxprEqn, x: _Logits, side: int, inputs: list[Value]) -> _Logits | None:
    """The form of a result, if the operation has a rule; else the columns need another pass."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    other: Any = _array(inputs[1 - side]) if len(inputs) == 2 else jnp.zeros(())
    if name == "convert_element_type" and is_inexact(out):
      return x.change(lambda x: x.astype(out.dtype))
    if name == "stop_gradient":
      return x.change(jax.lax.stop_gradient)
    if x.is_exponential:
      return None
    if name == "exp":
      return x._replace(is_exponential=True)
    by_row = x.shift is None or not x.has_columns(other)
    if by_row and (name in ("neg", "mul") or (name == "div" and side == 0)):
      operation = {"neg": lambda x, _: -x, "mul": jnp.multiply, "div": jnp.divide}[name]
      return x.change(lambda x: operation(x, other))
    if name in ("add", "add_any", "sub") and side == 0 and not x.has_columns(other):
      other = -other if name == "sub" else other
      return x._replace(shift=other if x.shift is None else x.shift + other)
    return None

  def _pick(self, eqn: JaxprEqn, x: _Logits, indices: jax.Array) -> jax.Array:
    """An element of each row."""
    given, out, dim = eqn.invars[0].aval, eqn.outvars[0].aval, x.dim
    if not is_pick(eqn):  # an index beyond the columns reads the last, as in the gather
      indices = jnp.clip(indices[..., -1:], 0, given.shape[-1] - 1)
    whole = jnp.broadcast_to(x.base, given.shape)
    found = pick(whole, indices, total=lambda x: self._of(SUM, dim, x)[0].astype(x.dtype))[0]
    found = x._replace(base=found).value(out.update(shape=found.shape))
    return jnp.broadcast_to(found.reshape(found.shape[: len(out.shape)]), out.shape)

  def _reduce(self, eqn: JaxprEqn, inputs: list[Value]) -> jax.Array:
    """A result without columns."""
    name, x = eqn.primitive.name, inputs[0]
    if not isinstance(x, _Logits):
      raise Untiled(eqn)
    given = eqn.invars[0].aval
    if name == "reduce_sum":
      return bind(eqn, [self._total(x, given)])[0]
    if name in ("reduce_max", "reduce_min") and is_inexact(given):
      sign = 1 if name == "reduce_max" else -1
      kind = LARGEST if eqn.outvars[0] in self._derived else LARGEST_FIXED
      return bind(eqn, [sign * self._of(kind, x.dim, sign * x.value(given))[0]])[0]
    raise Untiled(eqn)

  def _total(self, x: _Logits, aval: Aval) -> jax.Array:
    """The sum over the columns, which stay with size 1."""
    shape = [1 if d == x.dim else size for d, size in enumerate(aval.shape)]
    if x.is_exponential:
      largest, total = self._of(EXPONENTIALS, x.dim, x.base)
      power = jax.lax.stop_gradient(finite(largest))
      found = jnp.exp(power if x.shift is None else power + x.shift) * total
    else:
      found = self._of(SUM, x.dim, x.base)[0]
      if x.shift is not None:
        found += x.shift * aval.shape[x.dim]
    return jnp.broadcast_to(found, shape).astype(aval.dtype)

  def _best(self, eqn: JaxprEqn, x: _Logits) -> list[_Statistic]:
    """The largest elements and their columns, or the column of the largest element."""
    aval, dim = eqn.invars[0].aval, x.dim
    alone = eqn.primitive.name == "argmax"
    count = 1 if alone else eqn.params["k"]
    along = tuple(eqn.params["axes"]) if alone else (eqn.params.get("axis", aval.ndim - 1),)
    if along != (dim,) or count > self._grid.blocks[COLUMNS] * self._labels[0][2]:
      raise Untiled(eqn)
    numbers = [size if d == dim else 1 for d, size in enumerate(aval.shape)]
    numbers = jax.lax.broadcasted_iota(jnp.int32, numbers, dim)
    values, places = self._of(best(count), dim, x.value(aval), numbers)
    places = places.astype(eqn.outvars[-1].aval.dtype)
    return [_Statistic(places.squeeze(dim))] if alone else [_Statistic(values), _Statistic(places)]

  def _of(self, kind: Kind, dim: int, *xs: jax.Array) -> list[jax.Array]:
    """A statistic, as a call that is found again in the trace."""
    key = kind, dim, *map(id, xs)
    if key not in self._made:
      name = f"{_NAME}{len(self._kinds)}"
      self._kinds[name] = kind

      def statistic(*xs: jax.Array) -> list[jax.Array]:
        return kind.of(*xs)

      statistic.__name__ = name
      results = jax.jit(statistic, inline=False)(*(jnp.moveaxis(x, dim, -1) for x in xs))
      self._made[key] = xs, [jnp.moveaxis(x, -1, dim) for x in results]
    return self._made[key][1]

  def _in_levels(self, body: Jaxpr, product: JaxprEqn) -> Jaxpr:
    """The program with its statistics in chunks; a statistic comes after the statistics it depends on."""
    depends, size = dependents(body, {*product.outvars}), product.outvars[0].aval.size

    def leaf(var: Var, own: Labels) -> bool:
      return not own or var in product.invars or (var not in depends and 2 * var.aval.size < size)

    calls = [eqn for eqn in body.eqns if eqn.params.get("name") in self._kinds]
    while calls:
      later = dependents(body, {out for eqn in calls for out in eqn.outvars})
      now = [eqn for eqn in calls if not any(among(var, later) for var in eqn.invars)]
      calls = [eqn for eqn in calls if eqn not in now]
      tiles, factor = Tiles(body, self._grid, leaf), self._labels[0][2]
      ends = [[(var, ((COLUMNS, var.aval.ndim - 1, factor),)) for var in eqn.invars] for eqn in now]
      for node in (node for nodes in ends for node in nodes):
        tiles.need(*node, depends.__contains__)
      kinds = [self._kinds[eqn.params["name"]] for eqn in now]
      statistics = Statistics(tiles, kinds, ends, now, apart_of(tiles, product, self._apart))
      made = [out for eqn in now for out in eqn.outvars]
      new = call_equation(statistics.function(), [var for var, _ in statistics.leaves], made, product)
      after = dependents(body, {*made})
      late = {id(new): 1} | {id(eqn): 2 for eqn in body.eqns if any(among(var, after) for var in eqn.invars)}
      eqns = [new, *(eqn for eqn in body.eqns if eqn not in now)]
      body = body.replace(eqns=sorted(eqns, key=lambda eqn: late.get(id(eqn), 0)))  # else in their order
    return body
