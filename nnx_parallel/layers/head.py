"""Computes a model's head and its loss by parts of the tokens, without an edit.

The head is the last product of the trace of a loss whose result goes through a softmax. Everything from it to
values without its columns (a token's loss, whether its largest logit is right) is evaluated for one part of
the tokens after another, forward and backward, so that the logits of all tokens never exist at once. Those
values are as before, and so is what the loss does with them: masks, sums, means, metrics.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from nnx_parallel.core.jaxprs import call_equation, flattened, without_unused
from nnx_parallel.core.tiles import (
  Grid,
  Labels,
  Node,
  Tiles,
  Untiled,
  filled,
  gradients,
  is_float,
  pushed,
)
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.attention import is_opened

_TOKENS = "tokens"


@dataclasses.dataclass(frozen=True)
class _Head:
  """The part of a flat program that is evaluated by parts.

  Attributes:
    product: that makes the logits.
    depends: the variables that depend on the logits, and these.
    rest: the operations that read or make some of those, but are not in the part.
    inside: the operations of the part.
    ends: the values that it makes for the rest.
  """

  product: Any
  depends: set[Any]
  rest: list[Any]
  inside: list[Any]
  ends: list[Any]


def check_parts(parts: int | None) -> int | None:
  """The option itself.

  Raises:
    TrainError: it is no positive number.
  """
  if parts is None or (type(parts) is int and parts > 0):
    return parts
  raise TrainError(f"loss_parts={parts!r} is not a positive number.", fix="loss_parts=8; None: in one piece.")


def in_parts(jaxpr: Any, parts: int) -> Any:
  """The closed trace of a loss with its head and the loss of each token computed in parts.

  Raises:
    TrainError: no head is found, or what is done with its logits is no function of each token.
  """
  flat: Any = flattened(jaxpr, is_opened)
  head = _head(flat.jaxpr, parts)
  tiles, ends = _tiled(flat.jaxpr, head, parts)
  function, leaves = _function(tiles, ends)
  new = call_equation(function, [var for var, _ in leaves], [var for var, _ in ends], head.product)
  gone = {id(eqn) for eqn in (*head.rest, *head.inside)}
  first = [eqn for eqn in flat.jaxpr.eqns if id(eqn) not in gone]
  return without_unused(flat.replace(jaxpr=flat.jaxpr.replace(eqns=[*first, new, *head.rest])))


def _size(var: Any) -> int:
  return math.prod(var.aval.shape)


def _head(body: Any, parts: int) -> _Head:
  products = [eqn for eqn in body.eqns if eqn.primitive.name == "dot_general"]
  for product in reversed(products):
    logits = product.outvars[0]
    depends, users = {logits}, [product]
    for eqn in body.eqns:
      if any(_in(var, depends) for var in eqn.invars):
        depends.update(eqn.outvars)
        users.append(eqn)
    if any(eqn.primitive.name == "exp" and _size(eqn.outvars[0]) == _size(logits) for eqn in users):
      return _bounded(body, product, depends, users, parts)
  raise TrainError(
    f"loss_parts={parts} finds no head in the loss.",
    details=f"a head is a product whose result goes through a softmax; the loss has {len(products)} products"
    " outside of its layers, and no such one",
    fix="logits = x @ weights and a cross-entropy of them in the loss function; or leave loss_parts out.",
  )


def _bounded(body: Any, product: Any, depends: set[Any], users: list[Any], parts: int) -> _Head:
  logits = product.outvars[0]

  def large(var: Any) -> bool:
    return _in(var, depends) and 2 * _size(var) >= _size(logits)

  returned = next((var for var in body.outvars if large(var)), None)
  if returned is not None:
    raise TrainError(
      f"loss_parts={parts} cannot be honoured: the loss returns {returned.aval.str_short()}.",
      details=f"it depends on the logits {logits.aval.str_short()}, and is as large as they are",
      fix="return sums over the tokens, or a number for each of them; or leave loss_parts out.",
    )
  inside: list[Any] = []
  wanted: set[Any] = set()
  for eqn in reversed(users):
    if any(map(large, (*eqn.invars, *eqn.outvars))) or not wanted.isdisjoint(eqn.outvars):
      inside.append(eqn)
      wanted.update(var for var in eqn.invars if _in(var, depends))
  inside.reverse()
  known = {id(eqn) for eqn in inside}
  rest = [eqn for eqn in users if id(eqn) not in known]
  read = {var for some in (*(eqn.invars for eqn in rest), body.outvars) for var in some if _in(var, depends)}
  ends = [out for eqn in inside for out in eqn.outvars if out in read]
  return _Head(product, depends, rest, inside, ends)


def _tiled(body: Any, head: _Head, parts: int) -> tuple[Tiles, list[Node]]:
  """The part as tiles of a dim of the tokens: of the last for which it works, and of dim 0 if of no other."""
  logits = head.product.outvars[0]
  shape = logits.aval.shape
  problem: Untiled | None = None
  for dim in (*range(len(shape) - 1, 0, -1), 0):
    length, factor = shape[dim], 1
    if length == 1:
      continue
    if dim == 0 and not length % parts:
      # Each part is spread over all examples, and so over all devices.
      length, factor = parts, length // parts
    count = min(parts, length)
    grid = Grid({_TOKENS: length}, {_TOKENS: -(-length // count)})
    try:
      labels = _labels(head, grid, ((_TOKENS, dim, factor),))
      cut = {*head.product.invars}
      tiles = Tiles(
        body, grid, lambda var, own, cut=cut: var in cut or not (own and 2 * _size(var) >= _size(logits))
        if var not in head.depends
        else False,
      )  # fmt: skip
      ends = [(var, labels[var]) for var in head.ends]
      for var, own in ends:
        tiles.need(var, own, head.depends.__contains__)
    except Untiled as error:
      problem = error if problem is None or dim != 0 else problem
      continue
    return tiles, ends
  raise TrainError(
    f"loss_parts={parts} cannot be honoured: the loss of a token depends on other tokens.",
    details=f"logits {logits.aval.str_short()}; " + (str(problem) if problem else "one token"),
    fix="reduce over the tokens after the loss of each; or leave loss_parts out.",
  )


def _labels(head: _Head, grid: Grid, first: Labels) -> dict[Any, Labels]:
  """Which dim of each value is that of the tokens.

  Raises:
    Untiled: an operation that mixes tokens.
  """
  labels: dict[Any, Labels] = {head.product.outvars[0]: first}
  for eqn in head.inside[1:]:
    found = {pushed(eqn, n, labels[v], grid.lengths) for n, v in enumerate(eqn.invars) if _in(v, labels)}
    if len(found) != 1 or not next(iter(found)):
      raise Untiled(eqn)
    labels.update(dict.fromkeys(eqn.outvars, found.pop()))
  return labels


def _function(tiles: Tiles, ends: list[Node]) -> tuple[Callable[..., Sequence[Any]], list[Node]]:
  """The part as a function of its leaves, and those."""
  grid = tiles.grid
  floats = [node for node in tiles.leaves if is_float(node[0].aval)]
  others = [node for node in tiles.leaves if not is_float(node[0].aval)]
  nodes = [*floats, *others]

  def values(places: Any, given: Sequence[Any], wanted: Sequence[Node]) -> list[Any]:
    known = dict(zip(nodes, given, strict=True))
    return [tiles.value(var, own, known, places) for var, own in wanted]

  def forward(*given: Any) -> list[Any]:
    def body(carry: list[Any], places: Any) -> tuple[list[Any], None]:
      found = values(
        places, [grid.take(x, own, places) for x, (_, own) in zip(given, nodes, strict=True)], ends
      )
      return [
        grid.put(x, new, own, places) for x, new, (_, own) in zip(carry, found, ends, strict=True)
      ], None

    start = [filled(var.aval, 0, var.aval.dtype) for var, _ in ends]
    return jax.lax.scan(body, start, grid.tiles())[0]

  def backward(given: Any, cotangent: Any) -> tuple[Any, ...]:
    arriving = [(g, node) for g, node in zip(cotangent[0], ends, strict=True) if is_float(node[0].aval)]
    wanted = [node for _, node in arriving]

    def part(places: Any, fixed: Sequence[Any], *tiles_of: Any) -> list[Any]:
      return values(places, [*tiles_of, *fixed], wanted)

    pairs = [(x, own) for x, (_, own) in zip(given, nodes, strict=True)]
    count = len(floats)
    cotangents = [(g, own) for g, (_, own) in arriving]
    return (*gradients(part, pairs[:count], pairs[count:], cotangents, grid), *[None] * len(others))

  @jax.custom_vjp
  def loss(*given: Any) -> list[Any]:
    return forward(*given)

  loss.defvjp(lambda *given: (forward(*given), given), lambda kept, *cotangent: backward(kept, cotangent))

  def loss_in_parts(*given: Any) -> list[Any]:
    return loss(*given)

  return loss_in_parts, nodes


def _in(var: Any, some: Any) -> bool:
  return not isinstance(var, core.Literal) and var in some
