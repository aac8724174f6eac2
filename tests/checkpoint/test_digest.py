import math
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.checkpoint import digest as room
from nnx_parallel.checkpoint.digest import _digest_at, digest, digest_later
from nnx_parallel.checkpoint.relayout import without_padding

RNG = np.random.default_rng(0)


@pytest.fixture(params=["cpu", "accelerator"])
def platform(request, monkeypatch):
  """Runs a test a second time through the branches that GPUs and TPUs take."""
  if request.param == "accelerator":
    monkeypatch.setattr(room, "on_cpu", lambda _: False)


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
@pytest.mark.parametrize("gone", ["donated", "deleted"])
@pytest.mark.usefixtures("platform")
def test_later_is_the_same_when_the_array_is_gone(layout, gone):
  values = RNG.standard_normal((16, 24)).astype(np.float32)
  shape, names, spec, kind, memory = layout
  array = place(values, shape, names, spec, kind, **memory)
  later = digest_later(array)
  if gone == "donated":
    array = jax.jit(lambda x: x * 2, donate_argnums=0)(array)
    array.block_until_ready()
  else:
    array.delete()
  with ThreadPoolExecutor(1) as pool:
    assert pool.submit(later).result() == digest(values)()


def test_on_cpus_nothing_is_computed_at_once_and_a_piece_at_a_time_is_mixed(monkeypatch):
  sizes = []
  monkeypatch.setattr(room, "_digest_at", lambda part, *_: sizes.append(part.size) or 0)
  monkeypatch.setattr(room, "_PIECE", 20)
  array = place(RNG.standard_normal((16, 24)).astype(np.float32), (2, 4), ("a", "b"), P("b"))
  later = room.digest_later(array)
  assert not sizes
  later()
  assert sum(sizes) == array.size
  assert max(sizes) <= 20


def test_later_of_one_device_and_of_host_arrays():
  values = np.arange(24, dtype=np.float32)
  want = digest(values)()
  host = values.copy()
  laters = [digest_later(jax.device_put(values, jax.devices()[3])), digest_later(host)]
  host[:] = 0
  assert [later() for later in laters] == [want, want]


def test_odd_layouts_and_scalars():
  values = RNG.standard_normal((3, 5)).astype(np.float32)
  assert digest(place(values, (2, 4), ("a", "b"), P()))() == digest(values)()
  scalar = values[:1, 0].reshape(())
  assert digest(place(scalar, (2, 4), ("a", "b"), P()))() == digest(scalar)()


DTYPES = ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64", "float8_e5m2"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_host_and_device_agree_and_every_bit_counts(dtype):
  values = np.asarray(jnp.asarray(RNG.integers(0, 2, (5, 3)), jnp.int32).astype(dtype))
  whole = digest(values)()
  assert whole == digest(jnp.asarray(values))()
  for bit in RNG.integers(0, values.nbytes * 8, 20):
    damaged = np.frombuffer(values.tobytes(), np.uint8).copy()
    damaged[bit // 8] ^= 1 << (bit % 8)
    assert digest(damaged.view(values.dtype).reshape(values.shape))() != whole


def test_wide_host_arrays_have_digests_without_x64():
  values = np.arange(6, dtype=np.int64).reshape(2, 3)
  assert digest(values)() != digest(values.T.copy().reshape(2, 3))()


def test_scalars_have_digests():
  assert digest(jnp.float32(1.0))() != digest(jnp.float32(2.0))()
  assert digest(np.asarray(7, np.float32))() == digest(jnp.float32(7))() == 2787898301  # of the format


def test_padding_does_not_count():
  values = RNG.standard_normal((6, 10)).astype(np.float32)
  padded = place(np.pad(values, ((0, 2), (0, 6))), (2, 4), ("a", "b"), P("b", "a"))
  assert digest(padded, (6, 10))() == digest(values)()
  assert digest(padded)() != digest(values)()


def test_padding_is_cut_without_gathering():
  values = RNG.standard_normal((6, 8)).astype(np.float32)
  padded = place(np.pad(values, ((0, 2), (0, 0))), (8,), ("a",), P("a"))
  cut = without_padding(padded, (6, 8))
  np.testing.assert_array_equal(cut, values)
  assert cut.sharding.spec == P(None, "a")


@pytest.mark.cases(20)
@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("shape", [(16, 24), (3, 10, 7), (50,), (2, 3, 5)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padded_arrays_of_any_rank_have_the_digest_of_their_values(layout, shape):
  values = RNG.standard_normal(shape).astype(np.float32)
  mesh, names, spec, kind, memory = layout
  sizes = dict(zip(names, mesh, strict=True))
  parts = [math.prod(sizes[n] for n in (e if isinstance(e, tuple) else (e,))) if e else 1 for e in spec]
  parts = (parts + [1] * len(shape))[: len(shape)]
  padding = [(0, -size % part) for size, part in zip(shape, parts, strict=True)]
  placed = place(np.pad(values, padding), mesh, names, P(*spec[: len(shape)]), kind, **memory)
  assert digest(placed, shape)() == digest(values)()


def test_the_same_bit_of_several_elements_is_noticed():
  """What a stuck line or a dead memory cell does; many arrays at once, each with its own values."""
  bits = np.random.default_rng(1).integers(0, 2**32, (1 << 14, 8), np.uint32)
  every = jax.jit(jax.vmap(lambda row: _digest_at(row, [0], [8])))
  before = np.asarray(every(bits))
  for bit in range(32):
    for count in (2, 4, 8):
      damaged = bits.copy()
      damaged[:, :count] ^= np.uint32(1 << bit)
      same = before == np.asarray(every(damaged))
      assert not same.any(), f"bit {bit} of {count} words: {same.sum()} of {same.size} arrays pass"


@pytest.mark.parametrize("piece", [room._PIECE, 4000])
@pytest.mark.parametrize(
  ("shape", "dtype", "wanted"),
  [
    ((), "float32", 0),
    ((100003,), "float32", 1947352302),
    ((3, 70001), "bfloat16", 1992039),
    ((30000, 3), "int8", 764304521),
    ((300, 500), "bool", 897738958),
    ((5, 9, 4000), "complex64", 3214411766),
    ((40, 33, 60), "float64", 4002805900),
  ],
)
def test_digests_of_the_format_stay_as_they_are(monkeypatch, piece, shape, dtype, wanted):
  monkeypatch.setattr(room, "_PIECE", piece)
  count = np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(9)
  numbers = count.astype(np.float64).reshape(shape)
  values = numbers % 2 == 0 if dtype == "bool" else (numbers % 100).astype(jnp.dtype(dtype))
  assert digest(np.asarray(values))() == wanted
