"""The last good state of a run in host memory, to which `fit(nonfinite="back")` goes back.

Each process keeps its own shards, each distinct shard once, beside the position of the run in its data. A run
that goes back trains on with the batches that follow, as if it had never seen the bad ones:

    step      1  2  3  4 | 3  4        the loss of step 4 is a NaN, step 2 was kept
    batch     a  b  c  d | e  f        c and d are left out
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from nnx_parallel.checkpoint.array_io import Box, box_of, unshared_zeros
from nnx_parallel.checkpoint.targets import flatten
from nnx_parallel.core.mesh import no_mesh
from nnx_parallel.core.nodes import is_key, key_implementation, value_of
from nnx_parallel.core.types import Model, Optimizers

EVERY = 100  # steps, where neither an evaluation nor a save comes before
_MOST = 3  # times to go back to one state: what comes behind it is then no matter of a few batches


@dataclasses.dataclass
class GoodState:
  """A copy of a live model and its optimizer at a step."""

  step: int
  stop: dict[str, Any]  # the state of the run's `EarlyStop` at that step
  times: int  # how often a run went back to this copy
  nbytes: int  # of host memory, on this process
  _put_back: Callable[[], object]

  @classmethod
  def of(cls, model: Model, optimizer: Optimizers, step: int, stop: Mapping[str, Any]) -> GoodState:
    """Copies the state; the arrays on the devices may be donated afterwards."""
    leaves, rebuild = flatten((model, optimizer))
    with no_mesh():
      copies = {
        name: _Copy.of(value)
        for name, leaf in leaves.items()
        if isinstance(value := value_of(leaf), jax.Array)
      }

    def put_back() -> None:
      with no_mesh():
        rebuild({name: kept.array() for name, kept in copies.items()})

    nbytes = sum(block.nbytes for kept in copies.values() for block in kept.blocks.values())
    return cls(step, copy.deepcopy(dict(stop)), 0, nbytes, put_back)

  @property
  def may_return(self) -> bool:
    """Whether a run may go back to this copy once more."""
    return self.times < _MOST

  def put_back(self) -> None:
    """Fills the live model and its optimizer; the copy stays."""
    self._put_back()
    self.times += 1


@dataclasses.dataclass(frozen=True)
class _Copy:
  """An array in host memory: its shards on this process, and how to make it again."""

  blocks: Mapping[Box, Any]
  data: jax.ShapeDtypeStruct  # of the words of keys, where it holds keys
  keys: tuple[str, jax.sharding.Sharding] | None  # their implementation and layout

  @classmethod
  def of(cls, array: jax.Array) -> _Copy:
    data, keys = array, None
    if is_key(array.dtype):
      data, keys = jax.random.key_data(array), (key_implementation(array.dtype), array.sharding)
    blocks: dict[Box, Any] = {}
    for shard in data.addressable_shards:
      if (box := box_of(shard.index, data.shape)) not in blocks:
        blocks[box] = unshared_zeros(shard.data.shape, data.dtype)
        blocks[box][...] = shard.data
    return cls(blocks, jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=data.sharding), keys)

  def array(self) -> jax.Array:
    shape, layout = self.data.shape, self.data.sharding
    made = jax.make_array_from_callback(shape, layout, lambda index: self.blocks[box_of(index, shape)])
    if self.keys is None:
      return made
    return jax.device_put(jax.random.wrap_key_data(made, impl=self.keys[0]), self.keys[1])
