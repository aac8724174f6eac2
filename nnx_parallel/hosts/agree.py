"""Barriers between processes, work for one process, and the arrays of all of them as NumPy arrays."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import no_mesh
from nnx_parallel.core.nodes import is_key
from nnx_parallel.core.processes import wait_for_all
from nnx_parallel.core.types import AnyArray, Leaf, PyTree
from nnx_parallel.errors import HostError


def main_process() -> bool:
  """Returns whether this is process 0, which prints, writes files and talks to other services.

  Do not make calls under `if main_process():` that all processes must make (steps, `to_host`,
  `Checkpointer.save`).

  Returns:
    True on process 0, and in a job of one process.

  Example:
    >>> import nnx_parallel as nxp
    >>> if nxp.hosts.main_process():
    ...   print("once")
    once
  """
  return jax.process_index() == 0


@check_arguments(HostError)
def barrier(name: str, *, timeout: float = 300) -> None:
  """Waits until all processes have called `barrier` with the same name the same number of times.

  The barrier does not wait for earlier work on the devices. In a job of one process, it returns immediately.

  Args:
    name: the reason for the wait. The error shows it if a process does not arrive.
    timeout: the time to wait in seconds, counted from the first process that waits. The runtime checks about
      once a second.

  Raises:
    HostError: a process did not arrive in time; the message names it. All processes that wait raise the
      error, and so do processes that arrive later.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.hosts.barrier("the data is there", timeout=60)
  """
  if jax.process_count() > 1:
    wait_for_all(name, timeout)


@check_arguments(HostError)
@no_mesh()
def to_host(tree: PyTree, *, timeout: float = 600) -> PyTree:
  """Fetches every array of `tree` as a complete NumPy array, on every process.

  Arrays with shards on other processes are gathered, so all processes must call this with the same tree, in
  the same order. All other arrays are copied without communication.

  Args:
    tree: a pytree of global arrays, such as metrics, gradients or a state; or a module or an optimizer, whose
      state is fetched. Leaves that are not arrays are returned unchanged.
    timeout: the time to wait for the other processes, in seconds, if an array is gathered.

  Returns:
    The same pytree, with NumPy arrays of the global shapes. A module, an optimizer or an `nnx.State` becomes
    nested dicts by path, and a Variable becomes its array. A typed PRNG key becomes its
    `jax.random.key_data`.

  Raises:
    HostError: a process did not arrive in time; the message names it.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    >>> model = nxp.create_sharded_model(init, nxp.make_mesh(data=8), nxp.fsdp("data", min_size=1))
    >>> arrays = nxp.hosts.to_host(model)
    >>> type(arrays["kernel"]).__name__, arrays["kernel"].shape
    ('ndarray', (16, 8))
  """
  held = jax.tree.map(_held, tree, is_leaf=lambda x: isinstance(x, (nnx.Pytree, nnx.State, nnx.Variable)))
  arrays = jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, held)
  here = jax.device_get([x for x in jax.tree.leaves(arrays) if _is_here(x)])
  fetched = iter(here)
  if any(isinstance(x, jax.Array) and not _is_here(x) for x in jax.tree.leaves(arrays)):
    barrier("to_host", timeout=timeout)
  return jax.tree.map(lambda x: next(fetched) if _is_here(x) else _gather(x), arrays)


def _held(node: PyTree) -> PyTree:
  if isinstance(node, nnx.Variable):
    return node.get_raw_value()
  if isinstance(node, nnx.Pytree):
    return nnx.to_pure_dict(nnx.state(node))
  return nnx.to_pure_dict(node) if isinstance(node, nnx.State) else node


def _is_key(leaf: Leaf) -> bool:
  return isinstance(leaf, jax.Array) and is_key(leaf.dtype)


def _is_here(leaf: Leaf) -> bool:
  return isinstance(leaf, jax.Array) and (leaf.is_fully_addressable or leaf.is_fully_replicated)


def _gather(leaf: Leaf) -> AnyArray:
  if not isinstance(leaf, jax.Array):
    return leaf
  return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
