"""What donation asks of a step: to give away no array that somebody else holds, and to lose none on Ctrl-C.

`jax.jit` deletes the arrays that it is donated. Two things follow that only CPython can answer, and both
answers are in this file:

- `nnx.clone` shares arrays. An average kept beside the model, a value that was read before the step, a save
  that goes on in the background: each would be deleted under its holder. Code that keeps arrays is right with
  `nnx.jit`, which donates nothing by default, and jax does not tell who holds an array. Hence the reference
  count decides: an array that only its Variable holds is donated, another one is copied first. A count that
  is too large (a debugger holds frames) costs a copy, and changes no number.
- Python runs signal handlers between bytecodes, most likely when the long call of the program returns: its
  results would be gone, and the donated arrays with them. So one C call goes from the start of the program to
  the last array that is written back.
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
# Compiled once: an operation of jax.numpy by itself runs Python code of jax, which a signal may interrupt
# while it changes jax's own state.
_copied = jax.jit(jnp.copy)


def owned(variables: Sequence[Variable]) -> list[jax.Array]:
  """The arrays of the Variables, to be donated: copies of those that are held elsewhere too."""
  return [
    array if getrefcount(array) == _ALONE else _copied(array)
    for variable in variables
    for array in [variable.get_raw_value()]
  ]


def run(
  program: Callable[..., Iterable[PyTree]], variables: Sequence[Variable], *args: PyTree
) -> Iterator[PyTree]:
  """Runs a program and writes its first results into the Variables, all or none; returns the others."""
  results = chain.from_iterable(map(program, *[(arg,) for arg in args]))
  list(map(_SLOT.__set__, variables, results))
  return results


def separate(labels: Sequence[str], variables: Sequence[Variable]) -> None:
  """Gives each Variable its own buffers: one buffer cannot be donated twice."""
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
  """Whether the array that a Variable gives is the one in its slot, and not behind a reference."""
  return _SLOT.__get__(variable) is variable.get_raw_value()


def _count_when_alone() -> int:
  probe: Any = nnx.Variable(0)
  probe.set_raw_value(object())
  (count,) = [getrefcount(array) for variable in [probe] for array in [variable.get_raw_value()]]
  return count


_ALONE = _count_when_alone()
"""What `owned` counts for an array that only its Variable holds: measured, not assumed."""


def _pointer(value: jax.Array) -> Any:
  if is_key(value.dtype):
    value = jax.random.key_data(value)
  shards = value.addressable_shards
  if not shards or not value.size:
    return id(value)
  return shards[0].device.id, shards[0].data.unsafe_buffer_pointer()
