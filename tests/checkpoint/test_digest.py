import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.checkpoint.digest import _digest_shards, digest, total
from nnx_parallel.checkpoint.placement import without_padding

RNG = np.random.default_rng(0)


def place(array, shape, names, spec, kind=AxisType.Auto, **memory):
  mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[: np.prod(shape)])
  return jax.device_put(array, NamedSharding(mesh, spec, **memory))


LAYOUTS = [
  ((8,), ("a",), P("a"), AxisType.Auto, {}),
  ((8,), ("a",), P(), AxisType.Auto, {}),
  ((2, 4), ("a", "b"), P("b", "a"), AxisType.Auto, {}),
  ((2, 4), ("a", "b"), P(None, ("a", "b")), AxisType.Explicit, {}),
  ((2, 2), ("x", "y"), P("y"), AxisType.Auto, {"memory_kind": "unpinned_host"}),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_does_not_matter(layout):
  values = RNG.standard_normal((16, 24)).astype(np.float32)
  shape, names, spec, kind, memory = layout
  assert total(digest(place(values, shape, names, spec, kind, **memory))) == total(digest(values))


def test_odd_layouts_and_scalars():
  values = RNG.standard_normal((3, 5)).astype(np.float32)
  assert total(digest(place(values, (2, 4), ("a", "b"), P()))) == total(digest(values))
  scalar = values[:1, 0].reshape(())
  assert total(digest(place(scalar, (2, 4), ("a", "b"), P()))) == total(digest(scalar))


def test_no_device_waits_for_another():
  array = place(np.ones((16, 8), np.float32), (2, 4), ("a", "b"), P("b"))
  text = _digest_shards(array.sharding, 2, (16, 8)).lower(array).compile().as_text()
  assert "all-" not in text
  assert "collective" not in text


DTYPES = ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64", "float8_e5m2"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_host_and_device_agree_and_every_bit_counts(dtype):
  values = np.asarray(jnp.asarray(RNG.integers(0, 2, (5, 3)), jnp.int32).astype(dtype))
  whole = total(digest(values))
  assert whole == total(digest(jnp.asarray(values)))
  for bit in RNG.integers(0, values.nbytes * 8, 20):
    damaged = np.frombuffer(values.tobytes(), np.uint8).copy()
    damaged[bit // 8] ^= 1 << (bit % 8)
    assert total(digest(damaged.view(values.dtype).reshape(values.shape))) != whole


def test_wide_host_arrays_have_digests_without_x64():
  values = np.arange(6, dtype=np.int64).reshape(2, 3)
  assert total(digest(values)) != total(digest(values.T.copy().reshape(2, 3)))


def test_scalars_have_digests():
  assert total(digest(jnp.float32(1.0))) != total(digest(jnp.float32(2.0)))


def test_padding_does_not_count():
  values = RNG.standard_normal((6, 10)).astype(np.float32)
  padded = place(np.pad(values, ((0, 2), (0, 6))), (2, 4), ("a", "b"), P("b", "a"))
  assert total(digest(padded, (6, 10))) == total(digest(values))
  assert total(digest(padded)) != total(digest(values))


def test_padding_is_cut_without_gathering():
  values = RNG.standard_normal((6, 8)).astype(np.float32)
  padded = place(np.pad(values, ((0, 2), (0, 0))), (8,), ("a",), P("a"))
  cut = without_padding(padded, (6, 8))
  np.testing.assert_array_equal(cut, values)
  assert cut.sharding.spec == P(None, "a")
