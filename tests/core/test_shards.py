"""Functions of shards, layouts of arrays and parts of a batch, on Auto and on Explicit meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx_parallel as nxp
from nnx_parallel.core import shards

P = jax.P
X = np.arange(32.0, dtype=np.float32).reshape(8, 4)
KINDS = {"auto": False, "explicit": True}
each_kind = [pytest.mark.each_case, pytest.mark.parametrize("explicit", KINDS.values(), ids=KINDS)]


def both(test):
  for mark in each_kind:
    test = mark(test)
  return test


def mesh_of(explicit, **sizes):
  return nxp.make_mesh(sizes or {"data": 4, "tensor": 2}, explicit=explicit)


def put(mesh, spec, x=X):
  return jax.device_put(x, jax.NamedSharding(mesh, spec))


def spec_of(x):
  return P(*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec)))


def summed(x):
  """A sum over the devices of an axis, of the shard of each."""
  return jax.lax.psum(x.sum(0, keepdims=True), "data")


@both
@pytest.mark.parametrize("jitted", [False, True])
def test_a_function_of_shards_gets_those_of_the_axes_asked_for(explicit, jitted):
  mesh, seen = mesh_of(explicit), []

  def run(x):
    seen.append(x.shape)
    return summed(x)

  for axes, shape in ((None, (2, 4)), (["data"], (2, 4))):
    f = shards.on_shards(run, mesh, [P("data")], P(), axes)
    with jax.set_mesh(mesh):
      for spec in (P("data"), P("data", "tensor")):
        found = (jax.jit(f) if jitted else f)(put(mesh, spec))
        np.testing.assert_array_equal(found, X.sum(0, keepdims=True))
        assert seen[-1] == shape


@both
def test_arrays_come_to_the_layout_that_the_function_takes(explicit):
  mesh = mesh_of(explicit)
  f = shards.on_shards(lambda x, y: x + y, mesh, [P("data"), P("data")], P("data"))
  with jax.set_mesh(mesh):
    found = jax.jit(f)(put(mesh, P(None, "tensor")), put(mesh, P("data", "tensor")))
  np.testing.assert_array_equal(found, 2 * X)


def test_without_a_mesh_it_is_the_function_itself():
  assert shards.on_shards(summed, None, [], P()) is summed


@both
def test_its_arguments_may_be_trees(explicit):
  mesh = mesh_of(explicit)
  f = shards.on_shards(lambda tree, y: {"b": tree["a"] * y}, mesh, [P("data"), P()], P("data"))
  with jax.set_mesh(mesh):
    found = jax.jit(f)({"a": put(mesh, P("data"))}, jnp.float32(2))
  np.testing.assert_array_equal(found["b"], 2 * X)


def test_a_layout_is_in_the_type_on_explicit_axes_only():
  explicit, auto = mesh_of(True), mesh_of(False)
  x = put(explicit, P("data"))
  assert jax.typeof(shards.laid_out(x, explicit, P("tensor"))).sharding.spec == P("tensor", None)
  assert shards.laid_out(x, None, P("tensor")) is x
  y = put(auto, P("data"))
  assert shards.laid_out(y, auto, P("tensor")) is y


def test_axes_that_a_spec_does_not_cover_stay():
  mesh = mesh_of(True)
  x = put(mesh, P("tensor", "data"))
  moved = shards.laid_out(x, mesh, P("data"), axes=["data"])
  assert jax.typeof(moved).sharding.spec == P(("data", "tensor"), None)
  assert jax.typeof(shards.laid_out(x, mesh, P(), axes=["tensor"])).sharding.spec == P(None, "data")
  np.testing.assert_array_equal(moved, X)


@both
def test_a_pinned_array_has_the_sharding(explicit):
  mesh = mesh_of(explicit)
  where = jax.NamedSharding(mesh, P(None, "tensor"))
  with jax.set_mesh(mesh):
    found = jax.jit(lambda x: shards.pin(x, where))(put(mesh, P("data")))
  assert spec_of(found) == P(None, "tensor")
  np.testing.assert_array_equal(found, X)
  assert shards.pin(found, None) is found


def test_on_other_axes_a_pin_is_a_constraint():
  """Under Auto axes of the same mesh, as a step computes."""
  mesh = mesh_of(True)
  where = jax.NamedSharding(mesh, P("tensor"))
  run = shards.compute_on_auto_axes(lambda x: shards.pin(2 * x, where), mesh, lambda x: P("tensor"))
  with jax.set_mesh(mesh):
    found = jax.jit(run)(put(mesh, P("data")))
  assert spec_of(found) == P("tensor", None)
  np.testing.assert_array_equal(found, 2 * X)
  kept = jax.NamedSharding(mesh, P("data"), memory_kind="pinned_host")
  auto = shards.auto_sharding(kept)
  assert (auto.spec, auto.memory_kind) == (kept.spec, kept.memory_kind)
  assert set(auto.mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_results_of_auto_axes_get_their_types_back():
  mesh = mesh_of(True)

  def run(x, n):
    assert set(jax.sharding.get_abstract_mesh().axis_types) == {jax.sharding.AxisType.Auto}
    return {"dot": x @ x.T, "n": n + 1}

  changed = shards.compute_on_auto_axes(run, mesh, lambda results: {"dot": P(None, "data"), "n": P()})
  with jax.set_mesh(mesh):
    found = jax.jit(lambda x, n: jax.tree.map(lambda x: x * 1, changed(x, n)))(put(mesh, P("data")), 1)
  assert spec_of(found["dot"]) == P(None, "data")
  assert found["n"] == 2
  np.testing.assert_allclose(found["dot"], X @ X.T)


def test_the_explicit_part_of_a_spec():
  kinds = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
  mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=kinds)
  assert shards.explicit_part(P(("data", "tensor"), "tensor", None), mesh) == P("data", None, None)


@both
@pytest.mark.parametrize("spec", [P("data"), P(("data", "tensor")), P("data", "tensor"), P()])
def test_a_batch_is_split_and_joined_where_it_is(explicit, spec):
  """Each part has examples of every device, and nothing moves."""
  mesh = mesh_of(explicit, data=2, tensor=2, rest=2)
  x = put(mesh, spec)
  with jax.set_mesh(mesh):
    parts = jax.jit(lambda x: shards.split_batch(x, 2))(x)
    joined = jax.jit(shards.join_batch)(parts)
    text = jax.jit(lambda x: shards.split_batch(x, 2)).lower(x).compile().as_text()
  np.testing.assert_array_equal(parts, np.stack([X[::2], X[1::2]]))
  np.testing.assert_array_equal(joined, X)
  if explicit:
    assert jax.typeof(parts).sharding.spec == P(None, *spec, *[None] * (2 - len(spec)))
  assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))


def test_numbers_of_a_batch_are_given_to_each_part():
  np.testing.assert_array_equal(shards.split_batch(np.float32(3), 4), [3, 3, 3, 3])


def test_the_text_of_an_array_says_where_it_is():
  mesh = mesh_of(False)
  assert shards.describe(put(mesh, P("data"))) == f"float32[8,4] {P('data')} on (data=4,tensor=2)"
  assert shards.describe(jnp.float32(1)) == "float32[] on one device (uncommitted)"
  assert shards.describe(jax.device_put(X, jax.devices()[1])) == "float32[8,4] on one device"
  assert shards.describe(jnp.asarray(1.0)).startswith("float32[] weak on one device")
  assert shards.describe(X) == "float32[8,4] ndarray"
  assert shards.describe({"x": X}) == "a dict"
  assert shards.describe(3) == "an int"
