"""Fetching global arrays to numpy, on any number of processes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import no_mesh
from nnx_parallel.core.types import AnyArray, Leaf, PyTree
from nnx_parallel.errors import HostError
from nnx_parallel.hosts.agree import barrier


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
  arrays = jax.tree.map(_array_of, held)
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


def _array_of(leaf: Leaf) -> AnyArray:
  if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(leaf)
  return leaf


def _is_here(leaf: Leaf) -> bool:
  return isinstance(leaf, jax.Array) and (leaf.is_fully_addressable or leaf.is_fully_replicated)


def _gather(leaf: Leaf) -> AnyArray:
  if not isinstance(leaf, jax.Array):
    return leaf
  return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
