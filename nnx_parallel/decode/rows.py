"""Finds the dim of each cache that holds the rows of the batch, in the trace of a call.

A cache of flax's attentions has one index for all rows. With the dims of the rows, `jax.vmap` calls the model
for each row separately: each row then has its own index, its own position, and any length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax

from nnx_parallel.attention.flow import Flow, flow_facts, follow_flows, unsplit
from nnx_parallel.core.interpret import facts_of, read
from nnx_parallel.core.jaxprs import open_jaxpr
from nnx_parallel.core.types import AnyArray, PyTree

_ROWS = "the rows"
"""Marks the dim of the rows, as a mesh axis that splits it would."""
_FACTS = flow_facts(functools.partial(follow_flows, batch=frozenset((_ROWS,))))


def dims_of_rows(
  call: Callable[..., Sequence[jax.Array]], tokens: AnyArray, caches: PyTree
) -> list[int | None]:
  """The dim of each cache of `call(tokens, caches)` that holds the rows; None for values that they share."""
  closed = jax.make_jaxpr(call)(tokens, caches)
  given = Flow(((_ROWS,), ()), data=True)
  flows = [unsplit(x) for x in caches]
  while True:  # a mark is never taken back, so this ends
    known = facts_of(closed, [given, *flows], _FACTS)
    after = [read(var, known, unsplit) for var in open_jaxpr(closed).outvars]
    joined = [_FACTS.join(old, new) for old, new in zip(flows, after, strict=True)]
    if joined == flows:
      return [next((d for d, marks in enumerate(flow.axes) if marks), None) for flow in flows]
    flows = joined
