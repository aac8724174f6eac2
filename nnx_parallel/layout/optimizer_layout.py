"""Which parameter an optimizer's array belongs to, and how it is laid out after it.

By path and shape only: nothing here knows the name of an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jax.sharding import PartitionSpec

from nnx_parallel.layout.variables import Path

if TYPE_CHECKING:
  from nnx_parallel.layout.plan import LeafPlan


def owner(path: Path, parameters: Mapping[Path, LeafPlan]) -> Path | None:
  """The parameter whose path ends this optimizer path: `opt_state.0.mu.up.kernel` -> `up.kernel`.

  Args:
    path: path inside the optimizer.
    parameters: the model's leaves by path.

  Returns:
    The longest such path, or None: a step counter, for example.
  """
  # A parameter's state may be a list: `opt_state.0.mu.up.kernel.1` belongs to `up.kernel` too.
  candidates = (part for whole in (path, path[:-1]) for part in (whole[i:] for i in range(len(whole))))
  return next((part for part in candidates if part in parameters), None)


def follow(parameter: LeafPlan, shape: tuple[int, ...]) -> tuple[PartitionSpec, tuple[int, ...], str]:
  """Lays an optimizer array out after its parameter.

  Same shape: the same spec (moments). Dims in front of the parameter's: those are whole (the history of
  L-BFGS). Some of the parameter's dims, in order: those keep their axes (the factored moments of Adafactor
  and SM3). Anything else is whole.

  Args:
    parameter: the parameter's row.
    shape: global shape of the optimizer's array, in elements.

  Returns:
    `(spec, padding, why)`.
  """
  own = parameter.shape
  if shape == own:
    return parameter.spec, parameter.padding, "same shape"
  extra = len(shape) - len(own)
  if extra > 0 and shape[extra:] == own:
    lead = (None,) * extra
    return (
      PartitionSpec(*lead, *parameter.spec),
      (0,) * extra + parameter.padding,
      f"{extra} dims in front",
    )
  kept = _subsequence(shape, own)
  if kept is not None:
    spec = PartitionSpec(*(parameter.spec[dim] if dim is not None else None for dim in kept))
    padding = tuple(parameter.padding[dim] if dim is not None else 0 for dim in kept)
    return spec, padding, f"factored {shape} of {own}"
  return (
    PartitionSpec(*([None] * len(shape))),
    (0,) * len(shape),
    f"whole: {shape} is not part of {own}",
  )


def _subsequence(shape: tuple[int, ...], own: tuple[int, ...]) -> list[int | None] | None:
  # Sizes of 1 stand for dims that were summed away, or for placeholders; they match no dim.
  kept: list[int | None] = []
  start = 0
  for size in shape:
    if size == 1:
      kept.append(None)
      continue
    dim = next((d for d in range(start, len(own)) if own[d] == size), None)
    if dim is None:
      return None
    kept.append(dim)
    start = dim + 1
  return kept
