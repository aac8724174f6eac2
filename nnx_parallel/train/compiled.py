"""One jitted function, and a record of why each of its compilations happened."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from nnx_parallel.errors import TrainError

logger = logging.getLogger("nnx_parallel")

_SETTINGS = ("jax_enable_x64", "jax_numpy_dtype_promotion", "jax_default_matmul_precision", "jax_debug_nans")
Signature = dict[str, str]
"""Label -> type and layout, in words."""


@dataclasses.dataclass(frozen=True)
class Compile:
  """One compilation of a step.

  Attributes:
    step: the number of the call that needed it, counted from 0.
    reasons: what was new, one phrase each: an argument, its shape, dtype or layout, or a changed attribute.
  """

  step: int
  reasons: tuple[str, ...]

  def __str__(self) -> str:
    return f"call {self.step}: {'; '.join(self.reasons)}"


class Compiled:
  """A jitted `run(arrays, batch)` whose cache is watched.

  Args:
    run: the function to compile.
    labels: dotted paths of the arrays, for reasons and errors.
    donate: whether the arrays are donated.
    shardings: pinned output shardings of the first result, or None.

  Attributes:
    jitted: what `jax.jit` made; a step calls it directly.
    known: entries of jax's cache of it that were accounted for; `jitted._cache_size()` is more when something
      was compiled since `reasons`.
  """

  def __init__(self, run: Callable[..., Any], labels: Sequence[str], *, donate: bool, shardings: Any):
    self.labels = labels
    pinned: dict[str, Any] = {"out_shardings": (shardings, None)} if shardings is not None else {}
    self.jitted: Any = jax.jit(run, donate_argnums=(0,) if donate else (), **pinned)
    # `jitted._cache_size` is not kept: jax 0.10 cannot collect the cycle that this bound method closes.
    self.known = 0
    self._seen: list[Signature] = []

  def explain(self, error: Exception, arrays: list[Any]) -> None:
    """Raises a failure of the call that one array explains with that array's path.

    Args:
      error: what the call raised.
      arrays: the arrays of that call.

    Raises:
      TrainError: an array is deleted, or on other devices than the rest.
    """
    problem = self._problem(arrays)
    if problem is not None:
      raise problem from error

  def reasons(self, arrays: list[Any], batch: Any) -> tuple[str, ...] | None:
    """What was new in the call that made the cache grow.

    Args:
      arrays: the arrays of that call; donated ones still know their type.
      batch: its batch.

    Returns:
      Phrases; empty for the first compilation. None when nothing was compiled: jax adds a second entry for
      the same program when typed PRNG keys first take its fast path.
    """
    self.known = self.jitted._cache_size()
    now = signature(self.labels, arrays, batch)
    differences = [_difference(before, now) for before in self._seen]
    if not differences:
      self._seen.append(now)
      return ()
    least = min(differences, key=len)
    if not least:
      return None
    self._seen.append(now)
    return tuple(least)

  def _problem(self, arrays: list[Any]) -> TrainError | None:
    """The array that explains a failure of the call, if one does."""
    meshes = [x.sharding.mesh for x in arrays if isinstance(getattr(x, "sharding", None), NamedSharding)]
    for label, array in zip(self.labels, arrays, strict=True):
      if not isinstance(array, jax.Array):
        continue
      if array.is_deleted():
        return TrainError(
          f"{label} was deleted: its memory was donated to another computation.",
          details="a step donates the arrays of the module that it updates",
          fix="keep a copy of what another function donates: jax.tree.map(jnp.copy, nnx.state(model)).",
        )
      if meshes and array.committed and array.sharding.device_set != set(meshes[0].devices.flat):
        return TrainError(
          f"{label} lies on {len(array.sharding.device_set)} device(s), and the model on {meshes[0].size}.",
          details=f"{label}: {array.sharding}; the model's mesh: {dict(meshes[0].shape)}",
          fix="write values in place, which keeps the layout: variable[...] = value.",
        )
    return None


def signature(labels: Sequence[str], arrays: Sequence[Any], batch: Any) -> Signature:
  """Type and layout of every argument, by label, and what else jax compiles for."""
  found = {label: describe(array) for label, array in zip(labels, arrays, strict=True)}
  found["active mesh"] = str(dict(jax.sharding.get_abstract_mesh().shape))
  found |= {name: str(getattr(jax.config, name)) for name in _SETTINGS}
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    found[f"batch{jax.tree_util.keystr(path)}"] = describe(leaf)
  return found


def describe(x: Any) -> str:
  """`float32[8,16] P('data', None)`; what lies on one device says so, and host arrays give their type."""
  if not hasattr(x, "shape") or not hasattr(x, "dtype"):
    return type(x).__name__
  text = f"{x.dtype}[{','.join(map(str, x.shape))}]"
  if getattr(x, "weak_type", False):
    text += " weak"
  sharding = getattr(x, "sharding", None)
  if isinstance(sharding, NamedSharding):
    sizes = ",".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items())
    memory = f" in {sharding.memory_kind}" if sharding.memory_kind not in (None, "device") else ""
    return f"{text} {sharding.spec} on ({sizes}){memory}"
  if sharding is None:
    return f"{text} {type(x).__name__}"
  return f"{text} on {'a device' if getattr(x, 'committed', True) else 'no particular device'}"


def _difference(before: Signature, now: Signature) -> list[str]:
  return [
    f"{label}: {before.get(label, 'absent')} -> {now.get(label, 'absent')}"
    for label in dict.fromkeys([*before, *now])
    if before.get(label) != now.get(label)
  ]
