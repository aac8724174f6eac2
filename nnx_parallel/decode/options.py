"""The options of a generator, the arguments of its program, and a text about how it reads prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.decode.sampling import Sampling
from nnx_parallel.errors import DecodeError
from nnx_parallel.layers.layers import LayersUsed

Call = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of `generator`, checked."""

  max_new_tokens: int
  sampling: Sampling
  stop: tuple[Any, ...]
  padding: str
  call: Call
  cache: Callable[[int, int], PyTree] | None
  prefill: int
  slots: int | None

  def __post_init__(self) -> None:
    check_count("max_new_tokens", self.max_new_tokens)
    check_count("prefill", self.prefill)
    if self.slots is not None:
      check_count("slots", self.slots)
    wrong = [x for x in self.stop if isinstance(x, bool) or not isinstance(x, (int, np.integer))]
    if wrong:
      raise DecodeError(
        f"the stop token {wrong[0]!r} is a {type(wrong[0]).__name__}, and tokens are integers.",
        fix="stop=tokenizer.eos_token_id, or a sequence of such numbers.",
      )
    if self.padding not in ("right", "left"):
      raise DecodeError(f"padding={self.padding!r} is not a side.", fix='padding="right" or padding="left".')


def check_count(name: str, count: object) -> None:
  """Raises a `DecodeError` unless a number is a positive integer."""
  if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
    raise DecodeError(f"{name}={count!r} is out of range.", fix=f"{name}=1 or more, an integer.")


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
