"""Random numbers in manual code: each data shard draws its own. Layouts of jit: `tests/test_matrix.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P

import nnx_parallel as nxp

MESH = {"data": 4, "tensor": 2}


def drawn(draw, target):
  """What each shard draws, as (data, tensor, 16)."""
  body = lambda target: draw(target)[None, None]
  run = jax.shard_map(
    body, mesh=nxp.make_mesh(MESH), in_specs=P(), out_specs=P("data", "tensor"), check_vma=False
  )
  return np.asarray(jax.jit(run)(target))


def uniform(key):
  return jax.random.uniform(key, (16,))


TARGETS = {
  "typed key": (jax.random.key, uniform),
  "raw key": (jax.random.PRNGKey, uniform),
  "rngs": (nnx.Rngs, lambda rngs: uniform(rngs.dropout())),
  "stream": (lambda seed: nnx.Rngs(seed).dropout, lambda stream: uniform(stream())),
  "module": (lambda seed: nnx.Dropout(0.5, rngs=nnx.Rngs(seed)), lambda dropout: dropout(jnp.ones((16,)))),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", TARGETS)
def test_data_shards_differ_and_model_shards_agree(kind):
  make, draw = TARGETS[kind]
  target = make(0)
  if isinstance(target, nnx.Pytree):
    graphdef, target = nnx.split(target)
    restored = lambda state: nnx.merge(graphdef, state)
  else:
    restored = lambda key: key
  same = drawn(lambda t: draw(restored(t)), target)
  assert (same == same[0, 0]).all()  # the trap: every shard draws the same
  found = drawn(lambda t: draw(nxp.parallel.fold_rng_over_axis(restored(t), "data")), target)
  assert (found[:, 0] == found[:, 1]).all()
  assert len({row.tobytes() for row in found[:, 0]}) == 4
  both = drawn(lambda t: draw(nxp.parallel.fold_rng_over_axis(restored(t), ("data", "tensor"))), target)
  assert len({row.tobytes() for row in both.reshape(8, 16)}) == 8


def test_streams_split_over_layers_are_folded_one_by_one():
  rngs = nnx.Rngs(0)
  stream = rngs.dropout.split(3)
  graphdef, state = nnx.split(stream)

  def draw(state):
    return jax.vmap(uniform)(nxp.parallel.fold_rng_over_axis(nnx.merge(graphdef, state), "data").key[...])

  found = drawn(draw, state)
  assert len({row.tobytes() for row in found[:, 0].reshape(12, 16)}) == 12


@pytest.mark.auto_axes("its shard_map gets arrays of other types")
def test_the_module_keeps_its_keys_and_its_counters_advance():
  dropout = nxp.create_sharded_model(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nxp.make_mesh(MESH))
  key = jax.random.key_data(dropout.rngs.key[...])

  @nnx.jit
  @nnx.shard_map(mesh=nxp.make_mesh(MESH), in_specs=(P(), P("data")), out_specs=P("data"))
  def drop(dropout, x):
    return nxp.parallel.fold_rng_over_axis(dropout, "data")(x)

  first, second = (np.asarray(drop(dropout, jnp.ones((4, 32)))) for _ in range(2))
  assert len({row.tobytes() for row in [*first, *second]}) == 8
  assert (jax.random.key_data(dropout.rngs.key[...]) == key).all()
  assert int(dropout.rngs.count[...]) == 2
