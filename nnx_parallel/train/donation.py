"""Safe donation: a step deletes no array that other code holds, and loses none on Ctrl-C.

`jax.jit` deletes the arrays that it is donated. This has two consequences that only CPython can handle, and
this file handles both:

- `nnx.clone` shares arrays. An average kept with the model, a value that was read before the step, a save
  that runs in the background: donation would delete each array under its holder. Code that keeps arrays is
  correct with `nnx.jit`, which donates nothing by default, and jax does not say who holds an array. So the
  reference count decides: an array that only its Variable holds is donated; any other array is copied first.
  A count that is too large (a debugger holds frames) costs a copy, and changes no number.
- Python runs signal handlers between bytecodes, most likely when the long call of the program returns: its
  results would be lost, and the donated arrays too. So a single C call covers everything from the start of
  the program to the write-back of the last array.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from sys import getrefcount
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.core.nodes import is_key
from nnx_parallel.core.types import Leaf, PyTree, Variable

logger = logging.getLogger("nnx_parallel")

# The slot itself: `set_raw_value` is Python, which a signal can interrupt, and takes 4 us for each Variable.
_SLOT: Any = vars(nnx.Variable)["_raw_value"]
# Compiled once: a single jax.numpy operation runs Python code of jax, which a signal may interrupt while it
# changes jax's own state.
_copied = jax.jit(jnp.copy)


def owned(variables: Sequence[Variable]) -> list[jax.Array]:
  """The arrays of the Variables, to be donated: arrays that are also held elsewhere are copied."""
  return [
    array if getrefcount(array) == _ALONE else _copied(array)
    for variable in variables
    for array in [variable.get_raw_value()]
  ]


def run(
  program: Callable[..., Iterable[PyTree]], variables: Sequence[Variable], *args: PyTree
) -> Iterator[PyTree]:
  """Runs a program, writes all or none of its first results into the Variables, and returns the rest."""
  # `map` calls `program(*args)` when the first result is asked for, from C.
  results = chain.from_iterable(map(program, *[(arg,) for arg in args]))
  list(map(_SLOT.__set__, variables, results))
  return results


def separate(labels: Sequence[str], variables: Sequence[Variable]) -> None:
  """Gives each Variable separate buffers: a buffer cannot be donated twice."""
  first: dict[Hashable, str] = {}
  for label, variable in zip(labels, variables, strict=True):
    value = variable.get_raw_value()
    if not isinstance(value, jax.Array):
      continue
    where = _pointer(value)
    if where in first:
      logger.info("%s and %s shared one array; each has its own now", first[where], label)
      variable.set_raw_value(jnp.copy(value))
    first.setdefault(where, label)


def is_plain(variable: Leaf) -> bool:
  """Whether the array that a Variable returns is the array in its slot, and not behind a reference."""
  return _SLOT.__get__(variable) is variable.get_raw_value()


def _count_when_alone() -> int:
  probe: Any = nnx.Variable(0, hijax=False, ref=False)
  probe.set_raw_value(object())
  (count,) = [getrefcount(array) for variable in [probe] for array in [variable.get_raw_value()]]
  return count


_ALONE = _count_when_alone()
"""The reference count in `owned` of an array that only its Variable holds: measured, not assumed."""


def _pointer(value: jax.Array) -> Any:
  if is_key(value.dtype):
    value = jax.random.key_data(value)
  shards = value.addressable_shards
  if not shards or not value.size:
    return id(value)
  return shards[0].device.id, shards[0].data.unsafe_buffer_pointer()
