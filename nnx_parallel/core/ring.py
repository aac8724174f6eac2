"""A ring of devices, along a mesh axis that is manual: what each has visits the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Ring:
  """The devices of a mesh axis, each of which sends to the next one.

  Attributes:
    axis: the mesh axis.
    size: its size.
  """

  axis: str
  size: int

  def sent(self, tree: Any, by: int = 1) -> Any:
    """What the device `by` places before has."""
    if by % self.size == 0:
      return tree
    pairs = [(i, (i + by) % self.size) for i in range(self.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)

  def around(self, visit: Callable[[Any, Any, Any], Any], moving: Any, state: Any, hops: int) -> Any:
    """Visits what a device has, then what the device before it has, and so on.

    It is sent on before it is used, so that the next one arrives meanwhile.

    Args:
      visit: `(hop, moving, state) -> state`; `hop` is the int 0 at the first visit alone, which may change
        the structure of the state.
      moving: arrays of the device.
      state: before the first visit.
      hops: how many devices are visited, its own included.
    """
    following = moving if hops == 1 else self.sent(moving)
    state = visit(0, moving, state)
    if hops == 1:
      return state

    def body(carry: Any, hop: Any) -> tuple[Any, None]:
      moving, state = carry
      following = self.sent(moving)
      return (following, visit(hop, moving, state)), None

    if hops > 2:
      numbers = jnp.arange(1, hops - 1, dtype=jnp.int32)
      (following, state), _ = jax.lax.scan(body, (following, state), numbers)
    return visit(hops - 1, following, state)
