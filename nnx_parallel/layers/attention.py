"""Computes the attention of any model by blocks of its queries and keys, without an edit.

Attention is found in the trace of a loss: a product, whatever elementwise follows (a scale, masks, biases, a
soft cap, casts), `exp(x - max)`, its sum over the keys, and a product of the quotient with the values. It is
replaced by the same operations on blocks, with a running maximum and sum (arXiv:2112.05682, 2205.14135), so
that no array of the size queries x keys exists, forward or backward. Masks are made block by block too.

Where a mesh axis splits the positions, each device computes its own queries. Keys and values are gathered, or
go round a ring of the devices (arXiv:2310.01889); or each device gets all positions of some heads instead
(arXiv:2309.14509).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec

from nnx_parallel.core.flow import meeting
from nnx_parallel.core.interpret import flattened
from nnx_parallel.core.jaxprs import (
  CALLS,
  among,
  bind,
  call_equation,
  called,
  changed_params,
  dependents,
  equations,
  has_rule,
  is_checkpoint,
  is_inexact,
  opened,
  params_of,
  without_unused,
)
from nnx_parallel.core.keys import identity
from nnx_parallel.core.ring import Ring
from nnx_parallel.core.tiles import (
  Grid,
  Labels,
  Node,
  Tiles,
  Untiled,
  described,
  filled,
  finite,
  gradients,
  ordered,
  pushed,
  tied,
)
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.fused import Kernel, NotFused, by_kernel, kernel_in_use
from nnx_parallel.layers.mark import is_marked
from nnx_parallel.layers.sinks import with_sinks_as_keys
from nnx_parallel.layers.softmaxes import Softmaxes, as_quotients, named_dims, without_shifts
from nnx_parallel.layout.constrain import manual_too

AttentionName = Literal["blocks", "fused", "ring", "all_to_all"]
Attention = AttentionName | int | None
"""`"blocks"`, or the length of the blocks; `"fused"`: a kernel where there is one; `"ring"`, `"all_to_all"`:
by blocks too, over the axis that splits positions; None: as written."""
WORDS: tuple[AttentionName, ...] = ("blocks", "fused", "ring", "all_to_all")
OVER_AXIS = ("ring", "all_to_all")
BLOCK = 512
_INNER = (*CALLS, "scan", "while", "cond")
_JUMPS = ("eq", "ne", "lt", "le", "gt", "ge", "sign", "floor", "ceil", "round")
"""Operations whose result jumps."""
_PLACES = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose")
_SCALES = (*_PLACES, "neg")
_PASSED = (*_PLACES, "stop_gradient")
"""Operations between a maximum and where it is subtracted."""
_AXIS: contextvars.ContextVar[str | None] = contextvars.ContextVar("axis of the positions", default=None)


class _NotAttention(Exception):
  """Why a softmax is not computed by blocks."""


class _NotByBlocks(_NotAttention):
  """Why an attention is not."""


@dataclasses.dataclass
class _Found:
  """The attentions of a program.

  Attributes:
    taken: for each that is computed another way, why it has no kernel.
    left: why each of the others is computed as it is written.
    kept: those that were taken whose weights are read elsewhere too, so that all of them exist.
    reasons: why softmaxes are no attentions.
  """

  taken: list[str | None] = dataclasses.field(default_factory=list[str | None])
  left: list[str] = dataclasses.field(default_factory=list[str])
  kept: list[str] = dataclasses.field(default_factory=list[str])
  reasons: list[str] = dataclasses.field(default_factory=list[str])

  def add(self, other: _Found) -> None:
    """Adds those of another program."""
    self.taken += other.taken
    self.left += other.left
    self.kept += other.kept
    self.reasons += other.reasons

  @property
  def counts(self) -> str:
    """How many were taken, of how many, and why the others were not."""
    count = len(self.taken)
    text = f"{count} of {count + len(self.left)} found" if self.left else f"{count} found"
    if self.left:
      text += f"; as written: {'; '.join(dict.fromkeys(self.left))}"
    if self.kept:
      kept = ", ".join(dict.fromkeys(self.kept))
      text += f"; its scores or weights are read elsewhere too, so all of them exist: {kept}"
    return text


@dataclasses.dataclass(frozen=True)
class _Softmax:
  """An attention in a flat program.

  Attributes:
    exp: the exponential.
    largest: the maximum over the keys.
    order: the dims of what it is the maximum of, for each of those of the scores.
    total: the sum over the keys.
    product: of the weights and the values.
    side: which operand of the product the weights are.
    labels: dims of the weights, and of the product's result, in terms of those of the scores.
    zeros_too: whether a row of weights may be all zeros, in place of what has no sum.
  """

  exp: Any
  largest: Any
  order: tuple[int, ...]
  total: Any
  product: Any
  side: int
  labels: tuple[Labels, Labels]
  zeros_too: bool

  @property
  def summed(self) -> tuple[int, ...]:
    """The dims of the scores that the softmax sums over."""
    return tuple(int(axis) for axis in self.total.params["axes"])

  @property
  def turned(self) -> list[int]:
    """The dims of the maximum, for each of those of the sum."""
    kept = [d for d in range(len(self.order)) if d not in self.summed]
    return [sorted(self.order[d] for d in kept).index(self.order[d]) for d in kept]


@contextlib.contextmanager
def queries_over(axis: str | None) -> Generator[None, None, None]:
  """Lets the devices of a mesh axis, which splits the positions, share the attention that is by blocks."""
  token = _AXIS.set(axis)
  try:
    yield
  finally:
    _AXIS.reset(token)


@dataclasses.dataclass(frozen=True)
class _Way:
  """How an attention is computed.

  Attributes:
    asked: the option.
    block: the length of the blocks.
    kernel: the fused kernel, if it is used.
    axis: the mesh axis whose devices share it; None: it is computed as if there were one device.
    size: of the axis.
    mapped: mesh axes of an enclosing `jax.vmap`.
  """

  asked: Attention
  block: int
  kernel: Kernel | None
  axis: str | None
  size: int
  mapped: frozenset[str] = frozenset()

  @property
  def is_over_axis(self) -> bool:
    """Whether it is an error if devices cannot share it."""
    return self.asked in OVER_AXIS

  def __str__(self) -> str:
    if self.is_over_axis:
      return f"attention by {str(self.asked).replace('_', ' ')} over {self.axis}={self.size}"
    return f"attention by blocks of {self.block}"


@dataclasses.dataclass(frozen=True)
class _Share:
  """What one device computes of an attention that the devices of a mesh axis share.

  Attributes:
    axis: the mesh axis; None: one device computes it all.
    size: of the axis.
    row, column: the names of the dims of queries and of keys.
    dim: the name of the dim of the scores that is split: queries, or heads.
    moving: the name of the keys' dim, if it is split too and its shards go round; else None.
    grid: the blocks of the scores, of all devices.
    mapped: mesh axes of an enclosing `jax.vmap`.
  """

  axis: str | None
  size: int
  row: int
  column: int
  dim: int
  moving: int | None
  grid: Grid
  mapped: frozenset[str] = frozenset()

  @property
  def names(self) -> tuple[int, ...]:
    """The dims of the scores of which there are parts, of a device or of a tile."""
    return tuple(sorted({self.row, self.column, self.dim}))

  @property
  def own(self) -> Grid:
    """The blocks of what a device has at a time."""
    split = {self.dim, self.moving} if self.axis is not None else set[Any]()
    lengths = {name: n // self.size if name in split else n for name, n in self.grid.lengths.items()}
    return Grid(lengths, {name: self.grid.blocks[name] for name in (self.row, self.column)})

  def split(self, labels: Labels) -> tuple[Any, int, int] | None:
    """The label along which an array is split; None: it is whole on each device."""
    names = () if self.axis is None else (self.dim, self.moving)
    return next((label for name in names for label in labels if label[0] == name), None)

  def moves(self, labels: Labels) -> bool:
    """Whether the shards of an array go round: it has keys, and no queries."""
    found = self.split(labels)
    return found is not None and found[0] == self.moving

  def local(self, shape: Sequence[int], labels: Labels) -> tuple[int, ...]:
    """The shape of one device's part of an array."""
    found = self.split(labels)
    own = None if found is None else found[1]
    return tuple(n // self.size if d == own else n for d, n in enumerate(shape))

  def spec(self, labels: Labels) -> PartitionSpec:
    """How an array is split."""
    found = self.split(labels)
    return PartitionSpec() if found is None else PartitionSpec(*[None] * found[1], self.axis)

  def places(self, device: Any, source: Any, places: Mapping[Any, Any]) -> dict[Any, Any]:
    """The numbers of blocks among those of all devices, with keys of the device `source`."""
    counts = {
      name: self.grid.count(name) // self.size for name in (self.dim, self.moving) if name is not None
    }
    starts = {self.dim: device, self.moving: source}
    found = {**places}
    if self.axis is not None:
      found |= {name: places.get(name, 0) + starts[name] * count for name, count in counts.items()}
    return found

  def part(self, x: Any, labels: Labels, source: Any) -> Any:
    """What a device uses of an array with its queries and all keys, for the keys of a device."""
    return self._keys(labels).take(x, labels, {self.moving: source})

  def added(self, x: Any, part: Any, labels: Labels, source: Any) -> Any:
    """Such an array, or another one, with something added to that part."""
    where = {self.moving: source}
    return self._keys(labels).put(x, self._keys(labels).take(x, labels, where) + part, labels, where)

  def _keys(self, labels: Labels) -> Grid:
    """The shards of the keys, as blocks."""
    if self.moving is None or self.moves(labels):
      return Grid({}, {})
    length = self.grid.lengths[self.moving]
    return Grid(self.grid.lengths, {self.moving: length // self.size})

  def over(self, function: Callable[..., Any], given: Any, results: Any) -> Callable[..., Any]:
    """A function of `(device, *arrays)` for all devices; `given` and `results` are specs."""
    if self.axis is None:
      return lambda *arrays: function(0, *arrays)
    run = jax.shard_map(
      lambda numbers, *arrays: function(numbers[0], *arrays),
      in_specs=(PartitionSpec(self.axis), *given),
      out_specs=results,
      axis_names={self.axis, *self.mapped},
      check_vma=False,
    )
    return lambda *arrays: run(jnp.arange(self.size, dtype=jnp.int32), *arrays)

  def by_heads(self, x: Any, labels: Labels) -> Any:
    """An array that is split by positions, split by heads if those are what is split: by an all-to-all.

    XLA would else compute the array by heads, from all positions.
    """
    return self._on(self.by_positions(x, labels), self.split(labels))

  def by_positions(self, x: Any, labels: Labels) -> Any:
    """An array that is split by heads, split by positions."""
    label = next((own for own in labels if own[0] in (self.row, self.column)), None)
    return x if self.split(labels) is None else self._on(x, label)

  def _on(self, x: Any, label: tuple[Any, int, int] | None) -> Any:
    if self.dim == self.row or label is None or label[2] > 1 or x.shape[label[1]] % self.size:
      return x
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[label[1]] = self.axis
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))

  def around(self, visit: Callable[..., Any], device: Any, moving: Any, state: Any) -> Any:
    """Visits a device's keys with `(source, moving, state)`, then those of the others, if they go round."""
    if self.moving is None:
      return visit(0, moving, state)
    ring = Ring(str(self.axis), self.size)
    return ring.around(
      lambda hop, *given: visit((device - hop) % self.size, *given), moving, state, self.size
    )

  def sent(self, tree: Any) -> Any:
    """What the device before has."""
    return Ring(str(self.axis), self.size).sent(tree)

  def has(self, labels: Labels) -> bool:
    """Whether an array is split, or there is one device; the others are whole on each device."""
    return self.axis is None or self.split(labels) is not None


def check_attention(attention: Attention) -> Attention:
  """The option itself.

  Raises:
    TrainError: it is none.
  """
  if (
    attention is None
    or (isinstance(attention, str) and attention in WORDS)
    or (type(attention) is int and attention > 0)
  ):
    return attention
  raise TrainError(
    f"attention={attention!r} is not a way to compute attention.",
    fix='attention="blocks", or the length of the blocks: attention=256; "fused"; "ring"; "all_to_all";'
    " None: as written.",
  )


def by_blocks(jaxpr: Any, attention: Attention) -> tuple[Any, str]:
  """The trace of a loss with its attention by blocks or a kernel, and a line that says what was found.

  Raises:
    TrainError: none is found; with an option of `OVER_AXIS`, one of them cannot be shared by the devices.
  """
  way, found = _way(attention), _Found()
  changed = _changed(jaxpr, way, found, {})
  if way.is_over_axis and found.left:
    raise _not_shared(way, "; ".join(dict.fromkeys(found.left)))
  if not found.taken:
    reasons = dict.fromkeys([*found.left, *found.reasons])
    raise TrainError(
      f"attention={attention!r} finds no attention in the loss.",
      details="; ".join(reasons) or "no softmax is followed by a product with values",
      fix="softmax(q k^T) v with dropout off, in jax.numpy, jax.nn.dot_product_attention or"
      " nnx.dot_product_attention; or leave attention out.",
    )
  line = f"{way}: {found.counts}"
  if attention != "fused":
    return changed, line
  if way.kernel is None:
    return changed, f"{line}; no fused kernel for this platform"
  why = "; ".join(dict.fromkeys(reason for reason in found.taken if reason is not None))
  count = len(found.taken) + len(found.left)
  line = f"attention by the fused kernel: {found.taken.count(None)} of {count} found"
  line += f"; by blocks of {way.block}: {why}" if why else ""
  return changed, line + (f"; as written: {'; '.join(dict.fromkeys(found.left))}" if found.left else "")


def _not_shared(way: _Way, why: str) -> TrainError:
  return TrainError(
    f"attention={way.asked!r}: {way.axis}={way.size} cannot share an attention that was found.",
    details=why,
    fix='dropout off, and lengths (attention="ring") or heads (attention="all_to_all") that are'
    f' multiples of {way.size}; or attention="blocks".',
  )


def _way(attention: Attention) -> _Way:
  """How attention is computed on the mesh that is active.

  Raises:
    TrainError: with an option of `OVER_AXIS`, no axis splits the positions, or it is Explicit.
  """
  block = attention if isinstance(attention, int) else BLOCK
  kernel = kernel_in_use() if attention == "fused" else None
  mesh: Any = jax.sharding.get_abstract_mesh()
  kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  axis, mapped = _AXIS.get(), manual_too(mesh)
  if axis is not None and axis not in mapped and kinds.get(axis) == AxisType.Auto:
    return _Way(attention, block, kernel, axis, mesh.shape[axis], mapped)
  if attention in OVER_AXIS:
    raise TrainError(
      f"attention={attention!r} needs a mesh axis that splits the positions.",
      details=f"mesh {dict(mesh.shape)}"
      + (f", whose axis {axis!r} is {kinds[axis].name}" if axis in kinds else ""),
      fix="nxp.make_mesh(data=2, context=4), not explicit, and nxp.presets.context(), or a rule for `seq` on"
      " an axis that splits no weight.",
    )
  return _Way(attention, block, kernel, None, 1)


def _changed(jaxpr: Any, way: _Way, found: _Found, layers: dict[Any, tuple[Any, _Found]]) -> Any:
  """The program with its attention computed another way. Equal layers get one program, which is made once."""
  flat: Any = with_sinks_as_keys(flattened(jaxpr, is_opened), is_opened)
  flat = as_quotients(without_shifts(flat))
  body = flat.jaxpr
  softmaxes = Softmaxes(body)
  eqns: dict[int, Any] = {}
  matches: list[_Softmax] = []
  here = _Found()
  left: dict[int, str] = {}  # by product
  taken: set[int] = set()
  for eqn in body.eqns:
    if eqn.primitive.name == "exp":
      reasons: list[str] = []
      others = softmaxes.products(eqn, *named_dims(eqn.outvars[0].aval.shape))
      for match in _attentions(body, eqn, reasons):
        try:
          new, why = _replaced(body, match, way)
        except _NotAttention as problem:
          if isinstance(problem, _NotByBlocks) and way.is_over_axis:
            raise _not_shared(way, str(problem)) from None
          reasons.append(str(problem))
          if not isinstance(problem, _NotByBlocks):
            taken.add(id(match.product))  # no attention
          continue
        here.taken.append(why)
        taken.add(id(match.product))
        if new is not None:
          eqns[id(match.product)] = new
          matches.append(match)
      reason = "; ".join(reasons) or f"softmax of {eqn.outvars[0].aval.str_short()}: {_form(body, eqn)}"
      left.update({id(product): reason for product in others if id(product) not in left})
      here.reasons += reasons
    elif is_marked(eqn):
      layer = identity(called(eqn))
      if layer not in layers:
        inside = _Found()
        layers[layer] = _changed(called(eqn), way, inside, layers), inside
      here.add(layers[layer][1])
      eqns[id(eqn)] = eqn.replace(params=eqn.params | {"jaxpr": layers[layer][0]})
    elif eqn.primitive.name in _INNER or is_checkpoint(eqn):
      inside = {key: _inner(value, way, here, layers) for key, value in params_of(eqn).items()}
      eqns[id(eqn)] = eqn.replace(params=changed_params(eqn, inside))
  here.left += [reason for product, reason in left.items() if product not in taken]
  if here.taken:
    body = without_unused(body.replace(eqns=[eqns.get(id(eqn), eqn) for eqn in body.eqns]))
    remaining = {id(eqn) for eqn in body.eqns}
    here.kept += [_softmax(match) for match in matches if _exists(flat.jaxpr, match, remaining)]
  found.add(here)
  if not here.taken:
    return jaxpr
  return flat.replace(jaxpr=body) if opened(jaxpr) is not jaxpr or flat.consts else body


def _exists(body: Any, match: _Softmax, remaining: set[int]) -> bool:
  """Whether the exponentials of an attention are among the operations that remain, or its scores."""
  if id(match.exp) in remaining:
    return True
  made, size = {out: eqn for eqn in body.eqns for out in eqn.outvars}, match.exp.outvars[0].aval.size
  todo, seen = [*match.exp.invars], set[Any]()
  while todo:
    var = todo.pop()
    if isinstance(var, core.Literal) or var in seen or var.aval.size < size or var not in made:
      continue
    seen.add(var)
    if made[var].primitive.name == "dot_general" and id(made[var]) in remaining:
      return True
    todo += [] if made[var].primitive.name == "dot_general" else made[var].invars
  return False


def _form(body: Any, exp: Any) -> str:
  """How a softmax is written that is followed by a product, and is none of those that are known."""
  if _largest(body, exp)[0] is None:
    return "what is subtracted from its scores is not their maximum (a maximum with a sink, or nothing)"
  return "its weights are not exponentials over their sum (a sink, an epsilon, softmax plus one)"


def _inner(value: Any, *args: Any) -> Any:
  if isinstance(value, tuple):
    return tuple(_inner(item, *args) for item in value)
  return _changed(value, *args) if hasattr(opened(value), "eqns") else value


def is_opened(eqn: Any) -> bool:
  """Whether an operation is a call whose operations may be part of an attention."""
  name = eqn.primitive.name
  if has_rule(eqn) and "bwd" not in params_of(eqn):  # jax.nn.softmax
    inside = {e.primitive.name for e in equations(called(eqn))}
    return {"reduce_max", "exp", "reduce_sum"} <= inside
  return name in CALLS and not is_marked(eqn)


def _attentions(body: Any, exp: Any, reasons: list[str]) -> list[_Softmax]:
  """The products of values with the softmax that an exponential belongs to."""
  largest, order = _largest(body, exp)
  if largest is None:
    return []
  scores, shape = exp.outvars[0], exp.outvars[0].aval.shape
  axes = {d for d, place in enumerate(order) if place in largest.params["axes"]}
  lengths, named = named_dims(shape)
  # The powers of the exponential and of its sum in a value.
  powers: dict[Any, tuple[int, int]] = {scores: (1, 0)}
  labels: dict[Any, Labels] = {scores: named}
  totals: list[Any] = []
  found: list[_Softmax] = []
  zeros: set[Any] = set()
  problems: list[str] = []
  selected: set[Any] = set()  # weights of which some were replaced: a row of them may be all zeros
  spoiled: set[Any] = set()  # what depends on weights in another way
  for eqn in body.eqns:
    if not eqn.outvars or any(among(var, spoiled) for var in eqn.invars):
      spoiled.update(eqn.outvars)
      continue
    name, out = eqn.primitive.name, eqn.outvars[0]
    own = [None if isinstance(v, core.Literal) else powers.get(v) for v in eqn.invars]
    if not any(own):
      if name == "broadcast_in_dim" and _is_zero(eqn.invars[0], zeros):
        zeros.add(out)
      continue
    side = next(n for n, power in enumerate(own) if power)
    if name == "reduce_sum" and own == [(1, 0)]:
      if {int(axis) for axis in eqn.params["axes"]} == axes and {*labels[eqn.invars[0]]} == {*named}:
        totals.append(eqn)
        powers[out], labels[out] = (0, 1), pushed(eqn, 0, named, lengths)
      continue
    if name == "dot_general":
      if own.count(None) == 1 and own[side] == (1, -1):
        place = _placed(eqn, side, labels[eqn.invars[side]], axes, lengths)
        if place is not None:
          given = labels[eqn.invars[side]], place
          zeros_too = eqn.invars[side] in selected
          found.append(_Softmax(exp, largest, order, totals[0], eqn, side, given, zeros_too))
      elif own[side] == (1, 0):
        problems.append(f"its exponentials meet {described(eqn)} before they are divided by their sum")
      continue
    power = _power(eqn, own, zeros)
    try:
      if power is None:
        raise Untiled(eqn)
      labels[out] = _joined(eqn, [n for n, known in enumerate(own) if known], labels, lengths)
      powers[out] = power
      if power == (1, -1) and (name == "select_n" or eqn.invars[side] in selected):
        selected.add(out)
    except Untiled:
      spoiled.update(eqn.outvars)
      if name not in ("log", "add", "max"):  # of a log-sum-exp, which is no attention
        sink = (
          " (a logit that belongs to no key, an attention sink, is cut off so)" if name == "slice" else ""
        )
        problems.append(f"its weights go through {described(eqn)}{sink}")
  if len(totals) > 1:
    problems.append(f"its weights are summed {len(totals)} times")
    found = []
  if not found:
    reasons += [f"softmax of {exp.outvars[0].aval.str_short()}: {problem}" for problem in problems]
  return found


def _largest(body: Any, exp: Any) -> tuple[Any, tuple[int, ...]]:
  """The maximum that is subtracted before an exponential, or None, and the order of its dims."""
  made = {out: eqn for eqn in body.eqns for out in eqn.outvars}
  difference = made.get(exp.invars[0])
  if difference is None or difference.primitive.name != "sub":
    return None, ()
  var = difference.invars[1]
  while not isinstance(var, core.Literal) and (eqn := made.get(var)) is not None:
    name = eqn.primitive.name
    if name == "reduce_max":
      order = _order_of(eqn.invars[0], difference.invars[0], made)
      return (None, ()) if order is None else (eqn, order)
    if name == "max" and isinstance(eqn.invars[0], core.Literal) and eqn.invars[0].val == -math.inf:
      var = eqn.invars[1]
    elif name == "select_n" and _is_where_finite(eqn, made):  # of a log-sum-exp
      var = eqn.invars[2]
    elif name in _PASSED:
      var = eqn.invars[0]
    else:
      return None, ()
  return None, ()


def _is_where_finite(eqn: Any, made: Mapping[Any, Any]) -> bool:
  """Whether a selection is the value, and 0 where that is not finite."""
  if len(eqn.invars) != 3 or any(isinstance(var, core.Literal) for var in eqn.invars[::2]):
    return False
  test, other = made.get(eqn.invars[0]), eqn.invars[1]
  zeros = made.get(other) if not isinstance(other, core.Literal) else None
  if zeros is not None and zeros.primitive.name == "broadcast_in_dim":
    other = zeros.invars[0]
  is_test = test is not None and test.primitive.name == "is_finite" and test.invars[0] is eqn.invars[2]
  return is_test and _is_zero(other, set())


def _order_of(var: Any, scores: Any, made: Mapping[Any, Any]) -> tuple[int, ...] | None:
  """The dims of a value, for each of those of the scores, which it is in another order; None: it is not."""
  (first, dims), (second, wanted) = (_turned_back(x, made) for x in (var, scores))
  if first is second:
    return tuple(dims.index(d) for d in wanted)
  return tuple(range(len(wanted))) if var.aval.shape == scores.aval.shape else None


def _turned_back(var: Any, made: Mapping[Any, Any]) -> tuple[Any, tuple[int, ...]]:
  """What a value is in another order of its dims and another dtype, and its dims, for each of the value's."""
  dims = tuple(range(len(var.aval.shape)))
  while not isinstance(var, core.Literal) and (eqn := made.get(var)) is not None:
    name = eqn.primitive.name
    if name == "transpose":
      dims = tuple(eqn.params["permutation"][d] for d in dims)
    elif name not in ("convert_element_type", "copy", "stop_gradient"):
      break
    var = eqn.invars[0]
  return var, dims


def _joined(
  eqn: Any, operands: Sequence[int], labels: Mapping[Any, Labels], lengths: Mapping[Any, int]
) -> Labels:
  """The labels of a result of exponentials and their sums, which must lie along the same dims.

  Raises:
    Untiled: they lie along others, or the operation does not say where.
  """
  found: dict[Any, tuple[int, int]] = {}
  for n in operands:
    for name, dim, factor in pushed(eqn, n, labels[eqn.invars[n]], lengths):
      if found.setdefault(name, (dim, factor)) != (dim, factor):
        raise Untiled(eqn)
  return tuple((name, *place) for name, place in found.items())


def _is_zero(var: Any, zeros: set[Any]) -> bool:
  return not var.val if isinstance(var, core.Literal) and not jnp.ndim(var.val) else var in zeros


def _power(eqn: Any, own: list[Any], zeros: set[Any]) -> tuple[int, int] | None:
  """The powers in a result, of an operation that multiplies or selects; None for others."""
  name = eqn.primitive.name
  if name in _SCALES:
    return own[0]
  powers = [power or (0, 0) for power in own]
  if name == "mul":
    return powers[0][0] + powers[1][0], powers[0][1] + powers[1][1]
  if name == "div":
    return powers[0][0] - powers[1][0], powers[0][1] - powers[1][1]
  if name == "integer_pow":
    return powers[0][0] * eqn.params["y"], powers[0][1] * eqn.params["y"]
  if name == "select_n" and own[0] is None:
    cases = {power for power, var in zip(own[1:], eqn.invars[1:], strict=True) if not _is_zero(var, zeros)}
    return cases.pop() if len(cases) == 1 else None
  return None


def _placed(
  product: Any, side: int, labels: Labels, axes: set[int], lengths: dict[int, int]
) -> Labels | None:
  """The labels of a product's result, if it sums over just the keys."""
  met: Any = meeting(product)
  keys = {d for d in axes if lengths[d] > 1}
  names = {dim: _wholes(labels, [dim]) for dim in met.summed[side]}
  if sorted(name for own in names.values() for name in own) != sorted(keys) or any(
    product.invars[side].aval.shape[dim] != math.prod(lengths[name] for name in own)
    for dim, own in names.items()
  ):
    return None
  return pushed(product, side, labels, lengths)


def _replaced(body: Any, match: _Softmax, way: _Way) -> tuple[Any, str | None]:
  """The operation that computes an attention, or None where one block holds it all; and why no kernel does.

  The reason is None where a kernel does.

  Raises:
    _NotAttention: it is none, or cannot be computed by blocks.
  """
  if way.kernel is None:
    return _blocked(body, match, way), ""
  try:
    return by_kernel(body, match, way.kernel), None
  except NotFused as problem:
    return _blocked(body, match, way), f"{_softmax(match)}: {problem}"


def _blocked(body: Any, match: _Softmax, way: _Way) -> Any:
  """The operation that computes an attention by blocks; None where one block holds it all.

  Raises:
    _NotAttention: it is none, or cannot be, by the devices that must share it.
  """
  weights, product = match.product.invars[match.side], match.product
  scores = match.exp.outvars[0]
  lengths, _ = named_dims(scores.aval.shape)
  free = meeting(product).free[match.side]  # pyright: ignore[reportOptionalMemberAccess]
  rows = _wholes(match.labels[0], free)
  columns = [name for name, _, _ in match.labels[0] if name in match.summed]
  if not rows or not columns:
    raise _NotAttention(f"{_softmax(match)}: it is not over keys for each query")
  row, column = max(rows, key=lengths.__getitem__), max(columns, key=lengths.__getitem__)
  share = _shared(match, way, lengths, row, column)
  cut = {match.largest.outvars[0], match.total.outvars[0]}
  depends = dependents(body, cut)
  tiles = Tiles(body, share.grid, lambda var, own: var in cut or _is_leaf(tiles, var, own, share, depends))
  own = tuple((name, name, 1) for name in share.names)
  ends = [
    (match.largest.invars[0], ordered((name, match.order[name], 1) for name in share.names)),
    (scores, own),
    (match.total.invars[0], own),
    (weights, _only(match.labels[0], *share.names)),
  ]
  for var, labels in ends:
    try:
      tiles.need(var, labels, depends.__contains__)
    except Untiled as problem:
      raise _NotByBlocks(f"{_softmax(match)}: its weights go through {problem}") from None
  tiles.need(product.invars[1 - match.side], _of_values(match, share))
  _check_leaves(body, tiles, scores, {row, column}, cut)
  split = [share.split(labels) for labels in (*(labels for _, labels in tiles.leaves), match.labels[1])]
  if any(label is not None and label[2] > 1 for label in split):  # the minor one of several in a dim
    if way.is_over_axis:
      raise _NotByBlocks(f"{_softmax(match)}: its queries, keys or heads are the minor part of a dim")
    return _blocked(body, match, dataclasses.replace(way, axis=None, size=1))
  if all(share.grid.count(name) == 1 for name in share.grid.blocks):
    return None
  function, leaves = _function(match, tiles, ends, share)
  return call_equation(function, [var for var, _ in leaves], product.outvars, product)


def _is_leaf(tiles: Tiles, var: Any, own: Labels, share: _Share, depends: Any) -> bool:
  """Whether a value is sliced, rather than computed for each tile."""
  if var in depends or {share.row, share.column} <= {name for name, _, _ in own}:
    return False
  # Keys and values that a model repeats, for groups of heads, are sent before they are.
  made = tiles.made(var)
  while share.axis is not None and made is not None and made.primitive.name in _PLACES:
    if made.invars[0].aval.size < var.aval.size:
      return False
    made = None if isinstance(made.invars[0], core.Literal) else tiles.made(made.invars[0])
  return True


def _shared(match: _Softmax, way: _Way, lengths: Mapping[Any, int], row: int, column: int) -> _Share:
  """The part of an attention that each device computes; all of it, unless devices share it evenly.

  Raises:
    _NotByBlocks: they cannot, and must.
  """
  is_ring, axis, n, dim = way.asked == "ring", way.axis, way.size, row
  if way.asked == "all_to_all":
    dim = _heads(match, way, lengths)
  elif axis is not None and any(lengths[name] % n for name in (row, *([column] if is_ring else []))):
    if is_ring:
      raise _NotByBlocks(
        f"{_softmax(match)}: {n} devices cannot split {lengths[row]} queries and {lengths[column]} keys"
      )
    axis, n = None, 1
  moving = column if is_ring else None
  split = {dim, moving} if axis is not None else set[Any]()
  sizes: dict[Any, int] = {dim: lengths[dim] // n}
  for name in (row, column):
    sizes[name] = (
      _block(lengths[name], way.block) if name not in split else _divisor(lengths[name] // n, way.block)
    )
  return _Share(axis, n, row, column, dim, moving, Grid(lengths, sizes), way.mapped)


def _softmax(match: _Softmax) -> str:
  return f"softmax of {match.exp.outvars[0].aval.str_short()}"


def _block(length: int, block: int) -> int:
  """The length of equal blocks of at most `block`."""
  return -(-length // -(-length // block))


def _divisor(length: int, block: int) -> int:
  """The divisor of a length that is nearest to a block's, as a ratio."""
  return min((n for n in range(1, length + 1) if not length % n), key=lambda n: abs(math.log(n / block)))


def _heads(match: _Softmax, way: _Way, lengths: Mapping[Any, int]) -> int:
  """The dim of the scores that is heads: the last that weights and values share, after that of the examples.

  Raises:
    _NotByBlocks: there is none, or devices cannot share it evenly.
  """
  shape = match.exp.outvars[0].aval.shape
  shared = meeting(match.product).shared[match.side]  # pyright: ignore[reportOptionalMemberAccess]
  names = _wholes(match.labels[0], shared)
  kept = [name for name, _, _ in match.labels[1]]
  if len(shared) < 2 or not names or names[-1] not in kept:
    raise _NotByBlocks(f"{_softmax(match)}: no dim of it is heads of values")
  if lengths[names[-1]] % way.size:
    raise _NotByBlocks(
      f"{_softmax(match)}: {way.size} devices cannot share {shape[names[-1]]} heads of values"
    )
  return names[-1]


def _check_leaves(body: Any, tiles: Tiles, scores: Any, names: set[int], cut: set[Any]) -> None:
  """Refuses scores that no product makes, and parts of them that would be made whole or of whole scores."""
  text = f"softmax of {scores.aval.str_short()}"
  meets = [
    eqn
    for (_, labels), (eqn, wanted) in tiles.parts.items()
    if eqn.primitive.name == "dot_general"
    and names <= {name for name, _, _ in labels}
    and all(len(names & {name for name, _, _ in own}) == 1 for own in wanted)
  ]
  of_scores = dependents(body, {out for eqn in meets for out in eqn.outvars})
  own = {var for var, _ in tiles.leaves if var in of_scores and var not in cut and is_inexact(var.aval)}
  depends = dependents(body, own)
  for eqn, _ in tiles.parts.values():
    if eqn.primitive.name in _JUMPS and any(among(var, depends) for var in eqn.invars):
      # A tile rounds its scores in another way: what equals the other operand may be found above or below it.
      first = next(var for var in own if eqn.outvars[0] in dependents(body, {var}))
      raise _NotByBlocks(
        f"{text}: {described(eqn)} compares its scores with {described(tiles.made(first))}, which is computed"
        " from all of a row"
      )
  for var, labels in tiles.leaves:
    made = tiles.made(var)
    if made is None or not names <= {name for name, _, _ in labels}:
      continue
    if "random" in made.primitive.name or "threefry" in made.primitive.name:
      raise _NotByBlocks(f"{text}: dropout is between it and its product ({described(made)})")
    if math.prod(var.aval.shape) >= math.prod(scores.aval.shape):
      raise _NotByBlocks(f"{text}: {described(made)} cannot be evaluated by blocks")
  if not meets:
    raise _NotAttention(f"{text}: no product of queries and keys makes it")


def _function(
  match: _Softmax, tiles: Tiles, ends: Sequence[Node], share: _Share
) -> tuple[Callable[..., Sequence[Any]], list[Node]]:
  """The attention as a function of its leaves, and those."""
  product, side, axes, grid = match.product, match.side, match.summed, share.own
  cut = {match.largest.outvars[0], match.total.outvars[0]}
  value_node: Node = product.invars[1 - side], _of_values(match, share)
  nodes = [node for node in tiles.leaves if node[0] not in cut]
  floats = [node for node in nodes if is_inexact(node[0].aval)]
  others = [node for node in nodes if not is_inexact(node[0].aval)]
  (largest_in, largest_own), (scores, own), (total_in, _), (weights, weights_own) = ends
  out = product.outvars[0]
  out_own = _only(match.labels[1], share.row, share.dim)
  kept = [d for d in range(len(scores.aval.shape)) if d not in axes]
  placed = {name: (dim, factor) for name, dim, factor in match.labels[1]}
  order = _order(match, placed)
  stat_own: Labels = tuple((name, kept.index(name), 1) for name in share.names if name in kept)
  wide = jnp.promote_types(out.aval.dtype, jnp.float32)

  def exponentials(known: dict[Node, Any], largest: Any, total: Any, places: Any) -> tuple[Any, Any]:
    """The product of a tile's weights, and the sum of its exponentials."""
    for eqn, x in ((match.largest, largest.transpose(np.argsort(match.turned))), (match.total, total)):
      var = eqn.outvars[0]
      x = x.astype(var.aval.dtype)
      known.update({node: x for node in tiles.leaves if node[0] is var})
    known[scores, own] = tiles.grid.fresh(tiles.value(scores, own, known, places), own, places)
    part = tiles.value(total_in, own, known, places)
    pair = [tiles.value(*node, known, places) for node in ((weights, weights_own), value_node)]
    made = bind(product, pair if side == 0 else pair[::-1], preferred_element_type=wide)
    return made[0].astype(wide), part.astype(wide).sum(axes)

  def spread(stat: Any, shape: Sequence[int]) -> Any:
    """A statistic of the rows, with the dims of the product's result."""
    cuts = {name: dim for name, dim, _ in stat_own}
    sizes = [stat.shape[cuts[name]] if name in cuts else tiles.grid.lengths[name] for name in order]
    arranged = sorted(order, key=lambda name: placed[name])
    stat = stat.reshape(sizes).transpose([order.index(name) for name in arranged])
    dims = {dim for dim, _ in placed.values()}
    return jnp.broadcast_to(stat.reshape([n if d in dims else 1 for d, n in enumerate(shape)]), shape)

  nodes = [*floats, *others]

  def part_of(aval: Any, labels: Labels, value: float) -> Any:
    """An array of one value, for the queries of a device."""
    return filled(aval.update(shape=share.local(aval.shape, labels)), value, wide)

  def going_round(given: Sequence[Any]) -> dict[int, Any]:
    """The arrays whose shards go round, by their place."""
    return {n: x for n, (x, (_, o)) in enumerate(zip(given, nodes, strict=True)) if share.moves(o)}

  def at_hand(given: Sequence[Any], moving: Mapping[int, Any], source: Any) -> list[Any]:
    """What a device has of the arrays while it has keys of another one."""
    whole = [share.part(x, o, source) for x, (_, o) in zip(given, nodes, strict=True)]
    return [moving.get(n, x) for n, x in enumerate(whole)]

  def part_forward(device: Any, *arrays: Any) -> tuple[Any, Any, Any]:
    def visit(source: Any, moving: Mapping[int, Any], state: Any) -> Any:
      rows = grid.tiles()
      *given, first, second = tied([*at_hand(arrays, moving, source), *rows.values()])

      def body(carry: tuple[Any, Any, Any], places: Any) -> tuple[tuple[Any, Any, Any], None]:
        known = {(var, o): grid.take(x, o, places) for (var, o), x in zip(nodes, given, strict=True)}
        before, total = (grid.take(x, stat_own, places) for x in carry[:2])
        result = grid.take(carry[2], out_own, places)
        at = share.places(device, source, places)
        tile = tiles.value(largest_in, largest_own, known, at).astype(wide)
        # The result does not depend on the maximum, so that its derivative is left out.
        top = tiles.grid.fresh(tile, largest_own, at, -math.inf).max(match.largest.params["axes"])
        top = jax.lax.stop_gradient(top.transpose(match.turned))
        after = jnp.maximum(before, top)
        part, more = exponentials(known, finite(after), jnp.ones_like(total), at)
        scale = jnp.exp(before - finite(after))
        changes = after, total * scale + more, result * spread(scale, result.shape) + part
        labels = stat_own, stat_own, out_own
        return tuple(
          grid.put(x, new, o, places) for x, new, o in zip(carry, changes, labels, strict=True)
        ), None  # pyright: ignore[reportReturnType]

      return jax.lax.scan(body, state, dict(zip(rows, (first, second), strict=True)))[0]

    row_type = match.total.outvars[0].aval
    start = (
      part_of(row_type, stat_own, -math.inf),
      part_of(row_type, stat_own, 0),
      part_of(out.aval, out_own, 0),
    )
    largest, total, result = share.around(visit, device, going_round(arrays), start)
    if match.zeros_too:
      total = jnp.where(total == 0, jnp.ones_like(total), total)
    return (result / spread(total, result.shape)).astype(out.aval.dtype), finite(largest), total

  def part_backward(device: Any, result: Any, largest: Any, total: Any, arriving: Any, *given: Any) -> Any:
    arriving = arriving.astype(wide)
    sloped = jax.linear_transpose(lambda x: spread(x, result.shape), total)(arriving * result.astype(wide))[0]
    cotangents = [(arriving, out_own), (-sloped / total, stat_own)]

    def visit(source: Any, moving: Mapping[int, Any], sums: Any) -> Any:
      def part(places: Any, fixed: Sequence[Any], *tiles_of: Any) -> Sequence[Any]:
        *fixed, top, total = fixed
        known = dict(zip(nodes, (*tiles_of, *fixed), strict=True))
        return [*exponentials(known, top, total, share.places(device, source, places))]

      pairs = [(x, o) for x, (_, o) in zip(at_hand(given, moving, source), nodes, strict=True)]
      inputs, fixed = pairs[: len(floats)], pairs[len(floats) :]
      found = gradients(part, inputs, [*fixed, (largest, stat_own), (total, stat_own)], cotangents, grid)
      if share.moving is None:
        return found
      # The gradients of a shard arrive while its share of this device is computed.
      if sums is None:
        sums = [jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)) for x in given[: len(floats)]]
      else:
        sums = [share.sent(x) if share.moves(o) else x for x, (_, o) in zip(sums, floats, strict=True)]
      return [
        share.added(x, new.astype(x.dtype), o, source)
        for x, new, (_, o) in zip(sums, found, floats, strict=True)
      ]

    found = share.around(visit, device, going_round(given), None)
    found = [x.astype(var.aval.dtype) for x, (var, _) in zip(found, floats, strict=True)]
    # What all devices read has a gradient from each, summed outside: XLA gathers the examples for a sum here.
    return tuple(
      (share.sent(x) if share.moves(o) else x) if share.has(o) else x[None]
      for x, (_, o) in zip(found, floats, strict=True)
    )

  specs = [share.spec(o) for _, o in nodes]
  stats = [share.spec(o) for o in (out_own, stat_own, stat_own)]
  slopes = tuple(share.spec(o) if share.has(o) else PartitionSpec(share.axis) for _, o in floats)
  forward = share.over(part_forward, specs, tuple(stats))
  pulled = share.over(part_backward, [*stats, stats[0], *specs], slopes)

  def backward(saved: Any, cotangent: Any) -> tuple[Any, ...]:
    given, *results = saved
    found = pulled(*results, share.by_heads(cotangent[0], out_own), *given)
    found = [
      share.by_positions(x, o) if share.has(o) else x.sum(0) for x, (_, o) in zip(found, floats, strict=True)
    ]
    return (*found, *[None] * len(others))

  @jax.custom_vjp
  def attention(*given: Any) -> list[Any]:
    return with_kept(*given)[0]

  def with_kept(*given: Any) -> tuple[list[Any], Any]:
    own = tuple(share.by_heads(x, o) for x, (_, o) in zip(given, nodes, strict=True))
    result, largest, total = forward(*own)
    return [share.by_positions(result, out_own)], (own, result, largest, total)

  attention.defvjp(with_kept, backward)

  def attention_by_blocks(*given: Any) -> list[Any]:
    return attention(*given)

  return attention_by_blocks, nodes


def _of_values(match: _Softmax, share: _Share) -> Labels:
  """The labels of the values: keys, and heads if they are split."""
  met: Any = meeting(match.product)
  own = {"shared": met.shared, "summed": met.summed}
  found = [
    (name, sides[1 - match.side][sides[match.side].index(dim)], factor)
    for name, dim, factor in _only(match.labels[0], share.column, share.dim)
    for sides in own.values()
    if dim in sides[match.side]
  ]
  return ordered(found)


def _wholes(labels: Labels, dims: Sequence[int]) -> list[int]:
  """The dims of the scores that are, or are part of, some dims."""
  return [name for name, dim, _ in labels if dim in dims and isinstance(name, int)]


def _order(match: _Softmax, placed: Mapping[Any, Any]) -> list[Any]:
  """The dims of a sum over the keys, or their factors, as far as the result of the product has them.

  Raises:
    _NotAttention: it has not all of them.
  """
  scores = match.exp.outvars[0].aval
  names, labels = named_dims(scores.shape)
  found: list[Any] = []
  for d in (d for d in names if isinstance(d, int) and d not in match.summed):
    own = [d] if d in placed else [name for name, dim, _ in labels if dim == d and name != d]
    if not own or any(name not in placed for name in own):
      raise _NotAttention(f"{_softmax(match)}: {described(match.product)} sums over its dim {d}")
    found += own
  return found


def _only(labels: Labels, *names: int) -> Labels:
  return tuple(label for label in labels if label[0] in names)
