"""Evaluates programs in numpy: one device's program on all devices at once, with its collectives.

For programs right before and right after a partitioner: no fusions of a backend, no memory layouts. All
floating-point numbers are float64, and undefined values (0 / 0, the root of a negative number) are 0: random
arguments, and skipped passes of a loop, make such values. Arrays are thinned (`thin.Thinning`); the first dim
of a value counts devices, and is 1 if all devices hold the same value. None is an unknown value: the result
of an unsupported or too large operation.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax import lax

from nnx_parallel.core import hlo, hlo_dims
from nnx_parallel.core.hlo_devices import Tiling, group_rows, pairs_of, read_tiling
from nnx_parallel.verify import thin

Array = npt.NDArray[Any]
Value = Any
"""An array, a tuple of values, or None: not known."""
Watch = Callable[[hlo.Instruction, Value], None]

# Limits: the numbers of one array on all devices; and multiplications, where each number of a result counts
# as `_EACH`, and each operation as `_CALL`.
_LARGEST, _HARDEST, _EACH, _CALL = 2**25, 2**35, 16, 2**16
ENDS = 2
"""The passes at each end of a partly run loop: carries between passes are checked, in both directions."""


def _quotient(x: Array, y: Array) -> Array:
  return x / y if x.dtype.kind == "f" else (x - np.fmod(x, y)) // y  # towards zero


def _shifted(kind: str) -> Callable[[Array, Array], Array]:
  def run(x: Array, y: Array) -> Array:
    return (x.view(f"{kind}{x.itemsize}") >> y.view(f"{kind}{x.itemsize}")).view(x.dtype)

  return run


_FUNCTIONS: Mapping[str, Callable[..., Value]] = {
  "abs": np.abs, "add": np.add, "and": np.bitwise_and, "atan2": np.arctan2, "cbrt": np.cbrt, "ceil": np.ceil,
  "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high), "copy": np.asarray, "cosine": np.cos,
  "divide": _quotient, "erf": np.vectorize(math.erf, otypes=[np.float64]), "exponential": np.exp,
  "exponential-minus-one": np.expm1, "floor": np.floor, "is-finite": np.isfinite, "log": np.log,
  "log-plus-one": np.log1p, "logistic": lambda x: 1 / (1 + np.exp(-x)), "maximum": np.maximum,
  "minimum": np.minimum, "multiply": np.multiply, "negate": np.negative, "not": np.invert,
  "or": np.bitwise_or, "popcnt": np.bitwise_count, "power": np.power, "reduce-precision": np.asarray,
  "remainder": np.fmod, "round-nearest-afz": lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5),
  "round-nearest-even": np.rint, "rsqrt": lambda x: 1 / np.sqrt(x), "select": np.where,
  "shift-left": np.left_shift, "shift-right-arithmetic": _shifted("i"), "shift-right-logical": _shifted("u"),
  "sign": np.sign, "sine": np.sin, "sqrt": np.sqrt,
  "subtract": np.subtract, "tan": np.tan, "tanh": np.tanh, "xor": np.bitwise_xor,
}  # fmt: skip
# Regions of a single operation: the functions that reduce windows, and that scatter.
_COMBINERS: Mapping[str, tuple[Callable[..., Any], Callable[..., Value] | None]] = {
  "add": (lax.add, lax.scatter_add), "and": (lax.bitwise_and, None), "maximum": (lax.max, lax.scatter_max),
  "minimum": (lax.min, lax.scatter_min), "multiply": (lax.mul, lax.scatter_mul),
  "or": (lax.bitwise_or, None), "xor": (lax.bitwise_xor, None),
}  # fmt: skip


class _Unknown(Exception):
  """A value that is not known, and why."""


class Evaluator:
  """Runs one program.

  Args:
    program: the parsed program.
    thinning: the thinning of all arrays.
    devices: the total number of devices.
    shortened: loops (JAX name, stack frame) of which only the first and last `ENDS` passes are run.
    watch: called with each instruction that has run, and its value.

  Attributes:
    lost: the operations that were not supported.
    unequal: ends of a `shard_map` that declare a value replicated although it differs between devices.
  """

  def __init__(
    self,
    program: hlo.Program,
    thinning: thin.Thinning,
    devices: int,
    shortened: Collection[tuple[str, int]] = (),
    watch: Watch | None = None,
  ):
    self._program, self._thinning, self._devices = program, thinning, devices
    self._shortened, self._watch = shortened, watch
    self._work = 0
    self._constants: dict[hlo.Instruction, Array] = {}
    self.lost = set[str]()
    self.unequal: list[hlo.Instruction] = []
    self._rules: Mapping[str, Callable[..., Value]] = {
      "partition-id": lambda *_: np.arange(devices, dtype=np.uint32),
      "replica-id": lambda *_: np.zeros(1, np.uint32),
      "constant": self._constant, "iota": self._iota, "broadcast": self._broadcast, "reshape": self._reshape,
      "transpose": self._reordered, "reverse": self._reordered, "concatenate": self._concatenate,
      "pad": self._pad, "slice": self._slice, "dynamic-slice": self._dynamic_slice,
      "dynamic-update-slice": self._update, "reduce": self._reduce, "dot": self._dot,
      "convolution": self._convolution, "reduce-window": self._window, "select-and-scatter": self._select,
      "gather": self._gather, "scatter": self._scatter, "sort": self._sort, "all-reduce": self._exchange,
      "all-gather": self._exchange, "reduce-scatter": self._exchange, "all-to-all": self._exchange,
      "collective-permute": self._permute, "custom-call": self._custom, "topk": self._topk,
      **dict.fromkeys(hlo_dims.ELEMENTWISE, self._elementwise),
    }  # fmt: skip

  def run(self, arguments: Mapping[int, Value]) -> tuple[Value, ...]:
    """The results of the entry, one for each array, for the values of its parameters by number."""
    count = 1 + max(arguments, default=-1)
    with np.errstate(all="ignore"), jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
      result = self._call(self._program.entry, [arguments.get(n) for n in range(count)])
    return result if isinstance(result, tuple) else (result,)

  # Control ------------------------------------------------------------------------------------

  def _call(self, computation: hlo.Computation, arguments: Sequence[Value]) -> Value:
    values: dict[hlo.Instruction, Value] = {}
    for at in computation.instructions:
      if at.opcode == "parameter":
        value = arguments[at.index]
      else:
        try:
          value = self._step(at, [values[read] for read in at.inputs])
        except _Unknown as why:
          self.lost |= {*map(str, why.args)}
          value = (None,) * len(at.shapes) if at.result.startswith("(") else None
      values[at] = value
      if self._watch is not None:
        self._watch(at, value)
      for read in computation.last_read.get(at, ()):
        del values[read]
    return values[computation.root]

  def _step(self, at: hlo.Instruction, inputs: list[Value]) -> Value:
    opcode = at.opcode
    if opcode == "tuple":
      return tuple(inputs)
    if opcode == "get-tuple-element":
      return inputs[0][at.index] if isinstance(inputs[0], tuple) else None
    if opcode == "opt-barrier":
      return inputs[0] if len(inputs) == 1 else tuple(inputs)
    if opcode in ("call", "fusion"):
      return self._call(self._program.computations[at.called[0]], inputs)
    if opcode == "while":
      return self._loop(at, inputs[0])
    if opcode == "conditional":
      return self._branch(at, inputs)
    if opcode not in self._rules:
      raise _Unknown(opcode)
    if any(value is None for value in inputs):
      raise _Unknown
    lead = max(map(len, inputs), default=1)
    for index in range(len(at.shapes)):
      size = lead * math.prod(self._thinning.shape(at, index))
      if size > _LARGEST:
        raise _Unknown("an array that is too large")
      self._spend(_CALL + _EACH * size)
    try:
      value = self._rules[opcode](at, *inputs)
    except (ValueError, LookupError, TypeError) as error:
      raise _Unknown(f"a form of {opcode} that is not known") from error
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and np.isnan(value).any():
      return np.where(np.isnan(value), 0.0, value)
    return value

  def _spend(self, work: int) -> None:
    """Counts multiplications, up to the limit."""
    self._work += work
    if self._work > _HARDEST:
      raise _Unknown("a program that computes too much")

  def _loop(self, at: hlo.Instruction, state: Value) -> Value:
    condition, body = self._program.condition(at), self._program.body(at)
    bound = self._program.bound(at) if place_of(at) in self._shortened else None
    for passes in itertools.count():
      self._spend(_CALL)
      if bound is not None and passes == ENDS and isinstance(state, tuple):
        place, limit = bound
        if np.all(state[place] == ENDS):
          state = (*state[:place], np.full_like(state[place], limit - ENDS), *state[place + 1 :])
      again = self._call(condition, [state])
      if again is None or (again != again.flat[0]).any():
        raise _Unknown("a loop whose length is not known")
      if not again.flat[0]:
        break
      state = self._call(body, [state])
    return state

  def _branch(self, at: hlo.Instruction, inputs: list[Value]) -> Value:
    chosen, given = inputs[0], inputs[1:]
    if chosen is None:
      raise _Unknown("a conditional on a value that is not known")
    names = at.called
    number = np.where(chosen, 0, 1) if chosen.dtype == np.bool_ else np.clip(chosen, 0, len(names) - 1)
    results = {
      n: self._call(self._program.computations[names[n]], [given[n]]) for n in map(int, np.unique(number))
    }

    def pick(*values: Value) -> Value:
      if len(values) == 1 or any(value is None for value in values):
        return values[0] if len(values) == 1 else None
      each = np.stack(np.broadcast_arrays(*map(self._everywhere, values)))
      return each[np.searchsorted([*results], self._everywhere(number)), np.arange(self._devices)]

    return jax.tree.map(pick, *results.values(), is_leaf=lambda value: value is None)

  def _everywhere(self, value: Array) -> Array:
    return np.broadcast_to(value, (self._devices, *value.shape[1:]))

  # Arrays -------------------------------------------------------------------------------------

  def _elementwise(self, at: hlo.Instruction, *inputs: Array) -> Value:
    rank = max(value.ndim for value in inputs)
    inputs = tuple(v if v.ndim == rank else v.reshape(v.shape[:1] + (1,) * (rank - 1)) for v in inputs)
    dtype = at.shapes[0].dtype
    if at.opcode == "compare":
      return getattr(operator, at.attribute("direction").lower())(*inputs)
    if at.opcode == "convert":
      return _converted(inputs[0], dtype)
    if at.opcode == "bitcast-convert":
      return _same_bits(inputs[0], at.inputs[0].shapes[0].dtype, dtype)
    return _FUNCTIONS[at.opcode](*inputs)

  def _constant(self, at: hlo.Instruction) -> Value:
    if at not in self._constants:  # read in each pass of a loop
      self._constants[at] = literal(at)[np.ix_(*self._thinning.kept(at))][None]
    return self._constants[at]

  def _iota(self, at: hlo.Instruction) -> Value:
    dim, shape = int(at.attribute("iota_dimension")), self._thinning.shape(at)
    line = _along(self._thinning.kept(at)[dim], dim, len(shape))
    return _converted(np.broadcast_to(line, shape)[None], at.shapes[0].dtype)

  def _broadcast(self, at: hlo.Instruction, x: Array) -> Value:
    shape, places = self._thinning.shape(at), at.numbers("dimensions")
    sizes = dict(zip(places, x.shape[1:], strict=True))
    x = x.transpose([0, *(1 + int(n) for n in np.argsort(places))]) if places else x
    return np.broadcast_to(x.reshape(len(x), *(sizes.get(n, 1) for n in range(len(shape)))), (len(x), *shape))

  def _reordered(self, at: hlo.Instruction, x: Array) -> Value:
    dims = [1 + n for n in at.numbers("dimensions")]
    return x.transpose([0, *dims]) if at.opcode == "transpose" else np.flip(x, (*dims,))

  def _reshape(self, at: hlo.Instruction, x: Array) -> Value:
    return x.reshape((len(x), *self._thinning.shape(at)))

  def _concatenate(self, at: hlo.Instruction, *inputs: Array) -> Value:
    return np.concatenate(_of_one_lead(*inputs), 1 + at.numbers("dimensions")[0])

  def _pad(self, at: hlo.Instruction, x: Array, fill: Array) -> Value:
    rows = zip(hlo_dims.padding(at), self._thinning.scales(at), strict=True)
    config = [(low // scale, high // scale, between) for (low, high, between), scale in rows]
    return _each(functools.partial(lax.pad, padding_config=config), x, fill)

  def _slice(self, at: hlo.Instruction, x: Array) -> Value:
    rows = zip(
      hlo_dims.slice_bounds(at),
      self._thinning.scales(at.inputs[0]),
      self._thinning.scales(at),
      self._thinning.kept(at),
      strict=True,
    )
    for dim, ((start, stop, step), scale, after, kept) in enumerate(rows, 1):
      # If the two arrays are thinned differently, the cut dim is not thinned.
      cut = slice(start // scale, stop // scale, step) if scale == after else start + kept * step
      x = x[(slice(None),) * dim + (cut,)]
    return x

  def _dynamic_slice(self, at: hlo.Instruction, x: Array, *starts: Array) -> Value:
    # If the two arrays are thinned differently, the cut dim is not thinned.
    alike = self._thinning.scales(at.inputs[0]) == self._thinning.scales(at)
    lines = [*map(np.arange, self._thinning.shape(at))] if alike else self._thinning.kept(at)
    x, places = self._places(at, x, starts, at.shapes[0].dims, lines)
    return x[places]

  def _update(self, at: hlo.Instruction, x: Array, update: Array, *starts: Array) -> Value:
    sizes = at.inputs[1].shapes[0].dims
    x, update = _of_one_lead(x, update)
    out, places = self._places(at, x, starts, sizes, [*map(np.arange, update.shape[1:])])
    out = out.copy()
    out[places] = update
    return out

  def _places(
    self,
    at: hlo.Instruction,
    x: Array,
    starts: Sequence[Array],
    sizes: Sequence[int],
    lines: Sequence[Array],
  ) -> tuple[Array, Any]:
    """An array, and the positions `lines` in it on each device, from a start for each device and dim on."""
    source, rank = at.inputs[0], len(lines)
    lead = max(map(len, (x, *starts)))
    places = [np.arange(lead).reshape(-1, *[1] * rank)]
    rows = zip(starts, lines, source.shapes[0].dims, sizes, strict=True)
    steps = zip(self._thinning.scales(source), self._thinning.grains(source), strict=True)
    for dim, ((start, line, whole, size), (scale, grain)) in enumerate(zip(rows, steps, strict=True)):
      first = np.clip(start.astype(np.int64), 0, whole - size)
      if scale > 1 and (first % (scale * grain)).any():
        raise _Unknown("a slice at an unaligned position")
      places.append((first // scale).reshape(-1, *[1] * rank) + _along(line, dim, rank))
    return np.broadcast_to(x, (lead, *x.shape[1:])), tuple(places)

  # Sums and products --------------------------------------------------------------------------

  def _combiner(self, name: str) -> str:
    """The operation of a region, if it is one of `_COMBINERS`, or an empty string."""
    region = self._program.computations[name]
    work = [i for i in region.instructions if i.opcode not in ("parameter", "convert", "copy")]
    plain = len(work) == 1 and len(set(work[0].inputs)) == 2 and work[0].opcode in _COMBINERS
    return work[0].opcode if plain else ""

  def _reduce(self, at: hlo.Instruction, *inputs: Array) -> Value:
    count, dims = len(inputs) // 2, [1 + n for n in at.numbers("dimensions")]
    arrays, starts = inputs[:count], inputs[count:]
    name = self._combiner(at.called[0])
    if name and count == 1:
      combine: Any = _FUNCTIONS[name]
      total = arrays[0]
      for dim in sorted(dims, reverse=True):
        total = combine.reduce(total, dim, dtype=total.dtype if total.shape[dim] else None)
      return combine(total, starts[0].reshape(-1, *[1] * (total.ndim - 1)))
    # One position after another, by the region.
    kept = [d for d in range(1, arrays[0].ndim) if d not in dims]
    flat = [x.transpose([0, *kept, *dims]) for x in _of_one_lead(*arrays)]
    flat = [x.reshape((*x.shape[: 1 + len(kept)], -1)) for x in flat]
    totals: Value = tuple(
      np.broadcast_to(s.reshape(-1, *[1] * len(kept)), x.shape[:-1])
      for s, x in zip(starts, flat, strict=True)
    )
    for place in range(flat[0].shape[-1]):
      found = self._call(self._program.computations[at.called[0]], [*totals, *(x[..., place] for x in flat)])
      totals = found if isinstance(found, tuple) else (found,)
    return totals if at.result.startswith("(") else totals[0]

  def _dot(self, at: hlo.Instruction, left: Array, right: Array, *_: Array) -> Value:
    summed, batch = hlo_dims.dot_params(at)["dimension_numbers"]

    def arranged(x: Array, side: int) -> Array:
      free = [n for n in range(x.ndim - 1) if n not in batch[side] + summed[side]]
      parts = (batch[0], free, summed[0]) if side == 0 else (batch[1], summed[1], free)
      sizes = [math.prod(x.shape[1 + n] for n in part) for part in parts]
      return x.transpose([0, *(1 + n for part in parts for n in part)]).reshape((len(x), *sizes))

    one, other = arranged(left, 0), arranged(right, 1)
    self._spend(max(len(one), len(other)) * one[0].size * other.shape[-1])
    product = one @ other
    return product.reshape((len(product), *self._thinning.shape(at)))

  def _convolution(self, at: hlo.Instruction, x: Array, kernel: Array) -> Value:
    params = hlo_dims.convolution_params(at)
    out, *_ = params["dimension_numbers"].rhs_spec
    self._spend(len(x) * math.prod(self._thinning.shape(at)) * kernel[0].size // kernel.shape[1 + out])
    return _each(functools.partial(lax.conv_general_dilated, **params), x, kernel)

  def _window(self, at: hlo.Instruction, x: Array, start: Array) -> Value:
    combine, _ = _COMBINERS[self._combiner(at.called[0])]
    params = hlo_dims.window_params(at, x.ndim - 1)
    self._spend(x.size * math.prod(params["window_dimensions"]))
    return _each(lambda x: lax.reduce_window(x, start.flat[0], combine, **params), x)

  def _select(self, at: hlo.Instruction, x: Array, source: Array, start: Array) -> Value:
    """The gradient of a pooling: each number goes to the position that was chosen in its window."""
    chosen = self._program.computations[at.called[0]].root.attribute("direction")
    pool, worst = (lax.max, -np.inf) if chosen in ("GE", "GT") else (lax.min, np.inf)
    if self._combiner(at.called[1]) != "add":
      raise _Unknown(at.opcode)
    params = hlo_dims.window_params(at, x.ndim - 1)
    params = {key: value for key, value in params.items() if not key.endswith("dilation")}

    def gradient(x: jax.Array, source: jax.Array) -> jax.Array:
      return jax.vjp(lambda x: lax.reduce_window(x, worst, pool, **params), x)[1](source)[0]

    return _each(gradient, x, source)

  # Indices ------------------------------------------------------------------------------------

  def _indexed(
    self,
    at: hlo.Instruction,
    indices: Array,
    dims: Sequence[int],
    sizes: Sequence[int],
  ) -> tuple[Array, Array, tuple[int, ...]]:
    """Thinned indices, with their vectors last; which are inside; and the thinned sizes of their windows."""
    whole = at.inputs[0].shapes[0].dims
    scales = self._thinning.scales(at.inputs[0])
    vector = 1 + int(at.attribute("index_vector_dim"))
    x = indices[..., None] if vector == indices.ndim else np.moveaxis(indices, vector, -1)
    room = np.array([whole[d] - sizes[d] for d in dims], np.int64)
    inside = (x >= 0) & (x <= room)
    thinned = np.clip(x.astype(np.int64), 0, room) // np.array([scales[d] for d in dims], np.int64)
    rows = zip(sizes, whole, scales, strict=True)
    return thinned, inside, tuple(size // scale if size == n else size for size, n, scale in rows)

  def _gather(self, at: hlo.Instruction, x: Array, indices: Array) -> Value:
    params = hlo_dims.gather_params(at)
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    places, _, sizes = self._indexed(at, indices, numbers.start_index_map, sizes)
    look_up = functools.partial(lax.gather, dimension_numbers=numbers, slice_sizes=sizes, mode="clip")
    return _each(look_up, x, places)

  def _scatter(self, at: hlo.Instruction, x: Array, indices: Array, updates: Array) -> Value:
    params, name = hlo_dims.scatter_params(at), self._combiner(at.called[0])
    numbers, root = params["dimension_numbers"], self._program.computations[at.called[0]].root
    combine = _COMBINERS[name][1] if name else lax.scatter
    if combine is None or not (name or (root.opcode == "parameter" and root.arguments == "1")):
      raise _Unknown(at.opcode)
    given = iter(at.inputs[2].shapes[0].dims[d] for d in numbers.update_window_dims)
    absent = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    sizes = [1 if d in absent else next(given) for d in range(x.ndim - 1)]
    dims = numbers.scatter_dims_to_operand_dims
    places, inside, _ = self._indexed(at, indices, dims, sizes)
    places = np.where(inside.all(-1, keepdims=True), places, -1)
    add = functools.partial(combine, dimension_numbers=numbers, mode="drop")
    return _each(add, x, places, updates.astype(x.dtype))

  def _sort(self, at: hlo.Instruction, *inputs: Array) -> Value:
    dim = 1 + at.numbers("dimensions")[0]
    arrays = [np.moveaxis(x, dim, -1) for x in _of_one_lead(*inputs)]
    length = arrays[0].shape[-1]
    if arrays[0].size * length > _LARGEST:
      raise _Unknown("a sort that is too large")
    pairs = [side for x in arrays for side in (x[..., :, None], x[..., None, :])]
    before = np.broadcast_to(
      self._call(self._program.computations[at.called[0]], pairs), (*arrays[0].shape, length)
    )
    earlier = np.tri(length, k=-1, dtype=np.bool_)  # [i, j]: j < i
    rank = (np.swapaxes(before, -1, -2) | (~before & earlier)).sum(-1)
    made = tuple(np.empty_like(x) for x in arrays)
    for x, ranked in zip(arrays, made, strict=True):
      np.put_along_axis(ranked, rank, x, -1)
    made = tuple(np.moveaxis(x, -1, dim) for x in made)
    return made if at.result.startswith("(") else made[0]

  def _topk(self, at: hlo.Instruction, x: Array) -> Value:
    count = self._thinning.shape(at)[-1]
    order = np.argsort(x if at.attribute("largest") == "false" else -x, -1, kind="stable")[..., :count]
    return np.take_along_axis(x, order, -1), order.astype(np.int32)

  # Devices ------------------------------------------------------------------------------------

  def _exchange(self, at: hlo.Instruction, *inputs: Array) -> Value:
    rows = np.array(group_rows(at.rest, self._devices))  # groups, members
    parts = [self._everywhere(x)[rows] for x in inputs]
    dims = at.numbers("dimensions")
    if not dims and at.opcode == "all-to-all":  # member n sends its array m to member m
      results = list(np.stack(parts).swapaxes(0, 2))
    else:
      results = [self._exchanged(at, x, *dims) for x in parts]
    made = tuple(
      np.zeros((self._devices, *x.shape[2:]), old.dtype) for old, x in zip(inputs, results, strict=True)
    )
    for whole, x in zip(made, results, strict=True):
      whole[rows] = x
    return made if at.result.startswith("(") else made[0]

  def _exchanged(self, at: hlo.Instruction, x: Array, dim: int = 0) -> Array:
    """The values of each member of each group after the exchange; `x` is (groups, members, *dims)."""
    count = x.shape[1]
    if at.opcode == "all-gather":
      return np.repeat(np.concatenate(np.moveaxis(x, 1, 0), 1 + dim)[:, None], count, 1)
    if at.opcode == "all-to-all":
      sent = np.stack(np.split(x, count, 2 + dim), 1)  # groups, targets, sources, *dims
      return np.concatenate(np.moveaxis(sent, 2, 0), 2 + dim)
    combine: Any = _FUNCTIONS[self._combiner(at.called[0])]
    total = combine.reduce(x, 1)
    if at.opcode == "reduce-scatter":
      return np.stack(np.split(total, count, 1 + dim), 1)
    return np.repeat(total[:, None], count, 1)

  def _permute(self, at: hlo.Instruction, x: Array) -> Value:
    made = np.zeros((self._devices, *x.shape[1:]), x.dtype)
    for source, target in pairs_of(at.attribute("source_target_pairs")):
      made[target] = self._everywhere(x)[source]
    return made

  def _custom(self, at: hlo.Instruction, *inputs: Array) -> Value:
    target = at.attribute("custom_call_target").strip('"')
    if target in ("Sharding", "annotate_device_placement", "LayoutConstraint", "MoveToHost", "MoveToDevice"):
      return inputs[0]
    if target == "TopK":
      return self._topk(at, inputs[0])
    if target not in ("SPMDFullToShardShape", "SPMDShardToFullShape"):
      raise _Unknown(target)
    begins = target == "SPMDFullToShardShape"
    # At the start of a `shard_map`, the operand has the layout: the call itself is marked as manual.
    placed = at.inputs[0] if begins else at
    tiling = read_tiling(placed.attribute("sharding"), self._devices)
    if tiling is None:
      raise _Unknown("a shard_map over some of the axes")
    x, shape = self._everywhere(inputs[0]), self._thinning.shape(at)
    return blocks(x, corners(tiling, shape), shape) if begins else self._joined(at, x, tiling, shape)

  def _joined(self, at: hlo.Instruction, x: Array, tiling: Tiling, shape: tuple[int, ...]) -> Value:
    """The global array of the blocks that the devices have computed, at the end of a `shard_map`."""
    whole, seen = np.zeros((1, *shape), x.dtype), np.zeros(shape, np.bool_)
    for start, block in zip(corners(tiling, x.shape[1:]), x, strict=True):
      cut = tuple(slice(int(a), int(a) + n) for a, n in zip(start, block.shape, strict=True))
      if seen[cut].all() and seen[cut].size and not np.allclose(whole[(0, *cut)], block, 1e-6, 1e-12, True):
        self.unequal.append(at)
      whole[(0, *cut)], seen[cut] = block, True
    return whole


def place_of(at: hlo.Instruction) -> tuple[str, int]:
  """The identity of an operation in several programs: its JAX name and stack frame."""
  return at.op_name, at.frame


def corners(tiling: Tiling, shape: Sequence[int]) -> Array:
  """(devices, dims): where the blocks of an array start, in thinned positions; `shape` is a block's shape."""
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


def _dtype(name: str) -> np.dtype[Any]:
  """In which an HLO type is computed: integers in their own, of 8 bits at least."""
  integer = re.fullmatch(r"([su])(\d+)", name)
  if integer:
    return np.dtype(f"{'int' if integer[1] == 's' else 'uint'}{max(8, int(integer[2]))}")
  return np.dtype("bool" if name == "pred" else "complex128" if name.startswith("c") else "float64")


def _converted(x: Array, dtype: str) -> Array:
  target = _dtype(dtype)
  if target == np.bool_:
    return x != 0
  if target.kind in "iu" and x.dtype.kind == "f":
    x = np.nan_to_num(x).astype(np.int64)
  return x.astype(target)


def literal(at: hlo.Instruction) -> Array:
  """The value of a `constant`."""
  shape = at.shapes[0]
  if "..." in at.arguments:
    raise _Unknown("a constant that is not written out")
  words = re.sub(r"/\*.*?\*/|[{}]", " ", at.arguments).replace(",", " ").split()
  if shape.dtype == "pred":
    return np.array([word in ("true", "1") for word in words]).reshape(shape.dims)
  kind = int if _dtype(shape.dtype).kind in "iu" else float
  return np.array([kind(word) for word in words]).astype(_dtype(shape.dtype)).reshape(shape.dims)


def _same_bits(x: Array, source: str, target: str) -> Array:
  """An array's bits read as another HLO type of the same size."""
  before, after = (np.dtype(f"f{int(n[1:]) // 8}") if n[0] == "f" else _dtype(n) for n in (source, target))
  if before.itemsize != after.itemsize:
    raise ValueError(f"{source} and {target} differ in size")
  return _converted(np.ascontiguousarray(x, before).view(after), target)


def _along(line: Array, dim: int, rank: int) -> Array:
  """Numbers along one of several dims."""
  return line.reshape([-1 if n == dim else 1 for n in range(rank)])


def _of_one_lead(*arrays: Array) -> list[Array]:
  """The arrays, all with a device dim of the same size if one of them has a device dim."""
  lead = max(map(len, arrays))
  return [np.broadcast_to(x, (lead, *x.shape[1:])) for x in arrays]


def _each(function: Callable[..., Value], *arrays: Array) -> Array:
  """The results of a function of `jax.lax` on each device."""
  return np.asarray(jax.vmap(function)(*_of_one_lead(*arrays)))
