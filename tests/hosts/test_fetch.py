"""Anything comes to the host whole, as numpy, on one process and on two."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import NamedSharding, P

import nnx_parallel as nxp
from processes import run_two

MESH = {"data": 2, "fsdp": 4}


def _put(values: np.ndarray, *spec: str | None) -> jax.Array:
  return jax.device_put(values, NamedSharding(nxp.make_mesh(**MESH), P(*spec)))


def test_a_tree_keeps_its_structure_and_leaves_that_are_not_arrays():
  values = np.arange(32, dtype=np.float32).reshape(8, 4)
  tree = {"split": _put(values, "data", "fsdp"), "more": [(_put(values), None), "name", 3, values]}
  found = nxp.hosts.to_host(tree)
  assert type(found["split"]) is np.ndarray
  np.testing.assert_array_equal(found["split"], values)
  ((whole, nothing), name, number, same) = found["more"]
  np.testing.assert_array_equal(whole, values)
  assert (nothing, name, number) == (None, "name", 3)
  assert same is values


class Noisy(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.up = nnx.Linear(16, 8, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(self.up(x))


def test_modules_optimizers_states_and_variables():
  rules = nxp.fsdp(min_size=1)
  plan = nxp.plan(lambda: Noisy(nnx.Rngs(0)), nxp.make_mesh(**MESH), rules, optimizer=optax.adam(0.1))
  model, optimizer = nxp.create_sharded_model(plan)
  assert not model.up.kernel.get_value().sharding.is_fully_replicated
  expected = np.asarray(model.up.kernel.get_value())
  given = {"model": model, "state": nnx.state(model), "one": model.up.kernel, "opt": optimizer}
  found = nxp.hosts.to_host(given)
  for kernel in (found["model"]["up"]["kernel"], found["state"]["up"]["kernel"], found["one"]):
    assert type(kernel) is np.ndarray
    np.testing.assert_array_equal(kernel, expected)
  assert found["model"]["dropout"]["rngs"]["key"].dtype == np.uint32
  assert found["opt"]["step"] == 0
  assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found))


def test_what_was_fetched_outlives_the_donated_step():
  init = lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0))
  plan = nxp.plan(init, nxp.make_mesh(data=8), nxp.replicate(), optimizer=optax.sgd(0.1))
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(lambda model, x: (model(x) ** 2).mean())
  before = nxp.hosts.to_host(model)
  copy = jax.tree.map(np.copy, before)
  for _ in range(3):
    step(model, optimizer, nxp.shard_batch(np.ones((8, 16), np.float32), plan))
  np.testing.assert_array_equal(before["kernel"], copy["kernel"])
  assert not np.array_equal(nxp.hosts.to_host(model)["kernel"], copy["kernel"])


PROCESS = """
from flax import nnx

mesh = nxp.make_mesh(a=2, b=4)
values = np.arange(128, dtype=np.float32).reshape(8, 16)
keys = jax.jit(lambda: jax.random.split(jax.random.key(1), 8), out_shardings=NamedSharding(mesh, P("a")))()
tree = {
  "split": put(values, mesh, "a", "b"),
  "whole": put(values, mesh),
  "variable": nnx.Param(put(values, mesh, "b", "a")),
  "keys": keys,
}
assert not tree["split"].is_fully_addressable and not keys.is_fully_addressable
tree["local"] = jax.numpy.full((2,), process)
for active in (None, nxp.make_mesh(other=8, explicit=True)):
  with jax.set_mesh(active):
    found = nxp.hosts.to_host(tree)
  for name in ("split", "whole", "variable"):
    assert type(found[name]) is np.ndarray, name
    np.testing.assert_array_equal(found[name], values, err_msg=name)
  np.testing.assert_array_equal(found["keys"], jax.random.key_data(jax.random.split(jax.random.key(1), 8)))
  np.testing.assert_array_equal(found["local"], [process, process])
print("fetched")
"""


@pytest.mark.slow
def test_two_processes_each_get_everything():
  for out in run_two(PROCESS):
    assert "fetched" in out
