"""Makes a mask of positions inside the layers that receive it, where its rule can be read.

Models often make one mask and hand it to each layer. A layer that is a program of its own (a marked call, a
checkpoint, a scan) then has it as an input, of which nothing is known: no tile of scores is hidden for sure.

    m = rows >= columns                        y = layer(x, m), in which the input m is not read, and
    y = layer(x, m)                     ->     m' = rows >= columns
    z = layer(y, m)                            z = layer(y, m)

A layer is changed only if all calls of its program receive the same mask, so that equal layers stay equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import jax.numpy as jnp
from jax.extend import core

from nnx_parallel.core.jaxprs import (
  among,
  change_params,
  dependents,
  is_checkpoint,
  is_marked,
  open_jaxpr,
  operations_behind,
  params_of,
  program_of,
  scan_counts,
)
from nnx_parallel.core.keys import identity
from nnx_parallel.core.types import Jaxpr, JaxprEqn, Program, Var


def sink_masks(body: Jaxpr) -> Jaxpr:
  """The same program, whose layers, checkpoints and scans make the masks of positions that they receive."""
  found = _masks(body)
  if not found:
    return body
  calls: dict[Hashable, list[JaxprEqn]] = {}
  for eqn in body.eqns:
    if _inputs(eqn):
      calls.setdefault(identity(program_of(eqn)) if is_marked(eqn) else id(eqn), []).append(eqn)
  changed: dict[int, JaxprEqn] = {}
  for eqns in calls.values():
    masks: dict[Var, int] = {}
    for number, (var, *others) in enumerate(zip(*map(_inputs, eqns), strict=True)):
      if among(var, found) and all(other is var for other in others):
        masks[var] = number
    if masks:
      program = _with_masks(program_of(eqns[0]), masks, operations_behind(body.eqns, masks))
      for eqn in eqns:
        changed[id(eqn)] = eqn.replace(params=change_params(eqn, {"jaxpr": program}))
  return body.replace(eqns=[changed.get(id(eqn), eqn) for eqn in body.eqns])


def _inputs(eqn: JaxprEqn) -> Sequence[Var]:
  """The inputs of an operation, from the first on, that its program has each time that it runs."""
  if eqn.primitive.name == "scan":
    return eqn.invars[: scan_counts(eqn).constants]
  return eqn.invars if is_marked(eqn) or (is_checkpoint(eqn) and "jaxpr" in params_of(eqn)) else ()


def _masks(body: Jaxpr) -> set[Var]:
  """The masks of positions that layers receive: they depend on no input, and a comparison made them."""
  given = dependents(body, [*body.invars, *body.constvars])
  inputs = {var for eqn in body.eqns for var in _inputs(eqn) if not isinstance(var, core.Literal)}
  found: set[Var] = set()
  for var in inputs - given:
    made = operations_behind(body.eqns, [var])
    # A table of floats that no comparison made, such as angles, stays what each layer reads.
    compared = any(out.aval.dtype == jnp.bool_ for eqn in made for out in eqn.outvars)
    if compared and not any(eqn.effects for eqn in made):
      found.add(var)
  return found


def _with_masks(program: Program, masks: Mapping[Var, int], made: Sequence[JaxprEqn]) -> Program:
  """A program that runs operations ahead of its own, and takes their results for its inputs `masks`."""
  inner = open_jaxpr(program)
  names = {var: inner.invars[number] for var, number in masks.items()}

  def renamed(some: Sequence[Var]) -> list[Var]:
    return [var if isinstance(var, core.Literal) else names.get(var, var) for var in some]

  ahead = [eqn.replace(invars=renamed(eqn.invars), outvars=renamed(eqn.outvars)) for eqn in made]
  unread = {number: var for var, number in masks.items()}
  invars = [unread.get(number, var) for number, var in enumerate(inner.invars)]
  inner = inner.replace(invars=invars, eqns=[*ahead, *inner.eqns])
  return inner if open_jaxpr(program) is program else program.replace(jaxpr=inner)  # pyright: ignore[reportAttributeAccessIssue]
