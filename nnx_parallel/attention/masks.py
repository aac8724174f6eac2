"""Finds the tiles of scores that a mask hides wholly, and the rule of a mask, from the positions alone.

The program of the scores is evaluated on intervals: positions are known for each block of rows or columns,
all else may be anything. A causal mask, a window or chunks are comparisons of positions, so the intervals
are exact there; a mask that comes from data hides nothing for sure. An example: for queries 0 to 3 and keys
4 to 7, `rows >= columns` compares [0, 3] with [4, 7] and is surely False, so that
`where(rows >= columns, s, -1e9)` is [-1e9, -1e9], whatever s is: the tile is hidden.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from nnx_parallel.attention.tiling import DimName, Labels, Node, Untiled, pull
from nnx_parallel.core.jaxprs import is_inexact, makers
from nnx_parallel.core.types import Jaxpr, JaxprEqn, Var
from nnx_parallel.infer.dims import ELEMENTWISE

HIDDEN = -1e4
"""A score whose exponential is 0 relative to visible scores."""
_ABSORBING = -1e9
"""A number in which a float32 score is lost when it is added."""
_LOGICAL = ("and", "or", "not")
Interval = tuple[np.ndarray, np.ndarray]
"""The least and the largest that an element may be, for each tile."""
_ANY: Interval = (np.full((), -np.inf), np.full((), np.inf))
PLACES = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose")
"""Operations that move the elements of an array, or change its type."""
_KEPT = (*PLACES, "stop_gradient")


class Spans(NamedTuple):
  """Blocks of a dim: its name, where the blocks start, and their lengths."""

  name: DimName
  starts: np.ndarray
  sizes: np.ndarray | int


class Hidden:
  """Evaluates values of a flat program on intervals, for all tiles at once.

  A tile is a block of queries and a block of keys. The starts of both are broadcast against each other.
  With `products=0`, products are taken for 0: what then is not hidden for sure, a mask leaves visible.
  """

  def __init__(
    self,
    body: Jaxpr,
    lengths: Mapping[DimName, int],
    rows: Spans,
    columns: Spans,
    products: float | None = None,
  ):
    self._products = _ANY if products is None else (np.full((), products), np.full((), products))
    self._lengths, self._spans = lengths, {spans.name: spans for spans in (rows, columns)}
    self._shape = np.broadcast_shapes(rows.starts.shape, columns.starts.shape)
    self._made = makers(body)
    self._known: dict[Node, Interval] = {}

  def bounds(self, var: Var, labels: Labels) -> Interval:
    """The least and the largest that the elements of each tile of a value may be."""
    low, high = self._interval(var, tuple(label for label in labels if label[0] in self._spans))
    return np.broadcast_to(low, self._shape), np.broadcast_to(high, self._shape)

  def _interval(self, var: Var, labels: Labels) -> Interval:
    if isinstance(var, core.Literal):
      dtype: np.dtype[Any] = var.aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
      is_one = jnp.ndim(var.val) == 0 and isinstance(dtype, np.dtype) and dtype.kind in "biufV"
      number = np.full((), float(var.val) if is_one else 0.0)
      return (number, number) if is_one else _ANY
    if (var, labels) not in self._known:
      with np.errstate(all="ignore"):
        low, high = self._made_of(self._made.get(var), labels)
      self._known[var, labels] = _representable(low, high, var.aval.dtype)
    return self._known[var, labels]

  def _made_of(self, eqn: JaxprEqn | None, labels: Labels) -> Interval:
    if eqn is None:
      return _ANY
    name = eqn.primitive.name
    if name == "dot_general":
      return self._products
    if name == "iota":
      return self._positions(eqn, labels)
    if (name not in _RULES and name not in _KEPT) or (name in _LOGICAL and eqn.outvars[0].aval.dtype != bool):
      return _ANY
    try:
      wanted = pull(eqn, labels, self._lengths)
    except Untiled:
      return _ANY
    given = [self._interval(var, own) for var, own in zip(eqn.invars, wanted, strict=True)]
    if name == "convert_element_type":
      return _convert(eqn, given[0])
    if name == "div" and not is_inexact(eqn.outvars[0].aval):
      low, high = _divide(*given)
      return np.trunc(low), np.trunc(high)
    if name in ("add", "sub", "mul", "div"):
      return _round(*_RULES[name](*given), eqn.outvars[0].aval.dtype)
    return given[0] if name in _KEPT else _RULES[name](*given)

  def _positions(self, eqn: JaxprEqn, labels: Labels) -> Interval:
    dim, length = eqn.params["dimension"], eqn.params["shape"][eqn.params["dimension"]]
    own = next((name for name, d, _ in labels if d == dim), None)
    if own is None or self._lengths[own] != length:
      return np.zeros(()), np.full((), length - 1.0)
    spans = self._spans[own]
    return spans.starts * 1.0, spans.starts + spans.sizes - 1.0


def fills_of(scores: Var, made: Mapping[Var, JaxprEqn]) -> tuple[set[float], bool]:
  """The numbers that masks put into scores, and whether such a number is added to something.

  Two masks that are added hide some scores once, and some twice:
  `s + where(causal, 0, low) + where(padding, 0, low)` has scores of low and of -inf. Where a number is added,
  a score that it hides still has a gradient.
  """
  found: dict[Var, set[float]] = {}
  added: list[Var] = []

  def fills(var: Var) -> set[float]:
    if isinstance(var, core.Literal):
      return {-abs(float(var.val))} if jnp.ndim(var.val) == 0 and abs(var.val) >= -HIDDEN else set()
    eqn = made.get(var)
    if eqn is None or not is_inexact(var.aval) or eqn.primitive.name not in (ELEMENTWISE | {*_KEPT}):
      return set()
    if var not in found:
      given = eqn.invars[eqn.primitive.name == "select_n" :]
      own = [x for x in map(fills, given) if x]
      twice = len(own) > 1 and eqn.primitive.name != "select_n"
      found[var] = set().union(*own, {-math.inf, math.nan} if twice else ())
      if own and eqn.primitive.name in ("add", "add_any", "sub") and math.isfinite(max(found[var])):
        added.append(var)
    return found[var]

  return fills(scores), bool(added)


class Seen(NamedTuple):
  """The keys that each query sees: all, or none that is later; of these, those less than `window` away."""

  causal: bool
  window: int | None


ALL = Seen(causal=False, window=None)


def seen_by(
  body: Jaxpr,
  masks: Sequence[tuple[Var, Labels, bool]],
  lengths: Mapping[DimName, int],
  row: DimName,
  column: DimName,
) -> Seen | None:
  """The rule of the masks of an attention, proved for each query and key; None if they have another rule."""
  rows, columns = lengths[row], lengths[column]

  def kept(tiles: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Whether the masks keep all scores of each tile, and whether they may keep some."""
    top, bottom, left, right = tiles
    hidden = Hidden(body, lengths, Spans(row, top, bottom - top), Spans(column, left, right - left))
    surely, maybe = np.ones(top.shape, bool), np.ones(top.shape, bool)
    for var, labels, is_kept in masks:
      low, high = hidden.bounds(var, labels)
      surely &= low > 0 if is_kept else high <= 0
      maybe &= high > 0 if is_kept else low <= 0
    return surely, maybe

  keys = np.arange(columns)
  first, last = (
    kept([np.full(columns, n), np.full(columns, n + 1), keys, keys + 1])[0] for n in (0, rows - 1)
  )
  if first.all() and last.all():
    seen = ALL
  elif rows == columns and not first[1:].any() and last.any():
    seen = Seen(causal=True, window=None if last.all() else int(last.sum()))
  elif rows == columns and first.any():
    seen = Seen(causal=False, window=int(first.sum()))
  else:
    return None
  *tiles, wanted = _tiles(seen, rows, columns)
  surely, maybe = kept(tiles)
  return seen if np.where(wanted, surely, ~maybe).all() else None


def _tiles(seen: Seen, rows: int, columns: int) -> np.ndarray:
  """Cuts the scores into tiles, of each of which a rule keeps all or none.

  Returns where the queries and the keys of each start and end, and whether the rule keeps its scores.
  """
  least, most = 0 if seen.causal else 1 - (seen.window or columns + 1), seen.window or rows
  found, todo = list[np.ndarray](), np.array([[0], [rows], [0], [columns]])
  while todo.size:
    top, bottom, left, right = todo
    nearest, farthest = top - right + 1, bottom - 1 - left  # how far a query is ahead of a key
    all_kept = (nearest >= least) & (farthest < most)
    done = all_kept | (farthest < least) | (nearest >= most)
    found.append(np.stack([*todo, all_kept])[:, done])
    top, bottom, left, right = todo[:, ~done]
    middle, center = (top + bottom + 1) // 2, (left + right + 1) // 2
    halves = ((top, middle), (middle, bottom)), ((left, center), (center, right))
    todo = np.concatenate([np.stack([*own, *other]) for own, other in itertools.product(*halves)], axis=1)
    todo = todo[:, (todo[0] < todo[1]) & (todo[2] < todo[3])]
  return np.concatenate(found, axis=1)


def _representable(low: np.ndarray, high: np.ndarray, dtype: np.dtype[Any]) -> Interval:
  """An interval as a dtype holds it: anything where it is unknown, would wrap around, or would be rounded."""
  unknown = np.isnan(low) | np.isnan(high)
  if dtype == np.bool_:
    return np.where(unknown, 0, low.clip(0)), np.where(unknown, 1, high.clip(max=1))
  if jnp.issubdtype(dtype, np.integer):
    unknown |= (low < jnp.iinfo(dtype).min) | (high > jnp.iinfo(dtype).max)
  elif jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits < 32:
    unknown |= (high > 256) | (low < -256)
  return np.where(unknown, -np.inf, low), np.where(unknown, np.inf, high)


def _round(low: np.ndarray, high: np.ndarray, dtype: np.dtype[Any]) -> Interval:
  """An interval, widened by the rounding of a float operation."""
  if not jnp.issubdtype(dtype, np.floating):
    return low, high
  slack = 4 * float(jnp.finfo(dtype).eps)
  return (
    np.where(np.isfinite(low), low - slack * abs(low), low),
    np.where(np.isfinite(high), high + slack * abs(high), high),
  )


def _convert(eqn: JaxprEqn, given: Interval) -> Interval:
  before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
  if after == np.bool_ and before != np.bool_:  # whether it is not 0
    low, high = given
    return ((low > 0) | (high < 0)) * 1.0, ((low != 0) | (high != 0)) * 1.0
  if is_inexact(eqn.invars[0].aval) and not is_inexact(eqn.outvars[0].aval):
    return np.trunc(given[0]), np.trunc(given[1])
  return given


def _corners(function: Callable[..., np.ndarray]) -> Callable[..., Interval]:
  """The rule of an operation that rises or falls with each operand: its extremes are at theirs."""

  def rule(*given: Interval) -> Interval:
    found = np.stack(np.broadcast_arrays(*(function(*ends) * 1.0 for ends in itertools.product(*given))))
    return found.min(0), found.max(0)

  return rule


def _add(x: Interval, y: Interval) -> Interval:
  """A sum. An unknown value vanishes next to a far lower value: a mask that is added to scores."""
  low, high = x[0] + y[0], x[1] + y[1]
  for one, other in ((x, y), (y, x)):
    lost = np.isposinf(one[1]) & (other[1] <= _ABSORBING)
    high = np.where(lost, other[1], high)
  return low, high


def _divide(x: Interval, y: Interval) -> Interval:
  if not (y[0] > 0).all():
    return _ANY
  return _corners(operator.truediv)(x, y)


def _select(which: Interval, *cases: Interval) -> Interval:
  if len(cases) != 2:
    return _ANY
  (first, second), (maybe, surely) = cases, (which[1] > 0, which[0] > 0)
  low = np.where(surely, second[0], np.where(maybe, np.minimum(first[0], second[0]), first[0]))
  return low, np.where(surely, second[1], np.where(maybe, np.maximum(first[1], second[1]), first[1]))


def _absolute(x: Interval) -> Interval:
  return np.where((x[0] <= 0) & (x[1] >= 0), 0, np.minimum(abs(x[0]), abs(x[1]))), np.maximum(-x[0], x[1])


def _equal(x: Interval, y: Interval) -> Interval:
  alone = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
  return alone * 1.0, ((x[0] <= y[1]) & (y[0] <= x[1])) * 1.0


def _not(x: Interval) -> Interval:
  return 1 - x[1], 1 - x[0]


_RULES: Mapping[str, Callable[..., Interval]] = {
  "abs": _absolute,
  "add": _add,
  "div": _divide,
  "eq": _equal,
  "ne": lambda x, y: _not(_equal(x, y)),
  "not": _not,
  "select_n": _select,
  "sub": lambda x, y: _add(x, (-y[1], -y[0])),
  **{name: _corners(getattr(operator, name)) for name in ("ge", "gt", "le", "lt", "mul", "neg")},
  **dict.fromkeys(("and", "min"), _corners(np.minimum)),
  **dict.fromkeys(("max", "or"), _corners(np.maximum)),
  "sign": _corners(np.sign),
}
assert _RULES.keys() <= ELEMENTWISE
