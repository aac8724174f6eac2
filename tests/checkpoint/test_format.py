"""A step that an earlier version of this package wrote in format 5 is read, value by value.

`written/format5.zip` was made once, by `python -m checkpoint.test_format FOLDER` in `tests/`. If this test
fails, the format has changed: `manifest.FORMAT` needs a new number.
"""

import os
import sys
import zipfile
from pathlib import Path

if __name__ == "__main__":
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import NamedSharding, P

import nnx_parallel as nxp
from checkpoint.runs import flip
from nnx_parallel.errors import CheckpointError

WRITTEN = Path(__file__).with_name("written") / "format5.zip"
EXTRA, METRICS = {"data": {"position": 3}, "name": "é"}, {"loss": 0.5}


def model():
  """Leaves of each kind that the format encodes in its own way."""
  mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  kernel = np.arange(64, dtype=np.float32).reshape(8, 8) / 7
  return {
    "layers": [{"kernel": jax.device_put(kernel + n, NamedSharding(mesh, P("a", "b")))} for n in range(2)],
    "a name/with ü": jnp.arange(5, dtype=jnp.bfloat16),
    "key": jax.random.split(jax.random.wrap_key_data(np.array([1, 2], np.uint32)), 3),
    "int4": jnp.arange(-4, 4, dtype=jnp.int4), "float8": jnp.arange(4, dtype=jnp.float8_e4m3fn),
    "complex": np.array([1 + 2j, -3j], np.complex64), "truth": np.array([True, False]),
    "empty": np.zeros((0, 3), np.float16), "number": np.int32(-7),
  }  # fmt: skip


def optimizer():
  weights = {"w": jnp.linspace(0, 1, 6)}
  return optax.adam(1e-2).init(weights)


def plain(x):
  """An array as numpy has it; keys as their data."""
  x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  return np.asarray(x)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_step_of_format_5_is_read(tmp_path, devices):
  with zipfile.ZipFile(WRITTEN) as file:
    file.extractall(tmp_path)
  sharding = NamedSharding(nxp.make_mesh(a=devices, devices=jax.devices()[:devices]), P())
  wanted = model(), optimizer()
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), wanted)
  with nxp.Checkpointer(tmp_path) as checkpointer:
    assert not checkpointer.verify()
    found = checkpointer.restore(target)
    record = checkpointer.metadata()
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(plain(x), plain(y))
  assert (record.step, record.extra, record.metrics) == (7, EXTRA, METRICS)
  assert "layers.0.kernel" in record.items["model"].leaves


@pytest.mark.parametrize("name", ["layers.0.kernel/c/0/0", "layers.0.kernel/zarr.json"])
def test_damage_to_a_step_of_format_5_is_named(tmp_path, name):
  with zipfile.ZipFile(WRITTEN) as file:
    file.extractall(tmp_path)
  flip(tmp_path / "7" / "model" / name, bit=8 * 20 + 6)
  with nxp.Checkpointer(tmp_path) as checkpointer:
    for target, options in ((None, {"as_numpy": True}), (model(), {"optimizer": "drop"})):
      with pytest.raises(CheckpointError, match=r"step 7 is damaged: .*layers.0.kernel"):
        checkpointer.restore(target, **options)
    assert any("layers.0.kernel" in what for what in checkpointer.verify())


if __name__ == "__main__":
  with nxp.Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(7, model(), optimizer(), extra=EXTRA, metrics=METRICS)
