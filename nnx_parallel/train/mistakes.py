"""Why the call of a compiled step failed, in terms of the module and the batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from nnx_parallel.core.checked import find_no_array
from nnx_parallel.core.mesh import is_explicit
from nnx_parallel.core.nodes import named_leaves
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.errors import NnxParallelError, TrainError
from nnx_parallel.train.binding import RESTORE, deleted, is_deleted, some_of

# As jax 0.10 and 0.12 say it, in Python and in XLA, at the dispatch of a program: nothing has run then.
_DELETED = re.compile(r"^Array has been deleted|Buffer has been deleted or donated\.?$")

_ARGUMENTS = TypeError, ValueError, OverflowError


def explain(error: BaseException, labels: Sequence[str], arrays: Sequence[AnyArray], batch: PyTree) -> None:
  """Explains a failed call from its arguments as they are after the call; a `TrainError` if they do."""
  # They do if an array was deleted before the call, is on other devices than the rest, or is not an array.
  # Otherwise, if the program has donated the arrays, the error gets a note that they are deleted.
  gone = [label for label, array in zip(labels, arrays, strict=True) if is_deleted(array)]
  problem: NnxParallelError | None = None
  if _DELETED.search(str(error)):
    problem = deleted(gone, len(labels)) if gone else _find_deleted(batch)
  elif isinstance(error, _ARGUMENTS) and not isinstance(error, TrainError) and not gone:
    problem = _find_misplaced(labels, arrays, batch)
    problem = problem or find_no_array(TrainError, "batch", batch) or _find_constraint_elsewhere(error)
  if problem is not None:
    raise problem from error
  if gone:
    error.add_note(
      f"The step was under way and had taken over its arrays: {some_of(gone, len(labels))} are lost.\n"
      f"  Fix: {RESTORE}."
    )


def _find_misplaced(labels: Sequence[str], arrays: Sequence[AnyArray], batch: PyTree) -> TrainError | None:
  """The error for an array on other devices than the model, if there is one."""
  meshes = [x.sharding.mesh for x in arrays if isinstance(getattr(x, "sharding", None), NamedSharding)]
  if not meshes:
    return None
  mesh = meshes[0]
  for label, array in zip(labels, arrays, strict=True):
    if _is_elsewhere(array, mesh):
      return TrainError(
        f"{label} is on {len(array.sharding.device_set)} device(s), and the model on {mesh.size}.",
        details=f"{label}: {array.sharding}; the model's mesh: {dict(mesh.shape)}",
        fix="write values in place, which keeps the layout: variable[...] = value.",
      )
  for name, array in named_leaves(batch):
    if _is_elsewhere(array, mesh):
      own: Any = getattr(array.sharding, "mesh", None)
      where = "" if own is None else f" (mesh {dict(own.shape)})"
      return TrainError(
        f"{name} is not on the model's mesh.",
        details=f"its devices {[d.id for d in _devices(array)]}{where},"
        f" the model's {[d.id for d in mesh.devices.flat]} (mesh {dict(mesh.shape)})",
        fix="nxp.shard_batch(batch, plan) with the plan of this model.",
      )
  return None


def _find_constraint_elsewhere(error: BaseException) -> TrainError | None:
  """The error for a sharding inside the program that is on other devices than its arguments."""
  said = str(error)
  if "incompatible devices" not in said or " inside jit " not in said:
    return None
  at = re.findall(r" at (\S+:\d+\S* \(.*?\))", said)
  return TrainError(
    f"the model states a sharding on other devices than its own{', at ' + at[-1] if at else ''}.",
    details=said.split("\n")[0],
    fix="jax.lax.with_sharding_constraint(x, PartitionSpec(...)), without a mesh, or nxp.constrain(x, ...):\n"
    "both take the mesh of the plan.",
  )


def _find_deleted(batch: PyTree) -> TrainError | None:
  for name, leaf in named_leaves(batch):
    if is_deleted(leaf):
      return TrainError(
        f"{name} was deleted: its memory was donated or freed before the step.",
        fix="make or fetch the batch again; a step does not donate its batch.",
      )
  return None


def _is_elsewhere(x: AnyArray, mesh: Any) -> bool:
  if not isinstance(x, jax.Array) or not x.committed:
    return False
  own, devices, where = _devices(x), [*mesh.devices.flat], x.sharding
  if not isinstance(where, NamedSharding):
    return {*own} != {*devices}
  # In mesh order: a program runs on one assignment of devices. Explicit axes are part of the type, too.
  return own != devices or (is_explicit(where.mesh) and where.mesh != mesh)


def _devices(array: jax.Array) -> list[Any]:
  """The devices of an array, in the order of its mesh, if it has one."""
  sharding: Any = array.sharding
  if isinstance(sharding, NamedSharding):
    mesh: Any = sharding.mesh  # of a live array, so it has devices
    return [*mesh.devices.flat]
  return sorted(sharding.device_set, key=lambda device: device.id)
