"""Random numbers in manual code: each data shard draws different numbers, other shards draw the same."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import nnx

from nnx_parallel.core.checked import check_arguments, is_random_key
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import TrainError


@check_arguments(TrainError)
def fold_rng_over_axis(target: PyTree, axis: str | Sequence[str]) -> PyTree:
  """Gives each shard along a mesh axis its own random numbers, in the body of a `shard_map`.

  A replicated key, or a module that was passed in replicated, draws the same numbers on every shard. Folding
  the shard's index into the keys makes the draws differ along `axis`, and along no other axis.

  In jit on global arrays this is not needed: there, every layout draws the same numbers as one device.

  Args:
    target: a typed or raw PRNG key; or an `nnx.Rngs`, an `nnx.RngStream`, or a module with streams inside.
    axis: the mesh axis, or several axes, along which the draws differ; usually the batch axes.

  Returns:
    For a key, the folded key. For a module, a view of it: the Variables are the same (also the counters),
    except for the keys, which are folded copies. If you train or draw with the view, `target` changes too,
    but its keys stay replicated. So return or save `target`, and fold again in each step. A module without
    streams is returned as it is.

  Raises:
    TrainError: the call is not inside a `shard_map` over this axis, or the target is of another kind.

  Example:
    >>> import jax, nnx_parallel as nxp
    >>> mesh = nxp.make_mesh(data=4, tensor=2)
    >>> def body(key):
    ...   return jax.random.uniform(nxp.parallel.fold_rng_over_axis(key, "data"), (1, 1))
    >>> draw = jax.shard_map(body, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("data"))
    >>> len(set(draw(jax.random.key(0)).ravel().tolist()))
    4

  Source: the UvA deep-learning notebooks on training at scale, `fold_rng_over_axis`.
  """
  if not isinstance(target, (jax.Array, nnx.Pytree)) or (
    isinstance(target, jax.Array) and not is_random_key(target)
  ):
    raise TrainError(
      f"cannot fold a {type(target).__name__} over an axis: it is not a PRNG key.",
      fix="pass jax.random.key(...), an nnx.Rngs, or a module.",
    )
  index = _index(axis)
  if isinstance(target, jax.Array):
    return jax.random.fold_in(target, index)
  graphdef, keys, rest = nnx.split(target, nnx.RngKey, ...)
  flat = nnx.to_flat_state(keys)
  if not flat:
    return target
  folded = [(path, key.replace(_fold(key.get_value(), index))) for path, key in flat]
  return nnx.merge(graphdef, nnx.from_flat_state(folded), rest)


def _index(axis: str | Sequence[str]) -> jax.Array:
  axes = (axis,) if isinstance(axis, str) else tuple(axis)
  try:
    return jax.lax.axis_index(axes)
  except NameError as error:
    raise TrainError(
      f"cannot fold over {axis!r}: the code that runs here is not split along that axis by hand.",
      details=str(error).split("\n", 1)[0],
      fix="call it in the body of jax.shard_map over that axis; under plain jit each layout draws the same"
      " numbers as one device, without folding.",
    ) from error


def _fold(key: jax.Array, index: jax.Array) -> jax.Array:
  """Folds a key, or each key of an array of keys (streams that were split over layers)."""
  if not key.ndim:
    return jax.random.fold_in(key, index)
  flat = jax.vmap(lambda k: jax.random.fold_in(k, index))(key.reshape(-1))
  return flat.reshape(key.shape)
