"""Whether the loss of a batch is the sum of the losses of its parts, exactly: read off two traces of it.

Only then may replicas each differentiate the loss of their own examples, and add up. The loss is traced as
its author wrote it, for one part and for all parts at once, and each value of the second trace is put in
terms of the values of the first. With 2 parts of 8 examples, for `(x @ w - y).mean()`:

    one part                  both parts
    a = dot x[8,4] w[4]       a = dot x[16,4] w[4]     rows: the parts' values, one after the other
    b = sub a y[8]            b = sub a y[16]          rows
    c = reduce_sum b          c = reduce_sum b         sum
    d = div c 8.0             d = div c 16.0           sum, times 2 ** -1: the mean of the parts' means

A relation holds up to a power of the number of parts, which literals give: they are compared as fractions,
so that `sum / (n - 1)` is no mean however large n is. An operation without a relation makes its results
"mixed", and gradients are then reduced in each microbatch.

Random numbers for the examples are "rows" too: `draws.py` gives each replica its own.

JAX's types for partial sums, `PartitionSpec(unreduced=...)`, cannot say this yet (jax 0.12): they exist on
Explicit axes only, and a partial sum may not be multiplied, not even by a constant (tests/test_upstream.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import jax
import numpy as np

from nnx_parallel.core.axes import axes_of
from nnx_parallel.core.interpret import NO_FACTS, Inner, is_literal, through, wiring
from nnx_parallel.core.jaxprs import (
  bind,
  constants,
  has_rule,
  is_inexact,
  is_tracer,
  open_jaxpr,
  place_of,
  struct,
)
from nnx_parallel.core.nodes import is_key
from nnx_parallel.core.types import JaxprEqn, Program, PyTree, Value, Var
from nnx_parallel.infer.dims import IDENTITIES, MOVES, DimMap, dim_map
from nnx_parallel.train.draws import DRAWS, Draws

# Between devices: on each device the result is a sum, or a value of another device.
_EXCHANGES = frozenset(("psum", "psum2", "psum_invariant", "ppermute"))
_LINEAR = MOVES | {"conj", "cumsum", "imag", "neg", "real", "reduce_sum"}
"""Linear in the first operand; the other operands choose positions."""
_TIMES = frozenset(("conv_general_dilated", "div", "dot_general", "mul"))
_JOINS = frozenset(("add", "add_any", "concatenate", "select_n", "stack", "sub"))
"""Linear in all operands jointly, except the condition of a `select_n`."""
_SPREADS = frozenset(("broadcast_in_dim", "iota"))
_PLACES = ("padding", "padding_config", "start_indices", "strides", "window_dimensions", "window_strides")
"""Parameters that must not depend on the number of examples."""


@dataclasses.dataclass(frozen=True)
class Fact:
  """How a value of the batch's program follows from the values of the parts, times `parts ** power`."""

  # equal in all parts; the parts' values along `dim`; their sum; zero; or "mixed", with the operation
  kind: Literal["same", "rows", "sum", "zero", "mixed"]
  power: Fraction = Fraction(0)
  dim: int = 0
  reason: str = ""

  @property
  def plain(self) -> bool:
    """Whether any function of each row may be computed with it."""
    return self.kind == "zero" or (self.kind in ("same", "rows") and not self.power)

  @property
  def fixed(self) -> bool:
    """Whether the value is the same number in both traces."""
    return self.plain and self.kind != "rows"


SAME, ZERO, ROWS = Fact("same"), Fact("zero"), Fact("rows")


class _Mixed(Exception):
  """An operation has no relation between the batch and its parts."""


def factors(
  part: Program, whole: Program, parts: int, splits: Sequence[bool], wanted: Sequence[str]
) -> tuple[list[float], Draws, str]:
  """How the results for a batch follow from those for its parts, by closed jaxprs of one part, and of all."""
  # `splits`: for each flat input, whether the parts split its dim 0; else all get the same. `wanted`: for
  # each flat result, the "mean" or "sum" of the parts' results, their "rows", one after the other, or the
  # "same", whatever the examples. Returns the factor of each, the random numbers for the examples, and why
  # some result does not follow: empty if all do.
  pair = _Pair(parts)
  found: list[float] = []
  facts = [*zip(pair.walk(part, whole, [ROWS if x else SAME for x in splits]), wanted, strict=True)]
  if any(how == "same" and not fact.fixed for fact, how in facts):
    return [], pair.draws, "the loss changes Variables by its examples (statistics)"
  for fact, how in facts:
    if fact.kind == "mixed":
      return [], pair.draws, f"the loss is no {how} over its examples: {fact.reason}"
    if how == "rows" and not (fact.plain and fact.dim == 0 and fact.kind != "same"):
      return [], pair.draws, "an output does not have the examples on dim 0"
    if how in ("mean", "sum") and fact.kind == "rows":
      return [], pair.draws, "a result has the examples on a dim, and outputs= does not name it"
    power = fact.power - (fact.kind == "same") + (how == "mean")
    found.append(float(parts) ** float(power) if how in ("mean", "sum") and fact.kind != "zero" else 1.0)
  return found, pair.draws, ""


class _Pair:
  """Compares two traces of one program, the second with `parts` times the examples, step by step."""

  def __init__(self, parts: int, draws: Draws | None = None, is_derivative: bool = False):
    self.parts, self.is_derivative = parts, is_derivative
    self.draws = Draws() if draws is None else draws

  def walk(self, part: Program, whole: Program, given: Sequence[Fact]) -> list[Fact]:
    """The relations of the results, given the relations of the inputs."""
    one, all_ = open_jaxpr(part), open_jaxpr(whole)
    computing = [[eqn for eqn in jaxpr.eqns if not _only_places(eqn)] for jaxpr in (one, all_)]
    if len(computing[0]) != len(computing[1]) or len(one.constvars) != len(all_.constvars):
      return [_mixed("its program depends on the number of examples")] * len(one.outvars)
    facts: dict[Var, Fact] = dict(zip(one.invars, given, strict=True))
    consts = zip(one.constvars, constants(part), constants(whole), strict=False)
    facts.update({var: self._constant(a, b) for var, a, b in consts})

    def read(a: Var, b: Var) -> Fact:
      if is_literal(a) != is_literal(b):
        return _mixed("its program depends on the number of examples")
      return self._constant(a.val, b.val) if is_literal(a) and is_literal(b) else facts[a]

    others = iter(computing[1])
    for eqn in one.eqns:
      if _only_places(eqn):
        facts[eqn.outvars[0]] = read(eqn.invars[0], eqn.invars[0])
        continue
      other = next(others)
      inputs = [read(a, b) for a, b in zip(eqn.invars, other.invars, strict=True)]
      facts.update(zip(eqn.outvars, self._results(eqn, other, inputs), strict=True))
    return [read(a, b) for a, b in zip(one.outvars, all_.outvars, strict=True)]

  def _results(self, eqn: JaxprEqn, other: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
    mixed = next((fact for fact in inputs if fact.kind == "mixed"), None)
    if mixed is not None:
      return [mixed] * len(eqn.outvars)
    try:
      if eqn.primitive is not other.primitive:
        raise _Mixed
      found = self._inside(eqn, other, inputs) if wiring(eqn).inner else self._outside(eqn, other, inputs)
      for fact, a, b in zip(found, eqn.outvars, other.outvars, strict=True):
        _check(fact.kind in ("mixed", "zero") or [*b.aval.shape] == self._shape(fact, a))
      return found
    except _Mixed:
      return [_mixed(f"{eqn.primitive.name} ({place_of(eqn)})")] * len(eqn.outvars)

  def _shape(self, fact: Fact, var: Var) -> list[int]:
    shape = [*var.aval.shape]
    if fact.kind == "rows":
      shape[fact.dim] *= self.parts
    return shape

  def _inside(self, eqn: JaxprEqn, other: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
    """The results of an operation that runs programs: a call, a loop, a branch, a custom rule."""
    programs = itertools.cycle([inner.program for inner in wiring(other).inner])

    def inside(inner: Inner, given: Sequence[Fact]) -> list[Fact]:
      found = self.walk(inner.program, next(programs), given)
      _check(inner.gives or found[0].fixed)  # the condition of a while
      return found

    _check(eqn.primitive.name != "cond" or inputs[0].fixed)
    _check(all(eqn.params.get(key) == other.params.get(key) for key in ("length", "reverse")))
    facts: Any = NO_FACTS
    found = through(eqn, inputs, inside, dataclasses.replace(facts, join=self.join, row=_row, stack=_stack))
    if eqn.primitive.name == "shard_map":  # each device computes with the parts of its shards
      specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
      for fact, spec in zip((*inputs, *found), specs, strict=True):
        _check(fact.kind != "rows" or not any(map(axes_of, tuple(spec)[fact.dim : fact.dim + 1])))
    if has_rule(eqn) and not self.is_derivative and not all(fact.fixed for fact in inputs):
      self._check_derivative(eqn, other, inputs, found)
    return found

  def _check_derivative(
    self, eqn: JaxprEqn, other: JaxprEqn, inputs: Sequence[Fact], results: Sequence[Fact]
  ) -> None:
    """A custom derivative must follow from the parts too: it may look at the cotangents of all examples."""
    try:
      one, two = map(_derivative, (eqn, other))
    except (jax.errors.UnexpectedTracerError, NameError):
      # It closes over an array of a trace that has ended, or names an axis of a `shard_map` around it.
      raise _Mixed from None
    outs = zip(results, eqn.outvars, strict=True)
    cotangents = [_dual(fact) for fact, var in outs if is_inexact(var.aval)]
    wanted = [_dual(fact) for fact, var in zip(inputs, eqn.invars, strict=True) if is_inexact(var.aval)]
    pair = _Pair(self.parts, self.draws, is_derivative=True)
    for fact, dual in zip(pair.walk(one, two, [*inputs, *cotangents]), wanted, strict=True):
      _check(fact.kind == "zero" or dual.kind == "zero" or fact == dual)

  def _outside(self, eqn: JaxprEqn, other: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
    """The results of an operation without programs."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    before, after = [[v.aval.shape for v in e.outvars] for e in (eqn, other)]
    if name in IDENTITIES or name in _EXCHANGES:
      return inputs[:count]
    changed = [d for d, (n, m) in enumerate(zip(before[0], after[0], strict=True)) if n != m]
    if name in DRAWS:
      dims = changed if inputs[0].fixed else []  # or each example has its own key
      _check(len(dims) < 2 and self.draws.add(eqn, *dims))
      if inputs[0].fixed:
        return [Fact("rows", dim=dims[0]) if dims else SAME]
    if before == after and all(fact.fixed for fact in inputs):
      _check(_same_parameters(eqn, other))
      is_zero = bool(inputs) and all(fact.kind == "zero" for fact in inputs)
      return [ZERO if is_zero and name in _LINEAR | _TIMES | _JOINS else SAME] * count
    dims = dim_map(eqn)
    # Sizes that are equal in only one of the traces, such as of an update and its table, have another map.
    _check(dims is not None and dims == dim_map(other))
    _check(all(eqn.params.get(key) == other.params.get(key) for key in _PLACES))
    assert dims is not None
    if name == "reshape" and inputs[0].kind == "rows":
      _check(len(changed) == 1)
      (dim,) = changed
      _check(math.prod(eqn.invars[0].aval.shape[: inputs[0].dim]) == math.prod(before[0][:dim]))
      return [dataclasses.replace(inputs[0], dim=dim)]
    if name in _SPREADS and changed and all(fact.kind in ("same", "zero") for fact in inputs):
      _check(len(changed) == 1 and (name != "iota" or changed[0] != eqn.params["dimension"]))
      return [Fact("rows", inputs[0].power if inputs else Fraction(0), changed[0])]
    return [self._result(eqn, dims, inputs)] * count

  def _result(self, eqn: JaxprEqn, dims: DimMap, inputs: list[Fact]) -> Fact:
    name = eqn.primitive.name
    if name in _TIMES:
      if name == "div":
        _check(inputs[1].kind in ("same", "rows") and (is_inexact(eqn.outvars[0].aval) or inputs[0].plain))
        inputs = [inputs[0], dataclasses.replace(inputs[1], power=-inputs[1].power)]
      return ZERO if any(fact.kind == "zero" for fact in inputs) else _merge(dims, inputs)
    if name in _JOINS:
      choosers, cases = (inputs[:1], inputs[1:]) if name == "select_n" else ([], inputs)
      at = zip(dims.operands[len(choosers) :], cases, strict=True)
      found = self.join(*[_at(dims.results[0], own, fact) for own, fact in at])
      _check(all(fact.plain for fact in choosers))
      if found.kind == "rows":
        _check(dims.results[0][found.dim] not in dims.mixed)
      _check(all(fact.kind != "rows" or found.kind in ("zero", "rows") for fact in choosers))
      return found
    first, *choosers = inputs
    linear = name in _LINEAR and all(fact.plain for fact in choosers)
    if name == "convert_element_type":
      linear = jax.numpy.issubdtype(eqn.params["new_dtype"], np.inexact) or not is_inexact(eqn.invars[0].aval)
      linear = linear and eqn.params["new_dtype"] != np.bool_
    if linear and first.kind != "rows":
      return first if all(fact.kind != "rows" for fact in choosers) else _fail()
    _check(linear or all(fact.plain for fact in inputs))
    found = _merge(dims, inputs)
    return found if linear or found.kind == "rows" else _fail()

  def join(self, *facts: Fact) -> Fact:
    """The relation of a value that is any of these, or a sum of them."""
    found = ZERO
    rows = next((fact for fact in facts if fact.kind == "rows"), None)
    for fact in facts:
      if fact.kind == "mixed":
        return fact
      if rows and fact.kind == "same":  # a number, added to each row
        fact = dataclasses.replace(rows, power=fact.power)
      if "zero" in (fact.kind, found.kind):
        found = found if fact.kind == "zero" else fact
        continue
      if {found.kind, fact.kind} == {"same", "sum"}:
        found, fact = (Fact("sum", x.power - 1) if x.kind == "same" else x for x in (found, fact))
      _check(found == fact)
    return found

  def _constant(self, a: Value, b: Value) -> Fact:
    """A number or an array that the traces hold."""
    if a is b and np.ndim(a):
      return SAME
    if is_tracer(a) or is_tracer(b) or (hasattr(a, "dtype") and is_key(a.dtype)):
      return SAME if a is b else _mixed("it holds a different array for each number of examples")
    one, two = np.asarray(a), np.asarray(b)
    if one.shape == two.shape and (one.dtype == jax.dtypes.float0 or not (one.any() or two.any())):
      return ZERO
    if np.array_equal(one, two, equal_nan=jax.numpy.issubdtype(one.dtype, np.inexact)):  # NaN is a fill value
      return SAME
    power = None if one.ndim or two.ndim else _power(one, two, self.parts)
    return Fact("same", power) if power else _mixed("a number in it depends on the number of examples")


def _only_places(eqn: JaxprEqn) -> bool:
  """Whether an operation only says where a value is, which differs for a part that has its own devices."""
  return eqn.primitive.name == "sharding_constraint"


def _power(one: np.ndarray, two: np.ndarray, parts: int) -> Fraction | None:
  """The power of `parts` by which two numbers differ; numbers that are not whole are rounded."""
  if not (np.isfinite(one) and np.isfinite(two)) or float(one) * float(two) <= 0:
    return None
  ratio = Fraction(two.item()) / Fraction(one.item())
  twice = round(2 * math.log(ratio, parts))  # of n, of its root, and so on
  inexact = jax.numpy.issubdtype(one.dtype, np.inexact)
  rounded = inexact and (one.dtype.itemsize < 4 or any(x % 1 or abs(x) > 2**24 for x in (one, two)))
  if rounded:
    same = math.isclose(ratio, parts ** (twice / 2), rel_tol=float(jax.numpy.finfo(one.dtype).eps))
  else:
    same = ratio**2 == Fraction(parts) ** twice
  return Fraction(twice, 2) if same else None


def _derivative(eqn: JaxprEqn) -> Program:
  """The program of an operation's gradients: `(its inputs, cotangents of its results) -> cotangents`."""
  at, outs = ([n for n, var in enumerate(some) if is_inexact(var.aval)] for some in (eqn.invars, eqn.outvars))

  def run(inputs: list[Value], cotangents: list[Value]) -> PyTree:
    def results(*some: Value) -> list[Value]:
      changed = dict(zip(at, some, strict=True))
      found = bind(eqn, [changed.get(n, x) for n, x in enumerate(inputs)])
      return [found[n] for n in outs]

    return jax.vjp(results, *[inputs[n] for n in at])[1](cotangents)

  cotangents = [struct(eqn.outvars[n].aval) for n in outs]
  return jax.make_jaxpr(run)([struct(var.aval) for var in eqn.invars], cotangents)


def _same_parameters(eqn: JaxprEqn, other: JaxprEqn) -> bool:
  """Whether two operations with the same shapes do the same."""
  for key, value in eqn.params.items():
    theirs = other.params.get(key)
    if (
      value is theirs or callable(value) or hasattr(open_jaxpr(value), "eqns") or key in ("sharding", "mesh")
    ):
      continue
    try:
      if not bool(value == theirs):
        return False
    except (TypeError, ValueError):
      return False
  return True


def _merge(dims: DimMap, facts: Sequence[Fact]) -> Fact:
  """The result of a function that is linear in each of its operands, or of the operands at each position."""
  # If the operands have the examples along one factor of the operation, the result has them along that
  # factor, or, if no dim of the result has the factor, is the sum of the results of the parts.
  power = sum((fact.power for fact in facts), Fraction(0))
  pairs = [*zip(dims.operands, facts, strict=True)]
  along = {own[fact.dim] for own, fact in pairs if fact.kind == "rows"}
  kinds = [fact.kind for fact in facts]
  if not along:
    return Fact("sum" if "sum" in kinds else "same", power) if kinds.count("sum") < 2 else _fail()
  (factor, *others), result = along, dims.results[0]
  _check(factor is not None and not others and factor not in dims.mixed and "sum" not in kinds)
  _check(all(fact.kind == "rows" for own, fact in pairs if factor in own))
  return Fact("rows", power, result.index(factor)) if factor in result else Fact("sum", power)


def _at(result: Sequence[int | None], own: Sequence[int | None], fact: Fact) -> Fact:
  """The fact of an operand as one of the result, whose dims may have other places."""
  if fact.kind != "rows":
    return fact
  _check(own[fact.dim] is not None and own[fact.dim] in result)
  return dataclasses.replace(fact, dim=result.index(own[fact.dim]))


def _dual(fact: Fact) -> Fact:
  """The relation of a cotangent, from the relation of its value."""
  kind: Any = {"same": "sum", "sum": "same"}.get(fact.kind, fact.kind)
  return dataclasses.replace(fact, kind=kind, power=-fact.power)


def _row(_: object, fact: Fact) -> Fact:
  """A row of a scan, from all rows; `_stack` is the inverse."""
  if fact.kind != "rows":
    return fact
  return dataclasses.replace(fact, dim=fact.dim - 1) if fact.dim else _fail()


def _stack(_: object, fact: Fact) -> Fact:
  return dataclasses.replace(fact, dim=fact.dim + 1) if fact.kind == "rows" else fact


def _mixed(reason: str) -> Fact:
  return Fact("mixed", reason=reason)


def _check(holds: bool) -> None:
  if not holds:
    raise _Mixed


def _fail() -> Any:
  raise _Mixed
