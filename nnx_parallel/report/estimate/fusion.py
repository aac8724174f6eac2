"""The arrays of a trace that a compiler keeps in memory.

Compilers fuse an elementwise operation into the operation that reads it, and repeat it in the backward pass
rather than keep its result. They keep results of products, loops, gathers and reductions, and the operands of
products, which are in memory anyway. So where a trace saves `exp(logits)` in float32 and a mask of the
targets, the program keeps the logits.
Source: XLA's fusion passes; the figures are in `benchmarks/results/report_figures.md`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

from nnx_parallel.core.dims import ELEMENTWISE, PRODUCTS
from nnx_parallel.core.interpret import Facts, facts_of
from nnx_parallel.core.jaxprs import CALLS, called, inner_equations, nbytes, opened
from nnx_parallel.core.types import JaxprEqn, Program, Var

Variables = tuple[Any, ...]
_FUSED = ELEMENTWISE - {"name", "reduce_precision"} | {"broadcast_in_dim", "iota", "reshape", "squeeze"}
"""The argument of `checkpoint_name` may be kept, and the result of `reduce_precision` is stored as it is."""


def is_fused(eqn: JaxprEqn) -> bool:
  """Whether an operation is elementwise, or a function of such operations only (`jnp.where`)."""
  name = eqn.primitive.name
  if name in CALLS:
    return all(is_fused(inner) for inner in opened(called(eqn)).eqns)
  return name in _FUSED


def _is_product(eqn: JaxprEqn) -> bool:
  """Whether an operation is a product, or a function with a product (`jnp.einsum`)."""
  eqns = inner_equations(eqn) if eqn.primitive.name in CALLS else [eqn]
  return any(e.primitive.name in PRODUCTS for e in eqns)


def stored(jaxpr: Program, saved: Collection[Var]) -> list[Var]:
  """The variables of a jaxpr that a program keeps to recover the saved variables, except inputs.

  Operands of products stay. Other elementwise results are replaced by their sources if these, without the
  sources that are kept anyway, are no larger. Inputs of the trace cost nothing.
  """
  body = opened(jaxpr)
  sources = facts_of(jaxpr, [()] * len(body.invars), _SOURCES)
  read = {id(var) for eqn in body.eqns if _is_product(eqn) for var in eqn.invars}
  kept: dict[Var, None] = {var: None for var in saved if id(var) in read}
  for var in sorted((v for v in saved if v not in kept), key=lambda v: -nbytes(v.aval)):
    further = [source for source in sources[var] if source not in kept]
    kept |= dict.fromkeys(further if sum(nbytes(v.aval) for v in further) <= nbytes(var.aval) else [var])
  return list(kept)


def _sources_after(eqn: JaxprEqn, inputs: list[Variables]) -> list[Variables]:
  if eqn.primitive.name == "optimization_barrier":
    return inputs
  if is_fused(eqn):
    return [tuple(dict.fromkeys(itertools.chain(*inputs)))] * len(eqn.outvars)
  return [(var,) for var in eqn.outvars]


_SOURCES: Facts[Variables] = Facts(lambda _: (), _sources_after, lambda a, b: (*a, *b))
"""The results of operations that are not fused, from which a variable is computed."""
