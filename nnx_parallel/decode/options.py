"""The options of a generator, the arguments of its program, and a text about how it reads prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.decode.sampling import Sampling
from nnx_parallel.layers.layers import LayersUsed

Call = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of `generator`."""

  max_new_tokens: int
  sampling: Sampling
  stop: tuple[Any, ...]
  padding: str
  call: Call
  cache: Callable[[int, int], PyTree] | None
  prefill: int
  slots: int | None


class Args(NamedTuple):
  """The arrays that differ between calls; `lengths` is None if no prompt is padded."""

  prompts: AnyArray
  lengths: AnyArray | None
  requests: AnyArray
  key: AnyArray
  prefix: AnyArray | None = None

  @property
  def ahead(self) -> int:
    """The number of tokens ahead of each prompt."""
    return 0 if self.prefix is None else self.prefix.shape[0]


@dataclasses.dataclass
class Used(LayersUsed):
  """How a generator computed its layers and read its prompts (nothing: token by token); print it."""

  prompts: str = ""

  def __str__(self) -> str:
    layers = super().__str__()
    return f"prompts: {self.prompts}\nlayers: {layers}" if self.prompts else layers
