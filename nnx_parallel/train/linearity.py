"""Whether the results of a program for a batch are the sums of its results for the parts of the batch.

Only for such a loss may replicas each differentiate the loss of their own examples, and add up. A mean of
losses qualifies; a contrastive loss, a load balance of experts, or the logarithm of a sum does not.

The program is traced twice, for one part and for the full batch of `parts` parts, and the two traces are
compared step by step. Each value of the batch's program is then known in terms of the values of the parts:

- `same`: equal in all parts (it depends on no example);
- `part`: along one dim, the concatenated values of the parts (each row depends on one part);
- `sum`: the sum of the values of the parts;
- `zero`: zeros; `mixed`: anything else, with the operation that made it so.

Each relation holds up to a constant `scale`: a mean over examples is the sum of the parts' means times
`1 / parts`. A number that both traces hold as a literal, such as the number of examples, gives the scale.

JAX's types for partial sums, `PartitionSpec(unreduced=...)`, cannot say this yet (jax 0.12): they exist on
Explicit axes only, and a partial sum may not be multiplied, not even by a constant (tests/test_upstream.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from nnx_parallel.core.axes import axes_of
from nnx_parallel.core.dims import IDENTITIES, MOVES, DimMap, dim_map, moved
from nnx_parallel.core.interpret import NO_FACTS, Inner, is_literal, through, wiring
from nnx_parallel.core.jaxprs import constants, is_inexact, is_tracer, opened, place_of, scan_counts
from nnx_parallel.core.nodes import is_key
from nnx_parallel.core.types import JaxprEqn, Program, PyTree, Value, Var

_ROUNDING = 1e-6  # of a few float32 literals: sum / (n - 1) with 256 examples is 0.4 % off a mean
# Between devices: on each device the result is a sum, or a value of another device.
_EXCHANGES = frozenset(("psum", "psum2", "psum_invariant", "ppermute"))
# Linear in the first operand; the other operands choose positions.
_LINEAR = MOVES | {
  "conj", "cumsum", "gather", "imag", "neg", "pad", "real", "reduce_sum", "reduce_window_sum",
  "select_and_scatter_add", "unstack",
}  # fmt: skip
_SUMS = frozenset((
  "add", "add_any", "concatenate", "dynamic_update_slice", "scatter-add", "scatter_add", "select_n", "stack",
  "sub",
))  # fmt: skip
"""Linear in all operands jointly, except operands that choose positions."""
_TIMES = frozenset(("conv_general_dilated", "dot_general", "mul"))
_KEEP_ZEROS = _LINEAR | _SUMS | _TIMES
_PLACES = ("padding", "padding_config", "start_indices", "strides", "window_dimensions", "window_strides")
"""Parameters that must not depend on the number of examples."""


@dataclasses.dataclass(frozen=True)
class Fact:
  """How a value of the batch's program follows from the values of the parts.

  Attributes:
    kind: the relation.
    scale: the constant factor of the relation.
    dim: for `part`: the dim along which the parts are concatenated.
    outer: for `part`: the number of blocks: the dim is `outer x parts x rest`. None for a value that is
      constant along the dim, which holds for any number of blocks.
    reason: for `mixed`: the operation.
  """

  kind: Literal["same", "part", "sum", "zero", "mixed"]
  scale: float = 1.0
  dim: int = 0
  outer: int | None = 1
  reason: str = ""

  @property
  def plain(self) -> bool:
    """Whether nothing but equal operations on each row is needed to compute with it."""
    return self.kind == "zero" or (self.kind in ("same", "part") and _equal(self.scale, 1.0))

  @property
  def fixed(self) -> bool:
    """Whether the value is the same number in both traces."""
    return self.kind in ("same", "zero") and self.plain

  def at(self, dim: int, outer: int | None = None) -> Fact:
    """The same parts along another dim."""
    return dataclasses.replace(self, dim=dim, outer=self.outer if outer is None else outer)

  def times(self, factor: float) -> Fact:
    """The relation of a multiple."""
    return dataclasses.replace(self, scale=self.scale * factor)


SAME, ZERO, ROWS = Fact("same"), Fact("zero"), Fact("part")


class _Mixed(Exception):
  """An operation has no relation between the batch and its parts."""


def factors(
  part: PyTree, whole: Program, parts: int, splits: Sequence[bool], wanted: Sequence[str]
) -> tuple[list[float], str]:
  """How the results for a batch follow from the results for its parts.

  Args:
    part: the closed jaxpr of the program for one part.
    whole: the closed jaxpr of the program for all parts at once.
    parts: the number of parts.
    splits: for each flat input, whether the parts split its dim 0; else all parts get the same.
    wanted: for each flat result, `"mean"` of the parts' results, their `"sum"`, or `"rows"`: the parts'
      results concatenated.

  Returns:
    For each result, the factor for the wanted combination; and why some result does not follow, empty if all
    results do.
  """
  pair = _Pair(parts)
  found: list[float] = []
  for fact, how in zip(pair.walk(part, whole, [ROWS if x else SAME for x in splits]), wanted, strict=True):
    if fact.kind == "mixed":
      return [], f"the loss is no {how} over its examples: {fact.reason}"
    if how == "rows" and not (fact.kind == "zero" or (_is_rows(fact) and fact.plain)):
      return [], "an output does not have the examples on dim 0"
    if how != "rows" and fact.kind == "part":
      return [], "a result has the examples on a dim, and outputs= does not name it"
    scale = 1.0
    if fact.kind in ("same", "sum"):
      scale = pair.as_sum(fact).scale * (parts if how == "mean" else 1)
    found.append(1.0 if _equal(scale, 1.0) else scale)
  return found, ""


class _Pair:
  """Compares two traces of one program step by step.

  Args:
    parts: the number of parts of the second trace's batch.
  """

  def __init__(self, parts: int):
    self.parts = parts

  def as_sum(self, fact: Fact) -> Fact:
    """A value that is equal in all parts, as a sum over the parts."""
    if fact.kind == "same":
      return Fact("sum", fact.scale / self.parts)
    return fact

  def join(self, *facts: Fact) -> Fact:
    """The relation of a value that is any of these, or a sum of them."""
    found = ZERO
    for fact in facts:
      if fact.kind == "mixed":
        return fact
      if fact.kind == "zero":
        continue
      if found.kind == "zero":
        found = fact
        continue
      if {found.kind, fact.kind} == {"same", "sum"}:
        found, fact = self.as_sum(found), self.as_sum(fact)
      if found.kind != fact.kind or not _equal(found.scale, fact.scale):
        raise _Mixed
      if fact.kind == "part":
        found = _along([found, fact]).times(found.scale)
    return found

  def walk(self, part: PyTree, whole: Program, given: Sequence[Fact]) -> list[Fact]:
    """The relations of the results, given the relations of the inputs."""
    one, all_ = opened(part), opened(whole)
    facts: dict[Var, Fact] = dict(zip(one.invars, given, strict=True))
    consts = zip(one.constvars, constants(part), constants(whole), strict=False)
    facts.update({var: _constant(a, b, self.parts) for var, a, b in consts})
    if len(one.eqns) != len(all_.eqns) or len(one.constvars) != len(all_.constvars):
      return [_mixed("its program depends on the number of examples")] * len(one.outvars)
    for eqn, other in zip(one.eqns, all_.eqns, strict=True):
      inputs = [self._read(facts, a, b) for a, b in zip(eqn.invars, other.invars, strict=True)]
      facts.update(zip(eqn.outvars, self._results(eqn, other, inputs), strict=True))
    return [self._read(facts, a, b) for a, b in zip(one.outvars, all_.outvars, strict=True)]

  def _read(self, facts: Mapping[Var, Fact], a: Var, b: Var) -> Fact:
    if is_literal(a) != is_literal(b):
      return _mixed("its program depends on the number of examples")
    return _constant(a.val, b.val, self.parts) if is_literal(a) and is_literal(b) else facts[a]

  def _results(self, eqn: JaxprEqn, other: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
    if all(_is_empty(a) and _is_empty(b) for a, b in zip(eqn.outvars, other.outvars, strict=True)):
      return [ZERO] * len(eqn.outvars)  # a scan of equal steps slices an empty rest off its rows
    mixed = next((fact for fact in inputs if fact.kind == "mixed"), None)
    if mixed is not None:
      return [mixed] * len(eqn.outvars)
    try:
      if eqn.primitive is not other.primitive:
        raise _Mixed
      found = self._inside(eqn, other, inputs) if wiring(eqn).inner else self._outside(eqn, other, inputs)
      return [self._checked(*row) for row in zip(found, eqn.outvars, other.outvars, strict=True)]
    except _Mixed:
      return [_mixed(f"{eqn.primitive.name} ({place_of(eqn)})")] * len(eqn.outvars)

  def _checked(self, fact: Fact, a: Var, b: Var) -> Fact:
    """The relation, if the shapes of both traces agree with it."""
    one, two = list(a.aval.shape), list(b.aval.shape)
    if fact.kind == "part":
      if one[fact.dim] % (fact.outer or 1):
        raise _Mixed
      one[fact.dim] *= self.parts
    if fact.kind != "mixed" and fact.kind != "zero" and one != two:
      raise _Mixed
    return fact

  def _inside(self, eqn: JaxprEqn, other: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
    """The results of an operation that runs programs: a call, a loop, a branch, a custom rule."""
    programs = itertools.cycle([inner.program for inner in wiring(other).inner])

    def inside(inner: Inner, given: Sequence[Fact]) -> list[Fact]:
      found = self.walk(inner.program, next(programs), given)
      if not inner.gives and not found[0].fixed:  # the condition of a while
        raise _Mixed
      return found

    if eqn.primitive.name == "cond" and not inputs[0].fixed:
      raise _Mixed
    facts: Any = NO_FACTS
    row, stack = _row, _stacked
    if eqn.primitive.name == "scan":
      fixed, carried, _ = scan_counts(eqn).split(inputs)
      if eqn.params["reverse"] != other.params["reverse"]:
        raise _Mixed
      if eqn.params["length"] != other.params["length"]:  # over the examples, one by one
        if carried or any(fact.kind in ("part", "sum") for fact in fixed):
          raise _Mixed
        row, stack = _example, _examples
    found = through(eqn, inputs, inside, dataclasses.replace(facts, join=self.join, row=row, stack=stack))
    if eqn.primitive.name == "shard_map":  # each device computes with the parts of its shards
      specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
      for fact, spec in zip((*inputs, *found), specs, strict=True):
        if fact.kind == "part" and any(axes_of(entry) for entry in tuple(spec)[fact.dim : fact.dim + 1]):
          raise _Mixed
    return found

  def _outside(self, eqn: JaxprEqn, other: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
    """The results of an operation without programs."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name in IDENTITIES or name in _EXCHANGES:
      return inputs[:count]
    shapes = [v.aval.shape for v in eqn.outvars] == [v.aval.shape for v in other.outvars]
    if shapes and all(fact.fixed for fact in inputs):
      if not _same_parameters(eqn, other):
        raise _Mixed
      zeros = [fact.kind == "zero" for fact in inputs]
      is_zero = any(zeros) if name in _TIMES else zeros[:1] == [True] and (name in _LINEAR or all(zeros))
      return [ZERO if name in _KEEP_ZEROS and is_zero else SAME] * count
    dims = dim_map(eqn)
    # Sizes that are equal in only one of the traces, such as of an update and its table, have another map.
    if dims is None or dims != dim_map(other):
      raise _Mixed
    if any(eqn.params.get(key) != other.params.get(key) for key in _PLACES):
      raise _Mixed
    it = Operation(eqn, other, dims, inputs, self)
    if name in _RULES:
      found = _RULES[name](it)
    elif name in _TIMES:
      found = _product(it)
    elif name in _LINEAR:
      found = _linear(it)
    else:
      found = _nonlinear(it)
    return [found] * count


def _constant(a: Value, b: Value, parts: int) -> Fact:
  """A number or an array that the traces hold."""
  if is_tracer(a) or is_tracer(b) or (a is b and np.ndim(a)):
    return SAME if a is b else _mixed("it holds a different array for each number of examples")
  if hasattr(a, "dtype") and is_key(a.dtype):
    return SAME if a is b else _mixed("it holds a different key")
  one, two = np.asarray(a), np.asarray(b)
  if one.dtype == jax.dtypes.float0 or not (one.any() or two.any()):
    return ZERO
  if np.array_equal(one, two, equal_nan=jax.numpy.issubdtype(one.dtype, np.inexact)):  # NaN is a fill value
    return SAME
  if not one.ndim and not two.ndim and one:
    return SAME.times(_ratio(one, two, parts))
  changed = [d for d, (n, m) in enumerate(zip(one.shape, two.shape, strict=False)) if n != m]
  if len(changed) == 1 and (one == one.flat[0]).all() and (two == one.flat[0]).all():
    return Fact("part", dim=changed[0], outer=None)
  return _mixed("it holds an array of numbers for each example")


def _ratio(one: np.ndarray, two: np.ndarray, parts: int) -> float:
  """The ratio of two numbers; in bfloat16 or float16, which round 1 / n, the power of `parts` near to it."""
  found = float(two) / float(one)
  if one.dtype.itemsize > 2 or not jax.numpy.issubdtype(one.dtype, np.inexact) or found <= 0 or parts == 1:
    return found
  power = parts ** (round(2 * math.log(found, parts)) / 2)  # of n, of its root, and so on
  return power if math.isclose(found, power, rel_tol=float(jax.numpy.finfo(one.dtype).eps)) else found


def _row(_: object, fact: Fact) -> Fact:
  """A row of a scan with equal lengths in both traces, from all rows; `_stacked` is the inverse."""
  if fact.kind != "part":
    return fact
  return fact.at(fact.dim - 1) if fact.dim else _fail()


def _stacked(_: object, fact: Fact) -> Fact:
  return fact.at(fact.dim + 1) if fact.kind == "part" else fact


def _example(_: object, fact: Fact) -> Fact:
  """A row of a scan over the examples, from all rows; `_examples` is the inverse."""
  return Fact("same", fact.scale) if _is_rows(fact) else _fail()


def _examples(_: object, fact: Fact) -> Fact:
  if fact.kind == "same":
    return Fact("part", fact.scale)
  return fact if fact.kind in ("zero", "mixed") else _fail()


def _mixed(reason: str) -> Fact:
  return Fact("mixed", reason=reason)


def _equal(a: float, b: float) -> bool:
  return math.isclose(a, b, rel_tol=_ROUNDING)


def _is_rows(fact: Fact) -> bool:
  """Whether each part has a block of rows."""
  return fact.kind == "part" and not fact.dim and fact.outer in (1, None)


def _along(facts: Sequence[Fact]) -> Fact:
  """The parts that several values have along one dim, for an operation on each row; scale 1."""
  found = [fact for fact in facts if fact.kind == "part"]
  outers = {fact.outer for fact in found if fact.outer is not None}
  if not found or len({fact.dim for fact in found}) > 1 or len(outers) > 1:
    raise _Mixed
  return Fact("part", 1.0, found[0].dim, next(iter(outers), None))


def _same_parameters(eqn: JaxprEqn, other: JaxprEqn) -> bool:
  """Whether two operations with the same shapes do the same."""
  for key, value in eqn.params.items():
    theirs = other.params.get(key)
    if value is theirs or callable(value) or hasattr(opened(value), "eqns") or key in ("sharding", "mesh"):
      continue
    try:
      if not bool(value == theirs):
        return False
    except (TypeError, ValueError):
      return False
  return True


@dataclasses.dataclass(frozen=True)
class Operation:
  """An operation in both traces, where its dims go, and the relations of its operands."""

  eqn: JaxprEqn
  other: JaxprEqn
  dims: DimMap
  inputs: list[Fact]
  pair: _Pair

  @property
  def changed(self) -> list[int]:
    """The dims of the result that differ between the traces."""
    one, two = (eqn.outvars[0].aval.shape for eqn in (self.eqn, self.other))
    return [d for d, (n, m) in enumerate(zip(one, two, strict=True)) if n != m]

  def constant(self, scale: float) -> Fact:
    """A result that is constant along the dim that differs between the traces."""
    return Fact("part", scale, self.changed[0], None) if len(self.changed) == 1 else _fail()


def _merged(dims: DimMap, facts: Sequence[Fact]) -> Fact:
  """The result of a function that is linear in each of its operands, or in the operands at each position.

  If the operands have the parts along one factor of the operation, the result has the parts along that
  factor, or, if no dim of the result has the factor, is the sum of the results of the parts.
  """
  along = {own[fact.dim] for own, fact in zip(dims.operands, facts, strict=True) if fact.kind == "part"}
  scale = math.prod(fact.scale for fact in facts)
  if not along:
    kinds = [fact.kind for fact in facts]
    return Fact("sum" if "sum" in kinds else "same", scale) if kinds.count("sum") < 2 else _fail()
  (factor, *others), result = along, dims.results[0]
  if factor is None or others or factor in dims.mixed or any(fact.kind == "sum" for fact in facts):
    raise _Mixed
  pairs = [(own, fact) for own, fact in zip(dims.operands, facts, strict=True) if factor in own]
  if any(fact.kind == "same" for _, fact in pairs):
    raise _Mixed
  rows = _along([fact.at(0) for _, fact in pairs])
  return Fact("part", scale, result.index(factor), rows.outer) if factor in result else Fact("sum", scale)


def _fail() -> Fact:
  raise _Mixed


def _is_empty(var: Var) -> bool:
  return 0 in getattr(var.aval, "shape", ())


def _product(it: Operation) -> Fact:
  return ZERO if any(fact.kind == "zero" for fact in it.inputs) else _merged(it.dims, it.inputs)


def _linear(it: Operation) -> Fact:
  """Linear in the first operand; the choices of the others must not depend on the number of parts."""
  first, *choosers = it.inputs
  if not all(fact.plain for fact in choosers):
    raise _Mixed
  return ZERO if first.kind == "zero" else _merged(it.dims, it.inputs)


def _nonlinear(it: Operation) -> Fact:
  """Any function of the positions of the parts."""
  if not all(fact.plain for fact in it.inputs):
    raise _Mixed
  if all(fact.kind == "zero" for fact in it.inputs):
    return it.constant(1.0)
  found = _merged(it.dims, it.inputs)
  return found if found.kind == "part" else _fail()


def _add(it: Operation) -> Fact:
  """Adds a scalar to an array of rows as an array of equal rows."""
  rows = next((fact for fact in it.inputs if fact.kind == "part"), None)

  def spread(fact: Fact) -> Fact:
    return Fact("part", fact.scale, rows.dim, None) if rows and fact.kind == "same" else fact

  return it.pair.join(*map(spread, it.inputs))


def _div(it: Operation) -> Fact:
  above, below = it.inputs
  rounds = not is_inexact(it.eqn.outvars[0].aval) and not (above.plain and below.plain)
  if below.kind not in ("same", "part") or rounds:
    raise _Mixed
  return _product(dataclasses.replace(it, inputs=[above, dataclasses.replace(below, scale=1 / below.scale)]))


def _convert(it: Operation) -> Fact:
  before, after = it.eqn.invars[0].aval.dtype, it.eqn.params["new_dtype"]
  integers = jax.numpy.issubdtype(before, np.integer)
  exact = jax.numpy.issubdtype(after, np.inexact) or (integers and jax.numpy.issubdtype(after, np.integer))
  return it.inputs[0] if exact or it.inputs[0].plain else _fail()


def _select(it: Operation) -> Fact:
  which, *cases = it.inputs
  if not which.plain:
    raise _Mixed
  found = it.pair.join(*cases)
  if which.kind != "part" or found.kind == "zero":
    return found
  return _along([which, found]).times(found.scale) if found.kind == "part" else _fail()


def _broadcast(it: Operation) -> Fact:
  fact = it.inputs[0]
  if fact.kind in ("part", "zero") or not it.changed:
    return _linear(it)
  # The sum over a batch, combined with each of its examples, is not a value of one part.
  return it.constant(fact.scale) if fact.kind == "same" else _fail()


def _iota(it: Operation) -> Fact:
  found = it.constant(1.0)
  return found if it.dims.results[0][found.dim] is not None else _fail()


def _reshape(it: Operation) -> Fact:
  fact, (before, after) = it.inputs[0], (v.aval.shape for v in (it.other.invars[0], it.other.outvars[0]))
  if fact.kind != "part":
    return fact
  if len(it.changed) != 1:
    raise _Mixed
  (dim,) = it.changed
  if fact.outer is None:
    return fact.at(dim) if after[dim] == before[fact.dim] else _fail()
  place, outer = moved(fact.dim, fact.outer, it.pair.parts, before, after) or (None, 0)
  return fact.at(dim, outer) if place == dim else _fail()


def _pad(it: Operation) -> Fact:
  operand, value = it.inputs
  if value.kind != "zero" and (operand.kind == "zero" or not operand.plain):
    raise _Mixed
  return _linear(it)


def _concatenate(it: Operation) -> Fact:
  found = it.pair.join(*it.inputs)
  if found.kind != "part" or it.dims.results[0][found.dim] not in it.dims.mixed:
    return found
  sizes = {var.aval.shape[found.dim] for var in it.eqn.invars}
  if len(sizes) > 1 or found.outer != 1 or any(fact.kind != "part" for fact in it.inputs):
    raise _Mixed
  return found.at(found.dim, len(it.inputs))


def _split(it: Operation) -> Fact:
  """The inverse of a `concatenate`."""
  (fact,), sizes = it.inputs, it.eqn.params["sizes"]
  if fact.kind != "part" or it.dims.results[0][fact.dim] not in it.dims.mixed:
    return fact
  return fact.at(fact.dim, 1) if len({*sizes}) == 1 and fact.outer == len(sizes) else _fail()


def _stack(it: Operation) -> Fact:
  facts = [
    fact.at(it.dims.results[0].index(own[fact.dim])) if fact.kind == "part" else fact
    for own, fact in zip(it.dims.operands, it.inputs, strict=True)
  ]
  return it.pair.join(*facts)


def _update(it: Operation) -> Fact:
  """Rows of an array are replaced or added to: `scatter` and `dynamic_update_slice`."""
  table, *places = it.inputs
  adds = it.eqn.primitive.name in ("scatter-add", "scatter_add")
  updates = places.pop(0 if it.eqn.primitive.name == "dynamic_update_slice" else 1)
  if adds and updates.kind == "zero":
    return table
  if not all(fact.plain for fact in places):
    raise _Mixed
  own, *others = it.dims.operands
  if table.kind == "part" and own[table.dim] in it.dims.mixed:
    raise _Mixed
  # Zeros replace earlier values too, at places that may depend on the examples.
  parts = any(fact.kind == "part" for fact in it.inputs[1:])
  rows = dataclasses.replace(it.dims, operands=tuple(others))
  new = _merged(rows, it.inputs[1:]) if parts or updates.kind != "zero" else ZERO
  return it.pair.join(table, new) if adds or not parts or new.kind == "part" else _fail()


_RULES: Mapping[str, Callable[[Operation], Fact]] = {
  **dict.fromkeys(("add", "add_any", "sub"), _add),
  **dict.fromkeys(("dynamic_update_slice", "scatter", "scatter-add", "scatter_add"), _update),
  "broadcast_in_dim": _broadcast,
  "concatenate": _concatenate,
  "convert_element_type": _convert,
  "div": _div,
  "iota": _iota,
  "pad": _pad,
  "reshape": _reshape,
  "select_n": _select,
  "split": _split,
  "stack": _stack,
}
