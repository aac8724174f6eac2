"""Evaluates programs in numpy: one device's program on all devices at once, with its collectives.

For programs right before and right after a partitioner: no fusions of a backend, no memory layouts.
All floating point numbers are float64. Arrays are thinned (`thin.Thinning`); the first dim of a value counts
devices, and is 1 where all hold the same. None stands for a value that cannot be followed: that of an
operation which is not known here, or one that is too large.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from einops import rearrange

from nnx_parallel.report.program import hlo, thin
from nnx_parallel.report.program.devices import Tiling, group_rows, pairs_of, read_tiling

Array = npt.NDArray[Any]
Value = Any
"""An array, a tuple of values, or None: not known."""

# Limits: numbers of one array on all devices, operations run, and multiplications; each number of a result
# counts as `_EACH` multiplications of a matrix product.
_LARGEST, _LONGEST, _HARDEST, _EACH = 2**25, 300_000, 2**35, 16
ENDS = 2
"""Passes at each end of a loop that is run in part: what passes hand on is seen, in both directions."""
_TOO_MUCH = "a program that computes too much"
_DTYPES: Mapping[str, Any] = {
  "pred": np.bool_, "s8": np.int8, "u8": np.uint8, "s16": np.int16, "u16": np.uint16, "s32": np.int32,
  "u32": np.uint32, "s64": np.int64, "u64": np.uint64,
}  # fmt: skip
_UNARY: Mapping[str, Callable[..., Any]] = {
  "abs": np.abs, "cbrt": np.cbrt, "ceil": np.ceil, "cosine": np.cos, "exponential": np.exp,
  "exponential-minus-one": np.expm1, "floor": np.floor, "is-finite": np.isfinite, "log": np.log,
  "log-plus-one": np.log1p, "negate": np.negative, "round-nearest-even": np.rint, "sign": np.sign,
  "sine": np.sin, "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh, "copy": np.asarray,
  "logistic": lambda x: 1 / (1 + np.exp(-x)), "rsqrt": lambda x: 1 / np.sqrt(x),
  "round-nearest-afz": lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5),
  "erf": np.vectorize(math.erf, otypes=[np.float64]), "popcnt": np.bitwise_count,
  "reduce-precision": np.asarray, "not": np.invert,
}  # fmt: skip


def _quotient(x: Array, y: Array) -> Array:
  if x.dtype.kind == "f":
    return x / y
  y = np.where(y == 0, y.dtype.type(1), y)
  down = x // y
  return down + ((down < 0) & (down * y != x))  # towards zero


def _shifted(shift: Callable[..., Any], arithmetic: bool = False) -> Callable[[Array, Array], Array]:
  def run(x: Array, y: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    kind = np.dtype(f"{'i' if arithmetic else 'u'}{x.dtype.itemsize}")
    over = y.astype(np.uint64) >= bits
    moved = shift(x.view(kind), np.where(over, 0, y).astype(kind))
    beyond = x.view(kind) >> kind.type(bits - 1) if arithmetic else kind.type(0)
    return np.where(over, beyond, moved).astype(kind).view(x.dtype)

  return run


_BINARY: Mapping[str, Callable[..., Any]] = {
  "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
  "minimum": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
  "divide": _quotient,
  "remainder": np.fmod, "power": np.power, "atan2": np.arctan2, "shift-left": _shifted(np.left_shift),
  "shift-right-logical": _shifted(np.right_shift),
  "shift-right-arithmetic": _shifted(np.right_shift, arithmetic=True),
}  # fmt: skip
# Those by which numpy reduces whole dims.
_COMBINERS = frozenset(("add", "multiply", "maximum", "minimum", "and", "or", "xor"))


class Finer(Exception):
  """An array is sliced where its thinning does not allow it: at a multiple of `step` along `dim`."""

  def __init__(self, node: thin.Node, dim: int, step: int):
    super().__init__(f"{node} along {dim}")
    self.node, self.dim, self.step = node, dim, step


class Evaluator:
  """Runs one program.

  Args:
    program: parsed.
    number: of the program in `thinning`.
    thinning: of all arrays.
    devices: in all.
    shortened: loops (JAX name, stack frame) of which only the first and last `ENDS` passes are run.
    watch: called with each instruction that has run, and its value.

  Attributes:
    lost: opcode or custom call -> how often it was not known.
    unequal: ends of a `shard_map` that call a value replicated that differs between devices.
  """

  def __init__(
    self,
    program: hlo.Program,
    number: int,
    thinning: thin.Thinning,
    devices: int,
    shortened: Collection[tuple[str, int]] = (),
    watch: Callable[[hlo.Computation, hlo.Instruction, Value], None] | None = None,
  ):
    self._program, self._number, self._thinning, self._devices = program, number, thinning, devices
    self._runs = self._work = 0
    self.lost: dict[str, int] = {}
    self._shortened, self._watch = shortened, watch
    self._rules: Mapping[str, Callable[..., Value]] = {
      "partition-id": lambda *_: np.arange(devices, dtype=np.uint32),
      "replica-id": lambda *_: np.zeros(1, np.uint32),
      "constant": self._constant, "iota": self._iota, "broadcast": self._broadcast, "reshape": self._reshape,
      "transpose": self._reordered, "reverse": self._reordered,
      "concatenate": self._concatenate, "pad": self._pad, "slice": self._slice,
      "dynamic-slice": self._dynamic_slice, "dynamic-update-slice": self._update, "reduce": self._reduce,
      "dot": self._dot, "convolution": self._convolution, "reduce-window": self._window,
      "select-and-scatter": self._select, "gather": self._gather, "scatter": self._scatter,
      "sort": self._sort, "all-reduce": self._exchange, "all-gather": self._exchange,
      "reduce-scatter": self._exchange, "all-to-all": self._exchange,
      "collective-permute": self._permute, "custom-call": self._custom, "topk": self._topk,
    }  # fmt: skip
    self._constants: dict[tuple[str, str], Array] = {}
    self.unequal: list[hlo.Instruction] = []

  def run(self, arguments: Mapping[int, Value]) -> tuple[Value, ...]:
    """The results of the entry, one for each array, for the values of its parameters by number."""
    entry = self._program.entry
    count = 1 + max(arguments, default=-1)
    with np.errstate(all="ignore"):
      result = self._call(entry, [arguments.get(n) for n in range(count)])
    return result if isinstance(result, tuple) else (result,)

  # Control ------------------------------------------------------------------------------------

  def _call(self, computation: hlo.Computation, arguments: Sequence[Value]) -> Value:
    values: dict[str, Value] = {}
    for at in computation.instructions:
      self._runs += 1
      if at.opcode == "parameter":
        values[at.name] = arguments[int(at.arguments)]
      elif self._runs > _LONGEST:
        values[at.name] = self._lose(at, "a program that runs too many operations")
      else:
        values[at.name] = self._step(computation, at, [values[name] for name in at.operands])
      if self._watch is not None:
        self._watch(computation, at, values[at.name])
      for name in computation.last_read.get(at.name, ()):
        del values[name]
    return values[computation.root.name]

  def _step(self, computation: hlo.Computation, at: hlo.Instruction, inputs: list[Value]) -> Value:
    opcode = at.opcode
    if opcode == "tuple":
      return tuple(inputs)
    if opcode == "get-tuple-element":
      return inputs[0][int(at.attribute("index"))] if isinstance(inputs[0], tuple) else None
    if opcode == "opt-barrier":
      return inputs[0] if len(inputs) == 1 else tuple(inputs)
    if opcode in ("call", "fusion"):
      return self._call(self._program.computations[at.called[0]], inputs)
    if opcode == "while":
      return self._loop(at, inputs[0])
    if opcode == "conditional":
      return self._branch(at, inputs)
    rule = self._rules.get(opcode)
    if rule is None and opcode not in thin.ELEMENTWISE:
      return self._lose(at, opcode)
    if any(value is None for value in inputs) or self._too_large(computation, at):
      return self._unknown(at)
    try:
      return (rule or self._elementwise)(computation, at, *inputs)
    except (ValueError, LookupError, TypeError):
      return self._lose(at, f"a form of {opcode} that is not known")

  def _unknown(self, at: hlo.Instruction) -> Value:
    return (None,) * len(at.shapes) if at.result.startswith("(") else None

  def _lose(self, at: hlo.Instruction, what: str) -> Value:
    self.lost[what] = self.lost.get(what, 0) + 1
    return self._unknown(at)

  def _too_large(self, computation: hlo.Computation, at: hlo.Instruction) -> bool:
    devices = self._devices if self._number else 1
    for index in range(len(at.shapes)):
      size = math.prod(self._shape(computation, at, index)) * devices
      if size > _LARGEST or self._exceeds(_EACH * size):
        self._lose(at, "an array that is too large" if size > _LARGEST else _TOO_MUCH)
        return True
    return False

  def _exceeds(self, work: int) -> bool:
    """Whether the program computes too much with so many more multiplications."""
    self._work += work
    return self._work > _HARDEST

  def _loop(self, at: hlo.Instruction, state: Value) -> Value:
    condition = self._program.computations[at.attribute("condition").lstrip("%")]
    body = self._program.computations[at.attribute("body").lstrip("%")]
    bound = self._program.bound(at) if place_of(at) in self._shortened else None
    for passes in itertools.count():
      if self._runs > _LONGEST:
        break
      if bound is not None and passes == ENDS and isinstance(state, tuple):
        place, limit = bound
        if np.all(state[place] == ENDS):
          state = (*state[:place], np.full_like(state[place], limit - ENDS), *state[place + 1 :])
      again = self._call(condition, [state])
      if again is None or (again != again.flat[0]).any():
        return self._lose(at, "a loop whose length is not known")
      if not again.flat[0]:
        return state
      state = self._call(body, [state])
    return self._lose(at, "a program that runs too many operations")

  def _branch(self, at: hlo.Instruction, inputs: list[Value]) -> Value:
    chosen, given = inputs[0], inputs[1:]
    if chosen is None:
      return self._lose(at, "a conditional on a value that is not known")
    names = at.called
    number = np.where(chosen, 0, 1) if chosen.dtype == np.bool_ else np.clip(chosen, 0, len(names) - 1)
    results = {
      n: self._call(self._program.computations[names[n]], [given[n]]) for n in map(int, np.unique(number))
    }
    if len(results) == 1:
      return next(iter(results.values()))

    def pick(*values: Value) -> Value:
      if any(value is None for value in values):
        return None
      each = np.stack(np.broadcast_arrays(*map(self._everywhere, values)))
      return each[np.searchsorted([*results], self._everywhere(number)), np.arange(self._devices)]

    return jax.tree.map(pick, *results.values(), is_leaf=lambda value: value is None)

  def _everywhere(self, value: Array) -> Array:
    return np.broadcast_to(value, (self._devices, *value.shape[1:]))

  def _shape(self, computation: hlo.Computation, at: hlo.Instruction, index: int = 0) -> tuple[int, ...]:
    return self._thinning.shape(self._number, computation.name, at.name, index)

  def _scales(self, computation: hlo.Computation, name: str) -> tuple[int, ...]:
    return self._thinning.scales(self._number, computation.name, name)

  # Elementwise --------------------------------------------------------------------------------

  def _elementwise(self, computation: hlo.Computation, at: hlo.Instruction, *inputs: Array) -> Value:
    rank = max(value.ndim for value in inputs)
    x, *others = (v if v.ndim == rank else v.reshape(v.shape[:1] + (1,) * (rank - 1)) for v in inputs)
    opcode, dtype = at.opcode, at.shapes[0].dtype
    if opcode in _UNARY:
      return _UNARY[opcode](x)
    if opcode in _BINARY:
      return _BINARY[opcode](x, *others)
    if opcode == "compare":
      return getattr(operator, at.attribute("direction").lower())(x, *others)
    if opcode == "select":
      return np.where(x, *others)
    if opcode == "clamp":
      return np.minimum(np.maximum(others[0], x), others[1])
    if opcode == "convert":
      return converted(x, dtype)
    if opcode == "bitcast-convert":
      return _same_bits(x, computation.by_name[at.operands[0]].shapes[0].dtype, dtype)
    return self._lose(at, opcode)

  # Arrays -------------------------------------------------------------------------------------

  def _constant(self, computation: hlo.Computation, at: hlo.Instruction, *inputs: Array) -> Value:
    key = (computation.name, at.name)
    if key not in self._constants:  # read in each pass of a loop
      value = literal(at)
      if value is None:
        return self._lose(at, "a constant that is not written out")
      self._constants[key] = value[np.ix_(*self._thinning.kept(self._number, *key))][None]
    return self._constants[key]

  def _iota(self, computation: hlo.Computation, at: hlo.Instruction, *inputs: Array) -> Value:
    dim = int(at.attribute("iota_dimension"))
    shape = self._shape(computation, at)
    line = np.array(self._thinning.kept(self._number, computation.name, at.name)[dim])
    line = line.reshape([-1 if n == dim else 1 for n in range(len(shape))])
    return converted(np.broadcast_to(line, shape)[None], at.shapes[0].dtype)

  def _broadcast(self, computation: hlo.Computation, at: hlo.Instruction, x: Array) -> Value:
    shape, places = self._shape(computation, at), at.numbers("dimensions")
    sizes = dict(zip(places, x.shape[1:], strict=True))
    x = x.transpose([0, *(1 + int(n) for n in np.argsort(places))]) if places else x
    return np.broadcast_to(x.reshape(len(x), *(sizes.get(n, 1) for n in range(len(shape)))), (len(x), *shape))

  def _reordered(self, computation: hlo.Computation, at: hlo.Instruction, x: Array) -> Value:
    dims = [1 + n for n in at.numbers("dimensions")]
    return x.transpose([0, *dims]) if at.opcode == "transpose" else np.flip(x, (*dims,))

  def _reshape(self, computation: hlo.Computation, at: hlo.Instruction, x: Array) -> Value:
    return x.reshape((len(x), *self._shape(computation, at)))

  def _concatenate(self, computation: hlo.Computation, at: hlo.Instruction, *inputs: Array) -> Value:
    return np.concatenate(_of_one_lead(*inputs), 1 + at.numbers("dimensions")[0])

  def _pad(self, computation: hlo.Computation, at: hlo.Instruction, x: Array, fill: Array) -> Value:
    rows = [
      (1, 1, low // scale, high // scale, inside + 1, 1, False)
      for (low, high, inside), scale in zip(thin.padding(at), self._scales(computation, at.name), strict=True)
    ]
    given = _padded(np.ones((1, *x.shape[1:]), np.bool_), rows)
    return np.where(given, _padded(x, rows), fill.reshape(-1, *[1] * (x.ndim - 1)))

  def _slice(self, computation: hlo.Computation, at: hlo.Instruction, x: Array) -> Value:
    rows = zip(
      thin.slice_bounds(at),
      self._scales(computation, at.operands[0]),
      self._scales(computation, at.name),
      self._thinning.kept(self._number, computation.name, at.name),
      strict=True,
    )
    for dim, ((start, stop, step), scale, after, kept) in enumerate(rows, 1):
      # Where the two are thinned differently, what is cut is whole.
      cut = slice(start // scale, stop // scale, step) if scale == after else start + np.array(kept) * step
      x = x[(slice(None),) * dim + (cut,)]
    return x

  def _starts(
    self, computation: hlo.Computation, at: hlo.Instruction, starts: Sequence[Array], sizes: Sequence[int]
  ) -> list[Array]:
    """Offsets of a dynamic slice in thinned positions, one for each device."""
    node = (self._number, computation.name, at.operands[0])
    whole = computation.by_name[at.operands[0]].shapes[0].dims
    found: list[Array] = []
    rows = zip(starts, self._thinning.scales(*node), self._thinning.grains(*node), strict=True)
    for dim, (start, scale, grain) in enumerate(rows):
      place = np.clip(start.astype(np.int64), 0, whole[dim] - sizes[dim])
      if scale > 1 and (place % (scale * grain)).any():
        raise Finer(node, dim, int(np.gcd.reduce(np.append(place, scale * grain))))
      found.append(place // scale)
    return found

  def _dynamic_slice(
    self, computation: hlo.Computation, at: hlo.Instruction, x: Array, *starts: Array
  ) -> Value:
    # Where the two are thinned differently, what is cut is whole.
    alike = self._scales(computation, at.operands[0]) == self._scales(computation, at.name)
    lines = (
      [np.arange(n) for n in self._shape(computation, at)]
      if alike
      else [np.array(kept) for kept in self._thinning.kept(self._number, computation.name, at.name)]
    )
    x, places = self._places(x, self._starts(computation, at, starts, at.shapes[0].dims), lines)
    return x[places]

  def _update(
    self, computation: hlo.Computation, at: hlo.Instruction, x: Array, update: Array, *starts: Array
  ) -> Value:
    sizes = computation.by_name[at.operands[1]].shapes[0].dims
    x, update = _of_one_lead(x, update)
    out, places = self._places(
      x, self._starts(computation, at, starts, sizes), [np.arange(n) for n in update.shape[1:]]
    )
    out = out.copy()
    out[places] = update
    return out

  def _places(self, x: Array, starts: Sequence[Array], lines: Sequence[Array]) -> tuple[Array, Any]:
    """An array, and positions in it on each device: those of `lines`, from its own start on."""
    if all(len(start) == 1 for start in starts) and all((np.diff(line) == 1).all() for line in lines):
      cut = (slice(int(s[0]), int(s[0]) + len(line)) for s, line in zip(starts, lines, strict=True))
      return x, (slice(None), *cut)
    rank = len(lines)
    places = [
      start.reshape(-1, *[1] * rank) + line.reshape([-1 if d == dim else 1 for d in range(rank)])
      for dim, (start, line) in enumerate(zip(starts, lines, strict=True))
    ]
    return self._everywhere(x), (np.arange(self._devices).reshape(-1, *[1] * rank), *places)

  # Sums and products --------------------------------------------------------------------------

  def _combiner(self, name: str) -> Any:
    """The numpy function of a region that is one of `_COMBINERS`, or None."""
    region = self._program.computations[name]
    work = [i for i in region.instructions if i.opcode not in ("parameter", "convert", "copy")]
    if len(work) == 1 and len(set(work[0].operands)) == 2 and work[0].opcode in _COMBINERS:
      return _BINARY[work[0].opcode]
    return None

  def _reduce(self, computation: hlo.Computation, at: hlo.Instruction, *inputs: Array) -> Value:
    count = len(inputs) // 2
    return self._folded(at, inputs[:count], inputs[count:], [1 + n for n in at.numbers("dimensions")])

  def _folded(
    self, at: hlo.Instruction, arrays: Sequence[Array], starts: Sequence[Array], dims: Sequence[int]
  ) -> Value:
    """What the region of a reduction makes of some dims."""
    found, region = self._combiner(at.called[0]), self._program.computations[at.called[0]]
    if found is not None and len(arrays) == 1:
      total = arrays[0]
      for dim in sorted(dims, reverse=True):
        total = found.reduce(total, dim, dtype=total.dtype if total.shape[dim] else None)
      return found(total, starts[0].reshape(-1, *[1] * (total.ndim - 1)))
    kept = [d for d in range(1, arrays[0].ndim) if d not in dims]
    flat = [x.transpose([0, *kept, *dims]) for x in _of_one_lead(*arrays)]
    flat = [x.reshape((*x.shape[: 1 + len(kept)], -1)) for x in flat]
    total: Value = tuple(
      np.broadcast_to(s.reshape(-1, *[1] * len(kept)), x.shape[:-1])
      for s, x in zip(starts, flat, strict=True)
    )
    for place in range(flat[0].shape[-1]):
      given = total if isinstance(total, tuple) else (total,)
      total = self._call(region, [*given, *(x[..., place] for x in flat)])
    return total if at.result.startswith("(") or not isinstance(total, tuple) else total[0]

  def _dot(
    self, computation: hlo.Computation, at: hlo.Instruction, left: Array, right: Array, *_: Array
  ) -> Value:
    sides = thin.dot_dims(at)

    def arranged(x: Array, batch: list[int], summed: list[int], first: bool) -> Array:
      free = [n for n in range(x.ndim - 1) if n not in batch + summed]
      parts = (batch, free, summed) if first else (batch, summed, free)
      sizes = [math.prod(x.shape[1 + n] for n in part) for part in parts]
      return x.transpose([0, *(1 + n for part in parts for n in part)]).reshape((len(x), *sizes))

    one = arranged(left, sides["lhs_batch"], sides["lhs"], True)
    other = arranged(right, sides["rhs_batch"], sides["rhs"], False)
    if self._exceeds(max(len(one), len(other)) * one[0].size * other.shape[-1]):
      return self._lose(at, _TOO_MUCH)
    product = one @ other
    return product.reshape((len(product), *self._shape(computation, at)))

  def _convolution(self, computation: hlo.Computation, at: hlo.Instruction, x: Array, k: Array) -> Value:
    left, kernel, out = thin.labels(at)
    groups, batches = thin.group_counts(at)
    dims = ["b", "f", *map(str, range(len(left) - 2))]
    rows = thin.windows(at, len(dims) - 2) if len(dims) > 2 else []
    x = _padded(x.transpose([0, *(1 + left.index(c) for c in dims)]), rows)
    k = k.transpose([0, *(1 + kernel.index(c) for c in ("o", "i", *dims[2:]))])
    k = np.flip(k, tuple(3 + d for d, row in enumerate(rows) if row[6]))
    shape = self._shape(computation, at)
    sizes = [shape[out.index(c)] for c in dims]
    if self._exceeds(max(len(x), len(k)) * math.prod(shape) * math.prod(k.shape[2:]) // (groups * batches)):
      return self._lose(at, _TOO_MUCH)
    views = _windows(x, rows)
    if views.size > 2 * _LARGEST:
      return self._lose(at, "an array that is too large")
    flat = views.reshape((*views.shape[:3], math.prod(sizes[2:]), -1))
    flat = rearrange(flat, "z (B b) (G f) p w -> z B G (b p) (f w)", B=batches, G=groups)
    k = rearrange(k.reshape((*k.shape[:3], -1)), "z (B G o) i w -> z B G (i w) o", B=batches, G=groups)
    made = rearrange(flat @ k, "z B G (b p) o -> z b (B G o) p", b=sizes[0])
    made = made.reshape((len(made), *sizes))
    return made.transpose([0, *(1 + dims.index(c) for c in out)])

  def _window(self, computation: hlo.Computation, at: hlo.Instruction, *inputs: Array) -> Value:
    count, rank = len(inputs) // 2, inputs[0].ndim - 1
    rows = thin.windows(at, rank)
    if any(row[4] != 1 for row in rows):
      return self._lose(at, at.opcode)
    if self._exceeds(math.prod(self._shape(computation, at)) * math.prod(row[0] for row in rows)):
      return self._lose(at, _TOO_MUCH)
    arrays, starts = inputs[:count], inputs[count:]
    views = [_windows(_padded(x, rows, s.flat[0]), rows) for x, s in zip(arrays, starts, strict=True)]
    return self._folded(at, views, starts, range(1 + rank, 1 + 2 * rank))

  def _select(
    self, computation: hlo.Computation, at: hlo.Instruction, x: Array, source: Array, start: Array
  ) -> Value:
    """The gradient of a pooling: each number goes to the position that was chosen in its window."""
    rows = thin.windows(at, x.ndim - 1)
    combine, region = self._combiner(at.called[1]), self._program.computations[at.called[0]]
    if combine is None:
      return self._lose(at, at.opcode)
    x, source, _ = _of_one_lead(x, source, start)
    numbers = np.arange(x.size).reshape(x.shape)
    values, places, inside = (
      _windows(_padded(y, rows), rows).reshape((*source.shape, -1))
      for y in (x, numbers, np.ones(x.shape, np.bool_))
    )
    best, place, found = values[..., 0], places[..., 0], inside[..., 0]
    for n in range(1, values.shape[-1]):
      stays = np.broadcast_to(self._call(region, [best, values[..., n]]), source.shape)
      takes = inside[..., n] & (~found | ~stays)
      best, place = np.where(takes, values[..., n], best), np.where(takes, places[..., n], place)
      found = found | takes
    made = np.full(x.size, start.flat[0])
    combine.at(made, place[found], source[found])
    return made.reshape(x.shape)

  # Indices ------------------------------------------------------------------------------------

  def _indexed(
    self, computation: hlo.Computation, at: hlo.Instruction, indices: Array, sizes: Sequence[int]
  ) -> tuple[list[Array], Array, tuple[int, ...]]:
    """Positions along each dim of the operand (devices, *rows, *window), which rows are inside, the rows."""
    found = thin.gather_dims(at)
    scales = self._scales(computation, at.operands[0])
    whole = computation.by_name[at.operands[0]].shapes[0].dims
    vector = found.index_vector_dim
    x = indices[..., None] if vector == indices.ndim - 1 else np.moveaxis(indices, 1 + vector, -1)
    rows, rank = x.shape[1:-1], len(whole)
    inside = np.ones(x.shape[:-1], np.bool_)
    places: list[Array] = []
    row_dims = [n for n in range(indices.ndim - 1) if n != vector]
    for dim in range(rank):
      size = sizes[dim] // scales[dim] if sizes[dim] == whole[dim] else sizes[dim]
      start: Array = np.zeros((1,) * (1 + len(rows)), np.int64)
      if dim in found.start_index_map:
        exact = x[..., found.start_index_map.index(dim)].astype(np.int64)
        inside &= (exact >= 0) & (exact <= whole[dim] - sizes[dim])
        start = np.clip(exact, 0, whole[dim] - sizes[dim]) // scales[dim]
      elif dim in found.operand_batching_dims:
        row = found.start_indices_batching_dims[found.operand_batching_dims.index(dim)]
        line = np.arange(rows[row_dims.index(row)])
        start = line.reshape([1, *(-1 if n == row else 1 for n in row_dims)])
      step = np.arange(size).reshape([-1 if d == dim else 1 for d in range(rank)])
      places.append(start.reshape(*start.shape, *[1] * rank) + step)
    return places, inside, rows

  def _gather(self, computation: hlo.Computation, at: hlo.Instruction, x: Array, indices: Array) -> Value:
    found = thin.gather_dims(at)
    sizes = at.numbers("slice_sizes")
    places, _, rows = self._indexed(computation, at, indices, sizes)
    x, indices = _of_one_lead(x, indices)
    devices = np.arange(len(x)).reshape(-1, *[1] * (len(rows) + len(sizes)))
    taken = x[(devices, *places)]
    window = (n for d, n in enumerate(taken.shape[1 + len(rows) :]) if d not in found.absent)
    taken = taken.reshape((len(x), *rows, *window))
    shape = self._shape(computation, at)
    order = [n for n in range(len(shape)) if n not in found.offset_dims] + found.offset_dims
    return taken.transpose([0, *(1 + int(n) for n in np.argsort(order))])

  def _scatter(self, computation: hlo.Computation, at: hlo.Instruction, *inputs: Array) -> Value:
    found = thin.gather_dims(at)
    combine, region = self._combiner(at.called[0]), self._program.computations[at.called[0]]
    overwrites = region.root.opcode == "parameter" and region.root.arguments == "1"
    if len(inputs) != 3 or (combine is None and not overwrites):
      return self._lose(at, at.opcode)
    x, indices, updates = inputs
    rank, given = x.ndim - 1, computation.by_name[at.operands[2]].shapes[0].dims
    sizes = found.slice_sizes((given[d] for d in found.offset_dims), rank)
    places, inside, rows = self._indexed(computation, at, indices, sizes)
    x, updates, _ = _of_one_lead(x, updates, indices)
    scattered = [n for n in range(updates.ndim - 1) if n not in found.offset_dims]
    moved = updates.transpose([0, *(1 + n for n in (*scattered, *found.offset_dims))])
    window = found.slice_sizes(moved.shape[1 + len(rows) :], rank)
    full = (len(x), *rows, *window)
    devices = np.arange(len(x)).reshape(-1, *[1] * (len(full) - 1))
    kept = np.broadcast_to(inside.reshape((*inside.shape, *[1] * rank)), full)
    at_all = tuple(np.broadcast_to(place, full)[kept] for place in (devices, *places))
    values, out = moved.reshape(full)[kept], x.copy()
    if combine is None:
      out[at_all] = values
    else:
      combine.at(out, at_all, values.astype(out.dtype))
    return out

  def _sort(self, computation: hlo.Computation, at: hlo.Instruction, *inputs: Array) -> Value:
    dim = 1 + at.numbers("dimensions")[0]
    arrays = [np.moveaxis(x, dim, -1) for x in _of_one_lead(*inputs)]
    if arrays[0].size * arrays[0].shape[-1] > _LARGEST:
      return self._lose(at, "a sort that is too large")
    pairs = [side for x in arrays for side in (x[..., :, None], x[..., None, :])]
    before = self._call(self._program.computations[at.called[0]], pairs)
    if before is None:
      return self._unknown(at)
    before = np.broadcast_to(before, (*arrays[0].shape, arrays[0].shape[-1]))
    earlier = np.tri(arrays[0].shape[-1], k=-1, dtype=np.bool_)  # [i, j]: j < i
    after = np.swapaxes(before, -1, -2)
    rank = (after | (~before & earlier)).sum(-1)
    made = tuple(np.empty_like(x) for x in arrays)
    for x, ranked in zip(arrays, made, strict=True):
      np.put_along_axis(ranked, rank, x, -1)
    made = tuple(np.moveaxis(x, -1, dim) for x in made)
    return made if at.result.startswith("(") else made[0]

  # Devices ------------------------------------------------------------------------------------

  def _exchange(self, computation: hlo.Computation, at: hlo.Instruction, *inputs: Array) -> Value:
    rows = np.array(group_rows(at.rest, self._devices))  # groups, members
    combine = self._combiner(at.called[0]) if at.called else None
    if combine is None and at.opcode in ("all-reduce", "reduce-scatter"):
      return self._lose(at, at.opcode)
    parts = [self._everywhere(x)[rows] for x in inputs]
    dim = next(iter(at.numbers("dimensions")), 0)
    if not at.numbers("dimensions") and at.opcode == "all-to-all":  # member n sends its array m to member m
      results = list(np.stack(parts).swapaxes(0, 2))
    else:
      results = [self._exchanged(at.opcode, x, dim, combine) for x in parts]
    made = tuple(
      np.zeros((self._devices, *x.shape[2:]), old.dtype) for old, x in zip(inputs, results, strict=True)
    )
    for whole, x in zip(made, results, strict=True):
      whole[rows] = x
    return made if at.result.startswith("(") else made[0]

  def _exchanged(self, opcode: str, x: Array, dim: int, combine: Any) -> Array:
    """What each member of each group has afterwards; `x` is (groups, members, *dims)."""
    count = x.shape[1]
    if opcode == "all-gather":
      return np.repeat(np.concatenate(np.moveaxis(x, 1, 0), 1 + dim)[:, None], count, 1)
    if opcode == "all-to-all":
      sent = np.stack(np.split(x, count, 2 + dim), 1)  # groups, targets, sources, *dims
      return np.concatenate(np.moveaxis(sent, 2, 0), 2 + dim)
    total = combine.reduce(x, 1)
    if opcode == "reduce-scatter":
      return np.stack(np.split(total, count, 1 + dim), 1)
    return np.repeat(total[:, None], count, 1)

  def _permute(self, computation: hlo.Computation, at: hlo.Instruction, x: Array) -> Value:
    made = np.zeros((self._devices, *x.shape[1:]), x.dtype)
    for source, target in pairs_of(at.attribute("source_target_pairs")):
      made[target] = self._everywhere(x)[source]
    return made

  def _custom(self, computation: hlo.Computation, at: hlo.Instruction, *inputs: Array) -> Value:
    target = at.attribute("custom_call_target").strip('"')
    if target in ("Sharding", "annotate_device_placement", "LayoutConstraint", "MoveToHost", "MoveToDevice"):
      return inputs[0]
    if target == "TopK":
      return self._topk(computation, at, inputs[0])
    if target not in ("SPMDFullToShardShape", "SPMDShardToFullShape"):
      return self._lose(at, target)
    begins = target == "SPMDFullToShardShape"
    # Where a `shard_map` begins, the layout is that of the operand: the call itself is marked as manual.
    placed = computation.by_name[at.operands[0]] if begins else at
    tiling = read_tiling(placed.attribute("sharding"), self._devices)
    if tiling is None:
      return self._lose(at, "a shard_map over some of the axes")
    x, shape = self._everywhere(inputs[0]), self._shape(computation, at)
    return blocks(x, corners(tiling, shape), shape) if begins else self._joined(at, x, tiling, shape)

  def _topk(self, computation: hlo.Computation, at: hlo.Instruction, x: Array) -> Value:
    count = self._shape(computation, at)[-1]
    order = np.argsort(x if at.attribute("largest") == "false" else -x, -1, kind="stable")[..., :count]
    return np.take_along_axis(x, order, -1), order.astype(np.int32)

  def _joined(self, at: hlo.Instruction, x: Array, tiling: Tiling, shape: tuple[int, ...]) -> Value:
    """The whole array of the blocks that the devices have computed, where a `shard_map` ends."""
    whole, seen = np.zeros((1, *shape), x.dtype), np.zeros(shape, np.bool_)
    for start, block in zip(corners(tiling, x.shape[1:]), x, strict=True):
      cut = tuple(slice(int(a), int(a) + n) for a, n in zip(start, block.shape, strict=True))
      if seen[cut].all() and seen[cut].size and not np.allclose(whole[(0, *cut)], block, 1e-6, 1e-12, True):
        self.unequal.append(at)
      whole[(0, *cut)], seen[cut] = block, True
    return whole


def place_of(at: hlo.Instruction) -> tuple[str, int]:
  """What identifies an operation in several programs: its JAX name and stack frame."""
  return at.op_name, at.frame


def converted(x: Array, dtype: str) -> Array:
  """An array in another HLO type; floating point types are all float64 here."""
  target = _DTYPES.get(dtype)
  if target is None:
    return x.astype(np.complex128 if dtype.startswith("c") else np.float64)
  if target is np.bool_:
    return x != 0
  return np.nan_to_num(x).astype(np.int64).astype(target) if x.dtype.kind == "f" else x.astype(target)


def literal(at: hlo.Instruction) -> Array | None:
  """The value of a `constant`; None where the text leaves it out."""
  shape = at.shapes[0]
  if "..." in at.arguments:
    return None
  words = re.sub(r"/\*.*?\*/|[{}]", " ", at.arguments).replace(",", " ").split()
  if shape.dtype == "pred":
    values = np.array([word in ("true", "1") for word in words])
  elif shape.dtype in _DTYPES:
    values = np.array([int(word) for word in words]).astype(_DTYPES[shape.dtype])
  else:
    values = np.array([float(word) for word in words])
  return values.reshape(shape.dims)


def corners(tiling: Tiling, shape: Sequence[int]) -> Array:
  """(devices, dims): where the blocks of an array start, in thinned positions; `shape` is that of a block."""
  if not tiling.parts:
    return np.zeros((len(tiling.blocks), len(shape)), np.int64)
  return tiling.blocks * np.array(shape, np.int64)


def blocks(whole: Array, starts: Array, shape: Sequence[int]) -> Array:
  """(devices, *shape): the block of each device; beyond the array, zeros."""
  made = np.zeros((len(starts), *shape), whole.dtype)
  for device, corner in enumerate(starts):
    source = whole[device if len(whole) > 1 else 0]
    part = source[tuple(slice(int(a), int(a) + n) for a, n in zip(corner, shape, strict=True))]
    made[(device, *map(slice, part.shape))] = part
  return made


def _same_bits(x: Array, source: str, target: str) -> Array:
  """An array's bits read as another HLO type of the same size."""
  kinds = {**_DTYPES, "f32": np.float32, "f64": np.float64}
  before, after = np.dtype(kinds[source]), np.dtype(kinds[target])
  if before.itemsize != after.itemsize:
    raise ValueError(f"{source} and {target} differ in size")
  return converted(np.ascontiguousarray(x, before).view(after), target)


def _of_one_lead(*arrays: Array) -> list[Array]:
  """Arrays that all count devices in their first dim where one of them does."""
  lead = max(map(len, arrays))
  return [np.broadcast_to(x, (lead, *x.shape[1:])) for x in arrays]


def _padded(x: Array, rows: Sequence[thin.Window], fill: Any = 0) -> Array:
  """An array with its last dims spaced and padded, or cut, by the rows of a window."""
  for d, (_, _, low, high, step, *_) in enumerate(rows, x.ndim - len(rows)):
    x = np.moveaxis(x, d, 0)
    spaced = np.full(((len(x) - 1) * step + 1, *x.shape[1:]), fill, x.dtype)
    spaced[::step] = x
    x = spaced[max(0, -low) : len(spaced) - max(0, -high)]
    x = np.pad(x, [(max(0, low), max(0, high)), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)
    x = np.moveaxis(x, 0, d)
  return x


def _windows(x: Array, rows: Sequence[thin.Window]) -> Array:
  """(..., *places, *window): a view of the last dims through each place of a window."""
  spans = [(row[0] - 1) * row[5] + 1 for row in rows]
  view = np.lib.stride_tricks.sliding_window_view(x, spans, tuple(range(x.ndim - len(rows), x.ndim)))
  strides = (slice(None, None, row[1]) for row in rows)
  return view[(..., *strides, *(slice(None, None, row[5]) for row in rows))]
