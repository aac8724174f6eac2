"""Sends arrays, or the values of a module, to devices of another mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, overload

import jax
from flax import nnx

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import no_mesh
from nnx_parallel.core.nodes import array_leaves, path_str
from nnx_parallel.core.shards import describe
from nnx_parallel.core.text import list_lines
from nnx_parallel.core.types import PyTree, Variable
from nnx_parallel.create.reshard import resize
from nnx_parallel.create.slices import put
from nnx_parallel.errors import HostError, ShardingError
from nnx_parallel.hosts.data import check_concrete, shard_batch
from nnx_parallel.layout.plan import Plan

M = TypeVar("M", bound=nnx.Module)


@overload
def send(source: nnx.Module, to: M) -> M: ...
@overload
def send(source: PyTree, to: Plan) -> PyTree: ...
@check_arguments(HostError)
def send(source: PyTree, to: nnx.Module | Plan) -> PyTree:
  """Sends arrays, or the values of a module, to the devices of another mesh.

  Models of one job may live on meshes with different devices: a teacher and a student, a trainer and a
  sampler. Each has its own plan and its own step, since one compiled program runs on one mesh. This function
  moves data between them.

  Args:
    source: a pytree of arrays, such as predictions, with the batch on dim 0; or a live module.
    to: for arrays, the plan of the model that reads the arrays; the arrays get the batch layout of this plan,
      as in `shard_batch`. For a module, a live module with the same Variables. These Variables get the
      values, and keep their sharding, dtype and padding; random state is not sent. Values are cast before
      they are sent.

  Returns:
    The arrays on the other mesh, or the module `to`.

  Raises:
    ShardingError: a Variable of `to` has no counterpart of its shape in `source`; the mesh axes do not divide
      a batch; `to` is neither a plan nor a module; the call is inside a compiled program; or a job of several
      processes would send arrays to other devices, which JAX does not support.

  Example:
    >>> import jax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> first, last = jax.devices()[:4], jax.devices()[4:]
    >>> init, rules = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0)), nxp.fsdp(min_size=8)
    >>> trainer = nxp.create_sharded_model(init, nxp.make_mesh(fsdp=4, devices=first), rules)
    >>> sampler = nxp.create_sharded_model(init, nxp.make_mesh(fsdp=4, devices=last), rules)
    >>> nxp.parallel.send(trainer, sampler) is sampler
    True
  """
  if isinstance(to, Plan) and not isinstance(source, nnx.Module):
    try:
      return shard_batch(source, to)
    except ValueError as error:
      if jax.process_count() == 1 or isinstance(error, ShardingError):
        raise
      raise _across_processes(str(error).split("\n")[0]) from error
  if not isinstance(to, nnx.Module) or not isinstance(source, nnx.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
    raise ShardingError(
      f"send(source, to) got a {type(source).__name__} and a {type(to).__name__}.",
      fix="nxp.parallel.send(arrays, plan), or nxp.parallel.send(module, other_module);\n"
      "nxp.reshard(module, plan) makes a new module.",
    )
  mine, theirs = _variables(source), _variables(to)
  for path, variable in (*mine.items(), *theirs.items()):
    check_concrete(path_str(path), variable.get_raw_value())
  if wrong := [
    f"{path_str(path)}: {describe(goal)}, in the source "
    + (describe(mine[path]) if path in mine else "missing")
    for path, goal in theirs.items()
    if path not in mine or tuple(mine[path].shape) != tuple(goal.shape)
  ]:
    raise ShardingError(
      f"{len(wrong)} Variables of the {type(to).__name__} are not in the {type(source).__name__}.",
      details=list_lines(wrong),
      fix="send between modules of one class and one configuration.",
    )
  held, wanted = ({d for path in theirs for d in x[path].get_raw_value().devices()} for x in (mine, theirs))
  if jax.process_count() > 1 and held != wanted:
    raise _across_processes(
      f"from {len(held)} devices to {len(wanted)}, {len(held & wanted)} of them the same"
    )
  with no_mesh():
    for path, goal in theirs.items():
      value, old = mine[path].get_raw_value(), goal.get_raw_value()
      if value.shape != old.shape:
        value = resize(value, tuple(goal.shape), tuple(old.shape))
      goal.set_raw_value(put(value.astype(old.dtype), old.sharding))
  return to


def _across_processes(details: str) -> ShardingError:
  return ShardingError(
    f"JAX cannot move arrays to other devices in a job of {jax.process_count()} processes.",
    details=details,
    fix="put both models on all devices, or save a checkpoint and restore it on the other mesh.",
  )


def _variables(module: nnx.Module) -> Mapping[tuple[object, ...], Variable]:
  """The Variables of a module that hold arrays, without random state."""
  return {
    path: leaf
    for path, leaf in array_leaves(module).items()
    if isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.RngState)
  }
