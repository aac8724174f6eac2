"""One jitted function, and a record of why each of its compilations happened."""

from __future__ import annotations

import dataclasses
import logging
import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from nnx_parallel.core.text import few
from nnx_parallel.errors import TrainError
from nnx_parallel.layout.constrain import rules_in_scope

logger = logging.getLogger("nnx_parallel")

# As jax 0.10 and 0.12 say it, in Python and in XLA, at the dispatch of a program: nothing has run then.
_DELETED = re.compile(r"^Array has been deleted|Buffer has been deleted or donated\.?$")
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

  def explain(self, error: BaseException, arrays: Sequence[Any], batch: Any) -> None:
    """Says what a failed call means for the module, in its terms.

    Args:
      error: what the call raised.
      arrays: the arrays of the Variables, after it.
      batch: its batch.

    Raises:
      TrainError: the arguments explain the failure: an array was deleted before the call, lies on other
        devices than the rest, or is none. Otherwise, where the program has taken the arrays over, the error
        gets a note that they are gone.
    """
    gone = [label for label, array in zip(self.labels, arrays, strict=True) if is_deleted(array)]
    problem: TrainError | None = None
    if _DELETED.search(str(error)):
      problem = deleted(gone, len(self.labels)) if gone else _deleted_in(batch)
    elif isinstance(error, (TypeError, ValueError)) and not isinstance(error, TrainError) and not gone:
      problem = self._misplaced(arrays, batch) or _no_array(batch)
    if problem is not None:
      raise problem from error
    if gone:
      error.add_note(
        f"The step was under way and had taken over its arrays: {_some(gone, len(self.labels))} are lost.\n"
        f"  Fix: {_RESTORE}."
      )

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

  def _misplaced(self, arrays: Sequence[Any], batch: Any) -> TrainError | None:
    """The array that lies on other devices than the model, if there is one."""
    placed = [(label, x) for label, x in zip(self.labels, arrays, strict=True) if isinstance(x, jax.Array)]
    meshes = [x.sharding.mesh for _, x in placed if isinstance(x.sharding, NamedSharding)]
    mesh: Any = meshes[0] if meshes else None
    if mesh is None:
      return None
    # In their order: a program runs on one assignment of devices.
    devices = tuple(mesh.devices.flat)
    for label, array in placed:
      if array.committed and not _lies_on(array, devices):
        return TrainError(
          f"{label} lies on {len(array.sharding.device_set)} device(s), and the model on {mesh.size}.",
          details=f"{label}: {array.sharding}; the model's mesh: {dict(mesh.shape)}",
          fix="write values in place, which keeps the layout: variable[...] = value.",
        )
    for path, array in jax.tree_util.tree_leaves_with_path(batch):
      if isinstance(array, jax.Array) and array.committed and not _lies_on(array, devices):
        return TrainError(
          f"batch{jax.tree_util.keystr(path)} does not lie on the model's mesh.",
          details=f"its devices {_ids(array.sharding)}, the model's {[d.id for d in devices]}"
          f" (mesh {dict(mesh.shape)})",
          fix="nxp.shard_batch(batch, plan) with the plan of this model.",
        )
    return None


_RESTORE = "restore the last checkpoint: model, optimizer = nxp.Checkpointer(directory).restore(plan)"


def is_deleted(array: Any) -> bool:
  """Whether it is an array whose memory was donated or freed."""
  return isinstance(array, jax.Array) and array.is_deleted()


def deleted(labels: Sequence[str], count: int) -> TrainError:
  """The error of a call on a model whose arrays are gone.

  Args:
    labels: dotted paths of those that are gone.
    count: how many arrays the model and its optimizer have.

  Returns:
    What to raise.
  """
  return TrainError(
    f"{labels[0]} was deleted: its memory was donated to a step that failed, or to another function.",
    details=f"gone: {_some(labels, count)}",
    fix=f"{_RESTORE}.\n"
    "Keep a copy of what another function donates: jax.tree.map(jnp.copy, nnx.state(model)).",
  )


def _some(labels: Sequence[str], count: int) -> str:
  return f"{few(labels)} of {count} arrays"


def _deleted_in(batch: Any) -> TrainError | None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    if is_deleted(leaf):
      return TrainError(
        f"batch{jax.tree_util.keystr(path)} was deleted: its memory was donated or freed before the step.",
        fix="make or fetch the batch again; a step does not donate its batch.",
      )
  return None


def _no_array(batch: Any) -> TrainError | None:
  """The first leaf of a batch that jax cannot take, if there is one."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    dtype = getattr(leaf, "dtype", None)
    if isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "__jax_array__"):
      continue
    if dtype is None or (isinstance(leaf, (np.ndarray, np.generic)) and dtype.kind in "OSUMm"):
      kind = f"a {type(leaf).__name__}" + ("" if dtype is None else f" of {dtype}")
      return TrainError(
        f"batch{jax.tree_util.keystr(path)} is {kind}, which no program can take.",
        details=f"value {reprlib.repr(leaf)}",
        fix="give a step arrays of numbers only; keep names and texts beside the batch.",
      )
  return None


def _lies_on(array: jax.Array, devices: tuple[Any, ...]) -> bool:
  sharding: Any = array.sharding
  if isinstance(sharding, NamedSharding):
    return _in_order(sharding) == devices
  return sharding.device_set == set(devices)


def _in_order(sharding: NamedSharding) -> tuple[Any, ...]:
  mesh: Any = sharding.mesh  # of a live array, so it has devices
  return tuple(mesh.devices.flat)


def _ids(sharding: Any) -> list[int]:
  if isinstance(sharding, NamedSharding):
    return [device.id for device in _in_order(sharding)]
  return sorted(device.id for device in sharding.device_set)


def signature(labels: Sequence[str], arrays: Sequence[Any], batch: Any) -> Signature:
  """Type and layout of every argument, by label, and what else jax compiles for."""
  found = {label: describe(array) for label, array in zip(labels, arrays, strict=True)}
  found["rules in scope"] = str(rules_in_scope())
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
