"""A constructor that holds arrays of one process is created on the devices of two."""

import pytest

from processes import run_two


@pytest.mark.slow
def test_arrays_and_keys_of_each_process_come_to_all_devices():
  body = """
    from flax import nnx

    class Holder(nnx.Module):
      def __init__(self):
        here = jax.local_devices()[0]
        self.table = nnx.Variable(jax.device_put(jax.numpy.arange(8.0), here))
        self.key = nnx.Variable(jax.device_put(jax.random.key(3), here))
        self.linear = nnx.Linear(8, 16, rngs=nnx.Rngs(0))  # of more floats than are tiny

    model = nxp.create_sharded_model(nxp.plan(Holder, nxp.make_mesh(data=8), nxp.fsdp("data", min_size=1)))
    found = nxp.hosts.to_host(model)
    assert not model.table.get_value().is_fully_addressable
    assert found["table"].tolist() == list(range(8))
    assert found["key"].tolist() == jax.random.key_data(jax.random.key(3)).tolist()
    assert np.array_equal(found["linear"]["kernel"], nnx.Linear(8, 16, rngs=nnx.Rngs(0)).kernel.get_value())
  """
  run_two(body)
