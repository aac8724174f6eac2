"""Whether what a program computes of a batch is the sum of what it computes of parts of the batch.

Replicas may each differentiate the loss of their own examples, and add up, only for such a loss. A mean of
losses is one; a contrastive loss, a balance of experts, or the logarithm of a sum is none.

The program is traced twice, for one part and for the whole batch of `parts` parts, and both traces are read
side by side. Each value of the batch's program is then known in terms of the values of the parts:

- `same`: equal in all of them (it depends on no example);
- `part`: along one dim, the values of the parts one after the other (each row depends on one part);
- `sum`: the sum of the values of the parts;
- `zero`: zeros; `mixed`: anything else, with the operation that made it so.

Each relation holds up to a constant `scale`: a mean over examples is the sum of the parts' means times
`1 / parts`. A number that both traces hold as a literal, such as the number of examples, gives the scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.extend import core

from nnx_parallel.core.axes import axes_of
from nnx_parallel.core.flow import meeting
from nnx_parallel.core.jaxprs import (
  called,
  constants,
  is_tracer,
  opened,
  place_of,
  scan_counts,
)
from nnx_parallel.core.nodes import is_key
from nnx_parallel.core.tiles import ELEMENTWISE

_ROUNDING = 5e-3  # of a literal in bfloat16; scales that matter differ by a factor of 2 or more
_NONLINEAR = ELEMENTWISE | frozenset((
  "acosh", "asinh", "atanh", "bessel_i0e", "bessel_i1e", "clz", "complex", "digamma", "eq_to", "igamma",
  "igamma_grad_a", "igammac", "le_to", "lgamma", "log2", "lt_to", "mulhi", "one_minus_square", "polygamma",
  "population_count", "regularized_incomplete_beta", "zeta",
))  # fmt: skip
_IDENTITIES = ("sharding_constraint", "optimization_barrier", "reshard", "mesh_cast", "device_put", "copy",
               "copy_p", "layout_constraint", "pvary", "pcast", "name", "stop_gradient")  # fmt: skip
# Between devices: on each of them the result is a sum, or the value of another one.
_EXCHANGES = ("psum", "psum2", "psum_invariant", "ppermute")
_LINEAR = ("neg", "real", "imag", "conj", "reduce_precision", *_IDENTITIES)
_CUMULATIVE = ("cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod")
_REDUCTIONS = ("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax",
               "argmin")  # fmt: skip
_KEEP_ZEROS = frozenset((
  *_LINEAR, "add", "add_any", "broadcast_in_dim", "concatenate", "conv_general_dilated",
  "convert_element_type", "cumsum", "dot_general", "dynamic_slice", "dynamic_update_slice", "mul", "pad",
  "reduce_sum", "reshape", "rev", "scatter-add", "scatter_add", "select_n", "slice", "squeeze", "sub",
  "transpose",
))  # fmt: skip
_MATRIX = ("cholesky", "eigh", "householder_product", "lu", "qr", "schur", "svd", "triangular_solve",
           "tridiagonal_solve")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fact:
  """How a value of the batch's program follows from those of the parts.

  Attributes:
    kind: the relation.
    scale: the constant factor of the relation.
    dim: of `part`: the dim along which parts follow each other.
    outer: of `part`: in how many blocks they do: the dim is `outer x parts x rest`. None for a value that is
      constant along the dim, which is so for any number of blocks.
    reason: of `mixed`: the operation.
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
  part: Any, whole: Any, parts: int, splits: Sequence[bool], wanted: Sequence[str]
) -> tuple[list[float], str]:
  """How the results for a batch follow from the results for its parts.

  Args:
    part: the closed jaxpr of the program for one part.
    whole: for all parts at once.
    parts: how many there are.
    splits: for each flat input, whether the parts split its dim 0; else all parts get the same.
    wanted: for each flat result, `"mean"` of the parts' results, their `"sum"`, or `"rows"`: the parts'
      results one after the other.

  Returns:
    For each result, what the wanted one is to be multiplied by; and why some result does not follow, empty
    if all do.
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
  """Reads two traces of one program side by side.

  Args:
    parts: how many parts the batch of the second trace has.
  """

  def __init__(self, parts: int):
    self.parts = parts

  def as_sum(self, fact: Fact) -> Fact:
    """A value that is equal in all parts, as a sum over the parts."""
    if fact.kind == "same":
      return Fact("sum", fact.scale / self.parts)
    return fact

  def join(self, facts: Sequence[Fact]) -> Fact:
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

  def walk(self, part: Any, whole: Any, given: Sequence[Fact]) -> list[Fact]:
    """The relations of the results, from those of the inputs."""
    one, all_ = opened(part), opened(whole)
    facts: dict[Any, Fact] = dict(zip(one.invars, given, strict=True))
    consts = zip(one.constvars, constants(part), constants(whole), strict=False)
    facts.update({var: self._constant(a, b) for var, a, b in consts})
    if len(one.eqns) != len(all_.eqns) or len(one.constvars) != len(all_.constvars):
      return [_mixed("its program depends on the number of examples")] * len(one.outvars)
    for eqn, other in zip(one.eqns, all_.eqns, strict=True):
      inputs = [self._read(facts, a, b) for a, b in zip(eqn.invars, other.invars, strict=True)]
      facts.update(zip(eqn.outvars, self._results(eqn, other, inputs), strict=True))
    return [self._read(facts, a, b) for a, b in zip(one.outvars, all_.outvars, strict=True)]

  def _read(self, facts: Mapping[Any, Fact], a: Any, b: Any) -> Fact:
    if isinstance(a, core.Literal) != isinstance(b, core.Literal):
      return _mixed("its program depends on the number of examples")
    return self._constant(a.val, b.val) if isinstance(a, core.Literal) else facts[a]

  def _constant(self, a: Any, b: Any) -> Fact:
    """A number or an array that the traces hold."""
    if is_tracer(a) or is_tracer(b) or (a is b and np.ndim(a)):
      return SAME if a is b else _mixed("it holds an array of its own for each number of examples")
    if hasattr(a, "dtype") and is_key(a.dtype):
      return SAME if a is b else _mixed("it holds a key of its own")
    one, two = np.asarray(a), np.asarray(b)
    if one.dtype == jax.dtypes.float0 or not (one.any() or two.any()):
      return ZERO
    if one.shape == two.shape and (one == two).all():
      return SAME
    if not one.ndim and not two.ndim and one:
      return SAME.times(float(two) / float(one))
    changed = [d for d, (n, m) in enumerate(zip(one.shape, two.shape, strict=False)) if n != m]
    if len(changed) == 1 and (one == one.flat[0]).all() and (two == one.flat[0]).all():
      return Fact("part", dim=changed[0], outer=None)
    return _mixed("it holds an array of numbers for each example")

  def _results(self, eqn: Any, other: Any, inputs: list[Fact]) -> list[Fact]:
    mixed = next((fact for fact in inputs if fact.kind == "mixed"), None)
    if mixed is not None:
      return [mixed] * len(eqn.outvars)
    try:
      if eqn.primitive is not other.primitive:
        raise _Mixed
      found = self._rule(eqn, other, inputs)
      return [self._checked(*row) for row in zip(found, eqn.outvars, other.outvars, strict=True)]
    except _Mixed:
      return [_mixed(f"{eqn.primitive.name} ({place_of(eqn)})")] * len(eqn.outvars)

  def _checked(self, fact: Fact, a: Any, b: Any) -> Fact:
    """The relation, if the shapes of both traces agree with it."""
    one, two = list(a.aval.shape), list(b.aval.shape)
    if fact.kind == "part":
      if one[fact.dim] % (fact.outer or 1):
        raise _Mixed
      one[fact.dim] *= self.parts
    if fact.kind != "mixed" and fact.kind != "zero" and one != two:
      raise _Mixed
    return fact

  def _rule(self, eqn: Any, other: Any, inputs: list[Fact]) -> list[Fact]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name in _IDENTITIES or name in _EXCHANGES:
      return inputs[:count]
    if name == "scan":
      return self._scan(eqn, other, inputs)
    if name == "while":
      return self._while(eqn, other, inputs)
    if name == "cond":
      return self._cond(eqn, other, inputs)
    if name == "shard_map":
      return self._shard_map(eqn, other, inputs)
    inner = called(eqn)
    if inner is not None and name != "pallas_call":  # a call, a checkpoint, a custom rule
      return self.walk(inner, called(other), inputs)
    shapes = [v.aval.shape for v in eqn.outvars] == [v.aval.shape for v in other.outvars]
    if shapes and all(fact.kind in ("same", "zero") and fact.plain for fact in inputs):
      if not _same_parameters(eqn, other):
        raise _Mixed
      zeros = bool(inputs) and name in _KEEP_ZEROS and all(fact.kind == "zero" for fact in inputs)
      return [ZERO if zeros else SAME] * count
    rule = _RULES.get(name)
    if rule is not None:
      return [rule(self, eqn, other, inputs)]
    if name in _NONLINEAR:
      changed = _changed(eqn.outvars[0], other.outvars[0])
      if all(fact.kind == "zero" for fact in inputs) and len(changed) == 1:
        return [Fact("part", dim=changed[0], outer=None)] * count
      return [_rows(inputs)] * count
    return _others(eqn, other, inputs)

  def _cond(self, eqn: Any, other: Any, inputs: list[Fact]) -> list[Fact]:
    index, *given = inputs
    if index.kind not in ("same", "zero") or not index.plain:
      raise _Mixed
    branches = zip(eqn.params["branches"], other.params["branches"], strict=True)
    found = [self.walk(a, b, given) for a, b in branches]
    return [self.join(facts) for facts in zip(*found, strict=True)]

  def _while(self, eqn: Any, other: Any, inputs: list[Fact]) -> list[Fact]:
    tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    fixed, body, carried = inputs[:tests], inputs[tests : tests + bodies], inputs[tests + bodies :]
    carried = self._fixed_point(
      lambda now: self.walk(eqn.params["body_jaxpr"], other.params["body_jaxpr"], [*body, *now]), carried
    )
    (going,) = self.walk(eqn.params["cond_jaxpr"], other.params["cond_jaxpr"], [*fixed, *carried])
    if going.kind not in ("same", "zero") or not going.plain:
      raise _Mixed
    return carried

  def _fixed_point(self, body: Callable[[list[Fact]], list[Fact]], carried: list[Fact]) -> list[Fact]:
    for _ in range(8):
      after = body(carried)[: len(carried)]
      new = [self.join(pair) for pair in zip(carried, after, strict=True)]
      if new == carried:
        return carried
      carried = new
    raise _Mixed

  def _shard_map(self, eqn: Any, other: Any, inputs: list[Fact]) -> list[Fact]:
    """Each device computes with the parts of its shards, where no axis splits the dim of the parts."""
    found = self.walk(eqn.params["jaxpr"], other.params["jaxpr"], inputs)
    specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
    for fact, spec in zip((*inputs, *found), specs, strict=True):
      if fact.kind == "part" and any(axes_of(entry) for entry in tuple(spec)[fact.dim : fact.dim + 1]):
        raise _Mixed
    return found

  def _scan(self, eqn: Any, other: Any, inputs: list[Fact]) -> list[Fact]:
    counts, bodies = scan_counts(eqn), (eqn.params["jaxpr"], other.params["jaxpr"])
    fixed, carried = inputs[: counts.constants], inputs[counts.constants :][: counts.carried]
    rows = inputs[counts.constants + counts.carried :]
    if eqn.params["reverse"] != other.params["reverse"]:
      raise _Mixed
    if eqn.params["length"] != other.params["length"]:  # over the examples, one by one
      if carried or not all(_is_rows(fact) for fact in rows) or any(x.kind in ("part", "sum") for x in fixed):
        raise _Mixed
      found = self.walk(*bodies, [*fixed, *(Fact("same", fact.scale) for fact in rows)])
      if any(fact.kind not in ("same", "zero") for fact in found):
        raise _Mixed
      return [Fact("part", fact.scale) if fact.kind == "same" else ZERO for fact in found]
    if any(fact.kind == "part" and not fact.dim for fact in rows):
      raise _Mixed
    each = [fact.at(fact.dim - 1) if fact.kind == "part" else fact for fact in rows]
    carried = self._fixed_point(lambda now: self.walk(*bodies, [*fixed, *now, *each]), carried)
    found = self.walk(*bodies, [*fixed, *carried, *each])[len(carried) :]
    return [*carried, *(fact.at(fact.dim + 1) if fact.kind == "part" else fact for fact in found)]


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


def _rows(inputs: Sequence[Fact]) -> Fact:
  """An operation on each element."""
  if not all(fact.plain for fact in inputs):
    raise _Mixed
  return _along(inputs)


def _same_parameters(eqn: Any, other: Any) -> bool:
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


Rule = Callable[[_Pair, Any, Any, list[Fact]], Fact]


def _add(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del eqn, other
  return pair.join([_constant_rows(fact, inputs) for fact in inputs])


def _constant_rows(fact: Fact, inputs: Sequence[Fact]) -> Fact:
  """A scalar beside an array of rows is an array of equal rows."""
  rows = next((x for x in inputs if x.kind == "part"), None)
  return Fact("part", fact.scale, rows.dim, None) if rows and fact.kind == "same" else fact


def _mul(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, eqn, other
  return _product(*inputs)


def _product(a: Fact, b: Fact) -> Fact:
  """Of each element with each, where one depends on no example or both have the same rows."""
  if "zero" in (a.kind, b.kind):
    return ZERO
  if a.kind == "same":
    return b.times(a.scale)
  if b.kind == "same":
    return a.times(b.scale)
  return _along([a, b]).times(a.scale * b.scale) if a.kind == b.kind == "part" else _fail()


def _fail() -> Fact:
  raise _Mixed


def _div(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, eqn, other
  above, below = inputs
  if below.kind not in ("same", "part"):
    raise _Mixed
  return _product(above, dataclasses.replace(below, scale=1 / below.scale))


def _linear(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, eqn, other
  return inputs[0]


def _convert(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, other
  (fact,) = inputs
  exact = jax.numpy.issubdtype(eqn.params["new_dtype"], np.inexact) or (
    eqn.invars[0].aval.dtype != bool and not jax.numpy.issubdtype(eqn.invars[0].aval.dtype, np.inexact)
  )
  return fact if exact or fact.plain else _fail()


def _select(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del eqn, other
  which, *cases = inputs
  if not which.plain:
    raise _Mixed
  found = pair.join(cases)
  if which.kind != "part" or found.kind == "zero":
    return found
  return _along([which, found]).times(found.scale) if found.kind == "part" else _fail()


def _reduce_sum(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, other
  (fact,), axes = inputs, eqn.params["axes"]
  if fact.kind == "part" and fact.dim in axes:
    return Fact("sum", fact.scale)
  return _without_dims(fact, axes)


def _without_dims(fact: Fact, dims: Sequence[int]) -> Fact:
  return fact.at(fact.dim - sum(d < fact.dim for d in dims)) if fact.kind == "part" else fact


def _squeeze(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, other
  return _without_dims(inputs[0], eqn.params["dimensions"])


def _transpose(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, other
  (fact,) = inputs
  return fact.at(eqn.params["permutation"].index(fact.dim)) if fact.kind == "part" else fact


def _broadcast(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair
  fact, dims = inputs[0], eqn.params["broadcast_dimensions"]
  if fact.kind == "part":
    return fact.at(dims[fact.dim])
  changed = _changed(eqn.outvars[0], other.outvars[0])
  if not changed or fact.kind == "zero":
    return fact
  # The sum over a batch, beside each of its examples, is no value of one part.
  return Fact("part", fact.scale, changed[0], None) if fact.kind == "same" and len(changed) == 1 else _fail()


def _changed(a: Any, b: Any) -> list[int]:
  """The dims that differ between the traces."""
  if len(a.aval.shape) != len(b.aval.shape):
    raise _Mixed
  return [d for d, (n, m) in enumerate(zip(a.aval.shape, b.aval.shape, strict=True)) if n != m]


def _iota(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, inputs
  changed = _changed(eqn.outvars[0], other.outvars[0])
  if len(changed) != 1 or changed[0] == eqn.params["dimension"]:
    raise _Mixed
  return Fact("part", dim=changed[0], outer=None)


def _reshape(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair
  fact, before, after = inputs[0], eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
  if fact.kind != "part":
    return fact
  changed = _changed(eqn.outvars[0], other.outvars[0])
  if len(changed) != 1:
    raise _Mixed
  (dim,) = changed
  if fact.outer is None:
    return fact.at(dim) if after[dim] == before[fact.dim] else _fail()
  ahead, rest = divmod(math.prod(before[: fact.dim]) * fact.outer, math.prod(after[:dim]))
  return fact.at(dim, ahead) if not rest and ahead and not after[dim] % ahead else _fail()


def _untouched(fact: Fact, eqn: Any, other: Any, operand: int = 0) -> Fact:
  """A slice, padding or update along other dims than the one of the parts."""
  if fact.kind != "part":
    return fact
  pairs = ((eqn.invars[operand], eqn.outvars[0]), (other.invars[operand], other.outvars[0]))
  whole = all(a.aval.shape[fact.dim] == b.aval.shape[fact.dim] for a, b in pairs)
  return fact if whole else _fail()


def _slice(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair
  for key in ("start_indices", "strides"):
    if eqn.params[key] != other.params[key]:
      raise _Mixed
  return _untouched(inputs[0], eqn, other)


def _dynamic_slice(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair
  operand, *places = inputs
  if not all(fact.kind in ("same", "zero") and fact.plain for fact in places):
    raise _Mixed
  return _untouched(operand, eqn, other)


def _dynamic_update_slice(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  operand, update, *places = inputs
  if not all(fact.kind in ("same", "zero") and fact.plain for fact in places):
    raise _Mixed
  return pair.join([operand, _untouched(update, eqn, other, 1)])


def _pad(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair
  operand, value = inputs
  if value.kind != "zero" and not (value.plain and operand.plain):
    raise _Mixed
  config = eqn.params["padding_config"]
  if config != other.params["padding_config"]:
    raise _Mixed
  if operand.kind == "part" and tuple(config[operand.dim]) != (0, 0, 0):
    raise _Mixed
  return operand


def _rev(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, other
  (fact,) = inputs
  return _fail() if fact.kind == "part" and fact.dim in eqn.params["dimensions"] else fact


def _concatenate(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del other
  found, dim = pair.join(inputs), eqn.params["dimension"]
  if found.kind != "part" or found.dim != dim:
    return found
  sizes = {var.aval.shape[dim] for var in eqn.invars}
  if len(sizes) > 1 or found.outer != 1 or any(fact.kind != "part" for fact in inputs):
    raise _Mixed
  return found.at(dim, len(inputs))


def _stack(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del other
  found = pair.join(inputs)
  return found.at(found.dim + (found.dim >= eqn.params["axis"])) if found.kind == "part" else found


def _cumulative(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, other
  (fact,) = inputs
  if fact.kind == "part" and fact.dim == eqn.params["axis"]:
    raise _Mixed
  return fact if fact.plain or eqn.primitive.name == "cumsum" else _fail()


def _reduction(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, other
  (fact,), axes = inputs, eqn.params["axes"]
  if not fact.plain or (fact.kind == "part" and fact.dim in axes):
    raise _Mixed
  return _without_dims(fact, axes)


def _dot(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, other
  a, b = inputs
  met: Any = meeting(eqn)
  first = len(met.shared[0])
  for fact, mate, free, place in ((a, b, met.free[0], first), (b, a, met.free[1], first + len(met.free[0]))):
    if fact.kind == "part" and fact.dim in free:
      return fact.at(place + free.index(fact.dim)).times(mate.scale) if mate.kind == "same" else _none(mate)
  if not a.kind == b.kind == "part":
    return _product(a, b) if "part" not in (a.kind, b.kind) else _none(a, b)
  for (ones, others), summed in ((met.summed, True), (met.shared, False)):
    if a.dim in ones:
      place = list(ones).index(a.dim)
      rows = _along([a.at(0), b.at(0)]) if others[place] == b.dim else _fail()
      scale = a.scale * b.scale
      return Fact("sum", scale) if summed else Fact("part", scale, place, rows.outer)
  raise _Mixed


def _none(*facts: Fact) -> Fact:
  """The product with zeros."""
  return ZERO if any(fact.kind == "zero" for fact in facts) else _fail()


def _convolution(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair, other
  image, kernel = inputs
  numbers, params = eqn.params["dimension_numbers"], eqn.params
  if "zero" in (image.kind, kernel.kind):
    return ZERO
  if params["batch_group_count"] != 1:
    raise _Mixed
  if image.kind == "part" and image.dim == numbers.lhs_spec[0] and kernel.kind == "same":
    return image.at(numbers.out_spec[0]).times(kernel.scale)
  if image.kind == "same" and kernel.kind == "part" and kernel.dim == numbers.rhs_spec[0]:
    return (
      kernel.at(numbers.out_spec[1]).times(image.scale) if params["feature_group_count"] == 1 else _fail()
    )
  summed = image.kind == kernel.kind == "part" and params["feature_group_count"] == 1
  if summed and (image.dim, kernel.dim) == (numbers.lhs_spec[1], numbers.rhs_spec[1]):
    _along([image.at(0), kernel.at(0)])
    return Fact("sum", image.scale * kernel.scale)
  return _product(image, kernel) if "part" not in (image.kind, kernel.kind) else _fail()


def _gather(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del pair
  table, indices = inputs
  numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
  rank = len(eqn.outvars[0].aval.shape)
  looked_up = [d for d in range(rank) if d not in numbers.offset_dims]
  if not indices.plain or (indices.kind == "part" and indices.dim == len(eqn.invars[1].aval.shape) - 1):
    raise _Mixed
  if table.kind == "zero":
    changed = _changed(eqn.outvars[0], other.outvars[0])
    return ZERO if not changed else _fail()
  if indices.kind != "part":
    if table.kind != "part":
      return table
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = [d for d in range(len(sizes)) if d not in dropped]
    whole = table.dim in window and sizes[table.dim] == eqn.invars[0].aval.shape[table.dim]
    return table.at(numbers.offset_dims[window.index(table.dim)]) if whole else _fail()
  if table.kind == "same":
    return indices.at(looked_up[indices.dim]).times(table.scale)
  pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
  if table.kind == "part" and (table.dim, indices.dim) in pairs:
    return _along([table.at(0), indices.at(0)]).at(looked_up[indices.dim]).times(table.scale)
  raise _Mixed


def _scatter(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  del other
  table, indices, updates = inputs
  adds = eqn.primitive.name in ("scatter-add", "scatter_add")
  numbers = eqn.params["dimension_numbers"]
  rank, last = len(eqn.invars[2].aval.shape), len(eqn.invars[1].aval.shape) - 1
  looked_up = [d for d in range(rank) if d not in numbers.update_window_dims]
  if not indices.plain or (indices.kind == "part" and indices.dim == last):
    raise _Mixed
  if not adds and not (table.plain and updates.plain):
    raise _Mixed
  if indices.kind != "part":
    if updates.kind != "part":
      return pair.join([table, updates])
    dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [d for d in range(len(eqn.invars[0].aval.shape)) if d not in dropped]
    if updates.dim not in numbers.update_window_dims:
      return pair.join([table, Fact("sum", updates.scale)]) if adds else _fail()
    into = window[numbers.update_window_dims.index(updates.dim)]
    if eqn.invars[0].aval.shape[into] != eqn.invars[2].aval.shape[updates.dim]:
      raise _Mixed
    return pair.join([table, updates.at(into)])
  if updates.kind == "zero":
    return table
  if updates.kind != "part" or looked_up[indices.dim] != updates.dim:
    raise _Mixed
  _along([indices.at(0), updates.at(0)])
  for dim, index in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
    if index == indices.dim:
      return pair.join([table, updates.at(dim)])
  return pair.join([table, Fact("sum", updates.scale)]) if adds else _fail()


def _window(pair: _Pair, eqn: Any, other: Any, inputs: list[Fact]) -> Fact:
  """Pooling, and its gradient: in the order of the gradient's inputs, the cotangent comes first."""
  del pair, other
  fact, params = inputs[0], eqn.params
  linear = eqn.primitive.name in ("reduce_window_sum", "select_and_scatter_add")
  if fact.kind != "part":
    return fact if linear and len(inputs) == 1 else _fail()
  if not linear and not fact.plain:
    raise _Mixed
  keys = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
  single = all(params[key][fact.dim] == 1 for key in keys if params.get(key))
  if not single or params["padding"][fact.dim] != (0, 0) or not all(x.plain for x in inputs[1:]):
    raise _Mixed
  return _along([x for x in inputs if x.kind == "part"]).times(fact.scale)


def _others(eqn: Any, other: Any, inputs: list[Fact]) -> list[Fact]:
  """Operations with several results, and those on the last dims."""
  name, params = eqn.primitive.name, eqn.params
  count = len(eqn.outvars)
  if name == "sort":
    found = _rows(inputs)
    along = params["dimension"]
  elif name == "top_k":
    found, along = _rows(inputs[:1]), len(eqn.invars[0].aval.shape) - 1
  elif name == "split":
    return _split(eqn, inputs[0])
  elif name == "unstack":
    fact, axis = inputs[0], params["axis"]
    if fact.kind == "part" and fact.dim == axis:
      raise _Mixed
    return [_without_dims(fact, [axis])] * count
  elif name in _MATRIX or name == "fft":
    found = _rows(inputs)
    last = len(params["fft_lengths"]) if name == "fft" else 2
    along = found.dim if found.dim >= len(eqn.invars[0].aval.shape) - last else -1
  elif name == "random_bits":
    found, along = _rows(inputs), -1
  else:
    raise _Mixed
  del other
  return [found] * count if found.dim != along else [_fail()]


def _split(eqn: Any, fact: Fact) -> list[Fact]:
  sizes, axis = eqn.params["sizes"], eqn.params["axis"]
  if fact.kind == "part" and fact.dim == axis:
    if len({*sizes}) > 1 or fact.outer != len(sizes):
      raise _Mixed
    fact = fact.at(axis, 1)
  return [fact] * len(sizes)


_RULES: Mapping[str, Rule] = {
  **dict.fromkeys(("add", "add_any", "sub"), _add),
  **dict.fromkeys(_LINEAR, _linear),
  **dict.fromkeys(_CUMULATIVE, _cumulative),
  **dict.fromkeys(_REDUCTIONS, _reduction),
  **dict.fromkeys(("scatter", "scatter-add", "scatter_add"), _scatter),
  **dict.fromkeys(
    ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add"), _window
  ),
  "broadcast_in_dim": _broadcast,
  "concatenate": _concatenate,
  "conv_general_dilated": _convolution,
  "convert_element_type": _convert,
  "div": _div,
  "dot_general": _dot,
  "dynamic_slice": _dynamic_slice,
  "dynamic_update_slice": _dynamic_update_slice,
  "gather": _gather,
  "iota": _iota,
  "mul": _mul,
  "pad": _pad,
  "reduce_sum": _reduce_sum,
  "reshape": _reshape,
  "rev": _rev,
  "select_n": _select,
  "slice": _slice,
  "squeeze": _squeeze,
  "stack": _stack,
  "transpose": _transpose,
}
