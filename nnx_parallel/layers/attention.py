"""Computes the attention of any model by blocks of its queries and keys, without an edit.

Attention is found in the trace of a loss: a product, whatever elementwise follows (a scale, masks, biases, a
soft cap, casts), `exp(x - max)`, its sum over the keys, and a product of the quotient with the values. It is
replaced by the same operations on blocks, with a running maximum and sum (arXiv:2112.05682, 2205.14135), so
that no array of the size queries x keys exists, forward or backward. Masks are made block by block too.
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
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec

from nnx_parallel.core.flow import meeting
from nnx_parallel.core.jaxprs import (
  CALLS,
  CHECKPOINTS,
  among,
  bind,
  call_equation,
  called,
  dependents,
  equations,
  flattened,
  identity,
  is_inexact,
  opened,
  without_unused,
)
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
  pushed,
  tied,
)
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.fused import Kernel, NotFused, by_kernel, kernel_in_use
from nnx_parallel.layers.mark import is_marked
from nnx_parallel.layout.constrain import manual_too

Attention = Literal["blocks", "fused"] | int | None
"""`"blocks"`, or the length of the blocks; `"fused"`: a kernel where there is one; None: as written."""
WORDS = ("blocks", "fused")
BLOCK = 512
_INNER = (*CALLS, *CHECKPOINTS, "scan", "while", "cond")
_PLACES = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose")
_SCALES = (*_PLACES, "neg")
_PASSED = (*_PLACES, "stop_gradient")
"""Operations between a maximum and where it is subtracted."""
_AXIS: contextvars.ContextVar[str | None] = contextvars.ContextVar("axis of the queries", default=None)


class _NotAttention(Exception):
  """Why a softmax is not computed by blocks."""


@dataclasses.dataclass(frozen=True)
class _Softmax:
  """An attention in a flat program.

  Attributes:
    exp: the exponential.
    largest: the maximum over the keys.
    total: the sum over the keys.
    product: of the weights and the values.
    side: which operand of the product the weights are.
    labels: dims of the weights, and of the product's result, in terms of those of the scores.
    zeros_too: whether a row of weights may be all zeros, in place of what has no sum.
  """

  exp: Any
  largest: Any
  total: Any
  product: Any
  side: int
  labels: tuple[Labels, Labels]
  zeros_too: bool

  @property
  def summed(self) -> tuple[int, ...]:
    """The dims of the scores that the softmax sums over."""
    return tuple(int(axis) for axis in self.total.params["axes"])


@contextlib.contextmanager
def queries_over(axis: str | None) -> Generator[None, None, None]:
  """Lets each device of a mesh axis compute by blocks the attention of its own queries."""
  token = _AXIS.set(axis)
  try:
    yield
  finally:
    _AXIS.reset(token)


@dataclasses.dataclass(frozen=True)
class _Share:
  """The queries that one device computes, of those that a mesh axis splits.

  Attributes:
    axis: the mesh axis; None: one device computes them all.
    size: of the axis.
    dim: the name of the queries' dim.
    block: the length of their blocks, which divides those of a device.
    mapped: mesh axes of an enclosing `jax.vmap`.
  """

  axis: str | None
  size: int
  dim: int
  block: int
  mapped: frozenset[str] = frozenset()

  def local(self, shape: Sequence[int], labels: Labels) -> tuple[int, ...]:
    """The shape of one device's part of an array."""
    own = {dim for name, dim, _ in labels if name == self.dim}
    return tuple(length // self.size if d in own else length for d, length in enumerate(shape))

  def spec(self, labels: Labels) -> PartitionSpec:
    """How an array is split."""
    dims = {dim: self.axis for name, dim, _ in labels if name == self.dim}
    return PartitionSpec(*[dims.get(d) for d in range(max(dims, default=-1) + 1)])

  def places(self, device: Any, places: Mapping[Any, Any], length: int) -> dict[Any, Any]:
    """The numbers of the blocks among those of all devices."""
    return {**places, self.dim: places[self.dim] + device * (length // self.size // self.block)}

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

  def has(self, labels: Labels) -> bool:
    """Whether an array is split; the others are whole on each device."""
    return self.axis is None or any(name == self.dim for name, _, _ in labels)


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
    fix='attention="blocks", or the length of the blocks: attention=256; "fused"; None: as written.',
  )


def by_blocks(jaxpr: Any, attention: Attention) -> tuple[Any, str]:
  """The trace of a loss with its attention by blocks or a kernel, and a line that says what was found.

  Raises:
    TrainError: none is found.
  """
  block: Any = attention if isinstance(attention, int) else BLOCK
  kernel = kernel_in_use() if attention == "fused" else None
  found: list[str | None] = []  # for each, why it has no kernel
  reasons: list[str] = []
  changed = _changed(jaxpr, (block, kernel), found, reasons, {})
  if not found:
    raise TrainError(
      f"attention={attention!r} finds no attention in the loss.",
      details="; ".join(dict.fromkeys(reasons)) or "no softmax is followed by a product with values",
      fix="softmax(q k^T) v with dropout off, in jax.numpy, jax.nn.dot_product_attention or"
      " nnx.dot_product_attention; or leave attention out.",
    )
  if attention != "fused":
    return changed, f"attention by blocks of {block}: {len(found)} found"
  if kernel is None:
    return changed, f"attention by blocks of {block}: {len(found)} found; no fused kernel for this platform"
  why = "; ".join(dict.fromkeys(reason for reason in found if reason is not None))
  line = f"attention by the fused kernel: {found.count(None)} of {len(found)} found"
  return changed, f"{line}; by blocks of {block}: {why}" if why else line


def _changed(
  jaxpr: Any,
  way: tuple[int, Kernel | None],
  found: list[str | None],
  reasons: list[str],
  layers: dict[Any, tuple[Any, Any]],
) -> Any:
  """The program with its attention computed another way. Equal layers get one program, which is made once."""
  before = len(found)
  flat: Any = flattened(jaxpr, is_opened)
  body = flat.jaxpr
  eqns: dict[int, Any] = {}
  for eqn in body.eqns:
    if eqn.primitive.name == "exp":
      for match in _attentions(body, eqn, reasons):
        try:
          new, why = _replaced(body, match, *way)
        except _NotAttention as problem:
          reasons.append(str(problem))
          continue
        found.append(why)
        if new is not None:
          eqns[id(match.product)] = new
    elif is_marked(eqn):
      layer, start = identity(called(eqn)), len(found)
      if layer not in layers:
        changed = _changed(called(eqn), way, found, reasons, layers)
        layers[layer] = changed, found[start:]
      else:
        found += layers[layer][1]
      eqns[id(eqn)] = eqn.replace(params=eqn.params | {"jaxpr": layers[layer][0]})
    elif eqn.primitive.name in _INNER:
      inside = {key: _inner(value, way, found, reasons, layers) for key, value in eqn.params.items()}
      eqns[id(eqn)] = eqn.replace(params=inside)
  if len(found) == before:
    return jaxpr
  body = without_unused(body.replace(eqns=[eqns.get(id(eqn), eqn) for eqn in body.eqns]))
  return flat.replace(jaxpr=body) if opened(jaxpr) is not jaxpr or flat.consts else body


def _inner(value: Any, *args: Any) -> Any:
  if isinstance(value, tuple):
    return tuple(_inner(item, *args) for item in value)
  return _changed(value, *args) if hasattr(opened(value), "eqns") else value


def is_opened(eqn: Any) -> bool:
  """Whether an operation is a call whose operations may be part of an attention."""
  name = eqn.primitive.name
  if name == "custom_jvp_call":  # jax.nn.softmax
    inside = {e.primitive.name for e in equations(eqn.params["call_jaxpr"])}
    return {"reduce_max", "exp", "reduce_sum"} <= inside
  return name in CALLS and not is_marked(eqn)


def _attentions(body: Any, exp: Any, reasons: list[str]) -> list[_Softmax]:
  """The products of values with the softmax that an exponential belongs to."""
  largest = _largest(body, exp)
  if largest is None:
    return []
  scores, shape = exp.outvars[0], exp.outvars[0].aval.shape
  axes = {int(axis) for axis in largest.params["axes"]}
  lengths, named = _named(shape)
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
          found.append(_Softmax(exp, largest, totals[0], eqn, side, given, zeros_too))
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
        problems.append(f"its weights go through {described(eqn)}")
  if len(totals) > 1:
    problems.append(f"its weights are summed {len(totals)} times")
    found = []
  if not found:
    reasons += [f"softmax of {exp.outvars[0].aval.str_short()}: {problem}" for problem in problems]
  return found


def _largest(body: Any, exp: Any) -> Any:
  """The maximum that is subtracted before an exponential, or None."""
  made = {out: eqn for eqn in body.eqns for out in eqn.outvars}
  difference = made.get(exp.invars[0])
  if difference is None or difference.primitive.name != "sub":
    return None
  var = difference.invars[1]
  while not isinstance(var, core.Literal) and (eqn := made.get(var)) is not None:
    name = eqn.primitive.name
    if name == "reduce_max":
      return eqn if eqn.invars[0].aval.shape == exp.outvars[0].aval.shape else None
    if name == "max" and isinstance(eqn.invars[0], core.Literal) and eqn.invars[0].val == -math.inf:
      var = eqn.invars[1]
    elif name in _PASSED:
      var = eqn.invars[0]
    else:
      return None
  return None


def _named(shape: Sequence[int]) -> tuple[dict[Any, int], Labels]:
  """The lengths and labels of the dims of the scores, and of their prime factors: `(dim, number)`.

  A dim that is split, such as heads into groups, is followed by its factors.
  """
  lengths: dict[Any, int] = {}
  labels: list[Any] = []
  for d, size in enumerate(shape):
    if size > 1:
      lengths[d] = size
      labels.append((d, d, 1))
    ahead, count = 1, 0
    for prime in range(2, size):
      while not size // ahead % prime:
        lengths[d, count] = prime
        labels.append(((d, count), d, ahead))
        ahead, count = ahead * prime, count + 1
  return lengths, tuple(labels)


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


def _replaced(body: Any, match: _Softmax, block: int, kernel: Kernel | None) -> tuple[Any, str | None]:
  """The operation that computes an attention, or None where one block holds it all; and why no kernel does.

  The reason is None where a kernel does.

  Raises:
    _NotAttention: it is none, or cannot be computed by blocks.
  """
  if kernel is None:
    return _blocked(body, match, block), ""
  try:
    return by_kernel(body, match, kernel), None
  except NotFused as problem:
    return _blocked(body, match, block), f"softmax of {match.exp.outvars[0].aval.str_short()}: {problem}"


def _blocked(body: Any, match: _Softmax, block: int) -> Any:
  """The operation that computes an attention by blocks; None where one block holds it all.

  Raises:
    _NotAttention: it is none, or cannot be.
  """
  weights, product = match.product.invars[match.side], match.product
  scores = match.exp.outvars[0]
  shape = scores.aval.shape
  lengths, _ = _named(shape)
  free = meeting(product).free[match.side]  # pyright: ignore[reportOptionalMemberAccess]
  rows = _wholes(match.labels[0], free)
  columns = [name for name, _, _ in match.labels[0] if name in match.summed]
  if not rows or not columns:
    raise _NotAttention(f"softmax of {scores.aval.str_short()}: it is not over keys for each query")
  row, column = max(rows, key=lengths.__getitem__), max(columns, key=lengths.__getitem__)
  sizes = {name: -(-lengths[name] // -(-lengths[name] // block)) for name in (row, column)}
  share = _shared(row, lengths[row], sizes[row])
  sizes[row] = share.block
  grid = Grid(lengths, sizes)
  cut = {match.largest.outvars[0], match.total.outvars[0]}
  depends = dependents(body, cut)

  def leaf(var: Any, own: Labels) -> bool:
    return var in cut or (var not in depends and {name for name, _, _ in own} != {row, column})

  tiles = Tiles(body, grid, leaf)
  own = tuple((name, name, 1) for name in sorted((row, column)))
  ends = [
    (match.largest.invars[0], own),
    (scores, own),
    (match.total.invars[0], own),
    (weights, _only(match.labels[0], row, column)),
  ]
  for var, labels in ends:
    try:
      tiles.need(var, labels, depends.__contains__)
    except Untiled as problem:
      raise _NotAttention(f"softmax of {scores.aval.str_short()}: its weights go through {problem}") from None
  _check_leaves(tiles, scores, {row, column})
  parts = [*(labels for _, labels in tiles.leaves), match.labels[1]]
  if share.axis is not None and any(name == row and f > 1 for labels in parts for name, _, f in labels):
    with queries_over(None):  # their dim is the minor one of several
      return _blocked(body, match, block)
  if all(sizes[name] == lengths[name] for name in sizes):
    return None
  function, leaves = _function(match, tiles, ends, share, column)
  return call_equation(function, [var for var, _ in leaves], product.outvars, product)


def _shared(row: int, length: int, block: int) -> _Share:
  """The queries of each device; all of them, unless an axis splits them evenly."""
  mesh: Any = jax.sharding.get_abstract_mesh()
  axis = _AXIS.get()
  kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  mapped = manual_too(mesh)
  if axis is None or axis in mapped or kinds.get(axis) != AxisType.Auto or length % mesh.shape[axis]:
    return _Share(None, 1, row, block)
  own = length // mesh.shape[axis]
  block = max(n for n in range(1, min(own, block) + 1) if not own % n)
  return _Share(axis, mesh.shape[axis], row, block, mapped)


def _check_leaves(tiles: Tiles, scores: Any, names: set[int]) -> None:
  """Refuses scores that no product makes, and parts of them that would be made whole."""
  text = f"softmax of {scores.aval.str_short()}"
  meets = [
    eqn
    for (_, labels), (eqn, wanted) in tiles.parts.items()
    if eqn.primitive.name == "dot_general" and len(labels) == 2 and all(len(own) == 1 for own in wanted)
  ]
  for var, labels in tiles.leaves:
    made = tiles.made(var)
    if made is None or {name for name, _, _ in labels} != names:
      continue
    if "random" in made.primitive.name or "threefry" in made.primitive.name:
      raise _NotAttention(f"{text}: dropout is between it and its product ({described(made)})")
    if math.prod(var.aval.shape) >= math.prod(scores.aval.shape):
      raise _NotAttention(f"{text}: {described(made)} cannot be evaluated by blocks")
  if not meets:
    raise _NotAttention(f"{text}: no product of queries and keys makes it")


def _function(
  match: _Softmax, tiles: Tiles, ends: Sequence[Node], share: _Share, column: int
) -> tuple[Callable[..., Sequence[Any]], list[Node]]:
  """The attention as a function of its leaves, and those."""
  row, product, side, axes = share.dim, match.product, match.side, match.summed
  length = tiles.grid.lengths[row]
  grid = Grid({**tiles.grid.lengths, row: length // share.size}, tiles.grid.blocks)  # of one device
  cut = {match.largest.outvars[0], match.total.outvars[0]}
  values = product.invars[1 - side]
  weights_labels = match.labels[0]
  (summed_w, summed_v) = meeting(product).summed[:: 1 if side == 0 else -1]  # pyright: ignore[reportOptionalMemberAccess]
  key_dim, key_factor = next((dim, factor) for name, dim, factor in weights_labels if name == column)
  at = summed_v[list(summed_w).index(key_dim)]
  value_node: Node = values, ((column, at, key_factor),)
  nodes = [node for node in tiles.leaves if node[0] not in cut]
  nodes += [] if value_node in nodes or isinstance(values, core.Literal) else [value_node]
  floats = [node for node in nodes if is_inexact(node[0].aval)]
  others = [node for node in nodes if not is_inexact(node[0].aval)]
  (largest_in, own), (scores, _), (total_in, _), (weights, weights_own) = ends
  out = product.outvars[0]
  out_own = _only(match.labels[1], row)
  kept = [d for d in range(len(scores.aval.shape)) if d not in axes]
  placed = {name: (dim, factor) for name, dim, factor in match.labels[1]}
  order = _order(match, placed)
  stat_own: Labels = ((row, kept.index(row), 1),)
  wide = jnp.promote_types(out.aval.dtype, jnp.float32)

  def exponentials(known: dict[Node, Any], largest: Any, total: Any, places: Any) -> tuple[Any, Any]:
    """The product of a tile's weights, and the sum of its exponentials."""
    for eqn, x in ((match.largest, largest), (match.total, total)):
      var = eqn.outvars[0]
      x = x.astype(var.aval.dtype)
      known.update({node: x for node in tiles.leaves if node[0] is var})
    known[scores, own] = tiles.grid.fresh(tiles.value(scores, own, known, places), own, places)
    part = tiles.value(total_in, own, known, places)
    pair = [
      tiles.value(weights, weights_own, known, places),
      known.get(value_node, getattr(values, "val", None)),
    ]
    made = bind(product, pair if side == 0 else pair[::-1], preferred_element_type=wide)
    return made[0].astype(wide), part.astype(wide).sum(axes)

  def spread(stat: Any, shape: Sequence[int]) -> Any:
    """A statistic of the rows, with the dims of the product's result."""
    sizes = [stat.shape[stat_own[0][1]] if name == row else tiles.grid.lengths[name] for name in order]
    arranged = sorted(order, key=lambda name: placed[name])
    stat = stat.reshape(sizes).transpose([order.index(name) for name in arranged])
    dims = {dim for dim, _ in placed.values()}
    return jnp.broadcast_to(stat.reshape([n if d in dims else 1 for d, n in enumerate(shape)]), shape)

  def part_of(aval: Any, labels: Labels, value: float) -> Any:
    """An array of one value, for the queries of a device."""
    return filled(aval.update(shape=share.local(aval.shape, labels)), value, wide)

  def part_forward(device: Any, *arrays: Any) -> tuple[Any, Any, Any]:
    rows = grid.tiles()
    *given, first, second = tied([*arrays, *rows.values()])

    def body(carry: tuple[Any, Any, Any], places: Any) -> tuple[tuple[Any, Any, Any], None]:
      known = {
        (var, o): grid.take(x, o, places) for (var, o), x in zip((*floats, *others), given, strict=True)
      }
      before, total = (grid.take(x, stat_own, places) for x in carry[:2])
      result = grid.take(carry[2], out_own, places)
      at = share.places(device, places, length)
      tile = tiles.value(largest_in, own, known, at).astype(wide)
      # The result does not depend on the maximum, so that its derivative is left out.
      top = jax.lax.stop_gradient(tiles.grid.fresh(tile, own, at, -math.inf).max(axes))
      after = jnp.maximum(before, top)
      part, more = exponentials(known, finite(after), jnp.ones_like(total), at)
      scale = jnp.exp(before - finite(after))
      changes = after, total * scale + more, result * spread(scale, result.shape) + part
      labels = stat_own, stat_own, out_own
      return tuple(
        grid.put(x, new, o, places) for x, new, o in zip(carry, changes, labels, strict=True)
      ), None  # pyright: ignore[reportReturnType]

    row_type = match.largest.outvars[0].aval
    start = (
      part_of(row_type, stat_own, -math.inf),
      part_of(row_type, stat_own, 0),
      part_of(out.aval, out_own, 0),
    )
    (largest, total, result), _ = jax.lax.scan(body, start, dict(zip(rows, (first, second), strict=True)))
    if match.zeros_too:
      total = jnp.where(total == 0, jnp.ones_like(total), total)
    return (result / spread(total, result.shape)).astype(out.aval.dtype), finite(largest), total

  def part_backward(device: Any, result: Any, largest: Any, total: Any, arriving: Any, *given: Any) -> Any:
    arriving = arriving.astype(wide)
    sloped = jax.linear_transpose(lambda x: spread(x, result.shape), total)(arriving * result.astype(wide))[0]
    first, rest = given[: len(floats)], given[len(floats) :]

    def part(places: Any, fixed: Sequence[Any], *tiles_of: Any) -> Sequence[Any]:
      *fixed, top, sums = fixed
      known = dict(zip((*floats, *others), (*tiles_of, *fixed), strict=True))
      return [*exponentials(known, top, sums, share.places(device, places, length))]

    inputs = [(x, o) for x, (_, o) in zip(first, floats, strict=True)]
    fixed = [(x, o) for x, (_, o) in zip(rest, others, strict=True)]
    cotangents = [(arriving, out_own), (-sloped / total, stat_own)]
    found = gradients(part, inputs, [*fixed, (largest, stat_own), (total, stat_own)], cotangents, grid)
    # What all devices read has a gradient from each, summed outside: XLA gathers the examples for a sum here.
    return tuple(x if share.has(o) else x[None] for x, (_, o) in zip(found, floats, strict=True))

  specs = [share.spec(o) for _, o in (*floats, *others)]
  stats = [share.spec(o) for o in (out_own, stat_own, stat_own)]
  slopes = tuple(share.spec(o) if share.has(o) else PartitionSpec(share.axis) for _, o in floats)
  forward = share.over(part_forward, specs, tuple(stats))
  pulled = share.over(part_backward, [*stats, stats[0], *specs], slopes)

  def backward(saved: Any, cotangent: Any) -> tuple[Any, ...]:
    given, *results = saved
    found = zip(pulled(*results, cotangent[0], *given), floats, strict=True)
    return (*(x if share.has(o) else x.sum(0) for x, (_, o) in found), *[None] * len(others))

  @jax.custom_vjp
  def attention(*given: Any) -> list[Any]:
    return [forward(*given)[0]]

  def with_kept(*given: Any) -> tuple[list[Any], Any]:
    result, largest, total = forward(*given)
    return [result], (given, result, largest, total)

  attention.defvjp(with_kept, backward)

  def attention_by_blocks(*given: Any) -> list[Any]:
    return attention(*given)

  return attention_by_blocks, [*floats, *others]


def _wholes(labels: Labels, dims: Sequence[int]) -> list[int]:
  """The dims of the scores that are, or are part of, some dims."""
  return [name for name, dim, _ in labels if dim in dims and isinstance(name, int)]


def _order(match: _Softmax, placed: Mapping[Any, Any]) -> list[Any]:
  """The dims of a sum over the keys, or their factors, as far as the result of the product has them.

  Raises:
    _NotAttention: it has not all of them.
  """
  scores = match.exp.outvars[0].aval
  names, labels = _named(scores.shape)
  found: list[Any] = []
  for d in (d for d in names if isinstance(d, int) and d not in match.summed):
    own = [d] if d in placed else [name for name, dim, _ in labels if dim == d and name != d]
    if not own or any(name not in placed for name in own):
      raise _NotAttention(
        f"softmax of {scores.str_short()}: {described(match.product)} sums over its dim {d}"
      )
    found += own
  return found


def _only(labels: Labels, *names: int) -> Labels:
  return tuple(label for label in labels if label[0] in names)
