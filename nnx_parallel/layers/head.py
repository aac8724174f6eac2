"""Chunked cross-entropy: computes a model's head and its loss in chunks of columns, without an edit.

The head is the last product in the trace of a loss whose result goes through a softmax. The operations on its
columns, the logits, are rewritten so that they only sum, compare or look up values row by row: `exp(x - max)`
is `exp(x)` times a number per row, and so are a log-softmax and its products with targets. These statistics
are computed one chunk of columns at a time, forward and backward, so that the full logits never exist. Each
chunk of the weights is read once in each direction.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.typing import DTypeLike

from nnx_parallel.core.flow import meeting
from nnx_parallel.core.interpret import flattened, interpret
from nnx_parallel.core.jaxprs import (
  among,
  bind,
  call_equation,
  dependents,
  is_inexact,
  operations_behind,
  traced,
  without_unused,
)
from nnx_parallel.core.picks import is_pick, picked
from nnx_parallel.core.tiles import (
  Grid,
  Labels,
  Node,
  Places,
  Tiles,
  Untiled,
  described,
  filled,
  finite,
  pushed,
  tied,
)
from nnx_parallel.core.types import (
  AnyArray,
  Aval,
  ClosedJaxpr,
  Jaxpr,
  JaxprEqn,
  Program,
  PyTree,
  TreeDef,
  Value,
  Var,
)
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.attention.find import is_opened
from nnx_parallel.layers.attention.softmaxes import Softmaxes, named_dims
from nnx_parallel.layers.cuts import with_cut_weights
from nnx_parallel.layout.batch import batch_axes
from nnx_parallel.layout.constrain import rules_in_scope
from nnx_parallel.rules.logical import LogicalRules
from nnx_parallel.rules.ruleset import RuleSet

_COLUMNS = "columns"
_NAME = "of columns: "
"""Starts the name of each call that computes a statistic."""


def check_chunks(chunks: int | None) -> None:
  """Raises a `TrainError` for an option that is not a positive number."""
  if chunks is not None and (type(chunks) is not int or chunks < 1):
    raise TrainError(
      f"loss_chunks={chunks!r} is not a positive number.", fix="loss_chunks=8; None: not chunked."
    )


def in_chunks(jaxpr: Program, chunks: int) -> tuple[ClosedJaxpr, str]:
  """The closed trace of a loss with its head computed in chunks, and a line that says so.

  Raises:
    TrainError: the loss has no head, or operations on its logits cannot be computed in chunks.
  """
  flat: ClosedJaxpr = with_cut_weights(flattened(jaxpr, is_opened))
  product, others = _head(flat.jaxpr, chunks)
  logits = product.outvars[0].aval
  try:
    dim = _columns(flat.jaxpr, product)
    length = logits.shape[dim]
    shards, apart = _shards(length)
    whole = length // shards
    grid = Grid({_COLUMNS: whole}, {_COLUMNS: -(-whole // min(chunks, whole))})
    body = _Rewriting(flat, product, ((_COLUMNS, dim, shards),), grid, apart).body()
  except Untiled as problem:
    raise TrainError(
      f"loss_chunks={chunks} cannot be honoured: {problem} needs all columns of the logits at once.",
      details=f"logits {logits.str_short()}; their columns may go through elementwise operations, sums,"
      " maxima, argmax, top_k, and take_along_axis",
      fix="take such values of the logits out of the loss; or leave loss_chunks out.",
    ) from None
  count = -(-whole // grid.blocks[_COLUMNS])
  line = f"the head and the loss of each token in {count} chunks of the {length} columns"
  if count < chunks:
    why = f"{shards} devices share the columns, {whole} each" if shards > 1 else "chunks are of equal length"
    line += f" (of {chunks} requested: {why})"
  if others:
    whole_heads = ", ".join(map(described, others))
    line += f"; the last of {1 + len(others)} heads only, as written: {whole_heads}"
  return without_unused(body), line


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
  split = batch_axes(RuleSet(logical=rules_in_scope() or LogicalRules()), dict(mesh.shape)) or ()
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
  problems: list[JaxprEqn | None] = []
  for dim in reversed([d for d, size in enumerate(shape) if size > 1]):
    problem: JaxprEqn | None = None
    labels: dict[Var, Labels] = {logits: ((_COLUMNS, dim, 1),)}
    exponentials: set[Var] = set()
    for eqn in body.eqns:
      side = next((n for n, var in enumerate(eqn.invars) if among(var, labels)), None)
      if side is None:
        continue
      try:
        own = pushed(eqn, side, labels[eqn.invars[side]], {_COLUMNS: shape[dim]})
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
    problems.append(problem)
  raise Untiled(next(filter(None, problems), product))


# A statistic of the columns is one number, or a few, per row. The statistics of the chunks combine to the
# statistic of all columns. The columns are the last dim, which stays, with size 1.


def _wide(x: jax.Array) -> DTypeLike:
  return jnp.promote_types(x.dtype, jnp.float32) if is_inexact(x) else x.dtype


@dataclasses.dataclass(frozen=True)
class _Sum:
  """The sum of an array."""

  stale = (0,)
  start = (0,)
  derived = 0

  def of(self, x: jax.Array) -> list[jax.Array]:
    return [x.sum(-1, keepdims=True, dtype=_wide(x))]

  def combined(self, a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    return [a[0] + b[0]]

  def part(self, _: Sequence[jax.Array], x: jax.Array) -> list[jax.Array]:
    return self.of(x)


@dataclasses.dataclass(frozen=True)
class _Exponentials:
  """The maximum of an array, and the sum of `exp(it - maximum)`, optionally times another array."""

  stale = (-math.inf, 0)
  start = (-math.inf, 0)
  derived = 1

  def of(self, power: jax.Array, *factor: jax.Array) -> list[jax.Array]:
    # The derivative by the maximum is 0 in all, and `part` leaves it out too.
    largest = jax.lax.stop_gradient(power.astype(_wide(power)).max(-1, keepdims=True))
    return [largest, *self.part([largest], power, *factor)]

  def combined(self, a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    largest = jnp.maximum(a[0], b[0])
    base = finite(largest)
    return [largest, a[1] * jnp.exp(a[0] - base) + b[1] * jnp.exp(b[0] - base)]

  def part(self, known: Sequence[jax.Array], power: jax.Array, *factor: jax.Array) -> list[jax.Array]:
    found = jnp.exp(power.astype(_wide(power)) - finite(known[0]))
    return [math.prod((x.astype(found.dtype) for x in factor), start=found).sum(-1, keepdims=True)]


@dataclasses.dataclass(frozen=True)
class _Largest:
  """The maximum of an array; where it has a gradient, also how many elements equal it: each has its share."""

  derived: int | None
  stale = (-math.inf,)
  start = (-math.inf, 0)

  def of(self, x: jax.Array) -> list[jax.Array]:
    largest = x.max(-1, keepdims=True)
    if self.derived is None:
      return [largest]
    return [largest, (x == largest).sum(-1, keepdims=True, dtype=x.dtype)]

  def combined(self, a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    largest = jnp.maximum(a[0], b[0])
    counts = [jnp.where(x[0] == largest, x[1], jnp.zeros_like(x[1])) for x in (a, b) if len(x) > 1]
    total: Any = sum(counts)
    return [largest, total] if counts else [largest]

  def part(self, known: Sequence[jax.Array], x: jax.Array) -> list[jax.Array]:
    if self.derived is None:
      return []
    equal = jnp.where(x == known[0], x / known[1], jnp.zeros_like(x))
    return [equal.sum(-1, keepdims=True)]


@dataclasses.dataclass(frozen=True)
class _Best:
  """The largest elements, and their columns."""

  count: int
  stale = (-math.inf, None)
  start = (-math.inf, 0)
  derived = 0

  def of(self, x: jax.Array, columns: jax.Array) -> list[jax.Array]:
    if self.count == 1:
      best, places = x.max(-1, keepdims=True), x.argmax(-1, keepdims=True)
    else:
      best, places = jax.lax.top_k(x, self.count)
    columns = columns + jnp.zeros_like(x, dtype=columns.dtype)
    return [best, jnp.take_along_axis(columns, places, -1)]

  def combined(self, a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    pairs = [jnp.concatenate(pair, -1) for pair in zip(a, b, strict=True)]
    ordered = jax.lax.sort((-pairs[0], pairs[1]), num_keys=2)  # of equal elements, the first column
    return [-ordered[0][..., : self.count], ordered[1][..., : self.count]]

  def part(self, known: Sequence[jax.Array], x: jax.Array, columns: jax.Array) -> list[jax.Array]:
    chosen = (jnp.where(columns == known[1][..., n : n + 1], x, jnp.zeros_like(x)) for n in range(self.count))
    return [jnp.concatenate([row.sum(-1, keepdims=True) for row in chosen], -1)]


_Kind = _Sum | _Exponentials | _Largest | _Best


@dataclasses.dataclass(frozen=True)
class _Term:
  """A product of terms with and without columns: `exp(power + shift) * factor * share`.

  Attributes:
    power: an array with columns; None: there is no exponential.
    shift: a number per row.
    factor: an array with columns; None: 1.
    share: a number per row; None: 1.
  """

  power: jax.Array | None = None
  shift: jax.Array | float | None = None
  factor: jax.Array | None = None
  share: jax.Array | float | None = None

  def times(self, other: _Term) -> _Term:
    return _Term(
      _both(jnp.add, self.power, other.power),
      _both(jnp.add, self.shift, other.shift),
      _both(jnp.multiply, self.factor, other.factor),
      _both(jnp.multiply, self.share, other.share),
    )

  def mapped(self, change: Callable[[jax.Array], jax.Array], *names: str) -> _Term:
    """With some of its parts changed."""
    parts = {name: getattr(self, name) for name in names}
    return dataclasses.replace(self, **{name: None if x is None else change(x) for name, x in parts.items()})

  def value(self) -> AnyArray:
    """As one array."""
    power = None if self.power is None else jnp.exp(_both(jnp.add, self.power, self.shift))
    return _both(jnp.multiply, _both(jnp.multiply, power, self.factor), self.share)


def _both(operation: Callable[[jax.Array, jax.Array], jax.Array], a: AnyArray, b: AnyArray) -> AnyArray:
  return b if a is None else a if b is None else operation(a, b)


@dataclasses.dataclass(frozen=True)
class _Logits:
  """A value with columns that depends on the logits: a sum of terms."""

  terms: list[_Term]
  labels: Labels

  @property
  def plain(self) -> bool:
    """Whether no statistic is in it."""
    (first, *more) = self.terms
    return not more and first.factor is not None and first.power is None and first.share is None

  def value(self, aval: Aval) -> jax.Array:
    """As one array."""
    found = functools.reduce(jnp.add, [term.value() for term in self.terms])
    return jnp.broadcast_to(found, aval.shape).astype(aval.dtype)


@dataclasses.dataclass(frozen=True)
class _Statistic:
  """A value that depends on a statistic."""

  value: jax.Array


def _array(x: Value) -> jax.Array:
  return x.value if isinstance(x, _Statistic) else x


class _Rewriting:
  """Evaluates a loss once more, with all that sums or compares columns as calls of statistics.

  Args:
    flat: the closed trace of the loss.
    product: the head.
    labels: of its result.
    grid: of the chunks.
    apart: how many groups of columns have an own gradient of the head's input, until the last chunk.
  """

  def __init__(self, flat: ClosedJaxpr, product: JaxprEqn, labels: Labels, grid: Grid, apart: int):
    self._flat, self._product, self._labels, self._grid, self._apart = flat, product, labels, grid, apart
    # The variables whose gradients a program needs, if it is differentiated.
    passing = [eqn for eqn in flat.jaxpr.eqns if eqn.primitive.name != "stop_gradient"]
    behind = operations_behind(passing, flat.jaxpr.outvars)
    self._derived = {out for eqn in behind for out in eqn.outvars}
    self._kinds: dict[str, _Kind] = {}
    self._made: dict[Hashable, tuple[tuple[jax.Array, ...], list[jax.Array]]] = {}

  def body(self) -> ClosedJaxpr:
    """The closed trace of the loss with its statistics computed by chunks.

    Raises:
      TrainError: a result of the loss has columns.
      Untiled: an operation that needs them all.
    """

    def is_call(eqn: JaxprEqn) -> bool:
      return is_opened(eqn) and eqn.params.get("name") not in self._kinds

    def products(body: Jaxpr) -> list[JaxprEqn]:
      return [eqn for eqn in body.eqns if eqn.primitive.name == "dot_general"]

    number = next(n for n, eqn in enumerate(products(self._flat.jaxpr)) if eqn is self._product)
    new = flattened(traced(self._results, self._flat), is_call)
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
      return [_Logits([_Term(factor=bind(eqn, inputs)[0])], self._labels)]
    logits = [n for n, x in enumerate(inputs) if isinstance(x, _Logits)]
    if not logits:
      found = bind(eqn, [_array(x) for x in inputs])
      return [_Statistic(x) for x in found] if any(isinstance(x, _Statistic) for x in inputs) else found
    if eqn.primitive.name in ("argmax", "top_k"):
      return self._best(eqn, inputs[0])
    labels = {pushed(eqn, n, inputs[n].labels, self._grid.lengths) for n in logits}
    if len(labels) > 1:
      raise Untiled(eqn)
    own = labels.pop()
    if not own:
      return [_Statistic(self._reduced(eqn, inputs))]
    plain = all(inputs[n].plain for n in logits) and not any(isinstance(x, _Statistic) for x in inputs)
    terms = None if plain else self._terms(eqn, inputs, own)
    if terms is not None:
      return [_Logits(terms, own)]
    values = [
      x.value(var.aval) if isinstance(x, _Logits) else _array(x)
      for x, var in zip(inputs, eqn.invars, strict=True)
    ]
    return [_Logits([_Term(factor=x)], own) for x in bind(eqn, values)]

  def _terms(self, eqn: JaxprEqn, inputs: list[Value], labels: Labels) -> list[_Term] | None:
    """The terms of a result, of an operation that keeps such a form."""
    name, dim = eqn.primitive.name, labels[0][1]

    def of(x: Value) -> list[_Term]:
      if isinstance(x, _Logits):
        return x.terms
      x = _array(x)
      return [_Term(factor=x) if jnp.ndim(x) and x.shape[dim] > 1 else _Term(share=x)]

    out = eqn.outvars[0].aval
    minus = _Term(share=-1.0)
    if name == "convert_element_type" and is_inexact(out):
      return [term.mapped(lambda x: x.astype(out.dtype), "factor", "share") for term in of(inputs[0])]
    if name == "stop_gradient":
      fields = [field.name for field in dataclasses.fields(_Term)]
      return [term.mapped(jax.lax.stop_gradient, *fields) for term in of(inputs[0])]
    if name == "neg":
      return [term.times(minus) for term in of(inputs[0])]
    if name in ("add", "add_any", "sub"):
      return [*of(inputs[0]), *(term.times(minus) if name == "sub" else term for term in of(inputs[1]))]
    if name == "mul":
      return [a.times(b) for a in of(inputs[0]) for b in of(inputs[1])]
    if name == "div" and not isinstance(inputs[1], _Logits):
      (by,) = of(inputs[1])
      return [term.times(by.mapped(lambda x: 1 / x, "factor", "share")) for term in of(inputs[0])]
    if name == "exp" and all(
      term.power is None and (term.factor is None) != (term.share is None) for term in of(inputs[0])
    ):
      return [functools.reduce(_Term.times, (_Term(term.factor, term.share) for term in of(inputs[0])))]
    return None

  def _reduced(self, eqn: JaxprEqn, inputs: list[Value]) -> jax.Array:
    """A result without columns."""
    name, x = eqn.primitive.name, inputs[0]
    if name == "dot_general":
      return self._product_over_columns(eqn, inputs)
    if not isinstance(x, _Logits):
      raise Untiled(eqn)
    given, dim = eqn.invars[0].aval, x.labels[0][1]
    if is_pick(eqn) and not isinstance(inputs[1], _Logits):
      indices = _array(inputs[1])

      def pick(x: jax.Array) -> jax.Array:
        whole = jnp.broadcast_to(x, given.shape)
        return picked(whole, indices, total=lambda x: self._of(_Sum(), dim, x)[0].astype(x.dtype))[0]

      terms = [term.mapped(pick, "power", "factor").value() for term in x.terms]
      out = eqn.outvars[0].aval
      return jnp.broadcast_to(functools.reduce(jnp.add, terms), out.shape).astype(out.dtype)
    if name == "reduce_sum":
      return bind(eqn, [self._total(x.terms, given, dim)])[0]
    if name == "reduce_max" and is_inexact(given):
      kind = _Largest(0 if eqn.outvars[0] in self._derived else None)
      return bind(eqn, [self._of(kind, dim, x.value(given))[0]])[0]
    raise Untiled(eqn)

  def _total(self, terms: list[_Term], aval: Aval, dim: int) -> jax.Array:
    """The sum of terms over the columns, which stay with size 1."""
    found: list[jax.Array] = []
    for term in terms:
      if term.power is not None:
        factors = () if term.factor is None else (term.factor,)
        largest, total = self._of(_Exponentials(), dim, term.power, *factors)
        shift = _both(jnp.add, jax.lax.stop_gradient(finite(largest)), term.shift)
        found.append(_both(jnp.multiply, jnp.exp(shift) * total, term.share))
      elif term.factor is None:
        found.append(term.share * aval.shape[dim])
      else:
        found.append(_both(jnp.multiply, self._of(_Sum(), dim, term.factor)[0], term.share))
    shape = [1 if d == dim else size for d, size in enumerate(aval.shape)]
    return jnp.broadcast_to(functools.reduce(jnp.add, found), shape).astype(aval.dtype)

  def _product_over_columns(self, eqn: JaxprEqn, inputs: list[Value]) -> jax.Array:
    """A product that sums over the columns, such as targets times a log-softmax, as a sum."""
    met: Any = meeting(eqn)
    side = next(n for n, x in enumerate(inputs) if isinstance(x, _Logits))
    x, other, aval = inputs[side], inputs[1 - side], eqn.invars[side].aval
    dim = x.labels[0][1]
    if isinstance(other, _Logits) or met.free[1 - side] or tuple(met.summed[side]) != (dim,):
      raise Untiled(eqn)
    place = {(*met.shared[1 - side], *met.summed[1 - side])[n]: d
             for n, d in enumerate((*met.shared[side], *met.summed[side]))}  # fmt: skip
    other = _array(other)
    order = sorted(place, key=place.__getitem__)
    sizes = [aval.shape[d] if d in place.values() else 1 for d in range(aval.ndim)]
    times = _Term(factor=other.transpose(order).reshape(sizes).astype(aval.dtype))
    found = self._total([term.times(times) for term in x.terms], aval, dim)
    kept = [*met.shared[side], *met.free[side]]
    return found.transpose([*kept, dim])[..., 0].astype(eqn.outvars[0].aval.dtype)

  def _best(self, eqn: JaxprEqn, x: _Logits) -> list[_Statistic]:
    """The largest elements and their columns, or the column of the largest element."""
    aval, dim = eqn.invars[0].aval, x.labels[0][1]
    alone = eqn.primitive.name == "argmax"
    best = _Best(1 if alone else eqn.params["k"])
    along = tuple(eqn.params["axes"]) if alone else (eqn.params.get("axis", aval.ndim - 1),)
    if along != (dim,) or best.count > self._grid.blocks[_COLUMNS] * self._labels[0][2]:
      raise Untiled(eqn)
    numbers = [size if d == dim else 1 for d, size in enumerate(aval.shape)]
    numbers = jax.lax.broadcasted_iota(jnp.int32, numbers, dim)
    values, places = self._of(best, dim, x.value(aval), numbers)
    places = places.astype(eqn.outvars[-1].aval.dtype)
    return [_Statistic(places.squeeze(dim))] if alone else [_Statistic(values), _Statistic(places)]

  def _of(self, kind: _Kind, dim: int, *xs: jax.Array) -> list[jax.Array]:
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
      ends = [[(var, ((_COLUMNS, var.aval.ndim - 1, factor),)) for var in eqn.invars] for eqn in now]
      for node in (node for nodes in ends for node in nodes):
        tiles.need(*node, depends.__contains__)
      kinds = [self._kinds[eqn.params["name"]] for eqn in now]
      statistics = _Statistics(tiles, kinds, ends, now, _apart(tiles, product, self._apart))
      made = [out for eqn in now for out in eqn.outvars]
      new = call_equation(statistics.function(), [var for var, _ in statistics.leaves], made, product)
      after = dependents(body, {*made})
      ahead: list[JaxprEqn] = []
      rest: list[JaxprEqn] = []
      for eqn in body.eqns:
        if eqn not in now:
          (rest if any(among(var, after) for var in eqn.invars) else ahead).append(eqn)
      body = body.replace(eqns=[*ahead, new, *rest])
    return body


@dataclasses.dataclass(frozen=True)
class _Apart:
  """The head for groups of its columns, each with a copy of its input.

  Attributes:
    product: the head.
    count: of the groups.
    out: its result.
    given: its operands.
    side: which of them is its input.
  """

  product: JaxprEqn
  count: int
  out: Node
  given: list[Node]
  side: int

  def value(self, x: jax.Array, weights: jax.Array) -> jax.Array:
    """The result for copies of the input and all columns of a part."""
    ((_, dim, _),) = self.given[1 - self.side][1]
    groups = weights.reshape(*weights.shape[:dim], self.count, -1, *weights.shape[dim + 1 :])
    pair = [x, jnp.moveaxis(groups, dim, 0)]
    found = jax.vmap(lambda *xs: bind(self.product, xs)[0])(*(pair if self.side == 0 else pair[::-1]))
    ((_, dim, _),) = self.out[1]
    return jax.lax.collapse(jnp.moveaxis(found, 0, dim), dim, dim + 2)


def _apart(tiles: Tiles, product: JaxprEqn, count: int) -> _Apart | None:
  """None for one group, for groups of one column, or if the input has no gradient."""
  out, wanted = next((node, own) for node, (eqn, own) in tiles.parts.items() if eqn is product)
  given = list(zip(product.invars, wanted, strict=True))
  side = next((n for n, (_, own) in enumerate(given) if not own), None)
  if count == 1 or side is None or not is_inexact(given[side][0].aval) or not given[1 - side][1]:
    return None
  return _Apart(product, count, out, given, side)


@dataclasses.dataclass(frozen=True)
class _Statistics:
  """Some statistics, computed in chunks of the columns, as a function of flat arrays.

  Attributes:
    tiles: the operations that the statistics are computed from.
    kinds: the kind of each statistic.
    ends: the inputs of each statistic.
    calls: the operations that the statistics replace.
    apart: the head, if each device has its own gradient of the head's input.
  """

  tiles: Tiles
  kinds: Sequence[_Kind]
  ends: Sequence[Sequence[Node]]
  calls: Sequence[JaxprEqn]
  apart: _Apart | None

  @functools.cached_property
  def leaves(self) -> list[Node]:
    """The arguments of the function; arguments with gradients come first."""
    return sorted(self.tiles.leaves, key=lambda node: not is_inexact(node[0].aval))

  @property
  def _blocks(self) -> jax.Array:
    """The numbers of the chunks."""
    return jnp.arange(self.tiles.grid.count(_COLUMNS), dtype=jnp.int32)

  @property
  def _floats(self) -> int:
    return sum(is_inexact(var.aval) for var, _ in self.leaves)

  def function(self) -> Callable[..., Sequence[jax.Array]]:
    """The function, with a gradient that computes the tiles again."""

    @jax.custom_vjp
    def statistics(*given: jax.Array) -> list[list[jax.Array]]:
      return self._forward(*given)

    def with_kept(*given: jax.Array) -> tuple[list[list[jax.Array]], PyTree]:
      found = self._forward(*given)
      return found, (given, found)

    statistics.defvjp(with_kept, self._backward)

    def loss_in_chunks(*given: jax.Array) -> list[jax.Array]:
      return jax.tree.leaves(statistics(*given))

    return loss_in_chunks

  def _taken(self, known: dict[Node, jax.Array], places: Places) -> Iterator[tuple[_Kind, list[jax.Array]]]:
    """Each kind, with the tiles that it takes."""
    for kind, wanted in zip(self.kinds, self.ends, strict=True):
      xs = [self.tiles.value(var, own, known, places) for var, own in wanted]
      rows = zip(xs, wanted, kind.stale, strict=False)
      yield (
        kind,
        [x if stale is None else self.tiles.grid.fresh(x, own, places, stale) for x, (_, own), stale in rows],
      )

  def _forward(self, *arrays: jax.Array) -> list[list[jax.Array]]:
    *given, row = tied([*arrays, self._blocks])

    def body(state: list[list[jax.Array]], places: Places) -> tuple[list[list[jax.Array]], None]:
      pairs = zip(self.leaves, given, strict=True)
      known = {node: self.tiles.grid.take(x, node[1], places) for node, x in pairs}
      taken = zip(self._taken(known, places), state, strict=True)
      return [kind.combined(before, kind.of(*xs)) for (kind, xs), before in taken], None

    start = [
      [filled(out.aval, x, out.aval.dtype) for out, x in zip(eqn.outvars, kind.start, strict=False)]
      for kind, eqn in zip(self.kinds, self.calls, strict=True)
    ]
    return jax.lax.scan(body, start, {_COLUMNS: row})[0]

  def _backward(self, kept: PyTree, cotangent: PyTree) -> tuple[jax.Array | None, ...]:
    given, found = kept
    kinds = zip(self.kinds, cotangent, strict=True)
    arriving = [g[kind.derived] for kind, g in kinds if kind.derived is not None]
    pairs = [(x, own) for x, (_, own) in zip(given, self.leaves, strict=True)]
    first, rest = pairs[: self._floats], pairs[self._floats :]
    fixed = [*rest, *((x, ()) for x in jax.tree.leaves(found))]
    apart, copied, grid = self.apart, 0, self.tiles.grid
    if apart is not None:
      copied = self.leaves.index(apart.given[apart.side])
      x = first[copied][0]
      first[copied] = jnp.broadcast_to(x[None], (apart.count, *x.shape)), ()
    part = functools.partial(self._part, jax.tree.structure(found))
    owns = [own for _, own in first]

    def body(totals: list[jax.Array], block: jax.Array) -> tuple[list[jax.Array], None]:
      places = {_COLUMNS: block}
      tiles, others = ([grid.take(x, own, places) for x, own in some] for some in (first, fixed))
      _, pull = jax.vjp(lambda *xs: part(places, others, *xs), *tiles)
      triples = zip(totals, pull(arriving), owns, strict=True)
      news = [grid.take(x, own, places) + new.astype(x.dtype) for x, new, own in triples]
      return [grid.put(x, new, own, places) for x, new, own in zip(totals, news, owns, strict=True)], None

    # What all chunks read has a sum over them, in float32.
    zeros = [jnp.zeros_like(x if own else x.astype(_wide(x))) for x, own in first]
    sums, _ = jax.lax.scan(body, zeros, self._blocks)
    results = [total.astype(x.dtype) for total, (x, _) in zip(sums, first, strict=True)]
    if apart is not None:
      results[copied] = results[copied].sum(0)
    return (*results, *[None] * len(rest))

  def _part(
    self, form: TreeDef, places: Places, fixed: Sequence[jax.Array], *inputs: jax.Array
  ) -> list[jax.Array]:
    """The contribution of a chunk of columns to the statistics, given the statistics of all columns."""
    apart, count = self.apart, len(self.leaves) - self._floats
    known = dict(zip(self.leaves, (*inputs, *fixed[:count]), strict=True))
    if apart is not None:
      known[apart.out] = apart.value(*(known[apart.given[n]] for n in (apart.side, 1 - apart.side)))
    totals = jax.tree.unflatten(form, fixed[count:])
    pairs = zip(self._taken(known, places), totals, strict=True)
    return [x for (kind, xs), total in pairs for x in kind.part(total, *xs)]
