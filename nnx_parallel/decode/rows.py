"""Finds the dim of each cache that holds the rows of the batch, in the trace of a call.

A cache of flax's attentions has one index for all rows. With the dims of the rows, `jax.vmap` calls the model
for each row separately: each row then has its own index, its own position, and any length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from nnx_parallel.attention.flow import Flow, meeting, result_axes
from nnx_parallel.core.interpret import DEFAULT, Facts, facts_of, read, wiring
from nnx_parallel.core.jaxprs import open_jaxpr
from nnx_parallel.core.types import AnyArray, JaxprEqn, PyTree

_ROWS = "the rows"
"""Marks the dim of the rows, as a mesh axis that splits it would."""


def dims_of_rows(
  call: Callable[..., Sequence[jax.Array]], tokens: AnyArray, caches: PyTree
) -> list[int | None]:
  """The dim of each cache of `call(tokens, caches)` that holds the rows; None for values that they share."""
  closed = jax.make_jaxpr(call)(tokens, caches)
  given = Flow(((_ROWS,), ()), data=True)
  flows = [_nothing(x) for x in caches]
  while True:  # a mark is never taken back, so this ends
    known = facts_of(closed, [given, *flows], _FACTS)
    after = [read(var, known, _nothing) for var in open_jaxpr(closed).outvars]
    joined = [_either(old, new) for old, new in zip(flows, after, strict=True)]
    if joined == flows:
      return [next((d for d, marks in enumerate(flow.axes) if marks), None) for flow in flows]
    flows = joined


def _nothing(x: jax.Array) -> Flow:
  return Flow(((),) * jnp.ndim(x), data=False)


def _either(one: Flow, other: Flow) -> Flow:
  return one if one.names else other


def _followed(eqn: JaxprEqn, flows: list[Flow]) -> Sequence[Flow]:
  if wiring(eqn).inner:
    return DEFAULT
  product, data = meeting(eqn), any(flow.data for flow in flows)
  if product is not None:
    return [Flow(product.meet(flows[0], flows[1], frozenset((_ROWS,))).axes, data)]
  return [Flow(axes, data) for axes in result_axes(eqn, flows)]


_FACTS = Facts(
  constant=_nothing,
  follow=_followed,
  join=_either,
  row=lambda _, flow: Flow(flow.axes[1:], flow.data),
  stack=lambda _, flow: Flow(((), *flow.axes), flow.data),
)
